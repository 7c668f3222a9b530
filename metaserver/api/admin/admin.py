"""Routes of access control: tokens, grants and the audit log.

Tokens and the log belong to the whole catalog, so that they require an admin of the catalog. Grants belong to a
namespace: its admin grants and revokes roles on it and below, and sees no other grants. The secret of a token is only
in the answer that creates it; digests are never returned.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from seamark.metaserver.access.principal import RANKS, Role, make_grant
from seamark.metaserver.access.tokens import TTL_S_MAX, create_token, is_live, revoke_token
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.keys import AUTHORIZER, CLOCK, PAGES, STORE
from seamark.metaserver.api.http.parameters.paging import PAGING, page_schema
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.store.model import AuditRecord, Grant, Token
from seamark.metaserver.store.operations import RemoveGrant, SaveGrant
from seamark.metaserver.wire import check_name, parse_namespace

_NAMES: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string"},
    "description": "The levels; none for the whole catalog.",
}
_PRINCIPAL = "A token's name, or oidc:<subject>."
_ROLE = {"enum": list(RANKS)}
TOKEN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "name", "live", "created-ms", "expires-ms", "revoked-ms"],
    "properties": {
        "id": {"type": "string"},
        "name": {"type": "string", "description": "The principal."},
        "live": {"type": "boolean"},
        "created-ms": {"type": "integer"},
        "expires-ms": {"type": ["integer", "null"]},
        "revoked-ms": {"type": ["integer", "null"]},
    },
}
GRANT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["principal", "role", "namespace"],
    "properties": {
        "principal": {"type": "string", "description": _PRINCIPAL},
        "role": _ROLE,
        "namespace": _NAMES,
    },
}
AUDIT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "at-ms", "who", "action", "resource", "outcome", "status", "request-id", "remote"],
    "properties": {
        "id": {"type": "string"},
        "at-ms": {"type": "integer"},
        "who": {"type": "string"},
        "action": {"type": "string", "description": "Operation id."},
        "resource": {"type": "string", "description": "Path of the request."},
        "outcome": {"type": "string", "description": "allowed, denied, or failed:<kind>."},
        "status": {"type": "integer"},
        "request-id": {"type": "string"},
        "remote": {"type": "string"},
    },
}
_CREATED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "token"],
    "properties": {"name": {"type": "string"}, "token": {"type": "string", "description": "Shown only here."}},
}
_GRANT_QUERY = (
    Parameter("principal", "query", "Whose.", {"type": "string"}, True),
    Parameter("role", "query", "Which.", _ROLE, True),
    Parameter("namespace", "query", "Levels joined by 0x1F; omit it for the whole catalog.", {"type": "string"}),
)
_GRANTS_MAX = 1000
"""Of a token when it is created."""
_FORBIDDEN = ResponseSpec(403, "Requires the role admin")


_RoleName = Annotated[str, msgspec.Meta(extra_json_schema=_ROLE)]
_Levels = Annotated[tuple[str, ...], msgspec.Meta(description=_NAMES["description"])]


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
        msgspec.Meta(
            description="All grants of the name from now on. Null or absent: its grants stay unchanged.",
        ),
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
    answers=(ResponseSpec(200, "One page, by name", page_schema("tokens", "Token")), _FORBIDDEN),
)
async def list_tokens(call: Call) -> dict[str, Any]:
    now_ms = call.app[CLOCK].now_ms()
    after, size = _paging(call)
    # A name contains no space, so that the pairs sort like the text.
    tokens = sorted((f"{token.name} {token.id}", token) for token in await call.app[STORE].tokens())
    rest = [(key, token) for key, token in tokens if after is None or key > after]
    page, more = rest[:size], len(rest) > size
    return {
        "tokens": [_token(token, now_ms) for _, token in page],
        "next-page-token": call.app[PAGES].encode(page[-1][0]) if more else None,
    }


@Route(
    method="POST",
    path="/api/v1/tokens",
    operation="createToken",
    summary=f"Creates a bearer token that expires after at most {TTL_S_MAX} seconds or never",
    check=Check.CATALOG,
    tags=("access",),
    is_secret=True,
    answers=(
        ResponseSpec(201, "The token; no later request shows it", _CREATED_SCHEMA),
        _FORBIDDEN,
        ResponseSpec(409, "A valid token of this name exists"),
    ),
).takes(CreateTokenRequest)
async def create(call: Call, body: CreateTokenRequest) -> dict[str, Any]:
    grants = None
    if body.grants is not None:
        if len(body.grants) > _GRANTS_MAX:
            raise BadRequest(f"The token would have {len(body.grants):,} grants; the limit is {_GRANTS_MAX:,}")
        grants = [make_grant(body.name, spec.role, spec.namespace) for spec in body.grants]
    secret = await create_token(call.app[STORE], call.app[CLOCK], body.name, body.expires_in_s, grants)
    return {"name": body.name, "token": secret}


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
    await revoke_token(call.app[STORE], call.app[CLOCK], name)


@Route(
    method="GET",
    path="/api/v1/grants",
    operation="listGrants",
    summary="Lists grants: the caller's own, and those on namespaces where the caller is an admin",
    check=Check.CATALOG,
    tags=("access",),
    parameters=(Parameter("principal", "query", "Only grants of this principal.", {"type": "string"}), *PAGING),
    answers=(ResponseSpec(200, "One page, by principal", page_schema("grants", "Grant")),),
)
async def list_grants(call: Call) -> dict[str, Any]:
    me, authorizer = call.principal, call.app[AUTHORIZER]
    principal = call.query.get("principal")
    if principal is not None:
        check_name(principal, "principal")
    after, size = _paging(call)
    rows = [
        grant
        for grant in await call.app[STORE].grants(principal)
        if grant.principal == me.name or authorizer.holds(me, Role.ADMIN, grant.namespace)
    ]
    keyed = sorted((_grant_key(grant), grant) for grant in rows)
    rest = [(key, grant) for key, grant in keyed if after is None or key > after]
    page, more = rest[:size], len(rest) > size
    return {
        "grants": [_grant(grant) for _, grant in page],
        "next-page-token": call.app[PAGES].encode(page[-1][0]) if more else None,
    }


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
    await call.app[STORE].transact([SaveGrant(grant)])


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
    await call.app[STORE].transact([RemoveGrant(grant)])


@Route(
    method="GET",
    path="/api/v1/audit",
    operation="listAudit",
    summary="Lists audit records, oldest first. Records are written in batches, so the newest can appear late",
    check=Check.CATALOG,
    tags=("access",),
    parameters=PAGING,
    answers=(ResponseSpec(200, "One page", page_schema("records", "AuditRecord")), _FORBIDDEN),
)
async def list_audit(call: Call) -> dict[str, Any]:
    after, size = _paging(call)
    records = await call.app[STORE].audit(after, size + 1)
    page, more = records[:size], len(records) > size
    return {
        "records": [_audit(record) for record in page],
        "next-page-token": call.app[PAGES].encode(page[-1].id) if more else None,
    }


def _paging(call: Call) -> tuple[str | None, int]:
    """(position before the page, size)."""
    token, size = call.paging()
    return call.app[PAGES].decode(token or ""), size


def _token(token: Token, now_ms: int) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "live": is_live(token, now_ms),
        "created-ms": token.created_ms,
        "expires-ms": token.expires_ms,
        "revoked-ms": token.revoked_ms,
    }


def _grant(grant: Grant) -> dict[str, Any]:
    return {"principal": grant.principal, "role": grant.role, "namespace": list(grant.namespace)}


def _grant_key(grant: Grant) -> str:
    """A unique sort key: no part contains a control character."""
    return "\x1f".join((grant.principal, grant.role, *grant.namespace))


def _audit(record: AuditRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "at-ms": record.at_ms,
        "who": record.who,
        "action": record.action,
        "resource": record.resource,
        "outcome": record.outcome,
        "status": record.status,
        "request-id": record.request_id,
        "remote": record.remote,
    }
