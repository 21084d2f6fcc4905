//! The NBD protocol's numbers and layouts, as pure functions over bytes.
//!
//! All integers are big-endian. "Compact" and "extended" are the protocol's two header families; the
//! extended ones carry 64-bit lengths. Layouts, with the byte offset of each field:
//!
//! ```text
//! greeting          0 NBDMAGIC  8 IHAVEOPT  16 flags:u16                                    = 18
//! option            0 IHAVEOPT  8 option:u32  12 length:u32                                 = 16
//! option reply      0 magic:u64  8 option:u32  12 kind:u32  16 length:u32                   = 20
//! compact request   0 magic  4 flags:u16  6 command:u16  8 cookie  16 offset  24 length:u32 = 28
//! extended request  0 magic  4 flags:u16  6 command:u16  8 cookie  16 offset  24 length:u64 = 32
//! simple reply      0 magic  4 error:u32  8 cookie                                          = 16
//! structured chunk  0 magic  4 flags:u16  6 kind:u16  8 cookie  16 length:u32               = 20
//! extended chunk    0 magic  4 flags:u16  6 kind:u16  8 cookie  16 offset  24 length:u64    = 32
//! ```
//!
//! Source: the NBD project's `doc/proto.md`, sections "Values" and "Protocol phases".
//! Deliberately absent: I/O, state, and any opinion about which request is allowed.

/// The first eight bytes of a server's greeting.
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Announces newstyle negotiation, and begins each option.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Begins each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Begins a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Begins an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Begins a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Begins a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Begins a chunk of an extended reply.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// The longest payload of one read or write, in bytes; what the field has settled on.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// The longest string (export name, query, message) that the protocol allows, in bytes.
pub const STRING_BYTES_MAX: usize = 4096;

/// Flags of the server's greeting and of the client's answer: the same bits.
pub mod handshake_flag {
    /// Options get replies; an unknown option is survived.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The 124 zero bytes after `EXPORT_NAME`'s answer are left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// What a client asks during negotiation.
pub mod option {
    /// Choose an export and begin transmission, with no way to report an error.
    pub const EXPORT_NAME: u32 = 1;
    /// End the negotiation.
    pub const ABORT: u32 = 2;
    /// Name all exports.
    pub const LIST: u32 = 3;
    /// Encrypt the connection.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and begin transmission.
    pub const GO: u32 = 7;
    /// Replies come as chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Name metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Requests and replies carry 64-bit lengths.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// How a server answers an option.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export's name.
    pub const SERVER: u32 = 2;
    /// One fact about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in every reply that is a failure.
    pub const ERROR: u32 = 1 << 31;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The server does not permit the option.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option's data contradicts the protocol.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// There is no export of this name.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The option's data is longer than the server takes.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
    /// Extended headers were negotiated; the option would step back.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR | 10;
}

/// What an `INFO` reply tells.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The canonical name.
    pub const NAME: u16 = 1;
    /// A text for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod transmission_flag {
    /// The other flags mean something.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `FUA` works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `DF` works; structured replies only.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes answered on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` works.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `FAST_ZERO` works.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// What a request asks for.
pub mod command {
    /// Read bytes.
    pub const READ: u16 = 0;
    /// Write the bytes that follow.
    pub const WRITE: u16 = 1;
    /// End the connection, without a reply.
    pub const DISC: u16 = 2;
    /// Make durable what was answered.
    pub const FLUSH: u16 = 3;
    /// A range is no longer needed.
    pub const TRIM: u16 = 4;
    /// A range will be read soon.
    pub const CACHE: u16 = 5;
    /// Make a range read as zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// Describe a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod command_flag {
    /// Answer when the effect is durable.
    pub const FUA: u16 = 1 << 0;
    /// Do not give the space back.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Do not cut the read's answer into fragments.
    pub const DF: u16 = 1 << 2;
    /// One extent per context is enough.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail rather than write zeros out.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// A payload of the request's length follows (extended headers).
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// The kinds of a reply's chunks, and their flag.
pub mod chunk {
    /// The last chunk of its reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// Nothing.
    pub const NONE: u16 = 0;
    /// An offset (u64) and bytes.
    pub const OFFSET_DATA: u16 = 1;
    /// An offset (u64) and the length (u32) of a run of zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// A context id (u32), then pairs of length and flags (u32 each).
    pub const BLOCK_STATUS: u16 = 5;
    /// A context id (u32), a count (u32), then pairs of length and flags (u64 each).
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Set in every kind that is a failure.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error (u32), a message's length (u16), and the message.
    pub const ERROR: u16 = ERROR_BIT | 1;
}

/// Flags of `base:allocation`.
pub mod state_flag {
    /// No host data backs the range.
    pub const HOLE: u32 = 1 << 0;
    /// The range reads as zeros.
    pub const ZERO: u32 = 1 << 1;
}

/// The context that tells holes and zeros.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";
/// Its id here.
pub const CONTEXT_ALLOCATION_ID: u32 = 0;
/// The context that tells which image of the chain holds a range.
pub const CONTEXT_DEPTH: &str = "qemu:allocation-depth";
/// Its id here.
pub const CONTEXT_DEPTH_ID: u32 = 1;

/// The `u16` at byte `at`; the caller has checked the length.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap())
}

/// The `u32` at byte `at`; the caller has checked the length.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// The `u64` at byte `at`; the caller has checked the length.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The server's first words.
pub fn encode_greeting(flags: u16) -> [u8; 18] {
    let mut bytes = [0; 18];
    bytes[0..8].copy_from_slice(&NBDMAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&IHAVEOPT.to_be_bytes());
    bytes[16..18].copy_from_slice(&flags.to_be_bytes());
    bytes
}

/// The header of an option; its data follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which: see [`option`].
    pub option: u32,
    /// The data's length in bytes.
    pub length: u32,
}

