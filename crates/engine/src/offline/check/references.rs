//! Counts every reference to a host cluster.
//!
//! L2 tables are gathered from all L1 tables first, sorted by their offsets, and each is read once,
//! however many L1 entries refer to it: its references count as often as it is referred to.

use std::ops::Range;

use futures_util::stream::{self, StreamExt};
use stillpoint_format::HostOffset;
use stillpoint_format::qcow2::bitmap::{self, Bits};
use stillpoint_format::qcow2::entry::{COMPRESSED, COPIED, OFFSET_MASK, ZERO};
use stillpoint_format::qcow2::extension::Extension;
use stillpoint_format::qcow2::{CompressedCluster, SubclusterMap};
use stillpoint_io::{Error, Kind, Queue, Result, Storage, Value};

use super::super::entries::{read_bitmaps, read_snapshots};
use super::super::image::{PIECE_SIZE, read_bytes, visit_table, words, write_bytes};
use super::{Check, Finding, Repair};

/// Bits of a standard L2 entry that must be 0.
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET_MASK | ZERO);
/// Bits of an L1 entry that must be 0.
const L1_RESERVED: u64 = !(COPIED | OFFSET_MASK);
/// All L1 tables together are at most this long, in bytes: an image with more is hostile.
const L1_TOTAL_MAX: u64 = 4 << 30;
/// Reads in flight at once.
const READS: usize = 8;
/// From this length on it pays to ask whether a run of tables is a hole before reading it.
const HOLE_WORTH_ASKING: u64 = 256 << 10;

/// An L2 table and how many L1 entries refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TableReference {
    pub(super) offset: u64,
    /// Entries of the active L1 table.
    pub(super) active: u32,
    /// Entries of snapshots' L1 tables.
    pub(super) snapshots: u32,
}

/// The L2 tables of an image, each once.
#[derive(Default)]
pub(super) struct TableReferences {
    list: Vec<TableReference>,
    sorted: usize,
}

impl TableReferences {
    fn add(&mut self, offset: u64, active: bool) {
        let (active, snapshots) = (active.into(), (!active).into());
        self.list.push(TableReference { offset, active, snapshots });
        // Snapshots refer to the same tables again and again; merging keeps memory to one entry
        // for each table.
        if self.list.len() > (2 * self.sorted).max(1 << 16) {
            self.sort();
        }
    }

    fn sort(&mut self) {
        self.list.sort_unstable_by_key(|table| table.offset);
        self.list.dedup_by(|next, kept| {
            let same = next.offset == kept.offset;
            if same {
                kept.active = kept.active.saturating_add(next.active);
                kept.snapshots = kept.snapshots.saturating_add(next.snapshots);
            }
            same
        });
        self.sorted = self.list.len();
    }

    /// The tables in the order of the file.
    pub(super) fn in_order(&self) -> &[TableReference] {
        &self.list
    }
}

/// Groups tables that lie one behind the other, up to a piece for each read.
pub(super) fn runs(tables: &[TableReference], cluster_size: u64) -> Vec<&[TableReference]> {
    let mut runs = Vec::new();
    let mut rest = tables;
    while !rest.is_empty() {
        let adjacent = rest.windows(2).take_while(|pair| {
            let end = pair[1].offset + cluster_size;
            pair[1].offset == pair[0].offset + cluster_size && end - rest[0].offset <= PIECE_SIZE
        });
        let (run, others) = rest.split_at(adjacent.count() + 1);
        runs.push(run);
        rest = others;
    }
    runs
}

/// Reads a run of tables; `None` if all of it is a hole, and so refers to nothing.
pub(super) async fn read_run(
    queue: &Queue,
    file: &dyn Storage,
    run: &[TableReference],
    cluster_size: u64,
) -> Result<Option<Vec<u8>>> {
    let range = run[0].offset..run[run.len() - 1].offset + cluster_size;
    let length = range.end - range.start;
    if length >= HOLE_WORTH_ASKING {
        let status = file.status(queue, range.start, length).await?;
        if matches!(status, Value::Extent(extent) if !extent.data && extent.length >= length) {
            return Ok(None);
        }
    }
    read_bytes(queue, file, range).await.map(Some)
}

