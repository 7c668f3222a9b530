"""Tracks where the rows of written files come from, so that positions in rewritten files translate to new files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]

RUNS_MAX = 16 << 20
"""Limit of the runs of all files of a writer; 24 bytes each."""


@dataclass(frozen=True)
class RowOrigins:
    """The origins of a file's rows as runs of consecutive numbers: int64[runs] each. Row `places[i] + k` has the origin
    `starts[i] + k`, for `k` below `lengths[i]`."""

    places: Longs
    starts: Longs
    lengths: Longs

    @staticmethod
    def of(origins: Longs, first_place: int = 0) -> RowOrigins:
        """`origins`: those of consecutive rows, the first of which is row `first_place`."""
        breaks = np.flatnonzero(np.diff(origins) != 1) + 1
        places = np.concatenate([np.zeros(min(1, len(origins)), dtype=np.int64), breaks])
        return RowOrigins(places + first_place, origins[places], np.diff(places, append=len(origins)))

    @staticmethod
    def joined(parts: Iterable[RowOrigins]) -> RowOrigins:
        given = [RowOrigins.of(np.zeros(0, dtype=np.int64)), *parts]
        return RowOrigins(
            np.concatenate([part.places for part in given]),
            np.concatenate([part.starts for part in given]),
            np.concatenate([part.lengths for part in given]),
        )

    def places_of(self, origins: Longs) -> Longs:
        """The rows that have one of these origins, in no order. `origins`: ascending and distinct."""
        low = np.searchsorted(origins, self.starts)
        counts = np.searchsorted(origins, self.starts + self.lengths) - low
        matches = np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)
        places: Longs = origins[matches] + np.repeat(self.places - self.starts, counts)
        return places


class OriginLog:
    """The origins of the rows of a writer's files, by location."""

    def __init__(self) -> None:
        self._parts: dict[str, list[RowOrigins]] = {}
        self._runs = 0

    @property
    def is_complete(self) -> bool:
        """False if the files have more than `RUNS_MAX` runs; nothing is recorded then."""
        return self._runs <= RUNS_MAX

    def add(self, location: str, first_place: int, origins: Longs) -> None:
        """Records the origins of the next rows of a file, the first of which is row `first_place`."""
        self._add(location, RowOrigins.of(origins, first_place))

    def add_run(self, location: str, first_place: int, start: int, length: int) -> None:
        """The same for rows with consecutive origins from `start` on."""
        place, first, rows = (np.array([value], dtype=np.int64) for value in (first_place, start, length))
        self._add(location, RowOrigins(place, first, rows))

    def _add(self, location: str, part: RowOrigins) -> None:
        if not self.is_complete:
            return
        self._runs += len(part.places)
        self._parts.setdefault(location, []).append(part)
        if self._runs > RUNS_MAX:
            self._parts.clear()

    def of(self, location: str) -> RowOrigins:
        return RowOrigins.joined(self._parts.get(location, ()))
