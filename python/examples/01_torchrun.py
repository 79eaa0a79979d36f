"""Ranks that are processes, on CPUs.

    torchrun --standalone --nproc-per-node 4 python/examples/01_torchrun.py

Torch is not needed for more than its launcher: any that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT will do, such as a shell:

    export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
    RANK=1 python python/examples/01_torchrun.py & RANK=0 python python/examples/01_torchrun.py
"""

import random

import direct_dcp

ROWS, DIM = 17, 576


def rows_of(rank: int) -> bytes:
    """Made up, and known to every rank; tensors and arrays will do as well."""
    return random.Random(rank).randbytes(ROWS * DIM * 2)


# `Group.from_torch()` would take the process group of a program that has one.
group = direct_dcp.Group.from_env()
gather = direct_dcp.KvGather(group, group.world_size * 128, dtype="float16", dim=DIM)
local = rows_of(group.rank)

# Copied out: [world_size * T, D], rank by rank.
out = bytearray(group.world_size * len(local))
gather.gather_into(local, out)

# Or zero-copy: lent until the block ends.
with gather.gather(local) as rows:
    assert rows == out

assert out == b"".join(map(rows_of, range(group.world_size)))

# Nobody leaves while others still gather.
group.barrier()
count = len(out) // gather.row_bytes
print(f"rank {group.rank} of {group.world_size}: {count} rows by {gather.way}")
