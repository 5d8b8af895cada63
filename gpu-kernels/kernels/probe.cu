// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The measurements of `pushgate probe`: copies between any two memories that this device reaches,
// and records that go back and forth. The kernel keeps running and times itself with the device's
// own clock, so that no launch is in the figure; or the host starts one message after the other, as
// it does with a kernel that stays.
#include "pushgate/arch.cuh"

using namespace pushgate;

// kernels: probe_copy probe_ping

// Distance in words between two words that different blocks write, so that they share no cache
// line.
static constexpr u64 apart = 16;

struct probe_copy_params {
	u64 dst;
	u64 src;
	u64 bytes;	// of a message, a multiple of 16, cut among the blocks
	u64 stride;	// bytes between the `places` places to which messages go in turn
	u64 places;
	u64 chunk;	// bytes of a block's slice between two flags
	u64 wait_flags; // host, a word for each block: how many chunks are there to be copied; 0: all
	u64 set_flags;	// how many chunks this side has copied, a word for each block; 0: no side waits for it
	u64 go;		// host: the number of the last message that may begin; 0: all, and timed
	u64 done;	// host: the last message that is complete; 0: not reported
	u64 meeting;	// device, zeroed: a word for each block, and one for `go` handed on
	u64 result;	// device: status (0, or 1: a wait timed out), then nanoseconds of each batch
	u64 batches;	// how many batches are timed
	u64 repeat;	// messages in each batch
	u64 limit_ns;	// for the whole kernel
	u32 width;	// bytes of a thread's access: 4, 8, 16; 0: bulk stores by the copy unit of the SM (sm_90)
	u32 system;	// the destination is not this device's memory
};

// ------------------------------------------------------------------- copying

static PUSHGATE_DEVICE u64x2 get(const u64x2 *p) { return load_payload(p); }
static PUSHGATE_DEVICE void put(u64x2 *p, u64x2 v) { store_payload(p, v); }
template <class T> static PUSHGATE_DEVICE T get(const T *p) { return *reinterpret_cast<const volatile T *>(p); }
// Volatile: the compiler neither leaves the store out nor joins it to a wider one.
template <class T> static PUSHGATE_DEVICE void put(T *p, T v) { *reinterpret_cast<volatile T *>(p) = v; }

// Copies with eight loads in flight before the first store, also at the end, where a thread has
// fewer left: one after the other, the loads would cost as many round trips over the bus.
template <class T> static PUSHGATE_DEVICE void copy_as(u64 dst, u64 src, u64 bytes)
{
	T *d = reinterpret_cast<T *>(dst);
	const T *s = reinterpret_cast<const T *>(src);
	u64 n = bytes / sizeof(T), step = block_size();
#if PUSHGATE_GPU
	for (u64 i = thread_index(); i < n; i += 8 * step) {
		T v[8];
#pragma unroll
		for (u32 k = 0; k < 8; k++)
			if (i + k * step < n)
				v[k] = get(s + i + k * step);
#pragma unroll
		for (u32 k = 0; k < 8; k++)
			if (i + k * step < n)
				put(d + i + k * step, v[k]);
	}
#else
	for (u64 i = thread_index(); i < n; i += step)
		put(d + i, get(s + i));
#endif
}

#if PUSHGATE_GPU && __CUDA_ARCH__ >= 900
static constexpr u64 bulk_bytes = 16384;

// Copies through two buffers of shared memory in turn: while one is stored from, the other is
// filled.
static PUSHGATE_DEVICE void copy_bulk(u64 dst, u64 src, u64 bytes)
{
	u64 turn = 0;
	for (u64 at = 0; at < bytes; at += bulk_bytes, turn ^= 1) {
		u64 n = bytes - at < bulk_bytes ? bytes - at : bulk_bytes;
		u64x2 *buffer = static_cast<u64x2 *>(shared_memory()) + turn * (bulk_bytes / 16);
		// Wait until the store before last has read this buffer.
		if (thread_index() == 0)
			asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
		block_barrier();
		for (u64 i = thread_index(); i < n / 16; i += block_size())
			buffer[i] = load_payload(reinterpret_cast<const u64x2 *>(src + at) + i);
		// Makes what ordinary stores wrote there visible to the copy unit that reads it.
		asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
		block_barrier();
		if (thread_index() == 0) {
			u32 from = (u32)__cvta_generic_to_shared(buffer);
			asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst + at), "r"(from),
				     "r"((u32)n)
				     : "memory");
			asm volatile("cp.async.bulk.commit_group;" ::: "memory");
		}
	}
	if (thread_index() == 0) {
		asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
		asm volatile("fence.proxy.async;" ::: "memory");
	}
}
#endif

