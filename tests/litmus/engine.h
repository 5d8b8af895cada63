// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The memory of two joined queue pairs, and an engine for each in C++, so that ThreadSanitizer sees
// both sides: proxy/engine/src/endpoint/ and link/local.rs, without everything that does not concern
// order. The engine's orderings have names too, CONSUMER_*.
//
// One difference: where the proxy loads relaxed and then fences (ring.rs says why), this engine
// loads with acquire, because ThreadSanitizer does not know fences.
//
// Payload, regions and landing ring are plain memory on purpose, as on the device: each access that
// the orderings do not keep apart is a race to report.
#ifndef PUSHGATE_LITMUS_ENGINE_H
#define PUSHGATE_LITMUS_ENGINE_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pushgate/device.cuh"

#ifndef CONSUMER_LOOK // WQE before the payload that it names
#define CONSUMER_LOOK __ATOMIC_ACQUIRE
#endif
#ifndef CONSUMER_LINK // payload before the link record that names it: the writer's store
#define CONSUMER_LINK __ATOMIC_RELEASE
#endif
#ifndef CONSUMER_LINK_LOOK // link record before the payload that it names: the reader's load
#define CONSUMER_LINK_LOOK __ATOMIC_ACQUIRE
#endif
#ifndef CONSUMER_DELIVER // payload (moved by us, or the peer's) before the receive record
#define CONSUMER_DELIVER __ATOMIC_RELEASE
#endif
#ifndef CONSUMER_SIGNAL // data before the signal
#define CONSUMER_SIGNAL __ATOMIC_RELEASE
#endif
#ifndef CONSUMER_CONSUMED // the device's reads before its places are given back
#define CONSUMER_CONSUMED __ATOMIC_ACQUIRE
#endif
#ifndef CONSUMER_COUNT // our reads and the device's before the peer's engine hears of them
#define CONSUMER_COUNT __ATOMIC_RELEASE
#endif
#ifndef CONSUMER_OBSERVE // the peer's engine reads those counts
#define CONSUMER_OBSERVE __ATOMIC_ACQUIRE
#endif
#ifndef CONSUMER_CREDIT // all reads of a room before the credit for it
#define CONSUMER_CREDIT __ATOMIC_RELEASE
#endif
#ifndef CONSUMER_CQE // all reads of a source region before the completion
#define CONSUMER_CQE __ATOMIC_RELEASE
#endif
#ifndef CONSUMER_DELIVERED // all reads of a source region before the delivered count
#define CONSUMER_DELIVERED __ATOMIC_RELEASE
#endif
#ifndef CONSUMER_RECEIVE // posted receive before our stores into its buffer
#define CONSUMER_RECEIVE __ATOMIC_ACQUIRE
#endif

namespace litmus {

using namespace pushgate;

// Ends the whole program, whatever its threads are doing.
[[noreturn]] inline void fail(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fputs("FAILED: ", stderr);
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
	_exit(1);
}

inline u64 *zeroed(size_t bytes)
{
	bytes = (bytes + PUSHGATE_PAGE - 1) & ~(size_t)(PUSHGATE_PAGE - 1);
	void *p = aligned_alloc(PUSHGATE_PAGE, bytes);
	if (!p)
		fail("no memory");
	memset(p, 0, bytes);
	return static_cast<u64 *>(p);
}
inline u64 address(const void *p) { return reinterpret_cast<u64>(p); }

inline void copy(u8 *dst, const u8 *src, u32 bytes)
{
	for (u32 i = 0; i < bytes; i++)
		dst[i] = src[i];
}

// -------------------------------------------------------------------- memory
struct shape {
	u32 window_log = 4, slots_log = 3, cq_log = 3, rx_log = 3, landing_log = 4;
	u32 link_log = 3;
};

constexpr u32 n_signals = 4;
constexpr u32 n_regions = 2;

// All segments of one queue pair, and its regions.
struct side {
	shape s;
	pushgate_qp qp;
	u64 *window, *wqes, *receives, *consumed, *line, *signals, *cq, *rx, *landing;
	u64 *link_ring, *link_line;
	u8 *regions[n_regions] = {};
	u32 region_bytes[n_regions] = {};

