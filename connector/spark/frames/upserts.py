"""Upserts and deletes rows of DataFrames by key: Spark tasks match them with stored rows, the driver makes one commit.

`writes.write` uses this module in the modes `upsert` and `delete`.

The rows of a small DataFrame are collected on the driver, which changes the table with `connector.write.upserts`,
because starting tasks takes longer. Tasks do the work if many bytes of files must be rewritten, or if the DataFrame is
larger. A larger DataFrame is persisted in Spark until the call ends, so a repeated step uses the same rows. If Spark's
estimate was too small, the rows that were collected are discarded and computed again. The persisted rows are shuffled
once, so that all rows of a key are in one task. If the table is bucketed by the only key column, rows are shuffled by
bucket, so a task reads only files of its buckets. Otherwise they are shuffled by a hash of the key. Each task locates
its keys in the snapshot that the driver has chosen, by index lookups or by reading the files that may contain the keys,
and writes the new rows. The stored rows are not joined in Spark.

The driver merges the rows that several tasks have located in one data file. The deletion vector of a file, or its copy
without the deleted rows, is written once. If all keys of the file belong to one task, which buckets can ensure, this
task writes it. Otherwise the driver writes it, or the tasks of a second job write it, each for some files. With the
strategy `equality`, no task locates rows (`connector/write/equality_upserts.py`), and the tasks write the deletes.

Invariant: the table receives exactly the files of the tasks whose results Spark has used. A failed attempt
deletes its files. The files of a killed task remain as orphan files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import UNSET, UnsetType
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyroaring import BitMap64
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import types as spark_types

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.arrow.partitions import apply_transform
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import Producer
from seamark.connector.client.errors import Conflict
from seamark.connector.client.names import Name
from seamark.connector.client.values import At
from seamark.connector.plans.quotes import backquote
from seamark.connector.read.scans import bind_filter
from seamark.connector.read.tables import OpenTable, open_table
from seamark.connector.spark.frames.file_changes import DRIVER_COPY_BYTES_MAX, FileChanges, PackedRows
from seamark.connector.spark.frames.results import RESULT, collect_results, encode_result
from seamark.connector.write.delete_files import WrittenDeletes
from seamark.connector.write.equality_upserts import EQUALITY, check_table, write_equality_upsert
from seamark.connector.write.latest_rows import KeyedBatch, check_no_nulls, find_latest_rows, read_column
from seamark.connector.write.read_conditions import check_unchanged, make_rows_changed_error
from seamark.connector.write.rewrites import rewrite_files
from seamark.connector.write.row_changes import (
    COMMIT_ATTEMPTS_MAX,
    Report,
    RowChange,
    check_supports_deletes,
    commit_row_change,
)
from seamark.connector.write.row_locations import (
    SCAN,
    MatchedRows,
    choose_key_names,
    find_key_fields,
    find_record_index,
    hash_key_columns,
)
from seamark.connector.write.table_writer import WrittenFiles, discard_on_error
from seamark.connector.write.target import WriteTarget, create_target
from seamark.connector.write.upserts import (
    COPY_ON_WRITE,
    MERGE_ON_READ,
    check_arguments,
    choose_mode,
    compute_delete,
    compute_upsert,
    delete,
    read_scope,
    upsert,
)
from seamark.formats.iceberg.expressions.expression import TRUE, join_by_or
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.metadata.bucket_counts import list_bucket_fields
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.types.schema import Field
from seamark.formats.iceberg.types.transforms import canonicalize_transform, get_transform_width
from seamark.formats.runtime.decoding import convert_msgpack

DRIVER_ROWS = 100_000
"""The maximum number of rows that the driver collects."""
TASK_ROWS = 1_000_000
"""The approximate number of rows of a task. The rows are in the memory of the task."""
TASK_ROWS_MIN = 20_000
"""The approximate minimum number of rows of a task if an index locates the rows. Each task writes separate files."""
_SMALL_BYTES = 64 << 20
"""The maximum size of a DataFrame, by Spark's estimate, for which the driver tries to collect the rows."""
_LIMIT_MAX = 2**31 - 2
"""The maximum number of collected rows. A limit of one more row still fits Spark's int."""
_SCOPES_MAX = 200
"""The maximum number of tasks for which a commit has a separate read scope for each task."""
_TASK_COLUMN = "_seamark_task"
_TASK_FIELD = spark_types.StructField(_TASK_COLUMN, spark_types.IntegerType(), False)

