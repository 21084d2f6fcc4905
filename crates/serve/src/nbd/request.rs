//! One request: what is checked before it runs, and how it runs on a disk.
//!
//! [`check`] is the only validation between the wire and [`Disk`]; it is a pure function of the
//! request and the export. [`run`] is the road of every request: the two frequent ones in line, the
//! others boxed, so that the future that hundreds of slots hold stays small.
//!
//! Source: `doc/proto.md`, "Request types" and "Error values".

use std::sync::Arc;

use stillpoint_engine::{Disk, Zeroing};
use stillpoint_io::{Durability, Error, Kind, Queue, Result, Segments};

use super::codec::{Request, command, command_flag as flag, state_flag};
use super::errors::{self, error_of_kind};
use super::export::Listing;
use super::handshake::{Contexts, ReplyStyle};

/// How many extents one block status tells at most; a client asks again from where they end.
pub(crate) const EXTENTS_MAX: usize = 1024;
/// How often the disk is asked for one block status at most.
const STATUS_CALLS_MAX: usize = 4 * EXTENTS_MAX;
/// How much is read at once to warm a cache, in bytes.
pub(crate) const CACHE_STEP_BYTES: u64 = 256 << 10;

/// Why a request is answered with an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// One of [`errors`].
    pub(crate) error: u32,
    /// A few words for people.
    pub(crate) message: String,
}

impl Failure {
    fn new(error: u32, message: impl Into<String>) -> Failure {
        Failure { error, message: message.into() }
    }
}

/// A run of one metadata context: length in bytes, and flags or depth.
pub(crate) type ContextRun = (u64, u32);

/// What a request that went well is answered with.
#[derive(Debug)]
pub(crate) enum Body {
    /// Nothing but success.
    Done,
    /// The bytes read.
    Data(Segments),
    /// The runs of `base:allocation` and of `qemu:allocation-depth`, of those that were selected.
    Status([Option<Vec<ContextRun>>; 2]),
}

/// What all requests of one connection share.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) queue: Queue,
    pub(crate) disk: Arc<Disk>,
    pub(crate) listing: Listing,
    pub(crate) style: ReplyStyle,
    pub(crate) contexts: Contexts,
}

/// How many bytes of payload follow the header, wanted or not.
pub(crate) fn payload_bytes(request: &Request, style: ReplyStyle) -> u64 {
    let announced = style == ReplyStyle::Extended && request.flags & flag::PAYLOAD_LEN != 0;
    if request.command == command::WRITE || announced { request.length } else { 0 }
}

/// How many bytes of memory a checked request occupies until its reply is sent.
pub(crate) fn memory_bytes(request: &Request) -> u64 {
    match request.command {
        command::READ | command::WRITE => request.length,
        command::CACHE => request.length.min(CACHE_STEP_BYTES),
        command::BLOCK_STATUS => (4 * EXTENTS_MAX * size_of::<ContextRun>()) as u64,
        _ => 0,
    }
}

