"""Gathers on one GPU, from torch: run by pytest, or by `run_cuda.py` where there is none.

Ranks are threads of this process with a stream each. `run_cuda.py` says how to start it.
"""

import gc
import importlib.util
import os
import shutil
import statistics
import tempfile
import threading
import time
from unittest import mock

import torch
import torch.multiprocessing
from helpers import in_threads, raises, watch
from operator_arguments import arguments, wrong_arguments

import direct_dcp
from direct_dcp import FinalLayout, KvGather, ops, vllm
from direct_dcp.plan import RowMap

try:
    import pytest
except ImportError:
    pass
else:
    pytestmark = pytest.mark.cuda

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]
WAYS = [None, "push", "pull", "copy-engine", "staged"]
DIM = 576


def rows_of(rank, call, count, dtype=torch.bfloat16):
    """Random bytes, seen as rows on the device."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    shape = (count, DIM * dtype.itemsize)
    data = torch.randint(1, 255, shape, generator=generator, dtype=torch.uint8)
    return data.cuda().view(dtype)


def rows_of_all(world, call, count, dtype=torch.bfloat16):
    return torch.cat([rows_of(rank, call, count, dtype).view(torch.uint8) for rank in range(world)])


def poisoned(count, dtype=torch.bfloat16):
    return torch.full((count, DIM * dtype.itemsize), 0xEE, dtype=torch.uint8).cuda().view(dtype)


def same(tensor, reference):
    return torch.equal(tensor.view(torch.uint8), reference)


def on_streams(world, body, **options):
    """Runs `body(group)` in a thread and on a stream for each rank."""
    # Made here, each with a copy in, a kernel and a copy out, so that no rank waits for the device
    # while another's kernel waits for it.
    while len(_streams) < world:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.arange(8).cuda().add(1).cpu()
        stream.synchronize()
        _streams.append(stream)

    def rank(group):
        with torch.cuda.stream(_streams[group.rank]):
            return body(group)

    # Nor may a rank's thread free what earlier tests have left.
    gc.collect()
    gc.disable()
    try:
        return in_threads(world, rank, **options)
    finally:
        gc.enable()


_streams: list[torch.cuda.Stream] = []


def test_rows_arrive_in_rank_order():
    for way in WAYS:
        for dtype in DTYPES:

            def rank(group):
                gather = KvGather(
                    group, 4 * 1024, dtype=dtype, dim=DIM, ubatches=2, device="cuda", way=way
                )
                calls = list(enumerate([1, 128, 17, 1024]))
                rows = [rows_of(group.rank, call, count, dtype) for call, count in calls]
                outs = [poisoned(4 * count, dtype) for _, count in calls]
                torch.cuda.current_stream().synchronize()
                group.barrier()
                for call, _ in calls:
                    gather.gather_into(rows[call], outs[call], call % 2)
                gather.wait()
                group.barrier()
                for (call, count), out in zip(calls, outs):
                    assert same(out, rows_of_all(4, call, count, dtype)), (way, dtype, call)
                assert gather.status().epochs == [2, 2]
                group.barrier()

            on_streams(4, rank)


def test_zero_copy_lends_the_slot():
    def rank(group):
        gather = KvGather(group, 2 * 64, dtype=torch.bfloat16, dim=DIM, device="cuda")
        local = rows_of(group.rank, 1, 64)
        torch.cuda.current_stream().synchronize()
        group.barrier()
        with gather.gather(local) as rows:
            assert (rows.dtype, rows.shape) == (torch.bfloat16, (128, DIM))
            with raises(direct_dcp.SlotInUse):
                gather.gather(local)
            copy = rows.clone()
        gather.wait()
        group.barrier()
        assert same(copy, rows_of_all(2, 1, 64))
        group.barrier()

    on_streams(2, rank)


def test_rows_arrive_in_their_final_layout():
    counts, block = [37, 0, 64], 16
    # Rows of a cache that is a part of a wider one: as they are, and e4m3 elements to bf16 ones.
    generator = torch.Generator().manual_seed(7)
    for dtype, scale in [(torch.bfloat16, None), (torch.float8_e4m3fn, 0.5)]:
        shape = (8, block, (DIM + 64) * dtype.itemsize)
        caches = [
            torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8).view(dtype)
            for _ in counts
        ]
        slots = [torch.randperm(8 * block, generator=generator)[:count] for count in counts]
        rows = [cache.view(-1, DIM + 64)[at, 16:-48] for cache, at in zip(caches, slots)]
        expected = torch.cat(rows)
        if scale is not None:
            expected = (expected.float() * scale).bfloat16()

        def rank(group):
            me = group.rank
            gather = KvGather(
                group, 3 * 64, dtype=torch.bfloat16, dim=DIM, device="cuda", way="push"
            )
            layout = FinalLayout(gather, RowMap.uneven(counts, me), [512, 64])
            cache, at = caches[me].cuda()[:, :, 16:-48], slots[me].int().cuda()
            dense = rows[me].cuda().contiguous()
            copies = [torch.empty(sum(counts), 576, dtype=torch.bfloat16).cuda() for _ in range(2)]
            torch.cuda.current_stream().synchronize()
            group.barrier()
            for (source, where), copy in zip([(cache, at), (dense, None)], copies):
                with gather.gather_final(source, layout, slots=where, scale=scale) as (
                    latent,
                    rope,
                ):
                    assert (latent.dtype, latent.shape) == (torch.bfloat16, (sum(counts), 512))
                    copy[:, :512].copy_(latent)
                    copy[:, 512:].copy_(rope)
            gather.wait()
            for copy in copies:
                assert same(copy.cpu(), expected.view(torch.uint8))
            with raises(ValueError, "32 bits"):
                gather.gather_final(cache, layout, slots=at.long(), scale=scale)
            with raises(ValueError, "cuda:0"):
                gather.gather_final(cache, layout, slots=at.cpu(), scale=scale)
            group.barrier()

        on_streams(3, rank)


def test_windows_in_flight():
    def rank(group):
        gather = KvGather(group, 2 * 64, dtype=torch.bfloat16, dim=DIM, device="cuda", slots=3)
        locals_ = [rows_of(group.rank, window, 64) for window in range(12)]
        copies = [poisoned(128) for _ in locals_]
        torch.cuda.current_stream().synchronize()
        group.barrier()
        with direct_dcp.Pipeline(gather) as pipeline:
            # The pipeline holds what it gathers from.
            following = pipeline.submit(locals_.pop(0))
            for copy in copies:
                ticket = following
                if locals_:
                    following = pipeline.submit(locals_.pop(0))
                with pipeline.acquire(ticket) as rows:
                    copy.copy_(rows)
        gather.wait()
        group.barrier()
        for window, copy in enumerate(copies):
            assert same(copy, rows_of_all(2, window, 64)), window
        group.barrier()

    on_streams(2, rank)


def test_a_captured_gather_is_replayed():
    def rank(group):
        gather = KvGather(group, 2 * 32, dtype=torch.bfloat16, dim=DIM, device="cuda")
        inputs = [rows_of(group.rank, call, 32) for call in range(5)]
        local, out = inputs[0].clone(), poisoned(64)
        stream = torch.cuda.current_stream()
        stream.synchronize()
        group.barrier()
        gather.gather_into(local, out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        group.barrier()
        with lock:  # captures of one process take turns
            graph.capture_begin(capture_error_mode="thread_local")
            gather.gather_into(local, out)
            graph.capture_end()
        for call in range(1, 5):
            local.copy_(inputs[call])
            out.fill_(float("nan"))
            stream.synchronize()
            group.barrier()
            # Replays and eager calls count on.
            gather.gather_into(local, out) if call == 2 else graph.replay()
            stream.synchronize()
            group.barrier()
            assert same(out, rows_of_all(2, call, 32)), call
        gather.check()
        assert gather.status().epochs == [5]
        group.barrier()
        del graph

    lock = threading.Lock()
    on_streams(2, rank)


def _process(rank, world, store):
    """One of the ranks that are processes, on one device."""
    watch()
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    group = direct_dcp.Group.from_torch()
    for dtype in DTYPES:
        gather = KvGather(group, world * 1024, dtype=dtype, dim=DIM, device="cuda")
        workspace = vllm.DirectDCPKVGatherWorkspace(
            torch.distributed.group.WORLD, torch.device("cuda", 0), world * 1024, DIM, dtype
        )
        for call, count in enumerate([1, 17, 128, 1024]):
            local, out = rows_of(rank, call, count, dtype), poisoned(world * count, dtype)
            expected = rows_of_all(world, call, count, dtype)
            again = out.clone()
            torch.cuda.synchronize()
            group.barrier()
            gather.gather_into(local, out)
            with gather.gather(local) as rows:
                lent = rows.clone()
            workspace.gather(again, local)
            gather.wait()
            workspace.check()
            for what in (out, lent, again):
                assert same(what, expected), (dtype, count)
            group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gather.gather_into(local, out)
        for call in range(4, 8):
            local.copy_(rows_of(rank, call, count, dtype))
            out.view(torch.uint8).fill_(0xEE)
            torch.cuda.synchronize()
            group.barrier()
            gather.gather_into(local, out) if call == 5 else graph.replay()
            gather.wait()
            assert same(out, rows_of_all(world, call, count, dtype)), (dtype, call)
            group.barrier()
        del graph
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_ranks_that_are_processes():
    """Beside each other under MPS, else in turns of some milliseconds."""
    # All clients of MPS together have some 100 queues.
    with mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="8"):
        for world in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(_process, (world, f"{folder}/store"), nprocs=world)


def test_a_missing_rank_is_named_and_the_device_works_on():
    done = threading.Event()

    def rank(group):
        gather = KvGather(
            group,
            8,
            dtype=torch.bfloat16,
            dim=DIM,
            device="cuda",
            timeout=0.3,
            first_timeout=0.3,
        )
        local, out = rows_of(group.rank, 0, 4), poisoned(8)
        torch.cuda.current_stream().synchronize()
        group.barrier()
        if group.rank == 1:
            done.wait()
            return
        gather.gather_into(local, out)
        with raises(direct_dcp.Timeout) as late:
            gather.wait()
        done.set()
        assert (late.value.missing, late.value.epoch) == ([1], 1)
        with raises(direct_dcp.Timeout):
            gather.gather_into(local, out)

    on_streams(2, rank)
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_what_a_call_takes_of_the_host_is_told():
    def rank(group):
        gather = KvGather(group, 2, dtype=torch.bfloat16, dim=DIM, device="cuda")
        local, out = rows_of(group.rank, 0, 1), poisoned(2)
        torch.cuda.current_stream().synchronize()
        group.barrier()
        return gather, local, out, torch.cuda.current_stream().cuda_stream

    # One thread submits for both ranks, for two would wait for each other's interpreter lock.
    ranks = on_streams(2, rank)
    times = []
    for _ in range(100):
        # Few at a time, so that the queue never fills up; and not one, which takes not much longer
        # than to ask for the time.
        start = time.thread_time_ns()
        for _ in range(10):
            for gather, local, out, stream in ranks:
                gather.gather_into(local, out, stream=stream)
        times.append((time.thread_time_ns() - start) / 20e3)
        for gather, *_, stream in ranks:
            gather.wait(stream=stream)
    for gather, _, out, _ in ranks:
        assert gather.status().epochs == [1000]
        assert same(out, rows_of_all(2, 0, 1))
    median = statistics.median(times)
    print(f"gather_into at T = 1: {median:.1f} µs of host time, median")


class Buffers:
    """What an engine allocates for one rank, in ordinary memory of one device."""

    def __init__(self, world, capacity, dtype=torch.bfloat16):
        self.world, self.capacity = world, capacity
        self.received = torch.full(
            (2, capacity, DIM * dtype.itemsize), 0xEE, dtype=torch.uint8, device="cuda"
        ).view(dtype)
        self.signal = torch.zeros((2, world), dtype=torch.int32, device="cuda")
        self.completion = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.epoch = torch.zeros(1, dtype=torch.int64, device="cuda")

    def prepare(self, rank, rows, signals):
        ops.prepare(
            self.received, self.signal, self.epoch, self.world, rank, rows, signals, self.world
        )

    def call(self, rank, local, gathered, rows, signals):
        op = torch.ops.direct_dcp.direct_dcp_kv_gather_peers
        op(*self.arguments(rank, local, gathered, rows, signals))

    def arguments(self, rank, local, gathered, rows, signals):
        tensors = (local, self.received, self.signal, self.completion, self.epoch, gathered)
        return (*tensors, self.world, rank, self.capacity, rows, signals, self.world)


def test_the_operator_between_ranks_of_one_device():
    for dtype in DTYPES:
        all_buffers = [Buffers(3, 3 * 1024, dtype) for _ in range(3)]
        rows = [buffers.received.data_ptr() for buffers in all_buffers]
        signals = [buffers.signal.data_ptr() for buffers in all_buffers]
        for rank, buffers in enumerate(all_buffers):
            buffers.prepare(rank, rows, signals)
        torch.cuda.synchronize()

        def body(group):
            buffers = all_buffers[group.rank]
            calls = list(enumerate([1, 128, 17, 1024]))
            inputs = [rows_of(group.rank, call, count, dtype) for call, count in calls]
            outs = [poisoned(3 * count, dtype) for _, count in calls]
            tables = torch.tensor(rows), torch.tensor(signals)
            for (call, _), local, out in zip(calls, inputs, outs):
                torch.cuda.current_stream().synchronize()
                group.barrier()
                lists = (rows, signals) if call % 2 else tables
                buffers.call(group.rank, local, out, *lists)
            torch.cuda.current_stream().synchronize()
            group.barrier()
            ops.check()
            for (call, count), out in zip(calls, outs):
                assert same(out, rows_of_all(3, call, count, dtype)), (dtype, call)
            assert buffers.epoch.item() == 4
            assert buffers.completion.tolist() == [0, 0]
            assert buffers.signal.tolist() == [[4, 4, 4], [3, 3, 3]]
            group.barrier()

        on_streams(3, body)


class Loop:
    """A rank that is its own peer: what it stores to the other is its own, next to it."""

    def __init__(self, count):
        self.buffers = Buffers(2, 2 * count)
        slice_bytes = count * DIM * 2
        rows, signals = self.buffers.received.data_ptr(), self.buffers.signal.data_ptr()
        self.rows, self.signals = [rows, rows + slice_bytes], [signals, signals + 4]

    def prepare(self):
        self.buffers.prepare(0, self.rows, self.signals)

    def call(self, local, gathered):
        self.buffers.call(0, local, gathered, self.rows, self.signals)


def test_the_operator_passes_torchs_own_checks():
    # It is executed on copies of its arguments, to see which it changes. Signals go to the
    # originals, so what the copies wait for is there from the beginning.
    loop = Loop(8)
    loop.buffers.signal[1] = 1
    loop.buffers.signal[0] = 2
    loop.buffers.received.zero_()
    local = torch.randn(8, DIM, device="cuda").bfloat16()
    arguments = loop.buffers.arguments(0, local, poisoned(16), loop.rows, loop.signals)
    op = torch.ops.direct_dcp.direct_dcp_kv_gather_peers.default
    torch.library.opcheck(op, arguments)
    torch.cuda.synchronize()
    ops.check()


def compiled_by(backend):
    """The operator as a part of a compiled function, twice."""
    loop = Loop(8)
    loop.prepare()
    buffers, op = loop.buffers, torch.ops.direct_dcp.direct_dcp_kv_gather_peers
    rows, signals = loop.rows, loop.signals
    inputs = [rows_of(0, call, 8) for call in range(2)]
    local, out = inputs[0].clone(), poisoned(16)

    def step(local, out):
        same_tensors = buffers.received, buffers.signal, buffers.completion, buffers.epoch
        op(local.view(8, DIM), *same_tensors, out, 2, 0, 16, rows, signals, 2)
        return out.view(torch.uint8) + 0

    step = torch.compile(step, backend=backend, fullgraph=True)
    for data in inputs:
        local.copy_(data)
        assert torch.equal(step(local, out), torch.cat([data, data]).view(torch.uint8))
    assert buffers.epoch.item() == 2
    ops.check()


def test_the_operator_refuses_each_wrong_argument():
    # Two GPUs, or the CPU in place of the second.
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    for changes, word in wrong_arguments(other):
        call = arguments(**changes)
        tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(0xEE) if tensor.is_contiguous() else tensor.fill_(7)
        before = [tensor.clone() for tensor in tensors]
        with raises(RuntimeError, word):
            torch.ops.direct_dcp.direct_dcp_kv_gather(**call)
        torch.cuda.synchronize()
        for tensor, kept in zip(tensors, before):
            # Bytes, for what they hold may be no number.
            now, then = (t.contiguous().view(torch.uint8) for t in (tensor, kept))
            assert torch.equal(now, then), word


def test_the_operator_is_traced():
    compiled_by("eager")


def test_the_operator_is_compiled():
    # What is compiled needs a compiler for its launchers.
    if shutil.which("cc") and importlib.util.find_spec("triton"):
        compiled_by("inductor")
    else:
        print("left out: no C compiler, or no triton")


def test_the_operator_is_captured():
    loop = Loop(8)
    loop.prepare()
    inputs = [rows_of(0, call, 8) for call in range(3)]
    local, out = inputs[0].clone(), poisoned(16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.call(local, out)
    for call, data in enumerate(inputs):
        local.copy_(data)
        out.fill_(float("nan"))
        # Replays and eager calls count on.
        graph.replay() if call != 1 else loop.call(local, out)
        torch.cuda.synchronize()
        assert same(out, torch.cat([data, data]).view(torch.uint8)), call
    assert loop.buffers.epoch.item() == 3
    ops.check()


def test_the_operator_tells_of_a_missing_rank():
    buffers, peer = Buffers(2, 8), Buffers(2, 8)
    local, out = rows_of(0, 1, 4), poisoned(8)
    rows = [buffers.received.data_ptr(), peer.received.data_ptr()]
    signals = [buffers.signal.data_ptr(), peer.signal.data_ptr()]
    before, ops.timeout = ops.timeout, 0.2
    try:
        buffers.call(0, local, out, rows, signals)
    finally:
        ops.timeout = before
    torch.cuda.synchronize()
    with raises(direct_dcp.Timeout) as late:
        direct_dcp.check()
    assert (late.value.missing, late.value.epoch) == ([1], 1)
    with raises(direct_dcp.Timeout):
        buffers.call(0, local, out, rows, signals)
    assert buffers.epoch.item() == 0
    # The peer comes at last: its signals are all that was missing.
    ops.reset()
    buffers.signal.fill_(0)
    buffers.signal[1, 1] = 1
    buffers.received[1, 4:] = local
    buffers.call(0, local, out, rows, signals)
    torch.cuda.synchronize()
    direct_dcp.check()
    assert buffers.epoch.item() == 1
    assert same(out, torch.cat([local, local]).view(torch.uint8))


def test_the_first_call_is_not_captured():
    loop, prepared = Loop(8), Loop(8)
    local, out = rows_of(0, 1, 8), poisoned(16)
    graph = torch.cuda.CUDAGraph()
    prepared.prepare()
    with torch.cuda.graph(graph):
        with raises(direct_dcp.Error, "eagerly"):
            loop.call(local, out)
        prepared.call(local, out)
    graph.replay()
    torch.cuda.synchronize()
    assert same(out, torch.cat([local, local]).view(torch.uint8))
