"""`make demo`: real data through a real server into a real engine, and one table of what the 13 queries cost.

Star Schema Benchmark data are made (once; kept in `.cache/ssb`), `seamark serve` starts on its embedded defaults, Spark
writes the five tables through it and asks the queries, and DuckDB, on the source files, checks every answer: one wrong
row fails the demo. Environment: `SCALE` (default 0.2, that is 1.2 million facts), `FILES` (of the fact table, default
200), `KEEP=1` leaves the server up over `DEMO_HOME` (default `demo-home/`, emptied first) and prints how to connect.
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
from connector.spark.session import catalog_conf, iceberg_jars, open_session, session_conf
from tests.services.process import CACHE, REPO, ServiceFailed, free_port, http_ok, port_answers
from tests.services.seamark import Seamark

NAMESPACE = "ssb"
KEPT_PORT = 8181
NOTE = "kept.json"
ONE_MONTH = {
    "month": f"SELECT sum(lo_revenue) AS revenue FROM {FACT} WHERE lo_orderdate BETWEEN 19940101 AND 19940131",
}
"""Beside the benchmark's queries, whose filters on the fact table come from joins, one that statistics can prune."""


class DemoFailed(Exception):
    """What went wrong, in a sentence for whoever ran the demo."""


@dataclass(frozen=True)
class Planned:
    """What the server planned, by its own count: scans, files it left of how many, and milliseconds."""

    scans: int
    considered: int
    kept: int
    ms: float

    def since(self, before: Planned) -> Planned:
        return Planned(
            self.scans - before.scans,
            self.considered - before.considered,
            self.kept - before.kept,
            self.ms - before.ms,
        )

    @staticmethod
    def read(url: str) -> Planned:
        with urlopen(f"{url}/metrics") as answer:
            lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith("seamark_plan")]
        counts = {line[0]: float(line[-1]) for line in lines}
        return Planned(
            int(counts["seamark_plans_total"]),
            int(counts["seamark_plan_files_considered_total"]),
            int(counts["seamark_plan_files_kept_total"]),
            counts["seamark_plan_seconds_total"] * 1000,
        )


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


def run(options: Options, console: Console) -> list[tuple[str, Answer]]:
    """The whole demo; returns each query's answer. Raises DemoFailed, and prints nothing false, when one is wrong."""
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with home(options) as folder, Progress(*columns, console=console) as progress:
        data = _generate(options, progress)
        steps = progress.add_task("starting Seamark", total=2)
        with Seamark(folder / "server", port=_port(options)) as server:
            progress.update(steps, completed=1, description="starting Spark")
            with session(server.base_url, folder) as spark:
                progress.update(steps, completed=2, description="Seamark and Spark")
                _write(spark, data, options, progress)
                answers, planned = _query(spark, data, progress, server.base_url)
                in_table = files_in(spark, f"{connect.CATALOG}.{NAMESPACE}.{FACT}")
            progress.stop()
            console.print(result_table(options, in_table, answers, planned))
            console.print(
                f"Files in table and files read are those of {FACT}, which is ordered by date; scans, files and "
                "milliseconds planned are the server's own count, over all tables of a query.",
                highlight=False,
            )
            console.print(f"All {len(answers)} answers equal DuckDB's on the source data.", highlight=False)
            if options.keep:
                _keep(server, folder, console)
    return answers


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


def _query(
    spark: SparkSession, data: Path, progress: Progress, url: str
) -> tuple[list[tuple[str, Answer]], list[Planned]]:
    ask(spark, f"SELECT count(*) FROM {FACT}")  # so that Q1.1 does not pay for the JVM's warming up
    answers, planned, wrong = [], [], []
    with contextlib.closing(Oracle(data)) as oracle:
        for name, sql in progress.track((QUERIES | ONE_MONTH).items(), description="asking queries"):
            before = Planned.read(url)
            answer = ask(spark, sql)
            planned.append(Planned.read(url).since(before))
            if difference := oracle.difference(sql, answer.rows):
                wrong.append(f"{name}: {difference}")
            answers.append((name, answer))
    if wrong:
        raise DemoFailed("wrong answers\n" + "\n".join(wrong))
    if not any(one.scans for one in planned):
        raise DemoFailed("Spark planned by itself: the server saw no scan")
    return answers, planned


def result_table(options: Options, in_table: int, answers: list[tuple[str, Answer]], planned: list[Planned]) -> Table:
    table = Table(
        title=f"Star Schema Benchmark, scale {options.scale:g}, Spark through Seamark",
        show_footer=True,
    )
    read = [answer.files_read[FACT] for _, answer in answers]
    columns = {
        "query": "all",
        "seconds": f"{sum(answer.seconds for _, answer in answers):.2f}",
        "files in table": f"{in_table * len(answers):,}",
        "files read": f"{sum(read):,}",
        "scans planned": f"{sum(one.scans for one in planned):,}",
        "files planned": f"{sum(one.kept for one in planned):,} of {sum(one.considered for one in planned):,}",
        "planned in ms": f"{sum(one.ms for one in planned):.1f}",
        "rows": f"{sum(len(answer.rows) for _, answer in answers):,}",
    }
    for name, total in columns.items():
        table.add_column(name, total, justify="left" if name == "query" else "right")
    for (name, answer), files, one in zip(answers, read, planned, strict=True):
        table.add_row(
            name,
            f"{answer.seconds:.2f}",
            f"{in_table:,}",
            f"{files:,}",
            f"{one.scans:,}",
            f"{one.kept:,} of {one.considered:,}",
            f"{one.ms:.1f}",
            f"{len(answer.rows):,}",
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
