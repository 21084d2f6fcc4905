//! What kind of disk and file system it is, and which of its operations fail.
//!
//! A plan is data: it is chosen by a test or drawn from a seed, and everything that the simulated
//! storage does wrong stands in it. Rates are in thousandths of the operations of a kind.

use std::time::Duration;

use stillpoint_io::{Facts, FileId, GrowMeans};

use crate::chance::Chance;

/// What a write beyond the end of the file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeyondEnd {
    /// It is a broken invariant (R3): a panic.
    Panic,
    /// It grows the file, as `pwrite` does; for what is to show why R3 exists.
    Grow,
}

/// What a disk does that it must not: the controls that an honest oracle must catch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// A flush does nothing.
    Flush,
    /// A flush leaves out one of the writes that it covers.
    Reorder,
    /// A durable write is not durable.
    DurableWrite,
    /// A power cut tears sectors in their middle.
    Tear,
}

impl Lie {
    /// Each, its name, and what it does.
    pub const ALL: [(Lie, &str, &str); 4] = [
        (Lie::Flush, "ignored-flush", "a flush does nothing"),
        (Lie::Reorder, "reordered-flush", "a flush leaves out one of the writes that it covers"),
        (Lie::DurableWrite, "ignored-fua", "a durable write is not durable"),
        (Lie::Tear, "torn-sector", "a power cut tears sectors in their middle"),
    ];
}

/// What kind of disk it is and which of its operations fail; see the module's head.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What a power cut cannot tear, in bytes: 512 or 4,096.
    pub sector: u32,
    /// Offsets and lengths of requests are multiples of this, in bytes.
    pub request_align: u32,
    /// The growth that the file system is said to like, and its step in bytes.
    pub growth: (GrowMeans, u64),
    /// Holes can be punched.
    pub can_punch: bool,
    /// Ranges can be zeroed.
    pub can_zero_range: bool,
    /// Files can be grown by `fallocate`.
    pub can_fallocate: bool,
    /// A growth by `fallocate` destroys writes in flight beyond the old end, as XFS did.
    pub fallocate_destroys_writes: bool,
    /// What a write beyond the end does.
    pub beyond_end: BeyondEnd,
    /// Reads that fail with EIO.
    pub read_errors_permille: u32,
    /// Writes that fail with EIO; any part of such a write may have happened.
    pub write_errors_permille: u32,
    /// Flushes that fail with EIO; see [`crate::device`] on what is left then.
    pub flush_errors_permille: u32,
    /// Growths, punches and zeroings that fail with EIO.
    pub manage_errors_permille: u32,
    /// Growths by `fallocate` and writes into holes that fail with ENOSPC.
    pub no_space_permille: u32,
    /// How many file-system blocks of 4 KiB all files may have together.
    pub capacity_blocks: u64,
    /// The usual time of an operation is from 1 us to this.
    pub latency_max: Duration,
    /// One in so many operations takes up to fifty times as long.
    pub slow_one_in: u64,
    /// What it promises and does not keep.
    pub lie: Option<Lie>,
}

impl Default for Plan {
    /// A page-cached file on an honest disk of 512-byte sectors where nothing fails.
    fn default() -> Plan {
        Plan {
            sector: 512,
            request_align: 1,
            growth: (GrowMeans::Truncate, 1 << 20),
            can_punch: true,
            can_zero_range: true,
            can_fallocate: true,
            fallocate_destroys_writes: false,
            beyond_end: BeyondEnd::Panic,
            read_errors_permille: 0,
            write_errors_permille: 0,
            flush_errors_permille: 0,
            manage_errors_permille: 0,
            no_space_permille: 0,
            capacity_blocks: u64::MAX,
            latency_max: Duration::from_micros(200),
            slow_one_in: 30,
            lie: None,
        }
    }
}

impl Plan {
    /// A disk and file system of any kind, on which nothing fails.
    pub fn random(chance: &mut Chance) -> Plan {
        let xfs = chance.one_in(2);
        let means =
            if xfs || chance.one_in(2) { GrowMeans::Fallocate } else { GrowMeans::Truncate };
        Plan {
            sector: chance.pick(&[512, 4096]),
            request_align: chance.pick(&[1, 1, 512, 4096]),
            growth: (means, chance.pick(&[64 << 10, 256 << 10, 1 << 20, 4 << 20])),
            can_punch: !chance.one_in(8),
            can_zero_range: !chance.one_in(4),
            fallocate_destroys_writes: xfs,
            slow_one_in: chance.pick(&[2, 5, 30, 30]),
            ..Plan::default()
        }
    }

    /// The same disk, on which a few operations fail.
    pub fn with_random_faults(mut self, chance: &mut Chance) -> Plan {
        let mut rate = |permille: &[u32]| if chance.one_in(3) { chance.pick(permille) } else { 0 };
        self.read_errors_permille = rate(&[5]);
        self.write_errors_permille = rate(&[5]);
        self.flush_errors_permille = rate(&[30]);
        self.manage_errors_permille = rate(&[50]);
        self.no_space_permille = rate(&[20, 200]);
        self
    }

    /// The same disk, on which nothing fails and space does not run out.
    pub fn without_faults(&self) -> Plan {
        Plan {
            read_errors_permille: 0,
            write_errors_permille: 0,
            flush_errors_permille: 0,
            manage_errors_permille: 0,
            no_space_permille: 0,
            capacity_blocks: u64::MAX,
            ..self.clone()
        }
    }

    /// Whether anything may fail.
    pub fn has_faults(&self) -> bool {
        self.capacity_blocks != u64::MAX
            || [
                self.read_errors_permille,
                self.write_errors_permille,
                self.flush_errors_permille,
                self.manage_errors_permille,
                self.no_space_permille,
            ]
            .iter()
            .any(|&rate| rate > 0)
    }

    /// What a file on this disk is found to be when it is opened.
    pub(crate) fn facts(&self, inode: u64, read_only: bool) -> Facts {
        Facts {
            id: FileId { device: 1, inode },
            request_align: self.request_align,
            memory_align: self.request_align.min(512),
            fs_block: 4096,
            can_punch: self.can_punch,
            can_zero_range: self.can_zero_range,
            can_fallocate: self.can_fallocate,
            fixed_size: false,
            growth: self.growth,
            read_only,
        }
    }

    /// How long an operation takes.
    pub(crate) fn latency(&self, chance: &mut Chance) -> Duration {
        let usual = chance.between(1000, self.latency_max.as_nanos().max(1001) as u64);
        Duration::from_nanos(if chance.one_in(self.slow_one_in) {
            usual * chance.between(2, 50)
        } else {
            usual
        })
    }
}
