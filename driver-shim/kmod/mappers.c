// SPDX-License-Identifier: GPL-2.0
/*
 * Which processes have mapped a slice, and whether they live.
 *
 * A GPU's mapping of a slice cannot be revoked. It ends with the process that made it, because the
 * GPU's driver tears it down as the process's files close. So a slice that was mapped is retired,
 * not free, until each process that mapped it has exited: the process's address space has no user
 * left, and every one of its threads has passed the point in exit() after which its files are
 * closed (exit_state is set after exit_files and the deferred puts). The address space alone would
 * not do, because it goes before the files. This check cannot see a GPU file that the process
 * handed to another process that lives on, nor a process that shared the address space without
 * being a thread (vfork) after it has left that address space.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/pid.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "internal.h"

/* A process that mapped a slice. */
struct pg_mapper {
	struct list_head node;
	struct mm_struct *mm;	/* held by mmgrab: the struct stays, the memory may go */
	struct pid *process;
	bool waited;		/* pg_next_mm has returned it */
};

static bool pg_mapper_lives(const struct pg_mapper *mapper)
{
	struct task_struct *leader, *thread;
	bool lives = false;

	if (atomic_read(&mapper->mm->mm_users))
		return true;
	rcu_read_lock();
	leader = pid_task(mapper->process, PIDTYPE_TGID);
	if (leader) {
		for_each_thread(leader, thread) {
			if (!READ_ONCE(thread->exit_state)) {
				lives = true;
				break;
			}
		}
	}
	rcu_read_unlock();
	return lives;
}

static struct pg_mapper *pg_mapper_find(struct pg_slice *slice, struct mm_struct *mm,
					struct pid *process)
{
	struct pg_mapper *mapper;

	list_for_each_entry(mapper, &slice->mappers, node) {
		if (mapper->mm == mm && mapper->process == process)
			return mapper;
	}
	return NULL;
}

/* Whether a process other than the caller may still reach the slice. */
bool pg_mapped_by_others(struct pg_slice *slice)
{
	struct pg_mapper *mapper;

	list_for_each_entry(mapper, &slice->mappers, node) {
		if (mapper->mm == current->mm && mapper->process == task_tgid(current))
			continue;
		if (pg_mapper_lives(mapper))
			return true;
	}
	return false;
}

/* Whether some process, the caller included, may still reach the slice. */
bool pg_mapped_by_any(struct pg_slice *slice)
{
	struct pg_mapper *mapper;

	list_for_each_entry(mapper, &slice->mappers, node) {
		if (pg_mapper_lives(mapper))
			return true;
	}
	return false;
}

static bool pg_mapped_by_all_of(struct pg_slice *slice, struct pg_slice *other)
{
	struct pg_mapper *mapper;

	list_for_each_entry(mapper, &other->mappers, node) {
		if (!pg_mapper_find(slice, mapper->mm, mapper->process))
			return false;
	}
	return true;
}

/* Whether two slices were mapped by the same processes. */
bool pg_mapped_alike(struct pg_slice *one, struct pg_slice *other)
{
	return pg_mapped_by_all_of(one, other) && pg_mapped_by_all_of(other, one);
}

/* Records that the caller may have the slice mapped from now on. */
int pg_slice_track(struct pg_slice *slice)
{
	struct pg_mapper *mapper;
	int err = 0;

	mutex_lock(&slice->lock);
	mapper = pg_mapper_find(slice, current->mm, task_tgid(current));
	if (mapper)
		goto unlock;
	mapper = kzalloc(sizeof(*mapper), GFP_KERNEL_ACCOUNT);
	if (!mapper) {
		err = -ENOMEM;
		goto unlock;
	}
	mmgrab(current->mm);
	mapper->mm = current->mm;
	mapper->process = get_task_pid(current, PIDTYPE_TGID);
	list_add(&mapper->node, &slice->mappers);
unlock:
	mutex_unlock(&slice->lock);
	return err;
}

void pg_mappers_free(struct pg_slice *slice)
{
	struct pg_mapper *mapper, *next;

	list_for_each_entry_safe(mapper, next, &slice->mappers, node) {
		mmdrop(mapper->mm);
		put_pid(mapper->process);
		kfree(mapper);
	}
}

/* Returns, with mmget, an address space of the slice's mappers that was not returned before. */
struct mm_struct *pg_next_mm(struct pg_slice *slice)
{
	struct mm_struct *mm = NULL;
	struct pg_mapper *mapper;

	mutex_lock(&slice->lock);
	list_for_each_entry(mapper, &slice->mappers, node) {
		if (mapper->waited)
			continue;
		mapper->waited = true;
		if (mmget_not_zero(mapper->mm)) {
			mm = mapper->mm;
			break;
		}
	}
	mutex_unlock(&slice->lock);
	return mm;
}
