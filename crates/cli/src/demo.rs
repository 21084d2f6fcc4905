//! `stillpoint demo`: a first look, without root, packages or arguments.
//!
//! It creates a disk in a temporary folder, serves it on a unix socket from a thread of this
//! process, and drives it through that socket as a virtual machine would. Every block that is
//! written differs from all others, and everything is read back and compared in the end: the words
//! "verified" in the table are a fact about this run.
//!
//! Deliberately absent: comparisons with other programs; `bench/` has them.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use stillpoint_engine::offline::create::{Qcow2Options, create_qcow2};
use stillpoint_engine::{ImageFormat, Options};
use stillpoint_host::net::Address;
use stillpoint_host::{Aio, Cache, HostFiles, LoopOptions, Reach, run as run_loop};
use stillpoint_io::{Error, Kind, Result};
use stillpoint_serve::nbd::client::{Client, Reply};
use stillpoint_serve::nbd::codec::command;
use stillpoint_serve::nbd::handshake::ReplyStyle;
use stillpoint_serve::server::{self, Image, Plan};
use stillpoint_serve::stop::Stop;

use crate::options::human;

const DISK_BYTES: u64 = 4 << 30;
const CLUSTER_BYTES: u64 = 64 << 10;
const BLOCK_BYTES: u64 = 4 << 10;
/// How many clusters get their first write.
const CLUSTERS: u64 = 2048;
const OVERWRITES: u64 = 16384;
/// The length of writes in order.
const STRIPE_BYTES: u64 = 256 << 10;
const FLUSHES: u64 = 64;
const DEPTH: usize = 32;

/// See what it does: serve a disk from a temporary folder, use it, verify it
#[derive(Args, Clone, Debug)]
pub struct DemoArgs {}

/// Runs the demonstration and prints its table.
pub fn run(_args: &DemoArgs) -> Result<u8> {
    let folder =
        tempfile::tempdir().map_err(|error| Error::from_std("make a temporary folder", &error))?;
    let image = folder.path().join("demo.qcow2");
    create(&image)?;
    let socket = Address::Unix(folder.path().join("demo.sock"));
    outln!(
        "A disk of {} for a virtual machine, served from {}",
        human(DISK_BYTES),
        image.display()
    );
    outln!("on {socket} and used over it, {DEPTH} requests at once.\n");

    let stop = Stop::new();
    let plan = plan(&image, &socket);
    let (ready, wait) = mpsc::channel();
    let rows = std::thread::scope(|scope| {
        let server = scope.spawn(|| server::run(plan, stop.clone(), |_| _ = ready.send(())));
        let driven = match wait.recv() {
            Ok(()) => Client::connect(&socket, "", ReplyStyle::Structured).and_then(drive),
            // The server has ended, and says why below.
            Err(_) => Ok(Vec::new()),
        };
        stop.say();
        let served = server.join().unwrap_or_else(|_| Err(wrong("the server panicked")));
        served.and(driven)
    })?;
    print_table(&rows);
    print_sizes(&image)?;
    Ok(0)
}

fn wrong(why: impl Into<String>) -> Error {
    Error::new(Kind::Io, "finish the demonstration", why)
}

fn create(image: &Path) -> Result<()> {
    let options = Qcow2Options { size: DISK_BYTES, ..Qcow2Options::default() };
    let files = HostFiles::new(Aio::Threads, Cache::Writeback);
    let control = LoopOptions { aio: Aio::Threads, ..LoopOptions::default() };
    run_loop(control, async |queue| {
        create_qcow2(&queue, &files, &image.to_string_lossy(), &options).await
    })?
}

fn plan(image: &Path, socket: &Address) -> Plan {
    let image = Image {
        name: "demo".to_owned(),
        path: image.to_string_lossy().into_owned(),
        aio: Aio::IoUring,
        cache: Cache::None,
        reach: Reach::Beside,
        options: Options { format: Some(ImageFormat::Qcow2), ..Options::default() },
    };
    // With its own handling of signals the server ends in order, and the folder is removed.
    Plan {
        images: vec![image],
        listen: vec![socket.clone()],
        catch_signals: true,
        ..Plan::default()
    }
}

/// One line of the table.
struct Row {
    what: &'static str,
    requests: u64,
    /// How many bytes each of them has.
    each: u64,
    time: Duration,
    outcome: &'static str,
}

