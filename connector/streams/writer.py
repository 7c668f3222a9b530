"""Sends rows to a stream table. A thread collects rows into requests, and repeats a request until it is acknowledged.

    with stream_writer(client, "db.t") as writer:
        writer.write({"id": 1, "name": "a"})
        writer.write(arrow_table)
        writer.flush()                            all rows so far are durable and visible

Requests have a producer and a sequence number, so a repeat after a lost response adds no row twice. Rows keep their
order. A writer sends one request at a time. The next request contains the rows that were written during this time.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import sleep_before_attempt
from seamark.connector.client.errors import ClientError, Refused, ServerFailed, Unavailable, Unreachable
from seamark.connector.client.names import Name, make_table_path

ARROW, LINES = "application/vnd.apache.arrow.stream", "application/x-ndjson"
_ROW_BYTES = 64
"""The approximate memory of a row in addition to its JSON."""


class _Part(NamedTuple):
    """Rows of one call of `write`, in the form of a request."""

    content_type: str
    body: Any
    """JSON lines as bytes, or a record batch."""
    rows: int
    size_bytes: int


class StreamClosed(Exception):
    """Raised if the writer was closed, or if an earlier request failed. The cause of the exception is the failure."""


class StreamTableWriter:
    """Writes rows to a stream table. `stream_writer` creates it. Any number of threads may write."""

    def __init__(
        self,
        client: SeamarkClient,
        table: Name,
        *,
        producer: str,
        request_rows: int,
        request_bytes: int,
        buffer_bytes: int,
        timeout_s: float,
    ) -> None:
        """Start the thread that sends requests.

        Args:
            client: The client.
            table: The table.
            producer: The name of this writer, by which the server recognizes repeated requests.
            request_rows: The maximum number of rows of a request.
            request_bytes: The maximum number of bytes of a request. A larger row is sent in a separate request.
            buffer_bytes: The maximum memory of unsent rows. While it is full, `write` waits.
            timeout_s: The time for which a request is repeated while the server is busy or unavailable.
        """
        self._client = client
        self._table = table
        self._producer = producer
        self._request_rows, self._request_bytes = request_rows, request_bytes
        self._buffer_bytes = buffer_bytes
        self._timeout_s = timeout_s
        self._change_condition = threading.Condition()
        self._waiting: deque[_Part] = deque()
        self._held_bytes = self._unsent_rows = 0
        self._error: Exception | None = None
        self._closed = False
        self._sequence = 0
        self._token_uuid, self._token_ends = "", dict[str, int]()
        """The UUID of the table, and the offset after the last acknowledged row by shard."""
        self.rows = 0
        """The number of rows that the server has acknowledged."""
        self._thread = threading.Thread(target=self._run, name="seamark-stream-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> StreamTableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def write(self, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]] | pa.Table | pa.RecordBatch) -> None:
        """Add rows, which a thread sends in the background. Wait while `buffer_bytes` bytes are not yet sent.

        Args:
            rows: One or more dicts whose values JSON can represent, an Arrow table or a record batch.

        Raises:
            StreamClosed: The writer was closed, or an earlier request failed.
        """
        parts = _split_parts(rows, self._request_rows)
        with self._change_condition:
            for part in parts:
                self._change_condition.wait_for(lambda: self._held_bytes < self._buffer_bytes or self._is_done)
                self._check_open()
                self._waiting.append(part)
                self._held_bytes += part.size_bytes
                self._unsent_rows += part.rows
                self._change_condition.notify_all()

    def flush(self) -> None:
        """Wait until all rows are durable.

        Raises:
            StreamClosed: A request failed.
        """
        with self._change_condition:
            self._change_condition.wait_for(lambda: not self._unsent_rows or self._error is not None)
            if self._error is not None:
                raise StreamClosed(f"Rows were not acknowledged: {self._error}") from self._error

    def token(self) -> str:
        """Send all rows, wait until they are durable, and return a token for them.

        The token is passed to a read, for example `seamark.scan(…, after=token)`. The read then includes all rows that
        this writer has sent, even if a different server answers the read.
        The token is empty if the writer has sent no rows.

        Raises:
            StreamClosed: A request failed.
        """
        self.flush()
        with self._change_condition:
            ends = ",".join(f"{shard}:{end}" for shard, end in sorted(self._token_ends.items()))
            return f"{self._token_uuid}/{ends}" if ends else ""

    def close(self) -> None:
        """Wait until all rows are durable, and end the thread.

        Raises:
            StreamClosed: A request failed.
        """
        try:
            self.flush()
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._change_condition:
            self._closed = True
            self._change_condition.notify_all()
        self._thread.join()

    @property
    def _is_done(self) -> bool:
        return self._closed or self._error is not None

    def _check_open(self) -> None:
        if self._error is not None:
            raise StreamClosed(f"An earlier request failed: {self._error}") from self._error
        if self._closed:
            raise StreamClosed("The writer is closed")

    def _run(self) -> None:
        """Send the waiting rows until the writer is closed or a request fails."""
        while True:
            with self._change_condition:
                self._change_condition.wait_for(lambda: self._waiting or self._is_done)
                if self._is_done:
                    return
                parts = self._take_parts()
            try:
                self._send(parts[0].content_type, _join(parts))
            except Exception as error:  # noqa: BLE001  the callers of `write` and `flush` must receive it
                with self._change_condition:
                    self._error = error
                    self._change_condition.notify_all()
                return
            sent_rows = sum(part.rows for part in parts)
            with self._change_condition:
                self.rows += sent_rows
                self._unsent_rows -= sent_rows
                self._held_bytes -= sum(part.size_bytes for part in parts)
                self._change_condition.notify_all()

    def _take_parts(self) -> list[_Part]:
        """Return the parts of the next request: the first waiting part, and later parts within the limits of a request.

        All parts have the same form, JSON lines or Arrow batches, because they are joined to one body.
        """
        parts = [self._waiting.popleft()]
        rows, size_bytes = parts[0].rows, parts[0].size_bytes
        while self._waiting:
            part = self._waiting[0]
            rows, size_bytes = rows + part.rows, size_bytes + part.size_bytes
            has_room = rows <= self._request_rows and size_bytes <= self._request_bytes
            if not has_room or part.content_type != parts[0].content_type or not _is_joinable(parts[0], part):
                break
            parts.append(self._waiting.popleft())
        return parts

    def _send(self, content_type: str, body: bytes) -> None:
        """Send one request, and repeat it until it is acknowledged or refused, or until `timeout_s` has passed.

        The server recognizes a repeated request by the producer and its sequence number, and adds its rows once.
        """
        producer = self._producer, self._sequence
        answer = send_rows(self._client, self._table, body, content_type, producer, timeout_s=self._timeout_s)
        self._sequence += 1
        self._add_token(answer["token"])

    def _add_token(self, token: str) -> None:
        """Merge the token of acknowledged rows into the token of the writer.

        A token such as `UUID/0:15,1:7` has the UUID of the table, and the offset after the last row of each shard.
        """
        if not token:
            return
        table_uuid, _, ends = token.partition("/")
        with self._change_condition:
            if table_uuid != self._token_uuid:  # A new table has replaced the table with this name.
                self._token_uuid, self._token_ends = table_uuid, {}
            for pair in ends.split(","):
                shard, _, end = pair.partition(":")
                self._token_ends[shard] = max(int(end), self._token_ends.get(shard, 0))


def send_rows(
    client: SeamarkClient,
    table: Name,
    body: bytes,
    content_type: str,
    producer: tuple[str, int],
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Append rows to a stream table, and return the server's response (appendRows).

    The request is repeated until it is acknowledged or refused. The server stores each number of the producer once.

    Args:
        client: The client.
        table: The table.
        body: The rows.
        content_type: The media type of the rows.
        producer: The name of the producer, and the number of the request.
        timeout_s: The time in seconds for which the request is repeated while the server is busy or unavailable.

    Raises:
        Refused: The server refuses the rows.
        ClientError: The server did not acknowledge the rows in time. They may or may not be stored.
    """
    name, sequence = producer
    path, query = f"{make_table_path(table)}/rows", {"producer": name, "sequence": sequence}
    until_s, number = time.monotonic() + timeout_s, 0
    while True:
        try:
            answer = client._request("POST", path, query, body, headers={"Content-Type": content_type})
        except Refused:
            raise
        except (Unavailable, ServerFailed, Unreachable) as error:
            if time.monotonic() >= until_s or not _may_succeed_on_repeat(error):
                raise
            sleep_before_attempt(number, first_s=0.1, max_s=2.0)
            number += 1
        else:
            result: dict[str, Any] = json.loads(answer)
            return result


