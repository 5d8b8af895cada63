// SPDX-License-Identifier: GPL-2.0
/*
 * Staging areas: named pages of the kernel, which outlive the process that pushes through them.
 *
 * They are mapped as ordinary pages, so RDMA and GPU drivers pin them like any memory. Each page is
 * freed by reference: a pin that lives on keeps its page from being reused, and the area need not
 * know about the pin.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cred.h>
#include <linux/gfp.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/slab.h>
#include <linux/uidgid.h>
#include <linux/vmalloc.h>
#include <linux/workqueue.h>

#include "internal.h"

static ulong staging_user_bytes = 1UL << 30;
module_param(staging_user_bytes, ulong, 0644);
MODULE_PARM_DESC(staging_user_bytes, "staging that one user may have");

static uint staging_user_areas = 64;
module_param(staging_user_areas, uint, 0644);
MODULE_PARM_DESC(staging_user_areas, "staging areas that one user may have");

static uint staging_ttl_max_ms = 3600 * 1000;
module_param(staging_ttl_max_ms, uint, 0644);
MODULE_PARM_DESC(staging_ttl_max_ms, "longest life of an area that nobody is attached to");

/* Pieces of 2 MiB: larger ones are rare, and make no difference to a TLB. */
#define PG_STAGING_ORDER 9

struct pg_area {
	struct list_head node;		/* pg_areas */
	char name[PUSHGATE_NAME_BYTES];
	kuid_t owner;
	u64 npages;
	u64 pieces;
	u64 attaches;
	u32 ttl_ms;
	u64 expires;			/* in jiffies, while no file is attached */
	bool attached;
	bool freed;			/* the name is free already */
	struct page **pages;
};

/* Protects the list and all fields but the pages. Never held during an allocation. */
static DEFINE_MUTEX(pg_areas_lock);
static LIST_HEAD(pg_areas);

static void pg_staging_sweep(struct work_struct *work);
static DECLARE_DELAYED_WORK(pg_sweep_work, pg_staging_sweep);

static void pg_area_free(struct pg_area *area)
{
	u64 i;

	for (i = 0; i < area->npages && area->pages[i]; i++)
		put_page(area->pages[i]);
	kvfree(area->pages);
	kfree(area);
	module_put(THIS_MODULE);
}

/* Fills the area with zeroed pages, in the largest pieces available. */
static int pg_area_fill(struct pg_area *area, int node)
{
	unsigned int order = PG_STAGING_ORDER;
	u64 done = 0, i;

	while (done < area->npages) {
		gfp_t gfp = GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_NOWARN;
		struct page *page;

		while (order && (1UL << order) > area->npages - done)
			order--;
		/*
		 * Give up on a large piece early; try hard for a single page, but without the
		 * out-of-memory killer.
		 */
		gfp |= order ? __GFP_NORETRY : __GFP_RETRY_MAYFAIL;
		page = alloc_pages_node(node, gfp, order);
		if (!page && order) {
			order--;
			continue;
		}
		if (!page || fatal_signal_pending(current)) {
			if (page)
				__free_pages(page, order);
			return page ? -EINTR : -ENOMEM;
		}
		/* Split, so that each page has its own count and is freed and pinned by itself. */
		if (order)
			split_page(page, order);
		for (i = 0; i < 1UL << order; i++)
			area->pages[done + i] = page + i;
		if (!done || page_to_pfn(page) != page_to_pfn(area->pages[done - 1]) + 1)
			area->pieces++;
		done += 1UL << order;
		cond_resched();
	}
	return 0;
}

/* Sums what a user has already. Called with the lock held. */
static void pg_user_sum(kuid_t owner, u64 *bytes, u32 *areas)
{
	struct pg_area *area;

	*bytes = 0;
	*areas = 0;
	list_for_each_entry(area, &pg_areas, node) {
		if (uid_eq(area->owner, owner)) {
			*bytes += area->npages << PAGE_SHIFT;
			*areas += 1;
		}
	}
}

/*
 * Finds a user's area. Called with the lock held. A name of another user's area is treated like one
 * that does not exist.
 */
static struct pg_area *pg_area_find(kuid_t owner, const char *name)
{
	struct pg_area *area;

	list_for_each_entry(area, &pg_areas, node) {
		/* An area whose time is over only waits for the sweep. */
		if (area->freed || (!area->attached && area->expires <= get_jiffies_64()))
			continue;
		if (uid_eq(area->owner, owner) && !strcmp(area->name, name))
			return area;
	}
	return NULL;
}

static int pg_check_name(const char *name)
{
	if (!name[0])
		return -EINVAL;
	return strnlen(name, PUSHGATE_NAME_BYTES) == PUSHGATE_NAME_BYTES ? -ENAMETOOLONG : 0;
}

