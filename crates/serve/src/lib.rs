//! Everything that is spoken to outsiders.
//!
//! | module | what it holds |
//! |---|---|
//! | [`nbd`] | the NBD protocol: codec, negotiation, transmission, exports, a small client |
//! | [`server`] | a server's life: images opened, sockets bound, clients handed to queues, an orderly end |
//! | `notify` | the service manager's datagrams |
//! | [`slots`] | a bounded set of request futures that run inside one task |
//! | [`stop`] | the word to stop, heard on every thread |
//!
//! Protocol adapters are thin: decode, call [`stillpoint_engine::Disk`], encode. Deliberately
//! absent: image formats, caches, and every decision about what a request does to a disk.

pub mod nbd;
mod notify;
pub mod server;
pub mod slots;
pub mod stop;
