"""CuPy's communicators of NCCL, whose ID goes around over MPI (mpi4py). Numbers are whole, so that every sum is exact."""

import os
import time

import cupy
from cupy.cuda import nccl
from mpi4py import MPI

from ranks import RANK, WORLD, main, program


@program
def cupy_collectives():
    """An allreduce, an allgather, and send and receive around a ring, 4 bytes to 16 MiB."""
    cupy.cuda.Device(int(os.environ["LOCAL_RANK"])).use()
    comm = nccl.NcclCommunicator(WORLD, MPI.COMM_WORLD.bcast(nccl.get_unique_id() if RANK == 0 else None), RANK)
    stream, exact, ms = cupy.cuda.Stream(non_blocking=True), {}, None
    with stream:
        for count in (1, 1000, 1 << 18, 4 << 20):
            base = cupy.arange(count, dtype=cupy.float32) % 1009
            mine = base + RANK
            summed, edge, every = cupy.empty_like(mine), cupy.empty_like(mine), cupy.empty((WORLD, count), cupy.float32)

            def step():
                comm.allReduce(mine.data.ptr, summed.data.ptr, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
                comm.allGather(mine.data.ptr, every.data.ptr, count, nccl.NCCL_FLOAT32, stream.ptr)
                nccl.groupStart()
                comm.send(mine.data.ptr, count, nccl.NCCL_FLOAT32, (RANK + 1) % WORLD, stream.ptr)
                comm.recv(edge.data.ptr, count, nccl.NCCL_FLOAT32, (RANK - 1) % WORLD, stream.ptr)
                nccl.groupEnd()

            step()
            stream.synchronize()
            MPI.COMM_WORLD.Barrier()
            began = time.perf_counter()
            for _ in range(50):
                step()
            stream.synchronize()
            ms = (time.perf_counter() - began) / 50 * 1e3
            for what, got, due in (
                ("allreduce", summed, WORLD * base + WORLD * (WORLD - 1) // 2),
                ("receive", edge, base + (RANK - 1) % WORLD),
                ("allgather", every, base + cupy.arange(WORLD, dtype=cupy.float32)[:, None]),
            ):
                if not bool((got == due).all()):
                    raise AssertionError(f"rank {RANK}: {what} of {count}: {got.ravel()[:4].tolist()}, expected {due.ravel()[:4].tolist()}")
                exact[f"{what} of {count}"] = float(got.sum(dtype=cupy.float64))
    comm.destroy()
    return {"ms": ms, "exact": exact}


if __name__ == "__main__":
    main()
