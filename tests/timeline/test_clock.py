"""Tests of the clock's UUIDs."""

from __future__ import annotations

import pytest

from seamark.formats.runtime.clock import Clock, SimulatedClock, SystemClock


@pytest.mark.parametrize("clock", [SystemClock(), SimulatedClock(7)])
def test_uuids_of_one_millisecond_sort_in_the_order_of_their_creation(clock: Clock) -> None:
    uuids = [clock.uuid7() for _ in range(3_000)]
    assert [str(uuid) for uuid in uuids] == sorted(str(uuid) for uuid in uuids)
    assert {(uuid.version, uuid.variant) for uuid in uuids} == {(7, uuids[0].variant)}
    assert len({uuid.int & (1 << 62) - 1 for uuid in uuids}) == 3_000, "the 62 random bits of the UUIDs must differ"
