"""Routes of access control: tokens, grants and the audit log.

Tokens and the log belong to the whole catalog, so that they require an admin of the catalog. Grants belong to a
namespace: its admin grants and revokes roles on it and below, and sees no other grants. The secret of a token is only
in the answer that creates it; digests are never returned.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from seamark.metaserver.access.principal import RANKS, Role, make_grant
from seamark.metaserver.access.tokens import TTL_S_MAX, create_token, is_live, revoke_token
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, describe
from seamark.metaserver.api.http.keys import AUTHORIZER, CLOCK, PAGES, PRINCIPAL, STORE
from seamark.metaserver.api.http.paging import PAGING, page_schema, paging
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow, allow_somewhere, read_json
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.store.model import AuditRecord, Grant, Token
from seamark.metaserver.store.operations import RemoveGrant, SaveGrant
from seamark.metaserver.wire import check_name, parse_namespace

_NAMES = {"type": "array", "items": {"type": "string"}, "description": "The levels; none for the whole catalog."}
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
        "principal": {"type": "string", "description": "A token's name, or oidc:<subject>."},
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
_CREATE_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "expires-in-s": {"type": ["integer", "null"], "minimum": 1, "description": "Null or absent: no expiry."},
        "grants": {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "required": ["role"],
                "additionalProperties": False,
                "properties": {"role": _ROLE, "namespace": _NAMES},
            },
            "description": "All grants of the name from now on. Null or absent: its grants stay unchanged.",
        },
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
_FORBIDDEN = ResponseSpec(403, "Requires the role admin")


class _GrantSpec(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    namespace: tuple[str, ...] = ()


class _CreateToken(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    name: str
    expires_in_s: int | None = None
    grants: list[_GrantSpec] | None = None


class _Grant(msgspec.Struct, forbid_unknown_fields=True):
    principal: str
    role: str
    namespace: tuple[str, ...] = ()


@describe(
    "listTokens",
    "Lists all tokens, including revoked tokens, without their secrets",
    tags=("access",),
    parameters=PAGING,
    answers=(ResponseSpec(200, "One page, by name", page_schema("tokens", "Token")), _FORBIDDEN),
)
async def list_tokens(request: web.Request) -> web.Response:
    allow(request, ())
    now_ms = request.app[CLOCK].now_ms()
    after, size = _paging(request)
    # A name contains no space, so that the pairs sort like the text.
    tokens = sorted((f"{token.name} {token.id}", token) for token in await request.app[STORE].tokens())
    rest = [(key, token) for key, token in tokens if after is None or key > after]
    page, more = rest[:size], len(rest) > size
    return json_answer(
        {
            "tokens": [_token(token, now_ms) for _, token in page],
            "next-page-token": request.app[PAGES].encode(page[-1][0]) if more else None,
        }
    )


@describe(
    "createToken",
    f"Creates a bearer token that expires after at most {TTL_S_MAX} seconds or never",
    tags=("access",),
    body=_CREATE_BODY,
    answers=(
        ResponseSpec(201, "The token; no later request shows it", _CREATED_SCHEMA),
        _FORBIDDEN,
        ResponseSpec(409, "A valid token of this name exists"),
    ),
)
async def create(request: web.Request) -> web.Response:
    allow(request, ())
    body = await read_json(request, _CreateToken)
    grants = None
    if body.grants is not None:
        grants = [make_grant(body.name, spec.role, spec.namespace) for spec in body.grants]
    secret = await create_token(request.app[STORE], request.app[CLOCK], body.name, body.expires_in_s, grants)
    response = json_answer({"name": body.name, "token": secret}, 201)
    response.headers["Cache-Control"] = "no-store"
    return response


@describe(
    "revokeToken",
    "Revokes the token of this name and all its access tokens",
    tags=("access",),
    parameters=(Parameter("name", "path", "Name of the token.", {"type": "string"}, True),),
    answers=(ResponseSpec(204, "Revoked"), _FORBIDDEN, ResponseSpec(404, "No valid token has this name")),
)
async def revoke(request: web.Request) -> web.Response:
    allow(request, ())
    name = check_name(request.match_info["name"], "token name")
    await revoke_token(request.app[STORE], request.app[CLOCK], name)
    return web.Response(status=204)


@describe(
    "listGrants",
    "Lists grants: the caller's own, and those on namespaces where the caller is an admin",
    tags=("access",),
    parameters=(Parameter("principal", "query", "Only grants of this principal.", {"type": "string"}), *PAGING),
    answers=(ResponseSpec(200, "One page, by principal", page_schema("grants", "Grant")),),
)
async def list_grants(request: web.Request) -> web.Response:
    allow(request, ())
    me, authorizer = request[PRINCIPAL], request.app[AUTHORIZER]
    principal = request.query.get("principal")
    if principal is not None:
        check_name(principal, "principal")
    after, size = _paging(request)
    rows = [
        grant
        for grant in await request.app[STORE].grants(principal)
        if grant.principal == me.name or authorizer.holds(me, Role.ADMIN, grant.namespace)
    ]
    keyed = sorted((_grant_key(grant), grant) for grant in rows)
    rest = [(key, grant) for key, grant in keyed if after is None or key > after]
    page, more = rest[:size], len(rest) > size
    return json_answer(
        {
            "grants": [_grant(grant) for _, grant in page],
            "next-page-token": request.app[PAGES].encode(page[-1][0]) if more else None,
        }
    )


@describe(
    "addGrant",
    "Grants a role on a namespace and everything below it; idempotent",
    tags=("access",),
    body={**GRANT_SCHEMA, "required": ["principal", "role"], "additionalProperties": False},
    answers=(ResponseSpec(204, "Given"), ResponseSpec(403, "Needs the role admin on that namespace")),
)
async def add_grant(request: web.Request) -> web.Response:
    allow_somewhere(request)
    body = await read_json(request, _Grant)
    grant = make_grant(body.principal, body.role, body.namespace)
    allow(request, grant.namespace)
    await request.app[STORE].transact([SaveGrant(grant)])
    return web.Response(status=204)


@describe(
    "removeGrant",
    "Removes a grant",
    tags=("access",),
    parameters=_GRANT_QUERY,
    answers=(
        ResponseSpec(204, "Taken"),
        ResponseSpec(403, "Needs the role admin on that namespace"),
        ResponseSpec(404, "No such grant"),
    ),
)
async def remove_grant(request: web.Request) -> web.Response:
    query = request.query
    for name in ("principal", "role"):
        if name not in query:
            raise BadRequest(f"The parameter {name} is missing")
    namespace = query.get("namespace", "")
    grant = make_grant(query["principal"], query["role"], parse_namespace(namespace) if namespace else ())
    allow(request, grant.namespace)
    await request.app[STORE].transact([RemoveGrant(grant)])
    return web.Response(status=204)


@describe(
    "listAudit",
    "Lists audit records, oldest first. Records are written in batches, so the newest can appear late",
    tags=("access",),
    parameters=PAGING,
    answers=(ResponseSpec(200, "One page", page_schema("records", "AuditRecord")), _FORBIDDEN),
)
async def list_audit(request: web.Request) -> web.Response:
    allow(request, ())
    after, size = _paging(request)
    records = await request.app[STORE].audit(after, size + 1)
    page, more = records[:size], len(records) > size
    return json_answer(
        {
            "records": [_audit(record) for record in page],
            "next-page-token": request.app[PAGES].encode(page[-1].id) if more else None,
        }
    )


def _paging(request: web.Request) -> tuple[str | None, int]:
    """(position before the page, size)."""
    token, size = paging(request)
    return request.app[PAGES].decode(token or ""), size


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


def add_routes(app: web.Application) -> None:
    app.router.add_get("/api/v1/tokens", list_tokens)
    app.router.add_post("/api/v1/tokens", create)
    app.router.add_delete("/api/v1/tokens/{name}", revoke)
    app.router.add_get("/api/v1/grants", list_grants)
    app.router.add_put("/api/v1/grants", add_grant)
    app.router.add_delete("/api/v1/grants", remove_grant)
    app.router.add_get("/api/v1/audit", list_audit)
