/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Closes a queue pair, a communicator and a context, and calls a proxy's process, while what they wait for is stopped, and has each
 * call end. `interrupt PUSHGATE RENDEZVOUS SOCKET`: the command, a free address, and where a proxy may listen. Ends with 0 if each
 * call has asked, and has returned what it should.
 */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <pushgate/pushgate.h>

static pid_t child;
static unsigned asked;

static void end_child(void)
{
	if (child > 0) {
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
	}
	child = 0;
}

/* It has stopped when this returns. */
static int stop_child(void)
{
	int status;

	return kill(child, SIGSTOP) == 0 && waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status);
}

/* What is not so ends the program. */
#define TRUE(what)                                                                                           \
	do {                                                                                                 \
		if (!(what)) {                                                                               \
			fprintf(stderr, "interrupt.c:%d: not so: %s (%s)\n", __LINE__, #what, pushgate_last_message()); \
			end_child();                                                                         \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

#define DO(call) TRUE((call) == PUSHGATE_E_OK)

static int yes(void *argument)
{
	(void)argument;
	asked++;
	return 1;
}

/* A call that waits, and that is ended; its sentence says `says`. */
#define INTERRUPTED(says, call)                                                \
	do {                                                                   \
		int code_;                                                     \
		asked = 0;                                                     \
		DO(pushgate_interrupt_by(yes, NULL));                          \
		code_ = call;                                                  \
		TRUE(code_ == PUSHGATE_E_INTERRUPTED);                         \
		TRUE(strstr(pushgate_last_message(), says) != NULL);           \
		TRUE(asked > 0);                                               \
		DO(pushgate_interrupt_by(NULL, NULL));                         \
	} while (0)

static pushgate_context *context_with(const pushgate_setting *settings, size_t count)
{
	pushgate_context_options options;
	pushgate_context *context;

	memset(&options, 0, sizeof options);
	options.size = sizeof options;
	options.settings = settings;
	options.settings_count = count;
	options.flags = PUSHGATE_CONTEXT_DEFAULTS_ONLY;
	DO(pushgate_context_create(&options, &context));
	return context;
}

static void a_rank_that_is_stopped(const char *rendezvous)
{
	static char payload[1 << 20], all[30 << 20];
	const pushgate_setting settings[] = {{"device", "cpu"}, {"timeout", "600s"}, {"qp", "tcp"},
					     {"window-size", "64M"}, {"rendezvous", rendezvous}};
	pushgate_context *context;
	pushgate_comm *comm;
	pushgate_queue_pair *qp;
	pushgate_host_end *end;
	int rank, status, code, passes;
	size_t counts;

	fflush(NULL);
	child = fork();
	TRUE(child >= 0);
	rank = child == 0;
	context = context_with(settings, 5);
	DO(pushgate_comm_connect(context, "interrupt", rank, 2, &comm));
	DO(pushgate_queue_pair_create(comm, 1 - rank, 0, NULL, &qp));
	DO(pushgate_host_end_create(qp, &end));
	if (rank == 1) {
		DO(pushgate_host_end_recv(end, payload, sizeof payload, NULL, NULL));
		raise(SIGSTOP);
		_exit(1);
	}
	/* This needs a receive of the rank, so its receives are known before it stops. */
	DO(pushgate_host_end_send(end, payload, 1, 0));
	TRUE(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
	/* More than the sockets hold. */
	do
		code = pushgate_host_end_try_send(end, payload, sizeof payload, 0);
	while (code == PUSHGATE_E_OK);
	TRUE(code == PUSHGATE_E_AGAIN);
	DO(pushgate_host_end_close(end));
	/* Each takes a pass of the engine, so that the sockets are full. */
	for (passes = 0; passes < 1000; passes++)
		DO(pushgate_context_counters(context, NULL, 0, &counts));
	INTERRUPTED("messages have not arrived there", pushgate_queue_pair_close(qp));
	/* It is closed all the same. */
	TRUE(pushgate_queue_pair_check(qp) == PUSHGATE_E_HANDLE);
	INTERRUPTED("interrupted", pushgate_comm_all_gather(comm, all, sizeof all / 2, all, sizeof all));
	INTERRUPTED("ranks [1] have not taken all", pushgate_comm_close(comm));
	TRUE(pushgate_comm_check(comm) == PUSHGATE_E_HANDLE);
	DO(pushgate_context_close(context));
	end_child();
}

static void a_proxy_that_is_stopped(const char *command, const char *socket)
{
	const pushgate_setting settings[] = {{"device", "cpu"}, {"proxy", "process"}, {"proxy-socket", socket}};
	const struct timespec moment = {0, 10000000};
	pushgate_context *context;
	size_t counts;

	child = fork();
	TRUE(child >= 0);
	if (child == 0) {
		unsetenv("PUSHGATE_CONFIG");
		execl(command, command, "proxy", "--proxy-socket", socket, (char *)NULL);
		_exit(1);
	}
	while (access(socket, F_OK) != 0) {
		TRUE(waitpid(child, NULL, WNOHANG) == 0);
		nanosleep(&moment, NULL);
	}
	context = context_with(settings, 3);
	DO(pushgate_context_counters(context, NULL, 0, &counts));
	TRUE(stop_child());
	INTERRUPTED("interrupted", pushgate_context_counters(context, NULL, 0, &counts));
	/* The handle stays open, and the proxy is as good as before. */
	TRUE(kill(child, SIGCONT) == 0);
	DO(pushgate_context_counters(context, NULL, 0, &counts));
	TRUE(stop_child());
	INTERRUPTED("is it stopped?", pushgate_context_close(context));
	TRUE(pushgate_context_drive(context, NULL) == PUSHGATE_E_HANDLE);
	end_child();
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	a_rank_that_is_stopped(argv[2]);
	a_proxy_that_is_stopped(argv[1], argv[3]);
	printf("each call has ended\n");
	return 0;
}
