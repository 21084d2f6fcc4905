#!/bin/sh
# The guest's first process in tests/vm.sh: works on /dev/vda as `stillpoint.test=` on the kernel's
# command line says, says GUEST-OK or GUEST-FAILED on the console, and powers off.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod /modules/$module || echo "GUEST: no $module"; done </modules/order
test=$(sed -n 's/.*stillpoint.test=\([a-z-]*\).*/\1/p' /proc/cmdline)

verified() { # FILE SIZE [FIO-OPTION...]: random writes, read back and compared
    file=$1 size=$2
    shift 2
    fio --name=verified --filename="$file" --size="$size" --ioengine=libaio --direct=1 --iodepth=16 \
        --rw=randwrite --bsrange=4k-64k --verify=crc32c --do_verify=1 --verify_fatal=1 \
        --serialize_overlap=1 --randrepeat=0 --output-format=terse "$@"
}

run() {
    set -e
    mkfs.xfs -q -f /dev/vda
    mount -t xfs /dev/vda /mnt
    case $test in
    work)
        verified /mnt/file 24M
        dd if=/dev/urandom of=/mnt/random bs=64k count=64
        sha256sum /mnt/random >/mnt/sum
        ;;
    restart)
        # The host restarts the server at each of these lines. The rate makes a pass outlast it.
        dd if=/dev/urandom of=/mnt/random bs=64k count=64
        sha256sum /mnt/random >/mnt/sum
        sync
        for pass in 1 2 3; do
            echo "GUEST-RESTART $pass"
            verified /mnt/file$pass 8M --rate=,2M
        done
        ;;
    esac
    umount /mnt
    xfs_repair -n /dev/vda
    mount -t xfs /dev/vda /mnt
    (cd / && sha256sum -c /mnt/sum)
    rm /mnt/file*
    fstrim /mnt
    umount /mnt
    xfs_repair -n /dev/vda
}

(run)
if [ $? = 0 ] && ! dmesg | grep -E 'I/O error|Corruption|XFS.*(error|shut)'; then
    echo GUEST-OK
else
    echo GUEST-FAILED
fi
poweroff -f
