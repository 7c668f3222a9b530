"""Tests of passed time with a clock that jumps. The catalog never counts more time than has really passed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.metaserver.store import passed_time
from seamark.metaserver.store.lease import Lease, LeaseLost
from seamark.metaserver.store.passed_time import PassedTime, read_passed_time
from seamark.metaserver.store.sql.sqlite import open_sqlite
from tests.seeds import examples, mark_fast

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS


def test_time_ago_is_the_latest_time_since_which_the_age_has_passed() -> None:
    passed_time = PassedTime(1000, 0, ((100, 200), (500, 800)))
    assert passed_time.find_time_ago(0) == 1000
    for age_ms in range(1, 700):
        since_ms = passed_time.find_time_ago(age_ms)
        assert passed_time.measure_ms(since_ms, 1000) >= age_ms
        assert passed_time.measure_ms(since_ms + 1, 1000) < age_ms
    assert passed_time.measure_ms(1000, 900) == -100


@pytest.mark.parametrize("seed", mark_fast(range(40), 2))
async def test_no_more_time_counts_than_has_passed(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by minutes to years, the machine restarts, other machines read, and no server runs for days."""
    rng = random.Random(seed)
    monkeypatch.setattr(passed_time, "_GAPS_MAX", rng.choice([2, 3, 100]))
    clock = SimulatedClock(seed=seed)
    real_ms, allowance_ms = 0, 0
    events: list[tuple[int, int, int]] = []
    """(time by the clock, real time, allowed error) of each recorded event."""
    async with open_sqlite(tmp_path / "c.db", clock=clock) as store:
        await read_passed_time(store, clock)
        for number in range(examples(200, 30)):
            action = rng.random()
            if action < 0.5:
                span_ms = rng.choice([1000, 300_000, HOUR_MS // 2])
                clock.advance(span_ms)
                real_ms += span_ms
                allowance_ms += span_ms // 1000  # The count may be wrong by a thousandth.
            elif action < 0.7:
                clock.jump(rng.choice([-1, 1]) * rng.choice([90_000, HOUR_MS, DAY_MS, YEAR_MS]))
            elif action < 0.85:  # The machine was off, or another machine starts. Its clock may be wrong.
                span_ms = rng.choice([90_000, HOUR_MS // 2, 3 * DAY_MS])
                clock.advance(span_ms)
                # A jump of more than a minute is recorded.
                clock.jump(rng.choice([0, 0, HOUR_MS // 2, -DAY_MS, YEAR_MS]))
                clock.machine = f"machine {number}"
                real_ms += span_ms
                allowance_ms += HOUR_MS  # Without a monotonic clock, the catalog counts up to an hour between readings.
            allowance_ms += 60_000  # The catalog tolerates a jump of up to a minute between two readings.
            passed = await read_passed_time(store, clock)
            for recorded_ms, happened_ms, allowed_ms in events:
                counted_ms = passed.measure_ms(recorded_ms, passed.now_ms)
                assert counted_ms <= real_ms - happened_ms + allowance_ms - allowed_ms, (number, passed)
            events.append((clock.now_ms(), real_ms, allowance_ms))


async def test_time_while_the_server_runs_is_counted_completely(tmp_path: Path) -> None:
    clock = SimulatedClock(seed=1)
    async with open_sqlite(tmp_path / "c.db", clock=clock) as store:
        start_ms = (await read_passed_time(store, clock)).now_ms
        clock.jump(YEAR_MS)
        assert (await read_passed_time(store, clock)).measure_ms(start_ms, clock.now_ms()) == 0
        for _ in range(48):
            clock.advance(HOUR_MS)
            passed_time = await read_passed_time(store, clock)
        assert passed_time.measure_ms(start_ms, passed_time.now_ms) == 2 * DAY_MS
        assert passed_time.find_time_ago(DAY_MS) == passed_time.now_ms - DAY_MS
        assert passed_time.find_time_ago(3 * DAY_MS) < start_ms


async def test_server_that_is_stopped_most_of_the_day_deletes_old_data(tmp_path: Path) -> None:
    """A gap is a period that does not count as passed time, here because no server ran.

    There are more gaps than the catalog stores. At most the time that the server ran counts. At the end, all of this
    time counts.
    """
    clock = SimulatedClock(seed=1)
    async with open_sqlite(tmp_path / "c.db", clock=clock) as store:
        start_ms = (await read_passed_time(store, clock)).now_ms
        events: list[tuple[int, int]] = []
        ran_ms = 0
        for day in range(400):  # The catalog stores at most 100 gaps, and each day adds a gap of 22 hours.
            for _ in range(2):
                clock.advance(HOUR_MS)
                ran_ms += HOUR_MS
                passed_time = await read_passed_time(store, clock)
            earlier_events = events[day % 20 :: 20]  # Each earlier day is checked once in 20 days.
            assert all(
                passed_time.measure_ms(at_ms, passed_time.now_ms) <= ran_ms - ran_ms_at_event
                for at_ms, ran_ms_at_event in earlier_events
            )
            events.append((clock.now_ms(), ran_ms))
            clock.advance(22 * HOUR_MS)
            clock.machine = f"boot {day}"
            passed_time = await read_passed_time(store, clock)
        assert passed_time.measure_ms(start_ms, passed_time.now_ms) == ran_ms
        assert passed_time.find_time_ago(30 * DAY_MS) >= start_ms


async def test_replicas_with_different_clocks_record_one_gap(tmp_path: Path) -> None:
    clock = SimulatedClock(seed=1)
    async with open_sqlite(tmp_path / "c.db", clock=clock) as store:
        start_ms = (await read_passed_time(store, clock)).now_ms
        clock.advance(10 * HOUR_MS)
        await read_passed_time(store, clock)
        for _ in range(250):
            clock.advance(60_000)
            for machine, ahead_ms in (("ahead", DAY_MS), ("right", -DAY_MS)):
                clock.machine = machine
                clock.jump(ahead_ms)
                passed_time = await read_passed_time(store, clock)
        assert len(passed_time.gaps) == 1
        assert passed_time.measure_ms(start_ms, passed_time.now_ms) == 10 * HOUR_MS


async def test_lease_taken_while_the_clock_was_ahead_ends_in_time(tmp_path: Path) -> None:
    clock = SimulatedClock(seed=1)
    async with open_sqlite(tmp_path / "c.db", clock=clock) as store:
        ahead_lease, right_lease = (Lease(store, clock, "work", holder, lasts_s=60) for holder in ("wrong", "right"))
        clock.jump(YEAR_MS)
        await ahead_lease.hold()
        clock.jump(-YEAR_MS)
        await right_lease.hold()
        # After `forget`, the next call of `hold` reads the lease from the store.
        ahead_lease.forget()
        with pytest.raises(LeaseLost):
            await ahead_lease.hold()
        await ahead_lease.release()  # A release does not affect the lease of another holder.
        right_lease.forget()
        await right_lease.hold()
        assert right_lease.fence == 2, "the lease has had two holders, and the second one still has it"
