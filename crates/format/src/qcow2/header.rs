//! The header: the beginning of the first cluster.
//!
//! ```text
//!    0 magic "QFI\xfb"          4 version            8 backing name's offset   16 and its length
//!   20 cluster_bits            24 disk size         32 encryption method
//!   36 L1 entries              40 L1 offset         48 refcount table's offset
//!   56 refcount table clusters 60 snapshots         64 snapshot table's offset
//!  -- version 2 ends here, at 72 --
//!   72 incompatible features   80 compatible        88 autoclear
//!   96 refcount_order         100 header length    104 compression type (header length > 104)
//!  -- unknown fields up to the header length, extensions, backing name --
//! ```
//!
//! [`Header::decode`] refuses whatever breaks a rule or a bound, so that a decoded header can make
//! nobody use more than bounded memory (F2). What it lets through and the caller must still look
//! at: [`Header::unknown_incompatible`], the dirty and corrupt bits, the encryption method, and
//! whether the names are allowed to be opened.

use super::HOST_END_MAX;
use super::extension::{
    BITMAP_COUNT_MAX, BITMAP_DIRECTORY_SIZE_MAX, Bitmaps, Extension, FILE_NAME_LENGTH_MAX,
};
pub use super::features::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_DATA_FILE_RAW, AUTOCLEAR_KNOWN, COMPATIBLE_LAZY_REFCOUNTS,
    INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY,
    INCOMPATIBLE_EXTENDED_L2, INCOMPATIBLE_KNOWN,
};
use super::features::{FeatureKind, FeatureName};
use super::geometry::Geometry;
use crate::addr::HostOffset;
use crate::error::{Error, Result};
use crate::wire::{Fields, put, require};

const STRUCTURE: &str = "qcow2 header";

/// The first four bytes of every qcow2 image.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// The bytes that [`probe`] needs to see.
pub const PROBE_LENGTH: usize = 104;
/// The length of a version 2 header in bytes.
const LENGTH_V2: u32 = 72;
/// The shortest length of a version 3 header in bytes.
const LENGTH_V3: u32 = 104;

/// The allowed cluster sizes, as binary logarithms.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// The smallest cluster size with extended L2 entries, as a binary logarithm.
pub const EXTENDED_L2_CLUSTER_BITS_MIN: u32 = 14;
/// The widest refcounts, 64 bits, as a binary logarithm.
pub const REFCOUNT_ORDER_MAX: u32 = 6;
/// The longest L1 table in bytes.
pub const L1_SIZE_MAX: u64 = 32 << 20;
/// The longest refcount table in bytes.
pub const REFCOUNT_TABLE_SIZE_MAX: u64 = 8 << 20;
/// The most internal snapshots.
pub const SNAPSHOT_COUNT_MAX: u32 = 65536;

/// How the guest's bytes are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CryptMethod {
    /// Not at all.
    None,
    /// The old AES scheme.
    Aes,
    /// LUKS.
    Luks,
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressionType {
    /// Raw deflate.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// A decoded header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The backing file's name, as it stands in the image.
    pub backing_name: Option<String>,
    /// The cluster size's binary logarithm.
    pub cluster_bits: u32,
    /// The disk's size in bytes.
    pub size: u64,
    /// How the guest's bytes are encrypted.
    pub crypt_method: CryptMethod,
    /// The entries of the L1 table.
    pub l1_entry_count: u32,
    /// Where the L1 table begins.
    pub l1_table_offset: HostOffset,
    /// Where the refcount table begins.
    pub refcount_table_offset: HostOffset,
    /// The refcount table's length in clusters.
    pub refcount_table_clusters: u32,
    /// The internal snapshots.
    pub snapshot_count: u32,
    /// Where the snapshot table begins.
    pub snapshot_table_offset: HostOffset,
    /// Feature bits that forbid opening to whoever does not know them.
    pub incompatible: u64,
    /// Feature bits that may be ignored.
    pub compatible: u64,
    /// Feature bits that a writer who does not know them clears.
    pub autoclear: u64,
    /// The binary logarithm of a refcount's width in bits.
    pub refcount_order: u32,
    /// How compressed clusters are compressed.
    pub compression_type: CompressionType,
    /// The bytes from 105 to the header's length: padding, and fields of later specifications.
    pub unknown_fields: Vec<u8>,
    /// The extensions, in their order.
    pub extensions: Vec<Extension>,
}

