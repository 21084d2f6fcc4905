//! A server over memory, on a real socket, whose storage a test can hold back and make fail.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use stillpoint_engine::{Disk, ImageFormat, Options};
use stillpoint_host::net::Address;
use stillpoint_host::{Listener, LoopOptions, run, spawn_thread};
use stillpoint_io::{Access, Background, Files, MemoryFile, Queue, Result, Storage};
use stillpoint_serve::nbd::budget::Budget;
use stillpoint_serve::nbd::client::Client;
use stillpoint_serve::nbd::connection::{self, Allowance, End, Hall};
use stillpoint_serve::nbd::export::Exports;
use stillpoint_serve::nbd::handshake::ReplyStyle;
use stillpoint_serve::stop::Stop;

/// Every name opens the same file.
#[derive(Debug)]
struct OneFile(Arc<MemoryFile>);

impl Files for OneFile {
    fn open<'a>(
        &'a self,
        _queue: &'a Queue,
        _name: &'a str,
        _beside: Option<&'a str>,
        _access: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        let file: Arc<dyn Storage> = self.0.clone();
        async move { Ok(file) }.boxed_local()
    }

    fn create<'a>(
        &'a self,
        queue: &'a Queue,
        name: &'a str,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        self.open(queue, name, None, Access::Write)
    }
}

/// A raw disk in memory, served as "disk".
pub(crate) struct Served {
    pub(crate) file: Arc<MemoryFile>,
    /// How each connection ended, in the order in which they did.
    pub(crate) ends: mpsc::Receiver<Result<End>>,
    pub(crate) stop: Stop,
    socket: PathBuf,
    _folder: tempfile::TempDir,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub(crate) fn new(size_bytes: u64) -> Served {
        Served::with(size_bytes, Access::Write, Allowance::default())
    }

    pub(crate) fn with(size_bytes: u64, access: Access, allowance: Allowance) -> Served {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let file = Arc::new(MemoryFile::new("disk", size_bytes));
        let stop = Stop::new();
        let (ended, ends) = mpsc::channel();
        let (opened, is_open) = mpsc::channel();
        let listener = Listener::bind(&Address::Unix(socket.clone())).unwrap();
        let thread = std::thread::spawn({
            let (file, stop) = (file.clone(), stop.clone());
            move || {
                run(LoopOptions::default(), async |queue| {
                    let disk = open(&queue, file, access).await;
                    opened.send(()).unwrap();
                    serve(queue, disk, allowance, stop, listener, ended).await;
                })
                .unwrap();
            }
        });
        // From here on the storage's operations are the test's own.
        is_open.recv().unwrap();
        Served { file, ends, stop, socket, _folder: folder, thread: Some(thread) }
    }

    pub(crate) fn client(&self, style: ReplyStyle) -> Client {
        Client::connect(&Address::Unix(self.socket.clone()), "disk", style).unwrap()
    }

    pub(crate) fn socket(&self) -> UnixStream {
        UnixStream::connect(&self.socket).unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.file.hold(None);
        self.file.held().iter().for_each(|held| held.release());
        self.stop.say();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.expect("the server does not panic");
        }
    }
}

async fn open(queue: &Queue, file: Arc<MemoryFile>, access: Access) -> Arc<Disk> {
    let files: Arc<dyn Files> = Arc::new(OneFile(file));
    let background: Arc<dyn Background> =
        Arc::new(spawn_thread("background", LoopOptions::default()).unwrap());
    let options = Options { format: Some(ImageFormat::Raw), access, ..Options::default() };
    Disk::open(queue, &files, &background, "disk", options).await.unwrap()
}

async fn serve(
    queue: Queue,
    disk: Arc<Disk>,
    allowance: Allowance,
    stop: Stop,
    listener: Listener,
    ended: mpsc::Sender<Result<End>>,
) {
    let mut exports = Exports::new();
    exports.add("disk", "a disk in memory", disk.clone()).unwrap();
    // The smallest budget there is: two longest payloads.
    let budget = Budget::new(0);
    let hall = Hall { exports: Arc::new(exports), budget, allowance, stop: stop.clone() };
    let connections = std::rc::Rc::new(std::cell::Cell::new(0));
    loop {
        let accepted = std::pin::pin!(listener.accept(&queue));
        let stopped = std::pin::pin!(stop.heard());
        match futures_util::future::select(accepted, stopped).await {
            futures_util::future::Either::Left((stream, _)) => {
                let (hall, ended, stream) = (hall.clone(), ended.clone(), stream.unwrap());
                let (home, count) = (queue.clone(), connections.clone());
                count.set(count.get() + 1);
                queue.spawn(async move {
                    let _ = ended.send(connection::serve(&home, &stream, &hall).await);
                    count.set(count.get() - 1);
                });
            }
            futures_util::future::Either::Right(_) => break,
        }
    }
    while connections.get() > 0 {
        queue.sleep(std::time::Duration::from_millis(1)).await;
    }
    disk.close(&queue).await.unwrap();
}
