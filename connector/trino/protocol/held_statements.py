"""Follows a rewritten statement until its plan can no longer make it fail.

A plan or its files may be removed before Trino resolves the plan. Therefore the proxy does not return the
first answers to the client. It follows the statement until Trino returns rows or has done work, or until
the time limit. If the statement fails before that, the client has received nothing, and the proxy runs the
original instead. It also runs the original if Trino's access rules for the sender forbid pruning
(`access_rules.py`) or could not be read. The rules are requested concurrently with the statement's answers,
once the statement has left the queue.

The client receives the last answer without rows, unchanged. Its nextUri leads to the answer that the proxy
has read; Trino returns an answer again for the same token, for clients that lost their connection. The
answer to a POST never has rows, and some clients ignore rows there.

An unchanged query is followed only through Trino's queue. No answer is requested twice, and the client
sends a few requests less through the proxy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from seamark.connector.trino.protocol.access_rules import RuleDecision
from seamark.connector.trino.protocol.forwarder import read_at_most
from seamark.formats.runtime.decoding import from_json

INSPECTED_BYTES = 1 << 16
"""The maximum size of an answer that is decoded; a longer answer has rows."""
_QUEUED = "/v1/statement/queued/"
_BEFORE_RUNNING = frozenset(("", "QUEUED", "WAITING_FOR_RESOURCES", "DISPATCHING", "PLANNING", "FAILED"))
_ENDED_BY_USERS = frozenset(("USER_CANCELED", "ADMINISTRATIVELY_KILLED", "ADMINISTRATIVELY_PREEMPTED"))
_TOO_LARGE = frozenset((400, 413, 414, 431))
"""The HTTP statuses for a statement or a header that has become too long because of plan names."""
FORBIDDEN = "RULES"
"""The outcome if an access rule of Trino that forbids pruning is in force."""
RULES_UNREAD = "RULES_UNREAD"
"""The outcome if the access rules could not be read in time."""
_RESOURCES = "INSUFFICIENT_RESOURCES"
"""The error type of statements for which the cluster lacks resources; a second attempt would add load."""


class _Stats(msgspec.Struct, rename="camel"):
    state: str = ""
    completed_splits: int = 0
    processed_rows: int = 0


class _Error(msgspec.Struct, rename="camel"):
    message: str = ""
    error_name: str = ""
    error_type: str = ""


class _Results(msgspec.Struct, rename="camel"):
    id: str = ""
    next_uri: str | None = None
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: _Error | None = None
    stats: _Stats = msgspec.field(default_factory=_Stats)


@dataclass(frozen=True, slots=True)
class TrinoResponse:
    status: int
    reason: str
    headers: CIMultiDict[str]
    body: bytes
    next_uri: str | None
    is_allowed: bool = False
    """Whether Trino has planned the statement; its sender is then allowed to read its tables."""
    decision: RuleDecision = RuleDecision.UNKNOWN


@dataclass(frozen=True, slots=True)
class Failure:
    """The rewritten statement has returned nothing, so the original can replace it.

    Attributes:
        is_running: Whether the statement has not failed and must be cancelled.
    """

    name: str
    message: str
    is_running: bool = False


class FollowedStatement:
    """Follows one statement.

    Attributes:
        get: Requests a URI of the coordinator.
        judge: Decides by the access rules for the query with an id; if None, rules are not checked.
    """

    def __init__(
        self,
        get: Callable[[str], Awaitable[aiohttp.ClientResponse]],
        *,
        hold_s: float,
        judge: Callable[[str], Awaitable[RuleDecision]] | None = None,
    ) -> None:
        self._get = get
        self._judge = judge
        self._judging: asyncio.Task[RuleDecision] | None = None
        self._verdict = RuleDecision.UNKNOWN
        self._query_id = ""
        self._deadline_s = time.monotonic() + hold_s
        self.next_uri: str | None = None
        """The next URI of the statement. A cancellation is sent to it, because the client does not have it."""

    async def wait_for_planning(
        self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]
    ) -> TrinoResponse | Failure:
        """Return the answer to the client's POST.

        Args:
            first: The coordinator's answer.
            headers: The headers of the answer for the client.

        Raises:
            aiohttp.ClientError: The connection breaks during `first`.
        """
        try:
            return await self._past_planning(first, headers)
        finally:
            if self._judging is not None:
                self._judging.cancel()

    async def _past_planning(self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> TrinoResponse | Failure:
        answer, results = await _read_first_answer(first, headers)
        if answer.status in _TOO_LARGE:
            return Failure(f"HTTP {answer.status}", answer.body[:200].decode("utf-8", "replace"))
        if results is not None and results.error is not None and _may_retry_original(results.error):
            return Failure(results.error.error_name, results.error.message)
        self._query_id = results.id if results is not None else ""
        while answer.next_uri is not None and time.monotonic() < self._deadline_s:
            self.next_uri = answer.next_uri
            if _QUEUED not in answer.next_uri:
                self._start_judging()
            try:
                response = await self._get(answer.next_uri)
                body, results = await _read(response)
            except (aiohttp.ClientError, TimeoutError):
                break  # The client will receive the same error.
            if results is None:
                break
            if results.error is not None and _may_retry_original(results.error):
                return Failure(results.error.error_name, results.error.message)
            if results.error is not None:  # A failed statement returns no rows.
                return replace(answer, is_allowed=False)
            answer = replace(answer, is_allowed=results.stats.state not in _BEFORE_RUNNING)
            if results.next_uri is None or _has_started(results):
                break
            answer = replace(answer, body=body, next_uri=results.next_uri)
        return await self._apply_rules(answer)

    def _start_judging(self) -> None:
        """Read the rules concurrently with the next answer, which may take a while.

        Before the analysis of the statement, Trino reports no rules.
        """
        if self._judge is None or self._verdict is not RuleDecision.UNKNOWN:
            return
        if self._judging is not None and self._judging.done():
            self._verdict = self._judging.result()
            self._judging = None
        if self._judging is None and self._verdict is RuleDecision.UNKNOWN:
            self._judging = asyncio.create_task(self._read_rules())

    async def _read_rules(self) -> RuleDecision:
        try:
            return await self._judge(self._query_id) if self._judge is not None else RuleDecision.UNKNOWN
        except (aiohttp.ClientError, TimeoutError):
            return RuleDecision.UNKNOWN

    async def _apply_rules(self, answer: TrinoResponse) -> TrinoResponse | Failure:
        if self._judge is None or answer.status != 200:
            return answer
        if self._judging is not None:
            self._verdict, self._judging = await self._judging, None
        if self._verdict is RuleDecision.UNKNOWN:
            self._verdict = await self._read_rules()
        if self._verdict in (RuleDecision.UNKNOWN, RuleDecision.FORBIDDEN):
            name = FORBIDDEN if self._verdict is RuleDecision.FORBIDDEN else RULES_UNREAD
            return Failure(name, self._verdict.value, is_running=True)
        return replace(answer, decision=self._verdict)

    async def wait_for_queue(self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> TrinoResponse:
        """Poll an unchanged query until it leaves Trino's queue or the time is up.

        Return the last answer that was received before that. It has no rows.
        """
        answer, _ = await _read_first_answer(first, headers)
        while answer.next_uri is not None and _QUEUED in answer.next_uri and time.monotonic() < self._deadline_s:
            self.next_uri = answer.next_uri
            try:
                body, results = await _read(await self._get(answer.next_uri))
            except (aiohttp.ClientError, TimeoutError):
                return answer
            if results is None or results.next_uri is None or results.error is not None or _has_started(results):
                return answer
            answer = replace(answer, body=body, next_uri=results.next_uri)
        return answer


async def _read_first_answer(
    response: aiohttp.ClientResponse, headers: CIMultiDict[str]
) -> tuple[TrinoResponse, _Results | None]:
    """Return the complete answer to a POST.

    Raises:
        aiohttp.ClientError: The connection breaks.
    """
    async with response:
        body = await response.read()
    results = _read_results(response, body)
    next_uri = results.next_uri if results is not None else None
    return TrinoResponse(response.status, response.reason or "", headers, body, next_uri), results


async def _read(response: aiohttp.ClientResponse) -> tuple[bytes, _Results | None]:
    """Return the body and its content.

    The content is None if it is not an ordinary answer, or if it is too long for an answer without rows.
    """
    async with response:
        body, whole = await read_at_most(response.content, INSPECTED_BYTES)
        if not whole:
            response.close()
    return body, _read_results(response, body) if whole else None


def _read_results(response: aiohttp.ClientResponse, body: bytes) -> _Results | None:
    if response.status != 200:
        return None
    try:
        return from_json(body, _Results)
    except msgspec.MsgspecError:
        return None


def _has_started(results: _Results) -> bool:
    """Return whether there are rows or completed splits; Trino has then found the plan's metadata and files."""
    stats = results.stats
    rows = bytes(results.data).strip() not in (b"null", b"[]")
    return rows or stats.completed_splits > 0 or stats.processed_rows > 0 or stats.state in ("FINISHING", "FINISHED")


def _may_retry_original(error: _Error) -> bool:
    return error.error_name not in _ENDED_BY_USERS and error.error_type != _RESOURCES


def target_of(uri: str, prefix: str) -> str:
    """Return the path and query of a URI from Trino, without the prefix that `X-Forwarded-Prefix` added."""
    return URL(uri, encoded=True).raw_path_qs.removeprefix(prefix)
