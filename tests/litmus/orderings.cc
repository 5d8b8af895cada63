// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Runs the device code as it is, its CUDA threads as OS threads, against engines that read and
// write the same payload with plain accesses. Built with -fsanitize=thread. As it stands the code
// must be clean; with any one ordering weakened (-DPUSHGATE_ORDER_X=order::relaxed,
// -DCONSUMER_X=__ATOMIC_RELAXED), the scenario that needs the ordering must be reported:
// tests/tests/tsan.rs.
//
//   orderings SCENARIO SEED
//
// The threads of a scenario are separated in time only by relaxed words, which order nothing, so
// that the tested orderings are the only ones that order their data.
#include <pthread.h>

#include "engine.h"

using namespace litmus;
using pushgate::block; // and not a name of the C library
using pushgate::thread;
using pushgate::warp;

static u64 seed;

// Different data and a different schedule for each seed.
static u32 mix(u64 a, u64 b)
{
	u64 x = (a * 0x9e3779b97f4a7c15ull) ^ (b + seed) * 0xbf58476d1ce4e5b9ull;
	x ^= x >> 31;
	x *= 0x94d049bb133111ebull;
	return (u32)(x >> 32);
}
static void jitter(u64 a, u64 b)
{
	for (u32 i = mix(a, b) % 4; i > 1; i--)
		sched_yield();
}

static u8 pattern(u64 message, u32 i) { return (u8)(message * 37 + i * 7 + (i >> 8) + 1); }

// Fills a message with the threads of a scope, each thread its own bytes.
template <class S> static void fill(u8 *p, u32 bytes, u64 message)
{
	for (u32 i = S::rank(); i < bytes; i += S::size())
		p[i] = pattern(message, i);
}
static void check(const u8 *p, u32 bytes, u64 message, const char *where)
{
	for (u32 i = 0; i < bytes; i++)
		if (p[i] != pattern(message, i))
			fail("%s: message %llu, byte %u of %u is %u, not %u", where, message, i, bytes, p[i],
			     pattern(message, i));
}
static void need(status s, const char *what)
{
	if (s != status::ok)
		fail("%s: status %u", what, (u32)s);
}

// A step that another thread waits for. Relaxed, so that it orders nothing.
struct step {
	u32 value = 0;
	void set() { __atomic_store_n(&value, 1, __ATOMIC_RELAXED); }
	void wait()
	{
		backoff pause;
		while (!__atomic_load_n(&value, __ATOMIC_RELAXED))
			pause.wait();
	}
};

// ------------------------------------------------------------------- threads
// Blocks of device threads, each thread an OS thread, until join().
class device {
    public:
	template <class F> void launch(u32 size, F kernel)
	{
		auto *b = new cpu_block();
		b->index = blocks++;
		b->grid = 1;
		b->size = size;
		for (u32 i = 0; i < size; i++)
			start([=] {
				self = cpu_thread{b, i};
				kernel();
			});
	}
	template <class F> void start(F f)
	{
		pthread_attr_t a;
		pthread_attr_init(&a);
		pthread_attr_setstacksize(&a, 256 << 10);
		auto *p = new F(f);
		if (n == max || pthread_create(
					&threads[n++], &a,
					[](void *p) -> void * {
						(*static_cast<F *>(p))();
						return nullptr;
					},
					p))
			fail("thread %u does not start", n);
		pthread_attr_destroy(&a);
	}
	void join()
	{
		while (n)
			pthread_join(threads[--n], nullptr);
	}

    private:
	static constexpr u32 max = 128;
	pthread_t threads[max];
	u32 n = 0, blocks = 0;
};

// Two sides with an engine each, which run from start() to stop().
struct pair {
	side a, b;
	endpoint engine_a, engine_b;
	step end;
	device engines;

