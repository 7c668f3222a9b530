"""Finds the tables in the views of a statement, and creates plan views over the plans of these tables.

To push a statement's condition on a view to its tables, the statement `SELECT * FROM (view text) WHERE …` is analysed.
The catalog creates a plan view with the text of the view, in which plan tables replace the tables. Trino runs the plan
view in the same way as the original view: with the rights of its owner, and with its declared columns. Nested views are
handled in the same way. The plan view of an outer view uses the plan views of its inner views.

A condition is pushed only to a column of the view that is an unchanged stored column of exactly the declared type,
because Trino converts other columns and compares the converted values. View definitions are cached. Each statement
checks that the cached definitions are current, because the meaning of names in other texts depends on their columns. A
plan view belongs to one metadata file of its view and of each nested view. If the catalog refuses to create a plan
view, the statement uses the original view.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from seamark.cache.memory import MemoryCache
from seamark.connector.analysis.algebra.relations import COMPUTED
from seamark.connector.analysis.queries import Names
from seamark.connector.analysis.relative_times import find_today
from seamark.connector.analysis.statement_cache import StatementReader, StatementText
from seamark.connector.client.errors import Refused
from seamark.connector.plans import joins as joining
from seamark.connector.plans.async_client import KnownTable, Name, PlanView, Reference, Seamark, View
from seamark.connector.plans.column_types import NESTED
from seamark.connector.plans.joins import Dimension, PlannedScan
from seamark.connector.plans.plan_requests import PlanRequests, Plans, remove_plans_of_scans
from seamark.connector.plans.quotes import quote_name

DEPTH_MAX = 8
"""The maximum depth of nested views. Trino does not create recursive views, but other clients of the catalog might."""
VIEWS_MAX = 32
"""The maximum number of views in one statement."""
QUERY_PREFIX = "SELECT * FROM (\n"
"""The text that precedes the text of the view in the query of a plan view."""
_CACHE_BYTES = 8 << 20
_BYTES_PER_COLUMN = 200
_REFUSED_VIEW_RETRY_S = 60.0
"""The time in seconds for which a name is not requested again after a refusal, or if it is not a supported view."""
ResolveName: TypeAlias = Callable[[Names, View], tuple[str, Name] | None]
"""A function that returns the catalog and table of a name in a view's text, or None if no catalog has it."""


@dataclass(frozen=True, slots=True)
class ResolvedView:
    """A view, with the tables to which the names in its text refer.

    Attributes:
        named: The catalog and the name of each table, by the name in the text.
    """

    view: View
    named: Mapping[Names, tuple[str, Name]]


@dataclass(frozen=True, slots=True)
class ViewDefinitions:
    """The current definitions for one statement: its views, and the columns of its tables and views."""

    views: Mapping[Name, ResolvedView]
    tables: Mapping[Name, KnownTable]


@dataclass(frozen=True, slots=True)
class ExpandedView:
    """A reference to a view, with the references to tables and to views in the view's text.

    Attributes:
        planned: The reference to the view.
        dimensions: For each reference to a table, the joined tables whose rows can restrict its files.
    """

    planned: PlannedScan
    view: View
    tables: tuple[PlannedScan, ...]
    views: tuple[PlannedScan, ...]
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]]


def plan_view_query(text: str, name: str, predicate: str) -> str:
    return f"{QUERY_PREFIX}{text}\n) AS {quote_name(name)} WHERE {predicate}"


def get_predicate(planned_scan: PlannedScan) -> str:
    """Return the statement's condition on a view, or TRUE if there is none. The view's own text may have conditions."""
    return planned_scan.scan.predicate or "TRUE"


