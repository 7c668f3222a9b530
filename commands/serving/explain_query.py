"""The route that explains a whole query: for each table, the files that remain after each planning stage.

The Trino proxy and `seamark.duckdb` analyse queries in the same way, so the answer shows the plans that they request.
The query does not run. Names in the query are names of this catalog, with or without a catalog name.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from aiohttp import web

from seamark.formats.iceberg.expressions.comparisons import resolve_literals
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.protocol.wire import check_name, decode_as, encode_json, format_path
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.lazy_module import LazyModule, load_modules
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.fresh_reads import load_to_read
from seamark.metaserver.api.http.parameters.snapshots import resolve_snapshot_id
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.api.plans.explain import explain_scan
from seamark.metaserver.api.plans.joins import JoinSpec
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.store.model import TABLE

if TYPE_CHECKING:
    from seamark.commands.serving import query_notes, query_tables
    from seamark.connector.plans import async_client, column_types, joins, rewrites
    from seamark.formats.iceberg.expressions import sql
else:
    async_client = LazyModule("seamark.connector.plans.async_client")
    column_types = LazyModule("seamark.connector.plans.column_types")
    joins = LazyModule("seamark.connector.plans.joins")
    rewrites = LazyModule("seamark.connector.plans.rewrites")
    query_notes = LazyModule("seamark.commands.serving.query_notes")
    query_tables = LazyModule("seamark.commands.serving.query_tables")
    sql = LazyModule("seamark.formats.iceberg.expressions.sql")

QUERY_MAX = 50_000
"""The maximum number of characters of a query. The analysis of a longer text would block the interpreter for
seconds.
"""
_SHOWN_CHARACTERS_MAX = 200
"""The maximum length of a name in an error message."""
TABLES_MAX = 32
"""The maximum number of table references in a query. Each reference is planned without the cache."""


class TableExplanation(msgspec.Struct, rename="kebab"):
    """The explanation of a table in a query."""

    table: Annotated[list[str], doc("The levels of the namespace and the name.")]
    reference: Annotated[str, doc("The reference in the query.")]
    predicate: Annotated[
        str | None,
        doc(
            "The condition on the table's own columns that the query implies, in SQL; null if it implies none that "
            "could leave files out."
        ),
    ]
    plan: Annotated[
        msgspec.Raw,
        doc("The plan, as the route `explain` returns it.", **{"$ref": "#/components/schemas/ExplainResponse"}),
    ]


class ExplainQueryResponse(msgspec.Struct, rename="kebab"):
    tables: Annotated[
        list[TableExplanation], doc("Each reference of the query to a table of the catalog, in the order of the text.")
    ]


class ExplainQueryRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request to explain a query."""

    query: Annotated[
        str,
        doc(
            f"A query in SQL, of at most {QUERY_MAX} characters.",
            examples=["SELECT count(*) FROM shop.orders o JOIN shop.days d ON o.day = d.date WHERE d.holiday"],
        ),
    ]
    dialect: Annotated[
        Literal["trino", "duckdb"], doc("The SQL dialect of the query. Spark SQL can mostly be read as trino.")
    ] = "trino"
    namespace: Annotated[list[str], doc("The namespace of tables whose names in the query have no namespace.")] = []


@Route(
    "POST",
    "/api/v1/explain-query",
    "explainQuery",
    "Explain the plans of a query: the files and bytes of each table after each stage, and the effects of joins",
    tags=("metadata",),
    body_size=BodySize.MEDIUM,
    check=Check.SOMEWHERE,
    answers=(
        ResponseSpec(200, "The plan of each table", ExplainQueryResponse),
        ResponseSpec(400, "The query is not valid, or cannot be analysed; the message states why"),
        ResponseSpec(404, "A table of the query does not exist"),
    ),
).takes(ExplainQueryRequest)
async def explain_query(call: Call, body: ExplainQueryRequest) -> web.Response:
    """Answer with the plans of all tables in a query."""
    if len(body.query) > QUERY_MAX:
        raise BadRequest(f"The query has {len(body.query)} characters; the limit is {QUERY_MAX} characters")
    await load_modules(query_tables, query_notes, joins, rewrites, async_client, column_types, sql)
    query = await read_in_turn(call, len(body.query), partial(query_tables.read_query, body.query, body.dialect))
    if len(query.names) > TABLES_MAX:
        raise BadRequest(f"The query names {len(query.names)} tables; the limit is {TABLES_MAX}")
    paths = {key: _make_path(parts, body.namespace) for key, parts in query.names.items()}
    await call.allow(*dict.fromkeys(Securable(path[:-1], TABLE, path[-1]) for path in paths.values()))
    tables = {path: await load_to_read(call, path[:-1], path[-1]) for path in dict.fromkeys(paths.values())}
    tables_by_key = {key: tables[path] for key, path in paths.items()}
    columns = {key: names for key, table in tables_by_key.items() if (names := _list_columns(table)) is not None}
    references = await read_in_turn(call, len(body.query), partial(query.list_references, columns))
    if len(references) > TABLES_MAX:
        raise BadRequest(f"The query reads {len(references)} tables; the limit is {TABLES_MAX}")
    requested_joins_by_reference, unrequested_reasons = _list_joins(references, paths, tables_by_key)
    column_names = {column.name.lower() for table in tables.values() for column in table.metadata.current_schema.fields}
    find_unknown = partial(
        query_notes.find_unknown_columns, body.query, body.dialect, list(query.names.values()), column_names
    )
    unknown_column_notes = await read_in_turn(call, len(body.query), find_unknown)
    explanations = []
    for number, reference in sorted(references.items(), key=lambda item: item[1].start):
        plan = await _explain_table(
            call,
            body.query,
            paths[reference.key],
            tables_by_key[reference.key],
            reference,
            requested_joins_by_reference.get(number, []),
            unrequested_reasons[number],
            unknown_column_notes,
        )
        explanations.append(plan)
        # The first explained table reports all unknown columns; the other tables report none.
        unknown_column_notes = {}
    return web.Response(body=encode_json(ExplainQueryResponse(explanations)), content_type="application/json")


