"""Rebases a snapshot of an engine from an older parent onto the head of the branch, which is its newest snapshot.

A rebase is a three-way merge of manifest lists. The client has added the manifests that its snapshot has and its parent
does not have, and has dropped the manifests that its parent has and its snapshot does not have. The result is the list
of the head, with the added manifests and without the dropped manifests. If the server refused the commit, the engine
would produce the same result in its next attempt. The client's manifests stay unchanged. Only the manifest list is
rewritten, because sequence numbers and first row ids must follow those of the head (Iceberg spec: "Sequence Number
Inheritance", "First Row ID Inheritance"). The snapshot keeps its id, because Iceberg Java looks up the snapshot by this
id, and then deletes the files that it wrote and that the snapshot does not need.

A table property enables rebases of appends. An append is rebased only if every check succeeds. Otherwise the commit is
refused, as it would be without the property.

A table service must never force a writer to repeat its commit. Therefore three rebases do not need the property:

- An append is rebased over snapshots that only replace files by files with the same rows.
- Any snapshot is rebased over this server's rewrites of manifests, which change no data or delete file. If the client
  has replaced manifests that were rewritten meanwhile, the rewrite of manifests of the same partition spec and content
  is undone. The client's manifests are correct, because they were derived from the same files.
- Any snapshot is rebased over snapshots that only replace files. If the client has deleted rows of the replaced files,
  or may have deleted them, the replacement is undone. The client's snapshot then lists the files of its parent, which
  have the same rows.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import (
    ADDED,
    DATA_MANIFEST,
    EXISTING,
    ManifestEntry,
    assign_first_row_ids,
)
from seamark.formats.iceberg.metadata.compaction import REPLACEMENTS_UNDONE
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.replacement import is_replace
from seamark.formats.iceberg.metadata.requirements import AssertRefSnapshotId, Requirement, check_requirements
from seamark.formats.iceberg.metadata.snapshot import MAIN, Snapshot, SnapshotInput, SnapshotRef
from seamark.formats.iceberg.metadata.updates import AddSnapshot, SetSnapshotRef, Update
from seamark.formats.runtime.errors import CommitConflict, SeamarkError
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.values import TableCommit
from seamark.metaserver.commit.engine_commits.commit_manifests import CommitManifests
from seamark.metaserver.commit.publication import FILES_REPLACED, MANIFESTS_REWRITTEN
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.commit.snapshots.snapshot_writer import HeldFiles, SnapshotWriter
from seamark.metaserver.store.port import InstantFilter

PROPERTY = "seamark.commit.rebase"
"""The table property that enables rebases of appends if its value is "append"."""

_MANIFESTS_LIMIT_BYTES = 16 << 20
"""The maximum size of the manifests that a rebase reads for its checks. Writers usually write manifests of 8 MB."""
_DECODED_BYTES_MAX = 512 << 20
_INSTANTS_MAX = 200
"""The maximum number of the table's latest commits that are searched for rewrites of manifests."""
_NO_NUMBER = -1
_UNASSIGNED = {"sequence_number": _NO_NUMBER, "first_row_id": -(1 << 62)}
"""The values that decoding gives to inherited numbers, to distinguish them from explicit numbers."""
_NUMBER_PATTERN = re.compile(r"[0-9]{1,18}")

_TOTALS_OF_SUMMARY = {
    "total-data-files": ("added-data-files", "deleted-data-files"),
    "total-delete-files": ("added-delete-files", "removed-delete-files"),
    "total-records": ("added-records", "deleted-records"),
    "total-files-size": ("added-files-size", "removed-files-size"),
    "total-position-deletes": ("added-position-deletes", "removed-position-deletes"),
    "total-equality-deletes": ("added-equality-deletes", "removed-equality-deletes"),
}
"""For each total in a summary, the counts of the snapshot that are added to it and subtracted from it."""
_KEPT_MANIFESTS_KEY = "manifests-kept"
_RECORDED_UNDONE_MAX = 100
"""The maximum number of undone snapshots that the summary of a moved snapshot names."""


class RevisedUpdates(msgspec.Struct, frozen=True):
    """Updates that replace the engine's updates after a correction, or after a rebase onto a newer head."""

    updates: tuple[Update, ...]
    files: tuple[tuple[str, bytes], ...]
    """The locations and contents of manifests and manifest lists to write before the commit."""
    listed: tuple[ManifestFile, ...] = ()
    """The manifests of a rebased snapshot. The tuple is empty without a rebase."""


