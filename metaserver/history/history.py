"""Collection of the query history of all tables: sums over the statements of each shape, by hour.

A statement is counted in memory, without I/O. A task of the server records the counts once a minute, so a plan never
waits for the history. If a server is killed, its unrecorded counts are lost.

The memory is limited, and one principal can use at most half of it. The database keeps a limited number of shapes for
each table, and one principal can be the first user of at most a quarter of them. Beyond these limits, a statement
counts towards the shape `OTHER_SHAPES` of its table. No shape displaces another, so a client that sends many shapes
cannot remove the shapes of other clients.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog
from msgspec.structs import replace

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import NoSuchTable, SeamarkError
from seamark.metaserver.history.samples import FilterSample, compute_repeats
from seamark.metaserver.history.shapes import QueryShape
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import (
    NAMESPACES_MAX,
    OTHER_SHAPES,
    AppliedAdvice,
    NamespacePath,
    QueryRecord,
    QueryShapeSums,
    QuerySums,
    QueryTotals,
)
from seamark.metaserver.store.operations import AddQueryRecords, ChangeAppliedAdvice, SaveAppliedAdvice
from seamark.metaserver.store.passed_time import read_passed_time
from seamark.metaserver.store.port import PointerStore

FLUSH_S = 60.0
"""The interval at which the counts are recorded."""
SAMPLES_PER_SHAPE_MAX = 4
"""The maximum number of samples that a server takes from the statements of a shape between two flushes."""
APPLIED_MAX = 100
"""The maximum number of applied proposals that the database keeps for a table."""
_OWNER_BUDGET_DIVISOR = 4
"""The divisor of a table's maximum number of shapes: one principal can be the first user of this fraction of them."""
_RECORDS_MAX = 200
"""The maximum number of shapes in a transaction."""
_NAMES_PER_COST = 8
"""The number of columns and conditions of a shape that cost as much memory as another shape."""
_MICROS_PER_SECOND = 1e6
_OWNER_DIGITS = 16
_FAILURES_MAX = 10
"""The number of consecutive failed transactions after which a flush stops, because the database does not answer."""
_FILES_MAX, _BYTES_MAX = 1 << 40, 1 << 50
"""The maximum files and bytes that are counted for a statement. Clients state these numbers, so they may be wrong."""
_SAMPLERS_BYTES_MAX = 64 << 20
"""The maximum memory in bytes for the filters and files of samplers between two flushes."""
_LITERALS_MAX = 64
"""The maximum number of statements of a shape whose filters are compared with each other between two flushes."""
RUN_S_MAX = 1e6
"""The maximum seconds that are counted for a statement. Clients state this number, so it may be wrong."""
_LISTED_MAX = 2000
"""The maximum number of shapes of a table that are listed."""
_LISTED_AFTER_MS = 5000
"""The maximum age in milliseconds of unrecorded counts when all tables are listed. Older counts are recorded first."""
_CHANGED_ROWS_MAX = 1000
"""The maximum number of rows that a transaction merges or removes."""
DAY_HOURS, WEEK_HOURS = 24, 168
MERGED_PERIODS = ((DAY_HOURS, 48), (WEEK_HOURS, 14 * DAY_HOURS))
"""The periods into which older rows are merged: the hours of the period, and the age in hours at which it ends."""
HOUR_MS = 3_600_000
_log = structlog.get_logger("seamark.server")


class StatementRead(NamedTuple):
    """The files and bytes that a statement read of a table.

    Attributes:
        uuid: The UUID of the table.
        shape: The shape of the statement.
        files_in: The number of files of the snapshot.
        files_left: The number of files that remained after pruning.
        bytes_in: The bytes of the snapshot, or -1 if they are unknown.
        bytes_left: The bytes that remained after pruning, or -1 if they are unknown.
        literals: A hash of the filter with its values, or 0 if the filter is unknown. Equal hashes show that
            statements repeat their values. The hash is never stored.
    """

    uuid: str
    shape: QueryShape
    files_in: int
    files_left: int
    bytes_in: int = -1
    bytes_left: int = -1
    literals: int = 0


