// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernel of ring.c: puts into the next rank's memory, and waits for what the rank before puts here.
#include "pushgate/device.cuh"

using namespace pushgate;

// What the host passes, field by field the same as `struct ring_params` in ring.c.
struct ring_params {
	u64 next;     // pushgate_qp to the next rank
	u64 previous; // pushgate_qp to the rank before
	u64 data;
	u64 result; // u64: how it ended
	u32 rkey;   // the next rank's region
	u32 bytes;
};

PUSHGATE_KERNEL(ring_step, ring_params)
{
	queue_pair next(*reinterpret_cast<const pushgate_qp *>(p.next));
	queue_pair previous(*reinterpret_cast<const pushgate_qp *>(p.previous));

	status s = put_signal<block>(next, p.rkey, 0, reinterpret_cast<const void *>(p.data), p.bytes, 0, 1);
	if (s == status::ok)
		s = wait_signal<block>(previous, 0, 1);
	if (s == status::ok)
		s = flush<block>(next);
	if (thread_index() == 0)
		*reinterpret_cast<u64 *>(p.result) = (u64)s;
}
