"""Tests that a statement is rewritten to plan tables only if all plans are safe and arrive in time.

Otherwise the statement stays unchanged.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from sqlglot.parser import Parser

from seamark.connector.analysis import statement_cache as reading
from seamark.connector.client.errors import InvalidRequest, NoSuchResource, ServerFailed, Unreachable
from seamark.connector.cubes.summaries import ON
from seamark.connector.plans.async_client import KnownTable, TablePlanRequest, TablePlanResponse
from seamark.connector.trino import rewriter as rewriter_module
from seamark.connector.trino.protocol import circuit_breaker
from seamark.connector.trino.protocol.circuit_breaker import FAILURES_MAX
from seamark.connector.trino.protocol.sessions import Session, read_session, set_prepared_statement
from seamark.connector.trino.rewrite_results import RewriteResult
from seamark.connector.trino.rewriter import RewriteLimits
from tests.connector.trino.played import (
    COLUMNS,
    PATIENT,
    NumberedPlans,
    count_planned_tables,
    open_rewriter,
    parse_filter,
)
from tests.iceberg.samples import build_table

SESSION = Session(catalog="lake", schema="db")


async def run_rewrite(
    statement: str, session: Session = SESSION, **server_options: Any
) -> tuple[RewriteResult, list[TablePlanRequest]]:
    server = NumberedPlans(**server_options)
    async with open_rewriter(server) as rewriter:
        return await rewriter.rewrite(statement, session), server.requests


def fail_with(error: Exception) -> Callable[[TablePlanRequest], Any]:
    """Return a function that raises the error for each plan request."""

    def plan(request: TablePlanRequest) -> Any:
        raise error

    return plan


@pytest.mark.parametrize(
    ("statement", "session", "expected", "table"),
    [
        ("SELECT * FROM t WHERE id = 1", SESSION, "SELECT * FROM t FOR VERSION AS OF 100 WHERE id = 1", ("db", "t")),
        (
            'SELECT * FROM Other."A.B"."T" q WHERE id = 1',
            SESSION,
            'SELECT * FROM Other."A.B"."T" FOR VERSION AS OF 100 q WHERE id = 1',
            ("a", "b", "t"),
        ),
        (
            "SELECT * FROM s.t WHERE id = 1",
            Session("lake"),
            "SELECT * FROM s.t FOR VERSION AS OF 100 WHERE id = 1",
            ("s", "t"),
        ),
        (
            "EXPLAIN ANALYZE SELECT 1 FROM t WHERE id = 1",
            SESSION,
            "EXPLAIN ANALYZE SELECT 1 FROM t FOR VERSION AS OF 100 WHERE id = 1",
            ("db", "t"),
        ),
    ],
)
async def test_unqualified_name_uses_the_sessions_catalog_and_schema(
    statement: str, session: Session, expected: str, table: tuple[str, ...]
) -> None:
    rewrite, plan_requests = await run_rewrite(statement, session)
    assert rewrite.statement == expected
    assert [request.table for request in plan_requests] == [table]
    assert (rewrite.files, rewrite.considered_files) == (1, 100)
    assert rewrite.summary.startswith(f"rewritten; scans=1; files=1/100; {'.'.join(table)}=1/100; ms=")


@pytest.mark.parametrize(
    ("statement", "session", "reason"),
    [
        ("SELECT 1", SESSION, "the statement has no condition that can prune files"),
        ("SELECT * FROM t", SESSION, "the statement has no condition that can prune files"),
        ("SELECT * FROM hive.db.t WHERE id = 1", SESSION, "the statement has no scan that can prune files"),
        (
            "SELECT * FROM t WHERE id = 1",
            Session("hive", "db"),
            "the statement reads no table of the configured catalogs",
        ),
        (
            "SELECT * FROM t AS lakes WHERE id = 1",
            Session("hive", "db"),
            "the statement has no scan that can prune files",
        ),
        ("SELECT * FROM t WHERE id = 1", Session("lake"), "the statement has no scan that can prune files"),
        ("SELECT * FROM t WHERE id = 1", Session(), "the statement reads no table of the configured catalogs"),
        ('SELECT * FROM "t$files" WHERE id = 1', SESSION, "the statement has no scan that can prune files"),
        ('SELECT * FROM "t~plan~9" WHERE id = 1', SESSION, "the statement has no scan that can prune files"),
        ("SELECT * FROM t WHERE id + x = 1", SESSION, "the statement has no scan that can prune files"),
        ("INSERT INTO u SELECT id, x FROM t WHERE id = 1", SESSION, "the statement has no scan that can prune files"),
        ("DELETE FROM t WHERE id = 1", SESSION, "the statement has no scan that can prune files"),
        ("SELECT * FROM t WHERE id = 1 /* Seamark: OFF */", SESSION, "switched off"),
        ("SELECT * FROM t WHERE id = 1", Session("lake", "db", off=True), "switched off"),
        (
            "SELECT * FROM t WHERE id = 1",
            Session("lake", "db", in_transaction=True),
            "the statement is in a transaction",
        ),
        ("SELECT * FROM t WHERE (((", SESSION, "the statement has no scan that can prune files"),
    ],
)
async def test_statement_that_cannot_prune_files_stays_unchanged_and_requests_no_plan(
    statement: str, session: Session, reason: str
) -> None:
    rewrite, plan_requests = await run_rewrite(statement, session)
    assert rewrite.statement is None
    assert rewrite.summary.partition("; ms=")[0] == f"unchanged; {reason}"
    assert plan_requests == []


async def test_catalog_name_is_found_in_any_case_if_the_session_uses_another_catalog() -> None:
    for name in ("LAKE", '"Lake"', "other", '"OTHER"'):
        rewrite, plan_requests = await run_rewrite(f"SELECT * FROM {name}.db.t WHERE id = 1", Session("hive", "db"))
        assert rewrite.statement == f"SELECT * FROM {name}.db.t FOR VERSION AS OF 100 WHERE id = 1"
        assert len(plan_requests) == 1


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (lambda request: {"plan_snapshot_id": None}, "plans keep too many of the files"),
        (
            fail_with(NoSuchResource("", status=404, kind="NoSuchTableException")),
            "Seamark refused: NoSuchTableException",
        ),
        (fail_with(InvalidRequest("", status=400)), "Seamark refused: 400"),
        (fail_with(ServerFailed("")), "Seamark failed: ServerFailed"),
    ],
)
async def test_summary_names_the_reason_if_there_is_no_plan(
    plan: Callable[[TablePlanRequest], Any], reason: str
) -> None:
    rewrite, plan_requests = await run_rewrite("SELECT * FROM t WHERE id = 1", plan=plan)
    assert (rewrite.statement, rewrite.summary.partition("; ms=")[0]) == (None, f"unchanged; {reason}")
    assert len(plan_requests) == 1


async def test_each_statement_requests_a_new_plan() -> None:
    server = NumberedPlans()
    async with open_rewriter(server) as rewriter:
        for number in range(3):
            rewrite = await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION)
            assert f"OF {100 + number} " in (rewrite.statement or "")


@pytest.mark.parametrize(
    ("statement", "expected_count"),
    [
        ("SELECT 1 FROM t WHERE id = 1", 1),
        ("SELECT * FROM t JOIN u ON id = uid WHERE x = 1 AND y = 2", 1),
        ("SELECT * FROM t WHERE lower(name) = 'a'", 1),
        ("SELECT a FROM t", 0),
        ("SELECT count(*) FROM t WHERE id = ", 1),
    ],
)
async def test_statement_is_parsed_once(statement: str, expected_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy uses the tree again when it knows the columns of the tables, and after these columns have changed.

    A statement without a condition is not parsed at all.
    """
    parse_count = 0
    parse = Parser.parse

    def count_and_parse(self: Parser, *arguments: Any) -> Any:
        nonlocal parse_count
        parse_count += 1
        return parse(self, *arguments)

    monkeypatch.setattr(Parser, "parse", count_and_parse)
    server = NumberedPlans()
    async with open_rewriter(server) as rewriter:
        for version in ("1", "1", "2"):  # The columns change before the third rewrite.
            server.version = version
            await rewriter.rewrite(statement, SESSION)
    assert parse_count == expected_count


