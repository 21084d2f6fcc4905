//! What a caller may choose when it opens a disk.

use stillpoint_io::{Access, GrowMeans};

/// How the bytes of an image file are to be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The guest's bytes as they are.
    Raw,
    /// qcow2, versions 2 and 3.
    Qcow2,
}

/// How the rest of a newly allocated cluster becomes zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AllocPolicy {
    /// Nothing is written or zeroed where the host area is known to be zero.
    #[default]
    Implicit,
    /// The file system zeroes each cluster first (`FALLOC_FL_ZERO_RANGE`), as QEMU 4.1 did.
    ZeroRange,
    /// Zero buffers are written around the data, as QEMU 4.0 did.
    WriteZeroes,
}

/// What happens to the host's space when the guest discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DiscardPolicy {
    /// It is given back.
    #[default]
    Unmap,
    /// The guest's discards are ignored.
    Ignore,
}

/// What zero writes become, when the guest writes plain zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DetectZeroes {
    /// Writes, as they came.
    #[default]
    Off,
    /// Write-zeroes that keep the space.
    On,
    /// Write-zeroes that may give the space back.
    Unmap,
}

/// What a caller may choose when it opens a disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// The image's format; `None` probes it, which is refused for writing to what looks raw unless
    /// [`Options::allow_probed_raw`] is set (F2).
    pub format: Option<ImageFormat>,
    /// Lets a disk without a known header be taken for raw and written to.
    pub allow_probed_raw: bool,
    /// What it is opened for.
    pub access: Access,
    /// Opens the image alone: unallocated clusters read as zeros.
    pub without_backing: bool,
    /// How new clusters become zero around the data.
    pub alloc: AllocPolicy,
    /// How and in which steps (bytes) the file grows; `None` takes what was measured for its file system.
    pub grow: Option<(GrowMeans, u64)>,
    /// What a discard does.
    pub discard: DiscardPolicy,
    /// What writes of zeros become.
    pub detect_zeroes: DetectZeroes,
    /// The bound of the cache of L2 slices, in bytes.
    pub l2_cache_size: u64,
    /// The bound of the cache of refcount slices, in bytes.
    pub refcount_cache_size: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            format: None,
            allow_probed_raw: false,
            access: Access::Write,
            without_backing: false,
            alloc: AllocPolicy::default(),
            grow: None,
            discard: DiscardPolicy::default(),
            detect_zeroes: DetectZeroes::default(),
            l2_cache_size: 32 << 20,
            refcount_cache_size: 4 << 20,
        }
    }
}
