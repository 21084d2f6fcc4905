//! Entries of L1 and L2 tables, as words in native order.
//!
//! ```text
//!  L1:            | 63 copied | 62..56 0 | 55..9 L2 table's offset | 8..0 0 |
//!  L2, standard:  | 63 copied | 62 0 | 61..56 0 | 55..9 cluster's offset | 8..1 0 | 0 reads as zeros |
//!  L2, compressed:| 63 0      | 62 1 | 61..0 descriptor (see `compressed`) |
//!  extended L2:   the same word with bit 0 = 0, then | 63..32 reads as zeros | 31..0 allocated |
//! ```
//!
//! "copied" means that the refcount of what the entry points to is exactly 1, so that it can be
//! written in place. An image with an external data file maps its clusters to the data file, where
//! offset 0 is as good as any: there "copied" tells a cluster at 0 from none.

use super::HOST_END_MAX;
use super::compressed::CompressedCluster;
use super::geometry::Geometry;
use crate::addr::HostOffset;
use crate::error::Result;
use crate::wire::require;

/// The refcount of the target is exactly 1.
pub const COPIED: u64 = 1 << 63;
/// The entry is a compressed cluster's.
pub const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeros (standard entries, version 3).
pub const ZERO: u64 = 1;
/// The bits of a host offset.
pub const OFFSET_MASK: u64 = (HOST_END_MAX - 1) & !0x1ff;

/// What an L2 entry says about its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Nothing: the backing file decides, or zeros.
    Unallocated,
    /// It reads as zeros.
    Zero {
        /// A cluster held ready for it.
        host: Option<HostOffset>,
    },
    /// Its bytes lie here.
    Standard {
        /// Where its cluster begins.
        host: HostOffset,
    },
    /// Its bytes are compressed.
    Compressed(CompressedCluster),
}

/// A standard L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct L2Entry {
    /// What it says about its cluster.
    pub target: Target,
    /// The refcount of the target's host cluster is exactly 1.
    pub copied: bool,
}

/// An L1 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct L1Entry {
    /// Where the L2 table begins, if there is one.
    pub table: Option<HostOffset>,
    /// Its refcount is exactly 1.
    pub copied: bool,
}

/// The state of a cluster's 32 subclusters; subcluster 0 has the lowest bit of each half.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SubclusterMap(pub u64);

/// An extended L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExtendedEntry {
    /// Where the cluster begins, if it has one.
    pub host: Option<HostOffset>,
    /// The refcount of that cluster is exactly 1.
    pub copied: bool,
    /// The compressed data, if it is that; then there is neither `host` nor a map.
    pub compressed: Option<CompressedCluster>,
    /// Which subclusters are allocated or read as zeros.
    pub map: SubclusterMap,
}

/// Which images an L2 entry stands in; decides what a word may mean.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clusters {
    /// In the image itself: never at offset 0, may be compressed.
    Internal,
    /// In an external data file: "copied" tells a cluster at 0 from none, never compressed.
    External,
}

/// The offset of a word's target, checked; `None` if there is none.
fn host_offset(
    word: u64,
    reserved: u64,
    structure: &'static str,
    geometry: Geometry,
    clusters: Clusters,
) -> Result<Option<HostOffset>> {
    require(word & reserved == 0, structure, 0, "reserved bits must be 0", word)?;
    let offset = word & OFFSET_MASK;
    require(
        offset & geometry.cluster_mask() == 0,
        structure,
        0,
        "the offset must be a multiple of the cluster size",
        word,
    )?;
    let present = offset != 0 || (clusters == Clusters::External && word & COPIED != 0);
    Ok(present.then_some(HostOffset(offset)))
}

fn compressed_cluster(
    word: u64,
    structure: &'static str,
    geometry: Geometry,
    clusters: Clusters,
) -> Result<CompressedCluster> {
    require(
        clusters == Clusters::Internal,
        structure,
        0,
        "a data file holds no compressed clusters",
        word,
    )?;
    CompressedCluster::decode(word & (COMPRESSED - 1), geometry)
}

const fn flag(set: bool, bit: u64) -> u64 {
    if set { bit } else { 0 }
}

impl L1Entry {
    /// Decodes a word of an L1 table.
    pub fn decode(word: u64, geometry: Geometry) -> Result<L1Entry> {
        let reserved = !(COPIED | OFFSET_MASK);
        let table = host_offset(word, reserved, "L1 entry", geometry, Clusters::Internal)?;
        Ok(L1Entry { table, copied: word & COPIED != 0 })
    }

    /// The word.
    pub fn encode(self) -> u64 {
        self.table.unwrap_or_default().0 | flag(self.copied, COPIED)
    }
}

