//! Host clusters for new mappings.
//!
//! A cluster is *reserved* for a request, written to, and only then *published* with its mapping;
//! the reservation itself is nowhere but in memory, so that an abandoned one leaks nothing (J38).
//! Reservations come, in this order, from
//!
//! 1. clusters that were given back or released in this open (punched ones are known zero),
//! 2. free clusters below the end that the file had when it was opened, found by looking through one
//!    refcount slice for each run that is used up (nothing is scanned at open, F3, and yet space is
//!    found again after a restart),
//! 3. space that the file was grown by, ahead of need: known zero (`grow.rs`).
//!
//! What is handed out at once lies in one *run* within one refcount slice, which stays pinned from
//! the reservation to the publication, so that publishing never waits (J37).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use async_lock::Mutex as AsyncMutex;
use stillpoint_format::addr::HostOffset;
use stillpoint_format::qcow2::entry::L1Entry;
use stillpoint_io::{Manage, Queue, Result};

use super::Qcow2;
use crate::cache::OwnedPin;
use crate::mutant::{Mutant, broken};
use crate::options::AllocPolicy;
use crate::sync::{Mutex, lock};

/// Adjacent host clusters that belong to one request.
pub(crate) struct Reservation {
    /// The first cluster's index.
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// They are known to be zero.
    pub(crate) zero: bool,
    /// The refcount slice that counts them.
    pub(crate) refcounts: OwnedPin<()>,
}

impl Reservation {
    /// Splits `count` clusters off the front.
    pub(crate) fn take(&mut self, count: u64) -> Reservation {
        let taken = Reservation {
            first: self.first,
            count: count.min(self.count),
            zero: self.zero,
            refcounts: self.refcounts.clone(),
        };
        self.first += taken.count;
        self.count -= taken.count;
        taken
    }

    /// Splits one cluster off the front, if there is one.
    pub(crate) fn take_one(&mut self) -> Option<Reservation> {
        (self.count > 0).then(|| self.take(1))
    }
}

/// Where reservations come from.
pub(crate) struct Allocator {
    state: Mutex<State>,
    refilling: AsyncMutex<()>,
    pub(super) growing: AsyncMutex<Growing>,
}

/// Whether the file may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growing {
    Open,
    /// The image is closed, or being closed: its end is where the last cluster in use ends.
    Closed,
}

struct State {
    /// What reservations are taken from.
    run: Option<Reservation>,
    /// Free ranges: first cluster → count, known zero.
    free: BTreeMap<u64, (u64, bool)>,
    /// Grown ahead, never used: known zero, and counted by refcount blocks that exist.
    fresh: VecDeque<Range<u64>>,
    fresh_count: u64,
    /// Clusters in the file.
    end: u64,
    /// What no look for free clusters has reached yet.
    unscanned: Range<u64>,
    growth_asked: bool,
}

impl Allocator {
    /// For a file of `end` clusters.
    pub(crate) fn new(end: u64) -> Allocator {
        Allocator {
            state: Mutex::new(State {
                run: None,
                free: BTreeMap::new(),
                fresh: VecDeque::new(),
                fresh_count: 0,
                end,
                unscanned: 0..end,
                growth_asked: false,
            }),
            refilling: AsyncMutex::new(()),
            growing: AsyncMutex::new(Growing::Open),
        }
    }

    /// Takes clusters back that were not published. `zero` tells whether they are still known zero:
    /// an area that anything was submitted to is not.
    pub(crate) fn give_back(&self, reserved: Reservation, zero: bool) {
        if reserved.count == 0 {
            return;
        }
        let mut state = lock(&self.state);
        // A run lies within the one slice that it pins.
        if let Some(run) = &mut state.run
            && run.first == reserved.first + reserved.count
            && run.refcounts.key() == reserved.refcounts.key()
            && run.zero == zero
        {
            run.first = reserved.first;
            run.count += reserved.count;
            return;
        }
        state.add_free(reserved.first, reserved.count, zero);
    }

