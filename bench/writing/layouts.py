"""How many bytes do queries open after Seamark clusters a table, and after Iceberg's `rewrite_data_files`?

There are four sets of rows, each in several tables with the same files. Seamark's table service clusters one table
along its curve, in one process. Iceberg's Spark procedure clusters the others by a sort and by its z-order. The server
plans the same predicates on all tables by column statistics alone: points, ranges of one column, and ranges of two
columns. All tables must keep their rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.session import CATALOG, open_lake
from seamark.connector.client.catalog import create_namespace, create_table
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import change_table_properties
from seamark.connector.client.values import CURRENT
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.read.scans import bind_filter, scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append

ROWS, QUICK_ROWS = 2_000_000, 20_000
FILES = 100
PREDICATES = 90
SORT, ZORDER, OUR_ZORDER = "Iceberg, sort", "Iceberg, z-order", "seamark, z-order"
Rng = np.random.Generator


@dataclass(frozen=True)
class RowSet:
    """A set of rows. `columns` are the clustering columns, which predicates use."""

    name: str
    columns: tuple[str, ...]
    make: Callable[[Rng, int], dict[str, Any]]


def _draw_skewed(rng: Rng, rows: int) -> dict[str, Any]:
    return {
        "a": rng.zipf(1.3, rows).clip(max=1_000_000).astype(np.int64),
        "b": np.exp(rng.normal(0, 3, rows)),
        "c": (rng.pareto(1.0, rows) * 10).clip(max=1e9).astype(np.int64),
    }


def _draw_strings(rng: Rng, rows: int) -> dict[str, Any]:
    def build_paths(folder: str, numbers: Any) -> list[str]:
        return [f"https://shop.example.com/catalogue/{folder}/items/{number:07d}" for number in numbers.tolist()]

    return {
        "a": build_paths("garden", rng.integers(0, 100_000, rows)),
        "b": build_paths("kitchen", (100_000 * rng.random(rows) ** 3).astype(np.int64)),
    }


def _draw_correlated(rng: Rng, rows: int) -> dict[str, Any]:
    base_numbers = rng.integers(0, 1000, rows)
    return {
        "a": base_numbers,
        "b": base_numbers + rng.integers(1, 30, rows),
        "c": rng.integers(0, 500, rows),
        "d": rng.integers(0, 500, rows),
    }


ROW_SETS = (
    RowSet("uniform, 2 columns", ("a", "b"), lambda rng, n: {"a": rng.integers(0, 1 << 40, n), "b": rng.random(n)}),
    RowSet("skewed, 3 columns", ("a", "b", "c"), _draw_skewed),
    RowSet("strings with a long common prefix, 2 columns", ("a", "b"), _draw_strings),
    RowSet("correlated, 4 columns", ("a", "b", "c", "d"), _draw_correlated),
)
_TYPES = {pa.int64(): "long", pa.float64(): "double", pa.string(): "string"}


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("writing_layouts", "How many bytes do queries open after a clustering?")
    report.peer = "Iceberg's rewrite_data_files"
    rows = QUICK_ROWS if quick else ROWS
    with open_lake(folder) as new_lake:
        create_namespace(new_lake.client, "bench", {})
        for number, row_set in enumerate(ROW_SETS):
            _measure_layout(report, new_lake.client, new_lake.spark, row_set, f"bench.t{number}", rows)
    report.notes += [
        f"{rows:,} rows in about {FILES} files. Bytes of the planned files, the mean over {PREDICATES} predicates.",
        "Ours runs in one process without a JVM; Iceberg's in a warm local Spark session with 2 cores.",
    ]
    return report


def _measure_layout(
    report: Report, client: IndexClient, spark: SparkSession, row_set: RowSet, name: str, rows: int
) -> None:
    rng = np.random.default_rng(1)
    base_table = pa.table({**row_set.make(rng, rows), "payload": rng.integers(0, 1 << 62, rows)})
    predicates = [_draw_predicate(rng, base_table, row_set.columns) for _ in range(PREDICATES)]
    columns = ", ".join(row_set.columns)
    layouts: dict[str, Callable[[str], None]] = {
        OURS: lambda table: _cluster_table(client, table, columns, "hilbert"),
        OUR_ZORDER: lambda table: _cluster_table(client, table, columns, "zorder"),
        SORT: lambda table: _rewrite_with_iceberg(spark, table, columns),
        ZORDER: lambda table: _rewrite_with_iceberg(spark, table, f"zorder({columns})"),
    }
    readers, seconds = {}, {}
    for number, (layout, work) in enumerate(layouts.items()):
        table = f"{name}_{number}"
        _create_table(client, table, base_table)
        began_s = time.perf_counter()
        work(table)
        seconds[layout] = time.perf_counter() - began_s
        payloads = scan(client, table, ["payload"]).to_arrow()["payload"].to_numpy()
        if len(payloads) != rows or not np.array_equal(np.sort(payloads), np.sort(base_table["payload"].to_numpy())):
            raise AnswersDiffer(f"{layout} of {row_set.name} changed the rows")
        readers[layout] = _measure_planned_percent(client, table, predicates)
    for peer in (SORT, ZORDER):
        report.rows.append(
            Row(row_set.name, f"bytes opened, beside {peer}", "%", readers, peer=peer, goal=readers[peer])
        )
    report.rows.append(Row(row_set.name, f"seconds of the job, beside {SORT}", "s", seconds, peer=SORT))


def _create_table(client: IndexClient, table: str, rows: pa.Table) -> None:
    fields = [
        {"id": number, "name": field.name, "type": _TYPES[field.type], "required": False}
        for number, field in enumerate(rows.schema, 1)
    ]
    schema = {"type": "struct", "schema-id": 0, "fields": fields}
    create_table(client, table, schema, properties={"format-version": "2"})
    step = -(-rows.num_rows // FILES)
    for start in range(0, rows.num_rows, step):
        append(client, table, rows.slice(start, step))
    size_bytes = sum(client.files(table)["file_size_in_bytes"].to_pylist())
    change_table_properties(client, table, {"write.target-file-size-bytes": str(size_bytes // FILES)}, ())


def _cluster_table(client: IndexClient, table: str, columns: str, curve: str) -> None:
    """Cluster a table along a curve of columns by Seamark's job in this process."""
    properties = {"seamark.clustering.columns": columns, "seamark.clustering.curve": curve}
    # The service of the server must not cluster the table before the measurement begins.
    change_table_properties(client, table, {**properties, "seamark.clustering.enabled": "false"}, ())
    report = cluster_incrementally(client, table)
    if report.errors or not report.commits:
        raise AnswersDiffer(f"{table} is not clustered: {report}")


