// SPDX-License-Identifier: GPL-2.0
/*
 * The PCI driver. It claims no device by itself: a function is bound to it by driver_override or
 * new_id, as with vfio-pci.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "internal.h"

static int window_bar = -1;
module_param(window_bar, int, 0444);
MODULE_PARM_DESC(window_bar, "BAR that is the window (-1: as the device is known, or the largest)");

static int doorbell_bar = -1;
module_param(doorbell_bar, int, 0444);
MODULE_PARM_DESC(doorbell_bar, "BAR of the doorbell register (-1: as the device is known, or none)");

static uint doorbell_offset;
module_param(doorbell_offset, uint, 0444);
MODULE_PARM_DESC(doorbell_offset, "offset of the 32-bit doorbell register in doorbell_bar");

static bool doorbell_own_page;
module_param(doorbell_own_page, bool, 0444);
MODULE_PARM_DESC(doorbell_own_page, "the page of the doorbell holds nothing else: it may be mapped");

/* Devices whose layout is known. */
static const struct pg_layout {
	u16 vendor, device;
	int window_bar, doorbell_bar;
	u32 doorbell_offset;
} pg_layouts[] = {
	/* QEMU's ivshmem: shared memory in BAR 2, a register in BAR 0. */
	{ 0x1af4, 0x1110, 2, 0, 12 },
};

static bool pg_is_memory(struct pci_dev *pdev, int bar)
{
	return bar >= 0 && bar < PCI_STD_NUM_BARS &&
	       (pci_resource_flags(pdev, bar) & IORESOURCE_MEM) &&
	       pci_resource_start(pdev, bar);
}

static int pg_largest_bar(struct pci_dev *pdev)
{
	int bar, best = -1;

	for (bar = 0; bar < PCI_STD_NUM_BARS; bar++) {
		if (pg_is_memory(pdev, bar) &&
		    (best < 0 || pci_resource_len(pdev, bar) > pci_resource_len(pdev, best)))
			best = bar;
	}
	return best;
}

static struct pg_layout pg_layout_of(struct pci_dev *pdev)
{
	struct pg_layout layout = { .window_bar = -1, .doorbell_bar = -1 };
	int i;

	for (i = 0; i < ARRAY_SIZE(pg_layouts); i++) {
		if (pg_layouts[i].vendor == pdev->vendor && pg_layouts[i].device == pdev->device)
			layout = pg_layouts[i];
	}
	if (window_bar >= 0)
		layout.window_bar = window_bar;
	if (layout.window_bar < 0)
		layout.window_bar = pg_largest_bar(pdev);
	if (doorbell_bar >= 0) {
		layout.doorbell_bar = doorbell_bar;
		layout.doorbell_offset = doorbell_offset;
	}
	return layout;
}

static int pg_find_doorbell(struct pg_function *fn, const struct pg_layout *layout)
{
	struct pci_dev *pdev = fn->pdev;
	resource_size_t bytes = pci_resource_len(pdev, layout->doorbell_bar);
	phys_addr_t start = pci_resource_start(pdev, layout->doorbell_bar);
	u32 at = layout->doorbell_offset;
	bool in_window = layout->doorbell_bar == layout->window_bar;

	if (!pg_is_memory(pdev, layout->doorbell_bar) || at % 4 || bytes < 4 || at > bytes - 4) {
		pci_err(pdev, "no doorbell register at offset %u of BAR %d: see doorbell_bar, doorbell_offset\n",
			at, layout->doorbell_bar);
		return -EINVAL;
	}
	fn->doorbell = ioremap(start + at, 4);
	if (!fn->doorbell)
		return -ENOMEM;
	fn->doorbell_in_page = at & ~PAGE_MASK;
	if (in_window) {
		fn->hole = at & PAGE_MASK;
		fn->hole_end = fn->hole + PAGE_SIZE;
	}
	/*
	 * A BAR smaller than a page shares its page with whatever the firmware placed beside it. In
	 * a larger BAR the page may hold other registers, unless the page is cut out of the window
	 * or the administrator says that it holds none.
	 */
	if (bytes >= PAGE_SIZE && (in_window || doorbell_own_page))
		fn->doorbell_page = (start + at) & PAGE_MASK;
	return 0;
}

