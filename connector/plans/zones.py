"""The names of the time zone UTC in Trino, Spark and DuckDB."""

from __future__ import annotations

_UTC = frozenset(("utc", "z", "zulu", "etc/utc", "gmt", "etc/gmt", "+00:00"))


def is_utc(zone: str) -> bool:
    return zone.strip().lower() in _UTC
