//! One thread's event loop.
//!
//! # A turn
//!
//! 1. Every task that was runnable when the turn began is polled once, and the main future if it was
//!    woken. What they submit is only queued.
//! 2. Mail of other threads is taken in: tasks to wake, results of offloaded work.
//! 3. Due timers wake their tasks.
//! 4. The driver hands everything queued to the kernel in one call and, if no task is runnable,
//!    sleeps in that same call; then it settles what has ended.
//!
//! So tasks cannot starve sockets and disks, nor the other way round.
//!
//! # Ending
//!
//! [`run`] ends when its main future does. Tasks that still exist are dropped, on this thread; what
//! the kernel or the pool still works on is waited for (R2).
//!
//! Deliberately absent: work stealing, priorities, blocking inside a task.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use async_task::Runnable;
use stillpoint_io::{Error, Kind, Queue, Result, Runtime};

mod aio;
pub(crate) mod driver;
mod epoll;
mod mailbox;
mod ring;
mod thread;
mod timers;

use crate::slab::Slab;
use driver::Driver;
use mailbox::Mailbox;
use timers::{Sleeper, Timers};

pub use thread::{LoopThread, spawn_thread};

/// By which of the host's interfaces reads and writes are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Aio {
    /// Linux AIO; needs direct I/O.
    Native,
    /// io_uring.
    IoUring,
    /// Blocking calls on a pool of threads.
    Threads,
}

impl Aio {
    /// All of them, in the order of the help text.
    pub const ALL: [Aio; 3] = [Aio::Native, Aio::IoUring, Aio::Threads];
}

impl fmt::Display for Aio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Aio::Native => "native",
            Aio::IoUring => "io_uring",
            Aio::Threads => "threads",
        })
    }
}

impl FromStr for Aio {
    type Err = Error;

    fn from_str(text: &str) -> Result<Aio> {
        Aio::ALL.into_iter().find(|aio| aio.to_string() == text).ok_or_else(|| {
            let why = format!("'{text}' is none of native, io_uring, threads");
            Error::new(Kind::Invalid, "choose an AIO engine", why)
        })
    }
}

/// How a loop works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopOptions {
    /// Which engine its files will mostly want: a ring is only set up for [`Aio::IoUring`].
    pub aio: Aio,
    /// How many operations are handed to the kernel at once; more wait in the loop.
    pub depth: u32,
}

impl Default for LoopOptions {
    fn default() -> LoopOptions {
        LoopOptions { aio: Aio::IoUring, depth: 256 }
    }
}

/// Runs a loop on this thread until the future that `main` makes has ended, and returns its value.
///
/// # Errors
/// If the host refuses what a loop needs, or this thread runs one already.
pub fn run<T>(options: LoopOptions, main: impl AsyncFnOnce(Queue) -> T) -> Result<T> {
    let driver = Driver::new(options)?;
    let mailbox = driver.mailbox.clone();
    let at_home = AtHome::enter(&mailbox)?;
    let event_loop = Rc::new(EventLoop {
        driver,
        timers: Rc::default(),
        chance: RefCell::new(Chance { words: [0; 32], left: 0 }),
        tasks: Rc::new(RefCell::new(Slab::new())),
    });
    let ending = Ending { event_loop: &event_loop, _at_home: at_home };
    let result = {
        let mut main = pin!(main(Queue::new(event_loop.clone())));
        let waker = Waker::from(Arc::new(MainWaker(mailbox)));
        let mut cx = Context::from_waker(&waker);
        HERE.with(|here| here.main.set(true));
        loop {
            if HERE.with(|here| here.main.replace(false))
                && let Poll::Ready(value) = main.as_mut().poll(&mut cx)
            {
                break Ok(value);
            }
            if let Err(error) = event_loop.turn() {
                break Err(error);
            }
        }
    };
    drop(ending);
    result
}

/// What a thread's wakers need of its loop.
struct Here {
    /// Which loop this thread runs: its mailbox's address, or 0.
    home: Cell<usize>,
    /// Its main future was woken.
    main: Cell<bool>,
    runnable: RefCell<VecDeque<Runnable>>,
}

thread_local! {
    static HERE: Here = const {
        Here { home: Cell::new(0), main: Cell::new(false), runnable: RefCell::new(VecDeque::new()) }
    };
}

/// This thread is a loop's home for as long as this lives.
struct AtHome;

impl AtHome {
    fn enter(mailbox: &Arc<Mailbox>) -> Result<AtHome> {
        let address = Arc::as_ptr(mailbox) as usize;
        HERE.with(|here| {
            if here.home.get() != 0 {
                let why = "this thread runs one already";
                return Err(Error::new(Kind::Invalid, "start an event loop", why));
            }
            here.home.set(address);
            Ok(AtHome)
        })
    }
}

impl Drop for AtHome {
    fn drop(&mut self) {
        HERE.with(|here| here.home.set(0));
    }
}

fn schedule(mailbox: &Arc<Mailbox>, runnable: Runnable) {
    let address = Arc::as_ptr(mailbox) as usize;
    let mut runnable = Some(runnable);
    let _ = HERE.try_with(|here| {
        if here.home.get() == address {
            here.runnable.borrow_mut().extend(runnable.take());
        }
    });
    if let Some(runnable) = runnable {
        mailbox.send_runnable(runnable);
    }
}

struct MainWaker(Arc<Mailbox>);

