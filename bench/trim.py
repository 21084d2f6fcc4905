"""trim.py SOCKET BYTES: trims the first BYTES of an export as a guest's fstrim would, 32 MiB at a time, four in
flight; prints how long it took."""
import sys
import time

import nbd

PIECE, IN_FLIGHT = 32 << 20, 4


def main():
    handle = nbd.NBD()
    handle.connect_unix(sys.argv[1])
    size, offset, failures = int(sys.argv[2]), 0, []

    def completion(error):
        if error.value:
            failures.append(error.value)
        return 1

    started = time.monotonic()
    while offset < size or handle.aio_in_flight():
        while offset < size and handle.aio_in_flight() < IN_FLIGHT:
            length = min(PIECE, size - offset)
            handle.aio_trim(length, offset, completion)
            offset += length
        handle.poll(-1)
    handle.flush()
    print(f"trimmed {size >> 20} MiB in {time.monotonic() - started:.2f} s")
    sys.exit(f"errors: {failures}" if failures else 0)


main()
