/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * The ioctls of /dev/pushgate (staging alone) and /dev/pushgateN (staging and
 * the BAR of one PCI function). docs/pushgate.4.md describes each with its
 * errors.
 *
 * Every ioctl takes a struct that begins with its own size, and structs only
 * ever grow at the end. A program newer than the module may pass a longer
 * struct if every byte that the module does not know is zero (otherwise
 * E2BIG). An older program passes a shorter struct, and the missing fields
 * count as zero. EINVAL: a struct shorter than its first version, or a flag or
 * reserved field that is not zero.
 */
#ifndef _UAPI_PUSHGATE_H
#define _UAPI_PUSHGATE_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define PUSHGATE_UAPI_VERSION 1

/* The numbers contain no sizes, which would change as the structs grow. */
#define PUSHGATE_IOC_MAGIC 0xBD
#define PUSHGATE_IOC_INFO _IO(PUSHGATE_IOC_MAGIC, 0)
#define PUSHGATE_IOC_SLICE_ALLOC _IO(PUSHGATE_IOC_MAGIC, 1)
#define PUSHGATE_IOC_SLICE_EXPORT _IO(PUSHGATE_IOC_MAGIC, 2)
#define PUSHGATE_IOC_STAGING_CREATE _IO(PUSHGATE_IOC_MAGIC, 3)
#define PUSHGATE_IOC_STAGING_OPEN _IO(PUSHGATE_IOC_MAGIC, 4)
#define PUSHGATE_IOC_STAGING_FREE _IO(PUSHGATE_IOC_MAGIC, 5)
#define PUSHGATE_IOC_DOORBELL_SET _IO(PUSHGATE_IOC_MAGIC, 6)
#define PUSHGATE_IOC_DOORBELL_ARM _IO(PUSHGATE_IOC_MAGIC, 7)
#define PUSHGATE_IOC_DOORBELL_RING _IO(PUSHGATE_IOC_MAGIC, 8)
#define PUSHGATE_IOC_STAGING_EXPORT _IO(PUSHGATE_IOC_MAGIC, 9)

/* Offsets for mmap; all mappings are MAP_SHARED. */
#define PUSHGATE_MMAP_SLICE 0x0
#define PUSHGATE_MMAP_STATUS 0x10000000000
#define PUSHGATE_MMAP_DOORBELL 0x20000000000
#define PUSHGATE_MMAP_STAGING 0x30000000000

#define PUSHGATE_FEATURE_STAGING 0x1
/* The function has a window to take slices of. */
#define PUSHGATE_FEATURE_SLICE 0x2
#define PUSHGATE_FEATURE_DMABUF 0x4
/* The function has interrupt vectors. */
#define PUSHGATE_FEATURE_INTERRUPT 0x8
/* The doorbell register has a page of its own that can be mapped. */
#define PUSHGATE_FEATURE_DOORBELL_MMAP 0x10
/* The doorbell register is written by PUSHGATE_IOC_DOORBELL_RING. */
#define PUSHGATE_FEATURE_DOORBELL_RING 0x20
/* Views of staging areas can be handed to other processes. */
#define PUSHGATE_FEATURE_STAGING_EXPORT 0x40

/* The name of a view's file: /proc/PID/fd has "anon_inode:" and this. */
#define PUSHGATE_VIEW_NAME "[pushgate-staging]"

/* What a status word says about the function. */
#define PUSHGATE_FUNCTION_NONE 0
#define PUSHGATE_FUNCTION_LIVE 1
#define PUSHGATE_FUNCTION_GONE 2

/*
 * The page at PUSHGATE_MMAP_STATUS: ordinary memory, one for each open file,
 * read-only for programs. It stays mapped and valid when the function is gone,
 * so a GPU that has the page registered sees that too.
 */
struct pushgate_status_page {
	__u64 function;		/* PUSHGATE_FUNCTION_ */
	__u64 rings;		/* interrupts of this file's vector so far */
};

struct pushgate_info {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
	__u32 version;		/* out: PUSHGATE_UAPI_VERSION of the module */
	__u32 vectors;		/* out: interrupt vectors of the function */
	__u64 features;		/* out: PUSHGATE_FEATURE_ */
	__u64 window_bytes;	/* out: the whole window, 0 without one; of a view: its area */
	__u64 granule;		/* out: slices are multiples of it */
	__u64 doorbell_offset;	/* out: of the register in its mapped page */
	__u32 function;		/* out: PUSHGATE_FUNCTION_ */
	__s32 node;		/* out: NUMA node of the function, or -1 */
};

struct pushgate_slice_alloc {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
	__u64 bytes;		/* in: wanted; out: rounded up to granules */
	__u64 align;		/* a power of two, at least a granule; 0: a granule */
	__u64 offset;		/* out: of the slice in the window */
};

struct pushgate_slice_export {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
	__s32 fd;		/* out: a dma-buf, closed on exec */
	__u32 reserved;
};

#define PUSHGATE_NAME_BYTES 64

struct pushgate_staging_create {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
	__u64 bytes;		/* in: wanted; out: rounded up to pages */
	__s32 node;		/* NUMA node; -1: that of the function, or any */
	__u32 ttl_ms;		/* life after the last detach; 0: freed at once */
	__u64 pieces;		/* out: contiguous pieces that it consists of */
	char name[PUSHGATE_NAME_BYTES];
};

struct pushgate_staging_open {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
	__u64 bytes;		/* out */
	__u64 attaches;		/* out: 1 for the creator, one more each time */
	__u32 ttl_ms;		/* out */
	__u32 reserved;
	char name[PUSHGATE_NAME_BYTES];
};

/* Frees the attached area: its name at once, its memory when the last process
 * has unmapped it. */
struct pushgate_staging_free {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
};

/*
 * Makes a view of the attached area: a file that maps the area at
 * PUSHGATE_MMAP_STAGING for reading, answers PUSHGATE_IOC_INFO, and does
 * nothing else.
 */
struct pushgate_staging_export {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
	__s32 fd;		/* out: the view, closed on exec */
	__u32 reserved;
};

struct pushgate_doorbell_set {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
	__s32 eventfd;		/* -1: detach the eventfd */
	__u32 vector;
	__u32 interval_us;	/* at most one wake-up in that time; 0: each ring */
	__u32 reserved;
};

#define PUSHGATE_ARM 0x1
#define PUSHGATE_DISARM 0x2

/*
 * PUSHGATE_ARM arms only if no ring came after the `seen`th; otherwise `armed`
 * is 0 and the caller must look for work. So no ring is lost between the last
 * look and the sleep.
 */
struct pushgate_doorbell_arm {
	__u32 size;
	__u32 flags;		/* PUSHGATE_ARM or PUSHGATE_DISARM */
	__u64 seen;		/* in: the count that was looked at last */
	__u64 rings;		/* out: the count now */
	__u32 armed;		/* out */
	__u32 reserved;
};

struct pushgate_doorbell_ring {
	__u32 size;
	__u32 flags;		/* none yet: 0 */
	__u32 value;		/* what the device's register takes */
	__u32 reserved;
};

#endif /* _UAPI_PUSHGATE_H */
