//! A bounded cache of table slices (L2 tables, refcount blocks).
//!
//! Tables are cached in slices of 4 KiB (or the whole table where it is smaller), as 64-bit words in
//! native order. A slice is found by its *key*: its index among all slices of all tables, by guest
//! position (L2) or host position (refcounts), not by the table's place in the file.
//!
//! # A hit
//!
//! ```text
//!  key ─▶ slot (AtomicU32) ─▶ frame: pins+1 ─▶ slot unchanged? ─▶ read words ─▶ pins-1
//! ```
//!
//! Two atomic additions in the slice's own frame, and no lock. Frames are never freed, only given to
//! another key, and that only while nobody has them pinned; so a stale slot costs a retry, never a
//! dangling reference. An entry of two words (R8) is read under the frame's version counter, which
//! is odd while a writer is between the two words.
//!
//! # States of a frame
//!
//! ```text
//!  free ─ load ─▶ clean ─ edit ─▶ dirty (pinned) ─ take_dirty ─▶ being committed (pinned) ─▶ clean
//!                  │  ▲                  ▲                                │
//!                  └──┘ evict            └───────────── edit ─────────────┘
//! ```
//!
//! A dirty slice stays pinned until a commit has written it; half the frames dirty ask for a commit
//! ([`SliceCache::is_pressed`]). Deliberately absent: I/O. Whoever loads brings the bytes.

use std::fmt;
use std::sync::OnceLock;

use crate::growable::Growable;
use crate::mutant::{Mutant, broken};
use crate::sync::atomic::{
    AtomicU32, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};
use crate::sync::{Arc, Mutex, MutexGuard, lock};

/// Bytes of a slice, unless the table is smaller.
pub(crate) const SLICE_BYTES: u64 = 4096;
/// Slots are made in chunks, so that an image of any size costs the same to open (F3).
const CHUNK: u64 = 4096;
/// A pin count with this bit belongs to a frame that is changing its key.
const EVICTING: u32 = 1 << 31;

/// The cache; `E` is what else a slice's writers keep beside its words.
pub(crate) struct SliceCache<E> {
    slots: Growable<OnceLock<Box<[AtomicU32]>>>,
    frames: Growable<OnceLock<Frame<E>>>,
    words_per_slice: usize,
    /// Keys are below this; more when the image has grown.
    key_count: AtomicU64,
    /// Its bound in bytes.
    bytes: u64,
    /// Frames made so far, and the clock's hand.
    made: AtomicUsize,
    hand: AtomicUsize,
    dirty: Mutex<Vec<u32>>,
    dirty_count: AtomicUsize,
}

struct Frame<E> {
    key: AtomicU64,
    pins: AtomicU32,
    used: AtomicU32,
    version: AtomicU32,
    words: Box<[AtomicU64]>,
    edit: Mutex<Edit<E>>,
}

/// What a slice's writers keep, behind the slice's own lock.
pub(crate) struct Edit<E> {
    dirty: bool,
    /// The user's part.
    pub(crate) extra: E,
}

/// How many slices a bound of `bytes` allows, as far as there are that many.
fn frame_count(slice_bytes: u64, key_count: u64, bytes: u64) -> u64 {
    (bytes / slice_bytes).clamp(16, 1 << 24).min(key_count.max(16))
}

