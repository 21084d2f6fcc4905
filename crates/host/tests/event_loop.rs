//! The event loop by itself: tasks, timers, wakes from other threads, jobs, and how it ends.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use futures_util::future::{join_all, poll_fn};
use stillpoint_host::{Aio, LoopOptions, run, spawn_thread};
use stillpoint_io::{Background, Kind};

fn options(aio: Aio) -> LoopOptions {
    LoopOptions { aio, depth: 32 }
}

/// Both reactors: the ring and epoll.
const REACTORS: [Aio; 2] = [Aio::IoUring, Aio::Threads];

#[test]
fn main_returns_its_value_and_may_borrow() {
    let text = String::from("borrowed");
    for aio in REACTORS {
        let length = run(options(aio), async |_| text.len()).unwrap();
        assert_eq!(length, 8);
    }
}

#[test]
fn a_loop_inside_a_loop_is_refused() {
    run(options(Aio::IoUring), async |_| {
        let error = run(options(Aio::Threads), async |_| ()).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
    })
    .unwrap();
}

#[test]
fn engines_have_names() {
    for aio in Aio::ALL {
        assert_eq!(aio.to_string().parse::<Aio>().unwrap(), aio);
    }
    assert_eq!("posix".parse::<Aio>().unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn timers_fire_in_order_and_not_early() {
    for aio in REACTORS {
        let order = run(options(aio), async |queue| {
            let order = Rc::new(RefCell::new(Vec::new()));
            let sleeps = [30u64, 5, 20, 0, 10].map(|ms| {
                let (queue, order) = (queue.clone(), order.clone());
                async move {
                    let before = queue.now();
                    queue.sleep(Duration::from_millis(ms)).await;
                    assert!(queue.now() - before >= Duration::from_millis(ms));
                    order.borrow_mut().push(ms);
                }
            });
            join_all(sleeps).await;
            order.take()
        });
        assert_eq!(order.unwrap(), [0, 5, 10, 20, 30]);
    }
}

#[test]
fn sleeps_that_were_given_up_are_forgotten() {
    run(options(Aio::Threads), async |queue| {
        for _ in 0..10_000 {
            let mut sleep = Box::pin(queue.sleep(Duration::from_secs(3600)));
            poll_fn(|cx| {
                assert!(sleep.as_mut().poll(cx).is_pending());
                Poll::Ready(())
            })
            .await;
        }
        queue.sleep(Duration::from_millis(1)).await;
    })
    .unwrap();
}

#[test]
fn random_numbers_differ() {
    run(options(Aio::Threads), async |queue| {
        let mut seen: Vec<u64> = (0..1000).map(|_| queue.random()).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 1000);
    })
    .unwrap();
}

#[test]
fn tasks_that_never_rest_do_not_starve_timers() {
    for aio in REACTORS {
        run(options(aio), async |queue| {
            queue.spawn(poll_fn(|cx| {
                cx.waker().wake_by_ref();
                Poll::Pending
            }));
            queue.sleep(Duration::from_millis(20)).await;
        })
        .unwrap();
    }
}

/// A value that one thread puts and another waits for.
#[derive(Default)]
struct Slot(Mutex<(Option<u64>, Option<Waker>)>);

impl Slot {
    fn put(&self, value: u64) {
        let waker = {
            let mut slot = self.0.lock().unwrap();
            slot.0 = Some(value);
            slot.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    async fn take(&self) -> u64 {
        poll_fn(|cx| {
            let mut slot = self.0.lock().unwrap();
            match slot.0.take() {
                Some(value) => Poll::Ready(value),
                None => {
                    slot.1 = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

#[test]
fn no_wake_from_another_thread_is_lost() {
    for aio in REACTORS {
        // Two loops play ping-pong on 8 slots each way, while a plain thread pokes both mains.
        let there: Arc<Vec<Slot>> = Arc::new((0..8).map(|_| Slot::default()).collect());
        let back: Arc<Vec<Slot>> = Arc::new((0..8).map(|_| Slot::default()).collect());
        const ROUNDS: u64 = 3000;
        let other = spawn_thread("pong", options(aio)).unwrap();
        for n in 0..8 {
            let (there, back) = (there.clone(), back.clone());
            other.run(Box::new(move |_| {
                Box::pin(async move {
                    for round in 0..ROUNDS {
                        assert_eq!(there[n].take().await, round);
                        back[n].put(round);
                    }
                })
            }));
        }
        run(options(aio), async |queue| {
            let games = (0..8).map(|n| {
                let (there, back) = (there.clone(), back.clone());
                let done = Rc::new(Cell::new(false));
                let ended = done.clone();
                queue.spawn(async move {
                    for round in 0..ROUNDS {
                        there[n].put(round);
                        assert_eq!(back[n].take().await, round);
                    }
                    ended.set(true);
                });
                done
            });
            let games: Vec<_> = games.collect();
            while !games.iter().all(|done| done.get()) {
                queue.sleep(Duration::from_millis(1)).await;
            }
        })
        .unwrap();
        other.join().unwrap();
    }
}

#[test]
fn a_main_future_is_woken_by_other_threads() {
    for aio in REACTORS {
        let slot = Arc::new(Slot::default());
        let put = slot.clone();
        let thread = std::thread::spawn(move || {
            for n in 0..200 {
                std::thread::sleep(Duration::from_micros(n * 7 % 300));
                while put.0.lock().unwrap().0.is_some() {
                    std::thread::yield_now();
                }
                put.put(n);
            }
        });
        run(options(aio), async |_| {
            for n in 0..200 {
                assert_eq!(slot.take().await, n);
            }
        })
        .unwrap();
        thread.join().unwrap();
    }
}

/// Counts its drops, on the thread where it was made only.
struct Counted(Arc<AtomicUsize>, std::thread::ThreadId);

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(std::thread::current().id(), self.1);
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn tasks_are_dropped_at_home_when_the_loop_ends() {
    for aio in REACTORS {
        let dropped = Arc::new(AtomicUsize::new(0));
        let slots: Arc<Vec<Slot>> = Arc::new((0..100).map(|_| Slot::default()).collect());
        let stop = Arc::new(AtomicUsize::new(0));
        let waking = {
            let (slots, stop) = (slots.clone(), stop.clone());
            std::thread::spawn(move || {
                while stop.load(Ordering::Relaxed) == 0 {
                    slots.iter().for_each(|slot| slot.put(1));
                }
            })
        };
        for _ in 0..20 {
            run(options(aio), async |queue| {
                for n in 0..100 {
                    let slots = slots.clone();
                    let counted = Counted(dropped.clone(), std::thread::current().id());
                    queue.spawn(async move {
                        let _counted = counted;
                        loop {
                            slots[n].take().await;
                        }
                    });
                }
                queue.sleep(Duration::from_micros(500)).await;
            })
            .unwrap();
        }
        stop.store(1, Ordering::Relaxed);
        waking.join().unwrap();
        assert_eq!(dropped.load(Ordering::Relaxed), 2000);
    }
}

#[test]
fn jobs_end_before_a_thread_is_joined() {
    for aio in REACTORS {
        let done = Arc::new(AtomicUsize::new(0));
        let thread = spawn_thread("jobs", options(aio)).unwrap();
        for n in 0..50u64 {
            let done = done.clone();
            thread.run(Box::new(move |queue| {
                Box::pin(async move {
                    queue.sleep(Duration::from_millis(n % 7)).await;
                    done.fetch_add(1, Ordering::Relaxed);
                })
            }));
        }
        thread.join().unwrap();
        assert_eq!(done.load(Ordering::Relaxed), 50);
    }
}

#[test]
fn a_panic_in_a_task_ends_the_loop_and_is_passed_on() {
    let result = std::panic::catch_unwind(|| {
        run(options(Aio::IoUring), async |queue| {
            queue.spawn(async { panic!("expected by the test") });
            queue.sleep(Duration::from_secs(3600)).await;
        })
    });
    assert!(result.is_err());
    // The thread can run another loop afterwards.
    run(options(Aio::IoUring), async |_| ()).unwrap();
}
