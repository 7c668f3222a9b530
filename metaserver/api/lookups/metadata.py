"""Metadata routes over columnar blocks: files, column statistics and partitions of a snapshot.

Every answer describes one snapshot, and names it. A page token contains all values on which a page depends, including
the position and the snapshot, so that a commit between two pages has no effect. Any worker accepts the token. A token
that was issued for a different request is refused.

JSON is for people and scripts. Arrow IPC streams are for engines and data frames, and their columns are written without
conversion.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.types import canonicalize_primitive
from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.formats import arrow
from seamark.metaserver.api.formats.listings import (
    FILE_COLUMNS,
    PARTITION_COLUMNS,
    STATS_COLUMNS,
    ColumnStats,
    FileListing,
    Listing,
    PartitionListing,
    make_items,
)
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.parameters.paging import decode_page_token, encode_page_token, parse_page_size
from seamark.metaserver.api.http.parameters.snapshots import SNAPSHOT, find_requested_snapshot
from seamark.metaserver.planner.lookup.lookup import RequestedColumn, find_files_by_prefix
from seamark.metaserver.planner.lookup.prefix import Prefix, PrefixCache, parse_prefix
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.view.view import TableView

ARROW_ITEMS_MAX = 100_000
"""The maximum number of items in an Arrow answer, which is also the default."""
IN_LOOP_ITEMS_MAX = 500
"""The maximum number of items that are encoded in the event loop. Encoding them takes about 2 ms."""
IN_LOOP_FILES_MAX = 5_000
"""The maximum number of files whose partitions are computed in the event loop. Each page needs all files."""
_SUGGESTED_NAMES_MAX = 3
PREFIXES: web.AppKey[PrefixCache] = web.AppKey("prefixes", PrefixCache)
_PREFIXES_SHARE = 8
"""The divisor of `plan_answers_bytes`. Parsed partition filters may use this part of the memory."""
_TABLE_PATH = "/api/v1/tables/{namespace}/{table}"
_PREFIX = Parameter(
    "partition",
    "query",
    "Only files of these partitions: the values of some fields, as a path (`day=2024-01-01/bucket=3`) or as a JSON "
    'object (`{"day": "2024-01-01"}`).',
    {"type": "string"},
)
_PAGING = (
    Parameter("page-token", "query", "The next-page-token of the previous answer.", {"type": "string"}),
    Parameter(
        "limit",
        "query",
        "The maximum number of items. For JSON, the default and the limit are the setting page_limit. For Arrow, "
        f"they are {ARROW_ITEMS_MAX:,}.",
        {"type": "integer", "minimum": 1},
    ),
)


@dataclass(frozen=True)
class _Page:
    """The requested page of a listing.

    Attributes:
        start: The number of the first item, from 0.
        checksum: The checksum in page tokens, which identifies the request.
    """

    snapshot_id: int | None
    start: int
    limit: int
    checksum: int
    encode_arrow: bool

    def make_token(self, total: int) -> str | None:
        """Return the token of the next page, or None if this page is the last."""
        if self.start + self.limit >= total:
            return None
        return encode_page_token(self.checksum, self.snapshot_id, self.start + self.limit)


def _describe_answers(summary: str, list_field: str, schema: str) -> tuple[ResponseSpec, ...]:
    """Return the descriptions of the answers of a listing.

    Args:
        summary: The description of the answer.
        list_field: The field of the answer that has the items.
        schema: The name of the schema of an item.
    """
    page = {
        "type": "object",
        "required": ["snapshot-id", list_field, "next-page-token"],
        "properties": {
            "snapshot-id": {"type": ["integer", "null"], "description": "It is null if the table has no snapshot."},
            list_field: {"type": "array", "items": {"$ref": f"#/components/schemas/{schema}"}},
            "next-page-token": {"type": ["string", "null"]},
        },
    }
    summary_with_arrow = (
        f"{summary}. With `Accept: {arrow.ARROW_STREAM}`, the answer is an Arrow IPC stream, whose column names have "
        "`_` instead of `-`"
    )
    return (
        ResponseSpec(200, summary_with_arrow, page),
        ResponseSpec(404, "No such table"),
        ResponseSpec(406, "The client accepts neither JSON nor Arrow"),
    )


def _make_schema(columns: dict[str, dict[str, Any]], required: Sequence[str]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": columns}


FILE_SCHEMA = _make_schema(FILE_COLUMNS, tuple(FILE_COLUMNS))
COLUMN_STATS_SCHEMA = _make_schema(STATS_COLUMNS, ())
PARTITION_SCHEMA = _make_schema(PARTITION_COLUMNS, tuple(PARTITION_COLUMNS))


@Route(
    "GET",
    f"{_TABLE_PATH}/files",
    "listFiles",
    "List the live files of a snapshot, or of some of its partitions: first data files, then delete files",
    tags=("metadata",),
    parameters=(
        _PREFIX,
        Parameter(
            "content",
            "query",
            "The files to list: `all`, the default, `data` or `deletes`.",
            {"enum": ["all", "data", "deletes"]},
        ),
        *SNAPSHOT,
        *_PAGING,
    ),
    answers=_describe_answers("Files, in the order of the manifests", "files", "ContentFile"),
)
async def list_files(call: Call) -> web.Response:
    """List the live files of a snapshot, or of some of its partitions: first data files, then delete files."""
    metadata = await _load_metadata(call)
    content = call.query.get("content", "all")
    if content not in ("all", "data", "deletes"):
        raise BadRequest(f"content is {content[:40]!r}; it must be all, data or deletes")
    page = _read_page_request(call, metadata, ("files", content))
    view = await _load_view(call, metadata, page)
    prefix = _read_prefix(call, metadata)
    planner = call.components.planner
    scan = None
    if content != "deletes" and view.delete_file_count:  # A plan finds the delete files of each data file.
        scan = await planner.bind_and_plan(metadata, ScanRequest(snapshot_id=page.snapshot_id))

    data = find_files_by_prefix(view if content != "deletes" else TableView((), ()), prefix)
    deletes = find_files_by_prefix(_make_delete_view(view) if content != "data" else TableView((), ()), prefix)
    return await _answer_page(page, "files", tuple(FILE_COLUMNS), FileListing(metadata, data, deletes, scan))


@Route(
    "GET",
    f"{_TABLE_PATH}/stats/{{column}}",
    "listColumnStats",
    "List the bounds and counts of a column in each data file of all or some partitions",
    tags=("metadata",),
    parameters=(
        _PREFIX,
        Parameter(
            "fields",
            "query",
            "The fields of the items, separated by commas. The default is all fields except file.",
            {"type": "string"},
        ),
        *SNAPSHOT,
        *_PAGING,
    ),
    answers=_describe_answers("Statistics, in the order of the manifests", "stats", "ColumnStats"),
)
async def list_column_stats(call: Call) -> web.Response:
    """List the bounds and counts of a column in each data file of all or some partitions."""
    metadata = await _load_metadata(call)
    column = find_stats_column(metadata, call.names[1])
    fields = _read_fields(call.query.get("fields"))
    page = _read_page_request(call, metadata, ("stats", str(column.id)))
    view = await _load_view(call, metadata, page)
    prefix = _read_prefix(call, metadata)
    return await _answer_page(page, "stats", fields, ColumnStats(find_files_by_prefix(view, prefix), column))


@Route(
    "GET",
    f"{_TABLE_PATH}/partitions",
    "listPartitions",
    "List the partitions of a snapshot with totals of their files",
    tags=("metadata",),
    parameters=(_PREFIX, *SNAPSHOT, *_PAGING),
    answers=_describe_answers("Partitions, in the order of their first files", "partitions", "Partition"),
)
async def list_partitions(call: Call) -> web.Response:
    """List the partitions of a snapshot with totals of their files."""
    metadata = await _load_metadata(call)
    page = _read_page_request(call, metadata, ("partitions",))
    view = await _load_view(call, metadata, page)
    prefix = _read_prefix(call, metadata)

    def read_listing() -> PartitionListing:
        return PartitionListing(
            metadata, find_files_by_prefix(view, prefix), find_files_by_prefix(_make_delete_view(view), prefix)
        )

    is_small = view.file_count + view.delete_file_count <= IN_LOOP_FILES_MAX
    listing = read_listing() if is_small else await asyncio.to_thread(read_listing)
    return await _answer_page(page, "partitions", tuple(PARTITION_COLUMNS), listing)


def find_stats_column(metadata: TableMetadata, name: str) -> RequestedColumn:
    """Return the column with this name. If there is none now, return the last column that had this name earlier.

    Raises:
        BadRequest: The name is unknown, or the column is a struct, a list or a map.
    """
    newest_first = sorted(metadata.schemas, key=lambda schema: schema.id, reverse=True)
    for schema in (metadata.current_schema, *newest_first):
        column = schema.find_column_by_name(name)
        if column is not None:
            if not isinstance(column.type, str):
                raise BadRequest(
                    f"Column {name} has no statistics; request the statistics of {_suggest_inner_fields(schema, name)}"
                )
            return RequestedColumn(column.id, _canonicalize_kind(column.type))
    similar_names = find_near_names(name, metadata.current_schema.index.by_name)
    hint = f"; did you mean {' or '.join(similar_names)}?" if similar_names else ""
    raise BadRequest(f"Cannot find column {name[:100]!r} in the table's schemas{hint}")


def _canonicalize_kind(type_text: str) -> str:
    try:
        return canonicalize_primitive(type_text)
    except BadRequest:  # The type belongs to a later format version. Its counts are known, but not its bounds.
        return type_text


def _suggest_inner_fields(schema: Schema, name: str) -> str:
    inner_names = [other for other in schema.index.by_name if other.startswith(f"{name}.")]
    return " or ".join(inner_names[:_SUGGESTED_NAMES_MAX]) or "another column"


async def _load_metadata(call: Call) -> TableMetadata:
    return (await call.components.catalog.tables.load(call.namespace, call.name)).metadata


def _read_prefix(call: Call, metadata: TableMetadata) -> Prefix:
    return parse_prefix(call.query.get("partition", ""), metadata, call.app[PREFIXES])


def _read_page_request(call: Call, metadata: TableMetadata, listing_parts: tuple[str, ...]) -> _Page:
    """Return the requested page of a listing.

    Raises:
        BadRequest: The limit or the snapshot is invalid, or the page token does not belong to this listing.
    """
    wants_arrow = arrow.wants_arrow(call.headers)
    page_max = ARROW_ITEMS_MAX if wants_arrow else call.components.settings.page_limit
    limit = parse_page_size(call.query.get("limit", str(page_max)), "limit", page_max)
    parts = (metadata.table_uuid, call.query.get("partition", ""), *listing_parts)
    checksum = zlib.crc32(encode_json(parts))  # A page token is valid only for requests with the same parts.
    page_token = call.query.get("page-token")
    if not page_token:
        return _Page(find_requested_snapshot(call.query, metadata), 0, limit, checksum, wants_arrow)
    return _Page(*decode_page_token(page_token, checksum, metadata), limit, checksum, wants_arrow)


def _read_fields(fields_text: str | None) -> tuple[str, ...]:
    """Return the requested columns of the statistics.

    Raises:
        BadRequest: A column is unknown.
    """
    if fields_text is None:
        return tuple(name for name in STATS_COLUMNS if name != "file")
    names = tuple(dict.fromkeys(fields_text.split(",")))
    for name in names:
        if name not in STATS_COLUMNS:
            raise BadRequest(f"fields contains {name[:40]!r}; the fields are {', '.join(STATS_COLUMNS)}")
    return names


async def _load_view(call: Call, metadata: TableMetadata, page: _Page) -> TableView:
    if page.snapshot_id is None:
        return TableView((), ())
    return await call.components.planner.view(metadata, ScanRequest(snapshot_id=page.snapshot_id))


def _make_delete_view(view: TableView) -> TableView:
    """Return a view, the list of a snapshot's files, with the delete files in place of the data files.

    So code for data files also reads the delete files.
    """
    return TableView(view.delete_manifests, view.delete_blocks)


async def _answer_page(page: _Page, list_name: str, names: tuple[str, ...], listing: Listing) -> web.Response:
    """Return the response with a page of a listing, as JSON or Arrow.

    In JSON, `list_name` is the field with the items. `names` are the fields of an item.
    """
    encode_page: Callable[[], bytes | bytearray] = partial(
        _encode_arrow if page.encode_arrow else _encode_json, page, list_name, names, listing
    )
    items_of_page = min(page.limit, max(0, listing.total - page.start))
    # Use a thread: before PyArrow makes its first array, it imports pandas if it is installed, which takes 0.14 s.
    is_small = not page.encode_arrow and items_of_page <= IN_LOOP_ITEMS_MAX
    body = encode_page() if is_small else await asyncio.to_thread(encode_page)
    content_type = arrow.ARROW_STREAM if page.encode_arrow else "application/json"
    return web.Response(body=body, content_type=content_type, headers={"Vary": "Accept"})


def _encode_arrow(page: _Page, list_name: str, names: tuple[str, ...], listing: Listing) -> bytes | bytearray:
    """Return a page of a listing as an Arrow stream."""
    end = min(listing.total, page.start + page.limit)
    token = page.make_token(listing.total)
    metadata = {} if page.snapshot_id is None else {"snapshot-id": str(page.snapshot_id)}
    metadata |= {} if token is None else {"next-page-token": token}
    return listing.stream(names, min(page.start, end), end, metadata)


def _encode_json(page: _Page, list_name: str, names: tuple[str, ...], listing: Listing) -> bytes:
    """Return a page of a listing as JSON."""
    end = min(listing.total, page.start + page.limit)
    items = make_items(listing, names, min(page.start, end), end)
    return encode_json(
        {"snapshot-id": page.snapshot_id, list_name: items, "next-page-token": page.make_token(listing.total)}
    )


def add_components(app: web.Application) -> None:
    app[PREFIXES] = PrefixCache(app[COMPONENTS].settings.plan_answers_bytes // _PREFIXES_SHARE)
