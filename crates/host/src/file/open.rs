//! Finding and opening files by name.
//!
//! F2: a name is a plain path, never parsed as options, whatever it looks like; one that stands inside
//! an image opens only what lies within its [`Reach`].
//!
//! What cannot be had is replaced by the nearest thing, said aloud: a file that refuses direct I/O
//! goes through the page cache, and Linux AIO without direct I/O becomes the thread pool.
//!
//! Deliberately absent: following names inside images, and judging where they lead (`reach`).

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use stillpoint_io::{
    Access, Error, Facts, FileId, Files, Kind, Queue, Result, Storage, Value, path_beside,
};

use super::facts::{self, FileSystem, HostFacts};
use super::reach::{Place, Reach};
use super::{HostFile, OpenFile, lock};
use crate::event_loop::Aio;
use crate::event_loop::driver::Driver;

/// What stands between a write and the disk; the meanings are those of QEMU's `cache=`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cache {
    /// Direct I/O; durable at a flush.
    None,
    /// The page cache; durable at a flush.
    Writeback,
    /// The page cache, and every write is durable.
    Writethrough,
    /// Direct I/O, and every write is durable.
    DirectSync,
    /// The page cache, and flushes do nothing. A crash of the host loses the image.
    Unsafe,
}

impl Cache {
    /// All of them, in the order of the help text.
    pub const ALL: [Cache; 5] =
        [Cache::None, Cache::Writeback, Cache::Writethrough, Cache::DirectSync, Cache::Unsafe];

    fn is_direct(self) -> bool {
        matches!(self, Cache::None | Cache::DirectSync)
    }

    /// The same promise through the page cache.
    pub(crate) fn through_page_cache(self) -> Cache {
        match self {
            Cache::None => Cache::Writeback,
            Cache::DirectSync => Cache::Writethrough,
            other => other,
        }
    }
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cache::None => "none",
            Cache::Writeback => "writeback",
            Cache::Writethrough => "writethrough",
            Cache::DirectSync => "directsync",
            Cache::Unsafe => "unsafe",
        })
    }
}

impl FromStr for Cache {
    type Err = Error;

    fn from_str(text: &str) -> Result<Cache> {
        Cache::ALL.into_iter().find(|cache| cache.to_string() == text).ok_or_else(|| {
            let names = "none, writeback, writethrough, directsync, unsafe";
            Error::new(Kind::Invalid, "choose a cache mode", format!("'{text}' is none of {names}"))
        })
    }
}

/// Opens the host's files, all in one cache mode and with one engine.
#[derive(Clone, Debug)]
pub struct HostFiles {
    aio: Aio,
    cache: Cache,
    reach: Reach,
}

/// How a file comes to be there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// It is there.
    Expected,
    /// It is made, or emptied if it is there.
    Fresh,
}

impl HostFiles {
    /// Files whose reads and writes go by `aio`, in the mode `cache`. Names inside images lead to
    /// files beside them, and no further.
    pub fn new(aio: Aio, cache: Cache) -> HostFiles {
        HostFiles { aio, cache, reach: Reach::Beside }
    }

    /// The same, where names inside images lead as far as `reach`.
    pub fn reaching(self, reach: Reach) -> HostFiles {
        HostFiles { reach, ..self }
    }

    /// As [`Files::open`], with what only the host knows about the file.
    pub async fn open_host(
        &self,
        queue: &Queue,
        name: &str,
        beside: Option<&str>,
        access: Access,
    ) -> Result<HostFile> {
        let (files, path) = (self.clone(), path_of(name, beside));
        let beside = beside.map(str::to_owned);
        offload(queue, move || {
            // F2: judged before it is opened or locked; what was found is held until it is open.
            let place = match &beside {
                Some(image) => files.reach.find(&path, image)?,
                None => None,
            };
            let link = place.as_ref().map(Place::link);
            let target = link.as_ref().unwrap_or(&path);
            files.open_now(&path, target, access, Presence::Expected)
        })
        .await
    }

    /// As [`Files::create`], with what only the host knows about the file.
    pub async fn create_host(&self, queue: &Queue, name: &str) -> Result<HostFile> {
        let (files, path) = (self.clone(), path_of(name, None));
        offload(queue, move || files.open_now(&path, &path, Access::Write, Presence::Fresh)).await
    }

