//! The NBD protocol, server side, and a small client.
//!
//! | file | what it holds |
//! |---|---|
//! | [`codec`] | numbers and layouts |
//! | [`errors`] | the engine's failures as the protocol's numbers |
//! | [`export`] | what is served, under which names |
//! | [`handshake`] | negotiation, as a state machine without I/O |

pub mod client;
pub mod codec;
pub mod errors;
pub mod export;
pub mod handshake;
