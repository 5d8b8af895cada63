// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The resident worker: copies between this device's memory and registered host memory, commanded
// through rings in host memory, without a call of the driver. gpu-kernels/src/worker/ is the
// host's half; docs/worker.md argues how the worker comes and goes.
//
// Block 0 is the dispatcher: it alone reads over the bus, both rings at once, and forwards commands
// through device memory, where reading is cheap. Pushers (device to host) and pullers (host to
// device) read them there. Each of these blocks passes all commands of its ring in order, and
// copies its slice of the commands that name it.
//
// P8: the worker does not check addresses. Only the host side of this process writes the rings, and
// that side is responsible for the addresses.
#include "pushgate/arch.cuh"

using namespace pushgate;

// kernels: copy_worker copy_worker_mark

static constexpr u32 command_words = 4;
// A launch under way for longer than this is assumed to wait for this kernel.
static constexpr u64 launch_ns = 1000000;
// This long without a command counts as a pause.
static constexpr u64 idle_ns = 1000000;
static constexpr u32 phase_running = 1, phase_leaving = 2, phase_left = 3;
static constexpr u32 lap_shift = 56;
static constexpr u64 glance_ns = 8000;

// The kernel's parameters. In arrays of two, [0] is push and [1] is pull.
struct copy_worker_params {
	u64 state;	    // host, written here: generation << 8 | phase; word 2: a graph's launch that stays idle
	u64 leases;	    // host, read: {last generation to leave now, launches under way}, then {opened, done} of each
	u64 counts;	    // host, written here: commands passed by each block that copies; then the pulls up to
			    // which the dispatcher has stored inline words
	u64 rings[2];	    // host, read: commands
	u64 mailboxes[2];   // device: forwarded commands
	u64 cursors;	    // device: the words below
	u64 generation;	    // 0: a launch in a graph, of whose replays the host does not know
	u64 linger_ns;	    // stays this long after the last command or lease
	u64 limit_ns;	    // leaves this long after the last command, whatever the leases say
	u32 slots_log;
	u32 leases_n;
	u32 pushers;
	u32 pullers;
};

// Words of `cursors`. Words 0 and 1: commands forwarded, of push and pull. Then, with launches
// numbered as described under "turns": the launch that is to stop; the launch that has the turn;
// how many of that launch's blocks still serve; how many operations of graphs have begun; how many
// have ended; how many of the host's launches wait for the turn. Then, for each block that copies,
// how far it has come; for each block, how many launches of graphs it has seen begin; the fates of
// the last launches of graphs (`fates` of them), and the fate of the host's last launch.
static constexpr u32 stop_at = 2, turn_at = 3, serving_at = 4, opened_at = 5, closed_at = 6, waiting_at = 7,
		     passed_at = 8;
// More than the grids that a device runs at once: 128 (CUDA C++ Programming Guide, "Maximum number
// of resident grids per device").
static constexpr u32 fates = 256;
static constexpr u64 leaving = 1ull << 63; // beside the number that has the turn
static PUSHGATE_DEVICE u64 *word_of(const copy_worker_params &p, u32 which)
{
	return reinterpret_cast<u64 *>(p.cursors) + which;
}
static PUSHGATE_DEVICE bool of_a_graph(const copy_worker_params &p) { return p.generation == 0; }

// A command is {device address, host address, bytes, first block | blocks << 16}; each word has its
// lap number in the topmost byte (P2).
static PUSHGATE_DEVICE u64 lap_of(u64 index, u32 slots_log) { return ((index >> slots_log) + 1) << lap_shift; }
static PUSHGATE_DEVICE bool is_lap(u64 word, u64 lap) { return (word ^ lap) >> lap_shift == 0; }
static PUSHGATE_DEVICE u64 data_of(u64 word) { return word & ((1ull << lap_shift) - 1); }
static PUSHGATE_DEVICE u64 *slot_of(u64 ring, u64 index, u32 slots_log)
{
	return reinterpret_cast<u64 *>(ring) + (index & ((1ull << slots_log) - 1)) * command_words;
}

