"""Rows as callers have them, tensors, arrays and buffers, and as the native module takes them:
address and size.

torch and numpy are used where the caller's objects are theirs, and never imported for anything
else.
"""

from __future__ import annotations

import sys
from typing import Any

from . import _buffer
from .errors import InvalidArgument

Span = tuple[int, int]


def is_tensor(rows: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(rows, torch.Tensor)


def host(what: str, rows: Any, *, writable: bool = False) -> Any:
    """A context in which `rows` have an address in host memory."""
    if is_tensor(rows):
        return _Tensor(what, rows)
    return _buffer.Exported(what, rows, _buffer.CONTIGUOUS | (writable and _buffer.WRITABLE))


class _Tensor:
    """A tensor, which has an address all the time."""

    def __init__(self, what: str, rows: Any) -> None:
        if rows.device.type != "cpu":
            raise InvalidArgument(
                f"{what}: expected memory of the CPU, as the gather was built for, got a tensor "
                f"on {rows.device}"
            )
        if not rows.is_contiguous():
            raise InvalidArgument(f"{what}: expected a contiguous tensor")
        self._span = (rows.data_ptr(), rows.nbytes)

    def __enter__(self) -> Span:
        return self._span

    def __exit__(self, *_: object) -> None:
        pass


def device(what: str, rows: Any, index: int) -> Span:
    """The address and the size of rows on device `index`."""
    if is_tensor(rows):
        if not rows.is_cuda or rows.get_device() != index:
            raise InvalidArgument(
                f"{what}: expected a tensor on cuda:{index}, as the gather was built for, got one "
                f"on {rows.device}"
            )
        if not rows.is_contiguous():
            raise InvalidArgument(f"{what}: expected a contiguous tensor")
        return rows.data_ptr(), rows.nbytes
    interface = getattr(rows, "__cuda_array_interface__", None)
    if interface is None:
        raise InvalidArgument(
            f"{what}: expected a tensor or an array on cuda:{index}, got {type(rows).__name__}"
        )
    if interface.get("strides") is not None:
        raise InvalidArgument(f"{what}: expected a contiguous array")
    nbytes = int(interface["typestr"][2:])
    for extent in interface["shape"]:
        nbytes *= extent
    return interface["data"][0], nbytes


class OnDevice:
    """Bytes at a device address, in the form that every library for GPUs takes."""

    def __init__(self, address: int, nbytes: int, keep: Any) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def lent_on_host(like: Any, address: int, nbytes: int, keep: Any) -> Any:
    """Rows at an address in host memory, in the form of `like`: a tensor, an array or bytes."""
    memory = _buffer.lent(address, nbytes, keep)
    if is_tensor(like):
        torch = sys.modules["torch"]
        return _shaped(torch.frombuffer(memory, dtype=torch.uint8), like)
    readonly = memoryview(memory).cast("B").toreadonly()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(like, numpy.ndarray):
        return _shaped(numpy.frombuffer(readonly, dtype=numpy.uint8), like)
    return readonly


def lent_on_device(like: Any, address: int, nbytes: int, keep: Any) -> Any:
    """Rows at a device address, in the form of `like`: a tensor, or an array that others take."""
    array = OnDevice(address, nbytes, keep)
    if is_tensor(like):
        torch = sys.modules["torch"]
        return _shaped(torch.as_tensor(array, device=like.device), like)
    return array


def _shaped(rows: Any, like: Any) -> Any:
    """Bytes, seen as rows of the type and the shape of those of `like`."""
    return rows.view(like.dtype).reshape((-1, *like.shape[1:]))
