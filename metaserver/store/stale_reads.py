"""Keeps the results of recent reads, for requests that allow stale answers while the database does not answer.

A result is used only for a request that allows its age (`metaserver/runtime/staleness.py`), and only if the
database failed or took too long for this request. All other requests read the database. The age counts from the start
of the read. The absence of a row is never kept: for example, an unknown token is looked up again for each request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.runtime.staleness import get_current_staleness
from seamark.metaserver.store.operations import (
    DropEntry,
    DropNamespace,
    Operation,
    RemoveGrant,
    RemoveGrantsOf,
    RenameEntry,
    RestoreEntry,
    RevokeToken,
    SaveGrant,
    SaveToken,
    SwapPointer,
)

T = TypeVar("T")

ENTRIES_MAX = 20_000
RUNNING_MAX = 256
"""The maximum number of running reads for requests that allow stale answers.

If a request uses an earlier result, its read continues to run.
"""
_UNAVAILABLE_S = 1.0
"""The time after a failure in which requests use earlier results immediately, while a background read tries again."""
_GRANTS = ("grants", "grants of any")
_CHANGED_READS: dict[type[Operation], tuple[str, ...]] = {
    **dict.fromkeys((SaveToken, RevokeToken, SaveGrant, RemoveGrant, RemoveGrantsOf), ("token", *_GRANTS)),
    # These operations change the names on which grants depend.
    **dict.fromkeys((RenameEntry, DropEntry, RestoreEntry, DropNamespace), _GRANTS),
}
"""The kinds of reads of tokens and grants whose results an operation may change."""


class _ReadResult(NamedTuple):
    """A result, and the monotonic time at which its read began."""

    value: object
    began_s: float


class StaleReads:
    """The results of recent reads of one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._results: OrderedDict[Hashable, _ReadResult] = OrderedDict()
        self._running_tasks: dict[Hashable, asyncio.Task[object]] = {}
        self._unavailable_until_s = 0.0

    async def read(self, key: tuple[object, ...], run: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `run`, or the last result for this key if the database does not answer.

        The last result is returned if the request allows its age, and `run` raises RetryLater or takes longer than the
        request may wait. It is also returned without a call of `run` if too many reads are running.
        """
        staleness = get_current_staleness()
        last_result = self._results.get(key)
        if (
            staleness is None
            or last_result is None
            or not staleness.allows(self._clock.monotonic() - last_result.began_s)
        ):
            return await self._run_and_cache(key, run)
        task = self._start(key, run)
        if task is not None:
            # After a recent failure, do not wait. Otherwise each request would wait for the same database.
            unavailable_for_s = self._unavailable_until_s - self._clock.monotonic()
            await asyncio.wait((task,), timeout=0 if unavailable_for_s > 0 else staleness.wait_s)
            if task.done() and not task.cancelled():
                error = task.exception()
                if error is None:
                    return task.result()  # type: ignore[return-value]
                if not isinstance(error, RetryLater):
                    raise error
            self._unavailable_until_s = self._clock.monotonic() + _UNAVAILABLE_S
        age_s = self._clock.monotonic() - last_result.began_s
        # While this request waited, the result may have become too old, or a change may have replaced or removed it.
        if not staleness.allows(age_s) or self._results.get(key) is not last_result:
            return await self._run_and_cache(key, run)
        staleness.record_age(age_s)
        return last_result.value  # type: ignore[return-value]

    def _start(self, key: Hashable, run: Callable[[], Awaitable[T]]) -> asyncio.Task[object] | None:
        """Return the running read for this key, which requests share, or start it.

        Returns:
            The task of the read. None if too many reads are running, because the database probably does not answer.
        """
        task = self._running_tasks.get(key)
        if task is None and len(self._running_tasks) < RUNNING_MAX:
            task = asyncio.get_running_loop().create_task(self._run_and_cache(key, run), name="stale-read")
            self._running_tasks[key] = task
            task.add_done_callback(lambda finished_task: self._finish(key, finished_task))
        return task

    async def _run_and_cache(self, key: Hashable, run: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `run`, and cache it for later requests. A result of None removes the cached result.

        The age of the result counts from the start of the read, because the result may lack later changes.
        """
        began_s = self._clock.monotonic()
        result = await run()
        # The database has answered, so later requests may wait for it again.
        self._unavailable_until_s = 0.0
        if result is None:
            self._results.pop(key, None)
        else:
            self._results[key] = _ReadResult(result, began_s)
            self._results.move_to_end(key)
            while len(self._results) > ENTRIES_MAX:
                self._results.popitem(last=False)
        return result

    def _finish(self, key: Hashable, task: asyncio.Task[object]) -> None:
        del self._running_tasks[key]
        if not task.cancelled():
            task.exception()  # Mark the error as retrieved, because the request that started the read may have ended.

    def forget(self, operations: Sequence[Operation]) -> None:
        """Remove the results that these operations may have changed."""
        for operation in operations:
            if isinstance(operation, SwapPointer | RenameEntry | DropEntry):
                self._results.pop(make_entry_key(operation.kind, operation.namespace, operation.name), None)
            if reads := _CHANGED_READS.get(type(operation)):
                for key in [key for key in self._results if isinstance(key, tuple) and key[0] in reads]:
                    del self._results[key]

    async def close(self) -> None:
        for task in tuple(self._running_tasks.values()):
            task.cancel()
        await asyncio.gather(*self._running_tasks.values(), return_exceptions=True)


def make_entry_key(kind: object, namespace: object, name: str) -> tuple[object, ...]:
    return ("entry", kind, namespace, name)
