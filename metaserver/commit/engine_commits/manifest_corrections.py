"""Corrects the new manifests of engines where they would harm readers or make a clean-up delete live files.

The server reads the manifests that a snapshot adds. It writes those that need a correction again, and the manifest
list, before the commit; the live files of the snapshot stay the same. As after a rebase, Iceberg Java then deletes the
manifests that it wrote and the snapshot does not list. There are two corrections:

- *Shared Puffin files.* A Puffin file holds several deletion vectors. Engines mark the entry of each vector that they
  remove or replace as DELETED. When that snapshot expires, Iceberg's incremental clean-up deletes the file of each such
  entry, whether or not other vectors of the file are live (apache/iceberg#17456). As in the server's own changes
  (`manifest_filter.py`), only the removal of the last vector of a file stays marked.
- *Metrics.* Other readers cannot use some metrics that engines write, such as bounds that are cut within a character
  (`repaired_metrics.py`).

A partition value cannot be corrected, because files of deletes are matched by it. So a commit is refused if it adds a
data file whose value of `truncate` on text or binary is longer than the width: each reader would leave out its rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np
from msgspec import structs

from seamark.formats.iceberg.manifests.content_file import DATA, DeclaredTypes
from seamark.formats.iceberg.manifests.manifest import DecodedManifest, ManifestFile
from seamark.formats.iceberg.manifests.repaired_metrics import TypeOf, has_unusable_metrics, repair_file
from seamark.formats.iceberg.manifests.writer import ADDED, DATA_MANIFEST, DELETE_MANIFEST, ManifestEntry
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.metadata.updates import AddSnapshot, Update
from seamark.formats.iceberg.types.transforms import name_of, width_of
from seamark.formats.index.packing import MISSING
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, SeamarkError
from seamark.metaserver.commit.change_requests.change_body import APPEND
from seamark.metaserver.commit.engine_commits.commit_manifests import CommitManifests, ManifestReaders
from seamark.metaserver.commit.engine_commits.rebase import RevisedUpdates
from seamark.metaserver.commit.snapshots.manifest_filter import key_of, puffins_in_use
from seamark.metaserver.commit.snapshots.manifest_merge import can_be_written
from seamark.metaserver.commit.snapshots.manifests import MANIFESTS_CONCURRENT_MAX, Manifests
from seamark.metaserver.commit.snapshots.snapshot_writer import HeldFiles, SnapshotWriter
from seamark.metaserver.runtime.gathering import gather

_VECTORS_MIN_FORMAT_VERSION = 3
_UNASSIGNED = -1
"""The sequence number of an entry that inherits its number, to distinguish it from an explicit number."""
_MEMORY_BYTES = 256 << 20
"""The largest memory of the decoded manifests of one snapshot."""
_CHECKED_MANIFESTS_MAX, _CHECKED_BYTES_MAX = 256, 64 << 20
"""Manifests of one snapshot that are searched for wrong metrics; further manifests stay as the engine wrote them."""
_IN_LOOP_BYTES = 64 << 10
"""Larger manifests are searched in a thread."""
_SHOWN_CHARACTERS_MAX = 100

Files = list[tuple[str, bytes]]
"""Files to write, by location: manifests and, last, the manifest list that names them."""


class ManifestCorrections:
    """Corrects the manifests of commits.

    One for each server.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def preload(self, manifests: CommitManifests, uuid: str, updates: Iterable[Update]) -> None:
        """Read the new manifests before the table's lock is taken, so that other commits do not wait for the
        storage.

        A file that cannot be read is left to `correct`.
        """
        own = manifests.with_checks(uuid, _MEMORY_BYTES).own
        for update in updates:
            if isinstance(update, AddSnapshot) and update.snapshot.manifest_list is not None:
                with contextlib.suppress(SeamarkError, ValueError):
                    listed = await own.read_list_at(update.snapshot.manifest_list)
                    added = _select_new(listed, update.snapshot.snapshot_id)
                    await gather([partial(own.data, manifest) for manifest in added], MANIFESTS_CONCURRENT_MAX)

    async def correct(
        self,
        manifests: CommitManifests,
        uuid: str,
        folder: str,
        base: TableMetadata | None,
        metadata: TableMetadata,
        updates: Sequence[Update],
        rebased: RevisedUpdates | None,
    ) -> RevisedUpdates | None:
        """Return updates with corrected snapshots, and the files to write before the commit.

        Args:
            manifests: What the commit has read.
            uuid: The table's UUID.
            folder: The folder of new files.
            base: The table's metadata before the updates. None for a new table.
            metadata: The table's metadata after them.
            updates: The updates of the commit, after a rebase.
            rebased: The result of a rebase, if there was one.

        Returns:
            None if no update needs to change, or a file cannot be read.

        Raises:
            BadRequest: A data file has an impossible partition value.
        """
        revised: list[Update] = []
        files = dict(rebased.files if rebased else ())
        listed = rebased.listed if rebased else None
        is_changed = False
        for update in updates:
            revised.append(update)
            snapshot = metadata.snapshot(update.snapshot.snapshot_id) if isinstance(update, AddSnapshot) else None
            if snapshot is None or (base is not None and base.snapshot(snapshot.snapshot_id) is not None):
                continue
            assert isinstance(update, AddSnapshot)
            correction = _Correction(self._clock, manifests.with_checks(uuid, _MEMORY_BYTES), folder, metadata)
            if base is not None:
                parent = base.snapshot(snapshot.parent_snapshot_id or 0)
                written = await correction.keep_shared_puffins(snapshot, parent, listed)
                snapshot = _replace_list(snapshot, files, written)
            snapshot = _replace_list(snapshot, files, await correction.correct_metrics(snapshot))
            if snapshot.manifest_list != update.snapshot.manifest_list:
                is_changed = True
                corrected = structs.replace(update.snapshot, manifest_list=snapshot.manifest_list)
                revised[-1] = AddSnapshot(corrected)
        return RevisedUpdates(tuple(revised), tuple(files.items())) if is_changed else None


