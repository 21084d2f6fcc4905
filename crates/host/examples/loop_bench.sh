#!/bin/bash
# loop_bench.sh [DIR] : CPU per 4 KiB random read at depth 32, ours beside fio with the same engine.
# With DIR, measures there; without, mounts XFS and ext4 on loop devices over /dev/shm (root) and
# takes them down afterwards. PASSES interleaved passes (default 5); prints medians and ratios.
set -euo pipefail
cd "$(dirname "$0")/../../.."
passes=${PASSES:-5} count=${COUNT:-300000}
cargo build -q --release -p stillpoint-host --example loop_bench
bench=${CARGO_TARGET_DIR:-target}/release/examples/loop_bench
work=$(mktemp -d)
loops=()
cleanup() {
    for dir in "$work"/xfs "$work"/ext4; do mountpoint -q "$dir" && umount "$dir"; done
    for loop in "${loops[@]}"; do losetup -d "$loop"; done
    rm -rf "$work" /dev/shm/stillpoint-loop-bench
}
trap cleanup EXIT
dirs=("$@")
if [ $# = 0 ]; then
    mkdir -p /dev/shm/stillpoint-loop-bench
    for fs in xfs ext4; do
        image=/dev/shm/stillpoint-loop-bench/$fs.img
        truncate -s 2G "$image"
        loop=$(losetup --find --show --direct-io=on "$image" 2>/dev/null || losetup --find --show "$image")
        loops+=("$loop")
        mkfs.$fs -q "$loop"
        mkdir "$work/$fs"
        mount "$loop" "$work/$fs"
        dirs+=("$work/$fs")
    done
fi
for dir in "${dirs[@]}"; do
    file=$dir/loop-bench.img
    fio --name=prepare --filename="$file" --size=1G --rw=write --bs=1M --end_fsync=1 >/dev/null
    for aio in io_uring native threads; do
        case $aio in native) engine=libaio;; threads) engine=psync;; *) engine=$aio;; esac
        for pass in $(seq "$passes"); do
            "$bench" "$file" aio=$aio count="$count" | sed "s/^.*: \([0-9]*\) ns.*, \([0-9]*\) IOPS/ours \1 \2/"
            if [ $engine = psync ]; then jobs="--numjobs=32 --thread --iodepth=1"; else jobs="--iodepth=32"; fi
            fio --name=a --filename="$file" --size=1G --rw=randread --bs=4k --direct=1 --ioengine=$engine $jobs \
                --iodepth_batch_complete_min=1 --iodepth_batch=32 --iodepth_low=1 \
                --iodepth_batch_complete_max=32 --number_ios=$count --runtime=5s --time_based=0 --group_reporting \
                --norandommap --randrepeat=0 --gtod_reduce=1 --output-format=json > "$work/fio.json"
            python3 - "$work/fio.json" <<'P'
import json, sys
j = json.load(open(sys.argv[1]))['jobs'][0]
n = j['read']['total_ios']; cpu = (j['usr_cpu'] + j['sys_cpu']) / 100 * j['job_runtime'] * 1e6
print('fio', round(cpu / n), round(j['read']['iops']))
P
        done | python3 -c "
import sys, statistics as st
rows = {}
for line in sys.stdin:
    who, ns, iops = line.split(); rows.setdefault(who, []).append((float(ns), float(iops)))
m = {w: (st.median(r[0] for r in v), st.median(r[1] for r in v)) for w, v in rows.items()}
o, f = m['ours'], m['fio']
print(f'$(basename "$dir") $aio: ours {o[0]:.0f} ns {o[1]:.0f} IOPS, fio {f[0]:.0f} ns {f[1]:.0f} IOPS, CPU ratio {o[0]/f[0]:.2f}, IOPS ratio {o[1]/f[1]:.2f}')"
    done
    rm -f "$file"
done
