"""Views of a statement, looked into: the scans of the tables behind them, and plan views over the plans of these.

What a statement asks of a view's rows is asked of `SELECT * FROM (its text) WHERE …`, read as any statement is. The
catalog makes a view of that text with plan tables in it, and Trino runs it as it runs the view: by its owner's rights,
with its declared columns. What that text asks of the views in it is asked of what is behind these in the same way, and
their plan views stand in the plan view of the outer one.

The rules kept. Only of columns that are some table's as it has stored them, and of the very type that the view
declares, anything is asked: the others are converted, and compared as what they became. What is a view is remembered;
that it is the same one still is asked for each statement, as its columns say what the names in other texts mean. A
plan view is of one metadata file of its view, and of those of the views in it. What the catalog refuses is left as it
is.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from seamark.cache.memory import MemoryCache
from seamark.connector.client.errors import Refused
from seamark.connector.plans import joins as joining
from seamark.connector.plans.async_client import NESTED, KnownTable, Name, PlanView, Reference, Seamark, View
from seamark.connector.plans.joins import Partner, PlannedScan
from seamark.connector.plans.plan_requests import Asking, Plans, without
from seamark.connector.plans.quotes import quoted_name
from seamark.connector.trino.statements.queries import Names
from seamark.connector.trino.statements.scopes import COMPUTED
from seamark.connector.trino.statements.statement_cache import StatementReader, StatementText

DEPTH_MAX = 8
"""Views within views. Trino makes none that reads itself; others who write to the catalog may."""
VIEWS_MAX = 32
"""Of one statement."""
BEFORE = "SELECT * FROM (\n"
"""What stands before a view's text in the text of its plan view."""
_CACHE_BYTES = 8 << 20
_BYTES_PER_COLUMN = 200
_LEFT_ALONE_S = 60.0
"""For how long what is no view of ours, or was refused, is not asked about again."""
Named: TypeAlias = Callable[[Names, View], tuple[str, Name] | None]
"""Catalog and table that a name in a view's text stands for; None for what is none of the catalogs'."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A view, and what the names in its text stand for."""

    view: View
    named: Mapping[Names, tuple[str, Name]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one statement's names and those behind them are: `known` of tables, and of views as if they were tables."""

    views: Mapping[Name, Opened]
    known: Mapping[Name, KnownTable]


@dataclass(frozen=True, slots=True)
class Looked:
    """A place where a view stands, and what is behind it: the places of `tables` and `views` are in its text."""

    place: PlannedScan
    view: View
    tables: tuple[PlannedScan, ...]
    views: tuple[PlannedScan, ...]
    partners: Mapping[PlannedScan, tuple[Partner, ...]]


def over_text(text: str, name: str, predicate: str) -> str:
    """The statement that a plan view of that name is."""
    return f"{BEFORE}{text}\n) AS {quoted_name(name)} WHERE {predicate}"


def predicate_of(place: PlannedScan) -> str:
    """Of the rows of a view that a statement wants. All of them may be made of some rows of its tables."""
    return place.scan.predicate or "TRUE"


class Views:
    """What is known of views. Belongs to one event loop."""

    def __init__(self, seamark: Seamark, reader: StatementReader, named: Named) -> None:
        self._seamark = seamark
        self._reader = reader
        self._named = named
        self._known: MemoryCache[Name, View] = MemoryCache(_CACHE_BYTES)
        self._left_alone: MemoryCache[Name, float] = MemoryCache(_CACHE_BYTES)

    # What is a view

    async def learn(self, names: Collection[Name], asking: Asking, until_s: float) -> bool:
        """Whether there is a view that was not known among what has turned out to be no table, or behind one.
        TimeoutError."""
        learned = 0
        for _ in range(DEPTH_MAX):
            unknown = [name for name in names if self._known.get(name) is None and not self._is_left_alone(name)]
            found = await asking.all({name: self._seamark.view(name) for name in unknown[: VIEWS_MAX - learned]})
            views = {name: view for name, view in found.items() if view is not None}
            for name in found.keys() - views.keys():
                self._leave(name)
            for name, view in views.items():
                size = 2 * len(view.text) + _BYTES_PER_COLUMN * (1 + len(view.columns))
                self._known.put(name, view, size)
            learned += len(views)
            behind = {name for view in views.values() for _, name in (await self._open(view, until_s)).named.values()}
            tables = await asking.all({name: self._seamark.columns(name) for name in behind})
            names = [name for name, table in tables.items() if table is None]
            if not names:
                break
        return learned > 0

    async def behind(self, names: Iterable[Name], until_s: float) -> dict[Name, Opened]:
        """The views among `names` and in their texts, as they are remembered: each after those in its own text.
        TimeoutError."""
        found: dict[Name, Opened] = {}
        for name in names:
            await self._open_behind(name, (), found, until_s)
        return found

    async def _open_behind(
        self, name: Name, above: tuple[Name, ...], found: dict[Name, Opened], until_s: float
    ) -> None:
        view = None if self._is_left_alone(name) else self._known.get(name)
        if view is None or name in found or name in above or len(above) >= DEPTH_MAX or len(found) >= VIEWS_MAX:
            return
        opened = await self._open(view, until_s)
        for _, one in opened.named.values():
            await self._open_behind(one, (*above, name), found, until_s)
        found[name] = opened

    async def see(self, names: Iterable[Name], views: Mapping[Name, Opened], asking: Asking, until_s: float) -> Seen:
        """What `names` and those in the texts of `views` are by now. A view that has become another one is `missing`,
        as is what is no table. TimeoutError."""
        tables = {*names, *(name for one in views.values() for _, name in one.named.values())} - views.keys()
        questions: dict[Name, Coroutine[Any, Any, KnownTable | View | None]] = {
            **{name: self._seamark.columns(name) for name in tables},
            **{name: self._seamark.view(name) for name in views},
        }
        found = await asking.all(questions)
        known = {name: one for name, one in found.items() if isinstance(one, KnownTable)}
        same = {name: one for name, one in views.items() if found.get(name) == one.view}
        for name, one in same.items():
            known[name] = await self._columns(one, known, until_s)
        asking.missing.update(name for name in found if name not in known)
        for name in views.keys() & found.keys() - same.keys():
            self._known.discard(name)
        return Seen(same, known)

    async def _open(self, view: View, until_s: float) -> Opened:
        asked = (await self._reader.read(_text(view), {}, until_s)).asked
        return Opened(view, {names: one for names in asked if (one := self._named(names, view)) is not None})

    async def _columns(self, opened: Opened, known: Mapping[Name, KnownTable], until_s: float) -> KnownTable:
        """Of its columns those are `COMPUTED` that nothing may be asked of."""
        view, tables = opened.view, _told(opened, known)
        kinds = (await self._reader.read(_text(view), tables, until_s)).kinds
        stored = {
            name: kind if kind != NESTED and kinds.get(name) == kind else COMPUTED
            for name, kind in view.columns.items()
        }
        versions = sorted((str(names), one.version) for names, one in tables.items())
        # Of one length, however many views are within one another.
        return KnownTable(hashlib.sha256(f"{view.location} {versions}".encode()).hexdigest(), stored)

    # What is behind one

    async def look(self, views: Mapping[int, PlannedScan], seen: Seen, until_s: float, *, utc: bool) -> list[Looked]:
        """Behind these scans of a statement, and behind the views there, the outermost first. TimeoutError."""
        looked: list[Looked] = []
        left = deque(views.items())
        while left and len(looked) < VIEWS_MAX:
            number, place = left.popleft()
            opened, within = seen.views[place.table], (*place.within, number)
            known = _told(opened, seen.known)
            text = over_text(opened.view.text, place.table[-1], predicate_of(place))
            reading = await self._reader.read(StatementText(text, utc=utc), known, until_s)
            places = {}
            for behind, scan in enumerate(reading.scans):
                names = scan.catalog, scan.schema, scan.table
                if scan.version_span is None and names in known:
                    places[behind] = PlannedScan(scan, *opened.named[names], within=within)
            tables = {behind: one for behind, one in places.items() if one.table not in seen.views}
            inner = {behind: one for behind, one in places.items() if one.table in seen.views}
            partners = joining.partners(tables, known)
            looked.append(Looked(place, opened.view, tuple(tables.values()), tuple(inner.values()), partners))
            left.extend(inner.items() if len(within) < DEPTH_MAX else ())
        return looked

    # Plan views

    async def plan_views(
        self,
        looked: Sequence[Looked],
        plans: Plans,
        places: Sequence[PlannedScan],
        partners: Mapping[PlannedScan, tuple[Partner, ...]],
        asking: Asking,
        reader: str,
    ) -> tuple[dict[PlannedScan, PlanView], Plans]:
        """Plan views for `reader`, of the views that have `plans` behind them, and the plans that are still good with
        these views alone: the tables behind the others are read as they are, and a statement reads a table at one
        snapshot."""
        names: dict[PlannedScan, PlanView] = {}
        used: dict[PlannedScan, list[PlannedScan]] = {}
        for depth in reversed(range(DEPTH_MAX)):  # those in a view's text have their names before it
            level = [one for one in looked if len(one.place.within) == depth]
            used |= {one.place: [at for at in (*one.tables, *one.views) if at in plans or at in names] for one in level}
            made = await asking.all(
                {one.place: self._made(one, plans, names, reader) for one in level if used[one.place]}
            )
            names |= {place: view for place, view in made.items() if view is not None}
            asking.made.update((place.table, view.plan_id) for place, view in made.items() if view is not None)
            names, plans = _settled(used, names, plans, places, partners)
        return names, plans

    async def _made(
        self, looked: Looked, plans: Plans, names: Mapping[PlannedScan, PlanView], reader: str
    ) -> PlanView | None:
        """Over those `plans` that are of its tables, and the plan views that are of its views. Refused."""
        name = looked.place.table
        references = [
            Reference(
                place.scan.start - len(BEFORE),
                place.scan.end - len(BEFORE),
                table=place.table,
                plan_snapshot_id=plans[place].plan_snapshot_id,
            )
            for place in looked.tables
            if place in plans
        ]
        references += [
            Reference(
                place.scan.start - len(BEFORE),
                place.scan.end - len(BEFORE),
                plan=(*place.table[:-1], names[place].name),
                alias=place.scan.alias_needed is not None,
            )
            for place in looked.views
            if place in names
        ]
        try:
            return await self._seamark.plan_view(name, looked.view, predicate_of(looked.place), references, reader)
        except Refused as error:
            self._known.discard(name)
            if error.status != 404:  # else it has changed, and is another view now
                self._leave(name)
            raise

    def _leave(self, name: Name) -> None:
        self._left_alone.put(name, time.monotonic() + _LEFT_ALONE_S, 2 * len(str(name)))

    def _is_left_alone(self, name: Name) -> bool:
        until_s = self._left_alone.get(name)
        return until_s is not None and time.monotonic() < until_s


def _settled(
    used: Mapping[PlannedScan, Sequence[PlannedScan]],
    names: dict[PlannedScan, PlanView],
    plans: Plans,
    places: Sequence[PlannedScan],
    partners: Mapping[PlannedScan, tuple[Partner, ...]],
) -> tuple[dict[PlannedScan, PlanView], Plans]:
    """Until it holds of all: a plan view is read with all that it `used`, and what it used is read in it alone."""
    while True:
        good = {view: name for view, name in names.items() if all(at in plans or at in names for at in used[view])}
        gone = {at for view, each in used.items() if view not in good for at in each if at in plans or at in good}
        if not gone and len(good) == len(names):
            return names, plans
        names = {view: name for view, name in good.items() if view not in gone}
        plans = without([at for at in gone if at in plans], plans, places, partners)


def _told(opened: Opened, known: Mapping[Name, KnownTable]) -> dict[Names, KnownTable]:
    """Of what the view's text names, as it names it."""
    return {names: known[name] for names, (_, name) in opened.named.items() if name in known}


def _text(view: View) -> StatementText:
    return StatementText(view.text, columns=tuple(view.columns))
