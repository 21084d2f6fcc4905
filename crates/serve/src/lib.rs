//! Everything that is spoken to outsiders.
//!
//! | module | what it holds |
//! |---|---|
//! | [`nbd`] | the NBD protocol: codec, negotiation, transmission, exports, a small client |
//! | [`address`] | where a server listens |
//! | [`slots`] | a bounded set of request futures that run inside one task |
//!
//! Protocol adapters are thin: decode, call [`stillpoint_engine::Disk`], encode. Deliberately
//! absent: image formats, caches, and every decision about what a request does to a disk.

pub mod address;
pub mod nbd;
pub mod slots;

pub use address::Address;