	explicit side(const shape &shape) : s(shape), qp()
	{
		window = zeroed((size_t)PUSHGATE_UNIT << s.window_log);
		wqes = zeroed((size_t)PUSHGATE_RECORD_BYTES << s.slots_log);
		receives = zeroed(8 * (size_t)PUSHGATE_RECV_WORDS << s.rx_log);
		consumed = zeroed(8);
		line = zeroed(64);
		signals = zeroed(8 * n_signals);
		cq = zeroed(8 * (size_t)PUSHGATE_CQE_WORDS << s.cq_log);
		rx = zeroed((size_t)PUSHGATE_RECORD_BYTES << s.rx_log);
		landing = zeroed((size_t)PUSHGATE_UNIT << s.landing_log);
		link_ring = zeroed((size_t)PUSHGATE_RECORD_BYTES << s.link_log);
		link_line = zeroed(64);
		qp.window = address(window);
		qp.wqes = address(wqes);
		qp.receives = address(receives);
		qp.consumed = address(consumed);
		qp.credit = address(line);
		qp.delivered = address(line + 2);
		qp.signals = address(signals);
		qp.cq = address(cq);
		qp.rx = address(rx);
		qp.landing = address(landing);
		qp.state = address(zeroed(sizeof(pushgate_qp_state)));
		qp.limit_ns = 20000000000ull;
		qp.window_log = s.window_log;
		qp.slots_log = s.slots_log;
		qp.cq_log = s.cq_log;
		qp.rx_log = s.rx_log;
		qp.landing_log = s.landing_log;
		qp.n_signals = n_signals;
	}

	u8 *add_region(u32 key, u32 bytes)
	{
		region_bytes[key] = bytes;
		return regions[key] = reinterpret_cast<u8 *>(zeroed(bytes));
	}
	u8 *resolve(u64 key, u64 offset, u32 bytes) const
	{
		if (key >= n_regions || offset + bytes > region_bytes[key])
			fail("region %llu, offset %llu, %u bytes", key, offset, bytes);
		return regions[key] + offset;
	}
};

// --------------------------------------------------------------------- rings
struct record {
	u64 w[8];
	u32 op() const { return w[0] >> PUSHGATE_OPCODE_SHIFT & 0xff; }
	u32 flags() const { return w[0] >> PUSHGATE_FLAGS_SHIFT & 0xff; }
	u32 length() const { return (u32)w[0]; }
	u32 id() const
	{
		return (u32)(w[0] >> PUSHGATE_ID_HIGH_SHIFT & 0xff) << PUSHGATE_ID_LOW_BITS |
		       (u32)(w[1] >> PUSHGATE_ID_LOW_SHIFT & 0xffffff);
	}
	void set_id(u32 id)
	{
		w[0] = (w[0] & ~(0xffull << PUSHGATE_ID_HIGH_SHIFT)) |
		       (u64)(id >> PUSHGATE_ID_LOW_BITS) << PUSHGATE_ID_HIGH_SHIFT;
		w[1] = (w[1] & 0xffffffff) | (u64)(id & 0xffffff) << PUSHGATE_ID_LOW_SHIFT;
	}
	void set_flags(u32 flags)
	{
		w[0] = (w[0] & ~(0xffull << PUSHGATE_FLAGS_SHIFT)) | (u64)flags << PUSHGATE_FLAGS_SHIFT;
	}
	u32 unit() const { return (u32)w[5]; }
	u32 signal() const { return w[2] >> PUSHGATE_SIGNAL_SHIFT & 0xffffff; }
	u64 data(u32 i) const { return w[i] & PUSHGATE_DATA_MASK; }
	bool in_window() const
	{
		return !(flags() & (PUSHGATE_F_INLINE | PUSHGATE_F_REGION)) && op() != PUSHGATE_OP_SIGNAL;
	}
	u32 units() const { return in_window() ? (u32)w[6] : 0; }
};

inline u64 lap_of(u64 cursor, u32 log) { return ((cursor >> log) + 1) & 0xff; }

// Whether a word is of this lap; false for the last lap; fails if the word is of neither.
inline bool of_lap(u64 word, u64 lap)
{
	u64 found = word >> PUSHGATE_LAP_SHIFT;
	if (found != lap && found != ((lap - 1) & 0xff))
		fail("lap %llu in a word where %llu was due", found, lap);
	return found == lap;
}

template <int Order> bool look(const u64 *ring, u64 cursor, u32 log, record &r)
{
	const u64 *slot = ring + (cursor & ((1u << log) - 1)) * PUSHGATE_RECORD_WORDS;
	u64 lap = lap_of(cursor, log);
	r.w[0] = __atomic_load_n(slot, Order);
	bool whole = of_lap(r.w[0], lap);
	for (u32 i = 1; whole && i < 8; i++) {
		r.w[i] = __atomic_load_n(slot + i, __ATOMIC_RELAXED);
		whole = of_lap(r.w[i], lap);
	}
	return whole;
}

template <int Order> void publish(u64 *ring, u64 cursor, u32 log, const record &r)
{
	u64 *slot = ring + (cursor & ((1u << log) - 1)) * PUSHGATE_RECORD_WORDS;
	u64 lap = lap_of(cursor, log) << PUSHGATE_LAP_SHIFT;
	for (u32 i = 1; i < 8; i++)
		__atomic_store_n(slot + i, r.data(i) | lap, __ATOMIC_RELAXED);
	__atomic_store_n(slot, r.data(0) | lap, Order);
}

// -------------------------------------------------------------------- engine
struct policy {
	u32 credit_every = 1;	   // slots retired before the credit word moves on
	bool landing = false;	   // every other SEND is copied out
	bool posted = false;	   // SENDs land in posted receives
	useconds_t slow = 0;	   // before each record of the peer
};

class endpoint {
    public:
	endpoint(side &own, side &peer, const policy &p) : own(own), peer(peer), p(p) {}

