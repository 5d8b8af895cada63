// SPDX-License-Identifier: GPL-2.0
/*
 * Doorbells: a function's interrupt vectors on one side, eventfds on the other, and the device's
 * own doorbell register.
 *
 * A ring is always counted. It wakes only a file that has armed itself, and not more often than
 * that file's interval allows. A ring that comes too early wakes the file when the interval is
 * over, so no ring is lost.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/eventfd.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "internal.h"

#define PG_MAX_VECTORS 32
/* The interrupt handler walks all bells of a vector. */
#define PG_MAX_BELLS 64
#define PG_MAX_INTERVAL_US 1000000

/* Wakes the file. Called with bell->lock held. */
static void pg_wake(struct pg_bell *bell, ktime_t now)
{
	bell->last = now;
	bell->wakes++;
	pg_eventfd_signal(bell->eventfd);
}

/* Wakes the file now, or when its interval is over. Called with bell->lock held. */
static void pg_wake_or_defer(struct pg_bell *bell)
{
	ktime_t now, since;

	if (!bell->armed || bell->pending || !bell->eventfd)
		return;
	now = ktime_get();
	since = ktime_sub(now, bell->last);
	if (since >= bell->interval) {
		pg_wake(bell, now);
	} else {
		bell->pending = true;
		hrtimer_start(&bell->timer, ktime_sub(bell->interval, since), HRTIMER_MODE_REL);
	}
}

static enum hrtimer_restart pg_deferred(struct hrtimer *timer)
{
	struct pg_bell *bell = container_of(timer, struct pg_bell, timer);
	unsigned long flags;

	spin_lock_irqsave(&bell->lock, flags);
	if (bell->pending) {
		bell->pending = false;
		if (bell->armed && bell->eventfd)
			pg_wake(bell, ktime_get());
	}
	spin_unlock_irqrestore(&bell->lock, flags);
	return HRTIMER_NORESTART;
}

static irqreturn_t pg_interrupt(int irq, void *data)
{
	struct pg_vector *vector = data;
	struct pg_bell *bell;
	unsigned long flags;

	spin_lock_irqsave(&vector->lock, flags);
	list_for_each_entry(bell, &vector->bells, node) {
		spin_lock(&bell->lock);
		bell->rings++;
		/*
		 * Ordered after all that the device wrote before, because an interrupt is a write
		 * too.
		 */
		smp_store_release(&bell->status->rings, bell->rings);
		pg_wake_or_defer(bell);
		spin_unlock(&bell->lock);
	}
	spin_unlock_irqrestore(&vector->lock, flags);
	return IRQ_HANDLED;
}

int pg_vectors_init(struct pg_function *fn)
{
	struct pci_dev *pdev = fn->pdev;
	int count, i, err;

	/*
	 * Message interrupts only: a line interrupt may be shared, and nothing here can tell which
	 * device raised it.
	 */
	count = pci_alloc_irq_vectors(pdev, 1, PG_MAX_VECTORS, PCI_IRQ_MSIX | PCI_IRQ_MSI);
	if (count < 0)
		return 0;
	/* An interrupt is a write of the device's. Without one, the device need write nothing. */
	pci_set_master(pdev);
	fn->vectors = kcalloc(count, sizeof(*fn->vectors), GFP_KERNEL);
	if (!fn->vectors) {
		pci_free_irq_vectors(pdev);
		return -ENOMEM;
	}
	for (i = 0; i < count; i++) {
		struct pg_vector *vector = &fn->vectors[i];

		spin_lock_init(&vector->lock);
		INIT_LIST_HEAD(&vector->bells);
		vector->irq = pci_irq_vector(pdev, i);
		err = request_irq(vector->irq, pg_interrupt, 0, "pushgate", vector);
		if (err)
			goto undo;
		fn->nvectors = i + 1;
	}
	return 0;

undo:
	pg_vectors_exit(fn);
	return err;
}

/*
 * Frees the interrupts. The vectors stay as long as the function, because bells are on their lists.
 */
void pg_vectors_exit(struct pg_function *fn)
{
	unsigned int i;

	for (i = 0; i < fn->nvectors; i++)
		free_irq(fn->vectors[i].irq, &fn->vectors[i]);
	if (fn->vectors)
		pci_free_irq_vectors(fn->pdev);
}

void pg_bell_init(struct pg_file *file)
{
	struct pg_bell *bell = &file->bell;

	spin_lock_init(&bell->lock);
	INIT_LIST_HEAD(&bell->node);
	pg_hrtimer_setup(&bell->timer, pg_deferred);
	bell->status = file->status;
}

/* Takes the bell off its vector. Called with file->lock held, or when the file is closed. */
static void pg_bell_detach(struct pg_bell *bell)
{
	struct eventfd_ctx *old;
	unsigned long flags;

	if (bell->vector) {
		spin_lock_irqsave(&bell->vector->lock, flags);
		list_del_init(&bell->node);
		bell->vector->listeners--;
		spin_unlock_irqrestore(&bell->vector->lock, flags);
		bell->vector = NULL;
	}
	spin_lock_irqsave(&bell->lock, flags);
	old = bell->eventfd;
	bell->eventfd = NULL;
	bell->armed = false;
	bell->pending = false;
	spin_unlock_irqrestore(&bell->lock, flags);
	hrtimer_cancel(&bell->timer);
	if (old)
		eventfd_ctx_put(old);
}

