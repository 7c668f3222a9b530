"""`python -m bench.streams.visible [--quick]`: after how long does stock PyIceberg read a row of a stream table?

A process sends rows at a steady rate, each with the time at which it was made. PyIceberg, unmodified, loads the table
and scans the rows after those that it has seen, again and again. The delay of a row is from its making to the
end of the scan that returned it. So it has the writer's batching, the acknowledgement, the plan, and the read.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import GreaterThan
from pyiceberg.schema import Schema
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from bench.report import OURS, Report, Row
from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams.writer import stream_writer
from tests.services.seamark import Seamark

RATES, QUICK_RATES = (100, 1_000, 10_000), (100, 1_000)
SECONDS, QUICK_SECONDS = 30.0, 4.0
WARM_S = 2.0
"""Rows of the first seconds do not count: both sides import and connect."""
GOAL_MS = 1_000.0
PAYLOAD = "x" * 80
TICK_S = 0.01
_SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "at", DoubleType(), required=True),
    NestedField(3, "payload", StringType()),
)


def measure(url: str, name: str, rate: int, seconds: float) -> tuple[list[float], int]:
    """Return the delays in milliseconds, and the number of scans."""
    catalog = RestCatalog("bench", uri=url, **{"rest-scan-planning-enabled": "true"})
    catalog.create_table(f"bench.{name}", _SCHEMA, properties={"seamark.stream.enabled": "true"})
    writer = multiprocessing.get_context("spawn").Process(target=send, args=(url, name, rate, seconds))
    writer.start()
    delays, last, scans, count = list[float](), -1, 0, int(rate * seconds)
    begun_s: float | None = None
    try:
        while last < count - 1:
            scan = catalog.load_table(f"bench.{name}").scan(GreaterThan("id", last), selected_fields=("id", "at"))
            rows = scan.to_arrow()
            now_s, scans = time.time(), scans + 1
            if not rows.num_rows:
                continue
            written_s = rows.column("at").to_numpy()
            begun_s = written_s.min() if begun_s is None else begun_s
            delays += ((now_s - written_s[written_s > begun_s + WARM_S]) * 1000).tolist()
            last = max(rows.column("id").to_pylist())
    finally:
        writer.join()
    assert catalog.load_table(f"bench.{name}").scan().count() == count
    return delays, scans


def send(url: str, name: str, rate: int, seconds: float) -> None:
    """Send rows at a steady rate."""
    sent, count, begun_s = 0, int(rate * seconds), time.monotonic()
    with stream_writer(SeamarkClient(url), ("bench", name)) as writer:
        while sent < count:
            due = min(count, int((time.monotonic() - begun_s) * rate) + 1)
            now_s = time.time()
            writer.write([{"id": number, "at": now_s, "payload": PAYLOAD} for number in range(sent, due)])
            sent = due
            time.sleep(TICK_S)


def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("streams-visible", "After how long does stock PyIceberg read a row of a stream table?")
    with Seamark(folder / "home") as server:
        RestCatalog("bench", uri=server.base_url).create_namespace("bench")
        for rate in QUICK_RATES if quick else RATES:
            delays, scans = measure(server.base_url, f"t{rate}", rate, QUICK_SECONDS if quick else SECONDS)
            for percent, goal in ((50, None), (99, GOAL_MS), (99.9, None)):
                value = float(np.percentile(delays, percent))
                values = {OURS: round(value, 1)}
                report.rows.append(Row(f"{rate:,} rows/s", f"visible, p{percent:g}", "ms", values, goal=goal))
            report.notes.append(f"{rate:,} rows/s: {scans:,} scans by PyIceberg, {len(delays):,} rows counted")
    return report


def main() -> None:
    parser = argparse.ArgumentParser("bench.streams.visible", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, for some seconds")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-streams-") as folder:
        report = run(Path(folder), quick=chosen.quick)
    for row in report.rows:
        print(f"{row.case:>16}  {row.measure:<14} {row.values[OURS]:>10,.1f} {row.unit}")
    for note in report.notes:
        print(note)


if __name__ == "__main__":
    main()
