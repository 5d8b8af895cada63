/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The cells of the halo exchange on the CPU: before the first step, and after the last one, with which the ranks' results are compared.
 * Each rank has a cube with `side` cells along each edge; the cubes are stacked along z.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* A cell before the first step: `z` counts the planes of all ranks, `within` the cells of a plane. */
static float first_value(uint32_t z, uint32_t within)
{
	return (float)((z * 31u + within * 17u) % 101u);
}

/* The planes from `first` on, `planes` of them, before the first step. */
static float *first_cells(uint32_t first, uint32_t planes, uint32_t side)
{
	uint32_t plane = side * side, z, within;
	float *cells = (float *)malloc((size_t)planes * plane * sizeof(float));

	if (!cells) {
		fprintf(stderr, "halo: no memory\n");
		exit(EXIT_FAILURE);
	}
	for (z = 0; z < planes; z++)
		for (within = 0; within < plane; within++)
			cells[(size_t)z * plane + within] = first_value(first + z, within);
	return cells;
}

/* The cells of all ranks after `steps` steps. */
static float *all_cells(uint32_t ranks, uint32_t side, uint32_t steps)
{
	uint32_t planes = side * ranks, plane = side * side, step, z, y, x;
	float *from = first_cells(0, planes, side), *to = first_cells(0, planes, side), *other;

	for (step = 1; step <= steps; step++) {
		for (z = 0; z < planes; z++) {
			for (y = 0; y < side; y++) {
				for (x = 0; x < side; x++) {
					size_t i = ((size_t)z * side + y) * side + x;
					float u = z > 0 ? from[i - plane] : 0.0f;
					float d = z + 1 < planes ? from[i + plane] : 0.0f;
					float n = y > 0 ? from[i - side] : 0.0f;
					float s = y + 1 < side ? from[i + side] : 0.0f;
					float w = x > 0 ? from[i - 1] : 0.0f;
					float e = x + 1 < side ? from[i + 1] : 0.0f;

					/* Sums and one product: no compiler contracts them, so every device computes the same bits. */
					to[i] = (((u + d) + (n + s)) + (w + e)) * (1.0f / 6.0f);
				}
			}
		}
		other = from;
		from = to;
		to = other;
	}
	free(to);
	return from;
}
