//! Whether a qcow2 image hangs together.
//!
//! It stands on the format's codecs alone, so that the engine's own check is not judged by itself.
//! What [`inspect`] demands of an image at any moment, after any cut (`journal=off`):
//!
//! - the header decodes, and whatever an entry points to lies in the file;
//! - no refcount is below its references, and so no two things share a cluster;
//! - "copied" stands exactly where the refcount is 1.
//!
//! Leaks are counted; whether they are allowed, the caller knows.

use std::collections::BTreeMap;

use stillpoint_format::qcow2::snapshot::{FIXED_LENGTH, Snapshot};
use stillpoint_format::qcow2::{
    ExtendedEntry, Geometry, Header, L1Entry, L2Entry, Target, refcount,
};

use crate::files::World;

/// What an image's refcounts and its references came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// Clusters whose refcount is above their references.
    pub leaks: u64,
    /// Clusters that something refers to.
    pub used: u64,
}

/// Looks through the image called `name`; see the module's head.
///
/// # Errors
/// Says what is wrong.
pub fn inspect(world: &World, name: &str) -> Result<Inspection, String> {
    let bits = u64::from(world.read(name, 23, 1)[0]).clamp(9, 21);
    let cluster = world.read(name, 0, world.length(name).clamp(1 << 9, 1 << bits));
    let header = Header::decode(&cluster, Some(world.length(name)))
        .map_err(|error| format!("the header: {error}"))?;
    let mut inspector = Inspector {
        world,
        name,
        length: world.length(name),
        geometry: header.geometry(),
        header,
        references: BTreeMap::new(),
        flags: Vec::new(),
    };
    inspector.walk()?;
    inspector.compare()
}

struct Inspector<'a> {
    world: &'a World,
    name: &'a str,
    length: u64,
    geometry: Geometry,
    header: Header,
    /// By cluster: how often it is referred to, and by what for one.
    references: BTreeMap<u64, (u64, String)>,
    /// Clusters of the active tables' entries, with their "copied" flags.
    flags: Vec<(u64, bool, String)>,
}

