// SPDX-License-Identifier: GPL-2.0
/*
 * pushgate: a NIC's BAR and kernel pages as windows that a GPU pushes into.
 *
 * This file has the devices and the open files; each ioctl is in the file of its subject.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cdev.h>
#include <linux/debugfs.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "internal.h"

static dev_t pg_devt;
static struct cdev pg_cdev;
static struct class *pg_class;
static struct dentry *pg_debugfs;

static DEFINE_MUTEX(pg_minors_lock);
static DEFINE_IDR(pg_minors);

static atomic_t pg_open_files = ATOMIC_INIT(0);

/*
 * Copies in a struct that may be older or newer than this module's. `least` is the size of the
 * struct's first version.
 */
int pg_copy_in(void *to, size_t known, size_t least, const void __user *from)
{
	u32 size;
	int err;

	if (get_user(size, (const u32 __user *)from))
		return -EFAULT;
	if (size < least)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	err = copy_struct_from_user(to, known, from, size);
	if (err)
		return err;
	/* Another thread may have changed the size between the two reads. */
	*(u32 *)to = size;
	return 0;
}

/* Copies out the part of the struct that the caller knows. */
int pg_copy_out(void __user *to, const void *from, size_t known)
{
	size_t size = min_t(size_t, known, *(const u32 *)from);

	return copy_to_user(to, from, size) ? -EFAULT : 0;
}

static void pg_function_release(struct kref *refs)
{
	struct pg_function *fn = container_of(refs, struct pg_function, refs);

	kfree(fn->vectors);
	kfree(fn);
}

void pg_function_get(struct pg_function *fn)
{
	kref_get(&fn->refs);
}

void pg_function_put(struct pg_function *fn)
{
	kref_put(&fn->refs, pg_function_release);
}

/* Makes /dev/pushgateN, which can be opened from then on. */
int pg_publish(struct pg_function *fn)
{
	struct device *dev;
	int minor;

	mutex_lock(&pg_minors_lock);
	minor = idr_alloc(&pg_minors, fn, 1, PG_MINORS, GFP_KERNEL);
	if (minor > 0)
		fn->minor = minor;
	mutex_unlock(&pg_minors_lock);
	if (minor < 0)
		return minor;
	dev = device_create(pg_class, &fn->pdev->dev, pg_devt + minor, NULL,
			    "pushgate%d", minor - 1);
	if (IS_ERR(dev)) {
		mutex_lock(&pg_minors_lock);
		idr_remove(&pg_minors, minor);
		mutex_unlock(&pg_minors_lock);
		return PTR_ERR(dev);
	}
	return 0;
}

void pg_unpublish(struct pg_function *fn)
{
	/* The device goes first: its name must be free before its number is. */
	device_destroy(pg_class, pg_devt + fn->minor);
	mutex_lock(&pg_minors_lock);
	idr_remove(&pg_minors, fn->minor);
	mutex_unlock(&pg_minors_lock);
}

static int pg_open(struct inode *inode, struct file *filp)
{
	struct pg_function *fn = NULL;
	struct pg_file *file;
	int err = -ENOMEM;

	if (iminor(inode)) {
		mutex_lock(&pg_minors_lock);
		fn = idr_find(&pg_minors, iminor(inode));
		if (fn)
			pg_function_get(fn);
		mutex_unlock(&pg_minors_lock);
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
	info.features = PUSHGATE_FEATURE_STAGING;
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
	bool of_function = true;
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
	case PUSHGATE_IOC_SLICE_ALLOC:
		handler = pg_slice_alloc;
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
		break;
	default:
		return -ENOTTY;
	}
	if (of_function && !file->function)
		return -ENXIO;
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

static const struct file_operations pg_fops = {
	.owner = THIS_MODULE,
	.open = pg_open,
	.release = pg_release,
	.unlocked_ioctl = pg_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = pg_mmap,
	.llseek = noop_llseek,
};

static int pg_state_show(struct seq_file *out, void *unused)
{
	struct pg_function *fn;
	int minor;

	seq_printf(out, "files %d\n", atomic_read(&pg_open_files));
	pg_bar_show(out);
	pg_staging_show(out);
	mutex_lock(&pg_minors_lock);
	idr_for_each_entry(&pg_minors, fn, minor)
		pg_function_show(out, fn);
	mutex_unlock(&pg_minors_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(pg_state);

static int __init pg_init(void)
{
	struct device *dev;
	int err;

	err = alloc_chrdev_region(&pg_devt, 0, PG_MINORS, "pushgate");
	if (err)
		return err;
	pg_class = pg_class_create("pushgate");
	if (IS_ERR(pg_class)) {
		err = PTR_ERR(pg_class);
		goto no_class;
	}
	cdev_init(&pg_cdev, &pg_fops);
	pg_cdev.owner = THIS_MODULE;
	err = cdev_add(&pg_cdev, pg_devt, PG_MINORS);
	if (err)
		goto no_cdev;
	dev = device_create(pg_class, NULL, pg_devt, NULL, "pushgate");
	if (IS_ERR(dev)) {
		err = PTR_ERR(dev);
		goto no_device;
	}
	pg_debugfs = debugfs_create_dir("pushgate", NULL);
	debugfs_create_file("state", 0400, pg_debugfs, NULL, &pg_state_fops);
	err = pg_pci_init();
	if (err)
		goto no_pci;
	return 0;

no_pci:
	debugfs_remove_recursive(pg_debugfs);
	device_destroy(pg_class, pg_devt);
no_device:
	cdev_del(&pg_cdev);
no_cdev:
	class_destroy(pg_class);
no_class:
	unregister_chrdev_region(pg_devt, PG_MINORS);
	return err;
}

/* Runs only when no file, area or retired slice is left, because each holds the module. */
static void __exit pg_exit(void)
{
	pg_pci_exit();
	debugfs_remove_recursive(pg_debugfs);
	device_destroy(pg_class, pg_devt);
	cdev_del(&pg_cdev);
	pg_staging_exit();
	pg_bar_exit();
	class_destroy(pg_class);
	unregister_chrdev_region(pg_devt, PG_MINORS);
	idr_destroy(&pg_minors);
}

module_init(pg_init);
module_exit(pg_exit);

MODULE_DESCRIPTION("A PCI BAR and kernel pages as windows for GPU-initiated networking");
MODULE_AUTHOR("The pushgate authors");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
