"""The parts that all policy servers share: slots for requests, a cache of decisions, and the authorizer.

A policy can only take rights away: an error in a policy never allows an operation that the grants do not allow. If the
policy server gives no decision, the operation is refused.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

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
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.store.model import NamespacePath

REQUESTS_MAX = 32
"""The maximum number of concurrent requests to a policy server. One principal has at most half of them."""
_WAITS_MAX = 10
"""The maximum time that a request waits for a slot, as a multiple of the timeout of a request."""
ANSWER_BYTES_MAX = 1 << 20
_ERROR_BYTES_MAX = 300
"""The maximum number of bytes of an error's message that are logged."""
_log = structlog.get_logger("seamark.policy")


class _Question(NamedTuple):
    principal_name: str
    groups: tuple[str, ...]
    operation: str
    securable: Securable


class _QueueKey(NamedTuple):
    is_listing: bool
    holder: str


class PolicySlots:
    """Slots for requests to a policy server, which the principals share. An instance belongs to one event loop.

    A principal has at most half of the slots. Among the waiting requests, a single decision is served before a part of
    a listing. Among equal requests, the principal with the fewest slots is served first, then the request that has
    waited longest. So the listings of one principal do not delay the requests of other principals.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._share = max(1, limit // 2)
        self._slots_by_holder: Counter[str] = Counter()
        self._waiting: dict[_QueueKey, deque[tuple[int, asyncio.Future[None]]]] = {}
        """The number and the future slot of each waiting request, by queue. The numbers have the order of arrival."""
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
        """Wait until the holder has a slot.

        Raises:
            TimeoutError: No slot became free within `wait_s`.
        """
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(_QueueKey(is_listing, holder), deque()).append((next(self._arrivals), slot))
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
        """Release a slot of a holder, and give the free slots to waiting requests of holders below their share."""
        self._slots_by_holder[holder] -= 1
        if not self._slots_by_holder[holder]:
            del self._slots_by_holder[holder]
        while self._slots_by_holder.total() < self._limit:
            queues = [key for key in self._waiting if self._slots_by_holder[key.holder] < self._share]
            if not queues:
                break
            key = min(queues, key=self._rank_queue)
            _, slot = self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            if not slot.done():
                self._slots_by_holder[key.holder] += 1
                slot.set_result(None)

    def _rank_queue(self, key: _QueueKey) -> tuple[bool, int, int]:
        """Return a sort key: the queue with the lowest key is served next.

        Requests for single objects precede listings. Then the principal with the fewest slots is first, then the
        request that has waited longest.
        """
        arrival_number, _ = self._waiting[key][0]
        return key.is_listing, self._slots_by_holder[key.holder], arrival_number

    def check_invariants(self) -> None:
        """Check that no limit is exceeded, and that no waiting request may start. Only tests call this method."""
        assert self._slots_by_holder.total() <= self._limit
        assert all(0 < held_slots <= self._share for held_slots in self._slots_by_holder.values())
        waiting_holders = [
            key.holder for key, queue in self._waiting.items() if any(not slot.done() for _, slot in queue)
        ]
        assert not any(self._may_start(holder) for holder in waiting_holders)

    @property
    def is_free(self) -> bool:
        """Whether no request uses a slot or waits for a slot. Only tests use this property."""
        return not self._slots_by_holder and not self._waiting


class PolicyClient(ABC):
    """Requests decisions from a policy server, and caches them for a short time.

    Attributes:
        product: The name of the policy server in messages.
        objects_max: The maximum number of objects in one request.
    """

    product: str
    objects_max: int

    def __init__(
        self,
        http: aiohttp.ClientSession,
        clock: Clock,
        *,
        token_file: str,
        timeout_s: float,
        cache_s: float,
        entries_max: int,
    ) -> None:
        self._http = http
        self._clock = clock
        self._token_file = token_file
        self._timeout_s = timeout_s
        self._cache_s = cache_s
        self._entries_max = entries_max
        self.slots = PolicySlots(REQUESTS_MAX)
        self._decisions: OrderedDict[_Question, tuple[bool, float]] = OrderedDict()

    @abstractmethod
    async def ask(
        self, principal: Principal, operation: str, securables: list[Securable], *, is_listing: bool
    ) -> Sequence[bool | None]:
        """Request the decisions for at most `objects_max` objects.

        Returns:
            The decisions. In a listing, the decision about an object is None if the policy server cannot decide.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError, BadRequest, ValueError: The server gave no valid answer.
        """

    async def decide(
        self, principal: Principal, operation: str, securables: Sequence[Securable], *, is_listing: bool = False
    ) -> list[bool]:
        """Return, for each object, whether the policy allows the operation on it.

        Raises:
            RetryLater: The policy server does not answer, or its answer is invalid.
        """
        now_s = self._clock.monotonic()
        questions = [_Question(principal.name, principal.groups, operation, securable) for securable in securables]
        answers_by_question: dict[_Question, bool] = {}
        for question in questions:
            is_allowed, until_s = self._decisions.get(question, (False, now_s))
            if until_s > now_s:
                answers_by_question[question] = is_allowed
        new_questions = list(dict.fromkeys(question for question in questions if question not in answers_by_question))
        for start in range(0, len(new_questions), self.objects_max):
            batch = new_questions[start : start + self.objects_max]
            answers = await self._ask(principal, operation, [question.securable for question in batch], is_listing)
            # A listing omits an object without a decision. The cache does not contain it, because a later request
            # must ask again.
            answers_by_question.update(zip(batch, (answer is True for answer in answers), strict=True))
            decisions = [
                (question, answer) for question, answer in zip(batch, answers, strict=True) if answer is not None
            ]
            self._keep(decisions, now_s + self._cache_s)
        return [answers_by_question[question] for question in questions]

    def _keep(self, decisions: Iterable[tuple[_Question, bool]], until_s: float) -> None:
        if self._cache_s <= 0:
            return
        for question, is_allowed in decisions:
            self._decisions[question] = is_allowed, until_s
            self._decisions.move_to_end(question)
        while len(self._decisions) > self._entries_max:
            self._decisions.popitem(last=False)

    async def _ask(
        self, principal: Principal, operation: str, securables: list[Securable], is_listing: bool
    ) -> Sequence[bool | None]:
        try:
            return await self.ask(principal, operation, securables, is_listing=is_listing)
        except (aiohttp.ClientError, OSError, TimeoutError, BadRequest, ValueError) as error:
            _log.warning(f"{self.product} gave no decision", error=str(error) or type(error).__name__)
            raise RetryLater(
                "The policy server gave no decision, so the request is refused; try again shortly", retry_after_s=1
            ) from None

    async def post(self, holder: str, url: str, body: Mapping[str, Any], *, is_listing: bool = False) -> dict[str, Any]:
        """Return the JSON object that the policy server answers.

        The time limit begins when the request is sent, so it does not include the wait for a slot.

        Raises:
            ValueError: The answer is an error, is too large, or is no JSON object.
        """
        headers = {"Accept": "application/json"}
        if self._token_file:
            token = await asyncio.to_thread(read_bearer_token, Path(self._token_file))
            headers["Authorization"] = f"Bearer {token}"
        async with (
            self.slots.take(holder, is_listing=is_listing, wait_s=_WAITS_MAX * self._timeout_s),
            self._http.post(url, json=body, headers=headers, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                beginning = (await answer.content.read(_ERROR_BYTES_MAX)).decode(errors="replace")
                raise ValueError(f"{self.product} answered {answer.status}: {beginning}")
            data = bytearray()
            async for piece in answer.content.iter_chunked(1 << 16):
                data += piece
                if len(data) > ANSWER_BYTES_MAX:
                    raise ValueError(f"{self.product} sent more than {ANSWER_BYTES_MAX:,} bytes")
            document = decode_json(bytes(data), "the answer")
            if not isinstance(document, dict):
                raise ValueError(f"{self.product} sent no JSON object")
            return document


class PolicyAuthorizer(Authorizer):
    """An authorizer that allows an operation if both the grants and the policy allow it.

    The policy does not decide about requests of the server's own jobs. A job acts for the principals that set policies
    of the table, and their rights are checked before the job starts.
    """

    def __init__(self, grants: Authorizer, policy: PolicyClient) -> None:
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
        granted_indexes = [index for index, is_allowed in enumerate(results) if is_allowed]
        granted_securables = [securables[index] for index in granted_indexes]
        decisions = await self._policy.decide(principal, operation, granted_securables, is_listing=True)
        for index, is_allowed in zip(granted_indexes, decisions, strict=True):
            results[index] = is_allowed
        return results

    async def require_somewhere(self, principal: Principal, operation: str) -> None:
        await self._grants.require_somewhere(principal, operation)

    async def allows_somewhere(self, principal: Principal, operation: str) -> bool:
        # The policy decides later, when a request names an object.
        return await self._grants.allows_somewhere(principal, operation)

    async def sees(self, principal: Principal, namespaces: Sequence[NamespacePath]) -> list[bool]:
        """Return for each namespace whether the grants and the policy allow that `principal` sees it in listings."""
        visibility = await self._grants.sees(principal, namespaces)
        # The policy is not queried for the server's own jobs. They act for principals whose rights were checked before
        # the job started.
        if principal.name == SERVICE_PRINCIPAL:
            return visibility
        listed_namespaces = [
            Securable(namespace) for namespace, is_seen in zip(namespaces, visibility, strict=True) if is_seen
        ]
        decisions = iter(await self._policy.decide(principal, "namespaceExists", listed_namespaces, is_listing=True))
        return [is_seen and next(decisions) for is_seen in visibility]

    async def explain_refusal(
        self, principal: Principal, operation: str, securable: Securable, *, names_entry: bool = False
    ) -> str:
        return f"{principal.name} may not {operation} here: the policy of {self._policy.product} does not allow it"

    def allows_everywhere(self, principal: Principal, operation: str, namespace: NamespacePath) -> bool:
        return False

    def list_visible_children(self, principal: Principal, parent: NamespacePath) -> frozenset[str] | None:
        return self._grants.list_visible_children(principal, parent)

    def list_readable_namespaces(self, principal: Principal) -> list[NamespacePath] | None:
        return self._grants.list_readable_namespaces(principal)

    def list_writable_namespaces(self, principal: Principal) -> tuple[NamespacePath, ...] | None:
        # The policy does not decide about locations, so confine each caller to the namespace of its request.
        return ()

    def list_namespaces_granting_ownership(self, principal: Principal) -> tuple[NamespacePath, ...]:
        return self._grants.list_namespaces_granting_ownership(principal)

    def list_namespaces_for_location_reuse(self, principal: Principal) -> tuple[NamespacePath, ...]:
        """Return no namespace, so that no new object may reuse the location of a dropped object."""
        # The policy might have denied access to the dropped object, and the policy server is not queried about it.
        return ()


@asynccontextmanager
async def open_session(timeout_s: float, authorities_file: str, setting: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Open the connections to a policy server.

    Args:
        timeout_s: The time limit of a request.
        authorities_file: The file with the authorities of its certificate, or an empty text.
        setting: The name of the setting that names this file.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        tls = build_client_context(authorities_file) if authorities_file else None
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from None
    connector = aiohttp.TCPConnector(ssl=tls or True, limit=REQUESTS_MAX)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)) as http:
        yield http
