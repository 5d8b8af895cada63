// Kernels on NCCL's device API over pushgate's RMA table, on GPUs of one host: a process for each, which this program starts.
//
//   rma random SECONDS [SEED]    puts, gets, values and signals of random sizes; every byte and every order checked
//   rma latency                  one put of 8 bytes with its signal, one value with its signal, one signal alone
//   rma bandwidth                one put of 1 MiB to 256 MiB, alone and while other blocks of the kernel poll in flush()
//   rma host                     ncclPutSignal, ncclSignal, and the all-gather and all-to-all that use no SM
//   rma blocked                  a kernel waits for a put while another thread blocks in the driver
//
// Build: nvcc -O2 -std=c++17 -arch=native rma.cu -o rma -I$NCCL/include -L$NCCL/lib -lnccl, with NCCL 2.30.7 or later.
// Run:   NCCL_NET_PLUGIN=/path/libnccl-net-pushgate.so NCCL_NET=pushgate NCCL_GIN_TYPE=2 NCCL_NVLS_ENABLE=0 \
//            timeout 600 ./rma random 420
//
// What this program waits for in a kernel has an end by the GPU's clock; NCCL's flush() has none, hence the timeout. Exit status 0:
// nothing was wrong.
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#define CUDA(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) die(__LINE__, #x, cudaGetErrorString(e_)); } while (0)
#define NCCL(x) do { ncclResult_t e_ = (x); if (e_ != ncclSuccess) die(__LINE__, #x, ncclGetErrorString(e_)); } while (0)

using u64 = unsigned long long;

constexpr int RANKS = 2;
constexpr u64 LIMIT = 5000000000ull;       // ns that a kernel waits for one thing
constexpr u64 ROUND_LIMIT = 30000000000ull;  // ns that a round of random operations may take

// What the processes share.
struct Shared {
  ncclUniqueId id;
  std::atomic<int> arrived, generation, wrong, go;
};
static Shared* shared;
static int rank;

static void die(int line, const char* what, const char* why) {
  printf("rank %d, line %d: %s: %s %s\n", rank, line, what, why, ncclGetLastError(nullptr));
 
  shared->wrong = 1;
  _exit(1);
}

// Waits for every rank; ends the process if another one has failed.
static void barrier() {
  int generation = shared->generation;
  if (++shared->arrived == RANKS) {
    shared->arrived = 0;
    ++shared->generation;
    return;
  }
  while (shared->generation == generation) {
    if (shared->wrong) _exit(1);
    usleep(50);
  }
}

// ---------------------------------------------------------------- device