/* The last file has detached: the area's time to live begins. */
static void pg_area_idle(struct pg_area *area)
{
	u32 ttl;

	mutex_lock(&pg_areas_lock);
	ttl = area->freed ? 0 : min(area->ttl_ms, READ_ONCE(staging_ttl_max_ms));
	area->attached = false;
	area->expires = get_jiffies_64() + msecs_to_jiffies(ttl);
	/*
	 * Without time to live the area goes now, so that its name and the user's share are free
	 * when close returns.
	 */
	if (!ttl)
		list_del(&area->node);
	else
		mod_delayed_work(system_wq, &pg_sweep_work, 0);
	mutex_unlock(&pg_areas_lock);
	if (!ttl)
		pg_area_free(area);
}

/* Frees the areas whose time is over, and runs again when the next area's time is over. */
static void pg_staging_sweep(struct work_struct *work)
{
	u64 now = get_jiffies_64(), next = U64_MAX;
	struct pg_area *area, *after;
	LIST_HEAD(over);

	mutex_lock(&pg_areas_lock);
	list_for_each_entry_safe(area, after, &pg_areas, node) {
		if (area->attached)
			continue;
		if (area->expires <= now)
			list_move(&area->node, &over);
		else
			next = min(next, area->expires);
	}
	if (next != U64_MAX)
		mod_delayed_work(system_wq, &pg_sweep_work, (unsigned long)(next - now));
	mutex_unlock(&pg_areas_lock);
	list_for_each_entry_safe(area, after, &over, node)
		pg_area_free(area);
}

void pg_staging_exit(void)
{
	cancel_delayed_work_sync(&pg_sweep_work);
}

long pg_staging_create(struct pg_file *file, void __user *argument)
{
	/* The owner is the user who opened the device, not the one who was handed the file. */
	kuid_t owner = file->file->f_cred->euid;
	struct pushgate_staging_create create;
	struct pg_area *area;
	u64 bytes;
	u32 areas;
	int err;

	err = pg_copy_in(&create, sizeof(create), sizeof(create), argument);
	if (err)
		return err;
	if (create.flags || !create.bytes)
		return -EINVAL;
	err = pg_check_name(create.name);
	if (err)
		return err;
	if (create.node != NUMA_NO_NODE &&
	    (create.node < 0 || create.node >= MAX_NUMNODES || !node_online(create.node)))
		return -ENXIO;
	if (create.ttl_ms > READ_ONCE(staging_ttl_max_ms))
		return -ERANGE;
	if (file->area)
		return -EBUSY;
	/* Checked here too, so that the sums below cannot overflow. */
	if (create.bytes > READ_ONCE(staging_user_bytes))
		return -EDQUOT;
	create.bytes = PAGE_ALIGN(create.bytes);

	area = kzalloc(sizeof(*area), GFP_KERNEL_ACCOUNT);
	if (!area)
		return -ENOMEM;
	area->npages = create.bytes >> PAGE_SHIFT;
	area->owner = owner;
	area->ttl_ms = create.ttl_ms;
	area->attaches = 1;
	area->attached = true;
	strscpy(area->name, create.name, sizeof(area->name));

	/*
	 * The area is listed before its pages are allocated, so that two calls at once cannot both
	 * pass.
	 */
	mutex_lock(&pg_areas_lock);
	pg_user_sum(owner, &bytes, &areas);
	if (pg_area_find(owner, area->name))
		err = -EEXIST;
	else if (areas >= READ_ONCE(staging_user_areas))
		err = -EMFILE;
	else if (create.bytes > READ_ONCE(staging_user_bytes) ||
		 bytes > READ_ONCE(staging_user_bytes) - create.bytes)
		err = -EDQUOT;
	else
		list_add(&area->node, &pg_areas);
	mutex_unlock(&pg_areas_lock);
	if (err) {
		kfree(area);
		return err;
	}
	/* The area may outlive every file, so it holds the module itself. */
	__module_get(THIS_MODULE);

	err = -ENOMEM;
	area->pages = kvcalloc(area->npages, sizeof(*area->pages), GFP_KERNEL_ACCOUNT);
	if (area->pages) {
		int node = NUMA_NO_NODE;

		if (create.node != NUMA_NO_NODE)
			node = array_index_nospec(create.node, MAX_NUMNODES);
		else if (file->function)
			node = file->function->node;
		err = pg_area_fill(area, node);
	}
	if (!err) {
		create.pieces = area->pieces;
		err = pg_copy_out(argument, &create, sizeof(create));
	}
	if (err) {
		mutex_lock(&pg_areas_lock);
		list_del(&area->node);
		mutex_unlock(&pg_areas_lock);
		if (!area->pages)
			area->npages = 0;
		pg_area_free(area);
		return err;
	}
	/* From here on mmap finds the complete area. */
	smp_store_release(&file->area, area);
	return 0;
}

