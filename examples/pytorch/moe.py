# SPDX-License-Identifier: MIT OR Apache-2.0
"""A layer of experts whose tokens go through NCCL EP over the plugin: run.sh moe. Its kernels send on NCCL's device API.

Each rank has some of the experts. A token goes to the experts that the router prefers, wherever they are, and their weighted sum comes
back. Each rank compares its tokens' results with those of all experts computed here, for NCCL EP and for `all_to_all_single`, and times
both.

Beside torch and pushgate: nvcc and the wheel nccl-extensions, which NCCL 2.30.7 or later must go with. Where PyTorch brings an older
NCCL, LD_PRELOAD names the newer libnccl.so.2. Two ranks that share a GPU (MPS) need --sms 16: their kernels wait for each other.
"""

import argparse
import os
from datetime import timedelta
from statistics import median

import nccl.ep as ep
import torch
import torch.distributed as dist
from nccl.ep.interop.torch import get_nccl_comm_from_group

import pushgate


class Experts:
    """This rank's experts: two matrices each. Every rank can make those of all."""

    def __init__(self, count: int, hidden: int, inner: int, device: torch.device) -> None:
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.local = count // ranks
        seeded = torch.Generator(device).manual_seed(1)
        shape = {"generator": seeded, "device": device, "dtype": torch.bfloat16}
        self.all = (torch.randn(count, hidden, inner, **shape) / hidden**0.5, torch.randn(count, inner, hidden, **shape) / inner**0.5)
        first = self.rank * self.local
        self.up, self.down = [matrices[first : first + self.local] for matrices in self.all]

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of tokens by expert: [experts here, tokens, hidden]."""
        return torch.relu(tokens @ self.up) @ self.down

    def reference(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the layer must give, computed by all experts here."""
        up, down = self.all
        of_all = torch.relu(tokens @ up) @ down
        mine = of_all[chosen, torch.arange(len(tokens), device=tokens.device)[:, None]]
        return (mine.float() * weights[..., None]).sum(1)


class OverEp:
    """Tokens go and come by NCCL EP's kernels. Made once; the number of tokens is bounded."""

    def __init__(self, experts: Experts, tokens: int, hidden: int, topk: int, sms: int) -> None:
        self.experts, ranks = experts, dist.get_world_size()
        device = torch.device("cuda", torch.cuda.current_device())
        self.comm = get_nccl_comm_from_group()
        config = ep.GroupConfig(
            num_experts=experts.local * ranks,
            max_dispatch_tokens_per_rank=tokens,
            max_token_bytes=hidden * 2,
            max_num_sms=sms,
            timeout_ns=20_000_000_000,
        )
        self.group = ep.Group.create(self.comm, config)
        self.handle = None
        self.chosen = torch.zeros(tokens, topk, dtype=torch.int64, device=device)
        self.weights = torch.zeros(tokens, topk, dtype=torch.float32, device=device)
        self.counts = torch.zeros(experts.local, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(experts.local, tokens * ranks, hidden, dtype=torch.bfloat16, device=device)

    def __call__(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        self.chosen.copy_(chosen)
        self.weights.copy_(weights)
        if self.handle is None:
            self.handle = self.group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(self.chosen), stream=stream)
        else:
            self.handle.update(ep.Tensor(self.chosen), stream=stream)
        self.handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(tokens)),
            ep.DispatchOutputs(tokens=ep.Tensor(self.arrived)),
            layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(self.counts)),
            stream=stream,
        )
        results = self.experts(self.arrived)
        combined = torch.empty_like(tokens)
        self.handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(results)),
            ep.CombineOutputs(tokens=ep.Tensor(combined), topk_weights=ep.Tensor(self.weights)),
            stream=stream,
        )
        return combined

    def close(self) -> None:
        self.handle.destroy()
        self.group.destroy()
        self.comm.destroy()


