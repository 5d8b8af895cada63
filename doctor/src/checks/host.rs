//! The kernel, this process and its limits.

use super::{bytes, rdma};
use crate::finding::Finding;
use crate::readings::{HugePages, Limit, Read, Readings};

/// capability(7).
const CAP_IPC_LOCK: u32 = 14;
/// capability(7).
const CAP_SYS_PTRACE: u32 = 19;
/// capability(7).
pub(super) const CAP_SYS_ADMIN: u32 = 21;

/// Towards the whole host, as the kernel asks of who would not be held to a limit (`capable`): those of
/// a user namespace do not count.
pub(super) fn capable(r: &Readings, bit: u32) -> bool {
    !r.host.user_namespace && capable_in_namespace(r, bit)
}

/// Towards processes of the same user namespace (`ns_capable`).
fn capable_in_namespace(r: &Readings, bit: u32) -> bool {
    r.host.capabilities.is().is_some_and(|set| set >> bit & 1 != 0)
}

/// Whether the settings are allowed, read as `pushgate config` reads them.
pub fn settings(r: &Readings) -> Vec<Finding> {
    vec![match &r.wants.settings {
        Ok(from) => Finding::passed("", from),
        Err(why) => Finding::failed(
            "",
            why,
            "`pushgate config` lists what each setting allows; the other checks used the valid settings",
        ),
    }]
}

/// RDMA registrations count as locked memory (`ib_umem_get`), except with CAP_IPC_LOCK. One queue
/// pair must fit; as many should as are asked for.
pub fn memlock(r: &Readings) -> Vec<Finding> {
    let one = r.wants.queue_pair_bytes();
    let raise = "ulimit -l unlimited; for good: `* - memlock unlimited` in /etc/security/limits.d/pushgate.conf, \
                 LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 for a container";
    let systemd =
        r.host.systemd_memlock.as_ref().map_or(String::new(), |v| format!("; systemd gives services {v}"));
    let (soft, hard) = match &r.host.memlock {
        Read::Is(limits) => *limits,
        Read::Absent => return vec![Finding::not_applicable("", "the limit was not read")],
        Read::Unreadable(why) => return vec![Finding::warned("", why, "look with ulimit -l")],
    };
    let limit = match soft {
        u64::MAX => "no limit".to_string(),
        _ if soft == hard => format!("limit {}", bytes(soft)),
        _ => format!("limit {} (hard: {})", bytes(soft), bytes(hard)),
    };
    let reading = format!("{limit}{systemd}; a queue pair registers about {}", bytes(one));
    vec![if soft == u64::MAX {
        Finding::passed("", reading)
    } else if capable(r, CAP_IPC_LOCK) {
        Finding::passed("", format!("{reading}; this process has CAP_IPC_LOCK and is not held to it"))
    } else if rdma::none(r).is_some() && !r.wants.verbs {
        Finding::not_applicable("", format!("{reading}; without RDMA no memory is registered"))
    } else if soft < one {
        rdma::wrong(r, "", format!("{reading}: not one fits"), raise)
    } else if soft < one.saturating_mul(r.wants.queue_pairs) {
        Finding::warned("", format!("{reading}: {} fit", soft / one), raise)
    } else {
        Finding::passed("", reading)
    }]
}

fn left(limit: Limit) -> Option<u64> {
    limit.map(|(max, used)| max.saturating_sub(used))
}

/// Objects of a queue pair: PD, completion channel, CQ, QP, and memory regions for window, mirror,
/// inbox and outbox, with room for two of a program's own.
const RDMA_OBJECTS: u64 = 10;
/// Threads of a program beside those that it starts itself: engines, helpers, CUDA's.
const THREADS: u64 = 64;

