"""Tests that both logs store each append once while connections are delayed, cut and reset at random.

Rows reach the log in Kafka through a proxy before the broker, and the log in files through a proxy before its server.
If an append is neither stored nor refused in time, the test fails.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import seamark
from seamark.connector.client.catalog import create_namespace, create_table
from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams.writer import stream_writer
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import CommitUnknown, LogUnavailable, TooManyRequests
from seamark.metaserver.log.kafka.address import KafkaAddress
from seamark.metaserver.log.kafka.client import open_kafka_log
from seamark.metaserver.log.kafka.kafka_log import KafkaLimits, KafkaLog
from seamark.metaserver.log.kafka.pieces import RECORD_BYTES_MAX
from seamark.metaserver.log.port import Batch, Shard, StreamProducer
from tests.log.contract import LIMIT_BYTES
from tests.peers.fault_proxy import FaultProxy, run_fault_proxy
from tests.seeds import first_seed
from tests.services.kafka import Kafka, run_kafka_broker
from tests.services.process import choose_free_port
from tests.services.seamark import Seamark

SHARDS = (Shard("table-1", 0), Shard("table-1", 1), Shard("table-2", 0))
WRITERS = 6
SECONDS = 30.0
APPENDS_MIN = 50
APPEND_S_MAX = 300.0
"""The maximum time of an append: `request_timeout_s`, and additional time for a busy machine."""


@contextmanager
def open_proxied_kafka(folder: Path) -> Iterator[tuple[Kafka, FaultProxy]]:
    """Start a broker that its clients reach only through a proxy."""
    port = choose_free_port()
    with (
        run_fault_proxy("127.0.0.1", port) as proxy,
        run_kafka_broker(folder, port=port, advertised_address=proxy.address) as kafka,
    ):
        yield kafka, proxy


async def cause_faults(proxy: FaultProxy, rng: random.Random, is_done: Callable[[], bool]) -> Counter[str]:
    """Delay, cut and reset connections at random until `is_done` returns True. Return the number of faults by kind.

    A cut connection transfers no bytes but stays open. A reset connection is closed.
    """
    counts: Counter[str] = Counter()
    while not is_done():
        fault = rng.choice(("delay", "cut", "reset", "none"))
        counts[fault] += 1
        proxy.piece_delay_s = (lambda: rng.uniform(0, 0.1)) if fault == "delay" else lambda: 0.0
        if fault == "reset":
            proxy.reset_connections()
        proxy.is_cut = fault == "cut"
        await asyncio.sleep(rng.choice((0.1, 0.5, 2.0)))
        if proxy.is_cut and rng.random() < 0.5:  # A cut connection does not resume.
            proxy.reset_connections()
        proxy.is_cut = False
    proxy.piece_delay_s = lambda: 0.0
    return counts


async def append_until_done(
    logs: list[KafkaLog], name: str, seed: int, is_done: Callable[[], bool]
) -> dict[Shard, list[tuple[int, bytes]]]:
    """Append random batches to random logs as the producer `name`, and repeat each append until it is acknowledged.

    Return (sequence, payload) of the appends to each shard.
    """
    rng, appended, sequence = random.Random(f"{name} {seed}"), defaultdict(list), 0
    while not is_done() or sequence < APPENDS_MIN // WRITERS:
        batches: dict[Shard, Batch] = {}
        for shard in rng.sample(SHARDS, rng.choice((1, 1, 2, 3))):
            size_bytes = rng.choice((10, 10, 1000, 2 * RECORD_BYTES_MAX + 1))  # The largest size needs three records.
            batches[shard] = Batch(rng.randrange(1, 4), rng.randbytes(size_bytes))
        while True:
            try:
                async with asyncio.timeout(APPEND_S_MAX):
                    await rng.choice(logs).append(batches, StreamProducer(name, sequence))
            except (CommitUnknown, LogUnavailable, TooManyRequests):
                await asyncio.sleep(rng.uniform(0, 0.2))
            else:
                break
        for shard, batch in batches.items():
            appended[shard].append((sequence, batch.payload))
        sequence += 1
    return appended


async def read_appends(log: KafkaLog, shard: Shard) -> dict[str, list[tuple[int, bytes]]]:
    """Return (sequence, payload) of the appends of each producer to a shard, in the order of the log."""
    await log.catch_up()
    offset, appends = 0, defaultdict(list)
    while records := await log.read(shard, offset, limit_bytes=LIMIT_BYTES):
        for record in records:
            assert record.offset == offset
            appends[record.producer].append((record.sequence, record.batch.payload))
            offset = record.end
    assert log.read_watermarks([shard]) == {shard: offset}
    return appends


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_log_in_kafka_stores_each_append_once_if_connections_fail(tmp_path: Path) -> None:
    seed = first_seed()
    with open_proxied_kafka(tmp_path / "broker") as (kafka, proxy):
        address = KafkaAddress(servers=proxy.address, prefix=kafka.create_prefix())
        async with (
            open_kafka_log(address, SystemClock(), KafkaLimits()) as first_log,
            open_kafka_log(address, SystemClock(), KafkaLimits()) as second_log,
        ):
            end_s = time.monotonic() + SECONDS

            def is_done() -> bool:
                return time.monotonic() > end_s

            faults, *appends_by_writer = await asyncio.gather(
                cause_faults(proxy, random.Random(seed), is_done),
                *(append_until_done([first_log, second_log], f"w{number}", seed, is_done) for number in range(WRITERS)),
            )
            async with open_kafka_log(address, SystemClock(), KafkaLimits()) as third_log:
                for shard in SHARDS:
                    expected = {
                        f"w{number}": appends[shard]
                        for number, appends in enumerate(appends_by_writer)
                        if appends[shard]
                    }
                    for log in (first_log, second_log, third_log):
                        assert await read_appends(log, shard) == expected, (seed, faults)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_log_in_files_stores_each_append_once_if_connections_fail(tmp_path: Path) -> None:
    seed = first_seed()
    with Seamark(tmp_path / "home") as server, run_fault_proxy("127.0.0.1", server.port) as proxy:
        client = SeamarkClient(server.base_url)
        create_namespace(client, "db", {})
        fields = [
            {"id": 1, "name": "producer", "required": True, "type": "string"},
            {"id": 2, "name": "number", "required": True, "type": "long"},
        ]
        properties = {"seamark.stream.enabled": "true", "seamark.stream.shards": "2"}
        create_table(client, ("db", "t"), {"type": "struct", "fields": fields}, properties=properties)
        end_s = time.monotonic() + SECONDS

        def write_rows(name: str) -> int:
            rng, number = random.Random(f"{name} {seed}"), 0
            with stream_writer(SeamarkClient(proxy.url), ("db", "t"), producer=name) as writer:
                while time.monotonic() < end_s or number < APPENDS_MIN // WRITERS:
                    count = rng.choice((1, 10, 1000))
                    writer.write([{"producer": name, "number": number + index} for index in range(count)])
                    writer.flush()
                    number += count
            return number

        names = [f"w{number}" for number in range(WRITERS)]
        fault_task = asyncio.create_task(cause_faults(proxy, random.Random(seed), lambda: time.monotonic() > end_s))
        counts = await asyncio.gather(*(asyncio.to_thread(write_rows, name) for name in names))
        faults = await fault_task
        rows = await asyncio.to_thread(lambda: seamark.scan(client, "db.t").to_arrow().to_pylist())
        expected = Counter((name, number) for name, count in zip(names, counts, strict=True) for number in range(count))
        assert Counter((row["producer"], row["number"]) for row in rows) == expected, (seed, faults)
