"""Routes of access control: tokens, grants and the audit log.

Tokens belong to the server, and the audit log to the whole catalog. Grants belong to an object. A principal that may
manage the grants of an object grants and revokes rights on the object and on everything in it, and sees only these
grants. Only the answer that creates a token contains its secret. Digests are never returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec

from seamark.formats.protocol.wire import check_name, format_path, parse_namespace
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, NoSuchFunction, NoSuchTable, NoSuchView
from seamark.metaserver.access.principal import ROLE_PREFIX, make_grant
from seamark.metaserver.access.rights.decisions import (
    SERVER_ADMIN,
    THE_SERVER,
    WAREHOUSE,
    Securable,
    get_securable,
    list_enclosing_securables,
)
from seamark.metaserver.access.rights.privileges import Privilege
from seamark.metaserver.access.tokens import TTL_S_MAX, create_token, is_live, revoke_token
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.parameters.paging import PAGING
from seamark.metaserver.api.http.parameters.requests import read_boolean_query
from seamark.metaserver.store.model import (
    FUNCTION,
    NAMESPACE,
    SERVER,
    TABLE,
    VIEW,
    AccessToken,
    AuditRecord,
    EntryKind,
    Grant,
    GrantLimits,
)
from seamark.metaserver.store.operations import RemoveGrant, SaveGrant

T = TypeVar("T")

_PRINCIPAL = "A token's name, or oidc:<subject>."
_ROLE_TEXT = "reader, writer, admin, owner, or role:<name> for the membership in a role of the operator."
_PRIVILEGE = {"enum": list(Privilege)}
_DENY_TEXT = "Whether the privilege is denied. A denial is stronger than any grant."
_GRANT_QUERY = (
    Parameter("principal", "query", "The principal of the grant.", {"type": "string"}, True),
    Parameter("role", "query", f"The role: {_ROLE_TEXT}", {"type": "string"}),
    Parameter("privilege", "query", "The privilege, if the grant has no role.", _PRIVILEGE),
    Parameter(
        "namespace",
        "query",
        "The levels of the namespace, joined by 0x1F. Omit it for the whole catalog.",
        {"type": "string"},
    ),
    *(
        Parameter(kind, "query", f"The {kind} in the namespace. Omit it for the namespace itself.", {"type": "string"})
        for kind in (TABLE, VIEW, FUNCTION)
    ),
    Parameter("server", "query", "Whether the grant is on the server.", {"type": "boolean", "default": False}),
    Parameter("deny", "query", _DENY_TEXT, {"type": "boolean", "default": False}),
)
_GRANTS_MAX = 1000
"""The maximum number of grants in a request that creates a token."""
_LIMITS = GrantLimits(of_object=1000, of_principal=2000, of_principal_below=500, below=5000)
"""The limits for principals that manage the grants of some objects, but not of the whole catalog."""
_GRANTS_PER_PAGE = 500
"""The number of grants that a listing reads from the database at a time."""
_GRANTS_READ_MAX = 5000
"""The maximum number of grants that are checked for one page of a listing. So a page can be short or empty."""
_FORBIDDEN = ResponseSpec(403, "The caller is not an admin of the server or of the whole catalog")
_MAY_NOT_GRANT = ResponseSpec(
    403, "The caller does not have the privilege manage-grants on the object, which the role admin includes"
)


_RoleName = Annotated[str, doc(f"The role: {_ROLE_TEXT}")]
_PrivilegeName = Annotated[
    str, msgspec.Meta(description="The privilege, if the grant has no role.", extra_json_schema=_PRIVILEGE)
]
_Levels = Annotated[tuple[str, ...], doc("The levels of the namespace. An empty list means the whole catalog.")]


class TokenAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """A token without its secret."""

    id: str
    name: Annotated[str, doc("The principal.")]
    live: bool
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None


class TokenPage(msgspec.Struct, frozen=True, rename="kebab"):
    """One page of tokens."""

    tokens: list[TokenAnswer]
    next_page_token: str | None


class CreatedToken(msgspec.Struct, frozen=True):
    """A new token with its secret."""

    name: str
    token: Annotated[str, doc("The secret of the token. No later answer shows it.")]


class GrantAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A right of a principal on an object."""

    principal: Annotated[str, doc(_PRINCIPAL)]
    namespace: _Levels
    role: _RoleName = ""
    privilege: _PrivilegeName = ""
    table: str = ""
    view: str = ""
    function: str = ""
    server: Annotated[bool, doc("Whether the grant is on the server.")] = False
    deny: Annotated[bool, doc(_DENY_TEXT)] = False


