"""The package as a whole: what importing it does, and the program."""

import importlib.metadata
import pathlib
import subprocess
import sys
import time

import direct_dcp

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "examples" / "data" / "minilm_kv_small.safetensors"


def python(*args):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=100)


def test_importing_is_quick_and_touches_nothing():
    code = (
        "import sys, time; start = time.perf_counter(); import direct_dcp; "
        "took = time.perf_counter() - start; "
        "assert not {'torch', 'numpy', 'ctypes.util'} & set(sys.modules); "
        "assert 'libcuda' not in open('/proc/self/maps').read(); print(took)"
    )
    runs = [python("-c", code) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    assert min(float(run.stdout) for run in runs) < 0.2


def test_the_package_is_typed():
    folder = pathlib.Path(direct_dcp.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_native.pyi").exists()
    stub = (folder / "_native.pyi").read_text()
    names = [name for name in dir(direct_dcp._native) if not name.startswith("_")]
    assert "Group" in names and "memory_bytes" in names
    for name in names:
        assert f" {name}" in stub


def test_everything_that_is_offered_is_there():
    assert all(hasattr(direct_dcp, name) for name in direct_dcp.__all__)
    direct_dcp.check()


def test_the_program_gathers_with_threads_and_with_processes():
    for backend in ("threads", "processes"):
        run = python("-m", "direct_dcp", "gather", str(DATA), "--ranks", "3", "--backend", backend)
        assert run.returncode == 0, run.stderr
        assert "3 of 3 ranks got every row" in run.stdout


def test_the_program_tells_what_is_wrong():
    start = time.monotonic()
    missing = python("-m", "direct_dcp", "gather", "/nonexistent")
    assert missing.returncode == 1 and missing.stderr.startswith("error: ")
    assert python("-m", "direct_dcp", "no-such-command").returncode == 2
    assert time.monotonic() - start < 20


def test_the_readme_is_right():
    readme = (ROOT / "README.md").read_text()
    (program,) = [part.split("```")[0] for part in readme.split("```python\n")[1:]]
    run = python("-c", program)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "".join(f"rank {rank}: 68 rows by shared-slot\n" for rank in range(4))
    failing = program.replace("assert rows == out", "assert rows != out")
    assert python("-c", failing).returncode == 1


def test_what_comes_with_the_package():
    package = importlib.metadata.metadata("direct-dcp")
    assert package["License-Expression"] == "Apache-2.0"
    assert "In Python" in package.get_payload()
    files = importlib.metadata.files("direct-dcp")
    (license,) = [file for file in files if file.name == "LICENSE"]
    assert "Apache License" in license.read_text()


def test_types_have_names_without_numpy():
    code = """
import sys
sys.modules["numpy"] = sys.modules["torch"] = None
import direct_dcp
from direct_dcp._options import row_format
assert row_format(None, "float32", 8) == ("bytes", 32, 32)
assert row_format(None, "uint8", 8) == ("bytes", 8, 8)
assert row_format(None, "float16", 8) == ("f16", 8, 16)
group = direct_dcp.Group.threads(2)[0]
for name in ("fp8", "f16", None.__class__):
    try:
        direct_dcp.KvGather(group, 128, dtype=name, dim=8)
    except direct_dcp.InvalidArgument as error:
        assert "row_bytes" in str(error) and "float8_e5m2" in str(error), error
    else:
        raise AssertionError(name)
"""
    run = python("-c", code)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_machine_without_a_driver_is_told_so():
    code = """
import os
os.environ["DIRECT_DCP_LIBCUDA"] = "/nonexistent/libcuda.so"
import threading, direct_dcp
unsupported = []
def rank(group):
    try:
        direct_dcp.KvGather(group, 128, 1152, device="cuda", timeout=5)
    except direct_dcp.Unsupported as error:
        unsupported.append(str(error))
threads = [threading.Thread(target=rank, args=(group,)) for group in direct_dcp.Group.threads(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(unsupported) == 2, unsupported
"""
    run = python("-c", code)
    assert (run.returncode, run.stderr) == (0, "")
