"""Trainings as PyTorch's users write them."""

import functools
import os
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import RANK, WORLD, batches, begin, finish, gpt, loss_of, main, on_gpu, program, settle, timed


def stepper(model, optimizer, words):
    """A step of training, and the list that it appends its losses to."""
    losses = []

    def step():
        loss = loss_of(model, next(words))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    return step, losses


def numbers(losses):
    return {"losses": [loss.item() for loss in losses]}


def train(model, device, steps=12):
    """The losses of some steps."""
    step, losses = stepper(model, torch.optim.SGD(model.parameters(), lr=1e-2), batches(device))
    for _ in range(steps):
        step()
    return numbers(losses)["losses"]


def timed_training(model, optimizer, words):
    """What a program reports that times a usual step. Ends the process group."""
    step, losses = stepper(model, optimizer, words)
    ms = timed(step)
    near = numbers(losses)
    finish()
    return {"ms": ms, "near": near}


@program
def ddp_forms():
    """Static graph, unused parameters, accumulation of gradients, buckets of 1 to 200 MB, views of buckets."""
    device, near = begin(), {}
    for name, options in {
        "plain": {},
        "static": {"static_graph": True},
        "bucket 1": {"bucket_cap_mb": 1},
        "bucket 200": {"bucket_cap_mb": 200, "gradient_as_bucket_view": True},
    }.items():
        near[name] = train(DDP(gpt().to(device), **options), device)

    class Fickle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])
            self.turn = 0

        def forward(self, x):
            self.turn += 1
            return self.parts[0](x) + self.parts[1 + (self.turn + RANK) % 3](x)

    torch.manual_seed(7)
    model = DDP(Fickle().to(device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    near["unused"] = []
    for step in range(12):
        torch.manual_seed(step * WORLD + RANK)
        loss = model(torch.randn(32, 64).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        near["unused"].append(loss.item())

    model = DDP(gpt().to(device))
    optimizer, words, near["accumulated"] = torch.optim.AdamW(model.parameters()), batches(device), []
    for step in range(12):
        if step % 4 != 3:
            with model.no_sync():
                loss_of(model, next(words)).backward()
        else:
            loss = loss_of(model, next(words))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            near["accumulated"].append(loss.item())
    finish()
    return {"near": near}


@program
def ddp_gpt():
    """A GPT of 163 M parameters in bfloat16, the batch of each rank 8 x 512."""
    device = begin()
    small = {} if not on_gpu() else {"vocabulary": 50304, "width": 768, "heads": 12, "layers": 12, "places": 512}
    words = batches(device, vocabulary=small.get("vocabulary", 512), places=small.get("places", 64))
    model = DDP(gpt(**small).to(device), gradient_as_bucket_view=True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-4, fused=on_gpu()), []

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, next(words))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    ms = timed(step, 20, 5)
    near = numbers(losses)
    finish()
    return {"ms": ms, "near": near}


@program
def fsdp():
    """FSDP2: parameters in shards, the next block's fetched ahead."""
    from torch.distributed.fsdp import fully_shard

    device = begin()
    model = gpt(width=256, layers=6).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    blocks = list(model.blocks)
    for at, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 3])
        block.set_modules_to_backward_prefetch(blocks[max(at - 2, 0) : at][::-1])
    return timed_training(model, torch.optim.AdamW(model.parameters(), 1e-3), batches(device))


@program
def tensor_parallel():
    """Linear layers cut by columns and by rows (DTensor)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device = begin()
    mesh = init_device_mesh(device.type, (WORLD,))
    model = gpt(width=256, heads=4, layers=4).to(device)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for block in model.blocks:
        parallelize_module(block, mesh, {"q": columns, "k": columns, "v": columns, "o": rows, "up": columns, "down": rows})
    # Its own form for many tensors takes no mixture of DTensor and plain ones.
    return timed_training(model, torch.optim.AdamW(model.parameters(), 1e-3, foreach=False), batches(device, seed=5))


@program
def pipeline():
    """A stage on each rank, 1F1B and GPipe (torch.distributed.pipelining)."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    device, near, ms = begin(), {}, None
    for name, schedule in {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}.items():
        torch.manual_seed(7)
        layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(WORLD)]
        part = layers[RANK].to(device)
        stage = PipelineStage(part, RANK, WORLD, device)
        plan = schedule(stage, n_microbatches=8, loss_fn=torch.nn.functional.mse_loss)
        optimizer, losses = torch.optim.SGD(part.parameters(), lr=0.1), []
        generator = torch.Generator().manual_seed(3)
        x, y = (torch.randn(64, 256, generator=generator).to(device) for _ in range(2))

        def step():
            found = []
            if RANK == 0:
                plan.step(x)
            elif RANK == WORLD - 1:
                plan.step(target=y, losses=found)
            else:
                plan.step()
            optimizer.step()
            optimizer.zero_grad()
            if found:
                losses.append(torch.stack(found).mean())

        ms = timed(step)
        near[name] = [loss.item() for loss in losses]
    finish()
    return {"ms": ms, "near": near}


