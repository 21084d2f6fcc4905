//! The engine's disk under random workloads and power cuts: a fixed set of seeds.
//!
//! `cargo run --release -p stillpoint-sim` plays others, and shrinks what fails.

use stillpoint_sim::disk::from_seed;

/// Plays the histories of some seeds; returns how many rounds were cut before they had ended.
fn play(seeds: std::ops::Range<u64>, faults: bool) -> usize {
    seeds
        .map(|seed| {
            let (subject, history) = from_seed(seed, faults);
            match history.try_play(&subject) {
                Ok(played) => played.cuts,
                Err(failure) => panic!("seed {seed}: {failure}\n{subject:?}\n{history}"),
            }
        })
        .sum()
}

#[test]
fn disks_keep_what_they_promised_over_power_cuts() {
    let cuts = play(0..120, false);
    assert!(cuts > 80, "only {cuts} cuts hit a running script");
}

#[test]
fn disks_keep_what_they_promised_over_faults_and_power_cuts() {
    play(10_000..10_120, true);
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 20_000..20_015 {
        let (subject, history) = from_seed(seed, true);
        assert_eq!(history.play(&subject), history.play(&subject), "seed {seed}");
    }
}