/// Memory, 2 MiB pages, threads and RDMA objects that the tightest group leaves: less than one queue
/// pair's is a failure, less than those of all that are asked for (of threads: than 64) a warning.
pub fn cgroup(r: &Readings) -> Vec<Finding> {
    let c = &r.host.cgroup;
    let one = r.wants.queue_pair_bytes();
    let mut findings = Vec::new();
    let queue_pairs = r.wants.queue_pairs;
    let pairs = format!("for {queue_pairs} queue pairs");
    let mut hold = |what: &str, limit: Limit, one: u64, (enough, to): (u64, &str), in_bytes, remedy: &str| {
        let (Some((max, used)), Some(left)) = (limit, left(limit)) else { return };
        let say = |n| if in_bytes { bytes(n) } else { n.to_string() };
        let reading = format!("{} of {} used, {} left", say(used), say(max), say(left));
        findings.push(if left < one {
            Finding::failed(what, format!("{reading}; {} are needed at the least", say(one)), remedy)
        } else if left < enough {
            Finding::warned(what, format!("{reading}; {} would be enough {to}", say(enough)), remedy)
        } else {
            Finding::passed(what, reading)
        });
    };
    hold(
        "memory",
        c.memory,
        one,
        (one.saturating_mul(queue_pairs), &pairs),
        true,
        "raise memory.max (MemoryMax=, --memory)",
    );
    hold("pids", c.pids, 8, (THREADS, "for a program"), false, "raise pids.max (TasksMax=, --pids-limit)");
    if r.wants.huge_pages != HugePages::Never {
        let window = r.wants.window_size.max(2 << 20);
        let least = if r.wants.huge_pages == HugePages::Require { window } else { 0 };
        hold(
            "hugetlb",
            c.huge,
            least,
            (window, "for a window"),
            true,
            "raise hugetlb.2MB.max, or set huge-pages to never",
        );
    }
    for (device, limit) in &c.rdma_objects {
        if rdma::chosen(r).any(|d| d.name == *device) {
            hold(
                device,
                Some(*limit),
                RDMA_OBJECTS,
                (RDMA_OBJECTS * queue_pairs, &pairs),
                false,
                "raise hca_object in rdma.max",
            );
        }
    }
    findings.extend(c.unreadable.iter().map(|why| Finding::warned("", why, "look below /sys/fs/cgroup")));
    if findings.is_empty() {
        findings.push(match c.found {
            true => Finding::passed("", "no limit of memory, threads or RDMA objects is set"),
            false => Finding::not_applicable("", "no control group is seen"),
        });
    }
    findings
}

/// A window is asked for in 2 MiB pages if its size is a multiple (docs/operations.md).
pub fn huge_pages(r: &Readings) -> Vec<Finding> {
    const PAGE: u64 = 2 << 20;
    let windows = [("window-size", r.wants.window_size), ("net-window-size", r.wants.net_window_size)];
    let largest = windows.iter().filter(|(_, size)| size % PAGE == 0).max_by_key(|(_, size)| *size);
    let raise = |pages: u64| {
        format!(
            "sysctl -w vm.nr_hugepages={pages} (early after boot, or hugepages={pages} on the kernel's command line)"
        )
    };
    let required = r.wants.huge_pages == HugePages::Require;
    if r.wants.huge_pages == HugePages::Never {
        return vec![Finding::not_applicable("", "huge-pages is never")];
    }
    let Some((name, size)) = largest else {
        return vec![Finding::not_applicable("", "no window is a multiple of 2 MiB")];
    };
    let pages = size / PAGE;
    vec![match &r.host.huge_pages {
        Read::Is((all, free)) => {
            let reading =
                format!("{free} of {all} pages of 2 MiB are free; a window of {name} takes {pages}");
            match (*free >= pages, required) {
                (true, _) => Finding::passed("", reading),
                // Nobody reserved any, and nobody asked for them.
                (false, false) if *all == 0 && !r.wants.verbs => {
                    Finding::not_applicable("", reading + "; normal pages serve")
                }
                (false, true) => Finding::failed("", reading, raise(all + pages * r.wants.queue_pairs)),
                (false, false) => Finding::warned(
                    "",
                    format!("{reading}; normal pages work too, with more TLB misses in CPU and NIC"),
                    raise(all + pages * r.wants.queue_pairs) + ", or huge-pages = never",
                ),
            }
        }
        Read::Absent if required => {
            Finding::failed("", "the kernel has no pages of 2 MiB", "set huge-pages to try")
        }
        Read::Absent => {
            Finding::not_applicable("", "the kernel has no pages of 2 MiB; normal pages work too")
        }
        Read::Unreadable(why) => Finding::warned("", why, "look at /sys/kernel/mm/hugepages"),
    }]
}

