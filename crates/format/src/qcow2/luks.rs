//! The LUKS1 header, to which the encryption extension points: what it tells without a key.
//!
//! ```text
//!    0 "LUKS\xba\xbe"    6 version           8 cipher's name    40 cipher's mode    72 hash
//!  104 payload sector  108 key's length   112 key's digest   132 digest's salt  164 its iterations
//!  168 uuid            208 eight slots of 48 bytes:
//!        0 active      4 iterations         8 salt             40 key sector     44 stripes
//! ```
//!
//! Deliberately absent: keys, salts and digests, and encoding. They come with encryption itself.

use crate::error::{Error, Result};
use crate::wire::{Fields, require};

const STRUCTURE: &str = "LUKS header";

/// The header's length in bytes.
pub const LENGTH: usize = 592;
const MAGIC: &[u8] = b"LUKS\xba\xbe";
const SLOT_ACTIVE: u32 = 0x00AC_71F3;
const SLOT_INACTIVE: u32 = 0x0000_DEAD;
const SECTOR: u64 = 512;

/// What a LUKS1 header tells without a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksHeader {
    /// The cipher's name, like `aes`.
    pub cipher_name: String,
    /// Its mode with the generator of initialisation vectors, like `xts-plain64`.
    pub cipher_mode: String,
    /// The hash's name, like `sha256`.
    pub hash: String,
    /// The length of the cipher's key in bytes.
    pub key_length: u32,
    /// Where the payload would begin, in bytes.
    pub payload_offset: u64,
    /// How often the key's digest was iterated.
    pub digest_iterations: u32,
    /// The volume's unique id.
    pub uuid: String,
    /// The key slots.
    pub slots: [KeySlot; 8],
}

/// A key slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeySlot {
    /// It holds a key.
    pub active: bool,
    /// How often the passphrase is iterated.
    pub iterations: u32,
    /// Where its key material lies, in bytes.
    pub key_offset: u64,
    /// Into how many stripes the key is split.
    pub stripes: u32,
}

impl LuksHeader {
    /// Decodes the header at the beginning of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<LuksHeader> {
        let fields = Fields::new(STRUCTURE, bytes, LENGTH as u64)?;
        let is_luks = bytes.starts_with(MAGIC);
        require(is_luks, STRUCTURE, 0, "the magic must be \"LUKS\\xba\\xbe\"", 0)?;
        let version = fields.u16(6);
        if version != 1 {
            let what = format!("version {version}");
            return Err(Error::Unsupported { structure: STRUCTURE, at: 6, what });
        }
        let mut slots = [KeySlot::default(); 8];
        for (index, slot) in slots.iter_mut().enumerate() {
            let at = 208 + index * 48;
            let state = fields.u32(at);
            let rule = "a key slot is active or not";
            let known = [SLOT_ACTIVE, SLOT_INACTIVE].contains(&state);
            require(known, STRUCTURE, at, rule, state.into())?;
            *slot = KeySlot {
                active: state == SLOT_ACTIVE,
                iterations: fields.u32(at + 4),
                key_offset: u64::from(fields.u32(at + 40)) * SECTOR,
                stripes: fields.u32(at + 44),
            };
        }
        Ok(LuksHeader {
            cipher_name: text(&fields, 8, 32)?,
            cipher_mode: text(&fields, 40, 32)?,
            hash: text(&fields, 72, 32)?,
            key_length: fields.u32(108),
            payload_offset: u64::from(fields.u32(104)) * SECTOR,
            digest_iterations: fields.u32(164),
            uuid: text(&fields, 168, 40)?,
            slots,
        })
    }
}

/// A name of printable ASCII, padded with NULs.
fn text(fields: &Fields, at: usize, length: usize) -> Result<String> {
    let bytes = fields.slice(at, length)?;
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(length);
    let bad = bytes[..end].iter().find(|byte| !byte.is_ascii_graphic());
    let rule = "a name must be printable ASCII";
    require(bad.is_none(), STRUCTURE, at, rule, bad.copied().unwrap_or(0).into())?;
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::put;

    /// The fields that `qemu-img create -o encrypt.format=luks` writes, without keys.
    fn sample() -> Vec<u8> {
        let mut bytes = vec![0; LENGTH];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, 6, &1u16.to_be_bytes());
        put(&mut bytes, 8, b"aes");
        put(&mut bytes, 40, b"xts-plain64");
        put(&mut bytes, 72, b"sha256");
        put(&mut bytes, 104, &4040u32.to_be_bytes());
        put(&mut bytes, 108, &64u32.to_be_bytes());
        put(&mut bytes, 164, &162_862u32.to_be_bytes());
        put(&mut bytes, 168, b"41745849-2ab8-4d22-9062-2bae544d4ca7");
        for slot in 0..8 {
            let at = 208 + slot * 48;
            let state = if slot == 0 { SLOT_ACTIVE } else { SLOT_INACTIVE };
            put(&mut bytes, at, &state.to_be_bytes());
            put(&mut bytes, at + 40, &(8 + 504 * slot as u32).to_be_bytes());
            put(&mut bytes, at + 44, &4000u32.to_be_bytes());
        }
        bytes
    }

    #[test]
    fn sample_header() {
        let header = LuksHeader::decode(&sample()).unwrap();
        assert_eq!((&header.cipher_name[..], &header.cipher_mode[..]), ("aes", "xts-plain64"));
        assert_eq!((&header.hash[..], header.key_length), ("sha256", 64));
        assert_eq!((header.payload_offset, header.digest_iterations), (2_068_480, 162_862));
        assert_eq!(header.uuid.len(), 36);
        assert!(header.slots[0].active && !header.slots[1].active);
        assert_eq!((header.slots[1].key_offset, header.slots[1].stripes), (262_144, 4000));
    }

    #[test]
    fn each_rule_refuses() {
        for (at, value, rule) in [
            (0, &b"X"[..], "magic"),
            (7, &[2], "version 2"),
            (9, &[0x1b], "printable"),
            (208, &[1], "active or not"),
        ] {
            let mut bytes = sample();
            put(&mut bytes, at, value);
            let error = LuksHeader::decode(&bytes).unwrap_err();
            assert!(error.to_string().contains(rule), "{rule}: {error}");
        }
        LuksHeader::decode(&sample()[..591]).unwrap_err();
    }
}
