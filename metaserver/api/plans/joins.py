"""Joins in requests about a table: read, checked against the tables that they name and the caller's rights, evaluated.

Who asks needs the right to read every table named; what a refusal says is what the table's own route would say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from metaserver.api.http.keys import CATALOG, CLOCK, OBJECTS, PLANNER, SETTINGS
from metaserver.api.http.requests import allow
from metaserver.api.http.snapshots import snapshot_of
from metaserver.deferred import Deferred
from metaserver.errors import BadRequest
from metaserver.iceberg.expressions.binding import bind
from metaserver.iceberg.expressions.expression import TRUE, Expression
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.schema import Column, ListType, MapType, Schema, is_primitive, type_name
from metaserver.planner.joins.dimensions import Dimensions, limits_of
from metaserver.planner.joins.joins import Join, JoinFilters, JoinOutcome, Pair, join_filters, kind_of
from metaserver.wire import check_name

if TYPE_CHECKING:
    from metaserver.iceberg.expressions import sql
else:
    sql = Deferred("metaserver.iceberg.expressions.sql")

DEPTH_MAX = 4
JOINS_MAX = 32
"""In one request, nested ones included."""
COLUMNS_MAX = 16
"""Of one join."""
_IN_THREAD_CHARACTERS = 2_000

DIMENSIONS: web.AppKey[Dimensions] = web.AppKey("dimensions", Dimensions)

_JOIN_FIELDS: dict[str, Any] = {
    "table": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Levels of the namespace and the name of the other table.",
        "examples": [["ssb", "supplier"]],
    },
    "on": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "Columns of this table, and which of the other they are equal to.",
        "examples": [{"lo_suppkey": "s_suppkey"}],
    },
    "predicate": {
        "type": "string",
        "description": "In SQL, over the other table's columns.",
        "examples": ["s_region = 'AMERICA'"],
    },
    "snapshot-id": {"type": "integer", "description": "Of the other table; default: the current one."},
    "joins": {
        "type": "array",
        "items": {"$ref": "#/components/schemas/Join"},
        "description": f"What further tables demand of the other table's rows, {DEPTH_MAX} levels at most.",
    },
}
JOIN_SCHEMA: dict[str, Any] = {"type": "object", "required": ["table", "on"], "properties": _JOIN_FIELDS}
JOINS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"$ref": "#/components/schemas/Join"},
    "description": "What inner joins demand of this table's rows, all at once: that the other table has a row that is "
    f"equal in all columns of `on`, and for which its predicate is true. {JOINS_MAX} at most, nested ones included.",
}
JOINS_TOLD_SCHEMA: dict[str, Any] = {
    "type": "array",
    "description": "What became of each join, nested ones behind their parent. Only where there were any.",
    "items": {
        "type": "object",
        "required": ["table", "snapshot-id", "keys", "used"],
        "properties": {
            "table": _JOIN_FIELDS["table"],
            "snapshot-id": {
                "type": ["integer", "null"],
                "description": "Of the other table, as it was evaluated: rows of another one may be missed.",
            },
            "keys": {
                "type": ["integer", "null"],
                "description": "Distinct keys that are left; of several columns the fewest. Null where left out.",
            },
            "used": {"type": "boolean"},
            "reason": {"type": "string", "description": "Why the join was left out."},
        },
    },
}


class JoinAsked(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    table: list[str]
    on: dict[str, str]
    predicate: str | None = None
    snapshot_id: int | None = None
    joins: list[JoinAsked] = []


async def told_of(
    request: web.Request, metadata: TableMetadata, joins: Sequence[JoinAsked]
) -> tuple[JoinFilters, tuple[JoinOutcome, ...] | msgspec.UnsetType]:
    """What the joins demand of the rows of the table, and what to answer of them. Forbidden and NotFound as each
    table's own route says it; BadRequest for what makes no sense."""
    if not joins:
        return JoinFilters((), ()), msgspec.UNSET
    _check(joins)
    app = request.app
    resolved = [await _resolved(request, metadata, join) for join in joins]
    until_s = app[CLOCK].monotonic() + app[SETTINGS].join_wait_s
    found = await join_filters(app[DIMENSIONS], resolved, until_s)
    return found, found.outcomes


