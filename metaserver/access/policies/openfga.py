"""Asks OpenFGA about each operation that the grants allow. The operation needs a relation for each of its privileges.

OpenFGA has relations of principals to objects, which an operator writes. It does not have the objects of the catalog:
each question brings the containers of its object, and the groups of its principal, as contextual tuples. So creations,
renames and drops change nothing in OpenFGA. Relations stay with a name, as grants do until a rename moves them.

`deploy/openfga/model.json` is the authorization model. `can_<privilege>` is the relation that the server asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.access.authorizer import Scope, find_rule
from seamark.metaserver.access.policies.policy import PolicyClient
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import THE_SERVER, WAREHOUSE, Securable, list_enclosing_securables
from seamark.metaserver.access.rights.privileges import list_names
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import FUNCTION, SERVER

OWN_WAREHOUSE = "_"
"""The id of the server's own warehouse, which no further warehouse can have as its name."""
SERVER_OBJECT = "server:_"
_CHECKS_MAX = 50
"""The maximum number of checks in one request, which is OpenFGA's default limit."""
_BATCH_BYTES_MAX = 400_000
"""The maximum size of the checks in one request. OpenFGA refuses messages of more than 616,448 bytes."""
_TUPLES_MAX = 100
"""OpenFGA's limit of contextual tuples in one check."""
_ID_CHARS_MAX = 240
_ERROR_CHARS_MAX = 200
_UNESCAPED_CHARS = "._~@-"
_log = structlog.get_logger("seamark.policy")


class _Check(NamedTuple):
    relation: str
    securable: Securable


class OpenFgaClient(PolicyClient):
    """Requests decisions from OpenFGA."""

    product = "OpenFGA"
    objects_max = 1000

    def __init__(self, settings: Settings, clock: Clock, http: aiohttp.ClientSession, warehouse_name: str) -> None:
        super().__init__(
            http,
            clock,
            token_file=settings.openfga_token_file,
            timeout_s=settings.openfga_timeout_s,
            cache_s=settings.openfga_cache_s,
            entries_max=settings.openfga_cache_entries,
        )
        store = quote(settings.openfga_store_id, safe="")
        self._url = f"{settings.openfga_url.rstrip('/')}/stores/{store}/batch-check"
        self._options = {"consistency": settings.openfga_consistency.upper()}
        if settings.openfga_model_id:
            self._options["authorization_model_id"] = settings.openfga_model_id
        self._warehouse = warehouse_name or OWN_WAREHOUSE

    async def ask(
        self, principal: Principal, operation: str, securables: list[Securable], *, is_listing: bool
    ) -> list[bool | None]:
        checks_by_object = [list_checks(operation, securable) for securable in securables]
        checks = list(dict.fromkeys(check for checks in checks_by_object for check in checks))
        batches = self._make_batches(principal, checks, is_listing=is_listing)
        answers = await gather([partial(self._check, principal, batch, is_listing=is_listing) for batch in batches])
        decisions = dict(chain.from_iterable(answer.items() for answer in answers))
        return [_join_decisions([decisions.get(check) for check in checks]) for checks in checks_by_object]

    def _make_batches(
        self, principal: Principal, checks: Sequence[_Check], *, is_listing: bool
    ) -> list[dict[_Check, dict[str, Any]]]:
        """Return the question of each check, in batches that OpenFGA accepts.

        A question names the groups of the principal, and the objects that contain the object (namespaces, warehouse and
        server). In a listing, a check with too many of both has no question.

        Raises:
            Forbidden: The principal belongs to too many groups.
        """
        user = name_user(principal.name)
        members = [_make_tuple(user, "member", name_group(group)) for group in principal.groups]
        batches: list[dict[_Check, dict[str, Any]]] = []
        hidden_checks: list[_Check] = []
        batch_bytes = 0
        for check in checks:
            tuples = [*members, *self._list_containers(check.securable)]
            if len(tuples) > _TUPLES_MAX:
                if not is_listing:
                    raise Forbidden(
                        f"{principal.name} has {len(members)} groups and roles. OpenFGA accepts at most {_TUPLES_MAX} "
                        "groups and containers of the object; configure the issuer to state fewer groups"
                    )
                hidden_checks.append(check)
                continue
            key = _make_tuple(user, check.relation, name_object(self._warehouse, check.securable))
            question = {"tuple_key": key, "contextual_tuples": {"tuple_keys": tuples}}
            question_bytes = len(json.dumps(question))
            if not batches or len(batches[-1]) == _CHECKS_MAX or batch_bytes + question_bytes > _BATCH_BYTES_MAX:
                batches.append({})
                batch_bytes = 0
            batches[-1][check] = question
            batch_bytes += question_bytes
        _log_hidden(hidden_checks, f"OpenFGA accepts at most {_TUPLES_MAX} groups and containers of an object")
        return batches

    async def _check(
        self, principal: Principal, questions: Mapping[_Check, dict[str, Any]], *, is_listing: bool
    ) -> dict[_Check, bool]:
        """Return the decisions of OpenFGA. In a listing, a check with an error has no decision.

        Raises:
            ValueError: OpenFGA did not decide about each check.
        """
        numbered_checks = [
            {**question, "correlation_id": str(number)} for number, question in enumerate(questions.values())
        ]
        body = {**self._options, "checks": numbered_checks}
        decisions = (await self.post(principal.name, self._url, body, is_listing=is_listing)).get("result")
        check_decisions: dict[_Check, bool] = {}
        hidden_checks, error_text = [], ""
        for number, check in enumerate(questions):
            decision = decisions.get(str(number)) if isinstance(decisions, dict) else None
            if is_listing and isinstance(decision, dict) and decision.get("error"):
                hidden_checks.append(check)
                error_text = str(decision["error"])[:_ERROR_CHARS_MAX]
            else:
                check_decisions[check] = _read_decision(decision)
        _log_hidden(hidden_checks, error_text)
        return check_decisions

    def _list_containers(self, securable: Securable) -> list[dict[str, str]]:
        """Return the relations between the object, the namespaces above it, the warehouse and the server."""
        warehouse = name_object(self._warehouse, WAREHOUSE)
        if securable.kind == SERVER:
            return [_make_tuple(warehouse, "own_warehouse", SERVER_OBJECT)]
        objects = [
            SERVER_OBJECT,
            *(name_object(self._warehouse, outer) for outer in list_enclosing_securables(securable)),
        ]
        objects.append(name_object(self._warehouse, securable))
        return [_make_tuple(container, "parent", contained) for container, contained in pairwise(objects)]


