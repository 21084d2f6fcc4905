//! Refcounts in use: the table in memory, its blocks' slices in a cache.
//!
//! The refcount of a cluster changes in one of two ways: a publication sets it to 1 ([`publish`]),
//! and a release takes 1 away ([`drop_one`]). Both happen under the slice's lock and reach the file
//! with the next commit.
//!
//! New blocks, and a new table when the old one is full, exist in memory first (`grow.rs`); the
//! commit writes them in their order. [`Change`] is what it has to write.
//!
//! [`publish`]: Refcounts::publish
//! [`drop_one`]: Refcounts::drop_one

use std::collections::BTreeSet;

use async_lock::Mutex as AsyncMutex;
use stillpoint_format::qcow2::geometry::Geometry;
use stillpoint_format::qcow2::refcount;
use stillpoint_io::{Queue, Result, Segments};

use super::Qcow2;
use super::allocate::Reservation;
use super::tables::{bytes_of, word_at};
use crate::cache::{OwnedPin, Pin, SLICE_BYTES, SliceCache};
use crate::sync::{Arc, Mutex, lock};

/// Refcounts in use: see the module's head.
pub(crate) struct Refcounts {
    geometry: Geometry,
    slice_bytes: u64,
    pub(super) cache: Arc<SliceCache<()>>,
    table: Mutex<Table>,
    loading: AsyncMutex<()>,
}

/// The refcount table: where each block is, 0 for none.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) blocks: Vec<u64>,
    /// Where it is, or will be, in the file.
    pub(super) host_offset: u64,
    pub(super) clusters: u64,
    /// Blocks that have a place and do not count themselves yet: not to be written.
    placed: BTreeSet<u64>,
    /// Entries that the file's table lacks.
    changed: BTreeSet<u64>,
    /// The file's table is still another one: its first cluster and its clusters.
    moved_from: Option<(u64, u64)>,
}

/// What a commit has to write of the table, as it was when the commit took it.
#[derive(Debug)]
pub(super) enum Change {
    /// Some entries of the table in place: index, host offset of the entry, and word.
    Entries(Vec<(u64, u64, u64)>),
    /// A whole new table, then the header's pointer; the old one's clusters are free afterwards.
    Moved { host_offset: u64, clusters: u64, bytes: Vec<u8>, old_first: u64, old_clusters: u64 },
}

impl Refcounts {
    pub(crate) fn new(
        geometry: Geometry,
        blocks: Vec<u64>,
        host_offset: u64,
        clusters: u64,
        cache_bytes: u64,
    ) -> Refcounts {
        let slice_bytes = SLICE_BYTES.min(geometry.cluster_size());
        let slices_per_block = geometry.cluster_size() / slice_bytes;
        // A host offset has 56 bits, and a table 8 MiB.
        let block_count_max = ((1 << 56) / geometry.refcount_block_covers()).clamp(1, 1 << 20);
        let keys = block_count_max * slices_per_block;
        let table = Table {
            blocks,
            host_offset,
            clusters,
            placed: BTreeSet::new(),
            changed: BTreeSet::new(),
            moved_from: None,
        };
        Refcounts {
            geometry,
            slice_bytes,
            cache: Arc::new(SliceCache::new(slice_bytes, keys, cache_bytes)),
            table: Mutex::new(table),
            loading: AsyncMutex::new(()),
        }
    }

    /// Refcounts in a slice.
    pub(crate) fn per_slice(&self) -> u64 {
        (self.slice_bytes * 8) >> self.geometry.refcount_order
    }

    fn block_index(&self, cluster: u64) -> u64 {
        cluster / self.geometry.refcounts_per_block()
    }

    /// Whether a block exists that counts `cluster`.
    pub(crate) fn has_block(&self, cluster: u64) -> bool {
        let index = self.block_index(cluster);
        lock(&self.table).blocks.get(index as usize).is_some_and(|&block| block != 0)
    }

    /// Where the slice with this key lies in the file.
    pub(super) fn slice_home(&self, key: u64) -> Option<u64> {
        let slices = self.geometry.cluster_size() / self.slice_bytes;
        let block = *lock(&self.table).blocks.get((key / slices) as usize)?;
        (block != 0).then_some(block + key % slices * self.slice_bytes)
    }

    /// Looks at the table.
    pub(super) fn with_table<T>(&self, look: impl FnOnce(&Table) -> T) -> T {
        look(&lock(&self.table))
    }

    fn place(&self, cluster: u64) -> (usize, u32) {
        let index = cluster % self.per_slice();
        refcount::locate(index, self.geometry.refcount_order)
    }

    /// The refcount of `cluster`, which this slice counts.
    pub(crate) fn count_in(&self, slice: &Pin<'_, ()>, cluster: u64) -> u64 {
        let (word, within) = self.place(cluster);
        refcount::get(slice.word(word), within, self.geometry.refcount_order)
    }

    /// Sets the refcounts of reserved clusters to 1, together with the mapping that uses them.
    pub(crate) fn publish(&self, reserved: &Reservation) {
        let order = self.geometry.refcount_order;
        debug_assert_eq!(reserved.refcounts.key(), reserved.first / self.per_slice());
        let slice = reserved.refcounts.pin();
        let mut slice = slice.edit();
        for cluster in reserved.first..reserved.first + reserved.count {
            let (index, within) = self.place(cluster);
            let word = slice.word(index);
            debug_assert_eq!(refcount::get(word, within, order), 0);
            slice.store(index, refcount::set(word, within, order, 1));
        }
    }

