//! Random operations by several tasks on several queues, run and judged.
//!
//! A [`Script`] is made before it runs, from a seed, and does not depend on what happens meanwhile;
//! so a failure can be shrunk by leaving steps out, and read by a person. Each task runs its steps
//! one after another; tasks meet each other on a few hot ranges, since that is where disks break.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use stillpoint_io::{Durability, Kind, Queue, Result, Segments, Value, completion};

use crate::chance::Chance;
use crate::coverage::GuestKind;
use crate::executor::Driver;
use crate::files::World;
use crate::oracle::{self, Oracle};
use crate::trace::Event;

/// A disk under test: what a guest can ask of it.
pub trait Target: 'static {
    /// Its size in bytes, now.
    fn size(&self) -> u64;
    /// Reads.
    fn read(&self, queue: &Queue, offset: u64, into: Segments) -> impl Future<Output = Result<()>>;
    /// Writes.
    fn write(
        &self,
        queue: &Queue,
        offset: u64,
        from: Segments,
        durability: Durability,
    ) -> impl Future<Output = Result<()>>;
    /// Makes a range read as zeros; its space may be given back if `unmap`.
    fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        unmap: bool,
        durability: Durability,
    ) -> impl Future<Output = Result<()>>;
    /// Gives a range up.
    fn discard(&self, queue: &Queue, offset: u64, length: u64) -> impl Future<Output = Result<()>>;
    /// The length of the run at `offset`, up to `length`, and whether it is known to read as zeros.
    fn status(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
    ) -> impl Future<Output = Result<(u64, bool)>>;
    /// Gives the disk another size in bytes, durably.
    fn resize(&self, queue: &Queue, size: u64) -> impl Future<Output = Result<()>>;
    /// Makes durable whatever was answered before.
    fn flush(&self, queue: &Queue) -> impl Future<Output = Result<()>>;
}

/// One request of a guest; offsets and lengths in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read.
    Read(Range<u64>),
    /// Write, durably or not.
    Write(Range<u64>, bool),
    /// Write zeroes: with space given back or not, durably or not.
    Zeroes(Range<u64>, bool, bool),
    /// Discard.
    Discard(Range<u64>),
    /// Ask what is there.
    Status(Range<u64>),
    /// Make the disk one of so many bytes.
    Resize(u64),
    /// Flush.
    Flush,
    /// Wait for so many microseconds.
    Pause(u64),
}

impl Step {
    /// The range that it is about.
    fn range(&self) -> Option<Range<u64>> {
        match self {
            Step::Read(range)
            | Step::Status(range)
            | Step::Write(range, _)
            | Step::Zeroes(range, _, _)
            | Step::Discard(range) => Some(range.clone()),
            Step::Resize(_) | Step::Flush | Step::Pause(_) => None,
        }
    }

    fn kind(&self) -> Option<GuestKind> {
        Some(match self {
            Step::Read(_) => GuestKind::Read,
            Step::Status(_) => GuestKind::Status,
            Step::Write(_, false) => GuestKind::Write,
            Step::Write(_, true) => GuestKind::DurableWrite,
            Step::Zeroes(_, false, _) => GuestKind::Zeroes,
            Step::Zeroes(_, true, _) => GuestKind::UnmappingZeroes,
            Step::Discard(_) => GuestKind::Discard,
            Step::Resize(_) => GuestKind::Resize,
            Step::Flush => GuestKind::Flush,
            Step::Pause(_) => return None,
        })
    }
}

/// Counts requests of a kind that have begun or ended.
pub(crate) fn count(under_way: &UnderWay, kind: GuestKind, change: i64) {
    let count = &under_way[kind as usize];
    count.set(count.get().wrapping_add_signed(change));
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fua = |durable: &bool| if *durable { " fua" } else { "" };
        match self {
            Step::Read(range) => write!(f, "read {range:#x?}"),
            Step::Write(range, durable) => write!(f, "write {range:#x?}{}", fua(durable)),
            Step::Zeroes(range, unmap, durable) => {
                let unmap = if *unmap { " unmap" } else { "" };
                write!(f, "zeroes {range:#x?}{unmap}{}", fua(durable))
            }
            Step::Discard(range) => write!(f, "discard {range:#x?}"),
            Step::Status(range) => write!(f, "status {range:#x?}"),
            Step::Resize(size) => write!(f, "resize to {size:#x}"),
            Step::Flush => f.write_str("flush"),
            Step::Pause(us) => write!(f, "pause {us} us"),
        }
    }
}

