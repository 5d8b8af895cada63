#!/usr/bin/env python3
"""The NCCL net plugin under an unchanged PyTorch, beside NCCL's own transports.

  nccl.py [--plugin FILE] [--gpus N] [--ranks N] [--only NAME,...] [--out DIR]

Needs PyTorch with NCCL, one GPU or more. Every rank is a process. Each scenario prints its lines; the
exit status is 0 if all that ran passed. Ranks that share a GPU, as two do where there is only one, have an NCCL_HOSTID
each, so that NCCL takes them for hosts; that is slow and shows function only.
"""

import argparse
import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

SIZES = [0, 1, 3, 1023, 4096, 65537, 1 << 20, (1 << 20) + 7, 16 << 20]
LARGE = [64 << 20, 256 << 20]
BENCH = [8, 4096, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
SMALL = ["issue", "row", "behind", "direct", "lone"]
LIMIT = 240


# ------------------------------------------------------------------------------------------ ranks
def rank_main():
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    scenario, gpus = os.environ["SCENARIO"], torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    if scenario not in ("again", "one_process"):
        dist.init_process_group("nccl", device_id=device if scenario not in ("killed", "faulty") else None)
    result = globals()["rank_" + scenario](torch, dist, rank, world, device, options)
    with open(os.environ["RESULT"], "w") as file:
        json.dump(result, file)
    if dist.is_initialized():
        dist.destroy_process_group()


def digest(tensor):
    import torch

    return hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def rank_functional(torch, dist, rank, world, device, options):
    """Digests of every result, and how far sums are from those in double precision."""
    seen, worst = {}, 0.0
    for name in options["dtypes"]:
        dtype = getattr(torch, name)
        eps = torch.finfo(dtype).eps
        for size in options["sizes"]:
            count = size // dtype.itemsize
            def make(of, n=count):
                g = torch.Generator(device="cpu").manual_seed(1000 * of + n % 997)
                base = torch.randn(min(n, 1 << 16), generator=g).to(device)
                return base.repeat(n // (1 << 16) + 1)[:n].to(dtype)
            mine = make(rank)
            exact = sum(make(r).double() for r in range(world))
            bound = 2 * world * eps * sum(make(r).double().abs() for r in range(world))
            def near(what, got, want, allowed):
                nonlocal worst
                if got.numel():
                    off = ((got.double() - want).abs() / (allowed + 1e-30)).max().item()
                    worst = max(worst, off)
                    assert off <= 1, f"{what} {name} {size}: {off} of what rounding allows"
            def same(what, got, want):
                assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8)), f"{what} {name} {size}"
            key = f"{name} {size}"
            t = mine.clone()
            dist.all_reduce(t)
            near("allreduce", t, exact, bound)
            seen["allreduce " + key] = digest(t)
            outs = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(outs, mine)
            for r, out in enumerate(outs):
                same("allgather", out, make(r))
            part = count // world
            whole = mine[: part * world].clone()
            out = torch.empty(part, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(out, whole)
            cut = slice(part * rank, part * (rank + 1))
            near("reduce-scatter", out, exact[cut], bound[cut])
            seen["reduce-scatter " + key] = digest(out)
            back = torch.empty_like(whole)
            dist.all_to_all_single(back, whole)
            want = torch.cat([make(r)[: part * world][cut] for r in range(world)]) if part else make(0)[:0]
            same("alltoall", back, want)
            t = mine.clone()
            dist.broadcast(t, src=world - 1)
            same("broadcast", t, make(world - 1))
            t = torch.empty_like(mine)
            right, left = (rank + 1) % world, (rank - 1) % world
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, t, left)]
            ):
                work.wait()
            same("send/recv", t, make(left))
            torch.cuda.synchronize()
    return {"digests": seen, "worst": worst}


def rank_training(torch, dist, rank, world, device, options):
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    layers = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(50):
        x = torch.randn(64, 256, generator=generator).to(device)
        y = torch.randint(10, (64,), generator=generator).to(device)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


