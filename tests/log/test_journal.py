"""Tests of the journal of the log in Kafka. Replicas that have applied the same records have the same state."""

from __future__ import annotations

import random

import msgspec
import pytest

from seamark.formats.runtime.errors import LogUnavailable
from seamark.metaserver.log.kafka import journal
from seamark.metaserver.log.kafka.journal import (
    VERSION,
    AppendRequest,
    FenceRequest,
    JournalGroup,
    JournalRecord,
    MoveGatesRequest,
    ReleaseRequest,
    RemoveRequest,
    Request,
    RowsEntry,
    ShardStart,
    TrimRequest,
    choose_version,
    decode_record,
    encode_group,
    encode_head,
)
from seamark.metaserver.log.kafka.journal_state import JournalReader, JournalState
from seamark.metaserver.log.port import Acknowledgement, GateMoved, Shard, StreamGate, make_topic_producer_name
from tests.seeds import examples, first_seed

A = Shard("t", 0)
HOUR_MS = 3_600_000


def build_group(*requests: Request, time_ms: int = 1) -> JournalGroup:
    return JournalGroup(VERSION, "writer", 0, time_ms, requests)


def build_append(*records: int, rows: int = 1, shard: Shard = A) -> AppendRequest:
    """Return the journal's request to append `rows` rows without a producer.

    The rows are in the Kafka records with the offsets `records`.
    """
    return AppendRequest(
        (RowsEntry(shard.stream, shard.number, rows, payload_bytes=10, kinds_bytes=0, records=records),)
    )


def encode_state(state: JournalState) -> bytes:
    return msgspec.msgpack.encode(state.summarize())


