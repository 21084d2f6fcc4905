#!/usr/bin/env bash
# A virtual machine with its disk on our NBD export: mkfs, verified I/O, fsck, power-off, a clean image;
# and again with the server stopped, or killed, and started again while the guest writes.
#
# The guest is emulated (TCG), so this runs where KVM does not. A server that is *killed* owes the guest
# only what it was promised to be durable, so that guest has its write cache off: each write is a FUA.
. "$(dirname "$0")/lib.sh"

guest=$("$ROOT/tests/vm-guest.sh")

boot() { # TEST SOCKET WRITE-CACHE: starts the machine in the background, sets `machine`
    qemu-system-x86_64 -accel tcg,thread=multi -smp 2 -m 768 -nodefaults -no-reboot -display none \
        -kernel "$guest/vmlinuz" -initrd "$guest/initramfs" \
        -append "console=ttyS0 quiet panic=-1 mitigations=off stillpoint.test=$1" \
        -serial "file:$work/console" \
        -blockdev "driver=nbd,node-name=disk,server.type=unix,server.path=$2,reconnect-delay=60,discard=unmap" \
        -device "virtio-blk-pci,drive=disk,write-cache=$3,num-queues=2" &
    machine=$!
    defer "kill -KILL $machine 2>/dev/null; wait $machine 2>/dev/null; tail -n 30 '$work/console'"
}

said() { grep -q "$1" "$work/console"; }
said_or_ended() { said "$1" || ended "$machine"; }

power_off() {
    within 150 ended "$machine"
    wait "$machine"
    said GUEST-OK || fail "the guest failed"
}

works() { # AIO
    AIO=$1
    new_fs xfs 2G
    qemu-img create -q -f qcow2 "$fs/disk.qcow2" 1G
    serve "$fs/disk.qcow2" "$work/sock"
    boot work "$work/sock" on
    power_off
    stop_server
    clean "$fs/disk.qcow2"
}

restarts() { # stop|kill
    new_fs xfs 2G
    local image=$fs/disk.qcow2 sock=$work/sock write_cache=on
    [ "$1" = stop ] || write_cache=off
    qemu-img create -q -f qcow2 "$image" 1G
    serve "$image" "$sock"
    boot restart "$sock" $write_cache
    for pass in 1 2 3; do
        within 120 said_or_ended "GUEST-RESTART $pass"
        ended "$machine" && break
        sleep 1.5
        "${1}_server"
        [ "$1" = stop ] || [ "$STANDIN" != qemu ] || rm -f "$sock"
        sleep 0.5
        serve "$image" "$sock"
    done
    power_off
    stop_server
    if [ "$1" = stop ]; then
        clean "$image"
    else
        # What a kill may leave is leaked clusters, nothing worse.
        local status=0
        clean "$image" || status=$?
        [ $status = 0 ] || [ $status = 3 ] || fail "the image is damaged"
        qemu-img check -q -f qcow2 -r leaks "$image"
        clean "$image"
    fi
}

check "mkfs, fio, fsck, fstrim, power-off" works io_uring
check "the server stopped and restarted under load" restarts stop
check "the server killed and restarted under load" restarts kill
finish