__device__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__host__ __device__ u64 mix(u64 x) {
  x ^= x >> 30; x *= 0xbf58476d1ce4e5b9ull; x ^= x >> 27; x *= 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

__device__ unsigned char byte_of(u64 key, size_t i) { return mix(key + i / 8) >> i % 8 * 8; }

// Waits until a signal is at least `least`. False after the deadline.
__device__ bool until(const ncclGin& gin, int signal, u64 least, u64 deadline) {
  while ((long long)(gin.readSignal(signal) - least) < 0)
    if (now() > deadline) return false;
  return true;
}

constexpr int BLOCKS = 8, PARTS = 6, GUARD = 64;

// What was wrong first, and how far each block has come: its step, and when it began that (GPU's clock).
struct Fault {
  unsigned any, what, block, step, part;
  u64 at, size, seen, expected;
  u64 begun[BLOCKS], steps[BLOCKS], since[BLOCKS];
};
enum { DEADLINE_ACK = 1, DEADLINE_DATA, BYTES, AROUND, GOT, VALUE };

__device__ void fault(Fault* f, unsigned what, unsigned step, unsigned part, u64 at, u64 size, u64 seen, u64 expected) {
  if (atomicExch(&f->any, 1) == 0) {
    f->what = what; f->block = blockIdx.x; f->step = step; f->part = part;
    f->at = at; f->size = size; f->seen = seen; f->expected = expected;
    __threadfence_system();
  }
}

constexpr size_t MOST = 1 << 20, PLACE = MOST + 2 * GUARD + 64;
constexpr size_t BLOCK_BYTES = 2 * PARTS * PLACE;  // two halves, used by turns
constexpr size_t SPAN = BLOCKS * BLOCK_BYTES;
// A rank's window: what it sends, what arrives, what others get, what it got.
constexpr size_t SEND = 0, RECEIVE = SPAN, KEPT = 2 * SPAN, GOTTEN = 3 * SPAN, WINDOW = 4 * SPAN;

struct Part { size_t size, from, to; int kind; };  // kind 0, 1: put; 2: put twice to one place; 3: value

// A part of a step, as sender and receiver both compute it.
__device__ Part part_of(u64 seed, int from_rank, int block, unsigned step, int part) {
  u64 r = mix(seed ^ mix((u64)from_rank << 40 ^ (u64)block << 32 ^ (u64)step << 8 ^ part));
  Part p;
  int log = r % 21;
  p.size = 1 + (r >> 8) % ((size_t)1 << log);
  p.kind = (r >> 30) % 4;
  // A put of one byte waits for its turn on the SMs, 2 ms: few of them, or they take most of the time.
  if (p.size == 1 && (r >> 50) % 8) p.size = 2;
  if (p.kind == 3) p.size = 8;
  size_t base = (size_t)block * BLOCK_BYTES + ((step & 1) * PARTS + part) * PLACE + GUARD;
  p.from = base + (r >> 34) % 61;
  p.to = base + (r >> 42) % 61;
  if (p.kind == 3) p.to &= ~(size_t)7;
  return p;
}

__device__ u64 key_of(u64 seed, int from_rank, int block, unsigned step, int part) {
  return mix(seed + 77) ^ mix((u64)from_rank << 50 ^ (u64)block << 42 ^ (u64)step << 8 ^ part);
}

__device__ void fill(char* at, size_t size, u64 key) {
  for (size_t i = threadIdx.x; i < size; i += blockDim.x) at[i] = byte_of(key, i);
}

// A block of each rank works with the same block of the other, over a context of its own if there are enough contexts.
__global__ void random_kernel(ncclWindow_t window, char* own, ncclDevComm comm, u64 kept, u64 seed, unsigned steps, u64 sent, u64 acked,
                              Fault* faults, u64* count, unsigned* ended) {
  const int contexts = comm.ginContextCount > 0 ? comm.ginContextCount : 1;
  ncclGin gin{comm, (int)blockIdx.x % contexts};
  const int me = comm.rank, peer = 1 - me, block = blockIdx.x;
  const int data = 2 * block, ack = 2 * block + 1;
  const u64 end = now() + ROUND_LIMIT;
  const ncclTeam world = ncclTeamWorld(comm);
  __shared__ int bad;
  if (threadIdx.x == 0) bad = 0;
  __syncthreads();
  u64 bytes = 0, ops = 0;
  if (threadIdx.x == 0) *(volatile u64*)&faults->begun[block] = now();
  for (unsigned step = 0; step < steps && !bad; step++) {
    if (threadIdx.x == 0) {
      faults->steps[block] = step;
      faults->since[block] = now();
    }
    // The place is free again when the peer has checked what lay there two steps ago.
    if (threadIdx.x == 0 && step >= 2 && !until(gin, ack, acked + step - 1, min(now() + LIMIT, end))) {
      fault(faults, DEADLINE_ACK, step, 0, gin.readSignal(ack), 0, acked + step - 1, 0);
      bad = 1;
    }
    __syncthreads();
    if (bad) break;
    const int parts = 1 + mix(seed ^ step * 31 ^ block) % PARTS;
    for (int i = 0; i < parts; i++) {
      Part p = part_of(seed, me, block, step, i);
      if (p.kind != 3) fill(own + SEND + p.from, p.size, key_of(seed, me, block, step, i));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < parts; i++) {
        Part p = part_of(seed, me, block, step, i);
        const bool last = i == parts - 1;
        const size_t to = RECEIVE + p.to;
        ncclGin_StrongSignalAdd signal{(ncclGinSignal_t)data, 3};
        if (p.kind == 3) {
          u64 value = key_of(seed, me, block, step, i);
          if (last) gin.putValue(world, peer, window, to, value, signal);
          else gin.putValue(world, peer, window, to, value);
        } else {
          // Wrong bytes first: the later put of the same context and rank must win.
          if (p.kind == 2) gin.put(world, peer, window, to, window, KEPT + (size_t)block * BLOCK_BYTES, p.size);
          if (last) gin.put(world, peer, window, to, window, SEND + p.from, p.size, signal);
          else gin.put(world, peer, window, to, window, SEND + p.from, p.size);
        }
        bytes += p.size; ops++;
      }
    }
    // Now and then a get of what the peer keeps.
    if (mix(seed ^ step * 7 ^ block ^ 5) % 3 == 0) {
      u64 r = mix(seed ^ step * 131 ^ block);
      size_t size = 1 + (r >> 8) % ((size_t)1 << r % 20), from = (r >> 30) % 4096, to = GUARD + (r >> 45) % 61;
      const size_t base = (size_t)block * BLOCK_BYTES;
      if (threadIdx.x == 0) {
        gin.get(world, peer, window, KEPT + base + from, window, GOTTEN + base + to, size);
        gin.flush(ncclCoopThread());
        bytes += size; ops++;
      }
      __syncthreads();
      for (size_t i = threadIdx.x; i < size; i += blockDim.x) {
        unsigned char seen = ((volatile unsigned char*)own)[GOTTEN + base + to + i], right = byte_of(kept + 1000 + peer * 64 + block, from + i);
        if (seen != right) { fault(faults, GOT, step, 0, i, size, seen, right); bad = 1; break; }
      }
      __syncthreads();
    }
    // What the peer sent in this step.
    if (threadIdx.x == 0 && !until(gin, data, sent + 3ull * (step + 1), min(now() + LIMIT, end))) {
      fault(faults, DEADLINE_DATA, step, 0, gin.readSignal(data), 0, sent + 3ull * (step + 1), 0);
      bad = 1;
    }
    __syncthreads();
    if (bad) break;
    for (int i = 0; i < parts; i++) {
      Part p = part_of(seed, peer, block, step, i);
      const char* at = own + RECEIVE + p.to;
      u64 key = key_of(seed, peer, block, step, i);
      for (size_t j = threadIdx.x; j < p.size; j += blockDim.x) {
        unsigned char seen = ((volatile unsigned char*)at)[j];
        unsigned char right = p.kind == 3 ? (unsigned char)(key >> 8 * j) : byte_of(key, j);
        if (seen != right) { fault(faults, p.kind == 3 ? VALUE : BYTES, step, i, j, p.size, seen, right); bad = 1; break; }
      }
      if (threadIdx.x < 32) {
        unsigned char before = ((volatile unsigned char*)at)[-1 - (long)threadIdx.x % 3], after = ((volatile unsigned char*)at)[p.size + threadIdx.x % 3];
        if (before != 0xee || after != 0xee) { fault(faults, AROUND, step, i, p.to, p.size, before, after); bad = 1; }
      }
    }
    __syncthreads();
    if (bad) break;
    // The place is as it was, for the next to see what it did not write.
    for (int i = 0; i < parts; i++) {
      Part p = part_of(seed, peer, block, step, i);
      for (size_t j = threadIdx.x; j < p.size; j += blockDim.x) own[RECEIVE + p.to + j] = 0xee;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) gin.signal(world, peer, ncclGin_StrongSignalAdd{(ncclGinSignal_t)ack, 1});
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    gin.flush(ncclCoopThread());
    atomicAdd(&count[0], ops);
    atomicAdd(&count[1], bytes);
    atomicAdd(ended, 1);
  }
}

