"""Leaves removals out of the snapshots of standard engines that would make a clean-up delete live deletion vectors.

A Puffin file holds several deletion vectors. Engines mark the entry of each vector that they remove or replace as
DELETED, and when that snapshot expires, Iceberg's incremental clean-up deletes the file of each such entry, whether or
not other vectors of the file are live (apache/iceberg#17456). As for this server's own changes (`manifest_filter.py`),
only the removal of the last vector of a file is marked. The server writes the manifests with other marks again, and the
manifest list, before the commit: the live files of the snapshot stay the same. Iceberg Java then deletes the manifests
that it wrote and the snapshot does not list, as after a rebase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs

from seamark.metaserver.catalog.ownership.own_files import foreign
from seamark.metaserver.catalog.parts import CatalogContext
from seamark.metaserver.commit.changes.change import APPEND
from seamark.metaserver.commit.snapshots.manifest_filter import key_of, puffins_in_use
from seamark.metaserver.commit.snapshots.manifest_merge import can_be_written
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.commit.stock.rebase import Rebased
from seamark.metaserver.errors import Forbidden, SeamarkError
from seamark.metaserver.iceberg.manifests.content_file import DATA
from seamark.metaserver.iceberg.manifests.manifest import ManifestFile, decode_manifest_list
from seamark.metaserver.iceberg.manifests.writer import (
    ADDED,
    DELETE_MANIFEST,
    ManifestEntry,
    write_manifest,
    write_manifest_list,
)
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.snapshot import Snapshot

_VECTORS_SINCE = 3
"""Format version."""
_NO_NUMBER = -1
"""For what an entry inherits, to distinguish it from an explicit number."""
_SHARE = 4
_MEMORY_BYTES = 256 << 20
"""Of the decoded manifests of one snapshot."""


class SharedPuffins:
    """For the commits of one server."""

    def __init__(self, parts: CatalogContext) -> None:
        self._parts = parts
        self._manifests = Manifests.of(parts.objects, parts.settings, _SHARE)

    async def keep(
        self,
        uuid: str,
        folder: str,
        base: TableMetadata,
        metadata: TableMetadata,
        updates: Sequence[Mapping[str, Any]],
        files: Sequence[tuple[str, bytes]],
    ) -> Rebased | None:
        """Replaces the updates of a commit, which lead from `base` to `metadata`, and the `files` to write before it;
        new files are for `folder`. None if no update needs to change, or a file cannot be read."""
        if metadata.format_version < _VECTORS_SINCE:
            return None
        kept: list[dict[str, Any]] = []
        pending = dict(files)
        is_changed = False
        for update in updates:
            fields = update.get("snapshot")
            fresh = dict(update)
            if update.get("action") == "add-snapshot" and isinstance(fields, Mapping):
                snapshot = metadata.snapshot(int(fields.get("snapshot-id") or 0))
                if snapshot is not None and base.snapshot(snapshot.snapshot_id) is None:
                    written = await self._rewritten(uuid, folder, metadata, snapshot, pending)
                    if written:
                        pending.pop(snapshot.manifest_list or "", None)
                        pending |= written
                        fresh["snapshot"] = {**fields, "manifest-list": written[-1][0]}
                        is_changed = True
            kept.append(fresh)
        return Rebased(kept, list(pending.items())) if is_changed else None

    async def _rewritten(
        self, uuid: str, folder: str, metadata: TableMetadata, snapshot: Snapshot, pending: Mapping[str, bytes]
    ) -> list[tuple[str, bytes]]:
        """Manifests and, last, the manifest list that names them. Empty if the snapshot can stay unchanged. `pending`:
        files that are not written yet, such as the manifest list of a rebased snapshot."""

        async def check_paths(paths: Iterable[str]) -> None:
            if await foreign(self._parts, uuid, paths):
                raise Forbidden("a file is in a location of another table")

        if snapshot.manifest_list is None or snapshot.summary_map().get("operation") == APPEND:
            return []
        manifests = self._manifests.checked(check_paths, _MEMORY_BYTES)
        try:
            if (data := pending.get(snapshot.manifest_list)) is None:
                listed = await manifests.listed(snapshot)
            else:
                listed = decode_manifest_list(data, snapshot.manifest_list)
                await check_paths(manifest.manifest_path for manifest in listed)
            return await self._without_marks(manifests, folder, metadata, snapshot, listed)
        except SeamarkError:
            # The commit is as valid as without this; an engine could not repair what the server cannot read.
            return []

    async def _without_marks(
        self,
        manifests: Manifests,
        folder: str,
        metadata: TableMetadata,
        snapshot: Snapshot,
        listed: Sequence[ManifestFile],
    ) -> list[tuple[str, bytes]]:
        removals: dict[str, list[ManifestEntry]] = {}
        for manifest in listed:
            if (
                manifest.content != DATA
                and manifest.added_snapshot_id == snapshot.snapshot_id
                and manifest.deleted_files_count != 0
                and manifest.key_metadata is None
                and can_be_written(metadata, manifest.partition_spec_id)
            ):
                removals[manifest.manifest_path] = await manifests.removals(manifest, metadata)
        removed = {
            key_of(entry.file)
            for entries in removals.values()
            for entry in entries
            if entry.file.is_deletion_vector and entry.snapshot_id == snapshot.snapshot_id
        }
        in_use = await puffins_in_use(manifests, listed, removed, metadata, {})
        files: list[tuple[str, bytes]] = []
        replaced: list[ManifestFile] = []
        for manifest in listed:
            marks = removals.get(manifest.manifest_path, [])
            others = [entry for entry in marks if entry.file.file_path not in in_use]
            if len(others) == len(marks):
                replaced.append(manifest)
                continue
            unnumbered = structs.replace(manifest, sequence_number=_NO_NUMBER)
            entries = [_as_written(entry) for entry in await manifests.entries(unnumbered, metadata)]
            entries += others
            if not entries:
                continue
            place = f"{folder}/{self._parts.clock.uuid4()}-m{len(files)}.avro"
            written = await asyncio.to_thread(
                write_manifest, entries, metadata=metadata, spec_id=manifest.partition_spec_id, content=DELETE_MANIFEST
            )
            files.append((place, written.data))
            replaced.append(
                written.described(place, snapshot_id=snapshot.snapshot_id, sequence_number=manifest.sequence_number)
            )
        if len(replaced) == len(listed) and not files:
            return []
        place = f"{folder}/snap-{snapshot.snapshot_id}-{snapshot.sequence_number}-{self._parts.clock.uuid4()}.avro"
        data = write_manifest_list(
            replaced,
            format_version=metadata.format_version,
            snapshot_id=snapshot.snapshot_id,
            parent_snapshot_id=snapshot.parent_snapshot_id,
            sequence_number=snapshot.sequence_number,
        )
        return [*files, (place, data)]


def _as_written(entry: ManifestEntry) -> ManifestEntry:
    """Added files inherit the sequence numbers that the engine did not write. Those that it wrote stay: they are of
    delete files that were rewritten, and that must not apply to later rows."""
    if entry.status != ADDED:
        return entry
    numbers = (entry.sequence_number, entry.file_sequence_number)
    of_data, of_file = (None if number == _NO_NUMBER else number for number in numbers)
    return structs.replace(entry, sequence_number=of_data, file_sequence_number=of_file)
