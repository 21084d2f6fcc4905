//! Resizing an open disk: what a guest reads afterwards, what the image is like, and what is refused.
//!
//! Deliberately absent: power cuts; those are the simulator's.

// Under `shuttle` nothing runs outside its own tests.
#![cfg(not(feature = "shuttle"))]

mod world;

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;

use stillpoint_engine::offline::create::Qcow2Options;
use stillpoint_engine::{ImageFormat, Options, Zeroing};
use stillpoint_format::qcow2::entry::{COMPRESSED, COPIED, OFFSET_MASK};
use stillpoint_format::qcow2::snapshot::Snapshot;
use stillpoint_format::qcow2::{Header, refcount};
use stillpoint_format::{GuestOffset, HostOffset};
use stillpoint_io::memory::{Held, Operation};
use stillpoint_io::{Access, Durability, Kind, Manage, MemoryFile, Segments};
use world::World;

const BASE: u8 = 0xBA;
const KIB: u64 = 1024;
const ENOSPC: i32 = 28;
const EIO: i32 = 5;

/// A kind of image.
#[derive(Clone, Copy, Debug)]
struct Image {
    version: u32,
    cluster: u64,
    extended_l2: bool,
    /// The length of a backing file that holds [`BASE`] all over.
    backing: Option<u64>,
    snapshot: bool,
}

impl Image {
    /// A world with an image of these bytes, and its backing file.
    fn world(self, bytes: &[u8]) -> World {
        let world = World::new();
        if let Some(length) = self.backing {
            world.insert(MemoryFile::with_bytes("base", &vec![BASE; length as usize]));
        }
        world.insert(MemoryFile::with_bytes("disk", bytes));
        world
    }
}

const PLAIN: Image =
    Image { version: 3, cluster: 512, extended_l2: false, backing: None, snapshot: false };

/// Images of every kind. An L1 entry of the smallest maps 32 KiB, one of those with subclusters 16 MiB.
fn kinds() -> impl Iterator<Item = Image> {
    let versions = [(3, 512, false), (2, 512, false), (3, 4096, false), (3, 16384, true)];
    versions.into_iter().flat_map(|(version, cluster, extended_l2)| {
        let backings = [None, Some(40 * KIB + 512), Some(300 * KIB)];
        backings.into_iter().flat_map(move |backing| {
            [false, true].into_iter().map(move |snapshot| Image {
                version,
                cluster,
                extended_l2,
                backing,
                snapshot: snapshot && version > 2,
            })
        })
    })
}

/// A world with an image of `size` bytes that holds something here and there, and what it holds.
fn filled(kind: Image, size: u64) -> (World, Vec<u8>) {
    let world = kind.world(&[]);
    world.create(&Qcow2Options {
        size,
        version: kind.version,
        cluster_size: kind.cluster,
        extended_l2: kind.extended_l2,
        backing_name: kind.backing.map(|_| "base".to_owned()),
        backing_format: kind.backing.map(|_| "raw".to_owned()),
        ..Qcow2Options::default()
    });
    let disk = world.open();
    let mut content = vec![0; size as usize];
    let base = kind.backing.unwrap_or(0).min(size) as usize;
    content[..base].fill(BASE);
    let writes = [(0, 700), (size / 2, 3000), (size.saturating_sub(2000), 1500), (size - 300, 300)];
    for (value, (start, length)) in (1..).zip(writes) {
        let (start, end) = (start as usize, size.min(start + length) as usize);
        content[start..end].fill(value);
        world.write(&disk, start as u64, &content[start..end]);
    }
    world.close(&disk);
    if kind.snapshot {
        take_snapshot(&world);
    }
    (world, content)
}

fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap())
}

/// The clusters that an L1 table leads to: tables and data.
fn reached(bytes: &[u8], header: &Header, l1: u64, count: u32) -> Vec<(u64, bool)> {
    let geometry = header.geometry();
    let mut reached = Vec::new();
    for table in (0..u64::from(count)).map(|index| word(bytes, l1 + index * 8) & OFFSET_MASK) {
        if table == 0 {
            continue;
        }
        reached.push((table, true));
        for at in (0..geometry.cluster_size()).step_by(geometry.l2_entry_size() as usize) {
            let entry = word(bytes, table + at);
            assert_eq!(entry & COMPRESSED, 0);
            if entry & OFFSET_MASK != 0 {
                reached.push((entry & OFFSET_MASK, false));
            }
        }
    }
    reached
}

