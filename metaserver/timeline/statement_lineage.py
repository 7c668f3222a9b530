"""OpenLineage events of SQL statements that the server runs, and of statements whose clients report them.

A statement puts its run into a bounded queue, and never waits. A task sends the events. Statements are too frequent for
the timeline, whose instants are durable. So runs are lost if the server ends, if the queue is full, or if the receiver
does not answer for about ten seconds. A metric counts the losses.

The name of a job is a hash of the statement without its literals, and an event has no text of the statement. The task
computes the hash, in a thread, because the statement can be long.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.delivery import DeliveryObserver, NotDelivered
from seamark.metaserver.timeline.lineage import CatalogName, make_dataset, make_run_event, measure_schema
from seamark.metaserver.timeline.lineage_target import LineageTarget, LoadMetadata

RUNS_MAX = 1000
"""The maximum number of runs that wait for the receiver. Later runs are dropped."""
_WAITING_CHARS_MAX = 8 << 20
"""The maximum number of characters of all runs that wait for the receiver, as `_count_chars` counts them."""
_RUNS_PER_PRINCIPAL_MAX = RUNS_MAX // 4
"""The maximum number of runs of a principal that wait."""
_CHARS_PER_PRINCIPAL_MAX = _WAITING_CHARS_MAX // 4
"""The maximum number of characters of the runs of a principal that wait.

A single longer statement is accepted too, if no other run of the principal waits.
"""
_NAME_CHARS = 64
"""The number of characters that a name of a table or namespace counts in addition to its length."""
_SCHEMA_CHARS_MAX = 2 << 20
"""The maximum number of characters of all schemas in an event, as `measure_schema` counts them.

Further tables have no schema.
"""
_TOKENIZED_CHARS_MAX = 64 << 10
"""The maximum length of a statement from which literals are removed."""
_ATTEMPTS_MAX = 6
_PAUSE_S = 0.25
"""The pause after the first failed attempt. The pause doubles with each further attempt."""
_JOB_DIGITS = 16
_TOKENS = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<literal>'(?:[^']|'')*'?|\$(?P<tag>\w*)\$.*?(?:\$(?P=tag)\$|\Z)|(?<![\w."])\.?\d[\w.]*(?:(?<=[eE])[+-]\d+)?)
    |(?P<quoted>"(?:[^"]|"")*"?|`[^`]*`?)
    |(?P<other>\w+|.)""",
    re.VERBOSE | re.DOTALL,
)
_LITERALS = re.compile(r"\?(?: , \?)+")
_log = structlog.get_logger("seamark.lineage")


class StatementRun(NamedTuple):
    """A statement that has ended.

    Attributes:
        run_id: A UUID.
        statement: The text of the statement.
        started_ms: The start in milliseconds since the epoch.
        ended_ms: The end in milliseconds since the epoch.
        outcome: COMPLETE, FAIL or ABORT.
        error: The kind of the error. The message of an error can contain values.
        tables: The levels of the namespace and the name of each table that the statement reads.
        form: The statement without its literals, or a text that identifies this form. If it is empty, it is determined
            from the statement.
        principal: The name of the principal that sent the statement or its report. Without logins, it is empty.
    """

    run_id: str
    statement: str
    started_ms: int
    ended_ms: int
    outcome: str
    error: str
    tables: tuple[tuple[str, ...], ...]
    form: str = ""
    principal: str = ""


def name_statement_job(statement: str) -> str:
    """Return the name of the job of a statement.

    Statements that differ only in literals have the same name, unless they are very long.
    """
    return name_job(remove_literals(statement) if len(statement) <= _TOKENIZED_CHARS_MAX else statement)


def name_job(form: str) -> str:
    """Return the name of a statement's job.

    `form` is the text of the statement, without its literals unless it is very long. So statements that differ only in
    literals share a job.
    """
    return f"sql.{hashlib.sha256(form.encode(errors='surrogatepass')).hexdigest()[:_JOB_DIGITS]}"


def remove_literals(statement: str) -> str:
    """Return a statement with `?` for each literal or list of literals, and without comments and extra space.

    Text outside of quotes is in lower case, and a semicolon at the end is removed.
    """
    tokens = []
    for match in _TOKENS.finditer(statement):
        if match["literal"] is not None:
            tokens.append("?")
        elif match["space"] is None:
            tokens.append(match[0] if match["quoted"] is not None else match[0].casefold())
    return _LITERALS.sub("?", " ".join(tokens)).rstrip("; ")