	explicit pair(const shape &s, const policy &p = policy())
	    : a(s), b(s), engine_a(a, b, p), engine_b(b, a, p)
	{
		a.qp.peer_window = address(b.window);
		b.qp.peer_window = address(a.window);
	}
	void start()
	{
		start(engine_a);
		start(engine_b);
	}
	void start(endpoint &e)
	{
		engines.start([this, &e] {
			backoff pause;
			while (!__atomic_load_n(&end.value, __ATOMIC_RELAXED)) {
				if (e.poll())
					pause.n = 0;
				else
					pause.wait();
			}
		});
	}
	// Stops once `messages` messages of side a have been delivered.
	void stop(u64 messages)
	{
		backoff pause;
		while (engine_b.done() < messages)
			pause.wait();
		end.set();
		engines.join();
	}
};

// ----------------------------------------------------------------- producers
constexpr u32 longest = 512; // half of the smallest ring
constexpr u32 shortest = 17; // not inline

static u32 length_of(u64 message, u32 most) { return shortest + mix(message, 1) % (most - shortest + 1); }

// `n` puts of one scope; message m lands at m * longest.
template <class S> static void put_many(side &s, u8 *src, u64 first, u32 n, u32 most)
{
	queue_pair qp(s.qp);
	for (u64 m = first; m < first + n; m++) {
		u32 bytes = length_of(m, most);
		fill<S>(src, bytes, m);
		jitter(m, thread_index());
		send_wr wr;
		wr.opcode = opcode::put;
		wr.remote_offset = m * longest;
		wr.payload = src;
		wr.length = bytes;
		status r = status::again;
		backoff pause;
		for (u32 i = 0; m % 3 == 0 && i < 1000 && r == status::again; i++, pause.wait())
			r = try_post_send<S>(qp, wr);
		if (r == status::again)
			r = post_send<S>(qp, wr);
		need(r, "put");
	}
}

// Producers of all scopes at once into one small window.
static void put_scopes()
{
	pair p(shape{});
	constexpr u32 n_threads = 6, each = 8, warps = 2, total = n_threads * each + warps * 5 + 8 + 3 * 4;
	u8 *region = p.b.add_region(0, total * longest);
	u8 *src = reinterpret_cast<u8 *>(zeroed(16 * longest));
	side &a = p.a;
	device d;
	p.start();
	u64 first = 0;
	d.launch(n_threads, [=, &a] {
		put_many<thread>(a, src + thread_index() * longest, first + thread_index() * each, each, 200);
	});
	first += n_threads * each;
	src += n_threads * longest;
	// One full warp and a short one.
	d.launch(36, [=, &a] {
		u32 w = thread_index() / 32;
		put_many<warp>(a, src + w * longest, first + w * 5, 5, 300);
	});
	first += warps * 5;
	src += warps * longest;
	d.launch(4, [=, &a] { put_many<block>(a, src, first, 8, longest); });
	first += 8;
	src += longest;
	d.launch(3, [=, &a] {
		queue_pair qp(a.qp);
		for (u64 m = first; m < first + 12; m += 3) {
			batch<block> b(qp);
			need(b.begin(3, 128), "batch");
			// Each thread makes one of the messages.
			u64 mine = m + thread_index();
			u32 bytes = length_of(mine, 128);
			u8 *from = src + thread_index() * longest;
			fill<thread>(from, bytes, mine);
			push_payload(b.payload(thread_index()), from, bytes, 0, 1);
			send_wr wr;
			wr.opcode = opcode::put;
			wr.remote_offset = mine * longest;
			wr.length = bytes;
			b.set(thread_index(), wr);
			b.publish();
		}
	});
	d.join();
	p.stop(total);
	for (u64 m = 0; m < total; m++) {
		u64 f = total - 12, g = f - 8, h = g - 10;
		check(region + m * longest, length_of(m, m >= f ? 128 : m >= g ? longest : m >= h ? 300 : 200), m,
		      "put");
	}
}

