//! What opening an image reads, counted: the same for every size of disk (F3), and bounded whatever the
//! image claims (F2). The files lie in memory, where each operation is on record and ends at once.
//!
//! Deliberately absent: what a person is told then (`crates/cli/tests/hostile.rs`).

// Under `shuttle` nothing runs outside its own tests.
#![cfg(not(feature = "shuttle"))]

use std::any::Any;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use stillpoint_engine::offline::create::{Qcow2Options, create_qcow2};
use stillpoint_engine::{Disk, ImageFormat, Options};
use stillpoint_io::memory::Operation;
use stillpoint_io::queue::{Job, Runtime};
use stillpoint_io::{Access, Background, Error, Files, Kind, MemoryFile, Queue, Result, Storage};

/// A queue on which nothing waits.
struct AtOnce;

impl Runtime for AtOnce {
    fn spawn(&self, _: LocalBoxFuture<'static, ()>) {
        unreachable!("opening spawns nothing")
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> LocalBoxFuture<'static, ()> {
        unreachable!("opening never sleeps")
    }

    fn random(&self) -> u64 {
        4
    }

    fn driver(&self) -> &dyn Any {
        self
    }
}

#[derive(Debug)]
struct Never;

impl Background for Never {
    fn run(&self, _: Job) {
        unreachable!("opening leaves nothing to do")
    }
}

/// One file, whatever it is called.
#[derive(Debug)]
struct OneFile(Arc<MemoryFile>);

impl Files for OneFile {
    fn open<'a>(
        &'a self,
        _: &'a Queue,
        name: &'a str,
        beside: Option<&'a str>,
        _: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        let file: Arc<dyn Storage> = self.0.clone();
        let found = match beside {
            None => Ok(file),
            Some(_) if name == "itself" => Ok(file),
            Some(_) => Err(Error::from_errno("open", 2).file(name)),
        };
        Box::pin(async move { found })
    }

    fn create<'a>(
        &'a self,
        _: &'a Queue,
        _: &'a str,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        let file: Arc<dyn Storage> = self.0.clone();
        Box::pin(async move { Ok(file) })
    }
}

fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("something waits in memory"),
    }
}

fn queue() -> Queue {
    Queue::new(Rc::new(AtOnce))
}

/// A new image of `size` bytes.
fn image(size: u64, cluster_size: u64) -> Arc<MemoryFile> {
    let file = Arc::new(MemoryFile::new("disk", 0));
    let options = Qcow2Options { size, cluster_size, ..Qcow2Options::default() };
    now(create_qcow2(&queue(), &OneFile(file.clone()), "disk", &options)).unwrap();
    file.record();
    file
}

/// What an opening has read.
#[derive(Debug, PartialEq, Eq)]
struct Cost {
    reads: usize,
    bytes: u64,
    changes: usize,
}

/// Opens the image, and tells what that took.
fn open(file: &Arc<MemoryFile>, access: Access) -> (Result<Arc<Disk>>, Cost) {
    let files: Arc<dyn Files> = Arc::new(OneFile(file.clone()));
    let background: Arc<dyn Background> = Arc::new(Never);
    let options = Options { format: Some(ImageFormat::Qcow2), access, ..Options::default() };
    file.record();
    let disk = now(Disk::open(&queue(), &files, &background, "disk", options));
    let operations = file.record();
    let lengths = operations.iter().filter_map(|operation| match operation {
        Operation::Read { length, .. } => Some(*length),
        _ => None,
    });
    let (reads, bytes) = lengths.fold((0, 0), |(reads, bytes), length| (reads + 1, bytes + length));
    (disk, Cost { reads, bytes, changes: operations.len() - reads })
}

#[test]
fn opening_costs_the_same_whatever_the_size() {
    for access in [Access::Read, Access::Write] {
        let (small, small_cost) = open(&image(1 << 30, 65536), access);
        let (large, large_cost) = open(&image(10 << 40, 65536), access);
        assert_eq!((small.unwrap().size(), large.unwrap().size()), (1 << 30, 10 << 40));
        assert_eq!(small_cost.reads, large_cost.reads);
        assert_eq!(small_cost.changes, large_cost.changes);
        // An L1 entry of 8 bytes maps 512 MiB.
        assert_eq!(large_cost.bytes - small_cost.bytes, 8 * (10 * 2048 - 2));
    }
}

