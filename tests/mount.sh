#!/usr/bin/env bash
# A real file system on a served disk, through nbdfuse and a loop device: files keep their checksums
# over a remount, fstrim gives the host its space back, fsck and the image check are clean.
. "$(dirname "$0")/lib.sh"

files_mib=$((64 * SCALE))

# mount_disk: mounts $loop at $work/mnt
mount_disk() {
    mkdir -p "$work/mnt"
    mount "$loop" "$work/mnt"
    defer "mountpoint -q '$work/mnt' && umount '$work/mnt'"
}

used_kib() { du --block-size=1K "$1" | cut -f1; }

real_fs() { # FILE_SYSTEM AIO HOST_FILE_SYSTEM
    local kind=$1 host=$3
    AIO=$2
    new_fs "$host" $((512 + 3 * files_mib))M
    local image=$fs/disk.qcow2 sock=$work/sock
    qemu-img create -q -f qcow2 "$image" 1G
    serve "$image" "$sock"
    mkdir "$work/export"
    nbdfuse "$work/export/disk" --unix "$sock" &
    defer "fusermount3 -u -z '$work/export' 2>/dev/null"
    within 10 test -e "$work/export/disk"
    attach "$work/export/disk"
    format_device "$kind" "$loop"
    mount_disk
    mkdir "$work/mnt/tree"
    for i in $(seq 1 $((files_mib / 2))); do
        head -c 1M /dev/urandom >"$work/mnt/tree/random-$i"
        cp -r /usr/share/doc/fio "$work/mnt/tree/doc-$i"
        head -c 777777 /dev/urandom >"$work/mnt/tree/odd-$i"
    done
    (cd "$work/mnt/tree" && find . -type f -exec sha256sum {} +) >"$work/sums"
    umount "$work/mnt"

    mount_disk
    (cd "$work/mnt/tree" && sha256sum --quiet --check "$work/sums")
    local before after
    before=$(used_kib "$image")
    rm -r "$work"/mnt/tree/random-* "$work"/mnt/tree/odd-*
    # Again and again: XFS frees in the background what was removed, and the server gives freed space back
    # a moment later (R4).
    gave_back() {
        sync -f "$work/mnt"
        fstrim "$work/mnt"
        after=$(used_kib "$image")
        [ $((before - after)) -ge $((files_mib * 1024 / 3)) ]
    }
    within 20 gave_back || fail "fstrim gave back too little: $before KiB before, $after KiB after"
    grep -E 'doc-' "$work/sums" >"$work/sums.left"
    umount "$work/mnt"

    mount_disk
    (cd "$work/mnt/tree" && sha256sum --quiet --check "$work/sums.left")
    umount "$work/mnt"
    case $kind in
    xfs) xfs_repair -n "$loop" ;;
    ext4) e2fsck -f -n "$loop" ;;
    esac
    losetup --detach "$loop"
    fusermount3 -u "$work/export"
    stop_server
    clean "$image"
}

check "xfs on a disk on ext4, aio io_uring" real_fs xfs io_uring ext4
check "ext4 on a disk on xfs, aio io_uring" real_fs ext4 io_uring xfs
check "xfs on a disk on xfs, aio native" real_fs xfs native xfs
check "ext4 on a disk on ext4, aio threads" real_fs ext4 threads ext4
finish
