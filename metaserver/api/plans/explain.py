"""The explain route: plans a scan and returns the effect of each stage and the unused parts of the predicate.

The plan cache is bypassed, so that the timings are those of a complete plan. The files in the answer, listed on
request, are those that an engine with the same predicate would read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from seamark.metaserver.api.formats.listings import FILE_COLUMNS, FileListing, items
from seamark.metaserver.api.http.describe import NAMESPACE, TABLE, ResponseSpec, describe
from seamark.metaserver.api.http.keys import CATALOG, PLANNER, SETTINGS
from seamark.metaserver.api.http.requests import allow, path_name, path_namespace, read_json
from seamark.metaserver.api.http.snapshots import snapshot_of
from seamark.metaserver.api.plans.joins import JOIN_OUTCOMES_SCHEMA, JOINS_SCHEMA, JoinSpec, evaluate_joins
from seamark.metaserver.deferred import Deferred
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.expressions.expression import TRUE, And, Bound, Expression, Or, predicates_of
from seamark.metaserver.iceberg.expressions.expression_json import expression_json, parse_expression
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.planner.answer.answer import RESIDUAL_VALUES_MAX
from seamark.metaserver.planner.lookup.lookup import files_at
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan import IndexUse, Scan, Stage
from seamark.metaserver.wire import decode_json, encode_json

if TYPE_CHECKING:
    from seamark.metaserver.iceberg.expressions import sql
else:
    sql = Deferred("seamark.metaserver.iceberg.expressions.sql")

DEFAULT_LIMIT = 100
RESIDUAL_PARTITIONS_MAX = 1000
"""The residuals of this many partitions are returned, those with the most files."""
RESIDUAL_BYTES_MAX = 4 << 20
"""The limit for all distinct residuals together."""
_IN_THREAD_FILES = 5_000
_IN_THREAD_CHARACTERS = 2_000

_FILES_AND_BYTES = {
    f"{what}-{when}": {"type": "integer"} for what in ("files", "bytes") for when in ("in", "removed", "left")
}
_STAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", *_FILES_AND_BYTES, "microseconds", "complete"],
    "properties": {
        "name": {"type": "string", "examples": ["manifests", "partition", "column_stats", "bloom"]},
        **_FILES_AND_BYTES,
        "microseconds": {"type": "integer"},
        "complete": {
            "type": "boolean",
            "description": "False when the time limit ended the stage: unchecked files stay.",
        },
    },
}
_INDEX_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "kind", "files-in", "files-removed"],
    "properties": {
        "name": {"type": "string"},
        "kind": {"type": "string"},
        "files-in": {"type": "integer"},
        "files-removed": {"type": "integer"},
    },
}
EXPLANATION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [
        "snapshot-id",
        "stages",
        "indexes",
        "complete",
        "files",
        "bytes",
        "records",
        "delete-files",
        "filter",
        "not-used",
        "columns",
        "residuals",
        "residuals-complete",
    ],
    "properties": {
        "snapshot-id": {"type": ["integer", "null"]},
        "stages": {"type": "array", "items": _STAGE_SCHEMA},
        "indexes": {
            "type": "array",
            "items": _INDEX_SCHEMA,
            "description": "The effect of each index that was probed. Bitmaps that are combined by row form a stage.",
        },
        "complete": {
            "type": "boolean",
            "description": "False when a time limit ended the plan or an index was late: a repeat may keep fewer "
            "files.",
        },
        "files": {"type": "integer", "description": "Data files that the plan keeps."},
        "bytes": {"type": "integer"},
        "records": {"type": "integer", "description": "Records in these files, deleted records included."},
        "delete-files": {"type": "integer", "description": "Delete files that apply to at least one of these files."},
        "filter": {"description": "The predicate as an Iceberg expression, as the planner used it."},
        "not-used": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Parts of the SQL that Iceberg expressions cannot represent; the planner takes them as "
            "true.",
        },
        "columns": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "id", "type"],
                "properties": {"name": {"type": "string"}, "id": {"type": "integer"}, "type": {"type": "string"}},
            },
            "description": "Columns whose statistics or partition values were compared.",
        },
        "residuals": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["residual", "files"],
                "properties": {"residual": {}, "files": {"type": "integer"}},
            },
            "description": "Residuals that are left once the partition is known, with the number of files of each.",
        },
        "residuals-complete": {
            "type": "boolean",
            "description": f"False when more than {RESIDUAL_PARTITIONS_MAX} partitions are left, or fewer with long "
            "residuals: then the list contains those with the most files.",
        },
        "kept": {"type": "array", "items": {"$ref": "#/components/schemas/File"}},
        "joins": JOIN_OUTCOMES_SCHEMA,
    },
}
_BODY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {
            "type": "string",
            "description": "A predicate in SQL.",
            "examples": ["id = 5 AND day >= '2024-01-01'"],
        },
        "filter": {"description": "An expression of the Iceberg REST specification, instead of `where`."},
        "case-sensitive": {
            "type": "boolean",
            "description": "Whether names in `filter` are case-sensitive; default true. Names in SQL are not.",
        },
        "snapshot-id": {"type": "integer"},
        "ref": {"type": "string"},
        "as-of": {"type": "integer", "description": "Milliseconds since the epoch."},
        "files": {"type": "boolean", "description": "Whether to list the kept files, as `kept`."},
        "joins": JOINS_SCHEMA,
        "limit": {
            "type": "integer",
            "minimum": 1,
            "description": f"The largest number of listed files; default {DEFAULT_LIMIT}.",
        },
    },
}


class _Explain(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    where: str | None = None
    filter: msgspec.Raw = msgspec.Raw()
    case_sensitive: bool = True
    snapshot_id: int | None = None
    ref: str | None = None
    as_of: int | None = None
    files: bool = False
    limit: int = DEFAULT_LIMIT
    joins: list[JoinSpec] = []


@describe(
    "explain",
    "Explains the plan of a scan: files and bytes after each stage, and the parts of the predicate that prune",
    tags=("metadata",),
    parameters=(NAMESPACE, TABLE),
    body=_BODY_SCHEMA,
    answers=(
        ResponseSpec(200, "The plan, stage by stage", {"$ref": "#/components/schemas/Explanation"}),
        ResponseSpec(400, "The predicate or a join is invalid; the message states the position"),
        ResponseSpec(404, "No such table, or a table of a join does not exist"),
    ),
)
async def explain(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    loaded = await request.app[CATALOG].tables.load(namespace, path_name(request, "table"))
    metadata = loaded.metadata
    body = await read_json(request, _Explain)
    if body.limit < 1:
        raise BadRequest(f"limit is {body.limit}; it must be at least 1")
    snapshot_id = snapshot_of(metadata, body.snapshot_id, body.ref, body.as_of)
    read = await _filter(body, metadata)
    scan_request = ScanRequest(filter=read.expression, snapshot_id=snapshot_id, case_sensitive=body.case_sensitive)
    bound_scan = BoundScan.bind(metadata, scan_request)
    filters, outcomes = await evaluate_joins(request, metadata, body.joins)
    if filters.dynamic_filters:
        bound_scan = bound_scan.joined_with(filters.dynamic_filters)
    scan = await request.app[PLANNER].explain(bound_scan, loaded.entry)
    listed = min(body.limit, request.app[SETTINGS].page_limit) if body.files else 0

    def answer() -> bytes:
        explanation = _explained(scan, read.unused, listed)
        return encode_json(explanation if outcomes is msgspec.UNSET else {**explanation, "joins": outcomes})

    encoded = answer() if scan.files <= _IN_THREAD_FILES else await asyncio.to_thread(answer)
    return web.Response(body=encoded, content_type="application/json")


async def _filter(body: _Explain, metadata: TableMetadata) -> sql.SqlFilter:
    if body.where is None:
        given = bytes(body.filter)
        return sql.SqlFilter(parse_expression(decode_json(given, "The filter")) if given else TRUE, ())
    if bytes(body.filter):
        raise BadRequest("The request has both where and filter; send the predicate as SQL or as an Iceberg expression")
    if len(body.where) <= _IN_THREAD_CHARACTERS:
        return sql.parse_sql(body.where, metadata.current_schema, metadata.schemas)
    return await asyncio.to_thread(sql.parse_sql, body.where, metadata.current_schema, metadata.schemas)


def _explained(scan: Scan, unused: tuple[str, ...], listed: int) -> dict[str, Any]:
    files = files_at(scan.view, scan.rows)
    deletes = {delete for applying in scan.deletes_of(scan.rows) for delete in applying}
    residuals, complete = _residuals(scan)
    last = scan.stages[-1]
    answer: dict[str, Any] = {
        "snapshot-id": scan.snapshot_id,
        "stages": [_stage(stage) for stage in scan.stages],
        "indexes": [_index(index) for index in scan.indexes],
        "complete": scan.complete,
        "files": scan.files,
        "bytes": last.bytes_left,
        "records": int(files.longs("record_count").clip(0).sum()),
        "delete-files": len(deletes),
        "filter": expression_json(scan.bound),
        "not-used": list(unused),
        "columns": list(_columns(scan.bound, set())),
        "residuals": residuals,
        "residuals-complete": complete,
    }
    if listed:
        listing = FileListing(scan.metadata, files, files_at(scan.view, scan.rows[:0]), scan)
        answer["kept"] = items(listing, tuple(FILE_COLUMNS), 0, min(listed, listing.total))
    return answer


def _stage(stage: Stage) -> dict[str, object]:
    return {
        "name": stage.name,
        "files-in": stage.files_in,
        "files-removed": stage.files_in - stage.files_left,
        "files-left": stage.files_left,
        "bytes-in": stage.bytes_in,
        "bytes-removed": stage.bytes_in - stage.bytes_left,
        "bytes-left": stage.bytes_left,
        "microseconds": stage.microseconds,
        "complete": stage.complete,
    }


def _index(used: IndexUse) -> dict[str, object]:
    return {
        "name": used.name,
        "kind": used.kind,
        "files-in": used.files_in,
        "files-removed": used.files_removed,
    }


def _columns(expression: Expression, seen: set[int]) -> Iterator[dict[str, object]]:
    """The distinct columns in the order of the predicates."""
    if isinstance(expression, And | Or):
        for child in expression.children:
            yield from _columns(child, seen)
    elif isinstance(expression, Bound) and expression.column_id not in seen:
        seen.add(expression.column_id)
        yield {"name": expression.name, "id": expression.column_id, "type": expression.kind}


def _residuals(scan: Scan) -> tuple[list[dict[str, object]], bool]:
    """The residuals and their numbers of files, most files first, and whether the list is complete."""
    within = group_by_partition(files_at(scan.view, scan.rows))
    parts = sorted(zip(within.files(), within.partitions, strict=True), key=lambda part: -part[0])
    counts: dict[bytes, int] = {}
    size = sum(1 + len(predicate.values) for predicate in predicates_of(scan.bound))
    residual_bytes, partitions = 0, 0
    for files, partition in parts[:RESIDUAL_PARTITIONS_MAX]:
        if partitions * size > RESIDUAL_VALUES_MAX or residual_bytes > RESIDUAL_BYTES_MAX:
            break
        partitions += 1
        values = tuple(field.value for field in partition.fields)
        fields = tuple((field.field_id, field.kind) for field in partition.fields)
        residual = encode_json(expression_json(scan.residual_in(partition.spec_id, fields, values)))
        residual_bytes += 0 if residual in counts else len(residual)
        counts[residual] = counts.get(residual, 0) + files
    most_first = sorted(counts.items(), key=lambda item: -item[1])
    residuals: list[dict[str, object]] = [{"residual": msgspec.Raw(text), "files": files} for text, files in most_first]
    return residuals, partitions == len(parts)


def add_routes(app: web.Application) -> None:
    # aiohttp's default pattern for a variable excludes braces, which names may contain.
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/explain", explain)
