"""Tests of POST /api/v1/sql: it returns the rows of a query with the rights of its caller, within limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import pytest_asyncio

from seamark.commands.programs import STATEMENT_WORKER
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.access.worker_tokens import StatementTokens
from seamark.metaserver.api.sql.workers import StatementWorker, StatementWorkers
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.api.client import Answer, Api
from tests.connector.lake import append_parts, create_lake_table, spread_ids
from tests.server.rig import RunningServer, run_server
from tests.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ARROW = {"Accept": "application/vnd.apache.arrow.stream"}
LONG_STATEMENT = "SELECT count(*) FROM " + ", ".join(f"db.t t{n}" for n in range(12))
"""A join of 12 times the same 60 rows, which runs longer than any test."""
GRANTS = (
    Grant("root", "admin"),
    Grant("wendy", "writer", ("db",)),
    Grant("rita", "reader", ("db",)),
    Grant("olga", "reader", ("other",)),
)


@dataclass
class ServerWithTokens:
    """A server and the tokens of its principals."""

    server: RunningServer
    tokens: dict[str, str]

    @property
    def api(self) -> Api:
        return Api(self.server)

    async def run_sql(
        self, principal: str, statement: str, *, headers: dict[str, str] | None = None, **options: Any
    ) -> Answer:
        request_headers = {"Authorization": f"Bearer {self.tokens[principal]}"} if principal else {}
        return await self.api(
            "POST", "/api/v1/sql", {"statement": statement, **options}, headers={**request_headers, **(headers or {})}
        )


def list_workers() -> list[psutil.Process]:
    """Return the processes that run statements now: the children of the workers' parent."""
    parents = [child for child in psutil.Process().children() if STATEMENT_WORKER in _read_arguments(child)]
    return [child for parent in parents for child in parent.children() if _is_running(child)]


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _read_arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with a table.

    A server without logins wrote the table, and then tokens were added to the home. The tests only read the home.
    """
    folder = tmp_path_factory.mktemp("sql")
    asyncio.run(_create_tables(folder))
    return folder


async def _create_tables(folder: Path) -> None:
    async with run_server(folder) as server:
        await asyncio.to_thread(create_lake_table, server.url)
        await asyncio.to_thread(append_parts, server.url, "db.t", spread_ids(3))
        await asyncio.to_thread(create_lake_table, server.url, "db.huge_totals")
        await asyncio.to_thread(append_parts, server.url, "db.huge_totals", spread_ids(1))
        await _commit_stated_totals(Api(server), "9" * 5_000)
    tokens, clock = {}, SystemClock()
    async with open_store(f"sqlite:///{folder}/seamark.db", clock=clock, queue_limit=10) as store:
        for name in ("root", "wendy", "rita", "olga", "nobody"):
            grants = [grant for grant in GRANTS if grant.principal == name]
            tokens[name] = await create_token(store, clock, name, None, grants)
    (folder / "tokens.json").write_text(json.dumps(tokens))


async def _commit_stated_totals(api: Api, total: str) -> None:
    """Commit a snapshot to the table `db.huge_totals`.

    Its summary states `total` as the number of data files and as their size. The snapshot has the same files as before.
    """
    last_snapshot = (await api("GET", "/v1/namespaces/db/tables/huge_totals")).json["metadata"]["snapshots"][-1]
    summary = {**last_snapshot["summary"], "total-data-files": total, "total-files-size": total}
    changed_snapshot = {
        "snapshot-id": 1,
        "parent-snapshot-id": last_snapshot["snapshot-id"],
        "sequence-number": 2,
        "summary": summary,
    }
    updates = [
        {"action": "add-snapshot", "snapshot": {**last_snapshot, **changed_snapshot}},
        {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": 1},
    ]
    assert (
        await api("POST", "/v1/namespaces/db/tables/huge_totals", {"requirements": [], "updates": updates})
    ).status == 200


@asynccontextmanager
async def open_server_with_tokens(home: Path, **settings: Any) -> AsyncIterator[ServerWithTokens]:
    async with run_server(home, auth="token", **settings) as server:
        yield ServerWithTokens(server, json.loads((home / "tokens.json").read_text()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server_with_tokens(home: Path) -> AsyncIterator[ServerWithTokens]:
    """Yield a server that the tests share, because each start of a server also starts a process with DuckDB."""
    async with open_server_with_tokens(home, rights_recheck_s=0.1) as server_with_tokens:
        yield server_with_tokens


async def test_reader_gets_the_rows_and_the_read_statistics(server_with_tokens: ServerWithTokens) -> None:
    answer = await server_with_tokens.run_sql(
        "rita", "SELECT id, country FROM db.t WHERE id < 3 ORDER BY id DESC", id="mine"
    )
    assert answer.status == 200, answer.raw
    assert answer.json["rows"] == [[2, "c2"], [1, "c1"], [0, "c0"]]
    assert answer.json["columns"] == [{"name": "id", "type": "bigint"}, {"name": "country", "type": "varchar"}]
    assert answer.json["complete"] is True
    assert answer.json["statement-id"] == answer.headers["X-Seamark-Statement"] == "mine"
    assert answer.json["tables"][0]["table"] == "db.t"
    streamed_answer = await server_with_tokens.run_sql("rita", "SELECT sum(id) AS s FROM t", headers=ARROW, schema="db")
    streamed_rows = pa.ipc.open_stream(streamed_answer.raw).read_all()
    assert streamed_rows.to_pylist() == [{"s": sum(range(60))}]
    plan = (await server_with_tokens.run_sql("rita", "SELECT * FROM db.t WHERE id = 1", explain=True)).json
    assert (plan["engine"], plan["tables"][0]["considered-files"]) == ("duckdb", 3)
    assert "rows" not in plan


async def test_statement_runs_with_the_rights_of_the_caller(server_with_tokens: ServerWithTokens) -> None:
    for principal, status in (("rita", 200), ("wendy", 200), ("root", 200), ("olga", 403), ("nobody", 403), ("", 401)):
        assert (await server_with_tokens.run_sql(principal, "SELECT count(*) FROM db.t")).status == status, principal
    # The answer does not reveal whether a table exists that the caller may not read.
    answers = [await server_with_tokens.run_sql("olga", f"SELECT 1 FROM db.{name}") for name in ("t", "nothing")]
    assert answers[0].raw.replace(b"db.t", b"") == answers[1].raw.replace(b"db.nothing", b"")


REFUSED_STATEMENTS = (
    ("DELETE FROM db.t", 400, "Only queries"),
    ("DROP TABLE db.t", 400, "Only queries"),
    ("INSERT INTO db.t VALUES (1, 'x', 2)", 400, "Only queries"),
    ("SELECT 1; SELECT 2", 400, "has 2 statements"),
    ("COPY (SELECT 1) TO '/tmp/x'", 400, ""),
    ("ATTACH '/tmp/x.db'", 400, ""),
    ("INSTALL httpfs", 400, ""),
    ("SET threads = 100", 400, ""),
    ("SELECT * FROM read_csv('/etc/passwd')", 400, "not translated"),
    ("SELECT getenv('HOME')", 400, "not translated"),
    ("SELECT * FROM '/etc/passwd'", 400, ""),
    ('SELECT * FROM "/etc"."passwd"', 404, "does not exist"),
    ("SELECT * FROM db.nothing", 404, "does not exist"),
    ("SELECT * FROM x.db.t", 400, "the catalog is"),
    ("SELECT nope FROM db.t", 400, "does not exist"),
    ("SELECT id / 0 FROM db.t", 400, "Division by zero"),
    ("", 400, ""),
    ("SELECT " + "(" * 9000, 400, ""),
)
INVALID_BODIES: tuple[dict[str, Any], ...] = (
    {},
    {"statement": 1},
    {"statement": "SELECT 1", "id": "a b"},
    {"statement": "SELECT 1", "max-rows": 0},
    {"statement": "SELECT 1", "engine": "trino"},
)


async def test_statement_that_may_not_run_gets_400_or_404(server_with_tokens: ServerWithTokens) -> None:
    for statement, status, reason in REFUSED_STATEMENTS:
        answer = await server_with_tokens.run_sql("root", statement)
        assert answer.status == status, (statement, answer.raw)
        assert reason in answer.json["error"]["message"], statement
    headers = {"Authorization": f"Bearer {server_with_tokens.tokens['rita']}"}
    for body in INVALID_BODIES:
        assert (await server_with_tokens.api("POST", "/api/v1/sql", body, headers=headers)).status == 400, body


DATE_BEYOND_9999 = "DATE '9999-12-31' + INTERVAL '1' DAY"


OUT_OF_RANGE: list[tuple[str, object]] = [
    (f"SELECT {DATE_BEYOND_9999}", "+10000-01-01"),
    (f"SELECT CAST({DATE_BEYOND_9999} AS timestamp) + INTERVAL '1' HOUR", "+10000-01-01 01:00:00"),
    ("SELECT DATE '0001-01-01' - INTERVAL '1' DAY", "0000-12-31"),
    ("SELECT TIMESTAMP '9999-12-31 23:00:00 UTC' + INTERVAL '2' HOUR", "+10000-01-01 01:00:00 UTC"),
    (f"SELECT max({DATE_BEYOND_9999}) FROM db.t", "+10000-01-01"),
    (f"SELECT year({DATE_BEYOND_9999}) FROM db.t LIMIT 1", 10_000),
    ("SELECT DATE '9999-12-31' + INTERVAL '100000' YEAR", "+109999-12-31"),
    ("SELECT TIMESTAMP '9999-12-31 00:00:00' + INTERVAL '100000' YEAR * 9", None),
    ("SELECT TIMESTAMP '9999-12-31 00:00:00'" + 3 * " + INTERVAL '99999' YEAR", None),
    ("SELECT 9223372036854775807 + 1", None),
    ("SELECT -(-9223372036854775808)", None),
    ("SELECT CAST(9223372036854775807 AS integer)", None),
    ("SELECT CAST(12345.6 AS decimal(3, 1))", None),
    ("SELECT 1 / 0", None),
    ("SELECT UUID '1-2'", None),
    ("SELECT 1__0", None),
]
"""Statements, each with its answer, or None if the statement fails."""


@pytest.mark.slow
async def test_value_out_of_range_gets_an_answer_or_a_400(server_with_tokens: ServerWithTokens) -> None:
    for statement, expected_value in OUT_OF_RANGE:
        answer = await server_with_tokens.run_sql("rita", statement)
        if expected_value is None:
            error = answer.status, answer.json["error"]["type"]
            assert error == (400, "BadRequestException"), (statement, answer.raw)
        else:
            assert (answer.status, answer.json["rows"]) == (200, [[expected_value]]), statement


async def test_query_ignores_huge_totals_in_a_snapshot_summary(server_with_tokens: ServerWithTokens) -> None:
    answer = await server_with_tokens.run_sql("rita", "SELECT count(*) FROM db.huge_totals JOIN db.t USING (id)")
    assert (answer.status, answer.json.get("rows")) == (200, [[20]]), answer.raw


@pytest.mark.slow
async def test_size_of_answers_is_limited(home: Path) -> None:
    async with open_server_with_tokens(
        home, sql_rows_limit=10, sql_time_s=20, sql_bytes_limit=2000
    ) as server_with_tokens:
        assert (await server_with_tokens.run_sql("rita", "SELECT id FROM db.t LIMIT 10")).status == 200
        refusal = await server_with_tokens.run_sql("rita", "SELECT id FROM db.t")
        assert refusal.status == 400
        assert "sql_rows_limit" in refusal.json["error"]["message"]
        partial_answer = await server_with_tokens.run_sql("rita", "SELECT id FROM db.t", **{"max-rows": 4})
        assert (len(partial_answer.json["rows"]), partial_answer.json["complete"]) == (4, False)
        wide_statement = "SELECT " + ", ".join(f"'{'x' * 90}' AS c{n}" for n in range(40))
        assert "sql_bytes_limit" in (await server_with_tokens.run_sql("rita", wide_statement)).json["error"]["message"]


async def test_statement_ends_at_its_time_limit_and_leaves_no_process(home: Path) -> None:
    async with open_server_with_tokens(home, sql_time_s=1) as server_with_tokens:
        answer = await server_with_tokens.run_sql("rita", LONG_STATEMENT)
        assert answer.status == 400, answer.raw
        assert "sql_time_s" in answer.json["error"]["message"]
        await until(lambda: not list_workers())


@pytest.mark.slow
async def test_token_of_a_statement_is_issued_after_its_process_has_started(
    server_with_tokens: ServerWithTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token ends with the time limit of the statement.

    A statement that has waited for a slot, or for a slow start of its process, must still have its whole time.
    """
    steps: list[str] = []
    start, issue = StatementWorkers.start, StatementTokens.issue

    async def record_start(workers: StatementWorkers) -> StatementWorker:
        worker = await start(workers)
        steps.append("start")
        return worker

    def record_issue(tokens: StatementTokens, *arguments: Any) -> str:
        steps.append("issue")
        return issue(tokens, *arguments)

    monkeypatch.setattr(StatementWorkers, "start", record_start)
    monkeypatch.setattr(StatementTokens, "issue", record_issue)
    assert (await server_with_tokens.run_sql("rita", "SELECT count(*) FROM db.t")).status == 200
    assert steps == ["start", "issue"]


