# What the system tests share; sourced by each of them, never run.
#
# A test is a list of `check "what must hold" function [argument...]` and ends with `finish`. Each check
# runs in a subshell of its own with `set -e`: the first failing command fails it, and whatever it
# started or mounted is undone by `defer` in reverse order, however it ends. Its output is shown only
# when it fails. There is no skipping: a tool that is missing is a failing command.
#
# STILLPOINT     the binary under test (default: the debug build)
# STANDIN=qemu   puts qemu-nbd in its place, to test the tests
# TEST_DIR       where images and loop file systems live (default /dev/shm)
# SCALE          multiplies the amount of work (default 1)

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${STILLPOINT:=${CARGO_TARGET_DIR:-$ROOT/target}/debug/stillpoint}"
: "${STANDIN:=}" "${TEST_DIR:=/dev/shm}" "${SCALE:=1}"
PYTHON=/usr/bin/python3 # Debian's own: another Python in PATH lacks Debian's libnbd module
export STILLPOINT STANDIN TEST_DIR SCALE PATH="$PATH:/usr/sbin:/sbin"

test_name=$(basename "$0")
passed=0 failed=0

# --- undoing -----------------------------------------------------------------------------------

deferred=()
defer() { deferred+=("$*"); }
undo() {
    local i
    set +e
    for ((i = ${#deferred[@]} - 1; i >= 0; i--)); do eval "${deferred[i]}" || true; done
    deferred=()
}
trap undo EXIT
top=$(mktemp -d "$TEST_DIR/stillpoint-${test_name%.*}.XXXXXX")
defer "rm -rf '$top'"

# --- checks ------------------------------------------------------------------------------------

check() {
    local name=$1 status started=$SECONDS
    shift
    echo "$*" >"$top/log"
    # Not in a condition: `set -e` would not hold inside.
    set +e
    (
        set -e
        deferred=()
        trap undo EXIT
        work=$(mktemp -d "$top/check.XXXXXX")
        defer "rm -rf '$work'"
        "$@"
    ) >>"$top/log" 2>&1
    status=$?
    set -e
    if [ $status = 0 ]; then
        passed=$((passed + 1))
        echo "PASS $test_name: $name ($((SECONDS - started)) s)"
    else
        failed=$((failed + 1))
        echo "FAIL $test_name: $name (exit $status)"
        tail -n 40 "$top/log" | sed 's/^/     | /'
    fi
}

finish() {
    [ $((passed + failed)) -gt 0 ] || failed=1
    echo "$test_name: $passed passed, $failed failed"
    [ "$failed" = 0 ]
}

fail() { echo "$*" >&2; return 1; }

# fails COMMAND...: it must fail; what it said goes to standard output.
fails() {
    local status=0
    "$@" 2>&1 || status=$?
    [ $status != 0 ] || fail "should have failed: $*"
}

# within SECONDS COMMAND...: becomes true in time.
within() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || fail "not within the time: $*" || return 1
        sleep 0.05
    done
}

# --- the server --------------------------------------------------------------------------------

: "${AIO:=io_uring}" "${FORMAT:=qcow2}"
export AIO FORMAT

answers() { nbdinfo --size "nbd+unix:///?socket=$1"; }
ended() { ! kill -0 "$1" 2>/dev/null; }

# serve IMAGE SOCKET [OPTION...]: starts a server, waits until it answers, sets `server` (its process).
serve() {
    local sock=$2 deadline=$((SECONDS + 20))
    "$ROOT/tests/server" "$@" &
    server=$!
    # shellcheck disable=SC2154  # assigned where it is expanded
    defer "kill -KILL $server 2>/dev/null; wait $server 2>/dev/null"
    until answers "$sock" >/dev/null 2>&1; do
        kill -0 $server 2>/dev/null || fail "the server ended at once: serve $*" || return 1
        [ $SECONDS -lt $deadline ] || fail "the server does not answer: serve $*" || return 1
        sleep 0.05
    done
}

# stop_server: a clean stop, which must succeed.
stop_server() {
    local status=0
    kill -TERM "$server"
    wait "$server" || status=$?
    [ $status = 0 ] || fail "the server's exit code after SIGTERM is $status"
}

kill_server() {
    kill -KILL "$server"
    wait "$server" || true
}

# nbdsh starts the first python3 in PATH, which must be the one that has its module.
nbdsh() { PATH=$(dirname "$PYTHON"):$PATH command nbdsh "$@"; }

uri() { echo "nbd+unix:///?socket=$1"; }

# clean IMAGE: neither error nor leak, by qemu-img's word.
clean() { qemu-img check -f qcow2 "$1"; }

# --- file systems ------------------------------------------------------------------------------

# attach FILE: sets `loop` to a loop device over it.
attach() {
    loop=$(losetup --find --show --direct-io=on "$1" 2>/dev/null || losetup --find --show "$1")
    defer "losetup --detach $loop"
}

format_device() { # xfs|ext4|btrfs DEVICE
    case $1 in
    xfs) mkfs.xfs -q -f -m reflink=1 "$2" ;;
    ext4) mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 "$2" ;;
    btrfs) mkfs.btrfs -q -f "$2" ;;
    *) fail "no such file system: $1" ;;
    esac
}

# new_fs xfs|ext4|btrfs SIZE: a fresh file system on a loop device; sets `fs` to where it is mounted.
new_fs() {
    fs=$(mktemp -d "$work/$1.XXXXXX")
    truncate -s "$2" "$fs.img"
    attach "$fs.img"
    format_device "$1" "$loop"
    mount "$loop" "$fs"
    defer "umount '$fs' || umount --lazy '$fs'"
}
