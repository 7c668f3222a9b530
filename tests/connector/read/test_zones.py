"""Which zones of sessions pass for UTC."""

from __future__ import annotations

import pytest

from seamark.connector.plans.zones import is_utc


@pytest.mark.parametrize("zone", ["UTC", "utc", "Etc/UTC", "GMT", "Etc/GMT", " Z ", "+00:00"])
def test_utc_is_known_as_engines_spell_it(zone: str) -> None:
    assert is_utc(zone)


@pytest.mark.parametrize("zone", ["", "+00:30", "-01:00", "UTC+1", "Etc/GMT+1", "Europe/London", "Africa/Abidjan"])
def test_a_zone_that_is_or_was_another_does_not_pass_for_utc(zone: str) -> None:
    assert not is_utc(zone)
