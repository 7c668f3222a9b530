"""Runs statements that maintain the files of a table (`connector/jobs/statements.py`), which Trino does not support.

The proxy answers these statements in Trino's protocol. Trino decides whether the client may run them. For this purpose,
the proxy first runs statements in Trino with the client's identity. They read and change nothing:

- For MERGE FILES: `EXPLAIN (TYPE VALIDATE) ALTER TABLE … EXECUTE optimize`, which requires the same right.
- For DROP COLUMNS: `EXPLAIN (TYPE VALIDATE) UPDATE … SET column = NULL`, which requires the right to update the
  columns.
- For both: `SELECT … WHERE FALSE AND (predicate)` with the same columns. The proxy reads the access rules of this
  query. If a row filter or a column mask is in force, the statement is refused, because the job affects all rows.

The job runs with the proxy's token in a separate process, which is killed if the client cancels the statement. Only the
proxy that received a statement can answer requests for it. If the proxy stops, the job ends, but the table is not
damaged.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

import aiohttp
import msgspec
import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.jobs.statements import (
    DropColumns,
    StatementAnswer,
    StatementJob,
    StatementResult,
    TableStatement,
    parse_statement,
)
from seamark.connector.plans.quotes import quote_name
from seamark.connector.trino.protocol.access_rules import PlanInputs, RuleDecision
from seamark.connector.trino.protocol.coordinators import PROXY_PATH, Coordinator
from seamark.connector.trino.protocol.forwarder import read_at_most
from seamark.connector.trino.protocol.sessions import Session, read_session
from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.decoding import convert_json

PATH = f"{PROXY_PATH}/statements"
WAITING_MAX = 10
"""The maximum number of waiting statements, as a multiple of the maximum number of running jobs."""
_POLL_S = 1.0
"""The maximum time in seconds for which a response waits for the end of the job, as in Trino."""
_CHECK_S = 60.0
_ANSWER_BYTES = 1 << 20
"""The maximum size of a response of Trino to a check."""
_SHOWN_BYTES_MAX = 200
"""The maximum number of bytes of a response in an error message."""
_ENDED_MAX = 1000
"""The maximum number of finished statements whose results are stored for their clients."""
_ENDED_S = 600.0
"""The time in seconds for which results are stored."""
_ALTERS = re.compile(rb"\balter\b", re.IGNORECASE)
_NO_TABLE = re.compile(r"[$@~]")
_RULES = (
    "A row filter or a column mask of Trino is in force for this user, but the statement changes the files of all rows"
)
_COUNTS = ("nodes", "totalSplits", "queuedSplits", "runningSplits", "completedSplits", "planningTimeMillis")
_TIMES = ("analysisTimeMillis", "cpuTimeMillis", "wallTimeMillis", "queuedTimeMillis", "finishingTimeMillis")
_SIZES = (
    "physicalInputTimeMillis",
    "processedRows",
    "processedBytes",
    "physicalInputBytes",
    "physicalWrittenBytes",
    "internalNetworkInputBytes",
    "peakMemoryBytes",
    "spilledBytes",
)
_log = structlog.get_logger("seamark.trino-proxy")

Json = dict[str, Any]
Send = Callable[[str, str, bytes | None], Awaitable[aiohttp.ClientResponse]]
"""A function that sends a request to the coordinator with the client's identity.

