"""The state of shards, producers and removed streams that a log keeps in memory. The module does no I/O.

Every change is an `Entry`. A `Group` admits requests and converts them to entries, which become durable together. Then
`LogState.apply` changes the state. Recovery applies the same entries again, so a restart leads to the same state.

A request sees the entries of earlier requests of its group, although they are not durable yet. Its answer is sent only
after the whole group is durable. If the group fails, all its requests fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from seamark.formats.runtime.errors import (
    OffsetOutOfRange,
    ProducerFenced,
    SequenceGap,
    StreamRemoved,
    TooManyRequests,
)
from seamark.metaserver.log.port import (
    TOPIC_OWNER,
    Acknowledgement,
    Batch,
    Position,
    Shard,
    ShardState,
    StreamProducer,
    StreamProducerState,
    parse_owner,
    parse_topic_producer,
)

REMEMBERED_APPENDS_PER_PRODUCER = 5
"""The number of appends of a producer whose positions the log remembers, to answer a repeated append."""
REMEMBERED_MS = 600_000
"""The minimum time for which the log remembers these positions in milliseconds."""


class BatchSize(NamedTuple):
    """The number of rows of a batch, the size of its rows, and the size of their kinds: insert, update or delete."""

    rows: int
    payload_bytes: int
    kinds_bytes: int


class BatchEntry(msgspec.Struct, frozen=True, array_like=True):
    """The position of one batch of an append: its shard, the offset of its first row, and its sizes.

    Attributes:
        payload_bytes: The size of the rows as an Arrow IPC stream.
        kinds_bytes: The size of the kinds of the rows: one byte for each row, or 0 if all rows are inserts.
    """

    stream: str
    number: int
    offset: int
    rows: int
    payload_bytes: int
    kinds_bytes: int

    @property
    def shard(self) -> Shard:
        return Shard(self.stream, self.number)

    @property
    def size_bytes(self) -> int:
        return self.payload_bytes + self.kinds_bytes


class AppendEntry(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One append: all its batches, of one or more shards."""

    time_ms: int
    batches: tuple[BatchEntry, ...]
    producer: str = ""
    epoch: int = 0
    sequence: int = -1


