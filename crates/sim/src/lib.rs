//! The simulator: the real engine over a simulated disk, on one thread, from a seed.
//!
//! A run is a pure function of its seed: the executor picks tasks in seeded order, the clock is
//! virtual, operations complete in seeded order, and the power may fail between any two steps. What
//! the guest then finds is judged by an oracle that knows what the guest was told.
//!
//! | file | what it holds |
//! |---|---|
//! | [`chance`] | [`Chance`]: the seeded generator behind every decision |
//! | [`executor`] | [`Executor`]: tasks of several queues on one thread, the virtual clock, deadlock detection |
//! | [`trace`] | [`Trace`]: the history of a run: its hash, and its last lines |
//! | [`plan`] | [`Plan`]: what kind of disk it is and which of its operations fail |
//! | [`device`] | [`Medium`](device::Medium): per sector, what is durable and what may be lost |
//! | [`file`](mod@file) | [`SimFile`]: `Storage` over a medium: size, space, latency, faults |
//! | [`files`] | [`World`]: the files by name; [`World::power_cut`] |
//! | [`oracle`] | [`Oracle`]: per guest byte, the values that the guest's own history allows |
//! | [`workload`] | [`Script`]: random operations by several tasks, run and judged |
//! | [`history`] | [`History`]: scripts with power cuts between them, played on a [`Subject`] |
//! | [`exhaustive`] | every power cut of every small history |
//! | [`coverage`] | [`Coverage`]: which requests and operations the cuts fell into |
//! | [`make`] | qcow2 images made without the engine |
//! | [`image`] | and inspected without it |
//! | [`wrong`] | [`Wrong`]: broken rules and lies, which must be found |
//! | [`disk`] | [`DiskSubject`]: the engine's disk, put through histories |
//!
//! Deliberately absent: real time, real files, threads; anything that a shipped program links.

pub mod chance;
pub mod coverage;
pub mod device;
pub mod disk;
pub mod executor;
pub mod exhaustive;
pub mod file;
pub mod files;
pub mod history;
pub mod image;
pub mod make;
pub mod oracle;
pub mod plan;
pub mod trace;
pub mod workload;
pub mod wrong;

pub use chance::Chance;
pub use coverage::Coverage;
pub use disk::{Backing, DiskSubject};
pub use executor::Executor;
pub use file::SimFile;
pub use files::World;
pub use history::{History, Round, Subject};
pub use oracle::Oracle;
pub use plan::{Lie, Plan};
pub use trace::Trace;
pub use workload::{Script, Shape, Step, Target};
pub use wrong::Wrong;
