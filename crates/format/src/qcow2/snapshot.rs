//! Entries of the snapshot table, which stand one after the other, each 8-aligned.
//!
//! ```text
//!    0 L1 offset    8 L1 entries   12 id's length   14 name's length
//!   16 seconds     20 nanoseconds  24 guest clock   32 VM state size (32 bits)   36 extra length
//!   40 extra: VM state size (64 bits), disk size, instruction count, unknown
//!    . id, name, zeros up to a multiple of 8
//! ```
//!
//! The table's length stands nowhere: [`Snapshot::length`] tells, from an entry's fixed part, how
//! much there is to read. A table is bounded by the number of snapshots and [`TABLE_SIZE_MAX`].

use super::HOST_END_MAX;
use super::geometry::Geometry;
use super::header::L1_SIZE_MAX;
use crate::addr::HostOffset;
use crate::error::Result;
use crate::wire::{Fields, put, require};

const STRUCTURE: &str = "snapshot table entry";

/// The length of an entry's fixed part in bytes.
pub const FIXED_LENGTH: usize = 40;
/// The longest extra data in bytes.
pub const EXTRA_LENGTH_MAX: u32 = 1024;
/// The longest snapshot table in bytes.
pub const TABLE_SIZE_MAX: u64 = 64 << 20;

/// An internal snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Where its L1 table begins.
    pub l1_table_offset: HostOffset,
    /// The entries of its L1 table.
    pub l1_entry_count: u32,
    /// Its unique id: a number in decimal, as a rule.
    pub id: Vec<u8>,
    /// Its name.
    pub name: Vec<u8>,
    /// When it was taken: seconds since 1970.
    pub date_seconds: u32,
    /// And nanoseconds.
    pub date_nanoseconds: u32,
    /// How long the guest had run, in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// The size of the VM's state in bytes; 0 if there is none.
    pub vm_state_size: u64,
    /// The disk's size in bytes; `None` in old images means the size that the disk has now.
    pub disk_size: Option<u64>,
    /// The guest's instruction count; `None` or all ones if there is none.
    pub instruction_count: Option<u64>,
    /// Extra data of later specifications.
    pub unknown_extra: Vec<u8>,
}

impl Snapshot {
    /// The length in bytes of the entry that begins with `fixed`, of at least [`FIXED_LENGTH`] bytes.
    pub fn length(fixed: &[u8]) -> Result<usize> {
        let fields = Fields::new(STRUCTURE, fixed, FIXED_LENGTH as u64)?;
        let extra = fields.u32(36);
        let rule = "extra data has at most 1024 bytes";
        require(extra <= EXTRA_LENGTH_MAX, STRUCTURE, 36, rule, extra.into())?;
        let names = usize::from(fields.u16(12)) + usize::from(fields.u16(14));
        Ok((FIXED_LENGTH + extra as usize + names).next_multiple_of(8))
    }

    /// Decodes the entry at the beginning of `bytes`; it takes [`Snapshot::length`] of them. The
    /// padding of the last entry may be missing.
    pub fn decode(bytes: &[u8], geometry: Geometry) -> Result<Snapshot> {
        Snapshot::length(bytes)?;
        let fields = Fields::new(STRUCTURE, bytes, FIXED_LENGTH as u64)?;
        let (id_length, name_length) = (fields.u16(12).into(), fields.u16(14).into());
        let extra = fields.slice(FIXED_LENGTH, fields.u32(36) as usize)?;
        let extra_fields = Fields::new(STRUCTURE, extra, 0)?;
        let extra_u64 = |at: usize| (extra.len() >= at + 8).then(|| extra_fields.u64(at));
        let id_start = FIXED_LENGTH + extra.len();
        let snapshot = Snapshot {
            l1_table_offset: HostOffset(fields.u64(0)),
            l1_entry_count: fields.u32(8),
            id: fields.slice(id_start, id_length)?.to_vec(),
            name: fields.slice(id_start + id_length, name_length)?.to_vec(),
            date_seconds: fields.u32(16),
            date_nanoseconds: fields.u32(20),
            vm_clock_nanoseconds: fields.u64(24),
            vm_state_size: extra_u64(0).unwrap_or(fields.u32(32).into()),
            disk_size: extra_u64(8),
            instruction_count: extra_u64(16),
            // Extra data that ends within a field that is known here is nobody's; it is dropped.
            unknown_extra: extra.get(24..).unwrap_or_default().to_vec(),
        };
        let l1_size = u64::from(snapshot.l1_entry_count) * 8;
        require(l1_size <= L1_SIZE_MAX, STRUCTURE, 8, "an L1 table has at most 32 MiB", l1_size)?;
        let offset = snapshot.l1_table_offset.0;
        let placed = offset.is_multiple_of(geometry.cluster_size())
            && (offset != 0 || l1_size == 0)
            && offset.checked_add(l1_size).is_some_and(|end| end <= HOST_END_MAX);
        let rule = "the L1 table must lie on clusters of its own below 2^56";
        require(placed, STRUCTURE, 0, rule, offset)?;
        Ok(snapshot)
    }

