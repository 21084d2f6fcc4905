//! What the guest may read, by its own history alone.
//!
//! The disk's bytes are cut into cells at the borders of all requests so far. A cell holds the
//! values that some request gave it, each with the time of its request:
//!
//! ```text
//!   started ───────── ended         another started ── ended: the first is hidden from later reads,
//!      └ a read may see it from here on                        and buried once a flush covers the other
//! ```
//!
//! - **R1** A read may return, per guest sector, any value that was not hidden when the read began. A
//!   value is hidden when a request that *started after it ended* has succeeded.
//! - After a power cut, every value that is not buried may come back: the last flushed ones and
//!   every later submitted one. A value is buried when a flush (or a durable write) has succeeded
//!   that covers a request which started after the value's request had ended.
//! - A failed request and a discard add their value and hide none.
//! - While the disk is made longer or shorter, it may have either size, after a cut too. Beyond its end
//!   there are zeros, for when it grows; a shorter one has lost the rest only if it has that size.
//! - Where a failed host flush has made old bytes show again, no disk above can know it: reads are
//!   not judged until the power has failed ([`Oracle::suspend`]).
//!
//! Each 8 bytes written are a number from which the value and the offset can be told again, so that
//! a wrong read names the request, or the other cluster, whose bytes it got.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::ops::Range;

use stillpoint_io::Kind;

use crate::chance::{mix, unmix};

/// What a request writes: a number that is never used twice. See [`bytes_of`].
pub type Value = u32;

/// The value of bytes that read as zeros.
pub const ZEROS: Value = 0;

/// The value of a backing file's own bytes.
pub const BACKING: Value = u32::MAX;

/// The value of what an image held from the start.
pub const PREFILLED: Value = u32::MAX - 1;

/// A guest's smallest unit, which no request leaves mixed, in bytes.
const SECTOR: u64 = 512;
const NEVER: u64 = u64::MAX;

/// The bytes that `value` has at `offset`.
pub fn bytes_of(value: Value, offset: u64, into: &mut [u8]) {
    if value == ZEROS {
        return into.fill(0);
    }
    let end = offset + into.len() as u64;
    for word in offset / 8..end.div_ceil(8) {
        let bytes = mix(u64::from(value) << 32 | word).to_le_bytes();
        let (from, to) = (offset.max(word * 8), end.min(word * 8 + 8));
        into[(from - offset) as usize..(to - offset) as usize]
            .copy_from_slice(&bytes[(from - word * 8) as usize..(to - word * 8) as usize]);
    }
}

/// The value and offset whose bytes these 8 are, if they are anybody's.
fn recognise(bytes: [u8; 8]) -> (Value, u64) {
    let number = unmix(u64::from_le_bytes(bytes));
    ((number >> 32) as Value, (number & 0xffff_ffff) * 8)
}

/// A request under way: what to tell the oracle when it has ended.
#[derive(Clone, Debug)]
#[must_use = "tell the oracle how it ended"]
pub struct Request {
    range: Range<u64>,
    value: Value,
    started: u64,
}

impl Request {
    /// What it writes.
    pub fn value(&self) -> Value {
        self.value
    }
}

/// The disk's size is one of these, in bytes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    since: u64,
    low: u64,
    high: u64,
}

/// A change of the disk's size under way: what to tell the oracle when it has ended.
#[derive(Clone, Debug)]
#[must_use = "tell the oracle how it ended"]
pub struct Resize {
    old: u64,
    new: u64,
    before: BTreeSet<u64>,
}

#[derive(Clone, Debug)]
struct Candidate {
    value: Value,
    started: u64,
    /// [`NEVER`] while it is in flight.
    ended: u64,
    /// It succeeded, and is not one that hides nothing.
    covers: bool,
    /// When a later request that covers it ended.
    hidden: u64,
    buried: bool,
}

#[derive(Clone, Debug)]
struct Cell {
    end: u64,
    candidates: Vec<Candidate>,
    /// A request has changed it since the disk was last read as a whole.
    touched: bool,
}

impl Cell {
    fn new(end: u64, only: Candidate) -> Cell {
        Cell { end, candidates: vec![only], touched: false }
    }
}

