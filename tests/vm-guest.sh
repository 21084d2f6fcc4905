#!/usr/bin/env bash
# Builds what tests/vm.sh boots: Debian's cloud kernel, and an initramfs of busybox, fio, XFS's tools
# and the modules they need. Prints the folder with `vmlinuz` and `initramfs`; kept between runs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PATH="$PATH:/usr/sbin:/sbin"
cache=${VM_CACHE:-${CARGO_TARGET_DIR:-$here/../target}/vm}
mkdir -p "$cache"
cd "$cache"

# The kernel: the package that the metapackage depends on today.
if [ ! -f vmlinuz ]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '$1 == "Depends:" { print $2; exit }')
    [ -n "$package" ] || { echo "apt knows no linux-image-cloud-amd64: run apt-get update" >&2; exit 1; }
    rm -rf kernel && mkdir kernel
    (cd kernel && apt-get download -qq -o APT::Sandbox::User=root "$package" && dpkg -x ./*.deb . && rm ./*.deb)
    cp kernel/boot/vmlinuz-* vmlinuz
fi
version=$(basename kernel/lib/modules/*)

# The initramfs, again whenever one of its sources is newer.
if [ ! -f initramfs ] || [ "$here/vm-init.sh" -nt initramfs ] || [ "$here/vm-guest.sh" -nt initramfs ]; then
    rm -rf root && mkdir -p root/{bin,lib,proc,sys,dev,mnt,tmp,run,modules}
    cp "$(command -v busybox)" root/bin/busybox
    for applet in sh mount umount insmod mkdir cat echo sleep poweroff sync seq ls grep sed dmesg sha256sum dd; do
        ln -s busybox root/bin/$applet
    done
    for tool in fio mkfs.xfs xfs_repair fstrim blockdev; do
        path=$(command -v "$tool")
        cp "$path" root/bin/
        # "name => path" and the loader's own path
        ldd "$path" | grep -Eo '/[^ ]+' | sort -u | while read -r library; do
            mkdir -p "root$(dirname "$library")"
            cp -nL "$library" "root$library"
        done
    done
    depmod --basedir kernel "$version"
    for module in virtio_pci virtio_blk crc32c_generic xfs; do
        modprobe --dirname kernel --set-version "$version" --show-depends "$module" |
            awk '$1 == "insmod" { print $2 }'
    done | awk '!seen[$0]++' | while read -r file; do
        cp "$file" root/modules/
        basename "$file"
    done >root/modules/order
    cp "$here/vm-init.sh" root/init
    chmod +x root/init
    (cd root && find . | cpio --quiet -o -H newc) >initramfs.new
    mv initramfs.new initramfs
    rm -rf root
fi
pwd
