"""Waits for a condition instead of a time: a test that sleeps and hopes fails on a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""What hangs is known after so long; what works is done much earlier, on a busy machine too."""


async def until(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until `holds()` is true.

    Raises:
        AssertionError: When it is not within `within_s`.
    """
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "the condition does not hold"
        await asyncio.sleep(0.01)


def block_until(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """`until` for code without an event loop, which often asks a server: ever less often, since each question takes
    CPU time from what it waits for.
    """
    deadline_s, pause_s = time.monotonic() + within_s, 0.02
    while not holds():
        assert time.monotonic() < deadline_s, "the condition does not hold"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)


def becomes_true(holds: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Return whether `holds()` is true within the time, as `block_until` waits for it."""
    try:
        block_until(holds, within_s)
    except AssertionError:
        return False
    return True
