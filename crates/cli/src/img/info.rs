//! `info`: everything that an image tells about itself.

use std::collections::HashSet;

use clap::Args;
use serde_json::{Value, json};
use stillpoint_engine::ImageFormat;
use stillpoint_engine::offline::image::{CHAIN_LENGTH_MAX, Image, format_by_name};
use stillpoint_engine::offline::info::{
    BitmapInfo, ImageInfo, KeySlot, LuksHeader, Qcow2Info, SnapshotInfo, info,
};
use stillpoint_engine::offline::{CompressionType, CryptMethod};
use stillpoint_host::{Cache, HostFiles};
use stillpoint_io::{Error, Kind, Queue, Result};

use super::text::{human_size, print_json};
use super::{Complaint, Ending, ImageArgs, Output, Target, finish, run_on_loop};
use crate::Tool;

/// Tell everything that an image tells about itself
#[derive(Args)]
pub struct InfoArgs {
    #[command(flatten)]
    image: ImageArgs,

    /// Tell about every image of the backing chain
    #[arg(short, long)]
    backing_chain: bool,

    /// How it is printed
    #[arg(long, default_value = "human")]
    output: Output,
}

pub fn run(args: &InfoArgs, tool: Tool) -> Result<u8> {
    let ending = args.image.target().and_then(|target| {
        run_on_loop(Cache::Writeback, async |queue, files| tell(&queue, files, &target, args).await)
    });
    finish(tool, "info", ending)
}

async fn tell(queue: &Queue, files: HostFiles, target: &Target, args: &InfoArgs) -> Ending {
    let mut infos: Vec<ImageInfo> = Vec::new();
    let mut seen = HashSet::new();
    let mut next = Some((target.name.clone(), target.format));
    while let Some((name, format)) = next.take() {
        let opening = Complaint::opening(&name);
        let image = Image::open(queue, &files, &name, None, format, target.access).await;
        let image = image.map_err(&opening)?;
        if !seen.insert(image.file.facts().id) {
            let why = format!("Backing file '{name}' creates an infinite loop.");
            return Err(opening(Error::new(Kind::Corrupt, "follow the backing chain", why)));
        }
        if infos.len() == CHAIN_LENGTH_MAX {
            let why = format!("there are more than {CHAIN_LENGTH_MAX} images in the chain");
            return Err(opening(Error::new(Kind::Limit, "follow the backing chain", why)));
        }
        let found = info(queue, &image).await.map_err(&opening)?;
        if args.backing_chain
            && let Some(qcow2) = &found.qcow2
            && let Some(path) = &qcow2.backing_path
        {
            let format = qcow2.backing_format.as_deref().map(format_by_name).transpose();
            next = Some((path.clone(), format.map_err(&opening)?));
        }
        infos.push(found);
    }
    match args.output {
        Output::Human => {
            for (index, info) in infos.iter().enumerate() {
                if index > 0 {
                    outln!();
                }
                out!("{}", human(info));
            }
        }
        Output::Json if args.backing_chain => {
            print_json(&infos.iter().map(to_json).collect::<Value>());
        }
        Output::Json => print_json(&to_json(&infos[0])),
    }
    Ok(0)
}

fn format_name(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Raw => "raw",
        ImageFormat::Qcow2 => "qcow2",
    }
}

fn compat(version: u32) -> &'static str {
    if version < 3 { "0.10" } else { "1.1" }
}

fn compression_name(compression: CompressionType) -> &'static str {
    match compression {
        CompressionType::Zlib => "zlib",
        CompressionType::Zstd => "zstd",
    }
}

fn encryption_name(method: CryptMethod) -> Option<&'static str> {
    match method {
        CryptMethod::None => None,
        CryptMethod::Aes => Some("aes"),
        CryptMethod::Luks => Some("luks"),
    }
}

fn bitmap_flags(in_use: bool, auto: bool) -> Vec<&'static str> {
    [(in_use, "in-use"), (auto, "auto")]
        .into_iter()
        .filter_map(|(set, name)| set.then_some(name))
        .collect()
}

