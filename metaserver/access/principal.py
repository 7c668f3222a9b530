"""Who asks, and how roles and namespaces are written as text.

Names of principals cannot meet: a token of this server is `[A-Za-z0-9][A-Za-z0-9._@-]*`, without a colon; a subject of
the OIDC issuer is always `oidc:` and the claim's value. So no subject can take the name, and with it the grants, of a
token, whatever its issuer lets it call itself.

A grant as text is `role` (the whole catalog) or `role:namespace`, levels joined by dots; a dot or a backslash within a
level is written with a backslash before it.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal

import msgspec

from metaserver.errors import BadRequest
from metaserver.store.port import Grant, NamespacePath
from metaserver.wire import check_name, check_namespace

OIDC_PREFIX = "oidc:"
ANONYMOUS_NAME = "anonymous"
NAME_LENGTH_MAX = 128
_TOKEN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*\Z")
_LEVEL = re.compile(r"(?:[^.\\]|\\[.\\])+")


class Role(StrEnum):
    """Each includes those before it."""

    READER = "reader"
    WRITER = "writer"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        return RANKS[self.value]


RANKS = {"reader": 1, "writer": 2, "admin": 3}
"""By the role's text, as grants carry it."""


class Principal(msgspec.Struct, frozen=True):
    name: str
    grants: tuple[Grant, ...] = ()
    via: Literal["none", "token", "oidc"] = "none"


ANONYMOUS = Principal(ANONYMOUS_NAME, (Grant(ANONYMOUS_NAME, Role.ADMIN.value),))
"""Everybody, where no login is asked for: only on loopback (`guard.check_binding`)."""


def check_token_name(name: str) -> str:
    """BadRequest unless a token may be called so."""
    if len(name) > NAME_LENGTH_MAX or not _TOKEN_NAME.match(name):
        raise BadRequest(
            f"The token name {name[:40]!r} must begin with a letter or digit and hold only "
            f"letters, digits and . _ @ -, {NAME_LENGTH_MAX} at most"
        )
    if name == ANONYMOUS_NAME:
        raise BadRequest(f"The name {ANONYMOUS_NAME!r} stands for everybody without a login; choose another")
    return name


def check_principal_name(name: str) -> str:
    """BadRequest unless a grant may be given to this name: a token's, or `oidc:` and a subject."""
    if name.startswith(OIDC_PREFIX):
        subject = name.removeprefix(OIDC_PREFIX)
        check_name(subject, "OIDC subject")
        return name
    if ":" in name:
        raise BadRequest(f"The principal {name[:40]!r} is neither a token's name nor {OIDC_PREFIX}<subject>")
    return check_token_name(name)


def check_role(text: str) -> Role:
    """BadRequest for anything but a role's name."""
    try:
        return Role(text)
    except ValueError:
        raise BadRequest(f"{text[:40]!r} is no role; the roles are {', '.join(Role)}") from None


def make_grant(principal: str, role: str, namespace: NamespacePath) -> Grant:
    """BadRequest unless each part is well formed; the empty path is the whole catalog."""
    if namespace:
        check_namespace(namespace)
    return Grant(check_principal_name(principal), check_role(role).value, namespace)


def parse_path(text: str) -> NamespacePath:
    """`a.b` → `("a", "b")`, `a\\.b` → `("a.b",)`. BadRequest for an empty level or a stray backslash."""
    levels, at = [], 0
    while True:
        found = _LEVEL.match(text, at)
        if found is None:
            break
        levels.append(re.sub(r"\\(.)", r"\1", found[0]))
        at = found.end()
        if at == len(text):
            return check_namespace(tuple(levels))
        if text[at] != ".":
            break
        at += 1
    raise BadRequest(
        f"{text[:80]!r} is no namespace: levels joined by dots, none empty; write a dot within a level as \\."
    )


def show_path(path: NamespacePath) -> str:
    """What `parse_path` reads back; empty for the whole catalog."""
    return ".".join(re.sub(r"([.\\])", r"\\\1", level) for level in path)


def parse_role(text: str) -> tuple[Role, NamespacePath]:
    """`writer:a.b` → the role and its namespace. BadRequest for anything else, never a wider scope than was written."""
    role, colon, path = text.partition(":")
    return check_role(role), parse_path(path) if colon else ()
