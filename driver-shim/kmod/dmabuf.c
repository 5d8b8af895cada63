// SPDX-License-Identifier: GPL-2.0
/*
 * A slice as a dma-buf, for a device whose driver takes one: an RDMA NIC that can reach a peer's
 * BAR. The frames have no struct page (Debian's kernel has no P2PDMA), so an importer gets only bus
 * addresses.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/fdtable.h>
#include <linux/file.h>
#include <linux/module.h>
#include <linux/overflow.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "internal.h"

static int pg_dmabuf_attach(struct dma_buf *dmabuf, struct dma_buf_attachment *attachment)
{
	struct pg_slice *slice = dmabuf->priv;

	/* The lengths in a scatter list have 32 bits, and one entry means "contiguous". */
	return slice->bytes > UINT_MAX ? -EOPNOTSUPP : 0;
}

static struct sg_table *pg_dmabuf_map(struct dma_buf_attachment *attachment,
				      enum dma_data_direction direction)
{
	struct pg_slice *slice = attachment->dmabuf->priv;
	struct pg_function *fn = slice->function;
	struct sg_table *table;
	dma_addr_t address;
	int err;

	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return ERR_PTR(-ENOMEM);
	err = sg_alloc_table(table, 1, GFP_KERNEL);
	if (err)
		goto free_table;
	mutex_lock(&fn->lock);
	if (fn->gone) {
		err = -ENODEV;
	} else {
		address = dma_map_resource(attachment->dev, slice->start, slice->bytes, direction,
					   DMA_ATTR_SKIP_CPU_SYNC);
		err = dma_mapping_error(attachment->dev, address);
	}
	mutex_unlock(&fn->lock);
	if (err)
		goto free_list;
	/* No page, so that no importer accesses the memory through the CPU. */
	sg_set_page(table->sgl, NULL, slice->bytes, 0);
	sg_dma_address(table->sgl) = address;
	sg_dma_len(table->sgl) = slice->bytes;
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
	dma_unmap_resource(attachment->dev, sg_dma_address(table->sgl), sg_dma_len(table->sgl), direction,
			   DMA_ATTR_SKIP_CPU_SYNC);
	sg_free_table(table);
	kfree(table);
}

static void pg_dmabuf_release(struct dma_buf *dmabuf)
{
	pg_slice_put(dmabuf->priv);
}

static const struct dma_buf_ops pg_dmabuf_ops = {
	.attach = pg_dmabuf_attach,
	.map_dma_buf = pg_dmabuf_map,
	.unmap_dma_buf = pg_dmabuf_unmap,
	.release = pg_dmabuf_release,
};

long pg_slice_export(struct pg_file *file, void __user *argument)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
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
	info.ops = &pg_dmabuf_ops;
	info.size = file->slice->bytes;
	info.flags = O_RDWR;
	info.priv = file->slice;
	pg_slice_get(file->slice);
	dmabuf = dma_buf_export(&info);
	if (IS_ERR(dmabuf)) {
		pg_slice_put(file->slice);
		return PTR_ERR(dmabuf);
	}
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

PG_IMPORT_DMA_BUF;
