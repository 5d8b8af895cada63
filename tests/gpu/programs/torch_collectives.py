"""Collectives of PyTorch in the ways that programs use them. Numbers are whole, so that every sum is exact."""

import os
import time

import torch
import torch.distributed as dist

from ranks import RANK, WORLD, begin, finish, main, on_gpu, program, settle, timed

ALL = WORLD * (WORLD + 1) // 2


def check(what, tensor, value):
    if not bool((tensor == value).all()):
        raise AssertionError(f"rank {RANK}: {what}: {tensor.flatten()[:4].tolist()}, expected {value}")


def summed(what, count, device, group=None):
    """An allreduce of `count` numbers over all ranks, checked."""
    t = torch.full((count,), float(RANK + 1), device=device)
    dist.all_reduce(t, group=group)
    check(what, t, ALL)


@program
def groups():
    """All ranks, pairs and single ranks as groups of their own, whose collectives are under way at once."""
    device = begin()
    whole = [dist.new_group() for _ in range(4)]
    pairs = [dist.new_group([a, a + 1]) for a in range(0, WORLD - 1, 2)]
    mine = pairs[RANK // 2] if RANK // 2 < len(pairs) else None
    streams = [torch.cuda.Stream() for _ in range(5)] if on_gpu() else [None] * 5

    def step():
        works = []
        for n, group in enumerate([*whole, mine]):
            if group is None:
                continue
            with torch.cuda.stream(streams[n]):
                t = torch.full((1 << 18,), float(RANK + 1), device=device)
                works.append((n, t, group, dist.all_reduce(t, group=group, async_op=True)))
        for n, t, group, work in works:
            with torch.cuda.stream(streams[n]):
                work.wait()
                check(f"group {n}", t, ALL if n < 4 else sum(r + 1 for r in dist.get_process_group_ranks(group)))

    ms = timed(step, 30)
    finish()
    return {"ms": ms}


@program
def churn():
    """A group is made, used and destroyed, a hundred times."""
    device = begin()

    def step():
        group = dist.new_group()
        summed("a new group", 4096, device, group)
        dist.destroy_process_group(group)

    ms = timed(step, 100, 1)
    with open("/proc/self/status") as file:
        threads = next(int(line.split()[1]) for line in file if line.startswith("Threads"))
    if threads > 400 or len(os.listdir("/proc/self/fd")) > 1000:
        raise AssertionError(f"{threads} threads, {len(os.listdir('/proc/self/fd'))} descriptors after a hundred groups")
    finish()
    return {"ms": ms}


@program
def send_receive():
    """batch_isend_irecv around a ring and with all others, 4 bytes to 16 MiB."""
    device, ms = begin(), None
    for count in (1, 1000, 1 << 18, 4 << 20):
        out = torch.full((count,), float(RANK), device=device)
        come = {r: torch.empty_like(out) for r in range(WORLD) if r != RANK}
        edge = torch.empty_like(out)

        def step():
            ring = [dist.P2POp(dist.isend, out, (RANK + 1) % WORLD), dist.P2POp(dist.irecv, edge, (RANK - 1) % WORLD)]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
            every = [op for r, t in come.items() for op in (dist.P2POp(dist.isend, out, r), dist.P2POp(dist.irecv, t, r))]
            for work in dist.batch_isend_irecv(every):
                work.wait()

        ms = timed(step)
        check("ring", edge, (RANK - 1) % WORLD)
        for r, t in come.items():
            check(f"from {r}", t, r)
    finish()
    return {"ms": ms}


@program
def coalesced():
    """Many collectives that PyTorch gives to NCCL as one group."""
    device = begin()
    many = [torch.full((1000 * (n + 1),), float(RANK + 1), device=device) for n in range(20)]

    def step():
        parts = [torch.empty(WORLD * len(t), device=device) for t in many]
        cut = [torch.empty(len(t), device=device) for t in many]
        with dist._coalescing_manager(device=device, async_ops=True) as work:
            for t, out in zip(many, parts):
                dist.all_gather_into_tensor(out, t)
        work.wait()
        with dist._coalescing_manager(device=device, async_ops=True) as work:
            for whole, out in zip(parts, cut):
                dist.reduce_scatter_tensor(out, whole)
        work.wait()
        for t in cut:
            check("gathered, then reduced and scattered", t, WORLD * (RANK + 1))

    ms = timed(step)
    finish()
    return {"ms": ms}


@program
def barriers():
    """A thousand barriers, then allreduces of one number."""
    device = begin()
    one = torch.ones(1, device=device)

    def step():
        dist.barrier()
        dist.all_reduce(one)
        one.fill_(1)

    ms = timed(step, 1000)
    finish()
    return {"ms": ms}


@program
def objects():
    """Python objects of unequal size: gathered, broadcast, scattered."""
    begin()
    mine = {"rank": RANK, "text": "x" * (1000 * RANK + 7), "list": list(range(RANK))}
    seen = []
    for _ in range(20):
        every = [None] * WORLD
        dist.all_gather_object(every, mine)
        told = [mine if RANK == WORLD - 1 else None]
        dist.broadcast_object_list(told, src=WORLD - 1)
        got = [None]
        dist.scatter_object_list(got, every if RANK == 0 else None, src=0)
        seen.append([[x["rank"] for x in every], told[0]["rank"], len(got[0]["text"])])
    finish()
    return {"exact": {"seen": seen}}


def side_streams(count):
    device = begin()
    streams = [torch.cuda.Stream() for _ in range(count)]
    tensors = [torch.ones(1 << 20, device=device) for _ in range(count)]
    a = torch.randn(2048, 2048, device=device)

    def step():
        for stream, t in zip(streams, tensors):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work = dist.all_reduce(t, async_op=True)
                a @ a
                work.wait()
                t.mul_(1 / WORLD)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    ms = timed(step, 60)
    for t in tensors:
        check("a stream", t, 1)
    finish()
    return {"ms": ms}


@program
def streams_8():
    """Each of eight streams waits for an allreduce while a matrix product runs."""
    return side_streams(8)


@program
def streams_24():
    """As streams-8, with 24 streams."""
    return side_streams(24)


@program
def streams_64():
    """As streams-8, with 64 streams."""
    return side_streams(64)


@program
def nonblocking():
    """Communicators that NCCL makes without blocking (TORCH_NCCL_USE_COMM_NONBLOCKING), for all ranks and for new groups."""
    device = begin(device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    summed("all", 1 << 16, device)
    for _ in range(5):
        summed("a new group", 1 << 16, device, dist.new_group())
    finish()
    return {}


@program
def pools():
    """Memory that NCCL allocated and registered (torch.cuda.MemPool)."""
    device = begin(device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    backend = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((n,), float(RANK + 1), device=device) for n in (1 << 10, 1 << 18, 4 << 20)]
    backend.register_mem_pool(pool)

    def step():
        for t in tensors:
            t.fill_(RANK + 1)
            dist.all_reduce(t)
            check("registered", t, ALL)

    ms = timed(step, 20)
    out = torch.empty(WORLD * (1 << 18), device=device)
    dist.all_gather_into_tensor(out, torch.full((1 << 18,), float(RANK), device=device))
    settle()
    backend.deregister_mem_pool(pool)
    del tensors
    finish()
    return {"ms": ms}


@program
def segments():
    """Segments of the allocator that grow (expandable_segments), and whose memory goes and comes between collectives."""
    device = begin()

    def step():
        for megabytes in (1, 8, 64):
            summed(f"{megabytes} MiB", megabytes << 18, device)
        torch.cuda.empty_cache()

    ms = timed(step, 20)
    finish()
    return {"ms": ms}


@program
def aborted():
    """The last rank ends in the middle, without a word: the others hear of it, in bounded time."""
    device = begin()
    t = torch.ones(1 << 20, device=device)
    for _ in range(20):
        dist.all_reduce(t)
    settle()
    if RANK == WORLD - 1:
        os._exit(9)
    began, said = time.time(), "no error"
    try:
        work = dist.all_reduce(t, async_op=True)
        while not work.is_completed():
            if time.time() - began > 60:
                raise AssertionError("after 60 s the ranks that live have heard of nothing")
            time.sleep(0.01)
        work.wait()
        settle()
    except (RuntimeError, dist.DistBackendError) as e:
        said = type(e).__name__
    heard = time.time() - began
    dist.distributed_c10d._abort_process_group()
    if said == "no error":
        raise AssertionError("an allreduce with a rank that is gone was right")
    return {"ms": heard * 1e3}


@program
def elastic():
    """torchrun starts the ranks anew when one has failed (--max-restarts)."""
    device = begin()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(50):
        summed(f"step {step}", 1 << 20, device)
        if attempt < 2 and RANK == attempt % WORLD and step == 10 + attempt:
            os._exit(1)
    finish()
    return {"exact": {"attempts": attempt}}


if __name__ == "__main__":
    main()
