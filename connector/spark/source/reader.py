"""Implements the reader of `format("seamark")`: the server plans with all indexes, and Spark's tasks read with pyarrow.

    spark.read.format("seamark").option("uri", "http://127.0.0.1:8181").option("table", "db.events").load()

Invariant: the rows are the same as with Iceberg's reader. The driver plans a scan once. Tasks read the files
of the plan. They receive the credentials for these files, but no catalog token. Tables of format version 3
are supported. The offsets of a stream are snapshot ids. A repeated batch reads the same files, so with Spark's
checkpoint each row is read exactly once.

Options replace the information that PySpark 4.1 does not pass to a Python source. The source does not receive the
columns of a query, so there is the option `columns` (or `.schema(…)`). It does not receive disjunctions, so there is
the option `where` with any SQL predicate. The source uses filters that it receives only with the option
`push-filters`, and then applies each filter to every row (`filters.py`). The reason is that Spark stores the filters of
a query with the `load()` (`PythonDataSourceV2` has one read function). Spark may use the stored filters for all scans
of the query, or for a later query without filters, and rows are then missing. Therefore, with `push-filters`, use a
`load()` for only one query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.values import CURRENT, At, parse_timestamp
from seamark.connector.groups import divide
from seamark.connector.read.changes import APPEND, INSERT, OPERATION, SnapshotChange, changes, list_snapshots_between
from seamark.connector.read.read_plan import FILE, POSITION, ReadPlan
from seamark.connector.read.scans import TaskReader, bind_filter, limit_batches
from seamark.connector.read.tables import (
    OpenTable,
    divide_task,
    open_table,
    plan,
    plan_appends,
    restrict_to_rows,
)
from seamark.connector.spark.source.filters import build_expression
from seamark.connector.spark.source.options import open_client_and_table, parse_flag
from seamark.connector.spark.types import Convert, convert_to_spark_type, find_spark_conversion
from seamark.formats.iceberg.expressions.expression import TRUE, Expression, join_by_and
from seamark.formats.iceberg.metadata.replacement import is_replace

CHANGE_TYPE = "_change_type"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
"""The Spark setting that the option `push-filters` requires."""
SPLIT_BYTES = 128 << 20
OPEN_BYTES = 4 << 20
"""The assumed cost of opening a file, as a number of bytes to read. It is Spark's default."""
SMALL_BYTES = 32 << 20
TASKS_MIN = 16
"""The minimum number of tasks.

If there would be fewer tasks of `SPLIT_BYTES`, tasks become smaller, down to `SMALL_BYTES`.
"""

_METADATA: dict[str, spark_types.DataType] = {FILE: spark_types.StringType(), POSITION: spark_types.LongType()}
_OPTIONS = frozenset(
    {
        *("uri", "table", "path", "token", "columns", "where", "limit", "bitmaps", "split-bytes", "push-filters"),
        "after",
        *("snapshot-id", "branch", "tag", "as-of"),
        *("start-snapshot-id", "end-snapshot-id", "changes", "skip-changes"),
        "from",
    }
)
_BEGINNING = "-1"
"""The offset of a stream before the first snapshot."""


