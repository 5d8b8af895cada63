// SPDX-License-Identifier: GPL-2.0
/*
 * A view of a staging area: a file that another process is handed, which maps the area for reading
 * and can do nothing else. It keeps the file that is attached to the area, so the area stays as
 * long as a view or a mapping of it.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/anon_inodes.h>
#include <linux/file.h>
#include <linux/module.h>

#include "internal.h"

static struct pg_file *pg_view_file(struct file *view)
{
	struct file *attached = view->private_data;

	return attached->private_data;
}

static int pg_view_release(struct inode *inode, struct file *view)
{
	fput(view->private_data);
	return 0;
}

static long pg_view_ioctl(struct file *view, unsigned int command, unsigned long value)
{
	void __user *argument = (void __user *)value;
	struct pushgate_info info;
	int err;

	if (command != PUSHGATE_IOC_INFO)
		return -ENOTTY;
	err = pg_copy_in(&info, sizeof(info), sizeof(info), argument);
	if (err)
		return err;
	if (info.flags)
		return -EINVAL;
	info.version = PUSHGATE_UAPI_VERSION;
	info.vectors = 0;
	info.features = 0;
	info.window_bytes = pg_staging_bytes(pg_view_file(view));
	info.granule = PAGE_SIZE;
	info.doorbell_offset = 0;
	info.function = PUSHGATE_FUNCTION_NONE;
	info.node = NUMA_NO_NODE;
	return pg_copy_out(argument, &info, sizeof(info));
}

static int pg_view_mmap(struct file *view, struct vm_area_struct *vma)
{
	/* The file is open for reading alone, so the kernel takes VM_SHARED away and leaves this. */
	if (!(vma->vm_flags & VM_MAYSHARE))
		return -EINVAL;
	if (vma->vm_flags & VM_WRITE)
		return -EACCES;
	if ((u64)vma->vm_pgoff << PAGE_SHIFT < PUSHGATE_MMAP_STAGING)
		return -EINVAL;
	vm_flags_clear(vma, VM_MAYWRITE);
	return pg_staging_mmap(pg_view_file(view), vma);
}

static const struct file_operations pg_view_operations = {
	.owner = THIS_MODULE,
	.release = pg_view_release,
	.unlocked_ioctl = pg_view_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = pg_view_mmap,
	.llseek = noop_llseek,
};

long pg_staging_export(struct pg_file *file, void __user *argument)
{
	struct pushgate_staging_export export;
	struct file *view;
	int err;

	err = pg_copy_in(&export, sizeof(export), sizeof(export), argument);
	if (err)
		return err;
	if (export.flags || export.reserved)
		return -EINVAL;
	if (!file->area)
		return -ENODATA;
	view = anon_inode_getfile(PUSHGATE_VIEW_NAME, &pg_view_operations, file->file, O_RDONLY);
	if (IS_ERR(view))
		return PTR_ERR(view);
	get_file(file->file);
	export.fd = get_unused_fd_flags(O_CLOEXEC);
	if (export.fd < 0) {
		err = export.fd;
		goto put;
	}
	err = pg_copy_out(argument, &export, sizeof(export));
	if (err) {
		put_unused_fd(export.fd);
		goto put;
	}
	fd_install(export.fd, view);
	return 0;

put:
	/* Puts the attached file, too. */
	fput(view);
	return err;
}
