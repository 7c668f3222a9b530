"""Reads the manifests and manifest lists of the table and of the new snapshots for an engine's commit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from typing import NamedTuple

from seamark.formats.runtime.errors import Forbidden, ObjectMissing
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.ownership.own_files import find_foreign_paths
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.objects.port import ObjectStore

_MEMORY_DIVISOR = 4
"""The divisor of `commit_memory_bytes` for the published manifests, and for the manifests of each commit."""


class ManifestReaders(NamedTuple):
    """Two readers of manifests for one table.

    Attributes:
        published: Reads the manifests of the snapshots that the table already has.
        own: Reads the manifests of the snapshots that the engine adds.
    """

    published: Manifests
    own: Manifests


class FilesReadOnce:
    """Reads each file from the storage only once, if the files fit into memory. An instance belongs to one commit.

    A file that is missing at its first read is missing for the whole commit.
    """

    def __init__(self, objects: ObjectStore, limit_bytes: int) -> None:
        self._objects = objects
        self._remaining_bytes = limit_bytes
        self._files: dict[str, bytes] = {}
        self._missing: set[str] = set()

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        """Return the content of the file. A file that was read before is returned from memory, without a check of
        `limit_bytes`.

        Raises:
            ObjectMissing: The file does not exist.
            SeamarkError: See `ObjectStore.read`.
        """
        if location in self._missing:
            raise ObjectMissing(f"There is no file at {location!r}")
        data = self._files.get(location)
        if data is None:
            try:
                data = await self._objects.read(location, limit_bytes=limit_bytes)
            except ObjectMissing:
                self._missing.add(location)
                raise
            if len(data) <= self._remaining_bytes:
                self._remaining_bytes -= len(data)
                self._files[location] = data
        return data


class CommitManifests:
    """The manifests that the attempts of one commit have read.

    The manifests of the engine are cached only for this commit, because after a refusal, the engine may write different
    manifests to the same locations.
    """

    def __init__(self, context: CatalogContext, published_manifests: Manifests) -> None:
        self._context = context
        self._published = published_manifests
        self._allowed_folders: dict[str, set[str]] = {}

    @cached_property
    def files(self) -> FilesReadOnce:
        return FilesReadOnce(self._context.objects, self._context.settings.commit_memory_bytes // _MEMORY_DIVISOR)

    @cached_property
    def _own(self) -> Manifests:
        return Manifests.from_settings(self.files, self._context.settings, _MEMORY_DIVISOR)

    @property
    def unchecked(self) -> ManifestReaders:
        """The readers without checks of locations. The caller checks whether the table may refer to the files."""
        return ManifestReaders(self._published, self._own)

    def with_checks(self, uuid: str, limit_bytes: int) -> ManifestReaders:
        """Return readers that check the location of each file and limit their memory.

        A reader raises Forbidden for a file in the location of a table other than `uuid`. The readers look up each
        folder in the database once.

        Args:
            uuid: The UUID of the table.
            limit_bytes: The maximum memory of the decoded manifests of each reader.
        """
        check = partial(self._check_paths, uuid)
        return ManifestReaders(
            self._published.with_checks(check, limit_bytes), self._own.with_checks(check, limit_bytes)
        )

    async def _check_paths(self, uuid: str, paths: Iterable[str]) -> None:
        allowed_folders = self._allowed_folders.setdefault(uuid, set())
        path_by_folder = {path.rpartition("/")[0]: path for path in paths}
        unchecked_paths = {folder: path for folder, path in path_by_folder.items() if folder not in allowed_folders}
        if not unchecked_paths:
            return
        if await find_foreign_paths(self._context, uuid, unchecked_paths.values()):
            raise Forbidden("A manifest or manifest list is in the location of another table")
        allowed_folders.update(unchecked_paths)


def open_published_manifests(context: CatalogContext) -> Manifests:
    """Create the reader of published manifests, which all commits of engines share."""
    return Manifests.from_settings(context.objects, context.settings, _MEMORY_DIVISOR)
