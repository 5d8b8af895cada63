// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What `pushgate probe` measures with: copies between any two memories that this
// device reaches, and records to and fro. Timed by the device's own clock while
// they run on, so that no launch is in the figure; or told by the host, one message
// after the other, as a resident worker is.
#include "pushgate/arch.cuh"

using namespace pushgate;

// kernels: probe_copy probe_ping

// Between two words that different blocks write, in words: no line is shared.
static constexpr u64 apart = 16;

struct probe_copy_params {
	u64 dst;
	u64 src;
	u64 bytes;	// of a message, a multiple of 16, cut among the blocks
	u64 stride;	// messages go to `places` places in turn, so far apart
	u64 places;
	u64 chunk;	// bytes of a block's slice between two flags
	u64 wait_flags; // host, a word for each block: how many chunks are there to be copied; 0: all
	u64 set_flags;	// the same, said to the other side; 0: nobody waits
	u64 go;		// host: the number of the last message that may begin; 0: all, and timed
	u64 done;	// host: the last message that is complete; 0: not said
	u64 meeting;	// device, zeroed: a word for each block, and one for `go` handed on
	u64 result;	// device: status (0, or 1: a wait ended without), then nanoseconds of each batch
	u64 batches;	// so many figures
	u64 repeat;	// messages in each
	u64 limit_ns;	// of all of it
	u32 width;	// bytes of a thread's access: 4, 8, 16; 0: bulk stores by the copy unit of the SM (sm_90)
	u32 system;	// the destination is not this device's memory
};

// ------------------------------------------------------------------- copying

static PUSHGATE_DEVICE u64x2 get(const u64x2 *p) { return load_payload(p); }
static PUSHGATE_DEVICE void put(u64x2 *p, u64x2 v) { store_payload(p, v); }
template <class T> static PUSHGATE_DEVICE T get(const T *p) { return *reinterpret_cast<const volatile T *>(p); }
// Volatile: neither left out nor joined to a wider one.
template <class T> static PUSHGATE_DEVICE void put(T *p, T v) { *reinterpret_cast<volatile T *>(p) = v; }

// Eight loads are in flight before the first store, also at the end, where a thread
// has fewer: one after the other they would be as many trips over the bus.
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

// Through two buffers of shared memory by turns: while one is stored from, the
// other is filled.
static PUSHGATE_DEVICE void copy_bulk(u64 dst, u64 src, u64 bytes)
{
	u64 turn = 0;
	for (u64 at = 0; at < bytes; at += bulk_bytes, turn ^= 1) {
		u64 n = bytes - at < bulk_bytes ? bytes - at : bulk_bytes;
		u64x2 *buffer = static_cast<u64x2 *>(shared_memory()) + turn * (bulk_bytes / 16);
		// The store before last has read this buffer.
		if (thread_index() == 0)
			asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
		block_barrier();
		for (u64 i = thread_index(); i < n / 16; i += block_size())
			buffer[i] = load_payload(reinterpret_cast<const u64x2 *>(src + at) + i);
		// What ordinary stores put there, to the unit that reads it.
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

// P7: false once the time is up.
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

// All blocks have copied, and what they stored is where it belongs: a release at
// system scope waits for that, also for the stores of the block's other threads,
// which are older by the barrier.
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

// The block's slice of message `number`: whole lines, so that no two blocks store
// into one.
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

// One message after the other, each complete before the next begins.
static PUSHGATE_DEVICE bool timed(const probe_copy_params &p, u64 until)
{
	u64 number = 0;
	u64 *result = reinterpret_cast<u64 *>(p.result);
	for (u64 b = 0; b < p.batches; b++) {
		u64 start = clock_ns();
		for (u64 r = 0; r < p.repeat; r++) {
			number++;
			// Of what another device wrote nothing old may lie in the L1 cache.
			if (thread_index() == 0)
				fence_device();
			block_barrier();
			slice s = slice_of(p, number);
			copy(p, s.dst, s.src, s.bytes);
			if (!meet(p, number, until))
				return false;
		}
		// A block alone meets nobody who would tell it that it is late.
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

// Block 0 alone looks over the bus for the next message.
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
	u64 result; // device: as above
	u64 batches;
	u64 repeat;
	u64 limit_ns;
	u32 words; // of a record, each of which carries the round's number
	u32 first; // 1: begins; 0: answers
};

// At most a warp. Every word says for itself that it is there, so nothing is fenced.
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
