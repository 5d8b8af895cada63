// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A Jacobi step over this rank's rows. The blocks at the edges wait for the neighbour's row and push their own: no host between.
#include "pushgate/device.cuh"

using namespace pushgate;

// What the host passes, field by field the same as `struct halo_params` in halo.c.
struct halo_params {
	u64 above;  // pushgate_qp to the rank above, or 0
	u64 below;  // pushgate_qp to the rank below, or 0
	u64 from;   // float[rows][columns]
	u64 to;	    // float[rows][columns]
	u64 inbox;  // float[4][columns]: the row above of even and of odd steps, the row below likewise
	u64 result; // u64 for each block: how it ended
	u32 above_rkey;
	u32 below_rkey;
	u32 rows;
	u32 columns;
	u32 step;   // from 1
	u32 pushes; // 0: the host brings the rows; 2: the last step, which waits until the neighbours have all of them
};

// A row of one step lies in the half of its parity. The neighbour overwrites that half two steps later, and it gets there only
// with the row of the step between, which this rank sends when it is done with the half.
PUSHGATE_DEVICE u32 half(u32 step, u32 side) { return side * 2 + step % 2; }

PUSHGATE_KERNEL(halo_step, halo_params)
{
	// Rows are divided among the blocks.
	const u32 first = (u32)((u64)p.rows * block_index() / grid_size());
	const u32 end = (u32)((u64)p.rows * (block_index() + 1) / grid_size());
	const bool top = first == 0 && p.above, bottom = end == p.rows && p.below;
	const float *from = reinterpret_cast<const float *>(p.from);
	const float *inbox = reinterpret_cast<const float *>(p.inbox);
	float *to = reinterpret_cast<float *>(p.to);
	const u64 bytes = p.columns * sizeof(float);
	status s = status::ok;

	// The neighbours' rows of the step before are complete once their signals are here. Each wait ends by the GPU's clock.
	if (p.pushes && p.step > 1) {
		if (top) {
			queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.above));
			s = wait_signal<block>(qp, 0, p.step - 1);
		}
		if (bottom && s == status::ok) {
			queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.below));
			s = wait_signal<block>(qp, 0, p.step - 1);
		}
	}
	// The host has put the rows of step 0 there. Beyond an edge without a neighbour is 0.
	const float *up = top ? inbox + (u64)half(p.step - 1, 0) * p.columns : nullptr;
	const float *down = bottom ? inbox + (u64)half(p.step - 1, 1) * p.columns : nullptr;

	if (s == status::ok) {
		for (u64 i = (u64)first * p.columns + thread_index(); i < (u64)end * p.columns; i += block_size()) {
			const u32 row = (u32)(i / p.columns), column = (u32)(i % p.columns);
			const float n = row > 0 ? from[i - p.columns] : up ? up[column] : 0.0f;
			const float o = row + 1 < p.rows ? from[i + p.columns] : down ? down[column] : 0.0f;
			const float w = column > 0 ? from[i - 1] : 0.0f;
			const float e = column + 1 < p.columns ? from[i + 1] : 0.0f;

			// A sum of four and one product: no compiler contracts it, so every device computes the same bits.
			to[i] = ((n + o) + (w + e)) * 0.25f;
		}
	}
	// All of the block's rows are written, and nobody reads the inbox any more.
	block_barrier();
	if (p.pushes && s == status::ok) {
		// What is this rank's first row is the neighbour's row below, and the other way round.
		if (top) {
			queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.above));
			s = put_signal<block>(qp, p.above_rkey, half(p.step, 1) * bytes, to, (u32)bytes, 0, p.step);
			if (s == status::ok && p.pushes == 2)
				s = flush<block>(qp);
		}
		if (bottom && s == status::ok) {
			queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.below));
			s = put_signal<block>(qp, p.below_rkey, half(p.step, 0) * bytes, to + (u64)(p.rows - 1) * p.columns,
					      (u32)bytes, 0, p.step);
			if (s == status::ok && p.pushes == 2)
				s = flush<block>(qp);
		}
	}
	// A block that failed stays failed.
	u64 *result = reinterpret_cast<u64 *>(p.result) + block_index();
	if (thread_index() == 0 && *result == 0)
		*result = (u64)s;
}
