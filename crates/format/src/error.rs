//! What is wrong with some bytes: the structure, the rule, the byte and the value.
//!
//! A codec does not know the file or where in it its bytes came from; the caller adds both.

/// The result of decoding or encoding.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A rule that the bytes of a structure break.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes contradict the specification or a bound.
    #[error("{structure}, byte {at}: {rule} (found {value:#x})")]
    Corrupt {
        /// Which structure it is.
        structure: &'static str,
        /// Where the offending field begins in it, in bytes.
        at: u64,
        /// What the rule asks for.
        rule: &'static str,
        /// What the field holds.
        value: u64,
    },
    /// The bytes are well formed, but mean something that this program does not do.
    #[error("{structure}, byte {at}: {what} is not supported")]
    Unsupported {
        /// Which structure it is.
        structure: &'static str,
        /// Where the field begins in it, in bytes.
        at: u64,
        /// What is asked for, by name.
        what: String,
    },
    /// There are fewer bytes than the structure needs.
    #[error("{structure} needs {needed} bytes and only {found} are there")]
    Truncated {
        /// Which structure it is.
        structure: &'static str,
        /// How many bytes it needs.
        needed: u64,
        /// How many there are.
        found: u64,
    },
    /// The structure, as it should be written, exceeds the room for it.
    #[error("{structure} takes {needed} bytes and has room for {room}")]
    NoRoom {
        /// Which structure it is.
        structure: &'static str,
        /// How many bytes it would take.
        needed: u64,
        /// How many it may take.
        room: u64,
    },
}

impl Error {
    /// Whether the bytes are well formed and only ask for something that this program does not do.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Error::Unsupported { .. })
    }
}
