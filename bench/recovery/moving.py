"""How fast does `seamark import` register the tables of another catalog, on the local disk?

The other catalog is a Seamark server with tables of 20 columns, or the folder of its warehouse without a server. The
time is that of the whole command, including its start. The peer is a loop over `load_table` and `register_table` of
PyIceberg, which registers the first tables of the catalog in another server. `seamark rebuild` registers the same
tables without a request for each of them, so its rate is a bound for that of an import.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pyiceberg.catalog import Catalog, load_catalog

from bench.report import OURS, Report, Row
from tests.recovery.many_tables import write_tables
from tests.services.command import run_seamark
from tests.services.seamark import Seamark

TABLES, PEER_TABLES = 10_000, 1_000
GOAL_TABLES_PER_S = 500.0
PEER = "pyiceberg"
_TIMEOUT_S = 600.0


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("recovery_import", f"How fast are {TABLES:,} tables of another catalog imported?")
    count = 100 if quick else TABLES
    home = folder / "origin"
    write_tables(home / "warehouse", count)
    rebuild_s = _measure_s(lambda: _rebuild(home))
    report.rows.append(
        Row(
            "seamark rebuild, of the other catalog",
            "rate",
            "tables/s",
            {OURS: count / rebuild_s},
            lower_is_better=False,
        )
    )
    server_env = {"SEAMARK_ALLOWED_LOCATIONS": (home / "warehouse").as_uri()}
    with (
        Seamark(home) as origin,
        Seamark(folder / "target", env=server_env) as target,
        Seamark(folder / "peer", env=server_env) as peer,
        Seamark(folder / "hadoop", env=server_env) as hadoop,
    ):
        source, destination = (load_catalog("peer", type="rest", uri=server.base_url) for server in (origin, peer))
        peer_count = min(count, PEER_TABLES)
        peer_rate = peer_count / _measure_s(lambda: _register_tables(source, destination, peer_count))
        cases: tuple[tuple[str, Callable[[], None]], ...] = (
            (
                "from a REST catalog",
                lambda: _import(origin.base_url, target, f"{count:,} tables and views imported"),
            ),
            (
                "the same again, which changes nothing",
                lambda: _import(origin.base_url, target, f"{count:,} unchanged"),
            ),
            (
                "from the folder, without a server",
                lambda: _import(str(home / "warehouse"), hadoop, f"{count:,} tables and views imported"),
            ),
        )
        for case, work in cases:
            rates = {OURS: count / _measure_s(work), PEER: peer_rate}
            goal = None if quick else GOAL_TABLES_PER_S
            report.rows.append(Row(case, "rate", "tables/s", rates, lower_is_better=False, peer=PEER, goal=goal))
    return report


def _rebuild(home: Path) -> None:
    result = run_seamark("rebuild", "--home", str(home), timeout_s=_TIMEOUT_S)
    assert result.returncode == 0, result.stderr


def _measure_s(work: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def _import(source: str, target: Seamark, expected: str) -> None:
    result = run_seamark("import", source, "--url", target.base_url, timeout_s=_TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout, result.stdout


def _register_tables(source: Catalog, target: Catalog, count: int) -> None:
    """Register the first tables of a catalog in another catalog."""
    for namespace in source.list_namespaces():
        target.create_namespace(namespace)
        for identifier in source.list_tables(namespace):
            target.register_table(identifier, source.load_table(identifier).metadata_location)
            count -= 1
            if not count:
                return