/// The length of a file as whole sectors, which is how it is told.
fn sectors(bytes: u64) -> u64 {
    bytes.next_multiple_of(512)
}

/// Collects lines of text.
#[derive(Default)]
struct Lines(String);

impl Lines {
    fn line(&mut self, depth: usize, text: impl AsRef<str>) {
        self.0.push_str(&" ".repeat(4 * depth));
        self.0.push_str(text.as_ref());
        self.0.push('\n');
    }
}

fn human(info: &ImageInfo) -> String {
    let mut lines = Lines::default();
    let size = |bytes: u64| format!("{} ({bytes} bytes)", human_size(bytes));
    lines.line(0, format!("image: {}", info.name));
    lines.line(0, format!("file format: {}", format_name(info.format)));
    lines.line(0, format!("virtual size: {}", size(info.virtual_size)));
    let disk_size = info.allocated_bytes.map_or("unavailable".to_owned(), human_size);
    lines.line(0, format!("disk size: {disk_size}"));
    if let Some(qcow2) = &info.qcow2 {
        if qcow2.crypt_method != CryptMethod::None {
            lines.line(0, "encrypted: yes");
        }
        lines.line(0, format!("cluster_size: {}", qcow2.cluster_size));
        if qcow2.dirty {
            lines.line(0, "cleanly shut down: no");
        }
        if let (Some(name), Some(path)) = (&qcow2.backing_name, &qcow2.backing_path) {
            let actual =
                if path == name { String::new() } else { format!(" (actual path: {path})") };
            lines.line(0, format!("backing file: {name}{actual}"));
            if let Some(format) = &qcow2.backing_format {
                lines.line(0, format!("backing file format: {format}"));
            }
        }
        human_snapshots(&mut lines, &qcow2.snapshots);
        human_qcow2(&mut lines, qcow2);
    }
    lines.line(0, "Child node '/file':");
    lines.line(1, format!("filename: {}", info.name));
    lines.line(1, "protocol type: file");
    lines.line(1, format!("file length: {}", size(sectors(info.file_length))));
    lines.line(1, format!("disk size: {disk_size}"));
    lines.0
}

fn human_snapshots(lines: &mut Lines, snapshots: &[SnapshotInfo]) {
    if snapshots.is_empty() {
        return;
    }
    lines.line(0, "Snapshot list:");
    let row = |cells: [&str; 6]| {
        let [id, tag, size, date, clock, count] = cells;
        format!("{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {count:>10}")
    };
    lines.line(0, row(["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"]));
    for snapshot in snapshots {
        let clock = snapshot.vm_clock_nanoseconds;
        let seconds = clock / 1_000_000_000;
        let clock = format!(
            "{:04}:{:02}:{:02}.{:03}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60,
            clock / 1_000_000 % 1000
        );
        let count = snapshot.instruction_count.map_or("--".to_owned(), |count| count.to_string());
        let (size, date) =
            (human_size(snapshot.vm_state_size), local_time(snapshot.date_seconds.into()));
        lines.line(0, row([&snapshot.id, &snapshot.name, &size, &date, &clock, &count]));
    }
}

fn human_qcow2(lines: &mut Lines, qcow2: &Qcow2Info) {
    lines.line(0, "Format specific information:");
    lines.line(1, format!("compat: {}", compat(qcow2.version)));
    lines.line(1, format!("compression type: {}", compression_name(qcow2.compression)));
    if qcow2.version >= 3 {
        lines.line(1, format!("lazy refcounts: {}", qcow2.lazy_refcounts));
    }
    if !qcow2.bitmaps.is_empty() {
        lines.line(1, "bitmaps:");
        for (index, bitmap) in qcow2.bitmaps.iter().enumerate() {
            lines.line(2, format!("[{index}]:"));
            lines.line(3, "flags:");
            for (index, flag) in bitmap_flags(bitmap.in_use, bitmap.auto).iter().enumerate() {
                lines.line(4, format!("[{index}]: {flag}"));
            }
            lines.line(3, format!("name: {}", bitmap.name));
            lines.line(3, format!("granularity: {}", bitmap.granularity));
        }
    }
    lines.line(1, format!("refcount bits: {}", qcow2.refcount_bits));
    human_encryption(lines, qcow2);
    if qcow2.version >= 3 {
        if let Some(data_file) = &qcow2.data_file {
            if let Some(name) = &data_file.name {
                lines.line(1, format!("data file: {name}"));
            }
            lines.line(1, format!("data file raw: {}", data_file.raw));
        }
        lines.line(1, format!("corrupt: {}", qcow2.corrupt));
        lines.line(1, format!("extended l2: {}", qcow2.extended_l2));
    }
}

