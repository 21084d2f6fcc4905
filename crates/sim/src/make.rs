//! qcow2 images made without the engine, from the format's codecs alone: empty, or holding clusters
//! of every kind that other tools write, so that the engine meets what it would not make itself.
//!
//! ```text
//!  header | refcount table | refcount blocks | L1 | (snapshot table, its L1) | L2 tables and data,
//!  mixed | compressed clusters, packed; the file ends where the last of them ends | or, if it is lean,
//!  the refcount blocks after everything else
//! ```
//!
//! Compressed clusters are stored blocks of deflate: the oracle's bytes do not compress.

use std::ops::Range;

use stillpoint_format::HostOffset;
use stillpoint_format::qcow2::header::{CompressionType, CryptMethod, INCOMPATIBLE_EXTENDED_L2};
use stillpoint_format::qcow2::snapshot::Snapshot;
use stillpoint_format::qcow2::{
    CompressedCluster, ExtendedEntry, Extension, Geometry, Header, L1Entry, L2Entry, SubclusterMap,
    Target, refcount,
};

use crate::chance::Chance;
use crate::oracle::{Value, ZEROS, bytes_of};

/// What kind of image it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// 2 or 3.
    pub version: u32,
    /// The cluster size's binary logarithm.
    pub cluster_bits: u32,
    /// Extended L2 entries.
    pub extended_l2: bool,
    /// The binary logarithm of a refcount's width in bits.
    pub refcount_order: u32,
    /// The disk's size in bytes.
    pub size: u64,
    /// The backing file's name and format.
    pub backing: Option<(String, &'static str)>,
    /// It has the refcount blocks that it needs, and none for what is written later.
    pub lean: bool,
    /// What it holds from the start; `None`: nothing.
    pub content: Option<Content>,
}

/// What an image holds from the start: clusters of every kind, chosen by a seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Decides the kinds.
    pub seed: u64,
    /// An internal snapshot shares all of it.
    pub snapshot: bool,
}

impl Spec {
    /// The sizes that follow from it.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_bits,
            extended_l2: self.extended_l2,
            refcount_order: self.refcount_order,
        }
    }
}

/// A made image.
#[derive(Debug)]
pub struct Made {
    /// The file's bytes.
    pub bytes: Vec<u8>,
    /// What guest ranges hold that hold anything.
    pub filled: Vec<(Range<u64>, Value)>,
    /// Host ranges that a snapshot owns too: they never change.
    pub frozen: Vec<Range<u64>>,
}

/// Makes an image; what it holds are the bytes of `value`.
pub fn make(spec: &Spec, value: Value) -> Made {
    Maker::new(spec, value).make()
}

struct Maker<'a> {
    spec: &'a Spec,
    geometry: Geometry,
    value: Value,
    cluster: u64,
    made: Made,
    /// By host cluster.
    refcounts: Vec<u64>,
    refcount_blocks: u64,
    refcount_table_clusters: u64,
    /// Most clusters are compressed, and no other kind of old content is freed under a reader.
    mostly_compressed: bool,
    /// Compressed clusters: the offset of the L2 entry's word, and the bytes.
    compressed: Vec<(u64, Vec<u8>)>,
}