/// What random scripts look like.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The disk's size in bytes.
    pub size: u64,
    /// The disk's own unit in bytes: where requests like to begin and end.
    pub cluster: u64,
    /// The longest request in bytes.
    pub request_max: u64,
    /// How many tasks there are.
    pub tasks: usize,
    /// How many steps each takes.
    pub steps: usize,
    /// Every offset and length is a multiple of this, in bytes.
    pub align: u64,
    /// Sizes that the disk is given, in bytes; none: it keeps its own.
    pub sizes: Vec<u64>,
}

impl Shape {
    fn is_large(&self) -> bool {
        self.size / self.cluster > 500
    }

    /// The whole clusters around a range.
    fn clusters(&self, range: Range<u64>) -> Range<u64> {
        let start = range.start / self.cluster * self.cluster;
        start..range.end.next_multiple_of(self.cluster).min(self.size)
    }
}

/// What each task does, step by step.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// The tasks' steps.
    pub tasks: Vec<Vec<Step>>,
}

impl Script {
    /// A random script.
    pub fn random(chance: &mut Chance, shape: &Shape) -> Script {
        if chance.one_in(if shape.is_large() { 3 } else { 6 }) {
            return Script::sweep(chance, shape);
        }
        let count = if chance.one_in(if shape.is_large() { 2 } else { 6 }) {
            40
        } else {
            chance.between(1, 4)
        };
        let hot: Vec<u64> = (0..count).map(|_| chance.below(shape.size)).collect();
        // What was there is given up before anything new comes: its space is used again.
        let given_up = if chance.one_in(6) { shape.steps / 3 } else { 0 };
        let tasks = (0..shape.tasks)
            .map(|task| {
                // One of them changes the size, so that there is an order of the sizes.
                let may_resize = task == 0;
                let give_up = (0..given_up).map(|_| match chance.below(4) {
                    0 => Step::Flush,
                    1 => Step::Discard(0..shape.size),
                    _ => Step::Discard(shape.clusters(random_range(chance, shape, &hot))),
                });
                let mut steps: Vec<Step> = give_up.collect();
                steps
                    .extend((0..shape.steps).map(|_| random_step(chance, shape, &hot, may_resize)));
                steps.retain(|step| step.range().is_none_or(|range| !range.is_empty()));
                steps
            })
            .collect();
        Script { tasks }
    }

    /// One task writes cluster after cluster durably while all others read the same ones: what a write
    /// frees has readers. On a large disk it may be a cluster of each slice of its tables: none stays
    /// in a small cache.
    fn sweep(chance: &mut Chance, shape: &Shape) -> Script {
        let clusters = shape.size / shape.cluster;
        let first = chance.below(clusters);
        let stride = if shape.is_large() { chance.pick(&[1, 65, 65]) } else { 1 };
        let cluster = |index: usize| {
            let start = (first + index as u64 * stride) % clusters * shape.cluster;
            start..start + shape.cluster
        };
        let tasks = (0..shape.tasks.max(2))
            .map(|task| {
                let step = |index| match task {
                    0 => Step::Write(cluster(index), true),
                    _ => Step::Read(cluster(index)),
                };
                (0..shape.steps).map(step).collect()
            })
            .collect();
        Script { tasks }
    }

    /// How many steps it has.
    pub fn len(&self) -> usize {
        self.tasks.iter().map(Vec::len).sum()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (task, steps) in self.tasks.iter().enumerate().filter(|(_, steps)| !steps.is_empty()) {
            let steps: Vec<String> = steps.iter().map(Step::to_string).collect();
            writeln!(f, "    task {task}: {}", steps.join("; "))?;
        }
        Ok(())
    }
}

