// SPDX-License-Identifier: GPL-2.0
/*
 * A slice as a dma-buf, for a device whose driver takes one: an RDMA NIC that can reach a peer's
 * BAR. The frames have no struct page (Debian's kernel has no P2PDMA), so an importer gets only bus
 * addresses, and must say that it can do with those (allow_peer2peer).
 *
 * When the function goes, its dma-bufs are revoked: importers are told to give their mappings up,
 * and no mapping is made any more. An importer that has pinned its mapping, as RDMA drivers without
 * on-demand paging do, keeps the mapping until its program ends, and its device may write to the BAR
 * until then. So the function is kept until the last mapping has ended.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/file.h>
#include <linux/module.h>
#include <linux/pci-p2pdma.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "internal.h"

struct pg_export {
	struct dma_buf *dmabuf;
	struct pg_slice *slice;
	struct list_head node;	/* function->exports */
	bool revoked;		/* protected by the dma-buf's reservation */
};

/*
 * A mapping may be pinned. Kernels without DMABUF_MOVE_NOTIFY pin each, so that pinned mappings can't
 * be told from those that are given up when the dma-buf is revoked.
 */
static int pg_dmabuf_pin(struct dma_buf_attachment *attachment)
{
	return 0;
}

static void pg_dmabuf_unpin(struct dma_buf_attachment *attachment)
{
}

static int pg_dmabuf_attach(struct dma_buf *dmabuf, struct dma_buf_attachment *attachment)
{
	struct pg_export *export = dmabuf->priv;
	struct pg_function *fn = export->slice->function;
	int err = 0;

	/* The lengths in a scatter list have 32 bits, and one entry means "contiguous". */
	if (!attachment->peer2peer || export->slice->bytes > UINT_MAX)
		return -EOPNOTSUPP;
	mutex_lock(&fn->lock);
	if (fn->gone)
		err = -ENODEV;
	else if (IS_ENABLED(CONFIG_PCI_P2PDMA) &&
		 pci_p2pdma_distance(fn->pdev, attachment->dev, true) < 0)
		err = -EOPNOTSUPP;
	mutex_unlock(&fn->lock);
	return err;
}

static struct sg_table *pg_dmabuf_map(struct dma_buf_attachment *attachment,
				      enum dma_data_direction direction)
{
	struct pg_export *export = attachment->dmabuf->priv;
	struct pg_slice *slice = export->slice;
	struct sg_table *table;
	dma_addr_t address;
	int err;

	dma_resv_assert_held(attachment->dmabuf->resv);
	if (export->revoked)
		return ERR_PTR(-ENODEV);
	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return ERR_PTR(-ENOMEM);
	err = sg_alloc_table(table, 1, GFP_KERNEL);
	if (err)
		goto free_table;
	address = dma_map_resource(attachment->dev, slice->start, slice->bytes, direction,
				   DMA_ATTR_SKIP_CPU_SYNC);
	err = dma_mapping_error(attachment->dev, address);
	if (err)
		goto free_list;
	/* No page, so that no importer accesses the memory through the CPU. */
	sg_set_page(table->sgl, NULL, slice->bytes, 0);
	sg_dma_address(table->sgl) = address;
	sg_dma_len(table->sgl) = slice->bytes;
	atomic_inc(&slice->function->imports);
	return table;

free_list:
	sg_free_table(table);
free_table:
	kfree(table);
	return ERR_PTR(err);
}

static void pg_dmabuf_unmap(struct dma_buf_attachment *attachment, struct sg_table *table,
			    enum dma_data_direction direction)
{
	struct pg_export *export = attachment->dmabuf->priv;
	struct pg_function *fn = export->slice->function;

	dma_unmap_resource(attachment->dev, sg_dma_address(table->sgl), sg_dma_len(table->sgl), direction,
			   DMA_ATTR_SKIP_CPU_SYNC);
	sg_free_table(table);
	kfree(table);
	if (atomic_dec_and_test(&fn->imports))
		wake_up(&fn->imports_ended);
}

