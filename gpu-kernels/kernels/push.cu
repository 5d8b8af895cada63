// SPDX-License-Identifier: MIT OR Apache-2.0
// A bare store kernel: the ceiling for anything that pushes. No window, no credit, no WQE.
#include "pushgate/arch.cuh"

using namespace pushgate;

struct bare_store_params {
	u64 dst;
	u64 bytes;  // of the buffer, a multiple of 16
	u64 rounds; // how often it is written
};

PUSHGATE_KERNEL(bare_store, bare_store_params)
{
	u64x2 *dst = reinterpret_cast<u64x2 *>(p.dst);
	u64 n = p.bytes / 16, first = (u64)block_index() * block_size() + thread_index();
	u64 step = (u64)grid_size() * block_size();
	for (u64 r = 0; r < p.rounds; r++)
		for (u64 i = first; i < n; i += step)
			store_payload(dst + i, u64x2{r, i});
}
