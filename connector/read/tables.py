"""Opens tables at a snapshot, and plans scan tasks for a filter.

A reader needs only the table's metadata and a task, which has a data file, the delete files that apply to it, and the
rows that bitmap indexes select. Tasks can be pickled. The schema is selected as in Iceberg's engines. For a snapshot or
tag, it is the schema of the snapshot. For a branch or the current state, it is the current schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import msgspec

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import At, EngineTable
from seamark.connector.parquet.encryption.keys import ParquetKeys
from seamark.connector.read.lineage import has_lineage
from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    Expression,
    collect_predicates,
)
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.expressions.residuals import add_nan
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import MAIN, Snapshot
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.functions import is_function
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.definitions import read_definitions
from seamark.formats.index.kinds.kinds import KINDS

Json = Mapping[str, Any]
_SHOWN_REFS_MAX = 20
"""The maximum number of branches and tags in an error message."""


@dataclass(frozen=True)
class ScanTask:
    """A data file to read, or a part of it.

    Attributes:
        file, deletes: A `DataFile` and `DeleteFile`s of the REST specification.
        removed_by: If it is set, the reader returns only rows that these delete files delete and `deletes` do not.
    """

    file: Json
    deletes: tuple[Json, ...]
    removed_by: tuple[Json, ...] | None = None
    span: tuple[int | None, int | None] | None = None
    """A byte range [start, end), or None.

    Only row groups that start in the range are read. If it is None, all row groups are read. A range without a start or
    an end has no limit there.
    """
    rows: bytes | None = None
    """The positions of the rows that may match, as a 32-bit roaring bitmap, or None if all rows may match."""
    exact: bool = False
    """Whether all of `rows` match the filter."""

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
    """A table at one snapshot.

    Attributes:
        metadata: The table metadata without snapshots and logs, so that it is small if it is sent with tasks.
    """

    name: Name
    metadata: TableMetadata
    schema: Schema
    snapshot_id: int | None
    storage: Storage
    history: tuple[Snapshot, ...]
    """The snapshots of branches and tags, in any order. If the table was opened with `history`, all snapshots."""
    keys: ParquetKeys | None = None
    """The keys of encrypted files. They are not pickled. If None, encrypted files are refused."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "keys": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def is_current_schema(self) -> bool:
        return self.schema.id == self.metadata.current_schema_id


def divide_task(task: ScanTask, size_bytes: int) -> Iterator[ScanTask]:
    """Divide a task at row groups, and yield tasks of about `size_bytes` bytes.

    Each row group belongs to exactly one task, even if the size or the offsets of the file are wrong in the manifest.
    Therefore the first span has no start, and the last span has no end.
    """
    offsets: Any = task.file.get("split-offsets") or ()
    cuts: list[int] = []
    previous = 0
    for offset in sorted(offsets):
        if offset > previous and offset - previous >= size_bytes:
            cuts.append(offset)
            previous = offset
    if not cuts:
        yield task
        return
    for start, end in pairwise([None, *cuts, None]):
        yield replace(task, span=(start, end))


class PlanSource(Protocol):
    """A client that plans scans. `SeamarkClient` implements it."""

    def plan(self, table: Name, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]: ...


def open_table(client: SeamarkClient, table: Name, at: At, *, history: bool = False) -> OpenTable:
    """Open a table at a snapshot.

    Args:
        history: Whether `OpenTable.history` contains all snapshots, and not only those of branches and tags.

    Raises:
        InvalidRequest: The snapshot, branch or tag does not exist.
        NoSuchResource: The table does not exist.
    """
    return open_loaded_table(load_table(client, table, at, history=history), table, at)


def load_table(
    client: SeamarkClient, table: Name, at: At, *, history: bool = False, loaded_before: EngineTable | None = None
) -> EngineTable:
    """Load a table with the snapshot that `at` selects. See `SeamarkClient.load_table`."""
    if at.ref is not None or at.as_of_ms is not None:
        # Rows that wait for a flush belong to the current state of the table, not to a branch or an earlier state.
        client = client.reading_committed_rows()
    needs_history = at.snapshot_id is not None or at.as_of_ms is not None
    return client.load_table(table, history=history or needs_history, loaded_before=loaded_before)


