//! Threads for what blocks: one bounded pool per process, shared by all loops.
//!
//! Threads are started when work waits and nobody is idle, and end after idling a while. Work is
//! handed over in batches, one lock for a loop's whole turn.
//!
//! Deliberately absent: results. Work says itself where its result goes.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

pub(crate) type Work = Box<dyn FnOnce() + Send>;

const THREADS_MAX: usize = 64;
const IDLE_MAX: Duration = Duration::from_secs(10);

struct Pool {
    state: Mutex<State>,
    ready: Condvar,
}

struct State {
    queue: VecDeque<Work>,
    idle: usize,
    threads: usize,
}

static POOL: Pool = Pool {
    state: Mutex::new(State { queue: VecDeque::new(), idle: 0, threads: 0 }),
    ready: Condvar::new(),
};

/// Hands over everything in `batch`.
pub(crate) fn run(batch: &mut Vec<Work>) {
    if batch.is_empty() {
        return;
    }
    let mut state = POOL.state.lock().unwrap();
    let count = batch.len();
    state.queue.extend(batch.drain(..));
    let wake = count.min(state.idle);
    let missing = state.queue.len().saturating_sub(state.idle).min(THREADS_MAX - state.threads);
    let mut started = 0;
    for _ in 0..missing {
        let thread = std::thread::Builder::new().name("stillpoint-pool".into());
        if thread.spawn(serve).is_err() {
            break;
        }
        started += 1;
    }
    state.threads += started;
    assert!(state.threads > 0, "the host refuses to start even one thread");
    drop(state);
    for _ in 0..wake {
        POOL.ready.notify_one();
    }
}

fn serve() {
    let mut state = POOL.state.lock().unwrap();
    loop {
        while let Some(work) = state.queue.pop_front() {
            drop(state);
            // A panic is reported by the panic hook, and by the work's own reply when it is dropped.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            state = POOL.state.lock().unwrap();
        }
        state.idle += 1;
        let waited;
        (state, waited) =
            POOL.ready.wait_timeout_while(state, IDLE_MAX, |state| state.queue.is_empty()).unwrap();
        state.idle -= 1;
        if waited.timed_out() && state.queue.is_empty() {
            state.threads -= 1;
            return;
        }
    }
}