    /// Opens `target`; the file is called by `path`, which is the same unless it has been judged.
    fn open_now(
        &self,
        path: &Path,
        target: &Path,
        access: Access,
        presence: Presence,
    ) -> Result<HostFile> {
        let name = path.display().to_string();
        let writable = access == Access::Write;
        let (fd, is_new) = open_fd(target, writable, presence)
            .map_err(|errno| refusal(&name, access, presence, errno))?;
        let failed = |op| {
            let name = name.clone();
            move |errno: Errno| Error::from_errno(op, errno.raw_os_error()).file(name)
        };
        let found = rustix::fs::fstat(&fd).map_err(failed("look at the file"))?;
        let kind = FileType::from_raw_mode(found.st_mode);
        check_type(&name, kind)?;
        let id = FileId { device: found.st_dev, inode: found.st_ino };
        lock::lock(fd.as_fd(), &name, id, access)?;
        if presence == Presence::Fresh && kind.is_file() {
            rustix::fs::ftruncate(&fd, 0).map_err(failed("empty the file"))?;
        }
        if is_new && self.cache != Cache::Unsafe {
            sync_folder(path);
        }

        let end = match kind {
            FileType::BlockDevice => rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0)),
            _ => rustix::fs::fstat(&fd).map(|found| found.st_size as u64),
        };
        let end = end.map_err(failed("look at the file"))?;
        let file_system = match kind {
            FileType::BlockDevice => FileSystem::BlockDevice,
            _ => FileSystem::of(&fd),
        };
        let mode = self.settle_mode(&fd, &name, end).map_err(failed("set the file's mode"))?;
        let fs_block = facts::block(&fd, file_system);
        let request_align = match (mode.direct, kind) {
            (None, _) => 1,
            (Some((_, offset)), FileType::BlockDevice) => offset,
            // R9: whole blocks of the file system, not merely what direct I/O asks for.
            (Some((_, offset)), _) => offset.max(fs_block),
        };
        let facts = Facts {
            id,
            request_align,
            memory_align: mode.direct.map_or(1, |(memory, _)| memory),
            fs_block,
            can_punch: facts::can_punch(&fd, file_system, writable, end),
            can_zero_range: writable && file_system.can_zero_range(),
            can_fallocate: writable && file_system.can_fallocate(),
            fixed_size: kind.is_block_device(),
            growth: file_system.growth(),
            read_only: !writable,
        };
        let host_facts = HostFacts::of(&fd, file_system, writable && kind.is_file());
        let open = OpenFile {
            fd,
            name,
            end: AtomicU64::new(end),
            direct_align: AtomicU32::new(mode.direct.map_or(1, |(_, offset)| offset)),
            dsync_works: AtomicBool::new(true),
            nowait_works: AtomicBool::new(true),
            shape: Mutex::new(()),
        };
        Ok(HostFile { open: Arc::new(open), facts, host_facts, aio: mode.aio, cache: mode.cache })
    }

    /// Turns direct I/O on where it is asked for and to be had.
    fn settle_mode(&self, fd: &OwnedFd, name: &str, length: u64) -> Result<Settled, Errno> {
        // The file was opened without blocking, for the sake of pipes; a ring would take that flag
        // for a wish to fail rather than wait.
        let mut flags = rustix::fs::fcntl_getfl(fd)? - OFlags::NONBLOCK;
        // Saves looking at the access time with each read; allowed to the file's owner only.
        if rustix::fs::fcntl_setfl(fd, flags | OFlags::NOATIME).is_ok() {
            flags |= OFlags::NOATIME;
        } else {
            rustix::fs::fcntl_setfl(fd, flags)?;
        }
        let mut settled = Settled { direct: None, cache: self.cache, aio: self.aio };
        if self.cache.is_direct() {
            if rustix::fs::fcntl_setfl(fd, flags | OFlags::DIRECT).is_ok() {
                settled.direct = facts::direct_alignment(fd, length);
                // Pages left in the cache cost every direct read a look for dirty ones.
                let _ = rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::DontNeed);
            }
            if settled.direct.is_none() {
                rustix::fs::fcntl_setfl(fd, flags)?;
                settled.cache = self.cache.through_page_cache();
                tracing::warn!(
                    "{name}: no direct I/O here; cache={} becomes {}",
                    self.cache,
                    settled.cache
                );
            }
        }
        if settled.direct.is_none() && self.aio == Aio::Native {
            settled.aio = Aio::Threads;
            tracing::warn!(
                "{name}: aio=native needs direct I/O (cache=none or directsync); aio=threads is used"
            );
        }
        Ok(settled)
    }
}