async def test_useless_plan_is_not_requested_again_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.connector.trino.rewriter._UNCHANGED_AFTER_USELESS_PLAN_S", 600.0)
    server = NumberedPlans(plan=lambda request: {"plan_snapshot_id": None})
    statement = "SELECT * FROM t WHERE id = 1"
    async with open_rewriter(server) as rewriter:
        first_rewrite = await rewriter.rewrite(statement, SESSION)
        second_rewrite = await rewriter.rewrite(statement, SESSION)
        assert (first_rewrite.statement, second_rewrite.statement, len(server.requests)) == (None, None, 1)
        assert second_rewrite.summary == "unchanged; plans kept too many of the files a few seconds ago"
        assert second_rewrite.depends_on_data
        await rewriter.rewrite(statement, replace(SESSION, schema="elsewhere"))
        await rewriter.rewrite(statement + " ", SESSION)
        assert len(server.requests) == 3
    monkeypatch.setattr("seamark.connector.trino.rewriter._UNCHANGED_AFTER_USELESS_PLAN_S", 0.0)
    server = NumberedPlans(plan=lambda request: {} if server.requests[1:] else {"plan_snapshot_id": None})
    async with open_rewriter(server) as rewriter:
        assert (await rewriter.rewrite(statement, SESSION)).statement is None
        assert "OF 101 " in ((await rewriter.rewrite(statement, SESSION)).statement or "")


