"""The reading half of `format("seamark")`: planned by the server with every index, read with pyarrow in Spark's tasks.

    spark.read.format("seamark").option("uri", "http://127.0.0.1:8181").option("table", "db.events").load()

The rule it keeps: the rows are those that Iceberg's own reader gives. A scan is planned once, on the driver; tasks read
the files of that plan, and have what it takes to reach them, but no token of the catalog. Tables of version 3 are read
like any other. A stream's offsets are snapshot ids, so that a batch that is run again reads the same files, and Spark's
checkpoint makes it exactly once.

What PySpark 4.1 does not tell a Python source, options do: `columns` (or `.schema(…)`), as it does not say which
columns a query uses, and `where`, any predicate in SQL, as it hands over no disjunctions. Filters that it does hand
over are taken only with the option `push-filters`, and then each is applied to every row exactly (`filters.py`): Spark
keeps what was pushed for one query of a `load()` and uses it for another that pushes nothing, or for all scans of one
query (`PythonDataSourceV2` holds one read function), which then lack rows. So with it a `load()` may serve one query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition

from seamark.connector.client.client import CURRENT, At, SeamarkClient
from seamark.connector.client.errors import BadRequest
from seamark.connector.read.changes import APPEND, INSERT, OPERATION, REPLACE, SnapshotChange, changes, history
from seamark.connector.read.scans import FILE, POSITION, ReadPlan, TaskReader, bound_filter, limited
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan, plan_appends, with_rows
from seamark.connector.spark.source.filters import expression_of
from seamark.connector.spark.source.options import flag, server_of
from seamark.connector.spark.types import Convert, for_spark, spark_type
from seamark.metaserver.iceberg.expressions.expression import TRUE, Expression, all_of

CHANGE_TYPE = "_change_type"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
"""Spark's setting without which it refuses the option `push-filters`."""
SPLIT_BYTES = 128 << 20
OPEN_BYTES = 4 << 20
"""What opening a file is taken to cost, in bytes read; Spark's own default."""
SMALL_BYTES = 32 << 20
TASKS_MIN = 16
"""Tables of less than `SPLIT_BYTES` a task are divided, too, down to `SMALL_BYTES`."""

_METADATA: dict[str, spark_types.DataType] = {FILE: spark_types.StringType(), POSITION: spark_types.LongType()}
_OPTIONS = frozenset(
    {
        *("uri", "table", "path", "token", "columns", "where", "limit", "bitmaps", "split-bytes", "push-filters"),
        *("snapshot-id", "branch", "tag", "as-of"),
        *("start-snapshot-id", "end-snapshot-id", "changes", "skip-changes"),
    }
)
_BEGINNING = "-1"


@dataclass(frozen=True)
class Options:
    """What was given to `option`."""

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

    @staticmethod
    def of(given: Mapping[str, str]) -> Options:
        """BadRequest for what is not known or makes no sense. `uri` is by default that of SEAMARK_URL."""
        options = {name.lower(): value for name, value in given.items()}
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise BadRequest(f"Unknown options {', '.join(unknown)}: there are {', '.join(sorted(_OPTIONS))}")
        client, table = server_of(options)
        named = [name for name in ("snapshot-id", "branch", "tag", "as-of") if name in options]
        if len(named) > 1:
            raise BadRequest(f"{' and '.join(named)} are both given; say which snapshot in one way")
        at = At(
            snapshot_id=_number(options, "snapshot-id"),
            ref=options.get("branch") or options.get("tag"),
            as_of_ms=_milliseconds(options["as-of"]) if "as-of" in options else None,
        )
        columns = [one.strip() for one in options.get("columns", "").split(",") if one.strip()]
        start, end = _number(options, "start-snapshot-id"), _number(options, "end-snapshot-id")
        told = flag(options, "changes", False)
        if end is not None and named:
            raise BadRequest(f"{named[0]} and end-snapshot-id are both given; say which snapshot in one way")
        return Options(
            client=client,
            table=table,
            at=at if end is None else At(snapshot_id=end),
            columns=tuple(columns) or None,
            where=options.get("where"),
            limit=_number(options, "limit"),
            bitmaps=flag(options, "bitmaps", True),
            push_filters=flag(options, "push-filters", False),
            split_bytes=_number(options, "split-bytes") or SPLIT_BYTES,
            start=start,
            end=end,
            changes=told,
            skip_changes=flag(options, "skip-changes", False),
        )

    @property
    def incremental(self) -> bool:
        return self.changes or self.start is not None or self.end is not None

    def open(self) -> OpenTable:
        return open_table(self.client, self.table, self.at, history=self.incremental)


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise BadRequest(f"{name} is {text[:40]!r}; it must be a whole number")
    return int(text)


