//! What a loop's files and sockets submit through: the table of what is in flight, the reactor, the
//! engines, and the way to the thread pool and back.
//!
//! R2: a transfer stays in the table, with its memory and its file, until the kernel or the pool has
//! answered; dropping a completion only means that nobody listens. A driver is drained before it
//! goes away ([`Driver::is_quiet`]).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use std::vec::Drain;

use async_task::Runnable;
use stillpoint_io::{Completion, Error, Kind, Promise, Queue, Result, Value, completion};

use super::aio;
use super::epoll::Epoll;
use super::mailbox::{Mail, Mailbox};
use super::ring::{self, Ring};
use super::{Aio, LoopOptions};
use crate::pool::{self, Work};
use crate::slab::Slab;
use crate::transfer::{Direction, Step, Transfer};

/// A transfer in an engine's hands.
pub(crate) struct Pending {
    pub(crate) transfer: Transfer,
    /// The engine's list of the transfer's pieces; stays in place while the kernel may read it.
    pub(crate) iovecs: Vec<libc::iovec>,
    engine: Engine,
    promise: Promise,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Engine {
    Ring,
    Native,
    Pool,
}

/// What somebody waits for on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Read = 0,
    Write = 1,
}

#[allow(clippy::large_enum_variant, reason = "a loop has one, in place")]
enum Reactor {
    Ring(Ring),
    Epoll(Epoll),
}

/// Linux AIO is set up when the first file wants it.
enum Native {
    Unused,
    Ready(aio::Aio),
    Refused,
}

/// A descriptor polled through the ring.
enum Polled {
    Waiting(Waker),
    Ready,
    /// Nobody waits any more; its event is still to come.
    Withdrawn,
}

pub(crate) struct Driver {
    pub(crate) mailbox: Arc<Mailbox>,
    depth: u32,
    reactor: RefCell<Reactor>,
    native: RefCell<Native>,
    transfers: RefCell<Slab<Pending>>,
    polls: RefCell<Slab<Polled>>,
    /// Who waits for offloaded work.
    offloaded: RefCell<Slab<Promise>>,
    batch: RefCell<Vec<Work>>,
    /// Turns since epoll was last asked, while there was always something else to do.
    unasked: Cell<u32>,
    closed: Cell<bool>,
    scratch: RefCell<Scratch>,
}

/// Buffers used in each turn.
#[derive(Default)]
struct Scratch {
    events: Vec<ring::Event>,
    ended: Vec<(u32, i64)>,
    wake: Vec<Waker>,
    mail: Mail,
}

/// While tasks stay runnable, every this many turns epoll is asked all the same.
const TURNS_UNASKED_MAX: u32 = 8;

impl Driver {
    pub(crate) fn new(options: LoopOptions) -> Result<Driver> {
        let mailbox = Arc::new(Mailbox::new()?);
        let depth = options.depth.clamp(1, 4096);
        let ring = match options.aio {
            Aio::IoUring => Ring::new(depth)
                .inspect_err(|error| {
                    tracing::warn!("{error}; this loop goes on with aio=native or threads");
                })
                .ok(),
            Aio::Native | Aio::Threads => None,
        };
        let mut reactor = match ring {
            Some(ring) => Reactor::Ring(ring),
            None => Reactor::Epoll(Epoll::new()?),
        };
        reactor.watch_bell(mailbox.bell())?;
        Ok(Driver {
            mailbox,
            depth,
            reactor: RefCell::new(reactor),
            native: RefCell::new(Native::Unused),
            transfers: RefCell::new(Slab::new()),
            polls: RefCell::new(Slab::new()),
            offloaded: RefCell::new(Slab::new()),
            batch: RefCell::default(),
            unasked: Cell::new(0),
            closed: Cell::new(false),
            scratch: RefCell::default(),
        })
    }

