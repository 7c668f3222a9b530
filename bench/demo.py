"""`make demo`: real data through a real server into a real engine, and one table of what its queries cost.

Star Schema Benchmark data are made (once; kept in `.cache/ssb`), `seamark serve` starts on its embedded defaults, Spark
writes the five tables through it, the fact table is indexed, Spark asks the queries, and DuckDB, on the source files,
checks every answer: one wrong row fails the demo. What each query asks of the fact table is taken from Spark's plan and
explained by the server: files kept by minima and maxima, by bloom filters, by bitmaps.

Environment: `SCALE` (default 0.2, that is 1.2 million facts), `FILES` (of the fact table, default 200), `KEEP=1` leaves
the server up over `DEMO_HOME` (default `demo-home/`, emptied first) and prints how to connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from bench import connect
from bench.ssb.generate import TABLES, generate
from bench.ssb.queries import QUERIES, Oracle
from bench.ssb.spark import FACT, Answer, ask, files_in, write_table
from seamark.connector.client.engines import catalog_conf
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import Explanation
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.spark.session import iceberg_jars, open_session, session_conf
from tests.services.process import CACHE, REPO, ServiceFailed, free_port, http_ok, port_answers
from tests.services.seamark import Seamark

NAMESPACE = "ssb"
KEPT_PORT = 8181
NOTE = "kept.json"
INDEXES: dict[str, dict[str, Any]] = {
    "orderkey": {"kind": "bloom", "columns": ["lo_orderkey"], "fpp": 0.001},
    "discount": {"kind": "bitmap", "columns": ["lo_discount"]},
    "quantity": {"kind": "bitmap", "columns": ["lo_quantity"]},
    "supplier": {"kind": "bitmap", "columns": ["lo_suppkey"]},
}
"""On the fact table: all columns that a query below compares with a value, but the date, by which it is ordered."""


def own_queries(scale: float) -> dict[str, str]:
    """Beside the benchmark's queries, whose filters on the fact table come from joins, one for each way to leave out
    files: by minima and maxima, by a bloom filter, by bitmaps, where each value is in every file and both in few rows.
    """
    order = int(3_000_000 * scale) // 32 * 32 + 1  # in the middle of TPC-H's keys, of which there are 8 in 32
    return {
        "month": f"SELECT sum(lo_revenue) AS revenue FROM {FACT} WHERE lo_orderdate BETWEEN 19940101 AND 19940131",
        "order": f"SELECT lo_linenumber, lo_revenue FROM {FACT} WHERE lo_orderkey = {order}",
        "pair": f"SELECT sum(lo_revenue) AS revenue FROM {FACT} WHERE lo_suppkey = 1 AND lo_quantity = 50",
    }


class DemoFailed(Exception):
    """What went wrong, in a sentence for whoever ran the demo."""


@dataclass(frozen=True)
class Planned:
    """What the server planned, by its own count: scans, and milliseconds."""

    scans: int
    ms: float

    def since(self, before: Planned) -> Planned:
        return Planned(self.scans - before.scans, self.ms - before.ms)

    @staticmethod
    def read(url: str) -> Planned:
        with urlopen(f"{url}/metrics") as answer:
            lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith("seamark_plan")]
        counts = {line[0]: float(line[-1]) for line in lines}
        return Planned(int(counts["seamark_plans_total"]), counts["seamark_plan_seconds_total"] * 1000)


@dataclass(frozen=True)
class Kept:
    """Files of the fact table that are left after each way to leave some out, in this order."""

    min_max: int
    bloom: int
    bitmap: int

    @staticmethod
    def of(explained: Explanation) -> Kept:
        left = {stage.name: stage.files_left for stage in explained.stages}
        min_max = left["column_stats"]
        bloom = left.get("bloom", min_max)
        return Kept(min_max, bloom, left.get("bitmap_rows", left.get("bitmap", bloom)))


@dataclass(frozen=True)
class Asked:
    """One query: Spark's answer, what the server did for it, and why it kept which files."""

    name: str
    answer: Answer
    planned: Planned
    kept: Kept


@dataclass(frozen=True)
class Options:
    scale: float = 0.2
    fact_files: int = 200
    keep: bool = False
    home: Path = REPO / "demo-home"

    @staticmethod
    def read(env: os._Environ[str] | dict[str, str]) -> Options:
        try:
            scale, files = float(env.get("SCALE") or Options.scale), int(env.get("FILES") or Options.fact_files)
        except ValueError as error:
            raise DemoFailed(f"SCALE is a number and FILES a whole one ({error})") from None
        if not (0.001 <= scale <= 100 and 1 <= files <= 100_000):
            raise DemoFailed("SCALE must be within 0.001 and 100, FILES within 1 and 100000")
        keep = (env.get("KEEP") or "0") not in ("0", "no", "false")
        return Options(scale, files, keep, Path(env.get("DEMO_HOME") or Options.home))


