"""Plan tables: names under which an engine reads only the files that a plan of a table selected, while a lease lasts.

The meaning of a name never changes. A digest in the name identifies the table, its metadata and the filter. The files
of a plan are written once, to unique paths, and the plan's row in the pointer store lists them. Identical plans share
the name and the files. A name resolves only while the planned table keeps its own name. The files outlive the lease, so
that running queries can finish. Then the name is removed, then the files, and finally the row. If a crash interrupts
this, the row remains for another attempt.

A plan for an audience (the requests with the same value of `X-Seamark-Plans`) has no name. loadTable shows the plan to
its audience as an additional snapshot of the table, until the lease ends or is withdrawn. The table's metadata files
never contain this snapshot. A commit that removes the snapshot's id drops the plan, because the engine deletes the
plan's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.protocol.wire import (
    FORMER_PLANS_FOLDER,
    FRESH_FOLDER,
    NAME_MAX,
    PLAN_MARK,
    encode_json,
    format_path,
    is_plan_name,
)
from seamark.formats.runtime.errors import BadRequest, CommitUnknown, NoSuchTable, SeamarkError, TooManyRequests
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.plans.plan_shares import PlanShares
from seamark.metaserver.catalog.values import LoadedTable, TableCommit
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath, PlanSnapshot, StoredPlanTable
from seamark.metaserver.store.operations import (
    DropPlanSnapshots,
    ForgetPlanTable,
    KeepPlanTable,
    LeasePlanSnapshots,
    RenewPlanTable,
    RetirePlanTables,
)
from seamark.metaserver.store.passed_time import read_passed_time

_DIGEST_CHARACTERS = 32
_NAMES_VERSION = 2
"""The version of names. Version 1 belongs to earlier versions, which did not store the joined tables of a plan."""
_PLANS_PER_BATCH = 1000
_DELETES_CONCURRENT_MAX = 16
_SHOWN_ID_MIN = 1 << 32
"""The lowest id of a plan snapshot, which must be a `bigint` in Trino.

Trino reads smaller numbers as `integer`.
"""
_PLAN_FILE = re.compile(rf"/{FORMER_PLANS_FOLDER}/[0-9a-f]{{{_DIGEST_CHARACTERS}}}[-/]|/{FRESH_FOLDER}/")
"""Matches the location of a file of a plan, or of a file with rows of a stream.

