// SPDX-License-Identifier: GPL-2.0
/*
 * Slices of a function's BAR: which file has which slice, and when one may go to another user.
 *
 * The module has one list of slices, by physical address, so that a slice that is retired
 * (mappers.c says why) stays so when a function is unbound and bound again. No two slices in the
 * list overlap: what a process takes again of its own retired slices is cut out of them.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cred.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

#include "internal.h"

/* How many bytes are zeroed before other threads get a turn. */
#define PG_ZERO_CHUNK SZ_1M
#define PG_REAP_EVERY HZ

/*
 * Protects the list of every slice, retired or not. Taken inside function->lock, outside
 * slice->lock.
 */
static DEFINE_MUTEX(pg_slices_lock);
static LIST_HEAD(pg_slices);

static void pg_reap(struct work_struct *work);
static DECLARE_DELAYED_WORK(pg_reap_work, pg_reap);

static struct pg_slice *pg_slice_new(kuid_t owner, u64 bytes)
{
	struct pg_slice *slice = kzalloc(sizeof(*slice), GFP_KERNEL_ACCOUNT);

	if (slice) {
		kref_init(&slice->refs);
		mutex_init(&slice->lock);
		INIT_LIST_HEAD(&slice->mappers);
		INIT_LIST_HEAD(&slice->node);
		slice->owner = owner;
		slice->bytes = bytes;
	}
	return slice;
}

static void pg_slice_free(struct pg_slice *slice)
{
	list_del(&slice->node);
	pg_mappers_free(slice);
	kfree(slice);
}

/* Frees a retired slice, which holds the module. */
static void pg_retired_free(struct pg_slice *slice)
{
	pg_slice_free(slice);
	module_put(THIS_MODULE);
}

/* Frees the retired slices that no process can reach any more. */
static void pg_reap(struct work_struct *work)
{
	struct pg_slice *slice, *next;
	bool again = false;

	mutex_lock(&pg_slices_lock);
	list_for_each_entry_safe(slice, next, &pg_slices, node) {
		if (slice->function)
			continue;
		/* pg_slices_exit waits for this work, so the code stays until the work is done. */
		if (pg_mapped_by_any(slice))
			again = true;
		else
			pg_retired_free(slice);
	}
	if (again)
		schedule_delayed_work(&pg_reap_work, PG_REAP_EVERY);
	mutex_unlock(&pg_slices_lock);
}

void pg_slices_exit(void)
{
	cancel_delayed_work_sync(&pg_reap_work);
}

void pg_slice_get(struct pg_slice *slice)
{
	kref_get(&slice->refs);
}

/*
 * Joins a slice that retires with its retired neighbours that are kept for the same processes, so
 * that a process that takes and gives back in a loop leaves no longer list each time.
 */
static void pg_slice_join(struct pg_slice *slice)
{
	struct pg_slice *other, *next;

	list_for_each_entry_safe(other, next, &pg_slices, node) {
		if (other->function || other == slice || !uid_eq(other->owner, slice->owner) ||
		    !pg_mapped_alike(other, slice))
			continue;
		if (other->start + other->bytes == slice->start)
			slice->start = other->start;
		else if (slice->start + slice->bytes != other->start)
			continue;
		slice->bytes += other->bytes;
		pg_retired_free(other);
	}
}

static void pg_slice_retire(struct kref *refs)
{
	struct pg_slice *slice = container_of(refs, struct pg_slice, refs);
	struct pg_function *fn = slice->function;

	mutex_lock(&pg_slices_lock);
	if (pg_mapped_by_any(slice)) {
		slice->function = NULL;
		/* The file or dma-buf that is being released still holds the module. */
		__module_get(THIS_MODULE);
		pg_slice_join(slice);
		mod_delayed_work(system_wq, &pg_reap_work, PG_REAP_EVERY / 20);
	} else {
		pg_slice_free(slice);
	}
	mutex_unlock(&pg_slices_lock);
	pg_function_put(fn);
}

void pg_slice_put(struct pg_slice *slice)
{
	kref_put(&slice->refs, pg_slice_retire);
}

