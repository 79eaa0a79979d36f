"""Rows in their final layout, between threads, in host memory."""

import random

import numpy
import pytest
from helpers import in_threads, raises

import direct_dcp
from direct_dcp import FinalLayout, KvGather, plan
from direct_dcp.plan import ChunkPlanner, RowMap, Sharding

WAYS = ["shared-slot", "push"]

#: The gather's rows, bytes of a row as it is stored, widths of planes in elements.
KINDS = {
    "latent": (dict(dtype="float16", dim=576), 1152, [512, 64]),
    "wide": (dict(dtype="float32", dim=24), 96, [8, 16]),
    "packed": (dict(row_bytes=656), 656, [512, 16, 128]),
    "converted": (dict(dtype="bfloat16", dim=96), 96, [64, 32]),
    "odd": (dict(row_bytes=13), 13, [2, 1, 10]),
    "whole": (dict(row_bytes=13), 13, None),
}
SCALE = 0.375


def random_rows(seed, count, row_bytes):
    return numpy.random.default_rng(seed).integers(1, 255, (count, row_bytes), numpy.uint8)


def dequantized(rows):
    """e4m3 elements times the scale, as bf16 bits: all such products are exact."""
    exponent, mantissa = (rows >> 3 & 15).astype(int), (rows & 7).astype("f4")
    normal = (1 + mantissa / 8) * numpy.exp2(exponent - 7.0)
    value = numpy.where(exponent == 0, mantissa / 8 * 2.0**-6, normal).astype("f4")
    bits = ((value * numpy.float32(SCALE)).view("u4") >> 16).astype("u2")
    bits = numpy.where((rows & 0x7F) == 0x7F, numpy.uint16(0x7FC0), bits)
    return bits | (rows & 0x80).astype("u2") << 8


