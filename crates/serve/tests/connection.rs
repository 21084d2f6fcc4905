//! Connections over a disk in memory: against a model, and against clients that mean no good.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use proptest::prelude::*;
use stillpoint_io::memory::Operation;
use stillpoint_io::{Access, Kind};
use stillpoint_serve::nbd::codec::{
    CONTEXT_ALLOCATION_ID, OptionHeader, PAYLOAD_BYTES_MAX, Request, command, command_flag, option,
    state_flag, transmission_flag,
};
use stillpoint_serve::nbd::connection::{Allowance, End};
use stillpoint_serve::nbd::errors::{NBD_EINVAL, NBD_EIO, NBD_ENOSPC, NBD_EPERM};
use stillpoint_serve::nbd::handshake::ReplyStyle;
use support::Served;

const STYLES: [ReplyStyle; 3] = [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended];
const SIZE: u64 = 1 << 20;
const MINUTE: Duration = Duration::from_secs(60);

/// Opens the export by hand and leaves the connection in its transmission phase, compact headers.
fn raw_transmission(served: &Served) -> UnixStream {
    let mut socket = served.socket();
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting).unwrap();
    socket.write_all(&3u32.to_be_bytes()).unwrap();
    let name = b"disk";
    let head = OptionHeader { option: option::EXPORT_NAME, length: name.len() as u32 };
    socket.write_all(&head.encode()).unwrap();
    socket.write_all(name).unwrap();
    socket.read_exact(&mut [0; 10]).unwrap();
    socket.set_read_timeout(Some(MINUTE)).unwrap();
    socket
}

fn compact(command: u16, cookie: u64, offset: u64, length: u64) -> [u8; 28] {
    Request { flags: 0, command, cookie, offset, length }.encode_compact()
}

#[derive(Clone, Debug)]
enum Op {
    Read { offset: u64, length: u64 },
    Write { offset: u64, length: u64, byte: u8, fua: bool },
    Zero { offset: u64, length: u64, no_hole: bool },
    Flush,
    Cache { offset: u64, length: u64 },
}