// Keeps every SM busy until the blocks of random_kernel have ended, or by the clock. `ended` is GPU memory: if all these threads read
// host memory, they would slow down every fence of the GPU.
__global__ void busy_kernel(volatile unsigned* ended, float* memory, size_t floats) {
  const u64 deadline = now() + ROUND_LIMIT;
  float x = threadIdx.x;
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (unsigned k = 0;; k++) {
    for (int j = 0; j < 64; j++) x = x * 1.0001f + 0.5f;
    memory[i] = x;
    i = (i + gridDim.x * (size_t)blockDim.x) % floats;
    if (k % 64 == 0 && (*ended == BLOCKS || now() > deadline)) return;
  }
}

__global__ void keep_kernel(char* own, u64 seed, int me) {
  fill(own + KEPT + blockIdx.x * BLOCK_BYTES, BLOCK_BYTES, seed + 1000 + me * 64 + blockIdx.x);
}

__global__ void ping_pong(ncclWindow_t window, ncclDevComm comm, int what, int rounds, u64 base, u64* out) {
  ncclGin gin{comm, 0};
  const u64 deadline = now() + LIMIT;
  const ncclTeam world = ncclTeamWorld(comm);
  const int peer = 1 - comm.rank, warm = rounds / 10;
  u64 began = 0;
  bool ok = true;
  for (int i = 0; i < rounds; i++) {
    if (i == warm) began = now();
    if (comm.rank == 1 && !(ok = until(gin, 0, base + i + 1, deadline))) break;
    ncclGin_StrongSignalInc signal{0};
    if (what == 0) gin.put(world, peer, window, 4096, window, 0, 8, signal);
    else if (what == 1) gin.putValue(world, peer, window, 4096, (u64)i, signal);
    else gin.signal(world, peer, signal);
    if (comm.rank == 0 && !(ok = until(gin, 0, base + i + 1, deadline))) break;
  }
  *out = ok ? (now() - began) / (rounds - warm) / 2 : 0;
}

