// SPDX-License-Identifier: GPL-2.0
/*
 * Slices of a function's BAR: which file has which slice, how slices are mapped, and when one may
 * go to another user.
 *
 * A GPU's mapping of a slice cannot be revoked. It ends with the process that made it, because the
 * GPU's driver tears it down as the process's files close. So a slice that was mapped is retired,
 * not free, until each process that mapped it has exited: the process's address space has no user
 * left, and every one of its threads has passed the point in exit() after which its files are
 * closed (exit_state is set after exit_files and the deferred puts). The address space alone would
 * not do, because it goes before the files. This check cannot see a GPU file that the process
 * handed to another process that lives on, nor a process that shared the address space without
 * being a thread (vfork) after it has left that address space.
 *
 * The module has one list of slices, by physical address, so that all this also holds when a
 * function is unbound and bound again.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cred.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/pid.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

#include "internal.h"

static ulong slice_user_bytes = 1UL << 30;
module_param(slice_user_bytes, ulong, 0644);
MODULE_PARM_DESC(slice_user_bytes, "slices that one user may have, over all functions");

/* Bounds the cost of a walk of the list, and of pg_user_bytes, which is the square of that cost. */
static uint slice_user_slices = 1024;
module_param(slice_user_slices, uint, 0644);
MODULE_PARM_DESC(slice_user_slices, "how many slices one user may have, over all functions");

/*
 * How many places are tried when room is taken again: each try is a walk of the list, and retired
 * slices may overlap a lot.
 */
#define PG_LOOKS 4096
/* How many bytes are zeroed before other threads get a turn. */
#define PG_ZERO_CHUNK SZ_1M
#define PG_REAP_EVERY HZ

/* A process that mapped a slice. */
struct pg_mapper {
	struct list_head node;
	struct mm_struct *mm;	/* held by mmgrab: the struct stays, the memory may go */
	struct pid *process;
	bool waited;		/* pg_unmap_function has waited for its mmap calls */
};

/*
 * Protects the list of every slice, retired or not. Taken inside function->lock, outside
 * slice->lock.
 */
static DEFINE_MUTEX(pg_slices_lock);
static LIST_HEAD(pg_slices);

static void pg_reap(struct work_struct *work);
static DECLARE_DELAYED_WORK(pg_reap_work, pg_reap);

static bool pg_mapper_lives(const struct pg_mapper *mapper)
{
	struct task_struct *leader, *thread;
	bool lives = false;

	if (atomic_read(&mapper->mm->mm_users))
		return true;
	rcu_read_lock();
	leader = pid_task(mapper->process, PIDTYPE_TGID);
	if (leader) {
		for_each_thread(leader, thread) {
			if (!READ_ONCE(thread->exit_state)) {
				lives = true;
				break;
			}
		}
	}
	rcu_read_unlock();
	return lives;
}

/* Whether the slice is in use, or a process other than the caller may still reach it. */
static bool pg_is_kept_from_us(struct pg_slice *slice)
{
	struct pg_mapper *mapper;

	if (slice->function)
		return true;
	list_for_each_entry(mapper, &slice->mappers, node) {
		if (mapper->mm == current->mm && mapper->process == task_tgid(current))
			continue;
		if (pg_mapper_lives(mapper))
			return true;
	}
	return false;
}

static bool pg_is_mapped_by_nobody(struct pg_slice *slice)
{
	struct pg_mapper *mapper;

	list_for_each_entry(mapper, &slice->mappers, node) {
		if (pg_mapper_lives(mapper))
			return false;
	}
	return true;
}

static void pg_mapper_free(struct pg_mapper *mapper)
{
	mmdrop(mapper->mm);
	put_pid(mapper->process);
	kfree(mapper);
}

static void pg_slice_free(struct pg_slice *slice)
{
	struct pg_mapper *mapper, *next;

	list_del(&slice->node);
	list_for_each_entry_safe(mapper, next, &slice->mappers, node)
		pg_mapper_free(mapper);
	kfree(slice);
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
		if (!pg_is_mapped_by_nobody(slice)) {
			again = true;
			continue;
		}
		pg_slice_free(slice);
		/* pg_bar_exit waits for this work, so the code stays until the work is done. */
		module_put(THIS_MODULE);
	}
	if (again)
		schedule_delayed_work(&pg_reap_work, PG_REAP_EVERY);
	mutex_unlock(&pg_slices_lock);
}

