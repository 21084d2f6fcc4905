//! Compares the counts with the refcounts on disk, and corrects these.
//!
//! The first pass only reports. Where something may be repaired a second pass rewrites the blocks
//! that differ, or, if blocks are missing or not to be trusted, everything is built anew
//! (`rebuild`).

use stillpoint_format::qcow2::refcount;
use stillpoint_io::Result;

use super::super::image::{read_words, write_bytes};
use super::references::{TableReference, read_run};
use super::{Check, Finding, Repair};

/// What a pass over all refcounts has found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Comparison {
    leaks: u64,
    corruptions: u64,
    leaks_fixed: u64,
    corruptions_fixed: u64,
    /// Some cluster in use has no block that could count it.
    block_missing: bool,
    /// A "copied" flag contradicts a refcount.
    flags_suspect: bool,
    /// The last cluster in use, plus one.
    end_cluster: u64,
}

impl Check<'_> {
    pub(super) async fn check_refcounts(&mut self) -> Result<()> {
        let table = self.read_refcount_table().await?;
        let corruptions_before = self.report.corruptions;
        self.check_blocks(&table)?;
        let blocks_damaged = self.report.corruptions - corruptions_before;

        let mut comparison = self.compare(Repair::Nothing).await?;
        let differs = comparison.leaks + comparison.corruptions > 0;
        if self.repair == Repair::All && (blocks_damaged > 0 || comparison.block_missing) {
            self.rebuild(&table).await?;
            self.report.corruptions -= blocks_damaged;
            self.report.corruptions_fixed += blocks_damaged + comparison.corruptions;
            self.report.leaks_fixed += comparison.leaks;
            return Ok(());
        }
        if self.repair > Repair::Nothing && differs {
            comparison = self.compare(self.repair).await?;
        }
        self.report.leaks += comparison.leaks;
        self.report.corruptions += comparison.corruptions;
        self.report.leaks_fixed += comparison.leaks_fixed;
        self.report.corruptions_fixed += comparison.corruptions_fixed;
        self.report.image_end_offset = comparison.end_cluster << self.geometry.cluster_bits;
        self.flags_suspect |= comparison.flags_suspect;
        Ok(())
    }

    /// The refcount table's words; none of what lies outside the file.
    async fn read_refcount_table(&self) -> Result<Vec<u64>> {
        let range = self.refcount_table_range();
        let end = self.counts.clusters() << self.geometry.cluster_bits;
        if range.is_empty() || range.end > end {
            return Ok(Vec::new());
        }
        read_words(self.queue, self.file, range.start, (range.end - range.start) / 8).await
    }

    /// Counts the refcount blocks and sorts out those that cannot be trusted.
    fn check_blocks(&mut self, table: &[u64]) -> Result<()> {
        for (index, &word) in (0..).zip(table) {
            let block = if word == 0 { None } else { self.check_block(index, word)? };
            self.blocks.push(block);
        }
        Ok(())
    }

    fn check_block(&mut self, index: u64, word: u64) -> Result<Option<u64>> {
        let offset = word & !0x1ff;
        if word != offset {
            self.corrupt(Finding::ReservedRefcountTable { index });
        }
        if offset & self.geometry.cluster_mask() != 0 {
            self.corrupt(Finding::BlockMisaligned { index });
            return Ok(None);
        }
        let cluster = offset >> self.geometry.cluster_bits;
        if cluster >= self.counts.clusters() {
            self.corrupt(Finding::BlockOutside { index });
            return Ok(None);
        }
        self.count(offset..offset + self.geometry.cluster_size())?;
        // A block whose cluster serves anything else, all of which was counted before, holds no
        // refcounts.
        let references = self.counts.references(cluster);
        if references != 1 {
            self.corrupt(Finding::BlockShared { index, references });
            return Ok(None);
        }
        Ok(Some(offset))
    }

    /// Goes through all refcounts, and corrects as `repair` allows.
    async fn compare(&mut self, repair: Repair) -> Result<Comparison> {
        let per_block = self.geometry.refcounts_per_block();
        let mut comparison = Comparison::default();
        let mut index = 0;
        while index * per_block < self.counts.clusters() {
            let clusters = index * per_block..((index + 1) * per_block).min(self.counts.clusters());
            let offset = self.blocks.get(index as usize).copied().flatten();
            let touched = !self.counts.is_untouched(clusters.start, clusters.end);
            let mut block = match offset {
                Some(offset) => self.read_block(offset).await?,
                None => None,
            };
            if block.is_none() && touched && offset.is_some() {
                block = Some(vec![0; self.geometry.cluster_size() as usize]);
            }
            if let (Some(mut block), Some(offset)) = (block, offset) {
                if self.compare_block(clusters, &mut block, repair, &mut comparison) {
                    write_bytes(self.queue, self.file, offset, &block).await?;
                }
            } else if touched {
                self.compare_missing(clusters, &mut comparison);
            } else if index >= self.blocks.len() as u64 {
                // Far behind the last block there may be nothing for long.
                match self.counts.next_touched(clusters.end) {
                    Some(cluster) => index = cluster / per_block,
                    None => break,
                }
                continue;
            }
            index += 1;
        }
        Ok(comparison)
    }

    /// A block's bytes; none of a hole, where every refcount is 0.
    async fn read_block(&self, offset: u64) -> Result<Option<Vec<u8>>> {
        let run = [TableReference { offset, active: 0, snapshots: 0 }];
        read_run(self.queue, self.file, &run, self.geometry.cluster_size()).await
    }

    /// Compares a range of clusters with their block; returns whether the block was changed.
    fn compare_block(
        &mut self,
        clusters: std::ops::Range<u64>,
        block: &mut [u8],
        repair: Repair,
        comparison: &mut Comparison,
    ) -> bool {
        let order = self.geometry.refcount_order;
        let mut changed = false;
        for (index, cluster) in (0..).zip(clusters) {
            let refcount = refcount::value_in_block(block, index, order);
            let references = self.counts.references(cluster);
            if refcount | references == 0 {
                continue;
            }
            let leaked = refcount > references;
            let repaired = refcount != references
                && match repair {
                    Repair::Nothing => false,
                    Repair::Leaks => leaked,
                    Repair::All => references <= self.geometry.refcount_max(),
                };
            if repaired {
                refcount::set_in_block(block, index, order, references);
                changed = true;
            }
            if refcount != references {
                (self.found)(&Finding::Refcount { cluster, refcount, references, repaired });
                *comparison.tally(leaked, repaired) += 1;
            }
            let now = if repaired { references } else { refcount };
            comparison.flags_suspect |= self.counts.flag_contradicts(cluster, now);
            if now | references != 0 {
                comparison.end_cluster = cluster + 1;
            }
        }
        changed
    }

    /// Reports every reference to a range of clusters that no block counts.
    fn compare_missing(&mut self, clusters: std::ops::Range<u64>, comparison: &mut Comparison) {
        for cluster in clusters {
            let references = self.counts.references(cluster);
            if references != 0 {
                let finding =
                    Finding::Refcount { cluster, refcount: 0, references, repaired: false };
                (self.found)(&finding);
                comparison.corruptions += 1;
                comparison.block_missing = true;
                comparison.end_cluster = cluster + 1;
                comparison.flags_suspect |= self.counts.flag_contradicts(cluster, 0);
            }
        }
    }
}

impl Comparison {
    fn tally(&mut self, leaked: bool, repaired: bool) -> &mut u64 {
        match (leaked, repaired) {
            (true, false) => &mut self.leaks,
            (true, true) => &mut self.leaks_fixed,
            (false, false) => &mut self.corruptions,
            (false, true) => &mut self.corruptions_fixed,
        }
    }
}
