//! The L1 table, and how slices of L2 tables come into the cache.
//!
//! The L1 table is in memory as a whole (32 MiB at most), and grows there with the disk. A change of it is
//! remembered together with the word that the disk still holds, so that a commit writes exactly the
//! entries whose tables it has made durable, and no entry that came later.
//!
//! A missing table is *made* before the first mapping in it; one shared with an internal snapshot is
//! *copied*. Both happen under one lock and are rare.

use std::collections::{BTreeMap, BTreeSet};

use std::time::Duration;

use async_lock::Mutex as AsyncMutex;
use stillpoint_format::addr::HostOffset;
use stillpoint_format::qcow2::entry::{COMPRESSED, COPIED, L1Entry, OFFSET_MASK};
use stillpoint_io::{Durability, Kind, Queue, Result, Segments};

use super::inflight::Inflights;
use super::release::Freed;
use super::{Done, Qcow2, refused};
use crate::cache::{Pin, SLICE_BYTES};
use crate::growable::Growable;
use crate::mutant::{Mutant, broken};
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use crate::sync::{Mutex, lock};

/// The L1 table in use.
pub(crate) struct L1 {
    host_offset: AtomicU64,
    words: Growable<AtomicU64>,
    /// Entries changed since the last commit, with the words that the disk holds.
    changed: Mutex<BTreeMap<u64, u64>>,
    /// Entries that a commit may have written, or not, before it ran out of space.
    again: Mutex<BTreeSet<u64>>,
    making: AsyncMutex<()>,
    loading: [AsyncMutex<()>; LOAD_LOCKS],
}

const LOAD_LOCKS: usize = 64;

impl L1 {
    pub(crate) fn new(host_offset: u64, words: impl Iterator<Item = u64>) -> L1 {
        L1 {
            host_offset: AtomicU64::new(host_offset),
            words: words.map(AtomicU64::new).collect(),
            changed: Mutex::default(),
            again: Mutex::default(),
            making: AsyncMutex::new(()),
            loading: [const { AsyncMutex::new(()) }; LOAD_LOCKS],
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.words.len() as u64
    }

    /// Where it lies in the file.
    pub(crate) fn host_offset(&self) -> u64 {
        self.host_offset.load(SeqCst)
    }

    fn entry(&self, index: u64) -> &AtomicU64 {
        self.words.get(index as usize).expect("it has an entry for every offset of the disk")
    }

    pub(crate) fn word(&self, index: u64) -> u64 {
        self.entry(index).load(SeqCst)
    }

    /// The file's own table is now one of `len` entries at `host_offset`, those that are new empty.
    /// No commit is under way.
    pub(super) fn moved(&self, host_offset: u64, len: u64) {
        self.words.grow(len as usize, || AtomicU64::new(0));
        self.host_offset.store(host_offset, SeqCst);
    }

    fn change(&self, index: u64, word: u64) {
        let mut changed = lock(&self.changed);
        let old = self.entry(index).swap(word, SeqCst);
        changed.entry(index).or_insert(old);
    }

    /// Whether nothing awaits a commit.
    pub(crate) fn is_clean(&self) -> bool {
        lock(&self.changed).is_empty() && lock(&self.again).is_empty()
    }

    /// Takes the changed entries, with the words that the disk holds, and those to be written again.
    pub(crate) fn take_changed(&self) -> (BTreeMap<u64, u64>, BTreeSet<u64>) {
        (std::mem::take(&mut *lock(&self.changed)), std::mem::take(&mut *lock(&self.again)))
    }

    /// Puts back what a commit had no space to write.
    pub(crate) fn put_back(&self, taken: BTreeMap<u64, u64>, again: BTreeSet<u64>) {
        lock(&self.changed).extend(taken);
        if !broken(Mutant::L1Again) {
            lock(&self.again).extend(again);
        }
    }

    /// The words from `first` on as the disk is to hold them now: entries changed since the last
    /// [`L1::take_changed`] keep their old words.
    pub(crate) fn words_to_write(&self, first: u64, count: u64) -> Vec<u64> {
        let changed = lock(&self.changed);
        let old = |index| changed.get(&index).copied().filter(|_| !broken(Mutant::J20Links));
        (first..(first + count).min(self.len()))
            .map(|index| old(index).unwrap_or_else(|| self.word(index)))
            .collect()
    }
}

impl Qcow2 {
    /// Bytes of a slice of this image's tables.
    pub(crate) fn slice_bytes(&self) -> u64 {
        SLICE_BYTES.min(self.cluster_size())
    }

