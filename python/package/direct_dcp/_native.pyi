from collections.abc import Callable
from typing import Any

__version__: str

_Span = tuple[int, int]

class Group:
    """One rank's handle to a group of ranks, which all run on one machine.

    The collectives, ``all_gather`` and ``barrier``, have to be called by every rank, in the same
    order. Every wait ends: by success, by a timeout that names the missing ranks, because a rank
    has gone, or by an abort.
    """

    @staticmethod
    def threads(world_size: int, *, timeout: float = 60.0) -> list[Group]: ...
    @staticmethod
    def from_env(*, timeout: float | None = None) -> Group: ...
    @staticmethod
    def from_torch(process_group: Any = None, *, timeout: float = 60.0) -> Group: ...
    @staticmethod
    def from_exchange(
        rank: int,
        world_size: int,
        all_gather: Callable[[bytes], list[bytes]],
        *,
        timeout: float = 60.0,
    ) -> Group: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def previous_ranks(self) -> list[int]: ...
    def all_gather(self, data: bytes) -> list[bytes]: ...
    def barrier(self) -> None: ...
    def abort(self) -> None: ...
    def rebuild(self, deadline: float = 5.0) -> Group: ...

class Gather:
    def __init__(
        self,
        group: Group,
        device: int | None,
        capacity_rows: int,
        dtype: str,
        dim: int,
        slots: int,
        ubatches: int,
        way: str | None,
        blocks: int | None,
        timeout: float,
        first_timeout: float,
    ) -> None: ...
    def gather_into(self, ubatch: int, local: _Span, out: _Span, stream: int) -> None: ...
    def gather(self, ubatch: int, local: _Span, stream: int) -> Lent: ...
    def check(self) -> None: ...
    def wait(self, stream: int) -> None: ...
    def status(self, stream: int) -> tuple[int, str, list[int], str | None]: ...
    @property
    def way(self) -> str: ...

class Lent:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def release(self, stream: int) -> None: ...

class Kernel:
    def __init__(self, device: int, multicast: bool) -> None: ...
    def lane(
        self,
        world_size: int,
        rank: int,
        slot_bytes: int,
        own: tuple[int, int],
        receivers: list[tuple[int, int]],
        epoch: int,
        sharing: int,
    ) -> Lane: ...

class Lane:
    def gather_into(
        self,
        rows: int,
        row_bytes: int,
        local: _Span,
        out: _Span,
        stream: int,
        timeout: float,
    ) -> None: ...
    def check(self) -> None: ...
    def abort(self) -> None: ...
    def forget(self, stream: int) -> None: ...

def memory_bytes(
    on_gpu: bool,
    world_size: int,
    capacity_rows: int,
    row_bytes: int,
    slots: int,
    ubatches: int,
    way: str | None,
) -> int: ...
def run(args: list[str], again: list[str]) -> int: ...
