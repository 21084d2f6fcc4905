//! The house rules that a program can check; each test names the file and line that breaks one.
//!
//! | test | rule |
//! |---|---|
//! | `files_begin_with_their_purpose` | each file begins with `//!` |
//! | `files_stay_short` | none is longer than 1,000 lines without a reason in [`LONG_FILES`] |
//! | `crates_import_in_one_direction` | [`MAY_IMPORT`], in manifests and in code |
//! | `pure_crates_take_the_world_from_outside` | no files, sockets, threads or clocks in [`FORBIDDEN`] crates |
//! | `names_say_what_things_are` | no `utils`, `helpers`, `common`, `manager`, `fn get_` |
//! | `nothing_is_left_for_later` | no `todo!`, no ignored tests |
//! | `unsafe_says_why_it_is_safe` | `SAFETY:` before each unsafe block |
//! | `invariants_exist_and_are_upheld` | numbers cited stand in `docs/durability.md`; each R and F is cited |
//!
//! It reads text, line by line, and does not parse Rust: a rule that needs more than that is for clippy.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Files that may be longer than [`LINES_MAX`], each with its reason.
const LONG_FILES: &[(&str, &str)] = &[];
const LINES_MAX: usize = 1000;

/// Which of our crates each crate may import. What is not listed is forbidden; nobody imports `sim`.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("format", &[]),
    ("io", &[]),
    ("host", &["io"]),
    ("journal", &["format", "io"]),
    ("engine", &["format", "journal", "io"]),
    ("serve", &["engine", "io", "host"]),
    ("cli", &["serve", "engine", "host", "io"]),
    ("sim", &["engine", "journal", "format", "io"]),
];

/// What a crate's code, its tests aside, must not name: the world comes in through `io` (or, for
/// `format`, not at all).
const FORBIDDEN: &[(&str, &[&str])] = &[
    (
        "format",
        &[
            "std::fs",
            "std::net",
            "std::thread",
            "std::time",
            "std::process",
            "async fn",
            "futures",
            "libc::",
            "rustix::",
        ],
    ),
    ("io", &["std::fs", "std::net", "std::thread", "libc::", "rustix::", "Instant::now"]),
    (
        "journal",
        &[
            "std::fs",
            "std::net",
            "std::thread",
            "std::process",
            "Instant",
            "SystemTime",
            "libc::",
            "rustix::",
            "rand::",
            "serde",
            "format::qcow2",
        ],
    ),
    (
        "engine",
        &[
            "std::fs",
            "std::net",
            "std::thread",
            "std::process",
            "Instant",
            "SystemTime",
            "libc::",
            "rustix::",
            "rand::",
            "serde",
        ],
    ),
];

struct File {
    /// Relative to the repository, with forward slashes.
    name: String,
    text: String,
}

impl File {
    fn crate_name(&self) -> &str {
        self.name.split('/').nth(1).unwrap_or("")
    }

    fn is_test(&self) -> bool {
        let stem = Path::new(&self.name).file_stem().and_then(|stem| stem.to_str()).unwrap_or("");
        self.name.split('/').any(|part| part == "tests" || part == "benches")
            || stem == "tests"
            || stem.ends_with("_tests")
    }

    /// The lines of code before the file's tests, numbered from 1, without their comments.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .enumerate()
            .take_while(|(_, line)| !line.trim_start().starts_with("#[cfg(test)]"))
            .map(|(index, line)| (index + 1, line.split("//").next().unwrap_or("")))
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn collect(folder: &Path, root: &Path, wanted: &dyn Fn(&Path) -> bool, into: &mut Vec<File>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.expect("a readable folder").path()) {
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                collect(&path, root, wanted, into);
            }
        } else if wanted(&path) {
            let name = path.strip_prefix(root).expect("a path below the root").to_string_lossy();
            let text = fs::read_to_string(&path).expect("a text file");
            into.push(File { name: name.replace('\\', "/"), text });
        }
    }
}

/// Every Rust file of the workspace, this one included.
fn sources() -> Vec<File> {
    let root = root();
    let mut files = Vec::new();
    for folder in ["crates", "fuzz", "bench"] {
        let rust = |path: &Path| path.extension().is_some_and(|extension| extension == "rs");
        collect(&root.join(folder), &root, &rust, &mut files);
    }
    assert!(files.len() > 20, "found only {} Rust files: is this the repository?", files.len());
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

/// All sources but this file, whose tables hold the very words that it looks for.
fn others() -> Vec<File> {
    sources().into_iter().filter(|file| !file.name.ends_with("cli/tests/tidy.rs")).collect()
}

fn report(rule: &str, broken: Vec<String>) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}

#[test]
fn files_begin_with_their_purpose() {
    let bare = |file: &File| !file.text.starts_with("//!");
    let broken = sources().into_iter().filter(bare).map(|file| file.name).collect();
    report(
        "a file begins with `//!`: what it is for, its invariants, what is deliberately absent",
        broken,
    );
}

#[test]
fn files_stay_short() {
    let mut broken = Vec::new();
    for file in sources() {
        let line_count = file.text.lines().count();
        if line_count > LINES_MAX && !LONG_FILES.iter().any(|(name, _)| *name == file.name) {
            broken.push(format!("{}: {line_count} lines", file.name));
        }
    }
    for (name, _) in LONG_FILES {
        let long = fs::read_to_string(root().join(name))
            .is_ok_and(|text| text.lines().count() > LINES_MAX);
        if !long {
            broken.push(format!("{name}: is on the list of long files and is not long"));
        }
    }
    report("split by meaning, or give a reason in LONG_FILES", broken);
}