impl OptionHeader {
    /// Its length in bytes.
    pub const BYTES: usize = 16;

    /// Reads it; `None` if the magic is wrong.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<OptionHeader> {
        (u64_at(bytes, 0) == IHAVEOPT)
            .then(|| OptionHeader { option: u32_at(bytes, 8), length: u32_at(bytes, 12) })
    }

    /// Writes it.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&IHAVEOPT.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.option.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// The header of a reply to an option; its data follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// The option that it answers.
    pub option: u32,
    /// How: see [`option_reply`].
    pub kind: u32,
    /// The data's length in bytes.
    pub length: u32,
}

impl OptionReply {
    /// Its length in bytes.
    pub const BYTES: usize = 20;

    /// Reads it; `None` if the magic is wrong.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<OptionReply> {
        (u64_at(bytes, 0) == OPTION_REPLY_MAGIC).then(|| OptionReply {
            option: u32_at(bytes, 8),
            kind: u32_at(bytes, 12),
            length: u32_at(bytes, 16),
        })
    }

    /// Writes it.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.option.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.kind.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// One request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// See [`command_flag`].
    pub flags: u16,
    /// See [`command`].
    pub command: u16,
    /// The client's name for the request, repeated in the reply.
    pub cookie: u64,
    /// Where its effect begins, in bytes.
    pub offset: u64,
    /// How many bytes it affects or, with [`command_flag::PAYLOAD_LEN`], how many follow.
    pub length: u64,
}

impl Request {
    /// The length of a compact header in bytes.
    pub const COMPACT_BYTES: usize = 28;
    /// The length of an extended header in bytes.
    pub const EXTENDED_BYTES: usize = 32;

    /// Reads a compact header; `None` if the magic is wrong.
    pub fn decode_compact(bytes: &[u8; Self::COMPACT_BYTES]) -> Option<Request> {
        (u32_at(bytes, 0) == REQUEST_MAGIC)
            .then(|| Request { length: u64::from(u32_at(bytes, 24)), ..Self::decode_front(bytes) })
    }

