//! Image locks against the real thing, in both directions.
//!
//! Needs qemu-utils (`apt-get install qemu-utils`); run with `--features system-tests`.
#![cfg(feature = "system-tests")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use stillpoint_host::{Aio, Cache, HostFile, HostFiles, LoopOptions, run};
use stillpoint_io::{Access, Error, Kind};

fn tool(words: &[&str]) -> Output {
    let output = Command::new(words[0]).args(&words[1..]).output();
    output.unwrap_or_else(|error| panic!("{}: {error}; apt-get install qemu-utils", words[0]))
}

fn image(folder: &tempfile::TempDir) -> PathBuf {
    let path = folder.path().join("image.qcow2");
    let made = tool(&["qemu-img", "create", "-q", "-f", "qcow2", path.to_str().unwrap(), "64M"]);
    assert!(made.status.success());
    path
}

/// A running qemu-nbd on the image.
struct Server(Child);

impl Server {
    fn start(path: &Path, options: &[&str]) -> Server {
        let socket = path.with_extension("sock");
        let _ = std::fs::remove_file(&socket);
        let child = Command::new("qemu-nbd")
            .args(options)
            .args(["-f", "qcow2", "-t", "-k", socket.to_str().unwrap(), path.to_str().unwrap()])
            .stderr(Stdio::inherit())
            .spawn()
            .expect("apt-get install qemu-utils");
        let start = Instant::now();
        while !socket.exists() {
            assert!(start.elapsed() < Duration::from_secs(20), "qemu-nbd does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn with_ours<T>(path: &Path, access: Access, test: impl FnOnce(Result<HostFile, Error>) -> T) -> T {
    run(LoopOptions { aio: Aio::Threads, depth: 8 }, async |queue| {
        let files = HostFiles::new(Aio::Threads, Cache::None);
        test(files.open_host(&queue, path.to_str().unwrap(), None, access).await)
    })
    .unwrap()
}

#[test]
fn qemu_is_refused_while_we_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder);
    let name = path.to_str().unwrap();
    with_ours(&path, Access::Write, |ours| {
        let _ours = ours.unwrap();
        let refused: [&[&str]; 5] = [
            &["qemu-img", "info", name],
            &["qemu-io", "-c", "write 0 4k", name],
            &["qemu-io", "-r", "-c", "read 0 4k", name],
            &["qemu-nbd", "-f", "qcow2", "-k", "/tmp/never", name],
            &["qemu-img", "check", name],
        ];
        for words in refused {
            let output = tool(words);
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{words:?}");
            assert!(text.contains("lock"), "{words:?}: {text}");
        }
        assert!(tool(&["qemu-img", "info", "-U", name]).status.success());
    });
    assert!(tool(&["qemu-io", "-c", "write 0 4k", name]).status.success());
}

#[test]
fn qemu_reads_beside_us_while_we_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder);
    let name = path.to_str().unwrap();
    with_ours(&path, Access::Read, |ours| {
        let _ours = ours.unwrap();
        assert!(tool(&["qemu-img", "info", name]).status.success());
        assert!(tool(&["qemu-io", "-r", "-c", "read 0 4k", name]).status.success());
        assert!(!tool(&["qemu-io", "-c", "write 0 4k", name]).status.success());
    });
}

#[test]
fn reading_without_a_lock_hinders_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder);
    with_ours(&path, Access::ReadUnlocked, |ours| {
        let _ours = ours.unwrap();
        let written = tool(&["qemu-io", "-c", "write 0 4k", path.to_str().unwrap()]);
        assert!(written.status.success());
    });
}

#[test]
fn we_are_refused_while_qemu_writes_and_say_who() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder);
    let server = Server::start(&path, &[]);
    let holder = format!("qemu-nbd (process {})", server.0.id());
    for access in [Access::Read, Access::Write] {
        with_ours(&path, access, |ours| {
            let error = ours.unwrap_err();
            assert_eq!(error.kind(), Kind::Busy);
            assert!(error.to_string().contains(&holder), "{error}");
        });
    }
    with_ours(&path, Access::ReadUnlocked, |ours| assert!(ours.is_ok()));
    drop(server);
    with_ours(&path, Access::Write, |ours| assert!(ours.is_ok()));
}

#[test]
fn we_read_beside_qemu_but_do_not_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder);
    let server = Server::start(&path, &["-r"]);
    with_ours(&path, Access::Read, |ours| assert!(ours.is_ok()));
    with_ours(&path, Access::Write, |ours| {
        let error = ours.unwrap_err();
        assert_eq!(error.kind(), Kind::Busy);
        assert!(error.to_string().contains(&format!("process {}", server.0.id())), "{error}");
    });
}