static struct pg_mapper *pg_mapper_find(struct pg_slice *slice, struct mm_struct *mm,
					struct pid *process)
{
	struct pg_mapper *mapper;

	list_for_each_entry(mapper, &slice->mappers, node) {
		if (mapper->mm == mm && mapper->process == process)
			return mapper;
	}
	return NULL;
}

static bool pg_contains(const struct pg_slice *outer, const struct pg_slice *inner)
{
	return outer->start <= inner->start && inner->start + inner->bytes <= outer->start + outer->bytes;
}

/*
 * A process that takes and gives back slices in a loop must not make the list longer each time. So
 * a new slice takes over the mappers of the retired slices within it, and those are freed.
 */
static void pg_absorb(struct pg_slice *slice)
{
	struct pg_slice *old, *next_old;
	struct pg_mapper *mapper, *next;

	list_for_each_entry_safe(old, next_old, &pg_slices, node) {
		if (old->function || !pg_contains(slice, old))
			continue;
		list_for_each_entry_safe(mapper, next, &old->mappers, node) {
			if (!pg_mapper_find(slice, mapper->mm, mapper->process))
				list_move(&mapper->node, &slice->mappers);
		}
		pg_slice_free(old);
		module_put(THIS_MODULE);
	}
}

/*
 * Whether a slice that retires lies within another retired one that is kept for the same processes.
 * Then it need not be listed, and the list stays short.
 */
static bool pg_is_covered(struct pg_slice *slice)
{
	struct pg_mapper *mapper;
	struct pg_slice *other;
	bool covered;

	list_for_each_entry(other, &pg_slices, node) {
		if (other->function || !pg_contains(other, slice))
			continue;
		covered = true;
		list_for_each_entry(mapper, &slice->mappers, node) {
			if (!pg_mapper_find(other, mapper->mm, mapper->process)) {
				covered = false;
				break;
			}
		}
		if (covered)
			return true;
	}
	return false;
}

void pg_bar_exit(void)
{
	cancel_delayed_work_sync(&pg_reap_work);
}

void pg_slice_get(struct pg_slice *slice)
{
	kref_get(&slice->refs);
}

static void pg_slice_retire(struct kref *refs)
{
	struct pg_slice *slice = container_of(refs, struct pg_slice, refs);
	struct pg_function *fn = slice->function;

	mutex_lock(&pg_slices_lock);
	if (pg_is_mapped_by_nobody(slice) || pg_is_covered(slice)) {
		pg_slice_free(slice);
	} else {
		slice->function = NULL;
		/* The file or dma-buf that is being released still holds the module. */
		__module_get(THIS_MODULE);
		mod_delayed_work(system_wq, &pg_reap_work, PG_REAP_EVERY / 20);
	}
	mutex_unlock(&pg_slices_lock);
	pg_function_put(fn);
}

void pg_slice_put(struct pg_slice *slice)
{
	kref_put(&slice->refs, pg_slice_retire);
}

static bool pg_overlaps(u64 a, u64 a_end, u64 b, u64 b_end)
{
	return a < b_end && b < a_end;
}

/*
 * Whether a slice counts against a user's limits. Retired slices count as long as other users are
 * kept off them.
 */
static bool pg_counts_for(struct pg_slice *slice, kuid_t owner)
{
	return uid_eq(slice->owner, owner) && (slice->function || !pg_is_mapped_by_nobody(slice));
}

/*
 * How many slices a user would have with [start, end) added; the new slice absorbs retired ones
 * within it.
 */
static unsigned int pg_user_slices(kuid_t owner, phys_addr_t start, phys_addr_t end)
{
	struct pg_slice *slice;
	unsigned int count = 1;

	list_for_each_entry(slice, &pg_slices, node) {
		if (!slice->function && slice->start >= start && slice->start + slice->bytes <= end)
			continue;
		count += pg_counts_for(slice, owner);
	}
	return count;
}

/*
 * How many bytes a user would have with [start, end) added. Retired slices count; otherwise a
 * process that maps slices and gives them back would get the whole window in the end. Retired
 * slices may overlap with what their own process took again, and each byte counts once.
 */
