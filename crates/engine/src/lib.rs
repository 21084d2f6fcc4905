//! The disk: mapping, allocation, copy-on-write, flush, backing chains.
pub mod disk;
pub mod options;
pub use disk::{Disk, Limits, Status, Zeroing};
pub use options::{AllocPolicy, DetectZeroes, DiscardPolicy, ImageFormat, Options};
