"""Parses statements (`scans.py`) outside of the event loop, and caches the results.

A result depends on the text of the statement and on the columns of its tables. A text is parsed once, and its tree is
cached. The tree is analysed again when the columns of its tables become known or change.

The parser is written in Python: it takes milliseconds for most texts, and seconds for the longest. Therefore one thread
parses short texts, and a second thread parses long texts. Texts of different clients are parsed alternately, so a
client with many statements delays only its own statements. Concurrent requests for the same text share one result. If a
request is cancelled while it is queued, its text is not parsed. If parsing has already started, the result is cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date
from typing import TypeVar

import structlog

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.connector.analysis.algebra.relations import Columns
from seamark.connector.analysis.lexer import UnsupportedStatement, find_with_position
from seamark.connector.analysis.queries import Names
from seamark.connector.analysis.scans import ParsedQuery, collect_scans, find_result_types, parse_query
from seamark.connector.plans.async_client import KnownTable
from seamark.connector.plans.scan import Scan
from seamark.formats.runtime.fair_lock import FairLock

T = TypeVar("T")

IN_LOOP_CHARACTERS_MAX = 10_000
"""The maximum length of a text that is tokenized or searched on the event loop, which takes a few milliseconds."""
SHORT_CHARACTERS_MAX = 4_000
"""The maximum length of a short text, which is parsed in tens of milliseconds."""
_CACHE_BYTES = 8 << 20
_BYTES_PER_SCAN = 2000
"""The approximate memory of one scan of a cached result."""
_TREES_BYTES = 8 << 20
_TREE_BYTES_PER_TOKEN = 750
"""The approximate memory of a cached tree for each token of its text."""
_log = structlog.get_logger("seamark.trino-proxy")


@dataclass(frozen=True, slots=True)
class StatementText:
    """A statement to analyse: a text, or a prepared statement with the parameters of its execution."""

    text: str
    parameters: tuple[str, ...] = ()
    prepared: str | None = None
    """The name of the prepared statement, or None."""
    utc: bool = False
    """Whether the time zone of the session is known to be UTC."""
    today: date | None = None
    """The date in UTC if the text may contain the current time, otherwise None."""
    columns: tuple[str, ...] = ()
    """Columns of a view. If there are any, only their types are determined, and no scans are collected."""


@dataclass(frozen=True, slots=True)
class ReadStatement:
    """The scans of a statement: the reads of its tables, with the conditions on the rows that it needs."""

    scans: tuple[Scan, ...]
    table_names: tuple[Names, ...] = ()
    """The tables whose columns could give more conditions."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The types of the columns in `StatementText.columns` (`scans.find_result_types`)."""
    with_position: tuple[int, bool] = (0, False)
    """The position at which a query can be added to WITH, and whether there is WITH (`lexer.find_with_position`)."""


_CLIENT: ContextVar[tuple[str, str]] = ContextVar("client", default=("address", "user"))


@contextmanager
def set_client(address: str, user: str) -> Iterator[None]:
    """Set the client whose statements the block analyses. Tasks that the block starts have the same client.

    `StatementReader` processes the texts of different addresses alternately, and for each address the texts of its
    users alternately. The proxy does not authenticate the user, so a client could use many user names. Therefore the
    texts are first divided by address.
    """
    token = _CLIENT.set((f"address {address}", f"user {user} at {address}"))
    try:
        yield
    finally:
        _CLIENT.reset(token)


_Key = tuple[StatementText, tuple[tuple[str, str], ...]]
_ParsedKey = tuple[str, tuple[str, ...]]
"""A text and its parameters."""