The folders of plans of this version and of earlier versions end with the same name.
"""
_log = structlog.get_logger("seamark.plans")

_LOGGED_EVERY_S = 60.0
_RETRY_S = 30
_COUNTED_S = 10.0
"""The time for which the number of all plans is cached. The worker adds the plans that it creates to this number."""


class LoadedPlan(msgspec.Struct, frozen=True):
    """A plan table, and the planned table. A plan table is a read-only table with the files of one scan plan.

    Attributes:
        plan: The row of the plan.
        metadata: The metadata that engines load for the plan table.
        table: The planned table.
    """

    plan: StoredPlanTable
    metadata: TableMetadata
    table: LoadedTable


class Holder(NamedTuple):
    """The client that holds a plan, and the value that requests must send to use the plan.

    Attributes:
        audience: The value of the header `X-Seamark-Plans` in requests that may use the plan.
        id: The id of the client that requested the plan, such as an adapter in an engine. Identical plans are shared
            only within one holder, so that the holder can withdraw them.
    """

    audience: str
    id: str


def plan_name(entry: Entry, snapshot_id: int, bound_filter_text: str, holder: Holder | None = None) -> str | None:
    """Return the name of the plan for a filter on a snapshot of the table, or None if the name would be too long.

    Args:
        bound_filter_text: The bound filter as text.
        holder: The client that holds the plan, or None if all requests may use the plan.
    """
    table = (*entry.namespace, entry.name, entry.uuid, entry.metadata_location)
    scan_identity = (entry.index_version, snapshot_id, bound_filter_text, *(holder or ()))
    identity = encode_json((_NAMES_VERSION, table, *scan_identity))
    name = f"{entry.name}{PLAN_MARK}{hashlib.sha256(identity).hexdigest()[:_DIGEST_CHARACTERS]}".lower()
    return name if len(name) <= NAME_MAX else None


def derive_snapshot_id(plan_id: str) -> int:
    """Return the id of the snapshot that shows a plan to its audience, the clients that send its X-Seamark-Plans."""
    digest = int.from_bytes(hashlib.sha256(plan_id.encode()).digest()[:8], "big")
    # Keep 62 bits of the digest, so that the id is positive as a signed integer of 64 bits. Set the bit of
    # `_SHOWN_ID_MIN`, so that the id is never smaller than this minimum.
    return _SHOWN_ID_MIN | digest & (1 << 62) - 1


def make_plan_snapshot(
    plan_id: str, metadata: TableMetadata, planned_snapshot: Snapshot, *, is_fresh: bool = False
) -> Snapshot:
    """Return the snapshot that shows a plan to its audience, which are the clients with the same X-Seamark-Plans.

    Its schema is the schema of the filter, because a later schema may use the same names for other columns. Its parent
    is the planned snapshot, where engines find statistics. Its timestamp is just before the timestamp of the planned
    snapshot, so that an engine that searches for the newest snapshot selects the planned snapshot.

    The table metadata that engines load may lack a fresh snapshot. If the planned snapshot is fresh, the parent is
    therefore the last snapshot of the table. The sequence number is then not above that of the table, because Iceberg's
    Java library checks this.

    Args:
        plan_id: The id of the plan.
        metadata: The metadata of the table, with the schema of the filter as the current schema.
        planned_snapshot: The planned snapshot, with its id and with the manifest list of the plan.
        is_fresh: Whether the planned snapshot is a fresh snapshot: one that also contains the rows of a stream that are
            not in the table's files yet.
    """
    return msgspec.structs.replace(
        planned_snapshot,
        snapshot_id=derive_snapshot_id(plan_id),
        parent_snapshot_id=planned_snapshot.parent_snapshot_id if is_fresh else planned_snapshot.snapshot_id,
        sequence_number=planned_snapshot.sequence_number - 1 if is_fresh else planned_snapshot.sequence_number,
        timestamp_ms=planned_snapshot.timestamp_ms - 1,
        schema_id=metadata.current_schema_id,
    )


def parse_digest(name: str) -> str:
    """Return the digest in the name of a plan. The names of the plan's files contain the same digest."""
    return name.rpartition(PLAN_MARK)[2]


