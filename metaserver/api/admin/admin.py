"""Routes of access control: tokens, grants and the audit log.

Tokens and the log belong to the whole catalog, so they require an admin of the catalog. Grants belong to a
namespace. An admin of a namespace grants and revokes roles on the namespace and below it, and sees no other grants.
Only the answer that creates a token contains its secret; digests are never returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from seamark.formats.protocol.wire import check_name, parse_namespace
from seamark.formats.runtime.decoding import from_attributes
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.principal import RANKS, Role, make_grant
from seamark.metaserver.access.tokens import TTL_S_MAX, create_token, is_live, revoke_token
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.parameters.paging import PAGING
from seamark.metaserver.store.model import AccessToken, AuditRecord
from seamark.metaserver.store.operations import RemoveGrant, SaveGrant

T = TypeVar("T")

_PRINCIPAL = "A token's name, or oidc:<subject>."
_ROLE = {"enum": list(RANKS)}
_GRANT_QUERY = (
    Parameter("principal", "query", "Whose.", {"type": "string"}, True),
    Parameter("role", "query", "Which.", _ROLE, True),
    Parameter("namespace", "query", "Levels joined by 0x1F; omit it for the whole catalog.", {"type": "string"}),
)
_GRANTS_MAX = 1000
"""The maximum number of grants in a request that creates a token."""
_FORBIDDEN = ResponseSpec(403, "Requires the role admin")


_RoleName = Annotated[str, msgspec.Meta(extra_json_schema=_ROLE)]
_Levels = Annotated[tuple[str, ...], doc("The levels; none for the whole catalog.")]


class TokenAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    id: str
    name: Annotated[str, doc("The principal.")]
    live: bool
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None


class TokenPage(msgspec.Struct, frozen=True, rename="kebab"):
    tokens: list[TokenAnswer]
    next_page_token: str | None


class CreatedToken(msgspec.Struct, frozen=True):
    name: str
    token: Annotated[str, doc("Shown only here.")]


class GrantAnswer(msgspec.Struct, frozen=True):
    principal: Annotated[str, doc(_PRINCIPAL)]
    role: _RoleName
    namespace: _Levels


class GrantPage(msgspec.Struct, frozen=True, rename="kebab"):
    grants: list[GrantAnswer]
    next_page_token: str | None


class AuditPage(msgspec.Struct, frozen=True, rename="kebab"):
    records: list[AuditRecord]
    next_page_token: str | None


class TokenGrant(msgspec.Struct, forbid_unknown_fields=True):
    role: _RoleName
    namespace: _Levels = ()


class CreateTokenRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    name: str
    expires_in_s: Annotated[
        int | None, msgspec.Meta(description="Null or absent: no expiry.", extra_json_schema={"minimum": 1})
    ] = None
    grants: Annotated[
        list[TokenGrant] | None,
        doc("All grants of the name from now on. Null or absent: its grants stay unchanged."),
    ] = None


class AddGrantRequest(msgspec.Struct, forbid_unknown_fields=True):
    principal: Annotated[str, msgspec.Meta(description=_PRINCIPAL)]
    role: _RoleName
    namespace: _Levels = ()


@Route(
    method="GET",
    path="/api/v1/tokens",
    operation="listTokens",
    summary="Lists all tokens, including revoked tokens, without their secrets",
    check=Check.CATALOG,
    tags=("access",),
    parameters=PAGING,
    answers=(ResponseSpec(200, "One page, by name", TokenPage), _FORBIDDEN),
)
async def list_tokens(call: Call) -> TokenPage:
    now_ms = call.components.clock.now_ms()
    # A name contains no space, so the pairs have the same order as the texts.
    tokens = {f"{token.name} {token.id}": token for token in await call.components.store.tokens()}
    page, next_page_token = _select_page(call, tokens)
    return TokenPage([_describe_token(token, now_ms) for token in page], next_page_token)


@Route(
    method="POST",
    path="/api/v1/tokens",
    operation="createToken",
    summary=f"Creates a bearer token that expires after at most {TTL_S_MAX} seconds or never",
    check=Check.CATALOG,
    tags=("access",),
    is_secret=True,
    answers=(
        ResponseSpec(201, "The token; no later request shows it", CreatedToken),
        _FORBIDDEN,
        ResponseSpec(409, "A valid token of this name exists"),
    ),
).takes(CreateTokenRequest)
async def create(call: Call, body: CreateTokenRequest) -> CreatedToken:
    grants = None
    if body.grants is not None:
        if len(body.grants) > _GRANTS_MAX:
            raise BadRequest(f"The token would have {len(body.grants):,} grants; the limit is {_GRANTS_MAX:,}")
        grants = [make_grant(body.name, spec.role, spec.namespace) for spec in body.grants]
    secret = await create_token(call.components.store, call.components.clock, body.name, body.expires_in_s, grants)
    return CreatedToken(body.name, secret)


@Route(
    method="DELETE",
    path="/api/v1/tokens/{name}",
    operation="revokeToken",
    summary="Revokes the token of this name and all its access tokens",
    check=Check.CATALOG,
    tags=("access",),
    answers=(ResponseSpec(204, "Revoked"), _FORBIDDEN, ResponseSpec(404, "No valid token has this name")),
)
async def revoke(call: Call) -> None:
    name = check_name(call.variables["name"], "token name")
    await revoke_token(call.components.store, call.components.clock, name)


@Route(
    method="GET",
    path="/api/v1/grants",
    operation="listGrants",
    summary="Lists grants: the caller's own and its groups', and those on namespaces where the caller is an admin",
    check=Check.CATALOG,
    tags=("access",),
    parameters=(Parameter("principal", "query", "Only grants of this principal.", {"type": "string"}), *PAGING),
    answers=(ResponseSpec(200, "One page, by principal", GrantPage),),
)
async def list_grants(call: Call) -> GrantPage:
    me, authorizer = call.principal, call.components.authorizer
    principal = call.query.get("principal")
    if principal is not None:
        check_name(principal, "principal")
    grants = {
        # No part contains a control character, so the separator is unambiguous.
        "\x1f".join((grant.principal, grant.role, *grant.namespace)): grant
        for grant in await call.components.store.grants(principal)
        if grant.principal == me.name or grant in me.grants or authorizer.holds(me, Role.ADMIN, grant.namespace)
    }
    page, next_page_token = _select_page(call, grants)
    return GrantPage([from_attributes(grant, GrantAnswer) for grant in page], next_page_token)


@Route(
    method="PUT",
    path="/api/v1/grants",
    operation="addGrant",
    summary="Grants a role on a namespace and everything below it; idempotent",
    check=Check.SOMEWHERE,
    tags=("access",),
    answers=(ResponseSpec(204, "Given"), ResponseSpec(403, "Needs the role admin on that namespace")),
).takes(AddGrantRequest)
async def add_grant(call: Call, body: AddGrantRequest) -> None:
    grant = make_grant(body.principal, body.role, body.namespace)
    call.allow(grant.namespace)
    await call.components.store.transact([SaveGrant(grant)])


@Route(
    method="DELETE",
    path="/api/v1/grants",
    operation="removeGrant",
    summary="Removes a grant",
    check=Check.HANDLER,
    tags=("access",),
    parameters=_GRANT_QUERY,
    answers=(
        ResponseSpec(204, "Taken"),
        ResponseSpec(403, "Needs the role admin on that namespace"),
        ResponseSpec(404, "No such grant"),
    ),
)
async def remove_grant(call: Call) -> None:
    query = call.query
    for name in ("principal", "role"):
        if name not in query:
            raise BadRequest(f"The parameter {name} is missing")
    namespace = query.get("namespace", "")
    grant = make_grant(query["principal"], query["role"], parse_namespace(namespace) if namespace else ())
    call.allow(grant.namespace)
    await call.components.store.transact([RemoveGrant(grant)])


@Route(
    method="GET",
    path="/api/v1/audit",
    operation="listAudit",
    summary="Lists audit records, oldest first. Records are written in batches, so the newest can appear late",
    check=Check.CATALOG,
    tags=("access",),
    parameters=PAGING,
    answers=(ResponseSpec(200, "One page", AuditPage), _FORBIDDEN),
)
async def list_audit(call: Call) -> AuditPage:
    after, size = _read_paging(call)
    records = await call.components.store.audit(after, size + 1)
    return AuditPage(
        records[:size], call.components.catalog.pages.encode(records[size - 1].id) if len(records) > size else None
    )


def _read_paging(call: Call) -> tuple[str | None, int]:
    """Return the position before the page, and the size of the page."""
    token, size = call.paging()
    return call.components.catalog.pages.decode(token or ""), size


def _select_page(call: Call, by_key: Mapping[str, T]) -> tuple[list[T], str | None]:
    """Return one page of the values, in order of their keys, and the token of the next page."""
    after, size = _read_paging(call)
    keys = sorted(key for key in by_key if after is None or key > after)
    page = keys[:size]
    return [by_key[key] for key in page], call.components.catalog.pages.encode(page[-1]) if len(keys) > size else None


def _describe_token(token: AccessToken, now_ms: int) -> TokenAnswer:
    is_valid = is_live(token, now_ms)
    return TokenAnswer(token.id, token.name, is_valid, token.created_ms, token.expires_ms, token.revoked_ms)