    /// Takes 1 away from the refcount of `cluster`; returns what is left, `None` if it was 0 already.
    pub(crate) fn drop_one(&self, slice: &Pin<'_, ()>, cluster: u64) -> Option<u64> {
        let order = self.geometry.refcount_order;
        let (index, within) = self.place(cluster);
        let mut slice = slice.edit();
        let word = slice.word(index);
        let left = refcount::get(word, within, order).checked_sub(1)?;
        slice.store(index, refcount::set(word, within, order, left));
        Some(left)
    }

    /// How many blocks the table has room for.
    pub(super) fn table_entries(&self) -> u64 {
        lock(&self.table).blocks.len() as u64
    }

    /// Gives new blocks their places (index in the table, host offset), in memory alone.
    pub(super) fn place_blocks(&self, blocks: &[(u64, u64)]) {
        let mut table = lock(&self.table);
        for &(index, host_offset) in blocks {
            let length = table.blocks.len().max(index as usize + 1);
            table.blocks.resize(length, 0);
            table.blocks[index as usize] = host_offset;
            table.placed.insert(index);
        }
    }

    /// Lets the next commit write the entries of new blocks, in a new table of `clusters` at
    /// `host_offset` unless that is 0. After two new tables before a commit the file's own is still
    /// the oldest; the one between is returned, as first cluster and count.
    pub(super) fn link_blocks(
        &self,
        blocks: &[(u64, u64)],
        host_offset: u64,
        clusters: u64,
    ) -> Option<(u64, u64)> {
        let mut table = lock(&self.table);
        table.placed.clear();
        table.changed.extend(blocks.iter().map(|&(index, _)| index));
        if clusters == 0 {
            return None;
        }
        let present = (table.host_offset >> self.geometry.cluster_bits, table.clusters);
        table.blocks.resize((clusters * self.geometry.cluster_size() / 8) as usize, 0);
        (table.host_offset, table.clusters) = (host_offset, clusters);
        if table.moved_from.is_some() {
            return Some(present);
        }
        table.moved_from = Some(present);
        None
    }

    /// Whether nothing awaits a commit.
    pub(crate) fn is_clean(&self) -> bool {
        let table = lock(&self.table);
        self.cache.is_clean() && table.changed.is_empty() && table.moved_from.is_none()
    }

    /// Takes what a commit has to write of the table.
    pub(super) fn take_change(&self) -> Option<Change> {
        let mut table = lock(&self.table);
        let changed = std::mem::take(&mut table.changed);
        if let Some((old_first, old_clusters)) = table.moved_from.take() {
            let linked = |(index, &block)| if table.placed.contains(&index) { 0 } else { block };
            let words: Vec<u64> = (0..).zip(&table.blocks).map(linked).collect();
            let mut bytes = bytes_of(&words);
            bytes.resize((table.clusters << self.geometry.cluster_bits) as usize, 0);
            let (host_offset, clusters) = (table.host_offset, table.clusters);
            return Some(Change::Moved { host_offset, clusters, bytes, old_first, old_clusters });
        }
        let entry = |index| (index, table.host_offset + index * 8, table.blocks[index as usize]);
        let entries: Vec<_> = changed.into_iter().map(entry).collect();
        (!entries.is_empty()).then_some(Change::Entries(entries))
    }

    /// Puts back what a commit had no space to write. If the table has moved again meanwhile, the one
    /// between is in no file: it is returned, as first cluster and count.
    pub(super) fn put_back(&self, change: Change) -> Option<(u64, u64)> {
        let mut table = lock(&self.table);
        match change {
            Change::Entries(entries) => {
                table.changed.extend(entries.into_iter().map(|(index, ..)| index));
                None
            }
            Change::Moved { old_first, old_clusters, .. } => {
                table.moved_from.replace((old_first, old_clusters))
            }
        }
    }
}

impl Qcow2 {
    /// The refcount slice that counts `cluster`, pinned; loaded if need be.
    pub(crate) async fn refcount_slice(&self, queue: &Queue, cluster: u64) -> Result<OwnedPin<()>> {
        let refcounts = &self.writer().refcounts;
        let key = cluster / refcounts.per_slice();
        loop {
            if let Some(pin) = refcounts.cache.pin_owned(key) {
                return Ok(pin);
            }
            let loading = refcounts.loading.lock().await;
            if let Some(pin) = refcounts.cache.pin_owned(key) {
                return Ok(pin);
            }
            let Some(home) = refcounts.slice_home(key) else {
                let offset = cluster << self.geometry().cluster_bits;
                return Err(self.corrupt("find a refcount", offset, "no refcount block covers it"));
            };
            if home >= self.file.end() {
                return Err(self.corrupt(
                    "read a refcount block",
                    home,
                    "it lies beyond the file's end",
                ));
            }
            let bytes = Segments::alloc(refcounts.slice_bytes as usize);
            self.file.read(queue, home, bytes.clone()).await?;
            let bytes = bytes.to_vec();
            if refcounts.cache.insert(key, |index| word_at(&bytes, index)).is_none() {
                drop(loading);
                self.relieve(queue, refcounts.cache.is_clean()).await?;
            }
        }
    }

    /// The refcount slice that counts `cluster`, in a block that does not exist yet: all zero.
    pub(super) async fn new_refcount_slice(
        &self,
        queue: &Queue,
        cluster: u64,
    ) -> Result<OwnedPin<()>> {
        let refcounts = &self.writer().refcounts;
        let key = cluster / refcounts.per_slice();
        loop {
            if let Some(pin) = refcounts.cache.pin_owned(key) {
                return Ok(pin);
            }
            let loading = refcounts.loading.lock().await;
            if refcounts.cache.pin(key).is_none() && refcounts.cache.insert(key, |_| 0).is_none() {
                drop(loading);
                self.relieve(queue, refcounts.cache.is_clean()).await?;
            }
        }
    }
}