// A pull of one or two words may carry the words in its command: {device address, low 56 bits of
// the first word, low 56 bits of the second, rest}. The rest's bytes 0 and 1 are the topmost bytes
// of the two words, its byte 4 is the number of words, and its number of blocks is 0. The
// dispatcher stores the words itself, which saves the trip to a block and that block's read over
// the bus.
static PUSHGATE_DEVICE u32 inline_words(u64 where) { return (u32)(where >> 32) & 0xff; }
static PUSHGATE_DEVICE u64 inline_word(u64 low, u64 where, u32 which)
{
	return data_of(low) | where >> 8 * which << lap_shift;
}

// Which of the command's slices this block copies; a value of `blocks` or more means none.
static PUSHGATE_DEVICE u32 rank_in(u64 where, u32 block, u32 all, u32 &blocks)
{
	u32 first = (u32)where & 0xffff;
	blocks = (u32)(where >> 16) & 0xffff;
	return block >= first ? block - first : block + all - first;
}

// ------------------------------------------------------------------- copying

static PUSHGATE_DEVICE u64x2 get(const u64x2 *p) { return load_payload(p); }
static PUSHGATE_DEVICE void put(u64x2 *p, u64x2 v) { store_payload(p, v); }
template <class T> static PUSHGATE_DEVICE T get(const T *p) { return *p; }
template <class T> static PUSHGATE_DEVICE void put(T *p, T v) { *p = v; }

static PUSHGATE_DEVICE void copy_bytes(u64 dst, u64 src, u64 bytes, u32 lane, u32 lanes)
{
	for (u64 i = lane; i < bytes; i += lanes)
		*reinterpret_cast<u8 *>(dst + i) = *reinterpret_cast<const u8 *>(src + i);
}

// Copies whole units between addresses that are multiples of the unit. Up to four loads of a thread are in flight before its
// first store, which hides the latency of the bus; so 512 threads read up to 32 KiB in one trip over the bus.
template <class T> static PUSHGATE_DEVICE void copy_units(u64 dst, u64 src, u64 n, u32 lane, u32 lanes)
{
	T *d = reinterpret_cast<T *>(dst);
	const T *s = reinterpret_cast<const T *>(src);
	u64 i = lane, step = lanes;
	for (; i + 3 * step < n; i += 4 * step) {
		T a = get(s + i), b = get(s + i + step), c = get(s + i + 2 * step), e = get(s + i + 3 * step);
		put(d + i, a);
		put(d + i + step, b);
		put(d + i + 2 * step, c);
		put(d + i + 3 * step, e);
	}
	// At most three units are left for each thread.
	bool one = i < n, two = i + step < n, three = i + 2 * step < n;
	T a{}, b{}, c{};
	if (one)
		a = get(s + i);
	if (two)
		b = get(s + i + step);
	if (three)
		c = get(s + i + 2 * step);
	if (one)
		put(d + i, a);
	if (two)
		put(d + i + step, b);
	if (three)
		put(d + i + 2 * step, c);
}

template <class T> static PUSHGATE_DEVICE void copy_as(u64 dst, u64 src, u64 bytes, u32 lane, u32 lanes)
{
	u64 head = (0 - dst) & (sizeof(T) - 1);
	if (head > bytes)
		head = bytes;
	u64 n = (bytes - head) / sizeof(T), done = head + n * sizeof(T);
	copy_bytes(dst, src, head, lane, lanes);
	copy_units<T>(dst + head, src + head, n, lane, lanes);
	copy_bytes(dst + done, src + done, bytes - done, lane, lanes);
}

// Copies at any alignment and any length, and touches no byte beyond. The unit depends on the
// alignment that the two addresses have in common; the few bytes before and after are copied one by
// one.
static PUSHGATE_DEVICE void copy_exact(u64 dst, u64 src, u64 bytes, u32 lane, u32 lanes)
{
	u64 apart = dst ^ src;
	if ((apart & 15) == 0)
		copy_as<u64x2>(dst, src, bytes, lane, lanes);
	else if ((apart & 7) == 0)
		copy_as<u64>(dst, src, bytes, lane, lanes);
	else if ((apart & 3) == 0)
		copy_as<u32>(dst, src, bytes, lane, lanes);
	else
		copy_bytes(dst, src, bytes, lane, lanes);
}

