//! What other threads hand to a loop: tasks to wake and results of offloaded work.
//!
//! One word says how the loop is: awake, awake with mail, or asleep. Only the sender that finds it
//! asleep pays for the eventfd's system call; all others leave their mail and go.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use async_task::Runnable;
use rustix::event::{EventfdFlags, eventfd};
use stillpoint_io::{Error, Result, Value};

const AWAKE: u8 = 0;
const MAIL: u8 = 1;
const ASLEEP: u8 = 2;

pub(crate) struct Mailbox {
    state: AtomicU8,
    /// The loop's main future was woken.
    main: AtomicBool,
    mail: Mutex<Mail>,
    bell: OwnedFd,
}

/// What lies in a mailbox.
#[derive(Default)]
pub(crate) struct Mail {
    pub(crate) runnables: Vec<Runnable>,
    /// Offloaded work that has ended: its number in the driver's table, and what came of it.
    pub(crate) results: Vec<(u32, Result<Value>)>,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Mailbox> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::from_errno("make an eventfd", errno.raw_os_error()))?;
        Ok(Mailbox {
            state: AtomicU8::new(AWAKE),
            main: AtomicBool::new(false),
            mail: Mutex::default(),
            bell,
        })
    }

    /// What becomes readable when the loop has to wake up.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(crate) fn send_runnable(&self, runnable: Runnable) {
        self.mail.lock().unwrap().runnables.push(runnable);
        self.ring();
    }

    pub(crate) fn send_result(&self, index: u32, result: Result<Value>) {
        self.mail.lock().unwrap().results.push((index, result));
        self.ring();
    }

    pub(crate) fn wake_main(&self) {
        self.main.store(true, Ordering::Relaxed);
        self.ring();
    }

    fn ring(&self) {
        // ORDER: releases the mail above to the loop's swap in `collect`; the swap's total order
        // with `fall_asleep` decides who sees whom, so that no mail is slept over.
        if self.state.swap(MAIL, Ordering::AcqRel) == ASLEEP {
            // An eventfd write fails only when the counter is full, and then it is readable anyway.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Announces that the loop is about to sleep; false if there is mail instead.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.state.compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Takes what came in into `mail` (empty on entry); true if the main future was woken.
    pub(crate) fn collect(&self, mail: &mut Mail) -> bool {
        if self.state.load(Ordering::Relaxed) == AWAKE {
            return false;
        }
        // ORDER: acquires what senders left before their swap; what comes later rings again.
        if self.state.swap(AWAKE, Ordering::AcqRel) != MAIL {
            return false;
        }
        std::mem::swap(&mut *self.mail.lock().unwrap(), mail);
        self.main.swap(false, Ordering::Relaxed)
    }
}
