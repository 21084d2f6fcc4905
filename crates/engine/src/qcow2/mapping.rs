//! From guest clusters to what holds them: pure over one cached slice.
//!
//! Standard and extended L2 entries are one thing here, a [`Cluster`] of *units*: one unit, the
//! cluster, with standard entries; 32 units, the subclusters, with extended ones. [`map`] merges
//! neighbours, so that a long request over a contiguous image is one host I/O.
//!
//! Deliberately absent: waiting. A slice that is not here is loaded by `tables.rs` first.

use stillpoint_format::addr::HostOffset;
use stillpoint_format::qcow2::compressed::CompressedCluster;
use stillpoint_format::qcow2::entry::{ExtendedEntry, L2Entry, SubclusterMap, Target};
use stillpoint_format::qcow2::geometry::Geometry;

use crate::cache::{Editing, Pin};

/// One guest cluster's mapping, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cluster {
    /// Where its own host cluster is.
    pub(crate) host: Option<u64>,
    /// The host cluster belongs to nobody else, and may be written in place.
    pub(crate) copied: bool,
    /// It is compressed; no unit is allocated then.
    pub(crate) compressed: Option<CompressedCluster>,
    /// Units whose bytes are in the host cluster.
    pub(crate) allocated: u32,
    /// Units that read as zeros.
    pub(crate) zero: u32,
}

/// What a run of guest bytes reads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// This layer says nothing: the backing file, or zeros without one.
    Unallocated,
    /// Zeros; where a host cluster is kept for it, its offset.
    Zero(Option<u64>),
    /// The file, at this offset.
    Host(u64),
    /// The compressed cluster around it.
    Compressed(CompressedCluster),
}

/// A run of guest bytes with one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) length: u64,
    pub(crate) source: Source,
}

/// The two kinds of entry in one table: how words become clusters, and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Codec {
    pub(crate) geometry: Geometry,
    pub(crate) version3: bool,
}

impl Codec {
    /// All units of a cluster.
    pub(crate) fn all_units(self) -> u32 {
        if self.geometry.extended_l2 { u32::MAX } else { 1 }
    }

    /// The units that `from..to` (bytes in the cluster) touches.
    pub(crate) fn units(self, from: u64, to: u64) -> u32 {
        if !self.geometry.extended_l2 {
            return 1;
        }
        let size = self.geometry.subcluster_size();
        let (first, last) = ((from / size) as u32, ((to - 1) / size) as u32);
        (u32::MAX << first) & (u32::MAX >> (31 - last))
    }

    /// The units that `from..to` (bytes in the cluster) covers wholly.
    pub(crate) fn whole_units(self, from: u64, to: u64) -> u32 {
        let size = self.geometry.subcluster_size();
        let (first, end) = (from.div_ceil(size), to / size);
        if first >= end { 0 } else { self.units(first * size, end * size) }
    }

    fn decode(self, word: u64, bitmap: u64) -> Result<Cluster, stillpoint_format::Error> {
        if self.geometry.extended_l2 {
            let entry = ExtendedEntry::decode(word, bitmap, self.geometry)?;
            return Ok(Cluster {
                host: entry.host.map(|host| host.0),
                copied: entry.copied,
                compressed: entry.compressed,
                allocated: entry.map.allocated_mask(),
                zero: entry.map.zero_mask(),
            });
        }
        let entry = L2Entry::decode(word, self.geometry, self.version3)?;
        let nothing =
            Cluster { host: None, copied: entry.copied, compressed: None, allocated: 0, zero: 0 };
        Ok(match entry.target {
            Target::Unallocated => nothing,
            Target::Zero { host } => Cluster { host: host.map(|host| host.0), zero: 1, ..nothing },
            Target::Standard { host } => Cluster { host: Some(host.0), allocated: 1, ..nothing },
            Target::Compressed(compressed) => Cluster { compressed: Some(compressed), ..nothing },
        })
    }

