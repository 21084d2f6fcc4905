//! Feature bits, and the table that gives names to bits for programs that do not know them.
//!
//! ```text
//!  entry, 48 bytes:  | 0 kind | 1 bit | 2..47 name, padded with NULs |
//! ```

use std::borrow::Cow;

use crate::error::Result;
use crate::wire::require;

/// Refcounts may be wrong: the image was not closed (lazy refcounts).
pub const INCOMPATIBLE_DIRTY: u64 = 1 << 0;
/// Metadata may be wrong: writing is refused until the image is repaired.
pub const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
/// Guest data lies in an external data file.
pub const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
/// Compressed clusters are not deflate's; the header says whose.
pub const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
/// L2 entries are extended.
pub const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
/// Every incompatible bit that has a meaning here.
pub const INCOMPATIBLE_KNOWN: u64 = INCOMPATIBLE_DIRTY
    | INCOMPATIBLE_CORRUPT
    | INCOMPATIBLE_DATA_FILE
    | INCOMPATIBLE_COMPRESSION
    | INCOMPATIBLE_EXTENDED_L2;

/// Refcounts may lag behind while the image is open.
pub const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1 << 0;

/// The bitmaps extension is consistent with the image.
pub const AUTOCLEAR_BITMAPS: u64 = 1 << 0;
/// The external data file can be read as a raw image.
pub const AUTOCLEAR_DATA_FILE_RAW: u64 = 1 << 1;
/// Every autoclear bit that has a meaning here; a writer clears the others.
pub const AUTOCLEAR_KNOWN: u64 = AUTOCLEAR_BITMAPS | AUTOCLEAR_DATA_FILE_RAW;

/// Which of the header's feature fields a bit belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureKind {
    /// Whoever does not know the bit must not open the image.
    Incompatible,
    /// Whoever does not know the bit may ignore it.
    Compatible,
    /// Whoever does not know the bit must clear it when writing.
    Autoclear,
    /// A kind that later versions of the specification may define.
    Other(u8),
}

impl FeatureKind {
    fn decode(byte: u8) -> FeatureKind {
        match byte {
            0 => FeatureKind::Incompatible,
            1 => FeatureKind::Compatible,
            2 => FeatureKind::Autoclear,
            other => FeatureKind::Other(other),
        }
    }

    fn encode(self) -> u8 {
        match self {
            FeatureKind::Incompatible => 0,
            FeatureKind::Compatible => 1,
            FeatureKind::Autoclear => 2,
            FeatureKind::Other(other) => other,
        }
    }
}

/// The size of an entry of the feature name table in bytes.
pub const FEATURE_NAME_SIZE: usize = 48;
const NAME_SIZE: usize = FEATURE_NAME_SIZE - 2;

/// An entry of the feature name table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// Which field the bit belongs to.
    pub kind: FeatureKind,
    /// The bit's number, 0..=63.
    pub bit: u8,
    bytes: [u8; NAME_SIZE],
}

impl FeatureName {
    /// An entry for `name`, of which at most 46 bytes are kept.
    pub fn new(kind: FeatureKind, bit: u8, name: &str) -> FeatureName {
        let mut bytes = [0; NAME_SIZE];
        let kept = name.len().min(NAME_SIZE);
        bytes[..kept].copy_from_slice(&name.as_bytes()[..kept]);
        FeatureName { kind, bit, bytes }
    }

    /// The name as text; what is not UTF-8 is replaced.
    pub fn name(&self) -> Cow<'_, str> {
        let end = self.bytes.iter().position(|&byte| byte == 0).unwrap_or(NAME_SIZE);
        String::from_utf8_lossy(&self.bytes[..end])
    }
}

/// Decodes the table's entries.
pub fn decode_names(bytes: &[u8]) -> Result<Vec<FeatureName>> {
    let (entries, rest) = bytes.as_chunks::<FEATURE_NAME_SIZE>();
    let rule = "the length must be a multiple of 48";
    require(rest.is_empty(), "feature name table", 0, rule, bytes.len() as u64)?;
    let decode = |entry: &[u8; FEATURE_NAME_SIZE]| FeatureName {
        kind: FeatureKind::decode(entry[0]),
        bit: entry[1],
        bytes: entry[2..].try_into().expect("46 bytes"),
    };
    Ok(entries.iter().map(decode).collect())
}

/// The table's bytes.
pub fn encode_names(names: &[FeatureName]) -> Vec<u8> {
    let entry = |name: &FeatureName| {
        [name.kind.encode(), name.bit].into_iter().chain(name.bytes).collect::<Vec<u8>>()
    };
    names.iter().flat_map(entry).collect()
}

/// The names of every feature of the specification, to be written into new images.
pub fn standard_names() -> Vec<FeatureName> {
    use FeatureKind::{Autoclear, Compatible, Incompatible};
    [
        (Incompatible, 0, "dirty bit"),
        (Incompatible, 1, "corrupt bit"),
        (Incompatible, 2, "external data file"),
        (Incompatible, 3, "compression type"),
        (Incompatible, 4, "extended L2 entries"),
        (Compatible, 0, "lazy refcounts"),
        (Autoclear, 0, "bitmaps"),
        (Autoclear, 1, "raw external data"),
    ]
    .map(|(kind, bit, name)| FeatureName::new(kind, bit, name))
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_round_trips_and_keeps_unknown_kinds() {
        let mut names = standard_names();
        names.push(FeatureName::new(FeatureKind::Other(9), 63, &"x".repeat(99)));
        let bytes = encode_names(&names);
        assert_eq!(bytes[..12], *b"\0\0dirty bit\0");
        assert_eq!(decode_names(&bytes).unwrap(), names);
        assert_eq!(names.last().unwrap().name(), "x".repeat(46));
    }

    #[test]
    fn a_partial_entry_is_refused() {
        decode_names(&[0; 47]).unwrap_err();
    }
}