class SnapshotCommit(msgspec.Struct, frozen=True):
    """A request to add one snapshot to one branch."""

    snapshot: SnapshotInput
    branch: str

    @property
    def is_append(self) -> bool:
        return (self.snapshot.summary or {}).get("operation") == "append"


def find_snapshot_commit(base: TableMetadata, table: TableCommit) -> SnapshotCommit | None:
    """Return the snapshot of a commit, and its branch, if a rebase could move the snapshot.

    The result is None unless the commit adds exactly one snapshot to a branch, and all its requirements hold, except
    the requirement on the newest snapshot of the branch. The rebased snapshot follows that snapshot instead.
    """
    by_action = {update.action: update for update in table.updates}
    snapshot_update, ref_update = by_action.get(AddSnapshot.action), by_action.get(SetSnapshotRef.action)
    if (
        len(table.updates) != 2
        or not isinstance(snapshot_update, AddSnapshot)
        or not isinstance(ref_update, SetSnapshotRef)
    ):
        return None
    snapshot = snapshot_update.snapshot
    branch_requirements: list[AssertRefSnapshotId] = []
    other_requirements: list[Requirement] = []
    for requirement in table.requirements:
        if isinstance(requirement, AssertRefSnapshotId) and requirement.ref == ref_update.ref_name:
            branch_requirements.append(requirement)
        else:
            other_requirements.append(requirement)
    try:
        check_requirements(base, other_requirements)
    except CommitConflict:
        return None
    if (
        len(branch_requirements) != 1
        or ref_update.type.lower() != "branch"
        or ref_update.snapshot_id != snapshot.snapshot_id
    ):
        return None
    expected_id = branch_requirements[0].snapshot_id
    if expected_id is not None and expected_id != snapshot.parent_snapshot_id:
        return None
    return SnapshotCommit(snapshot, ref_update.ref_name)


class CannotRebase(Exception):
    """Raised with the reason why a snapshot cannot be rebased: changed so that it follows a newer current snapshot."""


def can_rebase_appends(metadata: TableMetadata) -> bool:
    return metadata.properties.get(PROPERTY, "").lower() == "append"


async def rebase_snapshot(
    context: CatalogContext,
    manifests: CommitManifests,
    uuid: str,
    folder: str,
    base: TableMetadata,
    commit: SnapshotCommit,
    *,
    is_single: bool,
    fresh_snapshot: Snapshot | None = None,
) -> RevisedUpdates | None:
    """Move a snapshot onto the head of its branch.

    Args:
        context: The context of the catalog.
        manifests: The manifests that the commit has already read.
        uuid: The table's UUID.
        folder: The folder for the new manifest list.
        base: The table's current metadata.
        commit: The snapshot, which is based on an older head.
        is_single: Whether the request commits only one table.
        fresh_snapshot: The fresh snapshot of a stream on which the snapshot is based, or None if its parent is a
            snapshot of the table.

    Returns:
        The updates with the moved snapshot, or None if the snapshot cannot be rebased.
    """
    try:
        rebase = _Rebase(context, manifests, uuid, folder, base, commit, fresh_snapshot)
        if fresh_snapshot is not None:
            # An append has no conflicts. Its parent lists the fresh files of the stream, so they do not count as added.
            return await rebase.move_onto_head() if commit.is_append and commit.branch == MAIN else None
        newer_snapshots = rebase.list_newer_snapshots()
        is_enabled = is_single and can_rebase_appends(base)
        are_all_replacements = newer_snapshots is not None and all(map(is_replace, newer_snapshots))
        if commit.is_append and (is_enabled or are_all_replacements):
            with contextlib.suppress(CannotRebase):
                return await rebase.move_onto_head()
        if not are_all_replacements or not newer_snapshots:
            return None
        recorded_updates = await _read_recorded_updates(context, uuid, newer_snapshots)
        if recorded_updates == {MANIFESTS_REWRITTEN}:
            return await rebase.rebase_onto_rewrites()
        if recorded_updates <= {MANIFESTS_REWRITTEN, FILES_REPLACED}:
            return await rebase.undo_replacements(newer_snapshots)
    except (CannotRebase, SeamarkError):
        # If the storage is unavailable, refuse the commit: clients retry after a refusal, but may give up after other
        # errors.
        pass
    return None


