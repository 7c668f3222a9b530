"""Run awaitables concurrently. The first error cancels the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")


async def gather(work: Sequence[Callable[[], Awaitable[T]]], concurrent_max: int = 0) -> list[T]:
    """Return the results in the order of `work`, with at most `concurrent_max` running at the same time.

    If `concurrent_max` is 0, there is no limit. If an awaitable fails, the others are cancelled, and then its error is
    raised.
    """
    slots: AbstractAsyncContextManager[None] = asyncio.Semaphore(concurrent_max) if concurrent_max else nullcontext()

    async def run(begin: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await begin()

    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(begin)) for begin in work]
        return [task.result() for task in tasks]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        # The error's traceback references this frame, and a task references the error. Break the cycle, which would
        # keep the other results alive.
        tasks.clear()
