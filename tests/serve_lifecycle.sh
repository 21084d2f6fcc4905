#!/usr/bin/env bash
# A server's life: stopped, killed, started again, refused where somebody else is, out of space.
. "$(dirname "$0")/lib.sh"

# start FILE_SYSTEM SIZE [OPTION...]: a served empty disk of 1 GiB
start() {
    new_fs "$1" "$2"
    image=$fs/disk.qcow2 sock=$work/sock
    qemu-img create -q -f qcow2 "$image" 1G
    shift 2
    serve "$image" "$sock" "$@"
}

# refused PATTERN COMMAND...: fails in time and says something that matches
refused() {
    local pattern=$1 message
    shift
    message=$(fails timeout 20 "$@")
    echo "refused with: $message"
    [ -n "$message" ]
    grep -Eq -- "$pattern" <<<"$message" || fail "the message does not match: $pattern"
}

# only OURS: a pattern for our message; the stand-in may say what it likes
ours() { if [ "$STANDIN" = qemu ]; then echo .; else echo "$1"; fi; }

# Writes under load until the server goes away, and notes every write that was answered.
hammer() { # SOCKET ACKNOWLEDGED
    URI=$(uri "$1") NOTES=$2 nbdsh -c - <<'PYTHON'
import os, random
h.connect_uri(os.environ["URI"])
notes = open(os.environ["NOTES"], "w")
blocks = list(range(65536)); random.Random(1).shuffle(blocks)
print("hammering", flush=True)
def write(block):
    def answered(error):
        if error.value == 0:
            notes.write(f"{block}\n")
        return 1
    h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([block % 251 + 1]) * 4096), block * 16384, answered)
try:
    while blocks:
        while h.aio_in_flight() < 32 and blocks:
            write(blocks.pop())
        h.poll(-1)
except nbd.Error as gone:
    print("gone:", gone)
notes.close()
PYTHON
}

# Every answered write of `hammer` is in the image, by QEMU's word.
all_there() { # IMAGE ACKNOWLEDGED
    [ "$(wc -l <"$2")" -gt 100 ]
    awk '{ printf "read -q -P %d %d 4096\n", $1 % 251 + 1, $1 * 16384 }' "$2" | qemu-io -r -f qcow2 "$1" >"$work/reads" 2>&1
    if grep -i -m1 fail "$work/reads"; then return 1; fi
}

stops_cleanly() { # SIGNAL
    start xfs 2G
    hammer "$sock" "$work/acknowledged" >"$work/hammer" &
    local client=$!
    within 10 grep -q hammering "$work/hammer"
    sleep 0.4
    kill "-$1" "$server"
    local status=0
    wait "$server" || status=$?
    [ $status = 0 ] || fail "exit code $status"
    wait $client || true
    [ ! -e "$sock" ] || fail "the socket is left behind"
    clean "$image"
    all_there "$image" "$work/acknowledged"
}

restarts_after_kill() {
    start xfs 2G
    qemu-io -f raw -c "write -q -P 1 0 1M" -c "flush" "$(uri "$sock")"
    kill_server
    [ -S "$sock" ] || fail "a killed server cannot have removed its socket"
    [ "$STANDIN" != qemu ] || rm "$sock"
    serve "$image" "$sock"
    qemu-io -f raw -c "read -q -P 1 0 1M" -c "write -q -P 2 8M 1M" "$(uri "$sock")"
    stop_server
    # Leaked clusters are all that a kill may cost.
    local status=0
    clean "$image" || status=$?
    [ $status = 0 ] || [ $status = 3 ]
    qemu-io -r -f qcow2 -c "read -q -P 1 0 1M" -c "read -q -P 2 8M 1M" "$image"
}

refuses_live_socket() {
    start xfs 2G
    qemu-img create -q -f qcow2 "$fs/other.qcow2" 1M
    refused "$(ours "$sock")" "$ROOT/tests/server" "$fs/other.qcow2" "$sock"
    answers "$sock"
    [ "$(answers "$sock")" = $((1 << 30)) ]
}

refuses_second_writer() {
    start xfs 2G
    # The holder is named: by its process number, at least.
    refused "$(ours "$server")" "$ROOT/tests/server" "$image" "$work/other"
    refused "$(ours "$server")" "$ROOT/tests/server" "$image" "$work/other" --read-only
    refused lock qemu-nbd --socket="$work/other" --format=qcow2 "$image"
    refused lock qemu-io -f qcow2 -c "write 0 4k" "$image"
    refused lock qemu-img check -f qcow2 "$image"
    qemu-img info -U "$image"
    answers "$sock"
}