@pytest.mark.slow
async def test_statements_of_a_principal_and_of_the_server_are_limited(home: Path) -> None:
    async with open_server_with_tokens(
        home, sql_statements_limit=2, sql_time_s=30, sql_queue_s=0.2
    ) as server_with_tokens:
        long_task = asyncio.create_task(server_with_tokens.run_sql("rita", LONG_STATEMENT, id="long"))
        await until(lambda: len(list_workers()) == 1)
        assert (await server_with_tokens.run_sql("rita", "SELECT 1")).status == 429
        assert (await server_with_tokens.run_sql("wendy", "SELECT 1")).status == 200
        await until(lambda: len(list_workers()) == 1)
        other_task = asyncio.create_task(server_with_tokens.run_sql("root", LONG_STATEMENT, id="long"))
        await until(lambda: len(list_workers()) == 2)
        assert (await server_with_tokens.run_sql("wendy", "SELECT 1")).status == 503
        for principal in ("rita", "root"):  # Two callers may give the same id to their statements.
            headers = {"Authorization": f"Bearer {server_with_tokens.tokens[principal]}"}
            assert (await server_with_tokens.api("DELETE", "/api/v1/sql/other", headers=headers)).status == 404
            assert (await server_with_tokens.api("DELETE", "/api/v1/sql/long", headers=headers)).status == 204
        for task in (long_task, other_task):
            assert "cancelled" in (await task).json["error"]["message"]
        await until(lambda: not list_workers())


