"""How fast are updates, deletes and batch corrections of a keyed stream table, and do readers see the right rows?

A writer sends Arrow batches with change kinds, a batch writer corrects rows by upserts, and PyIceberg, without
Seamark's code, reads at the same time. The model is an array with the last value of each key. In the end PyIceberg,
DuckDB over the files of the last flush, and the model must agree; otherwise the run fails.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

import seamark
import seamark.duckdb
from bench.report import OURS, Report, Row
from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams.writer import stream_writer
from tests.services.seamark import Seamark

ROWS, QUICK_ROWS = 10_000_000, 200_000
BATCH_ROWS = 10_000
KEYS_PER_ROW = 0.4
"""The number of distinct keys for each sent row."""
DELETED_FRACTION = 0.1
CORRECTED_ROWS = 200
"""The rows of one correction by a batch writer. One correction follows each `BATCHES_PER_CORRECTION` batches."""
BATCHES_PER_CORRECTION = 20
ABSENT = -1
"""The value of a key without a row."""
TABLE = "bench.keyed"
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "value", LongType()),
    identifier_field_ids=[1],
)

Values = npt.NDArray[np.int64]


def send_changes(url: str, rows: int, seed: int) -> Values:
    """Send changes and corrections, and return the last value of each key, or `ABSENT` for a key without a row."""
    rng = np.random.default_rng(seed)
    keys = max(1, int(rows * KEYS_PER_ROW))
    values = np.full(keys, ABSENT, dtype=np.int64)
    client = SeamarkClient(url)
    kinds = np.array(["update", "delete"])
    with stream_writer(client, ("bench", "keyed")) as writer:
        for number in range(0, rows, BATCH_ROWS):
            count = min(BATCH_ROWS, rows - number)
            ids = rng.integers(0, keys, count)
            is_deleted = rng.random(count) < DELETED_FRACTION
            new_ids = np.arange(number, number + count)
            writer.write(pa.table({"id": ids, "value": new_ids, "_op": kinds[is_deleted.astype(int)]}))
            # numpy assigns repeated indexes in order, so the last change of a key stays.
            values[ids] = np.where(is_deleted, ABSENT, new_ids)
            if number // BATCH_ROWS % BATCHES_PER_CORRECTION == BATCHES_PER_CORRECTION - 1:
                writer.flush()
                corrected_keys = np.unique(rng.integers(0, keys, CORRECTED_ROWS))
                # Sent values are row numbers from 0, and ABSENT is -1. Values below -1 can only come from a correction.
                corrected_values = -2 - corrected_keys
                seamark.upsert(client, TABLE, pa.table({"id": corrected_keys, "value": corrected_values}), keys=["id"])
                values[corrected_keys] = corrected_values
    return values


def read_by_pyiceberg(catalog: Catalog) -> Values:
    """Read the table with PyIceberg, and return the keys and their values, sorted by key.

    Raises:
        AssertionError: A key has several rows.
    """
    return to_values(catalog.load_table(TABLE).scan().to_arrow())


def read_by_duckdb(url: str) -> Values:
    """Plan and read the table with DuckDB alone, and return the keys and their values, sorted by key.

    Raises:
        AssertionError: A key has several rows.
    """
    with closing(seamark.duckdb.connect(url)) as connection:
        return to_values(connection.execute(f"SELECT id, value FROM sea.{TABLE}").to_arrow_table())


def to_values(rows: pa.Table) -> Values:
    """Return the keys and their values, sorted by key.

    Raises:
        AssertionError: A key has several rows.
    """
    sorted_rows = rows.sort_by("id")
    ids = sorted_rows.column("id").to_numpy()
    assert (np.diff(ids) > 0).all(), "a key has several rows"
    return np.stack([ids, sorted_rows.column("value").to_numpy()])


def create_keyed_table(catalog: Catalog, version: int) -> None:
    """Create the table, with a record index that finds the rows to replace."""
    properties = {"seamark.stream.enabled": "true", "seamark.index.ids": "record(id)", "format-version": str(version)}
    catalog.create_namespace("bench")
    catalog.create_table(TABLE, SCHEMA, properties={**properties, "write.merge.mode": "merge-on-read"})


def flush_table(url: str) -> None:
    """Flush the table, so that its files contain all rows."""
    SeamarkClient(url)._request_json("POST", "/api/v1/tables/bench/keyed/flush")


def to_expected_rows(values: Values) -> Values:
    ids = np.flatnonzero(values != ABSENT)
    return np.stack([ids, values[ids]])


async def run(folder: Path, *, quick: bool = False) -> Report:
    return await asyncio.to_thread(_run_bench, folder, QUICK_ROWS if quick else ROWS)


def _run_bench(folder: Path, rows: int) -> Report:
    report = Report(
        "streams_keyed", "How fast are rows of a keyed stream table, and does every engine return the expected rows?"
    )
    with Seamark(folder / "home") as server:
        catalog = RestCatalog("bench", uri=server.base_url, **{"rest-scan-planning-enabled": "true"})
        create_keyed_table(catalog, version=3)
        is_done, reads = threading.Event(), list[float]()

        def read_meanwhile() -> None:
            while not is_done.wait(0.5):
                begun_s = time.monotonic()
                read_by_pyiceberg(catalog)
                reads.append(time.monotonic() - begun_s)

        reader = threading.Thread(target=read_meanwhile)
        reader.start()
        begun_s = time.monotonic()
        try:
            values = send_changes(server.base_url, rows, seed=1)
        finally:
            is_done.set()
            reader.join()
        seconds = time.monotonic() - begun_s
        expected = to_expected_rows(values)
        assert np.array_equal(read_by_pyiceberg(catalog), expected), "PyIceberg does not return the expected rows"
        flush_table(server.base_url)
        assert np.array_equal(read_by_pyiceberg(catalog), expected), (
            "PyIceberg does not return the expected rows after the flush"
        )
        assert np.array_equal(to_values(seamark.scan(SeamarkClient(server.base_url), TABLE).to_arrow()), expected), (
            "seamark reads other rows"
        )
        assert np.array_equal(read_by_duckdb(server.base_url), expected), "DuckDB does not return the expected rows"
    report.rows.append(Row(f"{rows:,} rows", "changes a second", "rows/s", {OURS: round(rows / seconds)}))
    if reads:
        report.rows.append(Row(f"{rows:,} rows", "scan of all rows", "s", {OURS: round(float(np.median(reads)), 2)}))
    report.notes.append(f"{len(reads)} scans by PyIceberg meanwhile; {expected.shape[1]:,} rows in the end")
    return report
