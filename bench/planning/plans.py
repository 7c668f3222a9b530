"""The measurements of one plan, and a fingerprint of its answer by which different planners are compared."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass


class PlansDiffer(Exception):
    """Two planners kept different files for the same filter; their times cannot be compared."""


@dataclass(frozen=True)
class KeptFiles:
    """The duration of a plan, and a summary of the files that it keeps.

    Attributes:
        ms: The duration of planning, in milliseconds.
        file_count: The number of files.
        size_bytes: The total size of the files.
        paths_crc: The sum of the CRC-32 of the paths. It does not depend on the order of the files.
    """

    ms: float
    file_count: int
    size_bytes: int
    paths_crc: int

    @property
    def summary(self) -> tuple[int, int, int]:
        return self.file_count, self.size_bytes, self.paths_crc

    def check_same(self, other_files: KeptFiles, note: str) -> None:
        """Check that both planners kept the same files.

        Raises:
            PlansDiffer: The planners kept different files. The message contains `note`.
        """
        if self.summary != other_files.summary:
            raise PlansDiffer(
                f"{note}: the planners kept different files ({self.file_count} and {other_files.file_count})"
            )


def compute_fingerprint(paths: Iterable[bytes]) -> int:
    """Return the sum of the CRC-32 of the paths, which does not depend on their order, for `KeptFiles.paths_crc`."""
    return sum(map(zlib.crc32, paths))