@pytest.mark.slow
async def test_two_principals_cannot_use_all_statements(home: Path) -> None:
    async with open_server_with_tokens(home, sql_statements_limit=4, sql_queue_s=0.2) as server_with_tokens:
        long_tasks = [
            asyncio.create_task(server_with_tokens.run_sql(principal, LONG_STATEMENT))
            for principal in ("rita", "rita", "wendy", "wendy")
        ]
        await until(lambda: len(list_workers()) == 3)
        assert (await server_with_tokens.run_sql("root", "SELECT 1")).status == 200
        finished_tasks, _ = await asyncio.wait(long_tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status for task in finished_tasks] == [503]
        for task in long_tasks:
            task.cancel()
        await asyncio.gather(*long_tasks, return_exceptions=True)
        await until(lambda: not list_workers())


@pytest.mark.slow
async def test_statement_without_tables_ends_with_its_token(server_with_tokens: ServerWithTokens) -> None:
    headers = {"Authorization": f"Bearer {server_with_tokens.tokens['root']}"}
    grant = {"role": "reader", "namespace": ["db"]}
    answer = await server_with_tokens.api(
        "POST", "/api/v1/tokens", {"name": "vera", "grants": [grant]}, headers=headers
    )
    server_with_tokens.tokens["vera"] = answer.json["token"]
    rows = ", ".join(f"({number})" for number in range(60))
    long_statement = "SELECT count(*) FROM " + ", ".join(f"(VALUES {rows}) t{number}" for number in range(12))
    running_task = asyncio.create_task(server_with_tokens.run_sql("vera", long_statement))
    await until(lambda: len(list_workers()) == 1)
    assert (await server_with_tokens.api("DELETE", "/api/v1/tokens/vera", headers=headers)).status == 204
    assert (await running_task).status == 401
    await until(lambda: not list_workers())


