"""The writing half of `format("seamark")`: batches by `df.write`, streams by `df.writeStream`.

    df.write.format("seamark").option("uri", …).option("table", "db.events").mode("append").save()
    stream.writeStream.format("seamark").option("uri", …).option("table", …).option("checkpointLocation", …).start()

`mode("overwrite")` puts the rows in the place of those that the option `replace-where` holds, of all by default; with
`replace-partitions` in the place of their partitions. Rows come as Spark has them spread over its tasks: shuffle first,
or use `writing.write`, which does it as the table asks.

A stream commits each of its batches once. The commit names the query, by the id that Spark keeps in its checkpoint, and
the batch's number; what was committed under these before is not committed again, whatever was lost or run twice. Spark
runs only the last batch again, with the rows that it had. So a batch before the last is none of these, but comes of a
checkpoint that is older than the table: it is refused, as rows in it may not be in the table yet.

The rules it keeps. A batch is taken for one that is in the table only where it is that one. And no file is deleted that
a snapshot may name: Spark aborts a write whose commit failed, also where nobody knows whether it did; so aborting
deletes nothing, and what other tasks of a failed job wrote stays as orphans.
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
from seamark.connector.client.errors import BadRequest
from seamark.connector.spark.frames.writes import decoded, encoded
from seamark.connector.spark.source.options import flag, server_of
from seamark.connector.spark.types import check_fits
from seamark.connector.write.appends import (
    APPEND,
    OVERWRITE,
    OVERWRITE_PARTITIONS,
    Destination,
    WrittenFiles,
    destination,
    write_batches,
)
from seamark.metaserver.iceberg.metadata.snapshot import MAIN
from seamark.metaserver.iceberg.metadata.table_json import decode_table
from seamark.metaserver.wire import PRODUCER_KEY, SEQUENCE_KEY

OPTIONS = frozenset({"uri", "table", "path", "token", "branch", "replace-where", "replace-partitions"})
_QUERY_ID = "sql.streaming.queryId"
_PRODUCER_PREFIX = "spark-stream-"


@dataclass
class SinkCommit(WriterCommitMessage):
    """What one task has written, for which table and which streaming query."""

    data: bytes
    table_uuid: str
    query_id: str | None


@dataclass(frozen=True)
class SinkOptions:
    """What was given to `option`, of a writer."""

    client: SeamarkClient = field(repr=False)
    into: Destination

    @staticmethod
    def of(given: Mapping[str, str], schema: StructType, *, overwrite: bool, streaming: bool) -> SinkOptions:
        """BadRequest for what is not known or makes no sense; Unwritable for columns that do not fit the table."""
        options = {name.lower(): value for name, value in given.items()}
        known = OPTIONS | ({"checkpointlocation", "queryname"} if streaming else frozenset())
        if unknown := sorted(options.keys() - known):
            raise BadRequest(f"Unknown options {', '.join(unknown)}: there are {', '.join(sorted(OPTIONS))}")
        client, table = server_of(options)
        partitions = flag(options, "replace-partitions", False)
        if not overwrite and (partitions or "replace-where" in options):
            raise BadRequest("replace-where and replace-partitions are of mode('overwrite')")
        if partitions and "replace-where" in options:
            raise BadRequest("replace-where and replace-partitions are both given; say in one way what is replaced")
        mode = APPEND if not overwrite else OVERWRITE_PARTITIONS if partitions else OVERWRITE
        into = destination(
            client, table, mode, where=options.get("replace-where", True), branch=options.get("branch", MAIN)
        )
        check_fits(schema, into.target)
        return SinkOptions(client, into)


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _written(self._options.into, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._options.into.commit(self._options.client, _joined(messages), summary={"engine-name": "spark"})

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing: see above."""


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _written(self._options.into, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        # This writer was made anew for the commit, and the name may lead elsewhere by now.
        table_uuid = self._options.into.target.table_uuid
        if any(isinstance(one, SinkCommit) and one.table_uuid != table_uuid for one in messages):
            raise BadRequest("The table was replaced by another while rows were written for it; start the query again")
        query = next((one.query_id for one in messages if isinstance(one, SinkCommit) and one.query_id), None)
        if query is None and any(isinstance(one, SinkCommit) for one in messages):
            raise BadRequest(
                "Spark does not tell which query this is, by which each batch is committed once; write its batches by "
                "foreachBatch and seamark.spark.write(…, producer=(a name of the query, the batch's number))"
            )
        producer = None if query is None else (_PRODUCER_PREFIX + query, batchId)
        answer = self._options.into.commit(
            self._options.client, _joined(messages), producer=producer, summary={"engine-name": "spark"}
        )
        if producer is not None and answer is not None and answer["duplicate"]:
            self._check_last(producer, answer["snapshot-id"])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: see above."""

    def _check_last(self, producer: Producer, snapshot_id: int | None) -> None:
        """BadRequest unless the batch that was committed before is the last. Of the last the snapshot is known."""
        into, (name, number) = self._options.into, producer
        loaded = self._options.client.load_table(into.table, history=True)
        told = (one.summary_map() for one in decode_table(loaded.metadata, loaded.location).snapshots)
        later = [int(said[SEQUENCE_KEY]) for said in told if said.get(PRODUCER_KEY) == name]
        if snapshot_id is None or max(later, default=number) > number:
            last = max(later, default="a later one")
            raise BadRequest(
                f"Batch {number} of this query is in the table already, and was followed by others, up to {last}: the "
                "checkpoint is older than the table, and the batch may have other rows now. Nothing was written. Go "
                "on with the newest checkpoint; if that is lost, start with a new one, from where the table ends"
            )


def _written(into: Destination, batches: Iterator[pa.RecordBatch]) -> SinkCommit:
    context = TaskContext.get()
    query = None if context is None else context.getLocalProperty(_QUERY_ID)
    return SinkCommit(encoded(write_batches(into.target, batches)), into.target.table_uuid, query)


def _joined(messages: Sequence[WriterCommitMessage | None]) -> WrittenFiles:
    return WrittenFiles.joined(decoded(one.data) for one in messages if isinstance(one, SinkCommit))
