// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The halo exchange of ../halo.c over NCCL's send and receive, to compare with: all steps are put into one stream, and the host waits for
// nothing in between. MPI starts the ranks, a GPU each:
//
//     nvcc -O3 halo.cu -lnccl -lmpi -o halo-nccl && mpirun -np 2 ./halo-nccl
//
// HALO_CELLS (along each edge of a rank's cube) and HALO_STEPS choose the work. HALO_HOSTS=1 makes each rank a host of its own for NCCL.
#include <cstring>

#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>

#include "../cells.h"

#define HALO_DEVICE static __device__ __forceinline__
#include "../cells.cuh"

static void ended(const char *what, const char *why)
{
	fprintf(stderr, "halo-nccl: %s: %s\n", what, why);
	MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
}
#define CUDA(call)                                                     \
	do {                                                           \
		cudaError_t code = call;                               \
		if (code != cudaSuccess)                               \
			ended(#call, cudaGetErrorString(code));        \
	} while (0)
#define NCCL(call)                                                     \
	do {                                                           \
		ncclResult_t code = call;                              \
		if (code != ncclSuccess)                               \
			ended(#call, ncclGetErrorString(code));        \
	} while (0)

// Planes are divided among the rows of blocks, and each plane among the blocks of a row.
static __global__ void halo_step(const float *from, float *to, const float *up, const float *down, unsigned side)
{
	const unsigned first = (unsigned)((unsigned long long)side * blockIdx.y / gridDim.y);
	const unsigned end = (unsigned)((unsigned long long)side * (blockIdx.y + 1) / gridDim.y);

	for (unsigned within = blockIdx.x * blockDim.x + threadIdx.x; within < side * side; within += gridDim.x * blockDim.x)
		halo_column(from, to, up, down, side, side, first, end, within);
}

static unsigned number(const char *name, unsigned otherwise)
{
	const char *text = getenv(name);

	return text ? (unsigned)strtoul(text, NULL, 10) : otherwise;
}

int main(int count, char **arguments)
{
	int rank, ranks, gpus;
	char host[32];

	MPI_Init(&count, &arguments);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (number("HALO_HOSTS", 0)) {
		snprintf(host, sizeof host, "host%d", rank);
		setenv("NCCL_HOSTID", host, 1);
	}
	CUDA(cudaGetDeviceCount(&gpus));
	CUDA(cudaSetDevice(rank % gpus));

	const unsigned side = number("HALO_CELLS", 256), steps = number("HALO_STEPS", 100), plane = side * side;
	const size_t bytes = (size_t)side * plane * sizeof(float), edge = plane * sizeof(float);
	const bool above = rank > 0, below = rank + 1 < ranks;
	float *grids[2], *up, *down;
	const unsigned across = (plane + 255) / 256 < 512 ? (plane + 255) / 256 : 512;
	const dim3 grid(across, 512 / across < side ? 512 / across : side);
	ncclUniqueId id;
	ncclComm_t comm;
	cudaStream_t stream;

	if (rank == 0)
		NCCL(ncclGetUniqueId(&id));
	MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
	NCCL(ncclCommInitRank(&comm, ranks, id, rank));
	CUDA(cudaStreamCreate(&stream));
	CUDA(cudaMalloc(&grids[0], bytes));
	CUDA(cudaMalloc(&grids[1], bytes));
	CUDA(cudaMalloc(&up, edge));
	CUDA(cudaMalloc(&down, edge));

	float *first = first_cells(rank * side, side, side), *state = (float *)malloc(bytes);
	double took = 0;

	// The first round makes NCCL's connections.
	for (int round = 0; round < 2; round++) {
		CUDA(cudaMemcpy(grids[0], first, bytes, cudaMemcpyHostToDevice));
		CUDA(cudaDeviceSynchronize());
		MPI_Barrier(MPI_COMM_WORLD);
		double start = MPI_Wtime();
		for (unsigned step = 1; step <= steps; step++) {
			float *from = grids[(step + 1) % 2];

			NCCL(ncclGroupStart());
			if (above) {
				NCCL(ncclSend(from, plane, ncclFloat, rank - 1, comm, stream));
				NCCL(ncclRecv(up, plane, ncclFloat, rank - 1, comm, stream));
			}
			if (below) {
				NCCL(ncclSend(from + (size_t)(side - 1) * plane, plane, ncclFloat, rank + 1, comm, stream));
				NCCL(ncclRecv(down, plane, ncclFloat, rank + 1, comm, stream));
			}
			NCCL(ncclGroupEnd());
			halo_step<<<grid, 256, 0, stream>>>(from, grids[step % 2], above ? up : NULL, below ? down : NULL, side);
			CUDA(cudaGetLastError());
		}
		CUDA(cudaStreamSynchronize(stream));
		MPI_Barrier(MPI_COMM_WORLD);
		took = MPI_Wtime() - start;
	}
	CUDA(cudaMemcpy(state, grids[steps % 2], bytes, cudaMemcpyDeviceToHost));

	float *whole = all_cells(ranks, side, steps);

	if (memcmp(state, whole + (size_t)rank * side * plane, bytes) != 0)
		ended("the cells", "they differ from those that the CPU has computed");
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("nccl   %u^3 cells a rank, right after %u steps, %.1f us a step\n", side, steps, took / steps * 1e6);
	NCCL(ncclCommDestroy(comm));
	MPI_Finalize();
	return EXIT_SUCCESS;
}
