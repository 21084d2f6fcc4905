//! A small NBD client over a blocking socket: for the demo, the tests and small tools.
//!
//! Requests may be submitted ahead ([`Client::submit`]) and their replies taken in whatever order
//! the server sends them ([`Client::receive`]); the one-call forms do one after the other. Whoever
//! submits ahead keeps the depth bounded: a client that only writes and never reads fills both
//! sockets. Deliberately absent: TLS, reconnecting, and any cleverness.

use std::collections::HashMap;
use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use stillpoint_host::net::Address;
use stillpoint_io::{Error, Kind, Result};

use super::codec::{
    CONTEXT_ALLOCATION, CONTEXT_DEPTH, Chunk, IHAVEOPT, NBDMAGIC, OptionHeader, OptionReply,
    PAYLOAD_BYTES_MAX, Request, SimpleReply, chunk, command, command_flag, handshake_flag, info,
    option, option_reply, u16_at, u32_at, u64_at,
};
use super::errors;
use super::handshake::ReplyStyle;

/// One run of one metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextExtent {
    /// The context's id: see [`super::codec`].
    pub context: u32,
    /// The run's length in bytes.
    pub length: u64,
    /// What the context says about it.
    pub flags: u64,
}

/// The answer to one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Which request.
    pub cookie: u64,
    /// 0, or an error of [`super::errors`].
    pub error: u32,
    /// The server's words about the error.
    pub message: String,
    /// What was read.
    pub data: Vec<u8>,
    /// What block status told.
    pub extents: Vec<ContextExtent>,
}

enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(socket) => socket.read(into),
            Socket::Tcp(socket) => socket.read(into),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(socket) => socket.write(from),
            Socket::Tcp(socket) => socket.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection in its transmission phase; see the module's head.
pub struct Client {
    socket: BufReader<Socket>,
    style: ReplyStyle,
    size_bytes: u64,
    flags: u16,
    /// The requests without a reply: cookie, offset and length of each.
    in_flight: HashMap<u64, Request>,
    next_cookie: u64,
}

fn broken(why: impl Into<String>) -> Error {
    Error::new(Kind::Io, "talk to the NBD server", why)
}

fn lost(source: io::Error) -> Error {
    Error::from_std("talk to the NBD server", &source)
}

impl Client {
    /// Connects to `address` and chooses `export`, with replies in `style` and, if the style can
    /// carry them, both metadata contexts.
    pub fn connect(address: &Address, export: &str, style: ReplyStyle) -> Result<Client> {
        let refuse = |error: io::Error| Error::from_std("connect", &error).file(address);
        let socket = match address {
            Address::Unix(path) => Socket::Unix(UnixStream::connect(path).map_err(refuse)?),
            Address::Tcp(host) => {
                let socket = TcpStream::connect(host).map_err(refuse)?;
                socket.set_nodelay(true).map_err(refuse)?;
                Socket::Tcp(socket)
            }
        };
        Client::negotiate(socket, export, style)
    }

    /// Negotiates over a connected socket, as [`Client::connect`] does.
    pub fn over(socket: UnixStream, export: &str, style: ReplyStyle) -> Result<Client> {
        Client::negotiate(Socket::Unix(socket), export, style)
    }

    fn negotiate(socket: Socket, export: &str, style: ReplyStyle) -> Result<Client> {
        let mut client = Client {
            socket: BufReader::with_capacity(256 << 10, socket),
            style,
            size_bytes: 0,
            flags: 0,
            in_flight: HashMap::new(),
            next_cookie: 1,
        };
        let greeting: [u8; 18] = client.take()?;
        if u64_at(&greeting, 0) != NBDMAGIC || u64_at(&greeting, 8) != IHAVEOPT {
            return Err(broken("it does not greet as an NBD server"));
        }
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        client.send(&u32::from(flags & u16_at(&greeting, 16)).to_be_bytes())?;
        match style {
            ReplyStyle::Simple => {}
            ReplyStyle::Structured => client.ask(option::STRUCTURED_REPLY, &[], |_, _| {})?,
            ReplyStyle::Extended => client.ask(option::EXTENDED_HEADERS, &[], |_, _| {})?,
        }
        let string = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
        if style > ReplyStyle::Simple {
            let queries = [string(CONTEXT_ALLOCATION), string(CONTEXT_DEPTH)].concat();
            let data = [string(export), 2u32.to_be_bytes().to_vec(), queries].concat();
            client.ask(option::SET_META_CONTEXT, &data, |_, _| {})?;
        }
        let (mut size_bytes, mut flags) = (0, 0);
        client.ask(option::GO, &[string(export), vec![0, 0]].concat(), |kind, data| {
            if kind == option_reply::INFO && data.len() >= 12 && u16_at(data, 0) == info::EXPORT {
                (size_bytes, flags) = (u64_at(data, 2), u16_at(data, 10));
            }
        })?;
        (client.size_bytes, client.flags) = (size_bytes, flags);
        Ok(client)
    }

