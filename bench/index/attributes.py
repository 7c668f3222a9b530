"""What does an index on an attribute of a dimension table save, compared with an index on the key of the facts?

Two fact tables have the same rows. A filter on a dimension table leaves out files of the first table by the keys of the
dimension table and a bitmap of the key, and of the second table by a bitmap of the attribute. Both plans must keep the
same files. The first plan of a server reads the dimension table, or only the index.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.targets import run_seamark
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.index.lookups import pin_attributes

FILES, ROWS, CUSTOMERS = 100, 50_000, 1_000_000
QUICK_FILES, QUICK_ROWS, QUICK_CUSTOMERS = 10, 2_000, 20_000
CITIES, CITIES_PER_FILE = 250, 5
NAMESPACE, KEYS = "bench", "keys"
TABLES = {KEYS: "by_key", OURS: "by_city"}
_SETTINGS = {"SEAMARK_SERVICES_WORKERS": "0", "SEAMARK_JOIN_WAIT_S": "60", "SEAMARK_INDEX_WAIT_S": "60"}
_STARTS, _PLANS = 5, 40


async def run(folder: Path, *, quick: bool = False) -> Report:
    peer = "keys of the dimension table, with a bitmap of the key"
    report = Report("index_attributes", "What does an index on an attribute save in a star join?", peer=peer)
    files, rows, customers = (QUICK_FILES, QUICK_ROWS, QUICK_CUSTOMERS) if quick else (FILES, ROWS, CUSTOMERS)
    sizes: dict[str, float] = {}
    first_ms: dict[str, list[float]] = {label: [] for label in TABLES}
    later_ms: dict[str, list[float]] = {label: [] for label in TABLES}
    with run_seamark(folder, _SETTINGS) as server, closing(IndexClient(server.base_url)) as client:
        _append(server.base_url, files, rows, customers)
        sizes[KEYS] = _build(client, TABLES[KEYS], "customer")
        (city,) = pin_attributes(client, [f"{NAMESPACE}.customers.city via customer = id"], add_partners=False)
        sizes[OURS] = _build(client, TABLES[OURS], city)
    for start in range(1 if quick else _STARTS):
        for label, table in TABLES.items():
            with run_seamark(folder, _SETTINGS) as server, closing(IndexClient(server.base_url)) as client:
                _plan(client, table, None)  # The files of the table are in memory, as in a running server.
                first_ms[label].append(_plan(client, table, start)[0])
    with run_seamark(folder, _SETTINGS) as server, closing(IndexClient(server.base_url)) as client:
        for table in TABLES.values():
            _plan(client, table, 0)
        for city_number in range(10, 12 if quick else 10 + _PLANS):
            counts = {}
            for label, table in TABLES.items():
                elapsed_ms, counts[label] = _plan(client, table, city_number)
                later_ms[label].append(elapsed_ms)
            if len(set(counts.values())) > 1:
                raise AnswersDiffer(f"city {city_number}: {counts}")
    for case, times_by_table in (("first plan of a server", first_ms), ("plan with another city", later_ms)):
        medians = {label: statistics.median(times) for label, times in times_by_table.items()}
        report.rows.append(Row(case, "a request", "ms", medians, peer=KEYS))
    megabytes = {label: size / 1e6 for label, size in sizes.items()}
    report.rows.append(Row("index files", "all files of facts", "MB", megabytes, peer=KEYS))
    report.notes += [
        f"{files} files of {rows:,} facts, each with customers of {CITIES_PER_FILE} of {CITIES} cities; {customers:,} "
        f"customers. Medians of {_STARTS} starts and {_PLANS} cities. A plan creates a plan table."
    ]
    return report


def _append(url: str, files: int, rows: int, customers: int) -> None:
    rng = np.random.default_rng(7)
    cities = rng.integers(CITIES, size=customers)
    names = pa.array([f"City of the number {number:04d}" for number in range(CITIES)])
    with RestCatalog("sea", uri=url) as catalog:
        catalog.create_namespace(NAMESPACE)
        dimension = pa.table({"id": np.arange(customers), "city": names.take(pa.array(cities))})
        catalog.create_table(f"{NAMESPACE}.customers", schema=dimension.schema).append(dimension)
        schema = pa.schema([("customer", pa.int64()), ("amount", pa.int64())])
        tables = [catalog.create_table(f"{NAMESPACE}.{name}", schema=schema) for name in TABLES.values()]
        for _ in range(files):
            customers_of_file = np.flatnonzero(np.isin(cities, rng.choice(CITIES, CITIES_PER_FILE, replace=False)))
            facts = {"customer": rng.choice(customers_of_file, rows), "amount": rng.integers(100, size=rows)}
            for table in tables:
                table.append(pa.table(facts, schema=schema))


def _build(client: IndexClient, table: str, column: str) -> int:
    """Build a bitmap, and return the size of its files in bytes."""
    name = (NAMESPACE, table)
    client.put_index(name, "index", kind="bitmap", columns=[column])
    with closing(InProcessWorkers()) as workers:
        build(client, name, "index", workers)
    return client.index(name, "index").size_bytes


def _plan(client: IndexClient, table: str, city: int | None) -> tuple[float, int]:
    """Plan the facts of a city, and return the time in ms and the number of kept files.

    If `city` is None, the plan has no join and keeps all files.
    """
    join = {
        "table": [NAMESPACE, "customers"],
        "on": {"customer": "id"},
        "predicate": f"city = 'City of the number {city:04d}'" if city is not None else "",
    }
    begun_s = time.perf_counter()
    if city is None:
        plan = client.plan_table((NAMESPACE, table), "amount >= 0")
    else:
        plan = client.plan_table((NAMESPACE, table), joins=[join])
    elapsed_ms = 1000 * (time.perf_counter() - begun_s)
    if city is not None and not plan.joins[0]["used"]:
        raise AnswersDiffer(f"{table}: {plan.joins}")
    return elapsed_ms, plan.files
