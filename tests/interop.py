#!/usr/bin/python3
"""Images go both ways between QEMU and the server under test, against an oracle kept here.

Made by qemu-img and qemu-io, read through the server: each case below must read as the bytes that
were written, by this program's account, never by a program's own reads.

Written through the server, read by qemu-img: random requests, unaligned, to neighbouring and
overlapping ranges, from several connections at once. Afterwards the image must hold, byte for byte, a
value that R1 allows; internal snapshots in it are unchanged; `qemu-img check` finds nothing.

    interop.py [--operations N] [--seeds N] [--first-seed N]

The figure that a release must show: --operations 10000 --seeds 100. A failing seed is printed and
runs again alone with `--seeds 1 --first-seed SEED`.
"""
import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import nbd

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
os.environ.setdefault(
    "STILLPOINT",
    os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "debug/stillpoint"),
)
KIB, MIB = 1 << 10, 1 << 20
# QEMU 10.0's qcow2 frees and reuses a cluster that a write in flight still goes to, when a discard or an
# unmapping zeroing of it runs beside that write; as a stand-in it gets neither. Ours gets both (R4).
SPARE_DISCARDS = os.environ.get("STANDIN") == "qemu"


def run(*command, ok=(0,)):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode not in ok:
        raise AssertionError(f"{' '.join(map(str, command))[:300]}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Server:
    """The server under test on one image; leaving the block stops it cleanly."""

    def __init__(self, folder, image, *options, aio="io_uring"):
        self.sock = os.path.join(folder, "sock")
        self.log = open(os.path.join(folder, "server.log"), "w+")
        self.process = subprocess.Popen(
            [os.path.join(HERE, "server"), image, self.sock, *options],
            env={**os.environ, "AIO": aio, "FORMAT": "qcow2"},
            stdout=self.log,
            stderr=self.log,
        )

    def said(self):
        self.log.seek(0)
        return self.log.read()[-2000:]

    def connect(self):
        deadline = time.monotonic() + 20
        while True:
            try:
                handle = nbd.NBD()
                handle.connect_unix(self.sock)
                return handle
            except nbd.Error as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the server does not answer: {self.said()}") from error
                time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.process.send_signal(signal.SIGTERM)
            status = self.process.wait(60)
            assert status == 0, f"exit {status} after SIGTERM: {self.said()}"
        else:
            self.process.kill()
            self.process.wait()


# --- made by QEMU, read by the server ------------------------------------------------------------


class Image:
    """A qcow2 image made by QEMU, with the bytes that it must read as."""

    def __init__(self, folder, name, size, options="", backing=None, backing_format="qcow2", seed=0):
        self.path = os.path.join(folder, name)
        self.folder = folder
        self.random = random.Random(seed)
        self.snapshots = {}
        self.bytes = bytearray(size)
        command = ["qemu-img", "create", "-q", "-f", "qcow2"]
        if options:
            command += ["-o", options]
        if backing:
            command += ["-b", backing.path, "-F", backing_format]
            known = min(size, len(backing.bytes))
            self.bytes[:known] = backing.bytes[:known]
        run(*command, self.path, size)
        self.cluster = json.loads(run("qemu-img", "info", "--output=json", "-U", self.path))["cluster-size"]
        self.commands = []
        self.touched = set()  # clusters; QEMU compresses into untouched ones only

    def content(self, length):
        """Random bytes, or a text-like pattern that compresses; in a file for qemu-io's `write -s`."""
        if self.random.random() < 0.5:
            data = self.random.randbytes(length)
        else:
            unit = self.random.randbytes(self.random.randrange(3, 200))
            data = (unit * (length // len(unit) + 1))[:length]
        path = os.path.join(self.folder, f"content-{len(self.commands)}")
        with open(path, "wb") as file:
            file.write(data)
        return path, data

    def put(self, offset, data):
        self.bytes[offset : offset + len(data)] = data
        self.touched.update(range(offset // self.cluster, (offset + len(data) - 1) // self.cluster + 1))

    def write(self, offset, length):
        path, data = self.content(length)
        self.commands.append(f"write -q -s {path} {offset} {length}")
        self.put(offset, data)

    def write_compressed(self, cluster_index):
        offset = cluster_index * self.cluster
        length = min(self.cluster, len(self.bytes) - offset)
        path, data = self.content(length)
        self.commands.append(f"write -q -c -s {path} {offset} {length}")
        self.put(offset, data)

    def zero(self, offset, length, unmap):
        self.commands.append(f"write -q -z {'-u ' if unmap else ''}{offset} {length}")
        self.put(offset, bytes(length))

    def apply(self):
        """Lets qemu-io do what was asked for since the last time."""
        if self.commands:
            words = [word for command in self.commands for word in ("-c", command)]
            run("qemu-io", "-f", "qcow2", "-d", "unmap", *words, self.path)
            self.commands = []

    def snapshot(self, name):
        self.apply()
        run("qemu-img", "snapshot", "-q", "-c", name, self.path)
        self.snapshots[name] = bytes(self.bytes)

    def fill(self, count=60, compressed=False):
        """Random writes and zeroes, of clusters and parts of them, leaving gaps."""
        size, cluster = len(self.bytes), self.cluster
        if compressed:
            # Before and apart from what may free such a cluster: within one process QEMU 10.0 goes on
            # filling up a host cluster of compressed data that was freed and given to somebody else.
            self.write_compressed((size - 1) // cluster)  # the one that ends with the disk
            for _ in range(count // 2):
                index = self.random.randrange(size) // cluster
                if index not in self.touched:
                    self.write_compressed(index)
            self.apply()
        for _ in range(count):
            offset = self.random.randrange(size)
            if self.random.random() < 0.5:
                offset -= offset % cluster
            length = self.random.choice([512, cluster, 3 * cluster, self.random.randrange(1, 5 * cluster)])
            length = min(length, size - offset, 4 * MIB)
            if self.random.random() < 0.6:
                self.write(offset, length)
            else:
                self.zero(offset, length, unmap=self.random.random() < 0.5)
        self.apply()
        return self


def differs_at(got, want):
    return next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))


def expect_equal(got, want, start, what):
    if got != want:
        at = differs_at(got, want)
        raise AssertionError(f"{what}: byte {start + at:#x} is {bytes(got[at:at+8]).hex()}, should be {bytes(want[at:at+8]).hex()}")


def reads_equal(folder, image):
    want = image.bytes
    with Server(folder, image.path, "--read-only") as server:
        handle = server.connect()
        assert handle.get_size() == len(want), (handle.get_size(), len(want))
        step = 1 * MIB
        for offset in range(0, len(want), step):
            length = min(step, len(want) - offset)
            expect_equal(handle.pread(length, offset), want[offset : offset + length], offset, "read")
        for _ in range(200):
            offset = image.random.randrange(len(want))
            length = min(len(want) - offset, image.random.choice([1, 511, 4096, image.random.randrange(1, 300 * KIB)]))
            expect_equal(handle.pread(length, offset), want[offset : offset + length], offset, "unaligned read")
        handle.shutdown()


def refuses_data_file(folder):
    """What is not supported is refused by name (F1), not read as something else."""
    data = os.path.join(folder, "disk.data")
    image = Image(folder, "disk.qcow2", 10 * MIB, f"data_file={data}")
    server = Server(folder, image.path, "--read-only")
    try:
        status = server.process.wait(20)
        assert status != 0 and "data file" in server.said(), f"exit {status}: {server.said()}"
    finally:
        server.process.kill()


def made_by_qemu(folder):
    """The cases, as (name, function that makes the image)."""
    sizes = {512: 3 * MIB, 4 * KIB: 5 * MIB, 64 * KIB: 20 * MIB, 2 * MIB: 40 * MIB}

    def plain(options, size, **how):
        return lambda: Image(folder, "disk.qcow2", size, options, seed=len(options)).fill(**how)

    for cluster in (512, 1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB):
        size = next(sizes[key] for key in sorted(sizes) if cluster <= key) + 7 * 512  # ends inside a cluster
        yield f"v2, clusters of {cluster}", plain(f"compat=0.10,cluster_size={cluster}", size)
        yield f"v3, clusters of {cluster}", plain(f"cluster_size={cluster}", size)
        if cluster >= 16 * KIB:
            yield f"extended L2, clusters of {cluster}", plain(f"cluster_size={cluster},extended_l2=on", size)
        yield f"deflate, clusters of {cluster}", plain(f"cluster_size={cluster}", size, compressed=True)
        yield f"zstd, clusters of {cluster}", plain(f"cluster_size={cluster},compression_type=zstd", size, compressed=True)
    yield "extended L2 with compressed clusters", plain("extended_l2=on", 20 * MIB, compressed=True)
    for bits in (1, 2, 4, 8, 16, 32, 64):
        yield f"refcounts of {bits} bits", plain(f"refcount_bits={bits},cluster_size=4096", 5 * MIB)
    for mode in ("metadata", "falloc", "full"):
        yield f"preallocation={mode}", plain(f"preallocation={mode}", 10 * MIB)
        yield f"preallocation={mode}, extended L2", plain(f"preallocation={mode},extended_l2=on", 10 * MIB)
    yield "lazy refcounts", plain("lazy_refcounts=on", 10 * MIB)
    def chain(base_size, middle_size, size, options="", middle_options=""):
        def make():
            base = Image(folder, "base.qcow2", base_size, middle_options, seed=1).fill(compressed=True)
            middle = Image(folder, "middle.qcow2", middle_size, middle_options, backing=base, seed=2).fill(20)
            return Image(folder, "disk.qcow2", size, options, backing=middle, seed=3).fill(20)

        return make

    yield "a chain that grows", chain(3 * MIB + 512, 6 * MIB + 1536, 9 * MIB)
    yield "a chain that shrinks", chain(9 * MIB, 6 * MIB + 1536, 3 * MIB + 512)
    yield "a chain with a short middle", chain(9 * MIB, 2 * MIB + 512, 6 * MIB)
    yield "a chain, extended L2 over 512 B clusters", chain(5 * MIB, 4 * MIB + 512, 6 * MIB, "extended_l2=on", "cluster_size=512")
    yield "a chain, 4 KiB clusters over 2 MiB", chain(9 * MIB, 7 * MIB, 8 * MIB, "cluster_size=4096", "cluster_size=2M")
    yield "a chain of v2", chain(3 * MIB, 5 * MIB, 6 * MIB, "compat=0.10", "compat=0.10")

    def over_raw():
        base = Image(folder, "unused.qcow2", 5 * MIB + 512, seed=4).fill()
        run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", base.path, os.path.join(folder, "base.raw"))
        with open(os.path.join(folder, "base.raw"), "wb") as file:
            file.write(base.bytes)
        base.path = file.name
        return Image(folder, "disk.qcow2", 8 * MIB, backing=base, backing_format="raw", seed=5).fill(20)

    yield "over a raw file", over_raw

    def with_snapshots(options, compressed=True):
        def make():
            image = Image(folder, "disk.qcow2", 10 * MIB, options, seed=6).fill(30, compressed=compressed)
            image.snapshot("first")
            image.fill(30)
            image.snapshot("second")
            return image.fill(30)

        return make

    yield "internal snapshots", with_snapshots("")
    yield "internal snapshots, extended L2", with_snapshots("extended_l2=on")
    yield "internal snapshots, refcounts of 2 bits, v3", with_snapshots("refcount_bits=2", compressed=False)
    yield "internal snapshots, v2", with_snapshots("compat=0.10,cluster_size=4096")


# --- written through the server, read by QEMU -----------------------------------------------------

BUCKET = 64 * KIB
BLOCK = 4 * KIB


class Change:
    """A write, zeroing or discard, with the times between which it took effect."""

    __slots__ = ("start", "end", "data", "discard", "submitted", "completed")

    def __init__(self, start, end, data, discard=False):
        self.start, self.end, self.data, self.discard = start, end, data, discard
        self.submitted = self.completed = None

    def value(self, position):
        return self.data[position - self.start] if self.data is not None else 0

    def values(self, start, end):
        return self.data[start - self.start : end - self.start] if self.data is not None else bytes(end - start)

    def touches(self, start, end):
        return self.start < end and start < self.end

    def covers(self, start, end):
        return self.start <= start and end <= self.end

    def replaced_by(self, later):
        return later.submitted > self.completed and not later.discard


class Oracle:
    """What each byte may read as (R1): the last change to it, or any that was in flight beside it.

    `content` holds one allowed value of each byte, the one to expect first. Where a read differs, the
    log tells whether another was allowed: changes that overlapped in time have no order, and a discard
    leaves zeros *or* what was there.
    """

    def __init__(self, content):
        self.content = bytearray(content)
        self.log = {}  # bucket: changes that touch it
        self.in_flight = set()
        self.clock = 0
        for start in range(0, len(content), BUCKET):
            data = bytes(content[start : start + BUCKET])
            self.observe(start, data, 0, 0)

    def tick(self):
        self.clock += 1
        return self.clock

    def record(self, change):
        for bucket in range(change.start // BUCKET, (change.end - 1) // BUCKET + 1):
            self.log.setdefault(bucket, []).append(change)

    def observe(self, start, data, submitted, completed):
        """A read without rivals has settled what these bytes are."""
        seen = Change(start, start + len(data), data)
        seen.submitted, seen.completed = submitted, completed
        self.record(seen)
        self.content[start : start + len(data)] = data

    def rivals(self, start, end):
        return any(change.touches(start, end) for change in self.in_flight)

    def submit(self, change):
        change.submitted = self.tick()
        self.in_flight.add(change)
        self.record(change)

    def complete(self, change):
        change.completed = self.tick()
        self.in_flight.remove(change)
        length = change.end - change.start
        self.content[change.start : change.end] = change.data if change.data is not None else bytes(length)

    def candidates(self, start, end):
        """The changes that still matter for a block."""
        touching = [change for change in self.log[start // BUCKET] if change.touches(start, end)]
        covering = [c for c in touching if c.covers(start, end) and not c.discard and c.completed is not None]
        latest = max(change.submitted for change in covering)
        return [change for change in touching if change.completed is None or change.completed >= latest]

    def expect(self, got, start, submitted, what):
        """`got` was read at `start` by a read without rivals, submitted at the time `submitted`."""
        if got == self.content[start : start + len(got)]:
            return
        end = start + len(got)
        for block in range(start - start % BLOCK, end, BLOCK):
            low, high = max(start, block), min(end, block + BLOCK)
            seen = got[low - start : high - start]
            want = self.content[low:high]
            if seen == want:
                continue
            known = self.candidates(low, high)
            last = [change for change in known if not any(change.replaced_by(later) for later in known)]
            if any(change.covers(low, high) and change.values(low, high) == seen for change in last):
                self.observe(low, bytes(seen), submitted, self.tick())
                continue
            for index, (a, b) in enumerate(zip(seen, want)):
                if a == b:
                    continue
                covering = [change for change in known if change.start <= low + index < change.end]
                allowed = {
                    change.value(low + index)
                    for change in covering
                    if not any(change.replaced_by(later) for later in covering)
                }
                if a not in allowed:
                    raise AssertionError(f"{what}: byte {low + index:#x} is {a:#04x}, allowed {sorted(map(hex, allowed))}")
            self.observe(low, bytes(seen), submitted, self.tick())


class Client:
    """Random requests over several connections, each checked against the oracle."""

    def __init__(self, server, oracle, rng, cluster, connections=4, depth=12):
        self.handles = [server.connect() for _ in range(connections)]
        self.busy = [0] * connections
        self.oracle, self.random, self.cluster, self.depth = oracle, rng, cluster, depth
        self.reads = []
        self.failures = []
        self.kept = {}
        self.move_window()

    def move_window(self):
        self.window = self.random.randrange(len(self.oracle.content))

    def range(self):
        rng, size = self.random, len(self.oracle.content)
        offset = (self.window + rng.randrange(6 * self.cluster)) % size if rng.random() < 0.6 else rng.randrange(size)
        shape = rng.random()
        if shape < 0.4:
            length = rng.randrange(1, 1200)
        elif shape < 0.75:
            offset -= offset % 512
            length = 512 * rng.randrange(1, 33)
        elif shape < 0.85:
            offset -= offset % self.cluster
            length = self.cluster * rng.randrange(1, 4)
        else:
            length = rng.randrange(1, min(3 * self.cluster, 96 * KIB) + 4096)
        length = min(length, 256 * KIB, size - offset)
        return offset, length

    def submit(self, index):
        rng, handle = self.random, self.handles[index]
        if rng.random() < 0.01:
            self.move_window()
        offset, length = self.range()
        kind = rng.random()
        if SPARE_DISCARDS and 0.55 <= kind < 0.72:
            kind = 0
        self.busy[index] += 1

        def completion(ended):
            def call(error):
                self.busy[index] -= 1
                self.kept.pop(call, None)
                try:
                    if error.value:
                        raise AssertionError(f"{what}: {os.strerror(error.value)}")
                    ended()
                except AssertionError as failure:
                    self.failures.append(failure)
                return 1

            return call

        def change(data, discard=False):
            made = Change(offset, offset + length, data, discard)
            for read in self.reads:
                if made.touches(read[0], read[1]):
                    read[2] = False
            self.oracle.submit(made)
            return completion(lambda: self.oracle.complete(made))

        what = f"{length} bytes at {offset:#x}"
        fua = nbd.CMD_FLAG_FUA if rng.random() < 0.05 else 0
        if kind < 0.55:
            what = f"write of {what}"
            data = rng.randbytes(length)
            buffer = nbd.Buffer.from_bytearray(bytearray(data))
            call = change(data)
            self.kept[call] = buffer
            handle.aio_pwrite(buffer, offset, call, fua)
        elif kind < 0.65:
            what = f"zeroing of {what}"
            handle.aio_zero(length, offset, change(None), fua | (nbd.CMD_FLAG_NO_HOLE if rng.random() < 0.5 else 0))
        elif kind < 0.72:
            what = f"discard of {what}"
            handle.aio_trim(length, offset, change(None, discard=True), fua)
        elif kind < 0.96:
            what = f"read of {what}"
            buffer = nbd.Buffer(length)
            # Asserted unless a change overlaps it in time.
            read = [offset, offset + length, not self.oracle.rivals(offset, offset + length)]
            self.reads.append(read)
            submitted = self.oracle.tick()

            def ended():
                self.reads.remove(read)
                if read[2]:
                    self.oracle.expect(buffer.to_bytearray(), offset, submitted, what)

            call = completion(ended)
            self.kept[call] = buffer
            handle.aio_pread(buffer, offset, call)
        else:
            what = "flush"
            handle.aio_flush(completion(lambda: None))

    def turn(self):
        poll = select.poll()
        by_fd = {}
        for handle in self.handles:
            direction = handle.aio_get_direction()
            events = (select.POLLIN if direction & nbd.AIO_DIRECTION_READ else 0) | (
                select.POLLOUT if direction & nbd.AIO_DIRECTION_WRITE else 0
            )
            by_fd[handle.aio_get_fd()] = handle
            poll.register(handle.aio_get_fd(), events)
        ready = poll.poll(30_000)
        if not ready:
            raise AssertionError(f"no reply in 30 s, {sum(self.busy)} requests in flight")
        for fd, events in ready:
            handle = by_fd[fd]
            if events & select.POLLIN and handle.aio_get_direction() & nbd.AIO_DIRECTION_READ:
                handle.aio_notify_read()
            elif events & select.POLLOUT and handle.aio_get_direction() & nbd.AIO_DIRECTION_WRITE:
                handle.aio_notify_write()
            elif events & (select.POLLERR | select.POLLHUP):
                raise AssertionError("the server closed the connection")

    def drive(self, operations):
        left = operations
        while left or sum(self.busy):
            for index in range(len(self.handles)):
                while left and self.busy[index] < self.depth and not self.failures:
                    self.submit(index)
                    left -= 1
            if self.failures:
                raise self.failures[0]
            self.turn()
        if self.failures:
            raise self.failures[0]
        # Without rivals now: everything, through the server first.
        for offset in range(0, len(self.oracle.content), MIB):
            length = min(MIB, len(self.oracle.content) - offset)
            now = self.oracle.tick()
            self.oracle.expect(self.handles[0].pread(length, offset), offset, now, "read at the end")
        for handle in self.handles:
            handle.shutdown()


def raw_bytes(folder, *source):
    path = os.path.join(folder, "out.raw")
    run("qemu-img", "convert", "-O", "raw", "-f", "qcow2", *source, path)
    with open(path, "rb") as file:
        data = file.read()
    os.unlink(path)
    return data


def written_by_server(folder, seed, operations):
    rng = random.Random(seed)
    cluster = rng.choice([512, 4 * KIB, 16 * KIB, 64 * KIB, 64 * KIB, 256 * KIB, 2 * MIB])
    options = [f"cluster_size={cluster}"]
    version = 2 if rng.random() < 0.15 else 3
    snapshots = rng.random() < 0.4
    if version == 2:
        options.append("compat=0.10")
    else:
        if cluster >= 16 * KIB and rng.random() < 0.4:
            options.append("extended_l2=on")
        widths = [2, 4, 8, 16, 32, 64] if snapshots else [1, 2, 4, 8, 16, 32, 64]
        options.append(f"refcount_bits={rng.choice(widths)}")
    size = (3 * MIB if cluster < 4 * KIB else 16 * MIB) + 512 * rng.randrange(1, 999)
    backing = None
    if rng.random() < 0.5:
        backing = Image(folder, "base.qcow2", int(size * rng.choice([0.4, 1.0, 1.3])) // 512 * 512, seed=seed).fill(30, compressed=True)
    image = Image(folder, "disk.qcow2", size, ",".join(options), backing=backing, seed=seed)
    if rng.random() < 0.7:
        # Compressed clusters share host clusters, whose counts a narrow field would not hold twice.
        image.fill(30, compressed="refcount_bits=1" not in options and "refcount_bits=2" not in options and rng.random() < 0.5)
    if snapshots:
        image.snapshot("before")
        if rng.random() < 0.5:
            image.fill(10)
    aio = rng.choice(["io_uring", "native", "threads"])
    what = f"{' '.join(options)} size {size} aio {aio}{' backed' if backing else ''}{' snapshot' if snapshots else ''}"
    print(f"       seed {seed}: {what}", flush=True)

    oracle = Oracle(image.bytes)
    with Server(folder, image.path, aio=aio) as server:
        Client(server, oracle, rng, cluster).drive(operations)
    check = run("qemu-img", "check", "--output=json", "-f", "qcow2", image.path, ok=(0, 2, 3))
    found = json.loads(check)
    bad = {key: found[key] for key in ("check-errors", "corruptions", "leaks") if found.get(key)}
    assert not bad, f"qemu-img check after a clean stop: {bad}"
    oracle.expect(raw_bytes(folder, image.path), 0, oracle.tick(), "read by qemu-img")
    for name, want in image.snapshots.items():
        expect_equal(raw_bytes(folder, "-l", f"snapshot.name={name}", image.path), want, 0, f"snapshot {name}")
    if backing:
        expect_equal(raw_bytes(folder, backing.path), bytes(backing.bytes), 0, "backing file")


# --- the run ----------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scale = int(os.environ.get("SCALE", "1"))
    parser.add_argument("--operations", type=int, default=4000, help="random requests for each seed")
    parser.add_argument("--seeds", type=int, default=8 * scale)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--only", choices=["made-by-qemu", "written-by-server"])
    args = parser.parse_args()
    counts = {"PASS": 0, "FAIL": 0}
    base = os.environ.get("TEST_DIR", "/dev/shm")

    def check(name, test):
        folder = tempfile.mkdtemp(prefix="stillpoint-interop.", dir=base)
        started = time.monotonic()
        try:
            test(folder)
            verdict, detail = "PASS", ""
        except (AssertionError, nbd.Error, subprocess.TimeoutExpired) as failure:
            verdict, detail = "FAIL", "".join(f"\n     | {line}" for line in str(failure).splitlines()[:20])
        finally:
            shutil.rmtree(folder)
        counts[verdict] += 1
        print(f"{verdict} interop.py: {name} ({time.monotonic() - started:.1f} s){detail}", flush=True)

    if args.only != "written-by-server":
        names = [name for name, _ in made_by_qemu(".")]
        for index, name in enumerate(names):

            def test(folder, index=index):
                make = list(made_by_qemu(folder))[index][1]
                reads_equal(folder, make())

            check(f"made by QEMU, read by us: {name}", test)
        if os.environ.get("STANDIN") != "qemu":
            check("an external data file is refused by name", refuses_data_file)
    if args.only != "made-by-qemu":
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            check(
                f"written by us, read by QEMU: seed {seed}, {args.operations} operations",
                lambda folder, seed=seed: written_by_server(folder, seed, args.operations),
            )
    print(f"interop.py: {counts['PASS']} passed, {counts['FAIL']} failed")
    sys.exit(0 if counts["FAIL"] == 0 and counts["PASS"] else 1)


if __name__ == "__main__":
    main()
