//! Opening an image and its backing chain: what is understood, and what is refused by name (F1, F2).
//!
//! Names inside images are plain paths. They are never parsed as options or addresses, and which of
//! them may be opened is decided by whoever implements [`Files`]. The chain's depth is bounded, and a
//! file that is met twice, by device and inode, is a cycle. Opening reads the header's cluster, the L1
//! table and the refcount table of each image, whatever its size (F3).

use futures_util::future::LocalBoxFuture;
use stillpoint_format::qcow2::bitmap::{self, Bitmap};
use stillpoint_format::qcow2::header::{
    self, AUTOCLEAR_BITMAPS, AUTOCLEAR_DATA_FILE_RAW, CryptMethod, Header, INCOMPATIBLE_CORRUPT,
    INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY,
};
use stillpoint_format::qcow2::refcount;
use stillpoint_io::{
    Access, Background, Error, FileId, Files, GrowMeans, Kind, Manage, Queue, Result, Segments,
    Storage,
};

use crate::cache::{SLICE_BYTES, SliceCache};
use crate::chain::{CHAIN_LENGTH_MAX, Layer};
use crate::options::{AllocPolicy, ImageFormat, Options};
use crate::qcow2::allocate::Allocator;
use crate::qcow2::commit::Committer;
use crate::qcow2::mapping::Codec;
use crate::qcow2::refcounts::Refcounts;
use crate::qcow2::tables::{L1, word_at};
use crate::qcow2::{Policy, Qcow2, Writer, refused};
use crate::raw::Raw;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::tracker::Tracker;

/// Byte offset of the autoclear bits in the header.
const HEADER_AUTOCLEAR: u64 = 88;

/// What opening needs, and what it has met so far.
pub(crate) struct Opening<'a> {
    pub(crate) queue: &'a Queue,
    pub(crate) files: &'a dyn Files,
    pub(crate) background: &'a Arc<dyn Background>,
    pub(crate) tracker: &'a Arc<Tracker>,
    pub(crate) options: &'a Options,
    pub(crate) met: Vec<FileId>,
}

