//! The one table from the engine's kinds of failure to NBD's error numbers.
//!
//! Source: `doc/proto.md`, section "Error values". Nothing else in this crate maps errors.

use stillpoint_io::Kind;

/// The operation is not permitted.
pub const NBD_EPERM: u32 = 1;
/// Input or output failed.
pub const NBD_EIO: u32 = 5;
/// The server lacks memory.
pub const NBD_ENOMEM: u32 = 12;
/// The request is wrong.
pub const NBD_EINVAL: u32 = 22;
/// There is no space, or the write lies beyond the export's end.
pub const NBD_ENOSPC: u32 = 28;
/// The answer does not fit one chunk.
pub const NBD_EOVERFLOW: u32 = 75;
/// The server cannot do this, or not fast.
pub const NBD_ENOTSUP: u32 = 95;
/// The server is going away.
pub const NBD_ESHUTDOWN: u32 = 108;

/// The number that tells a client about a failure of `kind`.
pub fn error_of_kind(kind: Kind) -> u32 {
    match kind {
        Kind::NoSpace => NBD_ENOSPC,
        Kind::ReadOnly | Kind::Permission => NBD_EPERM,
        Kind::Invalid => NBD_EINVAL,
        Kind::Unsupported => NBD_ENOTSUP,
        Kind::Limit => NBD_ENOMEM,
        Kind::Cancelled => NBD_ESHUTDOWN,
        // What is broken, busy, hot or latched is broken to the client; the log says why.
        _ => NBD_EIO,
    }
}

/// What an error number means, for a client's message.
pub fn describe(error: u32) -> &'static str {
    match error {
        NBD_EPERM => "operation not permitted",
        NBD_EIO => "input/output error",
        NBD_ENOMEM => "the server is out of memory",
        NBD_EINVAL => "invalid request",
        NBD_ENOSPC => "no space left",
        NBD_EOVERFLOW => "the answer is too large",
        NBD_ENOTSUP => "not supported",
        NBD_ESHUTDOWN => "the server is shutting down",
        _ => "unknown error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_number() {
        let table = [
            (Kind::Io, NBD_EIO),
            (Kind::NoSpace, NBD_ENOSPC),
            (Kind::Corrupt, NBD_EIO),
            (Kind::Unsupported, NBD_ENOTSUP),
            (Kind::Invalid, NBD_EINVAL),
            (Kind::ReadOnly, NBD_EPERM),
            (Kind::Busy, NBD_EIO),
            (Kind::Cancelled, NBD_ESHUTDOWN),
            (Kind::Latched, NBD_EIO),
            (Kind::NotFound, NBD_EIO),
            (Kind::Permission, NBD_EPERM),
            (Kind::Hot, NBD_EIO),
            (Kind::Limit, NBD_ENOMEM),
        ];
        for (kind, error) in table {
            assert_eq!(error_of_kind(kind), error, "{kind:?}");
            assert_ne!(describe(error), "unknown error");
        }
    }
}
