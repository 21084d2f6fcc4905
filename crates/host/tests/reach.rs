//! F2: what a name inside an image may open, and what it is told otherwise.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use stillpoint_host::{Aio, Cache, HostFile, HostFiles, LoopOptions, Reach, run};
use stillpoint_io::{Access, Error, Kind, Queue, Result, Storage};

/// `vm/` with an image's place, a file beside it and one below; `base/` and `secret` outside.
struct Host {
    _folder: tempfile::TempDir,
    root: PathBuf,
}

impl Host {
    fn new() -> Host {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for sub in ["vm", "vm/sub", "base"] {
            std::fs::create_dir(root.join(sub)).unwrap();
        }
        for file in ["vm/a", "vm/near", "vm/sub/below", "base/base", "secret"] {
            std::fs::write(root.join(file), file).unwrap();
        }
        Host { _folder: folder, root }
    }

    fn path(&self, name: &str) -> String {
        self.root.join(name).to_str().unwrap().to_owned()
    }

    fn allowing(&self, folder: &str) -> Reach {
        Reach::folders(&[self.root.join(folder)]).unwrap()
    }
}

fn on_a_loop<T>(test: impl AsyncFnOnce(&Queue) -> T) -> T {
    run(LoopOptions { aio: Aio::Threads, depth: 32 }, async |queue| test(&queue).await).unwrap()
}

async fn open(queue: &Queue, reach: &Reach, name: &str, beside: &str) -> Result<HostFile> {
    let files = HostFiles::new(Aio::Threads, Cache::Writeback).reaching(reach.clone());
    files.open_host(queue, name, Some(beside), Access::Read).await
}

fn refused(result: Result<HostFile>, words: &[&str]) {
    let error: Error = result.unwrap_err();
    assert_eq!(error.kind(), Kind::Permission, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "'{word}' is not in: {error}");
    }
}

#[test]
fn an_image_names_what_lies_beside_it_or_below() {
    let host = Host::new();
    let image = host.path("vm/a");
    symlink("near", host.root.join("vm/link")).unwrap();
    symlink("vm", host.root.join("other-way")).unwrap();
    on_a_loop(async |queue| {
        for name in ["near", "sub/below", "sub/../near", "../vm/near", "link"] {
            open(queue, &Reach::Beside, name, &image).await.unwrap();
        }
        for name in ["vm/near", "other-way/near"] {
            open(queue, &Reach::Beside, &host.path(name), &image).await.unwrap();
        }
        // The operator may have come by a symlink, too.
        open(queue, &Reach::Beside, &host.path("vm/near"), &host.path("other-way/a"))
            .await
            .unwrap();
        let missing = open(queue, &Reach::Beside, "missing", &image).await.unwrap_err();
        assert_eq!(missing.kind(), Kind::NotFound, "{missing}");
    });
}

#[test]
fn what_lies_outside_is_refused_with_the_way_to_allow_it() {
    let host = Host::new();
    let image = host.path("vm/a");
    symlink("../secret", host.root.join("vm/link")).unwrap();
    symlink("..", host.root.join("vm/up")).unwrap();
    let (secret, home) = (host.path("secret"), host.path("vm"));
    let remedy = format!("allow it with --backing-from {}", host.root.display());
    on_a_loop(async |queue| {
        for name in ["../secret", "link", "up/secret", "sub/../../secret", &secret] {
            let words = [&image, &secret, &home, &remedy].map(String::as_str);
            refused(open(queue, &Reach::Beside, name, &image).await, &words);
        }
        let etc = "cannot open the backing file: /etc/passwd lies outside";
        let words = [etc, "the folder of the image that names it", "--backing-from /etc"];
        refused(open(queue, &Reach::Beside, "/etc/passwd", &image).await, &words);
        // A link elsewhere into the folder would judge the next name by that place.
        symlink(host.root.join("vm/near"), host.root.join("base/back")).unwrap();
        let back = host.path("base/back");
        refused(open(queue, &Reach::Beside, &back, &image).await, &[&back]);
        // Nor is another descriptor of this process a way round.
        refused(open(queue, &Reach::Beside, "/proc/self/fd/0", &image).await, &["/fd/0"]);
        // A folder whose name merely begins alike.
        std::fs::create_dir(host.root.join("vm-too")).unwrap();
        std::fs::write(host.root.join("vm-too/x"), "").unwrap();
        refused(open(queue, &Reach::Beside, "../vm-too/x", &image).await, &["vm-too/x"]);
    });
}

