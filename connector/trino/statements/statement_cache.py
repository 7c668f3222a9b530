"""Parses statements (`scans.py`) outside of the event loop, and caches the results. A result depends on the text and on
the columns of its tables.

Parsing takes milliseconds of Python, so one thread does it, and concurrent requests for a text share one result. A
request that is cancelled while it is queued is not parsed; a result that is already being computed is cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date

import structlog

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.connector.plans.async_client import KnownTable
from seamark.connector.plans.scan import Scan
from seamark.connector.trino.statements.queries import Names
from seamark.connector.trino.statements.scans import find_scans, result_types
from seamark.connector.trino.statements.scopes import Columns

_CACHE_BYTES = 8 << 20
_BYTES_PER_SCAN = 2000
_log = structlog.get_logger("seamark.trino-proxy")


@dataclass(frozen=True, slots=True)
class StatementText:
    """A statement, or a prepared statement with the parameters of its execution."""

    text: str
    parameters: tuple[str, ...] = ()
    prepared: str | None = None
    """The name of the prepared statement."""
    utc: bool = False
    today: date | None = None
    """The date in UTC, if the text may contain the current time."""
    columns: tuple[str, ...] = ()
    """For the text of a view: the columns whose types are needed, instead of scans."""


@dataclass(frozen=True, slots=True)
class ReadStatement:
    scans: tuple[Scan, ...]
    table_names: tuple[Names, ...] = ()
    """Tables whose columns could give more conditions."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The types of `StatementText.columns` (`scans.result_types`)."""


_Key = tuple[StatementText, tuple[tuple[str, str], ...]]


class StatementReader:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: MemoryCache[_Key, ReadStatement] = MemoryCache(_CACHE_BYTES)
        self._flights: SingleFlight[_Key, ReadStatement] = SingleFlight()
        # One: sqlglot holds the interpreter, and a second thread would only take more of it from the event loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sql")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, text: StatementText, tables: Mapping[Names, KnownTable], until_s: float) -> ReadStatement:
        """Parses with the columns of `tables`. TimeoutError after `until_s` on the clock of the event loop."""
        key = (text, tuple(sorted((str(names), known.version) for names, known in tables.items())))
        found = self._known.get(key)
        if found is None:
            columns = {names: known.columns for names, known in tables.items()}
            async with asyncio.timeout_at(until_s):
                found = await self._flights.run(key, lambda: self._in_thread(key, columns))
        return found

    async def _in_thread(self, key: _Key, columns: Mapping[Names, Columns | None]) -> ReadStatement:
        loop = asyncio.get_running_loop()
        reading = self._thread.submit(_read, key[0], columns)

        def done(future: Future[ReadStatement]) -> None:
            if not future.cancelled():
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._keep, key, future.result())

        reading.add_done_callback(done)
        return await asyncio.wrap_future(reading)

    def _keep(self, key: _Key, reading: ReadStatement) -> None:
        self._known.put(key, reading, 2 * len(key[0].text) + _BYTES_PER_SCAN * (1 + len(reading.scans)))


def _read(text: StatementText, tables: Mapping[Names, Columns | None]) -> ReadStatement:
    table_names: list[Names] = []

    def columns_of(names: Names) -> Columns | None:
        table_names.append(names)
        return tables.get(names)

    try:
        if text.columns:
            column_types = result_types(text.text, text.columns, columns_of=columns_of)
            return ReadStatement((), tuple(table_names), column_types)
        found = find_scans(text.text, columns_of=columns_of, parameters=text.parameters, utc=text.utc, today=text.today)
    except Exception as error:  # noqa: BLE001  one bug in reading must fail no statement
        _log.warning("a statement was not read", error=repr(error))
        return ReadStatement(())
    return ReadStatement(found, tuple(table_names))
