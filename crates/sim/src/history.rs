//! Scripts with power cuts between them, played on a subject, and shrunk when they fail.
//!
//! A round opens the subject, reads the whole disk and judges it, runs its script, and either is cut
//! after a number of steps (in recovery, in the midst of the script, in the closing: anywhere) or
//! closes the subject in order. The power fails after every round all the same: what was closed in
//! order must survive it. After the last round the disk is opened and judged once more.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::sync::{Arc, Once};

use stillpoint_io::{Background, Queue, Result, Segments};

use crate::chance::{Chance, mix};
use crate::coverage::{Coverage, GuestKind};
use crate::executor::Executor;
use crate::files::World;
use crate::oracle::Oracle;
use crate::plan::Plan;
use crate::workload::{self, Script, Target, UnderWay, run};

/// What is put through a history: how to make a disk, open, close and inspect it.
pub trait Subject: Clone + 'static {
    /// The disk when it is open.
    type Target: Target;

    /// Makes the disk's files, and the oracle that knows what they hold.
    fn create(&self, world: &World) -> Oracle;

    /// Opens the disk, recovering it if need be.
    fn open(
        &self,
        queue: &Queue,
        world: &World,
        background: &Arc<dyn Background>,
    ) -> impl Future<Output = Result<Arc<Self::Target>>>;

    /// Closes it in order.
    fn close(&self, target: Arc<Self::Target>, queue: &Queue) -> impl Future<Output = Result<()>>;

    /// Looks at the closed disk's files, and counts what is allocated for nothing.
    ///
    /// # Errors
    /// Says what is wrong with them.
    fn inspect(&self, world: &World) -> std::result::Result<u64, String>;

    /// The whole disk was read after a power cut, and is as it may be.
    fn survived(&self, _world: &World, _bytes: &[u8]) {}
}

/// One life of a disk, from its opening to a power cut.
#[derive(Clone, Debug)]
pub struct Round {
    /// What the guest does.
    pub script: Script,
    /// After how many steps of the executor the power fails; `u64::MAX`: after the closing.
    pub steps: u64,
}

/// The whole story of a disk.
#[derive(Clone, Debug)]
pub struct History {
    /// Decides everything that is not written here.
    pub seed: u64,
    /// The disk beneath.
    pub plan: Plan,
    /// How many queues the guest uses.
    pub queues: usize,
    /// Beside the cuts that end rounds, the power fails for a copy of the world about every so many
    /// steps, and the copy is opened and judged; 0: never.
    pub probes: u64,
    /// Its lives.
    pub rounds: Vec<Round>,
}

/// What became of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Played {
    /// The hash of everything that happened.
    pub hash: u64,
    /// How many rounds were cut before they had ended.
    pub cuts: usize,
    /// What all cuts fell into, those of copies included.
    pub coverage: Coverage,
    /// How many steps the executors took.
    pub steps: u64,
}

/// What the power cuts of a history came to so far.
#[derive(Clone, Copy, Default)]
struct Probed {
    coverage: Coverage,
    hash: u64,
}

impl History {
    /// Plays it from beginning to end.
    ///
    /// # Panics
    /// When the subject breaks a promise.
    pub fn play<S: Subject>(&self, subject: &S) -> Played {
        let mut world = World::new(self.plan.clone());
        let oracle = Rc::new(RefCell::new(subject.create(&world)));
        let mut played = Played::default();
        let mut leaks = 0;
        let probed = Cell::new(Probed::default());
        let mut chance = Chance::new(self.seed);
        let last = Round { script: Script::default(), steps: u64::MAX };
        for round in self.rounds.iter().chain([&last]) {
            let executor = Executor::new(chance.draw());
            let end = self.play_round(subject, &world, &oracle, &executor, round, &probed);
            played.hash = mix(played.hash ^ executor.history());
            played.steps += executor.steps();
            played.cuts += usize::from(end.is_none());
            oracle.borrow_mut().power_cut();
            world = world.power_cut(&mut chance);
            // The executor goes last: if this panics, it tells what had happened.
            match subject.inspect(&world) {
                Err(wrong) => {
                    panic!("the image after a power cut (seed {:#x}): {wrong}", self.seed)
                }
                Ok(now) if end == Some(true) && now > leaks => {
                    panic!("closed in order, it leaks {now} clusters; before, it leaked {leaks}")
                }
                Ok(now) => leaks = now,
            }
        }
        let Probed { coverage, hash } = probed.get();
        played.coverage = coverage;
        played.hash = mix(played.hash ^ hash);
        played
    }

