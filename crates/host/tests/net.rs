//! Sockets: on both reactors, within one loop and between two.

use std::cell::Cell;
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use stillpoint_host::net::Address;
use stillpoint_host::{Aio, Listener, LoopOptions, Part, Stream, run, spawn_thread};
use stillpoint_io::{Background, Kind, Queue, Segments};

fn options(aio: Aio) -> LoopOptions {
    LoopOptions { aio, depth: 32 }
}

const REACTORS: [Aio; 2] = [Aio::IoUring, Aio::Threads];

fn addresses(folder: &tempfile::TempDir) -> [Address; 2] {
    [Address::Unix(folder.path().join("socket")), Address::Tcp("127.0.0.1:0".into())]
}

/// Sends back what it receives, each request with an 8-byte header that tells its length.
async fn echo(queue: &Queue, stream: &Stream) {
    loop {
        let mut header = [0; 8];
        let mut got = 0;
        while got < 8 {
            match stream.read(queue, &mut header[got..]).await.unwrap() {
                0 if got == 0 => return,
                0 => panic!("ended inside a header"),
                count => got += count,
            }
        }
        let payload = Segments::alloc(u64::from_be_bytes(header) as usize);
        stream.read_segments(queue, &payload).await.unwrap();
        let parts = [Part::Bytes(&header), Part::Segments(&payload)];
        stream.write_all(queue, &parts).await.unwrap();
    }
}

