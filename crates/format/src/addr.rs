//! Numbers that are easily swapped, each with a type of its own.
//!
//! Deliberately absent: arithmetic between the kinds. Going from a guest's offset to a host's takes
//! a mapping, not an addition; the rest takes a [`Geometry`](crate::qcow2::Geometry).

use std::fmt;

/// A byte offset in the disk that the guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestOffset(pub u64);

/// A byte offset in a host file: the image, or its data file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostOffset(pub u64);

/// The index of a cluster in a host file: its offset divided by the cluster size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostCluster(pub u64);

impl HostOffset {
    /// The cluster that this byte lies in.
    pub fn cluster(self, cluster_bits: u32) -> HostCluster {
        HostCluster(self.0 >> cluster_bits)
    }
}

impl HostCluster {
    /// Where the cluster begins.
    pub fn offset(self, cluster_bits: u32) -> HostOffset {
        HostOffset(self.0 << cluster_bits)
    }
}

impl fmt::Display for GuestOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for HostOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
