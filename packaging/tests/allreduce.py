# SPDX-License-Identifier: MIT OR Apache-2.0
"""An allreduce of two ranks over the wheel: `pushgate run -n 2 -- python allreduce.py`."""

import array

import pushgate

COUNT = 4096


def numbers(rank: int) -> "array.array[int]":
    return array.array("q", ((i + 1) * (rank * 1000 + 7) for i in range(COUNT)))


with pushgate.Context({"device": "cpu"}) as context, context.connect_from_environment() as comm:
    assert comm.ranks == 2, comm.ranks
    mine = numbers(comm.rank)
    with comm.queue_pair(1 - comm.rank) as qp, qp.host_end() as end:
        end.send(mine.tobytes(), tag=comm.rank)
        came, tag = end.recv(len(mine) * mine.itemsize)
        comm.barrier()
    assert tag == 1 - comm.rank, tag
    theirs = array.array("q")
    theirs.frombytes(came)
    sums = [a + b for a, b in zip(mine, theirs)]
    assert sums == [a + b for a, b in zip(numbers(0), numbers(1))]
    print(f"rank {comm.rank}: the sums are right")
