//! What is wrong on purpose: a broken rule of the engine, or a disk that lies. An honest oracle must
//! find each; `docs/mutants.md` has a seed for every one, which a test plays.

use stillpoint_engine::mutant::{self, Mutant};

use crate::disk::{DiskSubject, Scale, from_seed};
use crate::history::{History, Played};
use crate::plan::Lie;

/// A fault that was put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// A rule of the engine is broken.
    Rule(Mutant),
    /// The disk beneath breaks its word.
    Disk(Lie),
}

impl Wrong {
    /// Every broken rule: it, its name, and what it does.
    pub fn rules() -> Vec<(Wrong, &'static str, &'static str)> {
        Mutant::ALL.iter().map(|&(rule, name, what)| (Wrong::Rule(rule), name, what)).collect()
    }

    /// Every lie: it, its name, and what it does.
    pub fn lies() -> Vec<(Wrong, &'static str, &'static str)> {
        Lie::ALL.iter().map(|&(lie, name, what)| (Wrong::Disk(lie), name, what)).collect()
    }

    /// Which scale of history a seed is played at: faults are found soonest by short and long ones in
    /// turn.
    pub fn scale(seed: u64) -> Scale {
        if seed % 4 == 3 { Scale::Long } else { Scale::Short }
    }
}

/// A disk and its history from a seed, with something wrong or nothing.
pub fn history(seed: u64, scale: Scale, wrong: Option<Wrong>) -> (DiskSubject, History) {
    let (subject, mut history) = from_seed(seed, scale);
    if let Some(Wrong::Disk(lie)) = wrong {
        history.plan.lie = Some(lie);
    }
    (subject, history)
}

/// Plays a history with something wrong or nothing.
///
/// # Errors
/// What it failed with.
pub fn try_play(
    subject: &DiskSubject,
    history: &History,
    wrong: Option<Wrong>,
) -> Result<Played, String> {
    if let Some(Wrong::Rule(rule)) = wrong {
        mutant::choose(Some(rule));
    }
    let played = history.try_play(subject);
    mutant::choose(None);
    played
}