def open_loaded_table(engine_table: EngineTable, table: Name, at: At) -> OpenTable:
    """Open a loaded table at a snapshot.

    Raises:
        InvalidRequest: The snapshot, branch or tag does not exist.
    """
    metadata = decode_table(engine_table.metadata, str(table))
    snapshot_id, schema = _resolve_snapshot(metadata, at)
    # The metadata is sent with tasks, so it must be small. The snapshot is already resolved, so that references to
    # snapshots are not needed.
    without_history = msgspec.structs.replace(
        metadata, snapshots=(), snapshot_log=(), metadata_log=(), refs={}, current_snapshot_id=None, statistics=()
    )
    storage = Storage.of_table(engine_table.storage, metadata.location)
    return OpenTable(table, without_history, schema, snapshot_id, storage, metadata.snapshots)


def _resolve_snapshot(metadata: TableMetadata, at: At) -> tuple[int | None, Schema]:
    """Return the snapshot that `at` selects, and the schema with which it is read.

    A branch is read with the current schema. A tag, a time or a snapshot id is read with the schema of its snapshot.

    Raises:
        InvalidRequest: The snapshot, branch or tag does not exist, or `at` selects the snapshot in several ways.
    """
    if len(at.to_query()) > 1:
        raise InvalidRequest(f"{' and '.join(at.to_query())} cannot be combined; select the snapshot with one of them")
    if at.ref is not None and at.ref != MAIN:
        ref = metadata.refs.get(at.ref)
        if ref is None:
            refs_text = ", ".join(sorted({MAIN, *metadata.refs})[:_SHOWN_REFS_MAX])
            raise InvalidRequest(f"Cannot find the branch or tag {at.ref[:100]!r}; the table has {refs_text}")
        snapshot_id = ref.snapshot_id
        return snapshot_id, metadata.current_schema if ref.is_branch else _find_schema(metadata, snapshot_id)
    if at.as_of_ms is not None:
        earlier = [entry for entry in metadata.snapshot_log if entry.timestamp_ms <= at.as_of_ms]
        if not earlier:
            raise InvalidRequest(f"The table has no snapshot at or before as-of={at.as_of_ms}")
        return earlier[-1].snapshot_id, _find_schema(metadata, earlier[-1].snapshot_id)
    if at.snapshot_id is not None:
        return at.snapshot_id, _find_schema(metadata, at.snapshot_id)
    return metadata.current_snapshot_id, metadata.current_schema


def _find_schema(metadata: TableMetadata, snapshot_id: int) -> Schema:
    snapshot = metadata.snapshot(snapshot_id)
    if snapshot is None:
        raise InvalidRequest(f"Cannot find snapshot {snapshot_id}: it is not in the table's metadata, or has expired")
    schema = None if snapshot.schema_id is None else metadata.schema(snapshot.schema_id)
    return schema or metadata.current_schema


def plan(
    client: PlanSource,
    table: OpenTable,
    where: Expression = TRUE,
    *,
    least_rows: int | None = None,
    stats: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    sequence_numbers: bool = False,
    use: Mapping[str, Any] | None = None,
    note_statement: Callable[[str], None] = lambda _: None,
) -> Iterator[ScanTask]:
    """Yield the tasks of the table's snapshot for a bound filter, as the pages of the plan arrive.

    Args:
        least_rows: The number of rows that the caller needs, as a hint for the server.
        stats: The columns whose statistics are returned with the files.
        columns: The columns that a query reads, or None if the plan is not for a query. The server does not count the
            plan as a read if it is None.
        sequence_numbers: Whether sequence numbers are returned with the files. For tables with row lineage, they are
            always returned.
        use: How the statement uses the table, for the query history: `engine`, and fields of `TableUse.build_body`.
        note_statement: A function that is called with the fingerprint of the statement, if the query history counts it.
    """
    if table.snapshot_id is None or where == FALSE:
        return iter(())
    body: dict[str, Any] = {"snapshot-id": table.snapshot_id, "use-snapshot-schema": not table.is_current_schema}
    body |= {} if where == TRUE else {"filter": encode_expression(add_nan(where))}
    body |= {} if least_rows is None else {"min-rows-requested": least_rows}
    body |= {"stats-fields": list(stats)} if stats else {}
    body |= {} if columns is None else {"select": list(columns)}
    has_functions = any(is_function(predicate.transform) for predicate in collect_predicates(where))
    return _plan_tasks(
        client,
        table,
        body,
        sequence_numbers=sequence_numbers,
        has_functions=has_functions,
        use=use,
        note_statement=note_statement,
    )


