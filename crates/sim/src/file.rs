//! One simulated file: [`Storage`] over a [`Medium`], with size, space, latency and faults.
//!
//! An operation takes a random time. It takes effect in one to three parts, each at an instant of
//! its own between submission and completion, in any order; so operations in flight at once mix as
//! on a real disk, and a power cut between two parts finds half of them. A write's bytes are taken
//! at submission or when a part takes effect, by chance, for whoever changes a buffer in flight; a
//! read's buffer is spoilt at submission, for whoever looks before the end (R2).
//!
//! The size is volatile like the bytes: after a cut it is any that it was since the last flush. A
//! durable write makes its own end durable too, as `RWF_DSYNC` does.
//!
//! What a back end would report as a broken promise of the engine is a panic here: a write beyond the
//! end (R3), a write to a file opened for reading.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use stillpoint_io::{
    Access, Completion, Durability, Error, Extent, Facts, GrowMeans, Kind, Manage, Promise, Queue,
    Result, Segments, Storage, Value, completion,
};

use crate::chance::{Chance, mix};
use crate::coverage::HostKind;
use crate::device::{FS_BLOCK, Medium};
use crate::executor::Driver;
use crate::plan::{BeyondEnd, Lie, Plan};
use crate::trace::Event;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

/// What all files of one world share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) plan: Mutex<Plan>,
    /// The last number given to an operation or an instant.
    pub(crate) stamp: AtomicU64,
    /// How many file-system blocks are allocated.
    pub(crate) used_blocks: AtomicU64,
    pub(crate) failed_flushes: AtomicU64,
    /// A failed flush has made old bytes show again.
    pub(crate) reverted: AtomicBool,
    /// How many operations of each kind are under way.
    pub(crate) under_way: [AtomicU64; HostKind::COUNT],
}

impl Shared {
    pub(crate) fn new(plan: Plan) -> Shared {
        Shared {
            plan: Mutex::new(plan),
            stamp: AtomicU64::new(0),
            used_blocks: AtomicU64::new(0),
            failed_flushes: AtomicU64::new(0),
            reverted: AtomicBool::new(false),
            under_way: Default::default(),
        }
    }

    fn next_stamp(&self) -> u64 {
        self.stamp.fetch_add(1, Relaxed) + 1
    }
}

/// A part of a file that a power cut keeps or loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pending {
    /// A block of [`FS_BLOCK`] bytes, by index.
    Block(u64),
    /// Its length.
    Length,
}

#[derive(Debug)]
struct InFlight {
    operation: u64,
    range: Range<u64>,
    /// A growth of the file has destroyed what the write puts beyond this offset.
    destroyed_from: Option<u64>,
}

#[derive(Debug)]
struct State {
    medium: Medium,
    end: u64,
    durable_end: u64,
    /// Sizes since the last flush: when each came into force, and the size.
    ends: Vec<(u64, u64)>,
    /// Blocks that have space.
    allocated: BTreeSet<u64>,
    /// Those of them that a clone of the file has too: overwriting one takes space.
    shared: BTreeSet<u64>,
    writes: Vec<InFlight>,
    writers: usize,
    readers: usize,
}

impl State {
    /// Whether a block can be written without taking space.
    fn has_space(&self, block: u64) -> bool {
        self.allocated.contains(&block) && !self.shared.contains(&block)
    }

    fn set_end(&mut self, stamp: u64, end: u64) {
        self.end = end;
        self.ends.push((stamp, end));
    }

    fn settle_ends(&mut self, flush_stamp: u64) {
        if let Some(index) = self.ends.iter().rposition(|&(stamp, _)| stamp < flush_stamp) {
            self.durable_end = self.ends[index].1;
            self.ends.drain(..=index);
        }
    }
}

/// A file, whoever has it open.
#[derive(Debug)]
pub(crate) struct Inode {
    number: u64,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

impl Inode {
    /// A file that durably holds `bytes`.
    pub(crate) fn new(number: u64, shared: Arc<Shared>, bytes: &[u8]) -> Inode {
        let mut medium = Medium::new(shared.plan.lock().unwrap().sector);
        for (index, chunk) in bytes.chunks(FS_BLOCK as usize).enumerate() {
            if chunk.iter().any(|&byte| byte != 0) {
                medium.write(0, index as u64 * FS_BLOCK, chunk);
            }
        }
        medium.sync();
        Inode::with_medium(number, shared, medium, bytes.len() as u64, BTreeSet::new())
    }

