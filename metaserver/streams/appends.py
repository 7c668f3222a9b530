"""The input of an append to stream tables: packed rows, and the producer of the append."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.log.port import Batch, StreamProducer

PRODUCER_CHARACTERS_MAX = 100
"""The maximum length of a producer's name in a request."""


class TableRows(NamedTuple):
    """Packed rows to append to a table.

    Attributes:
        loaded: The table, which `check_stream_table` accepts.
        rows: The rows: one batch for a table without a key, batches by the shard of the keys for a table
            with a key.
    """

    loaded: LoadedTable
    rows: Batch | Mapping[int, Batch]

    @property
    def size_bytes(self) -> int:
        batches = [self.rows] if isinstance(self.rows, Batch) else self.rows.values()
        return sum(batch.size_bytes for batch in batches)


class ProducerKey(NamedTuple):
    """The producer of an append, and the number of the append.

    Attributes:
        principal_name: The principal. Two principals may use the same name of a producer.
        scope: The UUID of the table. Two tables have independent producers.
    """

    principal_name: str
    scope: str
    name: str
    sequence: int

    def to_producer(self) -> StreamProducer:
        """Return the producer in the form of the log, which contains a digest of the principal.

        Stored logs have this form.
        """
        owner = hashlib.sha256(self.principal_name.encode()).hexdigest()[:16]
        return StreamProducer(f"{self.scope}/{owner}/{self.name}", self.sequence)


class TopicProducer(NamedTuple):
    """The producer of the rows of a partition of an input topic.

    Attributes:
        name: The name of the producer (`make_topic_producer_name`).
        offset: Kafka's offset of the last message of the append.
        epoch: The session of the process that reads the partition.
    """

    name: str
    offset: int
    epoch: int

    def to_producer(self) -> StreamProducer:
        """Return the producer in the form of the log. The offsets of messages may have gaps."""
        return StreamProducer(self.name, self.offset, self.epoch, sparse=True)
