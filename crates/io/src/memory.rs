//! Storage in memory, for tests: sparse, and with operations that a test can count, hold or fail.
//!
//! Operations complete at once unless a test holds them ([`MemoryFile::hold`]): then each waits
//! until it is released, in whatever order the test likes, and only then takes effect. A test can
//! also make operations fail ([`MemoryFile::fail`]). Volatile caches, torn writes and power cuts
//! are the simulator's, not this file's.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use futures_util::future::poll_fn;

use crate::completion::{Completion, completion};
use crate::error::{Error, Kind, Result};
use crate::queue::Queue;
use crate::segments::Segments;
use crate::storage::{Durability, Extent, Facts, FileId, GrowMeans, Manage, Storage, Value};

const PAGE: u64 = 4096;

/// Which operation, as a test's filter sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A read of `length` bytes at `offset`.
    Read {
        /// Where it begins, in bytes.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// A write of `length` bytes at `offset`.
    Write {
        /// Where it begins, in bytes.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// A barrier.
    Flush,
    /// A change of shape.
    Manage(Manage),
}

/// A test's choice of operations.
pub type Filter = Box<dyn FnMut(Operation) -> bool + Send>;

#[derive(Default)]
struct Gate {
    open: bool,
    waker: Option<Waker>,
}

/// An operation held back; see [`MemoryFile::held`].
#[derive(Clone)]
pub struct Held {
    /// What it is.
    pub operation: Operation,
    gate: Arc<Mutex<Gate>>,
}

impl Held {
    /// Lets it take effect and complete.
    pub fn release(&self) {
        let waker = {
            let mut gate = self.gate.lock().unwrap();
            gate.open = true;
            gate.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[derive(Default)]
struct State {
    pages: BTreeMap<u64, Box<[u8]>>,
    end: u64,
    hold: Option<Filter>,
    fail: Option<(Filter, i32)>,
    held: Vec<Held>,
    log: Option<Vec<Operation>>,
}

/// A sparse file in memory; see the module's head.
pub struct MemoryFile {
    name: String,
    facts: Facts,
    state: Arc<Mutex<State>>,
}

impl MemoryFile {
    /// A file of `end` zero bytes, with facts like those of a file behind a page cache.
    pub fn new(name: &str, end: u64) -> MemoryFile {
        static NEXT_INODE: AtomicU64 = AtomicU64::new(1);
        let facts = Facts {
            id: FileId { device: 0, inode: NEXT_INODE.fetch_add(1, Relaxed) },
            request_align: 1,
            memory_align: 1,
            fs_block: 4096,
            can_punch: true,
            can_zero_range: true,
            can_fallocate: true,
            fixed_size: false,
            growth: (GrowMeans::Truncate, 1 << 20),
            read_only: false,
        };
        MemoryFile {
            name: name.to_owned(),
            facts,
            state: Arc::new(Mutex::new(State { end, ..State::default() })),
        }
    }

    /// A file that holds `bytes`.
    pub fn with_bytes(name: &str, bytes: &[u8]) -> MemoryFile {
        let file = MemoryFile::new(name, bytes.len() as u64);
        file.lock().write(0, bytes);
        file
    }

    /// The same file with other facts; for tests of alignment and of what a file system lacks.
    pub fn with_facts(mut self, change: impl FnOnce(&mut Facts)) -> MemoryFile {
        change(&mut self.facts);
        self
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Holds back each operation that `filter` chooses; `None` holds none from now on.
    pub fn hold(&self, filter: Option<Filter>) {
        self.lock().hold = filter;
    }

    /// Fails with `errno` each operation that `filter` chooses; `None` fails none from now on.
    pub fn fail(&self, filter: Option<(Filter, i32)>) {
        self.lock().fail = filter;
    }

    /// The operations that are held now, oldest first.
    pub fn held(&self) -> Vec<Held> {
        self.lock().held.clone()
    }

    /// Starts a record of operations in the order of their submission, and returns the one so far.
    pub fn record(&self) -> Vec<Operation> {
        self.lock().log.replace(Vec::new()).unwrap_or_default()
    }

    /// All bytes, past every queue and filter.
    pub fn bytes(&self) -> Vec<u8> {
        let state = self.lock();
        let mut bytes = vec![0; state.end as usize];
        state.read(0, &mut bytes);
        bytes
    }

    /// Overwrites bytes, past every queue and filter; grows the file where needed.
    pub fn poke(&self, offset: u64, bytes: &[u8]) {
        let mut state = self.lock();
        state.end = state.end.max(offset + bytes.len() as u64);
        state.write(offset, bytes);
    }

    fn check_alignment(&self, offset: u64, segments: &Segments) -> Result<()> {
        let align = u64::from(self.facts.request_align);
        if offset.is_multiple_of(align) && (segments.len() as u64).is_multiple_of(align) {
            return Ok(());
        }
        Err(Error::new(
            Kind::Invalid,
            "submit a request",
            format!("{} bytes are not aligned to {align}", segments.len()),
        )
        .at(offset))
    }

    fn submit(
        &self,
        queue: &Queue,
        operation: Operation,
        run: impl FnOnce(&mut State) -> Result<Value> + 'static,
    ) -> Completion {
        let mut state = self.lock();
        if let Some(log) = &mut state.log {
            log.push(operation);
        }
        if let Some((filter, errno)) = &mut state.fail
            && filter(operation)
        {
            let error = Error::from_errno("use the storage", *errno).file(&self.name);
            return Completion::ready(Err(error));
        }
        if !state.hold.as_mut().is_some_and(|filter| filter(operation)) {
            let name = &self.name;
            return Completion::ready(run(&mut state).map_err(|error| error.file(name)));
        }
        let gate = Arc::new(Mutex::new(Gate::default()));
        state.held.push(Held { operation, gate: gate.clone() });
        drop(state);
        let (promise, ended) = completion();
        let (state, name) = (self.state.clone(), self.name.clone());
        queue.spawn(async move {
            poll_fn(|cx| {
                let mut gate = gate.lock().unwrap();
                if gate.open {
                    return Poll::Ready(());
                }
                gate.waker = Some(cx.waker().clone());
                Poll::Pending
            })
            .await;
            let result = {
                let mut state = state.lock().unwrap();
                state.held.retain(|held| !Arc::ptr_eq(&held.gate, &gate));
                run(&mut state).map_err(|error| error.file(&name))
            };
            promise.fulfil(result);
        });
        ended
    }
}

impl State {
    fn read(&self, offset: u64, into: &mut [u8]) {
        into.fill(0);
        let end = offset + into.len() as u64;
        for (&page, bytes) in self.pages.range(offset / PAGE..end.div_ceil(PAGE)) {
            let start = page * PAGE;
            let (from, to) = (offset.max(start), end.min(start + PAGE));
            into[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&bytes[(from - start) as usize..(to - start) as usize]);
        }
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        let end = offset + from.len() as u64;
        let mut position = offset;
        while position < end {
            let page = position / PAGE;
            let to = end.min((page + 1) * PAGE);
            let bytes =
                self.pages.entry(page).or_insert_with(|| vec![0; PAGE as usize].into_boxed_slice());
            bytes[(position - page * PAGE) as usize..(to - page * PAGE) as usize]
                .copy_from_slice(&from[(position - offset) as usize..(to - offset) as usize]);
            position = to;
        }
    }

    fn zero(&mut self, offset: u64, end: u64) {
        let whole = offset.div_ceil(PAGE)..end / PAGE;
        if whole.is_empty() {
            return self.zero_partial(offset, end);
        }
        self.zero_partial(offset, whole.start * PAGE);
        self.zero_partial(whole.end * PAGE, end);
        let gone: Vec<u64> = self.pages.range(whole).map(|(&page, _)| page).collect();
        for page in gone {
            self.pages.remove(&page);
        }
    }

    fn zero_partial(&mut self, offset: u64, end: u64) {
        for page in offset / PAGE..end.div_ceil(PAGE) {
            if let Some(bytes) = self.pages.get_mut(&page) {
                let start = page * PAGE;
                let (from, to) = (offset.max(start), end.min(start + PAGE));
                bytes[(from - start) as usize..(to - start) as usize].fill(0);
            }
        }
    }

    fn status(&self, offset: u64, length: u64) -> Extent {
        let end = offset + length;
        let mut pages = self.pages.range(offset / PAGE..end.div_ceil(PAGE)).map(|(&page, _)| page);
        let mut page = offset / PAGE;
        match pages.next() {
            Some(first) if first == page => {
                page += 1;
                for next in pages {
                    if next != page {
                        break;
                    }
                    page += 1;
                }
                Extent { length: end.min(page * PAGE) - offset, data: true }
            }
            Some(first) => Extent { length: first * PAGE - offset, data: false },
            None => Extent { length, data: false },
        }
    }
}

impl Storage for MemoryFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn end(&self) -> u64 {
        self.lock().end
    }

    fn read(&self, queue: &Queue, offset: u64, into: Segments) -> Completion {
        if let Err(error) = self.check_alignment(offset, &into) {
            return Completion::ready(Err(error.file(&self.name)));
        }
        let operation = Operation::Read { offset, length: into.len() as u64 };
        self.submit(queue, operation, move |state| {
            let mut bytes = vec![0; into.len()];
            state.read(offset, &mut bytes);
            into.copy_from(&bytes);
            Ok(Value::Unit)
        })
    }

    fn write(&self, queue: &Queue, offset: u64, from: Segments, _: Durability) -> Completion {
        if let Err(error) = self.check_alignment(offset, &from) {
            return Completion::ready(Err(error.file(&self.name)));
        }
        let operation = Operation::Write { offset, length: from.len() as u64 };
        self.submit(queue, operation, move |state| {
            if offset.checked_add(from.len() as u64).is_none_or(|end| end > state.end) {
                let why = format!("the file ends at {:#x}", state.end);
                return Err(Error::new(Kind::Invalid, "write beyond the end", why).at(offset));
            }
            state.write(offset, &from.to_vec());
            Ok(Value::Unit)
        })
    }

    fn flush(&self, queue: &Queue) -> Completion {
        self.submit(queue, Operation::Flush, |_| Ok(Value::Unit))
    }

    fn manage(&self, queue: &Queue, change: Manage) -> Completion {
        self.submit(queue, Operation::Manage(change), move |state| {
            match change {
                Manage::Grow { end, .. } => state.end = state.end.max(end),
                Manage::Shrink { end } => {
                    if end < state.end {
                        let old = state.end;
                        state.zero(end, old);
                        state.end = end;
                    }
                }
                Manage::Punch { offset, length } | Manage::ZeroRange { offset, length } => {
                    let end = offset.saturating_add(length).min(state.end);
                    if offset < end {
                        state.zero(offset, end);
                    }
                }
            }
            Ok(Value::Unit)
        })
    }

    fn status(&self, queue: &Queue, offset: u64, length: u64) -> Completion {
        let operation = Operation::Read { offset, length: 0 };
        self.submit(queue, operation, move |state| Ok(Value::Extent(state.status(offset, length))))
    }
}

impl fmt::Debug for MemoryFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryFile({})", self.name)
    }
}