def plan_appends(
    client: SeamarkClient, table: OpenTable, start: int | None, end: int, where: Expression = TRUE
) -> Iterator[ScanTask]:
    """Yield tasks for the files that append snapshots have added after `start`, up to and including `end`.

    If `start` is None, the files of all append snapshots up to `end` that have not expired are included.

    With `add_nan`, `>` and `>=` on floats also match NaN, so that the server keeps files that only have NaN there.
    """
    body: dict[str, Any] = {"end-snapshot-id": end, "use-snapshot-schema": not table.is_current_schema}
    body |= {} if start is None else {"start-snapshot-id": start}
    body |= {} if where == TRUE else {"filter": encode_expression(add_nan(where))}
    return _plan_tasks(client, table, body)


def _plan_tasks(
    client: PlanSource,
    table: OpenTable,
    body: Json,
    *,
    sequence_numbers: bool = False,
    has_functions: bool = False,
    use: Mapping[str, Any] | None = None,
    note_statement: Callable[[str], None] = lambda _: None,
) -> Iterator[ScanTask]:
    """Send a plan request, and yield the tasks as the pages of the plan arrive.

    Args:
        client: The client.
        table: The table.
        body: The request in the form of the Iceberg REST specification.
        sequence_numbers: Whether sequence numbers are returned with the files.
        has_functions: Whether the filter has functions of columns.
        use: How the statement uses the table, for the query history.
        note_statement: A function that is called with the fingerprint of the statement, if the query history counts it.
    """
    # Readers compute residuals themselves. Otherwise each task would repeat all keys of the filter.
    options: dict[str, Any] = {
        "residuals": False,
        "sequence-numbers": sequence_numbers or has_lineage(table.metadata),
        "schema-id": table.metadata.current_schema_id,
        "usage": "select" in body,  # Only a query selects columns, and only queries count as reads of the table.
    }
    options |= {"functions": True} if has_functions else {}
    options |= {"use": dict(use)} if use else {}
    for page in client.plan(table.name, {**body, "seamark": options}):
        if statement := page.get("seamark-statement"):
            note_statement(statement)
        deletes = page.get("delete-files") or []
        for task in page.get("file-scan-tasks") or []:
            applicable = tuple(deletes[reference] for reference in task.get("delete-file-references") or ())
            yield ScanTask(task["data-file"], applicable)


def restrict_to_rows(
    client: SeamarkClient, table: OpenTable, where: Expression, tasks: Iterator[ScanTask]
) -> Iterator[ScanTask]:
    """Restrict the tasks to the rows that bitmap indexes leave, if a column of the filter has a bitmap index.

    Files without such rows are left out.
    """
    if not _has_bitmaps(table, where):
        return tasks
    return _yield_tasks_with_rows(client, table, where, tasks)


def _yield_tasks_with_rows(
    client: SeamarkClient, table: OpenTable, where: Expression, tasks: Iterator[ScanTask]
) -> Iterator[ScanTask]:
    snapshot_choice, filter_json = At(snapshot_id=table.snapshot_id), encode_expression(add_nan(where))
    schema_id = table.metadata.current_schema_id
    bitmap_rows = client.bitmap(table.name, filter=filter_json, meaning="sql", schema_id=schema_id, at=snapshot_choice)
    rows_by_path = {file_rows.file_path: file_rows for file_rows in bitmap_rows}
    for task in tasks:
        rows = rows_by_path.get(task.path)
        if rows is not None:
            yield replace(task, rows=rows.roaring, exact=rows.exact and rows.roaring is not None)


def _has_bitmaps(table: OpenTable, where: Expression) -> bool:
    # The server resolves column names in the current schema. In another schema, the names may belong to other columns.
    if where == TRUE or not table.is_current_schema or table.snapshot_id is None:
        return False
    filter_terms = {(predicate.column_id, predicate.transform) for predicate in collect_predicates(where)}
    return any(
        KINDS[definition.kind].answers_rows
        and (definition.terms[0].column_id, definition.terms[0].transform) in filter_terms
        for definition in read_definitions(table.metadata).enabled
    )
