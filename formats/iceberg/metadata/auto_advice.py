"""The policy of automatic advice: the budget of a table, and the time for which a change is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamark.formats.iceberg.metadata.properties import parse_count

BYTES_PER_DAY = "seamark.auto-advice.max-bytes-per-day"
BYTES_PER_DAY_DEFAULT = 100 << 30
SECONDS_PER_DAY = "seamark.auto-advice.max-seconds-per-day"
SECONDS_PER_DAY_DEFAULT = 3600
MEASURE_HOURS = "seamark.auto-advice.measure-hours"
MEASURE_HOURS_DEFAULT = 24


@dataclass(frozen=True)
class AutoAdvicePolicy:
    """The limits of the changes that Seamark automatically makes to a table when it follows its advice.

    Attributes:
        bytes_per_day: The maximum number of bytes that all changes of 24 hours read and write.
        seconds_per_day: The maximum duration of all changes of 24 hours, in seconds.
        measure_hours: The number of hours after a change for which statements are measured.
    """

    bytes_per_day: int
    seconds_per_day: int
    measure_hours: int

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> AutoAdvicePolicy:
        """Return the policy in a table's properties. Invalid values are replaced by the defaults."""
        return AutoAdvicePolicy(
            parse_count(properties, BYTES_PER_DAY, BYTES_PER_DAY_DEFAULT),
            parse_count(properties, SECONDS_PER_DAY, SECONDS_PER_DAY_DEFAULT),
            max(1, parse_count(properties, MEASURE_HOURS, MEASURE_HOURS_DEFAULT)),
        )

    @property
    def measure_ms(self) -> int:
        return self.measure_hours * 3_600_000
