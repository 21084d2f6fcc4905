//! The storage contract (`stillpoint_io::storage`), one suite over every back end.
//!
//! Each test below runs over memory and over the host's files by each engine, directly and through
//! the page cache, in the folder for temporary files. An engine that the machine lacks falls back,
//! as it would for a user; direct I/O likewise.

use std::sync::Arc;

use futures_util::future::join_all;
use stillpoint_host::{Aio, Cache, HostFiles, LoopOptions, run, spawn_thread};
use stillpoint_io::{
    Background, Durability, Extent, Files, GrowMeans, Kind, Manage, MemoryFile, Queue, Segments,
    Storage, Value,
};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, Debug)]
enum Bed {
    Memory,
    Host(Aio, Cache),
}

impl Bed {
    fn options(self) -> LoopOptions {
        match self {
            Bed::Memory => LoopOptions::default(),
            Bed::Host(aio, _) => LoopOptions { aio, depth: 64 },
        }
    }

    /// Runs `test` over an empty file.
    fn run(self, test: impl AsyncFnOnce(&Queue, Arc<dyn Storage>)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let name = path.to_str().unwrap();
        run(self.options(), async |queue| {
            let file: Arc<dyn Storage> = match self {
                Bed::Memory => Arc::new(MemoryFile::new("file", 0)),
                Bed::Host(aio, cache) => {
                    HostFiles::new(aio, cache).create(&queue, name).await.unwrap()
                }
            };
            test(&queue, file).await;
        })
        .unwrap();
    }
}

/// Bytes that tell where they belong.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

async fn grow(queue: &Queue, file: &Arc<dyn Storage>, end: u64) {
    file.manage(queue, Manage::Grow { end, means: GrowMeans::Truncate }).await.unwrap();
}

async fn write(queue: &Queue, file: &Arc<dyn Storage>, offset: u64, bytes: &[u8]) {
    let from = Segments::from_slice(bytes);
    file.write(queue, offset, from, Durability::Volatile).await.unwrap();
}

async fn read(queue: &Queue, file: &Arc<dyn Storage>, offset: u64, len: usize) -> Vec<u8> {
    let into = Segments::alloc(len);
    into.fill(0xee);
    file.read(queue, offset, into.clone()).await.unwrap();
    into.to_vec()
}

fn reads_what_was_written(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, MIB).await;
        assert_eq!(file.end(), MIB);
        for (n, offset) in [(1, 0), (3, BLOCK), (64, 16 * BLOCK), (1, MIB - BLOCK)] {
            let bytes = pattern(offset + 1, n * BLOCK as usize);
            write(queue, &file, offset, &bytes).await;
            assert_eq!(read(queue, &file, offset, bytes.len()).await, bytes);
        }
        assert_eq!(read(queue, &file, 8 * BLOCK, 4096).await, vec![0; 4096]);
    });
}

fn reads_zeros_beyond_the_end(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, 2 * BLOCK).await;
        let bytes = pattern(1, 2 * BLOCK as usize);
        write(queue, &file, 0, &bytes).await;
        let long = read(queue, &file, BLOCK, 8 * BLOCK as usize).await;
        assert_eq!(long[..4096], bytes[4096..]);
        assert!(long[4096..].iter().all(|&byte| byte == 0));
        assert_eq!(read(queue, &file, 100 * BLOCK, 4096).await, vec![0; 4096]);
        // An end in the middle of a block.
        file.manage(queue, Manage::Shrink { end: BLOCK + 1000 }).await.unwrap();
        let tail = read(queue, &file, 0, 3 * BLOCK as usize).await;
        assert_eq!(tail[..5096], bytes[..5096]);
        assert!(tail[5096..].iter().all(|&byte| byte == 0));
    });
}

fn refuses_writes_beyond_the_end(bed: Bed) {
    bed.run(async |queue, file| {
        let attempt = async |offset, blocks| {
            let from = Segments::zeroed((blocks * BLOCK) as usize);
            file.write(queue, offset, from, Durability::Volatile).await
        };
        assert_eq!(attempt(0, 1).await.unwrap_err().kind(), Kind::Invalid);
        grow(queue, &file, 4 * BLOCK).await;
        attempt(3 * BLOCK, 1).await.unwrap();
        for (offset, blocks) in [(4 * BLOCK, 1), (3 * BLOCK, 2), (0, 5), (1 << 60, 1)] {
            let error = attempt(offset, blocks).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
            assert_eq!(error.offset(), Some(offset));
        }
        let error = attempt(u64::MAX - BLOCK + 1, 1).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert_eq!(file.end(), 4 * BLOCK);
    });
}