class StatementSample(NamedTuple):
    """A sample of a statement. Only some statements of a shape have a sample, because sampling takes time.

    Attributes:
        filter: A sample of the filter's values, or None if the statement has no filter.
        bytes_in: The bytes of the snapshot. It is -1 if they are unknown or already counted.
        bytes_left: The bytes that remained after pruning. It is -1 if they are unknown or already counted.
    """

    filter: FilterSample | None
    bytes_in: int
    bytes_left: int


StatementSampler = Callable[[], StatementSample | None]


class StatementTime(NamedTuple):
    """The time that an engine took for a statement, and the files and bytes that it read of a table."""

    run_s: float
    files: int
    bytes: int


class _Key(NamedTuple):
    """The table, the user and the shape of statements that are counted together.

    A shape is a statement without its values. If there are too many shapes, the other shapes of a table share the
    counts of the key with the shape None.
    """

    uuid: str
    principal: str | None
    shape: QueryShape | None


class _Counts:
    """The sums of the statements of a shape since the counts were last written to the database.

    The class has slots, because each plan changes an instance.
    """

    __slots__ = (
        "bytes_in",
        "bytes_left",
        "files_in",
        "files_left",
        "literals",
        "plan_s",
        "samplers",
        "statements",
        "statements_with_bytes",
    )

    def __init__(self) -> None:
        self.statements = self.statements_with_bytes = 0
        self.files_in = self.files_left = self.bytes_in = self.bytes_left = 0
        self.plan_s = 0.0
        self.samplers: list[StatementSampler] = []
        self.literals: list[int] = []

    def add_sizes(self, bytes_in: int, bytes_left: int) -> None:
        """Add the bytes of a statement before and after pruning, if both are known.

        Unknown bytes are -1. Larger numbers than `_BYTES_MAX` are cut, because clients state them and may be wrong.
        """
        if bytes_left >= 0 <= bytes_in:
            self.statements_with_bytes += 1
            self.bytes_in += min(bytes_in, _BYTES_MAX)
            self.bytes_left += min(bytes_left, _BYTES_MAX)

    def compute_sums(self) -> QuerySums:
        return QuerySums(
            self.statements,
            self.files_in,
            self.files_left,
            self.statements_with_bytes,
            self.bytes_in,
            self.bytes_left,
            int(self.plan_s * _MICROS_PER_SECOND),
        )


