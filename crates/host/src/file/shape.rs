//! A file's shape: its length, its holes, its reserved space. Blocking; runs on the thread pool.
//!
//! Block devices take the same calls: `fallocate` on them zeroes for certain or refuses, which the
//! plain discard ioctl does not promise.
//!
//! Deliberately absent: waiting for I/O in flight. The kernel makes all of these but growth by
//! `ftruncate` wait for direct I/O on the file (R9); whoever calls them batches them.

use std::sync::atomic::Ordering;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ftruncate, seek};
use rustix::io::Errno;
use stillpoint_io::{Error, Extent, Facts, GrowMeans, Kind, Manage, Result, Value};

use super::OpenFile;

/// What a change is called in messages.
pub(crate) fn verb(change: Manage) -> &'static str {
    match change {
        Manage::Grow { .. } => "grow the file",
        Manage::Shrink { .. } => "shrink the file",
        Manage::Punch { .. } => "punch a hole",
        Manage::ZeroRange { .. } => "zero a range",
    }
}

/// Makes the change, waiting for it.
pub(crate) fn apply(open: &OpenFile, facts: &Facts, change: Manage) -> Result<Value> {
    let failed = |error: Error| error.file(&open.name);
    match change {
        Manage::Grow { end, means } => grow(open, facts, end, means).map_err(failed)?,
        Manage::Shrink { end } => shrink(open, facts, end).map_err(failed)?,
        Manage::Punch { offset, length } => {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            change_range(open, verb(change), mode, offset, length).map_err(failed)?;
        }
        Manage::ZeroRange { offset, length } => {
            let mode = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            change_range(open, verb(change), mode, offset, length).map_err(failed)?;
        }
    }
    Ok(Value::Unit)
}

fn grow(open: &OpenFile, facts: &Facts, end: u64, means: GrowMeans) -> Result<()> {
    const OP: &str = "grow the file";
    let _changing = open.shape.lock().unwrap();
    let old = open.end.load(Ordering::Acquire);
    if end <= old {
        return Ok(());
    }
    if facts.fixed_size {
        let why = format!("a block device of {old} bytes cannot become {end} bytes long");
        return Err(Error::new(Kind::NoSpace, OP, why).remedy("make the device larger"));
    }
    let by_fallocate = match means {
        GrowMeans::Fallocate if facts.can_fallocate => {
            // R3: nothing is in flight beyond `old`, because `end` has not moved yet.
            match retry(|| fallocate(&open.fd, FallocateFlags::empty(), old, end - old)) {
                Ok(()) => true,
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => false,
                Err(errno) => {
                    // Some of it may have been reserved; nobody will use it.
                    let _ = ftruncate(&open.fd, old);
                    return Err(failure(OP, errno).at(old));
                }
            }
        }
        _ => false,
    };
    if !by_fallocate {
        retry(|| ftruncate(&open.fd, end)).map_err(|errno| failure(OP, errno).at(old))?;
    }
    // ORDER: releases the new length to writers that check against it (R3).
    open.end.store(end, Ordering::Release);
    Ok(())
}

fn shrink(open: &OpenFile, facts: &Facts, end: u64) -> Result<()> {
    const OP: &str = "shrink the file";
    let _changing = open.shape.lock().unwrap();
    let old = open.end.load(Ordering::Acquire);
    if end >= old {
        return Ok(());
    }
    if facts.fixed_size {
        let why = "a block device has a fixed size";
        return Err(Error::new(Kind::Unsupported, OP, why));
    }
    // R3: writers are held to the new end before the file is cut.
    open.end.store(end, Ordering::Release);
    retry(|| ftruncate(&open.fd, end)).map_err(|errno| {
        open.end.store(old, Ordering::Release);
        failure(OP, errno).at(end)
    })
}

fn change_range(
    open: &OpenFile,
    op: &'static str,
    mode: FallocateFlags,
    offset: u64,
    length: u64,
) -> Result<()> {
    // What lies beyond the end is zero already, and must not be given space.
    let end = offset.saturating_add(length).min(open.end.load(Ordering::Acquire));
    if offset >= end {
        return Ok(());
    }
    retry(|| fallocate(&open.fd, mode, offset, end - offset))
        .map_err(|errno| failure(op, errno).at(offset))
}

/// What the run of bytes at `offset` is.
///
/// The kernel counts dirty pages over unwritten space as data, so an answer is never older than the
/// writes that completed before it was asked for.
pub(crate) fn status(open: &OpenFile, offset: u64, length: u64) -> Result<Extent> {
    const OP: &str = "look for holes";
    if length == 0 || offset.checked_add(length).is_none_or(|end| end > i64::MAX as u64) {
        let why = "the range is empty or ends beyond any file";
        return Err(Error::new(Kind::Invalid, OP, why).file(&open.name).at(offset));
    }
    let hole = |length| Ok(Extent { length, data: false });
    let data = |length| Ok(Extent { length, data: true });
    let failed = |errno| Err(failure(OP, errno).file(&open.name).at(offset));
    match retry(|| seek(&open.fd, SeekFrom::Data(offset))) {
        Ok(start) if start > offset => return hole(length.min(start - offset)),
        Ok(_) => {}
        // Nothing but a hole up to the end, or beyond it.
        Err(Errno::NXIO) => return hole(length),
        // A file system that cannot tell; beyond the end there is nothing all the same.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => {
            let end = open.end.load(Ordering::Acquire);
            return if offset >= end { hole(length) } else { data(length.min(end - offset)) };
        }
        Err(errno) => return failed(errno),
    }
    match retry(|| seek(&open.fd, SeekFrom::Hole(offset))) {
        Ok(end) if end > offset => data(length.min(end - offset)),
        // Punched or cut between the two calls.
        Ok(_) | Err(Errno::NXIO) => hole(1),
        Err(errno) => failed(errno),
    }
}

fn failure(op: &'static str, errno: Errno) -> Error {
    let error = Error::from_errno(op, errno.raw_os_error());
    match error.kind() {
        Kind::NoSpace => error.remedy("free some space on the file system"),
        _ => error,
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}
