"""The route that lists the stream tables of the server's log."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import msgspec

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.parameters.paging import PAGING
from seamark.metaserver.api.streams.rows import ShardStatus, StreamStatus, to_status
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.streams.pauses import pause_of


class ListedStream(StreamStatus, frozen=True, rename="kebab"):
    """A stream table, and the rows that wait for a flush."""

    namespace: list[str]
    table: str


class StreamList(msgspec.Struct, frozen=True, rename="kebab"):
    streams: list[ListedStream]
    next_page_token: Annotated[str | None, doc("Pass it as `pageToken`; null after the last page.")]


@Route(
    "GET",
    "/api/v1/streams",
    "listStreams",
    "Lists the stream tables that have, or had, rows in the log, and what of them waits for a flush",
    check=Check.LOGIN,  # The listing has only the tables that the caller may read.
    tags=("streams",),
    parameters=PAGING,
    answers=(
        ResponseSpec(200, "The stream tables that the caller may read, by UUID", StreamList),
        ResponseSpec(503, "Another server has the log"),
    ),
)
async def list_streams(call: Call) -> StreamList:
    token, page_limit = call.paging()
    after = _read_token(token)
    streams, store = call.components.streams, call.components.store
    durable = await streams.durable_offsets()
    page: list[ListedStream] = []
    last = ""
    for uuid in sorted(uuid for uuid in durable if uuid > after):
        visible = [
            entry
            for entry in await store.entries_of(uuid)
            if entry.kind is EntryKind.TABLE and call.may(entry.namespace)
        ]
        if not visible:
            continue
        if len(page) == page_limit:
            return StreamList(page, last)
        entry, last = visible[0], uuid
        flushed = entry.parse_flushed_offsets()
        shards = [
            ShardStatus(number, offset, max(offset, durable[uuid].get(number, 0)))
            for number, offset in sorted(flushed.items())
        ]
        metadata = await call.components.catalog.documents.table(entry.metadata_location)
        status = to_status(shards, streams.tables.get(uuid), pause_of(metadata))
        page.append(ListedStream(**msgspec.structs.asdict(status), namespace=list(entry.namespace), table=entry.name))
    return StreamList(page, None)


def _read_token(token: str | None) -> str:
    """Return the UUID after which the page begins.

    Raises:
        BadRequest: The token was not issued by this route.
    """
    if not token:
        return ""
    try:
        return str(UUID(token))
    except ValueError:
        raise BadRequest("pageToken was not issued for this request; start again without it") from None
