//! Sockets that wait for clients.
//!
//! A unix socket's file that a killed server left behind is known by its refusing a connection, and
//! is taken over; one that answers belongs to a living server. The file goes when its listener does.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with, sockopt,
};
use stillpoint_io::{Error, FileId, Kind, Queue, Result};

use super::{Address, Stream, failure, next_generation, resolve};
use crate::event_loop::driver::{Driver, Interest};

const BACKLOG: i32 = 4096;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// The first descriptor that a service manager hands over.
const FIRST_ADOPTED: i32 = 3;

/// A listening socket; any loop can accept on it.
pub struct Listener {
    fd: OwnedFd,
    generation: u32,
    address: Address,
    /// The unix socket's file, if it is ours to remove.
    file: Option<FileId>,
}

impl Listener {
    /// Listens at `address`.
    ///
    /// # Errors
    /// `Busy` if a living server listens there already.
    pub fn bind(address: &Address) -> Result<Listener> {
        match address {
            Address::Unix(path) => Listener::bind_unix(path, address),
            Address::Tcp(host) => Listener::bind_tcp(host),
        }
    }

    fn new(fd: OwnedFd, address: Address, file: Option<FileId>) -> Listener {
        Listener { fd, generation: next_generation(), address, file }
    }

    fn bind_unix(path: &Path, address: &Address) -> Result<Listener> {
        const OP: &str = "listen";
        let failed = |errno| failure(OP, errno, address);
        let place = unix_address(path, OP)?;
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None);
        let fd = fd.map_err(failed)?;
        match bind(&fd, &place) {
            Err(Errno::ADDRINUSE) => {
                reclaim(path, &place, address)?;
                bind(&fd, &place).map_err(failed)?;
            }
            result => result.map_err(failed)?,
        }
        let file = std::fs::symlink_metadata(path).ok().map(|found| id_of(&found));
        let listener = Listener::new(fd, address.clone(), file);
        listen(&listener.fd, BACKLOG).map_err(failed)?;
        Ok(listener)
    }

    fn bind_tcp(host: &str) -> Result<Listener> {
        const OP: &str = "listen";
        let mut first = None;
        for place in resolve(host, OP)? {
            let attempt = || {
                let family =
                    if place.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let fd = socket_with(family, SocketType::STREAM, FLAGS, None)?;
                sockopt::set_socket_reuseaddr(&fd, true)?;
                bind(&fd, &place)?;
                listen(&fd, BACKLOG)?;
                Ok(fd)
            };
            match attempt() {
                Ok(fd) => {
                    let bound = name_of(&fd).unwrap_or_else(|| place.to_string());
                    return Ok(Listener::new(fd, Address::Tcp(bound), None));
                }
                Err(errno) => first = first.or(Some(errno)),
            }
        }
        let errno = first.unwrap_or(Errno::ADDRNOTAVAIL);
        let error = failure(OP, errno, &Address::Tcp(host.to_owned()));
        Err(match errno {
            Errno::ADDRINUSE => {
                let why = "another program listens there already";
                Error::new(Kind::Busy, OP, why).file(format!("tcp:{host}"))
            }
            _ => error,
        })
    }

    /// The sockets that a service manager opened for this process (`LISTEN_FDS`), in its order.
    ///
    /// # Errors
    /// If it handed over something else than listening stream sockets.
    pub fn adopted() -> Result<Vec<Listener>> {
        let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
        if number("LISTEN_PID") != Some(std::process::id()) {
            return Ok(Vec::new());
        }
        let count = number("LISTEN_FDS").unwrap_or(0).min(1024) as i32;
        (FIRST_ADOPTED..FIRST_ADOPTED + count).map(adopt).collect()
    }

    /// Where it listens; a TCP port that was asked for as 0 is the one given.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Waits for a client.
    ///
    /// # Errors
    /// `Limit` when the process has too many descriptors open: wait a little before the next call.
    pub async fn accept(&self, queue: &Queue) -> Result<Stream> {
        let driver = Driver::of(queue)?;
        loop {
            match accept_with(&self.fd, FLAGS) {
                Ok(fd) => return Ok(Stream::new(fd)),
                Err(Errno::AGAIN) => {
                    let fd = self.fd.as_raw_fd();
                    driver.exhausted(fd, self.generation, Interest::Read);
                    driver.ready(fd, self.generation, Interest::Read).await?;
                }
                // The client has gone before it was served, or a signal came.
                Err(Errno::CONNABORTED | Errno::INTR | Errno::PROTO) => {}
                Err(errno) => return Err(failure("accept a client", errno, &self.address)),
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Only while it is still our file: a later server may have taken the name over.
        if let (Address::Unix(path), Some(ours)) = (&self.address, self.file)
            && std::fs::symlink_metadata(path).is_ok_and(|found| id_of(&found) == ours)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.address)
    }
}

fn id_of(found: &std::fs::Metadata) -> FileId {
    FileId { device: found.dev(), inode: found.ino() }
}

/// A unix socket's address.
pub(super) fn unix_address(path: &Path, op: &'static str) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|_| {
        let why = format!("{}: a unix socket's path has at most 107 bytes", path.display());
        Error::new(Kind::Invalid, op, why).remedy("choose a shorter path")
    })
}

/// Removes the socket file of a server that has died.
fn reclaim(path: &Path, place: &SocketAddrUnix, address: &Address) -> Result<()> {
    const OP: &str = "listen";
    let busy = |why: &str| Error::new(Kind::Busy, OP, why).file(address);
    let is_socket =
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if !is_socket {
        return Err(busy("something that is no socket has this name").remedy("choose another path"));
    }
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)
        .map_err(|errno| failure(OP, errno, address))?;
    match connect(&probe, place) {
        Err(Errno::CONNREFUSED) => {}
        Ok(()) | Err(Errno::AGAIN | Errno::INPROGRESS) => {
            let remedy = "stop it, or choose another path";
            return Err(busy("another server listens there already").remedy(remedy));
        }
        Err(errno) => return Err(failure(OP, errno, address)),
    }
    tracing::warn!("{address}: taking over the socket of a server that has gone");
    std::fs::remove_file(path).map_err(|error| Error::from_std(OP, &error).file(address))
}

/// The host and port of a bound TCP socket.
fn name_of(fd: impl AsFd) -> Option<String> {
    let name = rustix::net::getsockname(fd).ok()?;
    Some(std::net::SocketAddr::try_from(name).ok()?.to_string())
}

fn adopt(fd: i32) -> Result<Listener> {
    const OP: &str = "adopt a listening socket";
    // SAFETY: the service manager says that this descriptor is this process's to own; it is adopted
    // once, at the start.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let invalid = |why| Error::new(Kind::Invalid, OP, why).file(format!("fd {}", fd.as_raw_fd()));
    if !sockopt::socket_acceptconn(&fd).unwrap_or(false) {
        return Err(invalid("it is no listening socket"));
    }
    let failed = |errno: Errno| Error::from_errno(OP, errno.raw_os_error());
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(failed)?;
    rustix::io::ioctl_fionbio(&fd, true).map_err(failed)?;
    let name = rustix::net::getsockname(&fd).map_err(failed)?;
    let address = match std::net::SocketAddr::try_from(name.clone()) {
        Ok(name) => Address::Tcp(name.to_string()),
        Err(_) => {
            let name = SocketAddrUnix::try_from(name).map_err(failed)?;
            let path = name.path_bytes().unwrap_or_default();
            Address::Unix(String::from_utf8_lossy(path).into_owned().into())
        }
    };
    // The file is the service manager's.
    Ok(Listener::new(fd, address, None))
}
