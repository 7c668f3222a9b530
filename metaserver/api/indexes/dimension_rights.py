"""Checks of the rights on dimension tables whose attributes an index definition uses.

Builds copy the attributes into index files of the fact table, and readers of the fact table can read these files. So a
caller that defines or builds such an index must be allowed to read the dimension tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seamark.formats.index.definitions import PREFIX, find_dimension_tables
from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.access.rights.decisions import WAREHOUSE, Securable
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.catalog.policies import is_own_policy, parse_setters
from seamark.metaserver.store.model import TABLE

_ADMIN_OPERATION = "addGrant"
"""An operation that only an admin may do on the warehouse."""


async def check_dimension_rights(call: Call, tables: Iterable[Sequence[str]], operation: str = "readRows") -> None:
    """Check that the caller may do an operation that reads rows on these dimension tables.

    Raises:
        Forbidden: The caller may not read one of them.
        NoSuchTable: The caller may not browse one of them.
    """
    for *namespace, name in dict.fromkeys(tuple(table) for table in tables):
        securable = Securable(tuple(namespace), TABLE, name)
        await call.components.authorizer.require(call.principal, operation, securable)


async def check_setter_rights(call: Call, setters: Iterable[str], tables: Iterable[Sequence[str]]) -> None:
    """Check the rights of the principals that defined an index, before a job or an indexer defines it again.

    An index must not copy attributes for a principal that has lost the right to read them.

    Raises:
        Forbidden: A principal may no longer read one of the dimension tables.
    """
    components = call.components
    rights = StandingRights(components.store, components.clock, components.settings, components.authorizer)
    for setter in setters:
        for *namespace, name in dict.fromkeys(tuple(table) for table in tables):
            securable = Securable(tuple(namespace), TABLE, name)
            if (reason := await rights.explain_loss(setter, "readRows", securable)) is not None:
                raise Forbidden(f"{setter} defined the index and may not read {securable.name} now: {reason}")


async def check_registered_authors(call: Call, properties: Mapping[str, Any]) -> None:
    """Check that the caller is the author of the properties of a metadata file that cause jobs with rights.

    These are policies of Seamark's table services, and definitions of indexes that name dimension tables. A client can
    write any authors into the file, and the jobs run while their authors have the rights. An admin of the warehouse may
    register a file with other authors.

    Raises:
        Forbidden: The file records another author or none.
    """
    authors = parse_setters(properties)
    for name, value in properties.items():
        reads_tables = name.startswith(PREFIX) and bool(find_dimension_tables(value))
        author = authors.get(name)
        if not (reads_tables or is_own_policy(name)) or author == call.principal.name:
            continue
        if await call.components.authorizer.allows(call.principal, _ADMIN_OPERATION, WAREHOUSE):
            return
        effect = "reads other tables" if reads_tables else "causes jobs with the rights of its author"
        raise Forbidden(
            f"The metadata file states {'no author' if author is None else f'the author {author[:100]!r}'} of "
            f"{name[:100]}, which {effect}; ask an admin to register the file, or remove the property from the table "
            "first, and set it again afterwards"
        )


async def check_index_properties(call: Call, properties: Mapping[str, Any]) -> None:
    """Check that the caller may read each dimension table that new properties of a table name in index definitions.

    Raises:
        Forbidden: The caller may not read one of them.
        NoSuchTable: The caller may not browse one of them.
    """
    for name, value in properties.items():
        if name.startswith(PREFIX) and isinstance(value, str):
            await check_dimension_rights(call, find_dimension_tables(value))
