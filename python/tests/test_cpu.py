"""Gathers between threads, in host memory."""

import itertools
import threading
import time

import numpy
import pytest
from helpers import POISON, in_threads, raises, random_bytes

import direct_dcp
from direct_dcp import Group, KvGather

WAYS = [None, "shared-slot", "push", "pull"]


def rows_of(rank, call, count, row_bytes):
    return random_bytes(count * row_bytes, (rank, call))


def rows_of_all(world, call, count, row_bytes):
    """The reference: the ranks' bytes, one after the other."""
    return b"".join(rows_of(rank, call, count, row_bytes) for rank in range(world))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_arrive_in_rank_order(way, world):
    def rank(group):
        gather = KvGather(group, world * 128, 1152, ubatches=2, way=way)
        assert gather.way == (way or "shared-slot")
        for call, count in enumerate([1, 128, 17, 128]):
            ubatch = call % 2
            local = rows_of(group.rank, call, count, 1152)
            out = bytearray([POISON]) * (world * count * 1152)
            gather.gather_into(local, out, ubatch)
            assert out == rows_of_all(world, call, count, 1152)
            local = rows_of(group.rank, -call, count, 1152)
            with gather.gather(local, ubatch) as rows:
                assert rows.readonly
                assert rows == rows_of_all(world, -call, count, 1152)
        assert gather.status().epochs == [4, 4]
        assert gather.status().failure is None

    in_threads(world, rank)


def test_a_table_says_the_way(tmp_path):
    table = tmp_path / "table.tuning"
    table.write_text("direct-dcp-tuning 1\nthreads 2 0 zero-copy any push auto cpu\n")
    wrong = tmp_path / "wrong.tuning"
    wrong.write_text("direct-dcp-tuning 1\nthreads 2 0 zero-copy any sideways auto cpu\n")

    def rank(group):
        # What is wrong with a table is told before any rank is waited for.
        for path, word in [(wrong, "line 2"), (tmp_path / "none", "none")]:
            with raises(ValueError, word):
                KvGather(group, 2 * 8, 64, tuning=path)
        gather = KvGather(group, 2 * 8, 64, tuning=str(table))
        assert gather.way == "push"
        out = bytearray([POISON]) * (2 * 8 * 64)
        gather.gather_into(rows_of(group.rank, 1, 8, 64), out)
        assert out == rows_of_all(2, 1, 8, 64)

    in_threads(2, rank)


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8", "int64"])
def test_arrays_of_every_type(dtype):
    def rank(group):
        dtype_ = numpy.dtype(dtype)
        gather = KvGather(group, 2 * 9, dtype=dtype_, dim=24)
        assert gather.row_bytes == 24 * dtype_.itemsize
        data = rows_of(group.rank, dtype, 5, gather.row_bytes)
        local = numpy.frombuffer(data, dtype_).reshape(5, 24)
        out = numpy.full((10, 24 * dtype_.itemsize), POISON, numpy.uint8).view(dtype_)
        gather.gather_into(local, out)
        expected = rows_of_all(2, dtype, 5, gather.row_bytes)
        assert out.tobytes() == expected
        with gather.gather(local) as rows:
            assert (rows.dtype, rows.shape) == (dtype_, (10, 24))
            assert not rows.flags.writeable
            assert rows.tobytes() == expected

    in_threads(2, rank)


def test_input_and_output_may_be_slices_of_one_storage():
    def rank(group):
        gather = KvGather(group, 8, 64)
        storage = numpy.full((20, 64), POISON, numpy.uint8)
        local, out = storage[1:4], storage[6:12]
        local[:] = numpy.frombuffer(rows_of(group.rank, 0, 3, 64), numpy.uint8).reshape(3, 64)
        gather.gather_into(local, out)
        assert out.tobytes() == rows_of_all(2, 0, 3, 64)
        assert (storage[12:] == POISON).all() and (storage[4:6] == POISON).all()
        with raises(ValueError, "overlap"):
            gather.gather_into(local, storage[2:8])
        group.barrier()

    in_threads(2, rank)