def _make_path(parts: tuple[str, ...], default: list[str]) -> tuple[str, ...]:
    """Return the levels of the namespace and the name of the table.

    If `parts` has three items, the first item is a catalog and is omitted. Dots in the item before the name separate
    the levels of the namespace. Without this item, the argument `default` is the namespace.

    Raises:
        BadRequest: The table has no namespace, or a name is invalid.
    """
    namespace = parts[-2].split(".") if len(parts) > 1 else default
    if not namespace:
        shown_name = parts[-1][:_SHOWN_CHARACTERS_MAX]
        raise BadRequest(f"The table {shown_name} has no namespace; write NAMESPACE.{shown_name}")
    return (*(check_name(level, "namespace") for level in namespace), check_name(parts[-1], "table name"))


def _list_columns(table: LoadedTable) -> dict[str, str] | None:
    """Return the types of the columns by lower-case name, or None if two names differ only in case."""
    fields = table.metadata.current_schema.fields
    return column_types.list_column_types([(field.name, msgspec.to_builtins(field.type)) for field in fields])


def _list_joins(
    references: Mapping[int, query_tables.QueriedTable],
    paths: Mapping[Hashable, tuple[str, ...]],
    tables_by_key: Mapping[Hashable, LoadedTable],
) -> tuple[dict[int, list[JoinSpec]], dict[int, list[str]]]:
    """Return the joins that engines' connectors send to the server, and the reasons why they do not send others.

    Both results are by the number of the reference.
    """
    planned_scans = {
        number: joins.PlannedScan(reference.scan, "", paths[reference.key]) for number, reference in references.items()
    }
    scans = [(reference.scan, tables_by_key[reference.key]) for reference in references.values()]
    known_tables = {(scan.catalog, scan.schema, scan.table): _to_known_table(table) for scan, table in scans}
    dimensions = joins.find_dimensions(planned_scans, known_tables)
    joins_by_table = {
        number: decode_as(
            encode_json([dimension.request().build_body() for dimension in dimensions[planned_scan]]),
            list[JoinSpec],
            "A join",
        )
        for number, planned_scan in planned_scans.items()
        if planned_scan in dimensions
    }
    return joins_by_table, {
        number: joins.explain_unrequested_joins(number, planned_scans, known_tables, dimensions)
        for number in planned_scans
    }


def _to_known_table(table: LoadedTable) -> async_client.KnownTable:
    snapshot = table.metadata.current_snapshot
    summary = {} if snapshot is None else snapshot.build_summary_map()
    sizes = (parse_count(summary, name, 0) for name in ("total-files-size", "total-data-files"))
    return async_client.KnownTable("", None, None if snapshot is None else snapshot.snapshot_id, *sizes)


async def _explain_table(
    call: Call,
    query: str,
    path: tuple[str, ...],
    table: LoadedTable,
    reference: query_tables.QueriedTable,
    requested_joins: list[JoinSpec],
    unrequested_reasons: list[str],
    notes: dict[str, str],
) -> TableExplanation:
    """Return the explanation of one table reference.

    Args:
        call: The request.
        query: The text of the query.
        path: The levels of the table's namespace and its name.
        table: The table.
        reference: The reference in the query.
        requested_joins: The joins with other tables that the query allows.
        unrequested_reasons: The reasons why other joins are not requested.
        notes: The reasons why parts of the query are not used, by part.
    """
    scan, metadata = reference.scan, table.metadata
    expression: Expression = TRUE
    if scan.condition is not None and scan.filter is not None:
        schemas = metadata.current_schema, metadata.schemas
        try:
            expression = resolve_literals(scan.filter, *schemas)
            find_unused_conditions = partial(query_notes.find_unused_conditions, scan.condition, *schemas)
            notes = notes | await read_in_turn(call, len(query), find_unused_conditions)
        except BadRequest as error:
            notes = notes | {str(scan.predicate): error.message}
    sql_filter = sql.SqlFilter(expression, tuple(notes), reasons=tuple(notes.values()))
    try:
        plan = await explain_scan(
            call,
            table,
            ScanRequest(
                filter=sql_filter.expression,
                snapshot_id=resolve_snapshot_id(metadata, scan.snapshot_id, scan.ref, None),
                case_sensitive=False,
                use_snapshot_schema=scan.selects_version,
                nan_above=True,
            ),
            sql_filter,
            requested_joins,
            unrequested_reasons=unrequested_reasons,
            max_kept_fraction=rewrites.MAX_KEPT_FRACTION,
        )
    except BadRequest as error:
        raise BadRequest(f"{format_path(path[:-1], path[-1])}: {error.message}") from None
    return TableExplanation(list(path), query[reference.start : reference.end], scan.predicate, msgspec.Raw(plan))
