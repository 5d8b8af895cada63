// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Ping-pong through the proxy, and the lowest latency to compare with: a bare flag (and payload)
// that a CPU thread relays.
#include "pushgate/device.cuh"

using namespace pushgate;

// Reads what arrived, so that the cost of reading is part of the measurement, and counts the words
// that are not `expected`. Each thread reads its share.
PUSHGATE_DEVICE u64 wrong_words(const void *data, u64 bytes, u64 expected)
{
	u64 wrong = 0;
	const u64x2 *src = static_cast<const u64x2 *>(data);
	for (u64 i = thread_index(); i < bytes / 16; i += block_size()) {
		u64x2 v = load_payload(src + i);
		wrong += v.x != expected || v.y != i;
	}
	return wrong;
}

PUSHGATE_DEVICE void fill(void *data, u64 bytes, u64 v)
{
	u64x2 *dst = static_cast<u64x2 *>(data);
	for (u64 i = thread_index(); i < bytes / 16; i += block_size())
		store_payload(dst + i, u64x2{v, i});
}

struct pingpong_params {
	u64 qps;    // pushgate_qp[grid]: each block's own end
	u64 result; // u64[3] for each block: status, nanoseconds, wrong words or messages
	u64 bytes;  // 8 to 40: inline; more: a multiple of 16, in the window
	u64 warmup;
	u64 rounds;
	u32 first; // role of block 0: 0 sends first, 1 answers
	u32 pad;
};

// Sums the wrong words of all threads of the block; thread 0 gets the sum.
PUSHGATE_DEVICE u64 sum_of_block(u64 v)
{
	u64 sum = 0;
	for (u32 t = 0; t < block_size(); t++) {
		// One thread after the other, through thread 0: this is slow, but it runs once, at
		// the end.
		u64 one = block_any(thread_index() == t ? (u32)(v > 0xffffffffu ? 0xffffffffu : v) : 0);
		sum += one;
	}
	return sum;
}

// Answers each message. Work that can be done before a message arrives is done before: room is
// reserved and the WQE written up to its first word. Work that can wait is done once the answer is
// on its way: the message is released then. Neither adds to the time between the message and its
// answer.
template <class S> PUSHGATE_DEVICE void bounce(const pingpong_params &p)
{
	queue_pair qp(reinterpret_cast<const pushgate_qp *>(p.qps)[block_index()]);
	u64 *result = reinterpret_cast<u64 *>(p.result) + 3 * block_index();
	bool answers = (p.first + block_index()) % 2;
	bool in = p.bytes <= PUSHGATE_INLINE_SEND;
	u64 start = 0, wrong = 0;
	status s = status::ok;
	for (u64 r = 0; r < p.warmup + p.rounds && s == status::ok; r++) {
		if (r == p.warmup)
			start = clock_ns();
		batch<S> b(qp);
		s = b.begin(1, in ? 0 : (u32)p.bytes);
		if (s != status::ok)
			break;
		u64 v[5] = {r, r, r, r, r};
		if (S::rank() == 0) {
			send_wr wr;
			wr.opcode = opcode::send;
			wr.payload = in ? v : nullptr;
			wr.length = (u32)p.bytes;
			b.set(0, wr);
		}
		// In round 0 the side that begins has no message to wait for.
		bool holds = answers || r > 0;
		message m;
		if (holds) {
			s = recv<S>(qp, m);
			if (s != status::ok) {
				b.cancel();
				break;
			}
			if (!in)
				wrong += wrong_words(m.data, p.bytes, answers ? r : r - 1);
		}
		if (!in)
			fill(b.payload(0), p.bytes, r);
		b.publish(in);
		if (holds) {
			if (in)
				wrong += m.words[0] != (answers ? r : r - 1) || m.length != p.bytes;
			release<S>(qp, 1, in);
		}
	}
	// Takes the last answer.
	if (!answers && s == status::ok) {
		message m;
		s = recv<S>(qp, m);
		if (s == status::ok)
			release<S>(qp, 1, in);
	}
	u64 end = clock_ns();
	if (!in)
		wrong = sum_of_block(wrong);
	if (S::rank() == 0) {
		result[0] = (u64)s;
		result[1] = end - start;
		result[2] = wrong;
		qp.close();
	}
}

