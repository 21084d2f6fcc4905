//! The offline tool's core: what can be done to an image that no guest uses.
//!
//! | file | what it does |
//! |---|---|
//! | [`image`] | opens an image for inspection: probing, the header, the backing chain, tables in bulk |
//! | [`create`] | makes a qcow2 or raw image |
//! | [`info`] | tells everything about an image |
//! | [`check`] | finds (and repairs) what contradicts itself |
//! | [`map`] | tells what lies where, over the whole chain |
//! | `entries` | snapshots and bitmaps, which stand in tables of uneven entries |
//!
//! Each table is read once and in order. Memory is bounded by what an image's file really holds,
//! never by what its header claims (F2).
//!
//! Deliberately absent: how any of it is printed, and the disk that a guest writes to ([`Disk`]).
//!
//! [`Disk`]: crate::Disk

pub mod check;
pub mod create;
pub(crate) mod entries;
pub mod image;
pub mod info;
pub mod map;
#[cfg(test)]
mod testing;

pub use stillpoint_format::qcow2::header::{CompressionType, CryptMethod};
