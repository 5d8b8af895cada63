/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Calls each function of pushgate/pushgate.h as it is meant to be called, and with every kind of wrong argument. A wrong call must
 * return the number that stands beside it, leave a sentence, and change nothing. Ends with 0 if all of them did; prints how many
 * wrong calls were refused. The kernels run on the CPU.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <pushgate/pushgate.h>

static unsigned refused, wrong;

static void say(int line, const char *call, int got, int expected)
{
	wrong++;
	fprintf(stderr, "misuse.c:%d: %s returned %d (%s: %s), expected %d (%s)\n", line, call, got, pushgate_strerror(got),
		pushgate_last_message(), expected, pushgate_strerror(expected));
}

static void refuse(int line, const char *call, int got, int expected)
{
	refused++;
	if (got != expected)
		say(line, call, got, expected);
	else if (strlen(pushgate_last_message()) < 8)
		say(line, "pushgate_last_message()", got, expected);
}

/* A call that must be refused with this number. */
#define REFUSE(code, call) refuse(__LINE__, #call, call, PUSHGATE_E_##code)

/* A call that must succeed: what comes after it makes no sense without. */
#define DO(call)                                                      \
	do {                                                          \
		int code_ = call;                                     \
		if (code_ != PUSHGATE_E_OK) {                         \
			say(__LINE__, #call, code_, PUSHGATE_E_OK);   \
			exit(1);                                      \
		}                                                     \
	} while (0)

/* What is not so ends the program. */
#define TRUE(what)                                                              \
	do {                                                                    \
		if (!(what)) {                                                  \
			fprintf(stderr, "misuse.c:%d: not so: %s\n", __LINE__, #what); \
			exit(1);                                                \
		}                                                               \
	} while (0)

/* Handles that are none, or not of this kind; the call uses `h`. `other` is an open handle of another kind. */
#define BAD_HANDLES(closed, other, call)                                     \
	do {                                                                 \
		uint64_t place_ = 7;                                         \
		void *bad_[5];                                               \
		int i_;                                                      \
		bad_[0] = NULL;                                              \
		bad_[1] = closed;                                            \
		bad_[2] = other;                                             \
		bad_[3] = &place_;                                           \
		bad_[4] = (void *)(uintptr_t)0xdeadbeefdeadbeefu;            \
		for (i_ = 0; i_ < 5; i_++) {                                 \
			void *h = bad_[i_];                                  \
			refuse(__LINE__, #call, call, PUSHGATE_E_HANDLE);    \
		}                                                            \
		TRUE(place_ == 7);                                           \
	} while (0)

/* As above, for a call that closes: NULL is no error there. */
#define BAD_TO_CLOSE(closed, other, close)                                   \
	do {                                                                 \
		DO(close(NULL));                                             \
		REFUSE(HANDLE, close(closed));                               \
		REFUSE(HANDLE, close((void *)(other)));                      \
		REFUSE(HANDLE, close((void *)&refused));                     \
	} while (0)

static const char PTX[] = ".version 8.5\n.target sm_80\n.visible .entry fill()\n{ ret; }\n";
static const char KERNELS[] = "#include \"pushgate/device.cuh\"\n"
			      "using namespace pushgate;\n"
			      "struct store_params { u64 at; u64 value; };\n"
			      "PUSHGATE_KERNEL(store_value, store_params)\n"
			      "{ *reinterpret_cast<u64 *>(p.at) = p.value; }\n"
			      "struct wait_params { u64 qp; u64 result; };\n"
			      "PUSHGATE_KERNEL(wait_for_peer, wait_params)\n"
			      "{ queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));\n"
			      "  *reinterpret_cast<u64 *>(p.result) = (u64)wait_signal(qp, 0, 1); }\n";

struct store_params {
	uint64_t at, value;
};

static pushgate_context *context, *closed_context;
static pushgate_comm *comms[2], *closed_comm;
static pushgate_queue_pair *qps[2], *closed_qp;
static pushgate_memory *memory, *closed_memory;
static pushgate_region *region, *closed_region;
static pushgate_module *module, *closed_module;
static pushgate_stream *stream, *closed_stream;
static pushgate_kernel *closed_kernel;
static pushgate_host_end *closed_end;

/* Only what this program says, on the CPU. */
static const pushgate_setting CPU[] = {{"device", "cpu"}, {"timeout", "60s"}};

static pushgate_context_options cpu_options(void)
{
	pushgate_context_options options;

	memset(&options, 0, sizeof options);
	options.size = sizeof options;
	options.settings = CPU;
	options.settings_count = 2;
	options.flags = PUSHGATE_CONTEXT_DEFAULTS_ONLY;
	return options;
}

static void texts(void)
{
	int code;

	TRUE(strlen(pushgate_version()) > 4);
	TRUE(pushgate_interface() == PUSHGATE_INTERFACE);
	TRUE(strcmp(pushgate_status_name(0), "ok") == 0);
	TRUE(strcmp(pushgate_status_name(2), "peer lost") == 0);
	TRUE(strcmp(pushgate_status_name(UINT64_MAX), "unknown") == 0);
	TRUE(strcmp(pushgate_strerror(PUSHGATE_E_OK), "success") == 0);
	for (code = -3; code < 200; code++)
		TRUE(strlen(pushgate_strerror(code)) > 3);
	TRUE(strcmp(pushgate_last_message(), "") == 0);
}

static unsigned lines;
static pthread_mutex_t one_line = PTHREAD_MUTEX_INITIALIZER;

static void take_line(void *argument, uint32_t level, const char *line)
{
	TRUE(argument == &lines);
	TRUE(level >= PUSHGATE_LOG_ERROR && level <= PUSHGATE_LOG_TRACE);
	TRUE(strlen(line) > 8 && strchr(line, '\n') == NULL);
	pthread_mutex_lock(&one_line);
	lines++;
	pthread_mutex_unlock(&one_line);
}

static void the_log(void)
{
	REFUSE(ARGUMENT, pushgate_log_start("\xff", take_line, &lines));
	REFUSE(CONFIG, pushgate_log_start("pushgate=loud", take_line, &lines));
	DO(pushgate_log_start("info", take_line, &lines));
	REFUSE(BUSY, pushgate_log_start("info", take_line, &lines));
}

static void contexts(void)
{
	pushgate_context_options options = cpu_options();
	pushgate_setting settings[2];
	struct {
		pushgate_context_options known;
		uint64_t later;
	} newer;
	pushgate_context *made = (pushgate_context *)&options;
	char raw[32];

	REFUSE(ARGUMENT, pushgate_context_create(&options, NULL));
	REFUSE(ARGUMENT, pushgate_context_create(&options, (pushgate_context **)(void *)(raw + 1)));
	REFUSE(ARGUMENT, pushgate_context_create((pushgate_context_options *)(void *)(raw + 1), &made));
	TRUE(made == NULL);
	options.size = 0;
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	options.size = sizeof options - 1;
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	options.size = SIZE_MAX;
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	options = cpu_options();
	options.flags |= 1u << 30;
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	options = cpu_options();
	options.settings = NULL;
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	options = cpu_options();
	options.settings_count = SIZE_MAX / 2;
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	options.settings = (pushgate_setting *)(void *)(raw + 1);
	options.settings_count = 1;
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));

	/* Members of a later release: 0 is as if they were not there. */
	memset(&newer, 0, sizeof newer);
	newer.known = cpu_options();
	newer.known.size = sizeof newer;
	newer.later = 1;
	REFUSE(ARGUMENT, pushgate_context_create(&newer.known, &made));

	options = cpu_options();
	options.settings = settings;
	settings[0] = CPU[0];
	settings[1].name = NULL;
	settings[1].value = "1";
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	settings[1].name = "slots";
	settings[1].value = NULL;
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	settings[1].value = "\xff\xfe";
	REFUSE(ARGUMENT, pushgate_context_create(&options, &made));
	settings[1].value = "63";
	REFUSE(CONFIG, pushgate_context_create(&options, &made));
	TRUE(strstr(pushgate_last_message(), "invalid slots `63`: expected a power of two") != NULL);
	settings[1].name = "slotz";
	REFUSE(UNKNOWN_SETTING, pushgate_context_create(&options, &made));
	TRUE(strstr(pushgate_last_message(), "did you mean `slots`?") != NULL);
	settings[1].name = "window";
	settings[1].value = "bar";
	REFUSE(CONFIG, pushgate_context_create(&options, &made));
	settings[1].name = "device";
	settings[1].value = "tin";
	REFUSE(CONFIG, pushgate_context_create(&options, &made));
	TRUE(made == NULL);

	setenv("PUSHGATE_SLOTS", "7", 1);
	REFUSE(CONFIG, pushgate_context_create(NULL, &made));
	TRUE(strstr(pushgate_last_message(), "PUSHGATE_SLOTS") != NULL);
	/* With the flag no variable counts. */
	newer.later = 0;
	DO(pushgate_context_create(&newer.known, &closed_context));
	unsetenv("PUSHGATE_SLOTS");
	DO(pushgate_context_close(closed_context));

	options = cpu_options();
	options.flags = PUSHGATE_CONTEXT_DEFAULTS_ONLY | PUSHGATE_CONTEXT_FOR_RANK;
	DO(pushgate_context_create(&options, &context));
}

static void a_context(void)
{
	pushgate_counter counters[64];
	char text[8];
	size_t needed, count, i;
	uint32_t word;
	char raw[32];

	BAD_HANDLES(closed_context, memory, pushgate_context_device(h, &word));
	REFUSE(ARGUMENT, pushgate_context_device(context, NULL));
	REFUSE(ARGUMENT, pushgate_context_device(context, (uint32_t *)(void *)(raw + 1)));
	DO(pushgate_context_device(context, &word));
	TRUE(word == PUSHGATE_DEVICE_CPU);

	BAD_HANDLES(closed_context, memory, pushgate_context_describe(h, text, sizeof text, &needed));
	REFUSE(ARGUMENT, pushgate_context_describe(context, NULL, 8, &needed));
	REFUSE(ARGUMENT, pushgate_context_describe(context, text, SIZE_MAX, &needed));
	REFUSE(ARGUMENT, pushgate_context_describe(context, text, sizeof text, (size_t *)(void *)(raw + 1)));
	DO(pushgate_context_describe(context, NULL, 0, &needed));
	TRUE(needed > sizeof text);
	DO(pushgate_context_describe(context, text, sizeof text, NULL));
	TRUE(strlen(text) == sizeof text - 1);

	BAD_HANDLES(closed_context, memory, pushgate_context_setting(h, "slots", text, sizeof text, NULL));
	REFUSE(ARGUMENT, pushgate_context_setting(context, NULL, text, sizeof text, NULL));
	REFUSE(ARGUMENT, pushgate_context_setting(context, "\xc3", text, sizeof text, NULL));
	REFUSE(UNKNOWN_SETTING, pushgate_context_setting(context, "slotz", text, sizeof text, NULL));
	/* The NCCL plugin's alone. */
	REFUSE(UNKNOWN_SETTING, pushgate_context_setting(context, "path", text, sizeof text, NULL));
	REFUSE(ARGUMENT, pushgate_context_setting(context, "slots", NULL, 1, NULL));
	DO(pushgate_context_setting(context, "slots", text, sizeof text, &needed));
	TRUE(strcmp(text, "1024") == 0 && needed == 5);
	DO(pushgate_context_setting(context, "window-size", text, 1, NULL));
	TRUE(text[0] == 0);

	BAD_HANDLES(closed_context, memory, pushgate_context_drive(h, &word));
	REFUSE(ARGUMENT, pushgate_context_drive(context, (uint32_t *)(void *)(raw + 1)));
	DO(pushgate_context_drive(context, NULL));
	DO(pushgate_context_drive(context, &word));

	BAD_HANDLES(closed_context, memory, pushgate_context_counters(h, counters, 64, &count));
	REFUSE(ARGUMENT, pushgate_context_counters(context, NULL, 1, &count));
	REFUSE(ARGUMENT, pushgate_context_counters(context, (pushgate_counter *)(void *)(raw + 1), 1, &count));
	REFUSE(ARGUMENT, pushgate_context_counters(context, counters, 64, (size_t *)(void *)(raw + 1)));
	DO(pushgate_context_counters(context, NULL, 0, &count));
	TRUE(count > 8 && count <= 64);
	DO(pushgate_context_counters(context, counters, 64, NULL));
	for (i = 0; i < count && strcmp(counters[i].name, "dropped") != 0; i++)
		;
	TRUE(i < count && counters[i].value == 0);
}

/* The second rank of an id, and what both exchange. */
static void *join_by_id(void *id)
{
	pushgate_comm *comm;
	uint64_t mine = 22, all[2];

	DO(pushgate_comm_connect_id(context, id, 1, 2, &comm));
	DO(pushgate_comm_all_gather(comm, &mine, sizeof mine, all, sizeof all));
	TRUE(all[0] == 11 && all[1] == 22);
	DO(pushgate_comm_barrier(comm));
	DO(pushgate_comm_close(comm));
	return NULL;
}

static void two_ranks(void)
{
	pushgate_unique_id id;
	pushgate_comm *comm;
	pthread_t second;
	uint64_t mine = 11, all[2] = {0, 0};

	DO(pushgate_unique_id_create(context, &id));
	TRUE(pthread_create(&second, NULL, join_by_id, &id) == 0);
	DO(pushgate_comm_connect_id(context, &id, 0, 2, &comm));
	/* The program's bytes may lie where all of them go. */
	all[0] = mine;
	DO(pushgate_comm_all_gather(comm, all, sizeof mine, all, sizeof all));
	TRUE(all[0] == 11 && all[1] == 22);
	DO(pushgate_comm_barrier(comm));
	TRUE(pthread_join(second, NULL) == 0);
	DO(pushgate_comm_close(comm));
}

/* What two ranks exchange by themselves: each writes its bytes, waits for the other's and takes both. */
static struct table {
	pthread_barrier_t both;
	unsigned char bytes[2][128];
} table;

static int gather(const void *bytes, size_t length, void *all, void *user)
{
	TRUE(length == sizeof table.bytes[0]);
	memcpy(table.bytes[*(uint32_t *)user], bytes, length);
	pthread_barrier_wait(&table.both);
	memcpy(all, table.bytes, sizeof table.bytes);
	return 0;
}

static int fails(const void *bytes, size_t length, void *all, void *user)
{
	(void)bytes, (void)length, (void)all, (void)user;
	return 7;
}

static void *bootstrap_second(void *unused)
{
	pushgate_comm *comm;
	uint32_t rank = 1;

	(void)unused;
	DO(pushgate_comm_bootstrap(context, rank, 2, gather, &rank, &comm));
	DO(pushgate_comm_barrier(comm));
	DO(pushgate_comm_close(comm));
	return NULL;
}

static void bootstrap(void)
{
	pushgate_comm *comm = NULL;
	pthread_t second;
	uint32_t rank = 0;

	BAD_HANDLES(closed_context, memory, pushgate_comm_bootstrap(h, 0, 2, gather, &rank, &comm));
	REFUSE(ARGUMENT, pushgate_comm_bootstrap(context, 0, 2, NULL, &rank, &comm));
	REFUSE(ARGUMENT, pushgate_comm_bootstrap(context, 0, 2, gather, &rank, NULL));
	REFUSE(CONFIG, pushgate_comm_bootstrap(context, 2, 2, gather, &rank, &comm));
	REFUSE(CONFIG, pushgate_comm_bootstrap(context, 0, 0, gather, &rank, &comm));
	REFUSE(CONFIG, pushgate_comm_bootstrap(context, 0, 100000, gather, &rank, &comm));
	REFUSE(IO, pushgate_comm_bootstrap(context, 0, 2, fails, &rank, &comm));
	TRUE(comm == NULL);
	TRUE(pthread_barrier_init(&table.both, NULL, 2) == 0);
	TRUE(pthread_create(&second, NULL, bootstrap_second, NULL) == 0);
	DO(pushgate_comm_bootstrap(context, rank, 2, gather, &rank, &comm));
	DO(pushgate_comm_barrier(comm));
	TRUE(pthread_join(second, NULL) == 0);
	DO(pushgate_comm_close(comm));
}

static void *join_second(void *unused)
{
	(void)unused;
	DO(pushgate_queue_pair_create(comms[1], 0, 0, NULL, &qps[1]));
	return NULL;
}

/* The second question is answered with yes. */
static int second_time(void *asked)
{
	return ++*(unsigned *)asked == 2;
}

static void communicators(void)
{
	unsigned asked = 0;
	pushgate_unique_id id;
	pushgate_comm *made = (pushgate_comm *)&id;
	uint32_t rank, ranks, transport;
	uint64_t mine = 7, all[2] = {0, 0};

	memset(&id, 0xa5, sizeof id);
	BAD_HANDLES(closed_context, memory, pushgate_comm_connect(h, "misuse", 0, 1, &made));
	REFUSE(ARGUMENT, pushgate_comm_connect(context, NULL, 0, 1, &made));
	REFUSE(ARGUMENT, pushgate_comm_connect(context, "misuse", 0, 1, NULL));
	REFUSE(CONFIG, pushgate_comm_connect(context, "misuse", 1, 1, &made));
	REFUSE(CONFIG, pushgate_comm_connect(context, "misuse", 0, 0, &made));
	REFUSE(CONFIG, pushgate_comm_connect(context, "misuse", 0, 100000, &made));
	BAD_HANDLES(closed_context, memory, pushgate_comm_from_environment(h, &made));
	REFUSE(ARGUMENT, pushgate_comm_from_environment(context, NULL));
	REFUSE(CONFIG, pushgate_comm_from_environment(context, &made));

	BAD_HANDLES(closed_context, memory, pushgate_unique_id_create(h, &id));
	REFUSE(ARGUMENT, pushgate_unique_id_create(context, NULL));
	BAD_HANDLES(closed_context, memory, pushgate_comm_connect_id(h, &id, 0, 1, &made));
	REFUSE(ARGUMENT, pushgate_comm_connect_id(context, NULL, 0, 1, &made));
	REFUSE(CONFIG, pushgate_comm_connect_id(context, &id, 0, 1, &made));
	DO(pushgate_unique_id_create(context, &id));
	REFUSE(ARGUMENT, pushgate_comm_connect_id(context, &id, 0, 1, NULL));
	REFUSE(CONFIG, pushgate_comm_connect_id(context, &id, 3, 2, &made));
	TRUE(made == NULL);
	DO(pushgate_comm_connect_id(context, &id, 0, 1, &closed_comm));
	/* An id serves once. */
	REFUSE(CONFIG, pushgate_comm_connect_id(context, &id, 0, 1, &made));
	DO(pushgate_comm_close(closed_comm));
	DO(pushgate_comm_connect(context, "misuse", 0, 1, &made));
	DO(pushgate_comm_close(made));
	DO(pushgate_interrupt_by(second_time, &asked));
	REFUSE(INTERRUPTED, pushgate_comm_connect(context, "misuse-alone", 0, 2, &made));
	DO(pushgate_interrupt_by(NULL, NULL));
	TRUE(asked == 2 && made == NULL);
	setenv("PUSHGATE_RANK", "0", 1);
	setenv("PUSHGATE_RANKS", "1", 1);
	DO(pushgate_comm_from_environment(context, &made));
	unsetenv("PUSHGATE_RANK");
	unsetenv("PUSHGATE_RANKS");
	DO(pushgate_comm_close(made));

	BAD_HANDLES(closed_context, memory, pushgate_comm_local(h, 2, comms));
	REFUSE(ARGUMENT, pushgate_comm_local(context, 2, NULL));
	REFUSE(CONFIG, pushgate_comm_local(context, 0, comms));
	REFUSE(CONFIG, pushgate_comm_local(context, UINT32_MAX, comms));
	DO(pushgate_comm_local(context, 2, comms));

	BAD_HANDLES(closed_comm, memory, pushgate_comm_rank(h, &rank, &ranks));
	REFUSE(ARGUMENT, pushgate_comm_rank(comms[1], (uint32_t *)(void *)((char *)&mine + 1), NULL));
	DO(pushgate_comm_rank(comms[1], &rank, NULL));
	DO(pushgate_comm_rank(comms[1], NULL, &ranks));
	TRUE(rank == 1 && ranks == 2);
	BAD_HANDLES(closed_comm, memory, pushgate_comm_transport(h, 0, &transport));
	REFUSE(ARGUMENT, pushgate_comm_transport(comms[0], 1, NULL));
	REFUSE(CONFIG, pushgate_comm_transport(comms[0], 0, &transport));
	REFUSE(CONFIG, pushgate_comm_transport(comms[0], 2, &transport));
	DO(pushgate_comm_transport(comms[0], 1, &transport));
	TRUE(transport == PUSHGATE_TRANSPORT_LOCAL);

	BAD_HANDLES(closed_comm, memory, pushgate_comm_all_gather(h, &mine, sizeof mine, all, sizeof all));
	REFUSE(ARGUMENT, pushgate_comm_all_gather(comms[0], NULL, sizeof mine, all, sizeof all));
	REFUSE(ARGUMENT, pushgate_comm_all_gather(comms[0], &mine, sizeof mine, NULL, sizeof all));
	REFUSE(ARGUMENT, pushgate_comm_all_gather(comms[0], &mine, sizeof mine, all, sizeof mine));
	REFUSE(ARGUMENT, pushgate_comm_all_gather(comms[0], &mine, SIZE_MAX / 2 + 1, all, 0));
	BAD_HANDLES(closed_comm, memory, pushgate_comm_barrier(h));
	BAD_HANDLES(closed_comm, memory, pushgate_comm_check(h));
	BAD_HANDLES(closed_comm, memory, pushgate_comm_abort(h));
	DO(pushgate_comm_check(comms[0]));
	TRUE(all[0] == 0 && all[1] == 0);
}

static void queue_pairs(void)
{
	pushgate_queue_pair_options options;
	pushgate_queue_pair *made = (pushgate_queue_pair *)&options;
	pthread_t second;
	uint64_t value;

	memset(&options, 0, sizeof options);
	options.size = sizeof options;
	BAD_HANDLES(closed_comm, memory, pushgate_queue_pair_create(h, 1, 0, NULL, &made));
	REFUSE(ARGUMENT, pushgate_queue_pair_create(comms[0], 1, 0, NULL, NULL));
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 0, 0, NULL, &made));
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 2, 0, NULL, &made));
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 1, 1u << 24, NULL, &made));
	options.size = 4;
	REFUSE(ARGUMENT, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	options.size = sizeof options;
	options.flags = 2;
	REFUSE(ARGUMENT, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	options.flags = 0;
	options.reserved = 1;
	REFUSE(ARGUMENT, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	options.reserved = 0;
	options.window_size = 100;
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	options.window_size = UINT64_C(1) << 63;
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	options.window_size = 32;
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	options.window_size = 0;
	options.slots = 3;
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	options.slots = UINT64_C(1) << 40;
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	options.slots = 0;
	options.receives = 3;
	REFUSE(CONFIG, pushgate_queue_pair_create(comms[0], 1, 0, &options, &made));
	TRUE(made == NULL);

	/* Each end waits for the other. */
	options.receives = 64;
	TRUE(pthread_create(&second, NULL, join_second, NULL) == 0);
	DO(pushgate_queue_pair_create(comms[0], 1, 0, &options, &qps[0]));
	TRUE(pthread_join(second, NULL) == 0);

	BAD_HANDLES(closed_qp, memory, pushgate_queue_pair_device_address(h, &value));
	REFUSE(ARGUMENT, pushgate_queue_pair_device_address(qps[0], NULL));
	BAD_HANDLES(closed_qp, memory, pushgate_queue_pair_max_message(h, &value));
	REFUSE(ARGUMENT, pushgate_queue_pair_max_message(qps[0], NULL));
	DO(pushgate_queue_pair_max_message(qps[0], &value));
	TRUE(value == 1 << 20);
	BAD_HANDLES(closed_qp, memory, pushgate_queue_pair_check(h));
	BAD_HANDLES(closed_qp, memory, pushgate_queue_pair_abort(h));
	DO(pushgate_queue_pair_check(qps[0]));
	REFUSE(BUSY, pushgate_comm_close(comms[0]));
	REFUSE(BUSY, pushgate_context_close(context));
}

static void memories(void)
{
	static unsigned char own[4096];
	pushgate_memory *made = (pushgate_memory *)own, *of_host, *of_device;
	unsigned char bytes[64];
	uint64_t address;
	size_t size;
	void *pointer;

	BAD_HANDLES(closed_context, comms[0], pushgate_memory_alloc_host(h, 64, &made));
	REFUSE(ARGUMENT, pushgate_memory_alloc_host(context, 0, &made));
	REFUSE(ARGUMENT, pushgate_memory_alloc_host(context, SIZE_MAX, &made));
	REFUSE(ARGUMENT, pushgate_memory_alloc_host(context, 64, NULL));
	REFUSE(MEMORY, pushgate_memory_alloc_host(context, (size_t)1 << 62, &made));
	BAD_HANDLES(closed_context, comms[0], pushgate_memory_alloc_device(h, 64, &made));
	REFUSE(ARGUMENT, pushgate_memory_alloc_device(context, 0, &made));
	REFUSE(ARGUMENT, pushgate_memory_alloc_device(context, SIZE_MAX, &made));
	REFUSE(ARGUMENT, pushgate_memory_alloc_device(context, 64, NULL));
	REFUSE(DEVICE, pushgate_memory_alloc_device(context, (size_t)1 << 62, &made));
	BAD_HANDLES(closed_context, comms[0], pushgate_memory_use_host(h, own, sizeof own, &made));
	REFUSE(ARGUMENT, pushgate_memory_use_host(context, NULL, 64, &made));
	REFUSE(ARGUMENT, pushgate_memory_use_host(context, own, 0, &made));
	REFUSE(ARGUMENT, pushgate_memory_use_host(context, own, 64, NULL));
	REFUSE(ARGUMENT, pushgate_memory_use_host(context, own, SIZE_MAX, &made));
	REFUSE(CONFIG, pushgate_memory_use_host(context, (void *)(UINTPTR_MAX - 63), 128, &made));
	BAD_HANDLES(closed_context, comms[0], pushgate_memory_use_device(h, 4096, 64, &made));
	REFUSE(ARGUMENT, pushgate_memory_use_device(context, 0, 64, &made));
	REFUSE(ARGUMENT, pushgate_memory_use_device(context, 4096, 0, &made));
	REFUSE(ARGUMENT, pushgate_memory_use_device(context, UINT64_MAX - 2, 64, &made));
	REFUSE(ARGUMENT, pushgate_memory_use_device(context, 4096, 64, NULL));
	TRUE(made == NULL);

	DO(pushgate_memory_alloc_host(context, 64, &of_host));
	BAD_HANDLES(closed_memory, context, pushgate_memory_address(h, &address, &pointer, &size));
	REFUSE(ARGUMENT, pushgate_memory_address(of_host, (uint64_t *)(void *)(bytes + 1), NULL, NULL));
	REFUSE(ARGUMENT, pushgate_memory_address(of_host, NULL, (void **)(void *)(bytes + 1), NULL));
	REFUSE(ARGUMENT, pushgate_memory_address(of_host, NULL, NULL, (size_t *)(void *)(bytes + 1)));
	DO(pushgate_memory_address(of_host, &address, &pointer, &size));
	TRUE(address != 0 && pointer != NULL && size == 64);
	memset(pointer, 1, size);

	DO(pushgate_memory_use_device(context, address, size, &of_device));
	DO(pushgate_memory_address(of_device, NULL, &pointer, NULL));
	TRUE(pointer == NULL);

	BAD_HANDLES(closed_memory, context, pushgate_memory_write(h, 0, bytes, 8));
	BAD_HANDLES(closed_memory, context, pushgate_memory_read(h, 0, bytes, 8));
	REFUSE(ARGUMENT, pushgate_memory_write(of_host, 0, bytes, 8));
	REFUSE(ARGUMENT, pushgate_memory_read(of_host, 0, bytes, 8));
	REFUSE(ARGUMENT, pushgate_memory_write(of_device, 0, bytes, 8));
	REFUSE(ARGUMENT, pushgate_memory_read(of_device, 0, bytes, 8));
	REFUSE(ARGUMENT, pushgate_memory_write(memory, 0, NULL, 8));
	REFUSE(ARGUMENT, pushgate_memory_read(memory, 0, NULL, 8));
	REFUSE(ARGUMENT, pushgate_memory_write(memory, 0, bytes, SIZE_MAX));
	REFUSE(ARGUMENT, pushgate_memory_read(memory, 0, bytes, SIZE_MAX));
	REFUSE(DEVICE, pushgate_memory_write(memory, 4090, bytes, 8));
	REFUSE(DEVICE, pushgate_memory_read(memory, SIZE_MAX, bytes, 8));
	memset(bytes, 9, sizeof bytes);
	DO(pushgate_memory_write(memory, 4032, bytes, 64));
	memset(bytes, 0, sizeof bytes);
	DO(pushgate_memory_read(memory, 4032, bytes, 64));
	TRUE(bytes[0] == 9 && bytes[63] == 9);
	DO(pushgate_memory_write(memory, 4096, NULL, 0));

	DO(pushgate_memory_close(of_device));
	DO(pushgate_memory_close(of_host));
}

static void regions(void)
{
	static unsigned char own[4096];
	pushgate_memory *kinds[3];
	pushgate_region *made = (pushgate_region *)own;
	uint32_t key, i;
	uint64_t address;

	BAD_HANDLES(closed_qp, memory, pushgate_region_create(h, memory, &made));
	BAD_HANDLES(closed_memory, qps[0], pushgate_region_create(qps[0], h, &made));
	REFUSE(ARGUMENT, pushgate_region_create(qps[0], memory, NULL));
	TRUE(made == NULL);
	DO(pushgate_region_create(qps[0], memory, &region));
	BAD_HANDLES(closed_region, memory, pushgate_region_key(h, &key));
	REFUSE(ARGUMENT, pushgate_region_key(region, NULL));
	DO(pushgate_region_key(region, &key));
	REFUSE(BUSY, pushgate_memory_close(memory));
	REFUSE(BUSY, pushgate_queue_pair_close(qps[0]));

	/* The other kinds of memory. */
	DO(pushgate_memory_alloc_host(context, 64, &kinds[0]));
	DO(pushgate_memory_use_host(context, own, sizeof own, &kinds[1]));
	DO(pushgate_memory_address(kinds[1], &address, NULL, NULL));
	DO(pushgate_memory_use_device(context, address, sizeof own, &kinds[2]));
	for (i = 0; i < 3; i++) {
		DO(pushgate_region_create(qps[0], kinds[i], &closed_region));
		DO(pushgate_region_close(closed_region));
		DO(pushgate_memory_close(kinds[i]));
	}
	closed_memory = kinds[0];
	BAD_TO_CLOSE(closed_region, memory, pushgate_region_close);
	BAD_TO_CLOSE(closed_memory, context, pushgate_memory_close);
}

static void kernels(void)
{
	pushgate_context_options options = cpu_options();
	pushgate_launch_options shape;
	struct store_params params;
	pushgate_context *other;
	pushgate_module *made = (pushgate_module *)&params;
	pushgate_stream *of_other;
	pushgate_kernel *running = (pushgate_kernel *)&params;
	uint32_t blocks;
	uint64_t value = 0;

	BAD_HANDLES(closed_context, memory, pushgate_module_from_text(h, "k.cu", KERNELS, &made));
	REFUSE(ARGUMENT, pushgate_module_from_text(context, NULL, KERNELS, &made));
	REFUSE(ARGUMENT, pushgate_module_from_text(context, "k.cu", NULL, &made));
	REFUSE(ARGUMENT, pushgate_module_from_text(context, "k.cu", KERNELS, NULL));
	REFUSE(DEVICE, pushgate_module_from_text(context, "k.cu", "#include \"pushgate/device.cuh\"\nnonsense\n", &made));
	TRUE(strstr(pushgate_last_message(), "nonsense") != NULL);
	BAD_HANDLES(closed_context, memory, pushgate_module_from_file(h, "/dev/null", &made));
	REFUSE(ARGUMENT, pushgate_module_from_file(context, NULL, &made));
	REFUSE(ARGUMENT, pushgate_module_from_file(context, "/dev/null", NULL));
	REFUSE(DEVICE, pushgate_module_from_file(context, "/nowhere/k.cu", &made));
	TRUE(made == NULL);
	BAD_HANDLES(closed_context, memory, pushgate_module_from_image(h, "k.ptx", PTX, sizeof PTX, &made));
	REFUSE(ARGUMENT, pushgate_module_from_image(context, NULL, PTX, sizeof PTX, &made));
	REFUSE(ARGUMENT, pushgate_module_from_image(context, "k.ptx", NULL, 1, &made));
	REFUSE(ARGUMENT, pushgate_module_from_image(context, "k.ptx", PTX, sizeof PTX, NULL));
	REFUSE(DEVICE, pushgate_module_from_image(context, "k.ptx", NULL, 0, &made));
	REFUSE(DEVICE, pushgate_module_from_image(context, "k.ptx", "nonsense", 8, &made));
	REFUSE(DEVICE, pushgate_module_from_image(context, "k.ptx", PTX, sizeof PTX, &made));
	TRUE(strstr(pushgate_last_message(), "image k.ptx is for PTX of sm_80, and the device `cpu` takes") != NULL);
	BAD_HANDLES(closed_context, memory, pushgate_module_from_image_file(h, "/dev/null", &made));
	REFUSE(ARGUMENT, pushgate_module_from_image_file(context, NULL, &made));
	REFUSE(ARGUMENT, pushgate_module_from_image_file(context, "/dev/null", NULL));
	REFUSE(DEVICE, pushgate_module_from_image_file(context, "/dev/null", &made));
	REFUSE(DEVICE, pushgate_module_from_image_file(context, "/nowhere/k.cubin", &made));

	DO(pushgate_module_from_text(context, "k.cu", KERNELS, &module));

	BAD_HANDLES(closed_module, memory, pushgate_module_resident_blocks(h, "store_value", 32, 0, &blocks));
	REFUSE(ARGUMENT, pushgate_module_resident_blocks(module, NULL, 32, 0, &blocks));
	REFUSE(ARGUMENT, pushgate_module_resident_blocks(module, "store_value", 32, 0, NULL));
	REFUSE(DEVICE, pushgate_module_resident_blocks(module, "no_kernel", 32, 0, &blocks));
	REFUSE(DEVICE, pushgate_module_resident_blocks(module, "store_value", 0, 0, &blocks));
	DO(pushgate_module_resident_blocks(module, "store_value", 32, 0, &blocks));
	TRUE(blocks > 0);

	BAD_HANDLES(closed_context, memory, pushgate_stream_create(h, &stream));
	REFUSE(ARGUMENT, pushgate_stream_create(context, NULL));
	DO(pushgate_stream_create(context, &closed_stream));
	DO(pushgate_stream_close(closed_stream));
	DO(pushgate_stream_create(context, &stream));

	DO(pushgate_memory_address(memory, &params.at, NULL, NULL));
	params.value = 77;
	memset(&shape, 0, sizeof shape);
	shape.size = sizeof shape;
	shape.grid = shape.block = 1;
#define LAUNCH(s, m, name, o, p, size) pushgate_kernel_launch(s, m, name, o, p, size, &running)
	BAD_HANDLES(closed_stream, memory, LAUNCH(h, module, "store_value", NULL, &params, sizeof params));
	BAD_HANDLES(closed_module, memory, LAUNCH(stream, h, "store_value", NULL, &params, sizeof params));
	REFUSE(ARGUMENT, pushgate_kernel_launch(stream, module, "store_value", NULL, &params, sizeof params, NULL));
	REFUSE(ARGUMENT, LAUNCH(stream, module, NULL, NULL, &params, sizeof params));
	REFUSE(ARGUMENT, LAUNCH(stream, module, "store_value", NULL, NULL, sizeof params));
	REFUSE(DEVICE, LAUNCH(stream, module, "no_kernel", NULL, &params, sizeof params));
	REFUSE(DEVICE, LAUNCH(stream, module, "store_value", NULL, &params, 8));
	REFUSE(DEVICE, LAUNCH(stream, module, "store_value", NULL, NULL, 0));
	shape.size = 3;
	REFUSE(ARGUMENT, LAUNCH(stream, module, "store_value", &shape, &params, sizeof params));
	shape.size = sizeof shape;
	shape.flags = 4;
	REFUSE(ARGUMENT, LAUNCH(stream, module, "store_value", &shape, &params, sizeof params));
	shape.flags = 0;
	shape.block = 4096;
	REFUSE(DEVICE, LAUNCH(stream, module, "store_value", &shape, &params, sizeof params));
	shape.block = 0;
	REFUSE(DEVICE, LAUNCH(stream, module, "store_value", &shape, &params, sizeof params));
	shape.block = 1;
	shape.grid = 0;
	REFUSE(DEVICE, LAUNCH(stream, module, "store_value", &shape, &params, sizeof params));
	shape.grid = 1;
	shape.shared_bytes = UINT32_MAX;
	REFUSE(DEVICE, LAUNCH(stream, module, "store_value", &shape, &params, sizeof params));
	shape.shared_bytes = 0;
	TRUE(running == NULL);
	/* A stream and a module that do not belong together. */
	DO(pushgate_context_create(&options, &other));
	DO(pushgate_stream_create(other, &of_other));
	REFUSE(ARGUMENT, LAUNCH(of_other, module, "store_value", &shape, &params, sizeof params));
	DO(pushgate_stream_close(of_other));
	DO(pushgate_module_from_text(other, "k.cu", KERNELS, &closed_module));
	DO(pushgate_module_close(closed_module));
	DO(pushgate_context_close(other));

	DO(LAUNCH(stream, module, "store_value", &shape, &params, sizeof params));
	BAD_HANDLES(closed_kernel, memory, pushgate_kernel_wait(h, 1));
	DO(pushgate_kernel_wait(running, PUSHGATE_FOREVER));
	DO(pushgate_memory_read(memory, 0, &value, sizeof value));
	TRUE(value == 77);
	closed_kernel = running;
	DO(pushgate_kernel_close(closed_kernel));
	BAD_TO_CLOSE(closed_kernel, memory, pushgate_kernel_close);
	BAD_TO_CLOSE(closed_stream, memory, pushgate_stream_close);
	BAD_TO_CLOSE(closed_module, memory, pushgate_module_close);
}

/* Ends of the host, of a queue pair of their own. */
static pushgate_queue_pair *host_qps[2];

static void *join_host(void *unused)
{
	(void)unused;
	DO(pushgate_queue_pair_create(comms[1], 0, 1, NULL, &host_qps[1]));
	return NULL;
}

static void host_ends(void)
{
	pushgate_host_end *from, *to, *made = (pushgate_host_end *)&refused;
	pushgate_memory *inbox;
	pushgate_region *into;
	pthread_t second;
	unsigned char bytes[100];
	uint64_t value, *words;
	uint32_t key, tag;
	size_t length;
	void *pointer;

	TRUE(pthread_create(&second, NULL, join_host, NULL) == 0);
	DO(pushgate_queue_pair_create(comms[0], 1, 1, NULL, &host_qps[0]));
	TRUE(pthread_join(second, NULL) == 0);
	BAD_HANDLES(closed_region, memory, pushgate_host_end_create(h, &made));
	REFUSE(ARGUMENT, pushgate_host_end_create(host_qps[0], NULL));
	DO(pushgate_host_end_create(host_qps[0], &from));
	/* A queue pair gives its end once. */
	REFUSE(CONFIG, pushgate_host_end_create(host_qps[0], &made));
	TRUE(made == NULL);
	REFUSE(BUSY, pushgate_queue_pair_close(host_qps[0]));
	DO(pushgate_host_end_create(host_qps[1], &to));

	memset(bytes, 5, sizeof bytes);
	closed_end = (pushgate_host_end *)closed_region;
	BAD_HANDLES(closed_end, memory, pushgate_host_end_try_send(h, bytes, 1, 0));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_send(h, bytes, 1, 0));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_try_put(h, 0, 0, bytes, 1, PUSHGATE_NO_SIGNAL, 0));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_put(h, 0, 0, bytes, 1, PUSHGATE_NO_SIGNAL, 0));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_signal(h, 0, 1));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_signal_value(h, 0, &value));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_wait_signal(h, 0, 0));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_flush(h));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_recv(h, bytes, sizeof bytes, &length, &tag));
	BAD_HANDLES(closed_end, memory, pushgate_host_end_try_recv(h, bytes, sizeof bytes, &length, &tag));
	REFUSE(ARGUMENT, pushgate_host_end_try_send(from, NULL, 1, 0));
	REFUSE(ARGUMENT, pushgate_host_end_send(from, bytes, SIZE_MAX, 0));
	REFUSE(CONFIG, pushgate_host_end_send(from, KERNELS, (size_t)1 << 40, 0));
	REFUSE(ARGUMENT, pushgate_host_end_try_put(from, 0, 0, NULL, 1, PUSHGATE_NO_SIGNAL, 0));
	REFUSE(CONFIG, pushgate_host_end_try_put(from, 0, UINT64_C(1) << 56, bytes, 1, PUSHGATE_NO_SIGNAL, 0));
	REFUSE(CONFIG, pushgate_host_end_put(from, 0, 0, bytes, 1, 1u << 16, 0));
	REFUSE(CONFIG, pushgate_host_end_put(from, 0, 0, bytes, 1, 0, UINT64_C(1) << 56));
	REFUSE(CONFIG, pushgate_host_end_signal(from, 1u << 16, 1));
	REFUSE(CONFIG, pushgate_host_end_signal(from, 0, UINT64_MAX));
	REFUSE(CONFIG, pushgate_host_end_signal_value(from, 64, &value));
	REFUSE(ARGUMENT, pushgate_host_end_signal_value(from, 0, NULL));
	REFUSE(CONFIG, pushgate_host_end_wait_signal(from, 64, 1));
	REFUSE(ARGUMENT, pushgate_host_end_recv(to, NULL, 8, NULL, NULL));
	REFUSE(ARGUMENT, pushgate_host_end_try_recv(to, bytes, SIZE_MAX, NULL, NULL));
	REFUSE(ARGUMENT, pushgate_host_end_try_recv(to, bytes, 8, (size_t *)(void *)(bytes + 1), NULL));
	REFUSE(AGAIN, pushgate_host_end_try_recv(to, bytes, sizeof bytes, &length, &tag));

	DO(pushgate_host_end_send(from, "hello", 6, 3));
	DO(pushgate_host_end_try_send(from, NULL, 0, 4));
	DO(pushgate_host_end_flush(from));
	/* A message that does not fit stays the next one. */
	REFUSE(CONFIG, pushgate_host_end_recv(to, bytes, 5, &length, &tag));
	DO(pushgate_host_end_recv(to, bytes, sizeof bytes, &length, &tag));
	TRUE(length == 6 && tag == 3 && strcmp((char *)bytes, "hello") == 0);
	DO(pushgate_host_end_try_recv(to, NULL, 0, &length, &tag));
	TRUE(length == 0 && tag == 4);

	DO(pushgate_memory_alloc_host(context, 64, &inbox));
	DO(pushgate_memory_address(inbox, NULL, &pointer, NULL));
	words = pointer;
	DO(pushgate_region_create(host_qps[1], inbox, &into));
	DO(pushgate_region_key(into, &key));
	value = 1234;
	DO(pushgate_host_end_put(from, key, 8, &value, sizeof value, 0, 1));
	DO(pushgate_host_end_wait_signal(to, 0, 1));
	TRUE(words[0] == 0 && words[1] == 1234);
	value = 5678;
	DO(pushgate_host_end_try_put(from, key, 16, &value, sizeof value, PUSHGATE_NO_SIGNAL, 0));
	DO(pushgate_host_end_signal(from, 0, 2));
	DO(pushgate_host_end_wait_signal(to, 0, 2));
	DO(pushgate_host_end_signal_value(to, 0, &value));
	TRUE(words[2] == 5678 && value == 2);
	/* A put that leaves the region ends the queue pair. */
	DO(pushgate_host_end_put(from, key, 60, &value, sizeof value, 0, 3));
	REFUSE(REFUSED, pushgate_host_end_wait_signal(to, 0, 3));
	REFUSE(REFUSED, pushgate_host_end_wait_signal(from, 1, 1));
	TRUE(words[7] == 0);

	DO(pushgate_region_close(into));
	DO(pushgate_memory_close(inbox));
	DO(pushgate_host_end_close(from));
	closed_end = to;
	DO(pushgate_host_end_close(to));
	BAD_TO_CLOSE(closed_end, memory, pushgate_host_end_close);
	DO(pushgate_queue_pair_close(host_qps[0]));
	DO(pushgate_queue_pair_close(host_qps[1]));
}

