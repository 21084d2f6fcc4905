//! The files of a simulated world by name, and what a power cut makes of them.
//!
//! Folders are part of a name and nothing more; that a name itself may be lost until its folder has
//! been synced is not simulated yet.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use futures_util::future::LocalBoxFuture;
use stillpoint_io::{Access, Error, Files, Kind, Queue, Result, Storage, path_beside};

use crate::chance::Chance;
use crate::coverage::HostKind;
use crate::file::{Inode, Pending, Shared, SimFile};
use crate::plan::Plan;

/// A simulated disk's files; cloning it gives another handle on the same world.
#[derive(Clone)]
pub struct World {
    shared: Arc<Shared>,
    names: Arc<Mutex<BTreeMap<String, Arc<Inode>>>>,
}

impl World {
    /// A world without files.
    pub fn new(plan: Plan) -> World {
        World { shared: Arc::new(Shared::new(plan)), names: Arc::default() }
    }

    /// Adds a file that durably holds `bytes`; it replaces one of the same name.
    pub fn add(&self, name: &str, bytes: &[u8]) {
        let mut names = self.names.lock().unwrap();
        let number = names.len() as u64 + 1;
        names.insert(name.to_owned(), Arc::new(Inode::new(number, self.shared.clone(), bytes)));
    }

    /// Its files, for whoever opens them.
    pub fn files(&self) -> Arc<dyn Files> {
        Arc::new(self.clone())
    }

    /// What kind of disk it is from now on. What is open keeps the facts that it was opened with.
    pub fn set_plan(&self, plan: Plan) {
        *self.shared.plan.lock().unwrap() = plan;
    }

    /// What kind of disk it is now.
    pub fn plan(&self) -> Plan {
        self.shared.plan.lock().unwrap().clone()
    }

    /// Whether anything may fail on it.
    pub fn has_faults(&self) -> bool {
        self.shared.plan.lock().unwrap().has_faults()
    }

    /// How many flushes have failed.
    pub fn failed_flushes(&self) -> u64 {
        self.shared.failed_flushes.load(Relaxed)
    }

    /// Whether a failed flush has made old bytes show again somewhere.
    pub fn has_reverted(&self) -> bool {
        self.shared.reverted.load(Relaxed)
    }

    /// How many of its operations of each kind are under way.
    pub(crate) fn under_way(&self) -> [u64; HostKind::COUNT] {
        self.shared.under_way.each_ref().map(|count| count.load(Relaxed))
    }

    /// How many file-system blocks of 4 KiB its files have.
    pub fn used_blocks(&self) -> u64 {
        self.shared.used_blocks.load(Relaxed)
    }

    /// The number of the last thing that happened on it.
    pub(crate) fn stamp(&self) -> u64 {
        self.shared.stamp.load(Relaxed)
    }

    /// All bytes of a file as a read would see them now, past every fault.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        self.read(name, 0, self.length(name))
    }

    /// A file's length in bytes.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn length(&self, name: &str) -> u64 {
        self.names.lock().unwrap()[name].end()
    }

    /// Bytes of a file as a read would see them now, past every fault; zeros beyond its end.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn read(&self, name: &str, offset: u64, length: u64) -> Vec<u8> {
        let inode = self.names.lock().unwrap()[name].clone();
        let mut bytes = vec![0; length as usize];
        inode.read(offset, &mut bytes);
        bytes
    }

    /// The world after a power cut and a restart. This one is not changed: another cut of it may
    /// end otherwise.
    pub fn power_cut(&self, chance: &mut Chance) -> World {
        let plan = self.shared.plan.lock().unwrap().clone();
        let after = World::new(plan);
        for (name, inode) in self.names.lock().unwrap().iter() {
            let inode = Arc::new(inode.power_cut(after.shared.clone(), chance));
            after.names.lock().unwrap().insert(name.clone(), inode);
        }
        after
    }

    /// See [`Inode::pending`].
    pub(crate) fn pending(&self, name: &str) -> (u64, Vec<(Pending, [u64; 2])>) {
        self.names.lock().unwrap()[name].pending()
    }

    /// The world after a power cut that keeps just what `keeps` accepts of the file `name`: a part,
    /// and which half of a block. Of other files nothing is pending.
    pub(crate) fn power_cut_keeping(
        &self,
        name: &str,
        keeps: &dyn Fn(Pending, usize) -> bool,
    ) -> World {
        let after = World::new(self.shared.plan.lock().unwrap().clone());
        for (other, inode) in self.names.lock().unwrap().iter() {
            let all = |_, _| other != name;
            let keeps = if other == name { keeps } else { &all };
            let inode = Arc::new(inode.power_cut_keeping(after.shared.clone(), keeps));
            after.names.lock().unwrap().insert(other.clone(), inode);
        }
        after
    }

    async fn reach(&self, queue: &Queue) {
        let plan = self.shared.plan.lock().unwrap().clone();
        let latency = crate::executor::Driver::of(queue).chance(|chance| plan.latency(chance));
        queue.sleep(latency).await;
    }
}

impl Files for World {
    fn open<'a>(
        &'a self,
        queue: &'a Queue,
        name: &'a str,
        beside: Option<&'a str>,
        access: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        Box::pin(async move {
            self.reach(queue).await;
            let name = beside.map_or_else(|| name.to_owned(), |beside| path_beside(name, beside));
            let inode = self.names.lock().unwrap().get(&name).cloned().ok_or_else(|| {
                Error::new(Kind::NotFound, "open", "there is no such file").file(&name)
            })?;
            let file = SimFile::open(&name, inode, access).ok_or_else(|| {
                Error::new(Kind::Busy, "open", "somebody has it open").file(&name)
            })?;
            Ok(Arc::new(file) as Arc<dyn Storage>)
        })
    }

    fn create<'a>(
        &'a self,
        queue: &'a Queue,
        name: &'a str,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        Box::pin(async move {
            self.reach(queue).await;
            if !self.names.lock().unwrap().contains_key(name) {
                self.add(name, &[]);
            }
            let inode = self.names.lock().unwrap()[name].clone();
            let file = SimFile::open(name, inode.clone(), Access::Write).ok_or_else(|| {
                Error::new(Kind::Busy, "create", "somebody has it open").file(name)
            })?;
            inode.empty();
            Ok(Arc::new(file) as Arc<dyn Storage>)
        })
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.names.lock().unwrap().keys()).finish()
    }
}