Its arguments are the method, the path or URI, and the body.
"""
DecideByRules = Callable[[PlanInputs, str], Awaitable[RuleDecision]]
"""A function that decides by the access rules in force for a query."""
Run = Callable[[StatementJob], Awaitable[StatementAnswer]]


@dataclass(frozen=True)
class MaintenanceRequest:
    """A request to run a statement on a table of Seamark.

    Attributes:
        catalog: The name of the catalog in Trino.
        schema: The name of the schema in Trino.
        utc: Whether the time zone of the session is known to be UTC.
    """

    statement: TableStatement
    catalog: str
    schema: str
    utc: bool

    @property
    def table(self) -> str:
        return self.statement.table[-1]


class NotAllowed(Exception):
    """Raised if the statement is refused before its job starts.

    Attributes:
        error: The error in the form of Trino's protocol.
    """

    def __init__(self, error: Json) -> None:
        super().__init__(error.get("message", ""))
        self.error = error


@dataclass
class _Statement:
    """A statement whose job is waiting, running or finished."""

    began_s: float
    task: asyncio.Task[StatementAnswer]
    ended_s: float | None = None


class TableStatements:
    """Runs table statements. An instance belongs to one event loop.

    Attributes:
        jobs_max: The maximum number of jobs that run at the same time.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        catalogs: Collection[str],
        *,
        jobs_max: int,
        authorities: str | None = None,
        run: Run | None = None,
    ) -> None:
        self._url, self._token = url, token
        self._catalogs = frozenset(name.lower() for name in catalogs)
        self._jobs_max = jobs_max
        self._slots = asyncio.Semaphore(max(1, jobs_max))
        self._run_job = run or partial(run_in_process, authorities=authorities)
        self._statements: OrderedDict[str, _Statement] = OrderedDict()

    def may_be_table_statement(self, body: bytes) -> bool:
        """Return whether the body may be a statement that this proxy runs itself, such as MERGE FILES.

        The check is fast, and may return True for other statements.
        """
        return self._jobs_max > 0 and _ALTERS.search(body) is not None

    def _parse_request(
        self, body: bytes, headers: CIMultiDictProxy[str], *, trust_time_zone: bool
    ) -> tuple[MaintenanceRequest, Session] | None:
        """Return the statement and its session, or None if the body has to be sent to Trino.

        Args:
            body: The body of the request.
            headers: The headers of the request.
            trust_time_zone: Whether the time zone in the client's headers is the session's time zone.

        Raises:
            InvalidRequest: The statement is invalid.
        """
        try:
            statement = parse_statement(body.decode())
        except UnicodeDecodeError:
            return None
        if statement is None or len(statement.table) > 3:
            return None
        session = read_session(headers)
        if session.off:
            return None
        # The name may lack the catalog, or the catalog and the schema. The session has the missing levels.
        defaults = (session.catalog, session.schema)
        catalog, schema, table = (*defaults[: 3 - len(statement.table)], *(level.lower() for level in statement.table))
        if catalog not in self._catalogs or not schema or _NO_TABLE.search(table):
            return None
        levels = (*schema.split("."), table)
        utc = session.utc and trust_time_zone
        return MaintenanceRequest(msgspec.structs.replace(statement, table=levels), catalog, schema, utc), session

    async def start(
        self,
        body: bytes,
        headers: CIMultiDictProxy[str],
        send: Send,
        decide_by_rules: DecideByRules | None,
        base: str,
        *,
        trust_time_zone: bool,
    ) -> Json | None:
        """Start a statement and return the first response, or None if the body has to be sent to Trino.

        Args:
            body: The text of the statement.
            headers: The headers of the client's request.
            send: A function that sends a request to the coordinator with the client's identity.
            decide_by_rules: A function that decides by the access rules about a query, or None if Trino has no access
                rules.
            base: The URL at which the client reaches the proxy.
            trust_time_zone: Whether the time zone in the client's headers is the session's time zone.
        """
        try:
            table_statement = self._parse_request(body, headers, trust_time_zone=trust_time_zone)
        except InvalidRequest as error:
            return to_failed_answer(_make_error("SYNTAX_ERROR", error.message), base)
        if table_statement is None:
            return None
        request, session = table_statement
        if session.in_transaction:
            return to_failed_answer(
                _make_error("NOT_SUPPORTED", f"{_name_statement(request.statement)} is not supported in a transaction"),
                base,
            )
        self._forget_ended()
        try:
            self._check_waiting()
            async with asyncio.timeout(_CHECK_S):
                await _check_rights(request, send, decide_by_rules)
            self._check_waiting()  # Further statements may have arrived while the rights were checked.
        except NotAllowed as refusal:
            return to_failed_answer(refusal.error, base)
        except (aiohttp.ClientError, TimeoutError) as error:
            message = f"Trino did not answer whether this is allowed: {error or type(error).__name__}"
            return to_failed_answer(_make_error("GENERIC_INTERNAL_ERROR", message, "INTERNAL_ERROR"), base)
        statement_id = secrets.token_hex(16)
        job = StatementJob(self._url, self._token, request.statement, request.utc)
        self._statements[statement_id] = _Statement(time.monotonic(), asyncio.create_task(self._run_in_turn(job)))
        return self._answer(statement_id, base)

    async def answer(self, method: str, statement_id: str, base: str) -> web.Response:
        """Answer a client's request for a statement.

        A GET waits for a second or until the job ends, and returns the next response. A DELETE kills the job.
        """
        statement = self._statements.get(statement_id)
        if method not in ("GET", "DELETE"):
            return web.Response(status=405, headers={"Allow": "GET, DELETE"})
        if statement is None:
            return web.Response(status=404, text="The statement is unknown to this proxy\n")
        if method == "DELETE":
            del self._statements[statement_id]
            statement.task.cancel()
            return web.Response(status=204)
        await asyncio.wait((statement.task,), timeout=_POLL_S)
        if statement_id not in self._statements:  # The statement was cancelled while the response waited.
            return web.Response(status=404, text="The statement is unknown to this proxy\n")
        return make_json_response(self._answer(statement_id, base))

    async def close(self) -> None:
        """Cancel all statements, which ends the processes of their jobs, and wait for their end."""
        tasks = [statement.task for statement in self._statements.values()]
        self._statements.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_in_turn(self, job: StatementJob) -> StatementAnswer:
        async with self._slots:
            began_s = time.monotonic()
            try:
                answer = await self._run_job(job)
            except OSError as error:
                answer = StatementAnswer(error=f"The job did not start: {error}")
        _log.info(
            "table statement",
            table=".".join(job.statement.table),
            what=_name_statement(job.statement),
            seconds=round(time.monotonic() - began_s, 3),
            error=answer.error or None,
        )
        return answer

    def _answer(self, statement_id: str, base: str) -> Json:
        statement = self._statements[statement_id]
        answer: Json = {"id": statement_id, "infoUri": f"{base}{PATH}/{statement_id}", "warnings": []}
        if not statement.task.done():
            return {
                **answer,
                "nextUri": f"{base}{PATH}/{statement_id}",
                "stats": _make_stats("RUNNING", statement.began_s),
            }
        statement.ended_s = statement.ended_s or time.monotonic()
        answer_of_job = statement.task.result()
        if answer_of_job.result is None:
            return {
                **answer,
                "error": _make_error("GENERIC_USER_ERROR", answer_of_job.error),
                "stats": _make_stats("FAILED", statement.began_s),
            }
        signature = {"rawType": "bigint", "arguments": []}
        columns = [
            {"name": name, "type": "bigint", "typeSignature": signature} for name in get_type_hints(StatementResult)
        ]
        rows = [list(msgspec.structs.astuple(answer_of_job.result))]
        return {**answer, "columns": columns, "data": rows, "stats": _make_stats("FINISHED", statement.began_s)}

    def _check_waiting(self) -> None:
        running_count = sum(not statement.task.done() for statement in self._statements.values())
        if running_count >= self._jobs_max * (1 + WAITING_MAX):
            message = "Too many statements that maintain tables are waiting at this proxy; try again later"
            raise NotAllowed(_make_error("QUERY_QUEUE_FULL", message, "INSUFFICIENT_RESOURCES"))

    def _forget_ended(self) -> None:
        now_s = time.monotonic()
        ended_ids = [statement_id for statement_id, statement in self._statements.items() if statement.task.done()]
        for position, statement_id in enumerate(ended_ids):
            statement = self._statements[statement_id]
            statement.ended_s = statement.ended_s or now_s
            if now_s - statement.ended_s > _ENDED_S or position < len(ended_ids) - _ENDED_MAX:
                del self._statements[statement_id]


