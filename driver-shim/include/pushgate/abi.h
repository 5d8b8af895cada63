/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * The one definition of everything that two parties share through memory:
 * device code (nvcc, NVRTC, g++), the proxy (Rust, through bindgen) and the
 * kernel module. docs/protocol.md describes every field and every ordering.
 *
 * All words are little endian, 64 bits wide, naturally aligned, and accessed
 * as single relaxed (or, where protocol.md says so, acquire/release) atomics.
 */
#ifndef PUSHGATE_ABI_H
#define PUSHGATE_ABI_H

#if defined(__KERNEL__)
#include <linux/types.h>
typedef __u32 pushgate_u32;
typedef __u64 pushgate_u64;
#elif defined(__CUDACC_RTC__)
/* NVRTC ships no <stdint.h>. */
typedef unsigned int pushgate_u32;
typedef unsigned long long pushgate_u64;
#else
#include <stdint.h>
typedef uint32_t pushgate_u32;
#if defined(__cplusplus)
/* The type that CUDA's atomics take; it has the same width everywhere. */
typedef unsigned long long pushgate_u64;
#else
typedef uint64_t pushgate_u64;
#endif
#endif

/* Bumped whenever a layout below changes; both sides refuse any other. */
#define PUSHGATE_ABI_VERSION 2

/* First word of each segment: "PUSHGATE" read as a little-endian u64. */
#define PUSHGATE_MAGIC 0x4554414748535550ull

/* Payload is taken from a window in units of this many bytes: one cache line,
 * and the smallest store burst that still fills a PCIe packet reasonably. */
#define PUSHGATE_UNIT 64
#define PUSHGATE_UNIT_LOG 6

/* A record (WQE, link record, receive record) is eight words. */
#define PUSHGATE_RECORD_WORDS 8
#define PUSHGATE_RECORD_BYTES 64

/* ------------------------------------------------------------------ limits */

/* Slot cursors in the reservation and credit words are 24 bits wide and must
 * carry the whole 8-bit lap above the slot index: at most 2^16 slots. */
#define PUSHGATE_MAX_SLOTS_LOG 16
/* Payload cursors are 24 bits of units; a ring of 2^23 units (512 MiB) keeps
 * "full" and "empty" apart. */
#define PUSHGATE_MAX_UNITS_LOG 23
/* CQ cursors in the reservation word are 16 bits wide. */
#define PUSHGATE_MAX_CQ_LOG 15
#define PUSHGATE_MAX_RX_LOG 16
#define PUSHGATE_MAX_SIGNALS (1u << 16)
/* Inline payload, bytes, of a SEND and of a PUT. */
#define PUSHGATE_INLINE_SEND 40
#define PUSHGATE_INLINE_PUT 16
/* Largest message, bytes (a window may limit it further). */
#define PUSHGATE_MAX_MESSAGE 0x20000000u
/* Signals only grow and are 56 bits wide: bits 63:56 of their word hold the lap. */
#define PUSHGATE_SIGNAL_MAX 0x00ffffffffffffffull

/* --------------------------------------------------------- words of a record */
/*
 * Every word: bits 63:56 are the lap, ((cursor >> log2(slots)) + 1) & 0xff.
 * A zeroed ring therefore reads as "last lap" when its first lap begins.
 *
 *   w0  55:48 opcode   47:40 flags   39:32 id, high 8 bits   31:0 length
 *   w1  55:32 id, low 24 bits        31:0 tag
 *
 * `id` is the wr_id in a WQE and the sequence number in link and receive
 * records. `length` is in bytes.
 *
 *   not INLINE        w5 31:0 offset in the window, w6 31:0 room held there, units
 *   REGION            w5 31:0 lkey, w6 55:0 offset in that region, in bytes;
 *                     in a link record w5 0, w6 55:0 address in the sender's process
 *   PUT               w2 31:0 rkey, 55:32 signal; w3 55:0 offset in the peer's
 *                     region, bytes; w4 55:0 signal value (WITH_SIGNAL)
 *   SIGNAL            w2 55:32 signal; w4 55:0 signal value
 *   SEND, INLINE      five payload words d0..d4: w3..w7 hold their low 56 bits,
 *                     w2 byte i (0..4) the top byte of d[i]
 *   PUT, INLINE       two payload words d0, d1: w5, w6 hold their low 56 bits,
 *                     w7 byte i (0..1) the top byte of d[i]
 *   NOP               w5, w6: the room that the slot gives back
 *   receive record, BUFFER   w5 31:0 number of the posted receive that was
 *                     taken, counted from 0, its low 32 bits
 */
