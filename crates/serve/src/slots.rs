//! A bounded set of futures that run inside one task, without an allocation for each.
//!
//! A connection keeps hundreds of requests in flight, each for some microseconds. Spawning a task
//! for each would allocate twice and schedule once per request; here a request's future moves into
//! a place that earlier requests have used, and a wake-up sets one bit. The bits of all futures that
//! woke in one turn of the loop are taken together, so their results come out together: that is
//! what lets a connection answer them with one system call.
//!
//! Wake-ups may come from any thread; everything else belongs to the owner. Deliberately absent:
//! fairness beyond "each woken future is polled once per turn", and any way to cancel.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

const WORD_BITS: usize = u64::BITS as usize;

struct Bell {
    /// One bit per slot: woken since it was last taken.
    ready: Box<[AtomicU64]>,
    /// The task that owns the set.
    owner: AtomicWaker,
}

struct SlotWaker {
    bell: Arc<Bell>,
    slot: usize,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let word = &self.bell.ready[self.slot / WORD_BITS];
        // Whoever sets the first bit wakes the owner; it takes all bits set until it runs.
        if word.fetch_or(1 << (self.slot % WORD_BITS), Ordering::AcqRel) == 0 {
            self.bell.owner.wake();
        }
    }
}

struct Slot<F> {
    future: Pin<Box<Option<F>>>,
    waker: Waker,
}

/// See the module's head.
pub struct Slots<F: Future> {
    slots: Vec<Slot<F>>,
    free: Vec<usize>,
    capacity: usize,
    bell: Arc<Bell>,
}

impl<F: Future> Slots<F> {
    /// Room for `capacity` futures; memory is taken as it is first needed.
    pub fn new(capacity: usize) -> Slots<F> {
        let ready = (0..capacity.div_ceil(WORD_BITS)).map(|_| AtomicU64::new(0)).collect();
        let bell = Arc::new(Bell { ready, owner: AtomicWaker::new() });
        Slots { slots: Vec::new(), free: Vec::new(), capacity, bell }
    }

    /// How many futures have not ended.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether all futures have ended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there is no room for another future.
    pub fn is_full(&self) -> bool {
        self.len() == self.capacity
    }

    /// Takes `future` in and polls it at once; returns its result if it has ended already.
    ///
    /// # Panics
    /// If the set is full.
    pub fn start(&mut self, future: F) -> Option<F::Output> {
        let index = self.free.pop().unwrap_or_else(|| {
            assert!(self.slots.len() < self.capacity, "a set of futures is full");
            let slot = self.slots.len();
            let waker = Waker::from(Arc::new(SlotWaker { bell: self.bell.clone(), slot }));
            self.slots.push(Slot { future: Box::pin(None), waker });
            slot
        });
        self.slots[index].future.set(Some(future));
        self.poll_slot(index)
    }

    fn poll_slot(&mut self, index: usize) -> Option<F::Output> {
        let slot = &mut self.slots[index];
        // A late wake-up of the slot's former future finds nobody, or polls the new one in vain.
        let future = slot.future.as_mut().as_pin_mut()?;
        let Poll::Ready(output) = future.poll(&mut Context::from_waker(&slot.waker)) else {
            return None;
        };
        slot.future.set(None);
        self.free.push(index);
        Some(output)
    }

    /// Polls each future that was woken, and hands the results of those that ended to `done`.
    /// The task of `cx` is woken when more of them can go on.
    pub fn poll(&mut self, cx: &mut Context<'_>, mut done: impl FnMut(F::Output)) {
        self.bell.owner.register(cx.waker());
        for word in 0..self.slots.len().div_ceil(WORD_BITS) {
            let mut ready = self.bell.ready[word].swap(0, Ordering::AcqRel);
            while ready != 0 {
                let bit = ready.trailing_zeros() as usize;
                ready &= ready - 1;
                if let Some(output) = self.poll_slot(word * WORD_BITS + bit) {
                    done(output);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::future::poll_fn;
    use std::rc::Rc;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    type Gate = Rc<RefCell<(bool, Option<Waker>)>>;

    async fn pass(gate: Gate, value: usize) -> usize {
        poll_fn(|cx| {
            let mut gate = gate.borrow_mut();
            gate.1 = Some(cx.waker().clone());
            if gate.0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        value
    }

    fn open(gate: &Gate) {
        let waker = {
            let mut gate = gate.borrow_mut();
            gate.0 = true;
            gate.1.take()
        };
        waker.unwrap().wake();
    }

    #[test]
    fn results_come_out_together_after_one_wake() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut cx = Context::from_waker(&waker);
        let mut slots = Slots::new(100);
        let gates: Vec<Gate> = (0..60).map(|_| Gate::default()).collect();
        for (value, gate) in gates.iter().enumerate() {
            assert_eq!(slots.start(pass(gate.clone(), value)), None);
        }
        slots.poll(&mut cx, |_| panic!("nothing has ended"));
        gates.iter().step_by(2).for_each(open);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        let mut ended = Vec::new();
        slots.poll(&mut cx, |value| ended.push(value));
        assert_eq!(ended, (0..60).step_by(2).collect::<Vec<_>>());
        assert_eq!(slots.len(), 30);
    }

    #[test]
    fn places_are_used_again_and_late_wakes_do_no_harm() {
        let mut cx = Context::from_waker(Waker::noop());
        let mut slots = Slots::new(1);
        let first = Gate::default();
        assert_eq!(slots.start(pass(first.clone(), 1)), None);
        assert!(slots.is_full());
        let late = first.borrow().1.clone().unwrap();
        open(&first);
        let mut ended = Vec::new();
        slots.poll(&mut cx, |value| ended.push(value));
        late.wake_by_ref();
        slots.poll(&mut cx, |value| ended.push(value));
        let second = Gate::default();
        assert_eq!(slots.start(pass(second.clone(), 2)), None);
        late.wake();
        slots.poll(&mut cx, |value| ended.push(value));
        assert_eq!(ended, [1]);
        open(&second);
        slots.poll(&mut cx, |value| ended.push(value));
        assert_eq!(ended, [1, 2]);
        assert!(slots.is_empty());
    }

    #[test]
    fn a_future_that_is_ready_at_once_takes_no_place() {
        let mut slots = Slots::new(1);
        for value in 0..3 {
            assert_eq!(slots.start(std::future::ready(value)), Some(value));
        }
    }
}
