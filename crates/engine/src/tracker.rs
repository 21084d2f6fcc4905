//! Which requests are under way, and which of them exclude each other.
//!
//! Every request *enters* with its guest range before it looks at any mapping, and *leaves* when its
//! last I/O has ended. Two things are kept:
//!
//! - **Stripes.** The disk is cut into stripes of 1 MiB, hashed into 1,024 locks. Ordinary requests
//!   hold theirs shared, which costs one atomic increment; a serialising request (the
//!   read-modify-write of an unaligned write, a discard, a zeroing, a job's copy) holds its stripes
//!   exclusively and may [demote](Entered::demote) itself. Stripes are taken in ascending order, so
//!   no deadlock can form. Each stripe is granted in the order of arrival: a waiting exclusive holds
//!   back later shared ones, and is itself never overtaken.
//! - **Registrations.** Entering counts the request in the current epoch. [`Tracker::quiesce`] starts
//!   a new epoch and waits until everybody of the older one has left. A freed cluster is reused only
//!   after that (R4), and a snapshot's flip will settle by it (S5): a request registers, then, with
//!   a full fence between, reads the flip's word.
//!
//! Deliberately absent: any knowledge of images, and any wait while holding a lock of this file.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

use async_lock::Mutex as AsyncMutex;
use event_listener::Event;
use smallvec::SmallVec;

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use crate::sync::{Arc, Mutex, lock};

/// Bytes of a stripe.
const STRIPE_BYTES: u64 = 1 << 20;
const STRIPE_COUNT: u64 = 1024;
/// Registrations are counted in shards, so that queues do not fight over one cache line.
const SHARD_COUNT: usize = 16;

/// How a request holds its stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Beside other shared ones.
    Shared,
    /// Alone.
    Exclusive,
}

/// Requests under way; see the module's head.
pub(crate) struct Tracker {
    stripes: Box<[Stripe]>,
    epoch: AtomicU64,
    active: [[Shard; SHARD_COUNT]; 2],
    quiescing: AsyncMutex<()>,
    left: Event,
}

#[repr(align(64))]
#[derive(Default)]
struct Shard(AtomicU32);

#[derive(Default)]
struct Stripe {
    /// [`QUEUED`], [`EXCLUSIVE`], and in the low bits the number of shared holders.
    state: AtomicU32,
    queue: Mutex<VecDeque<Arc<Waiter>>>,
}

/// Somebody waits: everybody else queues behind.
const QUEUED: u32 = 1 << 31;
/// Held exclusively.
const EXCLUSIVE: u32 = 1 << 30;

struct Waiter {
    mode: Mode,
    turn: Mutex<Turn>,
}

#[derive(Default)]
struct Turn {
    granted: bool,
    waker: Option<Waker>,
}

impl Tracker {
    pub(crate) fn new() -> Tracker {
        Tracker {
            stripes: (0..STRIPE_COUNT).map(|_| Stripe::default()).collect(),
            epoch: AtomicU64::new(0),
            active: Default::default(),
            quiescing: AsyncMutex::new(()),
            left: Event::new(),
        }
    }

