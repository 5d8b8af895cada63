//! A stand-in for libcuda.so.1, with which tests run the calls of the driver without a GPU.
//!
//! A library stays loaded once it has been, and the driver that was found is kept. So each such test
//! runs in a process of its own.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use super::driver::SYMBOLS;
use crate::cache::tests::Folder;

/// Set in the environment of such a process.
pub(super) const CHILD: &str = "_PUSHGATE_TEST_PROBE";

/// Runs one ignored test in a process of its own, which loads libcuda.so.1 from `libraries`; returns
/// what the process printed.
pub(super) fn run_child(test: &str, libraries: &Path) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", libraries)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !errors.contains("panicked"), "{text}\n{errors}");
    text
}

/// Compiles `source` to a libcuda.so.1 in `folder`.
pub(super) fn build_stub(folder: &Folder, source: &str) {
    let file = folder.0.join("stub.c");
    std::fs::write(&file, source).unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(folder.0.join("libcuda.so.1"))
        .arg(file)
        .status()
        .unwrap();
    assert!(built.success());
}

/// C source of the symbols that `has` does not define.
pub(super) fn stub_source(init: u32, version: u32, devices: u32, has: &str) -> String {
    let mut source = String::new();
    for name in SYMBOLS.iter().filter(|name| !has.contains(&format!("int {name}("))) {
        let body = match *name {
            "cuInit" => format!("(unsigned f) {{ return {init}; }}"),
            "cuDriverGetVersion" => format!("(int *v) {{ *v = {version}; return 0; }}"),
            "cuDeviceGetCount" => format!("(int *n) {{ *n = {devices}; return 0; }}"),
            "cuGetErrorName" => "(int c, const char **s) { *s = \"CUDA_ERROR_FAKE\"; return 0; }".to_owned(),
            "cuGetErrorString" => "(int c, const char **s) { *s = 0; return 1; }".to_owned(),
            // A code that no cuda.h has.
            _ => "() { return 12345; }".to_owned(),
        };
        writeln!(source, "int {name}{body}").unwrap();
    }
    source
}

