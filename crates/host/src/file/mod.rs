//! Files and block devices of the host, as the engine's storage.
//!
//! | file | what it holds |
//! |---|---|
//! | `open` | [`HostFiles`]: finding and opening by name, cache modes, falling back aloud |
//! | `facts` | what is found out about a file: file system, alignment, what it can do |
//! | `reach` | [`Reach`]: how far the names inside images may lead (F2) |
//! | `lock` | image locks that QEMU understands |
//! | `shape` | growing, cutting, punching, zeroing, and where the holes are |
//!
//! Every write that is submitted can be seen: the `tracing` target `stillpoint::host_io` tells its
//! file, offset, length and the end of the file at that moment, at level `trace` (R3 can be watched
//! with it even where io_uring hides the writes from strace). Off, it costs one relaxed load.
//!
//! Deliberately absent: growth policy (the engine's), retrying of failed writes and flushes (R6).

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::OFlags;
use stillpoint_io::{
    Completion, Durability, Error, Facts, Kind, Manage, Queue, Result, Segments, Storage, Value,
};

mod facts;
mod lock;
mod open;
mod reach;
mod shape;

use crate::event_loop::Aio;
use crate::event_loop::driver::Driver;
use crate::transfer::Transfer;

pub use facts::{FileSystem, HostFacts};
pub use open::{Cache, HostFiles};
pub use reach::Reach;

/// An open file; shared by its storage and by every operation in flight on it.
pub(crate) struct OpenFile {
    pub(crate) fd: OwnedFd,
    pub(crate) name: String,
    /// The length in force; changed by completed growth and cutting alone (R3).
    end: AtomicU64,
    /// What offsets and lengths of direct I/O are multiples of, in bytes; 1 through the page cache.
    pub(crate) direct_align: AtomicU32,
    /// `RWF_DSYNC` has not been refused yet.
    pub(crate) dsync_works: AtomicBool,
    /// `RWF_NOWAIT` has not been refused yet.
    pub(crate) nowait_works: AtomicBool,
    /// Held while the file's length changes.
    shape: Mutex<()>,
}

impl OpenFile {
    pub(crate) fn is_direct(&self) -> bool {
        self.direct_align.load(Ordering::Relaxed) > 1
    }

    /// What the lengths of a request's pieces are multiples of, or the memory is bounced.
    pub(crate) fn piece_align(&self) -> u32 {
        self.direct_align.load(Ordering::Relaxed)
    }

    pub(crate) fn nowait_works(&self) -> bool {
        self.nowait_works.load(Ordering::Relaxed)
    }

    /// The barrier, waited for.
    pub(crate) fn sync(&self) -> Result<Value> {
        rustix::fs::fdatasync(&self.fd).map(|()| Value::Unit).map_err(|errno| {
            Error::from_errno("flush", errno.raw_os_error())
                .file(&self.name)
                .remedy("what was not yet durable may be lost; check the disk beneath it")
        })
    }
}

#[cfg(test)]
impl OpenFile {
    /// A file through the page cache, locked by nobody.
    pub(crate) fn for_test(fd: OwnedFd) -> OpenFile {
        OpenFile {
            fd,
            name: "a file".to_owned(),
            end: AtomicU64::new(0),
            direct_align: AtomicU32::new(1),
            dsync_works: AtomicBool::new(true),
            nowait_works: AtomicBool::new(true),
            shape: Mutex::new(()),
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        lock::unlock(self.fd.as_fd());
    }
}

/// One file or block device of the host; see the module's head.
pub struct HostFile {
    open: Arc<OpenFile>,
    facts: Facts,
    host_facts: HostFacts,
    aio: Aio,
    cache: Cache,
}

impl HostFile {
    /// What else was found out about it.
    pub fn host_facts(&self) -> &HostFacts {
        &self.host_facts
    }

    /// The cache mode in force; direct I/O may have been refused since it was asked for.
    pub fn cache(&self) -> Cache {
        self.cache
    }

    /// The engine in force, where the loop has it.
    pub fn aio(&self) -> Aio {
        self.aio
    }

    /// How many extents the file lies in, where the file system tells.
    pub fn extent_count(&self) -> Option<u64> {
        facts::extent_count(&self.open.fd, self.host_facts.file_system)
    }

    fn refuse(&self, kind: Kind, op: &'static str, why: impl Into<String>) -> Error {
        Error::new(kind, op, why).file(&self.open.name)
    }

    fn check(&self, op: &'static str, offset: u64, length: usize) -> Result<()> {
        let align = u64::from(self.facts.request_align);
        if (offset | length as u64) & (align - 1) != 0 {
            let why = format!("the offset or the {length} bytes are not multiples of {align}");
            return Err(self.refuse(Kind::Invalid, op, why).at(offset));
        }
        if offset.checked_add(length as u64).is_none_or(|end| end > i64::MAX as u64) {
            let why = "the range ends beyond any file";
            return Err(self.refuse(Kind::Invalid, op, why).at(offset));
        }
        Ok(())
    }

