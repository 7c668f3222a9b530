"""Writes the manifests and manifest lists of one commit, and records the written files, so that they can be deleted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from seamark.formats.iceberg.manifests.content_file import ContentFile
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import (
    ADDED,
    DATA_MANIFEST,
    DELETE_MANIFEST,
    ManifestEntry,
    WrittenManifest,
    write_manifest,
    write_manifest_list,
)
from seamark.formats.iceberg.metadata import properties as props
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import get_metadata_folder
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.ownership.claims import check_claimed_location
from seamark.metaserver.commit.change_requests.change import Change
from seamark.metaserver.commit.snapshots.manifests import (
    MANIFESTS_CONCURRENT_MAX,
    Manifests,
    PathHashes,
    hash_file_paths,
    run_by_count,
)
from seamark.metaserver.runtime.gathering import gather

TARGET_SIZE = "commit.manifest.target-size-bytes"
TARGET_BYTES_DEFAULT = 8 << 20
_DEFERRED_BYTES_MAX = 4 << 20
"""The maximum total size of a snapshot's files that are written while the caller continues. It limits the memory.

The caller waits for the writes of further files.
"""
_SAMPLE_ENTRIES = 250
"""The number of entries that are encoded first, to estimate the number of entries that fit into a manifest."""
ENTRIES_MAX = 50_000
"""The maximum number of entries of a manifest, even if the entries are small."""
_IN_LOOP_ENTRIES_MAX = 50
"""The maximum number of entries of a manifest that is encoded in the event loop. A thread encodes larger manifests."""


class StoredManifest(NamedTuple):
    """A manifest that was written to `path`, and that no manifest list refers to yet.

    `describe` returns its entry for the manifest list of a snapshot.
    """

    path: str
    manifest: WrittenManifest

    def describe(self, snapshot_id: int, sequence_number: int) -> ManifestFile:
        return self.manifest.to_manifest_file(self.path, snapshot_id=snapshot_id, sequence_number=sequence_number)


class FileCreator(Protocol):
    """The part of `ObjectStore` that writes files."""

    async def create(self, location: str, data: bytes) -> None: ...


class HeldFiles:
    """Keeps files in memory, in the order of their creation, until the commit that refers to them writes them."""

    def __init__(self) -> None:
        self.files: list[tuple[str, bytes]] = []

    async def create(self, location: str, data: bytes) -> None:
        self.files.append((location, data))


class SnapshotWriter:
    """Writes the manifests of one snapshot.

    Attributes:
        written: The locations of all written files, including files that the snapshot does not use.
        is_deferred: Whether small files are written while the caller continues. The files of a commit are then written
            concurrently. Nothing may refer to them before `settle`.
    """

    def __init__(
        self,
        objects: FileCreator,
        clock: Clock,
        manifests: Manifests,
        folder: str,
        snapshot_id: int,
        *,
        is_deferred: bool = False,
    ) -> None:
        self._is_deferred = is_deferred
        self._writes: list[asyncio.Task[None]] = []
        self._waiting_bytes = 0
        self._objects = objects
        self._clock = clock
        self._manifests = manifests
        self._folder = folder
        self._number = 0
        self.snapshot_id = snapshot_id
        self.commit_id = str(clock.uuid4())
        self.written: list[str] = []

    async def write_manifest(
        self, entries: Sequence[ManifestEntry], metadata: TableMetadata, spec_id: int, content: int
    ) -> StoredManifest:
        """Write the entries to a manifest, and keep it in the caches.

        Args:
            entries: The entries.
            metadata: The table's metadata.
            spec_id: The id of their partition spec.
            content: 0 for data files, or 1 for delete files.
        """

        def encode() -> tuple[WrittenManifest, PathHashes]:
            written_manifest = write_manifest(entries, metadata=metadata, spec_id=spec_id, content=content)
            return written_manifest, hash_file_paths([entry.file for entry in entries if entry.is_live])

        is_small = len(entries) <= _IN_LOOP_ENTRIES_MAX
        written_manifest, path_hashes = encode() if is_small else await asyncio.to_thread(encode)
        self._number += 1
        path = f"{self._folder}/{self.commit_id}-m{self._number}.avro"
        await self._create(path, written_manifest.data, content=written_manifest.data)
        self._manifests.remember(path, written_manifest.data, path_hashes)
        return StoredManifest(path, written_manifest)

    async def write_manifests(
        self, entries: Sequence[ManifestEntry], metadata: TableMetadata, spec_id: int, content: int
    ) -> list[StoredManifest]:
        """Write the entries to manifests of approximately the target size of the table.

        The size of an entry is estimated from a sample. At most `_SAMPLE_ENTRIES` entries become one manifest without
        an estimate.
        """
        if len(entries) <= _SAMPLE_ENTRIES:
            return [await self.write_manifest(entries, metadata, spec_id, content)] if entries else []
        sample = entries[:_SAMPLE_ENTRIES]
        encode_sample = partial(write_manifest, sample, metadata=metadata, spec_id=spec_id, content=content)
        sample_bytes = len((await asyncio.to_thread(encode_sample)).data)
        fitting_entries = get_target_bytes(metadata) * _SAMPLE_ENTRIES // sample_bytes
        entries_max = min(max(_SAMPLE_ENTRIES, fitting_entries), ENTRIES_MAX)
        # Divide the entries equally, so that the last manifest is not small.
        manifest_count = math.ceil(len(entries) / entries_max)
        chunk_size = math.ceil(len(entries) / manifest_count)
        chunks = [entries[start : start + chunk_size] for start in range(0, len(entries), chunk_size)]
        return await gather(
            [partial(self.write_manifest, chunk, metadata, spec_id, content) for chunk in chunks],
            MANIFESTS_CONCURRENT_MAX,
        )

    async def write_manifest_list(
        self,
        manifests: tuple[ManifestFile, ...],
        metadata: TableMetadata,
        parent_id: int | None,
        sequence: int,
        *,
        of_snapshot_id: int | None = None,
    ) -> str:
        """Write the manifest list, and return its location.

        Args:
            manifests: The manifests to list.
            metadata: The table's metadata.
            parent_id: The id of the parent snapshot, or None.
            sequence: The sequence number of the snapshot.
            of_snapshot_id: The earlier snapshot to which the list belongs, or None for the new snapshot.
        """
        self._number += 1
        snapshot_id = self.snapshot_id if of_snapshot_id is None else of_snapshot_id
        location = f"{self._folder}/snap-{snapshot_id}-{self._number}-{self.commit_id}.avro"
        data = write_manifest_list(
            manifests,
            format_version=metadata.format_version,
            snapshot_id=snapshot_id,
            parent_snapshot_id=parent_id,
            sequence_number=sequence,
        )
        await self._create(location, data, manifests)
        self._manifests.remember_list(location, manifests)
        return location

    async def settle(self) -> None:
        """Wait for all writes. If a write failed, raise its error."""
        writes, self._writes = self._writes, []
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _create(self, location: str, data: bytes, content: bytes | tuple[ManifestFile, ...]) -> None:
        """Write a file. If writes are deferred, start the write in a task, unless too many bytes already wait.

        Args:
            location: The location of the file.
            data: The bytes of the file.
            content: What readers of this process get until the write has ended: the bytes of a manifest, or the decoded
                entries of a manifest list.
        """
        # Record the file before the write, because a write with an unknown outcome may have created it.
        self.written.append(location)
        if not self._is_deferred or self._waiting_bytes + len(data) > _DEFERRED_BYTES_MAX:
            await self._objects.create(location, data)
            return
        # Until `settle` has waited for the task, readers of this process use the held content.
        self._waiting_bytes += len(data)
        self._manifests.hold(location, content)
        write = asyncio.create_task(self._write(location, data))
        # Retrieve the exception, because the request may be cancelled before `settle`, and asyncio warns about
        # exceptions that are never retrieved.
        write.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._writes.append(write)

    async def _write(self, location: str, data: bytes) -> None:
        try:
            await self._objects.create(location, data)
        finally:
            self._waiting_bytes -= len(data)
            self._manifests.release(location)


async def open_writer(
    context: CatalogContext, manifests: Manifests, uuid: str, metadata: TableMetadata, *, is_deferred: bool = False
) -> SnapshotWriter:
    """Return a writer for a new snapshot of the table with this UUID.

    Args:
        is_deferred: See `SnapshotWriter`.

    Raises:
        BadRequest: The table's metadata folder is outside the warehouse.
        Forbidden: The table's metadata folder belongs to another table.
    """
    folder = get_metadata_folder(metadata.location, metadata.properties)
    context.warehouse.check(folder, "The folder of the table's metadata")
    # Check the location before the first write, because a writer may have overwritten the metadata file.
    await check_claimed_location(context, uuid, folder)
    # A snapshot id is a positive 64-bit integer, so clear the sign bit, and replace 0 by 1.
    snapshot_id = int.from_bytes(context.clock.draw_bytes(8), "big") >> 1 or 1
    return SnapshotWriter(context.objects, context.clock, manifests, folder, snapshot_id, is_deferred=is_deferred)


def get_target_bytes(metadata: TableMetadata) -> int:
    return max(1, props.parse_int(metadata.properties, TARGET_SIZE, TARGET_BYTES_DEFAULT))


async def write_added(writer: SnapshotWriter, change: Change, metadata: TableMetadata) -> tuple[StoredManifest, ...]:
    """Write the manifests of the added files. Each partition spec and content type gets its own manifests."""
    stored_manifests: list[StoredManifest] = []
    for content, files in ((DATA_MANIFEST, change.data), (DELETE_MANIFEST, change.deletes)):
        groups = await run_by_count(len(files), partial(_group_by_spec, files, writer.snapshot_id))
        for spec_id, entries in groups.items():
            stored_manifests += await writer.write_manifests(entries, metadata, spec_id, content)
    return tuple(stored_manifests)


def _group_by_spec(files: Sequence[ContentFile], snapshot_id: int) -> dict[int, list[ManifestEntry]]:
    groups: dict[int, list[ManifestEntry]] = {}
    for file in files:
        groups.setdefault(file.spec_id, []).append(ManifestEntry(ADDED, snapshot_id, None, None, file))
    return groups
