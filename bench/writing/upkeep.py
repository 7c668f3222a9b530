"""How long do Seamark's jobs on files take, compared with Spark's procedures and Trino's statements on equal tables?

The jobs run one after the other. Each job has work to do only once, so it runs first on a small table, and this time is
not counted: the engines load classes and compile code in it. Afterwards the rows of all tables are the same, and no
engine has left a file that another engine removed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyspark.sql import SparkSession

from bench.report import OURS, AnswersDiffer
from bench.writing.starts import measure_compaction_processes
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.server_jobs import expire, remove_orphan_files
from seamark.connector.write.compaction import CompactionPolicy, compact
from tests.services.trino import Trino

IN_SPARK, IN_TRINO = "spark", "trino"
ORPHANS, ORPHAN_DAYS = 50, 30
_DAY_S = 86_400

Measured = dict[str, dict[str, float]]
"""The values by engine, by measure with its unit, such as "compaction (ms)"."""
Work = Callable[[str], object]
"""A job that runs on the table with the given name."""


def measure_upkeep(
    client: IndexClient,
    spark: SparkSession,
    trino: Trino,
    tables: Mapping[str, str],
    small_tables: Mapping[str, str],
    catalogs: tuple[str, str],
    *,
    url: str,
    folder: Path,
) -> Measured:
    """Measure all jobs.

    Args:
        tables: The table of each engine.
        small_tables: The small table of each engine, on which each job runs first.
        catalogs: The catalogs of Spark and Trino.
        url: The URL of the server.
        folder: The folder for files of new processes.
    """
    spark_catalog, trino_catalog = catalogs
    measured: Measured = {}

    def build_call(procedure: str, arguments: str = "") -> Work:
        return lambda table: spark.sql(
            f"CALL {spark_catalog}.system.{procedure}(table => '{table}'{arguments})"
        ).collect()

    compactions: dict[str, Work] = {
        OURS: lambda table: compact(client, table, policy=CompactionPolicy(min_files=2)),
        IN_SPARK: build_call("rewrite_data_files", ", options => map('min-input-files', '2')"),
        IN_TRINO: lambda table: trino.rows(f"ALTER TABLE {table} EXECUTE optimize", catalog=trino_catalog),
    }
    two_tables = {name: tables[name] for name in (OURS, IN_SPARK)}
    snapshot_ids = {
        name: int(json.loads(client.load_table(table).metadata)["current-snapshot-id"])
        for name, table in two_tables.items()
    }
    measured["compaction (ms)"] = _measure_once(compactions, tables, small_tables)
    measured["data files after it (files)"] = files = _measure_tables(
        tables, lambda table: _measure_files(client, table)[0]
    )
    measured["size of the data files (bytes)"] = _measure_tables(tables, lambda table: _measure_files(client, table)[1])
    measured["compaction with the start of its process (ms)"] = measure_compaction_processes(
        url, spark, two_tables, snapshot_ids, folder
    )
    for name, table in two_tables.items():
        if _measure_files(client, table)[0] != files[name]:
            raise AnswersDiffer(
                f"a process of {name} leaves {_measure_files(client, table)[0]} data files, not {files[name]:g}"
            )
    expirations: dict[str, Work] = {
        OURS: lambda table: expire(client, table, older_than_ms=1 << 45, retain_last=1),
        IN_SPARK: build_call("expire_snapshots", ", older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1"),
    }
    measured["expiration of snapshots (ms)"] = _measure_once(expirations, two_tables, small_tables)
    for table in (*two_tables.values(), *(small_tables[name] for name in two_tables)):
        _put_orphans(_find_folder(client, table))
    measured["bytes on storage after it (bytes)"] = _measure_tables(
        two_tables, lambda table: _measure_stored_bytes(_find_folder(client, table))
    )
    removals: dict[str, Work] = {
        OURS: lambda table: remove_orphan_files(client, table),
        IN_SPARK: build_call("remove_orphan_files"),
    }
    measured["removal of orphan files (ms)"] = _measure_once(removals, two_tables, small_tables)
    for name, table in two_tables.items():
        if paths := list(_find_folder(client, table).rglob("orphan-*")):
            raise AnswersDiffer(f"{name} leaves {len(paths)} of {ORPHANS} orphan files")
    counts = {name: spark.table(f"{spark_catalog}.{table}").count() for name, table in tables.items()}
    if len(set(counts.values())) > 1:
        raise AnswersDiffer(f"the tables have different numbers of rows: {counts}")
    return measured


def _measure_once(
    operations: Mapping[str, Work], tables: Mapping[str, str], small_tables: Mapping[str, str]
) -> dict[str, float]:
    """Return the milliseconds of one run of each operation, after a run on a small table."""
    results = {}
    for name, work in operations.items():
        work(small_tables[name])
        began_s = time.perf_counter()
        work(tables[name])
        results[name] = 1000 * (time.perf_counter() - began_s)
    return results


def _measure_tables(tables: Mapping[str, str], value: Callable[[str], int]) -> dict[str, float]:
    return {name: float(value(table)) for name, table in tables.items()}


def _measure_files(client: IndexClient, table: str) -> tuple[int, int]:
    """Return the number and the total bytes of the live data files."""
    files = client.files(table, content="data")
    return files.num_rows, sum(files["file_size_in_bytes"].to_pylist())


def _find_folder(client: IndexClient, table: str) -> Path:
    location = json.loads(client.load_table(table).metadata)["location"]
    return Path(unquote(urlsplit(location).path))


def _measure_stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "orphan-" not in path.name)


def _put_orphans(folder: Path) -> None:
    """Write old files that no snapshot names, like those of a writer that failed before its commit."""
    old_s = time.time() - ORPHAN_DAYS * _DAY_S
    for number in range(ORPHANS):
        path = folder / "data" / f"orphan-{number}.parquet"
        path.write_bytes(b"PAR1")
        os.utime(path, (old_s, old_s))
