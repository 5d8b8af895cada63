/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The C API of pushgate: GPU-initiated networking that pushes. Link with -lpushgate (pkg-config --cflags --libs pushgate);
 * docs/c-api.md of the project is the page, and each call has a manual page of section 3.
 *
 * Each call that can fail returns PUSHGATE_E_OK or another PUSHGATE_E_ number. pushgate_strerror() says what the number means, and
 * pushgate_last_message() in the same thread what exactly was wrong and what to do. No call ends the process or throws.
 *
 * Handles: a call that makes something stores a handle, and the call of the same name with `close` gives it back. What was made with
 * a handle is closed before that handle; the other order returns PUSHGATE_E_BUSY and closes nothing. A handle is no address: a wrong
 * one, one of another kind, and one that was closed return PUSHGATE_E_HANDLE and do no harm. Any thread may use any handle.
 *
 * Pointers: a pointer that is not NULL points to memory that can be read, or written to, as far as the call says; a text is UTF-8 and
 * ends with NUL. The library keeps no pointer beyond the call, except those of pushgate_memory_use_host and
 * pushgate_memory_use_device.
 *
 * Made from c-api/src by `cargo xtask bindings`; do not edit.
 */

#ifndef PUSHGATE_PUSHGATE_H
#define PUSHGATE_PUSHGATE_H

#include <stddef.h>
#include <stdint.h>

/**
 * The call has done what it should.
 */
#define PUSHGATE_E_OK 0

/**
 * A setting or argument of the library that is not allowed.
 */
#define PUSHGATE_E_CONFIG 1

/**
 * A name that no setting has.
 */
#define PUSHGATE_E_UNKNOWN_SETTING 2

/**
 * The settings file is no TOML.
 */
#define PUSHGATE_E_SETTINGS_FILE 3

/**
 * A rank is gone: its process or its proxy ended, or its host can't be reached.
 */
#define PUSHGATE_E_PEER_LOST 4

/**
 * Something that a rank asked for was refused, as a put that leaves its region.
 */
#define PUSHGATE_E_REFUSED 5

/**
 * A wait took longer than its limit.
 */
#define PUSHGATE_E_TIMED_OUT 6

/**
 * The communicator or the queue pair was aborted.
 */
#define PUSHGATE_E_ABORTED 7

/**
 * A WQE slot was reserved and never published.
 */
#define PUSHGATE_E_STUCK 8

/**
 * A message arrived for which there was no room: a fault of the sender's proxy.
 */
#define PUSHGATE_E_OVERRUN 9

/**
 * The transport to a rank failed under a queue pair.
 */
#define PUSHGATE_E_LINK_DOWN 10

/**
 * A handle of the process that this one was forked from.
 */
#define PUSHGATE_E_FORKED 11

/**
 * The GPU, its driver or a compiler said no.
 */
#define PUSHGATE_E_DEVICE 12

/**
 * Memory, sockets or files: the system said no.
 */
#define PUSHGATE_E_IO 13

/**
 * Shared memory could not be made, or is not what a peer said.
 */
#define PUSHGATE_E_MEMORY 14

/**
 * The proxy's engine has ended, or refused.
 */
#define PUSHGATE_E_PROXY 15

/**
 * The engine can't take the queue pair.
 */
#define PUSHGATE_E_QUEUE_PAIR 16

/**
 * An RDMA device, or what it was asked for.
 */
#define PUSHGATE_E_RDMA 17

/**
 * A queue pair over TCP.
 */
#define PUSHGATE_E_TCP 18

/**
 * The kernel module gave no window.
 */
#define PUSHGATE_E_WINDOW 19

/**
 * Two ends that do not fit together.
 */
#define PUSHGATE_E_MISMATCH 20

/**
 * The program has ended the call while it waited, by pushgate_interrupt_by.
 */
#define PUSHGATE_E_INTERRUPTED 21

/**
 * An argument of this interface is wrong: NULL, misaligned, no UTF-8, of a wrong size, or an unknown flag.
 */
#define PUSHGATE_E_ARGUMENT 64

/**
 * NULL, a handle of another kind, a closed one, or no handle at all.
 */
#define PUSHGATE_E_HANDLE 65

