"""Tests of ALTER TABLE … MERGE FILES and DROP COLUMNS through the proxy.

Trino decides who may run them, and the client gets an answer in Trino's protocol.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from seamark.connector.jobs.statements import (
    DropColumns,
    MergeFiles,
    StatementAnswer,
    StatementJob,
    StatementResult,
)
from seamark.connector.trino.protocol import table_statements
from tests.connector.trino.protocol import (
    END,
    PLANNING_PAGE,
    Page,
    ScriptedTrino,
    build_failure_page,
    build_rules,
    build_table,
    run_fake_trino,
)
from tests.connector.trino.rig import ProxyRig, run_proxy

SESSION = {"X-Trino-User": "anna", "X-Trino-Catalog": "lake", "X-Trino-Schema": "db"}
MERGE = "ALTER TABLE t MERGE FILES"
DROP = "ALTER TABLE t PARTITION (day < 3) DROP COLUMNS (X, y.z)"
RESULT = StatementResult(5, 1, 500, 400, 3, 1, 1, 0)


@dataclass
class SimulatedJobs:
    """Simulated jobs. `started_jobs` contains the jobs that have started, and they end after `may_end` is set."""

    started_jobs: list[StatementJob] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    killed_count: int = 0
    answer: StatementAnswer = field(default_factory=lambda: StatementAnswer(RESULT))

    async def run(self, job: StatementJob, *, authorities: str | None = None) -> StatementAnswer:
        self.started_jobs.append(job)
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.killed_count += 1
            raise
        return self.answer


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> SimulatedJobs:
    simulated_jobs = SimulatedJobs()
    monkeypatch.setattr(table_statements, "run_in_process", simulated_jobs.run)
    return simulated_jobs


@asynccontextmanager
async def run_scripted_trino(refused_text: str = "", **settings: Any) -> AsyncIterator[tuple[ScriptedTrino, ProxyRig]]:
    """Yield a coordinator and a proxy. Trino refuses statements that contain the text `refused_text`."""

    def answer_statement(text: str) -> list[Page]:
        if refused_text and refused_text in text:
            return [PLANNING_PAGE, build_failure_page("PERMISSION_DENIED", f"Access Denied: {text}")]
        return [PLANNING_PAGE, END]

    async with (
        run_fake_trino(answer_statement) as trino,
        run_proxy(trino.url, **{"maintenance": 1, "token": "writer", **settings}) as rig,
    ):
        yield trino, rig


async def post_statement(rig: ProxyRig, text: str, **headers: str) -> dict[str, Any]:
    status, _, body = await rig.ask("POST", "/v1/statement", data=text.encode(), headers={**SESSION, **headers})
    assert status == 200
    answer: dict[str, Any] = json.loads(body)
    return answer


async def follow_pages(rig: ProxyRig, answer: dict[str, Any]) -> dict[str, Any]:
    while "nextUri" in answer:
        assert answer["nextUri"].startswith(rig.url)
        status, _, body = await rig.ask("GET", answer["nextUri"].removeprefix(rig.url))
        assert status == 200
        answer = json.loads(body)
    return answer


async def test_client_gets_the_counts_of_the_job(jobs: SimulatedJobs) -> None:
    async with run_scripted_trino() as (trino, rig):
        answer = await post_statement(rig, MERGE)
        assert answer["stats"]["state"] == "RUNNING"
        jobs.may_end.set()
        last_page = await follow_pages(rig, answer)
        assert [column["name"] for column in last_page["columns"]][:2] == ["files_before", "files_after"]
        assert last_page["data"] == [[5, 1, 500, 400, 3, 1, 1, 0]]
        assert last_page["id"] == answer["id"]
        assert [job.statement for job in jobs.started_jobs] == [MergeFiles(("db", "t"))]
        assert jobs.started_jobs[0].token == "writer"
        assert trino.requests == [
            'EXPLAIN (TYPE VALIDATE) ALTER TABLE "lake"."db"."t" EXECUTE optimize',
            'SELECT 1 FROM "lake"."db"."t" WHERE FALSE',
        ]
        assert trino.rules_requests == ["q1"]


async def test_drop_columns_requires_the_right_to_update_each_column(jobs: SimulatedJobs) -> None:
    async with run_scripted_trino() as (trino, rig):
        jobs.may_end.set()
        await follow_pages(rig, await post_statement(rig, DROP))
        assert trino.requests == [
            'EXPLAIN (TYPE VALIDATE) UPDATE "lake"."db"."t" SET "x" = NULL, "y" = NULL',
            'SELECT "x", "y" FROM "lake"."db"."t" WHERE FALSE AND (day < 3\n)',
        ]
        assert [job.statement for job in jobs.started_jobs] == [DropColumns(("db", "t"), "day < 3", ("X", "y.z"))]


@pytest.mark.parametrize("refused_kind", ["EXPLAIN", "SELECT"])
@pytest.mark.parametrize("text", [MERGE, DROP])
async def test_statement_that_trino_refuses_does_not_run(jobs: SimulatedJobs, text: str, refused_kind: str) -> None:
    async with run_scripted_trino(refused_kind) as (_, rig):
        answer = await follow_pages(rig, await post_statement(rig, text))
        assert answer["error"]["errorName"] == "PERMISSION_DENIED"
        assert jobs.started_jobs == []


@pytest.mark.parametrize(
    "rules",
    [
        build_rules(build_table(filters=["country = 'FR'"])),
        build_rules(build_table(masks={"other": "NULL"})),
        build_rules(build_table(), build_table("u", filters=["a = 1"])),
        build_rules(build_table("u")),
        {},
    ],
)
async def test_row_filter_or_mask_forbids_the_statement(jobs: SimulatedJobs, rules: dict[str, Any]) -> None:
    async with run_scripted_trino() as (trino, rig):
        trino.rules = rules
        for text in (MERGE, DROP):
            answer = await follow_pages(rig, await post_statement(rig, text))
            assert answer["error"]["errorName"] == "PERMISSION_DENIED"
        assert jobs.started_jobs == []


async def test_statement_fails_if_its_job_fails(jobs: SimulatedJobs) -> None:
    jobs.answer = StatementAnswer(error="x is required")
    jobs.may_end.set()
    async with run_scripted_trino() as (_, rig):
        answer = await follow_pages(rig, await post_statement(rig, DROP))
        assert answer["error"]["message"] == "x is required"
        assert answer["stats"]["state"] == "FAILED"
        assert "data" not in answer


async def test_cancelled_statement_kills_its_job(jobs: SimulatedJobs) -> None:
    async with run_scripted_trino() as (_, rig):
        answer = await post_statement(rig, MERGE)
        while not jobs.started_jobs:
            await asyncio.sleep(0.01)
        target = answer["nextUri"].removeprefix(rig.url)
        assert (await rig.ask("DELETE", target))[0] == 204
        while not jobs.killed_count:
            await asyncio.sleep(0.01)
        assert (await rig.ask("GET", target))[0] == 404
        assert (await rig.ask("DELETE", target))[0] == 404
        assert (await rig.ask("POST", target))[0] == 405


async def test_one_statement_runs_while_ten_wait_and_further_statements_are_refused(jobs: SimulatedJobs) -> None:
    async with run_scripted_trino() as (_, rig):
        answers = [await post_statement(rig, MERGE) for _ in range(1 + table_statements.WAITING_MAX)]
        assert len(jobs.started_jobs) == 1
        refusal = await post_statement(rig, MERGE)
        assert refusal["error"]["errorName"] == "QUERY_QUEUE_FULL"
        jobs.may_end.set()
        last_pages = [await follow_pages(rig, answer) for answer in answers]
        assert all("data" in page for page in last_pages)
        assert len(jobs.started_jobs) == len(answers)


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        ("ALTER TABLE t DROP COLUMN x", {}),
        ("ALTER TABLE t EXECUTE optimize", {}),
        ("ALTER TABLE hive.db.t MERGE FILES", {}),
        ('ALTER TABLE "t$files" MERGE FILES', {}),
        (MERGE, {"X-Trino-Catalog": "hive"}),
        (MERGE, {"X-Trino-Schema": ""}),
        (MERGE, {"X-Seamark": "off"}),
    ],
)
async def test_statement_that_is_not_for_seamark_is_sent_to_trino(
    jobs: SimulatedJobs, text: str, headers: dict[str, str]
) -> None:
    async with run_scripted_trino() as (trino, rig):
        await post_statement(rig, text, **headers)
        assert trino.requests == [text]
        assert jobs.started_jobs == []


async def test_trino_gets_all_statements_if_the_option_is_off(jobs: SimulatedJobs) -> None:
    async with run_scripted_trino(maintenance=0) as (trino, rig):
        await post_statement(rig, MERGE)
        assert trino.requests == [MERGE]


async def test_syntax_errors_and_transactions_are_refused_before_a_request_to_trino(jobs: SimulatedJobs) -> None:
    async with run_scripted_trino() as (trino, rig):
        assert (await post_statement(rig, f"{MERGE} NOW"))["error"]["errorName"] == "SYNTAX_ERROR"
        refusal = await post_statement(rig, MERGE, **{"X-Trino-Transaction-Id": "4711"})
        assert refusal["error"]["errorName"] == "NOT_SUPPORTED"
        assert trino.requests == []