@pytest.mark.parametrize("error", [NoSuchResource("", status=404, kind=""), ServerFailed("")])
async def test_failed_plan_is_requested_again_for_the_next_statement(error: Exception) -> None:
    server = NumberedPlans(plan=fail_with(error))
    async with open_rewriter(server) as rewriter:
        for statement_count in (1, 2):
            assert (await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION)).statement is None
            assert len(server.requests) == statement_count


async def test_bug_in_the_translation_to_a_cube_fails_no_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise KeyError("brand")

    monkeypatch.setattr(rewriter_module, "translate_scans", fail)
    table = KnownTable("1", COLUMNS["t"], 5, cube_metadata=build_table())
    async with open_rewriter(NumberedPlans(tables={"t": table}), replace(PATIENT, cubes=ON)) as rewriter:
        rewritten = await rewriter.rewrite("SELECT sum(x) FROM t WHERE id = 1", SESSION)
    assert rewritten.statement == "SELECT sum(x) FROM t FOR VERSION AS OF 100 WHERE id = 1"
    assert "no-cube=the translation failed: KeyError" in rewritten.summary


# Statements with several tables


async def test_unqualified_column_belongs_to_the_table_that_has_it() -> None:
    rewrite, plan_requests = await run_rewrite("SELECT * FROM t, u WHERE x = 1 AND y = 2 AND id = uid")
    assert {(request.table[-1], request.filter) for request in plan_requests} == {
        ("t", parse_filter("x = 1")),
        ("u", parse_filter("y = 2")),
    }
    assert count_planned_tables(rewrite) == 2


async def test_columns_are_not_requested_if_the_statement_needs_none() -> None:
    server = NumberedPlans()
    async with open_rewriter(server) as rewriter:
        await rewriter.rewrite("SELECT * FROM t WHERE x = 1", SESSION)
        assert server.loaded_tables == []


async def test_statement_is_analysed_once_for_the_same_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read_statement = reading._read

    def record_and_read(*arguments: Any) -> Any:
        reads.append(arguments)
        return read_statement(*arguments)

    monkeypatch.setattr(reading, "_read", record_and_read)
    server = NumberedPlans(wait_s=0.01)
    async with open_rewriter(server) as rewriter:
        statement = "SELECT * FROM t, u WHERE x = 1 AND id = uid"
        await asyncio.gather(*(rewriter.rewrite(statement, SESSION) for _ in range(20)))
        assert len(reads) == 2  # The first analysis has no columns, and the second analysis has them.
        server.version = "2"
        rewrite = await rewriter.rewrite(statement, SESSION)
        assert len(reads) == 3
        assert rewrite.statement is not None


