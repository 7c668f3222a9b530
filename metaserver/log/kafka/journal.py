"""The records of the journal: one partition that orders the changes of a log.

A replica first writes rows to the partitions of their shards. It then writes one record to the journal, which names
these rows by Kafka's offsets. The rows exist from that record on. Every replica reads the whole journal and applies its
records in the same order to the same state (`journal_state.py`). So all replicas have the same offsets of rows, the
same producers and the same removed streams. A replica answers an append after it has read its own record again.

A record depends on nothing but the records before it: its times and limits are values in the record.
"""

from __future__ import annotations

import zlib

import msgspec

from seamark.formats.runtime.decoding import convert_msgpack
from seamark.formats.runtime.errors import LogUnavailable
from seamark.metaserver.log.port import Shard
from seamark.metaserver.log.state import StateSummary

VERSION = 1
HEAD_PIECE_BYTES = 512 << 10
"""The maximum size of a piece of a head, below the largest record that a broker accepts by default (1 MB)."""


class RowsEntry(msgspec.Struct, frozen=True, array_like=True):
    """One batch of an append, whose bytes are in the partition of its shard.

    Attributes:
        records: Kafka's offsets of the records that have the bytes, one after the other. They need not ascend: a piece
            may be written again after the pieces that follow it (`KafkaBroker.write`).
    """

    stream: str
    number: int
    rows: int
    payload_bytes: int
    kinds_bytes: int
    records: tuple[int, ...]

    @property
    def shard(self) -> Shard:
        return Shard(self.stream, self.number)


class AppendRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Append all these batches or none."""

    batches: tuple[RowsEntry, ...]
    producer: str = ""
    sequence: int = -1
    epoch: int = 0
    sparse: bool = False


class FenceRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Begin a session of a producer."""

    producer: str


class RemoveRequest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Remove a stream."""

    stream: str


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Allow retention to remove rows: stream, shard number and offset of the row after the last of them."""

    offsets: tuple[tuple[str, int, int], ...]


class ShardStart(msgspec.Struct, frozen=True, array_like=True):
    """The first row of a shard that stays.

    Attributes:
        offset: The offset of the row.
        record: Kafka's offset of the first record that stays.
    """

    stream: str
    number: int
    offset: int
    record: int


class TrimRequest(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Remove released rows, and forget producers and removed streams.

    Attributes:
        starts: The shards that lose rows.
        keep_ms: The time for which producers and removed streams are remembered.
    """

    starts: tuple[ShardStart, ...]
    keep_ms: int


Request = AppendRequest | FenceRequest | RemoveRequest | ReleaseRequest | TrimRequest


class JournalGroup(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Requests of one replica, which are applied one after the other.

    Attributes:
        writer: The id of the replica's log since it was opened.
        number: The number of the group among the groups of the writer.
        time_ms: The time of the replica.
    """

    version: int
    writer: str
    number: int
    time_ms: int
    requests: tuple[Request, ...]


class HeadPiece(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A piece of a head: the state of the log after all records before `after`.

    Attributes:
        head: The id of the head.
        after: The offset of the first record that the state does not contain.
        place: The place of the piece among `count` pieces.
    """

    version: int
    head: str
    after: int
    place: int
    count: int
    data: bytes


JournalRecord = JournalGroup | HeadPiece


class StoredBatch(msgspec.Struct, frozen=True, array_like=True):
    """The position of one batch: its rows in the shard, and its records in Kafka."""

    offset: int
    rows: int
    payload_bytes: int
    kinds_bytes: int
    records: tuple[int, ...]
    time_ms: int
    producer: str = ""
    sequence: int = -1

    @property
    def end(self) -> int:
        """The offset after the last row."""
        return self.offset + self.rows

    @property
    def size_bytes(self) -> int:
        return self.payload_bytes + self.kinds_bytes


class ShardBatches(msgspec.Struct, frozen=True, array_like=True):
    """The batches of a shard in a head.

    Attributes:
        first_record: Kafka's offset below which records may be deleted.
    """

    stream: str
    number: int
    first_record: int
    batches: list[StoredBatch]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The state of a log after a number of records."""

    state: StateSummary
    shards: list[ShardBatches]


def encode_group(group: JournalGroup) -> bytes:
    return msgspec.msgpack.encode(group)


def decode_record(data: bytes) -> JournalRecord:
    """Return a record of the journal.

    Raises:
        LogUnavailable: A later version of Seamark wrote the record, or another program did.
    """
    try:
        record: JournalRecord = convert_msgpack(data, JournalRecord)
    except msgspec.DecodeError:
        raise LogUnavailable(
            "The journal of the log in Kafka has a record that this version of Seamark cannot read; upgrade this server"
        ) from None
    if record.version != VERSION:
        raise LogUnavailable(
            f"The journal of the log in Kafka has a record of version {record.version}, and this server reads version "
            f"{VERSION}; run the same version of Seamark on all replicas"
        )
    return record


def encode_head(head: Head, head_id: str, after: int) -> list[bytes]:
    """Return the records of a head."""
    data = zlib.compress(msgspec.msgpack.encode(head), 1)
    pieces = [data[start : start + HEAD_PIECE_BYTES] for start in range(0, len(data), HEAD_PIECE_BYTES)]
    return [
        msgspec.msgpack.encode(HeadPiece(VERSION, head_id, after, place, len(pieces), piece))
        for place, piece in enumerate(pieces)
    ]


def decode_head(pieces: list[bytes]) -> Head:
    """Return a head from the data of its pieces."""
    return convert_msgpack(zlib.decompress(b"".join(pieces)), Head)
