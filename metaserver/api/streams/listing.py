"""Serves the list of the stream tables that have rows in the server's log."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated
from uuid import UUID

import msgspec

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.parameters.paging import PAGING
from seamark.metaserver.api.streams.rows import ShardStatus, StreamStatus, make_stream_status, report_flushes
from seamark.metaserver.store.model import TABLE, Entry, EntryKind
from seamark.metaserver.store.port import FOUND_TABLES_MAX
from seamark.metaserver.streams.pauses import read_pause


class ListedStream(StreamStatus, frozen=True, rename="kebab"):
    """A stream table and its rows that wait for a flush."""

    namespace: list[str]
    table: str


class StreamList(msgspec.Struct, frozen=True, rename="kebab"):
    """A page of stream tables."""

    streams: list[ListedStream]
    next_page_token: Annotated[str | None, doc("The `pageToken` of the next page, or null on the last page.")]


@Route(
    "GET",
    "/api/v1/streams",
    "listStreams",
    "List the stream tables that have or had rows in the log, with the rows that wait for a flush",
    check=Check.LOGIN,  # The listing has only the tables that the caller may read.
    tags=("streams",),
    parameters=PAGING,
    answers=(
        ResponseSpec(200, "The stream tables that the caller may read, ordered by UUID", StreamList),
        ResponseSpec(503, "Another server has the log"),
    ),
)
async def list_streams(call: Call) -> StreamList:
    """Return a page of the stream tables that the caller may read.

    The tables are looked up in batches until the page is full. A table with several names is listed once.
    """
    token, page_limit = call.read_paging()
    after_uuid = _read_token(token)
    store = call.components.store
    durable_offsets = await call.components.streams.list_durable_offsets()
    last_uuid = ""
    page: list[ListedStream] = []
    uuids = sorted(uuid for uuid in durable_offsets if uuid > after_uuid)
    # If there is one table more than the page shows, there is a next page.
    batch_size = min(page_limit + 1, FOUND_TABLES_MAX)
    for start in range(0, len(uuids), batch_size):
        entries = await store.find_entries(uuids[start : start + batch_size])
        tables = [entry for entry in entries if entry.kind is EntryKind.TABLE]
        visible_tables = await call.select(tables, lambda table: Securable(table.namespace, TABLE, table.name))
        for uuid, entries_of_table in groupby(visible_tables, key=lambda entry: entry.uuid):
            entry = next(entries_of_table)
            if len(page) == page_limit:
                return StreamList(page, last_uuid)
            page.append(await _describe_stream(call, entry, durable_offsets[uuid]))
            last_uuid = uuid
    return StreamList(page, None)


async def _describe_stream(call: Call, entry: Entry, durable_offsets: Mapping[int, int]) -> ListedStream:
    """Return the state of a listed stream table.

    Args:
        call: The call.
        entry: The table.
        durable_offsets: For each shard in the log, the offset after its last durable row.
    """
    shards = [
        ShardStatus(shard_number, offset, max(offset, durable_offsets.get(shard_number, 0)))
        for shard_number, offset in sorted(entry.parse_flushed_offsets().items())
    ]
    metadata = await call.components.catalog.documents.table(entry.metadata_location)
    streams = call.components.streams
    flushes = await report_flushes(call, entry)
    status = make_stream_status(shards, streams.tables.get(entry.uuid), read_pause(metadata), flushes)
    return ListedStream(**msgspec.structs.asdict(status), namespace=list(entry.namespace), table=entry.name)


def _read_token(token: str | None) -> str:
    """Return the UUID after which the page begins.

    Raises:
        BadRequest: The token is not a UUID, so it is from another listing.
    """
    if not token:
        return ""
    try:
        return str(UUID(token))
    except ValueError:
        raise BadRequest("pageToken does not belong to this listing; start again without it") from None