	bool poll()
	{
		bool work = receive();
		acknowledge();
		work |= progress();
		return transmit() || work;
	}

	// How many messages of the peer have been put where they belong. Any thread may call this.
	u64 done() const { return __atomic_load_n(&done_, __ATOMIC_RELAXED); }

    private:
	struct entry {
		u64 units_after, messages_after;
		u32 id, op, length;
		bool signaled;
	};
	struct held {
		u64 rx, sequence, units;
	};
	static constexpr u32 max_held = 64;

	// ------------------------------------------------------------- producer
	bool transmit()
	{
		bool work = false;
		record r;
		while (head - tail < 1ull << own.s.slots_log && look<CONSUMER_LOOK>(own.wqes, head, own.s.slots_log, r)) {
			bool nop = r.op() == PUSHGATE_OP_NOP, send = r.op() == PUSHGATE_OP_SEND;
			if ((send && sends == granted) || (!nop && messages - received == 1ull << own.s.link_log))
				break;
			take(r, nop);
			if (!nop) {
				record out = r;
				out.set_id((u32)messages);
				publish<CONSUMER_LINK>(own.link_ring, messages, own.s.link_log, out);
				messages++;
				sends += send;
			}
			entries[(head - 1) & ((1u << own.s.slots_log) - 1)].messages_after = messages;
			work = true;
		}
		return work;
	}

	// P1: the place is where the rule puts it, and was given back before.
	void take(const record &r, bool nop)
	{
		u64 ring = 1ull << own.s.window_log, units = r.units();
		if (r.in_window()) {
			u64 pos = this->units & (ring - 1), after = this->units + units;
			if (pos + units > ring) {
				after += ring - pos;
				pos = 0;
			}
			if (after - retired_units > ring)
				fail("slot %llu: %llu units without credit", head, units);
			if (units && r.unit() != pos)
				fail("slot %llu: unit %u where %llu was due", head, r.unit(), pos);
			this->units = after;
		}
		entries[head & ((1u << own.s.slots_log) - 1)] = {
			this->units, 0, r.id(), r.op(), r.length(), !nop && (r.flags() & PUSHGATE_F_SIGNALED)};
		head++;
	}