/// Whether `request` may run on an export; why not.
pub(crate) fn check(
    request: &Request,
    listing: &Listing,
    style: ReplyStyle,
    contexts: Contexts,
) -> Result<(), Failure> {
    let invalid = |message| Err(Failure::new(errors::NBD_EINVAL, message));
    let cmd = request.command;
    let known_flags = flag::FUA
        | match cmd {
            command::READ if style >= ReplyStyle::Structured => flag::DF,
            command::READ | command::FLUSH | command::TRIM | command::CACHE => 0,
            command::WRITE if style == ReplyStyle::Extended => flag::PAYLOAD_LEN,
            command::WRITE => 0,
            command::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS => flag::REQ_ONE,
            _ => return invalid("the server does not know the command"),
        };
    if request.flags & !known_flags != 0 {
        return invalid("the request has flags that its command does not take");
    }
    let writes = matches!(cmd, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if writes && listing.read_only {
        return Err(Failure::new(errors::NBD_EPERM, "the export is read-only"));
    }
    if matches!(cmd, command::READ | command::WRITE)
        && request.length > u64::from(listing.transfer_max)
    {
        return invalid("the request is longer than the advertised maximum");
    }
    if cmd == command::BLOCK_STATUS {
        if contexts == Contexts::default() {
            return invalid("no metadata context was negotiated");
        }
        if request.length == 0 {
            return invalid("a block status of no bytes");
        }
    }
    let end = request.offset.checked_add(request.length);
    if cmd != command::FLUSH && end.is_none_or(|end| end > listing.size_bytes) {
        let error = match cmd {
            command::WRITE | command::WRITE_ZEROES => errors::NBD_ENOSPC,
            _ => errors::NBD_EINVAL,
        };
        return Err(Failure::new(error, "the request reaches beyond the end of the export"));
    }
    Ok(())
}

/// Runs a checked request; `payload` is what a write writes.
pub(crate) async fn run(
    target: &Target,
    request: Request,
    payload: Segments,
) -> Result<Body, Failure> {
    let Target { queue, disk, .. } = target;
    let result = match request.command {
        _ if request.length == 0 && request.command != command::FLUSH => {
            // Nothing to do, but a read's answer has a body.
            return Ok(match request.command {
                command::READ => Body::Data(payload),
                _ => Body::Done,
            });
        }
        command::READ => {
            let into = Segments::alloc(request.length as usize);
            disk.read(queue, request.offset, into.clone()).await.map(|()| Body::Data(into))
        }
        command::WRITE => {
            let written = disk.write(queue, request.offset, payload, durability(&request)).await;
            written.map(|()| Body::Done)
        }
        _ => Box::pin(run_rare(target, request)).await,
    };
    result.map_err(|error| fail(&target.listing, &request, &error))
}

fn durability(request: &Request) -> Durability {
    match request.flags & flag::FUA {
        0 => Durability::Volatile,
        _ => Durability::Durable,
    }
}

async fn run_rare(target: &Target, request: Request) -> Result<Body> {
    let Target { queue, disk, .. } = target;
    let Request { offset, length, .. } = request;
    match request.command {
        command::FLUSH => disk.flush(queue).await?,
        command::TRIM => {
            disk.discard(queue, offset, length).await?;
            if durability(&request) == Durability::Durable {
                // ORDER: the discard has completed; the flush makes its effect durable, as FUA asks.
                disk.flush(queue).await?;
            }
        }
        command::WRITE_ZEROES => {
            let zeroing = Zeroing {
                unmap: request.flags & flag::NO_HOLE == 0,
                fast_only: request.flags & flag::FAST_ZERO != 0,
            };
            disk.write_zeroes(queue, offset, length, zeroing, durability(&request)).await?;
        }
        command::CACHE => warm(target, offset, length).await?,
        command::BLOCK_STATUS => return block_status(target, &request).await,
        _ => unreachable!("`check` lets no other command pass"),
    }
    Ok(Body::Done)
}

/// Reads the range and drops what was read: the caches on the way keep what they like. It is
/// advice, so no more than one longest transfer's worth is taken seriously.
async fn warm(target: &Target, offset: u64, length: u64) -> Result<()> {
    let end = offset + length.min(u64::from(target.listing.transfer_max));
    let buffer = Segments::alloc(length.min(CACHE_STEP_BYTES) as usize);
    let mut position = offset;
    while position < end {
        let step = (end - position).min(CACHE_STEP_BYTES);
        target.disk.read(&target.queue, position, buffer.slice(0..step as usize)).await?;
        position += step;
    }
    Ok(())
}

async fn block_status(target: &Target, request: &Request) -> Result<Body> {
    let extents_max = if request.flags & flag::REQ_ONE != 0 { 1 } else { EXTENTS_MAX };
    let contexts = target.contexts;
    let mut runs =
        [contexts.allocation.then(Vec::<ContextRun>::new), contexts.depth.then(Vec::new)];
    let mut position = request.offset;
    let end = request.offset + request.length;
    for _ in 0..STATUS_CALLS_MAX {
        let status = target.disk.status(&target.queue, position, end - position).await?;
        let length = status.length.clamp(1, end - position);
        let state = if status.data { 0 } else { state_flag::HOLE }
            | if status.zero { state_flag::ZERO } else { 0 };
        let depth = status.depth.map_or(0, |depth| depth + 1);
        let fits = runs.iter().zip([state, depth]).all(|(run, flags)| match run {
            Some(run) => run.len() < extents_max || run.last().is_some_and(|run| run.1 == flags),
            None => true,
        });
        if !fits {
            break;
        }
        for (run, flags) in runs.iter_mut().zip([state, depth]) {
            let Some(run) = run else { continue };
            match run.last_mut() {
                Some(last) if last.1 == flags => last.0 += length,
                _ => run.push((length, flags)),
            }
        }
        position += length;
        if position == end {
            break;
        }
    }
    Ok(Body::Status(runs))
}

/// Logs a failure with all that is known, and tells the client what it may know.
fn fail(listing: &Listing, request: &Request, error: &Error) -> Failure {
    let Request { command, offset, length, .. } = *request;
    match error.kind() {
        // The cause was logged when it happened; a guest may retry thousands of times.
        Kind::Latched | Kind::Unsupported | Kind::Cancelled => {
            tracing::debug!(export = listing.name, command, offset, length, "{error}");
        }
        _ => tracing::warn!(export = listing.name, command, offset, length, "{error}"),
    }
    let number = error_of_kind(error.kind());
    Failure::new(number, errors::describe(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::export::tests::listing;

    const SIZE: u64 = 1 << 20;
    const ALL: Contexts = Contexts { allocation: true, depth: true };

    fn request(command: u16, flags: u16, offset: u64, length: u64) -> Request {
        Request { flags, command, cookie: 1, offset, length }
    }

    fn error_of(request: &Request, style: ReplyStyle) -> u32 {
        check(request, &listing("disk"), style, ALL).map_or_else(|failure| failure.error, |()| 0)
    }

    #[test]
    fn each_command_takes_its_own_flags_only() {
        use ReplyStyle::{Extended, Simple, Structured};
        let table = [
            (command::READ, Simple, flag::FUA),
            (command::READ, Structured, flag::FUA | flag::DF),
            (command::READ, Extended, flag::FUA | flag::DF),
            (command::WRITE, Simple, flag::FUA),
            (command::WRITE, Structured, flag::FUA),
            (command::WRITE, Extended, flag::FUA | flag::PAYLOAD_LEN),
            (command::FLUSH, Simple, flag::FUA),
            (command::TRIM, Extended, flag::FUA),
            (command::CACHE, Extended, flag::FUA),
            (command::WRITE_ZEROES, Simple, flag::FUA | flag::NO_HOLE | flag::FAST_ZERO),
            (command::BLOCK_STATUS, Structured, flag::FUA | flag::REQ_ONE),
        ];
        for (command, style, allowed) in table {
            for bit in 0..16 {
                let expected = if allowed & (1 << bit) != 0 { 0 } else { errors::NBD_EINVAL };
                let request = request(command, 1 << bit, 0, 512);
                assert_eq!(error_of(&request, style), expected, "{command} {style:?} bit {bit}");
            }
        }
        for command in [command::DISC, 8, 9, u16::MAX] {
            assert_eq!(error_of(&request(command, 0, 0, 0), Extended), errors::NBD_EINVAL);
        }
    }

    #[test]
    fn ranges_end_where_the_export_ends() {
        use errors::{NBD_EINVAL, NBD_ENOSPC};
        for (command, beyond) in [
            (command::READ, NBD_EINVAL),
            (command::WRITE, NBD_ENOSPC),
            (command::TRIM, NBD_EINVAL),
            (command::CACHE, NBD_EINVAL),
            (command::WRITE_ZEROES, NBD_ENOSPC),
            (command::BLOCK_STATUS, NBD_EINVAL),
            (command::FLUSH, 0),
        ] {
            for (offset, length, expected) in [
                (0, SIZE, 0),
                (SIZE - 1, 1, 0),
                (SIZE - 1, 2, beyond),
                (SIZE, 1, beyond),
                (1 << 63, 1, beyond),
                ((1 << 63) - 1, 2, beyond),
                (u64::MAX, 1, beyond),
                (u64::MAX - 511, 512, beyond),
            ] {
                let request = request(command, 0, offset, length);
                assert_eq!(error_of(&request, ReplyStyle::Extended), expected, "{request:?}");
            }
        }
        let whole = request(command::WRITE_ZEROES, 0, 0, u64::MAX);
        assert_eq!(error_of(&whole, ReplyStyle::Extended), NBD_ENOSPC);
    }

    #[test]
    fn transfers_are_bounded_and_other_lengths_are_not() {
        let big = Listing { size_bytes: 1 << 60, ..listing("disk") };
        let style = ReplyStyle::Extended;
        let max = u64::from(big.transfer_max);
        for (command, length, fails) in [
            (command::READ, max, false),
            (command::READ, max + 1, true),
            (command::WRITE, max, false),
            (command::WRITE, max + 1, true),
            (command::TRIM, 1 << 60, false),
            (command::WRITE_ZEROES, 1 << 60, false),
            (command::CACHE, 1 << 60, false),
            (command::BLOCK_STATUS, 1 << 60, false),
        ] {
            let request = request(command, 0, 0, length);
            assert_eq!(check(&request, &big, style, ALL).is_err(), fails, "{request:?}");
            assert!(fails || memory_bytes(&request) <= max);
        }
    }

    #[test]
    fn a_read_only_export_takes_no_writes() {
        let disk = Listing { read_only: true, ..listing("disk") };
        for command in 0..8 {
            let request = request(command, 0, 0, 512);
            let error = check(&request, &disk, ReplyStyle::Structured, ALL)
                .map_or_else(|failure| failure.error, |()| 0);
            let expected = match command {
                command::WRITE | command::TRIM | command::WRITE_ZEROES => errors::NBD_EPERM,
                command::DISC => errors::NBD_EINVAL,
                _ => 0,
            };
            assert_eq!(error, expected, "{command}");
        }
    }

    #[test]
    fn block_status_wants_a_context_and_a_range() {
        let ask = |length, contexts| {
            let request = request(command::BLOCK_STATUS, 0, 0, length);
            check(&request, &listing("disk"), ReplyStyle::Structured, contexts).is_ok()
        };
        assert!(ask(1, ALL));
        assert!(!ask(0, ALL));
        assert!(!ask(1, Contexts::default()));
    }

    #[test]
    fn payloads_follow_writes_and_what_announces_them() {
        let write = request(command::WRITE, 0, 0, 512);
        let trim = request(command::TRIM, flag::PAYLOAD_LEN, 0, 512);
        assert_eq!(payload_bytes(&write, ReplyStyle::Simple), 512);
        assert_eq!(payload_bytes(&write, ReplyStyle::Extended), 512);
        assert_eq!(payload_bytes(&trim, ReplyStyle::Structured), 0);
        assert_eq!(payload_bytes(&trim, ReplyStyle::Extended), 512);
    }
}