impl L2Entry {
    /// Decodes a word of a standard L2 table of version 3, or of version 2, which knows no zero
    /// clusters.
    pub fn decode(word: u64, geometry: Geometry, version3: bool) -> Result<L2Entry> {
        L2Entry::decode_in(word, geometry, version3, Clusters::Internal)
    }

    /// Decodes a word of a standard L2 table of an image with an external data file.
    pub fn decode_external(word: u64, geometry: Geometry) -> Result<L2Entry> {
        L2Entry::decode_in(word, geometry, true, Clusters::External)
    }

    fn decode_in(
        word: u64,
        geometry: Geometry,
        version3: bool,
        clusters: Clusters,
    ) -> Result<L2Entry> {
        const STRUCTURE: &str = "L2 entry";
        let copied = word & COPIED != 0;
        if word & COMPRESSED != 0 {
            let cluster = compressed_cluster(word, STRUCTURE, geometry, clusters)?;
            return Ok(L2Entry { target: Target::Compressed(cluster), copied });
        }
        let reserved = !(COPIED | COMPRESSED | OFFSET_MASK | ZERO);
        let host = host_offset(word, reserved, STRUCTURE, geometry, clusters)?;
        let zero = word & ZERO != 0;
        require(!zero || version3, STRUCTURE, 0, "version 2 knows no zero clusters", word)?;
        let target = match (zero, host) {
            (true, host) => Target::Zero { host },
            (false, Some(host)) => Target::Standard { host },
            (false, None) => Target::Unallocated,
        };
        Ok(L2Entry { target, copied })
    }

    /// The word.
    pub fn encode(self, geometry: Geometry) -> u64 {
        let word = match self.target {
            Target::Unallocated => 0,
            Target::Zero { host } => host.unwrap_or_default().0 | ZERO,
            Target::Standard { host } => host.0,
            Target::Compressed(cluster) => cluster.encode(geometry) | COMPRESSED,
        };
        word | flag(self.copied, COPIED)
    }
}

impl SubclusterMap {
    /// From the two masks.
    pub fn new(allocated: u32, zero: u32) -> SubclusterMap {
        SubclusterMap(u64::from(zero) << 32 | u64::from(allocated))
    }

    /// The subclusters whose bytes lie in the host cluster.
    pub fn allocated_mask(self) -> u32 {
        self.0 as u32
    }

