"""The tables whose current snapshot was planned lately: those for which the view of a new snapshot is made before the
next plan (`preparation.py`)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.planner.plan.cached_views import ViewKey

LATELY_S = 300.0
"""A table that was not planned for so long is planned as any other after a commit."""
_TABLES_MAX = 1024


class PlannedTable(msgspec.Struct, frozen=True):
    """`key`: of the newest view. `prepared`: it was made in advance, and no plan has used it since. `due_s`: no
    view is made before that time, in monotonic seconds."""

    key: ViewKey
    planned_s: float
    prepared: bool = False
    due_s: float = 0.0


class PlannedTables:
    """By UUID. Belongs to one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tables: OrderedDict[str, PlannedTable] = OrderedDict()
        self.noted = asyncio.Event()
        """Set by each plan."""

    def note(self, uuid: str, key: ViewKey) -> None:
        """A plan used the view of the table's current snapshot."""
        self._tables[uuid] = PlannedTable(key, self._clock.monotonic())
        self._tables.move_to_end(uuid)
        if len(self._tables) > _TABLES_MAX:
            self._tables.popitem(last=False)
        self.noted.set()

    def get(self, uuid: str) -> PlannedTable | None:
        """None if the table was not planned lately."""
        found = self._tables.get(uuid)
        return found if found is not None and self._is_lately(found) else None

    def prepare(self, uuid: str, before: PlannedTable, key: ViewKey, due_s: float) -> None:
        """A view was made in advance, from `before`. A plan that was made meanwhile counts more."""
        if self._tables.get(uuid) is before:
            self._tables[uuid] = PlannedTable(key, before.planned_s, prepared=True, due_s=due_s)

    @property
    def is_empty(self) -> bool:
        """Whether no table was planned lately."""
        return not any(self._is_lately(table) for table in reversed(self._tables.values()))

    def _is_lately(self, table: PlannedTable) -> bool:
        return self._clock.monotonic() - table.planned_s < LATELY_S