fn random_range(chance: &mut Chance, shape: &Shape, hot: &[u64]) -> Range<u64> {
    let sector = 512.max(shape.align);
    let base = match chance.below(8) {
        0 => chance.below(2 * shape.size),
        _ => {
            let near = chance.pick(hot) / shape.cluster * shape.cluster;
            near + chance.below(3 * shape.cluster)
        }
    };
    let unit = chance.pick(&[shape.align, sector, sector, 4096, shape.cluster]).max(shape.align);
    // Now and then a request of what is there only while the disk is longer.
    let longest = shape.sizes.iter().copied().max().unwrap_or(0).max(shape.size);
    let size = if chance.one_in(4) { longest } else { shape.size };
    let start = (base % size) / unit * unit;
    let length = match chance.below(4) {
        0 => unit,
        1 => shape.cluster,
        _ => chance.magnitude(shape.request_max).next_multiple_of(unit),
    };
    let end = (start + length.min(shape.request_max)).min(size);
    start..end / shape.align * shape.align
}

fn random_step(chance: &mut Chance, shape: &Shape, hot: &[u64], may_resize: bool) -> Step {
    let range = random_range(chance, shape, hot);
    let durable = chance.one_in(6);
    match chance.below(100) {
        _ if may_resize && !shape.sizes.is_empty() && chance.one_in(12) => {
            Step::Resize(chance.pick(&shape.sizes))
        }
        0..26 => Step::Read(range),
        26..30 => Step::Status(range),
        30..68 => Step::Write(range, durable),
        68..76 => Step::Zeroes(range, chance.one_in(2), durable),
        76..84 => Step::Discard(range),
        84..96 => Step::Flush,
        _ => Step::Pause(chance.magnitude(20_000)),
    }
}

/// How many requests of each kind a guest has under way.
pub type UnderWay = [Cell<u64>; GuestKind::COUNT];

/// What the tasks of one run share.
struct Run<T> {
    target: Arc<T>,
    oracle: Rc<RefCell<Oracle>>,
    world: World,
    under_way: Rc<UnderWay>,
}

/// Runs a script to its end, judging every read.
///
/// # Panics
/// When a read is wrong, and when a request fails on a disk where nothing fails.
pub async fn run<T: Target>(
    target: &Arc<T>,
    queues: &[Queue],
    world: &World,
    oracle: &Rc<RefCell<Oracle>>,
    under_way: &Rc<UnderWay>,
    script: &Script,
) {
    let run = Rc::new(Run {
        target: target.clone(),
        oracle: oracle.clone(),
        world: world.clone(),
        under_way: under_way.clone(),
    });
    let mut ends = Vec::new();
    for (index, steps) in script.tasks.iter().cloned().enumerate() {
        let (promise, end) = completion();
        ends.push(end);
        let (run, queue) = (run.clone(), queues[index % queues.len()].clone());
        queue.clone().spawn(async move {
            for (number, step) in steps.iter().enumerate() {
                let kind = step.kind();
                kind.inspect(|&kind| count(&run.under_way, kind, 1));
                run.step(&queue, (index, number), step).await;
                kind.inspect(|&kind| count(&run.under_way, kind, -1));
            }
            promise.fulfil(Ok(Value::Unit));
        });
    }
    for end in ends {
        end.await.expect("tasks end in order");
    }
}

