"""What is to be read of a table: the snapshot, the schema, and the tasks that the server plans for a filter.

A task says everything that a reader needs beside the table's metadata, and can be pickled: the data file, the delete
files that apply to it, and which rows bitmap indexes leave. Schemas are those that engines
of Iceberg read by: a snapshot's or a tag's own, and for a branch, or as the table stands, the current one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from seamark.connector.client.client import At, Name, SeamarkClient
from seamark.connector.client.errors import BadRequest
from seamark.connector.client.storage import Storage
from seamark.connector.read.lineage import has_lineage
from seamark.metaserver.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    And,
    Bound,
    Expression,
    Op,
    Or,
    all_of,
    any_of,
    predicates_of,
)
from seamark.metaserver.iceberg.expressions.expression_json import expression_json
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.snapshot import MAIN, Snapshot
from seamark.metaserver.iceberg.metadata.table_json import decode_table
from seamark.metaserver.iceberg.types.schema import Schema
from seamark.metaserver.iceberg.types.values import FLOATS
from seamark.metaserver.index.files.definitions import read_definitions
from seamark.metaserver.index.kinds.kinds import KINDS

Json = Mapping[str, Any]


@dataclass(frozen=True)
class ScanTask:
    """Of one data file: `file` and `deletes` are the standard's `DataFile` and `DeleteFile`s.

    With `removed_by` only those rows are read that these delete files took, and the `deletes` did not.
    """

    file: Json
    deletes: tuple[Json, ...]
    removed_by: tuple[Json, ...] | None = None
    span: tuple[int, int] | None = None
    """Bytes of the file; of it those row groups are read that begin there. None: all."""
    rows: bytes | None = None
    """Positions that may match, a roaring bitmap of 32 bits; None: any."""
    exact: bool = False
    """Whether all of `rows` match."""

    @property
    def path(self) -> str:
        return str(self.file["file-path"])

    @property
    def spec_id(self) -> int:
        return int(self.file.get("spec-id", 0))

    @property
    def records(self) -> int:
        return int(self.file["record-count"])

    @property
    def size_bytes(self) -> int:
        return int(self.file["file-size-in-bytes"])


@dataclass(frozen=True)
class OpenTable:
    """A table as of one snapshot. `metadata` has no history, so that tasks may carry it."""

    name: Name
    metadata: TableMetadata
    schema: Schema
    snapshot_id: int | None
    storage: Storage
    history: tuple[Snapshot, ...]
    """Snapshots, in any order: those that a branch or tag names, or all."""

    @property
    def is_current_schema(self) -> bool:
        return self.schema.id == self.metadata.current_schema_id


def open_table(client: SeamarkClient, table: Name, at: At, *, history: bool = False) -> OpenTable:
    """With `history` all of its snapshots are told. BadRequest for a snapshot, branch or tag that there is not."""
    named = at.snapshot_id is not None or at.as_of_ms is not None
    loaded = client.load_table(table, history=history or named)
    metadata = decode_table(loaded.metadata, str(table))
    snapshot_id, schema = _at(metadata, at)
    short = msgspec.structs.replace(
        metadata, snapshots=(), snapshot_log=(), metadata_log=(), refs={}, current_snapshot_id=None, statistics=()
    )
    return OpenTable(table, short, schema, snapshot_id, Storage(loaded.storage), metadata.snapshots)


def _at(metadata: TableMetadata, at: At) -> tuple[int | None, Schema]:
    if len(at.given()) > 1:
        raise BadRequest(f"{' and '.join(at.given())} are both given; say which snapshot in one way")
    if at.ref is not None and at.ref != MAIN:
        ref = metadata.refs.get(at.ref)
        if ref is None:
            known = ", ".join(sorted({MAIN, *metadata.refs})[:20])
            raise BadRequest(f"Cannot find the branch or tag {at.ref[:100]!r}; the table has {known}")
        found = ref.snapshot_id
        return found, metadata.current_schema if ref.is_branch else _schema_of(metadata, found)
    if at.as_of_ms is not None:
        past = [one for one in metadata.snapshot_log if one.timestamp_ms <= at.as_of_ms]
        if not past:
            raise BadRequest(f"The table has no snapshot as old as as-of={at.as_of_ms}")
        return past[-1].snapshot_id, _schema_of(metadata, past[-1].snapshot_id)
    if at.snapshot_id is not None:
        return at.snapshot_id, _schema_of(metadata, at.snapshot_id)
    return metadata.current_snapshot_id, metadata.current_schema


def _schema_of(metadata: TableMetadata, snapshot_id: int) -> Schema:
    snapshot = metadata.snapshot(snapshot_id)
    if snapshot is None:
        raise BadRequest(f"Cannot find snapshot {snapshot_id}: it is not, or no longer, in the table's metadata")
    named = None if snapshot.schema_id is None else metadata.schema(snapshot.schema_id)
    return named or metadata.current_schema


def plan(
    client: SeamarkClient, table: OpenTable, where: Expression = TRUE, *, least_rows: int | None = None
) -> Iterator[ScanTask]:
    """The tasks of the table's snapshot for a bound filter; `least_rows` are enough. They come as pages do."""
    if table.snapshot_id is None or where == FALSE:
        return iter(())
    body: dict[str, Any] = {"snapshot-id": table.snapshot_id, "use-snapshot-schema": not table.is_current_schema}
    body |= {} if where == TRUE else {"filter": expression_json(in_sql(where))}
    body |= {} if least_rows is None else {"min-rows-requested": least_rows}
    return _tasks(client, table, body)