/// The judge of everything that a guest reads; see the module's head.
#[derive(Clone, Debug)]
pub struct Oracle {
    size: u64,
    /// The sizes that a guest may have met, and since when, in order.
    sizes: Vec<Sizes>,
    /// The sizes that it may have after a power cut.
    after_cut: BTreeSet<u64>,
    /// Whether a tail may read as zeros before the disk is shorter.
    loses_tails_early: bool,
    /// Up to the largest size so far.
    cells: BTreeMap<u64, Cell>,
    now: u64,
    last_value: Value,
    suspended: bool,
    /// Reads under way: when each began. What they may still see is kept.
    reads: Vec<u64>,
}

impl Oracle {
    /// A disk of `size` bytes that read as zeros.
    pub fn new(size: u64) -> Oracle {
        let zeros = Candidate {
            value: ZEROS,
            started: 0,
            ended: 0,
            covers: true,
            hidden: NEVER,
            buried: false,
        };
        Oracle {
            size,
            sizes: vec![Sizes { since: 0, low: size, high: size }],
            after_cut: BTreeSet::from([size]),
            loses_tails_early: false,
            cells: BTreeMap::from([(0, Cell::new(size, zeros))]),
            now: 0,
            last_value: ZEROS,
            suspended: false,
            reads: Vec::new(),
        }
    }

    /// A disk whose tail may read as zeros before it is shorter: a raw one.
    pub fn losing_tails_early(self) -> Oracle {
        Oracle { loses_tails_early: true, ..self }
    }

    fn end(&self) -> u64 {
        self.cells.last_key_value().map_or(0, |(_, cell)| cell.end)
    }

    /// Whether a request of `range` that began at `started` may be refused for lying beyond the end.
    pub fn may_refuse(&self, started: u64, range: &Range<u64>) -> bool {
        self.sizes_since(started).any(|sizes| range.end > sizes.low)
    }

    /// Whether such a request may succeed.
    pub fn may_accept(&self, started: u64, range: &Range<u64>) -> bool {
        self.sizes_since(started).any(|sizes| range.end <= sizes.high)
    }

    fn sizes_since(&self, started: u64) -> impl Iterator<Item = &Sizes> {
        let first = self.sizes.iter().rposition(|sizes| sizes.since <= started).unwrap_or(0);
        self.sizes[first..].iter()
    }

    /// The disk is being made one of `size` bytes.
    pub fn start_resize(&mut self, size: u64) -> Resize {
        let since = self.tick();
        let old = self.size;
        let before = self.after_cut.clone();
        self.after_cut.insert(size);
        if size > self.end() {
            let zeros = Cell::new(size, self.durable(ZEROS));
            self.cells.insert(self.end(), zeros);
        }
        if size > old {
            self.reset(old..size);
        } else if self.loses_tails_early && size < old {
            let request = self.start(size..old, ZEROS);
            self.left_open(request);
        }
        self.sizes.push(Sizes { since, low: old.min(size), high: old.max(size) });
        Resize { old, new: size, before }
    }

    /// That has ended. Without space, or refused, nothing has changed; after another failure a cut may
    /// show either size.
    pub fn resized(&mut self, resize: Resize, result: &stillpoint_io::Result<()>) {
        let since = self.tick();
        match result {
            Ok(()) => {
                self.size = resize.new;
                self.after_cut = BTreeSet::from([self.size]);
                if resize.new < resize.old {
                    self.reset(resize.new..resize.old);
                }
            }
            Err(error) if matches!(error.kind(), Kind::NoSpace | Kind::Invalid) => {
                self.after_cut = resize.before;
            }
            Err(_) => {}
        }
        self.sizes.push(Sizes { since, low: self.size, high: self.size });
    }

    /// A range reads as zeros, and its past is gone.
    fn reset(&mut self, range: Range<u64>) {
        let zeros = self.durable(ZEROS);
        for cell in self.cells_in(&range) {
            *cell = Cell { touched: true, ..Cell::new(cell.end, zeros.clone()) };
        }
    }

    /// What holds `value` from now on.
    fn durable(&self, value: Value) -> Candidate {
        let now = self.now;
        Candidate { value, started: now, ended: now, covers: true, hidden: NEVER, buried: false }
    }

