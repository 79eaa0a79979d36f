"""What a workspace is asked to be: sizes, a device, and the elements of a row."""

from __future__ import annotations

import sys
from typing import Any

from .errors import InvalidArgument

# The names of element types that the ranks compare. All others travel as bytes.
_NAMED = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3"}

# Bytes of an element, by the names that torch and numpy share.
_SIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def check_sizes(**sizes: int) -> None:
    """Refuses what is no size at all; the library knows which sizes fit."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or not 0 <= size < 1 << 63:
            raise InvalidArgument(f"{name}: expected a whole number, 0 or more, got {size!r}")


def check_kind(kind: type, **arguments: Any) -> None:
    """Refuses what is of another class."""
    for name, argument in arguments.items():
        if not isinstance(argument, kind):
            got = type(argument).__name__
            raise InvalidArgument(f"{name}: expected a {kind.__name__}, got {got}")


def ordinal(device: Any) -> int | None:
    if isinstance(device, int):
        check_sizes(device=device)
    if device is None or isinstance(device, int):
        return device
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return None
    # No machine has a device of ten digits.
    if kind != "cuda" or not (index.isdecimal() and len(index) < 10 or index == ""):
        raise InvalidArgument(f"device: expected 'cpu', 'cuda', 'cuda:1' or the like, got {device!r}")
    if index:
        return int(index)
    torch = sys.modules.get("torch")
    return 0 if torch is None else torch.cuda.current_device()


def row_format(row_bytes: int | None, dtype: Any, dim: int | None) -> tuple[str, int, int]:
    """The name of the element type, elements of a row, bytes of a row."""
    wrong = InvalidArgument("KvGather: expected either row_bytes, or dtype and dim")
    if dtype is None or dim is None:
        if row_bytes is None or dtype is not dim:
            raise wrong
        check_sizes(row_bytes=row_bytes)
        return "bytes", row_bytes, row_bytes
    if row_bytes is not None:
        raise wrong
    check_sizes(dim=dim)
    name = getattr(dtype, "__name__", None) or str(dtype)
    name = name.removeprefix("torch.")
    size = _SIZES.get(name) or getattr(dtype, "itemsize", None)
    if not isinstance(size, int):
        size = _numpy_size(dtype)
    if size is None:
        raise InvalidArgument(
            f"dtype: {dtype!r} is unknown; expected a type of torch's or numpy's, or one of "
            f"{', '.join(_SIZES)}; for any other pass row_bytes in place of dtype and dim"
        )
    return (_NAMED[name], dim, dim * size) if name in _NAMED else ("bytes", dim * size, dim * size)


def _numpy_size(dtype: Any) -> int | None:
    """Bytes of what only numpy knows, such as its scalar classes, if the caller has imported it."""
    numpy = sys.modules.get("numpy")
    try:
        return numpy and numpy.dtype(dtype).itemsize
    except (TypeError, ValueError):
        return None
