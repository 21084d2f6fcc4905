//! Rules that the simulator breaks, one at a time, to show that it would notice their absence.
//!
//! With the feature `mutants`, which only the simulator asks for, `choose` breaks a rule on the calling
//! thread. Without it `broken` is constantly false, and nothing of this is in the program.

/// A broken rule; see [`Mutant::ALL`] for what each does.
#[allow(missing_docs, reason = "each is described in `Mutant::ALL`")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    R1Unaligned,
    R1Zeroing,
    R1Backing,
    R3Growth,
    R4Durable,
    R4Quiesce,
    R4Punch,
    R5Copy,
    R6Latch,
    R7Closed,
    R7Failed,
    R7Aborted,
    J1Barrier,
    J2Mapping,
    J20Content,
    J20Links,
    J21Open,
    J21Written,
    J21Copied,
    J25PutBack,
    J31Covered,
    J31Group,
    J31Fua,
    J37Dirty,
    J38Early,
    F1Shared,
    F1SharedTable,
    F2Counted,
    F4Growth,
    Blocks,
    RunSlice,
    Beyond,
    L1Again,
    LoadLock,
    ResizeBacking,
    ResizeBetween,
    ResizeCounted,
    ResizeCut,
    ResizeHeader,
    ResizeOrder,
    ResizeRelease,
    ResizeTail,
    ResizeZeros,
}

impl Mutant {
    /// Every mutant, its name, and what it does.
    pub const ALL: &[(Mutant, &str, &str)] = &[
        (Mutant::R1Unaligned, "R1-unaligned", "unaligned writes do not exclude each other"),
        (Mutant::R1Zeroing, "R1-zeroing", "discards and zeroings do not exclude writes"),
        (Mutant::R1Backing, "R1-backing", "a discard shows the backing file's bytes"),
        (Mutant::R3Growth, "R3-growth", "clusters are used before the file has grown over them"),
        (Mutant::R4Durable, "R4-durable", "space is given back before the change is durable"),
        (Mutant::R4Quiesce, "R4-quiesce", "space is given back under I/O by the old mapping"),
        (Mutant::R4Punch, "R4-punch", "clusters are used again before their punch has ended"),
        (Mutant::R5Copy, "R5-copy", "a mapping is published before old content is copied"),
        (Mutant::R6Latch, "R6-latch", "writing goes on after a failed barrier"),
        (Mutant::R7Closed, "R7-closed", "writes join an allocation that is being copied"),
        (Mutant::R7Failed, "R7-failed", "a failed writer's range counts as written"),
        (Mutant::R7Aborted, "R7-aborted", "an aborted allocation comes back as known zero"),
        (Mutant::J1Barrier, "J1-barrier", "mappings are written with their data, not after it"),
        (Mutant::J2Mapping, "J2-mapping", "a flush is answered before its mappings are durable"),
        (Mutant::J20Content, "J20-content", "a new table keeps what its cluster held"),
        (Mutant::J20Links, "J20-links", "L1 entries that changed during a commit go out with it"),
        (Mutant::J21Open, "J21-open", "free clusters found in the file are taken for zero"),
        (Mutant::J21Written, "J21-written", "a submitted write leaves its area known zero"),
        (Mutant::J21Copied, "J21-copied", "a copied unit leaves its area known zero"),
        (Mutant::J25PutBack, "J25-put-back", "what a commit had no space for is forgotten"),
        (Mutant::J31Covered, "J31-covered", "a barrier counts for writes that ended during it"),
        (Mutant::J31Group, "J31-group", "a flush takes the outcome of one that began before it"),
        (Mutant::J31Fua, "J31-fua", "a durable overwrite does not ask whether its mapping is"),
        (Mutant::J37Dirty, "J37-dirty", "dirty slices are evicted"),
        (Mutant::J38Early, "J38-early", "refcounts change when clusters are reserved"),
        (Mutant::F1Shared, "F1-shared", "clusters of a snapshot are written in place"),
        (Mutant::F1SharedTable, "F1-shared-table", "tables of a snapshot are changed in place"),
        (Mutant::F2Counted, "F2-counted", "counted clusters beyond the end are taken for free"),
        (Mutant::F4Growth, "F4-growth", "a close does not wait for growth under way"),
        (Mutant::RunSlice, "run-slice", "a run of free clusters grows beyond its refcount slice"),
        (Mutant::Beyond, "beyond", "freed clusters beyond the file's end are used again"),
        (Mutant::L1Again, "l1-again", "L1 entries are not written again after a lack of space"),
        (Mutant::LoadLock, "load-lock", "a slice is loaded from where its table was before"),
        (Mutant::Blocks, "blocks", "refcount blocks are linked before they are durable"),
        (Mutant::ResizeBacking, "resize-backing", "growing shows a longer backing file"),
        (Mutant::ResizeBetween, "resize-between", "the L1 table moves during commits"),
        (Mutant::ResizeCounted, "resize-counted", "a moved L1 table is named before it is counted"),
        (Mutant::ResizeCut, "resize-cut", "what is cut off goes before the size is durable"),
        (Mutant::ResizeHeader, "resize-header", "a moved L1 table is named before it is durable"),
        (
            Mutant::ResizeOrder,
            "resize-order",
            "a new size is durable before the zeros that it shows",
        ),
        (
            Mutant::ResizeRelease,
            "resize-release",
            "a moved L1 table's old clusters are freed early",
        ),
        (Mutant::ResizeTail, "resize-tail", "a disk is cut under requests of its tail"),
        (Mutant::ResizeZeros, "resize-zeros", "growing shows the bytes behind the old end"),
    ];
}

#[cfg(feature = "mutants")]
mod chosen {
    use std::cell::Cell;

    use super::Mutant;

    thread_local! {
        static CHOSEN: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Breaks a rule on this thread, or none.
    pub fn choose(mutant: Option<Mutant>) {
        CHOSEN.set(mutant);
    }

    pub(crate) fn broken(rule: Mutant) -> bool {
        CHOSEN.get() == Some(rule)
    }
}

#[cfg(feature = "mutants")]
pub(crate) use chosen::broken;
#[cfg(feature = "mutants")]
pub use chosen::choose;

#[cfg(not(feature = "mutants"))]
pub(crate) const fn broken(_: Mutant) -> bool {
    false
}