def test_a_held_slot_is_not_overwritten():
    def rank(group):
        gather = KvGather(group, 8, 16, slots=3)
        first = gather.gather(rows_of(group.rank, 1, 2, 16))
        second = gather.gather(rows_of(group.rank, 2, 2, 16))
        with raises(direct_dcp.SlotInUse, "`with` block", "`slots=`") as refused:
            gather.gather(rows_of(group.rank, 3, 2, 16))
        assert (refused.value.ubatch, refused.value.epoch) == (0, 1)
        assert first.rows == rows_of_all(2, 1, 2, 16)
        assert second.rows == rows_of_all(2, 2, 2, 16)
        first.release()
        with raises(direct_dcp.Error, "released"):
            first.rows
        with raises(direct_dcp.Error, "released"), first:
            pass
        with gather.gather(rows_of(group.rank, 3, 2, 16)) as rows:
            assert rows == rows_of_all(2, 3, 2, 16)
        group.barrier()

    in_threads(2, rank)


def test_lent_rows_outlive_the_gather():
    def rank(group):
        gather = KvGather(group, 8, 16)
        rows = gather.gather(rows_of(group.rank, 1, 2, 16)).rows
        group.barrier()
        del gather
        return bytes(rows)

    assert in_threads(2, rank) == [rows_of_all(2, 1, 2, 16)] * 2


def test_the_interpreter_is_free_while_a_rank_waits():
    def rank(group):
        gather = KvGather(group, 2, 16)
        if group.rank == 1:
            # The other one is waiting by now, and this thread still runs.
            time.sleep(0.3)
        out = bytearray(32)
        gather.gather_into(rows_of(group.rank, 0, 1, 16), out)
        return out

    assert in_threads(2, rank) == [rows_of_all(2, 0, 1, 16)] * 2


def test_a_missing_rank_is_named():
    def rank(group):
        gather = KvGather(group, 6, 16, timeout=0.2, first_timeout=0.2)
        if group.rank == 1:
            return
        out = bytearray([POISON]) * 48
        with raises(direct_dcp.Error) as late:
            gather.gather_into(rows_of(group.rank, 0, 1, 16), out)
        # Rank 1 has left by then, or is late; and so is who has seen that first.
        assert isinstance(late.value, (direct_dcp.Timeout, direct_dcp.PeerLost))
        with raises(direct_dcp.Poisoned, "rebuild"):
            gather.gather_into(rows_of(group.rank, 0, 1, 16), out)
        assert "rebuild" in gather.status().failure

    in_threads(3, rank)


def test_a_timeout_says_who_and_in_which_call():
    done = threading.Event()

    def rank(group):
        gather = KvGather(group, 4, 16, timeout=0.2, first_timeout=0.2)
        if group.rank == 1:
            done.wait()
            return
        with raises(direct_dcp.Timeout, "did not arrive") as late:
            gather.gather_into(bytes(16), bytearray(32))
        done.set()
        assert (late.value.missing, late.value.epoch) == ([1], 1)

    in_threads(2, rank)


def test_ranks_that_disagree_find_out():
    def rank(group):
        gather = KvGather(group, 8, 16)
        rows = 1 + group.rank
        with raises(direct_dcp.Error) as other:
            gather.gather_into(bytes(16 * rows), bytearray(32 * rows))
        if isinstance(other.value, direct_dcp.Mismatch):
            assert other.value.source == 1 - group.rank
            assert (other.value.field, other.value.ours) == ("rows", rows)
            return True
        assert isinstance(other.value, direct_dcp.PeerLost)

    assert any(in_threads(2, rank))

    def other_options(group):
        with raises(direct_dcp.Mismatch) as other:
            KvGather(group, 8, 16 + 16 * group.rank)
        assert other.value.field == "row_bytes" and "row_bytes" in str(other.value)
        group.barrier()

    in_threads(2, other_options)

    def other_elements(group):
        with raises(direct_dcp.Mismatch) as other:
            KvGather(group, 8, dtype="float16", dim=16 + 16 * group.rank)
        assert other.value.field == "dim"
        group.barrier()

    in_threads(2, other_elements)


