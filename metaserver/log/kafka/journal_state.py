"""The state of a log that follows from the journal. It is the same on every replica that has applied the same records.

The functions do no I/O.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from msgspec import structs

from seamark.formats.runtime.errors import LogUnavailable, SeamarkError
from seamark.metaserver.log.kafka.journal import (
    AppendRequest,
    FenceRequest,
    GateSummary,
    Head,
    HeadPiece,
    JournalGroup,
    JournalRecord,
    MoveGatesRequest,
    ReleaseRequest,
    RemoveRequest,
    Request,
    ShardBatches,
    ShardStart,
    StoredBatch,
    TrimRequest,
    decode_head,
)
from seamark.metaserver.log.port import (
    Acknowledgement,
    GateMoved,
    Shard,
    StreamGate,
    StreamProducer,
    StreamProducerState,
)
from seamark.metaserver.log.state import AppendEntry, BatchSize, Group, LogState

_NO_LIMIT = 1 << 62
_UNMOVED_GATE = GateSummary()
Outcome = Acknowledgement | StreamProducerState | SeamarkError | None
"""The outcome of a request: its answer, or the error with which it was refused."""


class JournalState:
    """The state after all records before `applied`.

    Attributes:
        state: The shards, producers and removed streams.
        applied: Kafka's offset of the next record of the journal.
        groups: The number of groups since the last head.
        trimmed_ms: The time of the last trim that this replica has applied.
    """

    def __init__(self) -> None:
        # Do not limit producers here, because replicas with different limits would have different states. Each replica
        # limits them before it writes (`KafkaLog.append`).
        self.state = LogState(producers_max=_NO_LIMIT, keep_ms=_NO_LIMIT)
        self.applied = 0
        """The offset after the last applied record of the journal."""
        self.groups = 0
        """The number of groups of requests since the last head, the last stored state."""
        self.trimmed_ms = 0
        """The time of the last request to remove old rows."""
        self._batches: dict[Shard, list[StoredBatch]] = {}
        """The readable batches of each shard, in ascending order."""
        self._first_records: dict[Shard, int] = {}
        """Kafka's offset before which the records of each shard may be deleted."""
        self._unreleased_bytes: dict[str, int] = {}
        """The bytes of the rows that are in no data file yet, by stream. Retention keeps these rows."""
        self._gates: dict[str, GateSummary] = {}
        """The gate of each stream whose gate was ever closed. A closed gate refuses appends to the stream."""

    def apply(self, group: JournalGroup) -> list[Outcome]:
        """Apply the next group, and return the outcome of each request."""
        self.groups += 1
        return [self._apply(request, group.time_ms) for request in group.requests]

    def _apply(self, request: Request, time_ms: int) -> Outcome:
        group = Group(self.state, time_ms)
        answer: Outcome = None
        try:
            match request:
                case AppendRequest():
                    answer = self._append(request, group)
                case FenceRequest():
                    answer = group.fence(request.producer)
                case RemoveRequest():
                    group.remove(request.stream)
                    self._drop_stream(request.stream)
                case ReleaseRequest():
                    self._release({Shard(stream, number): offset for stream, number, offset in request.offsets})
                case TrimRequest():
                    self._trim(request, group.time_ms)
                case MoveGatesRequest():
                    self._move_gates(request)
        except SeamarkError as error:
            return error
        group.apply()
        return answer

    def _append(self, request: AppendRequest, group: Group) -> Acknowledgement:
        """Apply an append, and return its answer.

        A repeated append gets its first answer. Any other append is refused if a commit has changed, or is changing,
        how rows of the table are written since the rows were checked.

        Raises:
            GateMoved: A commit has closed or opened the gate of a stream.
            LogUnavailable: Retention has deleted the rows of the append.
        """
        producer = (
            StreamProducer(request.producer, request.sequence, request.epoch, request.sparse)
            if request.producer
            else None
        )
        sizes = {
            row_batch.shard: BatchSize(row_batch.rows, row_batch.payload_bytes, row_batch.kinds_bytes)
            for row_batch in request.batches
        }
        answer = group.append_sizes(sizes, producer)
        if answer.duplicate:
            return answer
        self._check_gates(request)
        for row_batch in request.batches:
            if min(row_batch.records) < self._first_records.get(row_batch.shard, 0):
                # Retention has deleted the rows, because the replica was paused after it wrote them, and before it
                # wrote this request.
                raise LogUnavailable("The rows were removed before they were appended; send them again")
        for entry in group.entries:
            assert isinstance(entry, AppendEntry)  # The group contains only this request.
            for batch, stored_batch in zip(entry.batches, request.batches, strict=True):
                self._count_unreleased(batch.stream, batch.size_bytes)
                self._batches.setdefault(batch.shard, []).append(
                    StoredBatch(
                        batch.offset,
                        batch.rows,
                        batch.payload_bytes,
                        batch.kinds_bytes,
                        stored_batch.records,
                        entry.time_ms,
                        entry.producer,
                        entry.sequence,
                    )
                )
        return answer

    def _check_gates(self, request: AppendRequest) -> None:
        """Check that no commit has changed how rows are written since the rows of an append were checked.

        Such a commit closes the gate of the stream, and opens the gate when the commit ends. The number of the gate
        increases each time.

        Raises:
            GateMoved: A gate is closed, or has another number.
        """
        numbers = dict(request.gates)
        for stream in {row_batch.stream for row_batch in request.batches}:
            gate = self._gates.get(stream, _UNMOVED_GATE)
            if gate.is_closed or gate.number != numbers.get(stream, 0):
                raise GateMoved(
                    "A commit has changed how rows of the stream table are written, or is changing it; send the rows "
                    "again"
                )

    def _move_gates(self, request: MoveGatesRequest) -> None:
        if any(self.read_gate(stream).number != number for stream, number in request.numbers):
            raise GateMoved("Another process has moved the gate of the stream table; repeat the commit later")
        for stream, number in request.numbers:
            self._gates[stream] = GateSummary(number + 1, request.is_closed)

    def read_gate(self, stream: str) -> StreamGate:
        """Return the gate of a stream, which refuses appends while a commit changes how its rows are written."""
        gate = self._gates.get(stream, _UNMOVED_GATE)
        return StreamGate(gate.number, gate.is_closed)

    def list_gates(self) -> Collection[str]:
        """Return the streams whose gate was ever closed.

        A closed gate refuses appends while a commit changes how rows are written.
        """
        return list(self._gates)

    def _release(self, offsets: Mapping[Shard, int]) -> None:
        former_offsets = self.state.get_released_offsets()
        self.state.release(offsets)
        for shard in offsets.keys() & former_offsets.keys():
            batches, released_offset = self.list_batches(shard), self.state.shards[shard].released
            first = bisect.bisect_right(batches, former_offsets[shard], key=lambda batch: batch.end)
            last = bisect.bisect_right(batches, released_offset, key=lambda batch: batch.end)
            self._count_unreleased(shard.stream, -sum(batch.size_bytes for batch in batches[first:last]))

    def _count_unreleased(self, stream: str, size_bytes: int) -> None:
        """Count bytes of rows that are in no data file yet, which retention must keep.

        Args:
            stream: The stream of the rows.
            size_bytes: The size of new rows, or a negative number for rows that are in data files now.
        """
        self._unreleased_bytes[stream] = self._unreleased_bytes.get(stream, 0) + size_bytes
        if not self._unreleased_bytes[stream]:
            del self._unreleased_bytes[stream]

    def count_unreleased_bytes(self, stream: str) -> int:
        """Return the bytes of the unreleased batches of a stream."""
        return self._unreleased_bytes.get(stream, 0)

    def _drop_stream(self, stream: str) -> None:
        self._unreleased_bytes.pop(stream, None)
        self._gates.pop(stream, None)
        for shard in [shard for shard in self._batches if shard.stream == stream]:
            del self._batches[shard]
        for shard in [shard for shard in self._first_records if shard.stream == stream]:
            del self._first_records[shard]

    def _trim(self, request: TrimRequest, now_ms: int) -> None:
        """Remove the batches before the new start of each shard, and forget old producers and removed streams."""
        for start in request.starts:
            shard = Shard(start.stream, start.number)
            batches, summary = self._batches.get(shard), self.state.shards.get(shard)
            if batches is None or summary is None or start.offset <= summary.start:
                continue
            removed_count = bisect.bisect_right(batches, start.offset, key=lambda batch: batch.end)
            summary.start = max(summary.start, start.offset)
            summary.size_bytes -= sum(batch.size_bytes for batch in batches[:removed_count])
            del batches[:removed_count]
            # Between the choice of `start` and this request, other replicas may have appended batches whose records are
            # before `start.record`. Keep these records.
            record = min((min(batch.records) for batch in batches), default=start.record)
            # The offset never decreases, because records before the earlier offset may be deleted already.
            self._first_records[shard] = max(min(record, start.record), self._first_records.get(shard, 0))
        self.trimmed_ms = now_ms
        self.state.keep_ms = request.keep_ms
        self.state.forget(now_ms, now_ms)

    def list_batches(self, shard: Shard) -> Sequence[StoredBatch]:
        """Return the readable batches of a shard, in ascending order."""
        return self._batches.get(shard, ())

    def get_deletable_offsets(self) -> dict[Shard, int]:
        """Return Kafka's offset of each shard before which records may be deleted."""
        return dict(self._first_records)

    def choose_starts(self, *, oldest_ms: int, batches_max: int, bytes_max: int) -> list[ShardStart]:
        """Choose the released batches to remove, and return the first remaining row of each affected shard.

        Batches from before `oldest_ms` are removed. If more than `batches_max` or `bytes_max` remain, the oldest are
        removed as well. Unreleased batches count for the limits, but are never removed.

        Args:
            oldest_ms: The time of the oldest batches to keep.
            batches_max: The number of batches, over all shards, above which released batches are removed.
            bytes_max: The size of all batches above which released batches are removed.
        """
        released_batches: list[list[tuple[int, Shard, int]]] = []  # The time, shard and index of each batch.
        for shard, batches in self._batches.items():
            offset = self.state.shards[shard].released
            released_count = bisect.bisect_right(batches, offset, key=lambda batch: batch.end)
            released_batches.append(
                [(batch.time_ms, shard, index) for index, batch in enumerate(batches[:released_count])]
            )
        excess_batches = sum(map(len, self._batches.values())) - batches_max
        excess_bytes = sum(summary.size_bytes for summary in self.state.shards.values()) - bytes_max
        removed_counts: dict[Shard, int] = {}
        for time_ms, shard, index in heapq.merge(*released_batches):
            if time_ms >= oldest_ms and excess_batches <= 0 and excess_bytes <= 0:
                break
            removed_counts[shard] = index + 1
            excess_batches -= 1
            excess_bytes -= self._batches[shard][index].size_bytes
        return [self._make_start_after(shard, count) for shard, count in removed_counts.items()]

    def _make_start_after(self, shard: Shard, count: int) -> ShardStart:
        """Return the first remaining row of a shard after the removal of its first `count` batches."""
        batches = self._batches[shard]
        removed_batches, remaining = batches[:count], batches[count:]
        # The order of batches in the journal may differ from their order in the partition if several replicas write.
        record = min(
            (min(batch.records) for batch in remaining), default=max(max(b.records) for b in removed_batches) + 1
        )
        return ShardStart(shard.stream, shard.number, removed_batches[-1].end, record)

    def summarize(self) -> Head:
        """Return a copy of the state for storage, which later records do not change."""
        summary = self.state.summarize()
        summary_copy = structs.replace(
            summary,
            shards=[structs.replace(shard) for shard in summary.shards],
            producers=dict(summary.producers),
            removed=dict(summary.removed),
        )
        shards = [
            ShardBatches(shard.stream, shard.number, self._first_records.get(shard, 0), list(batches))
            for shard, batches in self._batches.items()
        ]
        return Head(summary_copy, shards, dict(self._gates))

    def restore(self, head: Head, applied_offset: int) -> None:
        """Replace the state by a stored state."""
        self.state.restore(head.state)
        self.applied = applied_offset
        self._gates = head.gates  # A closed gate refuses appends while a commit changes how rows are written.
        self._batches = {Shard(shard_head.stream, shard_head.number): shard_head.batches for shard_head in head.shards}
        self._first_records = {
            Shard(shard_head.stream, shard_head.number): shard_head.first_record
            for shard_head in head.shards
            if shard_head.first_record
        }
        for shard, batches in self._batches.items():
            released_offset = self.state.shards[shard].released
            self._count_unreleased(
                shard.stream, sum(batch.size_bytes for batch in batches if batch.end > released_offset)
            )

    def check_invariants(self) -> None:
        """Check that the batches of each shard have no gap, and end at its watermark. Only tests call this method."""
        self.state.check_invariants()
        for shard, batches in self._batches.items():
            summary = self.state.shards[shard]
            for earlier, later in pairwise(batches):
                assert earlier.end == later.offset, (shard, earlier, later)
            assert not batches or batches[0].offset <= summary.start < batches[0].end, shard
            assert shard.stream not in self._unreleased_bytes or self._unreleased_bytes[shard.stream] > 0
            assert (batches[-1].end if batches else summary.start) == summary.watermark, shard