    /// Registers a request for `range` (bytes, far less than all stripes) and waits for its stripes.
    pub(crate) async fn enter(&self, range: Range<u64>, mode: Mode) -> Entered<'_> {
        let mut entered = Entered {
            tracker: self,
            registration: self.register((range.start / STRIPE_BYTES) as usize),
            stripes: SmallVec::new(),
            mode,
        };
        let first = range.start / STRIPE_BYTES;
        let count = (range.end.max(range.start + 1) - 1) / STRIPE_BYTES + 1 - first;
        debug_assert!(count <= STRIPE_COUNT / 2 + 1);
        // Ascending order: what wraps around comes first.
        let start = first % STRIPE_COUNT;
        let wrapped = (start + count).saturating_sub(STRIPE_COUNT);
        for index in (0..wrapped).chain(start..(start + count).min(STRIPE_COUNT)) {
            self.stripes[index as usize].acquire(mode).await;
            entered.stripes.push(index as u16);
        }
        entered
    }

    fn register(&self, shard: usize) -> Registration {
        let shard = shard % SHARD_COUNT;
        loop {
            let epoch = self.epoch.load(SeqCst);
            let registration = Registration { epoch, shard };
            self.counter(registration).fetch_add(1, SeqCst);
            // Whoever began a new epoch before this increment may not have seen it: start over.
            if self.epoch.load(SeqCst) == epoch {
                return registration;
            }
            self.unregister(registration);
        }
    }

    fn unregister(&self, registration: Registration) {
        if self.counter(registration).fetch_sub(1, SeqCst) == 1
            && self.epoch.load(SeqCst) != registration.epoch
        {
            self.left.notify(usize::MAX);
        }
    }

    fn counter(&self, registration: Registration) -> &AtomicU32 {
        &self.active[(registration.epoch % 2) as usize][registration.shard].0
    }

    /// Waits until every request that had entered before this was called has left.
    pub(crate) async fn quiesce(&self) {
        let _one_at_a_time = self.quiescing.lock().await;
        let epoch = self.epoch.fetch_add(1, SeqCst);
        for shard in 0..SHARD_COUNT {
            let counter = self.counter(Registration { epoch, shard });
            while counter.load(SeqCst) != 0 {
                let left = self.left.listen();
                if counter.load(SeqCst) != 0 {
                    left.await;
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Registration {
    epoch: u64,
    shard: usize,
}

/// A request under way; leaving is dropping it.
pub(crate) struct Entered<'a> {
    tracker: &'a Tracker,
    registration: Registration,
    stripes: SmallVec<[u16; 4]>,
    mode: Mode,
}

impl Entered<'_> {
    /// Lets other shared requests in again.
    #[allow(dead_code, reason = "jobs' copies use it")]
    pub(crate) fn demote(&mut self) {
        if self.mode == Mode::Exclusive {
            self.mode = Mode::Shared;
            for &index in &self.stripes {
                self.tracker.stripes[index as usize].demote();
            }
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        for &index in &self.stripes {
            self.tracker.stripes[index as usize].release(self.mode);
        }
        self.tracker.unregister(self.registration);
    }
}

impl Stripe {
    async fn acquire(&self, mode: Mode) {
        if mode == Mode::Shared {
            if self.state.fetch_add(1, SeqCst) & (QUEUED | EXCLUSIVE) == 0 {
                return;
            }
            self.release(Mode::Shared);
        } else if self.state.compare_exchange(0, EXCLUSIVE, SeqCst, SeqCst).is_ok() {
            return;
        }
        let waiter = Arc::new(Waiter { mode, turn: Mutex::default() });
        {
            let mut queue = lock(&self.queue);
            queue.push_back(waiter.clone());
            self.state.fetch_or(QUEUED, SeqCst);
            self.grant(&mut queue);
        }
        let waiting = Waiting { stripe: self, waiter: Some(waiter) };
        waiting.granted().await;
    }

    fn release(&self, mode: Mode) {
        let before = match mode {
            Mode::Shared => self.state.fetch_sub(1, SeqCst),
            Mode::Exclusive => self.state.fetch_and(!EXCLUSIVE, SeqCst),
        };
        let last = mode == Mode::Exclusive || before & !(QUEUED | EXCLUSIVE) == 1;
        if before & QUEUED != 0 && last {
            self.grant(&mut lock(&self.queue));
        }
    }

    fn demote(&self) {
        // One step, or a waiting exclusive could slip in between.
        let mut state = self.state.load(SeqCst);
        loop {
            let next = (state & !EXCLUSIVE) + 1;
            match self.state.compare_exchange(state, next, SeqCst, SeqCst) {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        if state & QUEUED != 0 {
            self.grant(&mut lock(&self.queue));
        }
    }

    /// Lets in whoever is first in the queue, as far as the holders allow.
    fn grant(&self, queue: &mut VecDeque<Arc<Waiter>>) {
        while let Some(first) = queue.front() {
            let granted = match first.mode {
                Mode::Shared => {
                    let held = self.state.fetch_add(1, SeqCst) & EXCLUSIVE != 0;
                    if held {
                        // Nobody can miss this: the exclusive holder's release grants again.
                        self.state.fetch_sub(1, SeqCst);
                    }
                    !held
                }
                Mode::Exclusive => {
                    self.state.compare_exchange(QUEUED, QUEUED | EXCLUSIVE, SeqCst, SeqCst).is_ok()
                }
            };
            if !granted {
                return;
            }
            let waiter = queue.pop_front().expect("it was just seen");
            let mut turn = lock(&waiter.turn);
            turn.granted = true;
            if let Some(waker) = turn.waker.take() {
                waker.wake();
            }
        }
        self.state.fetch_and(!QUEUED, SeqCst);
    }
}

/// Gives the place in the queue, or the lock just granted, back when its request is dropped.
struct Waiting<'a> {
    stripe: &'a Stripe,
    waiter: Option<Arc<Waiter>>,
}

impl Waiting<'_> {
    async fn granted(mut self) {
        poll_fn(|cx| {
            let waiter = self.waiter.as_ref().expect("polled until granted");
            let mut turn = lock(&waiter.turn);
            if turn.granted {
                return Poll::Ready(());
            }
            turn.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        self.waiter = None;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take() else { return };
        let mut queue = lock(&self.stripe.queue);
        if lock(&waiter.turn).granted {
            drop(queue);
            self.stripe.release(waiter.mode);
        } else {
            queue.retain(|other| !Arc::ptr_eq(other, &waiter));
            self.stripe.grant(&mut queue);
        }
    }
}

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tracker")
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    fn enter(tracker: &Tracker, range: Range<u64>, mode: Mode) -> Option<Entered<'_>> {
        poll(pin!(tracker.enter(range, mode)))
    }

    #[test]
    fn exclusive_excludes_its_stripes_alone() {
        let tracker = Tracker::new();
        let exclusive = enter(&tracker, MIB..3 * MIB, Mode::Exclusive).unwrap();
        assert!(enter(&tracker, 0..MIB, Mode::Shared).is_some());
        assert!(enter(&tracker, 3 * MIB..4 * MIB, Mode::Exclusive).is_some());
        assert!(enter(&tracker, 0..MIB + 1, Mode::Shared).is_none());
        assert!(enter(&tracker, 2 * MIB..2 * MIB + 1, Mode::Exclusive).is_none());
        drop(exclusive);
        assert!(enter(&tracker, 0..4 * MIB, Mode::Exclusive).is_some());
    }

    #[test]
    fn waiting_exclusive_holds_back_later_shared_ones_and_is_served_in_order() {
        let tracker = Tracker::new();
        let first = enter(&tracker, 0..1, Mode::Shared).unwrap();
        let mut exclusive = pin!(tracker.enter(0..1, Mode::Exclusive));
        assert!(poll(exclusive.as_mut()).is_none());
        let mut later = pin!(tracker.enter(0..1, Mode::Shared));
        assert!(poll(later.as_mut()).is_none());
        drop(first);
        assert!(poll(later.as_mut()).is_none());
        let held = poll(exclusive.as_mut()).unwrap();
        assert!(poll(later.as_mut()).is_none());
        drop(held);
        assert!(poll(later.as_mut()).is_some());
    }

    #[test]
    fn demoted_exclusive_lets_shared_ones_in_but_no_exclusive() {
        let tracker = Tracker::new();
        let mut held = enter(&tracker, 0..2 * MIB, Mode::Exclusive).unwrap();
        let mut shared = pin!(tracker.enter(0..1, Mode::Shared));
        assert!(poll(shared.as_mut()).is_none());
        held.demote();
        let shared = poll(shared.as_mut()).unwrap();
        let mut exclusive = pin!(tracker.enter(0..1, Mode::Exclusive));
        assert!(poll(exclusive.as_mut()).is_none());
        drop(held);
        assert!(poll(exclusive.as_mut()).is_none());
        drop(shared);
        assert!(poll(exclusive.as_mut()).is_some());
    }

    #[test]
    fn dropped_waiter_leaves_the_queue_and_wakes_those_behind_it() {
        let tracker = Tracker::new();
        let shared = enter(&tracker, 0..1, Mode::Shared).unwrap();
        {
            let mut exclusive = pin!(tracker.enter(0..1, Mode::Exclusive));
            assert!(poll(exclusive.as_mut()).is_none());
        }
        assert!(enter(&tracker, 0..1, Mode::Shared).is_some());
        drop(shared);
        assert!(enter(&tracker, 0..1, Mode::Exclusive).is_some());
    }

    #[test]
    fn range_around_the_last_stripe_is_taken_in_ascending_order() {
        let tracker = Tracker::new();
        let wrapping = enter(&tracker, 1023 * MIB..1025 * MIB, Mode::Exclusive).unwrap();
        assert_eq!(wrapping.stripes.as_slice(), [0, 1023]);
    }

    #[test]
    fn quiesce_waits_for_those_before_it_and_for_nobody_after() {
        let tracker = Tracker::new();
        let before = enter(&tracker, 0..1, Mode::Shared).unwrap();
        let mut quiesce = pin!(tracker.quiesce());
        assert!(poll(quiesce.as_mut()).is_none());
        let after = enter(&tracker, 0..1, Mode::Shared).unwrap();
        drop(before);
        assert!(poll(quiesce.as_mut()).is_some());
        drop(after);
        assert!(poll(pin!(tracker.quiesce())).is_some());
    }
}
