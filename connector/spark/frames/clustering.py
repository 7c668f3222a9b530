"""Rewrites a table's rows into files that are clustered by attributes on which queries filter.

The attributes are columns of the table, and columns of tables to which its keys refer (such as the city of an order's
customer).

    cluster(spark, "db.orders", by=["ordered", "customer.city"], uri=…,
            joins={"customer": JoinedTable("db.customers", on={"customer_id": "id"})})

The job reads one snapshot with a plan, and the commit removes the files of this plan. It reads the rows with all
deletes applied and, if the table has row lineage, the id of each row. A first job takes a sample, from which the driver
computes ranks. The driver also reads the needed columns of the referenced tables, which must fit into its memory. A
second job computes the key of each row on the curve, exchanges rows by ranges of keys, sorts them, and writes files
with `TableWriter`.

Invariant: the job adds, loses and changes no row. The commit has the operation `replace`, so concurrent
appends are preserved. A concurrent change of the files that were read is a Conflict, which leaves the table
unchanged.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as spark_types

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.client.storage import Storage
from seamark.connector.read.lineage import NAMES, has_lineage
from seamark.connector.read.read_plan import ReadPlan, plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import ScanTask, divide_task, plan
from seamark.connector.spark.frames.results import RESULT, collect_results, encode_result
from seamark.connector.spark.frames.writes import WriteReport, add_partition_number, decode_files, encode_files
from seamark.connector.spark.types import convert_to_spark_type, find_spark_conversion
from seamark.connector.write.appends import commit
from seamark.connector.write.clustering import (
    Attributes,
    Clustering,
    JoinedTable,
    choose_range_bounds,
    derive_layer_properties,
    generate_layer_name,
    read_joined_tables,
)
from seamark.connector.write.replacements import build_replacement, open_rewritable
from seamark.connector.write.table_writer import TableWriter, WrittenFiles
from seamark.connector.write.target import WriteTarget, create_target, with_lineage
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.metadata.clustering import CLUSTERED_BY, CURVES, HILBERT, ClusteringLayout
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT, parse_long
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.protocol.wire import INDEX_FILES_MAX
from seamark.formats.services.curves import to_sortable_keys

SAMPLE_ROWS, SAMPLE_ROWS_PER_FILE, SAMPLE_ROWS_MAX = 100_000, 100, 1_000_000
"""The minimum number of rows in the sample, the number for each new file, and the maximum number."""
TASK_ROWS = 1_000_000
"""The approximate number of rows that a task sorts and writes."""
_READ_BYTES_PER_TASK = 128 << 20
"""The approximate size of the data files that a task reads."""
_TASKS_PER_CORE = 3
"""The minimum number of tasks per core, unless the result has fewer files."""
_KEY, _TASK = "_seamark_key", "_seamark_task"
_OWN_COLUMNS = (_KEY, _TASK)
_TASK_SCHEMA = "tasks binary"


def cluster(
    spark: SparkSession,
    table: Name,
    by: Sequence[str],
    *,
    joins: Mapping[str, JoinedTable] | None = None,
    curve: str = HILBERT,
    files: int | None = None,
    target_file_bytes: int | None = None,
    uri: str | None = None,
    client: SeamarkClient | None = None,
    branch: str = MAIN,
    summary: Mapping[str, str] | None = None,
) -> WriteReport:
    """Rewrite the rows of a snapshot into clustered files, with one commit.

    The new files have about equal numbers of rows. There are `files` files or slightly more. Without `files`, each has
    about `target_file_bytes`, which defaults to the table's property. The server is at `uri`, or the server of
    `client`. The report's commit is None if there are no rows.

    Args:
        by: The attributes, in any order: columns of the table, or `name.column` for a column of a table of `joins`.

    Raises:
        ValueError: The curve is unknown, or arguments are missing or contradict each other.
        InvalidRequest: A column does not exist or cannot be used.
        Conflict: Another commit has changed a file that the job has read.
    """
    if client is None:
        if not uri:
            raise ValueError("Give uri (the server's address) or client")
        client = SeamarkClient(uri)
    if curve not in CURVES:
        raise ValueError(f"there is no curve {curve!r}; the curves are {', '.join(CURVES)}")
    if files is not None and files < 1:
        raise ValueError(f"files must be at least 1, not {files}")
    if files is not None and target_file_bytes is not None:
        raise ValueError("set files or target_file_bytes, not both")
    source_table = open_rewritable(client, table, branch)
    target = create_target(source_table.metadata, source_table.storage, source_table.name)
    names = [field.name for field in source_table.schema.fields]
    if has_lineage(source_table.metadata):
        names, target = [*names, *NAMES], with_lineage(target)
    read_plan = plan_read(source_table, names, TRUE)
    attributes = Attributes(by, read_joined_tables(client, by, joins or {}), read_plan.arrow)
    tasks = list(plan(client, source_table))
    if not tasks:
        return WriteReport(0, 0, 0, 0, (), None)
    task_frame = _make_task_frame(spark, tasks)
    size_bytes = sum(task.size_bytes for task in tasks)
    file_count = files or _count_files(target, size_bytes, target_file_bytes)
    rows, sample = _take_sample(task_frame, read_plan, target, attributes, file_count, tasks)
    target = replace(target, properties=derive_layer_properties(target.properties, sample, attributes.columns))
    suffix = ClusteringLayout(tuple(by), curve).make_suffix(generate_layer_name())
    work = ClusterTask.from_plan(
        Clustering.from_sample(attributes, sample, curve),
        sample,
        read_plan,
        target,
        rows,
        file_count,
        _count_cores(spark),
        suffix,
    )
    written_files = (
        _write_clustered(task_frame, work).discard_unless_complete(rows, target.storage).limit_indexes(target.storage)
    )
    full_summary = {
        "engine-name": "spark",
        "engine-version": spark.version,
        CLUSTERED_BY: f"{curve}({', '.join(by)})",
    }
    body = {
        **build_replacement(source_table, tasks, written_files, branch=branch),
        "summary": {**full_summary, **(summary or {})},
    }
    answer = commit(client, table, body, partial(written_files.discard, target.storage))
    index_files = min(len(written_files.index_files), INDEX_FILES_MAX)
    return WriteReport(
        len(written_files.files),
        written_files.rows,
        written_files.size_bytes,
        index_files,
        written_files.skipped,
        answer,
    )


def _count_files(target: WriteTarget, size_bytes: int, file_bytes: int | None) -> int:
    """Return the number of files for rows of `size_bytes` bytes.

    A file has `file_bytes` bytes or, if this is not set, the size in the table's properties.
    """
    bytes_per_file = file_bytes or parse_long(target.properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT)
    return max(1, -(-size_bytes // max(1, bytes_per_file)))


# Tasks


def _count_cores(spark: SparkSession) -> int:
    return int(spark.sparkContext.defaultParallelism)


def _make_task_frame(spark: SparkSession, tasks: Sequence[ScanTask]) -> DataFrame:
    """Return a frame with one partition for each Spark task. Each partition has a row with the files of its task.

    Large files are divided at row groups, so that a small number of files also occupies all cores.
    """
    size_bytes = sum(task.size_bytes for task in tasks)
    parts = max(_TASKS_PER_CORE * _count_cores(spark), -(-size_bytes // _READ_BYTES_PER_TASK))
    pieces = [piece for task in tasks for piece in divide_task(task, -(-size_bytes // parts))]
    parts = min(len(pieces), parts)
    pickled_rows = [(bytearray(pickle.dumps(pieces[number::parts])),) for number in range(parts)]
    return spark.createDataFrame(spark.sparkContext.parallelize(pickled_rows, parts), _TASK_SCHEMA)


def _read_rows(read_plan: ReadPlan, storage: Storage, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the pickled scan tasks in the batches."""
    for batch in batches:
        yield from TaskReader(read_plan, storage, threads=False).read_all(_decode_tasks(batch))


