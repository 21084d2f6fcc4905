//! Finds, and repairs, what contradicts itself in a qcow2 image.
//!
//! ```text
//!  references   every reference to a host cluster is counted, each table being read once, in the
//!      │        order of the file
//!  refcounts    the counts are compared with the refcounts on disk; leaks and errors are repaired
//!      │        there, or the refcount structures are built anew
//!  flags        only where the comparison has found a "copied" flag that must be wrong, the active
//!               tables are read again to name (and repair) it
//! ```
//!
//! Each host cluster takes one byte of memory while it is counted (`counts`), which bounds memory by
//! the file's real length; a file whose clusters are scattered over more than that is refused.
//!
//! Repair never makes things worse in a crash: refcounts are raised before flags say that a cluster
//! is unshared, and new refcount structures are durable before the header names them.
//!
//! Deliberately absent: guest data. Nothing here tells whether it is what the guest wrote.

mod counts;
mod finding;
mod flags;
mod rebuild;
mod refcounts;
mod references;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use stillpoint_format::qcow2::features::{
    AUTOCLEAR_KNOWN, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY,
};
use stillpoint_format::qcow2::{Geometry, Header};
use stillpoint_io::{Queue, Result, Storage};

use super::image::{read_header, write_bytes};
use counts::Counts;
pub use finding::Finding;
use references::TableReferences;

/// What a check may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Repair {
    /// Nothing.
    #[default]
    Nothing,
    /// Clusters that nobody refers to are freed.
    Leaks,
    /// Everything that can be repaired.
    All,
}

/// What a check has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Errors that are still there.
    pub corruptions: u64,
    /// Clusters that nobody refers to and that are still there.
    pub leaks: u64,
    /// Errors that were repaired.
    pub corruptions_fixed: u64,
    /// Clusters that were freed.
    pub leaks_fixed: u64,
    /// The disk's clusters.
    pub total_clusters: u64,
    /// Those of them that have a host cluster.
    pub allocated_clusters: u64,
    /// Those of them that do not follow their neighbour in the host file.
    pub fragmented_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
    /// Where the last host cluster in use ends, in bytes.
    pub image_end_offset: u64,
}

/// An image being checked.
struct Check<'a> {
    queue: &'a Queue,
    file: &'a dyn Storage,
    header: Header,
    geometry: Geometry,
    repair: Repair,
    counts: Counts,
    tables: TableReferences,
    /// The refcount blocks that can be trusted, by their place in the refcount table.
    blocks: Vec<Option<u64>>,
    /// A "copied" flag was seen that the refcounts cannot agree with.
    flags_suspect: bool,
    report: Report,
    found: &'a mut dyn FnMut(&Finding),
}

/// Checks the image in `file`, tells each finding to `found` as it comes up, and repairs as allowed.
///
/// # Errors
/// If the image cannot be read as far as that needs; what is merely wrong is a finding.
pub async fn check(
    queue: &Queue,
    file: &Arc<dyn Storage>,
    repair: Repair,
    found: &mut dyn FnMut(&Finding),
) -> Result<Report> {
    let file = &**file;
    let header = read_header(queue, file, |bytes, _| Header::decode_for_repair(bytes)).await?;
    let run = run(queue, file, header, repair, found);
    run.await.map_err(|error| error.file(file.name()))
}

async fn run(
    queue: &Queue,
    file: &dyn Storage,
    header: Header,
    repair: Repair,
    found: &mut dyn FnMut(&Finding),
) -> Result<Report> {
    let geometry = header.geometry();
    let counts = Counts::new(geometry.clusters_for(file.end()))?;
    let report = Report { total_clusters: geometry.clusters_for(header.size), ..Report::default() };
    let mut check = Check {
        queue,
        file,
        header,
        geometry,
        repair,
        counts,
        tables: TableReferences::default(),
        blocks: Vec::new(),
        flags_suspect: false,
        report,
        found,
    };
    if repair > Repair::Nothing {
        check.clear_unknown_autoclear().await?;
    }
    check.count_references().await?;
    check.check_refcounts().await?;
    check.check_flags().await?;
    if repair > Repair::Nothing {
        check.finish_repair().await?;
    }
    Ok(check.report)
}

impl Check<'_> {
    /// Tells of an error; it counts as repaired where the finding says so.
    fn corrupt(&mut self, finding: Finding) {
        if finding.is_repaired() {
            self.report.corruptions_fixed += 1;
        } else {
            self.report.corruptions += 1;
        }
        (self.found)(&finding);
    }

    fn has_data_file(&self) -> bool {
        self.header.has(INCOMPATIBLE_DATA_FILE)
    }

    /// Whoever writes to an image clears the autoclear bits that it does not know (F1).
    async fn clear_unknown_autoclear(&mut self) -> Result<()> {
        if self.header.autoclear & !AUTOCLEAR_KNOWN != 0 {
            self.header.autoclear &= AUTOCLEAR_KNOWN;
            let bytes = self.header.autoclear.to_be_bytes();
            write_bytes(self.queue, self.file, 88, &bytes).await?;
            // ORDER: the bits before anything that they may vouch for changes.
            self.file.flush(self.queue).await?;
        }
        Ok(())
    }

    /// Makes the repair durable, and an image without errors clean.
    async fn finish_repair(&mut self) -> Result<()> {
        // ORDER: every repair before the bits that tell of damage are cleared.
        self.file.flush(self.queue).await?;
        const DAMAGED: u64 = INCOMPATIBLE_DIRTY | INCOMPATIBLE_CORRUPT;
        if self.report.corruptions == 0 && self.header.has(DAMAGED) {
            self.header.incompatible &= !DAMAGED;
            let bytes = self.header.incompatible.to_be_bytes();
            write_bytes(self.queue, self.file, 72, &bytes).await?;
            // ORDER: the image is clean on the medium before that is told.
            self.file.flush(self.queue).await?;
        }
        Ok(())
    }
}
