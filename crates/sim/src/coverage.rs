//! What power cuts fell into: which requests of the guest and which operations of the host were under
//! way, counted over all cuts. A cell that stays 0 is a place where nothing was proved.

use std::fmt;
use std::ops::AddAssign;

/// What a guest has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum GuestKind {
    Read,
    Status,
    Write,
    DurableWrite,
    Zeroes,
    UnmappingZeroes,
    Discard,
    Resize,
    Flush,
    Close,
}

/// What a host works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum HostKind {
    Read,
    Write,
    Flush,
    /// Growing and shrinking.
    Resize,
    /// Punching and zeroing.
    Zero,
}

impl GuestKind {
    /// How many there are.
    pub const COUNT: usize = 10;
    const NAMES: [&str; GuestKind::COUNT] = [
        "read",
        "status",
        "write",
        "write, durable",
        "zeroes",
        "zeroes, unmapping",
        "discard",
        "resize",
        "flush",
        "close",
    ];
}

impl HostKind {
    /// How many there are.
    pub const COUNT: usize = 5;
    const NAMES: [&str; HostKind::COUNT] = ["read", "write", "flush", "resize", "zero"];
}

/// How many cuts fell into each pair of a guest's request and a host's operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Cuts in all.
    pub cuts: u64,
    cells: [[u64; HostKind::COUNT]; GuestKind::COUNT],
}

impl Coverage {
    /// Counts a cut with so many requests and operations of each kind under way.
    pub fn count(&mut self, guest: &[u64; GuestKind::COUNT], host: &[u64; HostKind::COUNT]) {
        self.cuts += 1;
        for (row, _) in self.cells.iter_mut().zip(guest).filter(|(_, count)| **count > 0) {
            for (cell, _) in row.iter_mut().zip(host).filter(|(_, count)| **count > 0) {
                *cell += 1;
            }
        }
    }

    /// How many pairs no cut fell into.
    pub fn blank(&self) -> usize {
        self.cells.iter().flatten().filter(|&&cell| cell == 0).count()
    }
}

impl AddAssign for Coverage {
    fn add_assign(&mut self, other: Coverage) {
        self.cuts += other.cuts;
        for (to, from) in self.cells.iter_mut().flatten().zip(other.cells.iter().flatten()) {
            *to += from;
        }
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:20}", "guest \\ host")?;
        HostKind::NAMES.iter().try_for_each(|name| write!(f, "{name:>10}"))?;
        for (name, row) in GuestKind::NAMES.iter().zip(&self.cells) {
            write!(f, "\n{name:20}")?;
            row.iter().try_for_each(|cell| write!(f, "{cell:>10}"))?;
        }
        Ok(())
    }
}
