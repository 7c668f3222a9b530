"""What one plan took, and a fingerprint of its answer by which different planners are held against each other."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """`files` kept, their `bytes`, and the sum of the CRC-32 of their `paths`, which no order changes."""

    ms: float
    files: int
    bytes: int
    paths: int

    @property
    def answer(self) -> tuple[int, int, int]:
        return self.files, self.bytes, self.paths


def fingerprint(paths: Iterable[str]) -> int:
    """As `Plan.paths`."""
    return sum(zlib.crc32(path.encode()) for path in paths)


@dataclass(frozen=True)
class Timing:
    """Plans of one filter by one planner: the first, and the median of those after it."""

    first_ms: float
    warm_ms: float
    plan: Plan

    @staticmethod
    def of(plans: Sequence[Plan]) -> Timing:
        """The first of `plans` and the rest; with one alone, it stands for both. ValueError if the answers differ."""
        if len({plan.answer for plan in plans}) != 1:
            raise ValueError(f"the same filter was planned differently: {plans}")
        rest = [plan.ms for plan in plans[1:]] or [plans[0].ms]
        return Timing(plans[0].ms, statistics.median(rest), plans[0])
