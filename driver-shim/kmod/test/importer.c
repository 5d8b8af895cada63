// SPDX-License-Identifier: GPL-2.0
/*
 * Loaded by tests only: imports a dma-buf as a device's driver would. In debugfs, write to
 * pushgate-importer/import:
 *
 *	plain FD	attach without allow_peer2peer
 *	peer FD		attach, map, and give the mapping up when the exporter asks for it
 *	pinned FD	attach, pin, map, and keep the mapping
 *	again		map once more what was given up
 *	end		unmap and detach
 *
 * and read "address bytes first-word mapped" of the last mapping from that file.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/debugfs.h>
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/scatterlist.h>
#include <linux/uaccess.h>

#include "../compat.h"

static struct platform_device *importer;
static struct dentry *folder;
static DEFINE_MUTEX(lock);
static struct dma_buf_attachment *attachment;
static struct sg_table *table;	/* protected by the dma-buf's reservation */
static bool pinned;
static dma_addr_t address;
static u64 length;
static u64 word;

static void unmap(void)
{
	dma_buf_unmap_attachment(attachment, table, DMA_BIDIRECTIONAL);
	table = NULL;
}

static void notified(struct dma_buf_attachment *of)
{
	if (table && !pinned)
		unmap();
}

static const struct dma_buf_attach_ops peer_ops = {
	.allow_peer2peer = true,
	.move_notify = notified,
};

static const struct dma_buf_attach_ops plain_ops = {
	.move_notify = notified,
};

static int map(void)
{
	struct sg_table *mapped;
	void __iomem *window;

	mapped = dma_buf_map_attachment(attachment, DMA_BIDIRECTIONAL);
	if (IS_ERR(mapped))
		return PTR_ERR(mapped);
	table = mapped;
	address = sg_dma_address(table->sgl);
	length = sg_dma_len(table->sgl);
	/* Without an IOMMU the bus address is the physical address. */
	window = ioremap_wc(address, PAGE_SIZE);
	if (!window) {
		unmap();
		return -ENOMEM;
	}
	word = readq(window);
	writeq(~word, window + 8);
	wmb();
	(void)readq(window + 8);
	iounmap(window);
	return 0;
}

static int again(void)
{
	int err = -EBUSY;

	if (!attachment)
		return -ENODATA;
	dma_resv_lock(attachment->dmabuf->resv, NULL);
	if (!table)
		err = map();
	dma_resv_unlock(attachment->dmabuf->resv);
	return err;
}

static void end(void)
{
	struct dma_buf *dmabuf;

	if (!attachment)
		return;
	dmabuf = attachment->dmabuf;
	dma_resv_lock(dmabuf->resv, NULL);
	if (table)
		unmap();
	if (pinned)
		dma_buf_unpin(attachment);
	pinned = false;
	dma_resv_unlock(dmabuf->resv);
	dma_buf_detach(dmabuf, attachment);
	attachment = NULL;
	dma_buf_put(dmabuf);
}

static int import(int fd, const struct dma_buf_attach_ops *ops, bool pin)
{
	struct dma_buf_attachment *attached;
	struct dma_buf *dmabuf;
	int err = 0;

	end();
	dmabuf = dma_buf_get(fd);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	attached = dma_buf_dynamic_attach(dmabuf, &importer->dev, ops, NULL);
	if (IS_ERR(attached)) {
		dma_buf_put(dmabuf);
		return PTR_ERR(attached);
	}
	dma_resv_lock(dmabuf->resv, NULL);
	attachment = attached;
	if (pin)
		err = dma_buf_pin(attachment);
	pinned = pin && !err;
	if (!err)
		err = map();
	dma_resv_unlock(dmabuf->resv);
	if (err)
		end();
	return err;
}

static ssize_t import_write(struct file *file, const char __user *text, size_t count, loff_t *at)
{
	char command[32] = {};
	int fd, err = 0;

	if (count >= sizeof(command))
		return -EINVAL;
	if (copy_from_user(command, text, count))
		return -EFAULT;
	mutex_lock(&lock);
	if (sscanf(command, "plain %d", &fd) == 1)
		err = import(fd, &plain_ops, false);
	else if (sscanf(command, "peer %d", &fd) == 1)
		err = import(fd, &peer_ops, false);
	else if (sscanf(command, "pinned %d", &fd) == 1)
		err = import(fd, &peer_ops, true);
	else if (!strcmp(command, "again"))
		err = again();
	else if (!strcmp(command, "end"))
		end();
	else
		err = -EINVAL;
	mutex_unlock(&lock);
	return err ? err : count;
}

static ssize_t import_read(struct file *file, char __user *to, size_t count, loff_t *at)
{
	char text[80];
	int n;

	mutex_lock(&lock);
	n = scnprintf(text, sizeof(text), "%llu %llu %llu %d\n", (u64)address, length, word,
		      !!READ_ONCE(table));
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
	end();
	platform_device_unregister(importer);
}

module_init(importer_init);
module_exit(importer_exit);

MODULE_DESCRIPTION("A dma-buf importer for pushgate's tests");
MODULE_LICENSE("GPL");
PG_IMPORT_DMA_BUF;