def split(rows, widths, itemsize):
    """The planes of rows of bytes."""
    if widths is None:
        return [rows]
    ends = numpy.cumsum([width * itemsize for width in widths])
    return numpy.split(rows, ends[:-1], axis=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_contexts_in_paged_caches(kind, way, seed):
    options, stored, widths = KINDS[kind]
    dice = random.Random(f"{kind} {seed}")
    world, interleave, block = (
        dice.choice([2, 3, 4]),
        dice.choice([1, 3, 16]),
        dice.choice([1, 4, 16]),
    )
    contexts = [dice.randrange(0, 90) for _ in range(4)]
    tokens = [random_rows([seed, request], n, stored) for request, n in enumerate(contexts)]
    planner = ChunkPlanner(Sharding(world, interleave), block, dice.randrange(40, 200))
    made = planner.plan(contexts)
    scale = SCALE if kind == "converted" else None
    itemsize = numpy.dtype(options.get("dtype", "uint8")).itemsize if scale is None else 2

    def rank(group):
        made.agree(group)
        me = group.rank
        gather = KvGather(group, planner.budget_rows, **options, way=way)
        # A cache that is a part of a wider one, whose pages are in no order.
        shards = [rows[numpy.arange(len(rows)) // interleave % world == me] for rows in tokens]
        counts = [-(-len(shard) // block) for shard in shards]
        order = random.Random(me).sample(range(sum(counts) + 2), sum(counts))
        tables = [[order.pop() for _ in range(count)] for count in counts]
        wide = random_rows(me, (sum(counts) + 2) * block, stored + 32)
        cache = wide.reshape(-1, block, stored + 32)[:, :, 16 : 16 + stored]
        for shard, table in zip(shards, tables):
            for row, data in enumerate(shard):
                cache[table[row // block], row % block] = data
        if kind == "latent":
            cache = wide.view("f2").reshape(-1, block, stored // 2 + 16)[:, :, 8 : 8 + stored // 2]
        elif kind == "wide":
            cache = wide.view("f4").reshape(-1, block, stored // 4 + 8)[:, :, 4 : 4 + stored // 4]
        for chunk in made.chunks:
            layout = FinalLayout(gather, chunk.row_map(me), widths)
            assert layout.local_rows == chunk.local_rows
            slots = []
            for part in chunk.parts:
                stop = part.local_start + part.valid_rows(me)
                slots += plan.slots(tables[part.request], block, part.local_start, stop)
                slots += [-1] * (part.padded_len - part.valid_rows(me))
            taken = [
                tokens[part.request][t]
                for part in chunk.parts
                for r in range(world)
                for t in range(part.start, part.start + part.len)
                if t // interleave % world == r
            ]
            expected = numpy.array(taken, "u1").reshape(-1, stored)
            if scale is not None:
                expected = dequantized(expected).view("u1")
            with gather.gather_final(cache, layout, slots=slots, scale=scale) as planes:
                references = split(expected, widths, itemsize)
                assert len(planes) == len(references)
                for plane, reference, width in zip(planes, references, layout.plane_bytes):
                    assert plane.dtype == ("u2" if scale else cache.dtype)
                    assert plane.shape == (chunk.total_rows, width // plane.itemsize)
                    assert not plane.flags.writeable
                    assert plane.tobytes() == reference.tobytes()

    in_threads(world, rank)


@pytest.mark.parametrize("way", WAYS)
def test_uneven_ranks_and_ranks_without_rows(way):
    def rank(group):
        gather = KvGather(group, 12, 24, way=way)
        for call, counts in enumerate([[3, 0, 5], [0, 0, 0], [0, 12, 0], [1, 1, 1]]):
            layout = FinalLayout(gather, RowMap.uneven(counts, group.rank), [16, 8])
            rows = [random_rows([call, r], count, 24) for r, count in enumerate(counts)]
            expected = numpy.concatenate(rows)
            with gather.gather_final(rows[group.rank], layout) as (first, second):
                assert first.tobytes() == expected[:, :16].tobytes()
                assert second.tobytes() == expected[:, 16:].tobytes()
                assert (first.shape, second.shape) == ((sum(counts), 16), (sum(counts), 8))
            # Of plain memory, planes are memoryviews.
            local = rows[group.rank].tobytes()
            with gather.gather_final(local, layout) as (first, second):
                assert first.readonly and first == expected[:, :16].tobytes()
                assert second == expected[:, 16:].tobytes()
        assert gather.status().epochs == [8]

    in_threads(3, rank)


def test_planes_are_lent_as_slots_are():
    def rank(group):
        gather = KvGather(group, 8, 16, slots=3)
        layout = FinalLayout(gather, RowMap.uneven([2, 1], group.rank), [12, 4])
        rows = [[random_rows([call, r], 2 - r, 16) for r in range(2)] for call in range(5)]
        local = [pair[group.rank] for pair in rows]
        whole = [numpy.concatenate(pair) for pair in rows]
        first = gather.gather_final(local[0], layout)
        second = gather.gather_final(local[1], layout)
        with raises(direct_dcp.SlotInUse) as refused:
            gather.gather_final(local[2], layout)
        assert refused.value.epoch == 1
        assert first.planes[0].tobytes() == whole[0][:, :12].tobytes()
        # In the slot, not copied: three calls later it is the same memory.
        where = first.planes[0].ctypes.data
        assert first.planes[1].ctypes.data - where == 8 * 12
        also = second.planes[0].ctypes.data
        first.release()
        first.release()
        second.release()
        with raises(direct_dcp.Error, "released"):
            second.planes
        with gather.gather_final(local[2], layout) as (third, _):
            assert third.ctypes.data not in (where, also)
        again = gather.gather_final(local[3], layout).planes
        assert again[0].ctypes.data == where
        group.barrier()
        del gather, layout
        # Planes outlive the gather.
        assert again[0].tobytes() == whole[3][:, :12].tobytes()
        group.barrier()

    in_threads(2, rank)


def test_what_has_no_final_place_is_refused():
    def rank(group):
        gather = KvGather(group, 8, dtype="float16", dim=8)
        row_map = RowMap.uneven([2, 2], group.rank)
        for planes in ([], [4], [8, 0], [1, 1, 1, 1, 4], [4, 5], [-1, 9], [1 << 62]):
            with raises(ValueError, "planes"):
                FinalLayout(gather, row_map, planes)
        with raises(TypeError):
            FinalLayout(gather, [0, 1])
        for other in (None, row_map):
            with raises(ValueError, "FinalLayout"):
                gather.gather_final(random_rows(group.rank, 2, 16).view("f2"), other)
        layout = FinalLayout(gather, row_map, (width for width in (6, 2)))
        assert layout.plane_bytes == [12, 4] and layout.total_rows == 4
        local = random_rows(group.rank, 2, 16).view("f2")
        cache = random_rows(group.rank, 6, 16).view("f2").reshape(2, 3, 8)
        wrong = [
            (dict(rows=local[:1]), "local rows"),
            (dict(rows=local[:, ::2]), "contiguous"),
            (dict(rows=local.view("f8")), "plane of 12 bytes, got float64"),
            (dict(rows=3), "int"),
            (dict(rows=local, scale=0.5), "row format"),
            (dict(rows=cache, slots=[0]), "local rows"),
            (dict(rows=cache, slots=[0, 6]), "slot: expected a slot within the cache, got 6"),
            (dict(rows=cache, slots=[0, -1]), "slot"),
            (dict(rows=cache, slots=[0, 1.5]), "slots: expected whole numbers"),
            (dict(rows=cache, slots=7), "slots: expected whole numbers"),
            (dict(rows=cache[:, ::-1], slots=[0, 1]), "ascending"),
            (dict(rows=cache[:, :, ::2], slots=[0, 1]), "contiguous"),
            (dict(rows=cache[:, :, :4], slots=[0, 1]), "rows of 16 bytes, got 8"),
            (dict(rows=cache.ravel(), slots=[0, 1]), "page_rows"),
            (dict(rows=cache[:0], slots=[0, 1]), "slot"),
            (dict(rows=3, slots=[0, 1]), "int"),
            (dict(rows=local, ubatch=1), "ubatch"),
        ]
        for arguments, words in wrong:
            with raises(ValueError, words):
                gather.gather_final(layout=layout, **arguments)
        other = KvGather(group, 8, 16)
        with raises(ValueError, "row format"):
            other.gather_final(local, layout)
        halves = FinalLayout(KvGather(group, 8, dtype="bfloat16", dim=8), row_map)
        with raises(ValueError, "row format"):
            gather.gather_final(local, halves)
        pulls = KvGather(group, 8, dtype="float16", dim=8, way="pull")
        with raises(direct_dcp.Unsupported, "final layout"):
            pulls.gather_final(local, layout)
        converting = KvGather(group, 8, dtype="bfloat16", dim=8)
        for scale in (float("nan"), float("inf"), 1e39):
            with raises(ValueError, "scale"):
                converting.gather_final(local.view("u1").reshape(4, 8)[:2], halves, scale=scale)
        assert gather.status().epochs == [0]
        group.barrier()

    in_threads(2, rank)


def test_layouts_of_other_plans_are_found_out():
    def rank(group):
        gather = KvGather(group, 8, 16)
        counts = [2, 2] if group.rank else [2, 3]
        layout = FinalLayout(gather, RowMap.uneven(counts, group.rank))
        with raises(direct_dcp.Error) as other:
            gather.gather_final(random_rows(0, 2, 16), layout)
        return isinstance(other.value, direct_dcp.Mismatch)

    assert any(in_threads(2, rank))


def test_a_rebuilt_gather_makes_no_layouts():
    def rank(group):
        gather = KvGather(group, 4, 16)
        gather.rebuild(5.0)
        for use in (FinalLayout, lambda gather, _: direct_dcp.Pipeline(gather)):
            with raises(direct_dcp.Error, "that rebuild returned"):
                use(gather, RowMap.uneven([1, 1], 0))

    in_threads(2, rank)


def test_what_is_no_gather_layout_or_ticket_is_named():
    def rank(group):
        gather = KvGather(group, 4, 16)
        rows, plan = random_rows(0, 1, 16), RowMap.uneven([1, 1], group.rank)
        for other in (None, gather._native, plan):
            kind = type(other).__name__
            with raises(ValueError, "gather", "KvGather", kind):
                FinalLayout(other, plan)
            with raises(ValueError, "gather", "KvGather", kind):
                direct_dcp.Pipeline(other)
            with raises(ValueError, "layout", "FinalLayout", kind):
                gather.gather_final(rows, other)
            with direct_dcp.Pipeline(gather) as pipeline:
                with raises(ValueError, "layout", "FinalLayout", kind):
                    pipeline.submit_final(rows, other)
                with raises(ValueError, "ticket", "Ticket", kind):
                    pipeline.acquire(other)
        # None of it was a call.
        with gather.gather(rows) as gathered:
            assert bytes(gathered) == bytes(random_rows(0, 1, 16)) * 2

    in_threads(2, rank)
