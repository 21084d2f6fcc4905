//! Connected sockets.

use std::fmt;
use std::future::poll_fn;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use stillpoint_io::{Error, Kind, Queue, Result, Segments, Value};

use super::listener::unix_address;
use super::{Address, failure, next_generation, resolve};
use crate::event_loop::driver::{Driver, Interest};

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// How many pieces go into one system call.
const IOVECS_MAX: usize = 32;
/// How many calls in a row may succeed at once before other tasks get a turn.
const AT_ONCE_MAX: u32 = 32;

/// One piece of what is sent.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// Plain bytes: a header.
    Bytes(&'a [u8]),
    /// A request's memory: a payload.
    Segments(&'a Segments),
}

impl Part<'_> {
    fn len(&self) -> usize {
        match self {
            Part::Bytes(bytes) => bytes.len(),
            Part::Segments(segments) => segments.len(),
        }
    }

    fn pieces(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        let (bytes, segments) = match self {
            Part::Bytes(bytes) => (Some((bytes.as_ptr().cast_mut(), bytes.len())), None),
            Part::Segments(segments) => (None, Some(segments.pieces())),
        };
        bytes.into_iter().chain(segments.into_iter().flatten())
    }
}

/// A connected socket. It may be used on any loop, by one reader and one writer at a time.
pub struct Stream {
    fd: OwnedFd,
    generation: u32,
    /// The last read took everything there was.
    drained: AtomicBool,
    /// Reads in a row that did not have to wait.
    at_once: AtomicU32,
}

impl Stream {
    pub(super) fn new(fd: OwnedFd) -> Stream {
        // Fails on unix sockets, which have no delay.
        let _ = sockopt::set_tcp_nodelay(&fd, true);
        Stream {
            fd,
            generation: next_generation(),
            drained: AtomicBool::new(false),
            at_once: AtomicU32::new(0),
        }
    }

