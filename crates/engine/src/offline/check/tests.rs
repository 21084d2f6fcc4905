//! Tests of the check over images in memory: what it reads, in which order it repairs, and that no
//! image makes it use more than that is worth.

use std::sync::Arc;

use stillpoint_format::qcow2::Header;
use stillpoint_io::memory::Operation;
use stillpoint_io::{Kind, Manage, MemoryFile, Result, Storage};

use super::{Finding, Repair, Report, check};
use crate::offline::create::{Preallocation, Qcow2Options, create_qcow2};
use crate::offline::testing::{MemoryFiles, now, queue};

/// An image of 16 clusters of 64 KiB, all of them allocated: 1 refcount table, 2 its block, 3 L1,
/// 4 L2, 5-20 data.
fn image() -> Arc<MemoryFile> {
    created(&Qcow2Options {
        size: 1 << 20,
        preallocation: Preallocation::Metadata,
        ..Qcow2Options::default()
    })
}

fn created(options: &Qcow2Options) -> Arc<MemoryFile> {
    let files = MemoryFiles::default();
    now(create_qcow2(&queue(), &files, "disk", options)).unwrap();
    files.file("disk")
}

fn checked(file: &Arc<MemoryFile>, repair: Repair) -> (Result<Report>, Vec<String>) {
    let storage: Arc<dyn Storage> = file.clone();
    let mut findings = Vec::new();
    let mut found = |finding: &Finding| findings.push(finding.to_string());
    let report = now(check(&queue(), &storage, repair, &mut found));
    (report, findings)
}

fn poke(file: &MemoryFile, offset: u64, word: u64) {
    file.poke(offset, &word.to_be_bytes());
}

const COPIED: u64 = 1 << 63;

#[test]
fn a_whole_image_has_nothing_wrong() {
    let (report, findings) = checked(&image(), Repair::Nothing);
    assert!(findings.is_empty(), "{findings:?}");
    let expected = Report {
        total_clusters: 16,
        allocated_clusters: 16,
        image_end_offset: 21 << 16,
        ..Report::default()
    };
    assert_eq!(report.unwrap(), expected);
}

#[test]
fn each_table_is_read_once_and_in_order() {
    let options = Qcow2Options {
        size: 40 << 20,
        cluster_size: 4096,
        preallocation: Preallocation::Metadata,
        ..Qcow2Options::default()
    };
    let file = created(&options);
    file.record();
    checked(&file, Repair::Nothing).0.unwrap();
    let mut ranges: Vec<(u64, u64)> = file
        .record()
        .into_iter()
        .filter_map(|operation| match operation {
            Operation::Read { offset, length: length @ 1.. } => Some((offset, offset + length)),
            _ => None,
        })
        .filter(|range| range.0 >= 4096) // the header is probed before it is read
        .collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "read twice: {ranges:?}");
    // 20 L2 tables lie one behind the other and are one read.
    assert!(ranges.len() < 15, "{} reads", ranges.len());
}

#[test]
fn a_crash_during_the_rebuild_leaves_the_old_structures() {
    let file = image();
    poke(&file, 0x10000, 0);
    file.record();
    let (report, findings) = checked(&file, Repair::All);
    assert_eq!(report.unwrap().corruptions, 0, "{findings:?}");
    let operations: Vec<_> = file
        .record()
        .into_iter()
        .filter(|operation| !matches!(operation, Operation::Read { .. }))
        .collect();
    let header = Operation::Write { offset: 48, length: 12 };
    let at = operations.iter().position(|operation| *operation == header).expect("a new pointer");
    assert_eq!(operations[at - 1], Operation::Flush);
    assert_eq!(operations[at + 1], Operation::Flush);
    for operation in &operations[..at - 1] {
        match *operation {
            Operation::Write { offset, .. } => assert!(offset >= 21 << 16, "{operation:?}"),
            Operation::Manage(Manage::Grow { .. }) | Operation::Flush => {}
            _ => panic!("{operation:?}"),
        }
    }
    assert_eq!(checked(&file, Repair::Nothing).1, [""; 0]);
}

