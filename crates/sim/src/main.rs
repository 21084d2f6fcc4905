//! Plays histories of the engine's disk from seeds, until one fails or there are enough.
//!
//! A failure is shrunk, printed with its seed, and makes the program end with 1.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use stillpoint_sim::disk::from_seed;
use stillpoint_sim::history::shrink;

const USAGE: &str =
    "usage: stillpoint-sim [--first SEED] [--seeds COUNT] [--minutes MINUTES] [--faults]
                      [--shrink TRIES] [--failures COUNT] [--verbose]

Plays COUNT histories (default 1000), or as many as MINUTES allow, from SEED on (default 0).
--faults       operations of the simulated disk fail, too
--shrink       how often a failing history is tried again in shorter forms (default 300; 0: never)
--failures     how many failures to look for before giving up (default 1)
--verbose      prints the last events of each failing history, too";

struct Args {
    first: u64,
    seeds: u64,
    minutes: Option<u64>,
    faults: bool,
    shrink: usize,
    failures: u64,
    verbose: bool,
}

fn parse() -> Option<Args> {
    let mut args = Args {
        first: 0,
        seeds: 1000,
        minutes: None,
        faults: false,
        shrink: 300,
        failures: 1,
        verbose: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || words.next()?.parse::<u64>().ok();
        match &word[..] {
            "--first" => args.first = number()?,
            "--seeds" => args.seeds = number()?,
            "--minutes" => (args.minutes, args.seeds) = (Some(number()?), u64::MAX),
            "--faults" => args.faults = true,
            "--shrink" => args.shrink = number()? as usize,
            "--failures" => args.failures = number()?,
            "--verbose" => args.verbose = true,
            _ => return None,
        }
    }
    Some(args)
}

fn main() -> ExitCode {
    let Some(args) = parse() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let begun = Instant::now();
    let limit = args.minutes.map(|minutes| Duration::from_secs(60 * minutes));
    let (mut played, mut failed) = (0, 0);
    for seed in args.first..args.first.saturating_add(args.seeds) {
        if limit.is_some_and(|limit| begun.elapsed() > limit) || failed == args.failures {
            break;
        }
        let (subject, history) = from_seed(seed, args.faults);
        played += 1;
        let Err(failure) = history.try_play(&subject) else { continue };
        failed += 1;
        println!("FAILED seed {seed}: {failure}\n{subject:?}");
        let (history, failure) =
            shrink(&subject, &history, args.shrink).unwrap_or((history, failure));
        println!("shrunk: {failure}\n{history}");
        if args.verbose {
            let play = std::panic::AssertUnwindSafe(|| history.play(&subject));
            let _ = std::panic::catch_unwind(play);
        }
    }
    println!("{played} histories in {:.1} s, {failed} failed", begun.elapsed().as_secs_f64());
    ExitCode::from(u8::from(failed > 0))
}
