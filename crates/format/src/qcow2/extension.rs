//! Header extensions, which stand between the header's fields and the backing file's name.
//!
//! ```text
//!  | 0..3 type | 4..7 length | 8.. data | zeros up to a multiple of 8 |   type 0 ends the list
//! ```
//!
//! Unknown extensions are kept in their places (F1).

use super::features::{FeatureName, decode_names, encode_names};
use crate::addr::HostOffset;
use crate::error::{Error, Result};
use crate::wire::{Fields, require};

const STRUCTURE: &str = "header extension";

const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xE279_2ACA;
const FEATURE_NAMES: u32 = 0x6803_F857;
const BITMAPS: u32 = 0x2385_2875;
const ENCRYPTION: u32 = 0x0537_BE77;
const DATA_FILE: u32 = 0x4441_5441;

/// The most bitmaps in an image.
pub const BITMAP_COUNT_MAX: u32 = 65535;
/// The longest bitmap directory in bytes.
pub const BITMAP_DIRECTORY_SIZE_MAX: u64 = 1024 * BITMAP_COUNT_MAX as u64;
/// The longest name of a data file or backing file in bytes.
pub const FILE_NAME_LENGTH_MAX: u64 = 1023;

/// Where the bitmaps are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bitmaps {
    /// How many bitmaps the directory holds.
    pub count: u32,
    /// The directory's length in bytes.
    pub directory_size: u64,
    /// Where the directory begins.
    pub directory_offset: HostOffset,
}

/// One header extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extension {
    /// The backing file's format by name.
    BackingFormat(String),
    /// Names of feature bits.
    FeatureNames(Vec<FeatureName>),
    /// Where the bitmaps are; valid only with the autoclear bit.
    Bitmaps(Bitmaps),
    /// Where the LUKS header is.
    Encryption {
        /// Where it begins.
        offset: HostOffset,
        /// Its length in bytes.
        length: u64,
    },
    /// The external data file's name.
    DataFile(String),
    /// One that this program does not know; kept as it is.
    Unknown {
        /// Its type.
        kind: u32,
        /// Its data.
        data: Vec<u8>,
    },
}

fn text(data: &[u8], at: usize, what: &str) -> Result<String> {
    require(!data.contains(&0), STRUCTURE, at, "a name must not contain NUL", 0)?;
    String::from_utf8(data.to_vec()).map_err(|_| Error::Unsupported {
        structure: STRUCTURE,
        at: at as u64,
        what: format!("a {what} that is not UTF-8"),
    })
}

impl Extension {
    /// Decodes the list of extensions that takes the bytes from `start` to the end of `bytes`, or
    /// less if its end is marked.
    pub fn decode_list(bytes: &[u8], start: usize) -> Result<Vec<Extension>> {
        let fields = Fields::new(STRUCTURE, bytes, start as u64)?;
        let mut list: Vec<Extension> = Vec::new();
        let mut at = start;
        while at + 8 <= bytes.len() {
            let (kind, length) = (fields.u32(at), fields.u32(at + 4) as usize);
            if kind == END {
                break;
            }
            let data = fields.slice(at + 8, length)?;
            let extension = Extension::decode(kind, data, at)?;
            let twice = !matches!(extension, Extension::Unknown { .. })
                && list.iter().any(|other| other.kind() == kind);
            require(!twice, STRUCTURE, at, "an extension stands there twice", kind.into())?;
            list.push(extension);
            at += 8 + length.next_multiple_of(8);
        }
        Ok(list)
    }

    fn decode(kind: u32, data: &[u8], at: usize) -> Result<Extension> {
        let length = data.len() as u64;
        Ok(match kind {
            BACKING_FORMAT => Extension::BackingFormat(text(data, at, "backing format")?),
            FEATURE_NAMES => Extension::FeatureNames(decode_names(data)?),
            BITMAPS => {
                require(length == 24, STRUCTURE, at, "the bitmaps extension has 24 bytes", length)?;
                let fields = Fields::new(STRUCTURE, data, 24)?;
                let reserved = fields.u32(4);
                require(reserved == 0, STRUCTURE, at, "reserved bits must be 0", reserved.into())?;
                Extension::Bitmaps(Bitmaps {
                    count: fields.u32(0),
                    directory_size: fields.u64(8),
                    directory_offset: HostOffset(fields.u64(16)),
                })
            }
            ENCRYPTION => {
                let rule = "the encryption extension has 16 bytes";
                require(length == 16, STRUCTURE, at, rule, length)?;
                let fields = Fields::new(STRUCTURE, data, 16)?;
                Extension::Encryption { offset: HostOffset(fields.u64(0)), length: fields.u64(8) }
            }
            DATA_FILE => {
                let rule = "a file name has at most 1023 bytes";
                require(length <= FILE_NAME_LENGTH_MAX, STRUCTURE, at, rule, length)?;
                Extension::DataFile(text(data, at, "data file name")?)
            }
            kind => Extension::Unknown { kind, data: data.to_vec() },
        })
    }