    /// Whether it was closed in order, with nothing failing; `None` if the power failed before.
    fn play_round<S: Subject>(
        &self,
        subject: &S,
        world: &World,
        oracle: &Rc<RefCell<Oracle>>,
        executor: &Executor,
        round: &Round,
        probed: &Cell<Probed>,
    ) -> Option<bool> {
        let queues: Vec<Queue> =
            (0..self.queues).map(|index| executor.queue(&format!("queue {index}"))).collect();
        let background = executor.background();
        let under_way: Rc<UnderWay> = Rc::default();
        let count_cut = || {
            let mut now = probed.get();
            now.coverage.count(&under_way.each_ref().map(Cell::get), &world.under_way());
            probed.set(now);
        };
        let mut chance = executor.fork_chance();
        let watch = || {
            // Some requests are rare, short, and full of what has to be in order.
            let any = |kind: GuestKind| under_way[kind as usize].get() > 0;
            let delicate = any(GuestKind::Close) || any(GuestKind::Resize);
            let probes = if delicate { self.probes.div_ceil(9) } else { self.probes };
            if probes > 0 && chance.one_in(probes) {
                count_cut();
                let hash = self.probe(subject, world, oracle, &mut chance);
                let now = probed.get();
                probed.set(Probed { hash: mix(now.hash ^ hash), ..now });
            } else if executor.steps() == round.steps {
                count_cut();
            }
        };
        let life = {
            let (subject, world, oracle) = (subject.clone(), world.clone(), oracle.clone());
            let (plan, script) = (self.plan.clone(), round.script.clone());
            let under_way = under_way.clone();
            async move {
                let queue = &queues[0];
                world.set_plan(plan.without_faults());
                let target = open(&subject, queue, &world, &background).await;
                judge_all(&*target, queue, &oracle).await;
                world.set_plan(plan.clone());
                run(&target, &queues, &world, &oracle, &under_way, &script).await;
                workload::count(&under_way, GuestKind::Close, 1);
                let started = oracle.borrow_mut().start_flush();
                match subject.close(target, queue).await {
                    Ok(()) => {
                        oracle.borrow_mut().flushed(started);
                        // F4: the file may be anybody's from now on.
                        let under_way = world.under_way();
                        assert!(
                            under_way.iter().all(|&count| count == 0),
                            "it is closed, but works on: {under_way:?}"
                        );
                    }
                    Err(error) if plan.has_faults() => drop(error),
                    Err(error) => panic!("the disk does not close: {error:?}"),
                }
                !plan.has_faults()
            }
        };
        executor.run_until(round.steps, watch, life)
    }

    /// Lets the power fail for a copy of the world, opens it and judges it; the hash of how it went.
    fn probe<S: Subject>(
        &self,
        subject: &S,
        world: &World,
        oracle: &Rc<RefCell<Oracle>>,
        chance: &mut Chance,
    ) -> u64 {
        let (world, oracle) = (world.power_cut(chance), oracle.borrow().clone());
        let whole = chance.one_in(16);
        judge_world(subject, world, oracle, whole, chance.draw())
    }

    /// Plays it without printing anything.
    ///
    /// # Errors
    /// What it panicked with.
    pub fn try_play<S: Subject>(&self, subject: &S) -> std::result::Result<Played, String> {
        caught(|| self.play(subject))
    }
}

/// What `play` returns, or what it panicked with, without printing anything.
pub(crate) fn caught<T>(play: impl FnOnce() -> T) -> std::result::Result<T, String> {
    silence_this_thread(true);
    let result = panic::catch_unwind(AssertUnwindSafe(play));
    silence_this_thread(false);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|&text| text.to_owned());
        payload.downcast_ref::<String>().cloned().or(text).unwrap_or_default()
    })
}

thread_local! {
    static SILENT: Cell<bool> = const { Cell::new(false) };
}

/// Whether panics on this thread are expected, and not to be printed.
pub(crate) fn is_silent() -> bool {
    SILENT.get()
}

fn silence_this_thread(silent: bool) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !is_silent() {
                print(panic);
            }
        }));
    });
    SILENT.set(silent);
}