async def _read_recorded_updates(
    context: CatalogContext, uuid: str, snapshots: Sequence[Snapshot]
) -> set[tuple[str, ...]]:
    """Return the kinds of updates that this server has recorded for the snapshots.

    The result contains an empty tuple if a snapshot has no record. The summary of a snapshot is not used, because any
    client can write it.
    """
    instant_filter = InstantFilter(uuid=uuid, action="commit", newest_first=True, archived=False)
    instants = await context.store.list_instants(instant_filter, _INSTANTS_MAX)
    updates: dict[int | None, tuple[str, ...]] = {}
    # Instants are the events of the timeline, the newest first. Use the newest instant of each snapshot id, because a
    # new snapshot may have the id of a removed snapshot.
    for instant in instants:
        updates.setdefault(instant.snapshot_id, tuple(instant.summary.get("updates", ())))
    return {updates.get(snapshot.snapshot_id, ()) for snapshot in snapshots}


class _Lists(msgspec.Struct, frozen=True):
    """Manifest lists, with the manifests by path.

    Attributes:
        parent: The manifests of the parent of the client's snapshot.
        own: The manifests of the client's snapshot.
        head: The manifests of the newest snapshot of the branch.
    """

    parent: dict[str, ManifestFile]
    own: dict[str, ManifestFile]
    head: dict[str, ManifestFile]

    @property
    def added(self) -> list[ManifestFile]:
        return [manifest for path, manifest in self.own.items() if path not in self.parent]

    @property
    def dropped(self) -> list[ManifestFile]:
        """The manifests that the client's snapshot no longer lists.

        Manifests that list only removed files are left out, because engines drop them without a merge.
        """
        manifests = [manifest for path, manifest in self.parent.items() if path not in self.own]
        return [
            manifest for manifest in manifests if (manifest.added_files_count, manifest.existing_files_count) != (0, 0)
        ]