/*
 * Looks for a slice or hole in the way of [at, end): returns where it ends, or 0 if there is none.
 * Retired slices that only the caller may still reach are not in its way.
 */
static u64 pg_obstacle(struct pg_function *fn, u64 at, u64 end)
{
	u64 hole_end = pg_window_hole(fn, at, end);
	struct pg_slice *slice;

	if (hole_end)
		return hole_end;
	list_for_each_entry(slice, &pg_slices, node) {
		if (pg_overlaps(slice, fn->window + at, fn->window + end) &&
		    (slice->function || pg_mapped_by_others(slice)))
			return slice->start + slice->bytes - fn->window;
	}
	return 0;
}

/* Whether [at, at + bytes) lies in the window. */
static bool pg_fits(struct pg_function *fn, u64 at, u64 bytes)
{
	return at <= fn->window_bytes && bytes <= fn->window_bytes - at;
}

/*
 * Cuts a new slice out of the retired ones where it lies, which only the caller may still reach.
 * `rest` becomes the second part of a slice that is cut in two.
 */
static int pg_cut(struct pg_slice *slice, struct pg_slice *rest)
{
	u64 end = slice->start + slice->bytes, old_end;
	struct pg_slice *old, *next;
	int err;

	list_for_each_entry_safe(old, next, &pg_slices, node) {
		if (!pg_overlaps(old, slice->start, end))
			continue;
		if (!pg_mapped_by_any(old)) {
			pg_retired_free(old);
			continue;
		}
		old_end = old->start + old->bytes;
		/* Fails for the first retired slice or for none, so that nothing was cut before. */
		err = pg_slice_track(slice);
		if (!err && old->start < slice->start && old_end > end)
			err = pg_slice_track(rest);
		if (err)
			return err;
		if (old->start < slice->start) {
			old->bytes = slice->start - old->start;
			if (old_end > end) {
				rest->start = end;
				rest->bytes = old_end - end;
				rest->owner = old->owner;
				list_add(&rest->node, &pg_slices);
				__module_get(THIS_MODULE);
			}
		} else if (old_end > end) {
			old->start = end;
			old->bytes = old_end - end;
		} else {
			pg_retired_free(old);
		}
	}
	return 0;
}

/* Puts the slice at an offset of the window if its user may have it there. */
static bool pg_slice_place_at(struct pg_function *fn, struct pg_slice *slice, u64 at)
{
	slice->start = fn->window + at;
	return pg_quota_allows(&pg_slices, slice->owner, slice->start, slice->start + slice->bytes);
}

/*
 * Finds a place for a slice: the first that is free, or, for a user at the limit, one that begins
 * in a slice that this user gave back and that still counts.
 */
static int pg_slice_place(struct pg_function *fn, struct pg_slice *slice, u64 align)
{
	struct pg_slice *old;
	u64 at = 0, next;

	/* No sum here overflows: a window is far below 2^63, and so is align. */
	while (pg_fits(fn, at, slice->bytes) && (next = pg_obstacle(fn, at, at + slice->bytes)))
		at = ALIGN(next, align);
	if (!pg_fits(fn, at, slice->bytes))
		return -ENOSPC;
	if (pg_slice_place_at(fn, slice, at))
		return 0;
	list_for_each_entry(old, &pg_slices, node) {
		if (old->function || !uid_eq(old->owner, slice->owner) ||
		    !pg_overlaps(old, fn->window, fn->window + fn->window_bytes))
			continue;
		at = ALIGN(max(old->start, fn->window) - fn->window, align);
		if (pg_fits(fn, at, slice->bytes) && !pg_obstacle(fn, at, at + slice->bytes) &&
		    pg_slice_place_at(fn, slice, at))
			return 0;
	}
	return -EDQUOT;
}

/* Takes room for the slice, which is in the list from then on. */
static int pg_slice_take(struct pg_function *fn, struct pg_slice *slice, u64 align)
{
	struct pg_slice *rest = pg_slice_new(slice->owner, 0);
	int err;

	if (!rest)
		return -ENOMEM;
	mutex_lock(&fn->lock);
	if (fn->gone) {
		err = -ENODEV;
		goto unlock;
	}
	mutex_lock(&pg_slices_lock);
	err = pg_slice_place(fn, slice, align);
	if (!err)
		err = pg_cut(slice, rest);
	if (!err) {
		pg_function_get(fn);
		slice->function = fn;
		list_add(&slice->node, &pg_slices);
	}
	mutex_unlock(&pg_slices_lock);
unlock:
	mutex_unlock(&fn->lock);
	if (!rest->bytes)
		pg_slice_free(rest);
	return err;
}

