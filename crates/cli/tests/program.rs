//! The program as people call it: what it prints, its exit codes, its mistakes by name.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use stillpoint_host::net::Address;
use stillpoint_serve::nbd::client::Client;
use stillpoint_serve::nbd::codec::transmission_flag;
use stillpoint_serve::nbd::handshake::ReplyStyle;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_stillpoint"))
}

fn run(args: &[&str]) -> Output {
    program().args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs it and expects this exit code and these words on standard error.
fn refused(args: &[&str], code: i32, words: &[&str]) {
    let output = run(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?} does not say '{word}': {said}");
    }
}

fn raw_image(folder: &Path, name: &str) -> String {
    let path = folder.join(name);
    std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A served program; ended by SIGTERM, or killed if the test fails first.
struct Served(Child);

impl Served {
    fn start(args: &[&str]) -> Served {
        let mut child = program().arg("serve").args(args).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let ready = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("ready")));
        assert!(ready.is_some(), "it ended before it was ready");
        // Drained, so that it never waits for its log.
        std::thread::spawn(move || lines.for_each(drop));
        Served(child)
    }

    fn terminate(mut self) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert_eq!(self.0.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_demo_verifies_itself_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = program().arg("demo").env("TMPDIR", folder.path()).output().unwrap();
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{said}{complained}");
    for words in ["write to new places", "overwrite anywhere", "verified, every byte", "4 GiB"] {
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn bench_prints_qemu_imgs_lines_or_json() {
    let folder = tempfile::tempdir().unwrap();
    let image = raw_image(folder.path(), "disk.raw");
    let args = ["bench", "-f", "raw", "-w", "-c", "100", "-d", "8", "-S", "64k", "--pattern", "7"];
    let flush = ["--flush-interval", "10", &image];
    let said = text(&run(&[&args[..], &flush].concat()).stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(
        lines[0],
        "Sending 100 write requests, 4096 bytes each, 8 in parallel (starting at offset 0, step size 65536)"
    );
    assert_eq!(lines[1], "Sending flush every 10 requests");
    assert!(lines[2].starts_with("Run completed in ") && lines[2].ends_with(" seconds."));
    let bytes = std::fs::read(folder.path().join("disk.raw")).unwrap();
    assert_eq!((bytes[99 * 65536], bytes[4096], bytes.len()), (7, 0, 8 << 20));

    let said = text(&run(&["bench", "-f", "raw", "-c", "50", "--output", "json", &image]).stdout);
    let result: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&result["operation"], &result["count"]), (&"read".into(), &50.into()));
}

#[test]
fn calls_that_make_no_sense_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let image = raw_image(folder.path(), "disk.raw");
    refused(&["conjure"], 1, &["conjure"]);
    refused(&["img", "conjure"], 1, &["conjure"]);
    refused(&["bench", "-c", "0", &image], 1, &["0"]);
    refused(&["bench", "/no/such/image"], 1, &["/no/such/image", "No such file"]);
    refused(&["img", "bench", "/no/such/image"], 1, &["qemu-img: "]);
    refused(&["bench", "-n", "-f", "raw", &image], 1, &["direct I/O", "-t none"]);
    refused(&["bench", "--flush-interval", "9", "-f", "raw", &image], 1, &["write tests"]);
    refused(&["serve"], 1, &["no image is named"]);
    refused(&["serve", "a/x.raw", "b/x.raw"], 1, &["\"x\"", "NAME=FILE"]);
    refused(&["serve", "x.raw,colour=red"], 1, &["colour", "the keys are format"]);
    refused(&["serve", "x.raw", "--nbd", "udp:1"], 1, &["udp:1", "unix:PATH"]);
    refused(&["serve", "x", "--config", "/no/such.toml"], 1, &["/no/such.toml"]);
    assert_eq!(run(&["serve", "--help"]).status.code(), Some(0));
}

