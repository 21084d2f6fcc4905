//! Reads the two tables whose entries have uneven lengths: snapshots and bitmaps.
//!
//! The snapshot table's length stands nowhere, so entries are read one after the other from a small
//! window; both tables are bounded by count and by size before anything is read.

use stillpoint_format::qcow2::bitmap::{self, Bitmap};
use stillpoint_format::qcow2::snapshot::{self, Snapshot, TABLE_SIZE_MAX};
use stillpoint_format::qcow2::{Geometry, Header};
use stillpoint_io::{Error, Kind, Queue, Result, Storage};

use super::image::read_bytes;
use crate::qcow2::refused;

const WINDOW_SIZE: u64 = 64 << 10;

/// A table's bytes from an entry on, read ahead by a window.
struct Entries<'a> {
    queue: &'a Queue,
    file: &'a dyn Storage,
    start: u64,
    offset: u64,
    limit: u64,
    window: Vec<u8>,
    window_start: u64,
}

impl<'a> Entries<'a> {
    fn new(queue: &'a Queue, file: &'a dyn Storage, start: u64, size_max: u64) -> Entries<'a> {
        let limit = start.saturating_add(size_max);
        Entries {
            queue,
            file,
            start,
            offset: start,
            limit,
            window: Vec::new(),
            window_start: start,
        }
    }

    /// The next `length` bytes, without going past them.
    async fn peek(&mut self, length: u64) -> Result<&[u8]> {
        if self.offset + length > self.limit {
            let why = format!("it is longer than {} bytes", self.limit - self.start);
            let error = Error::new(Kind::Corrupt, "read a table of the image", why);
            return Err(error.file(self.file.name()).at(self.start));
        }
        if self.offset + length > self.window_start + self.window.len() as u64 {
            let end = self.offset + length.max(WINDOW_SIZE);
            self.window = read_bytes(self.queue, self.file, self.offset..end).await?;
            self.window_start = self.offset;
        }
        let at = (self.offset - self.window_start) as usize;
        Ok(&self.window[at..at + length as usize])
    }

    /// The next entry, decoded; `length` tells its length from its first `fixed` bytes.
    async fn next<T>(
        &mut self,
        op: &'static str,
        fixed: usize,
        length: fn(&[u8]) -> stillpoint_format::Result<usize>,
        decode: fn(&[u8], Geometry) -> stillpoint_format::Result<T>,
        geometry: Geometry,
    ) -> Result<T> {
        let (file, offset) = (self.file, self.offset);
        let refuse = |error| refused(&error, op, file.name(), offset);
        let length = length(self.peek(fixed as u64).await?).map_err(refuse)? as u64;
        let entry = decode(self.peek(length).await?, geometry).map_err(refuse)?;
        self.offset += length;
        Ok(entry)
    }
}

/// The internal snapshots, and how many bytes their table takes.
pub(crate) async fn read_snapshots(
    queue: &Queue,
    file: &dyn Storage,
    header: &Header,
) -> Result<(Vec<Snapshot>, u64)> {
    const OP: &str = "read the snapshot table";
    let start = header.snapshot_table_offset.0;
    let mut entries = Entries::new(queue, file, start, TABLE_SIZE_MAX);
    let mut snapshots = Vec::new();
    for _ in 0..header.snapshot_count {
        let (fixed, geometry) = (snapshot::FIXED_LENGTH, header.geometry());
        let next = entries.next(OP, fixed, Snapshot::length, Snapshot::decode, geometry);
        snapshots.push(next.await?);
    }
    Ok((snapshots, entries.offset - start))
}

/// The bitmaps, unless the image has none or they are not consistent with it.
pub(crate) async fn read_bitmaps(
    queue: &Queue,
    file: &dyn Storage,
    header: &Header,
) -> Result<Vec<Bitmap>> {
    const OP: &str = "read the bitmap directory";
    let Some(place) = header.bitmaps() else { return Ok(Vec::new()) };
    let start = place.directory_offset.0;
    let mut entries = Entries::new(queue, file, start, place.directory_size);
    let mut bitmaps = Vec::new();
    for _ in 0..place.count {
        let (fixed, geometry) = (bitmap::FIXED_LENGTH, header.geometry());
        let next = entries.next(OP, fixed, Bitmap::length, Bitmap::decode, geometry);
        bitmaps.push(next.await?);
    }
    Ok(bitmaps)
}
