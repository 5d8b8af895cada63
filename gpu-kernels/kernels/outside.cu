// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Messages that can be checked byte by byte: every 16 bytes hold the message's number and their own
// place in the message. For devices that share nothing but a window with their proxy
// (examples/outside.rs).
#include "pushgate/device.cuh"

using namespace pushgate;

struct outside_send_params {
	u64 qp;	    // pushgate_qp
	u64 result; // u64: status
	u64 first;  // number of the first message
	u64 count;  // messages
	u64 bytes;  // of each, a multiple of 16
};

// One block pushes `count` messages, then waits until the peer has them.
PUSHGATE_KERNEL(outside_send, outside_send_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	batch<block> b(qp);
	status s = status::ok;
	for (u64 r = p.first; r < p.first + p.count; r++) {
		s = b.begin(1, (u32)p.bytes);
		if (s != status::ok)
			break;
		u64x2 *dst = static_cast<u64x2 *>(b.payload(0));
		for (u64 i = thread_index(); i < p.bytes / 16; i += block_size())
			store_payload(dst + i, u64x2{r, i});
		if (thread_index() == 0) {
			send_wr wr;
			wr.opcode = opcode::send;
			wr.length = (u32)p.bytes;
			b.set(0, wr);
		}
		b.publish();
	}
	if (s == status::ok)
		s = flush<block>(qp);
	if (thread_index() == 0)
		*reinterpret_cast<u64 *>(p.result) = (u64)s;
}

struct outside_take_params {
	u64 qp;	    // pushgate_qp
	u64 result; // u64[3]: status, messages, pairs of words that were wrong
	u64 count;
	u64 bytes; // of each
};

// One block takes `count` messages, numbered from 0, and checks every byte.
PUSHGATE_KERNEL(outside_take, outside_take_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 *result = reinterpret_cast<u64 *>(p.result);
	u64 wrong = 0, got = 0;
	status s = status::ok;
	message m;
	for (; got < p.count; got++) {
		s = recv<block>(qp, m);
		if (s != status::ok)
			break;
		if (m.length != p.bytes || !m.data)
			wrong += p.bytes / 16;
		else
			for (u64 i = thread_index(); i < p.bytes / 16; i += block_size()) {
				u64x2 v = load_payload(static_cast<const u64x2 *>(m.data) + i);
				wrong += v.x != got || v.y != i;
			}
		release<block>(qp);
	}
	// Sums over all threads, one after the other: slow, but it runs once, at the end.
	for (u32 t = 0; t < block_size(); t++) {
		if (thread_index() == t)
			result[2] += wrong;
		block_barrier();
	}
	if (thread_index() == 0) {
		result[0] = (u64)s;
		result[1] = got;
		qp.close();
	}
}
