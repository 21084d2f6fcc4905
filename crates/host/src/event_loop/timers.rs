//! Sleeping tasks by the instant at which they want to wake.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

type Cell = Rc<RefCell<Option<Waker>>>;

struct Entry {
    at: Duration,
    sequence: u64,
    waker: Cell,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        (self.at, self.sequence) == (other.at, other.sequence)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> std::cmp::Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

#[derive(Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<Entry>>,
    sequence: u64,
    /// Length of the heap at which sleepers that gave up are swept out.
    sweep_at: usize,
}

/// One sleeper's place; dropping it gives the sleep up.
pub(crate) struct Sleeper(Cell);

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.borrow_mut().take();
    }
}

impl Timers {
    pub(crate) fn next(&self) -> Option<Duration> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// Polls a sleep until `at`, whose place is kept in `sleeper`.
    pub(crate) fn poll(
        &mut self,
        at: Duration,
        now: Duration,
        sleeper: &mut Option<Sleeper>,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        if now >= at {
            return Poll::Ready(());
        }
        match sleeper {
            Some(Sleeper(cell)) => *cell.borrow_mut() = Some(cx.waker().clone()),
            None => {
                if self.heap.len() >= self.sweep_at {
                    self.heap.retain(|Reverse(entry)| entry.waker.borrow().is_some());
                    self.sweep_at = (2 * self.heap.len()).max(64);
                }
                let cell = Rc::new(RefCell::new(Some(cx.waker().clone())));
                *sleeper = Some(Sleeper(cell.clone()));
                self.sequence += 1;
                self.heap.push(Reverse(Entry { at, sequence: self.sequence, waker: cell }));
            }
        }
        Poll::Pending
    }

    /// Takes the next sleeper whose instant has come; `None` in the inner place: it gave up.
    pub(crate) fn take_due(&mut self, now: Duration) -> Option<Option<Waker>> {
        if self.next()? > now {
            return None;
        }
        let Reverse(entry) = self.heap.pop()?;
        Some(entry.waker.take())
    }

    pub(crate) fn clear(&mut self) {
        self.heap.clear();
    }
}
