//! One error for the engine and everything above it.
//!
//! An error says what failed, on which file, at which offset, why, and what to do now. It is
//! `Clone`, because one failed flush reaches many waiters, and it keeps the host's errno, because
//! NBD, FUSE and virtio each turn it into a number of their own. There is no blanket conversion
//! from `std::io::Error`: whoever calls the host names the operation.

use std::fmt;
use std::sync::Arc;

/// The result of anything that can fail here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure it was; the edges (exit codes, NBD errors) decide by this alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The host refused or broke an operation.
    Io,
    /// No space or no quota left on the host.
    NoSpace,
    /// The image contradicts itself or the specification.
    Corrupt,
    /// The image or the request wants something that this program or host does not do.
    Unsupported,
    /// The request itself is wrong.
    Invalid,
    /// A write to something opened for reading.
    ReadOnly,
    /// Somebody else holds it.
    Busy,
    /// Given up on request.
    Cancelled,
    /// An earlier write or flush failed; writing is refused until the image is reopened (R6).
    Latched,
    /// A file is not there.
    NotFound,
    /// The host denies access.
    Permission,
    /// The image's journal holds something that the image lacks.
    Hot,
    /// A bound on memory, size or count was exceeded.
    Limit,
}

/// A failure: see the module's head.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: Kind,
    op: &'static str,
    file: Option<String>,
    offset: Option<u64>,
    errno: Option<i32>,
    why: String,
    remedy: Option<String>,
}

impl Error {
    /// A failure of `kind` while doing `op` (a verb phrase: "read the L2 table"), because of `why`.
    pub fn new(kind: Kind, op: &'static str, why: impl Into<String>) -> Error {
        Error(Arc::new(Inner {
            kind,
            op,
            file: None,
            offset: None,
            errno: None,
            why: why.into(),
            remedy: None,
        }))
    }

    /// A failure reported by the host as `errno` while doing `op`.
    pub fn from_errno(op: &'static str, errno: i32) -> Error {
        let mut error = Error::new(
            kind_of_errno(errno),
            op,
            std::io::Error::from_raw_os_error(errno).to_string(),
        );
        error.edit().errno = Some(errno);
        error
    }

    /// A failure reported by the standard library while doing `op`.
    pub fn from_std(op: &'static str, source: &std::io::Error) -> Error {
        match source.raw_os_error() {
            Some(errno) => Error::from_errno(op, errno),
            None => Error::new(Kind::Io, op, source.to_string()),
        }
    }

    fn edit(&mut self) -> &mut Inner {
        Arc::make_mut(&mut self.0)
    }

    /// Names the file, unless a deeper layer has named one.
    pub fn file(mut self, name: impl fmt::Display) -> Error {
        if self.0.file.is_none() {
            self.edit().file = Some(name.to_string());
        }
        self
    }

    /// Names the byte offset in the file, unless a deeper layer has named one.
    pub fn at(mut self, offset: u64) -> Error {
        if self.0.offset.is_none() {
            self.edit().offset = Some(offset);
        }
        self
    }

    /// Says what the user can do now.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Error {
        self.edit().remedy = Some(remedy.into());
        self
    }

    /// The kind of failure.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The host's error number, where the host reported one.
    pub fn errno(&self) -> Option<i32> {
        self.0.errno
    }

    /// The file's name, where one was given.
    pub fn file_name(&self) -> Option<&str> {
        self.0.file.as_deref()
    }

    /// The offset in the file, where there is one.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// Why it failed, without the operation, file and offset around it.
    pub fn why(&self) -> &str {
        &self.0.why
    }
}

/// The kind that a host's error number stands for.
pub fn kind_of_errno(errno: i32) -> Kind {
    // Linux numbers, the same on x86-64 and aarch64; this crate links no libc.
    match errno {
        1 | 13 => Kind::Permission,       // EPERM, EACCES
        2 => Kind::NotFound,              // ENOENT
        28 | 122 => Kind::NoSpace,        // ENOSPC, EDQUOT
        11 | 16 | 26 => Kind::Busy,       // EAGAIN, EBUSY, ETXTBSY
        22 => Kind::Invalid,              // EINVAL
        30 => Kind::ReadOnly,             // EROFS
        38 | 95 => Kind::Unsupported,     // ENOSYS, EOPNOTSUPP
        125 => Kind::Cancelled,           // ECANCELED
        12 | 23 | 24 | 27 => Kind::Limit, // ENOMEM, ENFILE, EMFILE, EFBIG
        _ => Kind::Io,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        if let Some(file) = &inner.file {
            write!(f, "{file}: ")?;
        }
        write!(f, "cannot {}", inner.op)?;
        if let Some(offset) = inner.offset {
            write!(f, " at offset {offset:#x}")?;
        }
        write!(f, ": {}", inner.why)?;
        if let Some(remedy) = &inner.remedy {
            write!(f, "; {remedy}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({self})", self.0.kind)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_file_operation_offset_reason_and_remedy() {
        let error =
            Error::from_errno("write", 28).file("disk.qcow2").at(0x1000).remedy("free some space");
        assert_eq!(error.kind(), Kind::NoSpace);
        assert_eq!(
            error.to_string(),
            "disk.qcow2: cannot write at offset 0x1000: No space left on device (os error 28); free some space"
        );
    }

    #[test]
    fn the_deepest_layer_names_the_place() {
        let error = Error::new(Kind::Corrupt, "read", "bad").at(1).at(2).file("a").file("b");
        assert_eq!(error.offset(), Some(1));
        assert!(error.to_string().starts_with("a: "));
    }
}
