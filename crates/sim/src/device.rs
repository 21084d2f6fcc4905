//! The medium beneath one file: per sector, what is durable and what may be lost.
//!
//! This is the failure model, as code. A sector has one durable content and, newer than that, any
//! number of versions in a volatile cache, in the order in which they took effect:
//!
//! ```text
//!   durable ── version ── version ── version      reads see the last
//!              └────────── any of these, or none of them, after a power cut
//! ```
//!
//! - A flush makes durable, in each sector, the last version whose write had *completed* before the
//!   flush was *submitted*; what came later stays volatile.
//! - A durable write (FUA) makes itself durable when it completes, and nothing else.
//! - A power cut keeps any subset of the volatile writes: whole writes, or single sectors of them
//!   (a torn write); a sector is never torn. Of those that it keeps, any may come out on top.
//! - Punches and zeroings are versions like any other: a lost punch brings the old bytes back.
//! - The file system's map of extents is volatile by itself. A block of 4 KiB that was a hole, or space
//!   not written yet, or shared with a clone, gets its place with its first write; a cut may lose
//!   that although the bytes are on the disk, and then the block shows what it showed before, whole.
//! - After a failed flush the cache is clean: each sector that it covered is durable after all, or
//!   goes on showing its new bytes although no later flush will make them durable, or (by chance
//!   of the flush: not every host does so) shows its old bytes again.
//!
//! Deliberately absent: time and completion (see [`crate::file`]), and the file's size.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::chance::{Chance, mix};

/// The unit in which the file system allocates, in bytes.
pub(crate) const FS_BLOCK: u64 = 4096;

/// A sector's bytes; `None`: zeros that take no space.
type Content = Option<Arc<[u8]>>;

#[derive(Clone, Debug)]
struct Version {
    /// The operation that made it.
    operation: u64,
    content: Content,
    /// When that operation completed.
    completed: Option<u64>,
    /// A failed flush has given it up: no later one makes it durable.
    given_up: bool,
}

/// The medium beneath one file; see the module's head.
#[derive(Debug)]
pub struct Medium {
    sector_size: u64,
    durable: BTreeMap<u64, Arc<[u8]>>,
    volatile: BTreeMap<u64, Vec<Version>>,
    /// Blocks whose place in the map of extents is their own, in force now.
    placed: BTreeSet<u64>,
    /// Those whose place is not durable yet.
    placing: BTreeSet<u64>,
}

impl Medium {
    /// A medium of zeros with sectors of so many bytes.
    pub fn new(sector_size: u32) -> Medium {
        Medium {
            sector_size: u64::from(sector_size),
            durable: BTreeMap::new(),
            volatile: BTreeMap::new(),
            placed: BTreeSet::new(),
            placing: BTreeSet::new(),
        }
    }

    /// These blocks are shared with a clone: the next write to each needs a place of its own.
    pub fn share(&mut self, blocks: &BTreeSet<u64>) {
        self.placed.retain(|block| !blocks.contains(block));
    }

    /// A medium that durably holds `durable` below `end`.
    fn surviving(&self, durable: BTreeMap<u64, Arc<[u8]>>, end: u64) -> Medium {
        let mut medium = Medium::new(self.sector_size as u32);
        medium.durable = durable;
        medium.cut_to(end);
        let blocks = medium.durable.keys().map(|&sector| self.block_of(sector));
        medium.placed = blocks.collect();
        medium
    }

    fn block_of(&self, sector: u64) -> u64 {
        sector * self.sector_size / FS_BLOCK
    }

    fn current(&self, sector: u64) -> Option<&Arc<[u8]>> {
        match self.volatile.get(&sector).and_then(|versions| versions.last()) {
            Some(version) => version.content.as_ref(),
            None => self.durable.get(&sector),
        }
    }

    /// The pieces of a byte range by sector: the sector, where the piece begins in it, its length.
    fn pieces(
        &self,
        offset: u64,
        length: u64,
    ) -> impl Iterator<Item = (u64, usize, usize)> + use<> {
        let (size, end) = (self.sector_size, offset + length);
        (offset / size..end.div_ceil(size)).map(move |sector| {
            let start = sector * size;
            let (from, to) = (offset.max(start), end.min(start + size));
            (sector, (from - start) as usize, (to - from) as usize)
        })
    }

