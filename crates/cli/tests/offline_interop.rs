//! The offline verbs beside the real qemu-img, on the same images: texts, JSON, exit codes, and what
//! each makes of the other's images.
//!
//! Needs qemu-img and qemu-io, and fails without them: run with `--features system-tests`.

#![cfg(feature = "system-tests")]

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

#[derive(Debug, PartialEq, Eq)]
struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

fn ran(output: Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).expect("output is text");
    let code = output.status.code().expect("no signal has ended it");
    Ran { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}

fn start(program: &str, args: &[&str], folder: &Path) -> Ran {
    let mut command = Command::new(program);
    let output = command.args(args).current_dir(folder).env("TZ", "UTC").output();
    let missing = format!("{program} is needed: apt-get install qemu-utils");
    ran(output.unwrap_or_else(|error| panic!("{missing} ({error})")))
}

fn qemu_img(folder: &Path, args: &[&str]) -> Ran {
    start("qemu-img", args, folder)
}

fn ours(folder: &Path, args: &[&str]) -> Ran {
    start(env!("CARGO_BIN_EXE_stillpoint"), &[&["img"], args].concat(), folder)
}

/// Runs commands of qemu-img and qemu-io that must succeed; a line is one command.
fn prepare(folder: &Path, script: &str) {
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split('|').map(str::trim).collect();
        let mut args: Vec<&str> = words[0].split_whitespace().collect();
        let program = args.remove(0);
        args.extend(words[1..].iter().flat_map(|command| ["-c", command]));
        let result = start(program, &args, folder);
        assert_eq!(result.code, 0, "{line}: {result:?}");
    }
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

