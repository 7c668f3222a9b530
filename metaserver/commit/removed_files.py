"""Refuses commits of files that a removal of orphan files has deleted.

If a writer commits a file only days after writing it, or the clock was wrong for a while, a removal of orphan files may
have deleted the file, and the commit would make the table unreadable. Therefore a removal writes a note to the
database before and after each batch, under the table's commit lock. The note says that files of the table were
deleted. While the note is younger than `_WRITERS_MS`, each commit checks that the files that it adds exist. It checks
before it takes the lock. Under the lock, it repeats the check only if the note has changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from functools import partial

from seamark.formats.iceberg.manifests.writer import ADDED
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import SnapshotInput
from seamark.formats.runtime.errors import BadRequest, CommitConflict, SeamarkError
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.operations import SaveCursor
from seamark.metaserver.store.passed_time import read_passed_time

_WRITERS_MS = 30 * 24 * 3_600_000
"""The maximum time after a removal in which writers may commit files that they wrote before the removal."""
_LOOKUPS_CONCURRENT_MAX = 64
_SHOWN_CHARACTERS_MAX = 500


async def note_removal(context: CatalogContext, uuid: str) -> None:
    """Write the note of a removal of orphan files, which are files to which no metadata refer.

    The note consists of the time in milliseconds, a space and a random id. It is stored as a cursor, which is a named
    text in the database. A commit that finds a new note checks that its files still exist. The removal calls this
    function before and after each batch of deletions.

    Raises:
        CommitConflict: Other removals changed the note in each attempt.
    """
    name, note = _make_cursor_name(uuid), f"{context.clock.now_ms()} {context.clock.uuid4()}"
    for _ in range(context.settings.commit_retries + 1):
        try:
            await context.store.transact([SaveCursor(name, await context.store.load_cursor(name), note)])
        except CommitConflict:
            continue  # A concurrent removal has changed the note.
        return
    raise CommitConflict("Several removals of orphan files of the table run at the same time; try again later")


async def read_removal_note(context: CatalogContext, uuid: str) -> str | None:
    """Return the note that the last removal of orphan files of the table wrote (`note_removal`), or None."""
    return await context.store.load_cursor(_make_cursor_name(uuid))


async def is_recent(context: CatalogContext, note: str) -> bool:
    """Return whether a writer may still commit files that were written before the note.

    The note begins with its time in milliseconds. After `_WRITERS_MS`, no such writer is expected. Only time that
    has certainly passed counts, because a clock may have been set forward (`PassedTime`).
    """
    passed_time = await read_passed_time(context.store, context.clock)
    return passed_time.measure_ms(int(note.partition(" ")[0]), passed_time.now_ms) < _WRITERS_MS


async def check_stored(context: CatalogContext, paths: Collection[str]) -> None:
    """Check that the files are stored.

    Raises:
        BadRequest: A file does not exist.
    """
    for path in await _find_missing(context, dict.fromkeys(paths)):
        raise BadRequest(
            f"The commit adds {path[:_SHOWN_CHARACTERS_MAX]!r}, which does not exist: a removal of orphan files of "
            "this table deleted files that were not committed within its minimum age; nothing was committed. Write the "
            "data again, and raise the table property seamark.orphan-files.min-age-ms if writers need longer"
        )


async def check_stored_snapshots(
    context: CatalogContext,
    published_manifests: Manifests,
    own_manifests: Manifests,
    uuid: str,
    base: TableMetadata,
    new_snapshots: Iterable[SnapshotInput],
) -> None:
    """Check that the files of an engine's new snapshots were not deleted by a removal of orphan files.

    A removal leaves a note in the database. Without a recent note, nothing is checked.

    Args:
        context: The context of the catalog.
        published_manifests: Reads the manifests of the table.
        own_manifests: Reads the manifests of the engine. Unreadable manifests are skipped.
        uuid: The table's UUID.
        base: The table's metadata before the commit.
        new_snapshots: The snapshots.

    Raises:
        BadRequest: A file does not exist.
    """
    note = await read_removal_note(context, uuid)
    if note is None or not await is_recent(context, note):
        return
    async for paths in _read_added_paths(published_manifests, own_manifests, base, new_snapshots):
        await check_stored(context, paths)


async def _read_added_paths(
    published_manifests: Manifests,
    own_manifests: Manifests,
    base: TableMetadata,
    new_snapshots: Iterable[SnapshotInput],
) -> AsyncIterator[set[str]]:
    """Yield the paths of the files that each new manifest adds.

    Manifests of the parent, and manifests that an earlier snapshot of the commit has, are not read again. Snapshots and
    manifests that cannot be read are skipped.
    """
    known_paths: set[str] = set()
    for snapshot in new_snapshots:
        if snapshot.manifest_list is None:
            continue
        parent = None if snapshot.parent_snapshot_id is None else base.snapshot(snapshot.parent_snapshot_id)
        try:
            known_paths |= {manifest.manifest_path for manifest in await published_manifests.read_list(parent)}
            manifest_files = await own_manifests.read_list_at(snapshot.manifest_list)
        except SeamarkError:
            continue
        for manifest in manifest_files:
            if manifest.manifest_path in known_paths:
                continue
            known_paths.add(manifest.manifest_path)
            try:
                entries = await own_manifests.read_entries(manifest, base)
            except SeamarkError:
                continue
            yield {entry.file.file_path for entry in entries if entry.status == ADDED}


async def _find_missing(context: CatalogContext, paths: Iterable[str]) -> list[str]:
    """Return the paths of the files that do not exist."""

    async def is_missing(path: str) -> bool:
        try:
            return not await context.objects.exists(path)
        # The file is outside the warehouse, or the storage does not respond. Assume that the file exists.
        except SeamarkError:
            return False

    all_paths = list(paths)
    are_missing = await gather([partial(is_missing, path) for path in all_paths], _LOOKUPS_CONCURRENT_MAX)
    return [path for path, is_path_missing in zip(all_paths, are_missing, strict=True) if is_path_missing]


def _make_cursor_name(uuid: str) -> str:
    return f"seamark orphans {uuid}"
