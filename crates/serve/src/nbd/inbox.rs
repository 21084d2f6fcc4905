//! What a client has sent and nobody has looked at yet.
//!
//! The socket is read in large gulps, so that one system call picks up many requests, which are
//! then parsed in place. A large payload is the exception: what of it lies in the buffer is copied,
//! and the rest goes from the socket straight into the request's own memory. While large payloads
//! follow one another the gulps between them are short, so that little is copied twice.
//!
//! Deliberately absent: bounds on payloads; whoever asks for one has checked its length.

use stillpoint_host::Stream;
use stillpoint_io::{Error, Kind, Queue, Result, Segments};

/// The buffer's length in bytes: some 60 writes of 4 KiB.
const BUFFER_BYTES: usize = 256 << 10;
/// A payload of at least this many bytes is received in place.
const DIRECT_BYTES_MIN: usize = 16 << 10;
/// How far beyond a large payload is read, in bytes: the next header, and few bytes more.
const SHORT_GULP_BYTES: usize = 4 << 10;
/// How much is received in place at a time, in bytes.
const DIRECT_BYTES_MAX: usize = 1 << 20;

/// See the module's head.
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// The last payload was a large one.
    short_gulps: bool,
}

impl Inbox {
    /// An empty one.
    pub(crate) fn new() -> Inbox {
        Inbox { bytes: vec![0; BUFFER_BYTES].into(), start: 0, end: 0, short_gulps: false }
    }

    /// What was received and not consumed.
    pub(crate) fn buffered(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Forgets the first `count` bytes of [`Inbox::buffered`].
    pub(crate) fn consume(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "more consumed than received");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Receives more behind what is buffered.
    ///
    /// # Errors
    /// [`Failed::Ended`] if the client has closed its side.
    pub(crate) async fn fill(&mut self, queue: &Queue, stream: &Stream) -> Result<usize, Failed> {
        if self.start > 0 {
            // At most one header, or one short payload, is moved to the front.
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = if self.short_gulps { SHORT_GULP_BYTES } else { BUFFER_BYTES };
        let gulp_end = (self.end + room).min(self.bytes.len());
        assert!(gulp_end > self.end, "nothing waits for more than the buffer holds");
        let gulp = &mut self.bytes[self.end..gulp_end];
        match stream.read(queue, gulp).await.map_err(Failed::Lost)? {
            0 => Err(Failed::Ended),
            count => {
                self.end += count;
                Ok(count)
            }
        }
    }

    /// Receives a payload of `into.len()` bytes; tells `moved` how many came at a time.
    pub(crate) async fn take_payload(
        &mut self,
        queue: &Queue,
        stream: &Stream,
        into: &Segments,
        moved: impl Fn(usize),
    ) -> Result<()> {
        let length = into.len();
        self.short_gulps = length >= DIRECT_BYTES_MIN;
        while !self.short_gulps && self.buffered().len() < length {
            moved(self.fill(queue, stream).await.map_err(cut_short)?);
        }
        let buffered = length.min(self.buffered().len());
        if buffered == length {
            into.copy_from(&self.buffered()[..length]);
            self.consume(length);
            return Ok(());
        }
        into.slice(0..buffered).copy_from(&self.buffered()[..buffered]);
        self.consume(buffered);
        let mut taken = buffered;
        while taken < length {
            let step = (length - taken).min(DIRECT_BYTES_MAX);
            stream.read_segments(queue, &into.slice(taken..taken + step)).await?;
            taken += step;
            moved(step);
        }
        Ok(())
    }

    /// Drops the next `length` bytes.
    pub(crate) async fn skip(
        &mut self,
        queue: &Queue,
        stream: &Stream,
        mut length: u64,
        moved: impl Fn(usize),
    ) -> Result<()> {
        loop {
            let skipped = length.min(self.buffered().len() as u64);
            self.consume(skipped as usize);
            length -= skipped;
            if length == 0 {
                return Ok(());
            }
            moved(self.fill(queue, stream).await.map_err(cut_short)?);
        }
    }
}

/// Why nothing more was received.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The client has closed its side.
    Ended,
    /// The connection broke.
    Lost(Error),
}

fn cut_short(failed: Failed) -> Error {
    match failed {
        Failed::Ended => {
            Error::new(Kind::Io, "receive a request", "the client hung up in the middle of one")
        }
        Failed::Lost(error) => error,
    }
}
