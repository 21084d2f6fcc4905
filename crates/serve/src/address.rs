//! Where a server listens and a client connects: `unix:PATH` or `tcp:HOST:PORT`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use stillpoint_io::{Error, Kind};

/// A socket's address, as people write it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A path in the file system.
    Unix(PathBuf),
    /// A host (name or number) and a port.
    Tcp(String, u16),
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Address, Error> {
        let refuse = |why: &str| {
            Err(Error::new(Kind::Invalid, "understand an address", why)
                .file(text)
                .remedy("write unix:PATH or tcp:HOST:PORT"))
        };
        match text.split_once(':') {
            Some(("unix", "")) => refuse("the path is missing"),
            Some(("unix", path)) => Ok(Address::Unix(path.into())),
            Some(("tcp", rest)) => {
                // The last colon divides, so that IPv6 numbers pass, with or without brackets.
                let Some((host, port)) = rest.rsplit_once(':') else {
                    return refuse("the port is missing");
                };
                let Ok(port) = port.parse() else { return refuse("the port is not a number") };
                let host = host.trim_start_matches('[').trim_end_matches(']');
                if host.is_empty() {
                    return refuse("the host is missing");
                }
                Ok(Address::Tcp(host.to_owned(), port))
            }
            _ => refuse("it begins with neither unix: nor tcp:"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Address::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_as_they_are_written() {
        for (text, address) in [
            ("unix:/run/disk.sock", Address::Unix("/run/disk.sock".into())),
            ("unix:a:b", Address::Unix("a:b".into())),
            ("tcp:localhost:10809", Address::Tcp("localhost".into(), 10809)),
            ("tcp:[::1]:1", Address::Tcp("::1".into(), 1)),
        ] {
            assert_eq!(text.parse::<Address>().unwrap(), address);
            assert_eq!(address.to_string(), text);
        }
        assert_eq!("tcp:::1:9".parse::<Address>().unwrap(), Address::Tcp("::1".into(), 9));
    }

    #[test]
    fn what_is_missing_is_named() {
        for (text, why) in [
            ("/run/x", "neither unix: nor tcp:"),
            ("unix:", "the path is missing"),
            ("tcp:host", "the port is missing"),
            ("tcp:host:x", "not a number"),
            ("tcp:host:70000", "not a number"),
            ("tcp::1", "the host is missing"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("unix:PATH"), "{error}");
        }
    }
}
