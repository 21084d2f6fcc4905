//! Every byte on disk, as pure codecs.
//!
//! `decode` turns bytes (or words, in native order) into values and refuses whatever breaks a rule
//! of the specification or exceeds a bound, naming the structure, the byte and the rule; `encode`
//! is its inverse. One on-disk structure lives in one file.
//!
//! | file | what it holds |
//! |---|---|
//! | [`addr`] | [`GuestOffset`], [`HostOffset`], [`HostCluster`]: numbers that must not be swapped |
//! | [`error`] | [`Error`]: which rule was broken, and where |
//! | [`qcow2`] | the qcow2 image format, versions 2 and 3 |
//!
//! Deliberately absent: I/O, async, unsafe code, and every opinion on what to do with an image.

#![forbid(unsafe_code)]

pub mod addr;
pub mod error;
pub mod qcow2;
mod wire;

pub use addr::{GuestOffset, HostCluster, HostOffset};
pub use error::{Error, Result};
pub use qcow2::Geometry;