    /// The driver of `queue`'s loop.
    pub(crate) fn of(queue: &Queue) -> Result<&Driver> {
        queue.driver::<Driver>().ok_or_else(|| {
            Error::new(Kind::Invalid, "use the host", "the queue belongs to another runtime")
        })
    }

    /// Starts a transfer on the engine that its file wants, or the nearest one that there is.
    pub(crate) fn submit(&self, wish: Aio, mut transfer: Transfer) -> Completion {
        if self.closed.get() {
            return Completion::ready(Err(closed()));
        }
        let engine = self.engine(wish, transfer.file.is_direct());
        if engine == Engine::Pool && transfer.may_be_cached() && transfer.try_without_waiting() {
            return Completion::ready(Ok(Value::Unit));
        }
        let (promise, completion) = completion();
        self.start(engine, transfer, promise);
        completion
    }

    fn engine(&self, wish: Aio, direct: bool) -> Engine {
        if wish == Aio::IoUring && matches!(&*self.reactor.borrow(), Reactor::Ring(_)) {
            return Engine::Ring;
        }
        // AIO on a buffered file would block the loop.
        if wish != Aio::Threads && direct && self.has_native() {
            return Engine::Native;
        }
        Engine::Pool
    }

    fn has_native(&self) -> bool {
        let mut native = self.native.borrow_mut();
        if matches!(*native, Native::Unused) {
            let ready = aio::Aio::new(self.depth).and_then(|aio| {
                self.reactor.borrow_mut().watch_bell(aio.bell())?;
                Ok(aio)
            });
            *native = match ready {
                Ok(aio) => Native::Ready(aio),
                Err(error) => {
                    tracing::warn!("{error}; this loop goes on with aio=threads");
                    Native::Refused
                }
            };
        }
        matches!(*native, Native::Ready(_))
    }

    fn start(&self, engine: Engine, transfer: Transfer, promise: Promise) {
        if engine == Engine::Pool {
            return self.offload_for(promise, move || transfer.run());
        }
        let pending = Pending { transfer, iovecs: Vec::new(), engine, promise };
        let index = self.transfers.borrow_mut().insert(pending);
        self.hand_over(engine, index);
    }

    fn hand_over(&self, engine: Engine, index: u32) {
        match (engine, &mut *self.reactor.borrow_mut(), &mut *self.native.borrow_mut()) {
            (Engine::Ring, Reactor::Ring(ring), _) => {
                let mut transfers = self.transfers.borrow_mut();
                ring.submit(index, transfers.at(index).expect("inserted by the caller"));
            }
            (Engine::Native, _, Native::Ready(aio)) => aio.queue(index),
            _ => unreachable!("an engine was chosen that is not there"),
        }
    }

    /// Runs `work`, which may block, on the thread pool.
    pub(crate) fn offload(
        &self,
        work: impl FnOnce() -> Result<Value> + Send + 'static,
    ) -> Completion {
        if self.closed.get() {
            return Completion::ready(Err(closed()));
        }
        let (promise, completion) = completion();
        self.offload_for(promise, work);
        completion
    }

    fn offload_for(&self, promise: Promise, work: impl FnOnce() -> Result<Value> + Send + 'static) {
        let index = self.offloaded.borrow_mut().insert(promise);
        let reply = Reply { mailbox: self.mailbox.clone(), index, result: None };
        let work: Work = Box::new(move || reply.send(work()));
        self.batch.borrow_mut().push(work);
    }