async def test_table_that_occurs_twice_is_read_at_one_snapshot() -> None:
    rewrite, plan_requests = await run_rewrite(
        "SELECT * FROM t a JOIN t b ON a.id = b.x WHERE a.id = 1 AND b.local IS NULL"
    )
    assert count_planned_tables(rewrite) == 2
    rewrite, plan_requests = await run_rewrite("SELECT (SELECT count(*) FROM t) FROM t WHERE id = 1")
    assert rewrite.statement == (
        "SELECT (SELECT count(*) FROM t FOR VERSION AS OF 101) FROM t FOR VERSION AS OF 100 WHERE id = 1"
    )
    assert [(request.filter, request.snapshot_id, request.max_kept_fraction) for request in plan_requests] == [
        (parse_filter("id = 1"), None, 0.95),
        (None, 7, 1.0),
    ]


async def test_table_is_not_rewritten_if_its_plans_have_two_snapshots() -> None:
    snapshot_ids = itertools.count()
    rewrite, _ = await run_rewrite(
        "SELECT * FROM t a, t b, u WHERE a.id = 1 AND b.id = 2 AND u.y = 1",
        plan=lambda request: {"snapshot_id": next(snapshot_ids)},
    )
    assert count_planned_tables(rewrite) == 1
    assert " u FOR VERSION AS OF 1" in (rewrite.statement or "")


async def test_table_is_not_rewritten_if_one_reference_to_it_has_no_plan() -> None:
    def plan(request: TablePlanRequest) -> dict[str, Any]:
        if request.snapshot_id is not None:
            raise NoSuchResource("", status=404)
        return {}

    rewrite, plan_requests = await run_rewrite("SELECT (SELECT count(*) FROM t) FROM t WHERE id = 1", plan=plan)
    assert rewrite.statement is None
    assert len(plan_requests) == 2


async def test_refused_predicate_is_replaced_by_a_plan_of_all_rows() -> None:
    def plan(request: TablePlanRequest) -> dict[str, Any]:
        if request.filter == parse_filter("x = 2"):
            raise InvalidRequest("", status=400)
        return {}

    rewrite, plan_requests = await run_rewrite(
        "SELECT 1 FROM t WHERE x = 1 UNION SELECT 2 FROM t WHERE x = 2", plan=plan
    )
    assert count_planned_tables(rewrite) == 2
    assert plan_requests[-1].filter is None


async def test_time_travel_to_a_snapshot_is_planned_at_that_snapshot() -> None:
    statement = "SELECT * FROM t FOR VERSION AS OF 5 WHERE id = 1"
    rewrite, plan_requests = await run_rewrite(statement)
    assert rewrite.statement == "SELECT * FROM t FOR VERSION AS OF 100 WHERE id = 1"
    assert [(request.snapshot_id, request.uses_snapshot_schema) for request in plan_requests] == [(5, True)]
    rewrite, _ = await run_rewrite(f"EXECUTE IMMEDIATE '{statement.replace('1', '?')}' USING 1")
    assert rewrite.statement is not None
    assert "FROM t FOR VERSION AS OF 100 WHERE id = ?' USING 1" in rewrite.statement


async def test_time_travel_to_a_branch_is_planned_at_the_branchs_snapshot() -> None:
    statement = "SELECT * FROM t FOR VERSION AS OF 'it''s' WHERE id = 1"
    rewrite, plan_requests = await run_rewrite(statement)
    assert rewrite.statement == "SELECT * FROM t FOR VERSION AS OF 100 WHERE id = 1"
    assert [(request.snapshot_id, request.ref, request.uses_snapshot_schema) for request in plan_requests] == [
        (None, "it's", True)
    ]
    rewrite, _ = await run_rewrite("EXECUTE IMMEDIATE '" + statement.replace("'", "''") + "'")
    assert rewrite.statement == "EXECUTE IMMEDIATE 'SELECT * FROM t FOR VERSION AS OF 100 WHERE id = 1'"
    union_of_branches = (
        "SELECT * FROM t FOR VERSION AS OF 'dev' a WHERE a.id = 1 UNION SELECT * FROM t FOR VERSION AS OF 'dev'"
    )
    rewrite, plan_requests = await run_rewrite(union_of_branches)
    assert count_planned_tables(rewrite) == 2
    assert [(request.snapshot_id, request.ref) for request in plan_requests] == [(None, "dev"), (7, None)]