/**
 * The handle is in use, by an open handle that was made with it or by a call of another thread; it stays open.
 */
#define PUSHGATE_E_BUSY 66

/**
 * There is nothing yet, or no credit; nothing was taken.
 */
#define PUSHGATE_E_AGAIN 67

/**
 * A fault of the library itself. What the call was about may be unusable; other handles are not.
 */
#define PUSHGATE_E_INTERNAL 68

/**
 * Something failed, and the library goes on without.
 */
#define PUSHGATE_LOG_ERROR 1

/**
 * Something that a person should look at.
 */
#define PUSHGATE_LOG_WARN 2

/**
 * What was chosen, and why.
 */
#define PUSHGATE_LOG_INFO 3

/**
 * What helps to find a fault.
 */
#define PUSHGATE_LOG_DEBUG 4

/**
 * Everything.
 */
#define PUSHGATE_LOG_TRACE 5

/**
 * The interface that this header describes: its major number above bit 16, its minor number below. Programs that were built
 * for a minor number run with every later one of the same major number; as long as the major number is 0, a new minor number
 * is a new interface, with a new name of the library.
 */
#define PUSHGATE_INTERFACE 2

/**
 * Take only what `settings` says, and defaults: neither the settings file nor the environment.
 */
#define PUSHGATE_CONTEXT_DEFAULTS_ONLY 1

/**
 * Choose the GPU and the core of the proxy's thread by this process's number among the ranks of its host, as the launcher
 * tells it.
 */
#define PUSHGATE_CONTEXT_FOR_RANK 2

/**
 * The context's kernels run on the CPU.
 */
#define PUSHGATE_DEVICE_CPU 1

/**
 * The context's kernels run on a GPU.
 */
#define PUSHGATE_DEVICE_CUDA 2

/**
 * Queue pairs to that rank go through shared memory of this host.
 */
#define PUSHGATE_TRANSPORT_LOCAL 1

/**
 * Queue pairs to that rank go over RDMA.
 */
#define PUSHGATE_TRANSPORT_VERBS 2

/**
 * Queue pairs to that rank go over TCP.
 */
#define PUSHGATE_TRANSPORT_TCP 3

/**
 * Messages land in buffers that the receiver's kernel posts.
 */
#define PUSHGATE_QUEUE_PAIR_POSTED_RECEIVES 1

/**
 * Blocks of the launch wait for each other, or for a peer's kernel that waits for them: the launch is refused unless all of them
 * can run at once.
 */
#define PUSHGATE_LAUNCH_COOPERATING 1

/**
 * A time without a limit.
 */
#define PUSHGATE_FOREVER UINT64_MAX

/**
 * No signal follows the bytes.
 */
#define PUSHGATE_NO_SIGNAL UINT32_MAX

/**
 * One rank's view of a job. Any thread may use one; a collective (barrier, all_gather) is called by one thread of every rank at
 * once.
 */
typedef struct pushgate_comm pushgate_comm;

/**
 * A device with its engine. Any thread may use one. Everything that is made with a context works only in the process that
 * made the context: in a child of fork calls return PUSHGATE_E_FORKED.
 */
typedef struct pushgate_context pushgate_context;

/**
 * An end of a queue pair for a thread of the host, which posts, receives and waits as kernels do. No kernel may use that end. One
 * thread at a time uses it: a call finds PUSHGATE_E_BUSY while another thread's call is under way.
 */
typedef struct pushgate_host_end pushgate_host_end;

/**
 * A kernel that was launched. Any thread may use one.
 */
typedef struct pushgate_kernel pushgate_kernel;

/**
 * Memory that the device of a context accesses. Any thread may use one.
 */
typedef struct pushgate_memory pushgate_memory;

/**
 * Kernels that were loaded from a source or an image. Any thread may use one.
 */
typedef struct pushgate_module pushgate_module;

/**
 * A reliable, ordered connection between two ranks' devices. Any thread may use one.
 */
typedef struct pushgate_queue_pair pushgate_queue_pair;

/**
 * Memory that is registered with a queue pair: the peer's kernels may put into it, and work requests of this end may name it.
 * Any thread may use one.
 */
typedef struct pushgate_region pushgate_region;

