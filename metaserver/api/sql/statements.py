"""Serves SQL: the routes run a query and cancel it.

A statement has exactly the rights of its caller. The server checks that the caller may read some namespace, and gives
the statement to a worker process with a token that can only read what the caller can read. The worker loads and plans
each table through the routes of the server, which check the right on its namespace. No part of a statement runs in the
server's process. The text that reaches DuckDB is built from a list of allowed elements (`connector/sql/`).

Rows are streamed, and the worker waits while the client does not read. An error before the first bytes becomes an error
answer. After an error that follows them, the server closes the connection, so that no client mistakes a partial answer
for a complete answer.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
from aiohttp import web

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, ClientGone, Forbidden, NotFound, SeamarkError
from seamark.metaserver.access.guard import is_loopback
from seamark.metaserver.access.principal import ANONYMOUS
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.worker_tokens import StatementTokens
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Answer, Call, Check, Route
from seamark.metaserver.api.sql.fair_slots import FairSlots
from seamark.metaserver.api.sql.protocol import (
    DATA,
    END,
    HEAD,
    Format,
    StatementColumn,
    StatementHead,
    StatementPlan,
    StatementRequest,
)
from seamark.metaserver.api.sql.workers import StatementWorker, StatementWorkers
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import TABLE
from seamark.metaserver.timeline.statement_lineage import StatementRun

ARROW = "application/vnd.apache.arrow.stream"
ID_CHARACTERS_MAX = 64
CUBE_USES = ("on", "exact", "off")
_POLL_S = 0.25
"""The seconds for which the server waits for the worker before it checks whether the client is still connected."""
_TOKEN_SPARE_S = 5.0
"""The time for which the token of a statement is valid in addition to the time limit of the statement."""
_SQL_IS_OFF = "SQL is off on this server; an operator switches it on with the setting sql = on"
_SQL_IS_NOT_INSTALLED = "This server cannot run SQL: an operator installs it with pip install 'seamark[duckdb]'"


class StatementBody(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request that runs a statement."""

    statement: Annotated[str, doc("The SQL query.", examples=["SELECT count(*) FROM shop.orders"])]
    schema: Annotated[
        str | None,
        doc("The namespace of tables that the query names without a namespace. Dots separate its levels."),
    ] = None
    id: Annotated[
        str | None,
        doc(f"The name for canceling the statement: up to {ID_CHARACTERS_MAX} letters, digits, - or _."),
    ] = None
    max_rows: Annotated[
        int | None, doc("The maximum number of rows of a JSON answer. `complete` states whether there are more rows.")
    ] = None
    explain: Annotated[bool, doc("Whether the statement is only planned and not run.")] = False
    cubes: Annotated[
        str,
        doc(
            "Whether cubes answer aggregates. `exact` excludes sums of floats, and averages of floats or integers.",
            enum=["on", "exact", "off"],
        ),
    ] = "on"