#[test]
fn crates_import_in_one_direction() {
    let mut broken = Vec::new();
    for entry in fs::read_dir(root().join("crates")).expect("the crates") {
        let folder = entry.expect("a readable folder").path();
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let Some((_, allowed)) = MAY_IMPORT.iter().find(|(known, _)| *known == name) else {
            broken.push(format!("crates/{name}: a crate without a line in MAY_IMPORT"));
            continue;
        };
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).expect("a manifest");
        let mut in_dependencies = false;
        for (index, line) in manifest.lines().enumerate() {
            if line.starts_with('[') {
                in_dependencies = line.contains("dependencies");
            }
            let imported = line.strip_prefix("stillpoint-").filter(|_| in_dependencies);
            let imported = imported.and_then(|rest| rest.split(['.', ' ', '=']).next());
            if imported.is_some_and(|other| !allowed.contains(&other)) {
                broken.push(format!("crates/{name}/Cargo.toml:{}: {line}", index + 1));
            }
        }
    }
    report("a crate imports only what MAY_IMPORT gives it", broken);
}

#[test]
fn pure_crates_take_the_world_from_outside() {
    let mut broken = Vec::new();
    for file in sources().iter().filter(|file| !file.is_test()) {
        let Some((_, words)) = FORBIDDEN.iter().find(|(name, _)| *name == file.crate_name()) else {
            continue;
        };
        for (number, code) in file.code() {
            for word in *words {
                // `use std::{fs, io}` names a module too.
                let module = word.strip_prefix("std::").unwrap_or("\0");
                let grouped = code.trim_start().starts_with("use std::{")
                    && code
                        .split(['{', '}', ',', ' '])
                        .any(|part| part.split("::").next() == Some(module));
                if code.contains(word) || grouped {
                    broken.push(format!("{}:{number}: {word}", file.name));
                }
            }
        }
    }
    report("time, chance, threads and I/O are passed in", broken);
}

#[test]
fn names_say_what_things_are() {
    const BANNED: &[&str] = &["util", "utils", "helper", "helpers", "common", "manager", "misc"];
    let mut broken = Vec::new();
    for file in others() {
        for part in file.name.split('/') {
            if BANNED.contains(&part.trim_end_matches(".rs")) {
                broken.push(format!("{}: a name that says nothing", file.name));
            }
        }
        for (index, line) in file.text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
            let bad = |word: &str| {
                word.starts_with("get_") && code.contains(&format!("fn {word}"))
                    || word.ends_with("Manager")
                    || word.ends_with("Helper")
                    || BANNED.contains(&word) && code.contains(&format!("mod {word}"))
            };
            if let Some(word) = words.find(|word| bad(word)) {
                broken.push(format!("{}:{}: {word}", file.name, index + 1));
            }
        }
    }
    report("a name says what the thing is", broken);
}

#[test]
fn nothing_is_left_for_later() {
    let mut broken = Vec::new();
    for file in others() {
        for (index, line) in file.text.lines().enumerate() {
            for word in ["todo!(", "unimplemented!(", "#[ignore", "FIXME", "XXX"] {
                if line.contains(word) {
                    broken.push(format!("{}:{}: {word}", file.name, index + 1));
                }
            }
        }
    }
    report("what is not done is not there", broken);
}

#[test]
fn unsafe_says_why_it_is_safe() {
    /// How far above the keyword the comment may begin.
    const LINES_ABOVE_MAX: usize = 10;
    let mut broken = Vec::new();
    for file in others() {
        let lines: Vec<&str> = file.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            let opens = |(at, _): (usize, &str)| {
                !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
            };
            if !code.match_indices("unsafe {").chain(code.match_indices("unsafe impl")).any(opens) {
                continue;
            }
            let above = &lines[index.saturating_sub(LINES_ABOVE_MAX)..=index];
            if !above.iter().any(|line| line.contains("SAFETY:")) {
                broken.push(format!("{}:{}: {}", file.name, index + 1, line.trim()));
            }
        }
    }
    report("`// SAFETY:` stands before each unsafe block", broken);
}

/// The numbers of invariants in a text: R3, F1, S2', J13...
fn cited(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| {
        let (letter, number) = word.split_at_checked(1).unwrap_or(("", ""));
        ["R", "F", "S", "J"].contains(&letter)
            && (1..=2).contains(&number.len())
            && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

#[test]
fn invariants_exist_and_are_upheld() {
    let rules = fs::read_to_string(root().join("docs/durability.md")).expect("docs/durability.md");
    let defined: BTreeSet<&str> = rules
        .lines()
        .filter_map(|line| line.strip_prefix("| **"))
        .filter_map(|rest| cited(rest.split("**").next().unwrap_or("")).next())
        .collect();
    let mut broken = Vec::new();
    let mut upheld = BTreeSet::new();
    let files = others();
    for file in &files {
        for (index, line) in file.text.lines().enumerate() {
            let Some((_, comment)) = line.split_once("//") else { continue };
            for number in cited(comment) {
                if defined.contains(number) {
                    upheld.insert(number);
                } else {
                    broken.push(format!(
                        "{}:{}: no {number} in docs/durability.md",
                        file.name,
                        index + 1
                    ));
                }
            }
        }
    }
    for number in &defined {
        if (number.starts_with('R') || number.starts_with('F')) && !upheld.contains(number) {
            broken.push(format!("{number}: cited nowhere in the code"));
        }
    }
    report("invariants are cited by number where they are upheld", broken);
}

#[test]
fn citations_are_found() {
    let found: Vec<&str> = cited("// R3: see (J13/J17), S2', not XR4, R4x, R, R100 or F").collect();
    assert_eq!(found, ["R3", "J13", "J17", "S2"]);
}
