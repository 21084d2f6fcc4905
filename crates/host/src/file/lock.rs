//! Image locks, the same as QEMU's, so that its tools and ours never write one image at a time.
//!
//! An opener puts shared byte locks on the open file description: byte 100 + n for each permission n
//! that it uses, byte 200 + n for each that it does not grant to others. Then it looks whether
//! anybody else refuses what it uses, or uses what it refuses:
//!
//! ```text
//!               used (100 + n)                          refused to others (200 + n)
//! reader        consistent read (0)                     write (1), resize (3)
//! writer        consistent read (0), write (1),         write (1), resize (3)
//!               resize (3)
//! ```
//!
//! Lock first, look then: of two openers at one instant at least one sees the other.
//! The kernel drops the locks when the description is closed, however the process ends.
//!
//! Deliberately absent: waiting for a lock.

use std::fmt::Write as _;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use stillpoint_io::{Access, Error, FileId, Kind, Result};

const CONSISTENT_READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;

const USED: u64 = 100;
const REFUSED: u64 = 200;

/// Locks the image for `access`, or says who holds it.
pub(crate) fn lock(fd: BorrowedFd<'_>, name: &str, id: FileId, access: Access) -> Result<()> {
    let used: &[u64] = match access {
        Access::Read => &[CONSISTENT_READ],
        Access::Write => &[CONSISTENT_READ, WRITE, RESIZE],
        Access::ReadUnlocked => return Ok(()),
    };
    let refused = &[WRITE, RESIZE];
    let bytes = || used.iter().map(|n| USED + n).chain(refused.iter().map(|n| REFUSED + n));
    for byte in bytes() {
        if let Err(errno) = control(fd, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
            match errno {
                libc::EAGAIN | libc::EACCES => return Err(busy(name, id, access)),
                // No locks on this file system; going on without is what QEMU does, too.
                libc::ENOLCK | libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS => {
                    tracing::warn!("{name}: the file system has no locks; the image goes unlocked");
                    return Ok(());
                }
                errno => return Err(Error::from_errno("lock the image", errno).file(name)),
            }
        }
    }
    let conflicts = used.iter().map(|n| REFUSED + n).chain(refused.iter().map(|n| USED + n));
    for byte in conflicts {
        match control(fd, libc::F_OFD_GETLK, libc::F_WRLCK, byte) {
            Ok(kind) if kind == libc::F_UNLCK as i16 => {}
            Ok(_) => {
                unlock(fd);
                return Err(busy(name, id, access));
            }
            Err(errno) => return Err(Error::from_errno("lock the image", errno).file(name)),
        }
    }
    Ok(())
}

/// Gives all locks back. Closing would do it, too, but a ring may hold on to the description for a
/// moment after its last completion.
pub(crate) fn unlock(fd: BorrowedFd<'_>) {
    let _ = control_range(fd, libc::F_OFD_SETLK, libc::F_UNLCK, USED, REFUSED + 100 - USED);
}

/// One lock operation on one byte; what kind of lock the kernel reports.
fn control(fd: BorrowedFd<'_>, command: i32, kind: i32, byte: u64) -> Result<i16, i32> {
    control_range(fd, command, kind, byte, 1)
}

fn control_range(
    fd: BorrowedFd<'_>,
    command: i32,
    kind: i32,
    start: u64,
    length: u64,
) -> Result<i16, i32> {
    // SAFETY: a flock is a plain record for which zeros are a valid value.
    let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = start as i64;
    lock.l_len = length as i64;
    // SAFETY: the record lives through the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock.l_type),
        _ => Err(crate::errno()),
    }
}

fn busy(name: &str, id: FileId, access: Access) -> Error {
    let holders = holders(id);
    let why = match (holders.as_str(), access) {
        ("", Access::Write) => "somebody else uses the image".to_owned(),
        ("", _) => "somebody else writes to the image".to_owned(),
        (holders, _) => format!("the image is in use by {holders}"),
    };
    let remedy = match access {
        Access::Write => "stop it first, or open the image for reading once it is free",
        _ => "stop it first, or read without a lock if a torn view is good enough",
    };
    Error::new(Kind::Busy, "lock the image", why).file(name).remedy(remedy)
}

/// Who holds image locks on the file, as far as this process may know: "qemu-nbd (process 4711)".
fn holders(id: FileId) -> String {
    let mut text = String::new();
    let Ok(processes) = std::fs::read_dir("/proc") else { return text };
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let folder = process.path();
        let Ok(descriptors) = std::fs::read_dir(folder.join("fd")) else { continue };
        let holds = descriptors.flatten().any(|descriptor| {
            let same = std::fs::metadata(descriptor.path())
                .is_ok_and(|found| found.dev() == id.device && found.ino() == id.inode);
            same && {
                let info = folder.join("fdinfo").join(descriptor.file_name());
                std::fs::read_to_string(info).is_ok_and(|info| has_image_lock(&info))
            }
        });
        if holds {
            let command = std::fs::read_to_string(folder.join("comm")).unwrap_or_default();
            let separator = if text.is_empty() { "" } else { ", " };
            let this = if pid == std::process::id() { "this " } else { "" };
            let _ = write!(text, "{separator}{} ({this}process {pid})", command.trim_end());
        }
    }
    text
}

/// Whether a descriptor's information lists an image lock: `lock: 1: OFDLCK ADVISORY READ -1 08:01:42 100 101`.
fn has_image_lock(info: &str) -> bool {
    info.lines().filter(|line| line.starts_with("lock:") && line.contains("OFDLCK")).any(|line| {
        let mut words = line.split_whitespace().rev();
        words.next();
        let first = words.next().and_then(|word| word.parse::<u64>().ok());
        first.is_some_and(|first| (USED..REFUSED + 100).contains(&first))
    })
}