// ------------------------------------------------------------ pushers, pullers

// Shared memory of a block, two of these used in turn: one holds the command that is being copied,
// the other the command found in the meantime.
struct found {
	u64 word[command_words];
	u64 what; // nothing, a command, or the end
};
static constexpr u64 nothing = 0, command = 1, end = 2;

// Moves `at` past commands that do not name this block, up to one that does, which it copies into
// `f`. True if any command was passed or found; `mine` if one was found.
#if PUSHGATE_GPU
// Two lanes read one command, so that a block passes sixteen commands at the price of one. The payload that a command names is
// older than the command. So the loads acquire what the dispatcher released before the command, including what the dispatcher
// had acquired from the host; the block's barrier hands that on to the threads that copy.
static PUSHGATE_DEVICE bool find(const copy_worker_params &p, u32 ring, u32 block, u32 all, u64 &at, bool &mine, found &f)
{
	u32 lane = thread_index() % 32, j = lane / 2, half = lane % 2;
	u64 index = at + j, lap = lap_of(index, p.slots_log);
	u64x2 v = load_pair_device_acquire(slot_of(ring ? p.mailboxes[1] : p.mailboxes[0], index, p.slots_log) + half * 2);
	u32 whole = __ballot_sync(0xffffffffu, is_lap(v.x, lap) && is_lap(v.y, lap));
	u32 complete = whole & whole >> 1 & 0x55555555u;
	u32 gap = __ffs(~complete & 0x55555555u); // of the first that is not there; 0: all are
	u32 n = gap ? (gap - 1) / 2 : 16;
	u32 blocks;
	u32 rank = rank_in(data_of(v.y), block, all, blocks);
	u32 named = __ballot_sync(0xffffffffu, half == 1 && j < n && rank < blocks);
	mine = named != 0;
	u32 which = mine ? (__ffs(named) - 1) / 2 : n;
	if (mine && j == which) {
		f.word[half * 2] = v.x;
		f.word[half * 2 + 1] = v.y;
	}
	at += which;
	return n != 0;
}
#else
static bool find(const copy_worker_params &p, u32 ring, u32 block, u32 all, u64 &at, bool &mine, found &f)
{
	const u64 *w = slot_of(ring ? p.mailboxes[1] : p.mailboxes[0], at, p.slots_log);
	u64 lap = lap_of(at, p.slots_log);
	for (u32 i = 0; i < command_words; i++) {
		f.word[i] = load<order::acquire>(w + i);
		if (!is_lap(f.word[i], lap))
			return false;
	}
	u32 blocks;
	mine = rank_in(data_of(f.word[3]), block, all, blocks) < blocks;
	at += !mine;
	return true;
}
#endif

// Looks once for commands and puts what it found into `f`. `passed` becomes the first command that
// this block must not skip, `at` the command after the one that was found.
static PUSHGATE_DEVICE void take(const copy_worker_params &p, u64 number, u32 ring, u32 block, u32 all, u64 &at,
				 u64 &passed, backoff &pause, found &f)
{
	const u64 *stop = word_of(p, stop_at);
	bool mine = false, ends = false;
	// This load travels together with the loads of the commands and does not delay them.
	u64 stopped = load_device<order::relaxed>(stop);
	bool any = find(p, ring, block, all, at, mine, f);
	if (!any && stopped == number) {
		// The dispatcher forwarded all commands before it stored the word that stops us.
		// The fence makes this an acquire, so a second look sees every forwarded command.
		fence_device();
		any = find(p, ring, block, all, at, mine, f);
		ends = !any;
	}
	if (thread_index() == 0)
		f.what = mine ? command : ends ? end : nothing;
	passed = at;
	at += mine;
	if (any)
		pause.n = 0;
	else if (!ends)
		pause.wait();
}

