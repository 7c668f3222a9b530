"""Replicas as processes over PostgreSQL and a real S3 server, behind proxies that can stop forwarding."""

from __future__ import annotations

import json
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

from tests.faults.rigs.http import HttpClient
from tests.peers.fault_proxy import FaultProxy, run_fault_proxy
from tests.peers.networks import Network
from tests.services.postgres import Postgres
from tests.services.process import choose_free_port
from tests.services.s3 import S3
from tests.services.seamark import Seamark
from tests.waits import block_until

NAMESPACE, TABLE = "db", "t"
PLAN = f"/v1/namespaces/{NAMESPACE}/tables/{TABLE}/plan"
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


@dataclass
class Fleet:
    """Replicas of one database and storage, with proxies before the storage and each peer port."""

    replicas: list[Seamark]
    storage: FaultProxy
    """The proxy between the replicas and the S3 server. Clients of the tests use the server directly."""
    links: list[FaultProxy]
    """The proxies before the peer ports, in the order of the replicas. The other replicas use them."""
    s3: S3
    database: str

    def build_clients(self, timeout_s: float = 60) -> list[HttpClient]:
        return [HttpClient(replica.base_url, timeout_s) for replica in self.replicas]

    def write(self, appends: int, name: str = TABLE) -> None:
        """Create the table `name` if it does not exist, and append rows `appends` times.

        Each append writes a data file and a manifest.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyIceberg leaves sockets to the garbage collector.
            with RestCatalog("sea", uri=self.replicas[0].base_url, **self.s3.build_client_properties()) as catalog:
                catalog.create_namespace_if_not_exists(NAMESPACE)
                table = catalog.create_table_if_not_exists(f"{NAMESPACE}.{name}", ROWS.schema)
                for _ in range(appends):
                    table.append(ROWS)

    def count_storage_reads(self) -> dict[str, int]:
        """Return the number of GETs that the replicas sent to the storage, by path."""
        return {
            path.removeprefix("GET "): count for path, count in self.storage.requests.items() if path.startswith("GET ")
        }

    def wait_for_replicas(self) -> None:
        """Wait until every replica knows all running replicas."""
        running_count = sum(replica.running() for replica in self.replicas)
        block_until(
            lambda: all(
                read_metric(replica, "seamark_peer_replicas") == running_count
                for replica in self.replicas
                if replica.running()
            )
        )


def read_metric(replica: Seamark, name: str, **labels: str) -> float:
    """Return the value of a replica's metric with these labels, or 0 if it has none."""
    expected = name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else "")
    with urllib.request.urlopen(f"{replica.base_url}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            sample, _, value = line.rpartition(" ")
            if sample == expected:
                return float(value)
    return 0.0


def count_peer_reads(replica: Seamark, source: str) -> float:
    return read_metric(replica, "seamark_peer_reads_total", source=source)


def request_plan(client: HttpClient, headers: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    """Plan the whole table. Return (status, sorted paths of the data files). After an error there are no paths."""
    status, body = client.call("POST", PLAN, {}, dict(headers or {}))
    tasks = body.get("file-scan-tasks", []) if status == 200 else []
    return status, sorted(task["data-file"]["file-path"] for task in tasks)


@contextmanager
def open_fleet(
    folder: Path,
    postgres: Postgres,
    s3: S3,
    count: int,
    *,
    env: Mapping[str, str] | None = None,
    first_env: Mapping[str, str] | None = None,
    is_linked: bool = True,
    network: Network | None = None,
) -> Iterator[Fleet]:
    """Open a fleet of `count` replicas.

    Args:
        env: Settings of all replicas.
        first_env: Further settings of the first replica.
        is_linked: If True, the replicas reach each other through proxies.
        network: If given, each replica is on a host of this network, and reaches the database and the storage through
        it.
    """
    database, bucket = postgres.create_database(), s3.create_bucket()
    store, local_address = urlsplit(s3.endpoint), "127.0.0.1" if network is None else network.address
    is_linked = is_linked and network is None
    with ExitStack() as stack:
        storage = stack.enter_context(run_fault_proxy(str(store.hostname), int(store.port or 80), local_address))
        if network is not None:
            database_proxy = stack.enter_context(run_fault_proxy("127.0.0.1", postgres.port, local_address))
            database = database.replace(f"127.0.0.1:{postgres.port}", database_proxy.address)
        replicas, links = [], []
        for number in range(count):
            peer_port, host = choose_free_port(), None if network is None else network.hosts[number]
            address = "127.0.0.1" if host is None else host.address
            settings: dict[str, Any] = {
                **s3.build_seamark_env(),
                "SEAMARK_S3_ENDPOINT": storage.url,
                "SEAMARK_PEER_ADDRESS": f"{address}:{peer_port}",
                "SEAMARK_PEER_LEASE_S": "3",
                "SEAMARK_HOUSEKEEPING_INTERVAL_S": "3600",
            }
            if is_linked:
                link = stack.enter_context(run_fault_proxy("127.0.0.1", peer_port))
                links.append(link)
                settings |= {"SEAMARK_PEER_ADDRESS": link.address, "SEAMARK_PEER_LISTEN": f"127.0.0.1:{peer_port}"}
            settings |= {**(env or {}), **((first_env or {}) if number == 0 else {})}
            server_port, base_url = choose_free_port(), ""
            if host is not None:
                server_proxy = run_fault_proxy("", server_port, connect=partial(host.connect, server_port))
                base_url = stack.enter_context(server_proxy).url
            replica = Seamark(
                folder / f"r{number}",
                database=database,
                warehouse=f"s3://{bucket}/w",
                env=settings,
                port=server_port,
                base_url=base_url,
                prefix=() if host is None else host.command,
            )
            replicas.append(stack.enter_context(replica))
        fleet = Fleet(replicas, storage, links, s3, database)
        if settings["SEAMARK_PEER_ADDRESS"]:
            fleet.wait_for_replicas()
        yield fleet


def list_replicas(replica: Seamark) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{replica.base_url}/api/v1/replicas", timeout=30) as answer:
        replicas: list[dict[str, Any]] = json.loads(answer.read())["replicas"]
    return replicas
