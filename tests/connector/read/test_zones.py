"""Time zones of sessions that count as UTC, and zones that do not."""

from __future__ import annotations

import pytest

from seamark.connector.plans.zones import is_utc


@pytest.mark.parametrize("zone", ["UTC", "utc", "Etc/UTC", "GMT", "Etc/GMT", " Z ", "+00:00"])
def test_spellings_of_utc_by_engines_are_utc(zone: str) -> None:
    assert is_utc(zone)


@pytest.mark.parametrize("zone", ["", "+00:30", "-01:00", "UTC+1", "Etc/GMT+1", "Europe/London", "Africa/Abidjan"])
def test_zone_whose_offset_was_ever_not_zero_is_not_utc(zone: str) -> None:
    assert not is_utc(zone)
