"""Files that go: found in the parent's manifests, which are written anew without them.

Only manifests that list one of them are read whole and rewritten: what stays as EXISTING, what goes as DELETED by this
snapshot, as Java writes it. A manifest that lists nothing live any more leaves the list with the next commit. The
deletion vector of a data file that goes, goes with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from metaserver.commits.change import Remove
from metaserver.commits.collision import Collision
from metaserver.commits.manifests import Manifests
from metaserver.commits.writing import StoredManifest, Writer
from metaserver.iceberg.manifests.content_file import DATA, POSITION_DELETES, ContentFile
from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.manifests.writer import DELETED, EXISTING, ManifestEntry
from metaserver.iceberg.metadata.metadata import TableMetadata


class RewrittenManifests(NamedTuple):
    manifests: tuple[ManifestFile, ...]
    """What is left of the parent's, in their order."""
    files: tuple[ContentFile, ...]


def key_of(file: ContentFile) -> Remove:
    """How the file is named where it is to go."""
    return Remove(file.file_path, file.content_offset if file.is_deletion_vector else None)


def live(manifests: Sequence[ManifestFile]) -> tuple[ManifestFile, ...]:
    """Without those that list nothing live, where that is known."""
    return tuple(
        manifest for manifest in manifests if manifest.added_files_count != 0 or manifest.existing_files_count != 0
    )


class FilesToRemove(NamedTuple):
    """Live files that are to go, and the manifests that list them, each with all of its live entries."""

    gone: frozenset[Remove]
    holding: tuple[tuple[ManifestFile, Sequence[ManifestEntry]], ...]

    @property
    def files(self) -> list[ContentFile]:
        return [entry.file for _, entries in self.holding for entry in entries if key_of(entry.file) in self.gone]


async def find(
    manifests: Manifests, listed: Sequence[ManifestFile], wanted: Collection[Remove], metadata: TableMetadata
) -> FilesToRemove:
    """The files, and with data files the deletes that are of them alone. Collision where one is not live."""
    if not wanted:
        return FilesToRemove(frozenset(), ())
    holding: dict[str, tuple[ManifestFile, Sequence[ManifestEntry]]] = {}
    gone = set(wanted)
    missing, data = set(wanted), set()
    for manifest in await manifests.holding(live(listed), {one.file_path for one in wanted}):
        entries = await manifests.entries(manifest, metadata)
        mine = {key_of(entry.file): entry.file for entry in entries if key_of(entry.file) in gone}
        if mine:
            holding[manifest.manifest_path] = manifest, entries
            missing -= mine.keys()
            data |= {file.file_path for file in mine.values() if file.content == DATA}
    if missing:
        raise Collision(
            "file-gone",
            f"{min(map(str, missing))[:1000]} is to be removed, but is not live any more; begin again from what stands "
            "now (a deletion vector is named by its content-offset, too)",
        )
    for manifest, entries in await referring(manifests, listed, data, metadata):
        attached = {key_of(entry.file) for entry in entries if _is_of(entry.file, data)}
        if attached:
            holding.setdefault(manifest.manifest_path, (manifest, entries))
            gone |= attached
    return FilesToRemove(frozenset(gone), tuple(holding.values()))


async def referring(
    manifests: Manifests, listed: Sequence[ManifestFile], paths: Iterable[str], metadata: TableMetadata
) -> list[tuple[ManifestFile, list[ManifestEntry]]]:
    """Delete manifests that may hold a delete file of one of these data files alone, with their live entries."""
    deletes = [one for one in live(listed) if one.content != DATA]
    found = await manifests.holding(deletes, paths, referenced=True)
    return [(one, await manifests.entries(one, metadata)) for one in found]


def _is_of(file: ContentFile, paths: Collection[str]) -> bool:
    return file.content == POSITION_DELETES and file.referenced_data_file in paths


class _Rewritten(NamedTuple):
    gone: frozenset[Remove]
    written: StoredManifest
    files: tuple[ContentFile, ...]


class Removing:
    """Of one commit: a manifest that an attempt has rewritten serves the next, where the same files go of it."""

    def __init__(self, writer: Writer, manifests: Manifests) -> None:
        self._writer = writer
        self._manifests = manifests
        self._made: dict[tuple[object, ...], _Rewritten] = {}

    async def remove(
        self,
        parents: Sequence[ManifestFile],
        found: FilesToRemove,
        metadata: TableMetadata,
        sequence_number: int,
    ) -> RewrittenManifests:
        """The parent's manifests without the files that were found in them."""
        replaced: dict[str, ManifestFile] = {}
        files: list[ContentFile] = []
        for manifest, entries in found.holding:
            made = await self._rewritten(manifest, entries, found.gone, metadata)
            replaced[manifest.manifest_path] = made.written.described(self._writer.snapshot_id, sequence_number)
            files += made.files
        fresh = list(replaced.values())
        kept = [one for one in live(parents) if one.manifest_path not in replaced]
        return RewrittenManifests((*fresh, *kept), tuple(files))

    async def _rewritten(
        self,
        manifest: ManifestFile,
        entries: Sequence[ManifestEntry],
        gone: frozenset[Remove],
        metadata: TableMetadata,
    ) -> _Rewritten:
        mine = frozenset(named for entry in entries if (named := key_of(entry.file)) in gone)
        # What files inherit goes into the new manifest.
        key = (manifest.manifest_path, manifest.sequence_number, manifest.first_row_id)
        made = self._made.get(key)
        if made is None or made.gone != mine:
            written = [self._carried(entry, key_of(entry.file) in mine) for entry in entries]
            content = 0 if entries[0].file.content == DATA else 1
            stored = await self._writer.manifest(written, metadata, manifest.partition_spec_id, content)
            files = tuple(entry.file for entry in entries if key_of(entry.file) in mine)
            made = self._made[key] = _Rewritten(mine, stored, files)
        return made

    def _carried(self, entry: ManifestEntry, goes: bool) -> ManifestEntry:
        return ManifestEntry(
            DELETED if goes else EXISTING,
            self._writer.snapshot_id if goes else entry.snapshot_id,
            entry.sequence_number,
            entry.file_sequence_number,
            entry.file,
        )