class _Correction:
    """Corrects the snapshots that a commit adds to one table."""

    def __init__(self, clock: Clock, manifests: ManifestReaders, folder: str, metadata: TableMetadata) -> None:
        self._clock = clock
        self._published = manifests.published
        self._own = manifests.own
        self._folder = folder
        self._metadata = metadata

    async def keep_shared_puffins(
        self, snapshot: Snapshot, parent: Snapshot | None, listed: Sequence[ManifestFile] | None
    ) -> Files:
        """Leave out removals of deletion vectors whose Puffin file has other live vectors.

        Args:
            snapshot: The new snapshot.
            parent: Its parent. None if the table does not have it.
            listed: The manifests of the snapshot, if its manifest list is not written yet.

        Returns:
            The files to write. Empty if the snapshot can stay unchanged, or cannot be read: an engine could not
            correct what the server cannot read.
        """
        if self._metadata.format_version < _VECTORS_MIN_FORMAT_VERSION or snapshot.manifest_list is None:
            return []
        if snapshot.summary_map().get("operation") == APPEND:
            return []
        try:
            listed = await self._own.read_list(snapshot) if listed is None else listed
            removals = await self._read_removals(snapshot, listed)
            removed = {
                key_of(entry.file)
                for entries in removals.values()
                for entry in entries
                if entry.file.is_deletion_vector and entry.snapshot_id == snapshot.snapshot_id
            }
            if not removed:
                return []
            published = {manifest.manifest_path for manifest in await self._published.read_list(parent)}
            old = [manifest for manifest in listed if manifest.manifest_path in published]
            new = [manifest for manifest in listed if manifest.manifest_path not in published]
            in_use = await puffins_in_use(self._published, old, removed, self._metadata, {})
            in_use |= await puffins_in_use(self._own, new, removed, self._metadata, {})
            return await self._write_without_marks(snapshot, listed, removals, in_use)
        except SeamarkError:
            return []

    async def _read_removals(
        self, snapshot: Snapshot, listed: Iterable[ManifestFile]
    ) -> dict[str, list[ManifestEntry]]:
        """Return the removals in the new delete manifests, by the manifest's path."""
        removals: dict[str, list[ManifestEntry]] = {}
        for manifest in listed:
            if (
                manifest.content != DATA
                and manifest.added_snapshot_id == snapshot.snapshot_id
                and manifest.deleted_files_count != 0
                and manifest.key_metadata is None
                and can_be_written(self._metadata, manifest.partition_spec_id)
            ):
                removals[manifest.manifest_path] = await self._own.removals(manifest, self._metadata)
        return removals

    async def _write_without_marks(
        self,
        snapshot: Snapshot,
        listed: Sequence[ManifestFile],
        removals: dict[str, list[ManifestEntry]],
        in_use: Collection[str],
    ) -> Files:
        """Write the manifests without the removals of files in use, and the manifest list."""
        files, writer = self._open_writer(snapshot)
        manifests: list[ManifestFile] = []
        for manifest in listed:
            marks = removals.get(manifest.manifest_path, [])
            remaining = [entry for entry in marks if entry.file.file_path not in in_use]
            if len(remaining) == len(marks):
                manifests.append(manifest)
                continue
            unnumbered = structs.replace(manifest, sequence_number=_UNASSIGNED)
            entries = [_inherit_numbers(entry) for entry in await self._own.entries(unnumbered, self._metadata)]
            entries += remaining
            if not entries:
                continue
            stored = await writer.manifest(entries, self._metadata, manifest.partition_spec_id, DELETE_MANIFEST)
            manifests.append(stored.describe(snapshot.snapshot_id, manifest.sequence_number))
        if len(manifests) == len(listed) and not files.files:
            return []
        await self._write_list(writer, snapshot, manifests)
        return files.files

    async def correct_metrics(self, snapshot: Snapshot) -> Files:
        """Correct metrics that readers cannot use.

        Returns:
            The files to write. Empty if the snapshot can stay unchanged, or cannot be read.

        Raises:
            BadRequest: A data file has an impossible partition value.
        """
        if snapshot.manifest_list is None:
            return []
        try:
            listed = await self._own.read_list(snapshot)
            type_of = DeclaredTypes(self._metadata)
            wrong = await self._find_wrong_metrics(_select_new(listed, snapshot.snapshot_id), type_of)
            return await self._write_corrected(snapshot, listed, wrong, type_of) if wrong else []
        except _ImpossibleValue as error:
            raise BadRequest(str(error)) from None
        except (SeamarkError, ValueError):
            # The commit is as valid as without this; an engine could not repair what the server cannot read.
            return []

    async def _find_wrong_metrics(self, added: Iterable[ManifestFile], type_of: TypeOf) -> set[str]:
        """Return the paths of the manifests that need a correction."""
        wrong: set[str] = set()

        async def check(manifest: ManifestFile) -> None:
            decoded = await self._own.decode(manifest)
            search = partial(_needs_correction, decoded, manifest, self._metadata, type_of)
            if search() if len(decoded.heap) <= _IN_LOOP_BYTES else await asyncio.to_thread(search):
                wrong.add(manifest.manifest_path)

        await gather([partial(check, manifest) for manifest in added], MANIFESTS_CONCURRENT_MAX)
        return wrong

    async def _write_corrected(
        self, snapshot: Snapshot, listed: Sequence[ManifestFile], wrong: set[str], type_of: TypeOf
    ) -> Files:
        files, writer = self._open_writer(snapshot)
        manifests: list[ManifestFile] = []
        for manifest in listed:
            if manifest.manifest_path not in wrong:
                manifests.append(manifest)
                continue
            entries = await self._read_all_entries(self._own, manifest)
            entries = [
                _inherit_numbers(structs.replace(entry, file=repair_file(entry.file, type_of))) for entry in entries
            ]
            stored = await writer.manifest(entries, self._metadata, manifest.partition_spec_id, manifest.content)
            described = stored.describe(snapshot.snapshot_id, manifest.sequence_number)
            manifests.append(structs.replace(described, first_row_id=manifest.first_row_id))
        await self._write_list(writer, snapshot, manifests)
        return files.files

    async def _read_all_entries(self, source: Manifests, manifest: ManifestFile) -> list[ManifestEntry]:
        """Return the live entries and the removals, with the numbers that they have themselves."""
        unnumbered = structs.replace(manifest, sequence_number=_UNASSIGNED)
        live = await source.entries(unnumbered, self._metadata)
        return [*live, *await source.removals(unnumbered, self._metadata)]

    def _open_writer(self, snapshot: Snapshot) -> tuple[HeldFiles, SnapshotWriter]:
        files = HeldFiles()
        return files, SnapshotWriter(files, self._clock, self._own, self._folder, snapshot.snapshot_id)

    async def _write_list(self, writer: SnapshotWriter, snapshot: Snapshot, manifests: list[ManifestFile]) -> None:
        parent_id, sequence_number = snapshot.parent_snapshot_id, snapshot.sequence_number
        await writer.manifest_list(tuple(manifests), self._metadata, parent_id, sequence_number)


