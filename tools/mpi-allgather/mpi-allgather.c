/* Times MPI_Allgather as `direct-dcp bench` times a gather, so that the two can stand side by side.
 *
 *     mpi-allgather ROW_BYTES ITERS LOOPS ROWS...
 *
 * For each number of rows per rank it prints `ranks,rows,row_bytes,iters,loops,time_us,wrong`:
 * the time of a loop of calls from its first start to its last end on any rank, divided by the
 * calls, the median of all loops; and the bytes that were not as sent, on all ranks. Rows are random
 * and new for each loop. A loop has ITERS calls, or fewer where they would take long.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { WARMUP = 5, MOST_LOOPS = 1000 };

/* A loop goes on for about this long at most. */
static const double LOOP_SECONDS = 0.1;

/* One clock for all processes of the machine; MPI_Wtime may start anywhere. */
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Byte `at` of what `rank` sends in `loop` (splitmix64). */
static uint8_t sent(int rank, int loop, size_t at) {
    uint64_t x = ((uint64_t)rank << 48) ^ ((uint64_t)loop << 32) ^ (uint64_t)at;
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (uint8_t)(x ^ (x >> 31));
}

static void gather(const uint8_t *mine, uint8_t *all, size_t bytes) {
    MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
}

/* Seconds from the first start of `calls` gathers to their last end on any rank. */
static double timed(const uint8_t *mine, uint8_t *all, size_t bytes, int calls) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = now();
    for (int call = 0; call < calls; call++) {
        gather(mine, all, bytes);
    }
    double end = now(), first, last;
    MPI_Allreduce(&start, &first, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
    MPI_Allreduce(&end, &last, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return last - first;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int positive(const char *text, int most) {
    char *end;
    long number = strtol(text, &end, 10);
    if (*end != '\0' || number < 1 || number > most) {
        fprintf(stderr, "mpi-allgather: %s is not a number from 1 to %d\n", text, most);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return (int)number;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 5) {
        fprintf(stderr, "usage: mpi-allgather ROW_BYTES ITERS LOOPS ROWS...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    size_t row_bytes = (size_t)positive(argv[1], 1 << 20);
    int most = positive(argv[2], 1000000), loops = positive(argv[3], MOST_LOOPS);
    unsigned long long wrong_anywhere = 0;

    for (int arg = 4; arg < argc; arg++) {
        int rows = positive(argv[arg], 1 << 20);
        size_t bytes = (size_t)rows * row_bytes;
        if (bytes > INT32_MAX) {
            fprintf(stderr, "mpi-allgather: %d rows are more than a count of MPI holds\n", rows);
            MPI_Abort(MPI_COMM_WORLD, 2);
        }
        uint8_t *mine = malloc(bytes), *all = malloc(bytes * (size_t)ranks);
        if (mine == NULL || all == NULL) {
            fprintf(stderr, "mpi-allgather: out of memory\n");
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        double times[MOST_LOOPS];
        unsigned long long wrong = 0;
        int iters = most;
        /* Loop -1 warms up and tells how many calls fit into a loop. */
        for (int loop = -1; loop < loops; loop++) {
            for (size_t at = 0; at < bytes; at++) {
                mine[at] = sent(rank, loop, at);
            }
            for (size_t at = 0; at < bytes * (size_t)ranks; at++) {
                all[at] = (uint8_t)~sent((int)(at / bytes), loop, at % bytes);
            }
            double took = timed(mine, all, bytes, loop < 0 ? WARMUP : iters);
            if (loop < 0) {
                double fit = LOOP_SECONDS / (took / WARMUP);
                iters = fit < WARMUP ? WARMUP : fit < most ? (int)fit : most;
            } else {
                times[loop] = took / iters * 1e6;
            }
            for (size_t at = 0; at < bytes * (size_t)ranks; at++) {
                wrong += all[at] != sent((int)(at / bytes), loop, at % bytes);
            }
        }
        unsigned long long total;
        MPI_Allreduce(&wrong, &total, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
        wrong_anywhere += total;
        if (rank == 0) {
            qsort(times, (size_t)loops, sizeof times[0], by_size);
            double median = (times[(loops - 1) / 2] + times[loops / 2]) / 2;
            printf("%d,%d,%zu,%d,%d,%.4f,%llu\n", ranks, rows, row_bytes, iters, loops, median,
                   total);
            fflush(stdout);
        }
        free(mine);
        free(all);
    }
    MPI_Finalize();
    return wrong_anywhere == 0 ? 0 : 1;
}
