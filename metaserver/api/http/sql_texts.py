"""Reads SQL of clients: a short text immediately, other texts in a thread, one text at a time in the whole process.

The parser is written in Python and shares the interpreter with the event loop. If it ran in several threads, the event
loop would have little time, and threads that all other work of the server needs would be occupied.
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
"""The maximum length of a text that is parsed in the event loop. Any text of this length takes some milliseconds."""


async def read_in_turn(call: Call, characters: int, read: Callable[[], T]) -> T:
    """Return the result of `read`, which parses a text of this many characters.

    A caller waits for its own earlier texts first, so other callers wait for at most one of them.
    """
    await load(_sql)
    if characters <= IN_LOOP_CHARACTERS:
        result = read()
        await asyncio.sleep(0)  # A request may have a text in each of many joins.
        return result
    return await call.components.worker_limits.reading_sql.run(call.principal.name, read)
