"""A proxy of Trino's client protocol in front of one or several coordinators.

Invariant: a client receives the same results as without the proxy. Requests are forwarded unchanged (`forwarder.py`),
except that a statement may be replaced by a statement with the same rows (`rewriter.py`). If the new statement fails
before it returns rows, the original statement is sent (`held_statements.py`). The header `X-Seamark-Plan` in the
response to a statement summarizes the changes.

Between requests, the proxy has no state except caches, counters and the leases to renew (`queued_statements.py`).
Therefore it can be killed at any time, and several proxies can run in parallel.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import quote

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict

from seamark.connector.client.names import check_url
from seamark.connector.plans.async_client import Name, check_audience, open_seamark
from seamark.connector.trino.protocol.accepted_logins import AcceptedLogins
from seamark.connector.trino.protocol.access_rules import PlanInputs, RuleDecision, decide_access
from seamark.connector.trino.protocol.checked_rights import CheckedRights
from seamark.connector.trino.protocol.column_reports import ColumnReports
from seamark.connector.trino.protocol.coordinators import PROXY_PATH, Coordinator, Coordinators, UnknownCoordinator
from seamark.connector.trino.protocol.forwarder import (
    HEADER_BYTES_MAX,
    Body,
    ClientBody,
    Forwarder,
    RefusedBody,
    ResponseHandler,
    make_error_response,
    make_response_headers,
    open_session,
    read_at_most,
    read_rest,
)
from seamark.connector.trino.protocol.held_statements import (
    FORBIDDEN,
    RULES_UNREAD,
    Failure,
    FollowedStatement,
    TrinoResponse,
    parse_target,
)
from seamark.connector.trino.protocol.metrics import ProxyMetrics
from seamark.connector.trino.protocol.plan_withdrawal import PlanSnapshotRef
from seamark.connector.trino.protocol.queued_statements import QueuedStatements
from seamark.connector.trino.protocol.sessions import set_prepared_statement
from seamark.connector.trino.protocol.statement_times import PlannedRead, StatementTimes
from seamark.connector.trino.protocol.table_statements import PATH as TABLE_STATEMENTS
from seamark.connector.trino.protocol.table_statements import (
    NotAllowed,
    TableStatements,
    find_base_url,
    make_json_response,
    run_at_trino,
)
from seamark.connector.trino.rewrite_results import RewriteResult
from seamark.connector.trino.rewriter import DENIED, RewriteLimits, Rewriter
from seamark.formats.protocol.wire import encode_json

STATEMENTS = "/v1/statement"
PLAN_HEADER = "X-Seamark-Plan"
_PLANNED = "planned"
"""The summary that a client receives if Trino has not yet shown that the client may read the tables.

The number of matching files would reveal data. The log has the full summary.
"""
_REWRITTEN = "rewritten"
_HIDDEN_OUTCOMES = frozenset((DENIED, FORBIDDEN, RULES_UNREAD))
"""The outcomes that clients do not receive, because they would reveal Trino's access rules."""
_RULES_BYTES_MAX = 4 << 20
_CANCEL_S = 10.0
_QUEUE_S = 0.2
"""The maximum time in seconds for which an unchanged query in Trino's queue is polled.

The last response may take a second longer.
"""
_QUERY = re.compile(rb"\s*(?:select|with|values|table|\()", re.IGNORECASE)
"""Matches queries. Other statements are not polled, because their responses may have headers for the client."""
_log = structlog.get_logger("seamark.trino-proxy")

_Outcome = tuple[web.StreamResponse, str]
"""The response to a request and, for a statement, a summary of the changes in its text. "" for other requests."""
_CLIENT_ERROR_DIGIT = 4
"""The first digit of the status codes for errors of the client."""