/**
 * A queue of launches: those of one stream run one after the other, those of different streams side by side. Any thread may use
 * one.
 */
typedef struct pushgate_stream pushgate_stream;

/**
 * Takes a line of the log, without an end of line. `level` is a PUSHGATE_LOG_ number; `line` is valid for the call alone.
 *
 * Any thread of the library calls it, several at once. It returns soon, throws nothing, and calls nothing of the library.
 */
typedef void (*pushgate_log_write)(void *argument, uint32_t level, const char *line);

/**
 * Says whether the call of this thread is to end: 0, or another number for yes. It returns soon, throws nothing, calls nothing of
 * the library, and waits for no thread that is in a call of the library. One call may ask several times: once the answer was yes, it
 * is yes until the call has returned.
 */
typedef int (*pushgate_interrupt)(void *argument);

/**
 * A setting by its name, as docs/operations.md lists them: `qp`, `window-size` or `window_size`.
 */
typedef struct pushgate_setting {
        /**
         * The name.
         */
        const char *name;
        /**
         * The value, as text.
         */
        const char *value;
} pushgate_setting;

/**
 * Options of a context. Members that are 0 mean the default.
 */
typedef struct pushgate_context_options {
        /**
         * sizeof(struct pushgate_context_options).
         */
        size_t size;
        /**
         * `settings_count` settings, which win over variables and the settings file. Of two with one name the last one counts.
         */
        const struct pushgate_setting *settings;
        /**
         * How many.
         */
        size_t settings_count;
        /**
         * PUSHGATE_CONTEXT_*.
         */
        uint32_t flags;
        /**
         * The GPU, from 0. Has no effect on the CPU, nor with PUSHGATE_CONTEXT_FOR_RANK.
         */
        uint32_t device_index;
} pushgate_context_options;

/**
 * A count of the engine, by its name.
 */
typedef struct pushgate_counter {
        /**
         * Valid for ever.
         */
        const char *name;
        /**
         * Counts only grow.
         */
        uint64_t value;
} pushgate_counter;

/**
 * Names a job and where its ranks meet. Rank 0's process makes it, and the program hands it to the other ranks. It is a
 * password: who has it can be a rank. It serves for one communicator.
 */
typedef struct pushgate_unique_id {
        /**
         * What travels.
         */
        uint8_t bytes[128];
} pushgate_unique_id;

/**
 * Exchanges bytes between all ranks by a way of the program's own, as MPI_Allgather does. A collective, in which all ranks give
 * equally many bytes.
 *
 * `bytes` holds this rank's `length` bytes, `all` has room for `length` bytes of each rank, in the order of ranks, and `user` is
 * what the program gave. Returns 0, or another number if the exchange failed; it should fail when a rank does not come. It must
 * return, and not by an exception or longjmp.
 */
typedef int (*pushgate_all_gather)(const void *bytes, size_t length, void *all, void *user);

/**
 * Sizes of a queue pair. Members that are 0 mean the setting of that name.
 */
typedef struct pushgate_queue_pair_options {
        /**
         * sizeof(struct pushgate_queue_pair_options).
         */
        size_t size;
        /**
         * Payload ring in bytes: a power of two, 64 to 512 Mi.
         */
        uint64_t window_size;
        /**
         * WQE slots: a power of two, 2 to 65536.
         */
        uint64_t slots;
        /**
         * Receives: a power of two, 2 to 65536.
         */
        uint64_t receives;
        /**
         * PUSHGATE_QUEUE_PAIR_*.
         */
        uint32_t flags;
        /**
         * 0.
         */
        uint32_t reserved;
} pushgate_queue_pair_options;

/**
 * The shape of a launch.
 */
typedef struct pushgate_launch_options {
        /**
         * sizeof(struct pushgate_launch_options).
         */
        size_t size;
        /**
         * Blocks, 1 or more.
         */
        uint32_t grid;
        /**
         * Threads of each block, 1 to 1024.
         */
        uint32_t block;
        /**
         * Dynamic shared memory of each block in bytes.
         */
        uint32_t shared_bytes;
        /**
         * PUSHGATE_LAUNCH_*.
         */
        uint32_t flags;
} pushgate_launch_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * What a number that a call returned means, in a few words. Never NULL; the text is valid for ever.
 */
