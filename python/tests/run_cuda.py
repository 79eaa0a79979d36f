"""Runs the tests of `test_cuda.py` where pytest is not installed.

    CUDA_DEVICE_MAX_CONNECTIONS=32 python python/tests/run_cuda.py [part of a name …]

It needs a GPU, torch, and the installed wheel. Ranks are streams of one process, and streams that
share a hardware queue would wait for each other: hence the variable, which it sets itself.
"""

import os
import sys
import time
import traceback

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
sys.path.insert(0, os.path.dirname(__file__))

import helpers  # noqa: E402
import test_cuda  # noqa: E402


def main() -> int:
    wanted = sys.argv[1:]
    tests = {
        name: test
        for name, test in vars(test_cuda).items()
        if name.startswith("test_") and (not wanted or any(part in name for part in wanted))
    }
    failed = 0
    for name, test in tests.items():
        helpers.watch()
        start = time.monotonic()
        try:
            test()
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {name}")
        else:
            print(f"passed {name}, {time.monotonic() - start:.1f} s")
    print(f"{len(tests) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
