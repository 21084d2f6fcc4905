//! Persistent dirty bitmaps: entries of the directory, and entries of a bitmap's table.
//!
//! ```text
//!  directory entry:  0 table's offset    8 table entries   12 flags
//!                   16 type             17 granularity     18 name's length   20 extra length
//!                   24 extra data, name, zeros up to a multiple of 8
//!  table entry:     | 63..56 0 | 55..9 cluster's offset | 8..1 0 | 0 all ones, if the offset is 0 |
//! ```

use super::HOST_END_MAX;
use super::entry::OFFSET_MASK;
use super::geometry::Geometry;
use crate::addr::HostOffset;
use crate::error::{Error, Result};
use crate::wire::{Fields, put, require};

const STRUCTURE: &str = "bitmap directory entry";

/// The length of an entry's fixed part in bytes.
pub const FIXED_LENGTH: usize = 24;
/// The longest name in bytes.
pub const NAME_LENGTH_MAX: u16 = 1023;
/// The longest table in entries.
pub const TABLE_ENTRY_COUNT_MAX: u32 = 1 << 27;
/// The most bytes of a bitmap on disk.
pub const BITMAP_SIZE_MAX: u64 = 512 << 20;
/// The allowed granularities, as binary logarithms.
pub const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;

/// Somebody has it open for writing, or had when it crashed: it is inconsistent.
pub const IN_USE: u32 = 1 << 0;
/// It records every write from the opening of the image on.
pub const AUTO: u32 = 1 << 1;
/// Its unknown extra data may be ignored.
pub const EXTRA_DATA_COMPATIBLE: u32 = 1 << 2;
const FLAGS_KNOWN: u32 = IN_USE | AUTO | EXTRA_DATA_COMPATIBLE;

const TYPE_DIRTY_TRACKING: u8 = 1;

/// A bitmap as the directory describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bitmap {
    /// Where its table begins.
    pub table_offset: HostOffset,
    /// The entries of its table.
    pub table_entry_count: u32,
    /// [`IN_USE`], [`AUTO`], [`EXTRA_DATA_COMPATIBLE`].
    pub flags: u32,
    /// How many bytes of the disk a bit stands for, as a binary logarithm.
    pub granularity_bits: u8,
    /// Its name.
    pub name: Vec<u8>,
    /// Extra data, kept as it is.
    pub extra_data: Vec<u8>,
}

/// What an entry of a bitmap's table says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// Every bit of the cluster is 0.
    Zeros,
    /// Every bit of the cluster is 1.
    Ones,
    /// The bits lie in this cluster.
    Stored(HostOffset),
}

impl Bitmap {
    /// The length in bytes of the entry that begins with `fixed`, of at least [`FIXED_LENGTH`] bytes.
    pub fn length(fixed: &[u8]) -> Result<usize> {
        let fields = Fields::new(STRUCTURE, fixed, FIXED_LENGTH as u64)?;
        let (name, extra) = (u64::from(fields.u16(18)), u64::from(fields.u32(20)));
        let length = (FIXED_LENGTH as u64 + name + extra).next_multiple_of(8);
        Ok(length as usize)
    }

    /// Decodes the entry at the beginning of `bytes`; it takes [`Bitmap::length`] of them.
    pub fn decode(bytes: &[u8], geometry: Geometry) -> Result<Bitmap> {
        let fields = Fields::new(STRUCTURE, bytes, FIXED_LENGTH as u64)?;
        let (kind, name_length) = (bytes[16], fields.u16(18));
        if kind != TYPE_DIRTY_TRACKING {
            let what = format!("bitmap type {kind}");
            return Err(Error::Unsupported { structure: STRUCTURE, at: 16, what });
        }
        let rule = "a bitmap's name has 1 to 1023 bytes";
        let named = (1..=NAME_LENGTH_MAX).contains(&name_length);
        require(named, STRUCTURE, 18, rule, name_length.into())?;
        let extra_data = fields.slice(FIXED_LENGTH, fields.u32(20) as usize)?.to_vec();
        let name = fields.slice(FIXED_LENGTH + extra_data.len(), name_length.into())?.to_vec();
        let bitmap = Bitmap {
            table_offset: HostOffset(fields.u64(0)),
            table_entry_count: fields.u32(8),
            flags: fields.u32(12),
            granularity_bits: bytes[17],
            name,
            extra_data,
        };
        bitmap.require_bounds(geometry)?;
        Ok(bitmap)
    }

    fn require_bounds(&self, geometry: Geometry) -> Result<()> {
        let flags = self.flags;
        require(flags & !FLAGS_KNOWN == 0, STRUCTURE, 12, "reserved bits must be 0", flags.into())?;
        if !self.extra_data.is_empty() && flags & EXTRA_DATA_COMPATIBLE == 0 {
            let what = "a bitmap with extra data".to_owned();
            return Err(Error::Unsupported { structure: STRUCTURE, at: 20, what });
        }
        let bits = self.granularity_bits;
        let rule = "the granularity must be 512 bytes to 2 GiB";
        require(GRANULARITY_BITS.contains(&bits), STRUCTURE, 17, rule, bits.into())?;
        let count = self.table_entry_count;
        let rule = "a bitmap's table has at most 2^27 entries, and its bits at most 512 MiB";
        let bounded = (1..=TABLE_ENTRY_COUNT_MAX).contains(&count)
            && u64::from(count) << geometry.cluster_bits <= BITMAP_SIZE_MAX;
        require(bounded, STRUCTURE, 8, rule, count.into())?;
        let offset = self.table_offset.0;
        let placed = offset != 0
            && offset.is_multiple_of(geometry.cluster_size())
            && offset.checked_add(u64::from(count) * 8).is_some_and(|end| end <= HOST_END_MAX);
        let rule = "the table must lie on clusters of its own below 2^56";
        require(placed, STRUCTURE, 0, rule, offset)
    }