def _check(joins: Sequence[JoinAsked]) -> None:
    """Before any table is loaded."""
    count, level = 0, list(joins)
    for _ in range(DEPTH_MAX):
        count += len(level)
        level = [one for join in level for one in join.joins]
    if level:
        raise BadRequest(f"Joins are nested deeper than {DEPTH_MAX} levels")
    if count > JOINS_MAX:
        raise BadRequest(f"{count} joins are too many; ask for {JOINS_MAX} at most")


async def _resolved(request: web.Request, metadata: TableMetadata, asked: JoinAsked) -> Join:
    if len(asked.table) < 2:
        raise BadRequest(f"The table of a join is {asked.table}; name the levels of its namespace, and the table")
    namespace, name = tuple(check_name(level, "namespace") for level in asked.table[:-1]), asked.table[-1]
    allow(request, namespace)
    loaded = await request.app[CATALOG].tables.load(namespace, check_name(name, "table name"))
    shown = ".".join(asked.table)
    other, entry = loaded.metadata, loaded.entry
    assert entry is not None
    if not 1 <= len(asked.on) <= COLUMNS_MAX:
        raise BadRequest(f"The join with {shown} is on {len(asked.on)} columns; 1 to {COLUMNS_MAX} are possible")
    try:
        snapshot_id = snapshot_of(other, asked.snapshot_id, None, None)
        pairs = tuple(_pair(metadata, other, *names) for names in asked.on.items())
        expression = TRUE if asked.predicate is None else await _bound(asked.predicate, other)
        joins = [await _resolved(request, other, one) for one in asked.joins]
    except BadRequest as error:
        raise BadRequest(f"The join with {shown}: {error.message}") from None
    return Join(tuple(asked.table), other, entry, snapshot_id, expression, pairs, tuple(joins))


async def _bound(predicate: str, metadata: TableMetadata) -> Expression:
    schema, schemas = metadata.current_schema, metadata.schemas

    def read() -> Expression:
        return bind(sql.parse_sql(predicate, schema, schemas).expression, schema, schemas, case_sensitive=True)

    return read() if len(predicate) <= _IN_THREAD_CHARACTERS else await asyncio.to_thread(read)


def _pair(metadata: TableMetadata, other: TableMetadata, mine: str, its: str) -> Pair:
    one, two = _column(metadata.current_schema, mine), _column(other.current_schema, its)
    return Pair(one.id, one.name, kind_of(one.type), two.id, kind_of(two.type))


def _column(schema: Schema, name: str) -> Column:
    """By its name, whatever its case where that leaves no doubt. Its values are one a row."""
    found = schema.column_named(name)
    if found is None:
        alike = {number for known, number in schema.index.by_name.items() if known.lower() == name.lower()}
        if len(alike) != 1:
            what = "is not" if not alike else f"may be one of {len(alike)} columns"
            raise BadRequest(f"The column {name[:200]!r} {what} in the table's schema")
        found = schema.index.by_id[alike.pop()]
    inside = any(isinstance(around.type, ListType | MapType) for around in schema.ancestors(found))
    if inside or not is_primitive(found.type):
        what = "is inside a list or a map" if inside else f"is a {type_name(found.type)}"
        raise BadRequest(f"The column {found.name} {what}: rows are not joined by it")
    return found


async def _opened(app: web.Application) -> AsyncIterator[None]:
    dimensions = Dimensions(app[PLANNER], app[OBJECTS], app[CLOCK], limits_of(app[SETTINGS]))
    app[DIMENSIONS] = dimensions
    yield
    await dimensions.close()


def add_joins(app: web.Application) -> None:
    """What the routes that know of joins need."""
    app.cleanup_ctx.append(_opened)
