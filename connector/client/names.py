"""Parses names of tables, and derives the paths of requests and the URLs of servers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from seamark.formats.protocol.wire import NAMESPACE_SEPARATOR

_LEVEL = re.compile(r"(?:[^.\\]|\\.)+")
_USER = re.compile(r"^((?:[^/@]*://)?)[^/?#]*@")

Name = str | Sequence[str]
r"""The name of a table, such as `db.t`, or the sequence of its levels.

In a text, a dot inside a level is written as `\.`.
"""


def make_table_path(table: Name) -> str:
    """Return the path `/api/v1/tables/{namespace}/{table}`.

    Raises:
        ValueError: The name has no namespace.
    """
    levels = split_table(table)
    return f"/api/v1/tables/{make_namespace_path(levels[:-1])}/{quote(levels[-1], safe='')}"


def find_standard_root(defaults: Mapping[str, str], overrides: Mapping[str, str]) -> str:
    """Return the root of the routes of Iceberg's REST specification.

    Args:
        defaults: The `defaults` in the response to `GET /v1/config`.
        overrides: The `overrides` in the same response.
    """
    prefix = {**defaults, **overrides}.get("prefix", "")
    return f"/v1/{quote(prefix, safe='')}" if prefix else "/v1"


def make_standard_path(root: str, kind: str, levels: Sequence[str]) -> str:
    """Return the path of a table or view in the routes of Iceberg's REST specification.

    Args:
        kind: `tables` or `views`.
    """
    return f"{root}/namespaces/{make_namespace_path(levels[:-1])}/{kind}/{quote(levels[-1], safe='')}"


def check_url(url: str) -> None:
    """Check the URL of a server.

    Raises:
        ValueError: The URL is invalid.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{hide_credentials(url)!r} is not the URL of a server; a URL starts with http:// or https://")


def hide_credentials(url: str) -> str:
    """Return the URL without a user and a password, for messages."""
    return _USER.sub(r"\1", url)


def split_table(table: Name) -> tuple[str, ...]:
    levels = tuple(table) if not isinstance(table, str) else split_name(table)
    if len(levels) < 2:
        raise ValueError(f"{'.'.join(levels)!r} is not the name of a table; add the namespace, for example db.events")
    return levels


def make_namespace_path(namespace: Sequence[str]) -> str:
    return quote(NAMESPACE_SEPARATOR.join(namespace), safe="")


def split_name(text: str) -> tuple[str, ...]:
    """Split `a.b.t` into `("a", "b", "t")`, and `a\\.b.t` into `("a.b", "t")`.

    Raises:
        ValueError: A level is empty.
    """
    levels, position = [], 0
    while match := _LEVEL.match(text, position):
        levels.append(re.sub(r"\\(.)", r"\1", match[0]))
        position = match.end()
        if position == len(text):
            return tuple(levels)
        if text[position] != ".":
            break
        position += 1
    raise ValueError(
        f"{text!r} is not a name; a name has levels that are not empty, joined by dots. "
        "Write a dot inside a level as \\."
    )


def join_name(levels: Sequence[str]) -> str:
    """Join levels to a name, as the inverse of `split_name`."""
    return ".".join(level.replace("\\", "\\\\").replace(".", "\\.") for level in levels)
