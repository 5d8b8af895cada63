/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two processes whose kernels put data into each other's memory, in C. With PUSHGATE_DEVICE=cpu the kernels run on the CPU.
 *
 *     cc -std=c99 put.c $(pkg-config --cflags --libs pushgate) -o put
 *     ./put put.cu
 *
 * Started alone, the program starts itself twice. A launcher may start the ranks instead: pushgate run -n 2 -- ./put put.cu
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <pushgate/pushgate.h>

enum { BYTES = 64 * 1024, RANKS = 2 };

/* `struct put_params` of put.cu: the same fields in the same order. */
struct put_params {
	uint64_t qp;
	uint64_t data;
	uint64_t result;
	uint32_t rkey;
	uint32_t bytes;
};

/* What a rank holds. What is NULL was not made yet, and closing NULL does nothing. */
struct rank {
	pushgate_context *context;
	pushgate_module *module;
	pushgate_comm *comm;
	pushgate_queue_pair *qp;
	pushgate_memory *inbox;
	pushgate_region *region;
	pushgate_memory *data;
	pushgate_memory *result;
	pushgate_stream *stream;
	pushgate_kernel *kernel;
};

/* Says why a call failed. True if it did. */
static int failed(const char *what, int code)
{
	if (code == PUSHGATE_E_OK)
		return 0;
	fprintf(stderr, "put: %s: %s: %s\n", what, pushgate_strerror(code), pushgate_last_message());
	return 1;
}

#define TRY(call)                            \
	do {                                 \
		if (failed(#call, call))     \
			return EXIT_FAILURE; \
	} while (0)

/* The byte at place i of what a rank sends. */
static unsigned char byte_of(uint32_t rank, size_t i)
{
	return (unsigned char)(i * 31 + i / 251 + rank * 7 + 1);
}

static int run(struct rank *r, const char *source)
{
	static unsigned char bytes[BYTES];
	pushgate_launch_options shape = {sizeof shape, 1, 64, 0, PUSHGATE_LAUNCH_COOPERATING};
	struct put_params params;
	uint32_t rank, ranks, key, keys[RANKS];
	uint64_t status;
	void *inbox;
	size_t i;

	/* A device and an engine; settings come from the environment. Kernels are compiled before any of them runs. */
	TRY(pushgate_context_create(NULL, &r->context));
	TRY(pushgate_module_from_file(r->context, source, &r->module));
	TRY(pushgate_comm_from_environment(r->context, &r->comm));
	TRY(pushgate_comm_rank(r->comm, &rank, &ranks));
	if (ranks != RANKS) {
		fprintf(stderr, "put: %u ranks, expected %d\n", (unsigned)ranks, RANKS);
		return EXIT_FAILURE;
	}
	TRY(pushgate_queue_pair_create(r->comm, 1 - rank, 0, NULL, &r->qp));

	/* Memory that the peer may put into; its key has to get there first. */
	TRY(pushgate_memory_alloc_host(r->context, BYTES, &r->inbox));
	TRY(pushgate_memory_address(r->inbox, NULL, &inbox, NULL));
	TRY(pushgate_region_create(r->qp, r->inbox, &r->region));
	TRY(pushgate_region_key(r->region, &key));
	TRY(pushgate_comm_all_gather(r->comm, &key, sizeof key, keys, sizeof keys));

	/* What this rank sends, in the device's memory. */
	TRY(pushgate_memory_alloc_device(r->context, BYTES, &r->data));
	for (i = 0; i < BYTES; i++)
		bytes[i] = byte_of(rank, i);
	TRY(pushgate_memory_write(r->data, 0, bytes, BYTES));
	TRY(pushgate_memory_alloc_device(r->context, sizeof status, &r->result));

	TRY(pushgate_queue_pair_device_address(r->qp, &params.qp));
	TRY(pushgate_memory_address(r->data, &params.data, NULL, NULL));
	TRY(pushgate_memory_address(r->result, &params.result, NULL, NULL));
	params.rkey = keys[1 - rank];
	params.bytes = BYTES;
	TRY(pushgate_stream_create(r->context, &r->stream));
	TRY(pushgate_kernel_launch(r->stream, r->module, "put_to_peer", &shape, &params, sizeof params, &r->kernel));
	TRY(pushgate_kernel_wait(r->kernel, PUSHGATE_FOREVER));

	/* If the queue pair ended, its cause says more than the kernel's status. */
	TRY(pushgate_queue_pair_check(r->qp));
	TRY(pushgate_memory_read(r->result, 0, &status, sizeof status));
	if (status != 0) {
		fprintf(stderr, "put: rank %u: the kernel ended with: %s\n", (unsigned)rank, pushgate_status_name(status));
		return EXIT_FAILURE;
	}
	for (i = 0; i < BYTES; i++) {
		if (((unsigned char *)inbox)[i] != byte_of(1 - rank, i)) {
			fprintf(stderr, "put: rank %u: byte %lu is wrong\n", (unsigned)rank, (unsigned long)i);
			return EXIT_FAILURE;
		}
	}
	printf("rank %u: all %d bytes of rank %u are right\n", (unsigned)rank, BYTES, (unsigned)(1 - rank));
	/* Nobody leaves while the other still needs it. */
	TRY(pushgate_comm_barrier(r->comm));
	return EXIT_SUCCESS;
}

/* What was made last is closed first. */
static int close_all(struct rank *r)
{
	TRY(pushgate_kernel_close(r->kernel));
	TRY(pushgate_stream_close(r->stream));
	TRY(pushgate_region_close(r->region));
	TRY(pushgate_memory_close(r->inbox));
	TRY(pushgate_memory_close(r->data));
	TRY(pushgate_memory_close(r->result));
	TRY(pushgate_queue_pair_close(r->qp));
	TRY(pushgate_comm_close(r->comm));
	TRY(pushgate_module_close(r->module));
	TRY(pushgate_context_close(r->context));
	return EXIT_SUCCESS;
}

/* Starts this program once for each rank, and waits for all of them. */
static int start_ranks(char **arguments)
{
	char job[64], number[16];
	int rank, status, done = EXIT_SUCCESS;

	snprintf(job, sizeof job, "put-%ld", (long)getpid());
	for (rank = 0; rank < RANKS; rank++) {
		pid_t child = fork();

		if (child < 0) {
			perror("put: fork");
			return EXIT_FAILURE;
		}
		if (child > 0)
			continue;
		snprintf(number, sizeof number, "%d", rank);
		setenv("PUSHGATE_JOB", job, 1);
		setenv("PUSHGATE_RANK", number, 1);
		snprintf(number, sizeof number, "%d", RANKS);
		setenv("PUSHGATE_RANKS", number, 1);
		execv("/proc/self/exe", arguments);
		perror("put: exec");
		_exit(EXIT_FAILURE);
	}
	for (;;) {
		if (wait(&status) > 0) {
			if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS)
				done = EXIT_FAILURE;
		} else if (errno != EINTR) {
			return done;
		}
	}
}

int main(int count, char **arguments)
{
	struct rank rank = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
	int done, closed;

	if (count != 2) {
		fprintf(stderr, "usage: put put.cu\n");
		return 2;
	}
	/* Any launcher's rank will do; without one this program is its own. */
	if (!getenv("PUSHGATE_RANK") && !getenv("OMPI_COMM_WORLD_RANK") && !getenv("PMI_RANK") && !getenv("SLURM_PROCID"))
		return start_ranks(arguments);
	done = run(&rank, arguments[1]);
	closed = close_all(&rank);
	return done == EXIT_SUCCESS ? closed : done;
}
