//! The primitives that threads share, so that `shuttle` can take their place in its tests.

#[cfg(not(feature = "shuttle"))]
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, Weak, atomic};

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::sync::{Arc, Mutex, MutexGuard, Weak, atomic};

/// Locks `mutex`; a panic elsewhere while it was held leaves nothing half done here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
