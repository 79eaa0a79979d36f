import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

from .plan import Run, TokenRun

__version__: str

_Span = tuple[int, int]
# Rows or a cache, how rows lie in it, and a scale.
_Source = tuple[_Span, tuple[int, int, int, _Span] | None, float | None]
_Counts = Iterable[SupportsIndex]

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
        tuning: str | os.PathLike[str] | None,
        timeout: float,
        first_timeout: float,
    ) -> None: ...
    def gather_into(self, ubatch: int, local: _Span, out: _Span, stream: int) -> None: ...
    def gather(self, ubatch: int, local: _Span, stream: int) -> Lent: ...
    def gather_final(self, ubatch: int, rows: _Source, layout: Layout, stream: int) -> Lent: ...
    def layout(self, map: RowMap, planes: list[int]) -> Layout: ...
    def pipeline(self, ubatch: int) -> Pipeline: ...
    def check(self) -> None: ...
    def wait(self, stream: int) -> None: ...
    def status(self, stream: int) -> tuple[int, str, list[int], str | None]: ...
    @property
    def way(self) -> str: ...

class Lent:
    @property
    def spans(self) -> list[_Span]: ...
    def release(self, stream: int) -> None: ...

class Layout:
    @property
    def local_rows(self) -> int: ...
    @property
    def total_rows(self) -> int: ...
    @property
    def plane_bytes(self) -> list[int]: ...

class Pipeline:
    def submit(self, local: _Span, owner: Any, stream: int) -> Ticket: ...
    def submit_final(self, local: _Span, owner: Any, layout: Layout) -> Ticket: ...
    def acquire(self, ticket: Ticket, stream: int) -> Lent: ...
    def close(self, stream: int) -> None: ...

class Ticket:
    @property
    def epoch(self) -> int: ...

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

class Sharding:
    """How the tokens of a sequence are dealt to ranks: in runs of ``interleave``, so that token t
    belongs to rank ``t // interleave % world_size``.

    A rank's shard holds its tokens in ascending order. Raises InvalidArgument for fewer than two
    ranks, and for an interleave of zero."""

    def __init__(self, world_size: SupportsIndex, interleave: SupportsIndex = 1) -> None: ...
    @property
    def world_size(self) -> int:
        """The number of ranks."""
    @property
    def interleave(self) -> int:
        """How many neighbouring tokens go to one rank."""
    @property
    def round(self) -> int:
        """Tokens of one round, in which every rank gets a run."""
    def owner(self, token: SupportsIndex) -> int:
        """The rank that holds ``token``."""
    def local_row(self, token: SupportsIndex) -> int:
        """The row of ``token`` in its owner's shard."""
    def local_len(self, tokens: SupportsIndex, rank: SupportsIndex) -> int:
        """How many of the first ``tokens`` tokens ``rank`` holds; 0 for a rank that is none of the
        group's."""
    def padded_rows(self, tokens: SupportsIndex) -> int:
        """Rows of every rank's shard of ``tokens`` tokens, padding included."""
    def runs(self, tokens: SupportsIndex) -> list[TokenRun]:
        """The runs of the first ``tokens`` tokens, in order."""

class ChunkPlanner:
    """Cuts the contexts of requests into chunks, each of which one gather delivers: at most
    ``rows`` rows over all ranks, padding included, rounded up to a multiple of ``alignment``, which
    is the least common multiple of ``block``, the tokens of a cache page, and of the sharding's
    round.

    Requests are taken in order, and their contexts cut only at multiples of ``alignment``. Raises
    InvalidArgument for zeros, and for more than 2**31 - 1 rows."""

    def __init__(self, sharding: Sharding, block: SupportsIndex, rows: SupportsIndex) -> None: ...
    @staticmethod
    def for_model(
        sharding: Sharding,
        block: SupportsIndex,
        max_model_len: SupportsIndex,
        max_num_seqs: SupportsIndex,
    ) -> ChunkPlanner:
        """Chunks as large as a model's longest context and number of sequences are worth:
        ``max(8 * max_model_len, 4 * max_num_seqs * block)`` rows, but no more than 65,536."""
    @property
    def sharding(self) -> Sharding:
        """How tokens are dealt to the ranks."""
    @property
    def alignment(self) -> int:
        """Tokens; contexts are cut at multiples of it."""
    @property
    def budget_rows(self) -> int:
        """Rows over all ranks that a chunk has at most: the capacity that its workspace needs."""
    def plan(self, contexts: _Counts) -> ChunkPlan:
        """The chunks of requests with these contexts, in tokens. A context of 0 is in no chunk.

        Raises InvalidArgument for a context of more than 2**31 - 1 tokens."""

