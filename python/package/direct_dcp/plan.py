"""What to gather: who owns which token, in which chunks contexts are gathered, and where each row
belongs in the result.

Every rank computes the same from the same input, and nothing here communicates, but for
``ChunkPlan.agree``, which asks whether all did. Numbers may be in lists or in arrays. Arguments
that cannot work raise InvalidArgument, a ValueError::

    planner = plan.ChunkPlanner(plan.Sharding(2, interleave=1), block=4, rows=8)
    chunks = planner.plan([5, 6]).chunks          # of 5 and of 6 rows
    chunks[0].row_map(rank=1).dst_rows            # 3, 4 and -1, which is padding
"""

from __future__ import annotations

from typing import NamedTuple

from ._native import Chunk, ChunkPlan, ChunkPlanner, Part, RowMap, Sharding, slots

__all__ = [
    "Chunk",
    "ChunkPlan",
    "ChunkPlanner",
    "Part",
    "RowMap",
    "Run",
    "Sharding",
    "TokenRun",
    "slots",
]


class TokenRun(NamedTuple):
    """Neighbouring tokens that are neighbours in a shard too."""

    #: The first token.
    token: int
    #: The rank that holds them.
    rank: int
    #: The row of the first token in the rank's shard.
    row: int
    #: How many there are.
    len: int


class Run(NamedTuple):
    """Neighbouring local rows that are neighbours in the result too."""

    #: The first local row.
    src: int
    #: Its row in the result.
    dst: int
    #: How many there are.
    len: int