#define PUSHGATE_LAP_SHIFT 56
#define PUSHGATE_LAP_MASK 0xff00000000000000ull
#define PUSHGATE_DATA_MASK 0x00ffffffffffffffull
#define PUSHGATE_OPCODE_SHIFT 48
#define PUSHGATE_FLAGS_SHIFT 40
#define PUSHGATE_ID_HIGH_SHIFT 32
#define PUSHGATE_ID_LOW_SHIFT 32
#define PUSHGATE_ID_LOW_BITS 24
#define PUSHGATE_SIGNAL_SHIFT 32

#define PUSHGATE_OP_NOP 1
#define PUSHGATE_OP_SEND 2
#define PUSHGATE_OP_PUT 3
#define PUSHGATE_OP_SIGNAL 4

/* The payload lies in the record itself. */
#define PUSHGATE_F_INLINE 0x01
/* The payload lies in a registered region that the record names. */
#define PUSHGATE_F_REGION 0x02
/* WQE: write a CQE when the message is retired. */
#define PUSHGATE_F_SIGNALED 0x04
/* PUT: write the signal once the data is there. */
#define PUSHGATE_F_WITH_SIGNAL 0x08
/* Receive record: the payload lies in the receiver's landing ring. */
#define PUSHGATE_F_LANDING 0x10
/* Receive record: the payload lies in the buffer that the receive named. */
#define PUSHGATE_F_BUFFER 0x20
/* What a producer may set in a WQE. */
#define PUSHGATE_F_WQE_MASK 0x0f

/* ------------------------------------------------------------- CQE, 16 bytes */
/*
 *   w0  55:48 status   47:40 opcode   31:0 wr_id
 *   w1  31:0 length
 * Each word has a lap in bits 63:56, from the CQ's own cursor.
 */
#define PUSHGATE_CQE_WORDS 2
#define PUSHGATE_CQE_STATUS_SHIFT 48
#define PUSHGATE_CQE_OPCODE_SHIFT 40

/* ------------------------------------------------- posted receive, 32 bytes */
/*
 *   w0  31:0 lkey   w1  55:0 offset in that region, bytes
 *   w2  31:0 length w3  31:0 tag (PUSHGATE_ANY_TAG takes any)
 */
#define PUSHGATE_RECV_WORDS 4
#define PUSHGATE_ANY_TAG 0xffffffffu

