"""What the comparisons share: servers on a unix socket, fio against them, and the CPU that it cost.

Everything runs at a raised priority, so that the machine's other work disturbs it less; whoever calls
interleaves the contenders, so that what remains disturbs both alike.
"""
import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import time

NICE = ["nice", "-n", "-18"]
TICK = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A run that gave no figure, and why."""


def bytes_of(text):
    """16k, 8M, 1G as a number."""
    units = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def cpu_seconds(pid):
    """User and system time of a process, threads that have ended included (in steps of 10 ms)."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


class Server:
    """An NBD server while it runs; `command` may name {img} and {sock}."""

    def __init__(self, command, image, sock):
        self.sock = sock
        if os.path.exists(sock):
            os.unlink(sock)
        self.log = sock + ".log"
        words = shlex.split(command.format(img=image, sock=sock))
        self.process = subprocess.Popen(NICE + words, stdout=open(self.log, "w"), stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 20
        while not os.path.exists(sock):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise Failed(f"{command}: did not start: {open(self.log).read()[-500:]}")
            time.sleep(0.02)
        time.sleep(0.1)

    @property
    def uri(self):
        return f"nbd+unix:///?socket={self.sock}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise Failed("the server did not stop within a minute") from None
        if os.path.exists(self.sock):
            os.unlink(self.sock)


def fio_command(uri, *options):
    common = "--name=a --ioengine=nbd --output-format=json --randrepeat=0 --allrandrepeat=0 --refill_buffers=0"
    return [*NICE, "fio", *common.split(), f"--uri={uri}", *options]


def fio_result(output, errors=""):
    try:
        return json.loads(output[output.index("{") :])["jobs"][0]
    except (ValueError, KeyError, IndexError):
        raise Failed(f"fio: {output[-300:]} {errors[-300:]}") from None


def fio(server, *options):
    """Runs fio against a server: a dictionary with iops, mb_per_s, p99_us, cpu_us (of the server, for
    each I/O), count and fio's own report."""
    before = cpu_seconds(server.process.pid)
    done = subprocess.run(fio_command(server.uri, *options), capture_output=True, text=True)
    cpu = cpu_seconds(server.process.pid) - before
    job = fio_result(done.stdout, done.stderr)
    if job["error"]:
        raise Failed(f"fio: error {job['error']}: {done.stderr[-300:]}")
    side = job["read"] if job["read"]["total_ios"] else job["write"]
    count = max(1, side["total_ios"])
    return {
        "iops": side["iops"],
        "mb_per_s": side["bw"] / 1024,
        "mean_us": side["lat_ns"]["mean"] / 1e3,
        "p99_us": side["clat_ns"].get("percentile", {}).get("99.000000", 0) / 1e3,
        "sync_us": job.get("sync", {}).get("lat_ns", {}).get("mean", 0) / 1e3,
        "cpu_us": cpu * 1e6 / count,
        "count": count,
    }


def scattered_writes(path, unit, unit_count, count, seed, flush=False):
    """An fio log of 4 KiB writes, each into another unit, in a random order."""
    order = list(range(unit_count))
    random.Random(seed).shuffle(order)
    with open(path, "w") as log:
        log.write("fio version 2 iolog\nnbd add\nnbd open\n")
        for index in order[:count]:
            log.write(f"nbd write {index * unit} 4096\n")
            if flush:
                log.write("nbd sync 0 0\n")
        log.write("nbd close\n")
    return path


def timed(command):
    """Runs a tool: seconds by the clock, CPU seconds, and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    done = subprocess.run(NICE + command, capture_output=True, text=True)
    elapsed = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}: exit {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    return elapsed, cpu, done.stdout


def completed_in(output):
    """The seconds in `Run completed in N seconds.`"""
    found = re.search(r"Run completed in ([0-9.]+) seconds", output)
    if not found:
        raise Failed(f"no closing line in: {output[-200:]}")
    return float(found[1])