// Messages of more than half the ring, whose room the ring's end splits, from a thread that learns
// on the way that other threads have moved the cursor.
static void skip()
{
	pair p(shape{}); // 16 units
	p.b.add_region(0, 4 * 1024);
	device d;
	p.start();
	d.launch(1, [&] {
		queue_pair one(p.a.qp);
		alignas(16) u8 src[1024];
		u64 m = 0;
		auto post = [&](queue_pair &qp, u32 units) {
			fill<thread>(src, units * 64, m);
			need(put(qp, 0, m * 1024, src, units * 64), "put");
			m++;
		};
		post(one, 7);
		queue_pair two(p.a.qp); // knows of the first alone
		post(one, 5);
		need(flush(one), "flush");
		post(two, 10);
		post(two, 15);
	});
	d.join();
	p.stop(4);
	const u32 units[] = {7, 5, 10, 15};
	for (u64 m = 0; m < 4; m++)
		check(p.b.regions[0] + m * 1024, units[m] * 64, m, "put");
}

// One thread reads the credit word, another uses only what the first one saw.
static void share()
{
	shape s;
	s.window_log = s.slots_log = 2;
	policy po;
	po.credit_every = 4;
	pair p(s, po);
	p.b.add_region(0, 8 * 64);
	device d;
	step made, read;
	p.start();
	auto post = [](queue_pair &qp, u64 m) {
		alignas(16) u8 src[64];
		fill<thread>(src, 64, m);
		need(put(qp, 0, m * 64, src, 64), "put");
	};
	d.launch(1, [&] {
		queue_pair qp(p.a.qp);
		made.wait();
		// The fifth message waits until all four have been given back.
		for (u64 m = 0; m < 5; m++)
			post(qp, m);
		read.set();
	});
	d.launch(1, [&] {
		queue_pair qp(p.a.qp);
		made.set();
		read.wait();
		post(qp, 5);
	});
	d.join();
	p.stop(6);
	for (u64 m = 0; m < 6; m++)
		check(p.b.regions[0] + m * 64, 64, m, "put");
}

// ------------------------------------------------------------ two-sided sends
static void send_from_threads(device &d, pair &p, u32 threads, u32 each, u32 most)
{
	d.launch(threads, [=, &p] {
		queue_pair qp(p.a.qp);
		alignas(16) u8 src[longest];
		for (u32 i = 0; i < each; i++) {
			u32 m = thread_index() << 16 | i;
			u32 bytes = 1 + mix(m, 2) % most;
			fill<thread>(src, bytes, m);
			jitter(m, 3);
			need(send(qp, src, bytes, m), "send");
		}
	});
}

// Takes one message at a time, and holds up to three.
template <class S> static void recv_scope(u32 size)
{
	policy po;
	po.landing = true;
	pair p(shape{}, po);
	constexpr u32 threads = 3, each = 16, most = 200;
	device d;
	u8 *got = reinterpret_cast<u8 *>(zeroed(longest));
	p.start();
	send_from_threads(d, p, threads, each, most);
	d.launch(size, [&] {
		queue_pair qp(p.b.qp);
		u32 next[threads] = {}, held = 0;
		for (u32 n = 0; n < threads * each; n++) {
			message m;
			need(recv<S>(qp, m), "recv");
			if (m.tag >> 16 >= threads || (m.tag & 0xffff) != next[m.tag >> 16]++)
				fail("tag %x out of order", m.tag);
			if (m.length != 1 + mix(m.tag, 2) % most)
				fail("tag %x has %u bytes", m.tag, m.length);
			copy_out<S>(got, m);
			S::sync();
			if (S::rank() == 0)
				check(got, m.length, m.tag, "recv");
			S::sync();
			if (++held >= 1 + mix(n, 4) % 3) {
				release<S>(qp, held);
				held = 0;
			}
		}
	});
	d.join();
	p.stop(threads * each);
}

