//! The memory of a request.
//!
//! A request's bytes lie in [`Segments`]: pieces of owned, aligned, pooled memory, or pinned pieces
//! of somebody else's (a guest's). Cloning and slicing share the memory, so that a request can be
//! split over many host operations, each of which keeps what it works on alive until it has ended
//! (R2), whatever became of the request.
//!
//! Shared memory that a device or a guest writes at any time cannot be lent out as `&[u8]`; it is
//! copied in and out through raw pointers, as `vm-memory` does it. Two parties that write one range
//! at once get either's bytes, as on a real disk's DMA; nobody gets a dangling pointer.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use smallvec::SmallVec;

/// The alignment of all owned memory, in bytes: what direct I/O asks for nearly everywhere.
pub const BLOCK: usize = 4096;

/// Memory in classes of 4 KiB << 0 ... 4 KiB << 10 is kept for reuse; larger memory is not.
const CLASS_COUNT: usize = 11;
/// How much of one class a thread keeps, in bytes.
const KEPT_BYTES: usize = 8 << 20;

struct Region {
    start: NonNull<u8>,
    owner: Owner,
}

enum Owner {
    /// A pool's class; the size is `BLOCK << class`.
    Pooled(usize),
    /// The global allocator.
    Allocated(Layout),
    /// Somebody else, whom this keeps alive.
    Foreign(#[allow(dead_code, reason = "held for its drop alone")] Arc<dyn Any + Send + Sync>),
}

// SAFETY: the pointer is only ever used for raw copies inside the region's bounds, and the region
// is freed once, by whoever drops the last reference.
unsafe impl Send for Region {}
// SAFETY: as above; racing copies yield either party's bytes, see the module's head.
unsafe impl Sync for Region {}

thread_local! {
    static POOL: RefCell<[Vec<NonNull<u8>>; CLASS_COUNT]> = const { RefCell::new([const { Vec::new() }; CLASS_COUNT]) };
}

fn layout_of(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, BLOCK).expect("a request's length fits the address space")
}

fn allocate(layout: Layout) -> NonNull<u8> {
    // SAFETY: the layout's size is never zero (`Segments::alloc` makes no empty region).
    let start = unsafe { alloc_zeroed(layout) };
    NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout))
}

impl Region {
    fn owned(bytes: usize) -> Region {
        let class = bytes.div_ceil(BLOCK).next_power_of_two().trailing_zeros() as usize;
        if class >= CLASS_COUNT {
            let layout = layout_of(bytes.next_multiple_of(BLOCK));
            return Region { start: allocate(layout), owner: Owner::Allocated(layout) };
        }
        let start = POOL
            .with_borrow_mut(|pool| pool[class].pop())
            .unwrap_or_else(|| allocate(layout_of(BLOCK << class)));
        Region { start, owner: Owner::Pooled(class) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.owner {
            Owner::Pooled(class) => {
                let kept = POOL.try_with(|pool| {
                    let list = &mut pool.borrow_mut()[class];
                    let room = (list.len() + 1) * (BLOCK << class) <= KEPT_BYTES;
                    if room {
                        list.push(self.start);
                    }
                    room
                });
                if !matches!(kept, Ok(true)) {
                    // SAFETY: allocated by `Region::owned` with this very layout, and dropped once.
                    unsafe { dealloc(self.start.as_ptr(), layout_of(BLOCK << class)) }
                }
            }
            // SAFETY: allocated by `Region::owned` with this very layout, and dropped once.
            Owner::Allocated(layout) => unsafe { dealloc(self.start.as_ptr(), layout) },
            Owner::Foreign(_) => {}
        }
    }
}

#[derive(Clone)]
struct Segment {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl Segment {
    fn start(&self) -> *mut u8 {
        // SAFETY: `offset + len` lies within the region by construction.
        unsafe { self.region.start.as_ptr().add(self.offset) }
    }
}

/// The memory of a request: see the module's head. Lengths and ranges are in bytes.
#[derive(Clone, Default)]
pub struct Segments {
    list: SmallVec<[Segment; 1]>,
    len: usize,
}

impl Segments {
    /// `len` bytes of owned, aligned memory in one piece; what is in it is anybody's guess.
    pub fn alloc(len: usize) -> Segments {
        if len == 0 {
            return Segments::default();
        }
        let region = Arc::new(Region::owned(len));
        Segments { list: SmallVec::from_buf([Segment { region, offset: 0, len }]), len }
    }

    /// `len` zero bytes of owned, aligned memory in one piece.
    pub fn zeroed(len: usize) -> Segments {
        let segments = Segments::alloc(len);
        segments.fill(0);
        segments
    }

    /// A copy of `bytes` in owned, aligned memory.
    pub fn from_slice(bytes: &[u8]) -> Segments {
        let segments = Segments::alloc(bytes.len());
        segments.copy_from(bytes);
        segments
    }

