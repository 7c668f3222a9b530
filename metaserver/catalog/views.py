"""Views: like tables, but with versions instead of snapshots. Tables and views share one set of names."""

from __future__ import annotations

import builtins
from functools import partial
from typing import Any

import msgspec

from seamark.formats.iceberg.metadata.properties import check_client_properties
from seamark.formats.iceberg.metadata.requirements import check_view_requirements
from seamark.formats.iceberg.views.view import ViewMetadata, encode_view
from seamark.formats.iceberg.views.view_updates import apply_view_updates, build_view_metadata
from seamark.formats.protocol.wire import check_new_name, format_path
from seamark.formats.runtime.errors import (
    BadRequest,
    CommitConflict,
    Corrupt,
    Forbidden,
)
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.documents import choose_file_suffix
from seamark.metaserver.catalog.dropped import make_drop_operations
from seamark.metaserver.catalog.ownership.claims import check_unclaimed, check_writable, make_claim, may_add_locations
from seamark.metaserver.catalog.ownership.owners import (
    borrows_rights,
    check_author,
    compute_view_fingerprint,
    protect_owner,
)
from seamark.metaserver.catalog.pointers import (
    build_pointer_swap,
    check_name_free,
    create_metadata_location,
    make_entry,
)
from seamark.metaserver.catalog.tables import rename_entry
from seamark.metaserver.catalog.values import Caller, CreateView, LoadedView, Page, TableIdentifier
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.operations import RecordInstant
from seamark.metaserver.store.port import InstantFilter

_FINGERPRINTS_MAX = 10_000


