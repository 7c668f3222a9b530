"""Tests of quotas for amounts that expire, such as the leases and the bytes of plans."""

from __future__ import annotations

import random

import pytest

from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.catalog.plans.plan_shares import PLAN_BYTES_MIN, PlanShares
from seamark.metaserver.catalog.quotas import Quota
from tests.seeds import mark_fast


def test_holders_without_later_requests_are_forgotten() -> None:
    quota = Quota(10)
    for number in range(5_000):
        quota.add(f"oidc:{number}", number, number + 60.0)
    quota.check_invariants()
    assert len(quota._usages) < 1_100
    assert not quota.has_room("oidc:4999", 5_000.0, 10), "a lease that has not ended still counts"
    assert quota.has_room("oidc:4999", 5_060.5, 10)


@pytest.mark.parametrize("seed", mark_fast(range(20), 3))
def test_quota_counts_amounts_that_are_neither_expired_nor_released(seed: int) -> None:
    rng, quota, now_s, charges = random.Random(seed), Quota(10**6), 0.0, list[tuple[float, int]]()
    for _ in range(300):
        now_s += rng.choice((0.0, 1.0, 30.0))
        if charges and rng.random() < 0.4:
            until, amount = charges.pop(rng.randrange(len(charges)))
            quota.take_back("a", until, amount)
        else:
            until, amount = now_s + rng.choice((1.0, 60.0, 3600.0)), rng.randrange(1, 9)
            quota.add("a", now_s, until, amount)
            charges.append((until, amount))
        charges = [(until, amount) for until, amount in charges if until > now_s - 5]
        quota.check_invariants()
        # The quota may count an amount for up to five seconds after its end.
        minimum, maximum = (sum(amount for until, amount in charges if until > now_s - delay_s) for delay_s in (0, 5))
        assert not quota.has_room("a", now_s, 10**6 - minimum + 1)
        assert quota.has_room("a", now_s, 10**6 - maximum)


def build_shares(**options: int) -> PlanShares:
    return PlanShares(**{"leases": 20, "size_bytes": 1 << 30, "grace_s": 3600, **options})


def test_short_lease_counts_exactly_for_its_granted_time() -> None:
    quota = build_shares()
    # Ten leases are possible at a time, for hours. If each of them counted for an hour or longer, only the first ten
    # would ever be granted.
    for second in range(0, 7200, 6):  # For two hours, a lease of 45 s begins every 6 s.
        assert quota.find_exhausted_limit("trino", second) is None, second
        quota.grant("trino", plan=second, now_s=second, until_s=second + 45, size_bytes=20_000)
    for number in range(10):
        quota.grant("rita", plan=number, now_s=0, until_s=3600, size_bytes=1)
    assert quota.find_exhausted_limit("rita", 3599) == "leases of one principal"
    assert quota.find_exhausted_limit("rita", 3605) is None
    quota.check_invariants()


def test_quota_ignores_withdrawn_leases_and_counts_renewed_leases() -> None:
    quota = build_shares()
    for number in range(10):
        quota.grant("trino", number, now_s=0, until_s=60, size_bytes=1)
    assert quota.find_exhausted_limit("trino", 1) == "leases of one principal"
    quota.withdraw("trino", [3, 4, 99], 1)
    assert quota.find_exhausted_limit("trino", 1, 2) is None
    assert quota.find_exhausted_limit("trino", 1, 3) == "leases of one principal"
    for number in range(5, 10):
        quota.grant("trino", number, now_s=50, until_s=110)
    assert quota.count_new_leases("trino", [3, 5, 99], 50) == 2
    # A lease counts for up to five seconds after its end, so those until 60 have ended at 70, and all at 116.
    assert quota.find_exhausted_limit("trino", 70, 5) is None
    assert quota.find_exhausted_limit("trino", 70, 6) == "leases of one principal"
    assert quota.find_exhausted_limit("trino", 116, 10) is None
    quota.check_invariants()


def test_lease_counts_for_the_principal_who_renewed_it_last() -> None:
    quota = build_shares()
    for number in range(10):
        quota.grant("trino", number, now_s=0, until_s=60, size_bytes=1)
        quota.grant("mallory", number, now_s=0, until_s=3600)
    assert quota.find_exhausted_limit("trino", 66) is None
    assert quota.find_exhausted_limit("mallory", 66) == "leases of one principal"


def test_bytes_count_until_the_files_are_deleted_and_each_plan_has_a_minimum() -> None:
    quota = build_shares(leases=10**6, size_bytes=20 * PLAN_BYTES_MIN)
    for number in range(10):
        assert quota.find_exhausted_limit("rita", 0) is None
        quota.grant("rita", number, now_s=0, until_s=60, size_bytes=1)
    assert quota.find_exhausted_limit("rita", 0) == "bytes of one principal"
    quota.withdraw("rita", range(10), 10)
    assert quota.find_exhausted_limit("rita", 3600) == "bytes of one principal", (
        "the files exist until the end of the grace period"
    )
    # The leases end at 10, the grace period an hour later, and bytes count for up to five seconds longer.
    assert quota.find_exhausted_limit("rita", 3616) is None
    for number in range(20):
        assert quota.find_exhausted_limit(ANONYMOUS_NAME, 3700) is None, "an anonymous caller has no share of its own"
        quota.grant(ANONYMOUS_NAME, number, now_s=3700, until_s=3760, size_bytes=1)
        quota.grant(ANONYMOUS_NAME, number, now_s=3700, until_s=3790)
    assert quota.find_exhausted_limit(ANONYMOUS_NAME, 3700) == "bytes"
    assert quota.find_exhausted_limit("ron", 3700) == "bytes"
    quota.check_invariants()


def test_default_quota_allows_300_one_minute_plans_of_40_kb_each_three_seconds() -> None:
    """This is the load of an adapter for a Trino with 100 statements a second."""
    plan_shares = PlanShares(leases=100_000, size_bytes=32 << 30, grace_s=3600)
    # The bytes of a plan count for its minute and an hour of grace. The loop lasts four times as long.
    for number, second in enumerate(range(0, 4 * 3660, 3)):
        assert plan_shares.find_exhausted_limit("trino", second, leases=300) is None, second
        for lease in range(3):  # Each lease is for the 100 plans of a second, with 40 kB each.
            plan_shares.grant(
                "trino", plan=3 * number + lease, now_s=second, until_s=second + 60, size_bytes=100 * 40_000
            )


def test_expired_leases_are_forgotten() -> None:
    quota = build_shares(leases=10**6)
    for number in range(40_000):
        quota.grant("trino", number, number, number + 10, 1)
    assert len(quota._granted_leases) < 20_001
    quota.check_invariants()
