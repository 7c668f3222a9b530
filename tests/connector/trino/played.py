"""A scripted Seamark server, and a rewriter that sends its requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from seamark.connector.analysis.scans import find_scans
from seamark.connector.client.errors import NoSuchResource
from seamark.connector.plans.async_client import (
    KnownTable,
    Name,
    PlanView,
    Reference,
    TablePlanRequest,
    TablePlanResponse,
    View,
)
from seamark.connector.trino.rewrite_results import RewriteResult
from seamark.connector.trino.rewriter import RewriteLimits, Rewriter
from seamark.formats.iceberg.expressions.expression import Expression

COLUMNS = {
    "t": {"id": "long", "x": "int", "at": "timestamptz", "local": "timestamp"},
    "u": {"uid": "long", "y": "int"},
}


def parse_filter(predicate: str | None) -> Expression | None:
    """Return the filter of a plan request for this condition on one table."""
    return None if predicate is None else find_scans(f"SELECT * FROM t WHERE {predicate}")[0].filter


def count_planned_tables(rewrite: RewriteResult) -> int:
    """Return how often the rewritten statement reads a plan of `NumberedPlans`, whose ids begin with 1."""
    return (rewrite.statement or "").count(" FOR VERSION AS OF 1")


READER = "rita"
"""The user of statements over plan views."""
PATIENT = RewriteLimits(budget_s=10.0)


class ViewRequest(NamedTuple):
    """A request to plan a view, as `NumberedPlans` has received it."""

    name: Name
    view: View
    predicate: str
    references: tuple[Reference, ...]


@dataclass
class NumberedPlans:
    """A server that gives the n-th plan the id 100 + n.

    Attributes:
        plan: Returns further fields of the answer to a request, or raises an error.
        tables: The known tables, if more than their columns is known.
    """

    plan: Callable[[TablePlanRequest], Any] = lambda request: {}
    wait_s: float = 0.0
    version: str = "1"
    tables: Mapping[str, KnownTable] = field(default_factory=dict)
    requests: list[TablePlanRequest] = field(default_factory=list)
    loaded_tables: list[tuple[str, ...]] = field(default_factory=list)
    views: dict[str | Name, View] = field(default_factory=dict)
    """The views by name, with or without the schema. `plan_view` returns the n-th as `v~plan~n`, or raises an error."""
    answer: Callable[[Name], str | None] | None = None
    view_requests: list[ViewRequest] = field(default_factory=list)
    read_views: list[Name] = field(default_factory=list)
    leases: list[tuple[Name, list[int], int | None]] = field(default_factory=list)

    async def plan_table(self, request: TablePlanRequest) -> TablePlanResponse:
        number = len(self.requests)
        self.requests.append(request)
        if self._view(request.table) is not None:
            raise NoSuchResource("Table does not exist", status=404, kind="NoSuchTableException")
        await asyncio.sleep(self.wait_s)
        usual_fields = {"name": None, "plan_snapshot_id": 100 + number, "snapshot_id": request.snapshot_id or 7}
        sizes = {"files": 1, "bytes": 10, "considered_files": 100}
        return TablePlanResponse(**{**usual_fields, **sizes, **self.plan(request)})

    async def load_table(self, table: tuple[str, ...]) -> KnownTable | None:
        self.loaded_tables.append(table)
        if table[-1] in self.tables:
            return self.tables[table[-1]]
        return KnownTable(self.version, COLUMNS[table[-1]]) if table[-1] in COLUMNS else None

    async def view(self, name: Name) -> View | None:
        self.read_views.append(name)
        return self._view(name)

    def _view(self, name: Name) -> View | None:
        return self.views.get(name) or self.views.get(name[-1])

    async def plan_view(
        self, name: Name, view: View, predicate: str, references: Sequence[Reference], reader: str
    ) -> PlanView | None:
        assert reader == READER
        number = len(self.view_requests)
        self.view_requests.append(ViewRequest(name, view, predicate, tuple(references)))
        text = f"{name[-1]}~plan~{number}" if self.answer is None else self.answer(name)
        return None if text is None else PlanView(text, 200 + number, tuple(view.columns))

    async def lease(self, name: Name, plan_ids: Collection[int], lease_s: int | None = None) -> None:
        self.leases.append((name, list(plan_ids), lease_s))


@asynccontextmanager
async def open_rewriter(seamark: Any, limits: RewriteLimits = PATIENT) -> AsyncIterator[Rewriter]:
    rewriter = Rewriter(seamark, ["lake", "Other"], limits)
    yield rewriter
    await rewriter.close()
