//! Names, and corrects, the "copied" flags of the active tables that contradict a refcount.
//!
//! Only runs where the comparison of refcounts has shown that there are some: the tables are read a
//! second time, and refcounts are looked up entry by entry, through a bounded cache.

use std::collections::HashMap;

use stillpoint_format::qcow2::entry::{COMPRESSED, COPIED, OFFSET_MASK};
use stillpoint_format::qcow2::refcount;
use stillpoint_io::Result;

use super::super::image::{PIECE_SIZE, bytes_of, read_bytes, read_words, words, write_bytes};
use super::references::{read_run, runs};
use super::{Check, Finding, Repair};

/// The most refcount blocks kept at once, in bytes.
const CACHE_SIZE_MAX: u64 = 64 << 20;

/// Refcount blocks by their offsets.
#[derive(Default)]
struct Blocks(HashMap<u64, Vec<u8>>);

impl Check<'_> {
    pub(super) async fn check_flags(&mut self) -> Result<()> {
        if !self.flags_suspect {
            return Ok(());
        }
        // With errors left, a flag that looks wrong may be the only thing that is right.
        let repair = match self.repair {
            Repair::Nothing => false,
            Repair::Leaks => self.report.corruptions == 0,
            Repair::All => true,
        };
        if repair {
            // ORDER: refcounts before the flags that say what they are.
            self.file.flush(self.queue).await?;
        }
        let mut blocks = Blocks::default();
        self.check_l1_flags(repair, &mut blocks).await?;
        self.check_l2_flags(repair, &mut blocks).await
    }

    /// A cluster's refcount on disk; 0 where no block can tell.
    async fn refcount(&self, cluster: u64, blocks: &mut Blocks) -> Result<u64> {
        let per_block = self.geometry.refcounts_per_block();
        let index = usize::try_from(cluster / per_block).unwrap_or(usize::MAX);
        let Some(offset) = self.blocks.get(index).copied().flatten() else { return Ok(0) };
        let size = self.geometry.cluster_size();
        if !blocks.0.contains_key(&offset) {
            if (blocks.0.len() as u64 + 1) * size > CACHE_SIZE_MAX {
                blocks.0.clear();
            }
            let block = read_bytes(self.queue, self.file, offset..offset + size).await?;
            blocks.0.insert(offset, block);
        }
        let order = self.geometry.refcount_order;
        Ok(refcount::value_in_block(&blocks.0[&offset], cluster % per_block, order))
    }

    async fn check_l1_flags(&mut self, repair: bool, blocks: &mut Blocks) -> Result<()> {
        let start = self.header.l1_table_offset.0;
        let count = u64::from(self.header.l1_entry_count);
        let mut first = 0;
        while first < count && start + first * 8 < self.file.end() {
            let length = (PIECE_SIZE / 8).min(count - first);
            let mut entries = read_words(self.queue, self.file, start + first * 8, length).await?;
            let mut changed = false;
            for (l1_index, word) in (first..).zip(&mut entries) {
                let offset = *word & OFFSET_MASK;
                if offset == 0 {
                    continue;
                }
                let refcount = self.refcount(offset >> self.geometry.cluster_bits, blocks).await?;
                if (refcount == 1) != (*word & COPIED != 0) {
                    let (word_before, repaired) = (*word, repair);
                    self.corrupt(Finding::CopiedL2Table {
                        l1_index,
                        word: word_before,
                        refcount,
                        repaired,
                    });
                    *word ^= COPIED;
                    changed = true;
                }
            }
            if changed && repair {
                write_bytes(self.queue, self.file, start + first * 8, &bytes_of(&entries)).await?;
            }
            first += length;
        }
        Ok(())
    }

    async fn check_l2_flags(&mut self, repair: bool, blocks: &mut Blocks) -> Result<()> {
        let size = self.geometry.cluster_size();
        let tables = std::mem::take(&mut self.tables);
        for run in runs(tables.in_order(), size) {
            let Some(bytes) = read_run(self.queue, self.file, run, size).await? else { continue };
            for (table, bytes) in run.iter().zip(bytes.chunks_exact(size as usize)) {
                if table.active > 0 {
                    self.check_l2_table_flags(table.offset, bytes, repair, blocks).await?;
                }
            }
        }
        self.tables = tables;
        Ok(())
    }

    async fn check_l2_table_flags(
        &mut self,
        offset: u64,
        bytes: &[u8],
        repair: bool,
        blocks: &mut Blocks,
    ) -> Result<()> {
        let mut entries: Vec<u64> = words(bytes).collect();
        let words_per_entry = self.geometry.l2_entry_size() as usize / 8;
        let mut changed = false;
        for index in (0..entries.len()).step_by(words_per_entry) {
            let word = entries[index];
            if word & COMPRESSED != 0 || !self.is_present(word) {
                continue;
            }
            // Nobody else refers to a data file's clusters.
            let refcount = if self.has_data_file() {
                1
            } else {
                let cluster = (word & OFFSET_MASK) >> self.geometry.cluster_bits;
                self.refcount(cluster, blocks).await?
            };
            if (refcount == 1) != (word & COPIED != 0) {
                self.corrupt(Finding::CopiedData { word, refcount, repaired: repair });
                entries[index] ^= COPIED;
                changed = true;
            }
        }
        if changed && repair {
            write_bytes(self.queue, self.file, offset, &bytes_of(&entries)).await?;
        }
        Ok(())
    }
}