impl<T: Target> Run<T> {
    async fn step(&self, queue: &Queue, place: (usize, usize), step: &Step) {
        let (task, number) = place;
        Driver::of(queue).record(Event::Note(format!("task {task} step {number}: {step}")));
        let oracle = || self.oracle.borrow_mut();
        let durability = |durable: bool| match durable {
            true => Durability::Durable,
            false => Durability::Volatile,
        };
        let began = oracle().now();
        let outcome = match step.clone() {
            Step::Read(range) => self.read(queue, range).await,
            Step::Write(range, durable) => {
                let request = oracle().start_write(range.clone());
                let mut bytes = vec![0; (range.end - range.start) as usize];
                oracle::bytes_of(request.value(), range.start, &mut bytes);
                let from = in_pieces(queue, bytes.len());
                from.copy_from(&bytes);
                let write = self.target.write(queue, range.start, from, durability(durable));
                self.finish(request, durable, write.await)
            }
            Step::Zeroes(range, unmap, durable) => {
                let request = oracle().start_zeroes(range.clone());
                let length = range.end - range.start;
                let durability = durability(durable);
                let zero = self.target.write_zeroes(queue, range.start, length, unmap, durability);
                self.finish(request, durable, zero.await)
            }
            Step::Discard(range) => {
                let request = oracle().start_zeroes(range.clone());
                let length = range.end - range.start;
                let result = self.target.discard(queue, range.start, length).await;
                match &result {
                    Err(error) if error.kind() == Kind::Invalid => oracle().withdrawn(request),
                    _ => oracle().left_open(request),
                }
                result
            }
            Step::Status(range) => self.status(queue, range).await,
            Step::Resize(size) => {
                let resize = oracle().start_resize(size);
                let result = self.target.resize(queue, size).await;
                oracle().resized(resize, &result);
                result
            }
            Step::Flush => {
                let started = oracle().start_flush();
                let result = self.target.flush(queue).await;
                if result.is_ok() {
                    oracle().flushed(started);
                }
                result
            }
            Step::Pause(us) => {
                queue.sleep(Duration::from_micros(us)).await;
                Ok(())
            }
        };
        if let Some(range) = step.range() {
            let oracle = self.oracle.borrow();
            match &outcome {
                Err(error) if error.kind() == Kind::Invalid && oracle.may_refuse(began, &range) => {
                    return;
                }
                Ok(()) => assert!(
                    oracle.may_accept(began, &range),
                    "task {task} step {number}: {step}: it succeeded beyond the end"
                ),
                Err(_) => {}
            }
        }
        if let Err(error) = outcome {
            Driver::of(queue).record(Event::Note(format!("task {task} step {number}: {error}")));
            let expected = matches!(error.kind(), Kind::Io | Kind::NoSpace | Kind::Latched);
            assert!(
                expected && self.world.has_faults(),
                "task {task} step {number}: {step}: {error:?}, though nothing has failed beneath"
            );
        }
    }

    fn finish(&self, request: oracle::Request, durable: bool, result: Result<()>) -> Result<()> {
        match &result {
            Ok(()) => self.oracle.borrow_mut().written(request, durable),
            Err(error) if error.kind() == Kind::Invalid => {
                self.oracle.borrow_mut().withdrawn(request)
            }
            Err(_) => self.oracle.borrow_mut().left_open(request),
        }
        result
    }

    /// What is said to be zeros is judged like a read of zeros.
    async fn status(&self, queue: &Queue, range: Range<u64>) -> Result<()> {
        let mut offset = range.start;
        while offset < range.end {
            let started = self.oracle.borrow_mut().start_read();
            let result = self.target.status(queue, offset, range.end - offset).await;
            let mut oracle = self.oracle.borrow_mut();
            if self.world.has_reverted() {
                oracle.suspend();
            }
            let (length, zero) = result.inspect_err(|_| oracle.read_failed(started))?;
            assert!(length > 0 && length <= range.end - offset, "a run of {length:#x} bytes");
            if !zero {
                oracle.read_failed(started);
            } else if let Err(wrong) = oracle.judge_read(started, offset, &vec![0; length as usize])
            {
                panic!("R1: the status of {range:#x?} says zeros: {wrong}");
            }
            offset += length;
        }
        Ok(())
    }

    async fn read(&self, queue: &Queue, range: Range<u64>) -> Result<()> {
        let into = in_pieces(queue, (range.end - range.start) as usize);
        let started = self.oracle.borrow_mut().start_read();
        let result = self.target.read(queue, range.start, into.clone()).await;
        let mut oracle = self.oracle.borrow_mut();
        if self.world.has_reverted() {
            oracle.suspend();
        }
        if result.is_err() {
            oracle.read_failed(started);
        } else if let Err(wrong) = oracle.judge_read(started, range.start, &into.to_vec()) {
            panic!("R1: a read of {range:#x?}: {wrong}");
        }
        result
    }
}

/// Memory of so many bytes, in one piece or in two.
fn in_pieces(queue: &Queue, length: usize) -> Segments {
    let first = Driver::of(queue).chance(|chance| match chance.below(4) {
        0 => chance.below(length as u64) as usize,
        _ => 0,
    });
    let mut segments = Segments::alloc(first);
    segments.append(Segments::alloc(length - first));
    segments
}
