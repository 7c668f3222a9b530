"""The records of the journal: a topic with one partition, which orders the changes of a log.

A replica first writes rows to the partitions of their shards. Then it writes a record to the journal, which contains
Kafka's offsets of these rows. With this record, the rows become part of the log. Every replica reads the whole journal,
and applies its records in their order to its state (`journal_state.py`). So all replicas have the same offsets of rows,
the same producers and the same removed streams. A replica answers an append after it has read its record back.

The effect of a record depends only on the records before it, because the record contains all times and limits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import msgspec

from seamark.formats.runtime.decoding import convert_msgpack
from seamark.formats.runtime.errors import LogUnavailable
from seamark.metaserver.log.port import PRODUCER_CHARS_MAX, Shard
from seamark.metaserver.log.state import StateSummary

VERSION = 2
"""The latest version of records. Version 2 adds the gates of streams."""
_VERSION_WITHOUT_GATES = 1
"""The version of records without gates. Earlier servers read them until the first gate has moved."""
_FASTEST_LEVEL = 1
"""The level at which zlib compresses fastest."""
HEAD_PIECE_BYTES = 512 << 10
"""The size of the pieces of a head. It is below the size of records that Kafka accepts by default (1 MB)."""


_NUMBER_BYTES_MAX = 9
"""The maximum size of an encoded number."""
_CHARACTER_BYTES_MAX = 4
"""The maximum size of a character in UTF-8."""
_REQUEST_BYTES_MAX, _SHARD_BYTES_MAX, _GATE_BYTES_MAX = 50, 60, 20
"""The space for the numbers and lengths of a request, of each of its shards and of each moved gate, rounded up."""


class RowsEntry(msgspec.Struct, frozen=True, array_like=True):
    """One batch of an append, whose bytes are in the partition of its shard.

    Attributes:
        records: Kafka's offsets of the records that contain the bytes, in the order of the bytes. They need not ascend,
            because a record may be written again after later records (`KafkaBroker.write`).
        number: The number of the shard in the stream.
        rows: The number of rows.
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
    """A request to append all of these batches or none.

    The fields of the producer are those of `StreamProducer`. The name is empty if there is no producer.

    Attributes:
        sparse: Whether sequence numbers of the producer may be missing.
        gates: Tuples of a stream, and the number of its gate when the rows were checked. A gate is closed and opened by
            commits that change how rows are written, and counts these changes. Streams with the number 0 are left out.
    """

    batches: tuple[RowsEntry, ...]
    producer: str = ""
    sequence: int = -1
    epoch: int = 0
    sparse: bool = False
    gates: tuple[tuple[str, int], ...] = ()


class FenceRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request to begin a session of a producer."""

    producer: str


class RemoveRequest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request to remove a stream."""

    stream: str


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A request that allows retention to remove rows.

    Attributes:
        offsets: Tuples of a stream, the number of a shard, and the offset below which rows may be removed.
    """

    offsets: tuple[tuple[str, int, int], ...]


class ShardStart(msgspec.Struct, frozen=True, array_like=True):
    """The first remaining row of a shard after a removal.

    Attributes:
        offset: The offset of the row.
        record: Kafka's offset of the first remaining record.
    """

    stream: str
    number: int
    offset: int
    record: int


class TrimRequest(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A request to remove released rows, and to forget producers and removed streams.

    Attributes:
        starts: The first remaining rows of the shards from which rows are removed.
        keep_ms: The time for which producers and removed streams are remembered.
    """

    starts: tuple[ShardStart, ...]
    keep_ms: int


