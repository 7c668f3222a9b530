"""Waits for a condition instead of a time: a test that sleeps for a fixed time fails on a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 150.0
"""The time after which a wait fails. Successful waits end much earlier, even on a busy machine."""


async def until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until `holds()` is true.

    Raises:
        AssertionError: The condition was not true within `within_s`.
    """
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition does not hold"
        await asyncio.sleep(0.01)


def block_until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait like `until`, for code without an event loop.

    The pauses grow, because each check, often a request, takes CPU time from the process that it waits for.
    """
    deadline_s, pause_s = time.monotonic() + within_s, 0.02
    while not condition():
        assert time.monotonic() < deadline_s, "the condition does not hold"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)


def becomes_true(condition: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Return whether `holds()` becomes true within the time, waiting like `block_until`."""
    try:
        block_until(condition, within_s)
    except AssertionError:
        return False
    return True
