//! Makes images.
//!
//! ```text
//!  | header | refcount table | refcount blocks | L1 table | L2 tables | guest data |
//!                                              '-- with preallocation: --'--------'
//! ```
//!
//! A crash at any step leaves a file that nobody takes for an image: the header is written last,
//! after a barrier that covers everything it points to. After a failure the file is emptied.

use std::sync::Arc;

use stillpoint_format::HostOffset;
use stillpoint_format::qcow2::entry::{L1Entry, L2Entry, Target};
use stillpoint_format::qcow2::extension::{Extension, FILE_NAME_LENGTH_MAX};
use stillpoint_format::qcow2::features::standard_names;
use stillpoint_format::qcow2::header::{
    AUTOCLEAR_DATA_FILE_RAW, CLUSTER_BITS, COMPATIBLE_LAZY_REFCOUNTS, CompressionType, CryptMethod,
    EXTENDED_L2_CLUSTER_BITS_MIN, Header, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_DATA_FILE,
    INCOMPATIBLE_EXTENDED_L2, L1_SIZE_MAX, REFCOUNT_TABLE_SIZE_MAX,
};
use stillpoint_format::qcow2::{Geometry, HOST_END_MAX, refcount};
use stillpoint_io::{
    Durability, Error, Files, GrowMeans, Kind, Manage, Queue, Result, Segments, Storage,
    path_beside,
};

use super::image::{PIECE_SIZE, bytes_of, write_bytes};

const OP: &str = "create the image";

/// How much of a new image exists from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// Nothing: clusters are allocated when they are written.
    #[default]
    Off,
    /// Every mapping; the host's space is found at the first write.
    Metadata,
    /// Every mapping, and the host's space is reserved.
    Falloc,
    /// Every mapping, and the host's space is written with zeros.
    Full,
}

/// What a new qcow2 image should be.
#[derive(Clone, Debug)]
pub struct Qcow2Options {
    /// The disk's size in bytes; rounded up to whole sectors of 512 bytes.
    pub size: u64,
    /// 2 or 3.
    pub version: u32,
    /// The cluster size in bytes.
    pub cluster_size: u64,
    /// Extended L2 entries, with 32 subclusters for each cluster.
    pub extended_l2: bool,
    /// The width of a refcount in bits.
    pub refcount_bits: u64,
    /// Refcounts may lag behind while the image is open.
    pub lazy_refcounts: bool,
    /// How compressed clusters will be compressed.
    pub compression: CompressionType,
    /// The backing file's name, as it will stand in the image.
    pub backing_name: Option<String>,
    /// The backing file's format by name.
    pub backing_format: Option<String>,
    /// The name of an external data file to be created, as it will stand in the image.
    pub data_file: Option<String>,
    /// The external data file stays readable as a raw image.
    pub data_file_raw: bool,
    /// How much exists from the beginning.
    pub preallocation: Preallocation,
}

impl Default for Qcow2Options {
    fn default() -> Qcow2Options {
        Qcow2Options {
            size: 0,
            version: 3,
            cluster_size: 65536,
            extended_l2: false,
            refcount_bits: 16,
            lazy_refcounts: false,
            compression: CompressionType::Zlib,
            backing_name: None,
            backing_format: None,
            data_file: None,
            data_file_raw: false,
            preallocation: Preallocation::Off,
        }
    }
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, OP, why)
}

