// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Pushing into a window, and the ceiling to compare with: the same stores without window, credit or
// WQE.
#include "pushgate/device.cuh"

using namespace pushgate;

struct bare_store_params {
	u64 dst;
	u64 bytes;  // of one round of one block, a multiple of 16
	u64 places; // rounds go to this many places in turn, those of all blocks side by side
	u64 rounds;
};

PUSHGATE_KERNEL(bare_store, bare_store_params)
{
	u64 n = p.bytes / 16, lanes = block_size();
	for (u64 r = 0; r < p.rounds; r++) {
		u64x2 *dst = reinterpret_cast<u64x2 *>(p.dst + (r % p.places * grid_size() + block_index()) * p.bytes);
		for (u64 i = thread_index(); i < n; i += lanes)
			store_payload(dst + i, u64x2{r, i});
	}
}

struct push_params {
	u64 qps;    // pushgate_qp[n_qps]; block b sends over the (b % n_qps)-th
	u64 result; // u64 for each block: status
	u64 bytes;  // of a message
	u64 rounds; // messages of a block
	u32 n_qps;
	u32 pad;
};

// Each block pushes `rounds` messages; all blocks of a queue pair push at once.
PUSHGATE_KERNEL(push_window, push_params)
{
	queue_pair qp(reinterpret_cast<const pushgate_qp *>(p.qps)[block_index() % p.n_qps]);
	batch<block> b(qp);
	status s = status::ok;
	for (u64 r = 0; r < p.rounds; r++) {
		s = b.begin(1, (u32)p.bytes);
		if (s != status::ok)
			break;
		u64x2 *dst = static_cast<u64x2 *>(b.payload(0));
		u64 n = p.bytes / 16, lanes = block_size();
		for (u64 i = thread_index(); i < n; i += lanes)
			store_payload(dst + i, u64x2{r, i});
		if (thread_index() == 0) {
			send_wr wr;
			wr.opcode = opcode::send;
			wr.length = (u32)p.bytes;
			b.set(0, wr);
		}
		b.publish();
	}
	if (thread_index() == 0)
		reinterpret_cast<u64 *>(p.result)[block_index()] = (u64)s;
}

struct sink_params {
	u64 qps;    // pushgate_qp[grid]
	u64 result; // u64 for each block: status
	u64 count;  // messages of each queue pair
};

// One block for each queue pair takes the messages and releases them unread.
PUSHGATE_KERNEL(sink, sink_params)
{
	if (thread_index() != 0)
		return;
	queue_pair qp(reinterpret_cast<const pushgate_qp *>(p.qps)[block_index()]);
	message m;
	status s = status::ok;
	for (u64 i = 0; i < p.count && s == status::ok; i++) {
		s = recv(qp, m);
		if (s == status::ok)
			release(qp);
	}
	qp.close();
	reinterpret_cast<u64 *>(p.result)[block_index()] = (u64)s;
}

struct hand_over_params {
	u64 qp;	    // pushgate_qp
	u64 result; // u64: status
	u64 bytes;  // of a message
	u64 count;
	u32 rkey; // 0: a send, which the peer takes in place
	u32 pad;
};

// Posts a payload that lies in the window already, and waits until the peer has it: the queue
// pair's own part of a transfer. One thread.
PUSHGATE_KERNEL(hand_over, hand_over_params)
{
	if (thread_index() != 0)
		return;
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	status s = status::ok;
	for (u64 i = 0; i < p.count && s == status::ok; i++) {
		batch<thread> b(qp);
		s = b.begin(1, (u32)p.bytes);
		if (s != status::ok)
			break;
		send_wr wr;
		wr.opcode = p.rkey ? opcode::put : opcode::send;
		wr.rkey = p.rkey;
		wr.length = (u32)p.bytes;
		b.set(0, wr);
		b.publish();
	}
	if (s == status::ok)
		s = flush(qp);
	*reinterpret_cast<u64 *>(p.result) = (u64)s;
}
