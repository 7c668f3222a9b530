"""A rewritten statement, watched until it is past the point where a plan can fail it.

A plan may be gone when Trino comes to resolve it, and its files may be. So the first answers are not the client's yet:
the proxy follows them, until there are rows, or work has been done, or the time is over. Where the statement fails
before that, it has given nothing to anybody, and the original takes its place. So it does where Trino's rules for its
sender forbid to leave files out (`rules.py`), or have not been read: they are asked for beside the statement's answers,
once it has left the queue.

What the client then gets is an answer of Trino's as it came: the last one without rows. Its nextUri leads to the answer
that was looked at, which Trino gives again to who asks again (a token may be asked twice, for clients whose connection
broke). The answer to a POST has never had rows, and not every client would find them there.

A query that goes on as it came is followed out of Trino's queue alone: nothing is asked for twice, and its client comes
through the proxy a few times less.
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

LOOKED_AT_BYTES = 1 << 16
"""Of an answer. One that is longer has rows."""
_QUEUED = "/v1/statement/queued/"
_BEFORE_RUNNING = frozenset(("", "QUEUED", "WAITING_FOR_RESOURCES", "DISPATCHING", "PLANNING", "FAILED"))
_NOT_OURS = frozenset(("USER_CANCELED", "ADMINISTRATIVELY_KILLED", "ADMINISTRATIVELY_PREEMPTED"))
_TOO_MUCH = frozenset((400, 413, 414, 431))
"""Statuses for a text, or a header, that became too long with plan tables."""
FORBIDDEN = "RULES"
"""A rule of Trino's access control is in force under which no file may be left out."""
UNREAD = "RULES_UNREAD"
"""Which rules are in force was not to be learned in time."""
_RESOURCES = "INSUFFICIENT_RESOURCES"
"""The type of errors for which the cluster needs anything but a second attempt."""


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
class TrinoAnswer:
    """One of Trino's, read."""

    status: int
    reason: str
    headers: CIMultiDict[str]
    body: bytes
    next_uri: str | None
    is_allowed: bool = False
    """Trino has planned the statement, so its sender may read what it reads."""
    verdict: RuleDecision = RuleDecision.UNKNOWN


@dataclass(frozen=True, slots=True)
class Failure:
    """Of the rewritten statement, before it gave anything: the original may take its place. `is_running`: it has not
    failed, and is to be cancelled."""

    name: str
    message: str
    is_running: bool = False