@dataclass(frozen=True)
class ProxySettings:
    """The configuration of a proxy. `seamark trino-proxy --help` describes the options.

    Attributes:
        plans: The audience of the plans, which Trino's catalogs send in `X-Seamark-Plans`.
        rules: Whether Trino may have row filters and column masks.
        plan_header: Whether `X-Seamark-Plan` contains the counts of files.
    """

    trino: tuple[str, ...]
    catalogs: frozenset[str]
    seamark: str
    token: str | None = field(default=None, repr=False)
    limits: RewriteLimits = field(default_factory=RewriteLimits)
    plans: str = "trino"
    rules: bool = True
    plan_header: bool = False
    maintenance: int = 0
    lease_s: int = 60
    hold_s: float = 2.0
    cube_rights_s: float = 10.0
    statement_bytes: int = 256 << 10
    trust_forwarded: bool = False
    drain_s: float = 10.0
    connections: int = 0
    connections_per_address: int = 0
    header_bytes: int = HEADER_BYTES_MAX
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 300.0
    send_timeout_s: float = 300.0
    """The time limit for sending a response, in seconds.

    It is longer than for the catalog's responses, because some Trino clients read a response only as fast as their user
    fetches rows.
    """
    body_bytes: int = 16 << 20
    body_timeout_s: float = 30.0
    upstream_tls: ssl.SSLContext | None = None
    authorities: str | None = None
    """The path of a PEM file with the certificate authorities of Seamark's certificate, or None."""

    def check(self) -> None:
        """Check the addresses, and the audience of the plans (`plans`).

        Raises:
            ValueError: An address or the audience is invalid.
        """
        Coordinators(self.trino)
        check_url(self.seamark)
        check_audience(self.plans)


