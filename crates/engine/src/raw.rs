//! A raw image in use: the guest's bytes as they are.

use stillpoint_io::{Durability, Extent, Kind, Manage, Queue, Result, Segments, Storage, Value};

use crate::disk::Zeroing;
use crate::group::Group;
use crate::latch::Latch;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// A raw image in use.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) file: Arc<dyn Storage>,
    /// The size that the guest sees, in bytes: the file's when it was opened.
    pub(crate) size: u64,
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
            size,
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

    pub(crate) async fn extent(&self, queue: &Queue, offset: u64, length: u64) -> Result<Extent> {
        match self.file.status(queue, offset, length).await? {
            Value::Extent(extent) => Ok(extent),
            Value::Unit => unreachable!("status completes with an extent"),
        }
    }
}
