//! Printing that outlives its reader.
//!
//! `println!` panics when nobody reads any more or the disk is full; a program that looks after disks
//! must not end for that. `out!`, `outln!` and `errln!` print like `print!`, `println!` and `eprintln!`,
//! go on whatever becomes of it, and [`failed`] tells whether standard output lost anything.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static FAILED: AtomicBool = AtomicBool::new(false);

/// Prints to standard output.
pub fn print(text: Arguments<'_>) {
    let mut stdout = std::io::stdout().lock();
    // Flushed at once: what stays in a buffer would fail unseen.
    let Err(error) = stdout.write_fmt(text).and_then(|()| stdout.flush()) else { return };
    // A reader that has seen enough is told nothing.
    if !FAILED.swap(true, Relaxed) && error.kind() != ErrorKind::BrokenPipe {
        print_error(format_args!("stillpoint: cannot print to standard output: {error}\n"));
    }
}

/// Prints to standard error, or nowhere.
pub fn print_error(text: Arguments<'_>) {
    let _nobody_to_tell = std::io::stderr().lock().write_fmt(text);
}

/// Whether standard output has lost something.
pub fn failed() -> bool {
    FAILED.load(Relaxed)
}

macro_rules! out {
    ($($text:tt)*) => { $crate::output::print(format_args!($($text)*)) };
}

macro_rules! outln {
    () => { $crate::output::print(format_args!("\n")) };
    ($($text:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($text)*))) };
}

macro_rules! errln {
    ($($text:tt)*) => { $crate::output::print_error(format_args!("{}\n", format_args!($($text)*))) };
}