class OverAllToAll:
    """The same by PyTorch's collective: the ranks first tell each other how many tokens come for each expert."""

    def __init__(self, experts: Experts) -> None:
        self.experts, self.ranks = experts, dist.get_world_size()

    def __call__(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts, local = self.experts, self.experts.local
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=local * self.ranks)
        expected = torch.empty_like(sent)
        dist.all_to_all_single(expected, sent)
        by_rank = expected.view(self.ranks, local)
        to, come = sent.view(self.ranks, local).sum(1).tolist(), by_rank.sum(1).tolist()
        arrived = tokens.new_empty(sum(come), tokens.shape[1])
        dist.all_to_all_single(arrived, tokens[order // chosen.shape[1]], come, to)
        # Which expert each row is for, and its place among that expert's rows.
        expert = torch.arange(local, device=tokens.device).repeat(self.ranks).repeat_interleave(by_rank.flatten())
        by_expert = expert.argsort(stable=True)
        counts = by_rank.sum(0)
        place = torch.arange(len(expert), device=tokens.device) - (counts.cumsum(0) - counts)[expert[by_expert]]
        padded = tokens.new_zeros(local, int(counts.max()), tokens.shape[1])
        padded[expert[by_expert], place] = arrived[by_expert]
        results = torch.empty_like(arrived)
        results[by_expert] = experts(padded)[expert[by_expert], place]
        back = torch.empty(len(order), tokens.shape[1], dtype=tokens.dtype, device=tokens.device)
        dist.all_to_all_single(back, results, to, come)
        mine = torch.empty_like(back)
        mine[order] = back
        return (mine.view(*chosen.shape, -1).float() * weights[..., None]).sum(1).to(tokens.dtype)

    def close(self) -> None:
        pass


def timed(layer, batches) -> float:
    """Milliseconds of a layer, the median over the batches."""
    times = []
    for batch in batches:
        dist.barrier()
        begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        layer(*batch)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a rank (128)")
    parser.add_argument("--hidden", type=int, default=7168, help="numbers of a token, BF16 (7168)")
    parser.add_argument("--inner", type=int, default=512, help="columns of an expert's first matrix (512)")
    parser.add_argument("--experts", type=int, default=8, help="experts of a rank (8)")
    parser.add_argument("--topk", type=int, default=4, help="experts of a token (4)")
    parser.add_argument("--layers", type=int, default=30, help="layers that are timed (30)")
    parser.add_argument("--sms", type=int, default=0, help="SMs of NCCL EP's kernels at most (0: its own choice)")
    args = parser.parse_args()
    # NCCL reads them when the first communicator is made.
    for name, value in pushgate.nccl_environment().items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # A rank that is lost ends the job after this time, and not never.
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = args.experts * ranks
    if args.topk > count:
        parser.error(f"--topk {args.topk}: there are {count} experts")

    experts = Experts(count, args.hidden, args.inner, device)
    router = torch.randn(args.hidden, count, generator=torch.Generator(device).manual_seed(2), device=device)
    seeded = torch.Generator(device).manual_seed(3 + rank)

    def batch():
        tokens = torch.randn(args.tokens, args.hidden, generator=seeded, device=device, dtype=torch.bfloat16)
        weights, chosen = (tokens.float() @ router / args.hidden**0.5).softmax(1).topk(args.topk)
        return tokens, chosen, weights / weights.sum(1, keepdim=True)

    ways = {
        "NCCL EP": OverEp(experts, args.tokens, args.hidden, args.topk, args.sms),
        "all_to_all_single": OverAllToAll(experts),
    }
    for name, layer in ways.items():
        for _ in range(5):
            inputs = batch()
            expected = experts.reference(*inputs)
            # The results are BF16, and so are the experts' sums.
            torch.testing.assert_close(layer(*inputs).float(), expected, rtol=3e-2, atol=3e-2)
        ms = timed(layer, [batch() for _ in range(args.layers)])
        if rank == 0:
            print(f"{name}: results of {ranks} ranks are right, {ms:.2f} ms a layer", flush=True)
    for layer in ways.values():
        layer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