/// The modes in force for one file.
struct Settled {
    /// Alignment of memory and of offsets, if I/O is direct.
    direct: Option<(u32, u32)>,
    cache: Cache,
    aio: Aio,
}

impl Files for HostFiles {
    fn open<'a>(
        &'a self,
        queue: &'a Queue,
        name: &'a str,
        beside: Option<&'a str>,
        access: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        Box::pin(async move {
            let file = self.open_host(queue, name, beside, access).await?;
            Ok(Arc::new(file) as Arc<dyn Storage>)
        })
    }

    fn create<'a>(
        &'a self,
        queue: &'a Queue,
        name: &'a str,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        Box::pin(
            async move { Ok(Arc::new(self.create_host(queue, name).await?) as Arc<dyn Storage>) },
        )
    }
}

type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Runs `work` on the thread pool and brings its value home.
async fn offload<T: Send + 'static>(
    queue: &Queue,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let place: Arc<Mutex<Option<T>>> = Arc::default();
    let put = place.clone();
    let done = Driver::of(queue)?.offload(move || {
        *put.lock().unwrap() = Some(work()?);
        Ok(Value::Unit)
    });
    done.await?;
    let value = place.lock().unwrap().take();
    Ok(value.expect("the work has put its value there"))
}

fn path_of(name: &str, beside: Option<&str>) -> PathBuf {
    beside.map_or_else(|| name.to_owned(), |file| path_beside(name, file)).into()
}

/// Opens the file; true with it if it was made just now.
fn open_fd(path: &Path, writable: bool, presence: Presence) -> Result<(OwnedFd, bool), Errno> {
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    // Without blocking, because a pipe would wait for its other end.
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
    if presence == Presence::Fresh {
        let mode = Mode::from_raw_mode(0o644);
        match rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
            Err(Errno::EXIST) => {}
            result => return result.map(|fd| (fd, true)),
        }
    }
    rustix::fs::open(path, flags, Mode::empty()).map(|fd| (fd, false))
}

fn refusal(name: &str, access: Access, presence: Presence, errno: Errno) -> Error {
    let op = match presence {
        Presence::Expected => "open the file",
        Presence::Fresh => "create the file",
    };
    let error = Error::from_errno(op, errno.raw_os_error()).file(name);
    match errno {
        Errno::NOENT if presence == Presence::Fresh => error.remedy("create its folder first"),
        Errno::ISDIR => wrong_type(name, "a folder"),
        Errno::NXIO => wrong_type(name, "a pipe or a socket"),
        Errno::ROFS | Errno::ACCESS | Errno::PERM if access == Access::Write => {
            error.remedy("open it for reading only, or change its permissions")
        }
        _ => error,
    }
}

fn wrong_type(name: &str, what: &str) -> Error {
    let why = format!("it is {what}, not a regular file or a block device");
    Error::new(Kind::Invalid, "open the file", why).file(name)
}

fn check_type(name: &str, kind: FileType) -> Result<()> {
    let what = match kind {
        FileType::RegularFile | FileType::BlockDevice => return Ok(()),
        FileType::Directory => "a folder",
        FileType::Fifo => "a pipe",
        FileType::CharacterDevice => "a character device",
        _ => "something else",
    };
    Err(wrong_type(name, what))
}

/// Makes a new file's name durable; where the folder cannot be synced, the file's own flush has to do.
fn sync_folder(path: &Path) {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECTORY;
    if let Ok(folder) = rustix::fs::open(folder, flags, Mode::empty()) {
        let _ = rustix::fs::fsync(folder);
    }
}
