"""Serves aggregates of the rows of a table, for clients without an engine and without SQL.

If a cube has an entry for each data file, and the request can be computed from it, the server's process computes the
answer (`cube_answers.py`). Any other request becomes a query, which runs like the queries of `POST /api/v1/sql`: in a
confined worker, with the rights of the caller and the same limits. There, cubes answer it where they can, and the rows
of the other files are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from aiohttp import web

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.types.schema import Schema, StructType
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.keys.lookups import parse_lookup
from seamark.formats.index.keys.measures import MEASURES_MAX, ColumnOperand, Measure, format_operand, parse_measure
from seamark.formats.index.keys.terms import Term, resolve_term
from seamark.formats.index.kinds.cube import CUBE
from seamark.formats.protocol.wire import check_name, check_namespace
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Answer, Call, Check, Route
from seamark.metaserver.api.http.parameters.snapshots import resolve_snapshot_id
from seamark.metaserver.api.sql.cube_answers import CUBE_ANSWERS, CubeAnswers, Format
from seamark.metaserver.api.sql.statements import (
    ARROW,
    StatementBody,
    StatementRows,
    answer_statement,
    check_statements_run,
)
from seamark.metaserver.catalog.plans.plan_views import quote_identifier
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.cubes.aggregation import GroupQuery, SortKey
from seamark.metaserver.store.model import TABLE

DIMENSIONS_MAX = 32
ON, EXACT = "on", "exact"
"""The values of `AggregateRequest.cubes` with which cubes are used."""


class OrderKey(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A dimension or measure by which the rows of the answer are ordered."""

    by: Annotated[str, doc("A dimension or measure of the request, in the same spelling.")]
    descending: bool = False


class AggregateRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for aggregates."""

    namespace: list[str]
    table: str
    measures: Annotated[
        list[str],
        doc(
            "The aggregates: count(*), count, sum, min, max or avg of a column or of columns with +, - and *, or "
            "approx_distinct of a column.",
            examples=[["sum(price * (1 - discount))", "count(*)"]],
        ),
    ]
    dimensions: Annotated[
        list[str],
        doc("Columns, or the year, month, day or hour of a time. Without dimensions, the answer has one row.",
            examples=[["day(ts)", "country"]]),
    ] = []  # fmt: skip
    where: Annotated[str | None, doc("A condition on rows, in SQL.", examples=["country = 'at'"])] = None
    having: Annotated[str | None, doc("A condition on groups, in SQL.", examples=["count(*) > 10"])] = None
    order: list[OrderKey] = []
    limit: Annotated[int | None, doc("The maximum number of rows.", minimum=0)] = None
    snapshot_id: int | None = None
    ref: Annotated[str | None, doc("The name of a branch or a tag.")] = None
    as_of: Annotated[
        int | None,
        doc("A time in milliseconds since the epoch. The snapshot that was current then is read."),
    ] = None
    cubes: Annotated[
        str,
        doc(
            "Whether cubes are used. `exact` excludes sums of floats, and averages of floats or integers.",
            enum=["on", "exact", "off"],
        ),
    ] = "on"
    explain: Annotated[bool, doc("Whether the request is only planned and not run.")] = False


@Route(
    "POST",
    "/api/v1/aggregate",
    "aggregate",
    "Aggregate the rows of a table, from cubes where they cover its files",
    tags=("sql",),
    answers=(
        ResponseSpec(
            200,
            "The groups, with the column names of the request, as JSON, or as an Arrow IPC stream for `Accept: "
            + ARROW
            + "`. "
            "`cube` states how many files were answered from a cube, or why no file was",
            StatementRows,
        ),
        ResponseSpec(400, "The request is invalid or exceeds a limit. The message states the reason."),
        ResponseSpec(403, "SQL is off, or the caller may not read the table."),
        ResponseSpec(404, "The table does not exist."),
        ResponseSpec(429, "The statements of the caller use its whole share."),
        ResponseSpec(
            503, "The server runs the maximum number of statements, and no statement ended within sql_queue_s."
        ),
    ),
    check=Check.SOMEWHERE,
    is_secret=True,
    streams=True,
    waits=True,
).takes(AggregateRequest)
async def aggregate(call: Call, body: AggregateRequest) -> Answer:
    """Aggregate the rows of a table, from cubes where possible."""
    namespace = check_namespace(tuple(body.namespace))
    if any("." in level for level in namespace):
        raise BadRequest("A level of the namespace contains a dot, so no SQL statement can name the table")
    name = check_name(body.table, "table")
    await call.allow(Securable(namespace, TABLE, name))
    check_statements_run(call)
    loaded_table = await call.components.catalog.tables.load(namespace, name)
    answer = await _answer_from_cube(call, body, loaded_table)
    if answer is not None:
        return answer
    statement = write_query(body, loaded_table.metadata)
    return await answer_statement(call, StatementBody(statement, explain=body.explain, cubes=body.cubes))


async def _answer_from_cube(call: Call, body: AggregateRequest, loaded_table: LoadedTable) -> web.Response | None:
    """Return the answer from a cube without a statement, or None if the request has to run as a statement.

    A statement is needed to explain a plan, to filter groups, and if `t.a` could mean a column of the table `t` or a
    field of a struct `t`. If the answer is in memory from an earlier request, no cube is read.

    Raises:
        BadRequest: The request is invalid.
    """
    entry, snapshot_id = loaded_table.entry, loaded_table.metadata.current_snapshot_id
    if entry is None or snapshot_id is None or body.explain or body.having is not None or body.cubes not in (ON, EXACT):
        return None
    answer_format: Format = "arrow" if ARROW in call.headers.get("Accept", "") else "json"
    key = msgspec.json.encode((answer_format, body))
    cube_answers = call.app[CUBE_ANSWERS]
    answer = await cube_answers.find(call.components, loaded_table, key)
    if answer is None:
        parsed_request = _ParsedRequest.parse(body, loaded_table.metadata)
        if _has_ambiguous_fields(body, parsed_request.schema):
            return None
        query = GroupQuery(
            parsed_request.schema,
            parsed_request.terms,
            parsed_request.measures,
            parsed_request.names,
            where=body.where,
            sort_keys=tuple(
                SortKey(parsed_request.names.index(order_key.by), order_key.descending) for order_key in body.order
            ),
            limit=body.limit,
            floats=body.cubes == ON,
        )
        requested_snapshot_id = snapshot_id if parsed_request.snapshot_id is None else parsed_request.snapshot_id
        answer = await cube_answers.compute_answer(call, loaded_table, query, requested_snapshot_id, key, answer_format)
    return None if answer is None else cube_answers.respond(call, entry, answer, answer_format)


@dataclass(frozen=True)
class _ParsedRequest:
    """A parsed request with the columns that it names.

    Attributes:
        snapshot_id: The id of the snapshot, or None for the current state of the table.
        schema: The schema of the snapshot.
        names: The names of the dimensions and of the measures, in the spelling of the request.
    """

    snapshot_id: int | None
    schema: Schema
    terms: tuple[Term, ...]
    measures: tuple[Measure, ...]
    names: tuple[str, ...]

    @classmethod
    def parse(cls, body: AggregateRequest, metadata: TableMetadata) -> _ParsedRequest:
        """Parse a request.

        Raises:
            BadRequest: The request is invalid.
        """
        if not body.measures or len(body.measures) > MEASURES_MAX or len(body.dimensions) > DIMENSIONS_MAX:
            raise BadRequest(
                f"The request has {len(body.measures)} measures and {len(body.dimensions)} dimensions; send 1 to "
                f"{MEASURES_MAX} measures and at most {DIMENSIONS_MAX} dimensions"
            )
        snapshot_id = _find_version(body, metadata)
        schema = _find_schema_of_version(metadata, snapshot_id)
        terms = tuple(_check_term(resolve_term(text, schema, metadata.schemas)) for text in body.dimensions)
        measures = tuple(parse_measure(text, schema, metadata.schemas) for text in body.measures)
        names = (*body.dimensions, *body.measures)
        if len(set(names)) < len(names):
            raise BadRequest("A dimension or measure is repeated; name each of them once")
        if body.limit is not None and body.limit < 0:
            raise BadRequest(f"limit is {body.limit}; it must not be negative")
        for key in body.order:
            if key.by not in names:
                raise BadRequest(
                    f"order has {key.by[:100]!r}; it must be one of the dimensions or measures of the request"
                )
        return cls(snapshot_id, schema, terms, measures, names)


def write_query(body: AggregateRequest, metadata: TableMetadata) -> str:
    """Return the request as a query in the SQL dialect.

    If `t.a` could mean a column of the table `t` or a field of a struct `t`, the query may only use columns of the top
    level.

    Raises:
        BadRequest: The request is invalid.
    """
    parsed_request = _ParsedRequest.parse(body, metadata)
    columns = _list_paths(parsed_request.schema)
    if _has_ambiguous_fields(body, parsed_request.schema):
        columns = {column_id: path for column_id, path in columns.items() if len(path) == 1}
    values = [_write_term(term, columns) for term in parsed_request.terms]
    values += [_write_measure(measure, columns) for measure in parsed_request.measures]
    outputs = (f"{value} AS {quote_identifier(name)}" for value, name in zip(values, parsed_request.names, strict=True))
    lines = [
        f"SELECT {', '.join(outputs)}",
        f"FROM {quote_identifier('.'.join(body.namespace))}.{quote_identifier(body.table)}",
    ]
    if parsed_request.snapshot_id is not None:
        lines.append(f"FOR VERSION AS OF {parsed_request.snapshot_id}")
    if body.where is not None:
        # The line break ends a comment at the end of the condition, which would hide the parenthesis.
        lines.append(f"WHERE ({body.where}\n)")
    if parsed_request.terms:
        lines.append(f"GROUP BY {', '.join(map(str, range(1, len(parsed_request.terms) + 1)))}")
    if body.having is not None:
        lines.append(f"HAVING ({body.having}\n)")
    if body.order:
        lines.append(f"ORDER BY {', '.join(_write_order(key, parsed_request.names) for key in body.order)}")
    if body.limit is not None:
        lines.append(f"LIMIT {body.limit}")
    return "\n".join(lines)


def _find_version(body: AggregateRequest, metadata: TableMetadata) -> int | None:
    """Return the id of the requested snapshot, or None for the current state of the table.

    Raises:
        BadRequest: The table does not have the requested snapshot.
    """
    snapshot_id = resolve_snapshot_id(metadata, body.snapshot_id, body.ref, body.as_of)
    is_current = body.snapshot_id is None and body.as_of is None and body.ref in (None, MAIN)
    return None if is_current else snapshot_id


def _find_schema_of_version(metadata: TableMetadata, snapshot_id: int | None) -> Schema:
    """Return the schema in which a statement reads a snapshot, or the current schema if the id is None.

    The current schema is also used if the metadata no longer contain the schema of the snapshot.
    """
    snapshot = None if snapshot_id is None else metadata.snapshot(snapshot_id)
    if snapshot is None or snapshot.schema_id is None:
        return metadata.current_schema
    return metadata.schema(snapshot.schema_id) or metadata.current_schema


def _check_term(term: Term) -> Term:
    """Return the term if it belongs to the table and may be a dimension of a cube.

    Raises:
        BadRequest: The term is an attribute of another table, or may not be a dimension.
    """
    if parse_lookup(term.transform) is not None:
        raise BadRequest(f"{term.text[:200]} is an attribute of another table; send a statement with a join instead")
    if problem := CUBE.find_term_problem(term):
        raise BadRequest(problem)
    return term


def _list_paths(schema: Schema) -> dict[int, tuple[str, ...]]:
    """Return the names from the root to each column and to each field of a struct, by id."""
    return {
        column.id: schema.list_path(column)
        for column in schema.index.by_id.values()
        if all(isinstance(ancestor.type, StructType) for ancestor in schema.list_ancestors(column))
    }


def _has_ambiguous_fields(body: AggregateRequest, schema: Schema) -> bool:
    """Return whether `t.a` could be a field of the struct t or the column a of the table t."""
    names = {name.lower() for name in (*body.namespace, body.table)}
    return any(isinstance(field.type, StructType) and field.name.lower() in names for field in schema.fields)


def _write_term(term: Term, columns: Mapping[int, tuple[str, ...]]) -> str:
    """Return the SQL of a dimension."""
    column = _write_column(term.column_id, term.name, columns)
    return column if term.transform == IDENTITY else f"date_trunc('{term.transform}', {column})"


def _write_measure(measure: Measure, columns: Mapping[int, tuple[str, ...]]) -> str:
    """Return the SQL of a measure."""

    def write_operand(column: ColumnOperand) -> str:
        return _write_column(column.column_id, column.name, columns)

    return f"{measure.function}({'*' if measure.operand is None else format_operand(measure.operand, write_operand)})"


def _write_column(column_id: int, name: str, columns: Mapping[int, tuple[str, ...]]) -> str:
    """Return the SQL of a column, its quoted names from the root joined by dots.

    Raises:
        BadRequest: The name does not belong to a present column.
    """
    if column_id not in columns:
        raise BadRequest(f"{name[:200]} is a dropped column, or a field of a struct that has the name of the table")
    return ".".join(map(quote_identifier, columns[column_id]))


def _write_order(key: OrderKey, names: tuple[str, ...]) -> str:
    """Return the SQL of a key of the order, which refers to an output column by its position."""
    return f"{names.index(key.by) + 1}{' DESC' if key.descending else ''}"


def add_components(app: web.Application) -> None:
    app[CUBE_ANSWERS] = CubeAnswers(app[COMPONENTS].settings, app[COMPONENTS].clock)
