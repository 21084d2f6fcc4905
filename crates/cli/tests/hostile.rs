//! Images that mean no good (F1, F2): each is refused, or reported, by name.
//!
//! Every image here begins as a good one that the program made, and is then poked. Whatever it claims,
//! each verb must end by itself within a bound of time and of address space, without a panic or a
//! signal, say which file it is about, and leave the file as it was. `serve` opens an image by the same
//! road as `bench`, and is called where nothing may open at all.
//!
//! Deliberately absent: what images make the engine read, counted (`crates/engine`, the check's tests),
//! and clients that mean no good (`crates/serve/tests`).

use std::fs::File;
use std::os::unix::fs::{FileExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const TIME_MAX: Duration = Duration::from_secs(10);
const ADDRESS_SPACE_MAX: u64 = 1 << 30;

/// Where the image of [`Image::new`] has its structures, in clusters of 64 KiB.
const REFCOUNT_TABLE: u64 = 0x1_0000;
const REFCOUNT_BLOCK: u64 = 0x2_0000;
const L1: u64 = 0x3_0000;
const L2: u64 = 0x4_0000;
const DATA: u64 = 0x5_0000;
/// The flag of an entry whose cluster has one reference.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// The first header extension of a new image: the names of features.
const EXTENSIONS: u64 = 112;
/// Behind the extensions of a new image, in its first cluster.
const AFTER_EXTENSIONS: u64 = 0x400;

/// What a verb has come to.
#[derive(Debug)]
struct Ran {
    code: i32,
    said: String,
    printed: String,
}

/// Calls the program within the bounds.
fn run(args: &[&str]) -> Ran {
    let output = tempfile::tempdir().unwrap();
    let (stdout, stderr) = (output.path().join("stdout"), output.path().join("stderr"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillpoint"));
    command.args(args).stdin(Stdio::null());
    command.stdout(File::create(&stdout).unwrap()).stderr(File::create(&stderr).unwrap());
    let limit = || {
        let limit = libc::rlimit { rlim_cur: ADDRESS_SPACE_MAX, rlim_max: ADDRESS_SPACE_MAX };
        // SAFETY: it reads the structure, which outlives the call.
        match unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec only setrlimit is called, which is safe there.
    unsafe { command.pre_exec(limit) };
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + TIME_MAX;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{args:?} does not end: {}", std::fs::read_to_string(&stderr).unwrap());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let read = |path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    let (said, printed) = (read(&stderr), read(&stdout));
    let code = status.code().unwrap_or_else(|| panic!("{args:?} ended by {status}: {said}"));
    assert!(!said.contains("panicked"), "{args:?}: {said}");
    Ran { code, said, printed }
}

/// An image in a folder of its own.
struct Image {
    folder: TempDir,
    path: PathBuf,
}

impl Image {
    /// 16 clusters of 64 KiB, all of them allocated and none written.
    fn new() -> Image {
        Image::with("preallocation=metadata", "1M")
    }

    fn with(options: &str, size: &str) -> Image {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.qcow2");
        create(&path, options, size);
        Image { folder, path }
    }

    fn poke(&self, offset: u64, bytes: impl AsRef<[u8]>) -> &Image {
        poke(&self.path, offset, bytes.as_ref());
        self
    }

    fn poke_word(&self, offset: u64, word: u64) -> &Image {
        self.poke(offset, word.to_be_bytes())
    }

    /// Makes the file this long.
    fn stretch(&self, length: u64) -> &Image {
        File::options().write(true).open(&self.path).unwrap().set_len(length).unwrap();
        self
    }

    fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// The bytes that say whether anything was changed: all of a small file.
    fn bytes(&self) -> Vec<u8> {
        let file = File::open(&self.path).unwrap();
        let length = file.metadata().unwrap().len().min(4 << 20);
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Calls a verb that only reads.
    fn read(&self, verb: &[&str]) -> Ran {
        let before = (self.bytes(), std::fs::metadata(&self.path).unwrap().len());
        let ran = run(&[verb, &[self.name()]].concat());
        let after = (self.bytes(), std::fs::metadata(&self.path).unwrap().len());
        assert!(before == after, "{verb:?} has changed the file");
        ran
    }

    fn refused_by(&self, verb: &[&str], what: &str, words: &str) {
        let ran = self.read(verb);
        assert_eq!(ran.code, 1, "{what}: {verb:?}: {ran:?}");
        assert!(ran.said.contains(words), "{what}: {verb:?} does not say '{words}': {ran:?}");
        // The image, or what stands behind it and is at fault.
        let named = ran.said.contains("disk.qcow2") || ran.said.contains(what);
        assert!(named, "{what}: {verb:?} names no file: {ran:?}");
    }

    /// Whoever uses the disk's bytes refuses the image.
    fn use_is_refused(&self, what: &str, words: &str) {
        let socket = format!("unix:{}", self.folder.path().join("socket").display());
        for verb in [&READ[..], &WRITE, &["serve", "--nbd", &socket]] {
            self.refused_by(verb, what, words);
        }
    }

    /// Everyone refuses the image; `check` may tell of its faults instead.
    fn is_refused(&self, what: &str, words: &str) {
        self.refused_by(&["info"], what, words);
        self.refused_by(&["map"], what, words);
        self.use_is_refused(what, words);
        let ran = self.read(&["check"]);
        assert!([1, 2].contains(&ran.code), "{what}: {ran:?}");
        assert!(ran.code == 2 || ran.said.contains(words), "{what}: {ran:?}");
    }

    /// `check` finds corruption, or leaks at least; everyone else ends well or with a reason that names the file, and
    /// a guest's writes leave the header and the tables' places alone.
    fn is_reported(&self, what: &str) {
        let ran = self.read(&["check"]);
        assert!([2, 3].contains(&ran.code), "{what}: {ran:?}");
        assert!(ran.said.contains("ERROR") || ran.said.contains("Leaked"), "{what}: {ran:?}");
        assert_eq!(self.read(&["info"]).code, 0, "{what}");
        for verb in [&["map", "--output", "json"][..], &READ, &WRITE] {
            let header = self.bytes()[..0x70].to_vec();
            let ran = run(&[verb, &[self.name()]].concat());
            let named = ran.said.contains("disk.qcow2");
            assert!(ran.code == 0 || ran.code == 1 && named, "{what}: {verb:?}: {ran:?}");
            assert_eq!(self.bytes()[..0x70], header, "{what}: {verb:?} has changed the header");
        }
    }
}

/// Requests to the first 16 clusters.
const READ: [&str; 9] = ["bench", "-t", "writeback", "-c", "16", "-d", "4", "-S", "64k"];
const WRITE: [&str; 10] = ["bench", "-w", "-t", "writeback", "-c", "16", "-d", "4", "-S", "64k"];

fn create(path: &Path, options: &str, size: &str) {
    let path = path.to_str().unwrap();
    let ran = run(&["create", "-q", "-f", "qcow2", "-o", options, path, size]);
    assert_eq!(ran.code, 0, "{ran:?}");
}

fn poke(path: &Path, offset: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

/// Gives an image a backing file by name, raw bytes and all.
fn back(path: &Path, name: &[u8]) {
    poke(path, AFTER_EXTENSIONS, name);
    poke(path, 8, &AFTER_EXTENSIONS.to_be_bytes());
    poke(path, 16, &(name.len() as u32).to_be_bytes());
}

#[test]
fn every_rule_of_the_header_refuses_by_name() {
    let u32s = |at: u64, value: u32| (at, value.to_be_bytes().to_vec());
    let u64s = |at: u64, value: u64| (at, value.to_be_bytes().to_vec());
    let cases = [
        ("version 1", vec![u32s(4, 1)], "version 1"),
        ("version 4", vec![u32s(4, 4)], "version 4"),
        ("clusters of 256 bytes", vec![u32s(20, 8)], "cluster size"),
        ("clusters of 4 MiB", vec![u32s(20, 22)], "cluster size"),
        ("clusters of 2^64 bytes", vec![u32s(20, 64)], "cluster size"),
        ("clusters beyond all numbers", vec![u32s(20, u32::MAX)], "cluster size"),
        ("no header length", vec![u32s(100, 0)], "header length"),
        ("a short header", vec![u32s(100, 96)], "header length"),
        ("an uneven header", vec![u32s(100, 108)], "header length"),
        ("a header beyond its cluster", vec![u32s(100, 0x1_0008)], "header length"),
        ("an endless header", vec![u32s(100, u32::MAX - 7)], "header length"),
        ("a disk of 2^63 bytes", vec![u64s(24, 1 << 63)], "2^63"),
        ("the largest disk", vec![u64s(24, u64::MAX)], "2^63"),
        ("a disk beyond its L1 table", vec![u64s(24, 1 << 40)], "L1 table"),
        ("no L1 table", vec![u32s(36, 0)], "L1 table"),
        ("an L1 table beyond 32 MiB", vec![u32s(36, (4 << 20) + 1)], "32 MiB"),
        ("an endless L1 table", vec![u32s(36, u32::MAX)], "32 MiB"),
        ("an L1 table of 32 MiB that is not there", vec![u32s(36, 4 << 20)], "inside the file"),
        ("an unaligned L1 table", vec![u64s(40, L1 + 8)], "multiple of the cluster size"),
        ("an L1 table on the header", vec![u64s(40, 0)], "on the header"),
        ("an L1 table beyond the file", vec![u64s(40, 1 << 40)], "inside the file"),
        ("an L1 table at 2^56", vec![u64s(40, 1 << 56)], "2^56"),
        ("an L1 table at 2^63", vec![u64s(40, 1 << 63)], "2^56"),
        ("an L1 table at the end of all", vec![u64s(40, !0xffff)], "2^56"),
        ("an unaligned refcount table", vec![u64s(48, 0x1_0200)], "multiple of the cluster"),
        ("a refcount table on the header", vec![u64s(48, 0)], "on the header"),
        ("a refcount table beyond the file", vec![u64s(48, 1 << 40)], "inside the file"),
        ("a refcount table at 2^56", vec![u64s(48, 1 << 56)], "2^56"),
        ("a refcount table at the end of all", vec![u64s(48, !0xffff)], "2^56"),
        ("no refcount table", vec![u32s(56, 0)], "refcount table"),
        ("a refcount table beyond 8 MiB", vec![u32s(56, 129)], "8 MiB"),
        ("an endless refcount table", vec![u32s(56, u32::MAX)], "8 MiB"),
        ("65537 snapshots", vec![u32s(60, 65537)], "65536 snapshots"),
        ("endless snapshots", vec![u32s(60, u32::MAX)], "65536 snapshots"),
        ("snapshots on the header", vec![u32s(60, 1), u64s(64, 0)], "on the header"),
        ("an unaligned snapshot table", vec![u32s(60, 1), u64s(64, 0x1_0200)], "multiple of"),
        ("snapshots beyond the file", vec![u32s(60, 1), u64s(64, 1 << 40)], "inside the file"),
        ("snapshots at 2^63", vec![u32s(60, 1), u64s(64, 1 << 63)], "2^56"),
        ("refcounts of 128 bits", vec![u32s(96, 7)], "order 6"),
        ("refcounts beyond all numbers", vec![u32s(96, u32::MAX)], "order 6"),
        ("an unknown encryption", vec![u32s(32, 3)], "encryption method 3"),
        ("an unknown compression", vec![u64s(72, 8), (104, vec![9])], "compression type 9"),
        ("a compression without its bit", vec![(104, vec![1])], "compression bit"),
        ("a compression bit without its type", vec![u64s(72, 8)], "compression bit"),
        ("an unknown feature", vec![u64s(72, 1 << 63)], "8000000000000000"),
        ("an extension beyond its cluster", vec![u32s(EXTENSIONS + 4, u32::MAX)], "extension"),
        (
            "an extension into the backing name",
            vec![u64s(8, EXTENSIONS + 16), u32s(16, 4), (EXTENSIONS + 16, b"base".to_vec())],
            "extension",
        ),
        ("a name beyond its cluster", vec![u64s(8, 0xfff0), u32s(16, 17)], "backing"),
        ("a name beyond all offsets", vec![u64s(8, u64::MAX), u32s(16, 8)], "backing"),
        ("a name inside the header", vec![u64s(8, 72), u32s(16, 8)], "backing"),
        ("a name of 1024 bytes", vec![u64s(8, AFTER_EXTENSIONS), u32s(16, 1024)], "1023 bytes"),
        ("an endless name", vec![u64s(8, AFTER_EXTENSIONS), u32s(16, u32::MAX)], "1023 bytes"),
    ];
    for (what, pokes, words) in cases {
        let image = Image::new();
        for (at, bytes) in pokes {
            image.poke(at, bytes);
        }
        image.is_refused(what, words);
    }
}

#[test]
fn a_file_that_ends_early_is_refused() {
    for length in [4, 71, 103, 0x1_0000, L1] {
        let image = Image::new();
        image.stretch(length);
        // A file without a whole magic could be a raw disk: said, not guessed.
        for verb in [&["info", "-f", "qcow2"][..], &["check", "-f", "qcow2"]] {
            let ran = image.read(verb);
            assert_ne!(ran.code, 0, "{length}: {verb:?}: {ran:?}");
        }
        image.refused_by(&["bench", "-f", "qcow2", "-t", "writeback", "-c", "1"], "short", "");
    }
}

#[test]
fn unknown_features_are_told_by_the_names_that_the_image_gives_them() {
    let image = Image::new();
    // The first entry of the table of names: incompatible, bit 40.
    image.poke_word(72, 1 << 40).poke(EXTENSIONS + 8, [0, 40]);
    image.poke(EXTENSIONS + 10, b"time travel\0");
    image.is_refused("a named feature", "time travel");
}

#[test]
fn encrypted_images_are_never_taken_for_plain_ones() {
    for method in [1u32, 2] {
        let image = Image::new();
        image.poke(32, method.to_be_bytes());
        image.use_is_refused("encrypted", "encrypted");
    }
}

#[test]
fn an_external_data_file_is_missed_by_name() {
    let image = Image::new();
    image.poke_word(72, 4);
    image.use_is_refused("a nameless data file", "data file");
    image.refused_by(&["map"], "a nameless data file", "data file");
    let name = image.folder.path().join("nowhere");
    // An extension in place of the feature names, and the end behind it.
    let name = name.to_str().unwrap().as_bytes();
    image.poke(EXTENSIONS, 0x4441_5441u32.to_be_bytes());
    image.poke(EXTENSIONS + 4, (name.len() as u32).to_be_bytes());
    image.poke(EXTENSIONS + 8, [name, &[0; 64]].concat());
    assert_eq!(image.read(&["info"]).code, 0);
    assert!(image.read(&["map"]).said.contains("nowhere"));
}

#[test]
fn a_guest_cannot_write_to_the_tables_that_an_entry_claims_for_it() {
    let tables = [0, REFCOUNT_TABLE, REFCOUNT_BLOCK, L1, L2];
    let flags = [COPIED, 0, COMPRESSED];
    for (table, flag) in tables[1..].iter().flat_map(|&table| flags.map(|flag| (table, flag))) {
        let image = Image::new();
        image.poke_word(L2 + 3 * 8, table | flag);
        let before = tables.map(|table| image.bytes()[table as usize..][..0x1_0000].to_vec());
        let wrong = |ran: &Ran| ran.said.lines().filter(|line| line.contains("ERROR")).count();
        let first = wrong(&image.read(&["check"]));
        let ran = run(&[&WRITE[..], &["-s", "64k", "--pattern", "90", image.name()]].concat());
        assert_eq!(ran.code, 0, "{table:#x}: {ran:?}");
        assert!(ran.said.contains("own tables"), "{table:#x}: {ran:?}");
        // The guest's bytes are elsewhere: no table holds any, and there is no more wrong than before.
        let after = tables.map(|table| image.bytes()[table as usize..][..0x1_0000].to_vec());
        let pattern = |bytes: &[u8]| bytes.windows(64).any(|bytes| bytes == [b'Z'; 64]);
        assert!(!after.iter().any(|bytes| pattern(bytes)), "{table:#x}, {flag:#x}");
        assert_eq!(before[0], after[0], "{table:#x}: the header has changed");
        assert!(wrong(&image.read(&["check"])) <= first, "{table:#x}, {flag:#x}");
    }
}

#[test]
fn chains_that_come_back_to_themselves_are_refused() {
    let image = Image::new();
    let beside = |name: &str| image.folder.path().join(name);
    create(&beside("other.qcow2"), "preallocation=metadata", "1M");
    back(&beside("other.qcow2"), b"disk.qcow2");
    std::fs::hard_link(&image.path, beside("hard")).unwrap();
    symlink(&image.path, beside("soft")).unwrap();
    for name in ["disk.qcow2", "other.qcow2", "hard", "soft", "./disk.qcow2"] {
        back(&image.path, name.as_bytes());
        image.refused_by(&["map"], name, "");
        image.use_is_refused(name, "");
        assert_eq!(image.read(&["info"]).code, 0, "one image is told about without its chain");
        let ran = image.read(&["info", "--backing-chain"]);
        assert!(ran.code == 1 && ran.said.contains("loop"), "{name}: {ran:?}");
        assert_eq!(image.read(&["check"]).code, 0, "the check needs no chain");
    }
    symlink("loop", beside("loop")).unwrap();
    back(&image.path, b"loop");
    image.use_is_refused("loop", "");
}

#[test]
fn a_chain_has_a_longest_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = |index: usize| folder.path().join(format!("{index:03}"));
    // The small images of version 2 have nothing between the header and the end of their cluster.
    create(&path(0), "compat=v2,cluster_size=512", "64k");
    let bytes = std::fs::read(path(0)).unwrap();
    for index in 0..257 {
        std::fs::write(path(index), &bytes).unwrap();
        if index > 0 {
            poke(&path(index), 0x100, format!("{:03}", index - 1).as_bytes());
            poke(&path(index), 8, &0x100u64.to_be_bytes());
            poke(&path(index), 16, &3u32.to_be_bytes());
        }
    }
    let (longest, longer) = (path(255), path(256));
    for verb in [&["map"][..], &["info", "--backing-chain"], &READ] {
        let ran = run(&[verb, &[longest.to_str().unwrap()]].concat());
        assert_eq!(ran.code, 0, "{verb:?}: {ran:?}");
        let ran = run(&[verb, &[longer.to_str().unwrap()]].concat());
        assert!(ran.code == 1 && ran.said.contains("256"), "{verb:?}: {ran:?}");
    }
}

#[test]
fn backing_names_are_paths_to_disks_and_nothing_else() {
    let pipe = |folder: &Path| {
        let path = std::ffi::CString::new(folder.join("pipe").to_str().unwrap()).unwrap();
        // SAFETY: the path is a string that ends with NUL and outlives the call.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    };
    for name in [
        &b"json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}"[..],
        b"nbd:unix:/run/socket",
        b"nbd+unix:///?socket=/run/socket",
        b"nbd://localhost",
        b"https://example.org/disk",
        b"nowhere",
        b"pipe",
        b"/dev/zero",
        b"/dev/tty",
        b".",
        b"disk.qcow2\0hidden",
        b"\xff\xfe",
        b"/proc/self/mem",
    ] {
        let image = Image::new();
        pipe(image.folder.path());
        back(&image.path, name);
        image.use_is_refused(&String::from_utf8_lossy(name), "");
        let ran = image.read(&["map"]);
        assert!(ran.code == 1 && !ran.said.is_empty(), "{name:?}: {ran:?}");
        // Telling about the image opens nothing but the image; names that cannot be names it refuses.
        assert!([0, 1].contains(&image.read(&["info"]).code));
    }
}

#[test]
fn a_snapshot_table_of_gigabytes_is_refused() {
    // One entry whose extra data, one whose names are endless; and as many empty ones as may be.
    let image = Image::new();
    image.stretch(8 << 30).poke(60, 1u32.to_be_bytes()).poke_word(64, DATA);
    image.poke(DATA + 36, (1u32 << 30).to_be_bytes());
    image.refused_by(&["info"], "extra data of a gigabyte", "snapshot");
    let ran = image.read(&["check"]);
    assert!([1, 2].contains(&ran.code), "{ran:?}");

    let image = Image::new();
    image.stretch(8 << 30).poke(60, 65536u32.to_be_bytes()).poke_word(64, 1 << 30);
    let ran = image.read(&["info"]);
    assert!(ran.code == 0 || ran.said.contains("snapshot"), "{:?}", (ran.code, ran.said));
    for verb in [&["check"][..], &READ] {
        let ran = image.read(verb);
        assert!([0, 1, 2, 3].contains(&ran.code), "{verb:?}: {:?}", (ran.code, ran.said));
    }
}

#[test]
fn a_bitmap_directory_without_measure_is_refused() {
    let directory = |count: u32, size: u64, offset: u64| {
        let image = Image::new();
        image.stretch(8 << 30).poke_word(88, 1);
        image.poke(EXTENSIONS, 0x2385_2875u32.to_be_bytes()).poke(EXTENSIONS + 4, [0, 0, 0, 24]);
        image.poke(EXTENSIONS + 8, count.to_be_bytes()).poke(EXTENSIONS + 12, [0; 4]);
        image.poke_word(EXTENSIONS + 16, size).poke_word(EXTENSIONS + 24, offset);
        image.poke_word(EXTENSIONS + 32, 0);
        image
    };
    directory(0, 64, DATA).is_refused("no bitmaps", "bitmap");
    directory(65536, 64 << 10, DATA).is_refused("65536 bitmaps", "bitmap");
    directory(1, 1 << 40, DATA).is_refused("a directory of a terabyte", "bitmap");
    directory(1, 64, 1 << 63).is_refused("a directory at 2^63", "bitmap");
    directory(1, 64, DATA + 8).is_refused("an unaligned directory", "bitmap");
    // As long as may be, and nothing in it: whoever keeps bitmaps has to read it.
    let image = directory(65535, 1024 * 65535, 1 << 30);
    for verb in [&["info"][..], &WRITE] {
        image.refused_by(verb, "an empty directory", "bitmap");
    }
    assert_eq!(image.read(&READ).code, 0);
}

#[test]
fn a_small_file_that_claims_a_terabyte_costs_what_it_holds() {
    // 2048 L1 entries, each of the same L2 table.
    let image = Image::with("preallocation=off", "1T");
    image.poke(L1, (COPIED | L2).to_be_bytes().repeat(2048)).stretch(400 << 10);
    image.is_reported("one table for all");
    // The same table, full: one cluster is the whole disk. Its map has as many lines as it has clusters,
    // and is as long as whoever asks for it lets it be.
    let image = Image::with("preallocation=off", "1T");
    image.poke(L1, (COPIED | L2).to_be_bytes().repeat(2048)).stretch(400 << 10);
    image.poke(L2, (COPIED | DATA).to_be_bytes().repeat(8192));
    for (verb, code) in [(&["info"][..], 0), (&["check"], 2), (&READ, 0)] {
        let ran = image.read(verb);
        assert_eq!(ran.code, code, "{verb:?}: {}", ran.said.chars().take(1000).collect::<String>());
    }
}

#[test]
fn the_longest_l1_table_costs_what_it_holds() {
    // A hole of 32 MiB that maps 128 GiB in clusters of 512 bytes; and of 2 MiB: 2 EiB.
    for (options, size, bits) in [("cluster_size=512", "1M", 9), ("cluster_size=2M", "1G", 21)] {
        let image = Image::with(options, size);
        let entries = 4u32 << 20;
        image.stretch(1 << 30).poke(36, entries.to_be_bytes()).poke_word(40, 512 << 20);
        image.poke_word(24, u64::from(entries) << (2 * bits - 3));
        for verb in [&["info"][..], &["map"], &READ] {
            let ran = image.read(verb);
            assert_eq!(ran.code, 0, "{options}: {verb:?}: {ran:?}");
        }
        let ran = image.read(&["check"]);
        assert!([2, 3].contains(&ran.code), "{options}: {ran:?}");
        let ran = run(&[&WRITE[..], &[image.name()]].concat());
        assert_eq!(ran.code, 0, "{options}: {ran:?}");
    }
}

#[test]
fn tables_that_point_at_one_another_are_reported() {
    for (what, at, entry) in [
        ("an L1 entry at the L1 table", L1, COPIED | L1),
        ("an L1 entry at the refcount table", L1, COPIED | REFCOUNT_TABLE),
        ("an L1 entry at a refcount block", L1, COPIED | REFCOUNT_BLOCK),
        ("an L1 entry at a data cluster", L1, COPIED | DATA),
        ("an unaligned L1 entry", L1, COPIED | (L2 + 0x200)),
        ("an L1 entry beyond the file", L1, COPIED | 1 << 40),
        ("an L1 entry near 2^56", L1, COPIED | ((1 << 56) - 0x1_0000)),
        ("an L1 entry with reserved bits", L1, COPIED | 1 << 60 | L2),
        ("an L2 entry at its own table", L2, COPIED | L2),
        ("an L2 entry at the L1 table", L2, COPIED | L1),
        ("an L2 entry at the refcount table", L2, COPIED | REFCOUNT_TABLE),
        ("an L2 entry at a refcount block", L2, COPIED | REFCOUNT_BLOCK),
        ("an L2 entry at another's cluster", L2, COPIED | (DATA + 0x1_0000)),
        ("an unaligned L2 entry", L2, COPIED | (DATA + 0x200)),
        ("an L2 entry beyond the file", L2, COPIED | 1 << 40),
        ("an L2 entry near 2^56", L2, COPIED | ((1 << 56) - 0x1_0000)),
        ("an L2 entry with reserved bits", L2, COPIED | 1 << 60 | DATA),
        ("a compressed entry on the header", L2, COMPRESSED | 1 << 54 | 0x200),
        ("a compressed entry beyond the file", L2, COMPRESSED | 1 << 54 | 1 << 40),
    ] {
        let image = Image::new();
        image.poke_word(at, entry);
        image.is_reported(what);
    }
}

#[test]
fn refcounts_that_lie_cost_no_structure_its_cluster() {
    for (what, at, word) in [
        ("a refcount table at itself", REFCOUNT_TABLE, REFCOUNT_TABLE),
        ("a refcount table at the L1 table", REFCOUNT_TABLE, L1),
        ("a refcount block that counts nothing", REFCOUNT_BLOCK, 0),
        ("an unaligned refcount block", REFCOUNT_TABLE, REFCOUNT_BLOCK + 0x200),
        ("a refcount block beyond the file", REFCOUNT_TABLE, 1 << 40),
        ("a refcount block near 2^56", REFCOUNT_TABLE, (1 << 56) - 0x1_0000),
        ("a refcount table without blocks", REFCOUNT_TABLE, 0),
        ("a refcount table with reserved bits", REFCOUNT_TABLE, REFCOUNT_BLOCK | 1),
    ] {
        // Nothing is allocated yet: what is written has to find itself a cluster.
        let image = Image::with("preallocation=off", "1M");
        image.poke_word(at, word);
        image.is_reported(what);
        let ran = run(&["check", "-r", "all", image.name()]);
        assert_eq!(ran.code, 0, "{what}: {ran:?}");
        assert_eq!(image.read(&READ).code, 0, "{what}");
    }
}

#[test]
fn compressed_garbage_is_an_error_at_its_place() {
    for (what, zstd) in [("deflate", false), ("zstd", true)] {
        let options = if zstd { "compression_type=zstd" } else { "compression_type=zlib" };
        // Bytes without sense; zeros; what ends early: a stored block, a frame's head.
        for garbage in
            [&[0xa5; 512][..], &[0; 512], &[1, 0xff, 0xff, 0, 0], b"\x28\xb5\x2f\xfd\x04"]
        {
            let image = Image::with(&format!("{options},preallocation=metadata"), "1M");
            // One sector more than the one that it begins in.
            image.poke_word(L2, COMPRESSED | 1 << 54 | DATA).poke(DATA, garbage);
            let ran = image.read(&READ);
            assert_eq!(ran.code, 1, "{what}: {ran:?}");
            assert!(ran.said.contains("0x50000") && ran.said.contains("disk.qcow2"), "{ran:?}");
            // A write of a part needs the rest, and fails as well; the cluster stays as it was.
            let ran = run(&[&WRITE[..], &[image.name()]].concat());
            assert_eq!(ran.code, 1, "{what}: {ran:?}");
            assert_eq!(
                image.bytes()[L2 as usize..][..8],
                (COMPRESSED | 1 << 54 | DATA).to_be_bytes()
            );
            assert_eq!(image.read(&["map", "--output", "json"]).code, 0);
        }
    }
}

#[test]
fn a_bomb_fills_its_cluster_and_no_more() {
    // A deflate stream of fixed codes: a zero byte, then 258 zeros again and again, for ever.
    let image = Image::new();
    let mut bits: Vec<bool> = Vec::new();
    let mut code = |value: u32, length: u32| {
        (0..length).rev().for_each(|bit| bits.push(value >> bit & 1 != 0));
    };
    code(0b1, 1); // the last block
    code(0b10, 2); // fixed codes (01, low bit first)
    code(0x30, 8); // the byte 0
    for _ in 0..20_000 {
        code(0xc5, 8); // length 258
        code(0, 5); // distance 1
    }
    let bytes: Vec<u8> = bits
        .chunks(8)
        .map(|bits| bits.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit)))
        .collect();
    assert!(bytes.len() < 64 << 10, "it would inflate to {} bytes", 20_000 * 258);
    image.poke(DATA, &bytes).poke_word(L2, COMPRESSED | 127 << 54 | DATA);
    // 16 reads, one in the bomb: it gives its cluster's bytes, or is an error; nothing grows.
    let ran = image.read(&READ);
    assert!([0, 1].contains(&ran.code), "{ran:?}");
    assert!(ran.printed.contains("Run completed") || ran.said.contains("0x50000"), "{ran:?}");
}
