"""Follows a rewritten statement until its plan can no longer make it fail.

A plan or its files may be removed before Trino resolves the plan. Therefore the proxy does not return the first
responses to the client. It polls the statement until Trino returns rows, until Trino has completed some work, or until
a time limit. If the statement fails before, the client has received nothing, and the proxy runs the original statement
instead. The proxy also runs the original statement if Trino's access rules for the sender forbid pruning
(`access_rules.py`), or if the rules could not be read. The rules are requested concurrently with the next response when
the statement has left the queue.

The client receives the last response without rows, because the response to a POST never has rows, and some clients
would ignore them. The response is unchanged. Its nextUri refers to a response that the proxy has already read. Trino
returns the same response again for the same token, because clients may lose their connection.

An unchanged query is polled only while it is in Trino's queue. No response is requested twice, and the client sends
fewer requests through the proxy.
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
from seamark.formats.runtime.decoding import convert_json

_SHOWN_BYTES_MAX = 200
"""The maximum number of bytes of a response in an error message."""
INSPECTED_BYTES = 1 << 16
"""The maximum size in bytes of a response that is decoded. A longer response contains rows."""
_QUEUED = "/v1/statement/queued/"
_STATES_BEFORE_RUNNING = frozenset(("", "QUEUED", "WAITING_FOR_RESOURCES", "DISPATCHING", "PLANNING", "FAILED"))
_ENDED_BY_USERS = frozenset(("USER_CANCELED", "ADMINISTRATIVELY_KILLED", "ADMINISTRATIVELY_PREEMPTED"))
_TOO_LARGE_STATUSES = frozenset((400, 413, 414, 431))
"""The HTTP statuses of Trino for a statement or a header that has become too long because of the names of plans."""
FORBIDDEN = "RULES"
"""The name of the outcome if Trino's access rules forbid pruning."""
RULES_UNREAD = "RULES_UNREAD"
"""The name of the outcome if the access rules could not be read in time."""
_LACKS_RESOURCES = "INSUFFICIENT_RESOURCES"
"""The error type of statements for which the cluster has no resources. Running the original would add load."""


class _Stats(msgspec.Struct, rename="camel"):
    state: str = ""
    completed_splits: int = 0
    processed_rows: int = 0


class _Error(msgspec.Struct, rename="camel"):
    message: str = ""
    error_name: str = ""
    error_type: str = ""


class _Results(msgspec.Struct, rename="camel"):
    """A response of Trino to a request for a statement."""

    id: str = ""
    next_uri: str | None = None
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: _Error | None = None
    stats: _Stats = msgspec.field(default_factory=_Stats)


