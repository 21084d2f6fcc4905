//! The simulator proved on a toy before any engine: a disk kept in two files, data and map.
//!
//! Blocks are never overwritten: a write goes to a new slot of the data file, and a flush makes the
//! slots durable before the map that names them. With all its rules kept the toy survives every cut;
//! with any one left out, or on a disk that lies, the simulator must find the loss.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use async_lock::Mutex;
use stillpoint_io::{
    Access, Background, Durability, GrowMeans, Manage, Queue, Result, Segments, Storage,
};
use stillpoint_sim::history::shrink;
use stillpoint_sim::{
    Chance, History, Lie, Oracle, Plan, Round, Script, Shape, Subject, Target, World,
};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
const SIZE: u64 = BLOCK * BLOCKS;
/// The data file grows by so much ahead of need.
const STEP: u64 = 32 * BLOCK;

/// Which rule the toy leaves out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Without {
    Nothing,
    /// The data is not flushed before the map is written.
    DataFlush,
    /// The map is not flushed before the guest is answered.
    MapFlush,
    /// A write does not wait for another to the same block.
    Lock,
    /// Growth is not waited for (R3).
    Growth,
}

struct Toy {
    data: Arc<dyn Storage>,
    map: Arc<dyn Storage>,
    without: Without,
    lock: Mutex<()>,
    flush_lock: Mutex<()>,
    slots: RefCell<Vec<u64>>,
    next_slot: Cell<u64>,
}

impl Toy {
    async fn read_block(&self, queue: &Queue, block: u64) -> Result<Vec<u8>> {
        let slot = self.slots.borrow()[block as usize];
        let bytes = Segments::zeroed(BLOCK as usize);
        if slot != 0 {
            self.data.read(queue, (slot - 1) * BLOCK, bytes.clone()).await?;
        }
        Ok(bytes.to_vec())
    }

    async fn change(&self, queue: &Queue, offset: u64, bytes: &[u8]) -> Result<()> {
        let _guard = match self.without {
            Without::Lock => None,
            _ => Some(self.lock.lock().await),
        };
        let mut done = 0;
        while done < bytes.len() {
            let position = offset + done as u64;
            let (block, start) = (position / BLOCK, (position % BLOCK) as usize);
            let length = (BLOCK as usize - start).min(bytes.len() - done);
            let mut whole = self.read_block(queue, block).await?;
            whole[start..start + length].copy_from_slice(&bytes[done..done + length]);
            let slot = self.next_slot.get();
            self.next_slot.set(slot + 1);
            if slot * BLOCK + BLOCK > self.data.end() {
                let end = self.data.end() + STEP;
                let growth =
                    self.data.manage(queue, Manage::Grow { end, means: GrowMeans::Fallocate });
                if self.without != Without::Growth {
                    growth.await?;
                }
            }
            let from = Segments::from_slice(&whole);
            self.data.write(queue, slot * BLOCK, from, Durability::Volatile).await?;
            self.slots.borrow_mut()[block as usize] = slot + 1;
            done += length;
        }
        Ok(())
    }
}

impl Target for Toy {
    fn size(&self) -> u64 {
        SIZE
    }

    async fn resize(&self, _: &Queue, _: u64) -> Result<()> {
        unreachable!("no script resizes it")
    }

    async fn read(&self, queue: &Queue, offset: u64, into: Segments) -> Result<()> {
        let length = into.len() as u64;
        let mut bytes = Vec::new();
        let first = offset / BLOCK;
        for block in first..(offset + length).div_ceil(BLOCK) {
            bytes.extend(self.read_block(queue, block).await?);
        }
        let skip = (offset - first * BLOCK) as usize;
        into.copy_from(&bytes[skip..skip + length as usize]);
        Ok(())
    }

    async fn write(
        &self,
        queue: &Queue,
        offset: u64,
        from: Segments,
        durability: Durability,
    ) -> Result<()> {
        self.change(queue, offset, &from.to_vec()).await?;
        match durability {
            Durability::Volatile => Ok(()),
            Durability::Durable => self.flush(queue).await,
        }
    }

    async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        _: bool,
        durability: Durability,
    ) -> Result<()> {
        self.write(queue, offset, Segments::zeroed(length as usize), durability).await
    }

    async fn discard(&self, _: &Queue, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    async fn status(&self, _: &Queue, _: u64, length: u64) -> Result<(u64, bool)> {
        Ok((length, false))
    }

    async fn flush(&self, queue: &Queue) -> Result<()> {
        let _guard = self.flush_lock.lock().await;
        let map: Vec<u8> = self.slots.borrow().iter().flat_map(|slot| slot.to_le_bytes()).collect();
        // ORDER: a slot is durable before the map that names it.
        if self.without != Without::DataFlush {
            self.data.flush(queue).await?;
        }
        self.map.write(queue, 0, Segments::from_slice(&map), Durability::Volatile).await?;
        if self.without != Without::MapFlush {
            self.map.flush(queue).await?;
        }
        Ok(())
    }
}