#[test]
fn folders_that_the_operator_names_are_allowed_too() {
    let host = Host::new();
    let (image, base) = (host.path("vm/a"), host.path("base/base"));
    on_a_loop(async |queue| {
        refused(open(queue, &Reach::Beside, &base, &image).await, &[&base]);
        let reach = host.allowing("base");
        for name in [&base, "../base/base", "near"] {
            open(queue, &reach, name, &image).await.unwrap();
        }
        refused(open(queue, &reach, "../secret", &image).await, &["the folders allowed besides"]);
        let anywhere = Reach::folders(&["/".into()]).unwrap();
        open(queue, &anywhere, "../secret", &image).await.unwrap();
        // The operator's own names are followed anywhere.
        let files = HostFiles::new(Aio::Threads, Cache::Writeback);
        let secret = host.path("secret");
        files.open_host(queue, &secret, None, Access::Read).await.unwrap();
    });
}

#[test]
fn each_image_of_a_chain_is_judged_from_its_own_folder() {
    let host = Host::new();
    let image = host.path("vm/a");
    on_a_loop(async |queue| {
        let middle = open(queue, &Reach::Beside, "sub/below", &image).await.unwrap();
        refused(open(queue, &Reach::Beside, "../near", middle.name()).await, &["vm/near"]);

        let reach = host.allowing("base");
        let middle = open(queue, &reach, "../base/base", &image).await.unwrap();
        std::fs::write(host.root.join("base/last"), "").unwrap();
        open(queue, &reach, "last", middle.name()).await.unwrap();
        refused(open(queue, &reach, "../secret", middle.name()).await, &["secret"]);
        refused(open(queue, &reach, "../vm/near", middle.name()).await, &["vm/near"]);
    });
}

#[test]
fn what_is_no_regular_file_is_not_even_opened() {
    let host = Host::new();
    let image = host.path("vm/a");
    let make = |args: &[&str]| {
        let made = std::process::Command::new("mknod").args(args).status().unwrap();
        assert!(made.success(), "mknod needs root: {args:?}");
    };
    let (pipe, zero, disk) = (host.path("vm/pipe"), host.path("vm/zero"), host.path("vm/disk"));
    make(&[&pipe, "p"]);
    make(&[&zero, "c", "1", "5"]);
    // Of a driver that there is none of: once it is let through, opening it fails.
    make(&[&disk, "b", "4000", "1"]);
    let _socket = std::os::unix::net::UnixListener::bind(host.root.join("vm/socket")).unwrap();
    on_a_loop(async |queue| {
        for name in ["pipe", "zero", "socket", "sub"] {
            let error = open(queue, &Reach::Beside, name, &image).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
            assert!(error.to_string().contains("not a regular file"), "{error}");
        }
        let words = ["a block device", "--backing-from"];
        refused(open(queue, &Reach::Beside, "disk", &image).await, &words);
        let error = open(queue, &host.allowing("vm"), "disk", &image).await.unwrap_err();
        assert_ne!(error.kind(), Kind::Permission, "{error}");
    });
}

#[test]
fn a_name_that_changes_meanwhile_never_leads_outside() {
    let host = Host::new();
    let (image, link) = (host.path("vm/a"), host.root.join("vm/link"));
    let stop = AtomicBool::new(false);
    let swap = |target: &str| {
        let new = host.root.join("vm/new");
        symlink(target, &new).unwrap();
        std::fs::rename(&new, &link).unwrap();
    };
    swap("near");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                swap("../secret");
                swap("near");
            }
        });
        let (mut opened, mut refused) = (0, 0);
        let within = std::fs::metadata(host.root.join("vm/near")).map(|found| inode(&found));
        on_a_loop(async |queue| {
            for _ in 0..2000 {
                match open(queue, &Reach::Beside, "link", &image).await {
                    Ok(file) => {
                        assert_eq!(file.facts().id.inode, *within.as_ref().unwrap());
                        opened += 1;
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), Kind::Permission, "{error}");
                        refused += 1;
                    }
                }
            }
        });
        stop.store(true, Ordering::Relaxed);
        assert!(opened > 0 && refused > 0, "{opened} opened, {refused} refused");
    });
}

fn inode(found: &std::fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(found)
}

#[test]
fn a_relative_image_is_judged_from_the_working_folder() {
    // The tests of this crate run in its folder.
    on_a_loop(async |queue| {
        assert!(Path::new("Cargo.toml").exists());
        open(queue, &Reach::Beside, "src/lib.rs", "Cargo.toml").await.unwrap();
        refused(open(queue, &Reach::Beside, "../io/Cargo.toml", "Cargo.toml").await, &["io"]);
    });
}
