// SPDX-License-Identifier: GPL-2.0
/*
 * pushgate: a NIC's BAR and kernel pages as windows that a GPU pushes into.
 *
 * This file loads and unloads the module. No other file uses it.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/debugfs.h>
#include <linux/module.h>

#include "internal.h"

static struct dentry *pg_debugfs;

static int pg_state_show(struct seq_file *out, void *unused)
{
	pg_files_show(out);
	pg_slices_show(out);
	pg_staging_show(out);
	pg_devices_show(out);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(pg_state);

static int __init pg_init(void)
{
	int err;

	err = pg_devices_init(&pg_file_operations);
	if (err)
		return err;
	pg_debugfs = debugfs_create_dir("pushgate", NULL);
	debugfs_create_file("state", 0400, pg_debugfs, NULL, &pg_state_fops);
	err = pg_pci_init();
	if (err) {
		debugfs_remove_recursive(pg_debugfs);
		pg_devices_exit();
	}
	return err;
}

/* Runs only when no file, area or retired slice is left, because each holds the module. */
static void __exit pg_exit(void)
{
	pg_pci_exit();
	debugfs_remove_recursive(pg_debugfs);
	pg_devices_exit();
	pg_staging_exit();
	pg_slices_exit();
}

module_init(pg_init);
module_exit(pg_exit);

MODULE_DESCRIPTION("A PCI BAR and kernel pages as windows for GPU-initiated networking");
MODULE_AUTHOR("The pushgate authors");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.2.0");
