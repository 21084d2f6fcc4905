//! CPU per I/O of the event loop: random reads or writes of one block size at a fixed depth.
//!
//! `loop_bench FILE [aio=io_uring] [cache=none] [depth=32] [count=400000] [bs=4096] [rw=read|write|alloc] [dsync=0]`
//!
//! `rw=alloc` starts from an empty file instead and writes each block into a new 64 KiB region, growing
//! the file ahead of need by `grow=fallocate|truncate` in steps of `step=16777216` bytes.
//!
//! Prints nanoseconds of this process's CPU per I/O (user and system) and I/Os per second. The file
//! must exist and be written; `crates/host/examples/loop_bench.sh` prepares one on a fast file
//! system and runs fio with the same engine beside it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use stillpoint_host::{Aio, Cache, HostFiles, LoopOptions, run};
use stillpoint_io::{Access, Durability, Files, GrowMeans, Manage, Segments};

/// How far apart allocating writes lie.
const REGION: u64 = 64 << 10;

fn main() {
    let mut words = std::env::args().skip(1);
    let path = words.next().expect("usage: loop_bench FILE [key=value]...");
    let (mut aio, mut cache) = (Aio::IoUring, Cache::None);
    let (mut depth, mut count, mut block_size) = (32u64, 400_000u64, 4096u64);
    let (mut writing, mut allocating, mut durable) = (false, false, false);
    let (mut means, mut step) = (GrowMeans::Fallocate, 16u64 << 20);
    for word in words {
        match word.split_once('=').expect("key=value") {
            ("aio", value) => aio = value.parse().unwrap(),
            ("cache", value) => cache = value.parse().unwrap(),
            ("depth", value) => depth = value.parse().unwrap(),
            ("count", value) => count = value.parse().unwrap(),
            ("bs", value) => block_size = value.parse().unwrap(),
            ("rw", value) => (writing, allocating) = (value != "read", value == "alloc"),
            ("grow", "truncate") => means = GrowMeans::Truncate,
            ("grow", _) => means = GrowMeans::Fallocate,
            ("step", value) => step = value.parse().unwrap(),
            ("dsync", value) => durable = value == "1",
            (key, _) => panic!("what is {key}?"),
        }
    }
    let durability = if durable { Durability::Durable } else { Durability::Volatile };
    run(LoopOptions { aio, ..LoopOptions::default() }, async |queue| {
        let access = if writing { Access::Write } else { Access::Read };
        let files = HostFiles::new(aio, cache);
        let file = match allocating {
            true => files.create(&queue, &path).await.unwrap(),
            false => files.open(&queue, &path, None, access).await.unwrap(),
        };
        let blocks = (file.end() / block_size).max(1);
        let left = Rc::new(Cell::new(count));
        let (before, start) = (cpu_ns(), Instant::now());
        if allocating {
            file.manage(&queue, Manage::Grow { end: step, means }).await.unwrap();
            let growing = async {
                // Half a step early, so that nobody waits.
                while left.get() > 0 {
                    if (count - left.get() + depth) * REGION + step / 2 > file.end() {
                        let end = file.end() + step;
                        file.manage(&queue, Manage::Grow { end, means }).await.unwrap();
                    } else {
                        queue.sleep(Duration::from_micros(50)).await;
                    }
                }
            };
            let writers = (0..depth).map(|_| async {
                let memory = Segments::zeroed(block_size as usize);
                while left.get() > 0 {
                    let offset = (count - left.get()) * REGION;
                    left.set(left.get() - 1);
                    while offset + block_size > file.end() {
                        queue.sleep(Duration::from_micros(20)).await;
                    }
                    file.write(&queue, offset, memory.clone(), durability).await.unwrap();
                }
            });
            join(growing, join_all(writers)).await;
            return report(&format!("{aio} {means:?} {step}"), before, start, count);
        }
        let worker = |seed: u64| {
            let (queue, file, left) = (queue.clone(), file.clone(), left.clone());
            async move {
                let mut state = seed * 0x9e37_79b9_7f4a_7c15 + 1;
                let memory = Segments::zeroed(block_size as usize);
                while left.get() > 0 {
                    left.set(left.get() - 1);
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let offset = state % blocks * block_size;
                    let done = if writing {
                        file.write(&queue, offset, memory.clone(), durability)
                    } else {
                        file.read(&queue, offset, memory.clone())
                    };
                    done.await.unwrap();
                }
            }
        };
        join_all((0..depth).map(worker)).await;
        report(&format!("{aio} {cache}"), before, start, count);
    })
    .unwrap();
}

fn report(what: &str, before: (f64, f64), start: Instant, count: u64) {
    let (after, wall) = (cpu_ns(), start.elapsed());
    let user = (after.0 - before.0) / count as f64;
    let system = (after.1 - before.1) / count as f64;
    println!(
        "{what}: {:.0} ns CPU per I/O ({user:.0} user, {system:.0} system), {:.0} IOPS",
        user + system,
        count as f64 / wall.as_secs_f64()
    );
}

/// This process's CPU time so far, user and system, in nanoseconds.
fn cpu_ns() -> (f64, f64) {
    // SAFETY: a rusage is a plain record for which zeros are a valid value, and the call fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let ns = |time: libc::timeval| time.tv_sec as f64 * 1e9 + time.tv_usec as f64 * 1e3;
    (ns(usage.ru_utime), ns(usage.ru_stime))
}
