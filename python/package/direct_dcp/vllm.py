"""What vLLM calls, over gathers of ours.

``DirectDCPKVGatherWorkspace`` takes the place of vLLM's class of that name, on machines with
multicast and without. :func:`register` adds the operator to a vLLM that was built without it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ._gather import KvGather
from ._native import Group
from .errors import InvalidArgument

_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


class DirectDCPKVGatherWorkspace:
    """Symmetric buffers for the gather of a context chunk's KV. Building one is collective.

    The group chooses the way, multicast where all ranks have it and it works, so this is built
    where vLLM's own raises for want of multicast.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        device: torch.device,
        max_gathered_tokens: int,
        token_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        num_ubatches: int = 1,
    ) -> None:
        import torch.distributed as dist

        if dtype not in _DTYPES:
            raise InvalidArgument(
                f"dtype: expected float16, bfloat16 or float8_e4m3fn, got {dtype}"
            )
        if num_ubatches < 1:
            raise InvalidArgument(f"num_ubatches: expected at least one ubatch, got {num_ubatches}")
        if max_gathered_tokens < 1 or token_dim < 1:
            raise InvalidArgument(
                "max_gathered_tokens and token_dim: expected positive sizes, got "
                f"{max_gathered_tokens} and {token_dim}"
            )
        row_bytes = token_dim * dtype.itemsize
        if row_bytes % 16:
            raise InvalidArgument(
                f"token_dim: expected rows of a 16-byte multiple, got {token_dim} of {dtype}, "
                f"{row_bytes} bytes"
            )
        self.world_size = dist.get_world_size(group)
        if self.world_size < 2:
            raise InvalidArgument(f"group: expected at least two ranks, got {self.world_size}")
        if max_gathered_tokens % self.world_size:
            raise InvalidArgument(
                "max_gathered_tokens: expected tokens that divide evenly over "
                f"{self.world_size} ranks, got {max_gathered_tokens}"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.device = torch.device(device)
        self.max_gathered_tokens = max_gathered_tokens
        self.token_dim = token_dim
        self.dtype = dtype
        self.num_ubatches = num_ubatches
        self._gather = KvGather(
            Group.from_torch(group),
            max_gathered_tokens,
            dtype=dtype,
            dim=token_dim,
            ubatches=num_ubatches,
            device=self.device,
        )

    @property
    def way(self) -> str:
        """How rows travel, as the group has chosen."""
        return self._gather.way

    @property
    def memory_bytes(self) -> int:
        """What to leave for it when the KV cache is sized."""
        return self._gather.memory_bytes

    def gather(self, gathered_kv: torch.Tensor, local_kv: torch.Tensor) -> None:
        """Gather ``local_kv``, [T, D], of all ranks into ``gathered_kv``, [world_size * T, D].

        A chunk that exceeds the capacity goes by the process group's own collective, on all ranks
        alike, as T is the same on all.
        """
        tokens = local_kv.shape[0] if local_kv.dim() == 2 else 0
        for name, tensor, rows in (
            ("local_kv", local_kv, tokens),
            ("gathered_kv", gathered_kv, tokens * self.world_size),
        ):
            if tensor.dtype != self.dtype or tensor.shape != (rows, self.token_dim) or rows == 0:
                raise InvalidArgument(
                    f"{name}: expected [{rows or 'T'}, {self.token_dim}] of {self.dtype}, got "
                    f"{list(tensor.shape)} of {tensor.dtype}"
                )
        if tokens * self.world_size > self.max_gathered_tokens:
            torch.distributed.all_gather_into_tensor(gathered_kv, local_kv, group=self.group)
        else:
            self._gather.gather_into(local_kv, gathered_kv, _ubatch_source()())

    def check(self) -> None:
        """Raise what an earlier call failed with on the device, if one has."""
        self._gather.check()


def register() -> bool:
    """Add the operator to ``torch.ops._C``, unless the vLLM that is installed has it. Returns
    whether it was added."""
    global _library
    from . import ops

    # They define the operators that a vLLM was built with.
    for extension in ("vllm._C", "vllm._C_stable_libtorch"):
        try:
            importlib.import_module(extension)
        except ImportError:
            pass
    if hasattr(torch.ops._C, ops.NAME):
        return False
    _library = torch.library.Library("_C", "FRAGMENT")
    _library.define(ops.NAME + ops.SCHEMA)
    _library.impl(ops.NAME, ops.kv_gather, "CUDA")
    torch.library.register_fake(f"_C::{ops.NAME}", ops._fake, lib=_library)
    return True


#: A library takes what it registered away when it goes.
_library: Any = None


@functools.cache
def _ubatch_source() -> Callable[[], int]:
    """What tells the ubatch that vLLM's thread is in; without vLLM there is one."""
    try:
        from vllm.v1.worker.ubatching import dbo_current_ubatch_id
    except ImportError:
        return lambda: 0
    return dbo_current_ubatch_id
