//! Sockets on any loop: unix and TCP, listening and connected.
//!
//! A call is tried first and waited for only when the socket has nothing: after a short read not
//! even tried, because the end of what was there has been seen. A stream that always has something
//! lets other tasks run now and then.
//!
//! Deliberately absent: TLS, datagrams, buffering (the protocols know better what they expect).

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};

use stillpoint_io::{Error, Kind, Result};

mod listener;
mod stream;

pub use listener::Listener;
pub use stream::{Part, Stream};

/// Where a server listens or a client connects: `unix:PATH` or `tcp:HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// Host and port, as in `localhost:10809` or `[::1]:10809`.
    Tcp(String),
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Address> {
        let parsed = match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Some(Address::Unix(path.into())),
            Some(("tcp", host)) if host.contains(':') => Some(Address::Tcp(host.to_owned())),
            _ => None,
        };
        parsed.ok_or_else(|| {
            let why = format!("'{text}' is neither unix:PATH nor tcp:HOST:PORT");
            Error::new(Kind::Invalid, "understand the address", why)
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(host) => write!(f, "tcp:{host}"),
        }
    }
}

/// Tells descriptors apart that had the same number one after the other.
pub(crate) fn next_generation() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn failure(op: &'static str, errno: rustix::io::Errno, at: &Address) -> Error {
    Error::from_errno(op, errno.raw_os_error()).file(at)
}

/// The socket addresses that a host and port stand for; may ask a name server.
fn resolve(host: &str, op: &'static str) -> Result<Vec<std::net::SocketAddr>> {
    let failed = |why: String| Error::new(Kind::NotFound, op, why).file(format!("tcp:{host}"));
    let found = std::net::ToSocketAddrs::to_socket_addrs(host);
    let found: Vec<_> = found.map_err(|error| failed(error.to_string()))?.collect();
    if found.is_empty() { Err(failed("the host has no address".to_owned())) } else { Ok(found) }
}
