"""Threads for the calls of a blocking client, some of which may never return.

A NameNode can accept a connection and never answer, and the library has no timeout. A thread cannot be stopped, so a
call that outlives its timeout keeps its thread. Its slot is free again, and the next call opens a new client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

import structlog

from seamark.formats.runtime.clock import Clock

CALLS_MAX = 8
"""The maximum number of concurrent calls to one authority."""
HUNG_THREADS_MAX = 64
"""The number of hung threads of one authority at which most calls are refused at once."""
TRIAL_INTERVAL_S = 60.0
"""The interval between calls while the maximum number of threads hang."""
_log = structlog.get_logger("seamark.hdfs")

C = TypeVar("C")
T = TypeVar("T")


class _Connection(Generic[C]):
    """A client, which the first call opens in its thread."""

    def __init__(self, open_client: Callable[[], C]) -> None:
        self._open_client = open_client
        self._lock = Lock()
        self._client: C | None = None

    def get_client(self) -> C:
        with self._lock:
            if self._client is None:
                self._client = self._open_client()
            return self._client


class ClientThreads(Generic[C]):
    """The client of one authority, and the threads that call it. An instance belongs to one event loop.

    The threads are daemons, so a hung thread does not delay the exit of the process.
    """

    def __init__(self, authority: str, open_client: Callable[[], C], clock: Clock) -> None:
        self._authority = authority
        self._open_client = open_client
        self._clock = clock
        self._connection = _Connection(open_client)
        self._slots = asyncio.Semaphore(CALLS_MAX)
        self._hung_threads: set[Thread] = set()
        self._next_trial_s = 0.0

    async def run(self, work: Callable[[Callable[[], C]], T], timeout_s: float) -> T:
        """Call `work` in a thread with a function that returns the client, and return its result.

        The wait for a slot and the call have this timeout each. A thread whose call has timed out cannot be stopped (it
        hangs). If too many threads hang, only one call tries a new client from time to time. If it succeeds, calls are
        allowed again.

        Raises:
            TimeoutError: There was no free slot or no answer, or the maximum number of threads hang.
        """
        async with asyncio.timeout(timeout_s):
            await self._slots.acquire()
        try:
            is_trial = self._check_hung_threads()
            connection = self._connection
            thread, answer = self._start_thread(work, connection)
            try:
                async with asyncio.timeout(timeout_s):
                    return await answer
            except TimeoutError:
                self._replace_connection(connection)
                raise
            finally:
                if answer.cancelled():
                    self._hung_threads.add(thread)
                elif is_trial:
                    self._hung_threads.clear()
        finally:
            self._slots.release()

    def _check_hung_threads(self) -> bool:
        """Return whether this call is a trial, which is allowed from time to time although too many threads hang.

        Raises:
            TimeoutError: The last trial is too recent.
        """
        self._hung_threads = {thread for thread in self._hung_threads if thread.is_alive()}
        if len(self._hung_threads) < HUNG_THREADS_MAX:
            return False
        now_s = self._clock.monotonic()
        if now_s < self._next_trial_s:
            raise TimeoutError
        self._next_trial_s = now_s + TRIAL_INTERVAL_S
        return True

    def _start_thread(
        self, work: Callable[[Callable[[], C]], T], connection: _Connection[C]
    ) -> tuple[Thread, asyncio.Future[T]]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def deliver(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not answer.done():
                set_outcome(outcome)

        def call() -> None:
            set_outcome: Callable[[Any], None]
            outcome: Any
            try:
                set_outcome, outcome = answer.set_result, work(connection.get_client)
            except BaseException as error:  # noqa: BLE001  a panic of the library is no Exception
                set_outcome, outcome = answer.set_exception, error
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(deliver, set_outcome, outcome)

        thread = Thread(target=call, name=f"objects-hdfs-{self._authority}", daemon=True)
        thread.start()
        return thread, answer

    def _replace_connection(self, connection: _Connection[C]) -> None:
        """Replace a connection that does not answer by a new client for the next call.

        If another call has replaced it already, do nothing.
        """
        if self._connection is connection:
            self._connection = _Connection(self._open_client)
            _log.warning("HDFS does not answer, so the client is replaced", authority=self._authority)
