/* SPDX-License-Identifier: GPL-2.0 */
/* Types and functions that the files of this module share. */
#ifndef PUSHGATE_INTERNAL_H
#define PUSHGATE_INTERNAL_H

#include <linux/fs.h>
#include <linux/hrtimer.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/uidgid.h>

#include "compat.h"
#include "uapi/pushgate.h"

/* /dev/pushgate has minor number 0; functions have the numbers above. */
#define PG_MINORS 64

/* Holes that window_holes can name; and with the MSI-X table, its pending bits and the doorbell. */
#define PG_PARAM_HOLES 8
#define PG_MAX_HOLES (PG_PARAM_HOLES + 3)

struct pg_area;
struct pg_file;

/* One interrupt vector of a function, and the files that listen to it. */
struct pg_vector {
	spinlock_t lock;	/* protects the list and the count; taken in the interrupt */
	struct list_head bells;
	unsigned int listeners;	/* bells in the list, or about to be */
	int irq;
};

/* A part of a window that is no memory, as offsets of whole pages. */
struct pg_hole {
	u64 start, end;
};

/*
 * A PCI function that this driver drives. Open files and slices hold a
 * reference beyond the function's removal; `gone` then keeps them off the
 * hardware.
 */
struct pg_function {
	struct kref refs;
	struct pci_dev *pdev;	/* not touched once gone */
	int minor;
	int node;
	int bars;		/* mask of the requested BARs */

	/*
	 * Protects `gone` and `files`. Taken inside mmap_lock (in mmap), so
	 * nothing that may fault runs under this lock.
	 */
	struct mutex lock;
	bool gone;
	struct list_head files;

	phys_addr_t window;
	u64 window_bytes;
	/* Sorted and apart; no slice contains any part of one. */
	struct pg_hole holes[PG_MAX_HOLES];
	int nholes;

	struct mutex exports_lock;	/* protects `exports`; outside a dma-buf's reservation */
	struct list_head exports;
	atomic_t imports;		/* mappings of the dma-bufs by importers */
	wait_queue_head_t imports_ended;

	/* The doorbell's register, or NULL. */
	void __iomem *doorbell;
	phys_addr_t doorbell_page;	/* 0: the page must not be mapped */
	u32 doorbell_in_page;

	unsigned int nvectors;
	struct pg_vector *vectors;
};

/*
 * A part of a window. Its file and its dma-bufs hold references. On the last
 * put the slice retires; it is free for others once every process that had it
 * mapped has exited.
 */
struct pg_slice {
	struct kref refs;
	struct pg_function *function;	/* NULL once retired */
	struct list_head node;	/* pg_slices */
	kuid_t owner;
	phys_addr_t start;
	u64 bytes;
	atomic_t mappings;
	struct mutex lock;	/* protects `mappers`; innermost */
	struct list_head mappers;
};

static inline bool pg_overlaps(const struct pg_slice *slice, phys_addr_t start, phys_addr_t end)
{
	return slice->start < end && start < slice->start + slice->bytes;
}

/* A file's end of an interrupt vector. */
struct pg_bell {
	struct list_head node;	/* vector->bells */
	struct pg_vector *vector;
	spinlock_t lock;	/* protects the fields below; inside vector->lock */
	struct eventfd_ctx *eventfd;
	struct pushgate_status_page *status;
	struct hrtimer timer;
	ktime_t interval;
	ktime_t last;
	u64 rings;
	u64 wakes;
	bool armed;
	bool pending;		/* the timer will wake */
};

struct pg_file {
	struct file *file;
	struct pg_function *function;	/* NULL: /dev/pushgate */
	struct list_head node;		/* function->files */
	struct mutex lock;		/* serialises ioctls; never in mmap */
	/* Set once, with release order, so that mmap can read them without the lock. */
	struct pg_slice *slice;
	struct pg_area *area;
	struct pg_bell bell;
	struct page *status_page;
	struct pushgate_status_page *status;
};

