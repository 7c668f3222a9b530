"""Commits changes of rows: files to add and remove, and a filter of the rows that were read.

After a conflict with another commit, the change is prepared again from the current snapshot, up to a maximum number of
attempts. The files of a refused attempt are deleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import CommitClient, Producer, encode_producer, sleep_before_attempt
from seamark.connector.client.errors import Conflict, InvalidRequest, Refused, Unavailable
from seamark.connector.client.names import Name, make_table_path
from seamark.connector.client.values import At
from seamark.connector.parquet.encryption.keys import ParquetKeys
from seamark.connector.read.tables import OpenTable, open_table
from seamark.connector.write.appends import commit
from seamark.connector.write.delete_files import WrittenDeletes
from seamark.connector.write.table_writer import WrittenFiles
from seamark.connector.write.target import WriteTarget, create_target
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.expressions.residuals import add_nan
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_bool
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.protocol.wire import STREAM_ENABLED

COMMIT_ATTEMPTS_MAX = 50
_WAIT_S, _WAIT_MAX_S = 0.02, 2.0
_STREAM_ENABLED = "seamark.stream.enabled"


@dataclass(frozen=True)
class Report:
    """The result of a change. The counts of files describe the committed attempt."""

    inserted: int = 0
    """The number of keys without a stored row."""
    updated: int = 0
    """The number of keys whose stored rows were replaced by one row."""
    deleted: int = 0
    """The number of rows that were deleted without a replacement."""
    stale: int = 0
    """The number of keys whose stored row stays, because it is later than the new row."""
    files_read: int = 0
    """The number of data files that were read, at least in part."""
    files_written: int = 0
    """The number of written data and delete files."""
    files_removed: int = 0
    """The number of removed data files and of replaced delete files."""
    attempts: int = 1
    snapshot_id: int | None = None
    """The committed snapshot, or None if there was nothing to change and no producer."""
    duplicate: bool = False
    """Whether the producer had already committed this change. If so, the counts describe the repeated attempt."""


@dataclass(frozen=True)
class RowChange:
    """The content of a commit: the files to add and remove, and a filter of the rows that were read.

    Attributes:
        removed: The data files that were rewritten. Their remaining rows are in `data`.
    """

    scope: Expression | None
    """A filter of the rows that were read.

    It is None if no rows were read. The commit then conflicts only with a new partition spec.
    """
    report: Report
    data: WrittenFiles
    deletes: WrittenDeletes = field(default_factory=WrittenDeletes)
    removed: tuple[dict[str, Any], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to change.

        An empty change is committed only to record the sequence number of a producer, so that a repeat is recognized.
        """
        return not (self.data.files or self.deletes.files or self.removed or self.deletes.removed)

    def limit_indexes(self, target: WriteTarget) -> RowChange:
        """Return the change with at most as many index files as a commit may have."""
        return replace(self, data=self.data.limit_indexes(target.storage))

    def build_body(self, source_table: OpenTable) -> dict[str, Any]:
        scope = {} if self.scope is None else {"scope": {"filter": encode_expression(add_nan(self.scope))}}
        return {
            "read-snapshot-id": source_table.snapshot_id,
            "schema-id": source_table.metadata.current_schema_id,
            **scope,
            "add": [*self.data.files, *self.deletes.files],
            "remove": [*self.removed, *self.deletes.removed],
            "index-files": list(self.data.index_files),
        }

    def build_report(self) -> Report:
        """Return the report with the counts of files."""
        paths = {file["file-path"] for file in (*self.data.files, *self.deletes.files)}
        removed_count = len(self.removed) + len(self.deletes.removed)
        return replace(self.report, files_written=len(paths), files_removed=removed_count)

    def discard(self, target: WriteTarget) -> None:
        self.data.discard(target.storage)
        self.deletes.discard(target.storage)


NOTHING = RowChange(None, Report(), WrittenFiles())