class HeldStatement:
    """Follows one statement. `get` asks the coordinator for a URI that it has handed out, `judge` what its rules are
    for the query of an id; without, all are taken to be read."""

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
        self._until_s = time.monotonic() + hold_s
        self.next_uri: str | None = None
        """Where the statement goes on; what a cancellation is sent to while nobody else knows it."""

    async def past_planning(self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> TrinoAnswer | Failure:
        """What the client is to get for its POST, of which `first` is the coordinator's answer. `headers` are those of
        `first` as the client gets them. aiohttp.ClientError where even the first answer breaks off."""
        try:
            return await self._past_planning(first, headers)
        finally:
            if self._judging is not None:
                self._judging.cancel()

    async def _past_planning(self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> TrinoAnswer | Failure:
        answer, results = await _first(first, headers)
        if answer.status in _TOO_MUCH:
            return Failure(f"HTTP {answer.status}", answer.body[:200].decode("utf-8", "replace"))
        if results is not None and results.error is not None and _is_mended_by_the_original(results.error):
            return Failure(results.error.error_name, results.error.message)
        self._query_id = results.id if results is not None else ""
        while answer.next_uri is not None and time.monotonic() < self._until_s:
            self.next_uri = answer.next_uri
            if _QUEUED not in answer.next_uri:
                self._begin_to_judge()
            try:
                response = await self._get(answer.next_uri)
                body, results = await _read(response)
            except (aiohttp.ClientError, TimeoutError):
                break  # the client will see for itself
            if results is None:
                break
            if results.error is not None and _is_mended_by_the_original(results.error):
                return Failure(results.error.error_name, results.error.message)
            if results.error is not None:  # of which there will be no rows
                return replace(answer, is_allowed=False)
            answer = replace(answer, is_allowed=results.stats.state not in _BEFORE_RUNNING)
            if results.next_uri is None or _has_begun(results):
                break
            answer = replace(answer, body=body, next_uri=results.next_uri)
        return await self._judged(answer)

    def _begin_to_judge(self) -> None:
        """Beside the statement's next answer, which may take a while. Too early, Trino knows of no rules yet."""
        if self._judge is None or self._verdict is not RuleDecision.UNKNOWN:
            return
        if self._judging is not None and self._judging.done():
            self._verdict = self._judging.result()
            self._judging = None
        if self._judging is None and self._verdict is RuleDecision.UNKNOWN:
            self._judging = asyncio.create_task(self._asked())

    async def _asked(self) -> RuleDecision:
        try:
            return await self._judge(self._query_id) if self._judge is not None else RuleDecision.UNKNOWN
        except (aiohttp.ClientError, TimeoutError):
            return RuleDecision.UNKNOWN

    async def _judged(self, answer: TrinoAnswer) -> TrinoAnswer | Failure:
        if self._judge is None or answer.status != 200:
            return answer
        if self._judging is not None:
            self._verdict, self._judging = await self._judging, None
        if self._verdict is RuleDecision.UNKNOWN:
            self._verdict = await self._asked()
        if self._verdict in (RuleDecision.UNKNOWN, RuleDecision.FORBIDDEN):
            name = FORBIDDEN if self._verdict is RuleDecision.FORBIDDEN else UNREAD
            return Failure(name, self._verdict.value, is_running=True)
        return replace(answer, verdict=self._verdict)

    async def past_queue(self, first: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> TrinoAnswer:
        """The same for a query as it came: the last answer of those that are given in the queue, and have no rows."""
        answer, _ = await _first(first, headers)
        while answer.next_uri is not None and _QUEUED in answer.next_uri and time.monotonic() < self._until_s:
            self.next_uri = answer.next_uri
            try:
                body, results = await _read(await self._get(answer.next_uri))
            except (aiohttp.ClientError, TimeoutError):
                return answer
            if results is None or results.next_uri is None or results.error is not None or _has_begun(results):
                return answer
            answer = replace(answer, body=body, next_uri=results.next_uri)
        return answer


async def _first(response: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> tuple[TrinoAnswer, _Results | None]:
    """The answer to a POST, whole. aiohttp.ClientError where it breaks off."""
    async with response:
        body = await response.read()
    results = _results(response, body)
    next_uri = results.next_uri if results is not None else None
    return TrinoAnswer(response.status, response.reason or "", headers, body, next_uri), results


async def _read(response: aiohttp.ClientResponse) -> tuple[bytes, _Results | None]:
    """The body, and what it says: None for what is no ordinary answer, or too long to be one without rows."""
    async with response:
        body, whole = await read_at_most(response.content, LOOKED_AT_BYTES)
        if not whole:
            response.close()
    return body, _results(response, body) if whole else None


def _results(response: aiohttp.ClientResponse, body: bytes) -> _Results | None:
    if response.status != 200:
        return None
    try:
        return msgspec.json.decode(body, type=_Results)
    except msgspec.MsgspecError:
        return None


def _has_begun(results: _Results) -> bool:
    """Whether there are rows, or splits were read to the end: then Trino has found the plan's metadata and files."""
    stats = results.stats
    rows = bytes(results.data).strip() not in (b"null", b"[]")
    return rows or stats.completed_splits > 0 or stats.processed_rows > 0 or stats.state in ("FINISHING", "FINISHED")


def _is_mended_by_the_original(error: _Error) -> bool:
    return error.error_name not in _NOT_OURS and error.error_type != _RESOURCES


def target_of(uri: str, prefix: str) -> str:
    """Path and query of a URI that Trino has handed out, without what `X-Forwarded-Prefix` had it put before them."""
    return URL(uri, encoded=True).raw_path_qs.removeprefix(prefix)
