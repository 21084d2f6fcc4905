//! What threads may do to each other, under `shuttle`: `cargo test -p stillpoint-engine --features shuttle`.
//!
//! The simulator runs the engine on one thread and sees every order of *tasks*; what it cannot see is
//! two threads in the middle of one step. That concerns the cache's frames, the stripe locks with the
//! registrations, and the in-flight allocations behind a slice's lock, and each is tried here under
//! thousands of schedules.

use std::sync::atomic::Ordering::SeqCst;

use shuttle::future::block_on;
use shuttle::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};
use shuttle::sync::{Arc, Mutex};
use shuttle::{check_random, thread};

use crate::cache::SliceCache;
use crate::qcow2::inflight::{Inflights, Next};
use crate::qcow2::mapping::Cluster;
use crate::tracker::{Mode, Tracker};

const SCHEDULES: usize = 5000;

#[test]
fn pinned_slice_is_the_one_asked_for_whatever_is_evicted_meanwhile() {
    check_random(
        || {
            // 16 frames is the least; more keys than that make every insertion evict.
            let cache = Arc::new(SliceCache::<()>::new(16, 40, 16 * 16));
            let loading = Arc::new(Mutex::new(()));
            for key in 0..16 {
                drop(cache.insert(key, |_| key));
            }
            let threads: Vec<_> = [[0, 16, 1], [1, 0, 17], [16, 17, 0]]
                .into_iter()
                .map(|keys| {
                    let (cache, loading) = (cache.clone(), loading.clone());
                    thread::spawn(move || {
                        for key in keys {
                            let pin = match cache.pin(key) {
                                Some(pin) => pin,
                                None => {
                                    let _one_at_a_time = loading.lock().unwrap();
                                    match cache.pin(key) {
                                        Some(pin) => pin,
                                        None => cache.insert(key, |_| key).expect("few pins"),
                                    }
                                }
                            };
                            assert_eq!((pin.word(0), pin.word(1)), (key, key));
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        },
        SCHEDULES,
    );
}

#[test]
fn cache_that_grows_hands_out_each_frame_once() {
    check_random(
        || {
            // 17 frames, and 20 after growing: loading makes the last ones, then evicts.
            let cache = Arc::new(SliceCache::<()>::new(16, 17, 1 << 10));
            for key in 0..15 {
                drop(cache.insert(key, |_| key));
            }
            let growing = {
                let cache = cache.clone();
                thread::spawn(move || cache.grow(20))
            };
            let threads: Vec<_> = [[15, 0, 1, 2], [16, 3, 4, 5]]
                .into_iter()
                .map(|keys| {
                    let cache = cache.clone();
                    thread::spawn(move || {
                        for key in keys {
                            let pin = cache.pin(key);
                            let pin = pin.or_else(|| cache.insert(key, |_| key)).expect("few pins");
                            assert_eq!((pin.word(0), pin.word(1)), (key, key));
                        }
                    })
                })
                .collect();
            growing.join().unwrap();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            for key in 17..20 {
                assert_eq!(cache.insert(key, |_| key).expect("few pins").word(1), key);
            }
        },
        SCHEDULES,
    );
}

#[test]
fn both_words_of_an_entry_are_of_one_version() {
    check_random(
        || {
            let cache = Arc::new(SliceCache::<()>::new(16, 1, 16));
            drop(cache.insert(0, |_| 0));
            let writers: Vec<_> = [1u64, 2]
                .into_iter()
                .map(|value| {
                    let cache = cache.clone();
                    thread::spawn(move || {
                        let pin = cache.pin(0).unwrap();
                        pin.edit().store_pair(0, value, value * 10);
                    })
                })
                .collect();
            let pin = cache.pin(0).unwrap();
            for _ in 0..2 {
                let (first, second) = pin.word_pair(0);
                assert_eq!(first * 10, second);
            }
            writers.into_iter().for_each(|thread| thread.join().unwrap());
        },
        SCHEDULES,
    );
}

#[test]
fn every_edit_is_in_some_commit() {
    check_random(
        || {
            let cache = Arc::new(SliceCache::<()>::new(16, 1, 16));
            drop(cache.insert(0, |_| 0));
            let editor = {
                let cache = cache.clone();
                thread::spawn(move || {
                    let pin = cache.pin(0).unwrap();
                    pin.edit().store(0, 7);
                    pin.edit().store(1, 8);
                })
            };
            let mut written = [0, 0];
            let mut commit = || {
                for slice in cache.take_dirty() {
                    written = [slice.words[0], slice.words[1]];
                }
            };
            commit();
            editor.join().unwrap();
            commit();
            assert_eq!(written, [7, 8]);
            assert!(cache.is_clean());
        },
        SCHEDULES,
    );
}

#[test]
fn exclusive_holder_is_alone_and_everybody_gets_a_turn() {
    check_random(
        || {
            let tracker = Arc::new(Tracker::new());
            // Shared holders count up from 0; an exclusive one makes it negative.
            let holders = Arc::new(AtomicI32::new(0));
            let threads: Vec<_> = [Mode::Shared, Mode::Exclusive, Mode::Shared, Mode::Exclusive]
                .into_iter()
                .map(|mode| {
                    let (tracker, holders) = (tracker.clone(), holders.clone());
                    thread::spawn(move || {
                        block_on(async {
                            let mut entered = tracker.enter(0..1, mode).await;
                            if mode == Mode::Exclusive {
                                assert_eq!(holders.fetch_sub(100, SeqCst), 0);
                                holders.fetch_add(101, SeqCst);
                                entered.demote();
                            } else {
                                assert!(holders.fetch_add(1, SeqCst) >= 0);
                            }
                            assert!(holders.fetch_sub(1, SeqCst) > 0);
                        });
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        },
        SCHEDULES,
    );
}

#[test]
fn quiesce_sees_the_end_of_everybody_who_saw_the_old_state() {
    check_random(
        || {
            let tracker = Arc::new(Tracker::new());
            let freed = Arc::new(AtomicBool::new(false));
            let reused = Arc::new(AtomicBool::new(false));
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let (tracker, freed, reused) = (tracker.clone(), freed.clone(), reused.clone());
                    thread::spawn(move || {
                        block_on(async {
                            let _entered = tracker.enter(0..1, Mode::Shared).await;
                            if !freed.load(SeqCst) {
                                // It resolved its range by the old mapping: R4.
                                thread::yield_now();
                                assert!(!reused.load(SeqCst));
                            }
                        });
                    })
                })
                .collect();
            freed.store(true, SeqCst);
            block_on(tracker.quiesce());
            reused.store(true, SeqCst);
            readers.into_iter().for_each(|thread| thread.join().unwrap());
        },
        SCHEDULES,
    );
}

#[test]
fn joined_writes_and_the_copy_fill_a_cluster_before_it_is_published() {
    const OLD: u64 = u64::MAX;
    check_random(
        || {
            let cache = Arc::new(SliceCache::<Inflights>::new(16, 1, 16));
            drop(cache.insert(0, |_| 0));
            // One cluster of four bytes, zero on the disk's side; the host area is stale.
            let old =
                Cluster { host: Some(0), copied: true, compressed: None, allocated: 0, zero: 1 };
            let host: Arc<[AtomicU64; 4]> = Arc::new([const { AtomicU64::new(99) }; 4]);
            let threads: Vec<_> = [0u64, 1, 3]
                .into_iter()
                .map(|byte| {
                    let (cache, host) = (cache.clone(), host.clone());
                    thread::spawn(move || {
                        write_one(&cache, &host, &old, byte);
                        assert_eq!(host[byte as usize].load(SeqCst), byte + 1, "published over");
                        assert_eq!(cache.pin(0).unwrap().word(0), 1, "answered unpublished");
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(host.each_ref().map(|byte| byte.load(SeqCst)), [1, 2, OLD, 4]);
        },
        SCHEDULES,
    );

    /// The steps of `write.rs` without its files: word 0 of the slice says "published".
    fn write_one(
        cache: &Arc<SliceCache<Inflights>>,
        host: &[AtomicU64; 4],
        old: &Cluster,
        byte: u64,
    ) {
        let pin = cache.pin(0).unwrap();
        let share = loop {
            let mut slice = pin.edit();
            if slice.word(0) == 1 {
                drop(slice);
                host[byte as usize].store(byte + 1, SeqCst);
                return;
            }
            if slice.extra().find(0).is_none() {
                slice.extra().begin(0, old, 1, None, 0);
            }
            let inflight = slice.extra().find(0).unwrap();
            match inflight.join(byte..byte + 1, 1, 1, 0) {
                Ok(share) => break share,
                Err(ended) => {
                    drop(slice);
                    block_on(ended.wait()).unwrap();
                }
            }
        };
        host[byte as usize].store(byte + 1, SeqCst);
        let (next, publication, _) = pin.edit().extra().finish(&share, true);
        assert!(publication.is_none(), "the host area is stale");
        match next {
            Next::Done => unreachable!("a fill writer fills or waits"),
            Next::Wait(ended) => block_on(ended.wait()).unwrap(),
            Next::Fill => {
                let (_, gaps) = pin.edit().extra().gaps(0, 4);
                for gap in gaps.into_iter().flatten() {
                    host[gap as usize].store(OLD, SeqCst);
                }
                let mut slice = pin.edit();
                let (publication, _, filled) = slice.extra().filled(0, Ok(()));
                assert_eq!(publication.map(|publication| publication.units), Some(1));
                slice.store(0, 1);
                drop(slice);
                filled.tell();
            }
        }
    }
}
