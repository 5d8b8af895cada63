/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Ranks of an MPI program whose kernels put data around a ring. MPI starts the ranks and hands on the id by which they meet; the
 * data goes over pushgate.
 *
 *     mpicc -std=c99 ring.c $(pkg-config --cflags --libs pushgate) -o ring && ./run.sh ./ring
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mpi.h>
#include <pushgate/pushgate.h>

enum { BYTES = 64 * 1024 };

/* `struct ring_params` of ring.cu: the same fields in the same order. */
struct ring_params {
	uint64_t next, previous, data, result;
	uint32_t rkey, bytes;
};

/* A rank that fails ends the others too. */
static void check(const char *what, int code)
{
	if (code == PUSHGATE_E_OK)
		return;
	fprintf(stderr, "ring: %s: %s: %s\n", what, pushgate_strerror(code), pushgate_last_message());
	MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
}
#define CHECK(call) check(#call, call)

static unsigned char byte_of(int rank, size_t i)
{
	return (unsigned char)(i * 31 + i / 251 + (unsigned)rank * 7 + 1);
}

int main(int count, char **arguments)
{
	static unsigned char bytes[BYTES];
	pushgate_context_options options = {sizeof options, NULL, 0, PUSHGATE_CONTEXT_FOR_RANK, 0};
	pushgate_launch_options shape = {sizeof shape, 1, 64, 0, PUSHGATE_LAUNCH_COOPERATING};
	pushgate_context *context = NULL;
	pushgate_module *module = NULL;
	pushgate_comm *comm = NULL;
	pushgate_queue_pair *qps[2] = {NULL, NULL};
	pushgate_memory *inbox = NULL, *data = NULL, *result = NULL;
	pushgate_region *region = NULL;
	pushgate_stream *stream = NULL;
	pushgate_kernel *kernel = NULL;
	pushgate_unique_id id;
	struct ring_params params = {0, 0, 0, 0, 0, BYTES};
	uint32_t key;
	uint64_t status = 0;
	void *inbox_at = NULL;
	int rank, ranks, next, previous, turn;
	size_t i;

	MPI_Init(&count, &arguments);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (count != 2 || ranks < 2) {
		if (rank == 0)
			fprintf(stderr, "usage: mpirun -n 2 ring ring.cu, with two ranks or more\n");
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	next = (rank + 1) % ranks;
	previous = (rank + ranks - 1) % ranks;

	CHECK(pushgate_context_create(&options, &context));
	CHECK(pushgate_module_from_file(context, arguments[1], &module));

	/* Rank 0 makes the id, MPI hands it on, and all ranks meet by it. */
	memset(&id, 0, sizeof id);
	if (rank == 0)
		CHECK(pushgate_unique_id_create(context, &id));
	MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
	CHECK(pushgate_comm_connect_id(context, &id, (uint32_t)rank, (uint32_t)ranks, &comm));

	/*
	 * A queue pair's label is the number of the rank that puts through it: with two ranks next and previous are the same one.
	 * Both ends wait for each other, so even ranks begin with the next rank, and odd ones with the rank before.
	 */
	for (turn = 0; turn < 2; turn++) {
		if ((turn == 0) == (rank % 2 == 0))
			CHECK(pushgate_queue_pair_create(comm, (uint32_t)next, (uint32_t)rank, NULL, &qps[0]));
		else
			CHECK(pushgate_queue_pair_create(comm, (uint32_t)previous, (uint32_t)previous, NULL, &qps[1]));
	}
	CHECK(pushgate_memory_alloc_host(context, BYTES, &inbox));
	CHECK(pushgate_memory_address(inbox, NULL, &inbox_at, NULL));
	CHECK(pushgate_region_create(qps[1], inbox, &region));
	CHECK(pushgate_region_key(region, &key));
	/* The key goes to the rank before. */
	MPI_Sendrecv(&key, 1, MPI_UINT32_T, previous, 0, &params.rkey, 1, MPI_UINT32_T, next, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);

	CHECK(pushgate_memory_alloc_device(context, BYTES, &data));
	CHECK(pushgate_memory_alloc_device(context, sizeof status, &result));
	for (i = 0; i < BYTES; i++)
		bytes[i] = byte_of(rank, i);
	CHECK(pushgate_memory_write(data, 0, bytes, BYTES));
	CHECK(pushgate_queue_pair_device_address(qps[0], &params.next));
	CHECK(pushgate_queue_pair_device_address(qps[1], &params.previous));
	CHECK(pushgate_memory_address(data, &params.data, NULL, NULL));
	CHECK(pushgate_memory_address(result, &params.result, NULL, NULL));
	CHECK(pushgate_stream_create(context, &stream));
	CHECK(pushgate_kernel_launch(stream, module, "ring_step", &shape, &params, sizeof params, &kernel));
	CHECK(pushgate_kernel_wait(kernel, PUSHGATE_FOREVER));

	/* If a queue pair ended, its cause says more than the kernel's status. */
	CHECK(pushgate_queue_pair_check(qps[0]));
	CHECK(pushgate_queue_pair_check(qps[1]));
	CHECK(pushgate_memory_read(result, 0, &status, sizeof status));
	if (status != 0) {
		fprintf(stderr, "ring: rank %d: the kernel ended with: %s\n", rank, pushgate_status_name(status));
		MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
	}
	for (i = 0; i < BYTES; i++) {
		if (((unsigned char *)inbox_at)[i] != byte_of(previous, i)) {
			fprintf(stderr, "ring: rank %d: byte %lu is wrong\n", rank, (unsigned long)i);
			MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
		}
	}
	printf("rank %d: all %d bytes of rank %d are right\n", rank, BYTES, previous);

	/* No rank leaves while another one needs it. */
	CHECK(pushgate_comm_barrier(comm));
	CHECK(pushgate_kernel_close(kernel));
	CHECK(pushgate_stream_close(stream));
	CHECK(pushgate_region_close(region));
	CHECK(pushgate_memory_close(result));
	CHECK(pushgate_memory_close(data));
	CHECK(pushgate_memory_close(inbox));
	CHECK(pushgate_queue_pair_close(qps[0]));
	CHECK(pushgate_queue_pair_close(qps[1]));
	CHECK(pushgate_comm_close(comm));
	CHECK(pushgate_module_close(module));
	CHECK(pushgate_context_close(context));
	MPI_Finalize();
	return EXIT_SUCCESS;
}
