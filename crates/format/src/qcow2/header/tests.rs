//! Tests of the header: sample bytes, round trip, and one refusal per rule.

use proptest::prelude::*;

use super::*;
use crate::qcow2::features::standard_names;

/// `qemu-img create -f qcow2 -o cluster_size=512 a.qcow2 1M`.
const SAMPLE_V3: &[u8] = &[
    0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0,
    0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0,
    0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0x70,
];

/// `qemu-img create -f qcow2 -o compat=0.10 -b base.raw -F raw c.qcow2`, of 1 MiB.
const SAMPLE_V2: &[u8] = &[
    0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x60, 0, 0, 0, 8, 0, 0, 0, 0x10, 0, 0,
    0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0,
    0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, 3, b'r', b'a',
    b'w', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b'b', b'a', b's', b'e', b'.', b'r', b'a', b'w',
];

fn padded(bytes: &[u8], length: usize) -> Vec<u8> {
    let mut cluster = bytes.to_vec();
    cluster.resize(length, 0);
    cluster
}

fn plain() -> Header {
    Header {
        version: 3,
        backing_name: None,
        cluster_bits: 16,
        size: 1 << 30,
        crypt_method: CryptMethod::None,
        l1_entry_count: 2,
        l1_table_offset: HostOffset(0x30000),
        refcount_table_offset: HostOffset(0x10000),
        refcount_table_clusters: 1,
        snapshot_count: 0,
        snapshot_table_offset: HostOffset(0),
        incompatible: 0,
        compatible: 0,
        autoclear: 0,
        refcount_order: 4,
        compression_type: CompressionType::Zlib,
        unknown_fields: vec![0; 7],
        extensions: vec![Extension::FeatureNames(standard_names())],
    }
}

#[test]
fn sample_of_version_3() {
    let cluster = padded(SAMPLE_V3, 512);
    assert_eq!(probe(&cluster), Ok(Probe { version: 3, cluster_size: 512 }));
    let header = Header::decode(&cluster, Some(0x700)).unwrap();
    assert_eq!((header.size, header.l1_entry_count, header.length()), (1 << 20, 32, 0x70));
    assert_eq!(header.encode().unwrap(), cluster);
}

#[test]
fn sample_of_version_2() {
    let cluster = padded(SAMPLE_V2, 65536);
    let header = Header::decode(&cluster, Some(0x30008)).unwrap();
    assert_eq!(header.version, 2);
    assert_eq!(header.backing_name.as_deref(), Some("base.raw"));
    assert_eq!(header.backing_format(), Some("raw"));
    assert_eq!(header.geometry().refcount_bits(), 16);
    assert_eq!(header.encode().unwrap(), cluster[..512]);
}