/// Takes an internal snapshot of the image, as QEMU does.
fn take_snapshot(world: &World) {
    let file = world.file("disk");
    let mut bytes = file.bytes();
    let header = Header::decode(&bytes[..1 << bytes[23]], None).unwrap();
    let geometry = header.geometry();
    let size = geometry.cluster_size();
    let (l1, count) = (header.l1_table_offset.0, header.l1_entry_count);
    let tables: Vec<(u64, bool)> = reached(&bytes, &header, l1, count);
    let l1_clusters = geometry.clusters_for(u64::from(count) * 8);
    let copy = (bytes.len() as u64).next_multiple_of(size);
    bytes.resize((copy + l1_clusters * size + size) as usize, 0);
    for index in 0..u64::from(count) {
        let at = l1 + index * 8;
        let entry = (word(&bytes, at) & !COPIED).to_be_bytes();
        bytes[at as usize..at as usize + 8].copy_from_slice(&entry);
    }
    for &(table, _) in tables.iter().filter(|(_, is_table)| *is_table) {
        for at in (table..table + size).step_by(geometry.l2_entry_size() as usize) {
            let entry = (word(&bytes, at) & !COPIED).to_be_bytes();
            bytes[at as usize..at as usize + 8].copy_from_slice(&entry);
        }
    }
    bytes.copy_within(l1 as usize..(l1 + u64::from(count) * 8) as usize, copy as usize);
    let snapshot = Snapshot {
        l1_table_offset: HostOffset(copy),
        l1_entry_count: count,
        id: b"1".to_vec(),
        name: b"one".to_vec(),
        disk_size: Some(header.size),
        ..Snapshot::default()
    };
    let entry = snapshot.encode();
    let table = copy + l1_clusters * size;
    bytes[table as usize..table as usize + entry.len()].copy_from_slice(&entry);
    bytes[60..64].copy_from_slice(&1u32.to_be_bytes());
    bytes[64..72].copy_from_slice(&table.to_be_bytes());
    let order = header.refcount_order;
    let own = (copy >> geometry.cluster_bits)..=(table >> geometry.cluster_bits);
    let shared = tables.iter().map(|(offset, _)| (offset >> geometry.cluster_bits, 2));
    for (cluster, count) in own.map(|cluster| (cluster, 1)).chain(shared) {
        let per_block = geometry.refcounts_per_block();
        let block = word(&bytes, header.refcount_table_offset.0 + cluster / per_block * 8);
        assert_ne!(block, 0, "the image is small");
        let (index, within) = refcount::locate(cluster % per_block, order);
        let at = block + index as u64 * 8;
        let counts = refcount::set(word(&bytes, at), within, order, count).to_be_bytes();
        bytes[at as usize..at as usize + 8].copy_from_slice(&counts);
    }
    file.poke(0, &bytes);
    world.check();
}

/// The bytes of the snapshot's tables and clusters.
fn frozen(world: &World) -> Vec<u8> {
    let bytes = world.file("disk").bytes();
    let header = Header::decode(&bytes[..1 << bytes[23]], None).unwrap();
    if header.snapshot_count == 0 {
        return Vec::new();
    }
    let geometry = header.geometry();
    let table = header.snapshot_table_offset.0 as usize;
    let snapshot = Snapshot::decode(&bytes[table..], geometry).unwrap();
    let (l1, count) = (snapshot.l1_table_offset.0, snapshot.l1_entry_count);
    let size = geometry.cluster_size();
    let clusters = reached(&bytes, &header, l1, count);
    clusters
        .into_iter()
        .flat_map(|(offset, _)| bytes[offset as usize..(offset + size) as usize].to_vec())
        .collect()
}

#[test]
fn growing_and_shrinking_show_the_old_bytes_and_then_zeros() {
    for kind in kinds() {
        let (world, mut content) = filled(kind, 40 * KIB + 512);
        let before = frozen(&world);
        let disk = world.open();
        // Within a cluster, within the L1 table, beyond it; back into a cluster; far beyond.
        for size in [41 * KIB, 60 * KIB, 250 * KIB, 20 * KIB + 512, 90 * KIB, 512, 1700 * KIB] {
            world.resize(&disk, size).unwrap();
            content.resize(size as usize, 0);
            assert_eq!(disk.size(), size, "{kind:?}");
            assert!(world.content(&disk) == content, "{kind:?} at {size}");
            let at = size as usize - 200;
            content[at..].fill((size >> 9) as u8 | 1);
            world.write(&disk, at as u64, &content[at..]);
        }
        world.close(&disk);
        assert_eq!(world.check().leaks, 0, "{kind:?}");
        assert!(frozen(&world) == before, "{kind:?}");
        let disk = world.open();
        assert!(world.content(&disk) == content, "{kind:?}");
    }
}

