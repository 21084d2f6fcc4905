//! A server's life over raw images in a temporary folder: exports, bounds, sockets, the end.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use stillpoint_engine::{ImageFormat, Options};
use stillpoint_host::net::Address;
use stillpoint_host::{Aio, Cache, Reach};
use stillpoint_io::{Kind, Result};
use stillpoint_serve::nbd::client::Client;
use stillpoint_serve::nbd::codec::command;
use stillpoint_serve::nbd::handshake::ReplyStyle;
use stillpoint_serve::server::{Image, Plan, run};
use stillpoint_serve::stop::Stop;

const SIZE: u64 = 8 << 20;

fn image(folder: &Path, name: &str) -> Image {
    let path = folder.join(name);
    if !path.exists() {
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    }
    Image {
        name: name.to_owned(),
        path: path.to_str().unwrap().to_owned(),
        aio: Aio::IoUring,
        cache: Cache::Writeback,
        reach: Reach::Beside,
        options: Options { format: Some(ImageFormat::Raw), ..Options::default() },
    }
}

fn socket(folder: &Path) -> Address {
    Address::Unix(folder.join("socket"))
}

fn plan(folder: &Path, names: &[&str]) -> Plan {
    Plan {
        images: names.iter().map(|name| image(folder, name)).collect(),
        listen: vec![socket(folder)],
        queue_count: 2,
        ..Plan::default()
    }
}

/// A server on a thread; it has ended when [`Running::stop`] returns.
struct Running {
    stop: Stop,
    addresses: Vec<Address>,
    thread: JoinHandle<Result<()>>,
}

impl Running {
    fn start(plan: Plan) -> Running {
        let stop = Stop::new();
        let (ready, wait) = mpsc::channel();
        let told = stop.clone();
        let thread = std::thread::spawn(move || {
            run(plan, told, |addresses| ready.send(addresses.to_vec()).unwrap())
        });
        let addresses = wait.recv().unwrap_or_default();
        Running { stop, addresses, thread }
    }

    fn stop(self) -> Result<()> {
        self.stop.say();
        self.thread.join().unwrap()
    }
}

/// Why a plan is refused.
fn refusal(plan: Plan) -> stillpoint_io::Error {
    let stop = Stop::new();
    stop.say();
    run(plan, stop, |_| panic!("it must not come to this")).unwrap_err()
}

#[test]
fn exports_are_found_by_name_on_every_queue() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(plan(folder.path(), &["a", "b"]));
    let connect = |name| Client::connect(&socket(folder.path()), name, ReplyStyle::Extended);
    let mut clients: Vec<Client> = (0..4).map(|_| connect("a").unwrap()).collect();
    for (index, client) in clients.iter_mut().enumerate() {
        client.write(index as u64 * 10_000, &[index as u8 + 1; 10_000], 0).unwrap();
    }
    for client in &mut clients {
        for index in 0..4 {
            let data = client.read(index * 10_000, 10_000).unwrap();
            assert!(data.iter().all(|&byte| byte == index as u8 + 1));
        }
    }
    assert_eq!(connect("b").unwrap().read(0, 3).unwrap(), [0; 3]);
    for unknown in ["", "c"] {
        let error = connect(unknown).err().unwrap().to_string();
        assert!(error.contains("no export has this name"), "{error}");
    }
    server.stop().unwrap();
    assert_eq!(std::fs::read(folder.path().join("a")).unwrap()[39_999], 4);
    assert_eq!(std::fs::metadata(folder.path().join("a")).unwrap().len(), SIZE);
}

#[test]
fn tcp_is_served_too() {
    let folder = tempfile::tempdir().unwrap();
    let listen = vec!["tcp:127.0.0.1:0".parse().unwrap()];
    let server = Running::start(Plan { listen, ..plan(folder.path(), &["a"]) });
    let mut client = Client::connect(&server.addresses[0], "", ReplyStyle::Structured).unwrap();
    client.write(5, &[1; 100_000], 0).unwrap();
    assert_eq!(client.read(4, 3).unwrap(), [0, 1, 1]);
    server.stop().unwrap();
}

#[test]
fn one_client_too_many_is_turned_away_and_may_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(Plan { client_count_max: 2, ..plan(folder.path(), &["a"]) });
    let connect = || Client::connect(&socket(folder.path()), "a", ReplyStyle::Simple);
    let (first, _second) = (connect().unwrap(), connect().unwrap());
    assert!(connect().is_err());
    first.disconnect().unwrap();
    let back = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        connect().is_ok()
    });
    assert!(back, "a seat that was left can be taken");
    server.stop().unwrap();
}