class StatementRows(StatementPlan, frozen=True, rename="kebab"):
    """The JSON answer of a statement, for the OpenAPI document only. The worker writes the JSON without this class."""

    columns: tuple[StatementColumn, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    complete: Annotated[bool, doc("Whether the answer has all rows. It is false if `max-rows` left out rows.")] = True


class SqlState(msgspec.Struct, frozen=True, rename="kebab"):
    """The state of SQL on the server, and the limits of statements."""

    is_on: Annotated[bool, doc("Whether this server runs statements.")]
    reason: Annotated[
        str | None,
        doc("The reason why the server runs no statements, with the setting that enables SQL. Null if it runs them."),
    ]
    rows_limit: Annotated[int, doc("The maximum number of rows of an answer (setting sql_rows_limit).")]
    bytes_limit: Annotated[int, doc("The maximum size of an answer in bytes (setting sql_bytes_limit).")]
    seconds_limit: Annotated[float, doc("The maximum duration of a statement in seconds (setting sql_time_s).")]


class RunningStatements:
    """Limits the statements of this process, and cancels them."""

    def __init__(self, settings: Settings, worker_module: str) -> None:
        self.slots = FairSlots("SQL statements at once", settings.sql_statements_limit)
        self._queue_s = settings.sql_queue_s
        self.workers = StatementWorkers(
            worker_module, memory_bytes=settings.sql_memory_bytes, time_s=settings.sql_time_s
        )
        self.is_on = settings.sql == "on" or (settings.sql == "loopback" and is_loopback(settings.host))
        self._cancel_events: dict[tuple[str, str], asyncio.Event] = {}

    @asynccontextmanager
    async def hold_slot(self, principal: str, statement_id: str) -> AsyncIterator[asyncio.Event]:
        """Hold a slot for a statement. The yielded event is set when the statement is cancelled.

        Raises:
            RetryLater: No slot became free in time, or too many statements wait.
            TooManyRequests: The statements of the principal use its whole share.
            BadRequest: The id is in use, or the statement was cancelled while it waited.
        """
        key, holder = (principal, statement_id), None if principal == ANONYMOUS.name else principal
        if key in self._cancel_events:
            raise BadRequest(f"A statement with the id {statement_id} is running; choose another id")
        cancel_event = self._cancel_events[key] = asyncio.Event()
        try:
            async with self.slots.hold_slot(holder, self._queue_s):
                if cancel_event.is_set():
                    raise BadRequest("The statement was cancelled")
                yield cancel_event
        finally:
            del self._cancel_events[key]

    def cancel(self, principal: str, statement_id: str) -> bool:
        """Cancel a statement of the principal, and return whether it was running or waiting for a slot."""
        cancel_event = self._cancel_events.get((principal, statement_id))
        if cancel_event is None:
            return False
        cancel_event.set()
        return True


RUNNING: web.AppKey[RunningStatements] = web.AppKey("running-statements", RunningStatements)


@Route(
    "POST",
    "/api/v1/sql",
    "runStatement",
    "Run a SQL query and stream its rows",
    tags=("sql",),
    answers=(
        ResponseSpec(200, "The rows as JSON, or as an Arrow IPC stream for `Accept: " + ARROW + "`.", StatementRows),
        ResponseSpec(400, "The statement is invalid, is not a query, is not supported, or exceeds a limit."),
        ResponseSpec(403, "SQL is off, or the caller may not read a table."),
        ResponseSpec(404, "A table does not exist."),
        ResponseSpec(429, "The statements of the caller use its whole share."),
        ResponseSpec(
            503, "The server runs the maximum number of statements, and no statement ended within sql_queue_s."
        ),
    ),
    check=Check.SOMEWHERE,
    is_secret=True,
    streams=True,
    waits=True,
).takes(StatementBody)
async def run_statement(call: Call, body: StatementBody) -> Answer:
    """Run a SQL query and stream its rows."""
    return await answer_statement(call, body)


async def answer_statement(call: Call, body: StatementBody) -> Answer:
    """Run a statement with the rights of the caller, and stream its rows.

    Raises:
        SeamarkError: SQL is off, or the statement fails before its first rows.
    """
    check_statements_run(call)
    statements = call.app[RUNNING]
    request = _build_request(call, body)
    async with statements.hold_slot(call.principal.name, request.id) as cancel_event:
        worker = await statements.workers.start()
        # The token is issued last, so that its lifetime begins after the wait for a slot and the start of a process.
        authorized_request = msgspec.structs.replace(request, token=_issue_token(call))
        try:
            exchange = _Exchange(call, worker, request.format, cancel_event)
            async with asyncio.timeout(request.time_s), _record_run(call, request, exchange, cancel_event):
                worker.ask(authorized_request)
                return await exchange.answer()
        except TimeoutError:
            raise BadRequest(
                f"The statement ran longer than {request.time_s:g} s (sql_time_s) and was ended; read fewer rows"
            ) from None
        finally:
            worker.close()


@asynccontextmanager
async def _record_run(
    call: Call, request: StatementRequest, exchange: _Exchange, cancel_event: asyncio.Event
) -> AsyncIterator[None]:
    """Record the run of a statement for OpenLineage, if there is a receiver.

    The outcome is ABORT if the client cancelled the statement or left, or if an unexpected error ended it. Other errors
    are FAIL.
    """
    runs, clock = call.components.statement_runs, call.components.clock
    if runs is None or request.format == "explain":
        yield
        return
    started_ms, outcome, kind = clock.now_ms(), "COMPLETE", ""
    try:
        yield
    except BaseException as error:
        was_interrupted = cancel_event.is_set() or not isinstance(error, SeamarkError) or isinstance(error, ClientGone)
        outcome = "ABORT" if was_interrupted else "FAIL"
        kind = error.kind if isinstance(error, SeamarkError) else type(error).__name__
        raise
    finally:
        run = StatementRun(
            str(clock.uuid7()),
            request.statement,
            started_ms,
            clock.now_ms(),
            outcome,
            kind,
            exchange.allowed_tables,
            principal="" if call.principal is ANONYMOUS else call.principal.name,
        )
        runs.record(run)


@Route(
    "DELETE",
    "/api/v1/sql/{statement}",
    "cancelStatement",
    "Cancel a statement of the caller that this server process runs",
    tags=("sql",),
    answers=(
        ResponseSpec(204, "The statement is cancelled."),
        ResponseSpec(404, "The caller does not run a statement with this id."),
    ),
    check=Check.LOGIN,
)
async def cancel_statement(call: Call) -> None:
    """Cancel a running statement of the caller."""
    statement_id = call.variables["statement"]
    if not call.app[RUNNING].cancel(call.principal.name, statement_id):
        raise NotFound(f"{call.principal.name} runs no statement with the id {statement_id[:ID_CHARACTERS_MAX]!r}")


@Route(
    "GET",
    "/api/v1/sql",
    "loadSqlState",
    "State whether this server runs SQL, and the limits of a statement",
    tags=("sql",),
    answers=(ResponseSpec(200, "The state and the limits", SqlState),),
    check=Check.LOGIN,
)
async def load_sql_state(call: Call) -> SqlState:
    """Return whether this server runs SQL, and the limits of a statement."""
    settings = call.components.settings
    reason = None if call.app[RUNNING].is_on else _SQL_IS_OFF
    if reason is None and not _is_installed():
        reason = _SQL_IS_NOT_INSTALLED
    return SqlState(
        reason is None, reason, settings.sql_rows_limit, settings.sql_bytes_limit, float(settings.sql_time_s)
    )


def _is_installed() -> bool:
    """Return whether DuckDB, which runs the statements, is installed."""
    return importlib.util.find_spec("duckdb") is not None


def check_statements_run(call: Call) -> None:
    """Check that the caller may run statements on this server.

    Raises:
        Forbidden: SQL is off, or the caller is a statement.
        BadRequest: The server cannot run SQL.
    """
    if not call.app[RUNNING].is_on:
        raise Forbidden(_SQL_IS_OFF)
    if call.headers.get("Authorization", "").partition(" ")[2].strip().startswith(StatementTokens.prefix):
        raise Forbidden("A statement cannot run another statement")
    if not _is_installed():
        raise BadRequest(_SQL_IS_NOT_INSTALLED)


def _issue_token(call: Call) -> str | None:
    """Return a token with which the worker acts for the caller, or None if the server has no logins."""
    authenticator = call.components.authenticator
    if authenticator.open:
        return None
    # The token outlives the statement by a few seconds, so that the statement does not fail near its time limit.
    return authenticator.statement_tokens.issue(call.principal, call.components.settings.sql_time_s + _TOKEN_SPARE_S)


def _build_request(call: Call, body: StatementBody) -> StatementRequest:
    """Return the request for the worker, without a token.

    Raises:
        BadRequest: A field is invalid.
    """
    settings = call.components.settings
    statement_id = str(call.components.clock.uuid4()) if body.id is None else body.id
    id_letters = statement_id.replace("-", "").replace("_", "")
    if not (statement_id.isascii() and id_letters.isalnum() and len(statement_id) <= ID_CHARACTERS_MAX):
        raise BadRequest(f"id is {statement_id[:80]!r}; it must have 1 to {ID_CHARACTERS_MAX} letters, digits, - or _")
    if body.cubes not in CUBE_USES:
        raise BadRequest(f"cubes is {body.cubes[:80]!r}; it must be one of {', '.join(CUBE_USES)}")
    kind: Format = "explain" if body.explain else "arrow" if ARROW in call.headers.get("Accept", "") else "json"
    if body.max_rows is not None and (kind == "arrow" or not 1 <= body.max_rows <= settings.sql_rows_limit):
        raise BadRequest(
            f"max-rows is {body.max_rows}; it must be from 1 to {settings.sql_rows_limit:,} (sql_rows_limit), and "
            "needs JSON"
        )
    return StatementRequest(
        statement=body.statement,
        schema=body.schema,
        id=statement_id,
        cubes=body.cubes,
        format=kind,
        url=_make_own_url(call, settings),
        certificates=_find_own_certificates(call, settings),
        token=None,
        rows_max=settings.sql_rows_limit if body.max_rows is None else body.max_rows,
        truncates=body.max_rows is not None,
        bytes_max=settings.sql_bytes_limit,
        time_s=settings.sql_time_s,
        memory_bytes=settings.sql_memory_bytes,
        threads=settings.sql_threads,
        roots=call.components.catalog.context.warehouse.local_folders,
    )


def _make_own_url(call: Call, settings: Settings) -> str:
    """Return the URL by which the worker reaches this server.

    The URL has the address of the setting `services_url` or, without it, the address at which the request arrived. It
    ends with the path of the warehouse. No part of it comes from a header.

    Raises:
        ClientGone: The client has closed the connection.
    """
    base_path = call.components.base_path
    if settings.services_url:
        return settings.services_url.rstrip("/") + base_path
    transport = call.request.transport
    if transport is None:
        raise ClientGone("The client closed the connection before the answer")
    host, port = transport.get_extra_info("sockname")[:2]
    scheme = "https" if settings.tls_cert else "http"
    return (f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}") + base_path


def _find_own_certificates(call: Call, settings: Settings) -> str:
    """Return the certificates that a worker trusts when it connects to the bound address of this server.

    The text is empty without TLS. It is also empty if the worker connects to `services_url`: the certificates are valid
    for its host name, so the worker checks them in the usual way. They may not be valid for the bound address.
    """
    certificate = call.components.certificate
    return "" if certificate is None or settings.services_url else certificate.leaves()


class _Exchange:
    """Passes one statement and its answer between the client and the worker."""

    def __init__(self, call: Call, worker: StatementWorker, kind: Format, cancel_event: asyncio.Event) -> None:
        self._call = call
        self._worker = worker
        self._content_type = ARROW if kind == "arrow" else "application/json"
        self._cancel_event = cancel_event
        self._tables: tuple[Securable, ...] = ()
        self.allowed_tables: tuple[tuple[str, ...], ...] = ()
        """The tables that the statement reads, after the rights of the caller on them were checked."""
        self._checked_s = call.components.clock.monotonic()

    async def answer(self) -> web.StreamResponse:
        """Stream the answer of the worker to the client.

        Raises:
            BadRequest: The worker sent no answer, or only a part of it.
        """
        call = self._call
        kind, content = await self._read_frame()
        if kind != HEAD:
            raise BadRequest("The statement has no answer")
        head = convert_json(content, StatementHead)
        self._tables = tuple(Securable(path[:-1], TABLE, path[-1]) for path in head.tables)
        if self._tables:
            await call.allow(*self._tables)
            self.allowed_tables = head.tables
        else:
            call.is_checked = True  # No table is read, and the caller may read some namespace.
        response = web.StreamResponse(
            headers={
                "Content-Type": self._content_type,
                "Cache-Control": "no-store",
                "X-Seamark-Statement": head.plan.statement_id,
                "X-Request-Id": call.request_id,
                "Server": "seamark",
            }
        )
        kind, content = await self._read_frame()  # Up to here, an error becomes an error answer.
        await response.prepare(call.request)
        try:
            while kind == DATA:
                await response.write(content)
                kind, content = await self._read_frame()
            if kind != END:
                raise BadRequest("The answer of the statement is not complete")
            await response.write_eof()
        except BaseException:
            if call.request.transport is not None:
                call.request.transport.abort()
            raise
        return response

    async def _read_frame(self) -> tuple[bytes, bytes]:
        """Return the next frame, a message from the worker, with its kind and content.

        While the frame has not arrived, the caller and its rights are checked every `_POLL_S`.

        Raises:
            ClientGone: The client has closed the connection.
            BadRequest: The statement was cancelled.
            Unauthenticated: The login of the caller has ended.
            Forbidden: The caller has lost its right.
        """
        frame_task = asyncio.create_task(self._worker.read_frame())
        cancel_task = asyncio.create_task(self._cancel_event.wait())
        try:
            while True:
                await asyncio.wait({frame_task, cancel_task}, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if self._cancel_event.is_set():
                    raise BadRequest("The statement was cancelled")
                await self._check_caller()
                if frame_task.done():
                    return frame_task.result()
        finally:
            frame_task.cancel()
            cancel_task.cancel()
            await asyncio.gather(frame_task, cancel_task, return_exceptions=True)

    async def _check_caller(self) -> None:
        """Check that the client is connected and that the caller still has its rights.

        Raises:
            ClientGone: The client has closed the connection.
        """
        call = self._call
        transport = call.request.transport
        if transport is None or transport.is_closing():
            raise ClientGone("The client closed the connection before the answer")
        now_s = call.components.clock.monotonic()
        if now_s - self._checked_s >= call.components.settings.rights_recheck_s:
            self._checked_s = now_s
            await call.recheck(*self._tables)


async def _open_statements(app: web.Application) -> AsyncIterator[None]:
    """Create the limits and the workers of statements, and end the workers when the server stops."""
    app[RUNNING] = RunningStatements(app[COMPONENTS].settings, app[COMPONENTS].extensions.statement_worker)
    try:
        yield
    finally:
        await app[RUNNING].workers.close()


def add_components(app: web.Application) -> None:
    app.cleanup_ctx.append(_open_statements)
