//! What is served, under which names, and what clients are told about it.
//!
//! A [`Catalog`] is the part that negotiation needs, and holds no disk; [`Exports`] adds the disks.
//! The order and number of exports are fixed once serving has begun.

use std::sync::Arc;

use stillpoint_engine::Disk;
use stillpoint_io::{Error, Kind, Result};

use super::codec::{PAYLOAD_BYTES_MAX, STRING_BYTES_MAX, transmission_flag as flag};

/// What a client is told about one export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Its name.
    pub name: String,
    /// A text for people; may be empty.
    pub description: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Requests aligned to this many bytes are served best; a power of two.
    pub preferred_block: u32,
    /// The longest read or write in bytes.
    pub transfer_max: u32,
}

impl Listing {
    /// What to tell about `disk`. A unit finer than a sector is told as a sector: the protocol
    /// knows no smaller preference.
    pub fn of(disk: &Disk, name: &str, description: &str) -> Listing {
        let limits = disk.limits();
        Listing {
            name: name.to_owned(),
            description: description.to_owned(),
            size_bytes: disk.size(),
            read_only: disk.is_read_only(),
            preferred_block: limits.preferred_block.next_power_of_two().clamp(512, 1 << 20),
            transfer_max: limits.transfer_max.clamp(1 << 20, PAYLOAD_BYTES_MAX),
        }
    }

    /// The flags of the transmission phase. Every connection reaches one `Disk`, whose flush covers
    /// all queues: hence `CAN_MULTI_CONN`.
    pub fn flags(&self, structured: bool) -> u16 {
        let mut flags = flag::HAS_FLAGS
            | flag::SEND_FLUSH
            | flag::SEND_FUA
            | flag::SEND_CACHE
            | flag::CAN_MULTI_CONN;
        flags |= match self.read_only {
            true => flag::READ_ONLY,
            false => flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO,
        };
        if structured {
            flags |= flag::SEND_DF;
        }
        flags
    }
}

/// All listings, and which of them the empty name means.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    listings: Vec<Listing>,
}

impl Catalog {
    /// An empty catalog.
    pub fn new() -> Catalog {
        Catalog::default()
    }

    /// Adds an export. Fails if its name is taken or longer than the protocol allows.
    pub fn add(&mut self, listing: Listing) -> Result<()> {
        let refuse = |why| Err(Error::new(Kind::Invalid, "add an export", why));
        if listing.name.len() > STRING_BYTES_MAX || listing.description.len() > STRING_BYTES_MAX {
            return refuse(format!("its name is longer than {STRING_BYTES_MAX} bytes"));
        }
        if self.listings.iter().any(|other| other.name == listing.name) {
            return refuse(format!("the name \"{}\" is taken", listing.name));
        }
        self.listings.push(listing);
        Ok(())
    }

    /// The export that a client calls `name`: the one of that name, or the only one for `""`.
    pub fn find(&self, name: &[u8]) -> Option<usize> {
        let found = self.listings.iter().position(|listing| listing.name.as_bytes() == name);
        found.or((name.is_empty() && self.listings.len() == 1).then_some(0))
    }

    /// All of them, in the order in which they were added.
    pub fn listings(&self) -> &[Listing] {
        &self.listings
    }
}

/// The disks behind a [`Catalog`]; a clone shares them.
#[derive(Clone, Debug, Default)]
pub struct Exports {
    catalog: Catalog,
    disks: Vec<Arc<Disk>>,
}

impl Exports {
    /// No exports.
    pub fn new() -> Exports {
        Exports::default()
    }

    /// Serves `disk` as `name`. Fails if the name is taken or too long.
    pub fn add(&mut self, name: &str, description: &str, disk: Arc<Disk>) -> Result<()> {
        self.catalog.add(Listing::of(&disk, name, description))?;
        self.disks.push(disk);
        Ok(())
    }

    /// What clients are told.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The disk of the listing at `index`.
    pub fn disk(&self, index: usize) -> &Arc<Disk> {
        &self.disks[index]
    }

    /// All disks, in the catalog's order.
    pub fn disks(&self) -> &[Arc<Disk>] {
        &self.disks
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn listing(name: &str) -> Listing {
        Listing {
            name: name.to_owned(),
            description: String::new(),
            size_bytes: 1 << 20,
            read_only: false,
            preferred_block: 4096,
            transfer_max: PAYLOAD_BYTES_MAX,
        }
    }

    #[test]
    fn a_single_export_is_also_the_nameless_one() {
        let mut catalog = Catalog::new();
        catalog.add(listing("disk")).unwrap();
        assert_eq!(
            (catalog.find(b"disk"), catalog.find(b""), catalog.find(b"d")),
            (Some(0), Some(0), None)
        );
        catalog.add(listing("other")).unwrap();
        assert_eq!((catalog.find(b"other"), catalog.find(b"")), (Some(1), None));
        catalog.add(listing("")).unwrap();
        assert_eq!(catalog.find(b""), Some(2));
    }

    #[test]
    fn duplicates_and_long_names_are_refused() {
        let mut catalog = Catalog::new();
        catalog.add(listing("disk")).unwrap();
        assert!(
            catalog.add(listing("disk")).unwrap_err().to_string().contains("\"disk\" is taken")
        );
        assert!(catalog.add(listing(&"n".repeat(4097))).is_err());
    }

    #[test]
    fn flags_promise_what_is_kept() {
        let mut disk = listing("disk");
        assert_eq!(disk.flags(true), 0x0ded);
        assert_eq!(disk.flags(false), 0x0d6d);
        disk.read_only = true;
        assert_eq!(disk.flags(true), 0x058f);
    }
}