async def test_disconnected_client_ends_its_statement(server_with_tokens: ServerWithTokens) -> None:
    leaving_task = asyncio.create_task(server_with_tokens.run_sql("rita", LONG_STATEMENT))
    await until(lambda: len(list_workers()) == 1)
    leaving_task.cancel()
    await asyncio.gather(leaving_task, return_exceptions=True)
    await until(lambda: not list_workers())


def _read_file_size_limits(worker: psutil.Process) -> list[list[str]]:
    lines = Path(f"/proc/{worker.pid}/limits").read_text().splitlines()
    return [line.split()[3:5] for line in lines if line.startswith("Max file size")]


async def test_worker_has_no_secret_and_ends_with_the_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAMARK_S3_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    async with open_server_with_tokens(home) as server_with_tokens:
        running_statement = asyncio.create_task(server_with_tokens.run_sql("rita", LONG_STATEMENT))
        await until(lambda: len(list_workers()) == 1)
        (worker,) = list_workers()
        environments = b"\0".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in (worker.pid, worker.ppid()))
        assert b"the-secret" not in environments
        assert b"SEAMARK_S3" not in environments
        # Each token of a statement begins with smq_.
        assert b"smq_" not in Path(f"/proc/{worker.pid}/cmdline").read_bytes()
        # Before the worker reads the statement, it limits the size of files that it writes to 0 bytes.
        await until(lambda: _read_file_size_limits(worker) == [["0", "0"]])
        # A fork copies only one thread, so the parent may have no second thread except one that waits in an allocator.
        assert psutil.Process(worker.ppid()).num_threads() <= 2
        running_statement.cancel()
        await asyncio.gather(running_statement, return_exceptions=True)
    await until(lambda: not _is_running(worker))