    /// Whether everything that was submitted has ended.
    pub(crate) fn is_quiet(&self) -> bool {
        self.transfers.borrow().len() == 0
            && self.offloaded.borrow().len() == 0
            && self.polls.borrow().len() == 0
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Refuses new work from now on.
    pub(crate) fn close(&self) {
        self.closed.set(true);
    }

    /// Waits until `fd` is ready, or an error of it is.
    pub(crate) async fn ready(&self, fd: RawFd, generation: u32, interest: Interest) -> Result<()> {
        if matches!(&*self.reactor.borrow(), Reactor::Epoll(_)) {
            return poll_fn(|cx| match &mut *self.reactor.borrow_mut() {
                Reactor::Epoll(epoll) => epoll.poll_ready(fd, generation, interest, cx),
                Reactor::Ring(_) => unreachable!("a loop keeps its reactor"),
            })
            .await;
        }
        let mut wait = RingPoll { driver: self, index: None };
        poll_fn(|cx| wait.poll(fd, interest, cx)).await;
        Ok(())
    }

    /// Tells that a call on `fd` met the end of what was ready.
    pub(crate) fn exhausted(&self, fd: RawFd, generation: u32, interest: Interest) {
        if let Reactor::Epoll(epoll) = &mut *self.reactor.borrow_mut() {
            epoll.exhausted(fd, generation, interest);
        }
    }

    /// Takes in what other threads sent: true if the main future was woken.
    pub(crate) fn collect(&self, take: impl FnOnce(Drain<'_, Runnable>)) -> bool {
        let mut mail = std::mem::take(&mut self.scratch.borrow_mut().mail);
        let main = self.mailbox.collect(&mut mail);
        take(mail.runnables.drain(..));
        for (index, result) in mail.results.drain(..) {
            let promise = self.offloaded.borrow_mut().remove(index);
            promise.fulfil(result);
        }
        self.scratch.borrow_mut().mail = mail;
        main
    }

    /// Submits what is queued, sleeps if `sleep` says for how long at most and nothing has ended,
    /// and settles what has.
    pub(crate) fn turn(&self, sleep: Option<Option<Duration>>) -> Result<()> {
        pool::run(&mut self.batch.borrow_mut());
        let mut scratch = std::mem::take(&mut *self.scratch.borrow_mut());
        let result = self.reap(sleep, &mut scratch);
        for event in scratch.events.drain(..) {
            match event {
                ring::Event::Transfer(index, result) => self.settle(index, result),
                ring::Event::Poll(index) => self.polled(index),
                ring::Event::Bell => {}
            }
        }
        for (index, result) in scratch.ended.drain(..) {
            self.settle(index, result);
        }
        for waker in scratch.wake.drain(..) {
            waker.wake();
        }
        *self.scratch.borrow_mut() = scratch;
        result
    }

    fn reap(&self, mut sleep: Option<Option<Duration>>, scratch: &mut Scratch) -> Result<()> {
        let transfers = &mut *self.transfers.borrow_mut();
        let mut native = self.native.borrow_mut();
        let native = match &mut *native {
            Native::Ready(aio) => Some(aio),
            _ => None,
        };
        if let Some(aio) = native {
            aio.submit(transfers, &mut scratch.ended);
            aio.reap(&mut scratch.ended);
            if !scratch.ended.is_empty() {
                sleep = None;
            }
            self.wait(sleep, transfers, scratch)?;
            aio.reap(&mut scratch.ended);
            return Ok(());
        }
        self.wait(sleep, transfers, scratch)
    }

    fn wait(
        &self,
        sleep: Option<Option<Duration>>,
        transfers: &mut Slab<Pending>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let reactor = &mut *self.reactor.borrow_mut();
        // Mail that came in meanwhile is not slept over.
        let sleep = sleep.filter(|_| self.mailbox.fall_asleep());
        match reactor {
            Reactor::Ring(ring) => {
                let result = ring.turn(sleep, transfers);
                ring.reap(&mut scratch.events);
                result
            }
            Reactor::Epoll(epoll) => {
                let unasked = self.unasked.get() + 1;
                if sleep.is_none() && unasked < TURNS_UNASKED_MAX {
                    self.unasked.set(unasked);
                    return Ok(());
                }
                self.unasked.set(0);
                epoll.wait(sleep.unwrap_or(Some(Duration::ZERO)), &mut scratch.wake)
            }
        }
    }

    fn settle(&self, index: u32, result: i64) {
        let (engine, step) = {
            let mut transfers = self.transfers.borrow_mut();
            let pending = transfers.at(index).expect("a transfer ends once");
            (pending.engine, pending.transfer.advance(result))
        };
        match step {
            Step::Again => self.hand_over(engine, index),
            Step::Ended(result, barrier) => {
                let pending = self.transfers.borrow_mut().remove(index);
                match result {
                    Ok(_) if barrier => {
                        let file = pending.transfer.file.clone();
                        self.offload_for(pending.promise, move || file.sync());
                    }
                    result => pending.promise.fulfil(result),
                }
            }
        }
    }

    fn polled(&self, index: u32) {
        let mut polls = self.polls.borrow_mut();
        let polled = polls.at(index).expect("a poll ends once");
        match std::mem::replace(polled, Polled::Ready) {
            Polled::Waiting(waker) => {
                drop(polls);
                waker.wake();
            }
            Polled::Withdrawn | Polled::Ready => {
                polls.remove(index);
            }
        }
    }
}

fn closed() -> Error {
    Error::new(Kind::Cancelled, "submit an operation", "the event loop has ended")
}

/// Brings the result of offloaded work home, or the news that it panicked.
struct Reply {
    mailbox: Arc<Mailbox>,
    index: u32,
    result: Option<Result<Value>>,
}

impl Reply {
    fn send(mut self, result: Result<Value>) {
        self.result = Some(result);
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or_else(|| {
            Err(Error::new(Kind::Io, "work in the background", "a thread of the pool panicked"))
        });
        self.mailbox.send_result(self.index, result);
    }
}

/// One wait for a descriptor through the ring.
struct RingPoll<'a> {
    driver: &'a Driver,
    index: Option<u32>,
}

impl RingPoll<'_> {
    fn poll(&mut self, fd: RawFd, interest: Interest, cx: &mut Context<'_>) -> Poll<()> {
        let mut polls = self.driver.polls.borrow_mut();
        let Some(index) = self.index else {
            let index = polls.insert(Polled::Waiting(cx.waker().clone()));
            self.index = Some(index);
            let events = match interest {
                Interest::Read => libc::POLLIN | libc::POLLRDHUP,
                Interest::Write => libc::POLLOUT,
            };
            if let Reactor::Ring(ring) = &mut *self.driver.reactor.borrow_mut() {
                ring.poll(fd, events as u32, index);
            }
            return Poll::Pending;
        };
        match polls.at(index).expect("kept until it is ready") {
            Polled::Waiting(waker) => {
                waker.clone_from(cx.waker());
                Poll::Pending
            }
            Polled::Ready | Polled::Withdrawn => {
                polls.remove(index);
                self.index = None;
                Poll::Ready(())
            }
        }
    }
}

impl Drop for RingPoll<'_> {
    fn drop(&mut self) {
        let Some(index) = self.index else { return };
        let mut polls = self.driver.polls.borrow_mut();
        let Some(polled) = polls.at(index) else { return };
        if matches!(polled, Polled::Ready) {
            polls.remove(index);
            return;
        }
        *polled = Polled::Withdrawn;
        if let Reactor::Ring(ring) = &mut *self.driver.reactor.borrow_mut() {
            ring.withdraw_poll(index);
        }
    }
}

impl Reactor {
    fn watch_bell(&mut self, bell: std::os::fd::BorrowedFd<'_>) -> Result<()> {
        match self {
            Reactor::Ring(ring) => {
                ring.watch_bell(bell);
                Ok(())
            }
            Reactor::Epoll(epoll) => epoll.watch_bell(bell),
        }
    }
}

impl Transfer {
    /// A short read of a buffered file: worth a try without waiting, because a hand-over to a
    /// thread costs more than copying from the page cache.
    fn may_be_cached(&self) -> bool {
        const BYTES_MAX: usize = 64 << 10;
        self.direction == Direction::Read
            && self.len() <= BYTES_MAX
            && !self.file.is_direct()
            && self.file.nowait_works()
    }
}
