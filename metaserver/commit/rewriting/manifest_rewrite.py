"""Rewrites the manifests of a table's main branch, so that a plan reads fewer manifests.

The new snapshot has the same files as its parent. Each entry keeps the snapshot that added it, its sequence numbers and
its row ids, and has the status EXISTING. Manifests of the same partition spec and content are rewritten together.

Manifests with metrics that some readers cannot use are always rewritten, with corrected metrics
(`repaired_metrics.py`). New commits correct the metrics, but a table may contain wrong metrics of older commits.

The new manifests are written without a lock. Then, under the table's commit lock, they replace the manifests of the
current head. If the head still lists an old manifest, the entries in it have not changed. If another commit has
replaced an old manifest meanwhile, only the rewrite of its group is skipped. So writers wait only while the new
manifest list is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, NamedTuple

import msgspec

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.manifests.content_file import DeclaredTypes
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.repaired_metrics import has_unusable_metrics, repair_file
from seamark.formats.iceberg.manifests.writer import EXISTING, ManifestEntry, write_manifest
from seamark.formats.iceberg.metadata.manifest_policy import MIN_COUNT, MIN_COUNT_DEFAULT, REWRITTEN_BY_MARK
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_int
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import BadRequest, CommitConflict, CommitUnknown
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.pointers import check_uuid
from seamark.metaserver.catalog.policies import load_policies, with_policies
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.change_requests.change_body import REPLACE
from seamark.metaserver.commit.publication import MANIFESTS_REWRITTEN, CommitEvent, Publisher
from seamark.metaserver.commit.rewriting.entry_order import (
    count_partition_manifests,
    divide_entries,
    make_clustering_bound,
)
from seamark.metaserver.commit.snapshots.manifest_filter import RewrittenManifests, drop_dead_manifests
from seamark.metaserver.commit.snapshots.manifest_merge import can_encode_partitions
from seamark.metaserver.commit.snapshots.manifests import MANIFESTS_CONCURRENT_MAX, Manifests
from seamark.metaserver.commit.snapshots.snapshot_producer import SnapshotTerms, produce_snapshot
from seamark.metaserver.commit.snapshots.snapshot_writer import (
    ENTRIES_MAX,
    SnapshotWriter,
    StoredManifest,
    get_target_bytes,
    open_writer,
)
from seamark.metaserver.commit.snapshots.summary import NOTHING
from seamark.metaserver.objects.cleanup import Cleanup
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath

GROUP_BYTES_MAX, GROUP_ENTRIES_MAX = 64 << 20, 300_000
"""The maximum size and the maximum number of entries of the manifests in a group, which limit the memory.

The smallest manifests are rewritten first.
"""
REWRITE_ATTEMPTS_MAX = 3
"""The maximum number of attempts. An attempt fails if other commits have replaced all of its manifests."""
REMAINING_MANIFESTS_MAX_FRACTION = 0.75
"""A rewrite is committed if at most this fraction of the manifests remains. The next two limits are an alternative
condition."""
_MANIFESTS_PER_PARTITION_MIN, _REMAINING_PAIRS_MAX_FRACTION = 4, 0.5
"""The alternative condition under which a rewrite is committed.

