# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `pushgate bench osu-latency -d D D` measures in Rust, by the C API from Python: the same kernel, between two tensors of PyTorch.

    pushgate run -n 2 -- python3 osu_latency.py ../../gpu-kernels/kernels/osu.cu [BYTES ...]

The kernel may be an image (osu.cubin, .fatbin, .ptx) too, made by nvcc. Prints a line for each size: half of a round trip in us. With
PUSHGATE_DEVICE=cpu the tensors lie in host memory.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch

import pushgate

ROUNDS, WARM_UP = 10_000, 100


class Params(ctypes.Structure):
    """``struct osu_params`` of osu.cu: the same fields in the same order."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("qp", "result", "source", "stride", "bytes", "slice", "first", "warmup", "rounds")
    ] + [
        (name, ctypes.c_uint32)
        for name in (
            "messages", "places", "batch", "senders", "peer_senders", "lkey", "rkey", "answers", "flushes", "pad",
        )
    ]  # fmt: skip


def main() -> None:
    source_file, *given = sys.argv[1:]
    sizes = [int(size) for size in given] or [8, 1024, 8192]
    on_cpu = os.environ.get("PUSHGATE_DEVICE") == "cpu"
    device = torch.device("cpu")
    if not on_cpu:
        # The GPU that the context takes by the rank's number.
        device = torch.device("cuda", int(os.environ["PUSHGATE_RANK"]) % torch.cuda.device_count())
        torch.zeros(1, device=device)
    with pushgate.Context({"device": "cpu" if on_cpu else "cuda"}, for_rank=True) as context:
        is_source = Path(source_file).suffix == ".cu"
        module = context.load_file(source_file) if is_source else context.load_image_file(source_file)
        with context.connect_from_environment() as comm:
            peer, most = 1 - comm.rank, -(-max(sizes) // 64) * 64
            generator = torch.Generator().manual_seed(5)
            both = [torch.randint(256, (most,), dtype=torch.uint8, generator=generator).to(device) for _ in range(2)]
            source, target = both[comm.rank], torch.zeros(most, dtype=torch.uint8, device=device)
            qp = comm.queue_pair(peer)
            memory = context.use_host(target.numpy()) if on_cpu else context.use_device(target.data_ptr(), most, target)
            region = qp.region(memory)
            keys = comm.all_gather(region.key.to_bytes(4, "little"))
            result, stream, first = context.alloc_device(16), context.stream(), 0
            if not on_cpu:
                torch.cuda.synchronize(device)
            for size in sizes:
                target.zero_()
                if not on_cpu:
                    torch.cuda.synchronize(device)
                threads = 1 if on_cpu else min(max(1 << (max(-(-size // 64), 1) - 1).bit_length(), 32), 1024)
                params = Params(
                    qp=qp.device_address, result=result.address, source=source.data_ptr(), stride=-(-size // 64) * 64,
                    bytes=size, slice=size, first=first, warmup=WARM_UP, rounds=ROUNDS, messages=1, places=1, batch=1,
                    senders=1, peer_senders=1, rkey=int.from_bytes(keys[peer], "little"), answers=comm.rank,
                )  # fmt: skip
                first += WARM_UP + ROUNDS
                comm.barrier()
                with stream.launch(module, "osu_exchange", params, block=threads, cooperating=True, needs=(source, memory)) as kernel:
                    kernel.wait()
                comm.barrier()
                qp.check()
                words = result.read()
                status, ns = (int.from_bytes(words[at : at + 8], "little") for at in (0, 8))
                if status != 0:
                    raise RuntimeError(f"the kernel ended with: {pushgate.status_name(status)}")
                if not torch.equal(target[:size], both[peer][:size]):
                    raise RuntimeError(f"{size} bytes: not what the peer sent")
                if comm.rank == 0:
                    print(f"{size:<10} {ns / ROUNDS / 2 / 1000:.2f} us", flush=True)
            comm.barrier()
            for handle in (stream, result, region, memory, qp):
                handle.close()
        module.close()


if __name__ == "__main__":
    main()
