"""Plans, against what the words of the documentation say, worked out token by token."""

import array
import pickle
import random

import numpy
import pytest
from helpers import in_threads, raises

import direct_dcp
from direct_dcp import plan
from direct_dcp.plan import ChunkPlanner, RowMap, Sharding

SHARDINGS = [(2, 1), (3, 2), (4, 16), (8, 3)]


def shards(world, interleave, tokens):
    """The tokens of each rank."""
    return [[t for t in range(tokens) if t // interleave % world == r] for r in range(world)]


def fnv(*words):
    """64-bit FNV-1a over little-endian words."""
    digest = 0xCBF29CE484222325
    for byte in b"".join(word.to_bytes(8, "little") for word in words):
        digest = (digest ^ byte) * 0x100000001B3 % (1 << 64)
    return digest


@pytest.mark.parametrize("world, interleave", SHARDINGS)
def test_tokens_are_dealt_in_runs(world, interleave):
    sharding = Sharding(world, interleave)
    assert (sharding.world_size, sharding.interleave) == (world, interleave)
    assert sharding.round == world * interleave
    for tokens in [0, 1, interleave, 5 * world * interleave - 1, 5 * world * interleave + 2]:
        owned = shards(world, interleave, tokens)
        assert [sharding.local_len(tokens, rank) for rank in range(world)] == list(map(len, owned))
        longest = -(-max(map(len, owned)) // interleave) * interleave
        assert sharding.padded_rows(tokens) == longest
        for rank, mine in enumerate(owned):
            for row, token in enumerate(mine):
                assert (sharding.owner(token), sharding.local_row(token)) == (rank, row)
        runs = sharding.runs(tokens)
        assert [run.token + i for run in runs for i in range(run.len)] == list(range(tokens))
        for run in runs:
            assert owned[run.rank][run.row : run.row + run.len][0] == run.token
    assert sharding == Sharding(world, interleave) != Sharding(world, interleave + 1)
    assert hash(sharding) == hash(Sharding(world, interleave))


@pytest.mark.parametrize("seed", range(20))
def test_chunks_deliver_every_token_once(seed):
    dice = random.Random(seed)
    world, interleave = dice.choice(SHARDINGS)
    block, rows = dice.choice([1, 4, 16]), dice.randrange(1, 300)
    planner = ChunkPlanner(Sharding(world, interleave), block, rows)
    assert planner.alignment % block == 0 and planner.alignment % planner.sharding.round == 0
    assert planner.budget_rows - planner.alignment < rows <= planner.budget_rows
    contexts = [dice.randrange(0, 90) for _ in range(dice.randrange(1, 5))]
    made = planner.plan(contexts)
    # Any whole numbers will do.
    assert made == planner.plan(numpy.array(contexts, "i4")) == planner.plan(tuple(contexts))
    seen = []
    for chunk in made.chunks:
        assert world * chunk.local_rows <= planner.budget_rows
        maps = [chunk.row_map(rank) for rank in range(world)]
        result = {}
        request_rows = [part.len for part in chunk.parts]
        RowMap.check_group(maps, request_rows)
        for rank, row_map in enumerate(maps):
            local = []
            for part in chunk.parts:
                shard = shards(world, interleave, contexts[part.request])[rank]
                rows = shard[part.local_start :][: part.padded_len]
                ours = [t for t in rows if t < part.start + part.len]
                assert part.valid_rows(rank) == len(ours)
                local += [(part.request, t) for t in ours]
                local += [None] * (part.padded_len - len(ours))
            assert len(local) == chunk.local_rows == row_map.local_rows
            for token, row in zip(local, row_map.dst_rows):
                assert (row == -1) == (token is None)
                if token:
                    result[row] = token
        # Request by request, and inside of one rank by rank.
        expected = [
            (part.request, token)
            for part in chunk.parts
            for shard in shards(world, interleave, contexts[part.request])
            for token in shard
            if part.start <= token < part.start + part.len
        ]
        assert [result[row] for row in range(chunk.total_rows)] == expected
        seen += expected
        parts = [word for part in chunk.parts for word in (part.request, part.start, part.len)]
        assert chunk.digest == fnv(1, world, interleave, *parts)
    assert sorted(seen) == [(r, t) for r, length in enumerate(contexts) for t in range(length)]
    assert made.digest == fnv(3, *made.request_digests)
    assert len(made.request_digests) == len(contexts)


def test_a_planner_for_a_model():
    sharding = Sharding(4, 16)
    assert ChunkPlanner.for_model(sharding, 16, 1024, 8) == ChunkPlanner(sharding, 16, 8192)
    assert ChunkPlanner.for_model(sharding, 16, 1 << 20, 8).budget_rows == 65536


def test_maps_of_every_kind():
    lens, padded = [[4, 3], [0, 2]], [4, 2]
    row_map = RowMap.for_requests(padded, lens, [0, 0], 1)
    assert row_map.dst_rows == array.array("i", [4, 5, 6, -1, 7, 8])
    assert row_map.runs == [(0, 4, 3), (4, 7, 2)] and row_map.runs[1].dst == 7
    assert row_map == RowMap.for_requests(padded, numpy.array(lens), numpy.zeros(2, int), 1)
    assert (row_map.local_rows, row_map.total_rows) == (6, 9)
    assert row_map.digest == RowMap.for_requests(padded, lens, [0, 0], 0).digest

    uneven = RowMap.uneven([3, 0, 2], 2)
    assert list(uneven.dst_rows) == [3, 4] and uneven.total_rows == 5
    assert list(RowMap.uneven([3, 0, 2], 1).dst_rows) == []
    assert uneven.digest == fnv(5, 3, 0, 2)

    rows = [7, -1, 0, 1, 5]
    for same in (
        rows,
        array.array("i", rows),
        numpy.array(rows, "i4"),
        numpy.array(rows),
        iter(rows),
    ):
        from_rows = RowMap.from_rows(same, 9)
        assert list(from_rows.dst_rows) == rows and from_rows.local_rows == 5
    # Not -1, which is what its bits would be.
    with raises(ValueError, "dst_rows"):
        RowMap.from_rows(numpy.array([0, 2**32 - 1], "u4"), 9)
    assert RowMap.from_runs(from_rows.runs, 5, 9) == from_rows
    assert RowMap.from_runs([(2, 0, 2), (0, 7, 1), [4, 5, 1]], 5, 9) == from_rows
    assert from_rows.with_digest(77).digest == 77 != from_rows.digest
    assert numpy.asarray(from_rows.dst_rows).dtype == numpy.int32


def test_slots_of_pages():
    table, block = [5, 0, 9], 4
    expected = [table[row // block] * block + row % block for row in range(3, 11)]
    for same in (table, array.array("I", table), numpy.array(table, "i4"), numpy.array(table)):
        slots = plan.slots(same, block, 3, 11)
        assert list(slots) == expected and slots.typecode == "I"
    assert list(plan.slots(table, block, 2, 2)) == []


def test_what_cannot_be_planned():
    sharding = Sharding(2)
    planner = ChunkPlanner(sharding, 4, 8)
    wrong = [
        (lambda: Sharding(1), "world_size: expected at least two ranks, got 1"),
        (lambda: Sharding(2, 0), "interleave"),
        (lambda: Sharding(-1), "world_size: expected 0 or more"),
        (lambda: Sharding(2, 1 << 63), "interleave"),
        (lambda: ChunkPlanner(sharding, 0, 8), "block"),
        (lambda: ChunkPlanner(sharding, 4, 0), "budget"),
        (lambda: ChunkPlanner(sharding, 4, 1 << 31), "rounded budget"),
        (lambda: planner.plan([5, 1 << 31]), "context: expected at most 2147483647 tokens"),
        (lambda: planner.plan([5, -6]), "contexts: expected 0 or more, got -6"),
        (lambda: planner.plan([5]).chunks[0].row_map(2), "rank: expected less than 2, got 2"),
        (lambda: RowMap.for_requests([4], [[4, 3], [1, 1]], [0], 0), "padded rows"),
        (lambda: RowMap.for_requests([4], [[4, 3]], [0, 0], 0), "local starts"),
        (lambda: RowMap.for_requests([], [], [], 0), "requests"),
        (lambda: RowMap.uneven([3, 2], 2), "rank"),
        (lambda: RowMap.from_rows([0, 3], 3), "row 3 of the result is out of range"),
        (lambda: RowMap.from_rows([0, -2], 3), "row -2 of the result is out of range"),
        (lambda: RowMap.from_rows([1, 1], 3), "row 1 of the result is the destination of two"),
        (lambda: RowMap.from_rows([1.5], 3), "dst_rows: expected whole numbers of 32 bits"),
        (lambda: RowMap.from_rows([1 << 31], 3), "dst_rows: expected whole numbers of 32 bits"),
        (lambda: RowMap.from_rows(3, 3), "dst_rows: expected whole numbers of 32 bits"),
        (lambda: RowMap.from_runs([(0, 0, 5)], 4, 9), "run"),
        (lambda: RowMap.from_runs([(0, 0)], 4, 9), "src, dst, len"),
        (lambda: RowMap.uneven([1, 1], 0).with_digest(-1), "digest"),
        (lambda: RowMap.check_group([RowMap.uneven([2, 2], 0)], [1, 3]), "request 1 has a gap"),
        (lambda: RowMap.check_group([RowMap.uneven([1], 0)] * 2, [1]), "request 0 has an overlap"),
        (lambda: plan.slots([1, 2], 4, 0, 9), "below the 2 pages of the block table, got 8"),
        (lambda: plan.slots([1 << 30], 4, 0, 1), "in a slot of at most"),
        (lambda: plan.slots([1], 0, 0, 1), "row of a paged request"),
    ]
    for call, words in wrong:
        with raises(ValueError, words) as refused:
            call()
        assert isinstance(refused.value, direct_dcp.InvalidArgument)
    for call in (lambda: planner.plan([1.0]), lambda: planner.plan(5), lambda: sharding.owner("1")):
        with raises(TypeError):
            call()


def test_ranks_that_plan_otherwise_are_named():
    def rank(group):
        planner = ChunkPlanner(Sharding(3), 4, 24)
        contexts = [40, 30, 20]
        planner.plan(contexts).agree(group)
        if group.rank == 2:
            contexts[1] = 31
        with raises(direct_dcp.Mismatch, "request 1") as other:
            planner.plan(contexts).agree(group)
        found = pickle.loads(pickle.dumps(other.value))
        assert (found.source, found.request) == (0 if group.rank == 2 else 2, 1)
        assert found.field == "plan of request 1" and found.ours is found.theirs is None
        # Nothing is broken by that.
        group.barrier()

    in_threads(3, rank)
