"""Results in slots, lent until they are released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import Error


class _Lent:
    """What holds a slot until :meth:`release` or the end of the ``with``."""

    def __init__(self, lent: Any, release: Callable[[], None]) -> None:
        self._lent = lent
        self._release = release

    def release(self) -> None:
        """Let the slot go: on a GPU, after what the stream that is current has to do so far. What
        was lent is not to be used afterwards. A second call does nothing."""
        self._lent = None
        self._release()

    def _held(self) -> Any:
        if self._lent is None:
            raise Error("what was lent was released; gather again")
        return self._lent

    def __enter__(self) -> Any:
        return self._held()

    def __exit__(self, *_: object) -> None:
        self.release()


class Gathered(_Lent):
    """The rows of all ranks in a slot, held until :meth:`release` or the end of the ``with``."""

    @property
    def rows(self) -> Any:
        """``[world_size * T, ...]``, in rank order: a tensor or an array like ``local``, a read-only
        memoryview for other buffers, and on GPUs an object with ``__cuda_array_interface__``.

        Raises Error once they were released."""
        return self._held()


class Planes(_Lent):
    """The rows of all ranks in their final layout, in a slot that is held until :meth:`release` or
    the end of the ``with``."""

    @property
    def planes(self) -> tuple[Any, ...]:
        """Of each plane ``[total_rows, elements]``, in the same forms as :attr:`Gathered.rows`.

        Raises Error once they were released."""
        return self._held()
