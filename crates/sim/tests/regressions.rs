//! Faults that the simulator found in the engine, each as a short history of its own.
//!
//! What a history's seed decides (latencies, order, what a cut keeps) shifts with every change of
//! the engine; so each history is played with several seeds, and cut at several places.

use stillpoint_engine::{ImageFormat, Options};
use stillpoint_sim::make::{Content, Spec};
use stillpoint_sim::workload::Step::{self, Discard, Flush, Read, Resize, Write, Zeroes};
use stillpoint_sim::{DiskSubject, History, Plan, Round, Script};

fn spec(cluster_bits: u32, clusters: u64) -> Spec {
    Spec {
        version: 3,
        cluster_bits,
        extended_l2: false,
        refcount_order: 4,
        size: clusters << cluster_bits,
        backing: None,
        lean: false,
        content: None,
    }
}

fn qcow2(spec: Spec) -> DiskSubject {
    let options = Options { format: Some(ImageFormat::Qcow2), ..Options::default() };
    subject(spec.size, Some(spec), options)
}

fn subject(size: u64, qcow2: Option<Spec>, options: Options) -> DiskSubject {
    DiskSubject { qcow2, size, backing: None, shared: false, options, sample: None }
}

/// Plays rounds, each with its tasks and the step from which on it is cut, with so many seeds.
fn play(seeds: u64, subject: &DiskSubject, plan: &Plan, rounds: &[(&[&[Step]], u64)]) {
    for seed in 0..seeds {
        let rounds = rounds
            .iter()
            .map(|(tasks, steps)| Round {
                script: Script { tasks: tasks.iter().map(|steps| steps.to_vec()).collect() },
                // An uncut round stays uncut.
                steps: steps.saturating_add(seed % 100),
            })
            .collect();
        let history = History { seed, plan: plan.clone(), queues: 2, probes: 20, rounds };
        if let Err(failure) = history.try_play(subject) {
            panic!("{failure}\n{subject:?}\n{history}");
        }
    }
}

const WHOLE: u64 = u64::MAX;

/// A discard of a part of a compressed cluster freed its host clusters, though it stayed mapped.
#[test]
fn regression_partial_discard_keeps_a_compressed_cluster() {
    for seed in 0..2 {
        let content = Some(Content { seed, snapshot: false });
        let subject = qcow2(Spec { content, ..spec(12, 16) });
        let tasks: Vec<Step> =
            (0..16).map(|cluster| Discard((cluster << 12) + 512..(cluster << 12) + 1024)).collect();
        play(10, &subject, &Plan::default(), &[(&[&tasks], WHOLE)]);
    }
}

/// Copying shared subclusters to a fresh cluster left them "known zero"; zeroed and then written in
/// part, they showed the copied bytes again.
#[test]
fn regression_copied_subclusters_are_not_known_zero() {
    let content = Some(Content { seed: 3831427097605342917, snapshot: true });
    let subject = qcow2(Spec { extended_l2: true, content, ..spec(16, 34) });
    let tasks: Vec<Step> = (0..34)
        .map(|cluster| cluster << 16)
        .flat_map(|start| {
            [
                Write(start + 0x9000..start + 0xc000, false),
                Zeroes(start..start + 0x10000, false, false),
                Write(start + 0x7600..start + 0x7700, false),
                Write(start + 0xf600..start + 0xf700, false),
            ]
        })
        .collect();
    let history = History {
        seed: 0,
        plan: Plan::default(),
        queues: 1,
        probes: 0,
        rounds: vec![Round { script: Script { tasks: vec![tasks] }, steps: WHOLE }],
    };
    history.play(&subject);
}

/// A growth still under way gave the refcount table a block that did not count itself yet, and a
/// close cut the file below it.
#[test]
fn regression_a_growth_under_way_is_neither_committed_nor_cut() {
    let subject = qcow2(spec(10, 22));
    let plan = Plan { growth: (stillpoint_io::GrowMeans::Truncate, 256 << 10), ..Plan::default() };
    let tasks: [&[Step]; 1] = [&[Write(0x3a00..0x3c00, true)]];
    play(100, &subject, &plan, &[(&tasks, WHOLE)]);
    play(100, &subject, &plan, &[(&tasks, 20)]);
}

