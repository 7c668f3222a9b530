"""A table's rows written anew, in files by what rows are asked for together: attributes of theirs, and of the tables
that their keys lead to (a fact's customer's city).

    cluster(spark, "db.orders", by=["ordered", "customer.city"], uri=…,
            joins={"customer": Through("db.customers", on={"customer_id": "id"})})

One snapshot is read, by the plan whose files the commit then removes: its rows with all deletes applied, and of a table
with row lineage also which row each is. A first job takes a sample; the driver makes ranks of it, and reads the tables
that are led to: their columns that are named have to fit into its memory. A second job computes each row's key on the
curve, exchanges rows by ranges of keys, sorts them and writes files by `TableWriter`.

The rule it keeps: no row is added, lost or changed. The commit is of the operation `replace`: what others append
meanwhile stays as it is, and a change of the files that were read is a Conflict, after which nothing is visible.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as spark_types

from seamark.connector.client.client import At, Name, SeamarkClient
from seamark.connector.client.errors import BadRequest
from seamark.connector.client.storage import Storage
from seamark.connector.read.lineage import NAMES, has_lineage
from seamark.connector.read.scans import ReadPlan, TaskReader, scan, wanted_of
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan
from seamark.connector.spark.frames.results import RESULT, result_of, told_by
from seamark.connector.spark.frames.writes import WriteReport, decoded, encoded, with_place
from seamark.connector.spark.types import for_spark, spark_type
from seamark.connector.write.appends import TARGET_BYTES, TARGET_BYTES_DEFAULT, TableWriter, WrittenFiles, commit
from seamark.connector.write.clustering import Attributes, Clustering, Reached, cuts, ordered
from seamark.connector.write.curves import CURVES, HILBERT
from seamark.connector.write.target import WriteTarget, target_of, with_lineage
from seamark.metaserver.iceberg.expressions.expression import TRUE
from seamark.metaserver.iceberg.metadata.properties import as_int
from seamark.metaserver.iceberg.metadata.snapshot import MAIN
from seamark.metaserver.wire import INDEX_FILES_MAX

SAMPLE_ROWS, SAMPLE_ROWS_A_FILE, SAMPLE_ROWS_MAX = 100_000, 100, 1_000_000
TASK_ROWS = 1_000_000
"""Rows that a task is to sort and write, about."""
_READ_BYTES = 128 << 20
"""Of data files that a task reads."""
_TASKS_A_CORE = 3
_FILE_BYTES_MAX = 2**31 - 1
"""The property's largest value: files end by their rows."""
_KEY, _TASK = "_seamark_key", "_seamark_task"
_OWN = (_KEY, _TASK)
_GIVEN = "tasks binary"


@dataclass(frozen=True)
class Through:
    """Another table, and how rows lead to one of it: column of theirs → column of it, one or more. A column of theirs
    may be one of a table of the same `joins` before it, as `customer.nation_id`."""

    table: Name
    on: Mapping[str, str]


def cluster(
    spark: SparkSession,
    table: Name,
    by: Sequence[str],
    *,
    joins: Mapping[str, Through] | None = None,
    curve: str = HILBERT,
    files: int | None = None,
    target_file_bytes: int | None = None,
    uri: str | None = None,
    client: SeamarkClient | None = None,
    branch: str = MAIN,
    summary: Mapping[str, str] | None = None,
) -> WriteReport:
    """One commit of a snapshot's rows in other files; None of it where there are none.

    `by` are columns, or `name.column` of a table of `joins`, in no order that counts. Files are `files`, or a few more,
    of about equal numbers of rows; or of about `target_file_bytes`, by default as the table's property says. `uri` or a
    `client` says where the server is.

    ValueError and BadRequest for what makes no sense; Conflict where a file that was read was changed meanwhile.
    """
    if client is None:
        if not uri:
            raise ValueError("Give uri, the server's address, or a client")
        client = SeamarkClient(uri)
    if curve not in CURVES:
        raise ValueError(f"there is no curve {curve!r}: there are {', '.join(CURVES)}")
    if files is not None and (files < 1 or target_file_bytes is not None):
        raise ValueError("give files, at least 1, or target_file_bytes")
    opened = open_table(client, table, At(ref=branch))
    if opened.metadata.format_version == 1:
        raise BadRequest("The table has format version 1, of which no files are replaced; upgrade it to version 2")
    target = target_of(opened.metadata, opened.storage)
    names = [one.name for one in opened.schema.fields]
    if has_lineage(opened.metadata):
        names, target = [*names, *NAMES], with_lineage(target)
    wanted = wanted_of(opened, names, TRUE)
    attributes = Attributes(by, _reached(client, by, joins or {}), wanted.arrow)
    tasks = list(plan(client, opened))
    if not tasks:
        return WriteReport(0, 0, 0, 0, (), None)
    given = _frame(spark, tasks)
    size_bytes = sum(one.size_bytes for one in tasks)
    count = files or _count(target, size_bytes, target_file_bytes)
    rows, sample = _sample(given, wanted, target, attributes, count, sum(one.records for one in tasks))
    target = replace(target, properties={**target.properties, TARGET_BYTES: str(_FILE_BYTES_MAX)})
    work = ClusterTask.of(Clustering.of(attributes, sample, curve), sample, wanted, target, rows, count, _cores(spark))
    written = _written(given, work)
    if written.rows != rows:
        written.discard(target.storage)
        raise RuntimeError(f"{rows:,} rows were read and {written.rows:,} written; nothing is committed")
    written = written.with_allowed_indexes(target.storage)
    told = {"engine-name": "spark", "engine-version": spark.version, "clustered-by": f"{curve}({', '.join(by)})"}
    body = {**_body(opened, tasks, written, branch), "summary": {**told, **(summary or {})}}
    answer = commit(client, table, body, partial(written.discard, target.storage))
    index_files = min(len(written.index_files), INDEX_FILES_MAX)
    return WriteReport(len(written.files), written.rows, written.size_bytes, index_files, written.skipped, answer)


