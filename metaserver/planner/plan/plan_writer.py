"""A plan as a table: metadata with one snapshot, whose manifest list names the files that the plan keeps.

Plan tables are for engines that plan only from manifests. Everything else that a reader uses stays the same: the
snapshot keeps its id, sequence number and statistics. The manifest list contains the unchanged delete manifests, and
the data manifests of which the plan keeps all live files. The kept files of the other manifests become EXISTING entries
of new manifests, one for each partition spec. These entries contain the values that the files inherit: snapshot,
sequence numbers, first row id (Iceberg spec, "Sequence Number Inheritance", "First Row ID Inheritance").

Manifests with metrics that some readers cannot use are also written again, with corrected metrics. Some readers leave
out files by rules that differ from Iceberg's (`reader_quirks.py`). For these readers, the plan hides values that would
mislead them: partition fields, and bounds of columns that may have NaN.
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

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.expressions.expression import Op, collect_predicates
from seamark.formats.iceberg.manifests.content_file import DeclaredTypes
from seamark.formats.iceberg.manifests.manifest import DecodedManifest, ManifestFile, decode_manifest
from seamark.formats.iceberg.manifests.repaired_metrics import repair_file
from seamark.formats.iceberg.manifests.rows import select_rows
from seamark.formats.iceberg.manifests.writer import (
    DATA_MANIFEST,
    EXISTING,
    ManifestEntry,
    read_live_entries,
    write_manifest,
    write_manifest_list,
)
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.snapshot import MAIN, Snapshot, SnapshotRef
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.index.packing import MISSING, Longs
from seamark.formats.runtime.errors import Corrupt, ObjectMissing
from seamark.metaserver.catalog.documents import choose_file_suffix
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.plan.reader_quirks import drop_nan_bounds, hide_partition_fields, may_have_nan
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

GC_ENABLED = "gc.enabled"
TESTS_NAN = "seamark.plan-tests-nan"
"""The property that marks a plan table whose filter tests for NaN.

A client that prunes the files of such a plan table again may leave out files with NaN.
"""
_MANIFESTS_IN_FLIGHT_MAX = 16
"""The maximum number of manifests that are read and decoded concurrently for one plan table."""
_IN_LOOP_ENTRIES_MAX = 50
"""The maximum number of entries of manifests or manifest lists that are written in the event loop."""


class ManifestPart(NamedTuple):
    """A data manifest, and the files of it that a plan keeps."""

    manifest: ManifestFile
    """The manifest, with the partition spec id from the manifest file itself."""
    rows: Longs
    """The kept live entries of the manifest, ascending."""


class KeptManifests(NamedTuple):
    """The manifests of a snapshot from which a plan keeps files.

    Attributes:
        whole: The manifests that are used unchanged, because the plan keeps all files that they list as present.
        parts: The manifests whose kept files are written to new manifests.
        deletes: The delete manifests.
    """

    whole: tuple[ManifestFile, ...]
    parts: tuple[ManifestPart, ...]
    deletes: tuple[ManifestFile, ...]
    hides_misleading_values: bool = False
    """Whether to hide partition fields, and bounds of columns that may have NaN. Some readers, such as DuckDB, prune
    by them with rules that differ from Iceberg's (`reader_quirks.py`)."""
    tests_nan: bool = False
    """Whether the filter of the plan tests for NaN."""

    @property
    def entries(self) -> int:
        """The number of entries to write to new manifests."""
        return sum(len(part.rows) for part in self.parts)


class PlanFiles(NamedTuple):
    """The encoded files of a plan table: a table whose only snapshot has the files that a plan keeps.

    Attributes:
        files: The location and the content of each file. The last file is the metadata file.
        metadata: The decoded content of the metadata file.
    """

    files: tuple[tuple[str, bytes], ...]
    metadata: TableMetadata


def find_kept_manifests(scan: ScanPlan, format_version: int, *, hides_misleading_values: bool = False) -> KeptManifests:
    """Return the entries of each manifest of the scan's snapshot that the plan keeps.

    A manifest is used unchanged only if the plan keeps all of its files, and no value in it must be changed.

    Args:
        scan: The plan.
        format_version: The format version of the new manifest list.
        hides_misleading_values: Whether the plan is for a reader that prunes files by other rules than Iceberg's, such
            as DuckDB. A manifest with a column that may have NaN is then not used unchanged, because such a reader
            would leave out files by the bounds of this column.
    """
    view = scan.view
    numbers, local = view.split_entry_ids(scan.entry_ids)
    whole_manifests, parts = [], []
    edges = np.flatnonzero(np.diff(numbers)) + 1
    for rows, number in zip(np.split(local, edges), numbers[np.append(0, edges)] if len(numbers) else (), strict=False):
        block = view.blocks[number]
        manifest = msgspec.structs.replace(view.manifests[number], partition_spec_id=block.spec_id)
        has_usable_metrics = not block.has_unusable_bounds and not (hides_misleading_values and may_have_nan(block))
        if has_usable_metrics and len(rows) == block.rows and _has_required_fields(manifest, format_version):
            whole_manifests.append(manifest)
        else:
            parts.append(ManifestPart(manifest, rows))
    tests_nan = any(predicate.op is Op.IS_NAN for predicate in collect_predicates(scan.bound))
    return KeptManifests(
        tuple(whole_manifests), tuple(parts), view.delete_manifests, hides_misleading_values, tests_nan
    )


