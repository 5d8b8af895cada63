// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Latency and bandwidth between two ranks in the form of the OSU micro-benchmarks: each iteration
// is messages one way and an answer, or messages both ways.
#include "pushgate/device.cuh"

using namespace pushgate;

struct osu_params {
	u64 qp;	    // pushgate_qp
	u64 result; // u64[2] for each block: status, nanoseconds of all rounds
	u64 src;    // our messages, `stride` apart
	u64 stride; // of messages, here and at the peer
	u64 bytes;  // of a message; 0: signals alone
	u64 slice;  // most bytes of one put out of the window
	u64 first;  // iterations that this queue pair has already run: its signals have that value
	u64 warmup;
	u64 rounds;
	u32 messages;	  // messages that we send in an iteration; 0: a signal alone
	u32 places;	  // message m lies, and lands, at place m % places
	u32 batch;	  // most puts that are published together
	u32 senders;	  // blocks of ours that send, each with a signal of its own
	u32 peer_senders; // blocks of the peer that send, each with a signal of its own
	u32 lkey;	  // 0: pushed into the window; else the region of `src`, sent in place
	u32 rkey;	  // where our messages land
	u32 answers;	  // 1: the peer begins
	u32 flushes;	  // 1: an iteration ends when the peer has what we sent, too
	u32 pad;
};

// One stretch of a message: the bytes that one put carries.
struct stretch {
	u64 offset; // from the first place on
	u32 bytes;
};

PUSHGATE_DEVICE stretch stretch_of(const osu_params &p, u64 slices, u64 unit)
{
	u64 begin = unit % slices * p.slice, left = p.bytes - begin;
	return {unit / slices % p.places * p.stride + begin, (u32)(left < p.slice ? left : p.slice)};
}

// Sends this block's share of an iteration's messages, and this block's signal after the last of
// them.
//
// Payload before WQE (P3): all threads store, publish() holds them at a barrier and then releases
// the batch's first word; the proxy reads the other words only after that one. Data before signal:
// messages of one queue pair arrive in order, and this block's signal travels in this block's last
// put or after it; other blocks have signals of their own. While a kernel runs, sources are only
// read, so the same place may be sent again at once. The memory where messages land is read only
// after the kernels of both ends have ended.
template <class S> PUSHGATE_DEVICE status send_share(queue_pair &qp, const osu_params &p, u64 value)
{
	u64 slices = p.bytes > p.slice ? (p.bytes + p.slice - 1) / p.slice : 1;
	u64 units = p.messages * slices, b = block_index();
	if (p.messages == 0)
		return b == 0 ? signal<S>(qp, 0, value) : status::ok;
	u64 mine = b < units ? (units - b + p.senders - 1) / p.senders : 0;
	bool in = p.lkey == 0 && p.bytes <= PUSHGATE_INLINE_PUT;
	u64 longest = p.bytes < p.slice ? p.bytes : p.slice;
	u32 room = in || p.lkey ? 0 : (u32)longest;
	// How many threads share one put: enough for the loads that each thread has in flight.
	u32 lanes = (u32)((longest + 63) / 64);
	lanes = lanes < 1 ? 1 : lanes > S::size() ? S::size() : lanes;
	for (u64 i = 0; i < mine; i += p.batch) {
		u32 n = (u32)(mine - i < p.batch ? mine - i : p.batch);
		batch<S> posts(qp);
		status s = posts.begin(n, room);
		if (s != status::ok)
			return s;
		u32 groups = S::size() / lanes, group = S::rank() / lanes;
		if (room && group < groups)
			for (u32 k = group; k < n; k += groups) {
				stretch t = stretch_of(p, slices, b + (i + k) * p.senders);
				push_payload(posts.payload(k), reinterpret_cast<const u8 *>(p.src) + t.offset, t.bytes,
					     S::rank() % lanes, lanes);
			}
		for (u32 k = S::rank(); k < n; k += S::size()) {
			stretch t = stretch_of(p, slices, b + (i + k) * p.senders);
			bool last = i + k + 1 == mine;
			send_wr wr;
			wr.signal = (u32)b;
			if (p.bytes == 0) {
				// A signal with the value that the peer already has changes
				// nothing.
				wr.opcode = opcode::signal;
				wr.value = last ? value : value - 1;
			} else {
				wr.opcode = opcode::put;
				wr.with_signal = last;
				wr.value = last ? value : 0;
				wr.length = t.bytes;
				wr.rkey = p.rkey;
				wr.remote_offset = t.offset;
				wr.payload = in ? reinterpret_cast<const u8 *>(p.src) + t.offset : nullptr;
				wr.from_region = p.lkey != 0;
				wr.lkey = p.lkey;
				wr.local_offset = t.offset;
			}
			posts.set(k, wr);
		}
		posts.publish(in);
	}
	return status::ok;
}

// Waits until every block of the peer has sent its share, with one thread for each signal. What one
// thread has acquired, the other threads have after any()'s barrier. The wait ends with a status
// when the peer is lost or takes longer than the queue pair's limit, as all waits here do (P7).
template <class S> PUSHGATE_DEVICE status wait_for_peer(queue_pair &qp, const osu_params &p, u64 value)
{
	u32 bad = 0;
	for (u32 b = S::rank(); b < p.peer_senders && !bad; b += S::size())
		bad = (u32)wait_signal<thread>(qp, b, value);
	return static_cast<status>(S::any(bad));
}

template <class S> PUSHGATE_DEVICE void exchange(const osu_params &p)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 start = 0;
	status s = status::ok;
	for (u64 r = 0; r < p.warmup + p.rounds && s == status::ok; r++) {
		if (r == p.warmup)
			start = clock_ns();
		u64 value = p.first + r + 1;
		if (p.answers)
			s = wait_for_peer<S>(qp, p, value);
		if (s == status::ok)
			s = send_share<S>(qp, p, value);
		if (s == status::ok && !p.answers)
			s = wait_for_peer<S>(qp, p, value);
		if (s == status::ok && p.flushes)
			s = flush<S>(qp);
	}
	u64 end = clock_ns();
	// After this flush nothing is under way when the kernel ends, so the memory may change
	// then.
	if (s == status::ok)
		s = flush<S>(qp);
	if (S::rank() == 0) {
		u64 *result = reinterpret_cast<u64 *>(p.result) + 2 * block_index();
		result[0] = (u64)s;
		result[1] = end - start;
	}
}

PUSHGATE_KERNEL(osu_exchange, osu_params)
{
	if (block_size() == 1)
		exchange<thread>(p);
	else
		exchange<block>(p);
}
