// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Two processes whose kernels push into each other's GPU memory, with nvcc, CMake and the C API alone.
//
//     cmake -B build && cmake --build build && ./run.sh build/push
//
// nvcc compiles the kernel into the program, which launches it as any other kernel of CUDA. Without nvcc the same program is built
// by a C++ compiler, and its kernel runs on the CPU executor: cmake -B build -DPUSHGATE_CPU=ON.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include <pushgate/pushgate.h>

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include "push.cu"
static const char *const DEVICE = "cuda";
#else
#include "push.h"
static const char *const DEVICE = "cpu";
#ifndef PUSHGATE_EXAMPLE_KERNEL
#define PUSHGATE_EXAMPLE_KERNEL "push.cu"
#endif
#endif

static constexpr unsigned WORDS = 1 << 18, CHUNK = 1 << 12, THREADS = 256;

static void check(const char *what, int code)
{
	if (code == PUSHGATE_E_OK)
		return;
	std::fprintf(stderr, "push: %s: %s: %s\n", what, pushgate_strerror(code), pushgate_last_message());
	std::exit(EXIT_FAILURE);
}
#define CHECK(call) check(#call, call)

#ifdef __CUDACC__
static void check(const char *what, cudaError_t code)
{
	if (code == cudaSuccess)
		return;
	std::fprintf(stderr, "push: %s: %s\n", what, cudaGetErrorString(code));
	std::exit(EXIT_FAILURE);
}

// The GPU of a rank: ranks of one host take turns.
static int gpu_of(unsigned rank)
{
	int count = 0;

	CHECK(cudaGetDeviceCount(&count));
	if (count == 0) {
		std::fprintf(stderr, "push: there is no GPU here; build with -DPUSHGATE_CPU=ON\n");
		std::exit(EXIT_FAILURE);
	}
	return (int)(rank % (unsigned)count);
}

// Memory of the program's own, by cudaMalloc, which the library is told of.
static pushgate_memory *allocate(pushgate_context *context, size_t bytes, uint64_t *address)
{
	void *pointer = nullptr;
	pushgate_memory *memory = nullptr;

	CHECK(cudaMalloc(&pointer, bytes));
	CHECK(cudaMemset(pointer, 0, bytes));
	CHECK(pushgate_memory_use_device(context, (uint64_t)pointer, bytes, &memory));
	*address = (uint64_t)pointer;
	return memory;
}

static void launch(pushgate_context *, const push_params &params)
{
	cudaStream_t stream;

	CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	push_to_peer<<<1, THREADS, 0, stream>>>(params);
	CHECK(cudaGetLastError());
	CHECK(cudaStreamSynchronize(stream));
	CHECK(cudaStreamDestroy(stream));
}

static void read(pushgate_memory *, uint64_t address, void *to, size_t bytes)
{
	CHECK(cudaMemcpy(to, (const void *)address, bytes, cudaMemcpyDeviceToHost));
}

static void free_memory(pushgate_memory *memory, uint64_t address)
{
	CHECK(pushgate_memory_close(memory));
	CHECK(cudaFree((void *)address));
}
#else
static int gpu_of(unsigned) { return 0; }

static pushgate_memory *allocate(pushgate_context *context, size_t bytes, uint64_t *address)
{
	pushgate_memory *memory = nullptr;

	CHECK(pushgate_memory_alloc_device(context, bytes, &memory));
	CHECK(pushgate_memory_address(memory, address, nullptr, nullptr));
	return memory;
}

static void launch(pushgate_context *context, const push_params &params)
{
	pushgate_launch_options shape = {sizeof shape, 1, 64, 0, PUSHGATE_LAUNCH_COOPERATING};
	pushgate_module *module = nullptr;
	pushgate_stream *stream = nullptr;
	pushgate_kernel *kernel = nullptr;

	CHECK(pushgate_module_from_file(context, PUSHGATE_EXAMPLE_KERNEL, &module));
	CHECK(pushgate_stream_create(context, &stream));
	CHECK(pushgate_kernel_launch(stream, module, "push_to_peer", &shape, &params, sizeof params, &kernel));
	CHECK(pushgate_kernel_wait(kernel, PUSHGATE_FOREVER));
	CHECK(pushgate_kernel_close(kernel));
	CHECK(pushgate_stream_close(stream));
	CHECK(pushgate_module_close(module));
}

