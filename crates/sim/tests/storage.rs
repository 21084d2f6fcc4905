//! Simulated files: what their operations promise, and what they take away.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use stillpoint_io::{
    Access, Durability, Extent, GrowMeans, Kind, Manage, Queue, Segments, Storage, Value,
};
use stillpoint_sim::plan::BeyondEnd;
use stillpoint_sim::{Chance, Executor, Plan, World};

/// Opens the only file of `world` for writing and works on it.
fn with_file<F: Future<Output = T>, T: 'static>(
    seed: u64,
    world: &World,
    work: impl FnOnce(Queue, Arc<dyn Storage>) -> F + 'static,
) -> T {
    let executor = Executor::new(seed);
    let (queue, files) = (executor.queue("test"), world.files());
    executor.run(async move {
        let file = files.open(&queue, "file", None, Access::Write).await.unwrap();
        work(queue, file).await
    })
}

fn world(plan: Plan, bytes: &[u8]) -> World {
    let world = World::new(plan);
    world.add("file", bytes);
    world
}

fn filled(value: u8, length: usize) -> Segments {
    let segments = Segments::alloc(length);
    segments.fill(value);
    segments
}

#[test]
fn a_write_is_read_back_and_may_be_lost() {
    let (mut lost, mut kept, mut torn) = (0, 0, 0);
    for seed in 0..100 {
        let world = world(Plan::default(), &[1; 8192]);
        with_file(seed, &world, |queue, file| async move {
            file.write(&queue, 1000, filled(2, 3000), Durability::Volatile).await.unwrap();
            let into = Segments::alloc(4000);
            file.read(&queue, 500, into.clone()).await.unwrap();
            assert_eq!(into.to_vec(), [vec![1; 500], vec![2; 3000], vec![1; 500]].concat());
        });
        let after = world.power_cut(&mut Chance::new(seed)).bytes("file");
        match after.iter().filter(|&&byte| byte == 2).count() {
            0 => lost += 1,
            3000 => kept += 1,
            _ => torn += 1,
        }
    }
    assert!(lost > 10 && kept > 10 && torn > 10, "{lost} {kept} {torn}");
}

#[test]
fn flushed_and_durable_writes_survive() {
    for seed in 0..50 {
        let world = world(Plan::default(), &[1; 8192]);
        with_file(seed, &world, |queue, file| async move {
            file.write(&queue, 0, filled(2, 4096), Durability::Volatile).await.unwrap();
            file.flush(&queue).await.unwrap();
            file.write(&queue, 4096, filled(3, 4096), Durability::Durable).await.unwrap();
        });
        let after = world.power_cut(&mut Chance::new(seed)).bytes("file");
        assert_eq!(after, [vec![2; 4096], vec![3; 4096]].concat());
    }
}

#[test]
fn operations_in_flight_complete_in_any_order() {
    let mut last = Vec::new();
    for seed in 0..20 {
        let world = world(Plan::default(), &[0; 4096]);
        with_file(seed, &world, |queue, file| async move {
            let first = file.write(&queue, 0, filled(1, 512), Durability::Volatile);
            let second = file.write(&queue, 0, filled(2, 512), Durability::Volatile);
            first.await.unwrap();
            second.await.unwrap();
        });
        last.push(world.bytes("file")[0]);
    }
    assert!(last.contains(&1) && last.contains(&2));
}

#[test]
fn growth_is_volatile_until_flushed() {
    let grow = |flush| {
        let mut sizes: Vec<usize> = (0..50)
            .map(|seed| {
                let world = world(Plan::default(), &[1; 4096]);
                with_file(seed, &world, move |queue, file| async move {
                    let means = GrowMeans::Truncate;
                    file.manage(&queue, Manage::Grow { end: 8192, means }).await.unwrap();
                    file.write(&queue, 4096, filled(2, 4096), Durability::Volatile).await.unwrap();
                    if flush {
                        file.flush(&queue).await.unwrap();
                    }
                });
                world.power_cut(&mut Chance::new(seed)).bytes("file").len()
            })
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    };
    assert_eq!(grow(false), [4096, 8192]);
    assert_eq!(grow(true), [8192]);
}

