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
MODULE_PARM_DESC(window_bar, "BAR that is the window (-1: as the device is known; others are refused)");

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
	if (doorbell_bar >= 0) {
		layout.doorbell_bar = doorbell_bar;
		layout.doorbell_offset = doorbell_offset;
	}
	return layout;
}

/*
 * Whether the layout names a window. Of an unknown device no BAR is taken by guess: a user who can
 * write its registers can have it write to any memory.
 */
static bool pg_has_window(struct pci_dev *pdev, const struct pg_layout *layout)
{
	int bar, largest = 0;

	if (pg_is_memory(pdev, layout->window_bar) &&
	    pci_resource_len(pdev, layout->window_bar) >= PAGE_SIZE)
		return true;
	if (layout->window_bar >= 0) {
		pci_err(pdev, "BAR %d is no memory of a page or more: see window_bar\n",
			layout->window_bar);
		return false;
	}
	for (bar = 1; bar < PCI_STD_NUM_BARS; bar++) {
		if (pci_resource_len(pdev, bar) > pci_resource_len(pdev, largest))
			largest = bar;
	}
	pci_err(pdev, "the BARs of a device %04x:%04x are not known, and the largest (BAR %d, %pR) may be registers: if one is memory, load the module with window_bar\n",
		pdev->vendor, pdev->device, largest, &pdev->resource[largest]);
	return false;
}

static int pg_find_doorbell(struct pg_function *fn, const struct pg_layout *layout)
{
	struct pci_dev *pdev = fn->pdev;
	resource_size_t bytes = pci_resource_len(pdev, layout->doorbell_bar);
	phys_addr_t start = pci_resource_start(pdev, layout->doorbell_bar);
	u32 at = layout->doorbell_offset;
	bool may_map;

	if (!pg_is_memory(pdev, layout->doorbell_bar) || at % 4 || bytes < 4 || at > bytes - 4) {
		pci_err(pdev, "no doorbell register at offset %u of BAR %d: see doorbell_bar, doorbell_offset\n",
			at, layout->doorbell_bar);
		return -EINVAL;
	}
	fn->doorbell = ioremap(start + at, 4);
	if (!fn->doorbell)
		return -ENOMEM;
	fn->doorbell_in_page = at & ~PAGE_MASK;
	/*
	 * A BAR smaller than a page shares its page with whatever the firmware placed beside it. In
	 * a larger BAR the page may hold other registers, unless the page is cut out of the window
	 * or the administrator says that it holds none.
	 */
	if (layout->doorbell_bar == layout->window_bar)
		may_map = pg_window_doorbell(fn, at);
	else
		may_map = doorbell_own_page && bytes >= PAGE_SIZE &&
			  !pg_page_has_msix(pdev, layout->doorbell_bar, at & PAGE_MASK);
	if (may_map)
		fn->doorbell_page = (start + at) & PAGE_MASK;
	return 0;
}

/* Makes a window of the device, and its /dev/pushgateN. */
static int pg_start(struct pci_dev *pdev)
{
	struct pg_layout layout = pg_layout_of(pdev);
	struct pg_function *fn;
	int err;

	if (!pg_has_window(pdev, &layout))
		return -ENODEV;
	fn = kzalloc(sizeof(*fn), GFP_KERNEL);
	if (!fn)
		return -ENOMEM;
	kref_init(&fn->refs);
	mutex_init(&fn->lock);
	INIT_LIST_HEAD(&fn->files);
	mutex_init(&fn->exports_lock);
	INIT_LIST_HEAD(&fn->exports);
	init_waitqueue_head(&fn->imports_ended);
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
	err = pg_window_find(fn, layout.window_bar);
	if (!err && layout.doorbell_bar >= 0)
		err = pg_find_doorbell(fn, &layout);
	if (err)
		goto unmap;
	err = pg_window_reserve(fn);
	if (err) {
		pci_err(pdev, "the window cannot be write-combined: has somebody else mapped it?\n");
		goto unmap;
	}
	err = pg_vectors_init(fn);
	if (err)
		goto no_vectors;
	/* For what pg_slot_reset restores. */
	pci_save_state(pdev);
	pci_set_drvdata(pdev, fn);
	err = pg_publish(fn);
	if (err)
		goto no_publish;
	pci_info(pdev, "window of %llu KiB in BAR %d, %d holes, %u vectors\n", fn->window_bytes >> 10,
		 layout.window_bar, fn->nholes, fn->nvectors);
	return 0;

no_publish:
	pci_set_drvdata(pdev, NULL);
	pg_vectors_exit(fn);
no_vectors:
	pg_window_release(fn);
unmap:
	if (fn->doorbell)
		iounmap(fn->doorbell);
	pci_release_selected_regions(pdev, fn->bars);
disable:
	pci_disable_device(pdev);
put:
	pg_function_put(fn);
	return err;
}

