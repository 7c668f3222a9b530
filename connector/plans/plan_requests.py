"""Requests the plans for the scans of one statement, within its time budget.

If a statement reads a table more than once, Trino reads it at one snapshot. Therefore all scans of the table get plans
of the same snapshot, or no scan of the table gets a plan. If the table is also read at a branch or tag, the snapshots
of all these scans must belong to one state of the table.

The same applies to a dimension, which is a table whose rows were used to leave out files of another table. All scans of
a dimension must read the snapshot with these rows, which was current when the statement arrived. If this is impossible,
the plan of the other table is requested again, without its joins.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import structlog

from seamark.connector.client.errors import ClientError, NoSuchResource, Refused
from seamark.connector.plans.async_client import JoinResult, Name, Seamark, TablePlanRequest, TablePlanResponse
from seamark.connector.plans.joins import Dimension, PlannedScan, list_depth_first

_JOINS_TIME_FRACTION = 0.6
"""The fraction of the remaining time for a request with joins. The rest is reserved for a request without joins."""
_log = structlog.get_logger("seamark.plans")
T = TypeVar("T")
K = TypeVar("K")
Plans = dict[PlannedScan, TablePlanResponse]

_ALL_FILES_FRACTION = 1.0
"""The limit `max_kept_fraction` of a plan that is also used if it keeps all files."""


class PlanRequests:
    """The plan requests of one statement.

    Attributes:
        refusal_reason: The reason why the last scan without a plan got none.
    """

    def __init__(
        self,
        seamark: Seamark,
        max_kept_fraction: float,
        until_s: float,
        *,
        hide_partitions: bool = False,
        streams: Collection[Name] = (),
    ) -> None:
        """Create the requests of one statement.

        Args:
            seamark: The client of the server.
            max_kept_fraction: The maximum fraction of the files that a plan may keep.
            until_s: The deadline of all requests, on the clock of the event loop.
            hide_partitions: Whether the statement is for DuckDB, which leaves out files by rules that differ from
                Iceberg's. Its plans therefore have only identity partition fields. If a property of a table would
                mislead DuckDB, each scan of the table gets a plan, even without a filter.
            streams: Stream tables of which the engine itself cannot see the unflushed rows. Each scan of them
                gets a plan, even without a filter.
        """
        self._hide_partitions = hide_partitions
        self._streams = frozenset(streams)
        self.misread: dict[Name, str] = {}
        """The tables that DuckDB would read wrongly, with the reasons."""
        self._seamark = seamark
        self._max_kept_fraction = max_kept_fraction
        self._until_s = until_s
        self._has_failed = False
        self.refusal_reason = ""
        self.answered: set[PlannedScan] = set()
        """The scans for which the server has answered a request. These scans count in the query history."""
        self.plan_snapshots: set[tuple[Name, int]] = set()
        """The ids of all plans that the server has returned, including unused plans."""
        self.missing: set[Name] = set()
        """The names that do not refer to a table, including names of views."""

    def has_failed(self) -> bool:
        """Return whether the server has failed to respond. A refusal counts as a response."""
        return self._has_failed

    async def request_plans(
        self, planned_scans: Sequence[PlannedScan], dimensions: Mapping[PlannedScan, tuple[Dimension, ...]]
    ) -> Plans:
        """Request plans of scans, and return the plans that the statement will read.

        A plan with joins depends on the snapshots of the joined tables. These tables are pinned: they get plans of the
        same snapshots. If the server cannot use a join, the scan is requested again without joins. Finally, plans are
        removed that contradict other plans, or that would leave out few files of a pinned table.

        Args:
            planned_scans: The scans of the statement.
            dimensions: The joined tables that can leave out files of each scan.
        """
        groups = _group_scans(planned_scans)
        pins = {
            dimension.planned.read_key: dimension
            for scan_dimensions in dimensions.values()
            for dimension in list_depth_first(scan_dimensions)
        }
        requests = {}
        for planned_scan in planned_scans:
            joins, pin = dimensions.get(planned_scan, ()), pins.get(planned_scan.read_key)
            if pin is not None:
                # No file of a table with a single file can be left out, so all statements use the same plan of it.
                requests[planned_scan] = _build_request(
                    planned_scan, pin.snapshot_id, _ALL_FILES_FRACTION, joins, with_filter=pin.files > 1
                )
            elif planned_scan.table in self._streams:
                requests[planned_scan] = _build_request(
                    planned_scan, planned_scan.scan.snapshot_id, _ALL_FILES_FRACTION, joins
                )
            elif planned_scan.scan.condition is not None or joins or self._hide_partitions:
                requests[planned_scan] = _build_request(
                    planned_scan, planned_scan.scan.snapshot_id, self._max_kept_fraction, joins
                )
        plans = await self._request_plans(requests)
        repeated_requests = {}
        for planned_scan, scan_dimensions in dimensions.items():
            plan = plans.get(planned_scan)
            if (
                plan is None
                or len(plan.joins) != len(list_depth_first(scan_dimensions))
                or not _is_consistent(scan_dimensions, plan, plans)
            ):
                plans.pop(planned_scan, None)
                if (
                    planned_scan.scan.condition is not None
                    or planned_scan.read_key in pins
                    or planned_scan.table in self._streams
                ):
                    repeated_requests[planned_scan] = replace(requests[planned_scan], joins=())
        repeated_requests |= self._build_requests_of_other_scans(groups, plans, repeated_requests)
        plans |= await self._request_plans(repeated_requests)
        _drop_inconsistent(groups, dimensions, plans)
        await self._drop_moved_refs(groups, dimensions, plans)
        effective_joins = (
            _select_effective_joins(dimensions.get(planned_scan, ()), plan) for planned_scan, plan in plans.items()
        )
        joined_read_keys = {dimension.planned.read_key for joins in effective_joins for dimension, _ in joins}
        for table_read in pins.keys() - joined_read_keys:
            # The scan was pinned to this snapshot for a join with another table, but the join is not used.
            group = next(
                group for group in groups.values() if any(planned_scan.read_key == table_read for planned_scan in group)
            )
            if group[0].table not in self._streams and all(
                planned_scan in plans and self._keeps_most(plans[planned_scan]) for planned_scan in group
            ):
                _drop(plans, group)
        return {planned_scan: plan for planned_scan, plan in plans.items() if plan.is_made}

    def _build_requests_of_other_scans(
        self,
        groups: Mapping[object, list[PlannedScan]],
        plans: Plans,
        repeated_requests: Mapping[PlannedScan, TablePlanRequest],
    ) -> dict[PlannedScan, TablePlanRequest]:
        """Build requests for scans without plans, if other scans of the same table have plans.

        Otherwise, these scans could read a newer snapshot than the plans. The new plans may keep all files.

        Args:
            groups: The scans that must read the same state of a table.
            plans: The responses to earlier requests. If they have different snapshots, the plans of the group are
                removed.
            repeated_requests: The scans whose requests are repeated.
        """
        requests: dict[PlannedScan, TablePlanRequest] = {}
        for group in groups.values():
            answers = {planned_scan: plans[planned_scan] for planned_scan in group if planned_scan in plans}
            if len(group) > 1 and any(answer.is_made for answer in answers.values()):
                snapshots = {planned_scan.read_key: answer.snapshot_id for planned_scan, answer in answers.items()}
                if any(
                    answer.snapshot_id != snapshots[planned_scan.read_key] for planned_scan, answer in answers.items()
                ):
                    _drop(plans, group)  # Another client has committed between the two requests.
                    continue
                for planned_scan in group:
                    if (
                        planned_scan in repeated_requests
                        or planned_scan not in plans
                        or not plans[planned_scan].is_made
                    ):
                        # If a request of the scan was not answered, the server may have refused its filter.
                        with_filter = planned_scan in plans or planned_scan in repeated_requests
                        requests[planned_scan] = _build_request(
                            planned_scan,
                            snapshots.get(planned_scan.read_key),
                            _ALL_FILES_FRACTION,
                            with_filter=with_filter,
                        )
        return requests

    async def _drop_moved_refs(
        self,
        groups: Mapping[object, Sequence[PlannedScan]],
        dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
        plans: Plans,
    ) -> None:
        """Remove the plans of each table whose branches, tags or current snapshot changed during planning.

        Only tables that the statement reads at several branches or tags are checked, because their plans were requested
        separately.

        Args:
            groups: The scans that must read the same state of a table.
            dimensions: The dimensions of each scan, whose rows may have left out files.
            plans: The plans, from which plans are removed.
        """
        mixed_groups = [
            group
            for group in groups.values()
            if len({planned_scan.read_key for planned_scan in group}) > 1 and group[0] in plans
        ]
        tables = await self.request_all(
            {group[0].table: self._seamark.load_table(group[0].table) for group in mixed_groups}
        )
        for group in mixed_groups:
            table = tables.get(group[0].table)
            if table is None or any(
                plans[planned_scan_of_group].snapshot_id != table.resolve_snapshot_id(planned_scan_of_group.scan.ref)
                for planned_scan_of_group in group
            ):
                _drop(plans, group)
        _drop_inconsistent(groups, dimensions, plans)

    def _keeps_most(self, plan: TablePlanResponse) -> bool:
        return plan.files > self._max_kept_fraction * plan.considered_files

    async def _request_plans(self, requests: Mapping[PlannedScan, TablePlanRequest]) -> Plans:
        answers = await self.request_all({request: self._plan(request) for request in dict.fromkeys(requests.values())})
        answered_plans = {
            planned_scan: answers[request] for planned_scan, request in requests.items() if request in answers
        }
        self.answered |= answered_plans.keys()
        return answered_plans

    async def _plan(self, request: TablePlanRequest) -> TablePlanResponse:
        """Request the plan of one scan.

        Also record the snapshot of the plan, a missing table, and a table that DuckDB would read wrongly.
        """
        request = replace(request, hide_partitions=self._hide_partitions)
        remaining_s = self._until_s - asyncio.get_running_loop().time()
        try:
            # The rest of the time is reserved for a second request without joins, in case this request takes too long.
            async with asyncio.timeout(remaining_s * _JOINS_TIME_FRACTION if request.joins else None):
                plan = await self._seamark.plan_table(request)
        except NoSuchResource:
            self.missing.add(request.table)
            raise
        if plan.misread:
            self.misread[request.table] = plan.misread
        if plan.plan_snapshot_id is not None:
            self.plan_snapshots.add((request.table, plan.plan_snapshot_id))
        return plan

    async def request_all(self, requests: Mapping[K, Coroutine[Any, Any, T]]) -> dict[K, T]:
        """Send all requests, and return the responses that arrive in time, except refusals."""
        if not requests:
            return {}
        remaining_s = self._until_s - asyncio.get_running_loop().time()
        tasks = {key: asyncio.create_task(request) for key, request in requests.items()}
        try:
            _, unfinished_tasks = await asyncio.wait(tasks.values(), timeout=max(0.0, remaining_s))
        finally:
            for task in tasks.values():
                task.cancel()
        if unfinished_tasks:
            self._has_failed, self.refusal_reason = True, "Seamark was too slow"
            await asyncio.wait(unfinished_tasks)
        return {key: task.result() for key, task in tasks.items() if self._check_answer(task)}

    def _check_answer(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a finished request has a result. Otherwise, record the reason in `refusal_reason`.

        If the server has failed, this is also recorded for `has_failed`.
        """
        error = None if task.cancelled() else task.exception()
        match error:
            case None:
                return not task.cancelled()
            case TimeoutError():
                self.refusal_reason = "joins took too long"
            case Refused():  # The table does not exist or is a view, or the filter cannot be bound.
                self.refusal_reason = f"Seamark refused: {error.kind or error.status}"
            case ClientError():
                self._has_failed, self.refusal_reason = True, f"Seamark failed: {error.kind or type(error).__name__}"
                _log.warning("The server did not respond to a request for a plan", error=error.message)
            case _:
                raise error
        return False


