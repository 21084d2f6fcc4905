//! A qcow2 image in use.
//!
//! # The road of a request through this folder
//!
//! ```text
//!  read.rs ───────▶ tables.rs (the slice) ─▶ mapping.rs (runs) ─▶ file, compressed.rs or backing
//!  write.rs ──────▶ tables.rs ─▶ mapping.rs: in place? ─▶ file
//!     │ no
//!     ├─▶ allocate.rs (host clusters; grow.rs lengthens the file ahead of need)
//!     └─▶ inflight.rs (who else writes this cluster?) ─▶ file ─▶ publication
//!  zero.rs ───────▶ mapping changes; what they free waits in release.rs
//!  commit.rs ◀── flush, FUA, a cache half dirty: metadata to the file, in plain order
//!  resize.rs ─────▶ between two commits: a longer L1 table, and the size in the header
//! ```
//!
//! # What is true at every moment
//!
//! - A mapping is published only after every byte of it is in place (R5), and a write is answered
//!   only after its mapping is published. So, until then, the old mapping is a legal answer to every
//!   read (R1), and a flush finds everything it covers in the cache.
//! - A host cluster is reserved outside the refcounts until its publication, which sets its refcount
//!   in the same step (J38).
//! - What a mapping change frees is given back only after the change is durable and every request
//!   under the old mapping has ended (R4).

pub(crate) mod allocate;
pub(crate) mod commit;
pub(crate) mod compressed;
pub(crate) mod grow;
pub(crate) mod inflight;
pub(crate) mod mapping;
pub(crate) mod read;
pub(crate) mod refcounts;
pub(crate) mod release;
pub(crate) mod resize;
pub(crate) mod tables;
pub(crate) mod write;
pub(crate) mod zero;

use std::collections::BTreeSet;
use std::fmt;

use stillpoint_format::qcow2::geometry::Geometry;
use stillpoint_format::qcow2::header::Header;
use stillpoint_io::{Background, Error, GrowMeans, Kind, Queue, Result, Storage};

use crate::cache::SliceCache;
use crate::chain::Layer;
use crate::options::{AllocPolicy, DiscardPolicy};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{Arc, Mutex, Weak};
use crate::tracker::Tracker;

use allocate::Allocator;
use commit::Committer;
use inflight::Inflights;
use mapping::Codec;
use refcounts::Refcounts;
use release::Releases;
use tables::L1;

/// A qcow2 image in use: see the module's head.
pub(crate) struct Qcow2 {
    pub(crate) file: Arc<dyn Storage>,
    /// The header as it was opened; what changes later is kept beside it.
    pub(crate) header: Header,
    pub(crate) codec: Codec,
    /// The size that it holds, in bytes.
    pub(crate) size: AtomicU64,
    pub(crate) backing: Option<Arc<Layer>>,
    pub(crate) policy: Policy,
    pub(crate) l1: L1,
    pub(crate) l2: Arc<SliceCache<Inflights>>,
    /// What only a writer needs.
    pub(crate) writer: Option<Writer>,
}

/// What the operator chose, resolved against the file's facts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) alloc: AllocPolicy,
    pub(crate) discard: DiscardPolicy,
    /// By which means and in which steps (bytes) the file grows.
    pub(crate) grow: (GrowMeans, u64),
}

/// The state behind every change of an image.
pub(crate) struct Writer {
    pub(crate) refcounts: Refcounts,
    pub(crate) allocator: Allocator,
    pub(crate) committer: Committer,
    pub(crate) releases: Arc<Releases>,
    pub(crate) me: Weak<Qcow2>,
    pub(crate) tracker: Arc<Tracker>,
    pub(crate) background: Arc<dyn Background>,
    /// In-place writes and publications completed so far: what a barrier has to cover (J31).
    pub(crate) writes: AtomicU64,
    /// The clusters of the header and of the tables; found out when first asked for.
    pub(crate) table_clusters: Mutex<Option<BTreeSet<u64>>>,
    /// It was told that an entry claims a table for guest data.
    pub(crate) claim_told: AtomicBool,
    /// A commit was asked for and has not begun.
    pub(crate) commit_wanted: AtomicBool,
}

impl Qcow2 {
    pub(crate) fn geometry(&self) -> Geometry {
        self.codec.geometry
    }

    pub(crate) fn cluster_size(&self) -> u64 {
        self.codec.geometry.cluster_size()
    }

    /// The writer's state of an image that was opened for writing; `Disk` lets no write through
    /// to another.
    pub(crate) fn writer(&self) -> &Writer {
        self.writer.as_ref().expect("an image opened for reading is never written to")
    }

    /// Runs `work` on the background queue, as long as the image is still in use then.
    pub(crate) fn in_background<F: Future<Output = ()> + 'static>(
        &self,
        work: impl FnOnce(Arc<Qcow2>, Queue) -> F + Send + 'static,
    ) {
        let writer = self.writer();
        let me = writer.me.clone();
        writer.background.run(Box::new(move |queue| {
            Box::pin(async move {
                if let Some(image) = me.upgrade() {
                    work(image, queue).await;
                }
            })
        }));
    }

    /// An image that contradicts the specification, at a host offset.
    pub(crate) fn corrupt(
        &self,
        op: &'static str,
        host_offset: u64,
        why: impl fmt::Display,
    ) -> Error {
        Error::new(Kind::Corrupt, op, why.to_string())
            .file(self.file.name())
            .at(host_offset)
            .remedy("run `stillpoint check` on the image")
    }
}

/// Turns a codec's complaint into the engine's error.
pub(crate) fn refused(
    error: &stillpoint_format::Error,
    op: &'static str,
    file: &str,
    structure_offset: u64,
) -> Error {
    let kind = if error.is_unsupported() { Kind::Unsupported } else { Kind::Corrupt };
    Error::new(kind, op, error.to_string()).file(file).at(structure_offset)
}

impl fmt::Debug for Qcow2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qcow2({})", self.file.name())
    }
}

/// Nothing failed: the type that says so where a value would be noise.
pub(crate) type Done = Result<()>;
