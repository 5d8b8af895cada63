// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Copies a list of pieces of any addresses and lengths: pages of a cache into a window, out of one, or within the device.
#include "pushgate/arch.cuh"

using namespace pushgate;

struct piece {
	u64 dst;
	u64 src;
	u64 bytes; // 4096 at most, so that the lanes of a warp load all of a piece before the first store waits
};

struct copy_pages_params {
	u64 pieces; // piece[count]
	u64 count;
};

static PUSHGATE_DEVICE u64x2 get(const u64x2 *p) { return load_payload(p); }
static PUSHGATE_DEVICE void put(u64x2 *p, u64x2 v) { store_payload(p, v); }
template <class T> static PUSHGATE_DEVICE T get(const T *p) { return *reinterpret_cast<const volatile T *>(p); }
// Volatile: the compiler neither leaves the store out nor joins it to a wider one.
template <class T> static PUSHGATE_DEVICE void put(T *p, T v) { *reinterpret_cast<volatile T *>(p) = v; }

// One load after the other would cost as many round trips over the bus.
template <class T> static PUSHGATE_DEVICE void copy_as(u64 dst, u64 src, u64 bytes, u32 lane)
{
	T *d = reinterpret_cast<T *>(dst);
	const T *s = reinterpret_cast<const T *>(src);
	u64 n = bytes / sizeof(T);
	for (u64 i = lane; i < n; i += 8 * 32) {
		T v[8];
#pragma unroll
		for (u32 k = 0; k < 8; k++)
			if (i + k * 32 < n)
				v[k] = get(s + i + k * 32);
#pragma unroll
		for (u32 k = 0; k < 8; k++)
			if (i + k * 32 < n)
				put(d + i + k * 32, v[k]);
	}
}

// In the widest accesses for which both ends are aligned alike.
template <class T> static PUSHGATE_DEVICE void copy_aligned(const piece &p, u32 lane)
{
	u64 head = (0 - p.dst) % sizeof(T);
	if (head > p.bytes)
		head = p.bytes;
	u64 body = (p.bytes - head) / sizeof(T) * sizeof(T), tail = head + body;
	copy_as<u8>(p.dst, p.src, head, lane);
	copy_as<T>(p.dst + head, p.src + head, body, lane);
	copy_as<u8>(p.dst + tail, p.src + tail, p.bytes - tail, lane);
}

// A warp for each piece. Blocks are whole warps.
PUSHGATE_KERNEL(copy_pages, copy_pages_params)
{
	const piece *pieces = reinterpret_cast<const piece *>(p.pieces);
	u64 own = block_size() / 32, warps = grid_size() * own;
	for (u64 i = block_index() * own + thread_index() / 32; i < p.count; i += warps) {
		piece one = pieces[i];
		u32 lane = thread_index() % 32;
		u64 apart = one.dst ^ one.src;
		if (apart % 16 == 0)
			copy_aligned<u64x2>(one, lane);
		else if (apart % 4 == 0)
			copy_aligned<u32>(one, lane);
		else
			copy_as<u8>(one.dst, one.src, one.bytes, lane);
	}
}