Ints = npt.NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True)
class UpsertRequest:
    """An upsert or a delete, with the parameters of `connector.write.upserts`.

    The rows of a delete are reduced to the key columns.

    Attributes:
        keys: The key columns, or None for the key that `choose_key_names` chooses.
        columns: The columns that an upsert changes, or None for all columns.
    """

    keys: tuple[str, ...] | None
    precombine: str | None = None
    columns: tuple[str, ...] | None = None
    deletes: bool = False
    row_mode: str | None = None
    strategy: str | None = None
    read_snapshot_id: int | UnsetType | None = UNSET

    @property
    def resolved_keys(self) -> tuple[str, ...]:
        """The key columns. They must have been resolved, so that `keys` is not None."""
        assert self.keys is not None
        return self.keys

    def choose_columns(self, row_columns: Sequence[str]) -> list[str]:
        """Return the columns of the rows that the change needs.

        A delete, and a change of some columns, needs only the columns that the request names. Other changes need all
        columns.

        Args:
            row_columns: The names of all columns of the rows.

        Raises:
            Unwritable: A column is missing or occurs twice.
        """
        named_columns = [
            *self.resolved_keys,
            *(self.columns or ()),
            *([] if self.precombine is None else [self.precombine]),
        ]
        needed_columns = list(
            dict.fromkeys(named_columns if self.deletes or self.columns is not None else [*row_columns, *named_columns])
        )
        for name in needed_columns:
            if (occurrences := row_columns.count(name)) != 1:
                columns_found = "no column" if not occurrences else f"{occurrences} columns"
                raise Unwritable(f"the rows have {columns_found} {name}; they have {', '.join(row_columns)[:500]}")
        return needed_columns


def commit_change(
    client: SeamarkClient,
    df: DataFrame,
    table: Name,
    request: UpsertRequest,
    *,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
    attempts: int = COMMIT_ATTEMPTS_MAX,
    driver_rows: int = DRIVER_ROWS,
) -> Report:
    """Make one commit of an upsert or a delete.

    Raises:
        ValueError: An argument is invalid. No row has been evaluated.
        Unwritable: Columns do not fit the table, and no row has been evaluated. The error is also raised if values do
            not fit the table, but if a task finds these values, Spark's error with the same message may be raised.
    """
    check_arguments(request.row_mode, request.strategy, request.precombine, request.columns, request.read_snapshot_id)
    source_table = open_table(client, table, At(ref=branch))
    check_supports_deletes(source_table.metadata)
    request = replace(request, keys=tuple(choose_key_names(source_table.schema, request.keys, df.columns)))
    needed_columns = request.choose_columns(df.columns)
    empty_batch = pa.RecordBatch.from_arrays([pa.nulls(0) for _ in needed_columns], needed_columns)
    find_latest_rows([empty_batch], source_table.schema, request.resolved_keys, request.precombine, request.columns)
    if request.strategy == EQUALITY:
        check_table(
            source_table,
            create_target(source_table.metadata, source_table.storage, source_table.name),
            request.resolved_keys,
        )
    commit_options: dict[str, Any] = {"branch": branch, "producer": producer, "summary": summary, "attempts": attempts}
    selected_frame = df.select(*map(backquote, needed_columns))
    rows = None if _would_copy_much(source_table, request, 1) else _collect(selected_frame, driver_rows)
    if rows is None or _would_copy_much(source_table, request, rows.num_rows):
        with _persist(selected_frame) as persisted_frame:
            count = persisted_frame.count()
            if count > driver_rows or _would_copy_much(source_table, request, count):
                needs_history = request.read_snapshot_id is not UNSET
                prepare_change = partial(_run_tasks_and_write, client, persisted_frame, count, request)
                return commit_row_change(client, table, prepare_change, history=needs_history, **commit_options)
            rows = persisted_frame.toArrow()
    change_options = {
        "mode": request.row_mode,
        "strategy": request.strategy,
        "read_snapshot_id": request.read_snapshot_id,
        **commit_options,
    }
    if request.deletes:
        return delete(client, table, keys=rows, key=request.resolved_keys, **change_options)
    columns = None if request.columns is None else list(request.columns)
    return upsert(
        client,
        table,
        rows,
        keys=request.resolved_keys,
        precombine=request.precombine,
        columns=columns,
        **change_options,
    )


