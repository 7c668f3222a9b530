"""Principals, and the text form of roles and namespaces.

Names of tokens, of OIDC subjects and of their groups cannot collide. A token's name is
`[A-Za-z0-9][A-Za-z0-9._@-]*`, without a colon. The name of a subject is the name of its issuer, a colon and the
claim's value (`oidc:ann`). The name of a group is the name of the issuer with `-group`, a colon and the group's name
(`oidc-group:engineers`); no issuer has a name that ends so. The first colon ends the issuer's name. So no subject can
get the name of a token, of a group or of another issuer's subject, and with it their grants, by any claims.

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
from seamark.metaserver.settings.issuers import GROUP_SUFFIX, is_issuer_name
from seamark.metaserver.store.model import Grant, NamespacePath

ANONYMOUS_NAME = "anonymous"
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
    via: Literal["none", "token", "oidc"] = "none"


ANONYMOUS = Principal(ANONYMOUS_NAME, (Grant(ANONYMOUS_NAME, Role.ADMIN.value),))
"""The principal of every client of a server without logins.

Such a server listens only on loopback (`guard.check_binding`).
"""


CURRENT: ContextVar[str] = ContextVar("principal", default="")
"""The value that `current_principal` returns.

The middleware sets it for each request, which is cheaper than `set_principal`.
"""


def current_principal() -> str:
    """Return the name of the principal whose request is being answered; empty for the server's own work."""
    return CURRENT.get()


@contextmanager
def set_principal(name: str) -> Iterator[None]:
    """Set the value of `current_principal` while the context is active, in this task and the tasks that it starts."""
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
    """Return the name if grants may name it: the name of a token, of an issuer's subject or of an issuer's group.

    Raises:
        BadRequest: The name is none of them.
    """
    if ":" not in name:
        return check_token_name(name)
    if not is_foreign(name):
        raise BadRequest(
            f"The principal {name[:40]!r} is neither a token's name nor <issuer>:<subject> nor <issuer>{GROUP_SUFFIX}:"
            "<group>, such as oidc:ann and oidc-group:engineers"
        )
    check_name(name.partition(":")[2], "OIDC subject or group")
    return name


def is_foreign(name: str) -> bool:
    """Return whether the principal is a subject or a group of an OIDC issuer."""
    issuer, colon, _ = name.partition(":")
    return bool(colon) and is_issuer_name(issuer.removesuffix(GROUP_SUFFIX))


def check_role(text: str) -> Role:
    """Return the role with this text.

    Raises:
        BadRequest: The role is unknown.
    """
    try:
        return Role(text)
    except ValueError:
        raise BadRequest(f"{text[:40]!r} is not a role; the roles are {', '.join(Role)}") from None


def make_grant(principal: str, role: str, namespace: NamespacePath) -> Grant:
    """Return a grant. The empty path is the whole catalog.

    Raises:
        BadRequest: A part is invalid.
    """
    if namespace:
        check_namespace(namespace)
    return Grant(check_principal_name(principal), check_role(role).value, namespace)


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
