//! Waiting for SIGTERM, SIGINT and SIGHUP on a loop.
//!
//! The handler only writes to an eventfd, so it needs no signal mask and works whichever thread the
//! signal hits.
//!
//! Deliberately absent: other signals, and putting the old handlers back.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use stillpoint_io::{Error, Queue, Result};

use crate::event_loop::driver::{Driver, Interest};
use crate::net::next_generation;

/// Which signal asked the process to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM.
    Terminate,
    /// SIGINT.
    Interrupt,
    /// SIGHUP: the terminal has gone.
    HangUp,
}

static BELL: OnceLock<OwnedFd> = OnceLock::new();
static BELL_FD: AtomicI32 = AtomicI32::new(-1);
static LAST: AtomicI32 = AtomicI32::new(0);

extern "C" fn handle(signal: libc::c_int) {
    LAST.store(signal, Ordering::Relaxed);
    let one = 1u64.to_ne_bytes();
    // SAFETY: `write` may be called in a handler; the descriptor stays open for ever, and errno is
    // put back for whatever was interrupted.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(BELL_FD.load(Ordering::Relaxed), one.as_ptr().cast(), one.len());
        *libc::__errno_location() = errno;
    }
}

/// SIGTERM, SIGINT and, unless it was ignored (`nohup`), SIGHUP, caught for as long as the process lives.
#[derive(Debug)]
pub struct StopSignals {
    generation: u32,
}

impl StopSignals {
    /// Catches them from now on; they no longer end the process by themselves.
    ///
    /// # Errors
    /// If the host refuses a handler.
    pub fn catch() -> Result<StopSignals> {
        if BELL.get().is_none() {
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|errno| Error::from_errno("make an eventfd", errno.raw_os_error()))?;
            let bell = BELL.get_or_init(|| bell);
            BELL_FD.store(bell.as_raw_fd(), Ordering::Relaxed);
        }
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            // SAFETY: the actions are plain records, filled in before the call or by it; the handler
            // is async-signal-safe.
            let result = unsafe {
                let mut before: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut before);
                if signal == libc::SIGHUP && before.sa_sigaction == libc::SIG_IGN {
                    continue;
                }
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handle as extern "C" fn(libc::c_int) as usize;
                action.sa_flags = libc::SA_RESTART;
                libc::sigemptyset(&raw mut action.sa_mask);
                libc::sigaction(signal, &raw const action, std::ptr::null_mut())
            };
            if result != 0 {
                return Err(Error::from_errno("catch signals", crate::errno()));
            }
        }
        Ok(StopSignals { generation: next_generation() })
    }

    /// Waits for the next one (or for one that came since the last call).
    ///
    /// # Errors
    /// If `queue` is not a host loop's.
    pub async fn next(&self, queue: &Queue) -> Result<Signal> {
        let bell = BELL.get().expect("made by `catch`");
        let driver = Driver::of(queue)?;
        loop {
            if rustix::io::read(bell, &mut [0u8; 8]).is_ok() {
                return Ok(match LAST.load(Ordering::Relaxed) {
                    libc::SIGINT => Signal::Interrupt,
                    libc::SIGHUP => Signal::HangUp,
                    _ => Signal::Terminate,
                });
            }
            let fd = bell.as_raw_fd();
            driver.exhausted(fd, self.generation, Interest::Read);
            driver.ready(fd, self.generation, Interest::Read).await?;
        }
    }
}
