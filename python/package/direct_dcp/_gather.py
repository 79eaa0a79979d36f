"""The gather: rows of every rank to every rank."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NamedTuple

from . import _native, _rows
from ._layout import FinalLayout
from ._lent import Gathered, Planes
from ._options import check_sizes, ordinal, row_format
from ._source import source
from .errors import Error

_log = logging.getLogger("direct_dcp")

#: Devices hand out memory in pieces of this size.
_GRANULARITY = 2 << 20


class Status(NamedTuple):
    """Where a rank stands."""

    generation: int
    #: How rows travel.
    way: str
    #: Calls completed, per ubatch.
    epochs: list[int]
    #: The error that ended the generation on this rank, if one did.
    failure: str | None


class KvGather:
    """Gathers KV rows over the ranks of a group. Building one is collective.

    - ``group``: this rank's.
    - ``capacity_rows``: the most that one gather delivers, over all ranks: a multiple of the world
      size.
    - ``row_bytes``: bytes of a row; or ``dtype`` and ``dim``: a row is ``dim`` elements of a type
      of torch's or numpy's, or of a name such as ``"bfloat16"``.
    - ``slots``: results that a ubatch has room for, 2 or more: a lent one must be released before
      the call ``slots - 1`` calls later.
    - ``ubatches``: independent sequences of calls.
    - ``device``: where the rows are: None or ``"cpu"``, or a GPU by number, ``"cuda"``,
      ``"cuda:1"`` or a torch.device.
    - ``way``: how rows travel; None lets the group choose. On CPUs ``"shared-slot"``, ``"push"`` or
      ``"pull"``; on GPUs ``"multicast"``, ``"push"``, ``"pull"``, ``"copy-engine"`` or
      ``"staged"``.
    - ``blocks``: the most multiprocessors of a GPU to use; None for as many as help.
    - ``tuning``: a file that ``direct-dcp bench --tune`` wrote: which way calls of what size take.
    - ``timeout``: seconds that a call waits for peers; ``first_timeout``: the first of a ubatch.

    All but ``group``, ``device``, ``blocks`` and the timeouts must be equal on all ranks.

    Raises InvalidArgument, Mismatch where ranks ask for different things, Unsupported where this
    machine has no driver or the way cannot be had, and what the group's collectives raise: Timeout,
    PeerLost, Aborted.

    All ranks make the same calls in the same order, per ubatch. After an error that ends the
    generation, such as Timeout or PeerLost, further calls raise Poisoned, and :meth:`rebuild` is
    the way on.
    """

    def __init__(
        self,
        group: _native.Group,
        capacity_rows: int,
        row_bytes: int | None = None,
        *,
        dtype: Any = None,
        dim: int | None = None,
        slots: int = 2,
        ubatches: int = 1,
        device: Any = None,
        way: str | None = None,
        blocks: int | None = None,
        tuning: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
        first_timeout: float = 300.0,
    ) -> None:
        name, elements, self.row_bytes = row_format(row_bytes, dtype, dim)
        check_sizes(
            capacity_rows=capacity_rows,
            row_bytes=self.row_bytes,
            slots=slots,
            ubatches=ubatches,
            blocks=1 if blocks is None else blocks,
        )
        self.group = group
        self.capacity_rows = capacity_rows
        self.slots = slots
        self.ubatches = ubatches
        #: The GPU, or None for the CPU.
        self.device = ordinal(device)
        self._options = dict(
            row_bytes=row_bytes,
            dtype=dtype,
            dim=dim,
            slots=slots,
            ubatches=ubatches,
            device=device,
            way=way,
            blocks=blocks,
            tuning=tuning,
            timeout=timeout,
            first_timeout=first_timeout,
        )
        self._native = _native.Gather(
            group,
            self.device,
            capacity_rows,
            name,
            elements,
            slots,
            ubatches,
            way,
            blocks,
            tuning,
            timeout,
            first_timeout,
        )
        # Elements of a row as the caller counts them, and what the native module has for each.
        self._dim = self.row_bytes if dim is None else dim
        self._unit = elements // self._dim
        if group.rank == 0:
            _log.info(
                "%d ranks gather by %s, %d rows of %d bytes, %d slots, %d ubatches",
                group.world_size,
                self.way,
                capacity_rows,
                self.row_bytes,
                slots,
                ubatches,
            )

    @property
    def way(self) -> str:
        """How rows travel, as the group has chosen."""
        return self._native.way

    @property
    def memory_bytes(self) -> int:
        """What :func:`memory_bytes` says of this workspace."""
        return memory_bytes(
            self.capacity_rows,
            self.row_bytes,
            self.group.world_size,
            slots=self.slots,
            ubatches=self.ubatches,
            device=None if self.device is None else "cuda",
            way=self._options["way"],
        )

    def gather_into(
        self, local: Any, out: Any, ubatch: int = 0, *, stream: int | None = None
    ) -> None:
        """Gather ``local``, ``[T, ...]``, of all ranks into ``out``, ``[world_size * T, ...]``, in
        rank order.

        On the CPU it returns when the rows are there. On a GPU it submits to torch's current
        stream, or to ``stream``, a number, and an error on the device is raised by the next call,
        :meth:`check` or :meth:`wait`. It may be captured into a graph.

        Raises InvalidArgument and SlotInUse, after which the gather is as it was; Timeout,
        PeerLost, Mismatch, Aborted and Poisoned, after which :meth:`rebuild` is the way on.
        """
        index = self.device
        if index is None:
            with _rows.host("local", local) as source, _rows.host("out", out, writable=True) as to:
                self._native.gather_into(ubatch, source, to, 0)
            return
        self._native.gather_into(
            ubatch,
            _rows.device("local", local, index),
            _rows.device("out", out, index),
            self._raw(stream),
        )

    def gather(self, local: Any, ubatch: int = 0, *, stream: int | None = None) -> Gathered:
        """Gather without a copy: ``with gather.gather(local) as rows`` lends the slot where the
        rows of all ranks are, as a tensor or an array like ``local``.

        With S slots, the block must be left before the call S - 1 calls later, which raises
        SlotInUse otherwise. The rows are not to be used after it, nor written. It raises what
        :meth:`gather_into` does.
        """
        index = self.device
        if index is None:
            with _rows.host("local", local) as source:
                native = self._native.gather(ubatch, source, 0)
        else:
            source = _rows.device("local", local, index)
            native = self._native.gather(ubatch, source, self._raw(stream))
        (rows,) = _rows.lend(native.spans, [_rows.Form.of(local)], index, self._native)
        return Gathered(rows, lambda: native.release(self._raw(stream)))

    def gather_final(
        self,
        rows: Any,
        layout: FinalLayout,
        ubatch: int = 0,
        *,
        slots: Any = None,
        scale: float | None = None,
        stream: int | None = None,
    ) -> Planes:
        """Gather each row of all ranks to its final place: ``with gather.gather_final(local,
        layout) as (first, second)`` lends the planes of ``layout``, tensors or arrays
        ``[total_rows, elements]`` of the type of ``rows``.

        - ``rows``: ``[layout.local_rows, ...]``, padding included. With ``slots``, the cache that
          they are in, ``[pages, page_rows, ...]``, which may be a view of a wider one.
        - ``slots``: whole numbers of 32 bits, on a GPU in its memory: row i is at place
          ``slots[i] % page_rows`` of page ``slots[i] // page_rows``. What stands for a row of
          padding is not looked at.
        - ``scale``: the rows are e4m3, and become bf16, each element multiplied by this; numpy gets
          the bits as uint16.

        Slots of the workspace are lent as by :meth:`gather`. The layouts of all ranks come from one
        plan, or this raises Mismatch. It raises what :meth:`gather_into` does, and Unsupported by
        the ways ``"pull"`` and ``"staged"``, and by ``"copy-engine"`` where rows are in a cache or
        converted.
        """
        index = self.device
        forms = FinalLayout._checked(layout)._forms(rows, index, scale)
        row_bytes = self.row_bytes if scale is None else self.row_bytes // 2
        with source(rows, slots, row_bytes, index) as (memory, pages):
            native = self._native.gather_final(
                ubatch, (memory, pages, scale), layout._native, self._raw(stream)
            )
        planes = _rows.lend(native.spans, forms, index, self._native)
        return Planes(planes, lambda: native.release(self._raw(stream)))

    def check(self) -> None:
        """Raise what an earlier call failed with on the device, if one has."""
        self._native.check()

    def wait(self, *, stream: int | None = None) -> None:
        """Wait for the stream, then check."""
        self._native.wait(self._raw(stream))

    def status(self, *, stream: int | None = None) -> Status:
        """Where this rank stands, after the work of the stream."""
        return Status(*self._native.status(self._raw(stream)))

    def abort(self) -> None:
        """End every wait of every rank of the group, now and from now on."""
        self.group.abort()

    def rebuild(self, deadline: float = 5.0) -> KvGather:
        """Agree on a new group with the ranks that call this within ``deadline`` seconds, and
        build the same gather over it, with the same number of rows for each rank.

        This one is of no more use, whatever the result. Raises Excluded if the others went on
        without this rank, Error if nobody else is left, and what building a gather does.
        """
        rows_each = self.capacity_rows // self.group.world_size
        self._native = _Rebuilt()  # type: ignore[assignment]
        group = self.group.rebuild(deadline)
        return KvGather(group, rows_each * group.world_size, **self._options)

    def _raw(self, stream: int | None) -> int:
        if stream is not None or self.device is None:
            return stream or 0
        return _stream(self.device)


class _Rebuilt:
    """What is left of a gather whose group is rebuilt."""

    def __getattr__(self, name: str) -> Any:
        raise Error("this gather's group was rebuilt; use the gather that rebuild returned")


def memory_bytes(
    capacity_rows: int,
    row_bytes: int,
    world_size: int,
    *,
    slots: int = 2,
    ubatches: int = 1,
    device: Any = None,
    way: str | None = None,
) -> int:
    """The memory that a workspace takes, exactly: on the CPU in all, over the ranks; on a GPU on
    each rank's device, in the pieces of 2 MiB that devices hand out."""
    check_sizes(
        capacity_rows=capacity_rows,
        row_bytes=row_bytes,
        world_size=world_size,
        slots=slots,
        ubatches=ubatches,
    )
    on_gpu = device is not None and not str(device).startswith("cpu")
    needed = _native.memory_bytes(
        on_gpu, world_size, capacity_rows, row_bytes, slots, ubatches, way
    )
    return -(-needed // _GRANULARITY) * _GRANULARITY if on_gpu else needed


def _stream(index: int) -> int:
    """Torch's current stream of a device; without torch, the default one."""
    torch = sys.modules.get("torch")
    return 0 if torch is None else torch._C._cuda_getCurrentRawStream(index)