void pg_bell_exit(struct pg_file *file)
{
	pg_bell_detach(&file->bell);
}

/* The function goes: wakes a sleeper, whether armed or not, so that it looks. */
void pg_bell_gone(struct pg_bell *bell)
{
	unsigned long flags;

	spin_lock_irqsave(&bell->lock, flags);
	if (bell->eventfd)
		pg_wake(bell, ktime_get());
	spin_unlock_irqrestore(&bell->lock, flags);
}

/* Takes a place for the bell on a vector, where it may have one already. */
static int pg_vector_reserve(struct pg_vector *vector, struct pg_bell *bell)
{
	unsigned long flags;
	int err = 0;

	spin_lock_irqsave(&vector->lock, flags);
	if (vector->listeners - (bell->vector == vector) < PG_MAX_BELLS)
		vector->listeners++;
	else
		err = -EUSERS;
	spin_unlock_irqrestore(&vector->lock, flags);
	return err;
}

long pg_doorbell_set(struct pg_file *file, void __user *argument)
{
	struct pg_function *fn = file->function;
	struct pg_bell *bell = &file->bell;
	struct pushgate_doorbell_set set;
	struct eventfd_ctx *eventfd;
	struct pg_vector *vector;
	unsigned long flags;
	int err;

	err = pg_copy_in(&set, sizeof(set), sizeof(set), argument);
	if (err)
		return err;
	if (set.flags || set.reserved || set.eventfd < -1)
		return -EINVAL;
	if (set.interval_us > PG_MAX_INTERVAL_US)
		return -ERANGE;
	if (set.eventfd == -1) {
		pg_bell_detach(bell);
		return 0;
	}
	if (READ_ONCE(fn->gone))
		return -ENODEV;
	if (set.vector >= fn->nvectors)
		return -ECHRNG;
	/* EBADF, or EINVAL for a descriptor of another type. */
	eventfd = eventfd_ctx_fdget(set.eventfd);
	if (IS_ERR(eventfd))
		return PTR_ERR(eventfd) == -EINVAL ? -EBADFD : PTR_ERR(eventfd);

	vector = &fn->vectors[array_index_nospec(set.vector, fn->nvectors)];
	/* A call that is refused leaves the eventfd that was set before. */
	err = pg_vector_reserve(vector, bell);
	if (err) {
		eventfd_ctx_put(eventfd);
		return err;
	}
	pg_bell_detach(bell);
	spin_lock_irqsave(&vector->lock, flags);
	bell->eventfd = eventfd;
	bell->interval = ns_to_ktime((u64)set.interval_us * NSEC_PER_USEC);
	bell->last = ktime_sub(ktime_get(), bell->interval);
	bell->vector = vector;
	list_add(&bell->node, &vector->bells);
	spin_unlock_irqrestore(&vector->lock, flags);
	/* The function may have gone just before this bell was on the list. */
	if (READ_ONCE(fn->gone))
		pg_bell_gone(bell);
	return 0;
}

long pg_doorbell_arm(struct pg_file *file, void __user *argument)
{
	struct pg_bell *bell = &file->bell;
	struct pushgate_doorbell_arm arm;
	unsigned long flags;
	int err;

	err = pg_copy_in(&arm, sizeof(arm), sizeof(arm), argument);
	if (err)
		return err;
	if ((arm.flags != PUSHGATE_ARM && arm.flags != PUSHGATE_DISARM) || arm.reserved)
		return -EINVAL;
	if (READ_ONCE(file->function->gone))
		return -ENODEV;
	if (!bell->vector)
		return -ENODATA;
	spin_lock_irqsave(&bell->lock, flags);
	bell->armed = arm.flags == PUSHGATE_ARM && bell->rings == arm.seen;
	if (!bell->armed)
		bell->pending = false;
	arm.rings = bell->rings;
	arm.armed = bell->armed;
	spin_unlock_irqrestore(&bell->lock, flags);
	/* A timer that already runs will find nothing pending. */
	return pg_copy_out(argument, &arm, sizeof(arm));
}

long pg_doorbell_ring(struct pg_file *file, void __user *argument)
{
	struct pg_function *fn = file->function;
	struct pushgate_doorbell_ring ring;
	int err;

	err = pg_copy_in(&ring, sizeof(ring), sizeof(ring), argument);
	if (err)
		return err;
	if (ring.flags || ring.reserved)
		return -EINVAL;
	mutex_lock(&fn->lock);
	if (fn->gone)
		err = -ENODEV;
	else if (!fn->doorbell)
		err = -EOPNOTSUPP;
	else
		/* writel orders this write after earlier stores of this CPU, write-combined or not. */
		writel(ring.value, fn->doorbell);
	mutex_unlock(&fn->lock);
	return err;
}
