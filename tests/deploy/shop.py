"""Data for the proxy's tests: a shop with orders in files that only an index distinguishes."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import trino.dbapi
import trino.exceptions
from pyiceberg.catalog import load_catalog

from tests.services.command import run_seamark
from tests.services.seamark import Seamark
from tests.services.trino import CATALOG, Trino
from tests.services.trino_lake import TrinoLake
from tests.services.trino_proxy import TrinoProxy, run_trino_proxy

FILES = 20
ROWS = 500
"""The number of rows in each file."""


@dataclass
class Shop:
    """The processes of tests with the table `shop.orders`: Trino over a server, and a proxy with a second server.

    Both servers have the same database and tables. Tests may kill the second server, `planner`, which plans the
    statements of the proxy.
    """

    seamark: Seamark
    planner: Seamark
    trino: Trino
    proxy: TrinoProxy


@contextmanager
def open_shop(folder: Path, trino_lake: TrinoLake) -> Iterator[Shop]:
    """Open a shop with the table `shop.orders`.

    The table has twenty files with the same range of ids, and an index that finds the file of an id.
    """
    seamark, coordinator = trino_lake.seamark, trino_lake.trino
    create_orders(seamark)
    database = f"sqlite:///{seamark.home / 'seamark.db'}"
    with (
        Seamark(folder / "planner", warehouse=seamark.warehouse, database=database) as planner,
        run_trino_proxy(
            folder / "proxy",
            *("--trino", coordinator.base_url, "--budget-ms", "30000", "--no-rules"),
            seamark=planner.base_url,
        ) as proxy,
    ):
        yield Shop(seamark, planner, coordinator, proxy)


def create_orders(seamark: Seamark) -> None:
    catalog = load_catalog("seamark", type="rest", uri=seamark.base_url)
    catalog.create_namespace("shop")
    schema = pa.schema([("id", pa.int64()), ("country", pa.string()), ("note", pa.string())])
    orders = catalog.create_table("shop.orders", schema=schema)
    for file_number in range(FILES):
        ids = [file_number + FILES * number for number in range(ROWS)]
        rows = {
            "id": ids,
            "country": [("FR", "DE", "IT")[order_id % 3] for order_id in ids],
            "note": [f"n{order_id}" for order_id in ids],
        }
        orders.append(pa.table(rows, schema=schema))
    countries = pa.table({"code": ["FR", "DE", "IT"], "name": ["France", "Germany", "Italy"]})
    catalog.create_table("shop.countries", schema=countries.schema).append(countries)
    catalog.close()
    for arguments in (
        ["create", "shop.orders", "--kind", "bloom", "--columns", "id", "--fpp", "0.0001"],
        ["build", "shop.orders"],
    ):
        result = run_seamark("index", *arguments, "--url", seamark.base_url, timeout_s=120)
        assert result.returncode == 0, result.stderr


def connect_to_trino(port: int, **options: Any) -> Any:
    arguments = {
        "host": "127.0.0.1",
        "user": "tests",
        "catalog": CATALOG,
        "schema": "shop",
        "encoding": None,
        **options,
    }
    return trino.dbapi.connect(port=port, **arguments)  # type: ignore[no-untyped-call]


def query_rows(port: int, sql: str, parameters: Any = None, **options: Any) -> list[list[Any]]:
    connection = connect_to_trino(port, **options)
    try:
        rows: list[list[Any]] = connection.cursor().execute(sql, parameters).fetchall()
        return rows
    finally:
        connection.close()


def run_both_ways(shop: Shop, sql: str, parameters: Any = None, **options: Any) -> list[list[Any]]:
    """Run a statement through the proxy and without it, and return the rows, which must be equal."""
    direct_answer = query_rows(shop.trino.port, sql, parameters, **options)
    assert query_rows(shop.proxy.port, sql, parameters, **options) == direct_answer
    return direct_answer


def post_statement(port: int, sql: str, **headers: str) -> tuple[str, dict[str, Any]]:
    """Send a statement, and return its outcome in the proxy's header and the first page of the answer."""
    request_headers = {"X-Trino-User": "tests", "X-Trino-Catalog": "seamark", "X-Trino-Schema": "shop", **headers}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/statement", data=sql.encode(), headers=request_headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["X-Seamark-Plan"], json.load(answer)


def await_final_outcome(shop: Shop, sql: str, **headers: str) -> str:
    """Return the final outcome of a statement: rewritten, or not worth a plan.

    A slow Trino first reports `planned`. After failed statements, the proxy makes plans again only after a pause.
    """

    def read_outcome_if_final() -> str:
        plan_header, _ = post_statement(shop.proxy.port, sql, **headers)
        outcome = plan_header.partition("; ms=")[0]
        return "" if outcome == "planned" or "recently" in outcome else outcome

    return str(wait_for_result(read_outcome_if_final))


def is_planned(shop: Shop, explanation: str) -> bool:
    """Return whether a query plan of Trino reads `shop.orders` only from plans of Seamark."""
    with urllib.request.urlopen(f"{shop.seamark.base_url}/v1/namespaces/shop/tables/orders", timeout=60) as answer:
        snapshot_ids = {snapshot["snapshot-id"] for snapshot in json.load(answer)["metadata"]["snapshots"]}
    read_snapshots = {int(match) for match in re.findall(r"orders\$data@(\d+)", explanation)}
    return bool(read_snapshots) and snapshot_ids.isdisjoint(read_snapshots)


def explain_with_plan_tables(shop: Shop, sql: str, **options: Any) -> str:
    """Return the answer to an EXPLAIN statement that the proxy has rewritten.

    On a busy machine, a plan can exceed its time budget. Then Trino gets the original statement, and the proxy makes
    plans again only after a pause, so the statement is repeated.
    """

    def read_planned_explanation() -> str:
        explanation = str(query_rows(shop.proxy.port, sql, **options)[0][0])
        return explanation if is_planned(shop, explanation) else ""

    return str(wait_for_result(read_planned_explanation))


def count_splits(port: int, sql: str) -> int:
    connection = connect_to_trino(port)
    try:
        cursor = connection.cursor()
        cursor.execute(sql).fetchall()
        return int(cursor.stats["totalSplits"])
    finally:
        connection.close()


def run_until_cancelled(cursor: Any, sql: str) -> None:
    """Run a statement until another thread cancels it."""
    with contextlib.suppress(trino.exceptions.TrinoUserError):
        cursor.execute(sql)


def wait_for_result(read_result: Callable[[], Any], within_s: float = 60) -> Any:
    """Call `read_result` until its result is true, and return the result. The time is limited to `within_s`.

    The pauses between attempts grow, because a statement is expensive for Trino.
    """
    deadline_s, wait_s = time.monotonic() + within_s, 0.1
    while not (result := read_result()):
        assert time.monotonic() < deadline_s, f"the result was not true within {within_s} s"
        time.sleep(wait_s)
        wait_s = min(1.0, 1.5 * wait_s)
    return result
