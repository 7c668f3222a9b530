"""Atomic changes to several tables."""

from __future__ import annotations

from collections.abc import Sequence

from seamark.metaserver.catalog.commit import Committer
from seamark.metaserver.catalog.plan_tables import PlanTables
from seamark.metaserver.catalog.values import Caller, TableChange
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.wire import check_changeable, check_name


class Transactions:
    def __init__(self, committer: Committer, plans: PlanTables) -> None:
        self._committer = committer
        self._plans = plans

    async def commit(self, caller: Caller, changes: Sequence[TableChange]) -> None:
        """See `Committer.commit`. All pointers move in one transaction of the store."""
        if not changes:
            raise BadRequest("table-changes is empty; it needs at least one change")
        for change in changes:
            check_changeable(check_name(change.name, "table name"))
        await self._plans.before_commit(changes)
        await self._committer.commit(caller, changes, single=False)
