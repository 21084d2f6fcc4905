//! Changing the size of a disk in use, in plain qcow2 order.
//!
//! ```text
//!  longer
//!  1  refcounts of a longer L1 table (a commit), its content          (where the present one lacks entries)
//!     ── barrier ──
//!  2  the header's L1 offset and size
//!     ── barrier ──   the old table is freed (R4)
//!  3  what growing is to show becomes zero: mappings, and bytes where no mapping can say it
//!     ── commit ──
//!  4  the header's disk size
//!     ── barrier ──   requests see the new size
//!
//!  shorter
//!  1  requests see the new size; those that entered under the old one leave
//!  2  the header's disk size
//!     ── barrier ──
//!  3  the mappings of what was cut off go, and their clusters are freed (R4)
//!     ── commit ──
//! ```
//!
//! Each write of the header changes one sector, so a crash leaves the old disk or the new one: the old one
//! whole, because nothing of it is given up before the new one is durable, the new one with zeros, because
//! they are durable before it. Leaks apart, a crash leaves nothing but a longer L1 table than is needed,
//! or mappings beyond the disk's end; both are legal.
//!
//! What lies beyond the end is never trusted to be zero: mappings that a crash or another program left
//! there, the rest of a last cluster, a backing file that is longer. Step 3 of growing clears it all.
//!
//! Header and L1 table are written between two commits ([`Group::between`]), which write them too. Without
//! space nothing has changed but what nobody sees (J25); any other failure from step 2 on latches (R6).
//!
//! Deliberately absent: giving back L2 tables that a shorter disk leaves empty, and a shorter L1 table.
//!
//! [`Group::between`]: crate::group::Group::between

use std::ops::Range;

use stillpoint_format::qcow2::header::L1_SIZE_MAX;
use stillpoint_io::{Durability, Error, Kind, Queue, Segments};

use super::release::Freed;
use super::tables::bytes_of;
use super::zero::Space;
use super::{Done, Qcow2};
use crate::disk::parts;
use crate::mutant::{Mutant, broken};
use crate::tracker::Mode;

/// Byte offset of the disk's size in the header.
const HEADER_SIZE: u64 = 24;
/// Byte offset of the L1 table's length in the header; its offset follows.
const HEADER_L1: u64 = 36;

impl Qcow2 {
    /// Refuses a size that the image cannot have, and images that cannot have another.
    pub(crate) fn refuse_size(&self, size: u64) -> Done {
        let refuse = |kind, why: &str, remedy: &str| {
            Err(Error::new(kind, "resize the disk", why).file(self.file.name()).remedy(remedy))
        };
        let header = &self.header;
        if header.bitmaps().is_some() {
            let why = "it holds persistent dirty bitmaps, which are of its present size";
            return refuse(
                Kind::Unsupported,
                why,
                "remove them first (`qemu-img bitmap --remove`), then add them again",
            );
        }
        if header.version < 3 && header.snapshot_count > 0 {
            let why = "a version 2 image does not keep the size that its internal snapshots have";
            return refuse(
                Kind::Unsupported,
                why,
                "delete them (`qemu-img snapshot -d`), or make it version 3 (`qemu-img amend`)",
            );
        }
        if self.geometry().l1_entries_for(size) > L1_SIZE_MAX / 8 {
            let why = "its L1 table would exceed 32 MiB, the most that readers accept";
            return refuse(Kind::Limit, why, "convert it to one with larger clusters");
        }
        Ok(())
    }

    /// Makes the image one of `new` bytes instead of `old`. One at a time; and of a shorter disk nobody
    /// uses the tail any more. `write_zeros` writes zeros to a range whose stripes are held; `settle` is
    /// called when the new size is durable.
    pub(crate) async fn resize(
        &self,
        queue: &Queue,
        old: u64,
        new: u64,
        write_zeros: impl AsyncFn(Range<u64>) -> Done,
        settle: impl FnOnce(),
    ) -> Done {
        let clusters = |size: u64| size.next_multiple_of(self.cluster_size());
        if new < old {
            let tail = clusters(new)..clusters(old);
            if broken(Mutant::ResizeCut) {
                self.clear_said(queue, tail.clone(), 0, Space::Forgotten, &write_zeros).await?;
            }
            self.write_size(queue, new).await?;
            settle();
            let cleared = self.clear_said(queue, tail, 0, Space::Forgotten, &write_zeros).await;
            if let Err(error) = cleared.and(self.commit(queue).await) {
                // The disk is shorter all the same; a later growth clears what is left.
                tracing::warn!(%error, "what was cut off stays allocated");
            }
            return Ok(());
        }
        self.lengthen_l1(queue, new).await?;
        // What the backing file shows beyond the old end has to be hidden: by mappings of its own. Behind
        // that nothing needs to be said.
        let backing = self.backing.as_ref().map_or(0, |backing| backing.size());
        let hidden = backing > old && !broken(Mutant::ResizeBacking);
        let shown = if hidden { clusters(backing).min(clusters(new)) } else { old };
        self.clear_said(queue, old..shown, shown, Space::Released, &write_zeros).await?;
        let rest = shown..clusters(new);
        self.clear_said(queue, rest, shown, Space::Forgotten, &write_zeros).await?;
        if !broken(Mutant::ResizeOrder) {
            // ORDER: zeros before the size that shows them.
            self.commit(queue).await?;
        }
        self.write_size(queue, new).await?;
        settle();
        Ok(())
    }

