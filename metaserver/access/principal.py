"""Principals, and the text form of roles and namespaces.

Names of tokens, of OIDC subjects, of client certificates, of groups and of roles cannot collide. A token's name is
`[A-Za-z0-9][A-Za-z0-9._@-]*`, without a colon. A role of the operator is `role:` and such a name. The name of a subject
is the name of its issuer, a colon and the claim's value (`oidc:ann`). The name of a group is the name of the issuer
with `-group`, a colon and the group's name (`oidc-group:engineers`). The names of client certificates are built in the
same way, with `cert` as the issuer. No issuer has a name that ends with `-group`, or the name `role` or `cert`. The
first colon ends the issuer's name. So no subject can get the name of a token, of a group, of a role or of another
issuer's subject, and with it their grants, by any claims.

The text form of a grant is `role` (the whole catalog) or `role:namespace`, with levels joined by dots. A
dot or a backslash within a level is escaped with a backslash.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Literal

import msgspec

from seamark.formats.protocol.wire import check_name, check_namespace
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.rights.privileges import ALL, ALLOWED, OWNER, Privilege
from seamark.metaserver.settings.issuers import GROUP_SUFFIX, is_issuer_name
from seamark.metaserver.store.model import FUNCTION, NAMESPACE, SERVER, TABLE, VIEW, Grant, NamespacePath

ANONYMOUS_NAME = "anonymous"
_CERTIFICATES = "cert"
CERTIFICATE_PREFIX = f"{_CERTIFICATES}:"
"""The beginning of the principals of client certificates. No issuer has this name."""
CERTIFICATE_GROUP_PREFIX = f"{_CERTIFICATES}{GROUP_SUFFIX}:"
ROLE_PREFIX = "role:"
"""The beginning of the names of roles that operators define. No issuer has the name `role`."""
NAME_LENGTH_MAX = 128
_TOKEN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*\Z")
_LEVEL = re.compile(r"(?:[^.\\]|\\[.\\])+")


class Role(StrEnum):
    """The roles. Each role includes the previous roles."""

    READER = "reader"
    WRITER = "writer"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        return RANKS[self.value]


RANKS = {"reader": 1, "writer": 2, "admin": 3}
"""The rank of each role, by the role's text in grants."""


class Principal(msgspec.Struct, frozen=True):
    name: str
    grants: tuple[Grant, ...] = ()
    """The grants of the login, of its groups, and of the roles of which they are members."""
    via: Literal["none", "token", "oidc", "certificate"] = "none"
    groups: tuple[str, ...] = ()
    """The groups of the login, and the roles of which it or its groups are members, as principals of grants."""
    bits_max: int = ALL
    """The only privileges that count. Grants of other privileges are ignored."""

    @property
    def names(self) -> tuple[str, ...]:
        """The principals whose grants count for the login."""
        return (self.name, *self.groups)


ANONYMOUS = Principal(ANONYMOUS_NAME, (Grant(ANONYMOUS_NAME, Role.ADMIN.value),))
"""The principal of every client of a server without logins.

Such a server listens only on loopback (`guard.check_binding`).
"""


CURRENT: ContextVar[str] = ContextVar("principal", default="")
"""The value that `get_current_principal` returns.

The middleware sets it for each request, which is cheaper than `set_principal`.
"""


def get_current_principal() -> str:
    """Return the name of the principal whose request is being answered; empty for the server's own work."""
    return CURRENT.get()


@contextmanager
def set_principal(name: str) -> Iterator[None]:
    """Set the current principal while the context is active, in this task and the tasks that it starts."""
    token = CURRENT.set(name)
    try:
        yield
    finally:
        CURRENT.reset(token)


def check_token_name(name: str) -> str:
    """Return the name if it is valid for a token.

    Raises:
        BadRequest: The name is invalid.
    """
    if len(name) > NAME_LENGTH_MAX or not _TOKEN_NAME.match(name):
        raise BadRequest(
            f"The token name {name[:40]!r} must begin with a letter or digit and contain only "
            f"letters, digits and . _ @ -, at most {NAME_LENGTH_MAX} characters"
        )
    if name == ANONYMOUS_NAME:
        raise BadRequest(f"The name {ANONYMOUS_NAME!r} is reserved for clients without a login; choose another")
    return name


