//! Writing: in place where a cluster is ours, into a new host cluster where it is not.
//!
//! ```text
//!  write ─▶ all in place, in one run? ─ yes ─▶ file
//!               │ no
//!               ▼
//!           plan (slice's lock) ─▶ reserve clusters / wait for a closed allocation ─▶ plan again
//!               │ a batch
//!               ▼
//!           file writes ─▶ finish shares (slice's lock: publish) ─▶ fill what fell to us ─▶ wait for others
//! ```
//!
//! The order at the end is what keeps requests that share two allocations from waiting for each
//! other: everybody finishes all its shares and does all its fills before it waits for anyone.
//!
//! The caller has aligned the request to the file's blocks and holds its stripes.

use std::ops::Range;

use futures_util::future::join_all;
use smallvec::SmallVec;
use stillpoint_io::{Durability, Error, Kind, Queue, Result, Segments};

use super::allocate::Reservation;
use super::inflight::{Ended, Inflights, Next, Publication, Share};
use super::mapping::Cluster;
use super::release::Freed;
use super::{Done, Qcow2, refused};
use crate::cache::{Editing, OwnedPin, Pin};
use crate::mutant::{Mutant, broken};
use crate::sync::Arc;
use crate::sync::atomic::Ordering::SeqCst;

/// A part of a request that can be written now.
#[derive(Default)]
struct Batch {
    /// Host offset, and the bytes of the request that go there.
    writes: SmallVec<[(u64, Range<usize>); 2]>,
    shares: SmallVec<[Share; 2]>,
    /// Bytes of the request that it covers.
    length: usize,
}

/// What planning came to.
enum Plan {
    Write(Batch),
    /// This many host clusters are needed first.
    Reserve(u64),
    /// An allocation is closed: wait for its end.
    Wait(Arc<Ended>),
    /// Whether the backing file reads as zeros there has to be found out first.
    AskBacking,
}

impl Qcow2 {
    /// Writes `data` at `offset`; both are aligned, and within the disk.
    pub(crate) async fn write(
        &self,
        queue: &Queue,
        offset: u64,
        data: &Segments,
        durability: Durability,
    ) -> Done {
        let in_place = self.one_run_in_place(offset, data.len() as u64)?;
        if let Some(host) = in_place {
            // While every mapping is durable, an overwrite is made durable by itself. ORDER: asked
            // after the mapping was seen, which may have been published just now.
            let by_itself =
                durability == Durability::Durable && (self.is_clean() || broken(Mutant::J31Fua));
            let own = if by_itself { Durability::Durable } else { Durability::Volatile };
            self.file.write(queue, host, data.clone(), own).await?;
            if by_itself {
                return Ok(());
            }
            self.writer().writes.fetch_add(1, SeqCst);
        } else {
            // Boxed, so that the future of the common write stays small.
            Box::pin(self.write_slices(queue, offset, data)).await?;
        }
        match durability {
            Durability::Volatile => Ok(()),
            Durability::Durable => self.commit(queue).await,
        }
    }

    /// Where the whole range lies, if it is in place, in one run, in a slice that is in the cache.
    fn one_run_in_place(&self, offset: u64, length: u64) -> Result<Option<u64>> {
        let covers = self.slice_covers();
        if offset % covers + length > covers {
            return Ok(None);
        }
        let (key, _) = self.locate(offset);
        match self.l2.pin(key) {
            Some(slice) if self.owns_table(key)? => self.in_place(&slice, offset, length),
            _ => Ok(None),
        }
    }

    async fn write_slices(&self, queue: &Queue, offset: u64, data: &Segments) -> Done {
        let covers = self.slice_covers();
        let end = offset + data.len() as u64;
        let parts = (offset / covers..end.div_ceil(covers)).map(|slice| {
            let from = offset.max(slice * covers);
            let to = end.min((slice + 1) * covers);
            let part = data.slice((from - offset) as usize..(to - offset) as usize);
            async move { self.write_in_slice(queue, from, &part).await }
        });
        join_all(parts).await.into_iter().collect()
    }