impl Qcow2Options {
    /// Refuses combinations that no image can be.
    fn require_possible(&self) -> Result<()> {
        let only_v3 = |what: &str| {
            invalid(format!(
                "{what} only supported with compatibility level 1.1 and above \
                 (use version=v3 or greater)"
            ))
        };
        let cluster_bits = self.cluster_size.checked_ilog2().unwrap_or(0);
        let v2 = self.version < 3;
        let refcounts_ok = self.refcount_bits.is_power_of_two() && self.refcount_bits <= 64;
        let named = |name: &Option<String>| name.as_ref().map_or(0, |name| name.len() as u64);
        let refusals = [
            (
                !self.cluster_size.is_power_of_two() || !CLUSTER_BITS.contains(&cluster_bits),
                invalid("Cluster size must be a power of two between 512 and 2048k"),
            ),
            (v2 && self.lazy_refcounts, only_v3("Lazy refcounts")),
            (
                !refcounts_ok,
                invalid("Refcount width must be a power of two and may not exceed 64 bits"),
            ),
            (
                v2 && self.refcount_bits != 16,
                invalid(
                    "Different refcount widths than 16 bits require compatibility level 1.1 or \
                     above (use version=v3 or greater)",
                ),
            ),
            (
                self.data_file_raw && self.data_file.is_none(),
                invalid("data-file-raw requires data-file"),
            ),
            (
                self.data_file_raw && self.backing_name.is_some(),
                invalid("Backing file and data-file-raw cannot be used at the same time"),
            ),
            (v2 && self.data_file.is_some(), only_v3("External data files are")),
            (
                v2 && self.compression != CompressionType::Zlib,
                only_v3("Non-zlib compression type is"),
            ),
            (v2 && self.extended_l2, only_v3("Extended L2 entries are")),
            (
                self.extended_l2 && cluster_bits < EXTENDED_L2_CLUSTER_BITS_MIN,
                invalid(
                    "Extended L2 entries are only supported with cluster sizes of at least 16384 \
                     bytes",
                ),
            ),
            (
                self.backing_name.is_some()
                    && self.preallocation != Preallocation::Off
                    && !self.extended_l2,
                invalid(
                    "Backing file and preallocation can only be used at the same time if \
                     extended_l2 is on",
                ),
            ),
            (
                self.backing_name.is_none() && self.backing_format.is_some(),
                invalid("Backing format cannot be used without backing file"),
            ),
            (
                named(&self.backing_name).max(named(&self.data_file)) > FILE_NAME_LENGTH_MAX,
                invalid("Backing file name too long"),
            ),
        ];
        match refusals.into_iter().find(|(refused, _)| *refused) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }
}

/// Where everything in a new image lies; each count is of clusters unless it says otherwise.
#[derive(Debug, PartialEq, Eq)]
struct Layout {
    geometry: Geometry,
    /// The disk's size in bytes, in whole sectors.
    size: u64,
    refcount_tables: u64,
    refcount_blocks: u64,
    l1_entries: u64,
    l1_tables: u64,
    l2_tables: u64,
    /// Guest clusters that are mapped from the beginning.
    mapped: u64,
    /// Those of them that lie in the image itself.
    data: u64,
}

impl Layout {
    fn plan(options: &Qcow2Options) -> Result<Layout> {
        options.require_possible()?;
        let geometry = Geometry {
            cluster_bits: options.cluster_size.ilog2(),
            extended_l2: options.extended_l2,
            refcount_order: options.refcount_bits.ilog2(),
        };
        let too_large = || {
            invalid(
                "The image size is too large for file format 'qcow2' (try using a larger cluster \
                 size)",
            )
        };
        if options.size > HOST_END_MAX << 7 {
            return Err(too_large());
        }
        let size = options.size.next_multiple_of(512);
        let l1_entries = geometry.l1_entries_for(size);
        if l1_entries * 8 > L1_SIZE_MAX {
            return Err(too_large());
        }
        // A raw data file can be used past the image only if everything is mapped one to one.
        let preallocated = options.preallocation != Preallocation::Off || options.data_file_raw;
        let mapped = if preallocated { geometry.clusters_for(size) } else { 0 };
        let mut layout = Layout {
            geometry,
            size,
            refcount_tables: 1,
            refcount_blocks: 1,
            l1_entries,
            l1_tables: geometry.clusters_for(l1_entries * 8),
            l2_tables: if preallocated { l1_entries } else { 0 },
            mapped,
            data: if options.data_file.is_some() { 0 } else { mapped },
        };
        // Refcount blocks count themselves: add until they suffice.
        loop {
            let blocks = layout.end_cluster().div_ceil(geometry.refcounts_per_block());
            let tables = geometry.clusters_for(blocks * 8);
            if blocks <= layout.refcount_blocks && tables <= layout.refcount_tables {
                break;
            }
            layout.refcount_blocks = layout.refcount_blocks.max(blocks);
            layout.refcount_tables = layout.refcount_tables.max(tables);
        }
        let table_size = layout.refcount_tables << geometry.cluster_bits;
        if table_size > REFCOUNT_TABLE_SIZE_MAX
            || layout.end_cluster() > HOST_END_MAX >> geometry.cluster_bits
        {
            return Err(too_large());
        }
        Ok(layout)
    }

    fn blocks_start(&self) -> u64 {
        1 + self.refcount_tables
    }

    fn l1_start(&self) -> u64 {
        self.blocks_start() + self.refcount_blocks
    }

    fn l2_start(&self) -> u64 {
        self.l1_start() + self.l1_tables
    }

    fn data_start(&self) -> u64 {
        self.l2_start() + self.l2_tables
    }

    fn end_cluster(&self) -> u64 {
        self.data_start() + self.data
    }

