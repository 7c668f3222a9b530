"""Sends requests about stream tables: their state, flushes, and pauses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import CommitClient
from seamark.connector.client.names import Name, make_table_path

_TABLES_PER_PAGE = "1000"


def list_streams(client: SeamarkClient) -> Iterator[dict[str, Any]]:
    """Yield the stream tables that the caller may read, with the state of their streams.

    docs/reference/openapi.json defines the form of the items (listStreams).

    Raises:
        Unavailable: Another server has the log.
    """
    query = {"pageSize": _TABLES_PER_PAGE}
    while True:
        page = client._request_json("GET", "/api/v1/streams", query)
        yield from page["streams"]
        if page["next-page-token"] is None:
            return
        query = {**query, "pageToken": page["next-page-token"]}


def load_stream(client: SeamarkClient, table: Name) -> dict[str, Any]:
    """Return the state of a table's stream: its shards, and the rows that wait for a flush.

    docs/reference/openapi.json defines the form of the result (loadStream).

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: No row has ever been appended to the table.
    """
    return client._request_json("GET", f"{make_table_path(table)}/stream")


def load_stream_topic(client: SeamarkClient, table: Name) -> str:
    """Return the name of the topic to which Kafka producers can write rows of a stream table directly.

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The table is not a stream table, or the log of the server is not in Kafka.
    """
    return str(client._request_json("GET", f"{make_table_path(table)}/stream/topic")["topic"])


def flush_stream(client: SeamarkClient, table: Name) -> int:
    """Flush the waiting rows of a stream table to its files, and return their number.

    Raises:
        NoSuchResource: The table does not exist.
        Refused: The flush conflicts with a concurrent commit. The status is 409.
    """
    return CommitClient(client).flush(table)


def pause_stream(client: SeamarkClient, table: Name, reason: str = "") -> str:
    """Pause a stream table, so that its writers are refused, and return the reason that the writers receive.

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The table is not a stream table.
    """
    body = {"reason": reason} if reason else {}
    return str(client._request_json("POST", f"{make_table_path(table)}/stream/pause", {}, body)["paused"])


def resume_stream(client: SeamarkClient, table: Name) -> None:
    """Resume a paused stream table, so that it accepts rows again.

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The table is not a stream table.
    """
    client._request_json("POST", f"{make_table_path(table)}/stream/resume")


def drain_stream(client: SeamarkClient, table: Name, reason: str = "") -> int:
    """Pause a stream table, flush its waiting rows to its files, and return their number.

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The table is not a stream table.
        Unavailable: Another server has the log.
    """
    body = {"reason": reason} if reason else {}
    rows: int = client._request_json("POST", f"{make_table_path(table)}/stream/drain", {}, body)["rows"]
    return rows
