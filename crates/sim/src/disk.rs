//! The engine's disk as a subject: images of every kind, on simulated files.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use stillpoint_engine::{AllocPolicy, DiscardPolicy, Disk, ImageFormat, Options, Zeroing};
use stillpoint_io::{Background, Durability, Queue, Result, Segments};

use crate::chance::Chance;
use crate::files::World;
use crate::history::{History, Round, Subject};
use crate::image;
use crate::make::{Content, Made, Spec, make};
use crate::oracle::{self, Oracle};
use crate::plan::Plan;
use crate::workload::{Script, Shape, Target};

/// What the image is called.
pub const IMAGE: &str = "vm/disk";
pub(crate) const BACKING: &str = "base";
const BACKING_PATH: &str = "vm/base";

impl Target for Disk {
    fn size(&self) -> u64 {
        Disk::size(self)
    }

    async fn read(&self, queue: &Queue, offset: u64, into: Segments) -> Result<()> {
        Disk::read(self, queue, offset, into).await
    }

    async fn write(
        &self,
        queue: &Queue,
        offset: u64,
        from: Segments,
        durability: Durability,
    ) -> Result<()> {
        Disk::write(self, queue, offset, from, durability).await
    }

    async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        unmap: bool,
        durability: Durability,
    ) -> Result<()> {
        let zeroing = Zeroing { unmap, fast_only: false };
        Disk::write_zeroes(self, queue, offset, length, zeroing, durability).await
    }

    async fn discard(&self, queue: &Queue, offset: u64, length: u64) -> Result<()> {
        Disk::discard(self, queue, offset, length).await
    }

    async fn status(&self, queue: &Queue, offset: u64, length: u64) -> Result<(u64, bool)> {
        let status = Disk::status(self, queue, offset, length).await?;
        Ok((status.length, status.zero))
    }

    async fn resize(&self, queue: &Queue, size: u64) -> Result<()> {
        Disk::resize(self, queue, size, true).await
    }

    async fn flush(&self, queue: &Queue) -> Result<()> {
        Disk::flush(self, queue).await
    }
}

/// What lies beneath an image.
#[derive(Clone, Debug)]
pub enum Backing {
    /// A raw file of so many bytes.
    Raw(u64),
    /// A qcow2 image.
    Qcow2(Spec),
}

impl Backing {
    fn random(chance: &mut Chance, size: u64, most_clusters: u64) -> Backing {
        let size = chance.pick(&[size, size, size / 2 / 512 * 512, size + 65536]).max(512);
        if chance.one_in(2) {
            return Backing::Raw(size);
        }
        let extended_l2 = chance.one_in(3);
        let cluster_bits = chance.between(if extended_l2 { 14 } else { 9 }, 16) as u32;
        Backing::Qcow2(Spec {
            version: 3,
            cluster_bits: cluster_bits.max((size / most_clusters).max(1).ilog2()),
            extended_l2,
            refcount_order: 4,
            size,
            backing: None,
            lean: true,
            content: Some(Content { seed: chance.draw(), snapshot: false }),
        })
    }

    fn size(&self) -> u64 {
        match self {
            Backing::Raw(size) => *size,
            Backing::Qcow2(spec) => spec.size,
        }
    }

    fn format(&self) -> &'static str {
        match self {
            Backing::Raw(_) => "raw",
            Backing::Qcow2(_) => "qcow2",
        }
    }
}

/// An image and how it is opened.
#[derive(Clone, Debug)]
pub struct DiskSubject {
    /// The image; `None`: raw.
    pub qcow2: Option<Spec>,
    /// The disk's size in bytes.
    pub size: u64,
    /// What lies beneath it.
    pub backing: Option<Backing>,
    /// A reflink clone shares its blocks, so that overwriting them takes space.
    pub shared: bool,
    /// How it is opened.
    pub options: Options,
    /// Where the first qcow2 image that a cut leaves is put, for other programs to look at: a folder
    /// with the image `disk`, its backing file, and the bytes `expected` of it.
    pub sample: Option<PathBuf>,
}