    /// What a read sees now.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let mut position = 0;
        for (sector, start, length) in self.pieces(offset, into.len() as u64) {
            let piece = &mut into[position..position + length];
            match self.current(sector) {
                Some(bytes) => piece.copy_from_slice(&bytes[start..start + length]),
                None => piece.fill(0),
            }
            position += length;
        }
    }

    /// Whether a byte range may hold anything but zeros that take no space.
    pub fn is_data(&self, offset: u64, length: u64) -> bool {
        self.pieces(offset, length).any(|(sector, ..)| self.current(sector).is_some())
    }

    /// Where, at or after `offset`, the next sector begins that may hold anything but such zeros.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        let from = offset / self.sector_size;
        let is_data = |sector: &u64| self.current(*sector).is_some();
        let durable = self.durable.range(from..).map(|(&sector, _)| sector).find(is_data);
        let volatile = self.volatile.range(from..).map(|(&sector, _)| sector).find(is_data);
        let next = durable.into_iter().chain(volatile).min()?;
        Some((next * self.sector_size).max(offset))
    }

    fn push(&mut self, sector: u64, operation: u64, content: Content) {
        let version = Version { operation, content, completed: None, given_up: false };
        self.volatile.entry(sector).or_default().push(version);
    }

    /// A write, or a part of one, takes effect.
    pub fn write(&mut self, operation: u64, offset: u64, bytes: &[u8]) {
        for block in offset / FS_BLOCK..(offset + bytes.len() as u64).div_ceil(FS_BLOCK) {
            if self.placed.insert(block) {
                self.placing.insert(block);
            }
        }
        let mut position = 0;
        for (sector, start, length) in self.pieces(offset, bytes.len() as u64) {
            let piece = &bytes[position..position + length];
            let content = if length as u64 == self.sector_size {
                piece.into()
            } else {
                let mut whole = match self.current(sector) {
                    Some(bytes) => bytes.to_vec(),
                    None => vec![0; self.sector_size as usize],
                };
                whole[start..start + length].copy_from_slice(piece);
                whole.into()
            };
            self.push(sector, operation, Some(content));
            position += length;
        }
    }

    /// A punch or zeroing, or a part of one, takes effect.
    pub fn zero(&mut self, operation: u64, offset: u64, length: u64) {
        for block in offset.div_ceil(FS_BLOCK)..(offset + length) / FS_BLOCK {
            self.placed.remove(&block);
        }
        for (sector, start, length) in self.pieces(offset, length) {
            if length as u64 == self.sector_size {
                // A hole that was durably a hole needs no version.
                if self.volatile.contains_key(&sector) || self.durable.contains_key(&sector) {
                    self.push(sector, operation, None);
                }
            } else if self.current(sector).is_some() {
                self.write(operation, sector * self.sector_size + start as u64, &vec![0; length]);
            }
        }
    }

    /// An operation on a byte range has completed at `stamp`.
    pub fn complete(&mut self, operation: u64, offset: u64, length: u64, stamp: u64) {
        let size = self.sector_size;
        let range = offset / size..(offset + length).div_ceil(size);
        for (_, versions) in self.volatile.range_mut(range) {
            for version in versions.iter_mut().filter(|version| version.operation == operation) {
                version.completed = Some(stamp);
            }
        }
    }

    /// In each of the sectors, the last version that `covers` accepts becomes durable.
    fn settle(&mut self, sectors: Vec<u64>, covers: impl Fn(&Version) -> bool) {
        for sector in sectors {
            let Some(versions) = self.volatile.get_mut(&sector) else { continue };
            let Some(index) = versions.iter().rposition(&covers) else { continue };
            let content = versions[index].content.clone();
            versions.drain(..=index);
            if versions.is_empty() {
                self.volatile.remove(&sector);
            }
            self.set_durable(sector, content);
        }
    }

    fn set_durable(&mut self, sector: u64, content: Content) {
        if content.is_some() {
            let block = self.block_of(sector);
            self.placing.remove(&block);
        }
        set(&mut self.durable, sector, content);
    }

    /// A durable write has completed.
    pub fn settle_write(&mut self, operation: u64, offset: u64, length: u64) {
        let sectors = self.pieces(offset, length).map(|(sector, ..)| sector).collect();
        self.settle(sectors, |version| version.operation == operation);
    }

    /// A flush that was submitted at `stamp` has succeeded; a lying one leaves an operation out.
    pub fn settle_flush(&mut self, stamp: u64, left_out: Option<u64>) {
        let sectors = self.volatile.keys().copied().collect();
        self.settle(sectors, |version| {
            !version.given_up
                && version.completed.is_some_and(|completed| completed < stamp)
                && Some(version.operation) != left_out
        });
    }

    /// One of the operations that have not become durable.
    pub fn any_volatile(&self, chance: &mut Chance) -> Option<u64> {
        let operations: Vec<u64> =
            self.volatile.values().flatten().map(|version| version.operation).collect();
        (!operations.is_empty()).then(|| chance.pick(&operations))
    }

    /// A flush that was submitted at `stamp` has failed; says whether old bytes show again.
    pub fn fail_flush(&mut self, stamp: u64, chance: &mut Chance) -> bool {
        let reverts = chance.one_in(4);
        let covers = |version: &Version| version.completed.is_some_and(|at| at < stamp);
        let sectors: Vec<u64> = self
            .volatile
            .iter()
            .filter(|(_, versions)| versions.iter().any(covers))
            .map(|(&sector, _)| sector)
            .collect();
        let (mut kept, mut dropped) = (Vec::new(), Vec::new());
        for &sector in &sectors {
            match chance.below(3) {
                0 => kept.push(sector),
                1 if reverts => dropped.push(sector),
                _ => {
                    let versions = self.volatile.get_mut(&sector).expect("listed above");
                    versions.iter_mut().filter(|v| covers(v)).for_each(|v| v.given_up = true);
                }
            }
        }
        self.settle(kept, |version| covers(version) && !version.given_up);
        let reverted = !dropped.is_empty();
        for sector in dropped {
            let versions = self.volatile.get_mut(&sector).expect("listed above");
            versions.retain(|version| !covers(version));
            if versions.is_empty() {
                self.volatile.remove(&sector);
            }
        }
        reverted
    }

    /// What is left after a power cut, below `end` bytes; a lying medium `tears` within sectors.
    pub fn power_cut(&self, end: u64, tears: bool, chance: &mut Chance) -> Medium {
        let kept_of_8 = chance.pick(&[0, 1, 4, 7, 8]);
        let torn = chance.one_in(2);
        let reordered = chance.one_in(4);
        let mut keeps_write: BTreeMap<u64, bool> = BTreeMap::new();
        let kept_places_of_4 = chance.pick(&[0, 2, 4, 4]);
        let places = self.placing.iter().filter(|_| chance.below(4) >= kept_places_of_4);
        let lost_places: BTreeSet<u64> = places.copied().collect();
        let mut after = self.durable.clone();
        for (&sector, versions) in &self.volatile {
            let mut kept = Vec::new();
            let lost = lost_places.contains(&self.block_of(sector));
            for version in versions.iter().filter(|version| !version.given_up) {
                if lost && version.content.is_some() {
                    continue;
                }
                let keep = if torn {
                    chance.below(8) < kept_of_8
                } else {
                    *keeps_write
                        .entry(version.operation)
                        .or_insert_with(|| chance.below(8) < kept_of_8)
                };
                if keep {
                    kept.push(&version.content);
                }
            }
            let Some(last) = kept.last() else { continue };
            let content = if reordered { chance.pick(&kept) } else { *last };
            let mut content = content.clone();
            if tears && chance.one_in(2) {
                content = self.torn(self.durable.get(&sector), content.as_ref());
            }
            set(&mut after, sector, content);
        }
        self.surviving(after, end)
    }

    /// A number for what is durable, and for each sector that a power cut may change what it is to be
    /// exclusive-ored with if the sector's newest content is kept.
    pub fn fingerprint(&self) -> (u64, impl Iterator<Item = (u64, u64)>) {
        let number = |sector: u64, content: Option<&Arc<[u8]>>| {
            let words = content.iter().flat_map(|bytes| bytes.as_chunks::<8>().0);
            let hash = words.fold(0, |hash, &word| mix(hash ^ u64::from_le_bytes(word)));
            if hash == 0 { 0 } else { mix(hash ^ sector) }
        };
        let durable =
            self.durable.iter().fold(0, |all, (&sector, bytes)| all ^ number(sector, Some(bytes)));
        let changes = self.volatile.keys().map(move |&sector| {
            let (old, new) = (self.durable.get(&sector), self.current(sector));
            (sector, number(sector, old) ^ number(sector, new))
        });
        (durable, changes)
    }

    /// What is left after a power cut, below `end` bytes, that keeps the newest content of just those
    /// sectors that `keeps` accepts.
    pub fn power_cut_keeping(&self, end: u64, keeps: impl Fn(u64) -> bool) -> Medium {
        let mut after = self.durable.clone();
        for (&sector, versions) in &self.volatile {
            if let Some(version) = versions.iter().rfind(|version| !version.given_up)
                && keeps(sector)
            {
                set(&mut after, sector, version.content.clone());
            }
        }
        self.surviving(after, end)
    }

    /// The first half of a guest's sector is new, and the rest is old.
    fn torn(&self, old: Option<&Arc<[u8]>>, new: Option<&Arc<[u8]>>) -> Content {
        let bytes = |content: Option<&Arc<[u8]>>| match content {
            Some(bytes) => bytes.to_vec(),
            None => vec![0; self.sector_size as usize],
        };
        let mut torn = bytes(old);
        torn[..256].copy_from_slice(&bytes(new)[..256]);
        Some(torn.into())
    }

    /// Forgets, durably, everything beyond `end`: the file was found to be so short.
    fn cut_to(&mut self, end: u64) {
        self.durable.split_off(&end.div_ceil(self.sector_size));
        let tail = (end % self.sector_size) as usize;
        if tail > 0
            && let Some(bytes) = self.durable.get_mut(&(end / self.sector_size))
        {
            let mut whole = bytes.to_vec();
            whole[tail..].fill(0);
            *bytes = whole.into();
        }
    }

    /// Everything becomes durable: the world was shut down in order.
    pub fn sync(&mut self) {
        let sectors = self.volatile.keys().copied().collect();
        self.settle(sectors, |_| true);
    }
}