// A warp takes 32 messages at once.
static void recv_warp()
{
	shape s;
	s.window_log = 6;
	s.slots_log = s.rx_log = s.link_log = 5;
	s.landing_log = 7;
	policy po;
	po.landing = true;
	pair p(s, po);
	constexpr u32 threads = 4, each = 24, most = 100;
	device d;
	p.start();
	send_from_threads(d, p, threads, each, most);
	d.launch(32, [&] {
		queue_pair qp(p.b.qp);
		for (u32 n = 0; n < threads * each / 32; n++) {
			message m;
			need(recv_each<warp>(qp, m), "recv_each");
			u8 got[longest];
			copy_out<thread>(got, m);
			check(got, m.length, m.tag, "recv_each");
			release<warp>(qp, 32);
		}
	});
	d.join();
	p.stop(threads * each);
}

// -------------------------------------------------------------------- signals
template <class S> static void signals(u32 size)
{
	pair p(shape{});
	constexpr u32 n = 24, bytes = 150;
	u8 *region = p.b.add_region(0, n * longest);
	u8 *src = reinterpret_cast<u8 *>(zeroed(longest));
	device d;
	p.start();
	d.launch(size, [&] {
		queue_pair qp(p.a.qp);
		for (u64 m = 0; m < n; m++) {
			u32 len = m % 4 == 0 ? 16 : bytes;
			fill<S>(src, len, m);
			if (m % 2 == 0) {
				need(put_signal<S>(qp, 0, m * longest, src, len, 1, m + 1), "put_signal");
			} else {
				need(put<S>(qp, 0, m * longest, src, len), "put");
				need(signal<S>(qp, 1, m + 1), "signal");
			}
		}
	});
	d.launch(size, [&] {
		queue_pair qp(p.b.qp);
		for (u64 m = 0; m < n; m++) {
			need(wait_signal<S>(qp, 1, m + 1), "wait_signal");
			check(region + m * longest, m % 4 == 0 ? 16 : bytes, m, "wait_signal");
		}
	});
	d.join();
	p.stop(n + n / 2);
}

// ---------------------------------------------------------------- completions
// Sends from a region with `places` places. Each place is written again as soon as `wait(qp, m)`
// says that message m is out. The ring is larger than all messages together, so no credit is read
// that would order the same accesses.
template <class S, class Wait> static void from_region(u32 size, u32 places, bool signaled, Wait wait)
{
	shape s;
	s.slots_log = 6;
	s.cq_log = 2;
	pair p(s);
	constexpr u32 n = 24, bytes = 100;
	u8 *own = p.a.add_region(1, places * longest), *region = p.b.add_region(0, n * longest);
	device d;
	p.start();
	d.launch(size, [&] {
		queue_pair qp(p.a.qp);
		for (u64 m = 0; m < n; m++) {
			if (m >= places)
				wait(qp, m - places);
			fill<S>(own + m % places * longest, bytes, m);
			send_wr wr;
			wr.opcode = opcode::put;
			wr.signaled = signaled;
			wr.from_region = true;
			wr.wr_id = 0x01000000u * (u32)(m % 5) + (u32)m;
			wr.lkey = 1;
			wr.local_offset = m % places * longest;
			wr.remote_offset = m * longest;
			wr.length = bytes;
			need(post_send<S>(qp, wr), "post_send");
		}
	});
	d.join();
	p.stop(n);
	for (u64 m = 0; m < n; m++)
		check(region + m * longest, bytes, m, "put from a region");
}

template <class S> static void completions(u32 size)
{
	from_region<S>(size, 3, true, [](queue_pair &qp, u64 m) {
		wc c;
		backoff pause;
		while (!poll_cq<S>(qp, c))
			pause.wait();
		if (c.wr_id != 0x01000000u * (u32)(m % 5) + (u32)m || c.status != status::ok || c.length != 100 ||
		    c.opcode != opcode::put)
			fail("completion of %x (status %u, %u bytes) where %llu was due", c.wr_id, (u32)c.status,
			     c.length, m);
	});
}

template <class S> static void flushes(u32 size)
{
	from_region<S>(size, 1, false, [](queue_pair &qp, u64) { need(flush<S>(qp), "flush"); });
}

