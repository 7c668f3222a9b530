"""Registers the tables, views and functions that were found in a warehouse.

Each entry is registered with its claims in its own transaction, as a request would register it. If the process is
killed, the catalog is valid, and the next run registers the remaining entries. Entries that are already in the database
do not change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.formats.protocol.wire import check_namespace, check_new_name
from seamark.formats.runtime.errors import AlreadyExists, BadRequest, SeamarkError
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.ownership.claims import claim_folder, make_claim
from seamark.metaserver.catalog.ownership.own_files import ALLOWED_LOCATIONS
from seamark.metaserver.catalog.ownership.owners import compute_view_fingerprint
from seamark.metaserver.catalog.pointers import make_entry
from seamark.metaserver.catalog.policies import parse_setters
from seamark.metaserver.catalog.recovery.found_files import Finding, FoundFile
from seamark.metaserver.catalog.recovery.naming import FoundName, find_name_of_location
from seamark.metaserver.catalog.recovery.selection import Candidate
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.store.model import ClaimedLocation, DroppedEntry, NamespacePath, make_retained_id
from seamark.metaserver.store.operations import (
    ClaimLocations,
    CreateEntry,
    CreateNamespace,
    Operation,
    ReleaseLocations,
)

_CONCURRENT_REGISTRATIONS_MAX = 64


class Registered(msgspec.Struct, frozen=True, rename="kebab"):
    """A table, view or function that was registered, or that a dry run would register.

    Attributes:
        notes: Sentences about certain or possible differences from the state before the loss.
    """

    kind: str
    name: str
    location: str
    uuid: str
    notes: tuple[str, ...] = ()


class RebuiltDatabase(msgspec.Struct, frozen=True, rename="kebab"):
    """The result of a rebuild of the database from the metadata files in storage.

    Attributes:
        registered_before: The number of found tables, views and functions that were already in the database.
        index_files: The number of index files that were registered.
    """

    registered: tuple[Registered, ...]
    findings: tuple[Finding, ...]
    registered_before: int = msgspec.field(name="known")
    index_files: int = 0


def make_result(
    registrations: Iterable[Registered], findings: Iterable[Finding], registered_before: int
) -> RebuiltDatabase:
    """Return the result, sorted by name and location."""
    return RebuiltDatabase(
        tuple(sorted(registrations, key=lambda registration: (registration.name, registration.kind))),
        tuple(sorted(findings, key=lambda finding: (finding.location, finding.reason))),
        registered_before,
    )


class Rebuild:
    """Registers the selected files in a catalog that serves no requests."""

    def __init__(self, context: CatalogContext, caller: Caller) -> None:
        self._context = context
        self._caller = caller

    async def run(self, candidates: Sequence[Candidate]) -> RebuiltDatabase:
        """Register the candidates. Their UUIDs must not be in the database."""
        # Register last the files that the operator has chosen. Such a file may name folders outside its location, and
        # these folders must not take the location of another table.
        candidates = sorted(candidates, key=lambda candidate: (candidate.is_chosen, str(candidate.name)))
        registrations: list[Registered] = []
        findings: list[Finding] = []
        namespaces: set[NamespacePath] = set()
        for start in range(0, len(candidates), _CONCURRENT_REGISTRATIONS_MAX):
            batch = candidates[start : start + _CONCURRENT_REGISTRATIONS_MAX]
            for candidate in batch:
                await self._create_namespaces(candidate.name.namespace, namespaces)
            for result in await asyncio.gather(*map(self._register, batch)):
                if isinstance(result, Finding):
                    findings.append(result)
                else:
                    registrations.append(result)
        return make_result(registrations, findings, 0)

    async def _create_namespaces(self, path: NamespacePath, created_paths: set[NamespacePath]) -> None:
        for depth in range(1, len(path) + 1):
            if path[:depth] not in created_paths:
                with suppress(AlreadyExists):
                    await self._context.store.transact([CreateNamespace(path=path[:depth], properties={})])
                created_paths.add(path[:depth])

    async def _register(self, candidate: Candidate) -> Registered | Finding:
        """Register a candidate, or return the reason why it cannot be registered."""
        file, name = candidate.file, candidate.name
        try:
            await self._context.transact(await self._make_operations(candidate))
        except SeamarkError as error:
            return Finding(file.location, f"It cannot be registered: {error.message}", str(name))
        return describe_registration(candidate)

    async def _make_operations(self, candidate: Candidate) -> list[Operation]:
        """Return the operations that create the entry of a candidate and record its locations.

        Raises:
            BadRequest: The name or a location is invalid.
        """
        context, file, name = self._context, candidate.file, candidate.name
        requested_ms = context.clock.now_ms()
        check_new_name(name.name, f"{file.kind.value} name")
        check_namespace(name.namespace)
        entry = make_entry(name.namespace, name.name, file.uuid, file.location, requested_ms, file.kind)
        fingerprint = None
        if file.metadata is None:
            # `returns` allows a dropped function to become live again with the same UUID.
            claim = msgspec.structs.replace(
                await claim_folder(context, entry, file.table_location, is_new_uuid=False),
                namespace=name.namespace,
                name=name.name,
                returns=True,
            )
        else:
            context.warehouse.check(file.metadata.location, "The location in the file")
            claim = await make_claim(context, self._caller, file.metadata, entry, may_restore=True)
        if isinstance(file.metadata, ViewMetadata):
            fingerprint = compute_view_fingerprint(file.metadata, file.location)
        summary = {"rebuilt": "true"}
        instant = context.make_instant(
            self._caller, entry, "register", requested_ms=requested_ms, fingerprint=fingerprint, summary=summary
        )
        return [claim, CreateEntry(entry=entry), instant]

    async def keep_locations(self, files: Sequence[FoundFile]) -> None:
        """Claim the locations of tables, views and functions that are not registered.

        These locations were claimed before the database was lost. Without a claim, other tables could name the files
        there. The claim belongs to a retained entry (`seamark retained`), and ends when the entry is registered.
        """
        for start in range(0, len(files), _CONCURRENT_REGISTRATIONS_MAX):
            await asyncio.gather(*map(self._keep_location, files[start : start + _CONCURRENT_REGISTRATIONS_MAX]))

    async def _keep_location(self, file: FoundFile) -> None:
        """Claim the location of one file, so that no other table can use it.

        The claim belongs to a retained entry: it has the location, but is no table, view or function that clients see.
        """
        context, location = self._context, file.folder.removesuffix("/metadata")
        if location == file.folder:
            # The file is not in a folder `metadata`, so the location of its table is unknown.
            return
        try:
            name = find_name_of_location(context.warehouse, location, file.uuid)
        except BadRequest:
            name = FoundName((), location.rpartition("/")[2])
        now_ms = context.clock.now_ms()
        entry = make_entry(name.namespace, name.name, file.uuid, file.location, now_ms, file.kind)
        retained_entry = DroppedEntry(
            make_retained_id(file.uuid),
            entry,
            purge=False,
            dropped_ms=now_ms,
            expires_ms=0,
            principal_name=self._caller.principal_name,
        )
        # The database refuses a claim that overlaps the claim of another entry, which already protects the location.
        # The root of the warehouse cannot be claimed.
        with suppress(BadRequest):
            key = context.warehouse.make_key(context.warehouse.parse(location))
            claim = ClaimLocations(uuid=file.uuid, locations=(ClaimedLocation(key=key, display_form=location),))
            await context.store.transact([claim, ReleaseLocations(uuid=file.uuid, retained=retained_entry)])


async def find_taken_uuids(context: CatalogContext, uuids: Iterable[str]) -> set[str]:
    """Return the UUIDs for which the database has, or had, an entry."""
    taken_uuids: set[str] = set()
    pending = list(uuids)
    for start in range(0, len(pending), _CONCURRENT_REGISTRATIONS_MAX):
        batch = pending[start : start + _CONCURRENT_REGISTRATIONS_MAX]
        are_taken = await asyncio.gather(*map(context.is_uuid_taken, batch))
        taken_uuids |= {uuid for uuid, is_taken in zip(batch, are_taken, strict=True) if is_taken}
    return taken_uuids


def describe_registration(candidate: Candidate) -> Registered:
    file, name = candidate.file, candidate.name
    notes = [name.note] if name.note else []
    properties = {} if file.metadata is None else file.metadata.properties
    if properties.get(ALLOWED_LOCATIONS):
        notes.append(f"{ALLOWED_LOCATIONS} is not in force until an admin sets it again")
    if setters := parse_setters(properties):
        notes.append(f"the table services need the rights of {', '.join(sorted(set(setters.values())))[:300]}")
    return Registered(file.kind.value, str(name), file.location, file.uuid, tuple(notes))
