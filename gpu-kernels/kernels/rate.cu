// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Rate of small messages, and the ceiling to compare with: bare records without flow control.
#include "pushgate/device.cuh"

using namespace pushgate;

struct rate_params {
	u64 qp;	    // pushgate_qp
	u64 result; // u64 for each block: status
	u64 count;  // messages of each thread (single) or of each warp, a multiple of 32
	u32 single; // 1: one thread sends each message by itself; 0: a warp 32 at once
	u32 pad;
};

PUSHGATE_KERNEL(rate_send, rate_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	status s = status::ok;
	if (p.single) {
		if (thread_index() != 0)
			return;
		for (u64 i = 0; i < p.count && s == status::ok; i++)
			s = send<thread>(qp, &i, 8);
	} else {
		u32 lanes = warp::size();
		for (u64 i = 0; i < p.count && s == status::ok; i += lanes) {
			batch<warp> b(qp);
			s = b.begin(lanes, 0);
			if (s != status::ok)
				break;
			u64 value = i + warp::rank();
			send_wr wr;
			wr.opcode = opcode::send;
			wr.payload = &value;
			wr.length = 8;
			b.set(warp::rank(), wr);
			b.publish(true);
		}
	}
	if (s != status::ok)
		reinterpret_cast<u64 *>(p.result)[block_index()] = (u64)s;
}

struct rate_sink_params {
	u64 qp;	    // pushgate_qp
	u64 result; // u64[3]: status, messages, sum of their values
	u64 count;  // messages in all
};

// One block; each thread takes one message at a time.
PUSHGATE_KERNEL(rate_sink, rate_sink_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 sum = 0, got = 0;
	status s = status::ok;
	message m;
	while (got + block_size() <= p.count && s == status::ok) {
		s = recv_each<block>(qp, m);
		if (s != status::ok)
			break;
		sum += m.words[0];
		got += block_size();
		release<block>(qp, block_size(), true);
	}
	u64 rest = p.count - got;
	for (u64 i = 0; i < rest && s == status::ok; i++) {
		s = recv<block>(qp, m);
		if (s == status::ok) {
			sum += thread_index() == 0 ? m.words[0] : 0;
			got++;
			release<block>(qp, 1, true);
		}
	}
	// Sums over all threads, one after the other: slow, but it runs once, at the end.
	u64 *result = reinterpret_cast<u64 *>(p.result);
	for (u32 t = 0; t < block_size(); t++) {
		if (thread_index() == t)
			result[2] += sum;
		block_barrier();
	}
	if (thread_index() == 0) {
		result[0] = (u64)s;
		result[1] = got;
		qp.close();
	}
}

struct bare_records_params {
	u64 dst;   // ring of 64-byte records
	u64 slots; // a power of two
	u64 count; // records of each thread
};

// Each thread writes whole records with a lap number, as fast as it can, without flow control:
// `count` records each, spread over the ring.
PUSHGATE_KERNEL(bare_records, bare_records_params)
{
	u64 first = (u64)block_index() * block_size() + thread_index();
	u64 step = (u64)grid_size() * block_size();
	for (u64 i = 0; i < p.count; i++) {
		u64 n = first + i * step;
		u64 *w = reinterpret_cast<u64 *>(p.dst) + (n & (p.slots - 1)) * 8;
		for (u32 j = 0; j < 8; j += 2)
			store_pair(w + j, n + 1, n + 1);
	}
}
