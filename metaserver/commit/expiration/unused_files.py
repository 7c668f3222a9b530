"""Finds the files that only removed snapshots need.

A file is unused if a removed snapshot names it and no remaining snapshot does. Therefore every remaining snapshot is
read. If a manifest list or a manifest of a remaining snapshot cannot be read, an error is raised, and no file is
deleted.

Writers spell locations differently (`file:/p`, `file:///p`; `s3a`, `s3n`, `s3`), so locations are compared in a plain
form. Two spellings that may mean the same file have the same plain form, so the file is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.errors import BadRequest, Corrupt
from seamark.formats.storage.locations import list_spellings, normalize_location
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.planner.lookup.lookup import find_files_by_prefix
from seamark.metaserver.planner.view.view import TableView

_MANIFESTS_PER_READ = 64
"""The number of manifests whose entries are in memory at the same time."""
ENTRIES_MAX = 1_000_000
"""The maximum number of manifest entries that become unused when several snapshots are removed."""
_COMPARED_FILES_MAX = 200_000
"""The maximum number of files of the remaining snapshots that are all compared.

If there are more, only the files in manifests that may list an unused file in one of the usual spellings are compared.
"""
FILES_MAX, MANIFESTS_MAX = 2_000_000, 1_000_000
"""The maximum number of unused files of one snapshot, and the maximum number of manifests of a table."""


class UnusedFiles(NamedTuple):
    """The locations of unused files in the order of their deletion.

    Each file comes before the file that names it, so an interrupted deletion can be repeated.

    Attributes:
        size_bytes: The total size of the content files and manifests.
    """

    content_files: tuple[str, ...]
    manifests: tuple[str, ...]
    list_files: tuple[str, ...]
    """Manifest lists and statistics files."""
    size_bytes: int


class TooManyEntries(Exception):
    """Raised if more than `ENTRIES_MAX` entries become unused. The caller must remove fewer snapshots at a time."""


async def find_unused(
    manifests: Manifests,
    old_metadata: TableMetadata,
    new_metadata: TableMetadata,
    may_delete: Callable[[str], bool],
    *,
    repeated_ids: Collection[int] | None = None,
) -> UnusedFiles:
    """Return the files that `old_metadata` needs and `new_metadata` does not need.

    Args:
        may_delete: Returns whether the file at a location may be deleted.
        repeated_ids: The removed snapshots of an earlier attempt, or None in the first attempt. The earlier attempt may
            have deleted some of their files, so missing files are not an error.

    Raises:
        Corrupt: A file of `new_metadata` cannot be read.
        TooManyEntries: There are too many entries, and `repeated_ids` is None.
        BadRequest: The table exceeds the limits.
    """
    remaining_ids = {snapshot.snapshot_id for snapshot in new_metadata.snapshots}
    removed_snapshots = [
        snapshot
        for snapshot in old_metadata.snapshots
        if snapshot.snapshot_id not in remaining_ids and (repeated_ids is None or snapshot.snapshot_id in repeated_ids)
    ]
    is_repeat = repeated_ids is not None
    live_manifests = await _read_manifests(manifests, new_metadata.snapshots)
    removed_manifests = await _read_manifests(manifests, removed_snapshots, skip_missing=is_repeat)
    manifests_to_delete = {key: manifest for key, manifest in removed_manifests.items() if key not in live_manifests}
    if (
        not is_repeat
        and len(removed_snapshots) > 1
        and sum(map(_count_entries, manifests_to_delete.values())) > ENTRIES_MAX
    ):
        raise TooManyEntries
    unused_files: dict[str, tuple[str, int]] = {}
    async for files in list_content_files(manifests, list(manifests_to_delete.values()), skip_missing=is_repeat):
        unused_files.update(files)
        if len(unused_files) > FILES_MAX:
            raise _make_too_large_error(f"{FILES_MAX:,} files that only one snapshot needs")
    compared_manifests = list(live_manifests.values()) if unused_files else []
    if sum(map(_count_entries, compared_manifests)) > _COMPARED_FILES_MAX:
        spellings = [spelling for path, _ in unused_files.values() for spelling in list_spellings(path)]
        compared_manifests = await manifests.find_listing_manifests(compared_manifests, spellings)
    async for files in list_content_files(manifests, compared_manifests):
        for key in files:
            unused_files.pop(key, None)
    paths_in_use = {
        normalize_location(path)
        for path in (*_list_manifest_lists(new_metadata.snapshots), *list_statistics_files(new_metadata))
    }
    unused_paths = [
        path
        for path in (*_list_manifest_lists(removed_snapshots), *list_statistics_files(old_metadata))
        if normalize_location(path) not in paths_in_use
    ]

    def choose() -> UnusedFiles:
        content_files = [(path, size) for path, size in unused_files.values() if may_delete(path)]
        unused_manifests = [manifest for manifest in manifests_to_delete.values() if may_delete(manifest.manifest_path)]
        size_bytes = sum(size for _, size in content_files)
        size_bytes += sum(manifest.manifest_length for manifest in unused_manifests)
        return UnusedFiles(
            tuple(path for path, _ in content_files),
            tuple(manifest.manifest_path for manifest in unused_manifests),
            tuple(path for path in dict.fromkeys(unused_paths) if may_delete(path)),
            size_bytes,
        )

    return await asyncio.to_thread(choose)


def _count_entries(manifest: ManifestFile) -> int:
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


def _list_manifest_lists(snapshots: Iterable[Snapshot]) -> set[str]:
    return {snapshot.manifest_list for snapshot in snapshots if snapshot.manifest_list}


def list_statistics_files(metadata: TableMetadata) -> set[str]:
    return {file.statistics_path for file in metadata.statistics} | {
        file.statistics_path for file in metadata.partition_statistics
    }


async def _read_manifests(
    manifests: Manifests, snapshots: Collection[Snapshot], *, skip_missing: bool = False
) -> dict[str, ManifestFile]:
    """Return the manifests of the snapshots, by plain location.

    A plain location is one spelling for all equal locations.

    Args:
        manifests: Reads manifest lists.
        snapshots: The snapshots.
        skip_missing: Whether to skip manifest lists that cannot be read, because an earlier deletion may have removed
            them.

    Raises:
        Corrupt: A manifest list cannot be read, and `skip_missing` is False.
        BadRequest: There are more than `MANIFESTS_MAX` manifests.
    """
    manifests_by_path: dict[str, ManifestFile] = {}
    for snapshot in snapshots:
        try:
            manifest_files = await manifests.read_list(snapshot)
        except Corrupt:
            if not skip_missing:
                raise
            continue
        manifests_by_path.update((normalize_location(manifest.manifest_path), manifest) for manifest in manifest_files)
        if len(manifests_by_path) > MANIFESTS_MAX:
            raise _make_too_large_error(f"{MANIFESTS_MAX:,} manifests")
    return manifests_by_path


def _make_too_large_error(description: str) -> BadRequest:
    return BadRequest(f"The table has more than {description}; expire its snapshots with Spark's expire_snapshots")


async def list_content_files(
    manifests: Manifests, manifest_files: Sequence[ManifestFile], *, skip_missing: bool = False
) -> AsyncIterator[Mapping[str, tuple[str, int]]]:
    """Yield the locations and sizes of the live files of a few manifests at a time, by normalized location.

    With `skip_missing`, manifests are read one by one, so that only a missing manifest itself is skipped.

    Args:
        skip_missing: Whether to skip manifests that cannot be read, because an earlier deletion may have removed them,
            instead of raising an error.
        manifests: Reads manifests.
        manifest_files: The manifests.

    Raises:
        Corrupt: A manifest cannot be read.
    """
    manifests_per_read = 1 if skip_missing else _MANIFESTS_PER_READ
    for start in range(0, len(manifest_files), manifests_per_read):
        part = manifest_files[start : start + manifests_per_read]
        try:
            blocks = await manifests.read_blocks(part)
        except Corrupt:
            if not skip_missing:
                raise
            continue
        yield await asyncio.to_thread(_read_paths_and_sizes, part, blocks)


def _read_paths_and_sizes(
    manifest_files: Sequence[ManifestFile], blocks: Sequence[Block]
) -> dict[str, tuple[str, int]]:
    """Return the locations and sizes of the live files of manifests, by plain location."""
    files_by_path: dict[str, tuple[str, int]] = {}
    for manifest, block in zip(manifest_files, blocks, strict=True):
        files = find_files_by_prefix(TableView((manifest,), (block,)))
        paths, sizes = files.read_texts("file_path").list_values(), files.read_longs("file_size_in_bytes").tolist()
        for path, size in zip(paths, sizes, strict=True):
            if path is not None:
                text = path.decode()
                files_by_path[normalize_location(text)] = text, size
    return files_by_path