const char *pushgate_strerror(int code);

/**
 * The sentence of the last call of this thread that failed: it names the thing, the value and the remedy. Empty if none has
 * failed. Never NULL; valid until the next call of this thread that fails, and until the thread ends.
 */
const char *pushgate_last_message(void);

/**
 * Shows the library's log from now on, which is silent without this call. A process calls it once; PUSHGATE_E_BUSY later, and where
 * the program has a log of Rust's crate tracing already.
 *
 * @param filter    Levels (error, warn, info, debug, trace, off), each alone or behind CRATE=, with commas between. NULL: what the
 *                  variable PUSHGATE_LOG says, else warn.
 * @param write     Takes the lines. NULL: they go to stderr.
 * @param argument  Goes to `write`; it is valid, for every thread, to the process's end.
 */
int pushgate_log_start(const char *filter,
                       pushgate_log_write write,
                       void *argument);

/**
 * Has each call of this thread that waits ask `ask` about ten times a second; a yes ends the call with PUSHGATE_E_INTERRUPTED. For
 * programs in whose language a signal ends no call.
 *
 * The handles of an interrupted call stay open. A call for one message has then sent and taken nothing; after a call in which ranks
 * meet, the ranks may not agree any more: close the communicator.
 *
 * The closes of a queue pair, a communicator and a context close the handle all the same: they wait for no peer any more, and
 * pushgate_last_message() says what the peers have not got. A region and a kernel stay open, for their memory is still in use.
 *
 * What the library waits for in other libraries, ends by itself alone: the driver of a GPU, and the system's look-up of a host's name.
 *
 * @param ask       NULL: calls of this thread ask nothing, as before.
 * @param argument  Goes to `ask`; it is valid until the thread ends or sets another function.
 */
int pushgate_interrupt_by(pushgate_interrupt ask,
                          void *argument);

/**
 * The release of the library, as in `0.1.0 (commit 0123456789ab)`. Never NULL; the text is valid for ever.
 */
const char *pushgate_version(void);

/**
 * The PUSHGATE_INTERFACE of the library that the program runs with.
 */
uint32_t pushgate_interface(void);

/**
 * Opens the device and starts the engine, or joins the proxy's process.
 *
 * The call reads the environment: no other thread changes it meanwhile, as by setenv.
 *
 * @param options  NULL: the settings of the settings file and of the environment.
 * @param context  The result; NULL after an error.
 */
int pushgate_context_create(const struct pushgate_context_options *options,
                            struct pushgate_context **context);

/**
 * Closes a context that nothing uses any more. NULL is no error.
 */
int pushgate_context_close(struct pushgate_context *context);

/**
 * The kind of device: PUSHGATE_DEVICE_CPU or PUSHGATE_DEVICE_CUDA.
 */
int pushgate_context_device(const struct pushgate_context *context, uint32_t *device);

/**
 * Says which device it is and why it was chosen.
 *
 * @param buffer  Gets the text, cut to `size` - 1 bytes, and a NUL. May be NULL with a size of 0.
 * @param needed  Gets the whole text's length with its NUL. May be NULL.
 */
int pushgate_context_describe(const struct pushgate_context *context,
                              char *buffer,
                              size_t size,
                              size_t *needed);

/**
 * The value of a setting of a context, as text that a `pushgate_setting` takes. The text is put as by
 * pushgate_context_describe.
 */
int pushgate_context_setting(const struct pushgate_context *context,
                             const char *name,
                             char *buffer,
                             size_t size,
                             size_t *needed);

/**
 * Makes a pass over the queue pairs, where this program drives the engine (`drive = caller`); else nothing is to be done. Call
 * it in each loop that waits for something of a queue pair.
 *
 * @param busy  Gets 1 if there was something to do, else 0. May be NULL.
 */
int pushgate_context_drive(const struct pushgate_context *context,
                           uint32_t *busy);

/**
 * Counts of the context's engine, all of one moment, in an order that is always the same within a process. docs/operations.md
 * says what each counts.
 *
 * @param counters  Gets the first `capacity` counts. May be NULL with a capacity of 0.
 * @param count     Gets how many there are. May be NULL.
 */
