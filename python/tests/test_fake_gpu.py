"""Gathers on GPUs that are made up: the fake driver runs the kernels on the CPU.

`cargo xtask test` builds it and says where it is.
"""

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = os.environ.get("DIRECT_DCP_FAKE_GPU")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="DIRECT_DCP_FAKE_GPU names no folder")


def run(name, *arguments):
    folder = pathlib.Path(FOLDER)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(folder / "libdirect_dcp_fake_gpu.so"),
        "DIRECT_DCP_LIBCUDA": str(folder / "libdirect_dcp_fake_cuda.so"),
    }
    program = pathlib.Path(__file__).with_name("fake_gpu.py")
    command = [sys.executable, str(program), name, *map(repr, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and ended.stdout == "done\n", ended.stdout + ended.stderr


@pytest.mark.parametrize("way", [None, "push", "pull", "copy-engine", "staged"])
def test_every_way_delivers(way):
    run("gathers", way)


@pytest.mark.parametrize("way", [None, "push"])
def test_rows_arrive_in_their_final_layout(way):
    run("finals", way)


def test_rows_are_converted():
    run("converted")


@pytest.mark.parametrize("way", ["pull", "copy-engine", "staged"])
def test_ways_say_what_they_cannot_place(way):
    run("refused", way)


@pytest.mark.parametrize("way", [None, "push", "pull", "copy-engine", "staged"])
def test_windows_arrive(way):
    run("pipelines", way)


def test_a_missing_rank_is_named():
    run("timeout")


@pytest.mark.parametrize("world", [2, 3])
def test_engines_memory(world):
    run("guests", world)