def _decode_tasks(batch: pa.RecordBatch) -> list[ScanTask]:
    return [task for pickled_tasks in batch.column(0) for task in pickle.loads(pickled_tasks.as_py())]  # noqa: S301


def _take_sample(
    task_frame: DataFrame,
    read_plan: ReadPlan,
    target: WriteTarget,
    attributes: Attributes,
    files: int,
    tasks: Sequence[ScanTask],
) -> tuple[int, pa.Table]:
    """Return the number of rows, and a sample of the columns from which keys are computed.

    Args:
        task_frame: The frame of `_make_task_frame`.
        read_plan: How the files are read.
        target: The table that is written.
        attributes: The columns by which rows are clustered.
        files: The number of new files. The sample has more rows for more files.
        tasks: The files in `task_frame`.

    Raises:
        RuntimeError: The number of rows in files without deletes differs from the number in the manifests.
    """
    # The remaining columns are needed to compute partition values.
    needs_all_columns = target.spec.fields or not attributes.columns
    sample_plan = read_plan if needs_all_columns else replace(read_plan, names=tuple(attributes.columns))
    sample_rows = min(SAMPLE_ROWS_MAX, max(SAMPLE_ROWS, SAMPLE_ROWS_PER_FILE * files))
    fraction = sample_rows / max(1, sum(task.records for task in tasks))
    results = collect_results(
        task_frame.mapInArrow(partial(_sample_rows, sample_plan, target.storage, fraction), RESULT)
    )
    parts = [pa.ipc.open_stream(result).read_all() for result in results]
    rows = sum(int(part.schema.metadata[b"rows"]) for part in parts)
    undeleted_rows = sum(int(part.schema.metadata[b"undeleted-rows"]) for part in parts)
    stated_rows = sum(task.records for task in tasks if not task.deletes)
    if undeleted_rows != stated_rows:
        raise RuntimeError(
            f"the data files without deletes have {undeleted_rows:,} rows, but the manifests state {stated_rows:,}; "
            "nothing is committed"
        )
    return rows, pa.concat_tables([part.replace_schema_metadata(None) for part in parts]).combine_chunks()


