"""Amounts that count until a moment of their own, and are forgotten then."""

from __future__ import annotations

from metaserver.catalog.quotas import Quota


def test_holders_who_never_come_back_are_forgotten() -> None:
    quota = Quota(10)
    for number in range(5_000):
        quota.add(f"oidc:{number}", number, number + 60.0)
    quota.check_invariants()
    assert len(quota._entries) < 1_100
    assert not quota.has_room("oidc:4999", 5_000.0, 10), "what has not ended still counts"
    assert quota.has_room("oidc:4999", 5_059.5, 10)
