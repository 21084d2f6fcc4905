//! The contracts between the engine and the world.
//!
//! The engine does no I/O, starts no thread, reads no clock and throws no dice: all four come in
//! through this crate, so that the same engine runs over a host's files and over the simulator.
//!
//! | file | what it holds |
//! |---|---|
//! | [`storage`] | [`Storage`]: one file (or device) as the engine sees it, and [`Facts`] about it |
//! | [`queue`] | [`Queue`]: one thread's event loop: tasks, time, chance; [`Background`]: work off the request path |
//! | [`mod@completion`] | [`Completion`]: the future of one submitted operation, and its [`Promise`] |
//! | [`segments`] | [`Segments`]: the memory of a request, shared with whoever still works on it |
//! | [`error`] | [`Error`]: what failed, on which file, where, and what to do |
//! | [`memory`] | [`MemoryFile`]: storage in memory whose operations a test can hold, fail or count |
//!
//! Deliberately absent: system calls, threads, and every implementation but memory.

pub mod completion;
pub mod error;
pub mod memory;
pub mod queue;
pub mod segments;
pub mod storage;

pub use completion::{Completion, Promise, completion};
pub use error::{Error, Kind, Result};
pub use memory::MemoryFile;
pub use queue::{Background, Job, Queue, Runtime};
pub use segments::{BLOCK, Segments};
pub use storage::{
    Access, Durability, Extent, Facts, FileId, Files, GrowMeans, Manage, Storage, Value,
    path_beside,
};