def remove_plans_of_scans(
    dropped_scans: Sequence[PlannedScan],
    plans: Plans,
    planned_scans: Sequence[PlannedScan],
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
) -> Plans:
    """Return the plans that stay valid if the scans in `dropped_scans` get no plan.

    A plan becomes invalid if a joined table that it depends on has no plan, or if another scan of the same table has no
    plan, because a statement must read a table at one snapshot.
    """
    remaining_plans = dict(plans)
    _drop(remaining_plans, dropped_scans)
    _drop_inconsistent(_group_scans(planned_scans), dimensions, remaining_plans)
    return remaining_plans


def find_used_joins(dimensions: Sequence[Dimension], plan: TablePlanResponse) -> list[tuple[str, int | None]]:
    """Return the columns of each join by which files were left out, and the number of its distinct key values.

    Joins of a dimension with further tables are not returned. The number is None if an index on attributes of the
    dimension left out the files.
    """
    used_dimensions = _select_effective_joins(dimensions, plan)
    return [
        ("+".join(dict.fromkeys(column for column, _ in dimension.on)), outcome.keys)
        for dimension, outcome in used_dimensions
        if dimension in dimensions
    ]


def _build_request(
    planned_scan: PlannedScan,
    snapshot_id: int | None,
    max_kept_fraction: float,
    joins: Sequence[Dimension] = (),
    *,
    with_filter: bool = True,
) -> TablePlanRequest:
    """Return the request for a scan.

    Args:
        planned_scan: The scan.
        snapshot_id: The snapshot to plan, or None for the branch or tag of the scan, or the current snapshot.
        max_kept_fraction: The maximum fraction of the files that the plan may keep.
        joins: The joins that may leave out files.
        with_filter: Whether the request contains the filter. If the server has refused the filter, it is left out.
    """
    filter = planned_scan.scan.filter if with_filter else None
    ref = planned_scan.scan.ref if snapshot_id is None else None
    return TablePlanRequest(
        planned_scan.table,
        filter,
        snapshot_id,
        max_kept_fraction,
        uses_snapshot_schema=planned_scan.scan.selects_version,
        joins=tuple(join.request() for join in joins),
        ref=ref,
        use=planned_scan.scan.use,
    )


