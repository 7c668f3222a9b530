"""Loads a table as a reader requests it: with the rows that wait for a flush, and with the rows that a client wrote.

A request with `X-Seamark-Fresh: true` that names no snapshot reads a fresh snapshot. It may also name a fresh snapshot
that an earlier answer had: so all requests of a statement read the same rows. A client names the rows that it wrote by
the tokens in `X-Seamark-After`, which it got with the answers to its appends.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.errors import BadRequest, RetryLater
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.parameters.fresh import read_required_offsets, reads_fresh
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.store.model import Entry, NamespacePath
from seamark.metaserver.streams.fresh_snapshots import with_fresh_snapshot
from seamark.metaserver.streams.streams import FreshTable


async def load_to_read(
    call: Call,
    namespace: NamespacePath,
    name: str,
    snapshot_id: int | None = None,
    *,
    is_named: bool = False,
) -> LoadedTable:
    """Return a table, with a fresh snapshot if the headers of the request require it.

    A fresh snapshot contains rows of a stream that are not in files yet. Only the current state of a table can be
    fresh, so a snapshot that the request names is returned unchanged if the table has it.

    Args:
        call: The request.
        namespace: The namespace of the table.
        name: The name of the table.
        snapshot_id: The id of the snapshot that the request names, or None for the current state.
        is_named: Whether the request names a branch, a tag or a time.

    Raises:
        NoSuchTable: There is no such table.
        BadRequest: The request reads fresh snapshots, and neither the table nor its fresh snapshots have the snapshot.
        RetryLater: This server lacks rows that a token in the headers requires.
    """
    loaded_table = await call.components.catalog.tables.load(namespace, name)
    entry, metadata = loaded_table.entry, loaded_table.metadata
    assert entry is not None
    if is_named or (snapshot_id is not None and metadata.snapshot(snapshot_id) is not None):
        return loaded_table
    if not entry.flushed or not reads_fresh(call.headers):
        check_required_rows(call.headers, entry, entry.parse_flushed_offsets())
        return loaded_table
    if snapshot_id is not None:
        snapshot = await find_fresh_snapshot(call, entry, metadata, snapshot_id)
        return msgspec.structs.replace(loaded_table, metadata=with_fresh_snapshot(metadata, snapshot))
    return (await load_fresh(call, entry, metadata)).loaded


async def load_fresh(call: Call, entry: Entry, metadata: TableMetadata | None = None) -> FreshTable:
    """Return a stream table with all rows that were acknowledged before the call.

    Raises:
        RetryLater: This server lacks rows that a token in the headers requires.
    """
    fresh_table = await call.components.streams.load_fresh(entry, metadata)
    check_required_rows(call.headers, entry, fresh_table.offsets)
    return fresh_table


async def find_fresh_snapshot(call: Call, entry: Entry, metadata: TableMetadata, snapshot_id: int) -> Snapshot:
    """Return a snapshot with rows that were not in files yet, which an earlier answer of any server contained.

    Raises:
        BadRequest: There is no such snapshot, or it has expired.
    """
    snapshot = await call.components.streams.find_fresh_snapshot(entry, metadata, snapshot_id)
    if snapshot is None:
        raise BadRequest(
            f"Cannot find snapshot {snapshot_id}: it is not a snapshot of the table. If it is a snapshot with rows "
            "that waited for a flush, it has expired; load the table again and repeat the statement"
        )
    return snapshot


def check_required_rows(headers: Mapping[str, str], entry: Entry, offsets: Mapping[int, int]) -> None:
    """Check that an answer has the rows that the tokens in the headers require.

    An answer to appended rows contains a token, which a client sends to read its own rows.

    Args:
        headers: The headers of the request.
        entry: The table.
        offsets: The offset after the last row that the answer has, by shard.

    Raises:
        RetryLater: Rows are missing.
    """
    for shard, end in read_required_offsets(headers, entry.uuid).items():
        if offsets.get(shard, 0) < end:
            raise RetryLater(
                f"This server has the rows of shard {shard} of the table up to offset {offsets.get(shard, 0)}, and the "
                f"request needs the rows up to offset {end}; send the request again later"
            )
