"""Stock commits: the updates and requirements of the REST specification, for one table or several.

Optimistic: applies the updates to the current metadata and publishes the result; after a lost race, tries again. A
commit that adds a snapshot and was applied before gets the first outcome again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.requirements import check_requirements
from seamark.formats.iceberg.metadata.updates import apply_updates
from seamark.formats.protocol.wire import check_changeable, check_name, check_new_name, show
from seamark.formats.runtime.errors import (
    BadRequest,
    CommitConflict,
    NoSuchTable,
    NotFound,
    RequestError,
    SeamarkError,
)
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.large_requests import indexed
from seamark.metaserver.catalog.ownership.own_files import check_added
from seamark.metaserver.catalog.pointers import (
    check_name_free,
    check_uuid,
    checked_folder,
    is_derived,
    table_uuid,
    uuid_of,
)
from seamark.metaserver.catalog.values import Caller, LoadedTable, TableChange
from seamark.metaserver.commit.engine_commits.attempt_manifests import AttemptManifests, CommitManifests
from seamark.metaserver.commit.engine_commits.rebase import Rebased, rebase
from seamark.metaserver.commit.engine_commits.shared_puffins import SharedPuffins
from seamark.metaserver.commit.engine_commits.snapshot_commit import requested_snapshot
from seamark.metaserver.commit.engine_commits.usable_metrics import UsableMetrics
from seamark.metaserver.commit.publication import CommitEvent, PreparedCommit, Publisher, Races, pointer_moved
from seamark.metaserver.commit.removed_files import check_snapshots_stored
from seamark.metaserver.store.model import Entry, EntryKind, Instant, NamespacePath
from seamark.metaserver.store.operations import Operation
from seamark.metaserver.store.port import LostRace


class _Request(msgspec.Struct, frozen=True):
    """The parts of a commit that all attempts share."""

    caller: Caller
    changes: Sequence[TableChange]
    single: bool
    requested_ms: int
    fingerprint: str | None


class Repeat(Exception):
    """This commit was applied before. Carries its outcome, which is empty for a transaction."""

    def __init__(self, outcome: list[LoadedTable]) -> None:
        super().__init__()
        self.outcome = outcome


class EngineCommits:
    def __init__(self, catalog: Catalog, publisher: Publisher) -> None:
        self._parts = catalog.parts
        self._tables = catalog.tables
        self._plans = catalog.plan_tables
        self._manifests = CommitManifests(catalog.parts)
        self._puffins = SharedPuffins(catalog.parts)
        self._metrics = UsableMetrics(catalog.parts)
        self.publisher = publisher

    async def commit_table(
        self,
        caller: Caller,
        namespace: NamespacePath,
        name: str,
        requirements: list[dict[str, Any]],
        updates: list[dict[str, Any]],
    ) -> LoadedTable:
        """See `commit`."""
        change = TableChange(namespace=namespace, name=name, requirements=requirements, updates=updates)
        check_name(name, "table name")
        await self._plans.before_commit([change])
        return (await self.commit(caller, [change], single=True))[0]

    async def commit_transaction(self, caller: Caller, changes: Sequence[TableChange]) -> None:
        """See `commit`. All pointers move in one transaction of the store."""
        if not changes:
            raise BadRequest("table-changes is empty; it needs at least one change")
        for change in changes:
            check_changeable(check_name(change.name, "table name"))
        await self._plans.before_commit(changes)
        await self.commit(caller, changes, single=False)

    async def after_commit(
        self, namespace: NamespacePath, name: str, requirements: list[dict[str, Any]]
    ) -> LoadedTable:
        """The current table, for a commit that succeeded and whose metadata file was deleted since.

        CommitUnknown (`pointer_moved`) when the name refers to no table, or to another than `requirements` demand.
        """
        change = TableChange(namespace=namespace, name=name, requirements=requirements, updates=[])
        uuids = {uuid.lower() for uuid in _named_uuids(change)}
        try:
            loaded = await self._tables.load(namespace, name)
        except NotFound:
            pass
        else:
            assert loaded.entry is not None
            if uuids <= {loaded.entry.uuid.lower()}:
                return loaded
        raise pointer_moved(namespace, name)

    async def commit(self, caller: Caller, changes: Sequence[TableChange], *, single: bool) -> list[LoadedTable]:
        """Commits all changes or none. `single`: the idempotent answer is that of the table, not an empty 204.

        CommitConflict when a requirement fails or every swap was lost; NoSuchTable; AlreadyExists when a created name
        exists; BadRequest for updates that cannot be applied; CommitUnknown when the outcome is unknown.
        """
        # All commits sort in the same order, so that no two transactions deadlock on rows.
        changes = sorted(changes, key=lambda change: (change.namespace, change.name))
        names = [(change.namespace, change.name) for change in changes]
        if len(set(names)) != len(names):
            twice = next(one for one, after in itertools.pairwise(names) if one == after)  # they are sorted
            raise BadRequest(f"The transaction has two changes for {show(*twice)}; merge them")
        async with self.publisher.lock_all(names):
            try:
                identify = partial(fingerprint, changes)
                identity = await self._parts.large.run_by_size(caller.who, caller.request_bytes, identify)
                request = _Request(caller, changes, single, self._parts.clock.now_ms(), identity)
                async with self.publisher.races() as races:
                    outcome = await self._attempts(request, races)
            except Repeat as repeat:
                return repeat.outcome
            except CommitConflict:
                for change in changes:
                    await self._record_refusal(caller, change)
                raise
        for change, loaded in zip(changes, outcome, strict=True):
            self._end_stock_priority(caller, change, loaded)
        return outcome

    async def _attempts(self, request: _Request, races: Races) -> list[LoadedTable]:
        retries, conflicts = self._parts.settings.commit_retries, 0
        while True:
            try:
                planned = [await self._plan(request, change) for change in request.changes]
                try:
                    return await self.publisher.publish_all(planned, self._remember(request, planned))
                except LostRace:
                    if not await races.lost({prepared.uuid for prepared in planned}):
                        raise
                except CommitConflict:
                    conflicts += 1
                    if conflicts > retries:
                        raise
                    await self._parts.back_off(conflicts)
            except (CommitConflict, RequestError):
                await self._raise_if_repeat(request)
                raise

    async def _record_refusal(self, caller: Caller, change: TableChange) -> None:
        """So that a client that reads, computes and commits gets priority over faster writers (`StockPriority`)."""
        priority = self.publisher.stock_priority
        if priority is None or not _adds_snapshot(change):
            return
        with contextlib.suppress(SeamarkError):
            entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
            if entry is not None:
                priority.record_refusal(change.namespace, change.name, entry.uuid, _writer_of(caller, change))

    def _end_stock_priority(self, caller: Caller, change: TableChange, loaded: LoadedTable) -> None:
        priority = self.publisher.stock_priority
        if priority is not None and loaded.entry is not None and _adds_snapshot(change):
            priority.end_priority(change.namespace, change.name, loaded.entry.uuid, _writer_of(caller, change))

    def _remember(self, request: _Request, planned: list[PreparedCommit]) -> list[Operation]:
        single = request.single
        location = (planned[0].location or _location(planned[0])) if single else None
        return self._parts.remember(request.caller, status=200 if single else 204, metadata_location=location)

    async def _plan(self, request: _Request, change: TableChange) -> PreparedCommit:
        creates = is_create(change)
        entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
        if entry is None and not creates:
            raise NoSuchTable(f"Table does not exist: {show(change.namespace, change.name)}")
        if entry is None:
            check_new_name(change.name, "table name")
            await check_name_free(self._parts, change.namespace, change.name)
        base = await self._parts.documents.table(entry.metadata_location) if entry else None
        if entry is not None and base is not None:
            check_uuid(entry, base)
        files: Sequence[tuple[str, bytes]] = ()
        requested: TableChange | None = change
        sent = change.updates
        manifests = self._manifests.attempt()
        rebased: Rebased | None = None
        try:
            check = partial(check_requirements, base, change.requirements)
            await self._parts.large.run_by_size(request.caller.who, request.caller.request_bytes, check)
            metadata = await self._apply(request, base, change.updates)
        except CommitConflict:
            if base is not None:
                await check_added(self._parts, request.caller, uuid_of(entry, base), base, base, change)
            requested, rebased = None, await self._rebase(request, manifests, change, entry, base)
            if rebased is None:
                raise
            change = msgspec.structs.replace(change, updates=rebased.updates)
            metadata, files = await self._apply(request, base, change.updates), rebased.files
        if base is None and is_derived(table_uuid(metadata)):
            raise BadRequest(f"The UUID {metadata.table_uuid} has version 5; choose a random UUID (version 4)")
        if base is None and await self._parts.is_uuid_taken(table_uuid(metadata)):
            raise BadRequest(f"A table with the UUID {metadata.table_uuid} exists already; stage the table again")
        plan = await self.publisher.prepare(request.caller, (change.namespace, change.name), entry, base, metadata)
        if requested is not None:
            await check_added(self._parts, request.caller, uuid_of(entry, metadata), base, metadata, requested)
        if metadata is not base and _adds_snapshot(change):
            if base is not None:
                own, published = manifests.own, manifests.published
                await check_snapshots_stored(self._parts, published, own, uuid_of(entry, base), base, sent)
            final = await self._rewritten(request, manifests, entry, base, metadata, change, rebased)
            if final is not None:
                metadata, files = await self._apply(request, base, final.updates), final.files
                plan = await self.publisher.prepare(
                    request.caller, (change.namespace, change.name), entry, base, metadata
                )
        plan.events, plan.files = [_commit_event(request, change)], files
        return plan

    async def _rewritten(
        self,
        request: _Request,
        manifests: AttemptManifests,
        entry: Entry | None,
        base: TableMetadata | None,
        metadata: TableMetadata,
        change: TableChange,
        rebased: Rebased | None,
    ) -> Rebased | None:
        """The commit with other manifests where those of the client would harm readers. None if it stays unchanged."""
        of = metadata if base is None else base
        uuid, folder = uuid_of(entry, of), checked_folder(self._parts, of.location, of.properties)
        kept = None
        if base is not None:
            kept = await self._puffins.keep(manifests, uuid, folder, base, metadata, change.updates, rebased)
            if kept is not None:
                metadata = await self._apply(request, base, kept.updates)
        step = kept or rebased
        updates = change.updates if step is None else step.updates
        return await self._metrics.repair(manifests, uuid, folder, base, metadata, updates, step) or kept

    async def _apply(
        self, request: _Request, base: TableMetadata | None, updates: list[dict[str, Any]]
    ) -> TableMetadata:
        now_ms, new_uuid = self._parts.clock.now_ms(), str(self._parts.clock.uuid4())
        work = partial(apply_updates, base, updates, now_ms=now_ms, new_uuid=new_uuid)
        large = self._parts.large
        return await large.run_by_size(request.caller.who, request.caller.request_bytes, lambda: indexed(work()))

    async def _rebase(
        self,
        request: _Request,
        manifests: AttemptManifests,
        change: TableChange,
        entry: Entry | None,
        base: TableMetadata | None,
    ) -> Rebased | None:
        """Rebases a refused snapshot onto the new head, if that is possible (`rebase.py`)."""
        commit = requested_snapshot(base, change) if base is not None else None
        if base is None or commit is None:
            return None
        # The refusal may mean that the snapshot was applied already; its snapshot may even have expired since.
        await self._raise_if_repeat(request)
        folder = checked_folder(self._parts, base.location, base.properties)
        uuid = uuid_of(entry, base)
        return await rebase(self._parts, manifests, uuid, folder, base, commit, single=request.single)

    async def _raise_if_repeat(self, request: _Request) -> None:
        """Raises Repeat with the first outcome, when the refused commit was applied before and its reply was lost.

        After a 4xx the client would delete files that are live.
        """
        if request.fingerprint is None:
            return
        change = next(change for change in request.changes if _adds_snapshot(change))
        # The UUIDs in the change count, too: the table may have been renamed or dropped since.
        uuids = [*_named_uuids(change)[:1], *_assigned_uuids(change)[:1]]
        uuids += [uuid.lower() for uuid in uuids]
        entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
        if entry is not None:
            uuids.append(entry.uuid)
        for uuid in dict.fromkeys(uuids):
            instant = await self._parts.store.instant_by_fingerprint(uuid, request.fingerprint)
            if instant is not None:  # the transaction is atomic, so one table proves it for all
                raise Repeat([await self._outcome(change, instant)] if request.single else [])

    async def _outcome(self, change: TableChange, instant: Instant) -> LoadedTable:
        """The outcome of the first commit. CommitUnknown when the name no longer refers to that table."""
        entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
        if entry is None or entry.uuid != instant.uuid:
            raise pointer_moved(change.namespace, change.name)
        then = msgspec.structs.replace(entry, metadata_location=instant.metadata_location or entry.metadata_location)
        try:
            metadata = await self._parts.documents.table(then.metadata_location)
        except NotFound:  # dropped from the metadata log; the current metadata contains the commit
            then, metadata = entry, await self._parts.documents.table(entry.metadata_location)
        return LoadedTable(entry=then, metadata=metadata)


def is_create(change: TableChange) -> bool:
    """Whether the commit creates the table. The other requirements are checked later."""
    return any(requirement.get("type") == "assert-create" for requirement in change.requirements)


def fingerprint(changes: Sequence[TableChange]) -> str | None:
    """Identifies a commit that can be applied only once, because it adds a snapshot (snapshot ids are unique)."""
    if not any(_adds_snapshot(change) for change in changes):
        return None
    content: Any = changes[0].updates
    if len(changes) > 1:
        content = [(change.namespace, change.name, change.updates) for change in changes]
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def _commit_event(request: _Request, change: TableChange) -> CommitEvent:
    added = [update.get("snapshot") or {} for update in change.updates if update.get("action") == "add-snapshot"]
    snapshot = added[-1] if added else {}
    return CommitEvent(
        caller=request.caller,
        requested_ms=request.requested_ms,
        snapshot_id=snapshot.get("snapshot-id"),
        summary=snapshot.get("summary") or {},
        updates=tuple(str(update.get("action")) for update in change.updates),
        fingerprint=request.fingerprint,
    )


def _adds_snapshot(change: TableChange) -> bool:
    return any(update.get("action") == "add-snapshot" for update in change.updates)


def _writer_of(caller: Caller, change: TableChange) -> str:
    """The principal, and the kind of its snapshots: an append does not end the priority of an overwrite."""
    added = (update.get("snapshot") for update in change.updates if update.get("action") == "add-snapshot")
    summaries = (fields.get("summary") for fields in added if isinstance(fields, dict))
    operations = {summary.get("operation") for summary in summaries if isinstance(summary, dict)}
    return f"{caller.who} {'append' if operations <= {'append'} else 'overwrite'}"


def _named_uuids(change: TableChange) -> list[str]:
    """The UUIDs that the requirements demand."""
    named = [requirement for requirement in change.requirements if requirement.get("type") == "assert-table-uuid"]
    return [requirement["uuid"] for requirement in named if isinstance(requirement.get("uuid"), str)]


def _assigned_uuids(change: TableChange) -> list[str]:
    assigned = [update for update in change.updates if update.get("action") == "assign-uuid"]
    return [update["uuid"] for update in assigned if isinstance(update.get("uuid"), str)]


def _location(plan: PreparedCommit) -> str:
    assert plan.entry is not None
    return plan.entry.metadata_location
