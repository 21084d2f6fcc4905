//! Rules that the simulator breaks, one at a time, to show that it would notice their absence.
//!
//! With the feature `mutants`, which only the simulator asks for, `choose` breaks a rule on the calling
//! thread. Without it `broken` is constantly false, and nothing of this is in the program.

macro_rules! mutants {
    ($($rule:ident $name:literal $what:literal)*) => {
        /// A broken rule.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutant {
            $(#[doc = $what] $rule,)*
        }

        impl Mutant {
            /// Every mutant, its name, and what it does.
            pub const ALL: &[(Mutant, &str, &str)] = &[$((Mutant::$rule, $name, $what),)*];
        }
    };
}

#[rustfmt::skip] // A table.
mutants! {
    R1Unaligned "R1-unaligned" "unaligned writes do not exclude each other"
    R1Zeroing "R1-zeroing" "discards and zeroings do not exclude writes"
    R1Backing "R1-backing" "a discard shows the backing file's bytes"
    R3Growth "R3-growth" "clusters are used before the file has grown over them"
    R4Durable "R4-durable" "space is given back before the change is durable"
    R4Quiesce "R4-quiesce" "space is given back under I/O by the old mapping"
    R4Punch "R4-punch" "clusters are used again before their punch has ended"
    R5Copy "R5-copy" "a mapping is published before old content is copied"
    R6Latch "R6-latch" "writing goes on after a failed barrier"
    R7Closed "R7-closed" "writes join an allocation that is being copied"
    R7Failed "R7-failed" "a failed writer's range counts as written"
    R7Aborted "R7-aborted" "an aborted allocation comes back as known zero"
    J1Barrier "J1-barrier" "mappings are written with their data, not after it"
    J2Mapping "J2-mapping" "a flush is answered before its mappings are durable"
    J20Content "J20-content" "a new table keeps what its cluster held"
    J20Links "J20-links" "L1 entries that changed during a commit go out with it"
    J21Open "J21-open" "free clusters found in the file are taken for zero"
    J21Written "J21-written" "a submitted write leaves its area known zero"
    J21Copied "J21-copied" "a copied unit leaves its area known zero"
    J25PutBack "J25-put-back" "what a commit had no space for is forgotten"
    J31Covered "J31-covered" "a barrier counts for writes that ended during it"
    J31Group "J31-group" "a flush takes the outcome of one that began before it"
    J31Fua "J31-fua" "a durable overwrite does not ask whether its mapping is"
    J37Dirty "J37-dirty" "dirty slices are evicted"
    J38Early "J38-early" "refcounts change when clusters are reserved"
    F1Shared "F1-shared" "clusters of a snapshot are written in place"
    F1SharedTable "F1-shared-table" "tables of a snapshot are changed in place"
    F2Counted "F2-counted" "counted clusters beyond the end are taken for free"
    F4Growth "F4-growth" "a close does not wait for growth under way"
    RunSlice "run-slice" "a run of free clusters grows beyond its refcount slice"
    Beyond "beyond" "freed clusters beyond the file's end are used again"
    L1Again "l1-again" "L1 entries are not written again after a lack of space"
    LoadLock "load-lock" "a slice is loaded from where its table was before"
    Blocks "blocks" "refcount blocks are linked before they are durable"
    ResizeBacking "resize-backing" "growing shows a longer backing file"
    ResizeBetween "resize-between" "the L1 table moves during commits"
    ResizeCounted "resize-counted" "a moved L1 table is named before it is counted"
    ResizeCut "resize-cut" "what is cut off goes before the size is durable"
    ResizeHeader "resize-header" "a moved L1 table is named before it is durable"
    ResizeOrder "resize-order" "a new size is durable before the zeros that it shows"
    ResizeRelease "resize-release" "a moved L1 table's old clusters are freed early"
    ResizeTail "resize-tail" "a disk is cut under requests of its tail"
    ResizeZeros "resize-zeros" "growing shows the bytes behind the old end"
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