class StatementRuns:
    """The runs of statements that wait for the receiver."""

    def __init__(self, observer: DeliveryObserver) -> None:
        self._observer = observer
        self._queue: asyncio.Queue[StatementRun] = asyncio.Queue(RUNS_MAX)
        self._waiting_chars = 0
        self._runs_by_principal: Counter[str] = Counter()
        self._chars_by_principal: Counter[str] = Counter()

    def record(self, run: StatementRun) -> None:
        """Add a run to the queue, or drop and count it if the queue is full.

        The queue limits the number of runs and their characters, in total and for each principal.
        """
        chars = _count_chars(run)
        if (
            self._queue.full()
            or self._waiting_chars + chars > _WAITING_CHARS_MAX
            or (run.principal and self._exceeds_share(run.principal, chars))
        ):
            self._observer.count_failed_delivery(LineageTarget.kind)
            return
        self._queue.put_nowait(run)
        self._waiting_chars += chars
        self._runs_by_principal[run.principal] += 1
        self._chars_by_principal[run.principal] += chars

    def _exceeds_share(self, principal: str, chars: int) -> bool:
        """Return whether a further run with `chars` characters exceeds the principal's share of the queue.

        A principal without waiting runs can always add a run, even a long run.
        """
        waiting_runs = self._runs_by_principal[principal]
        return waiting_runs > 0 and (
            waiting_runs >= _RUNS_PER_PRINCIPAL_MAX
            or self._chars_by_principal[principal] + chars > _CHARS_PER_PRINCIPAL_MAX
        )

    def _forget(self, run: StatementRun) -> None:
        """Subtract a run that was taken out of the queue from the sums for its principal and for all principals."""
        chars = _count_chars(run)
        self._waiting_chars -= chars
        self._runs_by_principal[run.principal] -= 1
        self._chars_by_principal[run.principal] -= chars
        if not self._runs_by_principal[run.principal]:
            del self._runs_by_principal[run.principal], self._chars_by_principal[run.principal]

    async def send_all(
        self, target: LineageTarget, store: PointerStore, load_metadata: LoadMetadata, catalog: CatalogName
    ) -> None:
        """Send the events of runs until the task is cancelled.

        Args:
            target: The receiver.
            store: The pointer store, which has the locations of metadata files.
            load_metadata: Reads the metadata of a table.
            catalog: The names of the catalog.
        """
        while True:
            run = await self._queue.get()
            self._forget(run)
            for event in await _make_events(run, store, load_metadata, catalog):
                await self._send(target, event)

    async def _send(self, target: LineageTarget, event: dict[str, Any]) -> None:
        """Send an event. After the last failed attempt, the event is lost."""
        for attempt in range(_ATTEMPTS_MAX):
            try:
                await target.send_run_event(event)
            except NotDelivered as error:
                reason = str(error)
            else:
                return
            self._observer.count_failed_delivery(target.kind)
            await asyncio.sleep(_PAUSE_S * 2**attempt)
        _log.warning("a lineage event is lost", target=target.place, run=event["run"]["runId"], reason=reason)


def _count_chars(run: StatementRun) -> int:
    """Return the characters of the statement and of the names of its tables, as a measure of the memory of a run."""
    names = [name for path in run.tables for name in path]
    return len(run.statement) + len(run.form) + sum(map(len, names)) + _NAME_CHARS * len(names)


async def _make_events(
    run: StatementRun, store: PointerStore, load_metadata: LoadMetadata, catalog: CatalogName
) -> list[dict[str, Any]]:
    """Return the event of the start and the event of the end of a run.

    The schemas of all tables together are limited. A table whose schema does not fit is named without its schema.
    """
    job_name = name_job(run.form) if run.form else await asyncio.to_thread(name_statement_job, run.statement)
    inputs: list[dict[str, Any]] = []
    schema_chars_left = _SCHEMA_CHARS_MAX
    for *namespace, table in run.tables:
        metadata = await _find_metadata(tuple(namespace), table, store, load_metadata)
        # A schema can have many columns, so do not build its facet in the event loop.
        dataset, schema_chars = await asyncio.to_thread(
            make_input, namespace, table, metadata, catalog, schema_chars_left
        )
        inputs.append(dataset)
        schema_chars_left -= schema_chars
    return [
        {**make_run_event(event_type, at_ms, run.run_id, job_name, "QUERY", error, catalog), "inputs": inputs}
        for event_type, at_ms, error in (
            ("START", run.started_ms, ""),
            (run.outcome, run.ended_ms, run.error if run.outcome == "FAIL" else ""),
        )
    ]


def make_input(
    namespace: Sequence[str],
    table: str,
    metadata: TableMetadata | None,
    catalog: CatalogName,
    schema_chars_max: int,
) -> tuple[dict[str, Any], int]:
    """Return the dataset of a table, and the number of characters of the schema in it.

    The schema is left out if it has more than `schema_chars_max` characters. The number is then 0.
    The current snapshot may be newer than the statement, so the dataset has no version.
    """
    schema_chars = 0 if metadata is None else measure_schema(metadata.current_schema.fields, schema_chars_max)
    has_schema = schema_chars <= schema_chars_max
    dataset = make_dataset(namespace, table, None, metadata, catalog, has_schema=has_schema)
    return dataset, schema_chars if has_schema else 0


async def _find_metadata(
    namespace: tuple[str, ...], table: str, store: PointerStore, load_metadata: LoadMetadata
) -> TableMetadata | None:
    """Return the metadata of a table, or None if there is no such table or it cannot be read."""
    try:
        entry = await store.load_entry(EntryKind.TABLE, namespace, table)
        return None if entry is None else await load_metadata(entry.metadata_location)
    except SeamarkError as error:
        _log.warning("a lineage event has no schema", table=".".join((*namespace, table)), error=error.message)
        return None