class ChunkPlan:
    """All chunks of a list of requests."""

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks, in the order in which all ranks gather them."""
    @property
    def digest(self) -> int:
        """A fingerprint of the whole plan, 64 bits. Ranks whose plans have the same one gather the
        same chunks."""
    @property
    def request_digests(self) -> list[int]:
        """A fingerprint of each request's share of the plan, 64 bits."""
    def agree(self, group: Group) -> None:
        """Collective: compares the plans of all ranks, request by request.

        Raises Mismatch, which names a rank and a request, on every rank whose plan is not that of
        all others; and what ``Group.all_gather`` does."""

class Chunk:
    """What one gather delivers: parts of one or more requests, in their order."""

    @property
    def parts(self) -> list[Part]:
        """The requests that take part, each once, in ascending order."""
    @property
    def local_rows(self) -> int:
        """T, the rows that every rank contributes, padding included."""
    @property
    def total_rows(self) -> int:
        """Rows of the result in its final layout, which has no padding: one per token."""
    @property
    def digest(self) -> int:
        """A fingerprint, equal on all ranks for equal chunks, 64 bits."""
    def row_map(self, rank: SupportsIndex) -> RowMap:
        """Where the rows of ``rank`` belong: request by request, and inside a request rank by rank.

        Raises InvalidArgument for a rank that is none of the group's."""

class Part:
    """The share of one request in a chunk: tokens ``start`` to ``start + len`` of its context."""

    @property
    def request(self) -> int:
        """The request, counted from 0 in the list that was planned."""
    @property
    def start(self) -> int:
        """The first token: a multiple of the planner's alignment."""
    @property
    def len(self) -> int:
        """Tokens, at least one."""
    @property
    def local_start(self) -> int:
        """The row of every rank's shard of the request from which its rows are taken."""
    @property
    def padded_len(self) -> int:
        """Rows that every rank takes from there, padding included."""
    def valid_rows(self, rank: SupportsIndex) -> int:
        """How many of the rows of ``rank`` hold tokens; the others, behind them, are padding."""

class RowMap:
    """For every row that one rank contributes to a gather, its place in the result, or that it is
    padding."""

    @staticmethod
    def for_requests(
        padded: _Counts, lens: Iterable[_Counts], local_start: _Counts, rank: SupportsIndex
    ) -> RowMap:
        """The map of ``rank`` for a gather of several requests: the result holds request after
        request, and of each the valid rows of rank after rank.

        Of request i every rank contributes ``padded[i]`` rows from row ``local_start[i]`` of its
        shard on; the shard of rank r has ``lens[i][r]`` rows, and what is behind them is padding.
        Raises InvalidArgument for lists that differ in length, and for a rank that is none of the
        group's."""
    @staticmethod
    def uneven(counts: _Counts, rank: SupportsIndex) -> RowMap:
        """The map of ``rank`` for a gather of ``counts[r]`` rows from each rank r, in rank order,
        without padding. A count may be 0."""
    @staticmethod
    def from_rows(dst_rows: _Counts, total_rows: SupportsIndex) -> RowMap:
        """The map that sends local row i to row ``dst_rows[i]`` of a result of ``total_rows`` rows,
        or nowhere if that is -1. An array of 32-bit integers is read as it is.

        Raises InvalidArgument for rows that are out of range, or twice there."""
    @staticmethod
    def from_runs(
        runs: Iterable[_Counts], local_rows: SupportsIndex, total_rows: SupportsIndex
    ) -> RowMap:
        """The map of these runs of neighbouring rows, ``(src, dst, len)``, in any order; local rows
        that are in none are padding.

        Raises InvalidArgument for runs that share a row, or pass the last one."""
    def with_digest(self, digest: int) -> RowMap:
        """The same map, with the digest of whatever the maps of all ranks were made from."""
    @staticmethod
    def check_group(maps: Sequence[RowMap], request_rows: _Counts) -> None:
        """Checks that the maps of a group, in rank order, deliver every row of a result once.
        ``request_rows`` are the rows of each request in it, in order.

        Raises InvalidArgument, which names the request and the row."""
    @property
    def dst_rows(self) -> array[int]:
        """For every local row its row in the result, or -1 for padding: an array.array of 32-bit
        integers."""
    @property
    def runs(self) -> list[Run]:
        """The runs, in ascending order of local rows."""
    @property
    def local_rows(self) -> int:
        """T, the rows that this rank contributes, padding included."""
    @property
    def total_rows(self) -> int:
        """Rows of the result, over all ranks."""
    @property
    def digest(self) -> int:
        """A fingerprint of what the maps of all ranks were made from, 64 bits."""

def slots(
    block_table: _Counts, block: SupportsIndex, start: SupportsIndex, stop: SupportsIndex
) -> array[int]:
    """The slots of rows ``start`` to ``stop`` of a request, whose pages of ``block`` rows, in
    order, are those of ``block_table``: an array.array of unsigned 32-bit integers.

    Raises InvalidArgument where the table ends before the rows do."""

def span(rows: Any, device: int | None) -> _Span | None:
    """The address and the size of a tensor of torch on this device, or on the CPU: None of what is
    not plainly that."""

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
