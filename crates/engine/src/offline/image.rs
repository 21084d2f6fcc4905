//! An image opened for inspection: which format it is, its header, its backing chain, and its
//! tables in bulk.
//!
//! Names inside images are plain paths, relative to the image's folder, and never parsed as options
//! (F2). The chain ends at an image without a backing name; a cycle is refused by device and inode.

use std::ops::Range;
use std::sync::Arc;

use stillpoint_format::qcow2::Header;
use stillpoint_format::qcow2::header::{PROBE_LENGTH, is_qcow2, probe};
use stillpoint_io::{
    Access, Durability, Error, Files, GrowMeans, Kind, Manage, Queue, Result, Segments, Storage,
    Value,
};

pub use crate::chain::CHAIN_LENGTH_MAX;
use crate::options::ImageFormat;
use crate::qcow2::refused;

/// Tables are read in pieces of at most this many bytes.
pub(crate) const PIECE_SIZE: u64 = 1 << 20;

/// An image opened for inspection.
#[derive(Debug)]
pub struct Image {
    /// Its file.
    pub file: Arc<dyn Storage>,
    /// Its header, if it is a qcow2 image; none means raw.
    pub header: Option<Header>,
}

impl Image {
    /// Opens the image called `name`, whose format is probed unless it is given.
    pub async fn open(
        queue: &Queue,
        files: &dyn Files,
        name: &str,
        beside: Option<&str>,
        format: Option<ImageFormat>,
        access: Access,
    ) -> Result<Image> {
        let file = files.open(queue, name, beside, access).await?;
        let format = match format {
            Some(format) => format,
            None => probe_format(queue, &*file).await?,
        };
        let header = match format {
            ImageFormat::Raw => None,
            ImageFormat::Qcow2 => Some(read_header(queue, &*file, Header::decode).await?),
        };
        Ok(Image { file, header })
    }

    /// Its format.
    pub fn format(&self) -> ImageFormat {
        if self.header.is_some() { ImageFormat::Qcow2 } else { ImageFormat::Raw }
    }

    /// The size that a guest would see, in bytes.
    pub fn virtual_size(&self) -> u64 {
        match &self.header {
            Some(header) => header.size,
            // A raw disk is made of whole sectors.
            None => self.file.end().next_multiple_of(512),
        }
    }

    /// The backing file's name as it stands in the image, and its format.
    pub fn backing(&self) -> Result<Option<(&str, Option<ImageFormat>)>> {
        let Some(header) = &self.header else { return Ok(None) };
        let Some(name) = header.backing_name.as_deref() else { return Ok(None) };
        let format = header.backing_format().map(format_by_name);
        Ok(Some((name, format.transpose()?)))
    }

    /// Opens the image and everything that it stands on, the active image first.
    pub async fn open_chain(
        queue: &Queue,
        files: &dyn Files,
        name: &str,
        format: Option<ImageFormat>,
        access: Access,
    ) -> Result<Vec<Image>> {
        let mut chain = vec![Image::open(queue, files, name, None, format, access).await?];
        loop {
            let top = chain.last().expect("a chain has at least one image");
            let Some((name, format)) = top.backing()? else { return Ok(chain) };
            let beside = Some(top.file.name());
            let next = Image::open(queue, files, name, beside, format, access).await?;
            let id = next.file.facts().id;
            if chain.iter().any(|image| image.file.facts().id == id) {
                let why = format!("it stands on itself through {}", next.file.name());
                return Err(Error::new(Kind::Corrupt, "open the backing chain", why)
                    .file(chain[0].file.name())
                    .remedy("give one of the images another backing file"));
            }
            if chain.len() == CHAIN_LENGTH_MAX {
                let why = format!("there are more than {CHAIN_LENGTH_MAX} images in the chain");
                return Err(Error::new(Kind::Limit, "open the backing chain", why)
                    .file(chain[0].file.name()));
            }
            chain.push(next);
        }
    }

    /// Opens the external data file, if the image has one.
    pub async fn open_data_file(
        &self,
        queue: &Queue,
        files: &dyn Files,
        access: Access,
    ) -> Result<Option<Arc<dyn Storage>>> {
        use stillpoint_format::qcow2::features::INCOMPATIBLE_DATA_FILE;
        let Some(header) = &self.header else { return Ok(None) };
        if !header.has(INCOMPATIBLE_DATA_FILE) {
            return Ok(None);
        }
        let Some(name) = header.data_file_name() else {
            return Err(Error::new(
                Kind::Invalid,
                "open the data file",
                "the image has an external data file, but does not name it",
            )
            .file(self.file.name()));
        };
        Ok(Some(files.open(queue, name, Some(self.file.name()), access).await?))
    }
}

/// A format by the name that users and images call it by.
pub fn format_by_name(name: &str) -> Result<ImageFormat> {
    match name {
        "raw" => Ok(ImageFormat::Raw),
        "qcow2" => Ok(ImageFormat::Qcow2),
        _ => {
            let why = format!("Unknown driver '{}'", name.escape_debug());
            Err(Error::new(Kind::Unsupported, "open the image", why))
        }
    }
}