    /// Where the whole range lies, if all of it is in place and in one run. Takes no lock.
    pub(crate) fn in_place(
        &self,
        slice: &Pin<'_, Inflights>,
        offset: u64,
        length: u64,
    ) -> Result<Option<u64>> {
        let (_, mut index) = self.locate(offset);
        let mut from = self.geometry().in_cluster(stillpoint_format::addr::GuestOffset(offset));
        let mut found = None;
        let mut covered = 0;
        while covered < length {
            let to = self.cluster_size().min(from + length - covered);
            let cluster = self.entry(slice, index)?;
            let units = self.codec.units(from, to);
            let Some(host) = cluster.host else { return Ok(None) };
            let mine = owned(&cluster) && cluster.allocated & units == units;
            if !mine || *found.get_or_insert(host + from) + covered != host + from {
                return Ok(None);
            }
            covered += to - from;
            (from, index) = (0, index + 1);
        }
        Ok(found)
    }

    pub(crate) fn entry(&self, slice: &Pin<'_, Inflights>, index: usize) -> Result<Cluster> {
        self.codec.cluster(slice, index).map_err(|error| self.bad_entry(&error, index))
    }

    pub(crate) fn entry_locked(
        &self,
        slice: &Editing<'_, Inflights>,
        index: usize,
    ) -> Result<Cluster> {
        self.codec.cluster_locked(slice, index).map_err(|error| self.bad_entry(&error, index))
    }

    fn bad_entry(&self, error: &stillpoint_format::Error, index: usize) -> Error {
        let within = index as u64 * self.geometry().l2_entry_size();
        refused(error, "read an L2 entry", self.file.name(), within)
            .remedy("run `stillpoint check` on the image")
    }

    async fn write_in_slice(&self, queue: &Queue, offset: u64, data: &Segments) -> Done {
        let (key, _) = self.locate(offset);
        let mut reserved: Option<Reservation> = None;
        let mut backing_zero = self.backing.is_none().then_some(true);
        let mut done = 0;
        let result = loop {
            if done == data.len() {
                break Ok(());
            }
            let position = offset + done as u64;
            let remaining = data.len() - done;
            let slice = match self.slice_for_writing(queue, key).await {
                Ok(slice) => slice,
                Err(error) => break Err(error),
            };
            let planned = self.plan(&slice, position, remaining, &mut reserved, backing_zero);
            // J37: pinned from before the first write until the publication.
            let pin = self.l2.pin_owned(key).expect("a pinned slice is in the cache");
            drop(slice);
            let step = match planned {
                Err(error) => Err(error),
                Ok(Plan::Write(batch)) => {
                    let part = data.slice(done..done + batch.length);
                    done += batch.length;
                    self.run(queue, position, pin, batch, &part).await
                }
                Ok(Plan::Reserve(count)) => {
                    drop(pin);
                    match self.reserve(queue, count).await {
                        Ok(clusters) => {
                            reserved = Some(clusters);
                            Ok(())
                        }
                        Err(error) => Err(error),
                    }
                }
                Ok(Plan::Wait(ended)) => {
                    drop(pin);
                    // Its failure is its writers' affair; ours begins when it is out of the way.
                    let _theirs = ended.wait().await;
                    Ok(())
                }
                Ok(Plan::AskBacking) => {
                    drop(pin);
                    match self.backing_reads_zero(queue, position, remaining as u64).await {
                        Ok(zero) => {
                            backing_zero = Some(zero);
                            Ok(())
                        }
                        Err(error) => Err(error),
                    }
                }
            };
            if step.is_err() {
                break step;
            }
        };
        if let Some(unused) = reserved {
            let zero = unused.zero;
            self.writer().allocator.give_back(unused, zero);
        }
        result
    }