#[test]
fn a_raw_disk_is_not_guessed_for_writing() {
    let folder = tempfile::tempdir().unwrap();
    let image = raw_image(folder.path(), "disk.raw");
    let socket = format!("unix:{}", folder.path().join("s").display());
    refused(&["serve", &image, "--nbd", &socket], 1, &["disk.raw", "raw"]);
}

#[test]
fn backing_files_elsewhere_are_opened_on_the_operators_word() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    std::fs::create_dir_all(root.join("vm/sub")).unwrap();
    std::fs::create_dir(root.join("templates")).unwrap();
    let create = |args: &[&str]| {
        let made = program().current_dir(&root).arg("create").args(args).output().unwrap();
        assert!(made.status.success(), "{}", text(&made.stderr));
    };
    // A chain of three by relative names, its end in another folder.
    create(&["-f", "raw", "templates/base.raw", "1M"]);
    create(&["-f", "qcow2", "-b", "../../templates/base.raw", "-F", "raw", "vm/sub/middle.qcow2"]);
    create(&["-f", "qcow2", "-b", "sub/middle.qcow2", "-F", "qcow2", "vm/disk.qcow2"]);
    std::fs::write(root.join("templates/base.raw"), [7; 1 << 20]).unwrap();

    let (image, templates) = (root.join("vm/disk.qcow2"), root.join("templates"));
    let (image, templates) = (image.to_str().unwrap(), templates.to_str().unwrap());
    let socket = root.join("s");
    let nbd = format!("--nbd=unix:{}", socket.display());
    let middle = root.join("vm/sub/middle.qcow2").display().to_string();
    let why = format!("cannot open the backing file: {templates}/base.raw lies outside");
    let remedy = format!("allow it with --backing-from {templates}");
    refused(&["serve", image, &nbd], 1, &[&middle, &why, &remedy]);
    let elsewhere = format!("--backing-from={}", root.join("vm").display());
    refused(&["serve", image, &nbd, &elsewhere], 1, &[&why, &remedy]);
    refused(&["serve", image, &nbd, "--backing-from=/no/such"], 1, &["/no/such"]);
    // What an operator does by hand follows names anywhere.
    assert!(run(&["info", "--backing-chain", image]).status.success());

    let config = root.join("serve.toml");
    let settings = format!("[[image]]\npath = '{image}'\nbacking-from = ['/usr', '{templates}']\n");
    std::fs::write(&config, settings).unwrap();
    let behind = format!("{image},backing-from={templates}");
    for args in [
        &[image, &nbd, "--backing-from", templates][..],
        &[image, &nbd, "--backing-from=/"],
        &[&behind, &nbd],
        &[&nbd, "--config", config.to_str().unwrap()],
    ] {
        let served = Served::start(args);
        let address = Address::Unix(socket.clone());
        let mut client = Client::connect(&address, "disk", ReplyStyle::Structured).unwrap();
        assert_eq!(client.read(4096, 512).unwrap(), [7; 512], "{args:?}");
        client.disconnect().unwrap();
        served.terminate();
    }
}

#[test]
fn a_configuration_says_what_flags_say_and_flags_go_first() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (raw_image(folder.path(), "a.raw"), raw_image(folder.path(), "b.raw"));
    let socket = folder.path().join("s");
    let config = folder.path().join("serve.toml");
    let settings = format!(
        "nbd = 'unix:{}'\nformat = 'raw'\nread-only = true\nqueues = 2\n\
         [[image]]\npath = '{first}'\n[[image]]\nname = 'second'\npath = '{second}'\nread-only = false\n",
        socket.display()
    );
    std::fs::write(&config, settings).unwrap();
    let served = Served::start(&["--config", config.to_str().unwrap(), "--cache", "writeback"]);
    let connect = |name| {
        Client::connect(&Address::Unix(socket.clone()), name, ReplyStyle::Structured).unwrap()
    };
    let is_read_only = |client: &Client| client.flags() & transmission_flag::READ_ONLY != 0;
    assert!(is_read_only(&connect("a")));
    let mut writable = connect("second");
    assert!(!is_read_only(&writable));
    writable.write(0, b"kept", 0).unwrap();
    writable.disconnect().unwrap();
    served.terminate();
    assert!(!socket.exists());
    assert_eq!(&std::fs::read(&second).unwrap()[..4], b"kept");

    std::fs::write(&config, "colour = 'red'").unwrap();
    let config = config.to_str().unwrap();
    refused(&["serve", "--config", config], 1, &[config, "--colour"]);
}