refuses_image_of_qemu() {
    new_fs xfs 1G
    local image=$fs/disk.qcow2
    qemu-img create -q -f qcow2 "$image" 1G
    qemu-nbd --persistent --socket="$work/sock" --format=qcow2 "$image" &
    local holder=$!
    defer "kill $holder; wait $holder"
    within 10 answers "$work/sock"
    refused "$(ours "$holder")" "$ROOT/tests/server" "$image" "$work/other"
    qemu-io -f raw -c "write -q 0 4k" "$(uri "$work/sock")"
}

shares_reading() {
    new_fs xfs 1G
    local image=$fs/disk.qcow2
    qemu-img create -q -f qcow2 "$image" 1G
    serve "$image" "$work/one" --read-only
    serve "$image" "$work/two" --read-only
    refused . "$ROOT/tests/server" "$image" "$work/three"
    qemu-img info "$image"
    refused . qemu-io -f raw -c "write 0 4k" "$(uri "$work/one")"
    # The backing file of a served overlay is held as well.
    qemu-img create -q -f qcow2 -b disk.qcow2 -F qcow2 "$fs/overlay.qcow2"
    serve "$fs/overlay.qcow2" "$work/four"
    refused . "$ROOT/tests/server" "$image" "$work/three"
}

survives_full_disk() { # FILE_SYSTEM
    start "$1" 400M
    fallocate -l 250M "$fs/ballast"
    URI=$(uri "$sock") BALLAST=$fs/ballast nbdsh -c - <<'PYTHON'
import os
h.connect_uri(os.environ["URI"])
def pattern(block):
    return bytes([block % 251 + 1]) * 1048576
written, block = [], 0
while True:
    assert block < 400, "never full"
    try:
        h.pwrite(pattern(block), block << 20)
    except nbd.Error as error:
        assert error.errno == "ENOSPC", error
        break
    written.append(block)
    block += 1
print(len(written), "MiB until it was full")
assert len(written) > 10
for known in written:
    assert h.pread(1048576, known << 20) == pattern(known), known
h.pwrite(pattern(7), 5 << 20)              # overwriting needs no space
os.unlink(os.environ["BALLAST"])
h.flush()
for more in range(block, block + 40):      # the guest goes on
    h.pwrite(pattern(more), more << 20)
h.flush()
for known in [*written, *range(block, block + 40)]:
    assert h.pread(1048576, known << 20) == pattern(7 if known == 5 else known), known
PYTHON
    stop_server
    clean "$image"
}

refuses_bad_input() {
    new_fs xfs 1G
    local server="$ROOT/tests/server"
    refused "$fs/absent.qcow2.*[Nn]o such file" "$server" "$fs/absent.qcow2" "$work/sock"
    qemu-img create -q -f qcow2 "$fs/base.qcow2" 1M
    qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 "$fs/orphan.qcow2"
    mv "$fs/base.qcow2" "$fs/moved.qcow2"
    refused "base.qcow2" "$server" "$fs/orphan.qcow2" "$work/sock"
    head -c 50 "$fs/moved.qcow2" >"$fs/short.qcow2"
    refused "$(ours short.qcow2)" "$server" "$fs/short.qcow2" "$work/sock"
    echo "not an image" >"$fs/text.qcow2"
    refused "$(ours text.qcow2)" "$server" "$fs/text.qcow2" "$work/sock"
    cmp "$fs/text.qcow2" <(echo "not an image")
    refused "$(ours "$work/none")" "$server" "$fs/moved.qcow2" "$work/none/sock"
    mount -o remount,ro "$fs"
    refused "$(ours '[Rr]ead-only')" "$server" "$fs/moved.qcow2" "$work/sock"
    serve "$fs/moved.qcow2" "$work/sock" --read-only
}

check "SIGTERM under load: all answered writes are there" stops_cleanly TERM
check "SIGINT under load: all answered writes are there" stops_cleanly INT
check "killed and restarted: the stale socket is reclaimed" restarts_after_kill
check "a live socket is refused" refuses_live_socket
check "a second writer is refused, ours or QEMU's" refuses_second_writer
check "an image held by QEMU is refused" refuses_image_of_qemu
check "readers share an image, a writer does not join them" shares_reading
check "a full disk, xfs" survives_full_disk xfs
check "a full disk, ext4" survives_full_disk ext4
check "bad input is refused by name" refuses_bad_input
finish