    /// Plans the write of `length` bytes at `offset` as far as it can go at once.
    fn plan(
        &self,
        slice: &Pin<'_, Inflights>,
        offset: u64,
        length: usize,
        reserved: &mut Option<Reservation>,
        backing_zero: Option<bool>,
    ) -> Result<Plan> {
        let cluster_size = self.cluster_size();
        let mut slice = slice.edit();
        let mut batch = Batch::default();
        while batch.length < length {
            let position = offset + batch.length as u64;
            let (_, index) = self.locate(position);
            let from = position % cluster_size;
            let to = cluster_size.min(from + (length - batch.length) as u64);
            let cluster = match self.entry_locked(&slice, index) {
                Ok(cluster) => cluster,
                // What is planned has joined already: it goes first, and the error comes next.
                Err(_) if batch.length > 0 => return Ok(Plan::Write(batch)),
                Err(error) => return Err(error),
            };
            let touched = self.codec.units(from, to);
            let own_host = cluster.host.filter(|_| owned(&cluster));
            if let Some(host) = own_host
                && cluster.allocated & touched == touched
            {
                batch.push(host + from, to - from);
                continue;
            }
            if backing_zero.is_none() && cluster.compressed.is_none() {
                let said = cluster.zero | cluster.allocated;
                if said & touched != touched {
                    return Ok(batch.or(Plan::AskBacking));
                }
            }
            if slice.extra().find(index).is_none() {
                let (host, cluster_reserved) = match own_host {
                    Some(host) => (host, None),
                    None => {
                        let Some(one) = reserved.as_mut().and_then(Reservation::take_one) else {
                            if batch.length > 0 {
                                return Ok(Plan::Write(batch));
                            }
                            let count = self.clusters_to_allocate(&slice, position, length)?;
                            return Ok(Plan::Reserve(count));
                        };
                        (one.first << self.geometry().cluster_bits, Some(one))
                    }
                };
                let all_units = self.codec.all_units();
                slice.extra().begin(index, &cluster, all_units, cluster_reserved, host);
            }
            let silent = !(cluster.zero | cluster.allocated);
            let reads_zero = match (cluster.compressed, backing_zero) {
                (Some(_), _) => 0,
                (None, Some(true)) => cluster.zero | silent,
                (None, _) => cluster.zero,
            };
            let units = if own_host.is_some() { touched & !cluster.allocated } else { touched };
            let inflight = slice.extra().find(index).expect("just found or begun");
            let host = inflight.host;
            let write = batch.write_index(host + from);
            match inflight.join(from..to, units, reads_zero, write) {
                Ok(share) => {
                    batch.shares.push(share);
                    batch.push(host + from, to - from);
                }
                Err(ended) => return Ok(batch.or(Plan::Wait(ended))),
            }
        }
        Ok(Plan::Write(batch))
    }

    /// How many new host clusters a write needs from `offset` on.
    fn clusters_to_allocate(
        &self,
        slice: &Editing<'_, Inflights>,
        offset: u64,
        length: usize,
    ) -> Result<u64> {
        let bits = self.geometry().cluster_bits;
        let (_, first) = self.locate(offset);
        let count = ((offset + length as u64 - 1) >> bits) - (offset >> bits) + 1;
        let mut needed = 0;
        for index in first..first + count as usize {
            let cluster = self.entry_locked(slice, index)?;
            needed += u64::from(!(owned(&cluster) && cluster.host.is_some()));
        }
        Ok(needed.max(1))
    }