def rank_exact(torch, dist, rank, world, device, options):
    """Allreduces of whole numbers for `seconds` seconds, every element compared."""
    rounds, elements = 0, 0
    numbers = {n: torch.arange(n, device=device).remainder_(1009).float() for n in (2, 4096, 1 << 18, 4 << 20)}
    end = time.time() + options["seconds"]
    more = torch.ones(1, device=device)
    while more.item():
        for n, base in numbers.items():
            t = base * (rank + 1) + rounds % 97
            want = base * (world * (world + 1) // 2) + world * (rounds % 97)
            dist.all_reduce(t)
            assert torch.equal(t, want), f"round {rounds}, {n} numbers: {(t != want).sum().item()} wrong"
            elements += n
        rounds += 1
        # Rank 0's clock decides when all end.
        more.fill_(float(time.time() < end))
        dist.broadcast(more, src=0)
    return {"rounds": rounds, "elements": elements}


def rank_queued(torch, dist, rank, world, device, options):
    """2,000 kernels after an allreduce, with one hardware queue."""
    small, big = torch.zeros(64, device=device), torch.ones(16 << 20, device=device)
    dist.all_reduce(small)
    torch.cuda.synchronize()
    start = time.time()
    for _ in range(3):
        dist.all_reduce(big, async_op=True)
        for _ in range(2000):
            small.add_(1)
    torch.cuda.synchronize()
    assert big[0].item() == world**3 and small[0].item() == 6000
    return {"seconds": time.time() - start}


def rank_graph(torch, dist, rank, world, device, options):
    """An allreduce captured in a CUDA graph, replayed; the first use of the group, if it is not `warm`."""
    t = torch.ones(1 << 20, device=device)
    if options["warm"]:
        dist.all_reduce(t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(t)
    for step in range(1, 6):
        t.fill_(step)
        graph.replay()
        torch.cuda.synchronize()
        assert t.min().item() == t.max().item() == step * world, step
    return {}


def rank_replays(torch, dist, rank, world, device, options):
    """A graph replayed as often as goes in, without a wait between."""
    for count in (2, 1 << 18, 16 << 20):
        x, out = torch.zeros(count, device=device), torch.zeros(count, device=device)
        dist.all_reduce(out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            out.copy_(x)
            dist.all_reduce(out)
        for turn in range(1, 4):
            for _ in range(300):
                graph.replay()
            torch.cuda.synchronize()
            assert out.min().item() == out.max().item() == 300 * turn * world, (count, turn, out[0].item())
    return {}


def rank_again(torch, dist, rank, world, device, options):
    """Process groups made and destroyed."""
    for turn in range(3):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + turn)
        dist.init_process_group("nccl", device_id=device)
        t = torch.full((1 << 20,), float(turn + 1), device=device)
        dist.all_reduce(t)
        assert t.min().item() == t.max().item() == world * (turn + 1)
        if turn < 2:
            dist.destroy_process_group()
    return {}


def rank_one_process(torch, dist, rank, world, device, options):
    """A rank for each GPU, all of them in this process."""
    from torch.cuda import nccl

    gpus = torch.cuda.device_count()
    for count in (1, 1000, 1 << 20, (16 << 20) + 1):
        for turn in range(3):
            mine = [torch.full((count,), float(gpu + turn), device=f"cuda:{gpu}") for gpu in range(gpus)]
            nccl.all_reduce(mine)
            for gpu, t in enumerate(mine):
                want = sum(range(gpus)) + gpus * turn
                assert t.min().item() == t.max().item() == want, f"GPU {gpu}, {count} numbers"
    return {}


def rank_killed(torch, dist, rank, world, device, options):
    """The last rank dies in the middle; the others must hear of it within ten seconds."""
    t = torch.ones(4 << 20, device=device)
    dist.all_reduce(t)
    torch.cuda.synchronize()
    if rank == world - 1:
        for _ in range(3):
            dist.all_reduce(t)
        os.kill(os.getpid(), signal.SIGKILL)
    hear_of_the_end(torch, dist, t, device)


def rank_stopped(torch, dist, rank, world, device, options):
    """The last rank is stopped in the middle and goes on later; nobody may take it for dead."""
    t = torch.ones(4 << 20, device=device)
    dist.all_reduce(t)
    torch.cuda.synchronize()
    start, longest = time.time(), 0.0
    for turn in range(20):
        before = time.time()
        t.fill_(float(turn))
        dist.all_reduce(t)
        if turn == 5 and rank == world - 1:
            # The kernel is launched, and NCCL's thread is at work on it.
            waker = subprocess.Popen(["sh", "-c", f"sleep {options['seconds']}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            waker.wait()
        assert t.min().item() == t.max().item() == world * turn, f"turn {turn}: {t[0].item()}"
        longest = max(longest, time.time() - before)
    return {"seconds": time.time() - start, "longest": longest}


def rank_faulty(torch, dist, rank, world, device, options):
    """A kernel of the last rank's program fails, and its context with it; its process stays. The
    others must hear of it within ten seconds."""
    t = torch.ones(4 << 20, device=device)
    dist.all_reduce(t)
    torch.cuda.synchronize()
    if rank == world - 1:
        for _ in range(3):
            dist.all_reduce(t, async_op=True)
        print(f"{time.time():.3f} the assert", flush=True)
        try:
            torch.zeros(1, device=device)[torch.full((1,), 1 << 20, device=device)]
            torch.cuda.synchronize()
        except Exception as e:
            print(f"{time.time():.3f} {e}", flush=True)
        time.sleep(60)
    hear_of_the_end(torch, dist, t, device)


def hear_of_the_end(torch, dist, t, device):
    """Says in the result when the communicator reported an error, and which."""
    group = dist.distributed_c10d._get_default_group()._get_backend(device)
    start = time.time()
    try:
        while time.time() - start < 30:
            work = dist.all_reduce(t, async_op=True)
            while not work.is_completed():
                time.sleep(0.01)
                if time.time() - start > 30:
                    break
            work.wait()
        error = "none"
    except Exception as e:  # what the communicator reports
        error = str(e).splitlines()[0][:200]
    print(f"{time.time():.3f} {error}", flush=True)
    with open(os.environ["RESULT"], "w") as file:
        json.dump({"seconds": time.time() - start, "error": error}, file)
    group.abort()
    os._exit(0)


def rank_bench(torch, dist, rank, world, device, options):
    rows = {}
    cpu = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    for size in options["sizes"]:
        count = max(size // 4, 1)
        t = torch.ones(count, device=device)
        iters = 200 if size <= 64 << 10 else 40 if size <= 16 << 20 else 12
        def run(call):
            for _ in range(5):
                call()
            torch.cuda.synchronize()
            best, spent = 1e9, 0.0
            for _ in range(options.get("runs", 3)):
                dist.barrier()
                torch.cuda.synchronize()
                begin, used = time.perf_counter(), cpu()
                for _ in range(iters):
                    call()
                torch.cuda.synchronize()
                took = (time.perf_counter() - begin) / iters
                if took < best:
                    best, spent = took, (cpu() - used) / iters
            return best, spent
        call = lambda: dist.all_reduce(t)
        if options.get("graphs"):
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                dist.all_reduce(t)
            call = graph.replay
        best, spent = run(call)
        busbw = size / best / 1e9 * 2 * (world - 1) / world
        row = {"us": best * 1e6, "busbw": busbw, "cpu_s_per_gb": spent / max(size / 1e9, 1e-9)}
        if size >= 4096:
            u = torch.empty_like(t)
            def one_way():
                if rank == 0:
                    dist.send(t, 1)
                elif rank == 1:
                    dist.recv(u, 0)
            best, _ = run(one_way)
            row["sendrecv"] = size / best / 1e9
        rows[str(size)] = row
    return {"rows": rows}


def communicator(dist, rank, world):
    """One of NCCL's own, and its call that sums `count` floats in place on a stream."""
    nccl = ctypes.CDLL("libnccl.so.2")  # PyTorch has loaded it.

    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 128)]

    def check(code):
        assert code == 0, f"NCCL says {code}"

    name, comm = Id(), ctypes.c_void_p()
    check(nccl.ncclGetUniqueId(ctypes.byref(name)))
    told = [bytes(name)]
    dist.broadcast_object_list(told, src=0)
    ctypes.memmove(ctypes.byref(name), told[0], 128)
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    check(nccl.ncclCommInitRank(ctypes.byref(comm), world, name, rank))
    sums = nccl.ncclAllReduce
    pointer = ctypes.c_void_p
    sums.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer]
    FLOAT32, SUM = 7, 0
    nccl.ncclCommDestroy.argtypes = [pointer]
    return (
        lambda address, count, stream: check(sums(address, address, count, FLOAT32, SUM, comm, stream)),
        lambda: check(nccl.ncclCommDestroy(comm)),
    )


def rank_small(torch, dist, rank, world, device, options):
    """Where the time of a small allreduce goes: the program's thread, or the way."""
    t = torch.ones(max(options["size"] // 4, 1), device=device)
    n = 100

    def turn(call, times):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        return (issued - begin) / times * 1e6, (time.perf_counter() - begin) / times * 1e6

    def lone():
        dist.all_reduce(t)
        torch.cuda.synchronize()

    for _ in range(20):
        lone()
    rows = [turn(lambda: dist.all_reduce(t), n) for _ in range(options["runs"])]
    row = {"issue": min(a for a, _ in rows), "row": min(b for _, b in rows)}
    lones = []
    for _ in range(options["runs"] * 20):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        lone()
        lones.append((time.perf_counter() - begin) * 1e6)
    lones.sort()
    row["lone"] = lones[len(lones) // 2]
    # Launched ahead: queued after a kernel that takes longer than issuing all of them.
    behind = []
    for _ in range(options["runs"]):
        dist.barrier()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(20_000_000)
        events[0].record()
        for _ in range(n):
            dist.all_reduce(t)
        events[1].record()
        torch.cuda.synchronize()
        behind.append(events[0].elapsed_time(events[1]) * 1e3 / n)
    row["behind"] = min(behind)
    # Called as a program in C would call it, without PyTorch.
    all_reduce, destroy = communicator(dist, rank, world)
    call = (t.data_ptr(), t.numel(), torch.cuda.current_stream().cuda_stream)
    for _ in range(20):
        all_reduce(*call)
    row["direct"] = min(turn(lambda: all_reduce(*call), n)[1] for _ in range(options["runs"]))
    destroy()
    return row


# ----------------------------------------------------------------------------------------- runner
class Failed(Exception):
    pass


class Runner:
    def __init__(self, options):
        # Below the ports that the kernel gives to connecting sockets.
        self.plugin, self.out, self.port = options.plugin, options.out, 20000 + os.getpid() % 10000
        self.failures = []
        # Links that took the place of broken ones in the last run, both ends' counted.
        self.replaced = 0

    def transport(self, name, rank, gpus_each):
        env = {}
        name, _, more = name.partition(":")
        apart = {"NCCL_HOSTID": f"host{rank}"}
        if name.startswith("pushgate"):
            env = {"NCCL_NET_PLUGIN": self.plugin, "NCCL_NET": "pushgate", **apart}
        elif name == "shm":
            env = {"NCCL_P2P_DISABLE": "1", "NCCL_NET_PLUGIN": "none"}
        elif name == "p2p":
            env = {"NCCL_NET_PLUGIN": "none"}
        elif name.startswith("socket"):
            threads = {"socket": ("1", "1"), "socket4x4": ("4", "4")}[name]
            env = {
                "NCCL_NET_PLUGIN": "none",
                "NCCL_NET": "Socket",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_NTHREADS": threads[0],
                "NCCL_NSOCKS_PERTHREAD": threads[1],
                **apart,
            }
        # For example pushgate:NCCL_PROTO=Simple;NCCL_MIN_NCHANNELS=4
        env.update(pair.split("=", 1) for pair in more.split(";") if pair)
        return env

    def run(self, scenario, transport, world, options=None, env=None, limit=LIMIT, dying=()):
        self.port += 10
        folder = tempfile.mkdtemp(prefix=f"{scenario}-{transport.partition(':')[0]}-{world}-", dir=self.out)
        processes = []
        for rank in range(world):
            e = dict(os.environ)
            e.update(self.transport(transport, rank, world))
            e.update(
                RANK=str(rank),
                WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.port),
                SCENARIO=scenario,
                OPTIONS=json.dumps(options or {}),
                RESULT=f"{folder}/{rank}.json",
                NCCL_DEBUG="INFO",
                NCCL_DEBUG_FILE=f"{folder}/nccl-{rank}.log",
                CUBLAS_WORKSPACE_CONFIG=":4096:8",
                TORCH_NCCL_ASYNC_ERROR_HANDLING="0" if scenario in ("killed", "faulty") else "1",
                TORCH_NCCL_ENABLE_MONITORING="0",
            )
            e.update(env or {})
            log = open(f"{folder}/{rank}.log", "w")
            processes.append(
                subprocess.Popen([sys.executable, os.path.abspath(__file__), "--rank"], env=e, stdout=log, stderr=log)
            )
        end = time.time() + limit
        try:
            for rank, p in enumerate(processes):
                # Ranks that are to die are not waited for; they are ended below.
                code = rank not in dying and p.wait(max(end - time.time(), 0.1))
                if code:
                    raise Failed(f"rank {rank} ended with {code}: {tail(f'{folder}/{rank}.log')}")
        except subprocess.TimeoutExpired:
            raise Failed(f"still ran after {limit} s ({folder})") from None
        finally:
            for p in processes:
                if p.poll() is None:
                    p.kill()
                p.wait()
        self.replaced = 0
        if transport.startswith("pushgate"):
            for rank in range(world):
                text = open(f"{folder}/nccl-{rank}.log").read()
                self.replaced += text.count("another link carries the queue pair")
                if "via NET/pushgate" not in text and rank not in dying:
                    raise Failed(f"NCCL's log of rank {rank} has no 'via NET/pushgate' ({folder})")
        return [json.load(open(f"{folder}/{r}.json")) for r in range(world) if r not in dying]

    def step(self, name, call):
        start = time.time()
        try:
            said = call()
            print(f"PASS  {name:<44} {time.time() - start:6.1f} s  {said or ''}", flush=True)
        except (Failed, AssertionError) as e:
            self.failures.append(name)
            print(f"FAIL  {name:<44} {time.time() - start:6.1f} s  {e}", flush=True)


def tail(path, lines=6):
    text = [line for line in open(path).read().splitlines() if line.strip()]
    return " | ".join(text[-lines:])[-900:]


def scenarios(r, gpus, args):
    world = args.ranks or max(gpus, 2)
    own = "shm" if gpus >= world else "socket"
    dtypes = ["float32", "float16", "bfloat16"]
    sizes = SIZES + (LARGE if gpus >= world else LARGE[1:])
    pinned = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}

    def functional():
        ours = r.run("functional", "pushgate", world, {"dtypes": dtypes, "sizes": sizes})
        return f"{len(ours[0]['digests'])} sums, worst {max(o['worst'] for o in ours):.2f} of what rounding allows"

    def bits():
        # On the same ring with the same protocol, additions come in the same order.
        options = {"dtypes": dtypes, "sizes": sizes[:-1]}
        channels = {"NCCL_MIN_NCHANNELS": "2", "NCCL_MAX_NCHANNELS": "2"}
        ours = r.run("functional", "pushgate", world, options, {**pinned, **channels})
        theirs = r.run("functional", own, world, options, {**pinned, **channels})
        different = [k for a, b in zip(ours, theirs) for k in a["digests"] if a["digests"][k] != b["digests"][k]]
        assert not different, f"not the same bits as over {own}: {different[:4]}"
        return f"the same bits as over {own}"

    def training():
        ours = r.run("training", "pushgate", world)
        theirs = r.run("training", own, world, env={"NCCL_ALGO": "Ring"})
        for rank, (a, b) in enumerate(zip(ours, theirs)):
            off = max(abs(x - y) / abs(y) for x, y in zip(a["losses"], b["losses"]))
            assert off < 1e-4, f"rank {rank}: losses differ by {off}"
        return f"50 steps; losses differ from those over {own} by at most {off:.1e}"

    def breaks(milliseconds):
        # What the plugin's engines say of links is of NCCL's subsystem NET.
        return {"_PUSHGATE_BREAK_LINKS": str(milliseconds), "NCCL_DEBUG_SUBSYS": "INIT,NET"}

    def broken():
        # Each link is broken every second; others must carry what follows, and every sum must be exact.
        env = breaks(1000)
        seconds = args.seconds
        said = r.run("exact", "pushgate", world, {"seconds": seconds}, env, limit=seconds + 120)
        links = r.replaced
        assert links >= seconds / 2, f"only {links} links were replaced"
        return f"{said[0]['rounds']} rounds, {said[0]['elements']} elements exact; {links} links replaced"

    def broken_training():
        ours = r.run("training", "pushgate", world, env=breaks(20))
        links = r.replaced
        assert links, "no link was replaced"
        whole = r.run("training", "pushgate", world)
        assert [x["losses"] for x in ours] == [x["losses"] for x in whole], "other losses than over links that stay"
        return f"50 steps, the losses of links that stay; {links} links replaced"

    def queued():
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        return f"{max(x['seconds'] for x in r.run('queued', 'pushgate', world, env=env, limit=120)):.2f} s"

    def blocking():
        # Every launch waits for its kernel.
        options, env = {"dtypes": dtypes[:1], "sizes": sizes[:6]}, {"CUDA_LAUNCH_BLOCKING": "1"}
        ours = r.run("functional", "pushgate", world, options, env, limit=60)
        return f"{len(ours[0]['digests'])} sums"

    def one_process():
        # The ranks share a host and a process, so NCCL must be told to use the network.
        r.run("one_process", "pushgate", 1, env={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
        return f"{gpus} GPUs"

    def ended(scenario):
        said = r.run(scenario, "pushgate", world, limit=90, dying=(world - 1,))
        worst = max(said, key=lambda x: x["seconds"])
        assert worst["seconds"] < 10 and worst["error"] != "none", worst
        return f"{worst['seconds']:.1f} s: {worst['error'][:80]}"

    def stopped():
        said = r.run("stopped", "pushgate", world, {"seconds": 15}, limit=90)
        longest = min(x["longest"] for x in said)
        assert longest > 10, f"nobody waited for the stopped rank: {longest:.1f} s"
        return f"all waited for {longest:.1f} s and went on"

    def bench():
        sizes = [int(s) for s in args.sizes.split(",")] if args.sizes else BENCH
        options = {"sizes": sizes, "runs": args.runs, "graphs": args.graphs}
        table = {}
        for transport in args.beside.split(","):
            try:
                table[transport] = r.run("bench", transport, world, options)[0]["rows"]
            except Failed as e:
                if transport.startswith("pushgate"):
                    raise
                print(f"      {transport}: {e}", flush=True)
        for what, unit in (("us", "allreduce, us"), ("busbw", "allreduce, GB/s busbw"), ("sendrecv", "send/recv one way, GB/s"), ("cpu_s_per_gb", "CPU seconds a GB, rank 0")):
            print(f"      {unit:<44}" + "".join(f"{s:>12}" for s in sizes))
            for transport, rows in table.items():
                cells = [rows[str(s)].get(what) for s in sizes]
                print(f"      {transport:<44}" + "".join(f"{'' if c is None else format(c, '12.2f'):>12}" for c in cells))
        return ""

    def small():
        transports = args.beside.split(",")
        rows = {t: [] for t in transports}
        for _ in range(args.starts):
            for transport in transports:
                ranks = r.run("small", transport, world, {"size": 8, "runs": args.runs})
                # The slowest rank's time, because the others wait for it.
                rows[transport].append({c: max(row[c] for row in ranks) for c in SMALL})
        head = f"8 B allreduce, us, of {args.starts} starts"
        print(f"      {head:<44}" + "".join(f"{c:>14}" for c in SMALL) + "   best / median")
        for transport in transports:
            cells = []
            for c in SMALL:
                values = sorted(row[c] for row in rows[transport])
                cells.append(f"{values[0]:.1f} / {values[len(values) // 2]:.1f}")
            print(f"      {transport:<44}" + "".join(f"{c:>14}" for c in cells), flush=True)
        return ""

    return {
        "functional": functional,
        "bits": bits,
        "training": training,
        "broken": broken,
        "broken-training": broken_training,
        "queued": queued,
        "graph": lambda: r.run("graph", "pushgate", world, {"warm": True}) and None,
        "graph-first": lambda: r.run("graph", "pushgate", world, {"warm": False}) and None,
        "replays": lambda: r.run("replays", "pushgate", world, limit=90) and None,
        "blocking": blocking,
        "again": lambda: r.run("again", "pushgate", world, env={"NCCL_NET_PLUGIN_REF_COUNT": "1"}) and None,
        **({"one-process": one_process} if gpus > 1 else {}),
        "killed": lambda: ended("killed"),
        "faulty": lambda: ended("faulty"),
        "stopped": stopped,
        "bench": bench,
        "small": small,
    }


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", default=f"{here}/libnccl-net-pushgate.so")
    parser.add_argument("--gpus", type=int, help="how many GPUs to use [default: all]")
    parser.add_argument("--ranks", type=int, help="processes; more than GPUs share them [default: one a GPU, at least two]")
    parser.add_argument("--only", help="scenarios, separated by commas")
    parser.add_argument("--out", default=tempfile.gettempdir(), help="logs go there")
    parser.add_argument("--beside", default="pushgate,shm,socket,socket4x4", help="transports of the bench, with NCCL's variables for one as in pushgate:NCCL_PROTO=Simple")
    parser.add_argument("--runs", type=int, default=3, help="turns of the bench, the best counts")
    parser.add_argument("--graphs", action="store_true", help="allreduces of the bench by graphs that are replayed")
    parser.add_argument("--starts", type=int, default=3, help="of each transport's processes in scenario small")
    parser.add_argument("--seconds", type=int, default=60, help="of scenario broken")
    parser.add_argument("--sizes", help="bytes of the bench, separated by commas")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return rank_main()
    import torch

    there = torch.cuda.device_count()
    gpus = args.gpus or there
    if not 1 <= gpus <= there:
        parser.error(f"--gpus is {gpus}, there are {there}")
    if args.ranks is not None and not 2 <= args.ranks <= 64:
        parser.error(f"--ranks is {args.ranks}: 2 to 64")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(i) for i in range(gpus))
    args.plugin = os.path.abspath(args.plugin)
    if not os.path.exists(args.plugin):
        parser.error(f"no plugin at {args.plugin}: build it with cargo xtask plugin")
    os.makedirs(args.out, exist_ok=True)
    print(f"{gpus} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    runner = Runner(args)
    known = scenarios(runner, gpus, args)
    wanted = args.only.split(",") if args.only else list(known)
    for name in wanted:
        if name not in known:
            parser.error(f"--only names {name}, there are {', '.join(known)}")
        runner.step(name, known[name])
    print("all passed" if not runner.failures else f"failed: {', '.join(runner.failures)}")
    sys.exit(bool(runner.failures))


if __name__ == "__main__":
    main()
