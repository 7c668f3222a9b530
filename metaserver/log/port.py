"""The port of a streaming log: the durable, ordered sequence of batches of each shard.

A stream contains the rows of one table. Its name is the table's UUID, so that a table that is dropped and created again
has a new stream. A shard is a share of the stream's writes. The offset of a row is the number of rows before it in its
shard.

Every implementation guarantees:

- `append` returns when all its batches are durable. An acknowledged batch survives the loss of all processes.
- The watermark of a shard is the offset after its last durable row. A reader never sees a row at or after it.
- An append is atomic, even if it writes to shards of several tables: the watermarks that `read_watermarks` returns
  include the whole append, or nothing of it.
- Offsets have no gaps, and a row never changes its offset. The rows of one producer are in the order of its sequence
  numbers.
- An append that is repeated with the same producer and sequence number is stored once, even after a restart.

The log does not interpret payloads. Failures are errors of `seamark.formats.runtime.errors`; `StreamLog` lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from seamark.formats.runtime.errors import BadRequest, RetryLater, TooLarge

ROWS_MAX = 1 << 24
"""The maximum number of rows of one batch."""
PRODUCER_CHARS_MAX = 200
_SHARD_NUMBER_MAX = (1 << 16) - 1
_SEQUENCE_MAX = (1 << 62) - 1
_EPOCH_MAX = (1 << 31) - 1


class Shard(NamedTuple):
    """A shard, one of the independently ordered parts of a stream: the name of its stream, and its number."""

    stream: str
    number: int


class RowKind(IntEnum):
    """The effect of a row on a stored row with the same key."""

    INSERT = 0
    UPDATE = 1
    """The row replaces the stored row."""
    DELETE = 2
    """The row deletes the stored row. Only its key columns matter."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one shard.

    Attributes:
        rows: The number of rows, at least 1.
        payload: An Arrow IPC stream with one record batch.
        kinds: The `RowKind` of each row, as one byte. It is empty if all rows are inserts.
    """

    rows: int
    payload: bytes
    kinds: bytes = b""

    @property
    def size_bytes(self) -> int:
        return len(self.payload) + len(self.kinds)


@dataclass(frozen=True, slots=True)
class StreamProducer:
    """The producer of an append, and the sequence number of the append, by which the log recognises a repeated append.

    A producer numbers its appends to all shards and streams 0, 1, 2, …. Each append must have the number after that of
    the producer's previous append.

    Attributes:
        name: The name of the producer, which is unique in the log. It has the form `scope/owner/name` or `owner/name`.
            For example, the parts are the UUID of a table, a hash of the principal, and the name that the principal
            chose.
        sequence: The sequence number of this append.
        epoch: The session of the producer. `fence` begins a session, and the log refuses appends of earlier sessions.
        sparse: Whether numbers may be missing. Then the log accepts every number above the last. Only a producer that
            waits for each answer before it sends the next append may set this, because a delayed append with a lower
            number would be taken for a repeat.
    """

    name: str
    sequence: int
    epoch: int = 0
    sparse: bool = False


TOPIC_OWNER = "topic"
"""The owner of the producers that read input topics. The log remembers them while the topics may exist."""


def make_topic_producer_name(stream: str, topic_id: str, partition: int) -> str:
    """Return the name of the producer that reads a partition of the input topic of a stream."""
    return f"{stream}/{TOPIC_OWNER}/{topic_id}-{partition}"


def parse_topic_producer(producer: str) -> str:
    """Return the part of a name from `make_topic_producer_name` that is equal for all partitions of a topic."""
    return producer.rsplit("-", 1)[0]


def parse_owner(producer: str) -> str:
    """Return the owner in the name of a producer, which has the form `scope/owner/name` or `owner/name`."""
    parts = producer.split("/", 2)
    has_scope = len(parts) == 3
    return parts[1] if has_scope else parts[0]


@dataclass(frozen=True, slots=True)
class StreamProducerState:
    """The session of a producer, and the sequence number of its last acknowledged append, or -1 if there is none.

    Attributes:
        epoch: The number of the session. Each call of `fence` begins the next.
        sequence: The last acknowledged sequence number, or -1.
    """

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a batch: the offset of its first row, and the offset after its last row."""

    shard: Shard
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The answer to an append.

    Attributes:
        positions: The position of each batch, in the order of the append. They are empty if the append is a duplicate
            whose positions the log has forgotten.
        duplicate: Whether the append was already acknowledged, and this call has changed nothing.
    """

    positions: tuple[Position, ...]
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A stored batch.

    Attributes:
        offset: The offset of the first row.
        time_ms: The time at which the log accepted the batch, by the server's clock. It never decreases within a shard.
        producer: The name of the producer, or "" if the append had no producer.
        sequence: The sequence number of the append, or -1 if it had no producer.
    """

    shard: Shard
    offset: int
    batch: Batch
    time_ms: int
    producer: str = ""
    sequence: int = -1

    @property
    def end(self) -> int:
        """The offset after the last row."""
        return self.offset + self.batch.rows


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of a shard in the log.

    Attributes:
        start: The offset of the first readable row.
        watermark: The offset after the last durable row.
        released: The offset below which all rows are in data files. Retention removes only rows below it.
        size_bytes: The approximate size of the rows from `start` to `watermark`.
    """

    start: int
    watermark: int
    released: int
    size_bytes: int


class GateMoved(RetryLater):
    """Raised if a commit has changed how the rows of a stream are written since the rows were checked.

    Such a commit closes the gate of the stream, so that the log refuses appends, and opens the gate when the commit
    ends. Nothing of the append is stored.
    """


class StreamGate(NamedTuple):
    """The gate of a stream. A commit that changes how the rows of the table are written closes it for appends.

    Attributes:
        number: The number of times that the gate was closed or opened.
        is_closed: Whether the log refuses appends to the stream.
    """

    number: int
    is_closed: bool


class StreamLog(Protocol):
    """The port of a streaming log.

    The tasks of one event loop share an instance. Every method raises LogUnavailable if the log is closed, or has
    failed and must be opened again.
    """

    @property
    def identity(self) -> str:
        """The identity of the log. Each log has its own, because offsets are valid only for one log."""

    async def catch_up(self) -> None:
        """Wait until the watermarks include every append that any process acknowledged before the call."""

    async def append(self, batches: Mapping[Shard, Batch], producer: StreamProducer | None = None) -> Acknowledgement:
        """Append one batch to each of the shards atomically. The first row of a shard has the offset 0.

        Without batches, the append only records the sequence number of its producer. If an append is cancelled, its
        batches may be stored or not.

        Raises:
            BadRequest: `check_append` refuses the append.
            TooLarge: The append is larger than the log accepts.
            LogFull: The disk is full. Nothing is stored. The log works again when there is space.
            TooManyRequests: Too many bytes are waiting, or a new producer exceeds the limit of producers. Nothing is
                stored.
            StreamRemoved: One of the streams was removed.
            ProducerFenced: A later session of the producer exists.
            SequenceGap: The append does not follow the last append of the producer.
            CommitUnknown: The disk failed while the log stored the append. Repeat it with the same sequence number.
        """

    async def fence(self, name: str) -> StreamProducerState:
        """Begin a session of a producer durably, and end all its earlier sessions.

        Returns:
            The epoch of the new session, and the last acknowledged sequence number. The next append must have the
            following number.
        """

    def find_producer(self, name: str) -> StreamProducerState | None:
        """Return the state of a producer, or None if the log does not know the producer."""

    def read_watermarks(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        """Return the watermarks of the shards at one moment. A shard without rows has the watermark 0.

        The watermarks include the rows of an append in all of its shards, or in none.
        """

    async def read(self, shard: Shard, offset: int, *, limit_bytes: int, end: int | None = None) -> Sequence[Record]:
        """Return consecutive records below the watermark. The first record contains the row at `offset`.

        The first record may begin before `offset`. The caller must skip its first rows.

        Args:
            limit_bytes: The maximum number of bytes of payload. The first record is returned even if it is larger.
            end: The offset before which the records begin, such as a watermark that the reader must not pass.

        Returns:
            The records. There are none if `offset` is the watermark or `end`.

        Raises:
            OffsetOutOfRange: The row was removed, or `offset` is after the watermark.
            Corrupt: The stored record is damaged.
        """

    async def wait(self, positions: Mapping[Shard, int], timeout_s: float) -> bool:
        """Wait until one of the shards has a row at or after its position. Return False after `timeout_s`."""

    async def find_offset(self, shard: Shard, time_ms: int) -> int:
        """Return the offset of the first record from `time_ms` or later, or the watermark if there is none."""

    def list_shards(self, stream: str | None = None) -> dict[Shard, ShardState]:
        """Return the shards of one stream or of all streams."""

    async def release(self, offsets: Mapping[Shard, int]) -> None:
        """Allow retention to remove the rows below these offsets, because they are in data files.

        An offset below the current released offset has no effect. A release that is lost in a crash only delays the
        removal.
        """

    async def remove(self, stream: str) -> None:
        """Remove a stream with all its rows durably. For the time of the retention, the log refuses appends to it."""


@runtime_checkable
class SharedLog(StreamLog, Protocol):
    """A log to which several processes can append. It has a gate for each stream, which all processes obey."""

    async def append(
        self,
        batches: Mapping[Shard, Batch],
        producer: StreamProducer | None = None,
        gates: Mapping[str, int] | None = None,
    ) -> Acknowledgement:
        """Append one batch to each of the shards atomically, unless a commit interferes.

        A commit that changes how rows are written closes the gate of a stream, and opens it at its end. The gate counts
        both. So the log refuses rows that were checked before such a commit.

        Args:
            batches: The rows for each shard.
            producer: The producer and the sequence number, by which the log recognises a repeated append.
            gates: The number of the gate of each stream when the rows were checked. The default number is 0.

        Raises:
            GateMoved: A gate is closed, or has another number. A repeated append gets its first answer instead.
        """

    def read_gates(self, streams: Iterable[str]) -> dict[str, StreamGate]:
        """Return the gates of the streams. A closed gate refuses appends while a commit changes how rows are written.

        A gate that was never closed is open, and has the number 0.
        """

    def list_gates(self) -> Collection[str]:
        """Return the streams whose gate was ever closed.

        A closed gate refuses appends while a commit changes how rows are written.
        """

    async def move_gates(self, numbers: Mapping[str, int], *, is_closed: bool) -> None:
        """Close or open the gates of the streams durably. A closed gate refuses appends to the stream.

        The number of each gate counts how often it was closed or opened, so it increases by one.

        Args:
            numbers: The current number of the gate of each stream.
            is_closed: Whether to close the gates.

        Raises:
            GateMoved: A gate has another number. No gate is moved.
            CommitUnknown: It is unknown whether the gates have moved.
        """

    def count_unreleased_bytes(self, stream: str) -> int:
        """Return the bytes of a stream's rows, appended by any process, that are in no data file yet."""


