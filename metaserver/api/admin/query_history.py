"""The routes of the query history: which statements read a table, and which tables are read most.

An answer contains names of columns and operators, but no literals, even if the setting `query_history_literals` keeps
literals for the advisor. It does not say who sent a statement.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import LEVELS_MAX, check_name, check_namespace
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.principal import ANONYMOUS
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.history.history import HOUR_MS, RUN_S_MAX, StatementTime
from seamark.metaserver.history.shapes import QueryShape, ShapeTerm
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import TABLE, EntryKind, QueryShapeSums, QuerySums
from seamark.metaserver.timeline.statement_lineage import StatementRun

DAYS, DAYS_MAX = 30, 3650
"""The default and the maximum of the past days that an answer includes."""
SHAPES_MAX = 2000
_SHAPES_DEFAULT = 100
"""The number of shapes in an answer if the request has no limit."""
_DIGITS_MAX = 6
"""The maximum number of digits of a number in a query. The limits of all such numbers have fewer digits."""
_TABLES_MAX = 1000
_RUN_TABLES_MAX = 100
"""The maximum number of tables in the report of a run."""
_LOOKUPS_MAX = 8
"""The maximum number of tables of a report that are looked up at the same time."""
_OPERATORS = {
    "lt": "<",
    "lt-eq": "<=",
    "gt": ">",
    "gt-eq": ">=",
    "eq": "=",
    "not-eq": "<>",
    "is-null": "is null",
    "not-null": "is not null",
    "is-nan": "is NaN",
    "not-nan": "is not NaN",
    "starts-with": "starts with",
    "not-starts-with": "does not start with",
}


class StatementSums(msgspec.Struct, frozen=True, rename="kebab"):
    """Sums over statements."""

    statements: int
    files_before: Annotated[int, doc("Sum of the files in the snapshots that the statements read.")]
    files_after: Annotated[int, doc("Sum of the files that remained after pruning.")]
    sized_statements: Annotated[
        int, doc("Number of statements with known bytes. Both sums of bytes include only these statements.")
    ]
    bytes_before: int
    bytes_after: int
    planning_us: Annotated[int, doc("Sum of the planning times in microseconds. Plans from a cache count 0.")]
    timed_statements: Annotated[int, doc("Number of statements whose engine has reported its time.")]
    run_us: Annotated[int, doc("Sum of the times that engines took for the timed statements, in microseconds.")]
    timed_files: Annotated[int, doc("Sum of the files that the timed statements read.")]
    timed_bytes: Annotated[int, doc("Sum of the bytes that the timed statements read.")]


class StatementShape(msgspec.Struct, frozen=True, rename="kebab"):
    """Statements that differ only in the values that they compare."""

    fingerprint: Annotated[
        str, doc("A digest of the shape. It is empty for the statements of all shapes that exceed the limit of shapes.")
    ]
    engine: str
    columns: Annotated[list[str], doc("The columns that the statements read. It is empty if they are unknown.")]
    conditions: Annotated[list[str], doc("The conditions on the table, with `?` for a value.")]
    joins: Annotated[list[str], doc("The columns by which the statements join other tables.")]
    grouping: list[str]
    aggregates: list[str]
    sums: StatementSums
    first_ms: Annotated[
        int,
        doc(
            "The start of the hour of the first statement, in milliseconds since the epoch. Older statements are "
            "counted by day, so it is then the start of the day."
        ),
    ]
    last_ms: int


class TableHistory(msgspec.Struct, frozen=True, rename="kebab"):
    """The statements that read a table."""

    days: int
    shapes: Annotated[list[StatementShape], doc("The shapes. The shape with the most statements is first.")]
    reason: Annotated[str, doc("The reason why the history is empty. It is an empty text if there are statements.")] = (
        ""
    )


class ReadTable(msgspec.Struct, frozen=True, rename="kebab"):
    """A table with the sums of its recorded statements.

    Attributes:
        namespace: The levels of the namespace.
        table: The name of the table.
        shapes: The number of different kinds of statements, without the values in their filters.
        sums: The counts, bytes and times of the statements, summed up.
    """

    namespace: list[str]
    table: str
    shapes: int
    sums: StatementSums


class ReadTables(msgspec.Struct, frozen=True, rename="kebab"):
    """The tables that are read most."""

    days: int
    tables: Annotated[
        list[ReadTable], doc("The tables that the caller may read. The table with the most statements is first.")
    ]


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/history",
    "loadQueryHistory",
    "List the shapes of the statements that read a table, with files and bytes before and after pruning",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The shapes, with the most frequent shape first", TableHistory),
        ResponseSpec(400, "days or limit is not a number, or is out of range"),
        ResponseSpec(404, "No such table"),
    ),
)
async def load_query_history(call: Call) -> TableHistory:
    """List the shapes of the statements that read a table, with files and bytes before and after pruning.

    Statements have the same shape if they differ only in the values that they compare.
    """
    days = read_number(call, "days", DAYS, DAYS_MAX)
    limit = read_number(call, "limit", _SHAPES_DEFAULT, SHAPES_MAX)
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    history = call.components.history
    if not history.is_on:
        return TableHistory(days, [], "the setting query_history_days is 0, so no statements are recorded")
    shapes = await history.flush_and_list_shapes(loaded_table.entry.uuid, days)
    reason = "" if shapes else "the server has not seen a statement that reads this table yet"
    return TableHistory(days, [_make_statement_shape(shape, loaded_table.metadata) for shape in shapes[:limit]], reason)


@Route(
    "GET",
    "/api/v1/history",
    "listQueryHistory",
    "List the tables that are read most, with their statements, files and bytes",
    check=Check.LOGIN,  # The listing has only the tables that the caller may read.
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The tables that the caller may read", ReadTables),
        ResponseSpec(400, "days is not a number, or is out of range"),
    ),
)
async def list_query_history(call: Call) -> ReadTables:
    """List the tables that are read most, with their statements, files and bytes."""
    days = read_number(call, "days", DAYS, DAYS_MAX)
    history = call.components.history
    readable_namespaces = call.components.authorizer.list_readable_namespaces(call.principal)
    totals_of_tables = await history.list_table_totals(days, _TABLES_MAX, readable_namespaces) if history.is_on else []
    readable_totals = await call.select(
        totals_of_tables, lambda totals: Securable(totals.namespace, TABLE, totals.name)
    )
    tables = [
        ReadTable(list(totals.namespace), totals.name, totals.shapes, _make_statement_sums(totals.sums))
        for totals in readable_totals
    ]
    return ReadTables(days, tables)


class StatementRunReport(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """The run of a statement that has ended, for OpenLineage."""

    id: Annotated[
        str,
        msgspec.Meta(
            pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
            max_length=36,  # In Python, `$` also matches before a line break at the end.
            description="A UUID that the client has chosen.",
        ),
    ]
    tables: Annotated[
        list[Annotated[list[str], msgspec.Meta(min_length=2, max_length=LEVELS_MAX + 1)]],
        msgspec.Meta(
            min_length=1,
            max_length=_RUN_TABLES_MAX,
            description="The levels of the namespace and the name of each table that the statement read.",
        ),
    ]


class StatementTimeReport(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """The time that an engine took for a statement."""

    statement: Annotated[
        str,
        msgspec.Meta(
            pattern="^[0-9a-f]{16}$", max_length=16, description="The fingerprint of the statement, from its plan."
        ),
    ]
    seconds: Annotated[
        float, msgspec.Meta(gt=0, le=RUN_S_MAX, description="The time that the engine took, in seconds.")
    ]
    files: Annotated[
        int, msgspec.Meta(ge=0, le=1 << 40, description="The number of files of the table that the engine read.")
    ]
    bytes: Annotated[
        int, msgspec.Meta(ge=0, le=1 << 50, description="The bytes that the engine read from these files.")
    ]
    run: Annotated[
        StatementRunReport | None,
        doc("The run of the statement. A client sends it with one of the tables that the statement read."),
    ] = None


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/history/times",
    "recordStatementTime",
    "Record the time that an engine took for a statement that reads the table",
    tags=("metadata",),
    answers=(
        ResponseSpec(204, "The time is recorded, if the history contains the statement"),
        ResponseSpec(400, "The body is invalid"),
        ResponseSpec(404, "No such table"),
    ),
).takes(StatementTimeReport)
async def record_statement_time(call: Call, body: StatementTimeReport) -> None:
    """Record the time that an engine took for a statement that reads the table."""
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    history = call.components.history
    if history.is_on:
        time = StatementTime(body.seconds, body.files, body.bytes)
        principal = None if call.principal is ANONYMOUS else call.principal.name
        history.add_time(loaded_table.entry.uuid, body.statement, principal, time)
    if body.run is not None:
        await _record_run(call, body, body.run)


async def _record_run(call: Call, body: StatementTimeReport, run: StatementRunReport) -> None:
    """Record the run of a statement for OpenLineage, if there is a receiver.

    The inputs are the tables of the report that exist and that the caller may read.

    Raises:
        BadRequest: A name cannot be that of a table or namespace.
    """
    runs, now_ms = call.components.statement_runs, call.components.clock.now_ms()
    if runs is None:
        return
    paths = list(dict.fromkeys(tuple(path) for path in run.tables))
    for *namespace, name in paths:
        check_namespace(tuple(namespace))
        check_name(name, "table name")
    readable_paths = await call.select(paths, lambda path: Securable(path[:-1], TABLE, path[-1]))
    store = call.components.store
    entries = await gather(
        [partial(store.load_entry, EntryKind.TABLE, path[:-1], path[-1]) for path in readable_paths], _LOOKUPS_MAX
    )
    tables = tuple(path for path, entry in zip(readable_paths, entries, strict=True) if entry is not None)
    started_ms = max(0, now_ms - round(body.seconds * 1000))
    principal = "" if call.principal is ANONYMOUS else call.principal.name
    runs.record(
        StatementRun(
            run.id,
            statement="",  # The report has only the fingerprint of the statement.
            started_ms=started_ms,
            ended_ms=now_ms,
            outcome="COMPLETE",
            error="",
            tables=tables,
            form=body.statement,
            principal=principal,
        )
    )


def read_number(call: Call, name: str, default: int, maximum: int) -> int:
    """Return a number from the query of a request.

    Raises:
        BadRequest: The value is not a number from 1 to `maximum`.
    """
    text = call.query.get(name, str(default))
    if not text.isdecimal() or len(text) > _DIGITS_MAX or not 1 <= int(text) <= maximum:
        raise BadRequest(f"{name} is {text[:40]!r}; it must be a number from 1 to {maximum}")
    return int(text)


def _make_statement_sums(sums: QuerySums) -> StatementSums:
    return StatementSums(*msgspec.structs.astuple(sums))


def _make_statement_shape(shape_sums: QueryShapeSums, metadata: TableMetadata) -> StatementShape:
    """Return a shape, which is a class of statements that differ only in their values, in the form of an answer."""
    # The text is empty for the statements of all shapes that exceed the limit of shapes.
    shape = QueryShape.parse(shape_sums.shape) or QueryShape("other")
    return StatementShape(
        fingerprint=shape_sums.fingerprint,
        engine=shape.engine,
        columns=_list_names(metadata, shape.columns),
        conditions=show_conditions(shape, metadata),
        joins=_list_names(metadata, shape.joins),
        grouping=_list_names(metadata, shape.grouping),
        aggregates=[
            f"{aggregate.function}({name_column(metadata, aggregate.column_id) if aggregate.column_id else '*'})"
            for aggregate in shape.aggregates
        ],
        sums=_make_statement_sums(shape_sums.sums),
        first_ms=shape_sums.first_hour * HOUR_MS,
        last_ms=shape_sums.last_hour * HOUR_MS,
    )


def _list_names(metadata: TableMetadata, column_ids: Iterable[int]) -> list[str]:
    return [name_column(metadata, column_id) for column_id in column_ids]


def name_column(metadata: TableMetadata, column_id: int) -> str:
    """Return the current name of a column, or its last name if it was dropped.

    If no schema has the column, the result is `column` with the id.
    """
    for schema in (metadata.current_schema, *reversed(metadata.schemas)):
        column = schema.index.by_id.get(column_id)
        if column is not None:
            return column.name
    return f"column {column_id}"


def show_conditions(shape: QueryShape, metadata: TableMetadata) -> list[str]:
    """Return the conditions of a shape of statements as texts, with `?` in place of each value."""
    return [" or ".join(_show_term(term, metadata) for term in conjunct) for conjunct in shape.conjuncts]


def _show_term(term: ShapeTerm, metadata: TableMetadata) -> str:
    """Return a term, a comparison of one column in a shape of statements, as text without its values."""
    name = name_column(metadata, term.column_id)
    subject = name if term.transform == "identity" else f"{term.transform}({name})"
    if term.op in ("in", "not-in"):
        return f"{subject} {term.op.replace('-', ' ')} (up to {term.values} values)"
    operator = _OPERATORS.get(term.op, term.op)
    return f"{subject} {operator}" if operator.startswith("is ") else f"{subject} {operator} ?"