// Serves commands. While the other warps copy a command, the first warp publishes the count of the
// command before and looks for the next: so copying never waits for these trips over the bus. With
// only one warp, and on a CPU, the first warp does both in turn.
static PUSHGATE_DEVICE void serve(const copy_worker_params &p, u64 number, u32 ring, u32 block)
{
	found *turns = static_cast<found *>(shared_memory());
	u32 all = ring ? p.pullers : p.pushers;
	u32 word = ring ? p.pushers + block : block;
	u64 *count = reinterpret_cast<u64 *>(p.counts) + word;
	u64 *cursor = word_of(p, passed_at + word);
	u32 lookers = PUSHGATE_GPU ? 32 : 1;
	bool looks = thread_index() < lookers, apart = PUSHGATE_GPU && block_size() > lookers;
	u32 lane = apart ? thread_index() - lookers : thread_index();
	u32 lanes = apart ? block_size() - lookers : block_size();
	u64 at = load_device<order::relaxed>(cursor), passed = at, published = at;
	bool copied = false;
	backoff pause;
	if (looks)
		take(p, number, ring, block, all, at, passed, pause, turns[0]);
	for (u32 turn = 0;; turn ^= 1) {
		// After this barrier all threads have the command and what was acquired with it,
		// and all threads have done their stores for the command before.
		block_barrier();
		// P3: through the barrier, those stores are ordered before the count for every
		// reader of the count: the host, and kernels of this device that see a flag which
		// the host writes after reading the count. Release at system scope is cumulative,
		// so this holds for pushes and pulls alike.
		if (thread_index() == 0 && passed != published) {
			if (copied)
				store<order::release>(count, passed);
			else
				store<order::relaxed>(count, passed);
			published = passed;
		}
		const found &f = turns[turn];
		if (f.what == end)
			break;
		copied = f.what == command;
		if (copied) {
			u64 device = data_of(f.word[0]), host = data_of(f.word[1]), bytes = data_of(f.word[2]);
			u32 blocks;
			u64 rank = rank_in(data_of(f.word[3]), block, all, blocks);
			// Whole cache lines, so that no two blocks store into the same line.
			u64 slice = ((bytes + blocks - 1) / blocks + 127) & ~127ull;
			u64 from = rank * slice;
			if (from < bytes && !(apart && looks)) {
				u64 n = bytes - from < slice ? bytes - from : slice;
				u64 dst = (ring ? device : host) + from, src = (ring ? host : device) + from;
				copy_exact(dst, src, n, lane, lanes);
			}
		}
		if (looks)
			take(p, number, ring, block, all, at, passed, pause, turns[turn ^ 1]);
	}
	// The fence releases the cursor, and what was copied, to the launch that has the next turn.
	if (thread_index() == 0) {
		store_device<order::relaxed>(cursor, at);
		fence_device();
		add_device(word_of(p, serving_at), ~0ull);
	}
}

// ---------------------------------------------------------------------- turns
//
// The host's launches are ordered by one stream. Launches in a graph are not: they run whenever the
// graph is replayed, beside the host's launches and beside each other. So one launch at a time has
// the turn. Another launch of the host waits for the turn; a graph's launch that has the turn gives
// it up as soon as it sees the host's launch wait, because the graph is not complete before its
// launch has ended, while nothing of the program waits for the end of the host's launch. Another
// launch of a graph does not wait but ends at once, because the launch that has the turn also stays
// for the other graph's operation.
//
// The host's launches are told their number, which is even. A graph's launch can't be told one,
// because its parameters are the same in each replay. But all blocks at one position of the grid
// are alike: the first block to begin at each position together make up one launch, the second
// blocks the next launch, and so on. So each block counts how many blocks have begun at its
// position, which gives an odd launch number, and waits until that launch's dispatcher says whether
// the launch serves or ends.

