#!/usr/bin/python3
"""mkscatter.py OUT CLUSTER_SIZE COUNT [--in-order]: a qcow2 image with COUNT allocated clusters, in shuffled
host order (or as they come). The tables are real; the data is a hole, so that a large image takes little space."""
import array
import os
import random
import struct
import subprocess
import sys

OFFSET_MASK = 0x00FF_FFFF_FFFF_FE00  # of an L1 or L2 entry


def main():
    out, cluster_size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = f"cluster_size={cluster_size},preallocation=metadata"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", options, out, str(cluster_size * count)], check=True)
    if "--in-order" in sys.argv:
        return
    file = os.open(out, os.O_RDWR)
    header = os.pread(file, 104, 0)
    l1_size, l1_offset = struct.unpack(">I", header[36:40])[0], struct.unpack(">Q", header[40:48])[0]
    l1 = struct.unpack(f">{l1_size}Q", os.pread(file, 8 * l1_size, l1_offset))
    tables = [entry & OFFSET_MASK for entry in l1 if entry & OFFSET_MASK]
    entries = array.array("Q")
    for offset in tables:
        table = array.array("Q", os.pread(file, cluster_size, offset))
        table.byteswap()
        entries.extend(table)
    used = [index for index, entry in enumerate(entries) if entry]
    values = [entries[index] for index in used]
    random.Random(7).shuffle(values)
    for index, value in zip(used, values):
        entries[index] = value
    per_table = cluster_size // 8
    for number, offset in enumerate(tables):
        table = entries[number * per_table : (number + 1) * per_table]
        table.byteswap()
        os.pwrite(file, table.tobytes(), offset)
    os.fsync(file)


main()
