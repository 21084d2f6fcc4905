//! Linux AIO (`aio=native`): one `io_submit` per turn of the loop, completions read from the ring
//! that the kernel maps into the process.
//!
//! Each request also rings an eventfd, which the reactor watches edge-triggered: nobody ever reads
//! it, and nobody calls `io_getevents`.
//!
//! Deliberately absent: buffered files. The kernel would do them synchronously inside `io_submit`.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use stillpoint_io::{Error, Result};

use crate::transfer::{Direction, Window};

use super::driver::Pending;
use crate::slab::Slab;

const READ: u16 = 0;
const WRITE: u16 = 1;
const READ_MANY: u16 = 7;
const WRITE_MANY: u16 = 8;
const FLAG_EVENTFD: u32 = 1;
const RING_MAGIC: u32 = 0xa10a_10a1;

/// The head of the mapped ring, as the kernel lays it out (`struct aio_ring`).
#[repr(C)]
struct Ring {
    id: u32,
    count: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_length: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Event {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

pub(crate) struct Aio {
    /// The context; also the address of its mapped ring.
    context: usize,
    bell: OwnedFd,
    /// Transfers to submit, by their number in the driver's table.
    queued: VecDeque<u32>,
    in_flight: u32,
    depth: u32,
    iocbs: Vec<libc::iocb>,
    pointers: Vec<*mut libc::iocb>,
}

impl Aio {
    pub(crate) fn new(depth: u32) -> Result<Aio> {
        let mut context = 0usize;
        // SAFETY: the context is a word that outlives the call.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        if result < 0 {
            let error = Error::from_errno("set up Linux AIO", crate::errno());
            return Err(error.remedy("raise /proc/sys/fs/aio-max-nr, or choose another engine"));
        }
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let aio = Aio {
            context,
            bell: bell
                .map_err(|errno| Error::from_errno("make an eventfd", errno.raw_os_error()))?,
            queued: VecDeque::new(),
            in_flight: 0,
            depth,
            iocbs: Vec::with_capacity(depth as usize),
            pointers: Vec::with_capacity(depth as usize),
        };
        let ring = aio.ring();
        if ring.magic != RING_MAGIC || ring.incompat_features != 0 {
            let why = "the kernel's AIO ring has an unknown layout";
            return Err(Error::new(stillpoint_io::Kind::Unsupported, "set up Linux AIO", why));
        }
        Ok(aio)
    }

    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn ring(&self) -> &Ring {
        // SAFETY: the kernel maps the ring at the context's address until `io_destroy`, which only
        // `drop` calls; head and tail, which change, are atomics.
        unsafe { &*(self.context as *const Ring) }
    }

    pub(crate) fn queue(&mut self, index: u32) {
        self.queued.push_back(index);
    }

    /// Hands queued transfers to the kernel; what it refuses at once goes into `ended`.
    pub(crate) fn submit(&mut self, table: &mut Slab<Pending>, ended: &mut Vec<(u32, i64)>) {
        while !self.queued.is_empty() && self.in_flight < self.depth {
            let room = (self.depth - self.in_flight) as usize;
            let count = room.min(self.queued.len());
            self.iocbs.clear();
            self.pointers.clear();
            for position in 0..count {
                let index = self.queued[position];
                let pending = table.at(index).expect("a queued transfer is in the table");
                self.iocbs.push(iocb(pending, index, self.bell.as_raw_fd()));
            }
            self.pointers.extend(self.iocbs.iter_mut().map(|iocb| &raw mut *iocb));
            // SAFETY: the iocbs and iovecs live through the call, which copies them; the memory
            // they name belongs to transfers that stay in the table until they have ended (R2).
            let result = unsafe {
                let list = self.pointers.as_mut_ptr();
                libc::syscall(libc::SYS_io_submit, self.context, count, list)
            };
            if result > 0 {
                self.in_flight += result as u32;
                self.queued.drain(..result as usize);
                continue;
            }
            match crate::errno() {
                libc::EINTR => {}
                // No room in the kernel: goes on when something has ended.
                libc::EAGAIN if self.in_flight > 0 => return,
                errno => {
                    let first = self.queued.pop_front().expect("not empty");
                    ended.push((first, -i64::from(errno)));
                }
            }
        }
    }

    /// Takes the completions that lie in the ring, without a system call.
    pub(crate) fn reap(&mut self, ended: &mut Vec<(u32, i64)>) {
        if self.in_flight == 0 {
            return;
        }
        let ring = self.ring();
        let mut head = ring.head.load(Ordering::Relaxed);
        // ORDER: acquires the events that the kernel wrote before it moved the tail.
        let tail = ring.tail.load(Ordering::Acquire);
        if head == tail {
            return;
        }
        let (count, start) = (ring.count, self.context + ring.header_length as usize);
        let mut taken = 0;
        while head != tail {
            // SAFETY: the ring holds `count` events behind its head, and `head < count`.
            let event = unsafe { (start as *const Event).add(head as usize).read_volatile() };
            ended.push((event.data as u32, event.result));
            head = (head + 1) % count;
            taken += 1;
        }
        // ORDER: the events have been read before the kernel may overwrite their places.
        ring.head.store(head, Ordering::Release);
        self.in_flight -= taken;
    }
}

fn iocb(pending: &mut Pending, index: u32, bell: i32) -> libc::iocb {
    let transfer = &pending.transfer;
    let (opcode, address, length) = match (transfer.window(&mut pending.iovecs), transfer.direction)
    {
        (Window::One(start, len), Direction::Read) => (READ, start as u64, len),
        (Window::One(start, len), Direction::Write) => (WRITE, start as u64, len),
        (Window::Many, direction) => {
            let opcode = if direction == Direction::Read { READ_MANY } else { WRITE_MANY };
            (opcode, pending.iovecs.as_ptr() as u64, pending.iovecs.len())
        }
    };
    // SAFETY: an iocb is a plain record for which zeros are a valid value.
    let mut iocb: libc::iocb = unsafe { std::mem::zeroed() };
    iocb.aio_data = u64::from(index);
    iocb.aio_lio_opcode = opcode;
    iocb.aio_rw_flags = transfer.rw_flags();
    iocb.aio_fildes = transfer.fd() as u32;
    iocb.aio_buf = address;
    iocb.aio_nbytes = length as u64;
    iocb.aio_offset = transfer.position() as i64;
    iocb.aio_flags = FLAG_EVENTFD;
    iocb.aio_resfd = bell as u32;
    iocb
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: nothing is in flight any more (the driver has drained it), and the ring is not
        // looked at after this.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}
