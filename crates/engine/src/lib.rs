//! The disk: mapping, allocation, copy-on-write, flush, backing chains.
//!
//! [`Disk`] is what servers and tools use; everything they may choose is in [`Options`]. The engine
//! does no I/O itself, starts no thread, reads no clock: files, time and tasks come in through
//! `stillpoint-io`.
//!
//! | file | what it holds |
//! |---|---|
//! | [`disk`] | the one edge where a request is checked, aligned and registered |
//! | `tracker` | which requests are under way and exclude each other |
//! | `open` | an image and its chain from their names; what is refused |
//! | `chain` | the layers behind the active image |
//! | `raw`, `qcow2/` | the two kinds of image |
//! | `cache` | table slices in memory |
//! | `growable` | an array that is made longer while others read it |
//! | `group` | flushes that share their work |
//! | `latch` | the refusal of writing after a failure |
//! | [`mutant`] | rules that the simulator breaks; in the shipped program nothing can be broken |
//! | [`offline`] | create, info, check, map: tools on images that nobody serves |

mod cache;
mod chain;
pub mod disk;
mod group;
mod growable;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
mod latch;
pub mod mutant;
pub mod offline;
mod open;
pub mod options;
mod qcow2;
mod raw;
mod sync;
mod tracker;

pub use disk::{Disk, Limits, Status, Zeroing};
pub use options::{AllocPolicy, DetectZeroes, DiscardPolicy, ImageFormat, Options};
