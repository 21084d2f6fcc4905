//! Plays histories of the engine's disk from seeds, on all cores, until one fails or there are enough.
//!
//! A failure is shrunk, printed with its seed, and makes the program end with 1. With `--mutant` a
//! rule of the engine is broken, with `--lie` the disk beneath breaks its word: a failure is then what
//! is looked for, and not to find one ends the program with 1.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use stillpoint_sim::disk::Scale;
use stillpoint_sim::history::shrink;
use stillpoint_sim::wrong::{history, try_play};
use stillpoint_sim::{Coverage, Wrong, exhaustive};

/// Plays histories of the engine's disk, with power cuts and faults, and judges what is left.
#[derive(Debug, Parser)]
struct Args {
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// How many histories to play.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// Plays as many as so many minutes allow.
    #[arg(long, conflicts_with = "seeds")]
    minutes: Option<u64>,
    /// How metadata is committed; `off` is plain qcow2 order.
    #[arg(long, value_enum, default_value_t = Mode::Off)]
    mode: Mode,
    /// Histories of at least 200 requests, each cut about a hundred times, instead of short ones.
    #[arg(long)]
    long: bool,
    /// Every power cut of every small history, instead of random ones.
    #[arg(long, conflicts_with_all = ["long", "minutes", "mutant", "lie"])]
    exhaustive: bool,
    /// Breaks a rule of the engine: its name, or `all` of them in turn.
    #[arg(long, value_name = "NAME")]
    mutant: Option<String>,
    /// Lets the disk beneath lie: a lie's name, or `all` of them in turn.
    #[arg(long, value_name = "NAME", conflicts_with = "mutant")]
    lie: Option<String>,
    /// Puts images that power cuts have left into a folder, one of each history at most, with their
    /// backing files and what they are to read as.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["exhaustive", "mutant", "lie"])]
    samples: Option<PathBuf>,
    /// How often a failing history is tried again in shorter forms.
    #[arg(long, default_value_t = 300, value_name = "TRIES")]
    shrink: usize,
    /// How many failures to look for.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    failures: u64,
    /// Prints the last events of each failing history, too.
    #[arg(long)]
    verbose: bool,
    /// How many threads play; all cores' unless given.
    #[arg(long, value_name = "COUNT")]
    threads: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Off,
}

/// What a search came to.
struct Search {
    histories: u64,
    coverage: Coverage,
    failures: Vec<(u64, String)>,
    time: Duration,
}

/// Plays seeds until there are enough failures, or no more seeds or time.
fn search(args: &Args, wrong: Option<Wrong>, bar: &ProgressBar) -> Search {
    let begun = Instant::now();
    let limit = args.minutes.map(|minutes| Duration::from_secs(60 * minutes));
    let last = if limit.is_some() { u64::MAX } else { args.first.saturating_add(args.seeds) };
    let (next, done) = (AtomicU64::new(args.first), AtomicBool::new(false));
    let found = Mutex::new((0, Coverage::default(), Vec::new()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Relaxed);
            let late = limit.is_some_and(|limit| begun.elapsed() > limit);
            if seed >= last || late || done.load(Relaxed) {
                return;
            }
            let scale = scale(args, wrong, seed);
            let (mut subject, history) = history(seed, scale, wrong);
            subject.sample = args.samples.as_ref().map(|folder| folder.join(seed.to_string()));
            let played = try_play(&subject, &history, wrong);
            let mut found = found.lock().unwrap();
            found.0 += 1;
            bar.inc(1);
            match played {
                Ok(played) => found.1 += played.coverage,
                Err(failure) => found.2.push((seed, failure)),
            }
            done.store(found.2.len() as u64 >= args.failures, Relaxed);
            bar.set_message(format!("{} cuts, {} failures", found.1.cuts, found.2.len()));
        }
    };
    on_all_threads(args, work);
    let (histories, coverage, mut failures) = found.into_inner().unwrap();
    failures.sort_unstable_by_key(|failure| failure.0);
    Search { histories, coverage, failures, time: begun.elapsed() }
}

fn on_all_threads(args: &Args, work: impl Fn() + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..args.threads.unwrap_or(cores) {
            scope.spawn(&work);
        }
    });
}

/// Plays every small history, and cuts each in every way.
fn exhaust(args: &Args) -> ExitCode {
    let begun = Instant::now();
    let small = exhaustive::all();
    let bar = progress(Some(small.len() as u64));
    let next = AtomicUsize::new(0);
    let found = Mutex::new((Coverage::default(), Vec::new()));
    on_all_threads(args, || {
        while let Some(small) = small.get(next.fetch_add(1, Relaxed)) {
            let proved = small.prove(args.first);
            let mut found = found.lock().unwrap();
            bar.inc(1);
            match proved {
                Ok(coverage) => found.0 += coverage,
                Err(failure) => found.1.push((small, failure)),
            }
            bar.set_message(format!("{} cuts, {} failures", found.0.cuts, found.1.len()));
        }
    });
    bar.finish_and_clear();
    let (coverage, failures) = found.into_inner().unwrap();
    for (small, failure) in failures.iter().take(args.failures as usize) {
        println!("FAILED: {failure}\n{:?}\n{}", small.subject, small.script);
    }
    println!(
        "{} small histories, {} different power cuts in {:.1} s: {} failed",
        small.len(),
        coverage.cuts,
        begun.elapsed().as_secs_f64(),
        failures.len()
    );
    ExitCode::from(u8::from(!failures.is_empty()))
}

