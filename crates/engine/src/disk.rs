//! The disk that a guest sees, and the one edge where its requests are checked.
//!
//! Every request goes the same way: it is checked against the disk's bounds, brought to the unit of
//! direct I/O (R9), registered with the tracker, and only then meets the image. Reads of any
//! alignment read whole blocks and hand out a part. Writes that are not whole blocks hold their
//! stripes exclusively, read the blocks at their edges and write whole ones.
//!
//! A request's future must be polled to its end; dropping one in the middle loses no memory and no
//! data of others, but what it had reserved stays out of use until the disk is opened again.

use std::ops::Range;

use async_lock::{Mutex as AsyncMutex, MutexGuard};
use stillpoint_io::{Access, Background, Durability, Error, Files, Kind, Queue, Result, Segments};

use crate::chain::Layer;
use crate::mutant::{Mutant, broken};
use crate::open::Opening;
use crate::options::{DetectZeroes, DiscardPolicy, ImageFormat, Options};
use crate::qcow2::zero::Space;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use crate::tracker::{Entered, Mode, Tracker};

/// The longest read or write, in bytes.
const TRANSFER_MAX: u32 = 64 << 20;
/// Zeros that have to be written out are written in pieces of this many bytes.
const ZEROS: u64 = 1 << 20;
/// Discards and zeroings of any length are done in parts of this, so that none holds much exclusively.
const PART: u64 = 32 << 20;

/// What a server should tell its clients about a disk's units, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests of other alignments work, at the price of a read-modify-write.
    pub preferred_block: u32,
    /// Discards of aligned multiples of this give space back; others may do nothing.
    pub discard_unit: u32,
    /// The longest single read or write; discards and zeroings may be of any length.
    pub transfer_max: u32,
}

/// How far write-zeroes may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zeroing {
    /// The space may be given back.
    pub unmap: bool,
    /// Fail with `Unsupported` rather than write zeros out (NBD's fast zero).
    pub fast_only: bool,
}

/// One run of a disk with the same answer to "what is here?".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its length in bytes; at least 1.
    pub length: u64,
    /// It reads as zeros.
    pub zero: bool,
    /// It is backed by data in a host file.
    pub data: bool,
    /// It is compressed.
    pub compressed: bool,
    /// Some layer says what is here: 0 the active image, 1 its backing file...; `None` if none does.
    pub depth: Option<u32>,
    /// Where it lies in its layer's file, if plain data lies there.
    pub host_offset: Option<u64>,
}

/// A disk: an image, its backing chain and all state that its requests share. One `Disk` serves any
/// number of queues at once.
#[derive(Debug)]
pub struct Disk {
    image: Layer,
    tracker: Arc<Tracker>,
    /// The unit that requests are brought to, in bytes: what suits every file of the chain.
    align: u64,
    access: Access,
    discard: DiscardPolicy,
    detect_zeroes: DetectZeroes,
    /// The size that requests are held to, in bytes.
    size: AtomicU64,
    /// The size that is durable; held while it changes.
    resizing: AsyncMutex<u64>,
    closed: AtomicBool,
}

impl Disk {
    /// Opens the image called `name` and its backing chain.
    ///
    /// # Errors
    /// Whatever is wrong with the image or the files, by name; see `open.rs`.
    pub async fn open(
        queue: &Queue,
        files: &Arc<dyn Files>,
        background: &Arc<dyn Background>,
        name: &str,
        options: Options,
    ) -> Result<Arc<Disk>> {
        let tracker = Arc::new(Tracker::new());
        let mut opening = Opening {
            queue,
            files: &**files,
            background,
            tracker: &tracker,
            options: &options,
            met: Vec::new(),
        };
        let image = opening.active(name).await?;
        Ok(Arc::new(Disk {
            align: image.request_align(),
            size: AtomicU64::new(image.size()),
            resizing: AsyncMutex::new(image.size()),
            image,
            tracker,
            access: options.access,
            discard: options.discard,
            detect_zeroes: options.detect_zeroes,
            closed: AtomicBool::new(false),
        }))
    }