def apply_records(records: list[tuple[int, JournalRecord]], start: int) -> JournalReader:
    """Return a reader of the journal that has applied the records from Kafka's offset `start` to the end."""
    reader = JournalReader(start)
    for offset, record in records:
        if offset >= start:
            reader.apply(offset, record)
    return reader


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(20, number_in_ordinary_runs=3)))
def test_replica_that_starts_at_a_head_ends_in_the_same_state(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is a summary of the journal, which is written to the journal in pieces. A new replica starts there."""
    monkeypatch.setattr(journal, "HEAD_PIECE_BYTES", 50)
    rng = random.Random(seed)
    full_reader = JournalReader(0)
    records: list[tuple[int, JournalRecord]] = []
    head_positions: list[int] = []
    kafka_offset = 0

    def write(data: bytes) -> None:
        record = decode_record(data)
        full_reader.apply(len(records), record)
        records.append((len(records), record))

    for step in range(60):
        now_ms, shard = step * HOUR_MS, Shard(rng.choice("st"), rng.randrange(2))
        watermark = full_reader.journal.state.read_watermark(shard)
        drawn_kind = rng.random()
        if drawn_kind < 0.6:
            kafka_offset += 1
            entry = RowsEntry(shard.stream, shard.number, rng.randint(1, 3), 10, 0, (kafka_offset,))
            name = rng.choice(("", "p", "q"))
            gates = ((shard.stream, full_reader.journal.read_gate(shard.stream).number),)
            sequence = rng.randrange(9) if name else -1
            request: Request = AppendRequest((entry,), name, sequence, 0, sparse=True, gates=gates)
        elif drawn_kind < 0.8:
            request = ReleaseRequest(((shard.stream, shard.number, rng.randint(0, watermark)),))
        elif drawn_kind < 0.85:
            request = FenceRequest(rng.choice("pq"))
        elif drawn_kind < 0.87:
            request = RemoveRequest("s")
        elif drawn_kind < 0.9:
            gate = full_reader.journal.read_gate(shard.stream)
            request = MoveGatesRequest(((shard.stream, gate.number),), not gate.is_closed)
        else:
            starts = full_reader.journal.choose_starts(oldest_ms=now_ms - 9 * HOUR_MS, batches_max=8, bytes_max=1 << 30)
            request = TrimRequest(tuple(starts), 20 * HOUR_MS)
        write(encode_group(build_group(request, time_ms=now_ms)))
        full_reader.journal.check_invariants()
        if rng.random() < 0.1:
            head_position = full_reader.journal.applied
            for piece in encode_head(full_reader.journal.summarize(), f"head {step}", head_position):
                if rng.random() < 0.3:  # Another replica writes at the same time.
                    kafka_offset += 1
                    write(encode_group(build_group(build_append(kafka_offset), time_ms=now_ms)))
                write(piece)
            head_positions.append(head_position)
    for head_position in head_positions:
        late_reader = apply_records(records, head_position)
        assert late_reader.is_recovered
        assert late_reader.journal.applied == len(records)
        assert encode_state(late_reader.journal) == encode_state(full_reader.journal)
        late_reader.journal.check_invariants()


def test_gate_refuses_appends_that_were_checked_before_it_moved() -> None:
    """A gate counts how often a stream was closed or opened for appends. An append states the count that it knows."""
    state = JournalState()
    row_entry = RowsEntry("t", 0, 1, 10, 0, (1,))

    def append(gate_number: int, sequence: int) -> object:
        """Append a row that was checked when the gate had this number.

        Return None if it is stored, and otherwise the outcome.
        """
        request = AppendRequest((row_entry,), "p", sequence, gates=(("t", gate_number),))
        (outcome,) = state.apply(build_group(request))
        state.check_invariants()
        return None if isinstance(outcome, Acknowledgement) and not outcome.duplicate else outcome

    def move(gate_number: int, *, is_closed: bool) -> object:
        return state.apply(build_group(MoveGatesRequest((("t", gate_number), ("u", gate_number)), is_closed)))[0]

    assert append(0, 0) is None
    assert move(0, is_closed=True) is None
    assert isinstance(append(0, 1), GateMoved)
    assert isinstance(append(1, 1), GateMoved)  # The gate is closed.
    assert isinstance(move(0, is_closed=False), GateMoved)  # Another process has moved it.
    assert state.read_gate("u") == StreamGate(1, is_closed=True)
    assert move(1, is_closed=False) is None
    assert isinstance(append(1, 1), GateMoved)
    assert append(2, 1) is None  # The refused appends have not moved the number of the producer.
    assert isinstance(append(0, 1), Acknowledgement)  # A repeated append gets its first answer.
    assert state.state.read_watermark(A) == 2


def test_producers_of_an_input_topic_stay_until_a_later_topic_has_replaced_it() -> None:
    """A topic is forgotten when a newer topic has an entry more than 10 hours after the last entry of the topic.

    The newer topic must also be of the same table. A fence is an entry that begins a session of a producer.
    """
    state = JournalState()
    first_producer, second_producer = (
        make_topic_producer_name("t", topic_id, 0) for topic_id in ("first-id", "second-id")
    )
    other_producer = make_topic_producer_name("u", "third", 0)

    def list_producers(hour: int) -> list[str]:
        state.apply(build_group(TrimRequest((), 10 * HOUR_MS), time_ms=hour * HOUR_MS))
        state.check_invariants()
        return list(state.state.producers)

    state.apply(build_group(FenceRequest(first_producer), FenceRequest(other_producer), time_ms=0))
    # The topics are idle, and no later topic has replaced them.
    assert list_producers(hour=100) == [
        first_producer,
        other_producer,
    ]
    state.apply(build_group(FenceRequest(first_producer), time_ms=101 * HOUR_MS))
    state.apply(build_group(FenceRequest(second_producer), time_ms=102 * HOUR_MS))
    # A paused server may still read the first topic.
    assert list_producers(hour=200) == [
        first_producer,
        other_producer,
        second_producer,
    ]
    state.apply(build_group(FenceRequest(second_producer), time_ms=201 * HOUR_MS))
    assert list_producers(hour=202) == [other_producer, second_producer]
    assert list_producers(hour=900) == [other_producer, second_producer]


def test_replica_does_not_start_from_a_head_before_a_deleted_record() -> None:
    """A head is the stored state of the log, as records of the journal."""
    state = JournalState()
    state.apply(build_group(build_append(0)))
    (early_head,) = encode_head(state.summarize(), "early", 1)
    state.apply(build_group(build_append(1)))
    (late_head,) = encode_head(state.summarize(), "late", 2)
    # The records before offset 2 are deleted. The early head does not contain the record at offset 1.
    reader = JournalReader(2)
    reader.apply(2, decode_record(early_head))
    assert not reader.is_recovered
    reader.apply(3, decode_record(late_head))
    assert reader.is_recovered
    assert reader.journal.state.read_watermark(A) == 2


def test_rows_journaled_before_the_retention_stay_readable() -> None:
    """A row is released when it is not needed any more. The retention removes old, released rows.

    A replica writes rows to Kafka, and then a record with their offsets to the journal.

    Another replica wrote its rows early, but its record late. The rows are then before the start of the retention.
    """
    state = JournalState()
    state.apply(build_group(build_append(5), ReleaseRequest((("t", 0, 1),))))
    # Released rows may be trimmed if they are older than an hour. The limits of batches and bytes do not matter here.
    (start,) = state.choose_starts(oldest_ms=HOUR_MS, batches_max=9, bytes_max=1 << 30)
    assert start == ShardStart("t", number=0, offset=1, record=6)
    state.apply(build_group(build_append(4)))
    state.apply(build_group(TrimRequest((start,), HOUR_MS)))
    assert state.get_deletable_offsets() == {A: 4}
    assert [batch.records for batch in state.list_batches(A)] == [(4,)]


def test_an_append_whose_rows_are_deleted_is_refused() -> None:
    state = JournalState()
    state.apply(build_group(build_append(5), ReleaseRequest((("t", 0, 1),))))
    state.apply(build_group(TrimRequest((ShardStart("t", 0, 1, 6),), HOUR_MS)))
    refusal, acknowledgement = state.apply(build_group(build_append(3), build_append(6)))
    assert isinstance(refusal, LogUnavailable)
    assert isinstance(acknowledgement, Acknowledgement)
    assert acknowledgement.positions[0].offset == 1


def test_retention_keeps_all_records_of_a_batch_with_a_piece_that_was_written_again() -> None:
    """The rows of a batch are in one or several records of Kafka, the pieces of the batch.

    `build_append` gets the offsets of these records. A start names the first batch that the retention keeps, and the
    first record of it.
    """
    state = JournalState()
    # Kafka did not report the offset of the first piece of the second batch, so it was written twice: at 3 and at 5.
    state.apply(build_group(build_append(2, 1), build_append(5, 4)))
    state.apply(build_group(ReleaseRequest((("t", 0, 1),))))
    (start,) = state.choose_starts(oldest_ms=1 << 60, batches_max=9, bytes_max=1 << 30)
    assert (start.offset, start.record) == (1, 4)
    assert state.apply(build_group(TrimRequest((ShardStart("t", number=0, offset=1, record=9),), HOUR_MS))) == [None]
    assert state.get_deletable_offsets() == {A: 4}
    state.apply(build_group(ReleaseRequest((("t", 0, 2),))))
    (start,) = state.choose_starts(oldest_ms=1 << 60, batches_max=9, bytes_max=1 << 30)
    assert (start.offset, start.record) == (2, 6)
    (refusal,) = state.apply(build_group(build_append(7, 3)))
    assert isinstance(refusal, LogUnavailable)


def test_retention_removes_the_oldest_released_batches_first() -> None:
    state = JournalState()
    for number in range(6):
        state.apply(build_group(build_append(number, shard=Shard("t", number % 2)), time_ms=number * HOUR_MS))
    state.apply(build_group(ReleaseRequest((("t", 0, 3), ("t", 1, 1)))))
    assert state.count_unreleased_bytes("t") == 20  # A batch has 10 bytes.
    starts_by_age = state.choose_starts(oldest_ms=2 * HOUR_MS, batches_max=9, bytes_max=1 << 30)
    assert {(start.number, start.offset) for start in starts_by_age} == {(0, 1), (1, 1)}
    starts_by_count = state.choose_starts(oldest_ms=0, batches_max=5, bytes_max=1 << 30)
    assert {(start.number, start.offset) for start in starts_by_count} == {(0, 1)}
    starts_by_size = state.choose_starts(oldest_ms=0, batches_max=9, bytes_max=35)
    assert {(start.number, start.offset) for start in starts_by_size} == {(0, 2), (1, 1)}


def test_a_record_of_another_version_is_refused() -> None:
    for version in (0, VERSION + 1):
        with pytest.raises(LogUnavailable, match=f"version {version}"):
            decode_record(encode_group(JournalGroup(version, "writer", 0, 1, ())))
    with pytest.raises(LogUnavailable, match="upgrade this server"):
        decode_record(b"no record")


def test_only_records_with_gates_have_the_version_that_earlier_servers_refuse() -> None:
    """A gate stops appends to a stream while a commit changes how its rows are written.

    An earlier server would ignore the gate, so it must not read such records. A head is the stored state of the log, as
    records of the journal.
    """
    append = build_append(0)
    assert choose_version([append, FenceRequest("p")]) == 1
    assert choose_version([append, msgspec.structs.replace(append, gates=(("t", 1),))]) == 2
    move = MoveGatesRequest((("t", 0),), is_closed=True)
    assert choose_version([append, move]) == 2
    state = JournalState()
    state.apply(build_group(append))
    for version in (1, 2):
        (piece,) = encode_head(state.summarize(), "head", 1)
        assert decode_record(piece).version == version
        state.apply(build_group(move))
