"""Routes with which tools such as Terraform declare tables and views. A repeated request changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.formats.iceberg.views.view_updates import LAST_ADDED, build_view_metadata
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import AlreadyExists, BadRequest, NoSuchTable, NoSuchView
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.table_updates import commit_updates
from seamark.metaserver.catalog.policies import SETTERS
from seamark.metaserver.catalog.values import CreateTable, CreateView

_OWN_PREFIX = "seamark."
_Schema = Annotated[dict[str, Any], doc("A struct in Iceberg's JSON form.")]


class DeclaredTable(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """The declared state of a table."""

    schema: _Schema
    partition_spec: Annotated[dict[str, Any] | None, doc("A partition spec in Iceberg's JSON form.")] = None
    write_order: Annotated[dict[str, Any] | None, doc("A sort order in Iceberg's JSON form.")] = None
    location: Annotated[str | None, doc("The location of a new table. The default is below the namespace.")] = None
    properties: Annotated[
        dict[str, str], doc("Properties that the table has after the request. Other properties do not change.")
    ] = {}


class DeclaredView(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """The declared state of a view."""

    schema: _Schema
    representations: Annotated[
        list[dict[str, str]], doc("The SQL text in each dialect, as objects with `sql` and `dialect`.")
    ]
    default_namespace: Annotated[list[str], doc("The namespace for names in the SQL text that do not state one.")]
    default_catalog: str | None = None
    properties: Annotated[
        dict[str, str], doc("Properties that the view has after the request. Other properties do not change.")
    ] = {}


class DeclaredEntry(msgspec.Struct, frozen=True, rename="kebab"):
    """A table or view after the request."""

    uuid: str
    metadata_location: str
    properties: dict[str, str]


@Route(
    "PUT",
    "/api/v1/tables/{namespace}/{table}",
    "putTable",
    "Create a table, or set the properties of an existing table with this schema; idempotent",
    tags=("metadata",),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The table", DeclaredEntry),
        ResponseSpec(400, "The schema or a property is invalid"),
        ResponseSpec(404, "The namespace does not exist"),
        ResponseSpec(409, "The table exists with a different schema or partition spec, or the name belongs to a view"),
    ),
).takes(DeclaredTable)
async def put_table(call: Call, body: DeclaredTable) -> DeclaredEntry:
    """Create a table, or set the properties of an existing table with this schema."""
    _check_properties(body.properties)
    tables = call.components.catalog.tables
    try:
        loaded_table = await tables.load(call.namespace, call.name)
    except NoSuchTable:
        request = CreateTable(
            call.name, body.schema, body.location, body.partition_spec, body.write_order, body.properties
        )
        try:
            new_table = await tables.create(call.caller, call.namespace, request)
        except AlreadyExists:  # A view has the name, or another request has created the table.
            if not await tables.exists(call.namespace, call.name):
                raise
        else:
            return _describe_table(new_table.entry.metadata_location if new_table.entry else "", new_table.metadata)
        loaded_table = await tables.load(call.namespace, call.name)
    _check_same_definition(call, body, loaded_table.metadata)
    await commit_updates(call, lambda metadata: _compute_property_updates(body.properties, metadata.properties))
    loaded_table = await tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    return _describe_table(loaded_table.entry.metadata_location, loaded_table.metadata)


def _check_same_definition(call: Call, body: DeclaredTable, metadata: TableMetadata) -> None:
    """Check that an existing table has the declared columns, partitions and location.

    Raises:
        AlreadyExists: The columns, the partitions or the location are different.
    """
    declared_metadata = build_table_metadata(
        uuid=metadata.table_uuid or "",
        location=metadata.location,
        schema=body.schema,
        partition_spec=body.partition_spec,
        sort_order=body.write_order,
        properties=body.properties,
        now_ms=metadata.last_updated_ms,
    )
    name = format_path(call.namespace, call.name)
    if not declared_metadata.current_schema.is_same_as(metadata.current_schema):
        raise AlreadyExists(f"Table {name} exists with a different schema; change its columns with an engine")
    if declared_metadata.default_spec.fields != metadata.default_spec.fields:
        raise AlreadyExists(f"Table {name} exists with a different partition spec; change it with an engine")
    if body.location is not None and body.location.rstrip("/") != metadata.location.rstrip("/"):
        raise AlreadyExists(f"Table {name} exists at {metadata.location!r}; a table cannot move")


@Route(
    "PUT",
    "/api/v1/views/{namespace}/{view}",
    "putView",
    "Create a view, or replace its text and set its properties; idempotent",
    tags=("metadata",),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The view", DeclaredEntry),
        ResponseSpec(400, "The schema, the text or a property is invalid"),
        ResponseSpec(404, "The namespace does not exist"),
        ResponseSpec(409, "The name belongs to a table, or concurrent changes conflicted in each attempt"),
    ),
).takes(DeclaredView)
async def put_view(call: Call, body: DeclaredView) -> DeclaredEntry:
    """Create a view, or replace its text and set its properties."""
    _check_properties(body.properties)
    views = call.components.catalog.views
    version: dict[str, Any] = {
        "version-id": 1,
        "timestamp-ms": call.components.clock.now_ms(),
        "schema-id": LAST_ADDED,
        "summary": {},
        "representations": [{"type": "sql", **representation} for representation in body.representations],
        "default-namespace": body.default_namespace,
    }
    version |= {} if body.default_catalog is None else {"default-catalog": body.default_catalog}
    try:
        loaded_view = await views.load(call.namespace, call.name)
    except NoSuchView:
        request = CreateView(call.name, body.schema, {**version, "schema-id": 0}, None, body.properties)
        try:
            new_view = await views.create(call.caller, call.namespace, request)
        except AlreadyExists:  # A table has the name, or another request has created the view.
            if not await views.exists(call.namespace, call.name):
                raise
        else:
            return DeclaredEntry(
                new_view.entry.uuid, new_view.entry.metadata_location, _select_shown_properties(new_view.metadata)
            )
        loaded_view = await views.load(call.namespace, call.name)
    updates = _compute_view_updates(body, version, loaded_view.metadata)
    if updates:
        requirements = [{"type": "assert-view-uuid", "uuid": loaded_view.metadata.view_uuid}]
        loaded_view = await views.replace(call.caller, call.namespace, call.name, requirements, updates)
    return DeclaredEntry(
        loaded_view.entry.uuid, loaded_view.entry.metadata_location, _select_shown_properties(loaded_view.metadata)
    )


def _compute_view_updates(body: DeclaredView, version: dict[str, Any], metadata: ViewMetadata) -> list[dict[str, Any]]:
    """Return the updates that give a view its declared state, or no updates if it has this state.

    Raises:
        BadRequest: The declared view is invalid.
    """
    # New metadata give their only schema the id 0.
    declared_metadata = build_view_metadata(
        uuid=metadata.view_uuid,
        location=metadata.location,
        schema=body.schema,
        view_version={**version, "schema-id": 0},
        properties=body.properties,
        now_ms=version["timestamp-ms"],
    )
    updates = _compute_property_updates(body.properties, metadata.properties)
    current_version, declared_version = metadata.current_version, declared_metadata.current_version
    current_schema, wanted_schema = (
        metadata.schema(current_version.schema_id),
        declared_metadata.schema(declared_version.schema_id),
    )
    is_same = (
        (current_version.representations, current_version.default_namespace, current_version.default_catalog)
        == (declared_version.representations, declared_version.default_namespace, declared_version.default_catalog)
        and current_schema is not None
        and wanted_schema is not None
        and wanted_schema.is_same_as(current_schema)
    )
    if not is_same:
        updates += [
            {"action": "add-schema", "schema": body.schema},
            {"action": "add-view-version", "view-version": version},
            {"action": "set-current-view-version", "view-version-id": LAST_ADDED},
        ]
    return updates


def _check_properties(properties: Mapping[str, str]) -> None:
    """Check that no property belongs to another route.

    Raises:
        BadRequest: A property controls table services or indexes.
    """
    refused_name = next((name for name in properties if name.startswith(_OWN_PREFIX)), None)
    if refused_name is not None:
        raise BadRequest(
            f"The property {refused_name[:80]!r} cannot be declared here: declare policies of table services with PUT "
            "…/policy, and indexes with PUT …/indexes/{index}"
        )


def _compute_property_updates(
    declared_properties: Mapping[str, str], present_properties: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the update that sets the declared properties, or no update if they are set."""
    changed_properties = {
        name: value for name, value in declared_properties.items() if present_properties.get(name) != value
    }
    return [{"action": "set-properties", "updates": changed_properties}] if changed_properties else []


def _describe_table(location: str, metadata: TableMetadata) -> DeclaredEntry:
    return DeclaredEntry(metadata.table_uuid or "", location, _select_shown_properties(metadata))


def _select_shown_properties(metadata: TableMetadata | ViewMetadata) -> dict[str, str]:
    return {name: value for name, value in metadata.properties.items() if name != SETTERS}
