"""Results in slots, lent until they are released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Lent:
    """What holds a slot until :meth:`release` or the end of the ``with``."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def release(self) -> None:
        """Let the slot go: on a GPU, after what the stream that is current has to do so far. What
        was lent is not to be used afterwards. A second call does nothing."""
        self._release()

    def __exit__(self, *_: object) -> None:
        self.release()


class Gathered(_Lent):
    """The rows of all ranks in a slot, held until :meth:`release` or the end of the ``with``."""

    #: ``[world_size * T, ...]``, in rank order: a tensor or an array like ``local``, a read-only
    #: memoryview for other buffers, and on GPUs an object with ``__cuda_array_interface__``.
    rows: Any

    def __init__(self, rows: Any, release: Callable[[], None]) -> None:
        super().__init__(release)
        self.rows = rows

    def __enter__(self) -> Any:
        return self.rows


class Planes(_Lent):
    """The rows of all ranks in their final layout, in a slot that is held until :meth:`release` or
    the end of the ``with``."""

    #: Of each plane ``[total_rows, elements]``, in the same forms as :attr:`Gathered.rows`.
    planes: tuple[Any, ...]

    def __init__(self, planes: tuple[Any, ...], release: Callable[[], None]) -> None:
        super().__init__(release)
        self.planes = planes

    def __enter__(self) -> tuple[Any, ...]:
        return self.planes
