"""Routes that import tables and views of other catalogs. A repeated request changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import msgspec

from seamark.formats.index.definitions import PREFIX, find_dimension_tables
from seamark.formats.protocol.wire import NAMESPACE_SEPARATOR
from seamark.formats.runtime.errors import BadRequest, Forbidden, RequestError, SeamarkError
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.indexes.dimension_rights import check_registered_authors
from seamark.metaserver.catalog.imports import ImportResult
from seamark.metaserver.store.model import TABLE, Entry, NamespacePath
from seamark.metaserver.streams.incoming.dead_letters import DEAD_LETTER_TABLE, parse_dead_letter_table

_INVALID = ResponseSpec(400, "The metadata file names a location that this warehouse or the entry may not have")
_MISSING = ResponseSpec(404, "The metadata file or the namespace does not exist")
_TAKEN = ResponseSpec(409, "The name refers to another metadata file, or the entry is live under another name")
_TABLES_MAX = 1000
"""The maximum number of tables of one request."""
_MetadataLocation = Annotated[str, doc("The location of the metadata file, which is not moved.")]
_DryRun = Annotated[
    bool, doc("Whether to check the import without making it. In this case, the namespace need not exist.")
]


class ImportTableRequest(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """A request to import a table."""

    metadata_location: _MetadataLocation
    dry_run: _DryRun = False


class ImportTablesRequest(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """A request to import tables of one namespace."""

    metadata_locations: Annotated[
        dict[str, str],
        msgspec.Meta(min_length=1, max_length=_TABLES_MAX),
        doc("The locations of the metadata files, which are not moved, by the names of the tables."),
    ]
    dry_run: _DryRun = False


class ImportViewRequest(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """A request to import a view."""

    metadata_location: _MetadataLocation
    keep_owner: Annotated[
        bool, doc("Whether the view may run with the rights of the user that its properties name.")
    ] = False
    dry_run: _DryRun = False


class ImportAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """The imported table or view."""

    uuid: Annotated[str, doc("The UUID of the table or view.")]
    metadata_location: str
    is_new: Annotated[bool, doc("False if the name already referred to this metadata file.")]


class TableImportResult(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """The result for one table. It has either a UUID or an error."""

    name: str
    uuid: Annotated[str | None, doc("The UUID of the imported table.")] = None
    is_new: Annotated[bool, doc("Whether the table was not registered before.")] = False
    error: Annotated[str | None, doc("The reason why the table is not imported.")] = None


class ImportTablesAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """The results for all tables of a request."""

    results: list[TableImportResult]


@Route(
    "PUT",
    "/api/v1/tables/{namespace}/{table}/import",
    "importTable",
    "Register a table of another catalog whose files are all in its own location; idempotent",
    tags=("metadata",),
    check=Check.CATALOG,
    answers=(ResponseSpec(200, "The registered table", ImportAnswer), _INVALID, _MISSING, _TAKEN),
).takes(ImportTableRequest)
async def import_table(call: Call, body: ImportTableRequest) -> ImportAnswer:
    """Register a table of another catalog whose files are all in its own location."""
    imports = call.components.catalog.imports
    return _describe_import(
        *await imports.import_table(
            call.caller,
            call.namespace,
            call.name,
            body.metadata_location,
            dry_run=body.dry_run,
            check_properties=partial(_check_properties, call),
        )
    )


@Route(
    "PUT",
    "/api/v1/namespaces/{namespace}/import",
    "importTables",
    "Register tables of another catalog in a namespace, as importTable does; idempotent",
    tags=("metadata",),
    check=Check.CATALOG,
    answers=(
        ResponseSpec(200, "The results, in the order of the request", ImportTablesAnswer),
        ResponseSpec(404, "The namespace does not exist"),
    ),
).takes(ImportTablesRequest)
async def import_tables(call: Call, body: ImportTablesRequest) -> ImportTablesAnswer:
    """Register tables of another catalog in a namespace. A table that is refused does not affect the others."""
    securables = [Securable(call.namespace, TABLE, name) for name in body.metadata_locations]
    refusals = await call.find_refusals(securables, "importTable")
    errors_by_name = {securable.name: error for securable, error in refusals.items()}
    locations = {name: location for name, location in body.metadata_locations.items() if name not in errors_by_name}
    results = await call.components.catalog.imports.import_tables(
        call.caller, call.namespace, locations, dry_run=body.dry_run, check_properties=partial(_check_properties, call)
    )
    results_by_name: dict[str, ImportResult] = {**errors_by_name, **dict(zip(locations, results, strict=True))}
    # Each missing right is recorded in the audit log as if the import of the table had been a request.
    for name, result in results_by_name.items():
        if isinstance(result, RequestError) and (name in errors_by_name or isinstance(result, Forbidden)):
            await call.record_refusal("importTable", _make_import_path(call.namespace, name), result)
    return ImportTablesAnswer([_describe_table(name, results_by_name[name]) for name in body.metadata_locations])


@Route(
    "PUT",
    "/api/v1/views/{namespace}/{view}/import",
    "importView",
    "Register a view of another catalog; idempotent",
    tags=("metadata",),
    check=Check.CATALOG,
    answers=(ResponseSpec(200, "The registered view", ImportAnswer), _INVALID, _MISSING, _TAKEN),
).takes(ImportViewRequest)
async def import_view(call: Call, body: ImportViewRequest) -> ImportAnswer:
    """Register a view of another catalog."""
    imports = call.components.catalog.imports
    return _describe_import(
        *await imports.import_view(
            call.caller,
            call.namespace,
            call.name,
            body.metadata_location,
            keep_owner=body.keep_owner,
            dry_run=body.dry_run,
        )
    )


def _make_import_path(namespace: NamespacePath, name: str) -> str:
    """Return the path of the request that imports only this table."""
    return f"/api/v1/tables/{NAMESPACE_SEPARATOR.join(namespace)}/{name}/import"


async def _check_properties(call: Call, properties: Mapping[str, str]) -> None:
    """Check that an imported table names no other tables in its properties, and causes no jobs for other principals.

    Builds of indexes and intakes of streams would copy rows between tables that the other catalog has chosen. The
    principals that have set policies in the other catalog may be other persons in this catalog.

    Raises:
        BadRequest: A property names another table.
        Forbidden: The caller is not an admin, and another principal has set a policy.
    """
    property_names = [
        name for name, value in properties.items() if name.startswith(PREFIX) and find_dimension_tables(value)
    ]
    if parse_dead_letter_table(properties) is not None:
        property_names.append(DEAD_LETTER_TABLE)
    if property_names:
        raise BadRequest(
            f"The property {property_names[0][:100]} of the metadata file names another table, which an import does "
            "not allow; remove the property in the other catalog, and set it after the import"
        )
    await check_registered_authors(call, properties)


def _describe_table(name: str, result: ImportResult) -> TableImportResult:
    if isinstance(result, SeamarkError):
        return TableImportResult(name, error=result.message)
    entry, is_new = result
    return TableImportResult(name, entry.uuid, is_new)


def _describe_import(entry: Entry, is_new: bool) -> ImportAnswer:
    return ImportAnswer(entry.uuid, entry.metadata_location, is_new)