class ViewPlanner:
    """Loads the views of statements, and creates plan views for them. A planner belongs to one event loop."""

    def __init__(self, seamark: Seamark, reader: StatementReader, resolve_name: ResolveName) -> None:
        self._seamark = seamark
        self._reader = reader
        self._resolve_name = resolve_name
        self._views_by_name: MemoryCache[Name, View] = MemoryCache(_CACHE_BYTES)
        self._paused_until_s: MemoryCache[Name, float] = MemoryCache(_CACHE_BYTES)

    # View definitions

    async def load(self, names: Collection[Name], requests: PlanRequests, until_s: float) -> bool:
        """Load the views among `names`, and the views nested in them.

        At most `VIEWS_MAX` views are loaded, and at most `DEPTH_MAX` levels of nesting. A name that is no view is not
        requested again for some time.

        Args:
            names: Names that are not tables.
            requests: The sender of requests to the catalog.
            until_s: The deadline.

        Returns:
            Whether a new view was loaded.

        Raises:
            TimeoutError: The deadline has passed.
        """
        loaded_count = 0
        for _ in range(DEPTH_MAX):
            unknown = [name for name in names if self._views_by_name.get(name) is None and not self._is_paused(name)]
            answers = await requests.request_all(
                {name: self._seamark.view(name) for name in unknown[: VIEWS_MAX - loaded_count]}
            )
            views = {name: view for name, view in answers.items() if view is not None}
            for name in answers.keys() - views.keys():
                self._pause_requests(name)
            for name, view in views.items():
                size = 2 * len(view.text) + _BYTES_PER_COLUMN * (1 + len(view.columns))
                self._views_by_name.put(name, view, size)
            loaded_count += len(views)
            inner_names = {
                name for view in views.values() for _, name in (await self._open(view, until_s)).named.values()
            }
            tables = await requests.request_all({name: self._seamark.load_table(name) for name in inner_names})
            names = [name for name, table in tables.items() if table is None]
            if not names:
                break
        return loaded_count > 0

    async def open_cached_views(self, names: Iterable[Name], until_s: float) -> dict[Name, ResolvedView]:
        """Return the cached views among `names`, and the cached views nested in them.

        A view follows the views in its text.

        Raises:
            TimeoutError: The deadline `until_s` has passed.
        """
        views: dict[Name, ResolvedView] = {}
        for name in names:
            await self._open_nested(name, (), views, until_s)
        return views

    async def _open_nested(
        self, name: Name, outer_views: tuple[Name, ...], views: dict[Name, ResolvedView], until_s: float
    ) -> None:
        view = None if self._is_paused(name) else self._views_by_name.get(name)
        if (
            view is None
            or name in views
            or name in outer_views
            or len(outer_views) >= DEPTH_MAX
            or len(views) >= VIEWS_MAX
        ):
            return
        resolved_view = await self._open(view, until_s)
        for _, inner in resolved_view.named.values():
            await self._open_nested(inner, (*outer_views, name), views, until_s)
        views[name] = resolved_view

    async def load_definitions(
        self, names: Iterable[Name], views: Mapping[Name, ResolvedView], requests: PlanRequests, until_s: float
    ) -> ViewDefinitions:
        """Return the current definitions of `names`, and of the names in the texts of `views`.

        Views that have changed, and names that are not tables, are added to `requests.missing`.

        Raises:
            TimeoutError: The deadline `until_s` has passed.
        """
        tables = {
            *names,
            *(name for resolved_view in views.values() for _, name in resolved_view.named.values()),
        } - views.keys()
        requests_by_name: dict[Name, Coroutine[Any, Any, KnownTable | View | None]] = {
            **{name: self._seamark.load_table(name) for name in tables},
            **{name: self._seamark.view(name) for name in views},
        }
        answers = await requests.request_all(requests_by_name)
        tables_by_name = {name: answer for name, answer in answers.items() if isinstance(answer, KnownTable)}
        unchanged_views = {
            name: resolved_view for name, resolved_view in views.items() if answers.get(name) == resolved_view.view
        }
        for name, resolved_view in unchanged_views.items():
            tables_by_name[name] = await self._read_columns(resolved_view, tables_by_name, until_s)
        requests.missing.update(name for name in answers if name not in tables_by_name)
        for name in views.keys() & answers.keys() - unchanged_views.keys():
            self._views_by_name.discard(name)
        return ViewDefinitions(unchanged_views, tables_by_name)

    async def _open(self, view: View, until_s: float) -> ResolvedView:
        table_names = (await self._reader.read(_describe_view(view), {}, until_s)).table_names
        return ResolvedView(
            view, {names: table for names in table_names if (table := self._resolve_name(names, view)) is not None}
        )

    async def _read_columns(
        self, resolved_view: ResolvedView, known_tables: Mapping[Name, KnownTable], until_s: float
    ) -> KnownTable:
        """Return the columns of a view. A column to which no condition can be pushed has the type `COMPUTED`."""
        view, tables = resolved_view.view, _select_tables(resolved_view, known_tables)
        # The types of the columns that the view returns unchanged. A condition can be pushed to such a column if the
        # type in the view's schema is the type in the table. Otherwise the engine converts the values.
        kinds = (await self._reader.read(_describe_view(view), tables, until_s)).kinds
        stored_kinds = {
            name: kind if kind != NESTED and kinds.get(name) == kind else COMPUTED
            for name, kind in view.columns.items()
        }
        versions = sorted((str(names), table.version) for names, table in tables.items())
        # The version is a hash, because its length must not grow with the depth of nesting.
        return KnownTable(hashlib.sha256(f"{view.location} {versions}".encode()).hexdigest(), stored_kinds)

    # Tables behind views

    async def expand(
        self, views: Mapping[int, PlannedScan], definitions: ViewDefinitions, until_s: float, *, utc: bool
    ) -> list[ExpandedView]:
        """Return the views of a statement and, recursively, the views in their texts. Outer views are first.

        Further views and deeper views than `VIEWS_MAX` and `DEPTH_MAX` are left out, and so are views whose name cannot
        be replaced in the text (`Scan.renamable`). Their files are not restricted.

        Raises:
            TimeoutError: The deadline `until_s` has passed.
        """
        expanded_views: list[ExpandedView] = []
        remaining_views = deque(views.items())
        while remaining_views and len(expanded_views) < VIEWS_MAX:
            number, planned_scan = remaining_views.popleft()
            resolved_view, outer_numbers = definitions.views[planned_scan.table], (*planned_scan.within, number)
            tables_by_name = _select_tables(resolved_view, definitions.tables)
            text = plan_view_query(resolved_view.view.text, planned_scan.table[-1], get_predicate(planned_scan))
            statement = await self._reader.read(
                StatementText(text, utc=utc, today=find_today(text)), tables_by_name, until_s
            )
            planned_scans = {}
            for scan_number, scan in enumerate(statement.scans):
                names = scan.catalog, scan.schema, scan.table
                if scan.version_span is None and names in tables_by_name:
                    planned_scans[scan_number] = PlannedScan(scan, *resolved_view.named[names], within=outer_numbers)
            tables = {
                scan_number: table_scan
                for scan_number, table_scan in planned_scans.items()
                if table_scan.table not in definitions.views
            }
            inner = {
                scan_number: view_scan
                for scan_number, view_scan in planned_scans.items()
                if view_scan.table in definitions.views and view_scan.scan.renamable
            }
            dimensions = joining.find_dimensions(tables, tables_by_name)
            expanded_views.append(
                ExpandedView(
                    planned_scan, resolved_view.view, tuple(tables.values()), tuple(inner.values()), dimensions
                )
            )
            remaining_views.extend(inner.items() if len(outer_numbers) < DEPTH_MAX else ())
        return expanded_views

    # Plan views

    async def plan_views(
        self,
        expanded_views: Sequence[ExpandedView],
        plans: Plans,
        planned_scans: Sequence[PlannedScan],
        dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
        requests: PlanRequests,
        reader: str,
    ) -> tuple[dict[PlannedScan, PlanView], Plans]:
        """Create a plan view for each view that reads a table in `plans`.

        A plan view is a temporary view with the text of the view, but it reads the files in the plans of the tables.

        Args:
            expanded_views: The views of the statement, with the references in their texts.
            plans: The plans of tables.
            planned_scans: All references to tables in the statement.
            dimensions: The joined tables that can restrict the files of each reference.
            requests: The sender of requests to the catalog.
            reader: The user who reads the views.

        Returns:
            The plan views, and the plans that can be used. A statement must read a table at one snapshot, so the plans
            of a table are dropped if another reference reads the table without a plan.
        """
        views_by_scan: dict[PlannedScan, PlanView] = {}
        scans_by_view: dict[PlannedScan, list[PlannedScan]] = {}
        for depth in reversed(range(DEPTH_MAX)):  # Plan views of inner views must exist before those of outer views.
            level = [expanded_view for expanded_view in expanded_views if len(expanded_view.planned.within) == depth]
            scans_by_view |= {
                expanded_view.planned: [
                    scan
                    for scan in (*expanded_view.tables, *expanded_view.views)
                    if scan in plans or scan in views_by_scan
                ]
                for expanded_view in level
            }
            created_views = await requests.request_all(
                {
                    expanded_view.planned: self._create_plan_view(expanded_view, plans, views_by_scan, reader)
                    for expanded_view in level
                    if scans_by_view[expanded_view.planned]
                }
            )
            views_by_scan |= {scan_of_view: view for scan_of_view, view in created_views.items() if view is not None}
            requests.plan_snapshots.update(
                (scan_of_view.table, view.plan_id) for scan_of_view, view in created_views.items() if view is not None
            )
            views_by_scan, plans = _drop_incomplete(scans_by_view, views_by_scan, plans, planned_scans, dimensions)
        return views_by_scan, plans

    async def _create_plan_view(
        self, expanded_view: ExpandedView, plans: Plans, views_by_scan: Mapping[PlannedScan, PlanView], reader: str
    ) -> PlanView | None:
        """Create a temporary view that reads planned files in place of the tables of a view (a plan view).

        It uses the `plans` of the view's tables, and the plan views of the views in its text. The result is None if the
        server creates no more plan views.

        Raises:
            Refused: The catalog refuses the view.
        """
        name = expanded_view.planned.table
        # The positions of scans are in a query that begins with `QUERY_PREFIX`, which the view's text follows. The
        # catalog needs positions in the view's text.
        references = [
            Reference(
                planned_scan.scan.start - len(QUERY_PREFIX),
                planned_scan.scan.end - len(QUERY_PREFIX),
                table=planned_scan.table,
                plan_snapshot_id=plans[planned_scan].plan_snapshot_id,
            )
            for planned_scan in expanded_view.tables
            if planned_scan in plans
        ]
        references += [
            Reference(
                planned_scan.scan.start - len(QUERY_PREFIX),
                planned_scan.scan.end - len(QUERY_PREFIX),
                plan=(*planned_scan.table[:-1], views_by_scan[planned_scan].name),
                alias=planned_scan.scan.alias_needed is not None,
            )
            for planned_scan in expanded_view.views
            if planned_scan in views_by_scan
        ]
        try:
            return await self._seamark.plan_view(
                name, expanded_view.view, get_predicate(expanded_view.planned), references, reader
            )
        except Refused as error:
            self._views_by_name.discard(name)
            if error.status != 404:  # 404 means that the view has changed. It is then loaded again.
                self._pause_requests(name)
            raise

    def _pause_requests(self, name: Name) -> None:
        """Stop requests for a view for `_REFUSED_VIEW_RETRY_S` seconds, because the catalog has refused a request."""
        # The last argument is an estimate of the memory of the entry in bytes.
        self._paused_until_s.put(name, time.monotonic() + _REFUSED_VIEW_RETRY_S, 2 * len(str(name)))

    def _is_paused(self, name: Name) -> bool:
        until_s = self._paused_until_s.get(name)
        return until_s is not None and time.monotonic() < until_s