#[test]
fn ten_thousand_silent_connections_leave_the_server_alone() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(Plan { client_count_max: 8, ..plan(folder.path(), &["a"]) });
    let Address::Unix(path) = socket(folder.path()) else { unreachable!() };
    let mut working = Client::connect(&socket(folder.path()), "a", ReplyStyle::Simple).unwrap();
    let (mut turned_away, mut seated) = (0, Vec::new());
    for _ in 0..10_000 {
        let mut silent = UnixStream::connect(&path).unwrap();
        let mut bytes = [0; 64];
        match silent.read(&mut bytes).unwrap() {
            0 => turned_away += 1,
            _ => seated.push(silent),
        }
        assert_eq!(working.read(0, 1).unwrap(), [0]);
    }
    assert_eq!((turned_away, seated.len()), (10_000 - 7, 7));
    server.stop().unwrap();
}

#[test]
fn acknowledged_writes_are_there_after_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(plan(folder.path(), &["a"]));
    let mut client = Client::connect(&socket(folder.path()), "a", ReplyStyle::Simple).unwrap();
    for index in 0..64 {
        client.submit(command::WRITE, 0, index * 65536, 65536, &[index as u8 + 1; 65536]).unwrap();
    }
    for _ in 0..32 {
        assert_eq!(client.receive().unwrap().error, 0);
    }
    server.stop().unwrap();
    // Whatever was answered, also while it stopped, is in the file.
    let bytes = std::fs::read(folder.path().join("a")).unwrap();
    let mut answered = 32;
    while client.receive().is_ok_and(|reply| reply.error == 0) {
        answered += 1;
    }
    let whole = (0..64).filter(|&index| {
        bytes[index * 65536..(index + 1) * 65536].iter().all(|&byte| byte == index as u8 + 1)
    });
    assert!(whole.count() >= answered);
    assert!(!folder.path().join("socket").exists(), "the socket is removed");
}

#[test]
fn a_dead_servers_socket_is_taken_over_and_a_living_ones_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let Address::Unix(path) = socket(folder.path()) else { unreachable!() };
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "left behind, as by a killed server");
    let server = Running::start(plan(folder.path(), &["a"]));
    let error = refusal(plan(folder.path(), &["b"]));
    assert_eq!(error.kind(), Kind::Busy);
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    assert!(Client::connect(&socket(folder.path()), "a", ReplyStyle::Simple).is_ok());
    server.stop().unwrap();
}

#[test]
fn an_image_in_use_is_refused_before_any_socket_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(plan(folder.path(), &["a"]));
    let elsewhere = Address::Unix(folder.path().join("elsewhere"));
    let error = refusal(Plan { listen: vec![elsewhere], ..plan(folder.path(), &["b", "a"]) });
    assert_eq!(error.kind(), Kind::Busy);
    assert!(
        error.to_string().contains(&std::process::id().to_string()),
        "names the holder: {error}"
    );
    assert!(!folder.path().join("elsewhere").exists());
    server.stop().unwrap();
    // What was opened before the refusal was let go.
    Running::start(plan(folder.path(), &["a", "b"])).stop().unwrap();
}

#[test]
fn the_pid_file_names_this_process_while_it_serves() {
    let folder = tempfile::tempdir().unwrap();
    let pid_file = folder.path().join("pid");
    let server =
        Running::start(Plan { pid_file: Some(pid_file.clone()), ..plan(folder.path(), &["a"]) });
    let text = std::fs::read_to_string(&pid_file).unwrap();
    assert_eq!(text.trim(), std::process::id().to_string());
    server.stop().unwrap();
    assert!(!pid_file.exists());
}

#[test]
fn missing_images_and_folders_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut missing = plan(folder.path(), &["a"]);
    missing.images[0].path = folder.path().join("none").to_str().unwrap().to_owned();
    let error = refusal(missing);
    assert_eq!(error.kind(), Kind::NotFound);
    assert!(error.to_string().contains("none"), "{error}");
    let listen = vec![Address::Unix(folder.path().join("no/socket"))];
    let error = refusal(Plan { listen, ..plan(folder.path(), &["a"]) });
    assert!(error.to_string().contains("no/socket"), "{error}");
}
