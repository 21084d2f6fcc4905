//! Big-endian fields at explicit offsets, and the one way to refuse a value.

use crate::error::{Error, Result};

/// A structure's bytes under their name, so that every refusal can tell where it was.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    pub(crate) structure: &'static str,
    bytes: &'a [u8],
}

impl<'a> Fields<'a> {
    /// The first `needed` bytes, or a refusal.
    pub(crate) fn new(structure: &'static str, bytes: &'a [u8], needed: u64) -> Result<Self> {
        if (bytes.len() as u64) < needed {
            return Err(Error::Truncated { structure, needed, found: bytes.len() as u64 });
        }
        Ok(Fields { structure, bytes })
    }

    /// `length` bytes at `at`.
    pub(crate) fn slice(&self, at: usize, length: usize) -> Result<&'a [u8]> {
        at.checked_add(length).and_then(|end| self.bytes.get(at..end)).ok_or(Error::Truncated {
            structure: self.structure,
            needed: (at as u64).saturating_add(length as u64),
            found: self.bytes.len() as u64,
        })
    }

    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        self.bytes[at..at + N].try_into().expect("a slice of N bytes")
    }

    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.array(at))
    }

    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.array(at))
    }
}

/// Refuses `value` at byte `at` of `structure` unless it obeys.
pub(crate) fn require(
    obeys: bool,
    structure: &'static str,
    at: usize,
    rule: &'static str,
    value: u64,
) -> Result<()> {
    if obeys { Ok(()) } else { Err(Error::Corrupt { structure, at: at as u64, rule, value }) }
}

/// Overwrites the bytes at `at`.
pub(crate) fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}
