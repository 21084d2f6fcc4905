#!/usr/bin/env bash
# The NBD clients that people use, on our export: nbdinfo, nbdcopy, nbdsh, qemu-img, qemu-io.
. "$(dirname "$0")/lib.sh"

disk_mib=64

# start: an empty served disk of $disk_mib, and random data beside it, half of it holes.
start() {
    new_fs xfs 1G
    image=$fs/disk.qcow2 sock=$work/sock data=$work/data
    qemu-img create -q -f qcow2 "$image" ${disk_mib}M
    truncate -s ${disk_mib}M "$data"
    for i in $(seq 0 2 15); do
        dd if=/dev/urandom of="$data" bs=64K count=64 seek=$((i * 64)) conv=notrunc status=none
    done
    serve "$image" "$sock" "$@"
}

stop() {
    stop_server
    clean "$image"
}

nbdinfo_tells() {
    start
    [ "$(nbdinfo --size "$(uri "$sock")")" = $((disk_mib << 20)) ]
    nbdinfo --list "$(uri "$sock")" | tee /dev/stderr | grep -q "export-size: $((disk_mib << 20))"
    nbdinfo --json "$(uri "$sock")" | tee "$work/info" >&2
    "$PYTHON" - "$work/info" <<'PYTHON'
import json, sys
export = json.load(open(sys.argv[1]))["exports"][0]
for ability in "can_flush can_fua can_trim can_zero can_df can_multi_conn".split():
    assert export[ability], ability
assert not export["is_read_only"]
assert "base:allocation" in export["contexts"], export["contexts"]
minimum, preferred = export["block_size_minimum"], export["block_size_preferred"]
assert minimum & (minimum - 1) == 0 and minimum <= preferred, (minimum, preferred)
PYTHON
    qemu-io -f raw -c "write -q -P 7 1M 1M" "$(uri "$sock")"
    nbdinfo --map --json "$(uri "$sock")" >"$work/map"
    "$PYTHON" - "$work/map" <<'PYTHON'
import json, sys
runs = json.load(open(sys.argv[1]))
data = [(r["offset"], r["length"]) for r in runs if r["type"] & 1 == 0]
assert sum(length for _, length in data) == 1 << 20 and data[0][0] == 1 << 20, runs
assert sum(r["length"] for r in runs) == 64 << 20, runs
PYTHON
    stop
}

nbdcopy_both_ways() { # OPTION...
    start
    nbdcopy "$@" --flush "$data" "$(uri "$sock")"
    nbdcopy "$@" "$(uri "$sock")" "$work/back"
    cmp "$data" "$work/back"
    stop
    # Read by somebody else: what the server wrote is in the image.
    qemu-img compare -f raw -F qcow2 "$data" "$image"
}

nbdsh_drives() {
    start
    nbdsh -u "$(uri "$sock")" -c - <<'PYTHON'
import nbd
def pattern(seed, length):
    return bytes((seed + i * 7) & 0xff for i in range(length))
h.pwrite(pattern(1, 4096), 0)
h.pwrite(pattern(2, 70000), 12345)                      # unaligned, over a cluster's edge
assert h.pread(70000, 12345) == pattern(2, 70000)
assert h.pread(4096, 0) == pattern(1, 4096)
h.pwrite(pattern(3, 512), 1 << 20, nbd.CMD_FLAG_FUA)
h.zero(100, 12400)
want = bytearray(pattern(2, 70000)); want[55:155] = bytes(100)
assert h.pread(70000, 12345) == want
h.zero(1 << 20, 2 << 20, nbd.CMD_FLAG_NO_HOLE)
h.zero(1 << 20, 4 << 20, nbd.CMD_FLAG_FAST_ZERO)
h.trim(65536, 0)
assert h.pread(4096, 0) == bytes(4096)
h.flush()
size = h.get_size()
assert h.pread(1, size - 1) == b"\0"
for call in (lambda: h.pread(2, size - 1), lambda: h.pwrite(b"xx", size - 1)):
    h.set_strict_mode(0)
    try:
        call()
    except nbd.Error as error:
        assert error.errno in ("EINVAL", "ENOSPC"), error
    else:
        raise AssertionError("a request beyond the end was served")
assert h.pread(512, 1 << 20) == pattern(3, 512), "the connection outlives an error"
PYTHON
    stop
}

# What is promised with the multi-conn flag: a flush on one connection covers another's replies.
nbdsh_multi_conn() {
    start
    URI=$(uri "$sock") nbdsh -c - <<'PYTHON'
import os
other = nbd.NBD(); other.connect_uri(os.environ["URI"]); h.connect_uri(os.environ["URI"])
assert h.can_multi_conn()
for i in range(64):
    h.pwrite(bytes([i + 1]) * 4096, i * 65536)
    assert other.pread(4096, i * 65536) == bytes([i + 1]) * 4096
other.flush()
PYTHON
    kill_server # nothing but the other connection's flush has made it durable
    qemu-img check -q -f qcow2 "$image" || [ $? = 3 ]
    for i in 0 1 31 63; do
        qemu-io -r -f qcow2 -c "read -q -P $((i + 1)) $((i * 65536)) 4096" "$image"
    done
}

qemu_img_converts() {
    start
    qemu-img convert -n -f raw -O raw "$data" "$(uri "$sock")"
    qemu-img convert -f raw -O qcow2 "$(uri "$sock")" "$work/copy.qcow2"
    qemu-img compare -f raw -F qcow2 "$data" "$work/copy.qcow2"
    qemu-img map --output=json -f raw "$(uri "$sock")" | "$PYTHON" -c '
import json, sys
data = sum(r["length"] for r in json.load(sys.stdin) if r["data"])
assert data == 32 << 20, data'
    stop
    qemu-img compare -f raw -F qcow2 "$data" "$image"
}

qemu_io_works() {
    start
    qemu-io -f raw -d unmap "$(uri "$sock")" -c "write -P 1 0 1M" -c "write -P 2 512k 64k" \
        -c "write -z 256k 128k" -c "discard 128k 64k" -c "aio_write -P 3 2M 1M" -c "aio_write -P 4 3M 1M" \
        -c "aio_flush" -c "flush" -c "read -P 1 0 128k" -c "read -P 0 256k 128k" -c "read -P 2 512k 64k" \
        -c "read -P 3 2M 1M" -c "read -P 4 3M 1M" -c "writev -P 5 4M 4k 60k 4k" -c "read -P 5 4M 68k" \
        -c "write -f -P 6 5M 513" -c "read -P 6 5M 513"
    stop
    qemu-io -f qcow2 "$image" -c "read -P 1 0 128k" -c "read -P 0 256k 128k" -c "read -P 2 512k 64k" \
        -c "read -P 3 2M 1M" -c "read -P 4 3M 1M" -c "read -P 5 4M 68k" -c "read -P 6 5M 513"
}

for AIO in io_uring native threads; do
    check "nbdcopy in and out, aio $AIO" nbdcopy_both_ways --connections=4 --requests=64
done
AIO=io_uring
check "nbdcopy on one connection" nbdcopy_both_ways --connections=1
check "nbdcopy with blocks of 4 KiB" nbdcopy_both_ways --request-size=4096
check "nbdinfo" nbdinfo_tells
check "nbdsh" nbdsh_drives
check "nbdsh: a flush covers other connections" nbdsh_multi_conn
check "qemu-img convert and map" qemu_img_converts
check "qemu-io" qemu_io_works
finish