class FenceEntry(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The beginning of a session of a producer. The log then refuses appends of the producer's earlier sessions.

    Attributes:
        epoch: The number of the session, from 1. Earlier sessions of the producer have lower numbers.
    """

    time_ms: int
    producer: str
    epoch: int


class RemoveEntry(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The removal of a stream."""

    time_ms: int
    stream: str


Entry = AppendEntry | FenceEntry | RemoveEntry


class ShardSummary(msgspec.Struct, array_like=True):
    """A shard in the state of a log.

    Attributes:
        start: The offset of the first readable row.
        watermark: The offset after the last durable row.
        released: The offset below which all rows are in data files.
        size_bytes: The approximate size of the rows from `start` to `watermark`.
    """

    stream: str
    number: int
    start: int = 0
    watermark: int = 0
    released: int = 0
    size_bytes: int = 0


class AppendSummary(msgspec.Struct, frozen=True, array_like=True):
    """The positions of an append that a producer may repeat.

    Attributes:
        positions: For each batch, its stream, the number of its shard, its offset and its end.
    """

    sequence: int
    positions: tuple[tuple[str, int, int, int], ...]

    def make_acknowledgement(self) -> Acknowledgement:
        """Return the answer to a repeated append."""
        positions = tuple(Position(Shard(stream, number), first, end) for stream, number, first, end in self.positions)
        return Acknowledgement(positions, duplicate=True)


class ProducerSummary(msgspec.Struct, frozen=True, array_like=True):
    """A producer in the state of a log.

    `StreamProducer` describes the epoch and the sequence number. The time is that of the last append or of the last new
    session.
    """

    epoch: int
    sequence: int
    time_ms: int
    appends: tuple[AppendSummary, ...] = ()
    """The last appends, at most `REMEMBERED_APPENDS_PER_PRODUCER`, the oldest first."""


class StateSummary(msgspec.Struct, array_like=True):
    """The state of a log in its stored form, as at the beginning of a segment."""

    time_ms: int
    shards: list[ShardSummary]
    producers: dict[str, ProducerSummary]
    removed: dict[str, int]
    """The time of the removal of each removed stream."""


@dataclass(slots=True)
class LogState:
    """The state of a log after a number of entries.

    Attributes:
        producers_max: The maximum number of producers, above which a new producer is refused.
        keep_ms: The time for which a producer without appends, and a removed stream, are remembered.
        time_ms: The time of the last entry. Times never decrease.
        producer_counts: The number of producers of each owner.
    """

    producers_max: int
    keep_ms: int
    time_ms: int = 0
    shards: dict[Shard, ShardSummary] = field(default_factory=dict)
    producers: dict[str, ProducerSummary] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    producer_counts: Counter[str] = field(default_factory=Counter)

    def apply(self, entry: Entry) -> None:
        """Apply a durable entry to the state."""
        self.time_ms = max(self.time_ms, entry.time_ms)
        match entry:
            case AppendEntry():
                for batch in entry.batches:
                    summary = self.shards.get(batch.shard)
                    if summary is None:
                        summary = self.shards[batch.shard] = ShardSummary(batch.stream, batch.number)
                    summary.watermark = batch.offset + batch.rows
                    summary.size_bytes += batch.size_bytes
                if entry.producer:
                    self._set_producer(
                        entry.producer, advance_producer_summary(self.producers.get(entry.producer), entry)
                    )
            case FenceEntry():
                previous = self.producers.get(entry.producer)
                self._set_producer(entry.producer, begin_session(previous, entry))
            case RemoveEntry():
                self.removed[entry.stream] = entry.time_ms
                for shard in [shard for shard in self.shards if shard.stream == entry.stream]:
                    del self.shards[shard]
                # No process reads the input topic of a removed stream any longer, so forget its producers.
                prefix = f"{entry.stream}/{TOPIC_OWNER}/"
                for name in [name for name in self.producers if name.startswith(prefix)]:
                    self._drop_producer(name)

    def _set_producer(self, name: str, summary: ProducerSummary) -> None:
        if name not in self.producers:
            self.producer_counts[parse_owner(name)] += 1
        self.producers[name] = summary

    def _drop_producer(self, name: str) -> None:
        del self.producers[name]
        self.producer_counts[parse_owner(name)] -= 1
        if not self.producer_counts[parse_owner(name)]:
            del self.producer_counts[parse_owner(name)]

    def check_producer_room(self, name: str, *, limit: int, pending: Counter[str] | None = None) -> None:
        """Check that the log may remember a new producer.

        An owner may not have more producers than there are free places. So one owner has at most half of the producers,
        and other owners always find free places. The owner is a part of the name (`parse_owner`).

        Args:
            name: The name of the producer.
            limit: The maximum number of producers.
            pending: The number of new producers of each owner that are not durable yet.

        Raises:
            TooManyRequests: The log has too many producers, or the owner has too many of them.
        """
        pending = Counter() if pending is None else pending
        free_producers = limit - len(self.producers) - pending.total()
        owned_producers = self.producer_counts[parse_owner(name)] + pending[parse_owner(name)]
        if free_producers <= 0 or owned_producers >= free_producers:
            reason = "" if free_producers <= 0 else f", {owned_producers} of them of the owner of {name!r}"
            raise TooManyRequests(
                f"The log has {limit - free_producers} of at most {limit} producers already{reason}, and {name!r} is "
                "new; use fewer names of producers, or raise the limit"
            )

    def read_watermarks(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        """Return the watermarks of the shards. A shard without rows has the watermark 0."""
        return {shard: self.read_watermark(shard) for shard in shards}

    def read_watermark(self, shard: Shard) -> int:
        """Return the watermark of a shard."""
        summary = self.shards.get(shard)
        return summary.watermark if summary is not None else 0

    def list_shard_states(self, stream: str | None) -> dict[Shard, ShardState]:
        """Return the shards of one stream or of all streams."""
        return {
            shard: ShardState(summary.start, summary.watermark, summary.released, summary.size_bytes)
            for shard, summary in self.shards.items()
            if stream is None or shard.stream == stream
        }

    def find_producer(self, name: str) -> StreamProducerState | None:
        """Return the session and the last sequence number of a producer."""
        summary = self.producers.get(name)
        return StreamProducerState(summary.epoch, summary.sequence) if summary is not None else None

    def release(self, offsets: Mapping[Shard, int]) -> None:
        """Increase the released offsets, at most to the watermark."""
        for shard, offset in offsets.items():
            summary = self.shards.get(shard)
            if summary is not None:
                summary.released = max(summary.released, min(offset, summary.watermark))

    def get_released_offsets(self) -> dict[Shard, int]:
        """Return the released offset of each shard, below which all rows are in data files."""
        return {shard: summary.released for shard, summary in self.shards.items()}

    def check_readable(self, shard: Shard, offset: int) -> None:
        """Check that a reader can start at an offset.

        Raises:
            OffsetOutOfRange: The log does not contain the row.
        """
        summary = self.shards.get(shard)
        start, watermark = (summary.start, summary.watermark) if summary is not None else (0, 0)
        if not start <= offset <= watermark:
            raise OffsetOutOfRange(
                f"The log has the rows {start} to {watermark} of shard {shard.number} of stream {shard.stream}, "
                f"and not row {offset}; begin at a snapshot of the table, or at an offset in this range"
            )

    def forget(self, now_ms: int, oldest_ms: int) -> None:
        """Forget producers and removed streams that are older than `keep_ms`.

        The producers of an input topic are remembered longer, because their sequence numbers show which messages were
        appended. Another topic can replace the input topic of a stream. The producers of the old topic are forgotten
        when the new topic has an entry that is more than `keep_ms` later than the last entry of the old topic.

        Args:
            now_ms: The current time.
            oldest_ms: The time of the oldest entry in the log. A removed stream is remembered while the log may contain
                rows of it.
        """
        kept_since_ms = now_ms - self.keep_ms
        replaced_topics = self._find_replaced_topics()
        for name, summary in list(self.producers.items()):
            is_needed = parse_owner(name) == TOPIC_OWNER and parse_topic_producer(name) not in replaced_topics
            if summary.time_ms < kept_since_ms and not is_needed:
                self._drop_producer(name)
            elif summary.appends and summary.time_ms < now_ms - REMEMBERED_MS:
                # Keep the sequence number, but not the positions of the last appends, which need more memory.
                self.producers[name] = ProducerSummary(summary.epoch, summary.sequence, summary.time_ms)
        for stream, removed_ms in list(self.removed.items()):
            if removed_ms < min(kept_since_ms, oldest_ms):
                del self.removed[stream]

    def _find_replaced_topics(self) -> set[str]:
        """Return the input topics that a new topic of the same table has replaced.

        A table has one input topic at a time. So a topic was replaced if the first entry of a newer topic of the table
        follows the topic's first entry, and the newer topic has an entry more than `keep_ms` after the topic's last
        entry. The margin is for servers that have not noticed the replacement yet.
        """
        last_ms_by_stream: dict[str, dict[str, int]] = {}  # The time of the last entry of each topic of a stream.
        for name, summary in self.producers.items():  # The producers have the order of their first entries.
            if parse_owner(name) == TOPIC_OWNER:
                stream, topic = name.split("/", 1)[0], parse_topic_producer(name)
                topics = last_ms_by_stream.setdefault(stream, {})
                topics[topic] = max(topics.get(topic, 0), summary.time_ms)
        return {
            topic
            for topics in last_ms_by_stream.values()
            for index, (topic, last_ms) in enumerate(topics.items())
            if any(newer_last_ms - last_ms > self.keep_ms for newer_last_ms in list(topics.values())[index + 1 :])
        }

    def summarize(self) -> StateSummary:
        """Return the state for storage.

        The result shares its objects with the state, so the caller must encode or copy it before the next change.
        """
        return StateSummary(self.time_ms, list(self.shards.values()), self.producers, self.removed)

    def restore(self, summary: StateSummary) -> None:
        """Replace the state by a stored state. The state uses the objects of `summary`, and does not copy them."""
        self.time_ms = summary.time_ms
        self.shards = {
            Shard(shard_summary.stream, shard_summary.number): shard_summary for shard_summary in summary.shards
        }
        self.producers = summary.producers
        self.producer_counts = Counter(map(parse_owner, summary.producers))
        self.removed = summary.removed

    def check_invariants(self) -> None:
        """Check the conditions that are true after every step. Only tests call this method."""
        for shard, summary in self.shards.items():
            assert shard == (summary.stream, summary.number)
            assert 0 <= summary.start <= summary.watermark, summary
            assert 0 <= summary.released <= summary.watermark, summary
            assert shard.stream not in self.removed, shard
        assert self.producer_counts == Counter(map(parse_owner, self.producers))
        for name, producer in self.producers.items():
            sequences = [append.sequence for append in producer.appends]
            assert sequences == sorted(set(sequences)), (name, sequences)
            assert not sequences or sequences[-1] == producer.sequence, (name, sequences)


def advance_producer_summary(previous: ProducerSummary | None, entry: AppendEntry) -> ProducerSummary:
    """Return the state of a producer after one of its appends."""
    positions = tuple((batch.stream, batch.number, batch.offset, batch.offset + batch.rows) for batch in entry.batches)
    earlier_appends = previous.appends if previous is not None else ()
    appends = (*earlier_appends, AppendSummary(entry.sequence, positions))[-REMEMBERED_APPENDS_PER_PRODUCER:]
    return ProducerSummary(entry.epoch, entry.sequence, entry.time_ms, appends)


def begin_session(previous: ProducerSummary | None, entry: FenceEntry) -> ProducerSummary:
    """Return the state of a producer after a new session has begun.

    The sequence number and the last appends remain, so that the new session can repeat an append of the earlier
    session.
    """
    if previous is None:
        return ProducerSummary(entry.epoch, -1, entry.time_ms)
    return ProducerSummary(entry.epoch, previous.sequence, entry.time_ms, previous.appends)


class Group:
    """Requests that become durable together.

    Each method admits one request: it may add an entry to `entries`, and returns the answer to send after the group is
    durable. A refused request adds no entry.
    """

    def __init__(self, state: LogState, now_ms: int) -> None:
        self._state = state
        self._ends: dict[Shard, int] = {}
        self._producers: dict[str, ProducerSummary] = {}
        self._removed: set[str] = set()
        self._new_producers: Counter[str] = Counter()
        """The number of new producers of each owner in this group."""
        self.time_ms = max(state.time_ms, now_ms)
        self.entries: list[Entry] = []

    def append(self, batches: Mapping[Shard, Batch], producer: StreamProducer | None) -> Acknowledgement:
        """Admit an append, and return its answer.

        Raises:
            StreamRemoved: One of the streams was removed.
            ProducerFenced: A later session of the producer exists.
            SequenceGap: The append does not follow the last append of the producer.
            TooManyRequests: The producer is new, and there are too many producers.
        """
        sizes = {shard: BatchSize(batch.rows, len(batch.payload), len(batch.kinds)) for shard, batch in batches.items()}
        return self.append_sizes(sizes, producer)

    def append_sizes(self, sizes: Mapping[Shard, BatchSize], producer: StreamProducer | None) -> Acknowledgement:
        """Assign offsets to an append whose batch sizes are known, add it to the group, and return its answer.

        A repeated append gets its first answer, and is not added.

        Args:
            sizes: The size of the batch of each shard.
            producer: The producer and the sequence number, by which a repeated append is recognised.

        Raises:
            StreamRemoved, ProducerFenced, SequenceGap, TooManyRequests: As for `append`.
        """
        if producer is not None:
            duplicate = self._check_sequence(producer)
            if duplicate is not None:
                return duplicate
        for shard in sizes:
            if shard.stream in self._removed or shard.stream in self._state.removed:
                raise StreamRemoved(f"The stream {shard.stream} was removed with its table; load the table again")
        entry = AppendEntry(
            self.time_ms,
            tuple(
                BatchEntry(shard.stream, shard.number, self._find_end(shard), *size) for shard, size in sizes.items()
            ),
            *((producer.name, producer.epoch, producer.sequence) if producer is not None else ()),
        )
        self.entries.append(entry)
        for batch in entry.batches:
            self._ends[batch.shard] = batch.offset + batch.rows
        if producer is not None:
            self._set_producer(producer.name, advance_producer_summary(self._find_producer(producer.name), entry))
        return Acknowledgement(
            tuple(Position(batch.shard, batch.offset, batch.offset + batch.rows) for batch in entry.batches)
        )

    def fence(self, name: str) -> StreamProducerState:
        """Admit a request that begins a session of a producer, and return the state of the producer after it.

        Raises:
            TooManyRequests: The producer is new, and there are too many producers.
        """
        previous = self._find_producer(name)
        self._check_producer_limit(name, previous)
        # The epoch 0 is that of a producer without sessions.
        entry = FenceEntry(self.time_ms, name, previous.epoch + 1 if previous is not None else 1)
        self.entries.append(entry)
        current = begin_session(previous, entry)
        self._set_producer(name, current)
        return StreamProducerState(current.epoch, current.sequence)

    def remove(self, stream: str) -> None:
        """Admit a request that removes a stream."""
        if stream in self._removed or stream in self._state.removed:
            return
        self.entries.append(RemoveEntry(self.time_ms, stream))
        self._removed.add(stream)

    def apply(self) -> None:
        """Apply the entries to the state, after the group has become durable."""
        for entry in self.entries:
            self._state.apply(entry)

    def _find_end(self, shard: Shard) -> int:
        """Return the offset after the last row of a shard, with the rows of this group."""
        end = self._ends.get(shard)
        return end if end is not None else self._state.read_watermark(shard)

    def _find_producer(self, name: str) -> ProducerSummary | None:
        return self._producers.get(name) or self._state.producers.get(name)

    def _set_producer(self, name: str, summary: ProducerSummary) -> None:
        if self._find_producer(name) is None:
            self._new_producers[parse_owner(name)] += 1
        self._producers[name] = summary

    def _check_producer_limit(self, name: str, previous: ProducerSummary | None) -> None:
        """Check that the log may remember the producer `name` if it is new. `previous` is its state, or None."""
        if previous is None:
            self._state.check_producer_room(name, limit=self._state.producers_max, pending=self._new_producers)

    def _check_sequence(self, producer: StreamProducer) -> Acknowledgement | None:
        """Return the first answer if the append is a repeat, or None if it is the next append of its producer.

        A repeat whose positions the log has forgotten gets an answer without positions.

        Raises:
            ProducerFenced: The append is of an earlier or unknown session.
            SequenceGap: An earlier append of the producer is missing.
            TooManyRequests: The producer is new, and there are too many producers.
        """
        previous = self._find_producer(producer.name)
        self._check_producer_limit(producer.name, previous)
        last_sequence = previous.sequence if previous is not None else -1
        if previous is not None and producer.epoch < previous.epoch:
            raise ProducerFenced(
                f"A later session of the producer {producer.name!r} writes: this is epoch {producer.epoch}, and the "
                f"last is epoch {previous.epoch}. Stop this writer, or begin a new session"
            )
        if producer.epoch > (previous.epoch if previous is not None else 0):
            raise ProducerFenced(
                f"The log has no session with epoch {producer.epoch} of the producer {producer.name!r}; begin a session"
            )
        if previous is not None and producer.sequence <= last_sequence:
            repeats = (
                append.make_acknowledgement() for append in previous.appends if append.sequence == producer.sequence
            )
            return next(repeats, Acknowledgement((), duplicate=True))
        # Sequence numbers of a sparse producer may be missing. It waits for each answer, so no append can be delayed.
        if producer.sequence != last_sequence + 1 and not producer.sparse:
            raise SequenceGap(
                f"The append {producer.sequence} of the producer {producer.name!r} does not follow its last append, "
                f"{last_sequence}; send append {last_sequence + 1} first"
            )
        return None