/* A child of fork has no handles; it may make a context of its own. */
static void children(void)
{
	pid_t child;
	int status;

	fflush(NULL);
	child = fork();
	TRUE(child >= 0);
	if (child == 0) {
		pushgate_context_options options = cpu_options();
		pushgate_context *own;
		uint32_t word;

		wrong = 0;
		REFUSE(FORKED, pushgate_context_device(context, &word));
		REFUSE(FORKED, pushgate_comm_barrier(comms[0]));
		REFUSE(FORKED, pushgate_queue_pair_check(qps[0]));
		REFUSE(FORKED, pushgate_region_close(region));
		REFUSE(FORKED, pushgate_context_close(context));
		REFUSE(HANDLE, pushgate_context_device(NULL, &word));
		DO(pushgate_context_create(&options, &own));
		DO(pushgate_context_device(own, &word));
		DO(pushgate_context_close(own));
		/* A child holds memory of threads that it does not have; a program in its place has no leaks to look for. */
		if (wrong == 0)
			execlp("true", "true", (char *)NULL);
		_exit(1);
	}
	TRUE(waitpid(child, &status, 0) == child);
	TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	refused += 6;
}

/* A kernel that waits for its peer, and an abort. */
static void ends(void)
{
	struct {
		uint64_t qp, result;
	} params;
	pushgate_launch_options shape = {sizeof shape, 1, 1, 0, PUSHGATE_LAUNCH_COOPERATING};
	pushgate_kernel *running;
	uint64_t status = 0;

	DO(pushgate_queue_pair_device_address(qps[0], &params.qp));
	DO(pushgate_memory_address(memory, &params.result, NULL, NULL));
	DO(LAUNCH(stream, module, "wait_for_peer", &shape, &params, sizeof params));
	REFUSE(TIMED_OUT, pushgate_kernel_wait(running, 0));
	REFUSE(TIMED_OUT, pushgate_kernel_wait(running, 20));
	REFUSE(BUSY, pushgate_stream_close(stream));
	REFUSE(BUSY, pushgate_module_close(module));
	DO(pushgate_queue_pair_abort(qps[0]));
	DO(pushgate_kernel_wait(running, PUSHGATE_FOREVER));
	DO(pushgate_memory_read(memory, 0, &status, sizeof status));
	TRUE(strcmp(pushgate_status_name(status), "aborted") == 0);
	REFUSE(ABORTED, pushgate_queue_pair_check(qps[0]));
	DO(pushgate_kernel_close(running));
	DO(pushgate_comm_abort(comms[0]));

	DO(pushgate_stream_close(stream));
	DO(pushgate_module_close(module));
	DO(pushgate_region_close(region));
	DO(pushgate_memory_close(memory));
	DO(pushgate_queue_pair_close(qps[0]));
	closed_qp = qps[1];
	DO(pushgate_queue_pair_close(qps[1]));
	BAD_TO_CLOSE(closed_qp, comms[0], pushgate_queue_pair_close);
	DO(pushgate_comm_close(comms[1]));
	DO(pushgate_comm_close(comms[0]));
	BAD_TO_CLOSE(closed_comm, context, pushgate_comm_close);
	DO(pushgate_context_close(context));
	BAD_TO_CLOSE(context, closed_comm, pushgate_context_close);
}

int main(void)
{
	/* Variables of a launcher that has started this test must not matter. */
	unsetenv("PUSHGATE_RANK");
	unsetenv("PUSHGATE_RANKS");
	texts();
	the_log();
	contexts();
	/* A context says which device it took, and why. */
	TRUE(lines > 0);
	DO(pushgate_memory_alloc_device(context, 4096, &memory));
	a_context();
	communicators();
	two_ranks();
	bootstrap();
	queue_pairs();
	memories();
	regions();
	kernels();
	host_ends();
	children();
	ends();
	printf("%u wrong calls were refused, %u otherwise than they should be\n", refused, wrong);
	return wrong != 0;
}
