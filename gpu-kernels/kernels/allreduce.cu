// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Allreduce around a ring: reduce-scatter, then all-gather; the GPU reduces. A channel is a queue
// pair to the next rank and one from the previous rank, with one block that sends and one that
// receives; the channels share every chunk among them.
//
// At step s (0 to 2n-3) rank r sends chunk r-s and receives chunk r-s-1, modulo n: the chunk that
// arrives at step s leaves at step s+1. For s < n-1 the arriving chunk is reduced with ours; after
// that it is final. So the sender of a channel follows the receiver of the channel, by one counter
// of finished slices.
//
// Few threads store and many load: that is fastest while both directions of a PCIe link are busy
// (docs/benchmarks.md).
//
//
// kernels: allreduce_f32 allreduce_f64 allreduce_f16 allreduce_bf16 allreduce_i32 allreduce_i64
#include "pushgate/device.cuh"

using namespace pushgate;

struct allreduce_params {
	u64 send_qps; // pushgate_qp[channels], to the next rank
	u64 recv_qps; // pushgate_qp[channels], from the previous rank
	u64 input;    // elements, 16-byte aligned
	u64 output;   // may be the input
	u64 count;    // elements
	u64 slice;    // bytes of a message, a multiple of 16
	u64 progress; // u64[channels], zero: slices finished by the receiver
	u64 result;   // u64[2 * channels]: status of each block
	u32 rank;
	u32 ranks;
	u32 channels;
	u32 op;		// 0 sum, 1 max, 2 min, 3 prod
	u32 push_lanes; // threads of a block that store
	u32 pad;
};

// ------------------------------------------------------------------- numbers
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

PUSHGATE_DEVICE u32 float_bits(float f)
{
	union { float f; u32 u; } v;
	v.f = f;
	return v.u;
}
PUSHGATE_DEVICE float bits_float(u32 u)
{
	union { u32 u; float f; } v;
	v.u = u;
	return v.f;
}

