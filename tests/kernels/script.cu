// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Makes calls of the device API, one after the other, as a test lists them. Each step's status,
// what it found and how long it took are recorded; a step that fails does not end the script.
#include "pushgate/device.cuh"

using namespace pushgate;

// The numbers are those of tests/tests/device_api/step.rs.
enum class call : u32 {
	post = 0,	  // opcode a, payload b, length c, tag d, and the fields by their names
	recv = 1,	  // copied to a, which has room for b; flags
	release = 2,	  // a messages
	wait_signal = 3,  // signal a, value b
	flush = 4,
	poll = 5,	  // for at most a nanoseconds
	post_recv = 6,	  // lkey a, offset b, length c, tag d
	reserve = 7,	  // a messages of b bytes, never published
	raw = 8,	  // eight words from a into slot b
	consumed = 9,	  // a, as the count of messages given back
	batch = 10,	  // a messages of b bytes, the first tag c, payload from d; flags
	fill = 11,	  // like post, until `again` was all that came for 30 ms
	copy = 12,	  // to a, from b, c bytes
};

constexpr u64 f_try = 1, f_signaled = 2, f_region = 4, f_with_signal = 8, f_cancel = 16;

struct step {
	u64 what, flags;
	u64 a, b, c, d; // post: opcode, payload, length, tag
	u64 wr_id;
	u64 lkey, local; // from a region
	u64 rkey, remote;
	u64 signal, value;
	u64 pad;
};

struct outcome {
	u64 status, x, y, ns;
};

struct script_params {
	u64 qp; // pushgate_qp
	u64 steps;
	u64 outcomes;
	u64 n;
};

PUSHGATE_DEVICE bool takes_part(thread) { return thread_index() == 0; }
PUSHGATE_DEVICE bool takes_part(warp) { return thread_index() < 32; }
PUSHGATE_DEVICE bool takes_part(block) { return true; }

PUSHGATE_DEVICE send_wr request(const step &t)
{
	send_wr wr;
	wr.opcode = static_cast<opcode>(t.a);
	wr.payload = reinterpret_cast<const void *>(t.b);
	wr.length = (u32)t.c;
	wr.tag = (u32)t.d;
	wr.wr_id = (u32)t.wr_id;
	wr.signaled = t.flags & f_signaled;
	wr.with_signal = t.flags & f_with_signal;
	wr.from_region = t.flags & f_region;
	wr.lkey = (u32)t.lkey;
	wr.local_offset = t.local;
	wr.rkey = (u32)t.rkey;
	wr.remote_offset = t.remote;
	wr.signal = (u32)t.signal;
	wr.value = t.value;
	return wr;
}

// Whether the time is over; all threads of a scope get the same answer.
template <class S> PUSHGATE_DEVICE bool over(u64 start, u64 limit)
{
	return S::broadcast(S::rank() == 0 && clock_ns() - start > limit);
}

// The short calls are tested by calling them, the rest through post_send.
template <class S> PUSHGATE_DEVICE status post(queue_pair &qp, const step &t)
{
	send_wr wr = request(t);
	if (t.flags & f_try)
		return try_post_send<S>(qp, wr);
	if (t.flags & (f_signaled | f_region))
		return post_send<S>(qp, wr);
	switch (wr.opcode) {
	case opcode::send: return send<S>(qp, wr.payload, wr.length, wr.tag);
	case opcode::put:
		if (wr.with_signal)
			return put_signal<S>(qp, wr.rkey, wr.remote_offset, wr.payload, wr.length, wr.signal, wr.value);
		return put<S>(qp, wr.rkey, wr.remote_offset, wr.payload, wr.length);
	case opcode::signal: return signal<S>(qp, wr.signal, wr.value);
	default: return post_send<S>(qp, wr);
	}
}

template <class S> PUSHGATE_DEVICE status send_batch(queue_pair &qp, const step &t)
{
	batch<S> b(qp);
	status s = t.flags & f_try ? b.try_begin((u32)t.a, (u32)t.b, t.flags & f_signaled)
				   : b.begin((u32)t.a, (u32)t.b, t.flags & f_signaled);
	if (s != status::ok)
		return s;
	for (u32 i = 0; i < t.a; i++)
		push_payload(b.payload(i), reinterpret_cast<const u8 *>(t.d) + i * t.b, t.b, S::rank(), S::size());
	if (t.flags & f_cancel) {
		b.cancel();
		return status::ok;
	}
	for (u32 i = S::rank(); i < t.a; i += S::size()) {
		send_wr wr;
		wr.opcode = opcode::send;
		// A length below what was reserved is allowed.
		wr.length = (u32)t.b - i % 2;
		wr.tag = (u32)t.c + i;
		wr.wr_id = (u32)t.c + i;
		wr.signaled = t.flags & f_signaled;
		b.set(i, wr);
	}
	b.publish();
	return status::ok;
}

