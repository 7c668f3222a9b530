"""The tests that each implementation of StreamLog inherits.

A subclass provides the fixture `log`, an open and empty log. A subclass of `DurableLogContract` provides `opener`,
which can open the same log several times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from seamark.formats.runtime.errors import (
    BadRequest,
    OffsetOutOfRange,
    ProducerFenced,
    SequenceGap,
    StreamRemoved,
    TooLarge,
)
from seamark.metaserver.log.port import (
    Acknowledgement,
    Batch,
    Position,
    Record,
    Shard,
    StreamLog,
    StreamProducer,
    StreamProducerState,
)

A, B, OTHER = Shard("table-1", 0), Shard("table-1", 1), Shard("table-2", 0)
LIMIT_BYTES = 1 << 30
Opener = Callable[[], AbstractAsyncContextManager[StreamLog]]


def build_batch(text: str, rows: int = 1) -> Batch:
    return Batch(rows, text.encode())


async def read_all(log: StreamLog, shard: Shard, offset: int = 0) -> list[Record]:
    """Return all records of a shard from `offset`, read in steps of about 100 bytes."""
    records: list[Record] = []
    while answer := await log.read(shard, offset, limit_bytes=100):
        records += answer
        offset = answer[-1].end
    return records


async def read_texts(log: StreamLog, shard: Shard) -> list[str]:
    return [record.batch.payload.decode() for record in await read_all(log, shard)]


class StreamLogContract:
    """The tests that each stream log passes. A subclass has the fixture `log`."""

    async def test_an_appended_batch_is_read_back(self, log: StreamLog) -> None:
        stored_batch = Batch(3, b"\0payload\xff" * 1000, bytes((0, 1, 2)))
        answer = await log.append({A: stored_batch}, StreamProducer("p", 0))
        assert answer.positions == (Position(A, 0, 3),)
        assert not answer.duplicate
        (record,) = await log.read(A, 0, limit_bytes=1)
        assert (record.shard, record.offset, record.end, record.batch) == (A, 0, 3, stored_batch)
        assert (record.producer, record.sequence) == ("p", 0)

    async def test_offsets_count_the_rows_of_each_shard(self, log: StreamLog) -> None:
        for number, rows in enumerate((5, 1, 7)):
            await log.append({A: build_batch(f"a{number}", rows)})
            await log.append({B: build_batch(f"b{number}", 2)})
        assert log.read_watermarks([A, B, OTHER]) == {A: 13, B: 6, OTHER: 0}
        assert [record.offset for record in await read_all(log, A)] == [0, 5, 6]
        assert await read_texts(log, B) == ["b0", "b1", "b2"]

    async def test_a_read_begins_with_the_record_that_contains_the_offset(self, log: StreamLog) -> None:
        for number in range(4):
            await log.append({A: build_batch(str(number), 10)})
        assert [record.offset for record in await log.read(A, 15, limit_bytes=LIMIT_BYTES)] == [10, 20, 30]
        assert [record.offset for record in await log.read(A, 20, limit_bytes=LIMIT_BYTES)] == [20, 30]
        assert [record.offset for record in await log.read(A, 9, limit_bytes=LIMIT_BYTES, end=20)] == [0, 10]
        assert [record.offset for record in await log.read(A, 0, limit_bytes=0)] == [0]
        assert list(await log.read(A, 40, limit_bytes=LIMIT_BYTES)) == []
        with pytest.raises(OffsetOutOfRange, match="row 41"):
            await log.read(A, 41, limit_bytes=LIMIT_BYTES)
        with pytest.raises(OffsetOutOfRange, match="row 1"):
            await log.read(OTHER, 1, limit_bytes=LIMIT_BYTES)

    async def test_concurrent_appends_are_stored_once_and_each_tasks_appends_in_order(self, log: StreamLog) -> None:
        async def write(number: int) -> list[Position]:
            return [
                (await log.append({A: build_batch(f"{number}-{append_number}", 1 + append_number % 3)})).positions[0]
                for append_number in range(20)
            ]

        positions = [position for positions in await asyncio.gather(*map(write, range(8))) for position in positions]
        records = await read_all(log, A)
        assert {(record.offset, record.end) for record in records} == {
            (position.offset, position.end) for position in positions
        }
        assert [record.offset for record in records[1:]] == [record.end for record in records[:-1]]
        for number in range(8):
            stored_texts = [text for text in await read_texts(log, A) if text.startswith(f"{number}-")]
            assert stored_texts == [f"{number}-{append_number}" for append_number in range(20)]

    async def test_append_to_several_shards_becomes_visible_at_once(self, log: StreamLog) -> None:
        seen_watermarks: set[tuple[int, int]] = set()

        async def watch() -> None:
            while True:
                watermarks = log.read_watermarks([A, OTHER])
                seen_watermarks.add((watermarks[A], watermarks[OTHER]))
                await asyncio.sleep(0)

        watcher = asyncio.ensure_future(watch())
        for number in range(20):
            await log.append({A: build_batch(f"a{number}"), OTHER: build_batch(f"b{number}", 2)})
        watcher.cancel()
        assert all(other == 2 * watermark for watermark, other in seen_watermarks), seen_watermarks

    async def test_a_repeated_append_gets_the_first_answer_and_is_stored_once(self, log: StreamLog) -> None:
        first_answer = await log.append({A: build_batch("x", 4), B: build_batch("y")}, StreamProducer("p", 0))
        repeated_answer = await log.append({A: build_batch("x", 4), B: build_batch("y")}, StreamProducer("p", 0))
        assert repeated_answer.duplicate
        assert repeated_answer.positions == first_answer.positions
        for sequence in range(1, 30):
            await log.append({A: build_batch(str(sequence))}, StreamProducer("p", sequence))
        assert (await log.append({A: build_batch("x", 4)}, StreamProducer("p", 0))).duplicate
        assert log.read_watermarks([A]) == {A: 33}

    async def test_a_repetition_of_an_append_that_still_waits_is_stored_once(self, log: StreamLog) -> None:
        answers = await asyncio.gather(
            *(log.append({A: build_batch("x", 4)}, StreamProducer("p", 0)) for _ in range(5))
        )
        assert [answer.duplicate for answer in answers] == [False, True, True, True, True]
        assert {answer.positions for answer in answers} == {(Position(A, 0, 4),)}
        assert log.read_watermarks([A]) == {A: 4}

    async def test_appends_of_a_producer_that_overlap_keep_their_order(self, log: StreamLog) -> None:
        await asyncio.gather(
            *(log.append({A: build_batch(str(sequence))}, StreamProducer("p", sequence)) for sequence in range(50))
        )
        assert await read_texts(log, A) == [str(sequence) for sequence in range(50)]

    async def test_a_missing_append_of_a_producer_is_noticed(self, log: StreamLog) -> None:
        with pytest.raises(SequenceGap, match="send append 0 first"):
            await log.append({A: build_batch("x")}, StreamProducer("p", 1))
        await log.append({A: build_batch("x")}, StreamProducer("p", 0))
        with pytest.raises(SequenceGap, match="send append 1 first"):
            await log.append({A: build_batch("x")}, StreamProducer("p", 2))
        assert (await log.append({A: build_batch("x")}, StreamProducer("p", 7, sparse=True))).positions[0].offset == 1
        assert (await log.append({A: build_batch("x")}, StreamProducer("p", 7, sparse=True))).duplicate
        assert log.read_watermarks([A]) == {A: 2}

    async def test_append_without_rows_uses_the_number_of_its_producer(self, log: StreamLog) -> None:
        await log.append({A: build_batch("0")}, StreamProducer("p", 0))
        assert await log.append({}, StreamProducer("p", 1)) == Acknowledgement(())
        assert (await log.append({}, StreamProducer("p", 1))).duplicate
        with pytest.raises(SequenceGap, match="send append 2 first"):
            await log.append({}, StreamProducer("p", 3))
        await log.append({A: build_batch("2")}, StreamProducer("p", 2))
        assert await read_texts(log, A) == ["0", "2"]

    async def test_an_earlier_session_of_a_producer_is_refused(self, log: StreamLog) -> None:
        assert log.find_producer("p") is None
        await log.append({A: build_batch("0")}, StreamProducer("p", 0))
        assert await log.fence("p") == StreamProducerState(1, 0)
        assert await log.fence("p") == StreamProducerState(2, 0)
        for epoch in (0, 1):
            with pytest.raises(ProducerFenced, match="epoch 2"):
                await log.append({A: build_batch("1")}, StreamProducer("p", 1, epoch))
        with pytest.raises(ProducerFenced, match="epoch 3"):
            await log.append({A: build_batch("1")}, StreamProducer("p", 1, 3))
        await log.append({A: build_batch("1")}, StreamProducer("p", 1, 2))
        assert log.find_producer("p") == StreamProducerState(2, 1)
        assert await read_texts(log, A) == ["0", "1"]

    async def test_one_task_waits_for_rows_of_several_shards(self, log: StreamLog) -> None:
        await log.append({A: build_batch("x", 3)})
        assert await log.wait({A: 2, B: 0}, 0.01)
        assert not await log.wait({A: 3, B: 0}, 0.01)
        waiting_task = asyncio.ensure_future(log.wait({A: 3, B: 0}, 60))
        await asyncio.sleep(0)
        await log.append({B: build_batch("y")})
        assert await waiting_task

    async def test_a_shard_is_read_from_a_time(self, log: StreamLog) -> None:
        for number in range(3):
            await log.append({A: build_batch(str(number), 2)})
            await asyncio.sleep(0.002)
        records = await read_all(log, A)
        for record in records:
            expected_offsets = [
                later_record.offset for later_record in records if later_record.time_ms >= record.time_ms
            ]
            assert await log.find_offset(A, record.time_ms) == expected_offsets[0]
        assert await log.find_offset(A, 0) == 0
        assert await log.find_offset(A, records[-1].time_ms + 1) == 6
        assert await log.find_offset(B, 0) == 0

    async def test_removed_stream_has_no_rows_and_refuses_appends(self, log: StreamLog) -> None:
        await log.append({A: build_batch("x"), B: build_batch("y"), OTHER: build_batch("z")})
        await log.remove(A.stream)
        await log.remove(A.stream)
        assert set(log.list_shards()) == {OTHER}
        with pytest.raises(StreamRemoved, match=A.stream):
            await log.append({OTHER: build_batch("z"), B: build_batch("y")})
        with pytest.raises(OffsetOutOfRange):
            await log.read(A, 1, limit_bytes=LIMIT_BYTES)
        assert await read_texts(log, OTHER) == ["z"]

    async def test_shards_are_listed_with_their_state(self, log: StreamLog) -> None:
        await log.append({A: build_batch("x" * 100, 4), OTHER: build_batch("z")})
        await log.release({A: 3, OTHER: 99})
        await log.release({A: 2})
        states = log.list_shards()
        assert set(states) == {A, OTHER}
        assert set(log.list_shards(OTHER.stream)) == {OTHER}
        assert (states[A].start, states[A].watermark, states[A].released) == (0, 4, 3)
        assert states[OTHER].released == 1
        assert states[A].size_bytes >= 100

    async def test_invalid_append_is_refused(self, log: StreamLog) -> None:
        refused_batches = [
            ({}, None, "at least one batch or a producer"),
            ({A: Batch(0, b"x")}, None, "not 0"),
            ({A: Batch(2, b"x", b"\0")}, None, "1 kinds"),
            ({A: Batch(1, b"x", b"\3")}, None, "3 is not a kind of row"),
            ({Shard("", 0): build_batch("x")}, None, "name of its stream"),
            ({Shard("t", 65536): build_batch("x")}, None, "65535"),
            ({A: build_batch("x")}, StreamProducer("", 0), "0"),
            ({A: build_batch("x")}, StreamProducer("p" * 201, 0), "201"),
            ({A: build_batch("x")}, StreamProducer("p", -1), "-1"),
            ({A: build_batch("x")}, StreamProducer("p", 0, -1), "-1"),
        ]
        for batches, producer, message in refused_batches:
            with pytest.raises(BadRequest, match=message):
                await log.append(batches, producer)
        with pytest.raises(BadRequest):
            await log.fence("")
        assert log.list_shards() == {}

    async def test_an_append_that_is_too_large_is_refused(self, log: StreamLog) -> None:
        with pytest.raises(TooLarge, match="send fewer rows"):
            await log.append({A: Batch(rows=1, payload=bytes(65 << 20))})  # The limit is 64 MiB.
        assert log.read_watermarks([A]) == {A: 0}


class DurableLogContract:
    """Tests of a log that keeps its rows after its process ends."""

    async def test_records_and_producers_survive_a_restart(self, opener: Opener) -> None:
        async with opener() as log:
            for number in range(20):
                await log.append(
                    {A: build_batch(f"a{number}", 2), OTHER: build_batch(f"b{number}")}, StreamProducer("p", number)
                )
            states, records = log.list_shards(), await read_all(log, A)
        for _ in range(2):
            async with opener() as log:
                assert log.list_shards() == states
                assert await read_all(log, A) == records
                assert await read_texts(log, OTHER) == [f"b{number}" for number in range(20)]
                assert log.read_watermarks([A, B]) == {A: 40, B: 0}

    async def test_a_repetition_after_a_restart_is_stored_once(self, opener: Opener) -> None:
        async with opener() as log:
            first_answer = await log.append({A: build_batch("x", 4), B: build_batch("y")}, StreamProducer("p", 0))
        async with opener() as log:
            repeated_answer = await log.append({A: build_batch("x", 4), B: build_batch("y")}, StreamProducer("p", 0))
            assert (repeated_answer.duplicate, repeated_answer.positions) == (True, first_answer.positions)
            with pytest.raises(SequenceGap, match="send append 1 first"):
                await log.append({A: build_batch("z")}, StreamProducer("p", 2))
            await log.append({A: build_batch("z")}, StreamProducer("p", 1))
        async with opener() as log:
            assert log.find_producer("p") == StreamProducerState(0, 1)
            assert await read_texts(log, A) == ["x", "z"]

    async def test_number_of_an_append_without_rows_survives_a_restart(self, opener: Opener) -> None:
        async with opener() as log:
            await log.append({}, StreamProducer("p", 0))
        async with opener() as log:
            assert (await log.append({A: build_batch("0")}, StreamProducer("p", 0))).duplicate
            await log.append({A: build_batch("1")}, StreamProducer("p", 1))
            assert await read_texts(log, A) == ["1"]

    async def test_an_earlier_session_is_refused_after_a_restart(self, opener: Opener) -> None:
        async with opener() as log:
            await log.append({A: build_batch("0")}, StreamProducer("p", 0))
            assert (await log.fence("p")).epoch == 1
        async with opener() as log:
            with pytest.raises(ProducerFenced):
                await log.append({A: build_batch("1")}, StreamProducer("p", 1))
            assert await log.fence("p") == StreamProducerState(2, 0)

    async def test_a_removed_stream_is_removed_after_a_restart(self, opener: Opener) -> None:
        async with opener() as log:
            await log.append({A: build_batch("x"), OTHER: build_batch("z")})
            await log.remove(A.stream)
        async with opener() as log:
            assert set(log.list_shards()) == {OTHER}
            with pytest.raises(StreamRemoved):
                await log.append({B: build_batch("y")})

    async def test_cancelled_append_is_stored_completely_or_not_at_all(self, opener: Opener) -> None:
        async with opener() as log:
            for number in range(30):
                task = asyncio.ensure_future(log.append({A: build_batch(str(number)), OTHER: build_batch(str(number))}))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await log.append({A: build_batch("end"), OTHER: build_batch("end")})
            stored_texts = await read_texts(log, A)
            assert await read_texts(log, OTHER) == stored_texts
            assert stored_texts[-1] == "end"
        async with opener() as log:
            assert await read_texts(log, A) == await read_texts(log, OTHER) == stored_texts
