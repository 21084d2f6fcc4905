//! In-flight allocations: who writes to a cluster whose mapping is not published yet (R7).
//!
//! The first write to an unallocated (or shared, or compressed, or zero) cluster *begins* an
//! allocation: it brings a host cluster. Later writes to the same guest cluster do not queue behind
//! it, they *join*: they write their own bytes to the same host cluster. Per unit (the cluster, or
//! a subcluster with extended L2 entries) there are two ways to the publication:
//!
//! - **blank**: the guest range reads as zeros and the host area is known to be zero. Whoever
//!   completes a write there publishes the unit at once; what nobody wrote is right already.
//! - **fill**: old content has to be kept (a backing file, a shared or compressed cluster), or the
//!   host area holds something else. The last writer to finish *closes* the allocation, copies what
//!   nobody wrote, and publishes. Others wait for that publication with their answers; writes that
//!   come while it is closed wait too, and then find a published cluster.
//!
//! ```text
//!            join ┌──┐
//!  begin ─▶ open ─┴──┴─ last fill writer done ─▶ closed ─ copied ─▶ published
//!            │                                     └ copy failed ─▶ writers fail, nothing published
//!            └ all writes failed ─▶ aborted: the host cluster goes back as *not* zero
//! ```
//!
//! A write is answered only after its units are published. So no answered write is ever invisible to
//! a read of the old mapping, a failed copy fails exactly the writes that it concerns, and an
//! allocation that aborts has answered nobody. No writer can be starved either: those that a
//! constant stream of joiners would need for it stand unanswered in the same allocation.
//!
//! All of it lives in the slice's lock, which nobody holds over a wait.

use std::ops::Range;
use std::sync::OnceLock;

use event_listener::Event;
use stillpoint_io::Result;

use super::allocate::Reservation;
use super::mapping::Cluster;
use crate::mutant::{Mutant, broken};
use crate::sync::Arc;

/// The in-flight allocations of one slice, and what is known of the ones before.
#[derive(Default)]
pub(crate) struct Inflights {
    pub(crate) list: Vec<Inflight>,
    /// Units of allocated clusters whose host area was never written since it was known to be zero,
    /// by entry. Extended L2 entries only; forgotten when the slice is evicted, which is safe.
    blank: Vec<(usize, u32)>,
}

/// One cluster's allocation under way.
pub(crate) struct Inflight {
    /// The entry in the slice.
    pub(crate) index: usize,
    /// Where the cluster will be, in bytes.
    pub(crate) host: u64,
    /// A cluster reserved for it, until the first publication.
    pub(crate) reserved: Option<Reservation>,
    /// Old content moves to another host cluster, so all its units are published in one step.
    together: bool,
    /// Units that host and guest both know as zeros.
    blank: u32,
    /// Units that must be complete before they are published.
    fill: u32,
    /// Units whose host area is known to be zero.
    host_zero: u32,
    writers: u32,
    fill_writers: u32,
    /// What the fill writers have written, in bytes of the cluster.
    written: RangeSet,
    closed: bool,
    ended: Arc<Ended>,
}

/// The end of a fill, for those who wait for it.
#[derive(Default)]
pub(crate) struct Ended {
    outcome: OnceLock<Result<()>>,
    event: Event,
}

impl Ended {
    /// Waits for the end and says how it was.
    pub(crate) async fn wait(&self) -> Result<()> {
        loop {
            let listener = self.event.listen();
            if let Some(outcome) = self.outcome.get() {
                return outcome.clone();
            }
            listener.await;
        }
    }

    fn set(&self, outcome: Result<()>) {
        let _only_once = self.outcome.set(outcome);
        self.event.notify(usize::MAX);
    }
}

/// One request's part in an allocation.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    pub(crate) index: usize,
    /// Bytes of the cluster that the request writes.
    pub(crate) bytes: Range<u64>,
    /// Units that it brings to publication.
    units: u32,
    fills: bool,
    /// Which of the request's host writes carries it.
    pub(crate) write: usize,
}

/// What a request has to do after its write to an allocation has ended.
pub(crate) enum Next {
    /// Nothing more.
    Done,
    /// Copy what nobody wrote, then publish.
    Fill,
    /// Wait for whoever copies.
    Wait(Arc<Ended>),
}

/// What a publication changes: the units, and the first time the reserved host cluster.
pub(crate) struct Publication {
    pub(crate) units: u32,
    pub(crate) reserved: Option<Reservation>,
}

