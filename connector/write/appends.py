"""Writes Arrow batches as data files and index files of a table, and adds the files in one commit.

`TableWriter` runs in a Spark task or in this process. It buffers the rows of each partition until they fill a row
group. All partitions share one memory limit. If the table has a sort order, the writer sorts the rows. `close` returns
the files. The files become visible when a commit adds them. A writer that dies leaves unreferenced files.

    append(client, "db.t", rows)                     adds rows
    overwrite(client, "db.t", rows, where="d = …")   replaces the rows that match the filter
    overwrite_partitions(client, "db.t", rows)       replaces the partitions to which the rows belong
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.arrow.predicates import bind_exactly
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import CommitClient, Producer, encode_producer
from seamark.connector.client.errors import Refused
from seamark.connector.client.names import Name
from seamark.connector.client.storage import Storage
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from seamark.connector.write.target import WriteTarget, create_target
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.metadata.table_json import decode_table

WRITE_ID = "write-id"
"""A property in the summary of a snapshot: the UUID of the write attempt that committed the snapshot."""
_FILE_ALREADY_LIVE = "AlreadyExistsException"
"""The error type of a commit that adds a file which a snapshot already contains."""

Rows: TypeAlias = "pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch | pa.Table] | Any"
"""Rows to write: Arrow data, or an object with Arrow's stream interface, such as a Polars frame."""


# Writes with a commit


@dataclass(frozen=True)
class Destination:
    """The table of a write, as it was when the write began, and the fields of its commit.

    Attributes:
        target: The state of the table that writers need. It can be pickled for the tasks that write files.
        change: The fields of the commit, except the files.
    """

    table: Name
    target: WriteTarget
    branch: str
    change: Mapping[str, Any]

    def commit(
        self,
        client: SeamarkClient,
        written_files: WrittenFiles,
        *,
        producer: Producer | None = None,
        summary: Mapping[str, str] | None = None,
    ) -> dict[str, Any] | None:
        """Commit the written files, and return the server's response.

        Return None if there is nothing to commit and no producer number to record. The docstring of the function
        `commit` describes the state after an error.
        """
        producer_value = encode_producer(producer)
        is_empty = not written_files.files and "filter" not in self.change.get("replace", {})
        if is_empty and producer_value is None:
            return None
        written_files = written_files.limit_indexes(self.target.storage)
        # An empty append records the producer's number, and replaces no rows.
        change = {"operation": "append"} if is_empty else self.change
        body: dict[str, Any] = {**change, "branch": self.branch, "summary": dict(summary or {})}
        body |= {"table-uuid": self.target.table_uuid or None, "add": list(written_files.files)}
        body |= {"index-files": list(written_files.index_files)}
        if producer_value is not None:
            body["producer"] = producer_value
        return commit(client, self.table, body, partial(written_files.discard, self.target.storage))


APPEND, OVERWRITE, OVERWRITE_PARTITIONS = "append", "overwrite", "overwrite_partitions"
WRITE_MODES = (APPEND, OVERWRITE, OVERWRITE_PARTITIONS)


def open_destination(
    client: SeamarkClient,
    table: Name,
    mode: str = APPEND,
    *,
    where: str | Mapping[str, Any] | bool = True,
    branch: str = MAIN,
) -> Destination:
    """Return the destination of a write.

    Args:
        mode: `append`, `overwrite` (replaces the rows that match `where`) or `overwrite_partitions`.
        where: The predicate of `overwrite`, as SQL or as the JSON of an Iceberg expression. Other modes ignore it.
        branch: The branch to which the write is committed.

    Raises:
        ValueError: The mode is unknown.
        Unwritable: The table's format version does not support the mode.
        InvalidRequest: The predicate `where` cannot be expressed exactly as an Iceberg expression.
    """
    if mode not in WRITE_MODES:
        raise ValueError(f"there is no mode {mode!r}; the modes are {', '.join(WRITE_MODES)}")
    engine_table = client.load_table(table)
    metadata = decode_table(engine_table.metadata, engine_table.location)
    change: dict[str, Any] = {"operation": "append"}
    if mode != APPEND and metadata.format_version == 1:
        raise Unwritable("A table of version 1 supports only appends; upgrade it to version 2 or later")
    if mode != APPEND:
        head = metadata.refs.get(branch)
        if isinstance(where, str):
            where = encode_expression(bind_exactly(where, metadata.current_schema))
        change = {"replace": {"filter": where} if mode == OVERWRITE else {"partitions": "written"}}
        change["schema-id"] = metadata.current_schema_id
        # The server compares later snapshots with this snapshot to detect conflicting commits.
        change["read-snapshot-id"] = None if head is None else head.snapshot_id
    storage = Storage.of_table(engine_table.storage, metadata.location)
    return Destination(table, create_target(metadata, storage, table), branch, change)