class _Rebase:
    """Moves one snapshot of a client onto the head of its branch, which is the newest snapshot of the branch."""

    def __init__(
        self,
        context: CatalogContext,
        manifests: CommitManifests,
        uuid: str,
        folder: str,
        base: TableMetadata,
        commit: SnapshotCommit,
        fresh_snapshot: Snapshot | None,
    ) -> None:
        """Check the form of the snapshot and of the branch.

        Args:
            context: The storage and the clock.
            manifests: Reads the manifests of the table and of the client's snapshot.
            uuid: The UUID of the table.
            folder: The folder of the table's metadata.
            base: The current metadata.
            commit: The client's snapshot and its branch.
            fresh_snapshot: The fresh snapshot of a stream on which the client's snapshot is based, or None.

        Raises:
            CannotRebase: The branch does not exist, the format version has no sequence numbers, or the table cannot
                contain the snapshot.
        """
        snapshot = commit.snapshot
        ref = base.refs.get(commit.branch)
        head = base.snapshot(ref.snapshot_id) if ref is not None and ref.is_branch else None
        if ref is None or head is None:
            raise CannotRebase(f"the branch {commit.branch} does not exist")
        if base.format_version < 2 or not snapshot.sequence_number:
            raise CannotRebase("the table or the client's snapshot has no sequence numbers")
        if base.snapshot(snapshot.snapshot_id) is not None:
            raise CannotRebase(f"the table already has a snapshot with the id {snapshot.snapshot_id}")
        if snapshot.schema_id is not None and base.schema(snapshot.schema_id) is None:
            raise CannotRebase(f"the schema {snapshot.schema_id} of the snapshot does not exist")
        self._base, self._commit, self._fresh_snapshot = base, commit, fresh_snapshot
        self._ref: SnapshotRef = ref
        self._head: Snapshot = head
        self._sequence_number = base.last_sequence_number + 1
        self._manifests = manifests.with_checks(uuid, _DECODED_BYTES_MAX)
        self._files = HeldFiles()
        own_manifests = manifests.unchecked.own
        self._writer = SnapshotWriter(self._files, context.clock, own_manifests, folder, snapshot.snapshot_id)

    async def move_onto_head(self) -> RevisedUpdates:
        """Move an append onto the head, which is the current snapshot of the branch.

        The result lists the client's new manifests and the manifests of the head. If the client has merged old
        manifests into a new manifest, the result lists the new manifest instead of the old manifests.
        """
        lists = await self._read_lists()
        self._check_added(lists)
        own_manifests, merged_paths = await self._select_own_manifests(lists)
        unmerged_manifests = [manifest for path, manifest in lists.head.items() if path not in merged_paths]
        return await self._write_list([*own_manifests, *unmerged_manifests], len(unmerged_manifests))

    def list_newer_snapshots(self) -> list[Snapshot] | None:
        """Return the snapshots of the branch after the parent of the client's snapshot, the newest first.

        The result is None if the parent is not in the history of the branch, or if there is no parent.
        """
        newer_snapshots: list[Snapshot] = []
        snapshot: Snapshot | None = self._head
        while snapshot is not None and snapshot.snapshot_id != self._commit.snapshot.parent_snapshot_id:
            newer_snapshots.append(snapshot)
            parent_id = snapshot.parent_snapshot_id
            snapshot = None if parent_id is None else self._base.snapshot(parent_id)
        return None if snapshot is None else newer_snapshots

    async def rebase_onto_rewrites(self) -> RevisedUpdates:
        """Apply the client's snapshot on top of snapshots that only rewrite manifests.

        The result lists the client's new manifests. For files that the client has not changed, it lists the manifests
        of the head, which is the current snapshot.

        The kind of a manifest is its partition spec and content. The client may have replaced a manifest that was also
        rewritten. The rewritten manifests of this kind are then not used: the result lists the parent's manifests of
        this kind instead.
        """
        # `lists.added` has the manifests that only the client's snapshot lists, not its parent. `lists.dropped` has
        # those that only its parent lists. Renumbering gives a manifest new sequence numbers and row ids.
        lists = await self._read_lists()
        self._check_can_renumber(lists)
        dropped_paths = {manifest.manifest_path for manifest in lists.dropped}
        # The kinds of the manifests that the client has replaced, and that the rewrites have replaced as well.
        kinds_replaced_twice = {
            _get_kind(manifest) for manifest in lists.dropped if manifest.manifest_path not in lists.head
        }
        kept_manifests = [
            manifest
            for path, manifest in lists.head.items()
            if path not in dropped_paths and (path in lists.parent or _get_kind(manifest) not in kinds_replaced_twice)
        ]
        kept_manifests += [
            manifest
            for path, manifest in lists.parent.items()
            if path in lists.own and path not in lists.head and _get_kind(manifest) in kinds_replaced_twice
        ]
        renumbered_manifests = [self._renumber(manifest) for manifest in lists.added]
        return await self._write_list([*renumbered_manifests, *kept_manifests], len(kept_manifests))

    async def undo_replacements(self, undone: Sequence[Snapshot]) -> RevisedUpdates:
        """Undo snapshots that only replace files by files with the same rows.

        The result lists the client's new manifests, and the unchanged manifests of its parent. The parent has not
        expired, so its files exist.

        The undone snapshots leave the history of the branch, as after a rollback, for two reasons. Iceberg's
        incremental clean-up in engines deletes the files that a snapshot in the history has removed, but the table has
        the old files again. And an engine that has deleted rows of the new files by position would not notice that the
        new files were removed, because no snapshot in the history records their removal.
        """
        lists = await self._read_lists()
        self._check_can_renumber(lists)
        inherited_manifests = [manifest for path, manifest in lists.parent.items() if path in lists.own]
        renumbered_manifests = [self._renumber(manifest) for manifest in lists.added]
        parent = self._base.snapshot(self._commit.snapshot.parent_snapshot_id or 0)  # No snapshot has the id 0.
        return await self._write_list(
            [*renumbered_manifests, *inherited_manifests], len(inherited_manifests), parent, undone
        )

    def _check_can_renumber(self, lists: _Lists) -> None:
        """Check that the client's new manifests can get new sequence numbers and row ids.

        They must have the id and the sequence number of the client's snapshot and a partition spec of the table. They
        must not be encrypted, and the branch must not list them yet. All rows of the parent must have row ids.

        Raises:
            CannotRebase: A check fails.
        """
        snapshot, specs = self._commit.snapshot, {spec.spec_id for spec in self._base.partition_specs}
        for manifest in lists.added:
            is_movable = (
                manifest.added_snapshot_id == snapshot.snapshot_id
                and manifest.sequence_number == snapshot.sequence_number
                and manifest.partition_spec_id in specs
                and manifest.key_metadata is None
                and manifest.manifest_path not in lists.head
            )
            if not is_movable:
                raise CannotRebase(
                    f"{manifest.manifest_path} cannot get a new sequence number: it belongs to another snapshot, is "
                    "encrypted, or has a partition spec that the table does not have, or the current snapshot lists it"
                )
        if self._base.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION and any(
            manifest.content == 0 and manifest.first_row_id is None for manifest in lists.parent.values()
        ):
            raise CannotRebase("rows have received row ids since the client read the table")

    async def _write_list(
        self,
        manifests: list[ManifestFile],
        others_count: int,
        parent: Snapshot | None = None,
        undone: Sequence[Snapshot] = (),
    ) -> RevisedUpdates:
        """Write a new manifest list, and return the updates with the moved snapshot.

        Args:
            manifests: The manifests to list.
            others_count: The number of listed manifests that the client did not write.
            parent: The snapshot to whose files the client's change is applied. None means the newest of the branch.
            undone: The snapshots after `parent` that leave the history.
        """
        parent = parent or self._head
        next_row_id = self._base.next_row_id
        if self._base.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION:
            manifests, next_row_id = assign_first_row_ids(manifests, next_row_id)
        manifest_files = tuple(manifests)
        location = await self._writer.write_manifest_list(
            manifest_files, self._base, parent.snapshot_id, self._sequence_number
        )
        summary = self._commit.snapshot.summary or {}
        summary = rebase_summary(summary, parent.build_summary_map(), others_count)
        if undone:
            summary[REPLACEMENTS_UNDONE] = ",".join(
                str(snapshot.snapshot_id) for snapshot in undone[:_RECORDED_UNDONE_MAX]
            )
        updates = self._build_updates(parent, location, summary, next_row_id - self._base.next_row_id)
        return RevisedUpdates(updates, tuple(self._files.files), manifest_files)

    async def _read_lists(self) -> _Lists:
        """Read the manifest lists of the client's snapshot, its parent, and the newest snapshot of the branch.

        The parent may be a fresh snapshot of a stream table, which no metadata file contains.

        Raises:
            CannotRebase: The parent of the client's snapshot has expired.
        """
        snapshot = self._commit.snapshot
        parent = self._fresh_snapshot
        if parent is None and snapshot.parent_snapshot_id is not None:
            parent = self._base.snapshot(snapshot.parent_snapshot_id)
            if parent is None:
                raise CannotRebase("the parent of the client's snapshot has expired")
        published = self._manifests.published
        snapshot_manifests = await _read_list(self._manifests.own, snapshot)
        head_manifests = await _read_list(published, self._head)
        parent_manifests: dict[str, ManifestFile] = {}
        if parent is not None:
            parent_manifests = head_manifests if parent is self._head else await _read_list(published, parent)
        return _Lists(parent_manifests, snapshot_manifests, head_manifests)

    def _check_added(self, lists: _Lists) -> None:
        """Check that the added manifests contain no deletes, and that their numbers of added files match the summary.

        They may also contain files of the parent, because the client may have merged manifests of data files.

        Raises:
            CannotRebase: A check fails.
        """
        snapshot, specs = self._commit.snapshot, {spec.spec_id for spec in self._base.partition_specs}
        for manifest in lists.added:
            has_only_added_files = (
                manifest.content == 0
                and manifest.added_snapshot_id == snapshot.snapshot_id
                and manifest.sequence_number == snapshot.sequence_number
                and manifest.partition_spec_id in specs
                and manifest.deleted_files_count == 0
                and None not in (manifest.added_files_count, manifest.existing_files_count)
                and manifest.key_metadata is None
                and manifest.manifest_path not in lists.head
            )
            if not has_only_added_files:
                raise CannotRebase(f"{manifest.manifest_path} contains more than added data files")
        if any(manifest.content != 0 for manifest in lists.dropped):
            raise CannotRebase("delete manifests were merged")
        stated_count = (snapshot.summary or {}).get("added-data-files", "0")
        listed_count = sum(manifest.added_files_count or 0 for manifest in lists.added)
        if stated_count != str(listed_count):
            raise CannotRebase(
                f"the summary states {stated_count} added data files, and the manifest list {listed_count}"
            )

    async def _select_own_manifests(self, lists: _Lists) -> tuple[list[ManifestFile], set[str]]:
        """Return the manifests that list the client's added files.

        The client may have merged manifests of its parent into a new manifest. If another commit has replaced one of
        these manifests since, the merge is undone: a new manifest lists only the client's added files. The merged files
        stay in the manifests of the head, which is the current snapshot of the branch. The merge is also undone if the
        merged rows have received row ids since.

        Returns:
            The manifests with the client's added files, and the paths of the manifests of the head that they replace.
            The paths are empty if the client has merged no manifests, or if its merge is undone.

        Raises:
            CannotRebase: The manifests contain more than the client's added files and unchanged merged entries.
        """
        snapshot_id, added_manifests, dropped_manifests = self._commit.snapshot.snapshot_id, lists.added, lists.dropped
        own_entry_lists = await self._read_entry_lists(
            self._manifests.own, [structs.replace(manifest, **_UNASSIGNED) for manifest in added_manifests]
        )
        own_entries = [entry for entries in own_entry_lists for entry in entries]
        for entry in (entry for entry in own_entries if entry.status == ADDED):
            numbers = (entry.snapshot_id, entry.sequence_number, entry.file_sequence_number)
            if numbers != (snapshot_id, _NO_NUMBER, _NO_NUMBER) or _get_row_id(entry) is not None:
                raise CannotRebase("an entry has sequence numbers that the client chose")
        are_listed = all(manifest.manifest_path in lists.head for manifest in dropped_manifests)
        former_manifests = (
            [lists.head[manifest.manifest_path] for manifest in dropped_manifests] if are_listed else dropped_manifests
        )
        former_entry_lists = await self._read_entry_lists(self._manifests.published, former_manifests)
        former_entries = [entry for entries in former_entry_lists for entry in entries]
        existing_entries = [entry for entry in own_entries if entry.status == EXISTING]
        if _count_identities(existing_entries) != _count_identities(former_entries):
            raise CannotRebase("the merged entries differ from the entries of the parent")
        keeps_merge = are_listed and _map_row_ids(existing_entries) == _map_row_ids(former_entries)
        own_manifests: list[ManifestFile] = []
        for manifest, manifest_entries in zip(added_manifests, own_entry_lists, strict=True):
            if keeps_merge or not manifest.existing_files_count:
                own_manifests.append(self._renumber(manifest))
            elif manifest.added_files_count:
                written_entries = [
                    _mark_added(entry, snapshot_id) for entry in manifest_entries if entry.status == ADDED
                ]
                spec_id = manifest.partition_spec_id
                stored_manifest = await self._writer.write_manifest(written_entries, self._base, spec_id, DATA_MANIFEST)
                own_manifests.append(stored_manifest.describe(snapshot_id, self._sequence_number))
        return own_manifests, {manifest.manifest_path for manifest in dropped_manifests} if keeps_merge else set()

    async def _read_entry_lists(
        self, source: Manifests, manifests: Sequence[ManifestFile]
    ) -> list[list[ManifestEntry]]:
        """Return the entries of each manifest.

        Raises:
            CannotRebase: The manifests are too large, or do not have the number of entries that their list states.
        """
        size_bytes = sum(manifest.manifest_length for manifest in manifests)
        if size_bytes > _MANIFESTS_LIMIT_BYTES:
            raise CannotRebase(
                f"the manifests to check have {size_bytes:,} bytes; the limit is {_MANIFESTS_LIMIT_BYTES:,}"
            )
        entry_lists = []
        for manifest in manifests:
            entries = await source.read_entries(manifest, self._base)
            if len(entries) != (manifest.added_files_count or 0) + (manifest.existing_files_count or 0):
                raise CannotRebase(f"{manifest.manifest_path} does not have the content that its list states")
            entry_lists.append(entries)
        return entry_lists

    def _renumber(self, manifest: ManifestFile) -> ManifestFile:
        """Return the client's manifest with the sequence number of the rebased snapshot, which its entries inherit.

        The lowest sequence number of a manifest may be that of the client's snapshot. Then it changes as well.
        Otherwise it belongs to an older file. The row ids are assigned again.
        """
        is_own_lowest = manifest.min_sequence_number == manifest.sequence_number
        return structs.replace(
            manifest,
            sequence_number=self._sequence_number,
            min_sequence_number=self._sequence_number if is_own_lowest else manifest.min_sequence_number,
            first_row_id=None,
        )

    def _build_updates(
        self, parent: Snapshot, manifest_list: str, summary: dict[str, str], added_rows: int
    ) -> tuple[Update, ...]:
        snapshot = self._commit.snapshot
        # After a rollback of the branch, the last entry of the snapshot log is later than the branch's newest snapshot.
        logged_ms = [entry.timestamp_ms for entry in self._base.snapshot_log[-1:]]
        rebased_snapshot = structs.replace(
            snapshot,
            parent_snapshot_id=parent.snapshot_id,
            sequence_number=self._sequence_number,
            timestamp_ms=max(snapshot.timestamp_ms, self._head.timestamp_ms, *logged_ms),
            manifest_list=manifest_list,
            summary=summary,
        )
        if self._base.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION:
            rebased_snapshot = structs.replace(
                rebased_snapshot, first_row_id=self._base.next_row_id, added_rows=added_rows
            )
        # Keep the current retention of the branch. The client has sent the retention that it read earlier.
        ref = structs.replace(self._ref, snapshot_id=snapshot.snapshot_id)
        return AddSnapshot(rebased_snapshot), SetSnapshotRef.build_for_ref(self._commit.branch, ref)


