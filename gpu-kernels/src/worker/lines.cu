// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A reader of lines of 128 bytes as NCCL's LL128 protocol reads them: eight lanes load a line with one instruction, and
// the line's last word says which round the other fifteen are of.
#include "pushgate/device.cuh"

using namespace pushgate;

// kernels: watch_lines

struct watch_lines_params {
	u64 lines;    // device: lines of sixteen words, zero at first
	u64 count;    // of lines, a multiple of four
	u64 rounds;   // the last round
	u64 limit_ns; // P7: a reader that has not seen the last round ends after so long
	u64 result;   // u64[3], zero: lines read torn; rounds seen, of all lines; readers that came to the limit
};

// Word `j` of line `line` in round `round`. The last word is the round itself.
PUSHGATE_DEVICE u64 line_word(u64 round, u64 line, u64 j)
{
	return j == 15 ? round : (round << 32 | line) * 0x9e3779b97f4a7c15ull ^ j;
}

// Each warp watches four lines until it has seen the last round in all of them.
PUSHGATE_KERNEL(watch_lines, watch_lines_params)
{
	u32 lane = thread_index() % 32, pair = lane % 8 * 2;
	u64 warp = ((u64)block_index() * block_size() + thread_index()) / 32;
	u64 line = warp * 4 + lane / 8;
	if (warp * 4 >= p.count)
		return;
	const u64 *at = reinterpret_cast<const u64 *>(p.lines) + line * 16 + pair;
	u64 seen = 0, torn = 0, rounds = 0, began = clock_ns();
	bool late = false;
	while (__any_sync(0xffffffffu, seen != p.rounds) && !late) {
		u64x2 v = load_pair(at);
		u64 round = __shfl_sync(0xffffffffu, v.y, lane | 7);
		bool wrong = round && (v.x != line_word(round, line, pair) || v.y != line_word(round, line, pair + 1));
		torn += __any_sync(0xffu << (lane & 24), wrong);
		rounds += round != seen;
		seen = round;
		late = __any_sync(0xffffffffu, clock_ns() - began > p.limit_ns);
	}
	if (lane % 8 == 0) {
		u64 *result = reinterpret_cast<u64 *>(p.result);
		add_device(result, torn);
		add_device(result + 1, rounds);
		add_device(result + 2, late);
	}
}
