//! Fixed newstyle negotiation as a state machine without I/O.
//!
//! The caller feeds bytes to [`Handshake::step`] and sends what it appends to `output` before the
//! next step, so that a client which does not read its answers cannot make them pile up. One step
//! answers at most one option.
//!
//! ```text
//!            client flags          option            option ...        GO / EXPORT_NAME
//!  greeting ───────────▶ Options ─────────▶ Options ─────────▶ ... ───────────────────▶ Ready
//!                                    └ too long ▶ Skip ▶ Options       ABORT, nonsense ▶ Closed
//! ```
//!
//! Source: `doc/proto.md`, "Fixed newstyle negotiation" and "Option types".
//! Deliberately absent: TLS (refused by policy), `PEEK_EXPORT` and resizing (unknown options).

use super::codec::{
    CONTEXT_ALLOCATION, CONTEXT_ALLOCATION_ID, CONTEXT_DEPTH, CONTEXT_DEPTH_ID, OptionHeader,
    OptionReply, STRING_BYTES_MAX, encode_greeting, handshake_flag, info, option, option_reply,
    u16_at, u32_at,
};
use super::export::{Catalog, Listing};

/// The longest option data that is looked at, in bytes: a longest name and a dozen longest queries.
pub const OPTION_BYTES_MAX: usize = 64 << 10;

/// How replies are framed; each style includes the abilities of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplyStyle {
    /// One header, no chunks.
    Simple,
    /// Chunks with 32-bit lengths.
    Structured,
    /// Chunks and requests with 64-bit lengths.
    Extended,
}

/// The metadata contexts that a client has selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    /// `base:allocation`.
    pub allocation: bool,
    /// `qemu:allocation-depth`.
    pub depth: bool,
}

/// What a finished negotiation has agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The export's place in the [`Catalog`].
    pub export: usize,
    /// How replies are framed.
    pub style: ReplyStyle,
    /// What block status tells.
    pub contexts: Contexts,
}

/// What a step has led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Bytes are missing.
    NeedMore,
    /// Something was consumed; the next step may find more.
    Again,
    /// Transmission begins with the next byte.
    Ready(Agreement),
    /// The connection ends once the output is sent; why, unless the client asked for it.
    Close(Option<&'static str>),
}

#[derive(Clone, Copy, Debug)]
enum State {
    ClientFlags,
    Options,
    Skip { option: u32, left: u64 },
    Closed,
}

/// One connection's negotiation; see the module's head.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    fixed: bool,
    no_zeroes: bool,
    style: ReplyStyle,
    /// Selected for which export: a selection for another one does not count.
    selected: Option<(usize, Contexts)>,
}