    /// The offset of a cluster.
    fn offset(&self, cluster: u64) -> u64 {
        cluster << self.geometry.cluster_bits
    }

    fn refcount_table(&self) -> Vec<u64> {
        (0..self.refcount_blocks).map(|i| self.offset(self.blocks_start() + i)).collect()
    }

    /// A refcount block's bytes: 1 for every cluster of the image.
    fn refcount_block(&self, index: u64) -> Vec<u8> {
        let mut block = vec![0; self.geometry.cluster_size() as usize];
        let per_block = self.geometry.refcounts_per_block();
        let used = self.end_cluster().saturating_sub(index * per_block).min(per_block);
        for cluster in 0..used {
            refcount::set_in_block(&mut block, cluster, self.geometry.refcount_order, 1);
        }
        block
    }

    fn l1_table(&self) -> Vec<u64> {
        let entry = |i| {
            let table = (i < self.l2_tables).then(|| HostOffset(self.offset(self.l2_start() + i)));
            L1Entry { table, copied: table.is_some() }.encode()
        };
        (0..self.l1_entries).map(entry).collect()
    }

    /// An L2 table's bytes: each guest cluster at the next cluster of the data, or, in an external
    /// data file, at its own offset. Subclusters stay unallocated, and so read as before.
    fn l2_table(&self, index: u64) -> Vec<u8> {
        let entries = self.geometry.l2_entries();
        let first = index * entries;
        let start = if self.data > 0 { self.data_start() } else { 0 };
        let mut words = Vec::with_capacity(self.geometry.cluster_size() as usize / 8);
        for guest_cluster in first..first + entries {
            let host = HostOffset(self.offset(start + guest_cluster));
            let target = Target::Standard { host };
            let entry = L2Entry { target, copied: true }.encode(self.geometry);
            words.push(if guest_cluster < self.mapped { entry } else { 0 });
            if self.geometry.extended_l2 {
                words.push(0);
            }
        }
        bytes_of(&words)
    }

    fn header(&self, options: &Qcow2Options) -> Result<Vec<u8>> {
        let v3 = options.version >= 3;
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        let has_data_file = options.data_file.is_some();
        let zstd = options.compression != CompressionType::Zlib;
        let mut extensions = Vec::new();
        extensions.extend(options.backing_format.clone().map(Extension::BackingFormat));
        extensions.extend(options.data_file.clone().map(Extension::DataFile));
        let mut header = Header {
            version: options.version,
            backing_name: options.backing_name.clone(),
            cluster_bits: self.geometry.cluster_bits,
            size: self.size,
            crypt_method: CryptMethod::None,
            l1_entry_count: self.l1_entries as u32,
            l1_table_offset: HostOffset(self.offset(self.l1_start())),
            refcount_table_offset: HostOffset(self.offset(1)),
            refcount_table_clusters: self.refcount_tables as u32,
            snapshot_count: 0,
            snapshot_table_offset: HostOffset(0),
            incompatible: flag(has_data_file, INCOMPATIBLE_DATA_FILE)
                | flag(zstd, INCOMPATIBLE_COMPRESSION)
                | flag(self.geometry.extended_l2, INCOMPATIBLE_EXTENDED_L2),
            compatible: flag(options.lazy_refcounts, COMPATIBLE_LAZY_REFCOUNTS),
            autoclear: flag(options.data_file_raw, AUTOCLEAR_DATA_FILE_RAW),
            refcount_order: self.geometry.refcount_order,
            compression_type: options.compression,
            unknown_fields: if v3 { vec![0; 7] } else { Vec::new() },
            extensions,
        };
        let plain = header.encode().map_err(|error| invalid(error.to_string()))?;
        if !v3 {
            return Ok(plain);
        }
        // Names of features are a courtesy to other programs; tiny clusters have no room for it.
        header.extensions.push(Extension::FeatureNames(standard_names()));
        Ok(header.encode().unwrap_or(plain))
    }
}

/// Creates a qcow2 image called `name`, and its data file where it has one (beside the image,
/// where every reader will look for it).
pub async fn create_qcow2(
    queue: &Queue,
    files: &dyn Files,
    name: &str,
    options: &Qcow2Options,
) -> Result<()> {
    let layout = Layout::plan(options)?;
    let header = layout.header(options)?;
    if let Some(data_file) = &options.data_file {
        let path = path_beside(data_file, name);
        create_raw(queue, files, &path, layout.size, options.preallocation).await?;
    }
    let file = files.create(queue, name).await?;
    let result = write_image(queue, &file, &layout, &header, options.preallocation).await;
    empty_on_failure(queue, &file, result).await
}

