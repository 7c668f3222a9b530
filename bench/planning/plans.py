"""The measurements of one plan, and a fingerprint of its answer by which different planners are compared."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass


class PlansDiffer(Exception):
    """Two planners kept different files for the same filter; their times cannot be compared."""


@dataclass(frozen=True)
class KeptFiles:
    """The number of `files` that a plan keeps, their `bytes`, and `paths`, the sum of the CRC-32 of their paths.

    The sum does not depend on the order of the files.
    """

    ms: float
    files: int
    bytes: int
    paths: int

    @property
    def answer(self) -> tuple[int, int, int]:
        return self.files, self.bytes, self.paths

    def check_same(self, other_files: KeptFiles, note: str) -> None:
        """Check that both planners kept the same files.

        Raises:
            PlansDiffer: The planners kept different files. The message contains `note`.
        """
        if self.answer != other_files.answer:
            raise PlansDiffer(f"{note}: one planner keeps {self.files} files, the other planner {other_files.files}")


def compute_fingerprint(paths: Iterable[bytes]) -> int:
    """Return the fingerprint of the paths for `KeptFiles.paths`."""
    return sum(map(zlib.crc32, paths))
