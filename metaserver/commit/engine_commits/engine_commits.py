"""Commits the updates that engines send in the REST protocol, for one table or for several.

A commit is optimistic: it applies the updates to the current metadata, and publishes the result. If another commit is
published first, it tries again. If a client repeats a commit that adds a snapshot and was already applied, the client
receives the outcome of the first request.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.requirements import (
    AssertUuid,
    Requirement,
    check_requirements,
    read_requirements,
)
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.metadata.updates import AddSnapshot, AssignUuid, Update, apply_updates
from seamark.formats.protocol.wire import check_changeable, check_name, check_new_name, format_path
from seamark.formats.runtime.errors import (
    BadRequest,
    CommitConflict,
    NoSuchTable,
    NotFound,
    RequestError,
    SeamarkError,
)
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.large_requests import index_columns
from seamark.metaserver.catalog.ownership.own_files import check_added
from seamark.metaserver.catalog.pointers import (
    check_metadata_folder,
    check_name_free,
    check_uuid,
    get_uuid,
    is_derived,
    table_uuid,
)
from seamark.metaserver.catalog.values import (
    Caller,
    ExaminedTable,
    LoadedTable,
    TableChange,
    TableCommit,
    read_table_commit,
)
from seamark.metaserver.commit.engine_commits.commit_manifests import CommitManifests, open_published_manifests
from seamark.metaserver.commit.engine_commits.manifest_corrections import ManifestCorrections
from seamark.metaserver.commit.engine_commits.rebase import (
    RevisedUpdates,
    can_rebase_appends,
    find_snapshot_commit,
    rebase_snapshot,
)
from seamark.metaserver.commit.engine_commits.removed_specs import check_removed_specs
from seamark.metaserver.commit.publication import (
    CommitEvent,
    PreparedCommit,
    Publisher,
    Races,
    make_pointer_moved_error,
)
from seamark.metaserver.commit.removed_files import check_stored_snapshots
from seamark.metaserver.store.model import Entry, EntryKind, Instant, NamespacePath
from seamark.metaserver.store.operations import CheckFence, Operation
from seamark.metaserver.store.port import LostRace

_PRELOADING_COMMITS_MAX = 16
"""The maximum number of commits that read manifests while they wait for a lock. Further commits read under the lock."""


class _Commit(msgspec.Struct, frozen=True):
    """The values that all attempts of a commit share."""

    caller: Caller
    tables: Sequence[TableCommit]
    is_single: bool
    """Whether the response to the request contains the table. Otherwise the response is 204 without a body."""
    requested_ms: int
    """The time of the request."""
    fingerprint: str | None
    """The hash by which a repeat of the commit is found, or None if the commit adds no snapshot."""
    manifests: CommitManifests
    """Reads the manifests of committed snapshots, and the manifests that the engine has written for this commit."""
    fresh_snapshot: Snapshot | None
    """The fresh snapshot on which the only snapshot of the commit is based, or None.

    A fresh snapshot also has rows of a stream that no committed snapshot has.
    """
    fences: Sequence[CheckFence]
    """The checks of leases that the transaction contains. They fail if this process has lost a lease."""
    examined: Mapping[tuple[NamespacePath, str], ExaminedTable]
    """The tables whose streams were prepared for the commit, by name."""


class AlreadyCommitted(Exception):
    """Raised if the same commit was already applied. The client then gets the first outcome, and not an error.

    Attributes:
        outcome: The table in the outcome of the first request. The list is empty for a transaction.
    """

    def __init__(self, outcome: list[LoadedTable]) -> None:
        super().__init__()
        self.outcome = outcome


class EngineCommits:
    """Commits the updates of engines. A server has one instance."""

    def __init__(self, catalog: Catalog, publisher: Publisher) -> None:
        self._context = catalog.context
        self._tables = catalog.tables
        self._plans = catalog.plan_tables
        self._published = open_published_manifests(catalog.context)
        self._corrections = ManifestCorrections(catalog.context.clock)
        self._preloading_commits = 0
        self.publisher = publisher

    async def commit_table(
        self,
        caller: Caller,
        namespace: NamespacePath,
        name: str,
        requirements: list[dict[str, Any]],
        updates: list[dict[str, Any]],
        *,
        fresh_snapshot: Snapshot | None = None,
        fences: Sequence[CheckFence] = (),
        examined: Mapping[tuple[NamespacePath, str], ExaminedTable] = {},
    ) -> LoadedTable:
        """Commit updates of one table. See `commit`. The caller has checked the name of the table.

        Args:
            caller: The principal that commits.
            namespace: The namespace of the table.
            name: The name of the table.
            requirements: The requirements of the commit.
            updates: The updates.
            fresh_snapshot: The fresh snapshot on which the added snapshot is based, or None. A fresh snapshot also has
                files with rows of a stream that no committed snapshot has. An append is rebased onto the current
                snapshot, without these files. Any other commit is refused.
            fences: The checks of leases that the transaction of the commit contains.
            examined: The tables whose streams were prepared for the commit, by name. The commit is refused if a name
                refers to another table now.
        """
        change = TableChange(namespace, name, requirements, updates)
        return (
            await self.commit(
                caller, [change], is_single=True, fresh_snapshot=fresh_snapshot, fences=fences, examined=examined
            )
        )[0]

    async def commit_transaction(
        self,
        caller: Caller,
        changes: Sequence[TableChange],
        *,
        fresh_snapshot: Snapshot | None = None,
        fences: Sequence[CheckFence] = (),
        examined: Mapping[tuple[NamespacePath, str], ExaminedTable] = {},
    ) -> None:
        """Commit updates of several tables in one transaction of the store. See `commit`.

        Args:
            fresh_snapshot: The snapshot with uncommitted rows of a stream on which the change of a single table is
                based, or None. It must be None for several tables.
            fences: The checks of leases that the transaction of the commit contains.
            examined: The tables whose streams were prepared for the commit, by name.
            caller: The principal that commits.
            changes: The changes, at least one.
        """
        if not changes:
            raise BadRequest("table-changes is empty; it needs at least one change")
        for change in changes:
            check_changeable(check_name(change.name, "table name"))
        await self.commit(
            caller, changes, is_single=False, fresh_snapshot=fresh_snapshot, fences=fences, examined=examined
        )

    async def load_committed(
        self, namespace: NamespacePath, name: str, requirements: list[dict[str, Any]]
    ) -> LoadedTable:
        """Return the current state of a table after a successful commit whose metadata file has been deleted since.

        Args:
            namespace: The namespace of the table.
            name: The name of the table.
            requirements: The requirements of the commit.

        Raises:
            CommitUnknown: The name refers to no table, or to a table with another UUID than in `requirements`.
        """
        uuids = {uuid.lower() for uuid in _list_required_uuids(read_requirements(requirements))}
        try:
            loaded_table = await self._tables.load(namespace, name)
        except NotFound:
            pass
        else:
            assert loaded_table.entry is not None
            if uuids <= {loaded_table.entry.uuid.lower()}:
                return loaded_table
        raise make_pointer_moved_error(namespace, name)

    async def commit(
        self,
        caller: Caller,
        changes: Sequence[TableChange],
        *,
        is_single: bool,
        fresh_snapshot: Snapshot | None = None,
        fences: Sequence[CheckFence] = (),
        examined: Mapping[tuple[NamespacePath, str], ExaminedTable] = {},
    ) -> list[LoadedTable]:
        """Commit all changes or none.

        Args:
            caller: The principal that commits.
            changes: The updates and requirements of each table.
            is_single: Whether the request commits one table, not a transaction. The answer to a repeated request is
                then the table. The answer to a repeated transaction is an empty 204.
            fresh_snapshot: The snapshot with uncommitted rows of a stream on which the change is based, or None.
            fences: The checks of leases that the transaction of the commit contains.
            examined: The tables whose streams were prepared for the commit, by name.

        Raises:
            NoSuchTable: A table does not exist, and its updates do not create it.
            AlreadyExists: The name of a new table is taken.
            BadRequest: The updates are malformed or cannot be applied.
            CommitConflict: A requirement fails, or concurrent commits conflicted in every attempt.
            CommitUnknown: The outcome is unknown.
        """
        # Lock the tables in a fixed order, so that two transactions do not deadlock on database rows.
        changes = sorted(changes, key=lambda change: (change.namespace, change.name))
        names = [(change.namespace, change.name) for change in changes]
        if len(set(names)) != len(names):
            repeated_name = next(name for name, next_name in itertools.pairwise(names) if name == next_name)
            raise BadRequest(f"The transaction has two changes for {format_path(*repeated_name)}; merge them")
        context = self._context
        parse = partial(_parse_changes, changes)
        tables, fingerprint = await context.large.run_by_size(caller.principal_name, caller.request_bytes, parse)
        if any(table.added_snapshots or table.removed_snapshot_ids for table in tables):
            await self._plans.drop_plans_of_removed_snapshots(tables)
        manifests = CommitManifests(context, self._published)
        commit = _Commit(
            caller, tables, is_single, context.clock.now_ms(), fingerprint, manifests, fresh_snapshot, fences, examined
        )
        waiting_tables = [
            table for table in tables if table.is_append and self.publisher.is_locked(table.namespace, table.name)
        ]
        if not waiting_tables or self._preloading_commits >= _PRELOADING_COMMITS_MAX:
            return await self._commit_locked(commit, names)
        self._preloading_commits += 1
        try:
            for table in waiting_tables:
                await self._preload(commit, table)
            return await self._commit_locked(commit, names)
        finally:
            self._preloading_commits -= 1

    async def _commit_locked(self, commit: _Commit, names: Sequence[tuple[NamespacePath, str]]) -> list[LoadedTable]:
        """Commit while holding the locks of the tables.

        If the same commit was already applied, the result is its first outcome. Refused commits of snapshots are
        counted: after several of them, the engine gets priority. A successful commit of a snapshot ends the priority.

        Args:
            commit: The commit.
            names: The full names of its tables.

        Raises:
            CommitConflict: The commit is refused.
        """
        caller, tables = commit.caller, commit.tables
        async with self.publisher.lock_all(names):
            try:
                async with self.publisher.make_race_counter() as races:
                    outcome = await self._publish_with_retries(commit, races)
            except AlreadyCommitted as repeat:
                return repeat.outcome
            except CommitConflict:
                for table in tables:
                    await self._record_refusal(caller, table)
                raise
        for table, loaded_table in zip(tables, outcome, strict=True):
            if table.added_snapshots:
                self._end_priority(caller, table, loaded_table)
        return outcome

    async def _preload(self, commit: _Commit, table: TableCommit) -> None:
        """Read the new manifests while another commit holds the lock, if a rebase would need them.

        A rebase moves a refused snapshot onto the new current snapshot. If the table does not allow rebases, the
        manifests are not read, because the server will probably refuse this commit after the other commit.
        """
        with contextlib.suppress(SeamarkError):
            entry, base = await self._load_base(table)
            if entry is not None and base is not None and can_rebase_appends(base):
                await self._corrections.preload(commit.manifests, entry.uuid, table.updates)

    async def _publish_with_retries(self, commit: _Commit, races: Races) -> list[LoadedTable]:
        """Try the commit until it is published or refused.

        A lost race against another process does not count as a conflict, because `Races` limits the number of races. An
        error is replaced by AlreadyCommitted if it comes from a repeat of a commit.

        Raises:
            AlreadyCommitted: The same commit was already applied.
        """
        retries, conflicts = self._context.settings.commit_retries, 0
        while True:
            try:
                prepared_commits = [await self._prepare(commit, table) for table in commit.tables]
                try:
                    return await self.publisher.publish_all(
                        prepared_commits, [*commit.fences, *self._build_record(commit, prepared_commits)]
                    )
                except LostRace:
                    if not await races.record_loss({prepared.uuid for prepared in prepared_commits}):
                        raise
                except CommitConflict:
                    conflicts += 1
                    if conflicts > retries:
                        raise
                    await self._context.back_off(conflicts)
            except (CommitConflict, RequestError):
                await self._raise_if_committed(commit)
                raise

    async def _record_refusal(self, caller: Caller, table: TableCommit) -> None:
        """Count the refusal of an engine's commit of a snapshot. After several refusals, the engine gets priority."""
        priority = self.publisher.engine_priority
        if priority is None or not table.added_snapshots:
            return
        with contextlib.suppress(SeamarkError):
            entry = await self._context.store.load_entry(EntryKind.TABLE, table.namespace, table.name)
            if entry is not None:
                priority.record_refusal(table.namespace, table.name, entry.uuid, _identify_writer(caller, table))

    def _end_priority(self, caller: Caller, table: TableCommit, loaded_table: LoadedTable) -> None:
        priority = self.publisher.engine_priority
        if priority is not None and loaded_table.entry is not None:
            priority.end_priority(table.namespace, table.name, loaded_table.entry.uuid, _identify_writer(caller, table))

    def _build_record(self, commit: _Commit, prepared_commits: Sequence[PreparedCommit]) -> list[Operation]:
        """Return the operation that records the response under the request's idempotency key.

        The response to a commit of one table contains the metadata, so the record has their location. The response to a
        transaction has no body.

        The list is empty if the request has no key.
        """
        if not commit.is_single:
            return self._context.make_answer_record(commit.caller, status=204)
        location = prepared_commits[0].location
        if not location:  # Nothing has changed.
            assert prepared_commits[0].entry is not None
            location = prepared_commits[0].entry.metadata_location
        return self._context.make_answer_record(commit.caller, status=200, metadata_location=location)

    async def _prepare(self, commit: _Commit, table: TableCommit) -> PreparedCommit:
        """Apply the updates of one table to its current metadata, and prepare the publication."""
        context, caller, full_name = self._context, commit.caller, (table.namespace, table.name)
        entry, base = await self._load_base(table)
        _check_examined(commit.examined.get(full_name), entry, full_name)
        rebased_updates: RevisedUpdates | None = None
        updates = table.updates
        try:
            if commit.fresh_snapshot is not None:
                # The table does not have the parent of the added snapshot, so the commit must be rebased below.
                raise CommitConflict(
                    "The snapshot is based on rows of a stream that are in no snapshot, and it cannot be moved onto "
                    "the table's current snapshot; load the table again"
                )
            metadata = await self._apply(commit, base, updates, table.requirements)
        except CommitConflict:
            if entry is not None and base is not None:
                await check_added(context, caller, entry.uuid, base, base, table, commit.manifests.files)
            rebased_updates = await self._rebase(commit, table, entry, base)
            if rebased_updates is None:
                raise
            updates = rebased_updates.updates
            metadata = await self._apply(commit, base, updates)
        if base is None:
            await self._check_new_uuid(metadata)
        else:
            readers = commit.manifests.with_checks(get_uuid(entry, base), context.settings.commit_memory_bytes)
            await check_removed_specs(readers, base, metadata)
        events = [_describe_commit(commit, updates)]
        files = rebased_updates.files if rebased_updates else ()
        prepared_commit = await self.publisher.prepare(
            caller, full_name, entry, base, metadata, events=events, files=files
        )
        if rebased_updates is None and (table.added_snapshots or table.statistics_paths):
            await check_added(context, caller, prepared_commit.uuid, base, metadata, table, commit.manifests.files)
        if metadata is base or not table.added_snapshots:
            return prepared_commit
        if base is not None:
            await check_stored_snapshots(
                context, *commit.manifests.unchecked, prepared_commit.uuid, base, table.added_snapshots
            )
        corrected_updates = await self._correct(commit, entry, base, metadata, updates, rebased_updates)
        if corrected_updates is None:
            return prepared_commit
        # The correction has changed the manifest lists of the snapshots, so prepare the publication again.
        metadata, files = await self._apply(commit, base, corrected_updates.updates), corrected_updates.files
        return await self.publisher.prepare(caller, full_name, entry, base, metadata, events=events, files=files)

    async def _load_base(self, table: TableCommit) -> tuple[Entry | None, TableMetadata | None]:
        """Return the pointer and the metadata of a table. Return (None, None) if the commit creates the table.

        Raises:
            NoSuchTable: The table does not exist, and the commit does not create it.
            AlreadyExists: A view has the name of the new table.
        """
        entry = await self._context.store.load_entry(EntryKind.TABLE, table.namespace, table.name)
        if entry is not None:
            base = await self._context.documents.table(entry.metadata_location)
            check_uuid(entry, base)
            return entry, base
        if not table.is_create:
            raise NoSuchTable(f"Table does not exist: {format_path(table.namespace, table.name)}")
        check_new_name(table.name, "table name")
        await check_name_free(self._context, table.namespace, table.name)
        return None, None

    async def _check_new_uuid(self, metadata: TableMetadata) -> None:
        """Check that a new table may have its UUID.

        Raises:
            BadRequest: The UUID has version 5, which the server derives itself, or another table has it.
        """
        uuid = table_uuid(metadata)
        if is_derived(uuid):
            raise BadRequest(f"The UUID {metadata.table_uuid} has version 5; choose a random UUID (version 4)")
        if await self._context.is_uuid_taken(uuid):
            raise BadRequest(f"A table with the UUID {metadata.table_uuid} exists already; stage the table again")

    async def _correct(
        self,
        commit: _Commit,
        entry: Entry | None,
        base: TableMetadata | None,
        metadata: TableMetadata,
        updates: Sequence[Update],
        rebased_updates: RevisedUpdates | None,
    ) -> RevisedUpdates | None:
        """Return the updates with corrected manifests, or None if no manifest of the engine would harm readers.

        For a new table, whose base is None, the location is in the new metadata.
        """
        table_metadata = metadata if base is None else base
        uuid, folder = (
            get_uuid(entry, table_metadata),
            check_metadata_folder(self._context, table_metadata.location, table_metadata.properties),
        )
        return await self._corrections.correct(commit.manifests, uuid, folder, base, metadata, updates, rebased_updates)

    async def _apply(
        self,
        commit: _Commit,
        base: TableMetadata | None,
        updates: Sequence[Update],
        requirements: Sequence[Requirement] = (),
    ) -> TableMetadata:
        """Check the requirements, apply the updates to the metadata, and return the new metadata.

        A large request is applied in a thread, so that it does not block the event loop.
        """
        caller, clock = commit.caller, self._context.clock
        now_ms, new_uuid = clock.now_ms(), None if base is not None else str(clock.uuid4())

        def apply() -> TableMetadata:
            check_requirements(base, requirements)
            return index_columns(apply_updates(base, updates, now_ms=now_ms, new_uuid=new_uuid))

        return await self._context.large.run_by_size(caller.principal_name, caller.request_bytes, apply)

    async def _rebase(
        self, commit: _Commit, table: TableCommit, entry: Entry | None, base: TableMetadata | None
    ) -> RevisedUpdates | None:
        """Rebase a refused snapshot onto the new current snapshot, or return None if this is impossible (`rebase.py`).

        Raises:
            AlreadyCommitted: The same commit was already applied.
        """
        snapshot_commit = find_snapshot_commit(base, table) if base is not None else None
        if base is None or snapshot_commit is None:
            return None
        # A repeated commit is refused too: its snapshot was already applied, and may even have expired since.
        await self._raise_if_committed(commit)
        folder = check_metadata_folder(self._context, base.location, base.properties)
        uuid, is_single = get_uuid(entry, base), commit.is_single
        return await rebase_snapshot(
            self._context,
            commit.manifests,
            uuid,
            folder,
            base,
            snapshot_commit,
            is_single=is_single,
            fresh_snapshot=commit.fresh_snapshot,
        )

    async def _raise_if_committed(self, commit: _Commit) -> None:
        """Check that the same commit was not already applied in a request whose response was lost.

        If the server answered the repeated commit with 4xx, the client would delete files that are live.

        Raises:
            AlreadyCommitted: The commit was already applied. The error contains the outcome.
            CommitUnknown: The commit was already applied, but the name no longer refers to the same table.
        """
        if commit.fingerprint is None:
            return
        table = next(table for table in commit.tables if table.added_snapshots)
        # Include the UUIDs in the commit, because the table may have been renamed or dropped since.
        uuids = [*_list_required_uuids(table.requirements)[:1], *_list_assigned_uuids(table)[:1]]
        uuids += [uuid.lower() for uuid in uuids]
        entry = await self._context.store.load_entry(EntryKind.TABLE, table.namespace, table.name)
        if entry is not None:
            uuids.append(entry.uuid)
        for uuid in dict.fromkeys(uuids):
            instant = await self._context.store.find_instant_by_fingerprint(uuid, commit.fingerprint)
            # A transaction is atomic, so an instant of one table proves that all tables were committed.
            if instant is not None:
                raise AlreadyCommitted([await self._load_outcome(table, instant)] if commit.is_single else [])

    async def _load_outcome(self, table: TableCommit, instant: Instant) -> LoadedTable:
        """Return the table in the state that the first request with this commit produced.

        The current request repeats that commit, whose answer the client did not receive.

        Raises:
            CommitUnknown: The name no longer refers to the same table.
        """
        documents = self._context.documents
        entry = await self._context.store.load_entry(EntryKind.TABLE, table.namespace, table.name)
        if entry is None or entry.uuid != instant.uuid:
            raise make_pointer_moved_error(table.namespace, table.name)
        committed_entry = msgspec.structs.replace(
            entry, metadata_location=instant.metadata_location or entry.metadata_location
        )
        try:
            metadata = await documents.table(committed_entry.metadata_location)
        except NotFound:
            # The metadata file of the commit has been deleted, but the current metadata contain the commit.
            committed_entry, metadata = entry, await documents.table(entry.metadata_location)
        return LoadedTable(entry=committed_entry, metadata=metadata)