PUSHGATE_KERNEL(pingpong, pingpong_params)
{
	if (block_size() == 1)
		bounce<thread>(p);
	else if (block_size() <= 32)
		bounce<warp>(p);
	else
		bounce<block>(p);
}

struct relay_params {
	u64 out;    // u64 for each block: the flag it writes
	u64 in;	    // u64 for each block: the flag it waits for
	u64 stride; // bytes between two blocks' flags
	u64 payload; // for each block, p.bytes apart; 0 bytes: none
	u64 result; // u64[3] for each block: status, nanoseconds, wrong words or messages
	u64 bytes;
	u64 warmup;
	u64 rounds;
	u64 limit_ns;
};

PUSHGATE_KERNEL(bare_relay, relay_params)
{
	u64 *out = reinterpret_cast<u64 *>(p.out + block_index() * p.stride);
	const u64 *in = reinterpret_cast<const u64 *>(p.in + block_index() * p.stride);
	void *payload = reinterpret_cast<u8 *>(p.payload) + block_index() * p.bytes;
	const void *arrived = reinterpret_cast<const u8 *>(p.payload) + (1 - block_index()) * p.bytes;
	u64 *result = reinterpret_cast<u64 *>(p.result) + 3 * block_index();
	u64 start = 0, wrong = 0, began = clock_ns(), failed = 0;
	for (u64 r = 0; r < p.warmup + p.rounds && !failed; r++) {
		if (r == p.warmup)
			start = clock_ns();
		for (u32 half = 0; half < 2 && !failed; half++) {
			if (half == block_index()) {
				if (p.bytes) {
					fill(payload, p.bytes, r);
					block_barrier();
				}
				if (thread_index() == 0) {
					if (p.bytes)
						store<order::release>(out, r + 1);
					else
						store<order::relaxed>(out, r + 1);
				}
			} else {
				if (thread_index() == 0) {
					backoff pause;
					for (u32 n = 1; load<order::acquire>(in) != r + 1; n++) {
						if (n % 64 == 0 && clock_ns() - began > p.limit_ns) {
							failed = 1;
							break;
						}
						pause.wait();
					}
				}
				failed = block_broadcast(failed);
				if (p.bytes)
					wrong += wrong_words(arrived, p.bytes, r);
			}
		}
	}
	u64 end = clock_ns();
	wrong = sum_of_block(wrong);
	if (thread_index() == 0) {
		result[0] = failed ? (u64)status::timed_out : 0;
		result[1] = end - start;
		result[2] = wrong;
	}
}

struct idle_probe_params {
	u64 qp;	    // pushgate_qp
	u64 result; // u64[3]: status, sum and maximum of the round trips in nanoseconds
	u64 rounds;
	u64 gap_ns; // silence before each message
};

// Measures how long the proxy takes after a silence, from the message to the word that says that
// the peer has it. One thread.
PUSHGATE_KERNEL(idle_probe, idle_probe_params)
{
	if (thread_index() != 0)
		return;
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 *result = reinterpret_cast<u64 *>(p.result);
	u64 sum = 0, most = 0;
	status s = status::ok;
	for (u64 r = 0; r < p.rounds && s == status::ok; r++) {
		backoff pause;
		for (u64 start = clock_ns(); clock_ns() - start < p.gap_ns;)
			pause.wait();
		u64 start = clock_ns();
		s = signal(qp, 0, r + 1);
		if (s == status::ok)
			s = flush(qp);
		u64 took = clock_ns() - start;
		sum += took;
		most = took > most ? took : most;
	}
	result[0] = (u64)s;
	result[1] = sum;
	result[2] = most;
}
