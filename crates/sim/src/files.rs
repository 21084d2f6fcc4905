//! The files of a simulated world by name, and what a power cut makes of them.
//!
//! There is one folder. What happens to its names is volatile until it is synced: a power cut keeps
//! some first part of the changes since then, as a journaling file system does.

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
    folder: Arc<Mutex<Folder>>,
}

type Names = BTreeMap<String, Arc<Inode>>;

/// The files by name.
#[derive(Default)]
struct Folder {
    names: Names,
    durable: Names,
    /// What has changed since the folder was synced, in order.
    changes: Vec<Change>,
}

#[derive(Clone)]
enum Change {
    Add(String, Arc<Inode>),
    Rename(String, String),
}

impl Change {
    fn apply(&self, names: &mut Names) {
        match self {
            Change::Add(name, inode) => _ = names.insert(name.clone(), inode.clone()),
            Change::Rename(from, to) => {
                let inode = names.remove(from).expect("what is renamed was there before");
                names.insert(to.clone(), inode);
            }
        }
    }
}

impl Folder {
    fn change(&mut self, change: Change) {
        change.apply(&mut self.names);
        self.changes.push(change);
    }

    fn sync(&mut self) {
        self.changes.drain(..).for_each(|change| change.apply(&mut self.durable));
    }
}

impl World {
    /// A world without files.
    pub fn new(plan: Plan) -> World {
        World { shared: Arc::new(Shared::new(plan)), folder: Arc::default() }
    }

    /// Adds a file that durably holds `bytes`; it replaces one of the same name.
    pub fn add(&self, name: &str, bytes: &[u8]) {
        let inode = self.new_inode(bytes);
        let mut folder = self.folder.lock().unwrap();
        folder.change(Change::Add(name.to_owned(), inode));
        folder.sync();
    }

    fn new_inode(&self, bytes: &[u8]) -> Arc<Inode> {
        let number = self.folder.lock().unwrap().names.len() as u64 + 1;
        Arc::new(Inode::new(number, self.shared.clone(), bytes))
    }

    fn inode(&self, name: &str) -> Option<Arc<Inode>> {
        self.folder.lock().unwrap().names.get(name).cloned()
    }

    /// Whether there is a file of this name.
    pub fn exists(&self, name: &str) -> bool {
        self.inode(name).is_some()
    }

    fn existing(&self, name: &str) -> Arc<Inode> {
        self.inode(name).unwrap_or_else(|| panic!("there is no file {name}"))
    }

    /// Gives a file another name, replacing one that had it; see [`World::sync_folder`].
    ///
    /// # Panics
    /// If there is no such file.
    pub fn rename(&self, from: &str, to: &str) {
        self.existing(from);
        self.folder.lock().unwrap().change(Change::Rename(from.to_owned(), to.to_owned()));
    }

    /// Makes durable what has happened to the names.
    pub fn sync_folder(&self) {
        self.folder.lock().unwrap().sync();
    }

    /// Somebody makes a reflink clone of a file: overwriting any block of it takes space from now on.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn share(&self, name: &str) {
        self.existing(name).share();
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
        self.existing(name).end()
    }

    /// Bytes of a file as a read would see them now, past every fault; zeros beyond its end.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn read(&self, name: &str, offset: u64, length: u64) -> Vec<u8> {
        let inode = self.existing(name);
        let mut bytes = vec![0; length as usize];
        inode.read(offset, &mut bytes);
        bytes
    }

    /// The world after a power cut and a restart. This one is not changed: another cut of it may
    /// end otherwise.
    pub fn power_cut(&self, chance: &mut Chance) -> World {
        let plan = self.shared.plan.lock().unwrap().clone();
        let after = World::new(plan);
        let folder = self.folder.lock().unwrap();
        let mut names = folder.durable.clone();
        let kept = chance.below(folder.changes.len() as u64 + 1) as usize;
        folder.changes[..kept].iter().for_each(|change| change.apply(&mut names));
        after.hold(names, |inode| inode.power_cut(after.shared.clone(), chance));
        after
    }

    /// Holds, durably, what became of each of `names`.
    fn hold(&self, names: Names, mut became: impl FnMut(&Inode) -> Inode) {
        let mut folder = self.folder.lock().unwrap();
        for (name, inode) in names {
            folder.change(Change::Add(name, Arc::new(became(&inode))));
        }
        folder.sync();
    }

    /// See [`Inode::pending`].
    pub(crate) fn pending(&self, name: &str) -> (u64, Vec<(Pending, [u64; 2])>) {
        self.existing(name).pending()
    }

    /// The world after a power cut that keeps just what `keeps` accepts: a part of the one file of which
    /// anything is pending, and which half of a block.
    pub(crate) fn power_cut_keeping(&self, keeps: &dyn Fn(Pending, usize) -> bool) -> World {
        let after = World::new(self.shared.plan.lock().unwrap().clone());
        let names = self.folder.lock().unwrap().names.clone();
        after.hold(names, |inode| inode.power_cut_keeping(after.shared.clone(), keeps));
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
            let inode = self.inode(&name).ok_or_else(|| {
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
            let inode = self.inode(name).unwrap_or_else(|| {
                let fresh = self.new_inode(&[]);
                let change = Change::Add(name.to_owned(), fresh.clone());
                self.folder.lock().unwrap().change(change);
                fresh
            });
            let file = SimFile::open(name, inode.clone(), Access::Write).ok_or_else(|| {
                Error::new(Kind::Busy, "create", "somebody has it open").file(name)
            })?;
            inode.empty();
            self.reach(queue).await;
            self.sync_folder();
            Ok(Arc::new(file) as Arc<dyn Storage>)
        })
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.folder.lock().unwrap().names.keys()).finish()
    }
}
