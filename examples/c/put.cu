// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernel of put.c: each rank puts its data into the other's memory, with a signal after it.
#include "pushgate/device.cuh"

using namespace pushgate;

// What the host passes, field by field the same as `struct put_params` in put.c.
struct put_params {
	u64 qp;     // one pushgate_qp in device memory
	u64 data;   // this rank's data
	u64 result; // u64: how it ended
	u32 rkey;   // the other rank's region
	u32 bytes;
};

// All threads of one block share the work.
PUSHGATE_KERNEL(put_to_peer, put_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));

	// When the data is there, the peer's signal 0 is 1.
	status s = put_signal<block>(qp, p.rkey, 0, reinterpret_cast<const void *>(p.data), p.bytes, 0, 1);
	// What the other rank put is complete once its signal is here.
	if (s == status::ok)
		s = wait_signal<block>(qp, 0, 1);
	// The other rank has what was put: the host may close everything.
	if (s == status::ok)
		s = flush<block>(qp);
	if (thread_index() == 0)
		*reinterpret_cast<u64 *>(p.result) = (u64)s;
}