@pytest.mark.parametrize(
    ("audit_id", "current_id", "planned_count"),
    [(8, 7, 2), (9, 7, 0), (8, 6, 0), (None, 7, 0)],
    ids=["neither moved", "the branch moved", "the table moved", "the branch is gone"],
)
async def test_table_and_its_branch_are_rewritten_only_in_one_consistent_state(
    audit_id: int | None, current_id: int, planned_count: int
) -> None:
    statement = "SELECT * FROM t a JOIN t FOR VERSION AS OF 'audit' b ON a.id = b.id WHERE a.id = 1 AND b.id = 1"
    refs = {} if audit_id is None else {"audit": audit_id}
    rewrite, plan_requests = await run_rewrite(
        f"{statement} UNION ALL SELECT u.*, u.* FROM u WHERE y = 1",
        plan=lambda request: {} if request.ref is None else {"snapshot_id": 8},
        tables={"t": KnownTable("1", COLUMNS["t"], current_id, 1 << 30, 100, refs=refs)},
    )
    assert count_planned_tables(rewrite) == planned_count + 1
    assert {(request.table[-1], request.ref) for request in plan_requests} == {("t", None), ("t", "audit"), ("u", None)}


async def test_table_is_not_rewritten_if_its_branch_has_no_plan() -> None:
    """The server has no plan for the table at the branch. This is the request with `uses_snapshot_schema`.

    A branch can move before the engine reads it, so the other reference to the table stays unchanged too.
    """

    def plan(request: TablePlanRequest) -> dict[str, Any]:
        return {"plan_snapshot_id": None} if request.uses_snapshot_schema else {}

    known_table = KnownTable("1", COLUMNS["t"], snapshot_id=7, size_bytes=1 << 30, files=100, refs={"audit": 7})
    known_tables = {"t": known_table}
    union = "SELECT id FROM t WHERE id = 1 UNION SELECT id FROM t FOR VERSION AS OF 'audit' WHERE id = 2"
    rewrite, _ = await run_rewrite(union, plan=plan, tables=known_tables)
    assert rewrite.statement is None
    union_with_snapshot = "SELECT id FROM t WHERE id = 1 UNION SELECT id FROM t FOR VERSION AS OF 5 WHERE id = 2"
    rewrite, _ = await run_rewrite(union_with_snapshot, plan=plan)
    assert rewrite.statement is not None  # A snapshot id always names the same snapshot.


# Prepared statements


async def test_prepared_statement_is_rewritten_in_the_header_that_holds_it() -> None:
    texts = {"p": "SELECT * FROM t WHERE id = ?", "q": "SELECT * FROM u WHERE y = ?"}
    session = Session("lake", "db", prepared=texts)
    rewrite, plan_requests = await run_rewrite("EXECUTE p USING 5", session)
    assert (rewrite.prepared, rewrite.statement) == ("p", "SELECT * FROM t FOR VERSION AS OF 100 WHERE id = ?")
    assert plan_requests[0].filter == parse_filter("id = 5")
    headers = CIMultiDict([("X-Trino-Prepared-Statement", "q=SELECT+%2A+FROM+u+WHERE+y+%3D+%3F,p=x"), ("X-Other", "1")])
    set_prepared_statement(headers, "p", rewrite.statement or "")
    assert read_session(CIMultiDictProxy(headers)).prepared == {**texts, "p": rewrite.statement}
    assert headers["X-Other"] == "1"


