"""Principals, and the text form of roles and namespaces.

Names of different kinds of principals cannot collide:

| principal | name | example |
|---|---|---|
| bearer token | `[A-Za-z0-9][A-Za-z0-9._@-]*`, without a colon | `etl` |
| role of the operator | `role:` and a name like that of a token | `role:analysts` |
| OIDC subject | the name of the issuer, a colon, and the claim's value | `oidc:ann` |
| OIDC group | the name of the issuer, `-group:`, and the name of the group | `oidc-group:engineers` |
| client certificate and its groups | like those of an issuer with the name `cert` | `cert:etl` |

No issuer has the name `role` or `cert`, or a name that ends with `-group`. The first colon ends the issuer's name. So
no subject can choose claims that give it the name, and with it the grants, of another principal.

The text form of a role in a token is `role` (the whole catalog) or `role:namespace`, with levels joined by dots. A
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
"""The prefix of the principals of client certificates. No issuer has this name."""
CERTIFICATE_GROUP_PREFIX = f"{_CERTIFICATES}{GROUP_SUFFIX}:"
ROLE_PREFIX = "role:"
"""The prefix of the names of roles that operators define. No issuer has the name `role`."""
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
"""The rank of each role, by the role's name in grants. A higher rank includes the lower ranks."""


class Principal(msgspec.Struct, frozen=True):
    name: str
    grants: tuple[Grant, ...] = ()
    """The grants of the login, of its groups, and of the operator's roles of which these are members."""
    via: Literal["none", "token", "oidc", "certificate"] = "none"
    groups: tuple[str, ...] = ()
    """The groups of the login, and the operator's roles of which the login or a group is a member."""
    bits_max: int = ALL
    """A set of privileges. Grants of privileges outside it are ignored."""

    @property
    def names(self) -> tuple[str, ...]:
        """The principals whose grants apply to the login."""
        return (self.name, *self.groups)


ANONYMOUS = Principal(ANONYMOUS_NAME, (Grant(ANONYMOUS_NAME, Role.ADMIN.value),))
"""The principal of every client of a server without logins.

Such a server listens only on loopback (`guard.check_binding`).
"""


CURRENT: ContextVar[str] = ContextVar("principal", default="")
"""The name that `get_current_principal` returns.

The middleware sets this variable directly for each request, which takes less time than `set_principal`.
"""


def get_current_principal() -> str:
    """Return the name of the principal of the current request, or an empty text for the server's own work."""
    return CURRENT.get()


@contextmanager
def set_principal(name: str) -> Iterator[None]:
    """Set the current principal in this task, and in tasks that it starts, while the context is active."""
    token = CURRENT.set(name)
    try:
        yield
    finally:
        CURRENT.reset(token)


def check_token_name(name: str) -> str:
    """Check that a name is valid for a token, and return it.

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
    """Check that a name is valid for the principal of a grant, and return it.

    Raises:
        BadRequest: The name is not that of a token, a subject, a group or a role.
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


def check_grantable_role(text: str) -> str:
    """Check that a text is a role or privilege that a grant can give, and return it.

    Raises:
        BadRequest: The text is neither a privilege, nor a fixed role, nor `role:` and a valid name.
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
    """Check the parts of a grant, and return it.

    Args:
        principal: The principal that gets the right: a login, a group, or a role that the operator defines.
        role: The privilege or the role.
        namespace: The namespace of the object. An empty path means the whole catalog.
        kind: The kind of the object.
        name: The name of the table, view or function. It is empty for other kinds.
        deny: Whether the grant denies the privilege.

    Raises:
        BadRequest: A part is invalid.
    """
    if namespace:
        check_namespace(namespace)
    check_principal_name(principal)
    check_grantable_role(role)
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
    r"""Parse the text form of a path: `a.b` is `("a", "b")`, and `a\.b` is `("a.b",)`.

    Raises:
        BadRequest: A level is empty, or a backslash precedes a character other than a dot or a backslash.
    """
    levels, position = [], 0
    while True:
        match = _LEVEL.match(text, position)
        if match is None:
            break
        levels.append(re.sub(r"\\(.)", r"\1", match[0]))
        position = match.end()
        if position == len(text):
            return check_namespace(tuple(levels))
        if text[position] != ".":
            break
        position += 1
    raise BadRequest(
        f"{text[:80]!r} is not a namespace: it needs non-empty levels joined by dots; write a dot within a level as \\."
    )


def show_path(path: NamespacePath) -> str:
    """Return a path as text, which `parse_path` parses. The text is empty for the whole catalog."""
    return ".".join(re.sub(r"([.\\])", r"\\\1", level) for level in path)


def parse_role(text: str) -> tuple[Role, NamespacePath]:
    """Parse a role and a namespace in a text such as `writer:a.b`. Without a colon, the role is for the whole catalog.

    Raises:
        BadRequest: The text is invalid. An invalid namespace never means the whole catalog.
    """
    role, colon, path = text.partition(":")
    return check_role(role), parse_path(path) if colon else ()
