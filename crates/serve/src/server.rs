//! A server's life: images opened, sockets bound, clients handed to queues, an orderly end.
//!
//! ```text
//!   control loop ── opens disks, accepts clients ──┬─▶ queue-0: connections ─┐
//!   (the caller's thread)                          ├─▶ queue-1: connections ─┼─▶ Disk (shared)
//!                                                  └─▶ ...                   ┘     │
//!                                       background: growth, punching ◀─────────────┘
//! ```
//!
//! 1. Images first, sockets second: whoever can connect can be served, and a socket is only taken
//!    over from a dead server by one that holds the images.
//! 2. Clients go to the queues in turn and stay there.
//! 3. At the end, in this order: no new clients; requests in flight end; connections close; disks
//!    are flushed and closed clean; threads end.
//!
//! Deliberately absent: which options exist and what they are called (that is the command line's).

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use event_listener::Event;
use futures_util::future::{Either, join_all, select};
use std::pin::pin;
use stillpoint_engine::{Disk, Options};
use stillpoint_host::net::Address;
use stillpoint_host::signals::StopSignals;
use stillpoint_host::{
    Aio, Cache, HostFiles, Listener, LoopOptions, LoopThread, Reach, Stream, run as run_loop,
    spawn_thread,
};
use stillpoint_io::{Background, Error, Files, Kind, Queue, Result};

use crate::nbd::budget::Budget;
use crate::nbd::connection::{self, Allowance, Hall};
use crate::nbd::export::Exports;
use crate::notify;
use crate::stop::Stop;

/// One image to serve.
#[derive(Clone, Debug)]
pub struct Image {
    /// The export's name.
    pub name: String,
    /// The image's file.
    pub path: String,
    /// By which interface it is read and written.
    pub aio: Aio,
    /// What stands between a write and the disk.
    pub cache: Cache,
    /// Which files the names inside it may open (F2).
    pub reach: Reach,
    /// How the engine opens it.
    pub options: Options,
}

/// What to serve, where, and within which bounds.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The images; each becomes an export.
    pub images: Vec<Image>,
    /// Where to listen for NBD clients, beside the sockets that a service manager hands over.
    pub listen: Vec<Address>,
    /// How many threads serve clients.
    pub queue_count: usize,
    /// How many clients may be connected at once.
    pub client_count_max: usize,
    /// How many bytes all requests in flight may occupy.
    pub memory_bytes: u64,
    /// A file that holds the process's id while it serves.
    pub pid_file: Option<PathBuf>,
    /// SIGTERM, SIGINT and SIGHUP end the server in order.
    pub catch_signals: bool,
    /// What each client is allowed.
    pub allowance: Allowance,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            images: Vec::new(),
            listen: Vec::new(),
            queue_count: 1,
            client_count_max: 128,
            memory_bytes: 256 << 20,
            pid_file: None,
            catch_signals: false,
            allowance: Allowance::default(),
        }
    }
}

/// Serves until `stop` is said, or a signal comes; calls `ready` with the addresses in force once
/// clients can connect.
///
/// # Errors
/// If an image or a socket is refused, or if closing an image fails.
pub fn run(plan: Plan, stop: Stop, ready: impl FnOnce(&[Address])) -> Result<()> {
    let signals = if plan.catch_signals { Some(StopSignals::catch()?) } else { None };
    let ring = plan.images.iter().any(|image| image.aio == Aio::IoUring);
    let options = LoopOptions {
        aio: if ring { Aio::IoUring } else { Aio::Native },
        ..LoopOptions::default()
    };
    let background = Arc::new(spawn_thread("background", options)?);
    let queues = (0..plan.queue_count.max(1))
        .map(|index| spawn_thread(&format!("queue-{index}"), options))
        .collect::<Result<Vec<_>>>()?;
    // The control loop waits for sockets and signals; a ring would buy it nothing.
    let control = LoopOptions { aio: Aio::Threads, ..LoopOptions::default() };
    run_loop(control, async |queue| {
        let exports = open_all(&queue, &plan, &background).await?;
        let served = serve_all(&queue, &plan, &exports, &queues, &stop, signals, ready).await;
        let closed = close_all(&queue, exports.disks()).await;
        served.and(closed)
    })??;
    for thread in queues {
        thread.join()?;
    }
    match Arc::into_inner(background) {
        Some(thread) => thread.join(),
        // A disk that could not be closed may still hold it; its jobs ended with the disk's.
        None => Ok(()),
    }
}