class GrantPage(msgspec.Struct, frozen=True, rename="kebab"):
    """One page of grants."""

    grants: list[GrantAnswer]
    next_page_token: str | None


class AuditPage(msgspec.Struct, frozen=True, rename="kebab"):
    """One page of audit records."""

    records: list[AuditRecord]
    next_page_token: str | None


class TokenGrant(msgspec.Struct, forbid_unknown_fields=True):
    """A grant that a new token gets."""

    role: _RoleName
    namespace: _Levels = ()


class CreateTokenRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for a new token."""

    name: str
    expires_in_s: Annotated[
        int | None,
        msgspec.Meta(
            description="The lifetime in seconds. If it is null or absent, the token does not expire.",
            extra_json_schema={"minimum": 1},
        ),
    ] = None
    grants: Annotated[
        list[TokenGrant] | None,
        doc("The new list of all grants of the principal `name`. If it is null or absent, the grants stay unchanged."),
    ] = None


class AddGrantRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to grant or deny a right on an object."""

    principal: Annotated[str, msgspec.Meta(description=_PRINCIPAL)]
    role: _RoleName = ""
    privilege: _PrivilegeName = ""
    namespace: _Levels = ()
    table: Annotated[str, doc("The table in the namespace. It is empty for the namespace itself.")] = ""
    view: Annotated[str, doc("The view in the namespace. It is empty for the namespace itself.")] = ""
    function: Annotated[str, doc("The function in the namespace. It is empty for the namespace itself.")] = ""
    server: Annotated[bool, doc("Whether the grant is on the server.")] = False
    deny: Annotated[bool, doc(_DENY_TEXT)] = False


@Route(
    method="GET",
    path="/api/v1/tokens",
    operation="listTokens",
    summary="List all tokens, including revoked tokens, without their secrets",
    check=Check.CATALOG,
    tags=("access",),
    parameters=PAGING,
    answers=(ResponseSpec(200, "One page, by name", TokenPage), _FORBIDDEN),
)
async def list_tokens(call: Call) -> TokenPage:
    """Return a page of all tokens, without their secrets."""
    now_ms = call.components.clock.now_ms()
    # A name contains no space, so the texts have the same order as the pairs of name and id.
    tokens_by_key = {f"{token.name} {token.id}": token for token in await call.components.store.list_tokens()}
    page, next_page_token = _select_page(call, tokens_by_key)
    return TokenPage([_describe_token(token, now_ms) for token in page], next_page_token)


@Route(
    method="POST",
    path="/api/v1/tokens",
    operation="createToken",
    summary=f"Create a bearer token that never expires, or that expires after at most {TTL_S_MAX} seconds",
    check=Check.CATALOG,
    tags=("access",),
    is_secret=True,
    answers=(
        ResponseSpec(201, "The token. No later answer shows it", CreatedToken),
        _FORBIDDEN,
        ResponseSpec(409, "A valid token with this name exists"),
    ),
).takes(CreateTokenRequest)
async def create(call: Call, body: CreateTokenRequest) -> CreatedToken:
    """Create a bearer token for a principal."""
    grants = None
    if body.grants is not None:
        if len(body.grants) > _GRANTS_MAX:
            raise BadRequest(f"The token would have {len(body.grants):,} grants; the limit is {_GRANTS_MAX:,}")
        grants = [make_grant(body.name, token_grant.role, token_grant.namespace) for token_grant in body.grants]
    secret = await create_token(call.components.store, call.components.clock, body.name, body.expires_in_s, grants)
    return CreatedToken(body.name, secret)