    /// The size that the guest sees, in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(SeqCst)
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.access != Access::Write
    }

    /// The format of the active image.
    pub fn format(&self) -> ImageFormat {
        match &self.image {
            Layer::Raw(_) => ImageFormat::Raw,
            Layer::Qcow2(_) => ImageFormat::Qcow2,
        }
    }

    /// What to tell clients about units.
    pub fn limits(&self) -> Limits {
        let discard_unit = match &self.image {
            Layer::Raw(raw) => raw.file.facts().fs_block,
            Layer::Qcow2(image) => image.geometry().subcluster_size() as u32,
        };
        Limits {
            preferred_block: (self.align as u32).max(4096),
            discard_unit,
            transfer_max: TRANSFER_MAX,
        }
    }

    /// Reads `into.len()` bytes at `offset`.
    pub async fn read(&self, queue: &Queue, offset: u64, into: Segments) -> Result<()> {
        let range = self.check(offset, into.len() as u64, "read")?;
        check_transfer(&range, "read")?;
        if range.is_empty() {
            return Ok(());
        }
        let blocks = self.blocks(&range);
        let _entered = self.enter(&range, blocks.clone(), Mode::Shared).await?;
        if blocks == range {
            return self.read_blocks(queue, offset, &into).await;
        }
        // Boxed, like every rare branch here, so that the common futures stay small.
        Box::pin(self.read_around(queue, blocks, range, into)).await
    }

    /// Reads the whole blocks around a range, and hands the range out.
    async fn read_around(
        &self,
        queue: &Queue,
        blocks: Range<u64>,
        range: Range<u64>,
        into: Segments,
    ) -> Result<()> {
        let bounce = Segments::alloc((blocks.end - blocks.start) as usize);
        self.read_blocks(queue, blocks.start, &bounce).await?;
        let from = (range.start - blocks.start) as usize;
        into.copy_from_segments(&bounce.slice(from..from + into.len()));
        Ok(())
    }

    /// Writes `from.len()` bytes at `offset`. The bytes must not change before this ends.
    pub async fn write(
        &self,
        queue: &Queue,
        offset: u64,
        from: Segments,
        durability: Durability,
    ) -> Result<()> {
        let range = self.check_change(offset, from.len() as u64, "write")?;
        check_transfer(&range, "write")?;
        if range.is_empty() {
            return self.settle(queue, durability).await;
        }
        if self.detect_zeroes != DetectZeroes::Off && from.is_zero() {
            let unmap = self.detect_zeroes == DetectZeroes::Unmap;
            let zeroing = Zeroing { unmap, fast_only: false };
            let length = range.end - range.start;
            return Box::pin(self.write_zeroes(queue, offset, length, zeroing, durability)).await;
        }
        let blocks = self.blocks(&range);
        if blocks == range {
            let _entered = self.enter_to_change(&range, blocks, Mode::Shared).await?;
            return self.write_blocks(queue, offset, &from, durability).await;
        }
        let mode = exclusive_unless(Mutant::R1Unaligned);
        let _alone = self.enter_to_change(&range, blocks, mode).await?;
        Box::pin(self.write_alone(queue, range, from, durability)).await
    }

    /// Writes a range of any alignment; the caller holds its blocks exclusively.
    async fn write_alone(
        &self,
        queue: &Queue,
        range: Range<u64>,
        from: Segments,
        durability: Durability,
    ) -> Result<()> {
        let blocks = self.blocks(&range);
        if blocks == range {
            return self.write_blocks(queue, range.start, &from, durability).await;
        }
        let whole = Segments::alloc((blocks.end - blocks.start) as usize);
        let (head, tail) =
            ((range.start - blocks.start) as usize, (range.end - blocks.start) as usize);
        let align = self.align as usize;
        if head > 0 {
            self.read_blocks(queue, blocks.start, &whole.slice(0..align)).await?;
        }
        if tail < whole.len() && (head == 0 || whole.len() > align) {
            let last = whole.len() - align;
            let block = whole.slice(last..whole.len());
            self.read_blocks(queue, blocks.start + last as u64, &block).await?;
        }
        whole.slice(head..tail).copy_from_segments(&from);
        self.write_blocks(queue, blocks.start, &whole, durability).await
    }

    /// Writes zeros to a range of any alignment, a little at a time; the caller holds its blocks
    /// exclusively.
    async fn write_zeros_out(&self, queue: &Queue, range: Range<u64>) -> Result<()> {
        let zeros = Segments::zeroed(ZEROS.min(range.end - range.start) as usize);
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start / ZEROS + 1) * ZEROS);
            let some = zeros.slice(0..(end - start) as usize);
            self.write_alone(queue, start..end, some, Durability::Volatile).await?;
            start = end;
        }
        Ok(())
    }

    /// Makes a range read as zeros.
    pub async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        zeroing: Zeroing,
        durability: Durability,
    ) -> Result<()> {
        let range = self.check_change(offset, length, "write zeroes")?;
        let unmap = zeroing.unmap && self.discard == DiscardPolicy::Unmap;
        let zeroing = Zeroing { unmap, ..zeroing };
        for part in parts(range) {
            // However long it takes, others on this queue have their turns.
            queue.yield_now().await;
            let mode = exclusive_unless(Mutant::R1Zeroing);
            let _alone = self.enter_to_change(&part, self.clusters(&part), mode).await?;
            let rest = match &self.image {
                Layer::Raw(raw) => {
                    let middle = self.inner_blocks(&part);
                    let length = middle.end - middle.start;
                    let done = length > 0 && raw.zero(queue, middle.start, length, zeroing).await?;
                    if done {
                        [part.start..middle.start, middle.end..part.end].into()
                    } else {
                        vec![part]
                    }
                }
                Layer::Qcow2(image) => {
                    let space = if zeroing.unmap { Space::Released } else { Space::Kept };
                    image.clear(queue, part, space).await?
                }
            };
            for range in rest.into_iter().filter(|range| !range.is_empty()) {
                if zeroing.fast_only {
                    let why = "these zeros would have to be written out";
                    return Err(
                        Error::new(Kind::Unsupported, "write zeroes fast", why).at(range.start)
                    );
                }
                self.write_zeros_out(queue, range).await?;
            }
        }
        self.settle(queue, durability).await
    }

    /// Tells that the guest no longer needs a range. What it reads as afterwards is zeros or its old
    /// bytes.
    pub async fn discard(&self, queue: &Queue, offset: u64, length: u64) -> Result<()> {
        let range = self.check_change(offset, length, "discard")?;
        if self.discard == DiscardPolicy::Ignore {
            return Ok(());
        }
        for part in parts(range) {
            queue.yield_now().await;
            match &self.image {
                Layer::Raw(raw) => {
                    let middle = self.inner_blocks(&part);
                    if !middle.is_empty() && raw.file.facts().can_punch {
                        let mode = Mode::Exclusive;
                        let _alone = self.enter_to_change(&part, middle.clone(), mode).await?;
                        let zeroing = Zeroing { unmap: true, fast_only: true };
                        raw.zero(queue, middle.start, middle.end - middle.start, zeroing).await?;
                    }
                }
                Layer::Qcow2(image) => {
                    let mode = exclusive_unless(Mutant::R1Zeroing);
                    let _alone = self.enter_to_change(&part, self.clusters(&part), mode).await?;
                    let _kept_as_it_is = image.clear(queue, part, Space::Released).await?;
                }
            }
        }
        Ok(())
    }

    /// Makes durable whatever was answered before this was called.
    pub async fn flush(&self, queue: &Queue) -> Result<()> {
        if self.is_read_only() {
            return Ok(());
        }
        match &self.image {
            Layer::Raw(raw) => raw.flush(queue).await,
            Layer::Qcow2(image) => image.commit(queue).await,
        }
    }

    /// What the run of bytes at `offset` is, up to `length` bytes, or fewer than the run has.
    pub async fn status(&self, queue: &Queue, offset: u64, length: u64) -> Result<Status> {
        let range = self.check(offset, length, "look up")?;
        // Registered, so that no table is given back while it is looked at (R4).
        let _entered = self.enter(&range, offset..offset, Mode::Shared).await?;
        self.image.status(queue, offset, length, 0).await
    }

    /// Changes the disk's size (bytes, a multiple of 512) while requests go on; durable when it ends. What
    /// growing adds reads as zeros. What shrinking cuts off is gone: requests of it that are under way
    /// end first, and later ones are refused. A smaller size has to be meant: `shrink`.
    ///
    /// # Errors
    /// `Invalid` for a size that cannot be, or a smaller one that was not meant; `Unsupported` for images
    /// that have to keep their size, with what to do about it. After `NoSpace` the disk is as it was.
    pub async fn resize(&self, queue: &Queue, size: u64, shrink: bool) -> Result<()> {
        const OP: &str = "resize the disk";
        let mut shown = Shown { disk: self, durable: self.resizing.lock().await };
        let old = *shown.durable;
        self.check_change(0, 0, OP)?;
        if !size.is_multiple_of(512) {
            let why = format!("{size} bytes are no whole sectors");
            return Err(Error::new(Kind::Invalid, OP, why).remedy("choose a multiple of 512"));
        }
        if size < old && !shrink {
            let why = format!("{size} bytes are fewer than its {old}, and what is cut off is lost");
            return Err(Error::new(Kind::Invalid, OP, why)
                .remedy("shrink the file systems on it first, then say `--shrink`"));
        }
        match &self.image {
            Layer::Raw(raw) => raw.refuse_size(size)?,
            Layer::Qcow2(image) => image.refuse_size(size)?,
        }
        if size < old {
            // ORDER: whoever enters from now on sees the new size; whoever entered before is waited for.
            self.size.store(size, SeqCst);
            if !broken(Mutant::ResizeTail) {
                self.tracker.quiesce().await;
            }
        }
        match &self.image {
            _ if size == old => {}
            Layer::Raw(raw) => {
                raw.resize(queue, size).await?;
                shown.settle(size);
            }
            Layer::Qcow2(image) => {
                let write_zeros = async |range| self.write_zeros_out(queue, range).await;
                image.resize(queue, old, size, write_zeros, || shown.settle(size)).await?;
            }
        }
        Ok(())
    }

    /// Waits for the requests under way, flushes, gives back space grown ahead and leaves the image
    /// clean. Later requests are refused.
    pub async fn close(&self, queue: &Queue) -> Result<()> {
        self.closed.store(true, SeqCst);
        // A resize under way goes through; one that comes later is refused.
        drop(self.resizing.lock().await);
        self.tracker.quiesce().await;
        if self.is_read_only() {
            return Ok(());
        }
        match &self.image {
            Layer::Raw(raw) => raw.flush(queue).await,
            // F4: what is left is a plain image that any tool opens and finds clean.
            Layer::Qcow2(image) => image.close(queue).await,
        }
    }

    async fn read_blocks(&self, queue: &Queue, offset: u64, into: &Segments) -> Result<()> {
        match &self.image {
            Layer::Raw(raw) => raw.read(queue, offset, into.clone()).await,
            Layer::Qcow2(image) => image.read(queue, offset, into).await,
        }
    }

    async fn write_blocks(
        &self,
        queue: &Queue,
        offset: u64,
        from: &Segments,
        durability: Durability,
    ) -> Result<()> {
        match &self.image {
            Layer::Raw(raw) => raw.write(queue, offset, from, durability).await,
            Layer::Qcow2(image) => image.write(queue, offset, from, durability).await,
        }
    }

    /// Ends a change: at once, or when it is durable.
    async fn settle(&self, queue: &Queue, durability: Durability) -> Result<()> {
        match durability {
            Durability::Volatile => Ok(()),
            Durability::Durable => self.flush(queue).await,
        }
    }

    /// The one check of a request: the range, within the disk.
    fn check(&self, offset: u64, length: u64, op: &'static str) -> Result<Range<u64>> {
        if self.closed.load(SeqCst) {
            return Err(Error::new(Kind::Cancelled, op, "the disk is closed"));
        }
        let size = self.size();
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(offset..end),
            _ => {
                let why = format!("{length} bytes there exceed the disk's {size} bytes");
                Err(Error::new(Kind::Invalid, op, why).at(offset))
            }
        }
    }

    /// Enters for a change; what has failed while it waited counts, too.
    async fn enter_to_change(
        &self,
        range: &Range<u64>,
        held: Range<u64>,
        mode: Mode,
    ) -> Result<Entered<'_>> {
        let entered = self.enter(range, held, mode).await?;
        self.check_latch()?;
        Ok(entered)
    }

    /// Enters the tracker for a request of `range` that holds the stripes of `held`.
    async fn enter(&self, range: &Range<u64>, held: Range<u64>, mode: Mode) -> Result<Entered<'_>> {
        let entered = self.tracker.enter(held, mode).await;
        // Asked again, once registered: whoever sees the size before a shrink here is waited for by it.
        if range.end > self.size() {
            let why = "the disk has become shorter";
            return Err(Error::new(Kind::Invalid, "use a range", why).at(range.start));
        }
        Ok(entered)
    }

    fn check_change(&self, offset: u64, length: u64, op: &'static str) -> Result<Range<u64>> {
        if self.is_read_only() {
            return Err(Error::new(Kind::ReadOnly, op, "the disk is opened for reading"));
        }
        self.check_latch()?;
        self.check(offset, length, op)
    }

    fn check_latch(&self) -> Result<()> {
        match &self.image {
            Layer::Raw(raw) => raw.latch.check(),
            Layer::Qcow2(image) => image.writer().committer.latch.check(),
        }
    }

    /// The whole blocks around a range.
    fn blocks(&self, range: &Range<u64>) -> Range<u64> {
        range.start / self.align * self.align..range.end.next_multiple_of(self.align)
    }

    /// The whole blocks within a range; an unaligned end of the disk counts as one.
    fn inner_blocks(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start.next_multiple_of(self.align);
        let end =
            if range.end == self.size() { range.end } else { range.end / self.align * self.align };
        start..end.max(start)
    }

    /// The whole clusters around a range.
    fn clusters(&self, range: &Range<u64>) -> Range<u64> {
        let unit = match &self.image {
            Layer::Raw(_) => self.align,
            Layer::Qcow2(image) => image.cluster_size().max(self.align),
        };
        range.start / unit * unit..range.end.next_multiple_of(unit)
    }
}

