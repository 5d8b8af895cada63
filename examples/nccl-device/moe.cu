// Experts on several GPUs, with NCCL's device API: kernels send each token to the rank that has the token's expert (dispatch), the
// experts work, and kernels send the results back (combine). Tokens are vectors of BF16. NCCL hands the kernels' puts and signals to
// an RMA plugin; docs/device-api-nccl.md says how to run this over pushgate.
//
// Build: nvcc -O2 -std=c++17 -arch=native moe.cu -o moe -I$NCCL/include -L$NCCL/lib -lnccl -I$MPI/include -L$MPI/lib -lmpi
// Run:   mpirun -np 2 ./moe [TOKENS] [ROUNDS]
//
// A rank sends to another rank one block of bytes: the tokens for that rank's experts, packed, and before them the number of tokens of
// each expert. A signal follows the block, so that a rank that has seen the signal has the block. Each rank has a place for each
// other rank, so that nobody waits for a place; signals only grow, and a round's value is the number of the round.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>
#include <nccl_device.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CUDA(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) fail(__LINE__, cudaGetErrorString(e_)); } while (0)
#define NCCL(x) do { ncclResult_t e_ = (x); if (e_ != ncclSuccess) fail(__LINE__, ncclGetErrorString(e_)); } while (0)

static void fail(int line, const char* why) {
  fprintf(stderr, "moe.cu:%d: %s; NCCL's last error: %s\n", line, why, ncclGetLastError(nullptr));
  MPI_Abort(MPI_COMM_WORLD, 1);
}

constexpr int HIDDEN = 1024;        // numbers of a token
constexpr int EXPERTS = 4;          // of each rank
constexpr int HEADER = 256;         // bytes before the tokens of a block: the counts of EXPERTS experts
constexpr int THREADS = 256;
constexpr unsigned long long LIMIT = 10000000000ull;  // ns that a kernel waits for other ranks

using bf16 = __nv_bfloat16;

// The sizes of what a rank holds. A block has room for all tokens of a rank.
struct Layout {
  int ranks, tokens;
  __host__ __device__ size_t token_bytes() const { return HIDDEN * sizeof(bf16); }
  __host__ __device__ size_t block_bytes() const { return HEADER + tokens * token_bytes(); }
  // Four areas with a block for each rank: to dispatch, dispatched, results to combine, combined.
  __host__ __device__ size_t block(int area, int rank) const { return (size_t(area) * ranks + rank) * block_bytes(); }
  __host__ __device__ size_t bytes() const { return block(4, 0); }
};
enum Area { OUT, IN, RESULTS, COMBINED };

__host__ __device__ unsigned hash(unsigned x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}
// The expert of a token, as a router would choose one, and a token's numbers.
__host__ __device__ int expert_of(int rank, int token, int round, int experts) {
  return hash(rank * 1000003u + token * 7919u + round) % experts;
}
__host__ __device__ float number_of(int rank, int token, int round, int i) {
  return float(hash(rank * 31u + token * 131u + round * 17u + i) % 256) - 128;
}
// What an expert does with a number. BF16 holds the results exactly, so that they can be compared.
__host__ __device__ float work_of(int expert, float x) { return x * float(1 << expert % 4); }

__device__ unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Waits for the signal of a rank. Sets `late` after the limit, so that every kernel ends.
__device__ bool wait_for(const ncclGin& gin, int signal, unsigned long long least, unsigned* late) {
  const unsigned long long end = now() + LIMIT;
  while ((long long)(gin.readSignal(signal) - least) < 0)
    if (now() > end) { *late = 1; return false; }
  return true;
}