#[test]
fn a_durable_write_makes_its_own_end_durable() {
    for seed in 0..50 {
        let world = world(Plan::default(), &[]);
        with_file(seed, &world, |queue, file| async move {
            let means = GrowMeans::Truncate;
            file.manage(&queue, Manage::Grow { end: 1 << 20, means }).await.unwrap();
            file.write(&queue, 4096, filled(2, 4096), Durability::Durable).await.unwrap();
        });
        let after = world.power_cut(&mut Chance::new(seed)).bytes("file");
        assert!(after.len() >= 8192 && after[4096..8192] == [2; 4096]);
    }
}

#[test]
fn a_punch_gives_space_back_and_reads_as_zeros() {
    let world = world(Plan::default(), &[1; 64 << 10]);
    assert_eq!(world.used_blocks(), 16);
    with_file(1, &world, |queue, file| async move {
        let (offset, length) = (4096, 8192);
        file.manage(&queue, Manage::Punch { offset, length }).await.unwrap();
        let extent = |length, data| Value::Extent(Extent { length, data });
        assert_eq!(file.status(&queue, 0, 65536).await.unwrap(), extent(4096, true));
        assert_eq!(file.status(&queue, 4096, 65536).await.unwrap(), extent(8192, false));
        assert_eq!(file.status(&queue, 5000, 100).await.unwrap(), extent(100, false));
    });
    assert_eq!(world.used_blocks(), 14);
    assert_eq!(world.bytes("file")[4096..12288], [0; 8192]);
}

#[test]
fn a_write_beyond_the_end_breaks_r3() {
    let world = world(Plan::default(), &[0; 4096]);
    let run = || {
        with_file(1, &world, |queue, file| async move {
            // The growth is in flight: the old end is still in force.
            let growth =
                file.manage(&queue, Manage::Grow { end: 8192, means: GrowMeans::Truncate });
            let write = file.write(&queue, 4096, filled(1, 4096), Durability::Volatile);
            let _ = (growth.await, write.await);
        })
    };
    let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    assert!(panic.downcast_ref::<String>().unwrap().starts_with("R3: "));
}

#[test]
fn fallocate_on_xfs_destroys_writes_beyond_the_old_end_and_on_ext4_does_not() {
    let survivals = |fallocate_destroys_writes| {
        (0..50)
            .filter(|&seed| {
                let beyond_end = BeyondEnd::Grow;
                let plan = Plan { beyond_end, fallocate_destroys_writes, ..Plan::default() };
                let world = world(plan, &[0; 4096]);
                with_file(seed, &world, |queue, file| async move {
                    let means = GrowMeans::Fallocate;
                    let growth = file.manage(&queue, Manage::Grow { end: 65536, means });
                    let write = file.write(&queue, 8192, filled(1, 4096), Durability::Volatile);
                    growth.await.unwrap();
                    write.await.unwrap();
                });
                world.bytes("file")[8192..12288] == [1; 4096]
            })
            .count()
    };
    assert_eq!(survivals(false), 50);
    assert!((5..45).contains(&survivals(true)));
}

#[test]
fn space_runs_out_before_anything_is_written() {
    let world = world(Plan { capacity_blocks: 2, ..Plan::default() }, &[1; 4096]);
    with_file(1, &world, |queue, file| async move {
        let grow = |end, means| file.manage(&queue, Manage::Grow { end, means });
        let full = grow(65536, GrowMeans::Fallocate).await.unwrap_err();
        assert_eq!((full.kind(), file.end()), (Kind::NoSpace, 4096));
        grow(65536, GrowMeans::Truncate).await.unwrap();
        file.write(&queue, 4096, filled(2, 4096), Durability::Volatile).await.unwrap();
        let full = file.write(&queue, 8192, filled(3, 4096), Durability::Volatile).await;
        assert_eq!(full.unwrap_err().kind(), Kind::NoSpace);
        file.write(&queue, 0, filled(4, 8192), Durability::Volatile).await.unwrap();
    });
    assert_eq!(world.bytes("file")[..8193], [vec![4; 8192], vec![0]].concat());
}

