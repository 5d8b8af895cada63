// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The few primitives that differ between a GPU (nvcc, NVRTC) and a CPU (any C++17 compiler with the
// GNU __atomic built-ins). All other device code is one source for both. The file includes no
// standard header on purpose: NVRTC has none, and this page of PTX compiles in milliseconds where
// libcu++ takes seconds.
#ifndef PUSHGATE_ARCH_CUH
#define PUSHGATE_ARCH_CUH

#include "pushgate/abi.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PUSHGATE_GPU 1
#define PUSHGATE_DEVICE __device__ __forceinline__
#define PUSHGATE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PUSHGATE_GPU 0
#define PUSHGATE_DEVICE inline
#define PUSHGATE_HOST_DEVICE inline
#include <sched.h>
#include <time.h>
#endif

#ifndef PUSHGATE_ORDER_BELL // WQE before the doorbell that announces it
#define PUSHGATE_ORDER_BELL order::release
#endif

namespace pushgate {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = pushgate_u32;
using u64 = pushgate_u64;

// Memory order of one access, at system scope unless the function's name says device.
enum class order { relaxed, acquire, release };

struct alignas(16) u64x2 {
	u64 x, y;
};

#if PUSHGATE_GPU
// ------------------------------------------------------------------ on a GPU

PUSHGATE_DEVICE u32 thread_index() { return threadIdx.x; }
PUSHGATE_DEVICE u32 block_size() { return blockDim.x; }
PUSHGATE_DEVICE u32 block_index() { return blockIdx.x; }
PUSHGATE_DEVICE u32 grid_size() { return gridDim.x; }

PUSHGATE_DEVICE void block_barrier() { __syncthreads(); }

// Mask of this warp's lanes that exist: the last warp of a block may be short.
PUSHGATE_DEVICE u32 warp_mask()
{
	u32 left = blockDim.x - (threadIdx.x & ~31u);
	return left >= 32 ? 0xffffffffu : (1u << left) - 1;
}
PUSHGATE_DEVICE void warp_barrier() { __syncwarp(warp_mask()); }
// Lane 0's value, to every lane of the warp. The barrier orders memory among the lanes, which a
// shuffle alone does not do: what lane 0 acquired is visible to all lanes afterwards.
PUSHGATE_DEVICE u64 warp_broadcast(u64 v)
{
	u32 mask = warp_mask();
	__syncwarp(mask);
	return __shfl_sync(mask, v, 0);
}

// Thread 0's value, to every thread of the block. Both barriers are needed: the first makes the
// value visible, the second keeps the next call from overwriting it.
PUSHGATE_DEVICE u64 block_broadcast(u64 v)
{
	__shared__ u64 slot;
	if (threadIdx.x == 0)
		slot = v;
	__syncthreads();
	u64 r = slot;
	__syncthreads();
	return r;
}

// Gives every thread of the block one of the values that are not 0, or 0 if all are 0.
PUSHGATE_DEVICE u32 block_any(u32 v)
{
	__shared__ u32 slot;
	if (threadIdx.x == 0)
		slot = 0;
	__syncthreads();
	if (v)
		slot = v;
	__syncthreads();
	u32 r = slot;
	__syncthreads();
	return r;
}
PUSHGATE_DEVICE u32 warp_any(u32 v)
{
	u32 who = __ballot_sync(warp_mask(), v != 0);
	return who ? __shfl_sync(warp_mask(), v, __ffs(who) - 1) : 0;
}

// The launch's dynamic shared memory.
PUSHGATE_DEVICE void *shared_memory()
{
	extern __shared__ u64x2 pushgate_dynamic_shared[];
	return pushgate_dynamic_shared;
}

template <order O> PUSHGATE_DEVICE u64 load(const u64 *p)
{
	u64 v;
	if (O == order::acquire)
		asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	else
		asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	return v;
}

template <order O> PUSHGATE_DEVICE void store(u64 *p, u64 v)
{
	if (O == order::release)
		asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
	else
		asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// An acquire and release fence among threads of this device, for words that are read in pairs or
// handed on. Loads before the fence are ordered before every access after it, and every access
// before it is ordered before the stores after it. It also drops stale lines of the L1 cache.
PUSHGATE_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// A sequentially consistent fence at system scope: it also orders a store before it against a load
// after it.
PUSHGATE_DEVICE void fence_total() { asm volatile("fence.sc.sys;" ::: "memory"); }

// Loads two neighbouring words, each as an atomic of its own. `p` is 16-byte aligned.
PUSHGATE_DEVICE u64x2 load_pair(const u64 *p)
{
	u64x2 v;
	asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
	return v;
}
PUSHGATE_DEVICE u64x2 load_pair_acquire(const u64 *p)
{
	u64x2 v;
	asm volatile("ld.acquire.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
	return v;
}
PUSHGATE_DEVICE u64x2 load_pair_device_acquire(const u64 *p)
{
	u64x2 v;
	asm volatile("ld.acquire.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
	return v;
}
PUSHGATE_DEVICE void store_pair(u64 *p, u64 x, u64 y)
{
	asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(x), "l"(y) : "memory");
}

// Load of a word that only threads of this device share.
template <order O> PUSHGATE_DEVICE u64 load_device(const u64 *p)
{
	u64 v;
	if (O == order::acquire)
		asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	else
		asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	return v;
}
template <order O> PUSHGATE_DEVICE void store_device(u64 *p, u64 v)
{
	if (O == order::release)
		asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
	else
		asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Compare-and-swap at device scope; returns the old value.
template <order O = order::relaxed> PUSHGATE_DEVICE u64 compare_and_swap(u64 *p, u64 expected, u64 desired)
{
	u64 v;
	if (O == order::release)
		asm volatile("atom.release.gpu.global.cas.b64 %0, [%1], %2, %3;"
			     : "=l"(v)
			     : "l"(p), "l"(expected), "l"(desired)
			     : "memory");
	else
		asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
		     : "=l"(v)
		     : "l"(p), "l"(expected), "l"(desired)
		     : "memory");
	return v;
}
// Adds at device scope; returns the old value.
PUSHGATE_DEVICE u64 add_device(u64 *p, u64 v)
{
	u64 before;
	asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(v) : "memory");
	return before;
}

// Loads 16 bytes of payload with a weak load. The thread that publishes the payload orders it.
PUSHGATE_DEVICE u64x2 load_payload(const u64x2 *p)
{
	u64x2 v;
	asm volatile("ld.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
	return v;
}
PUSHGATE_DEVICE void store_payload(u64x2 *p, u64x2 v)
{
	asm volatile("st.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.x), "l"(v.y) : "memory");
}

// Whether `p` points into memory that all threads see, as load_payload and store_payload need: not into a thread's own
// variables, nor into shared memory of a block.
PUSHGATE_DEVICE bool is_global(const void *p) { return __isGlobal(p); }

// Nanoseconds of a clock that all blocks share.
PUSHGATE_DEVICE u64 clock_ns()
{
	u64 t;
	asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
	return t;
}

// The pause between two looks at a word. The first few thousand looks never yield, because each of
// them already is a round trip over PCIe.
struct backoff {
	u32 n = 0;
	PUSHGATE_DEVICE void wait()
	{
		if (++n > 4096)
			__nanosleep(500);
	}
};

// Rings the doorbell. A GPU cannot wake a CPU through host memory, so most queue pairs have no
// doorbell. Where the window's device has one, the doorbell is stored to after every publication
// (BELL): asking first whether the engine sleeps would cost a read over the bus.
PUSHGATE_DEVICE void ring(const pushgate_qp &qp)
{
	if (qp.doorbell)
		store<PUSHGATE_ORDER_BELL>(reinterpret_cast<u64 *>(qp.doorbell), qp.doorbell_arg);
}

// Declares a kernel, which takes one struct by value. The bound on threads lets ptxas use all
// registers that a block of that many threads can have.
#define PUSHGATE_KERNEL_BOUND(name, Params, threads) \
	extern "C" __global__ void __launch_bounds__(threads, 1) name([[maybe_unused]] const Params p)
#define PUSHGATE_KERNEL(name, Params) PUSHGATE_KERNEL_BOUND(name, Params, 1024)

#else
// ------------------------------------------------------------------ on a CPU
// Each CUDA thread is an OS thread. The executor owns these structures (gpu-kernels/src/arch.rs
// mirrors them) and enters each thread through the kernel's C entry point.

struct cpu_barrier {
	u32 arrived;
	u32 generation;
	u64 slot; // broadcast value
};

struct cpu_block {
	u32 index;	     // blockIdx.x
	u32 grid;	     // gridDim.x
	u32 size;	     // blockDim.x
	u32 pad;
	void *shared;	     // dynamic shared memory
	cpu_barrier barrier; // of the block
	cpu_barrier warps[32];
};

struct cpu_thread {
	cpu_block *block;
	u64 index; // threadIdx.x
};

inline thread_local cpu_thread self;

// The pause between two looks at a word. There may be more threads than cores, so it looks a few
// times, then yields, then sleeps, and the thread that it waits for gets to run.
struct backoff {
	u32 n = 0;
	void wait()
	{
		++n;
		if (n < 16)
			return;
		if (n < 400) {
			sched_yield();
		} else {
			timespec t = {0, 50000};
			nanosleep(&t, nullptr);
		}
	}
};

inline u32 thread_index() { return (u32)self.index; }
inline u32 block_size() { return self.block->size; }
inline u32 block_index() { return self.block->index; }
inline u32 grid_size() { return self.block->grid; }

// Barrier by generation. The last thread to arrive releases all that the other threads wrote
// before: acq_rel on the counter, release on the generation.
inline void cpu_wait(cpu_barrier &b, u32 n)
{
	u32 generation = __atomic_load_n(&b.generation, __ATOMIC_ACQUIRE);
	if (__atomic_add_fetch(&b.arrived, 1, __ATOMIC_ACQ_REL) == n) {
		__atomic_store_n(&b.arrived, 0, __ATOMIC_RELAXED);
		__atomic_store_n(&b.generation, generation + 1, __ATOMIC_RELEASE);
		return;
	}
	backoff pause;
	while (__atomic_load_n(&b.generation, __ATOMIC_ACQUIRE) == generation)
		pause.wait();
}
inline u64 cpu_broadcast(cpu_barrier &b, u32 n, bool first, u64 v)
{
	if (n == 1)
		return v;
	if (first)
		__atomic_store_n(&b.slot, v, __ATOMIC_RELAXED);
	cpu_wait(b, n);
	u64 r = __atomic_load_n(&b.slot, __ATOMIC_RELAXED);
	cpu_wait(b, n);
	return r;
}
// Gives every thread one of the values that are not 0, or 0 if all are 0.
inline u32 cpu_any(cpu_barrier &b, u32 n, bool first, u32 v)
{
	if (n == 1)
		return v;
	if (first)
		__atomic_store_n(&b.slot, 0, __ATOMIC_RELAXED);
	cpu_wait(b, n);
	if (v)
		__atomic_store_n(&b.slot, v, __ATOMIC_RELAXED);
	cpu_wait(b, n);
	u32 r = (u32)__atomic_load_n(&b.slot, __ATOMIC_RELAXED);
	cpu_wait(b, n);
	return r;
}
inline u32 warp_width()
{
	u32 left = self.block->size - (thread_index() & ~31u);
	return left < 32 ? left : 32;
}

inline void block_barrier() { cpu_wait(self.block->barrier, self.block->size); }
inline void warp_barrier() { cpu_wait(self.block->warps[thread_index() / 32], warp_width()); }
inline u64 warp_broadcast(u64 v)
{
	return cpu_broadcast(self.block->warps[thread_index() / 32], warp_width(), thread_index() % 32 == 0, v);
}
inline u64 block_broadcast(u64 v)
{
	return cpu_broadcast(self.block->barrier, self.block->size, thread_index() == 0, v);
}
inline u32 block_any(u32 v)
{
	return cpu_any(self.block->barrier, self.block->size, thread_index() == 0, v);
}
inline u32 warp_any(u32 v)
{
	return cpu_any(self.block->warps[thread_index() / 32], warp_width(), thread_index() % 32 == 0, v);
}
inline void *shared_memory() { return self.block->shared; }

template <order O> inline u64 load(const u64 *p)
{
	return __atomic_load_n(p, O == order::acquire ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED);
}
template <order O> inline void store(u64 *p, u64 v)
{
#if defined(__x86_64__)
	// A window in a BAR is write-combining: only this fence orders what was stored there
	// before. Windows in ordinary memory do not need it.
	if (O == order::release)
		__builtin_ia32_sfence();
#elif defined(__aarch64__)
	// Such a window is outer shareable, and a release store orders the inner domain alone.
	if (O == order::release)
		__asm__ volatile("dmb osh" ::: "memory");
#endif
	__atomic_store_n(p, v, O == order::release ? __ATOMIC_RELEASE : __ATOMIC_RELAXED);
}
inline void fence_device() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
inline void fence_total() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline u64x2 load_pair(const u64 *p) { return {load<order::relaxed>(p), load<order::relaxed>(p + 1)}; }
inline u64x2 load_pair_acquire(const u64 *p) { return {load<order::acquire>(p), load<order::acquire>(p + 1)}; }
inline void store_pair(u64 *p, u64 x, u64 y)
{
	store<order::relaxed>(p, x);
	store<order::relaxed>(p + 1, y);
}
template <order O> inline u64 load_device(const u64 *p) { return load<O>(p); }
template <order O> inline void store_device(u64 *p, u64 v) { store<O>(p, v); }
template <order O = order::relaxed> inline u64 compare_and_swap(u64 *p, u64 expected, u64 desired)
{
	__atomic_compare_exchange_n(p, &expected, desired, false,
				    O == order::release ? __ATOMIC_RELEASE : __ATOMIC_RELAXED, __ATOMIC_RELAXED);
	return expected;
}
inline u64 add_device(u64 *p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline u64x2 load_payload(const u64x2 *p) { return *p; }
inline void store_payload(u64x2 *p, u64x2 v) { *p = v; }
inline bool is_global(const void *) { return true; }

inline u64 clock_ns()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

// Rings the doorbell of a window that can wake the engine. Our fence stands between our publication
// and our look at the flag; the engine's fence stands between its store of the flag and its last
// look at the ring (ring.rs, may_sleep). One of the two sees the other's store, so no wake-up is
// lost. An atomic exchange would do the same and cost the same.
inline void ring(const pushgate_qp &qp)
{
	if (!qp.doorbell)
		return;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	// Without the flag the doorbell is an interrupt, whose driver knows whether the engine
	// sleeps.
	if (!qp.sleeping || __atomic_load_n(reinterpret_cast<const u64 *>(qp.sleeping), __ATOMIC_RELAXED))
		reinterpret_cast<void (*)(u64)>(qp.doorbell)(qp.doorbell_arg);
}

// Declares a kernel, which takes one struct by value. The executor calls the kernel's C entry point
// on each thread; NAME_params_size lets the executor check the struct's size.
#define PUSHGATE_EXPORT extern "C" __attribute__((visibility("default")))
#define PUSHGATE_KERNEL(name, Params)                                                   \
	static void name##_body(const Params &p);                                       \
	PUSHGATE_EXPORT pushgate::u32 name##_params_size() { return sizeof(Params); }    \
	PUSHGATE_EXPORT void name(const pushgate::cpu_thread *t, const void *raw)        \
	{                                                                               \
		pushgate::self = *t;                                                    \
		name##_body(*static_cast<const Params *>(raw));                         \
	}                                                                               \
	static void name##_body([[maybe_unused]] const Params &p)
#define PUSHGATE_KERNEL_BOUND(name, Params, threads) PUSHGATE_KERNEL(name, Params)

#endif

} // namespace pushgate

#endif // PUSHGATE_ARCH_CUH
