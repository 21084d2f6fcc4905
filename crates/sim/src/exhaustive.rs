//! Every power cut of every small history, instead of random ones of large ones.
//!
//! Histories of up to three requests from a small alphabet, one after another or all at once, on a few
//! small images. Whenever what is pending has changed, the power fails in every way: every subset
//! of the pending 4 KiB blocks and of the file's length survives, and each block once more torn in
//! the middle. Where more than twelve parts are pending, as many subsets are drawn.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;

use crate::chance::{Chance, mix};
use crate::coverage::{Coverage, GuestKind};
use crate::disk::{BACKING, Backing, DiskSubject, IMAGE};
use crate::executor::Executor;
use crate::file::Pending;
use crate::files::World;
use crate::history::{self, Subject, caught, judge_world};
use crate::make::{Content, Spec};
use crate::oracle::Oracle;
use crate::plan::Plan;
use crate::workload::{self, Script, Step, UnderWay, run};
use stillpoint_engine::{ImageFormat, Options};

/// More pending parts than this are not enumerated but drawn from.
const SUBSETS_LOG_MAX: usize = 12;
const CLUSTER: u64 = 4096;

/// The requests that histories are made of.
fn alphabet() -> Vec<Step> {
    vec![
        Step::Write(0..CLUSTER, false),
        Step::Write(0x600..0x800, false),
        Step::Write(CLUSTER..2 * CLUSTER, true),
        Step::Zeroes(0..CLUSTER, true, false),
        Step::Discard(0..2 * CLUSTER),
        Step::Resize(CLUSTER + 0x600),
        Step::Resize(20 * CLUSTER),
        Step::Flush,
    ]
}

/// The images that they are played on: empty, with a backing file, with a snapshot.
fn subjects() -> Vec<DiskSubject> {
    let size = 16 * CLUSTER;
    let spec = |backing, content| Spec {
        version: 3,
        cluster_bits: CLUSTER.ilog2(),
        extended_l2: false,
        refcount_order: 4,
        size,
        backing,
        lean: false,
        content,
    };
    let options = || Options { format: Some(ImageFormat::Qcow2), ..Options::default() };
    let subject = |spec, backing| DiskSubject {
        qcow2: Some(spec),
        size,
        backing,
        shared: false,
        options: options(),
        sample: None,
    };
    vec![
        subject(spec(None, None), None),
        subject(spec(Some((BACKING.to_owned(), "raw")), None), Some(Backing::Raw(size))),
        subject(spec(None, Some(Content { seed: 1, snapshot: true })), None),
    ]
}

/// One small history.
#[derive(Clone, Debug)]
pub struct Small {
    /// The image.
    pub subject: DiskSubject,
    /// What the guest does.
    pub script: Script,
}

/// All of them.
pub fn all() -> Vec<Small> {
    let alphabet = alphabet();
    let mut sequences: Vec<Vec<Step>> = vec![Vec::new()];
    let mut all = Vec::new();
    for _ in 0..3 {
        sequences = sequences
            .iter()
            .flat_map(|steps| {
                alphabet.iter().map(|step| [steps.clone(), vec![step.clone()]].concat())
            })
            .collect();
        // Of two changes of the size at once nobody could say which came last.
        let resizes =
            |steps: &Vec<Step>| steps.iter().filter(|step| matches!(step, Step::Resize(_))).count();
        sequences.retain(|steps| resizes(steps) < 2);
        for subject in subjects() {
            for steps in &sequences {
                let one_by_one = Script { tasks: vec![steps.clone()] };
                let at_once = steps.iter().map(|step| vec![step.clone()]).collect();
                let at_once = Script { tasks: at_once };
                let scripts =
                    if steps.len() > 1 { vec![one_by_one, at_once] } else { vec![at_once] };
                all.extend(
                    scripts.into_iter().map(|script| Small { subject: subject.clone(), script }),
                );
            }
        }
    }
    all
}

impl Small {
    /// Plays it, and lets the power fail in every way; returns what the cuts fell into.
    ///
    /// # Errors
    /// What promise was broken.
    pub fn prove(&self, seed: u64) -> Result<Coverage, String> {
        caught(|| self.play(seed))
    }

    fn play(&self, seed: u64) -> Coverage {
        let world = World::new(Plan::default());
        let oracle = Rc::new(RefCell::new(self.subject.create(&world)));
        let executor = Executor::new(seed);
        let (queue, background) = (executor.queue("guest"), executor.background());
        let under_way: Rc<UnderWay> = Rc::default();
        let coverage = RefCell::new(Coverage::default());
        let seen = RefCell::new(HashSet::new());
        let chance = RefCell::new(Chance::new(seed));
        let last = Cell::new(0);
        let watch = || {
            // What can be lost changes only when an operation does something.
            let now = mix(world.stamp() << 20 ^ oracle.borrow().now());
            if last.replace(now) == now {
                return;
            }
            let cuts = self.cut(&world, &oracle.borrow(), &mut seen.borrow_mut(), &chance);
            let host = world.under_way();
            let guest = under_way.each_ref().map(Cell::get);
            (0..cuts).for_each(|_| coverage.borrow_mut().count(&guest, &host));
        };
        let life = {
            let (subject, script) = (self.subject.clone(), self.script.clone());
            let (world, oracle, under_way) = (world.clone(), oracle.clone(), under_way.clone());
            async move {
                let target = history::open(&subject, &queue, &world, &background).await;
                run(&target, std::slice::from_ref(&queue), &world, &oracle, &under_way, &script)
                    .await;
                workload::count(&under_way, GuestKind::Close, 1);
                let started = oracle.borrow_mut().start_flush();
                subject.close(target, &queue).await.expect("nothing fails beneath");
                oracle.borrow_mut().flushed(started);
            }
        };
        executor.run_until(u64::MAX, watch, life);
        let cuts = self.cut(&world, &oracle.borrow(), &mut seen.borrow_mut(), &chance);
        coverage.borrow_mut().cuts += cuts;
        coverage.into_inner()
    }

    /// Lets the power fail in every way that was not tried yet; returns how many there were.
    fn cut(
        &self,
        world: &World,
        oracle: &Oracle,
        seen: &mut HashSet<u64>,
        chance: &RefCell<Chance>,
    ) -> u64 {
        let (durable, pending) = world.pending(IMAGE);
        let mut cuts = 0;
        let mut judge = |subset: u64, torn: Option<usize>| {
            let halves = |index: usize| match subset & 1 << index != 0 {
                true => [true, true],
                false => [torn == Some(index), false],
            };
            let mut number = durable;
            for (index, (_, changes)) in pending.iter().enumerate() {
                for (change, _) in changes.iter().zip(halves(index)).filter(|(_, kept)| *kept) {
                    number ^= change;
                }
            }
            // The same bytes under the same oracle were judged already.
            if !seen.insert(mix(number ^ mix(oracle.now()))) {
                return;
            }
            let keeps = |part: Pending, half: usize| {
                let index = pending.iter().position(|(other, _)| *other == part);
                index.is_some_and(|index| halves(index)[half])
            };
            let after = world.power_cut_keeping(&keeps);
            judge_world(&self.subject, after, oracle.clone(), true, 1);
            cuts += 1;
        };
        let subsets = 1u64 << pending.len().min(SUBSETS_LOG_MAX);
        for subset in 0..subsets {
            let drawn = pending.len() > SUBSETS_LOG_MAX;
            judge(if drawn { chance.borrow_mut().draw() } else { subset }, None);
        }
        for torn in 0..pending.len() {
            for others in [0, u64::MAX] {
                judge(others & !(1 << torn), Some(torn));
            }
        }
        cuts
    }
}