impl Inflights {
    /// The allocation of entry `index`.
    pub(crate) fn find(&mut self, index: usize) -> Option<&mut Inflight> {
        self.list.iter_mut().find(|inflight| inflight.index == index)
    }

    /// Begins an allocation for `old`, the present mapping of entry `index`; `reserved` is a new host
    /// cluster where it needs one.
    pub(crate) fn begin(
        &mut self,
        index: usize,
        old: &Cluster,
        all_units: u32,
        reserved: Option<Reservation>,
        host: u64,
    ) -> &mut Inflight {
        let together = reserved.is_some() && (old.allocated != 0 || old.compressed.is_some());
        let host_zero = match &reserved {
            Some(reserved) if reserved.zero => all_units,
            Some(_) => 0,
            None => self.take_blank(index),
        };
        let fill = match (together, old.compressed) {
            (true, Some(_)) => all_units,
            (true, None) => old.allocated,
            (false, _) => 0,
        };
        self.list.push(Inflight {
            index,
            host,
            reserved,
            together,
            blank: 0,
            fill,
            // What is copied there makes it anything but zero, touched by a write or not.
            host_zero: if broken(Mutant::J21Copied) { host_zero } else { host_zero & !fill },
            writers: 0,
            fill_writers: 0,
            written: RangeSet::default(),
            closed: false,
            ended: Arc::default(),
        });
        self.list.last_mut().expect("just pushed")
    }

    /// Forgets what was known of entry `index`'s host area; its cluster is being given up.
    pub(crate) fn take_blank(&mut self, index: usize) -> u32 {
        match self.blank.iter().position(|&(entry, _)| entry == index) {
            Some(position) => self.blank.swap_remove(position).1,
            None => 0,
        }
    }

    /// Ends an allocation that nobody writes to any more. What it had reserved and never published
    /// comes back.
    fn retire(&mut self, index: usize) -> Option<Reservation> {
        let position = self.list.iter().position(|inflight| inflight.index == index)?;
        let inflight = &self.list[position];
        if inflight.writers > 0 || inflight.closed {
            return None;
        }
        let inflight = self.list.swap_remove(position);
        if inflight.reserved.is_none() && inflight.host_zero != 0 {
            self.blank.push((index, inflight.host_zero));
        }
        inflight.reserved
    }

    /// Records that the write of `share` has ended. `publish` is called, before anything else can
    /// happen to the slice, for what is to be published now. Returns what comes next, and a
    /// reservation that goes back.
    pub(crate) fn finish(
        &mut self,
        share: &Share,
        succeeded: bool,
    ) -> (Next, Option<Publication>, Option<Reservation>) {
        let inflight = self.find(share.index).expect("its writers keep it in the list");
        inflight.writers -= 1;
        let mut publication = None;
        let blank = share.units & inflight.blank;
        if succeeded && blank != 0 {
            let reserved = inflight.reserved.take();
            publication = Some(Publication { units: blank, reserved });
        }
        let mut next = Next::Done;
        if share.fills {
            inflight.fill_writers -= 1;
            if succeeded || broken(Mutant::R7Failed) {
                inflight.written.insert(share.bytes.clone());
                next = Next::Wait(inflight.ended.clone());
            }
            if inflight.fill_writers == 0 {
                if inflight.written.is_empty() {
                    // Every fill writer failed: nobody waits, and nothing is to be published.
                    inflight.fill = if inflight.together { inflight.fill } else { 0 };
                } else {
                    // Even if the last write failed: others wait, and its range is filled for them
                    // like an unwritten one.
                    inflight.closed = true;
                    next = Next::Fill;
                }
            }
        }
        let back = self.retire(share.index);
        (next, publication, back)
    }

    /// What nobody has written in the closed allocation of entry `index`, as byte ranges of the
    /// cluster, and where its host cluster is.
    pub(crate) fn gaps(&mut self, index: usize, unit_size: u64) -> (u64, Vec<Range<u64>>) {
        let inflight = self.find(index).expect("a closed allocation stays in the list");
        let mut gaps = RangeSet::default();
        for unit in (0..32).filter(|unit| inflight.fill & (1 << unit) != 0) {
            gaps.insert(unit * unit_size..(unit + 1) * unit_size);
        }
        (inflight.host, gaps.without(&inflight.written))
    }

