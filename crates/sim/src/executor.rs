//! Tasks of several queues on one thread, in seeded order, on a virtual clock.
//!
//! Each step polls one runnable task, chosen by chance among all queues' tasks, or, when none is
//! runnable, moves the clock to the next event (a timer, an operation's effect or end) and runs it.
//! When there is neither, and the main task has not ended, everything waits for nobody: a deadlock,
//! which panics with the seed and the list of those that wait.
//!
//! The power fails by [`Executor::run_until`] stopping after a number of steps: tasks and events are
//! then dropped where they stand, as a cut would leave them. Nothing here knows files.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use stillpoint_io::{Background, Job, Queue, Runtime};

use crate::chance::Chance;
use crate::trace::{Event, Trace};

/// A run that takes more steps has no end: something wakes itself for ever.
const STEPS_MAX: u64 = 500_000;

type TaskId = u64;
/// Events run in the order of their time; those of one instant in the order they were made.
type EventKey = (Duration, u64);
type Action = Box<dyn FnOnce()>;

struct Task {
    name: String,
    /// `None` while it is being polled.
    future: Option<LocalBoxFuture<'static, ()>>,
    waker: Arc<TaskWaker>,
    polled_at_step: u64,
}

/// What other threads may touch: wakers are `Send`, so the list of runnable tasks is shared.
#[derive(Default)]
struct Inbox {
    runnable: Mutex<Vec<TaskId>>,
    jobs: Mutex<Vec<Job>>,
}

struct TaskWaker {
    id: TaskId,
    queued: AtomicBool,
    inbox: Arc<Inbox>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        if !self.queued.swap(true, Relaxed) {
            self.inbox.runnable.lock().unwrap().push(self.id);
        }
    }
}

struct Core {
    seed: u64,
    chance: RefCell<Chance>,
    now: Cell<Duration>,
    step: Cell<u64>,
    number: Cell<u64>,
    cut: Cell<bool>,
    tasks: RefCell<BTreeMap<TaskId, Task>>,
    events: RefCell<BTreeMap<EventKey, Action>>,
    inbox: Arc<Inbox>,
    trace: RefCell<Trace>,
}

impl Core {
    /// The next number for a task or an event.
    fn next_number(&self) -> u64 {
        let number = self.number.get() + 1;
        self.number.set(number);
        number
    }

    fn spawn(&self, name: String, future: LocalBoxFuture<'static, ()>) {
        if self.cut.get() {
            return;
        }
        let id = self.next_number();
        let waker =
            Arc::new(TaskWaker { id, queued: AtomicBool::new(false), inbox: self.inbox.clone() });
        waker.clone().wake();
        let task = Task { name, future: Some(future), waker, polled_at_step: 0 };
        self.tasks.borrow_mut().insert(id, task);
    }

    fn at(&self, time: Duration, action: Action) -> EventKey {
        let key = (time.max(self.now.get()), self.next_number());
        if !self.cut.get() {
            self.events.borrow_mut().insert(key, action);
        }
        key
    }

    fn record(&self, event: Event) {
        self.trace.borrow_mut().record(self.now.get(), event);
    }

    /// One task or one event; false if there is neither.
    fn advance(&self) -> bool {
        self.step.set(self.step.get() + 1);
        let runnable = {
            let mut runnable = self.inbox.runnable.lock().unwrap();
            match runnable.len() as u64 {
                0 => None,
                count => {
                    let index = self.chance.borrow_mut().below(count) as usize;
                    Some(runnable.swap_remove(index))
                }
            }
        };
        if let Some(id) = runnable {
            self.poll(id);
            return true;
        }
        let Some(((time, _), action)) = self.events.borrow_mut().pop_first() else {
            return false;
        };
        self.now.set(time);
        action();
        true
    }

