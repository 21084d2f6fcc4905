//! qcow2, versions 2 and 3, after the public specification ("The QCOW2 image format").
//!
//! ```text
//!  header ──▶ L1 table ──▶ L2 tables ──▶ data clusters          guest offset → host offset
//!    │  └───▶ refcount table ──▶ refcount blocks                host cluster → references
//!    ├──────▶ snapshot table ──▶ L1 tables of their own
//!    └──────▶ bitmap directory ──▶ bitmap tables ──▶ bitmap data
//! ```
//!
//! | file | structure |
//! |---|---|
//! | [`geometry`] | sizes that follow from the header, and how a guest offset splits |
//! | [`header`] | the header, its fields and bounds |
//! | [`extension`] | header extensions: backing format, bitmaps, encryption, data file, unknown ones |
//! | [`features`] | feature bits and the feature name table |
//! | [`entry`] | L1 entries, L2 entries, extended L2 entries |
//! | [`compressed`] | compressed cluster descriptors |
//! | [`luks`] | the LUKS header, as far as it tells without a key |
//! | [`refcount`] | refcount table entries and the elements of refcount blocks |
//! | [`snapshot`] | snapshot table entries |
//! | [`bitmap`] | bitmap directory entries and bitmap table entries |
//!
//! Numbers are big-endian on disk. Tables of words are handed in as native `u64`: whoever reads a
//! table converts it once.

pub mod bitmap;
pub mod compressed;
pub mod entry;
pub mod extension;
pub mod features;
pub mod geometry;
pub mod header;
pub mod luks;
pub mod refcount;
pub mod snapshot;

pub use compressed::CompressedCluster;
pub use entry::{ExtendedEntry, L1Entry, L2Entry, SubclusterMap, Target};
pub use extension::Extension;
pub use geometry::Geometry;
pub use header::Header;

/// Host offsets in L1 and L2 entries have 56 bits; nothing in an image may lie beyond.
pub const HOST_END_MAX: u64 = 1 << 56;
