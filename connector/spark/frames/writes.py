"""Writes DataFrames to a table: Spark tasks write Parquet and index files with pyarrow, the driver makes one commit.

    write(df, "db.events", uri="http://127.0.0.1:8181")                           adds rows
    write(df, "db.events", uri=…, mode="overwrite", where="day = '2026-11-21'")   replaces the matching rows
    write(df, "db.events", uri=…, mode="overwrite_partitions")                    replaces the partitions of the rows
    write(df, "db.events", uri=…, mode="upsert", keys=["id"])                     replaces the rows with the same keys
    write(df, "db.events", uri=…, mode="delete", keys=["id"])                     deletes the rows with the keys

`upserts.py` implements the last two modes, and this module implements the others.

Invariant: the commit contains exactly the files of the task attempts whose results Spark has accepted. A
repeated or speculative attempt writes files with unique names. An attempt that fails deletes its files. The
files of a killed attempt remain as orphan files. Nothing is visible before the commit, and a job that dies
does not commit.

`write.distribution-mode` of the table determines how rows are distributed (Iceberg's names and defaults). With `hash`,
rows are distributed by partition. `hash` is the default of a partitioned table without a sort order. With `range`, rows
are distributed by the sort order. `range` is the default of a sorted table. With `none`, rows are not distributed.
Callers that have already shuffled the rows pass `distribution="none"`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET, UnsetType
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as spark_types

from seamark.connector.arrow.casting import conform
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import Producer, encode_producer
from seamark.connector.client.names import Name
from seamark.connector.jobs.written_merges import merge_written
from seamark.connector.plans.quotes import backquote
from seamark.connector.spark.frames.results import RESULT, collect_results, encode_result
from seamark.connector.spark.frames.upserts import DRIVER_ROWS, UpsertRequest, commit_change
from seamark.connector.spark.rewrites import keep_job_group, run_on_spark
from seamark.connector.spark.types import check_fits
from seamark.connector.write.appends import APPEND, OVERWRITE, OVERWRITE_PARTITIONS, open_destination
from seamark.connector.write.row_changes import COMMIT_ATTEMPTS_MAX, Report
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from seamark.connector.write.target import WriteTarget
from seamark.connector.write.upserts import check_names
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.types.schema import Column as TableColumn
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.protocol.wire import INDEX_FILES_MAX
from seamark.formats.runtime.decoding import convert_json

DISTRIBUTION = "write.distribution-mode"
NONE, HASH, RANGE = "none", "hash", "range"
_PARTITION_COLUMN = "_seamark_partition"
_PARTITION_FIELD = spark_types.StructField(_PARTITION_COLUMN, spark_types.IntegerType(), False)
UPSERT, DELETE = "upsert", "delete"
_KEYED_PARAMETERS = ("keys", "row_mode", "strategy", "read_snapshot_id", "attempts", "driver_rows")
_PARAMETERS_BY_MODE: Mapping[str, tuple[str, ...]] = {
    APPEND: ("distribution", "merge_files"),
    OVERWRITE: ("distribution", "where", "merge_files"),
    OVERWRITE_PARTITIONS: ("distribution", "merge_files"),
    UPSERT: (*_KEYED_PARAMETERS, "precombine", "columns"),
    DELETE: _KEYED_PARAMETERS,
}
"""The modes, and the parameters of each mode in addition to the common parameters."""


@dataclass(frozen=True)
class WriteReport:
    """The result of one write.

    Attributes:
        commit: The server's response, or None if there was nothing to commit.
        skipped: The path of each data file for which an index could not be built, with the reason.
    """

    files: int
    rows: int
    size_bytes: int
    index_files: int
    skipped: tuple[tuple[str, str], ...]
    commit: Mapping[str, Any] | None
    merged: int = 0
    """The number of files that tasks had written and that were merged before the commit."""

    @property
    def snapshot_id(self) -> int | None:
        return None if self.commit is None else self.commit["snapshot-id"]


@overload
def write(
    df: DataFrame,
    table: Name,
    *,
    uri: str = "",
    client: SeamarkClient | None = None,
    mode: Literal["append", "overwrite", "overwrite_partitions"] = "append",
    where: str | Mapping[str, Any] | bool = True,
    distribution: str | None = None,
    merge_files: bool = False,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
) -> WriteReport: ...


@overload
def write(
    df: DataFrame,
    table: Name,
    *,
    uri: str = "",
    client: SeamarkClient | None = None,
    mode: Literal["upsert", "delete"],
    keys: Sequence[str] | None = None,
    precombine: str | None = None,
    columns: Sequence[str] | None = None,
    row_mode: str | None = None,
    strategy: str | None = None,
    read_snapshot_id: int | UnsetType | None = UNSET,
    attempts: int = COMMIT_ATTEMPTS_MAX,
    driver_rows: int = DRIVER_ROWS,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
) -> Report: ...


def write(
    df: DataFrame,
    table: Name,
    *,
    uri: str = "",
    client: SeamarkClient | None = None,
    mode: str = APPEND,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
    **options: Any,
) -> WriteReport | Report:
    """Write a DataFrame's rows in one commit.

    Columns are matched by name. The server is at `uri`, or the server of `client`.
    `seamark.connector.write.appends.append` describes `producer`.

    An upsert requires `keys`. For a delete, the default key is the table's identifier fields, or the frame's only
    column. `row_mode` is the `mode` of `seamark.connector.write.upserts`: `merge-on-read` or `copy-on-write`. The
    parameters `precombine`, `columns`, `strategy`, `read_snapshot_id` and `attempts` have the same meaning as in that
    module, with one exception: if several rows of a key have equal `precombine` values, any of these rows may be used.
    The driver changes up to `driver_rows` rows itself, unless copy-on-write has many bytes to copy.

    With `merge_files`, small files of a partition are merged before the commit, and large row groups are copied.

    If values do not fit the table, the message of Spark's error contains the reason (`Unwritable`). The errors of the
    server are in `seamark.connector.client.errors`. After a conflict, nothing is visible, and the write can be
    repeated.

    Raises:
        ValueError: The mode or the distribution is unknown, or a parameter belongs to another mode.
        Unwritable: The table does not have a column of the DataFrame, or the column has a different type. No task has
            started.
    """
    if client is None:
        if not uri:
            raise ValueError("Give uri (the server's address) or client")
        client = SeamarkClient(uri)
    if mode not in _PARAMETERS_BY_MODE:
        raise ValueError(f"there is no mode {mode!r}; the modes are {', '.join(_PARAMETERS_BY_MODE)}")
    if unknown := [name for name in options if name not in _PARAMETERS_BY_MODE[mode]]:
        raise ValueError(
            f"mode {mode!r} takes no {unknown[0]}; its parameters are {', '.join(_PARAMETERS_BY_MODE[mode])}"
        )
    encode_producer(producer)
    full_summary = {"engine-name": "spark", "engine-version": df.sparkSession.version, **(summary or {})}
    if mode in (UPSERT, DELETE):
        return _change_by_key(
            client, df, table, mode, {"branch": branch, "producer": producer, "summary": full_summary}, **options
        )
    destination = open_destination(client, table, mode, where=options.get("where", True), branch=branch)
    check_fits(df.schema, destination.target)
    parts = write_parts(df, destination.target, options.get("distribution"))
    written_files = WrittenFiles.join(parts)
    if options.get("merge_files"):
        written_files = _merge_small_files(df.sparkSession, client, table, destination.target, parts)
    answer = destination.commit(client, written_files, producer=producer, summary=full_summary)
    index_files = min(len(written_files.index_files), INDEX_FILES_MAX)
    published_paths = {file["file-path"] for file in written_files.files}
    merged_count = sum(file["file-path"] not in published_paths for part in parts for file in part.files)
    return WriteReport(
        len(written_files.files),
        written_files.rows,
        written_files.size_bytes,
        index_files,
        written_files.skipped,
        answer,
        merged_count,
    )


def _merge_small_files(
    spark: SparkSession, client: SeamarkClient, table: Name, target: WriteTarget, parts: Sequence[WrittenFiles]
) -> WrittenFiles:
    """Merge the small files that tasks have written. Each batch of files is merged by a Spark task."""
    with keep_job_group(spark):
        slots = max(1, spark.sparkContext.defaultParallelism)
        return merge_written(client, table, target, parts, runner=partial(run_on_spark, spark), slots=slots)


def _change_by_key(
    client: SeamarkClient,
    df: DataFrame,
    table: Name,
    mode: str,
    commit: Mapping[str, Any],
    *,
    keys: Sequence[str] | None = None,
    precombine: str | None = None,
    columns: Sequence[str] | None = None,
    row_mode: str | None = None,
    strategy: str | None = None,
    read_snapshot_id: int | UnsetType | None = UNSET,
    attempts: int = COMMIT_ATTEMPTS_MAX,
    driver_rows: int = DRIVER_ROWS,
) -> Report:
    """Upsert or delete the rows with the keys of a DataFrame.

    Args:
        client: The client.
        df: The rows, or the keys of the rows to delete.
        table: The table.
        mode: `upsert` or `delete`.
        commit: Options of the commit, such as the branch.
        keys: The key columns. They are required for an upsert. The docstring of `write` has the default of a delete.
        precombine: A column. Of several rows with the same key, the row with the largest value is used.
        columns: The columns that an upsert changes, or None for all columns.
        row_mode: `merge-on-read` or `copy-on-write`, or None for the table's mode.
        strategy: How stored rows are found, or None to choose a strategy.
        read_snapshot_id: The snapshot that the caller has read. The commit fails if the rows have changed since.
        attempts: The maximum number of attempts to commit.
        driver_rows: The maximum number of rows that the driver changes itself.
    """
    if keys is None and mode == UPSERT:
        raise ValueError("set the key columns: keys=[…]")
    check_names(keys, columns)
    request = UpsertRequest(
        None if keys is None else tuple(keys),
        precombine,
        None if columns is None else tuple(columns),
        mode == DELETE,
        row_mode,
        strategy,
        read_snapshot_id,
    )
    return commit_change(client, df, table, request, attempts=attempts, driver_rows=driver_rows, **commit)


def write_parts(df: DataFrame, target: WriteTarget, distribution: str | None = None) -> list[WrittenFiles]:
    """Write a DataFrame's rows to files in tasks, without a commit. Return the files of each task."""
    distributed_frame = distribute(df, target, distribution)
    results = collect_results(distributed_frame.mapInArrow(partial(write_task, target), RESULT))
    return [decode_files(result) for result in results]