impl Check<'_> {
    pub(super) async fn count_references(&mut self) -> Result<()> {
        let cluster_size = self.geometry.cluster_size();
        self.count(0..cluster_size)?;
        let active_l1 = self.table_range(self.header.l1_table_offset, self.header.l1_entry_count);
        self.count_l1(active_l1, true).await?;
        self.count_snapshots().await?;
        self.count_extensions().await?;
        self.tables.sort();
        self.count_l2_tables().await?;
        self.count_refcount_table()
    }

    /// Counts one reference to each cluster of a range; `false` if it lies outside the file.
    pub(super) fn count(&mut self, range: Range<u64>) -> Result<bool> {
        self.count_often(range, 1)
    }

    fn count_often(&mut self, range: Range<u64>, references: u64) -> Result<bool> {
        if range.is_empty() {
            return Ok(true);
        }
        let bits = self.geometry.cluster_bits;
        let clusters = range.start >> bits..((range.end - 1) >> bits) + 1;
        if clusters.end > self.counts.clusters() {
            let (offset, size) = (range.start, range.end - range.start);
            self.corrupt(Finding::BeyondEnd { offset, size });
            return Ok(false);
        }
        for cluster in clusters {
            self.counts.add(cluster, references)?;
        }
        Ok(true)
    }

    fn table_range(&self, offset: HostOffset, entry_count: u32) -> Range<u64> {
        offset.0..offset.0 + u64::from(entry_count) * 8
    }

    /// Counts an L1 table and gathers the L2 tables that it refers to.
    async fn count_l1(&mut self, range: Range<u64>, active: bool) -> Result<()> {
        if !self.count(range.clone())? {
            return Ok(());
        }
        let (queue, file) = (self.queue, self.file);
        visit_table(queue, file, range, |_, bytes| {
            for word in words(bytes).filter(|&word| word != 0) {
                self.count_l1_entry(word, active)?;
            }
            Ok(())
        })
        .await
    }

    fn count_l1_entry(&mut self, word: u64, active: bool) -> Result<()> {
        if word & L1_RESERVED != 0 {
            self.corrupt(Finding::ReservedL1 { word });
        }
        let offset = word & OFFSET_MASK;
        if offset == 0 {
            return Ok(());
        }
        let inside = self.count(offset..offset + self.geometry.cluster_size())?;
        if active {
            self.note_flag(inside.then_some(offset), word)?;
        }
        if offset & self.geometry.cluster_mask() != 0 {
            self.corrupt(Finding::L2Misaligned { offset });
        } else if inside {
            self.tables.add(offset, active);
        }
        Ok(())
    }

    /// Notes an active entry's "copied" flag at its cluster, if that lies inside the file.
    fn note_flag(&mut self, offset: Option<u64>, word: u64) -> Result<()> {
        let copied = word & COPIED != 0;
        match offset {
            Some(offset) => self.counts.note_flag(offset >> self.geometry.cluster_bits, copied),
            None => {
                // Whatever lies there, nobody counts it.
                self.flags_suspect |= copied;
                Ok(())
            }
        }
    }

    async fn count_snapshots(&mut self) -> Result<()> {
        if self.header.snapshot_count == 0 {
            return Ok(());
        }
        let (snapshots, size) = match read_snapshots(self.queue, self.file, &self.header).await {
            Ok(table) => table,
            Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::Unsupported) => {
                self.corrupt(Finding::Unreadable(error));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let start = self.header.snapshot_table_offset.0;
        self.count(start..start + size)?;
        let total: u64 = snapshots.iter().map(|s| u64::from(s.l1_entry_count) * 8).sum();
        if total > L1_TOTAL_MAX {
            let why = "the snapshots' L1 tables take more than 4 GiB";
            return Err(Error::new(Kind::Limit, "count references", why));
        }
        for snapshot in snapshots {
            let range = self.table_range(snapshot.l1_table_offset, snapshot.l1_entry_count);
            self.count_l1(range, false).await?;
        }
        Ok(())
    }

    /// What header extensions refer to: the LUKS header, and the bitmaps.
    async fn count_extensions(&mut self) -> Result<()> {
        let encryption = self.header.extensions.iter().find_map(|extension| match extension {
            Extension::Encryption { offset, length } => Some((offset.0, *length)),
            _ => None,
        });
        if let Some((offset, length)) = encryption {
            self.count(offset..offset.saturating_add(length))?;
        }
        let Some(place) = self.header.bitmaps() else { return Ok(()) };
        let start = place.directory_offset.0;
        self.count(start..start + place.directory_size)?;
        let bitmaps = match read_bitmaps(self.queue, self.file, &self.header).await {
            Ok(bitmaps) => bitmaps,
            Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::Unsupported) => {
                self.corrupt(Finding::Unreadable(error));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for bitmap in bitmaps {
            let range = self.table_range(bitmap.table_offset, bitmap.table_entry_count);
            if self.count(range.clone())? {
                let (queue, file) = (self.queue, self.file);
                let visit = |_, bytes: &[u8]| self.count_bitmap_entries(bytes);
                visit_table(queue, file, range, visit).await?;
            }
        }
        Ok(())
    }

    fn count_bitmap_entries(&mut self, bytes: &[u8]) -> Result<()> {
        for word in words(bytes) {
            match bitmap::decode_table_entry(word, self.geometry) {
                Ok(Bits::Stored(HostOffset(offset))) => {
                    self.count(offset..offset + self.geometry.cluster_size())?;
                }
                Ok(Bits::Zeros | Bits::Ones) => {}
                Err(error) => {
                    let error = Error::new(Kind::Corrupt, "read a bitmap", error.to_string());
                    self.corrupt(Finding::Unreadable(error));
                }
            }
        }
        Ok(())
    }

    async fn count_l2_tables(&mut self) -> Result<()> {
        let (queue, file) = (self.queue, self.file);
        let cluster_size = self.geometry.cluster_size();
        let tables = std::mem::take(&mut self.tables);
        let reads = runs(tables.in_order(), cluster_size)
            .into_iter()
            .map(|run| async move { (run, read_run(queue, file, run, cluster_size).await) });
        let mut reads = stream::iter(reads).buffered(READS);
        while let Some((run, bytes)) = reads.next().await {
            let Some(bytes) = bytes? else { continue };
            let mut repairs = Vec::new();
            for (table, bytes) in run.iter().zip(bytes.chunks_exact(cluster_size as usize)) {
                self.count_l2_table(*table, bytes, &mut repairs)?;
            }
            for (offset, word) in repairs {
                write_bytes(queue, file, offset, &word.to_be_bytes()).await?;
            }
        }
        drop(reads);
        self.tables = tables;
        Ok(())
    }

    /// Counts what an L2 table refers to. Entries to be rewritten go to `repairs`, with their places.
    fn count_l2_table(
        &mut self,
        table: TableReference,
        bytes: &[u8],
        repairs: &mut Vec<(u64, u64)>,
    ) -> Result<()> {
        let references = u64::from(table.active) + u64::from(table.snapshots);
        let entry_size = self.geometry.l2_entry_size();
        let mut entry_words = words(bytes);
        let mut index = 0;
        // Where the cluster that follows without a gap would lie.
        let mut next_offset = 0;
        while let Some(word) = entry_words.next() {
            let bitmap =
                if self.geometry.extended_l2 { entry_words.next().unwrap_or(0) } else { 0 };
            if word & COMPRESSED != 0 {
                self.count_compressed(word, bitmap, table.active > 0, references)?;
            } else if word != 0 || bitmap != 0 {
                let at = table.offset + index * entry_size;
                let repaired = self.count_standard(word, bitmap, table.active > 0, references)?;
                match repaired {
                    Some(word) => repairs.push((at, word)),
                    None if table.active > 0 => self.note_neighbour(word, &mut next_offset),
                    None => {}
                }
            }
            index += 1;
        }
        Ok(())
    }

    fn count_compressed(
        &mut self,
        word: u64,
        bitmap: u64,
        active: bool,
        references: u64,
    ) -> Result<()> {
        if self.has_data_file() {
            self.corrupt(Finding::CompressedInDataFile { word });
            return Ok(());
        }
        if bitmap != 0 {
            self.corrupt(Finding::Subclusters { word, bitmap });
        }
        if active {
            self.report.allocated_clusters += 1;
            self.report.compressed_clusters += 1;
            // Reading it means reading its neighbours' sectors as well, wherever it lies.
            self.report.fragmented_clusters += 1;
        }
        let cluster = match CompressedCluster::decode(word & (COMPRESSED - 1), self.geometry) {
            Ok(cluster) => cluster,
            Err(error) => {
                let error = Error::new(Kind::Corrupt, "read an L2 entry", error.to_string());
                self.corrupt(Finding::Unreadable(error));
                return Ok(());
            }
        };
        if word & COPIED != 0 {
            self.corrupt(Finding::CompressedCopied { offset: cluster.host.0 });
        }
        self.count_often(cluster.byte_range(), references)?;
        Ok(())
    }

    /// Counts what a standard entry refers to, or returns the word that it should be.
    fn count_standard(
        &mut self,
        word: u64,
        bitmap: u64,
        active: bool,
        references: u64,
    ) -> Result<Option<u64>> {
        let extended = self.geometry.extended_l2;
        let zero = word & ZERO != 0 && !extended;
        if word & L2_RESERVED != 0 || (extended && word & ZERO != 0) {
            self.corrupt(Finding::ReservedL2 { word });
        }
        if zero && self.header.version < 3 {
            self.corrupt(Finding::ZeroInVersion2 { word });
        }
        let offset = word & OFFSET_MASK;
        let present = self.is_present(word);
        let map = SubclusterMap(bitmap);
        let contradiction = map.allocated_mask() & map.zero_mask() != 0;
        if contradiction || (!present && map.allocated_mask() != 0) {
            self.corrupt(Finding::Subclusters { word, bitmap });
        }
        if !present {
            return Ok(None);
        }
        if offset & self.geometry.cluster_mask() != 0 {
            // A cluster that reads as zeros whatever lies in it can do without.
            let repaired = zero && self.repair == Repair::All;
            self.corrupt(Finding::DataMisaligned { offset, zero, repaired });
            if repaired {
                return Ok(Some(ZERO));
            }
        }
        if self.has_data_file() {
            // Clusters of a data file have no refcounts; they count as unshared.
            self.flags_suspect |= active && word & COPIED == 0;
            return Ok(None);
        }
        let range = offset..offset + self.geometry.cluster_size();
        let inside = self.count_often(range, references)?;
        if active {
            self.note_flag(inside.then_some(offset), word)?;
        }
        Ok(None)
    }

    /// Whether a standard entry has a host cluster.
    pub(super) fn is_present(&self, word: u64) -> bool {
        word & OFFSET_MASK != 0 || (self.has_data_file() && word & COPIED != 0)
    }

    fn note_neighbour(&mut self, word: u64, next_offset: &mut u64) {
        if self.is_present(word) {
            let offset = word & OFFSET_MASK;
            self.report.allocated_clusters += 1;
            self.report.fragmented_clusters +=
                u64::from(*next_offset != 0 && offset != *next_offset);
            *next_offset = offset + self.geometry.cluster_size();
        }
    }

    fn count_refcount_table(&mut self) -> Result<()> {
        let range = self.refcount_table_range();
        self.count(range).map(drop)
    }

    pub(super) fn refcount_table_range(&self) -> Range<u64> {
        let offset = self.header.refcount_table_offset.0;
        let clusters = u64::from(self.header.refcount_table_clusters);
        offset..offset + clusters * self.geometry.cluster_size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(offset: u64) -> TableReference {
        TableReference { offset, active: 1, snapshots: 0 }
    }

    #[test]
    fn each_table_is_kept_once_in_the_order_of_the_file() {
        let mut tables = TableReferences::default();
        for round in 0..3 {
            for index in (0..100_000u64).rev() {
                tables.add(index << 16, round == 0);
            }
        }
        tables.sort();
        assert!(tables.list.capacity() < 1 << 19);
        let expected = |index: u64| TableReference { offset: index << 16, active: 1, snapshots: 2 };
        assert!(tables.in_order().iter().copied().eq((0..100_000).map(expected)));
    }

    #[test]
    fn adjacent_tables_are_read_together_up_to_a_piece() {
        let tables: Vec<_> = [1, 2, 3, 7, 8].map(|index| table(index << 16)).to_vec();
        let lengths: Vec<_> = runs(&tables, 1 << 16).iter().map(|run| run.len()).collect();
        assert_eq!(lengths, [3, 2]);
        let tables: Vec<_> = (1..40).map(|index| table(index << 16)).collect();
        let lengths: Vec<_> = runs(&tables, 1 << 16).iter().map(|run| run.len()).collect();
        assert_eq!(lengths, [16, 16, 7]);
        assert_eq!(runs(&[table(0), table(1 << 21)], 1 << 21).len(), 2);
    }
}
