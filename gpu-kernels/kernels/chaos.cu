// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Checked traffic for `pushgate chaos`: each block sends numbered messages to one peer as fast as credits come, and
// checks the number and every word of each message that arrives from that peer.
#include "pushgate/device.cuh"

using namespace pushgate;

struct chaos_params {
	u64 qps;      // pushgate_qp[], one for each block
	u64 words;    // u64[CHAOS_WORDS] for each block, shared with the host
	u64 seed;     // of the contents, the same at all ranks
	u64 limit_ns; // the kernel ends after this, whatever happens
	u32 rank;
	u32 plant; // a planted fault at message CHAOS_PLANT_AT: 1 left out, 2 sent twice, 3 with a wrong bit; 4: all stops
};

static const u32 CHAOS_WORDS = 16; // of 8 bytes, for each block
enum chaos_word : u32 {
	CHAOS_ORDER,  // host: 0 go on, 1 send no more and end when all has arrived, 2 end at once
	CHAOS_STATUS, // 1 + the block's status, when the block has ended
	// On another cache line than the host's word.
	CHAOS_SENT = 8,
	CHAOS_TAKEN,
	CHAOS_LOST,
	CHAOS_DOUBLED,
	CHAOS_WRONG,
};

static const u32 CHAOS_MOST = 75; // words of a message
static const u32 CHAOS_LAST = 1;  // tag of a sender's last message
static const u64 CHAOS_PLANT_AT = 500;
static const u64 CHAOS_FAR = 1ull << 20; // a number this far ahead is a wrong number, not a sign of lost messages

PUSHGATE_DEVICE static u64 chaos_mix(u64 x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	return x ^ x >> 31;
}

// Words of message `number`: up to five travel in the WQE, more in the window.
PUSHGATE_DEVICE static u32 chaos_length(u64 key, u64 number) { return 1 + (u32)(chaos_mix(key + number) % CHAOS_MOST); }

// Word 0 is the message's number.
PUSHGATE_DEVICE static u64 chaos_content(u64 key, u64 number, u32 index)
{
	return index == 0 ? number : chaos_mix(key ^ (number << 8 | index));
}

// What arrived from the peer.
struct chaos_received {
	u64 taken = 0, next = 0, lost = 0, doubled = 0, wrong = 0;
	bool last = false;

	PUSHGATE_DEVICE void check(u64 key, const message &m)
	{
		u64 words[CHAOS_MOST];
		taken++;
		if (m.length < 8 || m.length > sizeof words || m.length % 8 != 0) {
			wrong++, next++;
			return;
		}
		copy_out(words, m);
		u64 number = words[0];
		if (number < next) {
			doubled++;
			return;
		}
		if (number - next > CHAOS_FAR) {
			wrong++, next++;
			return;
		}
		lost += number - next;
		next = number + 1;
		last = m.tag == CHAOS_LAST;
		u32 length = last ? 1 : chaos_length(key, number);
		bool right = m.length == length * 8 && m.tag <= CHAOS_LAST;
		for (u32 i = 1; right && i < length; i++)
			right = words[i] == chaos_content(key, number, i);
		wrong += !right;
	}
};

PUSHGATE_KERNEL(chaos, chaos_params)
{
	u32 b = block_index(), peer = b < p.rank ? b : b + 1;
	u64 *shared = reinterpret_cast<u64 *>(p.words) + b * CHAOS_WORDS;
	queue_pair qp(reinterpret_cast<const pushgate_qp *>(p.qps)[b]);
	u64 ours = chaos_mix(p.seed + p.rank), theirs = chaos_mix(p.seed + peer);
	u64 out[CHAOS_MOST], number = 0, sent = 0, ordered = 0, begin = clock_ns();
	chaos_received in;
	bool ready = false, all_sent = false;
	u32 plant = p.plant;
	send_wr wr;
	wr.opcode = opcode::send;
	wr.payload = out;
	message m;
	backoff pause;
	status s = status::ok;

	for (u32 turn = 1; s == status::ok && !(all_sent && in.last); turn++) {
		bool moved = false;
		// The host's word and the clock cost more than a look at the rings.
		if (turn % 64 == 0) {
			ordered = load<order::relaxed>(shared + CHAOS_ORDER);
			if (ordered == 2 || clock_ns() - begin > p.limit_ns) {
				s = status::timed_out;
				break;
			}
		}
		if (!all_sent && !ready) {
			bool fault = number == CHAOS_PLANT_AT;
			number += fault && plant == 1;
			wr.tag = ordered == 1 ? CHAOS_LAST : 0;
			u32 length = ordered == 1 ? 1 : chaos_length(ours, number);
			for (u32 i = 0; i < length; i++)
				out[i] = chaos_content(ours, number, i);
			if (fault && plant == 3)
				out[length - 1] ^= length > 1 ? 1 : 1ull << 63;
			wr.length = length * 8;
			ready = !(number >= CHAOS_PLANT_AT && plant == 4);
		}
		if (ready) {
			s = try_post_send(qp, wr);
			if (s == status::ok) {
				all_sent = wr.tag == CHAOS_LAST;
				store<order::relaxed>(shared + CHAOS_SENT, ++sent);
				if (number == CHAOS_PLANT_AT && plant == 2) {
					plant = 0; // the second time is the last
				} else {
					number++;
					ready = false;
				}
				moved = true;
			} else if (s == status::again) {
				s = status::ok;
			}
		}
		if (s != status::ok)
			break;
		s = try_recv(qp, m);
		if (s == status::ok) {
			in.check(theirs, m);
			release(qp);
			store<order::relaxed>(shared + CHAOS_LOST, in.lost);
			store<order::relaxed>(shared + CHAOS_DOUBLED, in.doubled);
			store<order::relaxed>(shared + CHAOS_WRONG, in.wrong);
			store<order::relaxed>(shared + CHAOS_TAKEN, in.taken);
			moved = true;
		} else if (s == status::again) {
			s = status::ok;
		}
		if (moved)
			pause = backoff();
		else
			pause.wait();
	}
	// The peer has the last message before this rank ends.
	if (s == status::ok)
		s = flush(qp);
	qp.close();
	store<order::release>(shared + CHAOS_STATUS, 1 + (u64)s);
}