impl Wake for MainWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let address = Arc::as_ptr(&self.0) as usize;
        let at_home = HERE.try_with(|here| {
            let at_home = here.home.get() == address;
            if at_home {
                here.main.set(true);
            }
            at_home
        });
        if !matches!(at_home, Ok(true)) {
            self.0.wake_main();
        }
    }
}

struct EventLoop {
    driver: Driver,
    timers: Rc<RefCell<Timers>>,
    chance: RefCell<Chance>,
    tasks: Tasks,
}

/// A waker of every task that exists, so that all can be found and dropped in the end.
type Tasks = Rc<RefCell<Slab<Waker>>>;

type LocalBoxFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// A task with its place in the table of all tasks, which it gives up when it has gone.
struct Task {
    task: LocalBoxFuture<()>,
    _place: Place,
}

impl Future for Task {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.task.as_mut().poll(cx)
    }
}

struct Place {
    tasks: Tasks,
    index: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        let waker = self.tasks.borrow_mut().remove(self.index);
        drop(waker);
    }
}

/// Random words, fetched from the host some at a time.
struct Chance {
    words: [u64; 32],
    left: usize,
}

impl Chance {
    fn next(&mut self) -> u64 {
        if self.left == 0 {
            let mut bytes = [0u8; 32 * 8];
            let mut filled = 0;
            while filled < bytes.len() {
                let flags = rustix::rand::GetRandomFlags::empty();
                // Interrupted or cut short, it goes on; nothing else can go wrong with it.
                filled += rustix::rand::getrandom(&mut bytes[filled..], flags).unwrap_or(0);
            }
            for (word, bytes) in self.words.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *word = u64::from_ne_bytes(*bytes);
            }
            self.left = self.words.len();
        }
        self.left -= 1;
        std::mem::take(&mut self.words[self.left])
    }
}

impl EventLoop {
    fn turn(&self) -> Result<()> {
        self.run_tasks();
        self.collect();
        let next = self.wake_sleepers();
        let idle = HERE.with(|here| here.runnable.borrow().is_empty() && !here.main.get());
        self.driver.turn(idle.then_some(next))
    }

    /// Takes in what other threads sent.
    fn collect(&self) {
        HERE.with(|here| {
            let main =
                self.driver.collect(|runnables| here.runnable.borrow_mut().extend(runnables));
            if main {
                here.main.set(true);
            }
        });
    }

    /// Polls each task once that is runnable now.
    fn run_tasks(&self) {
        let count = HERE.with(|here| here.runnable.borrow().len());
        for _ in 0..count {
            let Some(runnable) = HERE.with(|here| here.runnable.borrow_mut().pop_front()) else {
                break;
            };
            runnable.run();
        }
    }

    /// Wakes who has slept enough; how long until the next one.
    fn wake_sleepers(&self) -> Option<Duration> {
        self.timers.borrow().next()?;
        let now = now();
        loop {
            let due = self.timers.borrow_mut().take_due(now);
            match due {
                Some(Some(waker)) => waker.wake(),
                Some(None) => {}
                None => break,
            }
        }
        self.timers.borrow().next().map(|at| at.saturating_sub(now))
    }

    /// Drops all tasks and waits for what is in flight.
    fn end(&self) {
        self.driver.close();
        let sweep = || {
            let wakers: Vec<Waker> = self.tasks.borrow().values().cloned().collect();
            for waker in wakers {
                waker.wake();
            }
            while let Some(runnable) = HERE.with(|here| here.runnable.borrow_mut().pop_front()) {
                drop(runnable);
            }
        };
        sweep();
        // A dropped task may have woken or spawned others, and mail may still hold runnables.
        while self.tasks.borrow().len() > 0 || !self.driver.is_quiet() {
            self.collect();
            sweep();
            let in_flight = !self.driver.is_quiet();
            if let Err(error) = self.driver.turn(in_flight.then_some(None)) {
                // R2: going on would give memory back that the kernel may still write to.
                tracing::error!("{error}; cannot wait for operations in flight");
                std::process::abort();
            }
        }
        self.timers.borrow_mut().clear();
    }
}

/// Ends the loop, also when a task panics.
struct Ending<'a> {
    event_loop: &'a Rc<EventLoop>,
    _at_home: AtHome,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.event_loop.end();
    }
}

impl Runtime for EventLoop {
    fn spawn(&self, task: LocalBoxFuture<()>) {
        if self.driver.is_closed() {
            return;
        }
        let index = self.tasks.borrow_mut().insert(Waker::noop().clone());
        let task = Task { task, _place: Place { tasks: self.tasks.clone(), index } };
        let mailbox = self.driver.mailbox.clone();
        // SAFETY: a runnable is run or dropped on this thread alone: `schedule` sends it home, and
        // `end` drops every task before the loop goes away. The schedule function is `Send + Sync`.
        let (runnable, task) = unsafe {
            async_task::spawn_unchecked(task, move |runnable| schedule(&mailbox, runnable))
        };
        task.detach();
        *self.tasks.borrow_mut().at(index).expect("inserted above") = runnable.waker();
        runnable.schedule();
    }

    fn now(&self) -> Duration {
        now()
    }

    fn sleep_until(&self, at: Duration) -> LocalBoxFuture<()> {
        let timers = self.timers.clone();
        let mut sleeper: Option<Sleeper> = None;
        Box::pin(poll_fn(move |cx| timers.borrow_mut().poll(at, now(), &mut sleeper, cx)))
    }

    fn random(&self) -> u64 {
        self.chance.borrow_mut().next()
    }

    fn driver(&self) -> &dyn std::any::Any {
        &self.driver
    }
}

fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