int pushgate_context_counters(const struct pushgate_context *context,
                              struct pushgate_counter *counters,
                              size_t capacity,
                              size_t *count);

/**
 * Makes an id, and opens the socket at which rank 0 meets the others. Call this in rank 0's process; it then joins by
 * pushgate_comm_connect_id, as every other rank does.
 */
int pushgate_unique_id_create(const struct pushgate_context *context,
                              struct pushgate_unique_id *id);

/**
 * Joins the communicator of `job` as rank `rank` of `ranks`. The other ranks are processes that were given the same job, and
 * with the setting `rendezvous` they may run on any host. Waits for all of them.
 */
int pushgate_comm_connect(const struct pushgate_context *context,
                          const char *job,
                          uint32_t rank,
                          uint32_t ranks,
                          struct pushgate_comm **comm);

/**
 * Joins the job that a launcher started this process for: `pushgate run`, torchrun, mpirun, srun, or the variables
 * PUSHGATE_RANK and PUSHGATE_RANKS. Waits for all ranks. No other thread changes the environment meanwhile.
 */
int pushgate_comm_from_environment(const struct pushgate_context *context,
                                   struct pushgate_comm **comm);

/**
 * Joins the communicator of an id as rank `rank` of `ranks`. Waits for all ranks.
 */
int pushgate_comm_connect_id(const struct pushgate_context *context,
                             const struct pushgate_unique_id *id,
                             uint32_t rank,
                             uint32_t ranks,
                             struct pushgate_comm **comm);

/**
 * Joins a communicator of `ranks` ranks, which exchange what they need by a function of the program: rank 0 makes a unique id,
 * one call of `all_gather` in each rank hands it to the others, and all join with it. Waits for all ranks.
 */
int pushgate_comm_bootstrap(const struct pushgate_context *context,
                            uint32_t rank,
                            uint32_t ranks,
                            pushgate_all_gather all_gather,
                            void *user,
                            struct pushgate_comm **comm);

/**
 * Makes a communicator of `ranks` ranks inside this process, all on one context: for tests, and for programs whose ranks are
 * threads.
 *
 * @param comms  `ranks` places. Each gets the communicator of one rank; after an error they are unchanged.
 */
int pushgate_comm_local(const struct pushgate_context *context,
                        uint32_t ranks,
                        struct pushgate_comm **comms);

/**
 * Closes a communicator without open queue pairs. The other ranks see that this rank left. NULL is no error.
 */
int pushgate_comm_close(struct pushgate_comm *comm);

/**
 * This rank's number, from 0, and the number of ranks. Either place may be NULL.
 */
int pushgate_comm_rank(const struct pushgate_comm *comm, uint32_t *rank, uint32_t *ranks);

/**
 * The transport of queue pairs with a rank: PUSHGATE_TRANSPORT_*.
 */
int pushgate_comm_transport(const struct pushgate_comm *comm, uint32_t peer, uint32_t *transport);

/**
 * Exchanges bytes between all ranks, as the keys of regions. A collective: every rank gives as many bytes.
 *
 * After PUSHGATE_E_TIMED_OUT the call may be repeated with the same bytes, and goes on where it stopped.
 *
 * @param bytes  This rank's `size` bytes.
 * @param all    Gets every rank's bytes in the order of ranks.
 * @param room   The size of `all`: `size` times the number of ranks.
 */
int pushgate_comm_all_gather(const struct pushgate_comm *comm,
                             const void *bytes,
                             size_t size,
                             void *all,
                             size_t room);

/**
 * Waits until every rank has called pushgate_comm_barrier. A collective; after PUSHGATE_E_TIMED_OUT it may be called again.
 */
int pushgate_comm_barrier(const struct pushgate_comm *comm);

/**
 * Returns PUSHGATE_E_PEER_LOST once a rank has been lost.
 */
int pushgate_comm_check(const struct pushgate_comm *comm);

/**
 * Ends all queue pairs of this rank with PUSHGATE_E_ABORTED, here and at their peers: for a rank that gives up, so that the others
 * need not wait until their timeouts.
 */
int pushgate_comm_abort(const struct pushgate_comm *comm);

