"""A plan as a table of its own: metadata with one snapshot, whose manifest list names the files that the plan kept.

For engines that plan from manifests alone. The rules: nothing that a reader goes by changes. The snapshot keeps its id,
sequence number and statistics, delete manifests are listed as they are, and so are data manifests that keep all of
their live files. Of the others, what is left becomes EXISTING entries of new manifests, one for each partition spec,
that say outright what the files had inherited: snapshot, sequence numbers, first row id (Iceberg spec, "Sequence Number
Inheritance", "First Row ID Inheritance").
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from cache.memory import MemoryCache
from cache.single_flight import SingleFlight
from metaserver.errors import Corrupt, ObjectMissing
from metaserver.iceberg.manifests.manifest import DecodedManifest, ManifestFile, decode_manifest
from metaserver.iceberg.manifests.rows import rows_of, size_of
from metaserver.iceberg.manifests.writer import (
    DATA_MANIFEST,
    EXISTING,
    ManifestEntry,
    entries_of,
    write_manifest,
    write_manifest_list,
)
from metaserver.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from metaserver.iceberg.metadata.snapshot import MAIN, Snapshot, SnapshotRef
from metaserver.iceberg.metadata.table_json import encode_table
from metaserver.index.blocks.packing import MISSING, Longs
from metaserver.objects.port import ObjectStore
from metaserver.planner.scan.scan import Scan

GC_ENABLED = "gc.enabled"
_AT_ONCE = 16
"""Manifests read and decoded at once for one plan."""
_IN_THREAD_ENTRIES = 50
"""More, of manifests or of manifest lists, are taken and written beside the event loop."""


class ManifestPart(NamedTuple):
    """A data manifest of which a plan keeps some files."""

    manifest: ManifestFile
    """With the partition spec that the manifest itself says."""
    rows: Longs
    """Of its live entries, those that are kept, ascending."""


class KeptManifests(NamedTuple):
    """What a plan keeps of a snapshot's manifests."""

    whole: tuple[ManifestFile, ...]
    parts: tuple[ManifestPart, ...]
    deletes: tuple[ManifestFile, ...]

    @property
    def entries(self) -> int:
        """That have to be written anew."""
        return sum(len(part.rows) for part in self.parts)


class PlanFiles(NamedTuple):
    """Files to be stored, the metadata file last, and what it says."""

    files: tuple[tuple[str, bytes], ...]
    metadata: TableMetadata


def kept_of(scan: Scan, format_version: int) -> KeptManifests:
    """What is left of each manifest of the scan's snapshot."""
    view = scan.view
    numbers, local = view.split(scan.rows)
    whole, parts = [], []
    edges = np.flatnonzero(np.diff(numbers)) + 1
    for rows, number in zip(np.split(local, edges), numbers[np.append(0, edges)] if len(numbers) else (), strict=False):
        block = view.blocks[number]
        manifest = msgspec.structs.replace(view.manifests[number], partition_spec_id=block.spec_id)
        if len(rows) == block.rows and _can_be_listed(manifest, format_version):
            whole.append(manifest)
        else:
            parts.append(ManifestPart(manifest, rows))
    return KeptManifests(tuple(whole), tuple(parts), view.delete_manifests)


def _can_be_listed(manifest: ManifestFile, format_version: int) -> bool:
    """Whether its manifest list, which may be of an older version, says all that a new one has to."""
    said: tuple[int | None, ...] = (manifest.added_snapshot_id, manifest.manifest_length or None)
    if format_version > 1:
        said += manifest.added_files_count, manifest.existing_files_count, manifest.deleted_files_count
        said += manifest.added_rows_count, manifest.existing_rows_count, manifest.deleted_rows_count
    return None not in said


class PlanWriter:
    """Belongs to one event loop. Remembers what it decoded, within `budget_bytes`: whoever looks up one row of a table
    will look up others. `limit_bytes`: of one manifest."""

    def __init__(self, objects: ObjectStore, *, budget_bytes: int, limit_bytes: int) -> None:
        self._objects = objects
        self._limit_bytes = limit_bytes
        self._decoded: MemoryCache[str, DecodedManifest] = MemoryCache(budget_bytes)
        self._reading: SingleFlight[str, DecodedManifest] = SingleFlight()

    async def write(
        self, kept: KeptManifests, metadata: TableMetadata, snapshot: Snapshot, location: str, plan_id: str
    ) -> PlanFiles:
        """The plan table's files, none of them stored yet, at `{location}-{plan_id}…`. Corrupt naming a manifest."""
        entries: list[ManifestEntry] = []
        # Some at a time: of a large table all of them, decoded, are more than the memory there is.
        for at in range(0, len(kept.parts), _AT_ONCE):
            parts = kept.parts[at : at + _AT_ONCE]
            decoded = await asyncio.gather(*(self._manifest(part.manifest) for part in parts))
            for one, part in zip(decoded, parts, strict=True):
                small = len(part.rows) <= _IN_THREAD_ENTRIES
                entries += (
                    _taken(one, part, metadata) if small else await asyncio.to_thread(_taken, one, part, metadata)
                )
        work = partial(plan_files, kept, entries, metadata, snapshot, location, plan_id)
        small = len(entries) + len(kept.whole) + len(kept.deletes) <= _IN_THREAD_ENTRIES
        return work() if small else await asyncio.to_thread(work)

    async def _manifest(self, manifest: ManifestFile) -> DecodedManifest:
        path = manifest.manifest_path
        found = self._decoded.get(path)
        if found is None:
            found = await self._reading.run(path, lambda: self._read(manifest))
            self._decoded.put(path, found, size_of(found))
        return found

    async def _read(self, manifest: ManifestFile) -> DecodedManifest:
        path = manifest.manifest_path
        try:
            data = await self._objects.read(path, limit_bytes=self._limit_bytes)
        except ObjectMissing:
            raise Corrupt(f"The manifest {path} is gone from storage") from None
        if len(data) < manifest.manifest_length:
            # Avro cannot tell: cut off between two of its blocks, it reads as a whole file.
            raise Corrupt(f"Manifest {path} has {len(data)} bytes; its list says {manifest.manifest_length}")
        return await asyncio.to_thread(decode_manifest, data, path)