def main() -> int:
    console = Console()
    try:
        run(Options.read(os.environ), console)
    except (DemoFailed, ServiceFailed, FileNotFoundError) as error:
        reason = str(error)
    except (Py4JError, PySparkException) as error:
        reason = "Spark: " + "\n".join(str(error).splitlines()[:6])
    else:
        return 0
    console.print("[bold red]The demo failed:[/]", Text(reason))
    return 1


def run(options: Options, console: Console) -> list[Asked]:
    """The whole demo; returns what was asked. Raises DemoFailed, and prints nothing false, when one is wrong."""
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with home(options) as folder, Progress(*columns, console=console) as progress:
        data = _generate(options, progress)
        steps = progress.add_task("starting Seamark", total=2)
        with Seamark(folder / "server", port=_port(options)) as server:
            progress.update(steps, completed=1, description="starting Spark")
            with session(server.base_url, folder) as spark:
                progress.update(steps, completed=2, description="Seamark and Spark")
                _write(spark, data, options, progress)
                with contextlib.closing(IndexClient(server.base_url)) as client:
                    _index(client, progress)
                    asked = _query(spark, data, options, progress, client)
                in_table = files_in(spark, f"{connect.CATALOG}.{NAMESPACE}.{FACT}")
            progress.stop()
            console.print(result_table(options, in_table, asked))
            _explain(asked, console)
            if options.keep:
                _keep(server, folder, console)
    return asked


def _explain(asked: list[Asked], console: Console) -> None:
    indexes = ", ".join(f"{one['kind']}({one['columns'][0]})" for one in INDEXES.values())
    console.print(
        f"Files are those of {FACT}, ordered by date, with the indexes {indexes}. Kept by: as the server explains what "
        "Spark asks of it; read: as Spark counts. Scans and milliseconds: the server's count, all tables of a query.\n"
        "The benchmark's queries choose facts by joins, of which Spark tells the planner nothing, or by discounts and "
        "quantities that every file holds in one row: no index can leave out a file there. The last three ask for a "
        "month, for an order by its key, and for what one supplier sold in quantities of 50.",
        highlight=False,
    )
    console.print(f"All {len(asked)} answers equal DuckDB's on the source data.", highlight=False)


@contextlib.contextmanager
def home(options: Options) -> Iterator[Path]:
    """Where the server lives: `options.home`, emptied, when it is to be kept, else a folder that goes with the demo."""
    if not options.keep:
        with tempfile.TemporaryDirectory(prefix="seamark-demo-") as folder:
            yield Path(folder)
        return
    note = options.home / NOTE
    kept = json.loads(note.read_text()) if note.exists() else None
    if kept and http_ok(f"{kept['url']}/readyz"):
        raise DemoFailed(f"the server of an earlier demo is up at {kept['url']}; end it with: kill {kept['pid']}")
    if options.home.exists() and not note.exists() and any(options.home.iterdir()):
        raise DemoFailed(f"{options.home} is not empty and not an earlier demo's: choose another DEMO_HOME")
    shutil.rmtree(options.home, ignore_errors=True)
    options.home.mkdir(parents=True)
    note.write_text("null")  # ours to empty, even if this demo does not come to its end
    yield options.home.absolute()


def _port(options: Options) -> int:
    return KEPT_PORT if options.keep and not port_answers(KEPT_PORT) else free_port()


@contextlib.contextmanager
def session(uri: str, folder: Path) -> Iterator[SparkSession]:
    """Spark with the server at `uri` as its catalog and `ssb` as its namespace. The JVM's chatter goes to spark.log."""
    conf = {
        **session_conf(iceberg_jars(CACHE / "jars")),
        **catalog_conf(connect.CATALOG, uri),
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
    }
    with _stderr_into(folder / "spark.log"):
        spark = open_session("seamark-demo", conf)
    try:
        spark.sql(f"CREATE NAMESPACE {connect.CATALOG}.{NAMESPACE}")
        spark.sql(f"USE {connect.CATALOG}.{NAMESPACE}")
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """Children started inside inherit `path` as their standard error, for as long as they live."""
    sys.stderr.flush()
    saved = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _generate(options: Options, progress: Progress) -> Path:
    task = progress.add_task("data", total=1)

    def show(step: str, done: int, total: int) -> None:
        progress.update(task, description=f"data: {step}", completed=done, total=total)

    folder = generate(CACHE / "ssb", options.scale, show)
    progress.update(task, description=f"data, scale {options.scale:g}", completed=1, total=1)
    return folder