#[test]
fn random_rounds_agree_with_an_array_of_bytes() {
    let mut seed = 99;
    let mut random = move |bound| below(&mut seed, bound);
    for kind in kinds() {
        let (world, mut content) = filled(kind, 64 * KIB);
        let before = frozen(&world);
        for _ in 0..3 {
            let disk = world.open();
            for _ in 0..40 {
                let size = content.len() as u64;
                let start = random(size);
                let length = 1 + random((size - start).min(20 * KIB));
                let range = start as usize..(start + length) as usize;
                match random(4) {
                    0 => {
                        let size = 512 * (1 + random(700));
                        world.resize(&disk, size).unwrap();
                        content.resize(size as usize, 0);
                    }
                    1 => {
                        let zeroing = Zeroing { unmap: random(2) == 0, fast_only: false };
                        let volatile = Durability::Volatile;
                        let queue = world.queue();
                        world
                            .run(disk.write_zeroes(&queue, start, length, zeroing, volatile))
                            .unwrap();
                        content[range].fill(0);
                    }
                    _ => {
                        content[range.clone()].fill(1 + random(255) as u8);
                        world.write(&disk, start, &content[range]);
                    }
                }
            }
            assert!(world.content(&disk) == content, "{kind:?}");
            world.close(&disk);
            assert_eq!(world.check().leaks, 0, "{kind:?}");
        }
        assert!(frozen(&world) == before, "{kind:?}");
    }
}

#[test]
fn a_lack_of_space_leaves_the_disk_as_it_was() {
    for kind in kinds() {
        for new in [250 * KIB, 20 * KIB] {
            for refused in 0..12 {
                let (world, mut content) = filled(kind, 40 * KIB + 512);
                let disk = world.open();
                let file = world.file("disk");
                let mut count = 0;
                let refuse = move |operation| {
                    let takes_space = matches!(
                        operation,
                        Operation::Write { .. } | Operation::Manage(Manage::Grow { .. })
                    );
                    count += u64::from(takes_space);
                    takes_space && count > refused
                };
                file.fail(Some((Box::new(refuse), ENOSPC)));
                let resized = world.resize(&disk, new);
                file.fail(None);
                if let Err(error) = &resized {
                    assert_eq!(error.kind(), Kind::NoSpace, "{kind:?}: {error}");
                } else {
                    content.resize(new as usize, 0);
                }
                assert_eq!(disk.size(), content.len() as u64, "{kind:?}");
                assert!(world.content(&disk) == content, "{kind:?}");
                world.resize(&disk, 100 * KIB).unwrap();
                content.resize(100 * KIB as usize, 0);
                content[50 * KIB as usize..51 * KIB as usize].fill(9);
                world.write(&disk, 50 * KIB, &[9; 1024]);
                world.close(&disk);
                assert_eq!(world.check().leaks, 0, "{kind:?}");
                assert!(world.content(&world.open()) == content, "{kind:?}");
            }
        }
    }
}

#[test]
fn nothing_is_mapped_beyond_the_end_of_a_shorter_disk() {
    for kind in kinds() {
        let (world, _) = filled(kind, 200 * KIB);
        let disk = world.open();
        let zeroing = Zeroing { unmap: false, fast_only: false };
        let (queue, volatile) = (world.queue(), Durability::Volatile);
        world.run(disk.write_zeroes(&queue, 50 * KIB, 90 * KIB, zeroing, volatile)).unwrap();
        world.resize(&disk, 20 * KIB + 512).unwrap();
        world.close(&disk);
        let bytes = world.file("disk").bytes();
        let header = Header::decode(&bytes[..1 << bytes[23]], None).unwrap();
        let geometry = header.geometry();
        for cluster in geometry.clusters_for(header.size)..geometry.clusters_for(200 * KIB) {
            let split = geometry.split(GuestOffset(cluster << geometry.cluster_bits));
            let l1_entry = word(&bytes, header.l1_table_offset.0 + split.l1_index * 8);
            if l1_entry & OFFSET_MASK != 0 {
                let at = (l1_entry & OFFSET_MASK) + split.l2_index * geometry.l2_entry_size();
                let length = geometry.l2_entry_size() as usize;
                assert_eq!(bytes[at as usize..][..length], [0; 16][..length], "{kind:?}");
            }
        }
    }
}

