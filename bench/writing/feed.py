"""Does a server keep a table fast to read by the table's policy alone, while many small commits fill it?

PyIceberg appends 500 small files to an unpartitioned table. As the table's properties request, the server clusters it
by two columns, and limits its snapshots, manifests and metadata files. No client starts a job. A second table gets the
same commits, but has no table services. After every 25 commits the benchmark measures both tables: their files, the
number of files that may contain a row (the depth of the clustering), manifests and metadata, and the time of a plan. In
the end it reads both tables: the rows must be the appended rows.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog

from bench.report import OURS, AnswersDiffer, Report, Row
from seamark.connector.client.catalog import create_namespace, create_table
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.read.scans import bind_filter, scan
from seamark.connector.read.tables import ScanTask, open_table, plan
from tests.services.seamark import Seamark

COMMITS, ROWS, COMMITS_PER_MEASUREMENT = 500, 2_000, 25
QUICK_COMMITS, QUICK_EVERY = 20, 10
PAUSE_S = 0.4
"""The seconds from the start of a commit to the start of the next commit.

A minute passes between two rewrites of a table, so with a shorter pause, more files would wait for a rewrite.
"""
PLANS, QUICK_PLANS = 15, 4
"""The number of plans of each kind in each measurement."""
TARGET_BYTES = 1 << 20
MAX_AGE_MS = 30_000
VERSIONS = 20
WITHOUT_SERVICES = "no services"
TABLES = {OURS: "bench.fed", WITHOUT_SERVICES: "bench.twin"}
PROPERTIES = {
    "write.target-file-size-bytes": str(TARGET_BYTES),
    "seamark.clustering.columns": "customer, item",
    "seamark.manifests.enabled": "true",
    "seamark.expiration.enabled": "true",
    "history.expire.max-snapshot-age-ms": str(MAX_AGE_MS),
    "write.metadata.previous-versions-max": str(VERSIONS),
    "write.metadata.delete-after-commit.enabled": "true",
}
CUSTOMERS, ITEMS = 20_000, 50_000
SHARE = 0.05
"""The fraction of the items, and of the customers, in the condition `range`."""
SETTLED_S = 150.0
"""The maximum time in seconds after the last commit until no file is left to cluster."""
GROWTH_RATIO_MAX = 1.5
"""The maximum ratio by which a value may grow.

Values are compared between the first and the second half of the commits, times of a plan between the second fifth and
the last fifth.
"""
_FIELDS = (("id", "long"), ("customer", "long"), ("item", "long"), ("price", "double"), ("note", "string"))
_SCHEMA = pa.schema(
    [("id", pa.int64()), ("customer", pa.int64()), ("item", pa.int64()), ("price", pa.float64()), ("note", pa.string())]
)


@dataclass
class TableMeasurement:
    """The measurements of a table after a number of commits.

    Attributes:
        depth: The number of files that may contain a row with the customer and the item of a given row.
        opened_percent: The bytes of the files in the plan of a condition, in percent of the table, by the kind of the
            condition.
    """

    commits: int
    files: int
    median_bytes: float
    full_percent: float
    """The part of the table's bytes, in percent, that is in files of at least half the target size."""
    manifests: int
    metadata_bytes: int
    metadata_files: int
    snapshots: int
    depth: float = 0.0
    opened_percent: dict[str, float] = field(default_factory=dict)
    plan_ms: dict[str, list[float]] = field(default_factory=dict)
    pyiceberg_ms: float = 0.0