class Proxy:
    """Handles all requests. `open_proxy` creates it with its components.

    Attributes:
        settings: The configuration of the proxy.
    """

    def __init__(
        self,
        settings: ProxySettings,
        coordinators: Coordinators,
        forwarder: Forwarder,
        rewriter: Rewriter,
        tables: TableStatements,
        reports: ColumnReports,
        times: StatementTimes,
        counts: ProxyMetrics,
    ) -> None:
        self._settings = settings
        self._coordinators = coordinators
        self._forwarder = forwarder
        self._rewriter = rewriter
        self._counts = counts
        self._answer_counters = {number: counts.requests.labels(f"{number}xx") for number in range(1, 10)}
        self._logs_requests = structlog.get_logger("seamark.trino-proxy").bind().is_enabled_for(logging.DEBUG)
        self._tables, self._reports, self._times = tables, reports, times
        self._logins = AcceptedLogins(forwarder.send)
        self._rights = CheckedRights(settings.cube_rights_s)
        self._queued_statements = QueuedStatements(settings.lease_s)
        self._cancel_tasks: set[asyncio.Task[None]] = set()
        self.answering = 0
        self.draining = False

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, count the request, and log it."""
        begun_s = time.monotonic()
        self.answering += 1
        try:
            response, summary = await self._route(request)
        except asyncio.CancelledError:
            _log.debug("client left", method=request.method, path=_hide_secrets(request.rel_url.raw_path))
            raise
        finally:
            self.answering -= 1
        self._answer_counters[response.status // 100].inc()
        if not response.prepared:
            # By default, aiohttp sends a header with its version and the version of Python.
            response.headers.setdefault("Server", "seamark")
        if summary or self._logs_requests:  # The request is also logged if the client disconnected during the response.
            seconds = time.monotonic() - begun_s
            asyncio.get_running_loop().call_soon(self._log_access, request, response, summary, seconds)
        return response

    def _log_access(self, request: web.BaseRequest, response: web.StreamResponse, summary: str, seconds: float) -> None:
        fields = {
            "method": request.method,
            "path": _hide_secrets(request.rel_url.raw_path),
            "status": response.status,
            "ms": round(1000 * seconds, 1),
            "client": request.remote,
        }
        if summary:
            _log.info("statement", plan=summary, **fields)
        else:
            _log.debug("request", **fields)

    async def _route(self, request: web.BaseRequest) -> _Outcome:
        """Answer a request, or refuse it if its body exceeds a limit. Return the response and a summary for the log."""
        settings = self._settings
        if (request.content_length or 0) > settings.body_bytes:
            return _make_refusal_response(
                RefusedBody(413, f"The request body is larger than {settings.body_bytes:,} bytes")
            ), ""
        body = ClientBody(request.content, size_max=settings.body_bytes, timeout_s=settings.body_timeout_s)
        try:
            response, summary = await self._route_to_coordinator(request, body)
        except RefusedBody as refusal:
            return _make_refusal_response(refusal), ""
        # aiohttp's client reports only that sending the body failed. The reason is in `refusal` of the body.
        if body.refusal is not None and not response.prepared:
            return _make_refusal_response(body.refusal), summary
        return response, summary

    async def _route_to_coordinator(self, request: web.BaseRequest, content: ClientBody) -> _Outcome:
        """Answer a request by its path, and return the response and a summary for the log.

        The path is a path of the proxy itself, a new statement, or another path of Trino. Requests without a statement
        have an empty summary.

        A path of Trino with the prefix of a coordinator is sent to this coordinator. Any other new statement is sent to
        the next coordinator in turn.
        """
        target = request.rel_url.raw_path_qs
        if not target.startswith("/"):
            return web.Response(status=400, text="The proxy answers only requests for paths\n"), ""
        try:
            coordinator, target = self._coordinators.resolve(target)
        except UnknownCoordinator as error:
            return web.Response(status=404, text=f"No coordinator {error} is behind this proxy\n"), ""
        path = target.partition("?")[0]
        if path.startswith(f"{TABLE_STATEMENTS}/"):
            return await self._answer_table_result(request, path.removeprefix(f"{TABLE_STATEMENTS}/")), ""
        if coordinator is None and path.startswith(f"{PROXY_PATH}/"):
            return self._answer_own_path(request, path), ""
        if path == STATEMENTS and request.method == "POST":
            candidates = [coordinator] if coordinator else self._coordinators.round_robin()
            return await self._handle_statement(request, content, candidates, target)
        if plans_to_renew := self._queued_statements.take_plans_to_renew(path):
            # The leases must be renewed before the request, because Trino may then resolve the plans.
            await self._rewriter.renew(plans_to_renew)
        if coordinator is None:
            coordinator = self._coordinators.from_referer(request.headers.get("Referer", ""))
        candidates = [coordinator] if coordinator else self._coordinators.all
        body = content.iter_any() if request.body_exists else None
        response = await self._forwarder.forward(request, candidates, target, body)
        self._times.note_page(request.method, path)
        return response, ""

    def count_unreadable(self) -> None:
        """Count a request that was refused because it is not valid HTTP, as a response with a status 4xx."""
        self._answer_counters[_CLIENT_ERROR_DIGIT].inc()

    def _answer_own_path(self, request: web.BaseRequest, path: str) -> web.Response:
        """Answer a request for the health or the metrics of the proxy."""
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        if path == f"{PROXY_PATH}/healthz":
            state = {"draining": self.draining, "open-breakers": self._rewriter.open_breakers}
            # Only the number of coordinators is returned, because this route needs no authentication.
            body = encode_json({**state, "coordinators": len(self._coordinators.all)})
            return web.Response(status=503 if self.draining else 200, body=body, content_type="application/json")
        if path == f"{PROXY_PATH}/metrics":
            self._counts.answering.set(self.answering)
            for name in ("seamark", "trino"):
                self._counts.breaker_open.labels(name).set(name in self._rewriter.open_breakers)
            return web.Response(body=self._counts.render_text(), content_type="text/plain", charset="utf-8")
        return web.Response(status=404, text=f"{PROXY_PATH}/ has healthz, metrics and the paths of coordinators\n")

    # Statements

    async def _handle_statement(
        self, request: web.BaseRequest, content: ClientBody, candidates: Sequence[Coordinator], target: str
    ) -> _Outcome:
        """Forward a statement, rewritten if possible, and return the response and the summary for the log.

        The client receives the text `_PLANNED` instead of a summary that would reveal data or Trino's access rules. If
        the rewritten statement fails, the original statement is sent to the same coordinator.
        """
        body, is_complete = await read_at_most(content, self._settings.statement_bytes)
        if not is_complete:
            summary = f"unchanged; the statement is longer than {self._settings.statement_bytes} bytes"
            return await self._forward_unchanged(request, candidates, target, read_rest(body, content), summary)
        if self._tables.may_be_table_statement(body) and (
            table_outcome := await self._handle_table_statement(request, body, candidates[0])
        ):
            return table_outcome
        begun_s = time.monotonic()
        rewrite = await self._rewrite(request, body, candidates[0])
        self._counts.plan_seconds.observe(time.monotonic() - begun_s)
        summary = rewrite.summary
        if rewrite.statement is None:
            header = _PLANNED if rewrite.depends_on_data else summary
            response_handler = partial(self._follow_while_queued, request) if _QUERY.match(body) else None
            return await self._forward_unchanged(
                request, candidates, target, body, summary, header, response_handler=response_handler
            )
        try:
            result = await self._run_rewritten(request, candidates[0], target, body, rewrite, begun_s)
        except asyncio.CancelledError:
            self._rewriter.release(rewrite)
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            self._rewriter.release(rewrite)
            _log.warning("the coordinator did not accept the rewritten statement", error=repr(error))
            summary = f"original; {type(error).__name__}"
            return await self._forward_unchanged(request, candidates, target, body, summary, outcome="original")
        if isinstance(result, web.Response):
            self._rewriter.report_success(rewrite)
            self._counts.statements.labels("rewritten").inc()
            self._counts.files.labels("kept").inc(rewrite.files)
            self._counts.files.labels("considered").inc(rewrite.considered_files)
            return result, summary
        self._rewriter.release(rewrite)
        self._rewriter.report_failure(rewrite, result.name, result.message)
        _log.warning("a rewritten statement failed", error=result.name, message=result.message, plan=summary)
        summary, header = f"original; {result.name}", _PLANNED if result.name in _HIDDEN_OUTCOMES else ""
        return await self._forward_unchanged(request, candidates[:1], target, body, summary, header, outcome="original")

    async def _handle_table_statement(
        self, request: web.BaseRequest, body: bytes, coordinator: Coordinator
    ) -> _Outcome | None:
        """Start a statement that maintains a table, and return its first response. Return None for other statements."""
        headers = self._make_follow_up_headers(request, coordinator)
        send = partial(self._request, coordinator, headers)
        trust, rules = self._settings.limits.trust_time_zone, self._settings.rules
        decide_by_rules = partial(self._decide_pruning_and_report, coordinator, headers) if rules else None
        base = find_base_url(headers, coordinator)
        answer = await self._tables.start(body, request.headers, send, decide_by_rules, base, trust_time_zone=trust)
        if answer is None:
            return None
        self._counts.statements.labels("maintenance").inc()
        return make_json_response(answer), f"maintenance; {answer['stats']['state']}"

    async def _answer_table_result(self, request: web.BaseRequest, statement_id: str) -> web.Response:
        first_coordinator = self._coordinators.all[0]
        base = find_base_url(self._forwarder.request_headers(request, first_coordinator), first_coordinator)
        return await self._tables.answer(request.method, statement_id, base)

    async def _rewrite(self, request: web.BaseRequest, body: bytes, coordinator: Coordinator) -> RewriteResult:
        if request.headers.get("Content-Encoding") or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
            return RewriteResult(None, "unchanged; the text of the statement is not plain UTF-8")
        try:
            statement = body.decode()
        except UnicodeDecodeError:
            return RewriteResult(None, "unchanged; the text of the statement is not plain UTF-8")

        async def is_accepted() -> bool:
            return await self._logins.accepts(coordinator, self._make_follow_up_headers(request, coordinator))

        return await self._rewriter.rewrite_request(statement, request.headers, request.remote, is_accepted)

    async def _forward_unchanged(
        self,
        request: web.BaseRequest,
        candidates: Sequence[Coordinator],
        target: str,
        body: Body,
        summary: str,
        header: str = "",
        outcome: str = "unchanged",
        response_handler: ResponseHandler | None = None,
    ) -> _Outcome:
        """Send the statement unchanged.

        Args:
            request: The client's request.
            candidates: The coordinators that can receive the statement, in order.
            target: The escaped path and query.
            body: The statement.
            summary: The summary for the log.
            header: The summary for the client. If it is empty, the client receives `summary`.
            outcome: The outcome under which the metrics count the statement.
            response_handler: A function that handles the coordinator's response, or None to pass it on unchanged.
        """
        self._counts.statements.labels(outcome).inc()
        extra_headers = {PLAN_HEADER: header or summary}
        return await self._forwarder.forward(
            request, candidates, target, body, extra_headers=extra_headers, response_handler=response_handler
        ), summary

    async def _follow_while_queued(
        self,
        request: web.BaseRequest,
        coordinator: Coordinator,
        first: aiohttp.ClientResponse,
        headers: CIMultiDict[str],
    ) -> web.StreamResponse:
        """Poll a query while it is in Trino's queue, for at most `_QUEUE_S`, and return Trino's last response."""
        async with self._follow_statement(
            coordinator, self._make_follow_up_headers(request, coordinator), _QUEUE_S
        ) as followed_statement:
            return _make_response(await followed_statement.wait_for_queue(first, headers))

    async def _run_rewritten(
        self,
        request: web.BaseRequest,
        coordinator: Coordinator,
        target: str,
        body: bytes,
        rewrite: RewriteResult,
        begun_s: float,
    ) -> web.Response | Failure:
        """Send a rewritten statement, and poll it until Trino has started to read files.

        Until then, the statement may fail because of its plans.

        Returns:
            The response for the client, or the failure after which the original statement is sent.
        """
        assert rewrite.statement is not None
        follow_headers = self._make_follow_up_headers(request, coordinator)
        if rewrite.rights_check and (refusal := await self._find_refusal(coordinator, follow_headers, rewrite)):
            return refusal
        headers = follow_headers.copy()
        headers.extend((name, value) for name, value in request.headers.items() if name.lower() == "content-type")
        if rewrite.prepared is not None:
            set_prepared_statement(headers, rewrite.prepared, rewrite.statement)
        else:
            body = rewrite.statement.encode()
        decide_pruning = partial(
            self._decide_pruning_and_report, coordinator, follow_headers, rewrite.used, plans=rewrite.plans
        )
        # Without access rules in Trino, there is nothing to decide.
        decide_by_rules = decide_pruning if self._settings.rules else None
        async with self._follow_statement(
            coordinator, follow_headers, self._settings.hold_s, decide_by_rules
        ) as followed_statement:
            sent_s = time.monotonic()
            first = await self._forwarder.send("POST", coordinator, target, headers, body)
            answer = await followed_statement.wait_for_planning(
                first, make_response_headers(first, {PLAN_HEADER: _PLANNED})
            )
        if isinstance(answer, Failure):
            if answer.is_running and followed_statement.next_uri is not None:
                self._start_cancellation(coordinator, follow_headers, followed_statement.next_uri)
            return answer
        is_analysed = answer.is_allowed or answer.decision is not RuleDecision.UNKNOWN
        if answer.next_uri is not None and not is_analysed:
            continues_at = parse_target(answer.next_uri, follow_headers.get("X-Forwarded-Prefix", ""))
            self._queued_statements.add(continues_at, rewrite.plans, begun_s)
        self._rewriter.release(rewrite, is_analysed=is_analysed)
        if answer.is_allowed:
            next_uri = answer.next_uri
            page = None if next_uri is None else parse_target(next_uri, follow_headers.get("X-Forwarded-Prefix", ""))
            self._times.start(page, rewrite.reads, sent_s)
        if answer.is_allowed and (decide_by_rules is None or answer.decision is RuleDecision.NO_RULES):
            answer.headers[PLAN_HEADER] = rewrite.summary if self._settings.plan_header else _REWRITTEN
        return _make_response(answer)

    async def _find_refusal(
        self, coordinator: Coordinator, headers: CIMultiDict[str], rewrite: RewriteResult
    ) -> Failure | None:
        """Check in Trino that the sender may read the groups in a statement. Return the failure, or None.

        The text of the statement contains the groups of a cube, so Trino itself cannot check the rights to the table.
        Instead, a query without rows is run first. A check that has succeeded is not repeated for a short time.

        Raises:
            aiohttp.ClientError: The connection breaks.
            TimeoutError: Trino does not answer in time.
        """
        if self._rights.has(coordinator, headers, rewrite.rights_check):
            return None
        try:
            async with asyncio.timeout(self._settings.hold_s):
                query_id = await run_at_trino(rewrite.rights_check, partial(self._request, coordinator, headers))
                decision = await self._decide_pruning_and_report(coordinator, headers, rewrite.used, query_id)
        except NotAllowed as error:
            return Failure(str(error.error.get("errorName", DENIED)), str(error))
        if decision in (RuleDecision.NO_RULES, RuleDecision.NO_EFFECT):
            self._rights.remember(coordinator, headers, rewrite.rights_check)
            return None
        return Failure(FORBIDDEN if decision is RuleDecision.FORBIDDEN else RULES_UNREAD, decision.value)

    async def _decide_pruning_and_report(
        self,
        coordinator: Coordinator,
        headers: CIMultiDict[str],
        inputs: PlanInputs,
        query_id: str,
        *,
        plans: Sequence[PlanSnapshotRef] = (),
    ) -> RuleDecision:
        """Decide whether Trino's access rules allow pruning for a query. If so, report the columns that it reads.

        Trino's description of the query, which is requested with the sender's identity, contains the rules. If Trino
        does not return the description, or if it is too long, the decision is `UNKNOWN`.

        Args:
            coordinator: The coordinator that runs the query.
            headers: The headers with the sender's identity.
            inputs: The tables and columns by which files were pruned.
            query_id: The id of the query in Trino.
            plans: The plans that the query reads. The columns that it reads of them are reported to the catalog.

        Raises:
            aiohttp.ClientError: The connection breaks.
        """
        target = f"/v1/query/{quote(query_id, safe='')}?pruned=true"
        async with await self._forwarder.send("GET", coordinator, target, headers) as response:
            body, is_complete = await read_at_most(response.content, _RULES_BYTES_MAX)
            if response.status != 200 or not is_complete:
                response.close()
                return RuleDecision.UNKNOWN
        decision = decide_access(body, inputs)
        if decision in (RuleDecision.NO_RULES, RuleDecision.NO_EFFECT):
            self._reports.start(body, plans)
        return decision

    async def _request(
        self, coordinator: Coordinator, headers: CIMultiDict[str], method: str, uri: str, body: bytes | None = None
    ) -> aiohttp.ClientResponse:
        target = parse_target(uri, headers.get("X-Forwarded-Prefix", ""))
        return await self._forwarder.send(method, coordinator, target, headers, body)

    def _make_follow_up_headers(self, request: web.BaseRequest, coordinator: Coordinator) -> CIMultiDict[str]:
        """Return the client's headers for the proxy's own requests about a statement.

        Headers about the body of the POST are left out. The responses must not be compressed, because the proxy reads
        them.
        """
        headers = self._forwarder.request_headers(request, coordinator)
        for name in ("Content-Length", "Content-Type"):
            headers.popall(name, None)
        headers["Accept-Encoding"] = "identity"
        return headers

    @asynccontextmanager
    async def _follow_statement(
        self,
        coordinator: Coordinator,
        headers: CIMultiDict[str],
        hold_s: float,
        decide_by_rules: Callable[[str], Awaitable[RuleDecision]] | None = None,
    ) -> AsyncIterator[FollowedStatement]:
        """Yield a `FollowedStatement`. If the client disconnects, cancel the statement.

        No client has the URI of the statement, so no client could read its rows or cancel it.

        Args:
            coordinator: The coordinator that runs the statement.
            headers: The headers with the sender's identity.
            hold_s: The maximum time in seconds for which the proxy polls the statement on behalf of the client.
            decide_by_rules: A function that decides by the access rules about the query with an id, or None to check
                no rules.
        """
        followed_statement = FollowedStatement(
            partial(self._request, coordinator, headers, "GET"), hold_s=hold_s, decide_by_rules=decide_by_rules
        )
        try:
            yield followed_statement
        except asyncio.CancelledError:
            if followed_statement.next_uri is not None:
                self._start_cancellation(coordinator, headers, followed_statement.next_uri)
            raise

    def _start_cancellation(self, coordinator: Coordinator, headers: CIMultiDict[str], uri: str) -> None:
        task = asyncio.create_task(self._cancel(coordinator, headers, uri))
        self._cancel_tasks.add(task)
        task.add_done_callback(self._cancel_tasks.discard)

    async def _cancel(self, coordinator: Coordinator, headers: CIMultiDict[str], uri: str) -> None:
        try:
            async with asyncio.timeout(_CANCEL_S):
                (await self._request(coordinator, headers, "DELETE", uri)).close()
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("the statement of a disconnected client was not cancelled", error=repr(error))

    async def close(self) -> None:
        """Wait for the cancellations in flight. Each of them has a time limit of a few seconds."""
        await self._logins.close()
        await asyncio.gather(*self._cancel_tasks, return_exceptions=True)


@asynccontextmanager
async def open_proxy(settings: ProxySettings) -> AsyncIterator[Proxy]:
    """Open all components of a proxy, yield the proxy, and close them in reverse order.

    Raises:
        ValueError: An address is invalid.
    """
    async with AsyncExitStack() as stack:
        coordinators = Coordinators(settings.trino)
        http = await stack.enter_async_context(open_session(settings.upstream_tls))
        seamark = open_seamark(
            settings.seamark,
            token=settings.token,
            lease_s=settings.lease_s,
            audience=settings.plans,
            authorities=settings.authorities,
        )
        client = await stack.enter_async_context(seamark)
        reports = ColumnReports(client.report_scan)
        stack.push_async_callback(reports.close)

        async def send_time(planned_read: PlannedRead, seconds: float, run_tables: Sequence[Name]) -> None:
            await client.report_time(
                planned_read.table,
                planned_read.statement,
                seconds=seconds,
                files=planned_read.files,
                size_bytes=planned_read.bytes,
                run_tables=run_tables,
            )

        times = StatementTimes(send_time)
        stack.push_async_callback(times.close)
        rewriter = Rewriter(client, settings.catalogs, settings.limits)
        stack.push_async_callback(rewriter.close)
        forwarder = Forwarder(http, trust_forwarded=settings.trust_forwarded)
        tables = TableStatements(
            settings.seamark,
            settings.token,
            settings.catalogs,
            jobs_max=settings.maintenance,
            authorities=settings.authorities,
        )
        stack.push_async_callback(tables.close)
        proxy = Proxy(settings, coordinators, forwarder, rewriter, tables, reports, times, ProxyMetrics())
        stack.push_async_callback(proxy.close)
        yield proxy


def _make_response(answer: TrinoResponse) -> web.Response:
    headers = answer.headers
    headers.popall("Content-Length", None)
    return web.Response(status=answer.status, reason=answer.reason, headers=headers, body=answer.body)


def _make_refusal_response(refusal: RefusedBody) -> web.Response:
    response = make_error_response(refusal.status, refusal.message)
    response.force_close()
    return response


def _hide_secrets(path: str) -> str:
    """Return the path for logs, without the secret that gives access to a query's results."""
    # A path without a coordinator's prefix is `/seamark/statements/SECRET`, or
    # `/v1/statement/STATE/QUERY_ID/SECRET/TOKEN`, or another path whose first three levels contain no secret.
    if path.startswith(TABLE_STATEMENTS):
        shown_levels = 2
    elif f"/{STATEMENTS.strip('/')}/" in path:
        shown_levels = 4
    else:
        shown_levels = 3
    if path.startswith(f"{PROXY_PATH}/c/"):
        shown_levels += 3  # The prefix is `/seamark/c/HASH`.
    return "/".join(path.split("/")[: shown_levels + 1])