/// What the first bytes tell about an image, before its first cluster is read whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// 2 or 3.
    pub version: u32,
    /// How many bytes [`Header::decode`] wants: the first cluster.
    pub cluster_size: u64,
}

/// Whether bytes begin like a qcow2 image's, of whatever version.
pub fn is_qcow2(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// What the first [`PROBE_LENGTH`] bytes (72 are enough for version 2) tell.
pub fn probe(bytes: &[u8]) -> Result<Probe> {
    let fields = Fields::new(STRUCTURE, bytes, LENGTH_V2.into())?;
    require(is_qcow2(bytes), STRUCTURE, 0, "the magic must be \"QFI\\xfb\"", fields.u32(0).into())?;
    let (version, cluster_bits) = (fields.u32(4), fields.u32(20));
    if !(2..=3).contains(&version) {
        let what = format!("version {version}");
        return Err(Error::Unsupported { structure: STRUCTURE, at: 4, what });
    }
    require(
        CLUSTER_BITS.contains(&cluster_bits),
        STRUCTURE,
        20,
        "the cluster size must be 512 bytes to 2 MiB",
        cluster_bits.into(),
    )?;
    Ok(Probe { version, cluster_size: 1 << cluster_bits })
}

/// Refuses a table whose place is not a cluster's or whose end lies beyond all offsets.
fn require_place(at: usize, offset: u64, length: u64, cluster_size: u64) -> Result<()> {
    let aligned = offset.is_multiple_of(cluster_size);
    require(aligned, STRUCTURE, at, "the offset must be a multiple of the cluster size", offset)?;
    let below = offset.checked_add(length).is_some_and(|end| end <= HOST_END_MAX);
    require(below, STRUCTURE, at, "the table must end below 2^56", offset)?;
    let outside = length == 0 || offset != 0;
    require(outside, STRUCTURE, at, "the table must not lie on the header", offset)
}

impl Header {
    /// Decodes the first cluster of an image whose file is `file_length` bytes long, if that is
    /// known: then the tables must lie inside it.
    pub fn decode(cluster: &[u8], file_length: Option<u64>) -> Result<Header> {
        let header = Header::decode_for_repair(cluster)?;
        let rule = "an image needs a refcount table";
        require(header.refcount_table_clusters > 0, STRUCTURE, 56, rule, 0)?;
        if let Some(length) = file_length {
            header.require_inside(length)?;
        }
        Ok(header)
    }

    /// Decodes the first cluster of an image that may be damaged: its refcount table may be missing,
    /// and its tables may lie beyond the end of the file.
    pub fn decode_for_repair(cluster: &[u8]) -> Result<Header> {
        let Probe { version, cluster_size } = probe(cluster)?;
        let fields = Fields::new(STRUCTURE, cluster, cluster_size)?;
        let mut header = Header {
            version,
            backing_name: None,
            cluster_bits: cluster_size.trailing_zeros(),
            size: fields.u64(24),
            crypt_method: decode_crypt_method(fields.u32(32))?,
            l1_entry_count: fields.u32(36),
            l1_table_offset: HostOffset(fields.u64(40)),
            refcount_table_offset: HostOffset(fields.u64(48)),
            refcount_table_clusters: fields.u32(56),
            snapshot_count: fields.u32(60),
            snapshot_table_offset: HostOffset(fields.u64(64)),
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            compression_type: CompressionType::Zlib,
            unknown_fields: Vec::new(),
            extensions: Vec::new(),
        };
        let mut length = LENGTH_V2;
        if version == 3 {
            length = fields.u32(100);
            let rule = "the header length must be a multiple of 8 from 104 up to the cluster size";
            let obeys = (u64::from(LENGTH_V3)..=cluster_size).contains(&length.into())
                && length.is_multiple_of(8);
            require(obeys, STRUCTURE, 100, rule, length.into())?;
            header.incompatible = fields.u64(72);
            header.compatible = fields.u64(80);
            header.autoclear = fields.u64(88);
            header.refcount_order = fields.u32(96);
            if length > LENGTH_V3 {
                header.compression_type = decode_compression_type(cluster[104])?;
                header.unknown_fields = fields.slice(105, length as usize - 105)?.to_vec();
            }
        }
        let name = backing_name_range(&fields, length, cluster_size)?;
        header.backing_name = name.clone().map(|range| decode_name(&cluster[range])).transpose()?;
        let extensions_end = name.map_or(cluster_size as usize, |range| range.start);
        header.extensions = Extension::decode_list(&cluster[..extensions_end], length as usize)?;
        header.require_bounds()?;
        Ok(header)
    }

    /// Every rule that concerns more than the reading of one field.
    fn require_bounds(&self) -> Result<()> {
        let order = self.refcount_order;
        let rule = "refcounts have at most 64 bits (order 6)";
        require(order <= REFCOUNT_ORDER_MAX, STRUCTURE, 96, rule, order.into())?;
        let small =
            self.has(INCOMPATIBLE_EXTENDED_L2) && self.cluster_bits < EXTENDED_L2_CLUSTER_BITS_MIN;
        let rule = "extended L2 entries need clusters of at least 16 KiB";
        require(!small, STRUCTURE, 72, rule, self.incompatible)?;
        let zlib = self.compression_type == CompressionType::Zlib;
        let rule = "the compression bit must be set exactly if the type is not zlib";
        let agrees = self.has(INCOMPATIBLE_COMPRESSION) != zlib;
        require(agrees, STRUCTURE, 72, rule, self.incompatible)?;
        let raw_without =
            self.autoclear & AUTOCLEAR_DATA_FILE_RAW != 0 && !self.has(INCOMPATIBLE_DATA_FILE);
        let rule = "raw external data needs an external data file";
        require(!raw_without, STRUCTURE, 88, rule, self.autoclear)?;
        require(self.size < 1 << 63, STRUCTURE, 24, "the size must be below 2^63", self.size)?;

        let geometry = self.geometry();
        let cluster_size = geometry.cluster_size();
        let l1_size = u64::from(self.l1_entry_count) * 8;
        require(l1_size <= L1_SIZE_MAX, STRUCTURE, 36, "an L1 table has at most 32 MiB", l1_size)?;
        let enough = geometry.l1_entries_for(self.size) <= self.l1_entry_count.into();
        let rule = "the L1 table is too small for the disk's size";
        require(enough, STRUCTURE, 36, rule, self.l1_entry_count.into())?;
        require_place(40, self.l1_table_offset.0, l1_size, cluster_size)?;

        let table_size = u64::from(self.refcount_table_clusters) * cluster_size;
        let rule = "a refcount table has at most 8 MiB";
        let bounded = table_size <= REFCOUNT_TABLE_SIZE_MAX;
        require(bounded, STRUCTURE, 56, rule, self.refcount_table_clusters.into())?;
        require_place(48, self.refcount_table_offset.0, table_size, cluster_size)?;

        let count = self.snapshot_count;
        let rule = "an image has at most 65536 snapshots";
        require(count <= SNAPSHOT_COUNT_MAX, STRUCTURE, 60, rule, count.into())?;
        // A snapshot takes 40 bytes at least; how many it really takes, only its table tells.
        require_place(64, self.snapshot_table_offset.0, u64::from(count) * 40, cluster_size)?;

        match self.bitmaps() {
            Some(bitmaps) => require_bitmaps(bitmaps, cluster_size),
            None => Ok(()),
        }
    }

    fn require_inside(&self, file_length: u64) -> Result<()> {
        let geometry = self.geometry();
        let end = geometry.round_up(file_length.min(HOST_END_MAX));
        let l1_end = self.l1_table_offset.0 + u64::from(self.l1_entry_count) * 8;
        let refcount_table_end = self.refcount_table_offset.0
            + u64::from(self.refcount_table_clusters) * geometry.cluster_size();
        let snapshots_end = self.snapshot_table_offset.0 + u64::from(self.snapshot_count) * 40;
        for (at, count, table_end) in [
            (40, self.l1_entry_count, l1_end),
            (48, self.refcount_table_clusters, refcount_table_end),
            (64, self.snapshot_count, snapshots_end),
        ] {
            let inside = count == 0 || table_end <= end;
            require(inside, STRUCTURE, at, "the table must lie inside the file", table_end)?;
        }
        Ok(())
    }

    /// The header's bytes, up to and with the backing name, zero-padded to whole sectors of 512
    /// bytes. What follows them in the first cluster has no meaning.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.length() as usize];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 4, &self.version.to_be_bytes());
        put(&mut bytes, 20, &self.cluster_bits.to_be_bytes());
        put(&mut bytes, 24, &self.size.to_be_bytes());
        put(&mut bytes, 32, &encode_crypt_method(self.crypt_method).to_be_bytes());
        put(&mut bytes, 36, &self.l1_entry_count.to_be_bytes());
        put(&mut bytes, 40, &self.l1_table_offset.0.to_be_bytes());
        put(&mut bytes, 48, &self.refcount_table_offset.0.to_be_bytes());
        put(&mut bytes, 56, &self.refcount_table_clusters.to_be_bytes());
        put(&mut bytes, 60, &self.snapshot_count.to_be_bytes());
        put(&mut bytes, 64, &self.snapshot_table_offset.0.to_be_bytes());
        if self.version == 3 {
            put(&mut bytes, 72, &self.incompatible.to_be_bytes());
            put(&mut bytes, 80, &self.compatible.to_be_bytes());
            put(&mut bytes, 88, &self.autoclear.to_be_bytes());
            put(&mut bytes, 96, &self.refcount_order.to_be_bytes());
            put(&mut bytes, 100, &self.length().to_be_bytes());
            if self.length() > LENGTH_V3 {
                bytes[104] = encode_compression_type(self.compression_type);
                put(&mut bytes, 105, &self.unknown_fields);
            }
        }
        Extension::encode_list(&self.extensions, &mut bytes);
        if let Some(name) = &self.backing_name {
            let offset = bytes.len() as u64;
            put(&mut bytes, 8, &offset.to_be_bytes());
            put(&mut bytes, 16, &(name.len() as u32).to_be_bytes());
            bytes.extend(name.as_bytes());
        }
        let room = 1 << self.cluster_bits;
        if bytes.len() as u64 > room {
            let needed = bytes.len() as u64;
            return Err(Error::NoRoom { structure: STRUCTURE, needed, room });
        }
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        // What was just made obeys every rule that a reader will hold it to.
        let mut cluster = bytes.clone();
        cluster.resize(room as usize, 0);
        Header::decode_for_repair(&cluster)?;
        Ok(bytes)
    }

    /// The length of the fields in bytes, as the header states it.
    pub fn length(&self) -> u32 {
        match (self.version, self.unknown_fields.len(), self.compression_type) {
            (2, ..) => LENGTH_V2,
            (_, 0, CompressionType::Zlib) => LENGTH_V3,
            (_, unknown, _) => (105 + unknown as u32).next_multiple_of(8),
        }
    }

    /// The sizes that follow from the header.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_bits,
            extended_l2: self.has(INCOMPATIBLE_EXTENDED_L2),
            refcount_order: self.refcount_order,
        }
    }

    /// Whether an incompatible feature bit is set.
    pub fn has(&self, incompatible: u64) -> bool {
        self.incompatible & incompatible != 0
    }

    /// The incompatible features that this program does not know, by their names in the feature
    /// name table, or by number. An image with any of them must not be opened (F1).
    pub fn unknown_incompatible(&self) -> Vec<String> {
        let unknown = self.incompatible & !INCOMPATIBLE_KNOWN;
        let names = self.feature_names();
        let name = |bit: u32| {
            let known = |name: &&FeatureName| {
                name.kind == FeatureKind::Incompatible && u32::from(name.bit) == bit
            };
            match names.iter().find(known) {
                Some(name) => name.name().escape_debug().to_string(),
                None => format!("Unknown incompatible feature: {:x}", 1u64 << bit),
            }
        };
        (0..64).filter(|bit| unknown >> bit & 1 != 0).map(name).collect()
    }

    /// The feature name table.
    pub fn feature_names(&self) -> &[FeatureName] {
        let names = self.extensions.iter().find_map(|extension| match extension {
            Extension::FeatureNames(names) => Some(&names[..]),
            _ => None,
        });
        names.unwrap_or_default()
    }

    /// The backing file's format, as it stands in the image.
    pub fn backing_format(&self) -> Option<&str> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::BackingFormat(name) => Some(&name[..]),
            _ => None,
        })
    }

    /// The external data file's name, as it stands in the image.
    pub fn data_file_name(&self) -> Option<&str> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::DataFile(name) => Some(&name[..]),
            _ => None,
        })
    }

    /// Where the bitmaps are, if they are consistent with the image.
    pub fn bitmaps(&self) -> Option<Bitmaps> {
        let consistent = self.autoclear & AUTOCLEAR_BITMAPS != 0;
        self.extensions.iter().find_map(|extension| match extension {
            Extension::Bitmaps(bitmaps) if consistent => Some(*bitmaps),
            _ => None,
        })
    }
}

