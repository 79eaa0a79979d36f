"""Ctrl-C while a call waits for ranks that do not come."""

import os
import signal
import subprocess
import sys
import time

import pytest

#: Rank 0 is the main thread of a process; the others are there, and do nothing.
PROGRAM = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from helpers import watch
watch()
import direct_dcp
from direct_dcp import Group, KvGather

def ready():
    print("ready", flush=True)

def gathers(pause):
    # Rank 1 takes part in the first call.
    group, other = Group.threads(2)
    done = threading.Event()
    def peer():
        gather = KvGather(other, 2, 16)
        gather.gather_into(bytes(16), bytearray(32))
        done.set()
        time.sleep(100)
    threading.Thread(target=peer, daemon=True).start()
    gather = KvGather(group, 2, 16)
    gather.gather_into(bytes(16), bytearray(32))
    done.wait()
    time.sleep(pause)
    ready()
    return gather

def wait():
    if what == "from_env":
        os.environ |= dict(RANK="0", WORLD_SIZE="2", DIRECT_DCP_DIR=sys.argv[3])
        ready()
        Group.from_env()
    elif what == "from_exchange":
        ready()
        there = lambda card: [card, card.split(b"\\n")[0] + b"\\n" + sys.argv[3].encode()]
        Group.from_exchange(0, 2, there)
    elif what == "gather_into, later":
        gathers(0.3).gather_into(bytes(16), bytearray(32))
    else:
        # Held, so that nobody is lost.
        global ranks
        ranks = Group.threads(2)
        if what in ("gather", "gather_final", "pipeline", "pipeline, closed"):
            first = threading.Thread(target=lambda: other.append(KvGather(ranks[1], 2, 16)))
            other = []
            first.start()
            gather = KvGather(ranks[0], 2, 16)
            first.join()
            ready()
            if what == "gather":
                gather.gather(bytes(16))
            elif what == "gather_final":
                row_map = direct_dcp.plan.RowMap.uneven([1, 1], 0)
                gather.gather_final(bytes(16), direct_dcp.FinalLayout(gather, row_map))
            with direct_dcp.Pipeline(gather) as pipeline:
                ticket = pipeline.submit(bytes(16))
                if what == "pipeline":
                    pipeline.acquire(ticket)
        ready()
        if what == "barrier":
            ranks[0].barrier()
        elif what == "all_gather":
            ranks[0].all_gather(b"")
        elif what == "rebuild":
            ranks[0].rebuild(60.0)
        elif what == "agree":
            planner = direct_dcp.plan.ChunkPlanner(direct_dcp.plan.Sharding(2), 1, 8)
            planner.plan([5]).agree(ranks[0])
        elif what == "workspace":
            KvGather(ranks[0], 2, 16)

what = sys.argv[2]
try:
    wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(0)
"""

WAITS = [
    "from_env",
    "from_exchange",
    "barrier",
    "all_gather",
    "rebuild",
    "workspace",
    "gather",
    "gather_final",
    "pipeline",
    "pipeline, closed",
    "agree",
    "gather_into, later",
]


@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_ends_a_wait(what, tmp_path):
    command = [sys.executable, "-c", PROGRAM, os.path.dirname(__file__), what, str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        try:
            assert program.stdout.readline() == "ready\n"
            time.sleep(0.3)
            start = time.monotonic()
            program.send_signal(signal.SIGINT)
            assert program.stdout.readline() == "interrupted\n"
            # It takes 50 ms; machines are slow at times.
            assert time.monotonic() - start < 5
            assert program.wait(100) == 0
        finally:
            program.kill()


def test_a_handler_that_does_not_raise_interrupts_nothing():
    code = """
import signal, threading, time, os
import direct_dcp
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
ranks = direct_dcp.Group.threads(2)
def other():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.5)
    ranks[1].barrier()
thread = threading.Thread(target=other)
thread.start()
ranks[0].barrier()
assert seen and time.monotonic() - seen[0] > 0.2
thread.join()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stderr) == (0, "")
