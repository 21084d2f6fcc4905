#!/usr/bin/python3
"""What the simulator's power cuts leave is a disk to QEMU's tools, too, and the same one.

The simulator plays histories and puts one image that a cut has left of each into a folder, with the
bytes that the engine then read of it. `qemu-img check` must find no error in it (leaked clusters are
allowed), `qemu-img compare` no difference, and `qemu-io` the same bytes at places of its own choice.

    cuts.py [--histories N] [--first-seed N]
"""
import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LEAKS = 3


def run(*command, ok=(0,)):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode not in ok:
        raise AssertionError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def read_by_qemu_io(disk, ranges):
    """The bytes that qemu-io prints of each range."""
    commands = [word for offset, length in ranges for word in ("-c", f"read -v {offset} {length}")]
    lines = run("qemu-io", "-r", "-f", "qcow2", *commands, disk).splitlines()
    dump = re.compile(r"^[0-9a-f]{8,}:  ((?:[0-9a-f]{2} ){1,16})")
    found = b"".join(bytes.fromhex(match[1]) for match in map(dump.match, lines) if match)
    parts = []
    for _, length in ranges:
        parts.append(found[:length])
        found = found[length:]
    assert not found, "qemu-io printed more than was asked for"
    return parts


def judge(folder, chance):
    """Holds one image to what the engine read of it; returns how many clusters it leaks."""
    disk, path = os.path.join(folder, "disk"), os.path.join(folder, "expected")
    with open(path, "rb") as file:
        expected = file.read()
    report = json.loads(run("qemu-img", "check", "-f", "qcow2", "--output=json", disk, ok=(0, LEAKS)))
    wrong = report.get("corruptions", 0) + report.get("check-errors", 0)
    assert wrong == 0, f"{disk}: {report}"
    run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", disk, path)
    ranges = []
    for _ in range(8):
        offset = chance.randrange(len(expected) // 512) * 512
        ranges.append((offset, min(chance.choice([512, 4096, 65536]), len(expected) - offset)))
    for (offset, length), found in zip(ranges, read_by_qemu_io(disk, ranges)):
        assert found == expected[offset : offset + length], f"{disk}: {length} bytes at {offset} differ"
    return report.get("leaks", 0)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--histories", type=int, default=150)
    arguments.add_argument("--first-seed", type=int, default=500_000)
    args = arguments.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        simulator = ["cargo", "run", "--quiet", "--release", "-p", "stillpoint-sim", "--"]
        seeds = ["--first", args.first_seed, "--seeds", args.histories]
        os.chdir(ROOT)
        print(run(*simulator, "--long", *seeds, "--samples", work), end="")
        samples = sorted(os.listdir(work), key=int)
        leaking = 0
        for seed in samples:
            try:
                leaking += judge(os.path.join(work, seed), random.Random(int(seed))) > 0
            except AssertionError as wrong:
                failed += 1
                print(f"seed {seed}: {wrong}", file=sys.stderr)
        enough = len(samples) > args.histories / 2
    said = f"power cuts: {len(samples)} images as QEMU sees them ({leaking} leak, {failed} wrong)"
    print("PASS" if enough and not failed else "FAIL", said)
    return 1 if failed or not enough else 0


if __name__ == "__main__":
    sys.exit(main())
