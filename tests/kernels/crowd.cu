// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Many threads at once on one queue pair.
#include "pushgate/device.cuh"

using namespace pushgate;

PUSHGATE_DEVICE void add(u64 *p, u64 n)
{
	u64 seen = load_device<order::relaxed>(p), old;
	do {
		old = seen;
		seen = compare_and_swap(p, old, old + n);
	} while (seen != old);
}

// The content of word `j` of message `sequence` of `producer`.
PUSHGATE_DEVICE u64 word(u64 producer, u64 sequence, u64 j)
{
	return (producer << 32 | sequence) ^ j * 0x9e3779b97f4a7c15ull;
}

// The length of a message in words: a mix of inline ones, odd sizes, and up to `most` words.
PUSHGATE_DEVICE u32 words(u64 producer, u64 sequence, u32 most)
{
	u32 k = (u32)(producer * 7 + sequence) % 5;
	return k < 2 ? k + 1 : k == 2 ? 5 : k == 3 ? 6 + (most - 6) / 3 : most;
}

struct crowd_params {
	u64 qp;	      // pushgate_qp
	u64 scratch;  // producers: u64[most] for each
	u64 next;     // sink: u64 for each producer, zero: its next sequence number
	u64 result;   // u64[4]: status, messages, wrong ones
	u64 producers;
	u64 each;     // messages of a producer
	u32 most;     // words of the longest message
	u32 pad;
};

PUSHGATE_DEVICE u64 producer(thread) { return (u64)block_index() * block_size() + thread_index(); }
PUSHGATE_DEVICE u64 producer(warp) { return (u64)block_index() * (block_size() / 32) + thread_index() / 32; }
PUSHGATE_DEVICE u64 producer(block) { return block_index(); }

template <class S> PUSHGATE_DEVICE void push(const crowd_params &p)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 me = producer(S());
	u64 *data = reinterpret_cast<u64 *>(p.scratch) + me * p.most;
	status s = status::ok;
	for (u64 i = 0; i < p.each && s == status::ok; i++) {
		u32 n = words(me, i, p.most);
		for (u32 j = S::rank(); j < n; j += S::size())
			data[j] = word(me, i, j);
		S::sync();
		s = send<S>(qp, data, n * 8, (u32)me);
	}
	if (s != status::ok && S::rank() == 0)
		reinterpret_cast<u64 *>(p.result)[0] = (u64)s;
}

PUSHGATE_KERNEL(push_thread, crowd_params) { push<thread>(p); }
PUSHGATE_KERNEL(push_warp, crowd_params) { push<warp>(p); }
PUSHGATE_KERNEL(push_block, crowd_params) { push<block>(p); }

// One block takes all messages and checks that every word is right and every producer's messages
// are in order.
PUSHGATE_KERNEL(crowd_sink, crowd_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 *next = reinterpret_cast<u64 *>(p.next), *result = reinterpret_cast<u64 *>(p.result);
	status s = status::ok;
	u64 got = 0, wrong = 0;
	for (; got < p.producers * p.each; got++) {
		message m;
		s = recv<block>(qp, m);
		if (s != status::ok)
			break;
		u64 from = m.tag < p.producers ? m.tag : 0, i = next[from];
		u32 n = words(from, i, p.most);
		const u64 *data = m.is_inline ? m.words : static_cast<const u64 *>(m.data);
		if (m.tag >= p.producers || m.length != n * 8)
			wrong += thread_index() == 0;
		else
			for (u32 j = thread_index(); j < n; j += block_size())
				wrong += data[j] != word(from, i, j);
		release<block>(qp);
		if (thread_index() == 0)
			next[from] = i + 1;
		block_barrier();
	}
	if (wrong)
		add(result + 2, wrong);
	if (thread_index() == 0) {
		result[0] = (u64)s;
		result[1] = got;
		qp.close();
	}
}

// Words of a message in variables of the thread, or in shared memory of the block.
static constexpr u32 own_most = 64;

// One thread sends each message once out of its own variables and once out of shared memory.
PUSHGATE_KERNEL(own_push, crowd_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 mine[own_most], *shared = static_cast<u64 *>(shared_memory());
	status s = status::ok;
	for (u64 i = 0; i < p.each && s == status::ok; i++) {
		u64 *data = i % 2 ? shared : mine;
		u32 n = 1 + (u32)(i % p.most);
		for (u32 j = 0; j < n; j++)
			data[j] = word(1, i, j);
		s = send(qp, data, n * 8, (u32)i);
	}
	if (s == status::ok)
		s = flush(qp);
	reinterpret_cast<u64 *>(p.result)[0] = (u64)s;
}

// One thread copies each message into its own variables or into shared memory, and checks it there.
PUSHGATE_KERNEL(own_sink, crowd_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 mine[own_most], *shared = static_cast<u64 *>(shared_memory());
	u64 *result = reinterpret_cast<u64 *>(p.result), got = 0, wrong = 0;
	status s = status::ok;
	message m;
	for (; got < p.each; got++) {
		s = recv(qp, m);
		if (s != status::ok)
			break;
		u64 *data = got / 2 % 2 ? shared : mine;
		u32 n = 1 + (u32)(got % p.most);
		bool right = m.tag == got && m.length == n * 8;
		if (right)
			copy_out(data, m);
		for (u32 j = 0; right && j < n; j++)
			right = data[j] == word(1, got, j);
		wrong += !right;
		release(qp);
	}
	result[0] = (u64)s;
	result[1] = got;
	result[2] = wrong;
	qp.close();
}