static u64 pg_user_bytes(kuid_t owner, phys_addr_t start, phys_addr_t end)
{
	phys_addr_t at = 0, from, to;
	struct pg_slice *slice;
	u64 bytes = 0;

	/* Each turn adds the slice that comes next by address. */
	for (;;) {
		from = at < end ? start : PHYS_ADDR_MAX;
		to = end;
		list_for_each_entry(slice, &pg_slices, node) {
			if (slice->start >= from || slice->start + slice->bytes <= at ||
			    !pg_counts_for(slice, owner))
				continue;
			from = slice->start;
			to = from + slice->bytes;
		}
		if (from == PHYS_ADDR_MAX)
			return bytes;
		bytes += to - max(from, at);
		at = to;
	}
}

/*
 * Whether a user may have [start, end) in addition. The number of slices is checked first, because
 * it bounds the cost of the other check.
 */
static bool pg_user_may_have(kuid_t owner, phys_addr_t start, phys_addr_t end)
{
	return pg_user_slices(owner, start, end) <= READ_ONCE(slice_user_slices) &&
	       pg_user_bytes(owner, start, end) <= READ_ONCE(slice_user_bytes);
}

/*
 * Looks for a slice or hole in the way of [at, end): returns where it ends, or 0 if there is none.
 */
static u64 pg_obstacle(struct pg_function *fn, u64 at, u64 end)
{
	struct pg_slice *slice;

	if (fn->hole_end && pg_overlaps(at, end, fn->hole, fn->hole_end))
		return fn->hole_end;
	list_for_each_entry(slice, &pg_slices, node) {
		if (pg_overlaps(fn->window + at, fn->window + end, slice->start,
				slice->start + slice->bytes) &&
		    pg_is_kept_from_us(slice))
			return slice->start + slice->bytes - fn->window;
	}
	return 0;
}

static void pg_slice_take(struct pg_function *fn, struct pg_slice *slice, u64 at)
{
	slice->start = fn->window + at;
	/* Retired slices in this range are kept for the caller only, so they are absorbed. */
	pg_absorb(slice);
	list_add(&slice->node, &pg_slices);
}

/*
 * For a user at the limit: takes room within a slice that the user gave back and that still counts.
 */
static int pg_slice_take_again(struct pg_function *fn, struct pg_slice *slice, u64 align)
{
	phys_addr_t start;
	struct pg_slice *old;
	unsigned int looks = 0;
	u64 at, end, next;

	list_for_each_entry(old, &pg_slices, node) {
		if (old->function || !uid_eq(old->owner, slice->owner) || old->start < fn->window ||
		    old->start - fn->window >= fn->window_bytes || pg_is_mapped_by_nobody(old))
			continue;
		end = min(old->start + old->bytes - fn->window, fn->window_bytes);
		at = ALIGN(old->start - fn->window, align);
		/* The caller may have taken some of this room again already. */
		while (at + slice->bytes <= end && looks++ < PG_LOOKS) {
			next = pg_obstacle(fn, at, at + slice->bytes);
			if (next) {
				at = ALIGN(next, align);
				continue;
			}
			start = fn->window + at;
			/* The slice adds no new bytes, so only the number of slices is checked. */
			if (pg_user_slices(slice->owner, start, start + slice->bytes) >
			    READ_ONCE(slice_user_slices))
				break;
			pg_slice_take(fn, slice, at);
			return 0;
		}
	}
	return -EDQUOT;
}