def _write(spark: SparkSession, data: Path, options: Options, progress: Progress) -> None:
    for table in progress.track(TABLES, description="writing tables"):
        write_table(spark, data, table, f"{connect.CATALOG}.{NAMESPACE}.{table}", options.fact_files)


def _index(client: IndexClient, progress: Progress) -> None:
    table = f"{NAMESPACE}.{FACT}"
    for name, definition in progress.track(INDEXES.items(), description="building indexes"):
        client.put_index(table, name, **definition)
        report = build(client, table, name, InProcessWorkers())
        if report.files_not_indexed:
            raise DemoFailed(f"the index {name} lacks {report.files_not_indexed} files: {report.skipped[:3]}")


def _query(spark: SparkSession, data: Path, options: Options, progress: Progress, client: IndexClient) -> list[Asked]:
    ask(spark, f"SELECT count(*) FROM {FACT}")  # so that Q1.1 does not pay for the JVM's warming up
    asked: list[Asked] = []
    wrong = []
    with contextlib.closing(Oracle(data)) as oracle:
        queries = QUERIES | own_queries(options.scale)
        for name, sql in progress.track(queries.items(), description="asking queries"):
            before = Planned.read(client.url)
            answer = ask(spark, sql)
            planned = Planned.read(client.url).since(before)
            kept = Kept.of(client.explain(f"{NAMESPACE}.{FACT}", answer.pushed[FACT]))
            if difference := oracle.difference(sql, answer.rows):
                wrong.append(f"{name}: {difference}")
            asked.append(Asked(name, answer, planned, kept))
    if wrong:
        raise DemoFailed("wrong answers\n" + "\n".join(wrong))
    if not any(one.planned.scans for one in asked):
        raise DemoFailed("Spark planned by itself: the server saw no scan")
    return asked


def result_table(options: Options, in_table: int, asked: list[Asked]) -> Table:
    table = Table(
        title=f"Star Schema Benchmark, scale {options.scale:g}, Spark through Seamark: files kept by",
        show_footer=True,
    )
    columns = {
        "query": "all",
        "seconds": f"{sum(one.answer.seconds for one in asked):.2f}",
        "files": f"{in_table * len(asked):,}",
        "min/max": f"{sum(one.kept.min_max for one in asked):,}",
        "+ bloom": f"{sum(one.kept.bloom for one in asked):,}",
        "+ bitmap": f"{sum(one.kept.bitmap for one in asked):,}",
        "files read": f"{sum(one.answer.files_read[FACT] for one in asked):,}",
        "scans": f"{sum(one.planned.scans for one in asked):,}",
        "planned in ms": f"{sum(one.planned.ms for one in asked):.1f}",
        "rows": f"{sum(len(one.answer.rows) for one in asked):,}",
    }
    for name, total in columns.items():
        table.add_column(name, total, justify="left" if name == "query" else "right")
    for one in asked:
        files = (in_table, one.kept.min_max, one.kept.bloom, one.kept.bitmap, one.answer.files_read[FACT])
        table.add_row(
            one.name,
            f"{one.answer.seconds:.2f}",
            *(f"{count:,}" for count in (*files, one.planned.scans)),
            f"{one.planned.ms:.1f}",
            f"{len(one.answer.rows):,}",
        )
    return table


def _keep(server: Seamark, folder: Path, console: Console) -> None:
    (folder / NOTE).write_text(json.dumps({"pid": server.pid, "url": server.base_url}))
    server.leave_running()
    table = f"{NAMESPACE}.{FACT}"
    console.print(f"\nThe server stays up at [bold]{server.base_url}[/], its files in {folder}.")
    console.print(f"To end it: [bold]kill {server.pid}[/]", highlight=False)
    jars = iceberg_jars(CACHE / "jars")
    for engine, language, text in (
        ("Spark", "bash", connect.spark(server.base_url, jars, table)),
        ("PyIceberg", "python", connect.pyiceberg(server.base_url, table)),
        ("Trino, on this machine", "properties", connect.trino(server.base_url, table)),
        ("DuckDB", "sql", connect.duckdb(server.base_url, table)),
    ):
        console.rule(engine, align="left")
        console.print(Syntax(text, language, background_color="default"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
