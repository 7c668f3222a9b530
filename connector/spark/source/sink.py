"""Implements the writer of `format("seamark")` for batches (`df.write`) and streams (`df.writeStream`).

    df.write.format("seamark").option("uri", …).option("table", "db.events").mode("append").save()
    stream.writeStream.format("seamark").option("uri", …).option("table", …).option("checkpointLocation", …).start()

`mode("overwrite")` replaces the rows that match the option `replace-where`, by default all rows. With the option
`replace-partitions`, it replaces the partitions of the new rows. Rows are written in Spark's distribution. Shuffle them
first, or use `frames.writes.write`, which distributes rows by the table's distribution mode.

A stream commits each batch once. The commit contains the id of the query, which Spark stores in the checkpoint, and the
number of the batch. A batch with the same id and number is not committed again. Spark repeats only the last batch, with
the same rows. If a batch is not the last batch, its checkpoint is older than the table. The writer then refuses the
batch, because its rows may not be in the table.

Invariants: a batch is skipped only if the table contains the same batch. A file to which a snapshot may
refer is never deleted. Spark aborts a write after a failed commit, even if the outcome is unknown. Therefore
`abort` deletes nothing, and the files of other tasks of a failed job remain as orphan files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import Producer
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.spark.frames.writes import decode_files, encode_files
from seamark.connector.spark.source.options import open_client_and_table, parse_flag
from seamark.connector.spark.types import check_fits
from seamark.connector.write.appends import APPEND, OVERWRITE, OVERWRITE_PARTITIONS, Destination, open_destination
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.protocol.wire import PRODUCER_KEY, SEQUENCE_KEY

OPTIONS = frozenset({"uri", "table", "path", "token", "branch", "replace-where", "replace-partitions"})
_LOG = "log"  # If this option is true, `log_sink.py` writes.
_QUERY_ID = "sql.streaming.queryId"
_PRODUCER_PREFIX = "spark-stream-"


@dataclass
class SinkCommit(WriterCommitMessage):
    """The files that a task has written, with their table and streaming query."""

    data: bytes
    table_uuid: str
    query_id: str | None


@dataclass(frozen=True)
class SinkOptions:
    """The parsed options of a writer: the client, and the table to write."""

    client: SeamarkClient = field(repr=False)
    into: Destination

    @staticmethod
    def parse(raw_options: Mapping[str, str], schema: StructType, *, overwrite: bool, streaming: bool) -> SinkOptions:
        """Parse the options of a writer.

        Args:
            raw_options: The options of the user. Spark may change the case of their names.
            schema: The columns of the rows to write.
            overwrite: Whether the mode is `overwrite`. Only this mode allows a choice of the replaced rows.
            streaming: Whether a streaming query writes. Spark then adds its own options, which are also allowed.

        Raises:
            InvalidRequest: Options are unknown, or cannot be combined.
            Unwritable: Columns do not fit the table.
        """
        options = {name.lower(): value for name, value in raw_options.items()}
        option_names = OPTIONS | ({"checkpointlocation", "queryname", _LOG} if streaming else frozenset())
        if unknown := sorted(options.keys() - option_names):
            raise InvalidRequest(f"Unknown options {', '.join(unknown)}; the options are {', '.join(sorted(OPTIONS))}")
        client, table = open_client_and_table(options)
        replaces_partitions = parse_flag(options, "replace-partitions", False)
        if not overwrite and (replaces_partitions or "replace-where" in options):
            raise InvalidRequest("replace-where and replace-partitions require mode('overwrite')")
        if replaces_partitions and "replace-where" in options:
            raise InvalidRequest("replace-where and replace-partitions are both set; set only one of them")
        mode = APPEND if not overwrite else OVERWRITE_PARTITIONS if replaces_partitions else OVERWRITE
        destination = open_destination(
            client, table, mode, where=options.get("replace-where", True), branch=options.get("branch", MAIN)
        )
        check_fits(schema, destination.target)
        return SinkOptions(client, destination)


class BatchWriter(DataSourceArrowWriter):
    """Writes the rows of `df.write` in tasks, and commits the files on the driver."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write_files(self._options.into, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._options.into.commit(self._options.client, _join_files(messages), summary={"engine-name": "spark"})

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete nothing.

        Spark also aborts a write after a commit with an unknown outcome, so a snapshot may refer to the files.
        """


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes each batch of `df.writeStream` in tasks, and commits it exactly once."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write_files(self._options.into, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the files of a batch, unless the table already contains the batch.

        The commit stores the id of the query and the number of the batch. When Spark repeats a batch after a failure,
        the server recognizes it by these two values.

        Raises:
            InvalidRequest: The table was replaced by another table, Spark reports no id of the query, or the table has
                later batches of the query.
        """
        # Spark creates a new writer for the commit. By then, the name may refer to another table.
        table_uuid = self._options.into.target.table_uuid
        if any(isinstance(message, SinkCommit) and message.table_uuid != table_uuid for message in messages):
            raise InvalidRequest(
                "The table was replaced by another table while rows were written; start the query again"
            )
        query_id = next(
            (message.query_id for message in messages if isinstance(message, SinkCommit) and message.query_id), None
        )
        if query_id is None and any(isinstance(message, SinkCommit) for message in messages):
            raise InvalidRequest(
                "Spark reports no id of this query, so Seamark cannot commit each batch exactly once; write batches "
                "with foreachBatch and seamark.spark.write(…, producer=(name of the query, number of the batch))"
            )
        producer = None if query_id is None else (_PRODUCER_PREFIX + query_id, batchId)
        answer = self._options.into.commit(
            self._options.client, _join_files(messages), producer=producer, summary={"engine-name": "spark"}
        )
        if producer is not None and answer is not None and answer["duplicate"]:
            self._check_last(producer, answer["snapshot-id"])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete nothing.

        Spark also aborts a write after a commit with an unknown outcome, so a snapshot may refer to the files.
        """

    def _check_last(self, producer: Producer, snapshot_id: int | None) -> None:
        """Check that an already committed batch is the last batch of its query.

        Args:
            producer: The id of the query, and the number of the batch.
            snapshot_id: The snapshot of the batch, or None if the server did not find it because of later batches.

        Raises:
            InvalidRequest: The table has later batches of the query.
        """
        destination, (name, number) = self._options.into, producer
        engine_table = self._options.client.load_table(destination.table, history=True)
        summaries = (
            snapshot.build_summary_map()
            for snapshot in decode_table(engine_table.metadata, engine_table.location).snapshots
        )
        batch_numbers = [int(summary[SEQUENCE_KEY]) for summary in summaries if summary.get(PRODUCER_KEY) == name]
        if snapshot_id is None or max(batch_numbers, default=number) > number:
            latest = max(batch_numbers, default="a later one")
            raise InvalidRequest(
                f"The table already has batch {number} of this query, and later batches up to {latest}: the checkpoint "
                "is older than the table, and the batch may have different rows now. Nothing was written. Continue "
                "with the newest checkpoint; if it is lost, start a new checkpoint after the table's last row"
            )


def _write_files(destination: Destination, batches: Iterator[pa.RecordBatch]) -> SinkCommit:
    context = TaskContext.get()
    query_id = None if context is None else context.getLocalProperty(_QUERY_ID)
    return SinkCommit(encode_files(write_batches(destination.target, batches)), destination.target.table_uuid, query_id)


def _join_files(messages: Sequence[WriterCommitMessage | None]) -> WrittenFiles:
    return WrittenFiles.join(decode_files(message.data) for message in messages if isinstance(message, SinkCommit))