/// Windows are sealed memfds (docs/driver.md): one of a window's size is made and filled.
pub fn memfd(r: &Readings) -> Vec<Finding> {
    vec![match &r.host.memfd {
        Read::Is(()) => {
            Finding::passed("", format!("a sealed memfd of {} was made", bytes(r.wants.window_size)))
        }
        Read::Absent => Finding::not_applicable("", "not tried"),
        Read::Unreadable(why) => Finding::failed(
            "",
            why,
            "raise the limit that this names, or let the sandbox allow memfd_create with sealing",
        ),
    }]
}

/// NCCL keeps its own segments there; its guide asks for 1 GiB in containers, whose default is 64 MiB
/// (NCCL user guide, "Troubleshooting", shared memory). pushgate itself needs none of it.
pub fn shm(r: &Readings) -> Vec<Finding> {
    const ENOUGH: u64 = 1 << 30;
    let no_gpu = r.gpu.count == 0;
    let unasked = "; NCCL alone needs it, and there is no NVIDIA GPU";
    let remedy = "mount -o remount,size=1g /dev/shm, or --shm-size=1g for a container; NCCL alone needs it";
    vec![match &r.host.shm {
        Read::Is((all, free)) => {
            let reading = format!("/dev/shm: {} of {} free", bytes(*free), bytes(*all));
            match (*free >= ENOUGH, no_gpu) {
                (true, _) => Finding::passed("", reading),
                (false, false) => Finding::warned("", reading, remedy),
                (false, true) => Finding::not_applicable("", reading + unasked),
            }
        }
        Read::Absent if no_gpu => Finding::not_applicable("", format!("/dev/shm was not seen{unasked}")),
        Read::Absent => {
            Finding::warned("", "there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm; NCCL alone needs it")
        }
        Read::Unreadable(why) => Finding::warned("", why, remedy),
    }]
}

/// `process_vm_readv` asks for what tracing does (ptrace(2)): Yama's scope 0 and 1 will do, for both
/// ends name each other by PR_SET_PTRACER; 2 wants CAP_SYS_PTRACE, 3 refuses all.
pub fn readv(r: &Readings) -> Vec<Finding> {
    let allow =
        "sysctl -w kernel.yama.ptrace_scope=1; until then `local` copies through the window, once more";
    if let Read::Unreadable(why) = &r.host.readv {
        return vec![Finding::warned(
            "",
            why,
            "let the sandbox (seccomp) allow process_vm_readv; until then `local` copies through the window, once more",
        )];
    }
    let called = if r.host.readv == Read::Absent { "the call was not tried" } else { "the call is allowed" };
    vec![match &r.host.ptrace_scope {
        Read::Absent => Finding::passed("", format!("{called}; no Yama")),
        Read::Is(scope @ 0..=1) => {
            Finding::passed("", format!("{called}; kernel.yama.ptrace_scope is {scope}"))
        }
        Read::Is(2) if capable_in_namespace(r, CAP_SYS_PTRACE) => Finding::passed(
            "",
            format!("{called}; kernel.yama.ptrace_scope is 2, and this process has CAP_SYS_PTRACE"),
        ),
        Read::Is(scope) => Finding::warned(
            "",
            format!("kernel.yama.ptrace_scope is {scope}: processes may not read each other"),
            allow,
        ),
        Read::Unreadable(why) => Finding::warned("", why, "look with sysctl kernel.yama.ptrace_scope"),
    }]
}