// Both ranks put; `flushers` blocks more wait in NCCL's flush, which polls a word of host memory.
__global__ void put_kernel(ncclWindow_t window, ncclDevComm comm, size_t bytes, u64 base, u64* out) {
  ncclGin gin{comm, 0};
  const u64 began = now();
  const ncclTeam world = ncclTeamWorld(comm);
  const int peer = 1 - comm.rank;
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    gin.put(world, peer, window, bytes, window, 0, bytes, ncclGin_StrongSignalInc{0});
    *out = until(gin, 0, base + 1, began + LIMIT) ? now() - began : 0;
  } else {
    while (now() < began + 20000) {}
  }
  gin.flush(ncclCoopThread());
}

__global__ void one_put_kernel(ncclWindow_t window, ncclDevComm comm, size_t bytes) {
  ncclGin gin{comm, 0};
  gin.put(ncclTeamWorld(comm), 1 - comm.rank, window, bytes, window, 0, bytes, ncclGin_StrongSignalInc{0});
  gin.flush(ncclCoopThread());
}

__global__ void waiting_kernel(ncclDevComm comm, u64 base, u64 limit, u64* out) {
  ncclGin gin{comm, 0};
  const u64 began = now();
  *out = until(gin, 0, base + 1, began + limit) ? now() - began : 0;
}

__global__ void nothing_kernel() {}
__global__ void loaded_late_kernel() {}

// ---------------------------------------------------------------- host

struct Rank {
  ncclComm_t comm;
  ncclDevComm device;
  ncclWindow_t window;
  char* own;
  cudaStream_t stream;
  u64* out;  // host memory
  int contexts;