    /// The entry's bytes, with their padding. Extra data is written up to the last field there is;
    /// version 3 asks for the disk size at least.
    ///
    /// # Panics
    /// If the id or the name is longer than 65535 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut extra = self.vm_state_size.to_be_bytes().to_vec();
        let has_more = self.instruction_count.is_some() || !self.unknown_extra.is_empty();
        if self.disk_size.is_some() || has_more {
            extra.extend(self.disk_size.unwrap_or_default().to_be_bytes());
        }
        if has_more {
            extra.extend(self.instruction_count.unwrap_or(u64::MAX).to_be_bytes());
            extra.extend(&self.unknown_extra);
        }
        let mut bytes = vec![0; FIXED_LENGTH];
        let length_of = |text: &[u8]| u16::try_from(text.len()).expect("a name of 16 bits' length");
        put(&mut bytes, 0, &self.l1_table_offset.0.to_be_bytes());
        put(&mut bytes, 8, &self.l1_entry_count.to_be_bytes());
        put(&mut bytes, 12, &length_of(&self.id).to_be_bytes());
        put(&mut bytes, 14, &length_of(&self.name).to_be_bytes());
        put(&mut bytes, 16, &self.date_seconds.to_be_bytes());
        put(&mut bytes, 20, &self.date_nanoseconds.to_be_bytes());
        put(&mut bytes, 24, &self.vm_clock_nanoseconds.to_be_bytes());
        // Readers of the short field alone must not take a large state for a small one.
        let short = u32::try_from(self.vm_state_size).unwrap_or(0);
        put(&mut bytes, 32, &short.to_be_bytes());
        put(&mut bytes, 36, &(extra.len() as u32).to_be_bytes());
        bytes.extend(extra);
        bytes.extend(&self.id);
        bytes.extend(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GEOMETRY: Geometry = Geometry { cluster_bits: 16, extended_l2: false, refcount_order: 4 };

    /// `qemu-img snapshot -c one`, of a disk of 1 MiB.
    const SAMPLE: &[u8] = &[
        0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 1, 0, 1, 0, 3, 0x65, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 255,
        255, 255, 255, 255, 255, 255, 255, b'1', b'o', b'n', b'e', 0, 0, 0, 0,
    ];

    #[test]
    fn sample_entry() {
        let snapshot = Snapshot::decode(SAMPLE, GEOMETRY).unwrap();
        let expected = Snapshot {
            l1_table_offset: HostOffset(0x70000),
            l1_entry_count: 1,
            id: b"1".to_vec(),
            name: b"one".to_vec(),
            date_seconds: 0x6500_0000,
            date_nanoseconds: 5,
            disk_size: Some(1 << 20),
            instruction_count: Some(u64::MAX),
            ..Snapshot::default()
        };
        assert_eq!(snapshot, expected);
        assert_eq!(Snapshot::length(SAMPLE), Ok(SAMPLE.len()));
        assert_eq!(snapshot.encode(), SAMPLE);
    }

    #[test]
    fn old_entries_lack_extra_data() {
        let mut old = SAMPLE[..FIXED_LENGTH].to_vec();
        old[32..40].copy_from_slice(&[0, 0, 0, 9, 0, 0, 0, 0]);
        old.extend(b"1one");
        let snapshot = Snapshot::decode(&old, GEOMETRY).unwrap();
        assert_eq!((snapshot.vm_state_size, snapshot.disk_size), (9, None));
        assert_eq!(snapshot.name, b"one");
    }

    #[test]
    fn each_rule_refuses() {
        let changed = |at: usize, value: &[u8]| {
            let mut bytes = SAMPLE.to_vec();
            bytes[at..at + value.len()].copy_from_slice(value);
            Snapshot::decode(&bytes, GEOMETRY).unwrap_err().to_string()
        };
        assert!(changed(36, &1025u32.to_be_bytes()).contains("1024"));
        assert!(changed(8, &(4u32 << 20 | 1).to_be_bytes()).contains("32 MiB"));
        assert!(changed(0, &0x7_0200u64.to_be_bytes()).contains("clusters of its own"));
        assert!(changed(0, &0u64.to_be_bytes()).contains("clusters of its own"));
        assert!(changed(0, &(1u64 << 56).to_be_bytes()).contains("below 2^56"));
        assert!(changed(14, &99u16.to_be_bytes()).contains("are there"));
        Snapshot::decode(&SAMPLE[..39], GEOMETRY).unwrap_err();
    }

    proptest! {
        #[test]
        fn round_trip(
            id in proptest::collection::vec(any::<u8>(), 0..20),
            name in proptest::collection::vec(any::<u8>(), 0..300),
            l1_entry_count in 0u32..4 << 20,
            vm_state_size: u64,
            disk_size: u64,
            instruction_count: Option<u64>,
            unknown in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let snapshot = Snapshot {
                l1_table_offset: HostOffset(0x10000),
                l1_entry_count,
                id,
                name,
                vm_state_size,
                disk_size: Some(disk_size),
                unknown_extra: if instruction_count.is_some() { unknown } else { Vec::new() },
                instruction_count,
                ..Snapshot::default()
            };
            let bytes = snapshot.encode();
            prop_assert_eq!(Snapshot::length(&bytes), Ok(bytes.len()));
            prop_assert_eq!(Snapshot::decode(&bytes, GEOMETRY), Ok(snapshot));
        }
    }
}
