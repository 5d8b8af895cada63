// SPDX-License-Identifier: GPL-2.0
/*
 * Loaded by tests only: attaches to a dma-buf as a device would, and reports the address that it
 * got and what lies there. In debugfs, write a descriptor's number to pushgate-importer/import,
 * then read "address bytes first-word" from that file.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/debugfs.h>
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/scatterlist.h>
#include <linux/uaccess.h>

#include "../compat.h"

static struct platform_device *importer;
static struct dentry *folder;
static DEFINE_MUTEX(lock);
static dma_addr_t address;
static u64 length;
static u64 word;

static int import(int fd)
{
	struct dma_buf_attachment *attachment;
	struct dma_buf *dmabuf;
	struct sg_table *table;
	void __iomem *window;
	int err = 0;

	dmabuf = dma_buf_get(fd);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	attachment = dma_buf_attach(dmabuf, &importer->dev);
	if (IS_ERR(attachment)) {
		err = PTR_ERR(attachment);
		goto put;
	}
	table = dma_buf_map_attachment_unlocked(attachment, DMA_BIDIRECTIONAL);
	if (IS_ERR(table)) {
		err = PTR_ERR(table);
		goto detach;
	}
	address = sg_dma_address(table->sgl);
	length = sg_dma_len(table->sgl);
	/* Without an IOMMU the bus address is the physical address. */
	window = ioremap_wc(address, PAGE_SIZE);
	if (window) {
		word = readq(window);
		writeq(~word, window + 8);
		wmb();
		(void)readq(window + 8);
		iounmap(window);
	} else {
		err = -ENOMEM;
	}
	dma_buf_unmap_attachment_unlocked(attachment, table, DMA_BIDIRECTIONAL);
detach:
	dma_buf_detach(dmabuf, attachment);
put:
	dma_buf_put(dmabuf);
	return err;
}

static ssize_t import_write(struct file *file, const char __user *text, size_t count, loff_t *at)
{
	int fd, err;

	err = kstrtoint_from_user(text, count, 10, &fd);
	if (err)
		return err;
	mutex_lock(&lock);
	err = import(fd);
	mutex_unlock(&lock);
	return err ? err : count;
}

static ssize_t import_read(struct file *file, char __user *to, size_t count, loff_t *at)
{
	char text[80];
	int n;

	mutex_lock(&lock);
	n = scnprintf(text, sizeof(text), "%llu %llu %llu\n", (u64)address, length, word);
	mutex_unlock(&lock);
	return simple_read_from_buffer(to, count, at, text, n);
}

static const struct file_operations import_fops = {
	.owner = THIS_MODULE,
	.write = import_write,
	.read = import_read,
};

static int __init importer_init(void)
{
	int err;

	importer = platform_device_register_simple("pushgate-importer", PLATFORM_DEVID_NONE, NULL, 0);
	if (IS_ERR(importer))
		return PTR_ERR(importer);
	err = dma_coerce_mask_and_coherent(&importer->dev, DMA_BIT_MASK(64));
	if (err) {
		platform_device_unregister(importer);
		return err;
	}
	folder = debugfs_create_dir("pushgate-importer", NULL);
	debugfs_create_file("import", 0600, folder, NULL, &import_fops);
	return 0;
}

static void __exit importer_exit(void)
{
	debugfs_remove_recursive(folder);
	platform_device_unregister(importer);
}

module_init(importer_init);
module_exit(importer_exit);

MODULE_DESCRIPTION("A dma-buf importer for pushgate's tests");
MODULE_LICENSE("GPL");
PG_IMPORT_DMA_BUF;