/*
 * The functions, by file. A file calls only those above its own.
 */

/* args.c */
int pg_copy_in(void *to, size_t known, size_t least, const void __user *from);
int pg_copy_out(void __user *to, const void *from, size_t known);

/* function.c */
void pg_function_get(struct pg_function *fn);
void pg_function_put(struct pg_function *fn);
void pg_function_show(struct seq_file *out, struct pg_function *fn);

/* window.c */
int pg_window_find(struct pg_function *fn, int bar);
bool pg_window_doorbell(struct pg_function *fn, u64 at);
bool pg_page_has_msix(struct pci_dev *pdev, int bar, u64 page);
u64 pg_window_hole(struct pg_function *fn, u64 at, u64 end);
int pg_window_reserve(struct pg_function *fn);
void pg_window_release(struct pg_function *fn);

/* mappers.c */
bool pg_mapped_by_others(struct pg_slice *slice);
bool pg_mapped_by_any(struct pg_slice *slice);
bool pg_mapped_alike(struct pg_slice *one, struct pg_slice *other);
int pg_slice_track(struct pg_slice *slice);
void pg_mappers_free(struct pg_slice *slice);
struct mm_struct *pg_next_mm(struct pg_slice *slice);

/* quota.c */
bool pg_quota_allows(struct list_head *slices, kuid_t owner, phys_addr_t start, phys_addr_t end);

/* slices.c */
void pg_slices_exit(void);
long pg_slice_alloc(struct pg_file *file, void __user *argument);
void pg_slice_get(struct pg_slice *slice);
void pg_slice_put(struct pg_slice *slice);
struct mm_struct *pg_slices_next_mm(struct pg_function *fn);
void pg_slices_show(struct seq_file *out);

/* map.c */
int pg_slice_mmap(struct pg_file *file, struct vm_area_struct *vma);
int pg_doorbell_mmap(struct pg_file *file, struct vm_area_struct *vma);
void pg_unmap_function(struct pg_function *fn);

/* dmabuf.c */
long pg_slice_export(struct pg_file *file, void __user *argument);
void pg_revoke(struct pg_function *fn);
void pg_wait_for_importers(struct pg_function *fn);

/* staging.c */
void pg_staging_exit(void);
long pg_staging_create(struct pg_file *file, void __user *argument);
long pg_staging_open(struct pg_file *file, void __user *argument);
long pg_staging_free(struct pg_file *file, void __user *argument);
void pg_staging_detach(struct pg_file *file);
u64 pg_staging_bytes(struct pg_file *file);
int pg_staging_mmap(struct pg_file *file, struct vm_area_struct *vma);
void pg_staging_show(struct seq_file *out);

/* view.c */
long pg_staging_export(struct pg_file *file, void __user *argument);

/* doorbell.c */
int pg_vectors_init(struct pg_function *fn);
void pg_vectors_exit(struct pg_function *fn);
long pg_doorbell_set(struct pg_file *file, void __user *argument);
long pg_doorbell_arm(struct pg_file *file, void __user *argument);
long pg_doorbell_ring(struct pg_file *file, void __user *argument);
void pg_bell_init(struct pg_file *file);
void pg_bell_exit(struct pg_file *file);
void pg_bell_gone(struct pg_bell *bell);

/* devices.c */
int pg_devices_init(const struct file_operations *operations);
void pg_devices_exit(void);
int pg_publish(struct pg_function *fn);
void pg_unpublish(struct pg_function *fn);
struct pg_function *pg_function_find(unsigned int minor);
void pg_devices_show(struct seq_file *out);

/* pci.c */
int pg_pci_init(void);
void pg_pci_exit(void);

/* file.c */
extern const struct file_operations pg_file_operations;
void pg_files_show(struct seq_file *out);

#endif /* PUSHGATE_INTERNAL_H */
