//! The bytes that all clients together may keep in flight.
//!
//! A request's memory is granted before it is allocated, and given back when its reply has been
//! sent. A connection that gets no grant stops reading its socket, so the client feels the bound as
//! a slow server, never as a failure. Whoever holds memory and moves nothing while others wait is
//! put out by the connection's guard.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use event_listener::Event;

use super::codec::PAYLOAD_BYTES_MAX;

/// See the module's head.
#[derive(Debug)]
pub struct Budget {
    free_bytes: AtomicU64,
    waiting: AtomicUsize,
    returned: Event,
}

/// Bytes that were granted; given back on drop.
#[derive(Debug)]
pub(crate) struct Grant {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    /// A budget of `bytes`, but no less than the two longest payloads: one must always fit.
    pub fn new(bytes: u64) -> Arc<Budget> {
        let bytes = bytes.max(2 * u64::from(PAYLOAD_BYTES_MAX));
        Arc::new(Budget {
            free_bytes: AtomicU64::new(bytes),
            waiting: AtomicUsize::new(0),
            returned: Event::new(),
        })
    }

    /// Whether somebody waits for bytes that others hold.
    pub(crate) fn is_short(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Takes `bytes` if they are free now.
    pub(crate) fn try_take(self: &Arc<Self>, bytes: u64) -> Option<Grant> {
        let took = self
            .free_bytes
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |free| free.checked_sub(bytes));
        took.is_ok().then(|| Grant { budget: self.clone(), bytes })
    }

    /// Takes `bytes` as soon as they are free.
    pub(crate) async fn take(self: &Arc<Self>, bytes: u64) -> Grant {
        if let Some(grant) = self.try_take(bytes) {
            return grant;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waits = Waits(self);
        loop {
            let returned = self.returned.listen();
            // Looked at again after listening, or a return in between would be missed.
            if let Some(grant) = self.try_take(bytes) {
                return grant;
            }
            returned.await;
        }
    }
}

/// Counts as waiting until dropped.
struct Waits<'a>(&'a Budget);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.free_bytes.fetch_add(self.bytes, Ordering::AcqRel);
            // All who wait look again: they wait for different amounts.
            self.budget.returned.notify(usize::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn memory_is_granted_up_to_the_bound_and_waited_for_beyond_it() {
        let budget = Budget::new(0);
        let longest = u64::from(PAYLOAD_BYTES_MAX);
        let first = budget.try_take(longest).unwrap();
        let second = budget.try_take(longest).unwrap();
        assert!(budget.try_take(1).is_none());
        let mut wait = Box::pin(budget.take(longest));
        assert!((&mut wait).now_or_never().is_none());
        assert!(budget.is_short());
        drop(first);
        let third = (&mut wait).now_or_never().unwrap();
        drop(wait);
        assert!(!budget.is_short());
        drop((second, third));
        assert!(budget.try_take(2 * longest).is_some());
    }

    #[test]
    fn whoever_gives_up_waiting_is_not_counted() {
        let budget = Budget::new(0);
        let _all = budget.try_take(2 * u64::from(PAYLOAD_BYTES_MAX));
        let mut wait = Box::pin(budget.take(1));
        assert!((&mut wait).now_or_never().is_none());
        drop(wait);
        assert!(!budget.is_short());
    }
}