def _replace_list(snapshot: Snapshot, files: dict[str, bytes], written: Files) -> Snapshot:
    """Return the snapshot with the written manifest list, and add what was written to the files of the commit."""
    if not written:
        return snapshot
    files.pop(snapshot.manifest_list or "", None)
    files.update(written)
    return structs.replace(snapshot, manifest_list=written[-1][0])


def _select_new(listed: Iterable[ManifestFile], snapshot_id: int) -> list[ManifestFile]:
    """Return the first manifests that the snapshot adds, as many as a commit waits for."""
    selected, size_bytes = list[ManifestFile](), 0
    for manifest in listed:
        if manifest.added_snapshot_id != snapshot_id or manifest.key_metadata is not None:
            continue
        size_bytes += manifest.manifest_length
        if size_bytes > _CHECKED_BYTES_MAX or len(selected) == _CHECKED_MANIFESTS_MAX:
            break
        selected.append(manifest)
    return selected


class _ImpossibleValue(Exception):
    """A partition value that no transform has."""


def _needs_correction(
    decoded: DecodedManifest, manifest: ManifestFile, metadata: TableMetadata, type_of: TypeOf
) -> bool:
    """Return whether a manifest has wrong metrics, and can be written again without a change of row ids.

    Raises:
        _ImpossibleValue: An added file has an impossible partition value.
    """
    if manifest.content == DATA_MANIFEST:
        _check_truncated(decoded, metadata)
    if not has_unusable_metrics(decoded, type_of) or not can_be_written(metadata, manifest.partition_spec_id):
        return False
    if metadata.format_version < ROW_LINEAGE_MIN_FORMAT_VERSION or manifest.content != DATA_MANIFEST:
        return True
    added = decoded.longs["status"] == ADDED
    # An added file inherits its row ids, and an existing file has them; otherwise ids would move between files.
    return bool(((decoded.longs["first_row_id"] == MISSING) == added).all())


