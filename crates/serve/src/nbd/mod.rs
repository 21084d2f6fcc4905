//! The NBD protocol, server side, and a small client.
//!
//! | file | what it holds |
//! |---|---|
//! | [`codec`] | numbers and layouts |
//! | [`handshake`] | negotiation, as a state machine without I/O |
//! | [`connection`] | one client, from greeting to good-bye: reader, writer, guard |
//! | `inbox`, `outbox` | bytes on their way in and out |
//! | `request` | what is checked before a request runs, and how it runs |
//! | [`export`] | what is served, under which names |
//! | [`budget`] | the bytes that all clients together may keep in flight |
//! | [`errors`] | the engine's failures as the protocol's numbers |
//! | [`client`] | a small blocking client, for the demo and tests |

pub mod budget;
pub mod client;
pub mod codec;
pub mod connection;
pub mod errors;
pub mod export;
pub mod handshake;
mod inbox;
mod outbox;
mod request;