    /// Entries in a slice.
    pub(crate) fn entries_per_slice(&self) -> u64 {
        self.slice_bytes() / self.geometry().l2_entry_size()
    }

    /// Guest bytes that a slice maps.
    pub(crate) fn slice_covers(&self) -> u64 {
        self.entries_per_slice() << self.geometry().cluster_bits
    }

    /// The key of the slice that maps a guest offset, and the entry's index in it.
    pub(crate) fn locate(&self, guest_offset: u64) -> (u64, usize) {
        let cluster = guest_offset >> self.geometry().cluster_bits;
        let entries = self.entries_per_slice();
        (cluster / entries, (cluster % entries) as usize)
    }

    fn l1_index(&self, key: u64) -> u64 {
        key / (self.cluster_size() / self.slice_bytes())
    }

    /// Where a slice's table is, and whether it may be changed in place.
    fn table(&self, key: u64) -> Result<L1Entry> {
        let index = self.l1_index(key);
        let entry_offset = self.l1.host_offset() + index * 8;
        L1Entry::decode(self.l1.word(index), self.geometry())
            .map_err(|error| refused(&error, "read an L1 entry", self.file.name(), entry_offset))
    }

    /// Whether a slice's table exists and may be changed in place.
    pub(crate) fn owns_table(&self, key: u64) -> Result<bool> {
        let entry = self.table(key)?;
        Ok(entry.table.is_some() && (entry.copied || broken(Mutant::F1SharedTable)))
    }

    /// Where a slice lies in the file, if its table exists.
    pub(crate) fn slice_home(&self, key: u64) -> Result<Option<u64>> {
        let slices = self.cluster_size() / self.slice_bytes();
        let within = (key % slices) * self.slice_bytes();
        Ok(self.table(key)?.table.map(|HostOffset(table)| table + within))
    }

    /// The slice with this key, loaded if need be; `None` where no table exists.
    pub(crate) async fn slice(
        &self,
        queue: &Queue,
        key: u64,
    ) -> Result<Option<Pin<'_, Inflights>>> {
        loop {
            if let Some(pin) = self.l2.pin(key) {
                return Ok(Some(pin));
            }
            let Some(before) = self.slice_home(key)? else { return Ok(None) };
            if broken(Mutant::LoadLock)
                && !self.owns_table(key)?
                && queue.random().is_multiple_of(4)
            {
                // The lock is fair: whoever waits for it would hardly ever be overtaken so far.
                queue.sleep(Duration::from_millis(200)).await;
            }
            let loading = self.l1.loading[key as usize % LOAD_LOCKS].lock().await;
            if let Some(pin) = self.l2.pin(key) {
                return Ok(Some(pin));
            }
            // Asked under the lock: the table may have been copied, and this slice changed, committed
            // and evicted, while we waited.
            let Some(home) = self.slice_home(key)? else { return Ok(None) };
            let home = if broken(Mutant::LoadLock) { before } else { home };
            if home >= self.file.end() {
                return Err(self.corrupt(
                    "read an L2 table",
                    home,
                    "it lies beyond the file's end",
                ));
            }
            let bytes = Segments::alloc(self.slice_bytes() as usize);
            self.file.read(queue, home, bytes.clone()).await?;
            let words = self.words_of(&bytes.to_vec());
            if let Some(pin) = self.l2.insert(key, |index| words[index]) {
                return Ok(Some(pin));
            }
            drop(loading);
            // J37: wait while holding nothing.
            self.relieve(queue, self.writer.is_none() || self.l2.is_clean()).await?;
        }
    }

    /// A slice's words; for a writer, without the right to write in place where an entry claims one of
    /// the image's own tables for guest data: what a guest writes there goes elsewhere (F2).
    fn words_of(&self, bytes: &[u8]) -> Vec<u64> {
        let mut words: Vec<u64> = (0..bytes.len() / 8).map(|index| word_at(bytes, index)).collect();
        if self.writer.is_none() {
            return words;
        }
        let step = (self.geometry().l2_entry_size() / 8) as usize;
        let claims = |word: u64| {
            let plain = word & (COPIED | COMPRESSED) == COPIED;
            (plain && word & OFFSET_MASK != 0).then_some(word & OFFSET_MASK)
        };
        for index in (0..words.len()).step_by(step) {
            if claims(words[index]).is_some_and(|host_offset| self.is_table(host_offset)) {
                words[index] &= !COPIED;
            }
        }
        words
    }