// Whether operations of graphs are under way. Errs towards more, not fewer: operations begun are
// read after operations ended. (The difference can be negative: an operation may end before its
// launch of the worker begins.)
static PUSHGATE_DEVICE bool graphs_open(const copy_worker_params &p)
{
	u64 closed = load_device<order::acquire>(word_of(p, closed_at));
	return (long long)(load_device<order::acquire>(word_of(p, opened_at)) - closed) > 0;
}

static PUSHGATE_DEVICE void say(const copy_worker_params &p, u64 phase)
{
	if (!of_a_graph(p))
		store<order::relaxed>(reinterpret_cast<u64 *>(p.state), p.generation << 8 | phase);
}

// Called by the dispatcher's first thread: takes the turn. True if this launch has the turn now.
static PUSHGATE_DEVICE bool takes_turn(const copy_worker_params &p, u64 number)
{
	u64 *turn = word_of(p, turn_at), began = clock_ns();
	add_device(word_of(p, of_a_graph(p) ? opened_at : waiting_at), 1);
	// We first count our operation as begun, then look at the turn. The launch that has the
	// turn first stores "leaving", then looks at the operations. A fence stands between on both
	// sides, so one of the two sees the other.
	fence_total();
	bool taken;
	backoff pause;
	for (;;) {
		u64 who = compare_and_swap(turn, 0, number);
		taken = who == 0;
		if (taken || (of_a_graph(p) && !(who & leaving)))
			break;
		if (clock_ns() - began > p.limit_ns) { // P7
			// As on leaving: say so, so that a thread that posts from now on starts
			// another launch.
			say(p, phase_leaving);
			fence_total();
			taken = compare_and_swap(turn, 0, number) == 0;
			break;
		}
		pause.wait();
	}
	if (!of_a_graph(p))
		add_device(word_of(p, waiting_at), ~0ull);
	// Acquires what the previous owner of the turn released.
	fence_device();
	return taken;
}

// The number of the block's launch if that launch has the turn, 0 if the launch is to end.
static PUSHGATE_DEVICE u64 turn_of(const copy_worker_params &p, u32 block)
{
	u64 mine = 0;
	if (thread_index() == 0) {
		u32 blocks = 1 + p.pushers + p.pullers, counts = passed_at + blocks - 1;
		u64 number = 2 * p.generation;
		u32 fate_at = counts + blocks + fates;
		if (of_a_graph(p)) {
			u64 count = add_device(word_of(p, counts + block), 1);
			number = 2 * count + 1;
			fate_at = counts + blocks + (u32)(count % fates);
		}
		bool serves = false;
		if (block == 0) {
			serves = takes_turn(p, number);
			if (serves)
				store_device<order::relaxed>(word_of(p, serving_at), blocks - 1);
			store_device<order::release>(word_of(p, fate_at), number << 1 | serves);
		} else {
			u64 fate, began = clock_ns();
			backoff pause;
			// P7: the dispatcher has a limit of its own, which is half of this one, so
			// this limit is not reached before.
			while ((fate = load_device<order::acquire>(word_of(p, fate_at))) >> 1 < number &&
			       clock_ns() - began < 2 * p.limit_ns)
				pause.wait();
			// The word may already hold the fate of a later launch. If our launch
			// serves, it keeps the turn until this block has served, so the turn word
			// tells.
			serves = fate >> 1 == number
					 ? fate & 1
					 : (load_device<order::acquire>(word_of(p, turn_at)) & ~leaving) == number;
		}
		mine = serves ? number : 0;
	}
	return block_broadcast(mine);
}

// ------------------------------------------------------------------ dispatcher

static PUSHGATE_DEVICE u64 *inline_count(const copy_worker_params &p)
{
	return reinterpret_cast<u64 *>(p.counts) + p.pushers + p.pullers;
}

