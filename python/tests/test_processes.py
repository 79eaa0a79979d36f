"""Ranks that are processes, and what carries their handshake."""

import os
import pathlib
import pickle
import socket
import subprocess
import sys
import time

from helpers import raises

import direct_dcp

RANK = """
import sys
sys.path.insert(0, sys.argv[1])
from helpers import watch
watch()
from test_cpu import rows_of, rows_of_all
from direct_dcp import Group, KvGather

group = Group.from_env()
gather = KvGather(group, 3 * 40, 576)
for call, count in enumerate([1, 40, 17]):
    out = bytearray(3 * count * 576)
    gather.gather_into(rows_of(group.rank, call, count, 576), out)
    assert out == rows_of_all(3, call, count, 576)
group.barrier()
print("whole", group.rank)
"""


EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "01_torchrun.py"


def start(world, *arguments):
    """Runs Python with these arguments as every rank, as torchrun does, and returns what they say."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world):
        variables = dict(
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=world,
            LOCAL_WORLD_SIZE=world,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        command = [sys.executable, *map(str, arguments)]
        both = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ranks.append(subprocess.Popen(command, env=environment, **both))
    ends = [(process.communicate(timeout=100)[0], process.returncode) for process in ranks]
    assert all(status == 0 for _, status in ends), ends
    return [said for said, _ in ends]


def test_ranks_as_torchrun_starts_them():
    said = start(3, "-c", RANK, os.path.dirname(__file__))
    assert said == [f"whole {rank}\n" for rank in range(3)]


def test_the_example_runs():
    said = start(4, EXAMPLE)
    assert said == [f"rank {rank} of 4: 68 rows by shared-slot\n" for rank in range(4)]


def test_a_store_that_raises_is_what_one_hears_of():
    def all_gather(data):
        assert isinstance(data, bytes)
        raise KeyError("the store is empty")

    try:
        direct_dcp.Group.from_exchange(0, 2, all_gather)
    except KeyError as error:
        assert "the store is empty" in str(error)
    else:
        raise AssertionError("the store has raised")


def test_errors_travel_between_processes():
    late = direct_dcp.Timeout("rank 3 is late", [3], 7)
    copy = pickle.loads(pickle.dumps(late))
    assert (str(copy), copy.missing, copy.epoch) == ("rank 3 is late", [3], 7)
    for kind in (direct_dcp.Error, direct_dcp.InvalidArgument):
        assert issubclass(kind, RuntimeError)
    assert issubclass(direct_dcp.InvalidArgument, ValueError)


FORK = """
import os, signal, sys, time
# The watchdog of the other tests is a thread, which a child waits for and does not have.
signal.alarm(100)
sys.path.insert(0, sys.argv[1])
from test_cpu import rows_of, rows_of_all
import direct_dcp
from direct_dcp import Group, KvGather, Pipeline

group = Group.from_env()
gather = KvGather(group, 2 * 40, 576)
pipeline = Pipeline(KvGather(group, 2 * 40, 576))
for call in range(2):
    out = bytearray(2 * 40 * 576)
    gather.gather_into(rows_of(group.rank, call, 40, 576), out)
    assert out == rows_of_all(2, call, 40, 576)
    window = pipeline.acquire(pipeline.submit(out[:576]))
    assert window.rows[:576] == window.rows[576:] == out[:576]
    window.release()
    if call == 0 and group.rank == 0:
        child = os.fork()
        if child == 0:
            # Its thread is not here.
            pipeline.close()
            for call in (lambda: gather.gather_into(out[:576], out), group.barrier):
                try:
                    call()
                except direct_dcp.Error as error:
                    assert "fork" in str(error), error
                else:
                    sys.exit(1)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(1)
group.barrier()
print("whole", group.rank)
"""


def test_a_forked_child_is_nobody_in_the_group():
    said = start(2, "-c", FORK, os.path.dirname(__file__))
    assert said == [f"whole {rank}\n" for rank in range(2)]


def test_a_store_is_waited_for_no_longer_than_was_said(tmp_path):
    """Rank 1 is heard of, and never comes."""
    start = time.monotonic()
    with raises(direct_dcp.Timeout) as late:
        direct_dcp.Group.from_exchange(
            0, 2, lambda card: [card, card.split(b"\n")[0] + b"\n" + bytes(tmp_path)], timeout=0.2
        )
    assert late.value.missing == [1]
    assert time.monotonic() - start < 10


def test_ranks_that_miss_each_other_leave_nothing_behind(tmp_path):
    code = """
import direct_dcp, os, time
os.environ["DIRECT_DCP_TIMEOUT"] = "100"
start = time.monotonic()
try:
    direct_dcp.Group.from_env(timeout=0.2)
except direct_dcp.Timeout as late:
    assert time.monotonic() - start < 10
    print(late.missing)
"""
    for rank in (0, 1):
        variables = dict(RANK=rank, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
        environment = {**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""}
        environment |= {name: str(value) for name, value in variables.items()}
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        others = [other for other in range(3) if other != rank]
        assert (run.stdout, run.stderr) == (f"{others}\n", "")
        assert not list(tmp_path.iterdir())
