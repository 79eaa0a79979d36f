"""Rows as callers have them, tensors, arrays and buffers, and as the native module takes them:
address and size. And rows that it lends, as callers want them.

torch and numpy are used where the caller's objects are theirs, and never imported for anything
else.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _buffer, _native
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


def kept(what: str, rows: Any) -> tuple[Span, Any]:
    """The address and the size of `rows` in host memory, and who keeps them there."""
    with host(what, rows) as span:
        return span, rows if is_tensor(rows) else memoryview(rows)


class _Tensor:
    """A tensor, which has an address all the time."""

    def __init__(self, what: str, rows: Any) -> None:
        span = _native.span(rows, None)
        if span is None:
            on_cpu(what, rows)
            _as_in_memory(what, rows)
            span = rows.data_ptr(), rows.nbytes
        self._span = span

    def __enter__(self) -> Span:
        return self._span

    def __exit__(self, *_: object) -> None:
        pass


def _as_in_memory(what: str, tensor: Any) -> None:
    """Refuses tensors whose elements are not what lies in memory, one behind the other."""
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{what}: expected a contiguous tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"{what}: expected a tensor without conjugate or negative bit")


def on_cpu(what: str, tensor: Any) -> None:
    """Refuses tensors on other devices."""
    if tensor.device.type != "cpu":
        raise InvalidArgument(
            f"{what}: expected memory of the CPU, as the gather was built for, got a tensor "
            f"on {tensor.device}"
        )


def device(what: str, rows: Any, index: int) -> Span:
    """The address and the size of rows on device `index`."""
    span = _native.span(rows, index)
    if span is not None:
        return span
    if is_tensor(rows):
        _on_device(what, rows, index)
        _as_in_memory(what, rows)
        return rows.data_ptr(), rows.nbytes
    interface = _interface(what, rows, index)
    if interface.get("strides") is not None:
        raise InvalidArgument(f"{what}: expected a contiguous array")
    nbytes = int(interface["typestr"][2:])
    for extent in interface["shape"]:
        nbytes *= extent
    return interface["data"][0], nbytes


def device_address(what: str, rows: Any, index: int) -> int:
    """The address of rows on device `index`."""
    if is_tensor(rows):
        _on_device(what, rows, index)
        return rows.data_ptr()
    return _interface(what, rows, index)["data"][0]


def _on_device(what: str, tensor: Any, index: int) -> None:
    """Refuses tensors that are not on device `index`."""
    if not tensor.is_cuda or tensor.get_device() != index:
        raise InvalidArgument(
            f"{what}: expected a tensor on cuda:{index}, as the gather was built for, got one "
            f"on {tensor.device}"
        )


def _interface(what: str, rows: Any, index: int) -> dict[str, Any]:
    """How arrays on devices say where they are."""
    interface = getattr(rows, "__cuda_array_interface__", None)
    if interface is None:
        raise InvalidArgument(
            f"{what}: expected a tensor or an array on cuda:{index}, got {type(rows).__name__}"
        )
    return interface


def words(what: str, values: Any, codes: str = "iI") -> bytes:
    """Whole numbers of 32 bits, as the machine has them; those of arrays of these type codes as they
    are."""
    try:
        if is_tensor(values):
            values = values.numpy()
        if _is_words(values, codes):
            return memoryview(values).tobytes()
        return array("i", iter(values)).tobytes()
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidArgument(f"{what}: expected whole numbers of 32 bits: {error}") from None


def _is_words(values: Any, codes: str) -> bool:
    try:
        return memoryview(values).format in tuple(codes)
    except TypeError:
        return False


def device_words(what: str, values: Any, index: int) -> Span:
    """The address and the size of whole numbers of 32 bits on device `index`."""
    span = device(what, values, index)
    if is_tensor(values):
        name = str(values.dtype).removeprefix("torch.")
    else:
        name = values.__cuda_array_interface__["typestr"]
    if name not in ("int32", "uint32", "<i4", "<u4"):
        raise InvalidArgument(f"{what}: expected whole numbers of 32 bits, got {name}")
    return span


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


class Form(NamedTuple):
    """What lent bytes are seen as."""

    #: "torch", "numpy", or "" for plain bytes.
    kind: str
    dtype: Any = None
    #: Of one row.
    shape: tuple[int, ...] = ()
    #: The tensor's device.
    device: Any = None

    @staticmethod
    def of(rows: Any) -> Form:
        """The form of a caller's rows."""
        if is_tensor(rows):
            return Form("torch", rows.dtype, rows.shape[1:], rows.device)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(rows, numpy.ndarray):
            return Form("numpy", rows.dtype, rows.shape[1:])
        return Form("")

    def plane(self, nbytes: int) -> Form:
        """The form of ``nbytes`` bytes of each row."""
        if not self.kind:
            return self
        elements, rest = divmod(nbytes, self.dtype.itemsize)
        if rest:
            raise InvalidArgument(
                f"rows: expected elements that make up a plane of {nbytes} bytes, got {self.dtype}"
            )
        return self._replace(shape=(elements,))

    def bf16(self) -> Form:
        """The same form, of bf16 elements; numpy, which has no such type, gets their bits."""
        if self.kind == "torch":
            return self._replace(dtype=sys.modules["torch"].bfloat16)
        if self.kind == "numpy":
            return self._replace(dtype=sys.modules["numpy"].dtype("uint16"))
        return self

    def rows(self, flat: Any) -> Any:
        """Bytes of a tensor or an array, in this form."""
        return flat.view(self.dtype).reshape((-1, *self.shape))


def lend(
    spans: Iterable[Span], forms: Iterable[Form], device: int | None, keep: Any
) -> tuple[Any, ...]:
    """Lent memory, each piece in its form, on a device or in host memory."""
    lent = _lent_on_host if device is None else _lent_on_device
    return tuple(lent(form, span, keep) for form, span in zip(forms, spans))


def _lent_on_host(form: Form, span: Span, keep: Any) -> Any:
    """Bytes at an address in host memory: a tensor, an array or a memoryview."""
    address, nbytes = span
    memory = _buffer.lent(address, nbytes, keep)
    if form.kind == "torch":
        torch = sys.modules["torch"]
        byte = torch.uint8
        # It refuses memory without bytes, as memoryview.cast does.
        empty = torch.empty(0, dtype=byte)
        return form.rows(torch.frombuffer(memory, dtype=byte) if nbytes else empty)
    readonly = memoryview(memory).cast("B").toreadonly() if nbytes else memoryview(b"")
    if form.kind == "numpy":
        return form.rows(sys.modules["numpy"].frombuffer(readonly, dtype="uint8"))
    return readonly


def _lent_on_device(form: Form, span: Span, keep: Any) -> Any:
    """Bytes at a device address: a tensor, or an array that others take."""
    there = OnDevice(*span, keep)
    if form.kind == "torch":
        return form.rows(sys.modules["torch"].as_tensor(there, device=form.device))
    return there
