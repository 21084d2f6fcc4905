//! CPU per I/O of the event loop: random reads or writes of one block size at a fixed depth.
//!
//! `loop_bench FILE [aio=io_uring] [cache=none] [depth=32] [count=400000] [bs=4096] [rw=read] [dsync=0]`
//!
//! Prints nanoseconds of this process's CPU per I/O (user and system) and I/Os per second. The file
//! must exist and be written; `crates/host/examples/loop_bench.sh` prepares one on a fast file
//! system and runs fio with the same engine beside it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use futures_util::future::join_all;
use stillpoint_host::{Aio, Cache, HostFiles, LoopOptions, run};
use stillpoint_io::{Access, Durability, Files, Segments};

fn main() {
    let mut words = std::env::args().skip(1);
    let path = words.next().expect("usage: loop_bench FILE [key=value]...");
    let (mut aio, mut cache) = (Aio::IoUring, Cache::None);
    let (mut depth, mut count, mut block_size) = (32, 400_000u64, 4096u64);
    let (mut writing, mut durable) = (false, false);
    for word in words {
        match word.split_once('=').expect("key=value") {
            ("aio", value) => aio = value.parse().unwrap(),
            ("cache", value) => cache = value.parse().unwrap(),
            ("depth", value) => depth = value.parse().unwrap(),
            ("count", value) => count = value.parse().unwrap(),
            ("bs", value) => block_size = value.parse().unwrap(),
            ("rw", value) => writing = value == "write",
            ("dsync", value) => durable = value == "1",
            (key, _) => panic!("what is {key}?"),
        }
    }
    let durability = if durable { Durability::Durable } else { Durability::Volatile };
    run(LoopOptions { aio, ..LoopOptions::default() }, async |queue| {
        let access = if writing { Access::Write } else { Access::Read };
        let file = HostFiles::new(aio, cache).open(&queue, &path, None, access).await.unwrap();
        let blocks = file.end() / block_size;
        let left = Rc::new(Cell::new(count));
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
        let (before, start) = (cpu_ns(), Instant::now());
        join_all((0..depth).map(worker)).await;
        let (after, wall) = (cpu_ns(), start.elapsed());
        let user = (after.0 - before.0) / count as f64;
        let system = (after.1 - before.1) / count as f64;
        println!(
            "{aio} {cache}: {:.0} ns CPU per I/O ({user:.0} user, {system:.0} system), {:.0} IOPS",
            user + system,
            count as f64 / wall.as_secs_f64()
        );
    })
    .unwrap();
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