fn any_op() -> impl Strategy<Value = Op> {
    let range = (0..SIZE, prop_oneof![0..64u64, 0..5000u64, 0..200_000u64])
        .prop_map(|(offset, length)| (offset, length.min(SIZE - offset)));
    prop_oneof![
        range.clone().prop_map(|(offset, length)| Op::Read { offset, length }),
        (range.clone(), any::<u8>(), any::<bool>())
            .prop_map(|((offset, length), byte, fua)| Op::Write { offset, length, byte, fua }),
        (range.clone(), any::<bool>()).prop_map(|((offset, length), no_hole)| Op::Zero {
            offset,
            length,
            no_hole
        }),
        range.prop_map(|(offset, length)| Op::Cache { offset, length }),
        Just(Op::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_order_of_requests_equals_a_vector(ops in prop::collection::vec(any_op(), 1..60), style in 0usize..3) {
        let served = Served::new(SIZE);
        let mut client = served.client(STYLES[style]);
        let mut model = vec![0u8; SIZE as usize];
        for op in ops {
            match op {
                Op::Read { offset, length } => {
                    let data = client.read(offset, length as u32).unwrap();
                    prop_assert!(data == model[offset as usize..(offset + length) as usize]);
                }
                Op::Write { offset, length, byte, fua } => {
                    let data: Vec<u8> = (0..length).map(|index| byte.wrapping_add(index as u8)).collect();
                    client.write(offset, &data, if fua { command_flag::FUA } else { 0 }).unwrap();
                    model[offset as usize..(offset + length) as usize].copy_from_slice(&data);
                }
                Op::Zero { offset, length, no_hole } => {
                    let flags = if no_hole { command_flag::NO_HOLE } else { 0 };
                    client.call(command::WRITE_ZEROES, flags, offset, length, &[]).unwrap();
                    model[offset as usize..(offset + length) as usize].fill(0);
                }
                Op::Flush => client.flush().unwrap(),
                Op::Cache { offset, length } => {
                    client.call(command::CACHE, 0, offset, length, &[]).unwrap();
                }
            }
        }
        prop_assert!(client.read(0, SIZE as u32).unwrap() == model);
    }
}

#[test]
fn the_export_tells_what_it_can_do() {
    let served = Served::new(SIZE);
    let client = served.client(ReplyStyle::Structured);
    assert_eq!(client.size_bytes(), SIZE);
    let expected = transmission_flag::CAN_MULTI_CONN | transmission_flag::SEND_FAST_ZERO;
    assert_eq!(client.flags() & expected, expected);
    client.disconnect().unwrap();
    assert!(matches!(served.ends.recv_timeout(MINUTE).unwrap(), Ok(End::Disconnected)));
}

#[test]
fn many_requests_are_in_flight_and_answered_in_any_order() {
    let served = Served::new(SIZE);
    for style in STYLES {
        let mut client = served.client(style);
        served.file.hold(Some(Box::new(|operation| matches!(operation, Operation::Read { .. }))));
        let reads: Vec<u64> = (0..100)
            .map(|index| client.submit(command::READ, 0, index * 4096, 4096, &[]).unwrap())
            .collect();
        let held = wait_for_held(&served, 100);
        // A write that comes later overtakes them all.
        let write = client.submit(command::WRITE, 0, SIZE - 4096, 4096, &[7; 4096]).unwrap();
        assert_eq!(client.receive().unwrap().cookie, write);
        served.file.hold(None);
        held.iter().rev().for_each(|held| held.release());
        let mut answered: Vec<u64> =
            reads.iter().map(|_| client.receive().unwrap().cookie).collect();
        answered.sort_unstable();
        assert_eq!(answered, reads);
    }
}

fn wait_for_held(served: &Served, count: usize) -> Vec<stillpoint_io::memory::Held> {
    for _ in 0..6000 {
        let held = served.file.held();
        if held.len() >= count {
            return held;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("only {} of {count} operations reached the storage", served.file.held().len());
}

#[test]
fn bad_requests_are_answered_and_survived() {
    let served = Served::new(SIZE);
    for style in STYLES {
        let mut client = served.client(style);
        let mut error_of = |command, flags, offset, length, payload: &[u8]| {
            client.submit(command, flags, offset, length, payload).unwrap();
            client.receive().unwrap().error
        };
        assert_eq!(error_of(command::READ, 0, SIZE, 1, &[]), NBD_EINVAL);
        assert_eq!(error_of(command::READ, 0, 1 << 63, 512, &[]), NBD_EINVAL);
        assert_eq!(error_of(command::READ, 0, u64::MAX, 2, &[]), NBD_EINVAL);
        assert_eq!(error_of(command::WRITE, 0, SIZE - 1, 2, &[1, 2]), NBD_ENOSPC);
        assert_eq!(error_of(command::TRIM, 0, 1 << 63, 1 << 31, &[]), NBD_EINVAL);
        assert_eq!(error_of(command::READ, 0, 0, u64::from(u32::MAX), &[]), NBD_EINVAL);
        assert_eq!(error_of(99, 0, 0, 0, &[]), NBD_EINVAL);
        assert_eq!(error_of(command::READ, 1 << 15, 0, 512, &[]), NBD_EINVAL);
        let too_long = vec![1; PAYLOAD_BYTES_MAX as usize + 1];
        assert_eq!(error_of(command::WRITE, 0, 0, too_long.len() as u64, &too_long), NBD_EINVAL);
        assert_eq!(error_of(command::READ, 0, 0, 512, &[]), 0);
    }
}

#[test]
fn the_storages_failures_reach_the_client() {
    let served = Served::new(SIZE);
    for style in STYLES {
        let mut client = served.client(style);
        for (errno, expected) in [(5, NBD_EIO), (28, NBD_ENOSPC)] {
            let reads = |operation| matches!(operation, Operation::Read { .. });
            served.file.fail(Some((Box::new(reads), errno)));
            client.submit(command::READ, 0, 0, 4096, &[]).unwrap();
            assert_eq!(client.receive().unwrap().error, expected);
            served.file.fail(None);
            assert_eq!(client.read(0, 16).unwrap(), [0; 16]);
        }
    }
}

#[test]
fn a_read_only_disk_is_only_read() {
    let served = Served::with(SIZE, Access::Read, Allowance::default());
    let mut client = served.client(ReplyStyle::Structured);
    assert_ne!(client.flags() & transmission_flag::READ_ONLY, 0);
    client.submit(command::WRITE, 0, 0, 512, &[1; 512]).unwrap();
    assert_eq!(client.receive().unwrap().error, NBD_EPERM);
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
}

#[test]
fn block_status_follows_the_data() {
    let served = Served::new(SIZE);
    for style in [ReplyStyle::Structured, ReplyStyle::Extended] {
        let mut client = served.client(style);
        client.write(64 << 10, &[1; 64 << 10], 0).unwrap();
        let hole = u64::from(state_flag::HOLE | state_flag::ZERO);
        let of_allocation = |extents: Vec<stillpoint_serve::nbd::client::ContextExtent>| {
            let ours = extents.into_iter().filter(|one| one.context == CONTEXT_ALLOCATION_ID);
            ours.map(|one| (one.length, one.flags)).collect::<Vec<_>>()
        };
        let all = of_allocation(client.block_status(0, SIZE, 0).unwrap());
        assert_eq!(all, [(64 << 10, hole), (64 << 10, 0), (SIZE - (128 << 10), hole)]);
        let one = client.block_status(70_000, SIZE - 70_000, command_flag::REQ_ONE).unwrap();
        assert_eq!(of_allocation(one), [((128 << 10) - 70_000, 0)]);
        assert!(client.block_status(0, 0, 0).is_err());
    }
    assert!(served.client(ReplyStyle::Simple).block_status(0, SIZE, 0).is_err());
}

#[test]
fn extended_headers_carry_lengths_beyond_32_bits() {
    let size = 1u64 << 42;
    let served = Served::new(size);
    let mut client = served.client(ReplyStyle::Extended);
    client.write(size - 4096, &[9; 4096], 0).unwrap();
    let extents = client.block_status(0, size, 0).unwrap();
    let longest = extents.iter().map(|extent| extent.length).max();
    assert_eq!(longest.map(|length| length >= size - 4096), Some(true));
    client.call(command::WRITE_ZEROES, 0, 0, size, &[]).unwrap();
    assert_eq!(client.read(size - 4096, 4096).unwrap(), [0; 4096]);
    client.call(command::TRIM, 0, 0, size, &[]).unwrap();
}

#[test]
fn a_payload_where_none_belongs_is_skipped() {
    let served = Served::new(SIZE);
    let mut client = served.client(ReplyStyle::Extended);
    for command in [command::FLUSH, command::TRIM, command::BLOCK_STATUS, 77] {
        client.submit(command, command_flag::PAYLOAD_LEN, 0, 100_000, &[5; 100_000]).unwrap();
        assert_eq!(client.receive().unwrap().error, NBD_EINVAL);
    }
    assert_eq!(client.read(0, 8).unwrap(), [0; 8]);
}

#[test]
fn requests_in_flight_end_though_their_client_has_gone() {
    let served = Served::new(SIZE);
    served.file.hold(Some(Box::new(|_| true)));
    let mut client = served.client(ReplyStyle::Simple);
    for index in 0..50 {
        client.submit(command::WRITE, 0, index * 4096, 4096, &[1; 4096]).unwrap();
    }
    let held = wait_for_held(&served, 50);
    drop(client);
    assert!(served.ends.recv_timeout(Duration::from_millis(200)).is_err(), "it waits for them");
    served.file.hold(None);
    held.iter().for_each(|held| held.release());
    assert!(served.ends.recv_timeout(MINUTE).unwrap().is_ok());
    assert!(served.file.bytes()[..50 * 4096].iter().all(|&byte| byte == 1));
}

#[test]
fn a_client_that_reads_nothing_stops_only_itself() {
    let allowance = Allowance { in_flight_max: 16, ..Allowance::default() };
    let served = Served::with(SIZE, Access::Write, allowance);
    let mut greedy = raw_transmission(&served);
    // 300 MiB of answers asked for, none taken; requests beyond the bound stay in the socket.
    for cookie in 0..300 {
        greedy.write_all(&compact(command::READ, cookie, 0, SIZE)).unwrap();
    }
    let mut other = served.client(ReplyStyle::Structured);
    for _ in 0..100 {
        assert_eq!(other.read(4096, 4096).unwrap(), [0; 4096]);
    }
    // All answers are there once it wants them.
    let mut reply = vec![0; 16 + SIZE as usize];
    for _ in 0..300 {
        greedy.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    }
}

#[test]
fn flushes_without_end_do_not_pile_up_replies() {
    let served = Served::new(SIZE);
    let mut greedy = raw_transmission(&served);
    greedy.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let batch = compact(command::FLUSH, 1, 0, 0).repeat(1000);
    // The server stops reading long before 64 MiB of requests have gone through.
    let sent = (0..2400).take_while(|_| greedy.write_all(&batch).is_ok()).count();
    assert!(sent < 2400, "{sent} thousand unanswered requests were taken");
    assert_eq!(served.client(ReplyStyle::Simple).read(0, 1).unwrap(), [0]);
}

#[test]
fn a_stalled_negotiation_is_ended() {
    let handshake_time = Duration::from_millis(100);
    let allowance = Allowance { handshake_time, ..Allowance::default() };
    let served = Served::with(SIZE, Access::Write, allowance);
    let mut socket = served.socket();
    socket.write_all(&[0, 0, 0]).unwrap();
    let error = served.ends.recv_timeout(MINUTE).unwrap().unwrap_err();
    assert!(error.to_string().contains("in time"), "{error}");
    let mut rest = Vec::new();
    socket.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 18, "the greeting, and then the end");
}

#[test]
fn idling_in_transmission_is_allowed() {
    let short = Duration::from_millis(50);
    let allowance = Allowance { handshake_time: short, stall_time: short, ..Allowance::default() };
    let served = Served::with(SIZE, Access::Write, allowance);
    let mut client = served.client(ReplyStyle::Structured);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(client.read(0, 1).unwrap(), [0]);
}

#[test]
fn whoever_holds_memory_and_moves_nothing_is_put_out_when_others_need_it() {
    let allowance = Allowance { stall_time: Duration::from_millis(200), ..Allowance::default() };
    let served = Served::with(64 << 20, Access::Write, allowance);
    let longest = u64::from(PAYLOAD_BYTES_MAX);
    let mut stallers: Vec<UnixStream> = (0..2).map(|_| raw_transmission(&served)).collect();
    for staller in &mut stallers {
        staller.write_all(&compact(command::WRITE, 1, 0, longest)).unwrap();
        staller.write_all(&[1; 100]).unwrap();
    }
    // Nobody needs the memory: they may stay.
    assert!(served.ends.recv_timeout(Duration::from_millis(600)).is_err());
    let mut honest = served.client(ReplyStyle::Structured);
    assert_eq!(honest.read(0, PAYLOAD_BYTES_MAX).unwrap().len() as u64, longest);
    let error = served.ends.recv_timeout(MINUTE).unwrap().unwrap_err();
    assert!(error.to_string().contains("moves nothing"), "{error}");
}

#[test]
fn nonsense_in_transmission_ends_the_connection() {
    let served = Served::new(SIZE);
    for nonsense in [
        vec![0; 28],
        compact(command::WRITE, 1, 0, 512)[..20].to_vec(),
        [&compact(command::WRITE, 1, 0, 512)[..], &[1; 100]].concat(),
        compact(command::WRITE, 1, 0, u64::from(u32::MAX)).to_vec(),
    ] {
        let mut socket = raw_transmission(&served);
        socket.write_all(&nonsense).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let error = served.ends.recv_timeout(MINUTE).unwrap().unwrap_err();
        assert!(matches!(error.kind(), Kind::Invalid | Kind::Io), "{error}");
    }
    assert_eq!(served.file.bytes(), vec![0; SIZE as usize]);
}

#[test]
fn the_word_to_stop_ends_idle_connections_and_waits_for_requests() {
    let served = Served::new(SIZE);
    let idle = served.client(ReplyStyle::Structured);
    let mut busy = served.client(ReplyStyle::Structured);
    served.file.hold(Some(Box::new(|_| true)));
    busy.submit(command::WRITE, 0, 0, 4096, &[3; 4096]).unwrap();
    let held = wait_for_held(&served, 1);
    served.stop.say();
    assert!(matches!(served.ends.recv_timeout(MINUTE).unwrap(), Ok(End::Stopped)));
    assert!(served.ends.recv_timeout(Duration::from_millis(200)).is_err());
    served.file.hold(None);
    held.iter().for_each(|held| held.release());
    assert_eq!(busy.receive().unwrap().error, 0, "the answer still comes");
    assert!(matches!(served.ends.recv_timeout(MINUTE).unwrap(), Ok(End::Stopped)));
    drop(idle);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_bytes_in_transmission_do_no_harm(
        junk in prop::collection::vec(any::<u8>(), 0..2000),
        requests in prop::collection::vec((0u16..10, any::<u16>(), any::<u64>(), 0u64..100_000), 0..30),
    ) {
        let served = Served::new(SIZE);
        let mut socket = raw_transmission(&served);
        socket.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut bytes = Vec::new();
        for (command, flags, offset, length) in requests {
            let flags = flags & 0x3f;
            bytes.extend(Request { flags, command, cookie: 9, offset, length }.encode_compact());
        }
        bytes.extend(junk);
        let _ = socket.write_all(&bytes);
        drop(socket);
        // It ended, well or badly, and others are served.
        let _ = served.ends.recv_timeout(MINUTE).unwrap();
        prop_assert_eq!(served.client(ReplyStyle::Simple).read(0, 4).unwrap().len(), 4);
    }
}
