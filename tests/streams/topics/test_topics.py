"""Tests of input topics in Apache Kafka. Any producer writes to the topic of a table, and each row is stored once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from seamark.metaserver.streams.incoming.dead_letters import DEAD_LETTER_TABLE
from seamark.metaserver.streams.topics import intakes
from tests.services.kafka import Kafka
from tests.streams.incoming.test_dead_letters import create_dead_letter_table, read_dead_letter_rows
from tests.streams.test_fleet import make_shared_settings
from tests.streams.test_read_servers import READ_SERVER
from tests.streams.test_rows_over_http import StreamServer, create_stream_table, open_stream_server
from tests.streams.topics.topic_source import ENCODERS, encode_avro, encode_json


@pytest.fixture(autouse=True)
def poll_topics_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intakes, "CHECK_INTERVAL_S", 0.05)


@pytest.fixture
async def stream(kafka: Kafka, postgres_url: str, tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path / "a", **make_shared_settings(kafka, postgres_url, tmp_path)) as stream:
        await create_stream_table(stream, properties={DEAD_LETTER_TABLE: "db.t_errors"})
        await create_dead_letter_table(stream)
        yield stream


async def create_topic(kafka: Kafka, stream: StreamServer, *, partitions: int = 1) -> str:
    """Create the input topic of the table, and return its name."""
    _, status = await stream.server.get("/api/v1/tables/db/t/stream/topic")
    name = str(status["topic"])
    admin = AdminClient({"bootstrap.servers": kafka.address})
    await asyncio.wrap_future(admin.create_topics([NewTopic(name, partitions)])[name])
    return name


async def send_messages(
    producer: Producer, topic: str, *values: bytes, headers: Mapping[str, bytes] | None = None, partition: int = 0
) -> None:
    for value in values:
        producer.produce(topic, value, partition=partition, headers=dict(headers or {}))
    await asyncio.to_thread(producer.flush, 30)


async def wait_for_ids(stream: StreamServer, expected: list[int]) -> None:
    """Wait until a scan returns these ids. Rows never disappear, so additional rows are an error at once."""
    while (ids := await stream.ids()) != expected:
        assert set(ids) <= set(expected), ids
        await asyncio.sleep(0.02)


async def test_committed_messages_of_any_producer_become_rows_but_aborted_messages_do_not(
    kafka: Kafka, stream: StreamServer
) -> None:
    topic = await create_topic(kafka, stream, partitions=2)
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": topic})
    producer.init_transactions()
    producer.begin_transaction()
    await send_messages(producer, topic, encode_json({"id": 100}))
    producer.abort_transaction()
    producer.begin_transaction()
    await send_messages(producer, topic, encode_json({"id": 1}), b"{", encode_avro({"id": 2, "name": "b"}))
    await send_messages(
        producer, topic, b'{"id": 3}\n{"id": 4}', headers={"content-type": b"application/x-ndjson"}, partition=1
    )
    producer.commit_transaction()
    await wait_for_ids(stream, [1, 2, 3, 4])
    async with stream.server.http.post(f"{stream.server.url}/api/v1/tables/db/t/flush") as answer:
        assert answer.status == 200, await answer.text()
    await stream.post({"id": 5})
    await wait_for_ids(stream, [1, 2, 3, 4, 5])
    (letter,) = await read_dead_letter_rows(stream)
    assert (letter["raw"], letter["producer"], letter["table"]) == ("{", f"{topic}/0", "db.t")
    assert "not valid JSON" in letter["reason"]


@pytest.mark.slow
async def test_recreated_topic_is_read_from_its_first_message(kafka: Kafka, stream: StreamServer) -> None:
    topic = await create_topic(kafka, stream)
    producer = Producer({"bootstrap.servers": kafka.address})
    await send_messages(producer, topic, encode_json({"id": 1}), encode_json({"id": 2}))
    await wait_for_ids(stream, [1, 2])
    admin = AdminClient({"bootstrap.servers": kafka.address})
    await asyncio.wrap_future(admin.delete_topics([topic])[topic])
    while topic in (await asyncio.to_thread(admin.list_topics, timeout=10)).topics:
        await asyncio.sleep(0.05)
    await create_topic(kafka, stream)
    await send_messages(Producer({"bootstrap.servers": kafka.address}), topic, encode_json({"id": 3}))
    await wait_for_ids(stream, [1, 2, 3])


@pytest.mark.slow
async def test_messages_of_a_topic_are_stored_exactly_once_despite_restarts_and_changes_of_the_owner(
    kafka: Kafka, postgres_url: str, tmp_path: Path
) -> None:
    rng = random.Random(1)
    settings = make_shared_settings(kafka, postgres_url, tmp_path) | {"stream_flush_interval_ms": 200}
    expected: list[int] = []
    async with open_stream_server(tmp_path / "r", **settings, **READ_SERVER) as reader:
        topic, producer = "", Producer({"bootstrap.servers": kafka.address})
        for round_number in range(4):
            async with open_stream_server(tmp_path / f"s{round_number % 2}", **settings) as server:
                if not round_number:
                    await create_stream_table(server)
                    topic = await create_topic(kafka, server, partitions=3)
                for _ in range(20):
                    rows = [{"id": len(expected) + offset, "name": "x"} for offset in range(rng.randint(1, 3))]
                    await send_messages(producer, topic, rng.choice(ENCODERS)(*rows), partition=rng.randrange(3))
                    expected += [int(row["id"]) for row in rows]
                if round_number % 2:
                    async with open_stream_server(tmp_path / "other", **settings):
                        await wait_for_ids(server, expected)
                elif round_number:
                    await wait_for_ids(reader, expected)
                # In the first round, the server stops while it reads the topic.
        async with open_stream_server(tmp_path / "s0", **settings) as server:
            await wait_for_ids(server, expected)
        await wait_for_ids(reader, expected)