fn refuses_unaligned_requests(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, MIB).await;
        let align = u64::from(file.facts().request_align);
        if align == 1 {
            let bytes = pattern(5, 1001);
            write(queue, &file, 777, &bytes).await;
            assert_eq!(read(queue, &file, 777, 1001).await, bytes);
            return;
        }
        for (offset, len) in [(align / 2, align), (0, align / 2), (1, 1)] {
            let memory = Segments::zeroed(len as usize);
            let result = file.read(queue, offset, memory.clone()).await;
            assert_eq!(result.unwrap_err().kind(), Kind::Invalid);
            let result = file.write(queue, offset, memory, Durability::Volatile).await;
            assert_eq!(result.unwrap_err().kind(), Kind::Invalid);
        }
    });
}

fn takes_memory_of_any_alignment_and_pieces(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, 8 * MIB).await;
        // Odd addresses, odd lengths of pieces, many pieces.
        let odd = Segments::alloc(3 * 4096 + 100).slice(13..13 + 2 * 4096);
        let bytes = pattern(1, odd.len());
        odd.copy_from(&bytes);
        file.write(queue, 0, odd.clone(), Durability::Volatile).await.unwrap();
        odd.fill(0);
        file.read(queue, 0, odd.clone()).await.unwrap();
        assert_eq!(odd.to_vec(), bytes);
        for (seed, lengths) in
            [vec![1, 4095], vec![512, 1024, 2560], vec![4096; 1500], vec![4096, 8192, 100, 3996]]
                .into_iter()
                .enumerate()
        {
            let mut pieces = Segments::default();
            for length in &lengths {
                pieces.append(Segments::alloc(*length));
            }
            let bytes = pattern(seed as u64 + 9, pieces.len());
            pieces.copy_from(&bytes);
            file.write(queue, 4 * BLOCK, pieces.clone(), Durability::Volatile).await.unwrap();
            assert_eq!(read(queue, &file, 4 * BLOCK, bytes.len()).await, bytes, "{lengths:?}");
            pieces.fill(0);
            file.read(queue, 4 * BLOCK, pieces.clone()).await.unwrap();
            assert_eq!(pieces.to_vec(), bytes, "{lengths:?}");
        }
        // Pieces that reach over the end.
        let mut pieces = Segments::alloc(4096);
        pieces.append(Segments::alloc(8192));
        pieces.append(Segments::alloc(4096));
        pieces.fill(0xee);
        let tail = pattern(77, 4096);
        write(queue, &file, 8 * MIB - BLOCK, &tail).await;
        file.read(queue, 8 * MIB - BLOCK, pieces.clone()).await.unwrap();
        assert_eq!(pieces.to_vec(), [tail, vec![0; 3 * 4096]].concat());
    });
}

fn durable_writes_and_flushes_complete(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, MIB).await;
        let bytes = pattern(3, 4096);
        for round in 0..4 {
            let from = Segments::from_slice(&bytes);
            let done = file.write(queue, round * BLOCK, from, Durability::Durable).await;
            assert_eq!(done.unwrap(), Value::Unit);
            assert_eq!(file.flush(queue).await.unwrap(), Value::Unit);
            assert_eq!(read(queue, &file, round * BLOCK, 4096).await, bytes);
        }
    });
}

fn many_operations_at_once(bed: Bed) {
    bed.run(async |queue, file| {
        const COUNT: u64 = 3000;
        grow(queue, &file, COUNT * BLOCK).await;
        let writes = (0..COUNT).map(|n| {
            let from = Segments::from_slice(&pattern(n + 1, 4096));
            file.write(queue, n * BLOCK, from, Durability::Volatile)
        });
        for result in join_all(writes.collect::<Vec<_>>()).await {
            result.unwrap();
        }
        let reads: Vec<_> = (0..COUNT)
            .map(|n| {
                let into = Segments::alloc(4096);
                (n, into.clone(), file.read(queue, n * BLOCK, into))
            })
            .collect();
        for (n, into, done) in reads {
            done.await.unwrap();
            assert_eq!(into.to_vec(), pattern(n + 1, 4096), "block {n}");
        }
    });
}

