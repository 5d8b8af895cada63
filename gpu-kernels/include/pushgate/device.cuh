// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The device API: what a kernel needs of libibverbs, over a window that the kernel may only write
// and control words that it may only read. docs/device-api.md is the manual; docs/protocol.md
// argues each ordering under the name that it has here.
//
// Every call takes a scope: pushgate::thread (the default), pushgate::warp or pushgate::block. All
// threads of the scope make the call with the same arguments, and all get the same status. Every
// wait is bounded: it ends with success or with a status that names the cause (P7).
#ifndef PUSHGATE_DEVICE_CUH
#define PUSHGATE_DEVICE_CUH

#include "pushgate/arch.cuh"

// The orderings by name, so that a litmus test can weaken one at a time.
#ifndef PUSHGATE_ORDER_PUBLISH // payload before WQE
#define PUSHGATE_ORDER_PUBLISH order::release
#endif
#ifndef PUSHGATE_ORDER_RECORD // receive record before the payload that it names
#define PUSHGATE_ORDER_RECORD order::acquire
#endif
#ifndef PUSHGATE_ORDER_CONSUMED // reads of a payload before its place is given back
#define PUSHGATE_ORDER_CONSUMED order::release
#endif
#ifndef PUSHGATE_ORDER_CREDIT // credit before stores into the room that it gives
#define PUSHGATE_ORDER_CREDIT order::acquire
#endif
#ifndef PUSHGATE_ORDER_CREDIT_SHARE // credit handed from thread to thread: the writer's store
#define PUSHGATE_ORDER_CREDIT_SHARE order::release
#endif
#ifndef PUSHGATE_ORDER_CREDIT_TAKE // credit handed from thread to thread: the reader's load
#define PUSHGATE_ORDER_CREDIT_TAKE order::acquire
#endif
#ifndef PUSHGATE_ORDER_RECEIVE // our use of a buffer before it is posted for a receive
#define PUSHGATE_ORDER_RECEIVE order::release
#endif
#ifndef PUSHGATE_ORDER_SIGNAL // signal before the data that it announces
#define PUSHGATE_ORDER_SIGNAL order::acquire
#endif
#ifndef PUSHGATE_ORDER_COMPLETION // CQE, delivered count: before a source region is reused
#define PUSHGATE_ORDER_COMPLETION order::acquire
#endif