    /// Appends the list and its end mark to the header's fields.
    pub fn encode_list(list: &[Extension], header: &mut Vec<u8>) {
        for extension in list {
            let data = extension.data();
            header.extend(extension.kind().to_be_bytes());
            header.extend((data.len() as u32).to_be_bytes());
            header.extend(data);
            header.resize(header.len().next_multiple_of(8), 0);
        }
        header.extend([0; 8]);
    }

    fn kind(&self) -> u32 {
        match self {
            Extension::BackingFormat(_) => BACKING_FORMAT,
            Extension::FeatureNames(_) => FEATURE_NAMES,
            Extension::Bitmaps(_) => BITMAPS,
            Extension::Encryption { .. } => ENCRYPTION,
            Extension::DataFile(_) => DATA_FILE,
            Extension::Unknown { kind, .. } => *kind,
        }
    }

    fn data(&self) -> Vec<u8> {
        match self {
            Extension::BackingFormat(name) | Extension::DataFile(name) => name.clone().into_bytes(),
            Extension::FeatureNames(names) => encode_names(names),
            Extension::Bitmaps(bitmaps) => [
                &bitmaps.count.to_be_bytes()[..],
                &[0; 4],
                &bitmaps.directory_size.to_be_bytes(),
                &bitmaps.directory_offset.0.to_be_bytes(),
            ]
            .concat(),
            Extension::Encryption { offset, length } => {
                [offset.0.to_be_bytes(), length.to_be_bytes()].concat()
            }
            Extension::Unknown { data, .. } => data.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::features::standard_names;

    fn encoded(list: &[Extension]) -> Vec<u8> {
        let mut bytes = Vec::new();
        Extension::encode_list(list, &mut bytes);
        bytes
    }

    #[test]
    fn every_extension_round_trips_in_its_place() {
        let list = [
            Extension::Unknown { kind: 0x1234, data: vec![1, 2, 3] },
            Extension::BackingFormat("raw".to_owned()),
            Extension::FeatureNames(standard_names()),
            Extension::Bitmaps(Bitmaps {
                count: 2,
                directory_size: 64,
                directory_offset: HostOffset(0x70000),
            }),
            Extension::Encryption { offset: HostOffset(0x80000), length: 592 },
            Extension::DataFile("disk.data".to_owned()),
            Extension::Unknown { kind: 0x1234, data: Vec::new() },
        ];
        let bytes = encoded(&list);
        assert!(bytes.len().is_multiple_of(8));
        assert_eq!(Extension::decode_list(&bytes, 0).unwrap(), list);
    }

    #[test]
    fn list_may_end_without_a_mark() {
        let bytes = encoded(&[Extension::BackingFormat("qcow2".to_owned())]);
        assert_eq!(Extension::decode_list(&bytes[..16], 0).unwrap().len(), 1);
    }

    #[test]
    fn each_rule_refuses() {
        let raw =
            |kind: u32, data: &[u8]| encoded(&[Extension::Unknown { kind, data: data.to_vec() }]);
        let twice = [raw(BACKING_FORMAT, b"raw")[..16].to_vec(), raw(BACKING_FORMAT, b"raw")];
        let mut overlong = raw(0x99, &[0; 8]);
        overlong[4..8].copy_from_slice(&0xffff_fff0_u32.to_be_bytes());
        for (bytes, rule) in [
            (overlong, "are there"),
            (twice.concat(), "twice"),
            (raw(BACKING_FORMAT, b"ra\0w"), "NUL"),
            (raw(DATA_FILE, b"x\0"), "NUL"),
            (raw(DATA_FILE, &[b'x'; 1024]), "1023"),
            (raw(DATA_FILE, &[0xff]), "UTF-8"),
            (raw(BITMAPS, &[0; 16]), "24 bytes"),
            (raw(BITMAPS, &[1; 24]), "reserved"),
            (raw(ENCRYPTION, &[0; 24]), "16 bytes"),
            (raw(FEATURE_NAMES, &[0; 40]), "multiple of 48"),
        ] {
            let error = Extension::decode_list(&bytes, 0).unwrap_err();
            assert!(error.to_string().contains(rule), "{rule}: {error}");
        }
    }
}
