"""What `test_fake_gpu.py` runs in processes of their own, where the driver is the fake one: ranks
that are threads with a stream each, device memory by the driver's C API, no torch."""

import ctypes
import os
import sys

from helpers import POISON, in_threads, raises, random_bytes, watch

import direct_dcp
from direct_dcp import KvGather, _native
from direct_dcp._rows import OnDevice


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

    def array(self, data):
        """Bytes in device memory; the fake's devices are in reach of the host."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        ctypes.memmove(address.value, bytes(data), len(data))
        return OnDevice(address.value, len(data), self)

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