fn dropped_completions_cancel_nothing(bed: Bed) {
    bed.run(async |queue, file| {
        const COUNT: u64 = 200;
        grow(queue, &file, 2 * COUNT * BLOCK).await;
        let old = pattern(1, 4096);
        for n in 0..COUNT {
            write(queue, &file, n * BLOCK, &old).await;
        }
        for n in 0..COUNT {
            let from = Segments::from_slice(&pattern(n + 10, 4096));
            drop(file.write(queue, (COUNT + n) * BLOCK, from, Durability::Volatile));
            // R2: the memory goes with the read, not with who asked for it.
            drop(file.read(queue, n * BLOCK, Segments::alloc(4096)));
            drop(Segments::zeroed(4096));
        }
        for n in 0..COUNT {
            while read(queue, &file, (COUNT + n) * BLOCK, 4096).await != pattern(n + 10, 4096) {
                queue.sleep(std::time::Duration::from_millis(1)).await;
            }
            assert_eq!(read(queue, &file, n * BLOCK, 4096).await, old);
        }
    });
}

fn a_loop_may_end_with_operations_in_flight(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, MIB).await;
        for n in 0..100 {
            drop(file.read(queue, n * BLOCK, Segments::alloc(4096)));
            drop(file.flush(queue));
        }
        let forever = queue.clone();
        queue.spawn(async move { forever.sleep(std::time::Duration::from_secs(3600)).await });
    });
}

fn grows_and_shrinks(bed: Bed) {
    bed.run(async |queue, file| {
        for (means, end) in [(GrowMeans::Truncate, MIB), (GrowMeans::Fallocate, 3 * MIB)] {
            let old = file.end();
            assert_eq!(file.manage(queue, Manage::Grow { end, means }).await.unwrap(), Value::Unit);
            assert_eq!(file.end(), end);
            let grown = read(queue, &file, old, (end - old) as usize).await;
            assert!(grown.iter().all(|&byte| byte == 0));
        }
        let bytes = pattern(1, 4096);
        write(queue, &file, 3 * MIB - BLOCK, &bytes).await;
        // Growth never shortens, shrinking never lengthens.
        grow(queue, &file, MIB).await;
        assert_eq!(file.end(), 3 * MIB);
        file.manage(queue, Manage::Shrink { end: 9 * MIB }).await.unwrap();
        assert_eq!(file.end(), 3 * MIB);
        assert_eq!(read(queue, &file, 3 * MIB - BLOCK, 4096).await, bytes);
        // What was cut off comes back as zeros.
        file.manage(queue, Manage::Shrink { end: MIB }).await.unwrap();
        assert_eq!(file.end(), MIB);
        grow(queue, &file, 3 * MIB).await;
        assert_eq!(read(queue, &file, 3 * MIB - BLOCK, 4096).await, vec![0; 4096]);
    });
}

fn growth_steps_at_once_end_at_the_largest(bed: Bed) {
    bed.run(async |queue, file| {
        let steps = (1..=32).map(|n| {
            let means = if n % 2 == 0 { GrowMeans::Truncate } else { GrowMeans::Fallocate };
            file.manage(queue, Manage::Grow { end: n * 64 * 1024, means })
        });
        for result in join_all(steps.collect::<Vec<_>>()).await {
            result.unwrap();
        }
        assert_eq!(file.end(), 2 * MIB);
    });
}

fn punches_and_zeroes(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, MIB).await;
        let bytes = pattern(1, MIB as usize);
        write(queue, &file, 0, &bytes).await;
        let (offset, length) = (64 * 1024, 128 * 1024);
        let mut expected = bytes;
        if file.facts().can_punch {
            file.manage(queue, Manage::Punch { offset, length }).await.unwrap();
            expected[offset as usize..][..length as usize].fill(0);
        }
        let offset = 512 * 1024;
        if file.facts().can_zero_range {
            file.manage(queue, Manage::ZeroRange { offset, length }).await.unwrap();
            expected[offset as usize..][..length as usize].fill(0);
        }
        assert!(read(queue, &file, 0, MIB as usize).await == expected);
        // Beyond the end, and across it: the length stays.
        if file.facts().can_punch {
            let change = Manage::Punch { offset: MIB - BLOCK, length: u64::MAX / 4 };
            file.manage(queue, change).await.unwrap();
            let change = Manage::Punch { offset: 10 * MIB, length: BLOCK };
            file.manage(queue, change).await.unwrap();
        }
        assert_eq!(file.end(), MIB);
    });
}