// Forwards the commands that are there, up to eight of each ring. True if there was any.
#if PUSHGATE_GPU
// One access of the warp reads both rings: one round trip over the bus.
static PUSHGATE_DEVICE bool forward(const copy_worker_params &p, u64 &push, u64 &pull)
{
	u32 lane = thread_index() % 32, ring = lane / 16, j = lane % 16 / 2, half = lane % 2;
	u64 index = (ring ? pull : push) + j, lap = lap_of(index, p.slots_log);
	u64x2 v = load_pair_acquire(slot_of(ring ? p.rings[1] : p.rings[0], index, p.slots_log) + half * 2);
	u32 whole = __ballot_sync(0xffffffffu, is_lap(v.x, lap) && is_lap(v.y, lap));
	u32 gaps = ~(whole & whole >> 1) & 0x55555555u;
	u32 pushes = (__ffs((gaps & 0xffff) | 0x10000) - 1) / 2;
	u32 pulls = (__ffs(gaps >> 16 | 0x10000) - 1) / 2;
	if (!(pushes | pulls))
		return false;
	// Stores inline words at once: they come in the command, so no order is needed before them.
	u64 first = __shfl_xor_sync(0xffffffffu, v.x, 1), last = __shfl_xor_sync(0xffffffffu, v.y, 1);
	u64 where = data_of(half ? v.y : last);
	u32 words = ring && j < pulls ? inline_words(where) : 0;
	if (half < words)
		store<order::relaxed>(reinterpret_cast<u64 *>(data_of(half ? first : v.x)) + half,
				      inline_word(half ? v.x : v.y, where, half));
	bool inlined = __any_sync(0xffffffffu, words != 0);
	// What the host wrote before a command was acquired with the command, at system scope; the
	// fence releases it to the blocks together with our stores of the command. Each of the two
	// scopes includes both of its threads, so what is ordered before our stores for us is
	// ordered before them for the blocks. All lanes execute the fence together, after the
	// ballot: what one lane acquired, the others pass on.
	__syncwarp();
	fence_device();
	if (j < (ring ? pulls : pushes))
		store_pair(slot_of(ring ? p.mailboxes[1] : p.mailboxes[0], index, p.slots_log) + half * 2, v.x, v.y);
	push += pushes;
	pull += pulls;
	if (inlined) {
		// P3: as with a block's count, the barrier orders the lanes' stores before the
		// count.
		__syncwarp();
		if (lane == 0)
			store<order::release>(inline_count(p), pull);
	}
	return true;
}
// Whether all leases are done. One access of the warp suffices for 31 leases: lane 0 reads the pair
// that holds the last generation to leave at once, and each other lane reads one lease.
// `launching`: some operations are not done, but all of these are still being launched.
static PUSHGATE_DEVICE bool leases_done(const copy_worker_params &p, bool &quit, bool &launching)
{
	bool quits = false;
	u32 open = 0, launches = 0;
	for (u32 i = thread_index() % 32; i < p.leases_n; i += 32) {
		u64x2 v = load_pair(reinterpret_cast<const u64 *>(p.leases) + 2 * i);
		if (i == 0) {
			quits = v.x >= p.generation;
			launches = (u32)v.y;
		} else {
			open += v.x > v.y ? (u32)(v.x - v.y) : 0;
		}
	}
	quit = __any_sync(0xffffffffu, quits);
	open = __reduce_add_sync(0xffffffffu, open);
	launching = open != 0 && open <= __reduce_add_sync(0xffffffffu, launches);
	return open == 0;
}
#else
static bool forward(const copy_worker_params &p, u64 &push, u64 &pull)
{
	bool any = false;
	for (u32 ring = 0; ring < 2; ring++) {
		u64 &at = ring ? pull : push;
		for (u32 n = 0; n < 8; n++, at++) {
			const u64 *from = slot_of(ring ? p.rings[1] : p.rings[0], at, p.slots_log);
			u64 *to = slot_of(ring ? p.mailboxes[1] : p.mailboxes[0], at, p.slots_log);
			u64 lap = lap_of(at, p.slots_log), w[command_words];
			bool whole = true;
			for (u32 i = 0; i < command_words; i++) {
				w[i] = load<order::acquire>(from + i);
				whole &= is_lap(w[i], lap);
			}
			if (!whole)
				break;
			u32 words = ring ? inline_words(data_of(w[3])) : 0;
			for (u32 i = 0; i < words && i < 2; i++)
				store<order::relaxed>(reinterpret_cast<u64 *>(data_of(w[0])) + i,
						      inline_word(w[1 + i], data_of(w[3]), i));
			for (u32 i = 0; i < command_words; i++)
				store<order::release>(to + i, w[i]);
			if (words)
				store<order::release>(inline_count(p), at + 1);
			any = true;
		}
	}
	return any;
}
// Whether all leases are done. `opened` is read before `done`: a lease that is opened after this
// look is found by the look after the fence.
static bool leases_done(const copy_worker_params &p, bool &quit, bool &launching)
{
	const u64 *w = reinterpret_cast<const u64 *>(p.leases);
	quit = load<order::relaxed>(w) >= p.generation;
	u64 open = 0, launches = load<order::relaxed>(w + 1);
	for (u32 i = 1; i < p.leases_n; i++) {
		u64 opened = load<order::acquire>(w + 2 * i), done = load<order::acquire>(w + 2 * i + 1);
		open += opened > done ? opened - done : 0;
	}
	launching = open != 0 && open <= launches;
	return open == 0;
}
#endif