async fn open_all(queue: &Queue, plan: &Plan, background: &Arc<LoopThread>) -> Result<Exports> {
    let mut exports = Exports::new();
    for image in &plan.images {
        let files = HostFiles::new(image.aio, image.cache).reaching(image.reach.clone());
        let files: Arc<dyn Files> = Arc::new(files);
        let background: Arc<dyn Background> = background.clone();
        let opened = Disk::open(queue, &files, &background, &image.path, image.options.clone());
        let added = match opened.await {
            Ok(disk) => exports.add(&image.name, "", disk),
            Err(error) => Err(error),
        };
        if let Err(error) = added {
            // What was opened before is left as clean as it was found.
            let _ = close_all(queue, exports.disks()).await;
            return Err(error);
        }
    }
    Ok(exports)
}

/// Closes every disk, whatever becomes of the others; the first failure counts.
async fn close_all(queue: &Queue, disks: &[Arc<Disk>]) -> Result<()> {
    let mut result = Ok(());
    for disk in disks {
        if let Err(error) = disk.close(queue).await {
            tracing::error!("{error}");
            result = result.and(Err(error));
        }
    }
    result
}

async fn serve_all(
    queue: &Queue,
    plan: &Plan,
    exports: &Exports,
    queues: &[LoopThread],
    stop: &Stop,
    signals: Option<StopSignals>,
    ready: impl FnOnce(&[Address]),
) -> Result<()> {
    let mut listeners = Listener::adopted()?;
    for address in &plan.listen {
        listeners.push(Listener::bind(address)?);
    }
    if listeners.is_empty() {
        return Err(Error::new(Kind::Invalid, "serve", "there is no socket to listen on"));
    }
    let _pid_file = plan.pid_file.as_deref().map(PidFile::create).transpose()?;
    let addresses: Vec<Address> =
        listeners.iter().map(|listener| listener.address().clone()).collect();
    let reception = Reception {
        hall: Hall {
            exports: Arc::new(exports.clone()),
            budget: Budget::new(plan.memory_bytes),
            allowance: plan.allowance,
            stop: stop.clone(),
        },
        queues,
        next_queue: AtomicUsize::new(0),
        seats: Arc::new(Seats::new(plan.client_count_max)),
    };
    notify::ready();
    ready(&addresses);
    let accepting = listeners.into_iter().map(|listener| reception.accept_all(queue, listener));
    let accepting = pin!(join_all(accepting));
    let signal = pin!(async {
        match &signals {
            Some(signals) => {
                match signals.next(queue).await {
                    Ok(signal) => tracing::info!(?signal, "stopping"),
                    Err(error) => tracing::error!(%error, "signals cannot be received: stopping"),
                }
                stop.say();
            }
            None => stop.heard().await,
        }
    });
    // Accepting ends once the word is said, whoever says it.
    if let Either::Right((_, accepting)) = select(accepting, signal).await {
        accepting.await;
    }
    notify::stopping();
    reception.seats.all_empty().await;
    Ok(())
}

/// Takes clients in and hands them to queues.
struct Reception<'a> {
    hall: Hall,
    queues: &'a [LoopThread],
    next_queue: AtomicUsize,
    seats: Arc<Seats>,
}

