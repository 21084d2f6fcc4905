//! A loop on a thread of its own, which takes jobs from anywhere.

use std::cell::RefCell;
use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;

use stillpoint_io::{Background, Error, Job, Kind, Queue, Result};

use super::{LoopOptions, run};

/// A running loop; see [`spawn_thread`]. Dropping it waits for its jobs.
pub struct LoopThread {
    name: String,
    inbox: Arc<Mutex<Inbox>>,
    thread: Option<JoinHandle<Result<()>>>,
}

#[derive(Default)]
struct Inbox {
    jobs: Vec<Job>,
    stopping: bool,
    waker: Option<Waker>,
}

/// Starts a thread called `name` with a loop on it.
///
/// # Errors
/// If the host refuses the thread or what its loop needs.
pub fn spawn_thread(name: &str, options: LoopOptions) -> Result<LoopThread> {
    let inbox = Arc::new(Mutex::new(Inbox::default()));
    let (started, wait) = sync_channel(1);
    let jobs = inbox.clone();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        run(options, async move |queue| {
            let _ = started.send(());
            serve(queue, &jobs).await;
        })
    });
    let thread = thread.map_err(|error| Error::from_std("start a thread", &error))?;
    let thread = LoopThread { name: name.to_owned(), inbox, thread: Some(thread) };
    match wait.recv() {
        Ok(()) => Ok(thread),
        Err(_) => Err(thread.join().expect_err("it ended before it began")),
    }
}

/// Runs jobs until told to stop, and then those that have not ended.
async fn serve(queue: Queue, inbox: &Mutex<Inbox>) {
    // How many jobs run, and who wants to know when one ends.
    let running: Rc<RefCell<(usize, Option<Waker>)>> = Rc::default();
    poll_fn(|cx| {
        let (jobs, stopping) = {
            let mut inbox = inbox.lock().unwrap();
            match &mut inbox.waker {
                Some(waker) => waker.clone_from(cx.waker()),
                None => inbox.waker = Some(cx.waker().clone()),
            }
            (std::mem::take(&mut inbox.jobs), inbox.stopping)
        };
        for job in jobs {
            running.borrow_mut().0 += 1;
            let job = job(queue.clone());
            let running = running.clone();
            queue.spawn(async move {
                job.await;
                let mut running = running.borrow_mut();
                running.0 -= 1;
                if let Some(waker) = running.1.take() {
                    waker.wake();
                }
            });
        }
        let mut running = running.borrow_mut();
        if stopping && running.0 == 0 {
            return Poll::Ready(());
        }
        running.1 = stopping.then(|| cx.waker().clone());
        Poll::Pending
    })
    .await;
}

impl LoopThread {
    fn stop(&self) {
        let waker = {
            let mut inbox = self.inbox.lock().unwrap();
            inbox.stopping = true;
            inbox.waker.clone()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes no more jobs, and waits until those it has have ended.
    ///
    /// # Errors
    /// If the loop failed, or a job panicked.
    pub fn join(mut self) -> Result<()> {
        self.stop();
        let thread = self.thread.take().expect("only `join` and `drop` take it");
        thread.join().unwrap_or_else(|_| {
            let why = format!("a job on the thread '{}' panicked", self.name);
            Err(Error::new(Kind::Io, "run jobs", why))
        })
    }
}

impl Background for LoopThread {
    fn run(&self, job: Job) {
        let mut inbox = self.inbox.lock().unwrap();
        if inbox.stopping {
            tracing::warn!("a job came too late for the thread '{}', and is dropped", self.name);
            return;
        }
        inbox.jobs.push(job);
        let waker = inbox.waker.clone();
        drop(inbox);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for LoopThread {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for LoopThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoopThread({})", self.name)
    }
}
