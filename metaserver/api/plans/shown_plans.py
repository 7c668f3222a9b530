"""Finds the plan snapshots that a caller may use."""

from __future__ import annotations

from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.joined_tables import may_use_plan
from seamark.metaserver.store.model import Entry, PlanSnapshot


async def list_shown_plans(call: Call, entry: Entry) -> list[PlanSnapshot]:
    """Return the plan snapshots of a table that the caller's audience sees now, and that the caller may use.

    A plan snapshot has the files of a plan. The audience is the value of the header X-Seamark-Plans, which names the
    clients that share plans.
    """
    if call.audience is None:
        return []
    plan_snapshots = await call.components.catalog.plan_tables.list_visible_plans(entry, call.audience)
    # Plans with the same joined tables need only one check.
    joined_tables_of_plans = {plan.joined_tables for plan in plan_snapshots}
    is_usable = {
        joined_tables: await may_use_plan(call.components, call.principal, joined_tables)
        for joined_tables in joined_tables_of_plans
    }
    return [plan for plan in plan_snapshots if is_usable[plan.joined_tables]]