impl DiskSubject {
    /// An image of any kind; for long histories a small one, since it is judged after every cut.
    pub fn random(chance: &mut Chance, scale: Scale) -> DiskSubject {
        let raw = chance.one_in(12);
        // Tables of many slices, of which the smallest cache holds a few: what is not pinned goes.
        let many_slices = chance.one_in(6);
        let extended_l2 = !many_slices && chance.one_in(3);
        let smallest = if extended_l2 { 14 } else { 9 };
        // Large clusters cost time and find little more.
        let cluster_bits = match (chance.below(20), scale) {
            _ if many_slices => 9,
            (0, Scale::Short) => 21,
            (0..4, _) => 16,
            (_, Scale::Short) => chance.between(smallest, 16),
            (_, Scale::Long) => chance.between(smallest, smallest + 3),
        } as u32;
        let version = if extended_l2 || !chance.one_in(8) { 3 } else { 2 };
        let cluster = 1 << cluster_bits;
        let clusters = match chance.below(8) {
            _ if many_slices => chance.between(1000, 2000),
            0 | 1 => chance.between(65, 700),
            _ => chance.between(8, 40),
        };
        let clusters = clusters.min(scale.bytes_max() / cluster).max(3);
        let size = clusters * cluster - chance.pick(&[0, 0, 512]).min(cluster / 2) / 512 * 512;
        let backing = (!raw && chance.one_in(2)).then(|| Backing::random(chance, size, 2000));
        let qcow2 = (!raw).then(|| Spec {
            version,
            cluster_bits,
            extended_l2,
            refcount_order: match version {
                2 => 4,
                _ if many_slices => chance.pick(&[4, 6]) as u32,
                _ => chance.pick(&[4, 4, 4, 0, 3, 6]) as u32,
            },
            size,
            backing: backing.as_ref().map(|backing| (BACKING.to_owned(), backing.format())),
            lean: chance.one_in(2),
            content: chance.one_in(2).then(|| Content {
                seed: chance.draw(),
                snapshot: many_slices || chance.one_in(2),
            }),
        });
        let options = Options {
            format: Some(if raw { ImageFormat::Raw } else { ImageFormat::Qcow2 }),
            alloc: chance.pick(&[
                AllocPolicy::Implicit,
                AllocPolicy::Implicit,
                AllocPolicy::ZeroRange,
                AllocPolicy::WriteZeroes,
            ]),
            discard: chance.pick(&[
                DiscardPolicy::Unmap,
                DiscardPolicy::Unmap,
                DiscardPolicy::Unmap,
                DiscardPolicy::Ignore,
            ]),
            // The smallest, or the usual.
            l2_cache_size: if many_slices { 0 } else { chance.pick(&[0, 32 << 20]) },
            refcount_cache_size: if many_slices { 0 } else { chance.pick(&[0, 4 << 20]) },
            ..Options::default()
        };
        DiskSubject { qcow2, size, backing, shared: chance.one_in(6), options, sample: None }
    }

    /// The disk's own unit in bytes.
    pub fn cluster(&self) -> u64 {
        self.qcow2.as_ref().map_or(4096, |spec| 1 << spec.cluster_bits)
    }

    /// A version 2 image does not keep the size that its snapshots have.
    fn can_be_resized(&self) -> bool {
        let refuses = |spec: &Spec| {
            spec.version == 2 && spec.content.as_ref().is_some_and(|content| content.snapshot)
        };
        !self.qcow2.as_ref().is_some_and(refuses)
    }

    /// A few sizes that it may be given, its own among them.
    fn other_sizes(&self, chance: &mut Chance, request_align: u64, scale: Scale) -> Vec<u64> {
        let unit = if self.qcow2.is_some() { 512 } else { request_align.max(512) };
        let most = scale.bytes_max().max(self.size);
        let mut size = || match chance.below(3) {
            0 => chance.between(1, self.size),
            1 => self.size + chance.between(1, 2 * self.cluster()),
            _ => self.size + chance.between(1, self.size),
        };
        let others = [size(), size()].map(|size| size.min(most).next_multiple_of(unit));
        [&others[..], &[self.size.next_multiple_of(unit)]].concat()
    }

    /// A random history of this disk.
    pub fn history(&self, seed: u64, chance: &mut Chance, scale: Scale) -> History {
        let mut plan = Plan::random(chance);
        if chance.one_in(2) {
            plan = plan.with_random_faults(chance);
            if chance.one_in(4) {
                let backing = self.backing.as_ref().map_or(0, Backing::size) / 4096;
                let disk = self.size / 4096;
                plan.capacity_blocks = backing + chance.between(16, 32 + 2 * disk);
            }
        }
        let shape = Shape {
            size: self.size,
            cluster: self.cluster(),
            request_max: (chance.pick(&[3, 3, 3, 100]) * self.cluster()).min(1 << 20),
            tasks: match scale {
                Scale::Short => chance.between(1, 5) as usize,
                Scale::Long => chance.between(4, 6) as usize,
            },
            steps: match scale {
                Scale::Short => chance.magnitude(30) as usize,
                Scale::Long => chance.between(50, 80) as usize,
            },
            align: chance.pick(&[1, 512, 512, 4096]).min(self.cluster()),
            sizes: match self.can_be_resized() && chance.one_in(3) {
                true => self.other_sizes(chance, plan.request_align.into(), scale),
                false => Vec::new(),
            },
        };
        let rounds = (0..chance.between(1, 3))
            .map(|_| {
                let script = Script::random(chance, &shape);
                let steps = match chance.below(6) {
                    0 => u64::MAX,
                    1 => chance.magnitude(2000),
                    _ => 50 + chance.below(script.len() as u64 * 16),
                };
                Round { script, steps }
            })
            .collect();
        let probes = match scale {
            Scale::Short => 0,
            Scale::Long => 27,
        };
        History { seed, plan, queues: chance.between(1, 3) as usize, probes, rounds }
    }
}