    /// Writes a batch, publishes what it completes, and waits for what others complete for it.
    async fn run(
        &self,
        queue: &Queue,
        offset: u64,
        pin: OwnedPin<Inflights>,
        batch: Batch,
        data: &Segments,
    ) -> Done {
        let mut ending = Ending { image: self, pin, shares: batch.shares };
        let writes: SmallVec<[_; 2]> = batch
            .writes
            .into_iter()
            .map(|(host, part)| {
                self.file.write(queue, host, data.slice(part), Durability::Volatile)
            })
            .collect();
        // Every write is awaited, whatever became of the others: none may land in a cluster that
        // has been given back (R4).
        let mut results: SmallVec<[Done; 2]> = SmallVec::new();
        for write in writes {
            results.push(write.await.map(|_| ()));
        }
        self.writer().writes.fetch_add(1, SeqCst);
        let (fills, waits) = ending.finish(&results);
        let mut result: Done = results.into_iter().collect();
        let cluster_bits = self.geometry().cluster_bits;
        let (_, first) = self.locate(offset);
        // All are begun before the first waits: whatever becomes of this request, each has its end.
        let fills: SmallVec<[_; 2]> = fills
            .into_iter()
            .map(|index| Filling { image: self, pin: &ending.pin, index, over: false })
            .collect();
        for filling in fills {
            let index = (filling.index - first) as u64;
            let guest = ((offset >> cluster_bits) + index) << cluster_bits;
            result = result.and(self.fill(queue, filling, guest).await);
        }
        for wait in waits {
            result = result.and(wait.wait().await);
        }
        if self.l2.is_pressed() {
            self.commit_soon();
        }
        result
    }

    /// Copies what nobody wrote into a closed allocation, and publishes it.
    async fn fill(&self, queue: &Queue, mut filling: Filling<'_>, guest: u64) -> Done {
        let (pin, index) = (filling.pin, filling.index);
        let (host, gaps) = pin.pin().edit().extra().gaps(index, self.geometry().subcluster_size());
        let gaps = if broken(Mutant::R5Copy) { Vec::new() } else { gaps };
        let copies = gaps.into_iter().map(|gap| async move {
            let bytes = Segments::alloc((gap.end - gap.start) as usize);
            // The old mapping is still the published one: a plain read is the old content.
            self.read(queue, guest + gap.start, &bytes).await?;
            self.file.write(queue, host + gap.start, bytes, Durability::Volatile).await?;
            Ok(())
        });
        let outcome: Done = join_all(copies).await.into_iter().collect();
        self.writer().writes.fetch_add(1, SeqCst);
        filling.end(outcome.clone());
        outcome
    }

    /// R5: every byte of these units is in place; the slice's lock makes it one step.
    fn publish(
        &self,
        slice: &mut Editing<'_, Inflights>,
        index: usize,
        host: u64,
        publication: Publication,
    ) {
        let old = self.entry_locked(slice, index).expect("it was decoded when this began");
        let moved = old.host != Some(host);
        let cluster = Cluster {
            host: Some(host),
            copied: true,
            compressed: None,
            allocated: publication.units | if moved { 0 } else { old.allocated },
            zero: old.zero & !publication.units,
        };
        self.codec.store(slice, index, cluster);
        let writer = self.writer();
        if let Some(reserved) = publication.reserved {
            // J38: the refcount changes here and not before.
            writer.refcounts.publish(&reserved);
        }
        if moved {
            self.free_mapping(&old);
        }
    }

    /// Queues what a replaced mapping held for release after the next commit (R4).
    pub(crate) fn free_mapping(&self, old: &Cluster) {
        let bits = self.geometry().cluster_bits;
        let releases = &self.writer().releases;
        if let Some(compressed) = old.compressed {
            let clusters = compressed.host_clusters(self.geometry());
            for cluster in clusters.filter(|cluster| !self.is_table(cluster << bits)) {
                releases.push(Freed::clusters(cluster, 1));
            }
        } else if let Some(host) = old.host
            && !self.is_table(host)
        {
            releases.push(Freed::clusters(host >> bits, 1));
        }
    }
}

/// Whether a cluster's host cluster may be written in place.
fn owned(cluster: &Cluster) -> bool {
    cluster.copied || broken(Mutant::F1Shared)
}

