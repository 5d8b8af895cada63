// Copies and stores of a GPU to host memory while the blocks of a kernel poll one word of host memory, as the blocks of kernels on
// NCCL's device API do in flush() over NCCL's GIN proxy. No NCCL: one GPU, one process.
//
//   many_blocks [own]      own: the copies belong to a context of their own, as the plugin's do, not to the kernel's
//
// Build: nvcc -O2 -std=c++17 -arch=native many_blocks.cu -o many_blocks -lcuda
//
// Prints a table, us, medians. A way to poll in each part of it, a number of blocks in each line:
//   D2H 64 B     cuMemcpyAsync from the GPU until the CPU sees the last word
//   H2D 64 B     cuMemcpyAsync to the GPU and a cuStreamWriteValue32 to host memory after it, until the CPU sees that
//   mark         cuStreamWriteValue32 alone
//   D2H 16 MiB   cuMemcpyAsync until its stream is done
//   store        a store of another kernel to host memory with its fence, by the GPU's clock
//   answer       the CPU changes the polled word until it sees a store of each block in reply
//   reads/us     loads of host memory by all blocks together
//
// Kernels end by the GPU's clock and the CPU's waits by its own: exit status 0 means that all came in time.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define CUDA(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) die(__LINE__, #x, cudaGetErrorString(e_)); } while (0)
#define DRIVER(x) do { CUresult e_ = (x); if (e_ != CUDA_SUCCESS) { const char* t_; cuGetErrorString(e_, &t_); die(__LINE__, #x, t_); } } while (0)

using u32 = uint32_t;
using u64 = unsigned long long;

constexpr u64 KERNEL_LIMIT = 20000000000ull;  // ns that a kernel may take
constexpr double WAIT_LIMIT = 5e6;            // us that the CPU waits for one thing
constexpr int MOST_BLOCKS = 32, LINE = 32;    // words of a line of 128 bytes
constexpr int ROUNDS = 200, COPY = 64;
constexpr size_t LONG_COPY = 16 << 20;
constexpr u32 STOP = ~0u;

static void die(int line, const char* what, const char* why) {
  fprintf(stderr, "line %d: %s: %s\n", line, what, why);
  _Exit(1);
}

// ---------------------------------------------------------------- device

enum Way { AS_NCCL, LINE_EACH, BACKOFF, ELECTED, DEVICE, WAYS };
static const char* const NAMES[WAYS] = {
    "as NCCL: two threads of a block, one for each peer, load a line that all blocks share",
    "a line for each block",
    "one thread of a block, __nanosleep(500) between two loads",
    "one thread of the GPU at a time loads for all, the others read its copy in GPU memory",
    "the word lies in GPU memory, where a copy of the host writes it",
};

struct Words {
  u32* polled;  // host memory as NCCL allocates it; GPU memory for DEVICE
  u32* relay;   // GPU memory: of each peer the copied word and the lock, a line each
  u32* seen;    // host memory, a line for each block
  u64* reads;   // GPU memory
};

__device__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
// What cuda::atomic_ref<u32, thread_scope_system>::load(memory_order_relaxed) compiles to, which NCCL polls with.
__device__ u32 load_system(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
__device__ u32 load_gpu(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
__device__ void store_system(u32* at, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }

// The word as far as the GPU knows it. A thread that finds the lock free loads the word from the host for all. Only the holder of the lock
// stores, and acquires what the last one saw, so the copy never goes back.
__device__ u32 load_elected(const u32* polled, u32* relay, u32 old, u64& reads) {
  u32* lock = relay + LINE;
  u32 v = load_gpu(relay), taken = 1;
  if (v != old || load_gpu(lock) != 0) return v;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(taken) : "l"(lock) : "memory");
  if (taken != 0) return v;
  v = load_system(polled);
  reads++;
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(relay), "r"(v) : "memory");
  asm volatile("st.release.gpu.global.u32 [%0], 0;" ::"l"(lock) : "memory");
  return v;
}

template <int WAY>
__global__ void poll_kernel(Words w) {
  const u64 deadline = now() + KERNEL_LIMIT;
  const int peer = threadIdx.x;
  if (peer >= (WAY == BACKOFF ? 1 : 2)) return;
  const u32* polled = w.polled + (WAY == LINE_EACH ? blockIdx.x * LINE : 0) + peer;
  u32 old = 0;
  u64 reads = 0;
  for (u32 turn = 1; old != STOP; turn++) {
    u32 v;
    if (WAY == ELECTED) {
      v = load_elected(polled, w.relay + peer * 2 * LINE, old, reads);
    } else {
      v = load_system(polled);
      if (WAY != DEVICE) reads++;
      if (WAY == BACKOFF && v == old) __nanosleep(500);
    }
    if (v != old && peer == 0) store_system(w.seen + blockIdx.x * LINE, v);
    old = v;
    if (turn % 1024 == 0 && now() > deadline) break;
  }
  if (peer == 0) atomicAdd(w.reads, reads);
}