    /// Whether the header or a table of the disk lies at a host offset. Those of snapshots and bitmaps
    /// are not known here; their refcounts alone protect them.
    pub(crate) fn is_table(&self, host_offset: u64) -> bool {
        let writer = self.writer();
        let cluster = host_offset >> self.geometry().cluster_bits;
        let found = {
            let mut tables = lock(&writer.table_clusters);
            tables.get_or_insert_with(|| self.structures_in(&(0..u64::MAX))).contains(&cluster)
        };
        if found && !writer.claim_told.swap(true, SeqCst) {
            tracing::warn!(
                file = self.file.name(),
                host_offset,
                "an L2 entry claims the image's own tables for guest data; run `stillpoint check`"
            );
        }
        found
    }

    /// Remembers clusters that hold a table from now on.
    pub(super) fn hold_tables(&self, clusters: impl Iterator<Item = u64>) {
        if let Some(tables) = lock(&self.writer().table_clusters).as_mut() {
            tables.extend(clusters);
        }
    }

    /// Whether an L2 table that an L1 entry lets go has another use: refcounts that lie must not give
    /// it away (F2).
    fn has_other_use(&self, table: HostOffset) -> bool {
        let named = (0..self.l1.len())
            .filter_map(|index| L1Entry::decode(self.l1.word(index), self.geometry()).ok())
            .any(|entry| entry.table == Some(table));
        let cluster = table.0 >> self.geometry().cluster_bits;
        named || self.fixed_structures().contains(&cluster)
    }

    /// Every frame of a cache is pinned: commit what is dirty, or let requests end.
    pub(super) async fn relieve(&self, queue: &Queue, nothing_dirty: bool) -> Done {
        if nothing_dirty {
            queue.sleep(Duration::from_micros(50)).await;
            return Ok(());
        }
        match self.commit(queue).await {
            // What has no space stays dirty and pinned; that is its writers' error, not ours.
            Err(error) if error.kind() == Kind::NoSpace => {
                queue.sleep(Duration::from_millis(1)).await;
                Ok(())
            }
            other => other,
        }
    }

    /// The slice with this key, in a table that may be changed in place; made or copied if need be.
    pub(crate) async fn slice_for_writing(
        &self,
        queue: &Queue,
        key: u64,
    ) -> Result<Pin<'_, Inflights>> {
        loop {
            if self.owns_table(key)? {
                if let Some(pin) = self.slice(queue, key).await? {
                    return Ok(pin);
                }
            } else {
                self.own_table(queue, key).await?;
            }
        }
    }

    /// Makes the table of a slice, or copies it if it is shared with a snapshot.
    async fn own_table(&self, queue: &Queue, key: u64) -> Done {
        let writer = self.writer();
        let _making = self.l1.making.lock().await;
        let entry = self.table(key)?;
        if entry.table.is_some() && entry.copied {
            return Ok(());
        }
        let mut reserved = self.reserve(queue, 1).await?;
        let cluster = reserved.take(1);
        let host_offset = cluster.first << self.geometry().cluster_bits;
        // J20: what the table holds must be in the file, and covered by the barrier that precedes
        // the L1 entry: a recycled cluster's old bytes must never come to life as mappings.
        let written = match entry.table {
            Some(HostOffset(old)) => {
                let content = Segments::alloc(self.cluster_size() as usize);
                match self.file.read(queue, old, content.clone()).await {
                    Ok(_) => {
                        self.file.write(queue, host_offset, content, Durability::Volatile).await
                    }
                    failed => failed,
                }
            }
            None if cluster.zero || broken(Mutant::J20Content) => Ok(stillpoint_io::Value::Unit),
            None => {
                let zeros = Segments::zeroed(self.cluster_size() as usize);
                self.file.write(queue, host_offset, zeros, Durability::Volatile).await
            }
        };
        if let Err(error) = written {
            writer.allocator.give_back(cluster, false);
            return Err(error);
        }
        writer.refcounts.publish(&cluster);
        let linked = L1Entry { table: Some(HostOffset(host_offset)), copied: true };
        self.l1.change(self.l1_index(key), linked.encode());
        self.hold_tables(std::iter::once(cluster.first));
        if let Some(old) = entry.table
            && !self.has_other_use(old)
        {
            writer.releases.push(Freed::clusters(old.0 >> self.geometry().cluster_bits, 1));
        }
        Ok(())
    }
}

/// The 64-bit word at `index` of a table's bytes, in native order.
pub(crate) fn word_at(bytes: &[u8], index: usize) -> u64 {
    u64::from_be_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes"))
}

/// A table's bytes of words in native order.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}