impl<E: Default> SliceCache<E> {
    /// A cache of slices of `slice_bytes` with keys below `key_count`, bounded by `bytes`.
    pub(crate) fn new(slice_bytes: u64, key_count: u64, bytes: u64) -> SliceCache<E> {
        let frame_count = frame_count(slice_bytes, key_count, bytes);
        SliceCache {
            slots: (0..key_count.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect(),
            frames: (0..frame_count).map(|_| OnceLock::new()).collect(),
            words_per_slice: (slice_bytes / 8) as usize,
            key_count: AtomicU64::new(key_count),
            bytes,
            made: AtomicUsize::new(0),
            hand: AtomicUsize::new(0),
            dirty: Mutex::new(Vec::new()),
            dirty_count: AtomicUsize::new(0),
        }
    }

    /// Allows keys up to `key_count`, with as many frames as its bound allows for them.
    pub(crate) fn grow(&self, key_count: u64) {
        let frames = frame_count(self.words_per_slice as u64 * 8, key_count, self.bytes);
        self.slots.grow(key_count.div_ceil(CHUNK) as usize, OnceLock::new);
        self.frames.grow(frames as usize, OnceLock::new);
        self.key_count.fetch_max(key_count, SeqCst);
    }

    fn slot(&self, key: u64) -> &AtomicU32 {
        let chunk = self.slots.get((key / CHUNK) as usize).expect("the key is below the count");
        let chunk = chunk.get_or_init(|| (0..CHUNK).map(|_| AtomicU32::new(0)).collect());
        &chunk[(key % CHUNK) as usize]
    }

    fn frame(&self, index: u32) -> &Frame<E> {
        let frame = self.frames.get(index as usize).and_then(OnceLock::get);
        frame.expect("a slot names only frames that were made")
    }

    fn pin_frame(&self, key: u64) -> Option<u32> {
        // A key that was never inserted has no chunk; one that is out of range never will.
        let chunk = self.slots.get((key / CHUNK) as usize)?.get()?;
        let slot = &chunk[(key % CHUNK) as usize];
        loop {
            let value = slot.load(Acquire);
            let index = value.checked_sub(1)?;
            let frame = self.frame(index);
            let pins = frame.pins.fetch_add(1, SeqCst);
            if pins & EVICTING == 0 && slot.load(SeqCst) == value {
                if frame.used.load(Relaxed) == 0 {
                    frame.used.store(1, Relaxed);
                }
                return Some(index);
            }
            frame.pins.fetch_sub(1, SeqCst);
            #[cfg(feature = "shuttle")]
            shuttle::thread::yield_now();
        }
    }

    /// The slice with this key, if it is here. No lock is taken.
    pub(crate) fn pin(&self, key: u64) -> Option<Pin<'_, E>> {
        let index = self.pin_frame(key)?;
        Some(Pin { cache: self, index })
    }

    /// The same, to be kept over a wait.
    pub(crate) fn pin_owned(self: &Arc<Self>, key: u64) -> Option<OwnedPin<E>> {
        let index = self.pin_frame(key)?;
        Some(OwnedPin { cache: self.clone(), index })
    }