/// A refusal of an option: the reply's kind and its message.
type Refusal = (u32, &'static str);

const BAD_LENGTH: Refusal =
    (option_reply::ERR_INVALID, "the option's data is shorter or longer than its fields");
const NO_SUCH_EXPORT: Refusal = (option_reply::ERR_UNKNOWN, "no export has this name");

impl Handshake {
    /// Begins a negotiation; the greeting is appended to `output`.
    pub fn begin(output: &mut Vec<u8>) -> Handshake {
        output.extend(encode_greeting(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES));
        Handshake {
            state: State::ClientFlags,
            fixed: false,
            no_zeroes: false,
            style: ReplyStyle::Simple,
            selected: None,
        }
    }

    /// Takes one step over the front of `input`. Returns how many bytes it consumed.
    pub fn step(&mut self, catalog: &Catalog, input: &[u8], output: &mut Vec<u8>) -> (usize, Step) {
        match self.state {
            State::ClientFlags => {
                let Some(bytes) = input.first_chunk::<4>() else { return (0, Step::NeedMore) };
                let flags = u32::from_be_bytes(*bytes);
                self.fixed = flags & u32::from(handshake_flag::FIXED_NEWSTYLE) != 0;
                self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
                if flags & !3 != 0 {
                    return self.close(4, Some("the client set unknown handshake flags"));
                }
                self.state = State::Options;
                (4, Step::Again)
            }
            State::Options => self.option(catalog, input, output),
            State::Skip { option, left } => {
                let skipped = left.min(input.len() as u64);
                let left = left - skipped;
                if left > 0 {
                    self.state = State::Skip { option, left };
                    return (skipped as usize, Step::NeedMore);
                }
                refuse(
                    output,
                    option,
                    (option_reply::ERR_TOO_BIG, "the option's data is too long"),
                );
                self.state = State::Options;
                (skipped as usize, Step::Again)
            }
            State::Closed => (0, Step::Close(None)),
        }
    }

    fn close(&mut self, consumed: usize, why: Option<&'static str>) -> (usize, Step) {
        self.state = State::Closed;
        (consumed, Step::Close(why))
    }

    fn option(&mut self, catalog: &Catalog, input: &[u8], output: &mut Vec<u8>) -> (usize, Step) {
        let Some(head) = input.first_chunk::<{ OptionHeader::BYTES }>() else {
            return (0, Step::NeedMore);
        };
        let Some(OptionHeader { option, length }) = OptionHeader::decode(head) else {
            return self.close(0, Some("an option does not begin with IHAVEOPT"));
        };
        if !self.fixed && option != option::EXPORT_NAME {
            return self.close(0, Some("the client did not ask for fixed newstyle"));
        }
        let length = length as usize;
        if length > OPTION_BYTES_MAX {
            if option == option::EXPORT_NAME {
                return self.close(0, Some("the export's name is too long"));
            }
            self.state = State::Skip { option, left: length as u64 };
            return (OptionHeader::BYTES, Step::Again);
        }
        let Some(data) = input[OptionHeader::BYTES..].get(..length) else {
            return (0, Step::NeedMore);
        };
        let consumed = OptionHeader::BYTES + length;
        let answer = match option {
            option::EXPORT_NAME => return self.export_name(catalog, data, consumed, output),
            option::ABORT => {
                reply(output, option, option_reply::ACK, &[]);
                return self.close(consumed, None);
            }
            option::LIST => list(catalog, data, output),
            option::STARTTLS if data.is_empty() => {
                Err((option_reply::ERR_POLICY, "this server has no TLS configured"))
            }
            option::STARTTLS => Err(BAD_LENGTH),
            option::INFO => self.info(catalog, option, data, output).map(|_| ()),
            option::GO => match self.info(catalog, option, data, output) {
                Ok(export) => {
                    reply(output, option, option_reply::ACK, &[]);
                    self.state = State::Closed;
                    return (consumed, Step::Ready(self.agree(export)));
                }
                Err(refusal) => Err(refusal),
            },
            option::STRUCTURED_REPLY => self.structured_reply(data),
            option::EXTENDED_HEADERS => self.extended_headers(data),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(catalog, option, data, output)
            }
            _ => Err((option_reply::ERR_UNSUP, "this server does not know the option")),
        };
        match answer {
            Ok(()) => reply(output, option, option_reply::ACK, &[]),
            Err(refusal) => refuse(output, option, refusal),
        }
        (consumed, Step::Again)
    }

    fn agree(&self, export: usize) -> Agreement {
        let selected = self.selected.filter(|(selected_for, _)| *selected_for == export);
        let contexts = selected.map(|(_, contexts)| contexts).unwrap_or_default();
        Agreement { export, style: self.style, contexts }
    }

    fn export_name(
        &mut self,
        catalog: &Catalog,
        name: &[u8],
        consumed: usize,
        output: &mut Vec<u8>,
    ) -> (usize, Step) {
        // This option has no way to say no but to hang up.
        if self.style == ReplyStyle::Extended {
            return self.close(consumed, Some("EXPORT_NAME after extended headers"));
        }
        let Some(export) = catalog.find(name) else {
            return self.close(consumed, Some("no export has the requested name"));
        };
        let listing = &catalog.listings()[export];
        output.extend(listing.size_bytes.to_be_bytes());
        output.extend(listing.flags(self.style >= ReplyStyle::Structured).to_be_bytes());
        if !self.no_zeroes {
            output.extend([0; 124]);
        }
        self.state = State::Closed;
        (consumed, Step::Ready(self.agree(export)))
    }

    /// Answers INFO and GO up to the final ACK.
    fn info(
        &self,
        catalog: &Catalog,
        option: u32,
        data: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<usize, Refusal> {
        // 0 name length:u32, the name, count:u16, then count requests:u16.
        let (name, rest) = take_string(data)?;
        let (count, requests) = rest.split_first_chunk::<2>().ok_or(BAD_LENGTH)?;
        if requests.len() != 2 * usize::from(u16::from_be_bytes(*count)) {
            return Err(BAD_LENGTH);
        }
        let export = catalog.find(name).ok_or(NO_SUCH_EXPORT)?;
        let listing = &catalog.listings()[export];
        let wants = |kind| requests.chunks_exact(2).any(|request| u16_at(request, 0) == kind);
        let mut tell = |kind: u16, facts: &[&[u8]]| {
            reply(
                output,
                option,
                option_reply::INFO,
                &[&[&kind.to_be_bytes()[..]], facts].concat(),
            );
        };
        if wants(info::NAME) {
            tell(info::NAME, &[listing.name.as_bytes()]);
        }
        if wants(info::DESCRIPTION) && !listing.description.is_empty() {
            tell(info::DESCRIPTION, &[listing.description.as_bytes()]);
        }
        // Told unasked too: whoever does not understand it skips it.
        let blocks = [1, listing.preferred_block, listing.transfer_max].map(u32::to_be_bytes);
        tell(info::BLOCK_SIZE, &[blocks.as_flattened()]);
        let flags = listing.flags(self.style >= ReplyStyle::Structured);
        tell(info::EXPORT, &[&listing.size_bytes.to_be_bytes(), &flags.to_be_bytes()]);
        Ok(export)
    }

    fn structured_reply(&mut self, data: &[u8]) -> Result<(), Refusal> {
        if !data.is_empty() {
            return Err(BAD_LENGTH);
        }
        match self.style {
            ReplyStyle::Simple => self.style = ReplyStyle::Structured,
            ReplyStyle::Structured => {
                return Err((option_reply::ERR_INVALID, "structured replies are on already"));
            }
            ReplyStyle::Extended => {
                return Err((option_reply::ERR_EXT_HEADER_REQD, "extended headers are on already"));
            }
        }
        Ok(())
    }

    fn extended_headers(&mut self, data: &[u8]) -> Result<(), Refusal> {
        if !data.is_empty() {
            return Err(BAD_LENGTH);
        }
        if self.style == ReplyStyle::Extended {
            return Err((option_reply::ERR_INVALID, "extended headers are on already"));
        }
        self.style = ReplyStyle::Extended;
        Ok(())
    }

    /// Answers LIST_META_CONTEXT and SET_META_CONTEXT up to the final ACK.
    fn meta_context(
        &mut self,
        catalog: &Catalog,
        option: u32,
        data: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let set = option == option::SET_META_CONTEXT;
        if set {
            // Whatever comes of this request, an earlier selection is gone.
            self.selected = None;
        }
        if self.style < ReplyStyle::Structured {
            return Err((option_reply::ERR_INVALID, "structured replies must be negotiated first"));
        }
        // 0 name length:u32, the name, count:u32, then count strings, each with its length:u32.
        let (name, rest) = take_string(data)?;
        let (count, mut rest) = rest.split_first_chunk::<4>().ok_or(BAD_LENGTH)?;
        let count = u32::from_be_bytes(*count);
        let export = catalog.find(name).ok_or(NO_SUCH_EXPORT)?;
        let all = Contexts { allocation: true, depth: true };
        let mut chosen = if count == 0 && !set { all } else { Contexts::default() };
        for _ in 0..count {
            let (query, after) = take_string(rest)?;
            rest = after;
            // A namespace alone asks what is in it; only a full name selects.
            chosen.allocation |=
                query == CONTEXT_ALLOCATION.as_bytes() || (!set && query == b"base:");
            chosen.depth |= query == CONTEXT_DEPTH.as_bytes() || (!set && query == b"qemu:");
        }
        if !rest.is_empty() {
            return Err(BAD_LENGTH);
        }
        let mut tell = |id: u32, name: &str| {
            reply(
                output,
                option,
                option_reply::META_CONTEXT,
                &[&id.to_be_bytes(), name.as_bytes()],
            );
        };
        if chosen.allocation {
            tell(if set { CONTEXT_ALLOCATION_ID } else { 0 }, CONTEXT_ALLOCATION);
        }
        if chosen.depth {
            tell(if set { CONTEXT_DEPTH_ID } else { 0 }, CONTEXT_DEPTH);
        }
        if set {
            self.selected = Some((export, chosen));
        }
        Ok(())
    }
}

fn list(catalog: &Catalog, data: &[u8], output: &mut Vec<u8>) -> Result<(), Refusal> {
    if !data.is_empty() {
        return Err(BAD_LENGTH);
    }
    for Listing { name, description, .. } in catalog.listings() {
        let length = (name.len() as u32).to_be_bytes();
        let data = [&length[..], name.as_bytes(), description.as_bytes()];
        reply(output, option::LIST, option_reply::SERVER, &data);
    }
    Ok(())
}

/// A string with its length (u32) in front, and what follows it.
fn take_string(data: &[u8]) -> Result<(&[u8], &[u8]), Refusal> {
    if data.len() < 4 {
        return Err(BAD_LENGTH);
    }
    let length = u32_at(data, 0) as usize;
    if length > STRING_BYTES_MAX {
        return Err((option_reply::ERR_TOO_BIG, "a string is longer than the protocol allows"));
    }
    data[4..].split_at_checked(length).ok_or(BAD_LENGTH)
}

fn reply(output: &mut Vec<u8>, option: u32, kind: u32, data: &[&[u8]]) {
    let length = data.iter().map(|part| part.len()).sum::<usize>() as u32;
    output.extend(OptionReply { option, kind, length }.encode());
    for part in data {
        output.extend_from_slice(part);
    }
}

fn refuse(output: &mut Vec<u8>, option: u32, (kind, message): Refusal) {
    reply(output, option, kind, &[message.as_bytes()]);
}

#[cfg(test)]
mod tests;