    /// Sends one option and takes its replies up to the ACK.
    fn ask(&mut self, option: u32, data: &[u8], mut told: impl FnMut(u32, &[u8])) -> Result<()> {
        self.send(&OptionHeader { option, length: data.len() as u32 }.encode())?;
        self.send(data)?;
        loop {
            let Some(reply) = OptionReply::decode(&self.take()?) else {
                return Err(broken("a reply to an option begins wrongly"));
            };
            let data = self.take_vec(u64::from(reply.length))?;
            match reply.kind {
                option_reply::ACK => return Ok(()),
                kind if kind & option_reply::ERROR != 0 => {
                    let message = String::from_utf8_lossy(&data).into_owned();
                    return Err(broken(format!("option {option} was refused: {message}")));
                }
                kind => told(kind, &data),
            }
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.socket.get_mut().write_all(bytes).map_err(lost)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.socket.read_exact(&mut bytes).map_err(lost)?;
        Ok(bytes)
    }

    fn take_vec(&mut self, length: u64) -> Result<Vec<u8>> {
        if length > u64::from(PAYLOAD_BYTES_MAX) + 4096 {
            return Err(broken(format!("a reply of {length} bytes is too long")));
        }
        let mut bytes = vec![0; length as usize];
        self.socket.read_exact(&mut bytes).map_err(lost)?;
        Ok(bytes)
    }

    /// The export's size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The export's transmission flags.
    pub fn flags(&self) -> u16 {
        self.flags
    }

    /// How many requests have no reply yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Sends a request with its payload, if it has one, and returns its cookie.
    pub fn submit(
        &mut self,
        cmd: u16,
        flags: u16,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> Result<u64> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut request = Request { flags, command: cmd, cookie, offset, length };
        let mut bytes = Vec::with_capacity(Request::EXTENDED_BYTES + payload.len());
        if self.style == ReplyStyle::Extended {
            if cmd == command::WRITE {
                request.flags |= command_flag::PAYLOAD_LEN;
            }
            bytes.extend(request.encode_extended());
        } else {
            bytes.extend(request.encode_compact());
        }
        bytes.extend_from_slice(payload);
        self.in_flight.insert(cookie, request);
        self.send(&bytes)?;
        Ok(cookie)
    }

    /// Takes the next reply, whichever request it answers.
    pub fn receive(&mut self) -> Result<Reply> {
        let mut reply = Reply::default();
        loop {
            let magic: [u8; 4] = self.take()?;
            let done = if magic == super::codec::SIMPLE_REPLY_MAGIC.to_be_bytes() {
                let rest: [u8; 12] = self.take()?;
                let mut bytes = [0; SimpleReply::BYTES];
                bytes[..4].copy_from_slice(&magic);
                bytes[4..].copy_from_slice(&rest);
                let head = SimpleReply::decode(&bytes).expect("the magic was looked at");
                let request = self.request(head.cookie)?;
                (reply.cookie, reply.error) = (head.cookie, head.error);
                if head.error == 0 && request.command == command::READ {
                    reply.data = self.take_vec(request.length)?;
                }
                true
            } else {
                let head = self.take_chunk(magic)?;
                let payload = self.take_vec(head.length)?;
                reply.cookie = head.cookie;
                let request = self.request(head.cookie)?;
                absorb(&mut reply, &request, head.kind, &payload)?;
                head.flags & chunk::FLAG_DONE != 0
            };
            if done {
                self.in_flight.remove(&reply.cookie);
                return Ok(reply);
            }
        }
    }

    fn request(&self, cookie: u64) -> Result<Request> {
        let request = self.in_flight.get(&cookie).copied();
        request.ok_or_else(|| broken(format!("a reply to request {cookie}, which was not asked")))
    }

    fn take_chunk(&mut self, magic: [u8; 4]) -> Result<Chunk> {
        let head = if self.style == ReplyStyle::Extended {
            let rest: [u8; Chunk::EXTENDED_BYTES - 4] = self.take()?;
            let mut bytes = [0; Chunk::EXTENDED_BYTES];
            bytes[..4].copy_from_slice(&magic);
            bytes[4..].copy_from_slice(&rest);
            Chunk::decode_extended(&bytes)
        } else {
            let rest: [u8; Chunk::STRUCTURED_BYTES - 4] = self.take()?;
            let mut bytes = [0; Chunk::STRUCTURED_BYTES];
            bytes[..4].copy_from_slice(&magic);
            bytes[4..].copy_from_slice(&rest);
            Chunk::decode_structured(&bytes)
        };
        head.ok_or_else(|| broken("a reply begins wrongly"))
    }

    /// Submits one request and waits for its reply; an error in it is an error here.
    pub fn call(
        &mut self,
        cmd: u16,
        flags: u16,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> Result<Reply> {
        let cookie = self.submit(cmd, flags, offset, length, payload)?;
        let reply = self.receive()?;
        assert_eq!(reply.cookie, cookie, "one request, one reply");
        if reply.error == 0 {
            return Ok(reply);
        }
        let kind = match reply.error {
            errors::NBD_EPERM => Kind::Permission,
            errors::NBD_EINVAL => Kind::Invalid,
            errors::NBD_ENOSPC => Kind::NoSpace,
            errors::NBD_ENOTSUP => Kind::Unsupported,
            _ => Kind::Io,
        };
        let why = format!("{} {}", errors::describe(reply.error), reply.message);
        Err(Error::new(kind, "carry out the request", why.trim_end()).at(offset))
    }

    /// Reads `length` bytes at `offset`.
    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>> {
        Ok(self.call(command::READ, 0, offset, u64::from(length), &[])?.data)
    }

    /// Writes `data` at `offset`; `flags` may hold FUA.
    pub fn write(&mut self, offset: u64, data: &[u8], flags: u16) -> Result<()> {
        self.call(command::WRITE, flags, offset, data.len() as u64, data).map(|_| ())
    }

    /// Makes durable what was answered.
    pub fn flush(&mut self) -> Result<()> {
        self.call(command::FLUSH, 0, 0, 0, &[]).map(|_| ())
    }

    /// Asks what lies in a range, in each context.
    pub fn block_status(
        &mut self,
        offset: u64,
        length: u64,
        flags: u16,
    ) -> Result<Vec<ContextExtent>> {
        Ok(self.call(command::BLOCK_STATUS, flags, offset, length, &[])?.extents)
    }

    /// Ends the connection as the protocol wants it.
    pub fn disconnect(mut self) -> Result<()> {
        self.submit(command::DISC, 0, 0, 0, &[]).map(|_| ())
    }
}

/// Takes one chunk's payload into `reply`.
fn absorb(reply: &mut Reply, request: &Request, kind: u16, payload: &[u8]) -> Result<()> {
    let short = || broken(format!("a chunk of kind {kind} is too short"));
    match kind {
        chunk::NONE => {}
        chunk::OFFSET_DATA | chunk::OFFSET_HOLE => {
            if payload.len() < 8 || (kind == chunk::OFFSET_HOLE && payload.len() < 12) {
                return Err(short());
            }
            reply.data.resize(request.length as usize, 0);
            let start = u64_at(payload, 0).wrapping_sub(request.offset) as usize;
            let length = match kind {
                chunk::OFFSET_DATA => payload.len() - 8,
                _ => u32_at(payload, 8) as usize,
            };
            let place = reply.data.get_mut(start..start.wrapping_add(length)).ok_or_else(short)?;
            match kind {
                chunk::OFFSET_DATA => place.copy_from_slice(&payload[8..]),
                _ => place.fill(0),
            }
        }
        chunk::BLOCK_STATUS => {
            let context = u32_at(payload.get(..4).ok_or_else(short)?, 0);
            reply.extents.extend(payload[4..].chunks_exact(8).map(|pair| ContextExtent {
                context,
                length: u64::from(u32_at(pair, 0)),
                flags: u64::from(u32_at(pair, 4)),
            }));
        }
        chunk::BLOCK_STATUS_EXT => {
            let context = u32_at(payload.get(..8).ok_or_else(short)?, 0);
            reply.extents.extend(payload[8..].chunks_exact(16).map(|pair| ContextExtent {
                context,
                length: u64_at(pair, 0),
                flags: u64_at(pair, 8),
            }));
        }
        kind if kind & chunk::ERROR_BIT != 0 => {
            let head = payload.get(..6).ok_or_else(short)?;
            reply.error = u32_at(head, 0);
            let message = payload[6..].get(..usize::from(u16_at(head, 4))).unwrap_or_default();
            reply.message = String::from_utf8_lossy(message).into_owned();
        }
        _ => return Err(broken(format!("a chunk of unknown kind {kind}"))),
    }
    Ok(())
}
