//! Every power cut of small histories finds what a broken rule loses.

use stillpoint_engine::mutant::{Mutant, choose};
use stillpoint_sim::exhaustive::all;

/// How many of the first small histories fail while a rule is broken.
fn failures(rule: Option<Mutant>) -> usize {
    choose(rule);
    let failed = all().iter().take(150).filter(|small| small.prove(0).is_err()).count();
    choose(None);
    failed
}

#[test]
fn small_histories_fail_when_a_rule_is_broken_and_only_then() {
    assert_eq!(failures(None), 0);
    for rule in [Mutant::J1Barrier, Mutant::J2Mapping, Mutant::R5Copy, Mutant::F1Shared] {
        assert!(failures(Some(rule)) > 0, "{rule:?}");
    }
}