def append(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Add rows with one commit, and return the server's response (docs/reference/openapi.json).

    The result is None if there are no rows and no producer.

    `producer` is the id of a writer and a sequence number. If a change with this id and number has already been
    committed, the rows are not committed again. If there are no rows, an empty snapshot records the number.

    After an error, no row is visible, unless the outcome of the commit is unknown (Unreachable, ServerFailed). In that
    case, the files are not deleted, because they may be visible.

    Raises:
        Unwritable: The rows do not fit the table.
    """
    return _write_and_commit(client, rows, open_destination(client, table, branch=branch), producer, summary)


def overwrite(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    where: str | Mapping[str, Any] | bool = True,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Replace the rows that match a predicate. By default, all rows are replaced.

    The other arguments and the result are the same as in `append`.

    Args:
        where: The predicate, as SQL or as the JSON of an Iceberg expression.

    Raises:
        InvalidRequest: The predicate matches only some rows of a file, or cannot be expressed exactly.
        Unwritable: The table has format version 1, or the rows do not fit the table.
    """
    return _write_and_commit(
        client, rows, open_destination(client, table, OVERWRITE, where=where, branch=branch), producer, summary
    )


def overwrite_partitions(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Replace all rows of the partitions to which the new rows belong.

    The arguments and the result are the same as in `append`.

    Raises:
        Unwritable: The table has format version 1, or the rows do not fit the table.
    """
    return _write_and_commit(
        client, rows, open_destination(client, table, OVERWRITE_PARTITIONS, branch=branch), producer, summary
    )


def _write_and_commit(
    client: SeamarkClient,
    rows: Rows,
    destination: Destination,
    producer: Producer | None,
    summary: Mapping[str, str] | None,
) -> dict[str, Any] | None:
    """Write the rows to files, and commit the files."""
    encode_producer(producer)  # Refuses an invalid producer before any file is written.
    written_files = write_batches(destination.target, to_batches(rows))
    return destination.commit(client, written_files, producer=producer, summary=summary)


def commit(client: SeamarkClient, table: Name, body: dict[str, Any], discard: Callable[[], None]) -> dict[str, Any]:
    """Commit a change, and return the server's response.

    If the commit fails, and it is certain that no snapshot will ever contain the written files, the function calls
    `discard`, which deletes them. This is certain in two cases:

    - The server refused the change, no earlier request for it has an unknown outcome, and the reason is not that a
      snapshot already contains one of the files.
    - Another write has committed the same sequence number of the producer (the writer's name), so the server has added
      nothing. The UUID in the snapshot's summary distinguishes this case from a repeat of this change after a lost
      response.

    Args:
        client: The client.
        table: The table.
        body: The change.
        discard: A function that deletes the written files.
    """
    write_id = str(uuid.uuid4())
    body = {**body, "summary": {**body.get("summary", {}), WRITE_ID: write_id}}
    try:
        answer = CommitClient(client).commit(table, body)
    except Refused as error:
        # An earlier request may have succeeded, but its response was lost.
        if not error.has_unknown_earlier_outcome and error.kind != _FILE_ALREADY_LIVE:
            discard()
        raise
    if answer["duplicate"] and (answer["summary"] or {}).get(WRITE_ID, write_id) != write_id:
        discard()
    return answer


def to_batches(rows: Rows) -> Iterator[pa.RecordBatch]:
    """Yield the rows as record batches.

    Raises:
        Unwritable: The type of the object is not supported.
    """
    if isinstance(rows, pa.RecordBatch):
        yield rows
    elif isinstance(rows, pa.Table):
        yield from rows.to_batches()
    elif isinstance(rows, pa.RecordBatchReader):
        yield from rows
    elif hasattr(rows, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(rows)
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping):
        for item in rows:
            yield from to_batches(item)
    else:
        raise Unwritable(f"rows must be Arrow tables or batches, or a stream of them, not {type(rows).__name__}")
