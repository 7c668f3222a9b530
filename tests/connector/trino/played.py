"""A Seamark that a test plays, and the rewriter that asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from connector.trino.rewriting import Limits, Rewriter
from connector.trino.seamark import Known, PlanTable, Wanted

COLUMNS = {
    "t": {"id": "long", "x": "int", "at": "timestamptz", "local": "timestamp"},
    "u": {"uid": "long", "y": "int"},
}
PATIENT = Limits(budget_s=10.0)


@dataclass
class Seamark:
    """Names the n-th plan `t~plan~n`. `plan` may say otherwise, or raise. `tables`: what is known of them, if more than
    the columns."""

    plan: Callable[[Wanted], Any] = lambda wanted: {}
    wait_s: float = 0.0
    version: str = "1"
    tables: Mapping[str, Known] = field(default_factory=dict)
    asked: list[Wanted] = field(default_factory=list)
    looked_at: list[tuple[str, ...]] = field(default_factory=list)

    async def plan_table(self, wanted: Wanted) -> PlanTable:
        number = len(self.asked)
        self.asked.append(wanted)
        await asyncio.sleep(self.wait_s)
        usual = {"name": f"{wanted.table[-1]}~plan~{number}", "snapshot_id": wanted.snapshot_id or 7}
        sizes = {"files": 1, "bytes": 10, "considered_files": 100}
        return PlanTable(**{**usual, **sizes, **self.plan(wanted)})

    async def columns(self, table: tuple[str, ...]) -> Known | None:
        self.looked_at.append(table)
        if table[-1] in self.tables:
            return self.tables[table[-1]]
        return Known(self.version, COLUMNS[table[-1]]) if table[-1] in COLUMNS else None


@asynccontextmanager
async def rewriter(seamark: Any, limits: Limits = PATIENT) -> AsyncIterator[Rewriter]:
    made = Rewriter(seamark, ["lake", "Other"], limits)
    yield made
    made.close()
