//! Each option's answers, and what hostile clients get.

use proptest::prelude::*;

use super::*;
use crate::nbd::codec::transmission_flag;
use crate::nbd::export::tests::listing;

const FIXED: u32 = handshake_flag::FIXED_NEWSTYLE as u32;
const NO_ZEROES: u32 = handshake_flag::NO_ZEROES as u32;

fn catalog(names: &[&str]) -> Catalog {
    let mut catalog = Catalog::new();
    for name in names {
        catalog.add(listing(name)).unwrap();
    }
    catalog
}

/// One negotiation, with whole options in and whole replies out.
struct Talk {
    catalog: Catalog,
    handshake: Handshake,
}

impl Talk {
    fn begin(names: &[&str], flags: u32) -> Talk {
        let mut greeting = Vec::new();
        let mut handshake = Handshake::begin(&mut greeting);
        assert_eq!(greeting, encode_greeting(3));
        let catalog = catalog(names);
        let mut output = Vec::new();
        let step = handshake.step(&catalog, &flags.to_be_bytes(), &mut output);
        assert_eq!(step, (4, Step::Again));
        Talk { catalog, handshake }
    }

    fn raw(&mut self, option: u32, data: &[u8]) -> (Vec<u8>, Step) {
        let header = OptionHeader { option, length: data.len() as u32 }.encode();
        let mut rest = &[&header[..], data].concat()[..];
        let mut output = Vec::new();
        loop {
            let (consumed, step) = self.handshake.step(&self.catalog, rest, &mut output);
            rest = &rest[consumed..];
            if rest.is_empty() || consumed == 0 {
                return (output, step);
            }
        }
    }

    /// The kinds and data of all replies to one option.
    fn ask(&mut self, option: u32, data: &[u8]) -> (Vec<(u32, Vec<u8>)>, Step) {
        let (output, step) = self.raw(option, data);
        let mut rest = &output[..];
        let mut replies = Vec::new();
        while let Some(head) = rest.first_chunk::<{ OptionReply::BYTES }>() {
            let head = OptionReply::decode(head).unwrap();
            assert_eq!(head.option, option);
            let (data, after) = rest[OptionReply::BYTES..].split_at(head.length as usize);
            replies.push((head.kind, data.to_vec()));
            rest = after;
        }
        assert!(rest.is_empty());
        (replies, step)
    }

    fn kinds(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        self.ask(option, data).0.into_iter().map(|(kind, _)| kind).collect()
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn go(name: &str, requests: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((requests.len() as u16).to_be_bytes());
    requests.iter().for_each(|request| data.extend(request.to_be_bytes()));
    data
}

fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(string(query)));
    data
}