impl Batch {
    /// The index of the host write that bytes for `host` go into.
    fn write_index(&self, host: u64) -> usize {
        match self.writes.last() {
            Some((start, part)) if start + part.len() as u64 == host => self.writes.len() - 1,
            _ => self.writes.len(),
        }
    }

    fn push(&mut self, host: u64, length: u64) {
        let end = self.length + length as usize;
        let index = self.write_index(host);
        match self.writes.get_mut(index) {
            Some((_, part)) => part.end = end,
            None => self.writes.push((host, self.length..end)),
        }
        self.length = end;
    }

    /// What is planned so far, or `otherwise` if that is nothing.
    fn or(self, otherwise: Plan) -> Plan {
        if self.length > 0 { Plan::Write(self) } else { otherwise }
    }
}

/// The shares of a batch that is under way. If its request goes away in the middle, they end as
/// failed, and what they had reserved stays out of use until the image is reopened: a write may
/// still be on its way there.
struct Ending<'a> {
    image: &'a Qcow2,
    pin: OwnedPin<Inflights>,
    shares: SmallVec<[Share; 2]>,
}

impl Ending<'_> {
    /// Finishes every share; returns the entries to fill and the fills to wait for.
    fn finish(&mut self, results: &[Done]) -> (SmallVec<[usize; 2]>, SmallVec<[Arc<Ended>; 2]>) {
        let (mut fills, mut waits) = (SmallVec::new(), SmallVec::new());
        let shares = std::mem::take(&mut self.shares);
        if shares.is_empty() {
            return (fills, waits);
        }
        let slice = self.pin.pin();
        let mut slice = slice.edit();
        for share in shares {
            let succeeded = results[share.write].is_ok();
            match self.finish_one(&mut slice, &share, succeeded, true) {
                Next::Done => {}
                Next::Fill => fills.push(share.index),
                Next::Wait(ended) => waits.push(ended),
            }
        }
        (fills, waits)
    }

    fn finish_one(
        &self,
        slice: &mut Editing<'_, Inflights>,
        share: &Share,
        succeeded: bool,
        landed: bool,
    ) -> Next {
        let image = self.image;
        let inflights = slice.extra();
        let host = inflights.find(share.index).expect("its writers keep it in the list").host;
        let (next, publication, back) = inflights.finish(share, succeeded);
        if let Some(publication) = publication {
            image.publish(slice, share.index, host, publication);
        }
        if let (Some(reserved), true) = (back, landed) {
            // Aborted: it was written to, so it is not zero any more (R7).
            image.writer().allocator.give_back(reserved, broken(Mutant::R7Aborted));
        }
        next
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let shares = std::mem::take(&mut self.shares);
        if shares.is_empty() {
            return;
        }
        let slice = self.pin.pin();
        let mut to_end = Vec::new();
        {
            let mut slice = slice.edit();
            for share in shares {
                if let Next::Fill = self.finish_one(&mut slice, &share, false, false) {
                    to_end.push(share.index);
                }
            }
        }
        for index in to_end {
            drop(Filling { image: self.image, pin: &self.pin, index, over: false });
        }
    }
}

/// A fill under way; if its request goes away in the middle, those who wait are told.
struct Filling<'a> {
    image: &'a Qcow2,
    pin: &'a OwnedPin<Inflights>,
    index: usize,
    over: bool,
}

impl Filling<'_> {
    fn end(&mut self, outcome: Done) {
        self.over = true;
        let slice = self.pin.pin();
        let mut slice = slice.edit();
        let host = slice.extra().find(self.index).expect("it is closed").host;
        let (publication, back, filled) = slice.extra().filled(self.index, outcome);
        if let Some(publication) = publication {
            self.image.publish(&mut slice, self.index, host, publication);
        }
        if let Some(reserved) = back {
            self.image.writer().allocator.give_back(reserved, false);
        }
        drop(slice);
        filled.tell();
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        if !self.over {
            let why = "the request that copied for it was dropped";
            self.end(Err(Error::new(Kind::Cancelled, "copy on write", why)));
        }
    }
}
