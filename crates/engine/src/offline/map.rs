//! Tells what lies where, over the whole backing chain.
//!
//! A [`Map`] walks the disk from one offset on and yields extents: runs in which the same layer says
//! the same. Each layer keeps one L2 table in memory, so that a walk reads each table once and in
//! order, whatever the disk's size.
//!
//! Deliberately absent: the merging of extents that lie one behind the other in the host file; who
//! prints them decides what counts as one.

use std::sync::Arc;

use stillpoint_format::qcow2::entry::{ExtendedEntry, L1Entry, L2Entry, Target};
use stillpoint_format::qcow2::features::INCOMPATIBLE_DATA_FILE;
use stillpoint_format::qcow2::header::CryptMethod;
use stillpoint_format::qcow2::{Geometry, Header, refcount};
use stillpoint_format::{GuestOffset, HostOffset};
use stillpoint_io::{Access, Files, Queue, Result, Storage, Value};

use super::image::{Image, PIECE_SIZE, read_bytes, read_words};
use crate::options::ImageFormat;
use crate::qcow2::refused;

const OP: &str = "map the image";

/// A run of a disk about which one layer says one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins on the disk, in bytes.
    pub start: u64,
    /// Its length in bytes.
    pub length: u64,
    /// The layer that says so: 0 the active image, 1 its backing file...
    pub depth: usize,
    /// That layer has it; otherwise no layer does, and `depth` is the last one that was asked.
    pub present: bool,
    /// It reads as zeros.
    pub zero: bool,
    /// Bytes of a host file belong to it.
    pub data: bool,
    /// Those are compressed.
    pub compressed: bool,
    /// Where in the host file it begins, unless it is compressed or encrypted.
    pub offset: Option<u64>,
}

impl Extent {
    /// An extent of no length, to begin a walk with.
    pub fn nothing_at(start: u64) -> Extent {
        Extent {
            start,
            length: 0,
            depth: 0,
            present: false,
            zero: false,
            data: false,
            compressed: false,
            offset: None,
        }
    }

    /// Whether `next` goes on where and as this one ends.
    pub fn is_continued_by(&self, next: &Extent) -> bool {
        let offset = self.offset.map(|offset| offset + self.length);
        let expected =
            Extent { start: self.start + self.length, length: next.length, offset, ..*self };
        *next == expected
    }
}

/// What one layer says about a run of bytes.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// Ask the layer beneath; a cluster may be held ready for it.
    Unallocated { host_offset: Option<u64> },
    /// It reads as zeros; a cluster may be held ready for it.
    Zero { host_offset: Option<u64> },
    /// Its bytes lie here.
    Data { host_offset: Option<u64>, compressed: bool },
}

impl Answer {
    /// Whether `next`, `run` bytes on, says the same and lies behind this.
    fn goes_on_as(self, next: Answer, run: u64, is_new_cluster: bool) -> bool {
        let adjacent =
            |host: Option<u64>, next: Option<u64>| host.map(|offset| offset + run) == next;
        match (self, next) {
            (
                Answer::Unallocated { host_offset: host },
                Answer::Unallocated { host_offset: next },
            )
            | (Answer::Zero { host_offset: host }, Answer::Zero { host_offset: next })
            | (
                Answer::Data { host_offset: host, compressed: false },
                Answer::Data { host_offset: next, compressed: false },
            ) => adjacent(host, next),
            // Each compressed cluster lies somewhere else.
            (Answer::Data { compressed: true, .. }, Answer::Data { compressed: true, .. }) => {
                !is_new_cluster
            }
            _ => false,
        }
    }
}

struct Layer {
    image: Image,
    data_file: Option<Arc<dyn Storage>>,
    /// Most of its clusters are mapped to holes: the host file is asked about each.
    asks_host: bool,
    /// A piece of the L1 table: which, and its words.
    l1: (u64, Vec<u64>),
    /// An L2 table: its offset, and its words.
    l2: (u64, Vec<u64>),
}

/// A walk over a disk; see the module's head.
pub struct Map {
    layers: Vec<Layer>,
}

