#!/usr/bin/env bash
# fast-fs.sh up DIR | down DIR: XFS (reflink) at DIR/x and ext4 at DIR/e, on loop devices over files in
# /dev/shm. The disk is then not the bottleneck, so that what software costs shows.
#
# S=size of each (default 100G): the files are sparse, only what is written takes memory.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"
: "${S:=100G}"
usage() { sed -n '2s/^# //p' "$0" >&2; exit 2; }
[ $# = 2 ] || usage
folder=$2 store=/dev/shm/fast-fs.$(printf '%s' "$2" | cksum | cut -d' ' -f1)

case $1 in
up)
    mkdir -p "$store" "$folder/x" "$folder/e"
    for name in x e; do
        truncate -s "$S" "$store/$name.img"
        loop=$(losetup --find --show --direct-io=on "$store/$name.img" 2>/dev/null ||
            losetup --find --show "$store/$name.img")
        echo "$loop" >"$store/$name.loop"
        case $name in
        x) mkfs.xfs -q -f -m reflink=1 "$loop" ;;
        # Few inodes, all tables written now: nothing goes on in the background later.
        e) mkfs.ext4 -q -F -i 1048576 -E lazy_itable_init=0,lazy_journal_init=0 "$loop" ;;
        esac
        mount "$loop" "$folder/$name"
    done
    ;;
down)
    for name in x e; do
        if mountpoint -q "$folder/$name"; then umount "$folder/$name"; fi
        if [ -f "$store/$name.loop" ]; then losetup --detach "$(cat "$store/$name.loop")"; fi
    done
    rm -rf "$store"
    ;;
*) usage ;;
esac
