//! The history of a run: every event goes into a hash, the last ones are kept to be read.
//!
//! Two runs of one seed are the same history if, and only if, their hashes agree; so an engine that
//! consults anything but what was passed into it (a clock, an address, a hash map's order) is found.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use crate::chance::mix;

/// How many events are kept to be printed.
const KEPT: usize = 400;

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A task was polled. Hashed, but not kept: there are too many.
    Poll(u64),
    /// An operation was submitted to a file.
    Submit {
        /// The operation's number.
        operation: u64,
        /// The file's number.
        inode: u64,
        /// What it is.
        what: &'static str,
        /// Where, in bytes.
        offset: u64,
        /// How much, in bytes.
        length: u64,
    },
    /// An operation ended.
    Complete {
        /// The operation's number.
        operation: u64,
        /// Whether it succeeded.
        ok: bool,
    },
    /// Whatever a test or workload has to say.
    Note(String),
}

/// The history of a run.
#[derive(Debug, Default)]
pub struct Trace {
    hash: u64,
    last: VecDeque<(Duration, Event)>,
}

impl Trace {
    /// Adds what happened at `now`.
    pub fn record(&mut self, now: Duration, event: Event) {
        self.absorb(now.as_nanos() as u64);
        match &event {
            Event::Poll(task) => return self.absorb(*task),
            Event::Submit { operation, inode, what, offset, length } => {
                self.absorb_bytes(what.as_bytes());
                [operation, inode, offset, length].into_iter().for_each(|&n| self.absorb(n));
            }
            Event::Complete { operation, ok } => self.absorb(operation << 1 | u64::from(*ok)),
            Event::Note(text) => self.absorb_bytes(text.as_bytes()),
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back((now, event));
    }

    fn absorb(&mut self, number: u64) {
        self.hash = mix(self.hash.rotate_left(1) ^ number);
    }

    fn absorb_bytes(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.absorb(u64::from(byte)));
    }

    /// The hash of everything that happened so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Display for Trace {
    /// The last events, oldest first, one a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (time, event) in &self.last {
            write!(f, "{:>10} us  ", time.as_micros())?;
            match event {
                Event::Poll(task) => writeln!(f, "poll task {task}")?,
                Event::Submit { operation, inode, what, offset, length } => writeln!(
                    f,
                    "#{operation} {what} file {inode} {offset:#x}+{length:#x} submitted"
                )?,
                Event::Complete { operation, ok: true } => writeln!(f, "#{operation} done")?,
                Event::Complete { operation, ok: false } => writeln!(f, "#{operation} FAILED")?,
                Event::Note(text) => writeln!(f, "{text}")?,
            }
        }
        Ok(())
    }
}
