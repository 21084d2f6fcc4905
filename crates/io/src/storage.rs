//! One file, or block device, as the engine sees it.
//!
//! # The contract
//!
//! Every back end keeps these rules, and one suite of tests (`stillpoint-host/tests/contract.rs`)
//! holds each of them to it:
//!
//! - An operation owns its memory until it has ended (R2). Dropping its [`Completion`] cancels nothing.
//! - A read returns exactly what was asked for; bytes beyond the end of the file are zeros. Short
//!   host reads and writes, `EINTR` and the like are dealt with below.
//! - A write lies wholly below [`Storage::end`], or it is refused as `Invalid`: the file grows by
//!   [`Manage::Grow`] alone (R3).
//! - Offsets and lengths are multiples of [`Facts::request_align`], and so are segments' addresses
//!   of [`Facts::memory_align`]; what is not aligned is refused as `Invalid` (the engine aligns
//!   requests; memory is bounced by the back end).
//! - [`Storage::flush`] makes durable whatever had *completed* before it was submitted, and no more.
//! - Operations in flight at once have no order among themselves.
//! - Failures carry the file's name, the operation, the offset and the errno.

use std::fmt;
use std::sync::Arc;

use futures_util::future::LocalBoxFuture;

use crate::completion::Completion;
use crate::error::Result;
use crate::queue::Queue;
use crate::segments::Segments;

/// What a completed operation returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// Done, and nothing more to say.
    Unit,
    /// The answer of [`Storage::status`].
    Extent(Extent),
}

/// A run of bytes of one kind, starting where it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its length in bytes; at least 1.
    pub length: u64,
    /// Whether it may hold anything but zeros; a hole reads as zeros.
    pub data: bool,
}

/// When a write may be called complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// When a later read sees it.
    Volatile,
    /// When it survives a power cut (FUA).
    Durable,
}

/// How a file is made longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GrowMeans {
    /// `ftruncate`: a hole; space is found at the first write.
    Truncate,
    /// `fallocate`: space is reserved now, unwritten.
    Fallocate,
}

/// Changes to a file other than its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manage {
    /// Makes the file `end` bytes long, zeros at the end; never shortens it. The only way to grow (R3).
    Grow {
        /// The new length in bytes.
        end: u64,
        /// By which means.
        means: GrowMeans,
    },
    /// Cuts the file to `end` bytes; never lengthens it.
    Shrink {
        /// The new length in bytes.
        end: u64,
    },
    /// Frees the space of a range, which reads as zeros afterwards.
    Punch {
        /// Where the range begins.
        offset: u64,
        /// Its length in bytes.
        length: u64,
    },
    /// Makes a range read as zeros while keeping its space.
    ZeroRange {
        /// Where the range begins.
        offset: u64,
        /// Its length in bytes.
        length: u64,
    },
}

/// Which file it is, whatever its name: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The device's number.
    pub device: u64,
    /// The inode's number.
    pub inode: u64,
}

/// What was found out about a file when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Which file it is.
    pub id: FileId,
    /// Offsets and lengths of requests are multiples of this (bytes, a power of two; 1 through the page cache).
    pub request_align: u32,
    /// Memory addresses are multiples of this, or are bounced (bytes, a power of two).
    pub memory_align: u32,
    /// The unit in which the file system allocates (bytes); writes of whole units never wait for it (R9).
    pub fs_block: u32,
    /// [`Manage::Punch`] works.
    pub can_punch: bool,
    /// [`Manage::ZeroRange`] works.
    pub can_zero_range: bool,
    /// [`Manage::Grow`] by [`GrowMeans::Fallocate`] works.
    pub can_fallocate: bool,
    /// The file cannot grow: a block device.
    pub fixed_size: bool,
    /// The growth that was measured to be best on this kind of file system: means and step in bytes.
    pub growth: (GrowMeans, u64),
    /// Writes and shape changes are refused.
    pub read_only: bool,
}

/// One file or block device; shared by all queues.
pub trait Storage: Send + Sync + fmt::Debug {
    /// The name to call it by in messages.
    fn name(&self) -> &str;

    /// What was found out about it.
    fn facts(&self) -> &Facts;

    /// The length in force, in bytes: what [`Manage::Grow`] and [`Manage::Shrink`] last completed.
    fn end(&self) -> u64;

    /// Reads `into.len()` bytes at `offset`.
    fn read(&self, queue: &Queue, offset: u64, into: Segments) -> Completion;

    /// Writes `from.len()` bytes at `offset`.
    fn write(
        &self,
        queue: &Queue,
        offset: u64,
        from: Segments,
        durability: Durability,
    ) -> Completion;

    /// The barrier: everything completed before it was submitted is durable when it completes.
    fn flush(&self, queue: &Queue) -> Completion;

    /// Changes the file's shape.
    fn manage(&self, queue: &Queue, change: Manage) -> Completion;

    /// How much of the host's space it takes now, in bytes, if the host tells.
    fn allocated_bytes(&self) -> Option<u64> {
        None
    }

    /// What the run of bytes at `offset` is, up to `length` bytes; completes with [`Value::Extent`].
    fn status(&self, queue: &Queue, offset: u64, length: u64) -> Completion;

    /// The same open file, locks and all, through the host's page cache, with a
    /// [`Facts::request_align`] of 1: for images whose clusters are smaller than direct I/O allows.
    /// Call it before the file is shared; from then on use only what it returns. `None`: there is no
    /// such way, or none is needed.
    fn buffered(&self) -> Option<Arc<dyn Storage>> {
        None
    }
}

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading, beside other readers.
    Read,
    /// Reading and writing, as the only writer.
    Write,
    /// Reading whatever is there, without a lock, while others may write.
    ReadUnlocked,
}

/// The path of a name that stands in the file `beside`: relative to that file's folder, unless it is
/// absolute.
pub fn path_beside(name: &str, beside: &str) -> String {
    match beside.rfind('/') {
        Some(slash) if !name.starts_with('/') => format!("{}{name}", &beside[..=slash]),
        _ => name.to_owned(),
    }
}

/// Finds and opens files by name; the host's folders, or a test's table.
pub trait Files: Send + Sync + fmt::Debug {
    /// Opens the file called `name`. A relative name that stands inside the file `beside` is
    /// relative to that file's folder. The name is a plain path, never parsed as options (F2).
    fn open<'a>(
        &'a self,
        queue: &'a Queue,
        name: &'a str,
        beside: Option<&'a str>,
        access: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>>;

    /// Creates an empty file called `name` and opens it for writing; an existing one is emptied
    /// once nobody else holds it.
    fn create<'a>(
        &'a self,
        queue: &'a Queue,
        name: &'a str,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>>;
}
