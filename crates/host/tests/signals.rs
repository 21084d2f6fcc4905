//! Signals on the loop; alone in its process, whose signals it catches.

use std::time::Duration;

use stillpoint_host::signals::{Signal, StopSignals};
use stillpoint_host::{Aio, LoopOptions, run};

#[test]
fn signals_arrive_on_the_loop() {
    let signals = StopSignals::catch().unwrap();
    for aio in [Aio::IoUring, Aio::Threads] {
        run(LoopOptions { aio, depth: 8 }, async |queue| {
            for (number, signal) in
                [(libc::SIGTERM, Signal::Terminate), (libc::SIGINT, Signal::Interrupt)]
            {
                let on = queue.clone();
                queue.spawn(async move {
                    on.sleep(Duration::from_millis(5)).await;
                    // SAFETY: the signal is caught.
                    unsafe { libc::raise(number) };
                });
                assert_eq!(signals.next(&queue).await.unwrap(), signal);
            }
        })
        .unwrap();
    }
}