#[test]
fn a_server_that_nobody_listens_to_loses_nothing() {
    for signal in ["TERM", "HUP"] {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.qcow2");
        let image = image.to_str().unwrap();
        assert!(run(&["create", "-q", "-f", "qcow2", image, "64M"]).status.success());
        let socket = folder.path().join("s");
        let nbd = format!("--nbd=unix:{}", socket.display());
        let mut child =
            program().args(["serve", image, &nbd]).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert!(log.read_line(&mut line).unwrap() > 0, "it ended before it was ready");
        }
        // Whoever took its log has gone: every further line fails.
        drop(log);
        let address = Address::Unix(socket.clone());
        let mut client = Client::connect(&address, "disk", ReplyStyle::Structured).unwrap();
        client.write(4096, &[7; 4096], 0).unwrap();
        // Something to complain about: a client that hangs up in the middle of a request.
        drop(client);
        let mut mumbler = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        mumbler.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let _answer = mumbler.read(&mut [0; 64]);
        drop(mumbler);
        let mut client = Client::connect(&address, "disk", ReplyStyle::Structured).unwrap();
        client.write(1 << 20, &[8; 4096], 0).unwrap();
        let pid = child.id().to_string();
        assert!(
            Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success()
        );
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal}");
        assert!(!socket.exists());
        for (pattern, offset) in [(7, "4096"), (8, "1M")] {
            let map = text(
                &run(&[
                    "map",
                    "--output",
                    "json",
                    "--start-offset",
                    offset,
                    "--max-length",
                    "4096",
                    image,
                ])
                .stdout,
            );
            let runs: serde_json::Value = serde_json::from_str(&map).unwrap();
            let at = runs[0]["offset"].as_u64().unwrap() as usize;
            let bytes = std::fs::read(image).unwrap();
            assert_eq!(bytes[at..at + 4096], [pattern; 4096], "{signal}: {map}");
        }
    }
}

#[test]
fn a_reader_that_has_seen_enough_ends_nothing_by_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    let image = raw_image(folder.path(), "disk.raw");
    let new = folder.path().join("new.qcow2");
    let new = new.to_str().unwrap();
    for args in [
        &["create", "-f", "qcow2", new, "1M"][..],
        &["create", "-f", "qcow2", "-o", "help"],
        &["info", "-f", "raw", &image],
        &["info", "-f", "raw", "--output", "json", &image],
        &["check", new],
        &["map", "-f", "raw", &image],
        &["bench", "-f", "raw", "-c", "10", &image],
        &["demo"],
    ] {
        let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
        let child = program().args(args).stdout(full()).stderr(full()).output().unwrap();
        assert_eq!(child.status.code(), Some(1), "{args:?}");
    }
    assert!(run(&["check", "-q", new]).status.success(), "it was made all the same");
}

#[test]
fn a_pid_file_belongs_to_one_server() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (raw_image(folder.path(), "a.raw"), raw_image(folder.path(), "b.raw"));
    let pid_file = folder.path().join("pid");
    let pid = format!("--pid-file={}", pid_file.display());
    let nbd = |name| format!("--nbd=unix:{}", folder.path().join(name).display());
    let served = Served::start(&["-f", "raw", &first, &nbd("s"), &pid]);
    refused(&["serve", "-f", "raw", &second, &nbd("t"), &pid], 1, &["another server", "pid"]);
    let kept = std::fs::read_to_string(&pid_file).unwrap();
    assert_eq!(kept.trim(), served.0.id().to_string());
    served.terminate();
    assert!(!pid_file.exists());
    let few = ["serve", "-f", "raw", &second, "--memory", "1M"];
    refused(&few, 1, &["64M"]);
}