    /// Connects to a server.
    ///
    /// # Errors
    /// The last address's failure, if a host has several.
    pub async fn connect(queue: &Queue, address: &Address) -> Result<Stream> {
        const OP: &str = "connect";
        let failed = |errno| failure(OP, errno, address);
        match address {
            Address::Unix(path) => {
                let place = unix_address(path, OP)?;
                let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None);
                let fd = fd.map_err(failed)?;
                // A full backlog: the server is busy accepting.
                while let Err(errno) = connect(&fd, &place) {
                    if errno != Errno::AGAIN {
                        return Err(failed(errno));
                    }
                    queue.sleep(std::time::Duration::from_millis(1)).await;
                }
                Ok(Stream::new(fd))
            }
            Address::Tcp(host) => {
                let mut error = None;
                for place in resolve_away(queue, host).await? {
                    let family =
                        if place.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                    let fd = socket_with(family, SocketType::STREAM, FLAGS, None);
                    let stream = Stream::new(fd.map_err(failed)?);
                    match connect(&stream.fd, &place) {
                        Ok(()) => return Ok(stream),
                        Err(Errno::INPROGRESS) => {
                            stream.wait(queue, Interest::Write).await?;
                            match sockopt::socket_error(&stream.fd) {
                                Ok(Ok(())) => return Ok(stream),
                                Ok(Err(errno)) | Err(errno) => error = Some(errno),
                            }
                        }
                        Err(errno) => error = Some(errno),
                    }
                }
                Err(failed(error.unwrap_or(Errno::ADDRNOTAVAIL)))
            }
        }
    }

    async fn wait(&self, queue: &Queue, interest: Interest) -> Result<()> {
        let driver = Driver::of(queue)?;
        let fd = self.fd.as_raw_fd();
        driver.exhausted(fd, self.generation, interest);
        driver.ready(fd, self.generation, interest).await
    }

    /// Reads what is there, at most `into.len()` bytes, waiting for the first; 0 at the end.
    pub async fn read(&self, queue: &Queue, into: &mut [u8]) -> Result<usize> {
        let asked = into.len();
        self.receive(queue, asked, |fd| {
            // SAFETY: the buffer is borrowed exclusively for the call.
            (asked, unsafe { libc::recv(fd, into.as_mut_ptr().cast(), asked, 0) })
        })
        .await
    }

    /// Fills all of `into`.
    ///
    /// # Errors
    /// `Io` if the peer ends the stream before that.
    pub async fn read_segments(&self, queue: &Queue, into: &Segments) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let count = self
                .receive(queue, into.len() - done, |fd| {
                    let mut iovecs = Iovecs::new();
                    let asked = iovecs.fill(into.pieces(), done);
                    let mut message = iovecs.message();
                    // SAFETY: the pieces lie in memory that the segments keep alive.
                    (asked, unsafe { libc::recvmsg(fd, &raw mut message, 0) })
                })
                .await?;
            if count == 0 {
                let why = format!("the peer ended the stream {} bytes early", into.len() - done);
                return Err(Error::new(Kind::Io, "receive", why));
            }
            done += count;
        }
        Ok(())
    }

    /// Makes `call`, which tells how many bytes it asked for and what it got, until it has got some.
    async fn receive(
        &self,
        queue: &Queue,
        left: usize,
        mut call: impl FnMut(i32) -> (usize, isize),
    ) -> Result<usize> {
        if left == 0 {
            return Ok(0);
        }
        if self.drained.load(Ordering::Relaxed) {
            self.wait(queue, Interest::Read).await?;
            self.at_once.store(0, Ordering::Relaxed);
        } else if self.at_once.fetch_add(1, Ordering::Relaxed) >= AT_ONCE_MAX {
            self.at_once.store(0, Ordering::Relaxed);
            let_others_run().await;
        }
        loop {
            let (asked, count) = call(self.fd.as_raw_fd());
            if count >= 0 {
                // The end of the stream stays readable.
                let drained = count > 0 && (count as usize) < asked;
                self.drained.store(drained, Ordering::Relaxed);
                return Ok(count as usize);
            }
            match crate::errno() {
                libc::EAGAIN => {
                    self.wait(queue, Interest::Read).await?;
                    self.at_once.store(0, Ordering::Relaxed);
                }
                libc::EINTR => {}
                errno => return Err(Error::from_errno("receive", errno)),
            }
        }
    }

    /// Sends all of `parts`, in as few calls as the socket allows.
    pub async fn write_all(&self, queue: &Queue, parts: &[Part<'_>]) -> Result<()> {
        let length: usize = parts.iter().map(Part::len).sum();
        let mut done = 0;
        while done < length {
            let count = {
                let mut iovecs = Iovecs::new();
                iovecs.fill(parts.iter().flat_map(Part::pieces), done);
                let message = iovecs.message();
                // SAFETY: the pieces are borrowed for this whole call, or kept alive by segments.
                unsafe {
                    libc::sendmsg(self.fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
                }
            };
            if count >= 0 {
                done += count as usize;
                continue;
            }
            match crate::errno() {
                libc::EAGAIN => self.wait(queue, Interest::Write).await?,
                libc::EINTR => {}
                errno => return Err(Error::from_errno("send", errno)),
            }
        }
        Ok(())
    }

    /// Ends the stream in both directions: readers see its end, writers fail. For ending a
    /// connection that other tasks still wait on.
    pub fn shutdown(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Tells the peer that nothing more will be sent.
    pub fn finish(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
    }

    /// Who is at the other end, for messages.
    pub fn peer(&self) -> String {
        let name = rustix::net::getpeername(&self.fd).ok().flatten();
        let tcp = name.and_then(|name| std::net::SocketAddr::try_from(name).ok());
        match tcp {
            Some(name) => name.to_string(),
            None => match sockopt::socket_peercred(&self.fd) {
                Ok(peer) => format!("process {}", peer.pid.as_raw_nonzero()),
                Err(_) => "a local client".to_owned(),
            },
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({})", self.fd.as_raw_fd())
    }
}

/// A short list of pieces on the stack.
struct Iovecs {
    list: [libc::iovec; IOVECS_MAX],
    count: usize,
}

impl Iovecs {
    fn new() -> Iovecs {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Iovecs { list: [empty; IOVECS_MAX], count: 0 }
    }

    /// Takes as many pieces as there is room for, after the first `skip` bytes; how many bytes.
    fn fill(&mut self, pieces: impl Iterator<Item = (*mut u8, usize)>, mut skip: usize) -> usize {
        let mut bytes = 0;
        for (start, len) in pieces {
            if skip >= len {
                skip -= len;
                continue;
            }
            if self.count == IOVECS_MAX {
                break;
            }
            // SAFETY: `skip` lies within the piece.
            let start = unsafe { start.add(skip) };
            self.list[self.count] = libc::iovec { iov_base: start.cast(), iov_len: len - skip };
            self.count += 1;
            bytes += len - skip;
            skip = 0;
        }
        bytes
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: a msghdr is a plain record for which zeros are a valid value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.list.as_mut_ptr();
        message.msg_iovlen = self.count as _;
        message
    }
}

/// Lets every other runnable task run once.
async fn let_others_run() {
    let mut yielded = false;
    poll_fn(|cx| {
        if yielded {
            return Poll::Ready(());
        }
        yielded = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Resolves a host off the loop.
async fn resolve_away(queue: &Queue, host: &str) -> Result<Vec<std::net::SocketAddr>> {
    let place: Arc<Mutex<Vec<_>>> = Arc::default();
    let (put, host) = (place.clone(), host.to_owned());
    let work = move || {
        *put.lock().unwrap() = resolve(&host, "connect")?;
        Ok(Value::Unit)
    };
    Driver::of(queue)?.offload(work).await?;
    let found = std::mem::take(&mut *place.lock().unwrap());
    Ok(found)
}