    /// Takes a released cluster. `drop_reference` makes its refcount 0 in the same step, so that a
    /// look for free clusters finds it either not yet, or here; what that has not reached is left to
    /// it, and what lies beyond the file's end to growth. It tells whether nobody refers to it now.
    pub(crate) fn recycle(&self, cluster: u64, zero: bool, drop_reference: impl FnOnce() -> bool) {
        let mut state = lock(&self.state);
        let beyond = cluster >= state.end && !broken(Mutant::Beyond);
        if drop_reference() && !beyond && !state.unscanned.contains(&cluster) {
            state.add_free(cluster, 1, zero);
        }
    }

    /// Clusters in the file.
    pub(crate) fn end(&self) -> u64 {
        lock(&self.state).end
    }

    /// Adds what the file has grown by: `ranges` up to cluster `end`.
    pub(super) fn grown(&self, ranges: impl Iterator<Item = Range<u64>>, end: u64) {
        let mut state = lock(&self.state);
        for range in ranges.filter(|range| !range.is_empty()) {
            state.fresh_count += range.end - range.start;
            state.fresh.push_back(range);
        }
        state.end = end;
    }

    pub(super) fn growth_ended(&self) {
        lock(&self.state).growth_asked = false;
    }

    /// How many clusters were grown and not used yet.
    pub(super) fn fresh_count(&self) -> u64 {
        lock(&self.state).fresh_count
    }

    /// Gives up free clusters at the file's end; returns the end that is left, in clusters.
    pub(super) fn trim(&self) -> u64 {
        let mut state = lock(&self.state);
        if let Some(run) = state.run.take() {
            state.add_free(run.first, run.count, run.zero);
        }
        for range in std::mem::take(&mut state.fresh) {
            state.add_free(range.start, range.end - range.start, true);
        }
        state.fresh_count = 0;
        while let Some((&first, &(count, _))) = state.free.last_key_value()
            && first + count == state.end
        {
            state.free.remove(&first);
            state.end = first;
        }
        state.unscanned.end = state.unscanned.end.min(state.end);
        state.end
    }
}

impl State {
    fn add_free(&mut self, mut first: u64, mut count: u64, zero: bool) {
        if let Some((&before, &(length, same))) = self.free.range(..first).next_back()
            && before + length == first
            && same == zero
        {
            self.free.remove(&before);
            (first, count) = (before, length + count);
        }
        if let Some(&(length, same)) = self.free.get(&(first + count))
            && same == zero
        {
            self.free.remove(&(first + count));
            count += length;
        }
        self.free.insert(first, (count, zero));
    }
}

impl Qcow2 {
    /// Reserves between one and `count` adjacent clusters. Waits while the file grows.
    pub(crate) async fn reserve(&self, queue: &Queue, count: u64) -> Result<Reservation> {
        let allocator = &self.writer().allocator;
        let mut reserved = loop {
            let (taken, low) = {
                let mut state = lock(&allocator.state);
                let taken = state.run.as_mut().map(|run| run.take(count));
                if state.run.as_ref().is_some_and(|run| run.count == 0) {
                    state.run = None;
                }
                let low = taken.as_ref().is_some_and(|taken| taken.zero)
                    && state.fresh_count < self.growth_step() / 2
                    && state.free.is_empty()
                    && !state.growth_asked;
                state.growth_asked |= low;
                (taken, low)
            };
            if low {
                self.grow_soon();
            }
            match taken {
                Some(taken) => break taken,
                None => self.refill(queue).await?,
            }
        };
        if broken(Mutant::J38Early) {
            self.writer().refcounts.publish(&reserved);
        }
        match self.policy.alloc {
            AllocPolicy::Implicit => {}
            AllocPolicy::WriteZeroes => reserved.zero = false,
            AllocPolicy::ZeroRange => {
                let bits = self.geometry().cluster_bits;
                let zeroing = Manage::ZeroRange {
                    offset: reserved.first << bits,
                    length: reserved.count << bits,
                };
                if let Err(error) = self.file.manage(queue, zeroing).await {
                    allocator.give_back(reserved, false);
                    return Err(error);
                }
                reserved.zero = true;
            }
        }
        Ok(reserved)
    }