struct completions_params {
	u64 qp;	    // pushgate_qp
	u64 seen;   // u64 for each work request, zero: its completions
	u64 result; // u64[4]: status, completions, wrong ones
	u64 each;   // work requests of a thread; every second is signaled
	u32 rkey;
	u32 first;  // wr_id of the first
};

PUSHGATE_DEVICE void take_completion(queue_pair &qp, const completions_params &p)
{
	wc c;
	if (!poll_cq(qp, c))
		return;
	u64 *result = reinterpret_cast<u64 *>(p.result);
	u64 total = (u64)grid_size() * block_size() * p.each, index = c.wr_id - p.first;
	if (index < total && c.opcode == opcode::put && c.status == status::ok && c.length == 8)
		add(reinterpret_cast<u64 *>(p.seen) + index, 1);
	else
		add(result + 2, 1);
	add(result + 1, 1);
}

// Every thread posts, and every thread polls completions, whichever thread they belong to.
PUSHGATE_KERNEL(completions, completions_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 *result = reinterpret_cast<u64 *>(p.result);
	u64 threads = (u64)grid_size() * block_size();
	u64 me = (u64)block_index() * block_size() + thread_index();
	u64 start = clock_ns();
	status s = status::ok;
	backoff pause;
	for (u64 k = 0; k < p.each && s == status::ok;) {
		u64 value = me * p.each + k + 1;
		send_wr wr;
		wr.opcode = opcode::put;
		wr.payload = &value;
		wr.length = 8;
		wr.rkey = p.rkey;
		wr.remote_offset = (value - 1) * 8;
		wr.signaled = k % 2 == 0;
		wr.wr_id = p.first + (u32)(value - 1);
		s = try_post_send(qp, wr);
		if (s == status::ok) {
			k++;
		} else if (s == status::again) {
			s = qp.health();
			take_completion(qp, p);
			pause.wait();
			if (clock_ns() - start > qp.q.limit_ns)
				s = status::timed_out;
		}
	}
	u64 expected = threads * ((p.each + 1) / 2);
	while (s == status::ok && load_device<order::relaxed>(result + 1) < expected) {
		take_completion(qp, p);
		pause.wait();
		if (clock_ns() - start > qp.q.limit_ns)
			s = status::timed_out;
	}
	if (s != status::ok)
		result[0] = (u64)s;
}

struct each_params {
	u64 qp;	    // pushgate_qp
	u64 result; // u64[4]: status, messages, wrong ones
	u64 rounds;
	u32 bytes;  // of a message, a multiple of 8; up to 40 they go inline
	u32 pad;
};

// A batch for each round, with one message for each thread.
template <class S> PUSHGATE_DEVICE void send_each(const each_params &p)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	bool in = p.bytes <= PUSHGATE_INLINE_SEND;
	status s = status::ok;
	for (u64 r = 0; r < p.rounds && s == status::ok; r++) {
		u64 value[5], i = r * S::size() + S::rank();
		batch<S> b(qp);
		s = b.begin(S::size(), in ? 0 : p.bytes);
		if (s != status::ok)
			break;
		for (u32 j = 0; j < 5; j++)
			value[j] = word(1, i, j);
		if (!in)
			for (u32 j = 0; j < p.bytes / 8; j++)
				static_cast<u64 *>(b.payload(S::rank()))[j] = word(1, i, j);
		send_wr wr;
		wr.opcode = opcode::send;
		wr.length = p.bytes;
		wr.payload = in ? value : nullptr;
		b.set(S::rank(), wr);
		b.publish(in);
	}
	if (S::rank() == 0)
		reinterpret_cast<u64 *>(p.result)[0] = (u64)s;
}

template <class S> PUSHGATE_DEVICE void take_each(const each_params &p)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 *result = reinterpret_cast<u64 *>(p.result);
	bool in = p.bytes <= PUSHGATE_INLINE_SEND;
	u64 wrong = 0;
	status s = status::ok;
	for (u64 r = 0; r < p.rounds && s == status::ok; r++) {
		message m;
		s = recv_each<S>(qp, m);
		if (s != status::ok)
			break;
		u64 i = r * S::size() + S::rank();
		wrong += m.length != p.bytes || m.is_inline != in;
		const u64 *data = m.is_inline ? m.words : static_cast<const u64 *>(m.data);
		for (u32 j = 0; j < p.bytes / 8 && !wrong; j++)
			wrong += data[j] != word(1, i, j);
		release<S>(qp, S::size(), in);
	}
	if (wrong)
		add(result + 2, wrong);
	if (S::rank() == 0) {
		result[0] = (u64)s;
		qp.close();
	}
}

PUSHGATE_KERNEL(send_each_warp, each_params) { send_each<warp>(p); }
PUSHGATE_KERNEL(send_each_block, each_params) { send_each<block>(p); }
PUSHGATE_KERNEL(recv_each_warp, each_params) { take_each<warp>(p); }
PUSHGATE_KERNEL(recv_each_block, each_params) { take_each<block>(p); }