def _rewrite_with_iceberg(spark: SparkSession, table: str, order: str) -> None:
    spark.sql(
        f"CALL {CATALOG}.system.rewrite_data_files(table => '{table}', strategy => 'sort', sort_order => '{order}', "
        "options => map('rewrite-all', 'true'))"
    ).collect()


def _draw_predicate(rng: Rng, table: pa.Table, columns: Sequence[str]) -> str:
    """Return a condition: a point, a range of a hundredth of the rows, or two ranges of a twentieth."""
    kind = rng.integers(3)
    column_numbers = rng.choice(columns, 2 if kind == 2 else 1, replace=False)
    share = (0.0, 0.01, 0.05)[kind]
    return " AND ".join(_draw_range(rng, table, str(column), share) for column in column_numbers)


def _draw_range(rng: Rng, table: pa.Table, column: str, share: float) -> str:
    values = table[column].take(pa.array(rng.integers(0, table.num_rows, 10_000))).combine_chunks().sort()
    first = int(rng.integers(0, len(values) - int(share * len(values))))
    low, high = values[first].as_py(), values[first + int(share * (len(values) - 1))].as_py()
    return f"{column} BETWEEN {_format_literal(low)} AND {_format_literal(high)}"


def _format_literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else repr(value)


def _measure_planned_percent(client: IndexClient, table: str, predicates: Sequence[str]) -> float:
    """Return the mean percentage of the table's bytes that are in the planned files."""
    opened_table = open_table(client, table, CURRENT)
    total = sum(task.size_bytes for task in plan(client, opened_table))
    shares = [
        sum(task.size_bytes for task in plan(client, opened_table, bind_filter(predicate, opened_table))) / total
        for predicate in predicates
    ]
    return 100 * float(np.mean(shares))