#[derive(Clone)]
struct Maker(Without);

impl Subject for Maker {
    type Target = Toy;

    fn create(&self, world: &World) -> Oracle {
        world.add("toy/data", &[]);
        world.add("toy/map", &[0; 8 * BLOCKS as usize]);
        Oracle::new(SIZE)
    }

    async fn open(
        &self,
        queue: &Queue,
        world: &World,
        _: &Arc<dyn Background>,
    ) -> Result<Arc<Toy>> {
        let files = world.files();
        let data = files.open(queue, "toy/data", None, Access::Write).await?;
        let map = files.open(queue, "map", Some("toy/data"), Access::Write).await?;
        let bytes = Segments::alloc(8 * BLOCKS as usize);
        map.read(queue, 0, bytes.clone()).await?;
        let slots: Vec<u64> = bytes
            .to_vec()
            .chunks(8)
            .map(|slot| u64::from_le_bytes(slot.try_into().unwrap()))
            .collect();
        let next_slot = slots.iter().copied().max().unwrap_or(0);
        #[allow(clippy::arc_with_non_send_sync)]
        Ok(Arc::new(Toy {
            data,
            map,
            without: self.0,
            lock: Mutex::new(()),
            flush_lock: Mutex::new(()),
            slots: RefCell::new(slots),
            next_slot: Cell::new(next_slot),
        }))
    }

    async fn close(&self, target: Arc<Toy>, queue: &Queue) -> Result<()> {
        target.flush(queue).await
    }

    fn inspect(&self, world: &World) -> std::result::Result<u64, String> {
        let end = world.bytes("toy/data").len() as u64;
        let map = world.bytes("toy/map");
        let mut owners = BTreeMap::new();
        for (block, slot) in map.chunks(8).enumerate() {
            let slot = u64::from_le_bytes(slot.try_into().unwrap());
            if slot == 0 {
                continue;
            }
            if slot * BLOCK > end {
                return Err(format!("block {block} lies in slot {slot}, beyond the end"));
            }
            if let Some(other) = owners.insert(slot, block) {
                return Err(format!("blocks {block} and {other} share slot {slot}"));
            }
        }
        Ok(0)
    }
}

fn history(seed: u64, plan: Option<Plan>) -> History {
    let mut chance = Chance::new(seed);
    // The toy's map is torn safely only if its 8-byte entries stay whole: any sector will do.
    let plan = plan.unwrap_or_else(|| Plan { request_align: 1, ..Plan::random(&mut chance) });
    let shape = Shape {
        size: SIZE,
        cluster: BLOCK,
        request_max: 4 * BLOCK,
        tasks: 3,
        steps: 15,
        align: chance.pick(&[1, 512]),
        sizes: Vec::new(),
    };
    let rounds = (0..3)
        .map(|_| Round {
            script: Script::random(&mut chance, &shape),
            steps: if chance.one_in(5) { u64::MAX } else { chance.magnitude(2000) },
        })
        .collect();
    History { seed, plan, queues: 2, probes: 0, rounds }
}

fn found(without: Without, plan: impl Fn() -> Option<Plan>) -> Option<(u64, String)> {
    (0..300).find_map(|seed| Some((seed, history(seed, plan()).try_play(&Maker(without)).err()?)))
}

#[test]
fn an_honest_toy_survives_every_cut() {
    let mut cuts = 0;
    for seed in 0..300 {
        cuts += history(seed, None).play(&Maker(Without::Nothing)).cuts;
    }
    assert!(cuts > 300, "only {cuts} cuts hit a running script");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 0..20 {
        let play = || history(seed, None).play(&Maker(Without::Nothing));
        assert_eq!(play(), play(), "seed {seed}");
    }
}

#[test]
fn every_rule_left_out_is_found() {
    for (without, says) in [
        (Without::DataFlush, "after a power cut"),
        (Without::MapFlush, "after a power cut"),
        (Without::Lock, "R1"),
        (Without::Growth, "R3"),
    ] {
        let (seed, text) = found(without, || None).expect("a rule was left out");
        assert!(text.contains(says), "without {without:?}, seed {seed}: {text}");
    }
}

#[test]
fn a_disk_that_lies_is_found() {
    let liar = || Some(Plan { lie: Some(Lie::Flush), ..Plan::default() });
    assert!(found(Without::Nothing, liar).is_some());
}

#[test]
fn a_failure_is_shrunk_to_a_short_history() {
    let (seed, _) = found(Without::DataFlush, || None).unwrap();
    let (short, text) = shrink(&Maker(Without::DataFlush), &history(seed, None), 200).unwrap();
    let steps: usize = short.rounds.iter().map(|round| round.script.len()).sum();
    assert!(steps <= 4, "{text}\n{short}");
}
