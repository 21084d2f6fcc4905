//! The engine's disk under random workloads and power cuts: a fixed set of seeds.
//!
//! `cargo run --release -p stillpoint-sim` plays others, and shrinks what fails.

use stillpoint_sim::disk::{Scale, from_seed};

/// Plays the histories of some seeds; returns how many rounds were cut before they had ended.
fn play(seeds: std::ops::Range<u64>, scale: Scale) -> u64 {
    seeds
        .map(|seed| {
            let (subject, history) = from_seed(seed, scale);
            match history.try_play(&subject) {
                Ok(played) => played.coverage.cuts,
                Err(failure) => panic!("seed {seed}: {failure}\n{subject:?}\n{history}"),
            }
        })
        .sum()
}

#[test]
fn disks_keep_what_they_promised_over_power_cuts() {
    let cuts = play(0..160, Scale::Short);
    assert!(cuts > 100, "only {cuts} cuts hit a running script");
}

#[test]
fn busy_disks_keep_what_they_promised_over_many_power_cuts() {
    let cuts = play(10_000..10_010, Scale::Long);
    assert!(cuts > 500, "only {cuts} cuts");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 20_000..20_015 {
        let (subject, history) = from_seed(seed, Scale::Short);
        assert_eq!(history.play(&subject), history.play(&subject), "seed {seed}");
    }
}
