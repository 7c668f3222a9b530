"""Which joins of a statement are worth asking the catalog about: those with tables much smaller than the one that they
limit, and that have a condition of their own, or a table behind them that has.

Scans that are joined have each other (`scans.py`). Here they become a tree for each scan: nothing on the way to a
table limits it again. Sizes are those that a table's snapshot tells of itself; the server, which knows better, leaves
out what is too large to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seamark.connector.plans.async_client import JoinRequest, KnownTable, Name
from seamark.connector.plans.scan import Scan

DEPTH_MAX = 4
JOINS_MAX = 32
"""In one question; the server refuses more."""
_STEPS_MAX = 500
"""Joins looked at for one scan: where all are joined to all there are very many ways."""
SIZE_RATIO_MIN = 4
SMALL_BYTES = 4 << 20
"""Tables up to this limit others of any size."""


@dataclass(frozen=True)
class PlannedScan:
    """A scan whose table may be asked for, by the name that Seamark has for it."""

    scan: Scan
    catalog: str
    table: Name
    within: tuple[int, ...] = ()
    """Which view's text it stands in (`viewing.py`), by the numbers of the scans on the way there; none: the
    statement's."""

    @property
    def read(self) -> tuple[str, Name, int | None]:
        """What Trino reads there: the same in all places that have it."""
        return self.catalog, self.table, self.scan.snapshot_id


@dataclass(frozen=True)
class Dimension:
    """What limits a scan: another one, as of a snapshot of its table."""

    place: PlannedScan
    snapshot_id: int
    files: int
    """Of its table."""
    on: tuple[tuple[str, str], ...]
    dimensions: tuple[Dimension, ...]

    def request(self) -> JoinRequest:
        scan = self.place.scan
        nested = tuple(one.request() for one in self.dimensions)
        return JoinRequest(self.place.table, self.on, scan.predicate, self.snapshot_id, nested)


def depth_first(dimensions: Sequence[Dimension]) -> list[Dimension]:
    return [each for one in dimensions for each in (one, *depth_first(one.dimensions))]


def find_dimensions(
    places: Mapping[int, PlannedScan], known: Mapping[tuple[str | None, str | None, str], KnownTable]
) -> dict[PlannedScan, tuple[Dimension, ...]]:
    """By the place that they limit. `places` by their scans' numbers, `known` by the names that the statement has."""
    chosen = {}
    for number, place in places.items():
        table = _known(place, known)
        if table is not None and table.files > 1:  # of one file nothing can be left out
            found = _Choosing(places, known).limiting(number, ())
            if found:
                chosen[place] = found
    return chosen


class _Choosing:
    """For one root."""

    def __init__(
        self, places: Mapping[int, PlannedScan], known: Mapping[tuple[str | None, str | None, str], KnownTable]
    ) -> None:
        self._places = places
        self._known = known
        self._left = JOINS_MAX
        self._steps = _STEPS_MAX

    def limiting(self, number: int, path: tuple[int, ...]) -> tuple[Dimension, ...]:
        limited = _known(self._places[number], self._known)
        if limited is None or len(path) >= DEPTH_MAX:
            return ()
        found: list[Dimension] = []
        for join in self._places[number].scan.joins:
            if not self._left or not self._steps:
                break
            self._steps -= 1
            place = self._places.get(join.scan)
            table = None if place is None else _known(place, self._known)
            if place is None or table is None or table.snapshot_id is None or join.scan in path:
                continue
            if table.size_bytes > max(SMALL_BYTES, limited.size_bytes // SIZE_RATIO_MIN):
                continue
            self._left -= 1
            behind = self.limiting(join.scan, (*path, number))
            # What is asked of the key alone is asked of this table's own column, too.
            if behind or not place.scan.named <= {column for _, column in join.on}:
                found.append(Dimension(place, table.snapshot_id, table.files, join.on, behind))
            else:
                self._left += 1
        return tuple(found)


def _known(place: PlannedScan, known: Mapping[tuple[str | None, str | None, str], KnownTable]) -> KnownTable | None:
    scan = place.scan
    return None if scan.snapshot_id is not None else known.get((scan.catalog, scan.schema, scan.table))
