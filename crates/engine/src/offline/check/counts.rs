//! How often each host cluster is referred to, and with which "copied" flags: one byte a cluster.
//!
//! ```text
//!  | 7 seen without "copied" | 6 seen with it | 5..0 references; 63: see `overflow` |
//! ```
//!
//! Pages of bytes exist only where something was counted. They are bounded in number, so that a
//! sparse file that claims to be huge cannot take more than [`PAGES_MAX`] of them.

use std::collections::HashMap;

use stillpoint_io::{Error, Kind, Result};

/// Clusters in a page.
const PAGE_CLUSTERS: u64 = 1 << 16;
/// The most pages: 1 GiB of memory, enough for 64 TiB in clusters of 64 KiB.
const PAGES_MAX: usize = 1 << 14;
/// The longest file in clusters; bounds the list of pages to 128 MiB.
const CLUSTERS_MAX: u64 = 1 << 39;

const COUNT: u8 = 0x3f;
const COPIED: u8 = 1 << 6;
const PLAIN: u8 = 1 << 7;

/// See the module's head.
pub(super) struct Counts {
    pages: Vec<Option<Box<[u8]>>>,
    pages_left: usize,
    /// Clusters with 63 references and more.
    overflow: HashMap<u64, u64>,
    clusters: u64,
}

fn limit(why: &str) -> Error {
    Error::new(Kind::Limit, "count references", why)
}

impl Counts {
    /// For a file of so many clusters.
    pub(super) fn new(clusters: u64) -> Result<Counts> {
        if clusters > CLUSTERS_MAX {
            return Err(limit("the file has more than 2^39 clusters"));
        }
        let (pages, overflow) = (Vec::new(), HashMap::new());
        Ok(Counts { pages, pages_left: PAGES_MAX, overflow, clusters })
    }

    /// The file's length in clusters; no cluster behind it is counted.
    pub(super) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Clusters were added to the end of the file.
    pub(super) fn extend(&mut self, clusters: u64) {
        self.clusters += clusters;
    }

    fn byte(&self, cluster: u64) -> u8 {
        let page = self.pages.get((cluster / PAGE_CLUSTERS) as usize);
        let page = page.and_then(|page| page.as_deref());
        page.map_or(0, |page| page[(cluster % PAGE_CLUSTERS) as usize])
    }

    fn byte_mut(&mut self, cluster: u64) -> Result<&mut u8> {
        let index = (cluster / PAGE_CLUSTERS) as usize;
        if index >= self.pages.len() {
            self.pages.resize(index + 1, None);
        }
        let page = match &mut self.pages[index] {
            Some(page) => page,
            none if self.pages_left > 0 => {
                self.pages_left -= 1;
                none.insert(vec![0; PAGE_CLUSTERS as usize].into_boxed_slice())
            }
            _ => {
                return Err(limit(
                    "the clusters in use are scattered over more than 1 GiB of \
                                   counts",
                ));
            }
        };
        Ok(&mut page[(cluster % PAGE_CLUSTERS) as usize])
    }

    /// Adds references to a cluster.
    pub(super) fn add(&mut self, cluster: u64, references: u64) -> Result<()> {
        let byte = self.byte_mut(cluster)?;
        let sum = u64::from(*byte & COUNT) + references;
        if sum < COUNT.into() {
            *byte = *byte & !COUNT | sum as u8;
            return Ok(());
        }
        // Once it overflows the byte stays at 63 and the whole number lies in the map.
        let before = *byte & COUNT;
        *byte |= COUNT;
        let number = self.overflow.entry(cluster).or_insert(0);
        *number += references + if before == COUNT { 0 } else { before.into() };
        Ok(())
    }

    /// Takes back one reference that was added.
    pub(super) fn remove(&mut self, cluster: u64) -> Result<()> {
        match self.overflow.get_mut(&cluster) {
            Some(number) => *number -= 1,
            None => *self.byte_mut(cluster)? -= 1,
        }
        Ok(())
    }

    /// The references that were added to a cluster.
    pub(super) fn references(&self, cluster: u64) -> u64 {
        match self.byte(cluster) & COUNT {
            COUNT => self.overflow[&cluster],
            few => few.into(),
        }
    }

    /// Notes that an active entry refers to a cluster, with or without its "copied" flag.
    pub(super) fn note_flag(&mut self, cluster: u64, copied: bool) -> Result<()> {
        *self.byte_mut(cluster)? |= if copied { COPIED } else { PLAIN };
        Ok(())
    }

    /// Whether some entry's "copied" flag contradicts a refcount.
    pub(super) fn flag_contradicts(&self, cluster: u64, refcount: u64) -> bool {
        let wrong = if refcount == 1 { PLAIN } else { COPIED };
        self.byte(cluster) & wrong != 0
    }

    /// Whether nothing at all was counted in a range of clusters.
    pub(super) fn is_untouched(&self, start: u64, end: u64) -> bool {
        let pages = start / PAGE_CLUSTERS..end.div_ceil(PAGE_CLUSTERS);
        let pages = pages.start as usize..(pages.end as usize).min(self.pages.len());
        pages.is_empty() || self.pages[pages].iter().all(Option::is_none)
    }

    /// The first cluster from `start` on whose page holds counts.
    pub(super) fn next_touched(&self, start: u64) -> Option<u64> {
        let first = (start / PAGE_CLUSTERS) as usize;
        let page = (first..self.pages.len()).find(|&page| self.pages[page].is_some())?;
        Some(start.max(page as u64 * PAGE_CLUSTERS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_go_on_beyond_what_a_byte_holds() {
        let mut counts = Counts::new(1 << 20).unwrap();
        counts.note_flag(70000, true).unwrap();
        for (added, sum) in [(1, 1), (61, 62), (1, 63), (1, 64), (1000, 1064)] {
            counts.add(70000, added).unwrap();
            assert_eq!(counts.references(70000), sum);
        }
        counts.remove(70000).unwrap();
        assert_eq!(counts.references(70000), 1063);
        counts.add(3, 1).unwrap();
        counts.remove(3).unwrap();
        assert_eq!(counts.references(3), 0);
        assert!(counts.flag_contradicts(70000, 2) && !counts.flag_contradicts(70000, 1));
        assert!(!counts.is_untouched(0, 1) && counts.is_untouched(131072, 1 << 20));
        assert_eq!(counts.next_touched(4), Some(4));
        assert_eq!(counts.next_touched(131072), None);
    }

    #[test]
    fn memory_is_bounded() {
        assert_eq!(Counts::new(1 << 40).err().unwrap().kind(), Kind::Limit);
        let mut counts = Counts::new(CLUSTERS_MAX).unwrap();
        counts.pages_left = 3;
        for page in 0..3 {
            counts.add(page * PAGE_CLUSTERS * 10, 1).unwrap();
        }
        assert_eq!(counts.add(99 * PAGE_CLUSTERS, 1).unwrap_err().kind(), Kind::Limit);
    }
}
