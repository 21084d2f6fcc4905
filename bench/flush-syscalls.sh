#!/usr/bin/env bash
# flush-syscalls.sh 'SERVER COMMAND' IMAGE 'CREATE COMMAND' [N]: the system calls of a server for each pair of a
# 4 KiB write and a flush, by strace. Commands may name {img} and {sock}. io_uring's I/O shows as
# io_uring_enter only.
#
# MODE=over  writes into clusters that a first round has allocated (default: each write allocates)
# UNIT=65536 and UNITS=4096 say how far apart the writes are, and how many places there are
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
image=$2 count=${4:-200}
: "${MODE:=alloc}" "${UNIT:=65536}" "${UNITS:=4096}"
work=$(mktemp -d)
sock=$work/sock
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT

expand() { local text=${1//\{img\}/$image}; echo "${text//\{sock\}/$sock}"; }
rm -f "$image"
eval "$(expand "$3")"
PYTHONPATH=$here /usr/bin/python3 -c "
import contest
contest.scattered_writes('$work/iolog', $UNIT, $UNITS, $count, 3, flush=True)"
round() {
    fio --name=a --ioengine=nbd --uri="nbd+unix:///?socket=$sock" --read_iolog="$work/iolog" --iodepth=1 \
        --output-format=terse >/dev/null
}
eval "exec $(expand "$1")" &
server=$!
for _ in $(seq 100); do [ ! -S "$sock" ] || break; sleep 0.05; done
[ "$MODE" != over ] || round
strace -f -v -o "$work/strace" -p $server \
    -e trace=io_submit,fdatasync,fsync,fallocate,ftruncate,pwrite64,pwritev,pwritev2,preadv,pread64,io_uring_enter,sync_file_range \
    2>/dev/null &
tracer=$!
until grep -q "TracerPid:.$tracer" /proc/$server/status; do sleep 0.05; done
round
kill -INT $tracer
wait $tracer 2>/dev/null || true

echo "== for each write and flush (N=$count, MODE=$MODE): $1" | cut -c1-200
/usr/bin/python3 - "$count" "$work/strace" <<'PYTHON'
import collections, re, sys
count, calls = int(sys.argv[1]), collections.Counter()
for line in open(sys.argv[2]):
    found = re.match(r"\d+\s+(\w+)\(", line)
    if not found:
        continue
    calls[found[1]] += 1
    for operation in re.findall(r"IOCB_CMD_(\w+)", line):
        calls[f"  aio {operation}"] += 1
    if found[1] == "fallocate":
        mode = re.search(r"FALLOC_FL_\w+(\|FALLOC_FL_\w+)*", line)
        calls[f"  fallocate {mode[0] if mode else 0}"] += 1
for name, number in sorted(calls.items()):
    print(f"   {name:45} {number:6}  {number / count:.2f}")
PYTHON