#[test]
fn a_refused_header_costs_itself_and_nothing_is_changed() {
    let u32s = |at: u64, value: u32| (at, value.to_be_bytes().to_vec());
    let u64s = |at: u64, value: u64| (at, value.to_be_bytes().to_vec());
    for (at, bytes) in [
        u32s(0, 0),
        u32s(4, 1),
        u32s(20, 8),
        u32s(20, u32::MAX),
        u64s(24, u64::MAX),
        u32s(32, 1),
        u32s(32, 9),
        u32s(36, u32::MAX),
        u64s(40, 1 << 63),
        u64s(40, 1 << 40),
        u64s(48, 8),
        u32s(56, u32::MAX),
        u32s(60, u32::MAX),
        u64s(72, 1 << 5),
        u64s(72, 4),
        u32s(96, 7),
        u32s(100, u32::MAX),
    ] {
        for access in [Access::Read, Access::Write] {
            let file = image(1 << 30, 65536);
            file.poke(at, &bytes);
            let (disk, cost) = open(&file, access);
            let error = disk.expect_err("it is refused");
            assert!(matches!(error.kind(), Kind::Corrupt | Kind::Unsupported), "{at}: {error}");
            assert_eq!(error.file_name(), Some("disk"), "{at}: {error}");
            assert!(cost.reads <= 2 && cost.bytes <= 104 + 65536, "{at}: {cost:?}");
            assert_eq!(cost.changes, 0, "{at}");
        }
    }
}

#[test]
fn the_longest_tables_are_what_an_image_can_make_an_opening_read() {
    // An L1 table of 32 MiB and a refcount table of 8 MiB, both of them holes.
    let file = image(1 << 30, 2 << 20);
    let grown = Arc::new(MemoryFile::new("disk", 1 << 30));
    grown.poke(0, &file.bytes()[..2 << 20]);
    grown.poke(36, &(4u32 << 20).to_be_bytes());
    grown.poke(40, &(512u64 << 20).to_be_bytes());
    grown.poke(48, &(256u64 << 20).to_be_bytes());
    grown.poke(56, &4u32.to_be_bytes());
    let (disk, cost) = open(&grown, Access::Write);
    disk.unwrap();
    assert_eq!(cost, Cost { reads: 4, bytes: 104 + ((2 + 32 + 8) << 20), changes: 0 });
}

#[test]
fn a_chain_that_comes_back_is_noticed_before_it_is_read_again() {
    let file = image(1 << 30, 65536);
    file.poke(0x400, b"itself");
    file.poke(8, &0x400u64.to_be_bytes());
    file.poke(16, &6u32.to_be_bytes());
    let (disk, cost) = open(&file, Access::Read);
    let error = disk.expect_err("it is refused");
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
    assert_eq!(cost, Cost { reads: 2, bytes: 104 + 65536, changes: 0 });
    // A name is never options, nor an address: nothing is asked for by it.
    file.poke(0x400, b"json:{");
    let (disk, cost) = open(&file, Access::Read);
    assert_eq!(disk.expect_err("it is refused").kind(), Kind::Unsupported);
    assert_eq!(cost.reads, 2);
}

#[test]
fn bitmaps_that_a_writer_must_mark_are_read_once_and_bounded() {
    let file = image(1 << 30, 65536);
    // The first extension becomes the bitmaps', with the longest directory, and the list ends.
    file.poke(88, &1u64.to_be_bytes());
    file.poke(112, &[0x2385_2875u32.to_be_bytes(), 24u32.to_be_bytes()].concat());
    file.poke(120, &[65535u32.to_be_bytes(), [0; 4]].concat());
    file.poke(128, &(1024u64 * 65535).to_be_bytes());
    file.poke(136, &(1u64 << 30).to_be_bytes());
    file.poke(144, &[0; 8]);
    let (disk, _) = open(&file, Access::Read);
    disk.expect("a reader does not look at bitmaps");
    let (disk, cost) = open(&file, Access::Write);
    let error = disk.expect_err("an entry of zeros is none");
    assert!(error.to_string().contains("bitmap"), "{error}");
    assert!(cost.bytes <= (64 << 20) + (1 << 20), "{cost:?}");
}
