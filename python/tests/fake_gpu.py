"""What `test_fake_gpu.py` runs in processes of their own, where the driver is the fake one: ranks
that are threads with a stream each, device memory by the driver's C API, no torch."""

import array
import ctypes
import os
import random
import sys
import weakref

from helpers import POISON, in_threads, raises, random_bytes, watch

import direct_dcp
from direct_dcp import FinalLayout, KvGather, _native
from direct_dcp._rows import OnDevice
from direct_dcp.plan import RowMap


class Device:
    """Memory and a stream of one device."""

    def __init__(self, ordinal):
        self.driver = ctypes.CDLL(os.environ["DIRECT_DCP_LIBCUDA"])
        self.context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), ordinal)
        self.enter()
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        self.stream = stream.value

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        assert code == 0, f"{name} failed: {code}"

    def enter(self):
        self.call("cuCtxPushCurrent_v2", self.context)

    def array(self, data, shape=None, typestr="|u1", strides=None):
        """An array in device memory; the fake's devices are in reach of the host."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        ctypes.memmove(address.value, bytes(data), len(data))
        there = OnDevice(address.value, len(data), self)
        interface = dict(shape=shape or (len(data),), typestr=typestr, strides=strides)
        there.__cuda_array_interface__.update(interface)
        return there

    def synchronize(self):
        self.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))


def address(array):
    return array.__cuda_array_interface__["data"][0]


def read(array):
    return ctypes.string_at(address(array), array.__cuda_array_interface__["shape"][0])


def rows_of_all(world, call, count, row_bytes):
    return b"".join(random_bytes(count * row_bytes, (rank, call)) for rank in range(world))


def gathers(way):
    def rank(group):
        device = Device(0)
        options = dict(dtype="bfloat16", dim=64, device="cuda:0", way=way)
        gather = KvGather(group, 3 * 32, **options)
        for call, count in enumerate([1, 32, 17]):
            local = device.array(random_bytes(count * 128, (group.rank, call)))
            out = device.array([POISON] * (3 * count * 128))
            group.barrier()
            gather.gather_into(local, out, stream=device.stream)
            gather.wait(stream=device.stream)
            assert read(out) == rows_of_all(3, call, count, 128)
            with gather.gather(local, stream=device.stream) as rows:
                gather.wait(stream=device.stream)
                assert read(rows) == rows_of_all(3, call, count, 128)
                with raises(direct_dcp.SlotInUse):
                    gather.gather_into(local, out, stream=device.stream)
            group.barrier()
        assert gather.status(stream=device.stream).epochs == [6]
        with raises(ValueError, "cuda:0"):
            gather.gather_into(bytearray(128), out, stream=device.stream)

    in_threads(3, rank)


def finals(way):
    """A cache with gaps, then plain rows, between ranks that have different numbers of them."""
    world, block, row_bytes, wide, page = 3, 4, 96, 112, 500
    counts, planes = [5, 0, 8], [64, 32]

    def cache_of(rank, call):
        return random_bytes(4 * page, (rank, call))

    def rows_at(rank, call, slots):
        data = cache_of(rank, call)
        places = [slot // block * page + slot % block * wide for slot in slots]
        return [data[place:][:row_bytes] for place in places]

    def rank(group):
        device, me = Device(0), group.rank
        gather = KvGather(group, 18, row_bytes, device=0, way=way, slots=2)
        layout = FinalLayout(gather, RowMap.uneven(counts, me), planes)
        slots_of = [random.Random(r).sample(range(16), count) for r, count in enumerate(counts)]
        slots = device.array(
            array.array("i", slots_of[me]).tobytes() or b"none", (counts[me],), "<i4"
        )
        for call in range(4):
            shape = (4, block, row_bytes)
            cache = device.array(cache_of(me, call), shape, strides=(page, wide, 1))
            rows = [rows_at(r, call, slots) for r, slots in enumerate(slots_of)]
            dense = device.array(b"".join(rows[me]) or b"none", (counts[me], row_bytes))
            whole = sum(rows, [])
            group.barrier()
            for source, at in [(cache, slots), (dense, None)]:
                with gather.gather_final(source, layout, slots=at, stream=device.stream) as lent:
                    gather.wait(stream=device.stream)
                    first, second = map(read, lent)
                    assert first == b"".join(row[:64] for row in whole)
                    assert second == b"".join(row[64:] for row in whole)
                    with raises(direct_dcp.SlotInUse):
                        gather.gather_final(dense, layout, stream=device.stream)
            group.barrier()
        on_host = KvGather(group, 18, row_bytes)
        other = FinalLayout(on_host, RowMap.uneven(counts, me), planes)
        for arguments, word in [
            (dict(rows=dense, layout=other), "device"),
            (dict(rows=bytearray(96), layout=layout), "cuda:0"),
            (dict(rows=cache, layout=layout), "contiguous"),
            (dict(rows=dense, layout=layout, slots=slots), "rows of 96 bytes, got 1"),
            (dict(rows=cache, layout=layout, slots=[0] * counts[me]), "slots: expected a tensor"),
            (dict(rows=cache, layout=layout, slots=dense), "32 bits"),
        ]:
            with raises(ValueError, word):
                gather.gather_final(stream=device.stream, **arguments)
        with raises(ValueError, f"slots: expected {counts[me]}, got 16"):
            many = device.array(bytes(64), (16,), "<i4")
            gather.gather_final(cache, layout, slots=many, stream=device.stream)
        assert gather.status(stream=device.stream).epochs == [8]
        group.barrier()
        if me == 0:
            slots = device.array(array.array("i", [0, 1, 2, 3, 16]).tobytes(), (5,), "<i4")
        gather.gather_final(cache, layout, slots=slots, stream=device.stream).release()
        with raises(direct_dcp.Error) as error:
            gather.wait(stream=device.stream)
        assert me != 0 or "cache slot 16, of 16" in str(error.value), error.value
        group.barrier()

    in_threads(world, rank)


def converted():
    """e4m3 rows become bf16 ones."""

    def rank(group):
        device = Device(0)
        gather = KvGather(group, 8, dtype="bfloat16", dim=16, device=0, way="push")
        layout = FinalLayout(gather, RowMap.uneven([2, 1], group.rank))
        # 1.0, -1.0, 2.0, 1.5 in e4m3, and their halves in bf16.
        local = device.array(bytes([0x38, 0xB8, 0x40, 0x3C] * 4 * (2 - group.rank)))
        group.barrier()
        with gather.gather_final(local, layout, scale=0.5, stream=device.stream) as (rows,):
            gather.wait(stream=device.stream)
            halves = array.array("H", [0x3F00, 0xBF00, 0x3F80, 0x3F40]).tobytes()
            assert read(rows) == halves * 4 * 3
        group.barrier()

    in_threads(2, rank)


def refused(way):
    """Ways that leave rows where they are, or in one piece; copy engines place plain rows only."""

    def rank(group):
        gather = KvGather(group, 8, dtype="bfloat16", dim=16, device=0, way=way)
        layout = FinalLayout(gather, RowMap.uneven([1, 1], group.rank))
        device = Device(0)
        local = random_bytes(32, group.rank)
        dense, halves = device.array(local), device.array(local[:16])
        cache, slots = device.array(local, (1, 1, 32)), device.array(bytes(4), (1,), "<i4")
        group.barrier()
        for arguments in [
            dict(rows=dense),
            dict(rows=cache, slots=slots),
            dict(rows=halves, scale=0.5),
        ]:
            if way == "copy-engine" and arguments["rows"] is dense:
                with gather.gather_final(dense, layout, stream=device.stream) as (rows,):
                    gather.wait(stream=device.stream)
                    assert read(rows) == random_bytes(32, 0) + random_bytes(32, 1)
                continue
            with raises(direct_dcp.Unsupported, "final layout"):
                gather.gather_final(layout=layout, stream=device.stream, **arguments)
        group.barrier()

    in_threads(2, rank)


def pipelines(way):
    def rank(group):
        device, me = Device(0), group.rank
        gather = KvGather(group, 2 * 32, 128, device=0, way=way, slots=3)
        # The host may reuse memory that nobody holds.
        alive = []

        def submit(window):
            count = 1 + 5 * window % 32
            local = device.array(random_bytes(count * 128, (me, window)))
            alive.append(weakref.ref(local))
            return window, count, pipeline.submit(local, stream=device.stream)

        def acquire(window, count, ticket):
            assert ticket.epoch == window + 1
            with pipeline.acquire(ticket, stream=device.stream) as rows:
                assert alive[window]() is None
                device.synchronize()
                assert read(rows) == rows_of_all(2, window, count, 128)

        with direct_dcp.Pipeline(gather) as pipeline:
            following = submit(0)
            for window in range(1, 12):
                this, following = following, submit(window)
                with raises(ValueError, "not the next"):
                    pipeline.acquire(following[2], stream=device.stream)
                assert alive[window]() is not None
                acquire(*this)
            acquire(*following)
            # Given up, and gathered all the same.
            for window in range(12, 14):
                submit(window)
            assert alive[12]() is not None
            pipeline.close(stream=device.stream)
            assert alive[12]() is None
        device.synchronize()
        gather.check()
        assert gather.status(stream=device.stream).epochs == [14]
        with raises(direct_dcp.InvalidArgument, "closed"):
            submit(14)
        group.barrier()
        pipeline = direct_dcp.Pipeline(gather)
        layout = FinalLayout(gather, RowMap.uneven([1, 1], me))
        with raises(direct_dcp.Unsupported, "KvGather.gather_final"):
            pipeline.submit_final(device.array(bytes(128)), layout)
        group.barrier()

    in_threads(2, rank)


def timeout():
    def rank(group):
        device = Device(0)
        limits = dict(timeout=0.2, first_timeout=0.2)
        gather = KvGather(group, 8, 16, device=0, **limits)
        local, out = device.array(bytes(16)), device.array([POISON] * 32)
        group.barrier()
        if group.rank == 0:
            gather.gather_into(local, out, stream=device.stream)
            with raises(direct_dcp.Timeout) as late:
                gather.wait(stream=device.stream)
            assert (late.value.missing, late.value.epoch) == ([1], 1)
        group.barrier()

    in_threads(2, rank)


def guests(world):
    """Gathers in memory that is laid out as an engine does it: no shapes, an epoch of its own."""
    device = Device(0)
    row_bytes, capacity = 128, world * 32
    received = [device.array([POISON] * (2 * capacity * row_bytes)) for _ in range(world)]
    signals = [device.array(bytes(2 * world * 4)) for _ in range(world)]
    epochs = [device.array(bytes(8)) for _ in range(world)]
    kernel = _native.Kernel(0, False)
    peers = list(zip(map(address, received), map(address, signals)))
    lanes = [
        kernel.lane(
            world, rank, capacity * row_bytes, peers[rank], peers, address(epochs[rank]), world
        )
        for rank in range(world)
    ]

    def rank(group):
        device, lane = Device(0), lanes[group.rank]
        for call, count in enumerate([1, 32, 17], start=1):
            size = count * row_bytes
            local = device.array(random_bytes(size, (group.rank, call)))
            out = device.array([POISON] * (world * size))
            group.barrier()
            lane.gather_into(
                count,
                row_bytes,
                (address(local), size),
                (address(out), world * size),
                device.stream,
                10.0,
            )
            device.synchronize()
            lane.check()
            assert read(out) == rows_of_all(world, call, count, row_bytes)
            assert int.from_bytes(read(epochs[group.rank]), "little") == call
            group.barrier()
        words = memoryview(read(signals[group.rank])).cast("I").tolist()
        assert words == [2] * world + [3] * world
        with raises(ValueError, "16"):
            span, room = (address(local), 24), (address(out), 24 * world)
            lane.gather_into(1, 24, span, room, device.stream, 1.0)
        with raises(ValueError, "at most"):
            big = 33 * row_bytes
            span, room = (address(local), big), (address(local) + big, big * world)
            lane.gather_into(33, row_bytes, span, room, device.stream, 1.0)
        group.barrier()
        if group.rank == 0:
            # The others skip this one.
            span, room = (address(local), size), (address(out), world * size)
            lane.gather_into(count, row_bytes, span, room, device.stream, 0.2)
            device.synchronize()
            with raises(direct_dcp.Timeout) as late:
                lane.check()
            assert late.value.missing == list(range(1, world)) and late.value.epoch == 4
            with raises(direct_dcp.Timeout):
                lane.gather_into(count, row_bytes, span, room, device.stream, 0.2)
            assert int.from_bytes(read(epochs[0]), "little") == 3
            lane.forget(device.stream)
            lane.check()
        group.barrier()

    in_threads(world, rank)


if __name__ == "__main__":
    watch()
    name, *arguments = sys.argv[1:]
    globals()[name](*map(eval, arguments))
    print("done")