    /// The subclusters that read as zeros.
    pub fn zero_mask(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl ExtendedEntry {
    /// Decodes the two words of an extended entry.
    pub fn decode(word: u64, bitmap: u64, geometry: Geometry) -> Result<ExtendedEntry> {
        ExtendedEntry::decode_in(word, bitmap, geometry, Clusters::Internal)
    }

    /// Decodes the two words of an extended entry of an image with an external data file.
    pub fn decode_external(word: u64, bitmap: u64, geometry: Geometry) -> Result<ExtendedEntry> {
        ExtendedEntry::decode_in(word, bitmap, geometry, Clusters::External)
    }

    fn decode_in(
        word: u64,
        bitmap: u64,
        geometry: Geometry,
        clusters: Clusters,
    ) -> Result<ExtendedEntry> {
        const STRUCTURE: &str = "extended L2 entry";
        let map = SubclusterMap(bitmap);
        let copied = word & COPIED != 0;
        if word & COMPRESSED != 0 {
            require(
                bitmap == 0,
                STRUCTURE,
                8,
                "a compressed cluster's subcluster bitmap must be 0",
                bitmap,
            )?;
            let compressed = Some(compressed_cluster(word, STRUCTURE, geometry, clusters)?);
            return Ok(ExtendedEntry { host: None, copied, compressed, map });
        }
        let reserved = !(COPIED | COMPRESSED | OFFSET_MASK);
        let host = host_offset(word, reserved, STRUCTURE, geometry, clusters)?;
        require(
            host.is_some() || map.allocated_mask() == 0,
            STRUCTURE,
            8,
            "subclusters are allocated without a cluster",
            bitmap,
        )?;
        require(
            map.allocated_mask() & map.zero_mask() == 0,
            STRUCTURE,
            8,
            "a subcluster is both allocated and zero",
            bitmap,
        )?;
        Ok(ExtendedEntry { host, copied, compressed: None, map })
    }

    /// The two words: the entry and its subcluster bitmap.
    pub fn encode(self, geometry: Geometry) -> (u64, u64) {
        let word = match self.compressed {
            Some(cluster) => cluster.encode(geometry) | COMPRESSED,
            None => self.host.unwrap_or_default().0,
        };
        (word | flag(self.copied, COPIED), self.map.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GEOMETRY: Geometry = Geometry { cluster_bits: 16, extended_l2: false, refcount_order: 4 };
    const EXTENDED: Geometry = Geometry { extended_l2: true, ..GEOMETRY };

    #[test]
    fn sample_words() {
        let decode = |word| L2Entry::decode(word, GEOMETRY, true).unwrap();
        assert_eq!(decode(0), L2Entry { target: Target::Unallocated, copied: false });
        assert_eq!(decode(1), L2Entry { target: Target::Zero { host: None }, copied: false });
        let host = HostOffset(0x50000);
        assert_eq!(
            decode(0x8000_0000_0005_0000),
            L2Entry { target: Target::Standard { host }, copied: true }
        );
        assert_eq!(
            decode(0x8000_0000_0005_0001),
            L2Entry { target: Target::Zero { host: Some(host) }, copied: true }
        );
        assert!(matches!(decode(0x4000_0000_0005_0064).target, Target::Compressed(_)));
        assert_eq!(
            L1Entry::decode(0x8000_0000_0004_0000, GEOMETRY).unwrap(),
            L1Entry { table: Some(HostOffset(0x40000)), copied: true }
        );
    }

    #[test]
    fn each_rule_of_standard_entries_refuses() {
        for (word, version3, rule) in [
            (1 << 1, true, "reserved"),
            (1 << 8, true, "reserved"),
            (1 << 56, true, "reserved"),
            (1 << 61, true, "reserved"),
            (0x8000, true, "multiple of the cluster size"),
            (0x50001, false, "version 2"),
        ] {
            let error = L2Entry::decode(word, GEOMETRY, version3).unwrap_err();
            assert!(error.to_string().contains(rule), "{word:#x}: {error}");
            assert!(!error.is_unsupported());
        }
    }

    #[test]
    fn each_rule_of_l1_entries_refuses() {
        for word in [1, 1 << 8, 1 << 56, 1 << 62, 0x8000] {
            L1Entry::decode(word, GEOMETRY).unwrap_err();
        }
    }

    #[test]
    fn each_rule_of_extended_entries_refuses() {
        let host = COPIED | 0x50000;
        for (word, bitmap, rule) in [
            (host | 1, 0, "reserved"),
            (0, 1, "without a cluster"),
            (host, 1 << 32 | 1, "both"),
            (COMPRESSED | 0x50000, 1, "must be 0"),
            (0x8000, 0, "multiple of the cluster size"),
        ] {
            let error = ExtendedEntry::decode(word, bitmap, EXTENDED).unwrap_err();
            assert!(error.to_string().contains(rule), "{word:#x} {bitmap:#x}: {error}");
        }
    }

    #[test]
    fn offset_0_of_a_data_file_is_a_cluster_if_copied() {
        let entry = L2Entry::decode_external(COPIED, GEOMETRY).unwrap();
        assert_eq!(entry.target, Target::Standard { host: HostOffset(0) });
        assert_eq!(entry.encode(GEOMETRY), COPIED);
        assert_eq!(
            L2Entry::decode(COPIED, GEOMETRY, true).unwrap().target,
            Target::Unallocated,
            "but never of an image without one: there lies its header"
        );
        assert_eq!(L2Entry::decode_external(0, GEOMETRY).unwrap().target, Target::Unallocated);
        assert_eq!(
            ExtendedEntry::decode_external(COPIED, 1, EXTENDED).unwrap().host,
            Some(HostOffset(0))
        );
        L2Entry::decode_external(COMPRESSED | 0x50000, GEOMETRY).unwrap_err();
        ExtendedEntry::decode_external(COMPRESSED | 0x50000, 0, EXTENDED).unwrap_err();
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_itself(word: u64, bitmap: u64, bits in 9u32..=21, version3: bool) {
            let geometry = Geometry { cluster_bits: bits, ..GEOMETRY };
            // Most random words break a rule; words that are nearly right are tried as well.
            for word in [word, word & (COPIED | COMPRESSED | OFFSET_MASK | ZERO) & !(geometry.cluster_mask() - 1)] {
                if let Ok(entry) = L2Entry::decode(word, geometry, version3) {
                    prop_assert_eq!(entry.encode(geometry), word & !flag(entry.target == Target::Unallocated && !entry.copied, COPIED));
                }
                if let Ok(entry) = L2Entry::decode_external(word, geometry) {
                    prop_assert_eq!(entry.encode(geometry), word);
                }
                if let Ok(entry) = L1Entry::decode(word, geometry) {
                    prop_assert_eq!(entry.encode(), word);
                }
                for bitmap in [0, bitmap, bitmap & 0xffff_0000_0000_ffff] {
                    if let Ok(entry) = ExtendedEntry::decode(word, bitmap, geometry) {
                        prop_assert_eq!(entry.encode(geometry), (word, bitmap));
                    }
                }
            }
        }
    }
}