@dataclass(frozen=True, slots=True)
class TrinoResponse:
    """A response of Trino that the client receives."""

    status: int
    reason: str
    headers: CIMultiDict[str]
    body: bytes
    next_uri: str | None
    is_allowed: bool = False
    """Whether Trino has planned the statement. If so, the sender is allowed to read the tables."""
    decision: RuleDecision = RuleDecision.UNKNOWN


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rewritten statement before the client received a response, so that the original can still run.

    Attributes:
        name: The name of Trino's error, or an outcome of this module.
        is_running: Whether the statement is still running in Trino and has to be cancelled.
    """

    name: str
    message: str
    is_running: bool = False


class FollowedStatement:
    """Polls one statement on behalf of the client."""

    def __init__(
        self,
        get: Callable[[str], Awaitable[aiohttp.ClientResponse]],
        *,
        hold_s: float,
        decide_by_rules: Callable[[str], Awaitable[RuleDecision]] | None = None,
    ) -> None:
        """Prepare to poll a statement.

        Args:
            get: A function that requests a URI of the coordinator.
            hold_s: The maximum time in seconds for which the statement is polled before the client receives a response.
            decide_by_rules: A function that decides by Trino's row filters and column masks about the query with an id,
                or None to check no rules.
        """
        self._get = get
        self._decide_by_rules = decide_by_rules
        self._decision_task: asyncio.Task[RuleDecision] | None = None
        self._decision = RuleDecision.UNKNOWN
        self._query_id = ""
        self._deadline_s = time.monotonic() + hold_s
        self.next_uri: str | None = None
        """The next URI of the statement.

        The client does not have it, so only the proxy can send a cancellation to it.
        """

    async def wait_for_planning(
        self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]
    ) -> TrinoResponse | Failure:
        """Poll until Trino has started to read files, and return the response to the client's POST.

        After that, the statement can no longer fail because its plan was removed. The poll also ends at a time limit.

        Args:
            first: The coordinator's first response.
            headers: The headers of the response to the client.

        Returns:
            The response for the client, or the failure after which the original statement can be sent.

        Raises:
            aiohttp.ClientError: The connection breaks while `first` is read.
        """
        try:
            return await self._follow_past_planning(first, headers)
        finally:
            if self._decision_task is not None:
                self._decision_task.cancel()

    async def _follow_past_planning(
        self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]
    ) -> TrinoResponse | Failure:
        """Follow a statement's responses until Trino has planned it.

        Responses are read ahead until Trino has started to read files. The returned response is the last response
        before that, so the client still receives all rows. Its `is_allowed` is True if Trino has planned the statement,
        because Trino checks the sender's rights to the tables before. The access rules, which are row filters and
        column masks, can still forbid the response (`_apply_rules`).

        Returns:
            The response for the client, or the failure after which the original statement can be sent.
        """
        answer, results = await _read_first_answer(first, headers)
        if answer.status in _TOO_LARGE_STATUSES:
            return Failure(f"HTTP {answer.status}", answer.body[:_SHOWN_BYTES_MAX].decode("utf-8", "replace"))
        if results is not None and results.error is not None and _may_retry_original(results.error):
            return Failure(results.error.error_name, results.error.message)
        self._query_id = results.id if results is not None else ""
        while answer.next_uri is not None and time.monotonic() < self._deadline_s:
            self.next_uri = answer.next_uri
            if _QUEUED not in answer.next_uri:
                self._start_reading_rules()
            try:
                response = await self._get(answer.next_uri)
                body, results = await _read_response(response)
            except (aiohttp.ClientError, TimeoutError):
                break  # The original statement would fail with the same error.
            if results is None:
                break
            if results.error is not None and _may_retry_original(results.error):
                return Failure(results.error.error_name, results.error.message)
            if results.error is not None:  # The statement has failed, so it returns no rows.
                return replace(answer, is_allowed=False)
            answer = replace(answer, is_allowed=results.stats.state not in _STATES_BEFORE_RUNNING)
            if results.next_uri is None or _has_started(results):
                break
            answer = replace(answer, body=body, next_uri=results.next_uri)
        return await self._apply_rules(answer)

    def _start_reading_rules(self) -> None:
        """Start to read the access rules concurrently with the next response, when Trino has analysed the statement.

        If an earlier attempt has ended without a decision, start another attempt.
        """
        if self._decide_by_rules is None or self._decision is not RuleDecision.UNKNOWN:
            return
        if self._decision_task is not None and self._decision_task.done():
            self._decision = self._decision_task.result()
            self._decision_task = None
        if self._decision_task is None and self._decision is RuleDecision.UNKNOWN:
            self._decision_task = asyncio.create_task(self._read_rules())

    async def _read_rules(self) -> RuleDecision:
        try:
            return (
                await self._decide_by_rules(self._query_id)
                if self._decide_by_rules is not None
                else RuleDecision.UNKNOWN
            )
        except (aiohttp.ClientError, TimeoutError):
            return RuleDecision.UNKNOWN

    async def _apply_rules(self, answer: TrinoResponse) -> TrinoResponse | Failure:
        """Return a response with the decision by Trino's access rules, or a failure if the client must not receive it.

        The access rules are the row filters and column masks of the tables. Error responses contain no rows, so they
        are not checked.
        """
        if self._decide_by_rules is None or answer.status != 200:
            return answer
        if self._decision_task is not None:
            self._decision, self._decision_task = await self._decision_task, None
        if self._decision is RuleDecision.UNKNOWN:
            self._decision = await self._read_rules()
        if self._decision in (RuleDecision.UNKNOWN, RuleDecision.FORBIDDEN):
            name = FORBIDDEN if self._decision is RuleDecision.FORBIDDEN else RULES_UNREAD
            return Failure(name, self._decision.value, is_running=True)
        return replace(answer, decision=self._decision)

    async def wait_for_queue(self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> TrinoResponse:
        """Poll an unchanged query until it leaves Trino's queue or the time is over, and return the last response.

        The response has no rows.
        """
        answer, _ = await _read_first_answer(first, headers)
        while answer.next_uri is not None and _QUEUED in answer.next_uri and time.monotonic() < self._deadline_s:
            self.next_uri = answer.next_uri
            try:
                body, results = await _read_response(await self._get(answer.next_uri))
            except (aiohttp.ClientError, TimeoutError):
                return answer
            if results is None or results.next_uri is None or results.error is not None or _has_started(results):
                return answer
            answer = replace(answer, body=body, next_uri=results.next_uri)
        return answer


async def _read_first_answer(
    response: aiohttp.ClientResponse, headers: CIMultiDict[str]
) -> tuple[TrinoResponse, _Results | None]:
    """Read the response to a POST completely.

    Raises:
        aiohttp.ClientError: The connection breaks.
    """
    async with response:
        body = await response.read()
    results = _read_results(response, body)
    next_uri = results.next_uri if results is not None else None
    return TrinoResponse(response.status, response.reason or "", headers, body, next_uri), results


async def _read_response(response: aiohttp.ClientResponse) -> tuple[bytes, _Results | None]:
    """Read a response, and return its body and its decoded content.

    The content is None if the status is not 200, or if the response is so long that it must contain rows.
    """
    async with response:
        body, is_whole = await read_at_most(response.content, INSPECTED_BYTES)
        if not is_whole:
            response.close()
    return body, _read_results(response, body) if is_whole else None


def _read_results(response: aiohttp.ClientResponse, body: bytes) -> _Results | None:
    if response.status != 200:
        return None
    try:
        return convert_json(body, _Results)
    except msgspec.MsgspecError:
        return None


def _has_started(results: _Results) -> bool:
    """Return whether the response has rows or completed splits, so that Trino has found the plan's files."""
    stats = results.stats
    has_rows = bytes(results.data).strip() not in (b"null", b"[]")
    return (
        has_rows or stats.completed_splits > 0 or stats.processed_rows > 0 or stats.state in ("FINISHING", "FINISHED")
    )


def _may_retry_original(error: _Error) -> bool:
    """Return whether the original statement may succeed, because neither a user nor a lack of resources ended it."""
    return error.error_name not in _ENDED_BY_USERS and error.error_type != _LACKS_RESOURCES


def parse_target(uri: str, prefix: str) -> str:
    """Return the path and query of a URI from Trino, without the prefix that `X-Forwarded-Prefix` added."""
    return URL(uri, encoded=True).raw_path_qs.removeprefix(prefix)
