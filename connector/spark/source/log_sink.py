"""An implementation of `writeStream.format("seamark").option("log", "true")`.

Each batch is one append to the log of a stream table.

    stream.writeStream.format("seamark").option("uri", …).option("table", "db.t").option("log", "true").start()

Tasks return their rows to the driver, which appends the rows of all tasks in one request. All rows of a batch become
durable and visible together, without a commit of the table. The producer of the request is the id of the query, which
Spark stores in the checkpoint. The sequence number of the request is the number of the batch. A batch that Spark
repeats after a failure is stored once, even if the order of its rows or their tasks have changed.

The batches of a query have the numbers 0, 1, 2 and so on, and the log refuses a gap in the numbers. Therefore it
refuses a batch whose checkpoint is too old, and a batch of a query that wrote earlier batches by commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest, Refused
from seamark.connector.spark.source.options import open_client_and_table, parse_flag
from seamark.connector.spark.types import check_fits
from seamark.connector.streams.writer import ARROW, send_rows
from seamark.connector.write.appends import APPEND, open_destination
from seamark.formats.iceberg.metadata.properties import parse_bool
from seamark.formats.protocol.wire import STREAM_ENABLED

LOG = "log"
_OPTIONS = frozenset({"uri", "table", "path", "token", LOG})
_SPARK_OPTIONS = frozenset({"checkpointlocation", "queryname"})
_KIND_COLUMN = "_op"
"""The column with the operation of each row, unless the table has a column with this name."""
_QUERY_ID = "sql.streaming.queryId"
_PRODUCER_PREFIX = "spark-stream-"
_TIMEOUT_S = 120.0


def writes_log(raw_options: Mapping[str, str]) -> bool:
    """Return whether a stream with these options writes through the log.

    Raises:
        InvalidRequest: The value of the option `log` is neither true nor false.
    """
    return parse_flag({name.lower(): value for name, value in raw_options.items()}, LOG, False)


@dataclass
class RowsMessage(WriterCommitMessage):
    """The rows of a task as an Arrow IPC stream, with their table and streaming query.

    Spark sends it from the task to the driver, which appends the rows of all tasks.
    """

    rows: bytes
    table_uuid: str
    query_id: str | None


@dataclass(frozen=True)
class LogSinkOptions:
    """The parsed options of a writer.

    Attributes:
        client: The client of the table's server.
        table: The name of the table.
        table_uuid: The UUID of the table, by which a replaced table is recognised.
    """

    client: SeamarkClient = field(repr=False)
    table: str
    table_uuid: str

    @staticmethod
    def parse(raw_options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> LogSinkOptions:
        """Parse the options of a writer.

        Raises:
            InvalidRequest: Options are unknown, or the table is not a stream table.
            Unwritable: Columns do not fit the table.
        """
        options = {name.lower(): value for name, value in raw_options.items()}
        if unknown := sorted(options.keys() - _OPTIONS - _SPARK_OPTIONS):
            raise InvalidRequest(
                f"Unknown options {', '.join(unknown)} with option('log', 'true'); the options are "
                f"{', '.join(sorted(_OPTIONS))}"
            )
        if overwrite:
            raise InvalidRequest("The log takes rows of outputMode('append') only; write other modes with foreachBatch")
        client, table = open_client_and_table(options)
        destination = open_destination(client, table, APPEND)
        if not parse_bool(destination.target.properties, STREAM_ENABLED, False):
            raise InvalidRequest(f"{table} is not a stream table; set its property {STREAM_ENABLED} to true")
        # If the table has no column of this name, the column of the rows states the kind of each change.
        is_kind_separate = all(column.name != _KIND_COLUMN for column in destination.target.schema.fields)
        columns = [column for column in schema.fields if not (is_kind_separate and column.name == _KIND_COLUMN)]
        check_fits(StructType(columns), destination.target)
        return LogSinkOptions(client, table, destination.target.table_uuid)


class LogWriter(DataSourceStreamArrowWriter):
    """Appends each batch of a query to the log."""

    def __init__(self, options: LogSinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(_QUERY_ID)
        return RowsMessage(_encode([batch for batch in iterator if batch.num_rows]), self._options.table_uuid, query_id)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Append the rows of all tasks to the log in one request.

        The query and the number of the batch identify the append, so a repeated commit writes nothing.

        Raises:
            InvalidRequest: The server refuses the rows, or the table has later batches of the query.
        """
        task_messages = [message for message in messages if isinstance(message, RowsMessage)]
        if any(message.table_uuid != self._options.table_uuid for message in task_messages):
            raise InvalidRequest(
                "The table was replaced by another table while rows were written; start the query again"
            )
        query_id = next((message.query_id for message in task_messages if message.query_id), None)
        if query_id is None:
            raise InvalidRequest("Spark reports no id of this query, so Seamark cannot append each batch exactly once")
        body = _encode([batch for message in task_messages for batch in _decode(message.rows)])
        options, producer = self._options, (_PRODUCER_PREFIX + query_id, batchId)
        try:
            answer = send_rows(options.client, options.table, body, ARROW, producer, timeout_s=_TIMEOUT_S)
        except Refused as error:
            raise InvalidRequest(_explain(error, batchId)) from error
        if (later := answer.get("last_sequence")) is not None:
            raise InvalidRequest(
                f"The table already has batch {batchId} of this query, and later batches up to {later}: the checkpoint "
                "is older than the table, and the batch may have different rows now. Nothing was written. Continue "
                "with the newest checkpoint; if it is lost, start a new checkpoint after the table's last row"
            )

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing, because the rows of a batch are stored nowhere before they are appended."""


def _explain(error: Refused, batch: int) -> str:
    """Return a message with the server's error, its cause, and what the user of the query can do."""
    if error.status == 409:
        return (
            f"The log of the table does not have the batches of this query before batch {batch}: {error}. Earlier "
            "batches were written without option('log', 'true'), or the query was stopped for longer than the log "
            "remembers its producers (stream_log_retention_s). Start a new checkpoint after the table's last row"
        )
    if error.status == 413:
        return (
            f"Batch {batch} has too many rows for one append: {error}. Continue this query without "
            "option('log', 'true'), or start a new checkpoint with smaller batches (for example maxOffsetsPerTrigger)"
        )
    return f"The server refuses batch {batch}: {error}"


def _encode(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Return batches with one schema as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema if batches else pa.schema([])) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return bytes(sink.getvalue())


def _decode(rows: bytes) -> list[pa.RecordBatch]:
    with pa.ipc.open_stream(rows) as stream:
        return list(stream)
