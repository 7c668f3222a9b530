"""Tests of stale results.

They replace results of the database only if the request allows their age, and only in an outage.

The server never uses data that it knows to have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import NoSuchTable, RetryLater
from seamark.metaserver.runtime.staleness import Staleness, allow_staleness, get_current_staleness, parse_staleness_s
from seamark.metaserver.store.model import EntryKind, Grant
from seamark.metaserver.store.operations import DropEntry, RemoveGrant, RevokeToken, SwapPointer
from seamark.metaserver.store.stale_reads import RUNNING_MAX, StaleReads, make_entry_key

KEY = ("token", "digest")


class Database:
    """A database that has one value and counts its reads. A test can make the reads fail or wait."""

    def __init__(self) -> None:
        self.value: str | None = "live"
        self.error: Exception | None = None
        self.may_answer: asyncio.Event | None = None
        """If set, reads wait for this event."""
        self.reads = 0

    def make_query(self) -> Callable[[], Awaitable[str | None]]:
        """Return a function that reads the value."""

        async def run() -> str | None:
            self.reads += 1
            if self.may_answer is not None:
                await self.may_answer.wait()
            if self.error is not None:
                raise self.error
            return self.value

        return run


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(seed=1)


@pytest.fixture
def reads(clock: SimulatedClock) -> StaleReads:
    return StaleReads(clock)


async def test_stale_results_need_permission_and_an_unreachable_database(reads: StaleReads) -> None:
    database = Database()
    assert await reads.read(KEY, database.make_query()) == "live"
    database.value = "new"
    with allow_staleness(Staleness(100, 30)):
        assert await reads.read(KEY, database.make_query()) == "new"
        staleness = get_current_staleness()
        assert staleness is not None
        assert staleness.age_s == 0
    database.error = RetryLater("away")
    with pytest.raises(RetryLater):
        await reads.read(KEY, database.make_query())
    assert get_current_staleness() is None


async def test_value_is_used_exactly_up_to_the_allowed_age(reads: StaleReads, clock: SimulatedClock) -> None:
    database = Database()
    await reads.read(KEY, database.make_query())
    database.error = RetryLater("away")
    age_s = 0
    for further_s in (0, 40, 20):
        clock.advance(further_s * 1000)
        age_s += further_s
        with allow_staleness(Staleness(60, 30)) as _:
            assert await reads.read(KEY, database.make_query()) == "live"
            staleness = get_current_staleness()
            assert staleness is not None
            assert staleness.age_s == pytest.approx(age_s)
    clock.advance(1)
    with allow_staleness(Staleness(60, 30)), pytest.raises(RetryLater):
        await reads.read(KEY, database.make_query())
    with allow_staleness(Staleness(61, 30)):
        assert await reads.read(KEY, database.make_query()) == "live"
        with pytest.raises(RetryLater):
            await reads.read(("token", "unknown"), database.make_query())


async def test_stale_value_is_used_if_the_database_is_slow_and_its_answer_is_stored_later(
    reads: StaleReads, clock: SimulatedClock
) -> None:
    database = Database()
    await reads.read(KEY, database.make_query())
    database.value, database.may_answer = "new", asyncio.Event()
    clock.advance(5000)
    for _ in range(3):
        with allow_staleness(Staleness(limit_s=60, wait_s=0.01)):
            assert await reads.read(KEY, database.make_query()) == "live"
    assert database.reads == 2  # All requests share one background read.
    database.may_answer.set()
    database.may_answer = None
    await asyncio.sleep(0)
    database.error = RetryLater("away")
    with allow_staleness(Staleness(limit_s=60, wait_s=0.01)):
        while await reads.read(KEY, database.make_query()) == "live":
            await asyncio.sleep(0.001)
        assert await reads.read(KEY, database.make_query()) == "new"
    await reads.close()


async def test_hanging_database_gets_a_limited_number_of_reads(reads: StaleReads) -> None:
    database = Database()
    keys = [("token", str(number)) for number in range(RUNNING_MAX + 50)]
    for key in keys:
        await reads.read(key, database.make_query())
    database.may_answer = asyncio.Event()
    with allow_staleness(Staleness(60, 0.001)):
        for key in keys:
            assert await reads.read(key, database.make_query()) == "live"
    assert database.reads == len(keys) + RUNNING_MAX
    await reads.close()


async def test_other_errors_and_missing_values_of_the_database_are_returned(reads: StaleReads) -> None:
    database = Database()
    await reads.read(KEY, database.make_query())
    with allow_staleness(Staleness(limit_s=60, wait_s=30)):
        database.error = NoSuchTable("gone")
        with pytest.raises(NoSuchTable):
            await reads.read(KEY, database.make_query())
        database.error, database.value = None, None
        assert await reads.read(KEY, database.make_query()) is None
        database.error = RetryLater("away")
        with pytest.raises(RetryLater):  # The stale value of a revoked or deleted key is not used again.
            await reads.read(KEY, database.make_query())


async def test_cached_value_is_not_used_after_its_server_has_changed_it(reads: StaleReads) -> None:
    database = Database()
    table = make_entry_key(EntryKind.TABLE, ("db",), "t")
    other_key = make_entry_key(EntryKind.TABLE, ("db",), "u")
    keys = (KEY, ("grants", "ann"), table, other_key)
    swap = SwapPointer(EntryKind.TABLE, ("db",), "t", "uuid", "a", "b", 0)
    for operation, forgotten_keys in (
        (RevokeToken("ann", 0), {KEY, ("grants", "ann")}),
        (RemoveGrant(Grant("bob", "reader")), {KEY, ("grants", "ann")}),
        (swap, {table}),
        (DropEntry(EntryKind.TABLE, ("db",), "u"), {other_key, ("grants", "ann")}),
    ):
        database.error = None
        for key in keys:
            await reads.read(key, database.make_query())
        reads.forget([operation])
        database.error = RetryLater("away")
        with allow_staleness(Staleness(60, 30)):
            for key in keys:
                if key in forgotten_keys:
                    with pytest.raises(RetryLater):
                        await reads.read(key, database.make_query())
                else:
                    assert await reads.read(key, database.make_query()) == "live"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("stale-if-error=60", 60),
        ("no-cache, Max-Stale=5", 5),
        ('stale-if-error="7", max-age=0', 7),
        ("stale-if-error=60, max-stale=5", 5),
        ("max-stale", None),
        ("max-age=60", None),
        ("x-stale-if-error=60", None),
        ("stale-if-error=-1", None),
        ("stale-if-error=1e9", None),
        ("stale-if-error=9999999999", None),
        ("", None),
        ("x" * 2000 + ", stale-if-error=1", None),
    ],
)
def test_directives_of_cache_control_are_parsed(header: str, seconds: int | None) -> None:
    assert parse_staleness_s(header) == seconds
