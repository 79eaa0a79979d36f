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
    def threads(world_size: int, *, timeout: float = 60.0) -> list[Group]:
        """A group whose ranks are threads of this process: one handle for each, in rank order.

        ``timeout`` is for how many seconds each collective waits for the others. Raises
        InvalidArgument unless there are 2 to 1,024 ranks."""
    @staticmethod
    def from_env(*, timeout: float | None = None) -> Group:
        """The group that the environment describes, as torchrun sets it: RANK, WORLD_SIZE, and
        MASTER_ADDR and MASTER_PORT, or DIRECT_DCP_DIR.

        ``timeout`` is for how many seconds bring-up and each collective wait for the others; None
        is what DIRECT_DCP_TIMEOUT says, or 60. Raises InvalidArgument if a variable is missing or
        wrong, Timeout, Mismatch, and Unsupported if the ranks are on several machines."""
    @staticmethod
    def from_torch(process_group: Any = None, *, timeout: float = 60.0) -> Group:
        """The group of a torch.distributed process group, the default one if none is named.

        Raises what ``from_exchange`` does."""
    @staticmethod
    def from_exchange(
        rank: int,
        world_size: int,
        all_gather: Callable[[bytes], list[bytes]],
        *,
        timeout: float = 60.0,
    ) -> Group:
        """A group over ``all_gather``, which passes bytes to every rank and returns those of all,
        in rank order. It is called once, on this thread.

        ``timeout`` is for how many seconds bring-up, once it has answered, and each collective wait
        for the others. Raises what ``all_gather`` does, InvalidArgument if it returns something
        else, Timeout, Mismatch, PeerLost, and Unsupported if the ranks are on several machines."""
    @property
    def rank(self) -> int:
        """This rank, from 0."""
    @property
    def world_size(self) -> int:
        """How many ranks there are."""
    @property
    def generation(self) -> int:
        """Larger after each rebuild, and the same on all ranks."""
    @property
    def previous_ranks(self) -> list[int]:
        """The rank that each rank had before the rebuild."""
    def all_gather(self, data: bytes) -> list[bytes]:
        """Collective: passes bytes to every rank, and returns those of all, in rank order.

        Raises Timeout, PeerLost, Aborted, and Mismatch if a rank called another collective."""
    def barrier(self) -> None:
        """Collective: returns once every rank has called it. Raises what ``all_gather`` does."""
    def abort(self) -> None:
        """Ends every wait of every rank, now and from now on; they raise Aborted."""
    def rebuild(self, deadline: float = 5.0) -> Group:
        """Agrees on a new group with the ranks that call this within ``deadline`` seconds.

        Raises Excluded if the others went on without this rank, Error if nobody else is left or
        this group was rebuilt before."""

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
