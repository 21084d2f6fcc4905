//! Everything that an image tells about itself, without its data being read.
//!
//! Names are given as they stand in the image, and resolved as a reader would resolve them; nothing
//! is opened but the image itself. Formats that this program cannot write are told about as well,
//! as far as the header goes.

use stillpoint_format::qcow2::Header;
use stillpoint_format::qcow2::bitmap::{AUTO, IN_USE};
use stillpoint_format::qcow2::extension::Extension;
use stillpoint_format::qcow2::features::{
    AUTOCLEAR_DATA_FILE_RAW, COMPATIBLE_LAZY_REFCOUNTS, INCOMPATIBLE_CORRUPT,
    INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY,
};
use stillpoint_format::qcow2::header::{CompressionType, CryptMethod};
use stillpoint_format::qcow2::luks::LENGTH;
pub use stillpoint_format::qcow2::luks::{KeySlot, LuksHeader};
use stillpoint_io::{Error, Kind, Queue, Result, path_beside};

use super::entries::{read_bitmaps, read_snapshots};
use super::image::{Image, read_bytes};
use crate::options::ImageFormat;
use crate::qcow2::refused;

/// What an image tells about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// The name that it was opened by.
    pub name: String,
    /// Its format.
    pub format: ImageFormat,
    /// The size that a guest sees, in bytes.
    pub virtual_size: u64,
    /// The file's length in bytes.
    pub file_length: u64,
    /// The host's space that the file takes, in bytes, if the host tells.
    pub allocated_bytes: Option<u64>,
    /// What a qcow2 image tells beyond that.
    pub qcow2: Option<Qcow2Info>,
}

/// What a qcow2 image tells about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Info {
    /// 2 or 3.
    pub version: u32,
    /// The cluster size in bytes.
    pub cluster_size: u64,
    /// The backing file's name as it stands in the image.
    pub backing_name: Option<String>,
    /// The backing file's path as a reader finds it.
    pub backing_path: Option<String>,
    /// The backing file's format by name.
    pub backing_format: Option<String>,
    /// How the guest's bytes are encrypted.
    pub crypt_method: CryptMethod,
    /// What the LUKS header tells without a key.
    pub luks: Option<LuksHeader>,
    /// How compressed clusters are compressed.
    pub compression: CompressionType,
    /// Refcounts may lag behind while the image is open.
    pub lazy_refcounts: bool,
    /// The width of a refcount in bits.
    pub refcount_bits: u32,
    /// Extended L2 entries.
    pub extended_l2: bool,
    /// It was not closed.
    pub dirty: bool,
    /// It was found to be damaged.
    pub corrupt: bool,
    /// The external data file.
    pub data_file: Option<DataFile>,
    /// Internal snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// Persistent dirty bitmaps.
    pub bitmaps: Vec<BitmapInfo>,
}

/// An external data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its name as it stands in the image, if it does.
    pub name: Option<String>,
    /// It can be read as a raw image.
    pub raw: bool,
}

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Its unique id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The size of the VM's state in bytes.
    pub vm_state_size: u64,
    /// When it was taken: seconds since 1970.
    pub date_seconds: u32,
    /// And nanoseconds.
    pub date_nanoseconds: u32,
    /// How long the guest had run, in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// The guest's instruction count, if it was recorded.
    pub instruction_count: Option<u64>,
}

/// A persistent dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapInfo {
    /// Its name.
    pub name: String,
    /// The bytes of the disk that a bit stands for.
    pub granularity: u64,
    /// It is inconsistent: whoever had it open never stored it.
    pub in_use: bool,
    /// It records every write.
    pub auto: bool,
}

/// Tells about an opened image.
pub async fn info(queue: &Queue, image: &Image) -> Result<ImageInfo> {
    let qcow2 = match &image.header {
        Some(header) => Some(qcow2_info(queue, image, header).await?),
        None => None,
    };
    Ok(ImageInfo {
        name: image.file.name().to_owned(),
        format: image.format(),
        virtual_size: image.virtual_size(),
        file_length: image.file.end(),
        allocated_bytes: image.file.allocated_bytes(),
        qcow2,
    })
}

async fn read_luks_header(
    queue: &Queue,
    image: &Image,
    header: &Header,
) -> Result<Option<LuksHeader>> {
    let place = header.extensions.iter().find_map(|extension| match extension {
        Extension::Encryption { offset, .. } => Some(offset.0),
        _ => None,
    });
    let Some(offset) = place.filter(|_| header.crypt_method == CryptMethod::Luks) else {
        return Ok(None);
    };
    let file = &*image.file;
    if offset >= file.end() {
        let why = "it lies behind the end of the file";
        return Err(Error::new(Kind::Corrupt, "read the LUKS header", why)
            .file(file.name())
            .at(offset));
    }
    let bytes = read_bytes(queue, file, offset..offset + LENGTH as u64).await?;
    let luks = LuksHeader::decode(&bytes)
        .map_err(|error| refused(&error, "read the LUKS header", file.name(), offset))?;
    Ok(Some(luks))
}

async fn qcow2_info(queue: &Queue, image: &Image, header: &Header) -> Result<Qcow2Info> {
    let (snapshots, _) = read_snapshots(queue, &*image.file, header).await?;
    let bitmaps = read_bitmaps(queue, &*image.file, header).await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let snapshots = snapshots.iter().map(|snapshot| SnapshotInfo {
        id: text(&snapshot.id),
        name: text(&snapshot.name),
        vm_state_size: snapshot.vm_state_size,
        date_seconds: snapshot.date_seconds,
        date_nanoseconds: snapshot.date_nanoseconds,
        vm_clock_nanoseconds: snapshot.vm_clock_nanoseconds,
        instruction_count: snapshot.instruction_count.filter(|&count| count != u64::MAX),
    });
    let bitmaps = bitmaps.iter().map(|bitmap| BitmapInfo {
        name: text(&bitmap.name),
        granularity: 1 << bitmap.granularity_bits,
        in_use: bitmap.flags & IN_USE != 0,
        auto: bitmap.flags & AUTO != 0,
    });
    let data_file = header.has(INCOMPATIBLE_DATA_FILE).then(|| DataFile {
        name: header.data_file_name().map(str::to_owned),
        raw: header.autoclear & AUTOCLEAR_DATA_FILE_RAW != 0,
    });
    let backing_path =
        header.backing_name.as_ref().map(|name| path_beside(name, image.file.name()));
    Ok(Qcow2Info {
        version: header.version,
        cluster_size: header.geometry().cluster_size(),
        backing_name: header.backing_name.clone(),
        backing_path,
        backing_format: header.backing_format().map(str::to_owned),
        crypt_method: header.crypt_method,
        luks: read_luks_header(queue, image, header).await?,
        compression: header.compression_type,
        lazy_refcounts: header.compatible & COMPATIBLE_LAZY_REFCOUNTS != 0,
        refcount_bits: header.geometry().refcount_bits(),
        extended_l2: header.geometry().extended_l2,
        dirty: header.has(INCOMPATIBLE_DIRTY),
        corrupt: header.has(INCOMPATIBLE_CORRUPT),
        data_file,
        snapshots: snapshots.collect(),
        bitmaps: bitmaps.collect(),
    })
}
