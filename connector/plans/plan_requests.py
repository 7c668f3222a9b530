"""The plan requests of one statement, within its time budget: which plan tables replace its scans.

A table that a statement reads more than once is read at one snapshot, as Trino would: all its scans get plans of the
same snapshot, or none does. If it is also read at a branch or tag, the snapshots of all these scans belong to one state
of the table. The same applies to a table whose rows were used to leave out files of another table: all
its scans must read the snapshot of these rows, which was current when the statement arrived. If that is impossible, a
plan of the other table is requested again, without its joins.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from seamark.connector.client.errors import ClientError, NotFound, Refused
from seamark.connector.plans.async_client import JoinOutcome, Name, PlanTableRequest, PlanTableResponse, Seamark
from seamark.connector.plans.joins import Dimension, PlannedScan, depth_first

_JOINS_SHARE = 0.6
"""Fraction of the remaining time for a request with joins; the rest is for a request without them."""
_log = structlog.get_logger("seamark.plans")
T = TypeVar("T")
K = TypeVar("K")
Plans = dict[PlannedScan, PlanTableResponse]


class PlanRequests:
    """Belongs to one statement. `why`: the reason for the last missing plan."""

    def __init__(self, seamark: Seamark, kept_max: float, until_s: float) -> None:
        self._seamark = seamark
        self._kept_max = kept_max
        self._until_s = until_s
        self._failed = False
        self.why = ""
        self.made: set[tuple[Name, int]] = set()
        """Ids of all plans that the server returned, including unused plans."""
        self.missing: set[Name] = set()
        """Names that are no tables, among them views."""

    def has_failed(self) -> bool:
        """Whether the server failed to answer; a refusal is an answer."""
        return self._failed

    async def plans(
        self, places: Sequence[PlannedScan], dimensions: Mapping[PlannedScan, tuple[Dimension, ...]]
    ) -> Plans:
        """The plans of the scans that are to read plan tables."""
        groups = _groups(places)
        pins = {one.place.read: one for each in dimensions.values() for one in depth_first(each)}
        wanted = {}
        for place in places:
            joins, pin = dimensions.get(place, ()), pins.get(place.read)
            if pin is not None:
                # No file of a single-file table can be left out, so all statements share one plan of it.
                wanted[place] = _wanted(place, pin.snapshot_id, 1.0, joins, keep=pin.files > 1)
            elif place.scan.condition is not None or joins:
                wanted[place] = _wanted(place, place.scan.snapshot_id, self._kept_max, joins)
        found = await self._plans(wanted)
        again = {}
        for place, each in dimensions.items():
            plan = found.get(place)
            if plan is None or len(plan.joins) != len(depth_first(each)) or not _is_sure(each, plan, found):
                found.pop(place, None)
                if place.scan.condition is not None or place.read in pins:
                    again[place] = replace(wanted[place], joins=())
        again |= self._others(groups, found, again)
        found |= await self._plans(again)
        _settle(groups, dimensions, found)
        await self._settle_refs(groups, dimensions, found)
        needed = {one.place.read for place, plan in found.items() for one, _ in _used(dimensions.get(place, ()), plan)}
        for read in pins.keys() - needed:
            # It was pinned to the snapshot for a join with another table; the join is not used.
            group = next(group for group in groups.values() if any(place.read == read for place in group))
            if all(place in found and self._keeps_most(found[place]) for place in group):
                _drop(found, group)
        return {place: plan for place, plan in found.items() if plan.is_made}

    def _others(
        self, groups: Mapping[object, list[PlannedScan]], found: Plans, again: Mapping[PlannedScan, PlanTableRequest]
    ) -> dict[PlannedScan, PlanTableRequest]:
        """The plans to request because other scans of the same table have plans."""
        wanted: dict[PlannedScan, PlanTableRequest] = {}
        for group in groups.values():
            answers = {place: found[place] for place in group if place in found}
            if len(group) > 1 and any(answer.is_made for answer in answers.values()):
                snapshots = {place.read: answer.snapshot_id for place, answer in answers.items()}
                if any(answer.snapshot_id != snapshots[place.read] for place, answer in answers.items()):
                    _drop(found, group)  # committed in between
                    continue
                for place in group:
                    if place in again or place not in found or not found[place].is_made:
                        keep = place in found or place in again
                        wanted[place] = _wanted(place, snapshots.get(place.read), 1.0, keep=keep)
        return wanted

    async def _settle_refs(
        self,
        groups: Mapping[object, Sequence[PlannedScan]],
        dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
        found: Plans,
    ) -> None:
        """Removes the plans of a table that is read at branches, tags or its current snapshot, if these moved while the
        plans were made."""
        mixed = [group for group in groups.values() if len({place.read for place in group}) > 1 and group[0] in found]
        tables = await self.all({group[0].table: self._seamark.columns(group[0].table) for group in mixed})
        for group in mixed:
            table = tables.get(group[0].table)
            if table is None or any(found[at].snapshot_id != table.snapshot_of(at.scan.ref) for at in group):
                _drop(found, group)
        _settle(groups, dimensions, found)

    def _keeps_most(self, plan: PlanTableResponse) -> bool:
        return plan.files > self._kept_max * plan.considered_files

    async def _plans(self, wanted: Mapping[PlannedScan, PlanTableRequest]) -> Plans:
        answers = await self.all({one: self._plan(one) for one in dict.fromkeys(wanted.values())})
        return {place: answers[one] for place, one in wanted.items() if one in answers}

    async def _plan(self, wanted: PlanTableRequest) -> PlanTableResponse:
        left_s = self._until_s - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s * _JOINS_SHARE if wanted.joins else None):
                plan = await self._seamark.plan_table(wanted)
        except NotFound:
            self.missing.add(wanted.table)
            raise
        if plan.plan_snapshot_id is not None:
            self.made.add((wanted.table, plan.plan_snapshot_id))
        return plan

    async def all(self, questions: Mapping[K, Coroutine[Any, Any, T]]) -> dict[K, T]:
        """The answers that arrive in time and are no refusals."""
        if not questions:
            return {}
        left_s = self._until_s - asyncio.get_running_loop().time()
        tasks = {key: asyncio.create_task(question) for key, question in questions.items()}
        try:
            _, late = await asyncio.wait(tasks.values(), timeout=max(0.0, left_s))
        finally:
            for task in tasks.values():
                task.cancel()
        if late:
            self._failed, self.why = True, "Seamark was too slow"
            await asyncio.wait(late)
        return {key: task.result() for key, task in tasks.items() if self._is_answered(task)}

    def _is_answered(self, task: asyncio.Task[Any]) -> bool:
        error = None if task.cancelled() else task.exception()
        match error:
            case None:
                return not task.cancelled()
            case TimeoutError():
                self.why = "joins took too long"
            case Refused():  # no such table, a view, a filter that cannot be bound
                self.why = f"Seamark refused: {error.kind or error.status}"
            case ClientError():
                self._failed, self.why = True, f"Seamark failed: {error.kind or type(error).__name__}"
                _log.warning("not answered", error=error.message)
            case _:
                raise error
        return False


def drop_scans(
    gone: Sequence[PlannedScan],
    plans: Plans,
    places: Sequence[PlannedScan],
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
) -> Plans:
    """The plans that stay valid if the scans in `gone` are not read."""
    left = dict(plans)
    _drop(left, gone)
    _settle(_groups(places), dimensions, left)
    return left


def used_joins(dimensions: Sequence[Dimension], plan: PlanTableResponse) -> list[tuple[str, int]]:
    """The columns by which files were left out, and the number of keys."""
    used = _used(dimensions, plan)
    return [("+".join(column for column, _ in one.on), outcome.keys or 0) for one, outcome in used if one in dimensions]


def _wanted(
    place: PlannedScan,
    snapshot_id: int | None,
    kept_max: float,
    joins: Sequence[Dimension] = (),
    *,
    keep: bool = True,
) -> PlanTableRequest:
    """`keep`: with the filter; after a refusal, a plan without it is requested."""
    filter = place.scan.filter if keep else None
    ref = place.scan.ref if snapshot_id is None else None
    past, wanted = place.scan.is_past, tuple(one.request() for one in joins)
    return PlanTableRequest(place.table, filter, snapshot_id, kept_max, past, wanted, ref)


def _used(dimensions: Sequence[Dimension], plan: PlanTableResponse) -> list[tuple[Dimension, JoinOutcome]]:
    """The dimensions whose rows left out files, and their outcomes."""
    if not plan.is_made:
        return []
    return [(one, outcome) for one, outcome in zip(depth_first(dimensions), plan.joins, strict=False) if outcome.used]


def _is_sure(dimensions: Sequence[Dimension], plan: PlanTableResponse, found: Plans) -> bool:
    """Whether each table whose rows left out files is read at the snapshot of these rows."""
    for one, outcome in _used(dimensions, plan):
        other = found.get(one.place)
        if other is None or not other.is_made or not other.snapshot_id == outcome.snapshot_id == one.snapshot_id:
            return False
    return True


def _groups(places: Sequence[PlannedScan]) -> dict[object, list[PlannedScan]]:
    """The scans that must read the same state of a table."""
    groups: defaultdict[object, list[PlannedScan]] = defaultdict(list)
    for place in places:
        groups[place.state].append(place)
    return groups


def _settle(
    groups: Mapping[object, Sequence[PlannedScan]],
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
    found: Plans,
) -> None:
    """Removes plans until the scans of a table, and their dimensions, are read at one state."""
    while True:
        apart = [group for group in groups.values() if len(group) > 1 and not _have_names(group, found)]
        unsure = [place for place, plan in found.items() if not _is_sure(dimensions.get(place, ()), plan, found)]
        wrong = [place for place in (*unsure, *(one for group in apart for one in group)) if place in found]
        if not wrong:
            return
        _drop(found, wrong)


def _have_names(group: Sequence[PlannedScan], found: Plans) -> bool:
    return all(place in found and found[place].is_made for place in group)


def _drop(plans: Plans, places: Sequence[PlannedScan]) -> None:
    for place in places:
        plans.pop(place, None)