#[test]
fn a_failed_barrier_latches() {
    let (world, _) = filled(PLAIN, 40 * KIB);
    let disk = world.open();
    let fail = |operation| operation == Operation::Flush;
    world.file("disk").fail(Some((Box::new(fail), EIO)));
    assert_eq!(world.resize(&disk, 80 * KIB).unwrap_err().kind(), Kind::Io);
    world.file("disk").fail(None);
    assert_eq!(disk.size(), 40 * KIB);
    assert_eq!(world.resize(&disk, 80 * KIB).unwrap_err().kind(), Kind::Latched);
}

#[test]
fn requests_of_a_tail_end_before_it_is_cut_and_later_ones_are_refused() {
    for raw in [false, true] {
        let (world, _) = filled(PLAIN, 64 * KIB);
        if raw {
            world.insert(MemoryFile::new("disk", 64 * KIB));
        }
        let format = Some(if raw { ImageFormat::Raw } else { ImageFormat::Qcow2 });
        let disk = world.try_open(Options { format, ..Options::default() }).unwrap();
        let (file, queue) = (world.file("disk"), world.queue());
        let held = |operation| matches!(operation, Operation::Write { length: 1024, .. });
        file.hold(Some(Box::new(held)));
        let data = Segments::from_slice(&[5; 1024]);
        let mut write = pin!(disk.write(&queue, 60 * KIB, data.clone(), Durability::Volatile));
        assert!(world.poll(write.as_mut()).is_none());
        let before = file.record().len();
        let mut resize = pin!(disk.resize(&queue, 32 * KIB, true));
        for _ in 0..9 {
            assert!(world.poll(resize.as_mut()).is_none(), "its tail is in use");
        }
        let late = disk.write(&queue, 60 * KIB, data, Durability::Volatile);
        assert_eq!(world.run(late).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(file.record().len(), before, "nothing is cut under a request");
        file.held().iter().for_each(Held::release);
        world.run(write).unwrap();
        world.run(resize).unwrap();
        assert_eq!(disk.size(), 32 * KIB);
        world.resize(&disk, 64 * KIB).unwrap();
        assert_eq!(world.read(&disk, 32 * KIB, 32 * KIB), vec![0; 32 * KIB as usize]);
    }
}

#[test]
fn raw_disks_change_with_their_files() {
    let world = World::new();
    world.insert(MemoryFile::with_bytes("disk", &[BASE; 8192]).with_facts(|facts| {
        facts.request_align = 4096;
    }));
    let format = Some(ImageFormat::Raw);
    let disk = world.try_open(Options { format, ..Options::default() }).unwrap();
    assert_eq!(world.resize(&disk, 8704).unwrap_err().kind(), Kind::Invalid);
    world.resize(&disk, 4096).unwrap();
    world.resize(&disk, 12288).unwrap();
    let mut content = vec![0; 12288];
    content[..4096].fill(BASE);
    assert_eq!(world.content(&disk), content);
    world.close(&disk);
    assert_eq!(world.file("disk").bytes(), content);

    world.insert(MemoryFile::new("disk", 8192).with_facts(|facts| facts.fixed_size = true));
    let disk = world.try_open(Options { format, ..Options::default() }).unwrap();
    assert_eq!(world.resize(&disk, 4096).unwrap_err().kind(), Kind::Unsupported);
}

#[test]
fn what_cannot_be_resized_is_refused_by_name() {
    let (world, _) = filled(PLAIN, 64 * KIB);
    let disk = world.open();
    let refused = |size, shrink, kind: Kind, word: &str| {
        let error = world.run(disk.resize(&world.queue(), size, shrink)).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(64 * KIB + 1, false, Kind::Invalid, "multiple of 512");
    refused(32 * KIB, false, Kind::Invalid, "--shrink");
    refused(1 << 40, false, Kind::Limit, "larger clusters");
    world.run(disk.resize(&world.queue(), 64 * KIB, false)).unwrap();
    world.close(&disk);
    refused(128 * KIB, false, Kind::Cancelled, "closed");

    let format = Some(ImageFormat::Qcow2);
    let reading = Options { format, access: Access::Read, ..Options::default() };
    let disk = world.try_open(reading).unwrap();
    assert_eq!(world.resize(&disk, 128 * KIB).unwrap_err().kind(), Kind::ReadOnly);

    let (world, _) = filled(Image { version: 2, ..PLAIN }, 64 * KIB);
    take_snapshot(&world);
    let error = world.resize(&world.open(), 128 * KIB).unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert!(error.to_string().contains("snapshot"), "{error}");
}

#[test]
fn bitmaps_are_not_left_behind_by_their_disk() {
    let (world, _) = filled(Image { cluster: 4096, ..PLAIN }, 64 * KIB);
    let file = &world.file("disk");
    // The first extension becomes the bitmaps', with one bitmap in a directory at the file's end.
    let directory = file.bytes().len() as u64;
    file.poke(88, &1u64.to_be_bytes());
    file.poke(112, &[0x2385_2875u32.to_be_bytes(), 24u32.to_be_bytes()].concat());
    file.poke(120, &[1u32.to_be_bytes(), [0; 4]].concat());
    file.poke(128, &32u64.to_be_bytes());
    file.poke(136, &directory.to_be_bytes());
    file.poke(144, &[0; 8]);
    let mut entry = vec![0; 4096];
    entry[..8].copy_from_slice(&(directory + 4096).to_be_bytes());
    entry[8..12].copy_from_slice(&1u32.to_be_bytes());
    entry[16..20].copy_from_slice(&[1, 16, 0, 1]);
    entry[24] = b'b';
    file.poke(directory, &entry);
    file.poke(directory + 4096, &[0; 4096]);
    let error = world.resize(&world.open(), 128 * KIB).unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert!(error.to_string().contains("bitmap --remove"), "{error}");
}

#[test]
fn what_is_flushed_while_the_l1_table_moves_is_durable() {
    const NEW: u64 = 7 << 20;
    let (world, mut content) = filled(PLAIN, 256 * KIB);
    let (disk, file, queue) = (world.open(), world.file("disk"), world.queue());
    // 224 entries take four clusters; while they are written, another request makes an L2 table.
    let table = |operation| matches!(operation, Operation::Write { length: 2048, .. });
    file.hold(Some(Box::new(table)));
    let mut resize = pin!(disk.resize(&queue, NEW, false));
    while file.held().is_empty() {
        assert!(world.poll(resize.as_mut()).is_none());
    }
    let data = Segments::from_slice(&[6; 512]);
    content[70 * KIB as usize..][..512].fill(6);
    let mut write = pin!(disk.write(&queue, 70 * KIB, data, Durability::Durable));
    let early = (0..9).find_map(|_| world.poll(write.as_mut()));
    file.held().iter().for_each(Held::release);
    world.run(resize).unwrap();
    early.unwrap_or_else(|| world.run(write)).unwrap();
    let after = PLAIN.world(&file.bytes());
    content.resize(NEW as usize, 0);
    assert!(after.content(&after.open()) == content);
}

/// A number below `bound`, from `seed` on.
fn below(seed: &mut u64, bound: u64) -> u64 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 33) % bound
}