@program
def moe():
    """A layer of experts, one on each rank; tokens go there in parts of unequal length, and come back."""
    from torch.distributed.nn.functional import all_to_all_single

    device = begin()
    torch.manual_seed(7)
    router = torch.nn.Linear(128, WORLD).to(device)
    expert = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)).to(device)
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.05)
    generator, losses = torch.Generator().manual_seed(RANK), []

    def step():
        x = torch.randn(1000 + 37 * RANK, 128, generator=generator).to(device)
        weight, where = router(x).softmax(-1).max(-1)
        order = where.argsort(stable=True)
        away = torch.bincount(where, minlength=WORLD)
        come = torch.empty_like(away)
        dist.all_to_all_single(come, away)
        away, come = away.tolist(), come.tolist()
        there = all_to_all_single(x.new_empty(sum(come), 128), x[order], come, away)
        back = all_to_all_single(x.new_empty(len(x), 128), expert(there), away, come)
        loss = (back * weight[order, None] - x[order]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in router.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.item())

    ms = timed(step)
    finish()
    return {"ms": ms, "near": {"losses": losses}}


@program
def workers_that_fork():
    """A DataLoader whose workers are forks, begun anew in each epoch, beside DDP."""

    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 64 * WORLD

        def __getitem__(self, at):
            return torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(at))

    device, near = begin(), {"losses": []}
    model = DDP(gpt().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sampler = torch.utils.data.DistributedSampler(Words(), WORLD, RANK, seed=3)
    loader = torch.utils.data.DataLoader(Words(), 8, sampler=sampler, num_workers=3, pin_memory=on_gpu(), multiprocessing_context="fork")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for words in loader:
            loss = loss_of(model, words.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            near["losses"].append(loss.item())
    finish()
    return {"near": near}


@program
def offload():
    """AMP with a gradient scaler, activations that are computed again, and others that wait in host memory."""
    from torch.utils.checkpoint import checkpoint

    device = begin()
    model = gpt(width=256, layers=4)
    for block in model.blocks[::2]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    model = DDP(model.to(device))
    optimizer, losses, words = torch.optim.SGD(model.parameters(), lr=1e-2), [], batches(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    for _ in range(12):
        with torch.autograd.graph.save_on_cpu(pin_memory=on_gpu()), torch.autocast(device.type, torch.float16 if on_gpu() else torch.bfloat16):
            loss = loss_of(model, next(words))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    finish()
    return {"near": {"losses": losses}}


@program
def checkpoints():
    """Parameters are gathered to rank 0 by a thread while training goes on; and torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    device, exact = begin(), {}
    apart = dist.new_group()
    model = DDP(gpt().to(device))
    optimizer, words, losses = torch.optim.SGD(model.parameters(), lr=1e-2), batches(device), []
    side = torch.cuda.Stream() if on_gpu() else None

    def gather(copy, turn):
        if on_gpu():
            torch.cuda.set_device(device)
        with torch.cuda.stream(side):
            parts = [torch.empty_like(copy) for _ in range(WORLD)] if RANK == 0 else None
            dist.gather(copy, parts, dst=0, group=apart)
            if RANK == 0:
                exact[f"equal {turn}"] = all(torch.equal(part, parts[0]) for part in parts)

    keeping = None
    for step in range(16):
        loss = loss_of(model, next(words))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 4 == 3:
            if keeping:
                keeping.join()
            copy = torch.cat([p.detach().flatten() for p in model.parameters()])
            if on_gpu():
                side.wait_stream(torch.cuda.current_stream())
            keeping = threading.Thread(target=gather, args=(copy, step))
            keeping.start()
    keeping.join()
    settle()
    folder = os.environ["RESULTS"] + "/checkpoint"
    state = {"model": model.module.state_dict()}
    kept = {name: value.clone() for name, value in state["model"].items()}
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    losses += train(model, device, 4)
    saving.result()
    dist.barrier()
    loaded = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items()}}
    dcp.load(loaded, checkpoint_id=folder)
    exact["loaded"] = all(torch.equal(value, kept[name]) for name, value in loaded["model"].items())
    if not exact["loaded"]:
        raise AssertionError("the checkpoint is not what the model was when it was saved")
    finish()
    return {"near": {"losses": losses}, "exact": exact}


@program
def compiled():
    """torch.compile over DDP, and a compiled function with collectives in its graph."""
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

    device = begin()
    model = torch.compile(DDP(gpt(layers=2).to(device)))
    near = {"losses": train(model, device, 8)}

    @torch.compile(fullgraph=True)
    def layer(x, w):
        y = all_reduce(x @ w, "sum", dist.group.WORLD)
        z = all_gather_tensor(y.relu(), 0, dist.group.WORLD)
        return reduce_scatter_tensor(z * 0.5, "sum", 0, dist.group.WORLD).sum()

    torch.manual_seed(RANK)
    x, w = torch.randn(64, 64).to(device), torch.randn(64, 64).to(device)
    near["in graph"] = [layer(x + n, w).item() for n in range(4)]
    finish()
    return {"near": near}


@program
def graphed():
    """A whole step of DDP as a CUDA graph, replayed 50 times."""
    device = begin()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model = DDP(gpt().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    words, feed = next(batches(device)), batches(device)
    losses = []

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        return loss

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(12):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay():
        words.copy_(next(feed))
        graph.replay()
        losses.append(loss.detach().clone())

    ms = timed(replay, 40, 10)
    near = numbers(losses)
    # NCCL does not end a communicator that a living graph uses.
    del graph
    finish()
    return {"ms": ms, "near": near}


@program
def soak():
    """Training of SOAK_STEPS steps; every loss is compared."""
    device = begin()
    model = DDP(gpt(width=512, layers=6).to(device))
    step, losses = stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), batches(device))
    for _ in range(int(os.environ.get("SOAK_STEPS", "200"))):
        step()
    near = numbers(losses)
    finish()
    return {"near": near}


if __name__ == "__main__":
    main()
