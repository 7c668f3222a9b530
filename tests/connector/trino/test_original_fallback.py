"""Tests that the proxy runs the original of a rewritten statement that fails before its first row.

The client sees no failure.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from seamark.connector.trino.protocol.accepted_logins import LOGIN_PATH
from seamark.connector.trino.protocol.circuit_breaker import FAILURES_MAX
from tests.connector.trino.protocol import (
    END,
    PLAN_ID,
    PLANNING_PAGE,
    QUEUED_PAGE,
    ROWS,
    Page,
    ScriptedTrino,
    build_failure_page,
    build_rules,
    build_table,
    run_fake_seamark,
    run_fake_trino,
)
from tests.connector.trino.rig import ProxyRig, run_proxy
from tests.waits import until

STATEMENT = "SELECT x FROM lake.db.t WHERE x = 1"
VERSION = f"FOR VERSION AS OF {PLAN_ID}"
ORIGINAL_ROWS: Page = {**ROWS, "data": [["the original's"]]}


def make_script(*pages: Page) -> Any:
    """Return a script in which the rewritten statement has `pages`, and each other statement has ORIGINAL_ROWS."""
    return lambda text: list(pages) if VERSION in text else [QUEUED_PAGE, ORIGINAL_ROWS, END]


@asynccontextmanager
async def run_scripted_trino(
    script: Any, *other_urls: str, **settings: Any
) -> AsyncIterator[tuple[ScriptedTrino, ProxyRig]]:
    """Yield a fake coordinator that answers by `script`, and a proxy that sends plan requests to a fake Seamark.

    `other_urls` are further coordinators of the proxy, and `settings` are settings of the proxy.
    """
    async with (
        run_fake_trino(script) as trino,
        run_fake_seamark() as seamark,
        run_proxy(trino.url, *other_urls, seamark=seamark.url, **{"plan_header": True, **settings}) as rig,
    ):
        yield trino, rig


async def fetch_result(rig: ProxyRig, statement: str = STATEMENT, **options: Any) -> tuple[list[Any], Any, str]:
    """Return the rows, the error and the plan header of a statement.

    Also check that no answer to a POST contains rows, because some clients require this.
    """
    _, headers, body = await rig.ask("POST", "/v1/statement", data=statement.encode(), **options)
    page = json.loads(body)
    assert "data" not in page
    rows: list[Any] = []
    while "nextUri" in page:
        assert page["nextUri"].startswith(rig.url)
        _, _, body = await rig.ask("GET", page["nextUri"].removeprefix(rig.url))
        page = json.loads(body)
        rows += page.get("data", [])
    return rows, page.get("error", {}).get("errorName"), headers["X-Seamark-Plan"]


def list_original_statements(trino: ScriptedTrino) -> list[str]:
    return [text for text in trino.requests if VERSION not in text]


async def test_client_gets_the_rows_of_the_rewritten_statement() -> None:
    async with run_scripted_trino(make_script(QUEUED_PAGE, PLANNING_PAGE, ROWS, ROWS, END)) as (trino, rig):
        rows, error, plan_header = await fetch_result(rig)
        assert (rows, error) == ([[1], [1]], None)
        assert plan_header.startswith("rewritten; scans=1; files=3/100; db.t=3/100; ms=")
        assert trino.requests == [f"SELECT x FROM lake.db.t {VERSION} WHERE x = 1"]
        # Of the pages that the proxy has read, the client requests only the last page again.
        assert trino.fetched_pages == [(0, 1), (0, 2), (0, 2), (0, 3), (0, 4)]


@pytest.mark.parametrize(
    "pages",
    [
        [build_failure_page("TABLE_NOT_FOUND", f"Iceberg snapshot ID does not exist: {PLAN_ID}")],
        [QUEUED_PAGE, build_failure_page("TABLE_NOT_FOUND")],
        [QUEUED_PAGE, PLANNING_PAGE, build_failure_page("PERMISSION_DENIED", "Cannot select from t")],
        [
            QUEUED_PAGE,
            {**END, "data": [], "stats": {"state": "RUNNING"}},
            build_failure_page("ICEBERG_CANNOT_OPEN_SPLIT", kind="EXTERNAL"),
        ],
        [QUEUED_PAGE, build_failure_page("SYNTAX_ERROR", "line 1:30: mismatched input")],
    ],
)
@pytest.mark.parametrize("has_several_coordinators", [False, True])
async def test_original_runs_if_the_rewritten_statement_fails(
    pages: list[Page], has_several_coordinators: bool
) -> None:
    async with (
        run_fake_trino(make_script(*pages)) as other_trino,
        run_scripted_trino(make_script(*pages), *[other_trino.url] * has_several_coordinators) as (trino, rig),
    ):
        rows, error, plan_header = await fetch_result(rig)
        assert (rows, error) == ([["the original's"]], None)
        name = pages[-1]["error"]["errorName"]
        assert plan_header == ("planned" if name == "PERMISSION_DENIED" else f"original; {name}")
        assert [len(trino.requests), len(other_trino.requests)] == [2, 0]
        assert list_original_statements(trino) == [STATEMENT]
        _, _, counts = await rig.ask("GET", "/seamark/metrics")
        assert 'seamark_trino_statements_total{outcome="original"} 1.0' in counts.decode()


async def test_client_gets_the_error_of_the_original_statement() -> None:
    async with run_scripted_trino(lambda text: [QUEUED_PAGE, build_failure_page("COLUMN_NOT_FOUND", text)]) as (
        trino,
        rig,
    ):
        _, error, _ = await fetch_result(rig)
        assert error == "COLUMN_NOT_FOUND"
        assert list_original_statements(trino) == [STATEMENT]


@pytest.mark.parametrize(
    "error",
    [build_failure_page("USER_CANCELED"), build_failure_page("EXCEEDED_MEMORY_LIMIT", kind="INSUFFICIENT_RESOURCES")],
)
async def test_cancelled_or_too_large_statement_is_not_run_again(error: Page) -> None:
    async with run_scripted_trino(make_script(QUEUED_PAGE, error)) as (trino, rig):
        _, name, _ = await fetch_result(rig)
        assert name == error["error"]["errorName"]
        assert list_original_statements(trino) == []


async def test_error_after_the_first_rows_is_passed_to_the_client() -> None:
    async with run_scripted_trino(make_script(QUEUED_PAGE, ROWS, build_failure_page("GENERIC_INTERNAL_ERROR"))) as (
        trino,
        rig,
    ):
        rows, error, _ = await fetch_result(rig)
        assert (rows, error) == ([[1]], "GENERIC_INTERNAL_ERROR")
        assert list_original_statements(trino) == []


async def test_slow_statement_is_passed_to_the_client() -> None:
    # The slow pages take 0.8 s together, so the proxy passes the statement on before they have all arrived.
    slow_page = {**QUEUED_PAGE, "wait": 0.2}
    async with run_scripted_trino(make_script(QUEUED_PAGE, *[slow_page] * 4, ROWS, END), hold_s=0.3, rules=False) as (
        trino,
        rig,
    ):
        _, _, body = await rig.ask("POST", "/v1/statement", data=STATEMENT.encode())
        assert len(trino.fetched_pages) < 4  # The speed of the machine decides how many pages arrive in time.
        assert json.loads(body)["nextUri"].endswith(f"/0/slug/{len(trino.fetched_pages) + 1}")
        rows, _, _ = await fetch_result(rig)
        assert rows == [[1]]


async def test_proxy_reads_no_page_ahead_if_its_hold_time_is_zero() -> None:
    async with run_scripted_trino(make_script(QUEUED_PAGE, ROWS, END), hold_s=0.0) as (trino, rig):
        await rig.ask("POST", "/v1/statement", data=STATEMENT.encode())
        assert trino.fetched_pages == []


async def test_client_sees_a_coordinator_that_stops_during_the_statement() -> None:
    async with run_scripted_trino(make_script(QUEUED_PAGE, PLANNING_PAGE, {**PLANNING_PAGE, "abort": True}, END)) as (
        trino,
        rig,
    ):
        status, _, body = await rig.ask("POST", "/v1/statement", data=STATEMENT.encode())
        page = json.loads(body)
        assert (status, page["stats"]["state"], page["nextUri"][-8:]) == (200, "PLANNING", "0/slug/2")
        assert (await rig.ask("GET", page["nextUri"].removeprefix(rig.url)))[0] == 502
        assert list_original_statements(trino) == []


async def test_original_is_sent_if_the_coordinator_drops_the_rewritten_statement() -> None:
    async with run_scripted_trino(make_script({"abort": True})) as (_, rig):
        rows, _, plan_header = await fetch_result(rig)
        assert rows == [["the original's"]]
        # The error depends on whether the kernel still had unread bytes of the request.
        assert plan_header in ("original; ServerDisconnectedError", "original; ClientOSError")


async def test_refused_login_is_passed_to_the_client() -> None:
    async with run_scripted_trino(make_script({"status": 401})) as (trino, rig):
        status, headers, _ = await rig.ask("POST", "/v1/statement", data=STATEMENT.encode())
        assert (status, headers["Set-Cookie"]) == (401, "token=0")
        assert list_original_statements(trino) == []


async def test_client_that_disconnects_cancels_its_statement() -> None:
    async with run_scripted_trino(
        make_script(QUEUED_PAGE, PLANNING_PAGE, {**PLANNING_PAGE, "wait": 5}, END), hold_s=30.0
    ) as (
        trino,
        rig,
    ):
        task = asyncio.create_task(rig.ask("POST", "/v1/statement", data=STATEMENT.encode()))
        await until(lambda: (0, 2) in trino.fetched_pages)
        task.cancel()
        await until(lambda: trino.deleted_pages == [(0, 2)])


async def test_requests_of_the_proxy_have_the_clients_headers_without_body_headers() -> None:
    async with run_scripted_trino(make_script(QUEUED_PAGE, ROWS, END)) as (trino, rig):
        request_headers = {"Authorization": "Basic x", "Content-Type": "text/plain; charset=utf-8", "X-Trino-User": "u"}
        await rig.ask(
            "POST", "/v1/statement", data=STATEMENT.encode(), headers={**request_headers, "Accept-Encoding": "gzip"}
        )
        statement_request, *later_requests = (
            request for request in trino.server.requests if request.target != LOGIN_PATH
        )
        assert {request.target.partition("?")[0] for request in later_requests} == {
            "/v1/statement/queued/0/slug/1",
            "/v1/query/q0",
        }
        assert statement_request.headers["Content-Length"] == str(len(statement_request.body))
        assert statement_request.headers["Content-Type"] == request_headers["Content-Type"]
        assert "Content-Type" not in later_requests[0].headers
        assert "Content-Length" not in later_requests[0].headers
        for request in (statement_request, *later_requests):
            assert (request.headers["Authorization"], request.headers["X-Trino-User"]) == ("Basic x", "u")
            assert request.headers["Accept-Encoding"] == "identity"


async def test_coordinator_prefix_is_removed_from_the_pages_that_the_proxy_reads() -> None:
    script = make_script(QUEUED_PAGE, ROWS, END)
    async with run_fake_trino(script) as second, run_scripted_trino(script, second.url) as (first, rig):
        for _ in range(2):
            rows, _, plan_header = await fetch_result(rig)
            assert rows == [[1]]
            assert plan_header.startswith("rewritten")
        assert len(first.requests) == len(second.requests) == 1


async def test_plans_that_trino_cannot_read_are_not_made_for_a_while() -> None:
    failure = build_failure_page("ICEBERG_INVALID_METADATA", "Cannot read /t/_seamark/plans/0/1.avro", "EXTERNAL")
    async with run_scripted_trino(make_script(QUEUED_PAGE, failure)) as (trino, rig):
        for _ in range(FAILURES_MAX):
            assert (await fetch_result(rig))[2] == "original; ICEBERG_INVALID_METADATA"
        assert (await fetch_result(rig))[2].startswith("unchanged; recently, Trino could not read its plans")
        assert len(trino.requests) == 2 * FAILURES_MAX + 1


async def test_user_whose_rules_forbid_plans_gets_no_plans_for_a_while() -> None:
    async with run_scripted_trino(make_script(QUEUED_PAGE, ROWS, END)) as (trino, rig):
        trino.rules = build_rules(build_table(masks={"x": "1"}))
        for _ in range(FAILURES_MAX):
            assert (await fetch_result(rig, headers={"X-Trino-User": "eve"}))[2] == "planned"
        plan_header = (await fetch_result(rig, headers={"X-Trino-User": "eve"}))[2]
        assert plan_header.startswith("unchanged; recently, Trino could not read its plans")
        assert len(trino.requests) == 2 * FAILURES_MAX + 1
        assert (await fetch_result(rig, headers={"X-Trino-User": "ada"}))[2] == "planned"
        assert len(trino.requests) == 2 * FAILURES_MAX + 3


# Trino's rules

RULES_WITHOUT_EFFECT = build_rules(build_table())


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (RULES_WITHOUT_EFFECT, "rewritten"),
        (build_rules(build_table(filters=["a = 1"])), "planned"),
        (build_rules(build_table(masks={"y": "'XXXX'"})), "planned"),
        (build_rules(build_table(), build_table("u", filters=["a = 1"])), "planned"),
    ],
)
async def test_counts_are_shown_only_if_enabled_and_no_rule_applies(rules: dict[str, Any], expected: str) -> None:
    for is_enabled in (False, True):
        async with run_scripted_trino(make_script(QUEUED_PAGE, ROWS, END), plan_header=is_enabled) as (trino, rig):
            trino.rules = rules
            rows, _, outcome = await fetch_result(rig)
            assert rows == [[1]]
            assert outcome == expected or (is_enabled and expected == "rewritten" and "files=3/100" in outcome)
            assert ("3/100" in outcome) == (is_enabled and rules is RULES_WITHOUT_EFFECT)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"nothing": "that is known"},
        build_rules(),
        build_rules(build_table("another")),
        build_rules(build_table(masks={"x": "'XXXX'"})),
        build_rules(build_table(masks={"X": "NULL"})),
        build_rules(build_table(filters=["a IN (SELECT b FROM u)"])),
        build_rules(build_table(), query_partition_filter_required="true"),
    ],
)
@pytest.mark.parametrize(
    "pages", [[QUEUED_PAGE, PLANNING_PAGE, ROWS, END], [QUEUED_PAGE, END], [QUEUED_PAGE, ROWS, ROWS, END]]
)
async def test_original_runs_if_rules_forbid_the_plan_or_are_unknown(rules: dict[str, Any], pages: list[Page]) -> None:
    async with run_scripted_trino(make_script(*pages)) as (trino, rig):
        trino.rules = rules
        rows, error, plan_header = await fetch_result(rig)
        assert (rows, error, plan_header) == ([["the original's"]], None, "planned")
        assert list_original_statements(trino) == [STATEMENT]
        await until(lambda: [number for number, _ in trino.deleted_pages] == [0])


async def test_statement_that_stays_in_the_queue_runs_as_the_original() -> None:
    """Trino reports the tables of a statement only after it has analysed the statement.

    Until then, the proxy cannot know whether rules forbid the rewritten statement.
    """
    # The slow pages take 0.8 s together, so the hold time of 0.3 s ends while the statement is in the queue.
    slow_page = {**QUEUED_PAGE, "wait": 0.2}
    async with run_scripted_trino(make_script(QUEUED_PAGE, *[slow_page] * 4, ROWS, END), hold_s=0.3) as (trino, rig):
        trino.rules = {}  # The coordinator answers a request for the rules with 410.
        assert (await fetch_result(rig))[0] == [["the original's"]]
        assert list_original_statements(trino) == [STATEMENT]


async def test_rules_are_requested_once_and_only_if_there_are_rules() -> None:
    for rules in (True, False):
        async with run_scripted_trino(make_script(QUEUED_PAGE, QUEUED_PAGE, PLANNING_PAGE, ROWS, END), rules=rules) as (
            trino,
            rig,
        ):
            assert (await fetch_result(rig))[0] == [[1]]
            assert trino.rules_requests == ["q0"] * rules


async def test_explain_of_a_user_with_rules_runs_as_the_original() -> None:
    for rules, original_count in ((RULES_WITHOUT_EFFECT, 0), (build_rules(build_table(filters=["a = 1"])), 1)):
        async with run_scripted_trino(make_script(QUEUED_PAGE, ROWS, END)) as (trino, rig):
            trino.rules = rules
            await fetch_result(rig, f"EXPLAIN ANALYZE {STATEMENT}")
            assert len(list_original_statements(trino)) == original_count


@pytest.mark.parametrize("state", ["QUEUED", "PLANNING", "RUNNING"])
async def test_counts_of_a_plan_are_shown_only_to_users_who_may_read_the_table(state: str) -> None:
    """The number of files that can contain a value reveals something about the rows.

    Until Trino has planned the statement, the proxy does not know whether the user may read the table.
    """
    # The first slow page arrives after the hold time, so it is the last page that the proxy reads before it answers.
    slow_page = {"stats": {"state": state}, "wait": 1.5}
    async with run_scripted_trino(make_script(QUEUED_PAGE, slow_page, slow_page, ROWS, END), hold_s=1.2) as (_, rig):
        _, headers, _ = await rig.ask("POST", "/v1/statement", data=STATEMENT.encode())
        assert ("3/100" in headers["X-Seamark-Plan"]) == (state == "RUNNING")
        assert (headers["X-Seamark-Plan"] == "planned") == (state != "RUNNING")


async def test_header_does_not_reveal_that_a_plan_keeps_all_files() -> None:
    async with (
        run_fake_trino(make_script()) as trino,
        run_fake_seamark(lambda *_: {"plan-snapshot-id": None}) as seamark,
        run_proxy(trino.url, seamark=seamark.url) as rig,
    ):
        _, _, plan_header = await fetch_result(rig)
        assert plan_header == "planned"


# Queries that stay unchanged

UNCHANGED_STATEMENT = "SELECT 1"


async def test_unchanged_query_is_followed_out_of_the_queue_without_repeated_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seamark.connector.trino.proxy._QUEUE_S", 30.0)
    async with run_scripted_trino(lambda _: [QUEUED_PAGE, QUEUED_PAGE, PLANNING_PAGE, ROWS, END]) as (trino, rig):
        rows, error, plan_header = await fetch_result(rig, UNCHANGED_STATEMENT)
        assert (rows, error) == ([[1]], None)
        assert plan_header == "unchanged; the statement has no condition that can prune files"
        assert trino.fetched_pages == [(0, 1), (0, 2), (0, 3), (0, 4)]
        _, _, body = await rig.ask("POST", "/v1/statement", data=b" with x as (select 1) table x")
        assert json.loads(body)["nextUri"].endswith("/executing/1/slug/3")


@pytest.mark.parametrize("statement", ["SET SESSION a = 1", "/* a comment */ SELECT 1", "INSERT INTO t SELECT 1"])
async def test_statement_that_is_not_a_plain_query_gets_the_answer_of_trino(statement: str) -> None:
    async with run_scripted_trino(lambda _: [QUEUED_PAGE, QUEUED_PAGE, END]) as (trino, rig):
        _, _, body = await rig.ask("POST", "/v1/statement", data=statement.encode())
        assert json.loads(body)["nextUri"].endswith("/queued/0/slug/1")
        assert trino.fetched_pages == []


@pytest.mark.parametrize(
    "page",
    [
        build_failure_page("SYNTAX_ERROR"),
        END,
        {**ROWS, "stats": {"state": "QUEUED"}},
        {"status": 503, "stats": {"state": ""}},
    ],
)
async def test_page_after_the_queue_is_left_to_the_client(page: Page) -> None:
    async with run_scripted_trino(lambda _: [QUEUED_PAGE, page, END]) as (_, rig):
        _, _, body = await rig.ask("POST", "/v1/statement", data=UNCHANGED_STATEMENT.encode())
        answer = json.loads(body)
        assert "data" not in answer
        assert "error" not in answer
        assert answer["nextUri"].endswith("/queued/0/slug/1")


async def test_query_that_stays_in_the_queue_is_passed_to_the_client_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first slow page takes longer than the proxy waits for a statement in the queue.
    monkeypatch.setattr("seamark.connector.trino.proxy._QUEUE_S", 0.05)
    async with run_scripted_trino(lambda _: [QUEUED_PAGE, {**QUEUED_PAGE, "wait": 0.1}, *[QUEUED_PAGE] * 5, END]) as (
        trino,
        rig,
    ):
        _, _, body = await rig.ask("POST", "/v1/statement", data=UNCHANGED_STATEMENT.encode())
        assert len(trino.fetched_pages) < 5  # The speed of the machine decides how many pages arrive in time.
        assert json.loads(body)["nextUri"].endswith(f"/queued/0/slug/{len(trino.fetched_pages) + 1}")


async def test_client_that_disconnects_in_the_queue_cancels_its_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.connector.trino.proxy._QUEUE_S", 30.0)
    async with run_scripted_trino(lambda _: [QUEUED_PAGE, {**QUEUED_PAGE, "wait": 5}, END]) as (trino, rig):
        task = asyncio.create_task(rig.ask("POST", "/v1/statement", data=UNCHANGED_STATEMENT.encode()))
        await until(lambda: (0, 1) in trino.fetched_pages)
        task.cancel()
        await until(lambda: trino.deleted_pages == [(0, 1)])


async def test_queued_query_is_sent_to_one_coordinator_only() -> None:
    async with run_scripted_trino(lambda _: [{**QUEUED_PAGE, "abort": True}]) as (trino, rig):
        status, _, _ = await rig.ask("POST", "/v1/statement", data=UNCHANGED_STATEMENT.encode())
        assert (status, trino.requests) == (502, [UNCHANGED_STATEMENT])