class MoveGatesRequest(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A request to close or open the gates of streams, all or none.

    While a gate is closed, the log refuses appends to its stream.

    Attributes:
        numbers: Tuples of a stream, and the number that its gate has before the change.
    """

    numbers: tuple[tuple[str, int], ...]
    is_closed: bool


Request = AppendRequest | FenceRequest | RemoveRequest | ReleaseRequest | TrimRequest | MoveGatesRequest


def compute_bytes_max(request: Request, record_counts: Mapping[Shard, int]) -> int:
    """Compute the maximum size of a request in the journal.

    Args:
        request: The request. Its batches may be missing, because their offsets in Kafka are not known yet.
        record_counts: The number of Kafka's records with the rows of each shard.
    """
    size_bytes = _REQUEST_BYTES_MAX
    if isinstance(request, AppendRequest | FenceRequest):
        size_bytes += _CHARACTER_BYTES_MAX * PRODUCER_CHARS_MAX
    for shard, record_count in record_counts.items():
        # The name of the stream appears twice: with the rows, and with the number of the stream's gate.
        size_bytes += _SHARD_BYTES_MAX + 2 * len(shard.stream) + _NUMBER_BYTES_MAX * record_count
    if isinstance(request, MoveGatesRequest):
        size_bytes += sum(_GATE_BYTES_MAX + len(stream) for stream, _ in request.numbers)
    return size_bytes


class JournalGroup(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Requests of one replica, which are applied one after the other.

    Attributes:
        writer: A new id for each time that a replica opens the log.
        number: The number of the group among the groups of the writer.
        time_ms: The time by the clock of the replica.
    """

    version: int
    writer: str
    number: int
    time_ms: int
    requests: tuple[Request, ...]


class HeadPiece(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A piece of a head, which is the state of the log after the records before `after`.

    Attributes:
        head: The id of the head.
        after: The offset of the first record that the state does not include.
        place: The index of the piece among the pieces of the head.
        count: The number of pieces.
        data: The bytes of the piece.
    """

    version: int
    head: str
    after: int
    place: int
    count: int
    data: bytes


JournalRecord = JournalGroup | HeadPiece


class StoredBatch(msgspec.Struct, frozen=True, array_like=True):
    """The position of a batch: the offset of its first row in the shard, and Kafka's offsets of its records.

    Attributes:
        offset: The offset of the first row in the shard.
        records: Kafka's offsets of the records with the bytes.
        time_ms: The time of the append.
        producer: The name of the producer, or an empty string.
        sequence: The sequence number of the append, or -1 without a producer.
    """

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
    """The batches of a shard in a head, which is the stored state of the log.

    Attributes:
        first_record: Kafka's offset before which records may be deleted.
    """

    stream: str
    number: int
    first_record: int
    batches: list[StoredBatch]


class GateSummary(msgspec.Struct, frozen=True, array_like=True):
    """The gate of a stream. A commit that changes how rows are written closes it, so that the log refuses appends.

    Attributes:
        number: The number of times that the gate was closed or opened.
        is_closed: Whether the log refuses appends to the stream.
    """

    number: int = 0
    is_closed: bool = False


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The head of a journal: the state of the log after the records up to some offset.

    A replica that starts reads a head instead of the records that it replaces.

    Attributes:
        gates: The gate of each stream whose gate was ever closed. While a gate is closed, the log refuses appends to
            the stream, because a commit changes how its rows are written.
    """

    state: StateSummary
    shards: list[ShardBatches]
    gates: dict[str, GateSummary] = {}


def choose_version(requests: Iterable[Request]) -> int:
    """Return the lowest version of the journal format in which these requests can be written.

    The gate of a stream refuses appends while a commit changes how rows are written. Requests that neither move nor
    check a gate get the earlier version, so that earlier servers can still read them. Requests with gates need the
    later version, because an earlier server would ignore the gates.
    """
    uses_gates = any(
        isinstance(request, MoveGatesRequest) or (isinstance(request, AppendRequest) and request.gates)
        for request in requests
    )
    return VERSION if uses_gates else _VERSION_WITHOUT_GATES


def encode_group(group: JournalGroup) -> bytes:
    return msgspec.msgpack.encode(group)


def decode_record(data: bytes) -> JournalRecord:
    """Decode a record of the journal.

    Records of the first version have no gates, which refuse appends while a commit changes how rows are written.

    Raises:
        LogUnavailable: A later version of Seamark, or another program, wrote the record.
    """
    try:
        record: JournalRecord = convert_msgpack(data, JournalRecord)
    except msgspec.DecodeError:
        raise LogUnavailable(
            "The journal of the log in Kafka has a record that this version of Seamark cannot read; upgrade this server"
        ) from None
    if not _VERSION_WITHOUT_GATES <= record.version <= VERSION:
        raise LogUnavailable(
            f"The journal of the log in Kafka has a record of version {record.version}, and this server reads versions "
            f"{_VERSION_WITHOUT_GATES} to {VERSION}; run the same version of Seamark on all replicas"
        )
    return record


def encode_head(head: Head, head_id: str, after: int) -> list[bytes]:
    """Encode a head, the stored state of the log, as records of the journal.

    The compressed head is split, because Kafka limits the size of a record.

    Args:
        head: The state.
        head_id: A new id, which all pieces of this head contain.
        after: The offset of the first record of the journal that the state does not include.
    """
    data = zlib.compress(msgspec.msgpack.encode(head), _FASTEST_LEVEL)
    pieces = [data[start : start + HEAD_PIECE_BYTES] for start in range(0, len(data), HEAD_PIECE_BYTES)]
    # Without moved gates, earlier servers can read the head. A gate refuses appends while a commit changes how rows are
    # written.
    version = VERSION if head.gates else _VERSION_WITHOUT_GATES
    return [
        msgspec.msgpack.encode(HeadPiece(version, head_id, after, place, len(pieces), piece))
        for place, piece in enumerate(pieces)
    ]


def decode_head(pieces: list[bytes]) -> Head:
    """Decode a head, the stored state of the log, from the data of its pieces in order."""
    return convert_msgpack(zlib.decompress(b"".join(pieces)), Head)