fn human_encryption(lines: &mut Lines, qcow2: &Qcow2Info) {
    let Some(method) = encryption_name(qcow2.crypt_method) else { return };
    lines.line(1, "encrypt:");
    let Some(luks) = &qcow2.luks else { return lines.line(2, format!("format: {method}")) };
    let cipher = Cipher::of(luks);
    lines.line(2, format!("ivgen alg: {}", cipher.vectors));
    lines.line(2, "detached header: false");
    if let Some(hash) = cipher.vector_hash {
        lines.line(2, format!("ivgen hash alg: {hash}"));
    }
    lines.line(2, format!("hash alg: {}", luks.hash));
    lines.line(2, format!("cipher alg: {}", cipher.name));
    lines.line(2, format!("uuid: {}", luks.uuid));
    lines.line(2, format!("format: {method}"));
    lines.line(2, format!("cipher mode: {}", cipher.mode));
    lines.line(2, "slots:");
    for (index, slot) in luks.slots.iter().enumerate() {
        lines.line(3, format!("[{index}]:"));
        lines.line(4, format!("active: {}", slot.active));
        if slot.active {
            lines.line(4, format!("iters: {}", slot.iterations));
        }
        lines.line(4, format!("key offset: {}", slot.key_offset));
        if slot.active {
            lines.line(4, format!("stripes: {}", slot.stripes));
        }
    }
    lines.line(2, format!("payload offset: {}", luks.payload_offset));
    lines.line(2, format!("master key iters: {}", luks.digest_iterations));
}

/// A LUKS cipher's parts, as they are told one by one.
struct Cipher<'a> {
    name: String,
    mode: &'a str,
    vectors: &'a str,
    vector_hash: Option<&'a str>,
}

impl Cipher<'_> {
    fn of(luks: &LuksHeader) -> Cipher<'_> {
        let (mode, vectors) = luks.cipher_mode.split_once('-').unwrap_or((&luks.cipher_mode, ""));
        let (vectors, vector_hash) = match vectors.split_once(':') {
            Some((vectors, hash)) => (vectors, Some(hash)),
            None => (vectors, None),
        };
        // XTS has two keys in one.
        let keys = if mode == "xts" { 2 } else { 1 };
        let name = format!("{}-{}", luks.cipher_name, u64::from(luks.key_length) * 8 / keys);
        Cipher { name, mode, vectors, vector_hash }
    }
}

fn encryption_json(method: &str, luks: Option<&LuksHeader>) -> Value {
    let mut json = json!({ "format": method });
    let Some(luks) = luks else { return json };
    let cipher = Cipher::of(luks);
    json["cipher-alg"] = cipher.name.into();
    json["cipher-mode"] = cipher.mode.into();
    json["ivgen-alg"] = cipher.vectors.into();
    if let Some(hash) = cipher.vector_hash {
        json["ivgen-hash-alg"] = hash.into();
    }
    json["hash-alg"] = luks.hash.as_str().into();
    json["uuid"] = luks.uuid.as_str().into();
    json["detached-header"] = false.into();
    json["payload-offset"] = luks.payload_offset.into();
    json["master-key-iters"] = luks.digest_iterations.into();
    let slot = |slot: &KeySlot| {
        let mut json = json!({ "active": slot.active, "key-offset": slot.key_offset });
        if slot.active {
            json["iters"] = slot.iterations.into();
            json["stripes"] = slot.stripes.into();
        }
        json
    };
    json["slots"] = luks.slots.iter().map(slot).collect();
    json
}