    /// Puts a slice in that was read from its table, and pins it; `None` if every frame is pinned
    /// (commit, or let others end, then try again). Callers load one key one at a time.
    pub(crate) fn insert(
        &self,
        key: u64,
        mut word: impl FnMut(usize) -> u64,
    ) -> Option<Pin<'_, E>> {
        let index = self.claim()?;
        let frame = self.frame(index);
        // The frame is ours alone: no slot names it, and its pins say so to whoever still looks.
        for (position, entry) in frame.words.iter().enumerate() {
            entry.store(word(position), Relaxed);
        }
        frame.key.store(key, Relaxed);
        frame.used.store(1, Relaxed);
        frame.pins.fetch_add(1, SeqCst);
        frame.pins.fetch_and(!EVICTING, SeqCst);
        self.slot(key).store(index + 1, SeqCst);
        Some(Pin { cache: self, index })
    }

    /// A frame that holds nothing, marked as [`EVICTING`].
    fn claim(&self) -> Option<u32> {
        let count = self.frames.len();
        let unmade = |made| (made < count).then_some(made + 1);
        if let Ok(index) = self.made.fetch_update(SeqCst, SeqCst, unmade) {
            let frame = Frame {
                key: AtomicU64::new(u64::MAX),
                pins: AtomicU32::new(EVICTING),
                used: AtomicU32::new(1),
                version: AtomicU32::new(0),
                words: (0..self.words_per_slice).map(|_| AtomicU64::new(0)).collect(),
                edit: Mutex::new(Edit { dirty: false, extra: E::default() }),
            };
            let place = self.frames.get(index).expect("it is below the count");
            let fresh = place.set(frame).is_ok();
            debug_assert!(fresh, "each index is handed out once");
            return Some(index as u32);
        }
        // Two rounds of the clock: the first clears the marks of use.
        for _ in 0..2 * count {
            let index = self.hand.fetch_add(1, Relaxed) % count;
            let Some(frame) = self.frames.get(index).and_then(OnceLock::get) else { continue };
            if frame.used.swap(0, Relaxed) != 0 {
                continue;
            }
            if frame.pins.compare_exchange(0, EVICTING, SeqCst, SeqCst).is_ok() {
                let key = frame.key.load(Relaxed);
                if key != u64::MAX {
                    self.slot(key).store(0, SeqCst);
                }
                lock(&frame.edit).extra = E::default();
                return Some(index as u32);
            }
        }
        None
    }

    /// How many slices it can hold.
    pub(crate) fn capacity(&self) -> u64 {
        self.frames.len() as u64
    }

    /// Whether nothing awaits a commit.
    pub(crate) fn is_clean(&self) -> bool {
        self.dirty_count.load(SeqCst) == 0
    }

    /// Whether so much is dirty that a commit should not wait for the guest's flush.
    pub(crate) fn is_pressed(&self) -> bool {
        let frames = self.frames.len();
        // With a frame for every key nothing is ever evicted.
        (frames as u64) < self.key_count.load(Relaxed)
            && self.dirty_count.load(Relaxed) * 2 > frames
    }

    /// Takes a copy of every dirty slice as it is now. Each stays pinned until its copy is dropped,
    /// which is to happen when it has been written, or the disk has latched.
    pub(crate) fn take_dirty(self: &Arc<Self>) -> Vec<SliceImage<E>> {
        let mut taken = std::mem::take(&mut *lock(&self.dirty));
        taken.sort_unstable_by_key(|&index| self.frame(index).key.load(Relaxed));
        taken
            .into_iter()
            .map(|index| {
                let frame = self.frame(index);
                let mut edit = lock(&frame.edit);
                edit.dirty = false;
                let words = frame.words.iter().map(|word| word.load(Relaxed)).collect();
                self.dirty_count.fetch_sub(1, SeqCst);
                if broken(Mutant::J37Dirty) {
                    frame.pins.fetch_add(1, SeqCst);
                }
                // The pin that came with being dirty goes over to the copy.
                let pin = OwnedPin { cache: self.clone(), index };
                SliceImage { key: frame.key.load(Relaxed), words, pin }
            })
            .collect()
    }
}

impl<E> SliceCache<E> {
    fn unpin(&self, index: u32) {
        let frame = self.frames.get(index as usize).and_then(OnceLock::get);
        frame.expect("pinned frames exist").pins.fetch_sub(1, SeqCst);
    }
}

/// A dirty slice's words as they are to be written.
pub(crate) struct SliceImage<E: Default> {
    pub(crate) key: u64,
    pub(crate) words: Box<[u64]>,
    pin: OwnedPin<E>,
}

impl<E: Default> SliceImage<E> {
    /// Makes the slice dirty again, because its words could not be written.
    pub(crate) fn mark_dirty(&self) {
        self.pin.pin().edit().mark_dirty();
    }
}

/// A slice that cannot be evicted while this lives.
pub(crate) struct Pin<'a, E: Default> {
    cache: &'a SliceCache<E>,
    index: u32,
}

impl<E: Default> Drop for Pin<'_, E> {
    fn drop(&mut self) {
        self.cache.unpin(self.index);
    }
}

/// A [`Pin`] that keeps the cache alive, to be held over waits (J37).
pub(crate) struct OwnedPin<E: Default> {
    cache: Arc<SliceCache<E>>,
    index: u32,
}

