"""What the programs share: how a rank begins, what it reports, models."""

import json
import os
import sys
import time

if "OMPI_COMM_WORLD_RANK" in os.environ:
    # Open MPI's mpirun has names of its own for these.
    os.environ.update({name: os.environ[f"OMPI_COMM_WORLD_{theirs}"] for name, theirs in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE"), ("LOCAL_RANK", "LOCAL_RANK"))})
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if os.environ.get("PER_HOST", "0") != "0":
    os.environ["NCCL_HOSTID"] = f"host{RANK // int(os.environ['PER_HOST'])}"
PROGRAMS = {}


def program(call):
    """Declares a program, by the name of its function."""
    PROGRAMS[call.__name__.replace("_", "-")] = call
    return call


def report(ms=None, near=None, exact=None):
    """What this rank found: milliseconds of what was timed, numbers that agree within the program's bound, and what agrees exactly."""
    row = {"ms": ms, "near": {k: [float(x) for x in v] for k, v in (near or {}).items()}, "exact": exact or {}}
    path = f"{os.environ['RESULTS']}/{RANK}.json"
    with open(path + ".part", "w") as file:
        json.dump(row, file)
    os.replace(path + ".part", path)


def main():
    name = sys.argv[1]
    if name not in PROGRAMS:
        sys.exit(f"no program {name}; there are {', '.join(PROGRAMS)}")
    found = PROGRAMS[name]()
    report(**found)


def on_gpu():
    return os.environ.get("PROGRAM_DEVICE", "cuda") == "cuda"


def begin(**more):
    """Joins the ranks' process group. Returns the device."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(7)
    if not on_gpu():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", **more)
    return device


def finish():
    import torch.distributed as dist

    settle()
    dist.destroy_process_group()


def settle():
    import torch

    if on_gpu():
        torch.cuda.synchronize()


def timed(step, times=10, warm=3):
    """Milliseconds that one call of `step` takes, ranks beginning together."""
    import torch.distributed as dist

    for _ in range(warm):
        step()
    settle()
    dist.barrier()
    settle()
    began = time.perf_counter()
    for _ in range(times):
        step()
    settle()
    return (time.perf_counter() - began) / times * 1e3


def gpt(vocabulary=512, width=128, heads=4, layers=4, places=64):
    """A GPT of these sizes; the last layer's weights are its own."""
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, _ = x.shape
            y = self.attention_norm(x)
            q, k, v = (part(y).view(b, t, -1, width // heads).transpose(1, 2) for part in (self.q, self.k, self.v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = x + self.o(seen.reshape(b, t, -1))
            return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(places, width)
            self.blocks = nn.ModuleList([Block() for _ in range(layers)])
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, words):
            x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(7)
    return Gpt()


def batches(device, vocabulary=512, rows=8, places=64, seed=None):
    """Endless batches of words; each rank has its own."""
    import torch

    generator = torch.Generator().manual_seed(100 + RANK if seed is None else seed)
    while True:
        yield torch.randint(0, vocabulary, (rows, places), generator=generator).to(device)


def loss_of(model, words):
    import torch.nn.functional as F

    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())