    fn poll(&self, id: TaskId) {
        let (mut future, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            // A task that has ended may still be woken by those who kept its waker.
            let Some(task) = tasks.get_mut(&id) else { return };
            task.polled_at_step = self.step.get();
            task.waker.queued.store(false, Relaxed);
            (task.future.take().expect("a task polls itself"), task.waker.clone())
        };
        self.record(Event::Poll(id));
        let waker = Waker::from(waker);
        if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            let task = self.tasks.borrow_mut().remove(&id);
            drop(task);
        } else if let Some(task) = self.tasks.borrow_mut().get_mut(&id) {
            task.future = Some(future);
        }
    }

    /// Drops tasks and events where they stand.
    fn cut(&self) {
        self.cut.set(true);
        // Drops of one may touch the others: each list is taken out first.
        let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        drop(tasks);
        let events = std::mem::take(&mut *self.events.borrow_mut());
        drop(events);
        self.inbox.jobs.lock().unwrap().clear();
    }

    fn describe_waiting(&self) -> String {
        let mut text = String::new();
        for (id, task) in self.tasks.borrow().iter() {
            let _ = writeln!(
                text,
                "  task {id} ({}), last ran at step {}",
                task.name, task.polled_at_step
            );
        }
        text
    }
}

/// Runs a world from a seed; see the module's head.
pub struct Executor {
    core: Rc<Core>,
}

impl Executor {
    /// An executor whose every decision comes from `seed`.
    pub fn new(seed: u64) -> Executor {
        Executor {
            core: Rc::new(Core {
                seed,
                chance: RefCell::new(Chance::new(seed)),
                now: Cell::new(Duration::ZERO),
                step: Cell::new(0),
                number: Cell::new(0),
                cut: Cell::new(false),
                tasks: RefCell::default(),
                events: RefCell::default(),
                inbox: Arc::default(),
                trace: RefCell::default(),
            }),
        }
    }

    /// A queue of its own, called `name` in messages.
    pub fn queue(&self, name: &str) -> Queue {
        let driver = Driver { core: self.core.clone() };
        Queue::new(Rc::new(SimRuntime { driver, name: name.to_owned() }))
    }

    /// A background whose jobs run as tasks among all others.
    pub fn background(&self) -> Arc<dyn Background> {
        Arc::new(SimBackground(self.core.inbox.clone()))
    }

    /// Runs until `main` has ended. Other tasks stay where they are.
    ///
    /// # Panics
    /// On a deadlock, and when there is no end in sight.
    pub fn run<T: 'static>(&self, main: impl Future<Output = T> + 'static) -> T {
        self.run_until(u64::MAX, || {}, main).expect("no run has so many steps")
    }

    /// Runs until `main` has ended, or until so many steps have been taken since this executor was
    /// made; `None` then: the power has failed, and nothing runs here any more. `watch` looks on
    /// before each step, and before the cut.
    ///
    /// # Panics
    /// On a deadlock, and when there is no end in sight.
    pub fn run_until<T: 'static>(
        &self,
        steps: u64,
        mut watch: impl FnMut(),
        main: impl Future<Output = T> + 'static,
    ) -> Option<T> {
        let result = Rc::new(RefCell::new(None));
        let slot = result.clone();
        self.core.spawn(
            "main".to_owned(),
            Box::pin(async move {
                let value = main.await;
                *slot.borrow_mut() = Some(value);
            }),
        );
        while result.borrow().is_none() {
            watch();
            if self.core.step.get() >= steps {
                self.core.cut();
                return None;
            }
            self.advance_or_panic();
        }
        result.take()
    }

    /// Runs until nothing is left to run: background work ends, timers pass.
    pub fn settle(&self) {
        while self.advance() {}
    }

    fn advance(&self) -> bool {
        let jobs = std::mem::take(&mut *self.core.inbox.jobs.lock().unwrap());
        for job in jobs {
            let queue = self.queue("background");
            self.core.spawn("a background job".to_owned(), job(queue));
        }
        let core = &self.core;
        assert!(core.step.get() < STEPS_MAX, "no end in sight; seed {:#x}", core.seed);
        core.advance()
    }

    fn advance_or_panic(&self) {
        if !self.advance() {
            let waiting = self.core.describe_waiting();
            panic!("deadlock; seed {:#x}; these wait for nobody:\n{waiting}", self.core.seed);
        }
    }

    /// A stream of chance of its own.
    pub fn fork_chance(&self) -> Chance {
        self.core.chance.borrow_mut().fork()
    }

    /// How many steps have been taken.
    pub fn steps(&self) -> u64 {
        self.core.step.get()
    }

    /// The hash of everything that happened.
    pub fn history(&self) -> u64 {
        self.core.trace.borrow().hash()
    }

    /// The last events in words.
    pub fn last_events(&self) -> String {
        self.core.trace.borrow().to_string()
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A second panic in somebody's drop would hide the first: what is left is leaked.
            if !crate::history::is_silent() {
                let (seed, step) = (self.core.seed, self.steps());
                eprintln!("executor's seed {seed:#x}, step {step}\n{}", self.last_events());
            }
            std::mem::forget(std::mem::take(&mut *self.core.tasks.borrow_mut()));
            std::mem::forget(std::mem::take(&mut *self.core.events.borrow_mut()));
        }
        self.core.cut();
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executor(seed {:#x}, step {})", self.core.seed, self.steps())
    }
}