def stream_writer(
    client: SeamarkClient,
    table: Name,
    *,
    producer: str | None = None,
    request_rows: int = 10_000,
    request_bytes: int = 8 << 20,
    buffer_bytes: int = 64 << 20,
    timeout_s: float = 120.0,
) -> StreamTableWriter:
    """Return a writer of a stream table. Use it in a `with` block.

    Args:
        client: The client.
        table: The table.
        producer: A name that no other writer has ever used for this table. The default is a random name.
        request_rows: The maximum number of rows of a request.
        request_bytes: The maximum number of bytes of a request. A larger row is sent in a separate request.
        buffer_bytes: The maximum memory of unsent rows. While it is full, `write` waits.
        timeout_s: The time in seconds for which a request is repeated while the server is busy or unavailable.
    """
    return StreamTableWriter(
        client,
        table,
        producer=producer or str(uuid.uuid4()),
        request_rows=request_rows,
        request_bytes=request_bytes,
        buffer_bytes=buffer_bytes,
        timeout_s=timeout_s,
    )


def _split_parts(rows: Any, request_rows: int) -> list[_Part]:
    """Return the rows in parts of at most `request_rows` rows."""
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if isinstance(rows, pa.Table):
        batches = rows.combine_chunks().to_batches(max_chunksize=request_rows)
        return [_Part(ARROW, batch, batch.num_rows, batch.nbytes) for batch in batches if batch.num_rows]
    objects = [rows] if isinstance(rows, Mapping) else list(rows)
    parts = []
    for start in range(0, len(objects), request_rows):
        part_objects = objects[start : start + request_rows]
        lines = b"\n".join(json.dumps(row).encode() for row in part_objects)
        parts.append(_Part(LINES, lines, len(part_objects), len(lines) + _ROW_BYTES * len(part_objects)))
    return parts


def _is_joinable(first: _Part, other: _Part) -> bool:
    return first.content_type == LINES or bool(first.body.schema.equals(other.body.schema))


def _join(parts: Sequence[_Part]) -> bytes:
    if parts[0].content_type == LINES:
        return b"\n".join(part.body for part in parts)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, parts[0].body.schema) as stream:
        for part in parts:
            stream.write_batch(part.body)
    return bytes(sink.getvalue())


def _may_succeed_on_repeat(error: ClientError) -> bool:
    """Return whether a retry may succeed.

    It cannot succeed after a bug of the server. The statuses 502 to 504 come from a proxy or a busy server. A kind with
    "Unknown" means that the outcome of the request is unknown.
    """
    return not isinstance(error, ServerFailed) or error.status in (502, 503, 504) or "Unknown" in error.kind