def list_checks(operation: str, securable: Securable) -> list[_Check]:
    """Return the checks that must all succeed, so that a principal may do the operation on the object."""
    rule = find_rule(operation)
    if rule.scope in (Scope.SEEN, Scope.LISTING):
        # Every login sees the root, and its listing is filtered.
        is_root = rule.scope is Scope.SEEN and not securable.namespace
        return [] if is_root else [_Check("can_list", securable.container)]
    places = {
        Scope.OBJECT: [securable],
        Scope.SERVER: [THE_SERVER],
        Scope.WAREHOUSE: [WAREHOUSE, securable],
        Scope.CATALOG: [WAREHOUSE, securable],
    }[rule.scope]
    relations = [f"can_{name.replace('-', '_')}" for name in list_names(rule.bits)]
    return [_Check(relation, place) for place in dict.fromkeys(places) for relation in relations]


def _join_decisions(decisions: Sequence[bool | None]) -> bool | None:
    """Return whether all checks of an object are allowed, or None if this depends on a check without a decision."""
    if False in decisions:
        return False
    return None if None in decisions else True


def name_user(principal: str) -> str:
    """Return the user of OpenFGA for a principal: `user:oidc%3Aann` for `oidc:ann`."""
    return f"user:{_escape(principal)}"


def name_group(group: str) -> str:
    """Return the object of OpenFGA for a group or a role: `group:role%3Aanalyst` for `role:analyst`."""
    return f"group:{_escape(group)}"


def name_object(warehouse: str, securable: Securable) -> str:
    """Return the object of OpenFGA for an object of the catalog: `table:_/shop/orders`.

    A view has the type of a table, because they share their names. A long id is replaced by its digest.
    """
    if securable.kind == SERVER:
        return SERVER_OBJECT
    names = [warehouse, *securable.namespace, *([securable.name] if securable.name else [])]
    if not securable.namespace:
        return f"warehouse:{_escape(warehouse)}"
    kind = "namespace" if not securable.name else "function" if securable.kind == FUNCTION else "table"
    identifier = "/".join(quote(name, safe=_UNESCAPED_CHARS) for name in names)
    return f"{kind}:{_shorten(identifier)}"


def _escape(name: str) -> str:
    return _shorten(quote(name, safe=_UNESCAPED_CHARS))


def _shorten(identifier: str) -> str:
    """Return the escaped identifier, or its digest if it is longer than OpenFGA allows."""
    if len(identifier) <= _ID_CHARS_MAX:
        return identifier
    # In an escaped name, `%` is followed by two hexadecimal digits. So no name is equal to `%sha256-` and a digest.
    return f"%sha256-{hashlib.sha256(identifier.encode()).hexdigest()}"


def _make_tuple(user: str, relation: str, name: str) -> dict[str, str]:
    return {"user": user, "relation": relation, "object": name}


def _log_hidden(checks: Sequence[_Check], error_text: str) -> None:
    """Log the objects that a listing omits, in one line."""
    if checks:
        _log.warning(
            "OpenFGA gave no decision about some objects, so a listing omits them",
            objects=len(checks),
            first=".".join((*checks[0].securable.namespace, checks[0].securable.name))[:_ERROR_CHARS_MAX],
            error=error_text,
        )


def _read_decision(decision: object) -> bool:
    """Return whether OpenFGA allows a check.

    Raises:
        ValueError: There is no decision, or an error instead of a decision.
    """
    if not isinstance(decision, dict):
        raise ValueError("the answer has no decision for a check")
    if "error" in decision:
        raise ValueError(f"the answer has an error for a check: {str(decision['error'])[:_ERROR_CHARS_MAX]}")
    allowed: Any = decision.get("allowed")
    if not isinstance(allowed, bool):
        raise ValueError("a decision is neither true nor false")
    return allowed