The files of a partition are in at least `_MANIFESTS_PER_PARTITION_MIN` manifests on average, and the rewrite reduces
this average to at most the fraction `_REMAINING_PAIRS_MAX_FRACTION`.
"""
_REWRITES_CONCURRENT_MAX = 2
_DECODED_BYTES_MAX = 1 << 30
_CHECKED_BYTES_MAX = 1 << 30
"""The maximum total size of the manifests of one spec and content that a rewrite reads to find wrong metrics."""
_CORRECT_PATHS_BYTES = 4 << 20
"""The memory for the paths of manifests with correct metrics."""
_SAMPLE_ENTRIES = 500
"""The number of entries that are encoded to estimate the size of an entry."""
_MEMORY_DIVISOR = 8
"""The divisor of `commit_memory_bytes` for the memory of the manifests that a rewrite reads."""


class RewriteManifestsRequest(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    min_count: Annotated[
        Annotated[int, msgspec.Meta(ge=2, lt=1 << 31)] | None,
        msgspec.Meta(
            description="Rewrite the manifests of one partition spec and content (data or deletes) if there are at "
            "least this many. Fewer are rewritten only if they list the files of each partition repeatedly. The "
            "default is the table property seamark.manifests.min-count, or 20."
        ),
    ] = None
    dry_run: Annotated[bool, msgspec.Meta(description="Report what would be replaced, without replacing it.")] = False


class ManifestReport(msgspec.Struct, frozen=True, rename="kebab"):
    """The result of a rewrite. The report of a dry run has the result that the rewrite would have.

    Attributes:
        manifests: The number of all manifests of the snapshot before the rewrite.
        manifests_before: The number of manifests that the rewrite replaces.
        manifests_after: The number of manifests that replace them.
        partition_manifests_before: The average number of manifests that list files of a partition.
        conflicts: The number of groups that were skipped because other commits have replaced their manifests.
        files_repaired: The number of files whose metrics were corrected.
    """

    manifests: int = 0
    manifests_before: int = 0
    manifests_after: int = 0
    entries: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    partition_manifests_before: float = 0.0
    partition_manifests_after: float = 0.0
    conflicts: int = 0
    files_repaired: int = 0
    snapshot_id: int | None = None


class _Group(NamedTuple):
    """Manifests of the same spec and content that are rewritten together.

    Attributes:
        content: The content type of the manifests: data files or delete files.
        replaced: The old manifests.
        chunks: The entries of each new manifest.
        pairs_before: The number of pairs of a partition and an old manifest that lists its files.
        pairs_after: The number of pairs of a partition and a new manifest that lists its files.
        partitions: The number of partitions.
        spec_id: The id of the partition spec.
    """

    spec_id: int
    content: int
    replaced: tuple[ManifestFile, ...]
    chunks: list[list[ManifestEntry]]
    pairs_before: int
    pairs_after: int
    partitions: int
    repaired: int
    """The number of files whose metrics are corrected."""


class _WrittenGroup(NamedTuple):
    group: _Group
    stored: tuple[StoredManifest, ...]

    def fits(self, manifest_files: Sequence[ManifestFile]) -> bool:
        """Return whether the head still lists all old manifests of the group, with the same inherited values."""
        return set(map(_make_manifest_identity, self.group.replaced)) <= set(
            map(_make_manifest_identity, manifest_files)
        )


class ManifestRewrite:
    """Rewrites the manifests of tables. An instance belongs to one event loop."""

    def __init__(self, catalog: Catalog, publisher: Publisher, planner: Planner, cleanup: Cleanup) -> None:
        self._context = catalog.context
        self._publisher = publisher
        self._planner = planner
        self._slots = asyncio.Semaphore(_REWRITES_CONCURRENT_MAX)
        self._cleanup = cleanup
        # Do not use the caches of commits: reading all manifests would evict the manifests that writers need.
        self._manifests = Manifests.from_settings(self._context.objects, self._context.settings, _MEMORY_DIVISOR)
        self._correct_paths: MemoryCache[str, bool] = MemoryCache(_CORRECT_PATHS_BYTES, "commits")
        """The paths of manifests with correct metrics, which need not be read again."""

    async def rewrite(
        self, caller: Caller, namespace: NamespacePath, name: str, request: RewriteManifestsRequest
    ) -> ManifestReport:
        """Rewrite the manifests of a table.

        If other commits have replaced all old manifests, the rewrite is repeated. If this happens in each of
        REWRITE_ATTEMPTS_MAX attempts, nothing is changed, and the report counts the conflicts.

        Raises:
            NoSuchTable: The table does not exist.
            BadRequest: The table has format version 1 or an invalid property.
            Corrupt: A manifest cannot be read.
            CommitUnknown: The outcome of the commit is unknown.
        """
        async with self._slots:
            report = ManifestReport()
            for _ in range(REWRITE_ATTEMPTS_MAX):
                report = await self._attempt_rewrite(caller, namespace, name, request)
                if not report.conflicts or report.snapshot_id is not None:
                    break
            return report

    async def _attempt_rewrite(
        self, caller: Caller, namespace: NamespacePath, name: str, request: RewriteManifestsRequest
    ) -> ManifestReport:
        """Rewrite the manifests of the current snapshot, and try once to commit the result.

        If another commit has replaced manifests of a group in the meantime, the group is skipped.
        """
        entry, metadata = await self._load(namespace, name)
        head = metadata.current_snapshot
        if head is None:
            return ManifestReport()
        manifests = self._open_checked_manifests(metadata, entry.uuid)
        manifest_files = drop_dead_manifests(await manifests.read_list(head))
        policies = await load_policies(self._context.store, namespace)
        min_count = request.min_count
        if min_count is None:
            min_count = max(2, parse_int(with_policies(metadata, policies).properties, MIN_COUNT, MIN_COUNT_DEFAULT))
        groups = await self._choose_groups(manifests, manifest_files, metadata, min_count)
        if request.dry_run or not groups:
            return _make_report(manifest_files, groups, ())
        writer = await open_writer(self._context, self._manifests, entry.uuid, metadata)
        needed_paths: frozenset[str] = frozenset()
        try:
            written_groups = [await _write_group(writer, group, metadata) for group in groups]
            async with self._publisher.lock(namespace, name):
                try:
                    report, needed_paths = await self._commit(
                        caller, entry, metadata.format_version, writer, written_groups
                    )
                except CommitConflict:  # Another server has committed first.
                    report = _make_report(manifest_files, (), (), conflicts=len(groups))
        except CommitUnknown:
            # Keep all files until the outcome is known, because they may be live.
            needed_paths = frozenset(writer.written)
            raise
        finally:
            self._cleanup.remove([path for path in writer.written if path not in needed_paths])
        return report

    async def _load(self, namespace: NamespacePath, name: str) -> tuple[Entry, TableMetadata]:
        entry = await self._context.require_entry(EntryKind.TABLE, namespace, name)
        metadata = await self._context.documents.table(entry.metadata_location)
        check_uuid(entry, metadata)
        if metadata.format_version == 1:
            raise BadRequest(
                f"Cannot rewrite the manifests of {format_path(namespace, name)}: it has format version 1; upgrade it "
                f"to "
                "version 2"
            )
        return entry, metadata

    def _open_checked_manifests(self, metadata: TableMetadata, uuid: str) -> Manifests:
        check = partial(self._planner.check_paths, metadata, uuid)
        return self._manifests.with_checks(lambda paths: check(list(paths)), _DECODED_BYTES_MAX)

    async def _choose_groups(
        self, manifests: Manifests, manifest_files: Sequence[ManifestFile], metadata: TableMetadata, min_count: int
    ) -> list[_Group]:
        """Return the groups of manifests to rewrite, at most one group for each partition spec and content.

        The rewrite of a group is worth a commit, or the group consists of manifests with metrics that some readers
        cannot use.
        """
        manifests_by_kind: dict[tuple[int, int], list[ManifestFile]] = {}
        for manifest in manifest_files:
            manifests_by_kind.setdefault((manifest.partition_spec_id, manifest.content), []).append(manifest)
        groups = []
        for (spec_id, content), members in manifests_by_kind.items():
            if not can_encode_partitions(metadata, spec_id):
                continue
            chosen_manifests = _choose_smallest(members)
            group: _Group | None = None
            if len(chosen_manifests) >= min(min_count, _MANIFESTS_PER_PARTITION_MIN):
                entry_lists = [await manifests.read_entries(manifest, metadata) for manifest in chosen_manifests]
                group = await asyncio.to_thread(
                    _divide_entries, spec_id, content, chosen_manifests, entry_lists, metadata
                )
            if group is None or not _is_worth_a_commit(group, min_count):
                # Rewrite at least the manifests with metrics that readers cannot use.
                chosen_manifests = _choose_smallest(await self._find_wrong_metrics(members, metadata))
                if not chosen_manifests:
                    continue
                entry_lists = [await manifests.read_entries(manifest, metadata) for manifest in chosen_manifests]
                group = await asyncio.to_thread(
                    _divide_entries, spec_id, content, chosen_manifests, entry_lists, metadata
                )
            groups.append(group)
        return groups

    async def _find_wrong_metrics(self, members: Sequence[ManifestFile], metadata: TableMetadata) -> list[ManifestFile]:
        """Return the manifests with metrics that some readers cannot use.

        Manifests are read in order, as long as they have at most `_CHECKED_BYTES_MAX` bytes in total. Manifests with
        correct metrics are remembered, so that later rewrites read others. Encrypted manifests are skipped.
        """
        find_type = DeclaredTypes(metadata)
        wrong_manifests, remaining_bytes = [], _CHECKED_BYTES_MAX
        for manifest in members:
            if manifest.manifest_path in self._correct_paths or manifest.key_metadata is not None:
                continue
            remaining_bytes -= manifest.manifest_length
            if remaining_bytes < 0:
                break
            manifest_rows = await self._manifests.decode(manifest)
            if await asyncio.to_thread(has_unusable_metrics, manifest_rows, find_type):
                wrong_manifests.append(manifest)
            else:
                self._correct_paths.put(manifest.manifest_path, True, len(manifest.manifest_path))
        return wrong_manifests

    async def _commit(
        self,
        caller: Caller,
        old_entry: Entry,
        version: int,
        writer: SnapshotWriter,
        written_groups: Sequence[_WrittenGroup],
    ) -> tuple[ManifestReport, frozenset[str]]:
        """Commit the new manifests. The caller holds the lock of the table's commits.

        Returns:
            The report, and the files that the table now refers to.
        """
        requested_ms = self._context.clock.now_ms()
        entry, metadata = await self._load(old_entry.namespace, old_entry.name)
        head = metadata.current_snapshot
        manifest_files = (
            drop_dead_manifests(await self._open_checked_manifests(metadata, entry.uuid).read_list(head))
            if head is not None
            else ()
        )
        is_same_table = entry.uuid == old_entry.uuid and metadata.format_version == version
        matching_groups = [
            written_group for written_group in written_groups if is_same_table and written_group.fits(manifest_files)
        ]
        if not matching_groups:
            return _make_report(manifest_files, (), (), conflicts=len(written_groups)), frozenset()
        replaced_paths = {
            manifest.manifest_path for written_group in matching_groups for manifest in written_group.group.replaced
        }
        stored_manifests = [manifest for written_group in matching_groups for manifest in written_group.stored]
        unchanged_manifests = tuple(
            manifest for manifest in manifest_files if manifest.manifest_path not in replaced_paths
        )
        new_snapshot = await produce_snapshot(
            writer,
            SnapshotTerms(REPLACE, MAIN, _build_summary(matching_groups, len(unchanged_manifests))),
            stored_manifests,
            NOTHING,
            RewrittenManifests(unchanged_manifests, ()),
            metadata,
            head,
            merge=None,
            now_ms=self._context.clock.now_ms(),
        )
        event = CommitEvent(
            caller, requested_ms, new_snapshot.snapshot.snapshot_id, new_snapshot.summary, MANIFESTS_REWRITTEN
        )
        await self._publisher.publish(caller, entry, metadata, new_snapshot.metadata, events=[event], operations=())
        groups = [written_group.group for written_group in matching_groups]
        report = _make_report(
            manifest_files, groups, stored_manifests, conflicts=len(written_groups) - len(matching_groups)
        )
        return msgspec.structs.replace(report, snapshot_id=new_snapshot.snapshot.snapshot_id), new_snapshot.needed_paths


@asynccontextmanager
async def open_manifest_rewrite(
    catalog: Catalog, publisher: Publisher, planner: Planner
) -> AsyncIterator[ManifestRewrite]:
    """Open the rewrite of manifests. On exit, wait for the deletion of files that no snapshot refers to."""
    cleanup = Cleanup(catalog.context.objects)
    try:
        yield ManifestRewrite(catalog, publisher, planner, cleanup)
    finally:
        await cleanup.close()


def _make_manifest_identity(manifest: ManifestFile) -> tuple[str, int, int | None]:
    """Return the path of a manifest, and the values that its entries inherit.

    If these values are the same in another manifest list, the entries are also the same.
    """
    return manifest.manifest_path, manifest.sequence_number, manifest.first_row_id


def _choose_smallest(members: Sequence[ManifestFile]) -> list[ManifestFile]:
    """Return the smallest manifests that fit into the limits of a group, in the order of the manifest list.

    The merge of small manifests saves the most reads for the bytes that are written.
    """
    paths: set[str] = set()
    size_bytes = entries = 0
    for manifest in sorted(members, key=lambda manifest: manifest.manifest_length):
        size_bytes += manifest.manifest_length
        entries += (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)
        if size_bytes > GROUP_BYTES_MAX or entries > GROUP_ENTRIES_MAX:
            break
        paths.add(manifest.manifest_path)
    return [manifest for manifest in members if manifest.manifest_path in paths]


def _divide_entries(
    spec_id: int,
    content: int,
    manifests: Sequence[ManifestFile],
    entry_lists: Sequence[Sequence[ManifestEntry]],
    metadata: TableMetadata,
) -> _Group:
    """Divide the entries of manifests with the same spec and content among new manifests, with corrected metrics."""
    find_type = DeclaredTypes(metadata)
    former_entries = [entry for entries_of_manifest in entry_lists for entry in entries_of_manifest]
    entries = [
        msgspec.structs.replace(entry, status=EXISTING, file=repair_file(entry.file, find_type))
        for entry in former_entries
    ]
    repaired_count = sum(new.file is not old.file for new, old in zip(entries, former_entries, strict=True))
    chunks = divide_entries(
        entries, _count_fitting_entries(entries, metadata, spec_id, content), make_clustering_bound(metadata)
    )
    pairs_before, partitions = count_partition_manifests(entry_lists)
    pairs_after = count_partition_manifests(chunks)[0]
    return _Group(spec_id, content, tuple(manifests), chunks, pairs_before, pairs_after, partitions, repaired_count)


def _count_fitting_entries(
    entries: Sequence[ManifestEntry], metadata: TableMetadata, spec_id: int, content: int
) -> int:
    """Estimate the number of entries that fit into a manifest of the target size.

    The function encodes one entry, and a sample of entries. The difference gives the size of an entry without the
    header of a manifest.
    """

    def measure_size(count: int) -> int:
        return len(write_manifest(entries[:count], metadata=metadata, spec_id=spec_id, content=content).data)

    if len(entries) < 2:
        return 1
    count, header_bytes = min(len(entries), _SAMPLE_ENTRIES), measure_size(1)
    entry_bytes = max(1.0, (measure_size(count) - header_bytes) / (count - 1))
    return max(1, min(int((get_target_bytes(metadata) - header_bytes) / entry_bytes), ENTRIES_MAX))


def _is_worth_a_commit(group: _Group, min_count: int) -> bool:
    """Return whether the rewrite of the group is worth a commit.

    A rewrite is worth a commit if it replaces at least `min_count` manifests and leaves far fewer manifests. It is also
    worth a commit if the files of an average partition are in many manifests before the rewrite, and in far fewer
    manifests afterwards. The second condition counts pairs of a partition and a manifest that lists its files.
    """
    old_count, new_count = len(group.replaced), len(group.chunks)
    if old_count >= min_count and new_count <= REMAINING_MANIFESTS_MAX_FRACTION * old_count:
        return True
    are_partitions_spread = group.pairs_before >= _MANIFESTS_PER_PARTITION_MIN * group.partitions
    return are_partitions_spread and group.pairs_after <= _REMAINING_PAIRS_MAX_FRACTION * group.pairs_before


async def _write_group(writer: SnapshotWriter, group: _Group, metadata: TableMetadata) -> _WrittenGroup:
    work = [partial(writer.write_manifest, chunk, metadata, group.spec_id, group.content) for chunk in group.chunks]
    return _WrittenGroup(group, tuple(await gather(work, MANIFESTS_CONCURRENT_MAX)))


def _build_summary(written_groups: Sequence[_WrittenGroup], kept_count: int) -> dict[str, str]:
    """Return the summary that Iceberg's `rewrite_manifests` writes, with an entry that names Seamark as the writer."""
    created_count = sum(len(group.stored) for group in written_groups)
    replaced_count = sum(len(group.group.replaced) for group in written_groups)
    entries = sum(len(chunk) for group in written_groups for chunk in group.group.chunks)
    counts = {"created": created_count, "kept": kept_count, "replaced": replaced_count}
    name, value = REWRITTEN_BY_MARK
    return {**{f"manifests-{key}": str(count) for key, count in counts.items()}, "entries-processed": str(entries)} | {
        name: value
    }


def _make_report(
    manifest_files: Sequence[ManifestFile],
    groups: Sequence[_Group],
    stored_manifests: Sequence[StoredManifest],
    *,
    conflicts: int = 0,
) -> ManifestReport:
    replaced_manifests = [manifest for group in groups for manifest in group.replaced]
    partitions = max(1, sum(group.partitions for group in groups))
    return ManifestReport(
        manifests=len(manifest_files),
        manifests_before=len(replaced_manifests),
        manifests_after=sum(len(group.chunks) for group in groups),
        entries=sum(len(chunk) for group in groups for chunk in group.chunks),
        bytes_before=sum(manifest.manifest_length for manifest in replaced_manifests),
        bytes_after=sum(len(manifest.manifest.data) for manifest in stored_manifests),
        partition_manifests_before=round(sum(group.pairs_before for group in groups) / partitions, 2),
        partition_manifests_after=round(sum(group.pairs_after for group in groups) / partitions, 2),
        conflicts=conflicts,
        files_repaired=sum(group.repaired for group in groups),
    )
