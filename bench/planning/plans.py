"""What one plan took, and a fingerprint of its answer by which different planners are compared."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass


class PlansDiffer(Exception):
    """Two planners kept different files for the same filter; their times cannot be compared."""


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

    def check_same(self, other: Plan, what: str) -> None:
        """PlansDiffer, naming `what`, unless both kept the same files."""
        if self.answer != other.answer:
            raise PlansDiffer(f"{what}: {self.files} files were kept by one planner and {other.files} by another")


def fingerprint(paths: Iterable[bytes]) -> int:
    """As `Plan.paths`."""
    return sum(map(zlib.crc32, paths))
