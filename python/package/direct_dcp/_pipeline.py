"""Windows in flight: gathers that go on while earlier results are read."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

from . import _native, _rows
from ._gather import KvGather
from ._layout import FinalLayout
from ._lent import Gathered, Planes
from ._options import check_kind

_Result = TypeVar("_Result", Gathered, Planes)


class Ticket(Generic[_Result]):
    """A window that was submitted.

    Without references to the ticket the window is given up: gathered, and skipped in the order.
    """

    def __init__(self, native: _native.Ticket, forms: list[_rows.Form], kind: type) -> None:
        self._native = native
        self._forms = forms
        self._kind = kind

    @property
    def epoch(self) -> int:
        """The call of its ubatch that delivers the window, from 1."""
        return self._native.epoch


class Pipeline:
    """Gathers on one ubatch that overlap with the reading of earlier results, the *windows*::

        with direct_dcp.Pipeline(gather) as pipeline:
            ticket = pipeline.submit(locals[0])
            for local in locals[1:]:
                following = pipeline.submit(local)
                with pipeline.acquire(ticket) as rows:    # while the following one is gathered
                    attend(rows)
                ticket = following
            with pipeline.acquire(ticket) as rows:
                attend(rows)

    All ranks submit the same windows in the same order. With S slots, a window must be released
    before the one S - 1 later is submitted, so the loop above needs ``slots=3``. Nobody else makes
    calls on ``ubatch`` meanwhile.

    In host memory a thread gathers, on a GPU a stream of the pipeline's own. A window that fails
    raises where it is acquired, and so does every later one.

    The end of the ``with`` block is that of the pipeline: windows that were submitted are gathered
    all the same, for the peers' sake, each within the gather's timeout. What was acquired stays
    valid.
    """

    def __init__(self, gather: KvGather, ubatch: int = 0) -> None:
        #: Rows on a GPU that windows are gathered from, and their calls.
        self._sources: deque[tuple[int, Any]] = deque()
        check_kind(KvGather, gather=gather)
        self._native = gather._native.pipeline(ubatch)
        self._gather = gather
        self._workspace = gather._native

    def submit(self, local: Any, *, stream: int | None = None) -> Ticket[Gathered]:
        """Queue the next window: ``local``, ``[T, ...]``, of all ranks, in rank order. It is not to
        be written before the window was acquired.

        On a GPU, ``local`` is ready once torch's current stream, or ``stream``, has done what was
        submitted to it so far.

        Raises SlotInUse where the window S - 1 before this one was not acquired, or is held, and
        InvalidArgument, after either of which the caller may go on; else what ended the pipeline.
        """
        forms = [_rows.Form.of(local)]
        index = self._gather.device
        if index is None:
            native = self._native.submit(*_rows.kept("local", local), 0)
        else:
            span = _rows.device("local", local, index)
            native = self._native.submit(span, local, self._gather._raw(stream))
            self._sources.append((native.epoch, local))
        return Ticket(native, forms, Gathered)

    def submit_final(self, local: Any, layout: FinalLayout) -> Ticket[Planes]:
        """Queue the next window, in its final layout: ``local`` is ``[layout.local_rows, ...]``.

        Raises what :meth:`submit` and :meth:`KvGather.gather_final` do, and Unsupported on GPUs.
        """
        index = self._gather.device
        forms = FinalLayout._checked(layout)._forms(local, index, None)
        span, owner = _rows.kept("local", local) if index is None else ((0, 0), local)
        native = self._native.submit_final(span, owner, layout._native)
        return Ticket(native, forms, Planes)

    def acquire(self, ticket: Ticket[_Result], *, stream: int | None = None) -> _Result:
        """Wait for a window, and lend it until it is released: ``with pipeline.acquire(ticket) as
        rows``. On a GPU, what is submitted to the stream later waits, and the host does not.

        Windows are acquired once each, in the order in which they were submitted: InvalidArgument
        otherwise, and the ticket stays good. Else it raises what the gather failed with, this one
        or an earlier one.
        """
        check_kind(Ticket, ticket=ticket)
        raw, device = self._gather._raw, self._gather.device
        native = self._native.acquire(ticket._native, raw(stream))
        # The stream waits for all windows up to this one.
        while self._sources and self._sources[0][0] <= ticket.epoch:
            self._sources.popleft()
        pieces = _rows.lend(native.spans, ticket._forms, device, self._workspace)
        lent = pieces[0] if ticket._kind is Gathered else pieces
        return ticket._kind(lent, lambda: native.release(raw(stream)))

    def close(self, *, stream: int | None = None) -> None:
        """End the pipeline. On a GPU, what is submitted to the stream later comes after all windows
        that were submitted. A second call does nothing."""
        self._native.close(self._gather._raw(stream))
        self._sources.clear()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Memory of windows under way may be freed only after them.
        if self._sources:
            self.close()
