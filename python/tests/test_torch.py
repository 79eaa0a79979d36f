"""Torch without a GPU: tensors of the CPU, process groups, and how the operators are registered."""

import inspect
import tempfile

import pytest
import torch
import torch.multiprocessing
from helpers import in_threads, raises, watch
from operator_arguments import arguments, wrong_arguments
from torch._subclasses.fake_tensor import FakeTensorMode

import direct_dcp
from direct_dcp import FinalLayout, KvGather, _native, ops, vllm
from direct_dcp.plan import RowMap

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]


def rows_of(rank, call, count, dim, dtype):
    """Random bytes, seen as rows."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    row_bytes = dim * dtype.itemsize
    data = torch.randint(1, 255, (count, row_bytes), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


def rows_of_all(world, *which):
    return torch.cat([rows_of(rank, *which).view(torch.uint8) for rank in range(world)])


def same(tensor, reference):
    return torch.equal(tensor.view(torch.uint8), reference)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch tells from 2.10 on"
)
def test_where_a_tensor_lies_is_what_its_methods_say():
    for dtype in [*DTYPES, torch.uint8, torch.bool, torch.float64]:
        rows = rows_of(0, 1, 6, 32, dtype)
        for tensor in [
            rows,
            rows[2:5],
            rows[3],
            rows[3, 1],
            rows[4:4],
            rows[:, :0],
            rows.view(6, 1, 1, -1),
            rows.view(2, 3, -1).select(1, 1),
            rows[:, 1:],
            rows[::2],
            rows[:1, ::2],
            rows[1:2, 3:],
            rows.t(),
            rows[:1].t(),
            rows[:1].expand(6, -1),
            torch._lazy_clone(rows),
            rows.detach().to(torch.float64).requires_grad_(),
            torch._neg_view(rows) if dtype.is_floating_point else rows,
        ]:
            whole = tensor.is_contiguous() and not tensor.is_neg()
            span = _native.span(tensor, None)
            assert span == ((tensor.data_ptr(), tensor.nbytes) if whole else None)
            assert _native.span(tensor, 0) is None
    with FakeTensorMode():
        fake = torch.ones(2)
    ones = torch.ones(2, dtype=torch.complex64)
    for other in [
        ones,
        ones.conj(),
        ones.conj().imag,
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        fake,
        bytes(4),
        None,
        torch.Tensor,
    ]:
        assert _native.span(other, None) is None

    class Interrupted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *_):
            raise KeyboardInterrupt

    plain = torch.ones(2)
    with pytest.raises(KeyboardInterrupt), Interrupted():
        _native.span(plain, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_type(dtype):
    def rank(group):
        gather = KvGather(group, 2 * 9, dtype=dtype, dim=64)
        local = rows_of(group.rank, 1, 7, 64, dtype)
        out = torch.full((14, gather.row_bytes), 0xEE, dtype=torch.uint8).view(dtype)
        gather.gather_into(local, out)
        assert same(out, rows_of_all(2, 1, 7, 64, dtype))
        with gather.gather(local) as rows:
            assert (rows.dtype, rows.shape) == (dtype, (14, 64))
            assert same(rows, rows_of_all(2, 1, 7, 64, dtype))
        with raises(ValueError, "contiguous"):
            gather.gather_into(local[:, ::2], out)
        if dtype.is_floating_point and dtype.itemsize > 1:
            with raises(ValueError, "negative bit"):
                gather.gather_into(torch._neg_view(local), out)
        with raises(ValueError, "CPU"):
            gather.gather_into(torch.empty(7, 64, dtype=dtype, device="meta"), out)
        group.barrier()

    in_threads(2, rank)


def test_tensors_in_their_final_layout():
    def rank(group):
        me, counts = group.rank, [5, 2]
        # Packed records: 512 e4m3 elements, 4 scales, 64 bf16 elements.
        gather = KvGather(group, 8, 656)
        layout = FinalLayout(gather, RowMap.uneven(counts, me), [512, 16, 128])
        records = [rows_of(r, 1, n, 656, torch.uint8) for r, n in enumerate(counts)]
        both = torch.cat(records)
        with gather.gather_final(records[me], layout) as (latent, scales, rope):
            assert [plane.shape for plane in (latent, scales, rope)] == [
                (7, 512),
                (7, 16),
                (7, 128),
            ]
            assert same(latent.view(torch.float8_e4m3fn), both[:, :512])
            assert same(scales.view(torch.float32), both[:, 512:528])
            assert same(rope.view(torch.bfloat16), both[:, 528:])

        # From a cache that is a part of a wider one, and e4m3 elements to bf16 ones.
        gather = KvGather(group, 8, dtype=torch.bfloat16, dim=96)
        layout = FinalLayout(gather, RowMap.uneven(counts, me), [64, 32])
        caches = [rows_of(r, 2, 12, 112, torch.float8_e4m3fn).view(3, 4, 112) for r in (0, 1)]
        slots = [torch.randperm(12, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
        cache = caches[me][:, :, 8:104]
        taken = slots[me][: counts[me]]
        expected = torch.cat(
            [caches[r].view(12, 112)[slots[r][:n], 8:104] for r, n in enumerate(counts)]
        )
        expected = (expected.float() * 0.5).bfloat16()
        for some in (taken, taken.int(), taken.tolist()):
            with gather.gather_final(cache, layout, slots=some, scale=0.5) as (latent, rope):
                assert latent.dtype == torch.bfloat16
                assert torch.equal(latent.nan_to_num(7), expected[:, :64].nan_to_num(7))
                assert torch.equal(rope.nan_to_num(7), expected[:, 64:].nan_to_num(7))
                assert torch.utils.dlpack.from_dlpack(rope).data_ptr() == rope.data_ptr()

        # Nobody has rows.
        layout = FinalLayout(gather, RowMap.uneven([0, 0], me), [64, 32])
        with gather.gather_final(torch.empty(0, 96, dtype=torch.bfloat16), layout) as (latent, _):
            assert (latent.shape, latent.dtype) == ((0, 64), torch.bfloat16)
        with raises(ValueError, "CPU"):
            gather.gather_final(torch.empty(0, 96, device="meta"), layout)
        with raises(ValueError, "CPU"):
            gather.gather_final(torch.empty(0, 4, 96, device="meta"), layout, slots=[])
        with raises(ValueError, "whole numbers"):
            gather.gather_final(cache, layout, slots=taken.float(), scale=0.5)
        group.barrier()

    in_threads(2, rank)


def test_windows_of_tensors():
    def rank(group):
        gather = KvGather(group, 2 * 9, dtype=torch.bfloat16, dim=64, slots=3)
        with direct_dcp.Pipeline(gather) as pipeline:
            following = pipeline.submit(rows_of(group.rank, 0, 7, 64, torch.bfloat16))
            for window in range(6):
                ticket = following
                rows = rows_of(group.rank, window + 1, 7, 64, torch.bfloat16)
                following = pipeline.submit(rows)
                with pipeline.acquire(ticket) as rows:
                    assert (rows.dtype, rows.shape) == (torch.bfloat16, (14, 64))
                    assert same(rows, rows_of_all(2, window, 7, 64, torch.bfloat16))

    in_threads(2, rank)


def _process(rank, store):
    watch()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=3
    )
    group = torch.distributed.group.WORLD
    gather = KvGather(direct_dcp.Group.from_torch(), 30, dtype=torch.bfloat16, dim=64)
    out = torch.full((12, 64), torch.nan, dtype=torch.bfloat16)
    gather.gather_into(rows_of(rank, 1, 4, 64, torch.bfloat16), out)
    assert same(out, rows_of_all(3, 1, 4, 64, torch.bfloat16))

    workspace = vllm.DirectDCPKVGatherWorkspace(group, torch.device("cpu"), 30, 64)
    assert (workspace.world_size, workspace.rank) == (3, rank)
    # The last one exceeds the capacity.
    for call, count in enumerate([1, 10, 7, 11]):
        out = torch.full((3 * count, 64), torch.nan, dtype=torch.bfloat16)
        workspace.gather(out, rows_of(rank, call, count, 64, torch.bfloat16))
        assert same(out, rows_of_all(3, call, count, 64, torch.bfloat16))
    with raises(ValueError, "gathered_kv"):
        workspace.gather(out[1:], rows_of(rank, 0, 11, 64, torch.bfloat16))
    workspace.check()

    # A part of the ranks is a group of its own.
    pair = torch.distributed.new_group([0, 2])
    if rank != 1:
        workspace = vllm.DirectDCPKVGatherWorkspace(pair, torch.device("cpu"), 8, 64)
        out = torch.full((2, 64), torch.nan, dtype=torch.bfloat16)
        workspace.gather(out, rows_of(workspace.rank, 5, 1, 64, torch.bfloat16))
        assert same(out, rows_of_all(2, 5, 1, 64, torch.bfloat16))

    refused = [
        (dict(num_ubatches=0), "ubatch"),
        (dict(max_gathered_tokens=31), "divide evenly"),
        (dict(max_gathered_tokens=0), "positive"),
        (dict(token_dim=3), "16-byte"),
        (dict(dtype=torch.float32), "float8_e4m3fn"),
    ]
    for options, word in refused:
        arguments = dict(group=group, device="cpu", max_gathered_tokens=30, token_dim=64)
        with raises(ValueError, word):
            vllm.DirectDCPKVGatherWorkspace(**{**arguments, **options})
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    with raises(ValueError, "two ranks"):
        vllm.DirectDCPKVGatherWorkspace(alone, "cpu", 30, 64)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_process_groups():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (f"{folder}/store",), nprocs=3)


def test_the_operators_have_their_signatures():
    schema = torch.ops.direct_dcp.direct_dcp_kv_gather.default._schema
    mutated = [argument.name for argument in schema.arguments if argument.alias_info]
    assert mutated == ["received_kv", "received_signal", "completion", "epoch", "gathered_kv"]
    assert all(argument.alias_info.is_write for argument in schema.arguments if argument.alias_info)
    names = [argument.name for argument in schema.arguments]
    assert names == list(inspect.signature(ops.kv_gather).parameters) and not schema.returns
    assert torch.ops.direct_dcp.direct_dcp_kv_gather_peers.overloads() == ["default", "tables"]


def test_the_operators_are_traced_without_a_device():
    with FakeTensorMode():
        assert torch.ops.direct_dcp.direct_dcp_kv_gather(**arguments()) is None
        peers = arguments()
        del peers["kv_mc_ptr"], peers["signal_mc_ptr"]
        lists = dict(kv_peer_ptrs=[16, 32], signal_peer_ptrs=[16, 32])
        assert torch.ops.direct_dcp.direct_dcp_kv_gather_peers(**peers, **lists) is None


def test_each_argument_is_checked():
    with FakeTensorMode():
        for changes, word in wrong_arguments("cuda:1"):
            with raises(RuntimeError, word) as refused:
                ops.kv_gather(**arguments(**changes))
            assert isinstance(refused.value, ValueError)


def test_the_operator_is_added_to_a_vllm_without_it():
    added = vllm.register()
    assert not vllm.register()
    if added:
        ours = torch.ops.direct_dcp.direct_dcp_kv_gather.default._schema
        theirs = torch.ops._C.direct_dcp_kv_gather.default._schema
        assert str(theirs) == str(ours).replace("direct_dcp::", "_C::")
