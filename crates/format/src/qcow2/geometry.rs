//! The sizes that follow from three fields of the header, and how a guest offset splits:
//!
//! ```text
//!  guest offset:  | L1 index | L2 index (l2_bits) | offset in cluster (cluster_bits) |
//! ```
//!
//! Invariant: `cluster_bits` is 9..=21 and `refcount_order` at most 6 ([`Header::decode`] sees to
//! it), so that no computation here overflows.
//!
//! [`Header::decode`]: super::header::Header::decode

use crate::addr::GuestOffset;

/// The sizes of an image's structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// The cluster size's binary logarithm, 9..=21.
    pub cluster_bits: u32,
    /// L2 entries are 16 bytes and divide their cluster into 32 subclusters.
    pub extended_l2: bool,
    /// The binary logarithm of a refcount's width in bits, 0..=6.
    pub refcount_order: u32,
}

/// The places that a guest offset names in the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Which entry of the L1 table.
    pub l1_index: u64,
    /// Which entry of that L2 table.
    pub l2_index: u64,
    /// Which byte of that cluster.
    pub in_cluster: u64,
}

/// The subclusters of a cluster with an extended L2 entry.
pub const SUBCLUSTERS: u32 = 32;

impl Geometry {
    /// The cluster size in bytes.
    pub const fn cluster_size(self) -> u64 {
        1 << self.cluster_bits
    }

    /// The bits of an offset that lie inside a cluster.
    pub const fn cluster_mask(self) -> u64 {
        self.cluster_size() - 1
    }

    /// The size of an L2 entry in bytes: 8 or 16.
    pub const fn l2_entry_size(self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// The binary logarithm of [`Geometry::l2_entries`].
    pub const fn l2_bits(self) -> u32 {
        self.cluster_bits - if self.extended_l2 { 4 } else { 3 }
    }

    /// The entries of an L2 table, which is one cluster long.
    pub const fn l2_entries(self) -> u64 {
        1 << self.l2_bits()
    }

    /// The guest bytes that one L2 table covers.
    pub const fn l2_table_covers(self) -> u64 {
        1 << (self.cluster_bits + self.l2_bits())
    }

    /// The L1 entries that a disk of `size` bytes needs.
    pub const fn l1_entries_for(self, size: u64) -> u64 {
        size.div_ceil(self.l2_table_covers())
    }

    /// How many parts of a cluster have an allocation state of their own: 1 or 32.
    pub const fn subclusters_per_cluster(self) -> u32 {
        if self.extended_l2 { SUBCLUSTERS } else { 1 }
    }

    /// The size of such a part in bytes.
    pub const fn subcluster_size(self) -> u64 {
        self.cluster_size() / self.subclusters_per_cluster() as u64
    }

    /// The width of a refcount in bits.
    pub const fn refcount_bits(self) -> u32 {
        1 << self.refcount_order
    }

    /// The largest refcount.
    pub const fn refcount_max(self) -> u64 {
        u64::MAX >> (64 - self.refcount_bits())
    }

    /// The refcounts of a refcount block, which is one cluster long.
    pub const fn refcounts_per_block(self) -> u64 {
        (self.cluster_size() * 8) >> self.refcount_order
    }

    /// The host bytes that one refcount block covers.
    pub const fn refcount_block_covers(self) -> u64 {
        self.refcounts_per_block() << self.cluster_bits
    }

    /// The table places of a guest offset.
    pub const fn split(self, offset: GuestOffset) -> Split {
        Split {
            l1_index: self.l1_index(offset),
            l2_index: self.l2_index(offset),
            in_cluster: self.in_cluster(offset),
        }
    }

    /// Which L1 entry a guest offset belongs to.
    pub const fn l1_index(self, offset: GuestOffset) -> u64 {
        offset.0 >> (self.cluster_bits + self.l2_bits())
    }

    /// Which entry of its L2 table a guest offset belongs to.
    pub const fn l2_index(self, offset: GuestOffset) -> u64 {
        offset.0 >> self.cluster_bits & (self.l2_entries() - 1)
    }

    /// Which byte of its cluster a guest offset is.
    pub const fn in_cluster(self, offset: GuestOffset) -> u64 {
        offset.0 & self.cluster_mask()
    }

    /// Which subcluster of its cluster a guest offset belongs to (0 without extended entries).
    pub const fn subcluster_index(self, offset: GuestOffset) -> u32 {
        (self.in_cluster(offset) / self.subcluster_size()) as u32
    }

    /// `bytes` rounded up to whole clusters; for values of at most 2^63.
    pub const fn round_up(self, bytes: u64) -> u64 {
        (bytes + self.cluster_mask()) & !self.cluster_mask()
    }

    /// How many clusters `bytes` take.
    pub const fn clusters_for(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_geometry_has_the_specifications_figures() {
        let geometry = Geometry { cluster_bits: 16, extended_l2: false, refcount_order: 4 };
        assert_eq!(geometry.l2_entries(), 8192);
        assert_eq!(geometry.l2_table_covers(), 512 << 20);
        assert_eq!(geometry.refcounts_per_block(), 32768);
        assert_eq!(geometry.refcount_max(), 65535);
        assert_eq!(geometry.l1_entries_for(10 << 40), 20480);
        assert_eq!(geometry.l1_entries_for(0), 0);
        assert_eq!(geometry.l1_entries_for(1), 1);
    }

    #[test]
    fn split_and_its_parts_agree_for_every_geometry() {
        for cluster_bits in 9..=21 {
            for extended_l2 in [false, true] {
                for refcount_order in 0..=6 {
                    let geometry = Geometry { cluster_bits, extended_l2, refcount_order };
                    let offset = GuestOffset(0x0123_4567_89ab_cdef);
                    let split = geometry.split(offset);
                    let joined = split.l1_index * geometry.l2_table_covers()
                        + split.l2_index * geometry.cluster_size()
                        + split.in_cluster;
                    assert_eq!(joined, offset.0);
                    assert_eq!(geometry.l2_entries() * geometry.l2_entry_size(), 1 << cluster_bits);
                    let block_bits =
                        geometry.refcounts_per_block() * u64::from(geometry.refcount_bits());
                    assert_eq!(block_bits, geometry.cluster_size() * 8);
                    assert_eq!(
                        geometry.subcluster_size() * u64::from(geometry.subclusters_per_cluster()),
                        geometry.cluster_size()
                    );
                }
            }
        }
    }
}
