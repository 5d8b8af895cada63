// SPDX-License-Identifier: GPL-2.0
/*
 * How a program maps its slice and the doorbell's page, and how both mappings end when the function
 * goes.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/sched/mm.h>

#include "internal.h"

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
	 * untrack_pfn finds no entry and warns. pg_window_reserve has reserved the caching mode.
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
	while ((mm = pg_slices_next_mm(fn))) {
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
