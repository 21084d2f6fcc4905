//! Every broken rule and every lie of the disk is found by the seed that `docs/mutants.md` names for it,
//! whose history passes with nothing wrong.
//!
//! What a seed decides shifts with changes of the engine and of the simulator. Then the table is made anew:
//! `cargo run --release -p stillpoint-sim -- --mutant all --seeds 3000`, and the same with `--lie all`.

use stillpoint_sim::Wrong;
use stillpoint_sim::wrong::{history, try_play};

/// The seed that the table names for a fault.
fn seed(table: &str, name: &str) -> u64 {
    let row = table.lines().find(|line| line.starts_with(&format!("| {name} |")));
    let row = row.unwrap_or_else(|| panic!("docs/mutants.md has no row for {name}"));
    let seed = row.split('|').nth(3).expect("the seed's column").trim();
    seed.parse().unwrap_or_else(|_| panic!("{name}: {seed} is no seed"))
}

#[test]
fn every_fault_that_is_put_in_is_found() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/mutants.md");
    let table = std::fs::read_to_string(path).unwrap();
    let mut missed = Vec::new();
    for (wrong, name, _) in Wrong::rules().into_iter().chain(Wrong::lies()) {
        let seed = seed(&table, name);
        let play = |wrong| {
            let (subject, history) = history(seed, Wrong::scale(seed), wrong);
            try_play(&subject, &history, wrong)
        };
        if let Err(failure) = play(None) {
            panic!("seed {seed} fails with nothing wrong: {failure}");
        }
        if play(Some(wrong)).is_ok() {
            missed.push(name);
        }
    }
    assert!(missed.is_empty(), "not found by their seeds: {missed:?}; see this file's head");
}