def write_task(target: WriteTarget, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of one task to files, and yield the list of files, or nothing if there are no rows."""
    rows = (
        batch.drop_columns([_PARTITION_COLUMN]) if _PARTITION_COLUMN in batch.schema.names else batch
        for batch in batches
    )
    written_files = write_batches(target, rows)
    if written_files.files:
        yield encode_result(encode_files(written_files))


def encode_files(files: WrittenFiles) -> bytes:
    """Return the files in the form of a task result: JSON with the fields of a commit."""
    return msgspec.json.encode(files)


def decode_files(data: bytes) -> WrittenFiles:
    return convert_json(data, WrittenFiles)


# Distribution of rows to tasks


def distribute(df: DataFrame, target: WriteTarget, distribution: str | None = None) -> DataFrame:
    """Return the rows, distributed to tasks by the distribution mode of the write or of the table.

    The default mode is `range` for a table with a sort order, `hash` for a partitioned table, and otherwise `none`. In
    a table without partitions, `hash` has no columns to distribute by, so the frame is returned unchanged.

    Raises:
        ValueError: The distribution mode is unknown.
    """
    default = RANGE if target.sort_order.fields else HASH if target.spec.fields else NONE
    mode = distribution or target.properties.get(DISTRIBUTION, default)
    if mode not in (NONE, HASH, RANGE):
        raise ValueError(f"{DISTRIBUTION} is {mode!r}; it must be {NONE}, {HASH} or {RANGE}")
    if mode == NONE:
        return df
    sorted_by = _list_sort_columns(target) if mode == RANGE else []
    if not target.spec.fields:
        return df.repartitionByRange(*sorted_by) if sorted_by else df
    numbered_frame = df.mapInArrow(
        partial(add_partition_number, target), spark_types.StructType([*df.schema.fields, _PARTITION_FIELD])
    )
    # With a sort order, rows are distributed by ranges of the partition and the sort columns, so several tasks may
    # write the same partition.
    return (
        numbered_frame.repartitionByRange(sf.col(_PARTITION_COLUMN), *sorted_by)
        if sorted_by
        else numbered_frame.repartition(_PARTITION_COLUMN)
    )


def add_partition_number(target: WriteTarget, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add a column with a hash of the partition to the rows, so all rows of a partition have the same number."""
    for batch in batches:
        partition_numbers = np.zeros(batch.num_rows, dtype=np.int32)
        if batch.num_rows:
            for partition, rows in target.partitioner.split(conform(batch, target.schema, target.arrow)):
                # Unlike Python's `hash` of strings, this hash is equal in every process. It must fit an int32.
                number = zlib.crc32(repr(partition).encode()) & 0x7FFFFFFF
                partition_numbers[slice(None) if rows is None else rows] = number
        yield batch.append_column(pa.field(_PARTITION_COLUMN, pa.int32(), False), pa.array(partition_numbers))


def _list_sort_columns(target: WriteTarget) -> list[Column]:
    """Return the table's sort order for Spark, up to the first transform.

    The columns only distribute the rows to tasks. When a file is written, its rows are sorted by the full order.
    """
    columns: list[Column] = []
    for field in target.sort_order.fields:
        column = target.schema.column(field.sources[0])
        if field.transform != IDENTITY or column is None:
            break
        columns.append(_choose_order(field.direction, field.null_order)(sf.col(_quote_path(column, target))))
    return columns


def _quote_path(column: TableColumn, target: WriteTarget) -> str:
    """Return the column's path for Spark. Each name is quoted, because it may contain a dot."""
    names, current_column = [], column
    while True:
        parent = None if current_column.parent is None else target.schema.column(current_column.parent)
        names.append(current_column.name if parent is None else current_column.name.removeprefix(f"{parent.name}."))
        if parent is None:
            return ".".join(map(backquote, reversed(names)))
        current_column = parent


def _choose_order(direction: str, null_order: str) -> Callable[[Column], Column]:
    if direction == "asc":
        return sf.asc_nulls_first if null_order == "nulls-first" else sf.asc_nulls_last
    return sf.desc_nulls_first if null_order == "nulls-first" else sf.desc_nulls_last