static void read(pushgate_memory *memory, uint64_t, void *to, size_t bytes)
{
	CHECK(pushgate_memory_read(memory, 0, to, bytes));
}

static void free_memory(pushgate_memory *memory, uint64_t) { CHECK(pushgate_memory_close(memory)); }
#endif

int main()
{
	const char *of_launcher = std::getenv("PUSHGATE_RANK");

	if (!of_launcher) {
		std::fprintf(stderr, "push: start two ranks: run.sh, or `pushgate run -n 2 -- build/push`\n");
		return 2;
	}
	const int gpu = gpu_of((unsigned)std::atoi(of_launcher));
#ifdef __CUDACC__
	// Both the program and the library work in the device's primary context.
	CHECK(cudaSetDevice(gpu));
#endif
	const pushgate_setting setting = {"device", DEVICE};
	pushgate_context_options options = {sizeof options, &setting, 1, 0, (uint32_t)gpu};
	pushgate_context *context = nullptr;
	pushgate_comm *comm = nullptr;
	pushgate_queue_pair *qp = nullptr;
	pushgate_region *region = nullptr;
	uint32_t rank = 0, ranks = 0, key = 0;
	uint64_t address = 0;
	uint64_t result = ~0ull;
	push_params params = {};

	CHECK(pushgate_context_create(&options, &context));
	CHECK(pushgate_comm_from_environment(context, &comm));
	CHECK(pushgate_comm_rank(comm, &rank, &ranks));
	if (ranks != 2) {
		std::fprintf(stderr, "push: %u ranks, expected 2\n", (unsigned)ranks);
		return EXIT_FAILURE;
	}
	CHECK(pushgate_queue_pair_create(comm, 1 - rank, 0, nullptr, &qp));

	uint64_t inbox_at = 0, result_at = 0;
	pushgate_memory *inbox = allocate(context, WORDS * sizeof(uint32_t), &inbox_at);
	pushgate_memory *status = allocate(context, sizeof result, &result_at);
	std::vector<uint32_t> keys(ranks);

	CHECK(pushgate_region_create(qp, inbox, &region));
	CHECK(pushgate_region_key(region, &key));
	CHECK(pushgate_comm_all_gather(comm, &key, sizeof key, keys.data(), keys.size() * sizeof key));
	CHECK(pushgate_queue_pair_device_address(qp, &address));
	params.qp = address;
	params.result = result_at;
	params.rkey = keys[1 - rank];
	params.rank = rank;
	params.words = WORDS;
	params.chunk = CHUNK;
	launch(context, params);

	// If the queue pair ended, its cause says more than the kernel's status.
	CHECK(pushgate_queue_pair_check(qp));
	read(status, result_at, &result, sizeof result);
	if (result != 0) {
		std::fprintf(stderr, "push: rank %u: the kernel ended with: %s\n", (unsigned)rank, pushgate_status_name(result));
		return EXIT_FAILURE;
	}
	std::vector<uint32_t> came(WORDS);

	read(inbox, inbox_at, came.data(), came.size() * sizeof came[0]);
	for (uint32_t i = 0; i < WORDS; i++) {
		if (came[i] != PUSH_WORD(1 - rank, i)) {
			std::fprintf(stderr, "push: rank %u: word %u is wrong\n", (unsigned)rank, (unsigned)i);
			return EXIT_FAILURE;
		}
	}
	std::printf("rank %u: all %u words of rank %u are right\n", (unsigned)rank, WORDS, (unsigned)(1 - rank));

	// No rank leaves while the other one needs it.
	CHECK(pushgate_comm_barrier(comm));
	CHECK(pushgate_region_close(region));
	free_memory(inbox, inbox_at);
	free_memory(status, result_at);
	CHECK(pushgate_queue_pair_close(qp));
	CHECK(pushgate_comm_close(comm));
	CHECK(pushgate_context_close(context));
	return EXIT_SUCCESS;
}