/// The format that a file's first bytes tell: raw, unless they are another format's.
pub async fn probe_format(queue: &Queue, file: &dyn Storage) -> Result<ImageFormat> {
    let start = read_bytes(queue, file, 0..PROBE_LENGTH as u64).await?;
    Ok(if is_qcow2(&start) { ImageFormat::Qcow2 } else { ImageFormat::Raw })
}

/// Reads the header by `decode`, and refuses what it asks for and this program does not do (F1).
pub(crate) async fn read_header(
    queue: &Queue,
    file: &dyn Storage,
    decode: fn(&[u8], Option<u64>) -> stillpoint_format::Result<Header>,
) -> Result<Header> {
    const OP: &str = "open the image";
    let start = read_bytes(queue, file, 0..PROBE_LENGTH as u64).await?;
    if !is_qcow2(&start) {
        let error = Error::new(Kind::Invalid, OP, "Image is not in qcow2 format");
        return Err(error.file(file.name()));
    }
    let probe = probe(&start).map_err(|error| refused(&error, OP, file.name(), 0))?;
    let cluster = read_bytes(queue, file, 0..probe.cluster_size).await?;
    let header =
        decode(&cluster, Some(file.end())).map_err(|error| refused(&error, OP, file.name(), 0))?;
    let unknown = header.unknown_incompatible();
    if unknown.is_empty() {
        return Ok(header);
    }
    let why = format!("Unsupported qcow2 feature(s): {}", unknown.join(", "));
    Err(Error::new(Kind::Unsupported, OP, why).file(file.name()))
}

/// The smallest range of whole units of `align` bytes around `range`.
fn around(range: &Range<u64>, align: u64) -> Range<u64> {
    range.start / align * align..range.end.next_multiple_of(align)
}

/// Reads bytes of any alignment; those beyond the end of the file are zeros.
pub(crate) async fn read_bytes(
    queue: &Queue,
    file: &dyn Storage,
    range: Range<u64>,
) -> Result<Vec<u8>> {
    let aligned = around(&range, file.facts().request_align.into());
    let segments = Segments::alloc((aligned.end - aligned.start) as usize);
    file.read(queue, aligned.start, segments.clone()).await?;
    let start = (range.start - aligned.start) as usize;
    Ok(segments.slice(start..start + (range.end - range.start) as usize).to_vec())
}

/// Writes bytes of any alignment that end below the end of the file.
pub(crate) async fn write_bytes(
    queue: &Queue,
    file: &dyn Storage,
    offset: u64,
    bytes: &[u8],
) -> Result<()> {
    let range = offset..offset + bytes.len() as u64;
    let aligned = around(&range, file.facts().request_align.into());
    if aligned.end > file.end() {
        // Direct I/O writes whole blocks, the file's last one too; R3 asks for its end first.
        let grow = Manage::Grow { end: aligned.end, means: GrowMeans::Truncate };
        file.manage(queue, grow).await?;
    }
    let segments = if aligned == range {
        Segments::from_slice(bytes)
    } else {
        let segments = Segments::alloc((aligned.end - aligned.start) as usize);
        file.read(queue, aligned.start, segments.clone()).await?;
        let start = (range.start - aligned.start) as usize;
        segments.slice(start..start + bytes.len()).copy_from(bytes);
        segments
    };
    file.write(queue, aligned.start, segments, Durability::Volatile).await?;
    Ok(())
}

/// The words of a table's bytes, in native order.
pub(crate) fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word))
}

/// The bytes of a table's words.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Reads a long table in pieces and hands each piece, with its place in the table, to `visit`.
/// Holes are not read: their words are all zero, and a table that is mostly hole costs nothing.
pub(crate) async fn visit_table(
    queue: &Queue,
    file: &dyn Storage,
    range: Range<u64>,
    mut visit: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let end = range.end.min(file.end());
    let mut offset = range.start;
    while offset < end {
        let Value::Extent(extent) = file.status(queue, offset, end - offset).await? else {
            unreachable!("a status completes with an extent");
        };
        if !extent.data && extent.length >= 8 {
            offset += extent.length / 8 * 8;
            continue;
        }
        // A word that begins in a hole and ends in data is read as one.
        let length = if extent.data { extent.length.next_multiple_of(8) } else { 8 };
        let length = length.min(PIECE_SIZE).min(range.end - offset);
        let bytes = read_bytes(queue, file, offset..offset + length).await?;
        visit(offset - range.start, &bytes)?;
        offset += length;
    }
    Ok(())
}

/// Reads a whole table of at most a few megabytes as words.
pub(crate) async fn read_words(
    queue: &Queue,
    file: &dyn Storage,
    offset: u64,
    count: u64,
) -> Result<Vec<u64>> {
    let bytes = read_bytes(queue, file, offset..offset + count * 8).await?;
    Ok(words(&bytes).collect())
}