/**
 * Makes a queue pair with `peer`, which makes the same call with the same label and its own sizes. Returns when both ends know
 * each other.
 *
 * Two ranks that share several queue pairs give each a label of its own. After an error either rank may call again.
 *
 * @param label    Below 2^24.
 * @param options  NULL: the sizes that the settings say.
 * @param qp       The result; NULL after an error.
 */
int pushgate_queue_pair_create(const struct pushgate_comm *comm,
                               uint32_t peer,
                               uint32_t label,
                               const struct pushgate_queue_pair_options *options,
                               struct pushgate_queue_pair **qp);

/**
 * Closes a queue pair without open regions, which kernels use no more. The peer's end ends too. NULL is no error.
 */
int pushgate_queue_pair_close(struct pushgate_queue_pair *qp);

/**
 * The address of a queue pair's `struct pushgate_qp` in the device's memory, for a kernel's parameters: `queue_pair
 * qp(*reinterpret_cast<const pushgate_qp *>(address))`. Valid until the queue pair is closed.
 */
int pushgate_queue_pair_device_address(const struct pushgate_queue_pair *qp,
                                       uint64_t *address);

/**
 * The largest message in bytes.
 */
int pushgate_queue_pair_max_message(const struct pushgate_queue_pair *qp, uint64_t *size);

/**
 * Returns the cause if the queue pair has ended, as PUSHGATE_E_PEER_LOST; pushgate_last_message() says more.
 */
int pushgate_queue_pair_check(const struct pushgate_queue_pair *qp);

/**
 * Ends the queue pair: waits end with PUSHGATE_E_ABORTED, here and at the peer.
 */
int pushgate_queue_pair_abort(const struct pushgate_queue_pair *qp);

/**
 * What a status that a kernel saw means, in words: `enum class status` of device.cuh, as a number. Never NULL; the text is
 * valid for ever.
 */
const char *pushgate_status_name(uint64_t status);

/**
 * Allocates zeroed host memory that kernels access too. Works with every proxy, and peers on this host read it without a copy.
 */
int pushgate_memory_alloc_host(const struct pushgate_context *context,
                               size_t size,
                               struct pushgate_memory **memory);

/**
 * Allocates zeroed memory of the device, aligned to 256 bytes.
 */
int pushgate_memory_alloc_device(const struct pushgate_context *context,
                                 size_t size,
                                 struct pushgate_memory **memory);

/**
 * Makes host memory of the program's own accessible to kernels, and to peers by a region. The program keeps it mapped until this
 * handle is closed. Regions in it need `proxy = thread`.
 */
int pushgate_memory_use_host(const struct pushgate_context *context,
                             void *pointer,
                             size_t size,
                             struct pushgate_memory **memory);

/**
 * Names memory of the device that another library allocated, as by cudaMalloc, so that a region can be made of it. The program
 * keeps it allocated until this handle is closed. Regions in it need `proxy = thread`.
 */
int pushgate_memory_use_device(const struct pushgate_context *context,
                               uint64_t address,
                               size_t size,
                               struct pushgate_memory **memory);

/**
 * Closes memory that no region, kernel or peer uses any more; what the library allocated is freed. NULL is no error.
 */
int pushgate_memory_close(struct pushgate_memory *memory);

/**
 * Where memory lies. Each place may be NULL.
 *
 * @param address  Gets the address for kernels.
 * @param pointer  Gets the address for the host; NULL for memory of the device.
 * @param size     Gets the size in bytes.
 */
int pushgate_memory_address(const struct pushgate_memory *memory,
                            uint64_t *address,
                            void **pointer,
                            size_t *size);

/**
 * Copies from the program to memory of pushgate_memory_alloc_device. Complete on return.
 */
int pushgate_memory_write(const struct pushgate_memory *memory, size_t offset, const void *from, size_t size);

/**
 * Copies from memory of pushgate_memory_alloc_device to the program. Complete on return.
 */
int pushgate_memory_read(const struct pushgate_memory *memory, size_t offset, void *to, size_t size);

/**
 * Registers all of a memory with a queue pair.
 */
int pushgate_region_create(const struct pushgate_queue_pair *qp,
                           const struct pushgate_memory *memory,
                           struct pushgate_region **region);

/**
 * The region's key: lkey and rkey in one. The peer needs it to put into the region; pushgate_comm_all_gather brings it there.
 */