def test_a_waiting_rank_is_aborted():
    def rank(group):
        gather = KvGather(group, 4, 16)
        if group.rank == 1:
            time.sleep(0.1)
            gather.abort()
        with raises(direct_dcp.Aborted) as aborted:
            gather.gather_into(bytes(16), bytearray(32))
        assert aborted.value.by == 1

    in_threads(2, rank)


def test_the_survivors_go_on():
    def rank(group):
        gather = KvGather(group, 6, 16, ubatches=2)
        if group.rank == 1:
            return
        with raises(direct_dcp.PeerLost) as lost:
            gather.gather_into(rows_of(group.rank, 0, 2, 16), bytearray(96))
        assert lost.value.rank in (0, 1, 2)
        ended, gather = gather, gather.rebuild(5.0)
        for use in (
            lambda: ended.gather_into(bytes(16), bytearray(32)),
            lambda: ended.gather(bytes(16)),
            ended.check,
            ended.status,
            lambda: ended.way,
            ended.rebuild,
        ):
            with raises(direct_dcp.Error, "that rebuild returned"):
                use()
        assert (gather.group.world_size, gather.capacity_rows, gather.ubatches) == (2, 4, 2)
        assert gather.group.previous_ranks == [0, 2]
        out = bytearray([POISON]) * 64
        gather.gather_into(rows_of(gather.group.rank, 0, 2, 16), out, 1)
        assert out == rows_of_all(2, 0, 2, 16)
        gather.group.barrier()

    in_threads(3, rank)


def test_what_cannot_work_is_refused_before_anything_is_written():
    def rank(group):
        gather = KvGather(group, 8, 16)
        out = numpy.full((4, 16), POISON, numpy.uint8)
        local = numpy.ones((2, 16), numpy.uint8)
        readonly = out.copy()
        readonly.flags.writeable = False
        wrong = [
            (local[:, ::2], out, "contiguous"),
            (local.T, out, "contiguous"),
            (local, readonly, "writable"),
            (local, out[:3], "output bytes"),
            (local[:0], out[:0], "local bytes"),
            (numpy.ones((5, 16), numpy.uint8), numpy.ones((10, 16), numpy.uint8), "local rows"),
            (local.tobytes()[:-1], out, "local bytes"),
            (None, out, "NoneType"),
            ("text", out, "str"),
        ]
        for local_, out_, word in wrong:
            with raises(ValueError, word):
                gather.gather_into(local_, out_)
        for ubatch in (1, -1, 1 << 70):
            with raises(ValueError, "ubatch"):
                gather.gather_into(local, out, ubatch)
        for stream in (-1, 1 << 70):
            with raises(ValueError, "stream"):
                gather.wait(stream=stream)
        assert (out == POISON).all()
        gather.gather_into(local, out)
        assert (out == 1).all()
        group.barrier()

    in_threads(2, rank)