impl<E: Default> OwnedPin<E> {
    /// The pinned slice's key.
    pub(crate) fn key(&self) -> u64 {
        self.cache.frame(self.index).key.load(Relaxed)
    }

    /// The pinned slice.
    pub(crate) fn pin(&self) -> Pin<'_, E> {
        self.cache.frame(self.index).pins.fetch_add(1, SeqCst);
        Pin { cache: &self.cache, index: self.index }
    }
}

impl<E: Default> Clone for OwnedPin<E> {
    fn clone(&self) -> OwnedPin<E> {
        self.cache.frame(self.index).pins.fetch_add(1, SeqCst);
        OwnedPin { cache: self.cache.clone(), index: self.index }
    }
}

impl<E: Default> Drop for OwnedPin<E> {
    fn drop(&mut self) {
        self.cache.unpin(self.index);
    }
}

impl<E: Default> Pin<'_, E> {
    fn frame(&self) -> &Frame<E> {
        self.cache.frame(self.index)
    }

    /// One word.
    pub(crate) fn word(&self, index: usize) -> u64 {
        self.frame().words[index].load(Acquire)
    }

    /// Two neighbouring words of one version (R8).
    pub(crate) fn word_pair(&self, index: usize) -> (u64, u64) {
        let frame = self.frame();
        loop {
            let version = frame.version.load(Acquire);
            let pair = (frame.words[index].load(Relaxed), frame.words[index + 1].load(Relaxed));
            fence(Acquire);
            if version.is_multiple_of(2) && frame.version.load(Relaxed) == version {
                return pair;
            }
            std::hint::spin_loop();
            #[cfg(feature = "shuttle")]
            shuttle::thread::yield_now();
        }
    }

    /// The slice's lock; writers of this slice alone take it.
    pub(crate) fn edit(&self) -> Editing<'_, E> {
        Editing { cache: self.cache, index: self.index, edit: lock(&self.frame().edit) }
    }
}

/// The right to change a slice.
pub(crate) struct Editing<'a, E: Default> {
    cache: &'a SliceCache<E>,
    index: u32,
    edit: MutexGuard<'a, Edit<E>>,
}

impl<E: Default> Editing<'_, E> {
    fn frame(&self) -> &Frame<E> {
        self.cache.frame(self.index)
    }

    /// One word as it is.
    pub(crate) fn word(&self, index: usize) -> u64 {
        self.frame().words[index].load(Relaxed)
    }

    /// Changes one word.
    pub(crate) fn store(&mut self, index: usize, word: u64) {
        self.mark_dirty();
        self.frame().words[index].store(word, Release);
    }

    /// Changes two neighbouring words so that no reader sees a mixture (R8).
    pub(crate) fn store_pair(&mut self, index: usize, first: u64, second: u64) {
        self.mark_dirty();
        let frame = self.frame();
        let version = frame.version.load(Relaxed);
        frame.version.store(version.wrapping_add(1), Relaxed);
        fence(Release);
        frame.words[index].store(first, Relaxed);
        frame.words[index + 1].store(second, Relaxed);
        frame.version.store(version.wrapping_add(2), Release);
    }

    /// The user's part.
    pub(crate) fn extra(&mut self) -> &mut E {
        &mut self.edit.extra
    }

    /// Makes the next commit write this slice, changed or not.
    pub(crate) fn mark_dirty(&mut self) {
        if self.edit.dirty {
            return;
        }
        self.edit.dirty = true;
        if !broken(Mutant::J37Dirty) {
            self.frame().pins.fetch_add(1, SeqCst);
        }
        self.cache.dirty_count.fetch_add(1, SeqCst);
        lock(&self.cache.dirty).push(self.index);
    }
}

impl<E> fmt::Debug for SliceCache<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SliceCache({} frames)", self.frames.len())
    }
}
