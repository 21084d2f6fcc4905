//! Replies on their way out: encoded headers beside payloads that are never copied.
//!
//! Replies that finish in the same turn of the loop gather here and leave in one system call:
//!
//! ```text
//!  heads  | header header offset | header offset | header |
//!         └──────────┬───────────┴───────┬───────┴───┬────┘
//!  pieces            0: + payload        1: + payload  (trailing heads)
//! ```
//!
//! A grant of memory lives as long as the payload that it stands for.

use stillpoint_host::Part;
use stillpoint_io::Segments;

use super::budget::Grant;
use super::codec::{
    CONTEXT_ALLOCATION_ID, CONTEXT_DEPTH_ID, Chunk, Request, STRING_BYTES_MAX, SimpleReply, chunk,
};
use super::handshake::ReplyStyle;
use super::request::{Body, ContextRun, Failure};

/// Payloads shorter than this are copied beside their header: cheaper than a piece of their own.
const COPY_BYTES_MAX: usize = 1024;
/// How much memory for heads is kept between batches, in bytes.
const HEADS_KEPT_BYTES: usize = 64 << 10;

/// The end of one request.
pub(crate) struct Answer {
    pub(crate) request: Request,
    pub(crate) result: Result<Body, Failure>,
    pub(crate) grant: Option<Grant>,
}

/// A payload, and where in `heads` it stands.
struct Piece {
    heads_end: usize,
    payload: Segments,
    _grant: Option<Grant>,
}

/// See the module's head.
#[derive(Default)]
pub(crate) struct Outbox {
    heads: Vec<u8>,
    pieces: Vec<Piece>,
    reply_count: usize,
}

impl Outbox {
    /// How many replies wait in it.
    pub(crate) fn reply_count(&self) -> usize {
        self.reply_count
    }