fn scale(args: &Args, wrong: Option<Wrong>, seed: u64) -> Scale {
    match wrong {
        _ if args.long => Scale::Long,
        None => Scale::Short,
        Some(_) => Wrong::scale(seed),
    }
}

fn progress(histories: Option<u64>) -> ProgressBar {
    let (bar, style) = match histories {
        None => (ProgressBar::no_length(), "{elapsed} {pos} histories, {msg}"),
        Some(count) => {
            (ProgressBar::new(count), "{elapsed} {wide_bar} {pos}/{len} histories, {msg}")
        }
    };
    bar.with_style(ProgressStyle::with_template(style).expect("a template that is there"))
}

/// Plays on an engine and a disk that keep their rules; a failure is a fault.
fn prove(args: &Args) -> ExitCode {
    let bar = progress(args.minutes.is_none().then_some(args.seeds));
    let search = search(args, None, &bar);
    bar.finish_and_clear();
    for (seed, failure) in &search.failures {
        let (subject, history) = history(*seed, scale(args, None, *seed), None);
        println!("FAILED seed {seed}: {failure}\n{subject:?}");
        let (history, failure) =
            shrink(&subject, &history, args.shrink).unwrap_or((history, failure.clone()));
        println!("shrunk: {failure}\n{history}");
        if args.verbose {
            let play = std::panic::AssertUnwindSafe(|| history.play(&subject));
            let _ = std::panic::catch_unwind(play);
        }
    }
    let Search { histories, coverage, failures, time } = search;
    println!("{coverage}");
    println!(
        "{histories} histories, {} power cuts in {:.1} s: {} failed; {} pairs that no cut fell into",
        coverage.cuts,
        time.as_secs_f64(),
        failures.len(),
        coverage.blank(),
    );
    ExitCode::from(u8::from(!failures.is_empty()))
}

/// Looks for the faults that were put in on purpose, one after another, and prints a table of them.
fn find(args: &Args, wrongs: &[Row]) -> ExitCode {
    println!("| mutant | what is wrong | seed | seconds to find it | how it showed |");
    println!("|---|---|---|---|---|");
    let mut missed = 0;
    for &(wrong, name, what) in wrongs {
        let bar = progress(args.minutes.is_none().then_some(args.seeds));
        let search = search(args, Some(wrong), &bar);
        bar.finish_and_clear();
        let (seed, how) = match search.failures.first() {
            Some((seed, failure)) => (seed.to_string(), failure.lines().next().unwrap_or_default()),
            None => ("-".to_owned(), "NOT FOUND"),
        };
        let honest = search.failures.first().is_none_or(|&(seed, _)| {
            let (subject, history) = history(seed, scale(args, Some(wrong), seed), None);
            try_play(&subject, &history, None).is_ok()
        });
        let how = if honest { how } else { "IT FAILS WITH NOTHING WRONG, TOO" };
        missed += usize::from(search.failures.is_empty() || !honest);
        let seconds = search.time.as_secs_f64();
        let how: String = how.chars().filter(|&letter| letter != '|').take(90).collect();
        println!("| {name} | {what} | {seed} | {seconds:.1} | {how} |");
    }
    eprintln!("{} of {} found", wrongs.len() - missed, wrongs.len());
    ExitCode::from(u8::from(missed > 0))
}

type Row = (Wrong, &'static str, &'static str);

/// The rows that `name` asks for.
fn named(rows: Vec<Row>, name: &str) -> Vec<Row> {
    rows.into_iter().filter(|row| name == "all" || row.1 == name).collect()
}

fn main() -> ExitCode {
    let args = Args::parse();
    let wrongs = match (&args.mutant, &args.lie) {
        (Some(name), _) => named(Wrong::rules(), name),
        (_, Some(name)) => named(Wrong::lies(), name),
        _ if args.exhaustive => return exhaust(&args),
        _ => return prove(&args),
    };
    if wrongs.is_empty() {
        let names = |rows: Vec<Row>| rows.iter().map(|row| row.1).collect::<Vec<_>>().join(", ");
        let (mutants, lies) = (names(Wrong::rules()), names(Wrong::lies()));
        eprintln!("no such name; mutants: {mutants}; lies: {lies}");
        return ExitCode::from(2);
    }
    find(&args, &wrongs)
}
