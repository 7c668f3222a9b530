"""Transforms by name (Iceberg spec: "Partition Transforms"): spelling, and which source types each accepts.

Only names are handled here; applying a transform to values belongs to planning. An unknown transform is legal
(spec: readers must ignore it, writers must not use it), so it is kept as it is and accepts any type.
"""

from __future__ import annotations

import re

from metaserver.errors import BadRequest
from metaserver.iceberg.types import base_name

VOID = "void"

_WIDTH = re.compile(r"(bucket|truncate)\[(\d+)\]", re.IGNORECASE)
_PLAIN = frozenset({"identity", "year", "month", "day", "hour", VOID})
_WIDTH_MAX = 2**31 - 1

_TIMESTAMPS = frozenset({"timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})
_DATES = _TIMESTAMPS | {"date"}
_SOURCES: dict[str, frozenset[str]] = {
    "year": _DATES,
    "month": _DATES,
    "day": _DATES,
    "hour": _TIMESTAMPS,
    "bucket": _DATES | {"int", "long", "time", "string", "binary", "fixed", "decimal", "uuid"},
    "truncate": frozenset({"int", "long", "string", "binary", "decimal"}),
}


def canonical(transform: str) -> str:
    """The canonical spelling. Raises BadRequest for a width that is zero or over 32 bits."""
    if match := _WIDTH.fullmatch(transform):
        width = int(match[2]) if len(match[2]) <= 10 else _WIDTH_MAX + 1
        if not 0 < width <= _WIDTH_MAX:
            raise BadRequest(f"Invalid transform {transform}: the width must be between 1 and {_WIDTH_MAX}")
        return f"{match[1].lower()}[{width}]"
    lower = transform.lower()
    return lower if lower in _PLAIN else transform


def accepts(transform: str, source_type: str) -> bool:
    """Whether the (canonical) transform can be applied to a primitive type."""
    kind = base_name(source_type)
    name = transform.partition("[")[0]
    if name == "identity":
        return kind not in ("variant", "geometry", "geography")
    return name not in _SOURCES or kind in _SOURCES[name]
