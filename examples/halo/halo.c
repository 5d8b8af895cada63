/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A halo exchange: a Jacobi iteration over a grid of cells. Each rank has a cube of them. It runs twice, and both results are
 * compared with the one that this program computes alone:
 *
 *   push    kernels are launched ahead, without the host between; they push edge planes to their neighbours, and wait for theirs
 *   memcpy  after each step the host copies the edge planes out of the device (cudaMemcpy), sends them, and copies in what came
 *
 *     cc -std=c99 halo.c $(pkg-config --cflags --libs pushgate) -o halo && ./run.sh ./halo
 */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <pushgate/pushgate.h>

#include "cells.h"

enum { MAX_RANKS = 64, MAX_STEPS = 10000, MAX_BLOCKS = 1024, THREADS = 512, AHEAD = 2, MAX_PARTS = 16, PART_CELLS = 1024 };

/* `struct halo_params` of halo.cu: the same fields in the same order. */
struct halo_params {
	uint64_t above, below, from, to, inbox, result;
	uint32_t above_rkey, below_rkey, planes, side, parts, step, pushes;
};

static void check(const char *what, int code)
{
	if (code == PUSHGATE_E_OK)
		return;
	fprintf(stderr, "halo: %s: %s: %s\n", what, pushgate_strerror(code), pushgate_last_message());
	exit(EXIT_FAILURE);
}
#define CHECK(call) check(#call, call)

/* A neighbour: its queue pair for kernels, that for the host's copies, and the keys of its inboxes. */
struct neighbour {
	pushgate_queue_pair *qp, *host_qp;
	pushgate_host_end *host;
	pushgate_region *region, *host_region;
	uint32_t rkey, host_rkey;
	uint64_t address;
};

static struct {
	pushgate_context *context;
	pushgate_module *module;
	pushgate_comm *comm;
	pushgate_stream *stream;
	pushgate_memory *grids[2], *inbox, *landing, *result;
	struct neighbour above, below;
	/* Cells along each edge of a rank's cube, cells of a plane, bytes of the cube. */
	uint32_t side, plane;
	size_t bytes;
	uint32_t rank, ranks, steps, blocks, parts, threads;
} h;

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static uint32_t number(const char *name, uint32_t otherwise, uint32_t most)
{
	const char *text = getenv(name);
	char *end = NULL;
	unsigned long value = text ? strtoul(text, &end, 10) : otherwise;

	if (text && (end == text || *end || value < 1 || value > most)) {
		fprintf(stderr, "halo: %s is %s, expected 1 to %u\n", name, text, (unsigned)most);
		exit(2);
	}
	return (uint32_t)value;
}

static void connect_to(struct neighbour *n, uint32_t peer)
{
	CHECK(pushgate_queue_pair_create(h.comm, peer, 0, NULL, &n->qp));
	CHECK(pushgate_queue_pair_create(h.comm, peer, 1, NULL, &n->host_qp));
	CHECK(pushgate_host_end_create(n->host_qp, &n->host));
	CHECK(pushgate_region_create(n->qp, h.inbox, &n->region));
	CHECK(pushgate_region_create(n->host_qp, h.landing, &n->host_region));
	CHECK(pushgate_queue_pair_device_address(n->qp, &n->address));
}

static void close_neighbour(struct neighbour *n)
{
	CHECK(pushgate_host_end_close(n->host));
	CHECK(pushgate_region_close(n->host_region));
	CHECK(pushgate_region_close(n->region));
	CHECK(pushgate_queue_pair_close(n->host_qp));
	CHECK(pushgate_queue_pair_close(n->qp));
}

/* Puts the first state into the device, and the neighbours' planes of it into the inbox: those of step 0, so into the even halves. */
static void begin(const float *cells)
{
	static const uint64_t none[MAX_BLOCKS];
	uint32_t within;
	void *inbox;

	CHECK(pushgate_memory_write(h.grids[0], 0, cells, h.bytes));
	CHECK(pushgate_memory_write(h.result, 0, none, h.blocks * sizeof none[0]));
	CHECK(pushgate_memory_address(h.inbox, NULL, &inbox, NULL));
	for (within = 0; within < h.plane; within++) {
		((float *)inbox)[within] = first_value(h.rank * h.side - 1, within);
		((float *)inbox)[2 * h.plane + within] = first_value((h.rank + 1) * h.side, within);
	}
	CHECK(pushgate_comm_barrier(h.comm));
}

static void launch(uint32_t step, uint32_t pushes, pushgate_kernel **kernel)
{
	pushgate_launch_options shape = {sizeof shape, h.blocks, h.threads, 0, PUSHGATE_LAUNCH_COOPERATING};
	struct halo_params p = {h.above.address, h.below.address, 0, 0, 0, 0, h.above.rkey, h.below.rkey, h.side, h.side, h.parts, step, pushes};

	CHECK(pushgate_memory_address(h.grids[(step + 1) % 2], &p.from, NULL, NULL));
	CHECK(pushgate_memory_address(h.grids[step % 2], &p.to, NULL, NULL));
	CHECK(pushgate_memory_address(h.inbox, &p.inbox, NULL, NULL));
	CHECK(pushgate_memory_address(h.result, &p.result, NULL, NULL));
	CHECK(pushgate_kernel_launch(h.stream, h.module, "halo_step", &shape, &p, sizeof p, kernel));
}

