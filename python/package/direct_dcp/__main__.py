"""``python -m direct_dcp gather …`` is the program ``direct-dcp``: gather, bench, doctor."""

import signal
import sys

from . import _native


def main() -> int:
    """Run it with this process's arguments."""
    # Nothing here handles it: Ctrl-C ends the program at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    again = [sys.executable, "-m", "direct_dcp"]
    return _native.run(["direct-dcp", *sys.argv[1:]], again)


if __name__ == "__main__":
    sys.exit(main())