def _drop_incomplete(
    scans_by_view: Mapping[PlannedScan, Sequence[PlannedScan]],
    views_by_scan: dict[PlannedScan, PlanView],
    plans: Plans,
    planned_scans: Sequence[PlannedScan],
    dimensions: Mapping[PlannedScan, tuple[Dimension, ...]],
) -> tuple[dict[PlannedScan, PlanView], Plans]:
    """Remove plan views until each remaining view has all the plans and plan views that it uses.

    The plans and plan views that a removed view uses are also removed.
    """
    while True:
        complete_views = {
            view: name
            for view, name in views_by_scan.items()
            if all(scan in plans or scan in views_by_scan for scan in scans_by_view[view])
        }
        unusable = {
            scan
            for view, scans in scans_by_view.items()
            if view not in complete_views
            for scan in scans
            if scan in plans or scan in complete_views
        }
        if not unusable and len(complete_views) == len(views_by_scan):
            return views_by_scan, plans
        views_by_scan = {view: name for view, name in complete_views.items() if view not in unusable}
        plans = remove_plans_of_scans([scan for scan in unusable if scan in plans], plans, planned_scans, dimensions)


def _select_tables(resolved_view: ResolvedView, tables: Mapping[Name, KnownTable]) -> dict[Names, KnownTable]:
    """Return the known tables, by the names under which the view's text refers to them."""
    return {names: tables[name] for names, (_, name) in resolved_view.named.items() if name in tables}


def _describe_view(view: View) -> StatementText:
    return StatementText(view.text, columns=tuple(view.columns))