    /// The entry's bytes, with their padding.
    ///
    /// # Panics
    /// If the name is longer than 65535 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; FIXED_LENGTH];
        let name_length = u16::try_from(self.name.len()).expect("a name of 16 bits' length");
        put(&mut bytes, 0, &self.table_offset.0.to_be_bytes());
        put(&mut bytes, 8, &self.table_entry_count.to_be_bytes());
        put(&mut bytes, 12, &self.flags.to_be_bytes());
        bytes[16] = TYPE_DIRTY_TRACKING;
        bytes[17] = self.granularity_bits;
        put(&mut bytes, 18, &name_length.to_be_bytes());
        put(&mut bytes, 20, &(self.extra_data.len() as u32).to_be_bytes());
        bytes.extend(&self.extra_data);
        bytes.extend(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }
}

/// Decodes a word of a bitmap's table.
pub fn decode_table_entry(word: u64, geometry: Geometry) -> Result<Bits> {
    const STRUCTURE: &str = "bitmap table entry";
    let offset = word & OFFSET_MASK;
    let reserved = if offset == 0 { !(OFFSET_MASK | 1) } else { !OFFSET_MASK };
    require(word & reserved == 0, STRUCTURE, 0, "reserved bits must be 0", word)?;
    let rule = "the offset must be a multiple of the cluster size";
    require(offset & geometry.cluster_mask() == 0, STRUCTURE, 0, rule, word)?;
    Ok(match (offset, word & 1) {
        (0, 0) => Bits::Zeros,
        (0, _) => Bits::Ones,
        (offset, _) => Bits::Stored(HostOffset(offset)),
    })
}

/// The word of a bitmap's table.
pub fn encode_table_entry(bits: Bits) -> u64 {
    match bits {
        Bits::Zeros => 0,
        Bits::Ones => 1,
        Bits::Stored(offset) => offset.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { cluster_bits: 16, extended_l2: false, refcount_order: 4 };

    /// `qemu-img bitmap --add` of "b0" with its default granularity.
    const SAMPLE: &[u8] = &[
        0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 1, 16, 0, 2, 0, 0, 0, 0, b'b', b'0', 0, 0,
        0, 0, 0, 0,
    ];

    #[test]
    fn sample_entry() {
        let bitmap = Bitmap::decode(SAMPLE, GEOMETRY).unwrap();
        let expected = Bitmap {
            table_offset: HostOffset(0x60000),
            table_entry_count: 1,
            flags: AUTO,
            granularity_bits: 16,
            name: b"b0".to_vec(),
            extra_data: Vec::new(),
        };
        assert_eq!(bitmap, expected);
        assert_eq!(Bitmap::length(SAMPLE), Ok(SAMPLE.len()));
        assert_eq!(bitmap.encode(), SAMPLE);
        let with_extra =
            Bitmap { extra_data: vec![1, 2, 3], flags: EXTRA_DATA_COMPATIBLE, ..expected };
        let bytes = with_extra.encode();
        assert_eq!(Bitmap::length(&bytes), Ok(bytes.len()));
        assert_eq!(Bitmap::decode(&bytes, GEOMETRY), Ok(with_extra));
    }

    #[test]
    fn each_rule_refuses() {
        for (at, value, rule) in [
            (0, &0x6_0200u64.to_be_bytes()[..], "clusters of its own"),
            (0, &0u64.to_be_bytes(), "clusters of its own"),
            (0, &(1u64 << 56).to_be_bytes(), "below 2^56"),
            (8, &0u32.to_be_bytes(), "2^27"),
            (8, &8193u32.to_be_bytes(), "512 MiB"),
            (12, &8u32.to_be_bytes(), "reserved"),
            (16, &[2], "type 2"),
            (17, &[8], "granularity"),
            (17, &[32], "granularity"),
            (18, &0u16.to_be_bytes(), "1023"),
            (18, &1024u16.to_be_bytes(), "1023"),
            (18, &99u16.to_be_bytes(), "are there"),
            (20, &4u32.to_be_bytes(), "extra data"),
            (20, &u32::MAX.to_be_bytes(), "are there"),
        ] {
            let mut bytes = SAMPLE.to_vec();
            bytes[at..at + value.len()].copy_from_slice(value);
            let error = Bitmap::decode(&bytes, GEOMETRY).unwrap_err();
            assert!(error.to_string().contains(rule), "{rule}: {error}");
        }
    }

    #[test]
    fn table_entries_round_trip_and_refuse() {
        for bits in [Bits::Zeros, Bits::Ones, Bits::Stored(HostOffset(0x70000))] {
            assert_eq!(decode_table_entry(encode_table_entry(bits), GEOMETRY), Ok(bits));
        }
        for word in [2, 0x100, 1 << 56, 0x70001, 0x200] {
            decode_table_entry(word, GEOMETRY).unwrap_err();
        }
    }
}
