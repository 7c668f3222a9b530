"""The usage of indexes by plans: the time of the last use, and counts of pruned files, in memory.

The counts are those of this process since its start. Each worker counts its own plans, and metrics contain the sums of
all workers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

COUNTED_INDEXES_MAX = 10_000
"""The maximum number of indexes that are counted. The least recently used index is evicted."""


@dataclass(slots=True)
class IndexUsage:
    """The usage of one index.

    Attributes:
        last_ms: The time of the last plan that probed the index, in milliseconds since the epoch.
        plans: The number of plans that probed the index.
    """

    last_ms: int
    plans: int = 0
    files_in: int = 0
    """The total number of files for which plans probed the index."""
    files_removed: int = 0


class Usage:
    """The usage of all indexes in this process.

    An instance belongs to one event loop.
    """

    def __init__(self) -> None:
        self._usage_by_index: OrderedDict[tuple[str, str], IndexUsage] = OrderedDict()

    def note(self, uuid: str, definition_id: str, *, files_in: int, files_removed: int, now_ms: int) -> None:
        """Record that a plan probed the index for `files_in` files, and that it pruned `files_removed` of them.

        If there are more than `COUNTED_INDEXES_MAX` indexes, the usage of the least recently probed index is dropped.
        """
        key = (uuid, definition_id)
        index_usage = self._usage_by_index.get(key)
        if index_usage is None:
            index_usage = self._usage_by_index[key] = IndexUsage(now_ms)
            if len(self._usage_by_index) > COUNTED_INDEXES_MAX:
                self._usage_by_index.popitem(last=False)
        else:
            self._usage_by_index.move_to_end(key)
        index_usage.last_ms = now_ms
        index_usage.plans += 1
        index_usage.files_in += files_in
        index_usage.files_removed += files_removed

    def find_usage(self, uuid: str, definition_id: str) -> IndexUsage | None:
        """Return the usage of an index, or None if no plan has used it since the process started."""
        return self._usage_by_index.get((uuid, definition_id))
