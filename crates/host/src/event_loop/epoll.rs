//! The epoll reactor, for loops without a ring.
//!
//! A descriptor is registered once, edge-triggered, for both directions; after that, waiting for it
//! costs no system call of its own. What epoll said is remembered until somebody meets `EAGAIN` or
//! a short transfer ([`Epoll::exhausted`]). A hang-up or an error is remembered for ever, because no
//! further edge may come after it.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::Timespec;
use stillpoint_io::{Error, Result};

use super::driver::Interest;

/// The event data of a bell; no descriptor's, whose generation makes it larger or smaller.
const BELL: u64 = u64::MAX;

pub(crate) struct Epoll {
    epoll: OwnedFd,
    /// By descriptor; a descriptor that was closed and given out again has another generation.
    sources: Vec<Option<Source>>,
    events: Vec<epoll::Event>,
}

struct Source {
    generation: u32,
    ready: [bool; 2],
    /// Ready for ever: reading at a hang-up of the peer's sending side, both after an error.
    ended: [bool; 2],
    wakers: [Vec<Waker>; 2],
}

impl Epoll {
    pub(crate) fn new() -> Result<Epoll> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|errno| Error::from_errno("make an epoll", errno.raw_os_error()))?;
        Ok(Epoll { epoll, sources: Vec::new(), events: Vec::with_capacity(256) })
    }

    fn register(&self, fd: BorrowedFd<'_>, data: u64, events: EventFlags) -> Result<()> {
        let data = EventData::new_u64(data);
        match epoll::add(&self.epoll, fd, data, events | EventFlags::ET) {
            Ok(()) => Ok(()),
            // An older stream's registration outlives it while somebody else keeps its socket open.
            Err(rustix::io::Errno::EXIST) => {
                epoll::modify(&self.epoll, fd, data, events | EventFlags::ET)
            }
            Err(errno) => Err(errno),
        }
        .map_err(|errno| Error::from_errno("watch a descriptor", errno.raw_os_error()))
    }

    /// Wakes the loop whenever `bell` is written to; the bell is never read.
    pub(crate) fn watch_bell(&mut self, bell: BorrowedFd<'_>) -> Result<()> {
        self.register(bell, BELL, EventFlags::IN)
    }

    /// Whether `fd` may be ready; registers it at the first call.
    pub(crate) fn poll_ready(
        &mut self,
        fd: RawFd,
        generation: u32,
        interest: Interest,
        cx: &mut Context<'_>,
    ) -> Poll<Result<()>> {
        let place = fd as usize;
        if self.sources.len() <= place {
            self.sources.resize_with(place + 1, || None);
        }
        if self.sources[place].as_ref().is_none_or(|source| source.generation != generation) {
            let events = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP;
            // SAFETY: the caller's socket is open while it asks.
            let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
            let data = u64::from(generation) << 32 | fd as u64;
            if let Err(error) = self.register(borrowed, data, events) {
                return Poll::Ready(Err(error));
            }
            self.sources[place] = Some(Source {
                generation,
                ready: [false; 2],
                ended: [false; 2],
                wakers: [vec![], vec![]],
            });
        }
        let source = self.sources[place].as_mut().expect("registered above");
        if source.ended[interest as usize] || source.ready[interest as usize] {
            return Poll::Ready(Ok(()));
        }
        let wakers = &mut source.wakers[interest as usize];
        if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Somebody met the end of what was ready: only a new edge makes it ready again.
    pub(crate) fn exhausted(&mut self, fd: RawFd, generation: u32, interest: Interest) {
        if let Some(Some(source)) = self.sources.get_mut(fd as usize)
            && source.generation == generation
        {
            source.ready[interest as usize] = false;
        }
    }

    /// Sleeps up to `timeout` (`None`: until something happens); the wakers of what became ready go
    /// into `wake`.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>, wake: &mut Vec<Waker>) -> Result<()> {
        let timeout = timeout.map(|limit| Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        self.events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::from_errno("wait for events", errno.raw_os_error())),
        }
        for event in &self.events {
            let data = event.data.u64();
            if data == BELL {
                continue;
            }
            let (fd, generation) = (data as u32 as usize, (data >> 32) as u32);
            let Some(Some(source)) = self.sources.get_mut(fd) else { continue };
            if source.generation != generation {
                continue;
            }
            let flags = event.flags;
            let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
            source.ended[Interest::Read as usize] |= gone || flags.intersects(EventFlags::RDHUP);
            source.ended[Interest::Write as usize] |= gone;
            for (interest, flag) in
                [(Interest::Read, EventFlags::IN), (Interest::Write, EventFlags::OUT)]
            {
                if source.ended[interest as usize] || flags.intersects(flag) {
                    source.ready[interest as usize] = true;
                    wake.append(&mut source.wakers[interest as usize]);
                }
            }
        }
        Ok(())
    }
}
