"""Resolves the names of attributes of dimension tables in the filter of a request.

The caller needs the right to read each dimension table whose attribute the filter names. Otherwise the kept files would
show the attributes to a caller who tries values. A refusal has the same error as the route that loads the table.
"""

from __future__ import annotations

import msgspec
import structlog

from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import NoSuchTable, SeamarkError
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.planner.scan.attribute_columns import (
    AttributeColumn,
    collect_names,
    find_attribute_columns,
    list_attribute_names,
)
from seamark.metaserver.store.model import TABLE

_log = structlog.get_logger("seamark.plans")


async def resolve_attributes(call: Call, metadata: TableMetadata, filter: Expression) -> tuple[AttributeColumn, ...]:
    """Return the attributes that an unbound filter names, and whether each of them is current.

    Raises:
        Forbidden: The caller may not read one of the dimension tables.
        NoSuchTable: The caller may not browse one of them.
    """
    if not list_attribute_names(metadata):
        return ()
    attributes = find_attribute_columns(metadata, collect_names(filter))
    return tuple([msgspec.structs.replace(one, is_current=await _is_current(call, one)) for one in attributes])


async def _is_current(call: Call, attribute: AttributeColumn) -> bool:
    """Return whether the index is enabled, and its dimension table at its snapshot, without rows outside of it."""
    source = attribute.lookup.source
    *namespace, name = source.table
    await call.allow(Securable(tuple(namespace), TABLE, name))
    if not attribute.is_current:  # The index is paused.
        return False
    try:
        loaded = await call.components.catalog.tables.load(tuple(namespace), name)
    except NoSuchTable:
        return False
    except SeamarkError as error:  # The facts can be read, and no answer depends on the dimension table.
        table = ".".join(source.table)
        _log.warning("a dimension table cannot be read, so its attribute is not used", table=table, error=str(error))
        return False
    is_stream = loaded.entry is not None and bool(loaded.entry.flushed)
    return loaded.metadata.current_snapshot_id == source.snapshot_id and not is_stream