def _check_examined(examined: ExaminedTable | None, entry: Entry | None, full_name: tuple[NamespacePath, str]) -> None:
    """Check that a name refers to the table whose stream was prepared for the commit.

    Args:
        examined: The table whose stream was prepared, or None if no stream was prepared.
        entry: The current pointer, or None if the name refers to no table.
        full_name: The namespace and the name.

    Raises:
        CommitConflict: The name refers to another table. Or the preparation of the stream found that the table does not
            allow the commit, and the table has changed since.
    """
    if examined is None:
        return
    uuid = None if entry is None else entry.uuid
    is_changed = entry is not None and examined.refused_location not in (None, entry.metadata_location)
    if uuid != examined.uuid or is_changed:
        raise CommitConflict(
            f"{format_path(*full_name)} has changed while the commit was prepared; load the table again"
        )


def _parse_changes(changes: Sequence[TableChange]) -> tuple[list[TableCommit], str | None]:
    """Parse the changes. Return the commits, and the fingerprint of the request, or None if it adds no snapshot.

    The fingerprint identifies a repeat of the request after a lost response.
    """
    tables = [read_table_commit(change) for change in changes]
    adds_snapshot = any(table.added_snapshots for table in tables)
    return tables, compute_fingerprint(changes) if adds_snapshot else None


