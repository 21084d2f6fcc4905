//! What is found out about a file when it is opened, without changing a byte of it.
//!
//! | fact | source |
//! |---|---|
//! | file system | the magic number of `statfs` |
//! | alignment of direct I/O | `statx` (Linux 6.1), else trying reads |
//! | punching | known per file system, else trying it beyond the end, which changes no byte |
//! | zeroing, reserving | known per file system; cannot be tried without changing the file |
//! | reflink | a clone request that every reflinking file system refuses as invalid |
//! | FUA | `queue/fua` of the device in sysfs |
//! | growth | measured per file system (see the design's figures) |
//!
//! Whatever cannot be found out gets the safe answer.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, FallocateFlags, StatxFlags, fallocate, fstatfs, major, minor, statx};
use rustix::io::Errno;
use stillpoint_io::{BLOCK, GrowMeans, Segments};

/// A kind of file system, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileSystem {
    /// ext4 (or its older kin).
    Ext4,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
    /// Memory.
    Tmpfs,
    /// A network file system.
    Nfs,
    /// An overlay of others.
    Overlay,
    /// Something behind FUSE.
    Fuse,
    /// No file system: a block device.
    BlockDevice,
    /// Any other, by its magic number.
    Other(u64),
}

impl FileSystem {
    pub(crate) fn of(fd: &OwnedFd) -> FileSystem {
        let magic = fstatfs(fd).map_or(0, |found| found.f_type as u64);
        match magic as u32 {
            0xef53 => FileSystem::Ext4,
            0x5846_5342 => FileSystem::Xfs,
            0x9123_683e => FileSystem::Btrfs,
            0x0102_1994 => FileSystem::Tmpfs,
            0x6969 => FileSystem::Nfs,
            0x794c_7630 => FileSystem::Overlay,
            0x6573_5546 => FileSystem::Fuse,
            _ => FileSystem::Other(magic),
        }
    }

    /// How a file grows best, and in which steps (bytes).
    pub(crate) fn growth(self) -> (GrowMeans, u64) {
        const STEP: u64 = 16 << 20;
        match self {
            FileSystem::Xfs | FileSystem::Ext4 => (GrowMeans::Fallocate, STEP),
            _ => (GrowMeans::Truncate, STEP),
        }
    }

    pub(crate) fn can_zero_range(self) -> bool {
        use FileSystem::{BlockDevice, Btrfs, Ext4, Xfs};
        matches!(self, Ext4 | Xfs | Btrfs | BlockDevice)
    }

    pub(crate) fn can_fallocate(self) -> bool {
        use FileSystem::{Btrfs, Ext4, Tmpfs, Xfs};
        matches!(self, Ext4 | Xfs | Btrfs | Tmpfs)
    }

    /// Whether a block size that it reports is its unit of allocation (elsewhere it is a transfer size).
    fn reports_block(self) -> bool {
        use FileSystem::{Btrfs, Ext4, Xfs};
        matches!(self, Ext4 | Xfs | Btrfs)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileSystem::Ext4 => f.write_str("ext4"),
            FileSystem::Xfs => f.write_str("xfs"),
            FileSystem::Btrfs => f.write_str("btrfs"),
            FileSystem::Tmpfs => f.write_str("tmpfs"),
            FileSystem::Nfs => f.write_str("nfs"),
            FileSystem::Overlay => f.write_str("overlay"),
            FileSystem::Fuse => f.write_str("fuse"),
            FileSystem::BlockDevice => f.write_str("block device"),
            FileSystem::Other(magic) => write!(f, "file system {magic:#x}"),
        }
    }
}

/// What the host knows about a file beyond [`stillpoint_io::Facts`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// Where it lies.
    pub file_system: FileSystem,
    /// The file can be cloned within its file system; `None`: not known (it is open for reading).
    pub reflink: Option<bool>,
    /// A durable write costs the device one write, not a flush of its whole cache; `None`: not known.
    pub fua: Option<bool>,
}

impl HostFacts {
    pub(crate) fn of(fd: &OwnedFd, file_system: FileSystem, writable: bool) -> HostFacts {
        let reflink = if writable { Some(can_reflink(fd)) } else { None };
        HostFacts { file_system, reflink, fua: has_fua(fd, file_system) }
    }
}

/// The unit of allocation in bytes, a power of two.
pub(crate) fn block(fd: &OwnedFd, file_system: FileSystem) -> u32 {
    if file_system == FileSystem::BlockDevice {
        return device_number(fd, libc::BLKPBSZGET).unwrap_or(BLOCK as u32);
    }
    let reported = fstatfs(fd).map_or(0, |found| found.f_bsize as u64);
    match u32::try_from(reported) {
        Ok(block) if file_system.reports_block() && block.is_power_of_two() => block,
        _ => BLOCK as u32,
    }
}

/// A number that a block device tells by `ioctl`.
fn device_number(fd: &OwnedFd, request: libc::Ioctl) -> Option<u32> {
    let mut number: libc::c_int = 0;
    // SAFETY: these requests write one int, which lives through the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut number) };
    (result == 0 && number > 0).then_some(number as u32)
}