def _taken(decoded: DecodedManifest, part: ManifestPart, metadata: TableMetadata) -> list[ManifestEntry]:
    """The entries that are kept, with all that they inherit."""
    first = part.manifest.first_row_id
    if first is not None:
        own, counts = decoded.longs["first_row_id"], decoded.longs["record_count"]
        taken = np.where(own == MISSING, counts, 0)
        given = np.where(own == MISSING, first + np.cumsum(taken) - taken, own)
        decoded = replace(decoded, longs={**decoded.longs, "first_row_id": given})
    return entries_of(rows_of(decoded, part.rows), part.manifest, metadata)


def plan_files(
    kept: KeptManifests,
    entries: list[ManifestEntry],
    metadata: TableMetadata,
    snapshot: Snapshot,
    location: str,
    plan_id: str,
) -> PlanFiles:
    """`entries` are those of `kept.parts`, with all that they inherit. Pure."""
    version = metadata.format_version
    if version >= ROW_LINEAGE_MIN_FORMAT_VERSION and snapshot.first_row_id is None:
        version -= 1  # of before the table was upgraded: its files have no row ids, and none are to be made up
    files = list(_new_manifests(entries, msgspec.structs.replace(metadata, format_version=version), snapshot))
    paths = [f"{location}-{plan_id}-m{number}.avro" for number in range(len(files))]
    listed = [
        *kept.whole,
        *(
            msgspec.structs.replace(manifest, manifest_path=path)
            for (manifest, _), path in zip(files, paths, strict=True)
        ),
        *kept.deletes,
    ]
    manifest_list = write_manifest_list(
        listed,
        format_version=version,
        snapshot_id=snapshot.snapshot_id,
        parent_snapshot_id=snapshot.parent_snapshot_id,
        sequence_number=snapshot.sequence_number,
    )
    at = f"{location}-{plan_id}-snap.avro"
    planned = plan_metadata(metadata, msgspec.structs.replace(snapshot, manifest_list=at, manifests=None), location)
    return PlanFiles(
        (
            *((path, data) for path, (_, data) in zip(paths, files, strict=True)),
            (at, manifest_list),
            (f"{location}-{plan_id}.metadata.json", encode_table(planned)),
        ),
        planned,
    )


def _new_manifests(
    entries: list[ManifestEntry], metadata: TableMetadata, snapshot: Snapshot
) -> Iterator[tuple[ManifestFile, bytes]]:
    """One for each partition spec, without its path."""
    by_spec: defaultdict[int, list[ManifestEntry]] = defaultdict(list)
    for entry in entries:
        by_spec[entry.file.spec_id].append(msgspec.structs.replace(entry, status=EXISTING))
    for spec_id, mine in sorted(by_spec.items()):
        made = write_manifest(mine, metadata=metadata, spec_id=spec_id, content=DATA_MANIFEST)
        described = made.described("", snapshot_id=snapshot.snapshot_id, sequence_number=snapshot.sequence_number)
        # Every entry says its own; version 3 wants one of the manifest all the same.
        ids = [entry.file.first_row_id for entry in mine if entry.file.first_row_id is not None]
        yield msgspec.structs.replace(described, first_row_id=min(ids, default=None)), made.data


def plan_metadata(metadata: TableMetadata, snapshot: Snapshot, location: str) -> TableMetadata:
    """The table's metadata with this snapshot alone, current.

    Its location is a folder where nothing lies, and its files are nobody's to delete: an engine that is told to remove
    what the table does not name would otherwise remove the files that the plan left out.
    """
    snapshot_id = snapshot.snapshot_id
    return msgspec.structs.replace(
        metadata,
        location=location,
        properties={**metadata.properties, GC_ENABLED: "false"},
        current_snapshot_id=snapshot_id,
        snapshots=(snapshot,),
        refs={MAIN: SnapshotRef(snapshot_id, "branch")},
        snapshot_log=(),
        metadata_log=(),
        statistics=tuple(file for file in metadata.statistics if file.snapshot_id == snapshot_id),
        partition_statistics=tuple(file for file in metadata.partition_statistics if file.snapshot_id == snapshot_id),
    )