async def test_statement_that_needs_too_much_memory_does_not_affect_other_statements(home: Path) -> None:
    async with open_server_with_tokens(home, sql_memory_bytes=600 << 20) as server_with_tokens:
        text = f"'{'x' * 4000}' || CAST(a.id * 3600 + b.id * 60 + c.id AS varchar)"
        query = f"SELECT count(DISTINCT v) FROM (SELECT {text} AS v FROM db.t a, db.t b, db.t c) q"
        answer = await server_with_tokens.run_sql("rita", query)
        assert answer.status == 400, answer.raw
        assert "memory" in answer.json["error"]["message"].lower()
        assert (await server_with_tokens.run_sql("rita", "SELECT 1")).json["rows"] == [[1]]


@pytest.mark.parametrize(
    ("value", "host", "status"),
    [
        ("off", "127.0.0.1", 403),
        ("loopback", "0.0.0.0", 403),
        pytest.param("on", "0.0.0.0", 200, marks=pytest.mark.slow),
    ],
)
async def test_sql_is_disabled_beyond_loopback_unless_a_setting_enables_it(
    home: Path, value: str, host: str, status: int
) -> None:
    async with open_server_with_tokens(home, sql=value, host=host) as server_with_tokens:
        assert (await server_with_tokens.run_sql("root", "SELECT 1")).status == status
        answer = await server_with_tokens.api(
            "GET", "/api/v1/sql", headers={"Authorization": f"Bearer {server_with_tokens.tokens['olga']}"}
        )
        assert answer.json["is-on"] == (status == 200)
        assert "sql = on" in (answer.json["reason"] or "sql = on")


