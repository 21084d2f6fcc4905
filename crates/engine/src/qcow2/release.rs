//! What mapping changes free, on its way back to the allocator and the host (R4).
//!
//! ```text
//!  freed ─▶ pending ─ commit durable ─▶ everybody of the old mapping left ─▶ refcount -1
//!                                                                  │ 0
//!                                               punched, in batches ▼
//!                                                              the allocator
//! ```
//!
//! Punches wait in the kernel for all direct I/O on the file, and all later I/O waits for them (R9):
//! neighbours are merged, and after each punch the release rests as long as the punch took, so that
//! no more than half of the time goes to them.

use std::ops::Range;
use std::time::Duration;

use async_lock::Mutex as AsyncMutex;
use event_listener::Event;
use stillpoint_io::{Error, Manage, Queue, Result};

use super::allocate::Growing;
use super::{Done, Qcow2};
use crate::mutant::{Mutant, broken};
use crate::options::DiscardPolicy;
use crate::sync::{Arc, Mutex, lock};

/// How long what is freed waits for a guest's flush before a commit is made for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Host clusters that a mapping no longer uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    first: u64,
    count: u64,
}

impl Freed {
    /// `count` clusters from index `first` on.
    pub(crate) fn clusters(first: u64, count: u64) -> Freed {
        Freed { first, count }
    }
}

/// What was freed and is not yet back.
#[derive(Default)]
pub(crate) struct Releases {
    state: Mutex<State>,
    /// One release at a time.
    releasing: AsyncMutex<()>,
    ended: Event,
}

#[derive(Default)]
struct State {
    pending: Vec<Freed>,
    commit_asked: bool,
    running: usize,
}

/// A release that has begun and not ended.
pub(crate) struct Running(Arc<Releases>);

impl Drop for Running {
    fn drop(&mut self) {
        lock(&self.0.state).running -= 1;
        self.0.ended.notify(usize::MAX);
    }
}

/// A cluster that stays allocated for nothing; `check -r leaks` finds it.
fn leaked(error: &Error, cluster: u64) {
    tracing::warn!(%error, cluster, "a freed cluster could not be given back");
}

impl Releases {
    /// Queues clusters until the next commit, which must cover the change that freed them.
    pub(crate) fn push(&self, freed: Freed) {
        let pending = &mut lock(&self.state).pending;
        match pending.last_mut() {
            Some(last) if last.first + last.count == freed.first => last.count += freed.count,
            _ => pending.push(freed),
        }
    }

    /// Takes what is pending. ORDER: before the mappings are copied for a commit, so that the commit
    /// holds every change that freed something of this.
    pub(super) fn take(&self) -> Vec<Freed> {
        std::mem::take(&mut lock(&self.state).pending)
    }

    /// Puts back what a commit could not cover.
    pub(super) fn put_back(&self, freed: Vec<Freed>) {
        lock(&self.state).pending.extend(freed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.state).pending.is_empty()
    }

    /// Counts a release as under way until what this returns is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> Running {
        lock(&self.state).running += 1;
        Running(self.clone())
    }

    /// Waits until no release is under way.
    pub(crate) async fn idle(&self) {
        loop {
            let ended = self.ended.listen();
            if lock(&self.state).running == 0 {
                return;
            }
            ended.await;
        }
    }
}

impl Qcow2 {
    /// Sees to it that what was freed comes back even if the guest never flushes.
    pub(crate) fn release_eventually(&self) {
        let releases = &self.writer().releases;
        {
            let mut state = lock(&releases.state);
            if state.commit_asked || state.pending.is_empty() {
                return;
            }
            state.commit_asked = true;
        }
        self.in_background(|image, queue| async move {
            queue.sleep(PATIENCE).await;
            lock(&image.writer().releases.state).commit_asked = false;
            if let Err(error) = image.commit(&queue).await {
                tracing::warn!(%error, "a commit for freed clusters failed");
            }
        });
    }

