"""Loads dead-letter tables for requests, which need the right to append rows to them."""

from __future__ import annotations

from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.store.model import TABLE
from seamark.metaserver.streams.incoming.dead_letters import DeadLetters, find_dead_letters, parse_dead_letter_table


async def load_dead_letters(call: Call, loaded_table: LoadedTable) -> DeadLetters | None:
    """Return the dead-letter table of a stream table to which the caller appends rows, or None.

    Raises:
        Forbidden: The caller may not append rows to the dead-letter table.
        BadRequest: The dead-letter table is missing, or its columns do not fit.
    """
    dead_letter_table = parse_dead_letter_table(loaded_table.metadata.properties)
    if dead_letter_table is None:
        return None
    namespace, name = dead_letter_table
    await call.allow(Securable(namespace, TABLE, name))
    return await find_dead_letters(call.components.catalog, loaded_table)
