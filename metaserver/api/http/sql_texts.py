"""Parsing of SQL texts of clients. A short text is parsed immediately, and longer texts one at a time in a thread.

The parser is written in Python, and shares the GIL with the event loop. If it ran in several threads, the event loop
would have little time, and the parser would use threads that all other work of the server needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from seamark.formats.runtime.lazy_module import LazyModule, load_modules
from seamark.metaserver.api.http.dispatch import Call

T = TypeVar("T")
_sql = LazyModule("seamark.formats.iceberg.expressions.sql")

IN_LOOP_CHARACTERS = 500
"""The maximum length of a text that is parsed in the event loop. Such a text takes at most some milliseconds."""


async def read_in_turn(call: Call, characters: int, read_value: Callable[[], T]) -> T:
    """Return the result of `read_value`, which parses a text of this many characters.

    A short text is parsed at once in the event loop. The long texts of one principal are parsed one after another, so
    other principals wait for at most one of them.
    """
    await load_modules(_sql)
    if characters <= IN_LOOP_CHARACTERS:
        result = read_value()
        await asyncio.sleep(0)  # Other requests continue here, because a request may have many joins with a text each.
        return result
    return await call.components.worker_limits.reading_sql.run(call.principal.name, read_value)
