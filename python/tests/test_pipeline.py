"""Windows in flight between threads, in host memory."""

import threading
import time
from collections import deque

import numpy
import pytest
from helpers import in_threads, raises, random_bytes

import direct_dcp
from direct_dcp import FinalLayout, KvGather, Pipeline
from direct_dcp.plan import RowMap

ROW = 48


def rows_of(rank, window):
    return random_bytes((1 + 7 * window % 19) * ROW, (rank, window))


def rows_of_all(world, window):
    return b"".join(rows_of(rank, window) for rank in range(world))


@pytest.mark.parametrize("way", ["shared-slot", "push", "pull"])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_every_window_arrives(slots, way):
    def rank(group):
        gather = KvGather(group, 3 * 19, ROW, slots=slots, way=way)
        with Pipeline(gather) as pipeline:
            tickets = deque()
            for window in range(20):
                if len(tickets) == slots - 1:
                    read(pipeline, *tickets.popleft())
                if window % 5 == group.rank:
                    time.sleep(0.003)
                tickets.append((window, pipeline.submit(rows_of(group.rank, window))))
            for ticket in tickets:
                read(pipeline, *ticket)
        assert gather.status().epochs == [20]
        # The ubatch is free again.
        with gather.gather(rows_of(group.rank, 99)) as rows:
            assert rows == rows_of_all(3, 99)

    def read(pipeline, window, ticket):
        assert ticket.epoch == window + 1
        with pipeline.acquire(ticket) as rows:
            assert rows.readonly and rows == rows_of_all(3, window)

    in_threads(3, rank)


def test_windows_of_arrays_and_in_their_final_layout():
    def rank(group):
        gather = KvGather(group, 16, dtype="float16", dim=24, slots=3)
        layout = FinalLayout(gather, RowMap.uneven([3, 2], group.rank), [16, 8])
        data = [numpy.frombuffer(random_bytes(n * ROW, n), "f2").reshape(n, 24) for n in (3, 2)]
        local, both = data[group.rank], numpy.concatenate(data)
        pipeline = Pipeline(gather)
        final = pipeline.submit_final(local, layout)
        rows = pipeline.submit(local[:2])
        with pipeline.acquire(final) as (first, second):
            assert (first.dtype, first.shape) == (numpy.float16, (5, 16))
            assert first.tobytes() == both[:, :16].tobytes()
            assert second.tobytes() == both[:, 16:].tobytes()
        lent = pipeline.acquire(rows)
        pipeline.close()
        pipeline.close()
        with raises(ValueError, "closed"):
            pipeline.submit(local[:2])
        group.barrier()
        # What was acquired outlives the pipeline, and the gather.
        del pipeline, gather
        assert (lent.rows.dtype, lent.rows.shape) == (numpy.float16, (4, 24))
        assert lent.rows.tobytes() == data[0][:2].tobytes() + data[1][:2].tobytes()

    in_threads(2, rank)


def test_windows_are_acquired_once_each_in_order():
    def rank(group):
        gather = KvGather(group, 2 * 19, ROW, slots=4, ubatches=2)
        pipeline, other = Pipeline(gather), Pipeline(gather, 1)
        first, second, third = (pipeline.submit(rows_of(group.rank, w)) for w in range(3))
        with raises(direct_dcp.SlotInUse) as held:
            pipeline.submit(rows_of(group.rank, 3))
        assert (held.value.ubatch, held.value.epoch) == (0, 1)
        with raises(ValueError, "call 2", "call 1"):
            pipeline.acquire(second)
        with raises(ValueError, "ticket"):
            other.acquire(first)
        lent = pipeline.acquire(first)
        with raises(ValueError, "call 1 is not the next"):
            pipeline.acquire(first)
        assert lent.rows == rows_of_all(2, 0)
        with raises(direct_dcp.SlotInUse):
            pipeline.submit(rows_of(group.rank, 3))
        lent.release()
        fourth = pipeline.submit(rows_of(group.rank, 3))
        # Given up, and skipped.
        del second
        with pipeline.acquire(third) as rows:
            assert rows == rows_of_all(2, 2)
        with pipeline.acquire(fourth) as rows:
            assert rows == rows_of_all(2, 3)
        for window in range(4, 12):
            pipeline.submit(rows_of(group.rank, window))
        with raises(ValueError, "local bytes"):
            pipeline.submit(bytes(ROW - 1))
        with raises(ValueError, "contiguous"):
            pipeline.submit(numpy.ones((ROW, 2), "u1")[:, 0])
        with raises(ValueError, "ubatch"):
            Pipeline(gather, 2)
        last = pipeline.submit(rows_of(group.rank, 12))
        with pipeline.acquire(last) as rows:
            assert rows == rows_of_all(2, 12)
        group.barrier()

    in_threads(2, rank)


def test_rows_are_let_go_once_they_are_gathered():
    def rank(group):
        pipeline = Pipeline(KvGather(group, 2 * 19, ROW))
        local = bytearray(rows_of(group.rank, 5))
        if group.rank == 1:
            late.wait(10)
        ticket = pipeline.submit(local)
        if group.rank == 0:
            # The peer is not there yet.
            with raises(BufferError):
                local.clear()
            late.set()
        lent = pipeline.acquire(ticket)
        local.clear()
        assert lent.rows == rows_of_all(2, 5)
        group.barrier()

    late = threading.Event()
    in_threads(2, rank)


def test_the_interpreter_is_free_while_a_window_is_waited_for():
    def rank(group):
        pipeline = Pipeline(KvGather(group, 2 * 19, ROW))
        if group.rank == 1:
            # The other one is waiting by now, and this thread still runs.
            time.sleep(0.3)
        with pipeline.acquire(pipeline.submit(rows_of(group.rank, 0))) as rows:
            assert rows == rows_of_all(2, 0)
        group.barrier()

    in_threads(2, rank)


def test_a_window_that_fails_ends_the_pipeline():
    def rank(group):
        gather = KvGather(group, 2 * 19, ROW, slots=3, timeout=2, first_timeout=20)
        pipeline = Pipeline(gather)
        first = pipeline.submit(rows_of(group.rank, 0))
        if group.rank == 1:
            pipeline.acquire(first).release()
            done.wait()
            return
        second = pipeline.submit(rows_of(group.rank, 1))
        with pipeline.acquire(first) as rows:
            assert rows == rows_of_all(2, 0)
        third = pipeline.submit(rows_of(group.rank, 2))
        for ticket in (second, third):
            with raises(direct_dcp.Timeout) as late:
                pipeline.acquire(ticket)
            assert (late.value.missing, late.value.epoch) == ([1], 2)
        with raises(direct_dcp.Error):
            pipeline.submit(rows_of(group.rank, 3))
        done.set()

    done = threading.Event()
    in_threads(2, rank)


def test_an_abort_ends_what_was_submitted():
    def rank(group):
        gather = KvGather(group, 2 * 19, ROW)
        if group.rank == 1:
            done.wait()
            return
        with Pipeline(gather) as pipeline:
            ticket = pipeline.submit(rows_of(group.rank, 0))
            group.abort()
            with raises(direct_dcp.Aborted):
                pipeline.acquire(ticket)
        done.set()

    done = threading.Event()
    in_threads(2, rank)
