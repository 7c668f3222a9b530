"""Splits the bytes of a batch into records of its partition, and joins them again."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.log.kafka.journal import StoredBatch
from seamark.metaserver.log.port import Batch, Record, Shard

RECORD_BYTES_MAX = 900_000
"""The maximum size of a record, because Kafka accepts 1 MB by default. Larger batches have several records."""


def split_batch(batch: Batch) -> list[bytes]:
    """Split the bytes of a batch, its payload and then its kinds, into values that fit into records of Kafka."""
    data = batch.payload + batch.kinds if batch.kinds else batch.payload
    if len(data) <= RECORD_BYTES_MAX:
        return [data]
    return [data[start : start + RECORD_BYTES_MAX] for start in range(0, len(data), RECORD_BYTES_MAX)]


def count_records(batch: Batch) -> int:
    """Return the number of records that `split_batch` makes of a batch, at least 1."""
    return max(1, -(-batch.size_bytes // RECORD_BYTES_MAX))


def build_record(shard: Shard, stored_batch: StoredBatch, values: Mapping[int, bytes]) -> Record:
    """Join the records of a batch. `values` has the value of each record, by Kafka's offset.

    Raises:
        Corrupt: The records do not have the size of the batch.
    """
    pieces = [values[offset] for offset in stored_batch.records]
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(data) != stored_batch.size_bytes:
        raise Corrupt(
            f"The record {stored_batch.records[0]} of shard {shard.number} of stream {shard.stream} in Kafka has "
            f"{len(data)} bytes instead of {stored_batch.size_bytes}: another program has written to the topics of "
            "the log"
        )
    payload, kinds = data[: stored_batch.payload_bytes], data[stored_batch.payload_bytes :]
    batch = Batch(stored_batch.rows, payload, kinds)
    return Record(shard, stored_batch.offset, batch, stored_batch.time_ms, stored_batch.producer, stored_batch.sequence)


def find_batch_index(batches: Sequence[StoredBatch], offset: int) -> int:
    """Return the index of the batch that contains the row at `offset`."""
    return bisect.bisect_right(batches, offset, key=lambda batch: batch.end)