    /// A range holds `value` from the start, as far as it is on the disk.
    pub fn preset(&mut self, range: Range<u64>, value: Value) {
        let range = range.start.min(self.end())..range.end.min(self.end());
        for cell in self.cells_in(&range) {
            cell.candidates[0].value = value;
        }
    }

    /// The number of the last thing that it was told.
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    /// The disk's size in bytes; while it changes, the old one.
    pub fn size(&self) -> u64 {
        self.size
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Makes `offset` a border of cells.
    fn split(&mut self, offset: u64) {
        if let Some((&start, cell)) = self.cells.range_mut(..offset).next_back()
            && start < offset
            && offset < cell.end
        {
            let right = cell.clone();
            cell.end = offset;
            self.cells.insert(offset, right);
        }
    }

    fn cells_in(&mut self, range: &Range<u64>) -> impl Iterator<Item = &mut Cell> {
        self.split(range.start);
        self.split(range.end);
        self.cells.range_mut(range.clone()).map(|(_, cell)| cell)
    }

    fn start(&mut self, range: Range<u64>, value: Value) -> Request {
        assert!(range.start < range.end, "{range:?} is no range");
        if range.end > self.end() {
            let zeros = Cell::new(range.end, self.durable(ZEROS));
            self.cells.insert(self.end(), zeros);
        }
        let started = self.tick();
        let candidate =
            Candidate { value, started, ended: NEVER, covers: false, hidden: NEVER, buried: false };
        for cell in self.cells_in(&range) {
            cell.candidates.push(candidate.clone());
            cell.touched = true;
        }
        Request { range, value, started }
    }

    /// A write begins; it is to write [`bytes_of`] the request's value.
    pub fn start_write(&mut self, range: Range<u64>) -> Request {
        self.last_value += 1;
        self.start(range, self.last_value)
    }

    /// A write-zeroes begins, or a discard.
    pub fn start_zeroes(&mut self, range: Range<u64>) -> Request {
        self.start(range, ZEROS)
    }

    /// A write or write-zeroes has succeeded; `durable` if it promised to be.
    pub fn written(&mut self, request: Request, durable: bool) {
        let ended = self.tick();
        // What is durable beyond the old end is nowhere if the disk ends there.
        let end = request.range.end;
        if durable && end > self.size {
            self.after_cut.retain(|&size| size >= end);
        }
        for cell in self.cells_in(&request.range) {
            for candidate in &mut cell.candidates {
                if candidate.ended < request.started {
                    candidate.hidden = candidate.hidden.min(ended);
                    candidate.buried |= durable;
                }
                if candidate.started == request.started {
                    candidate.ended = ended;
                    candidate.covers = true;
                }
            }
        }
        self.prune(&request.range);
    }

    /// A request has failed, or was a discard: it has added a value, and hides none.
    pub fn left_open(&mut self, request: Request) {
        let ended = self.tick();
        for cell in self.cells_in(&request.range) {
            for candidate in &mut cell.candidates {
                if candidate.started == request.started {
                    candidate.ended = ended;
                }
            }
        }
    }

    /// A request was refused, and has done nothing.
    pub fn withdrawn(&mut self, request: Request) {
        for cell in self.cells_in(&request.range) {
            cell.candidates.retain(|candidate| candidate.started != request.started);
        }
    }

    /// A flush begins: the instant to give to [`Oracle::flushed`].
    pub fn start_flush(&mut self) -> u64 {
        self.tick()
    }

    /// The flush that began at `started` has succeeded.
    pub fn flushed(&mut self, started: u64) {
        for cell in self.cells.values_mut() {
            let covered = cell.candidates.iter().filter(|c| c.covers && c.ended < started);
            let Some(last) = covered.map(|candidate| candidate.started).max() else { continue };
            for candidate in &mut cell.candidates {
                candidate.buried |= candidate.ended < last;
            }
        }
        self.prune(&(0..self.end()));
    }

    /// Forgets what neither a read under way nor a power cut can bring back.
    fn prune(&mut self, range: &Range<u64>) {
        let oldest = self.reads.iter().copied().min().unwrap_or(NEVER);
        for (_, cell) in self.cells.range_mut(range.clone()) {
            cell.candidates.retain(|candidate| !candidate.buried || candidate.hidden > oldest);
        }
    }

    /// The host shows old bytes again after a failed flush: reads are not judged until a power cut.
    pub fn suspend(&mut self) {
        self.suspended = true;
    }

    /// A read begins: the instant to give to [`Oracle::judge_read`] or [`Oracle::read_failed`].
    pub fn start_read(&mut self) -> u64 {
        let started = self.tick();
        self.reads.push(started);
        started
    }

    /// A read that began at `started` has failed and shows nothing.
    pub fn read_failed(&mut self, started: u64) {
        self.reads.retain(|&read| read != started);
    }

    /// The read that began at `started` has returned `bytes` at `offset`.
    ///
    /// # Errors
    /// Says which bytes are not allowed, what is, and whose bytes they are.
    pub fn judge_read(&mut self, started: u64, offset: u64, bytes: &[u8]) -> Result<(), String> {
        self.read_failed(started);
        if self.suspended {
            return Ok(());
        }
        self.judge(offset, bytes, |candidate| candidate.hidden > started)
    }

    fn judge(
        &self,
        offset: u64,
        bytes: &[u8],
        allowed: impl Fn(&Candidate) -> bool,
    ) -> Result<(), String> {
        for (range, cell) in self.pieces(offset..offset + bytes.len() as u64) {
            let piece = &bytes[(range.start - offset) as usize..(range.end - offset) as usize];
            let fits = |candidate: &&Candidate| holds(piece, candidate.value, range.start);
            if !cell.candidates.iter().rev().filter(|c| allowed(c)).any(|c| fits(&c)) {
                return Err(explain(&range, piece, cell, &allowed));
            }
        }
        Ok(())
    }

    /// A range cut at the borders of cells and of guest sectors.
    fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, &Cell)> {
        let first = self.cells.range(..=range.start).next_back().map_or(0, |(&start, _)| start);
        self.cells.range(first..range.end).flat_map(move |(&start, cell)| {
            let (from, to) = (start.max(range.start), cell.end.min(range.end));
            (from / SECTOR..to.div_ceil(SECTOR)).map(move |sector| {
                (from.max(sector * SECTOR)..to.min(sector * SECTOR + SECTOR), cell)
            })
        })
    }