def check_append(batches: Mapping[Shard, Batch], producer: StreamProducer | None, *, limit_bytes: int) -> None:
    """Check that an append is valid.

    Raises:
        BadRequest: The append has neither batches nor a producer, or a batch or the producer is invalid.
        TooLarge: The batches have more than `limit_bytes`.
    """
    if not batches and producer is None:
        raise BadRequest("An append has at least one batch or a producer")
    for shard, batch in batches.items():
        check_batch(shard, batch)
    size_bytes = sum(batch.size_bytes for batch in batches.values())
    if size_bytes > limit_bytes:
        raise TooLarge(f"An append has at most {limit_bytes} bytes, not {size_bytes}; send fewer rows")
    if producer is not None:
        check_producer(producer)


def check_batch(shard: Shard, batch: Batch) -> None:
    """Check that a batch is valid.

    Raises:
        BadRequest: The batch is invalid.
    """
    if not 1 <= batch.rows <= ROWS_MAX:
        raise BadRequest(f"A batch has 1 to {ROWS_MAX} rows, not {batch.rows}")
    if batch.kinds and len(batch.kinds) != batch.rows:
        raise BadRequest(f"A batch of {batch.rows} rows has {len(batch.kinds)} kinds; give one for each row or none")
    if batch.kinds and max(batch.kinds) > max(RowKind):
        raise BadRequest(f"{max(batch.kinds)} is not a kind of row; use 0 (insert), 1 (update) or 2 (delete)")
    if not shard.stream or not 0 <= shard.number <= _SHARD_NUMBER_MAX:
        raise BadRequest(f"A shard has the name of its stream and a number from 0 to 65535, not {shard!r}")


def check_producer(producer: StreamProducer) -> None:
    """Check that the fields of a producer are valid.

    Raises:
        BadRequest: A field is invalid.
    """
    check_producer_name(producer.name)
    if not 0 <= producer.sequence <= _SEQUENCE_MAX:
        raise BadRequest(f"A sequence number is from 0 to 2**62 - 1, not {producer.sequence}")
    if not 0 <= producer.epoch <= _EPOCH_MAX:
        raise BadRequest(f"An epoch is from 0 to 2**31 - 1, not {producer.epoch}")


def check_producer_name(name: str) -> None:
    """Check that the name of a producer is valid.

    Raises:
        BadRequest: The name is empty or too long.
    """
    if not 1 <= len(name) <= PRODUCER_CHARS_MAX:
        raise BadRequest(f"The name of a producer has 1 to {PRODUCER_CHARS_MAX} characters, not {len(name)}")