#[test]
fn go_tells_size_flags_and_block_sizes_and_begins_transmission() {
    let mut talk = Talk::begin(&["disk"], FIXED | NO_ZEROES);
    assert_eq!(talk.kinds(option::STRUCTURED_REPLY, &[]), [option_reply::ACK]);
    let (replies, step) = talk.ask(option::GO, &go("disk", &[info::NAME, info::BLOCK_SIZE]));
    let expected = [
        (option_reply::INFO, b"\0\x01disk".to_vec()),
        (option_reply::INFO, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0".to_vec()),
        (option_reply::INFO, b"\0\0\0\0\0\0\0\x10\0\0\x0d\xed".to_vec()),
        (option_reply::ACK, vec![]),
    ];
    assert_eq!(replies, expected);
    let agreement =
        Agreement { export: 0, style: ReplyStyle::Structured, contexts: Contexts::default() };
    assert_eq!(step, Step::Ready(agreement));
}

#[test]
fn info_goes_on_negotiating_and_unknown_names_are_survived() {
    let mut talk = Talk::begin(&["a", "b"], FIXED);
    assert_eq!(talk.kinds(option::INFO, &go("c", &[])), [option_reply::ERR_UNKNOWN]);
    assert_eq!(talk.kinds(option::GO, &go("", &[])), [option_reply::ERR_UNKNOWN]);
    let info = talk.kinds(option::INFO, &go("b", &[99]));
    assert_eq!(info, [option_reply::INFO, option_reply::INFO, option_reply::ACK]);
    let (_, step) = talk.ask(option::GO, &go("b", &[]));
    assert!(matches!(step, Step::Ready(Agreement { export: 1, style: ReplyStyle::Simple, .. })));
}

#[test]
fn export_name_answers_without_a_reply_header() {
    for (flags, zeroes) in [(FIXED, 124), (FIXED | NO_ZEROES, 0), (0, 124)] {
        let mut talk = Talk::begin(&["disk"], flags);
        let (output, step) = talk.raw(option::EXPORT_NAME, b"");
        assert_eq!(output.len(), 10 + zeroes);
        assert_eq!(output[..8], (1u64 << 20).to_be_bytes());
        assert_eq!(u16_at(&output, 8) & transmission_flag::SEND_DF, 0);
        assert!(matches!(step, Step::Ready(Agreement { export: 0, .. })));
    }
    let mut talk = Talk::begin(&["disk"], FIXED);
    assert!(matches!(talk.raw(option::EXPORT_NAME, b"other").1, Step::Close(Some(_))));
}

#[test]
fn list_names_every_export() {
    let mut talk = Talk::begin(&["a", "bc"], FIXED);
    let (replies, _) = talk.ask(option::LIST, &[]);
    let expected = [
        (option_reply::SERVER, b"\0\0\0\x01a".to_vec()),
        (option_reply::SERVER, b"\0\0\0\x02bc".to_vec()),
        (option_reply::ACK, vec![]),
    ];
    assert_eq!(replies, expected);
    assert_eq!(talk.kinds(option::LIST, b"x"), [option_reply::ERR_INVALID]);
}

#[test]
fn what_the_server_lacks_is_refused_and_survived() {
    let mut talk = Talk::begin(&["disk"], FIXED);
    assert_eq!(talk.kinds(option::STARTTLS, &[]), [option_reply::ERR_POLICY]);
    assert_eq!(talk.kinds(option::STARTTLS, b"x"), [option_reply::ERR_INVALID]);
    for unknown in [0, 4, 12, u32::MAX] {
        assert_eq!(talk.kinds(unknown, b"data"), [option_reply::ERR_UNSUP]);
    }
    let (replies, step) = talk.ask(option::ABORT, &[]);
    assert_eq!((replies, step), (vec![(option_reply::ACK, vec![])], Step::Close(None)));
}

#[test]
fn reply_styles_only_go_up() {
    let mut talk = Talk::begin(&["disk"], FIXED);
    assert_eq!(talk.kinds(option::STRUCTURED_REPLY, b"x"), [option_reply::ERR_INVALID]);
    assert_eq!(talk.kinds(option::STRUCTURED_REPLY, &[]), [option_reply::ACK]);
    assert_eq!(talk.kinds(option::STRUCTURED_REPLY, &[]), [option_reply::ERR_INVALID]);
    assert_eq!(talk.kinds(option::EXTENDED_HEADERS, &[]), [option_reply::ACK]);
    assert_eq!(talk.kinds(option::EXTENDED_HEADERS, &[]), [option_reply::ERR_INVALID]);
    assert_eq!(talk.kinds(option::STRUCTURED_REPLY, &[]), [option_reply::ERR_EXT_HEADER_REQD]);
    assert!(matches!(talk.raw(option::EXPORT_NAME, b"disk").1, Step::Close(Some(_))));
}

#[test]
fn contexts_are_listed_by_namespace_and_selected_by_name() {
    let mut talk = Talk::begin(&["disk"], FIXED);
    let set = option::SET_META_CONTEXT;
    assert_eq!(talk.kinds(set, &meta("disk", &["base:allocation"])), [option_reply::ERR_INVALID]);
    talk.kinds(option::STRUCTURED_REPLY, &[]);

    let context = option_reply::META_CONTEXT;
    let list = option::LIST_META_CONTEXT;
    for (queries, count) in [
        (&[][..], 2),
        (&["base:"], 1),
        (&["qemu:"], 1),
        (&["base:allocation", "qemu:"], 2),
        (&["base:allocation", "base:allocation"], 1),
        (&["x-other:thing", "base", ""], 0),
    ] {
        let mut expected = vec![context; count];
        expected.push(option_reply::ACK);
        assert_eq!(talk.kinds(list, &meta("disk", queries)), expected, "{queries:?}");
    }
    assert_eq!(talk.kinds(list, &meta("other", &[])), [option_reply::ERR_UNKNOWN]);

    assert_eq!(talk.kinds(set, &meta("disk", &[])), [option_reply::ACK]);
    assert_eq!(talk.kinds(set, &meta("disk", &["base:"])), [option_reply::ACK]);
    let (replies, _) = talk.ask(set, &meta("disk", &["qemu:allocation-depth", "base:allocation"]));
    let expected = [
        (context, b"\0\0\0\0base:allocation".to_vec()),
        (context, b"\0\0\0\x01qemu:allocation-depth".to_vec()),
        (option_reply::ACK, vec![]),
    ];
    assert_eq!(replies, expected);
    // The nameless export is the same one: the selection counts.
    let (_, step) = talk.ask(option::GO, &go("", &[]));
    let Step::Ready(agreement) = step else { panic!("{step:?}") };
    assert_eq!(agreement.contexts, Contexts { allocation: true, depth: true });
}

#[test]
fn a_selection_for_another_export_or_followed_by_a_failure_does_not_count() {
    for second in [None, Some(meta("none", &["base:allocation"])), Some(meta("a", &[]))] {
        let mut talk = Talk::begin(&["a", "b"], FIXED);
        talk.kinds(option::STRUCTURED_REPLY, &[]);
        talk.kinds(option::SET_META_CONTEXT, &meta("a", &["base:allocation"]));
        let name = match second {
            Some(data) => {
                talk.kinds(option::SET_META_CONTEXT, &data);
                "a"
            }
            None => "b",
        };
        let (_, step) = talk.ask(option::GO, &go(name, &[]));
        let Step::Ready(agreement) = step else { panic!("{step:?}") };
        assert_eq!(agreement.contexts, Contexts::default());
    }
}

#[test]
fn malformed_data_is_refused_option_by_option() {
    let mut long_name = string("disk");
    long_name[..4].copy_from_slice(&5000u32.to_be_bytes());
    for (option, data, refusal) in [
        (option::GO, vec![], option_reply::ERR_INVALID),
        (option::GO, vec![0, 0, 0, 9, b'd'], option_reply::ERR_INVALID),
        (option::GO, vec![255; 4], option_reply::ERR_TOO_BIG),
        (option::GO, long_name, option_reply::ERR_TOO_BIG),
        (option::GO, string("disk"), option_reply::ERR_INVALID),
        (option::GO, [go("disk", &[1]), vec![0]].concat(), option_reply::ERR_INVALID),
        (option::INFO, [string("disk"), vec![255, 255]].concat(), option_reply::ERR_INVALID),
        (option::LIST_META_CONTEXT, string("disk"), option_reply::ERR_INVALID),
        (
            option::SET_META_CONTEXT,
            [string("disk"), vec![255; 4]].concat(),
            option_reply::ERR_INVALID,
        ),
        (
            option::SET_META_CONTEXT,
            [meta("disk", &["a"]), vec![0]].concat(),
            option_reply::ERR_INVALID,
        ),
        (option::LIST, vec![0; OPTION_BYTES_MAX + 1], option_reply::ERR_TOO_BIG),
    ] {
        let mut talk = Talk::begin(&["disk"], FIXED);
        talk.kinds(option::STRUCTURED_REPLY, &[]);
        assert_eq!(talk.kinds(option, &data), [refusal], "{option} {} bytes", data.len());
        assert_eq!(talk.kinds(option::LIST, &[]).len(), 2, "the negotiation goes on");
    }
}

#[test]
fn nonsense_ends_the_negotiation() {
    let mut output = Vec::new();
    let mut handshake = Handshake::begin(&mut output);
    let step = handshake.step(&catalog(&[]), &8u32.to_be_bytes(), &mut output);
    assert!(matches!(step, (4, Step::Close(Some(_)))));
    assert_eq!(handshake.step(&catalog(&[]), &[0; 64], &mut output), (0, Step::Close(None)));

    let mut talk = Talk::begin(&["disk"], FIXED);
    let step = talk.handshake.step(&talk.catalog, &[0; 16], &mut output);
    assert!(matches!(step, (0, Step::Close(Some(_)))));
    let mut talk = Talk::begin(&["disk"], 0);
    assert!(matches!(talk.raw(option::LIST, &[]).1, Step::Close(Some(_))));
}

/// Feeds `input` in pieces of `piece` bytes, as a server does; returns the output's length.
fn feed(input: &[u8], piece: usize) -> usize {
    let catalog = catalog(&["disk", "other"]);
    let mut output = Vec::new();
    let mut handshake = Handshake::begin(&mut output);
    let mut buffered = Vec::new();
    let mut output_bytes = 0;
    for part in input.chunks(piece) {
        buffered.extend_from_slice(part);
        loop {
            let (consumed, step) = handshake.step(&catalog, &buffered, &mut output);
            assert!(consumed <= buffered.len());
            buffered.drain(..consumed);
            output_bytes += std::mem::take(&mut output).len();
            match step {
                Step::Again => assert!(consumed > 0, "no progress"),
                Step::NeedMore => break,
                Step::Ready(_) | Step::Close(_) => return output_bytes,
            }
        }
        assert!(buffered.len() <= OPTION_BYTES_MAX + OptionHeader::BYTES + piece);
    }
    output_bytes
}

fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let data = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..64),
        Just(go("disk", &[0, 1, 2, 3])),
        Just(meta("disk", &["base:allocation", "qemu:"])),
        Just(vec![0; 70_000]),
    ];
    (0u32..14, data, any::<bool>()).prop_map(|(option, data, honest)| {
        let length = data.len() as u32 + if honest { 0 } else { 1000 };
        [&OptionHeader { option, length }.encode()[..], &data].concat()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn random_bytes_do_no_harm(input in prop::collection::vec(any::<u8>(), 0..4096), piece in 1usize..100) {
        feed(&input, piece);
        feed(&[&FIXED.to_be_bytes()[..], &input].concat(), piece);
    }

    #[test]
    fn random_options_do_no_harm_and_answers_do_not_depend_on_the_pieces(
        options in prop::collection::vec(any_option(), 0..8),
        flags in 0u32..4,
        piece in 1usize..5000,
    ) {
        let input = [&flags.to_be_bytes()[..], &options.concat()].concat();
        prop_assert_eq!(feed(&input, piece), feed(&input, 1 << 20));
    }
}
