//! Compressed cluster descriptors: the low 62 bits of an L2 entry whose bit 62 is set.
//!
//! ```text
//!  x = 62 - (cluster_bits - 8)
//!  | 61 .. x: sectors of 512 bytes beyond the first | x-1 .. 0: host offset, of any alignment |
//! ```
//!
//! The compressed bytes begin at the host offset and end somewhere in the last sector; how many
//! there really are, only the decoder finds out. Several of them may share a host cluster.

use std::ops::Range;

use super::HOST_END_MAX;
use super::geometry::Geometry;
use crate::addr::HostOffset;
use crate::error::Result;
use crate::wire::require;

const STRUCTURE: &str = "compressed L2 entry";
const SECTOR: u64 = 512;

/// Where the bytes of a compressed cluster lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompressedCluster {
    /// Where they begin, exact to the byte.
    pub host: HostOffset,
    /// How many 512-byte sectors they go on for after the one they begin in.
    pub additional_sectors: u64,
}

/// How many low bits of the descriptor hold the offset.
const fn offset_bits(geometry: Geometry) -> u32 {
    62 - (geometry.cluster_bits - 8)
}

impl CompressedCluster {
    /// Decodes the low 62 bits of an L2 entry; the flags above are the caller's.
    pub fn decode(descriptor: u64, geometry: Geometry) -> Result<CompressedCluster> {
        let bits = offset_bits(geometry);
        let cluster = CompressedCluster {
            host: HostOffset(descriptor & ((1 << bits) - 1)),
            additional_sectors: (descriptor & ((1 << 62) - 1)) >> bits,
        };
        let end = cluster.byte_range().end;
        require(end <= HOST_END_MAX, STRUCTURE, 0, "the data must end below 2^56", end)?;
        let in_header = cluster.host.0 < geometry.cluster_size();
        require(
            !in_header,
            STRUCTURE,
            0,
            "the data must lie outside the header's cluster",
            cluster.host.0,
        )?;
        Ok(cluster)
    }

    /// The descriptor for `length` bytes at `host`, or `None` if they are too many for it.
    pub fn for_bytes(
        host: HostOffset,
        length: u64,
        geometry: Geometry,
    ) -> Option<CompressedCluster> {
        let additional_sectors = (host.0 + length.max(1) - 1) / SECTOR - host.0 / SECTOR;
        let fits = additional_sectors >> (62 - offset_bits(geometry)) == 0
            && host.0 >> offset_bits(geometry) == 0;
        fits.then_some(CompressedCluster { host, additional_sectors })
    }

    /// The low 62 bits of an L2 entry.
    pub fn encode(self, geometry: Geometry) -> u64 {
        self.additional_sectors << offset_bits(geometry) | self.host.0
    }

    /// The bytes that may belong to it: from the first one to the end of the last sector.
    pub fn byte_range(self) -> Range<u64> {
        self.host.0..(self.host.0 / SECTOR + self.additional_sectors + 1) * SECTOR
    }

    /// The indices of the host clusters that those bytes touch; each counts one reference.
    pub fn host_clusters(self, geometry: Geometry) -> Range<u64> {
        let bytes = self.byte_range();
        bytes.start >> geometry.cluster_bits..((bytes.end - 1) >> geometry.cluster_bits) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry(cluster_bits: u32) -> Geometry {
        Geometry { cluster_bits, extended_l2: false, refcount_order: 4 }
    }

    #[test]
    fn sample_descriptor_of_a_64_kib_cluster() {
        // The second compressed cluster of an image filled by `qemu-io -c "write -c ..."`:
        // right behind the first one, at byte 0x50064, within one sector.
        let cluster = CompressedCluster::decode(0x5_0064, geometry(16)).unwrap();
        assert_eq!(cluster.host, HostOffset(0x50064));
        assert_eq!(cluster.byte_range(), 0x50064..0x50200);
        assert_eq!(cluster.host_clusters(geometry(16)), 5..6);
    }

    #[test]
    fn sectors_count_from_the_one_that_the_data_begins_in() {
        let cluster =
            CompressedCluster::for_bytes(HostOffset(0x1fff0), 1000, geometry(16)).unwrap();
        assert_eq!(cluster.additional_sectors, 2);
        assert_eq!(cluster.byte_range(), 0x1fff0..0x20400);
        assert_eq!(cluster.host_clusters(geometry(16)), 1..3);
    }

    #[test]
    fn data_beyond_the_last_host_offset_is_refused() {
        let descriptor = (1 << 56) - 1 + (1 << offset_bits(geometry(9)));
        let error = CompressedCluster::decode(descriptor, geometry(9)).unwrap_err();
        assert!(error.to_string().contains("below 2^56"), "{error}");
    }

    #[test]
    fn data_in_the_header_is_refused() {
        let error = CompressedCluster::decode(0x1000, geometry(16)).unwrap_err();
        assert!(error.to_string().contains("header"), "{error}");
    }

    proptest! {
        #[test]
        fn round_trip(cluster_bits in 9u32..=21, host in 1u64 << 21..1 << 48, length in 1u64..512) {
            let geometry = geometry(cluster_bits);
            let cluster = CompressedCluster::for_bytes(HostOffset(host), length, geometry).unwrap();
            let decoded = CompressedCluster::decode(cluster.encode(geometry), geometry);
            prop_assert_eq!(decoded, Ok(cluster));
            let range = cluster.byte_range();
            prop_assert!(range.start == host && range.end >= host + length);
            prop_assert!(range.end - (host + length) < 512);
        }
    }
}
