/*
 * A stand-in for libcuda.so.1, for programs that are tested without a GPU: device memory is the heap, work on a stream
 * is done when its call returns. STAND_IN_GPUS: how many GPUs there are. STAND_IN_FAULT=stuck: no event is ever over.
 */
#include <stdlib.h>
#include <string.h>

static int gpus(void)
{
	const char *set = getenv("STAND_IN_GPUS");
	return set ? atoi(set) : 2;
}

static int stuck(void)
{
	const char *fault = getenv("STAND_IN_FAULT");
	return fault && !strcmp(fault, "stuck");
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_STAND_IN"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "a stand-in's error"; return 0; }
int cuDeviceGetCount(int *count) { *count = gpus(); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, "Stand-in"); return 0; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { strcpy(id, "0000:01:00.0"); return 0; }
/* 75 and 76: compute capability 9.0; 16: processors. */
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 9 : which == 16 ? 4 : 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)8; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = 0; return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cuMemAlloc_v2(void **address, size_t bytes) { *address = aligned_alloc(256, (bytes + 255) / 256 * 256); return *address ? 0 : 2; }
int cuMemFree_v2(void *address) { free(address); return 0; }
int cuMemsetD8Async(void *to, unsigned char byte, size_t bytes, void *stream) { memset(to, byte, bytes); return 0; }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) { memcpy(to, from, bytes); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, void *stream) { memcpy(to, from, bytes); return 0; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = malloc(1); return 0; }
int cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuEventCreate(void **event, unsigned flags) { *event = malloc(1); return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventQuery(void *event) { return stuck() ? 600 : 0; }
int cuEventElapsedTime(float *ms, void *from, void *to) { *ms = 1; return 0; }

/* Nobody calls these here. */
#define UNUSED(name) int name(void) { return 801; }
UNUSED(cuMemHostRegister_v2)
UNUSED(cuMemHostUnregister)
UNUSED(cuMemHostGetDevicePointer_v2)
UNUSED(cuModuleLoadData)
UNUSED(cuModuleUnload)
UNUSED(cuModuleGetFunction)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncGetAttribute)
UNUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNUSED(cuLaunchKernel)