    /// Finds the next run.
    async fn refill(&self, queue: &Queue) -> Result<()> {
        let writer = self.writer();
        let allocator = &writer.allocator;
        let _refilling = allocator.refilling.lock().await;
        loop {
            if lock(&allocator.state).run.is_some() {
                return Ok(());
            }
            if lock(&allocator.state).free.is_empty() {
                self.scan_one_slice(queue).await;
            }
            let per_slice = writer.refcounts.per_slice();
            let found = {
                let mut state = lock(&allocator.state);
                let within_slice = |first: u64, count: u64| match broken(Mutant::RunSlice) {
                    true => count,
                    false => count.min((first / per_slice + 1) * per_slice - first),
                };
                if let Some((first, (count, zero))) = state.free.pop_first() {
                    let here = within_slice(first, count);
                    if here < count {
                        state.free.insert(first + here, (count - here, zero));
                    }
                    Some((first, here, zero))
                } else if let Some(range) = state.fresh.pop_front() {
                    let here = within_slice(range.start, range.end - range.start);
                    if range.start + here < range.end {
                        state.fresh.push_front(range.start + here..range.end);
                    }
                    state.fresh_count -= here;
                    Some((range.start, here, true))
                } else {
                    None
                }
            };
            let Some((first, count, zero)) = found else {
                self.grow(queue, 1).await?;
                continue;
            };
            match self.refcount_slice(queue, first).await {
                Ok(refcounts) => {
                    let run = Reservation { first, count, zero, refcounts };
                    lock(&allocator.state).run = Some(run);
                    return Ok(());
                }
                Err(error) => {
                    lock(&allocator.state).add_free(first, count, zero);
                    return Err(error);
                }
            }
        }
    }

    /// Looks for free clusters in the next part of the file that was there at open.
    async fn scan_one_slice(&self, queue: &Queue) {
        let writer = self.writer();
        let per_slice = writer.refcounts.per_slice();
        let part = {
            let state = lock(&writer.allocator.state);
            let start = state.unscanned.start;
            start..((start / per_slice + 1) * per_slice).min(state.unscanned.end)
        };
        if part.is_empty() {
            return;
        }
        // What no refcount block counts is free, but is left alone: it would need a block.
        // So is what a block counts that cannot be read.
        let slice = match writer.refcounts.has_block(part.start) {
            true => match self.refcount_slice(queue, part.start).await {
                Ok(slice) => Some(slice),
                Err(error) => {
                    tracing::warn!(%error, "no free clusters are looked for there");
                    None
                }
            },
            false => None,
        };
        let structures = self.structures_in(&part);
        // One step, for whoever releases clusters meanwhile.
        let mut state = lock(&writer.allocator.state);
        state.unscanned.start = part.end;
        if let Some(slice) = slice {
            let slice = slice.pin();
            for cluster in part {
                let free = writer.refcounts.count_in(&slice, cluster) == 0;
                if free && !structures.contains(&cluster) {
                    state.add_free(cluster, 1, broken(Mutant::J21Open));
                }
            }
        }
    }

    /// The clusters of `part` that hold the header or a table in use. Refcounts that lie must not make
    /// the allocator hand them out (F2).
    pub(super) fn structures_in(&self, part: &Range<u64>) -> BTreeSet<u64> {
        let geometry = self.geometry();
        let l2_tables = (0..self.l1.len()).filter_map(|index| {
            let entry = L1Entry::decode(self.l1.word(index), geometry).ok()?;
            entry.table.map(|HostOffset(offset)| offset >> geometry.cluster_bits)
        });
        let all = self.fixed_structures().into_iter().chain(l2_tables);
        all.filter(|cluster| part.contains(cluster)).collect()
    }

    /// The clusters of the header, the L1 table and the refcounts.
    pub(super) fn fixed_structures(&self) -> BTreeSet<u64> {
        let geometry = self.geometry();
        let cluster_of = |offset: u64| offset >> geometry.cluster_bits;
        let l1_first = cluster_of(self.l1.host_offset());
        let l1 = l1_first..l1_first + geometry.clusters_for(self.l1.len() * 8);
        self.writer().refcounts.with_table(|table| {
            let first = cluster_of(table.host_offset);
            let blocks = table.blocks.iter().map(|&block| cluster_of(block));
            let table = first..first + table.clusters;
            std::iter::once(0).chain(l1).chain(table).chain(blocks).collect()
        })
    }
}
