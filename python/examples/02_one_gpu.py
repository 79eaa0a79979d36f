"""Several ranks on one GPU: threads of this process, with a stream each.

    CUDA_DEVICE_MAX_CONNECTIONS=32 python python/examples/02_one_gpu.py

It needs a GPU and torch. For developing an engine on one device. The variable gives each stream a
hardware queue of its own: ranks wait for one another, and streams that share a queue are executed one
after the other.
"""

import os
import threading

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

import direct_dcp

RANKS, ROWS, DIM = 4, 128, 576


def rows_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, DIM, generator=generator).bfloat16().cuda()


def run(group: direct_dcp.Group, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        gather = direct_dcp.KvGather(
            group, RANKS * ROWS, dtype=torch.bfloat16, dim=DIM, device="cuda"
        )
        # Everything is allocated before the first call: a driver may let an allocation wait until
        # the device is idle, and calls wait for all ranks.
        local = rows_of(group.rank)
        out = torch.empty(RANKS * ROWS, DIM, dtype=torch.bfloat16, device="cuda")
        stream.synchronize()
        group.barrier()

        # Submitted to the current stream, like any operator of torch's.
        gather.gather_into(local, out)
        # What went wrong on the device is told by the next call, by `check`, or here.
        gather.wait()
        group.barrier()
        assert torch.equal(out, torch.cat([rows_of(rank) for rank in range(RANKS)]))
        print(f"rank {group.rank} of {RANKS}: {len(out)} rows by {gather.way}")
        group.barrier()


streams = [torch.cuda.Stream() for _ in range(RANKS)]
threads = [
    threading.Thread(target=run, args=(group, streams[group.rank]))
    for group in direct_dcp.Group.threads(RANKS)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
