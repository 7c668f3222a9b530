"""Tests of the intake of an input topic without Kafka. The topic is in memory, and the server is real."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from seamark.formats.runtime.errors import CommitUnknown, ProducerFenced, RetryLater
from seamark.metaserver.log.port import Acknowledgement, StreamProducerState, make_topic_producer_name
from seamark.metaserver.log.state import AppendEntry, FenceEntry, LogState, RemoveEntry
from seamark.metaserver.streams.appends import TableRows, TopicProducer
from seamark.metaserver.streams.incoming import avro_rows
from seamark.metaserver.streams.incoming.dead_letters import DEAD_LETTER_TABLE
from seamark.metaserver.streams.keys import KEY
from seamark.metaserver.streams.opening import AppendingTables
from seamark.metaserver.streams.stream_counts import TopicCounts
from seamark.metaserver.streams.topics import intake
from seamark.metaserver.streams.topics.intake import ENVELOPE, TopicIntake
from tests.seeds import first_seed, mark_fast
from tests.streams.incoming.test_dead_letters import LETTERS, create_dead_letter_table, read_dead_letter_rows
from tests.streams.test_rows_over_http import StreamServer, create_stream_table, open_stream_server
from tests.streams.topics.topic_source import ENCODERS, MemoryTopic, encode_arrow, encode_avro, encode_json
from tests.waits import until


class FailingTables(AppendingTables):
    """Stream tables whose appends sometimes fail, before or after the log has stored the rows."""

    def __init__(self, stream: StreamServer, rng: random.Random, chance: float) -> None:
        components = stream.server.components
        super().__init__(components.catalog, components.streams)
        self._rng, self._chance = rng, chance

    async def append(self, appends: Sequence[TableRows], producer: TopicProducer) -> Acknowledgement:
        if self._rng.random() < self._chance:
            raise RetryLater("the log is busy")
        acknowledged_appends = await super().append(appends, producer)
        if self._rng.random() < self._chance:
            raise CommitUnknown("the answer was lost")
        return acknowledged_appends


class IntakeRig:
    """A server, a topic, and the intake that reads it."""

    def __init__(self, stream: StreamServer, topic: MemoryTopic, tables: AppendingTables) -> None:
        self.stream, self.topic, self.tables = stream, topic, tables
        self.counts = TopicCounts()

    async def make_intake(self) -> TopicIntake:
        """Return an intake, which appends the messages of the topic to the table.

        A process creates it when it becomes the owner of the table.
        """
        components = self.stream.server.components
        uuid = (await components.catalog.tables.load_entry(("db",), "t")).uuid
        log = await components.streams._logs.open()
        row_files = components.streams.row_files
        return TopicIntake(
            uuid, self.topic.topic, log, self.tables, row_files, components.clock, self.counts, rows_max=100
        )

    @asynccontextmanager
    async def read_during(self) -> AsyncIterator[asyncio.Task[None]]:
        """Read the topic while the context is active. At its end the task is cancelled, wherever it is."""
        task = asyncio.create_task((await self.make_intake()).run(self.topic))
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, ProducerFenced):
                await task

    async def flush(self) -> None:
        """Flush the table if it has flushed offsets. Only a table with a stream has them."""
        components = self.stream.server.components
        entry = await components.catalog.tables.load_entry(("db",), "t")
        if entry.flushed:
            await components.streams.flush(entry.uuid)

    async def load_state(self, partition: int) -> StreamProducerState:
        """Return the epoch and the last sequence number that the log has for the producer of a partition.

        If the log does not have the producer, they are 0 and -1.
        """
        components = self.stream.server.components
        uuid = (await components.catalog.tables.load_entry(("db",), "t")).uuid
        log = await components.streams._logs.open()
        state = log.find_producer(make_topic_producer_name(uuid, self.topic.topic.id, partition))
        return StreamProducerState(epoch=0, sequence=-1) if state is None else state

    async def is_read(self) -> bool:
        """Return True if the log has the last message of each partition."""
        for partition, messages in self.topic.messages.items():
            if messages and (await self.load_state(partition)).sequence < messages[-1].offset:
                return False
        return True

    async def read_all(self) -> None:
        """Read the topic to its end."""
        async with self.read_during() as task:
            while not await self.is_read():
                assert not task.done(), task
                await asyncio.sleep(0.01)


@asynccontextmanager
async def open_rig(
    folder: Path, *, partitions: int = 1, has_dead_letters: bool = True, **properties: str
) -> AsyncIterator[IntakeRig]:
    async with open_stream_server(folder) as stream:
        if has_dead_letters:
            properties[DEAD_LETTER_TABLE] = "db.t_errors"
        await create_stream_table(stream, properties=properties)
        if has_dead_letters:
            await create_dead_letter_table(stream)
        components = stream.server.components
        yield IntakeRig(stream, MemoryTopic(partitions), AppendingTables(components.catalog, components.streams))


async def test_rows_of_every_format_and_dead_letters_are_stored_once(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        send = rig.topic.send
        send(encode_json({"id": 1}, {"id": 2, "name": "b"}))
        send(encode_arrow({"id": 3, "name": "c"}))
        send(encode_avro({"id": 4, "name": "d"}, {"id": 5, "name": None}))
        send(b'{"id": 6}\n\n{"id": "x"}\n{"id": 7}', headers={"content-type": b"application/x-ndjson"})
        send(None)
        send(b"no JSON")
        send(b'{"id": 8},{"id": 9}')
        send(b"\x00\x00\x00\x00\x01\x02")
        send(encode_json({"id": 10}), headers={"content-type": b"text/csv"})
        send(encode_json({"id": 11, "town": 1}))
        send(b"\xff\xff\xff\xff damaged")
        send(encode_avro({"id": 12})[:-3])
        send(encode_json({"id": 13}), headers={"content-type": b"application/json; charset=utf-8"})
        async with rig.read_during():
            await until(lambda: rig.counts.messages == 13)
        assert (rig.counts.rows, rig.counts.rejected) == (8, 8)
        await rig.read_all()  # A second process must find no new messages.
        assert await rig.stream.ids() == [1, 2, 3, 4, 5, 6, 7, 13]
        reasons = [letter["reason"] for letter in await read_dead_letter_rows(rig.stream)]
        # The topic has only even offsets, so the sixth message has the offset 10.
        expected = (
            ("not a valid long", ""),
            ("not valid JSON", "offset 10"),
            ("not one JSON object", "offset 12"),
            ("schema in a registry", "offset 14"),
            ("'text/csv'", "offset 16"),
            ("the column 'town'", ""),
            ("not an Arrow IPC stream", "offset 20"),
            ("ends in the middle", "offset 22"),
        )
        for parts in expected:
            assert any(all(part in reason for part in parts) for reason in reasons), (parts, reasons)
        assert len(reasons) == len(expected)


async def test_messages_without_a_dead_letter_table_are_skipped(tmp_path: Path) -> None:
    async with open_rig(tmp_path, has_dead_letters=False) as rig:
        for value in (b"{", encode_json({"id": "x"}, {"id": 1}), encode_json({"id": 2})):
            rig.topic.send(value)
        await rig.read_all()
        assert await rig.stream.ids() == [1, 2]


async def test_valid_rows_are_stored_if_the_dead_letter_table_refuses_letters(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await asyncio.to_thread(rig.stream.catalog.drop_table, "db.t_errors")
        required_field = NestedField(6, "more", LongType(), required=True)
        await create_dead_letter_table(rig.stream, Schema(*LETTERS.fields, required_field))
        rig.topic.send(encode_json({"id": "x"}, {"id": 1}))
        rig.topic.send(b"{")
        rig.topic.send(encode_json({"id": 2}))
        async with rig.read_during():
            await until(lambda: rig.counts.rejected == 2)
        await rig.read_all()
        assert await rig.stream.ids() == [1, 2]


class BrokenTables(AppendingTables):
    """Stream tables whose appends raise an error until `until_s`. Each error advances `now_s` by 200 s."""

    def __init__(self, stream: StreamServer, error: type[Exception], until_s: float) -> None:
        components = stream.server.components
        super().__init__(components.catalog, components.streams)
        self._error, self._until_s = error, until_s
        self.now_s = 0.0

    async def append(self, appends: Sequence[TableRows], producer: TopicProducer) -> Acknowledgement:
        if appends and self.now_s < self._until_s:
            self.now_s += 200.0
            raise self._error("a fault")
        return await super().append(appends, producer)


@pytest.mark.parametrize(
    ("error", "until_s", "ids"),
    [
        (RuntimeError, 400.0, [1]),
        (RuntimeError, 10_000.0, []),
        (MemoryError, 800.0, [1]),
        (OSError, 800.0, [1]),
    ],
)
async def test_message_with_an_unexpected_error_is_rejected_only_after_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], until_s: float, ids: list[int]
) -> None:
    """Appends fail with `error` for `until_s` seconds. Then the table has `ids`: the message is stored or rejected."""
    monkeypatch.setattr(intake, "_RETRY_S", 0.0)
    monkeypatch.setattr(intake, "_log", Mock())  # The log is disabled, because it would format tracebacks slowly.
    async with open_rig(tmp_path, has_dead_letters=False) as rig:
        rig.tables = tables = BrokenTables(rig.stream, error, until_s)
        reader = await rig.make_intake()
        monkeypatch.setattr(reader, "_clock", SimpleNamespace(monotonic=lambda: tables.now_s))
        rig.topic.send(encode_json({"id": 1}))
        task = asyncio.create_task(reader.run(rig.topic))
        while not await rig.is_read():
            assert not task.done(), task
            await asyncio.sleep(0.01)
        task.cancel()
        assert await rig.stream.ids() == ids


async def test_messages_with_offsets_of_lost_messages_are_counted(tmp_path: Path) -> None:
    async with open_rig(tmp_path, has_dead_letters=False) as rig:
        for number in range(3):
            rig.topic.send(encode_json({"id": number}))
        await rig.read_all()
        assert not rig.counts.lost
        # The intake of `read_all` is cancelled at any step, even before it counts the messages that it appended.
        counted_messages = rig.counts.messages
        rig.topic.messages[0].clear()  # The offsets begin at 0 again.
        async with rig.read_during():
            await until(lambda: rig.topic.openings == 2)
            for number in range(10, 15):
                rig.topic.send(encode_json({"id": number}))
            await until(lambda: rig.counts.messages == counted_messages + 5)
        assert rig.counts.lost.total() == 3  # Three of the five messages have offsets that were already read.
        assert await rig.stream.ids() == [0, 1, 2, 13, 14]


async def test_lack_of_memory_does_not_reject_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_rig(tmp_path, has_dead_letters=False) as rig:
        rig.topic.send(encode_avro({"id": 1}))
        with monkeypatch.context() as patch:
            patch.setattr(avro_rows, "_to_array", Mock(side_effect=pa.ArrowMemoryError))
            with pytest.raises(MemoryError):
                await (await rig.make_intake()).run(rig.topic)
        await rig.read_all()
        assert await rig.stream.ids() == [1]


async def test_changes_of_debezium_change_rows_by_key(tmp_path: Path) -> None:
    async with open_rig(tmp_path, **{KEY: "id", ENVELOPE: "debezium"}) as rig:
        for change in (
            {"op": "c", "before": None, "after": {"id": 1, "name": "a"}},
            {"op": "c", "before": None, "after": {"id": 2, "name": "b"}},
            {"op": "u", "before": {"id": 1, "name": "a"}, "after": {"id": 1, "name": "z"}},
            {"op": "d", "before": {"id": 2, "name": "b"}, "after": None},
        ):
            rig.topic.send(encode_json(change))
        rig.topic.send(None)
        await rig.read_all()
        assert await rig.stream.ids() == [1]
        assert await rig.stream.ids("name = 'z'") == [1]


async def test_messages_wait_while_the_table_is_paused(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        rig.topic.send(encode_json({"id": 1}))
        await rig.read_all()
        url = f"{rig.stream.server.url}/api/v1/tables/db/t/stream"
        async with rig.stream.server.http.post(f"{url}/pause", json={"reason": "a move"}) as answer:
            assert answer.status == 200, await answer.text()
        rig.topic.send(encode_json({"id": 2}))
        async with rig.read_during():
            counts = rig.stream.server.components.streams.counts
            await until(lambda: counts.refused > 1)
            assert await rig.stream.ids() == [1]
            (reason,) = rig.counts.waiting.values()
            assert "a move" in reason
            async with rig.stream.server.http.post(f"{url}/resume") as answer:
                assert answer.status == 200, await answer.text()
            # If the intake were cancelled before it removes the reason, the reason would remain.
            await until(lambda: not rig.counts.waiting)
        await rig.read_all()
        assert await rig.stream.ids() == [1, 2]


async def test_process_stops_reading_a_topic_when_another_process_begins(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig, rig.read_during() as former_reader:
        rig.topic.send(encode_json({"id": 1}))
        await until(lambda: rig.counts.messages == 1)
        epoch = (await rig.load_state(0)).epoch
        async with rig.read_during():
            while (await rig.load_state(0)).epoch == epoch:
                await asyncio.sleep(0.01)
            rig.topic.send(encode_json({"id": 2}))
            await until(former_reader.done)
            assert isinstance(former_reader.exception(), ProducerFenced)
            await until(lambda: rig.counts.messages == 2)
        assert await rig.stream.ids() == [1, 2]


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 20), 2))
async def test_rows_of_a_topic_survive_random_failures_once_and_in_order(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random messages arrive, processes end at any step, appends fail, and flushes run at the same time."""
    monkeypatch.setattr(intake, "_RETRY_S", 0.001)
    rng = random.Random(seed)
    is_keyed = rng.random() < 0.5
    properties = {"seamark.stream.shards": str(rng.randint(1, 3))} | ({KEY: "id"} if is_keyed else {})
    partitions = 1 if is_keyed else rng.randint(1, 3)
    async with open_rig(tmp_path, partitions=partitions, **properties) as rig:
        rig.tables = FailingTables(rig.stream, rng, 0.2)
        expected: dict[int, str] = {}
        rejected_count = 0
        for round_number in range(12):
            for _ in range(rng.randint(0, 6)):
                numbers = [
                    rng.randint(1, 9) if is_keyed else len(expected) + new_number
                    for new_number in range(rng.randint(1, 3))
                ]
                rows: list[dict[str, Any]] = [
                    {"id": number, "name": f"{seed}.{round_number}.{number}"} for number in numbers
                ]
                partition = rng.randrange(partitions)
                if rng.random() < 0.2:
                    rig.topic.send(rng.choice([b"{", b'{"id": "x"}', b"\x00", encode_json({"none": 1})]))
                    rejected_count += 1
                rig.topic.send(rng.choice(ENCODERS)(*rows), partition=partition)
                expected |= {row["id"]: row["name"] for row in rows}
            async with rig.read_during() as task:
                for _ in range(rng.randint(0, 40)):
                    await asyncio.sleep(0)
                if rng.random() < 0.3:
                    await rig.flush()
                if rng.random() < 0.3:  # Another process becomes the owner, and this process does not notice it.
                    async with rig.read_during() as other_reader:
                        for _ in range(rng.randint(0, 40)):
                            await asyncio.sleep(0)
                        assert not other_reader.done() or isinstance(other_reader.exception(), ProducerFenced)
                assert not task.done() or isinstance(task.exception(), ProducerFenced)
        await rig.read_all()
        if rng.random() < 0.5:
            await rig.flush()
        catalog = rig.stream.catalog
        rows = await asyncio.to_thread(lambda: catalog.load_table("db.t").scan().to_arrow().to_pylist())
        assert sorted((row["id"], row["name"]) for row in rows) == sorted(expected.items())
        assert len(await read_dead_letter_rows(rig.stream)) == rejected_count


def test_log_remembers_producers_of_topics_until_their_stream_is_removed() -> None:
    state = LogState(10, keep_ms=1000)
    topic, other_topic = make_topic_producer_name("s", "id", 0), make_topic_producer_name("u", "id", 0)
    for name in (topic, other_topic, "s/owner/p"):
        state.apply(FenceEntry(1, name, 1))
        state.apply(AppendEntry(1, (), name, 1, 7))
    state.forget(100_000, 0)
    assert set(state.producers) == {topic, other_topic}
    state.apply(RemoveEntry(100_000, "s"))
    assert set(state.producers) == {other_topic}
    state.check_invariants()