@dataclass(frozen=True)
class Options:
    """The parsed options of a reader."""

    client: SeamarkClient
    table: str
    at: At
    columns: tuple[str, ...] | None
    where: str | None
    limit: int | None
    bitmaps: bool
    push_filters: bool
    split_bytes: int
    start: int | None
    end: int | None
    changes: bool
    skip_changes: bool
    after: str = ""
    """The tokens of writes whose rows the result has to include."""
    from_: str | None = None
    """The start of a stream of rows (`row_stream.py`)."""

    @staticmethod
    def parse(raw_options: Mapping[str, str]) -> Options:
        """Parse the options of a reader. The default of `uri` is the environment variable SEAMARK_URL.

        Raises:
            InvalidRequest: Options are unknown, or cannot be combined.
        """
        options = {name.lower(): value for name, value in raw_options.items()}
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise InvalidRequest(f"Unknown options {', '.join(unknown)}; the options are {', '.join(sorted(_OPTIONS))}")
        client, table = open_client_and_table(options)
        selectors = [name for name in ("snapshot-id", "branch", "tag", "as-of") if name in options]
        if len(selectors) > 1:
            raise InvalidRequest(f"{' and '.join(selectors)} are both set; select the snapshot with only one of them")
        snapshot_choice = At(
            snapshot_id=_parse_number(options, "snapshot-id"),
            ref=options.get("branch") or options.get("tag"),
            as_of_ms=_parse_milliseconds(options["as-of"]) if "as-of" in options else None,
        )
        columns = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
        start, end = _parse_number(options, "start-snapshot-id"), _parse_number(options, "end-snapshot-id")
        with_changes = parse_flag(options, "changes", False)
        if end is not None and selectors:
            raise InvalidRequest(
                f"{selectors[0]} and end-snapshot-id are both set; select the snapshot with only one of them"
            )
        return Options(
            client=client,
            table=table,
            at=snapshot_choice if end is None else At(snapshot_id=end),
            columns=tuple(columns) or None,
            where=options.get("where"),
            limit=_parse_number(options, "limit"),
            bitmaps=parse_flag(options, "bitmaps", True),
            push_filters=parse_flag(options, "push-filters", False),
            split_bytes=_parse_number(options, "split-bytes") or SPLIT_BYTES,
            start=start,
            end=end,
            changes=with_changes,
            skip_changes=parse_flag(options, "skip-changes", False),
            after=options.get("after", ""),
            from_=options.get("from"),
        )

    @property
    def incremental(self) -> bool:
        return self.changes or self.start is not None or self.end is not None

    def with_fresh_rows(self) -> Options:
        """Return options whose reads include rows of the log that are not yet in data files.

        The options are returned unchanged if they select a snapshot or a range of snapshots, because a snapshot does
        not contain such rows.
        """
        if self.at != CURRENT or self.incremental:
            return self
        return replace(self, client=self.client.with_fresh_rows(self.after))

    def open(self) -> OpenTable:
        return open_table(self.client, self.table, self.at, history=self.incremental)


def _parse_number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise InvalidRequest(f"{name} is {text[:40]!r}; it must be a whole number")
    return int(text)


def _parse_milliseconds(text: str) -> int:
    try:
        return parse_timestamp(text)
    except ValueError:
        raise InvalidRequest(
            f"as-of is {text[:40]!r}; it must be milliseconds since 1970 or a time such as 2026-01-31T12:00:00"
        ) from None


def select_schema(table: OpenTable, options: Options) -> spark_types.StructType:
    """Return the schema of the columns that the options select.

    Raises:
        InvalidRequest: A column is unknown, or has no Spark type.
    """
    by_name = {field.name: field for field in table.schema.fields}
    names = options.columns or (*by_name, *((CHANGE_TYPE,) if options.changes else ()))
    special = _list_special_types(options.changes)
    fields = []
    for name in names:
        if name not in by_name and name not in special:
            raise InvalidRequest(f"There is no column {name!r}; the table has {', '.join(by_name)}")
        try:
            kind = special[name] if name not in by_name else convert_to_spark_type(by_name[name].type)
        except ValueError as error:
            raise InvalidRequest(f"Column {name}: {error}; exclude it with option('columns', …)") from None
        required = name in special or by_name[name].required
        fields.append(spark_types.StructField(name, kind, not required))
    return spark_types.StructType(fields)


def _list_special_types(with_changes: bool) -> dict[str, spark_types.DataType]:
    return {**_METADATA, **({CHANGE_TYPE: spark_types.StringType()} if with_changes else {})}


def check_schema(schema: spark_types.StructType, table: OpenTable) -> spark_types.StructType:
    """Check the schema that Spark passes, and return it. The user may have set it with `.schema(…)`.

    Raises:
        InvalidRequest: The schema does not match the table.
    """
    by_name = {column.name: column for column in table.schema.fields}
    for field in schema.fields:
        expected = (
            _list_special_types(with_changes=True).get(field.name)
            if field.name not in by_name
            else convert_to_spark_type(by_name[field.name].type)
        )
        if expected is None or expected.simpleString() != field.dataType.simpleString():
            problem = (
                "is not a column of the table" if expected is None else f"is {expected.simpleString()} in the table"
            )
            raise InvalidRequest(f"{field.name} {field.dataType.simpleString()}: {field.name} {problem}")
    return schema


