"""Records the origins of the rows in new files, to translate positions in rewritten files to positions in new files.

The origin of a new row is the number of the old row in the source, for example in the concatenated rows of all
rewritten files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from seamark.connector.arrow.arrays import Longs

RUNS_MAX = 16 << 20
"""The maximum number of runs of consecutive origins in all files of a writer. Each run takes 24 bytes."""


@dataclass(frozen=True)
class RowOrigins:
    """The origins of a new file's rows: their numbers among the rows of all old files, as runs of consecutive numbers.

    Row `positions[i] + k` has the origin `starts[i] + k`, for each `k` below `lengths[i]`. Each array is int64[runs].
    """

    positions: Longs
    starts: Longs
    lengths: Longs

    @staticmethod
    def from_origins(origins: Longs, first_position: int = 0) -> RowOrigins:
        """Return the origins of consecutive rows of a new file as runs.

        Args:
            origins: The number of each row among the rows of all old files, as int64[rows].
            first_position: The position of the first of the rows in the new file.
        """
        # A run ends where the next origin is not the successor.
        breaks = np.flatnonzero(np.diff(origins) != 1) + 1
        positions = np.concatenate([np.zeros(min(1, len(origins)), dtype=np.int64), breaks])
        return RowOrigins(positions + first_position, origins[positions], np.diff(positions, append=len(origins)))

    @staticmethod
    def join(parts: Iterable[RowOrigins]) -> RowOrigins:
        runs = [RowOrigins.from_origins(np.zeros(0, dtype=np.int64)), *parts]
        return RowOrigins(
            np.concatenate([part.positions for part in runs]),
            np.concatenate([part.starts for part in runs]),
            np.concatenate([part.lengths for part in runs]),
        )

    def find_positions(self, origins: Longs) -> Longs:
        """Return the positions in the new file of the rows with these origins, as int64[rows], in any order.

        Args:
            origins: The numbers of rows among the rows of all old files, ascending and distinct.
        """
        # Each run of consecutive origins in the new file is an interval. `counts` has the number of requested origins
        # in each interval, and `low` the index of the first of them. `matches` lists the indexes of the origins in all
        # intervals, run by run.
        low = np.searchsorted(origins, self.starts)
        counts = np.searchsorted(origins, self.starts + self.lengths) - low
        matches = np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)
        positions: Longs = origins[matches] + np.repeat(self.positions - self.starts, counts)
        return positions


class OriginLog:
    """The origins of the rows of a writer's new files, by location.

    The origin of a row is its number among the rows of all old files. Consecutive origins are stored as one run. To
    limit the memory, the log drops all origins when it has more than `RUNS_MAX` runs, and is then incomplete.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[RowOrigins]] = {}
        self._runs = 0

    @property
    def is_complete(self) -> bool:
        """Whether the number of the old row is recorded for each new row.

        Consecutive numbers are one run. With more than `RUNS_MAX` runs, nothing is recorded, to limit the memory.
        """
        return self._runs <= RUNS_MAX

    def add(self, location: str, first_position: int, origins: Longs) -> None:
        """Record the origins of consecutive rows of a new file.

        Args:
            location: The location of the new file.
            first_position: The position of the first of the rows in the new file.
            origins: The number of each row among the rows of all old files, as int64[rows].
        """
        self._add(location, RowOrigins.from_origins(origins, first_position))

    def add_run(self, location: str, first_position: int, start: int, length: int) -> None:
        """Record that consecutive rows of the old files are consecutive rows of a new file.

        Args:
            location: The location of the new file.
            first_position: The position of the first of the rows in the new file.
            start: The number of the first of the rows among the rows of all old files (its origin).
            length: The number of rows.
        """
        positions, starts, lengths = (np.array([value], dtype=np.int64) for value in (first_position, start, length))
        self._add(location, RowOrigins(positions, starts, lengths))

    def _add(self, location: str, part: RowOrigins) -> None:
        """Add origins of rows of a new file. With more than `RUNS_MAX` runs, drop all origins to limit the memory."""
        if not self.is_complete:
            return
        self._runs += len(part.positions)
        self._parts.setdefault(location, []).append(part)
        if self._runs > RUNS_MAX:
            self._parts.clear()

    def take(self, log: OriginLog) -> None:
        """Add the origins of another log. The two logs must have no file in common."""
        self._runs += log._runs
        self._parts.update(log._parts)
        if self._runs > RUNS_MAX:
            self._parts.clear()  # The log is incomplete from now on, so its memory is freed.

    def create_origins(self, location: str) -> RowOrigins:
        return RowOrigins.join(self._parts.get(location, ()))
