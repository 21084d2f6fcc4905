//! Growing the file, ahead of need: the one place that does (R3).
//!
//! A step is large enough that nobody waits for its space and short enough that nobody notices it.
//! What is grown is known zero (J21), and is handed to the allocator only when refcount blocks exist
//! for it: a block that is missing takes the first grown cluster of its own range, so that it counts
//! itself. When the refcount table is full, a longer one takes the first grown clusters.
//!
//! Whoever needs adjacent clusters for a table of its own (`resize.rs`) takes them from a step in the same
//! way.
//!
//! Blocks and table exist in memory from then on, with their refcounts dirty in the cache; the next
//! commit writes them, block before table entry, table before header. A new block is zero in the file,
//! like everything grown, and comes into the cache without being read.

use std::ops::Range;

use stillpoint_format::qcow2::header::REFCOUNT_TABLE_SIZE_MAX;
use stillpoint_io::{Error, Kind, Manage, Queue, Result};

use super::allocate::{Growing, Reservation};
use super::release::Freed;
use super::{Done, Qcow2};
use crate::mutant::{Mutant, broken};

impl Qcow2 {
    /// A growth step in clusters.
    pub(super) fn growth_step(&self) -> u64 {
        // A step pins the slice of each block that it adds: they must fit into the cache.
        let geometry = self.geometry();
        let frames = self.writer().refcounts.cache.capacity();
        let most = (frames / 4) * geometry.refcounts_per_block();
        (self.policy.grow.1 >> geometry.cluster_bits).clamp(1, most)
    }

    /// Grows the file soon, off the request path.
    pub(super) fn grow_soon(&self) {
        self.in_background(|image, queue| async move {
            let step = image.growth_step();
            if let Err(error) = image.grow(&queue, step / 2 + 1).await {
                // Whoever needs the space will meet the same error, and report it to its guest.
                tracing::debug!(%error, "growing ahead of need failed");
            }
            image.writer().allocator.growth_ended();
        });
    }

    /// Grows the file by a step unless `enough` clusters are ready.
    pub(super) async fn grow(&self, queue: &Queue, enough: u64) -> Done {
        let allocator = &self.writer().allocator;
        let growing = allocator.growing.lock().await;
        if allocator.fresh_count() >= enough {
            return Ok(());
        }
        self.grow_one_step(queue, *growing, 0).await?;
        Ok(())
    }

    /// Grows the file by a step, and takes `count` adjacent clusters of it, whose refcounts the next
    /// commit writes. Returns the first.
    pub(super) async fn grow_adjacent(&self, queue: &Queue, count: u64) -> Result<u64> {
        let writer = self.writer();
        // Their refcount slices are pinned all at once: they must fit into the cache.
        if count > writer.refcounts.cache.capacity() / 8 * writer.refcounts.per_slice() {
            let why = "the cache of refcounts is too small for so many adjacent clusters";
            return Err(Error::new(Kind::Limit, "grow the image", why)
                .file(self.file.name())
                .remedy("open it with a larger one"));
        }
        let growing = writer.allocator.growing.lock().await;
        self.grow_one_step(queue, *growing, count).await
    }

    async fn grow_one_step(&self, queue: &Queue, growing: Growing, adjacent: u64) -> Result<u64> {
        let writer = self.writer();
        let allocator = &writer.allocator;
        if growing == Growing::Closed {
            return Err(Error::new(Kind::Cancelled, "grow the image", "it is being closed"));
        }
        writer.committer.latch.check()?;
        let old_end = allocator.end();
        let growth = self.grow_file(queue, old_end, adjacent).await?;
        let end = growth.end;

        let geometry = self.geometry();
        let (bits, per_block) = (geometry.cluster_bits, geometry.refcounts_per_block());
        let table = growth.start..growth.start + growth.table_clusters;
        let tables = table.start..table.end + adjacent;
        let mut used = vec![tables];
        let mut blocks = Vec::new();
        for index in old_end / per_block..=(end - 1) / per_block {
            if !writer.refcounts.has_block(index * per_block) {
                let free = used.last().map_or(growth.start, |last| last.end);
                let place = (index * per_block).max(free);
                blocks.push((index, place << bits));
                used.push(place..place + 1);
            }
        }
        // J37: every slice that counts these is here before anything is changed.
        let mut counted = Vec::new();
        for first in used.iter().cloned().flatten() {
            let refcounts = match writer.refcounts.has_block(first) {
                true => self.refcount_slice(queue, first).await?,
                false => self.new_refcount_slice(queue, first).await?,
            };
            counted.push(Reservation { first, count: 1, zero: true, refcounts });
        }
        // ORDER: a commit that begins in between must find a block's own refcount before its entry.
        writer.refcounts.place_blocks(&blocks);
        for cluster in &counted {
            writer.refcounts.publish(cluster);
        }
        let replaced =
            writer.refcounts.link_blocks(&blocks, table.start << bits, growth.table_clusters);
        if let Some((first, count)) = replaced {
            writer.releases.push(Freed::clusters(first, count));
        }
        self.hold_tables(used.iter().cloned().flatten());
        let mut taken = growth.counted;
        taken.extend(used);
        allocator.grown(between(old_end..end, &taken).into_iter(), end);
        Ok(table.end)
    }

