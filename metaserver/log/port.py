"""The port of a streaming log: the durable, ordered sequence of batches of each shard.

A stream is the log of one table, named by the table's UUID, so that a table that is dropped and created again has
another stream. A shard is a share of the stream's writes. The offset of a row is the number of
rows before it in its shard.

Every implementation promises:

- `append` returns when all its batches are durable. A batch that was acknowledged survives the loss of every process.
- The watermark of a shard is the offset after its last durable row. A reader never sees a row at or after it.
- An append is atomic, also over shards of several tables: the watermarks of one call contain the
  whole append or nothing of it.
- Offsets have no gap, and a row never changes its offset. Rows of one producer are in the order of its numbers.
- An append that is repeated with the same producer and sequence number is stored once, even after a restart.

The log does not interpret payloads. Failures are errors of `seamark.formats.runtime.errors`; `StreamLog` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from seamark.formats.runtime.errors import BadRequest, TooLarge

ROWS_MAX = 1 << 24
"""The maximum number of rows of one batch."""
PRODUCER_CHARS_MAX = 200


class Shard(NamedTuple):
    """One shard of a stream."""

    stream: str
    number: int


class RowKind(IntEnum):
    """The effect of a row on the stored row with the same key."""

    INSERT = 0
    UPDATE = 1
    """The new row replaces the old."""
    DELETE = 2
    """Only the columns of the key are significant."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one shard.

    Attributes:
        rows: The number of rows, at least 1.
        payload: An Arrow IPC stream with one record batch.
        kinds: One byte for each row, a `RowKind`; empty if all rows are inserts.
    """

    rows: int
    payload: bytes
    kinds: bytes = b""

    @property
    def size_bytes(self) -> int:
        return len(self.payload) + len(self.kinds)


@dataclass(frozen=True, slots=True)
class StreamProducer:
    """The producer of an append, and the number of the append. Together they identify a repeated append.

    A producer numbers its appends 0, 1, 2, …, over all shards and streams. Each append has to follow the previous
    append of the same name.

    Attributes:
        name: Unique in the log. It has the form `scope/owner/name` or `owner/name`, such as the UUID of a table, a hash
            of the principal, and the principal's own name of the producer.
        sequence: The number of this append.
        epoch: The session of the producer. `fence` begins a session, and the log refuses appends of earlier sessions.
        sparse: Whether numbers may be missing. The log accepts each number after the last, so only a producer that
            waits for each answer before it sends the next append may set this.
    """

    name: str
    sequence: int
    epoch: int = 0
    sparse: bool = False


TOPIC_OWNER = "topic"
"""The owner of the producers that read input topics. The log remembers them as long as the topics may exist."""


def make_topic_producer_name(stream: str, topic_id: str, partition: int) -> str:
    """Return the name of the producer that reads a partition of the input topic of a stream."""
    return f"{stream}/{TOPIC_OWNER}/{topic_id}-{partition}"


def parse_topic_producer(producer: str) -> str:
    """Return the stream and the id of the topic that a producer of `make_topic_producer_name` reads."""
    return producer.rsplit("-", 1)[0]


def parse_owner(producer: str) -> str:
    """Return the owner of a producer, whose name has the form `scope/owner/name` or `owner/name`."""
    parts = producer.split("/", 2)
    return parts[1] if len(parts) == 3 else parts[0]


@dataclass(frozen=True, slots=True)
class StreamProducerState:
    """The session and the last acknowledged sequence number of a producer.

    The number is -1 if nothing is acknowledged.
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
        positions: One for each batch, in the order of the append. Empty if `duplicate` is set and the log no longer
            has the positions of that append.
        duplicate: Whether the append was acknowledged before, and this call changed nothing.
    """

    positions: tuple[Position, ...]
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A stored batch.

    Attributes:
        offset: The offset of the first row.
        time_ms: The time when the log accepted the batch, by the server's clock. It never decreases within a shard.
        producer: The name of the producer, or "" if the append had no producer.
        sequence: The sequence number of the append, -1 if it had no producer.
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
        start: The offset of the first row that can be read.
        watermark: The offset after the last durable row.
        released: The offset below which rows are in data files; retention removes only rows below it.
        size_bytes: An estimate of the bytes from `start` to `watermark`.
    """

    start: int
    watermark: int
    released: int
    size_bytes: int