def check_principal_name(name: str) -> str:
    """Return the name if grants may name it: a token, a subject or a group of an issuer or of certificates, or a role.

    Raises:
        BadRequest: The name is none of them.
    """
    if ":" not in name:
        return check_token_name(name)
    if name.startswith(ROLE_PREFIX):
        check_token_name(name.removeprefix(ROLE_PREFIX))
        return name
    if not is_foreign(name):
        raise BadRequest(
            f"The principal {name[:40]!r} is neither a token's name nor <issuer>:<subject> nor <issuer>{GROUP_SUFFIX}:"
            f"<group> nor {ROLE_PREFIX}<role>, such as oidc:ann, oidc-group:engineers and role:analysts"
        )
    check_name(name.partition(":")[2], "OIDC subject or group")
    return name


def is_foreign(name: str) -> bool:
    """Return whether the principal is a subject or a group of an OIDC issuer, or of client certificates."""
    issuer, colon, _ = name.partition(":")
    issuer = issuer.removesuffix(GROUP_SUFFIX)
    return bool(colon) and (issuer == _CERTIFICATES or is_issuer_name(issuer))


def check_role(text: str) -> Role:
    """Return the role with this text.

    Raises:
        BadRequest: The role is unknown.
    """
    try:
        return Role(text)
    except ValueError:
        raise BadRequest(f"{text[:40]!r} is not a role; the roles are {', '.join(Role)}") from None


def check_granted(text: str) -> str:
    """Return the text if a grant may have it as its role: a privilege, a fixed role, or a role of the operator.

    Raises:
        BadRequest: It is none of them.
    """
    if text.startswith(ROLE_PREFIX):
        check_token_name(text.removeprefix(ROLE_PREFIX))
    elif text not in ALLOWED:
        raise BadRequest(
            f"{text[:40]!r} is not a role; the roles are {', '.join(Role)}, {OWNER} and {ROLE_PREFIX}<name>, and the "
            f"privileges are {', '.join(Privilege)}"
        )
    return text


def make_grant(
    principal: str,
    role: str,
    namespace: NamespacePath,
    *,
    kind: str = NAMESPACE,
    name: str = "",
    deny: bool = False,
) -> Grant:
    """Return a grant. The empty path is the whole catalog.

    Args:
        principal: The login, the group or the role of the operator that gets the right.
        role: The privilege or the role.
        namespace: The namespace of the object.
        kind: The kind of the object.
        name: The name of the table, view or function; empty for other kinds.
        deny: Whether the privilege is denied.

    Raises:
        BadRequest: A part is invalid.
    """
    if namespace:
        check_namespace(namespace)
    check_principal_name(principal)
    check_granted(role)
    if kind in (TABLE, VIEW, FUNCTION):
        if not namespace:
            raise BadRequest(f"The {kind} {name[:40]!r} has no namespace; name its namespace")
        check_name(name, f"{kind} name")
    elif name or (kind == SERVER and namespace):
        raise BadRequest("A grant is on the server, on a namespace, or on one table, view or function")
    if deny and role not in set(Privilege):
        raise BadRequest(f"Only a privilege can be denied, and {role[:40]!r} is a role; deny one of its privileges")
    if role.startswith(ROLE_PREFIX):
        if namespace or kind != NAMESPACE:
            raise BadRequest(f"A principal is a member of {role} everywhere; leave out the object")
        if principal == role:
            raise BadRequest(f"{role} cannot be a member of itself")
    return Grant(principal, role, namespace, kind, name, deny)


def parse_path(text: str) -> NamespacePath:
    r"""Return the path of a text: `a.b` is `("a", "b")`, and `a\.b` is `("a.b",)`.

    Raises:
        BadRequest: A level is empty, or a backslash escapes another character.
    """
    levels, at = [], 0
    while True:
        match = _LEVEL.match(text, at)
        if match is None:
            break
        levels.append(re.sub(r"\\(.)", r"\1", match[0]))
        at = match.end()
        if at == len(text):
            return check_namespace(tuple(levels))
        if text[at] != ".":
            break
        at += 1
    raise BadRequest(
        f"{text[:80]!r} is not a namespace: it needs non-empty levels joined by dots; write a dot within a level as \\."
    )


def show_path(path: NamespacePath) -> str:
    """Return the text that `parse_path` parses; empty for the whole catalog."""
    return ".".join(re.sub(r"([.\\])", r"\\\1", level) for level in path)


def parse_role(text: str) -> tuple[Role, NamespacePath]:
    """Return the role and the namespace of a text such as `writer:a.b`.

    Raises:
        BadRequest: The text is invalid. It is never read as a wider scope.
    """
    role, colon, path = text.partition(":")
    return check_role(role), parse_path(path) if colon else ()
