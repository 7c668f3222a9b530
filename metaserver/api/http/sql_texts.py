"""Reads SQL of clients: a short text at once, other texts in a thread, one of all at a time.

The parser is Python and shares the interpreter with the event loop. Several threads of it would leave the loop little
time, and take the threads that all other work of the server needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from seamark.formats.runtime.lazy_module import LazyModule, load
from seamark.metaserver.api.http.dispatch import Call

T = TypeVar("T")
_sql = LazyModule("seamark.formats.iceberg.expressions.sql")

IN_LOOP_CHARACTERS = 500
"""The parser takes some milliseconds for that many, for any text."""


async def read_in_turn(call: Call, characters: int, read: Callable[[], T]) -> T:
    """Return the result of `read`, which parses so many characters.

    A caller waits for its own texts first: others wait for one of them at most.
    """
    await load(_sql)
    if characters <= IN_LOOP_CHARACTERS:
        result = read()
        await asyncio.sleep(0)  # a request may have a text in each of many joins
        return result
    return await call.components.worker_limits.reading_sql.run(call.principal.name, read)