    /// Clears the parts of `range` that a table says something of, or that the backing file shows, below
    /// `shown`.
    async fn clear_said(
        &self,
        queue: &Queue,
        range: Range<u64>,
        shown: u64,
        space: Space,
        write_zeros: &impl AsyncFn(Range<u64>) -> Done,
    ) -> Done {
        let covers = self.geometry().l2_table_covers();
        for index in range.start / covers..range.end.div_ceil(covers) {
            let said = if self.l1.word(index) == 0 { shown } else { u64::MAX };
            let start = range.start.max(index * covers);
            let end = range.end.min((index + 1) * covers).min(said);
            for part in parts(start..end) {
                queue.yield_now().await;
                // The last cluster of the old disk is in use, and what is looked at must not be given
                // back meanwhile (R4).
                let first = part.start / self.cluster_size() * self.cluster_size();
                let tracker = &self.writer().tracker;
                let _alone = tracker.enter(first..part.end, Mode::Exclusive).await;
                for range in self.clear(queue, part, space).await? {
                    if !broken(Mutant::ResizeZeros) {
                        write_zeros(range).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Gives the image an L1 table for a disk of `size` bytes, unless it has one.
    async fn lengthen_l1(&self, queue: &Queue, size: u64) -> Done {
        let (geometry, have) = (self.geometry(), self.l1.len());
        let need = geometry.l1_entries_for(size);
        if need <= have {
            return Ok(());
        }
        let entry_count = need.max(have + have / 2).min(L1_SIZE_MAX / 8);
        let cluster_count = geometry.clusters_for(entry_count * 8);
        let first = self.grow_adjacent(queue, cluster_count).await?;
        let new = first..first + cluster_count;
        let old_first = self.l1.host_offset() >> geometry.cluster_bits;
        let old = old_first..old_first + geometry.clusters_for(have * 8);
        let early = broken(Mutant::ResizeRelease);
        if early {
            self.writer().releases.push(Freed::clusters(old.start, old.end - old.start));
        }
        let moved = self.move_l1(queue, &new, entry_count).await;
        self.free_unused(match &moved {
            Ok(()) if early => 0..0,
            Ok(()) => old,
            Err(_) => new,
        });
        moved
    }

    /// Frees clusters of an L1 table that is none any more. F2: what is another structure's as well is
    /// not given away.
    fn free_unused(&self, clusters: Range<u64>) {
        let others = self.structures_in(&clusters);
        for cluster in clusters.filter(|cluster| !others.contains(cluster)) {
            self.writer().releases.push(Freed::clusters(cluster, 1));
        }
        self.release_eventually();
    }

    /// Moves the L1 table to new clusters, which are counted in the cache.
    async fn move_l1(&self, queue: &Queue, clusters: &Range<u64>, entry_count: u64) -> Done {
        let geometry = self.geometry();
        let committer = &self.writer().committer;
        let host_offset = clusters.start << geometry.cluster_bits;
        if !broken(Mutant::ResizeCounted) {
            // ORDER: the new table's refcounts before anything names it.
            self.commit(queue).await?;
        }
        let write = async || {
            committer.latch.check()?;
            // The words that the file holds: what they name is durable, unlike what came later (J20).
            let mut bytes = bytes_of(&self.l1.words_to_write(0, self.l1.len()));
            bytes.resize(((clusters.end - clusters.start) << geometry.cluster_bits) as usize, 0);
            let bytes = Segments::from_slice(&bytes);
            self.file.write(queue, host_offset, bytes, Durability::Volatile).await?;
            if !broken(Mutant::ResizeHeader) {
                // ORDER: the table's content before the header names it.
                self.barrier(queue).await?;
            }
            let mut fields = (entry_count as u32).to_be_bytes().to_vec();
            fields.extend(host_offset.to_be_bytes());
            self.write_header(queue, HEADER_L1, &fields).await?;
            self.l2.grow(entry_count * (self.cluster_size() / self.slice_bytes()));
            self.l1.moved(host_offset, entry_count);
            // Once more: the clusters of tables may have been looked up meanwhile, from the old L1.
            self.hold_tables(clusters.clone());
            Ok(())
        };
        committer.commits.between(write).await
    }

    async fn write_size(&self, queue: &Queue, size: u64) -> Done {
        let committer = &self.writer().committer;
        let write = async || {
            committer.latch.check()?;
            self.write_header(queue, HEADER_SIZE, &size.to_be_bytes()).await
        };
        committer.commits.between(write).await
    }

    /// Changes fields of the header's first sector, durably.
    async fn write_header(&self, queue: &Queue, offset: u64, fields: &[u8]) -> Done {
        let latch = &self.writer().committer.latch;
        // Dropped in the middle, it leaves a header that nobody knows.
        let unheard = latch.unless_heard();
        let written = match self.patch(queue, offset, fields).await {
            // ORDER: the header before whatever relies on it: releases, new requests, the answer.
            Ok(()) => self.barrier(queue).await,
            failed => failed,
        };
        unheard.heard();
        // A sector without space is not written (J25); after another failure it may be either (R6).
        written.inspect_err(|error| {
            if error.kind() != Kind::NoSpace {
                latch.close(error);
            }
        })
    }
}