@Route(
    method="DELETE",
    path="/api/v1/tokens/{name}",
    operation="revokeToken",
    summary="Revoke the token of this name and all its access tokens",
    check=Check.CATALOG,
    tags=("access",),
    answers=(ResponseSpec(204, "The token is revoked"), _FORBIDDEN, ResponseSpec(404, "No valid token has this name")),
)
async def revoke(call: Call) -> None:
    """Revoke a token and all access tokens that were issued for it."""
    name = check_name(call.variables["name"], "token name")
    await revoke_token(call.components.store, call.components.clock, name)


@Route(
    method="GET",
    path="/api/v1/grants",
    operation="listGrants",
    summary="List the grants of the caller and its groups, and all grants that the caller may manage",
    check=Check.CATALOG,
    tags=("access",),
    parameters=(Parameter("principal", "query", "Only grants of this principal.", {"type": "string"}), *PAGING),
    answers=(ResponseSpec(200, "One page, by principal", GrantPage),),
)
async def list_grants(call: Call) -> GrantPage:
    """Return a page of the grants that the caller may see.

    One request reads a limited number of stored grants. If the caller may see few of them, the page is short or empty,
    but it still has the token of the next page.
    """
    principal = call.query.get("principal")
    if principal is not None:
        check_name(principal, "principal")
    token, size = _read_paging(call)
    last_grant = None if token is None else _decode_position(token)
    grants: list[Grant] = []
    read_count = 0
    while read_count < _GRANTS_READ_MAX:
        stored_grants = await call.components.store.grants_page(principal, last_grant, _GRANTS_PER_PAGE)
        grants += await _select_visible(call, stored_grants)
        if len(grants) > size:
            grants = grants[:size]
            last_grant = grants[-1]
            break
        last_grant = stored_grants[-1] if len(stored_grants) == _GRANTS_PER_PAGE else None
        if last_grant is None:
            break
        read_count += len(stored_grants)
    next_token = None if last_grant is None else call.components.catalog.pages.encode(_encode_position(last_grant))
    return GrantPage([_describe_grant(grant) for grant in grants], next_token)


async def _select_visible(call: Call, grants: Sequence[Grant]) -> list[Grant]:
    """Return the grants that the caller may see: its own grants, and grants that it may remove."""
    names = set(call.principal.names)
    foreign_grants = [grant for grant in grants if grant.principal not in names]
    managed_grants = set(
        await call.select([grant for grant in foreign_grants if grant.kind != SERVER], get_securable, "addGrant")
    )
    # All grants on the server have the same object, so one check suffices.
    if any(grant.kind == SERVER for grant in foreign_grants) and await call.may(THE_SERVER, "addGrant"):
        managed_grants.update(grant for grant in foreign_grants if grant.kind == SERVER)
    # A caller that manages the grants of a namespace also sees the denials in it, because it may remove them.
    denials = [grant for grant in foreign_grants if grant.deny and grant not in managed_grants]
    outer_securables = list(
        dict.fromkeys(
            outer_securable for grant in denials for outer_securable in list_enclosing_securables(get_securable(grant))
        )
    )
    managed_outer_securables = set(await call.select(outer_securables, lambda securable: securable, "removeGrant"))
    managed_grants.update(
        grant
        for grant in denials
        if not managed_outer_securables.isdisjoint(list_enclosing_securables(get_securable(grant)))
    )
    return [grant for grant in grants if grant.principal in names or grant in managed_grants]


def _encode_position(grant: Grant) -> str:
    return msgspec.json.encode(grant).decode()


def _decode_position(token: str) -> Grant:
    """Return the last grant of the previous page.

    Raises:
        BadRequest: The token does not belong to a listing of grants.
    """
    try:
        return convert_json(token, Grant)
    except msgspec.MsgspecError:
        raise BadRequest("The pageToken does not belong to this listing; begin without a pageToken") from None