impl Reception<'_> {
    async fn accept_all(&self, queue: &Queue, listener: Listener) {
        loop {
            let accepted = pin!(listener.accept(queue));
            let stop = pin!(self.hall.stop.heard());
            match select(accepted, stop).await {
                Either::Left((Ok(stream), _)) => self.admit(stream),
                Either::Left((Err(error), _)) => {
                    // Mostly a lack of descriptors, which passes when a client leaves.
                    tracing::error!("{error}");
                    queue.sleep(Duration::from_millis(100)).await;
                }
                Either::Right(_) => return,
            }
        }
    }

    fn admit(&self, stream: Stream) {
        let peer = stream.peer();
        let Some(seat) = self.seats.take() else {
            let max = self.seats.max;
            tracing::warn!(peer, "a client is turned away: {max} are connected, the most allowed");
            return;
        };
        let index = self.next_queue.fetch_add(1, Ordering::Relaxed) % self.queues.len();
        let hall = self.hall.clone();
        self.queues[index].run(Box::new(move |queue| {
            Box::pin(async move {
                let _seat = seat;
                let _bomb = AbortOnPanic;
                tracing::debug!(peer, queue = index, "a client has connected");
                match connection::serve(&queue, &stream, &hall).await {
                    Ok(end) => tracing::debug!(peer, ?end, "a client has left"),
                    // It hung up without good-bye, as many do.
                    Err(error) if error.errno().is_some_and(hung_up) => {
                        tracing::debug!(peer, "a client has hung up: {error}");
                    }
                    Err(error) => tracing::warn!(peer, "a client is put out: {error}"),
                }
            })
        }));
    }
}

/// A request that panicked may hold locks for ever: other guests would stall silently. Clients of a
/// server that has gone reconnect to the next one.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a request panicked; the server cannot go on");
            std::process::abort();
        }
    }
}

/// How many clients there are, and may be.
struct Seats {
    max: usize,
    taken: AtomicUsize,
    left: Event,
}

struct Seat(Arc<Seats>);

impl Seats {
    fn new(max: usize) -> Seats {
        Seats { max: max.max(1), taken: AtomicUsize::new(0), left: Event::new() }
    }

    fn take(self: &Arc<Self>) -> Option<Seat> {
        let took = self.taken.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |taken| {
            (taken < self.max).then_some(taken + 1)
        });
        took.is_ok().then(|| Seat(self.clone()))
    }

    async fn all_empty(&self) {
        loop {
            let left = self.left.listen();
            if self.taken.load(Ordering::Acquire) == 0 {
                return;
            }
            left.await;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
        self.0.left.notify(usize::MAX);
    }
}

/// Whether an error of a socket says that the other side has gone.
fn hung_up(errno: i32) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    [BrokenPipe, ConnectionReset].contains(&std::io::Error::from_raw_os_error(errno).kind())
}

/// The file with the process's id, locked; it goes when the server does.
struct PidFile {
    path: PathBuf,
    _locked: File,
}

impl PidFile {
    fn create(path: &Path) -> Result<PidFile> {
        const WRITE: &str = "write the pid file";
        let failed = |error: &std::io::Error| Error::from_std(WRITE, error).file(path.display());
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path).map_err(|error| failed(&error))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(Error::new(Kind::Busy, WRITE, "another server that runs has it")
                .file(path.display())
                .remedy("stop that one first, or name another file"));
        }
        file.set_len(0).map_err(|error| failed(&error))?;
        writeln!(file, "{}", std::process::id()).map_err(|error| failed(&error))?;
        Ok(PidFile { path: path.to_owned(), _locked: file })
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn seats_are_bounded_and_come_back() {
        let seats = Arc::new(Seats::new(2));
        let (first, second) = (seats.take().unwrap(), seats.take().unwrap());
        assert!(seats.take().is_none());
        drop(first);
        let third = seats.take().unwrap();
        let mut all_empty = Box::pin(seats.all_empty());
        assert!((&mut all_empty).now_or_never().is_none());
        drop((second, third));
        assert!((&mut all_empty).now_or_never().is_some());
    }

    #[test]
    fn a_pid_file_goes_with_its_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pid");
        let file = PidFile::create(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        drop(file);
        assert!(!path.exists());
        let file = PidFile::create(&path).unwrap();
        let busy = PidFile::create(&path).err().unwrap().to_string();
        assert!(busy.contains("another server"), "{busy}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        drop(file);
        let error = PidFile::create(&folder.path().join("no/pid")).err().unwrap().to_string();
        assert!(error.contains("no/pid") && error.contains("pid file"), "{error}");
    }
}
