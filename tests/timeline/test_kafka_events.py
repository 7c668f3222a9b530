"""Tests of events in a topic of Apache Kafka.

Each instant arrives, in order for each table, despite failures of the broker.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.timeline import delivery
from seamark.metaserver.timeline.addresses import parse_topic
from tests.server.rig import run_server
from tests.services.kafka import Kafka
from tests.timeline.test_webhooks import record_names
from tests.waits import until

PARTITIONS = 3


@pytest.fixture(autouse=True)
def _quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the leases and the backoff, so that a server soon takes over or repeats a delivery."""
    monkeypatch.setattr(delivery, "LEASE_S", 3.0)
    monkeypatch.setattr(delivery, "BACKOFF_S_MAX", 1.0)


@pytest.fixture
def topic(kafka: Kafka) -> str:
    """Return the name of an empty topic with some partitions."""
    name = f"{kafka.create_prefix()}.events"
    admin = AdminClient({"bootstrap.servers": kafka.address})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(30)
    return name


def read_topic(kafka: Kafka, topic: str, count: int) -> list[dict[str, Any]]:
    """Return the records that the topic has when it has `count` different events, or after a minute.

    The records of a partition are in order.
    """
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": "test", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    records: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + 60
    while len({record["event"]["id"] for record in records}) < count and time.monotonic() < deadline_s:
        for message in consumer.consume(100, 0.2):
            value = message.value()
            assert message.error() is None
            assert value is not None
            headers = dict(message.headers() or ())
            event = json.loads(value)
            records.append({"key": message.key(), "partition": message.partition(), "headers": headers, "event": event})
    consumer.close()
    return records


def list_event_ids_by_table(records: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the ids of the events of each table, in the order of their first records. A record may be repeated."""
    ids_by_table: dict[str, list[str]] = {}
    for event in (record["event"] for record in records):
        event_ids = ids_by_table.setdefault(event["data"]["name"], [])
        if event["id"] not in event_ids:
            event_ids.append(event["id"])
    return ids_by_table


async def test_topic_receives_the_instants_of_each_table_in_order(tmp_path: Path, kafka: Kafka, topic: str) -> None:
    async with run_server(tmp_path, event_kafka=f"kafka://{kafka.address}/{topic}") as server:
        await record_names(server, "abcdef" * 5)
        records = await asyncio.to_thread(read_topic, kafka, topic, 30)
    assert len(records) == 30
    ids_by_table = list_event_ids_by_table(records)
    assert ids_by_table.keys() == set("abcdef")
    assert all(event_ids == sorted(event_ids) and len(event_ids) == 5 for event_ids in ids_by_table.values())
    partitions = {(record["key"], record["partition"]) for record in records}
    assert len(partitions) == 6
    assert {key for key, _ in partitions} == {f"uuid-of-{name}".encode() for name in "abcdef"}
    assert all(record["headers"]["content-type"].startswith(b"application/cloudevents+json") for record in records)
    assert {record["event"]["specversion"] for record in records} == {"1.0"}


@pytest.mark.slow
async def test_events_wait_for_their_topic_and_survive_a_killed_broker(tmp_path: Path, kafka: Kafka) -> None:
    name = f"{kafka.create_prefix()}.late"
    async with run_server(tmp_path, event_kafka=f"kafka://{kafka.address}/{name}") as server:
        await record_names(server, "ab")
        metrics = server.components.metrics
        await until(lambda: b'seamark_event_failures_total{target="kafka"}' in metrics.render())
        admin = AdminClient({"bootstrap.servers": kafka.address})
        await asyncio.to_thread(admin.create_topics([NewTopic(name, PARTITIONS)])[name].result, 30)
        await asyncio.to_thread(read_topic, kafka, name, 2)
        await asyncio.to_thread(kafka.kill)
        await record_names(server, "abab")
        await asyncio.to_thread(kafka.start)
        records = await asyncio.to_thread(read_topic, kafka, name, 6)
    ids_by_table = list_event_ids_by_table(records)
    assert {table: len(event_ids) for table, event_ids in ids_by_table.items()} == {"a": 3, "b": 3}
    assert all(event_ids == sorted(event_ids) for event_ids in ids_by_table.values())


async def test_two_replicas_and_a_restart_deliver_each_event(tmp_path: Path, kafka: Kafka, topic: str) -> None:
    setting = f"kafka://{kafka.address}/{topic}"
    async with run_server(tmp_path, event_kafka=setting) as first_server:
        async with run_server(tmp_path, event_kafka=setting) as other_server:
            await record_names(other_server, "ab")
            await record_names(first_server, "ab")
            await asyncio.to_thread(read_topic, kafka, topic, 4)
        await record_names(first_server, "ab")
        await asyncio.to_thread(read_topic, kafka, topic, 6)
    async with run_server(tmp_path, event_kafka=setting) as server:
        await record_names(server, "ab")
        records = await asyncio.to_thread(read_topic, kafka, topic, 8)
    ids_by_table = list_event_ids_by_table(records)
    assert {table: len(event_ids) for table, event_ids in ids_by_table.items()} == {"a": 4, "b": 4}
    assert all(event_ids == sorted(event_ids) for event_ids in ids_by_table.values())


@pytest.mark.parametrize(
    "text", ["kafka://host/topic", "kafka://host:9092", "kafka://host:9092/a/b", "kafka://host:9092/..", "topic"]
)
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="event_kafka"):
        parse_topic(text, "")


def test_client_properties_that_would_weaken_delivery_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("security.protocol=SASL_SSL\n")
    assert parse_topic("kafka://a:1,b:2/t", str(file)).properties == {"security.protocol": "SASL_SSL"}
    file.write_text("acks=0\n")
    with pytest.raises(ConfigError, match="sets acks, which the server sets itself"):
        parse_topic("kafka://a:1/t", str(file))