    /// Memory that somebody else owns, kept alive by `keep`.
    ///
    /// # Safety
    /// `start..start + len` is readable and writable for as long as `keep` lives.
    pub unsafe fn foreign(
        start: NonNull<u8>,
        len: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Segments {
        let region = Arc::new(Region { start, owner: Owner::Foreign(keep) });
        Segments { list: SmallVec::from_buf([Segment { region, offset: 0, len }]), len }
    }

    /// How many bytes they hold.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether they hold nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same memory, `range` of it.
    ///
    /// # Panics
    /// If `range` does not lie within them.
    pub fn slice(&self, range: Range<usize>) -> Segments {
        assert!(range.start <= range.end && range.end <= self.len, "slice beyond the segments");
        if range == (0..self.len) {
            return self.clone();
        }
        let mut list = SmallVec::new();
        let mut position = 0;
        for segment in &self.list {
            let from = range.start.max(position);
            let to = range.end.min(position + segment.len);
            if from < to {
                list.push(Segment {
                    region: segment.region.clone(),
                    offset: segment.offset + (from - position),
                    len: to - from,
                });
            }
            position += segment.len;
        }
        Segments { list, len: range.end - range.start }
    }

    /// Appends `more`, sharing its memory.
    pub fn append(&mut self, more: Segments) {
        self.len += more.len;
        self.list.extend(more.list);
    }

    /// Where the pieces lie, for `iovec`s: address and length of each.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = (*mut u8, usize)> + '_ {
        self.list.iter().map(|segment| (segment.start(), segment.len))
    }

    /// Whether each piece's address is a multiple of `memory` and its length one of `length` bytes.
    pub fn is_aligned(&self, memory: u32, length: u32) -> bool {
        self.list.iter().all(|segment| {
            (segment.start() as usize).is_multiple_of(memory as usize)
                && segment.len.is_multiple_of(length as usize)
        })
    }

    /// Sets every byte to `value`.
    pub fn fill(&self, value: u8) {
        for (start, len) in self.pieces() {
            // SAFETY: the piece lies within a living region.
            unsafe { start.write_bytes(value, len) }
        }
    }

    /// Copies `bytes` in.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_from(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "copy of another length");
        let mut position = 0;
        for (start, len) in self.pieces() {
            // SAFETY: the piece lies within a living region, the source within `bytes`; a borrowed
            // slice cannot overlap memory that is never lent out.
            unsafe { start.copy_from_nonoverlapping(bytes.as_ptr().add(position), len) }
            position += len;
        }
    }

    /// Copies the bytes out.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.len, "copy of another length");
        let mut position = 0;
        for (start, len) in self.pieces() {
            // SAFETY: as in `copy_from`, the other way round.
            unsafe { start.copy_to_nonoverlapping(bytes.as_mut_ptr().add(position), len) }
            position += len;
        }
    }

    /// Copies all bytes from other segments of the same length.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_from_segments(&self, from: &Segments) {
        assert_eq!(from.len, self.len, "copy of another length");
        let mut position = 0;
        for segment in &from.list {
            let mut done = 0;
            for (start, len) in self.slice(position..position + segment.len).pieces() {
                // SAFETY: both pieces lie within living regions; `copy` allows them to overlap.
                unsafe { start.copy_from(segment.start().add(done), len) }
                done += len;
            }
            position += segment.len;
        }
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        bytes
    }

    /// Whether every byte is zero.
    pub fn is_zero(&self) -> bool {
        self.pieces().all(|(start, len)| {
            // SAFETY: the piece lies within a living region. Whoever may write it at the same time
            // makes the answer stale, as it would be a moment later anyway.
            let bytes = unsafe { std::slice::from_raw_parts(start, len) };
            let (words, tail) = bytes.as_chunks::<16>();
            words.iter().all(|word| u128::from_ne_bytes(*word) == 0)
                && tail.iter().all(|&byte| byte == 0)
        })
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segments({} bytes in {} pieces)", self.len, self.list.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_share_memory_across_pieces() {
        let mut all = Segments::from_slice(&[1; 100]);
        all.append(Segments::from_slice(&[2; 50]));
        let middle = all.slice(90..110);
        assert_eq!(middle.to_vec(), [vec![1; 10], vec![2; 10]].concat());
        middle.fill(7);
        let bytes = all.to_vec();
        assert_eq!(&bytes[89..111], [vec![1], vec![7; 20], vec![2]].concat());
    }

    #[test]
    fn segments_copy_over_different_pieces() {
        let mut to = Segments::zeroed(3);
        to.append(Segments::zeroed(5));
        let mut from = Segments::from_slice(&[1, 2, 3, 4, 5]);
        from.append(Segments::from_slice(&[6, 7, 8]));
        to.copy_from_segments(&from);
        assert_eq!(to.to_vec(), [1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn zero_check_sees_every_byte() {
        for len in [1, 15, 16, 17, 4096, 5000] {
            let segments = Segments::zeroed(len);
            assert!(segments.is_zero());
            for at in [0, len / 2, len - 1] {
                segments.slice(at..at + 1).fill(1);
                assert!(!segments.is_zero(), "byte {at} of {len}");
                segments.fill(0);
            }
        }
    }

    #[test]
    fn owned_memory_is_aligned_and_reused() {
        let first = Segments::alloc(5000);
        assert!(first.is_aligned(BLOCK as u32, 8));
        let address = first.pieces().next().unwrap().0;
        drop(first);
        assert_eq!(Segments::alloc(8192).pieces().next().unwrap().0, address);
    }

    #[test]
    fn large_memory_bypasses_the_pool() {
        let large = Segments::zeroed(64 << 20);
        assert!(large.is_aligned(BLOCK as u32, BLOCK as u32) && large.is_zero());
    }
}
