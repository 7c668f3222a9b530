"""Checks that a table may name the files that one of its changes reads.

Writers can overwrite manifest lists and manifests after their commit, so each path is checked before the server reads
the file: the outcome of a change would reveal what another table's file contains.
"""

from __future__ import annotations

from collections.abc import Iterable

from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.planner.plan.planner import Planner


class LocationChecks:
    """Checks the folders of one table, each once. Belongs to one attempt of a change."""

    def __init__(self, planner: Planner, metadata: TableMetadata, uuid: str) -> None:
        self._planner = planner
        self._metadata = metadata
        self._uuid = uuid
        self._accepted: set[str] = set()

    async def __call__(self, paths: Iterable[str]) -> None:
        """Forbidden if one of the paths is in a location that another table claims."""
        fresh = {folder: path for path in paths if (folder := path.rpartition("/")[0]) not in self._accepted}
        if fresh:
            await self._planner.check_paths(self._metadata, self._uuid, list(fresh.values()))
            self._accepted |= fresh.keys()