@dataclass
class Feed:
    """The rows that are appended to the table with table services and to the table without them.

    In the end the benchmark compares both tables with these rows.
    """

    rng: np.random.Generator
    batches: list[pa.Table] = field(default_factory=list)

    def append_batch(self) -> pa.Table:
        """Draw the next batch, keep it for the comparison, and return it."""
        first = ROWS * len(self.batches)
        # The square makes rows of customers with small numbers more frequent, so the values are not uniform.
        customers = (CUSTOMERS * self.rng.random(ROWS) ** 2).astype(np.int64)
        items = self.rng.integers(0, ITEMS, ROWS)
        prices = self.rng.integers(1, 1_000_000, ROWS) / 100
        notes = [f"order {number:024x}" for number in self.rng.integers(0, 1 << 60, ROWS).tolist()]
        self.batches.append(pa.table([np.arange(first, first + ROWS), customers, items, prices, notes], schema=_SCHEMA))
        return self.batches[-1]

    @property
    def rows(self) -> pa.Table:
        return pa.concat_tables(self.batches)

    def build_conditions(self) -> dict[str, str]:
        """Return the conditions by kind: for one row, for a customer with rows, and for two ranges."""
        batch = self.batches[int(self.rng.integers(len(self.batches)))]
        row = batch.slice(int(self.rng.integers(ROWS)), 1).to_pylist()[0]
        customer, item = row["customer"], row["item"]
        return {
            "row": f"customer = {customer} AND item = {item}",
            "point": f"customer = {customer}",
            "range": f"customer BETWEEN {customer} AND {customer + int(SHARE * CUSTOMERS)} AND "
            f"item BETWEEN {item} AND {item + int(SHARE * ITEMS)}",
        }


async def run(folder: Path, *, quick: bool = False) -> Report:
    """Append batches to a table with table services and to a table without them, and measure both at intervals."""
    commits, query_interval, plans = (
        (QUICK_COMMITS, QUICK_EVERY, QUICK_PLANS) if quick else (COMMITS, COMMITS_PER_MEASUREMENT, PLANS)
    )
    report = Report("writing_feed", "Does a server keep a table fast to read while many small commits fill it?")
    report.peer = "the same table without table services"
    measurements: dict[str, list[TableMeasurement]] = {name: [] for name in TABLES}
    # PyIceberg deletes old metadata files too, and warns of those that the server has deleted.
    logging.getLogger("pyiceberg").setLevel(logging.ERROR)
    feed = Feed(np.random.default_rng(1))
    with (
        Seamark(folder, env={"SEAMARK_LOG_LEVEL": "warning", "SEAMARK_SERVICES_WORKERS": "1"}) as server,
        closing(IndexClient(server.base_url)) as client,
    ):
        catalog = load_catalog("sea", type="rest", uri=server.base_url)
        create_namespace(client, "bench", {})
        for name, table in TABLES.items():
            _create_table(client, table, PROPERTIES if name == OURS else {})
        tables = {name: catalog.load_table(table) for name, table in TABLES.items()}
        append_s: dict[str, list[float]] = {name: [] for name in TABLES}
        failures: list[str] = []
        for number in range(1, commits + 1):
            began_s = time.perf_counter()
            batch = feed.append_batch()
            for name, table in tables.items():
                append_s[name].append(_measure_s(partial(_append_batch, table, batch, failures)))
            if number % query_interval == 0:
                _measure_tables(folder, client, catalog, feed, measurements, number, plans)
            elif not quick:
                time.sleep(max(0.0, PAUSE_S - (time.perf_counter() - began_s)))
        settled_s = _measure_s(lambda: _wait_until_clustered(client))
        _measure_tables(folder, client, catalog, feed, measurements, commits, plans)
        if failures:
            raise AnswersDiffer(f"{len(failures)} appends failed, the first: {failures[0]}")
        _check_rows(client, catalog, feed)
        runs = [run.summary for run in client.timeline(TABLES[OURS], action="maintenance")]
        fed_bytes = _sum_data_bytes(client, TABLES[WITHOUT_SERVICES])
    _fill_report(report, measurements, append_s)
    totals = [run["totals"] for run in runs if run.get("totals")]
    written_bytes = sum(total.get("bytes_after", 0) for total in totals)
    case = f"{commits} commits of {ROWS:,} rows"
    for measure, unit, value, goal in (
        ("bytes that services wrote, for each appended byte", "", written_bytes / fed_bytes, 5.0),
        ("failed commits", "", float(len(failures)), 0.0),
        ("failed jobs", "", float(sum("error" in run for run in runs)), 0.0),
        ("from the last commit until no file is left to cluster", "s", settled_s, None),
    ):
        report.rows.append(Row(case, measure, unit, {OURS: value}, peer=WITHOUT_SERVICES, goal=goal))
    _add_notes(report, measurements, runs, fed_bytes)
    return report


