//! Committing metadata in plain qcow2 order (`journal=off`).
//!
//! ```text
//!  1  refcount slices, slices of L2 tables that no durable L1 entry names yet, a moved refcount table
//!     ── barrier: covers these and all data written before ──
//!  2  refcount table entries, or the header's pointer to the moved table      (rare)
//!     ── barrier ──
//!  3  slices of the other L2 tables, L1 entries
//!     ── barrier ──
//!  4  what the changes have freed is released (`release.rs`): refcounts fall last
//! ```
//!
//! After a crash between any two of these, refcounts are never below the references (J1 and J2 hold
//! because no mapping is written before a barrier that began after its data): the image may leak
//! clusters, nothing worse.
//!
//! Each step writes *copies* of slices that were taken before the barrier before it, L2 slices first
//! and refcounts after them. A publication puts both into the cache in one step, so the refcounts
//! that are written contain those of every mapping that is written.
//!
//! Concurrent flushes share commits (`group.rs`). Nothing here holds a lock that a read or a write takes.
//!
//! A step that has no space is not a latch: what it was to write stays dirty, and the flush fails
//! (J25). Any other failure latches (R6).

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use stillpoint_io::{Durability, Error, Kind, Queue, Result, Segments};

use super::inflight::Inflights;
use super::refcounts::Change;
use super::release::Freed;
use super::tables::bytes_of;
use super::{Done, Qcow2};
use crate::cache::SliceImage;
use crate::group::Group;
use crate::latch::Latch;
use crate::mutant::{Mutant, broken};
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Byte offsets of the refcount table's position in the header.
const HEADER_REFCOUNT_TABLE: u64 = 48;

/// Who commits.
#[derive(Default)]
pub(crate) struct Committer {
    pub(crate) latch: Latch,
    pub(super) commits: Group,
    /// The count of writes that the last successful barrier covers (J31).
    covered: AtomicU64,
}

/// What one commit writes.
struct Work<'a> {
    image: &'a Qcow2,
    /// Slices of tables that the L1 table in the file names already.
    linked: Vec<SliceImage<Inflights>>,
    /// Slices of tables that it will name after this commit.
    unlinked: Vec<SliceImage<Inflights>>,
    /// Changed L1 entries, with the words that the file holds.
    l1: BTreeMap<u64, u64>,
    /// L1 entries that this commit, or an earlier one without space, may have written already.
    l1_again: BTreeSet<u64>,
    refcounts: Vec<SliceImage<()>>,
    table: Option<Change>,
    freed: Vec<Freed>,
    /// Writes that had completed when it began.
    writes: u64,
    over: bool,
}

impl Qcow2 {
    /// Makes durable everything that was answered before this was called.
    pub(crate) async fn commit(&self, queue: &Queue) -> Done {
        let committer = &self.writer().committer;
        committer
            .commits
            .run(async || {
                committer.latch.check()?;
                self.commit_now(queue).await
            })
            .await
    }

    /// Asks for a commit off the request path, because much is dirty.
    pub(crate) fn commit_soon(&self) {
        if self.writer().commit_wanted.swap(true, SeqCst) {
            return;
        }
        self.in_background(|image, queue| async move {
            image.writer().commit_wanted.store(false, SeqCst);
            if let Err(error) = image.commit(&queue).await {
                tracing::warn!(%error, "a commit ahead of the guest's flush failed");
            }
        });
    }

    /// Whether every mapping is durable: no metadata awaits a commit, and none is being committed.
    pub(crate) fn is_clean(&self) -> bool {
        let writer = self.writer();
        // ORDER: no commit before, after, or in between; one that ran meanwhile may have taken what
        // was dirty and put it back. The latch last: a commit that fails closes it before it ends.
        let idle = writer.committer.commits.idle_since();
        idle.is_some()
            && self.l2.is_clean()
            && self.l1.is_clean()
            && writer.refcounts.is_clean()
            && writer.committer.commits.idle_since() == idle
            && writer.committer.latch.check().is_ok()
    }