class PlanTables:
    def __init__(self, context: CatalogContext) -> None:
        self._context = context
        self._plan_count, self._plans_counted_s = 0, -_COUNTED_S
        settings = context.settings
        self._shares = PlanShares(
            leases=settings.plan_tables_limit,
            size_bytes=settings.plan_tables_bytes,
            grace_s=settings.plan_table_grace_s,
        )
        self.refused: Counter[str] = Counter()
        """The number of refused plans by the exhausted limit, which is a metric."""
        self._logged_s: dict[str, float] = {}

    async def check_or_count_refusal(self, principal: str) -> bool:
        """Check whether `principal` may create one more plan, and count the refusal if it may not.

        The number of plans is limited because every reader can request plans, and each plan has files.
        """
        now_s = self._context.clock.monotonic()
        exhausted_limit = self._shares.find_exhausted_limit(principal, now_s)
        if exhausted_limit is None:
            if now_s - self._plans_counted_s >= _COUNTED_S:
                self._plans_counted_s = now_s
                self._plan_count = await self._context.store.plan_table_count(self._context.clock.now_ms())
            exhausted_limit = None if self._plan_count < self._context.settings.plan_tables_limit else "leases"
        if exhausted_limit is None:
            return True
        self._refuse(exhausted_limit, principal)
        return False

    def _refuse(self, exhausted_limit: str, principal: str) -> None:
        self.refused[exhausted_limit] += 1
        now_s = self._context.clock.monotonic()
        if now_s - self._logged_s.get(exhausted_limit, -_LOGGED_EVERY_S) >= _LOGGED_EVERY_S:
            self._logged_s[exhausted_limit] = now_s
            _log.warning(
                "plans are not made: statements read whole tables",
                exhausted=exhausted_limit,
                who=principal,
                refused=self.refused[exhausted_limit],
                settings="plan_tables_limit, plan_tables_bytes",
            )

    async def find(self, namespace: NamespacePath, name: str) -> tuple[StoredPlanTable, Entry]:
        """Return the plan with this name, and the catalog entry of its table.

        Raises:
            NoSuchTable: The lease has ended, the planned table no longer has its name, or the plan is only for the
                requests with one value of `X-Seamark-Plans`. The message is the same as for a table that does not
                exist.
        """
        plan = await self._context.store.load_plan_table(namespace, name) if is_plan_name(name) else None
        if plan is not None and plan.audience is None and plan.expires_ms > self._context.clock.now_ms():
            entry = await self._context.store.load_entry(EntryKind.TABLE, namespace, plan.of_name)
            if entry is not None and entry.uuid == plan.uuid:
                return plan, entry
        raise NoSuchTable(f"Table does not exist: {format_path(namespace, name)}")

    async def load(self, namespace: NamespacePath, name: str) -> LoadedPlan:
        """Return the plan with this name and its metadata.

        Raises:
            NotFound: The plan does not exist, or a metadata file is missing in storage.
        """
        plan, entry = await self.find(namespace, name)
        documents = self._context.documents
        table = LoadedTable(entry=entry, metadata=await documents.table(entry.metadata_location))
        await documents.ensure_exists(plan.location)
        return LoadedPlan(plan, await documents.table(plan.location), table)

    async def read(self, namespace: NamespacePath, name: str) -> LoadedTable:
        """Return the plan as a table for reading: the planned table's entry and location, with the plan's snapshot."""
        loaded_plan = await self.load(namespace, name)
        entry = loaded_plan.table.entry
        assert entry is not None
        metadata = msgspec.structs.replace(loaded_plan.metadata, location=loaded_plan.table.metadata.location)
        return LoadedTable(msgspec.structs.replace(entry, metadata_location=loaded_plan.plan.location), metadata)

    async def list_visible_plans(self, entry: Entry, audience: str) -> list[PlanSnapshot]:
        """Return the snapshots with plans of the table that the clients with this value of X-Seamark-Plans see now."""
        limit = self._context.settings.plan_snapshots_limit
        now_ms = self._context.clock.now_ms()
        return await self._context.store.list_plan_snapshots(
            entry.namespace, entry.name, entry.uuid, audience, now_ms, limit
        )

    async def lease(
        self,
        namespace: NamespacePath,
        of_name: str,
        audience: str,
        plan_snapshot_ids: Iterable[int],
        lease_s: int,
        principal: str,
    ) -> int:
        """Renew the leases of plans of a table or view for `principal`. A lease of 0 s withdraws the plans.

        Args:
            namespace: The namespace of the table or view.
            of_name: The name of the table or view.
            audience: The value of X-Seamark-Plans with which the plans were created.
            plan_snapshot_ids: The ids of the snapshots that show the plans.
            lease_s: The new lease in seconds, from now.
            principal: The principal whose limits of plans apply.

        Returns:
            The number of plans that exist.

        Raises:
            TooManyRequests: The principal may not have this many leases.
        """
        expires_ms = self._context.clock.now_ms() + lease_s * 1000
        ids = tuple(sorted(set(plan_snapshot_ids)))
        if lease_s and not self._check_lease_limits(principal, ids):
            raise build_plan_limit_error(principal)
        operation = LeasePlanSnapshots(namespace, of_name, audience, ids, expires_ms, withdraw=lease_s == 0)
        (count,) = await self._context.store.transact([operation])
        now_s = self._context.clock.monotonic()
        if lease_s == 0:
            self._plan_count = max(0, self._plan_count - int(count))
            self._shares.withdraw(principal, ids, now_s)
        elif count:
            for plan_snapshot_id in ids:
                self._shares.grant(principal, plan_snapshot_id, now_s, now_s + lease_s)
        return int(count)

    def _check_lease_limits(self, principal: str, plans: Sequence[int]) -> bool:
        """Return whether the principal may lease the plans. If a limit is exhausted, also record the refusal."""
        now_s = self._context.clock.monotonic()
        new_leases = self._shares.count_new_leases(principal, plans, now_s)
        exhausted_limit = self._shares.find_exhausted_limit(principal, now_s, new_leases) if new_leases else None
        if exhausted_limit is not None:
            self._refuse(exhausted_limit, principal)
        return exhausted_limit is None

    async def find_and_renew(
        self, namespace: NamespacePath, name: str, lease_s: int, principal: str, audience: str | None = None
    ) -> StoredPlanTable | None:
        """Return the existing plan with this name, and renew its lease, so that equal requests share the plan.

        The plan must have the same audience, which is the value of X-Seamark-Plans or None.

        The lease is renewed for `principal` only if less than half of `lease_s` remains. So most requests for an
        existing plan write nothing.

        Returns:
            The plan, or None if it does not exist or the lease would exceed the principal's limit.
        """
        now_ms = self._context.clock.now_ms()
        plan = await self._context.store.load_plan_table(namespace, name)
        if plan is None or plan.audience != audience:
            return None
        if plan.expires_ms - now_ms >= lease_s * 1000 / 2:
            return plan
        plan_snapshot_id = derive_snapshot_id(plan.id)
        if not self._check_lease_limits(principal, [plan_snapshot_id]):
            return None
        expires_ms = max(plan.expires_ms, now_ms + lease_s * 1000)
        (is_renewed,) = await self._context.store.transact([RenewPlanTable(plan.id, expires_ms)])
        if is_renewed:
            now_s = self._context.clock.monotonic()
            self._shares.grant(principal, plan_snapshot_id, now_s, now_s + lease_s)
        return msgspec.structs.replace(plan, expires_ms=expires_ms) if is_renewed else None

    async def store_and_register(
        self,
        plan: StoredPlanTable,
        metadata: TableMetadata | None,
        files: Sequence[tuple[str, bytes]],
        lease_s: int,
        principal: str,
    ) -> StoredPlanTable:
        """Store the files and register the plan.

        If another request has already registered the name, the method deletes the files and returns the registered
        plan.
        The plan and the bytes of its files count against the limits of `principal` until the lease ends.

        Args:
            metadata: The metadata of the table, or None for a plan view.
            files: The plan's files, the metadata file last.
        """
        now_s, size = self._context.clock.monotonic(), sum(len(data) for _, data in files)
        self._shares.grant(principal, derive_snapshot_id(plan.id), now_s, now_s + lease_s, size)
        try:
            await gather([partial(self._context.objects.create, location, data) for location, data in files])
        except Exception:
            await self._remove_quietly(plan.files)
            raise
        plan = msgspec.structs.replace(plan, expires_ms=self._context.clock.now_ms() + lease_s * 1000)
        try:
            (plan_table,) = await self._context.store.transact([KeepPlanTable(plan)])
        except CommitUnknown:
            # If the outcome is unknown, the plan may be registered, so keep the files.
            raise
        except SeamarkError:
            await self._remove_quietly(plan.files)
            raise
        assert isinstance(plan_table, StoredPlanTable)
        if plan_table.id != plan.id:
            await self._remove_quietly(plan.files)
        else:
            self._plan_count += 1
            if metadata is not None:
                _, document = files[-1]
                self._context.documents.remember_table(plan.location, metadata, document)
        return plan_table

    async def drop_plans_of_removed_snapshots(self, commits: Iterable[TableCommit]) -> None:
        """Drop the plans whose snapshots a commit removes, because the engine deletes their files afterwards.

        Raises:
            BadRequest: The commit would add a snapshot of a plan to the table.
        """
        for commit in commits:
            for snapshot in commit.added_snapshots:
                # The files of a plan are deleted after a short time, so no snapshot of the table may use them.
                _check_manifest_list(snapshot.manifest_list)
            # An engine that saw a plan as a snapshot may remove it like other snapshots. The ids of such snapshots are
            # always positive, so other ids need no search.
            if removed_ids := {snapshot_id for snapshot_id in commit.removed_snapshot_ids if snapshot_id > 0}:
                drop = DropPlanSnapshots(commit.namespace, commit.name, tuple(sorted(removed_ids)))
                await self._context.store.transact([drop])

    async def clean(self) -> int:
        """Delete the files of plans whose leases ended `plan_table_grace_s` ago or earlier.

        Housekeeping calls this method periodically.

        Returns:
            The number of plans whose files were deleted.
        """
        store, passed_time = self._context.store, await read_passed_time(self._context.store, self._context.clock)
        before_ms = passed_time.find_time_ago(self._context.settings.plan_table_grace_s * 1000)
        retired_count = _PLANS_PER_BATCH
        while retired_count == _PLANS_PER_BATCH:
            (retired_count,) = await store.transact([RetirePlanTables(before_ms, _PLANS_PER_BATCH)])
        deleted_count, after_id = 0, None
        while plans := await store.list_retired_plan_tables(after_id, _PLANS_PER_BATCH):
            after_id = plans[-1].id
            deleted_count += sum(await gather([partial(self._delete, plan) for plan in plans], _DELETES_CONCURRENT_MAX))
        return deleted_count

    async def _delete(self, plan: StoredPlanTable) -> bool:
        """Delete the files of a plan, the metadata file first, and then the record of the plan.

        Returns:
            False if a file or the record could not be deleted. A later call then tries again.
        """
        try:
            for location in reversed(plan.files):
                await self._context.objects.delete(location)
            self._context.documents.forget(plan.location)
            await self._context.store.transact([ForgetPlanTable(plan.id)])
        except SeamarkError:
            return False
        return True

    async def _remove_quietly(self, locations: Sequence[str]) -> None:
        for location in locations:
            # If a deletion fails, orphans of a few kB remain.
            with contextlib.suppress(SeamarkError):
                await self._context.objects.delete(location)