class RowReader:
    """Reads the rows of a Spark task. Spark pickles it to send it to its workers.

    Args:
        table: The table at the snapshot that is read.
        schema: The columns to return. They may include the column with the kind of a change, which is not stored.
        where: The filter of the rows.
    """

    def __init__(self, table: OpenTable, schema: spark_types.StructType, where: Expression) -> None:
        names = [name for name in schema.fieldNames() if name != CHANGE_TYPE]
        kinds = {field.name: field.type for field in table.schema.fields}
        self._read_plan = ReadPlan(table.metadata, table.schema, tuple(names), where)
        self._storage = table.storage
        self._names = schema.fieldNames()
        self._kinds = {name: kinds[name] for name in names if name in kinds}

    def read(self, snapshot_changes: Iterable[SnapshotChange]) -> Iterator[pa.RecordBatch]:
        conversions = {
            name: convert for name, kind in self._kinds.items() if (convert := find_spark_conversion(kind)) is not None
        }
        reader = TaskReader(self._read_plan, self._storage, threads=False)
        for change in snapshot_changes:
            for batch in reader.read(change.task):
                yield self._convert_for_spark(batch, change.kind, conversions)

    def _convert_for_spark(
        self, batch: pa.RecordBatch, kind: str, conversions: Mapping[str, Convert]
    ) -> pa.RecordBatch:
        arrays = []
        for name in self._names:
            if name == CHANGE_TYPE:
                arrays.append(pa.repeat(pa.scalar(kind), batch.num_rows))
                continue
            column = batch.column(name)
            arrays.append(conversions[name](column) if name in conversions else column)
        return pa.RecordBatch.from_arrays(arrays, self._names)


@dataclass
class ReadTask(InputPartition):
    """The input of one Spark task: the inserted or deleted rows in some files or parts of files.

    Attributes:
        rows: The reader of the rows.
        changes: The files or parts of files.
        limit: The maximum number of rows, or None.
    """

    rows: RowReader
    changes: list[SnapshotChange]
    limit: int | None = None

    def read(self) -> Iterator[pa.RecordBatch]:
        return limit_batches(self.rows.read(self.changes), self.limit)


class BatchReader(DataSourceReader):
    """Plans a query on the driver, and reads the rows of its tasks."""

    def __init__(self, options: Options, table: OpenTable, schema: spark_types.StructType) -> None:
        self._options, self._table, self._schema = options, table, schema
        self._row_filter = bind_filter(options.where, table)

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state for Spark's tasks, because the partitions contain everything that tasks need."""
        return {}

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        rows, snapshot_changes = RowReader(self._table, self._schema, self._row_filter), self._list_changes()
        if options.limit is not None:
            return [ReadTask(rows, _choose_for_limit(snapshot_changes, options.limit, self._row_filter), options.limit)]
        return split_tasks(snapshot_changes, rows, options.split_bytes)

    def _list_changes(self) -> Iterator[SnapshotChange]:
        options, table, client = self._options, self._table, self._options.client
        if options.incremental and table.snapshot_id is None:
            return iter(())
        if options.changes:
            return changes(client, table, options.start, cast("int", table.snapshot_id))
        if options.incremental:
            # This raises an error on the driver if the start is not an ancestor of the end.
            list_snapshots_between(table, options.start, cast("int", table.snapshot_id))
            tasks = plan_appends(client, table, options.start, cast("int", table.snapshot_id), self._row_filter)
            return (SnapshotChange(INSERT, task) for task in tasks)
        tasks = plan(client, table, self._row_filter, least_rows=options.limit, columns=self._schema.names)
        if options.bitmaps:
            tasks = restrict_to_rows(client, table, self._row_filter, tasks)
        return (SnapshotChange(INSERT, task) for task in tasks)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # PySpark passes None for a plan without files.
        return iter(()) if partition is None else cast("ReadTask", partition).read()


class FilteringReader(BatchReader):
    """A reader with the option `push-filters`.

    It is a separate class because Spark calls `pushFilters` of every reader that has it. Therefore `BatchReader` must
    not have this method.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Yield the filters that the reader leaves to Spark."""
        for spark_filter in filters:
            expression = build_expression(spark_filter, self._table.schema)
            if expression is None:
                yield spark_filter
            else:
                self._row_filter = join_by_and(self._row_filter, expression)