impl Opening<'_> {
    /// Opens the active image.
    pub(crate) async fn active(&mut self, name: &str) -> Result<Layer> {
        self.layer(name, None, self.options.format, self.options.access, u64::MAX).await
    }

    /// Opens one image and those behind it. The layers above send requests of no less than `unit`
    /// bytes, where direct I/O must be able to follow.
    fn layer<'a>(
        &'a mut self,
        name: &'a str,
        beside: Option<&'a str>,
        format: Option<ImageFormat>,
        access: Access,
        unit: u64,
    ) -> LocalBoxFuture<'a, Result<Layer>> {
        Box::pin(async move {
            let file = self.files.open(self.queue, name, beside, access).await?;
            let id = file.facts().id;
            if self.met.contains(&id) {
                let why = "the backing chain comes back to this file";
                return Err(Error::new(Kind::Corrupt, "open the backing chain", why).file(name));
            }
            if self.met.len() == CHAIN_LENGTH_MAX {
                let why = format!("the backing chain is longer than {CHAIN_LENGTH_MAX} images");
                return Err(Error::new(Kind::Limit, "open the backing chain", why).file(name));
            }
            self.met.push(id);
            let file = if unit < u64::from(file.facts().request_align) {
                through_page_cache(file, "the image before it has smaller clusters")?
            } else {
                file
            };
            let start = self.read(&*file, 0, header::PROBE_LENGTH as u64).await?;
            let format = match format {
                Some(format) => format,
                None => self.probe(&start, name, beside.is_some(), access)?,
            };
            match format {
                ImageFormat::Raw => Ok(Layer::Raw(self.raw(file, access)?)),
                ImageFormat::Qcow2 => {
                    Ok(Layer::Qcow2(self.qcow2(file, &start, access, unit).await?))
                }
            }
        })
    }

    /// Guesses a format; never raw for writing, since a guest that writes a header into its disk
    /// would choose the format of the next opening (F2).
    fn probe(
        &self,
        start: &[u8],
        name: &str,
        is_backing: bool,
        access: Access,
    ) -> Result<ImageFormat> {
        if header::is_qcow2(start) {
            if is_backing {
                tracing::warn!(
                    name,
                    "the image does not say its backing file's format; taken for qcow2"
                );
            }
            return Ok(ImageFormat::Qcow2);
        }
        if access == Access::Write && !self.options.allow_probed_raw {
            let why = "no known image header; it is not taken for a raw disk unasked";
            return Err(Error::new(Kind::Invalid, "tell the image's format", why)
                .file(name)
                .remedy("say `-f raw` if it is a raw disk"));
        }
        tracing::warn!(name, "no known image header; taken for a raw disk");
        Ok(ImageFormat::Raw)
    }

    fn raw(&self, file: Arc<dyn Storage>, access: Access) -> Result<Raw> {
        let align = u64::from(file.facts().request_align);
        if access == Access::Write && !file.end().is_multiple_of(align) {
            let why = format!("its size is no multiple of {align}, the unit of direct I/O here");
            return Ok(Raw::new(through_page_cache(file, &why)?));
        }
        Ok(Raw::new(file))
    }

    async fn read(&self, file: &dyn Storage, offset: u64, length: u64) -> Result<Vec<u8>> {
        let align = u64::from(file.facts().request_align);
        let start = offset / align * align;
        let end = (offset + length).next_multiple_of(align);
        let bytes = Segments::alloc((end - start) as usize);
        file.read(self.queue, start, bytes.clone()).await?;
        let from = (offset - start) as usize;
        Ok(bytes.slice(from..from + length as usize).to_vec())
    }

    async fn qcow2(
        &mut self,
        file: Arc<dyn Storage>,
        start: &[u8],
        access: Access,
        unit: u64,
    ) -> Result<Arc<Qcow2>> {
        let not_understood =
            |error: stillpoint_format::Error| refused(&error, "open the image", file.name(), 0);
        let probe = header::probe(start).map_err(not_understood)?;
        let first = self.read(&*file, 0, probe.cluster_size).await?;
        let header = Header::decode(&first, Some(file.end())).map_err(not_understood)?;
        refuse_what_is_missing(&header, file.name(), access)?;
        let geometry = header.geometry();
        let unit = unit.min(geometry.subcluster_size());
        let file = if unit < u64::from(file.facts().request_align) {
            through_page_cache(file, "its clusters are smaller than the unit of direct I/O here")?
        } else {
            file
        };

        let backing = match &header.backing_name {
            Some(backing) if !self.options.without_backing => {
                Some(Arc::new(self.backing(file.name(), backing, &header, unit).await?))
            }
            _ => None,
        };
        let codec = Codec { geometry, version3: header.version >= 3 };
        let l1_offset = header.l1_table_offset.0;
        let l1_length = u64::from(header.l1_entry_count) * 8;
        let l1 = match l1_length {
            0 => Vec::new(),
            _ => self.read(&*file, l1_offset, l1_length).await?,
        };
        let l1 = L1::new(l1_offset, (0..l1.len() / 8).map(|index| word_at(&l1, index)));
        let slice_bytes = SLICE_BYTES.min(geometry.cluster_size());
        let slices = l1.len() * (geometry.cluster_size() / slice_bytes);
        let writer = match access {
            Access::Write => Some(self.writer(&header, &file).await?),
            Access::Read | Access::ReadUnlocked => None,
        };
        let policy = Policy {
            alloc: usable_allocation(self.options.alloc, &*file),
            discard: self.options.discard,
            grow: usable_growth(self.options.grow.unwrap_or(file.facts().growth), &*file),
        };
        let cache_bytes = self.options.l2_cache_size;
        let image = Arc::new_cyclic(|me| Qcow2 {
            codec,
            size: AtomicU64::new(header.size),
            header,
            file,
            backing,
            policy,
            l1,
            l2: Arc::new(SliceCache::new(slice_bytes, slices, cache_bytes)),
            writer: writer.map(|(refcounts, end)| Writer {
                refcounts,
                allocator: Allocator::new(end),
                committer: Committer::default(),
                releases: Arc::default(),
                me: me.clone(),
                tracker: self.tracker.clone(),
                background: self.background.clone(),
                writes: AtomicU64::new(0),
                table_clusters: Default::default(),
                claim_told: AtomicBool::new(false),
                commit_wanted: AtomicBool::new(false),
            }),
        });
        if image.writer.is_some() {
            self.prepare_for_writing(&image).await?;
        }
        Ok(image)
    }

    async fn backing(
        &mut self,
        beside: &str,
        name: &str,
        header: &Header,
        unit: u64,
    ) -> Result<Layer> {
        let is_address =
            name.starts_with("json:") || name.contains("://") || name.starts_with("nbd:");
        if is_address {
            let why = format!("the backing file's name {name:?} is an address or options");
            return Err(Error::new(Kind::Unsupported, "open the backing file", why)
                .file(beside)
                .remedy("names inside images are plain paths here: rebase the image to a path"));
        }
        let format = match header.backing_format() {
            None => None,
            Some("raw") => Some(ImageFormat::Raw),
            Some("qcow2") => Some(ImageFormat::Qcow2),
            Some(other) => {
                let why = format!("its backing file is of format {other:?}");
                return Err(
                    Error::new(Kind::Unsupported, "open the backing file", why).file(beside)
                );
            }
        };
        self.layer(name, Some(beside), format, Access::Read, unit)
            .await
            .map_err(|error| error.file(name))
    }

    /// The refcount table, and the file's length in clusters: whole ones from here on.
    async fn writer(&self, header: &Header, file: &Arc<dyn Storage>) -> Result<(Refcounts, u64)> {
        let geometry = header.geometry();
        let size = geometry.cluster_size();
        // R3: nothing is written beyond the end, so the last cluster has to be there as a whole.
        if !file.end().is_multiple_of(size) {
            let end = file.end().next_multiple_of(size);
            let grow = Manage::Grow { end, means: GrowMeans::Truncate };
            file.manage(self.queue, grow).await?;
        }
        let offset = header.refcount_table_offset.0;
        let clusters = u64::from(header.refcount_table_clusters);
        let table = self.read(&**file, offset, clusters * size).await?;
        let mut blocks = Vec::with_capacity(table.len() / 8);
        for index in 0..table.len() / 8 {
            let block = refcount::decode_table_entry(word_at(&table, index), geometry).map_err(
                |error| {
                    let at = offset + index as u64 * 8;
                    refused(&error, "read the refcount table", file.name(), at)
                },
            )?;
            blocks.push(block.map_or(0, |block| block.0));
        }
        let cache_bytes = self.options.refcount_cache_size;
        let refcounts = Refcounts::new(geometry, blocks, offset, clusters, cache_bytes);
        Ok((refcounts, file.end() / size))
    }

    /// Takes back what the image says of itself and writing makes untrue: autoclear bits that are
    /// not known here, and bitmaps that nobody will keep up to date (F1).
    async fn prepare_for_writing(&self, image: &Qcow2) -> Result<()> {
        let header = &image.header;
        let known = AUTOCLEAR_BITMAPS | AUTOCLEAR_DATA_FILE_RAW;
        let mut changed = false;
        if header.version >= 3 && header.autoclear & !known != 0 {
            let bits = (header.autoclear & known).to_be_bytes();
            image.patch(self.queue, HEADER_AUTOCLEAR, &bits).await?;
            changed = true;
        }
        if header.autoclear & AUTOCLEAR_BITMAPS != 0
            && let Some(bitmaps) = header.bitmaps()
        {
            let offset = bitmaps.directory_offset.0;
            let mut directory = self.read(&*image.file, offset, bitmaps.directory_size).await?;
            let mut at = 0;
            for _ in 0..bitmaps.count {
                let not_understood = |error: stillpoint_format::Error| {
                    let name = image.file.name();
                    refused(&error, "read the bitmap directory", name, offset + at as u64)
                };
                let rest = directory.get(at..).unwrap_or_default();
                let length = Bitmap::length(rest).map_err(not_understood)?;
                let mut entry = Bitmap::decode(rest, image.geometry()).map_err(not_understood)?;
                entry.flags |= bitmap::IN_USE;
                let bytes = entry.encode();
                directory[at..at + bytes.len()].copy_from_slice(&bytes);
                at += length;
            }
            image.patch(self.queue, offset, &directory).await?;
            changed = true;
        }
        if changed {
            // ORDER: before the first guest write, which would make the bitmaps lies.
            image.barrier(self.queue).await?;
        }
        Ok(())
    }
}

