"""Tests of failures while a statement runs: clients see Trino's answer or Trino's own error, as without the proxy."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
import trino.exceptions
from pyiceberg.catalog import load_catalog

from tests.deploy.shop import connect_to_trino, post_statement, query_rows, run_until_cancelled, wait_for_result
from tests.services.needs import NEEDS_TRINO
from tests.services.seamark import Seamark
from tests.services.trino import Trino, trino_server
from tests.services.trino_proxy import TrinoProxy, run_trino_proxy
from tests.support.trino_comparison import write_files

pytestmark = [*NEEDS_TRINO, pytest.mark.slow]
RUNNING_MAX = 2
LEASE_S = 4
ONE_ROW_QUERY = "SELECT note FROM orders WHERE id = 4711"
MANY_ROWS = (
    "SELECT id, x, rpad(note, 200, 'x') FROM orders CROSS JOIN UNNEST(sequence(1, 300)) t (x) WHERE orders.id < 3000"
)
"""More rows than coordinator and client can buffer, so that Trino reads most of them while the client fetches."""
LONG_QUERY = (
    f"SELECT count(*) FROM {', '.join(f'UNNEST(sequence(1, 10000)) t{number} (x{number})' for number in range(4))}"
)


@dataclass
class BreakableServers:
    """Servers that a test may stop. Trino uses the server `catalog`, and the proxy uses the server `planner`."""

    catalog: Seamark
    planner: Seamark
    trino: Trino
    proxy: TrinoProxy

    @property
    def ports(self) -> tuple[int, int]:
        return self.trino.port, self.proxy.port


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakableServers]:
    folder = tmp_path_factory.mktemp("faults")
    with Seamark(folder / "catalog") as catalog:
        database = f"sqlite:///{catalog.home / 'seamark.db'}"
        planner = Seamark(folder / "planner", warehouse=catalog.warehouse, database=database)
        properties = {"query.max-concurrent-queries": str(RUNNING_MAX)}
        create_orders(catalog, "shop")
        with (
            planner,
            trino_server(folder / "trino", uri=catalog.base_url, properties=properties) as coordinator,
            run_trino_proxy(
                folder / "proxy",
                *(
                    "--trino",
                    coordinator.base_url,
                    "--budget-ms",
                    "10000",
                    "--lease",
                    str(LEASE_S),
                    "--hold",
                    "2",
                    "--no-rules",
                ),
                seamark=planner.base_url,
            ) as proxy,
        ):
            yield BreakableServers(catalog, planner, coordinator, proxy)


def create_orders(seamark: Seamark, schema: str) -> None:
    """Create the table `orders` with forty files, which have separate ranges of ids."""
    catalog = load_catalog("seamark", type="rest", uri=seamark.base_url)
    catalog.create_namespace(schema)
    rows = pa.table({"id": range(10_000), "note": [f"n{number}" for number in range(10_000)]})
    write_files(catalog, f"{schema}.orders", rows, files=40)
    catalog.close()


def fetch_rows(port: int, sql: str, meanwhile: Callable[[], None], **options: Any) -> int | str:
    """Fetch the first rows of a statement, run `meanwhile`, and fetch the rest.

    Returns:
        The number of rows, the name of Trino's error, or the class of another error of the client.
    """
    connection = connect_to_trino(port, **options)
    try:
        cursor = connection.cursor()
        cursor.execute(sql)
        assert len(cursor.fetchmany(10)) == 10
        meanwhile()
        return 10 + len(cursor.fetchall())
    except trino.exceptions.TrinoQueryError as error:
        return str(error.error_name)
    except trino.exceptions.Error as error:
        return type(error).__name__
    finally:
        connection.close()


def do_nothing() -> None:
    pass


def test_statement_ends_as_without_the_proxy_when_the_planning_server_is_killed(
    lake: BreakableServers,
) -> None:
    def kill() -> None:
        lake.catalog.kill9()
        lake.planner.kill9()

    assert fetch_rows(lake.proxy.port, MANY_ROWS, do_nothing) == 900_000
    plan_header, first_page = post_statement(lake.proxy.port, MANY_ROWS)
    assert plan_header.startswith("rewritten")
    # Otherwise the statement runs until Trino abandons its client. Until then, it occupies a place for running
    # statements, and the next test cannot wait so long for this place.
    with urllib.request.urlopen(urllib.request.Request(first_page["nextUri"], method="DELETE"), timeout=60):
        pass
    row_counts = []
    for port in lake.ports:
        try:
            row_counts.append(fetch_rows(port, MANY_ROWS, kill))
        finally:
            lake.catalog.start()
            lake.planner.start()
    assert row_counts == [900_000, 900_000]


def test_catalog_outage_after_the_plan_gives_trinos_own_error(lake: BreakableServers) -> None:
    assert query_rows(lake.proxy.port, ONE_ROW_QUERY) == [["n4711"]]
    lake.catalog.kill9()
    try:
        error_names = []
        for port in lake.ports:
            with pytest.raises(trino.exceptions.TrinoQueryError) as error:
                query_rows(port, ONE_ROW_QUERY)
            assert "~plan~" not in error.value.message
            error_names.append(error.value.error_name)
        direct_error, proxied_error = error_names
        assert proxied_error == direct_error
    finally:
        lake.catalog.start()
    assert query_rows(lake.proxy.port, ONE_ROW_QUERY) == [["n4711"]]


def test_statement_may_wait_in_trinos_queue_longer_than_its_plans_lease(lake: BreakableServers) -> None:
    blocking_connections = [connect_to_trino(lake.trino.port) for _ in range(RUNNING_MAX)]
    cursors = [connection.cursor() for connection in blocking_connections]
    with ThreadPoolExecutor(RUNNING_MAX + 1) as threads:
        running_queries = [threads.submit(run_until_cancelled, cursor, LONG_QUERY) for cursor in cursors]
        try:
            wait_for_result(lambda: are_running(lake, cursors, running_queries), within_s=200)
            count_before = lake.proxy.count_statements("rewritten")
            queued_query = threads.submit(query_rows, lake.proxy.port, ONE_ROW_QUERY)
            wait_for_result(lambda: lake.proxy.count_statements("rewritten") > count_before, within_s=200)
            with pytest.raises(TimeoutError):
                queued_query.result(3 * LEASE_S)
        finally:
            for cursor in cursors:
                cursor.cancel()
        assert queued_query.result(120) == [["n4711"]]
        for query in running_queries:
            query.result(120)
    for connection in blocking_connections:
        connection.close()


def test_expired_plan_lease_does_not_fail_the_statement(lake: BreakableServers) -> None:
    """The test pauses Trino until the lease has expired."""
    lake.trino.process.send(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as threads:
            request = threads.submit(query_rows, lake.proxy.port, ONE_ROW_QUERY)
            with pytest.raises(TimeoutError):
                request.result(timeout=2 * LEASE_S)
            lake.trino.process.send(signal.SIGCONT)
            assert request.result(timeout=120) == [["n4711"]]
    finally:
        lake.trino.process.send(signal.SIGCONT)


def test_expired_snapshot_gives_trinos_own_error(lake: BreakableServers) -> None:
    expire = "ALTER TABLE orders EXECUTE expire_snapshots(retention_threshold => '0s')"
    session = {"seamark.expire_snapshots_min_retention": "0s"}
    outcomes: list[object] = []
    error_names: list[str] = []
    for schema, port in zip(("direct", "proxied"), lake.ports, strict=True):
        create_orders(lake.catalog, schema)
        query_rows(lake.trino.port, "DELETE FROM orders WHERE id = 1", schema=schema)
        *_, [past_snapshot_id], _ = query_rows(
            lake.trino.port, 'SELECT snapshot_id FROM "orders$snapshots" ORDER BY committed_at', schema=schema
        )
        request = MANY_ROWS.replace("FROM orders", f"FROM orders FOR VERSION AS OF {past_snapshot_id}")

        def expire_past_snapshot(schema: str = schema) -> None:
            query_rows(lake.trino.port, "UPDATE orders SET note = 'new' WHERE id < 5000", schema=schema)
            query_rows(lake.trino.port, expire, schema=schema, session_properties=session)

        outcomes.append(fetch_rows(port, request, expire_past_snapshot, schema=schema))
        error_names.append(read_error_name(port, request, schema))
    direct_error, proxied_error = error_names
    assert proxied_error == direct_error
    assert set(outcomes) <= {900_000, "ICEBERG_CANNOT_OPEN_SPLIT", "ICEBERG_FILESYSTEM_ERROR"}


def read_error_name(port: int, sql: str, schema: str) -> str:
    with pytest.raises(trino.exceptions.TrinoQueryError) as error:
        query_rows(port, sql, schema=schema)
    return str(error.value.error_name)


def test_clients_see_the_restart_of_a_killed_coordinator(lake: BreakableServers) -> None:
    def restart() -> None:
        lake.trino.process.stop(first=signal.SIGKILL)
        lake.trino.start()

    assert fetch_rows(lake.proxy.port, MANY_ROWS, restart) == fetch_rows(lake.trino.port, MANY_ROWS, restart)
    assert query_rows(lake.proxy.port, ONE_ROW_QUERY) == [["n4711"]]
    lake.trino.process.stop(first=signal.SIGKILL)
    try:
        with pytest.raises(trino.exceptions.Http502Error):
            query_rows(lake.proxy.port, ONE_ROW_QUERY)
    finally:
        lake.trino.start()
    assert query_rows(lake.proxy.port, ONE_ROW_QUERY) == [["n4711"]]


def are_running(lake: BreakableServers, cursors: Sequence[Any], statements: Sequence[Future[None]]) -> bool:
    """Return whether all statements are running. A statement that has ended fails the test, with its error if any."""
    for statement in statements:
        if statement.done():
            statement.result()
            pytest.fail("a statement has ended before it was cancelled")
    return all(read_query_state(lake, cursor.query_id) == "RUNNING" for cursor in cursors)


def read_query_state(lake: BreakableServers, query_id: str | None) -> str:
    """Return the state of a query from Trino's web interface, or the HTTP status of an error.

    A SQL statement for the state would wait in the queue, and Trino knows a query only after its client's first
    request.
    """
    request = urllib.request.Request(f"{lake.trino.base_url}/v1/query/{query_id}", headers={"X-Trino-User": "tests"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["state"])
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