	bool progress()
	{
		// Released is read before received, as in proxy/link/src/local.rs.
		u64 released = __atomic_load_n(peer.link_line + 1, CONSUMER_OBSERVE);
		received = __atomic_load_n(peer.link_line + 0, CONSUMER_OBSERVE);
		granted = __atomic_load_n(peer.link_line + 2, CONSUMER_OBSERVE);
		u64 mask = (1ull << own.s.slots_log) - 1;
		bool work = false;
		while (tail < head && entries[tail & mask].messages_after <= released) {
			const entry &e = entries[tail & mask];
			tail++;
			retired_units = e.units_after;
			if (e.signaled)
				complete(e);
		}
		if (tail - credited >= p.credit_every) {
			credited = tail;
			u64 word = (tail & PUSHGATE_CURSOR_MASK) << PUSHGATE_CURSOR_BITS |
				   (retired_units & PUSHGATE_CURSOR_MASK);
			__atomic_store_n(own.line, word, CONSUMER_CREDIT);
			work = true;
		}
		u64 before = delivered;
		while (delivered < head && entries[delivered & mask].messages_after <= received)
			delivered++;
		if (delivered != before) {
			__atomic_store_n(own.line + 2, delivered, CONSUMER_DELIVERED);
			work = true;
		}
		return work;
	}

	void complete(const entry &e)
	{
		u64 *cqe = own.cq + (cq_head & ((1u << own.s.cq_log) - 1)) * PUSHGATE_CQE_WORDS;
		u64 lap = lap_of(cq_head, own.s.cq_log) << PUSHGATE_LAP_SHIFT;
		cq_head++;
		__atomic_store_n(cqe + 1, e.length | lap, __ATOMIC_RELAXED);
		__atomic_store_n(cqe, (u64)e.op << PUSHGATE_CQE_OPCODE_SHIFT | e.id | lap, CONSUMER_CQE);
	}

	// ------------------------------------------------------------- receiver
	bool receive()
	{
		reap();
		bool work = false;
		record r;
		while (look<CONSUMER_LINK_LOOK>(peer.link_ring, inbound, peer.s.link_log, r)) {
			if (r.id() != (u32)inbound)
				fail("sequence number %u where %llu was due", r.id(), inbound);
			if (p.posted && r.op() == PUSHGATE_OP_SEND && buffer_head == buffer_tail)
				fail("no receive was posted");
			if (p.slow)
				usleep(p.slow);
			inbound++;
			deliver(r);
			__atomic_store_n(&done_, inbound, __ATOMIC_RELAXED);
			work = true;
		}
		return work;
	}

	void reap()
	{
		u64 now = __atomic_load_n(own.consumed, CONSUMER_CONSUMED);
		if (now < consumed || now > rx_head)
			fail("%llu receive records released of %llu", now, rx_head);
		consumed = now;
		while (held_tail < held_head && holds[held_tail % max_held].rx < consumed)
			held_tail++;
		while (landed_tail < landed_head && landings[landed_tail % max_held].rx < consumed)
			landing_tail += landings[landed_tail++ % max_held].units;
		while (p.posted && next_buffer())
			;
	}

	bool next_buffer()
	{
		u32 log = own.s.rx_log;
		if (buffer_head - consumed >= 1ull << log)
			return false;
		const u64 *slot = own.receives + (buffer_head & ((1u << log) - 1)) * PUSHGATE_RECV_WORDS;
		u64 lap = lap_of(buffer_head, log), w[PUSHGATE_RECV_WORDS];
		for (u32 i = 0; i < PUSHGATE_RECV_WORDS; i++) {
			w[i] = i ? __atomic_load_n(slot + i, __ATOMIC_RELAXED) : __atomic_load_n(slot, CONSUMER_RECEIVE);
			if (!of_lap(w[i], lap))
				return false;
		}
		buffers[buffer_head++ % max_held] = own.resolve((u32)w[0], w[1] & PUSHGATE_DATA_MASK, (u32)w[2]);
		return true;
	}

