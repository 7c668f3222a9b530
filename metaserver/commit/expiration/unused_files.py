"""The files that only removed snapshots need.

A file is unused if a removed snapshot names it and no remaining snapshot does. Every remaining snapshot is read for
that. If one of their manifest lists or manifests cannot be read, the result is an error, and nothing is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.errors import BadRequest, Corrupt
from seamark.metaserver.iceberg.manifests.manifest import ManifestFile
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.snapshot import Snapshot
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.planner.lookup.lookup import lookup
from seamark.metaserver.planner.view.view import TableView

_AT_ONCE = 64
"""Manifests whose entries are in memory together."""
ENTRIES_MAX = 1_000_000
"""Entries of manifests that the removal of several snapshots may make unused, which bounds its memory."""
FILES_MAX, MANIFESTS_MAX = 2_000_000, 1_000_000
"""Limits of the unused files of one snapshot, and of the manifests of a table."""


class UnusedFiles(NamedTuple):
    """Locations, in the order of deletion: each file before the file that names it, so that an interrupted deletion can
    be repeated. `size_bytes`: of the content files and manifests."""

    content_files: tuple[str, ...]
    manifests: tuple[str, ...]
    others: tuple[str, ...]
    """Manifest lists and statistics files."""
    size_bytes: int


class TooManyEntries(Exception):
    """More than `ENTRIES_MAX`: fewer snapshots must be removed at a time."""


async def find_unused(
    manifests: Manifests,
    before: TableMetadata,
    after: TableMetadata,
    allowed: Callable[[str], bool],
    *,
    repeated: bool = False,
) -> UnusedFiles:
    """The files that `before` needs and `after` does not, among the `allowed` locations. BadRequest above the limits.

    `repeated`: an earlier attempt may have deleted some of them, so that missing ones are no error. Corrupt if a file
    of `after` cannot be read; TooManyEntries.
    """
    remaining = {snapshot.snapshot_id for snapshot in after.snapshots}
    removed = [snapshot for snapshot in before.snapshots if snapshot.snapshot_id not in remaining]
    live = await _manifests(manifests, after.snapshots)
    gone = await _manifests(manifests, removed, skip_missing=repeated)
    unused = {path: manifest for path, manifest in gone.items() if path not in live}
    if len(removed) > 1 and sum(map(_entries, unused.values())) > ENTRIES_MAX:
        raise TooManyEntries
    sizes: dict[str, int] = {}
    async for found in _content_files(manifests, list(unused.values()), skip_missing=repeated):
        sizes.update(found)
        if len(sizes) > FILES_MAX:
            raise _too_large(f"{FILES_MAX:,} files that only one snapshot needs")
    suspects = await manifests.listing(list(live.values()), sizes) if sizes else []
    async for found in _content_files(manifests, suspects):
        for path in found:
            sizes.pop(path, None)
    others = _lists(removed) - _lists(after.snapshots) | _statistics(before) - _statistics(after)

    def choose() -> UnusedFiles:
        files = tuple(path for path in sizes if allowed(path))
        named = tuple(path for path in unused if allowed(path))
        size_bytes = sum(sizes[path] for path in files) + sum(unused[path].manifest_length for path in named)
        return UnusedFiles(files, named, tuple(path for path in sorted(others) if allowed(path)), size_bytes)

    return await asyncio.to_thread(choose)


def _entries(manifest: ManifestFile) -> int:
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


def _lists(snapshots: Iterable[Snapshot]) -> set[str]:
    return {snapshot.manifest_list for snapshot in snapshots if snapshot.manifest_list}


def _statistics(metadata: TableMetadata) -> set[str]:
    return {file.statistics_path for file in metadata.statistics} | {
        file.statistics_path for file in metadata.partition_statistics
    }


async def _manifests(
    manifests: Manifests, snapshots: Collection[Snapshot], *, skip_missing: bool = False
) -> dict[str, ManifestFile]:
    """The manifests of the snapshots, by path."""
    found: dict[str, ManifestFile] = {}
    for snapshot in snapshots:
        try:
            listed = await manifests.listed(snapshot)
        except Corrupt:
            if not skip_missing:
                raise
            continue
        found.update((manifest.manifest_path, manifest) for manifest in listed)
        if len(found) > MANIFESTS_MAX:
            raise _too_large(f"{MANIFESTS_MAX:,} manifests")
    return found


def _too_large(what: str) -> BadRequest:
    return BadRequest(f"The table has more than {what}; expire its snapshots with Spark's expire_snapshots")


async def _content_files(
    manifests: Manifests, listed: Sequence[ManifestFile], *, skip_missing: bool = False
) -> AsyncIterator[dict[str, int]]:
    """The sizes of the files that the manifests list as live, by path, in parts."""
    at_once = 1 if skip_missing else _AT_ONCE
    for start in range(0, len(listed), at_once):
        part = listed[start : start + at_once]
        try:
            blocks = await manifests.blocks(part)
        except Corrupt:
            if not skip_missing:
                raise
            continue
        yield await asyncio.to_thread(_sizes, part, blocks)


def _sizes(listed: Sequence[ManifestFile], blocks: Sequence[Block]) -> dict[str, int]:
    found: dict[str, int] = {}
    for manifest, block in zip(listed, blocks, strict=True):
        files = lookup(TableView((manifest,), (block,)))
        paths, sizes = files.texts("file_path").values(), files.longs("file_size_in_bytes").tolist()
        found.update((path.decode(), size) for path, size in zip(paths, sizes, strict=True) if path is not None)
    return found