impl<'a> Maker<'a> {
    fn new(spec: &'a Spec, value: Value) -> Maker<'a> {
        let geometry = spec.geometry();
        let l1_entries = geometry.l1_entries_for(spec.size).max(1);
        // More than all that may come: for each guest cluster a data cluster and two for its
        // compressed bytes, L2 tables, two L1 tables, a refcount table, and some.
        let guest_clusters = geometry.clusters_for(spec.size);
        let clusters = 3 * guest_clusters + guest_clusters / 8 + 2 * l1_entries + 16;
        let refcount_blocks = clusters.div_ceil(geometry.refcounts_per_block() - 1);
        Maker {
            spec,
            geometry,
            value,
            cluster: geometry.cluster_size(),
            made: Made { bytes: Vec::new(), filled: Vec::new(), frozen: Vec::new() },
            refcounts: Vec::new(),
            refcount_blocks,
            refcount_table_clusters: geometry.clusters_for(refcount_blocks * 8),
            mostly_compressed: false,
            compressed: Vec::new(),
        }
    }

    /// Fresh clusters at the end, for so many bytes: where they begin.
    fn allocate(&mut self, length: u64) -> u64 {
        let offset = self.made.bytes.len() as u64;
        let count = self.geometry.clusters_for(length);
        self.made.bytes.resize((offset + count * self.cluster) as usize, 0);
        self.refcounts.resize(self.refcounts.len() + count as usize, 1);
        offset
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) {
        self.made.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn put_word(&mut self, offset: u64, word: u64) {
        self.put(offset, &word.to_be_bytes());
    }

    fn has_snapshot(&self) -> bool {
        self.spec.content.as_ref().is_some_and(|content| content.snapshot)
            && self.geometry.refcount_max() > 200
    }

    fn make(mut self) -> Made {
        let (geometry, cluster) = (self.geometry, self.cluster);
        let l1_entries = geometry.l1_entries_for(self.spec.size).max(1);
        self.allocate(cluster);
        let table = self.allocate(self.refcount_table_clusters * cluster);
        let blocks = (!self.spec.lean).then(|| self.allocate(self.refcount_blocks * cluster));
        let l1 = self.allocate(l1_entries * 8);
        if let Some(content) = self.spec.content.clone() {
            self.fill(&mut Chance::new(content.seed), l1, l1_entries);
        }
        let mut snapshot_table = 0;
        if self.has_snapshot() {
            snapshot_table = self.take_snapshot(l1, l1_entries);
        }
        self.pack_compressed();
        let blocks = blocks.unwrap_or_else(|| self.place_blocks());
        for index in 0..self.refcount_blocks {
            let block = HostOffset(blocks + index * cluster);
            self.put_word(table + index * 8, refcount::encode_table_entry(Some(block)));
        }
        let per_block = geometry.refcounts_per_block();
        for (index, &count) in self.refcounts.iter().enumerate() {
            let (block, element) = (index as u64 / per_block, index as u64 % per_block);
            let start = (blocks + block * cluster) as usize;
            let bytes = &mut self.made.bytes[start..start + cluster as usize];
            refcount::set_in_block(bytes, element, geometry.refcount_order, count);
        }
        let header = self.header(table, l1, l1_entries, snapshot_table);
        self.put(0, &header);
        self.made
    }

    /// Places just as many refcount blocks as it takes to count everything, themselves included.
    fn place_blocks(&mut self) -> u64 {
        let per_block = self.geometry.refcounts_per_block();
        let file_clusters = self.geometry.clusters_for(self.made.bytes.len() as u64);
        // What is counted beyond the end of the file lies where they would begin.
        let start = file_clusters.max(self.refcounts.len() as u64);
        let mut count = 1;
        while (start + count).div_ceil(per_block) > count {
            count += 1;
        }
        self.made.bytes.resize(((start + count) * self.cluster) as usize, 0);
        self.refcounts.resize(start as usize, 0);
        self.refcounts.resize((start + count) as usize, 1);
        self.refcount_blocks = count;
        start * self.cluster
    }

    fn header(&self, table: u64, l1: u64, l1_entries: u64, snapshot_table: u64) -> Vec<u8> {
        let spec = self.spec;
        let backing = spec.backing.as_ref();
        let format = backing.map(|(_, format)| Extension::BackingFormat((*format).to_owned()));
        let header = Header {
            version: spec.version,
            backing_name: backing.map(|(name, _)| name.clone()),
            cluster_bits: spec.cluster_bits,
            size: spec.size,
            crypt_method: CryptMethod::None,
            l1_entry_count: l1_entries as u32,
            l1_table_offset: HostOffset(l1),
            refcount_table_offset: HostOffset(table),
            refcount_table_clusters: self.refcount_table_clusters as u32,
            snapshot_count: u32::from(snapshot_table > 0),
            snapshot_table_offset: HostOffset(snapshot_table),
            incompatible: if spec.extended_l2 { INCOMPATIBLE_EXTENDED_L2 } else { 0 },
            compatible: 0,
            autoclear: 0,
            refcount_order: spec.refcount_order,
            compression_type: CompressionType::Zlib,
            unknown_fields: Vec::new(),
            extensions: format.into_iter().collect(),
        };
        header.encode().expect("the header fits")
    }

    /// Gives guest clusters their kinds.
    fn fill(&mut self, chance: &mut Chance, l1: u64, l1_entries: u64) {
        let geometry = self.geometry;
        self.mostly_compressed = chance.one_in(4);
        for l1_index in 0..l1_entries {
            if chance.one_in(4) {
                continue;
            }
            let table = self.allocate(self.cluster);
            let entry = L1Entry { table: Some(HostOffset(table)), copied: true };
            self.put_word(l1 + l1_index * 8, entry.encode());
            for l2_index in 0..geometry.l2_entries() {
                let guest = l1_index * geometry.l2_table_covers() + l2_index * self.cluster;
                if guest < self.spec.size {
                    self.fill_cluster(chance, guest, table + l2_index * geometry.l2_entry_size());
                }
            }
        }
    }

    fn fill_cluster(&mut self, chance: &mut Chance, guest: u64, entry: u64) {
        match chance.below(8) {
            0..7 if self.mostly_compressed => self.compress(guest, entry),
            0..3 => {}
            3 => self.compress(guest, entry),
            _ if self.spec.extended_l2 => self.fill_subclusters(chance, guest, entry),
            4 if self.spec.version == 3 => {
                let host = chance.one_in(2).then(|| HostOffset(self.allocate(self.cluster)));
                if let Some(host) = host {
                    // What a zero cluster keeps ready holds anything but zeros.
                    let old = vec![0xEE; self.cluster as usize];
                    self.put(host.0, &old);
                }
                let zero = L2Entry { target: Target::Zero { host }, copied: host.is_some() };
                self.put_word(entry, zero.encode(self.geometry));
                self.hold(guest..guest + self.cluster, ZEROS);
            }
            _ => {
                let host = self.allocate(self.cluster);
                let target = Target::Standard { host: HostOffset(host) };
                self.put_word(entry, L2Entry { target, copied: true }.encode(self.geometry));
                self.write(host, guest..guest + self.cluster);
            }
        }
    }

    fn fill_subclusters(&mut self, chance: &mut Chance, guest: u64, entry: u64) {
        let host = self.allocate(self.cluster);
        let old = vec![0xEE; self.cluster as usize];
        self.put(host, &old);
        let length = self.geometry.subcluster_size();
        let (mut allocated, mut zero) = (0, 0);
        let mut kind = 0;
        for index in 0..self.geometry.subclusters_per_cluster() {
            if chance.one_in(3) {
                kind = chance.below(3);
            }
            let offset = u64::from(index) * length;
            let range = guest + offset..guest + offset + length;
            match kind {
                0 => {}
                1 => {
                    zero |= 1 << index;
                    self.hold(range, ZEROS);
                }
                _ => {
                    allocated |= 1 << index;
                    self.write(host + offset, range);
                }
            }
        }
        let map = SubclusterMap::new(allocated, zero);
        let (host, copied) = (Some(HostOffset(host)), true);
        let words = ExtendedEntry { host, copied, compressed: None, map }.encode(self.geometry);
        self.put_word(entry, words.0);
        self.put_word(entry + 8, words.1);
    }

    fn hold(&mut self, range: Range<u64>, value: Value) {
        if range.start < self.spec.size {
            self.made.filled.push((range.start..range.end.min(self.spec.size), value));
        }
    }

    fn write(&mut self, host: u64, guest: Range<u64>) {
        let mut bytes = vec![0; (guest.end - guest.start) as usize];
        bytes_of(self.value, guest.start, &mut bytes);
        self.put(host, &bytes);
        self.hold(guest, self.value);
    }

    fn compress(&mut self, guest: u64, entry: u64) {
        let mut bytes = vec![0; self.cluster as usize];
        bytes_of(self.value, guest, &mut bytes);
        self.compressed.push((entry, stored_deflate(&bytes)));
        self.hold(guest..guest + self.cluster, self.value);
    }

    /// Puts compressed bytes one behind the other at the end; each counts in every cluster it touches.
    /// The last descriptor says more sectors than its bytes have, beyond the end of the file.
    fn pack_compressed(&mut self) {
        let times = 1 + u64::from(self.has_snapshot());
        let mut end = self.made.bytes.len() as u64;
        let compressed = std::mem::take(&mut self.compressed);
        let last = compressed.len().saturating_sub(1);
        for (index, (entry, bytes)) in compressed.into_iter().enumerate() {
            let length = bytes.len() as u64;
            let reaches_on = index == last && !self.spec.lean && self.geometry.refcount_max() > 200;
            if reaches_on {
                end = end.next_multiple_of(512) + self.cluster / 1024 * 512;
            }
            let mut place = CompressedCluster::for_bytes(HostOffset(end), length, self.geometry);
            let shares = !end.is_multiple_of(self.cluster);
            if place.is_none() || (shares && self.geometry.refcount_max() < 200) {
                end = end.next_multiple_of(self.cluster);
                place = CompressedCluster::for_bytes(HostOffset(end), length, self.geometry);
            }
            let mut place = place.expect("stored bytes of a cluster fit");
            if reaches_on {
                // The most that a descriptor can say.
                let longest = 2 * self.cluster - end % 512;
                place = CompressedCluster::for_bytes(place.host, longest, self.geometry)
                    .expect("just as many sectors");
            }
            for cluster in place.host_clusters(self.geometry) {
                if cluster as usize >= self.refcounts.len() {
                    self.refcounts.resize(cluster as usize + 1, 0);
                }
                self.refcounts[cluster as usize] += times;
            }
            self.made.bytes.resize((end + length) as usize, 0);
            self.put(end, &bytes);
            let target = Target::Compressed(place);
            self.put_word(entry, L2Entry { target, copied: false }.encode(self.geometry));
            end += length;
        }
        let offset = self.made.bytes.len() as u64;
        debug_assert!(self.refcounts.len() as u64 >= offset / self.cluster);
    }

    /// A snapshot of the tables as they are: everything is shared, and nothing marked copied.
    fn take_snapshot(&mut self, l1: u64, l1_entries: u64) -> u64 {
        for index in 0..l1_entries {
            let entry = self.word(l1 + index * 8) & !(1 << 63);
            self.put_word(l1 + index * 8, entry);
            if entry == 0 {
                continue;
            }
            self.share(entry);
            for offset in (0..self.cluster).step_by(self.geometry.l2_entry_size() as usize) {
                let word = self.word(entry + offset) & !(1 << 63);
                self.put_word(entry + offset, word);
                if word & !1 != 0 {
                    self.share(word & !1);
                }
            }
        }
        let own_l1 = self.allocate(l1_entries * 8);
        for index in 0..l1_entries {
            let entry = self.word(l1 + index * 8);
            self.put_word(own_l1 + index * 8, entry);
        }
        self.made.frozen.push(own_l1..own_l1 + l1_entries * 8);
        let snapshot = Snapshot {
            l1_table_offset: HostOffset(own_l1),
            l1_entry_count: l1_entries as u32,
            id: b"1".to_vec(),
            name: b"before".to_vec(),
            disk_size: Some(self.spec.size),
            ..Snapshot::default()
        };
        let bytes = snapshot.encode();
        let table = self.allocate(bytes.len() as u64);
        self.put(table, &bytes);
        self.made.frozen.push(table..table + bytes.len() as u64);
        table
    }

    fn word(&self, offset: u64) -> u64 {
        let bytes = &self.made.bytes[offset as usize..offset as usize + 8];
        u64::from_be_bytes(bytes.try_into().expect("eight bytes"))
    }

    fn share(&mut self, offset: u64) {
        self.refcounts[(offset / self.cluster) as usize] += 1;
        self.made.frozen.push(offset..offset + self.cluster);
    }
}

/// Deflate without compression: blocks of at most 64 KiB, each its length, its complement, its bytes.
fn stored_deflate(bytes: &[u8]) -> Vec<u8> {
    let mut stored = Vec::new();
    let mut chunks = bytes.chunks(0xffff).peekable();
    while let Some(chunk) = chunks.next() {
        stored.push(u8::from(chunks.peek().is_none()));
        stored.extend((chunk.len() as u16).to_le_bytes());
        stored.extend((!(chunk.len() as u16)).to_le_bytes());
        stored.extend(chunk);
    }
    stored
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::World;
    use crate::image::inspect;
    use crate::oracle::PREFILLED;
    use crate::plan::Plan;

    #[test]
    fn made_images_hang_together() {
        for seed in 0..60 {
            let mut chance = Chance::new(seed);
            let extended_l2 = chance.one_in(2);
            let cluster_bits = chance.between(if extended_l2 { 14 } else { 9 }, 16) as u32;
            let spec = Spec {
                version: if extended_l2 { 3 } else { chance.pick(&[2, 3]) },
                cluster_bits,
                extended_l2,
                refcount_order: 4,
                size: chance.between(1, 20 << cluster_bits).next_multiple_of(512),
                backing: None,
                lean: chance.one_in(2),
                content: Some(Content { seed, snapshot: chance.one_in(2) }),
            };
            let made = make(&spec, PREFILLED);
            let world = World::new(Plan::default());
            world.add("disk", &made.bytes);
            let inspection =
                inspect(&world, "disk").unwrap_or_else(|wrong| panic!("{seed}: {wrong}"));
            assert_eq!(inspection.leaks, 0, "seed {seed}");
        }
    }
}