  Rank(size_t bytes, int signals, int contexts, int policy = NCCL_CONFIG_UNDEF_INT) {
    CUDA(cudaSetDevice(rank));
    if (rank == 0) NCCL(ncclGetUniqueId(&shared->id));
    barrier();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = policy;
    NCCL(ncclCommInitRankConfig(&comm, RANKS, shared->id, rank, &config));
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    NCCL(ncclCommQueryProperties(comm, &properties));
    if (properties.ginType == NCCL_GIN_TYPE_NONE)
      die(__LINE__, "GIN", "NCCL has taken no RMA table: is NCCL_GIN_TYPE=2, and NCCL_NET_PLUGIN the library?");
    NCCL(ncclMemAlloc((void**)&own, bytes));
    CUDA(cudaMemset(own, 0xee, bytes));
    CUDA(cudaDeviceSynchronize());
    NCCL(ncclCommWindowRegister(comm, own, bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
    ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    needs.ginSignalCount = signals;
    needs.ginContextCount = contexts;
    needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    NCCL(ncclDevCommCreate(comm, &needs, &device));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaHostAlloc((void**)&out, 4096, 0));
    memset(out, 0, 4096);
    if (rank == 0) printf("the ranks have met\n");
  }

  void end() {
    barrier();
    NCCL(ncclDevCommDestroy(comm, &device));
    NCCL(ncclCommWindowDeregister(comm, window));
    NCCL(ncclMemFree(own));
    NCCL(ncclCommFinalize(comm));
    NCCL(ncclCommDestroy(comm));
  }

  void wait() {
    cudaError_t e;
    while ((e = cudaStreamQuery(stream)) == cudaErrorNotReady) usleep(200);
    CUDA(e);
  }
};

static int random_ops(double seconds, u64 seed) {
  Rank r(WINDOW, 2 * BLOCKS, 4);
  if (rank == 0) printf("%d contexts\n", r.device.ginContextCount);
  Fault* fault;
  unsigned* ended;
  float* memory;
  const size_t floats = 64 << 20;
  u64* count;
  CUDA(cudaHostAlloc((void**)&fault, sizeof(Fault), 0));
  CUDA(cudaMalloc((void**)&ended, sizeof(unsigned)));
  CUDA(cudaMalloc((void**)&memory, floats * sizeof(float)));
  CUDA(cudaMalloc((void**)&count, 16));
  CUDA(cudaMemset(count, 0, 16));
  memset(fault, 0, sizeof(Fault));
  cudaStream_t beside;
  CUDA(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
  cudaDeviceProp properties;
  CUDA(cudaGetDeviceProperties(&properties, rank));
  keep_kernel<<<BLOCKS, 256, 0, r.stream>>>(r.own, seed, rank);
  CUDA(cudaDeviceSynchronize());
  auto began = std::chrono::steady_clock::now();
  const unsigned steps = 200;
  u64 sent = 0, acked = 0, rounds = 0;
  double told = 10, longest = 0;
  for (;; rounds++) {
    double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    if (rank == 0) shared->go = passed < seconds;
    barrier();
    if (!shared->go) break;
    CUDA(cudaMemset(ended, 0, sizeof(unsigned)));
    memset(fault->begun, 0, sizeof fault->begun);
    // The patterns of a round are its own; what is kept for gets stays that of the first.
    random_kernel<<<BLOCKS, 256, 0, r.stream>>>(r.window, r.own, r.device, seed, mix(seed + rounds), steps, sent, acked, fault, count, ended);
    CUDA(cudaGetLastError());
    // Launches into two streams have no order. Beside another program on the GPU the busy kernel was seen to begin first, and to leave
    // no room for this one.
    for (int b = 0; b < BLOCKS; b++)
      while (*(volatile u64*)&fault->begun[b] == 0 && cudaStreamQuery(r.stream) == cudaErrorNotReady) usleep(50);
    busy_kernel<<<properties.multiProcessorCount * 2, 1024, 0, beside>>>(ended, memory, floats);
    CUDA(cudaGetLastError());
    r.wait();
    CUDA(cudaStreamSynchronize(beside));
    if (fault->any) {
      static const char* names[] = {"", "no ack before the deadline", "no data before the deadline", "a wrong byte", "a byte around was written", "a wrong byte of a get", "a wrong value"};
      printf("rank %d, round %llu: %s: block %u step %u part %u at %llu of %llu: %llx, expected %llx\n", rank, rounds,
             names[fault->what], fault->block, fault->step, fault->part, fault->at, fault->size, fault->seen, fault->expected);
    }
    if (fault->any || shared->wrong) {
      for (int b = 0; b < BLOCKS; b++)
        printf("rank %d, block %d: began at %.3f s of the GPU's clock, step %llu since %.3f s\n", rank, b, fault->begun[b] % 1000000000000ull / 1e9,
               fault->steps[b], fault->since[b] % 1000000000000ull / 1e9);
      shared->wrong = 1;
      return 1;
    }
    sent += 3ull * steps;
    acked += steps;
    if (rank == 0 && passed > told) { printf("%.0f s, round %llu\n", passed, rounds); told += 30; }
    double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() - passed;
    longest = std::max(longest, took);
  }
  u64 counts[2];
  CUDA(cudaMemcpy(counts, count, 16, cudaMemcpyDefault));
  printf("rank %d: %llu rounds, %llu operations, %.1f GB, nothing wrong; the longest round took %.2f s\n", rank, rounds, counts[0], counts[1] / 1e9, longest);
 
  r.end();
  return 0;
}

static int latency() {
  Rank r(1 << 20, 1, 1);
  const int rounds = 1000;
  u64 base = 0;
  const char* names[] = {"put of 8 bytes with a signal", "value of 8 bytes with a signal", "signal alone"};
  for (int turn = 0; turn < 3; turn++)
    for (int what = 0; what < 3; what++) {
      barrier();
      ping_pong<<<1, 1, 0, r.stream>>>(r.window, r.device, what, rounds, base, r.out);
      CUDA(cudaGetLastError());
      r.wait();
      base += rounds;
      if (rank == 0) { printf("%s: %.2f us one way\n", names[what], *r.out / 1e3); }
      if (*r.out == 0) { shared->wrong = 1; return 1; }
    }
  r.end();
  return 0;
}

static int bandwidth() {
  const size_t most = 256 << 20;
  Rank r(2 * most, 1, 1);
  u64 base = 0;
  for (int blocks : {1, 2, 16})
    for (size_t bytes = 1 << 20; bytes <= most; bytes *= 4) {
      u64 best = ~0ull;
      for (int turn = 0; turn < 4; turn++) {
        barrier();
        put_kernel<<<blocks, 32, 0, r.stream>>>(r.window, r.device, bytes, base, r.out);
        CUDA(cudaGetLastError());
        r.wait();
        base++;
        if (*r.out == 0) { shared->wrong = 1; return 1; }
        best = std::min(best, *r.out);
      }
      if (rank == 0) printf("%d blocks in flush, %zu MiB both ways: %.1f us, %.1f GB/s\n", blocks, bytes >> 20, best / 1e3, bytes / (double)best);
    }
  r.end();
  return 0;
}

__global__ void pattern_kernel(char* at, size_t bytes, u64 key) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes; i += gridDim.x * (size_t)blockDim.x) at[i] = byte_of(key, i);
}