fn tells_holes_from_data(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, MIB).await;
        let status = async |offset, length| match file.status(queue, offset, length).await.unwrap()
        {
            Value::Extent(extent) => extent,
            Value::Unit => panic!("no extent"),
        };
        if !file.facts().can_punch {
            return;
        }
        assert_eq!(status(0, MIB).await, Extent { length: MIB, data: false });
        // Data that is not on the disk yet counts all the same (TRIALS 21).
        write(queue, &file, 256 * 1024, &pattern(1, 64 * 1024)).await;
        assert_eq!(status(0, MIB).await, Extent { length: 256 * 1024, data: false });
        let data = status(256 * 1024, MIB - 256 * 1024).await;
        assert_eq!(data, Extent { length: 64 * 1024, data: true });
        assert_eq!(status(256 * 1024, 4096).await, Extent { length: 4096, data: true });
        let change = Manage::Punch { offset: 256 * 1024, length: 64 * 1024 };
        file.manage(queue, change).await.unwrap();
        assert_eq!(status(0, MIB).await, Extent { length: MIB, data: false });
        assert_eq!(status(4 * MIB, 4096).await, Extent { length: 4096, data: false });
    });
}

fn two_loops_share_a_file(bed: Bed) {
    bed.run(async |queue, file| {
        const COUNT: u64 = 500;
        grow(queue, &file, 2 * COUNT * BLOCK).await;
        let other = spawn_thread("other", bed.options()).unwrap();
        let shared = file.clone();
        other.run(Box::new(move |queue| {
            Box::pin(async move {
                for n in 0..COUNT {
                    write(&queue, &shared, (2 * n + 1) * BLOCK, &pattern(2 * n + 2, 4096)).await;
                }
            })
        }));
        for n in 0..COUNT {
            write(queue, &file, 2 * n * BLOCK, &pattern(2 * n + 1, 4096)).await;
        }
        other.join().unwrap();
        for n in 0..2 * COUNT {
            assert_eq!(read(queue, &file, n * BLOCK, 4096).await, pattern(n + 1, 4096));
        }
    });
}

fn through_the_page_cache_any_request_works(bed: Bed) {
    bed.run(async |queue, file| {
        grow(queue, &file, MIB).await;
        write(queue, &file, 0, &pattern(1, 8192)).await;
        let Some(file) = file.buffered() else {
            assert_eq!(file.facts().request_align, 1);
            return;
        };
        assert_eq!(file.facts().request_align, 1);
        write(queue, &file, 100, &[7; 5]).await;
        let mut expected = pattern(1, 8192);
        expected[100..105].fill(7);
        assert_eq!(read(queue, &file, 0, 8192).await, expected);
        let odd = Segments::from_slice(&[9; 700]).slice(1..600);
        file.write(queue, 333, odd, Durability::Durable).await.unwrap();
        assert_eq!(read(queue, &file, 333, 599).await, [9; 599]);
    });
}

macro_rules! suite {
    ($($bed:ident: $value:expr;)*) => { suite!(@beds [
        reads_what_was_written
        reads_zeros_beyond_the_end
        refuses_writes_beyond_the_end
        refuses_unaligned_requests
        takes_memory_of_any_alignment_and_pieces
        durable_writes_and_flushes_complete
        many_operations_at_once
        dropped_completions_cancel_nothing
        a_loop_may_end_with_operations_in_flight
        grows_and_shrinks
        growth_steps_at_once_end_at_the_largest
        punches_and_zeroes
        tells_holes_from_data
        two_loops_share_a_file
        through_the_page_cache_any_request_works
    ] $($bed: $value;)*); };
    (@beds $tests:tt $($bed:ident: $value:expr;)*) => { $(suite!(@bed $tests $bed $value);)* };
    (@bed [$($test:ident)*] $bed:ident $value:expr) => {
        mod $bed {
            use super::*;
            $(#[test] fn $test() { super::$test($value); })*
        }
    };
}

suite! {
    memory: Bed::Memory;
    uring_direct: Bed::Host(Aio::IoUring, Cache::None);
    uring_buffered: Bed::Host(Aio::IoUring, Cache::Writeback);
    native_direct: Bed::Host(Aio::Native, Cache::None);
    native_directsync: Bed::Host(Aio::Native, Cache::DirectSync);
    native_buffered: Bed::Host(Aio::Native, Cache::Writeback);
    threads_direct: Bed::Host(Aio::Threads, Cache::None);
    threads_buffered: Bed::Host(Aio::Threads, Cache::Writeback);
    threads_writethrough: Bed::Host(Aio::Threads, Cache::Writethrough);
    uring_unsafe: Bed::Host(Aio::IoUring, Cache::Unsafe);
}