impl Map {
    /// Opens the image called `name`, its data files and its backing chain.
    pub async fn open(
        queue: &Queue,
        files: &dyn Files,
        name: &str,
        format: Option<ImageFormat>,
        access: Access,
    ) -> Result<Map> {
        let mut layers = Vec::new();
        for image in Image::open_chain(queue, files, name, format, access).await? {
            let data_file = image.open_data_file(queue, files, access).await?;
            let asks_host = match &image.header {
                Some(header) => holds_mostly_holes(queue, &*image.file, header).await?,
                None => true,
            };
            let none = (u64::MAX, Vec::new());
            layers.push(Layer { image, data_file, asks_host, l1: none.clone(), l2: none });
        }
        Ok(Map { layers })
    }

    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.layers[0].image.virtual_size()
    }

    /// The host file that a layer's offsets are in.
    pub fn host_file(&self, depth: usize) -> &str {
        let layer = &self.layers[depth];
        layer.data_file.as_ref().unwrap_or(&layer.image.file).name()
    }

    /// What the run of bytes at `start`, which lies on the disk, is; at most `length` bytes of it.
    pub async fn extent(&mut self, queue: &Queue, start: u64, length: u64) -> Result<Extent> {
        let mut length = length.min(self.size() - start);
        let mut extent = Extent { zero: true, ..Extent::nothing_at(start) };
        for depth in 0..self.layers.len() {
            let size = self.layers[depth].image.virtual_size();
            if start >= size {
                // The layer above goes on where this one has ended, with zeros.
                break;
            }
            let (run, answer) =
                self.layers[depth].answer(queue, start, length.min(size - start)).await?;
            length = run;
            extent.depth = depth;
            match answer {
                Answer::Unallocated { host_offset } => {
                    extent.offset = host_offset;
                    continue;
                }
                Answer::Zero { host_offset } => {
                    extent = Extent { present: true, offset: host_offset, ..extent };
                }
                Answer::Data { host_offset, compressed } => {
                    let (data, zero) = (true, false);
                    let offset = host_offset;
                    extent = Extent { present: true, data, zero, compressed, offset, ..extent };
                    if let Some(offset) = offset
                        && self.layers[depth].asks_host
                    {
                        let (run, hole) =
                            self.layers[depth].ask_host(queue, offset, length).await?;
                        length = run;
                        extent.zero = hole;
                        // Of a raw image a hole is no data; of qcow2 it is allocated all the same.
                        extent.data = !hole || self.layers[depth].image.header.is_some();
                    }
                }
            }
            break;
        }
        Ok(Extent { length, ..extent })
    }
}

impl Layer {
    /// How long a run this layer says the same about, and what.
    async fn answer(&mut self, queue: &Queue, start: u64, length: u64) -> Result<(u64, Answer)> {
        let Some(header) = self.image.header.clone() else {
            return Ok((length, Answer::Data { host_offset: Some(start), compressed: false }));
        };
        let geometry = header.geometry();
        let split = geometry.split(GuestOffset(start));
        let word = self.l1_word(queue, split.l1_index).await?;
        let entry = L1Entry::decode(word, geometry).map_err(|error| {
            let offset = header.l1_table_offset.0 + split.l1_index * 8;
            refused(&error, OP, self.image.file.name(), offset)
        })?;
        let covers = geometry.l2_table_covers();
        let Some(table) = entry.table else {
            return Ok((
                length.min(covers - start % covers),
                Answer::Unallocated { host_offset: None },
            ));
        };
        self.load_l2(queue, table.0, geometry).await?;

        let unit = geometry.subcluster_size();
        let mut run = length.min(unit - start % unit);
        let first = self.decode(&header, start)?;
        while run < length && !(start + run).is_multiple_of(covers) {
            let next = self.decode(&header, start + run)?;
            let is_new_cluster = (start + run).is_multiple_of(geometry.cluster_size());
            if !first.goes_on_as(next, run, is_new_cluster) {
                break;
            }
            run += unit.min(length - run);
        }
        Ok((run, first))
    }

    async fn l1_word(&mut self, queue: &Queue, index: u64) -> Result<u64> {
        const PIECE: u64 = PIECE_SIZE / 8;
        let header = self.image.header.as_ref().expect("only qcow2 has an L1 table");
        if index >= header.l1_entry_count.into() {
            return Ok(0);
        }
        let piece = index / PIECE;
        if self.l1.0 != piece {
            let first = piece * PIECE;
            let count = PIECE.min(u64::from(header.l1_entry_count) - first);
            let offset = header.l1_table_offset.0 + first * 8;
            self.l1 = (piece, read_words(queue, &*self.image.file, offset, count).await?);
        }
        Ok(self.l1.1[(index % PIECE) as usize])
    }

    async fn load_l2(&mut self, queue: &Queue, offset: u64, geometry: Geometry) -> Result<()> {
        if self.l2.0 != offset {
            let count = geometry.cluster_size() / 8;
            self.l2 = (offset, read_words(queue, &*self.image.file, offset, count).await?);
        }
        Ok(())
    }