fn to_json(info: &ImageInfo) -> Value {
    let mut json = json!({
        "children": [{
            "name": "file",
            "info": {
                "children": [],
                "virtual-size": sectors(info.file_length),
                "filename": info.name,
                "format": "file",
                "format-specific": { "type": "file", "data": {} },
                "dirty-flag": false,
            },
        }],
        "virtual-size": info.virtual_size,
        "filename": info.name,
        "format": format_name(info.format),
        "dirty-flag": false,
    });
    if let Some(bytes) = info.allocated_bytes {
        json["actual-size"] = bytes.into();
        json["children"][0]["info"]["actual-size"] = bytes.into();
    }
    if let Some(qcow2) = &info.qcow2 {
        qcow2_json(&mut json, qcow2);
    }
    json
}

fn qcow2_json(json: &mut Value, qcow2: &Qcow2Info) {
    json["cluster-size"] = qcow2.cluster_size.into();
    json["dirty-flag"] = qcow2.dirty.into();
    if let (Some(name), Some(path)) = (&qcow2.backing_name, &qcow2.backing_path) {
        json["backing-filename"] = name.as_str().into();
        json["full-backing-filename"] = path.as_str().into();
        if let Some(format) = &qcow2.backing_format {
            json["backing-filename-format"] = format.as_str().into();
        }
    }
    if !qcow2.snapshots.is_empty() {
        json["snapshots"] = qcow2.snapshots.iter().map(snapshot_json).collect();
    }
    let mut data = json!({
        "compat": compat(qcow2.version),
        "compression-type": compression_name(qcow2.compression),
        "refcount-bits": qcow2.refcount_bits,
    });
    if !qcow2.bitmaps.is_empty() {
        let bitmap = |bitmap: &BitmapInfo| {
            json!({
                "flags": bitmap_flags(bitmap.in_use, bitmap.auto),
                "name": bitmap.name,
                "granularity": bitmap.granularity,
            })
        };
        data["bitmaps"] = qcow2.bitmaps.iter().map(bitmap).collect();
    }
    if let Some(method) = encryption_name(qcow2.crypt_method) {
        json["encrypted"] = true.into();
        data["encrypt"] = encryption_json(method, qcow2.luks.as_ref());
    }
    if qcow2.version >= 3 {
        data["lazy-refcounts"] = qcow2.lazy_refcounts.into();
        data["corrupt"] = qcow2.corrupt.into();
        data["extended-l2"] = qcow2.extended_l2.into();
        if let Some(data_file) = &qcow2.data_file {
            if let Some(name) = &data_file.name {
                data["data-file"] = name.as_str().into();
            }
            data["data-file-raw"] = data_file.raw.into();
        }
    }
    json["format-specific"] = json!({ "type": "qcow2", "data": data });
}

fn snapshot_json(snapshot: &SnapshotInfo) -> Value {
    let mut json = json!({
        "id": snapshot.id,
        "name": snapshot.name,
        "vm-state-size": snapshot.vm_state_size,
        "date-sec": snapshot.date_seconds,
        "date-nsec": snapshot.date_nanoseconds,
        "vm-clock-sec": snapshot.vm_clock_nanoseconds / 1_000_000_000,
        "vm-clock-nsec": snapshot.vm_clock_nanoseconds % 1_000_000_000,
    });
    if let Some(count) = snapshot.instruction_count {
        json["icount"] = count.into();
    }
    json
}

/// A time of the local zone, like `2026-11-30 20:25:56`.
fn local_time(seconds: i64) -> String {
    // SAFETY: `localtime_r` fills the structure in and keeps no pointer; all zeros is a valid one.
    let time = unsafe {
        let mut time = std::mem::zeroed();
        libc::localtime_r(&seconds, &mut time);
        time
    };
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        time.tm_year + 1900,
        time.tm_mon + 1,
        time.tm_mday,
        time.tm_hour,
        time.tm_min,
        time.tm_sec
    )
}