def _select_effective_joins(
    dimensions: Sequence[Dimension], plan: TablePlanResponse
) -> list[tuple[Dimension, JoinResult]]:
    """Return the dimensions whose rows left out files, with the outcomes of their joins."""
    if not plan.is_made:
        return []
    # A plan that was requested again without its joins has no outcomes.
    return [
        (dimension, outcome)
        for dimension, outcome in zip(list_depth_first(dimensions), plan.joins, strict=False)
        if outcome.used
    ]


def _is_consistent(dimensions: Sequence[Dimension], plan: TablePlanResponse, plans: Plans) -> bool:
    """Return whether each table whose rows left out files is read at the snapshot that has these rows."""
    for dimension, outcome in _select_effective_joins(dimensions, plan):
        other = plans.get(dimension.planned)
        if other is None or not other.is_made or not other.snapshot_id == outcome.snapshot_id == dimension.snapshot_id:
            return False
    return True


def _group_scans(planned_scans: Sequence[PlannedScan]) -> dict[object, list[PlannedScan]]:
    """Group the scans that must read the same state of a table."""
    groups: defaultdict[object, list[PlannedScan]] = defaultdict(list)
    for planned_scan in planned_scans:
        groups[planned_scan.state].append(planned_scan)
    return groups


def _drop_inconsistent(
    groups: Mapping[object, Sequence[PlannedScan]],
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
    plans: Plans,
) -> None:
    """Remove plans until, for each table, either all its scans have a plan or none, and all joins are consistent.

    Each removal may make other plans inconsistent, so the check is repeated until nothing is removed.
    """
    while True:
        incomplete_groups = [group for group in groups.values() if len(group) > 1 and not _have_plans(group, plans)]
        inconsistent = [
            planned_scan
            for planned_scan, plan in plans.items()
            if not _is_consistent(dimensions.get(planned_scan, ()), plan, plans)
        ]
        scans_to_drop = [
            planned_scan
            for planned_scan in (*inconsistent, *chain.from_iterable(incomplete_groups))
            if planned_scan in plans
        ]
        if not scans_to_drop:
            return
        _drop(plans, scans_to_drop)


def _have_plans(group: Sequence[PlannedScan], plans: Plans) -> bool:
    return all(planned_scan in plans and plans[planned_scan].is_made for planned_scan in group)


def _drop(plans: Plans, planned_scans: Sequence[PlannedScan]) -> None:
    for planned_scan in planned_scans:
        plans.pop(planned_scan, None)
