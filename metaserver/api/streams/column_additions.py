"""Adds columns that rows have and a stream table lacks, if its property `seamark.stream.new-columns` is `add`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import CommitConflict, RetryLater
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.streams.row_appends import RowTarget
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.store.model import TABLE, NamespacePath
from seamark.metaserver.streams.incoming.new_columns import check_new_columns
from seamark.metaserver.streams.stream_properties import check_stream_table

_COMMIT_TRIES_MAX = 5
_OPERATION = "updateTable"
"""The operation whose right a caller needs to add columns."""


async def widen_target(call: Call, target: RowTarget, securable: Securable, columns: Mapping[str, str]) -> RowTarget:
    """Return a table with additional columns, without a commit.

    A request first prepares its rows for such a table. A request that is refused therefore adds no columns.

    Raises:
        BadRequest: A column cannot be added.
        Forbidden: The caller may not change the table.
    """
    metadata = target.loaded.metadata
    await call.components.authorizer.require(call.principal, _OPERATION, securable)
    check_new_columns(columns, metadata)
    schema = _widen_schema(metadata, columns)
    wider_metadata = msgspec.structs.replace(
        metadata, schemas=(*metadata.schemas, schema), current_schema_id=schema.schema_id
    )
    return target._replace(loaded=LoadedTable(target.loaded.entry, wider_metadata))


async def add_columns(
    call: Call, target: RowTarget, namespace: NamespacePath, name: str, columns: Mapping[str, str]
) -> RowTarget:
    """Add optional columns to a stream table, and return the table with them.

    If another request has already added a column, the column does not change, and the rows are checked against its
    type.

    Args:
        call: The call.
        target: The table.
        namespace: The namespace of the table.
        name: The name of the table.
        columns: The types of the columns, by name.

    Raises:
        BadRequest: A column cannot be added.
        Forbidden: The caller may not change the table.
        RetryLater: Concurrent commits conflicted with every attempt, or another table has replaced the table.
    """
    metadata = target.loaded.metadata
    await call.components.authorizer.require(call.principal, _OPERATION, Securable(namespace, TABLE, name))
    for _ in range(_COMMIT_TRIES_MAX):
        present_names = {field.name for field in metadata.current_schema.fields}
        missing_columns = {column: kind for column, kind in columns.items() if column not in present_names}
        if not missing_columns:
            return target
        check_new_columns(missing_columns, metadata)
        try:
            await call.components.engine_commits.commit_table(
                call.caller, namespace, name, _build_requirements(metadata), _build_updates(metadata, missing_columns)
            )
        except CommitConflict:
            pass  # Another request may have added the columns.
        loaded_table = await call.components.catalog.tables.load(namespace, name)
        if loaded_table.entry is None or loaded_table.entry.uuid != target.uuid:
            raise RetryLater("The table was replaced by another table during the request; send the rows again")
        metadata = loaded_table.metadata
        check_stream_table(metadata, format_path(namespace, name))
        target = target._replace(loaded=LoadedTable(loaded_table.entry, metadata))
    raise RetryLater("Other commits changed the table while columns were added; send the rows again")


def _build_requirements(metadata: TableMetadata) -> list[dict[str, Any]]:
    """Return the requirements of the commit: the table, its schema and its last column id have not changed.

    The ids of the new columns follow the last column id.
    """
    return [
        {"type": "assert-table-uuid", "uuid": metadata.table_uuid},
        {"type": "assert-current-schema-id", "current-schema-id": metadata.current_schema_id},
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": metadata.last_column_id},
    ]


def _build_updates(metadata: TableMetadata, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the updates that add the columns."""
    return [
        {"action": "add-schema", "schema": msgspec.to_builtins(_widen_schema(metadata, columns))},
        {"action": "set-current-schema", "schema-id": -1},  # -1 is the schema that the commit adds.
    ]


def _widen_schema(metadata: TableMetadata, columns: Mapping[str, str]) -> Schema:
    """Return the current schema with further columns, as a new schema of the table.

    The new columns are optional, because the present rows have no values for them.
    """
    schema = metadata.current_schema
    fields = [
        Field(id=metadata.last_column_id + 1 + number, name=column, required=False, type=kind)
        for number, (column, kind) in enumerate(columns.items())
    ]
    wider_schema = msgspec.structs.replace(
        schema,
        fields=(*schema.fields, *fields),
        schema_id=max(table_schema.id for table_schema in metadata.schemas) + 1,
    )
    assert isinstance(wider_schema, Schema)
    return wider_schema
