// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A Jacobi step over this rank's planes. The blocks at the edges wait for the neighbour's plane and push their own: no host between.
#include "pushgate/device.cuh"

#define HALO_DEVICE PUSHGATE_DEVICE
#include "cells.cuh"

using namespace pushgate;

// What the host passes, field by field the same as `struct halo_params` in halo.c.
struct halo_params {
	u64 above;  // pushgate_qp to the rank above, or 0
	u64 below;  // pushgate_qp to the rank below, or 0
	u64 from;   // float[planes][side][side]
	u64 to;	    // float[planes][side][side]
	u64 inbox;  // float[4][side][side]: the plane above of even and of odd steps, the plane below likewise
	u64 result; // u64 for each block: how it ended
	u32 above_rkey;
	u32 below_rkey;
	u32 planes;
	u32 side;
	u32 parts;  // of a plane, and as many signals of each queue pair
	u32 step;   // from 1
	u32 pushes; // 0: the host brings the planes; 2: the last step, which waits until the neighbours have all of them
};

// A plane of one step lies in the half of its parity. The neighbour overwrites that half two steps later, and it gets there only
// with the plane of the step between, which this rank sends when it is done with the half.
PUSHGATE_DEVICE u32 half(u32 step, u32 side) { return side * 2 + step % 2; }

PUSHGATE_KERNEL(halo_step, halo_params)
{
	// Planes are divided among groups of blocks, and each plane among the blocks of a group, so that several blocks push an edge plane
	// and read the neighbour's. A block has to do with the neighbour's block of the same part alone.
	const u32 group = block_index() / p.parts, groups = grid_size() / p.parts, part = block_index() % p.parts;
	const u32 plane = p.side * p.side;
	const u32 first = (u32)((u64)p.planes * group / groups), end = (u32)((u64)p.planes * (group + 1) / groups);
	const u32 left = (u32)((u64)plane * part / p.parts), right = (u32)((u64)plane * (part + 1) / p.parts);
	const bool top = first == 0 && p.above, bottom = end == p.planes && p.below;
	const float *from = reinterpret_cast<const float *>(p.from);
	const float *inbox = reinterpret_cast<const float *>(p.inbox);
	float *to = reinterpret_cast<float *>(p.to);
	const u64 at = left * sizeof(float), edge = plane * sizeof(float);
	const u32 bytes = (u32)((right - left) * sizeof(float));
	status s = status::ok;

	// The neighbours' planes of the step before are complete once their signals are here. Each wait ends by the GPU's clock.
	if (p.pushes && p.step > 1) {
		if (top) {
			queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.above));
			s = wait_signal<block>(qp, part, p.step - 1);
		}
		if (bottom && s == status::ok) {
			queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.below));
			s = wait_signal<block>(qp, part, p.step - 1);
		}
	}
	// The host has put the planes of step 0 there.
	const float *up = top ? inbox + (u64)half(p.step - 1, 0) * plane : nullptr;
	const float *down = bottom ? inbox + (u64)half(p.step - 1, 1) * plane : nullptr;

	if (s == status::ok)
		for (u32 within = left + thread_index(); within < right; within += block_size())
			halo_column(from, to, up, down, p.side, p.planes, first, end, within);
	// All of the block's cells are written, and nobody reads its part of the inbox any more.
	block_barrier();
	if (p.pushes && s == status::ok) {
		// What is this rank's first plane is the neighbour's plane below, and the other way round.
		if (top) {
			queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.above));
			s = put_signal<block>(qp, p.above_rkey, half(p.step, 1) * edge + at, to + left, bytes, part, p.step);
			if (s == status::ok && p.pushes == 2)
				s = flush<block>(qp);
		}
		if (bottom && s == status::ok) {
			queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.below));
			s = put_signal<block>(qp, p.below_rkey, half(p.step, 0) * edge + at,
					      to + (u64)(p.planes - 1) * plane + left, bytes, part, p.step);
			if (s == status::ok && p.pushes == 2)
				s = flush<block>(qp);
		}
	}
	// A block that failed stays failed.
	u64 *result = reinterpret_cast<u64 *>(p.result) + block_index();
	if (thread_index() == 0 && *result == 0)
		*result = (u64)s;
}