fn decode_crypt_method(value: u32) -> Result<CryptMethod> {
    match value {
        0 => Ok(CryptMethod::None),
        1 => Ok(CryptMethod::Aes),
        2 => Ok(CryptMethod::Luks),
        other => {
            let what = format!("encryption method {other}");
            Err(Error::Unsupported { structure: STRUCTURE, at: 32, what })
        }
    }
}

fn encode_crypt_method(method: CryptMethod) -> u32 {
    match method {
        CryptMethod::None => 0,
        CryptMethod::Aes => 1,
        CryptMethod::Luks => 2,
    }
}

fn decode_compression_type(value: u8) -> Result<CompressionType> {
    match value {
        0 => Ok(CompressionType::Zlib),
        1 => Ok(CompressionType::Zstd),
        other => {
            let what = format!("compression type {other}");
            Err(Error::Unsupported { structure: STRUCTURE, at: 104, what })
        }
    }
}

fn encode_compression_type(compression: CompressionType) -> u8 {
    match compression {
        CompressionType::Zlib => 0,
        CompressionType::Zstd => 1,
    }
}

/// Where the backing name lies, if there is one.
fn backing_name_range(
    fields: &Fields,
    header_length: u32,
    cluster_size: u64,
) -> Result<Option<std::ops::Range<usize>>> {
    let (offset, length) = (fields.u64(8), u64::from(fields.u32(16)));
    if offset == 0 {
        return Ok(None);
    }
    let rule = "a file name has at most 1023 bytes";
    require(length <= FILE_NAME_LENGTH_MAX, STRUCTURE, 16, rule, length)?;
    let inside = offset >= header_length.into()
        && offset.checked_add(length).is_some_and(|end| end <= cluster_size);
    let rule = "the backing name must lie between the header's fields and the first cluster's end";
    require(inside, STRUCTURE, 8, rule, offset)?;
    if length == 0 {
        return Ok(None);
    }
    Ok(Some(offset as usize..(offset + length) as usize))
}

