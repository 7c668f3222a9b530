"""An authorizer that asks Open Policy Agent (OPA) about each operation that the grants allow.

The policy can only take rights away: an error in a policy never allows an operation that the grants do not allow. If
OPA does not answer, or answers with anything except `true`, the operation is refused.

A request is `POST {"input": {…}}` to a rule (`/v1/data/<path>`) of OPA's REST API. The input contains the principal
with its groups and roles, the operation, the privileges that it needs, the warehouse, and the object. A listing sends
several objects in one request, to a rule that returns the positions of the allowed objects, as Trino's plugin does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import structlog

from seamark.formats.protocol.wire import decode_json
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, ConfigError, RetryLater
from seamark.formats.runtime.tls import build_client_context
from seamark.metaserver.access.authorizer import Authorizer, Scope, find_rule
from seamark.metaserver.access.bearer_files import read_bearer_token
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.rights.privileges import list_names
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import NamespacePath

BATCH_MAX = 1000
"""The maximum number of objects in one request."""
REQUESTS_MAX = 32
"""The maximum number of concurrent requests to OPA. One principal has at most half of them."""
_WAITS_MAX = 10
"""The maximum time that a request waits for a slot, as a multiple of `opa_timeout_s`."""
ANSWER_BYTES_MAX = 1 << 20
_log = structlog.get_logger("seamark.opa")
_Question: TypeAlias = tuple[str, tuple[str, ...], str, Securable]


class PolicySlots:
    """Slots for requests to OPA, which the principals share. An instance belongs to one event loop.

    A principal has at most half of the slots. Among the waiting requests, a single decision is served before a part of
    a listing. Among equal requests, the principal with the fewest slots is served first, then the request that has
    waited longest. So the listings of one principal do not delay the requests of other principals.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._share = max(1, limit // 2)
        self._slots_by_holder: Counter[str] = Counter()
        self._waiting: dict[tuple[bool, str], deque[tuple[int, asyncio.Future[None]]]] = {}
        self._arrivals = count()

    @asynccontextmanager
    async def take(self, holder: str, *, is_listing: bool, wait_s: float) -> AsyncIterator[None]:
        """Wait for a slot, and hold it while the context is active.

        Raises:
            TimeoutError: No slot became free within `wait_s`.
        """
        if self._may_start(holder):
            self._slots_by_holder[holder] += 1
        else:
            await self._wait(holder, is_listing, wait_s)
        try:
            yield
        finally:
            self._release(holder)

    async def _wait(self, holder: str, is_listing: bool, wait_s: float) -> None:
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((is_listing, holder), deque()).append((next(self._arrivals), slot))
        try:
            async with asyncio.timeout(wait_s):
                await slot
        except BaseException:
            if slot.done() and not slot.cancelled():  # The slot was granted at the same time as the timeout.
                self._release(holder)
            else:
                slot.cancel()
            raise

    def _may_start(self, holder: str) -> bool:
        return self._slots_by_holder.total() < self._limit and self._slots_by_holder[holder] < self._share

    def _release(self, holder: str) -> None:
        self._slots_by_holder[holder] -= 1
        if not self._slots_by_holder[holder]:
            del self._slots_by_holder[holder]
        while self._slots_by_holder.total() < self._limit:
            queues = [key for key in self._waiting if self._slots_by_holder[key[1]] < self._share]
            if not queues:
                break
            key = min(queues, key=lambda key: (key[0], self._slots_by_holder[key[1]], self._waiting[key][0][0]))
            _, slot = self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            if not slot.done():
                self._slots_by_holder[key[1]] += 1
                slot.set_result(None)

    def check_invariants(self) -> None:
        """Check that no limit is exceeded, and that no waiting request may start. Only tests call this method."""
        assert self._slots_by_holder.total() <= self._limit
        assert all(0 < held_slots <= self._share for held_slots in self._slots_by_holder.values())
        waiting_holders = [key[1] for key, queue in self._waiting.items() if any(not slot.done() for _, slot in queue)]
        assert not any(self._may_start(holder) for holder in waiting_holders)

    @property
    def is_free(self) -> bool:
        """Whether no request uses a slot or waits for a slot. Only tests use this property."""
        return not self._slots_by_holder and not self._waiting


class OpaClient:
    """Requests decisions from OPA, and caches them for a short time."""

    def __init__(self, settings: Settings, clock: Clock, http: aiohttp.ClientSession, warehouse_name: str) -> None:
        self._url, self._batch_url = settings.opa_url, settings.opa_batch_url
        self._token_file = settings.opa_token_file
        self._timeout_s, self._cache_s = settings.opa_timeout_s, settings.opa_cache_s
        self._entries_max = settings.opa_cache_entries
        self._clock = clock
        self._http = http
        self._warehouse_name = warehouse_name
        self.slots = PolicySlots(REQUESTS_MAX)
        self._decisions: OrderedDict[_Question, tuple[bool, float]] = OrderedDict()

    async def decide(self, principal: Principal, operation: str, securables: Sequence[Securable]) -> list[bool]:
        """Return, for each object, whether the policy allows the operation on it.

        Raises:
            RetryLater: OPA does not answer, or its answer is invalid.
        """
        now_s = self._clock.monotonic()
        questions = [(principal.name, principal.groups, operation, securable) for securable in securables]
        answers_by_question: dict[_Question, bool] = {}
        for question in questions:
            is_allowed, until_s = self._decisions.get(question, (False, now_s))
            if until_s > now_s:
                answers_by_question[question] = is_allowed
        new_questions = list(dict.fromkeys(question for question in questions if question not in answers_by_question))
        for start in range(0, len(new_questions), BATCH_MAX):
            batch = new_questions[start : start + BATCH_MAX]
            answers = await self._ask(principal, operation, [question[3] for question in batch])
            answers_by_question.update(zip(batch, answers, strict=True))
            self._keep(zip(batch, answers, strict=True), now_s + self._cache_s)
        return [answers_by_question[question] for question in questions]

    def _keep(self, decisions: Any, until_s: float) -> None:
        if self._cache_s <= 0:
            return
        for question, is_allowed in decisions:
            self._decisions[question] = is_allowed, until_s
            self._decisions.move_to_end(question)
        while len(self._decisions) > self._entries_max:
            self._decisions.popitem(last=False)

    async def _ask(self, principal: Principal, operation: str, securables: list[Securable]) -> list[bool]:
        question = {
            "principal": {"name": principal.name, "groups": list(principal.groups)},
            "operation": operation,
            "privileges": list_names(find_rule(operation).bits),
            "warehouse": self._warehouse_name,
        }
        objects = [_describe_securable(securable) for securable in securables]
        try:
            if len(objects) == 1:
                return [await self._post(principal.name, self._url, {**question, "object": objects[0]}) is True]
            if self._batch_url:
                positions = await self._post(
                    principal.name, self._batch_url, {**question, "objects": objects}, is_listing=True
                )
                return _read_positions(positions, len(objects))
            return await self._ask_each(
                principal.name, [{**question, "object": object_fields} for object_fields in objects]
            )
        except (aiohttp.ClientError, OSError, TimeoutError, BadRequest, ValueError) as error:
            _log.warning("Open Policy Agent gave no decision", error=str(error) or type(error).__name__)
            raise RetryLater(
                "The policy server gave no decision, so the request is refused; try again shortly", 1
            ) from None

    async def _ask_each(self, holder: str, questions: list[dict[str, Any]]) -> list[bool]:
        try:
            async with asyncio.TaskGroup() as group:  # The first failure cancels the other requests.
                posts = [
                    group.create_task(self._post(holder, self._url, question, is_listing=True))
                    for question in questions
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [post.result() is True for post in posts]

    async def _post(self, holder: str, url: str, question: dict[str, Any], *, is_listing: bool = False) -> object:
        """Return the `result` of OPA's answer, or None if the rule has no value.

        The time limit begins when the request is sent, so it does not include the wait for a slot.
        """
        headers = {"Accept": "application/json"}
        if self._token_file:
            token = await asyncio.to_thread(read_bearer_token, Path(self._token_file))
            headers["Authorization"] = f"Bearer {token}"
        async with (
            self.slots.take(holder, is_listing=is_listing, wait_s=_WAITS_MAX * self._timeout_s),
            self._http.post(url, json={"input": question}, headers=headers, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise ValueError(f"OPA answered {answer.status}")
            body = bytearray()
            async for piece in answer.content.iter_chunked(1 << 16):
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    raise ValueError(f"OPA sent more than {ANSWER_BYTES_MAX:,} bytes")
            document = decode_json(bytes(body), "the answer")
            return document.get("result") if isinstance(document, dict) else None


def _describe_securable(securable: Securable) -> dict[str, Any]:
    kind = securable.kind if securable.namespace or securable.kind == "server" else "warehouse"
    fields = {"kind": kind, "namespace": list(securable.namespace)}
    return {**fields, "name": securable.name} if securable.name else fields


def _read_positions(positions: object, count: int) -> list[bool]:
    """Return, for each position below `count`, whether the answer contains it.

    Raises:
        ValueError: The answer is not a list of positions.
    """
    if positions is None:
        return [False] * count
    if not isinstance(positions, list) or not all(type(place) is int and 0 <= place < count for place in positions):
        raise ValueError("the result is not a list of positions in the objects")
    allowed_positions = set(positions)
    return [place in allowed_positions for place in range(count)]


class OpaAuthorizer(Authorizer):
    """An authorizer that allows an operation if both the grants and the policy allow it.

    The policy does not decide about requests of the server's own jobs. A job acts for the principals that set policies
    of the table, and their rights are checked before the job starts.
    """

    def __init__(self, grants: Authorizer, policy: OpaClient) -> None:
        self._grants = grants
        self._policy = policy

    async def require(
        self, principal: Principal, operation: str, securable: Securable, shown_name: str | None = None
    ) -> None:
        await self._grants.require(principal, operation, securable, shown_name)
        await super().require(principal, operation, securable, shown_name)

    async def allows(self, principal: Principal, operation: str, securable: Securable) -> bool:
        if not await self._grants.allows(principal, operation, securable):
            return False
        if find_rule(operation).scope is Scope.LOGIN or principal.name == SERVICE_PRINCIPAL:
            return True
        (is_allowed,) = await self._policy.decide(principal, operation, [securable])
        return is_allowed

    async def allows_each(self, principal: Principal, operation: str, securables: Sequence[Securable]) -> list[bool]:
        results = await self._grants.allows_each(principal, operation, securables)
        if principal.name == SERVICE_PRINCIPAL:
            return results
        granted_places = [place for place, is_allowed in enumerate(results) if is_allowed]
        decisions = await self._policy.decide(principal, operation, [securables[place] for place in granted_places])
        for place, is_allowed in zip(granted_places, decisions, strict=True):
            results[place] = is_allowed
        return results

    async def require_somewhere(self, principal: Principal, operation: str) -> None:
        await self._grants.require_somewhere(principal, operation)

    async def allows_somewhere(self, principal: Principal, operation: str) -> bool:
        # The policy decides later, when a request names an object.
        return await self._grants.allows_somewhere(principal, operation)

    async def sees(self, principal: Principal, namespaces: Sequence[NamespacePath]) -> list[bool]:
        visibility = await self._grants.sees(principal, namespaces)
        if principal.name == SERVICE_PRINCIPAL:
            return visibility
        listed_namespaces = [
            Securable(namespace) for namespace, is_seen in zip(namespaces, visibility, strict=True) if is_seen
        ]
        decisions = iter(await self._policy.decide(principal, "namespaceExists", listed_namespaces))
        return [is_seen and next(decisions) for is_seen in visibility]

    async def explain_refusal(self, principal: Principal, operation: str, securable: Securable) -> str:
        return f"{principal.name} may not {operation} here: the policy of Open Policy Agent does not allow it"

    def is_uniform(self, principal: Principal, operation: str, namespace: NamespacePath) -> bool:
        return False

    def list_visible_children(self, principal: Principal, parent: NamespacePath) -> frozenset[str] | None:
        return self._grants.list_visible_children(principal, parent)

    def list_readable_namespaces(self, principal: Principal) -> list[NamespacePath] | None:
        return self._grants.list_readable_namespaces(principal)

    def list_writable_namespaces(self, principal: Principal) -> tuple[NamespacePath, ...] | None:
        # The policy does not decide about locations, so confine each caller to the namespace of its request.
        return ()

    def list_owning_namespaces(self, principal: Principal) -> tuple[NamespacePath, ...]:
        return self._grants.list_owning_namespaces(principal)

    def list_reusing_namespaces(self, principal: Principal) -> tuple[NamespacePath, ...]:
        # The policy might deny access to the dropped object, but does not decide about dropped objects.
        return ()


@asynccontextmanager
async def open_authorizer(
    settings: Settings, clock: Clock, grants: Authorizer, warehouse_name: str
) -> AsyncIterator[Authorizer]:
    """Open the configured authorizer: the grants alone, or the grants and Open Policy Agent.

    Raises:
        ConfigError: The certificate authorities in `opa_ca_file` cannot be read.
    """
    if not settings.opa_url:
        yield grants
        return
    try:
        tls = build_client_context(settings.opa_ca_file) if settings.opa_ca_file else None
    except ValueError as error:
        raise ConfigError(f"opa_ca_file: {error}") from None
    connector = aiohttp.TCPConnector(ssl=tls or True, limit=REQUESTS_MAX)
    timeout = aiohttp.ClientTimeout(total=settings.opa_timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        yield OpaAuthorizer(grants, OpaClient(settings, clock, http, warehouse_name))