/* ------------------------------------------------------------------- statuses */
#define PUSHGATE_OK 0
/* Non-blocking forms only: no credit now; nothing was taken. */
#define PUSHGATE_AGAIN 1
#define PUSHGATE_PEER_LOST 2
#define PUSHGATE_ABORTED 3
#define PUSHGATE_TIMED_OUT 4
/* A WQE or record named something that it may not. */
#define PUSHGATE_REFUSED 5
/* A reserved slot was never published. */
#define PUSHGATE_STUCK 6
/* The receiver saw a sequence number that no gated sender could have sent. */
#define PUSHGATE_OVERRUN 7
/* An argument of a device call that can never succeed (longer than the window). */
#define PUSHGATE_INVALID 8
/* The queue pair's device, port, address or path failed; detail says which. */
#define PUSHGATE_LINK_DOWN 9
/* Details of PUSHGATE_LINK_DOWN. */
#define PUSHGATE_DOWN_PORT 1	 /* the port is down */
#define PUSHGATE_DOWN_ADDRESS 2	 /* the address of its GID was removed */
#define PUSHGATE_DOWN_DEVICE 3	 /* the device or its network interface was removed */
#define PUSHGATE_DOWN_RETRY 4	 /* the peer does not answer */
#define PUSHGATE_DOWN_RNR 5	 /* the peer had no receive posted (P4: never with a gate) */
#define PUSHGATE_DOWN_ACCESS 6	 /* the peer's device refused access to its memory */
#define PUSHGATE_DOWN_STREAM 7	 /* what came over a byte stream was no frame, or not one that may come */
#define PUSHGATE_DOWN_WC 256	 /* plus the status of a work completion: any other error */
/*
 * A status word: 7:0 status, 31:8 rank it names (PUSHGATE_NO_RANK: none),
 * 63:32 detail (the low 32 bits of the slot or sequence number at fault; of PUSHGATE_REFUSED
 * why in 63:56, 0 if it is not said, and the low 24 bits of the slot, all ones for none).
 */
#define PUSHGATE_STATUS_RANK_SHIFT 8
#define PUSHGATE_STATUS_DETAIL_SHIFT 32
#define PUSHGATE_NO_RANK 0xffffffu

/* ------------------------------------------------------ reservation and credit */
/*
 * Reservation word (device private, moved by one compare-and-swap) and credit
 * word (written by the proxy): cumulative counts, each modulo its field.
 *   63:48 CQ slots taken (reservation word only)
 *   47:24 WQE slots      23:0 payload units, padding included
 */
#define PUSHGATE_CURSOR_BITS 24
#define PUSHGATE_CURSOR_MASK 0xffffffull
#define PUSHGATE_CQ_CURSOR_SHIFT 48
#define PUSHGATE_CQ_CURSOR_MASK 0xffffull

/*
 * Cumulative counts between engines (received, released, granted):
 *   63:48 epoch   47:0 count.
 */
#define PUSHGATE_COUNT_BITS 48
#define PUSHGATE_COUNT_MASK 0x0000ffffffffffffull

/* ------------------------------------------------------------------- segments */
#define PUSHGATE_SEG_WINDOW 1
#define PUSHGATE_SEG_WORK 2
#define PUSHGATE_SEG_CONTROL 3
#define PUSHGATE_SEG_LINK 4

/* First 64 bytes of a work, control or link segment. A window has none: it is
 * payload from its first byte, and its size is named in the control segment. */
struct pushgate_header {
	pushgate_u64 magic;
	pushgate_u32 version;
	pushgate_u32 kind;
	pushgate_u64 bytes;	 /* of the whole segment */
	pushgate_u32 window_log; /* log2 of the payload ring, in units */
	pushgate_u32 slots_log;	 /* log2 of the WQE ring */
	pushgate_u32 cq_log;	 /* log2 of the CQ */
	pushgate_u32 rx_log;	 /* log2 of the receive ring (and of posted receives) */
	pushgate_u32 link_log;	 /* log2 of the link ring */
	pushgate_u32 landing_log; /* log2 of the landing ring, in units */
	pushgate_u32 signals;	 /* number of signal words */
	pushgate_u32 rank;	 /* of the segment's owner */
};

#define PUSHGATE_PAGE 4096

/* Work segment, written by the device, read by the engine. */
#define PUSHGATE_WORK_CONSUMED 64   /* receive records released, cumulative */
#define PUSHGATE_WORK_RING PUSHGATE_PAGE /* WQEs, then posted receives */

/* Control segment, written by the engine, read by the device. One line holds
 * all that a waiting device thread has to look at. */