static PUSHGATE_DEVICE void copy(const probe_copy_params &p, u64 dst, u64 src, u64 bytes)
{
	if (p.width == 16)
		copy_as<u64x2>(dst, src, bytes);
	else if (p.width == 8)
		copy_as<u64>(dst, src, bytes);
	else if (p.width == 4)
		copy_as<u32>(dst, src, bytes);
#if PUSHGATE_GPU && __CUDA_ARCH__ >= 900
	else
		copy_bulk(dst, src, bytes);
#endif
}

// ------------------------------------------------------------------- waiting

// Waits for a word at system scope. P7: false once the time is up.
static PUSHGATE_DEVICE bool wait_system(const u64 *word, u64 least, u64 until)
{
	backoff pause;
	for (u32 n = 1; load<order::acquire>(word) < least; n++) {
		if (n % 64 == 0 && clock_ns() > until)
			return false;
		pause.wait();
	}
	return true;
}
static PUSHGATE_DEVICE bool wait_device(const u64 *word, u64 least, u64 until)
{
	backoff pause;
	for (u32 n = 1; load_device<order::acquire>(word) < least; n++) {
		if (n % 64 == 0 && clock_ns() > until)
			return false;
		pause.wait();
	}
	return true;
}

// Waits until all blocks have copied and their stores have reached their destination. The release
// at system scope waits for that, also for the stores of the block's other threads, which the
// barrier orders before it.
static PUSHGATE_DEVICE bool meet(const probe_copy_params &p, u64 number, u64 until)
{
	u64 *words = reinterpret_cast<u64 *>(p.meeting);
	block_barrier();
	if (thread_index() == 0) {
		if (p.system)
			store<order::release>(words + block_index() * apart, number);
		else
			store_device<order::release>(words + block_index() * apart, number);
	}
	if (grid_size() == 1)
		return true;
	bool late = false;
	for (u32 i = thread_index(); i < grid_size(); i += block_size())
		late |= !wait_device(words + i * apart, number, until);
	return !block_any(late);
}

// The block's slice of message `number`, in whole cache lines, so that no two blocks store into the
// same line.
struct slice {
	u64 dst, src, bytes;
};
static PUSHGATE_DEVICE slice slice_of(const probe_copy_params &p, u64 number)
{
	u64 each = ((p.bytes + grid_size() - 1) / grid_size() + 127) & ~127ull;
	u64 from = block_index() * each;
	u64 n = from >= p.bytes ? 0 : p.bytes - from < each ? p.bytes - from : each;
	u64 place = number % p.places * p.stride;
	return {p.dst + place + from, p.src + place + from, n};
}

// Copies one message after the other; each is complete before the next begins.
static PUSHGATE_DEVICE bool timed(const probe_copy_params &p, u64 until)
{
	u64 number = 0;
	u64 *result = reinterpret_cast<u64 *>(p.result);
	for (u64 b = 0; b < p.batches; b++) {
		u64 start = clock_ns();
		for (u64 r = 0; r < p.repeat; r++) {
			number++;
			// The L1 cache must not hold old copies of what another device wrote.
			if (thread_index() == 0)
				fence_device();
			block_barrier();
			slice s = slice_of(p, number);
			copy(p, s.dst, s.src, s.bytes);
			if (!meet(p, number, until))
				return false;
		}
		// A single block waits for no other block and so checks the time here.
		bool late = false;
		if (thread_index() == 0 && block_index() == 0) {
			u64 now = clock_ns();
			result[1 + b] = now - start;
			late = now > until;
		}
		if (block_any(late))
			return false;
	}
	return true;
}