static void pg_dmabuf_release(struct dma_buf *dmabuf)
{
	struct pg_export *export = dmabuf->priv;
	struct pg_function *fn = export->slice->function;

	/* pg_revoke may use the dma-buf until it is off the list. */
	mutex_lock(&fn->exports_lock);
	list_del(&export->node);
	mutex_unlock(&fn->exports_lock);
	pg_slice_put(export->slice);
	kfree(export);
}

static const struct dma_buf_ops pg_dmabuf_ops = {
	.attach = pg_dmabuf_attach,
	.pin = pg_dmabuf_pin,
	.unpin = pg_dmabuf_unpin,
	.map_dma_buf = pg_dmabuf_map,
	.unmap_dma_buf = pg_dmabuf_unmap,
	.release = pg_dmabuf_release,
};

/* Makes a dma-buf of the slice, revoked from the start if the function has gone meanwhile. */
static struct dma_buf *pg_dmabuf_new(struct pg_slice *slice)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct pg_function *fn = slice->function;
	struct pg_export *export;
	struct dma_buf *dmabuf;

	export = kzalloc(sizeof(*export), GFP_KERNEL_ACCOUNT);
	if (!export)
		return ERR_PTR(-ENOMEM);
	export->slice = slice;
	info.ops = &pg_dmabuf_ops;
	info.size = slice->bytes;
	info.flags = O_RDWR;
	info.priv = export;
	dmabuf = dma_buf_export(&info);
	if (IS_ERR(dmabuf)) {
		kfree(export);
		return dmabuf;
	}
	pg_slice_get(slice);
	export->dmabuf = dmabuf;
	mutex_lock(&fn->exports_lock);
	export->revoked = READ_ONCE(fn->gone);
	list_add(&export->node, &fn->exports);
	mutex_unlock(&fn->exports_lock);
	return dmabuf;
}

long pg_slice_export(struct pg_file *file, void __user *argument)
{
	struct pushgate_slice_export export;
	struct dma_buf *dmabuf;
	int err;

	err = pg_copy_in(&export, sizeof(export), sizeof(export), argument);
	if (err)
		return err;
	if (export.flags || export.reserved)
		return -EINVAL;
	if (READ_ONCE(file->function->gone))
		return -ENODEV;
	if (!file->slice)
		return -ENODATA;
	dmabuf = pg_dmabuf_new(file->slice);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
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
	fd_install(export.fd, dmabuf->file);
	return 0;

put:
	dma_buf_put(dmabuf);
	return err;
}

/* Tells importers of a function that is gone to give up their mappings; no new one is made. */
void pg_revoke(struct pg_function *fn)
{
	struct pg_export *export;

	mutex_lock(&fn->exports_lock);
	list_for_each_entry(export, &fn->exports, node) {
		dma_resv_lock(export->dmabuf->resv, NULL);
		export->revoked = true;
		dma_buf_move_notify(export->dmabuf);
		dma_resv_unlock(export->dmabuf->resv);
	}
	mutex_unlock(&fn->exports_lock);
}

static void pg_warn_of_importers(struct pg_function *fn)
{
	struct dma_buf_attachment *attachment;
	struct pg_export *export;

	mutex_lock(&fn->exports_lock);
	list_for_each_entry(export, &fn->exports, node) {
		dma_resv_lock(export->dmabuf->resv, NULL);
		list_for_each_entry(attachment, &export->dmabuf->attachments, node)
			pci_warn(fn->pdev, "waits: %s has a slice mapped; end the program that gave it the dma-buf\n",
				 dev_name(attachment->dev));
		dma_resv_unlock(export->dmabuf->resv);
	}
	mutex_unlock(&fn->exports_lock);
}

/* Waits, after pg_revoke, until no importer's device can reach the function's BAR any more. */
void pg_wait_for_importers(struct pg_function *fn)
{
	unsigned long patience = HZ;

	while (!wait_event_timeout(fn->imports_ended, !atomic_read(&fn->imports), patience)) {
		pg_warn_of_importers(fn);
		patience = 10 * HZ;
	}
}

PG_IMPORT_DMA_BUF;
