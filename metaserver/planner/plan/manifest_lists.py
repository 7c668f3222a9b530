"""Reader of the manifests of snapshots, with a cache of manifest lists."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.manifests.manifest import DecodedList, ManifestFile
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.errors import NotFound
from seamark.metaserver.index.blocks.blocks import Blocks
from seamark.metaserver.planner.pruning.manifest_pruning import SUMMARY_BYTES, ManifestSummaries
from seamark.metaserver.planner.scan.request import BoundScan, list_appends

_TABLES_MAX = 1024
"""The maximum number of tables for which the location of the latest manifest list is kept."""


class SnapshotManifests:
    """The manifests of a snapshot, or of the appends of an incremental scan.

    `decoded` is the decoded manifest list. It is None if the manifests are from several lists.
    """

    __slots__ = ("_summaries", "all", "data", "decoded")

    def __init__(self, manifests: Sequence[ManifestFile], decoded_list: DecodedList | None = None) -> None:
        self.all = manifests
        self.data = tuple(manifest for manifest in manifests if manifest.content == 0)
        self.decoded = decoded_list
        self._summaries = ManifestSummaries(self.data)

    @property
    def deletes(self) -> list[ManifestFile]:
        return [manifest for manifest in self.all if manifest.content != 0]

    @property
    def size_bytes(self) -> int:
        """The memory of the manifests, including the summaries of all partition fields, which plans decode later."""
        fields = sum(len(manifest.partitions or ()) for manifest in self.data)
        return measure_object_bytes((self.decoded, self.all, self.data)) + SUMMARY_BYTES * fields

    async def select(self, bound_scan: BoundScan) -> list[int]:
        """Return the positions, in `data`, of the manifests that the filter needs."""

        def find() -> list[int]:
            return self._summaries.find_needed_manifests(
                bound_scan.partition_filters, bound_scan.metadata.partition_specs
            )

        return await asyncio.to_thread(find) if bound_scan.is_long else find()


class ManifestLists:
    """Reads and caches manifest lists.

    An instance belongs to one event loop. Concurrent requests for the same list share one read.
    """

    def __init__(self, blocks: Blocks, budget_bytes: int) -> None:
        """Create a reader with an empty cache for plans that need only some of a list's manifests."""
        self._blocks = blocks
        self._cache: MemoryCache[str, SnapshotManifests] = MemoryCache(budget_bytes, "manifest-lists")
        self._reads: SingleFlight[str, SnapshotManifests] = SingleFlight()
        self._latest_locations: OrderedDict[str, str] = OrderedDict()
        """The location of each table's latest manifest list, by the location of the table.

        The list of the next snapshot has most manifests of the latest list, and shares their memory. Shared memory is
        counted for each list, because any of them may be evicted first.
        """

    @property
    def used_bytes(self) -> int:
        return self._cache.used_bytes

    async def read_manifests(self, bound_scan: BoundScan) -> SnapshotManifests:
        """Return the manifests of the snapshot. For an incremental scan, return the data manifests of its appends."""
        if not bound_scan.options.is_incremental:
            if bound_scan.snapshot is None:
                return SnapshotManifests(())
            return await self._find(bound_scan.snapshot, bound_scan.metadata.location)
        snapshots = list_appends(bound_scan.metadata, bound_scan.options)
        ids = {snapshot.snapshot_id for snapshot in snapshots}
        manifests: dict[str, ManifestFile] = {}
        for snapshot in snapshots:
            for manifest in (await self._find(snapshot, bound_scan.metadata.location)).data:
                if manifest.added_snapshot_id in ids:
                    manifests[manifest.manifest_path] = manifest
        return SnapshotManifests(tuple(manifests.values()))

    async def _find(self, snapshot: Snapshot, table: str) -> SnapshotManifests:
        """Return the manifests of a snapshot, from the cache if possible.

        Version 1 metadata may name the manifests themselves instead of a manifest list.

        Args:
            snapshot: The snapshot.
            table: The location of the table.

        Raises:
            NotFound: The metadata name neither a manifest list nor manifests of the snapshot.
        """
        if snapshot.manifest_list is not None:
            location = snapshot.manifest_list
            manifests = self._cache.get(location)
            if manifests is None:
                manifests = await self._reads.run(location, lambda: self._read(location, table))
            return manifests
        if snapshot.manifests is None:
            raise NotFound(
                f"Snapshot {snapshot.snapshot_id} has neither manifest-list nor manifests; its metadata is invalid"
            )
        return SnapshotManifests([_describe_unlisted(path, snapshot.snapshot_id) for path in snapshot.manifests])

    async def _read(self, location: str, table: str) -> SnapshotManifests:
        """Read a manifest list, and cache it.

        Args:
            location: The location of the manifest list.
            table: The location of the table.
        """
        # The previous list has most of the manifests, and the new list shares their memory.
        latest = self._latest_locations.get(table)
        previous = None if latest is None else self._cache.get(latest)
        decoded_list = await self._blocks.read_manifest_list(location, None if previous is None else previous.decoded)
        manifests = SnapshotManifests(decoded_list.manifests, decoded_list)
        self._cache.put(location, manifests, manifests.size_bytes)
        self._latest_locations[table] = location
        self._latest_locations.move_to_end(table)
        if len(self._latest_locations) > _TABLES_MAX:
            self._latest_locations.popitem(last=False)
        return manifests


def list_locations(bound_scan: BoundScan) -> list[str]:
    """Return the locations of the manifest lists that `read_manifests` reads."""
    snapshots = [bound_scan.snapshot] if bound_scan.snapshot is not None else []
    if bound_scan.options.is_incremental:
        snapshots = [*list_appends(bound_scan.metadata, bound_scan.options)]
    return [snapshot.manifest_list for snapshot in snapshots if snapshot.manifest_list is not None]


def count_live_entries(manifest: ManifestFile) -> int:
    """Return the number of live entries according to the manifest list."""
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


def count_entries(manifest: ManifestFile) -> int:
    """Return the number of entries, including deleted entries, according to the manifest list."""
    return count_live_entries(manifest) + (manifest.deleted_files_count or 0)


def _describe_unlisted(path: str, snapshot_id: int) -> ManifestFile:
    """Describe a manifest for which version 1 metadata contain only the path.

    In version 1, all manifests list data files (content 0), and all sequence numbers are 0. The length and the
    partition spec are unknown and count as 0.
    """
    return ManifestFile(
        manifest_path=path,
        manifest_length=0,
        partition_spec_id=0,
        content=0,
        sequence_number=0,
        min_sequence_number=0,
        added_snapshot_id=snapshot_id,
        added_files_count=None,
        existing_files_count=None,
        deleted_files_count=None,
        added_rows_count=None,
        existing_rows_count=None,
        deleted_rows_count=None,
        partitions=None,
        key_metadata=None,
        first_row_id=None,
    )
