"""Ranks that are processes, on CPUs.

    torchrun --standalone --nproc-per-node 4 python/examples/01_torchrun.py

Torch is not needed for more than its launcher: any that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT will do.
"""

import numpy

import direct_dcp

ROWS, DIM = 17, 576

# `Group.from_torch()` would take the process group of a program that has one.
group = direct_dcp.Group.from_env()
gather = direct_dcp.KvGather(group, group.world_size * 128, dtype="float16", dim=DIM)

rng = numpy.random.default_rng(group.rank)
local = rng.standard_normal((ROWS, DIM)).astype(numpy.float16)

# Copied out: [world_size * T, D], rank by rank.
out = numpy.empty((group.world_size * ROWS, DIM), numpy.float16)
gather.gather_into(local, out)

# Or zero-copy: lent until the block ends.
with gather.gather(local) as rows:
    assert rows.tobytes() == out.tobytes()

for rank in range(group.world_size):
    expected = numpy.random.default_rng(rank).standard_normal((ROWS, DIM)).astype(numpy.float16)
    assert numpy.array_equal(out[rank * ROWS : (rank + 1) * ROWS], expected)

# Nobody leaves while others still gather.
group.barrier()
print(f"rank {group.rank} of {group.world_size}: {len(out)} rows by {gather.way}")
