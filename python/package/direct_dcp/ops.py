"""The operators for torch, registered when this is imported.

``torch.ops.direct_dcp.direct_dcp_kv_gather`` has vLLM's signature, its effect on every tensor and
its wire protocol: ranks that run its own kernel and ranks that run this one can share a group. A
call is one launch on the current stream, and may be captured into a graph after a first eager call
or :func:`prepare`.

``torch.ops.direct_dcp.direct_dcp_kv_gather_peers`` takes the addresses of each rank's buffers
instead of multicast ones, for machines without multicast. A rank's own rows go to ``gathered_kv``
only, not to its own ``received_kv``.

On a failure nothing traps. The epoch stays as it was; the next call with these buffers, and
:func:`check`, raise the error, until :func:`reset`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _native
from .errors import Error, InvalidArgument

#: Seconds that a call waits for its peers, once it runs.
timeout = 30.0

NAME = "direct_dcp_kv_gather"

_TENSORS = (
    "Tensor local_kv, Tensor! received_kv, Tensor! received_signal, Tensor! completion, "
    "Tensor! epoch, Tensor! gathered_kv, int world_size, int rank, int max_gathered_tokens, "
)

#: The signature of the operator, after its name.
SCHEMA = f"({_TENSORS}int kv_mc_ptr, int signal_mc_ptr) -> ()"

_PEER_LISTS = f"({_TENSORS}int[] kv_peer_ptrs, int[] signal_peer_ptrs, int sharing=1) -> ()"
_PEER_TABLES = f"({_TENSORS}Tensor kv_peer_ptrs, Tensor signal_peer_ptrs, int sharing=1) -> ()"

_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def kv_gather(
    local_kv: torch.Tensor,
    received_kv: torch.Tensor,
    received_signal: torch.Tensor,
    completion: torch.Tensor,
    epoch: torch.Tensor,
    gathered_kv: torch.Tensor,
    world_size: int,
    rank: int,
    max_gathered_tokens: int,
    kv_mc_ptr: int,
    signal_mc_ptr: int,
) -> None:
    """The operator ``direct_dcp_kv_gather`` on CUDA."""
    tensors = (local_kv, received_kv, received_signal, completion, epoch, gathered_kv)
    _check(tensors, world_size, rank, max_gathered_tokens)
    if kv_mc_ptr == 0 or signal_mc_ptr == 0:
        raise InvalidArgument(
            "kv_mc_ptr and signal_mc_ptr: expected multicast addresses, got 0; where there is no "
            f"multicast, {NAME}_peers takes the addresses of the peers"
        )
    _launch(tensors, world_size, rank, ((kv_mc_ptr, signal_mc_ptr),), 1)


def kv_gather_peers(
    local_kv: torch.Tensor,
    received_kv: torch.Tensor,
    received_signal: torch.Tensor,
    completion: torch.Tensor,
    epoch: torch.Tensor,
    gathered_kv: torch.Tensor,
    world_size: int,
    rank: int,
    max_gathered_tokens: int,
    kv_peer_ptrs: Any,
    signal_peer_ptrs: Any,
    sharing: int = 1,
) -> None:
    """The operator ``direct_dcp_kv_gather_peers`` on CUDA: ``sharing`` ranks are on this device."""
    tensors = (local_kv, received_kv, received_signal, completion, epoch, gathered_kv)
    _check(tensors, world_size, rank, max_gathered_tokens)
    peers = _peers(kv_peer_ptrs, signal_peer_ptrs, world_size, sharing)
    _launch(tensors, world_size, rank, peers, sharing)


def prepare(
    received_kv: torch.Tensor,
    received_signal: torch.Tensor,
    epoch: torch.Tensor,
    world_size: int,
    rank: int,
    kv_ptrs: Any,
    signal_ptrs: Any,
    sharing: int = 1,
) -> None:
    """Do what the first call with these buffers would: compile the kernel and allocate its state.

    For calls whose first one is captured, and for ranks that share a device: a driver may let an
    allocation wait until the device is idle, while a peer's call waits for this rank. The pointers
    are those of the operator that will be called.
    """
    if isinstance(kv_ptrs, int):
        receivers: tuple[tuple[int, int], ...] = ((kv_ptrs, signal_ptrs),)
    else:
        receivers = _peers(kv_ptrs, signal_ptrs, world_size, sharing)
    _lane(received_kv, received_signal, epoch, world_size, rank, receivers, sharing)


def check() -> None:
    """Raise what a call failed with on the device, if one has."""
    for lane in _lanes.values():
        lane.check()


def reset() -> None:
    """Forget failures, once every rank has made its buffers as new: signals, epochs and all."""
    for (index, *_), lane in _lanes.items():
        try:
            lane.check()
        except Error:
            lane.forget(torch._C._cuda_getCurrentRawStream(index))


def _check(
    tensors: tuple[torch.Tensor, ...], world_size: int, rank: int, max_gathered_tokens: int
) -> None:
    """Refuses what cannot work, before anything is launched or written."""
    local, received, signal, completion, epoch, gathered = tensors
    dtype, index = local.dtype, local.get_device()
    if not local.is_cuda:
        raise InvalidArgument(f"local_kv: expected a CUDA tensor, got one on {local.device}")
    if dtype not in _DTYPES:
        raise InvalidArgument(
            f"local_kv: expected float16, bfloat16 or float8_e4m3fn elements, got {dtype}"
        )
    if local.dim() != 2 or not local.is_contiguous():
        raise _wrong("local_kv", "a contiguous [T, D]", local)
    if world_size <= 1:
        raise InvalidArgument(f"world_size: expected at least 2 ranks, got {world_size}")
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"rank: expected 0 to {world_size - 1}, got {rank}")
    tokens, dim = local.shape
    if tokens == 0 or dim == 0:
        raise _wrong("local_kv", "T and D above 0", local)
    if tokens * world_size > max_gathered_tokens:
        raise InvalidArgument(
            f"local_kv: {tokens} tokens of each of {world_size} ranks exceed the capacity of "
            f"{max_gathered_tokens}, max_gathered_tokens"
        )
    expected: list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]] = [
        ("received_kv", received, dtype, (2, max_gathered_tokens, dim)),
        ("received_signal", signal, torch.int32, (2, world_size)),
        ("completion", completion, torch.int32, (2,)),
        ("epoch", epoch, torch.int64, (1,)),
        ("gathered_kv", gathered, dtype, (world_size * tokens, dim)),
    ]
    for name, tensor, wanted, shape in expected:
        # Of the counters only the number of elements matters.
        same = tensor.numel() == shape[0] if len(shape) == 1 else tensor.shape == shape
        if tensor.dtype != wanted or not same or not tensor.is_contiguous():
            raise _wrong(name, f"a contiguous {list(shape)} of {wanted}", tensor)
        if tensor.get_device() != index:
            raise InvalidArgument(
                f"{name}: expected the device of local_kv, {local.device}, got {tensor.device}"
            )
    row_bytes = dim * local.element_size()
    aligned = {
        "the address of local_kv": local.data_ptr(),
        "the address of received_kv": received.data_ptr(),
        "the address of gathered_kv": gathered.data_ptr(),
        "a slice in bytes": tokens * row_bytes,
        "a slot in bytes": max_gathered_tokens * row_bytes,
    }
    for what, value in aligned.items():
        if value % 16:
            raise InvalidArgument(f"{what}: expected a 16-byte multiple, got {value}")


def _wrong(name: str, expected: str, tensor: torch.Tensor) -> InvalidArgument:
    kind = "a contiguous" if tensor.is_contiguous() else "a strided"
    return InvalidArgument(
        f"{name}: expected {expected}, got {kind} {list(tensor.shape)} of {tensor.dtype}"
    )


def _peers(rows: Any, signals: Any, world_size: int, sharing: int) -> tuple[tuple[int, int], ...]:
    if sharing < 1:
        raise InvalidArgument(f"sharing: expected at least this rank, got {sharing}")
    rows = _table("kv_peer_ptrs", rows, world_size)
    signals = _table("signal_peer_ptrs", signals, world_size)
    return tuple(zip(rows, signals))


def _table(name: str, pointers: Any, world_size: int) -> list[int]:
    if isinstance(pointers, torch.Tensor):
        if pointers.dtype != torch.int64 or pointers.device.type != "cpu":
            raise InvalidArgument(
                f"{name}: expected int64 on the CPU, where the host reads it, got "
                f"{pointers.dtype} on {pointers.device}"
            )
        pointers = pointers.tolist()
    if len(pointers) != world_size or not all(pointers):
        raise InvalidArgument(f"{name}: expected {world_size} addresses, got {list(pointers)}")
    return pointers


@functools.cache
def _kernel(index: int, multicast: bool) -> _native.Kernel:
    return _native.Kernel(index, multicast)


#: By everything that a lane is made of. Graphs may refer to them, so they stay.
_lanes: dict[tuple[Any, ...], _native.Lane] = {}


def _lane(
    received: torch.Tensor,
    signal: torch.Tensor,
    epoch: torch.Tensor,
    world_size: int,
    rank: int,
    receivers: tuple[tuple[int, int], ...],
    sharing: int,
) -> _native.Lane:
    index = received.get_device()
    own = (received.data_ptr(), signal.data_ptr())
    slot_bytes = received.nbytes // 2
    rest = (epoch.data_ptr(), sharing)
    key = (index, world_size, rank, slot_bytes, own, receivers, *rest)
    lane = _lanes.get(key)
    if lane is None:
        if torch.cuda.is_current_stream_capturing():
            raise Error(f"{NAME}: the first call allocates; prepare, or make one eagerly")
        # One address that reaches all ranks is a multicast one.
        kernel = _kernel(index, len(receivers) == 1)
        lane = kernel.lane(world_size, rank, slot_bytes, own, list(receivers), *rest)
        _lanes[key] = lane
    return lane


def _launch(
    tensors: tuple[torch.Tensor, ...],
    world_size: int,
    rank: int,
    receivers: tuple[tuple[int, int], ...],
    sharing: int,
) -> None:
    # The kernel counts arrivals in memory of its own: completion is 0 before and after, as it is.
    local, received, signal, _, epoch, gathered = tensors
    tokens = local.shape[0]
    _lane(received, signal, epoch, world_size, rank, receivers, sharing).gather_into(
        tokens,
        local.nbytes // tokens,
        (local.data_ptr(), local.nbytes),
        (gathered.data_ptr(), gathered.nbytes),
        torch._C._cuda_getCurrentRawStream(local.get_device()),
        timeout,
    )


def _fake(*_: Any, **__: Any) -> None:
    """Nothing is returned, so there is no shape to tell."""


_library = torch.library.Library("direct_dcp", "FRAGMENT")
for _name, _schema, _body in (
    (NAME, SCHEMA, kv_gather),
    (f"{NAME}_peers", _PEER_LISTS, kv_gather_peers),
    (f"{NAME}_peers.tables", _PEER_TABLES, kv_gather_peers),
):
    _library.define(_name + _schema)
    _library.impl(_name, _body, "CUDA")
    torch.library.register_fake(f"direct_dcp::{_name}", _fake, lib=_library)
