//! The host beneath the engine: `stillpoint_io`'s contracts over Linux.
//!
//! | file | what it holds |
//! |---|---|
//! | [`event_loop`] | one thread's loop: tasks, timers, chance, and the reactor it sleeps in |
//! | [`mod@file`] | [`HostFiles`] and [`HostFile`]: opening, facts, image locks, reads and writes, shape |
//! | [`net`] | [`Listener`] and [`Stream`]: unix and TCP sockets on any loop |
//! | [`signals`] | waiting for SIGTERM and SIGINT on a loop |
//!
//! # The road of a read
//!
//! [`HostFile`]'s `read` checks the request and makes a transfer of it; the loop's driver keeps the
//! transfer (and so its memory, R2) and queues it with an engine: the ring, Linux AIO or the thread
//! pool. Once per turn the loop hands over everything queued in one system call, sleeps in the same
//! call where it can, and settles what has ended: short transfers go round again, the rest fulfil
//! their promises.
//!
//! Deliberately absent: image formats, mappings, policies about what to write where.

pub mod event_loop;
pub mod file;
pub mod net;
mod pool;
pub mod signals;
mod slab;
mod transfer;

pub use event_loop::{Aio, LoopOptions, LoopThread, run, spawn_thread};
pub use file::{Cache, FileSystem, HostFacts, HostFile, HostFiles, Reach};
pub use net::{Listener, Part, Stream};

/// The calling thread's last error number, for calls that go through libc.
fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