/* Takes the device from all who use it. Their files and slices stay, without it. */
static void pg_cut_off(struct pg_function *fn)
{
	struct pg_file *file;

	pg_unpublish(fn);
	mutex_lock(&fn->lock);
	fn->gone = true;
	list_for_each_entry(file, &fn->files, node) {
		WRITE_ONCE(file->status->function, PUSHGATE_FUNCTION_GONE);
		/* A sleeper wakes and reads the status word. */
		pg_bell_gone(&file->bell);
	}
	mutex_unlock(&fn->lock);
	pg_unmap_function(fn);
	pg_revoke(fn);
}

/* Gives back a device that was cut off and that no importer reaches any more. */
static void pg_end(struct pg_function *fn)
{
	struct pci_dev *pdev = fn->pdev;

	pg_vectors_exit(fn);
	pg_window_release(fn);
	if (fn->doorbell)
		iounmap(fn->doorbell);
	fn->doorbell = NULL;
	pci_release_selected_regions(pdev, fn->bars);
	pci_disable_device(pdev);
	pci_set_drvdata(pdev, NULL);
	pg_function_put(fn);
}

static int pg_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	return pg_start(pdev);
}

static void pg_remove(struct pci_dev *pdev)
{
	struct pg_function *fn = pci_get_drvdata(pdev);

	/* There is none after an error from which the device did not come back. */
	if (!fn)
		return;
	if (!fn->gone)
		pg_cut_off(fn);
	pg_wait_for_importers(fn);
	pg_end(fn);
}

/* The device may have lost what its memory held, so for programs it is gone. */
static pci_ers_result_t pg_error_detected(struct pci_dev *pdev, pci_channel_state_t state)
{
	struct pg_function *fn = pci_get_drvdata(pdev);

	if (state == pci_channel_io_normal)
		return PCI_ERS_RESULT_CAN_RECOVER;
	if (fn && !fn->gone)
		pg_cut_off(fn);
	return state == pci_channel_io_frozen ? PCI_ERS_RESULT_NEED_RESET : PCI_ERS_RESULT_DISCONNECT;
}

static pci_ers_result_t pg_slot_reset(struct pci_dev *pdev)
{
	pci_restore_state(pdev);
	return PCI_ERS_RESULT_RECOVERED;
}

/* The device comes back as if it was bound again. */
static void pg_resume(struct pci_dev *pdev)
{
	struct pg_function *fn = pci_get_drvdata(pdev);

	if (!fn || !fn->gone)
		return;
	if (atomic_read(&fn->imports)) {
		pci_err(pdev, "an importer has a slice mapped from before the error: bind the device again\n");
		return;
	}
	pg_end(fn);
	if (pg_start(pdev))
		pci_err(pdev, "the device does not come back after the error: bind it again\n");
}

static const struct pci_error_handlers pg_error_handlers = {
	.error_detected = pg_error_detected,
	.slot_reset = pg_slot_reset,
	.resume = pg_resume,
};

/* Without a table of ids only dynamic ids and driver_override bind a function. */
static struct pci_driver pg_driver = {
	.name = "pushgate",
	.probe = pg_probe,
	.remove = pg_remove,
	.err_handler = &pg_error_handlers,
};

int pg_pci_init(void)
{
	return pci_register_driver(&pg_driver);
}

void pg_pci_exit(void)
{
	pci_unregister_driver(&pg_driver);
}