    async fn commit_now(&self, queue: &Queue) -> Done {
        let writer = self.writer();
        // ORDER: what is freed first, then mappings, then the table of blocks, then refcounts, each
        // before what it needs; and last what the barrier has to cover, which is in the file by now.
        let mut freed = writer.releases.take();
        if broken(Mutant::R4Durable) {
            self.release_after(std::mem::take(&mut freed));
        }
        let slices = self.l2.take_dirty();
        let (l1, l1_again) = self.l1.take_changed();
        let table = writer.refcounts.take_change();
        let refcounts = writer.refcounts.cache.take_dirty();
        let writes = writer.writes.load(SeqCst);
        let slices_per_table = self.cluster_size() / self.slice_bytes();
        let (unlinked, linked) =
            slices.into_iter().partition(|slice| l1.contains_key(&(slice.key / slices_per_table)));
        let mut work = Work {
            image: self,
            linked,
            unlinked,
            l1,
            l1_again,
            refcounts,
            table,
            freed,
            writes,
            over: false,
        };
        let result = work.write(queue).await;
        match &result {
            Ok(()) => {
                work.over = true;
                self.release_after(std::mem::take(&mut work.freed));
            }
            Err(error) => {
                if error.kind() != Kind::NoSpace {
                    writer.committer.latch.close(error);
                }
                // Latched or not, what was not written is nowhere else: reads must go on finding it.
                work.put_back();
            }
        }
        result
    }

    /// Releases what a commit has freed, off its path.
    fn release_after(&self, freed: Vec<Freed>) {
        if freed.is_empty() {
            return;
        }
        let running = self.writer().releases.begin();
        self.in_background(move |image, queue| async move {
            image.release(&queue, freed).await;
            drop(running);
        });
    }

    /// R6: a failed barrier is never tried again.
    pub(crate) async fn barrier(&self, queue: &Queue) -> Done {
        let flushed = self.file.flush(queue).await.map(|_| ());
        if let Err(error) = &flushed {
            self.writer().committer.latch.close(error);
        }
        flushed
    }

    /// Writes a run of words at a host offset that need not be aligned to the file's blocks. The
    /// caller is the only one who writes there.
    pub(crate) async fn patch(&self, queue: &Queue, host_offset: u64, bytes: &[u8]) -> Done {
        let align = u64::from(self.file.facts().request_align);
        let start = host_offset / align * align;
        let end = (host_offset + bytes.len() as u64).next_multiple_of(align);
        let block = Segments::alloc((end - start) as usize);
        if end - start != bytes.len() as u64 {
            self.file.read(queue, start, block.clone()).await?;
        }
        let at = (host_offset - start) as usize;
        block.slice(at..at + bytes.len()).copy_from(bytes);
        self.file.write(queue, start, block, Durability::Volatile).await?;
        Ok(())
    }
}