/*
 * All steps, AHEAD of them launched ahead. The device counts the blocks of each cooperating launch that has not ended, so their
 * number is bounded by what it holds.
 */
static void by_push(void)
{
	pushgate_kernel *kernels[AHEAD] = {NULL};
	uint32_t step;

	for (step = 1; step <= h.steps + AHEAD; step++) {
		pushgate_kernel **kernel = &kernels[step % AHEAD];

		if (*kernel) {
			CHECK(pushgate_kernel_wait(*kernel, PUSHGATE_FOREVER));
			CHECK(pushgate_kernel_close(*kernel));
			*kernel = NULL;
		}
		if (step <= h.steps)
			launch(step, step == h.steps ? 2 : 1, kernel);
	}
}

/* Sends an edge plane of a step to a neighbour: `half` is where the neighbour has it. */
static void send_plane(struct neighbour *n, uint32_t step, uint32_t plane, uint32_t half)
{
	size_t bytes = h.plane * sizeof(float);
	static float *buffer;

	if (!n->host)
		return;
	if (!buffer && !(buffer = malloc(bytes)))
		exit(EXIT_FAILURE);
	CHECK(pushgate_memory_read(h.grids[step % 2], plane * bytes, buffer, bytes));
	CHECK(pushgate_host_end_put(n->host, n->host_rkey, half * bytes, buffer, bytes, 0, step));
}

/* Takes a neighbour's plane of a step. */
static void take_plane(struct neighbour *n, uint32_t step, uint32_t half)
{
	size_t bytes = h.plane * sizeof(float);
	void *from, *to;

	if (!n->host)
		return;
	CHECK(pushgate_host_end_wait_signal(n->host, 0, step));
	CHECK(pushgate_memory_address(h.landing, NULL, &from, NULL));
	CHECK(pushgate_memory_address(h.inbox, NULL, &to, NULL));
	memcpy((char *)to + half * bytes, (char *)from + half * bytes, bytes);
}

/* Step by step, with the host between. */
static void by_memcpy(void)
{
	uint32_t step;

	for (step = 1; step <= h.steps; step++) {
		pushgate_kernel *kernel = NULL;

		launch(step, 0, &kernel);
		CHECK(pushgate_kernel_wait(kernel, PUSHGATE_FOREVER));
		CHECK(pushgate_kernel_close(kernel));
		send_plane(&h.above, step, 0, 2 + step % 2);
		send_plane(&h.below, step, h.side - 1, step % 2);
		take_plane(&h.above, step, step % 2);
		take_plane(&h.below, step, 2 + step % 2);
	}
}

/* Runs one way; says how long it took, and compares. */
static int run(const char *name, void (*way)(void), const float *cells, const float *right)
{
	size_t i;
	uint64_t result[MAX_BLOCKS];
	float *state = malloc(h.bytes);
	double start, took;

	if (!state)
		exit(EXIT_FAILURE);
	begin(cells);
	start = seconds();
	way();
	took = seconds() - start;
	CHECK(pushgate_memory_read(h.result, 0, result, h.blocks * sizeof result[0]));
	for (i = 0; i < h.blocks; i++) {
		if (result[i] != 0) {
			fprintf(stderr, "halo: rank %u, %s: block %u ended with: %s\n", (unsigned)h.rank, name, (unsigned)i, pushgate_status_name(result[i]));
			return EXIT_FAILURE;
		}
	}
	CHECK(pushgate_memory_read(h.grids[h.steps % 2], 0, state, h.bytes));
	for (i = 0; i < h.bytes / sizeof(float); i++) {
		if (memcmp(&state[i], &right[i], sizeof(float)) != 0) {
			fprintf(stderr, "halo: rank %u, %s: value %lu is %g, expected %g\n", (unsigned)h.rank, name, (unsigned long)i, state[i], right[i]);
			return EXIT_FAILURE;
		}
	}
	free(state);
	CHECK(pushgate_comm_barrier(h.comm));
	if (h.rank == 0)
		printf("%-6s %u^3 cells a rank, right after %u steps, %.1f us a step\n", name, (unsigned)h.side, (unsigned)h.steps, took / h.steps * 1e6);
	fflush(stdout);
	return EXIT_SUCCESS;
}