def commit_row_change(
    client: SeamarkClient,
    table: Name,
    prepare: Callable[[OpenTable, WriteTarget], RowChange],
    *,
    branch: str,
    producer: Producer | None,
    summary: Mapping[str, str] | None,
    attempts: int,
    history: bool = False,
    file_keys: ParquetKeys | None = None,
) -> Report:
    """Prepare a change from the head of the branch, and commit it. After a conflict, repeat both steps.

    Args:
        prepare: A function that prepares the change for an open table.
        attempts: The maximum number of attempts.
        history: Whether to open the table with all its snapshots.
        file_keys: The keys of encrypted files.

    Raises:
        Unwritable: The table has format version 1. No file has been written.
    """
    fields: dict[str, Any] = {"branch": branch, "summary": dict(summary or {})}
    if (producer_fields := encode_producer(producer)) is not None:
        fields["producer"] = producer_fields
    # The server counts the conflicts of the change by this id.
    fields["change-id"] = str(uuid.uuid4())
    source_table = replace(_open_flushed(client, table, branch, history=history), keys=file_keys)
    check_supports_deletes(source_table.metadata)
    fields["table-uuid"] = source_table.metadata.table_uuid
    attempt = 0
    is_flushed = False
    while True:
        attempt += 1
        target = create_target(source_table.metadata, source_table.storage, source_table.name)
        try:
            change = prepare(source_table, target).limit_indexes(target)
        except Conflict:
            # Rows have changed since they were read. If the response to an earlier attempt was lost, that attempt may
            # have changed them.
            if (first_answer := _find_earlier_answer(client, table, fields)) is None:
                raise
            return Report(attempts=attempt, snapshot_id=first_answer["snapshot-id"], duplicate=True)
        if (
            change.is_empty
            and not is_flushed
            and source_table.metadata.properties.get(_STREAM_ENABLED, "").lower() == "true"
        ):
            # The change has to find the rows of a stream that readers have already seen, even if no snapshot has them.
            is_flushed = True
            with suppress(Unavailable):  # Another server has the log, so no reader has seen these rows on this server.
                CommitClient(client).flush(table)
            previous = source_table
            source_table = replace(open_table(client, table, At(ref=branch), history=history), keys=file_keys)
            if source_table.snapshot_id != previous.snapshot_id:
                continue
        # The number of a producer is recorded even if the change is empty, because a retry may find rows to change.
        if change.is_empty and producer_fields is None:
            return replace(change.report, attempts=attempt)
        try:
            answer = commit(
                client, table, {**fields, **change.build_body(source_table)}, partial(change.discard, target)
            )
        except (Conflict, InvalidRequest) as error:
            if attempt >= attempts:
                raise
            if isinstance(error, Conflict):
                sleep_before_attempt(attempt, first_s=_WAIT_S, max_s=_WAIT_MAX_S)
            previous = source_table
            source_table = replace(open_table(client, table, At(ref=branch), history=history), keys=file_keys)
            if not _should_retry(error, previous.metadata, source_table.metadata):
                raise
        else:
            return replace(
                change.build_report(),
                attempts=attempt,
                snapshot_id=answer["snapshot-id"],
                duplicate=answer["duplicate"],
            )


def _open_flushed(client: SeamarkClient, table: Name, branch: str, *, history: bool) -> OpenTable:
    """Flush the rows of a stream table that wait for a flush, and open the newest snapshot of the branch.

    Without the flush, the change would miss acknowledged rows. Only changes of the main branch need it.
    """
    source_table = open_table(client, table, At(ref=branch), history=history)
    if branch == MAIN and parse_bool(source_table.metadata.properties, STREAM_ENABLED, False):
        flushed_rows = client._request_json("POST", f"{make_table_path(table)}/flush")["rows"]
        if flushed_rows:
            return open_table(client, table, At(ref=branch), history=history)
    return source_table


def _find_earlier_answer(client: SeamarkClient, table: Name, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the response to the earlier commit of this change by the same producer, or None.

    It is None if the change has no producer, if there is no earlier commit, or if the server does not support this.
    """
    repeat_fields = {name: fields[name] for name in ("producer", "branch", "table-uuid") if name in fields}
    if "producer" not in repeat_fields:
        return None
    try:
        return CommitClient(client).commit(table, {**repeat_fields, "repeats-only": True})
    except (Conflict, InvalidRequest):
        # Older servers, which do not support repeats-only, also refuse the request.
        return None


def check_supports_deletes(metadata: TableMetadata) -> None:
    """Check that the table's format version supports delete files.

    Raises:
        Unwritable: The table has format version 1.
    """
    if metadata.format_version == 1:
        raise Unwritable(
            "A table of version 1 supports only appends, because it has no delete files; upgrade it "
            "to version 2 or later"
        )


def _should_retry(error: Refused, previous: TableMetadata, current: TableMetadata) -> bool:
    """Return whether a refused change should be prepared again.

    A change is not prepared again if the name now refers to another table. An invalid change (InvalidRequest) is
    prepared again only if the table was upgraded meanwhile, because the format versions have different delete files.
    """
    if current.table_uuid != previous.table_uuid:
        return False
    return isinstance(error, Conflict) or current.format_version != previous.format_version