__global__ void compare_kernel(const char* at, size_t bytes, u64 key, u64* wrong) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes; i += gridDim.x * (size_t)blockDim.x)
    if ((unsigned char)at[i] != byte_of(key, i)) atomicAdd(wrong, 1);
}

static int host_calls() {
  const size_t most = 64 << 20;
  Rank r(4 * most, 1, 1, NCCL_CTA_POLICY_ZERO);
  const int peer = 1 - rank;
  u64* wrong;
  CUDA(cudaMalloc((void**)&wrong, 8));
  CUDA(cudaMemset(wrong, 0, 8));
  CUDA(cudaDeviceSynchronize());
  auto check = [&](const char* what, size_t bytes) {
    u64 n;
    r.wait();
    CUDA(cudaMemcpy(&n, wrong, 8, cudaMemcpyDefault));
    if (n) { printf("rank %d: %s of %zu bytes: %llu wrong\n", rank, what, bytes, n); shared->wrong = 1; _exit(1); }
  };
  for (size_t bytes = 64; bytes <= most; bytes *= 16) {
    for (u64 turn = 0; turn < 3; turn++) {
      ncclWaitSignalDesc_t one{};
      one.opCnt = 1; one.peer = peer;
      pattern_kernel<<<64, 256, 0, r.stream>>>(r.own, bytes, turn * 10 + rank);
      NCCL(ncclPutSignal(r.own, bytes, ncclInt8, peer, r.window, most, 0, 0, 0, r.comm, r.stream));
      NCCL(ncclWaitSignal(1, &one, r.comm, r.stream));
      compare_kernel<<<64, 256, 0, r.stream>>>(r.own + most, bytes, turn * 10 + peer, wrong);
      NCCL(ncclSignal(peer, 0, 0, 0, r.comm, r.stream));
      NCCL(ncclWaitSignal(1, &one, r.comm, r.stream));
      check("ncclPutSignal", bytes);
      pattern_kernel<<<64, 256, 0, r.stream>>>(r.own, bytes, turn * 10 + rank + 100);
      NCCL(ncclAllGather(r.own, r.own + most, bytes, ncclInt8, r.comm, r.stream));
      for (int from = 0; from < RANKS; from++) compare_kernel<<<64, 256, 0, r.stream>>>(r.own + most + from * bytes, bytes, turn * 10 + from + 100, wrong);
      check("ncclAllGather", bytes);
      for (int to = 0; to < RANKS; to++) pattern_kernel<<<64, 256, 0, r.stream>>>(r.own + to * bytes / RANKS, bytes / RANKS, turn * 10 + rank * 2 + to + 200);
      NCCL(ncclAlltoAll(r.own, r.own + most, bytes / RANKS, ncclInt8, r.comm, r.stream));
      for (int from = 0; from < RANKS; from++) compare_kernel<<<64, 256, 0, r.stream>>>(r.own + most + from * bytes / RANKS, bytes / RANKS, turn * 10 + from * 2 + rank + 200, wrong);
      check("ncclAlltoAll", bytes);
      barrier();
    }
    if (rank == 0) { printf("%zu bytes: put with signal, all-gather, all-to-all right\n", bytes); }
  }
  r.end();
  return 0;
}

