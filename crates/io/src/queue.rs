//! One thread's event loop, as the engine sees it.
//!
//! A [`Queue`] belongs to one thread and is never sent to another. Request futures are created with
//! a `&Queue`, submit their I/O through it and are polled on it. What must run off the request path
//! goes to a [`Background`], which owns a queue of its own.

use std::any::Any;
use std::fmt;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;

/// What an event loop offers; the host's loop and the simulator's executor implement it.
pub trait Runtime: 'static {
    /// Runs `task` on this loop until it ends.
    fn spawn(&self, task: LocalBoxFuture<'static, ()>);
    /// The time since some fixed instant; never goes back.
    fn now(&self) -> Duration;
    /// Resolves once [`Runtime::now`] has reached `at`.
    fn sleep_until(&self, at: Duration) -> LocalBoxFuture<'static, ()>;
    /// A number that nobody outside can guess (or, in the simulator, one from the seed).
    fn random(&self) -> u64;
    /// What this runtime's own files submit their operations through.
    fn driver(&self) -> &dyn Any;
}

/// A handle on the current thread's event loop; cheap to clone, never sent.
#[derive(Clone)]
pub struct Queue(Rc<dyn Runtime>);

impl Queue {
    /// Wraps a runtime.
    pub fn new(runtime: Rc<dyn Runtime>) -> Queue {
        Queue(runtime)
    }

    /// Runs `task` on this queue until it ends.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.0.spawn(Box::pin(task));
    }

    /// The time since some fixed instant; never goes back.
    pub fn now(&self) -> Duration {
        self.0.now()
    }

    /// Waits for `duration`.
    pub async fn sleep(&self, duration: Duration) {
        self.0.sleep_until(self.0.now() + duration).await;
    }

    /// Lets the other tasks of this queue have a turn.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// A number that nobody outside can guess.
    pub fn random(&self) -> u64 {
        self.0.random()
    }

    /// The runtime's own driver, if it is a `T`.
    pub fn driver<T: 'static>(&self) -> Option<&T> {
        self.0.driver().downcast_ref::<T>()
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queue")
    }
}

/// Work for a [`Background`]: made on its queue, so that the future itself need not be `Send`.
pub type Job = Box<dyn FnOnce(Queue) -> LocalBoxFuture<'static, ()> + Send>;

/// Runs jobs on a queue of its own: growth ahead of need, punching, checkpoints.
pub trait Background: Send + Sync + fmt::Debug {
    /// Starts `job` there soon; never blocks.
    fn run(&self, job: Job);
}
