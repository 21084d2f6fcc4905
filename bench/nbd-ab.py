#!/usr/bin/python3
"""Any NBD servers against each other, interleaved, with fio: for questions that bench/run does not ask.

    nbd-ab.py --dir DIR --passes 3 --secs 2 --size 1G --unit 64k \\
        --create 'qemu-img create -q -f qcow2 -o cluster_size=64k {img} {size}' \\
        --tests fill,rr1,rr8,rr32,rw8,rw32,rwf,sr,ar8,ar32,arf \\
        LABEL='server command with {img} and {sock}' LABEL2='...'

A label may carry its own create: 'LABEL::create command::server command'. The tests:

    fill     a fresh image, 64 KiB sequential writes at depth 8 over all of it; also prepares the next
    rrN rwN  4 KiB random reads, writes at depth N on the filled image; rwf: depth 1, a flush each
    sr       1 MiB sequential reads at depth 4 on the filled image
    arN      4 KiB writes at depth N on a fresh image, each into another unit; arf: depth 1, a flush each
"""
import argparse
import os
import statistics
import subprocess

import contest


def options(args, test, pass_index):
    runtime = ["--time_based", f"--runtime={int(args.secs * 1000)}ms"]
    if test == "fill":
        return ["--rw=write", "--bs=64k", "--iodepth=8", "--end_fsync=1"]
    if test == "sr":
        return ["--rw=read", "--bs=1M", "--iodepth=4", *runtime]
    if test == "rwf":
        return ["--rw=randwrite", "--bs=4k", "--iodepth=1", "--fsync=1", "--norandommap", *runtime]
    if test.startswith("ar"):
        flush = test == "arf"
        unit = contest.bytes_of(args.unit)
        units = contest.bytes_of(args.size) // unit
        count = min(units, args.flush_max if flush else args.alloc_max)
        log = contest.scattered_writes(f"{args.dir}/{test}.iolog", unit, units, count, pass_index, flush)
        return [f"--read_iolog={log}", f"--iodepth={1 if flush else test[2:]}"]
    kind = "randread" if test.startswith("rr") else "randwrite"
    return [f"--rw={kind}", "--bs=4k", f"--iodepth={test[2:]}", "--norandommap", *runtime]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--secs", type=float, default=2)
    parser.add_argument("--size", default="1G")
    parser.add_argument("--unit", default="64k")
    parser.add_argument("--create", default="qemu-img create -q -f qcow2 -o cluster_size=64k {img} {size}")
    parser.add_argument("--tests", default="fill,rr1,rr8,rr32,rw8,rw32,rwf,ar8,ar32,arf")
    parser.add_argument("--alloc-max", type=int, default=30000)
    parser.add_argument("--flush-max", type=int, default=5000)
    parser.add_argument("servers", nargs="+")
    args = parser.parse_args()

    contenders = []
    for server in args.servers:
        if "::" in server:
            contenders.append(tuple(server.split("::", 2)))
        else:
            label, command = server.split("=", 1)
            contenders.append((label, args.create, command))

    def create(command, image):
        if os.path.exists(image):
            os.unlink(image)
        subprocess.run(command.format(img=image, size=args.size), shell=True, check=True)

    results = {}
    print("pass,server,test,iops,MB/s,mean_us,p99_us,sync_us,server_cpu_us_per_io,count")
    for pass_index in range(args.passes):
        order = contenders if pass_index % 2 == 0 else contenders[::-1]
        for test in args.tests.split(","):
            for label, make, command in order:
                fresh = test == "fill" or test.startswith("ar")
                image = f"{args.dir}/{label}.{'fresh' if test.startswith('ar') else 'img'}"
                sock = f"{args.dir}/{label}.sock"
                if fresh or not os.path.exists(image):
                    create(make, image)
                    if not fresh:
                        with contest.Server(command, image, sock) as server:
                            contest.fio(server, *options(args, "fill", pass_index))
                with contest.Server(command, image, sock) as server:
                    r = contest.fio(server, *options(args, test, pass_index))
                print(
                    f"{pass_index},{label},{test},{r['iops']:.0f},{r['mb_per_s']:.1f},{r['mean_us']:.1f},"
                    f"{r['p99_us']:.1f},{r['sync_us']:.1f},{r['cpu_us']:.2f},{r['count']}",
                    flush=True,
                )
                results.setdefault((test, label), []).append(r)

    print(f"\n{'test':8}" + "".join(f"{label:>28}" for label, _, _ in contenders) + "   (median IOPS, CPU us)")
    for test in args.tests.split(","):
        row, base = f"{test:8}", None
        for label, _, _ in contenders:
            runs = results[test, label]
            iops = statistics.median(r["iops"] for r in runs)
            cpu = statistics.median(r["cpu_us"] for r in runs)
            base = base or iops
            row += f"{iops:.0f} | {cpu:.1f} us | x{iops / base:.2f}".rjust(28)
        print(row)


main()