    /// Reads an extended header; `None` if the magic is wrong.
    pub fn decode_extended(bytes: &[u8; Self::EXTENDED_BYTES]) -> Option<Request> {
        (u32_at(bytes, 0) == EXTENDED_REQUEST_MAGIC)
            .then(|| Request { length: u64_at(bytes, 24), ..Self::decode_front(bytes) })
    }

    fn decode_front(bytes: &[u8]) -> Request {
        Request {
            flags: u16_at(bytes, 4),
            command: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            length: 0,
        }
    }

    /// Writes a compact header.
    ///
    /// # Panics
    /// If the length needs more than 32 bits.
    pub fn encode_compact(&self) -> [u8; Self::COMPACT_BYTES] {
        let length = u32::try_from(self.length).expect("a compact request's length has 32 bits");
        let mut bytes = [0; Self::COMPACT_BYTES];
        self.encode_front(REQUEST_MAGIC, &mut bytes);
        bytes[24..28].copy_from_slice(&length.to_be_bytes());
        bytes
    }

    /// Writes an extended header.
    pub fn encode_extended(&self) -> [u8; Self::EXTENDED_BYTES] {
        let mut bytes = [0; Self::EXTENDED_BYTES];
        self.encode_front(EXTENDED_REQUEST_MAGIC, &mut bytes);
        bytes[24..32].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    fn encode_front(&self, magic: u32, bytes: &mut [u8]) {
        bytes[0..4].copy_from_slice(&magic.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
    }
}

/// A simple reply's header; a successful read's bytes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// 0, or an error of [`super::errors`].
    pub error: u32,
    /// The request's.
    pub cookie: u64,
}

impl SimpleReply {
    /// Its length in bytes.
    pub const BYTES: usize = 16;

    /// Reads it; `None` if the magic is wrong.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<SimpleReply> {
        (u32_at(bytes, 0) == SIMPLE_REPLY_MAGIC)
            .then(|| SimpleReply { error: u32_at(bytes, 4), cookie: u64_at(bytes, 8) })
    }

    /// Writes it.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.error.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes
    }
}

/// The header of one chunk of a structured or extended reply; its payload follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// [`chunk::FLAG_DONE`], or 0.
    pub flags: u16,
    /// See [`chunk`].
    pub kind: u16,
    /// The request's.
    pub cookie: u64,
    /// The request's offset; extended chunks only.
    pub offset: u64,
    /// The payload's length in bytes.
    pub length: u64,
}

impl Chunk {
    /// The length of a structured chunk's header in bytes.
    pub const STRUCTURED_BYTES: usize = 20;
    /// The length of an extended chunk's header in bytes.
    pub const EXTENDED_BYTES: usize = 32;

    /// Reads a structured chunk's header; `None` if the magic is wrong.
    pub fn decode_structured(bytes: &[u8; Self::STRUCTURED_BYTES]) -> Option<Chunk> {
        (u32_at(bytes, 0) == STRUCTURED_REPLY_MAGIC).then(|| Chunk {
            flags: u16_at(bytes, 4),
            kind: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset: 0,
            length: u64::from(u32_at(bytes, 16)),
        })
    }

    /// Reads an extended chunk's header; `None` if the magic is wrong.
    pub fn decode_extended(bytes: &[u8; Self::EXTENDED_BYTES]) -> Option<Chunk> {
        (u32_at(bytes, 0) == EXTENDED_REPLY_MAGIC).then(|| Chunk {
            flags: u16_at(bytes, 4),
            kind: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            length: u64_at(bytes, 24),
        })
    }

