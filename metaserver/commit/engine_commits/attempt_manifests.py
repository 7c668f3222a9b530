"""The manifests and manifest lists that an attempt of a commit reads: those of the table, and those of the client."""

from __future__ import annotations

from typing import NamedTuple

from seamark.metaserver.catalog.parts import CatalogContext
from seamark.metaserver.commit.snapshots.manifests import CheckPaths, Manifests

_SHARE = 4
"""Part of `commit_memory_bytes` for each of the two."""


class AttemptManifests(NamedTuple):
    """`published`: of snapshots that the table has, cached for all commits. `own`: of the snapshot that the client
    wants to add, cached for the attempt only: after a refusal it may write others to the same location."""

    published: Manifests
    own: Manifests

    def checked(self, check_paths: CheckPaths, limit_bytes: int) -> AttemptManifests:
        """As `Manifests.checked`; the limit is that of each of the two."""
        return AttemptManifests(
            self.published.checked(check_paths, limit_bytes), self.own.checked(check_paths, limit_bytes)
        )


class CommitManifests:
    """For the commits of one server."""

    def __init__(self, parts: CatalogContext) -> None:
        self._parts = parts
        self._published = self._new()

    def attempt(self) -> AttemptManifests:
        return AttemptManifests(self._published, self._new())

    def _new(self) -> Manifests:
        return Manifests.of(self._parts.objects, self._parts.settings, _SHARE)