#[test]
fn requests_go_on_while_the_disk_is_resized() {
    const LEAST: u64 = 20 * KIB + 512;
    for (kind, seed) in kinds().flat_map(|kind| (0..8).map(move |seed| (kind, seed))) {
        let (world, content) = filled(kind, LEAST);
        let before = frozen(&world);
        let (disk, file) = (world.open(), world.file("disk"));
        let content = Rc::new(RefCell::new(content));
        // Every operation ends when its turn comes.
        file.hold(Some(Box::new(|_| true)));
        let running = Rc::new(Cell::new(3));
        for worker in 0..3 {
            let (disk, content, running) = (disk.clone(), content.clone(), running.clone());
            let (queue, mut seed) = (world.queue(), seed * 3 + worker);
            world.queue().spawn(async move {
                for value in 1..40 {
                    // Each has sectors of its own, in clusters that it shares.
                    let start = (below(&mut seed, LEAST / 512 / 3) * 3 + worker) * 512;
                    let range = start as usize..start as usize + 512;
                    let data = Segments::from_slice(&[value; 512]);
                    let durability = match below(&mut seed, 4) {
                        0 => Durability::Durable,
                        _ => Durability::Volatile,
                    };
                    disk.write(&queue, start, data.clone(), durability).await.unwrap();
                    content.borrow_mut()[range].fill(value);
                    let found = Segments::alloc(512);
                    disk.read(&queue, start, found.clone()).await.unwrap();
                    assert_eq!(found.to_vec(), data.to_vec(), "{kind:?}");
                }
                running.set(running.get() - 1);
            });
        }
        let queue = world.queue();
        let resizes = async {
            let mut chance = seed;
            for _ in 0..12 {
                let (old, new) = (disk.size(), LEAST + 512 * below(&mut chance, 700));
                disk.resize(&queue, new, true).await.unwrap();
                if new > old {
                    let shown = Segments::alloc((new - old) as usize);
                    disk.read(&queue, old, shown.clone()).await.unwrap();
                    assert!(shown.is_zero(), "{kind:?}");
                }
                let whole = Segments::from_slice(&vec![255; (new - LEAST) as usize]);
                disk.write(&queue, LEAST, whole, Durability::Volatile).await.unwrap();
            }
            disk.resize(&queue, LEAST, true).await.unwrap();
        };
        let mut resizes = pin!(resizes);
        let (mut chance, mut resized) = (seed, false);
        while !resized || running.get() > 0 {
            if !resized {
                resized = world.poll(resizes.as_mut()).is_some();
            }
            world.turn();
            let held = file.held();
            if !held.is_empty() {
                held[below(&mut chance, held.len() as u64) as usize].release();
            }
            if below(&mut chance, 50) == 0 {
                // A killed server leaves what has been written.
                kind.world(&file.bytes()).check();
            }
        }
        file.hold(None);
        file.held().iter().for_each(Held::release);
        world.close(&disk);
        assert_eq!(world.check().leaks, 0, "{kind:?}");
        assert!(frozen(&world) == before, "{kind:?}");
        assert!(world.content(&world.open()) == *content.borrow(), "{kind:?}");
    }
}

