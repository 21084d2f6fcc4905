//! One read or write on its way: what is left of it, and what a result of the kernel means for it.
//!
//! All engines share this: they ask for the remaining memory ([`Transfer::window`]), do one system
//! call's worth of it, and report the result ([`Transfer::advance`]). Short transfers go round
//! again, a read that meets the end of the file is filled up with zeros, and a file system without
//! `RWF_DSYNC` gets a plain write with a barrier after it.
//!
//! R2: a transfer owns its memory, and keeps its file open, until it has ended.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use stillpoint_io::{Error, Kind, Result, Segments, Value};

use crate::file::OpenFile;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

pub(crate) struct Transfer {
    pub(crate) file: Arc<OpenFile>,
    pub(crate) direction: Direction,
    offset: u64,
    memory: Segments,
    /// How many bytes the kernel has dealt with.
    done: usize,
    /// The write itself is durable (`RWF_DSYNC`).
    durable: bool,
    /// A barrier has to follow, because the write itself could not be durable.
    sync_after: bool,
    /// Where the bytes of a read go in the end, if `memory` is an aligned stand-in.
    bounced_for: Option<Segments>,
}

/// What to do after a result.
pub(crate) enum Step {
    /// Submit what is left.
    Again,
    /// It has ended; a barrier must follow first if the flag is set.
    Ended(Result<Value>, bool),
}

/// The memory that is left.
pub(crate) enum Window {
    One(*mut u8, usize),
    /// In the vector that was passed in.
    Many,
}

/// What the kernel takes in one call.
const IOVECS_MAX: usize = 1024;
const BYTES_MAX: usize = 1 << 30;

impl Transfer {
    pub(crate) fn read(file: Arc<OpenFile>, offset: u64, into: Segments, align: u32) -> Transfer {
        let (memory, bounced_for) = if into.is_aligned(align, file.piece_align()) {
            (into, None)
        } else {
            (Segments::alloc(into.len()), Some(into))
        };
        let direction = Direction::Read;
        Transfer {
            file,
            direction,
            offset,
            memory,
            done: 0,
            durable: false,
            sync_after: false,
            bounced_for,
        }
    }

    pub(crate) fn write(
        file: Arc<OpenFile>,
        offset: u64,
        from: Segments,
        align: u32,
        durable: bool,
    ) -> Transfer {
        let memory = if from.is_aligned(align, file.piece_align()) {
            from
        } else {
            let copy = Segments::alloc(from.len());
            copy.copy_from_segments(&from);
            copy
        };
        let by_flag = durable && file.dsync_works.load(Relaxed);
        Transfer {
            file,
            direction: Direction::Write,
            offset,
            memory,
            done: 0,
            durable: by_flag,
            sync_after: durable && !by_flag,
            bounced_for: None,
        }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.file.fd.as_raw_fd()
    }