    /// A file of what survived; of its blocks, a clone has those in `cloned`.
    fn with_medium(
        number: u64,
        shared: Arc<Shared>,
        mut medium: Medium,
        end: u64,
        cloned: BTreeSet<u64>,
    ) -> Inode {
        let mut allocated = BTreeSet::new();
        let mut position = 0;
        while let Some(data) = medium.next_data(position) {
            allocated.insert(data / FS_BLOCK);
            position = (data / FS_BLOCK + 1) * FS_BLOCK;
        }
        shared.used_blocks.fetch_add(allocated.len() as u64, Relaxed);
        medium.share(&cloned);
        let state = State {
            medium,
            end,
            durable_end: end,
            ends: Vec::new(),
            shared: cloned.intersection(&allocated).copied().collect(),
            allocated,
            writes: Vec::new(),
            writers: 0,
            readers: 0,
        };
        Inode { number, shared, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The file after a power cut, in a world that shares `shared`.
    pub(crate) fn power_cut(&self, shared: Arc<Shared>, chance: &mut Chance) -> Inode {
        let state = self.lock();
        let index = chance.below(state.ends.len() as u64 + 1) as usize;
        let end = index.checked_sub(1).map_or(state.durable_end, |index| state.ends[index].1);
        let tears = shared.plan.lock().unwrap().lie == Some(Lie::Tear);
        let medium = state.medium.power_cut(end, tears, chance);
        Inode::with_medium(self.number, shared, medium, end, state.shared.clone())
    }

    /// A number for what is durable of the file, and what a power cut may keep or lose, each by
    /// itself: what the number is to be exclusive-ored with if its first half is kept, and the rest.
    pub(crate) fn pending(&self) -> (u64, Vec<(Pending, [u64; 2])>) {
        let state = self.lock();
        let per_block = FS_BLOCK / u64::from(self.shared.plan.lock().unwrap().sector);
        let (durable, changes) = state.medium.fingerprint();
        let mut pending: Vec<(Pending, [u64; 2])> = Vec::new();
        for (sector, change) in changes {
            let part = Pending::Block(sector / per_block);
            if pending.last().is_none_or(|last| last.0 != part) {
                pending.push((part, [0, 0]));
            }
            let halves = &mut pending.last_mut().expect("just pushed").1;
            halves[usize::from(sector % per_block >= per_block / 2)] ^= change;
        }
        if !state.ends.is_empty() {
            let change = mix(state.durable_end) ^ mix(state.end);
            pending.push((Pending::Length, [0, change]));
        }
        (durable ^ mix(state.durable_end), pending)
    }

    /// The file after a power cut that keeps just what `keeps` accepts: a part of its pending blocks,
    /// given by half of the block, and its newest length.
    pub(crate) fn power_cut_keeping(
        &self,
        shared: Arc<Shared>,
        keeps: &dyn Fn(Pending, usize) -> bool,
    ) -> Inode {
        let state = self.lock();
        let per_block = FS_BLOCK / u64::from(shared.plan.lock().unwrap().sector);
        let end = if keeps(Pending::Length, 1) { state.end } else { state.durable_end };
        let medium = state.medium.power_cut_keeping(end, |sector| {
            keeps(
                Pending::Block(sector / per_block),
                usize::from(sector % per_block >= per_block / 2),
            )
        });
        Inode::with_medium(self.number, shared, medium, end, state.shared.clone())
    }

    /// Somebody has made a reflink clone of the file: every block of it is shared.
    pub(crate) fn share(&self) {
        let mut state = self.lock();
        state.shared = state.allocated.clone();
        let State { medium, shared, .. } = &mut *state;
        medium.share(shared);
    }

    pub(crate) fn end(&self) -> u64 {
        self.lock().end
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        let state = self.lock();
        into.fill(0);
        let length = state.end.saturating_sub(offset).min(into.len() as u64);
        state.medium.read(offset, &mut into[..length as usize]);
    }

    /// Shortens the file to nothing, for who creates it anew.
    pub(crate) fn empty(&self) {
        let stamp = self.shared.next_stamp();
        let mut state = self.lock();
        let end = state.end;
        state.medium.zero(stamp, 0, end);
        state.medium.complete(stamp, 0, end, stamp);
        state.set_end(stamp, 0);
        self.free(&mut state, 0..end);
    }

    /// Allocates what `range` lacks, if there is space.
    fn allocate(&self, state: &mut State, plan: &Plan, range: Range<u64>) -> bool {
        let blocks = range.start / FS_BLOCK..range.end.div_ceil(FS_BLOCK);
        let lacking: Vec<u64> = blocks.filter(|block| !state.has_space(*block)).collect();
        let used = self.shared.used_blocks.load(Relaxed);
        if used + lacking.len() as u64 > plan.capacity_blocks {
            return lacking.is_empty();
        }
        self.shared.used_blocks.fetch_add(lacking.len() as u64, Relaxed);
        lacking.iter().for_each(|block| _ = state.shared.remove(block));
        state.allocated.extend(lacking);
        true
    }

    fn free(&self, state: &mut State, range: Range<u64>) {
        let blocks = range.start.div_ceil(FS_BLOCK)..range.end.div_ceil(FS_BLOCK);
        let mut freed = 0;
        for block in blocks {
            // A shared block is the clone's, too.
            freed += u64::from(state.allocated.remove(&block) && !state.shared.remove(&block));
        }
        self.shared.used_blocks.fetch_sub(freed, Relaxed);
    }
}

/// A simulated file, opened; see the module's head.
pub struct SimFile {
    name: String,
    facts: Facts,
    access: Access,
    inode: Arc<Inode>,
}

/// An operation that has been submitted: how to end it.
struct Submitted {
    driver: Driver,
    inode: Arc<Inode>,
    operation: u64,
    kind: Option<HostKind>,
    promise: Promise,
}

impl Submitted {
    /// Ends it after `delay`: `finish` brings what is left of it into effect.
    fn end_after(
        self,
        delay: Duration,
        finish: impl FnOnce(&mut State, u64) -> Result<Value> + 'static,
    ) {
        let driver = self.driver.clone();
        driver.after(delay, move || {
            let stamp = self.inode.shared.next_stamp();
            let result = finish(&mut self.inode.lock(), stamp);
            if let Some(kind) = self.kind {
                self.inode.shared.under_way[kind as usize].fetch_sub(1, Relaxed);
            }
            self.driver.record(Event::Complete { operation: self.operation, ok: result.is_ok() });
            self.promise.fulfil(result);
        });
    }
}

/// Cuts `length` bytes at `offset` into one to three parts at sector borders, in any order, each
/// with its instant as thousandths of the operation's time.
fn parts(chance: &mut Chance, sector: u64, offset: u64, length: u64) -> Vec<(Range<u64>, u32)> {
    let mut borders = vec![offset, offset + length];
    let first = offset / sector + 1;
    let last = (offset + length - 1) / sector;
    for _ in 0..chance.below(3) {
        if first <= last {
            borders.push(chance.between(first, last) * sector);
        }
    }
    borders.sort_unstable();
    borders.dedup();
    borders.windows(2).map(|pair| (pair[0]..pair[1], chance.below(1000) as u32)).collect()
}

fn fraction(of: Duration, permille: u32) -> Duration {
    Duration::from_nanos(of.as_nanos() as u64 / 1000 * u64::from(permille))
}

impl SimFile {
    /// Opens `inode`, or returns `None` if somebody else's use forbids it.
    pub(crate) fn open(name: &str, inode: Arc<Inode>, access: Access) -> Option<SimFile> {
        let plan = inode.shared.plan.lock().unwrap().clone();
        let mut state = inode.lock();
        match access {
            Access::Write if state.writers + state.readers > 0 => return None,
            Access::Read if state.writers > 0 => return None,
            Access::Write => state.writers += 1,
            Access::Read => state.readers += 1,
            Access::ReadUnlocked => {}
        }
        drop(state);
        let facts = plan.facts(inode.number, access != Access::Write);
        Some(SimFile { name: name.to_owned(), facts, access, inode })
    }

    fn plan(&self) -> Plan {
        self.inode.shared.plan.lock().unwrap().clone()
    }

    fn error(&self, op: &'static str, errno: i32, offset: u64) -> Error {
        Error::from_errno(op, errno).file(&self.name).at(offset)
    }

    fn check_alignment(&self, offset: u64, length: u64) -> Result<()> {
        let align = u64::from(self.facts.request_align);
        if offset.is_multiple_of(align) && length.is_multiple_of(align) {
            return Ok(());
        }
        let why = format!("{length} bytes are not aligned to {align}");
        Err(Error::new(Kind::Invalid, "submit a request", why).file(&self.name).at(offset))
    }

    fn forbid_change(&self, what: &str) {
        assert!(!self.facts.read_only, "{}: {what}, but it is open for reading", self.name);
    }

    fn submit(
        &self,
        queue: &Queue,
        kind: Option<HostKind>,
        what: &'static str,
        offset: u64,
        length: u64,
    ) -> (Submitted, Completion) {
        let driver = Driver::of(queue);
        let operation = self.inode.shared.next_stamp();
        driver.record(Event::Submit { operation, inode: self.inode.number, what, offset, length });
        if let Some(kind) = kind {
            self.inode.shared.under_way[kind as usize].fetch_add(1, Relaxed);
        }
        let (promise, ended) = completion();
        (Submitted { driver, inode: self.inode.clone(), operation, kind, promise }, ended)
    }

    /// A zeroing of `range` in parts.
    fn zero(&self, queue: &Queue, what: &'static str, range: Range<u64>) -> Completion {
        let plan = self.plan();
        let (offset, length) = (range.start, range.end - range.start);
        let (submitted, ended) = self.submit(queue, Some(HostKind::Zero), what, offset, length);
        let driver = submitted.driver.clone();
        let latency = driver.chance(|chance| plan.latency(chance));
        let fails = driver.chance(|chance| chance.permille(plan.manage_errors_permille));
        let end = self.end().min(range.end);
        if offset < end {
            let sector = u64::from(plan.sector);
            for (part, permille) in driver.chance(|c| parts(c, sector, offset, end - offset)) {
                if fails && driver.chance(|chance| chance.one_in(2)) {
                    continue;
                }
                let (inode, operation) = (self.inode.clone(), submitted.operation);
                driver.after(fraction(latency, permille), move || {
                    let length = part.end - part.start;
                    inode.lock().medium.zero(operation, part.start, length);
                });
            }
        }
        let (operation, inode) = (submitted.operation, self.inode.clone());
        let failure = fails.then(|| self.error("zero a range", EIO, offset));
        let punches = what == "punch";
        submitted.end_after(latency, move |state, stamp| {
            state.medium.complete(operation, offset, length, stamp);
            if let Some(error) = failure {
                return Err(error);
            }
            if punches {
                inode.free(state, offset..end.max(offset));
            }
            Ok(Value::Unit)
        });
        ended
    }

    fn grow(&self, queue: &Queue, end: u64, means: GrowMeans) -> Completion {
        let plan = self.plan();
        let falloc = means == GrowMeans::Fallocate;
        let what = if falloc { "grow by fallocate" } else { "grow by truncate" };
        let old = self.end();
        let (submitted, ended) =
            self.submit(queue, Some(HostKind::Resize), what, old, end.saturating_sub(old));
        let driver = submitted.driver.clone();
        let latency = driver.chance(|chance| plan.latency(chance));
        let errno = if falloc && !plan.can_fallocate {
            Some(EOPNOTSUPP)
        } else if driver.chance(|chance| chance.permille(plan.manage_errors_permille)) {
            Some(EIO)
        } else if falloc
            && (driver.chance(|chance| chance.permille(plan.no_space_permille))
                || !self.inode.allocate(&mut self.inode.lock(), &plan, old..end.max(old)))
        {
            Some(ENOSPC)
        } else {
            None
        };
        let failure = errno.map(|errno| self.error(what, errno, end));
        submitted.end_after(latency, move |state, stamp| {
            if let Some(error) = failure {
                return Err(error);
            }
            let old = state.end;
            if falloc && plan.fallocate_destroys_writes {
                for write in state.writes.iter_mut().filter(|write| write.range.end > old) {
                    write.destroyed_from = Some(write.range.start.max(old));
                }
            }
            if end > old {
                state.set_end(stamp, end);
            }
            Ok(Value::Unit)
        });
        ended
    }

    fn shrink(&self, queue: &Queue, end: u64) -> Completion {
        let plan = self.plan();
        let (submitted, ended) = self.submit(queue, Some(HostKind::Resize), "shrink", end, 0);
        let latency = submitted.driver.chance(|chance| plan.latency(chance));
        let fails = submitted.driver.chance(|chance| chance.permille(plan.manage_errors_permille));
        let failure = fails.then(|| self.error("shrink", EIO, end));
        let (operation, inode) = (submitted.operation, self.inode.clone());
        submitted.end_after(latency, move |state, stamp| {
            if let Some(error) = failure {
                return Err(error);
            }
            let old = state.end;
            if end < old {
                state.medium.zero(operation, end, old - end);
                state.medium.complete(operation, end, old - end, stamp);
                state.set_end(stamp, end);
                inode.free(state, end..old);
            }
            Ok(Value::Unit)
        });
        ended
    }
}

impl Storage for SimFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn end(&self) -> u64 {
        self.inode.end()
    }

    fn read(&self, queue: &Queue, offset: u64, into: Segments) -> Completion {
        let length = into.len() as u64;
        if let Err(error) = self.check_alignment(offset, length) {
            return Completion::ready(Err(error));
        }
        let plan = self.plan();
        let (submitted, ended) = self.submit(queue, Some(HostKind::Read), "read", offset, length);
        let driver = submitted.driver.clone();
        let latency = driver.chance(|chance| plan.latency(chance));
        let fails = driver.chance(|chance| chance.permille(plan.read_errors_permille));
        into.fill(0xA5);
        if length > 0 && !fails {
            let sector = u64::from(plan.sector);
            for (part, permille) in driver.chance(|c| parts(c, sector, offset, length)) {
                let (inode, into) = (self.inode.clone(), into.clone());
                driver.after(fraction(latency, permille), move || {
                    let mut bytes = vec![0; (part.end - part.start) as usize];
                    inode.read(part.start, &mut bytes);
                    let range = (part.start - offset) as usize..(part.end - offset) as usize;
                    into.slice(range).copy_from(&bytes);
                });
            }
        }
        let failure = fails.then(|| self.error("read", EIO, offset));
        submitted.end_after(latency, move |_, _| failure.map_or(Ok(Value::Unit), Err));
        ended
    }

    fn write(
        &self,
        queue: &Queue,
        offset: u64,
        from: Segments,
        durability: Durability,
    ) -> Completion {
        self.forbid_change("a write");
        let length = from.len() as u64;
        if let Err(error) = self.check_alignment(offset, length) {
            return Completion::ready(Err(error));
        }
        let plan = self.plan();
        let durable = durability == Durability::Durable;
        let what = if durable { "durable write" } else { "write" };
        let (submitted, ended) = self.submit(queue, Some(HostKind::Write), what, offset, length);
        let (driver, operation) = (submitted.driver.clone(), submitted.operation);
        let latency = driver.chance(|chance| plan.latency(chance));
        let range = offset..offset + length;

        let mut state = self.inode.lock();
        if range.end > state.end && plan.beyond_end == BeyondEnd::Panic {
            let end = state.end;
            drop(state);
            panic!("R3: {}: a write of {range:#x?}, but the end in force is {end:#x}", self.name);
        }
        let mut blocks = range.start / FS_BLOCK..range.end.div_ceil(FS_BLOCK);
        let takes_space = !blocks.all(|block| state.has_space(block));
        let errno = driver.chance(|chance| {
            if takes_space && chance.permille(plan.no_space_permille)
                || !self.inode.allocate(&mut state, &plan, range.clone())
            {
                Some(ENOSPC)
            } else if chance.permille(plan.write_errors_permille) {
                Some(EIO)
            } else {
                None
            }
        });
        state.writes.push(InFlight { operation, range: range.clone(), destroyed_from: None });
        drop(state);

        if length > 0 && errno != Some(ENOSPC) {
            let submitted_bytes = Rc::new(from.to_vec());
            let sector = u64::from(plan.sector);
            for (part, permille) in driver.chance(|c| parts(c, sector, offset, length)) {
                if errno.is_some() && driver.chance(|chance| chance.one_in(2)) {
                    continue;
                }
                let as_submitted = driver.chance(|chance| chance.one_in(2));
                let (inode, from, bytes) =
                    (self.inode.clone(), from.clone(), submitted_bytes.clone());
                driver.after(fraction(latency, permille), move || {
                    let within = (part.start - offset) as usize..(part.end - offset) as usize;
                    let mut state = inode.lock();
                    if as_submitted {
                        state.medium.write(operation, part.start, &bytes[within]);
                    } else {
                        let bytes = from.slice(within).to_vec();
                        state.medium.write(operation, part.start, &bytes);
                    }
                });
            }
        }
        let failure = errno.map(|errno| self.error("write", errno, offset));
        submitted.end_after(latency, move |state, stamp| {
            let index = state.writes.iter().position(|write| write.operation == operation);
            let write = state.writes.swap_remove(index.expect("it was in flight"));
            if let Some(from) = write.destroyed_from {
                let zeros = vec![0; (range.end - from) as usize];
                state.medium.write(operation, from, &zeros);
            }
            if range.end > state.end && failure.is_none() {
                state.set_end(stamp, range.end);
            }
            state.medium.complete(operation, offset, length, stamp);
            if let Some(error) = failure {
                return Err(error);
            }
            if durable && plan.lie != Some(Lie::DurableWrite) {
                state.medium.settle_write(operation, offset, length);
                state.durable_end = state.durable_end.max(range.end);
            }
            Ok(Value::Unit)
        });
        ended
    }

    fn flush(&self, queue: &Queue) -> Completion {
        let plan = self.plan();
        let (submitted, ended) = self.submit(queue, Some(HostKind::Flush), "flush", 0, 0);
        let driver = submitted.driver.clone();
        // A flush is slow, so that much happens meanwhile.
        let latency = driver.chance(|chance| plan.latency(chance) * 3);
        let fails = driver.chance(|chance| chance.permille(plan.flush_errors_permille));
        let failure = fails.then(|| self.error("flush", EIO, 0));
        let submitted_at = submitted.operation;
        let shared = self.inode.shared.clone();
        submitted.end_after(latency, move |state, _| {
            if let Some(error) = failure {
                shared.failed_flushes.fetch_add(1, Relaxed);
                let medium = &mut state.medium;
                if driver.chance(|chance| medium.fail_flush(submitted_at, chance)) {
                    shared.reverted.store(true, Relaxed);
                }
                return Err(error);
            }
            if plan.lie != Some(Lie::Flush) {
                let left_out = match plan.lie {
                    Some(Lie::Reorder) => driver.chance(|c| state.medium.any_volatile(c)),
                    _ => None,
                };
                state.medium.settle_flush(submitted_at, left_out);
                state.settle_ends(submitted_at);
            }
            Ok(Value::Unit)
        });
        ended
    }

    fn manage(&self, queue: &Queue, change: Manage) -> Completion {
        self.forbid_change("a change of its shape");
        match change {
            Manage::Grow { end, means } => self.grow(queue, end, means),
            Manage::Shrink { end } => self.shrink(queue, end),
            Manage::Punch { offset, .. } if !self.facts.can_punch => {
                Completion::ready(Err(self.error("punch a hole", EOPNOTSUPP, offset)))
            }
            Manage::Punch { offset, length } => {
                self.zero(queue, "punch", offset..offset.saturating_add(length))
            }
            Manage::ZeroRange { offset, .. } if !self.facts.can_zero_range => {
                Completion::ready(Err(self.error("zero a range", EOPNOTSUPP, offset)))
            }
            Manage::ZeroRange { offset, length } => {
                self.zero(queue, "zero range", offset..offset.saturating_add(length))
            }
        }
    }

    fn status(&self, queue: &Queue, offset: u64, length: u64) -> Completion {
        let plan = self.plan();
        let (submitted, ended) = self.submit(queue, None, "status", offset, length);
        let latency = submitted.driver.chance(|chance| plan.latency(chance));
        submitted.end_after(latency, move |state, _| {
            let medium = &state.medium;
            let limit = offset + length;
            let block_has_data =
                |offset: u64| medium.is_data(offset / FS_BLOCK * FS_BLOCK, FS_BLOCK);
            let extent = if offset < state.end && block_has_data(offset) {
                let mut position = (offset / FS_BLOCK + 1) * FS_BLOCK;
                while position < limit && block_has_data(position) {
                    position += FS_BLOCK;
                }
                Extent { length: position.min(limit) - offset, data: true }
            } else {
                let data =
                    medium.next_data(offset).map_or(limit, |next| next / FS_BLOCK * FS_BLOCK);
                Extent { length: data.min(limit) - offset, data: false }
            };
            Ok(Value::Extent(extent))
        });
        ended
    }

    fn buffered(&self) -> Option<Arc<dyn Storage>> {
        if self.facts.request_align == 1 {
            return None;
        }
        let mut state = self.inode.lock();
        match self.access {
            Access::Write => state.writers += 1,
            Access::Read => state.readers += 1,
            Access::ReadUnlocked => {}
        }
        drop(state);
        Some(Arc::new(SimFile {
            name: self.name.clone(),
            facts: Facts { request_align: 1, memory_align: 1, ..self.facts },
            access: self.access,
            inode: self.inode.clone(),
        }))
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        // A panic elsewhere may have poisoned it; nobody asks any more then.
        let Ok(mut state) = self.inode.state.lock() else { return };
        match self.access {
            Access::Write => state.writers -= 1,
            Access::Read => state.readers -= 1,
            Access::ReadUnlocked => {}
        }
    }
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimFile({})", self.name)
    }
}