def plan_appends(
    client: SeamarkClient, table: OpenTable, start: int | None, end: int, where: Expression = TRUE
) -> Iterator[ScanTask]:
    """The files that append snapshots added after `start`, up to and with `end`."""
    body: dict[str, Any] = {"end-snapshot-id": end, "use-snapshot-schema": not table.is_current_schema}
    body |= {} if start is None else {"start-snapshot-id": start}
    body |= {} if where == TRUE else {"filter": expression_json(in_sql(where))}
    return _tasks(client, table, body)


def _tasks(client: SeamarkClient, table: OpenTable, body: Json) -> Iterator[ScanTask]:
    # Whoever reads a task makes its residual; of what many keys are asked for, each task would repeat them all.
    own = {
        "residuals": False,
        "sequence-numbers": has_lineage(table.metadata),
        "schema-id": table.metadata.current_schema_id,
    }
    for page in client.plan(table.name, {**body, "seamark": own}):
        deletes = page.get("delete-files") or []
        for task in page.get("file-scan-tasks") or []:
            applying = tuple(deletes[one] for one in task.get("delete-file-references") or ())
            yield ScanTask(task["data-file"], applying)


def with_rows(
    client: SeamarkClient, table: OpenTable, where: Expression, tasks: Iterator[ScanTask]
) -> Iterator[ScanTask]:
    """The tasks with the rows that bitmap indexes leave, where the table has any on a column of the filter: files
    without a matching row are left out."""
    if not _has_bitmaps(table, where):
        return tasks
    return _with_rows(client, table, where, tasks)


def _with_rows(
    client: SeamarkClient, table: OpenTable, where: Expression, tasks: Iterator[ScanTask]
) -> Iterator[ScanTask]:
    at, asked = At(snapshot_id=table.snapshot_id), expression_json(in_sql(where))
    schema_id = table.metadata.current_schema_id
    rows_of = client.bitmap(table.name, filter=asked, meaning="sql", schema_id=schema_id, at=at)
    found = {one.file_path: one for one in rows_of}
    for task in tasks:
        rows = found.get(task.path)
        if rows is not None:
            yield replace(task, rows=rows.roaring, exact=rows.exact and rows.roaring is not None)


def _has_bitmaps(table: OpenTable, where: Expression) -> bool:
    # Names of another schema than the current one may mean other columns to the server.
    if where == TRUE or not table.is_current_schema or table.snapshot_id is None:
        return False
    asked = {(one.column_id, one.transform) for one in predicates_of(where)}
    return any(
        KINDS[one.kind].answers_rows and (one.terms[0].column_id, one.terms[0].transform) in asked
        for one in read_definitions(table.metadata).enabled
    )


def in_sql(where: Expression) -> Expression:
    """What the server is asked for: here NaN is above every number. To plans, as to Iceberg's metrics, and to the
    meaning `sql` of bitmaps it is in no order, so that files of nothing else above a number would be left out."""
    match where:
        case And(children):
            return all_of(*map(in_sql, children))
        case Or(children):
            return any_of(*map(in_sql, children))
        case Bound(Op.GT | Op.GT_EQ, column_id, name, kind, transform, result) if result in FLOATS:
            return any_of(where, Bound(Op.IS_NAN, column_id, name, kind, transform, result, ()))
    return where