	const u8 *source(const record &r)
	{
		if (r.flags() & PUSHGATE_F_REGION)
			return peer.resolve((u32)r.w[5], r.data(6), r.length());
		if (r.flags() & PUSHGATE_F_INLINE) {
			inlined[0] = r.data(5) | (r.w[7] & 0xff) << 56;
			inlined[1] = r.data(6) | (r.w[7] >> 8 & 0xff) << 56;
			return reinterpret_cast<const u8 *>(inlined);
		}
		return reinterpret_cast<const u8 *>(peer.window) + ((u64)r.unit() << PUSHGATE_UNIT_LOG);
	}

	void signal(const record &r)
	{
		u64 *word = own.signals + r.signal();
		if (r.signal() >= n_signals)
			fail("signal %u", r.signal());
		if (__atomic_load_n(word, __ATOMIC_RELAXED) < r.data(4))
			__atomic_store_n(word, r.data(4), CONSUMER_SIGNAL);
	}

	void deliver(const record &r)
	{
		if (r.op() == PUSHGATE_OP_SIGNAL)
			return signal(r);
		if (r.op() == PUSHGATE_OP_PUT) {
			copy(own.resolve((u32)r.w[2], r.data(3), r.length()), source(r), r.length());
			if (r.flags() & PUSHGATE_F_WITH_SIGNAL)
				signal(r);
			return;
		}
		if (rx_head - consumed >= 1ull << own.s.rx_log)
			fail("no receive was granted");
		record out = r;
		out.set_flags(r.flags() & PUSHGATE_F_INLINE);
		if (p.posted) {
			copy(buffers[buffer_tail % max_held], source(r), r.length());
			out.set_flags(PUSHGATE_F_BUFFER);
			out.w[5] = (u32)buffer_tail++;
		} else if (!(r.flags() & PUSHGATE_F_INLINE)) {
			if (!p.landing || inbound % 2 || !land(r, out))
				holds[held_head++ % max_held] = {rx_head, inbound - 1, r.units()};
		}
		publish<CONSUMER_DELIVER>(own.rx, rx_head, own.s.rx_log, out);
		rx_head++;
	}

	bool land(const record &r, record &out)
	{
		u64 ring = 1ull << own.s.landing_log, units = r.units(), pos = landing_head & (ring - 1);
		u64 skip = pos + units > ring ? ring - pos : 0;
		if (landing_head + skip + units - landing_tail > ring)
			return false;
		u64 unit = (landing_head + skip) & (ring - 1);
		landing_head += skip + units;
		landings[landed_head++ % max_held] = {rx_head, inbound - 1, skip + units};
		copy(reinterpret_cast<u8 *>(own.landing) + (unit << PUSHGATE_UNIT_LOG), source(r), r.length());
		out.set_flags(PUSHGATE_F_LANDING);
		out.w[5] = unit;
		return true;
	}

	void acknowledge()
	{
		u64 released = held_tail < held_head ? holds[held_tail % max_held].sequence : inbound;
		u64 grants = p.posted ? buffer_head : consumed + (1ull << own.s.rx_log);
		if (inbound == told[0] && released == told[1] && grants == told[2])
			return;
		told[0] = inbound;
		told[1] = released;
		told[2] = grants;
		for (u32 i = 0; i < 3; i++)
			__atomic_store_n(own.link_line + i, told[i], CONSUMER_COUNT);
	}

	side &own, &peer;
	policy p;
	u64 head = 0, tail = 0, credited = 0, delivered = 0, units = 0, retired_units = 0, messages = 0, sends = 0;
	u64 received = 0, granted = 0, cq_head = 0;
	entry entries[128] = {};
	u64 inbound = 0, rx_head = 0, consumed = 0, landing_head = 0, landing_tail = 0;
	held holds[max_held] = {}, landings[max_held] = {};
	u64 held_head = 0, held_tail = 0, landed_head = 0, landed_tail = 0;
	u8 *buffers[max_held] = {};
	u64 buffer_head = 0, buffer_tail = 0;
	u64 inlined[2] = {}, told[3] = {};
	u64 done_ = 0;
};

} // namespace litmus

#endif // PUSHGATE_LITMUS_ENGINE_H