__global__ void store_kernel(u32* to, float* took) {
  const u64 began = now();
  for (u32 i = 1; i <= ROUNDS && now() < began + KERNEL_LIMIT; i++) {
    store_system(to, i);
    __threadfence_system();
  }
  *took = (now() - began) / 1e3f / ROUNDS;
}

// ---------------------------------------------------------------- host

static double micros() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void wait(const char* what, const std::function<bool()>& done) {
  const double began = micros();
  while (!done())
    if (micros() - began > WAIT_LIMIT) die(__LINE__, what, "not in time");
}

// The median time of `once`, which is told its round, from 1.
template <class Once>
static double median(int rounds, Once once) {
  std::vector<double> took;
  for (int i = 1; i <= rounds; i++) {
    const double began = micros();
    once(i);
    took.push_back(micros() - began);
  }
  std::nth_element(took.begin(), took.begin() + rounds / 2, took.end());
  return took[rounds / 2];
}

// Host memory as NCCL's ncclCuMemHostAlloc gives it to `cis`.
static u32* as_nccl(CUdevice device) {
  CUmemAllocationProp prop = {};
  int node = -1;
  DRIVER(cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device));
  prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
  prop.location.id = std::max(node, 0);
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  size_t size = 0;
  DRIVER(cuMemGetAllocationGranularity(&size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CUmemGenericAllocationHandle handle;
  CUdeviceptr at;
  DRIVER(cuMemCreate(&handle, size, &prop, 0));
  DRIVER(cuMemAddressReserve(&at, size, 0, 0, 0));
  DRIVER(cuMemMap(at, size, 0, handle, 0));
  CUmemAccessDesc access[2] = {};
  access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access[0].location.id = device;
  access[1].location = prop.location;
  access[0].flags = access[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  DRIVER(cuMemSetAccess(at, size, access, 2));
  memset((void*)at, 0, size);
  return (u32*)at;
}

static u32* pinned(size_t bytes) {
  u32* at;
  CUDA(cudaHostAlloc((void**)&at, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  memset(at, 0, bytes);
  return at;
}

static u32* device_words(size_t bytes) {
  u32* at;
  CUDA(cudaMalloc((void**)&at, bytes));
  CUDA(cudaMemset(at, 0, bytes));
  return at;
}

struct Bench {
  CUcontext copying, polling;
  CUstream copies, answers;
  cudaStream_t kernels, stores;
  u32 *ci, *device_ci, *numbers, *device_numbers, *target, *mark, *long_from, *long_to, *relay, *seen, *stored;
  u64* reads;
  u32 marks = 0;

  explicit Bench(bool own) {
    CUDA(cudaSetDevice(0));
    CUDA(cudaFree(nullptr));
    CUdevice device;
    DRIVER(cuCtxGetCurrent(&polling));
    DRIVER(cuCtxGetDevice(&device));
    CUDA(cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&stores, cudaStreamNonBlocking));
    ci = as_nccl(device);
    device_ci = device_words(4096);
    const size_t bytes = (ROUNDS + 1) * COPY;
    numbers = pinned(bytes);
    for (size_t i = 0; i < bytes / 4; i++) numbers[i] = i / (COPY / 4);
    device_numbers = device_words(bytes);
    CUDA(cudaMemcpy(device_numbers, numbers, bytes, cudaMemcpyHostToDevice));
    target = pinned(4096), mark = pinned(4096), stored = pinned(4096);
    seen = pinned(MOST_BLOCKS * LINE * 4);
    long_from = device_words(LONG_COPY), long_to = pinned(LONG_COPY);
    relay = device_words(4 * LINE * 4);
    reads = (u64*)device_words(8);
    copying = polling;
#if CUDA_VERSION >= 13000
    if (own) DRIVER(cuCtxCreate(&copying, nullptr, 0, device));
#else
    if (own) DRIVER(cuCtxCreate(&copying, 0, device));
#endif
    DRIVER(cuCtxSetCurrent(copying));
    DRIVER(cuStreamCreate(&copies, CU_STREAM_NON_BLOCKING));
    DRIVER(cuStreamCreate(&answers, CU_STREAM_NON_BLOCKING));
    DRIVER(cuCtxSetCurrent(polling));
  }

  // Changes what the blocks poll. `value` is a round's number or STOP.
  void answer(Way way, int blocks, u32 value) {
    if (way == DEVICE) {
      // Both words at once; numbers[0] is 0, which nobody waits for.
      u32* from = value == STOP ? mark + 2 * LINE : numbers + value * (COPY / 4);
      mark[2 * LINE] = mark[2 * LINE + 1] = STOP;
      DRIVER(cuMemcpyAsync((CUdeviceptr)device_ci, (CUdeviceptr)from, 8, answers));
      return;
    }
    for (int block = 0; block < (way == LINE_EACH ? blocks : 1); block++)
      for (int peer = 0; peer < 2; peer++) __atomic_store_n(ci + block * LINE + peer, value, __ATOMIC_RELAXED);
  }

  void await(const char* what, const u32* at, u32 value) {
    wait(what, [&] { return __atomic_load_n(at, __ATOMIC_ACQUIRE) == value; });
  }

  void write_mark() { DRIVER(cuStreamWriteValue32(copies, (CUdeviceptr)mark, ++marks, CU_STREAM_WRITE_VALUE_DEFAULT)); }

  void start(Way way, int blocks) {
    const Words w{way == DEVICE ? device_ci : ci, relay, seen, reads};
    switch (way) {
      case AS_NCCL: poll_kernel<AS_NCCL><<<blocks, 32, 0, kernels>>>(w); break;
      case LINE_EACH: poll_kernel<LINE_EACH><<<blocks, 32, 0, kernels>>>(w); break;
      case BACKOFF: poll_kernel<BACKOFF><<<blocks, 32, 0, kernels>>>(w); break;
      case ELECTED: poll_kernel<ELECTED><<<blocks, 32, 0, kernels>>>(w); break;
      default: poll_kernel<DEVICE><<<blocks, 32, 0, kernels>>>(w); break;
    }
    CUDA(cudaGetLastError());
  }

  // A line of the table; without blocks nobody polls.
  void measure(Way way, int blocks) {
    memset(seen, 0, MOST_BLOCKS * LINE * 4);
    memset(ci, 0, MOST_BLOCKS * LINE * 4);
    CUDA(cudaMemset(device_ci, 0, 8));
    CUDA(cudaMemset(relay, 0, 4 * LINE * 4));
    CUDA(cudaMemset(reads, 0, 8));
    CUDA(cudaDeviceSynchronize());
    const double began = micros();
    if (blocks > 0) start(way, blocks);
    auto all_saw = [&](u32 value) {
      for (int block = 0; block < blocks; block++) await("a block's reply", seen + block * LINE, value);
    };
    DRIVER(cuCtxSetCurrent(copying));
    // All blocks run from here on.
    double answered = median(ROUNDS, [&](u32 i) { if (blocks > 0) { answer(way, blocks, i); all_saw(i); } });
    target[COPY / 4 - 1] = 0;
    double out = median(ROUNDS, [&](u32 i) {
      DRIVER(cuMemcpyAsync((CUdeviceptr)target, (CUdeviceptr)(device_numbers + i * (COPY / 4)), COPY, copies));
      await("a copy of 64 B from the GPU", target + COPY / 4 - 1, i);
    });
    double in = median(ROUNDS, [&](u32 i) {
      DRIVER(cuMemcpyAsync((CUdeviceptr)(device_numbers + i * (COPY / 4)), (CUdeviceptr)(numbers + i * (COPY / 4)), COPY, copies));
      write_mark();
      await("a copy of 64 B to the GPU", mark, marks);
    });
    double marked = median(ROUNDS, [&](u32) { write_mark(); await("a mark", mark, marks); });
    double long_out = median(9, [&](u32) {
      DRIVER(cuMemcpyAsync((CUdeviceptr)long_to, (CUdeviceptr)long_from, LONG_COPY, copies));
      wait("a copy of 16 MiB", [&] { return cuStreamQuery(copies) == CUDA_SUCCESS; });
    });
    DRIVER(cuCtxSetCurrent(polling));
    float* took = (float*)(stored + LINE);
    store_kernel<<<1, 1, 0, stores>>>(stored, took);
    CUDA(cudaGetLastError());
    wait("stores", [&] { return cudaStreamQuery(stores) == cudaSuccess; });
    DRIVER(cuCtxSetCurrent(copying));
    if (blocks > 0) answer(way, blocks, STOP);
    DRIVER(cuCtxSetCurrent(polling));
    wait("the kernel's end", [&] { return cudaStreamQuery(kernels) == cudaSuccess; });
    const double all = micros() - began;
    u64 read = 0;
    CUDA(cudaMemcpy(&read, reads, 8, cudaMemcpyDeviceToHost));
    printf("%6d %9.1f %9.1f %9.1f %11.1f %9.2f %9.1f %9.2f\n", blocks, out, in, marked, long_out, *took, answered, read / all);
    fflush(stdout);
  }
};

int main(int argc, char** argv) {
  const bool own = argc == 2 && !strcmp(argv[1], "own");
  if (argc > 2 || (argc == 2 && !own)) die(__LINE__, argv[1], "the one argument is: own");
  Bench bench(own);
  cudaDeviceProp prop;
  CUDA(cudaGetDeviceProperties(&prop, 0));
  printf("%s, copies in %s context\n", prop.name, own ? "a context of their own" : "the kernel's");
  const char* head = "blocks  D2H 64 B  H2D 64 B      mark  D2H 16 MiB     store    answer  reads/us";
  printf("\nnobody polls\n%s\n", head);
  bench.measure(AS_NCCL, 0);  // Loads what CUDA loads late.
  bench.measure(AS_NCCL, 0);
  for (int way = 0; way < WAYS; way++) {
    printf("\n%s\n%s\n", NAMES[way], head);
    for (int blocks = 1; blocks <= MOST_BLOCKS; blocks *= 2) bench.measure((Way)way, blocks);
  }
  return 0;
}