long pg_staging_open(struct pg_file *file, void __user *argument)
{
	struct pushgate_staging_open open;
	struct pg_area *area;
	int err;

	err = pg_copy_in(&open, sizeof(open), sizeof(open), argument);
	if (err)
		return err;
	if (open.flags || open.reserved)
		return -EINVAL;
	err = pg_check_name(open.name);
	if (err)
		return err;
	if (file->area)
		return -EBUSY;
	mutex_lock(&pg_areas_lock);
	area = pg_area_find(file->file->f_cred->euid, open.name);
	if (!area) {
		err = -ENOENT;
	} else if (area->attached) {
		err = -EBUSY;
	} else {
		area->attached = true;
		open.bytes = area->npages << PAGE_SHIFT;
		open.attaches = ++area->attaches;
		open.ttl_ms = area->ttl_ms;
	}
	mutex_unlock(&pg_areas_lock);
	if (err)
		return err;
	err = pg_copy_out(argument, &open, sizeof(open));
	if (err) {
		/* The count of an attached area is changed by no other code. */
		area->attaches--;
		pg_area_idle(area);
		return err;
	}
	smp_store_release(&file->area, area);
	return 0;
}

long pg_staging_free(struct pg_file *file, void __user *argument)
{
	struct pushgate_staging_free arg;
	int err;

	err = pg_copy_in(&arg, sizeof(arg), sizeof(arg), argument);
	if (err)
		return err;
	if (arg.flags)
		return -EINVAL;
	if (!file->area)
		return -ENODATA;
	mutex_lock(&pg_areas_lock);
	if (file->area->freed)
		err = -ENODATA;
	file->area->freed = true;
	mutex_unlock(&pg_areas_lock);
	return err;
}

/* The file closes, after its last mapping. */
void pg_staging_detach(struct pg_file *file)
{
	pg_area_idle(file->area);
}

/* Bytes of the area that the file is attached to. */
u64 pg_staging_bytes(struct pg_file *file)
{
	/* Pairs with the release where the file was attached. */
	return smp_load_acquire(&file->area)->npages << PAGE_SHIFT;
}

/* Maps a page again that the process has given back with madvise. */
static vm_fault_t pg_staging_fault(struct vm_fault *vmf)
{
	struct pg_area *area = vmf->vma->vm_private_data;
	u64 index = vmf->pgoff - (PUSHGATE_MMAP_STAGING >> PAGE_SHIFT);

	if (index >= area->npages)
		return VM_FAULT_SIGBUS;
	vmf->page = area->pages[array_index_nospec(index, area->npages)];
	get_page(vmf->page);
	return 0;
}

static const struct vm_operations_struct pg_staging_vm_ops = {
	.fault = pg_staging_fault,
};

int pg_staging_mmap(struct pg_file *file, struct vm_area_struct *vma)
{
	/* Pairs with the release where the file was attached. */
	struct pg_area *area = smp_load_acquire(&file->area);
	u64 from = vma->vm_pgoff - (PUSHGATE_MMAP_STAGING >> PAGE_SHIFT);
	unsigned long left = vma_pages(vma);

	if (!area)
		return -ENODATA;
	if (from > area->npages || left > area->npages - from)
		return -EINVAL;
	if (vma->vm_flags & VM_EXEC)
		return -EACCES;
	vm_flags_clear(vma, VM_MAYEXEC);
	vm_flags_set(vma, VM_MIXEDMAP | VM_DONTEXPAND | VM_DONTDUMP);
	vma->vm_private_data = area;
	vma->vm_ops = &pg_staging_vm_ops;
	from = array_index_nospec(from, area->npages);
	return vm_insert_pages(vma, vma->vm_start, area->pages + from, &left);
}

void pg_staging_show(struct seq_file *out)
{
	u64 bytes = 0, pieces = 0;
	struct pg_area *area;
	int count = 0, idle = 0;

	mutex_lock(&pg_areas_lock);
	list_for_each_entry(area, &pg_areas, node) {
		bytes += area->npages << PAGE_SHIFT;
		pieces += area->pieces;
		count++;
		idle += !area->attached;
	}
	mutex_unlock(&pg_areas_lock);
	seq_printf(out, "areas %d\nareas_idle %d\nareas_bytes %llu\nareas_pieces %llu\n", count, idle, bytes,
		   pieces);
}