static int blocked() {
  Rank r(64 << 20, 1, 1);
  const u64 limit = 3000000000ull;
  // Loaded now: that CUDA loads a kernel late is a case of its own.
  nothing_kernel<<<1, 1, 0, r.stream>>>();
  r.wait();
  const char* names[] = {"cudaFree", "3000 launches", "a launch that loads its kernel", "nothing"};
  int missed = 0;
  for (int what = 0; what < 4; what++) {
    barrier();
    if (rank == 0) {
      void* memory;
      if (what == 0) CUDA(cudaMalloc(&memory, 1 << 20));
      waiting_kernel<<<1, 1, 0, r.stream>>>(r.device, what, limit, r.out);
      CUDA(cudaGetLastError());
      std::thread other;
      if (what == 0) other = std::thread([=] { cudaSetDevice(0); cudaFree(memory); });
      if (what == 1) other = std::thread([&] { cudaSetDevice(0); for (int i = 0; i < 3000; i++) nothing_kernel<<<1, 1, 0, r.stream>>>(); });
      if (what == 2) other = std::thread([&] { cudaSetDevice(0); loaded_late_kernel<<<1, 1, 0, r.stream>>>(); });
      usleep(300000);
      barrier();
      if (other.joinable()) other.join();
      CUDA(cudaStreamSynchronize(r.stream));
      printf("beside %s: %s\n", names[what], *r.out ? "the signal came" : "NO SIGNAL while the other thread was blocked");
      missed += *r.out == 0;
    } else {
      barrier();
      one_put_kernel<<<1, 1, 0, r.stream>>>(r.window, r.device, 8 << 20);
      CUDA(cudaGetLastError());
      r.wait();
    }
    barrier();
  }
  r.end();
  return missed;
}

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "";
  if (mode != "random" && mode != "latency" && mode != "bandwidth" && mode != "host" && mode != "blocked") {
    fprintf(stderr, "usage: rma random SECONDS [SEED] | latency | bandwidth | host | blocked\n");
    return 2;
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);
  shared = new (mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
  pid_t children[RANKS];
  for (rank = 0; rank < RANKS; rank++) {
    if ((children[rank] = fork()) == 0) {
      // No rank outlives this program: a rank that waits in the driver ends with its kernels.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      // NCCL takes the ranks for two hosts, so that they reach each other through the plugin.
      setenv("NCCL_HOSTID", rank ? "host-1" : "host-0", 1);
      int result = mode == "random" ? random_ops(argc > 2 ? atof(argv[2]) : 60, argc > 3 ? strtoull(argv[3], nullptr, 0) : 1)
                   : mode == "latency" ? latency() : mode == "bandwidth" ? bandwidth() : mode == "host" ? host_calls() : blocked();
      _exit(result);
    }
  }
  int failed = 0, status;
  for (pid_t child : children) failed |= waitpid(child, &status, 0) < 0 || status != 0;
  return failed;
}
