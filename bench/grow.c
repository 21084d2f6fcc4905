// grow FILE COUNT [DEPTH]: the yardstick for allocating writes. A bare Linux AIO loop over O_DIRECT:
// COUNT writes of 4 KiB, each into a new region of 64 KiB, DEPTH in flight (32), and the file grown by
// 16 MiB fallocate steps on the way. No image format, no table, no flush: what a file can do at best
// when one thread does nothing else. Prints "Run completed in N seconds." as qemu-img bench does.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WRITE_SIZE = 4096, REGION_SIZE = 65536, GROW_STEP = 16 << 20, DEPTH_MAX = 1024 };

static void must(int ok, const char *what)
{
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: grow FILE COUNT [DEPTH]\n");
        return 2;
    }
    long count = atol(argv[2]), depth = argc > 3 ? atol(argv[3]) : 32;
    must(count > 0 && depth > 0 && depth <= DEPTH_MAX, "COUNT and DEPTH");
    int file = open(argv[1], O_CREAT | O_TRUNC | O_RDWR | O_DIRECT, 0644);
    must(file >= 0, argv[1]);
    void *data;
    must(posix_memalign(&data, 4096, WRITE_SIZE) == 0, "memory");
    memset(data, 0x5a, WRITE_SIZE);
    aio_context_t context = 0;
    must(syscall(SYS_io_setup, depth, &context) == 0, "io_setup");

    static struct iocb blocks[DEPTH_MAX];
    static struct io_event events[DEPTH_MAX];
    struct iocb *idle[DEPTH_MAX], *batch[DEPTH_MAX];
    long idle_count = depth;
    for (long i = 0; i < depth; i++)
        idle[i] = &blocks[i];

    int64_t end = 0;
    long submitted = 0, completed = 0;
    double start = seconds();
    while (completed < count) {
        long batch_count = 0;
        while (idle_count > 0 && submitted < count) {
            int64_t offset = (int64_t)submitted * REGION_SIZE;
            if (offset + WRITE_SIZE > end) {
                if (batch_count > 0)
                    break; // submit first: growing waits for what is in flight
                must(fallocate(file, 0, end, GROW_STEP) == 0, "fallocate");
                end += GROW_STEP;
            }
            struct iocb *block = idle[--idle_count];
            memset(block, 0, sizeof *block);
            block->aio_lio_opcode = IOCB_CMD_PWRITE;
            block->aio_fildes = file;
            block->aio_buf = (uintptr_t)data;
            block->aio_nbytes = WRITE_SIZE;
            block->aio_offset = offset;
            batch[batch_count++] = block;
            submitted++;
        }
        for (long done = 0; done < batch_count;) {
            long accepted = syscall(SYS_io_submit, context, batch_count - done, batch + done);
            must(accepted > 0, "io_submit");
            done += accepted;
        }
        long ended = syscall(SYS_io_getevents, context, 1, depth, events, NULL);
        must(ended > 0, "io_getevents");
        for (long i = 0; i < ended; i++) {
            errno = events[i].res < 0 ? -events[i].res : EIO;
            must(events[i].res == WRITE_SIZE, "write");
            idle[idle_count++] = (struct iocb *)(uintptr_t)events[i].obj;
        }
        completed += ended;
    }
    printf("Run completed in %.3f seconds.\n", seconds() - start);
    return 0;
}
