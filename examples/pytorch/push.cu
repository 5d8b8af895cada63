// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernels of push.py: the bytes of a tensor into the peer's tensor, and the wait for what the peer pushes here.
#include "pushgate/device.cuh"

using namespace pushgate;

// What the host passes, field by field the same as `Params` in push.py.
struct tensor_params {
	u64 qp;
	u64 data;
	u64 bytes;
	u64 count;  // how many tensors were pushed here with this one: the value of the signal
	u64 result; // u64: how it ended
	u32 rkey;
	u32 chunk; // bytes of a message
};

// All threads of one block share the work.
PUSHGATE_KERNEL(push_tensor, tensor_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	status s = status::ok;

	for (u64 at = 0; at < p.bytes && s == status::ok; at += p.chunk) {
		const u64 left = p.bytes - at;
		s = put<block>(qp, p.rkey, at, reinterpret_cast<const u8 *>(p.data) + at, (u32)(left < p.chunk ? left : p.chunk));
	}
	// Comes after all that was put.
	if (s == status::ok)
		s = signal<block>(qp, 0, p.count);
	// The peer pushes too: its tensor is complete once its signal is here. The wait ends by the GPU's clock, if not before.
	if (s == status::ok)
		s = wait_signal<block>(qp, 0, p.count);
	if (s == status::ok)
		s = flush<block>(qp);
	if (thread_index() == 0)
		*reinterpret_cast<u64 *>(p.result) = (u64)s;
}