class Views:
    def __init__(self, context: CatalogContext) -> None:
        self._context = context
        self._recorded_fingerprints: dict[str, str] = {}
        """Verified fingerprints, by metadata file."""

    async def list(self, namespace: NamespacePath, page_token: str | None, page_size: int | None) -> Page[str]:
        return await self._context.list_names(EntryKind.VIEW, namespace, page_token, page_size)

    async def load_entry(self, namespace: NamespacePath, name: str) -> Entry:
        return await self._context.require_entry(EntryKind.VIEW, namespace, name)

    async def exists(self, namespace: NamespacePath, name: str) -> bool:
        return await self._context.store.load_entry(EntryKind.VIEW, namespace, name) is not None

    async def load(self, namespace: NamespacePath, name: str) -> LoadedView:
        entry = await self.load_entry(namespace, name)
        await self._context.documents.ensure_exists(entry.metadata_location)
        return LoadedView(entry=entry, metadata=await self._load_metadata(entry))

    async def _load_metadata(self, entry: Entry) -> ViewMetadata:
        """Return the metadata of a view.

        The view's writers can overwrite the file, and the UUID decides which locations and instants belong to the
        view.

        Raises:
            Forbidden: The file has metadata of another view, or changed metadata of a view with an owner.
        """
        metadata = await self._context.documents.view(entry.metadata_location)
        if metadata.view_uuid != entry.uuid:
            raise Forbidden(
                f"The metadata file of {format_path(entry.namespace, entry.name)} was overwritten by the file of "
                "another view; register an older metadata file"
            )
        if borrows_rights(metadata) and not await self._is_recorded(entry, metadata):
            raise Forbidden(
                f"The metadata file of {format_path(entry.namespace, entry.name)}, a view that runs with the rights of "
                "another user, was changed after its commit; register an older metadata file"
            )
        return metadata

    async def _is_recorded(self, entry: Entry, metadata: ViewMetadata) -> bool:
        """Return whether the view was committed with this content, or by a version that recorded no fingerprints."""
        fingerprint = compute_view_fingerprint(metadata, entry.metadata_location)
        if self._recorded_fingerprints.get(entry.metadata_location) == fingerprint:
            return True
        store = self._context.store
        if await store.find_instant_by_fingerprint(entry.uuid, fingerprint) is None:
            # If the last commit recorded a fingerprint, this server recorded the view, and with different content.
            for action in ("commit", "register", "create"):
                instant_filter = InstantFilter(uuid=entry.uuid, action=action, newest_first=True)
                if any(instant.fingerprint for instant in await store.list_instants(instant_filter, 1)):
                    return False
        if len(self._recorded_fingerprints) >= _FINGERPRINTS_MAX:
            self._recorded_fingerprints.clear()
        self._recorded_fingerprints[entry.metadata_location] = fingerprint
        return True

    async def create(self, caller: Caller, namespace: NamespacePath, request: CreateView) -> LoadedView:
        """Create a view: write its first metadata file, and record its name and locations."""
        requested_ms = self._context.clock.now_ms()
        check_new_name(request.name, "view name")
        await check_name_free(self._context, namespace, request.name, EntryKind.VIEW)
        uuid = str(self._context.clock.uuid4())
        location = await self._context.choose_location(
            caller, EntryKind.VIEW, namespace, request.name, uuid, request.location
        )
        await check_unclaimed(self._context, caller, location, "The view's location", (namespace, request.name))
        await self._context.check_properties(caller, request.properties or {}, {}, namespace)
        work = partial(
            build_view_metadata,
            uuid=uuid,
            location=location,
            schema=request.schema,
            view_version=request.view_version,
            properties=protect_owner(caller, request.properties or {}, {}, rewritten=True),
            now_ms=requested_ms,
        )
        metadata = await self._context.large.run_by_size(caller.principal_name, caller.request_bytes, work)
        document = encode_view(metadata)
        suffix = choose_file_suffix(document)
        path = create_metadata_location(self._context, location, metadata.properties, None, suffix)
        entry = make_entry(namespace, request.name, uuid, path, requested_ms, EntryKind.VIEW)
        instant = self._make_instant(caller, entry, "create", requested_ms, metadata)
        answer_records = self._context.make_answer_record(caller, status=200, metadata_location=path)
        claim = await make_claim(self._context, caller, metadata, entry, is_new_uuid=True)
        create_operations = self._context.make_create_operations(caller, entry)
        await self._context.create_and_transact(path, document, [claim, *create_operations, instant, *answer_records])
        return LoadedView(entry=entry, metadata=metadata)

    async def register(
        self, caller: Caller, namespace: NamespacePath, name: str, location: str, *, only_name: bool = False
    ) -> LoadedView:
        """Create a name for an existing metadata file of a view.

        Args:
            only_name: Whether to refuse a view that already has another name.

        Raises:
            BadRequest: The file is outside the warehouse, or is not a valid metadata file.
            Forbidden: The caller may not name the user with whose rights the view runs, or may not store the view
                at this location.
            AlreadyExists: The name exists, or the view has another name and `only_name` is true.
        """
        requested_ms = self._context.clock.now_ms()
        check_new_name(name, "view name")
        self._context.warehouse.check(location, "metadata-location")
        await check_name_free(self._context, namespace, name, EntryKind.VIEW)
        try:
            metadata = await self._context.documents.view(location)
        except Corrupt as error:  # The client named the file, so this is an error of the request.
            raise BadRequest(f"Cannot register {location}: {error.message}") from None
        self._context.warehouse.check(metadata.location, "The location in the metadata file")
        check_client_properties(await self._context.documents.read_stored_properties(location), "A registered view")
        check_author(caller, metadata)
        await self._context.check_registered_places(caller, namespace, location, metadata, metadata.view_uuid)
        entry = make_entry(namespace, name, metadata.view_uuid, location, requested_ms, EntryKind.VIEW)
        await self._context.transact(
            [
                *self._context.make_create_operations(caller, entry),
                await make_claim(
                    self._context, caller, metadata, entry, may_restore=True, requires_only_name=only_name
                ),
                self._make_instant(caller, entry, "register", requested_ms, metadata),
                *self._context.make_answer_record(caller, status=200, metadata_location=location),
            ]
        )
        return LoadedView(entry=entry, metadata=metadata)

    async def replace(
        self,
        caller: Caller,
        namespace: NamespacePath,
        name: str,
        requirements: builtins.list[dict[str, Any]],
        updates: builtins.list[dict[str, Any]],
    ) -> LoadedView:
        """Update a view. If another commit comes first, try again with the new metadata.

        Raises:
            CommitConflict: A requirement failed, or other commits came first in every attempt.
        """
        requested_ms = self._context.clock.now_ms()
        retries = self._context.settings.commit_retries
        for attempt in range(retries + 1):
            entry = await self.load_entry(namespace, name)
            base = await self._load_metadata(entry)
            check_view_requirements(base.view_uuid, requirements)
            work = partial(apply_view_updates, base, updates, now_ms=self._context.clock.now_ms())
            metadata = await self._context.large.run_by_size(caller.principal_name, caller.request_bytes, work)
            metadata = _protect_owner(caller, base, metadata)
            if metadata is base:
                # The updates change nothing, so there is no commit. Only the answer is recorded.
                answer_records = self._context.make_answer_record(
                    caller, status=200, metadata_location=entry.metadata_location
                )
                if answer_records:
                    await self._context.transact(answer_records)
                return LoadedView(entry=entry, metadata=base)
            try:
                return await self._commit_metadata(caller, entry, base, metadata, requested_ms)
            except CommitConflict:
                if attempt == retries:
                    raise
        raise AssertionError("the loop returns or raises")

    async def drop(self, caller: Caller, namespace: NamespacePath, name: str) -> None:
        requested_ms = self._context.clock.now_ms()
        entry = await self.load_entry(namespace, name)
        operations = make_drop_operations(self._context, caller, entry, purge=False, requested_ms=requested_ms)
        await self._context.transact([*operations, *self._context.make_answer_record(caller, status=204)])

    async def rename(self, caller: Caller, source: TableIdentifier, target: TableIdentifier) -> None:
        await rename_entry(self._context, caller, EntryKind.VIEW, source, target)

    async def _commit_metadata(
        self, caller: Caller, entry: Entry, base: ViewMetadata, metadata: ViewMetadata, requested_ms: int
    ) -> LoadedView:
        """Write a new metadata file of a view, and make it the current file. `base` is the metadata before the change.

        Raises:
            CommitConflict: Another commit has changed the view.
        """
        if metadata.location != base.location:
            await self._context.check_location(caller, metadata.location, "The view's location", entry.namespace)
        await self._context.check_properties(caller, metadata.properties, base.properties, entry.namespace)
        now_ms = self._context.clock.now_ms()
        document = encode_view(metadata)
        suffix = choose_file_suffix(document)
        path = create_metadata_location(
            self._context, metadata.location, metadata.properties, entry.metadata_location, suffix
        )
        new_entry = make_entry(entry.namespace, entry.name, metadata.view_uuid, path, now_ms, EntryKind.VIEW)
        instant = self._make_instant(caller, new_entry, "commit", requested_ms, metadata)
        answer_records = self._context.make_answer_record(caller, status=200, metadata_location=path)
        claims: builtins.list[Any] = []
        if may_add_locations(base, metadata):
            claims.append(await make_claim(self._context, caller, metadata, new_entry))
        else:
            await check_writable(self._context, entry.uuid, metadata)
        await self._context.create_and_transact(
            path, document, [*claims, build_pointer_swap(entry, path, now_ms), instant, *answer_records]
        )
        return LoadedView(entry=new_entry, metadata=metadata)

    def _make_instant(
        self, caller: Caller, entry: Entry, action: str, requested_ms: int, metadata: ViewMetadata
    ) -> RecordInstant:
        return self._context.make_instant(
            caller,
            entry,
            action,
            requested_ms=requested_ms,
            fingerprint=compute_view_fingerprint(metadata, entry.metadata_location),
        )


def _protect_owner(caller: Caller, base: ViewMetadata, metadata: ViewMetadata) -> ViewMetadata:
    """Return the metadata, with owners that give the caller no rights of another user.

    If the current version or the schemas change, the text of the view counts as rewritten: it then runs with the rights
    of the caller instead of the former owner.
    """
    if metadata is base:
        return base
    rewritten = metadata.current_version != base.current_version or metadata.schemas != base.schemas
    properties = protect_owner(caller, metadata.properties, base.properties, rewritten=rewritten)
    return msgspec.structs.replace(metadata, properties=properties)
