//! Reading: runs of the mapping become host reads, all under way at once.
//!
//! The caller has aligned the request to the blocks of every file in the chain and holds its stripes.
//! In-flight allocations are not looked at: none of their writes has been answered, so the published
//! mapping is a legal answer (R1, R5).

use futures_util::future::{LocalBoxFuture, join_all};
use smallvec::SmallVec;
use stillpoint_io::{Completion, Queue, Result, Segments};

use super::mapping::{Run, Source, map};
use super::{Done, Qcow2};
use crate::sync::atomic::Ordering::SeqCst;

impl Qcow2 {
    /// What the bytes from `offset` on read from, up to `length` of them.
    pub(crate) async fn run_at(&self, queue: &Queue, offset: u64, length: u64) -> Result<Run> {
        let covers = self.slice_covers();
        let within = length.min(covers - offset % covers);
        let (key, index) = self.locate(offset);
        match self.slice(queue, key).await? {
            None => Ok(Run { length: within, source: Source::Unallocated }),
            Some(slice) => {
                let in_cluster = offset % self.cluster_size();
                let entries = self.entries_per_slice() as usize;
                let run = map(self.codec, &slice, entries, index, in_cluster, within);
                run.map_err(|error| {
                    let within = index as u64 * self.geometry().l2_entry_size();
                    let home = self.slice_home(key).ok().flatten().unwrap_or(0);
                    super::refused(&error, "read an L2 entry", self.file.name(), home + within)
                        .remedy("run `stillpoint check` on the image")
                })
            }
        }
    }

    /// Reads `into.len()` bytes at `offset`; what lies beyond the disk's size is zeros.
    pub(crate) async fn read(&self, queue: &Queue, offset: u64, into: &Segments) -> Done {
        if let Some(host) = self.one_run(offset, into.len() as u64) {
            self.file.read(queue, host, into.clone()).await?;
            return Ok(());
        }
        // Boxed, so that the future of the common read stays small.
        Box::pin(self.read_runs(queue, offset, into)).await
    }

    /// Where the whole range lies, if it is one run whose slice is in the cache.
    fn one_run(&self, offset: u64, length: u64) -> Option<u64> {
        if offset + length > self.size.load(SeqCst) {
            return None;
        }
        let (key, index) = self.locate(offset);
        let slice = self.l2.pin(key)?;
        let in_cluster = offset % self.cluster_size();
        let entries = self.entries_per_slice() as usize;
        match map(self.codec, &slice, entries, index, in_cluster, length) {
            Ok(Run { length: found, source: Source::Host(host) }) if found == length => Some(host),
            _ => None,
        }
    }

    async fn read_runs(&self, queue: &Queue, offset: u64, into: &Segments) -> Done {
        let mut done = 0;
        // Asked once: it may become longer at any moment.
        let size = self.size.load(SeqCst);
        // The last cluster is read whole blocks at a time and cut off at the disk's size afterwards.
        let mapped = size.next_multiple_of(self.cluster_size());
        let inside = into.len().min(mapped.saturating_sub(offset) as usize);
        let mut looked_up: Done = Ok(());
        let mut reads: SmallVec<[Completion; 4]> = SmallVec::new();
        let mut others: Vec<LocalBoxFuture<'_, Done>> = Vec::new();
        while done < inside {
            let position = offset + done as u64;
            let run = match self.run_at(queue, position, (inside - done) as u64).await {
                Ok(run) => run,
                Err(error) => {
                    looked_up = Err(error);
                    break;
                }
            };
            let length = run.length as usize;
            let part = into.slice(done..done + length);
            match run.source {
                Source::Host(host) => reads.push(self.file.read(queue, host, part)),
                Source::Zero(_) => part.fill(0),
                Source::Unallocated => match &self.backing {
                    None => part.fill(0),
                    Some(backing) => others.push(backing.read(queue, position, part)),
                },
                Source::Compressed(cluster) => others.push(Box::pin(async move {
                    let in_cluster = (position % self.cluster_size()) as usize;
                    self.read_compressed(queue, cluster, in_cluster, &part).await
                })),
            }
            done += length;
        }
        // R4: all are awaited, whatever became of the others; a request leaves when its last I/O ends.
        for other in join_all(others).await {
            looked_up = looked_up.and(other);
        }
        for read in reads {
            looked_up = looked_up.and(read.await.map(|_| ()));
        }
        looked_up?;
        let inside = into.len().min(size.saturating_sub(offset) as usize);
        into.slice(inside..into.len()).fill(0);
        Ok(())
    }
}
