// SPDX-License-Identifier: GPL-2.0
/*
 * The device files: /dev/pushgate, and a /dev/pushgateN for each function.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cdev.h>
#include <linux/idr.h>
#include <linux/module.h>

#include "internal.h"

static dev_t pg_devt;
static struct cdev pg_cdev;
static struct class *pg_class;

/* The functions by minor number. */
static DEFINE_MUTEX(pg_minors_lock);
static DEFINE_IDR(pg_minors);

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

/* The function of a minor number, with a reference; NULL if there is none. */
struct pg_function *pg_function_find(unsigned int minor)
{
	struct pg_function *fn;

	mutex_lock(&pg_minors_lock);
	fn = idr_find(&pg_minors, minor);
	if (fn)
		pg_function_get(fn);
	mutex_unlock(&pg_minors_lock);
	return fn;
}

void pg_devices_show(struct seq_file *out)
{
	struct pg_function *fn;
	int minor;

	mutex_lock(&pg_minors_lock);
	idr_for_each_entry(&pg_minors, fn, minor)
		pg_function_show(out, fn);
	mutex_unlock(&pg_minors_lock);
}

/* Makes /dev/pushgate. `operations` are those of all device files. */
int pg_devices_init(const struct file_operations *operations)
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
	cdev_init(&pg_cdev, operations);
	pg_cdev.owner = THIS_MODULE;
	err = cdev_add(&pg_cdev, pg_devt, PG_MINORS);
	if (err)
		goto no_cdev;
	dev = device_create(pg_class, NULL, pg_devt, NULL, "pushgate");
	if (IS_ERR(dev)) {
		err = PTR_ERR(dev);
		goto no_device;
	}
	return 0;

no_device:
	cdev_del(&pg_cdev);
no_cdev:
	class_destroy(pg_class);
no_class:
	unregister_chrdev_region(pg_devt, PG_MINORS);
	return err;
}

void pg_devices_exit(void)
{
	device_destroy(pg_class, pg_devt);
	cdev_del(&pg_cdev);
	class_destroy(pg_class);
	unregister_chrdev_region(pg_devt, PG_MINORS);
	idr_destroy(&pg_minors);
}