/// What simulated files, workloads and tests submit their events and notes through:
/// `queue.driver::<Driver>()`.
#[derive(Clone)]
pub struct Driver {
    core: Rc<Core>,
}

impl Driver {
    /// The driver behind `queue`.
    ///
    /// # Panics
    /// If it is no queue of an [`Executor`].
    pub fn of(queue: &Queue) -> Driver {
        queue.driver::<Driver>().expect("simulated storage on a queue that is not").clone()
    }

    /// Runs `action` after `delay` of virtual time.
    pub fn after(&self, delay: Duration, action: impl FnOnce() + 'static) {
        self.core.at(self.core.now.get() + delay, Box::new(action));
    }

    /// Decides something by the run's chance.
    pub fn chance<R>(&self, decide: impl FnOnce(&mut Chance) -> R) -> R {
        decide(&mut self.core.chance.borrow_mut())
    }

    /// Adds to the run's history.
    pub fn record(&self, event: Event) {
        self.core.record(event);
    }
}

struct SimRuntime {
    driver: Driver,
    name: String,
}

impl Runtime for SimRuntime {
    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        let core = &self.driver.core;
        core.spawn(format!("spawned on {} at step {}", self.name, core.step.get()), task);
    }

    fn now(&self) -> Duration {
        self.driver.core.now.get()
    }

    fn sleep_until(&self, at: Duration) -> LocalBoxFuture<'static, ()> {
        Box::pin(Sleep { core: self.driver.core.clone(), at, event: None })
    }

    fn random(&self) -> u64 {
        self.driver.chance(Chance::draw)
    }

    fn driver(&self) -> &dyn Any {
        &self.driver
    }
}

struct Sleep {
    core: Rc<Core>,
    at: Duration,
    event: Option<EventKey>,
}

impl Sleep {
    fn disarm(&mut self) {
        if let Some(event) = self.event.take() {
            let action = self.core.events.borrow_mut().remove(&event);
            drop(action);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.disarm();
        if self.core.now.get() >= self.at {
            return Poll::Ready(());
        }
        let waker = cx.waker().clone();
        let event = self.core.at(self.at, Box::new(move || waker.wake()));
        self.event = Some(event);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.disarm();
    }
}

#[derive(Clone)]
struct SimBackground(Arc<Inbox>);

impl Background for SimBackground {
    fn run(&self, job: Job) {
        self.0.jobs.lock().unwrap().push(job);
    }
}

impl fmt::Debug for SimBackground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimBackground")
    }
}