def _collect(df: DataFrame, rows_max: int) -> pa.Table | None:
    """Return all rows, or None if there are more than `rows_max` rows or their size is too large.

    The size is limited by `_SMALL_BYTES` for Spark's estimate, and by `spark.driver.maxResultSize`. One row more than
    `rows_max` is read, which shows whether there are more rows.
    """
    if rows_max <= 0 or int(str(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())) > _SMALL_BYTES:
        return None
    try:
        rows = df.limit(min(rows_max, _LIMIT_MAX) + 1).toArrow()
    except Py4JJavaError as error:
        if "maxResultSize" not in str(error):  # The message may be only in the cause of the error.
            raise
        return None
    return rows if rows.num_rows <= rows_max else None


def _would_copy_much(source_table: OpenTable, request: UpsertRequest, rows: int) -> bool:
    """Return whether the change probably has to rewrite files of many bytes.

    In the worst case, each of the `rows` changed rows is in another file of average size. The result is False if the
    mode is not copy-on-write, or if the snapshot does not state the number and the size of its files.
    """
    if (
        _choose_mode(request, create_target(source_table.metadata, source_table.storage, source_table.name))
        != COPY_ON_WRITE
    ):
        return False
    head = next(
        (snapshot for snapshot in source_table.history if snapshot.snapshot_id == source_table.snapshot_id), None
    )
    totals = {} if head is None else head.build_summary_map()
    try:
        files, size_bytes = int(totals["total-data-files"]), int(totals["total-files-size"])
    except (KeyError, ValueError):  # A summary does not have to contain these totals.
        return False
    return size_bytes * min(rows, files) > DRIVER_COPY_BYTES_MAX * files


def _choose_mode(request: UpsertRequest, target: WriteTarget) -> str:
    return (
        MERGE_ON_READ
        if request.strategy == EQUALITY
        else choose_mode(request.row_mode, target, deletes=request.deletes)
    )


@contextmanager
def _persist(df: DataFrame) -> Iterator[DataFrame]:
    """Persist a DataFrame until the block ends."""
    persisted_frame = df.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield persisted_frame
    finally:
        persisted_frame.unpersist()


# Distribution of rows to tasks