def compute_fingerprint(changes: Sequence[TableChange]) -> str:
    """Return a hash that identifies a commit which adds a snapshot, because such a commit can be applied only once.

    Snapshot ids are unique, so two commits with the same content are one commit. The hash covers the JSON of the
    updates as the client sent it, including fields that the specification does not define. The case of the action names
    does not matter. For one table, the name is left out, because the table may be renamed before a repeat.
    """
    updates = [[_lower_action(update) for update in change.updates] for change in changes]
    content: Any = updates[0]
    if len(changes) > 1:
        content = [
            (change.namespace, change.name, lower_updates)
            for change, lower_updates in zip(changes, updates, strict=True)
        ]
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def _lower_action(update: dict[str, Any]) -> dict[str, Any]:
    return {**update, "action": update["action"].lower()}


def _describe_commit(commit: _Commit, updates: Sequence[Update]) -> CommitEvent:
    """Return the event that the timeline records for the updates of one table.

    If the commit adds several snapshots, the event has the last of them.
    """
    snapshot_updates = [update.snapshot for update in updates if isinstance(update, AddSnapshot)]
    return CommitEvent(
        caller=commit.caller,
        requested_ms=commit.requested_ms,
        snapshot_id=snapshot_updates[-1].snapshot_id if snapshot_updates else None,
        summary=(snapshot_updates[-1].summary or {}) if snapshot_updates else {},
        updates=tuple(update.action for update in updates),
        fingerprint=commit.fingerprint,
    )


def _identify_writer(caller: Caller, table: TableCommit) -> str:
    """Return a name for the writer: its principal, and whether its snapshots are appends.

    Appends have their own name. Otherwise a successful append would end the priority of an overwrite by the same
    principal.
    """
    summaries = [snapshot.summary for snapshot in table.added_snapshots if snapshot.summary is not None]
    operations = {summary.get("operation") for summary in summaries}
    return f"{caller.principal_name} {'append' if operations <= {'append'} else 'overwrite'}"


def _list_required_uuids(requirements: Iterable[Requirement]) -> list[str]:
    return [requirement.uuid for requirement in requirements if isinstance(requirement, AssertUuid)]


def _list_assigned_uuids(table: TableCommit) -> list[str]:
    return [update.uuid for update in table.updates if isinstance(update, AssignUuid)]
