//! Tests of making images, in memory.

use std::sync::Arc;

use stillpoint_format::qcow2::Header;
use stillpoint_format::qcow2::header::is_qcow2;
use stillpoint_io::memory::Operation;
use stillpoint_io::{MemoryFile, Storage};

use super::*;
use crate::offline::check::{Repair, check};
use crate::offline::testing::{MemoryFiles, now, queue};

fn created(options: &Qcow2Options) -> Arc<MemoryFile> {
    let files = MemoryFiles::default();
    now(create_qcow2(&queue(), &files, "disk", options)).unwrap();
    files.file("disk")
}

/// Every finding about a file.
fn findings(file: Arc<MemoryFile>) -> Vec<String> {
    let file: Arc<dyn Storage> = file;
    let mut findings = Vec::new();
    let mut found = |finding: &_| findings.push(format!("{finding}"));
    now(check(&queue(), &file, Repair::Nothing, &mut found)).unwrap();
    findings
}

#[test]
fn every_geometry_is_made_clean() {
    for cluster_bits in [9, 14, 16, 21] {
        for refcount_bits in [1, 4, 16, 64] {
            for extended_l2 in [false, true] {
                for preallocation in [Preallocation::Off, Preallocation::Metadata] {
                    for size in [0, 1, 3_000_001] {
                        let options = Qcow2Options {
                            size,
                            cluster_size: 1 << cluster_bits,
                            refcount_bits,
                            extended_l2: extended_l2 && cluster_bits >= 14,
                            preallocation,
                            ..Qcow2Options::default()
                        };
                        assert_eq!(findings(created(&options)), [""; 0], "{options:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn refcount_blocks_that_count_themselves_suffice() {
    // So few refcounts for each block that blocks and tables need more blocks for themselves.
    for size in (0..200).map(|step| step * 16384) {
        let options = Qcow2Options {
            size,
            cluster_size: 512,
            refcount_bits: 64,
            preallocation: Preallocation::Metadata,
            ..Qcow2Options::default()
        };
        let layout = Layout::plan(&options).unwrap();
        let per_block = layout.geometry.refcounts_per_block();
        assert!(layout.refcount_blocks * per_block >= layout.end_cluster());
        assert!(layout.refcount_blocks.saturating_sub(2) * per_block < layout.end_cluster());
        assert_eq!(findings(created(&options)), [""; 0], "{size}");
    }
}

#[test]
fn the_header_comes_last_and_after_a_barrier() {
    let files = MemoryFiles::default();
    let file = files.insert(MemoryFile::new("disk", 0));
    file.record();
    let options = Qcow2Options {
        size: 1 << 30,
        preallocation: Preallocation::Metadata,
        ..Qcow2Options::default()
    };
    now(create_qcow2(&queue(), &files, "disk", &options)).unwrap();
    let operations = file.record();
    let [.., before, header, after] = &operations[..] else { panic!("{operations:?}") };
    assert_eq!((before, after), (&Operation::Flush, &Operation::Flush));
    assert!(matches!(header, Operation::Write { offset: 0, .. }));
    let earlier = &operations[..operations.len() - 3];
    assert!(!earlier.iter().any(|o| matches!(o, Operation::Write { offset: 0, .. })));
}

#[test]
fn a_failure_at_any_step_leaves_nothing_that_looks_like_an_image() {
    let options = Qcow2Options {
        size: 3 << 20,
        preallocation: Preallocation::Full,
        ..Qcow2Options::default()
    };
    for failing in 0.. {
        let files = MemoryFiles::default();
        let file = files.insert(MemoryFile::new("disk", 0));
        let mut step = 0;
        // The cleaning up behind the failure works again.
        let filter = move |_| {
            step += 1;
            step == failing + 1
        };
        file.fail(Some((Box::new(filter), 28)));
        if now(create_qcow2(&queue(), &files, "disk", &options)).is_ok() {
            // Growth twice, three pieces of zeros, three of tables, two barriers and the header.
            assert_eq!(failing, 11);
            return;
        }
        assert!(!is_qcow2(&file.bytes()), "step {failing}");
        assert_eq!(file.end(), 0, "step {failing}");
    }
}

#[test]
fn the_limits_are_those_of_the_format() {
    let plan = |size, cluster_size| {
        Layout::plan(&Qcow2Options { size, cluster_size, ..Qcow2Options::default() })
    };
    // 4 Mi L1 entries of 8192 clusters each.
    assert!(plan(1 << 51, 65536).is_ok());
    assert!(plan((1 << 51) + 1, 65536).is_err());
    assert!(plan(1 << 37, 512).is_ok());
    assert!(plan((1 << 37) + 1, 512).is_err());
    for size in [1 << 62, u64::MAX / 2, u64::MAX] {
        assert!(plan(size, 2 << 20).is_err());
    }
}

#[test]
fn an_external_data_file_is_mapped_one_to_one() {
    let files = MemoryFiles::default();
    let options = Qcow2Options {
        size: 1 << 20,
        data_file: Some("disk.data".to_owned()),
        data_file_raw: true,
        ..Qcow2Options::default()
    };
    now(create_qcow2(&queue(), &files, "folder/disk", &options)).unwrap();
    assert_eq!(files.file("folder/disk.data").end(), 1 << 20);
    let file = files.file("folder/disk");
    let header = Header::decode(&file.bytes()[..65536], Some(file.end())).unwrap();
    assert_eq!(header.data_file_name(), Some("disk.data"));
    assert_eq!(findings(file), [""; 0]);
}
