"""Background work of a server, which runs until its context ends, and restarts after a failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

from seamark.formats.runtime.errors import SeamarkError

RESTART_S = 5.0
"""The time in seconds between a failure of the work and its restart."""
_log = structlog.get_logger("seamark.server")


def log_safely(log: Callable[..., object], event: str, **fields: Any) -> None:
    """Call `log`, and ignore its errors.

    Loops that must continue use this function, because logging can fail, for example on a full disk.
    """
    with contextlib.suppress(Exception):
        log(event, **fields)


@asynccontextmanager
async def run_in_background(name: str, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run `work` in the background while the context is active.

    If `work` ends or fails, it restarts after a delay. A failure is logged.
    """

    async def repeat_work() -> None:
        while True:
            try:
                await work()
            except SeamarkError as error:
                log_safely(_log.warning, "background work failed", work=name, error=error.message)
            except Exception:  # noqa: BLE001  a bug must not stop housekeeping permanently
                log_safely(_log.exception, "background work failed unexpectedly", work=name)
            await asyncio.sleep(RESTART_S)

    async with _run_task(name, repeat_work()):
        yield


@asynccontextmanager
async def run_once(name: str, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run `work` once in the background, at most until the context ends.

    A failure is logged.
    """

    async def run_and_log() -> None:
        try:
            await work()
        except Exception:  # noqa: BLE001  the server does not depend on it
            log_safely(_log.exception, "background work failed unexpectedly", work=name)

    async with _run_task(name, run_and_log()):
        yield


@asynccontextmanager
async def _run_task(name: str, work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a task while the context is active. When the context ends, cancel the task, and wait until it has ended."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
