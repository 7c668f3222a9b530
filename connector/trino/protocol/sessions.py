"""Reads the session of a statement from the headers of its request.

The session contains the catalog and schema, the time zone, prepared statements, and whether the client has switched
plans off. Every request repeats the session in its headers, so the proxy does not store it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote_plus, unquote_plus

from multidict import CIMultiDict, CIMultiDictProxy

from seamark.connector.plans.zones import is_utc

OFF_HEADER = "X-Seamark"
OFF_TAG = "seamark-off"
"""A client tag in `X-Trino-Client-Tags` that switches plans off.

Clients such as Trino's CLI and its JDBC driver can set tags, but no headers.
"""
PARTITION_FILTER = "query_partition_filter_required"
"""The session property of Trino's Iceberg catalogs that requires a condition on a partition column."""
_OFF_HINT = re.compile(r"/\*\s*seamark\s*:\s*off\s*\*/", re.IGNORECASE)
_SENDER_HEADERS = ("X-Trino-User", "X-Trino-Original-User", "X-Trino-Role", "Authorization")
_PREPARED_HEADER = "X-Trino-Prepared-Statement"
_COMPRESSED_PREFIX = "$zstd:"
"""The prefix of compressed prepared statements. The proxy does not change such statements."""
_ZONE_PROPERTY = re.compile(r"(?:^|,)\s*time_zone_id\s*=", re.IGNORECASE)
_PARTITION_FILTER_PROPERTY = re.compile(rf"\.\s*{PARTITION_FILTER}\s*=\s*(?!false\s*(?:,|$))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a statement, as its headers declare it.

    Attributes:
        catalog: The catalog of names without a catalog.
        schema: The schema of names without a schema.
        off: Whether the session has switched rewriting off.
        prepared: The texts of the prepared statements, by name.
    """

    catalog: str = ""
    schema: str = ""
    utc: bool = False
    """Whether the client declares that its time zone is UTC."""
    in_transaction: bool = False
    off: bool = False
    user: str = ""
    """The user with whose rights the statement runs, or empty if the client does not declare the user."""
    needs_partition_filter: bool = False
    """Whether Trino must refuse scans without a condition on a partition column.

    Trino does not check this condition for a version of a table, so statements of these sessions must stay unchanged.
    """
    prepared: Mapping[str, str] = field(default_factory=dict)
    sender_hash: int = field(default=0, compare=False)
    """A hash of the sender that the headers declare."""


def read_session(headers: CIMultiDictProxy[str]) -> Session:
    tags = headers.get("X-Trino-Client-Tags", "").split(",")
    transaction = headers.get("X-Trino-Transaction-Id", "").strip()
    has_zone = any(_ZONE_PROPERTY.search(value) for value in headers.getall("X-Trino-Session", []))
    return Session(
        catalog=headers.get("X-Trino-Catalog", "").strip().lower(),
        schema=headers.get("X-Trino-Schema", "").strip().lower(),
        utc=is_utc(headers.get("X-Trino-Time-Zone", "")) and not has_zone,
        in_transaction=transaction.upper() not in ("", "NONE"),
        off=headers.get(OFF_HEADER, "").strip().lower() == "off" or OFF_TAG in (tag.strip() for tag in tags),
        user=headers.get("X-Trino-User", "").strip(),
        needs_partition_filter=any(
            _PARTITION_FILTER_PROPERTY.search(value) for value in headers.getall("X-Trino-Session", [])
        ),
        prepared={name: text for name, text in _parse_prepared(headers) if not text.startswith(_COMPRESSED_PREFIX)},
        sender_hash=hash(tuple(headers.get(name, "") for name in _SENDER_HEADERS)),
    )


def count_prepared_characters(headers: CIMultiDictProxy[str]) -> int:
    """Return the number of characters that `read_session` decodes."""
    return sum(map(len, headers.getall(_PREPARED_HEADER, [])))


def is_hinted_off(statement: str) -> bool:
    return _OFF_HINT.search(statement) is not None


def set_prepared_statement(headers: CIMultiDict[str], name: str, text: str) -> None:
    """Set the text of the prepared statement `name` in the headers. Other prepared statements do not change."""
    other_statements = [
        f"{quote_plus(other)}={quote_plus(source)}" for other, source in _parse_prepared(headers) if other != name
    ]
    headers[_PREPARED_HEADER] = ",".join([*other_statements, f"{quote_plus(name)}={quote_plus(text)}"])


def _parse_prepared(headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    """Parse a header `name=text,…`, in which names and texts are URL-encoded."""
    statements = []
    for item in (part for value in headers.getall(_PREPARED_HEADER, []) for part in value.split(",")):
        name, equals, text = item.strip().partition("=")
        if equals:
            statements.append((unquote_plus(name), unquote_plus(text)))
    return statements
