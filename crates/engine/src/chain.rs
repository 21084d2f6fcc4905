//! A backing chain: images behind images, opened once and then only read.

use futures_util::future::LocalBoxFuture;
use stillpoint_io::{Queue, Result, Segments};

use crate::disk::Status;
use crate::qcow2::Qcow2;
use crate::qcow2::mapping::Source;
use crate::raw::Raw;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// The longest chain that is opened, the active image included (F2).
pub const CHAIN_LENGTH_MAX: usize = 256;

/// One image of a chain; it knows the one behind it.
#[derive(Debug)]
#[cfg_attr(feature = "shuttle", allow(clippy::large_enum_variant, reason = "its locks are large"))]
pub(crate) enum Layer {
    Raw(Raw),
    Qcow2(Arc<Qcow2>),
}

impl Layer {
    /// The size of what it holds, in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size_cell().load(SeqCst)
    }

    /// Holds another size from now on.
    pub(crate) fn show_size(&self, size: u64) {
        self.size_cell().store(size, SeqCst);
    }

    fn size_cell(&self) -> &AtomicU64 {
        match self {
            Layer::Raw(raw) => &raw.size,
            Layer::Qcow2(image) => &image.size,
        }
    }

    /// The layer behind it.
    pub(crate) fn backing(&self) -> Option<&Layer> {
        match self {
            Layer::Raw(_) => None,
            Layer::Qcow2(image) => image.backing.as_deref(),
        }
    }

    /// The unit of requests that suits every file from here down, in bytes.
    pub(crate) fn request_align(&self) -> u64 {
        let file = match self {
            Layer::Raw(raw) => &raw.file,
            Layer::Qcow2(image) => &image.file,
        };
        let own = u64::from(file.facts().request_align);
        self.backing().map_or(own, |backing| own.max(backing.request_align()))
    }

    /// Reads `into.len()` bytes at `offset`; what lies beyond its size is zeros.
    pub(crate) fn read<'a>(
        &'a self,
        queue: &'a Queue,
        offset: u64,
        into: Segments,
    ) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            match self {
                Layer::Raw(raw) => raw.read(queue, offset, into).await,
                Layer::Qcow2(image) => image.read(queue, offset, &into).await,
            }
        })
    }

    /// What the run of bytes at `offset` is, up to `length` bytes; this layer is at `depth`.
    pub(crate) fn status<'a>(
        &'a self,
        queue: &'a Queue,
        offset: u64,
        length: u64,
        depth: u32,
    ) -> LocalBoxFuture<'a, Result<Status>> {
        let nothing = |length| Status {
            length,
            zero: true,
            data: false,
            compressed: false,
            depth: None,
            host_offset: None,
        };
        Box::pin(async move {
            let size = self.size();
            if offset >= size {
                return Ok(nothing(length));
            }
            let length = length.min(size - offset);
            match self {
                Layer::Raw(raw) => {
                    let extent = raw.extent(queue, offset, length).await?;
                    Ok(Status {
                        length: extent.length.min(length),
                        zero: !extent.data,
                        data: extent.data,
                        compressed: false,
                        depth: Some(depth),
                        host_offset: Some(offset),
                    })
                }
                Layer::Qcow2(image) => {
                    let run = image.run_at(queue, offset, length).await?;
                    let said = Status {
                        length: run.length,
                        zero: false,
                        data: true,
                        compressed: false,
                        depth: Some(depth),
                        host_offset: None,
                    };
                    Ok(match (run.source, &image.backing) {
                        (Source::Host(host), _) => Status { host_offset: Some(host), ..said },
                        (Source::Compressed(_), _) => Status { compressed: true, ..said },
                        (Source::Zero(host), _) => {
                            Status { zero: true, data: false, host_offset: host, ..said }
                        }
                        (Source::Unallocated, Some(backing)) => {
                            backing.status(queue, offset, run.length, depth + 1).await?
                        }
                        (Source::Unallocated, None) => nothing(run.length),
                    })
                }
            }
        })
    }
}

impl Qcow2 {
    /// Whether the backing file is known to read as zeros wherever a write of `length` bytes at
    /// `offset` would have to copy from it. Only tables are asked: looking for holes in a raw file
    /// costs more than it saves.
    pub(crate) async fn backing_reads_zero(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
    ) -> Result<bool> {
        let size = self.cluster_size();
        let mut position = offset / size * size;
        let end = (offset + length).next_multiple_of(size);
        while position < end {
            let mut run = end - position;
            let mut layer = self.backing.as_deref();
            while let Some(present) = layer {
                if present.size() <= position {
                    break;
                }
                // What lies beyond its end counts as its own: the answer "no" is always safe.
                let Layer::Qcow2(image) = present else { return Ok(false) };
                let found = image.run_at(queue, position, run).await?;
                run = found.length;
                match found.source {
                    Source::Zero(_) => break,
                    Source::Unallocated => layer = image.backing.as_deref(),
                    Source::Host(_) | Source::Compressed(_) => return Ok(false),
                }
            }
            position += run;
        }
        Ok(true)
    }
}