def test_options_that_no_group_could_use():
    wrong = [
        (dict(capacity_rows=7, row_bytes=16), "divide evenly"),
        (dict(capacity_rows=0, row_bytes=16), "capacity_rows"),
        (dict(capacity_rows=-2, row_bytes=16), "capacity_rows"),
        (dict(capacity_rows=8.0, row_bytes=16), "capacity_rows"),
        (dict(capacity_rows=8, row_bytes=16, slots=-1), "slots"),
        (dict(capacity_rows=8, row_bytes=16, device=-1), "device"),
        (dict(capacity_rows=8, row_bytes=0), "row_bytes: expected a positive number of bytes"),
        (dict(capacity_rows=8, row_bytes="8"), "row_bytes: expected a whole number"),
        (dict(capacity_rows=8, dtype="float16", dim="8"), "dim: expected a whole number"),
        (dict(capacity_rows=8, dtype="float16", dim=0), "dim"),
        (dict(capacity_rows=8), "row_bytes"),
        (dict(capacity_rows=8, row_bytes=16, dtype="float16", dim=8), "either"),
        (dict(capacity_rows=8, row_bytes=16, slots=1), "slots"),
        (dict(capacity_rows=8, row_bytes=16, ubatches=0), "ubatch"),
        (dict(capacity_rows=8, row_bytes=16, way="pigeon"), "push, pull, multicast, copy-engine"),
        (dict(capacity_rows=8, row_bytes=16, device="tpu"), "cuda"),
        (dict(capacity_rows=8, row_bytes=16, timeout=-1), "timeout"),
        (dict(capacity_rows=8, dtype="float17", dim=4), "dtype"),
    ]
    for options, word in wrong:

        def rank(group, options=options, word=word):
            with raises(ValueError, word):
                KvGather(group, **options)

        in_threads(2, rank)
    for world in (1, -1, 1 << 70):
        with raises(direct_dcp.InvalidArgument):
            Group.threads(world)
    with raises(direct_dcp.InvalidArgument, "rank"):
        Group.from_exchange(-1, 2, None)
    for world in ("4", 4.0, None):
        with raises(TypeError, "world_size: expected a whole number"):
            Group.threads(world)


def test_memory_is_told_before_it_is_taken():
    for world, slots, ubatches in itertools.product([2, 4], [2, 3], [1, 2]):
        rows = world * 64
        sizes = dict(slots=slots, ubatches=ubatches)
        at_least = rows * 1152 * slots * ubatches
        gpu = direct_dcp.memory_bytes(rows, 1152, world, device="cuda", **sizes)
        assert gpu >= at_least and gpu % (2 << 20) == 0
        cpu = direct_dcp.memory_bytes(rows, 1152, world, **sizes)
        assert at_least <= cpu < at_least + (1 << 20)
        push = direct_dcp.memory_bytes(rows, 1152, world, way="push", **sizes)
        assert push >= world * at_least

    def rank(group):
        gather = KvGather(group, 128, 1152)
        return gather.memory_bytes

    assert in_threads(2, rank) == [direct_dcp.memory_bytes(128, 1152, 2)] * 2


def test_bytes_pass_between_ranks():
    def rank(group):
        return group.all_gather(b"rank %d" % group.rank)

    assert in_threads(3, rank) == [[b"rank 0", b"rank 1", b"rank 2"]] * 3


def test_references_are_no_bytes():
    def rank(group):
        gather = KvGather(group, 4, 8)
        objects = numpy.array([None] * 2, dtype=object)
        fields = numpy.zeros(1, dtype=[("Old", "u4"), ("O", "f4")])
        for references in [objects, numpy.zeros(1, dtype=[("a", object)])]:
            with raises(direct_dcp.InvalidArgument, "references"):
                gather.gather_into(bytes(8), references)
            with raises(direct_dcp.InvalidArgument, "references"):
                gather.gather_into(references, bytearray(16))
        assert objects[0] is None
        out = bytearray([POISON]) * 16
        gather.gather_into(fields, out)
        assert out == bytes(16)
        assert gather.status().epochs == [1]

    in_threads(2, rank)


def test_a_rank_that_comes_too_late_for_a_rebuild_is_told():
    done = threading.Event()

    def rank(group):
        if group.rank == 2:
            done.wait()
            with raises(direct_dcp.Excluded):
                group.rebuild(0.1)
            return
        rebuilt = group.rebuild(0.2)
        assert rebuilt.previous_ranks == [0, 1]
        rebuilt.barrier()
        done.set()

    in_threads(3, rank)