fn decode_name(bytes: &[u8]) -> Result<String> {
    require(!bytes.contains(&0), STRUCTURE, 8, "a name must not contain NUL", 0)?;
    String::from_utf8(bytes.to_vec()).map_err(|_| Error::Unsupported {
        structure: STRUCTURE,
        at: 8,
        what: "a backing name that is not UTF-8".to_owned(),
    })
}

fn require_bitmaps(bitmaps: Bitmaps, cluster_size: u64) -> Result<()> {
    const STRUCTURE: &str = "bitmaps extension";
    let Bitmaps { count, directory_size, directory_offset } = bitmaps;
    let rule = "an image with bitmaps has 1 to 65535 of them";
    require((1..=BITMAP_COUNT_MAX).contains(&count), STRUCTURE, 0, rule, count.into())?;
    let rule = "a bitmap directory has 24 bytes for each bitmap and at most 1024";
    let bounded =
        directory_size <= BITMAP_DIRECTORY_SIZE_MAX && directory_size >= u64::from(count) * 24;
    require(bounded, STRUCTURE, 8, rule, directory_size)?;
    let offset = directory_offset.0;
    let rule = "the directory must lie on clusters of its own below 2^56";
    let placed = offset != 0
        && offset.is_multiple_of(cluster_size)
        && offset.checked_add(directory_size).is_some_and(|end| end <= HOST_END_MAX);
    require(placed, STRUCTURE, 16, rule, offset)
}

#[cfg(test)]
mod tests;