class StatementReader:
    """Analyses statements, and caches the results. A reader belongs to one event loop."""

    def __init__(self) -> None:
        self._statements: MemoryCache[_Key, ReadStatement] = MemoryCache(_CACHE_BYTES)
        self._parsed_queries: MemoryCache[_ParsedKey, ParsedQuery] = MemoryCache(_TREES_BYTES)
        self._running_reads: SingleFlight[_Key, ReadStatement] = SingleFlight()
        """The analyses that run now. Equal requests wait for the same analysis."""
        # A text always uses the same lock, so one thread at a time reads its tree.
        # With two locks, short texts do not wait for long texts.
        self._short_lock = FairLock()
        self._long_lock = FairLock()

    async def read(self, text: StatementText, tables: Mapping[Names, KnownTable], until_s: float) -> ReadStatement:
        """Analyse a statement with the columns of `tables`, or return the cached result.

        Args:
            text: The statement.
            tables: The known tables, by the names that the statement uses.
            until_s: The deadline, on the clock of the event loop.

        Raises:
            TimeoutError: The deadline has passed.
        """
        key = (text, tuple(sorted((str(names), table.version) for names, table in tables.items())))
        statement = self._statements.get(key)
        if statement is None:
            columns = {names: table.columns for names, table in tables.items()}
            async with asyncio.timeout_at(until_s):
                statement = await self._running_reads.run(key, lambda: self._run_in_thread(key, columns))
        return statement

    async def run(
        self, characters: int, work: Callable[[], T], until_s: float, *, in_loop_max: int = IN_LOOP_CHARACTERS_MAX
    ) -> T:
        """Return the result of `work` on a text of `characters` characters.

        The work on a text longer than `in_loop_max` runs outside of the event loop, because it would delay other
        requests.

        Args:
            characters: The length of the text, from which the time of the work is estimated.
            work: A function that processes the text.
            until_s: The deadline, on the clock of the event loop.
            in_loop_max: The maximum number of characters for which the work runs on the event loop.

        Raises:
            TimeoutError: The deadline has passed.
        """
        if characters <= in_loop_max:
            return work()
        async with asyncio.timeout_at(until_s):
            return await self._run_in_turn(characters, work)

    async def _run_in_turn(self, characters: int, work: Callable[[], T]) -> T:
        address, user = _CLIENT.get()
        lock = self._short_lock if characters <= SHORT_CHARACTERS_MAX else self._long_lock
        return await lock.run(user, work, group=address)

    async def _run_in_thread(self, key: _Key, columns: Mapping[Names, Columns | None]) -> ReadStatement:
        """Analyse a statement outside of the event loop, and cache its result and its parsed query.

        The result is cached in the event loop, because the caches are not safe for threads. It is cached even if the
        caller no longer waits.
        """
        loop, text = asyncio.get_running_loop(), key[0]
        parsed_query = self._parsed_queries.get((text.text, text.parameters))

        def work() -> ReadStatement:
            query, statement = _read(text, columns, parsed_query)
            with suppress(RuntimeError):  # The event loop may already be closed.
                loop.call_soon_threadsafe(self._cache_result, key, query, statement)
            return statement

        return await self._run_in_turn(len(text.text) + sum(map(len, text.parameters)), work)

    def _cache_result(self, key: _Key, query: ParsedQuery | None, statement: ReadStatement) -> None:
        if query is not None:
            parsed_key = key[0].text, key[0].parameters
            self._parsed_queries.put(parsed_key, query, _TREE_BYTES_PER_TOKEN * len(query.text.tokens))
        self._statements.put(key, statement, 2 * len(key[0].text) + _BYTES_PER_SCAN * (1 + len(statement.scans)))


def _read(
    text: StatementText, tables: Mapping[Names, Columns | None], query: ParsedQuery | None
) -> tuple[ParsedQuery | None, ReadStatement]:
    """Analyse a statement. Parse it first if `query` is None.

    An error gives an empty result, because the statement can still run without the analysis. The names that the
    analysis asks for are collected, so that the caller can load their columns and analyse the statement again.

    Returns:
        Two values: the parsed query, or None if the statement is not fully supported; and the result of the analysis.
    """
    table_names: list[Names] = []

    def find_columns(names: Names) -> Columns | None:
        table_names.append(names)
        return tables.get(names)

    try:
        query = query or parse_query(text.text, text.parameters)
        if text.columns:  # The text is a view, of which only the types of its columns are needed.
            column_types = find_result_types(query, text.columns, find_columns=find_columns)
            return query, ReadStatement((), tuple(table_names), column_types)
        scans = collect_scans(query, find_columns=find_columns, utc=text.utc, today=text.today)
        return query, ReadStatement(scans, tuple(table_names), with_position=find_with_position(query.text))
    except UnsupportedStatement:
        return None, ReadStatement(())
    except Exception as error:  # noqa: BLE001  one bug in reading must fail no statement
        _log.warning("a statement was not read", error=repr(error))
        return None, ReadStatement(())