/// What every block must hold: how often it was written. A block that is not here holds zeros.
type Versions = HashMap<u64, u64>;

/// Fills `into` with bytes that only this version of this block holds.
fn fill(into: &mut [u8], block: u64, version: u64) {
    if version == 0 {
        return into.fill(0);
    }
    let mut state = (block << 20) ^ version;
    for word in into.chunks_exact_mut(8) {
        // SplitMix64: enough to tell blocks apart, and fast.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
}

/// The blocks are visited in an order that no read-ahead foresees, each once in `count`.
fn scattered(index: u64, count: u64) -> u64 {
    index.wrapping_mul(2_654_435_761) % count
}

fn drive(mut client: Client) -> Result<Vec<Row>> {
    let mut versions = Versions::new();
    let blocks_per_cluster = CLUSTER_BYTES / BLOCK_BYTES;
    let block_count = CLUSTERS * blocks_per_cluster;
    // One block in each cluster, each time another one.
    let new =
        |index: u64| scattered(index, CLUSTERS) * blocks_per_cluster + index % blocks_per_cluster;
    let ordered = |index: u64| index * (STRIPE_BYTES / BLOCK_BYTES);
    let anywhere = |index: u64| scattered(index, block_count);
    let stripes = block_count * BLOCK_BYTES / STRIPE_BYTES;
    let mut write = |what, count, bytes, block_of: &dyn Fn(u64) -> u64| {
        write(&mut client, what, count, bytes, block_of, &mut versions)
    };
    let mut rows = vec![
        write("write to new places", CLUSTERS, BLOCK_BYTES, &new)?,
        write("write in order", stripes, STRIPE_BYTES, &ordered)?,
        write("overwrite anywhere", OVERWRITES, BLOCK_BYTES, &anywhere)?,
    ];
    rows.push(write_and_flush(&mut client, &mut versions)?);
    rows.push(read_and_compare(&mut client, &versions)?);
    client.disconnect()?;
    Ok(rows)
}

/// Keeps [`DEPTH`] requests in flight until `count` have been answered.
fn pump(
    client: &mut Client,
    what: &'static str,
    count: u64,
    mut submit: impl FnMut(&mut Client, u64) -> Result<()>,
    mut answered: impl FnMut(&Reply) -> Result<()>,
) -> Result<Duration> {
    // Hidden by itself where standard error is no terminal.
    let style = "{msg:28} {wide_bar} {pos:>6}/{len} {per_sec:>14}";
    let bar = ProgressBar::new(count)
        .with_style(ProgressStyle::with_template(style).expect("the template is right"))
        .with_message(what);
    let begin = Instant::now();
    let mut submitted = 0;
    while submitted < count || client.in_flight() > 0 {
        if submitted < count && client.in_flight() < DEPTH {
            submit(client, submitted)?;
            submitted += 1;
            continue;
        }
        let reply = client.receive()?;
        if reply.error != 0 {
            return Err(wrong(format!("a request failed: {}", reply.message)));
        }
        answered(&reply)?;
        bar.inc(1);
    }
    let time = begin.elapsed();
    bar.finish_and_clear();
    Ok(time)
}

/// Writes `count` times `bytes` bytes, from the block that `block_of` tells.
fn write(
    client: &mut Client,
    what: &'static str,
    count: u64,
    bytes: u64,
    block_of: &dyn Fn(u64) -> u64,
    versions: &mut Versions,
) -> Result<Row> {
    let mut data = vec![0; bytes as usize];
    let submit = |client: &mut Client, index| {
        let first = block_of(index);
        for (block, data) in (first..).zip(data.chunks_exact_mut(BLOCK_BYTES as usize)) {
            fill_next(data, block, versions);
        }
        client.submit(command::WRITE, 0, first * BLOCK_BYTES, bytes, &data).map(drop)
    };
    let time = pump(client, what, count, submit, |_| Ok(()))?;
    Ok(Row { what, requests: count, each: bytes, time, outcome: "" })
}

/// Fills `into` with the block's next version.
fn fill_next(into: &mut [u8], block: u64, versions: &mut Versions) {
    let version = versions.entry(block).or_insert(0);
    *version += 1;
    fill(into, block, *version);
}

/// A small write and a flush, one after the other: what a database's commit is to a disk.
fn write_and_flush(client: &mut Client, versions: &mut Versions) -> Result<Row> {
    let mut data = vec![0; BLOCK_BYTES as usize];
    let begin = Instant::now();
    for index in 0..FLUSHES {
        let block = scattered(index + 7, CLUSTERS);
        fill_next(&mut data, block, versions);
        client.write(block * BLOCK_BYTES, &data, 0)?;
        client.flush()?;
    }
    Ok(Row {
        what: "write and flush, one by one",
        requests: FLUSHES,
        each: BLOCK_BYTES,
        time: begin.elapsed(),
        outcome: "safe on the host's disk",
    })
}

fn read_and_compare(client: &mut Client, versions: &Versions) -> Result<Row> {
    let what = "read everything back";
    let mut offsets = HashMap::new();
    let mut expected = vec![0; BLOCK_BYTES as usize];
    let offsets_asked = std::cell::RefCell::new(&mut offsets);
    let submit = |client: &mut Client, index: u64| {
        let offset = index * CLUSTER_BYTES;
        let cookie = client.submit(command::READ, 0, offset, CLUSTER_BYTES, &[])?;
        offsets_asked.borrow_mut().insert(cookie, offset);
        Ok(())
    };
    let answered = |reply: &Reply| {
        let offset = offsets_asked.borrow_mut().remove(&reply.cookie).expect("it was asked for");
        for (index, bytes) in (0u64..).zip(reply.data.chunks_exact(BLOCK_BYTES as usize)) {
            let block = offset / BLOCK_BYTES + index;
            fill(&mut expected, block, versions.get(&block).copied().unwrap_or(0));
            if bytes != expected {
                let at = block * BLOCK_BYTES;
                return Err(wrong(format!(
                    "the block at {at:#x} holds other bytes than were written"
                )));
            }
        }
        Ok(())
    };
    let time = pump(client, what, CLUSTERS, submit, answered)?;
    Ok(Row { what, requests: CLUSTERS, each: CLUSTER_BYTES, time, outcome: "verified, every byte" })
}

fn print_table(rows: &[Row]) {
    outln!(
        "{:<28} {:>8}  {:>8}  {:>10}  {:>12}",
        "What was done",
        "requests",
        "of",
        "per second",
        "speed"
    );
    for Row { what, requests, each, time, outcome } in rows {
        let per_second = *requests as f64 / time.as_secs_f64().max(1e-9);
        let speed = format!("{}/s", human((per_second * *each as f64) as u64));
        let (requests, each) = (thousands(*requests), human(*each));
        let per_second = thousands(per_second as u64);
        let line = format!(
            "{what:<28} {requests:>8}  {each:>8}  {per_second:>10}  {speed:>12}  {outcome}"
        );
        outln!("{}", line.trim_end());
    }
}

fn print_sizes(image: &Path) -> Result<()> {
    let found = std::fs::metadata(image)
        .map_err(|error| Error::from_std("look at the image", &error).file(image.display()))?;
    outln!(
        "\nThe virtual machine sees a disk of {}; its file occupies {} on the host.",
        human(DISK_BYTES),
        human(found.blocks() * 512),
    );
    outln!("The image was closed clean: qemu-img and every other qcow2 program can use it.");
    outln!("\nServe an image of your own: stillpoint serve disk.qcow2 --nbd unix:/tmp/disk.sock");
    Ok(())
}

/// `1234567` as `1,234,567`.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn numbers_are_grouped() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(thousands(number), text);
        }
    }

    #[test]
    fn every_cluster_gets_its_first_write_once() {
        let seen: HashSet<u64> = (0..CLUSTERS).map(|index| scattered(index, CLUSTERS)).collect();
        assert_eq!(seen.len() as u64, CLUSTERS);
    }

    #[test]
    fn blocks_and_versions_differ() {
        let bytes = |block, version| {
            let mut bytes = [0; 64];
            fill(&mut bytes, block, version);
            bytes
        };
        assert_eq!(bytes(5, 0), [0; 64]);
        let all: HashSet<[u8; 64]> =
            (0..100).flat_map(|block| (1..10).map(move |version| bytes(block, version))).collect();
        assert_eq!(all.len(), 900);
    }
}
