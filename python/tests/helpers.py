"""What the tests share. It imports neither pytest nor torch."""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import direct_dcp

#: Longer than any test takes: a test that hangs ends the process, with the stacks of its threads.
PATIENCE = 120

#: What outputs hold before a call.
POISON = 0xEE


def watch() -> None:
    """Start the watchdog anew."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)


def random_bytes(count: int, seed: Any) -> bytes:
    """Bytes that differ by seed, none of them 0 or the poison."""
    values = [value for value in range(1, 256) if value != POISON]
    return bytes(random.Random(repr(seed)).choices(values, k=count))


def in_threads(world: int, body: Callable[[direct_dcp.Group], Any], **options: Any) -> list[Any]:
    """Runs `body` on every rank, a thread each, and returns or raises what they did."""
    groups = direct_dcp.Group.threads(world, **options)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = body(groups[rank])
        except BaseException as error:
            errors[rank] = error
            # At once: a peer may hang for it, and the watchdog says nothing of this.
            print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
        finally:
            # Leaves the group, so that nobody waits for it.
            groups[rank] = None  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(filter(None, errors), key=_is_echo):
        raise error
    return results


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, (direct_dcp.PeerLost, direct_dcp.Timeout))


class raises:
    """A block that must raise; the exception is `.value` then."""

    def __init__(self, kind: type[BaseException], *words: str) -> None:
        self.kind, self.words = kind, words

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: Any, value: Any, _: Any) -> bool:
        assert kind is not None, f"{self.kind.__name__} was expected"
        if not isinstance(value, self.kind):
            return False
        for word in self.words:
            assert word in str(value), f"{word!r} is not in {str(value)!r}"
        self.value = value
        return True
