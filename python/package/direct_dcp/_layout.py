"""Final layout: each row straight to where its consumer wants it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _rows
from ._options import check_kind, check_sizes
from .errors import InvalidArgument

if TYPE_CHECKING:
    from ._gather import KvGather
    from .plan import RowMap


class FinalLayout:
    """Where every row of this rank goes, and how rows are split into planes.

    - ``gather``: whose rows it is for.
    - ``row_map``: a :class:`direct_dcp.plan.RowMap`, this rank's.
    - ``planes``: one to four numbers of elements, of the gather's type, that make up a row; those
      of a gather with ``row_bytes`` are bytes. None splits nothing.

    It is made once and used for any number of calls, on a GPU in its memory: for all layers of a
    model, say. Raises InvalidArgument for planes that do not make up a row.
    """

    def __init__(
        self, gather: KvGather, row_map: RowMap, planes: Iterable[int] | None = None
    ) -> None:
        from ._gather import KvGather  # which imports this module

        check_kind(KvGather, gather=gather)
        widths = [gather._dim] if planes is None else list(planes)
        for width in widths:
            check_sizes(planes=width)
        if sum(widths) != gather._dim:
            raise InvalidArgument(
                f"planes: expected widths that add up to {gather._dim} elements, got {widths}"
            )
        self.device = gather.device
        self._native = gather._native.layout(row_map, [width * gather._unit for width in widths])

    @property
    def local_rows(self) -> int:
        """Rows that this rank passes to a call, padding included."""
        return self._native.local_rows

    @property
    def total_rows(self) -> int:
        """Rows of the result, over all ranks."""
        return self._native.total_rows

    @property
    def plane_bytes(self) -> list[int]:
        """Bytes of a row in each plane."""
        return self._native.plane_bytes

    @staticmethod
    def _checked(layout: Any) -> FinalLayout:
        check_kind(FinalLayout, layout=layout)
        return layout

    def _forms(self, rows: Any, device: int | None, scale: float | None) -> list[_rows.Form]:
        """What the planes are seen as, for rows of a caller's on this device."""
        if device != self.device:
            raise InvalidArgument("layout: expected one that was made for a gather on this device")
        form = _rows.Form.of(rows)
        if scale is not None:
            form = form.bf16()
        return [form.plane(nbytes) for nbytes in self.plane_bytes]