#[test]
fn closing_waits_for_a_resize() {
    let (world, _) = filled(PLAIN, 64 * KIB);
    let (disk, file, queue) = (world.open(), world.file("disk"), world.queue());
    file.hold(Some(Box::new(|operation| operation == Operation::Flush)));
    let mut resize = pin!(disk.resize(&queue, 640 * KIB, false));
    assert!(world.poll(resize.as_mut()).is_none());
    let mut close = pin!(disk.close(&queue));
    assert!(world.poll(close.as_mut()).is_none());
    file.hold(None);
    file.held().iter().for_each(Held::release);
    world.run(resize).unwrap();
    world.run(close).unwrap();
    assert_eq!(world.check().leaks, 0);
    assert_eq!(world.open().size(), 640 * KIB);
}

/// A caller that gives up in the middle leaves the size that the file has, or a disk that refuses writing.
#[test]
fn a_resize_that_is_dropped_leaves_the_size_that_is_durable() {
    let (old, new) = (256 * KIB, 100 * KIB);
    let mut latched = 0;
    for steps in 0..40 {
        let (world, _) = filled(PLAIN, old);
        let (disk, file, queue) = (world.open(), world.file("disk"), world.queue());
        file.hold(Some(Box::new(|operation| operation == Operation::Flush)));
        let mut resize = Box::pin(disk.resize(&queue, new, true));
        let ended = (0..steps).any(|_| {
            let ended = world.poll(resize.as_mut()).is_some();
            file.held().iter().for_each(Held::release);
            ended
        });
        drop(resize);
        file.hold(None);
        file.held().iter().for_each(Held::release);
        let there = Header::decode(&file.bytes()[..512], None).unwrap().size;
        match world.resize(&disk, old) {
            Err(error) => {
                assert_eq!(error.kind(), Kind::Latched, "step {steps}");
                latched += 1;
            }
            Ok(()) => {
                assert!([old, new].contains(&there), "step {steps}");
                world.write(&disk, 200 * KIB, &[9; 512]);
                world.run(disk.flush(&queue)).unwrap();
                let after = PLAIN.world(&file.bytes());
                let found = after.read(&after.open(), 200 * KIB, 1024);
                assert_eq!(found[..512], [9; 512], "step {steps}");
                assert!(there == old || found[512..] == [0; 512], "step {steps}");
            }
        }
        if ended {
            assert!(latched > 0, "no step was in the middle of the header's write");
            return;
        }
    }
    panic!("it has no end");
}