def _milliseconds(text: str) -> int:
    """Of milliseconds since the epoch, or a time as 2026-01-31T12:00:00, UTC where it has no offset."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(
            f"as-of is {text[:40]!r}; it must be milliseconds or a time like 2026-01-31T12:00:00"
        ) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def schema_of(table: OpenTable, options: Options) -> spark_types.StructType:
    """BadRequest for a column that there is not, or that Spark has no type for."""
    by_name = {one.name: one for one in table.schema.fields}
    names = options.columns or (*by_name, *((CHANGE_TYPE,) if options.changes else ()))
    special = _special(options.changes)
    fields = []
    for name in names:
        if name not in by_name and name not in special:
            raise BadRequest(f"There is no column {name!r}: the table has {', '.join(by_name)}")
        try:
            kind = special[name] if name not in by_name else spark_type(by_name[name].type)
        except ValueError as error:
            raise BadRequest(f"Column {name}: {error}; leave it out by option('columns', …)") from None
        required = name in special or by_name[name].required
        fields.append(spark_types.StructField(name, kind, not required))
    return spark_types.StructType(fields)


def _special(told: bool) -> dict[str, spark_types.DataType]:
    return {**_METADATA, **({CHANGE_TYPE: spark_types.StringType()} if told else {})}


def checked(schema: spark_types.StructType, table: OpenTable) -> spark_types.StructType:
    """The schema that Spark asks for, which users may have given. BadRequest where it is not the table's."""
    by_name = {one.name: one for one in table.schema.fields}
    for field in schema.fields:
        wanted = _special(True).get(field.name) if field.name not in by_name else spark_type(by_name[field.name].type)
        if wanted is None or wanted.simpleString() != field.dataType.simpleString():
            told = "is no column of the table" if wanted is None else f"is {wanted.simpleString()} in the table"
            raise BadRequest(f"{field.name} {field.dataType.simpleString()}: {field.name} {told}")
    return schema


class RowReader:
    """How parts are read; goes to Spark's tasks."""

    def __init__(self, table: OpenTable, schema: spark_types.StructType, where: Expression) -> None:
        names = [one for one in schema.fieldNames() if one != CHANGE_TYPE]
        kinds = {one.name: one.type for one in table.schema.fields}
        self._wanted = ReadPlan(table.metadata, table.schema, tuple(names), where)
        self._storage = table.storage
        self._names = schema.fieldNames()
        self._kinds = {name: kinds[name] for name in names if name in kinds}

    def read(self, given: Iterable[SnapshotChange]) -> Iterator[pa.RecordBatch]:
        converts = {name: convert for name, kind in self._kinds.items() if (convert := for_spark(kind)) is not None}
        reader = TaskReader(self._wanted, self._storage, threads=False)
        for one in given:
            for batch in reader.read(one.task):
                yield self._for_spark(batch, one.kind, converts)

    def _for_spark(self, batch: pa.RecordBatch, kind: str, converts: Mapping[str, Convert]) -> pa.RecordBatch:
        arrays = []
        for name in self._names:
            if name == CHANGE_TYPE:
                arrays.append(pa.repeat(pa.scalar(kind), batch.num_rows))
                continue
            column = batch.column(name)
            arrays.append(converts[name](column) if name in converts else column)
        return pa.RecordBatch.from_arrays(arrays, self._names)


@dataclass
class ReadTask(InputPartition):
    """What one Spark task reads: files or parts of files, of rows inserted or deleted."""

    rows: RowReader
    changes: list[SnapshotChange]
    limit: int | None = None

    def read(self) -> Iterator[pa.RecordBatch]:
        return limited(self.rows.read(self.changes), self.limit)


class BatchReader(DataSourceReader):
    def __init__(self, options: Options, table: OpenTable, schema: spark_types.StructType) -> None:
        self._options, self._table, self._schema = options, table, schema
        self._where = bound_filter(options.where, table)

    def __getstate__(self) -> dict[str, Any]:
        """For Spark's tasks, whose parts say everything."""
        return {}

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        rows, found = RowReader(self._table, self._schema, self._where), self._changes()
        if options.limit is not None:
            return [ReadTask(rows, _enough(found, options.limit, self._where), options.limit)]
        return parts_of(found, rows, options.split_bytes)

    def _changes(self) -> Iterator[SnapshotChange]:
        options, table, client = self._options, self._table, self._options.client
        if options.incremental and table.snapshot_id is None:
            return iter(())
        if options.changes:
            return changes(client, table, options.start, cast("int", table.snapshot_id))
        if options.incremental:
            history(table, options.start, cast("int", table.snapshot_id))
            found = plan_appends(client, table, options.start, cast("int", table.snapshot_id), self._where)
            return (SnapshotChange(INSERT, one) for one in found)
        found = plan(client, table, self._where, least_rows=options.limit)
        if options.bitmaps:
            found = with_rows(client, table, self._where, found)
        return (SnapshotChange(INSERT, one) for one in found)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # None is PySpark's own, where a plan has no files.
        return iter(()) if partition is None else cast("ReadTask", partition).read()


