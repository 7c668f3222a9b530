"""The input of an append to stream tables: packed rows, and the producer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.log.port import Batch, StreamProducer

PRODUCER_CHARACTERS_MAX = 100
"""The maximum length of a producer's name in a request."""
_OWNER_DIGITS = 16
"""The number of hexadecimal digits of the digest of a principal in the name of a producer."""


class TableRows(NamedTuple):
    """Packed rows to append to a table.

    Attributes:
        loaded: The table, which `check_stream_table` has accepted as a table to which rows can be streamed.
        rows: One batch for a table without a key, or a batch for each shard of a table with a key.
    """

    loaded: LoadedTable
    rows: Batch | Mapping[int, Batch]

    @property
    def size_bytes(self) -> int:
        batches = [self.rows] if isinstance(self.rows, Batch) else self.rows.values()
        return sum(batch.size_bytes for batch in batches)


class ProducerKey(NamedTuple):
    """The producer of an append, and the sequence number of the append.

    Attributes:
        principal_name: The principal. The producers of two principals with the same name are different producers.
        scope: The UUID of the table. The producers of two tables are different producers.
        name: The name that the principal has chosen.
        sequence: The sequence number of the append.
    """

    principal_name: str
    scope: str
    name: str
    sequence: int

    def to_producer(self) -> StreamProducer:
        """Convert to the producer of the log, whose name contains a digest of the principal.

        The form of the name must not change, because existing logs contain it.
        """
        owner = hashlib.sha256(self.principal_name.encode()).hexdigest()[:_OWNER_DIGITS]
        return StreamProducer(f"{self.scope}/{owner}/{self.name}", self.sequence)


class TopicProducer(NamedTuple):
    """The producer of the rows of a partition of an input topic.

    An input topic is a Kafka topic to which other programs write rows of a table.

    Attributes:
        name: The name of the producer (`make_topic_producer_name`).
        offset: Kafka's offset of the last message of the append.
        epoch: The session of the process that reads the partition.
    """

    name: str
    offset: int
    epoch: int

    def to_producer(self) -> StreamProducer:
        """Return the producer of the log, which is sparse, because the offsets of messages may have gaps."""
        return StreamProducer(self.name, self.offset, self.epoch, sparse=True)
