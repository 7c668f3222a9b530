"""The route that aggregates the rows of a table, for clients without an engine and without SQL.

A request becomes a query, which runs like the queries of `POST /api/v1/sql`: in a confined worker, with the rights of
the caller and the same limits. Cubes answer the query for the files that they cover, and the rows of other files are
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.keys.measures import MEASURES_MAX, ColumnOperand, Measure, format_operand, parse_measure
from seamark.formats.index.keys.terms import Term, resolve
from seamark.formats.index.kinds.cube import CUBE
from seamark.formats.protocol.wire import check_name, check_namespace
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Answer, Call, Check, Route
from seamark.metaserver.api.http.parameters.snapshots import snapshot_of
from seamark.metaserver.api.sql.statements import ARROW, StatementBody, StatementRows, answer_statement

DIMENSIONS_MAX = 32


class OrderKey(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    by: Annotated[str, doc("One of the dimensions or measures of the request, as it is written there.")]
    descending: bool = False


class AggregateRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    namespace: list[str]
    table: str
    measures: Annotated[
        list[str],
        doc(
            "Aggregates: count(*), or count, sum, min, max, avg of a column, or of +, - and * of columns.",
            examples=[["sum(price * (1 - discount))", "count(*)"]],
        ),
    ]
    dimensions: Annotated[
        list[str],
        doc("Columns, or year, month, day, hour of a time. Without dimensions, the answer has one row.",
            examples=[["day(ts)", "country"]]),
    ] = []  # fmt: skip
    where: Annotated[str | None, doc("A condition on rows, in SQL.", examples=["country = 'at'"])] = None
    having: Annotated[str | None, doc("A condition on groups, in SQL.", examples=["count(*) > 10"])] = None
    order: list[OrderKey] = []
    limit: Annotated[int | None, doc("The maximum number of rows.", minimum=0)] = None
    snapshot_id: int | None = None
    ref: Annotated[str | None, doc("A branch or a tag.")] = None
    as_of: Annotated[int | None, doc("Milliseconds since the epoch.")] = None
    cubes: Annotated[
        str,
        doc(
            "Whether cubes are used; exact: except sums of floats, and averages of floats or integers.",
            enum=["on", "exact", "off"],
        ),
    ] = "on"
    explain: Annotated[bool, doc("Whether to plan the request and not to run it.")] = False


@Route(
    "POST",
    "/api/v1/aggregate",
    "aggregate",
    "Aggregates the rows of a table, from cubes where they cover its files",
    tags=("sql",),
    answers=(
        ResponseSpec(
            200,
            "The groups, with columns named as in the request: JSON, or an Arrow IPC stream for `Accept: "
            + ARROW
            + "`. "
            "`cube` says how many files were answered from a cube, or why none was",
            StatementRows,
        ),
        ResponseSpec(400, "The request is invalid, or exceeds a limit; the message states the reason."),
        ResponseSpec(403, "SQL is off, or the caller may not read the table."),
        ResponseSpec(404, "The table does not exist."),
        ResponseSpec(429, "The caller runs its share of statements."),
        ResponseSpec(503, "The server runs as many statements as it may, and none ended within sql_queue_s."),
    ),
    check=Check.SOMEWHERE,
    is_secret=True,
    streams=True,
    waits=True,
).takes(AggregateRequest)
async def aggregate(call: Call, body: AggregateRequest) -> Answer:
    namespace = check_namespace(tuple(body.namespace))
    if any("." in level for level in namespace):
        raise BadRequest("A level of the namespace has a dot, so that no SQL statement can name the table")
    call.allow(namespace)
    loaded = await call.components.catalog.tables.load(namespace, check_name(body.table, "table"))
    statement = write_query(body, loaded.metadata)
    return await answer_statement(call, StatementBody(statement, explain=body.explain, cubes=body.cubes))


def write_query(body: AggregateRequest, metadata: TableMetadata) -> str:
    """Return the request as a query in the SQL dialect.

    Raises:
        BadRequest: The request is invalid.
    """
    if not body.measures or len(body.measures) > MEASURES_MAX or len(body.dimensions) > DIMENSIONS_MAX:
        raise BadRequest(
            f"A request has 1 to {MEASURES_MAX} measures and at most {DIMENSIONS_MAX} dimensions, not "
            f"{len(body.measures)} and {len(body.dimensions)}"
        )
    snapshot_id = _find_version(body, metadata)
    schema = _schema_of_version(metadata, snapshot_id)
    terms = [_check_term(resolve(text, schema, metadata.schemas)) for text in body.dimensions]
    measures = [parse_measure(text, schema, metadata.schemas) for text in body.measures]
    names = [*body.dimensions, *body.measures]
    if len(set(names)) < len(names):
        raise BadRequest("A dimension or measure is named twice")
    columns = {field.id: field.name for field in schema.fields}
    values = [*(_write_term(term, columns) for term in terms), *(_write_measure(one, columns) for one in measures)]
    outputs = (f"{value} AS {_quote(name)}" for value, name in zip(values, names, strict=True))
    lines = [f"SELECT {', '.join(outputs)}", f"FROM {_quote('.'.join(body.namespace))}.{_quote(body.table)}"]
    if snapshot_id is not None:
        lines.append(f"FOR VERSION AS OF {snapshot_id}")
    if body.where is not None:
        lines.append(f"WHERE ({body.where}\n)")
    if terms:
        lines.append(f"GROUP BY {', '.join(map(str, range(1, len(terms) + 1)))}")
    if body.having is not None:
        lines.append(f"HAVING ({body.having}\n)")
    if body.order:
        lines.append(f"ORDER BY {', '.join(_write_order(key, names) for key in body.order)}")
    if body.limit is not None:
        if body.limit < 0:
            raise BadRequest(f"limit is {body.limit}; it must not be negative")
        lines.append(f"LIMIT {body.limit}")
    return "\n".join(lines)


def _find_version(body: AggregateRequest, metadata: TableMetadata) -> int | None:
    """Return the id of the requested snapshot, or None for the current state of the table.

    Raises:
        BadRequest: The table does not have the requested snapshot.
    """
    snapshot_id = snapshot_of(metadata, body.snapshot_id, body.ref, body.as_of)
    is_current = body.snapshot_id is None and body.as_of is None and body.ref in (None, MAIN)
    return None if is_current else snapshot_id


def _schema_of_version(metadata: TableMetadata, snapshot_id: int | None) -> Schema:
    """Return the schema that a statement uses for a snapshot, or for the current state if the id is None."""
    snapshot = None if snapshot_id is None else metadata.snapshot(snapshot_id)
    if snapshot is None or snapshot.schema_id is None:
        return metadata.current_schema
    return metadata.schema(snapshot.schema_id) or metadata.current_schema


def _check_term(term: Term) -> Term:
    if problem := CUBE.find_term_problem(term):
        raise BadRequest(problem)
    return term


def _write_term(term: Term, columns: Mapping[int, str]) -> str:
    column = _write_column(term.column_id, term.name, columns)
    return column if term.transform == IDENTITY else f"date_trunc('{term.transform}', {column})"


def _write_measure(measure: Measure, columns: Mapping[int, str]) -> str:
    def write(column: ColumnOperand) -> str:
        return _write_column(column.column_id, column.name, columns)

    return f"{measure.function}({'*' if measure.operand is None else format_operand(measure.operand, write)})"


def _write_column(column_id: int, name: str, columns: Mapping[int, str]) -> str:
    if column_id not in columns:
        raise BadRequest(f"{name[:200]} is a field of a struct or a dropped column; a request can only use columns")
    return _quote(columns[column_id])


def _write_order(key: OrderKey, names: list[str]) -> str:
    if key.by not in names:
        raise BadRequest(f"order has {key.by[:100]!r}; it must be one of the dimensions or measures of the request")
    return f"{names.index(key.by) + 1}{' DESC' if key.descending else ''}"


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