async def _read_list(manifests: Manifests, snapshot: Snapshot | SnapshotInput) -> dict[str, ManifestFile]:
    if snapshot.manifest_list is None:
        raise CannotRebase("a snapshot has no manifest list")
    if snapshot.key_id is not None:
        raise CannotRebase("the manifest list of a snapshot is encrypted")
    manifest_files = await manifests.read_list_at(snapshot.manifest_list)
    manifest_by_path = {manifest.manifest_path: manifest for manifest in manifest_files}
    if len(manifest_by_path) != len(manifest_files):
        raise CannotRebase("a manifest list names a manifest twice")
    return manifest_by_path


def _get_kind(manifest: ManifestFile) -> tuple[int, int]:
    """Return the kind of a manifest: its partition spec and content. Each kind is rewritten separately."""
    return manifest.partition_spec_id, manifest.content


def _mark_added(entry: ManifestEntry, snapshot_id: int) -> ManifestEntry:
    """Return the entry as an added entry that inherits its sequence numbers.

    The numbers are None, because an entry without numbers inherits them from its manifest.
    """
    return structs.replace(entry, snapshot_id=snapshot_id, sequence_number=None, file_sequence_number=None)


def _get_row_id(entry: ManifestEntry) -> int | None:
    """Return the explicit row id of an entry, or None if the entry inherits its row id.

    A negative id represents a missing id.
    """
    row_id = entry.file.first_row_id
    return None if row_id is None or row_id < 0 else row_id


