//! Refcounts: the table of blocks, and the elements of a block.
//!
//! ```text
//!  table entry:  | 63..9 block's offset | 8..0 0 |
//!  block:        elements of 1, 2, 4 ... 64 bits; wider than a byte: big-endian;
//!                narrower: element 0 in the least significant bits of its byte
//! ```
//!
//! A block is worked on either as bytes or as 64-bit words, each of which holds eight of its bytes
//! as `u64::from_be_bytes` reads them; both forms agree element by element.

use super::HOST_END_MAX;
use super::geometry::Geometry;
use crate::addr::HostOffset;
use crate::error::Result;
use crate::wire::require;

/// Decodes a word of the refcount table: where the block begins, if there is one.
pub fn decode_table_entry(word: u64, geometry: Geometry) -> Result<Option<HostOffset>> {
    const STRUCTURE: &str = "refcount table entry";
    require(word & 0x1ff == 0, STRUCTURE, 0, "reserved bits must be 0", word)?;
    require(
        word & geometry.cluster_mask() == 0,
        STRUCTURE,
        0,
        "the offset must be a multiple of the cluster size",
        word,
    )?;
    require(word < HOST_END_MAX, STRUCTURE, 0, "the offset must be below 2^56", word)?;
    Ok((word != 0).then_some(HostOffset(word)))
}

/// The word of the refcount table for a block, or for none.
pub fn encode_table_entry(block: Option<HostOffset>) -> u64 {
    block.unwrap_or_default().0
}

/// How many elements a word holds.
pub const fn elements_per_word(order: u32) -> u32 {
    64 >> order
}

/// Which word of a block holds an element, and which element of that word it is.
pub const fn locate(index_in_block: u64, order: u32) -> (usize, u32) {
    let per_word = elements_per_word(order) as u64;
    ((index_in_block / per_word) as usize, (index_in_block % per_word) as u32)
}

/// How far an element lies from its word's lowest bit.
const fn shift(index_in_word: u32, order: u32) -> u32 {
    let bits = 1 << order;
    if bits >= 8 {
        64 - bits * (index_in_word + 1)
    } else {
        // Bytes run from the word's top down, elements within a byte from its bottom up.
        let bit = index_in_word * bits;
        56 - (bit & !7) + (bit & 7)
    }
}

const fn mask(order: u32) -> u64 {
    u64::MAX >> (64 - (1 << order))
}

/// An element of a word.
pub const fn get(word: u64, index_in_word: u32, order: u32) -> u64 {
    word >> shift(index_in_word, order) & mask(order)
}

/// The word with an element replaced; of a value too wide only the low bits are kept.
pub const fn set(word: u64, index_in_word: u32, order: u32, value: u64) -> u64 {
    let (shift, mask) = (shift(index_in_word, order), mask(order));
    word & !(mask << shift) | (value & mask) << shift
}

/// An element of a block's bytes.
///
/// # Panics
/// If the block is shorter than that.
pub fn value_in_block(block: &[u8], index: u64, order: u32) -> u64 {
    let (word, index_in_word) = locate(index, order);
    let bytes = block[word * 8..][..8].try_into().expect("eight bytes");
    get(u64::from_be_bytes(bytes), index_in_word, order)
}

/// Replaces an element of a block's bytes; of a value too wide only the low bits are kept.
///
/// # Panics
/// If the block is shorter than that.
pub fn set_in_block(block: &mut [u8], index: u64, order: u32, value: u64) {
    let (word, index_in_word) = locate(index, order);
    let bytes: &mut [u8; 8] = (&mut block[word * 8..][..8]).try_into().expect("eight bytes");
    *bytes = set(u64::from_be_bytes(*bytes), index_in_word, order, value).to_be_bytes();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GEOMETRY: Geometry = Geometry { cluster_bits: 16, extended_l2: false, refcount_order: 4 };

    #[test]
    fn narrow_elements_start_in_the_low_bits_of_their_byte() {
        let mut block = vec![0; 16];
        set_in_block(&mut block, 0, 0, 1);
        set_in_block(&mut block, 9, 0, 1);
        assert_eq!(block[..2], [0x01, 0x02]);
        let mut block = vec![0; 16];
        set_in_block(&mut block, 1, 1, 3);
        set_in_block(&mut block, 4, 1, 2);
        assert_eq!(block[..2], [0x0c, 0x02]);
        let mut block = vec![0; 16];
        set_in_block(&mut block, 1, 2, 0xa);
        set_in_block(&mut block, 2, 2, 0x5);
        assert_eq!(block[..2], [0xa0, 0x05]);
    }

    #[test]
    fn wide_elements_are_big_endian() {
        for (order, bytes) in [
            (3, &[0, 0x34][..]),
            (4, &[0, 0, 0x12, 0x34]),
            (5, &[0, 0, 0, 0, 0, 0, 0x12, 0x34]),
            (6, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x12, 0x34]),
        ] {
            let mut block = vec![0; 16];
            set_in_block(&mut block, 1, order, 0x1234);
            assert_eq!(block[..bytes.len()], *bytes, "order {order}");
        }
    }

    #[test]
    fn each_rule_of_table_entries_refuses() {
        assert_eq!(decode_table_entry(0x20000, GEOMETRY), Ok(Some(HostOffset(0x20000))));
        assert_eq!(decode_table_entry(0, GEOMETRY), Ok(None));
        for (word, rule) in
            [(0x20001, "reserved"), (0x8000, "cluster size"), (1 << 63, "below 2^56")]
        {
            let error = decode_table_entry(word, GEOMETRY).unwrap_err();
            assert!(error.to_string().contains(rule), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_block_behaves_like_a_vector(
            order in 0u32..=6,
            changes in proptest::collection::vec((0u64..1 << 20, any::<u64>()), 1..64),
        ) {
            let mut block = vec![0u8; 512];
            let count = (512 * 8) >> order;
            let mut model = vec![0u64; count];
            for (index, value) in changes {
                let index = index % count as u64;
                set_in_block(&mut block, index, order, value);
                model[index as usize] = value & mask(order);
            }
            for (index, value) in model.iter().enumerate() {
                prop_assert_eq!(value_in_block(&block, index as u64, order), *value);
            }
        }
    }
}