#[test]
fn flags_are_repaired_after_the_refcounts_that_they_tell_of() {
    let file = image();
    // Cluster 5 is used twice, and refcounts and flags deny it.
    poke(&file, 0x40008, COPIED | 0x50000);
    file.record();
    checked(&file, Repair::All).0.unwrap();
    let operations = file.record();
    let position = |wanted: &dyn Fn(&Operation) -> bool| operations.iter().position(wanted);
    let refcounts = position(&|o| matches!(o, Operation::Write { offset: 0x20000, .. })).unwrap();
    let flags = position(&|o| matches!(o, Operation::Write { offset: 0x40000, .. })).unwrap();
    assert!(refcounts < flags);
    assert!(operations[refcounts..flags].contains(&Operation::Flush));
    assert_eq!(checked(&file, Repair::Nothing).1, [""; 0]);
}

#[test]
fn a_claim_of_a_large_disk_costs_nothing() {
    // F2: an L1 table of 32 MiB, all of it a hole.
    let options = Qcow2Options { size: 2 << 50, ..Qcow2Options::default() };
    let file = created(&options);
    file.record();
    let (report, findings) = checked(&file, Repair::Nothing);
    assert_eq!(report.unwrap().corruptions, 0, "{findings:?}");
    assert!(bytes_read(&file) < 1 << 20);
}

#[test]
fn an_l2_table_that_all_l1_entries_share_is_read_once() {
    let options = Qcow2Options { size: 64 << 40, ..Qcow2Options::default() };
    let file = created(&options);
    let header = Header::decode(&file.bytes()[..65536], None).unwrap();
    let (l1, entries) = (header.l1_table_offset.0, u64::from(header.l1_entry_count));
    let table = file.end();
    file.poke(table, &vec![0; 65536]);
    poke(&file, table, COPIED | l1);
    for index in 0..entries {
        poke(&file, l1 + index * 8, table);
    }
    file.record();
    let (report, findings) = checked(&file, Repair::Nothing);
    assert!(report.unwrap().corruptions > 0);
    let expected = format!("ERROR cluster {} refcount=0 reference={entries}", table >> 16);
    assert!(findings.contains(&expected), "{findings:?}");
    assert!(bytes_read(&file) < 4 << 20);
}

fn bytes_read(file: &MemoryFile) -> u64 {
    let length = |operation| match operation {
        Operation::Read { length, .. } => length,
        _ => 0,
    };
    file.record().into_iter().map(length).sum()
}

#[test]
fn a_sparse_file_whose_clusters_are_far_apart_is_refused() {
    let file = image();
    // One entry for each page of counts, and more of them than may be kept.
    let table: Vec<u8> =
        (1..=8192u64).flat_map(|page| (COPIED | (page << 33)).to_be_bytes()).collect();
    let start = 1 << 50;
    for number in 0..3 {
        file.poke(start + number * 65536, &table);
        let shifted: Vec<u8> = table
            .chunks_exact(8)
            .map(|word| u64::from_be_bytes(word.try_into().unwrap()))
            .flat_map(|word| (word + ((number * 8192) << 33)).to_be_bytes())
            .collect();
        file.poke(start + number * 65536, &shifted);
        poke(&file, 0x30000 + number * 8, COPIED | (start + number * 65536));
    }
    file.poke(36, &3u32.to_be_bytes());
    let error = checked(&file, Repair::Nothing).0.unwrap_err();
    assert_eq!(error.kind(), Kind::Limit, "{error}");
}

#[test]
fn failures_of_the_host_are_no_findings() {
    let file = image();
    let is_l2 = |operation| matches!(operation, Operation::Read { offset: 0x40000, length: 1.. });
    file.fail(Some((Box::new(is_l2), 5)));
    let error = checked(&file, Repair::All).0.unwrap_err();
    assert_eq!((error.kind(), error.errno()), (Kind::Io, Some(5)));
}

#[test]
fn unknown_autoclear_bits_are_cleared_by_whoever_repairs() {
    let file = image();
    poke(&file, 88, 1 << 40);
    checked(&file, Repair::Nothing).0.unwrap();
    assert_eq!(file.bytes()[88..96], (1u64 << 40).to_be_bytes());
    checked(&file, Repair::Leaks).0.unwrap();
    assert_eq!(file.bytes()[88..96], [0; 8]);
}