@Route(
    method="PUT",
    path="/api/v1/grants",
    operation="addGrant",
    summary="Grant or deny a right on an object and everything in it; idempotent",
    check=Check.SOMEWHERE,
    tags=("access",),
    answers=(ResponseSpec(204, "The right is granted or denied"), _MAY_NOT_GRANT),
).takes(AddGrantRequest)
async def add_grant(call: Call, body: AddGrantRequest) -> None:
    """Grant or deny a right on an object and everything in it."""
    grant = _make_grant(body)
    await _check_may_manage(call, grant)
    if grant.deny and grant.principal != call.principal.name:
        # The owner of a table may give its rights to others, but not deny rights that others have by the namespace.
        await call.allow(get_securable(grant).container)
    # Only callers that may grant rights on the whole warehouse are exempt from the limits and from the check that the
    # object exists.
    limits = None
    if grant.kind != SERVER and not await call.may(WAREHOUSE):
        limits = _LIMITS
        await _check_entry_exists(call, grant)
    await call.components.store.transact([SaveGrant(grant, limits)])


@Route(
    method="DELETE",
    path="/api/v1/grants",
    operation="removeGrant",
    summary="Remove a grant",
    check=Check.HANDLER,
    tags=("access",),
    parameters=_GRANT_QUERY,
    answers=(
        ResponseSpec(204, "The grant is removed"),
        _MAY_NOT_GRANT,
        ResponseSpec(404, "No such grant"),
    ),
)
async def remove_grant(call: Call) -> None:
    """Remove a grant."""
    query = call.query
    if "principal" not in query:
        raise BadRequest("The parameter principal is missing")
    namespace = query.get("namespace", "")
    grant = _make_grant(
        AddGrantRequest(
            principal=query["principal"],
            role=query.get("role", ""),
            privilege=query.get("privilege", ""),
            namespace=parse_namespace(namespace) if namespace else (),
            table=query.get(TABLE, ""),
            view=query.get(VIEW, ""),
            function=query.get(FUNCTION, ""),
            server=read_boolean_query(query, SERVER),
            deny=read_boolean_query(query, "deny"),
        )
    )
    # A manager of an outer level may remove a denial even if the denial applies to this manager.
    if not (grant.deny and await _allow_if_manager_above(call, get_securable(grant))):
        await _check_may_manage(call, grant)
    await call.components.store.transact([RemoveGrant(grant)])


@Route(
    method="GET",
    path="/api/v1/audit",
    operation="listAudit",
    summary="List audit records, oldest first. Records are written in batches, so new records can appear late",
    check=Check.CATALOG,
    tags=("access",),
    parameters=PAGING,
    answers=(ResponseSpec(200, "One page", AuditPage), _FORBIDDEN),
)
async def list_audit(call: Call) -> AuditPage:
    """Return a page of the audit log."""
    after, size = _read_paging(call)
    # One record more than the page shows whether there is a next page.
    records = await call.components.store.read_audit_records(after, size + 1)
    return AuditPage(
        records[:size], call.components.catalog.pages.encode(records[size - 1].id) if len(records) > size else None
    )


def _make_grant(request: AddGrantRequest) -> Grant:
    """Return the grant of a request.

    Raises:
        BadRequest: A field is invalid, or two fields contradict each other.
    """
    if bool(request.role) == bool(request.privilege):
        raise BadRequest("A grant has either a role or a privilege; send exactly one of the fields role and privilege")
    if request.privilege and request.privilege not in set(Privilege):
        raise BadRequest(f"{request.privilege[:40]!r} is not a privilege; the privileges are {', '.join(Privilege)}")
    if request.role in set(Privilege):
        raise BadRequest(f"{request.role} is a privilege and not a role; send it in the field privilege")
    names = {kind: name for kind in (TABLE, VIEW, FUNCTION) if (name := getattr(request, kind))}
    if len(names) + request.server > 1:
        raise BadRequest("A grant is on one object; send only one of the fields table, view, function and server")
    kind, name = next(iter(names.items()), (SERVER if request.server else NAMESPACE, ""))
    right = request.role or request.privilege
    return make_grant(request.principal, right, request.namespace, kind=kind, name=name, deny=request.deny)