def _map_row_ids(entries: Iterable[ManifestEntry]) -> dict[str, int | None]:
    return {entry.file.file_path: _get_row_id(entry) for entry in entries}


def _count_identities(entries: Iterable[ManifestEntry]) -> Counter[tuple[Any, ...]]:
    """Count the entries by all fields that a merge must not change, except row ids.

    Equal counts before and after a merge show that it has lost, added and changed no entry.
    """
    return Counter(
        (
            entry.file.file_path,
            entry.file.record_count,
            entry.file.file_size_in_bytes,
            entry.snapshot_id,
            entry.sequence_number,
            entry.file_sequence_number,
        )
        for entry in entries
    )


def rebase_summary(summary: Mapping[str, str], head: Mapping[str, str], manifests_kept: int) -> dict[str, str]:
    """Return the client's summary with totals that are computed from the totals of the branch's newest snapshot.

    A total that this snapshot does not have, or that is not a number, is removed. The number of kept manifests is set
    again.

    Args:
        summary: The client's summary.
        head: The summary of the newest snapshot of the branch.
        manifests_kept: The number of listed manifests that the client did not write.
    """
    rebased_summary = dict(summary)
    for total, (added_field, removed_field) in _TOTALS_OF_SUMMARY.items():
        rebased_summary.pop(total, None)
        terms = [head.get(total), summary.get(added_field, "0"), summary.get(removed_field, "0")]
        if all(term is not None and _NUMBER_PATTERN.fullmatch(term) for term in terms):
            head_total, added_count, removed_count = (int(str(term)) for term in terms)
            rebased_summary[total] = str(head_total + added_count - removed_count)
    if _KEPT_MANIFESTS_KEY in rebased_summary:
        rebased_summary[_KEPT_MANIFESTS_KEY] = str(manifests_kept)
    return rebased_summary
