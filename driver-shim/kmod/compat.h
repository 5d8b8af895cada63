/* SPDX-License-Identifier: GPL-2.0 */
/* Differences between kernel versions from 6.1 on, in one place. */
#ifndef PUSHGATE_COMPAT_H
#define PUSHGATE_COMPAT_H

#include <linux/device/class.h>
#include <linux/eventfd.h>
#include <linux/hrtimer.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
static inline void vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}

static inline void vm_flags_clear(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags &= ~flags;
}
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
#define pg_class_create(name) class_create(THIS_MODULE, name)
#else
#define pg_class_create(name) class_create(name)
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 8, 0)
#define pg_eventfd_signal(ctx) ((void)eventfd_signal(ctx, 1))
#else
#define pg_eventfd_signal(ctx) eventfd_signal(ctx)
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 15, 0)
static inline void pg_hrtimer_setup(struct hrtimer *timer,
				    enum hrtimer_restart (*function)(struct hrtimer *))
{
	hrtimer_init(timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL);
	timer->function = function;
}
#else
static inline void pg_hrtimer_setup(struct hrtimer *timer,
				    enum hrtimer_restart (*function)(struct hrtimer *))
{
	hrtimer_setup(timer, function, CLOCK_MONOTONIC, HRTIMER_MODE_REL);
}
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0)
#define PG_IMPORT_DMA_BUF MODULE_IMPORT_NS(DMA_BUF)
#else
#define PG_IMPORT_DMA_BUF MODULE_IMPORT_NS("DMA_BUF")
#endif

#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 1, 0)
#define dma_buf_move_notify dma_buf_invalidate_mappings
#define move_notify invalidate_mappings
#endif

#endif /* PUSHGATE_COMPAT_H */
