// SPDX-License-Identifier: GPL-2.0
/*
 * A PCI function as the other files hold it: by references, beyond its removal.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/pci.h>
#include <linux/slab.h>

#include "internal.h"

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

void pg_function_show(struct seq_file *out, struct pg_function *fn)
{
	struct pg_file *file;

	mutex_lock(&fn->lock);
	seq_printf(out, "function pushgate%d %s window %llu vectors %u\n", fn->minor - 1,
		   fn->gone ? "gone" : pci_name(fn->pdev), fn->window_bytes, fn->nvectors);
	list_for_each_entry(file, &fn->files, node)
		seq_printf(out, "  file rings %llu wakes %llu\n", file->bell.rings, file->bell.wakes);
	mutex_unlock(&fn->lock);
}