template <class S> PUSHGATE_DEVICE outcome perform(queue_pair &qp, const step &t)
{
	outcome o = {0, 0, 0, 0};
	status s = status::ok;
	u64 start = clock_ns();
	switch (static_cast<call>(t.what)) {
	case call::post: s = post<S>(qp, t); break;
	case call::recv: {
		message m;
		s = t.flags & f_try ? try_recv<S>(qp, m) : recv<S>(qp, m);
		if (s != status::ok)
			break;
		o.x = (u64)m.length << 32 | m.tag;
		o.y = m.is_inline ? 1 : m.in_buffer ? 2 | (u64)m.receive << 8 : m.data ? 3 : 0;
		// All threads of the scope have the same message.
		if (S::any(m.receive != (u32)S::broadcast(m.receive)) || m.length > t.b)
			s = status::invalid;
		else
			copy_out<S>(reinterpret_cast<void *>(t.a), m);
		break;
	}
	case call::release: release<S>(qp, (u32)t.a); break;
	case call::wait_signal: s = wait_signal<S>(qp, (u32)t.a, t.b); break;
	case call::flush: s = flush<S>(qp); break;
	case call::poll: {
		wc c;
		s = status::again;
		do {
			if (poll_cq<S>(qp, c)) {
				s = status::ok;
				o.x = c.wr_id;
				o.y = (u64)c.status << 40 | (u64)c.opcode << 32 | c.length;
				break;
			}
		} while (!over<S>(start, t.a));
		break;
	}
	case call::post_recv: s = post_recv<S>(qp, (u32)t.a, t.b, (u32)t.c, (u32)t.d); break;
	case call::reserve: {
		batch<S> b(qp);
		s = b.begin((u32)t.a, (u32)t.b);
		o.x = b.slot(0);
		break;
	}
	case call::raw:
		if (S::rank() == 0) {
			const u64 *from = reinterpret_cast<const u64 *>(t.a);
			u64 *to = detail::slot_words(qp.q, (u32)t.b);
			for (u32 i = 8; i-- > 1;)
				store<order::relaxed>(to + i, from[i]);
			store<order::release>(to, from[0]);
			ring(qp.q);
		}
		break;
	case call::consumed:
		if (S::rank() == 0) {
			store<order::release>(reinterpret_cast<u64 *>(qp.q.consumed), t.a);
			ring(qp.q);
		}
		break;
	case call::copy:
		pull_payload(reinterpret_cast<void *>(t.a), reinterpret_cast<const void *>(t.b), t.c, S::rank(), S::size());
		break;
	case call::batch: s = send_batch<S>(qp, t); break;
	case call::fill: {
		send_wr wr = request(t);
		u64 last = clock_ns();
		do {
			u64 before = load_device<order::relaxed>(&qp.state()->reserved);
			s = try_post_send<S>(qp, wr);
			u64 after = load_device<order::relaxed>(&qp.state()->reserved);
			if (s == status::again) {
				o.y += before != after; // `again` takes nothing
			} else {
				o.x++;
				last = clock_ns();
			}
		} while (s == status::ok || (s == status::again && !over<S>(last, 30000000)));
		break;
	}
	}
	S::sync();
	o.status = (u64)s;
	o.ns = clock_ns() - start;
	return o;
}

template <class S> PUSHGATE_DEVICE void run(const script_params &p)
{
	if (!takes_part(S()))
		return;
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	for (u64 i = 0; i < p.n; i++) {
		outcome o = perform<S>(qp, reinterpret_cast<const step *>(p.steps)[i]);
		if (S::rank() == 0)
			reinterpret_cast<outcome *>(p.outcomes)[i] = o;
	}
	if (S::rank() == 0)
		qp.close();
}

PUSHGATE_KERNEL(script_thread, script_params) { run<thread>(p); }
PUSHGATE_KERNEL(script_warp, script_params) { run<warp>(p); }
PUSHGATE_KERNEL(script_block, script_params) { run<block>(p); }