namespace pushgate {

enum class status : u32 {
	ok = PUSHGATE_OK,
	again = PUSHGATE_AGAIN, // non-blocking forms: no credit, nothing was taken
	peer_lost = PUSHGATE_PEER_LOST,
	aborted = PUSHGATE_ABORTED,
	timed_out = PUSHGATE_TIMED_OUT,
	refused = PUSHGATE_REFUSED,
	stuck = PUSHGATE_STUCK,
	overrun = PUSHGATE_OVERRUN,
	invalid = PUSHGATE_INVALID, // arguments that can never succeed here
	link_down = PUSHGATE_LINK_DOWN, // the queue pair's device, port, address or path failed
};

// ------------------------------------------------------------------- scopes
struct thread {
	static constexpr bool one_warp = false;
	static PUSHGATE_DEVICE u32 rank() { return 0; }
	static PUSHGATE_DEVICE u32 size() { return 1; }
	static PUSHGATE_DEVICE void sync() {}
	static PUSHGATE_DEVICE u64 broadcast(u64 v) { return v; }
	static PUSHGATE_DEVICE u32 any(u32 v) { return v; }
};
struct warp {
	static constexpr bool one_warp = true; // all its threads run in one
	static PUSHGATE_DEVICE u32 rank() { return thread_index() % 32; }
	static PUSHGATE_DEVICE u32 size()
	{
		u32 left = block_size() - (thread_index() & ~31u);
		return left < 32 ? left : 32;
	}
	static PUSHGATE_DEVICE void sync() { warp_barrier(); }
	static PUSHGATE_DEVICE u64 broadcast(u64 v) { return warp_broadcast(v); }
	static PUSHGATE_DEVICE u32 any(u32 v) { return warp_any(v); }
};
struct block {
	static constexpr bool one_warp = false;
	static PUSHGATE_DEVICE u32 rank() { return thread_index(); }
	static PUSHGATE_DEVICE u32 size() { return block_size(); }
	static PUSHGATE_DEVICE void sync() { block_barrier(); }
	static PUSHGATE_DEVICE u64 broadcast(u64 v) { return block_broadcast(v); }
	static PUSHGATE_DEVICE u32 any(u32 v) { return block_any(v); }
};

// ------------------------------------------------------------------- copying
// Loads 16 bytes at any alignment; bytes from `limit` on read as zero.
PUSHGATE_DEVICE u64x2 load_any(const u8 *src, u64 limit)
{
	u64x2 v = {0, 0};
	if (limit > 16)
		limit = 16;
	for (u32 i = 0; i < 16; i++)
		if (i < limit)
			(i < 8 ? v.x : v.y) |= (u64)src[i] << (i % 8 * 8);
	return v;
}

// Copies `bytes` to `dst`, which is 16-byte aligned and a whole number of 16-byte units long: the
// last store may write padding. `lanes` threads take part; this one is number `lane`. Each thread
// has four loads in flight before its first store, which hides the latency of reading over a bus. Bytes that are not
// 16-byte aligned, or not in global memory, are loaded one by one.
PUSHGATE_DEVICE void push_payload(void *dst, const void *src, u64 bytes, u32 lane, u32 lanes)
{
	u64x2 *d = static_cast<u64x2 *>(dst);
	u64 whole = bytes / 16;
	u64 i = lane;
	if ((reinterpret_cast<unsigned long long>(src) & 15) == 0 && is_global(src)) {
		const u64x2 *s = static_cast<const u64x2 *>(src);
		for (; i + 3ull * lanes < whole; i += 4ull * lanes) {
			u64x2 a = load_payload(s + i), b = load_payload(s + i + lanes);
			u64x2 c = load_payload(s + i + 2ull * lanes), e = load_payload(s + i + 3ull * lanes);
			store_payload(d + i, a);
			store_payload(d + i + lanes, b);
			store_payload(d + i + 2ull * lanes, c);
			store_payload(d + i + 3ull * lanes, e);
		}
		for (; i < whole; i += lanes)
			store_payload(d + i, load_payload(s + i));
	} else {
		for (; i < whole; i += lanes)
			store_payload(d + i, load_any(static_cast<const u8 *>(src) + i * 16, 16));
	}
	if (bytes % 16 && whole % lanes == lane)
		store_payload(d + whole, load_any(static_cast<const u8 *>(src) + whole * 16, bytes % 16));
}

// Copies a received message, or any other bytes, to ordinary memory, byte exact.
PUSHGATE_DEVICE void pull_payload(void *dst, const void *src, u64 bytes, u32 lane, u32 lanes)
{
	u64 whole = 0;
	if (((reinterpret_cast<unsigned long long>(dst) | reinterpret_cast<unsigned long long>(src)) & 15) == 0 &&
	    is_global(dst)) {
		whole = bytes / 16;
		push_payload(dst, src, whole * 16, lane, lanes);
	}
	for (u64 i = whole * 16 + lane; i < bytes; i += lanes)
		static_cast<u8 *>(dst)[i] = static_cast<const u8 *>(src)[i];
}

// -------------------------------------------------------------- work requests
enum class opcode : u32 {
	nop = PUSHGATE_OP_NOP,
	send = PUSHGATE_OP_SEND,
	put = PUSHGATE_OP_PUT,
	signal = PUSHGATE_OP_SIGNAL,
};

// A work request, in the manner of ibv_send_wr. Fields that the opcode does not use are ignored.
struct send_wr {
	pushgate::opcode opcode = opcode::nop;
	bool signaled = false;	       // a CQE when the message is retired
	bool with_signal = false;      // put: signal after the data
	bool from_region = false;      // payload is sent from a region of ours, not pushed
	u32 wr_id = 0;
	u32 tag = 0;		       // send
	u32 length = 0;		       // bytes
	const void *payload = nullptr; // any address that all threads of the scope can load from; null: room only (see batch)
	u32 lkey = 0;		       // from_region
	u64 local_offset = 0;	       // from_region, bytes
	u32 rkey = 0;		       // put: region of the peer
	u64 remote_offset = 0;	       // put: bytes
	u32 signal = 0;		       // put with_signal, signal: index
	u64 value = 0;		       // put with_signal, signal: new value, at most PUSHGATE_SIGNAL_MAX

	PUSHGATE_DEVICE bool inlined() const
	{
		if (from_region || !payload)
			return false;
		return (opcode == pushgate::opcode::send && length <= PUSHGATE_INLINE_SEND) ||
		       (opcode == pushgate::opcode::put && length <= PUSHGATE_INLINE_PUT);
	}
	PUSHGATE_DEVICE u32 units() const
	{
		if (from_region || inlined() || opcode == pushgate::opcode::signal)
			return 0;
		return (length + PUSHGATE_UNIT - 1) >> PUSHGATE_UNIT_LOG;
	}
};

// A completion, in the manner of ibv_wc.
struct wc {
	u32 wr_id;
	pushgate::opcode opcode;
	pushgate::status status;
	u32 length;
};

// A received message. `data` stays valid until the message is released.
struct message {
	u32 length = 0;
	u32 tag = 0;
	const void *data = nullptr; // in the peer's window or the landing ring; null: inline, or in a posted buffer
	u64 words[5] = {0, 0, 0, 0, 0}; // inline payload
	bool is_inline = false;
	bool in_buffer = false; // in the buffer that post_recv named
	u32 receive = 0; // number of that post_recv, counted from 0; the low 32 bits
};

// ----------------------------------------------------------------- queue pair
// A thread's view of a queue pair: the addresses, and the cursors as the thread last saw them.
// Cheap to make; each thread of a scope makes one, and all of them call the same functions on it.
//
// Sending: any number of threads at once. Receiving and posting receives: one scope at a time,
// which keeps the receive cursor in registers and stores it in close().
class queue_pair {
    public:
	PUSHGATE_DEVICE explicit queue_pair(const pushgate_qp &qp) : q(qp)
	{
		const pushgate_qp_state *s = state();
		guess = load_device<order::relaxed>(&s->reserved);
		credit = load_device<PUSHGATE_ORDER_CREDIT_TAKE>(&s->credit);
		rx = load_device<order::relaxed>(&s->rx_head);
		released = load_device<order::relaxed>(&s->rx_released);
	}

	// Stores the receive cursor for the next kernel. One thread of the scope calls it.
	PUSHGATE_DEVICE void close()
	{
		store_device<order::relaxed>(&state()->rx_head, rx);
		store_device<order::relaxed>(&state()->rx_released, released);
	}

