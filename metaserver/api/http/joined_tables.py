"""Checks the rights on the tables on which a plan depends.

A plan leaves out files by rows of the tables that it was joined with, so its files show something about these rows.
Therefore each use of a plan requires the right on each of these tables that its request required. The rights at the
time of the use count. The plan also becomes unusable when one of these tables is dropped, renamed or replaced, because
the rights on its rows can then no longer be found by its name.
"""

from __future__ import annotations

from collections.abc import Iterable

from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import WAREHOUSE, Securable
from seamark.metaserver.api.http.components import ServerComponents
from seamark.metaserver.store.model import TABLE, EntryKind, PlanJoin

_OPERATION = "makePlanTable"
"""The operation whose right a request for a plan requires on each joined table."""


async def may_use_plan(
    components: ServerComponents, principal: Principal, joined_tables: Iterable[PlanJoin] | None
) -> bool:
    """Return whether a principal may read all tables on which a plan depends.

    A principal that may read all tables of the catalog may use every plan. For other principals, each table must also
    still be the planned table, and not a new table of the same name. They may not use a plan whose tables are unknown
    (None).
    """
    if components.authorizer.allows_everywhere(principal, _OPERATION, WAREHOUSE.namespace):
        return True
    if joined_tables is None:
        return False
    for joined in joined_tables:
        *namespace, name = joined.table
        if not await components.authorizer.allows(principal, _OPERATION, Securable(tuple(namespace), TABLE, name)):
            return False
        entry = await components.store.load_entry(EntryKind.TABLE, tuple(namespace), name)
        if entry is None or entry.uuid != joined.uuid:
            return False
    return True
