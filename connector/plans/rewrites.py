"""A statement whose tables are replaced by their plans, as each engine's connector makes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamark.connector.plans.async_client import TablePlanResponse
from seamark.connector.plans.joins import Dimension, PlannedScan
from seamark.connector.plans.plan_requests import find_used_joins

LEASE_S = 86_400
MAX_KEPT_FRACTION = 0.95
"""A table is read by its own name if its plan keeps a larger fraction of its files."""
BUDGET_S = 10.0
"""For all requests of one query."""


@dataclass(frozen=True)
class RewrittenStatement:
    """`statement` is None if the text has to run unchanged.

    Attributes:
        summary: What was done, in one line.
    """

    statement: str | None
    summary: str
    files: int = 0
    """Data files of the plans."""
    considered_files: int = 0
    """Data files of the tables that plans replace."""


def summary_of(
    plans: Mapping[PlannedScan, TablePlanResponse], dimensions: Mapping[PlannedScan, tuple[Dimension, ...]]
) -> str:
    """Return the files that each plan keeps of its table, and the columns with the number of keys by which others
    went.
    """
    counts = [f"{'.'.join(planned.table)}={plan.files}/{plan.considered_files}" for planned, plan in plans.items()]
    used = [
        f"{'.'.join(planned.table)}.{columns}:{keys}"
        for planned, plan in plans.items()
        for columns, keys in find_used_joins(dimensions.get(planned, ()), plan)
    ]
    return "; ".join(["rewritten", *counts, *([f"joins={','.join(used)}"] if used else [])])