    /// The power has failed: whatever was under way may have happened or not.
    pub fn power_cut(&mut self) {
        let now = self.tick();
        self.reads.clear();
        self.suspended = false;
        for cell in self.cells.values_mut() {
            cell.candidates.retain(|candidate| !candidate.buried);
            for candidate in &mut cell.candidates {
                candidate.ended = candidate.ended.min(now);
                candidate.hidden = NEVER;
            }
        }
    }

    /// A disk of `size` bytes was found after a power cut.
    ///
    /// # Errors
    /// Says which sizes are allowed.
    pub fn judge_size(&self, size: u64) -> Result<(), String> {
        match self.after_cut.contains(&size) {
            true => Ok(()),
            false => Err(format!("the size is {size:#x}; allowed: {:#x?}", self.after_cut)),
        }
    }

    /// The ranges that requests have changed since the disk was last read as a whole.
    pub fn touched(&self) -> Vec<Range<u64>> {
        let mut touched: Vec<Range<u64>> = Vec::new();
        for (&start, cell) in self.cells.iter().filter(|(_, cell)| cell.touched) {
            match touched.last_mut() {
                Some(last) if last.end == start => last.end = cell.end,
                _ => touched.push(start..cell.end),
            }
        }
        touched
    }

    /// After a power cut and recovery, a part of the disk reads as `bytes` at `offset`.
    ///
    /// # Errors
    /// As [`Oracle::judge_read`].
    pub fn judge_recovered(&self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        self.judge(offset, bytes, |candidate| !candidate.buried)
    }