static int pg_slice_zero(struct pg_slice *slice)
{
	struct pg_function *fn = slice->function;
	void __iomem *window;
	u64 at, bytes;
	int err = 0;

	for (at = 0; at < slice->bytes && !err; at += bytes) {
		bytes = min_t(u64, slice->bytes - at, PG_ZERO_CHUNK);
		mutex_lock(&fn->lock);
		window = fn->gone ? NULL : ioremap_wc(slice->start + at, bytes);
		if (window) {
			memset_io(window, 0, bytes);
			/*
			 * A read pushes the writes out to the device: a GPU's next writes take
			 * another way and must not be overtaken by these.
			 */
			wmb();
			(void)readl(window + bytes - 4);
			iounmap(window);
		} else {
			err = fn->gone ? -ENODEV : -ENOMEM;
		}
		mutex_unlock(&fn->lock);
		if (fatal_signal_pending(current))
			err = -EINTR;
		cond_resched();
	}
	return err;
}

long pg_slice_alloc(struct pg_file *file, void __user *argument)
{
	struct pg_function *fn = file->function;
	struct pushgate_slice_alloc alloc;
	struct pg_slice *slice;
	int err;

	err = pg_copy_in(&alloc, sizeof(alloc), sizeof(alloc), argument);
	if (err)
		return err;
	if (alloc.flags || !alloc.bytes)
		return -EINVAL;
	if (alloc.align == 0)
		alloc.align = PAGE_SIZE;
	if (!is_power_of_2(alloc.align) || alloc.align < PAGE_SIZE)
		return -EINVAL;
	if (file->slice)
		return -EEXIST;
	if (alloc.bytes > fn->window_bytes || alloc.align > fn->window_bytes)
		return -ENOSPC;
	alloc.bytes = PAGE_ALIGN(alloc.bytes);

	/* The owner is the user who opened the device, not the one who was handed the file. */
	slice = pg_slice_new(file->file->f_cred->euid, alloc.bytes);
	if (!slice)
		return -ENOMEM;
	err = pg_slice_take(fn, slice, alloc.align);
	if (err) {
		pg_slice_free(slice);
		return err;
	}

	err = pg_slice_zero(slice);
	if (!err) {
		alloc.offset = slice->start - fn->window;
		err = pg_copy_out(argument, &alloc, sizeof(alloc));
	}
	if (err) {
		pg_slice_put(slice);
		return err;
	}
	/* From here on mmap finds the complete slice. */
	smp_store_release(&file->slice, slice);
	return 0;
}

/*
 * Returns, with mmget, an address space that has mapped a slice of the function, each only once;
 * NULL after the last.
 */
struct mm_struct *pg_slices_next_mm(struct pg_function *fn)
{
	struct mm_struct *mm = NULL;
	struct pg_slice *slice;

	mutex_lock(&pg_slices_lock);
	list_for_each_entry(slice, &pg_slices, node) {
		if (slice->function == fn)
			mm = pg_next_mm(slice);
		if (mm)
			break;
	}
	mutex_unlock(&pg_slices_lock);
	return mm;
}

void pg_slices_show(struct seq_file *out)
{
	int count = 0, retired = 0;
	struct pg_slice *slice;

	mutex_lock(&pg_slices_lock);
	list_for_each_entry(slice, &pg_slices, node) {
		count++;
		retired += !slice->function;
		seq_printf(out, "  slice at %pa bytes %llu user %u mappings %d%s\n", &slice->start,
			   slice->bytes, from_kuid_munged(&init_user_ns, slice->owner),
			   atomic_read(&slice->mappings), slice->function ? "" : " retired");
	}
	mutex_unlock(&pg_slices_lock);
	seq_printf(out, "slices %d\nretired %d\n", count, retired);
}
