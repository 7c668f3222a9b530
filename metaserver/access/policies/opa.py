"""Asks Open Policy Agent (OPA) about each operation that the grants allow. Only the answer `true` allows it.

A request is `POST {"input": {…}}` to a rule (`/v1/data/<path>`) of OPA's REST API. The input contains the principal
with its groups and roles, the operation, the privileges that it needs, the warehouse, and the object. A listing sends
several objects in one request, to a rule that returns the positions of the allowed objects, as Trino's plugin does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import aiohttp

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.authorizer import find_rule
from seamark.metaserver.access.policies.policy import PolicyClient
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.rights.privileges import list_names
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.settings.settings import Settings


class OpaClient(PolicyClient):
    """Requests decisions from OPA."""

    product = "Open Policy Agent"
    objects_max = 1000

    def __init__(self, settings: Settings, clock: Clock, http: aiohttp.ClientSession, warehouse_name: str) -> None:
        super().__init__(
            http,
            clock,
            token_file=settings.opa_token_file,
            timeout_s=settings.opa_timeout_s,
            cache_s=settings.opa_cache_s,
            entries_max=settings.opa_cache_entries,
        )
        self._url, self._batch_url = settings.opa_url, settings.opa_batch_url
        self._warehouse_name = warehouse_name

    async def ask(
        self, principal: Principal, operation: str, securables: list[Securable], *, is_listing: bool
    ) -> list[bool]:
        question = {
            "principal": {"name": principal.name, "groups": list(principal.groups)},
            "operation": operation,
            "privileges": list_names(find_rule(operation).bits),
            "warehouse": self._warehouse_name,
        }
        objects = [_describe_securable(securable) for securable in securables]
        if len(objects) == 1:
            return [await self._post_input(principal.name, self._url, {**question, "object": objects[0]}) is True]
        if self._batch_url:
            positions = await self._post_input(
                principal.name, self._batch_url, {**question, "objects": objects}, is_listing=True
            )
            return _read_positions(positions, len(objects))
        return await self._ask_each(principal.name, [{**question, "object": fields} for fields in objects])

    async def _ask_each(self, holder: str, questions: list[dict[str, Any]]) -> list[bool]:
        posts = [partial(self._post_input, holder, self._url, question, is_listing=True) for question in questions]
        return [result is True for result in await gather(posts)]

    async def _post_input(self, holder: str, url: str, question: dict[str, Any], *, is_listing: bool = False) -> object:
        """Return the `result` of OPA's answer, or None if the rule has no value."""
        return (await self.post(holder, url, {"input": question}, is_listing=is_listing)).get("result")


def _describe_securable(securable: Securable) -> dict[str, Any]:
    kind = securable.kind if securable.namespace or securable.kind == "server" else "warehouse"
    fields = {"kind": kind, "namespace": list(securable.namespace)}
    return {**fields, "name": securable.name} if securable.name else fields


def _read_positions(positions: object, count: int) -> list[bool]:
    """Return, for each position below `count`, whether the answer contains it. None contains no position.

    Raises:
        ValueError: The answer is not a list of positions.
    """
    if positions is None:
        return [False] * count
    if not isinstance(positions, list) or not all(
        type(position) is int and 0 <= position < count for position in positions
    ):
        raise ValueError("the result is not a list of positions in the objects")
    allowed_positions = set(positions)
    return [position in allowed_positions for position in range(count)]
