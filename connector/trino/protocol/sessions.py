"""What a statement means besides its text: the catalog and schema of its session, its zone, its prepared statements,
and whether its sender wants it left alone. All of it comes with every request, in headers; the proxy remembers none.
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
"""In `X-Trino-Client-Tags`, for clients that set tags and no headers of their own: Trino's CLI, its JDBC driver."""
PARTITION_FILTER = "query_partition_filter_required"
"""A session property of Trino's Iceberg catalogs."""
_OFF_HINT = re.compile(r"/\*\s*seamark\s*:\s*off\s*\*/", re.IGNORECASE)
_WHO = ("X-Trino-User", "X-Trino-Original-User", "X-Trino-Role", "Authorization")
_PREPARED = "X-Trino-Prepared-Statement"
_COMPRESSED = "$zstd:"
"""Before the texts of long prepared statements, which are left as they are."""
_ZONE_PROPERTY = re.compile(r"(?:^|,)\s*time_zone_id\s*=", re.IGNORECASE)
_PARTITION_FILTER = re.compile(rf"\.\s*{PARTITION_FILTER}\s*=\s*(?!false\s*(?:,|$))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Session:
    catalog: str = ""
    schema: str = ""
    utc: bool = False
    """The client says that its zone is UTC."""
    in_transaction: bool = False
    off: bool = False
    user: str = ""
    """As whom the statement runs, where the client says so."""
    needs_partition_filter: bool = False
    """Trino is to refuse scans without a condition on a partition column. It does not check that of versions."""
    prepared: Mapping[str, str] = field(default_factory=dict)
    who: int = field(default=0, compare=False)
    """The same for the same sender, as far as headers tell."""


def session_of(headers: CIMultiDictProxy[str]) -> Session:
    """From the headers of a statement."""
    tags = headers.get("X-Trino-Client-Tags", "").split(",")
    transaction = headers.get("X-Trino-Transaction-Id", "").strip()
    zoned = any(_ZONE_PROPERTY.search(value) for value in headers.getall("X-Trino-Session", []))
    return Session(
        catalog=headers.get("X-Trino-Catalog", "").strip().lower(),
        schema=headers.get("X-Trino-Schema", "").strip().lower(),
        utc=is_utc(headers.get("X-Trino-Time-Zone", "")) and not zoned,
        in_transaction=transaction.upper() not in ("", "NONE"),
        off=headers.get(OFF_HEADER, "").strip().lower() == "off" or OFF_TAG in (tag.strip() for tag in tags),
        user=headers.get("X-Trino-User", "").strip(),
        needs_partition_filter=any(_PARTITION_FILTER.search(value) for value in headers.getall("X-Trino-Session", [])),
        prepared={name: text for name, text in _prepared(headers) if not text.startswith(_COMPRESSED)},
        who=hash(tuple(headers.get(name, "") for name in _WHO)),
    )


def is_hinted_off(statement: str) -> bool:
    return _OFF_HINT.search(statement) is not None


def prepare(headers: CIMultiDict[str], name: str, text: str) -> None:
    """Has the prepared statement `name` say `text`; the others stay."""
    kept = [f"{quote_plus(one)}={quote_plus(said)}" for one, said in _prepared(headers) if one != name]
    headers[_PREPARED] = ",".join([*kept, f"{quote_plus(name)}={quote_plus(text)}"])


def _prepared(headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    """Of `name=text,…`, both sides escaped as in URLs."""
    found = []
    for one in (part for value in headers.getall(_PREPARED, []) for part in value.split(",")):
        name, equals, text = one.strip().partition("=")
        if equals:
            found.append((unquote_plus(name), unquote_plus(text)))
    return found