impl Work<'_> {
    async fn write(&mut self, queue: &Queue) -> Done {
        let image = self.image;
        let writer = image.writer();
        let covered = writer.committer.covered.load(SeqCst);

        let first = !self.refcounts.is_empty() || !self.unlinked.is_empty() || self.table.is_some();
        if self.table.is_some() && broken(Mutant::Blocks) {
            self.write_table(queue).await?;
        }
        self.write_first(queue).await?;
        if (first || self.writes != covered) && !broken(Mutant::J1Barrier) {
            // ORDER: data, refcounts and new tables' contents before any mapping of them (J1, J2, J20).
            image.barrier(queue).await?;
        }
        if self.table.is_some() {
            self.write_table(queue).await?;
            // ORDER: a block's entry before any mapping that the block counts.
            image.barrier(queue).await?;
            if let Some(Change::Moved { old_first, old_clusters, .. }) = self.table.take() {
                self.freed.push(Freed::clusters(old_first, old_clusters));
            }
        }
        // From here on the file may name the new tables: a further try must not write to them early.
        self.l1_again.extend(std::mem::take(&mut self.l1).into_keys());
        if !self.linked.is_empty() || !self.l1_again.is_empty() {
            self.write_mappings(queue).await?;
            if broken(Mutant::J2Mapping) {
                return Ok(());
            }
            // ORDER: mappings before the answer, and before anything they freed is released (R4).
            image.barrier(queue).await?;
        }
        let late = broken(Mutant::J31Covered);
        let covered = if late { writer.writes.load(SeqCst) } else { self.writes };
        writer.committer.covered.store(covered, SeqCst);
        Ok(())
    }

    async fn write_first(&self, queue: &Queue) -> Done {
        let image = self.image;
        let refcounts = &image.writer().refcounts;
        let mut runs = merge(&self.refcounts, |key| {
            refcounts.slice_home(key).ok_or_else(|| {
                image.corrupt("write a refcount block", 0, "its place in the table is gone")
            })
        })?;
        runs.extend(merge(&self.unlinked, |key| self.l2_home(key))?);
        if let Some(Change::Moved { host_offset, bytes, .. }) = &self.table {
            runs.push((*host_offset, bytes.clone()));
        }
        self.write_runs(queue, runs).await
    }

    async fn write_table(&self, queue: &Queue) -> Done {
        let image = self.image;
        match &self.table {
            None => Ok(()),
            Some(Change::Entries(entries)) => {
                for &(_, offset, block) in entries {
                    image.patch(queue, offset, &block.to_be_bytes()).await?;
                }
                Ok(())
            }
            Some(Change::Moved { host_offset, clusters, .. }) => {
                let mut pointer = host_offset.to_be_bytes().to_vec();
                pointer.extend((*clusters as u32).to_be_bytes());
                image.patch(queue, HEADER_REFCOUNT_TABLE, &pointer).await
            }
        }
    }

    async fn write_mappings(&self, queue: &Queue) -> Done {
        let image = self.image;
        let mut runs = merge(&self.linked, |key| self.l2_home(key))?;
        // L1 entries in whole blocks of the file; the table's last block is zero behind it.
        let block_words = (u64::from(image.file.facts().request_align) / 8).max(1);
        let mut next = 0;
        for &index in &self.l1_again {
            if index < next {
                continue;
            }
            let first = index / block_words * block_words;
            next = first + block_words;
            let mut bytes = bytes_of(&image.l1.words_to_write(first, block_words));
            bytes.resize((block_words * 8) as usize, 0);
            runs.push((image.l1.host_offset() + first * 8, bytes));
        }
        self.write_runs(queue, runs).await
    }

    fn l2_home(&self, key: u64) -> Result<u64> {
        let home = self.image.slice_home(key)?;
        Ok(home.expect("a slice is dirty only in a table that exists"))
    }

    async fn write_runs(&self, queue: &Queue, runs: Vec<(u64, Vec<u8>)>) -> Done {
        let writes = runs.into_iter().map(|(offset, bytes)| {
            let bytes = Segments::from_slice(&bytes);
            self.image.file.write(queue, offset, bytes, Durability::Volatile)
        });
        join_all(writes).await.into_iter().try_for_each(|result| result.map(|_| ()))
    }

    /// Makes everything dirty again that was taken.
    fn put_back(&mut self) {
        self.over = true;
        if broken(Mutant::J25PutBack) {
            return;
        }
        let writer = self.image.writer();
        for slice in self.linked.iter().chain(&self.unlinked) {
            slice.mark_dirty();
        }
        for slice in &self.refcounts {
            slice.mark_dirty();
        }
        let l1 = std::mem::take(&mut self.l1);
        self.image.l1.put_back(l1, std::mem::take(&mut self.l1_again));
        if let Some(change) = self.table.take()
            && let Some((first, count)) = writer.refcounts.put_back(change)
        {
            writer.releases.push(Freed::clusters(first, count));
        }
        writer.releases.put_back(std::mem::take(&mut self.freed));
    }
}

impl Drop for Work<'_> {
    /// A commit that is dropped in the middle may have written any part of itself.
    fn drop(&mut self) {
        if !self.over {
            let why = "a commit was dropped before its end";
            self.put_back();
            self.image.writer().committer.latch.close(&Error::new(
                Kind::Cancelled,
                "commit metadata",
                why,
            ));
        }
    }
}

/// Slices as runs of bytes by host offset; neighbours in key and in the file become one run.
fn merge<E: Default>(
    slices: &[SliceImage<E>],
    home: impl Fn(u64) -> Result<u64>,
) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for slice in slices {
        let offset = home(slice.key)?;
        let bytes = bytes_of(&slice.words);
        match runs.last_mut() {
            Some((start, run)) if *start + run.len() as u64 == offset => run.extend(bytes),
            _ => runs.push((offset, bytes)),
        }
    }
    Ok(runs)
}