/// Images of every kind, made by qemu-img: a name, and how to make it.
const IMAGES: &[(&str, &str)] = &[
    (
        "plain.qcow2",
        "qemu-img create -q -f qcow2 plain.qcow2 4M
         qemu-io plain.qcow2 | write 0 256k | write -z 512k 128k | write -c 1M 64k | write 3M 70k",
    ),
    (
        "small-clusters.qcow2",
        "qemu-img create -q -f qcow2 -o cluster_size=512 small-clusters.qcow2 3000k
         qemu-io small-clusters.qcow2 | write 10k 5k | write 200k 512k | write -c 1M 512 | write 2M 900k",
    ),
    (
        "large-clusters.qcow2",
        "qemu-img create -q -f qcow2 -o cluster_size=2M large-clusters.qcow2 100M
         qemu-io large-clusters.qcow2 | write 1M 5M | write -z 20M 4M | write -c 40M 2M",
    ),
    (
        "one-bit.qcow2",
        "qemu-img create -q -f qcow2 -o refcount_bits=1,cluster_size=4k one-bit.qcow2 64M
         qemu-io one-bit.qcow2 | write 0 9M | write 30M 100k",
    ),
    (
        "four-bits.qcow2",
        "qemu-img create -q -f qcow2 -o refcount_bits=4 four-bits.qcow2 64M
         qemu-io four-bits.qcow2 | write 0 3M
         qemu-img snapshot -c one four-bits.qcow2
         qemu-io four-bits.qcow2 | write 1M 1M | write 5M 1M",
    ),
    (
        "wide.qcow2",
        "qemu-img create -q -f qcow2 -o refcount_bits=64 wide.qcow2 64M
         qemu-io wide.qcow2 | write 0 3M",
    ),
    (
        "extended.qcow2",
        "qemu-img create -q -f qcow2 -o extended_l2=on extended.qcow2 64M
         qemu-io extended.qcow2 | write 0 4k | write 10k 60k | write -z 300k 6k | write -c 1M 64k | write 3M 130k",
    ),
    (
        "version2.qcow2",
        "qemu-img create -q -f qcow2 -o compat=0.10 version2.qcow2 64M
         qemu-io version2.qcow2 | write 0 1M | write -c 8M 64k
         qemu-img snapshot -c one version2.qcow2
         qemu-io version2.qcow2 | write 500k 100k",
    ),
    (
        "data-file.qcow2",
        "qemu-img create -q -f qcow2 -o data_file=data-file.data data-file.qcow2 8M
         qemu-io data-file.qcow2 | write 0 64k | write 1M 200k | write -z 4M 1M",
    ),
    (
        "raw-data-file.qcow2",
        "qemu-img create -q -f qcow2 -o data_file=raw-data-file.data,data_file_raw=on raw-data-file.qcow2 8M
         qemu-io raw-data-file.qcow2 | write 1M 200k",
    ),
    (
        "snapshots.qcow2",
        "qemu-img create -q -f qcow2 -o compression_type=zstd,lazy_refcounts=on snapshots.qcow2 64M
         qemu-io snapshots.qcow2 | write 0 5M | write -c 10M 64k
         qemu-img snapshot -c one snapshots.qcow2
         qemu-io snapshots.qcow2 | write 1M 1M
         qemu-img snapshot -c two,three snapshots.qcow2
         qemu-img resize -q snapshots.qcow2 128M
         qemu-img snapshot -d one snapshots.qcow2
         qemu-img snapshot -c four snapshots.qcow2",
    ),
    (
        "bitmaps.qcow2",
        "qemu-img create -q -f qcow2 bitmaps.qcow2 1G
         qemu-img bitmap --add bitmaps.qcow2 b0
         qemu-img bitmap --add --disable -g 4k bitmaps.qcow2 b1
         qemu-io bitmaps.qcow2 | write 0 1M | write 500M 1M",
    ),
    ("preallocated.qcow2", "qemu-img create -q -f qcow2 -o preallocation=metadata preallocated.qcow2 40M"),
    ("reserved.qcow2", "qemu-img create -q -f qcow2 -o preallocation=falloc reserved.qcow2 40M"),
    ("empty.qcow2", "qemu-img create -q -f qcow2 empty.qcow2 0"),
    ("odd-size.qcow2", "qemu-img create -q -f qcow2 odd-size.qcow2 1234567"),
    ("plain.raw", "qemu-img create -q -f raw plain.raw 2M
         qemu-io -f raw plain.raw | write 1M 64k | write 100k 4k"),
    (
        "over-raw.qcow2",
        "qemu-img create -q -f raw base.raw 2M
         qemu-io -f raw base.raw | write 1M 64k
         qemu-img create -q -f qcow2 -b base.raw -F raw over-raw.qcow2 4M
         qemu-io over-raw.qcow2 | write 256k 64k | write -z 512k 64k | write -c 640k 64k",
    ),
    (
        "over-chain.qcow2",
        "qemu-img create -q -f raw chain0.raw 2M
         qemu-io -f raw chain0.raw | write 1M 64k
         qemu-img create -q -f qcow2 -b chain0.raw -F raw chain1.qcow2 4M
         qemu-io chain1.qcow2 | write 256k 64k | write -z 512k 64k
         qemu-img create -q -f qcow2 -o extended_l2=on -b chain1.qcow2 -F qcow2 over-chain.qcow2 6M
         qemu-io over-chain.qcow2 | write 0 4k | write -z 300k 6k | write 3M 128k",
    ),
    (
        "shorter.qcow2",
        "qemu-img create -q -f raw longer.raw 4M
         qemu-io -f raw longer.raw | write 0 4M
         qemu-img create -q -f qcow2 -b longer.raw -F raw shorter.qcow2 1M
         qemu-io shorter.qcow2 | write 70k 1k",
    ),
];

fn every_image() -> TempDir {
    let folder = folder();
    for (_, script) in IMAGES {
        prepare(folder.path(), script);
    }
    folder
}

#[test]
fn info_tells_what_qemu_img_tells() {
    let folder = every_image();
    for (name, _) in IMAGES {
        for options in [&[][..], &["--backing-chain"], &["-U"]] {
            let args = [&["info"], options, &[name]].concat();
            assert_eq!(ours(folder.path(), &args), qemu_img(folder.path(), &args), "{args:?}");
            let args = [&["info", "--output=json"], options, &[name]].concat();
            let (ours, theirs) = (ours(folder.path(), &args), qemu_img(folder.path(), &args));
            assert_eq!((ours.code, json(&ours.stdout)), (theirs.code, json(&theirs.stdout)));
        }
    }
}

#[test]
fn an_encrypted_image_is_described_and_checked_without_its_key() {
    let folder = folder();
    prepare(
        folder.path(),
        "qemu-img create -q --object secret,id=s0,data=abc -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s0,encrypt.iter-time=10 encrypted.qcow2 4M",
    );
    let args = ["info", "encrypted.qcow2"];
    assert_eq!(ours(folder.path(), &args), qemu_img(folder.path(), &args));
    let args = ["info", "--output=json", "encrypted.qcow2"];
    let [mine, theirs] = [ours(folder.path(), &args), qemu_img(folder.path(), &args)];
    assert_eq!(json(&mine.stdout), json(&theirs.stdout));
    let check = ours(folder.path(), &["check", "encrypted.qcow2"]);
    assert_eq!((check.code, check.stderr), (0, String::new()), "its LUKS header is no leak");
}

#[test]
fn map_tells_what_qemu_img_tells() {
    let folder = every_image();
    for (name, _) in IMAGES {
        for options in [
            &[][..],
            &["--output=json"],
            &["--output=json", "--start-offset", "1M", "--max-length", "70k"],
            &["--output=json", "--start-offset", "1000", "--max-length=1"],
            &["--output=json", "--start-offset=9G"],
        ] {
            let args = [&["map"], options, &[name]].concat();
            let (ours, theirs) = (ours(folder.path(), &args), qemu_img(folder.path(), &args));
            assert_eq!(ours, theirs, "{args:?}");
        }
    }
}

#[test]
fn check_tells_what_qemu_img_tells() {
    let folder = every_image();
    for (name, _) in IMAGES {
        let args = ["check", name];
        assert_eq!(ours(folder.path(), &args), qemu_img(folder.path(), &args), "{args:?}");
        if name.ends_with(".qcow2") {
            let args = ["check", "--output=json", name];
            let (ours, theirs) = (ours(folder.path(), &args), qemu_img(folder.path(), &args));
            assert_eq!((ours.code, json(&ours.stdout)), (theirs.code, json(&theirs.stdout)));
        }
    }
}

/// A damage: bytes to be overwritten in the first image, and whether `-r all` puts it right.
///
/// The image's clusters: 1 refcount table, 2 its block, 3 L1, 4 L2, 5-8 data, 9 compressed data.
struct Damage {
    name: &'static str,
    pokes: &'static [(u64, u64)],
    repairable: bool,
    /// Our findings are the same as qemu-img's, line by line.
    same_findings: bool,
}

const fn damage(name: &'static str, pokes: &'static [(u64, u64)], repairable: bool) -> Damage {
    Damage { name, pokes, repairable, same_findings: true }
}

const fn ours_alone(name: &'static str, pokes: &'static [(u64, u64)], repairable: bool) -> Damage {
    Damage { name, pokes, repairable, same_findings: false }
}

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

const DAMAGES: &[Damage] = &[
    damage("refcount too high", &[(0x20008, 0x0001_0002_0001_0001)], true),
    damage("refcount too low", &[(0x20008, 0x0001_0000_0001_0001)], true),
    damage("leaked cluster", &[(0x40008, 0)], true),
    damage("copied flag missing in L2", &[(0x40000, 0x50000)], true),
    damage("copied flag missing in L1", &[(0x30000, 0x40000)], true),
    damage("cluster used twice", &[(0x40000, COPIED | 0x60000)], true),
    damage("data on the L1 table", &[(0x40000, COPIED | 0x30000)], true),
    damage("data cluster misaligned", &[(0x40000, COPIED | 0x50200)], false),
    damage("reserved bits in L2", &[(0x40000, COPIED | 0x50002)], false),
    damage("reserved bits in L1", &[(0x30000, COPIED | 0x40002)], false),
    damage("data behind the end", &[(0x40000, COPIED | 0x1000_0000)], false),
    damage("L2 table behind the end", &[(0x30000, COPIED | 0x1000_0000)], false),
    damage("compressed and copied", &[(0x40080, COPIED | COMPRESSED | 0x90000)], false),
    damage("compressed behind the end", &[(0x40080, COMPRESSED | 0x1000_0000)], false),
    damage("zero cluster used twice", &[(0x40040, COPIED | 0x60001)], true),
    damage("zero cluster misaligned", &[(0x40040, COPIED | 0x60201)], true),
    damage("no refcount block", &[(0x10000, 0)], true),
    damage("refcount block behind the end", &[(0x10000, 0x1000_0000)], true),
    damage("two refcount blocks in one", &[(0x10008, 0x20000)], true),
    ours_alone("refcount block misaligned", &[(0x10000, 0x20200)], true),
    ours_alone("refcount block on the L1 table", &[(0x10000, 0x30000)], true),
    ours_alone("L2 table misaligned", &[(0x30000, COPIED | 0x40200)], false),
    damage("no refcount table", &[(56, 0)], true),
    ours_alone("snapshot table on the header", &[(56, 0x0000_0001_0000_0001)], false),
    damage(
        "everything at once",
        &[
            (0x20008, 0x0001_0003_0000_0001),
            (0x40018, 0),
            (0x40000, 0x50000),
            (0x40008, COPIED | 0x70000),
        ],
        true,
    ),
];

fn damaged(folder: &Path, damage: &Damage) {
    let _ = fs::remove_file(folder.join("c.qcow2"));
    prepare(
        folder,
        "qemu-img create -q -f qcow2 c.qcow2 4M
         qemu-io c.qcow2 | write -P 7 0 256k | write -z 512k 128k | write -c -P 9 1M 64k",
    );
    let file = File::options().write(true).open(folder.join("c.qcow2")).expect("the image");
    for (offset, word) in damage.pokes {
        file.write_all_at(&word.to_be_bytes(), *offset).expect("a write");
    }
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn check_finds_the_damage_that_qemu_img_finds() {
    let folder = folder();
    for damage in DAMAGES {
        damaged(folder.path(), damage);
        let (ours, theirs) = (
            ours(folder.path(), &["check", "c.qcow2"]),
            qemu_img(folder.path(), &["check", "c.qcow2"]),
        );
        if damage.same_findings {
            assert_eq!(sorted(&ours.stderr), sorted(&theirs.stderr), "{}", damage.name);
            assert_eq!(ours.stdout, theirs.stdout, "{}", damage.name);
            assert_eq!(ours.code, theirs.code, "{}", damage.name);
        } else {
            assert!(matches!(ours.code, 1 | 2), "{}: {ours:?}", damage.name);
        }
    }
}

#[test]
fn repair_leaves_what_qemu_img_finds_clean() {
    let folder = folder();
    for (damage, cache) in DAMAGES.iter().zip(["writeback", "none"].into_iter().cycle()) {
        damaged(folder.path(), damage);
        let repaired = ours(folder.path(), &["check", "-T", cache, "-r", "all", "c.qcow2"]);
        let (again, theirs) = (
            ours(folder.path(), &["check", "c.qcow2"]),
            qemu_img(folder.path(), &["check", "c.qcow2"]),
        );
        if damage.repairable {
            assert_eq!(repaired.code, 0, "{}: {repaired:?}", damage.name);
            assert!(repaired.stdout.contains("inconsistencies were found and repaired"));
            assert_eq!(theirs.stderr, "", "{}: {repaired:?}", damage.name);
            assert_eq!(again, theirs, "{}", damage.name);
            let intact = "qemu-io c.qcow2 | read -P 9 1M 64k";
            prepare(folder.path(), intact);
        } else {
            assert!(matches!(repaired.code, 1 | 2), "{}: {repaired:?}", damage.name);
        }
    }
}

#[test]
fn repairing_leaks_leaves_errors_alone() {
    let folder = folder();
    let errors_and_leaks = damage("", &[(0x40000, COPIED | 0x60000)], false);
    damaged(folder.path(), &errors_and_leaks);
    let repaired = ours(folder.path(), &["check", "-r", "leaks", "--output=json", "c.qcow2"]);
    assert_eq!(repaired.code, 2, "{repaired:?}");
    let report = json(&repaired.stdout);
    assert_eq!((&report["leaks-fixed"], &report["corruptions"]), (&1.into(), &1.into()));

    let leaks = damage("", &[(0x40008, 0)], true);
    damaged(folder.path(), &leaks);
    let found = ours(folder.path(), &["check", "c.qcow2"]);
    assert_eq!(found.code, 3, "{found:?}");
    let repaired = ours(folder.path(), &["check", "-r", "leaks", "c.qcow2"]);
    assert_eq!(repaired.code, 0, "{repaired:?}");
}

#[test]
fn a_dirty_image_is_repaired_and_clean() {
    let folder = folder();
    prepare(folder.path(), "qemu-img create -q -f qcow2 -o lazy_refcounts=on lazy.qcow2 4M");
    let image = folder.path().join("lazy.qcow2");
    let status = Command::new("qemu-io")
        .args(["-c", "write -P 5 0 256k", "-c", "abort"])
        .arg(&image)
        .output()
        .expect("qemu-io is needed: apt-get install qemu-utils")
        .status;
    assert!(!status.success(), "it was to be aborted");
    let args = ["check", "lazy.qcow2"];
    let (mine, theirs) = (ours(folder.path(), &args), qemu_img(folder.path(), &args));
    assert_eq!((mine.code, sorted(&mine.stderr)), (theirs.code, sorted(&theirs.stderr)));
    assert_eq!(ours(folder.path(), &["check", "-r", "all", "lazy.qcow2"]).code, 0);
    let info = qemu_img(folder.path(), &["info", "--output=json", "lazy.qcow2"]);
    assert_eq!(json(&info.stdout)["dirty-flag"], false);
    assert_eq!(qemu_img(folder.path(), &args).stderr, "");
    prepare(folder.path(), "qemu-io lazy.qcow2 | read -P 5 0 256k");
}

/// Command lines of `create` that must print, refuse and make the same.
const CREATIONS: &[&str] = &[
    "-f qcow2 x 1M",
    "-f qcow2 x 0",
    "-f qcow2 x 1000",
    "-f qcow2 x 1.5M",
    "-f qcow2 x 0x100000",
    "-f qcow2 x 1P",
    "-f qcow2 -q x 1M",
    "-f qcow2 -o size=2M x",
    "-f qcow2 -o cluster_size=512 x 1M",
    "-f qcow2 -o cluster_size=4k -o lazy_refcounts=on x 1M",
    "-f qcow2 -o cluster_size=2M,extended_l2=on x 1G",
    "-f qcow2 -o compat=0.10 x 1M",
    "-f qcow2 -o compat=v3,compression_type=zstd x 1M",
    "-f qcow2 -o refcount_bits=1 x 1M",
    "-f qcow2 -o refcount_bits=64,cluster_size=1k x 100M",
    "-f qcow2 -o preallocation=off x 1M",
    "-f qcow2 -o preallocation=metadata x 100M",
    "-f qcow2 -o preallocation=metadata,cluster_size=512,refcount_bits=64 x 10M",
    "-f qcow2 -o preallocation=falloc x 10M",
    "-f qcow2 -o preallocation=full x 10M",
    "-f qcow2 -o preallocation=metadata,extended_l2=on x 10M",
    "-f qcow2 -o preallocation=metadata,refcount_bits=1 x 1234567",
    "-f qcow2 -o data_file=x.data x 1M",
    "-f qcow2 -o data_file=x.data,data_file_raw=on x 3000k",
    "-f qcow2 -o data_file=x.data,preallocation=falloc x 1M",
    "-f qcow2 -b base.raw -F raw x",
    "-f qcow2 -b base.raw -F raw x 10M",
    "-f qcow2 -b base.qcow2 -F qcow2 x",
    "-f qcow2 -b base.raw -F raw -o compat=0.10 x",
    "-f qcow2 -o backing_file=base.raw,backing_fmt=raw x",
    "-f qcow2 -b base.raw -F raw -o extended_l2=on,preallocation=metadata x",
    "-f qcow2 -u -b nosuch -F raw x 1M",
    "-f raw x 1M",
    "x 1000",
    "-f raw -o preallocation=falloc x 1M",
    "-f raw -o preallocation=full x 1M",
    // What cannot be made.
    "",
    "-f qcow2 x",
    "-f qcow2 x 1X",
    "-f qcow2 x 8E",
    "-f qcow2 x 64P",
    "-f qcow2 x 7E",
    "-f qcow2 -o size=5M x 1M",
    "-f qcow2 -o cluster_size=3000 x 1M",
    "-f qcow2 -o cluster_size=4M x 1M",
    "-f qcow2 -o cluster_size=256 x 1M",
    "-f qcow2 -o cluster_size=x x 1M",
    "-f qcow2 -o cluster_size=4k,extended_l2=on x 1M",
    "-f qcow2 -o compat=0.9 x 1M",
    "-f qcow2 -o compat=0.10,lazy_refcounts=on x 1M",
    "-f qcow2 -o compat=0.10,refcount_bits=8 x 1M",
    "-f qcow2 -o compat=0.10,compression_type=zstd x 1M",
    "-f qcow2 -o compat=0.10,extended_l2=on x 1M",
    "-f qcow2 -o compat=0.10,data_file=x.data x 1M",
    "-f qcow2 -o refcount_bits=3 x 1M",
    "-f qcow2 -o refcount_bits=128 x 1M",
    "-f qcow2 -o refcount_bits=1k x 1M",
    "-f qcow2 -o compression_type=foo x 1M",
    "-f qcow2 -o preallocation=foo x 1M",
    "-f qcow2 -o lazy_refcounts=maybe x 1M",
    "-f qcow2 -o nosuch=1 x 1M",
    "-f qcow2 -o data_file_raw=on x 1M",
    "-f qcow2 -o data_file=x.data,data_file_raw=on -b base.raw -F raw x",
    "-f qcow2 -b base.raw x",
    "-f qcow2 -b base.qcow2 x",
    "-f qcow2 -b base.raw -F qcow2 x",
    "-f qcow2 -b base.raw -F nosuch x",
    "-f qcow2 -b nosuch -F raw x",
    "-f qcow2 -u -b nosuch -F raw x",
    "-f qcow2 -b base.raw -F raw -o preallocation=full x",
    "-f qcow2 -b x -F qcow2 x",
    "-f qcow2 -F raw x",
    "-f qcow2 -F raw x 1M",
    "-f qcow2 nofolder/x 1M",
    "-f raw -b base.raw x 1M",
    "-f raw -o preallocation=metadata x 1M",
    "-f raw -o nosuch=1 x 1M",
    "-f raw x",
    "-f nosuch x 1M",
];

#[test]
fn create_prints_refuses_and_makes_what_qemu_img_does() {
    for line in CREATIONS {
        let args: Vec<&str> = ["create"].into_iter().chain(line.split_whitespace()).collect();
        let folders = [folder(), folder()];
        for folder in &folders {
            prepare(
                folder.path(),
                "qemu-img create -q -f raw base.raw 2M
                 qemu-img create -q -f qcow2 base.qcow2 3M",
            );
        }
        let [mine, theirs] = [folders[0].path(), folders[1].path()];
        let (made, expected) = (ours(mine, &args), qemu_img(theirs, &args));
        assert_eq!(made, expected, "{line}");
        if made.code != 0 {
            continue;
        }
        let info = |folder| {
            let mut info = json(&qemu_img(folder, &["info", "--output=json", "x"]).stdout);
            for place in ["children", "actual-size"] {
                info.as_object_mut().expect("an object").remove(place);
            }
            info
        };
        assert_eq!(info(mine), info(theirs), "{line}");
        if line.contains("preallocation") {
            let allocated = |folder: &Path| -> u64 {
                let map = json(&qemu_img(folder, &["map", "--output=json", "x"]).stdout);
                let extents = map.as_array().expect("extents").iter();
                let present = extents.filter(|extent| extent["present"] == true);
                present.map(|extent| extent["length"].as_u64().expect("a length")).sum()
            };
            assert_eq!(allocated(mine), allocated(theirs), "{line}");
        }
        if line.contains("qcow2") && !line.contains("nosuch") {
            let check = qemu_img(mine, &["check", "x"]);
            assert_eq!((check.code, check.stderr), (0, String::new()), "{line}");
            if !line.ends_with("x 0") && !line.ends_with("x 1000") {
                prepare(mine, "qemu-io x | write -P 3 1000 2000 | read -P 3 1000 2000");
                assert_eq!(qemu_img(mine, &["check", "x"]).code, 0, "{line}");
            }
        }
    }
}

#[test]
fn failures_are_told_in_qemu_imgs_words() {
    let folder = folder();
    prepare(
        folder.path(),
        "qemu-img create -q -f raw base.raw 2M
         qemu-img create -q -f qcow2 -u -b nosuch.raw -F raw orphan.qcow2 1M",
    );
    for args in [
        &["info", "nosuch"][..],
        &["info", "-f", "qcow2", "base.raw"],
        &["info", "-f", "foo", "base.raw"],
        &["info"],
        &["info", "a", "b"],
        &["info", "--backing-chain", "orphan.qcow2"],
        &["map", "orphan.qcow2"],
        &["map", "nosuch"],
        &["map", "--start-offset=x", "base.raw"],
        &["check", "nosuch"],
        &["check", "base.raw"],
        &["check"],
    ] {
        assert_eq!(ours(folder.path(), args), qemu_img(folder.path(), args), "{args:?}");
    }
}

#[test]
fn a_busy_image_is_refused_unless_shared() {
    let folder = folder();
    prepare(folder.path(), "qemu-img create -q -f qcow2 busy.qcow2 1M");
    let mut holder = Command::new("qemu-io")
        .args(["-c", "sleep 60000", "busy.qcow2"])
        .current_dir(folder.path())
        .spawn()
        .expect("qemu-io is needed: apt-get install qemu-utils");
    // Looking with another tool would take locks too; the kernel's list tells without.
    let inode = fs::metadata(folder.path().join("busy.qcow2")).expect("the image").ino();
    let deadline = Instant::now() + Duration::from_secs(10);
    let locked = || fs::read_to_string("/proc/locks").expect("the locks");
    while !locked().lines().any(|line| line.contains(&format!(":{inode} "))) {
        assert!(Instant::now() < deadline, "qemu-io does not lock its image");
        sleep(Duration::from_millis(10));
    }
    for args in [
        &["info", "busy.qcow2"][..],
        &["check", "busy.qcow2"],
        &["map", "busy.qcow2"],
        &["create", "-f", "qcow2", "busy.qcow2", "1M"],
        &["info", "-U", "busy.qcow2"],
        &["check", "-U", "busy.qcow2"],
        &["map", "-U", "busy.qcow2"],
    ] {
        assert_eq!(ours(folder.path(), args), qemu_img(folder.path(), args), "{args:?}");
    }
    holder.kill().expect("a process to end");
    holder.wait().expect("a process that has ended");
}