async def run_in_process(job: StatementJob, *, authorities: str | None = None) -> StatementAnswer:
    """Run a statement in a new process. If the task is cancelled, kill the process.

    Args:
        job: The statement and the server. It is sent to the process as JSON on its standard input.
        authorities: The path of a PEM file with the certificate authorities of the server's certificate.
    """
    environment = {"OMP_NUM_THREADS": "1", **({} if authorities is None else {"SEAMARK_CA": authorities})}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "seamark.connector.jobs.statement_runs",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        output, _ = await process.communicate(msgspec.json.encode(job))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return convert_json(output, StatementAnswer)
    except msgspec.MsgspecError:
        return StatementAnswer(error=f"The process of the job ended with status {process.returncode}")


async def _check_rights(request: MaintenanceRequest, send: Send, decide_by_rules: DecideByRules | None) -> None:
    """Check that the client has the rights to run the job, and that no access rule is in force for the table.

    Trino validates a statement that needs the same right as the job, without running it: an UPDATE of dropped columns,
    or `optimize` for any other job. Any row filter or column mask forbids the job, because it affects all rows.

    Raises:
        NotAllowed: Trino refuses a statement, or an access rule is in force.
    """
    table = ".".join(map(quote_name, (request.catalog, request.schema, request.table)))
    columns = list[str]()
    if isinstance(request.statement, DropColumns):
        columns = list(dict.fromkeys(name.partition(".")[0].lower() for name in request.statement.columns))
        assignments = ", ".join(f"{quote_name(column)} = NULL" for column in columns)
        validated_statement = f"UPDATE {table} SET {assignments}"  # noqa: S608
    else:
        validated_statement = f"ALTER TABLE {table} EXECUTE optimize"
    await run_at_trino(f"EXPLAIN (TYPE VALIDATE) {validated_statement}", send)
    column_list = ", ".join(map(quote_name, columns)) or "1"
    # The query contains the predicate, so that Trino refuses columns that the client may not read. It is
    # followed by a line break, because it may end with a comment.
    condition = "FALSE" if request.statement.where is None else f"FALSE AND ({request.statement.where}\n)"
    query = await run_at_trino(f"SELECT {column_list} FROM {table} WHERE {condition}", send)  # noqa: S608
    if decide_by_rules is not None:
        name = (request.catalog, request.schema.lower(), request.table.lower())
        inputs = PlanInputs({name: frozenset(columns)})
        decision = await decide_by_rules(inputs, query)
        if decision is not RuleDecision.NO_RULES:
            message = "The access rules of Trino could not be read" if decision is RuleDecision.UNKNOWN else _RULES
            raise NotAllowed(_make_error("PERMISSION_DENIED", message))