// The first thread's value, to all threads that dispatch: a warp on a GPU, one thread on a CPU.
static PUSHGATE_DEVICE u64 agreed(u64 v) { return PUSHGATE_GPU ? warp_broadcast(v) : v; }

// Whether an operation is under way. Only the host's launches read the leases; when a lease needs
// the worker and a graph's launch has the turn, another launch of the host comes for that lease.
static PUSHGATE_DEVICE bool needs(const copy_worker_params &p, bool &quit, bool &launching)
{
	quit = launching = false;
	bool leased = !of_a_graph(p) && !leases_done(p, quit, launching);
	bool open = agreed(graphs_open(p));
	launching &= !open;
	return leased || open;
}

static PUSHGATE_DEVICE void dispatch(const copy_worker_params &p, u64 number)
{
	u64 push = load_device<order::relaxed>(word_of(p, 0)), pull = load_device<order::relaxed>(word_of(p, 1));
	bool first = thread_index() == 0;
	if (first)
		say(p, phase_running);
	backoff pause;
	// The time of one thread, here and below, so that all threads decide alike.
	u64 command = agreed(clock_ns()), needed = command;
	u64 glanced = command, launching_since = command;
	bool told = false;
	for (;;) {
		bool any = forward(p, push, pull);
		if (!any)
			pause.wait();
		u64 now = agreed(clock_ns());
		if (any) {
			command = needed = now;
			pause.n = 0;
			told = false;
			if (!of_a_graph(p))
				continue;
		}
		// Looking whether the worker is still needed costs a trip over the bus, during
		// which a command waits. So look seldom.
		if (now < glanced + glance_ns)
			continue;
		glanced = now;
		bool quit, launching, expired = now > command + p.limit_ns;
		bool leased = needs(p, quit, launching);
		if (!launching)
			launching_since = now;
		// A launch may wait for everything that runs here: when the driver loads the kernel
		// first, or makes room for the registers that it spills. Then the launch waits for
		// the worker, which in turn stays for that launch's operation. So the worker
		// leaves, and the thread that launches starts the next generation, which stands
		// behind the launch.
		bool in_the_way = now > launching_since + launch_ns;
		if (leased && !in_the_way)
			needed = now;
		// A graph's launch with nothing to copy may be staying for another graph's
		// operation. Its own graph must not wait for that, so the host is asked to take
		// over.
		if (of_a_graph(p) && first && !told && now > command + idle_ns) {
			store<order::relaxed>(reinterpret_cast<u64 *>(p.state) + 2, number);
			told = true;
		}
		bool asked = of_a_graph(p) && agreed(load_device<order::relaxed>(word_of(p, waiting_at)));
		if (!quit && !expired && !asked && now < needed + p.linger_ns)
			continue;
		// Say "leaving", then look once more (docs/worker.md, "Leaving"). A thread that
		// posts or leases stores first and then reads the state, with a fence between; here
		// a fence stands between as well. So at least one of the two sees the other's
		// store. The same holds for a graph's operation and the turn.
		if (first) {
			say(p, phase_leaving);
			store_device<order::relaxed>(word_of(p, turn_at), number | leaving);
		}
		agreed(0);
		fence_total();
		if (!quit && !asked &&
		    (forward(p, push, pull) || (!expired && needs(p, quit, launching) && !(launching && in_the_way)))) {
			if (first) {
				store_device<order::relaxed>(word_of(p, turn_at), number);
				say(p, phase_running);
			}
			command = needed = agreed(clock_ns());
			continue;
		}
		if (first) {
			say(p, phase_left);
			store_device<order::relaxed>(word_of(p, 0), push);
			store_device<order::relaxed>(word_of(p, 1), pull);
		}
		agreed(0);
		// Stop the blocks; the store is ordered after the commands that were forwarded. The
		// turn passes on only when all blocks have stored how far they have come. Waiting
		// for them costs nothing: they are blocks of this launch, which does not end before
		// they do.
		if (first) {
			store_device<order::release>(word_of(p, stop_at), number);
			backoff wait;
			while (load_device<order::acquire>(word_of(p, serving_at)))
				wait.wait();
			store_device<order::release>(word_of(p, turn_at), 0);
		}
		return;
	}
}

