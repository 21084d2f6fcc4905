#!/usr/bin/env bash
# What a server may occupy: its configured caches, its memory for requests, and 64 MiB for everything
# else. A sparse disk of 1 TiB is read and written at random in 4 KiB requests by four clients at depth 32,
# so that hardly any request finds its table in the cache.
#
# Measured is the memory that is the process's own (RssAnon and RssShmem, sampled); VmHWM is held to the
# same bound after the pages that only map the program's file.
. "$(dirname "$0")/lib.sh"

l2_mib=16 refcount_mib=4 memory_mib=64
bound_kib=$(((l2_mib + refcount_mib + memory_mib + 64) * 1024))
seconds=$((20 * SCALE))

exec 3>&1
tell() { echo "     $*" >&3; echo "$*"; }

own_kib() { awk '/^Rss(Anon|Shmem):/ { sum += $2 } END { print sum }' "/proc/$1/status"; }
field_kib() { awk -v field="$2:" '$1 == field { print $2 }' "/proc/$1/status"; }

random_load() { # SOCKET
    fio --name=random --ioengine=nbd --uri="$(uri "$1")" --rw=randrw --bs=4k --iodepth=32 --numjobs=4 \
        --size=1T --norandommap --randrepeat=0 --time_based --runtime=$seconds --group_reporting \
        --output-format=terse >"$work/fio"
}

stays_bounded() { # CLUSTER_SIZE QUEUES
    local image=$work/disk.qcow2 sock=$work/sock peak=0 now
    qemu-img create -q -f qcow2 -o cluster_size="$1" "$image" 1T
    serve "$image" "$sock" --l2-cache-size ${l2_mib}M --refcount-cache-size ${refcount_mib}M \
        --memory ${memory_mib}M --queues "$2"
    random_load "$sock" &
    local load=$!
    while kill -0 $load 2>/dev/null; do
        now=$(own_kib "$server")
        [ "$now" -le $peak ] || peak=$now
        sleep 0.05
    done
    wait $load
    local high mapped
    high=$(field_kib "$server" VmHWM) mapped=$(field_kib "$server" RssFile)
    tell "own memory at its peak: $((peak / 1024)) MiB; VmHWM $((high / 1024)) MiB, of which the program's file" \
        "$((mapped / 1024)) MiB; bound $((bound_kib / 1024)) MiB; fio: $(grep ';' "$work/fio" | cut -d';' -f8,49 --output-delimiter=' + ') IOPS"
    [ $peak -le $bound_kib ]
    [ $((high - mapped)) -le $bound_kib ]
    stop_server
    clean "$image"
}

check "1 TiB at random, 64 KiB clusters, one queue" stays_bounded 64k 1
check "1 TiB at random, 64 KiB clusters, four queues" stays_bounded 64k 4
finish