@dataclass(frozen=True)
class RowDistribution:
    """Assigns the rows of each key to one of `task_groups` × `parts` tasks.

    If the table is bucketed by the only key column, the bucket of a key modulo `task_groups` selects the group, so that
    few tasks change the same file. The hash of the key selects one of the `parts` tasks of the group.

    Attributes:
        fields: The key columns.
        task_groups: The number of groups of tasks. It is 1 if `bucket_count` is 0.
        parts: The number of tasks of each group.
        bucket_count: The number of buckets of the only key column, or 0 if there are no such buckets.
    """

    fields: tuple[Field, ...]
    task_groups: int
    parts: int
    bucket_count: int = 0

    @staticmethod
    def choose(
        source_table: OpenTable, fields: Sequence[Field], rows: int, cores: int, strategy: str | None
    ) -> RowDistribution:
        """Choose the number of tasks for rows with a key.

        There are more tasks than the number of rows requires if no file would be read twice: with buckets, with an
        index, or if no files are read.

        Buckets are used only if their column is the whole key, because nearly all rows may have the same value in a
        part of the key.
        """
        tasks_for_rows = -(-rows // TASK_ROWS)
        specs = [source_table.metadata.default_spec, *source_table.metadata.partition_specs]
        bucket_counts = [find_bucket_count(spec, fields[0]) for spec in specs] if len(fields) == 1 else []
        if bucket_count := next(filter(None, bucket_counts), 0):
            task_groups = min(bucket_count, max(cores, tasks_for_rows))
            return RowDistribution(tuple(fields), task_groups, -(-tasks_for_rows // task_groups), bucket_count)
        if strategy == EQUALITY or (strategy != SCAN and find_record_index(source_table.metadata, fields) is not None):
            return RowDistribution(tuple(fields), 1, max(tasks_for_rows, min(cores, -(-rows // TASK_ROWS_MIN))))
        return RowDistribution(tuple(fields), 1, tasks_for_rows)

    @property
    def tasks(self) -> int:
        return self.task_groups * self.parts

    def assign_tasks(self, columns: Sequence[pa.Array]) -> Ints:
        """Return the task of each row, as an index from 0: int32[rows].

        The bucket of the key, if there are buckets, selects a group of `parts` tasks. The hash of the key selects one
        task of the group.

        Args:
            columns: The columns of the key, with the table's types.

        Raises:
            Unwritable: A key is null. No task has written a file.
        """
        check_no_nulls(self.fields, columns)
        tasks = np.zeros(len(columns[0]), dtype=np.int64)
        if self.parts > 1:
            high, _ = hash_key_columns(self.fields, columns)
            tasks = (high % np.uint64(self.parts)).astype(np.int64)
        if self.bucket_count:
            buckets = apply_transform(f"bucket[{self.bucket_count}]", str(self.fields[0].type), columns[0])
            group_by_code = np.array([bucket % self.task_groups for bucket in buckets.values], dtype=np.int64)
            tasks = tasks * self.task_groups + group_by_code[buckets.codes]
        return tasks.astype(np.int32)

    def owns(self, spec: PartitionSpec | None) -> bool:
        """Return whether all keys in a file of this partition spec belong to the same task.

        Such a task can rewrite the file, because no other task changes it.
        """
        if self.tasks == 1:
            return True
        if not self.bucket_count or self.parts > 1 or spec is None:
            return False
        # A file has the keys of one bucket of the spec `spec`, which may have another number of buckets. A bucket is a
        # hash modulo the number of buckets. If `task_groups` divides `bucket_count`, the task of a key is its hash
        # modulo `task_groups`, and this number must divide the number of buckets of the file.
        file_bucket_count = find_bucket_count(spec, self.fields[0])
        is_divisor = self.bucket_count % self.task_groups == 0
        required_divisor = self.task_groups if is_divisor else self.bucket_count
        return file_bucket_count > 0 and file_bucket_count % required_divisor == 0


def find_bucket_count(spec: PartitionSpec, field: Field) -> int:
    """Return the number of buckets of the column in the spec, or 0 if it is not bucketed."""
    bucket_counts = (
        get_transform_width(canonicalize_transform(bucket_field.transform))
        for bucket_field in list_bucket_fields(spec)
        if bucket_field.sources == (field.id,)
    )
    return next(bucket_counts, 0)


@dataclass(frozen=True)
class UpsertTask:
    """The input of a task that changes rows by key. Spark pickles it to send it to its workers.

    Attributes:
        target: The table with the settings with which new files are written.
        mode: Whether files are rewritten (copy-on-write) or deletes are written (merge-on-read).
        distribution: The assignment of keys to tasks.
    """

    client: SeamarkClient
    table: OpenTable
    target: WriteTarget
    request: UpsertRequest
    mode: str
    distribution: RowDistribution


def run_tasks(df: DataFrame, work: UpsertTask) -> DataFrame:
    """Return a frame that runs the tasks. Each task with rows returns its result as one row of bytes."""
    schema = spark_types.StructType([*df.schema.fields, _TASK_FIELD])
    frame_with_tasks = df.mapInArrow(partial(_add_task_numbers, work.distribution), schema)
    exchanged_frame = frame_with_tasks.repartitionById(work.distribution.tasks, _TASK_COLUMN)
    return exchanged_frame.mapInArrow(partial(change_rows_of_task, work), RESULT)


def _add_task_numbers(distribution: RowDistribution, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        table = pa.Table.from_batches([batch])
        task_numbers = distribution.assign_tasks([read_column(table, field) for field in distribution.fields])
        yield batch.append_column(pa.field(_TASK_COLUMN, pa.int32(), False), pa.array(task_numbers))


# Tasks and their results


class _Result(msgspec.Struct, frozen=True):
    """The result of a task.

    Attributes:
        removed: The paths of the data files that the task has rewritten.
        to_delete: The rows that the driver still has to delete.
        read: The paths of the data files that the task has read.
        scope: The JSON form of the filter that describes what the task has read.
        counts: The numbers of inserted, updated, deleted and stale rows.
    """

    written: WrittenFiles = WrittenFiles()
    equality_deletes: WrittenDeletes = WrittenDeletes()
    removed: list[str] = []
    to_delete: list[PackedRows] = []
    read: list[str] = []
    scope: Any = None
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    changed: str = ""
    """The reason why the change must not be committed: stored rows with the task's keys have changed since the read.

    If it is set, the task has written nothing.
    """


def change_rows_of_task(work: UpsertTask, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Change the stored rows that have the keys of the new rows in `batches`, and yield the encoded result.

    This runs in one Spark task, which receives all new rows of its keys. If the task fails, it deletes the files that
    it has written.
    """
    row_batches = [batch.drop_columns([_TASK_COLUMN]) for batch in batches if batch.num_rows]
    if not row_batches:
        return
    request = work.request
    batch = find_latest_rows(row_batches, work.table.schema, request.resolved_keys, request.precombine, request.columns)
    result = _write_without_locating(work, batch) if request.strategy == EQUALITY else _change_located_rows(work, batch)
    yield encode_result(msgspec.msgpack.encode(result))


def _write_without_locating(work: UpsertTask, batch: KeyedBatch) -> _Result:
    upsert = write_equality_upsert(batch, work.table, work.target, deletes=work.request.deletes)
    return _Result(upsert.data, upsert.deletes)


def _change_located_rows(work: UpsertTask, batch: KeyedBatch) -> _Result:
    """Locate the stored rows of the batch's keys, and write the new rows and the deletes.

    With copy-on-write, also rewrite the files of which this task has all keys.
    """
    source_table, target, request = work.table, work.target, work.request
    try:
        check_unchanged(work.client, source_table, batch.keys, request.read_snapshot_id, request.strategy)
    except Conflict as conflict:
        # The driver raises this error. Spark's error would contain it only as text.
        return _Result(changed=conflict.message)
    if request.deletes:
        difference = compute_delete(work.client, source_table, batch, request.strategy)
    else:
        difference = compute_upsert(work.client, source_table, batch, request.strategy, work.mode)
    own_files: list[MatchedRows] = []
    shared_files = list(difference.located.files)
    if work.mode == COPY_ON_WRITE:
        specs = {partition_spec.spec_id: partition_spec for partition_spec in source_table.metadata.partition_specs}
        ownership = [work.distribution.owns(specs.get(file.task.spec_id)) for file in shared_files]
        own_files = [file for file, is_owned in zip(shared_files, ownership, strict=True) if is_owned]
        shared_files = [file for file, is_owned in zip(shared_files, ownership, strict=True) if not is_owned]
    report, scope = difference.report, read_scope(batch.keys, source_table, work.distribution.tasks)
    scope_json, rows = encode_expression(scope), [PackedRows.pack(file) for file in shared_files]
    written_files = (
        rewrite_files(source_table, target, own_files, difference.iter_rows())
        if own_files
        else difference.write(target)
    )
    return _Result(
        written_files,
        removed=[file.task.path for file in own_files],
        to_delete=rows,
        read=sorted(difference.located.read | {file.task.path for file in own_files if not file.is_whole}),
        scope=scope_json,
        counts=(report.inserted, report.updated, report.deleted, report.stale),
    )


# Merge of the results on the driver


def _run_tasks_and_write(
    client: SeamarkClient,
    df: DataFrame,
    rows: int,
    request: UpsertRequest,
    source_table: OpenTable,
    target: WriteTarget,
) -> RowChange:
    """Run the Spark tasks, which write files, and return the row change to commit.

    A file that has rows of several tasks is changed after the tasks.
    """
    fields = find_key_fields(source_table.schema, request.resolved_keys)
    cores = int(df.sparkSession.sparkContext.defaultParallelism)
    distribution = RowDistribution.choose(source_table, fields, rows, cores, request.strategy)
    work = UpsertTask(client, source_table, target, request, _choose_mode(request, target), distribution)
    copies = work.mode == COPY_ON_WRITE
    results = [convert_msgpack(packed_result, _Result) for packed_result in collect_results(run_tasks(df, work))]
    data = WrittenFiles.join(result.written for result in results)
    if request.strategy == EQUALITY:
        equality_deletes = WrittenDeletes.join(result.equality_deletes for result in results)
        return RowChange(None, Report(), data, equality_deletes)
    with discard_on_error([data], target.storage):
        if changed_rows := next((result.changed for result in results if result.changed), None):
            raise make_rows_changed_error(changed_rows)
        files = merge_rows(rows_of_file for result in results for rows_of_file in result.to_delete)
        removed_paths = [path for result in results for path in result.removed]
        removed_paths += [file.task.path for file in files] if copies else []
        partial_files = [file for file in files if not file.is_whole] if copies else []
        read_paths = {path for result in results for path in result.read} | {file.task.path for file in partial_files}
        inserted_rows, updated_rows, deleted_rows, stale_rows = (
            sum(task_counts) for task_counts in zip(*(result.counts for result in results), strict=True)
        )
        report = Report(
            inserted=inserted_rows,
            updated=updated_rows,
            deleted=deleted_rows,
            stale=stale_rows,
            files_read=len(read_paths),
        )
        has_separate_scopes = len(results) <= _SCOPES_MAX
        scope = (
            join_by_or(*(bind_filter(result.scope, source_table) for result in results))
            if has_separate_scopes
            else TRUE
        )
        # The last steps of this block write files that are not deleted after an error. Steps that can fail for other
        # reasons must precede them.
        file_changes = FileChanges(df.sparkSession, source_table, target)
        deletes = file_changes.mark_deleted(files) if files and not copies else WrittenDeletes()
        copied_files = file_changes.copy_by_tasks(partial_files) if partial_files else WrittenFiles()
    written_files = WrittenFiles.join((data, copied_files))
    return RowChange(scope, report, written_files, deletes, tuple({"file-path": path} for path in removed_paths))


def merge_rows(rows: Iterable[PackedRows]) -> list[MatchedRows]:
    """Return all rows of each data file, merged from the results of all tasks.

    The files are sorted by spec, partition and path.
    """
    by_path: dict[str, list[PackedRows]] = {}
    for rows_of_file in rows:
        by_path.setdefault(rows_of_file.file["file-path"], []).append(rows_of_file)
    files = []
    for parts in by_path.values():
        all_positions = BitMap64.union(*(BitMap64.deserialize(rows_of_file.positions) for rows_of_file in parts))
        files.append(msgspec.structs.replace(parts[0], positions=all_positions.serialize()).unpack())
    return sorted(files, key=lambda file: (file.task.spec_id, repr(file.task.file.get("partition")), file.task.path))