async def test_audit_log_has_each_statement_without_its_text(server_with_tokens: ServerWithTokens) -> None:
    for principal in ("rita", "olga"):
        await server_with_tokens.run_sql(
            principal, "SELECT count(*) FROM db.t", headers={"X-Request-Id": f"audited-{principal}"}
        )
    headers = {"Authorization": f"Bearer {server_with_tokens.tokens['root']}"}

    async def list_statement_records() -> list[Any]:
        answer = await server_with_tokens.api("GET", "/api/v1/audit?limit=100", headers=headers)
        return [
            record
            for record in answer.json["records"]
            if record["request-id"].startswith("audited-") and record["action"] == "runStatement"
        ]

    async with asyncio.timeout(60):
        while len(audit_records := await list_statement_records()) < 2:
            await asyncio.sleep(0.05)
    assert {(audit_record["who"], audit_record["status"]) for audit_record in audit_records} == {
        ("rita", 200),
        ("olga", 403),
    }
    assert "count" not in json.dumps(audit_records)


async def test_statement_token_allows_only_reading(server_with_tokens: ServerWithTokens) -> None:
    components = server_with_tokens.server.components
    login = await components.authenticator.find_login(server_with_tokens.tokens["wendy"])
    token = components.authenticator.statement_tokens.issue(login.principal, 60)
    headers = {"Authorization": f"Bearer {token}"}
    assert (await server_with_tokens.api("GET", "/v1/namespaces/db/tables/t", headers=headers)).status == 200
    assert (await server_with_tokens.api("DELETE", "/v1/namespaces/db/tables/t", headers=headers)).status == 403
    assert (await server_with_tokens.api("GET", "/v1/namespaces/other", headers=headers)).status in (403, 404)
    second_answer = await server_with_tokens.api("POST", "/api/v1/sql", {"statement": "SELECT 1"}, headers=headers)
    assert second_answer.status == 403
    for forged_token in (token[:-2] + "AA", "smq_", "smq_AAAA", "sms_" + token[4:]):
        answer = await server_with_tokens.api(
            "GET", "/v1/namespaces", headers={"Authorization": f"Bearer {forged_token}"}
        )
        assert answer.status == 401
    expired_token = components.authenticator.statement_tokens.issue(login.principal, -1)
    assert (
        await server_with_tokens.api("GET", "/v1/namespaces", headers={"Authorization": f"Bearer {expired_token}"})
    ).status == 401


async def test_worker_reads_no_file_outside_its_tables(
    server_with_tokens: ServerWithTokens, home: Path, tmp_path: Path
) -> None:
    """A symbolic link to a file outside the warehouse replaces a data file. The server's account may read this file."""
    data_path = next((home / "warehouse").rglob("t-*/**/*.parquet"))
    moved_path = tmp_path / "elsewhere.parquet"
    data_path.rename(moved_path)
    data_path.symlink_to(moved_path)
    answer = await server_with_tokens.run_sql("rita", "SELECT * FROM db.t")
    assert answer.status == 500
    assert "is outside the warehouse" in answer.json["error"]["message"]
    data_path.unlink()
    moved_path.rename(data_path)
    assert (await server_with_tokens.run_sql("rita", "SELECT * FROM db.t")).status == 200