def build_plan_limit_error(principal: str) -> TooManyRequests:
    return TooManyRequests(
        f"{principal} has reached the limit of plans of one principal (plan_tables_limit, plan_tables_bytes); "
        "withdraw some",
        _RETRY_S,
    )


def is_temporary_file(location: str) -> bool:
    """Return whether the file belongs to a plan or contains fresh rows of a stream, and is therefore deleted soon."""
    return _PLAN_FILE.search(location) is not None


def check_lasting(location: str, metadata: TableMetadata) -> None:
    """Check that neither the metadata file nor one of its manifest lists is a file of a plan.

    The files of a plan are deleted when its lease ends.

    Raises:
        BadRequest: The metadata or a manifest list belongs to a plan.
    """
    lists = (snapshot.manifest_list for snapshot in metadata.snapshots if snapshot.manifest_list is not None)
    file = next((path for path in (location, *lists) if _PLAN_FILE.search(path)), None)
    if file is not None:
        raise BadRequest(
            f"Cannot register {location}: the file {file} belongs to a plan, whose files are deleted when its lease "
            "ends; register a metadata file of the table"
        )


def _check_manifest_list(location: str | None) -> None:
    """Check that a manifest list does not belong to a plan, whose files are deleted when its lease ends.

    Raises:
        BadRequest: The manifest list belongs to a plan.
    """
    if location is not None and _PLAN_FILE.search(location):
        raise BadRequest(
            f"The manifest list {location} belongs to a plan, whose files are deleted when its lease ends; "
            "commit a snapshot with another manifest list"
        )
