"""Judges what r3.sh observed; started by it.

    r3-verdict.py kernel TRACE DEVICE CLUSTERS
    r3-verdict.py strace LOG IMAGE CLUSTERS SIZE

The bounds: each cluster got one guest write of 4 KiB, so writing twice that in all leaves room for every
table and none for zero buffers; growth in steps of 16 MiB and more means one change of shape for at
least 256 clusters.
"""
import os
import re
import sys


def kernel(trace, device, clusters):
    """Each direct write to the file, and each change of its shape, as the kernel saw it begin.

    io_uring tries without waiting first and may begin again from a worker, so writes are counted once
    for each place."""
    on_device = re.compile(rf"dev {os.major(int(device))}[:,]{os.minor(int(device))} ")
    begin = re.compile(r"iomap_dio_rw_begin: .*size (0x\w+) offset (0x\w+) length (0x\w+) .* flags (\S+)")
    places, shapes, beyond = set(), 0, []
    for line in open(trace):
        if "entries-in-buffer" in line:
            kept, total = map(int, re.search(r"(\d+)/(\d+)", line).groups())
            assert kept == total, "the trace buffer overflowed"
        if not on_device.search(line):
            continue
        if found := begin.search(line):
            size, offset, length = (int(number, 16) for number in found.groups()[:3])
            if "WRITE" in found[4].split("|"):
                places.add((offset, length))
                if offset + length > size:
                    beyond.append(line.strip())
        else:
            shapes += 1
    return sum(length for _, length in places), len(places), shapes, beyond


def strace(log, image, clusters, size):
    """The same from system calls. The size counts from the moment a growth was asked for: generous by
    the time that it takes, and in the order in which strace saw the calls enter."""
    size, written, writes, shapes, beyond = int(size), 0, 0, 0, []
    file = f"<{image}>"
    for line in open(log):
        if file not in line:
            continue
        call = re.sub(r"^\d+ +", "", line)
        name = call.split("(")[0]
        places = []
        if name == "io_submit":
            for block in re.findall(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", call):
                if "CMD_PWRITE" not in block or file not in block:
                    continue
                offset = int(re.search(r"aio_offset=(\d+)", block)[1])
                whole = re.search(r"aio_nbytes=(\d+)", block)
                lengths = [int(n) for n in re.findall(r"iov_len=(\d+)", block)] or [int(whole[1])]
                places.append((offset, sum(lengths)))
        elif name == "pwrite64":
            length, offset = map(int, re.search(r", (\d+), (\d+)(?:\)| <unf)", call).groups())
            places.append((offset, length))
        elif name in ("pwritev", "pwritev2"):
            offset = int(re.search(r"\], \d+, (\d+)", call)[1])
            places.append((offset, sum(int(n) for n in re.findall(r"iov_len=(\d+)", call))))
        elif name == "ftruncate":
            shapes += 1
            size = int(re.search(r", (\d+)", call)[1])
        elif name == "fallocate":
            shapes += 1
            mode, offset, length = re.search(r">, ([^,]+), (\d+), (\d+)", call).groups()
            if "KEEP_SIZE" not in mode:
                size = max(size, int(offset) + int(length))
        else:
            raise AssertionError(f"a write to the image without an offset: {line}")
        for offset, length in places:
            writes += 1
            written += length
            if offset + length > size:
                beyond.append(f"end {size}: {line.strip()[:300]}")
    return written, writes, shapes, beyond


def main():
    witness = {"kernel": kernel, "strace": strace}[sys.argv[1]]
    clusters = int(sys.argv[4])
    written, writes, shapes, beyond = witness(*sys.argv[2:])
    print(f"{writes} writes of {written} bytes for {clusters} clusters, {shapes} changes of the file's shape, {len(beyond)} writes beyond its end")
    faults = []
    if writes < clusters:
        faults.append("the witness did not see the guest's writes")
    if beyond:
        faults.append(f"R3: writes beyond the end of the file, the first: {beyond[0]}")
    if written > 2 * 4096 * clusters:
        faults.append("zero buffers, or tables written over and over")
    if shapes > clusters // 256 + 4:
        faults.append("R9: the file's shape changes too often")
    if faults:
        sys.exit("\n".join(faults))


main()