def _has_required_fields(manifest: ManifestFile, format_version: int) -> bool:
    """Return whether an entry of the manifest list has all fields that a new list requires.

    An entry may lack some of these fields, because the list may have an older format version.
    """
    values: tuple[int | None, ...] = (manifest.added_snapshot_id, manifest.manifest_length or None)
    if format_version > 1:
        values += manifest.added_files_count, manifest.existing_files_count, manifest.deleted_files_count
        values += manifest.added_rows_count, manifest.existing_rows_count, manifest.deleted_rows_count
    return None not in values


class PlanWriter:
    """Writes plan tables.

    An instance belongs to one event loop. It caches decoded manifests within `budget_bytes`, because clients often
    look up single rows of the same table many times. `limit_bytes` is the maximum size of one manifest.
    """

    def __init__(self, objects: ObjectStore, *, budget_bytes: int, limit_bytes: int) -> None:
        self._objects = objects
        self._limit_bytes = limit_bytes
        self._decoded_manifests: MemoryCache[str, DecodedManifest] = MemoryCache(budget_bytes, "plan-tables")
        self._reads: SingleFlight[str, DecodedManifest] = SingleFlight()

    async def encode(
        self, manifests: KeptManifests, metadata: TableMetadata, snapshot: Snapshot, location: str, plan_id: str
    ) -> PlanFiles:
        """Read the manifests from which a plan keeps files, and encode the files of the plan table.

        A plan table is a table whose only snapshot has the files that the plan keeps. The caller stores its files.

        Args:
            manifests: The manifests from which the plan keeps files.
            metadata: The metadata of the planned table.
            snapshot: The planned snapshot.
            location: The location of the plan table. The paths of its files begin with `{location}-{plan_id}`.
            plan_id: The id of the plan.

        Raises:
            Corrupt: A manifest cannot be read; the message names it.
        """
        entries: list[ManifestEntry] = []
        # The work is done in batches, because all decoded manifests of a large table do not fit into memory.
        for start in range(0, len(manifests.parts), _MANIFESTS_IN_FLIGHT_MAX):
            parts = manifests.parts[start : start + _MANIFESTS_IN_FLIGHT_MAX]
            decoded_manifests = await asyncio.gather(*(self._get_manifest(part.manifest) for part in parts))
            for manifest, part in zip(decoded_manifests, parts, strict=True):
                read_entries = partial(
                    _read_entries, manifest, part, metadata, drops_nan_bounds=manifests.hides_misleading_values
                )
                entries += (
                    read_entries() if len(part.rows) <= _IN_LOOP_ENTRIES_MAX else await asyncio.to_thread(read_entries)
                )
        work = partial(encode_plan_files, manifests, entries, metadata, snapshot, location, plan_id)
        is_small = len(entries) + len(manifests.whole) + len(manifests.deletes) <= _IN_LOOP_ENTRIES_MAX
        return work() if is_small else await asyncio.to_thread(work)

    async def _get_manifest(self, manifest: ManifestFile) -> DecodedManifest:
        """Return a decoded manifest. Recent manifests are cached."""
        path = manifest.manifest_path
        decoded_manifest = self._decoded_manifests.get(path)
        if decoded_manifest is None:
            decoded_manifest = await self._reads.run(path, lambda: self._read(manifest))
            self._decoded_manifests.put(path, decoded_manifest, measure_object_bytes(decoded_manifest))
        return decoded_manifest

    async def _read(self, manifest: ManifestFile) -> DecodedManifest:
        """Read and decode a manifest.

        Raises:
            Corrupt: The manifest is missing or truncated.
        """
        path = manifest.manifest_path
        try:
            data = await self._objects.read(path, limit_bytes=self._limit_bytes)
        except ObjectMissing:
            raise Corrupt.missing("manifest", path) from None
        if len(data) < manifest.manifest_length:
            # Avro does not detect a truncated file that ends between two of its blocks.
            raise Corrupt(f"Manifest {path} has {len(data)} bytes; the manifest list states {manifest.manifest_length}")
        return await asyncio.to_thread(decode_manifest, data, path)


