"""Finds the dimension tables in other namespaces that a job of the service *indexing* may read.

A job has a token for the namespace of its table. An index of facts may have attributes of a dimension table in another
namespace. The principal that defined the index had the right to read this table. As long as it has the right, the job
acts for it: the token also gives the right to read this one table.
"""

from __future__ import annotations

import msgspec

from seamark.formats.index.definitions import PREFIX, read_definitions
from seamark.formats.runtime.errors import SeamarkError
from seamark.formats.services.services import INDEXING
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.catalog.policies import parse_setters
from seamark.metaserver.services.job import Job
from seamark.metaserver.services.watch import Load
from seamark.metaserver.store.model import TABLE, EntryKind, NamespacePath
from seamark.metaserver.store.port import PointerStore

TablePath = tuple[NamespacePath, str]
"""The namespace and the name of a table."""
_CLAIMS_BYTES_MAX = 3000
"""The maximum number of bytes of the names of the tables in a token, which is sent in a header of at most 8 KiB."""


class DimensionReads:
    """Lists the dimension tables in other namespaces that the token of a job gives the right to read."""

    def __init__(self, store: PointerStore, load: Load, rights: StandingRights) -> None:
        self._store, self._load, self._rights = store, load, rights

    async def list_tables(self, job: Job) -> tuple[TablePath, ...]:
        """Return the tables outside of the namespace of a job that it may read.

        They are the dimension tables of an index on the job's table: the index contains their attributes. A table is
        left out if the principal that defined the index is unknown, or may not read the table now. If the metadata of
        the job's table cannot be read, there are no tables. The job then fails, and is tried again.
        """
        if job.service != INDEXING.name:
            return ()
        entry = await self._store.load_entry(EntryKind.TABLE, job.namespace, job.table)
        if entry is None or entry.uuid != job.uuid:
            return ()
        try:
            metadata = await self._load(entry.metadata_location)
        except SeamarkError:
            return ()
        setters = parse_setters(metadata.properties)
        tables: list[TablePath] = []
        claims_bytes = 0
        for definition in read_definitions(metadata).enabled:
            setter = setters.get(PREFIX + definition.name)
            for *levels, name in sorted(definition.dimension_tables):
                namespace = tuple(levels)
                table = (namespace, name)
                is_inside = namespace[: len(job.namespace)] == job.namespace
                # A job may read all tables in its own namespace, so these need no further right.
                if setter is None or is_inside or table in tables:
                    continue
                if await self._rights.explain_loss(setter, "readRows", Securable(namespace, TABLE, name)) is not None:
                    continue
                claims_bytes += len(msgspec.msgpack.encode(table))
                # A token with more tables would be too long for a header.
                if claims_bytes > _CLAIMS_BYTES_MAX:
                    return tuple(tables)
                tables.append(table)
        return tuple(tables)
