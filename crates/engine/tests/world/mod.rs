//! Files in memory, and a loop that runs a disk on them.
//!
//! Operations end at once unless a test holds them, so a future waits for background work alone, which
//! has a turn whenever it does. Deliberately absent: power cuts, which are the simulator's.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use stillpoint_engine::offline::check::{Repair, Report, check};
use stillpoint_engine::offline::create::{Qcow2Options, create_qcow2};
use stillpoint_engine::{Disk, ImageFormat, Options};
use stillpoint_io::queue::{Job, Runtime};
use stillpoint_io::{
    Access, Background, Durability, Error, Files, MemoryFile, Queue, Result, Segments, Storage,
};

/// Files by name, and the loop that everything runs on.
#[derive(Clone)]
pub(crate) struct World(Rc<Loop>);

struct Loop {
    shared: Arc<Shared>,
    tasks: Rc<Tasks>,
}

#[derive(Default)]
struct Shared {
    files: Mutex<BTreeMap<String, Arc<MemoryFile>>>,
    jobs: Mutex<VecDeque<Job>>,
}

#[derive(Default)]
struct Tasks(RefCell<Vec<LocalBoxFuture<'static, ()>>>);

impl Runtime for Tasks {
    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        self.0.borrow_mut().push(task);
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> LocalBoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }

    fn random(&self) -> u64 {
        4
    }

    fn driver(&self) -> &dyn Any {
        self
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

impl Background for Shared {
    fn run(&self, job: Job) {
        self.jobs.lock().unwrap().push_back(job);
    }
}

impl Files for Shared {
    fn open<'a>(
        &'a self,
        _: &'a Queue,
        name: &'a str,
        _: Option<&'a str>,
        _: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        let found = self.files.lock().unwrap().get(name).cloned();
        let found = found.map(|file| file as Arc<dyn Storage>);
        Box::pin(async move { found.ok_or_else(|| Error::from_errno("open", 2).file(name)) })
    }

    fn create<'a>(
        &'a self,
        queue: &'a Queue,
        name: &'a str,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        self.insert(MemoryFile::new(name, 0));
        self.open(queue, name, None, Access::Write)
    }
}

impl Shared {
    fn insert(&self, file: MemoryFile) -> Arc<MemoryFile> {
        let name = file.name().to_owned();
        let file = Arc::new(file);
        self.files.lock().unwrap().insert(name, file.clone());
        file
    }
}

impl World {
    pub(crate) fn new() -> World {
        World(Rc::new(Loop { shared: Arc::default(), tasks: Rc::default() }))
    }

    pub(crate) fn queue(&self) -> Queue {
        Queue::new(self.0.tasks.clone())
    }

    /// Puts a file there under its own name.
    pub(crate) fn insert(&self, file: MemoryFile) -> Arc<MemoryFile> {
        self.0.shared.insert(file)
    }

    /// The file called `name`.
    pub(crate) fn file(&self, name: &str) -> Arc<MemoryFile> {
        self.0.shared.files.lock().unwrap()[name].clone()
    }

    /// Creates an image called `disk`.
    pub(crate) fn create(&self, options: &Qcow2Options) {
        self.run(create_qcow2(&self.queue(), &*self.0.shared, "disk", options)).unwrap();
    }

    pub(crate) fn try_open(&self, options: Options) -> Result<Arc<Disk>> {
        let files: Arc<dyn Files> = self.0.shared.clone();
        let background: Arc<dyn Background> = self.0.shared.clone();
        self.run(Disk::open(&self.queue(), &files, &background, "disk", options))
    }

    /// Opens the image called `disk` for writing.
    pub(crate) fn open(&self) -> Arc<Disk> {
        let format = Some(ImageFormat::Qcow2);
        self.try_open(Options { format, ..Options::default() }).unwrap()
    }

    /// One turn for whatever is under way beside the tests' own futures.
    pub(crate) fn turn(&self) {
        let jobs: Vec<Job> = self.0.shared.jobs.lock().unwrap().drain(..).collect();
        for job in jobs {
            let task = job(self.queue());
            self.0.tasks.0.borrow_mut().push(task);
        }
        let tasks = std::mem::take(&mut *self.0.tasks.0.borrow_mut());
        let mut context = Context::from_waker(Waker::noop());
        for mut task in tasks {
            if task.as_mut().poll(&mut context).is_pending() {
                self.0.tasks.0.borrow_mut().push(task);
            }
        }
    }

    /// One turn for a future, and one for everything else.
    pub(crate) fn poll<T>(&self, future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => {
                self.turn();
                None
            }
        }
    }

    /// The value of a future, while everything else has its turns.
    pub(crate) fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let mut turns = std::iter::repeat_with(|| self.poll(future.as_mut())).take(100_000);
        turns.find_map(|value| value).expect("it ends some day")
    }

    pub(crate) fn read(&self, disk: &Disk, offset: u64, length: u64) -> Vec<u8> {
        let into = Segments::alloc(length as usize);
        self.run(disk.read(&self.queue(), offset, into.clone())).unwrap();
        into.to_vec()
    }

    /// Everything that the guest sees.
    pub(crate) fn content(&self, disk: &Disk) -> Vec<u8> {
        self.read(disk, 0, disk.size())
    }

    pub(crate) fn write(&self, disk: &Disk, offset: u64, bytes: &[u8]) {
        let from = Segments::from_slice(bytes);
        self.run(disk.write(&self.queue(), offset, from, Durability::Volatile)).unwrap();
    }

    pub(crate) fn resize(&self, disk: &Disk, size: u64) -> Result<()> {
        self.run(disk.resize(&self.queue(), size, true))
    }

    pub(crate) fn close(&self, disk: &Disk) {
        self.run(disk.close(&self.queue())).unwrap();
    }

    /// Checks the image, which must be free of errors.
    pub(crate) fn check(&self) -> Report {
        let file: Arc<dyn Storage> = self.file("disk");
        let mut found = Vec::new();
        let queue = self.queue();
        let report = self.run(check(&queue, &file, Repair::Nothing, &mut |finding| {
            found.push(finding.to_string());
        }));
        let report = report.unwrap();
        assert_eq!(report.corruptions, 0, "{found:?}");
        report
    }
}
