"""Removes files from a snapshot: finds them in the parent's manifests, and rewrites these manifests without them.

Only manifests that list a removed file are decoded and rewritten. As in Java's `ManifestFilterManager`, the remaining
files get the status EXISTING, and the removed files get the status DELETED. The next commit drops manifests without
live files from the list. The removal of a data file also removes its deletion vector.

A Puffin file may contain several deletion vectors. A removed vector gets the status DELETED only if no other vector in
the file is live. Otherwise its entry is left out. The reason is Iceberg's incremental clean-up (Java's
`IncrementalFileCleanup`, with which Trino, Flink and programs expire snapshots): it deletes the whole file of each
DELETED entry, including the live vectors. The entry of the last vector gets the status, so the clean-up finally deletes
the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from seamark.formats.iceberg.manifests.content_file import DATA, POSITION_DELETES, ContentFile
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import DELETED, EXISTING, ManifestEntry
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.commit.change_requests.change_body import Remove
from seamark.metaserver.commit.change_requests.collision import Collision
from seamark.metaserver.commit.snapshots.manifests import Manifests, run_by_count
from seamark.metaserver.commit.snapshots.snapshot_writer import SnapshotWriter, StoredManifest


class RewrittenManifests(NamedTuple):
    manifests: tuple[ManifestFile, ...]
    """The manifests that were written without the removed files, and then the unchanged manifests of the parent."""
    files: tuple[ContentFile, ...]
    """The removed files."""


def make_file_key(file: ContentFile) -> Remove:
    """Return the key of a file in a request for removals: its path and, for a deletion vector, its offset."""
    return Remove(file.file_path, file.content_offset if file.is_deletion_vector else None)


def drop_dead_manifests(manifests: Sequence[ManifestFile]) -> tuple[ManifestFile, ...]:
    """Return the manifests without those that certainly list no live file.

    A manifest without counts may list live files, so it is kept.
    """
    return tuple(
        manifest for manifest in manifests if manifest.added_files_count != 0 or manifest.existing_files_count != 0
    )


class FilesToRemove(NamedTuple):
    """Live files to remove, and the manifests that list them.

    Attributes:
        removed: The keys of the files to remove.
        listing: Each manifest that lists a file to remove, with all its live entries.
    """

    removed: frozenset[Remove]
    listing: tuple[tuple[ManifestFile, Sequence[ManifestEntry]], ...]
    in_use: frozenset[str] = frozenset()
    """The Puffin files that contain both removed and remaining deletion vectors."""
    files: Sequence[ContentFile] = ()
    """The files to remove, in the order of `find_listing_manifests`."""


async def find_files(
    manifests: Manifests,
    manifest_files: Sequence[ManifestFile],
    requested_files: Collection[Remove],
    metadata: TableMetadata,
) -> FilesToRemove:
    """Find the requested files to remove, and also the delete files that apply only to a requested data file.

    Raises:
        Collision: A file is not live.
    """
    if not requested_files:
        return FilesToRemove(frozenset(), ())
    listing: dict[str, tuple[ManifestFile, Sequence[ManifestEntry]]] = {}
    removes, paths = await run_by_count(len(requested_files), partial(_copy_removes, requested_files))
    missing_keys, data_paths = set(removes), set[str]()

    def match(entries: Sequence[ManifestEntry]) -> bool:
        """Record the requested files among the entries, and return whether there are any."""
        matches = _select_requested(entries, removes)
        missing_keys.difference_update(matches)
        data_paths.update(file.file_path for file in matches.values() if file.content == DATA)
        return bool(matches)

    for manifest in await manifests.find_listing_manifests(drop_dead_manifests(manifest_files), paths):
        entries = await manifests.read_entries(manifest, metadata)
        if await run_by_count(len(entries), partial(match, entries)):
            listing[manifest.manifest_path] = manifest, entries
    if missing_keys:
        first_missing = await run_by_count(len(missing_keys), lambda: min(map(str, missing_keys)))
        raise Collision(
            "file-gone",
            f"{first_missing[:1000]} is to be removed but is no longer in the table; compute the change "
            "again from the current snapshot (a deletion vector is named by path and content-offset)",
        )
    for manifest, entries in await find_referring_entries(manifests, manifest_files, data_paths, metadata):
        attached_deletes = await run_by_count(len(entries), partial(_find_attached_deletes, entries, data_paths))
        if attached_deletes:
            listing.setdefault(manifest.manifest_path, (manifest, entries))
            await run_by_count(len(attached_deletes), partial(removes.update, attached_deletes))
    in_use = await find_used_puffins(
        manifests, manifest_files, removes, metadata, {path: entries for path, (_, entries) in listing.items()}
    )
    count = sum(len(entries) for _, entries in listing.values())
    files = await run_by_count(count, partial(_list_removed, tuple(listing.values()), removes))
    return FilesToRemove(frozenset(removes), tuple(listing.values()), in_use, files)


async def find_used_puffins(
    manifests: Manifests,
    manifest_files: Sequence[ManifestFile],
    removed_files: Collection[Remove],
    metadata: TableMetadata,
    known_entries: Mapping[str, Sequence[ManifestEntry]],
) -> frozenset[str]:
    """Return the Puffin files of the removed deletion vectors that also contain other live vectors.

    A Puffin file contains the deletion vectors of one or several data files.

    Args:
        manifest_files: The manifests of the snapshot from which the vectors are removed.
        known_entries: The live entries of manifests that were already read, by the path of the manifest.
        manifests: Reads manifests.
        removed_files: The keys of the removed files.
        metadata: The table's metadata.
    """
    paths = await run_by_count(len(removed_files), partial(_list_puffin_paths, removed_files))
    if not paths:
        return frozenset()
    in_use: set[str] = set()
    deletes = [manifest for manifest in drop_dead_manifests(manifest_files) if manifest.content != DATA]
    for manifest in await manifests.find_listing_manifests(deletes, paths):
        entries = known_entries.get(manifest.manifest_path)
        if entries is None:
            entries = await manifests.read_entries(manifest, metadata)
        in_use |= await run_by_count(len(entries), partial(_find_staying_paths, entries, paths, removed_files))
    return frozenset(in_use)


async def find_referring_entries(
    manifests: Manifests, manifest_files: Sequence[ManifestFile], paths: Collection[str], metadata: TableMetadata
) -> list[tuple[ManifestFile, list[ManifestEntry]]]:
    """Return the delete manifests that list a delete file which applies only to one of these data files.

    Each manifest is returned with its live entries.
    """
    deletes = [manifest for manifest in drop_dead_manifests(manifest_files) if manifest.content != DATA]
    candidates = await manifests.find_listing_manifests(deletes, paths, referenced=True)
    return [(manifest, await manifests.read_entries(manifest, metadata)) for manifest in candidates]


def _select_requested(entries: Sequence[ManifestEntry], removes: Collection[Remove]) -> dict[Remove, ContentFile]:
    keyed_files = ((make_file_key(entry.file), entry.file) for entry in entries)
    return {key: file for key, file in keyed_files if key in removes}


def _copy_removes(requested_files: Collection[Remove]) -> tuple[set[Remove], set[str]]:
    """Return the requested removals as a set, and their paths."""
    return set(requested_files), {remove.file_path for remove in requested_files}


def _find_staying_paths(
    entries: Sequence[ManifestEntry], paths: Collection[str], removed_files: Collection[Remove]
) -> set[str]:
    """Return the paths in `paths` that have an entry for a file that is not removed."""
    files = (entry.file for entry in entries)
    return {file.file_path for file in files if file.file_path in paths and make_file_key(file) not in removed_files}


def _find_attached_deletes(entries: Sequence[ManifestEntry], paths: Collection[str]) -> set[Remove]:
    """Return the keys of the delete files that apply only to one of the data files at these paths."""
    return {make_file_key(entry.file) for entry in entries if _applies_only_to_one_of(entry.file, paths)}


def _list_removed(
    listing: Sequence[tuple[ManifestFile, Sequence[ManifestEntry]]], removed_files: Collection[Remove]
) -> list[ContentFile]:
    return [entry.file for _, entries in listing for entry in entries if make_file_key(entry.file) in removed_files]


def _list_puffin_paths(removed_files: Collection[Remove]) -> set[str]:
    return {remove.file_path for remove in removed_files if remove.content_offset is not None}


def _applies_only_to_one_of(file: ContentFile, paths: Collection[str]) -> bool:
    return file.content == POSITION_DELETES and file.referenced_data_file in paths


class _RewrittenManifest(NamedTuple):
    """A manifest that was rewritten without some files."""

    removed: frozenset[Remove]
    """The keys of the files that were removed."""
    unmarked: frozenset[Remove]
    """The keys of removed deletion vectors that got no DELETED entry, because their Puffin file is still in use."""
    written: StoredManifest | None
    """The new manifest, or None if no entry is left."""
    files: tuple[ContentFile, ...]
    """The files that were removed."""


class ManifestFilter:
    """Rewrites manifests for one commit.

    If a later attempt removes the same files from a manifest, it reuses the manifest that the earlier attempt wrote.
    """

    def __init__(self, writer: SnapshotWriter, manifests: Manifests) -> None:
        self._writer = writer
        self._manifests = manifests
        self._rewritten_manifests: dict[tuple[object, ...], _RewrittenManifest] = {}

    async def remove(
        self,
        parents: Sequence[ManifestFile],
        to_remove: FilesToRemove,
        metadata: TableMetadata,
        sequence_number: int,
    ) -> RewrittenManifests:
        """Return the parent's manifests without the files that `to_remove` lists, and the removed files.

        The new manifests precede the unchanged manifests.
        """
        replacements: dict[str, ManifestFile | None] = {}
        files: list[ContentFile] = []
        for manifest, entries in to_remove.listing:
            rewritten = await self._rewrite(manifest, entries, to_remove, metadata)
            stored_manifest = rewritten.written
            replacements[manifest.manifest_path] = (
                None if stored_manifest is None else stored_manifest.describe(self._writer.snapshot_id, sequence_number)
            )
            files += rewritten.files
        new_manifests = [manifest for manifest in replacements.values() if manifest is not None]
        unchanged_manifests = [
            manifest for manifest in drop_dead_manifests(parents) if manifest.manifest_path not in replacements
        ]
        return RewrittenManifests((*new_manifests, *unchanged_manifests), tuple(files))

    async def _rewrite(
        self,
        manifest: ManifestFile,
        entries: Sequence[ManifestEntry],
        to_remove: FilesToRemove,
        metadata: TableMetadata,
    ) -> _RewrittenManifest:
        """Write a manifest without the removed files, or return the result of an earlier attempt.

        A removed file usually gets an entry with the status DELETED. A removed deletion vector gets no such entry if
        its Puffin file has other live vectors: engines would delete the whole file.

        Args:
            manifest: The manifest.
            entries: The live entries of the manifest.
            to_remove: The files to remove.
            metadata: The metadata of the table.
        """

        def select_removes() -> tuple[frozenset[Remove], frozenset[Remove]]:
            keys = (make_file_key(entry.file) for entry in entries)
            removed_keys = frozenset(key for key in keys if key in to_remove.removed)
            return removed_keys, frozenset(
                key for key in removed_keys if key.content_offset is not None and key.file_path in to_remove.in_use
            )

        own_removes, unmarked_removes = await run_by_count(len(entries), select_removes)
        # In the new manifest, inherited values are explicit. So a later attempt can reuse it only for the same values.
        key = (manifest.manifest_path, manifest.sequence_number, manifest.first_row_id)
        rewritten = self._rewritten_manifests.get(key)
        if rewritten is None or (rewritten.removed, rewritten.unmarked) != (own_removes, unmarked_removes):
            written_entries, files = await run_by_count(
                len(entries), partial(self._divide_entries, entries, own_removes, unmarked_removes)
            )
            content = 0 if entries[0].file.content == DATA else 1
            stored_manifest = None
            if written_entries:
                stored_manifest = await self._writer.write_manifest(
                    written_entries, metadata, manifest.partition_spec_id, content
                )
            rewritten = self._rewritten_manifests[key] = _RewrittenManifest(
                own_removes, unmarked_removes, stored_manifest, files
            )
        return rewritten

    def _divide_entries(
        self, entries: Sequence[ManifestEntry], own_removes: Collection[Remove], unmarked_removes: Collection[Remove]
    ) -> tuple[list[ManifestEntry], tuple[ContentFile, ...]]:
        """Return the entries of the new manifest, and the removed files.

        Args:
            own_removes: The keys of the files to remove from this manifest.
            unmarked_removes: The keys of removed files that get no DELETED entry. Engines would delete the whole Puffin
                file of such an entry, although it is still in use.
            entries: The live entries of the manifest.
        """
        entries_with_keys = [(entry, make_file_key(entry.file)) for entry in entries]
        written_entries = [
            self._copy_entry(entry, key in own_removes)
            for entry, key in entries_with_keys
            if key not in unmarked_removes
        ]
        return written_entries, tuple(entry.file for entry, key in entries_with_keys if key in own_removes)

    def _copy_entry(self, entry: ManifestEntry, is_removed: bool) -> ManifestEntry:
        """Return the entry for the new manifest, with explicit sequence numbers.

        Without them, the file would inherit the numbers of the new manifest. The entry of a removed file has the status
        DELETED and the id of the new snapshot. Another entry has the status EXISTING and keeps its snapshot id.
        """
        return ManifestEntry(
            DELETED if is_removed else EXISTING,
            self._writer.snapshot_id if is_removed else entry.snapshot_id,
            entry.sequence_number,
            entry.file_sequence_number,
            entry.file,
        )