class FilteringReader(BatchReader):
    """With the option `push-filters`. Spark asks every source that has this method, so others must not have it."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Those that are left to Spark."""
        for one in filters:
            found = expression_of(one, self._table.schema)
            if found is None:
                yield one
            else:
                self._where = all_of(self._where, found)


class StreamReader(DataSourceStreamReader):
    """Rows that append snapshots added, from `start-snapshot-id` on; without one, the table as it is first."""

    def __init__(self, options: Options, table: OpenTable, schema: spark_types.StructType) -> None:
        if options.changes or options.limit is not None or (options.at.ref is None and options.at != CURRENT):
            raise BadRequest("A stream takes no changes, limit, snapshot-id, end-snapshot-id or as-of")
        self._options, self._table, self._schema = options, table, schema
        self._where = bound_filter(options.where, table)

    def __getstate__(self) -> dict[str, Any]:
        """For Spark's tasks, whose parts say everything."""
        return {}

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        return _offset(self._options.start)

    def latestOffset(self) -> dict[str, str]:  # noqa: N802
        opened = self._options.open()
        return _offset(self._options.start if opened.snapshot_id is None else opened.snapshot_id)

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """By the schema that the stream began with, whatever the table's is by now."""
        options, first, last = self._options, _snapshot_of(start), _snapshot_of(end)
        if last is None or first == last:
            return []
        opened = open_table(options.client, options.table, At(snapshot_id=last), history=True)
        table = replace(opened, schema=self._table.schema)
        if first is None:
            found = plan(options.client, table, self._where)
        else:
            self._check(table, first, last)
            found = plan_appends(options.client, table, first, last, self._where)
        rows = RowReader(table, self._schema, self._where)
        return parts_of((SnapshotChange(INSERT, one) for one in found), rows, options.split_bytes)

    def _check(self, table: OpenTable, first: int, last: int) -> None:
        """BadRequest where rows were deleted or rewritten on the way, which a stream of rows cannot say."""
        for one in history(table, first, last):
            operation = one.summary_map().get(OPERATION)
            if operation not in (APPEND, REPLACE) and not self._options.skip_changes:
                raise BadRequest(
                    f"Snapshot {one.snapshot_id} ({operation}) took rows away or wrote them anew, which a stream of "
                    "appended rows cannot tell: pass over such by option('skip-changes', 'true'), or read changes"
                )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return cast("ReadTask", partition).read()


def _offset(snapshot_id: int | None) -> dict[str, str]:
    return {"snapshot-id": _BEGINNING if snapshot_id is None else str(snapshot_id)}


def _snapshot_of(offset: Mapping[str, str]) -> int | None:
    return None if offset["snapshot-id"] == _BEGINNING else int(offset["snapshot-id"])


def _enough(found: Iterator[SnapshotChange], limit: int, where: Expression) -> list[SnapshotChange]:
    """As many as surely hold so many rows."""
    taken: list[SnapshotChange] = []
    rows = 0
    for one in found:
        if rows >= limit:
            break
        taken.append(one)
        sure = where == TRUE and not one.task.deletes and one.task.removed_by is None and one.task.rows is None
        rows += one.task.records if sure else 0
    return taken


def parts_of(found: Iterable[SnapshotChange], rows: RowReader, split_bytes: int) -> list[InputPartition]:
    """Tasks of about so many bytes; of less where there would be few. Large files are cut at row groups."""
    every = list(found)
    total = sum(one.task.size_bytes + OPEN_BYTES for one in every)
    most = min(split_bytes, max(SMALL_BYTES, total // TASKS_MIN))
    parts: list[InputPartition] = []
    held: list[SnapshotChange] = []
    size = 0
    for one in every:
        for task in _pieces(one.task, most):
            span = task.span or (0, task.size_bytes)
            cost = span[1] - span[0] + OPEN_BYTES
            if held and size + cost > most + OPEN_BYTES:
                parts.append(ReadTask(rows, held))
                held, size = [], 0
            held.append(one._replace(task=task))
            size += cost
    return [*parts, ReadTask(rows, held)] if held else parts


def _pieces(task: ScanTask, most: int) -> Iterator[ScanTask]:
    offsets: Any = task.file.get("split-offsets") or ()
    cuts = [0]
    for at in sorted(offsets):
        if at - cuts[-1] >= most:
            cuts.append(at)
    if len(cuts) == 1:
        yield task
        return
    for start, end in zip(cuts, [*cuts[1:], task.size_bytes], strict=True):
        yield replace(task, span=(start, end))
