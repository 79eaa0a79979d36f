"""Handshakes by stores that others have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def over_torch(process_group: Any = None) -> tuple[int, int, Callable[[bytes], list[bytes]]]:
    """Rank, world size and all-gather of a torch.distributed process group."""
    import torch.distributed as dist

    rank = dist.get_rank(process_group)
    world_size = dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("process_group: this process is not one of its ranks")

    def all_gather(data: bytes) -> list[bytes]:
        everything: list[Any] = [None] * world_size
        dist.all_gather_object(everything, data, group=process_group)
        return everything

    return rank, world_size, all_gather