/// A change to the plain header's bytes, and words of the refusal that it must bring.
type Case = (usize, Vec<u8>, &'static str);

fn u32_at(at: usize, value: u32, rule: &'static str) -> Case {
    (at, value.to_be_bytes().to_vec(), rule)
}

fn u64_at(at: usize, value: u64, rule: &'static str) -> Case {
    (at, value.to_be_bytes().to_vec(), rule)
}

#[test]
fn each_rule_refuses() {
    let good = padded(&plain().encode().unwrap(), 65536);
    let file_length = Some(0x40000);
    Header::decode(&good, file_length).unwrap();
    for (at, value, rule) in [
        (0, b"QFI\xfa".to_vec(), "magic"),
        u32_at(4, 1, "version 1"),
        u32_at(4, 4, "version 4"),
        u64_at(8, 90, "backing name"),
        u64_at(8, 65530, "backing name"),
        u64_at(8, u64::MAX, "backing name"),
        u32_at(20, 8, "cluster size"),
        u32_at(20, 22, "cluster size"),
        u32_at(20, u32::MAX, "cluster size"),
        u64_at(24, 1 << 63, "2^63"),
        u64_at(24, 2 << 30, "too small"),
        u32_at(32, 3, "encryption method 3"),
        u32_at(36, 1, "too small"),
        u32_at(36, (4 << 20) + 1, "32 MiB"),
        u64_at(40, 0x30200, "multiple of the cluster size"),
        u64_at(40, 0, "on the header"),
        u64_at(40, 1 << 56, "2^56"),
        u64_at(40, 0xffff_ffff_ffff_0000, "2^56"),
        u64_at(40, 0x40000, "inside the file"),
        u64_at(48, 0x10200, "multiple of the cluster size"),
        u64_at(48, 0, "on the header"),
        u64_at(48, 0x40000, "inside the file"),
        u32_at(56, 0, "needs a refcount table"),
        u32_at(56, 129, "8 MiB"),
        u32_at(60, 65537, "65536"),
        u32_at(60, 1, "on the header"),
        u64_at(64, 0x200, "multiple of the cluster size"),
        u64_at(72, INCOMPATIBLE_COMPRESSION, "exactly if the type is not zlib"),
        u64_at(88, AUTOCLEAR_DATA_FILE_RAW, "external data file"),
        u32_at(96, 7, "64 bits"),
        u32_at(100, 96, "header length"),
        u32_at(100, 108, "header length"),
        u32_at(100, 0x20000, "header length"),
        (104, vec![1], "exactly if the type is not zlib"),
        (104, vec![2], "compression type 2"),
        u32_at(116, 0x20000, "are there"),
    ] {
        let mut bytes = good.clone();
        if at == 8 {
            bytes[16..20].copy_from_slice(&10u32.to_be_bytes());
        }
        if rule == "inside the file" || at == 64 {
            bytes[60..64].copy_from_slice(&0u32.to_be_bytes());
        }
        bytes[at..at + value.len()].copy_from_slice(&value);
        let error = Header::decode(&bytes, file_length).unwrap_err();
        assert!(error.to_string().contains(rule), "byte {at}, {rule}: {error}");
        let unsupported = rule.contains("version ") || rule.ends_with(" 3") || rule.ends_with(" 2");
        assert_eq!(error.is_unsupported(), unsupported, "{error}");
    }
}

#[test]
fn extended_l2_needs_16_kib_clusters() {
    let mut header = Header { incompatible: INCOMPATIBLE_EXTENDED_L2, size: 1 << 20, ..plain() };
    header.cluster_bits = 14;
    header.encode().unwrap();
    header.cluster_bits = 13;
    assert!(header.encode().unwrap_err().to_string().contains("16 KiB"));
}

#[test]
fn backing_names_are_bounded() {
    let named = |name: &str| Header { backing_name: Some(name.to_owned()), ..plain() }.encode();
    named(&"n".repeat(1023)).unwrap();
    assert!(named(&"n".repeat(1024)).unwrap_err().to_string().contains("1023"));
    assert!(named("a\0b").unwrap_err().to_string().contains("NUL"));
    let mut bytes = padded(&named("base").unwrap(), 65536);
    let offset = u64::from_be_bytes(bytes[8..16].try_into().unwrap()) as usize;
    bytes[offset] = 0xff;
    assert!(Header::decode(&bytes, None).unwrap_err().is_unsupported());
}

#[test]
fn a_header_that_exceeds_its_cluster_is_refused() {
    let backing_name = Some("base".to_owned());
    let header = Header { cluster_bits: 9, size: 0, l1_entry_count: 0, backing_name, ..plain() };
    assert!(matches!(header.encode().unwrap_err(), Error::NoRoom { needed: 512.., room: 512, .. }));
}

#[test]
fn damaged_images_decode_for_repair() {
    let mut bytes = padded(&plain().encode().unwrap(), 65536);
    bytes[56..60].copy_from_slice(&0u32.to_be_bytes());
    Header::decode(&bytes, None).unwrap_err();
    assert_eq!(Header::decode_for_repair(&bytes).unwrap().refcount_table_clusters, 0);
}

#[test]
fn unknown_incompatible_bits_are_named() {
    let mut header = Header { incompatible: 1 << 5 | 1 << 40, ..plain() };
    let name = FeatureName::new(FeatureKind::Incompatible, 40, "journal\x1b");
    header.extensions.push(Extension::FeatureNames(vec![name]));
    header.extensions.remove(0);
    let names = header.unknown_incompatible();
    assert_eq!(names, ["Unknown incompatible feature: 20", "journal\\u{1b}"]);
    assert!(plain().unknown_incompatible().is_empty());
}

#[test]
fn bitmaps_are_checked_and_offered_only_when_consistent() {
    let bitmaps = |count, directory_size, directory_offset| {
        let directory_offset = HostOffset(directory_offset);
        Extension::Bitmaps(Bitmaps { count, directory_size, directory_offset })
    };
    let header =
        |autoclear, extension| Header { autoclear, extensions: vec![extension], ..plain() };
    for (count, size, offset) in [
        (0, 32, 0x40000),
        (65536, 2 << 20, 0x40000),
        (1, 23, 0x40000),
        (1, BITMAP_DIRECTORY_SIZE_MAX + 1, 0x40000),
        (1, 32, 0),
        (1, 32, 0x40200),
        (1, 32, 0xffff_ffff_ffff_0000),
    ] {
        let error = header(AUTOCLEAR_BITMAPS, bitmaps(count, size, offset)).encode().unwrap_err();
        assert!(error.to_string().contains("bitmaps extension"), "{error}");
        let stale = header(0, bitmaps(count, size, offset));
        stale.encode().unwrap();
        assert_eq!(stale.bitmaps(), None);
    }
    assert!(header(AUTOCLEAR_BITMAPS, bitmaps(1, 32, 0x40000)).bitmaps().is_some());
}

#[test]
fn a_truncated_first_cluster_is_refused() {
    let bytes = plain().encode().unwrap();
    for length in [0, 71, 72, 104, 512] {
        Header::decode(&bytes[..length.min(bytes.len())], None).unwrap_err();
    }
}

proptest! {
    #[test]
    fn round_trip(
        version in 2u32..=3,
        name in proptest::option::of("[a-z/.\u{e4}]{1,60}"),
        cluster_bits in 14u32..=21,
        size in 0u64..1 << 30,
        snapshot_count in 0u32..=65536,
        features: (bool, bool, bool),
        compatible: u64,
        refcount_order in 0u32..=6,
        unknown in proptest::collection::vec(any::<u8>(), 0..40),
        extension in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let (dirty, extended, zstd) = features;
        let mut header = Header {
            version,
            backing_name: name,
            cluster_bits,
            size,
            l1_table_offset: HostOffset(3 << 21),
            l1_entry_count: 8192,
            refcount_table_offset: HostOffset(1 << 21),
            snapshot_count,
            snapshot_table_offset: HostOffset(2 << 21),
            ..plain()
        };
        header.extensions.push(Extension::Unknown { kind: 0x7777, data: extension });
        if version == 3 {
            header.incompatible = u64::from(dirty) | u64::from(extended) << 4 | u64::from(zstd) << 3;
            header.compatible = compatible;
            header.refcount_order = refcount_order;
            if zstd {
                header.compression_type = CompressionType::Zstd;
            }
            header.unknown_fields = unknown;
            header.unknown_fields.resize((header.unknown_fields.len() / 8) * 8 + 7, 0);
        } else {
            header.unknown_fields.clear();
        }
        let cluster = padded(&header.encode().unwrap(), 1 << cluster_bits);
        prop_assert_eq!(Header::decode(&cluster, None), Ok(header));
    }

    #[test]
    fn no_bytes_make_it_panic(
        changes in proptest::collection::vec((0usize..600, any::<u8>()), 1..20),
    ) {
        let mut bytes = padded(&plain().encode().unwrap(), 65536);
        for (at, value) in changes {
            bytes[at] = value;
        }
        let _ = Header::decode(&bytes, Some(1 << 20)).map(|header| header.unknown_incompatible());
    }
}