    /// Whether nothing waits in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.reply_count == 0
    }

    /// Forgets all replies, and gives back their memory; keeps a little of its own for the next ones.
    pub(crate) fn clear(&mut self) {
        self.heads.clear();
        self.heads.shrink_to(HEADS_KEPT_BYTES);
        self.pieces.clear();
        self.reply_count = 0;
    }

    /// All bytes, in order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let mut heads_start = 0;
        let pieces = self.pieces.iter().flat_map(move |piece| {
            let heads = &self.heads[heads_start..piece.heads_end];
            heads_start = piece.heads_end;
            [Part::Bytes(heads), Part::Segments(&piece.payload)]
        });
        let trailing = &self.heads[self.pieces.last().map_or(0, |piece| piece.heads_end)..];
        pieces.chain((!trailing.is_empty()).then_some(Part::Bytes(trailing)))
    }

    /// Encodes a reply.
    pub(crate) fn push(&mut self, style: ReplyStyle, answer: Answer) {
        let Answer { request, result, grant } = answer;
        self.reply_count += 1;
        match result {
            // The protocol wants a read answered in the negotiated style; all else may be simple.
            Ok(Body::Done) if style <= ReplyStyle::Structured => {
                self.heads.extend(SimpleReply { error: 0, cookie: request.cookie }.encode());
            }
            Ok(Body::Done) => self.chunk(style, &request, chunk::NONE, true, 0),
            Ok(Body::Data(payload)) => {
                self.data(style, &request, &payload);
                self.payload(payload, grant);
            }
            Ok(Body::Status(runs)) => {
                self.status(style, &request, runs);
                // Long as a payload, though it lies in the heads: its memory counts until it is sent.
                self.piece(Segments::default(), grant);
            }
            Err(failure) => self.failure(style, &request, &failure),
        }
    }

    fn data(&mut self, style: ReplyStyle, request: &Request, payload: &Segments) {
        if style == ReplyStyle::Simple {
            self.heads.extend(SimpleReply { error: 0, cookie: request.cookie }.encode());
        } else if payload.is_empty() {
            self.chunk(style, request, chunk::NONE, true, 0);
        } else {
            self.chunk(style, request, chunk::OFFSET_DATA, true, 8 + payload.len() as u64);
            self.heads.extend(request.offset.to_be_bytes());
        }
    }

    fn payload(&mut self, payload: Segments, grant: Option<Grant>) {
        if payload.len() <= COPY_BYTES_MAX {
            let start = self.heads.len();
            self.heads.resize(start + payload.len(), 0);
            payload.copy_to(&mut self.heads[start..]);
        } else {
            self.piece(payload, grant);
        }
    }

    fn piece(&mut self, payload: Segments, grant: Option<Grant>) {
        self.pieces.push(Piece { heads_end: self.heads.len(), payload, _grant: grant });
    }

    fn status(&mut self, style: ReplyStyle, request: &Request, runs: [Option<Vec<ContextRun>>; 2]) {
        let mut left = runs.iter().flatten().count();
        for (id, runs) in [CONTEXT_ALLOCATION_ID, CONTEXT_DEPTH_ID].into_iter().zip(runs) {
            let Some(runs) = runs else { continue };
            left -= 1;
            let count = runs.len();
            if style == ReplyStyle::Extended {
                let length = 8 + 16 * count as u64;
                self.chunk(style, request, chunk::BLOCK_STATUS_EXT, left == 0, length);
                self.heads.extend(id.to_be_bytes());
                self.heads.extend((count as u32).to_be_bytes());
                for (length, flags) in runs {
                    self.heads.extend(length.to_be_bytes());
                    self.heads.extend(u64::from(flags).to_be_bytes());
                }
            } else {
                let length = 4 + 8 * count as u64;
                self.chunk(style, request, chunk::BLOCK_STATUS, left == 0, length);
                self.heads.extend(id.to_be_bytes());
                for (length, flags) in runs {
                    // A compact request asks for less than 4 GiB, and no run is longer.
                    self.heads.extend((length as u32).to_be_bytes());
                    self.heads.extend(flags.to_be_bytes());
                }
            }
        }
    }

    fn failure(&mut self, style: ReplyStyle, request: &Request, failure: &Failure) {
        let Failure { error, message } = failure;
        if style == ReplyStyle::Simple {
            self.heads.extend(SimpleReply { error: *error, cookie: request.cookie }.encode());
            return;
        }
        debug_assert!(message.len() <= STRING_BYTES_MAX);
        self.chunk(style, request, chunk::ERROR, true, 6 + message.len() as u64);
        self.heads.extend(error.to_be_bytes());
        self.heads.extend((message.len() as u16).to_be_bytes());
        self.heads.extend_from_slice(message.as_bytes());
    }

    fn chunk(&mut self, style: ReplyStyle, request: &Request, kind: u16, done: bool, length: u64) {
        let flags = if done { chunk::FLAG_DONE } else { 0 };
        let Request { cookie, offset, .. } = *request;
        let chunk = Chunk { flags, kind, cookie, offset, length };
        match style {
            ReplyStyle::Extended => self.heads.extend(chunk.encode_extended()),
            _ => self.heads.extend(chunk.encode_structured()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::codec::{command, u16_at, u32_at, u64_at};
    use crate::nbd::errors::NBD_EIO;

    const REQUEST: Request =
        Request { flags: 0, command: command::READ, cookie: 7, offset: 0x1000, length: 4096 };

    fn sent(style: ReplyStyle, result: Result<Body, Failure>) -> Vec<u8> {
        let mut outbox = Outbox::default();
        outbox.push(style, Answer { request: REQUEST, result, grant: None });
        let mut bytes = Vec::new();
        for run in outbox.parts() {
            match run {
                Part::Bytes(heads) => bytes.extend_from_slice(heads),
                Part::Segments(payload) => bytes.extend(payload.to_vec()),
            }
        }
        bytes
    }

    #[test]
    fn reads_are_answered_in_the_negotiated_style() {
        for length in [1, COPY_BYTES_MAX, COPY_BYTES_MAX + 1, 4096] {
            let data = || Ok(Body::Data(Segments::from_slice(&vec![9; length])));
            let simple = sent(ReplyStyle::Simple, data());
            assert_eq!((simple.len(), &simple[16..]), (16 + length, &vec![9; length][..]));
            let structured = sent(ReplyStyle::Structured, data());
            assert_eq!(u32_at(&structured, 16) as usize, 8 + length);
            assert_eq!((u64_at(&structured, 20), structured.len()), (0x1000, 28 + length));
            let extended = sent(ReplyStyle::Extended, data());
            assert_eq!((u64_at(&extended, 16), u64_at(&extended, 24)), (0x1000, 8 + length as u64));
            assert_eq!((u64_at(&extended, 32), extended.len()), (0x1000, 40 + length));
        }
        let empty = sent(ReplyStyle::Structured, Ok(Body::Data(Segments::default())));
        assert_eq!((u16_at(&empty, 6), empty.len()), (chunk::NONE, 20));
    }

    #[test]
    fn success_without_data_is_short() {
        assert_eq!(sent(ReplyStyle::Simple, Ok(Body::Done)).len(), 16);
        assert_eq!(sent(ReplyStyle::Structured, Ok(Body::Done)).len(), 16);
        assert_eq!(sent(ReplyStyle::Extended, Ok(Body::Done)).len(), 32);
    }

    #[test]
    fn failures_carry_number_and_words() {
        let failure = || Err(Failure { error: NBD_EIO, message: "why".into() });
        let simple = sent(ReplyStyle::Simple, failure());
        assert_eq!((simple.len(), u32_at(&simple, 4)), (16, NBD_EIO));
        let structured = sent(ReplyStyle::Structured, failure());
        assert_eq!((u16_at(&structured, 6), u32_at(&structured, 16)), (chunk::ERROR, 9));
        assert_eq!((u32_at(&structured, 20), &structured[24..]), (NBD_EIO, &b"\0\x03why"[..]));
    }

    #[test]
    fn each_context_has_its_chunk_and_the_last_one_ends_the_reply() {
        let runs = || Ok(Body::Status([Some(vec![(512, 3), (8, 0)]), Some(vec![(520, 1)])]));
        let compact = sent(ReplyStyle::Structured, runs());
        assert_eq!(compact.len(), 20 + 4 + 16 + 20 + 4 + 8);
        assert_eq!((u16_at(&compact, 4), u32_at(&compact, 20)), (0, CONTEXT_ALLOCATION_ID));
        assert_eq!(compact[24..40], [0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0, 0]);
        assert_eq!((u16_at(&compact, 44), u32_at(&compact, 60)), (1, CONTEXT_DEPTH_ID));
        let extended = sent(ReplyStyle::Extended, runs());
        assert_eq!(extended.len(), 32 + 8 + 32 + 32 + 8 + 16);
        assert_eq!((u32_at(&extended, 36), u64_at(&extended, 40)), (2, 512));
        let one = sent(ReplyStyle::Structured, Ok(Body::Status([None, Some(vec![(1, 1)])])));
        assert_eq!((u16_at(&one, 4), u32_at(&one, 20)), (1, CONTEXT_DEPTH_ID));
    }

    #[test]
    fn replies_keep_their_order_around_payloads() {
        let mut outbox = Outbox::default();
        let data = |byte| Ok(Body::Data(Segments::from_slice(&[byte; 2000])));
        for result in [Ok(Body::Done), data(1), data(2), Ok(Body::Done)] {
            outbox.push(ReplyStyle::Simple, Answer { request: REQUEST, result, grant: None });
        }
        let lengths: Vec<usize> = outbox
            .parts()
            .map(|run| match run {
                Part::Bytes(heads) => heads.len(),
                Part::Segments(payload) => payload.len(),
            })
            .collect();
        assert_eq!(lengths, [32, 2000, 16, 2000, 16]);
        assert_eq!(outbox.reply_count(), 4);
        outbox.clear();
        assert!(outbox.is_empty() && outbox.parts().next().is_none());
    }
}
