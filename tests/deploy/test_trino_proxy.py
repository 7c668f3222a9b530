"""Tests of Trino's clients through the proxy: equal rows from fewer files, even with failures."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trino.dbapi
from pyiceberg.catalog import load_catalog

from tests.deploy.shop import (
    FILES,
    ROWS,
    Shop,
    connect_to_trino,
    count_splits,
    explain_with_plan_tables,
    post_statement,
    query_rows,
    run_both_ways,
    run_until_cancelled,
    wait_for_result,
)
from tests.services.needs import NEEDS_TRINO
from tests.services.trino_proxy import run_trino_proxy

pytestmark = NEEDS_TRINO


# The protocol


def test_rows_are_equal_and_pages_have_addresses_of_the_proxy(shop: Shop) -> None:
    assert run_both_ways(shop, "SELECT 1") == [[1]]
    plan_header, first_page = post_statement(shop.proxy.port, "SELECT 1")
    assert plan_header == "unchanged; the statement has no condition that can prune files"
    assert first_page["nextUri"].startswith(f"{shop.proxy.url}/v1/statement/")
    assert first_page["infoUri"].startswith(f"{shop.proxy.url}/ui")
    # The only node has the version 483 of Trino.
    assert query_rows(shop.proxy.port, "SELECT node_version FROM system.runtime.nodes", catalog="system") == [["483"]]


@pytest.mark.slow
def test_large_results_are_complete(shop: Shop) -> None:
    number_tables = "UNNEST(sequence(1, 100)) t (x), UNNEST(sequence(1, 1000)) s (x)"
    assert (
        len(run_both_ways(shop, f"SELECT s.x * 1000 + t.x AS n, rpad('', 100, 'x') FROM {number_tables} ORDER BY n"))
        == 100_000
    )


def test_client_that_cancels_ends_its_statement(shop: Shop) -> None:
    number_tables = ", ".join(f"UNNEST(sequence(1, 10000)) t{number} (x{number})" for number in range(4))
    connection = connect_to_trino(shop.proxy.port)
    cursor = connection.cursor()
    thread = threading.Thread(target=run_until_cancelled, args=(cursor, f"SELECT count(*) FROM {number_tables}"))
    thread.start()
    query_id = wait_for_result(lambda: cursor.query_id)
    wait_for_result(lambda: _read_query_state(shop, query_id) == "RUNNING")
    cursor.cancel()
    thread.join(60)
    assert wait_for_result(lambda: _read_query_state(shop, query_id) == "FAILED")
    connection.close()


def _read_query_state(shop: Shop, query_id: str) -> str:
    sql = f"SELECT state FROM system.runtime.queries WHERE query_id = '{query_id}'"
    return "".join(row[0] for row in query_rows(shop.trino.port, sql))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("legacy", [False, True])
def test_parameters_are_bound_and_used_in_plans(shop: Shop, legacy: bool) -> None:
    options = {"legacy_prepared_statements": legacy}
    sql = "SELECT id, note FROM orders WHERE id = ? AND note <> ?"
    assert run_both_ways(shop, sql, (4711, "it's"), **options) == [[4711, "n4711"]]
    count_before = shop.proxy.count_statements("rewritten")
    query_rows(shop.proxy.port, sql, (4712, "it's"), **options)
    assert shop.proxy.count_statements("rewritten") == count_before + 1


@pytest.mark.slow
def test_session_belongs_to_the_client(shop: Shop) -> None:
    connection = connect_to_trino(shop.proxy.port, schema=None, session_properties={"query_max_run_time": "7m"})
    cursor = connection.cursor()
    ((_, value, *_),) = cursor.execute("SHOW SESSION LIKE 'query_max_run_time'").fetchall()
    assert value == "7m"
    cursor.execute("USE seamark.shop").fetchall()
    assert cursor.execute("SELECT note FROM orders WHERE id = 42").fetchall() == [["n42"]]
    cursor.execute("SET SESSION query_max_run_time = '8m'").fetchall()
    ((_, new_value, *_),) = cursor.execute("SHOW SESSION LIKE 'query_max_run_time'").fetchall()
    assert new_value == "8m"
    cursor.execute("PREPARE p FROM SELECT note FROM orders WHERE id = ?").fetchall()
    assert cursor.execute("EXECUTE p USING 43").fetchall() == [["n43"]]
    connection.close()


def test_statements_of_transactions_pass_the_proxy_unchanged(shop: Shop) -> None:
    level = trino.dbapi.IsolationLevel.READ_COMMITTED  # type: ignore[attr-defined]
    connection = connect_to_trino(shop.proxy.port, isolation_level=level)
    count_before = shop.proxy.count_statements("rewritten")
    assert connection.cursor().execute("SELECT note FROM orders WHERE id = 42").fetchall() == [["n42"]]
    connection.commit()
    connection.close()
    assert shop.proxy.count_statements("rewritten") == count_before


# The purpose of the proxy


def test_statement_reads_only_the_files_that_it_needs(shop: Shop) -> None:
    sql = "SELECT id, country, note FROM orders WHERE id = 4711"
    assert run_both_ways(shop, sql) == [[4711, "DE", "n4711"]]
    plan_header, _ = post_statement(shop.proxy.port, sql)
    assert plan_header.startswith(f"rewritten; scans=1; files=1/{FILES}; shop.orders=1/{FILES}; ms=")
    assert count_splits(shop.trino.port, sql) >= FILES
    assert count_splits(shop.proxy.port, sql) <= 3
    explained_text = explain_with_plan_tables(shop, f"EXPLAIN ANALYZE {sql}")
    assert f"Input: {ROWS} rows" in explained_text or "Input: 1 row" in explained_text


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM orders WHERE id = -5",
        'SELECT o.note, c.name FROM "Orders" o JOIN seamark.shop.countries c ON country = code WHERE o.id = 77',
        "WITH o AS (SELECT * FROM orders) SELECT (SELECT count(*) FROM orders), note FROM o WHERE id = 8",
        "SELECT * FROM orders /* where */ WHERE id = 9 -- and this",
        "SELECT o.id FROM countries LEFT JOIN orders o ON country = code AND id = 15 ORDER BY 1",
        "SELECT shop.orders.id FROM shop.orders WHERE id = 16",
        # tests/connector/analysis/ tests these forms without Trino too.
        *(
            pytest.param(statement, marks=pytest.mark.slow)
            for statement in (
                "SELECT * FROM orders WHERE id IN (5, 6, 7) ORDER BY id",
                "SELECT count(*), min(note) FROM orders WHERE id = 999999 OR id = 12",
                "SELECT a.id, b.id FROM orders a, orders b WHERE a.id = 10 AND b.id = 30 AND a.country <> b.note",
                "SELECT id FROM orders WHERE id = 3 UNION ALL SELECT id FROM orders WHERE id = 4 ORDER BY 1",
                'SELECT "$path" IS NOT NULL, id FROM orders WHERE id = 9',
                "SELECT orders.id FROM orders WHERE orders.id = 16",
            )
        ),
    ],
)
def test_rows_equal_those_of_the_original_statement(shop: Shop, sql: str) -> None:
    run_both_ways(shop, sql)


def test_commit_is_visible_to_the_next_statement_and_time_travel_is_stable(shop: Shop) -> None:
    port = shop.proxy.port
    query_rows(port, "CREATE TABLE fresh AS SELECT id, note FROM orders WHERE id < 100")
    snapshots = []
    for number in range(3):
        query_rows(port, f"INSERT INTO fresh VALUES (4711, 'number {number}')")
        assert query_rows(port, "SELECT count(*) FROM fresh WHERE id = 4711") == [[number + 1]]
        snapshots += query_rows(port, 'SELECT snapshot_id FROM "fresh$snapshots" ORDER BY committed_at DESC LIMIT 1')[0]
    query_rows(port, "UPDATE fresh SET note = 'x' WHERE id = 4711")
    assert query_rows(port, "SELECT DISTINCT note FROM fresh WHERE id = 4711") == [["x"]]
    query_rows(port, "DELETE FROM fresh WHERE id = 4711")
    assert query_rows(port, "SELECT count(*) FROM fresh WHERE id = 4711") == [[0]]
    query_rows(
        port, "MERGE INTO fresh USING orders o ON fresh.id = o.id WHEN MATCHED AND o.id = 3 THEN UPDATE SET note = 'm'"
    )
    assert run_both_ways(shop, "SELECT note FROM fresh WHERE id = 3") == [["m"]]
    for number, snapshot in enumerate(snapshots):
        sql = f"SELECT count(*) FROM fresh FOR VERSION AS OF {snapshot} WHERE id = 4711"
        assert run_both_ways(shop, sql) == [[number + 1]]
        assert post_statement(port, f"{sql} AND id > 4000")[0].startswith("rewritten")
    query_rows(port, "ALTER TABLE fresh RENAME COLUMN note TO id2")
    assert run_both_ways(shop, "SELECT id2 FROM fresh WHERE id = 3 AND id2 = 'm'") == [["m"]]
    query_rows(port, "DROP TABLE fresh")


@pytest.mark.slow
def test_time_travel_uses_the_column_names_of_its_time(shop: Shop) -> None:
    """Two columns have swapped their names since then: a plan with the current names would prune the wrong files."""
    port = shop.proxy.port
    query_rows(port, "CREATE TABLE past (a bigint, b bigint)")
    for number in range(4):
        query_rows(port, f"INSERT INTO past VALUES ({number}, {100 - number})")
    [[old_snapshot_id]] = query_rows(
        port, 'SELECT snapshot_id FROM "past$snapshots" ORDER BY committed_at DESC LIMIT 1'
    )
    for old_name, new_name in (("a", "c"), ("b", "a"), ("c", "b")):
        query_rows(port, f"ALTER TABLE past RENAME COLUMN {old_name} TO {new_name}")
    query_rows(port, "INSERT INTO past VALUES (2, 98)")
    for where, version_clause in (("a = 2", f" FOR VERSION AS OF {old_snapshot_id}"), ("a = 98", ""), ("b = 2", "")):
        sql = f"SELECT a, b FROM past{version_clause} WHERE {where} ORDER BY a"
        assert run_both_ways(shop, sql) != []
        assert post_statement(port, sql)[0].startswith("planned" if version_clause else "rewritten"), sql
    query_rows(port, "DROP TABLE past")


@pytest.mark.slow
def test_branch_and_tag_are_read_at_their_snapshots(shop: Shop) -> None:
    port = shop.proxy.port
    query_rows(port, "CREATE TABLE branched (id bigint, note varchar)")
    for number in range(4):
        query_rows(port, f"INSERT INTO branched VALUES ({number}, 'old')")
    catalog = load_catalog("seamark", type="rest", uri=shop.seamark.base_url)
    table = catalog.load_table("shop.branched")
    old_snapshot = table.current_snapshot()
    assert old_snapshot is not None
    with table.manage_snapshots() as refs:
        refs.create_tag(old_snapshot.snapshot_id, "v1").create_branch(old_snapshot.snapshot_id, "audit")
    query_rows(port, "INSERT INTO branched VALUES (2, 'new')")
    statements = {
        name: f"SELECT note FROM branched FOR VERSION AS OF '{name}' WHERE id = 2" for name in ("v1", "audit")
    }
    for sql in statements.values():
        assert run_both_ways(shop, sql) == [["old"]]
        assert post_statement(port, sql)[0].startswith("rewritten"), sql
    table.refresh()
    latest_snapshot = table.current_snapshot()
    assert latest_snapshot is not None
    with table.manage_snapshots() as refs:
        refs.remove_branch("audit")
    with table.manage_snapshots() as refs:
        refs.create_branch(latest_snapshot.snapshot_id, "audit")
    catalog.close()
    assert run_both_ways(shop, f"{statements['audit']} ORDER BY note") == [["new"], ["old"]]
    assert run_both_ways(shop, statements["v1"]) == [["old"]]
    query_rows(port, "DROP TABLE branched")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("headers", [{"X-Seamark": "off"}, {"X-Trino-Client-Tags": "a,seamark-off"}])
def test_client_can_disable_rewriting(shop: Shop, headers: dict[str, str]) -> None:
    plan_header, _ = post_statement(shop.proxy.port, "SELECT * FROM orders WHERE id = 1", **headers)
    assert plan_header.startswith("unchanged; ")


def test_errors_quote_the_statement_as_the_client_sent_it(shop: Shop) -> None:
    for sql in (
        "SELECT nothing FROM orders WHERE id = 1",
        "SELECT 1 / (id - 1) FROM orders WHERE id = 1",
        "SELECT FROM WHERE",
    ):
        messages = []
        for port in (shop.trino.port, shop.proxy.port):
            with pytest.raises(trino.exceptions.TrinoUserError) as error:
                query_rows(port, sql)
            messages.append((error.value.error_name, error.value.message))
        assert messages[0] == messages[1]


@pytest.mark.slow
def test_several_coordinators_have_separate_paths(shop: Shop, tmp_path: Path) -> None:
    """One Trino under two names is sufficient for the test."""
    urls = (shop.trino.base_url, shop.trino.base_url.replace("127.0.0.1", "localhost"))
    flags = [argument for url in urls for argument in ("--trino", url)]
    with run_trino_proxy(tmp_path, *flags, seamark=shop.planner.base_url) as proxy:
        next_uris = [post_statement(proxy.port, "SELECT 1")[1]["nextUri"] for _ in range(2)]
        prefixes = {uri.removeprefix(proxy.url).partition("/v1/")[0] for uri in next_uris}
        assert len(prefixes) == 2
        assert all(prefix.startswith("/seamark/c/") for prefix in prefixes)
        for _ in range(4):  # The coordinators get the statements alternately.
            assert query_rows(proxy.port, "SELECT note FROM orders WHERE id = 5") == [["n5"]]
        with urllib.request.urlopen(f"{proxy.url}{prefixes.pop()}/ui/login.html", timeout=60) as page:
            assert page.status == 200


# Failures


class _WrongPlanServer(BaseHTTPRequestHandler):
    """A server that returns the ids of plan snapshots that do not exist."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        sizes = {"files": 1, "bytes": 1, "considered-files": 9, "considered-bytes": 9}
        plan = {"name": None, "plan-snapshot-id": 1 << 40, "snapshot-id": 1, "expires-at-ms": 1}
        body = json.dumps({**plan, **sizes}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
def test_plan_that_is_gone_when_trino_reads_it_does_not_fail_the_statement(shop: Shop, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _WrongPlanServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with run_trino_proxy(
            tmp_path, "--trino", shop.trino.base_url, seamark=f"http://127.0.0.1:{server.server_port}"
        ) as proxy:
            plan_header, _ = post_statement(proxy.port, "SELECT note FROM orders WHERE id = 5")
            assert plan_header.startswith("original; ")
            assert query_rows(proxy.port, "SELECT note FROM orders WHERE id = 5") == [["n5"]]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_statements_run_despite_faults_of_the_planning_server(shop: Shop, tmp_path: Path) -> None:
    with run_trino_proxy(
        tmp_path, "--trino", shop.trino.base_url, "--budget-ms", "500", seamark=shop.planner.base_url
    ) as proxy:
        sql = "SELECT note FROM orders WHERE id = 5"
        assert query_rows(proxy.port, sql) == [["n5"]]
        planner = shop.planner
        os.kill(planner.pid, signal.SIGSTOP)
        try:
            for _ in range(8):
                assert query_rows(proxy.port, sql) == [["n5"]]
            wait_for_result(
                lambda: post_statement(proxy.port, sql)[0].startswith("unchanged; Seamark has failed recently")
            )
        finally:
            os.kill(planner.pid, signal.SIGCONT)
        planner.kill9()
        try:
            for _ in range(3):
                assert query_rows(proxy.port, sql) == [["n5"]]
        finally:
            planner.start()
        wait_for_result(lambda: post_statement(proxy.port, sql)[0].startswith("rewritten"))


def test_proxy_finishes_running_requests_when_it_is_ended(shop: Shop, tmp_path: Path) -> None:
    with run_trino_proxy(tmp_path, "--trino", shop.trino.base_url, seamark=shop.planner.base_url) as proxy:
        assert query_rows(proxy.port, "SELECT 1") == [[1]]
        assert proxy.process.stop() == 0
        assert "Trino is ready at" in proxy.process.log.read_text()