    /// The mapping of entry `index` of a slice, one version of it (R8).
    pub(crate) fn cluster<E: Default>(
        self,
        slice: &Pin<'_, E>,
        index: usize,
    ) -> Result<Cluster, stillpoint_format::Error> {
        if self.geometry.extended_l2 {
            let (word, bitmap) = slice.word_pair(index * 2);
            self.decode(word, bitmap)
        } else {
            self.decode(slice.word(index), 0)
        }
    }

    /// The same for whoever holds the slice's lock.
    pub(crate) fn cluster_locked<E: Default>(
        self,
        slice: &Editing<'_, E>,
        index: usize,
    ) -> Result<Cluster, stillpoint_format::Error> {
        if self.geometry.extended_l2 {
            self.decode(slice.word(index * 2), slice.word(index * 2 + 1))
        } else {
            self.decode(slice.word(index), 0)
        }
    }

    /// Changes entry `index` of a slice.
    pub(crate) fn store<E: Default>(
        self,
        slice: &mut Editing<'_, E>,
        index: usize,
        cluster: Cluster,
    ) {
        let host = cluster.host.map(HostOffset);
        if self.geometry.extended_l2 {
            let entry = ExtendedEntry {
                host,
                copied: cluster.copied,
                compressed: cluster.compressed,
                map: SubclusterMap::new(cluster.allocated, cluster.zero),
            };
            let (word, bitmap) = entry.encode(self.geometry);
            slice.store_pair(index * 2, word, bitmap);
            return;
        }
        let target = match (cluster.compressed, host) {
            (Some(compressed), _) => Target::Compressed(compressed),
            (None, host) if cluster.zero != 0 => Target::Zero { host },
            (None, Some(host)) => Target::Standard { host },
            (None, None) => Target::Unallocated,
        };
        let entry = L2Entry { target, copied: cluster.copied };
        slice.store(index, entry.encode(self.geometry));
    }
}

impl Cluster {
    /// What `unit` reads from; `start` is the unit's offset in the cluster.
    fn source(&self, unit: u32, start: u64) -> Source {
        let bit = 1 << unit;
        match (self.compressed, self.host) {
            (Some(compressed), _) => Source::Compressed(compressed),
            (None, Some(host)) if self.allocated & bit != 0 => Source::Host(host + start),
            (None, host) if self.zero & bit != 0 => Source::Zero(host.map(|host| host + start)),
            _ => Source::Unallocated,
        }
    }
}

/// The run that begins at byte `in_cluster` of entry `index`, at most `length` bytes long and within
/// the slice.
pub(crate) fn map<E: Default>(
    codec: Codec,
    slice: &Pin<'_, E>,
    entries: usize,
    mut index: usize,
    in_cluster: u64,
    length: u64,
) -> Result<Run, stillpoint_format::Error> {
    let geometry = codec.geometry;
    let unit_size = geometry.subcluster_size();
    let cluster = codec.cluster(slice, index)?;
    let mut unit = (in_cluster / unit_size) as u32;
    let skipped = in_cluster % unit_size;
    let source = match cluster.source(unit, u64::from(unit) * unit_size) {
        Source::Host(host) => Source::Host(host + skipped),
        Source::Zero(host) => Source::Zero(host.map(|host| host + skipped)),
        other => other,
    };
    if let Source::Compressed(_) = source {
        let length = length.min(geometry.cluster_size() - in_cluster);
        return Ok(Run { length, source });
    }
    let mut found = unit_size - skipped;
    let mut cluster = cluster;
    while found < length {
        unit += 1;
        if unit == geometry.subclusters_per_cluster() {
            (unit, index) = (0, index + 1);
            if index == entries {
                break;
            }
            cluster = codec.cluster(slice, index)?;
        }
        let next = cluster.source(unit, u64::from(unit) * unit_size);
        let follows = match (source, next) {
            (Source::Host(first), Source::Host(next)) => first + found == next,
            (Source::Zero(Some(first)), Source::Zero(Some(next))) => first + found == next,
            (Source::Zero(None), Source::Zero(None)) => true,
            (Source::Unallocated, Source::Unallocated) => true,
            _ => false,
        };
        if !follows {
            break;
        }
        found += unit_size;
    }
    Ok(Run { length: found.min(length), source })
}
