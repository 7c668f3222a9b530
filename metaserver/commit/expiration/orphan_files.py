"""Removes orphan files: files in a table's folders that no snapshot names, because their writers failed or were killed.

The server lists the folders, and compares the files with those that the metadata and all its snapshots name. It
compares only file names, and keeps every file with the name of a needed file. Therefore different spellings of a
location, symbolic links and mount points cannot make a live file look unused. Writers put a UUID into file names, so an
orphan file rarely has the name of a needed file.

A file that a writer has not committed yet looks like an orphan file. Therefore only files of a minimum age are removed,
and only files whose names look like those of data files, delete files, manifests, statistics or metadata files. Before
each batch, under the table's commit lock, the server reads the files that commits have added meanwhile.

A wrong clock can make every file look old. Therefore the clocks of the server and of the storage are compared, and only
time that the catalog has seen pass counts (`PassedTime`). For the time before the catalog first read the clock, the age
of a file is its distance from the newest file in the table's folders, because a live writer's files are among the
newest.

A writer that is killed while it writes to S3 leaves an unfinished multipart upload. Its parts take space, and no
listing of files shows them. Uploads of the minimum age whose file names match are aborted, because no commit can name
an unfinished file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import get_metadata_folder, parse_long
from seamark.formats.iceberg.metadata.retention import MIN_ORPHAN_AGE, MIN_ORPHAN_AGE_DEFAULT_MS
from seamark.formats.protocol.wire import CLOCK_FOLDER, FORMER_INDEX_FOLDER, FORMER_PLANS_FOLDER, fold_path, format_path
from seamark.formats.runtime.errors import BadRequest, SeamarkError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.pointers import check_uuid
from seamark.metaserver.catalog.policies import load_policies, with_policies
from seamark.metaserver.catalog.purge import is_collectable, list_own_folders, make_deletable_check
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.expiration.expiration import METADATA_BEFORE, list_pending_expirations
from seamark.metaserver.commit.expiration.unused_files import MANIFESTS_MAX, list_content_files, list_statistics_files
from seamark.metaserver.commit.publication import Publisher
from seamark.metaserver.commit.removed_files import note_removal
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.objects.clock_check import read_storage_time_ms
from seamark.metaserver.objects.port import ObjectInfo, Upload
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.passed_time import PassedTime, read_passed_time

ACTION = "orphan-files"
AGE_MIN_MS = 24 * 3_600_000
"""The minimum age of an orphan file.