    /// Writes a structured chunk's header.
    ///
    /// # Panics
    /// If the length needs more than 32 bits.
    pub fn encode_structured(&self) -> [u8; Self::STRUCTURED_BYTES] {
        let length = u32::try_from(self.length).expect("a structured chunk's length has 32 bits");
        let mut bytes = [0; Self::STRUCTURED_BYTES];
        bytes[0..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..20].copy_from_slice(&length.to_be_bytes());
        bytes
    }

    /// Writes an extended chunk's header.
    pub fn encode_extended(&self) -> [u8; Self::EXTENDED_BYTES] {
        let mut bytes = [0; Self::EXTENDED_BYTES];
        bytes[0..4].copy_from_slice(&EXTENDED_REPLY_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..32].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    #[test]
    fn greeting_spells_the_magic() {
        let bytes = encode_greeting(3);
        assert_eq!(&bytes[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(&bytes[16..], [0, 3]);
    }

    #[test]
    fn headers_match_bytes_written_by_other_implementations() {
        let request = Request {
            flags: command_flag::FUA,
            command: command::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x10_0000,
            length: 0x1000,
        };
        let compact = hex("25609513 0001 0001 0102030405060708 0000000000100000 00001000");
        let extended = hex("21e41c71 0001 0001 0102030405060708 0000000000100000 0000000000001000");
        assert_eq!(request.encode_compact()[..], compact);
        assert_eq!(request.encode_extended()[..], extended);
        assert_eq!(Request::decode_compact(&compact.try_into().unwrap()), Some(request));
        assert_eq!(Request::decode_extended(&extended.try_into().unwrap()), Some(request));

        let simple = SimpleReply { error: 5, cookie: 7 };
        let bytes = hex("67446698 00000005 0000000000000007");
        assert_eq!(simple.encode()[..], bytes);
        assert_eq!(SimpleReply::decode(&bytes.try_into().unwrap()), Some(simple));

        let head = Chunk { flags: 1, kind: chunk::OFFSET_DATA, cookie: 7, offset: 0, length: 4104 };
        let bytes = hex("668e33ef 0001 0001 0000000000000007 00001008");
        assert_eq!(head.encode_structured()[..], bytes);
        assert_eq!(Chunk::decode_structured(&bytes.try_into().unwrap()), Some(head));

        let head = Chunk { offset: 512, ..head };
        let bytes = hex("6e8a278c 0001 0001 0000000000000007 0000000000000200 0000000000001008");
        assert_eq!(head.encode_extended()[..], bytes);
        assert_eq!(Chunk::decode_extended(&bytes.try_into().unwrap()), Some(head));

        let head = OptionHeader { option: option::GO, length: 6 };
        let bytes = hex("49484156454f5054 00000007 00000006");
        assert_eq!(head.encode()[..], bytes);
        assert_eq!(OptionHeader::decode(&bytes.try_into().unwrap()), Some(head));

        let head = OptionReply { option: option::GO, kind: option_reply::ERR_UNKNOWN, length: 0 };
        let bytes = hex("0003e889045565a9 00000007 80000006 00000000");
        assert_eq!(head.encode()[..], bytes);
        assert_eq!(OptionReply::decode(&bytes.try_into().unwrap()), Some(head));
    }

    #[test]
    fn each_wrong_magic_is_refused() {
        assert_eq!(OptionHeader::decode(&[0; 16]), None);
        assert_eq!(OptionReply::decode(&[0; 20]), None);
        assert_eq!(Request::decode_compact(&[0; 28]), None);
        assert_eq!(Request::decode_extended(&[0; 32]), None);
        assert_eq!(SimpleReply::decode(&[0; 16]), None);
        assert_eq!(Chunk::decode_structured(&[0; 20]), None);
        assert_eq!(Chunk::decode_extended(&[0; 32]), None);
    }

    #[test]
    fn extended_lengths_keep_all_bits() {
        let request =
            Request { flags: 0, command: 6, cookie: 1, offset: u64::MAX, length: u64::MAX };
        assert_eq!(Request::decode_extended(&request.encode_extended()), Some(request));
    }
}
