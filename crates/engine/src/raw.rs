//! A raw image in use: the guest's bytes as they are.

use stillpoint_io::{
    Durability, Error, Extent, GrowMeans, Kind, Manage, Queue, Result, Segments, Storage, Value,
};

use crate::disk::Zeroing;
use crate::group::Group;
use crate::latch::Latch;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// A raw image in use.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) file: Arc<dyn Storage>,
    /// The size that it holds, in bytes: the file's.
    pub(crate) size: AtomicU64,
    pub(crate) latch: Latch,
    flushes: Group,
    /// Changes completed, and those that the last barrier covers (J31).
    changes: AtomicU64,
    covered: AtomicU64,
}

impl Raw {
    pub(crate) fn new(file: Arc<dyn Storage>) -> Raw {
        let size = file.end();
        Raw {
            file,
            size: AtomicU64::new(size),
            latch: Latch::default(),
            flushes: Group::default(),
            changes: AtomicU64::new(0),
            covered: AtomicU64::new(0),
        }
    }

    pub(crate) async fn read(&self, queue: &Queue, offset: u64, into: Segments) -> Result<()> {
        self.file.read(queue, offset, into).await?;
        Ok(())
    }

    pub(crate) async fn write(
        &self,
        queue: &Queue,
        offset: u64,
        data: &Segments,
        durability: Durability,
    ) -> Result<()> {
        self.file.write(queue, offset, data.clone(), durability).await?;
        if durability == Durability::Volatile {
            self.changes.fetch_add(1, SeqCst);
        }
        Ok(())
    }

    /// Makes a range of whole blocks read as zeros without writing them; `false` if the host cannot.
    pub(crate) async fn zero(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        zeroing: Zeroing,
    ) -> Result<bool> {
        let facts = self.file.facts();
        let punch = (zeroing.unmap && facts.can_punch).then_some(Manage::Punch { offset, length });
        let zero = facts.can_zero_range.then_some(Manage::ZeroRange { offset, length });
        let Some(change) = punch.or(zero) else { return Ok(false) };
        match self.file.manage(queue, change).await {
            Ok(_) => {
                self.changes.fetch_add(1, SeqCst);
                Ok(true)
            }
            Err(error) if error.kind() == Kind::Unsupported => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn flush(&self, queue: &Queue) -> Result<()> {
        self.flushes
            .run(async || {
                self.latch.check()?;
                let changes = self.changes.load(SeqCst);
                if self.covered.load(SeqCst) == changes {
                    return Ok(());
                }
                // A flush that is dropped in the middle may be the one whose failure nobody hears of.
                let unheard = self.latch.unless_heard();
                let flushed = self.file.flush(queue).await;
                unheard.heard();
                flushed.inspect_err(|error| self.latch.close(error))?;
                self.covered.store(changes, SeqCst);
                Ok(())
            })
            .await
    }

    /// Refuses a size that the file cannot have.
    pub(crate) fn refuse_size(&self, size: u64) -> Result<()> {
        let facts = self.file.facts();
        let refuse = |kind, why: String, remedy: &str| {
            Err(Error::new(kind, "resize the disk", why).file(self.file.name()).remedy(remedy))
        };
        if facts.fixed_size {
            let why = "a block device has the size that it has".to_owned();
            return refuse(Kind::Unsupported, why, "resize the device itself, then open it again");
        }
        let align = u64::from(facts.request_align);
        if !size.is_multiple_of(align) {
            let why = format!("{size} is no multiple of {align}, the unit of direct I/O here");
            return refuse(Kind::Invalid, why, "choose a multiple, or use `--cache writeback`");
        }
        Ok(())
    }

    /// Gives the file another length, durably. Nobody uses what is cut off.
    pub(crate) async fn resize(&self, queue: &Queue, size: u64) -> Result<()> {
        let change = if size > self.file.end() {
            // R3: whoever is told of the new size finds it in force.
            Manage::Grow { end: size, means: GrowMeans::Truncate }
        } else {
            Manage::Shrink { end: size }
        };
        let shorter = matches!(change, Manage::Shrink { .. });
        // Dropped or failed in the middle, a cut leaves a length that nobody knows.
        let unheard = self.latch.unless_heard();
        let changed = self.file.manage(queue, change).await;
        self.changes.fetch_add(1, SeqCst);
        // ORDER: the length before the answer. And a cut before a later growth: without a barrier in
        // between a power cut could bring back what was cut off (J21).
        let resized = match &changed {
            Ok(_) => self.flush(queue).await,
            Err(error) => Err(error.clone()),
        };
        unheard.heard();
        if let (Err(error), true) = (&changed, shorter) {
            self.latch.close(error);
        }
        resized
    }

    pub(crate) async fn extent(&self, queue: &Queue, offset: u64, length: u64) -> Result<Extent> {
        match self.file.status(queue, offset, length).await? {
            Value::Extent(extent) => Ok(extent),
            Value::Unit => unreachable!("status completes with an extent"),
        }
    }
}