// Waits until message `number` may begin. Only block 0 looks over the bus.
static PUSHGATE_DEVICE bool begins(const probe_copy_params &p, u64 number, u64 until)
{
	u64 *relay = reinterpret_cast<u64 *>(p.meeting) + grid_size() * apart;
	bool late = false;
	if (thread_index() == 0) {
		if (block_index() != 0) {
			late = !wait_device(relay, number, until);
		} else {
			late = !wait_system(reinterpret_cast<const u64 *>(p.go), number, until);
			if (grid_size() > 1 && !late)
				store_device<order::release>(relay, number);
		}
	}
	return !block_any(late);
}

static PUSHGATE_DEVICE bool told(const probe_copy_params &p, u64 until)
{
	u64 *in = reinterpret_cast<u64 *>(p.wait_flags) + (p.wait_flags ? block_index() * apart : 0);
	u64 *out = reinterpret_cast<u64 *>(p.set_flags) + (p.set_flags ? block_index() * apart : 0);
	u64 chunks = 0; // of all messages so far
	for (u64 number = 1; number <= p.batches * p.repeat; number++) {
		if (!begins(p, number, until))
			return false;
		slice s = slice_of(p, number);
		for (u64 at = 0; at < s.bytes; at += p.chunk) {
			chunks++;
			if (p.wait_flags) {
				bool late = thread_index() == 0 && !wait_system(in, chunks, until);
				if (block_any(late))
					return false;
			}
			copy(p, s.dst + at, s.src + at, s.bytes - at < p.chunk ? s.bytes - at : p.chunk);
			if (p.set_flags) {
				// P3: the chunk before its flag.
				block_barrier();
				if (thread_index() == 0)
					store<order::release>(out, chunks);
			}
		}
		if (!p.done)
			continue;
		if (!meet(p, number, until))
			return false;
		if (block_index() == 0 && thread_index() == 0)
			store<order::release>(reinterpret_cast<u64 *>(p.done), number);
	}
	return true;
}

PUSHGATE_KERNEL_BOUND(probe_copy, probe_copy_params, 512)
{
	u64 until = clock_ns() + p.limit_ns;
	bool whole = p.go ? told(p, until) : timed(p, until);
	if (!whole && thread_index() == 0)
		*reinterpret_cast<u64 *>(p.result) = 1;
}

// ------------------------------------------------------------------ ping-pong

struct probe_ping_params {
	u64 out;    // the record that it writes: host memory, or another device's
	u64 in;	    // the one that it waits for
	u64 result; // device: status (0, or 1: a wait timed out), then nanoseconds of each batch
	u64 batches;
	u64 repeat;
	u64 limit_ns;
	u32 words; // of a record; each word carries the round's number
	u32 first; // 1: begins; 0: answers
};

// Ping-pong with at most one warp. Every word shows by itself that it has arrived, so no fence is
// needed.
PUSHGATE_KERNEL(probe_ping, probe_ping_params)
{
	u64 *out = reinterpret_cast<u64 *>(p.out), *result = reinterpret_cast<u64 *>(p.result);
	const u64 *in = reinterpret_cast<const u64 *>(p.in);
	u64 until = clock_ns() + p.limit_ns, number = 0;
	for (u64 b = 0; b < p.batches; b++) {
		u64 start = clock_ns();
		for (u64 r = 0; r < p.repeat; r++) {
			number++;
			for (u32 half = 0; half < 2; half++) {
				if ((half == 0) == (p.first != 0)) {
					for (u32 i = thread_index(); i < p.words; i += block_size())
						store<order::relaxed>(out + i, number);
					continue;
				}
				backoff pause;
				for (u32 n = 1;; n++) {
					bool missing = false;
					for (u32 i = thread_index(); i < p.words; i += block_size())
						missing |= load<order::acquire>(in + i) < number;
					if (!warp_any(missing))
						break;
					if (n % 64 == 0 && warp_any(clock_ns() > until)) {
						if (thread_index() == 0)
							result[0] = 1;
						return;
					}
					pause.wait();
				}
			}
		}
		if (thread_index() == 0)
			result[1 + b] = clock_ns() - start;
	}
}
