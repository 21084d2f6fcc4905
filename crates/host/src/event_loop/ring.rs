//! The io_uring reactor: one system call per turn submits everything queued, runs the kernel's
//! deferred work and sleeps.
//!
//! Sockets and bells are polled through the same ring. Where the kernel has them, the ring uses a
//! single issuer with deferred task run (6.1), else cooperative task run (5.19), else neither; its
//! own descriptor is registered (5.18), which saves a look-up per call.
//!
//! Deliberately absent: cancelling of transfers (they own their memory and end by themselves), and
//! barriers (a ring's fsync is slower than `fdatasync` on a thread).

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use stillpoint_io::{Error, Result};

use super::driver::Pending;
use crate::slab::Slab;
use crate::transfer::{Direction, Window};

/// What a completion belongs to: the two lowest bits of its user data.
const TRANSFER: u64 = 0;
const POLL: u64 = 1;
const BELL: u64 = 2;
const NOBODY: u64 = 3;

/// One completion.
pub(crate) enum Event {
    Transfer(u32, i64),
    /// A polled descriptor is ready, has failed, or its poll was withdrawn.
    Poll(u32),
    Bell,
}

pub(crate) struct Ring {
    ring: IoUring,
    /// The ring's own descriptor, or its registered number with the flag that says so.
    enter: (RawFd, u32),
    /// Entries that the submission queue had no room for.
    overflow: VecDeque<squeue::Entry>,
    /// Transfers that wait because enough are in flight already.
    queued: VecDeque<u32>,
    in_flight: u32,
    in_flight_max: u32,
    /// Bells that must be polled again, each by its descriptor.
    bells: Vec<RawFd>,
    /// Completions reach the queue only inside a system call that asks for events.
    deferred: bool,
}

impl Ring {
    pub(crate) fn new(depth: u32) -> Result<Ring> {
        let completions = (depth * 4).max(1024);
        let base = || {
            let mut builder = IoUring::builder();
            builder.setup_cqsize(completions).setup_clamp().dontfork();
            builder
        };
        let deferred = base()
            .setup_submit_all()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(depth);
        let (ring, deferred) = match deferred {
            Ok(ring) => (Ok(ring), true),
            Err(_) => {
                let coop = base()
                    .setup_submit_all()
                    .setup_coop_taskrun()
                    .setup_taskrun_flag()
                    .build(depth);
                (coop.or_else(|_| base().build(depth)), false)
            }
        };
        let ring = ring.map_err(|error| {
            Error::from_std("set up an io_uring", &error)
                .remedy("allow io_uring (containers may forbid it), or choose another engine")
        })?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            let why = "the kernel is older than 5.11";
            return Err(Error::new(stillpoint_io::Kind::Unsupported, "set up an io_uring", why));
        }
        let enter = register_self(ring.as_raw_fd());
        let in_flight_max = ring.params().cq_entries() / 2;
        Ok(Ring {
            ring,
            enter,
            overflow: VecDeque::new(),
            queued: VecDeque::new(),
            in_flight: 0,
            in_flight_max,
            bells: Vec::new(),
            deferred,
        })
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: what the entry names is kept by the driver until its completion (R2), or is a
        // descriptor that its owner keeps open until then.
        if self.overflow.is_empty() && unsafe { self.ring.submission().push(&entry) }.is_ok() {
            return;
        }
        self.overflow.push_back(entry);
    }

    pub(crate) fn submit(&mut self, index: u32, pending: &mut Pending) {
        if self.in_flight == self.in_flight_max {
            self.queued.push_back(index);
            return;
        }
        self.in_flight += 1;
        let entry = entry(pending).user_data(u64::from(index) << 2 | TRANSFER);
        self.push(entry);
    }

    /// Rings whenever `bell` is written to; the bell is never read.
    pub(crate) fn watch_bell(&mut self, bell: BorrowedFd<'_>) {
        let fd = bell.as_raw_fd();
        let poll = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.push(poll.user_data((fd as u64) << 2 | BELL));
    }

    pub(crate) fn poll(&mut self, fd: RawFd, events: u32, index: u32) {
        let poll = opcode::PollAdd::new(types::Fd(fd), events).build();
        self.push(poll.user_data(u64::from(index) << 2 | POLL));
    }

    /// Withdraws a poll; its event still comes.
    pub(crate) fn withdraw_poll(&mut self, index: u32) {
        // Not a removal of the poll: that gives up (EALREADY) when the poll has just been woken, and
        // a poll woken for nothing goes on waiting, with a reference to its socket.
        let entry = opcode::AsyncCancel::new(u64::from(index) << 2 | POLL).build();
        self.push(entry.user_data(NOBODY));
    }

    /// Submits what is queued; sleeps up to `timeout` if there is one and nothing has completed.
    pub(crate) fn turn(
        &mut self,
        sleep: Option<Option<Duration>>,
        table: &mut Slab<Pending>,
    ) -> Result<()> {
        self.refill(table);
        loop {
            let (submit, overflown, taskrun) = {
                let queue = self.ring.submission();
                (queue.len(), queue.cq_overflow(), queue.taskrun())
            };
            let sleep = sleep.filter(|_| {
                self.overflow.is_empty() && self.ring.completion().is_empty() && !overflown
            });
            let look = overflown || taskrun;
            if submit == 0 && sleep.is_none() && !look {
                return Ok(());
            }
            self.enter(submit as u32, sleep, look || self.deferred)?;
            if self.overflow.is_empty() {
                return Ok(());
            }
            if !self.push_overflow() {
                // The kernel takes nothing before completions have been taken out.
                return Ok(());
            }
        }
    }

    /// Moves entries into the submission queue; false if it had room for none.
    fn push_overflow(&mut self) -> bool {
        let mut moved = false;
        let mut queue = self.ring.submission();
        while let Some(entry) = self.overflow.front() {
            // SAFETY: as in `push`.
            if unsafe { queue.push(entry) }.is_err() {
                break;
            }
            moved = true;
            self.overflow.pop_front();
        }
        moved
    }

    fn refill(&mut self, table: &mut Slab<Pending>) {
        while self.in_flight < self.in_flight_max
            && let Some(index) = self.queued.pop_front()
        {
            let pending = table.at(index).expect("a queued transfer is in the table");
            self.submit(index, pending);
        }
    }

    fn enter(&self, submit: u32, sleep: Option<Option<Duration>>, look: bool) -> Result<()> {
        let (fd, mut flags) = self.enter;
        let mut want = 0;
        let timeout;
        let mut args = types::SubmitArgs::new();
        if let Some(limit) = sleep {
            want = 1;
            if let Some(limit) = limit {
                timeout = types::Timespec::from(limit);
                args = args.timespec(&timeout);
            }
        }
        if want > 0 || look {
            flags |= EnterFlags::GETEVENTS.bits();
        }
        flags |= EnterFlags::EXT_ARG.bits();
        // SAFETY: the ring's entries are as `push` promises; the arguments live through the call.
        let result = unsafe {
            let size = size_of::<types::SubmitArgs<'_, '_>>();
            libc::syscall(libc::SYS_io_uring_enter, fd, submit, want, flags, &raw const args, size)
        };
        if result >= 0 {
            return Ok(());
        }
        match crate::errno() {
            // Nobody completed in time; a signal; or completions must be taken out first.
            libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN => Ok(()),
            errno => Err(Error::from_errno("enter the io_uring", errno)),
        }
    }

    /// Takes the completions out of the ring.
    pub(crate) fn reap(&mut self, events: &mut Vec<Event>) {
        let mut transfers = 0;
        for completion in self.ring.completion() {
            let data = completion.user_data();
            let index = (data >> 2) as u32;
            match data & 3 {
                TRANSFER => {
                    transfers += 1;
                    events.push(Event::Transfer(index, i64::from(completion.result())));
                }
                POLL => events.push(Event::Poll(index)),
                BELL => {
                    events.push(Event::Bell);
                    if !cqueue::more(completion.flags()) {
                        self.bells.push(index as RawFd);
                    }
                }
                _ => {}
            }
        }
        self.in_flight -= transfers;
        while let Some(fd) = self.bells.pop() {
            // SAFETY: the loop keeps its bells open for as long as it has a ring.
            let bell = unsafe { BorrowedFd::borrow_raw(fd) };
            // Emptied, or the new poll would end at once.
            let _ = rustix::io::read(bell, &mut [0u8; 8]);
            self.watch_bell(bell);
        }
    }
}