def _check_truncated(decoded: DecodedManifest, metadata: TableMetadata) -> None:
    """Check that the text and binary values of added files are as short as `truncate` leaves them.

    Raises:
        _ImpossibleValue: A value is longer.
    """
    spec = metadata.spec(int(decoded.metadata.get("partition-spec-id") or 0))
    transforms = {} if spec is None else {field.field_id: field.transform for field in spec.fields}
    added = decoded.longs["status"] == ADDED
    for values in decoded.partition:
        transform = transforms.get(values.field_id, "")
        if values.spans is None or values.logical == "decimal" or name_of(transform) != "truncate":
            continue
        width, starts, lengths = width_of(transform), values.spans.starts, values.spans.lengths
        for row in np.flatnonzero(added & (lengths > width)).tolist():
            value = decoded.heap[starts[row] : starts[row] + lengths[row]].tobytes()
            size = len(value.decode(errors="replace")) if values.type == "string" else len(value)
            if size > width:
                shown = value.decode(errors="replace")[:_SHOWN_CHARACTERS_MAX]
                raise _ImpossibleValue(
                    f"A data file of the commit has the partition value {shown!r} of {transform}, which has {size} "
                    "characters or bytes; readers would not find its rows. DuckDB 1.5.5 writes such values of text "
                    "with characters that are combined of several: write these rows with `seamark sql` or another "
                    "engine"
                )


def _inherit_numbers(entry: ManifestEntry) -> ManifestEntry:
    """Let an added file inherit the sequence numbers that the engine did not write.

    The numbers that it wrote stay: they belong to delete files that were rewritten, and that must not apply to later
    rows.
    """
    if entry.status != ADDED:
        return entry
    numbers = (entry.sequence_number, entry.file_sequence_number)
    of_data, of_file = (None if number == _UNASSIGNED else number for number in numbers)
    return structs.replace(entry, sequence_number=of_data, file_sequence_number=of_file)