class QueryHistory:
    """The counts of statements that are not recorded yet. An instance belongs to one event loop."""

    def __init__(self, settings: Settings, store: PointerStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._limit = settings.query_history_waiting
        self._shapes_max = settings.query_history_shapes
        self._counts: dict[_Key, _Counts] = {}
        self._costs_by_principal: Counter[str | None] = Counter()
        """The used part of the memory limit, by principal."""
        self._times: dict[tuple[str, str], QuerySums] = {}
        """The sums of reported times, by the UUID of the table and the fingerprint of the shape."""
        self._times_by_principal: Counter[str | None] = Counter()
        """The number of entries of `_times` that each principal has reported first."""
        self._is_full = False
        self._samplers_bytes = 0
        self._flushed_ms = 0
        self.days = settings.query_history_days
        self.literals = settings.query_history_literals
        self.is_on = self.days > 0

    @property
    def hour(self) -> int:
        """The current hour, in hours since the epoch."""
        return self._clock.now_ms() // HOUR_MS

    def add(
        self,
        statement_read: StatementRead,
        principal: str | None,
        plan_s: float = 0.0,
    ) -> list[StatementSampler] | None:
        """Count a statement.

        Args:
            statement_read: The files and bytes that the statement read.
            principal: The principal that reads, or None if the server has no logins.
            plan_s: The duration of planning.

        Returns:
            The list of the functions that sample statements of this shape (statements that differ only in their
            literals), or None if the list is full. The caller can append a function. A thread calls it before the
            counts are recorded.
        """
        # Each plan runs these lines, so they are fast: a plain tuple finds the equal `_Key`, and `<` is faster than
        # `min`.
        uuid, shape, files_in, files_left, bytes_in, bytes_left, literals = statement_read
        counts = self._counts.get((uuid, principal, shape))  # type: ignore[call-overload]
        if counts is None:
            counts = self._add_counts(_Key(uuid, principal, shape))
        counts.statements += 1
        counts.files_in += files_in if files_in < _FILES_MAX else _FILES_MAX
        counts.files_left += files_left if files_left < _FILES_MAX else _FILES_MAX
        counts.plan_s += plan_s
        if bytes_left >= 0:
            counts.add_sizes(bytes_in, bytes_left)
        if literals and len(counts.literals) < _LITERALS_MAX:
            counts.literals.append(literals)
        return counts.samplers if len(counts.samplers) < SAMPLES_PER_SHAPE_MAX else None

    def add_time(self, uuid: str, fingerprint: str, principal: str | None, time: StatementTime) -> None:
        """Add the time that an engine took for a statement.

        The history has sums by shape, that is, over the statements that differ only in their literals. The time is
        lost if the table has no sums of this shape when the server writes the counts to the database. It is also lost
        if too many other times wait. One principal can use half of the limit, so that others can still record times.

        Args:
            uuid: The UUID of the table.
            fingerprint: The digest of the statement's shape.
            principal: The principal that reads, or None if the server has no logins.
            time: The time, and what the statement read.
        """
        key = (uuid, fingerprint)
        sums = self._times.get(key)
        if sums is None:
            share = self._limit if principal is None else max(1, self._limit // 2)
            if len(self._times) >= self._limit or self._times_by_principal[principal] >= share:
                return
            self._times_by_principal[principal] += 1
        new_sums = QuerySums(
            *(0,) * 7,  # The statement itself is counted by `add`, so its counts, files and bytes are 0 here.
            timed=1,
            run_us=int(min(time.run_s, RUN_S_MAX) * _MICROS_PER_SECOND),
            timed_files=min(time.files, _FILES_MAX),
            timed_bytes=min(time.bytes, _BYTES_MAX),
        )
        self._times[key] = new_sums if sums is None else add_sums([sums, new_sums])

    def reserve(self, size: int) -> bool:
        """Reserve memory in bytes for the data that a sampler keeps until the next flush.

        Returns:
            Whether there is room. If not, the sampler must keep nothing.
        """
        if self._samplers_bytes + size > _SAMPLERS_BYTES_MAX:
            return False
        self._samplers_bytes += size
        return True

    def _add_counts(self, key: _Key) -> _Counts:
        """Return new counts for a shape. If the limit is reached, return the common counts of the table instead.

        A shape is a statement without its literals. The limit bounds the memory, so a shape with many names costs more.
        One principal can use half of the limit, so that the shapes of others still get their own counts.
        """
        shape = key.shape
        assert shape is not None
        lists = (shape.columns, shape.conjuncts, shape.joins, shape.grouping, shape.aggregates)
        cost = 1 + sum(map(len, lists)) // _NAMES_PER_COST
        share = self._limit if key.principal is None else max(1, self._limit // 2)
        if (
            self._costs_by_principal.total() + cost <= self._limit
            and self._costs_by_principal[key.principal] + cost <= share
        ):
            self._costs_by_principal[key.principal] += cost
            return self._counts.setdefault(key, _Counts())
        if not self._is_full:
            self._is_full = True
            _log.warning(
                "statements are counted without their shapes",
                limit=self._limit,
                setting="query_history_waiting",
                who=key.principal,
            )
        # The number of tables limits the number of these keys, because each of their statements was authorised.
        return self._counts.setdefault(_Key(key.uuid, None, None), _Counts())

    async def run(self) -> None:
        """Record the counts periodically, until the task is cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Record the counted statements. Statements that the database refuses are skipped and lost.

        Raises:
            SeamarkError: The database refuses `_FAILURES_MAX` consecutive transactions. The remaining statements are
                lost.
        """
        if not self._counts and not self._times:
            return
        # Statements that arrive while this method waits are counted in new objects.
        counts, self._counts, self._costs_by_principal, self._is_full = self._counts, {}, Counter(), False
        times, self._times, self._times_by_principal = self._times, {}, Counter()
        self._samplers_bytes = 0
        self._flushed_ms = self._clock.now_ms()
        hour, failures = self.hour, 0
        for uuid, records in (await asyncio.to_thread(_group_records_by_table, counts, times)).items():
            for start in range(0, len(records), _RECORDS_MAX):
                part = records[start : start + _RECORDS_MAX]
                # If no record has an owner, as on a server without logins, the limit for one owner does not apply.
                owned_max = self._shapes_max if all(not record.owner for record in part) else self._owner_shapes_max
                try:
                    await self._store.transact([AddQueryRecords(uuid, hour, part, self._shapes_max, owned_max)])
                except NoSuchTable:  # The table was dropped after the statements were counted.
                    break
                except SeamarkError as error:
                    _log.warning("statements are not recorded", uuid=uuid, error=error.message)
                    failures += 1
                    if failures == _FAILURES_MAX:
                        raise
                else:
                    failures = 0

    @property
    def _owner_shapes_max(self) -> int:
        return max(1, self._shapes_max // _OWNER_BUDGET_DIVISOR)

    async def flush_and_list_shapes(self, uuid: str, days: int) -> list[QueryShapeSums]:
        """Write the waiting counts to the database, and return the sums of a table for each shape of statements.

        A shape is a statement without its literals.

        Args:
            uuid: The UUID of the table.
            days: The number of days to sum.
        """
        await self.flush()
        return await self._store.query_shapes(uuid, self._compute_first_hour(days), _LISTED_MAX)

    async def list_shapes_since(self, uuid: str, since_ms: int) -> list[QueryShapeSums]:
        """Return the history of a table in the hours that began after a time, and in the hour of the time.

        Statements that this server has not recorded yet are included.
        """
        await self.flush()
        return await self._store.query_shapes(uuid, since_ms // HOUR_MS, _LISTED_MAX)

    async def compute_sums_since(self, uuid: str, since_ms: int) -> QuerySums:
        """Return the sums of a table's statements in the hours that began after a time.

        The hour of the time is left out, because it also counts statements from before the time.
        """
        shapes = await self._store.query_shapes(uuid, since_ms // HOUR_MS + 1, _LISTED_MAX)
        return add_sums([shape.sums for shape in shapes])

    async def list_table_totals(
        self, days: int, limit: int, namespaces: Sequence[NamespacePath] | None = None
    ) -> list[QueryTotals]:
        """Return the sums of each table, for the tables with the most statements first.

        Args:
            days: The number of days of the history. Statements of the last seconds may be missing, because counts are
                written to the database only if the last write is some seconds ago.
            limit: The maximum number of tables.
            namespaces: The namespaces of the tables, or None for all tables. If there are more than the database can
                filter by (`NAMESPACES_MAX`), the result contains the tables of all namespaces.
        """
        if abs(self._clock.now_ms() - self._flushed_ms) >= _LISTED_AFTER_MS:
            await self.flush()
        if namespaces is not None and len(namespaces) > NAMESPACES_MAX:
            namespaces = None
        return await self._store.load_query_totals(self._compute_first_hour(days), namespaces, limit)

    def _compute_first_hour(self, days: int) -> int:
        """Return the first hour of the last `days` days, in hours since the epoch."""
        # Older rows are merged by day or week, and a merged row has the first hour of its day or week. So the result
        # is also the first hour of a period.
        first_hour = (self.hour // DAY_HOURS - days) * DAY_HOURS
        return first_hour - first_hour % _find_period(days * DAY_HOURS)

    async def list_applied(self, uuid: str) -> list[AppliedAdvice]:
        """Return the applied proposals of a table, newest first."""
        return await self._store.list_applied_advice(uuid, APPLIED_MAX)

    async def save_applied(self, advice: AppliedAdvice) -> None:
        await self._store.transact([SaveAppliedAdvice(advice, APPLIED_MAX)])

    async def change_applied(self, advice: AppliedAdvice, expected: str | None) -> None:
        """Save an applied proposal if the stored text is `expected`. None means that there is no stored text.

        Raises:
            CommitConflict: Another request has changed the proposal.
        """
        await self._store.transact([ChangeAppliedAdvice(advice, expected, APPLIED_MAX)])

    async def prune(self) -> int:
        """Merge the hours of older days and weeks, and remove rows that are older than the setting allows.

        Rows are removed even if the merge fails.

        Returns:
            The number of merged and removed rows.

        Raises:
            SeamarkError: The database refuses a change.
        """
        passed_time = await read_passed_time(self._store, self._clock)

        def find_hour(age_hours: int, period_hours: int) -> int:
            """Return the first hour of the period in which rows are `age_hours` old."""
            hour = passed_time.find_time_ago(age_hours * HOUR_MS) // HOUR_MS
            return hour - hour % period_hours

        changes = [
            partial(self._store.merge_query_hours, find_hour(age_hours, hours), _CHANGED_ROWS_MAX, hours)
            for hours, age_hours in MERGED_PERIODS
        ]
        # A merged row has the first hour of its day or week, and counts until its end. So remove whole periods.
        kept_hours = self.days * DAY_HOURS
        before_hour = find_hour(kept_hours, _find_period(kept_hours))
        changes.append(partial(self._store.prune_queries, before_hour, _CHANGED_ROWS_MAX))
        changed_rows = 0
        failure: SeamarkError | None = None
        for change in changes:
            try:
                changed_rows += await _repeat_until_done(change)
            except SeamarkError as error:
                failure = error
        if failure is not None:
            raise failure
        return changed_rows


def _find_period(age_hours: int) -> int:
    """Return the hours of the period into which rows of an age are merged. For younger rows, it is a day."""
    return max((hours for hours, merged_age in MERGED_PERIODS if age_hours >= merged_age), default=DAY_HOURS)


async def _repeat_until_done(change: Callable[[], Awaitable[int]]) -> int:
    """Repeat a change until it affects fewer rows than its limit, and return the total number of changed rows."""
    changed_rows = 0
    while count := await change():
        changed_rows += count
        if count < _CHANGED_ROWS_MAX:
            break
    return changed_rows


def _group_records_by_table(
    counts: dict[_Key, _Counts], times: dict[tuple[str, str], QuerySums]
) -> dict[str, tuple[QueryRecord, ...]]:
    """Take the samples of the counted statements, and return the records for the database by the UUID of the table.

    The counts of a shape (a statement without its literals) give one record, and its reported times give another.
    """
    tables: defaultdict[str, list[QueryRecord]] = defaultdict(list)
    for key, statement_counts in counts.items():
        shape = key.shape
        if shape is None:
            record = QueryRecord(OTHER_SHAPES, "", "", "", statement_counts.compute_sums())
        else:
            owner = "" if key.principal is None else digest_owner(key.uuid, key.principal)
            samples = [
                sample
                for sampler in statement_counts.samplers
                if (sample := _take_sample(sampler, key.uuid)) is not None
            ]
            for sample in samples:
                statement_counts.add_sizes(sample.bytes_in, sample.bytes_left)
            repeats = compute_repeats(statement_counts.literals)
            filters = [replace(sample.filter, repeats=repeats) for sample in samples if sample.filter is not None]
            filters_text = msgspec.json.encode(filters).decode() if filters else ""
            record = QueryRecord(shape.fingerprint, owner, shape.text, filters_text, statement_counts.compute_sums())
        tables[key.uuid].append(record)
    # A record of times has no shape. It must follow the record with its shape.
    for (uuid, fingerprint), sums in times.items():
        tables[uuid].append(QueryRecord(fingerprint, "", "", "", sums))
    return {uuid: tuple(records) for uuid, records in tables.items()}


def _take_sample(sampler: StatementSampler, uuid: str) -> StatementSample | None:
    """Return the sample of a statement, or None if there is none or if taking it fails.

    After a failure, the counts are recorded nevertheless.
    """
    try:
        return sampler()
    except Exception:  # noqa: BLE001  a sampler computes with the values of any client
        _log.exception("a statement has no sample", uuid=uuid)
        return None


def digest_owner(uuid: str, principal: str) -> str:
    """Return a digest that represents a principal in the history of a table.

    The history does not contain the name, and the digests of a principal in two tables differ.
    """
    return hashlib.sha256(f"{uuid}\n{principal}".encode()).hexdigest()[:_OWNER_DIGITS]


def add_sums(parts: Sequence[QuerySums]) -> QuerySums:
    """Add sums field by field. Without any sums, all fields of the result are 0."""
    columns = zip(*map(msgspec.structs.astuple, parts), strict=True)
    return QuerySums(*map(sum, columns)) if parts else QuerySums(0, 0, 0, 0, 0, 0, 0)