	PUSHGATE_DEVICE pushgate_qp_state *state() const { return reinterpret_cast<pushgate_qp_state *>(q.state); }
	PUSHGATE_DEVICE u32 ring_units() const { return 1u << q.window_log; }

	pushgate_qp q;
	u64 guess;    // reservation word as last seen
	u64 credit;   // credit word as last seen
	u64 rx;	      // receive records taken
	u64 released; // receive records given back
	bool placed = false; // a message released here had a place

	// Reads the status word: `ok` while the queue pair works.
	PUSHGATE_DEVICE status health() const
	{
		// Acquire: a last look after this sees everything that was delivered before the
		// queue pair ended.
		u64 s = load<order::acquire>(reinterpret_cast<const u64 *>(q.credit) + 1);
		return static_cast<status>(s & 0xff);
	}

	// Waits until `ready()` is true, the queue pair ends, or its time limit passes (P7). Reads
	// status and clock only every 64 looks, because both cost more than the word that is waited
	// for. `together`: all lanes of the warp wait here and must leave together.
	template <class F> PUSHGATE_DEVICE status wait(F ready, bool together = false)
	{
		backoff pause;
		u64 start = 0;
		for (u32 n = 1;; n++) {
			if (ready())
				return status::ok;
			if (n % 64 == 0) {
				u64 s = (u64)health();
				u64 now = clock_ns();
				if (!start)
					start = now;
				else if (s == 0 && now - start > q.limit_ns)
					s = (u64)status::timed_out;
				if (together)
					s = warp_broadcast(s);
				if (s != 0)
					return ready() ? status::ok : static_cast<status>(s);
			}
			pause.wait();
		}
	}
};

// Where a batch lies: what one compare-and-swap took.
struct reservation {
	u32 slot; // cursor of the first WQE, 24 bits
	u32 unit; // place of the first payload in the ring, units
};

namespace detail {

constexpr u64 cursor_mask = PUSHGATE_CURSOR_MASK;

PUSHGATE_DEVICE u32 slots_of(u64 word) { return (u32)(word >> PUSHGATE_CURSOR_BITS & cursor_mask); }
PUSHGATE_DEVICE u32 units_of(u64 word) { return (u32)(word & cursor_mask); }

// How many units `n` payloads of `each` units take from position `pos` of a ring. A payload that
// does not fit before the ring's end begins at the ring's start, and the skipped units count too.
// The proxy computes the same number (staging.rs).
PUSHGATE_DEVICE u32 span(u32 pos, u32 ring, u32 n, u32 each)
{
	if (each == 0)
		return 0;
	u32 left = ring - pos, fit = left / each;
	return fit >= n ? n * each : left + (n - fit) * each;
}

// The place of payload `i`, by the rule of span().
PUSHGATE_DEVICE u32 place(u32 pos, u32 ring, u32 i, u32 each)
{
	if (each == 0)
		return 0;
	u32 fit = (ring - pos) / each;
	return i < fit ? pos + i * each : (i - fit) * each;
}

// Whether the credit covers `slots` and `units` more.
PUSHGATE_DEVICE bool fits(const pushgate_qp &q, u64 cursor, u64 credit, u32 slots, u32 units)
{
	u32 used_slots = (slots_of(cursor) - slots_of(credit)) & cursor_mask;
	u32 used_units = (units_of(cursor) - units_of(credit)) & cursor_mask;
	return used_slots + slots <= 1u << q.slots_log && used_units + units <= 1u << q.window_log;
}

PUSHGATE_DEVICE u64 lap_bits(u32 cursor, u32 log)
{
	return (u64)(((cursor >> log) + 1) & 0xff) << PUSHGATE_LAP_SHIFT;
}

// Tries once to reserve, as the leader of a scope: `n` slots with `each` units of payload and
// `cqes` slots of the CQ, all or nothing. On success `r` says where they lie. If the payload fits
// only once the ring's end has been skipped, and skipped units and payload do not fit at once,
// `*skip` gets the number of units to skip and nothing is taken.
PUSHGATE_DEVICE status try_take(queue_pair &qp, u32 n, u32 each, u32 cqes, reservation &r, u32 *skip)
{
	const pushgate_qp &q = qp.q;
	u32 ring = qp.ring_units();
	*skip = 0;
	if (n == 0 || n > 1u << q.slots_log || (u64)n * each > ring || cqes > 1u << q.cq_log)
		return status::invalid;
	u64 cursor = qp.guess;
	for (;;) {
		u32 pos = units_of(cursor) & (ring - 1);
		u32 units = span(pos, ring, n, each);
		if (units > ring) {
			*skip = ring - pos;
			qp.guess = cursor;
			return status::again;
		}
		if (!fits(q, cursor, qp.credit, n, units)) {
			// First the credit that other threads of this device have seen, then the
			// credit word itself.
			qp.credit = load_device<PUSHGATE_ORDER_CREDIT_TAKE>(&qp.state()->credit);
			if (!fits(q, cursor, qp.credit, n, units)) {
				u64 shared = qp.credit;
				qp.credit = load<PUSHGATE_ORDER_CREDIT>(reinterpret_cast<const u64 *>(q.credit));
				// A slow thread must not replace a newer credit by its older one. A
				// thread that loses the swap has nothing to add.
				compare_and_swap<PUSHGATE_ORDER_CREDIT_SHARE>(&qp.state()->credit, shared, qp.credit);
				if (!fits(q, cursor, qp.credit, n, units)) {
					// The cursor may be old too; only a fresh cursor proves
					// that the ring is full.
					u64 fresh = load_device<order::relaxed>(&qp.state()->reserved);
					if (fresh == cursor) {
						qp.guess = cursor;
						return status::again;
					}
					cursor = fresh;
					continue;
				}
			}
		}
		if (cqes) {
			u64 head = load_device<order::relaxed>(&qp.state()->cq_head);
			u32 used = (u32)((cursor >> PUSHGATE_CQ_CURSOR_SHIFT) - head) & PUSHGATE_CQ_CURSOR_MASK;
			if (used + cqes > 1u << q.cq_log) {
				u64 fresh = load_device<order::relaxed>(&qp.state()->reserved);
				if (fresh == cursor) {
					qp.guess = cursor;
					return status::again;
				}
				cursor = fresh;
				continue;
			}
		}
		u64 next = ((cursor >> PUSHGATE_CQ_CURSOR_SHIFT) + cqes) << PUSHGATE_CQ_CURSOR_SHIFT |
			   (u64)((slots_of(cursor) + n) & cursor_mask) << PUSHGATE_CURSOR_BITS |
			   ((units_of(cursor) + units) & cursor_mask);
		u64 seen = compare_and_swap(&qp.state()->reserved, cursor, next);
		if (seen == cursor) {
			qp.guess = next;
			r.slot = slots_of(cursor);
			r.unit = pos;
			return status::ok;
		}
		cursor = seen;
		// An old credit must not be compared with a fresh cursor, because both count modulo
		// 2^24. The credit that other threads have shared lags the cursor by one ring at
		// most.
		qp.credit = load_device<PUSHGATE_ORDER_CREDIT_TAKE>(&qp.state()->credit);
	}
}

PUSHGATE_DEVICE u64 *slot_words(const pushgate_qp &q, u32 slot)
{
	u64 index = slot & ((1u << q.slots_log) - 1);
	return reinterpret_cast<u64 *>(q.wqes) + index * PUSHGATE_RECORD_WORDS;
}

// Packs a work request; `units` of the window from `unit` on belong to it.
PUSHGATE_DEVICE void pack(const send_wr &wr, u32 unit, u32 units, u64 lap, u64 (&w)[8])
{
	bool in = units == 0 && wr.inlined();
	u64 flags = (in ? PUSHGATE_F_INLINE : 0) | (wr.from_region ? PUSHGATE_F_REGION : 0) |
		    (wr.signaled ? PUSHGATE_F_SIGNALED : 0) |
		    (wr.with_signal && wr.opcode == opcode::put ? PUSHGATE_F_WITH_SIGNAL : 0);
	w[0] = (u64)wr.opcode << PUSHGATE_OPCODE_SHIFT | flags << PUSHGATE_FLAGS_SHIFT |
	       (u64)(wr.wr_id >> PUSHGATE_ID_LOW_BITS) << PUSHGATE_ID_HIGH_SHIFT |
	       (wr.opcode == opcode::signal ? 0 : wr.length);
	w[1] = (u64)(wr.wr_id & 0xffffff) << PUSHGATE_ID_LOW_SHIFT | wr.tag;
	w[2] = (u64)wr.signal << PUSHGATE_SIGNAL_SHIFT | wr.rkey;
	w[3] = wr.remote_offset & PUSHGATE_DATA_MASK;
	w[4] = wr.value & PUSHGATE_DATA_MASK;
	w[5] = wr.from_region ? wr.lkey : unit;
	w[6] = wr.from_region ? wr.local_offset & PUSHGATE_DATA_MASK : units;
	w[7] = 0;
	if (in) {
		const u8 *src = static_cast<const u8 *>(wr.payload);
		bool send = wr.opcode == opcode::send;
		u64 d[5] = {0, 0, 0, 0, 0};
		if ((reinterpret_cast<unsigned long long>(src) & 7) == 0 && wr.length % 8 == 0) {
#if PUSHGATE_GPU
#pragma unroll
#endif
			for (u32 i = 0; i < 5; i++)
				if (i * 8 < wr.length)
					d[i] = reinterpret_cast<const u64 *>(src)[i];
		} else {
#if PUSHGATE_GPU
#pragma unroll
#endif
			for (u32 i = 0; i < 40; i++)
				if (i < wr.length)
					d[i / 8] |= (u64)src[i] << (i % 8 * 8);
		}
		u64 tops = 0;
		if (send) {
#if PUSHGATE_GPU
#pragma unroll
#endif
			for (u32 i = 0; i < 5; i++) {
				w[3 + i] = d[i] & PUSHGATE_DATA_MASK;
				tops |= d[i] >> 56 << (8 * i);
			}
			w[2] = tops;
		} else {
			for (u32 i = 0; i < 2; i++) {
				w[5 + i] = d[i] & PUSHGATE_DATA_MASK;
				tops |= d[i] >> 56 << (8 * i);
			}
			w[7] = tops;
		}
	}
	for (u32 i = 0; i < 8; i++)
		w[i] = (w[i] & PUSHGATE_DATA_MASK) | lap;
}

} // namespace detail

// ---------------------------------------------------------------------- batch
// A batch: `n` messages of equal payload length, reserved by one compare-and-swap and published by
// one release store. The first WQE's first word is written last, and the proxy reads no later slot
// before that word is there. A scope that began a batch must set every message and publish, or
// cancel.
//
//   batch<block> b(qp);
//   if (b.begin(n, bytes) == status::ok) {
//       ... fill b.payload(i) ...
//       b.set(i, wr);   // each i once, by any one thread of the scope
//       b.publish();    // all threads
//   }
template <class S> class batch {
    public:
	PUSHGATE_DEVICE explicit batch(queue_pair &qp) : qp(qp) {}

	// Begins the batch; waits for credit. `signaled`: each message also takes a CQ slot.
	PUSHGATE_DEVICE status begin(u32 n, u32 bytes, bool signaled = false) { return take(n, bytes, signaled, true); }
	// Begins the batch without waiting: `again` means no credit, and nothing was taken.
	PUSHGATE_DEVICE status try_begin(u32 n, u32 bytes, bool signaled = false)
	{
		return take(n, bytes, signaled, false);
	}

	// The place of message `i`'s payload in the window, 64-byte aligned. Store to it only: the
	// device never reads a window.
	PUSHGATE_DEVICE void *payload(u32 i) const
	{
		return reinterpret_cast<u8 *>(qp.q.window) + ((u64)unit_of(i) << PUSHGATE_UNIT_LOG);
	}

	// Writes WQE `i`. wr.length may be less than was reserved. The bytes at wr.payload are
	// copied only when they travel inline, which requires a batch begun with bytes == 0.
	PUSHGATE_DEVICE void set(u32 i, const send_wr &wr)
	{
		u32 slot = (r.slot + i) & detail::cursor_mask;
		u64 w[8];
		detail::pack(wr, unit_of(i), each, detail::lap_bits(slot, qp.q.slots_log), w);
		u64 *p = detail::slot_words(qp.q, slot);
		store_pair(p + 2, w[2], w[3]);
		store_pair(p + 4, w[4], w[5]);
		store_pair(p + 6, w[6], w[7]);
		if (i == 0) {
			store<order::relaxed>(p + 1, w[1]);
			first = w[0];
		} else {
			store_pair(p, w[0], w[1]);
		}
	}

	// Publishes the batch with one release (P3, PUBLISH). With `inline_only`, messages that are
	// complete in their WQEs, no release is needed: each word proves by its lap number that it
	// is there.
	PUSHGATE_DEVICE void publish(bool inline_only = false)
	{
		S::sync();
		if (first) {
			u64 *p = detail::slot_words(qp.q, r.slot);
			if (inline_only)
				store<order::relaxed>(p, first);
			else
				store<PUSHGATE_ORDER_PUBLISH>(p, first);
			first = 0;
			ring(qp.q);
		}
	}

	// Cancels the batch: gives everything back as NOPs. The NOPs are published with a release
	// too, because the room may have been stored to, and its next owner must come after those
	// stores.
	PUSHGATE_DEVICE void cancel()
	{
		if (S::rank() == 0)
			for (u32 i = 0; i < n; i++)
				set(i, send_wr());
		publish();
	}

	PUSHGATE_DEVICE u32 slot(u32 i) const { return (r.slot + i) & detail::cursor_mask; }

    private:
	PUSHGATE_DEVICE u32 unit_of(u32 i) const { return detail::place(r.unit, qp.ring_units(), i, each); }

	PUSHGATE_DEVICE status take(u32 count, u32 bytes, bool signaled, bool wait)
	{
		n = count;
		each = (bytes + PUSHGATE_UNIT - 1) >> PUSHGATE_UNIT_LOG;
		first = 0;
		u64 packed = 0;
		if (S::rank() == 0) {
			status s = lead(count, signaled ? count : 0, wait);
			packed = (u64)s << 56 | (u64)r.slot << 24 | r.unit;
		}
		packed = S::broadcast(packed);
		r.slot = (u32)(packed >> 24 & detail::cursor_mask);
		r.unit = (u32)(packed & detail::cursor_mask);
		return static_cast<status>(packed >> 56);
	}

	PUSHGATE_DEVICE status lead(u32 count, u32 cqes, bool wait)
	{
		r = reservation{0, 0};
		status s = attempt(count, cqes);
		if (s != status::again)
			return s;
		if (!wait) {
			status end = qp.health();
			return end == status::ok ? s : end;
		}
		status end = qp.wait([&] { return (s = attempt(count, cqes)) != status::again; });
		return end == status::ok ? s : end;
	}

	// Tries once to take the room. The ring's end may split the room for a payload of more than
	// half the ring; then the units up to the end are first given away as a NOP of their own.
	PUSHGATE_DEVICE status attempt(u32 count, u32 cqes)
	{
		u32 skip;
		status s = detail::try_take(qp, count, each, cqes, r, &skip);
		if (s == status::again && skip) {
			reservation gap;
			u32 none;
			if (detail::try_take(qp, 1, skip, 0, gap, &none) != status::ok)
				return status::again;
			// Other threads may have moved the cursor in the meantime. Whatever units
			// were taken are given back as this NOP, and the next attempt looks again.
			u64 w[8];
			u32 unit = detail::place(gap.unit, qp.ring_units(), 0, skip);
			detail::pack(send_wr(), unit, skip, detail::lap_bits(gap.slot, qp.q.slots_log), w);
			u64 *p = detail::slot_words(qp.q, gap.slot);
			for (u32 i = 8; i-- > 0;)
				store<order::relaxed>(p + i, w[i]);
			ring(qp.q);
		}
		return s;
	}

	queue_pair &qp;
	reservation r = {0, 0};
	u32 n = 0;
	u32 each = 0;
	u64 first = 0; // the first WQE's first word, in the thread that set it
};

// ------------------------------------------------------------------ post, poll
namespace detail {

template <class S> PUSHGATE_DEVICE status post(queue_pair &qp, const send_wr &wr, bool wait)
{
	if (wr.length > PUSHGATE_MAX_MESSAGE || (wr.value | wr.remote_offset | wr.local_offset) > PUSHGATE_SIGNAL_MAX ||
	    wr.signal >= PUSHGATE_MAX_SIGNALS)
		return status::invalid;
	batch<S> b(qp);
	u32 units = wr.units();
	u32 room = units << PUSHGATE_UNIT_LOG;
	status s = wait ? b.begin(1, room, wr.signaled) : b.try_begin(1, room, wr.signaled);
	if (s != status::ok)
		return s;
	if (units)
		push_payload(b.payload(0), wr.payload, wr.length, S::rank(), S::size());
	if (S::rank() == 0)
		b.set(0, wr);
	b.publish(units == 0 && !wr.from_region);
	return status::ok;
}

} // namespace detail

// Pushes the payload and posts the work request; waits for credit.
template <class S = thread> PUSHGATE_DEVICE status post_send(queue_pair &qp, const send_wr &wr)
{
	return detail::post<S>(qp, wr, true);
}
// Posts like post_send(), but does not wait: `again` means no credit, and nothing was taken.
template <class S = thread> PUSHGATE_DEVICE status try_post_send(queue_pair &qp, const send_wr &wr)
{
	return detail::post<S>(qp, wr, false);
}

// Takes one completion if there is one. Any number of threads at once.
template <class S = thread> PUSHGATE_DEVICE bool poll_cq(queue_pair &qp, wc &c)
{
	u64 w0 = 0, w1 = 0;
	if (S::rank() == 0) {
		u64 head = load_device<order::relaxed>(&qp.state()->cq_head);
		for (;;) {
			const u64 *p = reinterpret_cast<const u64 *>(qp.q.cq) +
				       (head & ((1ull << qp.q.cq_log) - 1)) * PUSHGATE_CQE_WORDS;
			u64 lap = ((head >> qp.q.cq_log) + 1) & 0xff;
			// Two loads: one load of both words would need an acquire fence after it.
			w0 = load<PUSHGATE_ORDER_COMPLETION>(p);
			w1 = w0 >> PUSHGATE_LAP_SHIFT == lap ? load<order::relaxed>(p + 1) : 0;
			if (w0 >> PUSHGATE_LAP_SHIFT != lap || w1 >> PUSHGATE_LAP_SHIFT != lap) {
				w0 = 0;
				break;
			}
			// The slot is not written again before the head has moved on.
			u64 seen = compare_and_swap(&qp.state()->cq_head, head, head + 1);
			if (seen == head)
				break;
			head = seen;
		}
	}
	w0 = S::broadcast(w0);
	w1 = S::broadcast(w1);
	c.wr_id = (u32)w0;
	c.opcode = static_cast<opcode>(w0 >> PUSHGATE_CQE_OPCODE_SHIFT & 0xff);
	c.status = static_cast<status>(w0 >> PUSHGATE_CQE_STATUS_SHIFT & 0xff);
	c.length = (u32)w1;
	return c.opcode != static_cast<opcode>(0);
}

// One-sided: puts `bytes` into region `rkey` of the peer, `offset` bytes from the region's start.
template <class S = thread>
PUSHGATE_DEVICE status put(queue_pair &qp, u32 rkey, u64 offset, const void *src, u32 bytes)
{
	send_wr wr;
	wr.opcode = opcode::put;
	wr.rkey = rkey;
	wr.remote_offset = offset;
	wr.payload = src;
	wr.length = bytes;
	return post_send<S>(qp, wr);
}

// One-sided: puts data as put() does; once the data is there, the peer's signal `index` becomes
// `value`.
template <class S = thread>
PUSHGATE_DEVICE status put_signal(queue_pair &qp, u32 rkey, u64 offset, const void *src, u32 bytes, u32 index,
				  u64 value)
{
	send_wr wr;
	wr.opcode = opcode::put;
	wr.with_signal = true;
	wr.rkey = rkey;
	wr.remote_offset = offset;
	wr.payload = src;
	wr.length = bytes;
	wr.signal = index;
	wr.value = value;
	return post_send<S>(qp, wr);
}

// Sets the peer's signal alone; it comes after everything posted to this queue pair before.
template <class S = thread> PUSHGATE_DEVICE status signal(queue_pair &qp, u32 index, u64 value)
{
	send_wr wr;
	wr.opcode = opcode::signal;
	wr.signal = index;
	wr.value = value;
	return post_send<S>(qp, wr);
}

// Two-sided: sends a message, which takes a receive of the peer.
template <class S = thread> PUSHGATE_DEVICE status send(queue_pair &qp, const void *src, u32 bytes, u32 tag = 0)
{
	send_wr wr;
	wr.opcode = opcode::send;
	wr.payload = src;
	wr.length = bytes;
	wr.tag = tag;
	return post_send<S>(qp, wr);
}

// Waits until this end's signal `index` is at least `value`.
template <class S = thread> PUSHGATE_DEVICE status wait_signal(queue_pair &qp, u32 index, u64 value)
{
	u64 s = (u64)status::invalid;
	if (S::rank() == 0 && index < qp.q.n_signals) {
		const u64 *p = reinterpret_cast<const u64 *>(qp.q.signals) + index;
		s = (u64)qp.wait([&] { return load<PUSHGATE_ORDER_SIGNAL>(p) >= value; });
	}
	return static_cast<status>(S::broadcast(s));
}

// Waits until the peer has everything that was posted to this queue pair before.
template <class S = thread> PUSHGATE_DEVICE status flush(queue_pair &qp)
{
	S::sync(); // what the other threads of the scope posted counts too
	u64 s = 0;
	if (S::rank() == 0) {
		u32 target = detail::slots_of(load_device<order::relaxed>(&qp.state()->reserved));
		const u64 *p = reinterpret_cast<const u64 *>(qp.q.delivered);
		s = (u64)qp.wait([&] {
			u32 have = (u32)load<PUSHGATE_ORDER_COMPLETION>(p);
			return ((have - target) & detail::cursor_mask) < (detail::cursor_mask + 1) / 2;
		});
	}
	return static_cast<status>(S::broadcast(s));
}

// --------------------------------------------------------------------- receive
namespace detail {

PUSHGATE_DEVICE const u64 *receive_record(const pushgate_qp &q, u64 cursor)
{
	return reinterpret_cast<const u64 *>(q.rx) + (cursor & ((1ull << q.rx_log) - 1)) * PUSHGATE_RECORD_WORDS;
}

// Fills `m` if all eight words carry the lap.
PUSHGATE_DEVICE bool unpack(const pushgate_qp &q, const u64 (&w)[8], u64 lap, message &m)
{
	u64 wrong = 0;
	for (u32 i = 0; i < 8; i++)
		wrong |= w[i] ^ lap;
	if (wrong >> PUSHGATE_LAP_SHIFT)
		return false;
	u32 flags = (u32)(w[0] >> PUSHGATE_FLAGS_SHIFT) & 0xff;
	m.length = (u32)w[0];
	m.tag = (u32)w[1];
	m.is_inline = flags & PUSHGATE_F_INLINE;
	m.in_buffer = flags & PUSHGATE_F_BUFFER;
	m.receive = m.in_buffer ? (u32)w[5] : 0;
	m.data = nullptr;
	if (m.is_inline) {
		for (u32 i = 0; i < 5; i++)
			m.words[i] = (w[3 + i] & PUSHGATE_DATA_MASK) | (w[2] >> (8 * i) & 0xff) << 56;
	} else if (!m.in_buffer) {
		u64 base = flags & PUSHGATE_F_LANDING ? q.landing : q.peer_window;
		m.data = reinterpret_cast<const void *>(base + ((w[5] & 0xffffffff) << PUSHGATE_UNIT_LOG));
	}
	return true;
}

// Looks at the receive record `cursor` and fills `m` if the record is there. Called by one thread.
// On a GPU each of its loads is a round trip over the bus: they are strong loads, and strong loads
// of one thread wait for each other. Word 0 is read first, so that only a record that is there
// costs all the round trips.
PUSHGATE_DEVICE bool look(queue_pair &qp, u64 cursor, message &m)
{
	const u64 *p = receive_record(qp.q, cursor);
	u64 lap = lap_bits((u32)cursor, qp.q.rx_log);
	u64 w[8];
	w[0] = load<PUSHGATE_ORDER_RECORD>(p);
	if ((w[0] ^ lap) >> PUSHGATE_LAP_SHIFT)
		return false;
	u64x2 c = load_pair(p + 2), d = load_pair(p + 4), e = load_pair(p + 6);
	w[1] = load<order::relaxed>(p + 1);
	w[2] = c.x, w[3] = c.y, w[4] = d.x, w[5] = d.y, w[6] = e.x, w[7] = e.y;
	return unpack(qp.q, w, lap, m);
}

#if PUSHGATE_GPU
// Looks at the receive record `cursor` with a whole warp, eight of whose lanes read one word each:
// one access and one round trip, 3 us less than a single thread needs. All lanes get `m`.
PUSHGATE_DEVICE bool look_together(queue_pair &qp, u64 cursor, message &m)
{
	u32 lane = thread_index() % 32, mask = warp_mask();
	u64 lap = lap_bits((u32)cursor, qp.q.rx_log);
	u64 mine = lane < 8 ? load<PUSHGATE_ORDER_RECORD>(receive_record(qp.q, cursor) + lane) : lap;
	if (!__all_sync(mask, (mine ^ lap) >> PUSHGATE_LAP_SHIFT == 0))
		return false;
	__syncwarp(mask); // what lane 0 acquired with word 0 holds for all lanes
	u64 w[8];
#pragma unroll
	for (u32 i = 0; i < 8; i++)
		w[i] = __shfl_sync(mask, mine, i);
	return unpack(qp.q, w, lap, m);
}
#else
inline bool look_together(queue_pair &qp, u64 cursor, message &m) { return look(qp, cursor, m); }
#endif

// Hands a message from the scope's leader to all its threads.
template <class S> PUSHGATE_DEVICE void share(message &m)
{
	u64 head = S::broadcast((u64)m.length << 32 | m.tag);
	u64 where = S::broadcast(m.is_inline ? 1 : m.in_buffer ? 2 : reinterpret_cast<unsigned long long>(m.data));
	m.length = (u32)(head >> 32);
	m.tag = (u32)head;
	m.is_inline = where == 1;
	m.in_buffer = where == 2;
	m.data = where <= 2 ? nullptr : reinterpret_cast<const void *>(where);
	if (m.in_buffer)
		m.receive = (u32)S::broadcast(m.receive);
	if (m.is_inline)
		for (u32 i = 0; i < 5; i++)
			m.words[i] = S::broadcast(m.words[i]);
}

template <class S> PUSHGATE_DEVICE status receive(queue_pair &qp, message &m, bool wait)
{
	// On a GPU the scope's first warp looks together, if the scope has at least eight threads.
	bool together = PUSHGATE_GPU && S::size() >= 8;
	u64 s = 0;
	if (together ? S::rank() < 32 : S::rank() == 0) {
		auto ready = [&] { return together ? look_together(qp, qp.rx, m) : look(qp, qp.rx, m); };
		if (wait) {
			s = (u64)qp.wait(ready, together);
		} else if (!ready()) {
			s = (u64)qp.health();
			if (together)
				s = warp_broadcast(s);
			// A message that arrived before the queue pair ended is still taken.
			s = s == 0 ? (u64)status::again : ready() ? 0 : s;
		}
	}
	// A single warp that looked together already has the message in every lane.
	if (!(together && S::one_warp)) {
		s = S::broadcast(s);
		if (s == 0 && S::size() > 1)
			share<S>(m);
	}
	if (s == 0)
		qp.rx++;
	return static_cast<status>(s);
}

} // namespace detail

// Waits for the next message.
template <class S = thread> PUSHGATE_DEVICE status recv(queue_pair &qp, message &m)
{
	return detail::receive<S>(qp, m, true);
}
// Receives without waiting: `again` means that no message is there.
template <class S = thread> PUSHGATE_DEVICE status try_recv(queue_pair &qp, message &m)
{
	return detail::receive<S>(qp, m, false);
}

// Receives S::size() messages at once, one for each thread of the scope: the fastest way to take
// small messages. `ok` only if all of them arrived.
template <class S = warp> PUSHGATE_DEVICE status recv_each(queue_pair &qp, message &m)
{
	u64 mine = qp.rx + S::rank();
	status s = qp.wait([&] { return detail::look(qp, mine, m); });
	s = static_cast<status>(S::any((u32)s));
	if (s == status::ok)
		qp.rx += S::size();
	return s;
}

// Releases the `count` oldest messages not yet released: from now on their places may be written
// again. All threads of the scope must be done with them. `inline_only`: none of them had a place,
// because recv() copied their words.
template <class S = thread> PUSHGATE_DEVICE void release(queue_pair &qp, u32 count = 1, bool inline_only = false)
{
	S::sync();
	qp.released += count;
	// A relaxed store would hide an earlier release from a reader that sees only the newer
	// count.
	qp.placed |= !inline_only;
	if (S::rank() == 0) {
		u64 *p = reinterpret_cast<u64 *>(qp.q.consumed);
		if (!qp.placed)
			store<order::relaxed>(p, qp.released);
		else
			store<PUSHGATE_ORDER_CONSUMED>(p, qp.released);
		ring(qp.q);
	}
}

// Copies a received message to `dst`, which has room for m.length bytes: any memory that all threads of the scope can
// store to.
template <class S = thread> PUSHGATE_DEVICE void copy_out(void *dst, const message &m)
{
	if (m.is_inline) {
		for (u32 i = S::rank(); i < m.length; i += S::size())
			static_cast<u8 *>(dst)[i] = (u8)(m.words[i / 8] >> (i % 8 * 8));
	} else if (m.data) {
		pull_payload(dst, m.data, m.length, S::rank(), S::size());
	}
}

// Posts a buffer for a receive. A message takes the oldest receive with its tag or with any tag,
// and says which receive that was (message::receive): a later receive with another tag may be taken
// first. Only on queue pairs made with posted receives.
template <class S = thread>
PUSHGATE_DEVICE status post_recv(queue_pair &qp, u32 lkey, u64 offset, u32 length, u32 tag = PUSHGATE_ANY_TAG)
{
	S::sync(); // all threads are done with the buffer
	u64 s = 0;
	if (S::rank() == 0) {
		pushgate_qp_state *state = qp.state();
		u64 posted = load_device<order::relaxed>(&state->rx_posted);
		u64 given = qp.released;
		if (posted - given >= 1ull << qp.q.rx_log) {
			s = (u64)status::again;
		} else {
			u64 *p = reinterpret_cast<u64 *>(qp.q.receives) +
				 (posted & ((1ull << qp.q.rx_log) - 1)) * PUSHGATE_RECV_WORDS;
			u64 lap = detail::lap_bits((u32)posted, qp.q.rx_log);
			store_pair(p + 2, length | lap, tag | lap);
			store<order::relaxed>(p + 1, (offset & PUSHGATE_DATA_MASK) | lap);
			store<PUSHGATE_ORDER_RECEIVE>(p, lkey | lap);
			store_device<order::relaxed>(&state->rx_posted, posted + 1);
			ring(qp.q);
		}
	}
	return static_cast<status>(S::broadcast(s));
}

} // namespace pushgate

#endif // PUSHGATE_DEVICE_CUH
