//! The executor: seeded order, virtual time, deadlocks, cuts.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::pending;
use stillpoint_io::{Value, completion};
use stillpoint_sim::Executor;

/// The order in which eight tasks on two queues end, and the history's hash.
fn order(seed: u64) -> (Vec<usize>, u64) {
    let executor = Executor::new(seed);
    let queues = [executor.queue("a"), executor.queue("b")];
    let order = Rc::new(RefCell::new(Vec::new()));
    let seen = order.clone();
    executor.run(async move {
        let mut ends = Vec::new();
        for index in 0..8 {
            let (promise, end) = completion();
            ends.push(end);
            let (queue, order) = (queues[index % 2].clone(), seen.clone());
            queues[index % 2].spawn(async move {
                queue.sleep(Duration::from_micros(queue.random() % 3)).await;
                order.borrow_mut().push(index);
                promise.fulfil(Ok(Value::Unit));
            });
        }
        for end in ends {
            end.await.unwrap();
        }
    });
    (order.take(), executor.history())
}

#[test]
fn a_seed_decides_everything() {
    assert_eq!(order(1), order(1));
    assert!((2..20).any(|seed| order(seed).0 != order(1).0));
    assert!((2..20).all(|seed| order(seed).1 != order(1).1));
}

#[test]
fn time_jumps_to_the_next_timer() {
    let executor = Executor::new(1);
    let queue = executor.queue("a");
    let clock = queue.clone();
    executor.run(async move { queue.sleep(Duration::from_secs(86_400)).await });
    assert_eq!(clock.now(), Duration::from_secs(86_400));
    assert!(executor.steps() < 10);
}

#[test]
fn a_deadlock_names_the_seed_and_those_who_wait() {
    let executor = Executor::new(0xbad);
    let queue = executor.queue("lonely");
    let run = || {
        executor.run(async move {
            queue.spawn(pending());
            pending::<()>().await;
        })
    };
    let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("deadlock; seed 0xbad"), "{text}");
    assert!(text.contains("(main)") && text.contains("spawned on lonely"), "{text}");
}

#[test]
fn a_cut_drops_tasks_where_they_stand() {
    struct Flag(Rc<Cell<bool>>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    let executor = Executor::new(1);
    let queue = executor.queue("a");
    let dropped = Rc::new(Cell::new(false));
    let flag = Flag(dropped.clone());
    let end = executor.run_until(10, || {}, async move {
        let _flag = flag;
        loop {
            queue.sleep(Duration::from_micros(1)).await;
        }
        #[allow(unreachable_code)]
        ()
    });
    assert!(end.is_none() && dropped.get());
}

#[test]
fn background_jobs_run_among_the_tasks() {
    let executor = Executor::new(1);
    let background = executor.background();
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (flag, queue) = (done.clone(), executor.queue("a"));
    executor.run(async move {
        background.run(Box::new(move |queue| {
            Box::pin(async move {
                queue.sleep(Duration::from_micros(5)).await;
                flag.store(true, std::sync::atomic::Ordering::Relaxed);
            })
        }));
        queue.sleep(Duration::from_micros(10)).await;
    });
    assert!(done.load(std::sync::atomic::Ordering::Relaxed));
}