/// Refcounts outlived the growth of the file that they counted: what is grown later was taken for
/// free although it was counted.
#[test]
fn regression_counted_clusters_beyond_the_end_are_not_free() {
    let subject = qcow2(spec(12, 40));
    let first: [&[Step]; 1] = [&[Write(0..0x8000, false), Flush]];
    let second: [&[Step]; 1] = [&[Write(0x8000..0x20000, false), Flush]];
    play(300, &subject, &Plan::default(), &[(&first, 5), (&second, WHOLE)]);
}

/// Of two flushes at once one failed, and the other "succeeded" without what the first had lost.
#[test]
fn regression_a_flush_beside_a_failed_one_fails() {
    let size = 64 << 10;
    let options = Options { format: Some(ImageFormat::Raw), ..Options::default() };
    let subject = subject(size, None, options);
    let plan = Plan { flush_errors_permille: 300, ..Plan::default() };
    let task = |start: u64| vec![Write(start..start + 4096, false), Flush, Flush];
    let tasks: Vec<Vec<Step>> = (0..4).map(|task_index| task(task_index * 8192)).collect();
    let tasks: Vec<&[Step]> = tasks.iter().map(Vec::as_slice).collect();
    play(40, &subject, &plan, &[(&tasks, WHOLE)]);
}

/// A commit failed, and what it had taken was no longer dirty: an overwrite beside it took its mapping
/// for durable, and was answered.
#[test]
fn regression_durable_overwrite_beside_a_failed_commit_fails() {
    let subject = qcow2(spec(16, 8));
    let plan = Plan { flush_errors_permille: 300, ..Plan::default() };
    let task =
        |start: u64| vec![Write(start..start + 4096, false), Write(start..start + 4096, true)];
    let tasks: Vec<Vec<Step>> = (0..6).map(|task_index| task(task_index * 4096)).collect();
    let tasks: Vec<&[Step]> = tasks.iter().map(Vec::as_slice).collect();
    play(200, &subject, &plan, &[(&tasks, WHOLE)]);
}

/// An unaligned write of a tail that was being cut off read zeros around itself, and wrote them; then the
/// power failed, and the disk had its old size.
#[test]
fn regression_a_write_under_way_reads_the_tail_that_is_cut_off() {
    let content = Some(Content { seed: 234034703706274736, snapshot: true });
    let size = 540160;
    let subject = qcow2(Spec { content, extended_l2: true, size, ..spec(14, 33) });
    let plan = Plan {
        sector: 4096,
        request_align: 4096,
        growth: (stillpoint_io::GrowMeans::Fallocate, 256 << 10),
        write_errors_permille: 5,
        capacity_blocks: 223,
        slow_one_in: 5,
        ..Plan::default()
    };
    let tasks = vec![
        vec![
            Write(0x76400..0x76600, false),
            Zeroes(0x74a00..0x74c00, true, false),
            Write(0x58e00..0x5ce00, false),
            Read(0x50a00..0x54a00),
            Resize(0x2fe00),
        ],
        vec![
            Read(0x58600..0x58800),
            Write(0x70000..0x74000, false),
            Read(0x7a000..0x7e000),
            Flush,
            Write(0x5f600..0x68e00, true),
        ],
        vec![],
        vec![
            Read(0x76600..0x76800),
            Read(0x5c000..0x60000),
            Write(0x5e000..0x62000, false),
            Read(0xe400..0xe600),
        ],
    ];
    for seed in (0..10).chain([0x1083e7]) {
        let rounds = vec![Round { script: Script { tasks: tasks.clone() }, steps: 2489 }];
        let history = History { seed, plan: plan.clone(), queues: 1, probes: 27, rounds };
        history.try_play(&subject).unwrap_or_else(|failure| panic!("{failure}\n{history}"));
    }
}