// bf16 is the upper half of a float; rounds to nearest, ties to even.
PUSHGATE_DEVICE float widen(bf16 h) { return bits_float((u32)h.bits << 16); }
PUSHGATE_DEVICE bf16 narrow_bf16(float f)
{
	u32 u = float_bits(f);
	if ((u & 0x7fffffffu) > 0x7f800000u)
		return bf16{(u16)(u >> 16 | 0x40)};
	return bf16{(u16)((u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}

#if PUSHGATE_GPU
PUSHGATE_DEVICE float widen(f16 h)
{
	float f;
	asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits));
	return f;
}
PUSHGATE_DEVICE f16 narrow_f16(float f)
{
	f16 h;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(f));
	return h;
}
#else
// Exact conversion: the magnitude is scaled by a power of two as a float, which also handles
// subnormals; ties to even are rounded by hand.
inline float widen(f16 h)
{
	u32 sign = (u32)(h.bits & 0x8000) << 16, magnitude = h.bits & 0x7fff;
	if (magnitude >= 0x7c00)
		return bits_float(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
	return bits_float(sign | float_bits(bits_float(magnitude << 13) * bits_float((127u + 112u) << 23)));
}
inline f16 narrow_f16(float f)
{
	u32 u = float_bits(f), sign = u >> 16 & 0x8000;
	u &= 0x7fffffffu;
	if (u > 0x7f800000u)
		return f16{(u16)(sign | 0x7e00)};
	if (u >= 0x477ff000u) // rounds to 65536 or more
		return f16{(u16)(sign | 0x7c00)};
	if (u < 0x38800000u) { // subnormal: let the adder round at 2^-24
		float r = bits_float(u) + bits_float(0x3f000000u);
		return f16{(u16)(sign | (float_bits(r) - 0x3f000000u))};
	}
	u += 0xfffu + (u >> 13 & 1);
	return f16{(u16)(sign | (u - 0x38000000u) >> 13)};
}
#endif

enum class op { sum, max, min, prod };

template <op O, class T> PUSHGATE_DEVICE T combine(T a, T b)
{
	switch (O) {
	case op::sum: return a + b;
	case op::max: return a > b ? a : b;
	case op::min: return a < b ? a : b;
	default: return a * b;
	}
}
// Signed sums and products wrap. In C++ only unsigned ones may, so compute unsigned.
template <op O> PUSHGATE_DEVICE int apply(int a, int b)
{
	if (O == op::sum || O == op::prod)
		return (int)combine<O, u32>((u32)a, (u32)b);
	return combine<O, int>(a, b);
}
template <op O> PUSHGATE_DEVICE long long apply(long long a, long long b)
{
	if (O == op::sum || O == op::prod)
		return (long long)combine<O, u64>((u64)a, (u64)b);
	return combine<O, long long>(a, b);
}
template <op O> PUSHGATE_DEVICE float apply(float a, float b) { return combine<O, float>(a, b); }
template <op O> PUSHGATE_DEVICE double apply(double a, double b) { return combine<O, double>(a, b); }
template <op O> PUSHGATE_DEVICE f16 apply(f16 a, f16 b) { return narrow_f16(combine<O, float>(widen(a), widen(b))); }
template <op O> PUSHGATE_DEVICE bf16 apply(bf16 a, bf16 b) { return narrow_bf16(combine<O, float>(widen(a), widen(b))); }

template <class T> union lanes16 {
	u64x2 v;
	T t[16 / sizeof(T)];
	PUSHGATE_DEVICE lanes16() {}
};

template <op O, class T> PUSHGATE_DEVICE u64x2 apply16(u64x2 a, u64x2 b)
{
	lanes16<T> x, y;
	x.v = a;
	y.v = b;
#if PUSHGATE_GPU
#pragma unroll
#endif
	for (u32 i = 0; i < 16 / sizeof(T); i++)
		x.t[i] = apply<O>(x.t[i], y.t[i]);
	return x.v;
}

// dst[i] = O(own[i], arrived[i]); dst may be own. Each thread has four loads over the bus in
// flight, which hides the latency of the bus. `bytes` is a whole number of elements.
template <op O, class T>
PUSHGATE_DEVICE void reduce_slice(void *dst, const void *own, const void *arrived, u64 bytes)
{
	const u64x2 *a = static_cast<const u64x2 *>(own), *b = static_cast<const u64x2 *>(arrived);
	u64x2 *d = static_cast<u64x2 *>(dst);
	u64 n = bytes / 16, lanes = block_size(), i = thread_index();
	for (; i + 3 * lanes < n; i += 4 * lanes) {
		u64x2 x[4], y[4];
#if PUSHGATE_GPU
#pragma unroll
#endif
		for (u32 k = 0; k < 4; k++)
			x[k] = load_payload(b + i + k * lanes);
#if PUSHGATE_GPU
#pragma unroll
#endif
		for (u32 k = 0; k < 4; k++)
			y[k] = load_payload(a + i + k * lanes);
#if PUSHGATE_GPU
#pragma unroll
#endif
		for (u32 k = 0; k < 4; k++)
			store_payload(d + i + k * lanes, apply16<O, T>(y[k], x[k]));
	}
	for (; i < n; i += lanes)
		store_payload(d + i, apply16<O, T>(load_payload(a + i), load_payload(b + i)));
	u64 first = n * 16 / sizeof(T), count = bytes / sizeof(T);
	for (i = first + thread_index(); i < count; i += lanes)
		static_cast<T *>(dst)[i] = apply<O>(static_cast<const T *>(own)[i], static_cast<const T *>(arrived)[i]);
}

// ------------------------------------------------------------------ splitting
// Elements [first, first + count) of a channel's part of a chunk. All bounds but the very end are
// multiples of 16 bytes, so that every slice is aligned.
struct part {
	u64 first, count;
};
PUSHGATE_DEVICE part split(u64 first, u64 count, u64 of, u64 pieces, u64 grain)
{
	u64 each = (count + pieces - 1) / pieces;
	each = (each + grain - 1) / grain * grain;
	u64 begin = of * each < count ? of * each : count;
	u64 end = begin + each < count ? begin + each : count;
	return part{first + begin, end - begin};
}

struct schedule {
	u64 count, slice, grain;
	u32 ranks, channels, channel;

	PUSHGATE_DEVICE part chunk(u32 c) const
	{
		part p = split(0, count, c, ranks, grain);
		return split(p.first, p.count, channel, channels, grain);
	}
	PUSHGATE_DEVICE u64 slices(part p) const { return (p.count + slice - 1) / slice; }
	PUSHGATE_DEVICE part at(part p, u64 j) const
	{
		u64 begin = j * slice;
		return part{p.first + begin, p.count - begin < slice ? p.count - begin : slice};
	}
};

// --------------------------------------------------------------------- blocks
template <class T> PUSHGATE_DEVICE status sender(const allreduce_params &p, const schedule &plan, u64 *progress)
{
	queue_pair qp(reinterpret_cast<const pushgate_qp *>(p.send_qps)[plan.channel]);
	u32 n = p.ranks;
	u64 need = 0; // slices that the receiver must have finished
	for (u32 s = 0; s < 2 * n - 2; s++) {
		part c = plan.chunk((p.rank + 2 * n - s) % n);
		u64 slices = plan.slices(c);
		const u8 *src = reinterpret_cast<const u8 *>(s == 0 ? p.input : p.output);
		for (u64 j = 0; j < slices; j++) {
			if (s > 0) {
				need++;
				u64 st = 0;
				if (thread_index() == 0)
					st = (u64)qp.wait([&] { return load_device<order::acquire>(progress) >= need; });
				st = block_broadcast(st);
				if (st)
					return static_cast<status>(st);
			}
			part e = plan.at(c, j);
			u32 bytes = (u32)(e.count * sizeof(T));
			batch<block> b(qp);
			status st = b.begin(1, bytes);
			if (st != status::ok)
				return st;
			if (thread_index() < p.push_lanes)
				push_payload(b.payload(0), src + e.first * sizeof(T), bytes, thread_index(),
					     block_size() < p.push_lanes ? block_size() : p.push_lanes);
			if (thread_index() == 0) {
				send_wr wr;
				wr.opcode = opcode::send;
				wr.length = bytes;
				wr.tag = s;
				b.set(0, wr);
			}
			b.publish();
		}
	}
	return flush<block>(qp);
}

template <op O, class T>
PUSHGATE_DEVICE status receiver(const allreduce_params &p, const schedule &plan, u64 *progress)
{
	queue_pair qp(reinterpret_cast<const pushgate_qp *>(p.recv_qps)[plan.channel]);
	u32 n = p.ranks;
	u64 done = 0;
	status st = status::ok;
	for (u32 s = 0; s < 2 * n - 2 && st == status::ok; s++) {
		part c = plan.chunk((p.rank + 2 * n - s - 1) % n);
		u64 slices = plan.slices(c);
		for (u64 j = 0; j < slices; j++) {
			message m;
			st = recv<block>(qp, m);
			if (st != status::ok)
				break;
			part e = plan.at(c, j);
			u64 bytes = e.count * sizeof(T);
			if (m.length != bytes || m.tag != s || !m.data) {
				st = status::refused;
				break;
			}
			u8 *dst = reinterpret_cast<u8 *>(p.output) + e.first * sizeof(T);
			const u8 *own = reinterpret_cast<const u8 *>(p.input) + e.first * sizeof(T);
			if (s < n - 1)
				reduce_slice<O, T>(dst, own, m.data, bytes);
			else
				pull_payload(dst, m.data, bytes, thread_index(), block_size());
			release<block>(qp); // begins with a barrier: the slice is stored
			done++;
			if (thread_index() == 0)
				store_device<order::release>(progress, done);
		}
	}
	if (thread_index() == 0)
		qp.close();
	return st;
}

template <op O, class T> PUSHGATE_DEVICE void allreduce(const allreduce_params &p)
{
	// With one rank the result is the reduction of one input.
	if (p.ranks == 1) {
		u64 bytes = p.count * sizeof(T), lanes = (u64)grid_size() * block_size();
		if (p.input != p.output)
			pull_payload(reinterpret_cast<void *>(p.output), reinterpret_cast<const void *>(p.input), bytes,
				     block_index() * block_size() + thread_index(), (u32)lanes);
		return;
	}
	schedule plan;
	plan.count = p.count;
	plan.slice = p.slice / sizeof(T);
	plan.grain = 16 / sizeof(T);
	plan.ranks = p.ranks;
	plan.channels = p.channels;
	plan.channel = block_index() / 2;
	u64 *progress = reinterpret_cast<u64 *>(p.progress) + plan.channel;
	status s = block_index() % 2 ? receiver<O, T>(p, plan, progress) : sender<T>(p, plan, progress);
	if (thread_index() == 0)
		reinterpret_cast<u64 *>(p.result)[block_index()] = (u64)s;
}

template <class T> PUSHGATE_DEVICE void dispatch(const allreduce_params &p)
{
	switch (static_cast<op>(p.op)) {
	case op::sum: return allreduce<op::sum, T>(p);
	case op::max: return allreduce<op::max, T>(p);
	case op::min: return allreduce<op::min, T>(p);
	default: return allreduce<op::prod, T>(p);
	}
}

PUSHGATE_KERNEL_BOUND(allreduce_f32, allreduce_params, 512) { dispatch<float>(p); }
PUSHGATE_KERNEL_BOUND(allreduce_f64, allreduce_params, 512) { dispatch<double>(p); }
PUSHGATE_KERNEL_BOUND(allreduce_f16, allreduce_params, 512) { dispatch<f16>(p); }
PUSHGATE_KERNEL_BOUND(allreduce_bf16, allreduce_params, 512) { dispatch<bf16>(p); }
PUSHGATE_KERNEL_BOUND(allreduce_i32, allreduce_params, 512) { dispatch<int>(p); }
PUSHGATE_KERNEL_BOUND(allreduce_i64, allreduce_params, 512) { dispatch<long long>(p); }