/// How much happens in a random history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// A few requests, cut once in a round.
    Short,
    /// At least 200 requests of at least four tasks, cut about a hundred times.
    Long,
}

impl Scale {
    fn bytes_max(self) -> u64 {
        match self {
            Scale::Short => 16 << 20,
            Scale::Long => 1 << 20,
        }
    }
}

/// A disk and its history from nothing but a seed.
pub fn from_seed(seed: u64, scale: Scale) -> (DiskSubject, History) {
    let mut chance = Chance::new(seed);
    let subject = DiskSubject::random(&mut chance, scale);
    let history = subject.history(seed, &mut chance, scale);
    (subject, history)
}

/// The image of a spec; the last one is kept, since it is asked for after every cut.
fn made(spec: &Spec) -> Rc<Made> {
    thread_local! {
        static LAST: RefCell<Option<(Spec, Rc<Made>)>> = const { RefCell::new(None) };
    }
    LAST.with_borrow_mut(|last| match last {
        Some((same, made)) if same == spec => made.clone(),
        _ => {
            let made = Rc::new(make(spec, oracle::PREFILLED));
            *last = Some((spec.clone(), made.clone()));
            made
        }
    })
}

impl Subject for DiskSubject {
    type Target = Disk;

    fn create(&self, world: &World) -> Oracle {
        let mut oracle = Oracle::new(self.size);
        match &self.backing {
            Some(Backing::Raw(size)) => {
                let mut bytes = vec![0; *size as usize];
                oracle::bytes_of(oracle::BACKING, 0, &mut bytes);
                world.add(BACKING_PATH, &bytes);
                oracle.preset(0..*size, oracle::BACKING);
            }
            Some(Backing::Qcow2(spec)) => {
                let made = make(spec, oracle::BACKING);
                world.add(BACKING_PATH, &made.bytes);
                made.filled.iter().for_each(|(range, value)| oracle.preset(range.clone(), *value));
            }
            None => {}
        }
        match &self.qcow2 {
            Some(spec) => {
                let made = made(spec);
                world.add(IMAGE, &made.bytes);
                made.filled.iter().for_each(|(range, value)| oracle.preset(range.clone(), *value));
            }
            None => {
                world.add(IMAGE, &vec![0; self.size as usize]);
                oracle = oracle.losing_tails_early();
            }
        }
        if self.shared {
            world.share(IMAGE);
        }
        oracle
    }

    async fn open(
        &self,
        queue: &Queue,
        world: &World,
        background: &Arc<dyn Background>,
    ) -> Result<Arc<Disk>> {
        Disk::open(queue, &world.files(), background, IMAGE, self.options.clone()).await
    }

    async fn close(&self, target: Arc<Disk>, queue: &Queue) -> Result<()> {
        target.close(queue).await
    }

    fn survived(&self, world: &World, bytes: &[u8]) {
        let Some(folder) = self.sample.as_ref().filter(|_| self.qcow2.is_some()) else { return };
        // Only one of each history.
        if std::fs::create_dir(folder).is_ok() {
            let put = |name: &str, bytes: &[u8]| {
                std::fs::write(folder.join(name), bytes)
                    .unwrap_or_else(|error| panic!("{}/{name}: {error}", folder.display()));
            };
            put("disk", &world.bytes(IMAGE));
            put("expected", bytes);
            if self.backing.is_some() {
                put(BACKING, &world.bytes(BACKING_PATH));
            }
        }
    }

    fn inspect(&self, world: &World) -> std::result::Result<u64, String> {
        let Some(spec) = &self.qcow2 else {
            return Ok(0);
        };
        let inspection = image::inspect(world, IMAGE)?;
        let made = made(spec);
        for range in &made.frozen {
            let (start, length) = (range.start, range.end - range.start);
            let first = &made.bytes[start as usize..range.end as usize];
            if world.read(IMAGE, start, length) != first {
                return Err(format!("the snapshot's bytes at {range:#x?} have changed"));
            }
        }
        Ok(inspection.leaks)
    }
}
