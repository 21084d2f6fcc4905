#!/usr/bin/env bash
# F3: opening costs the same whatever the disk's size. A server's system calls on its image file, from its
# start to its clean end, are the same ones in the same number for 1 GiB and 10 TiB, and the bytes read
# differ by the L1 table alone; with nothing in the images, and with 64 MiB at scattered places.
#
# strace sees them because the server reads by `aio threads` here, through the page cache. A read that is
# first tried without waiting and then repeated on a thread (EAGAIN, EOPNOTSUPP) counts once.
. "$(dirname "$0")/lib.sh"

real=$STILLPOINT
exec 3>&1
tell() { echo "     $*" >&3; echo "$*"; }

# traced_life IMAGE NAME: serves it, stops it, and leaves its calls in $work/NAME.*, a file per thread.
traced_life() {
    cat >"$work/traced" <<END
#!/bin/sh
exec strace --daemonize=grandchild --follow-forks --output-separately --decode-fds=path --quiet=all --string-limit=1 \
    --output="$work/$2" "$real" "\$@"
END
    chmod +x "$work/traced"
    STILLPOINT=$work/traced AIO=threads
    serve "$1" "$work/$2.sock" --cache writeback
    stop_server
}

# calls IMAGE NAME: how often each call was made on the image; and, in the last line, the bytes read.
calls() {
    awk -v image="<$1>" '
        index($0, image) == 0 || /= -1 (EAGAIN|EOPNOTSUPP)/ { next }
        { call = $0; sub(/\(.*/, "", call); count[call]++ }
        call ~ /^p?read/ { bytes += $NF }
        END { for (call in count) print call, count[call] | "sort"; close("sort"); print "bytes", bytes + 0 }
    ' "$work/$2".[0-9]*
}

scattered() { # IMAGE SIZE_MIB: 64 MiB, a cluster each in 1024 places
    local place
    for ((place = 0; place < 1024; place++)); do
        echo "write -q -P 7 $((place * ($2 / 1024)))M 64k"
    done | qemu-io -f qcow2 "$1" >/dev/null
}

opens_alike() { # empty|filled
    local small=$work/small.qcow2 large=$work/large.qcow2
    qemu-img create -q -f qcow2 "$small" 1G
    qemu-img create -q -f qcow2 "$large" 10T
    if [ "$1" = filled ]; then
        scattered "$small" 1024
        scattered "$large" $((10 << 20))
    fi
    traced_life "$small" small
    traced_life "$large" large
    calls "$small" small >"$work/small.calls"
    calls "$large" large >"$work/large.calls"
    paste "$work/small.calls" "$work/large.calls"
    grep -q '^p\?read' "$work/small.calls" # or nothing was seen at all
    diff <(grep -v '^bytes' "$work/small.calls") <(grep -v '^bytes' "$work/large.calls")
    local more=$(($(awk '/^bytes/ { print $2 }' "$work/large.calls") - $(awk '/^bytes/ { print $2 }' "$work/small.calls")))
    # An L1 entry of 8 bytes maps 512 MiB.
    local l1=$((8 * (10 * 2048 - 2)))
    tell "$(awk '!/^bytes/ { sum += $2 } END { print sum }' "$work/small.calls") calls on either;" \
        "bytes read more: $more, the L1 tables' difference: $l1"
    [ $more = $l1 ]
    clean "$large"
}

check "empty images of 1 GiB and 10 TiB open by the same calls" opens_alike empty
check "images that hold 64 MiB each open by the same calls" opens_alike filled
finish