/// Inspects, opens and judges what a power cut has left, on a disk where nothing fails: the `whole`
/// disk, or what the guest has changed. Returns the hash of how that went.
///
/// # Panics
/// When a promise is broken.
pub(crate) fn judge_world<S: Subject>(
    subject: &S,
    world: World,
    mut oracle: Oracle,
    whole: bool,
    seed: u64,
) -> u64 {
    oracle.power_cut();
    if let Err(wrong) = subject.inspect(&world) {
        panic!("the image after a power cut: {wrong}")
    }
    world.set_plan(world.plan().without_faults());
    let executor = Executor::new(seed);
    let (queue, background) = (executor.queue("after a cut"), executor.background());
    let subject = subject.clone();
    executor.run(async move {
        let target = open(&subject, &queue, &world, &background).await;
        let size = target.size();
        if let Err(wrong) = oracle.judge_size(size) {
            panic!("after a power cut, {wrong}");
        }
        let everything = 0..size;
        for range in if whole { vec![everything] } else { oracle.touched() } {
            let range = range.start.min(size)..range.end.min(size);
            let bytes = read(&*target, &queue, range.clone()).await;
            if let Err(wrong) = oracle.judge_recovered(range.start, &bytes) {
                panic!("R1: after a power cut, {wrong}");
            }
            if whole {
                subject.survived(&world, &bytes);
            }
        }
    });
    executor.history()
}

pub(crate) async fn open<S: Subject>(
    subject: &S,
    queue: &Queue,
    world: &World,
    background: &Arc<dyn Background>,
) -> Arc<S::Target> {
    subject
        .open(queue, world, background)
        .await
        .unwrap_or_else(|error| panic!("the disk does not open again: {error:?}"))
}

/// Reads a range, a little at a time.
async fn read<T: Target>(target: &T, queue: &Queue, range: Range<u64>) -> Vec<u8> {
    const CHUNK: u64 = 1 << 20;
    let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
    let mut offset = range.start;
    while offset < range.end {
        let into = Segments::alloc(CHUNK.min(range.end - offset) as usize);
        target
            .read(queue, offset, into.clone())
            .await
            .unwrap_or_else(|error| panic!("a read after recovery: {error:?}"));
        bytes.extend(into.to_vec());
        offset += into.len() as u64;
    }
    bytes
}

async fn judge_all<T: Target>(target: &T, queue: &Queue, oracle: &Rc<RefCell<Oracle>>) {
    let bytes = read(target, queue, 0..target.size()).await;
    let mut oracle = oracle.borrow_mut();
    if let Err(wrong) = oracle.judge_size(bytes.len() as u64) {
        panic!("after a power cut, {wrong}");
    }
    if let Err(wrong) = oracle.recovered(&bytes) {
        panic!("R1: after a power cut, {wrong}");
    }
}

/// Leaves out what a failing history does not need, trying at most `tries` times; returns a shorter
/// one that still fails, and what it fails with. Other failures than the first are as welcome.
pub fn shrink<S: Subject>(
    subject: &S,
    history: &History,
    mut tries: usize,
) -> Option<(History, String)> {
    let mut best = history.clone();
    let mut failure = best.try_play(subject).err()?;
    let mut attempt = |candidate: History, best: &mut History, failure: &mut String| {
        if tries == 0 {
            return false;
        }
        tries -= 1;
        // Shorter scripts take fewer steps: the cut has to be looked for again.
        let seeds = (0..4).map(|turn| History {
            seed: candidate.seed.wrapping_add(turn * 0x1000),
            ..candidate.clone()
        });
        for candidate in seeds {
            if let Err(text) = candidate.try_play(subject) {
                (*best, *failure) = (candidate, text);
                return true;
            }
        }
        false
    };
    let mut size = best.len().next_power_of_two();
    while size > 0 {
        let mut start = 0;
        while start < best.len() {
            if !attempt(best.without(start..start + size), &mut best, &mut failure) {
                start += size;
            }
        }
        size /= 2;
    }
    Some((best, failure))
}

impl History {
    /// How many steps its scripts have.
    fn len(&self) -> usize {
        self.rounds.iter().map(|round| round.script.len()).sum()
    }

    /// The same without some of its steps, counted over all rounds and tasks; a round that
    /// becomes empty and was not cut is left out.
    fn without(&self, gone: Range<usize>) -> History {
        let mut history = self.clone();
        let mut index = 0;
        for round in &mut history.rounds {
            for steps in &mut round.script.tasks {
                steps.retain(|_| {
                    index += 1;
                    !gone.contains(&(index - 1))
                });
            }
        }
        history.rounds.retain(|round| !round.script.is_empty() || round.steps != u64::MAX);
        history
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seed, queues, probes) = (self.seed, self.queues, self.probes);
        writeln!(f, "seed {seed:#x}, {queues} queues, probes {probes}, {:?}", self.plan)?;
        for (index, round) in self.rounds.iter().enumerate() {
            match round.steps {
                u64::MAX => writeln!(f, "  round {index}, closed in order")?,
                steps => writeln!(f, "  round {index}, cut at step {steps}")?,
            }
            write!(f, "{}", round.script)?;
        }
        Ok(())
    }
}