#[test]
fn a_failed_write_leaves_any_part_of_itself() {
    let plan = Plan { write_errors_permille: 1000, ..Plan::default() };
    let mut partial = 0;
    for seed in 0..50 {
        let world = world(plan.clone(), &[0; 65536]);
        with_file(seed, &world, |queue, file| async move {
            let error = file.write(&queue, 0, filled(1, 65536), Durability::Volatile).await;
            let error = error.unwrap_err();
            assert_eq!((error.kind(), error.errno()), (Kind::Io, Some(5)));
        });
        let count = world.bytes("file").iter().filter(|&&byte| byte == 1).count();
        partial += usize::from(count > 0 && count < 65536);
    }
    assert!(partial > 10);
}

#[test]
fn the_next_flush_after_a_failed_one_succeeds_and_proves_nothing() {
    let mut lost = 0;
    for seed in 0..50 {
        let world = world(Plan { flush_errors_permille: 1000, ..Plan::default() }, &[1; 512]);
        let quiet = world.clone();
        with_file(seed, &world, |queue, file| async move {
            file.write(&queue, 0, filled(2, 512), Durability::Volatile).await.unwrap();
            file.flush(&queue).await.unwrap_err();
            quiet.set_plan(Plan::default());
            file.flush(&queue).await.unwrap();
        });
        assert_eq!(world.failed_flushes(), 1);
        lost += usize::from(world.power_cut(&mut Chance::new(seed)).bytes("file")[0] == 1);
    }
    assert!(lost > 10);
}

#[test]
fn a_second_writer_is_refused_until_the_first_is_gone() {
    let world = world(Plan::default(), &[]);
    let files = world.files();
    with_file(1, &world, |queue, file| async move {
        let open = |access| files.open(&queue, "file", None, access);
        assert_eq!(open(Access::Write).await.unwrap_err().kind(), Kind::Busy);
        assert_eq!(open(Access::Read).await.unwrap_err().kind(), Kind::Busy);
        assert!(open(Access::ReadUnlocked).await.is_ok());
        drop(file);
        assert!(open(Access::Write).await.is_ok());
        let missing = files.open(&queue, "other", None, Access::Read).await.unwrap_err();
        assert_eq!(missing.kind(), Kind::NotFound);
    });
}

#[test]
fn unaligned_requests_are_refused_where_they_must_be_aligned() {
    let world = world(Plan { request_align: 512, ..Plan::default() }, &[0; 4096]);
    with_file(1, &world, |queue, file| async move {
        let error = file.read(&queue, 100, Segments::alloc(512)).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        file.read(&queue, 512, Segments::alloc(512)).await.unwrap();
    });
}

#[test]
fn overwriting_what_a_clone_shares_takes_space() {
    let world = world(Plan { capacity_blocks: 3, ..Plan::default() }, &[1; 8192]);
    world.share("file");
    with_file(0, &world, |queue, file| async move {
        let write = |offset| file.write(&queue, offset, filled(2, 4096), Durability::Volatile);
        write(0).await.unwrap();
        write(0).await.expect("the block is its own now");
        assert_eq!(write(4096).await.unwrap_err().kind(), Kind::NoSpace);
    });
    assert_eq!(world.used_blocks(), 3);
}

#[test]
fn a_new_name_may_be_lost_until_create_returns() {
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..200 {
        let world = World::new(Plan::default());
        let executor = Executor::new(seed);
        let (queue, files) = (executor.queue("test"), world.files());
        let created = executor.run_until(2 + seed % 5, || {}, async move {
            files.create(&queue, "fresh").await.unwrap();
        });
        let there = world.power_cut(&mut Chance::new(seed)).exists("fresh");
        assert!(there || created.is_none(), "seed {seed}: lost after its creation");
        *if there { &mut kept } else { &mut lost } += 1;
    }
    assert!(lost > 10 && kept > 10, "{lost} {kept}");
}

#[test]
fn names_change_in_order_and_durably_when_the_folder_is_synced() {
    let found = |world: &World| {
        let mut found: Vec<String> = (0..100)
            .map(|seed| {
                let after = world.power_cut(&mut Chance::new(seed));
                ["a", "b", "c"].into_iter().filter(|name| after.exists(name)).collect()
            })
            .collect();
        found.sort();
        found.dedup();
        found
    };
    let world = World::new(Plan::default());
    world.add("a", &[1]);
    world.rename("a", "b");
    world.rename("b", "c");
    assert_eq!(world.bytes("c"), [1]);
    assert_eq!(found(&world), ["a", "b", "c"]);
    world.sync_folder();
    assert_eq!(found(&world), ["c"]);
}