// Several threads take completions at once; each completion is taken once.
static void poll_together()
{
	shape s;
	s.cq_log = 2;
	pair p(s);
	constexpr u32 threads = 3, each = 12, total = threads * each;
	p.b.add_region(0, 64);
	u32 seen[total] = {}, left = total;
	device d;
	p.start();
	d.launch(threads, [&] {
		queue_pair qp(p.a.qp);
		alignas(16) u8 src[16] = {};
		u32 posted = 0;
		backoff pause;
		while (__atomic_load_n(&left, __ATOMIC_RELAXED)) {
			send_wr wr;
			wr.opcode = opcode::put;
			wr.signaled = true;
			wr.wr_id = thread_index() * each + posted;
			wr.payload = src;
			wr.length = 16;
			if (posted < each) {
				status r = try_post_send(qp, wr);
				posted += r == status::ok;
				if (r != status::ok && r != status::again)
					need(r, "put");
			}
			wc c;
			if (poll_cq(qp, c)) {
				if (c.wr_id >= total || __atomic_fetch_add(&seen[c.wr_id], 1, __ATOMIC_RELAXED))
					fail("completion %u, or twice", c.wr_id);
				__atomic_sub_fetch(&left, 1, __ATOMIC_RELAXED);
			} else {
				pause.wait();
			}
		}
	});
	d.join();
	p.stop(total);
}

// ------------------------------------------------------------------ give-backs
// A batch that is cancelled after stores into its room: the next owner of the room must not meet
// those stores.
static void cancel()
{
	shape s;
	s.window_log = s.slots_log = 2;
	pair p(s);
	p.b.add_region(0, 8 * 64);
	device d;
	step cancelled;
	p.start();
	d.launch(1, [&] {
		queue_pair qp(p.a.qp);
		batch<thread> b(qp);
		need(b.begin(1, 64), "batch");
		alignas(16) u8 src[64];
		fill<thread>(src, 64, 99);
		push_payload(b.payload(0), src, 64, 0, 1);
		b.cancel();
		cancelled.set();
	});
	d.launch(1, [&] {
		cancelled.wait();
		queue_pair qp(p.a.qp);
		for (u64 m = 0; m < 6; m++) {
			alignas(16) u8 src[64];
			fill<thread>(src, 64, m);
			need(put(qp, 0, m * 64, src, 64), "put");
		}
	});
	d.join();
	p.stop(6);
	for (u64 m = 0; m < 6; m++)
		check(p.b.regions[0] + m * 64, 64, m, "put after a cancelled batch");
}

// One buffer, posted again and again by all threads of a scope that read it.
template <class S> static void posted_receives(u32 size)
{
	policy po;
	po.posted = true;
	pair p(shape{}, po);
	constexpr u32 n = 12, bytes = 150;
	u8 *buffer = p.b.add_region(0, bytes);
	device d;
	p.start();
	d.launch(1, [&] {
		queue_pair qp(p.a.qp);
		alignas(16) u8 src[bytes];
		for (u32 m = 0; m < n; m++) {
			fill<thread>(src, bytes, m);
			need(send(qp, src, bytes, m), "send");
		}
	});
	d.launch(size, [&] {
		queue_pair qp(p.b.qp);
		for (u32 n_got = 0; n_got < n; n_got++) {
			// The buffer's former content is ours until the buffer is posted.
			for (u32 i = S::rank(); i < bytes; i += S::size())
				buffer[i] = 0;
			need(post_recv<S>(qp, 0, 0, bytes), "post_recv");
			message m;
			need(recv<S>(qp, m), "recv");
			if (!m.in_buffer || m.receive != n_got || m.tag != n_got || m.length != bytes)
				fail("message %u of %u bytes where %u was due", m.tag, m.length, n_got);
			check(buffer, bytes, m.tag, "posted receive");
			S::sync();
			if (n_got % 2)
				release<S>(qp, 2);
		}
	});
	d.join();
	p.stop(n);
}

