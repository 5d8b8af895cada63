// A profiler for NCCL that says on standard error what it is told. The tests load it beside the plugin's own.
// It has the table v5 alone, or v6 with -DVERSION=6.
#include <cstdint>
#include <cstdio>

#ifndef VERSION
#define VERSION 5
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

using Logger = void (*)(int, unsigned long, const char *, int, const char *, ...);

static int events;

static int init(void **context, uint64_t, int *mask, const char *name, int nodes, int ranks, int rank, Logger) {
    *context = &events;
    *mask |= 1 << 9 | 1 << 11;  // collective calls, kernel launches
    fprintf(stderr, "second: init %s %d %d %d\n", name, nodes, ranks, rank);
    return 0;
}

static int start(void *context, void **handle, const uint64_t *event) {
    *handle = context == &events ? new uint64_t(event[0]) : nullptr;
    fprintf(stderr, "second: start %#llx\n", (unsigned long long)event[0]);
    return 0;
}

static int stop(void *handle) {
    auto *kind = static_cast<uint64_t *>(handle);
    fprintf(stderr, "second: stop %#llx\n", (unsigned long long)*kind);
    delete kind;
    return 0;
}

static int record(void *handle, int state, const void *) {
    fprintf(stderr, "second: record %#llx %d\n", (unsigned long long)*static_cast<uint64_t *>(handle), state);
    return 0;
}

static int finalize(void *context) {
    fprintf(stderr, "second: finalize %d\n", context == &events);
    return 0;
}

struct Profiler {
    const char *name;
    decltype(&init) init_;
    decltype(&start) start_;
    decltype(&stop) stop_;
    decltype(&record) record_;
    decltype(&finalize) finalize_;
};

extern "C" {
__attribute__((visibility("default"))) Profiler JOIN(ncclProfiler_v, VERSION) = {
    "second", init, start, stop, record, finalize};
}
