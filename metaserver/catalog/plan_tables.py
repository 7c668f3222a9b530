"""Plan tables: names under which a table is read as one plan left it, for as long as their lease lasts.

The rules it keeps. What a name stands for never changes: it says by a digest of which table, which metadata and which
filter, and the row in the pointer store says which files were written for it, once, under paths that nothing else ever
has. Whoever asks for the same plan shares both. A name is good only while the table that it was made of bears that
table's name. Files outlive the lease, so that a query that has begun ends; then the name goes, then the files, then the
row, so that a crash between leaves a row to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence

import msgspec

from metaserver.catalog.parts import Parts
from metaserver.catalog.values import LoadedTable
from metaserver.errors import CommitUnknown, NoSuchTable, SeamarkError
from metaserver.iceberg.metadata import TableMetadata
from metaserver.store.port import (
    Entry,
    EntryKind,
    ForgetPlanTable,
    KeepPlanTable,
    NamespacePath,
    PlanTable,
    RenewPlanTable,
    RetirePlanTables,
)
from metaserver.wire import NAME_MAX, PLAN_MARK, encode_json, is_plan_name, show

_DIGEST_CHARACTERS = 32
_BATCH = 1000
_DELETED_AT_ONCE = 16
_COUNTED_S = 10.0
"""How long a count of them all serves; those made here since are added to it."""


class LoadedPlan(msgspec.Struct, frozen=True):
    """A plan table as engines load it, and the table that it is of."""

    plan: PlanTable
    metadata: TableMetadata
    table: LoadedTable


def plan_name(entry: Entry, snapshot_id: int, question: str) -> str | None:
    """Of the plan that answers `question`, the bound filter, on a snapshot of the table. None where it is too long."""
    said = (*entry.namespace, entry.name, entry.uuid, entry.metadata_location)
    told = encode_json((said, entry.index_version, snapshot_id, question))
    name = f"{entry.name}{PLAN_MARK}{hashlib.sha256(told).hexdigest()[:_DIGEST_CHARACTERS]}".lower()
    return name if len(name) <= NAME_MAX else None


def digest_of(name: str) -> str:
    """By which its files are called, from the name of a plan."""
    return name.rpartition(PLAN_MARK)[2]


class PlanTables:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._count, self._counted_s = 0, -_COUNTED_S

    async def has_room(self) -> bool:
        """Whether there may be another: every reader can have some made, and each has files."""
        now_s = self._parts.clock.monotonic()
        if now_s - self._counted_s >= _COUNTED_S:
            self._counted_s = now_s
            self._count = await self._parts.store.plan_table_count()
        return self._count < self._parts.settings.plan_tables_limit

    async def named(self, namespace: NamespacePath, name: str) -> tuple[PlanTable, Entry]:
        """The plan of this name, and where its table's pointer stands. NoSuchTable, in the words that any table has,
        for a lease that has ended, and where another table bears the table's name by now."""
        plan = await self._parts.store.plan_table(namespace, name) if is_plan_name(name) else None
        if plan is not None and plan.expires_ms > self._parts.clock.now_ms():
            entry = await self._parts.store.entry(EntryKind.TABLE, namespace, plan.of_name)
            if entry is not None and entry.uuid == plan.uuid:
                return plan, entry
        raise NoSuchTable(f"Table does not exist: {show(namespace, name)}")

    async def load(self, namespace: NamespacePath, name: str) -> LoadedPlan:
        """As `named`. NotFound where a metadata file is gone from storage."""
        plan, entry = await self.named(namespace, name)
        documents = self._parts.documents
        table = LoadedTable(entry=entry, metadata=await documents.table(entry.metadata_location))
        await documents.ensure_exists(plan.location)
        return LoadedPlan(plan, await documents.table(plan.location), table)

    async def read(self, namespace: NamespacePath, name: str) -> LoadedTable:
        """As `load`, for reading only: the plan's metadata as those of its table, at the table's location."""
        plan = await self.load(namespace, name)
        entry = plan.table.entry
        assert entry is not None
        metadata = msgspec.structs.replace(plan.metadata, location=plan.table.metadata.location)
        return LoadedTable(msgspec.structs.replace(entry, metadata_location=plan.plan.location), metadata)

    async def share(self, namespace: NamespacePath, name: str, lease_s: int) -> PlanTable | None:
        """The plan of this name where there is one whose files stay for `lease_s`. It is renewed where less than half
        of that is left, so that most who share it change nothing."""
        now_ms = self._parts.clock.now_ms()
        plan = await self._parts.store.plan_table(namespace, name)
        if plan is None:
            return None
        if plan.expires_ms - now_ms >= lease_s * 500:
            return plan
        expires_ms = max(plan.expires_ms, now_ms + lease_s * 1000)
        (renewed,) = await self._parts.store.transact([RenewPlanTable(plan.id, expires_ms)])
        return msgspec.structs.replace(plan, expires_ms=expires_ms) if renewed else None

    async def keep(
        self, plan: PlanTable, metadata: TableMetadata | None, files: Sequence[tuple[str, bytes]], lease_s: int
    ) -> PlanTable:
        """Stores the files and gives the plan its name. Another's, where another was first; these files go then.

        `files` are those of the plan, the metadata file last. A plan view has no table's `metadata`."""
        try:
            async with asyncio.TaskGroup() as group:
                for location, data in files:
                    group.create_task(self._parts.objects.create(location, data))
        except BaseExceptionGroup as errors:
            await self._remove_quietly(plan.files)
            raise errors.exceptions[0] from None
        plan = msgspec.structs.replace(plan, expires_ms=self._parts.clock.now_ms() + lease_s * 1000)
        try:
            (kept,) = await self._parts.store.transact([KeepPlanTable(plan)])
        except CommitUnknown:
            raise  # it may have its name
        except SeamarkError:
            await self._remove_quietly(plan.files)
            raise
        assert isinstance(kept, PlanTable)
        if kept.id != plan.id:
            await self._remove_quietly(plan.files)
        else:
            self._count += 1
            if metadata is not None:
                self._parts.documents.remember_table(plan.location, metadata, files[-1][1])
        return kept

    async def clean(self) -> int:
        """A round of housekeeping. How many plans' files were deleted."""
        store, now_ms = self._parts.store, self._parts.clock.now_ms()
        before_ms = now_ms - self._parts.settings.plan_table_grace_s * 1000
        while (await store.transact([RetirePlanTables(before_ms, _BATCH)]))[0] == _BATCH:
            pass
        done, after = 0, None
        while plans := await store.plan_tables_retired(after, _BATCH):
            after = plans[-1].id
            slots = asyncio.Semaphore(_DELETED_AT_ONCE)
            done += sum(await asyncio.gather(*(self._delete(plan, slots) for plan in plans)))
        return done

    async def _delete(self, plan: PlanTable, slots: asyncio.Semaphore) -> bool:
        """False where a file could not be deleted: another round tries again."""
        async with slots:
            try:
                for location in reversed(plan.files):
                    await self._parts.objects.delete(location)
                self._parts.documents.forget(plan.location)
                await self._parts.store.transact([ForgetPlanTable(plan.id)])
            except SeamarkError:
                return False
        return True

    async def _remove_quietly(self, locations: Sequence[str]) -> None:
        for location in locations:
            with contextlib.suppress(SeamarkError):  # orphans of a few kilobytes, which nothing points at
                await self._parts.objects.delete(location)