// Each thread of a block posts, then all flush: everything that any of them posted is out.
static void flush_together()
{
	shape s;
	s.slots_log = 6;
	policy po;
	po.slow = 2000;
	pair p(s, po);
	constexpr u32 threads = 3, bytes = 100;
	u8 *own = p.a.add_region(1, threads * longest);
	p.b.add_region(0, threads * longest);
	device d;
	p.start();
	d.launch(threads, [&] {
		queue_pair qp(p.a.qp);
		u32 t = thread_index();
		fill<thread>(own + t * longest, bytes, t);
		usleep(t * 5000); // the leader goes first
		send_wr wr;
		wr.opcode = opcode::put;
		wr.from_region = true;
		wr.lkey = 1;
		wr.local_offset = wr.remote_offset = t * longest;
		wr.length = bytes;
		need(post_send(qp, wr), "post_send");
		need(flush<block>(qp), "flush");
		fill<thread>(own + t * longest, bytes, 50 + t);
	});
	d.join();
	p.stop(threads);
	for (u32 t = 0; t < threads; t++)
		check(p.b.regions[0] + t * longest, bytes, t, "put before a flush");
}

// P1 for a thread that did nothing while its queue pair's cursors went once around their 24 bits:
// the credit that it remembers is not valid. No engine: the words are set to what they would be, a
// full ring.
static void idle()
{
	shape s;
	s.window_log = s.slots_log = 2;
	side a(s);
	queue_pair qp(a.qp);
	u64 taken = 2, given = (taken - 4) & PUSHGATE_CURSOR_MASK;
	auto *state = reinterpret_cast<pushgate_qp_state *>(a.qp.state);
	__atomic_store_n(&state->reserved, taken << PUSHGATE_CURSOR_BITS | taken, __ATOMIC_RELAXED);
	__atomic_store_n(&state->credit, given << PUSHGATE_CURSOR_BITS | given, __ATOMIC_RELAXED);
	__atomic_store_n(a.line, given << PUSHGATE_CURSOR_BITS | given, __ATOMIC_RELAXED);
	batch<thread> b(qp);
	status r = b.try_begin(1, 64);
	if (r != status::again)
		fail("status %u with four of four slots taken", (u32)r);
}

// ------------------------------------------------------------------------ main
static const struct {
	const char *name;
	void (*run)();
} scenarios[] = {
	{"put", put_scopes},
	{"skip", skip},
	{"share", share},
	{"recv-thread", [] { recv_scope<thread>(1); }},
	{"recv-block", [] { recv_scope<block>(5); }},
	{"recv-warp", recv_warp},
	{"signal-thread", [] { signals<thread>(1); }},
	{"signal-block", [] { signals<block>(4); }},
	{"cq-thread", [] { completions<thread>(1); }},
	{"cq-block", [] { completions<block>(4); }},
	{"cq-many", poll_together},
	{"flush-thread", [] { flushes<thread>(1); }},
	{"flush-block", [] { flushes<block>(4); }},
	{"flush-each", flush_together},
	{"cancel", cancel},
	{"post-recv-thread", [] { posted_receives<thread>(1); }},
	{"post-recv-block", [] { posted_receives<block>(4); }},
	{"idle", idle},
};

int main(int argc, char **argv)
{
	if (argc != 3) {
		for (const auto &s : scenarios)
			puts(s.name);
		return 2;
	}
	// Ends the program if anything else fails to end; the limit is that of
	// pushgate_tests::hang.
	const char *patience = getenv("_PUSHGATE_TEST_PATIENCE");
	alarm(60 * (patience ? atof(patience) : 1));
	seed = strtoull(argv[2], nullptr, 10);
	for (const auto &s : scenarios)
		if (!strcmp(s.name, argv[1])) {
			s.run();
			return 0;
		}
	fail("no scenario %s", argv[1]);
}