fn set(sectors: &mut BTreeMap<u64, Arc<[u8]>>, sector: u64, content: Content) {
    match content {
        Some(bytes) => sectors.insert(sector, bytes),
        None => sectors.remove(&sector),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(medium: &Medium, offset: u64) -> u8 {
        let mut byte = [0];
        medium.read(offset, &mut byte);
        byte[0]
    }

    /// Every content that sector 0 takes over many cuts, in order.
    fn after_cuts(medium: &Medium) -> Vec<u8> {
        let mut found: Vec<u8> = (0..200)
            .map(|seed| read(&medium.power_cut(u64::MAX / 2, false, &mut Chance::new(seed)), 0))
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    fn written(values: &[u8]) -> Medium {
        let mut medium = Medium::new(512);
        for (index, &value) in values.iter().enumerate() {
            let operation = index as u64 + 1;
            medium.write(operation, 0, &[value; 512]);
            medium.complete(operation, 0, 512, 10 * operation);
        }
        medium
    }

    #[test]
    fn any_volatile_version_survives_a_cut_or_none() {
        let medium = written(&[1, 2, 3]);
        assert_eq!(read(&medium, 0), 3);
        assert_eq!(after_cuts(&medium), [0, 1, 2, 3]);
    }

    #[test]
    fn a_flush_covers_what_completed_before_it_was_submitted() {
        let mut medium = written(&[1, 2, 3]);
        medium.settle_flush(25, None);
        assert_eq!(after_cuts(&medium), [2, 3]);
        medium.settle_flush(30, None);
        assert_eq!(after_cuts(&medium), [2, 3], "completed at 30 is not before 30");
        medium.settle_flush(31, None);
        assert_eq!(after_cuts(&medium), [3]);
    }

    #[test]
    fn a_flush_does_not_cover_a_write_in_flight() {
        let mut medium = written(&[1]);
        medium.write(2, 0, &[2; 512]);
        medium.settle_flush(100, None);
        assert_eq!(after_cuts(&medium), [1, 2]);
    }

    #[test]
    fn a_durable_write_covers_itself_only() {
        let mut medium = written(&[1]);
        medium.write(2, 512, &[2; 512]);
        medium.settle_write(2, 512, 512);
        assert_eq!(after_cuts(&medium), [0, 1]);
        let after = medium.power_cut(1024, false, &mut Chance::new(1));
        assert_eq!(read(&after, 512), 2);
    }

    #[test]
    fn a_lost_punch_brings_the_old_bytes_back() {
        let mut medium = written(&[1]);
        medium.settle_flush(100, None);
        medium.zero(2, 0, 512);
        assert_eq!(read(&medium, 0), 0);
        assert!(!medium.is_data(0, 512));
        assert_eq!(after_cuts(&medium), [0, 1]);
    }

    /// How often all 8 sectors of block 0 were found old, mixed and new over many cuts.
    fn after_many_cuts(medium: &Medium) -> [u64; 3] {
        let mut found = [0; 3];
        for seed in 0..400 {
            let after = medium.power_cut(8192, false, &mut Chance::new(seed));
            let new = (0..8).filter(|sector| read(&after, sector * 512) == 2).count();
            found[usize::from(new > 0) + usize::from(new == 8)] += 1;
        }
        found
    }

    #[test]
    fn a_block_may_lose_its_place_with_all_that_was_written_there() {
        let whole = |medium: &mut Medium, value, stamp| {
            for sector in 0..8 {
                medium.write(stamp + sector, sector * 512, &[value; 512]);
                medium.complete(stamp + sector, sector * 512, 512, stamp + sector);
            }
        };
        let mut fresh = Medium::new(512);
        whole(&mut fresh, 2, 10);
        let mut placed = Medium::new(512);
        whole(&mut placed, 1, 10);
        placed.settle_flush(20, None);
        let mut shared = placed.power_cut(8192, false, &mut Chance::new(0));
        shared.share(&BTreeSet::from([0]));
        whole(&mut placed, 2, 30);
        whole(&mut shared, 2, 30);
        let rate = |medium| after_many_cuts(medium)[0];
        // Eight writes are lost together where the block needs a place, and hardly ever where not.
        assert!(rate(&fresh) > 2 * rate(&placed), "{} {}", rate(&fresh), rate(&placed));
        assert!(rate(&shared) > 2 * rate(&placed), "{} {}", rate(&shared), rate(&placed));
        fresh.settle_flush(40, None);
        assert_eq!(after_many_cuts(&fresh), [0, 0, 400]);
    }

    #[test]
    fn a_failed_flush_leaves_old_or_new_and_the_next_one_does_not_help() {
        let (mut lost, mut reverted, mut durable) = (0, 0, 0);
        for seed in 0..400 {
            let mut medium = written(&[1]);
            medium.fail_flush(100, &mut Chance::new(seed));
            medium.settle_flush(200, None);
            match (read(&medium, 0), after_cuts(&medium).as_slice()) {
                (1, [0]) => lost += 1,
                (0, [0]) => reverted += 1,
                (1, [1]) => durable += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(lost > 10 && reverted > 10 && durable > 10);
    }

    #[test]
    fn writes_are_torn_between_sectors_but_not_within() {
        let mut medium = Medium::new(4096);
        medium.write(1, 0, &[1; 8192]);
        let mut torn = false;
        for seed in 0..100 {
            let after = medium.power_cut(8192, false, &mut Chance::new(seed));
            assert_eq!(read(&after, 0), read(&after, 4095));
            torn |= read(&after, 0) != read(&after, 4096);
        }
        assert!(torn);
    }

    #[test]
    fn what_lies_beyond_the_end_is_gone() {
        let mut medium = written(&[1]);
        medium.settle_flush(100, None);
        let after = medium.power_cut(100, false, &mut Chance::new(0));
        assert_eq!((read(&after, 99), read(&after, 100)), (1, 0));
    }
}