fn entry(pending: &mut Pending) -> squeue::Entry {
    let transfer = &pending.transfer;
    let fd = types::Fd(transfer.fd());
    let (offset, flags) = (transfer.position(), transfer.rw_flags());
    match (transfer.window(&mut pending.iovecs), transfer.direction) {
        (Window::One(start, len), Direction::Read) => {
            opcode::Read::new(fd, start, len as u32).offset(offset).rw_flags(flags).build()
        }
        (Window::One(start, len), Direction::Write) => {
            opcode::Write::new(fd, start, len as u32).offset(offset).rw_flags(flags).build()
        }
        (Window::Many, direction) => {
            let (list, count) = (pending.iovecs.as_ptr(), pending.iovecs.len() as u32);
            match direction {
                Direction::Read => {
                    opcode::Readv::new(fd, list, count).offset(offset).rw_flags(flags).build()
                }
                Direction::Write => {
                    opcode::Writev::new(fd, list, count).offset(offset).rw_flags(flags).build()
                }
            }
        }
    }
}

/// Registers the ring's descriptor with itself; what to pass to `io_uring_enter` from now on.
fn register_self(fd: RawFd) -> (RawFd, u32) {
    const REGISTER_RING_FDS: u32 = 20;
    #[repr(C)]
    struct Update {
        offset: u32,
        reserved: u32,
        data: u64,
    }
    let mut update = Update { offset: u32::MAX, reserved: 0, data: fd as u64 };
    // SAFETY: the update lives through the call, and is the one record that the count promises.
    let result = unsafe {
        libc::syscall(libc::SYS_io_uring_register, fd, REGISTER_RING_FDS, &raw mut update, 1)
    };
    if result == 1 { (update.offset as RawFd, EnterFlags::REGISTERED_RING.bits()) } else { (fd, 0) }
}