    fn check_writable(&self, op: &'static str) -> Result<()> {
        if self.facts.read_only {
            return Err(self.refuse(Kind::ReadOnly, op, "it was opened for reading"));
        }
        Ok(())
    }

    fn start_read(&self, queue: &Queue, offset: u64, into: Segments) -> Result<Completion> {
        self.check("read", offset, into.len())?;
        if into.is_empty() {
            return Ok(Completion::ready(Ok(Value::Unit)));
        }
        let driver = Driver::of(queue)?;
        let align = self.facts.memory_align;
        Ok(driver.submit(self.aio, Transfer::read(self.open.clone(), offset, into, align)))
    }

    fn start_write(
        &self,
        queue: &Queue,
        offset: u64,
        from: Segments,
        durability: Durability,
    ) -> Result<Completion> {
        self.check_writable("write")?;
        self.check("write", offset, from.len())?;
        let end = self.end();
        // R3: nothing is submitted beyond the end in force.
        if offset + from.len() as u64 > end {
            let why = format!("{} bytes end beyond the end of the file, {end:#x}", from.len());
            return Err(self.refuse(Kind::Invalid, "write", why).at(offset));
        }
        if from.is_empty() {
            return Ok(Completion::ready(Ok(Value::Unit)));
        }
        tracing::trace!(
            target: "stillpoint::host_io",
            file = %self.open.name,
            offset,
            length = from.len(),
            end,
            "write"
        );
        let driver = Driver::of(queue)?;
        let durable = match self.cache {
            Cache::Unsafe => false,
            Cache::Writethrough | Cache::DirectSync => true,
            Cache::None | Cache::Writeback => durability == Durability::Durable,
        };
        let align = self.facts.memory_align;
        let transfer = Transfer::write(self.open.clone(), offset, from, align, durable);
        Ok(driver.submit(self.aio, transfer))
    }

    fn offload(
        &self,
        queue: &Queue,
        work: impl FnOnce(&OpenFile) -> Result<Value> + Send + 'static,
    ) -> Completion {
        let open = self.open.clone();
        match Driver::of(queue) {
            Ok(driver) => driver.offload(move || work(&open)),
            Err(error) => Completion::ready(Err(error)),
        }
    }
}

impl Storage for HostFile {
    fn name(&self) -> &str {
        &self.open.name
    }

    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn end(&self) -> u64 {
        // ORDER: pairs with the store after a completed change of length, so that whoever sees the
        // new end also finds it in force.
        self.open.end.load(Ordering::Acquire)
    }

    fn read(&self, queue: &Queue, offset: u64, into: Segments) -> Completion {
        self.start_read(queue, offset, into).unwrap_or_else(|error| Completion::ready(Err(error)))
    }

    fn write(
        &self,
        queue: &Queue,
        offset: u64,
        from: Segments,
        durability: Durability,
    ) -> Completion {
        self.start_write(queue, offset, from, durability)
            .unwrap_or_else(|error| Completion::ready(Err(error)))
    }

    fn flush(&self, queue: &Queue) -> Completion {
        if self.cache == Cache::Unsafe || self.facts.read_only {
            return Completion::ready(Ok(Value::Unit));
        }
        self.offload(queue, OpenFile::sync)
    }

    fn manage(&self, queue: &Queue, change: Manage) -> Completion {
        if let Err(error) = self.check_writable(shape::verb(change)) {
            return Completion::ready(Err(error));
        }
        let facts = self.facts;
        self.offload(queue, move |open| shape::apply(open, &facts, change))
    }

    fn status(&self, queue: &Queue, offset: u64, length: u64) -> Completion {
        self.offload(queue, move |open| shape::status(open, offset, length).map(Value::Extent))
    }

    fn allocated_bytes(&self) -> Option<u64> {
        // The kernel counts in sectors of 512 bytes, whatever the file system's block.
        rustix::fs::fstat(&self.open.fd).ok().map(|found| found.st_blocks as u64 * 512)
    }

    fn buffered(&self) -> Option<Arc<dyn Storage>> {
        let flags = rustix::fs::fcntl_getfl(&self.open.fd).ok()?;
        rustix::fs::fcntl_setfl(&self.open.fd, flags - OFlags::DIRECT).ok()?;
        self.open.direct_align.store(1, Ordering::Relaxed);
        let cache = self.cache.through_page_cache();
        let aio = if self.aio == Aio::Native { Aio::Threads } else { self.aio };
        Some(Arc::new(HostFile {
            open: self.open.clone(),
            facts: Facts { request_align: 1, memory_align: 1, ..self.facts },
            host_facts: self.host_facts.clone(),
            aio,
            cache,
        }))
    }
}

impl fmt::Debug for HostFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostFile({}, aio={}, cache={})", self.open.name, self.aio, self.cache)
    }
}
