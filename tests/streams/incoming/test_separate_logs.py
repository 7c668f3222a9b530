"""Tests of two servers over one database that each have a log of rows in files of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.table.metadata import TableMetadata

import seamark
from tests.streams.incoming.test_append_gates import commit_table, make_schema_updates
from tests.streams.test_rows_over_http import ENABLED, StreamServer, create_stream_table, open_stream_server

NAME_IS_A = "name = 'a'"


async def test_server_without_the_log_of_a_table_refuses_commits_that_depend_on_waiting_rows(
    postgres_url: str, tmp_path: Path
) -> None:
    """Otherwise, rows that readers have seen would survive a DELETE, or could never be flushed."""
    settings: dict[str, Any] = {"database": postgres_url, "warehouse": f"file://{tmp_path / 'warehouse'}"}
    async with (
        open_stream_server(tmp_path / "a", **settings) as first_stream,
        open_stream_server(tmp_path / "b", **settings) as second_stream,
    ):
        await create_stream_table(first_stream)
        await first_stream.post({"id": 1, "name": "a"})
        await first_stream.flush()
        await first_stream.post({"id": 2, "name": "a"})
        assert (await first_stream.ids(), await second_stream.ids()) == ([1, 2], [1])
        client = seamark.SeamarkClient(second_stream.server.url)

        def delete_by_pyiceberg() -> None:
            second_stream.catalog.load_table("db.t").delete(NAME_IS_A)

        def delete_by_seamark() -> None:
            seamark.delete(client, ("db", "t"), keys=pa.table({"id": [1, 2]}), key=["id"])

        for delete in (delete_by_pyiceberg, delete_by_seamark):
            assert "the server that has" in await asyncio.to_thread(run_and_read_error, delete)
        status, message = await second_stream.send_and_read_error(b'[{"id": 3}]')
        assert (status, "write to the server that has that log" in message) == (503, True)
        require_name = make_schema_updates([(1, "id", "long", True), (2, "name", "string", True)], [])
        assert await commit_table(second_stream, require_name) == 400
        await asyncio.to_thread(append_row, second_stream, 4)
        assert await first_stream.ids() == [1, 2, 4]
        await first_stream.flush()
        assert await second_stream.ids() == [1, 2, 4]
        # The second server gets the request again, because the answer of the first server was lost.
        deletion = make_deletion((await asyncio.to_thread(second_stream.catalog.load_table, "db.t")).metadata)
        assert [await commit_table(stream, deletion) for stream in (first_stream, second_stream)] == [200, 200]

        await asyncio.to_thread(disable_stream, second_stream)
        for delete in (delete_by_pyiceberg, delete_by_seamark):
            assert await asyncio.to_thread(run_and_read_error, delete) == ""
        assert await first_stream.ids() == await second_stream.ids() == [4]


def make_deletion(metadata: TableMetadata) -> list[Any]:
    """Return the updates of a commit that has the operation delete, although it keeps all files."""
    parent = metadata.current_snapshot()
    assert parent is not None
    snapshot = {
        "snapshot-id": 1,
        "parent-snapshot-id": parent.snapshot_id,
        "sequence-number": metadata.last_sequence_number + 1,
        "timestamp-ms": metadata.last_updated_ms,
        "manifest-list": parent.manifest_list,
        "schema-id": metadata.current_schema_id,
        "summary": {"operation": "delete"},
    }
    return [
        {"action": "add-snapshot", "snapshot": snapshot},
        {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": 1},
    ]


def append_row(stream: StreamServer, number: int) -> None:
    """Append a row by a commit of PyIceberg."""
    ids = pa.array([number], pa.int64())
    table = stream.catalog.load_table("db.t")
    table.append(pa.table([ids], pa.schema([pa.field("id", pa.int64(), nullable=False)])))


def disable_stream(stream: StreamServer) -> None:
    with stream.catalog.load_table("db.t").transaction() as transaction:
        transaction.set_properties({ENABLED: "false"})


def run_and_read_error(change: Callable[[], None]) -> str:
    """Run a change, and return the text of its error, or no text if it succeeds."""
    try:
        change()
    except Exception as error:  # noqa: BLE001  the classes of PyIceberg and of Seamark differ
        return str(error)
    return ""
