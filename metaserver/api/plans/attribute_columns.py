"""Resolves the names of attributes of dimension tables in the filter of a request.

The caller needs the right to read each dimension table whose attribute the filter names. Otherwise the kept files would
show the attributes to a caller who tries values. A refusal has the same error as the route that loads the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
import structlog

from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import NoSuchTable, SeamarkError
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import doc
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.planner.scan.attribute_columns import (
    AttributeColumn,
    collect_names,
    find_attribute_columns,
    list_attribute_names,
)
from seamark.metaserver.store.model import TABLE

_log = structlog.get_logger("seamark.plans")


class NamedAttribute(msgspec.Struct, frozen=True, rename="kebab"):
    """The description, in an answer, of an attribute of a dimension table that a filter names.

    If `used` is false, the attribute left out no files.
    """

    name: str
    table: tuple[str, ...]
    snapshot_id: int
    used: bool


NamedAttributes = Annotated[
    tuple[NamedAttribute, ...] | msgspec.UnsetType,
    doc(
        "The attributes of dimension tables that the filter names by their indexes, if there are any. If `used` is "
        "true, the plan leaves out files by the attribute as it is at the snapshot `snapshot-id` of `table`. To filter "
        "the rows, read the dimension table at this snapshot. If `used` is false, the name leaves out no files."
    ),
]


def describe_attributes(attributes: Iterable[AttributeColumn]) -> tuple[NamedAttribute, ...]:
    """Return the attributes as answers show them, with the snapshots at which clients must read the tables."""
    sources = ((attribute, attribute.lookup.source) for attribute in attributes)
    return tuple(
        NamedAttribute(attribute.name, source.table, source.snapshot_id, attribute.is_current)
        for attribute, source in sources
    )


async def resolve_attributes(call: Call, metadata: TableMetadata, filter: Expression) -> tuple[AttributeColumn, ...]:
    """Return the attributes that an unbound filter names, and whether each of them is current.

    An attribute is current if its index is enabled and has the current values of the dimension table.

    Raises:
        Forbidden: The caller may not read one of the dimension tables.
        NoSuchTable: The caller may not browse one of them.
    """
    if not list_attribute_names(metadata):
        return ()
    attributes = find_attribute_columns(metadata, collect_names(filter))
    return tuple(
        [msgspec.structs.replace(attribute, is_current=await _is_current(call, attribute)) for attribute in attributes]
    )


async def check_attribute_rights(call: Call, attributes: Iterable[AttributeColumn]) -> None:
    """Check that the caller may read the dimension tables of attributes which an earlier request named.

    Another principal may have sent the earlier request, or the caller may have lost the right since.

    Raises:
        Forbidden: The caller may not read one of the dimension tables.
        NoSuchTable: The caller may not browse one of them.
    """
    for attribute in attributes:
        *namespace, name = attribute.lookup.source.table
        await call.allow(Securable(tuple(namespace), TABLE, name), operation="planTableScan")


async def _is_current(call: Call, attribute: AttributeColumn) -> bool:
    """Return whether the index of an attribute has the current values of its dimension table.

    The index must be enabled, and the dimension table must be at the snapshot of the index. The table must not be a
    stream table, because rows of a stream table may be in no snapshot.

    Raises:
        Forbidden: The caller may not read the dimension table.
        NoSuchTable: The caller may not browse the dimension table.
    """
    source = attribute.lookup.source
    *namespace, name = source.table
    await call.allow(Securable(tuple(namespace), TABLE, name))
    if not attribute.is_current:  # The index is paused.
        return False
    try:
        loaded_table = await call.components.catalog.tables.load(tuple(namespace), name)
    except NoSuchTable:
        return False
    except SeamarkError as error:  # The filtered table can be read without the dimension table.
        table = ".".join(source.table)
        _log.warning("a dimension table cannot be read, so its attribute is not used", table=table, error=str(error))
        return False
    is_stream = loaded_table.entry is not None and bool(loaded_table.entry.flushed)
    return loaded_table.metadata.current_snapshot_id == source.snapshot_id and not is_stream
