#!/usr/bin/env bash
# R3 and R9 by observation: while clusters are being allocated, no write goes beyond the end of the file,
# nothing is zeroed or grown per cluster, and no zero buffers are written.
#
# Two witnesses. The kernel's trace point `iomap_dio_rw_begin` tells offset, length and the file's size
# at the start of each asynchronous direct write, by io_uring (which strace cannot see) or Linux AIO.
# strace tells what a server asked for where it asks by system calls (native, threads).
. "$(dirname "$0")/lib.sh"

clusters=$((2048 * SCALE))
tracing=/sys/kernel/tracing
mountpoint -q $tracing || mount -t tracefs nodev $tracing

allocate() { # SOCKET: one 4 KiB write into each cluster, at depth 32
    fio --name=allocate --ioengine=nbd --uri="$(uri "$1")" --rw=write:60k --bs=4k --iodepth=32 \
        --size=$((clusters * 64))k --io_size=$((clusters * 4))k --buffer_pattern=0x5a --end_fsync=1 \
        --randrepeat=0 --output-format=terse >/dev/null
}

# Removes the trace instance, whatever it is doing.
forget_trace() {
    echo 0 >"$1/tracing_on"
    echo 0 >"$1/events/enable"
    rmdir "$1"
}

witnessed_by_kernel() { # FILE_SYSTEM AIO
    local image sock=$work/sock trace=$tracing/instances/stillpoint-$$-$RANDOM
    AIO=$2
    new_fs "$1" 2G
    image=$fs/disk.qcow2
    qemu-img create -q -f qcow2 "$image" $((clusters * 64))K
    mkdir "$trace"
    defer "forget_trace $trace"
    echo 16384 >"$trace/buffer_size_kb"
    echo "ino == $(stat -c %i "$image")" >"$trace/events/iomap/iomap_dio_rw_begin/filter"
    echo 1 >"$trace/events/iomap/iomap_dio_rw_begin/enable"
    case $1 in # what changes the shape of a file
    xfs) for event in xfs_alloc_file_space xfs_free_file_space xfs_zero_file_space; do
        echo 1 >"$trace/events/xfs/$event/enable"
    done ;;
    ext4) for event in ext4_fallocate_enter ext4_punch_hole ext4_zero_range; do
        echo 1 >"$trace/events/ext4/$event/enable"
    done ;;
    esac
    serve "$image" "$sock"
    allocate "$sock"
    stop_server
    echo 0 >"$trace/tracing_on"
    "$PYTHON" "$ROOT/tests/r3-verdict.py" kernel "$trace/trace" "$(stat -c %d "$image")" $clusters
}

witnessed_by_strace() { # FILE_SYSTEM AIO
    local image sock=$work/sock
    AIO=$2
    new_fs "$1" 2G
    image=$fs/disk.qcow2
    qemu-img create -q -f qcow2 "$image" $((clusters * 64))K
    local size
    size=$(stat -c %s "$image")
    serve "$image" "$sock"
    strace --follow-forks --decode-fds=path --no-abbrev --string-limit=1 --output="$work/strace" \
        --trace=io_submit,pwrite64,pwritev,pwritev2,write,writev,fallocate,ftruncate --attach="$server" &
    tracer=$!
    within 10 grep -q TracerPid:.$tracer "/proc/$server/status"
    allocate "$sock"
    kill -INT $tracer
    wait $tracer || true
    stop_server
    "$PYTHON" "$ROOT/tests/r3-verdict.py" strace "$work/strace" "$image" $clusters "$size"
}

for kind in xfs ext4; do
    for aio in io_uring native; do
        check "the kernel's trace on $kind, aio $aio" witnessed_by_kernel $kind $aio
    done
    for aio in native threads; do
        check "strace on $kind, aio $aio" witnessed_by_strace $kind $aio
    done
done
finish