class StreamReader(DataSourceStreamReader):
    """Reads the rows that append snapshots have added after `start-snapshot-id`.

    Without this option, it first reads all rows of the table.
    """

    def __init__(self, options: Options, table: OpenTable, schema: spark_types.StructType) -> None:
        if options.changes or options.limit is not None or (options.at.ref is None and options.at != CURRENT):
            raise InvalidRequest(
                "A stream does not support the options changes, limit, snapshot-id, end-snapshot-id and as-of"
            )
        self._options, self._table, self._schema = options, table, schema
        self._row_filter = bind_filter(options.where, table)

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state for Spark's tasks, because the partitions contain everything that tasks need."""
        return {}

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        return _encode_offset(self._options.start)

    def latestOffset(self) -> dict[str, str]:  # noqa: N802
        source_table = self._options.open()
        return _encode_offset(self._options.start if source_table.snapshot_id is None else source_table.snapshot_id)

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Return the tasks of a batch. Their rows have the schema that the table had when the stream began.

        If the offset `start` is empty, the batch has all rows of the table at `end`. Otherwise, it has the rows that
        were appended after `start`, up to `end`. If the table has no snapshot at `end`, the batch is empty.
        """
        options, first_id, last_id = self._options, _decode_offset(start), _decode_offset(end)
        if last_id is None or first_id == last_id:
            return []
        source_table = open_table(options.client, options.table, At(snapshot_id=last_id), history=True)
        table = replace(source_table, schema=self._table.schema)
        if first_id is None:
            tasks = plan(options.client, table, self._row_filter, columns=self._schema.names)
        else:
            self._check_only_appends(table, first_id, last_id)
            tasks = plan_appends(options.client, table, first_id, last_id, self._row_filter)
        rows = RowReader(table, self._schema, self._row_filter)
        return split_tasks((SnapshotChange(INSERT, task) for task in tasks), rows, options.split_bytes)

    def _check_only_appends(self, table: OpenTable, first_id: int, last_id: int) -> None:
        """Check that the snapshots after `first_id` up to `last_id` only append rows, or rewrite files without changes.

        With the option `skip-changes`, any snapshot is accepted.

        Raises:
            InvalidRequest: A snapshot deleted or rewrote rows, which a stream of rows cannot represent.
        """
        for snapshot in list_snapshots_between(table, first_id, last_id):
            operation = snapshot.build_summary_map().get(OPERATION)
            if operation != APPEND and not is_replace(snapshot) and not self._options.skip_changes:
                raise InvalidRequest(
                    f"Snapshot {snapshot.snapshot_id} ({operation}) deleted or rewrote rows; a stream has only "
                    "appended rows. Skip such snapshots with option('skip-changes', 'true'), or read the changes"
                )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return cast("ReadTask", partition).read()


def _encode_offset(snapshot_id: int | None) -> dict[str, str]:
    return {"snapshot-id": _BEGINNING if snapshot_id is None else str(snapshot_id)}


def _decode_offset(offset: Mapping[str, str]) -> int | None:
    return None if offset["snapshot-id"] == _BEGINNING else int(offset["snapshot-id"])


def _choose_for_limit(
    snapshot_changes: Iterator[SnapshotChange], limit: int, where: Expression
) -> list[SnapshotChange]:
    """Return the first changes that together certainly have at least `limit` rows, or all changes.

    A file with a filter, deletes or selected rows counts as 0 rows, because the number of its remaining rows is
    unknown.
    """
    chosen_changes: list[SnapshotChange] = []
    rows = 0
    for change in snapshot_changes:
        if rows >= limit:
            break
        chosen_changes.append(change)
        has_exact_count = (
            where == TRUE and not change.task.deletes and change.task.removed_by is None and change.task.rows is None
        )
        rows += change.task.records if has_exact_count else 0
    return chosen_changes


def split_tasks(snapshot_changes: Iterable[SnapshotChange], rows: RowReader, split_bytes: int) -> list[InputPartition]:
    """Divide files into tasks of about `split_bytes` bytes, or smaller tasks if there would be fewer than `TASKS_MIN`.

    Tasks become smaller only down to `SMALL_BYTES` bytes. Large files are split at row groups. Each file counts as
    `OPEN_BYTES` bytes more than its size, because opening it takes time.
    """
    all_changes = list(snapshot_changes)
    total = sum(change.task.size_bytes + OPEN_BYTES for change in all_changes)
    bytes_per_task = min(split_bytes, max(SMALL_BYTES, total // TASKS_MIN))
    pieces = (change._replace(task=task) for change in all_changes for task in divide_task(change.task, bytes_per_task))
    return [ReadTask(rows, group) for group in divide(pieces, _estimate_cost, (bytes_per_task + OPEN_BYTES,))]


def _estimate_cost(change: SnapshotChange) -> tuple[int]:
    start, end = change.task.span or (None, None)
    size_bytes = (change.task.size_bytes if end is None else end) - (start or 0)
    return (max(0, size_bytes) + OPEN_BYTES,)
