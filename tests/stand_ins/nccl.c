/*
 * A stand-in for libnccl.so.2, for `pushgate nccl-check` without a GPU: ranks are processes that share a file, and
 * memory of a "GPU" is the heap. It writes the lines of NCCL 2.30.7's log that tell what it took.
 *
 * STAND_IN_FAULT, over the plugin alone: `refuse`, no communicator; `wrong`, one wrong element of each sum at rank 1;
 * `unused`, connections go over shared memory; `dies`, rank 1 ends at its first call.
 */
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_RANKS = 4, MOST_BYTES = 1 << 20 };

typedef struct { char internal[128]; } ncclUniqueId;

struct shared {
	unsigned long arrived;
	/* From each rank to each. */
	char mail[MOST_RANKS][MOST_RANKS][MOST_BYTES];
};

struct comm {
	int rank, ranks;
	unsigned long met;
	struct shared *shared;
};

struct message { const char *from; char *to; size_t bytes; int peer; };
static struct message sends[MOST_RANKS], receives[MOST_RANKS];
static int n_sends, n_receives;
static struct comm *group;

static int is(const char *name, const char *value)
{
	const char *set = getenv(name);
	return set && !strcmp(set, value);
}

static int fault(const char *name)
{
	return is("STAND_IN_FAULT", name) && is("NCCL_NET", "pushgate");
}

static void say(const char *level, const char *text)
{
	FILE *log = fopen(getenv("NCCL_DEBUG_FILE"), "a");
	if (!log) return;
	fprintf(log, "host:%d:%d [0] NCCL %s %s\n", getpid(), getpid(), level, text);
	fclose(log);
}

static void meet(struct comm *c)
{
	unsigned long all = ++c->met * c->ranks;
	__atomic_add_fetch(&c->shared->arrived, 1, __ATOMIC_ACQ_REL);
	while (__atomic_load_n(&c->shared->arrived, __ATOMIC_ACQUIRE) < all)
		sched_yield();
}

int ncclGetVersion(int *version) { *version = 23007; return 0; }
const char *ncclGetErrorString(int code) { return "internal error - please report this issue to the NCCL developers"; }
const char *ncclGetLastError(void *comm) { return ""; }

int ncclGetUniqueId(ncclUniqueId *id)
{
	snprintf(id->internal, sizeof id->internal, "%s.shared", getenv("NCCL_DEBUG_FILE"));
	int fd = open(id->internal, O_RDWR | O_CREAT, 0600);
	return fd < 0 || ftruncate(fd, sizeof(struct shared)) || close(fd) ? 2 : 0;
}

int ncclCommInitRank(struct comm **comm, int ranks, ncclUniqueId id, int rank)
{
	int fd = open(id.internal, O_RDWR);
	if (fd < 0 || ranks > MOST_RANKS) return 2;
	struct comm *c = calloc(1, sizeof *c);
	c->rank = rank;
	c->ranks = ranks;
	c->shared = mmap(0, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	say("INFO", "NCCL version 2.30.7+cuda13.0");
	const char *via = "P2P/CUMEM";
	if (is("NCCL_NET", "pushgate")) {
		if (fault("refuse")) {
			say("WARN", "NET/pushgate: init: the stand-in refuses");
			say("INFO", "Failed to initialize NET plugin pushgate");
			return 3;
		}
		say("INFO", "NET/Plugin: Loaded net plugin pushgate (v12)");
		say("INFO", "NET/pushgate: path push: the GPU pushes into the window (a stand-in)");
		if (!getenv("NCCL_PROFILER_PLUGIN")) say("INFO", "PROFILER/Plugin: Loaded pushgate (v5)");
		if (!getenv("NCCL_TUNER_PLUGIN")) say("INFO", "TUNER/Plugin: Using pushgate (v4)");
		via = fault("unused") ? "SHM/direct" : "NET/pushgate/0";
	} else if (is("NCCL_NET", "Socket")) {
		via = "NET/Socket/0";
	} else if (is("NCCL_P2P_DISABLE", "1")) {
		via = "SHM/direct/direct";
	}
	char line[128];
	snprintf(line, sizeof line, "Channel 00/0 : %d[0] -> %d[0] [send] via %s", rank, (rank + 1) % ranks, via);
	say("INFO", line);
	meet(c);
	*comm = c;
	return 0;
}

int ncclCommDestroy(struct comm *c) { return 0; }
int ncclCommGetAsyncError(struct comm *c, int *code) { *code = 0; return 0; }

/* Gives each rank its part of the input, or all of it where parts is 0. */
static void give(struct comm *c, const char *input, size_t bytes, int parts)
{
	if (fault("dies") && c->rank == 1) _exit(7);
	for (int to = 0; to < c->ranks; to++)
		memcpy(c->shared->mail[c->rank][to], input + (parts ? to * bytes : 0), bytes);
	meet(c);
}

static void sum(struct comm *c, float *output, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		output[i] = 0;
		for (int from = c->ranks - 1; from >= 0; from--)
			output[i] += ((float *)c->shared->mail[from][c->rank])[i];
	}
	if (fault("wrong") && c->rank == 1) output[count - 1] += 1;
	meet(c);
}

int ncclAllReduce(const char *input, float *output, size_t count, int type, int op, struct comm *c, void *stream)
{
	give(c, input, 4 * count, 0);
	sum(c, output, count);
	return 0;
}

int ncclReduceScatter(const char *input, float *output, size_t count, int type, int op, struct comm *c, void *stream)
{
	give(c, input, 4 * count, 1);
	sum(c, output, count);
	return 0;
}

int ncclAllGather(const char *input, char *output, size_t count, int type, struct comm *c, void *stream)
{
	give(c, input, 4 * count, 0);
	for (int from = 0; from < c->ranks; from++)
		memcpy(output + 4 * count * from, c->shared->mail[from][c->rank], 4 * count);
	meet(c);
	return 0;
}

int ncclBroadcast(const char *input, char *output, size_t count, int type, int root, struct comm *c, void *stream)
{
	give(c, input, 4 * count, 0);
	memcpy(output, c->shared->mail[root][c->rank], 4 * count);
	meet(c);
	return 0;
}

int ncclGroupStart(void) { n_sends = n_receives = 0; return 0; }

int ncclSend(const char *from, size_t count, int type, int peer, struct comm *c, void *stream)
{
	group = c;
	sends[n_sends++] = (struct message){ from, 0, 4 * count, peer };
	return 0;
}

int ncclRecv(char *to, size_t count, int type, int peer, struct comm *c, void *stream)
{
	group = c;
	receives[n_receives++] = (struct message){ 0, to, 4 * count, peer };
	return 0;
}

int ncclGroupEnd(void)
{
	for (int i = 0; i < n_sends; i++)
		memcpy(group->shared->mail[group->rank][sends[i].peer], sends[i].from, sends[i].bytes);
	meet(group);
	for (int i = 0; i < n_receives; i++)
		memcpy(receives[i].to, group->shared->mail[receives[i].peer][group->rank], receives[i].bytes);
	meet(group);
	return 0;
}