// The worker: one block dispatches, p.pushers blocks push, p.pullers blocks pull.
PUSHGATE_KERNEL_BOUND(copy_worker, copy_worker_params, 544)
{
	u32 b = block_index();
	u64 number = turn_of(p, b);
	if (number == 0) {
		// This launch never had the turn: another launch serves, or the next one will.
		if (b == 0 && thread_index() == 0)
			say(p, phase_left);
	} else if (b == 0) {
		if (thread_index() < (PUSHGATE_GPU ? 32u : 1u))
			dispatch(p, number);
	} else if (b <= p.pushers) {
		serve(p, number, 0, b - 1);
	} else {
		serve(p, number, 1, b - 1 - p.pushers);
	}
}

struct copy_worker_mark_params {
	u64 closed; // device: how many operations of graphs have ended
};

// Runs after a graph's operation and counts it as ended.
PUSHGATE_KERNEL(copy_worker_mark, copy_worker_mark_params)
{
	if (block_index() == 0 && thread_index() == 0) {
		fence_device();
		add_device(reinterpret_cast<u64 *>(p.closed), 1);
	}
}

// -------------------------------------------------------------------- ceilings
// kernels: bare_copy bare_echo

struct bare_copy_params {
	u64 dst;
	u64 src;
	u64 bytes; // of a round, cut among the blocks
	u64 rounds;
};

// The worker's copy loops without commands.
PUSHGATE_KERNEL_BOUND(bare_copy, bare_copy_params, 544)
{
	u64 slice = ((p.bytes + grid_size() - 1) / grid_size() + 127) & ~127ull;
	u64 from = block_index() * slice;
	u64 n = from >= p.bytes ? 0 : p.bytes - from < slice ? p.bytes - from : slice;
	for (u64 r = 0; r < p.rounds; r++) {
		// As before each command: what was loaded earlier may have changed since.
		fence_device();
		copy_exact(p.dst + from, p.src + from, n, thread_index(), block_size());
	}
}

struct bare_echo_params {
	u64 word; // host: what to wait for
	u64 echo; // host: said back
	u64 from;
	u64 rounds;
};

// One thread echoes each number that the host writes, from `from` + 1 on.
PUSHGATE_KERNEL(bare_echo, bare_echo_params)
{
	if (thread_index() || block_index())
		return;
	u64 began = clock_ns();
	for (u64 i = p.from + 1; i <= p.from + p.rounds; i++) {
		backoff pause;
		while (load<order::acquire>(reinterpret_cast<u64 *>(p.word)) < i) {
			if (clock_ns() - began > 60000000000ull) // P7
				return;
			pause.wait();
		}
		store<order::release>(reinterpret_cast<u64 *>(p.echo), i);
	}
}
