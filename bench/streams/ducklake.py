"""The benchmark of DuckLake for small writes: 300,000 rows in batches of ten.

The peer is the extension `ducklake` of DuckDB, which keeps small writes in its catalog's database (data inlining). It
needs the package `duckdb-extension-ducklake`, which the project does not install:

    pip install --no-deps --target FOLDER duckdb-extension-ducklake==1.5.5
    PYTHONPATH=FOLDER python -m bench.streams.run ducklake

Without the package, the report has no peer. In the end, both systems must return all rows.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from pathlib import Path

import aiohttp
import duckdb
from pyiceberg.catalog.rest import RestCatalog

import seamark
from bench.report import OURS, Report, Row
from seamark.connector.client.catalog import create_namespace, create_table
from seamark.connector.client.client import SeamarkClient
from seamark.connector.duckdb.session import find_extension
from tests.services.seamark import Seamark

PEER = "ducklake"
ROWS, QUICK_ROWS = 300_000, 2_000
BATCH_ROWS = 10
PEER_SECONDS, QUICK_PEER_SECONDS = 20.0, 0.5
SERIAL_SECONDS, QUICK_SERIAL_SECONDS = 10.0, 0.3
CONNECTIONS = 32
GOAL_ROWS_S = 15_000
COLUMNS = [
    {"id": 1, "name": "id", "required": True, "type": "long"},
    {"id": 2, "name": "name", "required": False, "type": "string"},
    {"id": 3, "name": "value", "required": False, "type": "double"},
]


async def run(folder: Path, *, quick: bool = False) -> Report:
    rows = QUICK_ROWS if quick else ROWS
    report = Report(
        "streams_ducklake", f"How fast are {ROWS:,} rows in batches of ten?", peer="DuckLake 1.5.5 in DuckDB"
    )
    peer = await asyncio.to_thread(_measure_ducklake, folder, rows, QUICK_PEER_SECONDS if quick else PEER_SECONDS)
    peers = {} if peer is None else {PEER: peer}
    with Seamark(folder / "home") as server:
        client = SeamarkClient(server.base_url)
        create_namespace(client, "bench", {})
        serial_s = QUICK_SERIAL_SECONDS if quick else SERIAL_SECONDS
        cases = {
            "one writer waits for each answer": (await _measure_requests(server, "one", 1, rows, serial_s), None),
            f"{CONNECTIONS} writers wait for each answer": (
                await _measure_requests(server, "many", CONNECTIONS, rows, math.inf),
                GOAL_ROWS_S,
            ),
            "one writer with seamark.stream_writer": (
                await asyncio.to_thread(_measure_writer, server, rows),
                GOAL_ROWS_S,
            ),
        }
    for case, (rate, goal) in cases.items():
        report.rows.append(Row(case, "acknowledged", "rows/s", {OURS: rate, **peers}, False, PEER, goal))
    report.notes += [
        f"{rows:,} rows, in batches of {BATCH_ROWS}; the first case and the peer end after some seconds. A batch of "
        "the first two cases is one JSON request, and is durable on the disk when it is acknowledged. "
        "`seamark.stream_writer` takes a batch in each call. Its requests have the rows of all calls since the last "
        "request. Its rate is until the last acknowledgement.",
        "Unmodified PyIceberg counts the rows after each case: all acknowledged rows are there.",
    ]
    if peer is None:
        report.notes.append("The package duckdb-extension-ducklake is not installed, so there is no peer.")
    else:
        report.notes.append(
            "The peer inserts each batch by a statement in its own transaction, from a thread of one process. Its "
            "catalog is a DuckDB file, and its option data_inlining_row_limit is 100."
        )
    return report


def _create_table(server: Seamark, name: str) -> None:
    schema = {"type": "struct", "fields": COLUMNS}
    create_table(SeamarkClient(server.base_url), ("bench", name), schema, properties={"seamark.stream.enabled": "true"})


def _make_rows(number: int) -> list[dict[str, object]]:
    first = number * BATCH_ROWS
    return [{"id": first + place, "name": f"name {first + place}", "value": 0.5} for place in range(BATCH_ROWS)]


def _check_count(server: Seamark, name: str, rows: int) -> None:
    catalog = RestCatalog("bench", uri=server.base_url, **{"rest-scan-planning-enabled": "true"})
    count = catalog.load_table(f"bench.{name}").scan().to_arrow().num_rows
    assert count == rows, f"{name} has {count:,} rows, and {rows:,} were acknowledged"


async def _measure_requests(server: Seamark, name: str, connections: int, rows: int, seconds: float) -> float:
    """Append rows over HTTP from `connections` writers, until all rows are sent or the time ends.

    Returns:
        The acknowledged rows per second.
    """
    await asyncio.to_thread(_create_table, server, name)
    url, batch_numbers, sent_batches = (
        f"{server.base_url}/api/v1/tables/bench/{name}/rows",
        iter(range(rows // BATCH_ROWS)),
        0,
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as http:

        async def append(batch_number: int) -> None:
            nonlocal sent_batches
            async with http.post(url, json=_make_rows(batch_number)) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            sent_batches += 1

        async def write() -> None:
            for batch_number in batch_numbers:
                await append(batch_number)
                if time.perf_counter() - started_s >= seconds:
                    return

        await append(next(batch_numbers))  # The first append opens the log and the table.
        started_s = time.perf_counter()
        await asyncio.gather(*(write() for _ in range(connections)))
        rate = (sent_batches - 1) * BATCH_ROWS / (time.perf_counter() - started_s)
    await asyncio.to_thread(_check_count, server, name, sent_batches * BATCH_ROWS)
    return rate


def _measure_writer(server: Seamark, rows: int) -> float:
    """Return the rows per second that a Python program with `seamark.stream_writer` gets acknowledged."""
    _create_table(server, "writer")
    started_s = time.perf_counter()
    with seamark.stream_writer(SeamarkClient(server.base_url), ("bench", "writer")) as writer:
        for batch_number in range(rows // BATCH_ROWS):
            writer.write(_make_rows(batch_number))
    rate = rows / (time.perf_counter() - started_s)
    _check_count(server, "writer", rows)
    return rate


def _measure_ducklake(folder: Path, rows: int, seconds: float) -> float | None:
    """Return the rows per second that DuckLake inserts, or None if the extension is not installed.

    The measurement ends when all rows are inserted, or after `seconds`.
    """
    extension = find_extension("ducklake")
    if extension is None:
        return None
    with duckdb.connect() as connection:
        connection.execute(f"LOAD '{extension}'")
        connection.execute(
            f"ATTACH 'ducklake:{folder / 'catalog.ducklake'}' AS lake "
            f"(DATA_PATH '{folder / 'lake'}', DATA_INLINING_ROW_LIMIT 100)"
        )
        connection.execute("CREATE TABLE lake.t (id BIGINT, name VARCHAR, value DOUBLE)")
        started_s, sent_count = time.perf_counter(), 0
        for place in itertools.takewhile(
            lambda _: time.perf_counter() - started_s < seconds, range(rows // BATCH_ROWS)
        ):
            values = ", ".join(f"({row['id']}, '{row['name']}', {row['value']})" for row in _make_rows(place))
            connection.execute(f"INSERT INTO lake.t VALUES {values}")
            sent_count += BATCH_ROWS
        rate = sent_count / (time.perf_counter() - started_s)
        (count,) = connection.execute("SELECT count(*) FROM lake.t").fetchone() or (0,)
        assert count == sent_count
    return rate