/* Finds room, first fit, and takes it. */
static int pg_slice_place(struct pg_function *fn, struct pg_slice *slice, u64 align)
{
	u64 at = 0, next, start;
	int err = -ENOSPC;

	mutex_lock(&fn->lock);
	if (fn->gone) {
		err = -ENODEV;
		goto unlock;
	}
	mutex_lock(&pg_slices_lock);
	/* No sum here overflows: a window is far below 2^63, and so is align. */
	while (at <= fn->window_bytes && slice->bytes <= fn->window_bytes - at) {
		next = pg_obstacle(fn, at, at + slice->bytes);
		if (next) {
			at = ALIGN(next, align);
			continue;
		}
		start = fn->window + at;
		if (pg_user_may_have(slice->owner, start, start + slice->bytes)) {
			pg_slice_take(fn, slice, at);
			err = 0;
		} else {
			err = pg_slice_take_again(fn, slice, align);
		}
		break;
	}
	mutex_unlock(&pg_slices_lock);
unlock:
	mutex_unlock(&fn->lock);
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

	slice = kzalloc(sizeof(*slice), GFP_KERNEL_ACCOUNT);
	if (!slice)
		return -ENOMEM;
	kref_init(&slice->refs);
	mutex_init(&slice->lock);
	INIT_LIST_HEAD(&slice->mappers);
	slice->function = fn;
	/* The owner is the user who opened the device, not the one who was handed the file. */
	slice->owner = file->file->f_cred->euid;
	slice->bytes = alloc.bytes;
	pg_function_get(fn);
	err = pg_slice_place(fn, slice, alloc.align);
	if (err) {
		pg_function_put(fn);
		kfree(slice);
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

/* Records that the caller may have the slice mapped from now on. */
static int pg_slice_track(struct pg_slice *slice)
{
	struct pg_mapper *mapper;
	int err = 0;

	mutex_lock(&slice->lock);
	mapper = pg_mapper_find(slice, current->mm, task_tgid(current));
	if (mapper) {
		/* The entry may come from a slice whose function has gone. */
		mapper->waited = false;
		goto unlock;
	}
	mapper = kzalloc(sizeof(*mapper), GFP_KERNEL_ACCOUNT);
	if (!mapper) {
		err = -ENOMEM;
		goto unlock;
	}
	mmgrab(current->mm);
	mapper->mm = current->mm;
	mapper->process = get_task_pid(current, PIDTYPE_TGID);
	list_add(&mapper->node, &slice->mappers);
unlock:
	mutex_unlock(&slice->lock);
	return err;
}

static void pg_vma_open(struct vm_area_struct *vma)
{
	struct pg_slice *slice = vma->vm_private_data;

	atomic_inc(&slice->mappings);
}

static void pg_vma_close(struct vm_area_struct *vma)
{
	struct pg_slice *slice = vma->vm_private_data;

	atomic_dec(&slice->mappings);
}

/* A GPU's driver wants the whole range in one mapping, so splitting is refused. */
static int pg_vma_may_split(struct vm_area_struct *vma, unsigned long address)
{
	return -EINVAL;
}

/* All pages are mapped from the start; a fault means that the function has gone. */
static vm_fault_t pg_vma_fault(struct vm_fault *vmf)
{
	return VM_FAULT_SIGBUS;
}

static const struct vm_operations_struct pg_vma_ops = {
	.open = pg_vma_open,
	.close = pg_vma_close,
	.may_split = pg_vma_may_split,
	.fault = pg_vma_fault,
};

static int pg_map(struct pg_slice *slice, struct vm_area_struct *vma, phys_addr_t start,
		  pgprot_t prot)
{
	struct pg_function *fn = slice->function;
	unsigned long at;
	int err;

	if (vma->vm_flags & VM_EXEC)
		return -EACCES;
	mutex_lock(&fn->lock);
	err = fn->gone ? -ENODEV : pg_slice_track(slice);
	if (err)
		goto unlock;
	/*
	 * A child would have to be tracked where no error can be returned, so a child of fork gets
	 * no mapping and makes its own; VM_IO keeps MADV_DOFORK off.
	 */
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	vm_flags_clear(vma, VM_MAYEXEC);
	vma->vm_page_prot = prot;
	vma->vm_private_data = slice;
	/*
	 * Map everything now, because a GPU's driver looks the frames up and takes no fault. Map
	 * page by page and not with io_remap_pfn_range, which gives the same entries: on x86 it
	 * marks a whole mapping VM_PAT, and when unmap_mapping_range then meets a munmap,
	 * untrack_pfn finds no entry and warns. pg_probe has reserved the caching mode.
	 */
	for (at = vma->vm_start; at < vma->vm_end && !err; at += PAGE_SIZE, start += PAGE_SIZE) {
		if (vmf_insert_pfn_prot(vma, at, start >> PAGE_SHIFT, prot) != VM_FAULT_NOPAGE)
			err = -ENOMEM;
	}
	if (err)
		goto unlock;
	vma->vm_ops = &pg_vma_ops;
	atomic_inc(&slice->mappings);
unlock:
	mutex_unlock(&fn->lock);
	return err;
}

int pg_slice_mmap(struct pg_file *file, struct vm_area_struct *vma)
{
	/* Pairs with the release in pg_slice_alloc. */
	struct pg_slice *slice = smp_load_acquire(&file->slice);
	u64 from = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 bytes = vma->vm_end - vma->vm_start;

	if (!slice)
		return -ENODATA;
	if (from > slice->bytes || bytes > slice->bytes - from)
		return -EINVAL;
	return pg_map(slice, vma, slice->start + from, pgprot_writecombine(vma->vm_page_prot));
}

int pg_doorbell_mmap(struct pg_file *file, struct vm_area_struct *vma)
{
	/* A slice is required, so that the doorbell's mappers are those of the slice. */
	struct pg_slice *slice = smp_load_acquire(&file->slice);

	if (vma->vm_end - vma->vm_start != PAGE_SIZE)
		return -EINVAL;
	if (!slice)
		return -ENODATA;
	if (!slice->function->doorbell_page)
		return -ENXIO;
	return pg_map(slice, vma, slice->function->doorbell_page, pgprot_noncached(vma->vm_page_prot));
}

/* The parts of the window on either side of the doorbell's page; the second may be empty. */
static void pg_window_part(struct pg_function *fn, int part, resource_size_t *start,
			   resource_size_t *bytes)
{
	u64 from = part ? fn->hole_end : 0;
	u64 to = part || !fn->hole_end ? fn->window_bytes : fn->hole;

	if (part && !fn->hole_end)
		from = to;
	*start = fn->window + from;
	*bytes = to - from;
}

/* Tells the processor that the window is write-combined, before any page of it is mapped. */
int pg_window_reserve(struct pg_function *fn)
{
	resource_size_t start, bytes;
	int err, part;

	for (part = 0; part < 2; part++) {
		pg_window_part(fn, part, &start, &bytes);
		err = bytes ? arch_io_reserve_memtype_wc(start, bytes) : 0;
		if (err)
			goto undo;
	}
	return 0;

undo:
	if (part) {
		pg_window_part(fn, 0, &start, &bytes);
		if (bytes)
			arch_io_free_memtype_wc(start, bytes);
	}
	return err;
}

void pg_window_release(struct pg_function *fn)
{
	resource_size_t start, bytes;
	int part;

	for (part = 0; part < 2; part++) {
		pg_window_part(fn, part, &start, &bytes);
		if (bytes)
			arch_io_free_memtype_wc(start, bytes);
	}
}

/* Returns an address space whose mmap calls have not been waited for yet, with mmget. */
static struct mm_struct *pg_next_mm(struct pg_function *fn)
{
	struct mm_struct *mm = NULL;
	struct pg_mapper *mapper;
	struct pg_slice *slice;

	mutex_lock(&pg_slices_lock);
	list_for_each_entry(slice, &pg_slices, node) {
		if (slice->function != fn)
			continue;
		mutex_lock(&slice->lock);
		list_for_each_entry(mapper, &slice->mappers, node) {
			if (mapper->waited)
				continue;
			mapper->waited = true;
			if (mmget_not_zero(mapper->mm)) {
				mm = mapper->mm;
				break;
			}
		}
		mutex_unlock(&slice->lock);
		if (mm)
			break;
	}
	mutex_unlock(&pg_slices_lock);
	return mm;
}

/* Removes the pages of a function that is gone from every mapping. */
void pg_unmap_function(struct pg_function *fn)
{
	struct mm_struct *mm;
	struct pg_file *file;

	/*
	 * An mmap call that came before `gone` was set may have its pages but not yet its place in
	 * the file's list of mappings, where this function looks for them. The call holds mmap_lock
	 * until it has both.
	 */
	while ((mm = pg_next_mm(fn))) {
		mmap_read_lock(mm);
		mmap_read_unlock(mm);
		mmput(mm);
	}
	mutex_lock(&fn->lock);
	list_for_each_entry(file, &fn->files, node) {
		unmap_mapping_range(file->file->f_mapping, PUSHGATE_MMAP_SLICE,
				    PUSHGATE_MMAP_STATUS - PUSHGATE_MMAP_SLICE, 1);
		unmap_mapping_range(file->file->f_mapping, PUSHGATE_MMAP_DOORBELL, PAGE_SIZE, 1);
	}
	mutex_unlock(&fn->lock);
}

void pg_bar_show(struct seq_file *out)
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
