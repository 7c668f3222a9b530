"""Campaigns over each log: random faults for some minutes under load.

At the end, every reader must return the model.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from seamark.connector.duckdb.session import load_extensions
from seamark.metaserver.streams.stream_properties import ENABLED, SHARDS
from tests.faults.rigs.disk import SmallDisk, mount_small_disk
from tests.peers.fault_proxy import run_fault_proxy
from tests.peers.networks import Network, open_network
from tests.services.kafka import Kafka, run_kafka_broker
from tests.services.postgres import Postgres
from tests.services.process import choose_free_port
from tests.services.seamark import Seamark
from tests.streams.chaos.faults import ServerFaults
from tests.streams.chaos.load import WriterLoad
from tests.streams.chaos.model import AcknowledgedRows
from tests.streams.chaos.readers import Scan, StreamReaders, scan_by_pyiceberg
from tests.waits import block_until

ROWS_SCHEMA = Schema(
    NestedField(1, "producer", StringType()),
    NestedField(2, "number", LongType()),
    NestedField(3, "payload", StringType()),
)
KEYS_SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True), NestedField(2, "value", LongType()), identifier_field_ids=[1]
)
DISK_SIZE = "320m"
"""The size of the disk with the log in files. It has space for two full and two new segments."""
SERVERS = 2
READERS = 2
FAULTS_MIN = 8
"""The minimum number of faults. A campaign continues until it has caused them, even after its time."""
_PAUSE_S = (0.5, 3.0)
"""The minimum and the maximum time between two faults, in seconds."""
_SETTLE_S = 240.0
"""The time, in seconds, within which the last requests of writers must succeed after the last fault."""
SETTINGS = {
    "SEAMARK_STREAM_FLUSH_INTERVAL_MS": "1000",
    "SEAMARK_PEER_LEASE_S": "2",
    "SEAMARK_STREAM_LOG_RETENTION_BYTES": str(64 << 20),
    "SEAMARK_SERVICES_WORKERS": "1",
}
SERVICES = {"seamark.compaction.enabled": "true", "seamark.compaction.min-files": "3"}
"""Properties of both tables, so that the server compacts them continuously."""


@dataclass
class ChaosRig:
    """Servers over one log, and the parts in which a campaign may cause faults.

    Attributes:
        servers: The servers.
        disk: The disk with the log in files.
        kafka: The broker of the log in Kafka.
        network: The network with a host for each server.
    """

    servers: Sequence[Seamark]
    disk: SmallDisk | None = None
    kafka: Kafka | None = None
    network: Network | None = None

    @property
    def urls(self) -> list[str]:
        return [server.base_url for server in self.servers]


@contextmanager
def open_files_rig(folder: Path) -> Iterator[ChaosRig]:
    """Run one server. Its home, with the log and the database, is on a small disk."""
    with mount_small_disk(folder / "disk", DISK_SIZE) as disk:
        warehouse = f"file://{folder / 'warehouse'}"
        with Seamark(disk.root / "home", warehouse=warehouse, env=SETTINGS) as server:
            yield ChaosRig([server], disk=disk)


@contextmanager
def open_kafka_rig(folder: Path, postgres: Postgres) -> Iterator[ChaosRig]:
    """Run two servers with two workers each, on hosts of a separate network, over one broker and one database."""
    with ExitStack() as stack:
        hosts = stack.enter_context(open_network(SERVERS))
        kafka = stack.enter_context(run_kafka_broker(folder / "broker", host=hosts.address))
        database_proxy = stack.enter_context(run_fault_proxy("127.0.0.1", postgres.port, hosts.address))
        database = postgres.create_database().replace(f"127.0.0.1:{postgres.port}", database_proxy.address)
        servers = []
        for host in hosts.hosts:
            port = choose_free_port()
            server_proxy = stack.enter_context(run_fault_proxy("", port, connect=partial(host.connect, port)))
            server = Seamark(
                folder / host.name,
                warehouse=f"file://{folder / 'warehouse'}",
                database=database,
                env={**SETTINGS, "SEAMARK_STREAM_LOG": f"kafka://{kafka.address}/chaos"},
                flags=("--workers", "2"),
                port=port,
                base_url=server_proxy.url,
                prefix=host.command,
            )
            servers.append(stack.enter_context(server))
        yield ChaosRig(servers, kafka=kafka, network=hosts)


@dataclass
class CampaignOutcome:
    """The numbers of faults, reads and rows of a campaign."""

    seconds: float
    faults: Counter[str]
    answers: Counter[str]
    """The number of answers to appends for each status."""
    reads: Counter[str]
    failed_reads: Counter[str]
    rows: int
    changes: int

    def describe(self) -> str:
        counters = {
            "faults": self.faults,
            "answers": self.answers,
            "reads": self.reads,
            "failed reads": self.failed_reads,
        }
        lines = [f"{self.seconds:.0f} s; {self.rows:,} rows and {self.changes:,} changes of keys acknowledged"]
        return "\n".join(lines + [f"{name}: {dict(counter.most_common(12))}" for name, counter in counters.items()])


def run_campaign(rig: ChaosRig, seed: int, seconds: float, scans: dict[str, Scan] | None = None) -> CampaignOutcome:
    """Run writers, readers and faults for a time, then check the contents of both tables with each reader.

    Args:
        rig: The servers.
        seed: The seed of all random choices. The times of processes still differ between runs.
        seconds: The minimum time for which faults occur.
        scans: Additional ways to read, such as engines, by name.

    Raises:
        AssertionError: A reader has returned wrong rows, or rows are lost or repeated at the end.
    """
    rng, model = random.Random(seed), AcknowledgedRows()
    create_tables(rig.urls[0])
    load, readers = WriterLoad(rig.urls, model, rng), StreamReaders(rig.urls, model, rng, READERS, scans)
    faults = ServerFaults(rig.servers, readers, rng, disk=rig.disk, kafka=rig.kafka, network=rig.network)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            asyncio.run(load.run())
        except BaseException as error:  # noqa: BLE001  the campaign fails with this error
            errors.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    readers.start()
    deadline_s = time.monotonic() + seconds
    try:
        while (
            (time.monotonic() < deadline_s or faults.counts.total() < FAULTS_MIN)
            and not errors
            and not readers.wrong_reads
        ):
            time.sleep(rng.uniform(*_PAUSE_S))
            faults.cause_random_fault()
            assert all(server.running() for server in rig.servers), f"a server has ended; {dict(faults.counts)}"
    finally:
        load.is_ending = True
        writer.join(_SETTLE_S)
        readers.stop()
    note = f"seed {seed}; {dict(faults.counts)}; {dict(load.statuses)}"
    assert not readers.wrong_reads, f"{readers.wrong_reads[:3]}; {note}"
    assert not errors, f"{errors}; {note}"
    assert not writer.is_alive(), f"a request was not acknowledged in {_SETTLE_S:g} s after the last fault; {note}"
    check_contents(rig, model, {"pyiceberg": scan_by_pyiceberg, **(scans or {})})
    return CampaignOutcome(
        seconds,
        faults.counts,
        load.statuses,
        readers.reads,
        readers.failures,
        model.acknowledged_rows.total(),
        model.acknowledged_changes.total(),
    )


def create_tables(url: str) -> None:
    with RestCatalog("chaos", uri=url) as catalog:
        catalog.create_namespace("db")
        properties = {ENABLED: "true", SHARDS: "2", "format-version": "2", **SERVICES}
        for name, schema in (("t", ROWS_SCHEMA), ("k", KEYS_SCHEMA)):
            table = catalog.create_table(f"db.{name}", schema, properties=properties)
            # PyIceberg plans no scan of a table without a snapshot. The server commits the first rows at once, but
            # not before it acknowledges them.
            table.append(table.schema().as_arrow().empty_table())


def check_contents(rig: ChaosRig, model: AcknowledgedRows, scans: dict[str, Scan]) -> None:
    """Check that each reader returns exactly the acknowledged rows, before and after a last flush.

    After the flush, DuckDB also reads the rows from only the data files.
    """
    acknowledged_counts = model.snapshot()
    assert acknowledged_counts.rows == dict(model.sent_rows)

    def check(name: str, scan: Scan, url: str) -> None:
        """Wait until one read of both tables succeeds, and check its rows against the model."""

        def is_read() -> bool:
            try:
                model.check_rows(scan(url, "t"), acknowledged_counts)
                model.check_keys(scan(url, "k"), acknowledged_counts)
            except AssertionError as error:
                error.add_note(f"read by {name} from {url}")
                raise
            except Exception:  # noqa: BLE001  a server may still be waiting for its lease or its broker
                return False
            return True

        block_until(is_read, within_s=120)

    for name, scan in scans.items():
        for url in rig.urls:
            check(name, scan, url)
    for table in ("t", "k"):
        block_until(partial(_flush, rig.urls[0], table), within_s=120)
    for name, scan in {**scans, "duckdb": partial(scan_files_by_duckdb, rig)}.items():
        for url in rig.urls:
            check(name, scan, url)


def _flush(url: str, table: str) -> bool:
    """Flush a table. Return False if the server refuses or does not answer, for example after a fault."""
    request = urllib.request.Request(f"{url}/api/v1/tables/db/{table}/flush", b"", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def scan_files_by_duckdb(rig: ChaosRig, url: str, table: str) -> Counter[tuple[Any, ...]]:
    """Return the rows in all files of the table. DuckDB reads them without a server."""
    with RestCatalog("chaos", uri=url) as catalog:
        location = catalog.load_table(f"db.{table}").metadata_location
    columns = "producer, number" if table == "t" else "id, value"
    with duckdb.connect() as connection:
        load_extensions(connection)
        rows = connection.execute(f"SELECT {columns} FROM iceberg_scan('{location}')").fetchall()
    return Counter(rows)


@contextmanager
def open_temporary_rig(log: str, postgres: Postgres | None) -> Iterator[ChaosRig]:
    """Run servers over a log, `files` or `kafka`, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="seamark-chaos-") as name:
        if log == "files":
            with open_files_rig(Path(name)) as rig:
                yield rig
        else:
            assert postgres is not None
            with open_kafka_rig(Path(name), postgres) as rig:
                yield rig
