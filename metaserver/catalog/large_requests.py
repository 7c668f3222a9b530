"""Work on what a client sent, whose duration grows with it: a schema of 50,000 columns takes seconds to check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from seamark.metaserver.wire import encode_json

T = TypeVar("T")

LARGE_BYTES = 128 << 10
"""Of JSON. Less takes milliseconds."""


async def run_by_size(given: object, work: Callable[[], T]) -> T:
    """The result of `work`, which is pure: of a large request in a thread, so that the loop serves others meanwhile."""
    if len(encode_json(given)) <= LARGE_BYTES:
        return work()
    return await asyncio.to_thread(work)