def _measure_s(work: Callable[[], object]) -> float:
    """Return the seconds that the work takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _create_table(client: IndexClient, table: str, properties: dict[str, str]) -> None:
    fields = [
        {"id": number, "name": name, "type": kind, "required": False} for number, (name, kind) in enumerate(_FIELDS, 1)
    ]
    schema = {"type": "struct", "schema-id": 0, "fields": fields}
    create_table(client, table, schema, properties={"format-version": "2", **properties})


def _append_batch(table: Any, batch: pa.Table, failures: list[str]) -> None:
    try:
        table.append(batch)
    except Exception as error:  # noqa: BLE001  a failed append is a result of this bench
        failures.append(f"{type(error).__name__}: {error}")


def _wait_until_clustered(client: IndexClient) -> None:
    """Wait until no service has files to cluster.

    Raises:
        TimeoutError: There are such files after SETTLED_S.
    """
    until_s = time.perf_counter() + SETTLED_S
    while any(problem["problem"] == "unclustered files" for problem in client.health(TABLES[OURS])["problems"]):
        if time.perf_counter() > until_s:
            raise TimeoutError(f"files of the table are not clustered after {SETTLED_S:.0f} s")
        time.sleep(0.5)


# The measurements


def _measure_tables(
    folder: Path,
    client: IndexClient,
    catalog: Catalog,
    feed: Feed,
    measurements_by_table: dict[str, list[TableMeasurement]],
    commits: int,
    plans: int,
) -> None:
    """Measure both tables, and compare their rows for the last range with the appended rows.

    Raises:
        AnswersDiffer: A table returns another number of rows.
    """
    measurements = {name: _measure_shape(folder, client, table, commits) for name, table in TABLES.items()}
    depths: dict[str, list[int]] = {name: [] for name in TABLES}
    opened_percents: dict[str, dict[str, list[float]]] = {name: {"point": [], "range": []} for name in TABLES}
    for round_number in range(plans):
        conditions = feed.build_conditions()
        for kind, condition in conditions.items():
            # The order alternates, so that the plan of no table always comes first.
            for name in list(TABLES)[:: 1 if round_number % 2 else -1]:
                tasks, total_bytes, seconds = _plan_as_reader(client, TABLES[name], condition)
                measurements[name].plan_ms.setdefault(kind, []).append(1000 * seconds)
                if kind == "row":
                    depths[name].append(len(tasks))
                else:
                    opened_percents[name][kind].append(100 * sum(task.size_bytes for task in tasks) / total_bytes)
    last_range = conditions["range"]
    counts = {name: scan(client, table, ["id"], last_range).to_arrow().num_rows for name, table in TABLES.items()}
    expected = _count_matches(feed.rows, last_range)
    if any(count != expected for count in counts.values()):
        raise AnswersDiffer(f"{expected:,} rows match {last_range}; the tables have {counts}")
    for name, measurement in measurements.items():
        table = catalog.load_table(TABLES[name])
        measurement.pyiceberg_ms = 1000 * _measure_s(lambda table=table: list(table.scan("customer = 7").plan_files()))
        measurement.depth = statistics.fmean(depths[name])
        measurement.opened_percent = {kind: statistics.fmean(shares) for kind, shares in opened_percents[name].items()}
        measurements_by_table[name].append(measurement)


def _measure_shape(folder: Path, client: IndexClient, table: str, commits: int) -> TableMeasurement:
    health = client.health(table)
    sizes = np.array(client.files(table)["file_size_in_bytes"].to_pylist())
    metadata = list((folder / "warehouse").glob(f"{table.replace('.', '/')}*/metadata/*.metadata.json"))
    return TableMeasurement(
        commits,
        health["files"],
        float(np.median(sizes)),
        100 * float(sizes[sizes >= TARGET_BYTES / 2].sum() / sizes.sum()),
        health["manifests"],
        health["metadata-size-in-bytes"],
        len(metadata),
        health["snapshots"],
    )


def _plan_as_reader(client: IndexClient, table: str, where: str) -> tuple[list[ScanTask], int, float]:
    """Plan a condition as a reader does, including the load of the table.

    Returns:
        The tasks, the bytes of the table, and the seconds.
    """
    began_s = time.perf_counter()
    opened_table = open_table(client, table, CURRENT)
    tasks = list(plan(client, opened_table, bind_filter(where, opened_table)))
    seconds = time.perf_counter() - began_s
    (snapshot,) = (item for item in opened_table.history if item.snapshot_id == opened_table.snapshot_id)
    return tasks, int(snapshot.build_summary_map()["total-files-size"]), seconds


def _sum_data_bytes(client: IndexClient, table: str) -> int:
    return sum(client.files(table)["file_size_in_bytes"].to_pylist())


def _count_matches(rows: pa.Table, where: str) -> int:
    """Count the rows that meet a condition of two ranges, with NumPy."""
    row_mask = np.ones(rows.num_rows, dtype=np.bool_)
    words = where.split()
    for place in (place for place, word in enumerate(words) if word == "BETWEEN"):
        values = rows[words[place - 1]].to_numpy()
        row_mask &= (values >= int(words[place + 1])) & (values <= int(words[place + 3]))
    return int(row_mask.sum())


def _check_rows(client: IndexClient, catalog: Catalog, feed: Feed) -> None:
    """Compare all rows of both tables, read by Seamark and by PyIceberg, with the appended rows."""
    expected = feed.rows
    for name, table in TABLES.items():
        for reader, rows in (
            ("ours", scan(client, table, _SCHEMA.names).to_arrow()),
            ("PyIceberg", catalog.load_table(table).scan().to_arrow()),
        ):
            if not rows.sort_by("id").cast(_SCHEMA).combine_chunks().equals(expected.combine_chunks()):
                raise AnswersDiffer(f"{reader} reads other rows of {name} than were appended: {rows.num_rows:,}")


# The report


def _fill_report(
    report: Report, measurements: dict[str, list[TableMeasurement]], append_s: dict[str, list[float]]
) -> None:
    """Add the rows of the report.

    The values during the commits come from all measurements except the last, which is made after the services have
    finished. The values in the end come from the last.
    """
    rounds_by_table = {name: rounds[:-1] for name, rounds in measurements.items()}
    fifth = max(1, len(rounds_by_table[OURS]) // 5)

    def add(case: str, measure: str, unit: str, values: dict[str, float], **options: Any) -> None:
        report.rows.append(Row(case, measure, unit, values, peer=WITHOUT_SERVICES, **options))

    shapes: dict[str, tuple[str, Callable[[TableMeasurement], float]]] = {
        "data files": ("", lambda measurement: measurement.files),
        # The depth is the average number of files that may contain a row.
        "depth": ("files", lambda measurement: measurement.depth),
        "manifests": ("", lambda measurement: measurement.manifests),
        "metadata file": ("kB", lambda measurement: measurement.metadata_bytes / 1000),
        "metadata files": ("", lambda measurement: measurement.metadata_files),
        "snapshots": ("", lambda measurement: measurement.snapshots),
    }
    middle = len(rounds_by_table[OURS]) // 2
    for measure, (unit, value) in shapes.items():
        first = max(map(value, rounds_by_table[OURS][:middle]))
        maximum = {name: max(map(value, rounds[middle:])) for name, rounds in rounds_by_table.items()}
        add("most in the second half of the commits", measure, unit, maximum, goal=GROWTH_RATIO_MAX * first)
    last_measurements = {name: rounds[-1] for name, rounds in measurements.items()}
    for measure, (unit, value) in shapes.items():
        add("in the end", measure, unit, {name: value(measurement) for name, measurement in last_measurements.items()})
    add(
        "in the end",
        "plan by PyIceberg alone",
        "ms",
        {name: measurement.pyiceberg_ms for name, measurement in last_measurements.items()},
    )
    full_percent = {name: measurement.full_percent for name, measurement in last_measurements.items()}
    add("in the end", "bytes in files of half the target size or more", "%", full_percent, lower_is_better=False)
    for kind in ("point", "range"):
        add(
            "in the end",
            f"bytes opened, {kind}",
            "%",
            {name: measurement.opened_percent[kind] for name, measurement in last_measurements.items()},
        )
    for kind in ("point", "range"):
        for measure, quantile in (("p50", 0.5), ("p99", 0.99)):
            took_ms = {name: _plan_ms(rounds[-fifth:], kind, quantile) for name, rounds in rounds_by_table.items()}
            add("last fifth of the commits", f"plan of a {kind}, {measure}", "ms", took_ms)
    for kind in ("point", "range"):
        # The first fifth is before the first jobs. Other work on the machine changes the p10 least.
        growth = {
            name: _plan_ms(rounds[-fifth:], kind, 0.1) / _plan_ms(rounds[fifth : 2 * fifth] or rounds[:1], kind, 0.1)
            for name, rounds in rounds_by_table.items()
        }
        add("last fifth compared with the second fifth", f"plan of a {kind}, p10", "×", growth, goal=GROWTH_RATIO_MAX)
    for measure, quantile in (("p50", 0.5), ("p99", 0.99)):
        took_ms = {name: 1000 * float(np.quantile(seconds, quantile)) for name, seconds in append_s.items()}
        add("all commits", f"append, {measure}", "ms", took_ms)


def _plan_ms(measurements: Iterable[TableMeasurement], kind: str, quantile: float) -> float:
    return float(np.quantile([took for measurement in measurements for took in measurement.plan_ms[kind]], quantile))


def _add_notes(
    report: Report, measurements: dict[str, list[TableMeasurement]], runs: list[dict[str, Any]], fed_bytes: int
) -> None:
    seamark_measurements = measurements[OURS]
    series: dict[str, Callable[[TableMeasurement], str]] = {
        "Data files": lambda measurement: f"{measurement.files}",
        "Depth": lambda measurement: f"{measurement.depth:.1f}",
        "Median file, in percent of the target": lambda measurement: (
            f"{100 * measurement.median_bytes / TARGET_BYTES:.0f}"
        ),
        "Percent of the bytes in files of half the target size or more": lambda measurement: (
            f"{measurement.full_percent:.0f}"
        ),
        "Manifests": lambda measurement: f"{measurement.manifests}",
        "Snapshots": lambda measurement: f"{measurement.snapshots}",
        "Metadata file in kB": lambda measurement: f"{measurement.metadata_bytes / 1000:.0f}",
        "Plan of a point, p50 in ms": lambda measurement: f"{statistics.median(measurement.plan_ms['point']):.1f}",
        "Plan of a range, p50 in ms": lambda measurement: f"{statistics.median(measurement.plan_ms['range']):.1f}",
        "Plan by PyIceberg alone in ms": lambda measurement: f"{measurement.pyiceberg_ms:.0f}",
    }
    report.notes += [
        f"The feed is {fed_bytes / 1e6:.1f} MB, the target size {TARGET_BYTES >> 20} MiB. A commit begins "
        f"{PAUSE_S} s after the one before. Snapshots expire after {MAX_AGE_MS // 1000} s. At least a minute passes "
        "between two rewrites.",
        "The depth is the number of files that a plan for the customer and the item of one row opens. The time of a "
        "plan includes the load of the table.",
        "The following numbers were measured after "
        f"{', '.join(str(measurement.commits) for measurement in seamark_measurements[:-1])} commits, and in the end.",
        *(f"{name}: {', '.join(map(show, seamark_measurements))}." for name, show in series.items()),
    ]
    for service in sorted({run["service"] for run in runs}):
        service_runs = [run for run in runs if run["service"] == service]
        written_bytes = sum(run.get("totals", {}).get("bytes_after", 0) for run in service_runs)
        seconds = sum(run["seconds"] for run in service_runs)
        report.notes.append(
            f"{service}: {len(service_runs)} runs, {seconds:.1f} s, {written_bytes / 1e6:.1f} MB of data written."
        )