class StreamLog(Protocol):
    """The port of a streaming log. A factory (an async context manager) opens and closes it.

    Safe for use by many tasks of one event loop. Every method may raise LogUnavailable: the log is closed, or it has
    failed and must be opened again.
    """

    @property
    def identity(self) -> str:
        """The identity of the log. Offsets are positions in one log, so another log has another identity."""

    async def catch_up(self) -> None:
        """Wait until the watermarks contain every append that was acknowledged before the call, by any process."""

    async def append(self, batches: Mapping[Shard, Batch], producer: StreamProducer | None = None) -> Acknowledgement:
        """Append a batch to each of the shards, atomically. A shard without rows begins at offset 0.

        Without batches, the append only records the sequence number of its producer.

        Appends that overlap in time share one sync. The batches of a cancelled append may be stored or not.

        Raises:
            BadRequest: `check_append` refuses the append.
            TooLarge: The append has more bytes than the log accepts in one append.
            LogFull: The disk has no room. Nothing is stored, and the log works again when there is room.
            TooManyRequests: Too many bytes wait, or the producer is new and there are too many. Nothing is stored.
            StreamRemoved: One of the streams was removed.
            ProducerFenced: A later session of the producer exists.
            SequenceGap: The append does not follow the last append of the producer.
            CommitUnknown: The disk failed while the log stored the append. Repeat it with the same sequence number.
        """

    async def fence(self, name: str) -> StreamProducerState:
        """Begin a session of a producer and end all earlier sessions, durably.

        Returns:
            The epoch of the new session and the last acknowledged sequence number. The next append has the number after
            it.
        """

    def find_producer(self, name: str) -> StreamProducerState | None:
        """Return the state of a producer, or None if the log does not know the producer."""

    def read_watermarks(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        """Return the watermarks at one moment; 0 for a shard without rows.

        An append is below all of its watermarks, or at or above all of them.
        """

    async def read(self, shard: Shard, offset: int, *, limit_bytes: int, end: int | None = None) -> Sequence[Record]:
        """Return consecutive records below the watermark; the first contains the row at `offset`.

        The first record may begin before `offset`: the caller leaves out its first rows.

        Args:
            limit_bytes: The maximum number of bytes of payload. At least one record is returned.
            end: The offset below which the records begin, such as an offset from `read_watermarks` that the reader may
                not pass.

        Returns:
            No records if `offset` is the watermark or `end`.

        Raises:
            OffsetOutOfRange: The row was removed, or `offset` is after the watermark.
            Corrupt: The stored record is damaged.
        """

    async def wait(self, positions: Mapping[Shard, int], timeout_s: float) -> bool:
        """Wait until one of the shards has a row at or after its position; return False after `timeout_s`."""

    async def find_offset(self, shard: Shard, time_ms: int) -> int:
        """Return the offset of the first record that the log received at or after `time_ms`.

        Return the watermark if there is no such record.
        """

    def list_shards(self, stream: str | None = None) -> dict[Shard, ShardState]:
        """Return the shards of one stream or of all streams."""

    async def release(self, offsets: Mapping[Shard, int]) -> None:
        """Allow retention to remove rows below these offsets: they are in data files.

        An offset below the present one changes nothing. A crash may lose a release, and only delays retention.
        """

    async def remove(self, stream: str) -> None:
        """Remove a stream with all rows, durably. During the retention the log refuses appends to the stream."""


@runtime_checkable
class SharedLog(StreamLog, Protocol):
    """A log to which several processes append."""

    def count_unreleased_bytes(self, stream: str) -> int:
        """Return the bytes of the rows of a stream that are in no data file, of all processes."""


def check_append(batches: Mapping[Shard, Batch], producer: StreamProducer | None, *, limit_bytes: int) -> None:
    """Check that an append can be stored.

    Raises:
        BadRequest: The append has neither batches nor a producer, or one of them is invalid.
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
    """Check that a batch can be stored.

    Raises:
        BadRequest: The batch is invalid.
    """
    if not 1 <= batch.rows <= ROWS_MAX:
        raise BadRequest(f"A batch has 1 to {ROWS_MAX} rows, not {batch.rows}")
    if batch.kinds and len(batch.kinds) != batch.rows:
        raise BadRequest(f"A batch of {batch.rows} rows has {len(batch.kinds)} kinds; give one for each row or none")
    if batch.kinds and max(batch.kinds) > max(RowKind):
        raise BadRequest(f"{max(batch.kinds)} is not a kind of row; use 0 (insert), 1 (update) or 2 (delete)")
    if not shard.stream or not 0 <= shard.number < 1 << 16:
        raise BadRequest(f"A shard has the name of its stream and a number from 0 to 65535, not {shard!r}")


def check_producer(producer: StreamProducer) -> None:
    """Check the fields of a producer.

    Raises:
        BadRequest: A field is invalid.
    """
    check_producer_name(producer.name)
    if not 0 <= producer.sequence < 1 << 62:
        raise BadRequest(f"A sequence number is 0 or greater, not {producer.sequence}")
    if not 0 <= producer.epoch < 1 << 31:
        raise BadRequest(f"An epoch is 0 or greater, not {producer.epoch}")


def check_producer_name(name: str) -> None:
    """Check the name of a producer.

    Raises:
        BadRequest: The name is empty or too long.
    """
    if not 1 <= len(name) <= PRODUCER_CHARS_MAX:
        raise BadRequest(f"The name of a producer has 1 to {PRODUCER_CHARS_MAX} characters, not {len(name)}")
