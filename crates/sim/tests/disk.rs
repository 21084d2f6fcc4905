//! The engine's disk under random workloads and power cuts: a fixed set of seeds.
//!
//! `cargo run --release -p stillpoint-sim` plays others, and shrinks what fails.

use std::fmt::Write;
use std::path::Path;

use stillpoint_sim::disk::{Scale, from_seed};
use stillpoint_sim::history::Played;

fn play(seed: u64, scale: Scale) -> Played {
    let (subject, history) = from_seed(seed, scale);
    history
        .try_play(&subject)
        .unwrap_or_else(|failure| panic!("seed {seed}: {failure}\n{subject:?}\n{history}"))
}

/// Plays the histories of some seeds; returns how often they were cut.
fn cuts(seeds: std::ops::Range<u64>, scale: Scale) -> u64 {
    seeds.map(|seed| play(seed, scale).coverage.cuts).sum()
}

#[test]
fn disks_keep_what_they_promised_over_power_cuts() {
    let cuts = cuts(0..160, Scale::Short);
    assert!(cuts > 100, "only {cuts} cuts hit a running script");
}

#[test]
fn busy_disks_keep_what_they_promised_over_many_power_cuts() {
    let cuts = cuts(10_000..10_010, Scale::Long);
    assert!(cuts > 500, "only {cuts} cuts");
}

/// The same seed gives the same history, bit for bit, on every machine: `hashes.txt` holds what each came
/// to. A change of the engine or of the simulator changes them; then `UPDATE_HASHES=1 cargo test -p
/// stillpoint-sim --test disk hashes` writes the file anew, and twice must give the same file.
#[test]
fn histories_have_the_hashes_that_are_on_record() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hashes.txt");
    let mut found = String::new();
    for (seeds, scale) in [(20_000..20_016, Scale::Short), (20_016..20_020, Scale::Long)] {
        for seed in seeds {
            let Played { hash, steps, .. } = play(seed, scale);
            writeln!(found, "{seed} {scale:?} {steps} steps {hash:016x}").unwrap();
        }
    }
    if std::env::var_os("UPDATE_HASHES").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let recorded = std::fs::read_to_string(&path).unwrap();
    assert!(found == recorded, "found:\n{found}\non record:\n{recorded}");
}

#[test]
fn the_same_seed_gives_the_same_history_twice() {
    for (seed, scale) in [(20_100, Scale::Short), (20_101, Scale::Short), (20_102, Scale::Long)] {
        assert_eq!(play(seed, scale), play(seed, scale), "seed {seed}");
    }
}
