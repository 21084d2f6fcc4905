//! What a check can find, each in the words that qemu-img's users know.

use std::fmt;

use stillpoint_io::Error;

/// One thing that is wrong with an image.
#[derive(Clone, Debug)]
pub enum Finding {
    /// Something points behind the end of the file.
    BeyondEnd {
        /// Where it points.
        offset: u64,
        /// How many bytes it means.
        size: u64,
    },
    /// Reserved bits of an L1 entry are set.
    ReservedL1 {
        /// The entry.
        word: u64,
    },
    /// Reserved bits of an L2 entry are set.
    ReservedL2 {
        /// The entry.
        word: u64,
    },
    /// Reserved bits of a refcount table entry are set.
    ReservedRefcountTable {
        /// Which entry.
        index: u64,
    },
    /// An L2 table does not lie on a cluster.
    L2Misaligned {
        /// Where it lies.
        offset: u64,
    },
    /// A guest cluster does not lie on a host cluster.
    DataMisaligned {
        /// Where it lies.
        offset: u64,
        /// It reads as zeros, so that its host cluster can be done without.
        zero: bool,
        /// It has been.
        repaired: bool,
    },
    /// A compressed cluster is marked as copied.
    CompressedCopied {
        /// Where it lies.
        offset: u64,
    },
    /// A compressed cluster in an image with an external data file.
    CompressedInDataFile {
        /// The entry.
        word: u64,
    },
    /// A zero cluster in a version 2 image.
    ZeroInVersion2 {
        /// The entry.
        word: u64,
    },
    /// An extended L2 entry whose subcluster bitmap contradicts itself.
    Subclusters {
        /// The entry.
        word: u64,
        /// Its bitmap.
        bitmap: u64,
    },
    /// A refcount block does not lie on a cluster.
    BlockMisaligned {
        /// Which block.
        index: u64,
    },
    /// A refcount block lies behind the end of the file.
    BlockOutside {
        /// Which block.
        index: u64,
    },
    /// A refcount block's cluster is used for something else as well.
    BlockShared {
        /// Which block.
        index: u64,
        /// How many references its cluster has.
        references: u64,
    },
    /// A refcount differs from the number of references.
    Refcount {
        /// The host cluster's index.
        cluster: u64,
        /// The refcount on disk.
        refcount: u64,
        /// The references that were counted.
        references: u64,
        /// The refcount has been corrected.
        repaired: bool,
    },
    /// All refcounts are being written anew.
    Rebuilding,
    /// An L1 entry's "copied" flag contradicts its table's refcount.
    CopiedL2Table {
        /// Which entry.
        l1_index: u64,
        /// The entry.
        word: u64,
        /// The refcount.
        refcount: u64,
        /// The flag has been corrected.
        repaired: bool,
    },
    /// An L2 entry's "copied" flag contradicts its cluster's refcount.
    CopiedData {
        /// The entry.
        word: u64,
        /// The refcount.
        refcount: u64,
        /// The flag has been corrected.
        repaired: bool,
    },
    /// The snapshot table or the bitmap directory cannot be read.
    Unreadable(Error),
}

impl Finding {
    /// Whether it has been put right.
    pub fn is_repaired(&self) -> bool {
        matches!(
            self,
            Finding::DataMisaligned { repaired: true, .. }
                | Finding::Refcount { repaired: true, .. }
                | Finding::CopiedL2Table { repaired: true, .. }
                | Finding::CopiedData { repaired: true, .. }
        )
    }

    fn verdict(&self) -> &'static str {
        match self {
            _ if self.is_repaired() => "Repairing",
            Finding::Refcount { refcount, references, .. } if refcount > references => "Leaked",
            _ => "ERROR",
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = self.verdict();
        match self {
            Finding::BeyondEnd { offset, size } => write!(
                f,
                "{verdict}: counting reference for region exceeding the end of the file by one \
                 cluster or more: offset {offset:#x} size {size:#x}"
            ),
            Finding::ReservedL1 { word } => {
                write!(f, "{verdict} found L1 entry with reserved bits set: {word:x}")
            }
            Finding::ReservedL2 { word } => {
                write!(f, "{verdict} found l2 entry with reserved bits set: {word:x}")
            }
            Finding::ReservedRefcountTable { index } => {
                write!(f, "{verdict} refcount table entry {index} has reserved bits set")
            }
            Finding::L2Misaligned { offset } => write!(
                f,
                "{verdict} l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted"
            ),
            Finding::DataMisaligned { offset, zero, .. } => {
                let what = if *zero { "Preallocated" } else { "Data" };
                write!(
                    f,
                    "{verdict} offset={offset:x}: {what} cluster is not properly aligned; L2 \
                     entry corrupted."
                )
            }
            Finding::CompressedCopied { offset } => write!(
                f,
                "{verdict}: coffset={offset:#x}: copied flag must never be set for compressed \
                 clusters"
            ),
            Finding::CompressedInDataFile { word } => {
                write!(f, "{verdict} compressed cluster with data file, entry={word:#x}")
            }
            Finding::ZeroInVersion2 { word } => {
                write!(f, "{verdict} found zero cluster in a version 2 image: {word:x}")
            }
            Finding::Subclusters { word, bitmap } => write!(
                f,
                "{verdict} found l2 entry with an invalid subcluster bitmap: {word:x} {bitmap:x}"
            ),
            Finding::BlockMisaligned { index } => write!(
                f,
                "{verdict} refcount block {index} is not cluster aligned; refcount table entry \
                 corrupted"
            ),
            Finding::BlockOutside { index } => {
                write!(f, "{verdict} refcount block {index} is outside image")
            }
            Finding::BlockShared { index, references } => {
                write!(f, "{verdict} refcount block {index} refcount={references}")
            }
            Finding::Refcount { cluster, refcount, references, .. } => {
                write!(f, "{verdict} cluster {cluster} refcount={refcount} reference={references}")
            }
            Finding::Rebuilding => write!(f, "Rebuilding refcount structure"),
            Finding::CopiedL2Table { l1_index, word, refcount, .. } => write!(
                f,
                "{verdict} OFLAG_COPIED L2 cluster: l1_index={l1_index} l1_entry={word:x} \
                 refcount={refcount}"
            ),
            Finding::CopiedData { word, refcount, .. } => write!(
                f,
                "{verdict} OFLAG_COPIED data cluster: l2_entry={word:x} refcount={refcount}"
            ),
            Finding::Unreadable(error) => write!(f, "{verdict} {error}"),
        }
    }
}
