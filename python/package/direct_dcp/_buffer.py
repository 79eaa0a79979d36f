"""Addresses of host memory, by the buffer protocol, with neither numpy nor a C API that the stable
ABI of Python 3.10 lacks."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from .errors import InvalidArgument

# The flags of PyObject_GetBuffer: contiguous in C order with the elements' format, the same with
# gaps, and room to write.
CONTIGUOUS = 0x3C
STRIDED = 0x1C
WRITABLE = 0x1


class _View(ctypes.Structure):
    """Py_buffer, of which only the address and the size are of interest."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_acquire = ctypes.pythonapi.PyObject_GetBuffer
_acquire.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_acquire.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.c_void_p]
_release.restype = None


class Exported:
    """The memory of an object that exports a contiguous buffer, which cannot move meanwhile."""

    def __init__(self, what: str, of: Any, flags: int) -> None:
        # PyBuffer_Release gives the reference in `obj` back; the structure must not do so again.
        self._view = ctypes.create_string_buffer(ctypes.sizeof(_View))
        try:
            _acquire(of, self._view, flags)
        except (BufferError, TypeError, ValueError) as error:
            kind = "a contiguous" if flags & CONTIGUOUS == CONTIGUOUS else "an"
            kind += ", writable" if flags & WRITABLE else ""
            raise InvalidArgument(
                f"{what}: expected {kind} array, tensor or buffer, got {type(of).__name__}: {error}"
            ) from None
        where = ctypes.c_void_p.from_buffer(self._view, _View.format.offset).value
        # The names of fields are no types.
        types = re.sub(rb":[^:]*:", b"", ctypes.string_at(where)) if where else b"B"
        if b"O" in types or b"&" in types:
            _release(self._view)
            raise InvalidArgument(
                f"{what}: expected elements that are bytes, got references to objects"
            )

    def __enter__(self) -> tuple[int, int]:
        address = ctypes.c_void_p.from_buffer(self._view, _View.buf.offset).value or 0
        return address, ctypes.c_ssize_t.from_buffer(self._view, _View.len.offset).value

    def __exit__(self, *_: object) -> None:
        _release(self._view)


def lent(address: int, nbytes: int, keep: Any) -> ctypes.Array[ctypes.c_ubyte]:
    """Memory at an address, as an object that exports it and keeps `keep` alive."""
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    memory.keep = keep  # type: ignore[attr-defined]
    return memory