async fn ask(queue: &Queue, stream: &Stream, len: usize, seed: u8) {
    let bytes: Vec<u8> = (0..len).map(|n| (n as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    // Many small pieces, more than one call takes.
    let mut pieces = Segments::default();
    for piece in bytes.chunks((len / 100).max(1)) {
        pieces.append(Segments::from_slice(piece));
    }
    let header = (len as u64).to_be_bytes();
    let parts = [Part::Bytes(&header), Part::Segments(&pieces)];
    let sending = stream.write_all(queue, &parts);
    let receiving = async {
        let back = Segments::zeroed(len + 8);
        stream.read_segments(queue, &back).await?;
        Ok(back)
    };
    let ((), back) = futures_util::future::try_join(sending, receiving).await.unwrap();
    let back = back.to_vec();
    assert_eq!(back[..8], header);
    assert!(back[8..] == bytes, "{len} bytes differ");
}

#[test]
fn requests_of_any_length_come_back() {
    for aio in REACTORS {
        let folder = tempfile::tempdir().unwrap();
        for address in addresses(&folder) {
            run(options(aio), async |queue| {
                let listener = Listener::bind(&address).unwrap();
                let client = Stream::connect(&queue, listener.address()).await.unwrap();
                let server = listener.accept(&queue).await.unwrap();
                let done = Rc::new(Cell::new(false));
                let (on, ended) = (queue.clone(), done.clone());
                queue.spawn(async move {
                    echo(&on, &server).await;
                    ended.set(true);
                });
                for (n, len) in [0, 1, 7, 4096, 100_000, 5 << 20].into_iter().enumerate() {
                    ask(&queue, &client, len, n as u8).await;
                }
                client.finish();
                while !done.get() {
                    queue.sleep(Duration::from_millis(1)).await;
                }
                assert_eq!(client.read(&queue, &mut [0; 8]).await.unwrap(), 0);
            })
            .unwrap();
        }
    }
}

#[test]
fn many_clients_on_two_loops() {
    for aio in REACTORS {
        let folder = tempfile::tempdir().unwrap();
        for address in addresses(&folder) {
            const CLIENTS: usize = 40;
            let listener = Arc::new(Listener::bind(&address).unwrap());
            let address = listener.address().clone();
            let server = spawn_thread("server", options(aio)).unwrap();
            let accepting = listener.clone();
            server.run(Box::new(move |queue| {
                Box::pin(async move {
                    for _ in 0..CLIENTS {
                        let stream = accepting.accept(&queue).await.unwrap();
                        let on = queue.clone();
                        queue.spawn(async move { echo(&on, &stream).await });
                    }
                    // Jobs are waited for, tasks are not: give them the time they need.
                    queue.sleep(Duration::from_millis(1500)).await;
                })
            }));
            run(options(aio), async |queue| {
                let clients = (0..CLIENTS).map(|n| {
                    let (queue, address) = (queue.clone(), address.clone());
                    async move {
                        let stream = Stream::connect(&queue, &address).await.unwrap();
                        for round in 0..20 {
                            ask(&queue, &stream, 1 + n * 997 + round * 31, round as u8).await;
                        }
                    }
                });
                futures_util::future::join_all(clients.collect::<Vec<_>>()).await;
            })
            .unwrap();
            server.join().unwrap();
        }
    }
}

#[test]
fn a_peer_that_goes_is_noticed() {
    for aio in REACTORS {
        let folder = tempfile::tempdir().unwrap();
        for address in addresses(&folder) {
            run(options(aio), async |queue| {
                let listener = Listener::bind(&address).unwrap();
                let client = Stream::connect(&queue, listener.address()).await.unwrap();
                let server = listener.accept(&queue).await.unwrap();
                // A short read, so that the next one waits; then the client goes.
                client.write_all(&queue, &[Part::Bytes(b"abc")]).await.unwrap();
                assert_eq!(server.read(&queue, &mut [0; 16]).await.unwrap(), 3);
                client.write_all(&queue, &[Part::Bytes(b"de")]).await.unwrap();
                drop(client);
                assert_eq!(server.read(&queue, &mut [0; 16]).await.unwrap(), 2);
                assert_eq!(server.read(&queue, &mut [0; 16]).await.unwrap(), 0);
                let error = server.read_segments(&queue, &Segments::alloc(4)).await.unwrap_err();
                assert_eq!(error.kind(), Kind::Io);
                // Writing to nobody fails without a signal.
                let block = [0; 65536];
                let failed = async {
                    loop {
                        if let Err(error) = server.write_all(&queue, &[Part::Bytes(&block)]).await {
                            return error;
                        }
                    }
                };
                assert_eq!(failed.await.kind(), Kind::Io);
            })
            .unwrap();
        }
    }
}

#[test]
fn shutdown_ends_a_reader_that_waits() {
    for aio in REACTORS {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix(folder.path().join("socket"));
        run(options(aio), async |queue| {
            let listener = Listener::bind(&address).unwrap();
            let _client = Stream::connect(&queue, &address).await.unwrap();
            let server = Rc::new(listener.accept(&queue).await.unwrap());
            let (ending, on) = (server.clone(), queue.clone());
            queue.spawn(async move {
                on.sleep(Duration::from_millis(10)).await;
                ending.shutdown();
            });
            assert_eq!(server.read(&queue, &mut [0; 16]).await.unwrap(), 0);
        })
        .unwrap();
    }
}

#[test]
fn a_wait_that_is_dropped_leaves_the_stream_usable() {
    for aio in REACTORS {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix(folder.path().join("socket"));
        run(options(aio), async |queue| {
            let listener = Listener::bind(&address).unwrap();
            let client = Stream::connect(&queue, &address).await.unwrap();
            let server = listener.accept(&queue).await.unwrap();
            for round in 0..100u8 {
                let mut byte = [0];
                let read = Box::pin(server.read(&queue, &mut byte));
                let sleep = Box::pin(queue.sleep(Duration::from_micros(100)));
                let winner = futures_util::future::select(read, sleep).await;
                assert!(matches!(winner, futures_util::future::Either::Right(_)));
                drop(winner);
                client.write_all(&queue, &[Part::Bytes(&[round])]).await.unwrap();
                assert_eq!(server.read(&queue, &mut byte).await.unwrap(), 1);
                assert_eq!(byte, [round]);
            }
            // No poll holds the socket open behind its owner's back.
            let mut byte = [0];
            let mut waiting = Box::pin(server.read(&queue, &mut byte));
            assert!(waiting.as_mut().now_or_never().is_none());
            drop(waiting);
            drop(server);
            let end = client.read(&queue, &mut [0; 1]).await.unwrap();
            assert_eq!(end, 0);
        })
        .unwrap();
    }
}

#[test]
fn a_stale_socket_is_taken_over_and_a_living_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let address = Address::Unix(path.clone());
    // The standard library's listener leaves its file behind, as a killed server does.
    drop(UnixListener::bind(&path).unwrap());
    let listener = Listener::bind(&address).unwrap();
    let error = Listener::bind(&address).unwrap_err();
    assert_eq!(error.kind(), Kind::Busy);
    assert!(error.to_string().contains("another server"), "{error}");
    drop(listener);
    assert!(!path.exists());
    // Something else of that name is left alone.
    std::fs::write(&path, "precious").unwrap();
    let error = Listener::bind(&address).unwrap_err();
    assert_eq!(error.kind(), Kind::Busy);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_listener_removes_its_own_file_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = Listener::bind(&Address::Unix(path.clone())).unwrap();
    std::fs::remove_file(&path).unwrap();
    let _later = UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
}

#[test]
fn a_tcp_port_in_use_is_busy() {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let error = Listener::bind(listener.address()).unwrap_err();
    assert_eq!(error.kind(), Kind::Busy);
    assert!(error.to_string().contains("127.0.0.1"), "{error}");
}

#[test]
fn addresses_are_understood_or_refused() {
    for text in ["unix:/run/a:b", "tcp:localhost:10809", "tcp:[::1]:1"] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    for text in ["", "unix:", "tcp:localhost", "/run/socket", "udp:a:1"] {
        assert_eq!(text.parse::<Address>().unwrap_err().kind(), Kind::Invalid, "{text}");
    }
    let long = Address::Unix(format!("/tmp/{}", "x".repeat(200)).into());
    assert_eq!(Listener::bind(&long).unwrap_err().kind(), Kind::Invalid);
}