    /// After a power cut and recovery, the whole disk reads as `bytes`: judges them, and takes what
    /// was found as what is durable from now on.
    ///
    /// # Errors
    /// As [`Oracle::judge_read`].
    pub fn recovered(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.judge_recovered(0, bytes)?;
        let size = bytes.len() as u64;
        let since = self.tick();
        let mut found: Vec<(Range<u64>, Value)> = Vec::new();
        for (range, cell) in self.pieces(0..size) {
            let piece = &bytes[range.start as usize..range.end as usize];
            let mut candidates = cell.candidates.iter().rev();
            let value = candidates
                .find(|c| !c.buried && holds(piece, c.value, range.start))
                .expect("judged above")
                .value;
            match found.last_mut() {
                Some((last, same)) if *same == value => last.end = range.end,
                _ => found.push((range, value)),
            }
        }
        let cell = |(range, value): (Range<u64>, Value)| {
            (range.start, Cell::new(range.end, self.durable(value)))
        };
        self.cells = found.into_iter().map(cell).collect();
        self.size = size;
        self.sizes = vec![Sizes { since, low: size, high: size }];
        self.after_cut = BTreeSet::from([size]);
        Ok(())
    }
}

/// Whether `piece`, at `offset`, is `value`'s bytes.
fn holds(piece: &[u8], value: Value, offset: u64) -> bool {
    let mut expected = [0; SECTOR as usize];
    let expected = &mut expected[..piece.len()];
    bytes_of(value, offset, expected);
    piece == expected
}

fn name(value: Value) -> String {
    match value {
        ZEROS => "zeros".to_owned(),
        BACKING => "the backing file's bytes".to_owned(),
        PREFILLED => "the image's first bytes".to_owned(),
        _ => format!("write {value}"),
    }
}