impl Inspector<'_> {
    fn words(&self, offset: u64, count: u64) -> Vec<u64> {
        let bytes = self.world.read(self.name, offset, count * 8);
        let (words, _) = bytes.as_chunks::<8>();
        words.iter().map(|&word| u64::from_be_bytes(word)).collect()
    }

    fn refer(&mut self, offset: u64, length: u64, by: impl Fn() -> String) -> Result<(), String> {
        if offset >= self.length {
            return Err(format!("{} lies at {offset:#x}, beyond the end of the file", by()));
        }
        let bits = self.geometry.cluster_bits;
        for cluster in offset >> bits..=(offset + length - 1) >> bits {
            self.references.entry(cluster).or_insert_with(|| (0, by())).0 += 1;
        }
        Ok(())
    }

    fn walk(&mut self) -> Result<(), String> {
        let cluster = self.geometry.cluster_size();
        let header = self.header.clone();
        self.refer(0, cluster, || "the header".to_owned())?;
        let table = header.refcount_table_offset.0;
        let table_length = u64::from(header.refcount_table_clusters) * cluster;
        self.refer(table, table_length, || "the refcount table".to_owned())?;
        for (_, block) in self.refcount_blocks()? {
            self.refer(block, cluster, || "a refcount block".to_owned())?;
        }
        self.walk_l1(header.l1_table_offset.0, header.l1_entry_count.into(), true)?;
        let mut position = header.snapshot_table_offset.0;
        for _ in 0..header.snapshot_count {
            let fixed = self.world.read(self.name, position, FIXED_LENGTH as u64);
            let length = Snapshot::length(&fixed).map_err(|error| error.to_string())? as u64;
            let bytes = self.world.read(self.name, position, length);
            let snapshot =
                Snapshot::decode(&bytes, self.geometry).map_err(|error| error.to_string())?;
            self.walk_l1(snapshot.l1_table_offset.0, snapshot.l1_entry_count.into(), false)?;
            position += length;
        }
        let table = header.snapshot_table_offset.0;
        if position > table {
            self.refer(table, position - table, || "the snapshot table".to_owned())?;
        }
        Ok(())
    }

    /// Each block's index and where it begins.
    fn refcount_blocks(&self) -> Result<Vec<(u64, u64)>, String> {
        let header = &self.header;
        let count = u64::from(header.refcount_table_clusters) * self.geometry.cluster_size() / 8;
        let mut blocks = Vec::new();
        for (index, word) in self.words(header.refcount_table_offset.0, count).iter().enumerate() {
            let block = refcount::decode_table_entry(*word, self.geometry)
                .map_err(|error| format!("entry {index}: {error}"))?;
            blocks.extend(block.map(|block| (index as u64, block.0)));
        }
        Ok(blocks)
    }

    fn walk_l1(&mut self, offset: u64, count: u64, active: bool) -> Result<(), String> {
        self.refer(offset, count * 8, || "an L1 table".to_owned())?;
        let whole = if active { "the disk's" } else { "a snapshot's" };
        for (l1_index, word) in self.words(offset, count).into_iter().enumerate() {
            let by = || format!("{whole} L2 table {l1_index}");
            let entry = L1Entry::decode(word, self.geometry)
                .map_err(|error| format!("{}: {error}", by()))?;
            let Some(table) = entry.table else { continue };
            self.refer(table.0, self.geometry.cluster_size(), by)?;
            if active {
                self.flags.push((table.0 >> self.geometry.cluster_bits, entry.copied, by()));
            }
            self.walk_l2(table.0, l1_index as u64, active)?;
        }
        Ok(())
    }

    fn walk_l2(&mut self, offset: u64, l1_index: u64, active: bool) -> Result<(), String> {
        let geometry = self.geometry;
        let words_per_entry = (geometry.l2_entry_size() / 8) as usize;
        let words = self.words(offset, geometry.cluster_size() / 8);
        for (index, entry) in words.chunks(words_per_entry).enumerate() {
            let guest =
                l1_index * geometry.l2_table_covers() + index as u64 * geometry.cluster_size();
            let by = || format!("guest cluster {guest:#x}");
            let (host, compressed, copied) = match *entry {
                [word] => {
                    let entry = L2Entry::decode(word, geometry, self.header.version == 3)
                        .map_err(|error| format!("{}: {error}", by()))?;
                    match entry.target {
                        Target::Unallocated => (None, None, entry.copied),
                        Target::Zero { host } => (host, None, entry.copied),
                        Target::Standard { host } => (Some(host), None, entry.copied),
                        Target::Compressed(cluster) => (None, Some(cluster), entry.copied),
                    }
                }
                [word, bitmap] => {
                    let entry = ExtendedEntry::decode(word, bitmap, geometry)
                        .map_err(|error| format!("{}: {error}", by()))?;
                    (entry.host, entry.compressed, entry.copied)
                }
                _ => unreachable!("a table is whole entries"),
            };
            if let Some(host) = host {
                self.refer(host.0, geometry.cluster_size(), by)?;
                if active {
                    self.flags.push((host.0 >> geometry.cluster_bits, copied, by()));
                }
            } else if copied {
                return Err(format!("{} is marked copied, but has no cluster", by()));
            }
            if let Some(compressed) = compressed {
                let range = compressed.byte_range();
                self.refer(range.start, range.end - range.start, by)?;
            }
        }
        Ok(())
    }

    fn compare(&self) -> Result<Inspection, String> {
        let mut inspection = Inspection { leaks: 0, used: self.references.len() as u64 };
        let per_block = self.geometry.refcounts_per_block();
        let mut refcounts = BTreeMap::new();
        for (index, block) in self.refcount_blocks()? {
            let bytes = self.world.read(self.name, block, self.geometry.cluster_size());
            for element in 0..per_block {
                let count = refcount::value_in_block(&bytes, element, self.geometry.refcount_order);
                if count > 0 {
                    refcounts.insert(index * per_block + element, count);
                }
            }
        }
        let refcount_of = |cluster: &u64| refcounts.get(cluster).copied().unwrap_or(0);
        for (cluster, (count, by)) in &self.references {
            let refcount = refcount_of(cluster);
            if refcount < *count {
                return Err(format!(
                    "host cluster {cluster:#x} has refcount {refcount}, but {count} references, \
                     one by {by}"
                ));
            }
        }
        for (cluster, copied, by) in &self.flags {
            let refcount = refcount_of(cluster);
            if *copied != (refcount == 1) {
                return Err(format!("{by}: copied is {copied}, but the refcount is {refcount}"));
            }
        }
        for (cluster, count) in &refcounts {
            let references = self.references.get(cluster).map_or(0, |(count, _)| *count);
            inspection.leaks += u64::from(*count > references);
        }
        Ok(inspection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::make::{Spec, make};
    use crate::oracle::PREFILLED;
    use crate::plan::Plan;

    fn spec() -> Spec {
        Spec {
            version: 3,
            cluster_bits: 12,
            extended_l2: false,
            refcount_order: 4,
            size: 1 << 20,
            backing: None,
            lean: false,
            content: None,
        }
    }

    fn world(change: impl FnOnce(&mut [u8])) -> World {
        let mut image = make(&spec(), PREFILLED).bytes;
        image.resize(20 << 12, 0);
        change(&mut image);
        let world = World::new(Plan::default());
        world.add("disk", &image);
        world
    }

    fn put(image: &mut [u8], offset: usize, word: u64) {
        image[offset..offset + 8].copy_from_slice(&word.to_be_bytes());
    }

    fn refcount(image: &mut [u8], cluster: u64, count: u64) {
        refcount::set_in_block(&mut image[2 << 12..3 << 12], cluster, 4, count);
    }

    #[test]
    fn fresh_images_hang_together() {
        for (cluster_bits, extended_l2) in [(9, false), (16, false), (16, true), (21, true)] {
            let spec = Spec { cluster_bits, extended_l2, size: 1 << 20, ..spec() };
            let world = World::new(Plan::default());
            world.add("disk", &make(&spec, PREFILLED).bytes);
            assert_eq!(inspect(&world, "disk").unwrap().leaks, 0);
        }
    }

    #[test]
    fn a_leak_is_counted_and_a_missing_refcount_refused() {
        let leaky = world(|image| refcount(image, 9, 1));
        assert_eq!(inspect(&leaky, "disk").unwrap().leaks, 1);
        let missing = world(|image| refcount(image, 3, 0));
        assert!(inspect(&missing, "disk").unwrap_err().contains("has refcount 0"));
    }

    #[test]
    fn two_users_of_a_cluster_are_refused() {
        let shared = world(|image| {
            refcount(image, 4, 1);
            refcount(image, 5, 1);
            put(image, 3 << 12, 4 << 12 | 1 << 63);
            put(image, 4 << 12, 5 << 12 | 1 << 63);
            put(image, (4 << 12) + 8, 5 << 12 | 1 << 63);
        });
        assert!(inspect(&shared, "disk").unwrap_err().contains("2 references"));
    }

    #[test]
    fn a_wrong_copied_flag_and_a_cluster_beyond_the_end_are_refused() {
        let flag = world(|image| {
            refcount(image, 4, 1);
            put(image, 3 << 12, 4 << 12);
        });
        assert!(inspect(&flag, "disk").unwrap_err().contains("copied is false"));
        let beyond = world(|image| {
            refcount(image, 4, 1);
            put(image, 3 << 12, 4 << 12 | 1 << 63);
            put(image, 4 << 12, 500 << 12 | 1 << 63);
        });
        assert!(inspect(&beyond, "disk").unwrap_err().contains("beyond the end"));
    }
}
