"""An implementation of `spark.readStream.format("seamark")` for stream tables: the rows of files, then of the log.

    spark.readStream.format("seamark").option("uri", …).option("table", "db.t").option("from", "earliest").load()

Spark's offsets are positions of continuous reads (`connector/streams/reader.py`). The rows between two positions are
always the same, so a batch that Spark repeats after a failure has the same rows. The driver requests the files and the
parts of the log between two positions. Tasks read files from the storage, and rows of the log from the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.values import CURRENT
from seamark.connector.parquet.projection import FileProjection
from seamark.connector.read.changes import INSERT, SnapshotChange
from seamark.connector.read.tables import OpenTable
from seamark.connector.spark.source.reader import CHANGE_TYPE, Options, ReadTask, RowReader, split_tasks
from seamark.connector.spark.types import find_spark_conversion
from seamark.connector.streams.reader import EARLIEST, StreamReads, plan_step
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_bool
from seamark.formats.iceberg.types.schema import Field
from seamark.formats.protocol.wire import STREAM_ENABLED

_POSITION = "position"


def reads_rows(options: Options, metadata: TableMetadata) -> bool:
    """Return whether a stream with these options reads rows of the log, and not only committed snapshots."""
    if options.from_ is not None:
        return True
    return parse_bool(metadata.properties, STREAM_ENABLED, False) and options.start is None and options.at == CURRENT


@dataclass
class LogTask(InputPartition):
    """The input of one Spark task: rows of the log between two positions."""

    reads: StreamReads
    start: str
    end: str
    fields: Sequence[Field]
    names: Sequence[str]

    def read(self) -> Iterator[pa.RecordBatch]:
        position = self.start
        while True:
            step = self.reads.read_step(position, until=self.end)
            if step.is_end:
                return
            position = step.position
            for batch in step.rows.to_batches():
                yield self._convert_for_spark(batch)

    def _convert_for_spark(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with the columns that the table had at the start of the query."""
        file_fields = [field for field in batch.schema if field.name != CHANGE_TYPE]
        projection = FileProjection(file_fields, self.fields, {})
        columns = projection.project_columns(batch, [field.id for field in self.fields], batch.num_rows)
        arrays = []
        by_name = {field.name: field for field in self.fields}
        for name in self.names:
            if name not in by_name:  # This column has the kind of the change.
                arrays.append(batch.column(name))
                continue
            convert = find_spark_conversion(by_name[name].type)
            column = columns[by_name[name].id]
            arrays.append(column if convert is None else convert(column))
        return pa.RecordBatch.from_arrays(arrays, list(self.names))


class RowStreamReader(DataSourceStreamReader):
    """Reads the rows of a table first, and then each row that writers add."""

    def __init__(self, options: Options, table: OpenTable, schema: spark_types.StructType) -> None:
        """Create a reader.

        Raises:
            InvalidRequest: An option is not supported.
        """
        unsupported_options = {
            "where": options.where,
            "limit": options.limit,
            "start-snapshot-id": options.start,
            "end-snapshot-id": options.end,
        }
        names = [name for name, value in unsupported_options.items() if value is not None]
        if names or options.at != CURRENT:
            raise InvalidRequest(
                f"A stream of rows does not support {names[0] if names else 'a branch, tag, snapshot or time'}; set "
                "option('from', …) to the start of the stream, and filter the rows in the query"
            )
        self._options, self._table, self._schema = options, table, schema
        self._reads = StreamReads(
            options.client, options.table, changes=options.changes, skip_changes=options.skip_changes
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state for Spark's tasks, because the partitions contain everything that tasks need."""
        return {}

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        return {_POSITION: self._reads.find_start(self._options.from_ or EARLIEST)}

    def latestOffset(self) -> dict[str, str]:  # noqa: N802
        return {_POSITION: self._reads.locate("latest")}

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Return the tasks of a batch, with the schema at the start of the stream.

        The batch is divided into steps of the log. A step is either a range of the log's rows, or committed files.
        """
        position, end_position = _read_position(start), _read_position(end)
        tasks: list[InputPartition] = []
        columns = {field.name: field for field in self._table.schema.fields}
        names = self._schema.fieldNames()
        fields = [columns[name] for name in names if name in columns]
        while True:
            step = self._reads.read_step(position, until=end_position, limit_bytes=0)
            if step.is_end:
                return tasks
            if step.files is None:
                tasks.append(LogTask(self._reads, position, step.position, fields, names))
            else:
                source_table, scan_tasks = plan_step(self._reads, step.files)
                rows = RowReader(replace(source_table, schema=self._table.schema), self._schema, TRUE)
                changes = (SnapshotChange(INSERT, task) for task in scan_tasks)
                tasks += split_tasks(changes, rows, self._options.split_bytes)
            position = step.position

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return cast("ReadTask | LogTask", partition).read()


def _read_position(offset: dict[str, str]) -> str:
    """Return the position in an offset from Spark's checkpoint.

    Raises:
        InvalidRequest: The offset comes from a stream of snapshots.
    """
    if _POSITION not in offset:
        raise InvalidRequest(
            "The checkpoint is of a query that read committed snapshots only; set option('start-snapshot-id', …) as in "
            "that query, or start a new checkpoint"
        )
    return offset[_POSITION]