    /// Gives back what a durable commit has freed.
    pub(super) async fn release(&self, queue: &Queue, freed: Vec<Freed>) {
        let writer = self.writer();
        let _one_at_a_time = writer.releases.releasing.lock().await;
        // R4: whoever resolved its range by the old mapping has left.
        if !broken(Mutant::R4Quiesce) {
            writer.tracker.quiesce().await;
        }
        let mut freed = freed;
        freed.sort_unstable_by_key(|freed| freed.first);
        let clusters = freed.iter().flat_map(|freed| freed.first..freed.first + freed.count);
        let mut unused: Option<Range<u64>> = None;
        for cluster in clusters {
            match self.drop_shared(queue, cluster).await {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => {
                    leaked(&error, cluster);
                    continue;
                }
            }
            match &mut unused {
                Some(range) if range.end == cluster => range.end += 1,
                _ => {
                    if let Some(range) = unused.replace(cluster..cluster + 1) {
                        self.give_to_host(queue, range).await;
                    }
                }
            }
        }
        if let Some(range) = unused {
            self.give_to_host(queue, range).await;
        }
    }

    /// Takes a reference from a cluster that has others; `false` if it has no other.
    async fn drop_shared(&self, queue: &Queue, cluster: u64) -> Result<bool> {
        let refcounts = &self.writer().refcounts;
        let slice = self.refcount_slice(queue, cluster).await?;
        let slice = slice.pin();
        match refcounts.count_in(&slice, cluster) {
            0 => {
                let offset = cluster << self.geometry().cluster_bits;
                let why = "a cluster in use has refcount 0";
                Err(self.corrupt("give a cluster back", offset, why))
            }
            1 => Ok(false),
            _ => {
                refcounts.drop_one(&slice, cluster);
                Ok(true)
            }
        }
    }

    /// Punches clusters that nobody refers to, and gives them to the allocator. Their refcounts fall
    /// after the punch: until then nobody can take them for free.
    async fn give_to_host(&self, queue: &Queue, clusters: Range<u64>) {
        let bits = self.geometry().cluster_bits;
        if broken(Mutant::R4Punch) {
            self.recycle(queue, clusters.clone(), false).await;
        }
        let mut zero = false;
        if self.policy.discard == DiscardPolicy::Unmap && self.file.facts().can_punch {
            let length = (clusters.end - clusters.start) << bits;
            let punch = Manage::Punch { offset: clusters.start << bits, length };
            let begun = queue.now();
            match self.file.manage(queue, punch).await {
                // In plain order the barrier that precedes any mapping of these clusters also
                // makes this punch durable (J21).
                Ok(_) => zero = true,
                Err(error) => tracing::warn!(%error, "freed space stays allocated on the host"),
            }
            queue.sleep(queue.now() - begun).await;
        }
        if broken(Mutant::R4Punch) {
            return;
        }
        // R4: reused only now.
        self.recycle(queue, clusters, zero).await;
    }

    async fn recycle(&self, queue: &Queue, clusters: Range<u64>, zero: bool) {
        let writer = self.writer();
        for cluster in clusters {
            match self.refcount_slice(queue, cluster).await {
                Ok(slice) => writer.allocator.recycle(cluster, zero, || {
                    let unused = writer.refcounts.drop_one(&slice.pin(), cluster) == Some(0);
                    if let Some(tables) = lock(&writer.table_clusters).as_mut().filter(|_| unused) {
                        tables.remove(&cluster);
                    }
                    unused
                }),
                Err(error) => leaked(&error, cluster),
            }
        }
    }

    /// Commits and releases until nothing is left to release.
    pub(crate) async fn release_all(&self, queue: &Queue) -> Done {
        loop {
            self.commit(queue).await?;
            self.writer().releases.idle().await;
            if self.writer().releases.is_empty() && self.is_clean() {
                return Ok(());
            }
        }
    }

    /// Leaves the image clean and as short as it can be.
    pub(crate) async fn close(&self, queue: &Queue) -> Done {
        // Growth ahead of need ends first: what it has begun is in the cache when this is granted.
        let allocator = &self.writer().allocator;
        if !broken(Mutant::F4Growth) {
            *allocator.growing.lock().await = Growing::Closed;
        }
        self.release_all(queue).await?;
        let end = allocator.trim() << self.geometry().cluster_bits;
        if end < self.file.end() && !self.file.facts().fixed_size {
            self.file.manage(queue, Manage::Shrink { end }).await?;
            self.barrier(queue).await?;
        }
        Ok(())
    }
}
