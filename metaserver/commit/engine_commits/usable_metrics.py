"""Corrects metrics in the new manifests of standard engines that other readers cannot use (`repaired_metrics.py`).

The server reads the manifests that the snapshot adds. Those with wrong metrics it writes again, and the manifest list,
before the commit: the files of the snapshot stay the same. As after a rebase, Iceberg Java then deletes the manifests
that it wrote and the snapshot does not list.

A partition value cannot be corrected: files of deletes are matched by it. So a commit is refused if it adds a data file
whose value of `truncate` on text or binary is longer than the width: each reader would leave out its rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from seamark.formats.iceberg.manifests.content_file import DeclaredTypes
from seamark.formats.iceberg.manifests.manifest import DecodedManifest, ManifestFile
from seamark.formats.iceberg.manifests.repaired_metrics import TypeOf, has_unusable_metrics, repaired_file
from seamark.formats.iceberg.manifests.writer import ADDED, DATA_MANIFEST
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.types.transforms import name_of, width_of
from seamark.formats.index.packing import MISSING
from seamark.formats.runtime.errors import BadRequest, Forbidden, SeamarkError
from seamark.metaserver.catalog.ownership.own_files import foreign
from seamark.metaserver.catalog.parts import CatalogContext
from seamark.metaserver.commit.engine_commits.attempt_manifests import AttemptManifests
from seamark.metaserver.commit.engine_commits.rebase import Rebased
from seamark.metaserver.commit.engine_commits.shared_puffins import as_written
from seamark.metaserver.commit.snapshots.manifest_merge import can_be_written
from seamark.metaserver.commit.snapshots.manifests import AT_ONCE, Manifests
from seamark.metaserver.commit.snapshots.snapshot_writer import HeldFiles, SnapshotWriter
from seamark.metaserver.runtime.gathering import gathered

_NO_NUMBER = -1
"""For what an entry inherits, to distinguish it from an explicit number."""
_MEMORY_BYTES = 256 << 20
"""Of the decoded manifests of one snapshot."""
_CHECKED_MAX, _CHECKED_BYTES_MAX = 256, 64 << 20
"""Manifests of one snapshot that are read to look for wrong metrics; those beyond stay as the engine wrote them."""
_IN_LOOP_BYTES = 64 << 10
"""Larger manifests are searched in a thread."""
_SHOWN = 100


class UsableMetrics:
    """For the commits of one server."""

    def __init__(self, parts: CatalogContext) -> None:
        self._parts = parts

    async def repair(
        self,
        manifests: AttemptManifests,
        uuid: str,
        folder: str,
        base: TableMetadata | None,
        metadata: TableMetadata,
        updates: Sequence[Mapping[str, Any]],
        rebased: Rebased | None,
    ) -> Rebased | None:
        """Replace the updates of a commit, and the files to write before it, where metrics need to be corrected.

        Args:
            manifests: What the attempt of the commit reads.
            uuid: The table's UUID.
            folder: The folder of new files.
            base: The table's metadata before the updates. None for a new table.
            metadata: The table's metadata after them.
            updates: The updates of the commit.
            rebased: What a rebase, or another earlier step, made of the commit.

        Returns:
            None if no update needs to change, or a file cannot be read.

        Raises:
            BadRequest: A data file has an impossible partition value.
        """
        replaced: list[dict[str, Any]] = []
        pending = dict(rebased.files if rebased else ())
        is_changed = False
        for update in updates:
            fields = update.get("snapshot")
            fresh = dict(update)
            if update.get("action") == "add-snapshot" and isinstance(fields, Mapping):
                snapshot = metadata.snapshot(int(fields.get("snapshot-id") or 0))
                if snapshot is not None and (base is None or base.snapshot(snapshot.snapshot_id) is None):
                    written = await self._rewritten(manifests, uuid, folder, metadata, snapshot)
                    if written:
                        pending.pop(snapshot.manifest_list or "", None)
                        pending |= written
                        fresh["snapshot"] = {**fields, "manifest-list": written[-1][0]}
                        is_changed = True
            replaced.append(fresh)
        return Rebased(replaced, list(pending.items())) if is_changed else None

    async def _rewritten(
        self, manifests: AttemptManifests, uuid: str, folder: str, metadata: TableMetadata, snapshot: Snapshot
    ) -> list[tuple[str, bytes]]:
        """Manifests and, last, the manifest list that names them. Empty if the snapshot can stay unchanged."""

        async def check_paths(paths: Iterable[str]) -> None:
            if await foreign(self._parts, uuid, paths):
                raise Forbidden("a file is in a location of another table")

        if snapshot.manifest_list is None:
            return []
        own = manifests.checked(check_paths, _MEMORY_BYTES).own
        try:
            return await self._repaired(own, folder, metadata, snapshot)
        except _ImpossibleValue as error:
            raise BadRequest(str(error)) from None
        except (SeamarkError, ValueError):
            # The commit is as valid as without this; an engine could not repair what the server cannot read.
            return []

    async def _repaired(
        self, own: Manifests, folder: str, metadata: TableMetadata, snapshot: Snapshot
    ) -> list[tuple[str, bytes]]:
        listed = await own.listed(snapshot)
        added = [one for one in listed if one.added_snapshot_id == snapshot.snapshot_id and one.key_metadata is None]
        type_of = DeclaredTypes(metadata)
        wrong: set[str] = set()

        async def check(manifest: ManifestFile) -> None:
            decoded = await own.decoded(manifest)
            work = partial(_needs_repair, decoded, manifest, metadata, type_of)
            if work() if len(decoded.heap) <= _IN_LOOP_BYTES else await asyncio.to_thread(work):
                wrong.add(manifest.manifest_path)

        await gathered([partial(check, manifest) for manifest in _within_limits(added)], AT_ONCE)
        if not wrong:
            return []
        held = HeldFiles()
        writer = SnapshotWriter(held, self._parts.clock, own, folder, snapshot.snapshot_id)
        replaced: list[ManifestFile] = []
        for manifest in listed:
            if manifest.manifest_path not in wrong:
                replaced.append(manifest)
                continue
            unnumbered = structs.replace(manifest, sequence_number=_NO_NUMBER)
            entries = [*await own.entries(unnumbered, metadata), *await own.removals(unnumbered, metadata)]
            entries = [as_written(structs.replace(entry, file=repaired_file(entry.file, type_of))) for entry in entries]
            stored = await writer.manifest(entries, metadata, manifest.partition_spec_id, manifest.content)
            described = stored.described(snapshot.snapshot_id, manifest.sequence_number)
            replaced.append(structs.replace(described, first_row_id=manifest.first_row_id))
        await writer.manifest_list(tuple(replaced), metadata, snapshot.parent_snapshot_id, snapshot.sequence_number)
        return held.files


def _within_limits(manifests: Iterable[ManifestFile]) -> list[ManifestFile]:
    """The first manifests, as many as a commit waits for."""
    found, size_bytes = list[ManifestFile](), 0
    for manifest in manifests:
        size_bytes += manifest.manifest_length
        if size_bytes > _CHECKED_BYTES_MAX or len(found) == _CHECKED_MAX:
            break
        found.append(manifest)
    return found


class _ImpossibleValue(Exception):
    """A partition value that no transform has."""


def _needs_repair(decoded: DecodedManifest, manifest: ManifestFile, metadata: TableMetadata, type_of: TypeOf) -> bool:
    """Whether the manifest has wrong metrics, and can be written again without a change of row ids."""
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
    """_ImpossibleValue if the text or binary value of an added file is longer than `truncate` leaves it."""
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
                shown = value.decode(errors="replace")[:_SHOWN]
                raise _ImpossibleValue(
                    f"A data file of the commit has the partition value {shown!r} of {transform}, which has {size} "
                    "characters or bytes; readers would not find its rows. DuckDB 1.5.5 writes such values of text "
                    "with characters that are combined of several: write these rows with `seamark sql` or another "
                    "engine"
                )