static int pg_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct pg_layout layout = pg_layout_of(pdev);
	struct pg_function *fn;
	int err;

	if (!pg_is_memory(pdev, layout.window_bar) ||
	    pci_resource_len(pdev, layout.window_bar) < PAGE_SIZE) {
		pci_err(pdev, "BAR %d is no memory of a page or more: see window_bar\n", layout.window_bar);
		return -ENODEV;
	}
	fn = kzalloc(sizeof(*fn), GFP_KERNEL);
	if (!fn)
		return -ENOMEM;
	kref_init(&fn->refs);
	mutex_init(&fn->lock);
	INIT_LIST_HEAD(&fn->files);
	fn->pdev = pdev;
	fn->node = dev_to_node(&pdev->dev);

	err = pci_enable_device_mem(pdev);
	if (err)
		goto put;
	fn->bars = 1 << layout.window_bar;
	if (layout.doorbell_bar >= 0)
		fn->bars |= 1 << layout.doorbell_bar;
	err = pci_request_selected_regions(pdev, fn->bars, "pushgate");
	if (err)
		goto disable;
	fn->window = pci_resource_start(pdev, layout.window_bar);
	fn->window_bytes = pci_resource_len(pdev, layout.window_bar);
	if (layout.doorbell_bar >= 0) {
		err = pg_find_doorbell(fn, &layout);
		if (err)
			goto release;
	}
	err = pg_window_reserve(fn);
	if (err) {
		pci_err(pdev, "the window cannot be write-combined: has somebody else mapped it?\n");
		goto unmap;
	}
	pci_set_master(pdev);
	err = pg_vectors_init(fn);
	if (err)
		goto no_master;
	pci_set_drvdata(pdev, fn);
	err = pg_publish(fn);
	if (err)
		goto no_vectors;
	pci_info(pdev, "window of %llu KiB in BAR %d, %u vectors\n", fn->window_bytes >> 10,
		 layout.window_bar, fn->nvectors);
	return 0;

no_vectors:
	pg_vectors_exit(fn);
no_master:
	pci_clear_master(pdev);
	pg_window_release(fn);
unmap:
	if (fn->doorbell)
		iounmap(fn->doorbell);
release:
	pci_release_selected_regions(pdev, fn->bars);
disable:
	pci_disable_device(pdev);
put:
	pg_function_put(fn);
	return err;
}

static void pg_remove(struct pci_dev *pdev)
{
	struct pg_function *fn = pci_get_drvdata(pdev);
	void __iomem *doorbell;
	struct pg_file *file;

	pg_unpublish(fn);
	mutex_lock(&fn->lock);
	fn->gone = true;
	doorbell = fn->doorbell;
	fn->doorbell = NULL;
	list_for_each_entry(file, &fn->files, node) {
		WRITE_ONCE(file->status->function, PUSHGATE_FUNCTION_GONE);
		/* A sleeper wakes and reads the status word. */
		pg_bell_gone(&file->bell);
	}
	mutex_unlock(&fn->lock);
	pg_unmap_function(fn);
	pg_vectors_exit(fn);
	pci_clear_master(pdev);
	pg_window_release(fn);
	if (doorbell)
		iounmap(doorbell);
	pci_release_selected_regions(pdev, fn->bars);
	pci_disable_device(pdev);
	pg_function_put(fn);
}

/* No fixed ids: only dynamic ids and driver_override bind a function. */
static const struct pci_device_id pg_ids[] = { { } };

static struct pci_driver pg_driver = {
	.name = "pushgate",
	.id_table = pg_ids,
	.probe = pg_probe,
	.remove = pg_remove,
};

int pg_pci_init(void)
{
	return pci_register_driver(&pg_driver);
}

void pg_pci_exit(void)
{
	pci_unregister_driver(&pg_driver);
}
