#!/usr/bin/python3
"""mksrc.py OUT: a raw file of 2 GiB to convert: 4 MiB of data, 4 MiB of hole, and so on; the data by turns
random, like text, and repetitive."""
import os
import random
import sys

PIECE = 4 << 20


def main():
    rng = random.Random(1)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(4000)]
    text = b" ".join(rng.choices(words, weights=[1 / (rank + 1) for rank in range(4000)], k=900_000))
    text = (text * 2)[:PIECE]
    repetitive = ((bytes(3000) + b"ABCD" * 274) * 2048)[:PIECE]
    file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
    os.ftruncate(file, 2 << 30)
    for index in range(256):
        turn = index * 977
        data = [rng.randbytes(PIECE), text[turn:] + text[:turn], repetitive][index % 3]
        os.pwrite(file, data, index * 2 * PIECE)
    os.fsync(file)


main()