fn explain(
    range: &Range<u64>,
    piece: &[u8],
    cell: &Cell,
    allowed: &impl Fn(&Candidate) -> bool,
) -> String {
    let mut text = format!("bytes {:#x}..{:#x} read as ", range.start, range.end);
    let whole_word = (range.start.next_multiple_of(8) - range.start) as usize;
    let word = piece.get(whole_word..whole_word + 8).map(|word| word.try_into().expect("8 bytes"));
    let _ = match word.map(|word: [u8; 8]| (word, recognise(word))) {
        _ if piece.iter().all(|&byte| byte == 0) => write!(text, "zeros"),
        Some((_, (value, offset)))
            if offset < 1 << 34 && !(1 << 24..PREFILLED).contains(&value) =>
        {
            let start = range.start + whole_word as u64;
            write!(text, "{}", name(value))
                .and_then(|()| match offset == start {
                    true => Ok(()),
                    false => write!(text, " of another place, {offset:#x}"),
                })
                .and_then(|()| match holds(piece, value, range.start) {
                    true => Ok(()),
                    false => write!(text, ", mixed with others"),
                })
        }
        Some((word, _)) => write!(text, "nobody's bytes ({word:02x?})"),
        None => write!(text, "{piece:02x?}"),
    };
    let _ = write!(text, "; allowed:");
    for candidate in cell.candidates.iter().filter(|candidate| allowed(candidate)) {
        let _ = write!(text, " {} (started {}", name(candidate.value), candidate.started);
        let _ = match candidate.ended {
            NEVER => write!(text, ", in flight)"),
            ended if candidate.covers => write!(text, ", done {ended})"),
            ended => write!(text, ", left open {ended})"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: u64 = 4096;

    fn bytes(value: Value) -> Vec<u8> {
        let mut bytes = vec![0; DISK as usize];
        bytes_of(value, 0, &mut bytes);
        bytes
    }

    fn reads_as(oracle: &mut Oracle, value: Value) -> bool {
        let read = oracle.start_read();
        oracle.judge_read(read, 0, &bytes(value)).is_ok()
    }

    fn write(oracle: &mut Oracle) -> Value {
        let request = oracle.start_write(0..DISK);
        let value = request.value();
        oracle.written(request, false);
        value
    }

    fn comes_back(oracle: &Oracle, value: Value) -> bool {
        oracle.judge(0, &bytes(value), |candidate| !candidate.buried).is_ok()
    }

    #[test]
    fn reads_see_the_last_completed_write_and_those_in_flight() {
        let mut oracle = Oracle::new(DISK);
        let first = write(&mut oracle);
        let second = oracle.start_write(0..DISK);
        assert!(reads_as(&mut oracle, first) && reads_as(&mut oracle, second.value()));
        assert!(!reads_as(&mut oracle, ZEROS));
        let value = second.value();
        let early = oracle.start_read();
        oracle.written(second, false);
        assert!(!reads_as(&mut oracle, first) && reads_as(&mut oracle, value));
        assert!(oracle.judge_read(early, 0, &bytes(first)).is_ok(), "it began before");
    }

    #[test]
    fn a_flush_buries_what_its_writes_replaced_and_no_more() {
        let mut oracle = Oracle::new(DISK);
        let first = write(&mut oracle);
        let flush = oracle.start_flush();
        let second = write(&mut oracle);
        assert!(comes_back(&oracle, ZEROS));
        oracle.flushed(flush);
        assert!(!comes_back(&oracle, ZEROS));
        assert!(comes_back(&oracle, first) && comes_back(&oracle, second));
    }

    #[test]
    fn a_durable_write_buries_at_once() {
        let mut oracle = Oracle::new(DISK);
        oracle.preset(0..DISK, BACKING);
        let request = oracle.start_write(0..DISK);
        let value = request.value();
        oracle.written(request, true);
        assert!(!comes_back(&oracle, BACKING) && comes_back(&oracle, value));
    }

    #[test]
    fn failed_requests_and_discards_add_and_never_remove() {
        let mut oracle = Oracle::new(DISK);
        let first = write(&mut oracle);
        let flush = oracle.start_flush();
        oracle.flushed(flush);
        let failed = oracle.start_write(0..DISK);
        let value = failed.value();
        oracle.left_open(failed);
        let discard = oracle.start_zeroes(0..DISK);
        oracle.left_open(discard);
        let flush = oracle.start_flush();
        oracle.flushed(flush);
        for possible in [first, value, ZEROS] {
            assert!(reads_as(&mut oracle, possible) && comes_back(&oracle, possible));
        }
        let last = write(&mut oracle);
        assert!(reads_as(&mut oracle, last) && !reads_as(&mut oracle, value));
    }

    #[test]
    fn a_sector_is_one_value_and_sectors_may_differ() {
        let mut oracle = Oracle::new(DISK);
        let first = write(&mut oracle);
        let second = oracle.start_write(0..DISK).value();
        let mut mixed = bytes(first);
        mixed[512..1024].copy_from_slice(&bytes(second)[512..1024]);
        let read = oracle.start_read();
        assert!(oracle.judge_read(read, 0, &mixed).is_ok());
        mixed[600..700].copy_from_slice(&bytes(first)[600..700]);
        let read = oracle.start_read();
        let error = oracle.judge_read(read, 0, &mixed).unwrap_err();
        assert!(error.contains("mixed with others"), "{error}");
    }

    #[test]
    fn odd_borders_are_judged_byte_by_byte() {
        let mut oracle = Oracle::new(DISK);
        let request = oracle.start_write(3..17);
        let mut disk = bytes(ZEROS);
        bytes_of(request.value(), 3, &mut disk[3..17]);
        oracle.written(request, false);
        let read = oracle.start_read();
        assert!(oracle.judge_read(read, 0, &disk).is_ok());
        disk[17] = 1;
        let read = oracle.start_read();
        assert!(oracle.judge_read(read, 0, &disk).is_err());
    }

    #[test]
    fn bytes_of_another_place_are_named() {
        let mut oracle = Oracle::new(DISK);
        let value = write(&mut oracle);
        let mut disk = bytes(value);
        disk.copy_within(0..512, 1024);
        let read = oracle.start_read();
        let error = oracle.judge_read(read, 0, &disk).unwrap_err();
        assert!(error.contains("write 1 of another place, 0x0"), "{error}");
    }

    #[test]
    fn what_recovery_found_is_durable() {
        let mut oracle = Oracle::new(DISK);
        let first = write(&mut oracle);
        let _ = oracle.start_write(0..DISK);
        oracle.power_cut();
        oracle.recovered(&bytes(first)).unwrap();
        assert!(comes_back(&oracle, first) && !comes_back(&oracle, ZEROS));
    }
}