// Packs the tokens for each rank and sends them: a block of threads for each rank. `places` says where a token lies in the block.
__global__ void dispatch(ncclDevComm comm, ncclWindow_t window, char* own, Layout l, const bf16* tokens, int* places, int round) {
  const int to = blockIdx.x, me = comm.rank;
  __shared__ int counts[EXPERTS], starts[EXPERTS], total;
  char* block = own + l.block(OUT, to);
  if (threadIdx.x < EXPERTS) counts[threadIdx.x] = 0;
  __syncthreads();
  for (int t = threadIdx.x; t < l.tokens; t += blockDim.x) {
    int expert = expert_of(me, t, round, l.ranks * EXPERTS);
    if (expert / EXPERTS == to) atomicAdd(&counts[expert % EXPERTS], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    total = 0;
    for (int e = 0; e < EXPERTS; e++) {
      ((int*)block)[e] = counts[e];
      starts[e] = total;
      total += counts[e];
    }
  }
  __syncthreads();
  for (int t = threadIdx.x; t < l.tokens; t += blockDim.x) {
    int expert = expert_of(me, t, round, l.ranks * EXPERTS);
    if (expert / EXPERTS == to) places[t] = atomicAdd(&starts[expert % EXPERTS], 1);
  }
  __syncthreads();
  for (int t = 0; t < l.tokens; t++) {
    if (expert_of(me, t, round, l.ranks * EXPERTS) / EXPERTS != to) continue;
    const uint4* from = (const uint4*)(tokens + (size_t)t * HIDDEN);
    uint4* at = (uint4*)(block + HEADER + places[t] * l.token_bytes());
    for (int i = threadIdx.x; i < HIDDEN / 8; i += blockDim.x) at[i] = from[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ncclGin gin{comm, 0};
    gin.put(ncclTeamWorld(comm), to, window, l.block(IN, me), window, l.block(OUT, to), HEADER + total * l.token_bytes(),
            ncclGin_StrongSignalInc{(ncclGinSignal_t)me});
    // The bytes may be changed again when the next round begins.
    gin.flush(ncclCoopThread());
  }
}

// Works on what a rank has sent, and sends the results back: a block of threads for each rank.
__global__ void experts(ncclDevComm comm, ncclWindow_t window, char* own, Layout l, unsigned long long round, unsigned* late) {
  const int from = blockIdx.x, me = comm.rank;
  ncclGin gin{comm, 0};
  __shared__ bool came;
  if (threadIdx.x == 0) came = wait_for(gin, from, round, late);
  __syncthreads();
  if (!came) return;
  const volatile int* counts = (const volatile int*)(own + l.block(IN, from));
  int first = 0;
  for (int e = 0; e < EXPERTS; e++) {
    const bf16* in = (const bf16*)(own + l.block(IN, from) + HEADER) + (size_t)first * HIDDEN;
    bf16* out = (bf16*)(own + l.block(RESULTS, from) + HEADER) + (size_t)first * HIDDEN;
    const int count = counts[e];
    for (size_t i = threadIdx.x; i < (size_t)count * HIDDEN; i += blockDim.x)
      out[i] = __float2bfloat16(work_of(me * EXPERTS + e, __bfloat162float(in[i])));
    first += count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    gin.put(ncclTeamWorld(comm), from, window, l.block(COMBINED, me) + HEADER, window, l.block(RESULTS, from) + HEADER,
            first * l.token_bytes(), ncclGin_StrongSignalInc{(ncclGinSignal_t)(l.ranks + me)});
    gin.flush(ncclCoopThread());
  }
}

// Brings the results back into the order of the tokens.
__global__ void combine(ncclDevComm comm, char* own, Layout l, bf16* results, const int* places, int round, unsigned long long done,
                        unsigned* late) {
  ncclGin gin{comm, 0};
  __shared__ bool came;
  if (threadIdx.x == 0) {
    came = true;
    for (int r = 0; r < l.ranks && came; r++) came = wait_for(gin, l.ranks + r, done, late);
  }
  __syncthreads();
  if (!came) return;
  for (int t = blockIdx.x; t < l.tokens; t += gridDim.x) {
    int rank = expert_of(comm.rank, t, round, l.ranks * EXPERTS) / EXPERTS;
    const uint4* from = (const uint4*)(own + l.block(COMBINED, rank) + HEADER + places[t] * l.token_bytes());
    for (int i = threadIdx.x; i < HIDDEN / 8; i += blockDim.x) ((uint4*)(results + (size_t)t * HIDDEN))[i] = from[i];
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int tokens = argc > 1 ? atoi(argv[1]) : 512, rounds = argc > 2 ? atoi(argv[2]) : 20;
  if (tokens < 1 || rounds < 1) {
    fprintf(stderr, "usage: moe [TOKENS] [ROUNDS], both at least 1\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  int gpus;
  CUDA(cudaGetDeviceCount(&gpus));
  MPI_Comm host;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host);
  int local;
  MPI_Comm_rank(host, &local);
  CUDA(cudaSetDevice(local % gpus));

  ncclUniqueId id;
  if (rank == 0) NCCL(ncclGetUniqueId(&id));
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, ranks, id, rank));
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  NCCL(ncclCommQueryProperties(comm, &properties));
  if (properties.ginType == NCCL_GIN_TYPE_NONE) fail(__LINE__, "NCCL offers no GIN here; NCCL_DEBUG=INFO says why");

  // Everything that other ranks write to or read lies in one window.
  const Layout l{ranks, tokens};
  char* own;
  ncclWindow_t window;
  NCCL(ncclMemAlloc((void**)&own, l.bytes()));
  NCCL(ncclCommWindowRegister(comm, own, l.bytes(), &window, NCCL_WIN_COLL_SYMMETRIC));
  ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginSignalCount = 2 * ranks;  // for each rank: its tokens have come; its results have come
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  ncclDevComm device;
  NCCL(ncclDevCommCreate(comm, &needs, &device));

  const size_t numbers = (size_t)tokens * HIDDEN;
  bf16 *in, *out;
  int* places;
  unsigned* late;
  CUDA(cudaMalloc((void**)&in, numbers * sizeof(bf16)));
  CUDA(cudaMalloc((void**)&out, numbers * sizeof(bf16)));
  CUDA(cudaMalloc((void**)&places, tokens * sizeof(int)));
  CUDA(cudaHostAlloc((void**)&late, sizeof *late, 0));
  *late = 0;
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaEvent_t before, after;
  CUDA(cudaEventCreate(&before));
  CUDA(cudaEventCreate(&after));
  std::vector<bf16> numbers_in(numbers), numbers_out(numbers);
  std::vector<float> times;
  size_t wrong = 0;
  for (int round = 1; round <= rounds; round++) {
    for (int t = 0; t < tokens; t++)
      for (int i = 0; i < HIDDEN; i++) numbers_in[(size_t)t * HIDDEN + i] = __float2bfloat16(number_of(rank, t, round, i));
    CUDA(cudaMemcpyAsync(in, numbers_in.data(), numbers * sizeof(bf16), cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
    // Every rank has read what came in the round before. A program without a barrier here would have two windows, used by turns.
    MPI_Barrier(MPI_COMM_WORLD);
    CUDA(cudaEventRecord(before, stream));
    dispatch<<<ranks, THREADS, 0, stream>>>(device, window, own, l, in, places, round);
    experts<<<ranks, THREADS, 0, stream>>>(device, window, own, l, round, late);
    combine<<<64, THREADS, 0, stream>>>(device, own, l, out, places, round, round, late);
    CUDA(cudaGetLastError());
    CUDA(cudaEventRecord(after, stream));
    CUDA(cudaMemcpyAsync(numbers_out.data(), out, numbers * sizeof(bf16), cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
    if (*late) fail(__LINE__, "a signal did not come in 10 s");
    float ms;
    CUDA(cudaEventElapsedTime(&ms, before, after));
    times.push_back(ms * 1000);
    for (int t = 0; t < tokens; t++) {
      const int expert = expert_of(rank, t, round, ranks * EXPERTS);
      for (int i = 0; i < HIDDEN; i++) {
        float seen = __bfloat162float(numbers_out[(size_t)t * HIDDEN + i]);
        wrong += seen != work_of(expert, number_of(rank, t, round, i));
      }
    }
  }
  std::sort(times.begin(), times.end());
  size_t all = 0;
  MPI_Reduce(&wrong, &all, 1, MPI_UNSIGNED_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0)
    printf("%d ranks, %d tokens of %d BF16 each, %d experts, %d rounds: %zu numbers wrong; a round takes %.1f us (median)\n", ranks,
           tokens, HIDDEN, ranks * EXPERTS, rounds, all, times[times.size() / 2]);

  CUDA(cudaStreamDestroy(stream));
  NCCL(ncclDevCommDestroy(comm, &device));
  NCCL(ncclCommWindowDeregister(comm, window));
  NCCL(ncclMemFree(own));
  NCCL(ncclCommFinalize(comm));
  NCCL(ncclCommDestroy(comm));
  MPI_Finalize();
  return wrong ? 1 : 0;
}
