# SPDX-License-Identifier: MIT OR Apache-2.0
"""A custom operator of PyTorch that exchanges tensors with a peer: a kernel pushes this rank's tensor into the peer's memory.

run.sh push starts two ranks. With PUSHGATE_DEVICE=cpu the tensors lie in host memory, and the kernel runs on the CPU executor.
"""

import ctypes
import os
from pathlib import Path
from typing import Optional

import torch

import pushgate

CHUNK = 64 * 1024
"""Bytes of a message: the window has room for several of them."""


class Params(ctypes.Structure):
    """``struct tensor_params`` of push.cu: the same fields in the same order."""

    _fields_ = [
        ("qp", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
        ("chunk", ctypes.c_uint32),
    ]


class Exchange:
    """A queue pair to the peer, with a tensor into which the peer pushes."""

    def __init__(self, context: pushgate.Context, comm: pushgate.Comm, like: torch.Tensor) -> None:
        self.module = context.load_file(Path(__file__).with_name("push.cu"))
        self.context, self.peer = context, 1 - comm.rank
        self.qp = comm.queue_pair(self.peer)
        self.inbox = torch.zeros_like(like)
        self.memory = self.named(self.inbox)
        self.region = self.qp.region(self.memory)
        keys = comm.all_gather(self.region.key.to_bytes(4, "little"))
        self.rkey = int.from_bytes(keys[self.peer], "little")
        self.result = context.alloc_device(8)
        self.stream = context.stream()
        self.count = 0

    def named(self, tensor: torch.Tensor) -> pushgate.Memory:
        """The memory of a tensor, which stays allocated until the result is closed."""
        if tensor.is_cuda:
            return self.context.use_device(tensor.data_ptr(), tensor.nbytes, tensor)
        return self.context.use_host(tensor.view(torch.uint8).numpy())

    def push(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pushes a tensor; returns the one that the peer pushed. Both ranks call."""
        if tensor.nbytes != self.inbox.nbytes or tensor.dtype != self.inbox.dtype or not tensor.is_contiguous():
            raise ValueError("a tensor of another shape or type than the exchange was made for, or one with gaps")
        if tensor.is_cuda:
            # What computes the tensor has to be done: our stream is another one.
            torch.cuda.current_stream(tensor.device).synchronize()
        self.count += 1
        params = Params(
            self.qp.device_address, tensor.data_ptr(), tensor.nbytes, self.count, self.result.address, self.rkey, CHUNK
        )
        shape = {"block": 256 if tensor.is_cuda else 4}
        with self.stream.launch(self.module, "push_tensor", params, cooperating=True, needs=(tensor, self), **shape) as kernel:
            kernel.wait()
        self.qp.check()
        status = int.from_bytes(self.result.read(), "little")
        if status != 0:
            raise RuntimeError(f"the kernel ended with: {pushgate.status_name(status)}")
        return self.inbox.reshape(tensor.shape).clone()

    def close(self) -> None:
        """Gives everything back, what was made last first."""
        for handle in (self.stream, self.result, self.region, self.memory, self.qp, self.module):
            handle.close()


EXCHANGE: Optional[Exchange] = None


@torch.library.custom_op("pushgate::exchange", mutates_args=())
def exchange(tensor: torch.Tensor) -> torch.Tensor:
    """The operator: the peer's tensor for this rank's."""
    if EXCHANGE is None:
        raise RuntimeError("no exchange was made")
    return EXCHANGE.push(tensor.contiguous())


@exchange.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
    """What came from the peer has its gradient at the peer."""
    return exchange(gradient)


exchange.register_autograd(backward)


def main() -> None:
    global EXCHANGE
    on_cpu = os.environ.get("PUSHGATE_DEVICE") == "cpu"
    device = torch.device("cpu")
    if not on_cpu:
        # The GPU that the context takes by the rank's number.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # PyTorch makes the device's primary context, in which both work.
        torch.zeros(1, device=device)
    with pushgate.Context({"device": "cpu" if on_cpu else "cuda"}, for_rank=True) as context:
        with context.connect_from_environment() as comm:
            generator = torch.Generator().manual_seed(7)
            rank = comm.rank
            both = [torch.randn(300, 1001, generator=generator).to(device) for _ in range(2)]
            mine, others = both[rank].requires_grad_(), both[1 - rank]
            EXCHANGE = Exchange(context, comm, mine.detach())
            for scale in (1.0, 2.0):
                came = exchange(mine * scale)
                assert torch.equal(came.detach(), others * scale), "another tensor came than the peer pushed"
            # The gradient of the peer's sum comes back to this rank's tensor.
            (came * (rank + 1)).sum().backward()
            assert torch.equal(mine.grad, torch.full_like(mine, 2.0 * (2 - rank))), "a wrong gradient"
            print(f"rank {rank}: {mine.nbytes} bytes on {device} came right, and so did the gradient", flush=True)
            comm.barrier()
            EXCHANGE.close()
            EXCHANGE = None


if __name__ == "__main__":
    main()