class JournalReader:
    """Applies the records of a journal from the first record on. A head replaces the deleted records.

    Attributes:
        journal: The state, which is empty until `is_recovered`.
    """

    def __init__(self, first: int) -> None:
        """Start at the first record of the journal, which has Kafka's offset `first`.

        If `first` is 0, no record was deleted, so the reader can apply all records. Otherwise it must first read a
        complete head: the state of the log that replaces the deleted records.
        """
        self.journal = JournalState()
        self.is_recovered = first == 0
        self._first = first
        self._waiting: list[tuple[int, JournalGroup]] = []
        """The groups that were read before the first head was complete."""
        self._pieces: dict[str, list[bytes]] = {}

    def apply(self, offset: int, record: JournalRecord) -> list[Outcome]:
        """Apply a record of the journal, and return the outcomes of its requests.

        A record is a group of requests, or a piece of a head, which is a stored state of the log. A piece has no
        outcomes. If earlier records were deleted, a group before the first complete head also has none: it waits until
        the head provides the state to which it is applied.

        Args:
            offset: Kafka's offset of the record.
            record: The record.
        """
        if isinstance(record, HeadPiece):
            self._read_head(record)
            self._mark_applied(offset)
            return []
        if not self.is_recovered:
            self._waiting.append((offset, record))
            return []
        outcomes = self.journal.apply(record)
        self._mark_applied(offset)
        return outcomes

    def _mark_applied(self, offset: int) -> None:
        if self.is_recovered:
            self.journal.applied = offset + 1

    def _read_head(self, piece: HeadPiece) -> None:
        """Collect the pieces of a head, a stored state of the log. With the last piece, continue from this state.

        The waiting groups are applied to the state, unless it includes them already.
        """
        if self.is_recovered:
            # The state is known already, so only start counting the groups for the next head.
            if piece.place == piece.count - 1:
                self.journal.groups = 0
            return
        # The state does not include the records from `piece.after` on. If some of them were deleted, skip this head.
        if piece.after < self._first:
            return
        pieces = self._pieces.setdefault(piece.head, [])
        if piece.place != len(pieces):  # The writer has repeated a piece, or the first pieces were deleted.
            return
        pieces.append(piece.data)
        if len(pieces) < piece.count:
            return
        self.journal.restore(decode_head(pieces), piece.after)
        self.is_recovered = True
        for offset, group in self._waiting:
            if offset >= piece.after:
                self.journal.apply(group)
        self._waiting, self._pieces = [], {}