def _sample_rows(
    read_plan: ReadPlan, storage: Storage, fraction: float, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield a sample of a task's rows. The metadata of its schema has the number of all rows of the task.

    The metadata also has the number of rows of files without deletes. The sample is deterministic, because the reader
    always returns the rows of a task in the same order.
    """
    batch_list = list(batches)
    generator = np.random.default_rng(
        zlib.crc32(b"".join(pickled_tasks.as_py() for batch in batch_list for pickled_tasks in batch.column(0)))
    )
    tasks = [task for batch in batch_list for task in _decode_tasks(batch)]
    reader = TaskReader(read_plan, storage, threads=False)
    rows_by_deletes, sample_batches = {False: 0, True: 0}, []
    for has_deletes in rows_by_deletes:
        for batch in reader.read_all([task for task in tasks if bool(task.deletes) == has_deletes]):
            rows_by_deletes[has_deletes] += batch.num_rows
            sample_batches.append(batch.filter(pa.array(generator.random(batch.num_rows) < fraction)))
    sink = pa.BufferOutputStream()
    schema = read_plan.arrow.with_metadata(
        {"rows": str(sum(rows_by_deletes.values())), "undeleted-rows": str(rows_by_deletes[False])}
    )
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(
            pa.Table.from_batches(sample_batches, read_plan.arrow).replace_schema_metadata(schema.metadata)
        )
    yield encode_result(sink.getvalue().to_pybytes())


@dataclass(frozen=True)
class ClusterTask:
    """The parameters of the tasks of the second job. Instances can be pickled."""

    clustering: Clustering
    read_plan: ReadPlan
    target: WriteTarget
    tasks: int
    bounds: npt.NDArray[np.bytes_]
    """The first keys of all tasks except the first task."""
    file_rows: int
    suffix: str
    """The suffix of the file names."""

    @staticmethod
    def from_plan(
        clustering: Clustering,
        sample: pa.Table,
        read_plan: ReadPlan,
        target: WriteTarget,
        rows: int,
        files: int,
        cores: int,
        suffix: str,
    ) -> ClusterTask:
        """Choose the number of tasks, and compute the ranges of keys of the tasks from the sample.

        There are at most as many tasks as files, because each task writes at least one file.

        Args:
            clustering: Computes the key of each row, by which rows are sorted and divided.
            sample: A sample of the rows.
            read_plan: The columns to read.
            target: The state of the table that writers need.
            rows: The number of rows.
            files: The approximate number of files to write.
            cores: The number of cores of the Spark cluster.
            suffix: The suffix of the names of the new files.
        """
        tasks = min(files, max(_TASKS_PER_CORE * cores, -(-rows // TASK_ROWS)))
        work = ClusterTask(
            clustering, read_plan, target, tasks, np.empty(0, dtype="S1"), max(1, math.ceil(rows / files)), suffix
        )
        # The keys of the sample are computed by the task itself, so its bounds are set in a second step.
        return replace(work, bounds=choose_range_bounds(to_sortable_keys(work.compute_keys(sample)), tasks))

    def compute_keys(self, rows: pa.Table | pa.RecordBatch) -> npt.NDArray[np.uint8]:
        """Return the keys of rows, as uint8[rows, key bytes].

        In a partitioned table, a key begins with the partition, so the rows of a partition are next to each other.
        """
        keys = self.clustering.compute_keys(rows)
        if not self.target.spec.fields or not rows.num_rows:
            return keys
        batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
        # `add_partition_number` appends the number as the last column. In big-endian order, bytes sort as numbers do.
        partition_numbers = np.concatenate(
            [batch.column(batch.num_columns - 1).to_numpy() for batch in add_partition_number(self.target, batches)]
        )
        return np.concatenate([partition_numbers.astype(">u4").view(np.uint8).reshape(-1, 4), keys], axis=1)


def _write_clustered(task_frame: DataFrame, work: ClusterTask) -> WrittenFiles:
    """Exchange the rows by ranges of keys, sort them, and write the files.

    Raises:
        InvalidRequest: A column has no Spark type.
    """
    fields = [spark_types.StructField(name, kind) for name, kind in _list_spark_types(work.read_plan).items()]
    own_types = [spark_types.BinaryType(), spark_types.IntegerType()]
    fields += [spark_types.StructField(name, kind, False) for name, kind in zip(_OWN_COLUMNS, own_types, strict=True)]
    rows_with_keys = task_frame.mapInArrow(partial(_add_keys, work), spark_types.StructType(fields))
    sorted_rows = rows_with_keys.repartitionById(work.tasks, _TASK).sortWithinPartitions(_KEY)
    results = collect_results(sorted_rows.mapInArrow(partial(_write, work), RESULT))
    return WrittenFiles.join(decode_files(result) for result in results)


def _list_spark_types(read_plan: ReadPlan) -> dict[str, spark_types.DataType]:
    """Return the Spark types of the columns that are read.

    Raises:
        InvalidRequest: A column has no Spark type.
    """
    try:
        kinds = {field.name: convert_to_spark_type(field.type) for field in (*read_plan.fields, *read_plan.lineage)}
    except ValueError as error:
        raise InvalidRequest(f"The table cannot be clustered: {error}") from None
    return {name: kinds[name] for name in read_plan.names}


def _add_keys(work: ClusterTask, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the files with two further columns: the key and the number of the task that writes the row."""
    read_plan = work.read_plan
    conversions = {field.name: find_spark_conversion(field.type) for field in (*read_plan.fields, *read_plan.lineage)}
    for batch in _read_rows(read_plan, work.target.storage, batches):
        keys = work.compute_keys(batch)
        binary = pa.Array.from_buffers(pa.binary(keys.shape[1]), len(keys), [None, pa.py_buffer(keys.tobytes())])
        tasks = np.searchsorted(work.bounds, to_sortable_keys(keys), "right").astype(np.int32)
        columns = [
            column if (convert := conversions[name]) is None else convert(column)
            for name, column in zip(read_plan.names, batch.columns, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(
            [*columns, binary.cast(pa.binary()), pa.array(tasks)], [*read_plan.names, *_OWN_COLUMNS]
        )


def _write(work: ClusterTask, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write rows to files in the order of their keys. All files have about the same number of rows."""
    file_rows = 0
    with TableWriter(work.target, suffix=work.suffix) as writer:
        for batch in batches:
            remaining_rows = batch.drop_columns(list(_OWN_COLUMNS))
            while remaining_rows.num_rows:
                part = remaining_rows.slice(0, work.file_rows - file_rows)
                writer.write(part)
                file_rows, remaining_rows = file_rows + part.num_rows, remaining_rows.slice(part.num_rows)
                if file_rows == work.file_rows:
                    writer.close_files()
                    file_rows = 0
        written_files = writer.close()
    if written_files.files:
        yield encode_result(encode_files(written_files))
