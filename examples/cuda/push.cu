// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A kernel that computes and sends in one go: what it computes goes into the window as it is computed, without a buffer between.
// nvcc compiles this file into the program for a GPU; the library compiles the same file for the CPU executor.
#include "pushgate/device.cuh"

#include "push.h"

using namespace pushgate;

// All threads of one block share the work.
PUSHGATE_KERNEL(push_to_peer, push_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	status s = status::ok;

	for (u32 first = 0; first < p.words && s == status::ok; first += p.chunk) {
		batch<block> b(qp);

		// Takes room in the window. The wait is bounded by the clock: it ends with credit or with a cause.
		s = b.begin(1, p.chunk * sizeof(u32));
		if (s != status::ok)
			break;
		// The GPU computes 16 bytes and stores them right there.
		u64x2 *room = static_cast<u64x2 *>(b.payload(0));
		for (u32 i = thread_index(); i < p.chunk / 4; i += block_size()) {
			const u32 w = first + 4 * i;

			store_payload(room + i, u64x2{PUSH_WORD(p.rank, w) | (u64)PUSH_WORD(p.rank, w + 1) << 32,
						      PUSH_WORD(p.rank, w + 2) | (u64)PUSH_WORD(p.rank, w + 3) << 32});
		}
		if (thread_index() == 0) {
			send_wr wr;

			wr.opcode = opcode::put;
			wr.length = p.chunk * sizeof(u32);
			wr.rkey = p.rkey;
			wr.remote_offset = (u64)first * sizeof(u32);
			b.set(0, wr);
		}
		b.publish();
	}
	// Comes after all that was put.
	if (s == status::ok)
		s = signal<block>(qp, 0, 1);
	// What the other rank put is complete once its signal is here.
	if (s == status::ok)
		s = wait_signal<block>(qp, 0, 1);
	// The other rank has all of it: the host may close everything.
	if (s == status::ok)
		s = flush<block>(qp);
	if (thread_index() == 0)
		*reinterpret_cast<u64 *>(p.result) = (u64)s;
}
