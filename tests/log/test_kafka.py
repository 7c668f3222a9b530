"""Tests of the log in Apache Kafka, over a real broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import ConfigError, LogUnavailable, OffsetOutOfRange, SequenceGap
from seamark.metaserver.log.kafka import client
from seamark.metaserver.log.kafka.address import KafkaAddress, parse_address
from seamark.metaserver.log.kafka.client import open_kafka_log
from seamark.metaserver.log.kafka.kafka_log import KafkaLimits, KafkaLog
from seamark.metaserver.log.port import Batch, StreamProducer
from tests.log.contract import (
    LIMIT_BYTES,
    OTHER,
    A,
    B,
    DurableLogContract,
    Opener,
    StreamLogContract,
    build_batch,
    read_all,
    read_texts,
)
from tests.services.kafka import Kafka
from tests.services.process import choose_free_port


class TestKafkaLog(StreamLogContract, DurableLogContract):
    @pytest.fixture
    async def log(self, opener: Opener) -> AsyncIterator[KafkaLog]:
        async with opener() as log:
            yield log

    @pytest.fixture
    def opener(self, kafka: Kafka) -> Opener:
        address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
        return partial(open_kafka_log, address, SystemClock(), KafkaLimits())


@pytest.fixture
async def two_logs(kafka: Kafka) -> AsyncIterator[tuple[KafkaLog, KafkaLog]]:
    """Open the same log twice, as two processes do."""
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    async with (
        open_kafka_log(address, SystemClock(), KafkaLimits()) as first_log,
        open_kafka_log(address, SystemClock(), KafkaLimits()) as second_log,
    ):
        yield first_log, second_log


async def test_two_processes_see_the_same_order_of_rows_and_producers(two_logs: tuple[KafkaLog, KafkaLog]) -> None:
    first_log, second_log = two_logs
    assert first_log.identity == second_log.identity
    appends = []
    for number in range(20):
        for name, log in (("a", first_log), ("b", second_log)):
            batch = build_batch(f"{name}{number}")
            appends.append(log.append({A: batch, OTHER: batch}))
    await asyncio.gather(*appends)
    await first_log.append({A: build_batch("p0")}, StreamProducer("p", 0))
    assert (await second_log.append({A: build_batch("p0")}, StreamProducer("p", 0))).duplicate
    await second_log.append({A: build_batch("p1")}, StreamProducer("p", 1))
    with pytest.raises(SequenceGap):
        await first_log.append({A: build_batch("p3")}, StreamProducer("p", 3))
    await first_log.catch_up()
    assert first_log.read_watermarks([A, OTHER]) == {A: 42, OTHER: 40}
    assert await read_texts(first_log, OTHER) == (await read_texts(first_log, A))[:40]
    for shard in (A, OTHER):
        assert await read_all(first_log, shard) == await read_all(second_log, shard)


async def test_released_rows_are_deleted_and_a_head_replaces_old_journal_records(kafka: Kafka) -> None:
    """A head is a journal record with the state of all shards, so readers do not need the records before it."""
    limits = KafkaLimits(batches_max=3)
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    async with open_kafka_log(address, SystemClock(), limits) as log:
        for number in range(8):
            await log.append({A: build_batch(str(number), 10)}, StreamProducer("p", number))
        await log.release({A: 65})
        await log.trim()
        assert log.list_shards()[A].start == 50
        with pytest.raises(OffsetOutOfRange, match="has the rows 50 to 80"):
            await log.read(A, 49, limit_bytes=LIMIT_BYTES)
        await log.write_head()
        await log.append({A: build_batch("8", 10)}, StreamProducer("p", 8))
        states, records = log.list_shards(), await read_all(log, A, 50)
    async with open_kafka_log(address, SystemClock(), limits) as log:
        assert log.list_shards() == states
        assert await read_all(log, A, 50) == records
        assert [record.batch.payload for record in records] == [b"5", b"6", b"7", b"8"]
        assert (await log.append({A: build_batch("8", 10)}, StreamProducer("p", 8))).duplicate


async def test_a_batch_larger_than_a_record_of_kafka_is_read_back(kafka: Kafka) -> None:
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        large_batch = Batch(3, bytes(range(256)) * 10_000, b"\0\1\2")
        await log.append({A: large_batch, B: build_batch("small")})
        (record,) = await log.read(A, 0, limit_bytes=1)
        assert record.batch == large_batch


class _ForgetfulProducer:
    """A Kafka producer that stores all records, but does not report the offsets of the first large records.

    A record is large if it has at least `size_bytes_min` bytes. The offsets of `forgotten_records` of them are unknown.
    """

    def __init__(self, settings: dict[str, Any], *, forgotten_records: int, size_bytes_min: int = 0) -> None:
        self._producer = Producer(settings)
        self._forgotten_records = forgotten_records
        self._size_bytes_min = size_bytes_min

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def produce_batch(self, topic: str, messages: list[dict[str, Any]], partition: int) -> int:
        for message in messages:
            if self._forgotten_records and len(message["value"]) >= self._size_bytes_min:
                self._forgotten_records -= 1
                message["callback"] = partial(_answer_without_offset, message["callback"])
        return self._producer.produce_batch(topic, messages, partition=partition)


def _answer_without_offset(
    callback: Callable[[KafkaError | None, Any], None], error: KafkaError | None, _: Any
) -> None:
    assert error is None
    callback(None, SimpleNamespace(offset=lambda: None))


async def test_rows_are_written_again_if_kafka_does_not_report_their_offsets(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Producer", partial(_ForgetfulProducer, forgotten_records=3))
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    large_batch = Batch(3, bytes(range(256)) * 10_000, b"\0\1\2")
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        await log.append({A: large_batch, B: build_batch("small")})
        await log.append({A: build_batch("next")})
        first_record, second_record = await log.read(A, 0, limit_bytes=LIMIT_BYTES)
        assert (first_record.batch, second_record.batch.payload) == (large_batch, b"next")
        assert log.read_watermarks([A, B]) == {A: 4, B: 1}


async def test_retention_keeps_a_large_batch_if_one_piece_was_written_again(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Producer", partial(_ForgetfulProducer, forgotten_records=1, size_bytes_min=10_000))
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    large_batch = Batch(3, bytes(range(256)) * 10_000, b"\0\1\2")
    async with open_kafka_log(address, SystemClock(), KafkaLimits(batches_max=0)) as log:
        await log.append({A: build_batch("released")})
        await log.append({A: large_batch})
        await log.release({A: 1})
        await log.trim()
        assert log.list_shards()[A].start == 1
        (record,) = await log.read(A, 1, limit_bytes=LIMIT_BYTES)
        assert record.batch == large_batch


async def test_append_fails_if_kafka_never_reports_the_offsets_of_its_rows(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Producer", partial(_ForgetfulProducer, forgotten_records=3))
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        with pytest.raises(LogUnavailable, match="does not say where it stored the rows; retry later"):
            await log.append({A: build_batch("lost")})
        await log.append({A: build_batch("kept")})
        assert await read_texts(log, A) == ["kept"]


class _SilentProducer(_ForgetfulProducer):
    """A Kafka producer that never reports the outcome of the first records, as after a fault of the client library."""

    def produce_batch(self, topic: str, messages: list[dict[str, Any]], partition: int) -> int:
        for message in messages:
            if self._forgotten_records:
                self._forgotten_records -= 1
                message["callback"] = lambda error, message: None
        return self._producer.produce_batch(topic, messages, partition=partition)


async def test_an_append_whose_answers_are_lost_fails_in_time(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Producer", partial(_SilentProducer, forgotten_records=1))
    monkeypatch.setattr(client, "_ANSWER_S_MAX", 1.0)
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        with pytest.raises(LogUnavailable, match="did not answer; retry later"):
            await log.append({A: build_batch("lost")})
        monkeypatch.undo()
        await log.append({A: build_batch("kept")})
        assert await read_texts(log, A) == ["kept"]


class _FailingConsumer:
    """A Kafka consumer whose first two reads of the journal fail after they have taken the records."""

    failures = 2

    def __init__(self, settings: dict[str, Any]) -> None:
        self._consumer = Consumer(settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def consume(self, count: int, timeout_s: float) -> list[Any]:
        messages = self._consumer.consume(count, timeout_s)
        if threading.current_thread().name == "kafka-journal" and type(self).failures:
            type(self).failures -= 1
            raise MemoryError
        return messages


class _LateConsumer:
    """A consumer whose first message is an error of an earlier assignment, as the client library permits."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._consumer = Consumer(settings)
        error = KafkaError(KafkaError.OFFSET_OUT_OF_RANGE)
        self._late_messages = [SimpleNamespace(error=lambda: error, topic=lambda: "another", partition=lambda: 0)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def poll(self, timeout_s: float) -> Any:
        is_read_thread = threading.current_thread().name.startswith("kafka-read")
        return self._late_messages.pop() if is_read_thread and self._late_messages else self._consumer.poll(timeout_s)


async def test_error_of_another_topic_does_not_end_a_read(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Consumer", _LateConsumer)
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        await log.append({A: build_batch("a")})
        assert await read_texts(log, A) == ["a"]


@pytest.mark.slow
async def test_the_journal_is_read_without_a_gap_after_unexpected_errors(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Consumer", _FailingConsumer)
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        for number in range(5):
            await log.append({A: build_batch(str(number))})
        assert not _FailingConsumer.failures
        assert await read_texts(log, A) == ["0", "1", "2", "3", "4"]


class _ConsumerBeforeElection:
    """A Kafka consumer whose first two requests for offsets fail.

    The cluster has not yet chosen a leader for a new partition.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._consumer = Consumer(settings)
        self._refusals = 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def get_watermark_offsets(self, topic_partition: Any, **options: Any) -> tuple[int, int]:
        if self._refusals:
            self._refusals -= 1
            raise KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
        offsets: tuple[int, int] = self._consumer.get_watermark_offsets(topic_partition, **options)
        return offsets


async def test_a_log_opens_while_its_new_journal_has_no_leader(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Consumer", _ConsumerBeforeElection)
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        await log.append({A: build_batch("row")})
        assert await read_texts(log, A) == ["row"]


async def test_a_topic_from_which_kafka_removes_rows_is_refused(kafka: Kafka) -> None:
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    admin = AdminClient({"bootstrap.servers": kafka.address})
    topic = address.make_topic_name(A.stream)
    await asyncio.wrap_future(admin.create_topics([NewTopic(topic, 1)])[topic])
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        with pytest.raises(LogUnavailable, match=r"its retention\.ms is 604800000\. Set it to -1"):
            await log.append({A: build_batch("x")})
        await log.append({OTHER: build_batch("y")})


@pytest.mark.slow
async def test_properties_that_the_client_does_not_know_are_reported() -> None:
    address = KafkaAddress(servers="127.0.0.1:1", prefix="none", properties={"ssl.colour": "blue"})
    with pytest.raises(LogUnavailable, match=r"ssl\.colour.*stream_log_client_properties"):
        async with open_kafka_log(address, SystemClock(), KafkaLimits()):
            pass


async def test_a_cluster_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.2)
    address = KafkaAddress(servers=f"127.0.0.1:{choose_free_port()}", prefix="none")
    with pytest.raises(LogUnavailable, match="retry later"):
        async with open_kafka_log(address, SystemClock(), KafkaLimits()):
            pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kafka://host:9092", "a prefix consists of 1 to 100 letters"),
        ("kafka://host:9092/a_b", "'a_b'"),
        ("kafka://host/seamark", "give kafka://host:port"),
        ("kafka:/host:9092/seamark", "give kafka://host:port"),
        ("kafka://host:9092,host:0/seamark", "give kafka://host:port"),
    ],
)
def test_an_invalid_address_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_address(text, "")


def test_properties_that_make_the_log_unsafe_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("# TLS\nsecurity.protocol = SSL\nssl.ca.location=/ca.pem\n\nsasl.password=a=b\n")
    address = parse_address("kafka://a:1,b:2/sea.mark", str(file))
    assert (address.servers, address.journal) == ("a:1,b:2", "sea.mark.journal")
    assert dict(address.properties) == {
        "security.protocol": "SSL",
        "ssl.ca.location": "/ca.pem",
        "sasl.password": "a=b",
    }
    for line, message in (("acks=1", "sets acks"), ("nonsense", "line 1"), ("isolation.level=x", "isolation.level")):
        file.write_text(line)
        with pytest.raises(ConfigError, match=message):
            parse_address("kafka://a:1/x", str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_address("kafka://a:1/x", str(tmp_path / "missing"))