    /// Where the next system call begins.
    pub(crate) fn position(&self) -> u64 {
        self.offset + self.done as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn rw_flags(&self) -> i32 {
        if self.durable { libc::RWF_DSYNC } else { 0 }
    }

    /// The memory that is left, as far as one system call takes it.
    pub(crate) fn window(&self, iovecs: &mut Vec<libc::iovec>) -> Window {
        let mut skip = self.done;
        let mut pieces = self.memory.pieces();
        if pieces.len() == 1
            && let Some((start, len)) = pieces.next()
        {
            // SAFETY: `done` never exceeds the length of the memory.
            return Window::One(unsafe { start.add(skip) }, (len - skip).min(BYTES_MAX));
        }
        iovecs.clear();
        let mut room = BYTES_MAX;
        for (start, len) in pieces {
            if skip >= len {
                skip -= len;
                continue;
            }
            if iovecs.len() == IOVECS_MAX || room == 0 {
                break;
            }
            // Whole pieces only once something is in, so that direct I/O stays aligned.
            let take = len - skip;
            if take > room && !iovecs.is_empty() {
                break;
            }
            let take = take.min(room);
            // SAFETY: `skip` lies within the piece.
            iovecs.push(libc::iovec { iov_base: unsafe { start.add(skip) }.cast(), iov_len: take });
            room -= take;
            skip = 0;
        }
        Window::Many
    }

    /// Takes the kernel's answer: a count of bytes, or a negative errno.
    pub(crate) fn advance(&mut self, result: i64) -> Step {
        let count = match result {
            0 if self.direction == Direction::Read => return self.fill_up(),
            0 => {
                let error =
                    Error::new(Kind::Io, "write", "the host took no byte and gave no reason");
                return self.failed(error);
            }
            1.. => result as usize,
            _ => match -result as i32 {
                libc::EINTR | libc::EAGAIN => return Step::Again,
                libc::EOPNOTSUPP if self.durable => {
                    self.file.dsync_works.store(false, Relaxed);
                    self.durable = false;
                    self.sync_after = true;
                    return Step::Again;
                }
                errno => {
                    let op = match self.direction {
                        Direction::Read => "read",
                        Direction::Write => "write",
                    };
                    return self.failed(Error::from_errno(op, errno));
                }
            },
        };
        self.done += count;
        if self.done == self.memory.len() {
            return self.ended();
        }
        // Direct I/O cuts a read short at an odd place only where the file ends.
        if self.direction == Direction::Read
            && !self.position().is_multiple_of(u64::from(self.file.piece_align()))
        {
            return self.fill_up();
        }
        Step::Again
    }

    fn failed(&self, error: Error) -> Step {
        Step::Ended(Err(error.file(&self.file.name).at(self.position())), false)
    }

    /// Beyond the end of the file there are zeros.
    fn fill_up(&mut self) -> Step {
        self.memory.slice(self.done..self.memory.len()).fill(0);
        self.ended()
    }

    fn ended(&mut self) -> Step {
        if let Some(into) = self.bounced_for.take() {
            into.copy_from_segments(&self.memory);
        }
        Step::Ended(Ok(Value::Unit), self.sync_after)
    }

    /// Does what is left with blocking calls.
    pub(crate) fn run(mut self) -> Result<Value> {
        let mut iovecs = Vec::new();
        loop {
            let result = self.call(&mut iovecs, 0);
            match self.advance(result) {
                Step::Again => {}
                Step::Ended(result, false) => return result,
                Step::Ended(result, true) => return result.and_then(|_| self.file.sync()),
            }
        }
    }

    /// Tries to do it from the page cache without waiting; true if it has ended well.
    pub(crate) fn try_without_waiting(&mut self) -> bool {
        let mut iovecs = Vec::new();
        let result = self.call(&mut iovecs, libc::RWF_NOWAIT);
        if result == -i64::from(libc::EOPNOTSUPP) {
            self.file.nowait_works.store(false, Relaxed);
        }
        result > 0 && matches!(self.advance(result), Step::Ended(Ok(_), false))
    }

    fn call(&self, iovecs: &mut Vec<libc::iovec>, flags: i32) -> i64 {
        let one;
        let (list, count) = match self.window(iovecs) {
            Window::One(start, len) => {
                one = libc::iovec { iov_base: start.cast(), iov_len: len };
                (&raw const one, 1)
            }
            Window::Many => (iovecs.as_ptr(), iovecs.len() as i32),
        };
        let (position, flags) = (self.position() as i64, flags | self.rw_flags());
        // SAFETY: the iovecs name memory that this transfer owns for the whole call (R2).
        let count = unsafe {
            match self.direction {
                Direction::Read => libc::preadv2(self.fd(), list, count, position, flags),
                Direction::Write => libc::pwritev2(self.fd(), list, count, position, flags),
            }
        };
        if count < 0 { -i64::from(crate::errno()) } else { count as i64 }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    const LENGTH: usize = 10_000;

    fn content(length: usize) -> Vec<u8> {
        (0..length).map(|index| (index % 251) as u8).collect()
    }

    fn in_pieces(bytes: &[u8]) -> Segments {
        let mut segments = Segments::from_slice(&bytes[..3000]);
        segments.append(Segments::from_slice(&bytes[3000..]));
        segments
    }

    /// Ends a transfer by calls that are interrupted, and that take a few bytes at a time.
    fn run_in_bits(mut transfer: Transfer) -> Result<Value> {
        let mut iovecs = Vec::new();
        for turn in 0.. {
            let result = if turn % 3 == 0 {
                -i64::from(if turn % 2 == 0 { libc::EINTR } else { libc::EAGAIN })
            } else {
                let (start, length) = match transfer.window(&mut iovecs) {
                    Window::One(start, length) => (start, length),
                    Window::Many => (iovecs[0].iov_base.cast(), iovecs[0].iov_len),
                };
                let (fd, at) = (transfer.fd(), transfer.position() as i64);
                let length = length.min(1 + turn * 37 % 900);
                // SAFETY: the memory is the transfer's, and at least so long.
                let count = unsafe {
                    match transfer.direction {
                        Direction::Read => libc::pread(fd, start.cast(), length, at),
                        Direction::Write => libc::pwrite(fd, start.cast(), length, at),
                    }
                };
                count as i64
            };
            if let Step::Ended(result, _) = transfer.advance(result) {
                return result;
            }
        }
        unreachable!("it has an end")
    }

    #[test]
    fn short_and_interrupted_calls_go_round_until_everything_is_through() {
        let mut host = tempfile::tempfile().unwrap();
        let open = Arc::new(OpenFile::for_test(host.try_clone().unwrap().into()));
        let from = in_pieces(&content(LENGTH));
        run_in_bits(Transfer::write(open.clone(), 100, from, 1, false)).unwrap();
        let mut found = Vec::new();
        host.rewind().unwrap();
        host.read_to_end(&mut found).unwrap();
        assert_eq!(found[100..], content(LENGTH));

        let into = in_pieces(&[9; LENGTH]);
        run_in_bits(Transfer::read(open.clone(), 100, into.clone(), 1)).unwrap();
        assert_eq!(into.to_vec(), content(LENGTH));
    }

    #[test]
    fn a_read_beyond_the_end_is_filled_up_with_zeros() {
        let mut host = tempfile::tempfile().unwrap();
        host.write_all(&content(4000)).unwrap();
        let open = Arc::new(OpenFile::for_test(host.into()));
        let into = in_pieces(&[9; LENGTH]);
        run_in_bits(Transfer::read(open, 0, into.clone(), 1)).unwrap();
        assert_eq!(into.to_vec(), [content(4000), vec![0; LENGTH - 4000]].concat());
    }
}
