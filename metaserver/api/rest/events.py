"""Serves the events of the catalog (draft of the specification in apache/iceberg#12584, August 2026).

The timeline is the log of events. An event of a table or view has
the updates that turn the metadata before the change into the metadata after the change (`metadata_differences`).
Instants that change no metadata, such as the instants of jobs, are not events.

A caller sees the events of the objects that it may browse now. The metadata in an event may belong to a table that had
the name before, or that has another name now. The right is therefore checked for the present name of the table, or for
the namespace if the table is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.iceberg.views.view import ViewMetadata, encode_view
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, Corrupt, Forbidden, NotFound, TooLarge
from seamark.metaserver.access.principal import set_principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.catalog.documents import METADATA_BYTES_MAX
from seamark.metaserver.store.model import POSITION, EntryKind, Instant, InstantState, NamespacePath
from seamark.metaserver.store.port import FOUND_TABLES_MAX, InstantFilter
from seamark.metaserver.timeline.metadata_differences import list_table_updates, list_view_updates

EVENTS_PER_PAGE = 100
"""The default number of events of a page."""
INSTANTS_MAX = 20_000
"""The maximum number of instants that a request reads. A page may therefore be empty although there are more events."""
UPDATES_BYTES_MAX = 8 << 20
"""The size of the updates, as JSON, after which a page ends."""
DOCUMENT_BYTES_MAX = 64 << 20
"""The size of the metadata files, as JSON, after which a page ends."""
NAMES_MAX = 10_000
"""The maximum number of names in `catalog-objects-by-name`."""
SMALL_DOCUMENT_BYTES_MAX = 2 << 20
"""The maximum size of a metadata file, as JSON, that is read while other requests read theirs."""
_INSTANTS_PER_BATCH = 500
_UNREADABLE = (NotFound, Corrupt, Forbidden, TooLarge, BadRequest)
"""The errors that a deleted, damaged, overwritten, too large or disallowed metadata file causes."""
_OBJECT_TYPES = ("namespace", "table", "view")
_POINTER_ACTIONS = ("create", "commit", "register", "undrop")
"""The actions that change the metadata file of an entry. Their instants have its new location."""
_NAMESPACE_TYPES = {
    "create": "create-namespace",
    "update": "update-namespace-properties",
    "drop": "drop-namespace",
}
"""The types of the operations on namespaces, by the actions of their instants."""
_NO_UPDATES = msgspec.Raw(b"[]")
_Source = TableMetadata | ViewMetadata | dict[str, Any]
"""Metadata, or the decoded JSON in the form of `loadTable` and `loadView`."""
_log = structlog.get_logger("seamark.events")


class QueryEventsRequest(msgspec.Struct, frozen=True, rename="kebab"):
    """The body of a request for events."""

    continuation_token: str | None = None
    page_size: Annotated[int | None, doc("The maximum number of events.", minimum=1)] = None
    since_timestamp_ms: Annotated[
        int | None,
        doc("The time of the earliest event, in milliseconds. It is ignored if there is a token."),
    ] = None
    operation_types: list[str] | None = None
    catalog_objects_by_name: Annotated[
        list[list[str]] | None, doc("The objects whose events are returned. The objects in them are included.")
    ] = None
    catalog_objects_by_uuid: list[str] | None = None
    object_types: list[str] | None = None
    custom_filters: Annotated[dict[str, str] | None, doc("Custom filters, which this server does not have.")] = None


class CatalogEvent(msgspec.Struct, frozen=True, rename="kebab"):
    """A change of a namespace, table or view."""

    event_id: str
    request_id: str
    request_event_count: int
    timestamp_ms: int
    actor: dict[str, str]
    operation: dict[str, Any]


class QueryEventsResponse(msgspec.Struct, frozen=True, rename="kebab"):
    """A page of events."""

    continuation_token: str
    events: list[CatalogEvent]


class _Position(msgspec.Struct, frozen=True, array_like=True):
    """The position that a continuation token contains."""

    after: str | None
    """The position of the last instant that was read, or None at the beginning of the log."""
    since_ms: int | None
    request_id: str = ""
    """The id of the request of the last instant. The next instants may belong to the same request."""
    request_events: int = 0
    """The number of events of this request that were read."""


@Route(
    "POST",
    "/v1/{prefix}/events",
    "getEvents",
    check=Check.SOMEWHERE,
    answers=(ResponseSpec(200, "The events, in the order of the changes", QueryEventsResponse),),
).takes(QueryEventsRequest)
async def get_events(call: Call, body: QueryEventsRequest) -> QueryEventsResponse:
    """Return a page of events that the caller may see."""
    _check_request(body)
    tokens = call.components.catalog.pages
    position = _Position(None, body.since_timestamp_ms)
    if body.continuation_token:
        position = _read_token(tokens.decode(body.continuation_token))
    limit = min(body.page_size or EVENTS_PER_PAGE, call.components.settings.page_limit)
    call.is_checked = True  # Each event is checked on its own.
    events, position = await _EventPage(call, body, limit).read(position)
    return QueryEventsResponse(tokens.encode(msgspec.json.encode(position).decode()), events)


def _check_request(body: QueryEventsRequest) -> None:
    """Check the fields of a request.

    Raises:
        BadRequest: A field is invalid.
    """
    if body.page_size is not None and body.page_size < 1:
        raise BadRequest(f"page-size is {body.page_size}; it must be at least 1")
    if len(body.catalog_objects_by_name or ()) > NAMES_MAX:
        raise BadRequest(
            f"catalog-objects-by-name has {len(body.catalog_objects_by_name or ())} names; send at most {NAMES_MAX}"
        )
    for kind in body.object_types or ():
        if kind not in _OBJECT_TYPES:
            raise BadRequest(f"object-types has {kind[:40]!r}; the types are {', '.join(_OBJECT_TYPES)}")
    if body.custom_filters:
        names = ", ".join(sorted(body.custom_filters))[:80]
        raise BadRequest(f"custom-filters has {names}; this server has no custom filters, so leave them out")


def _read_token(text: str | None) -> _Position:
    """Return the position of a decrypted token.

    Raises:
        BadRequest: The token does not belong to this listing.
    """
    try:
        position = convert_json((text or "").encode(), _Position)
    except msgspec.DecodeError:
        position = None
    if position is None or (position.after is not None and not POSITION.fullmatch(position.after)):
        raise BadRequest("continuation-token does not belong to this listing; start again without it")
    return position


class _EventPage:
    """Reads one page of events."""

    def __init__(self, call: Call, body: QueryEventsRequest, limit: int) -> None:
        self._call = call
        self._store = call.components.store
        self._limit = limit
        self._operation_types = None if body.operation_types is None else frozenset(body.operation_types)
        self._object_types = None if body.object_types is None else frozenset(body.object_types)
        self._uuids = None if body.catalog_objects_by_uuid is None else frozenset(body.catalog_objects_by_uuid)
        names = body.catalog_objects_by_name
        self._paths = None if names is None else frozenset(tuple(path) for path in names)
        self._events: list[CatalogEvent] = []
        self._locations: dict[str, str | None] = {}
        """The metadata file of each entry after the instants that were read, by UUID."""
        self._latest_document: tuple[str, dict[str, Any]] | None = None
        """The location and content of the last file, if it is small. The next change of the entry starts from it."""
        self._rights: dict[Securable, bool] = {}
        """For each object that was checked, whether the caller may see it."""
        self._updates_bytes = 0
        self._document_bytes = 0

    async def read(self, position: _Position) -> tuple[list[CatalogEvent], _Position]:
        """Return the events after a position, and the position of the next page.

        Instants, the recorded actions, are read in batches until a batch has events for the page. At most
        `INSTANTS_MAX` instants are read, so a page may be empty before the end of the log.
        """
        for _ in range(INSTANTS_MAX // _INSTANTS_PER_BATCH):
            batch = await self._store.list_instants(InstantFilter(since=position.after), _INSTANTS_PER_BATCH)
            position = await self._read_batch(position, batch)
            if self._events or len(batch) < _INSTANTS_PER_BATCH:
                break
        return self._events, position

    async def _read_batch(self, position: _Position, batch: Sequence[Instant]) -> _Position:
        """Add the events of a batch of instants to the page, and return the position after them.

        An instant is one recorded change of the catalog. If the request selects no event of it, its new metadata file
        is remembered, because the next event of the table compares with this file.

        Each event states the number of events of its request. So instants are grouped by request, and the last group of
        a full batch is left to the next batch, which may have the rest of it.
        """
        visible_events = await self._find_operations(batch)
        groups = [list(group) for _, group in itertools.groupby(batch, _find_request_id)]
        if len(groups) > 1 and len(batch) == _INSTANTS_PER_BATCH:
            groups.pop()  # The request may have more instants, so it is read with the next batch.
        for group in groups:
            request_id = _find_request_id(group[0])
            event_count = sum(instant.position in visible_events for instant in group)
            if request_id == position.request_id:
                event_count = max(event_count, position.request_events)
            for instant in group:
                if self._is_full():
                    return position
                operation = visible_events.get(instant.position)
                if operation is not None and self._is_selected(position, instant, operation):
                    self._events.append(await self._make_event(instant, operation, request_id, event_count))
                elif _moves_pointer(instant):
                    self._locations[instant.uuid] = instant.metadata_location
                position = _Position(instant.position, position.since_ms, request_id, event_count)
        return position

    def _is_full(self) -> bool:
        """Return whether the page has reached one of its limits."""
        return (
            len(self._events) == self._limit
            or self._updates_bytes >= UPDATES_BYTES_MAX
            or self._document_bytes >= DOCUMENT_BYTES_MAX
        )

    async def _find_operations(self, batch: Sequence[Instant]) -> dict[str, dict[str, Any]]:
        """Return the operations that the caller may see, without updates, by the position of their instants.

        The caller must have rights on the present names of an entry, and on its old and new name if it was renamed. All
        rights of the batch are checked together.
        """
        candidates = [
            instant
            for instant in batch
            if instant.state is InstantState.COMPLETED
            and instant.kind in (EntryKind.NAMESPACE, EntryKind.TABLE, EntryKind.VIEW)
            and _find_type(instant) is not None
        ]
        securables_by_uuid: dict[str, list[Securable]] = {}
        uuids = list(dict.fromkeys(instant.uuid for instant in candidates if instant.uuid))
        for start in range(0, len(uuids), FOUND_TABLES_MAX):
            for entry in await self._store.find_entries(uuids[start : start + FOUND_TABLES_MAX]):
                securables_by_uuid.setdefault(entry.uuid, []).append(
                    Securable(entry.namespace, entry.kind.value, entry.name)
                )
        # An entry that no longer exists has no name, so the right on its namespace is checked.
        securables_by_candidate = [
            securables_by_uuid.get(instant.uuid) or [Securable(instant.namespace)] for instant in candidates
        ]
        await self._check_rights(
            [
                *itertools.chain.from_iterable(securables_by_candidate),
                *(_find_source(instant) for instant in candidates),
                *(target for instant in candidates if (target := _find_target(instant))),
            ]
        )
        operations = {}
        for instant, securables in zip(candidates, securables_by_candidate, strict=True):
            operation = self._make_operation(instant, securables)
            if operation is not None:
                operations[instant.position] = operation
        return operations

    async def _check_rights(self, securables: Sequence[Securable]) -> None:
        """Check all rights of a batch at once, because each check may query the database or an external service."""
        unchecked_securables = [securable for securable in dict.fromkeys(securables) if securable not in self._rights]
        if not unchecked_securables:
            return
        allowed_securables = frozenset(await self._call.select(unchecked_securables, lambda securable: securable))
        self._rights.update((securable, securable in allowed_securables) for securable in unchecked_securables)

    def _make_operation(self, instant: Instant, present_securables: Sequence[Securable]) -> dict[str, Any] | None:
        """Return the operation of an instant as the caller may see it, or None if the caller may not see it.

        A rename is a creation for a caller that may not see the old name. It is a drop for a caller that may not see
        the new name.

        Args:
            instant: The instant.
            present_securables: The names that the entry has now. The caller must have the right on each of them.
        """
        operation_type = _find_type(instant)
        source = _find_source(instant)
        if not all(self._rights[securable] for securable in present_securables):
            return None
        sees_source = self._rights[source]
        if instant.kind is EntryKind.NAMESPACE:
            return _describe_namespace_change(instant)
        kind = instant.kind.value
        if instant.action != "rename":
            if not sees_source:
                return None
            operation: dict[str, Any] = {"operation-type": operation_type, "identifier": _describe_object(source)}
            if operation_type == "drop-table":
                operation["purge"] = bool(instant.summary.get("purge", False))
            return {**operation, f"{kind}-uuid": instant.uuid}
        target = _find_target(instant)
        sees_target = target is not None and self._rights[target]
        if sees_source and sees_target and target is not None:
            source_and_destination = {"source": _describe_object(source), "destination": _describe_object(target)}
            return {"operation-type": f"rename-{kind}", **source_and_destination, f"{kind}-uuid": instant.uuid}
        if sees_source:
            return {
                "operation-type": f"drop-{kind}",
                "identifier": _describe_object(source),
                f"{kind}-uuid": instant.uuid,
            }
        if sees_target and target is not None:
            added_type = "register-table" if kind == "table" else "create-view"
            return {"operation-type": added_type, "identifier": _describe_object(target), f"{kind}-uuid": instant.uuid}
        return None

    def _is_selected(self, position: _Position, instant: Instant, operation: Mapping[str, Any]) -> bool:
        """Return whether the filters of the request select an operation."""
        identifiers = [operation[key] for key in ("identifier", "source", "destination") if key in operation]
        paths = [(*identifier["namespace"], identifier["name"]) for identifier in identifiers]
        if instant.kind is EntryKind.NAMESPACE:
            paths = [instant.namespace]
        return (
            (position.since_ms is None or _find_time_ms(instant) >= position.since_ms)
            and (self._operation_types is None or operation["operation-type"] in self._operation_types)
            and (self._object_types is None or instant.kind.value in self._object_types)
            and (self._uuids is None or instant.uuid in self._uuids)
            and (self._paths is None or any(self._is_named(path) for path in paths))
        )

    def _is_named(self, path: tuple[str, ...]) -> bool:
        """Return whether the request names the object or a namespace that contains it.

        An empty name in the request is the whole catalog.
        """
        assert self._paths is not None
        return any(path[:levels] in self._paths for levels in range(len(path) + 1))

    async def _make_event(
        self, instant: Instant, operation: dict[str, Any], request_id: str, event_count: int
    ) -> CatalogEvent:
        """Return the event of an instant, with its updates.

        The metadata file after each change is kept, because the next change of the same entry is compared with it.
        """
        assert instant.position is not None
        operation_type = operation["operation-type"]
        if operation_type in ("create-table", "update-table", "create-view", "update-view"):
            operation = {**operation, "updates": await self._list_updates(instant, operation_type)}
        elif _moves_pointer(instant):
            self._locations[instant.uuid] = instant.metadata_location
        actor = {"id": instant.principal_name}
        return CatalogEvent(instant.position, request_id, event_count, _find_time_ms(instant), actor, operation)

    async def _list_updates(self, instant: Instant, operation_type: str) -> msgspec.Raw:
        """Return the updates of a change as JSON, or no updates if a metadata file is deleted or damaged.

        Other errors, such as an unavailable storage, end the request without a token, so that the client repeats it.
        One damaged file must not end the request, because then no client could read beyond this event.

        The file before the change is the file of the previous instant of the entry, which a page usually has in memory.
        """
        base_location = None
        if operation_type.startswith("update-"):
            if instant.uuid not in self._locations:
                self._locations[instant.uuid] = await self._find_base(instant)
            base_location = self._locations[instant.uuid]
        location = self._locations[instant.uuid] = instant.metadata_location
        if location is None or (base_location is None and operation_type.startswith("update-")):
            return _NO_UPDATES
        compare = partial(self._compare_files, base_location, location, instant.kind)
        try:
            try:
                updates = await compare(SMALL_DOCUMENT_BYTES_MAX)
            except TooLarge:
                # As a dict, a large metadata file needs gigabytes. So the process compares only one pair of large files
                # at a time: the file before the change, and the file after it.
                async with self._call.components.worker_limits.imports.large_file.hold(self._call.principal.name):
                    # The pair may need more memory than the share of a principal, so this limit does not apply.
                    with set_principal(""):
                        updates = await compare(METADATA_BYTES_MAX)
        except _UNREADABLE as error:
            _log.warning("an event has no updates", instant=instant.id, error=error.message)
            return _NO_UPDATES
        self._updates_bytes += len(updates)
        return msgspec.Raw(updates)

    async def _compare_files(
        self, base_location: str | None, location: str, kind: EntryKind, limit_bytes: int
    ) -> bytes:
        """Return the updates that turn the metadata in one file into those in another, as JSON.

        The document of the last comparison is reused, because the next event of a table usually begins with it.

        Raises:
            TooLarge: A file that must be read exceeds the limit.
        """
        former_location, former_document = self._latest_document or (None, None)
        base: _Source | None = None
        if base_location is not None:
            is_former = base_location == former_location
            base = former_document if is_former else await self._read_source(base_location, kind, limit_bytes)
        metadata = await self._read_source(location, kind, limit_bytes)
        compare = partial(_compare_sources, base, metadata, kind)
        updates, document, sizes_bytes = await self._call.components.worker_limits.comparing.run(
            self._call.principal.name, compare
        )
        self._document_bytes += sum(sizes_bytes)
        self._latest_document = (location, document) if sizes_bytes[-1] <= SMALL_DOCUMENT_BYTES_MAX else None
        return updates

    async def _read_source(self, location: str, kind: EntryKind, limit_bytes: int) -> TableMetadata | ViewMetadata:
        """Return the metadata in a file, without caching them."""
        documents = self._call.components.catalog.documents
        if kind is EntryKind.TABLE:
            return await documents.peek(location, limit_bytes)
        return await documents.peek_view(location, limit_bytes)

    async def _find_base(self, instant: Instant) -> str | None:
        """Return the metadata file of an entry before an instant, or None if no earlier instant names one."""
        instant_filter = InstantFilter(uuid=instant.uuid, since=instant.position, newest_first=True)
        while True:
            earlier_instants = await self._store.list_instants(instant_filter, _INSTANTS_PER_BATCH)
            for earlier_instant in earlier_instants:
                if _moves_pointer(earlier_instant):
                    return earlier_instant.metadata_location
            if len(earlier_instants) < _INSTANTS_PER_BATCH:
                return None
            instant_filter = msgspec.structs.replace(instant_filter, since=earlier_instants[-1].position)


def _compare_sources(
    base: _Source | None, metadata: TableMetadata | ViewMetadata, kind: EntryKind
) -> tuple[bytes, dict[str, Any], list[int]]:
    """Compare the metadata before and after a change.

    Returns:
        The updates as JSON, the document after the change, and the sizes of the documents that were decoded, as JSON.
    """
    sizes_bytes: list[int] = []

    def decode(source: TableMetadata | ViewMetadata) -> dict[str, Any]:
        document_json = encode_table(source) if isinstance(source, TableMetadata) else encode_view(source)
        sizes_bytes.append(len(document_json))
        document: dict[str, Any] = msgspec.json.decode(document_json)
        return document

    base_document = base if base is None or isinstance(base, dict) else decode(base)
    document = decode(metadata)
    list_updates = list_table_updates if kind is EntryKind.TABLE else list_view_updates
    return msgspec.json.encode(list_updates(base_document, document)), document, sizes_bytes


def _moves_pointer(instant: Instant) -> bool:
    """Return whether the instant, a recorded action, has changed the metadata file of a table or view."""
    return instant.action in _POINTER_ACTIONS and instant.state is InstantState.COMPLETED


def _find_type(instant: Instant) -> str | None:
    """Return the type of the operation of an instant, or None if it changes neither metadata nor a name."""
    if instant.kind is EntryKind.NAMESPACE:
        return _NAMESPACE_TYPES.get(instant.action)
    kind = instant.kind.value
    if instant.action == "commit":
        return f"update-{kind}"
    if instant.action in ("register", "undrop"):
        return "register-table" if kind == "table" else "create-view"
    if instant.action in ("drop", "unregister"):
        return f"drop-{kind}"
    return f"{instant.action}-{kind}" if instant.action in ("create", "rename") else None


def _describe_namespace_change(instant: Instant) -> dict[str, Any]:
    """Return the operation that created, changed or dropped a namespace."""
    operation = {"operation-type": _find_type(instant), "namespace": list(instant.namespace)}
    if instant.action != "update":
        return operation
    return {**operation, "updated": instant.summary.get("updated", []), "removed": instant.summary.get("removed", [])}


def _find_source(instant: Instant) -> Securable:
    """Return the name of the entry before the change, or the namespace."""
    if instant.kind is EntryKind.NAMESPACE:
        return Securable(instant.namespace)
    return Securable(instant.namespace, instant.kind.value, instant.name)


def _find_target(instant: Instant) -> Securable | None:
    """Return the new name of a renamed entry, or None. Instants of earlier versions do not have the new namespace."""
    levels: Sequence[str] | None = instant.summary.get("to-namespace")
    if levels is None or instant.action != "rename":
        return None
    namespace: NamespacePath = tuple(levels)
    # The property `to` is the namespace and the name, joined by dots.
    return Securable(namespace, instant.kind.value, str(instant.summary["to"])[len(".".join(namespace)) + 1 :])


def _find_request_id(instant: Instant) -> str:
    """Return the id of the request that caused an instant, or the id of the instant if it has none."""
    return str(instant.summary.get("request-id") or instant.id)


def _find_time_ms(instant: Instant) -> int:
    """Return the time in milliseconds at which an instant was completed, or requested if it is not completed."""
    return instant.requested_ms if instant.completed_ms is None else instant.completed_ms


def _describe_object(securable: Securable) -> dict[str, Any]:
    """Return the JSON that names an object."""
    return {"namespace": list(securable.namespace), "name": securable.name}