#define PUSHGATE_CTL_CREDIT 64
#define PUSHGATE_CTL_STATUS 72
#define PUSHGATE_CTL_DELIVERED 80 /* WQE slots whose messages the peer has, cumulative */
#define PUSHGATE_CTL_SLEEPING 128 /* not 0: the engine sleeps, ring the doorbell */
#define PUSHGATE_CTL_SIGNALS PUSHGATE_PAGE /* then CQ, receive ring, landing ring,
					      each from the next page on */

/* Link segment, written by one engine, read by the peer's. */
#define PUSHGATE_LINK_RECEIVED 64 /* messages of the peer that are here */
#define PUSHGATE_LINK_RELEASED 72 /* messages whose place is no longer needed */
#define PUSHGATE_LINK_GRANTED 80  /* receive credits granted */
#define PUSHGATE_LINK_STATUS 88	  /* this side's status word */
#define PUSHGATE_LINK_ADDRESS 96  /* of this segment in its engine's process */
#define PUSHGATE_LINK_READS 104	  /* PUSHGATE_READS_*, 0: not tried yet */
#define PUSHGATE_LINK_SLEEPING 128
#define PUSHGATE_LINK_RING PUSHGATE_PAGE

/* Whether this side's engine can read the memory of the peer's process. */
#define PUSHGATE_READS_YES 1
#define PUSHGATE_READS_UNKNOWN 2   /* its process is not known here */
#define PUSHGATE_READS_DENIED 3	   /* the kernel does not allow it */
#define PUSHGATE_READS_ELSEWHERE 4 /* its engine is not in the process of its program */

/* ------------------------------------------------------ device-side structures */

/* Device-private memory of a queue pair; zeroed when it is made. What many
 * threads write stands on lines of its own. */
struct pushgate_qp_state {
	pushgate_u64 reserved; /* the reservation word */
	pushgate_u64 pad0[15];
	pushgate_u64 credit; /* the newest credit word that a thread here has seen */
	pushgate_u64 cq_head; /* CQEs polled */
	pushgate_u64 pad1[14];
	pushgate_u64 rx_head; /* receive records taken */
	pushgate_u64 rx_released; /* receive records given back */
	pushgate_u64 rx_posted;	  /* receives posted */
	pushgate_u64 pad2[13];
};

/* What a kernel gets for a queue pair. Addresses are those of the device. */
struct pushgate_qp {
	pushgate_u64 window;	  /* payload ring, this side writes */
	pushgate_u64 wqes;	  /* WQE ring, this side writes */
	pushgate_u64 receives;	  /* posted receives, this side writes */
	pushgate_u64 consumed;	  /* word: receive records released */
	pushgate_u64 credit;	  /* word: credit; status is the word after it */
	pushgate_u64 delivered;	  /* word: slots whose messages the peer has */
	pushgate_u64 sleeping;	  /* CPU executor: word: the engine sleeps; 0: ring always */
	pushgate_u64 signals;	  /* words that the peer's signals arrive in */
	pushgate_u64 cq;	  /* CQEs */
	pushgate_u64 rx;	  /* receive ring */
	pushgate_u64 landing;	  /* landing ring */
	pushgate_u64 peer_window; /* the peer's payload ring, read only */
	pushgate_u64 state;	  /* struct pushgate_qp_state */
	pushgate_u64 doorbell;	  /* CPU executor: void (*)(u64); GPU: word that takes the argument; or 0 */
	pushgate_u64 doorbell_arg;
	pushgate_u64 limit_ns; /* every wait ends after this */
	pushgate_u32 window_log;
	pushgate_u32 slots_log;
	pushgate_u32 cq_log;
	pushgate_u32 rx_log;
	pushgate_u32 landing_log;
	pushgate_u32 peer_window_log;
	pushgate_u32 n_signals;
	pushgate_u32 rank;
	pushgate_u32 peer;
	pushgate_u32 pad;
};

#endif /* PUSHGATE_ABI_H */
