"""Tests that the table has each acknowledged row once although servers and the broker are killed under load."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from seamark.metaserver.streams.stream_properties import ENABLED, SHARDS
from tests.seeds import first_seed
from tests.services.kafka import Kafka, kafka_broker
from tests.services.postgres import Postgres
from tests.services.seamark import Seamark
from tests.waits import until

SECONDS = 90.0
WRITERS = 6
FAULTS_MIN = 8
SCHEMA = Schema(NestedField(1, "producer", StringType()), NestedField(2, "number", LongType()))


class Load:
    """Writers that send each request to any server, and repeat it until it is acknowledged."""

    def __init__(self, servers: list[Seamark], seed: int) -> None:
        self.servers = servers
        self.rng = random.Random(seed)
        self.acknowledged: Counter[tuple[str, int]] = Counter()
        self.is_ending = False

    async def write(self, http: aiohttp.ClientSession, name: str) -> None:
        sequence = number = 0
        while not self.is_ending:
            count = self.rng.choice((1, 5, 50))
            rows = [{"producer": name, "number": number + place} for place in range(count)]
            while not await self._is_acknowledged(http, name, sequence, rows):
                await asyncio.sleep(0.1)
            self.acknowledged.update((name, row["number"]) for row in rows)
            number, sequence = number + count, sequence + 1
            await asyncio.sleep(self.rng.choice((0, 0.01, 0.05)))

    async def _is_acknowledged(
        self, http: aiohttp.ClientSession, name: str, sequence: int, rows: list[dict[str, object]]
    ) -> bool:
        server = self.rng.choice(self.servers)
        url = f"{server.base_url}/api/v1/tables/db/t/rows?producer={name}&sequence={sequence}"
        try:
            async with http.post(url, json=rows, timeout=aiohttp.ClientTimeout(40)) as answer:
                if answer.status == 200:
                    return True
                assert answer.status in (429, 500, 502, 503, 504), await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            pass
        return False


async def _break_things(load: Load, kafka: Kafka, faults: Counter[str]) -> None:
    while not load.is_ending:
        await asyncio.sleep(load.rng.uniform(1, 4))
        server, kind = load.rng.choice(load.servers), load.rng.choice(("kill", "kill", "pause", "broker"))
        faults[kind] += 1
        if kind == "pause":
            os.killpg(server.pid, signal.SIGSTOP)
            await asyncio.sleep(load.rng.choice((0.5, 3)))
            os.killpg(server.pid, signal.SIGCONT)
        elif kind == "kill":
            await asyncio.to_thread(server.kill9)
            await asyncio.to_thread(server.start)
        else:
            await asyncio.to_thread(kafka.kill)
            await asyncio.to_thread(kafka.start)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_each_acknowledged_row_is_in_the_table_once_after_kills(postgres: Postgres, tmp_path: Path) -> None:
    seed = first_seed()
    with kafka_broker(tmp_path / "broker") as kafka:
        database = postgres.create_database()
        env = {
            "SEAMARK_STREAM_LOG": f"kafka://{kafka.address}/chaos",
            "SEAMARK_STREAM_FLUSH_INTERVAL_MS": "1000",
            "SEAMARK_PEER_LEASE_S": "2",
        }
        servers = [
            Seamark(tmp_path / name, warehouse=f"file://{tmp_path / 'warehouse'}", database=database, env=env)
            for name in ("a", "b")
        ]
        with ExitStack() as stack:
            for server in servers:
                stack.enter_context(server)
            catalog = RestCatalog("chaos", uri=servers[0].base_url, **{"rest-scan-planning-enabled": "true"})
            catalog.create_namespace("db")
            catalog.create_table("db.t", SCHEMA, properties={ENABLED: "true", SHARDS: "2"})
            load, faults = Load(servers, seed), Counter[str]()
            await _run(load, kafka, faults)
            assert sum(faults.values()) >= FAULTS_MIN, faults
            rows = await asyncio.to_thread(lambda: catalog.load_table("db.t").scan().to_arrow().to_pylist())
            stored = Counter((row["producer"], row["number"]) for row in rows)
            assert stored == load.acknowledged, f"seed {seed}"


async def _run(load: Load, kafka: Kafka, faults: Counter[str]) -> None:
    """Write under faults for a time. Return when all writers have finished and all servers answer."""
    async with aiohttp.ClientSession() as http:
        writers = [asyncio.create_task(load.write(http, f"w{number}")) for number in range(WRITERS)]
        breaking = asyncio.create_task(_break_things(load, kafka, faults))
        deadline_s = time.monotonic() + SECONDS
        await until(
            lambda: time.monotonic() > deadline_s or any(task.done() for task in (*writers, breaking)), 2 * SECONDS
        )
        load.is_ending = True
        await asyncio.gather(breaking)
        await asyncio.gather(*writers)
