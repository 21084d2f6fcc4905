//! The disk that a guest sees.

use std::sync::Arc;

use stillpoint_io::{Background, Durability, Files, Queue, Result, Segments};

use crate::options::{ImageFormat, Options};

/// What a server should tell its clients about a disk's units, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests of other alignments work, at the price of a read-modify-write.
    pub preferred_block: u32,
    /// Discards of aligned multiples of this give space back; others may do nothing.
    pub discard_unit: u32,
    /// The longest single read or write; discards and zeroings may be of any length.
    pub transfer_max: u32,
}

/// How far write-zeroes may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zeroing {
    /// The space may be given back.
    pub unmap: bool,
    /// Fail with `Unsupported` rather than write zeros out (NBD's fast zero).
    pub fast_only: bool,
}

/// One run of a disk with the same answer to "what is here?".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its length in bytes; at least 1.
    pub length: u64,
    /// It reads as zeros.
    pub zero: bool,
    /// It is backed by data in a host file.
    pub data: bool,
    /// It is compressed.
    pub compressed: bool,
    /// Some layer says what is here: 0 the active image, 1 its backing file...; `None` if none does.
    pub depth: Option<u32>,
    /// Where it lies in its layer's file, if plain data lies there.
    pub host_offset: Option<u64>,
}

/// A disk: an image, its backing chain and all state that its requests share. One `Disk` serves any
/// number of queues at once.
#[derive(Debug)]
pub struct Disk {}

impl Disk {
    /// Opens the image called `name`, its data file and its backing chain.
    pub async fn open(
        _queue: &Queue,
        _files: &Arc<dyn Files>,
        _background: &Arc<dyn Background>,
        _name: &str,
        _options: Options,
    ) -> Result<Arc<Disk>> {
        todo!()
    }
    /// The size that the guest sees, in bytes.
    pub fn size(&self) -> u64 {
        todo!()
    }
    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        todo!()
    }
    /// The format of the active image.
    pub fn format(&self) -> ImageFormat {
        todo!()
    }
    /// What to tell clients about units.
    pub fn limits(&self) -> Limits {
        todo!()
    }
    /// Reads `into.len()` bytes at `offset`.
    pub async fn read(&self, _queue: &Queue, _offset: u64, _into: Segments) -> Result<()> {
        todo!()
    }
    /// Writes `from.len()` bytes at `offset`.
    pub async fn write(
        &self,
        _queue: &Queue,
        _offset: u64,
        _from: Segments,
        _durability: Durability,
    ) -> Result<()> {
        todo!()
    }
    /// Makes a range read as zeros.
    pub async fn write_zeroes(
        &self,
        _queue: &Queue,
        _offset: u64,
        _length: u64,
        _zeroing: Zeroing,
        _durability: Durability,
    ) -> Result<()> {
        todo!()
    }
    /// Tells that the guest no longer needs a range. What it reads as afterwards is zeros or its old bytes.
    pub async fn discard(&self, _queue: &Queue, _offset: u64, _length: u64) -> Result<()> {
        todo!()
    }
    /// Makes durable whatever was answered before this was called.
    pub async fn flush(&self, _queue: &Queue) -> Result<()> {
        todo!()
    }
    /// What the run of bytes at `offset` is, up to `length` bytes.
    pub async fn status(&self, _queue: &Queue, _offset: u64, _length: u64) -> Result<Status> {
        todo!()
    }
    /// Flushes, gives back space grown ahead and leaves the image clean. Requests must have ended.
    pub async fn close(&self, _queue: &Queue) -> Result<()> {
        todo!()
    }
}
