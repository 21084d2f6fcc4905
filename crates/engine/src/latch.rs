//! The latch: after a failed barrier or metadata write nothing is written any more (R6).
//!
//! The kernel forgets what it could not write, and the next barrier "succeeds"; so nothing is tried
//! again. Reads go on. Only opening the image anew, which recovers it, writes again.

use stillpoint_io::{Error, Kind, Result};

use crate::mutant::{Mutant, broken};
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Mutex, lock};

/// Open until the first failure: see the module's head.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    closed: AtomicBool,
    first: Mutex<Option<Error>>,
}

impl Latch {
    /// Fails if an earlier failure has closed the latch.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.closed.load(SeqCst) {
            return Ok(());
        }
        let first = lock(&self.first).clone().expect("kept before the latch closes");
        Err(Error::new(Kind::Latched, "write", format!("writing stopped after a failure: {first}"))
            .remedy("look into the storage, then stop and open the image again"))
    }

    /// Closes the latch unless the outcome of what begins now is heard.
    pub(crate) fn unless_heard(&self) -> Unheard<'_> {
        Unheard { latch: self, heard: false }
    }

    /// Refuses writing from now on, because of `error`.
    pub(crate) fn close(&self, error: &Error) {
        let mut first = lock(&self.first);
        if first.is_none() && !broken(Mutant::R6Latch) {
            tracing::error!(%error, "writing is refused from now on");
            *first = Some(error.clone());
            self.closed.store(true, SeqCst);
        }
    }
}

/// A barrier under way; see [`Latch::unless_heard`].
pub(crate) struct Unheard<'a> {
    latch: &'a Latch,
    heard: bool,
}

impl Unheard<'_> {
    /// Its outcome is known.
    pub(crate) fn heard(mut self) {
        self.heard = true;
    }
}

impl Drop for Unheard<'_> {
    fn drop(&mut self) {
        if !self.heard {
            let why = "a flush was dropped before its end";
            self.latch.close(&Error::new(Kind::Cancelled, "flush", why));
        }
    }
}
