"""When each index was last of use, and what it removed: counters in memory, fed by the planner, told by listings.

Of this process and since its start: every worker counts what it plans. What they add up to is in the metrics.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

KEPT_MAX = 10_000
"""Indexes that are counted; the one that was not used for longest goes."""


@dataclass(slots=True)
class IndexUsage:
    last_ms: int
    plans: int = 0
    files_in: int = 0
    """Files that plans asked it about, summed up."""
    files_removed: int = 0


class Usage:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._used: OrderedDict[tuple[str, str], IndexUsage] = OrderedDict()

    def note(self, uuid: str, definition_id: str, *, files_in: int, files_removed: int, now_ms: int) -> None:
        """A plan on this table asked this index about so many files, and left out so many of them."""
        key = (uuid, definition_id)
        used = self._used.get(key)
        if used is None:
            used = self._used[key] = IndexUsage(now_ms)
            if len(self._used) > KEPT_MAX:
                self._used.popitem(last=False)
        else:
            self._used.move_to_end(key)
        used.last_ms = now_ms
        used.plans += 1
        used.files_in += files_in
        used.files_removed += files_removed

    def of(self, uuid: str, definition_id: str) -> IndexUsage | None:
        """None where it was not used since the start."""
        return self._used.get((uuid, definition_id))