def _read_entries(
    manifest: DecodedManifest, part: ManifestPart, metadata: TableMetadata, *, drops_nan_bounds: bool
) -> list[ManifestEntry]:
    """Return the entries that the plan keeps, with inherited fields, and without metrics that readers cannot use.

    First row ids are assigned before entries are left out, because each id depends on all earlier entries.

    Args:
        manifest: The decoded manifest, with all entries.
        part: The manifest's entry in the manifest list, and the numbers of the kept entries.
        metadata: The metadata of the table.
        drops_nan_bounds: Whether to remove the bounds of columns that may have NaN. Bounds ignore NaN, so a reader
            that orders NaN above all numbers would leave out files with NaN.
    """
    first = part.manifest.first_row_id
    if first is not None:
        stored_ids, counts = manifest.longs["first_row_id"], manifest.longs["record_count"]
        assigned_counts = np.where(stored_ids == MISSING, counts, 0)
        row_ids = np.where(stored_ids == MISSING, first + np.cumsum(assigned_counts) - assigned_counts, stored_ids)
        manifest = replace(manifest, longs={**manifest.longs, "first_row_id": row_ids})
    find_type = DeclaredTypes(metadata)
    entries = []
    for entry in read_live_entries(select_rows(manifest, part.rows), part.manifest, metadata):
        file = repair_file(entry.file, find_type)
        file = drop_nan_bounds(file, find_type) if drops_nan_bounds else file
        entries.append(entry if file is entry.file else msgspec.structs.replace(entry, file=file))
    return entries


def encode_plan_files(
    manifests: KeptManifests,
    entries: list[ManifestEntry],
    metadata: TableMetadata,
    snapshot: Snapshot,
    location: str,
    plan_id: str,
) -> PlanFiles:
    """Encode the files of a plan table. The function reads and writes no files.

    Args:
        manifests: The manifests from which the plan keeps files, and what the plan table hides from its reader.
        entries: The kept entries of the manifests that are not used unchanged, with inherited fields. They are written
            to new manifests.
        metadata: The metadata of the planned table.
        snapshot: The planned snapshot.
        location: The location of the plan table.
        plan_id: The id of the plan. The paths of the files begin with `{location}-{plan_id}`.
    """
    version = metadata.format_version
    if version >= ROW_LINEAGE_MIN_FORMAT_VERSION and snapshot.first_row_id is None:
        version -= 1  # The snapshot is older than the table's upgrade to version 3, so its files have no row ids.
    files = list(_write_new_manifests(entries, msgspec.structs.replace(metadata, format_version=version), snapshot))
    paths = [f"{location}-{plan_id}-m{number}.avro" for number in range(len(files))]
    listed_manifests = [
        *manifests.whole,
        *(
            msgspec.structs.replace(manifest, manifest_path=path)
            for (manifest, _), path in zip(files, paths, strict=True)
        ),
        *manifests.deletes,
    ]
    plan_metadata = make_plan_metadata(metadata, snapshot, location)
    if manifests.tests_nan:  # The property warns clients that would prune files with NaN.
        properties = {**plan_metadata.properties, TESTS_NAN: "true"}
        plan_metadata = msgspec.structs.replace(plan_metadata, properties=properties)
    if manifests.hides_misleading_values:
        listed_manifests = [msgspec.structs.replace(manifest, partitions=None) for manifest in listed_manifests]
        plan_metadata = hide_partition_fields(plan_metadata)
    manifest_list = write_manifest_list(
        listed_manifests,
        format_version=version,
        snapshot_id=snapshot.snapshot_id,
        parent_snapshot_id=snapshot.parent_snapshot_id,
        sequence_number=snapshot.sequence_number,
    )
    list_location = f"{location}-{plan_id}-snap.avro"
    plan_snapshot = msgspec.structs.replace(snapshot, manifest_list=list_location, manifests=None)
    plan_metadata = msgspec.structs.replace(plan_metadata, snapshots=(plan_snapshot,))
    document = encode_table(plan_metadata)
    return PlanFiles(
        (
            *((path, data) for path, (_, data) in zip(paths, files, strict=True)),
            (list_location, manifest_list),
            (f"{location}-{plan_id}{choose_file_suffix(document)}", document),
        ),
        plan_metadata,
    )


def _write_new_manifests(
    entries: list[ManifestEntry], metadata: TableMetadata, snapshot: Snapshot
) -> Iterator[tuple[ManifestFile, bytes]]:
    """Yield a manifest for each partition spec, with its content. The caller sets the path of the manifest.

    All entries get the status EXISTING, because the plan adds no files to the table.
    """
    by_spec: defaultdict[int, list[ManifestEntry]] = defaultdict(list)
    for entry in entries:
        by_spec[entry.file.spec_id].append(msgspec.structs.replace(entry, status=EXISTING))
    for spec_id, spec_entries in sorted(by_spec.items()):
        written_manifest = write_manifest(spec_entries, metadata=metadata, spec_id=spec_id, content=DATA_MANIFEST)
        manifest_file = written_manifest.to_manifest_file(
            "", snapshot_id=snapshot.snapshot_id, sequence_number=snapshot.sequence_number
        )
        # Each entry has its own first row id, but version 3 also requires the field of the manifest.
        ids = [entry.file.first_row_id for entry in spec_entries if entry.file.first_row_id is not None]
        yield msgspec.structs.replace(manifest_file, first_row_id=min(ids, default=None)), written_manifest.data


def make_plan_metadata(metadata: TableMetadata, snapshot: Snapshot, location: str) -> TableMetadata:
    """Return the table's metadata with this snapshot as the only and current snapshot.

    The location in the metadata is an empty folder, and `gc.enabled` is false. Otherwise, an engine that removes
    orphan files would remove the files that the plan leaves out.
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