int main(int count, char **arguments)
{
	pushgate_context_options options = {sizeof options, NULL, 0, PUSHGATE_CONTEXT_FOR_RANK, 0};
	uint32_t keys[4 * MAX_RANKS], mine[4] = {0, 0, 0, 0}, device, fits;
	float *cells, *whole;
	int done;

	if (count != 2) {
		fprintf(stderr, "usage: halo halo.cu, as a rank: run.sh, or `pushgate run -n 2 -- ./halo halo.cu`\n");
		return 2;
	}
	CHECK(pushgate_context_create(&options, &h.context));
	CHECK(pushgate_context_device(h.context, &device));
	h.side = number("HALO_CELLS", device == PUSHGATE_DEVICE_CPU ? 16 : 256, 512);
	h.plane = h.side * h.side;
	h.bytes = (size_t)h.side * h.plane * sizeof(float);
	h.steps = number("HALO_STEPS", device == PUSHGATE_DEVICE_CPU ? 20 : 100, MAX_STEPS);
	h.blocks = number("HALO_BLOCKS", device == PUSHGATE_DEVICE_CPU ? 2 : MAX_BLOCKS, MAX_BLOCKS);
	h.threads = device == PUSHGATE_DEVICE_CPU ? 4 : THREADS;
	CHECK(pushgate_module_from_file(h.context, arguments[1], &h.module));
	CHECK(pushgate_module_resident_blocks(h.module, "halo_step", h.threads, 0, &fits));
	if (h.blocks > fits / AHEAD)
		h.blocks = fits / AHEAD;
	/* As many blocks for a plane as each have some of its cells, and as many groups of them as there are planes at most. */
	h.parts = h.plane / PART_CELLS < MAX_PARTS ? h.plane / PART_CELLS : MAX_PARTS;
	if (h.parts > h.blocks)
		h.parts = h.blocks;
	if (h.parts == 0)
		h.parts = 1;
	h.blocks = h.blocks / h.parts < h.side ? h.blocks / h.parts * h.parts : h.side * h.parts;
	CHECK(pushgate_comm_from_environment(h.context, &h.comm));
	CHECK(pushgate_comm_rank(h.comm, &h.rank, &h.ranks));
	if (h.ranks > MAX_RANKS) {
		fprintf(stderr, "halo: %u ranks, expected at most %d\n", (unsigned)h.ranks, MAX_RANKS);
		return EXIT_FAILURE;
	}

	/* Kernels read the inbox, and peers put into it: host memory that the device has mapped. */
	CHECK(pushgate_memory_alloc_host(h.context, 4 * (size_t)h.plane * sizeof(float), &h.inbox));
	CHECK(pushgate_memory_alloc_host(h.context, 4 * (size_t)h.plane * sizeof(float), &h.landing));
	CHECK(pushgate_memory_alloc_device(h.context, h.bytes, &h.grids[0]));
	CHECK(pushgate_memory_alloc_device(h.context, h.bytes, &h.grids[1]));
	CHECK(pushgate_memory_alloc_device(h.context, h.blocks * sizeof(uint64_t), &h.result));
	CHECK(pushgate_stream_create(h.context, &h.stream));

	/* A rank waits in each call for the same call of its neighbour. Rank 0 has none above, so it begins, and no ranks wait in a circle. */
	if (h.rank > 0)
		connect_to(&h.above, h.rank - 1);
	if (h.rank + 1 < h.ranks)
		connect_to(&h.below, h.rank + 1);
	if (h.above.qp) {
		CHECK(pushgate_region_key(h.above.region, &mine[0]));
		CHECK(pushgate_region_key(h.above.host_region, &mine[1]));
	}
	if (h.below.qp) {
		CHECK(pushgate_region_key(h.below.region, &mine[2]));
		CHECK(pushgate_region_key(h.below.host_region, &mine[3]));
	}
	CHECK(pushgate_comm_all_gather(h.comm, mine, sizeof mine, keys, h.ranks * sizeof mine));
	if (h.above.qp) {
		h.above.rkey = keys[4 * (h.rank - 1) + 2];
		h.above.host_rkey = keys[4 * (h.rank - 1) + 3];
	}
	if (h.below.qp) {
		h.below.rkey = keys[4 * (h.rank + 1)];
		h.below.host_rkey = keys[4 * (h.rank + 1) + 1];
	}

	cells = first_cells(h.rank * h.side, h.side, h.side);
	whole = all_cells(h.ranks, h.side, h.steps);
	done = run("push", by_push, cells, whole + (size_t)h.rank * h.side * h.plane);
	if (done == EXIT_SUCCESS)
		done = run("memcpy", by_memcpy, cells, whole + (size_t)h.rank * h.side * h.plane);
	free(cells);
	free(whole);
	if (done != EXIT_SUCCESS)
		return done;

	if (h.above.qp)
		close_neighbour(&h.above);
	if (h.below.qp)
		close_neighbour(&h.below);
	CHECK(pushgate_stream_close(h.stream));
	CHECK(pushgate_memory_close(h.result));
	CHECK(pushgate_memory_close(h.grids[1]));
	CHECK(pushgate_memory_close(h.grids[0]));
	CHECK(pushgate_memory_close(h.landing));
	CHECK(pushgate_memory_close(h.inbox));
	CHECK(pushgate_comm_close(h.comm));
	CHECK(pushgate_module_close(h.module));
	CHECK(pushgate_context_close(h.context));
	return EXIT_SUCCESS;
}
