/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * One of two ranks that meet by a unique id, which rank 0 makes and leaves in a file: meets RANK FILE. tests/addresses.rs compiles it.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <pushgate/pushgate.h>

enum { RANKS = 2 };

#define TRY(call)                                                                                    \
	do {                                                                                         \
		int code = (call);                                                                   \
		if (code != PUSHGATE_E_OK) {                                                         \
			fprintf(stderr, "%s: %s: %s\n", #call, pushgate_strerror(code), pushgate_last_message()); \
			return EXIT_FAILURE;                                                         \
		}                                                                                    \
	} while (0)

/* Leaves the id under its name only once all of it is written. */
static int leave(const pushgate_unique_id *id, const char *path)
{
	char part[4096];
	FILE *file;

	snprintf(part, sizeof part, "%s.part", path);
	file = fopen(part, "wb");
	if (!file || fwrite(id->bytes, sizeof id->bytes, 1, file) != 1 || fclose(file) || rename(part, path)) {
		perror(path);
		return -1;
	}
	return 0;
}

/* Waits for the file; the test that started this program ends it if none comes. */
static int find(pushgate_unique_id *id, const char *path)
{
	struct timespec pause = {0, 5000000};
	FILE *file;
	size_t read;

	while (!(file = fopen(path, "rb")))
		nanosleep(&pause, NULL);
	read = fread(id->bytes, sizeof id->bytes, 1, file);
	fclose(file);
	return read == 1 ? 0 : -1;
}

int main(int argc, char **argv)
{
	pushgate_context *context;
	pushgate_comm *comm;
	pushgate_queue_pair *qp;
	pushgate_unique_id id;
	uint32_t rank, all[RANKS];

	if (argc != 3)
		return EXIT_FAILURE;
	rank = argv[1][0] == '1';
	TRY(pushgate_context_create(NULL, &context));
	if (rank == 0) {
		TRY(pushgate_unique_id_create(context, &id));
		if (leave(&id, argv[2]))
			return EXIT_FAILURE;
	} else if (find(&id, argv[2])) {
		return EXIT_FAILURE;
	}
	TRY(pushgate_comm_connect_id(context, &id, rank, RANKS, &comm));
	TRY(pushgate_queue_pair_create(comm, 1 - rank, 0, NULL, &qp));
	TRY(pushgate_comm_all_gather(comm, &rank, sizeof rank, all, sizeof all));
	if (all[0] != 0 || all[1] != 1)
		return EXIT_FAILURE;
	TRY(pushgate_comm_barrier(comm));
	TRY(pushgate_queue_pair_close(qp));
	TRY(pushgate_comm_close(comm));
	TRY(pushgate_context_close(context));
	puts("met");
	return EXIT_SUCCESS;
}
