"""Direct symmetric-memory KV gather for decode context parallelism.

The KV cache of a sequence is sharded over ranks; a gather hands every rank the rows of all::

    group = direct_dcp.Group.from_torch()                     # or from_env, or threads
    gather = direct_dcp.KvGather(group, 65536, dtype=torch.bfloat16, dim=576, device="cuda")
    gather.gather_into(local, out)                            # [T, 576] -> [world_size * T, 576]

``direct_dcp.plan`` says which rows to gather, and where they belong.

Importing this imports neither torch nor numpy, and touches no GPU. ``direct_dcp.ops`` registers the
operators for torch, ``direct_dcp.vllm`` has what vLLM calls.
"""

from . import plan
from ._gather import KvGather, Status, memory_bytes
from ._layout import FinalLayout
from ._lent import Gathered, Planes
from ._native import Group, __version__
from ._pipeline import Pipeline, Ticket
from .errors import (
    Aborted,
    Error,
    Excluded,
    InvalidArgument,
    Mismatch,
    PeerLost,
    Poisoned,
    SlotInUse,
    Timeout,
    Unsupported,
)

__all__ = [
    "Aborted",
    "Error",
    "Excluded",
    "FinalLayout",
    "Gathered",
    "Group",
    "InvalidArgument",
    "KvGather",
    "Mismatch",
    "PeerLost",
    "Pipeline",
    "Planes",
    "Poisoned",
    "SlotInUse",
    "Status",
    "Ticket",
    "Timeout",
    "Unsupported",
    "__version__",
    "check",
    "memory_bytes",
    "plan",
]


def check() -> None:
    """Raise what a call of an operator failed with on the device, if one has.

    Without ``direct_dcp.ops`` there are no such calls, and this does nothing.
    """
    import sys

    ops = sys.modules.get("direct_dcp.ops")
    if ops is not None:
        ops.check()
