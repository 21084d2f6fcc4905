#!/usr/bin/env bash
# Verified random writes through the server on three file systems, with and without a backing file,
# with each AIO engine: nothing may differ, and the image must be clean after a clean stop.
#
# Two connections write to disjoint areas at depth 32, in sizes of 512 B to 256 KiB (R1, R3, R5, R7).
. "$(dirname "$0")/lib.sh"

area_mib=$((8 * SCALE)) # of each connection

verified() { # FILE_SYSTEM AIO plain|backed
    local kind=$1 backing=$3
    AIO=$2
    new_fs "$kind" $((512 + 8 * area_mib))M
    local image=$fs/disk.qcow2 sock=$work/sock size_mib=$((3 * area_mib))
    if [ "$backing" = backed ]; then
        # Shorter than the overlay: one area straddles its end.
        qemu-img create -q -f qcow2 "$fs/base.qcow2" $((area_mib * 3 / 2))M
        qemu-io -f qcow2 -c "write -q -P 0xb5 0 $((area_mib * 3 / 2))M" "$fs/base.qcow2"
        qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 "$image" ${size_mib}M
    else
        qemu-img create -q -f qcow2 "$image" ${size_mib}M
    fi
    serve "$image" "$sock"
    # `serialize_overlap`: two writes in flight to one block have no order, so there is nothing to verify.
    fio --ioengine=nbd --uri="$(uri "$sock")" --thread --group_reporting --output-format=normal \
        --rw=randwrite --bsrange=512-256k --bs_unaligned --iodepth=32 --serialize_overlap=1 \
        --verify=crc32c --do_verify=1 --verify_fatal=1 --randrepeat=0 --loops=2 \
        --numjobs=2 --size=${area_mib}M --offset_increment=${area_mib}M --name=verified
    # What nobody wrote reads as before.
    qemu-io -f raw -c "read -q -P 0 $((2 * area_mib))M ${area_mib}M" "$(uri "$sock")"
    stop_server
    clean "$image"
}

for kind in xfs ext4 btrfs; do
    for aio in io_uring native threads; do
        for backing in plain backed; do
            check "fio verifies on $kind, aio $aio, $backing" verified $kind $aio $backing
        done
    done
done
finish
