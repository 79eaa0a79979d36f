"""Arguments of the operator, right ones and wrong ones. It imports no pytest."""

import torch


def arguments(**changes):
    """Right ones, with these changes: fake tensors, unless there is a GPU."""

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    right = dict(
        local_kv=tensor(3, 64),
        received_kv=tensor(2, 8, 64),
        received_signal=tensor(2, 2, dtype=torch.int32),
        completion=tensor(2, dtype=torch.int32),
        epoch=tensor(1, dtype=torch.int64),
        gathered_kv=tensor(6, 64),
        world_size=2,
        rank=0,
        max_gathered_tokens=8,
        kv_mc_ptr=16,
        signal_mc_ptr=16,
    )
    return {**right, **changes}


def wrong_arguments(other_device):
    """Changes that make them wrong, one at a time, and a word of what is said of each."""

    def tensor(*shape, dtype=torch.bfloat16, device="cuda"):
        return torch.empty(shape, dtype=dtype, device=device)

    return [
        (dict(local_kv=tensor(3, 64, device="cpu")), "CUDA"),
        (dict(local_kv=tensor(3, 64, dtype=torch.float32)), "float8_e4m3fn"),
        (dict(local_kv=tensor(3, 1, 64)), "[T, D]"),
        (dict(local_kv=tensor(64, 3).T), "strided"),
        (dict(local_kv=tensor(0, 64)), "above 0"),
        (dict(local_kv=tensor(3, 0)), "above 0"),
        (dict(world_size=1), "world_size"),
        (dict(rank=2), "rank"),
        (dict(rank=-1), "rank"),
        (dict(max_gathered_tokens=5), "capacity"),
        (dict(max_gathered_tokens=16), "received_kv"),
        (dict(received_kv=tensor(2, 8, 64, dtype=torch.float32)), "received_kv"),
        (dict(received_kv=tensor(3, 8, 64)), "received_kv"),
        (dict(received_kv=tensor(2, 8, 72)), "received_kv"),
        (dict(received_kv=tensor(2, 64, 8).transpose(1, 2)), "strided"),
        (dict(received_kv=tensor(2, 8, 64, device=other_device)), "device"),
        (dict(received_signal=tensor(2, 2)), "received_signal"),
        (dict(received_signal=tensor(2, 3, dtype=torch.int32)), "received_signal"),
        (dict(received_signal=tensor(2, 2, dtype=torch.int32).T), "strided"),
        (dict(received_signal=tensor(2, 2, dtype=torch.int32, device=other_device)), "device"),
        (dict(completion=tensor(3, dtype=torch.int32)), "completion"),
        (dict(completion=tensor(2, dtype=torch.int64)), "completion"),
        (dict(completion=tensor(2, dtype=torch.int32, device=other_device)), "device"),
        (dict(epoch=tensor(1, dtype=torch.int32)), "epoch"),
        (dict(epoch=tensor(2, dtype=torch.int64)), "epoch"),
        (dict(epoch=tensor(1, dtype=torch.int64, device=other_device)), "device"),
        (dict(gathered_kv=tensor(5, 64)), "gathered_kv"),
        (dict(gathered_kv=tensor(6, 64, dtype=torch.float16)), "gathered_kv"),
        (dict(gathered_kv=tensor(64, 6).T), "strided"),
        (dict(gathered_kv=tensor(6, 64, device=other_device)), "device"),
        (dict(gathered_kv=tensor(6 * 64 + 1)[1:].view(6, 64)), "16-byte"),
        (dict(local_kv=tensor(3 * 64 + 1)[1:].view(3, 64)), "16-byte"),
        (dict(received_kv=tensor(2 * 8 * 64 + 1)[1:].view(2, 8, 64)), "16-byte"),
        (dict(kv_mc_ptr=0), "multicast"),
        (dict(signal_mc_ptr=0), "multicast"),
    ]
