# SPDX-License-Identifier: MIT OR Apache-2.0
"""Distributed data parallel training over the NCCL plugin: run.sh ddp, or torchrun with the variables of `python -m pushgate env`.

The model learns a linear map. Each rank checks that its gradients are the mean over all ranks', computed by rank 0 alone, and that
the loss falls.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pushgate

STEPS, BATCH, FEATURES = 200, 256, 512


def batch_of(rank: int, step: int, truth: torch.Tensor) -> "tuple[torch.Tensor, torch.Tensor]":
    """A rank's inputs and answers of a step: every rank can make those of all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, FEATURES, generator=generator).to(truth.device)
    return inputs, inputs @ truth


def main() -> None:
    # NCCL reads them when the first communicator is made. Set by the launcher they serve every process; here they serve this one.
    for name, value in pushgate.nccl_environment().items():
        os.environ.setdefault(name, value)
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # A rank that is lost ends the job after this time, and not never.
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(FEATURES, FEATURES, bias=False).to(device), device_ids=[device.index])
    truth = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(2)).to(device) / FEATURES**0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)

    first = last = float("nan")
    for step in range(STEPS):
        inputs, answers = batch_of(rank, step, truth)
        loss = torch.nn.functional.mse_loss(model(inputs), answers)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            check_gradient(model, ranks, truth)
            first = loss.item()
        optimizer.step()
        last = loss.item()
    assert last < first / 10, f"the loss went from {first} to {last}"
    if rank == 0:
        print(f"gradients of {ranks} ranks are right; the loss went from {first:.4f} to {last:.4f}", flush=True)
    dist.destroy_process_group()


def check_gradient(model: DistributedDataParallel, ranks: int, truth: torch.Tensor) -> None:
    """Compares this rank's gradient with the mean of all ranks' gradients, computed here."""
    weight = model.module.weight
    mean = torch.zeros_like(weight)
    for rank in range(ranks):
        inputs, answers = batch_of(rank, 0, truth)
        alone = weight.detach().clone().requires_grad_()
        torch.nn.functional.mse_loss(inputs @ alone.T, answers).backward()
        mean += alone.grad / ranks
    torch.testing.assert_close(weight.grad, mean, rtol=1e-3, atol=1e-6)


if __name__ == "__main__":
    main()