EXPENSIVE_STATEMENTS = (
    "SELECT * FROM range(1000000000000)",
    "SELECT * FROM UNNEST(sequence(1, 1000000000)) AS u (x)",
    "SELECT repeat('x', 2000000000)",
    "SELECT length(concat(" + ", ".join(["'x'"] * 3000) + "))",
    "SELECT replace(replace(replace('" + "a" * 20_000 + "', 'a', '" + "b" * 20_000 + "'), 'b', 'cc'), 'c', 'dddd')",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT " + "-" * 5001 + "1",
    "SELECT " + "NOT " * 5000 + "TRUE",
    "SELECT " + "1 + " * 9000 + "1",
    "SELECT " + "(SELECT " * 500 + "1" + ")" * 500,
    "SELECT * FROM (" * 400 + "SELECT 1 AS a" + ")" * 400,
    "WITH "
    + ", ".join(f"w{n + 1} AS (SELECT a.x FROM w{n} a, w{n} b)" for n in range(40)).replace(
        "w1 AS (SELECT a.x FROM w0 a, w0 b)", "w1 AS (SELECT id AS x FROM db.t)"
    )
    + " SELECT count(*) FROM w40",
    "SELECT '" + "x" * 1_000_000 + "'",
    "SELECT " + ", ".join(["1"] * 15_000),
    "SELECT * FROM db.t WHERE id IN (" + ", ".join(["1"] * 15_000) + ")",
    "SELECT CAST('9' AS DECIMAL(38, 0)) * " + "99999999999999999999 * " * 50 + "1",
    "SELECT * FROM db.t WHERE s LIKE '" + "%_" * 5_000 + "'",
    "SELECT id FROM db.t GROUP BY CUBE (" + ", ".join(["id"] * 60) + ")",
    "SELECT \x00 FROM db.t",
    "SELECT 1;" * 2_000,
    "/*" * 40_000,
    "'" * 80_001,
)
"""Statements that need much time, memory or depth, or that are incomplete."""


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
async def test_expensive_statement_gets_a_400_or_an_answer_and_leaves_no_process(home: Path, step: int) -> None:
    async with run_server(home, sql_time_s=1.0, sql_memory_bytes=256 << 20) as server:
        server_with_tokens = ServerWithTokens(server, {})
        for statement in EXPENSIVE_STATEMENTS[::step]:
            answer = await server_with_tokens.run_sql("", statement, **{"max-rows": 10})
            assert answer.status in (200, 400), (statement[:100], answer.status, answer.raw[:500])
            assert len(answer.raw) < 1 << 20, statement[:100]  # With at most 10 rows, 1 MiB is more than enough.
        async with asyncio.timeout(120):  # A busy machine sometimes needs more than a second.
            while (answer := await server_with_tokens.run_sql("", "SELECT count(*) AS n FROM db.t")).status != 200:
                assert "sql_time_s" in answer.json["error"]["message"]
        assert answer.json["rows"] == [[60]]
        await until(lambda: not list_workers())


async def test_statement_is_cancelled_only_by_its_owner(server_with_tokens: ServerWithTokens) -> None:
    running_task = asyncio.create_task(server_with_tokens.run_sql("rita", LONG_STATEMENT, id="long"))
    await until(list_workers)
    for principal in ("olga", "wendy", "root"):
        answer = await server_with_tokens.api(
            "DELETE", "/api/v1/sql/long", headers={"Authorization": f"Bearer {server_with_tokens.tokens[principal]}"}
        )
        assert answer.status == 404, principal
    assert not running_task.done()
    answer = await server_with_tokens.api(
        "DELETE", "/api/v1/sql/long", headers={"Authorization": f"Bearer {server_with_tokens.tokens['rita']}"}
    )
    assert (answer.status, (await running_task).status) == (204, 400)