@pytest.mark.parametrize(
    "statement", ["EXECUTE gone USING 5", "EXECUTE p USING id", "EXECUTE p", "DEALLOCATE PREPARE p"]
)
async def test_execution_that_is_not_understood_stays_unchanged(statement: str) -> None:
    session = Session("lake", "db", prepared={"p": "SELECT * FROM t WHERE id = ?"})
    rewrite, plan_requests = await run_rewrite(statement, session)
    assert (rewrite.statement, plan_requests) == (None, [])


def test_session_is_read_from_the_headers() -> None:
    def open_session_from(*headers: tuple[str, str]) -> Session:
        return read_session(CIMultiDictProxy(CIMultiDict(headers)))

    assert open_session_from() == Session()
    assert open_session_from(("X-Trino-Catalog", "Lake"), ("X-Trino-Schema", " DB")) == Session("lake", "db")
    assert open_session_from(("X-Trino-Transaction-Id", "NONE")) == Session()
    assert open_session_from(("X-Trino-Transaction-Id", "abc")).in_transaction
    assert open_session_from(("X-Seamark", "OFF")).off
    assert open_session_from(("X-Trino-Client-Tags", "a, seamark-off")).off
    assert not open_session_from(("X-Trino-Client-Tags", "seamark-office")).off
    assert open_session_from(("X-Trino-Time-Zone", "UTC")).utc
    assert not open_session_from(("X-Trino-Time-Zone", "Europe/Zurich")).utc
    assert not open_session_from(
        ("X-Trino-Time-Zone", "UTC"), ("X-Trino-Session", "a=1,time_zone_id=Europe%2FZurich")
    ).utc
    assert open_session_from(("X-Trino-Prepared-Statement", "p=%24zstd%3Aabc,q=x")).prepared == {"q": "x"}


# Time zones


@pytest.mark.parametrize(
    ("utc", "trusts_time_zone", "column", "is_rewritten"),
    [
        (True, True, "at", True),
        (True, False, "at", False),
        (False, True, "at", False),
        (False, False, "local", True),
    ],
)
async def test_time_without_a_zone_prunes_only_if_the_zone_is_known(
    utc: bool, trusts_time_zone: bool, column: str, is_rewritten: bool
) -> None:
    server = NumberedPlans()
    async with open_rewriter(server, RewriteLimits(10.0, trust_time_zone=trusts_time_zone)) as rewriter:
        statement = f"SELECT * FROM t WHERE {column} >= TIMESTAMP '2026-01-01 00:00:00'"
        rewrite = await rewriter.rewrite(statement, Session("lake", "db", utc=utc))
        assert (rewrite.statement is not None) == is_rewritten


# Time limits


async def test_slow_seamark_costs_at_most_the_budget_until_the_breaker_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "BACKOFF_S", 600.0)  # The breaker stays open until the end of the test.
    server, summaries = NumberedPlans(wait_s=600.0), []
    async with open_rewriter(server, RewriteLimits(budget_s=0.2)) as rewriter:
        async with asyncio.timeout(60):
            while not rewriter.open_breakers:
                summaries.append((await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION)).summary)
        # On a busy machine the analysis of the first statement may exceed the budget.
        slow_summaries = [
            summary
            for summary in summaries
            if not summary.startswith("unchanged; the statement was not parsed in time")
        ]
        assert len(slow_summaries) == FAILURES_MAX
        assert all(summary.startswith("unchanged; Seamark was too slow") for summary in slow_summaries)
        assert rewriter.open_breakers == ["seamark"]
        rewrite = await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION)
        assert rewrite.summary.startswith("unchanged; Seamark has failed recently; ms=")
        assert len(server.requests) == FAILURES_MAX


async def test_plans_that_arrive_in_time_are_used_without_the_late_plan() -> None:
    class ServerWithSlowPlans(NumberedPlans):
        async def plan_table(self, request: TablePlanRequest) -> TablePlanResponse:
            await asyncio.sleep(600 if request.table[-1] == "u" else 0)
            return await super().plan_table(request)

    async with open_rewriter(ServerWithSlowPlans(), RewriteLimits(budget_s=3)) as rewriter:
        rewrite = await rewriter.rewrite("SELECT * FROM t, u WHERE t.x = 1 AND u.y = 2", SESSION)
        assert rewrite.statement == "SELECT * FROM t FOR VERSION AS OF 100, u WHERE t.x = 1 AND u.y = 2"


