//! The word to stop, said once and heard on every thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;

#[derive(Debug, Default)]
struct Inner {
    said: AtomicBool,
    event: Event,
}

/// See the module's head; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<Inner>);

impl Stop {
    /// Nobody has said it yet.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// Says it, to those who wait now and to those who ask later.
    pub fn say(&self) {
        self.0.said.store(true, Ordering::Release);
        self.0.event.notify(usize::MAX);
    }

    /// Whether it was said.
    pub fn was_said(&self) -> bool {
        self.0.said.load(Ordering::Acquire)
    }

    /// Waits until it is said.
    pub async fn heard(&self) {
        while !self.was_said() {
            let listener = self.0.event.listen();
            // Looked at again after listening, or a word in between would be missed.
            if self.was_said() {
                return;
            }
            listener.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn it_is_heard_before_and_after_it_is_said() {
        let stop = Stop::new();
        let mut waits = Box::pin(stop.heard());
        assert!((&mut waits).now_or_never().is_none());
        stop.clone().say();
        assert!((&mut waits).now_or_never().is_some());
        assert!(stop.heard().now_or_never().is_some() && stop.was_said());
    }
}