async def run_at_trino(statement: str, send: Send) -> str:
    """Run a statement in Trino to its end, and return the id of the query.

    Raises:
        NotAllowed: The statement fails, with Trino's error. Or Trino's response has another HTTP status than 200, or is
            too long. The error is then PERMISSION_DENIED.
        aiohttp.ClientPayloadError: Trino's response is not JSON.
    """
    response = await send("POST", "/v1/statement", statement.encode())
    while True:
        async with response:
            body, is_complete = await read_at_most(response.content, _ANSWER_BYTES)
        if response.status != 200 or not is_complete:
            text = " ".join(body[:_SHOWN_BYTES_MAX].decode("utf-8", "replace").split())
            raise NotAllowed(_make_error("PERMISSION_DENIED", f"Trino answered HTTP {response.status}: {text}"))
        try:
            answer = convert_json(body, dict[str, Any])
        except msgspec.MsgspecError:
            raise aiohttp.ClientPayloadError("the response is not JSON") from None
        if isinstance(answer.get("error"), Mapping):
            raise NotAllowed(dict(answer["error"]))
        if not isinstance(answer.get("nextUri"), str):
            return str(answer.get("id", ""))
        response = await send("GET", answer["nextUri"], None)


def to_failed_answer(error: Json, base: str) -> Json:
    """Return the only response to a statement that was refused."""
    statement_id = secrets.token_hex(16)
    return {
        "id": statement_id,
        "infoUri": f"{base}{PATH}/{statement_id}",
        "error": error,
        "stats": _make_stats("FAILED", time.monotonic()),
        "warnings": [],
    }


def make_json_response(answer: Json) -> web.Response:
    return web.Response(body=encode_json(answer), content_type="application/json")


def find_base_url(headers: CIMultiDict[str], coordinator: Coordinator) -> str:
    """Return the URL at which the client reaches the proxy.

    Args:
        headers: The headers that the coordinator receives.
        coordinator: The coordinator, whose path prefix is removed from the URL.
    """
    prefix = headers.get("X-Forwarded-Prefix", "").removesuffix(coordinator.prefix)
    return f"{headers['X-Forwarded-Proto']}://{headers['X-Forwarded-Host']}{prefix}"


def _name_statement(statement: TableStatement) -> str:
    return "DROP COLUMNS" if isinstance(statement, DropColumns) else "MERGE FILES"


_CODES = {
    "GENERIC_USER_ERROR": 0,
    "SYNTAX_ERROR": 1,
    "PERMISSION_DENIED": 4,
    "NOT_SUPPORTED": 13,
    "GENERIC_INTERNAL_ERROR": 65536,
    "QUERY_QUEUE_FULL": 131074,
}
"""The error codes of Trino's `StandardErrorCode`."""


def _make_error(name: str, message: str, kind: str = "USER_ERROR") -> Json:
    failure = {"type": "io.trino.spi.TrinoException", "message": message, "suppressed": [], "stack": []}
    return {
        "message": message,
        "errorCode": _CODES[name],
        "errorName": name,
        "errorType": kind,
        "failureInfo": failure,
    }


def _make_stats(state: str, began_s: float) -> Json:
    """Return the statistics of a response. They have all fields, because some clients require all of them."""
    elapsed_ms = int(1000 * (time.monotonic() - began_s))
    zero = dict.fromkeys((*_COUNTS, *_TIMES, *_SIZES), 0)
    return {"state": state, "queued": False, "scheduled": True, **zero, "elapsedTimeMillis": elapsed_ms}