A writer may commit its files hours after it has written them, and the clock of the storage may be wrong.
"""
UPLOADS_MAX = 1000
"""The maximum number of unfinished uploads that one request aborts."""
FILES_MAX = 100_000
"""The maximum number of files that one request removes. The next request removes further files."""
LOCATIONS_MAX = 1000
"""The maximum number of locations in a report."""
NAMES_MAX = 50_000_000
"""The maximum number of names of needed files, which are in memory."""
_SUFFIXES = (
    ".parquet",
    ".orc",
    ".avro",
    ".puffin",
    ".stats",
    ".metadata.json",
    ".metadata.json.gz",
)
"""The suffixes of files that Iceberg writers create. Files with other suffixes, such as checkpoints, are kept."""
_DECODE_ROUNDS_MAX = 8
"""The maximum number of times that a name is percent-decoded, because writers may encode names repeatedly."""
_LISTED_OBJECTS_PER_BATCH = 1000
_DELETED_FILES_PER_BATCH = 100
_REMOVALS_CONCURRENT_MAX = 2
_DELETES_CONCURRENT_MAX = 16
_MEMORY_DIVISOR = 8
"""The divisor of `commit_memory_bytes` for the memory of the manifests that a removal reads."""
_log = structlog.get_logger("seamark.orphans")


class RemoveOrphanFilesRequest(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    older_than_ms: Annotated[
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None,
        msgspec.Meta(
            description="Remove files that were last modified before this time (ms since the epoch), which is at least "
            "one day ago. By default, the table property seamark.orphan-files.min-age-ms determines the time, or 3 "
            "days ago."
        ),
    ] = None
    dry_run: Annotated[bool, msgspec.Meta(description="Report what would be removed, without removing it.")] = False


class OrphanReport(msgspec.Struct, frozen=True, rename="kebab"):
    """The result of a removal. The report of a dry run has the result that the removal would have.

    Attributes:
        files_left: Whether orphan files remain for another request.
        locations: The locations of the first files.
        files_failed: The number of files that the storage did not delete. Another request tries to delete them again.
        uploads: The number of unfinished multipart uploads that were aborted.
        files_unconfirmed: The number of files that look old, but only by the clock. They are kept until the catalog has
            seen enough time pass.
        files: The number of orphan files.
        listed: The number of files in the folders of the table.
    """

    files: int = 0
    size_in_bytes: int = 0
    files_failed: int = 0
    files_left: bool = False
    listed: int = 0
    locations: tuple[str, ...] = ()
    uploads: int = 0
    files_unconfirmed: int = 0


class _Listing(NamedTuple):
    """The files in the folders of a table.

    Attributes:
        orphans: The orphan files.
        listed: The number of listed files.
        newest_ms: The time at which the newest file was modified.
        is_complete: Whether the listing is complete. It stops after `FILES_MAX` orphan files.
    """

    orphans: list[ObjectInfo]
    listed: int
    newest_ms: int
    is_complete: bool


def read_minimum_age_ms(metadata: TableMetadata) -> int:
    """Return the minimum age of orphan files from the table's property, or its default.

    Raises:
        BadRequest: The value is invalid, or below `AGE_MIN_MS`.
    """
    age_ms = parse_long(metadata.properties, MIN_ORPHAN_AGE, MIN_ORPHAN_AGE_DEFAULT_MS)
    if age_ms < AGE_MIN_MS:
        raise BadRequest(f"The property {MIN_ORPHAN_AGE} is {age_ms}; it must be at least {AGE_MIN_MS}, one day")
    return age_ms


class OrphanRemoval:
    """Removes the orphan files of tables. An instance belongs to one event loop."""

    def __init__(self, catalog: Catalog, publisher: Publisher, planner: Planner) -> None:
        self._context = catalog.context
        self._publisher = publisher
        self._planner = planner
        self._slots = asyncio.Semaphore(_REMOVALS_CONCURRENT_MAX)
        self._manifests = Manifests.from_settings(self._context.objects, self._context.settings, _MEMORY_DIVISOR)

    async def remove(
        self, caller: Caller, namespace: NamespacePath, name: str, request: RemoveOrphanFilesRequest
    ) -> OrphanReport:
        """Remove the orphan files of a table. If a manifest cannot be read, remove no files.

        Raises:
            NoSuchTable: The table does not exist.
            BadRequest: The table's properties forbid the deletion of files or are invalid, several names share its
                files, or the clocks of the storage and the server differ.
            Corrupt: A manifest cannot be read.
            StorageError: The clock of the storage cannot be read.
        """
        async with self._slots:
            entry, metadata = await self._load(namespace, name)
            passed_time = await read_passed_time(self._context.store, self._context.clock)
            policies = await load_policies(self._context.store, namespace)
            older_than_ms = self._choose_time_limit(with_policies(metadata, policies), request, passed_time)
            needed_names = _NeededNames(self._open_checked_manifests(metadata, entry.uuid))
            await needed_names.add(entry, metadata)
            listing = await self._find_orphans(entry, metadata, needed_names, older_than_ms)
            # The catalog measures time only since it first read the clock. The clock may have been wrong at that
            # time, so the time between the newest file and the first reading does not count. For example, if the newest
            # file is from 1 March and the first reading is from 5 March, an orphan must be 4 days older than the limit.
            confirmed_ms = older_than_ms - max(0, passed_time.since_ms - listing.newest_ms)
            confirmed_orphans = [info for info in listing.orphans if info.modified_ms < confirmed_ms]
            uploads = await self._find_uploads(entry, metadata, confirmed_ms)
            if confirmed_orphans or uploads:
                # The ages are invalid if the clock of the storage differs from that of the server. Then this call
                # fails.
                for folder in _drop_nested_folders(list_own_folders(self._context, metadata)):
                    await read_storage_time_ms(self._context.objects, self._context.clock, f"{folder}/{CLOCK_FOLDER}")
            report = _make_report(confirmed_orphans, listing.listed, is_complete=listing.is_complete)
            report = msgspec.structs.replace(report, files_unconfirmed=len(listing.orphans) - len(confirmed_orphans))
            if request.dry_run:
                return msgspec.structs.replace(report, uploads=len(uploads))
            report = msgspec.structs.replace(report, uploads=await self._context.objects.abort_uploads(uploads))
            if not confirmed_orphans and not report.uploads:
                return report
            return await self._remove(caller, entry, needed_names, confirmed_orphans, report, passed_time.now_ms)

    async def _load(self, namespace: NamespacePath, name: str) -> tuple[Entry, TableMetadata]:
        context = self._context
        entry = await context.require_entry(EntryKind.TABLE, namespace, name)
        metadata = await context.documents.table(entry.metadata_location)
        check_uuid(entry, metadata)
        reason = None
        if not is_collectable(metadata):
            reason = "gc.enabled of the table is false, so other tables may use its files"
        elif await context.store.count_names(entry.uuid) != 1:
            reason = "several live or dropped names refer to this table, so they share its files"
        if reason is not None:
            raise BadRequest(f"Cannot remove orphan files of {format_path(namespace, name)}: {reason}")
        return entry, metadata

    def _choose_time_limit(
        self, metadata: TableMetadata, request: RemoveOrphanFilesRequest, passed_time: PassedTime
    ) -> int:
        """Return the time in milliseconds before which an orphan file must have been modified.

        Raises:
            BadRequest: The requested time is less than a day ago.
        """
        if request.older_than_ms is None:
            return passed_time.find_time_ago(read_minimum_age_ms(metadata))
        if request.older_than_ms > passed_time.now_ms - AGE_MIN_MS:
            raise BadRequest(
                f"older-than-ms is {request.older_than_ms}, less than one day before now ({passed_time.now_ms}): "
                "files that a writer is about to commit would be removed; choose an earlier time"
            )
        # If the clock was set forward, less time has certainly passed than the clock shows.
        return min(request.older_than_ms, passed_time.find_time_ago(AGE_MIN_MS))

    def _open_checked_manifests(self, metadata: TableMetadata, uuid: str) -> Manifests:
        check = partial(self._planner.check_paths, metadata, uuid)
        return self._manifests.with_checks(lambda paths: check(list(paths)), None)

    async def _find_orphans(
        self, entry: Entry, metadata: TableMetadata, needed: _NeededNames, older_than_ms: int
    ) -> _Listing:
        """Return the files that are orphan files according to the clock.

        An orphan file is an old file to which no metadata of the table refer. Hidden files, files with other suffixes,
        and files in former folders of indexes and plans are not orphan files.

        Args:
            entry: The catalog entry of the table.
            metadata: The table's metadata.
            needed: The names of the files to which the metadata refer.
            older_than_ms: The time before which an orphan file was modified.
        """
        await self._add_pending_metadata(entry, needed)
        folders = _drop_nested_folders(list_own_folders(self._context, metadata))
        may_delete = await make_deletable_check(self._context, entry.uuid, metadata, exclusive=True)
        former_folders = (
            f"{parse_location(metadata.location)}/{FORMER_INDEX_FOLDER}/",
            f"{parse_location(get_metadata_folder(metadata.location, metadata.properties))}/{FORMER_PLANS_FOLDER}/",
        )

        def is_orphan(folder: str, info: ObjectInfo) -> bool:
            return (
                info.modified_ms < older_than_ms
                and info.location.startswith(f"{folder}/")
                and info.location.endswith(_SUFFIXES)
                and not info.location.startswith(former_folders)
                and not _is_hidden(info.location[len(folder) + 1 :])
                and info.location not in needed
                and may_delete(info.location)
            )

        def select_orphans(folder: str, batch: list[ObjectInfo]) -> list[ObjectInfo]:
            return [info for info in batch if is_orphan(folder, info)]

        orphan_files: list[ObjectInfo] = []
        listed_count = newest_ms = 0
        for folder in folders:
            async for batch in _batch_objects(self._context.objects.list(folder)):
                listed_count += len(batch)
                newest_ms = max(newest_ms, *(info.modified_ms for info in batch))
                orphan_files += await asyncio.to_thread(select_orphans, folder, batch)
                if len(orphan_files) > FILES_MAX:
                    return _Listing(orphan_files[:FILES_MAX], listed_count, newest_ms, is_complete=False)
        return _Listing(orphan_files, listed_count, newest_ms, is_complete=True)

    async def _find_uploads(self, entry: Entry, metadata: TableMetadata, older_than_ms: int) -> list[Upload]:
        """Return the unfinished uploads of files of the table that began before a time.

        Only uploads of files that could be orphan files are returned, at most `UPLOADS_MAX`. The result is empty if the
        storage cannot list uploads.
        """
        may_delete = await make_deletable_check(self._context, entry.uuid, metadata, exclusive=True)
        uploads: list[Upload] = []
        for folder in _drop_nested_folders(list_own_folders(self._context, metadata)):
            try:
                async for upload in self._context.objects.list_uploads(folder):
                    path = upload.location
                    name = path[len(folder) + 1 :]
                    is_file = path.startswith(f"{folder}/") and path.endswith(_SUFFIXES) and not _is_hidden(name)
                    if is_file and upload.begun_ms < older_than_ms and may_delete(path):
                        uploads.append(upload)
                    if len(uploads) == UPLOADS_MAX:
                        return uploads
            except SeamarkError as error:  # The server may have the right to list files, but not to list uploads.
                _log.warning("unfinished uploads not listed", location=folder, reason=error.message)
        return uploads

    async def _add_pending_metadata(self, entry: Entry, needed: _NeededNames) -> None:
        """Add the metadata files that an interrupted expiration will read when it continues."""
        for instant in await list_pending_expirations(self._context.store, entry.uuid):
            needed.add_name(str(instant.summary[METADATA_BEFORE]))

    async def _remove(
        self,
        caller: Caller,
        entry: Entry,
        needed: _NeededNames,
        orphan_files: list[ObjectInfo],
        report: OrphanReport,
        requested_ms: int,
    ) -> OrphanReport:
        """Delete the orphan files that are still unused, in batches, and record the removal.

        Args:
            caller: The principal that removes the files.
            entry: The catalog entry of the table.
            needed: The locations that the table's metadata name. They are updated before each batch.
            orphan_files: The files to delete.
            report: The report of the search.
            requested_ms: The time of the request.
        """
        deleted_objects: list[ObjectInfo] = []
        failed_count = 0

        async def delete(info: ObjectInfo) -> bool:
            try:
                await self._context.objects.delete(info.location)
            except SeamarkError as error:
                _log.warning("orphan file not deleted", location=info.location, reason=error.message)
                return False
            return True

        for start in range(0, len(orphan_files), _DELETED_FILES_PER_BATCH):
            # Read the files before taking the lock, so little remains to be read under it.
            await self._add_new_names(entry, needed)
            async with self._publisher.lock(entry.namespace, entry.name):
                await note_removal(self._context, entry.uuid)
                await self._add_new_names(entry, needed)
                batch = [
                    info
                    for info in orphan_files[start : start + _DELETED_FILES_PER_BATCH]
                    if info.location not in needed
                ]
                outcomes = await gather([partial(delete, info) for info in batch], _DELETES_CONCURRENT_MAX)
                # A commit that finds a new note checks that its files still exist. A commit may have checked a file
                # just before this deletion, so write a new note for it.
                await note_removal(self._context, entry.uuid)
            deleted_objects += [info for info, is_deleted in zip(batch, outcomes, strict=True) if is_deleted]
            failed_count += outcomes.count(False)
        deletion = msgspec.structs.replace(
            _make_report(deleted_objects, report.listed, is_complete=not report.files_left), uploads=report.uploads
        )
        summary: dict[str, Any] = {
            "deleted-files": deletion.files,
            "failed-files": failed_count,
            "size-in-bytes": deletion.size_in_bytes,
            **({"aborted-uploads": deletion.uploads} if deletion.uploads else {}),
        }
        await self._context.transact(
            [self._context.make_instant(caller, entry, ACTION, requested_ms=requested_ms, summary=summary)]
        )
        return msgspec.structs.replace(deletion, files_failed=failed_count, files_unconfirmed=report.files_unconfirmed)

    async def _add_new_names(self, entry: Entry, needed: _NeededNames) -> None:
        """Add the names of the files that other commits have added since the listing.

        Raises:
            NoSuchTable: The table was dropped or renamed.
            BadRequest: The files of the table may no longer be deleted, or the name now refers to another table.
        """
        current_entry, metadata = await self._load(entry.namespace, entry.name)
        if current_entry.uuid != entry.uuid:
            raise BadRequest(
                f"{format_path(entry.namespace, entry.name)} now refers to another table; the removal stops here"
            )
        await needed.add(current_entry, metadata)


class _NeededNames:
    """The names of all files that a table needs, without folders, as hashes of 8 bytes.

    If the hash of an orphan file's name collides with another hash, the orphan file is kept.
    """

    def __init__(self, manifests: Manifests) -> None:
        self._manifests = manifests
        self._first_hashes: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """The sorted hashes of the names from the first call of `add`."""
        self._later_hashes: set[int] = set()
        """The hashes of the names from later calls."""
        self._read_locations: set[str] = set()
        """The locations of the manifests and manifest lists that were read."""

    def __contains__(self, location: str) -> bool:
        name_hash = _hash_name(location)
        if name_hash in self._later_hashes:
            return True
        position = int(self._first_hashes.searchsorted(name_hash))
        return position < len(self._first_hashes) and int(self._first_hashes[position]) == name_hash

    def add_name(self, location: str) -> None:
        self._later_hashes.add(_hash_name(location))

    async def add(self, entry: Entry, metadata: TableMetadata) -> None:
        """Add the names of the table's files. Manifests that an earlier call has read are skipped.

        Only hashes of the names are kept, which need less memory. The first call keeps them as a sorted array, and
        later calls, which add few names, as a set.

        Raises:
            Forbidden: The table may not refer to a manifest or manifest list.
            Corrupt: A manifest cannot be read.
            BadRequest: The table exceeds the limits.
        """
        lists: set[str] = set()
        manifests: dict[str, ManifestFile] = {}
        for snapshot in metadata.snapshots:
            if snapshot.manifest_list is None or snapshot.manifest_list not in self._read_locations:
                manifest_files = await self._manifests.read_list(snapshot)
                lists.add(snapshot.manifest_list or "")
                manifests.update(
                    (manifest.manifest_path, manifest)
                    for manifest in manifest_files
                    if manifest.manifest_path not in self._read_locations
                )
                if len(manifests) > MANIFESTS_MAX:
                    raise BadRequest(f"The table has more than {MANIFESTS_MAX:,} manifests; expire snapshots first")
        metadata_files = [entry.metadata_location, entry.previous_location or "", *lists, *manifests]
        metadata_files += [file.metadata_file for file in metadata.metadata_log]
        hashes = [await asyncio.to_thread(_hash_names, [*metadata_files, *list_statistics_files(metadata)])]
        count = len(self._first_hashes) + len(self._later_hashes)
        async for paths in list_content_files(self._manifests, list(manifests.values())):
            hashes.append(await asyncio.to_thread(_hash_names, [path for path, _ in paths.values()]))
            if count + sum(map(len, hashes)) > NAMES_MAX:
                raise BadRequest(f"The table needs more than {NAMES_MAX:,} files; expire snapshots first")
        if len(self._first_hashes):  # Later calls add only the names of files that commits have added since.
            self._later_hashes.update(*(array.tolist() for array in hashes))
        else:
            self._first_hashes = await asyncio.to_thread(lambda: np.unique(np.concatenate(hashes)))
        self._read_locations.update(lists, manifests)


def _hash_name(location: str) -> int:
    """Return the hash of a file's name. All spellings of the name have the same hash.

    A name may be percent-encoded once or several times. A collision only keeps a file that could be deleted.
    """
    for _ in range(_DECODE_ROUNDS_MAX):
        if "%" not in location:
            break
        location = unquote(location)
    return hash(fold_path(location.rpartition("/")[2]))


def _hash_names(locations: Iterable[str]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(_hash_name, locations), dtype=np.int64)


def _is_hidden(path: str) -> bool:
    """Return whether the path is hidden in Hadoop and Spark, because a name in it begins with `_` or `.`.

    Hidden files belong to other programs, to indexes or to plans. A name with a `=` is a partition folder, and is not
    hidden.
    """
    return any(part.startswith(("_", ".")) and "=" not in part for part in path.split("/"))


def _drop_nested_folders(folders: Iterable[str]) -> list[str]:
    """Return the folders that are not inside another of the folders, in the form that listings return."""
    folders_kept: list[str] = []
    for folder in sorted({str(parse_location(folder)) for folder in folders}):
        if not any(folder.startswith(f"{other}/") for other in folders_kept):
            folders_kept.append(folder)
    return folders_kept


async def _batch_objects(infos: AsyncIterator[ObjectInfo]) -> AsyncIterator[list[ObjectInfo]]:
    batch: list[ObjectInfo] = []
    async for info in infos:
        batch.append(info)
        if len(batch) == _LISTED_OBJECTS_PER_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _make_report(files: list[ObjectInfo], listed_count: int, *, is_complete: bool) -> OrphanReport:
    return OrphanReport(
        files=len(files),
        size_in_bytes=sum(info.size_bytes for info in files),
        files_left=not is_complete,
        listed=listed_count,
        locations=tuple(info.location for info in files[:LOCATIONS_MAX]),
    )