def _reached(client: SeamarkClient, by: Sequence[str], joins: Mapping[str, Through]) -> dict[str, Reached]:
    """The columns that are named, of the tables' current rows."""
    named = [*by, *(column for one in joins.values() for column in one.on)]
    found = {}
    for name, one in joins.items():
        asked = [text.removeprefix(f"{name}.") for text in named if text.startswith(f"{name}.")]
        columns = list(dict.fromkeys([*one.on.values(), *asked]))
        found[name] = Reached(scan(client, one.table, columns).to_arrow(), one.on)
    return found


def _count(target: WriteTarget, size_bytes: int, file_bytes: int | None) -> int:
    """How many files of the target's size."""
    most = file_bytes or as_int(target.properties, TARGET_BYTES, TARGET_BYTES_DEFAULT)
    return max(1, -(-size_bytes // max(1, most)))


def _body(opened: OpenTable, tasks: Sequence[ScanTask], written: WrittenFiles, branch: str) -> dict[str, Any]:
    """Delete files that are of none but these data files go, too: their rows are not written again."""
    deletes = {one["file-path"]: one for task in tasks for one in task.deletes if not one.get("referenced-data-file")}
    return {
        "operation": "replace",
        "branch": branch,
        "table-uuid": opened.metadata.table_uuid,
        "schema-id": opened.metadata.current_schema_id,
        "read-snapshot-id": opened.snapshot_id,
        "add": list(written.files),
        "remove": [{"file-path": path} for path in (*(one.path for one in tasks), *deletes)],
        "index-files": list(written.index_files),
    }


# What tasks do


def _cores(spark: SparkSession) -> int:
    return int(spark.sparkContext.defaultParallelism)


def _frame(spark: SparkSession, tasks: Sequence[ScanTask]) -> DataFrame:
    """A row, and a partition, for the files of one of Spark's tasks."""
    size_bytes = sum(one.size_bytes for one in tasks)
    parts = min(len(tasks), max(_TASKS_A_CORE * _cores(spark), -(-size_bytes // _READ_BYTES)))
    given = [(bytearray(pickle.dumps(tasks[number::parts])),) for number in range(parts)]
    return spark.createDataFrame(spark.sparkContext.parallelize(given, parts), _GIVEN)


def _read(wanted: ReadPlan, storage: Storage, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for one in batch.column(0):
            yield from TaskReader(wanted, storage, threads=False).read_all(pickle.loads(one.as_py()))  # noqa: S301


def _sample(
    given: DataFrame,
    wanted: ReadPlan,
    target: WriteTarget,
    attributes: Attributes,
    files: int,
    records: int,
) -> tuple[int, pa.Table]:
    """How many rows there are, and some of them: columns that keys are made of."""
    whole = target.spec.fields or not attributes.columns  # a partition is told of rows as a whole
    narrow = wanted if whole else replace(wanted, names=tuple(attributes.columns))
    few = min(SAMPLE_ROWS_MAX, max(SAMPLE_ROWS, SAMPLE_ROWS_A_FILE * files))
    found = told_by(given.mapInArrow(partial(_sampled, narrow, target.storage, few / max(1, records)), RESULT))
    parts = [pa.ipc.open_stream(one).read_all() for one in found]
    rows = sum(int(one.schema.metadata[b"rows"]) for one in parts)
    return rows, pa.concat_tables([one.replace_schema_metadata(None) for one in parts]).combine_chunks()


def _sampled(
    wanted: ReadPlan, storage: Storage, fraction: float, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The same rows each time, as the reader gives them in the same order."""
    given = list(batches)
    draw = np.random.default_rng(zlib.crc32(b"".join(one.as_py() for batch in given for one in batch.column(0))))
    rows, taken = 0, []
    for batch in _read(wanted, storage, given):
        rows += batch.num_rows
        taken.append(batch.filter(pa.array(draw.random(batch.num_rows) < fraction)))
    sink = pa.BufferOutputStream()
    schema = wanted.arrow.with_metadata({"rows": str(rows)})
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(pa.Table.from_batches(taken, wanted.arrow).replace_schema_metadata(schema.metadata))
    yield result_of(sink.getvalue().to_pybytes())


@dataclass(frozen=True)
class ClusterTask:
    """What a task has to know. Picklable."""

    clustering: Clustering
    wanted: ReadPlan
    target: WriteTarget
    tasks: int
    cuts: npt.NDArray[np.bytes_]
    """Of keys, where the next task's begin."""
    file_rows: int

    @staticmethod
    def of(
        clustering: Clustering,
        sample: pa.Table,
        wanted: ReadPlan,
        target: WriteTarget,
        rows: int,
        files: int,
        cores: int,
    ) -> ClusterTask:
        tasks = min(files, max(_TASKS_A_CORE * cores, -(-rows // TASK_ROWS)))
        work = ClusterTask(clustering, wanted, target, tasks, np.empty(0, dtype="S1"), max(1, math.ceil(rows / files)))
        return replace(work, cuts=cuts(ordered(work.keys(sample)), tasks))

    def keys(self, rows: pa.Table | pa.RecordBatch) -> npt.NDArray[np.uint8]:
        """Of a partitioned table the rows of a partition are together, whatever their attributes."""
        keys = self.clustering.keys(rows)
        if not self.target.spec.fields or not rows.num_rows:
            return keys
        batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
        places = np.concatenate(
            [one.column(one.num_columns - 1).to_numpy() for one in with_place(self.target, batches)]
        )
        return np.concatenate([places.astype(">u4").view(np.uint8).reshape(-1, 4), keys], axis=1)


def _written(given: DataFrame, work: ClusterTask) -> WrittenFiles:
    fields = [spark_types.StructField(name, kind) for name, kind in _spark_types(work.wanted).items()]
    own = [spark_types.BinaryType(), spark_types.IntegerType()]
    fields += [spark_types.StructField(name, kind, False) for name, kind in zip(_OWN, own, strict=True)]
    keyed = given.mapInArrow(partial(_keyed, work), spark_types.StructType(fields))
    spread = keyed.repartitionById(work.tasks, _TASK).sortWithinPartitions(_KEY)
    found = told_by(spread.mapInArrow(partial(_write, work), RESULT))
    return WrittenFiles.joined(decoded(one) for one in found)


def _spark_types(wanted: ReadPlan) -> dict[str, spark_types.DataType]:
    """BadRequest for a column that Spark has no type for."""
    try:
        kinds = {one.name: spark_type(one.type) for one in (*wanted.fields, *wanted.lineage)}
    except ValueError as error:
        raise BadRequest(f"The table cannot be clustered: {error}") from None
    return {name: kinds[name] for name in wanted.names}


def _keyed(work: ClusterTask, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    wanted = work.wanted
    converts = {one.name: for_spark(one.type) for one in (*wanted.fields, *wanted.lineage)}
    for batch in _read(wanted, work.target.storage, batches):
        keys = work.keys(batch)
        binary = pa.Array.from_buffers(pa.binary(keys.shape[1]), len(keys), [None, pa.py_buffer(keys.tobytes())])
        tasks = np.searchsorted(work.cuts, ordered(keys), "right").astype(np.int32)
        columns = [
            column if (convert := converts[name]) is None else convert(column)
            for name, column in zip(wanted.names, batch.columns, strict=True)
        ]
        yield pa.RecordBatch.from_arrays([*columns, binary.cast(pa.binary()), pa.array(tasks)], [*wanted.names, *_OWN])


def _write(work: ClusterTask, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows in the order of their keys into files of as many rows each."""
    held = 0
    with TableWriter(work.target) as writer:
        for batch in batches:
            rest = batch.drop_columns(list(_OWN))
            while rest.num_rows:
                part = rest.slice(0, work.file_rows - held)
                writer.write(part)
                held, rest = held + part.num_rows, rest.slice(part.num_rows)
                if held == work.file_rows:
                    writer.cut()
                    held = 0
        written = writer.close()
    if written.files:
        yield result_of(encoded(written))
