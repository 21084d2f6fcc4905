//! Builds the refcount structures anew at the end of the file.
//!
//! The old ones stay untouched until the header names the new ones: a crash before that leaves the
//! image as damaged as it was, and some bytes longer.

use std::collections::BTreeSet;

use stillpoint_format::qcow2::header::REFCOUNT_TABLE_SIZE_MAX;
use stillpoint_format::qcow2::refcount;
use stillpoint_io::{Error, GrowMeans, Kind, Manage, Result};

use super::super::image::{bytes_of, write_bytes};
use super::{Check, Finding};

const OP: &str = "rebuild the refcounts";

impl Check<'_> {
    pub(super) async fn rebuild(&mut self, old_table: &[u64]) -> Result<()> {
        (self.found)(&Finding::Rebuilding);
        self.forget_old_structures(old_table)?;
        let bits = self.geometry.cluster_bits;
        let per_block = self.geometry.refcounts_per_block();

        // Every block that counts anything, and, as blocks count themselves, enough for the new ones.
        let mut indices = self.block_indices_in_use()?;
        let start = self.counts.clusters();
        let (mut tables, mut end);
        loop {
            let last = *indices.last().expect("the header's cluster is in use");
            tables = self.geometry.clusters_for((last + 1) * 8);
            end = start + indices.len() as u64 + tables;
            let before = indices.len();
            indices.extend(start / per_block..end.div_ceil(per_block));
            if indices.len() == before {
                break;
            }
        }
        if tables << bits > REFCOUNT_TABLE_SIZE_MAX {
            let why = "the refcount table would be longer than 8 MiB";
            return Err(Error::new(Kind::Limit, OP, why));
        }
        self.counts.extend(end - start);
        self.count(start << bits..end << bits)?;

        let grow = Manage::Grow { end: end << bits, means: GrowMeans::Truncate };
        self.file.manage(self.queue, grow).await?;
        let mut table = vec![0; (tables << bits) as usize / 8];
        self.blocks = vec![None; table.len()];
        for (place, &index) in indices.iter().enumerate() {
            let offset = (start + tables + place as u64) << bits;
            table[index as usize] = offset;
            self.blocks[index as usize] = Some(offset);
            let block = self.build_block(index)?;
            write_bytes(self.queue, self.file, offset, &block).await?;
        }
        write_bytes(self.queue, self.file, start << bits, &bytes_of(&table)).await?;
        // ORDER: the new structures before the header that points to them.
        self.file.flush(self.queue).await?;
        self.header.refcount_table_offset.0 = start << bits;
        self.header.refcount_table_clusters = tables as u32;
        let mut fields = (start << bits).to_be_bytes().to_vec();
        fields.extend((tables as u32).to_be_bytes());
        write_bytes(self.queue, self.file, 48, &fields).await?;
        // ORDER: the header before flags are set that the new refcounts vouch for.
        self.file.flush(self.queue).await?;
        self.report.image_end_offset = end << bits;
        Ok(())
    }

    /// What the old refcount structures took is free.
    fn forget_old_structures(&mut self, old_table: &[u64]) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        if !old_table.is_empty() {
            let range = self.refcount_table_range();
            for cluster in range.start >> bits..range.end >> bits {
                self.counts.remove(cluster)?;
            }
        }
        for word in old_table.iter().map(|word| word & !0x1ff) {
            let counted = word != 0
                && word & self.geometry.cluster_mask() == 0
                && word >> bits < self.counts.clusters();
            if counted {
                self.counts.remove(word >> bits)?;
            }
        }
        Ok(())
    }

    /// The indices of all blocks that count at least one cluster.
    fn block_indices_in_use(&self) -> Result<BTreeSet<u64>> {
        let per_block = self.geometry.refcounts_per_block();
        let index_max = REFCOUNT_TABLE_SIZE_MAX / 8;
        let mut indices = BTreeSet::new();
        let mut next = self.counts.next_touched(0);
        while let Some(cluster) = next.filter(|&cluster| cluster < self.counts.clusters()) {
            let index = cluster / per_block;
            if index >= index_max {
                let why = "clusters in use lie beyond what a refcount table can cover";
                return Err(Error::new(Kind::Limit, OP, why));
            }
            let clusters = index * per_block..(index + 1) * per_block;
            let clusters = cluster..clusters.end.min(self.counts.clusters());
            let end = clusters.end;
            if clusters.into_iter().any(|cluster| self.counts.references(cluster) > 0) {
                indices.insert(index);
            }
            next = self.counts.next_touched(end);
        }
        Ok(indices)
    }

    fn build_block(&mut self, index: u64) -> Result<Vec<u8>> {
        let per_block = self.geometry.refcounts_per_block();
        let mut block = vec![0; self.geometry.cluster_size() as usize];
        for i in 0..per_block {
            let cluster = index * per_block + i;
            if cluster >= self.counts.clusters() {
                break;
            }
            let references = self.counts.references(cluster);
            if references > self.geometry.refcount_max() {
                let why = format!(
                    "cluster {cluster} has {references} references, and refcounts have only {} \
                     bits",
                    self.geometry.refcount_bits()
                );
                return Err(Error::new(Kind::Unsupported, OP, why));
            }
            refcount::set_in_block(&mut block, i, self.geometry.refcount_order, references);
            self.flags_suspect |= self.counts.flag_contradicts(cluster, references);
        }
        Ok(block)
    }
}