    /// What the loaded L2 table says about the unit (cluster or subcluster) at a guest offset.
    fn decode(&self, header: &Header, start: u64) -> Result<Answer> {
        let geometry = header.geometry();
        let guest = GuestOffset(start);
        let (index, in_cluster) = (geometry.l2_index(guest), geometry.in_cluster(guest));
        let external = header.has(INCOMPATIBLE_DATA_FILE);
        let encrypted = header.crypt_method != CryptMethod::None;
        let refuse = |error| {
            let offset = self.l2.0 + index * geometry.l2_entry_size();
            refused(&error, OP, self.image.file.name(), offset)
        };
        let at = |host: HostOffset| Some(host.0 + in_cluster);
        let data = |host| Answer::Data { host_offset: host, compressed: false };
        let compressed = Answer::Data { host_offset: None, compressed: true };
        if geometry.extended_l2 {
            let at_word = index as usize * 2;
            let (word, bitmap) = (self.l2.1[at_word], self.l2.1[at_word + 1]);
            let decode =
                if external { ExtendedEntry::decode_external } else { ExtendedEntry::decode };
            let entry = decode(word, bitmap, geometry).map_err(refuse)?;
            let subcluster = geometry.subcluster_index(guest);
            let has = |mask: u32| mask >> subcluster & 1 != 0;
            return Ok(match entry.host {
                _ if entry.compressed.is_some() => compressed,
                host if has(entry.map.zero_mask()) => {
                    Answer::Zero { host_offset: host.and_then(at).filter(|_| !encrypted) }
                }
                Some(host) if has(entry.map.allocated_mask()) => {
                    data(at(host).filter(|_| !encrypted))
                }
                host => {
                    Answer::Unallocated { host_offset: host.and_then(at).filter(|_| !encrypted) }
                }
            });
        }
        let word = self.l2.1[index as usize];
        let entry = if external {
            L2Entry::decode_external(word, geometry)
        } else {
            L2Entry::decode(word, geometry, header.version >= 3)
        };
        Ok(match entry.map_err(refuse)?.target {
            Target::Unallocated => Answer::Unallocated { host_offset: None },
            Target::Zero { host } => {
                Answer::Zero { host_offset: host.and_then(at).filter(|_| !encrypted) }
            }
            Target::Standard { host } => data(at(host).filter(|_| !encrypted)),
            Target::Compressed(_) => compressed,
        })
    }

    /// How long a run the host file says the same about, and whether it is a hole.
    async fn ask_host(&self, queue: &Queue, offset: u64, length: u64) -> Result<(u64, bool)> {
        let file = self.data_file.as_ref().unwrap_or(&self.image.file);
        if offset >= file.end() {
            return Ok((length, true));
        }
        let within = length.min(file.end() - offset);
        let Value::Extent(extent) = file.status(queue, offset, within).await? else {
            unreachable!("a status completes with an extent");
        };
        Ok((extent.length.min(length), !extent.data))
    }
}

/// Whether an image's clusters were allocated without being written (preallocated metadata), so
/// that the host file knows more about them than the tables do: noticeably more host clusters are in
/// use than the file takes space for.
async fn holds_mostly_holes(queue: &Queue, file: &dyn Storage, header: &Header) -> Result<bool> {
    let geometry = header.geometry();
    let Some(allocated) = file.allocated_bytes() else { return Ok(false) };
    let stored = allocated / geometry.cluster_size();
    let threshold = (stored * 10 / 9).max(stored + 2);
    let file_clusters = geometry.clusters_for(file.end());
    if header.has(INCOMPATIBLE_DATA_FILE) || file_clusters < threshold {
        return Ok(false);
    }
    // Counting stops at the threshold: what is read is bounded by what the file really holds.
    let per_block = geometry.refcounts_per_block();
    let table_entries = geometry.cluster_size() / 8 * u64::from(header.refcount_table_clusters);
    let blocks = file_clusters.div_ceil(per_block).min(table_entries);
    let table = read_words(queue, file, header.refcount_table_offset.0, blocks).await?;
    let mut in_use = 0;
    for (index, &word) in (0..).zip(&table) {
        let block = refcount::decode_table_entry(word, geometry).map_err(|error| {
            refused(&error, OP, file.name(), header.refcount_table_offset.0 + index * 8)
        })?;
        let Some(HostOffset(offset)) = block.filter(|block| block.0 < file.end()) else { continue };
        let bytes = read_bytes(queue, file, offset..offset + geometry.cluster_size()).await?;
        let clusters = per_block.min(file_clusters - index * per_block);
        let counts =
            (0..clusters).map(|i| refcount::value_in_block(&bytes, i, geometry.refcount_order));
        in_use += counts.filter(|&count| count != 0).count() as u64;
        if in_use >= threshold {
            return Ok(true);
        }
    }
    Ok(false)
}
