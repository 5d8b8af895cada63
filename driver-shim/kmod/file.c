// SPDX-License-Identifier: GPL-2.0
/*
 * The open files: each ioctl and each mapping goes to the file of its subject. INFO and the status
 * page, which have no other subject, are here.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/slab.h>

#include "internal.h"

static atomic_t pg_open_files = ATOMIC_INIT(0);

static int pg_open(struct inode *inode, struct file *filp)
{
	struct pg_function *fn = NULL;
	struct pg_file *file;
	int err = -ENOMEM;

	if (iminor(inode)) {
		fn = pg_function_find(iminor(inode));
		if (!fn)
			return -ENXIO;
	}
	file = kzalloc(sizeof(*file), GFP_KERNEL_ACCOUNT);
	if (!file)
		goto put_function;
	file->status_page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!file->status_page)
		goto free_file;
	file->status = page_address(file->status_page);
	file->file = filp;
	file->function = fn;
	mutex_init(&file->lock);
	pg_bell_init(file);
	if (fn) {
		mutex_lock(&fn->lock);
		if (fn->gone) {
			mutex_unlock(&fn->lock);
			err = -ENODEV;
			goto free_page;
		}
		list_add(&file->node, &fn->files);
		WRITE_ONCE(file->status->function, PUSHGATE_FUNCTION_LIVE);
		mutex_unlock(&fn->lock);
	}
	filp->private_data = file;
	atomic_inc(&pg_open_files);
	return nonseekable_open(inode, filp);

free_page:
	put_page(file->status_page);
free_file:
	kfree(file);
put_function:
	if (fn)
		pg_function_put(fn);
	return err;
}

static int pg_release(struct inode *inode, struct file *filp)
{
	struct pg_file *file = filp->private_data;
	struct pg_function *fn = file->function;

	if (fn) {
		mutex_lock(&fn->lock);
		list_del(&file->node);
		mutex_unlock(&fn->lock);
	}
	pg_bell_exit(file);
	if (file->area)
		pg_staging_detach(file);
	if (file->slice)
		pg_slice_put(file->slice);
	/* Freed by reference, because a GPU may still have the page pinned. */
	put_page(file->status_page);
	if (fn)
		pg_function_put(fn);
	kfree(file);
	atomic_dec(&pg_open_files);
	return 0;
}

static long pg_info(struct pg_file *file, void __user *argument)
{
	struct pg_function *fn = file->function;
	struct pushgate_info info;
	int err;

	err = pg_copy_in(&info, sizeof(info), sizeof(info), argument);
	if (err)
		return err;
	if (info.flags)
		return -EINVAL;
	info.version = PUSHGATE_UAPI_VERSION;
	info.features = PUSHGATE_FEATURE_STAGING | PUSHGATE_FEATURE_STAGING_EXPORT;
	info.vectors = 0;
	info.window_bytes = 0;
	info.granule = PAGE_SIZE;
	info.doorbell_offset = 0;
	info.function = READ_ONCE(file->status->function);
	info.node = NUMA_NO_NODE;
	if (fn) {
		info.node = fn->node;
		info.vectors = fn->nvectors;
		info.window_bytes = fn->window_bytes;
		info.features |= PUSHGATE_FEATURE_SLICE | PUSHGATE_FEATURE_DMABUF;
		if (fn->nvectors)
			info.features |= PUSHGATE_FEATURE_INTERRUPT;
		if (fn->doorbell)
			info.features |= PUSHGATE_FEATURE_DOORBELL_RING;
		if (fn->doorbell_page) {
			info.features |= PUSHGATE_FEATURE_DOORBELL_MMAP;
			info.doorbell_offset = fn->doorbell_in_page;
		}
	}
	return pg_copy_out(argument, &info, sizeof(info));
}

static long pg_ioctl(struct file *filp, unsigned int command, unsigned long value)
{
	struct pg_file *file = filp->private_data;
	void __user *argument = (void __user *)value;
	bool of_function = true, writes = false;
	long (*handler)(struct pg_file *file, void __user *argument);
	long result;

	switch (command) {
	case PUSHGATE_IOC_INFO:
		handler = pg_info;
		of_function = false;
		break;
	case PUSHGATE_IOC_STAGING_CREATE:
		handler = pg_staging_create;
		of_function = false;
		break;
	case PUSHGATE_IOC_STAGING_OPEN:
		handler = pg_staging_open;
		of_function = false;
		break;
	case PUSHGATE_IOC_STAGING_FREE:
		handler = pg_staging_free;
		of_function = false;
		break;
	case PUSHGATE_IOC_STAGING_EXPORT:
		handler = pg_staging_export;
		of_function = false;
		break;
	case PUSHGATE_IOC_SLICE_ALLOC:
		handler = pg_slice_alloc;
		writes = true;
		break;
	case PUSHGATE_IOC_SLICE_EXPORT:
		handler = pg_slice_export;
		break;
	case PUSHGATE_IOC_DOORBELL_SET:
		handler = pg_doorbell_set;
		break;
	case PUSHGATE_IOC_DOORBELL_ARM:
		handler = pg_doorbell_arm;
		break;
	case PUSHGATE_IOC_DOORBELL_RING:
		handler = pg_doorbell_ring;
		writes = true;
		break;
	default:
		return -ENOTTY;
	}
	if (of_function && !file->function)
		return -ENXIO;
	if (writes && !(filp->f_mode & FMODE_WRITE))
		return -EBADF;
	if (mutex_lock_interruptible(&file->lock))
		return -ERESTARTSYS;
	result = handler(file, argument);
	mutex_unlock(&file->lock);
	return result;
}

static int pg_status_mmap(struct pg_file *file, struct vm_area_struct *vma)
{
	if (vma->vm_end - vma->vm_start != PAGE_SIZE)
		return -EINVAL;
	if (vma->vm_flags & (VM_WRITE | VM_EXEC))
		return -EACCES;
	vm_flags_clear(vma, VM_MAYWRITE | VM_MAYEXEC);
	vm_flags_set(vma, VM_DONTEXPAND);
	return vm_insert_page(vma, vma->vm_start, file->status_page);
}

static int pg_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct pg_file *file = filp->private_data;
	u64 first = (u64)vma->vm_pgoff << PAGE_SHIFT;

	/* A private copy of a window is useless to a device. */
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (first >= PUSHGATE_MMAP_STAGING)
		return pg_staging_mmap(file, vma);
	if (first == PUSHGATE_MMAP_STATUS)
		return pg_status_mmap(file, vma);
	if (first == PUSHGATE_MMAP_DOORBELL)
		return pg_doorbell_mmap(file, vma);
	if (first < PUSHGATE_MMAP_STATUS)
		return pg_slice_mmap(file, vma);
	return -EINVAL;
}

const struct file_operations pg_file_operations = {
	.owner = THIS_MODULE,
	.open = pg_open,
	.release = pg_release,
	.unlocked_ioctl = pg_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = pg_mmap,
	.llseek = noop_llseek,
};

void pg_files_show(struct seq_file *out)
{
	seq_printf(out, "files %d\n", atomic_read(&pg_open_files));
}
