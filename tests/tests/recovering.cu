// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Two ranks send to each other, round by round, and compare each word that arrives.
#include "pushgate/device.cuh"

using namespace pushgate;

struct churn_params {
	u64 qp;
	u64 region; // u64: the other rank puts the round's number into it
	u64 out;    // u64[3]: status, rounds that were whole, words that were wrong
	u64 rounds;
	u32 rkey;
	u32 rank;
};

static const u32 WORDS = 75;

PUSHGATE_DEVICE static u64 word(u32 rank, u64 round, u32 index)
{
	return ((u64)rank << 60 | round << 8 | index) * 0x9e3779b97f4a7c15;
}

PUSHGATE_KERNEL(churn, churn_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 *out = reinterpret_cast<u64 *>(p.out);
	u64 mine[WORDS], theirs[WORDS], wrong = 0, round = 0;
	status s = status::ok;
	message m;

	for (; s == status::ok && round < p.rounds; round++) {
		// Up to five words travel in the WQE, more in the window.
		u32 words = 1 + (u32)(round * 7 % WORDS);
		for (u32 i = 0; i < words; i++)
			mine[i] = word(p.rank, round, i);
		s = send(qp, mine, words * 8, (u32)round);
		if (s == status::ok)
			s = put_signal(qp, p.rkey, 0, &round, sizeof round, 1, round + 1);
		if (s == status::ok)
			s = recv(qp, m);
		if (s == status::ok) {
			wrong += m.tag != (u32)round || m.length != words * 8;
			if (m.length <= sizeof theirs)
				copy_out(theirs, m);
			for (u32 i = 0; i < words; i++)
				wrong += theirs[i] != word(1 - p.rank, round, i);
			release(qp);
			s = wait_signal(qp, 1, round + 1);
		}
		// The other rank is a round ahead at most.
		u64 put = load<order::relaxed>(reinterpret_cast<const u64 *>(p.region));
		wrong += s == status::ok && put != round && put != round + 1;
	}
	// The other rank has all of it.
	if (s == status::ok)
		s = flush(qp);
	out[0] = (u64)s;
	out[1] = round;
	out[2] = wrong;
	qp.close();
}

// Bytes of a buffer that a receive names, and how many there are. Behind the region's first word, which has the round.
static const u32 BUFFER = WORDS * 8;
static const u32 BUFFERS = 16;
// The tag of the receive that is posted first and taken last.
static const u32 LAST = 0xfffffff0;

PUSHGATE_DEVICE static u64 buffer_of(u32 receive)
{
	return 8 + (u64)(receive ? 1 + receive % BUFFERS : 0) * BUFFER;
}

// As `churn`, with messages that go to the buffers of posted receives: of two receives the younger one is taken first, and the first
// one of all stays open until the end. Here `region` and `rkey` are those of this rank's own buffers.
PUSHGATE_KERNEL(posted, churn_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 *out = reinterpret_cast<u64 *>(p.out);
	u64 mine[WORDS], wrong = 0, round = 0;
	u32 receives = 0;
	status s = post_recv(qp, p.rkey, buffer_of(receives++), BUFFER, LAST);
	message m;

	for (; s == status::ok && round <= p.rounds; round++) {
		bool last = round == p.rounds;
		u32 words = 1 + (u32)(round * 7 % WORDS);
		for (u32 i = 0; i < 2 && round % 2 == 0 && !last && s == status::ok; i++) {
			s = post_recv(qp, p.rkey, buffer_of(receives), BUFFER, (u32)round + 1 - i);
			receives++;
		}
		for (u32 i = 0; i < words; i++)
			mine[i] = word(p.rank, round, i);
		if (s == status::ok)
			s = send(qp, mine, words * 8, last ? LAST : (u32)round);
		if (s == status::ok)
			s = recv(qp, m);
		if (s != status::ok)
			break;
		u32 expected = last ? 0 : 1 + ((u32)round ^ 1);
		wrong += !m.in_buffer || m.receive != expected || m.length != words * 8;
		const u64 *theirs = reinterpret_cast<const u64 *>(p.region + buffer_of(expected));
		for (u32 i = 0; i < words; i++)
			wrong += load<order::relaxed>(theirs + i) != word(1 - p.rank, round, i);
		release(qp);
		store<order::relaxed>(reinterpret_cast<u64 *>(p.region), round);
	}
	if (s == status::ok)
		s = flush(qp);
	out[0] = (u64)s;
	out[1] = round;
	out[2] = wrong;
	qp.close();
}
