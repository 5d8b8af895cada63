// SPDX-License-Identifier: GPL-2.0
/*
 * The structs that ioctls bring. Each begins with its size, so that the module understands older and
 * newer callers.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/uaccess.h>

#include "internal.h"

/*
 * Copies in a struct that may be older or newer than this module's. `least` is the size of the
 * struct's first version.
 */
int pg_copy_in(void *to, size_t known, size_t least, const void __user *from)
{
	u32 size;
	int err;

	if (get_user(size, (const u32 __user *)from))
		return -EFAULT;
	if (size < least)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	err = copy_struct_from_user(to, known, from, size);
	if (err)
		return err;
	/* Another thread may have changed the size between the two reads. */
	*(u32 *)to = size;
	return 0;
}

/* Copies out the part of the struct that the caller knows. */
int pg_copy_out(void __user *to, const void *from, size_t known)
{
	size_t size = min_t(size_t, known, *(const u32 *)from);

	return copy_to_user(to, from, size) ? -EFAULT : 0;
}
