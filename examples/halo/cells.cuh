// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A step of the halo exchange for the cells of one column, which halo.cu and nccl/halo.cu share. They define HALO_DEVICE.

// Writes the cells `within` of planes `first` to `end` of a cube of `planes` planes. `up` and `down` are the planes of the neighbours
// above and below, or null beyond an edge without a neighbour, where the cells are 0.
HALO_DEVICE void halo_column(const float *from, float *to, const float *up, const float *down, unsigned side, unsigned planes,
			     unsigned first, unsigned end, unsigned within)
{
	const unsigned plane = side * side, y = within / side, x = within % side;
	float u = first > 0 ? from[(first - 1) * plane + within] : up ? up[within] : 0.0f;
	float here = from[first * plane + within];

	for (unsigned z = first; z < end; z++) {
		const unsigned i = z * plane + within;
		const float d = z + 1 < planes ? from[i + plane] : down ? down[within] : 0.0f;
		const float n = y > 0 ? from[i - side] : 0.0f;
		const float s = y + 1 < side ? from[i + side] : 0.0f;
		const float w = x > 0 ? from[i - 1] : 0.0f;
		const float e = x + 1 < side ? from[i + 1] : 0.0f;

		// Sums and one product: no compiler contracts them, so every device computes the same bits.
		to[i] = (((u + d) + (n + s)) + (w + e)) * (1.0f / 6.0f);
		u = here;
		here = d;
	}
}