async def _check_may_manage(call: Call, grant: Grant) -> None:
    """Check that the caller may add and remove this grant.

    Most grants need the right to manage the grants of their object. Two kinds of grants need more:

    - Members of a role that the operator defines. The role may have rights on every object, so the caller must be an
      admin of the server. In a further warehouse, the caller must be an admin of the warehouse.
    - Admins of the server's own warehouse. They are also admins of the server, so the caller must be one, too.

    Raises:
        Forbidden: The caller may not manage the grant.
        NoSuchTable, NoSuchView, NoSuchFunction: The caller may not browse the object.
    """
    is_of_server = call.components.warehouses is not None
    if grant.role.startswith(ROLE_PREFIX):
        await call.allow(THE_SERVER if is_of_server else WAREHOUSE)
        return
    await call.allow(get_securable(grant))
    if is_of_server and grant.role == SERVER_ADMIN and get_securable(grant) == WAREHOUSE:
        await call.allow(THE_SERVER)


async def _check_entry_exists(call: Call, grant: Grant) -> None:
    """Check that the table, view or function of a grant exists.

    Denials and grants on namespaces are not checked, because they may be made before the object is created.

    Raises:
        NoSuchTable, NoSuchView, NoSuchFunction: The object does not exist.
    """
    store, path = call.components.store, grant.namespace
    if grant.deny or not grant.name:
        return
    kinds = (EntryKind.FUNCTION,) if grant.kind == FUNCTION else (EntryKind.TABLE, EntryKind.VIEW)
    for kind in kinds:  # A table and a view never have the same name, so a grant names one object.
        if await store.load_entry(kind, path, grant.name) is not None:
            return
    error = {TABLE: NoSuchTable, VIEW: NoSuchView, FUNCTION: NoSuchFunction}[grant.kind]
    raise error(f"{grant.kind.capitalize()} does not exist: {format_path(path, grant.name)}")


async def _allow_if_manager_above(call: Call, securable: Securable) -> bool:
    """Return whether the caller may manage the grants of a level above the object. If so, allow the call by this right.

    Such a caller may remove denials on the object, including denials that apply to the caller. Otherwise, the managers
    of one object could lock out the admins of its namespace or of the catalog.
    """
    for outer_securable in list_enclosing_securables(securable):
        if await call.may(outer_securable, "removeGrant"):
            await call.allow(outer_securable, operation="removeGrant")
            return True
    return False


def _describe_grant(grant: Grant) -> GrantAnswer:
    """Return a grant in the form of an answer.

    A stored grant has its role or its privilege in the field `role`. An answer has a field for each.
    """
    is_privilege = grant.role in set(Privilege)
    return GrantAnswer(
        principal=grant.principal,
        namespace=grant.namespace,
        role="" if is_privilege else grant.role,
        privilege=grant.role if is_privilege else "",
        server=grant.kind == SERVER,
        deny=grant.deny,
        **({grant.kind: grant.name} if grant.name else {}),
    )


def _read_paging(call: Call) -> tuple[str | None, int]:
    """Return the decrypted page token and the page size of a request."""
    token, size = call.read_paging()
    return call.components.catalog.pages.decode(token or ""), size


def _select_page(call: Call, by_key: Mapping[str, T]) -> tuple[list[T], str | None]:
    """Return one page of the values, sorted by their keys, and the token of the next page."""
    after, size = _read_paging(call)
    keys = sorted(key for key in by_key if after is None or key > after)
    page = keys[:size]
    return [by_key[key] for key in page], call.components.catalog.pages.encode(page[-1]) if len(keys) > size else None


def _describe_token(token: AccessToken, now_ms: int) -> TokenAnswer:
    is_valid = is_live(token, now_ms)
    return TokenAnswer(token.id, token.name, is_valid, token.created_ms, token.expires_ms, token.revoked_ms)
