"""Defines the result of rewriting a statement of any engine so that it reads plans instead of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamark.connector.plans.async_client import TablePlanResponse
from seamark.connector.plans.joins import Dimension, PlannedScan
from seamark.connector.plans.plan_requests import find_used_joins

LEASE_S = 86_400
"""The duration of a lease of plans: a day, in seconds."""
MAX_KEPT_FRACTION = 0.95
"""The maximum fraction of files that a plan may keep. If it keeps more, the statement reads the table itself."""
BUDGET_S = 10.0
"""The time budget for all requests of one query."""


@dataclass(frozen=True)
class RewrittenStatement:
    """The result of rewriting a statement.

    Attributes:
        statement: The new text, or None if the original text must be run.
        summary: A description of the changes in one line.
    """

    statement: str | None
    summary: str
    files: int = 0
    """The number of data files in the plans."""
    considered_files: int = 0
    """The number of data files of the tables that the plans replace."""


def show_keys(keys: int | None) -> str:
    """Return the number of keys of a join, or `attributes` if an index on attributes replaced them."""
    return "attributes" if keys is None else str(keys)


def write_summary(
    plans: Mapping[PlannedScan, TablePlanResponse], dimensions: Mapping[PlannedScan, tuple[Dimension, ...]]
) -> str:
    """Return a summary of the files that each plan keeps.

    It also lists the columns and key counts of joins that left out files.
    """
    counts = [
        f"{'.'.join(planned_scan.table)}={plan.files}/{plan.considered_files}" for planned_scan, plan in plans.items()
    ]
    used_joins = [
        f"{'.'.join(planned_scan.table)}.{columns}:{show_keys(keys)}"
        for planned_scan, plan in plans.items()
        for columns, keys in find_used_joins(dimensions.get(planned_scan, ()), plan)
    ]
    return "; ".join(["rewritten", *counts, *([f"joins={','.join(used_joins)}"] if used_joins else [])])
