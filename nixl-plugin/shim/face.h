/* The C face between the shim in C++ (plugin.cpp) and the engine in Rust (../src/face.rs).
 *
 * Every call may come from any thread. A status is a value of nixl_status_t: 0 done, 1 under way, negative an error. Text and
 * blobs are a pointer with a length. No call throws, and no call keeps a pointer that it was given, but for the memory that is
 * registered. In a child of fork all but release, close and the calls without an agent fail. */
#ifndef PUSHGATE_NIXL_FACE_H
#define PUSHGATE_NIXL_FACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pushgate_nixl_agent pushgate_nixl_agent;
typedef struct pushgate_nixl_transfer pushgate_nixl_transfer;

typedef struct pushgate_nixl_bytes {
    const char *at;
    size_t length;
} pushgate_nixl_bytes;

/* A parameter of the backend: key and value. */
typedef struct pushgate_nixl_parameter {
    pushgate_nixl_bytes key;
    pushgate_nixl_bytes value;
} pushgate_nixl_parameter;

/* One element of a descriptor list. `registration`: what pushgate_nixl_register gave for an element of this agent, what
 * pushgate_nixl_load gave for an element of another one. */
typedef struct pushgate_nixl_element {
    uint64_t address;
    uint64_t length;
    uint64_t device;
    uint64_t registration;
} pushgate_nixl_element;

/* Takes bytes that a call returns; `to` is the caller's. Called any number of times before the call returns. */
typedef void (*pushgate_nixl_take)(void *to, pushgate_nixl_bytes bytes);
/* Takes one notification: who sent it, and the message. */
typedef void (*pushgate_nixl_take_notification)(void *to, pushgate_nixl_bytes from, pushgate_nixl_bytes message);

/* The version of pushgate, for nixl's get_plugin_version. */
const char *pushgate_nixl_version(void);
/* The kinds of memory that this host serves, a bit for each value of nixl_mem_t: bit 0 host memory, bit 1 GPU memory. */
uint32_t pushgate_nixl_memories(void);
/* Each parameter of the backend with its default. */
void pushgate_nixl_parameters(void *to, void (*take)(void *to, pushgate_nixl_bytes key, pushgate_nixl_bytes value));

/* Makes an agent. NULL: it can't be made, and the log says why. */
pushgate_nixl_agent *pushgate_nixl_open(pushgate_nixl_bytes name, const pushgate_nixl_parameter *parameters, size_t count);
/* Ends the agent: its transfers are cancelled, its peers are told. */
void pushgate_nixl_close(pushgate_nixl_agent *agent);

/* Registers memory of this process: `memory` is a value of nixl_mem_t. */
int pushgate_nixl_register(pushgate_nixl_agent *agent, uint64_t address, uint64_t length, uint64_t device, int memory,
                           uint64_t *registration);
/* Ends a registration. After success nobody touches the memory. */
int pushgate_nixl_deregister(pushgate_nixl_agent *agent, uint64_t registration);
/* What another agent needs to know of a registration. */
int pushgate_nixl_public(pushgate_nixl_agent *agent, uint64_t registration, void *to, pushgate_nixl_take take);

/* How other agents reach this one. */
int pushgate_nixl_connection(pushgate_nixl_agent *agent, void *to, pushgate_nixl_take take);
/* Notes how an agent is reached. A second call for the same agent replaces the first. */
int pushgate_nixl_load_connection(pushgate_nixl_agent *agent, pushgate_nixl_bytes peer, pushgate_nixl_bytes connection);
/* Begins to connect; later calls do so by themselves. */
int pushgate_nixl_connect(pushgate_nixl_agent *agent, pushgate_nixl_bytes peer);
/* Ends the connection with an agent and forgets how it is reached. */
int pushgate_nixl_disconnect(pushgate_nixl_agent *agent, pushgate_nixl_bytes peer);

/* Reads what an agent published of a registration. */
int pushgate_nixl_load(pushgate_nixl_agent *agent, pushgate_nixl_bytes peer, pushgate_nixl_bytes published, int memory,
                       uint64_t *registration);
/* Forgets what pushgate_nixl_load read. */
int pushgate_nixl_unload(pushgate_nixl_agent *agent, uint64_t registration);

/* Prepares a transfer between `count` elements here and as many of `peer`, in the same order and of the same lengths.
 * `write`: from here to the peer; else from the peer to here. `peer` may be the agent itself. */
int pushgate_nixl_prepare(pushgate_nixl_agent *agent, int write, pushgate_nixl_bytes peer, int local_memory,
                          const pushgate_nixl_element *local, int remote_memory, const pushgate_nixl_element *remote,
                          size_t count, pushgate_nixl_transfer **transfer);
/* Starts a prepared transfer; again once it has ended. `notification` may be NULL: none. */
int pushgate_nixl_post(pushgate_nixl_agent *agent, pushgate_nixl_transfer *transfer, const pushgate_nixl_bytes *notification);
int pushgate_nixl_check(pushgate_nixl_agent *agent, pushgate_nixl_transfer *transfer);
/* Cancels a transfer that is under way, and frees it. After success nothing of it touches memory of this process; after an error the
 * transfer is there still, to be released again. */
int pushgate_nixl_release(pushgate_nixl_agent *agent, pushgate_nixl_transfer *transfer);

/* Hands over the notifications that have come, each once. */
int pushgate_nixl_notifications(pushgate_nixl_agent *agent, void *to, pushgate_nixl_take_notification take);
/* Sends a notification that belongs to no transfer. */
int pushgate_nixl_notify(pushgate_nixl_agent *agent, pushgate_nixl_bytes peer, pushgate_nixl_bytes message);

/* The table of the plugin, laid out as nixl expects (plugin.cpp); Rust exports nixl_plugin_init, which returns it. */
void *pushgate_nixl_table(void);

#ifdef __cplusplus
}
#endif
#endif
