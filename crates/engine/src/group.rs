//! Flushes that share their work: one at a time, and whoever came before it began is served by it.
//!
//! Nothing is lost by the order: a flush that begins covers everything that was answered before its
//! callers arrived. And it must be one at a time: of two barriers in flight one may fail and take the
//! dirty pages with it, while the other succeeds and promises them (R6).

use async_lock::Mutex as AsyncMutex;
use stillpoint_io::{Error, Result};

use crate::mutant::{Mutant, broken};
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use crate::sync::{Mutex, lock};

/// Flushes of one image: see the module's head.
#[derive(Debug, Default)]
pub(crate) struct Group {
    running: AsyncMutex<()>,
    begun: AtomicU64,
    ended: AtomicU64,
    last: Mutex<Option<Error>>,
}

impl Group {
    /// Runs `flush`, or takes the outcome of another caller's that began after this was called.
    pub(crate) async fn run(&self, flush: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        let mut wanted = self.begun.load(SeqCst) + 1;
        if broken(Mutant::J31Group) && self.idle_since().is_none() {
            wanted -= 1;
        }
        let _one_at_a_time = self.running.lock().await;
        if self.ended.load(SeqCst) >= wanted {
            return lock(&self.last).clone().map_or(Ok(()), Err);
        }
        let this = self.begun.fetch_add(1, SeqCst) + 1;
        let result = flush().await;
        *lock(&self.last) = result.as_ref().err().cloned();
        self.ended.store(this, SeqCst);
        result
    }

    /// Runs `work` while no flush is under way. It is none itself: nobody is served by it.
    pub(crate) async fn between<T>(&self, work: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
        let between = self.running.lock().await;
        let _between = (!broken(Mutant::ResizeBetween)).then_some(between);
        work().await
    }

    /// If none is under way: how many there were. The same number later means that none was since.
    pub(crate) fn idle_since(&self) -> Option<u64> {
        let ended = self.ended.load(SeqCst);
        (self.begun.load(SeqCst) == ended).then_some(ended)
    }
}
