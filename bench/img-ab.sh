#!/usr/bin/env bash
# img-ab.sh PASSES TOOL...: times the offline verbs of qemu-img and tools that take its options, interleaved.
# CSV: pass,tool,test,seconds,user,system,memory_kb
#
# DIR    a folder on the file system to measure; images are made there once
# TESTS  some of: r2q q2r r2qd r2qz r2qdW r2qzW r2q_def q2r_def (convert), check64 check4 map64 map4
#        snap64 snap4 (a million clusters of 64 or 4 KiB in shuffled order)
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
passes=$1
shift
: "${DIR:?a folder on the file system to measure}"
: "${TESTS:=r2q q2r r2qd r2qz r2qdW r2q_def q2r_def check64 check4 map64 map4 snap64 snap4}"
notes=$(mktemp -d)
trap 'rm -rf "$notes"' EXIT

[ -f "$DIR/src.raw" ] || "$here/mksrc.py" "$DIR/src.raw"
[ -f "$DIR/src.qcow2" ] || qemu-img convert -f raw -O qcow2 "$DIR/src.raw" "$DIR/src.qcow2"
for kib in 64 4; do
    case $TESTS in *check$kib* | *map$kib* | *snap$kib*)
        [ -f "$DIR/s$kib.qcow2" ] || "$here/mkscatter.py" "$DIR/s$kib.qcow2" $((kib * 1024)) 1048576 ;;
    esac
done

for pass in $(seq "$passes"); do for name in $TESTS; do for tool in "$@"; do
    out=$DIR/out.img
    rm -f "$out"
    read -ra tool_words <<<"$tool" # a tool may bring a subcommand: "stillpoint img"
    convert=("${tool_words[@]}" convert)
    case $name in
    r2q) command=("${convert[@]}" -f raw -O qcow2 -t none -T none "$DIR/src.raw" "$out") ;;
    r2q_def) command=("${convert[@]}" -f raw -O qcow2 "$DIR/src.raw" "$out") ;;
    q2r) command=("${convert[@]}" -f qcow2 -O raw -t none -T none "$DIR/src.qcow2" "$out") ;;
    q2r_def) command=("${convert[@]}" -f qcow2 -O raw "$DIR/src.qcow2" "$out") ;;
    r2qd) command=("${convert[@]}" -f raw -O qcow2 -c "$DIR/src.raw" "$out") ;;
    r2qdW) command=("${convert[@]}" -f raw -O qcow2 -c -W -m 16 "$DIR/src.raw" "$out") ;;
    r2qz) command=("${convert[@]}" -f raw -O qcow2 -c -o compression_type=zstd "$DIR/src.raw" "$out") ;;
    r2qzW) command=("${convert[@]}" -f raw -O qcow2 -c -W -m 16 -o compression_type=zstd "$DIR/src.raw" "$out") ;;
    check*) command=("${tool_words[@]}" check -f qcow2 "$DIR/s${name#check}.qcow2") ;;
    map*) command=("${tool_words[@]}" map --output=json -f qcow2 "$DIR/s${name#map}.qcow2") ;;
    snap*)
        cp --reflink=auto --sparse=always "$DIR/s${name#snap}.qcow2" "$out"
        command=("${tool_words[@]}" snapshot -c a "$out")
        ;;
    *) echo "no such test: $name" >&2 && exit 2 ;;
    esac
    sync -f "$DIR"
    nice -n -18 /usr/bin/time -o "$notes/time" -f '%e,%U,%S,%M' "${command[@]}" >"$notes/out" 2>"$notes/err" || {
        echo "exit $?: ${command[*]}: $(tail -n 3 "$notes/err")" >&2
        exit 1
    }
    echo "$pass,$(basename "${tool_words[0]}"),$name,$(tail -n 1 "$notes/time")"
done; done; done
