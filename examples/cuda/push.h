/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What main.cu passes to the kernel of push.cu. Both include this file, so the fields are the same. */
struct push_params {
	unsigned long long qp;	   /* one pushgate_qp in the device's memory */
	unsigned long long result; /* one word: how the kernel ended */
	unsigned int rkey;	   /* the other rank's region */
	unsigned int rank;
	unsigned int words; /* of 4 bytes, in all messages together */
	unsigned int chunk; /* words in one message; `words` is a multiple */
};

/* The word at a place of what a rank sends. */
#define PUSH_WORD(rank, place) ((place) * 2654435761u + (rank) * 97u + 1u)