/// A change of the size: when it ends, or is dropped, requests are held to the size that is durable.
struct Shown<'a> {
    disk: &'a Disk,
    durable: MutexGuard<'a, u64>,
}

impl Shown<'_> {
    /// The disk durably has `size`.
    fn settle(&mut self, size: u64) {
        *self.durable = size;
        // ORDER: what the image holds before what is asked of it. Of a shorter disk it held the tail
        // until now: a request that was under way read there, and after a failure the tail is back.
        self.disk.image.show_size(size);
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.disk.size.store(*self.durable, SeqCst);
    }
}

/// Exclusive, unless this rule is broken.
fn exclusive_unless(mutant: Mutant) -> Mode {
    if broken(mutant) { Mode::Shared } else { Mode::Exclusive }
}

fn check_transfer(range: &Range<u64>, op: &'static str) -> Result<()> {
    let length = range.end - range.start;
    if length <= u64::from(TRANSFER_MAX) {
        return Ok(());
    }
    let why = format!("{length} bytes are more than one request may carry ({TRANSFER_MAX})");
    Err(Error::new(Kind::Invalid, op, why).at(range.start))
}

/// A range in parts that begin at multiples of [`PART`].
pub(crate) fn parts(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let part = start..range.end.min((start / PART + 1) * PART);
        start = part.end;
        (!part.is_empty()).then_some(part)
    })
}
