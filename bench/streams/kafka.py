"""How fast does Seamark's log in Kafka acknowledge rows, compared with a client that writes to Kafka itself?

The peer is confluent-kafka with the same guarantee: `acks=all`, an idempotent producer, one record for each batch, and
writers that wait for the answer of the broker before their next batch. Both use the same broker, one after the other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from functools import partial
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.report import OURS, Report, Row
from bench.streams.log import AppendMeasurements
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.log.kafka.address import KafkaAddress
from seamark.metaserver.log.kafka.client import open_kafka_log
from seamark.metaserver.log.kafka.kafka_log import KafkaLimits, KafkaLog
from seamark.metaserver.log.port import Batch, Shard
from tests.services.kafka import Kafka, run_kafka_broker

RAW = "confluent-kafka"
ROWS = (1, 10, 500)
ROW_BYTES = (100, 1000)
WRITERS = (1, 64, 512)
SECONDS, QUICK_SECONDS = 3.0, 0.2
PARTITIONS = 8
RECORD_BYTES_MAX = 900_000
"""The maximum bytes of a record of the peer. The broker accepts records up to 1 MiB."""


async def run(folder: Path, *, quick: bool = False) -> Report:
    seconds = QUICK_SECONDS if quick else SECONDS
    report = Report("streams_kafka", "How fast does the log in Kafka acknowledge rows?", peer="confluent-kafka alone")
    with run_kafka_broker(folder / "broker") as kafka:
        for row_bytes, rows in itertools.product(ROW_BYTES, ROWS):
            for writers in WRITERS:
                raw_appends = await measure_producer(kafka, rows, row_bytes, writers, seconds)
                measurements = await _measure_appends(kafka, rows, row_bytes, writers, seconds)
                _add_rows(
                    report,
                    f"{rows:,} rows of {row_bytes:,} B, {writers} writers",
                    rows,
                    row_bytes,
                    measurements,
                    raw_appends,
                )
    report.notes += [
        f"Each writer has a shard of one of {PARTITIONS} partitions and waits for each answer; {seconds:g} s a case. "
        "One broker, on the same machine: Kafka answers when the page cache has the record, without a sync.",
        "Ours writes the rows and then the journal, and answers when it has read the journal again: three round trips. "
        "The peer writes the rows only. It gives no offsets of rows, and recognises no append that is repeated later.",
        "CPU is that of the writing process, without the broker.",
    ]
    return report


def _add_rows(
    report: Report,
    case: str,
    rows: int,
    row_bytes: int,
    measurements: AppendMeasurements,
    raw_appends: AppendMeasurements,
) -> None:
    mib = rows * row_bytes / 2**20
    add = report.rows.append
    add(Row(case, "acknowledged", "rows/s", {OURS: measurements.rate * rows, RAW: raw_appends.rate * rows}, False, RAW))
    add(
        Row(
            case,
            "acknowledged bytes",
            "MiB/s",
            {OURS: measurements.rate * mib, RAW: raw_appends.rate * mib},
            False,
            RAW,
        )
    )
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        add(
            Row(
                case,
                name,
                "ms",
                {OURS: measurements.compute_quantile_ms(share), RAW: raw_appends.compute_quantile_ms(share)},
                peer=RAW,
            )
        )
    add(
        Row(
            case,
            "batches a group",
            "batches",
            {OURS: len(measurements.latencies_s) / max(1, measurements.syncs)},
            False,
        )
    )


async def _measure_appends(kafka: Kafka, rows: int, row_bytes: int, writers: int, seconds: float) -> AppendMeasurements:
    """Append batches to the log with several writers for `seconds`."""
    batch = Batch(rows, os.urandom(rows * row_bytes))
    address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
    latencies: list[float] = []
    async with open_kafka_log(address, SystemClock(), KafkaLimits()) as log:
        shards = [Shard("table", number) for number in range(PARTITIONS)]
        await log.append(dict.fromkeys(shards, batch))  # creates the topic
        groups_before, started_s, cpu_s_before = log.groups, time.perf_counter(), time.process_time()
        await asyncio.gather(
            *(
                _append_repeatedly(log, shards[number % PARTITIONS], batch, started_s + seconds, latencies)
                for number in range(writers)
            )
        )
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s_before
        return AppendMeasurements(latencies, seconds, cpu_s, log.groups - groups_before)


async def _append_repeatedly(log: KafkaLog, shard: Shard, batch: Batch, until_s: float, latencies: list[float]) -> None:
    """Append the same batch again and again until the time `until_s`, and record the latencies in seconds."""
    while (call_began_s := time.perf_counter()) < until_s:
        await log.append({shard: batch})
        latencies.append(time.perf_counter() - call_began_s)


async def measure_producer(
    kafka: Kafka, rows: int, row_bytes: int, writers: int, seconds: float, *, is_synced: bool = False
) -> AppendMeasurements:
    """Write batches with a producer for a time. A thread serves the callbacks of the producer.

    Args:
        kafka: The broker.
        rows: The rows of a batch. A batch is one record, or several if it is too large for one.
        row_bytes: The bytes of a row.
        writers: The number of writers. Each waits for the answer to its batch before its next batch.
        seconds: The time for which the writers send batches.
        is_synced: The broker writes each record to the disk before it answers.
    """
    size_bytes = rows * row_bytes
    records = -(-size_bytes // RECORD_BYTES_MAX)
    topic, value = f"raw.{kafka.create_prefix()}", os.urandom(-(-size_bytes // records))
    admin = AdminClient({"bootstrap.servers": kafka.address})  # It must outlive its request.
    config = {"flush.messages": "1"} if is_synced else {}
    await asyncio.wrap_future(admin.create_topics([NewTopic(topic, PARTITIONS, config=config)])[topic])
    loop = asyncio.get_running_loop()
    producer = Producer({"bootstrap.servers": kafka.address, "acks": "all", "enable.idempotence": True, "linger.ms": 0})
    is_ending = threading.Event()
    poll_thread = threading.Thread(target=_poll, args=(producer, is_ending))
    poll_thread.start()
    latencies: list[float] = []

    async def produce(partition: int) -> None:
        answer: asyncio.Future[None] = loop.create_future()
        producer.produce(topic, value, partition=partition, on_delivery=partial(_set_answer, loop, answer))
        await answer

    async def write(partition: int) -> None:
        while (call_began_s := time.perf_counter()) - started_s < seconds:
            await asyncio.gather(*(produce(partition) for _ in range(records)))
            latencies.append(time.perf_counter() - call_began_s)

    try:
        # The producer connects before the measurement, because the measured log is also connected before it.
        await asyncio.gather(*map(produce, range(PARTITIONS)))
        started_s, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(write(number % PARTITIONS) for number in range(writers)))
        return AppendMeasurements(latencies, time.perf_counter() - started_s, time.process_time() - cpu, len(latencies))
    finally:
        is_ending.set()
        await asyncio.to_thread(poll_thread.join)


def _poll(producer: Producer, is_ending: threading.Event) -> None:
    while not is_ending.is_set():
        producer.poll(0.1)


def _set_answer(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[None], error: object, _message: object) -> None:
    assert error is None, error
    loop.call_soon_threadsafe(answer.set_result, None)
