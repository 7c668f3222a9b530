"""Run a campaign: `python -m tests.streams.chaos.run [--log files|kafka] [--minutes N] [--engines spark trino]`.

Servers, workers, the broker and readers are killed and paused at random. Servers are cut off by network namespaces, and
the disk of the log is filled. At the same time writers write, table services compact, and unmodified PyIceberg and the
chosen engines read. The program needs root on Linux. Trino reads from one server, because fresh snapshots belong to the
server that made them.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.seeds import first_seed
from tests.services.postgres import Postgres, postgres_server
from tests.services.spark import new_catalog, spark_session
from tests.services.trino import Trino, trino_server
from tests.streams.chaos.campaign import ChaosRig, open_temporary_rig, run_campaign
from tests.streams.chaos.readers import Scan

LOGS, ENGINES = ("files", "kafka"), ("spark", "trino")
_STATEMENTS = {"t": "SELECT producer, number FROM {}.db.t", "k": "SELECT id, value FROM {}.db.k"}


def main() -> None:
    """Run one campaign with the options of the command line, and print its outcome."""
    parser = argparse.ArgumentParser("tests.streams.chaos.run", description=__doc__)
    parser.add_argument("--log", choices=LOGS, default="files", help="the kind of log")
    parser.add_argument("--minutes", type=float, default=10.0, help="the minutes for which faults occur")
    parser.add_argument(
        "--engines", nargs="*", choices=ENGINES, default=[], help="engines that read during the campaign"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # PyIceberg leaves sockets to the garbage collector.
    seed = first_seed()
    database: AbstractContextManager[Postgres | None] = (
        postgres_server() if arguments.log == "kafka" else nullcontext(None)
    )
    with database as postgres, open_temporary_rig(arguments.log, postgres) as rig, ExitStack() as stack:
        scans = open_engines(rig, arguments.engines, stack)
        outcome = run_campaign(rig, seed, 60 * arguments.minutes, scans)
    print(f"log {arguments.log}, seed {seed}: {outcome.describe()}")
    print("at the end, every reader returned the model")


def open_engines(rig: ChaosRig, engines: Sequence[str], stack: ExitStack) -> dict[str, Scan]:
    """Start the engines. Return the function with which each engine reads, by name."""
    scans: dict[str, Scan] = {}
    if "spark" in engines:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seamark-chaos-spark-")))
        session = stack.enter_context(spark_session(folder))
        scans["spark"] = _SparkScan(session, {url: new_catalog(session, url) for url in rig.urls}).scan
    if "trino" in engines:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seamark-chaos-trino-")))
        headers = {"iceberg.rest-catalog.http-headers": "X-Seamark-Fresh:true"}
        scans["trino"] = _TrinoScan(stack.enter_context(trino_server(folder, uri=rig.urls[0], catalog=headers))).scan
    return scans


class _SparkScan:
    """Reads tables with unmodified Spark."""

    def __init__(self, session: SparkSession, catalogs: dict[str, str]) -> None:
        self._session = session
        self._catalogs = catalogs

    def scan(self, url: str, table: str) -> Counter[tuple[Any, ...]]:
        rows = self._session.sql(_STATEMENTS[table].format(self._catalogs[url])).collect()
        return Counter(tuple(row) for row in rows)


class _TrinoScan:
    """Reads tables with unmodified Trino, through the first server."""

    def __init__(self, trino: Trino) -> None:
        self._trino_server = trino

    def scan(self, url: str, table: str) -> Counter[tuple[Any, ...]]:
        return Counter(tuple(row) for row in self._trino_server.rows(_STATEMENTS[table].format("seamark")))


if __name__ == "__main__":
    main()