/// Creates a raw image of `size` bytes, rounded up to whole sectors of 512.
pub async fn create_raw(
    queue: &Queue,
    files: &dyn Files,
    name: &str,
    size: u64,
    preallocation: Preallocation,
) -> Result<()> {
    let Some(size) = size.checked_next_multiple_of(512).filter(|&size| size < 1 << 63) else {
        return Err(invalid("Image size must be less than 8 EiB"));
    };
    let file = files.create(queue, name).await?;
    let result = async {
        grow(queue, &*file, size, preallocation).await?;
        // ORDER: the file's length and space before success is told.
        file.flush(queue).await.map(drop)
    };
    let result = result.await;
    empty_on_failure(queue, &file, result).await
}

/// Half an image is emptied, so that nobody takes it for a whole one.
async fn empty_on_failure(
    queue: &Queue,
    file: &Arc<dyn Storage>,
    result: Result<()>,
) -> Result<()> {
    if result.is_err() {
        // The first failure is what the user must hear of, not that of the cleaning up.
        let _ = file.manage(queue, Manage::Shrink { end: 0 }).await;
    }
    result
}

/// Makes the file `end` bytes long, with as much space behind them as asked for.
async fn grow(
    queue: &Queue,
    file: &dyn Storage,
    end: u64,
    preallocation: Preallocation,
) -> Result<()> {
    let start = file.end();
    let reserve = match preallocation {
        Preallocation::Off | Preallocation::Metadata => false,
        Preallocation::Falloc => true,
        Preallocation::Full => file.facts().can_fallocate,
    };
    let means = if reserve { GrowMeans::Fallocate } else { GrowMeans::Truncate };
    if end > start {
        file.manage(queue, Manage::Grow { end, means }).await?;
    }
    if preallocation == Preallocation::Full {
        let zeros = Segments::zeroed(PIECE_SIZE as usize);
        let mut offset = start;
        while offset < end {
            let length = PIECE_SIZE.min(end - offset);
            let piece = zeros.slice(0..length as usize);
            file.write(queue, offset, piece, Durability::Volatile).await?;
            offset += length;
        }
    }
    Ok(())
}

async fn write_image(
    queue: &Queue,
    file: &Arc<dyn Storage>,
    layout: &Layout,
    header: &[u8],
    preallocation: Preallocation,
) -> Result<()> {
    let file = &**file;
    let data_start = layout.offset(layout.data_start());
    grow(queue, file, data_start, Preallocation::Off).await?;
    if layout.data > 0 {
        grow(queue, file, layout.offset(layout.end_cluster()), preallocation).await?;
    }
    let mut tables = Sequential::new(queue, file, layout.offset(1));
    tables.append(&bytes_of(&layout.refcount_table())).await?;
    tables.skip_to(layout.offset(layout.blocks_start())).await?;
    for index in 0..layout.refcount_blocks {
        tables.append(&layout.refcount_block(index)).await?;
    }
    if layout.l2_tables > 0 {
        tables.append(&bytes_of(&layout.l1_table())).await?;
        tables.skip_to(layout.offset(layout.l2_start())).await?;
        for index in 0..layout.l2_tables {
            tables.append(&layout.l2_table(index)).await?;
        }
    }
    tables.finish().await?;
    // ORDER: every table before the header that points to them.
    file.flush(queue).await?;
    write_bytes(queue, file, 0, header).await?;
    // ORDER: the header before success is told.
    file.flush(queue).await?;
    Ok(())
}

/// Writes that follow one another, gathered into large ones.
struct Sequential<'a> {
    queue: &'a Queue,
    file: &'a dyn Storage,
    offset: u64,
    pending: Vec<u8>,
}

impl<'a> Sequential<'a> {
    fn new(queue: &'a Queue, file: &'a dyn Storage, offset: u64) -> Sequential<'a> {
        Sequential { queue, file, offset, pending: Vec::new() }
    }

    async fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() as u64 >= PIECE_SIZE { self.write_pending().await } else { Ok(()) }
    }

    /// Leaves what lies before `offset` as it is: zeros.
    async fn skip_to(&mut self, offset: u64) -> Result<()> {
        self.write_pending().await?;
        self.offset = offset;
        Ok(())
    }

    async fn write_pending(&mut self) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            write_bytes(self.queue, self.file, self.offset, &pending).await?;
            self.offset += pending.len() as u64;
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<()> {
        self.write_pending().await
    }
}

#[cfg(test)]
mod tests;