    /// Ends the fill of entry `index`: what is to be published, and a reservation that goes back.
    /// `outcome` reaches those who wait once [`Filled::tell`] is called, after the publication.
    pub(crate) fn filled(
        &mut self,
        index: usize,
        outcome: Result<()>,
    ) -> (Option<Publication>, Option<Reservation>, Filled) {
        let inflight = self.find(index).expect("a closed allocation stays in the list");
        let publication = outcome
            .is_ok()
            .then(|| Publication { units: inflight.fill, reserved: inflight.reserved.take() });
        inflight.closed = false;
        inflight.written = RangeSet::default();
        if outcome.is_ok() {
            inflight.together = false;
        }
        if !inflight.together {
            inflight.fill = 0;
        }
        let ended = std::mem::take(&mut inflight.ended);
        let back = self.retire(index);
        (publication, back, Filled { ended, outcome })
    }
}

/// The outcome of a fill on its way to those who wait for it.
pub(crate) struct Filled {
    ended: Arc<Ended>,
    outcome: Result<()>,
}

impl Filled {
    pub(crate) fn tell(self) {
        self.ended.set(self.outcome);
    }
}

impl Inflight {
    /// Joins with a write of `bytes`, which touches `units` (those not yet allocated), of which
    /// `reads_zero` read as zeros now. If the allocation is closed to it: what to wait for.
    pub(crate) fn join(
        &mut self,
        bytes: Range<u64>,
        units: u32,
        reads_zero: u32,
        write: usize,
    ) -> Result<Share, Arc<Ended>> {
        let new = units & !(self.blank | self.fill);
        let blank = if self.together { 0 } else { new & self.host_zero & reads_zero };
        let fills = units & (self.fill | (new & !blank)) != 0;
        if self.closed && (fills || self.together) && !broken(Mutant::R7Closed) {
            return Err(self.ended.clone());
        }
        self.blank |= blank;
        self.fill |= new & !blank;
        // J21: a submitted write, whatever becomes of it, ends what was known of the host area.
        if !broken(Mutant::J21Written) {
            self.host_zero &= !units;
        }
        self.writers += 1;
        self.fill_writers += u32::from(fills);
        Ok(Share { index: self.index, bytes, units, fills, write })
    }
}

/// Disjoint byte ranges in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RangeSet(Vec<Range<u64>>);

impl RangeSet {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a range, merging it with what it touches.
    pub(crate) fn insert(&mut self, mut range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|other| other.end < range.start);
        let last = self.0.partition_point(|other| other.start <= range.end);
        if first < last {
            range.start = range.start.min(self.0[first].start);
            range.end = range.end.max(self.0[last - 1].end);
        }
        self.0.splice(first..last, [range]);
    }

    /// The parts of these ranges that `other` lacks.
    pub(crate) fn without(&self, other: &RangeSet) -> Vec<Range<u64>> {
        let mut rest = Vec::new();
        for range in &self.0 {
            let mut start = range.start;
            for hole in other.0.iter().filter(|hole| hole.end > range.start) {
                if hole.start >= range.end {
                    break;
                }
                if start < hole.start {
                    rest.push(start..hole.start);
                }
                start = start.max(hole.end);
            }
            if start < range.end {
                rest.push(start..range.end);
            }
        }
        rest
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn range_set_merges_and_subtracts_like_a_set_of_bytes() {
        let mut seed = 12345u64;
        let mut random = move |bound: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % bound
        };
        for _ in 0..500 {
            let mut bytes = [false; 64];
            let mut set = RangeSet::default();
            let mut other_bytes = [false; 64];
            let mut other = RangeSet::default();
            for _ in 0..random(8) {
                let (start, length) = (random(60), random(10));
                let range = start..(start + length).min(64);
                if random(2) == 0 {
                    bytes[range.start as usize..range.end as usize].fill(true);
                    set.insert(range);
                } else {
                    other_bytes[range.start as usize..range.end as usize].fill(true);
                    other.insert(range);
                }
            }
            let contains = |ranges: &[Range<u64>], at: u64| ranges.iter().any(|r| r.contains(&at));
            let rest = set.without(&other);
            for at in 0..64 {
                assert_eq!(contains(&set.0, at), bytes[at as usize]);
                assert_eq!(contains(&rest, at), bytes[at as usize] && !other_bytes[at as usize]);
            }
            assert!(set.0.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
