// SPDX-License-Identifier: GPL-2.0
/*
 * The limits of slices for each user, over all functions.
 *
 * Slices never overlap, so a user's share is the sum of the user's slices. A retired slice counts
 * as long as other users are kept off it; otherwise a process that maps slices and gives them back
 * would get the whole window in the end.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>

#include "internal.h"

static ulong slice_user_bytes = 1UL << 30;
module_param(slice_user_bytes, ulong, 0644);
MODULE_PARM_DESC(slice_user_bytes, "slices that one user may have, over all functions");

/* Also bounds the cost of a walk of the list. */
static uint slice_user_slices = 1024;
module_param(slice_user_slices, uint, 0644);
MODULE_PARM_DESC(slice_user_slices, "how many slices one user may have, over all functions");

/*
 * Whether a user may have [start, end) besides the slices in the list, less what the new slice
 * takes over from retired ones.
 */
bool pg_quota_allows(struct list_head *slices, kuid_t owner, phys_addr_t start, phys_addr_t end)
{
	u64 bytes = end - start, left;
	struct pg_slice *slice;
	unsigned int count = 1;

	list_for_each_entry(slice, slices, node) {
		if (!uid_eq(slice->owner, owner) || (!slice->function && !pg_mapped_by_any(slice)))
			continue;
		left = slice->bytes;
		if (pg_overlaps(slice, start, end))
			left -= min(slice->start + slice->bytes, end) - max(slice->start, start);
		bytes += left;
		count += left != 0;
	}
	return count <= READ_ONCE(slice_user_slices) && bytes <= READ_ONCE(slice_user_bytes);
}
