// SPDX-License-Identifier: GPL-2.0
/*
 * The window of a function, and the holes in it: pages that hold registers of the device, which no
 * slice contains and which are never zeroed, write-combined or mapped as a part of a slice. Who can
 * write the MSI-X table chooses where the device writes, so a page of it in a slice would be all of
 * memory.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/module.h>
#include <linux/pci.h>

#include "internal.h"

static ulong window_holes[2 * PG_PARAM_HOLES];
static unsigned int window_holes_given;
module_param_array(window_holes, ulong, &window_holes_given, 0444);
MODULE_PARM_DESC(window_holes, "OFFSET,BYTES,...: parts of the window that are no memory");

/* Cuts the pages of [from, from + bytes) of the window out, and keeps the holes sorted and apart. */
static void pg_hole_add(struct pg_function *fn, u64 from, u64 bytes)
{
	struct pg_hole hole = { .start = round_down(min(from, fn->window_bytes), PAGE_SIZE) };
	struct pg_hole *holes = fn->holes;
	int i, kept = 0;

	hole.end = min(PAGE_ALIGN(from + min(bytes, fn->window_bytes)), fn->window_bytes);
	if (hole.start >= hole.end)
		return;
	/* Holes that touch become one. */
	for (i = 0; i < fn->nholes; i++) {
		if (holes[i].end < hole.start || hole.end < holes[i].start) {
			holes[kept++] = holes[i];
			continue;
		}
		hole.start = min(hole.start, holes[i].start);
		hole.end = max(hole.end, holes[i].end);
	}
	for (i = kept; i && holes[i - 1].start > hole.start; i--)
		holes[i] = holes[i - 1];
	holes[i] = hole;
	fn->nholes = kept + 1;
}

/*
 * Bytes of the MSI-X table or of its pending bits (`where`: PCI_MSIX_TABLE, PCI_MSIX_PBA) in a BAR,
 * and the offset at which they lie; 0 if they lie in another BAR or nowhere.
 */
static u64 pg_msix_bytes(struct pci_dev *pdev, int bar, int where, u64 *at)
{
	int vectors = pci_msix_vec_count(pdev);
	u32 place;

	if (vectors <= 0)
		return 0;
	pci_read_config_dword(pdev, pdev->msix_cap + where, &place);
	*at = place & PCI_MSIX_TABLE_OFFSET;
	if ((place & PCI_MSIX_TABLE_BIR) != bar)
		return 0;
	if (where == PCI_MSIX_TABLE)
		return vectors * PCI_MSIX_ENTRY_SIZE;
	return DIV_ROUND_UP(vectors, 64) * 8;
}

/* Whether a page of a BAR, by its offset, holds a part of the MSI-X table or of its pending bits. */
bool pg_page_has_msix(struct pci_dev *pdev, int bar, u64 page)
{
	u64 at, table = pg_msix_bytes(pdev, bar, PCI_MSIX_TABLE, &at);
	bool has = table && at < page + PAGE_SIZE && page < at + table;
	u64 pba = pg_msix_bytes(pdev, bar, PCI_MSIX_PBA, &at);

	return has || (pba && at < page + PAGE_SIZE && page < at + pba);
}

/* Finds the window, and its holes except that of the doorbell (pg_window_doorbell). */
int pg_window_find(struct pg_function *fn, int bar)
{
	struct pci_dev *pdev = fn->pdev;
	u64 at, bytes;
	int i;

	fn->window = pci_resource_start(pdev, bar);
	fn->window_bytes = pci_resource_len(pdev, bar);
	for (i = PCI_MSIX_TABLE; i <= PCI_MSIX_PBA; i += PCI_MSIX_PBA - PCI_MSIX_TABLE) {
		bytes = pg_msix_bytes(pdev, bar, i, &at);
		if (bytes)
			pg_hole_add(fn, at, bytes);
	}
	if (window_holes_given % 2) {
		pci_err(pdev, "window_holes has %u numbers, which are not pairs of offset and bytes\n",
			window_holes_given);
		return -EINVAL;
	}
	for (i = 0; i < window_holes_given; i += 2)
		pg_hole_add(fn, window_holes[i], window_holes[i + 1]);
	return 0;
}

/*
 * Cuts out the page of a doorbell in the window. Returns whether that page holds no other registers,
 * as far as is known, so that it may be mapped by itself.
 */
bool pg_window_doorbell(struct pg_function *fn, u64 at)
{
	bool is_alone = !pg_window_hole(fn, at & PAGE_MASK, (at & PAGE_MASK) + PAGE_SIZE);

	pg_hole_add(fn, at, 4);
	return is_alone;
}

/* Looks for a hole in [at, end) of the window: returns where it ends, or 0 if there is none. */
u64 pg_window_hole(struct pg_function *fn, u64 at, u64 end)
{
	int i;

	for (i = 0; i < fn->nholes; i++) {
		if (at < fn->holes[i].end && fn->holes[i].start < end)
			return fn->holes[i].end;
	}
	return 0;
}

/* The part of the window before the n-th hole, or after the last one; may be empty. */
static resource_size_t pg_window_part(struct pg_function *fn, int n, resource_size_t *start)
{
	u64 from = n ? fn->holes[n - 1].end : 0;
	u64 to = n < fn->nholes ? fn->holes[n].start : fn->window_bytes;

	*start = fn->window + from;
	return to - from;
}

static void pg_window_release_parts(struct pg_function *fn, int count)
{
	resource_size_t start, bytes;

	while (count--) {
		bytes = pg_window_part(fn, count, &start);
		if (bytes)
			arch_io_free_memtype_wc(start, bytes);
	}
}

/* Tells the processor that the window is write-combined, before any page of it is mapped. */
int pg_window_reserve(struct pg_function *fn)
{
	resource_size_t start, bytes;
	int err, part;

	for (part = 0; part <= fn->nholes; part++) {
		bytes = pg_window_part(fn, part, &start);
		err = bytes ? arch_io_reserve_memtype_wc(start, bytes) : 0;
		if (err) {
			pg_window_release_parts(fn, part);
			return err;
		}
	}
	return 0;
}

void pg_window_release(struct pg_function *fn)
{
	pg_window_release_parts(fn, fn->nholes + 1);
}