/// The same file without the alignment of direct I/O.
fn through_page_cache(file: Arc<dyn Storage>, why: &str) -> Result<Arc<dyn Storage>> {
    let Some(buffered) = file.buffered() else {
        return Err(Error::new(Kind::Unsupported, "open the image", why)
            .file(file.name())
            .remedy("use `--cache writeback`"));
    };
    tracing::warn!(file = file.name(), why, "goes through the host's page cache");
    Ok(buffered)
}

/// The allocation policy that was asked for, as far as the file can.
fn usable_allocation(policy: AllocPolicy, file: &dyn Storage) -> AllocPolicy {
    if policy == AllocPolicy::ZeroRange && !file.facts().can_zero_range {
        tracing::warn!(file = file.name(), "cannot zero ranges; zeros are written instead");
        return AllocPolicy::WriteZeroes;
    }
    policy
}

/// The growth that was asked for, as far as the file can.
fn usable_growth((means, step): (GrowMeans, u64), file: &dyn Storage) -> (GrowMeans, u64) {
    match means {
        GrowMeans::Fallocate if !file.facts().can_fallocate => (GrowMeans::Truncate, step),
        _ => (means, step),
    }
}

/// F1: what is not done here is refused by name.
fn refuse_what_is_missing(header: &Header, name: &str, access: Access) -> Result<()> {
    let refuse = |why: String, remedy: &str| {
        Err(Error::new(Kind::Unsupported, "open the image", why).file(name).remedy(remedy))
    };
    let unknown = header.unknown_incompatible();
    if !unknown.is_empty() {
        let why = format!("it uses features that are not known here: {}", unknown.join(", "));
        return refuse(why, "open it with the program that wrote it");
    }
    if header.crypt_method != CryptMethod::None {
        let why = format!("it is encrypted ({:?})", header.crypt_method);
        return refuse(why, "encrypted images are not supported yet");
    }
    if header.has(INCOMPATIBLE_DATA_FILE) {
        let why = "its data lies in an external data file".to_owned();
        return refuse(why, "external data files are not supported yet");
    }
    if access == Access::Write {
        let bad = |why: &str| {
            Err(Error::new(Kind::Corrupt, "open the image for writing", why)
                .file(name)
                .remedy("run `stillpoint check -r all` on it first"))
        };
        if header.has(INCOMPATIBLE_CORRUPT) {
            return bad("it is marked as corrupt");
        }
        if header.has(INCOMPATIBLE_DIRTY) {
            return bad("its refcounts were left out of date by a crash (lazy refcounts)");
        }
    }
    Ok(())
}