/// What direct I/O wants: alignment of memory, and of offsets and lengths, in bytes.
///
/// The descriptor is open for direct I/O. `None`: the file does not do it after all.
pub(crate) fn direct_alignment(fd: &OwnedFd, length: u64) -> Option<(u32, u32)> {
    const DIOALIGN: u32 = StatxFlags::DIOALIGN.bits();
    if let Ok(found) = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && found.stx_mask & DIOALIGN != 0
    {
        let (memory, offset) = (found.stx_dio_mem_align, found.stx_dio_offset_align);
        if memory == 0 || offset == 0 {
            return None;
        }
        if memory.is_power_of_two() && offset.is_power_of_two() {
            return Some((memory, offset));
        }
    }
    // An empty file refuses nothing, so trying says nothing; nor does a file shorter than a block.
    if length < BLOCK as u64 {
        return Some((BLOCK as u32, BLOCK as u32));
    }
    let memory = Segments::alloc(2 * BLOCK);
    let (start, _) = memory.pieces().next().expect("one piece");
    let works = |offset: usize, length: usize| {
        // SAFETY: the range lies within the memory allocated above.
        let count = unsafe { libc::pread(fd.as_raw_fd(), start.add(offset).cast(), length, 0) };
        count >= 0
    };
    let align = [512, BLOCK];
    let offset = align.into_iter().find(|&align| works(0, align))?;
    let memory = align.into_iter().find(|&align| works(align, BLOCK)).unwrap_or(BLOCK);
    Some((memory as u32, offset as u32))
}

/// Whether holes can be punched: known, or tried beyond the end, where there is nothing to lose.
pub(crate) fn can_punch(fd: &OwnedFd, file_system: FileSystem, writable: bool, end: u64) -> bool {
    use FileSystem::{BlockDevice, Btrfs, Ext4, Tmpfs, Xfs};
    match file_system {
        _ if !writable => false,
        Ext4 | Xfs | Btrfs | Tmpfs => true,
        // Zeroing by discard; a device that cannot do it refuses when asked.
        BlockDevice => has_queue_number(fd, "write_zeroes_max_bytes").unwrap_or(false),
        _ => {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let beyond = end.next_multiple_of(BLOCK as u64) + (1 << 20);
            loop {
                match fallocate(fd, mode, beyond, BLOCK as u64) {
                    Ok(()) => return true,
                    Err(Errno::INTR) => {}
                    Err(_) => return false,
                }
            }
        }
    }
}

/// Whether clones work: one that overlaps itself is refused as invalid by those who can, as
/// unsupported by those who cannot.
fn can_reflink(fd: &OwnedFd) -> bool {
    let range = libc::file_clone_range {
        src_fd: i64::from(fd.as_raw_fd()),
        src_offset: 0,
        src_length: BLOCK as u64,
        dest_offset: 0,
    };
    // SAFETY: the record lives through the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FICLONERANGE, &raw const range) };
    result == 0 || crate::errno() == libc::EINVAL
}

/// Whether the device beneath has FUA.
fn has_fua(fd: &OwnedFd, file_system: FileSystem) -> Option<bool> {
    use FileSystem::{BlockDevice, Ext4, Xfs};
    // Elsewhere the device number is none of a device.
    matches!(file_system, Ext4 | Xfs | BlockDevice).then(|| has_queue_number(fd, "fua")).flatten()
}

/// Whether the device's queue has a number above zero under `name` in sysfs.
fn has_queue_number(fd: &OwnedFd, name: &str) -> Option<bool> {
    let found = rustix::fs::fstat(fd).ok()?;
    let is_device = rustix::fs::FileType::from_raw_mode(found.st_mode).is_block_device();
    let device = if is_device { found.st_rdev } else { found.st_dev };
    let folder = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    // A partition has its queue one folder up.
    ["queue", "../queue"].into_iter().find_map(|queue| {
        let text = std::fs::read_to_string(format!("{folder}/{queue}/{name}")).ok()?;
        Some(text.trim().parse::<u64>().ok()? > 0)
    })
}

/// How many extents a file lies in.
pub(crate) fn extent_count(fd: &OwnedFd, file_system: FileSystem) -> Option<u64> {
    /// `struct fsxattr`.
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        flags: u32,
        extent_size: u32,
        extent_count: u32,
        project: u32,
        cow_extent_size: u32,
        padding: [u8; 8],
    }
    /// `struct fiemap` without room for extents: the kernel only counts.
    #[repr(C)]
    #[derive(Default)]
    struct ExtentMap {
        start: u64,
        length: u64,
        flags: u32,
        mapped_extents: u32,
        extent_count: u32,
        reserved: u32,
    }
    const FSGETXATTR: libc::Ioctl = 0x801c_581f as libc::Ioctl;
    const FIEMAP: libc::Ioctl = 0xc020_660b as libc::Ioctl;
    let fd = fd.as_fd().as_raw_fd();
    if file_system == FileSystem::Xfs {
        let mut found = Attributes::default();
        // SAFETY: the record is what the request fills in, and lives through the call.
        if unsafe { libc::ioctl(fd, FSGETXATTR, &raw mut found) } == 0 {
            return Some(u64::from(found.extent_count));
        }
    }
    let mut map = ExtentMap { length: u64::MAX, ..ExtentMap::default() };
    // SAFETY: as above; `extent_count` is 0, so that nothing is written behind the record.
    (unsafe { libc::ioctl(fd, FIEMAP, &raw mut map) } == 0).then_some(u64::from(map.mapped_extents))
}