int pushgate_region_key(const struct pushgate_region *region,
                        uint32_t *key);

/**
 * Deregisters a region and closes it, once nothing under way uses it. NULL is no error.
 *
 * Returns PUSHGATE_E_BUSY if messages out of the region, or copies into it, did not end within 2 s: it stays open then, and its
 * memory must stay.
 */
int pushgate_region_close(struct pushgate_region *region);

/**
 * Loads kernels from a `.cu` file that includes "pushgate/device.cuh". Files that it includes with quotes are found beside it.
 *
 * The file is compiled for the context's device: by NVRTC or nvcc for a GPU, by the C++ compiler (CXX, c++, g++, clang++) for the
 * CPU; the result is cached. Load modules before the first kernel runs that waits for another kernel.
 */
int pushgate_module_from_file(const struct pushgate_context *context,
                              const char *path,
                              struct pushgate_module **module);

/**
 * Loads kernels from a text, as pushgate_module_from_file does.
 *
 * @param name  What messages call the text, as a file's name.
 */
int pushgate_module_from_text(const struct pushgate_context *context,
                              const char *name,
                              const char *source,
                              struct pushgate_module **module);

/**
 * Loads kernels that were compiled before: a cubin, a fatbin or PTX (nvcc -cubin, -fatbin, -ptx) for a GPU, a shared library for the
 * CPU. The image is copied. An image for other devices is refused with what it is for.
 *
 * The source includes "pushgate/device.cuh" of this release. Load modules before the first kernel runs that waits for another
 * kernel.
 *
 * @param name   What messages call the image, as a file's name.
 * @param image  Its bytes.
 * @param size   How many they are.
 */
int pushgate_module_from_image(const struct pushgate_context *context,
                               const char *name,
                               const void *image,
                               size_t size,
                               struct pushgate_module **module);

/**
 * Loads kernels of a file that was compiled before, as pushgate_module_from_image does.
 */
int pushgate_module_from_image_file(const struct pushgate_context *context,
                                    const char *path,
                                    struct pushgate_module **module);

/**
 * Closes a module none of whose kernels is open. NULL is no error.
 */
int pushgate_module_close(struct pushgate_module *module);

/**
 * How many blocks of a kernel the idle device runs at once, each of `block` threads with `shared_bytes` of dynamic shared memory.
 */
int pushgate_module_resident_blocks(const struct pushgate_module *module,
                                    const char *kernel,
                                    uint32_t block,
                                    uint32_t shared_bytes,
                                    uint32_t *blocks);

/**
 * Makes a stream.
 */
int pushgate_stream_create(const struct pushgate_context *context, struct pushgate_stream **stream);

/**
 * Closes a stream none of whose kernels is open. NULL is no error.
 */
int pushgate_stream_close(struct pushgate_stream *stream);

/**
 * Launches a kernel with one structure of parameters, which is copied, and returns at once.
 *
 * Until the kernel has ended, each address among the parameters is valid for what the kernel does with it: the memory, and the
 * queue pairs, that it names stay open.
 *
 * @param kernel   The name that the source's PUSHGATE_KERNEL gives it.
 * @param options  Its shape; NULL: one block of one thread.
 * @param params   The kernel's structure, field by field as the source has it.
 * @param size     The structure's size, which must be the kernel's.
 */
int pushgate_kernel_launch(const struct pushgate_stream *stream,
                           const struct pushgate_module *module,
                           const char *kernel,
                           const struct pushgate_launch_options *options,
                           const void *params,
                           size_t size,
                           struct pushgate_kernel **running);

/**
 * Waits for a kernel's end, and drives the engine meanwhile where this program is to (`drive = caller`). What the kernel wrote can
 * be read then.
 *
 * @param timeout_ms  Milliseconds, or PUSHGATE_FOREVER: kernels end by themselves, because each wait of the device API is bounded.
 *                    When it has passed: PUSHGATE_E_TIMED_OUT, and the kernel still runs.
 */
int pushgate_kernel_wait(const struct pushgate_kernel *kernel,
                         uint64_t timeout_ms);

/**
 * Waits for a kernel's end, then closes it. NULL is no error. If the program ends the call, the kernel runs on and stays open.
 */
