//! Telling a service manager how the server is: `sd_notify(3)`'s datagrams.
//!
//! Nothing happens where no manager asked for it (`NOTIFY_SOCKET`), and nobody fails because a
//! manager does not listen.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Clients can connect.
pub(crate) fn ready() {
    send("READY=1");
}

/// The server is about to end.
pub(crate) fn stopping() {
    send("STOPPING=1");
}

fn send(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send_to(&name.into_vec(), state) {
        tracing::warn!("cannot tell the service manager {state}: {error}");
    }
}

fn send_to(name: &[u8], state: &str) -> std::io::Result<()> {
    let address = match name.split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_reach_paths_and_abstract_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let abstract_name = format!("stillpoint-notify-{}", std::process::id());
        let at_path = UnixDatagram::bind(&path).unwrap();
        let at_name =
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&abstract_name).unwrap())
                .unwrap();
        send_to(path.as_os_str().as_bytes(), "READY=1").unwrap();
        send_to(format!("@{abstract_name}").as_bytes(), "STOPPING=1").unwrap();
        for (socket, state) in [(at_path, "READY=1"), (at_name, "STOPPING=1")] {
            let mut bytes = [0; 64];
            let count = socket.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..count], state.as_bytes());
        }
        assert!(send_to(b"/no/such/socket", "READY=1").is_err());
    }
}
