"""Functions that wait for a condition. A test that sleeps for a fixed time would fail on a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 150.0
"""The time, in seconds, after which a wait fails. Successful waits end much earlier, even on a busy machine."""


async def until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until `condition()` is true.

    Raises:
        AssertionError: The condition was not true within `within_s`.
    """
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        await asyncio.sleep(0.01)


def block_until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait like `until`, for code without an event loop.

    The pauses grow, because each check takes CPU time from the process for which it waits.
    """
    deadline_s, pause_s = time.monotonic() + within_s, 0.02
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)


def becomes_true(condition: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Wait like `block_until`. Return False if the condition does not become true within `within_s`."""
    try:
        block_until(condition, within_s)
    except AssertionError:
        return False
    return True