/// A driver without a GPU: device memory is the heap, a kernel stores 42 to the address
/// that its parameters begin with, and an event is over at the sixth query. It aborts where a
/// context should be current and is not, and where a call would end another thread's capture of
/// a graph.
pub(super) const DRIVER: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static __thread int depth, mode;
static int registered, pinned, live, flushed;
int stub_pinned(void) { return pinned; }
#define IN if (depth < 1 || mode != 2) { fprintf(stderr, "%s: depth %d, capture mode %d\n", __func__, depth, mode); abort(); }
int cuThreadExchangeStreamCaptureMode(int *m) { if (depth < 1) return 201; int before = mode; mode = *m; *m = before; return 0; }
int stub_depth(void) { return depth + mode; }
int stub_live(void) { return live + registered; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strcpy(s, "Stub"); return 0; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { strcpy(s, "0000:01:00.0"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 4 : a == 97 ? 232448 : a == 117 || a == 122 || a == 124 ? 1 : 0; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)8; live++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { live--; return 0; }
int cuCtxPushCurrent_v2(void *c) { depth++; return 0; }
int cuCtxPopCurrent_v2(void **c) { if (depth < 1 || (depth == 1 && mode)) abort(); depth--; *c = 0; return 0; }
int cuCtxGetStreamPriorityRange(int *l, int *g) { IN *l = 0; *g = -5; return 0; }
int cuMemAlloc_v2(void **p, size_t n) { IN *p = malloc(n); live++; return 0; }
int cuMemFree_v2(void *p) { IN free(p); live--; return 0; }
int cuMemsetD8Async(void *p, unsigned char c, size_t n, void *s) { IN if (!s) abort(); memset(p, c, n); return 0; }
int cuMemcpyHtoDAsync_v2(void *d, const void *h, size_t n, void *s) { IN if (!s) abort(); memcpy(d, h, n); return 0; }
int cuMemcpyDtoHAsync_v2(void *h, const void *d, size_t n, void *s) { IN if (!s) abort(); memcpy(h, d, n); return 0; }
int cuMemcpyAsync(void *d, const void *h, size_t n, void *s) { IN if (!s) abort(); memcpy(d, h, n); return 0; }
struct rectangle { size_t sx, sy; int sm; const char *sh, *sd; void *sa; size_t sp, dx, dy; int dm; char *dh, *dd; void *da; size_t dp, width, height; };
int cuMemcpy2DAsync_v2(const struct rectangle *r, void *s)
{
	IN
	if (!s || r->sm != 1 || r->dm != 2 || r->sp < r->width || r->dp < r->width || r->height < 2) abort();
	for (size_t i = 0; i < r->height; i++) memcpy(r->dd + i * r->dp, r->sh + i * r->sp, r->width);
	return 0;
}
struct operation { int which; unsigned long *at, value; unsigned flags; unsigned long pad[2]; };
int cuStreamWriteValue64_v2(void *s, unsigned long *at, unsigned long v, unsigned f) { IN *at = v; return 0; }
int cuStreamQuery(void *s) { IN return 0; }
int cuStreamBatchMemOp_v2(void *s, unsigned n, struct operation *o, unsigned f)
{
	IN
	if (!s || f || sizeof *o != 48) abort();
	for (; n--; o++) { if (o->which != 5 || o->flags) abort(); *o->at = o->value; }
	return 0;
}
int cuCtxCreate_v2(void **c, unsigned f, int d) { IN *c = (void *)24; depth++; live++; return 0; }
int cuCtxDestroy_v2(void *c) { live--; return c != (void *)24; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned f) { IN if (registered) return 712; registered = 1; pinned++; return f == 3 || f == 2 ? 0 : 1; }
int cuMemHostUnregister(void *p) { IN if (!registered) return 713; registered = 0; return 0; }
int cuMemHostGetDevicePointer_v2(void **d, void *p, unsigned f) { IN *d = p; return 0; }
int cuStreamCreateWithPriority(void **s, unsigned f, int p) { IN *s = malloc(1); live++; return f == 1 ? 0 : 1; }
int cuStreamDestroy_v2(void *s) { IN free(s); live--; return 0; }
int cuStreamSynchronize(void *s) { IN return s ? 0 : 1; }
int cuEventCreate(int **e, unsigned f) { IN *e = calloc(1, 4); live++; return 0; }
int cuEventDestroy_v2(int *e) { IN free(e); live--; return 0; }
int cuEventRecord(int *e, void *s) { IN if (!s) abort(); *e = 6; return 0; }
int cuEventQuery(int *e) { IN return *e && --*e ? 600 : 0; }
int cuEventElapsedTime(float *t, void *a, void *b) { IN *t = 1.5f; return 0; }
int cuModuleLoadData(void **m, const void *i) { IN *m = malloc(1); live++; return (size_t)i % 16; }
int cuModuleUnload(void *m) { IN free(m); live--; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { IN *f = (void *)16; return strcmp(n, "poke") ? 500 : 0; }
int cuMemGetHandleForAddressRange(int *fd, size_t p, size_t n, int t, unsigned long long f) { IN *fd = t == 1 && !f && p % 4096 == 0 && n % 4096 == 0 ? dup(0) : -1; return *fd < 0; }
int cuFlushGPUDirectRDMAWrites(int t, int s) { IN flushed++; return t != 0 || s != 100; }
int stub_flushed(void) { return flushed; }
int cuFuncSetAttribute(void *f, int a, int v) { IN return a == 8 && v <= 232448 ? 0 : 1; }
int cuFuncGetAttribute(int *v, int a, void *f) { IN return 0; }
int cuFuncGetParamInfo(void *f, size_t i, size_t *o, size_t *n) { IN *o = 0; *n = 16; return i ? 1 : 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) { IN *n = 2; return 0; }
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *s, void **k, void **x)
{
	IN
	if (!s || k || x[0] != (void *)1 || x[2] != (void *)2 || *(size_t *)x[3] != 16 || x[4]) abort();
	**(unsigned long **)x[1] = 42;
	return 0;
}
"#;
