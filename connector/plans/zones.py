"""The zones of sessions in which a time without a zone is UTC's, as Trino and Spark name them."""

from __future__ import annotations

_UTC = frozenset(("utc", "z", "etc/utc", "gmt", "etc/gmt", "+00:00"))


def is_utc(zone: str) -> bool:
    return zone.strip().lower() in _UTC
