//! Discarding and zeroing: changes of mappings, hardly any of bytes.
//!
//! The caller holds the stripes of all touched clusters exclusively, so no request and no in-flight
//! allocation is under way in them. Whole units (clusters, or subclusters with extended L2 entries)
//! change their mapping; the rest is returned to the caller, who writes zeros or, for a discard,
//! leaves it.
//!
//! A discard never exposes the backing file's bytes: where there is a backing file the units become
//! zero, and in a version 2 image, which cannot say "zero", they stay as they are.

use std::ops::Range;

use stillpoint_io::{Queue, Result};

use super::Qcow2;
use super::inflight::Inflights;
use super::mapping::Cluster;
use crate::cache::Editing;
use crate::mutant::{Mutant, broken};

/// What becomes of the space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// It is given back.
    Released,
    /// Clusters that are there stay there.
    Kept,
    /// It is given back, and nothing more is said of the range: no layer has anything there.
    Forgotten,
}

impl Qcow2 {
    /// Makes the whole units in `range` read as zeros by their mapping. Returns the byte ranges for
    /// which it could not, in ascending order; what reads as zeros already is not among them.
    pub(crate) async fn clear(
        &self,
        queue: &Queue,
        range: Range<u64>,
        space: Space,
    ) -> Result<Vec<Range<u64>>> {
        let covers = self.slice_covers();
        let mut rest = Vec::new();
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start / covers + 1) * covers);
            self.clear_in_slice(queue, start..end, space, &mut rest).await?;
            start = end;
        }
        self.release_eventually();
        if self.l2.is_pressed() {
            self.commit(queue).await?;
        }
        Ok(rest)
    }

    async fn clear_in_slice(
        &self,
        queue: &Queue,
        range: Range<u64>,
        space: Space,
        rest: &mut Vec<Range<u64>>,
    ) -> Result<()> {
        let (key, first) = self.locate(range.start);
        if self.silent_is_zero(space) && self.slice(queue, key).await?.is_none() {
            return Ok(());
        }
        let slice = self.slice_for_writing(queue, key).await?;
        let mut slice = slice.edit();
        let size = self.cluster_size();
        let first_cluster = range.start / size;
        for cluster in first_cluster..range.end.div_ceil(size) {
            let index = first + (cluster - first_cluster) as usize;
            let start = cluster * size;
            let touched = range.start.max(start)..range.end.min(start + size);
            self.clear_cluster(&mut slice, index, start, touched, space, rest)?;
        }
        Ok(())
    }

    fn clear_cluster(
        &self,
        slice: &mut Editing<'_, Inflights>,
        index: usize,
        start: u64,
        touched: Range<u64>,
        space: Space,
        rest: &mut Vec<Range<u64>>,
    ) -> Result<()> {
        let old = self.entry_locked(slice, index)?;
        let units = self.codec.whole_units(touched.start - start, touched.end - start);
        let Some(new) = self.cleared(&old, units, space) else {
            push(rest, touched);
            return Ok(());
        };
        if new != old {
            self.codec.store(slice, index, new);
            if new.host.is_none() {
                slice.extra().take_blank(index);
                self.free_mapping(&old);
            }
        }
        // The units at the edges that are touched in part, unless they read as zeros anyhow.
        let unit_size = self.geometry().subcluster_size();
        for edge in edges(&touched, unit_size) {
            let unit = self.codec.units(edge.start - start, edge.end - start);
            if !self.reads_zero(&new, unit, space) {
                push(rest, edge);
            }
        }
        Ok(())
    }

    /// Whether a unit that nothing is said of reads as zeros.
    fn silent_is_zero(&self, space: Space) -> bool {
        self.backing.is_none() || space == Space::Forgotten
    }

    /// Whether these units read as zeros by this mapping alone.
    fn reads_zero(&self, cluster: &Cluster, units: u32, space: Space) -> bool {
        let silent = match (self.silent_is_zero(space), cluster.compressed) {
            (true, None) => !(cluster.zero | cluster.allocated),
            _ => 0,
        };
        (cluster.zero | silent) & units == units
    }

    /// The mapping after `units` were cleared; `None` if it cannot say so.
    fn cleared(&self, old: &Cluster, units: u32, space: Space) -> Option<Cluster> {
        if units == 0 || self.reads_zero(old, units, space) && space == Space::Kept {
            return Some(*old);
        }
        let all = units == self.codec.all_units();
        if old.compressed.is_some() && !all {
            return None;
        }
        let shown = broken(Mutant::R1Backing);
        let says_zero = !self.silent_is_zero(space) && !shown || space == Space::Kept;
        if says_zero && !self.codec.version3 {
            return None;
        }
        let mut new = *old;
        new.compressed = None;
        new.allocated &= !units;
        new.zero = if says_zero { old.zero | units } else { old.zero & !units };
        if old.compressed.is_some() || (space != Space::Kept && new.allocated == 0) {
            new.host = None;
            new.copied = false;
        }
        Some(new)
    }
}

/// The parts of `range` outside its whole units.
fn edges(range: &Range<u64>, unit_size: u64) -> Vec<Range<u64>> {
    let whole = range.start.next_multiple_of(unit_size)..range.end / unit_size * unit_size;
    if whole.start > whole.end {
        return vec![range.clone()];
    }
    [range.start..whole.start, whole.end..range.end]
        .into_iter()
        .filter(|edge| !edge.is_empty())
        .collect()
}

fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn edges_are_what_whole_units_leave() {
        assert_eq!(edges(&(0..8), 4), []);
        assert_eq!(edges(&(1..8), 4), vec![Range { start: 1, end: 4 }]);
        assert_eq!(edges(&(1..9), 4), [1..4, 8..9]);
        assert_eq!(edges(&(1..3), 4), vec![Range { start: 1, end: 3 }]);
        assert_eq!(edges(&(3..5), 4), [3..4, 4..5]);
    }
}