    /// Makes the file longer.
    async fn grow_file(&self, queue: &Queue, old_end: u64, adjacent: u64) -> Result<Growth> {
        let bits = self.geometry().cluster_bits;
        let means = self.policy.grow.0;
        let mut step = self.growth_step();
        if self.file.facts().fixed_size {
            return Err(Error::new(
                Kind::NoSpace,
                "allocate a cluster",
                "the device has a fixed size",
            )
            .file(self.file.name()));
        }
        loop {
            let growth = self.plan_growth(queue, old_end, step, adjacent).await?;
            let end = growth.end << bits;
            if end >= 1 << 56 {
                let why = "the file would exceed the largest host offset of the format";
                return Err(Error::new(Kind::Limit, "grow the image", why).file(self.file.name()));
            }
            let growing = self.file.manage(queue, Manage::Grow { end, means });
            if broken(Mutant::R3Growth) {
                return Ok(growth);
            }
            match growing.await {
                Ok(_) => return Ok(growth),
                // R6: no space before any write that depends on it is the guest's error alone. Less
                // may still fit.
                Err(error) if error.kind() == Kind::NoSpace && step > 1 => step /= 2,
                Err(error) => return Err(error.remedy("free some space on the host")),
            }
        }
    }

    /// Chooses the end to grow to. Clusters beyond the present end may be counted already: a crash
    /// lost the file's length and kept the refcounts (leaks), or somebody else mapped them. They are
    /// never handed out, and new tables come after the last of them.
    async fn plan_growth(
        &self,
        queue: &Queue,
        old_end: u64,
        step: u64,
        adjacent: u64,
    ) -> Result<Growth> {
        /// More would be no crash's doing.
        const ROUNDS_MAX: usize = 64;
        let refcounts = &self.writer().refcounts;
        let per_slice = refcounts.per_slice();
        let mut counted: Vec<Range<u64>> = Vec::new();
        let (mut start, mut seen) = (old_end, old_end);
        for _ in 0..ROUNDS_MAX {
            let (end, table_clusters) = self.growth_target(start, step, adjacent)?;
            while seen < end {
                let slice_end = (seen / per_slice + 1) * per_slice;
                let part = seen..slice_end.min(end);
                seen = part.end;
                if broken(Mutant::F2Counted) || !refcounts.has_block(part.start) {
                    continue;
                }
                let slice = self.refcount_slice(queue, part.start).await?;
                let slice = slice.pin();
                for cluster in part.filter(|&cluster| refcounts.count_in(&slice, cluster) != 0) {
                    match counted.last_mut() {
                        Some(range) if range.end == cluster => range.end += 1,
                        _ => counted.push(cluster..cluster + 1),
                    }
                }
            }
            let after = counted.last().map_or(start, |last| last.end);
            if after <= start {
                return Ok(Growth { start, end, table_clusters, counted });
            }
            start = after;
        }
        let why = "the refcounts count everything beyond the file's end";
        Err(self.corrupt("grow the image", old_end << self.geometry().cluster_bits, why))
    }

    /// The end to grow to, and the clusters of the new refcount table that it takes.
    fn growth_target(&self, start: u64, step: u64, adjacent: u64) -> Result<(u64, u64)> {
        let mut table_clusters = 0;
        loop {
            // Tables, a block for each range that they may touch, and something to use.
            let tables = table_clusters + adjacent;
            let end = start + step.max(tables + tables / 32 + 4);
            let needed = self.table_growth(end)?;
            if needed <= table_clusters {
                return Ok((end, table_clusters));
            }
            table_clusters = needed;
        }
    }

    /// Clusters of a new refcount table that counts up to `end`; 0 if the present one does.
    fn table_growth(&self, end: u64) -> Result<u64> {
        let geometry = self.geometry();
        let have = self.writer().refcounts.table_entries();
        // Half as much again, and room for the clusters that the table itself takes.
        let need = end.div_ceil(geometry.refcounts_per_block()) + 1;
        if need <= have {
            return Ok(0);
        }
        let entries_max = REFCOUNT_TABLE_SIZE_MAX / 8;
        if need > entries_max {
            let why = "its refcount table would exceed 8 MiB, the most that readers accept";
            return Err(Error::new(Kind::Limit, "grow the image", why)
                .file(self.file.name())
                .remedy("convert it to one with larger clusters"));
        }
        let entries = need.max(have + have / 2).min(entries_max);
        Ok((entries * 8).div_ceil(geometry.cluster_size()))
    }
}

/// A step that the file grows by, in clusters.
struct Growth {
    /// Where new tables may begin.
    start: u64,
    end: u64,
    /// The clusters of a new refcount table; 0 if the present one suffices.
    table_clusters: u64,
    /// What is counted already.
    counted: Vec<Range<u64>>,
}

/// The parts of `all` that `used` leaves, which is in ascending order.
fn between(all: Range<u64>, used: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut start = all.start;
    let mut rest = Vec::new();
    for range in used.iter().filter(|range| !range.is_empty()) {
        rest.push(start..range.start);
        start = range.end;
    }
    rest.push(start..all.end);
    rest
}