async def test_statement_with_a_slow_analysis_stays_unchanged_and_is_rewritten_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_statement = reading._read
    may_continue, read_count = Event(), 0

    def read_slowly(*arguments: Any) -> Any:
        nonlocal read_count
        read_count += 1
        may_continue.wait()
        return read_statement(*arguments)

    monkeypatch.setattr(reading, "_read", read_slowly)
    async with open_rewriter(NumberedPlans(), RewriteLimits(budget_s=0.3)) as rewriter:
        rewrite = await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION)
        assert rewrite.summary.startswith("unchanged; the statement was not parsed in time")
        assert rewriter.open_breakers == []
        may_continue.set()
        async with asyncio.timeout(60):  # On a busy machine the budget may be too short once or twice.
            while (await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION)).statement is None:
                await asyncio.sleep(0.05)
        reads_before = read_count
        await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION)
        assert read_count == reads_before


@pytest.mark.parametrize("step", ["parse_query", "collect_scans"])
async def test_bug_in_the_analysis_does_not_fail_the_statement(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(reading, step, fail)
    rewrite, _ = await run_rewrite("SELECT * FROM t WHERE id = 1")
    assert rewrite.statement is None


async def test_failures_in_a_row_open_the_breaker_and_refusals_do_not() -> None:
    for error, is_open in ((Unreachable("gone"), True), (InvalidRequest("", status=400), False)):
        server = NumberedPlans(plan=fail_with(error))
        async with open_rewriter(server) as rewriter:
            for _ in range(FAILURES_MAX):
                await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION)
            assert (rewriter.open_breakers == ["seamark"]) == is_open


async def test_statement_that_lists_snapshots_withdraws_idle_plans_first() -> None:
    server = NumberedPlans()
    async with open_rewriter(server) as rewriter:
        rewriter.release(await rewriter.rewrite("SELECT * FROM t WHERE id = 1", SESSION))
        rewrite = await rewriter.rewrite("SELECT * FROM t WHERE id = 2", SESSION)
        assert server.leases == []
        await rewriter.rewrite('SELECT snapshot_id FROM "t$snapshots" ORDER BY committed_at', SESSION)
        assert server.leases == [(("db", "t"), [100], 0)]
        assert rewrite.plans == [(("db", "t"), 101)]


EXPLAIN_STATEMENT = "EXPLAIN ANALYZE SELECT 1 FROM t WHERE id = 1"


@pytest.mark.parametrize(
    ("statement", "explains"),
    [
        (EXPLAIN_STATEMENT, True),
        (f"-- a\n/* b */ /* c */\n-- d\n{EXPLAIN_STATEMENT}", True),
        ("EXECUTE one", True),
        ("SELECT 1 FROM t WHERE id = 1", False),
        ("/* explain */ SELECT 1 AS explain FROM t WHERE id = 1", False),
        ("-- explain\nSELECT 1 FROM t WHERE id = 1", False),
    ],
)
async def test_explain_statement_is_recognised_in_every_form(statement: str, explains: bool) -> None:
    rewrite, _ = await run_rewrite(statement, replace(SESSION, prepared={"one": EXPLAIN_STATEMENT}))
    assert rewrite.statement is not None
    assert rewrite.used.explains is explains


@pytest.mark.parametrize("line", ["-" * 5000, "-- " * 2000, "/**/" * 2000, "/* * /" * 2000 + "*/", " \n" * 5000])
async def test_long_comments_are_skipped_in_bounded_time(line: str) -> None:
    start_s = time.process_time()  # CPU time does not include the work of other processes.
    await run_rewrite(f"{line}\nSELECT 1 FROM t WHERE id = 1")
    # A scanner that goes back at each character needs a time that grows at least with the square of the length.
    assert time.process_time() - start_s < 5