int pushgate_kernel_close(struct pushgate_kernel *kernel);

/**
 * Makes the end of a queue pair for a thread of the host. A queue pair gives it once, and its engine runs in this process
 * (`proxy = thread`).
 */
int pushgate_host_end_create(const struct pushgate_queue_pair *qp,
                             struct pushgate_host_end **end);

/**
 * Closes an end of the host. What it has posted still arrives. NULL is no error.
 */
int pushgate_host_end_close(struct pushgate_host_end *end);

/**
 * Sends a message. It takes a receive of the peer; the bytes may be changed when the call returns. Returns PUSHGATE_E_AGAIN at once
 * if there is no credit.
 *
 * @param tag  Goes to the receiver.
 */
int pushgate_host_end_try_send(const struct pushgate_host_end *end,
                               const void *payload,
                               size_t size,
                               uint32_t tag);

/**
 * Sends a message as pushgate_host_end_try_send does, and waits for credit, for the setting `timeout` at most.
 *
 * A send that has returned is posted, and the peer may not have it: pushgate_host_end_flush waits for that. If the message ends the
 * queue pair, the calls after it fail, and pushgate_last_message() says why.
 */
int pushgate_host_end_send(const struct pushgate_host_end *end,
                           const void *payload,
                           size_t size,
                           uint32_t tag);

/**
 * Puts bytes into a region of the peer. The bytes may be changed when the call returns. Returns PUSHGATE_E_AGAIN at once if there is
 * no credit. A key that names no region, and bytes that leave theirs, end the queue pair.
 *
 * @param rkey    The key of the peer's region.
 * @param offset  Bytes from the region's start, less than 2^56.
 * @param signal  The peer's signal that gets `value` once the bytes are there, or PUSHGATE_NO_SIGNAL.
 * @param value   Less than 2^56. A signal only grows.
 */
int pushgate_host_end_try_put(const struct pushgate_host_end *end,
                              uint32_t rkey,
                              uint64_t offset,
                              const void *payload,
                              size_t size,
                              uint32_t signal,
                              uint64_t value);

/**
 * Puts bytes as pushgate_host_end_try_put does, and waits for credit, for the setting `timeout` at most.
 */
int pushgate_host_end_put(const struct pushgate_host_end *end,
                          uint32_t rkey,
                          uint64_t offset,
                          const void *payload,
                          size_t size,
                          uint32_t signal,
                          uint64_t value);

/**
 * Sets a signal of the peer, which comes after all that was posted before, and waits for credit, for the setting `timeout` at most. A
 * signal only grows: a smaller value changes nothing.
 *
 * @param value  Less than 2^56.
 */
int pushgate_host_end_signal(const struct pushgate_host_end *end,
                             uint32_t index,
                             uint64_t value);

/**
 * The value of a signal of this end. What the peer posted before the signal is there.
 */
int pushgate_host_end_signal_value(const struct pushgate_host_end *end, uint32_t index, uint64_t *value);

/**
 * Waits until a signal of this end is at least `value`, for the setting `timeout` at most.
 */
int pushgate_host_end_wait_signal(const struct pushgate_host_end *end, uint32_t index, uint64_t value);

/**
 * Waits until the peer has all that was posted, for the setting `timeout` at most.
 */
int pushgate_host_end_flush(const struct pushgate_host_end *end);

/**
 * Takes the next message, and waits for it, for the setting `timeout` at most. A message that is longer than `room` stays the next
 * one, and the call returns PUSHGATE_E_CONFIG.
 *
 * @param buffer  Gets the message. Its other bytes may be zeroed.
 * @param length  Gets the message's length. May be NULL.
 * @param tag     Gets the tag that the sender gave. May be NULL.
 */
int pushgate_host_end_recv(const struct pushgate_host_end *end,
                           void *buffer,
                           size_t room,
                           size_t *length,
                           uint32_t *tag);

/**
 * Takes the next message as pushgate_host_end_recv does. Returns PUSHGATE_E_AGAIN at once if there is none.
 */
int pushgate_host_end_try_recv(const struct pushgate_host_end *end,
                               void *buffer,
                               size_t room,
                               size_t *length,
                               uint32_t *tag);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PUSHGATE_PUSHGATE_H */
