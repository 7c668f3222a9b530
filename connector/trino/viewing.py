"""Views of a statement, looked into: the scans of the tables behind them, and plan views over the plans of these.

What a statement asks of a view's rows is asked of `SELECT * FROM (its text) WHERE …`, read as any statement is. The
catalog makes a view of that text with plan tables in it, and Trino runs it as it runs the view: by its owner's rights,
with its declared columns.

The rules kept. Only of columns that are some table's as it has stored them, and of the very type that the view
declares, anything is asked: the others are converted, and compared as what they became. A view is known by the metadata
file that it was read from, and the catalog refuses a plan view of another one: so views may be remembered. A view
within a view is left as it is, and so is one that the catalog refuses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from cache.memory import MemoryCache
from connector.errors import Refused
from connector.plans import joining
from connector.plans.asking import Asking, Plans, without
from connector.plans.joining import Partner, Place
from connector.plans.quoting import quoted_name
from connector.plans.seamark import NESTED, Known, Name, Reference, Seamark, View
from connector.trino.queries import Names
from connector.trino.reading import Reader, Text
from connector.trino.scopes import COMPUTED

_CACHE_BYTES = 8 << 20
_BYTES_PER_COLUMN = 200
_LEFT_ALONE_S = 60.0
"""For how long what is no view of ours, or was refused, is not asked about again."""
_BEFORE, _BEHIND = "SELECT * FROM (\n", "\n) AS "


@dataclass(frozen=True, slots=True)
class Looked:
    """A place of the statement where a view stands, and what is behind it. `places` are in `text`."""

    place: Place
    view: View
    places: tuple[Place, ...]
    partners: Mapping[Place, tuple[Partner, ...]]


def over_text(text: str, name: str, predicate: str) -> tuple[str, int]:
    """The statement that a plan view of that name is, and where the view's text begins in it."""
    return f"{_BEFORE}{text}{_BEHIND}{quoted_name(name)} WHERE {predicate}", len(_BEFORE)


def predicate_of(place: Place) -> str:
    """Of the rows of a view that a statement wants. All of them may be made of some rows of its tables."""
    return place.scan.predicate or "TRUE"


class Views:
    """What is known of views. Belongs to one event loop."""

    def __init__(self, seamark: Seamark, reader: Reader) -> None:
        self._seamark = seamark
        self._reader = reader
        self._known: MemoryCache[Name, View] = MemoryCache(_CACHE_BYTES)
        self._left_alone: MemoryCache[Name, float] = MemoryCache(_CACHE_BYTES)

    def get(self, name: Name) -> View | None:
        return None if self._is_left_alone(name) else self._known.get(name)

    async def learn(self, names: Collection[Name], asking: Asking) -> bool:
        """Whether there is a view that was not known among what has turned out to be no table."""
        unknown = [name for name in names if self._known.get(name) is None and not self._is_left_alone(name)]
        found = await asking.all({name: self._seamark.view(name) for name in unknown})
        for name, view in found.items():
            if view is None:
                self._leave(name)
            else:
                size = 2 * len(view.text) + _BYTES_PER_COLUMN * (1 + len(view.columns))
                self._known.put(name, view, size)
        return any(view is not None for view in found.values())

    async def behind(self, view: View, until_s: float) -> tuple[Names, ...]:
        """The tables that its text names, as it names them."""
        return (await self._reader.read(_text(view), {}, until_s)).asked

    async def columns(self, view: View, tables: Mapping[Names, Known], until_s: float) -> Known:
        """The view as if it were a table: of its columns those are `COMPUTED` that nothing may be asked of."""
        kinds = (await self._reader.read(_text(view), tables, until_s)).kinds
        stored = {
            name: kind if kind != NESTED and kinds.get(name) == kind else COMPUTED
            for name, kind in view.columns.items()
        }
        versions = sorted((str(names), known.version) for names, known in tables.items())
        return Known(f"{view.location} {versions}", stored)

    async def look(
        self,
        place: Place,
        number: int,
        view: View,
        tables: Mapping[Names, Known],
        named: Callable[[Names], tuple[str, Name] | None],
        until_s: float,
        *,
        utc: bool,
    ) -> Looked:
        """Behind the scan of this number. `named`: by what the catalog knows what the text names. TimeoutError."""
        text, _ = over_text(view.text, place.table[-1], predicate_of(place))
        reading = await self._reader.read(Text(text, utc=utc), tables, until_s)
        places = {}
        for behind, scan in enumerate(reading.scans):
            names = scan.catalog, scan.schema, scan.table
            # Where no columns are known it is no table, but a view, say.
            table = named(names) if scan.version_span is None and names in tables else None
            if table is not None:
                places[behind] = Place(scan, *table, within=number + 1)
        return Looked(place, view, tuple(places.values()), joining.partners(places, tables))

    async def plan_views(
        self,
        looked: Sequence[Looked],
        plans: Plans,
        places: Sequence[Place],
        partners: Mapping[Place, tuple[Partner, ...]],
        asking: Asking,
    ) -> tuple[dict[Place, str], Plans]:
        """Names for the views that have `plans` behind them, and the plans that are still good with these views alone:
        the tables behind the others are read as they are, and a statement reads a table at one snapshot."""
        used = {one.place: [place for place in one.places if place in plans] for one in looked}
        found = await asking.all({one.place: self._made(one, plans) for one in looked if used[one.place]})
        names = {place: name for place, name in found.items() if name is not None}
        while gone := [one for view, each in used.items() if view not in names for one in each if one in plans]:
            plans = without(gone, plans, places, partners)
            names = {view: name for view, name in names.items() if all(one in plans for one in used[view])}
        return names, plans

    async def _made(self, looked: Looked, plans: Plans) -> str | None:
        """Over those `plans` that are of its tables. Refused."""
        name = looked.place.table
        references = [
            Reference(
                place.scan.start - len(_BEFORE),
                place.scan.end - len(_BEFORE),
                (*place.table[:-1], str(plans[place].name)),
                place.scan.alias_needed is not None,
            )
            for place in looked.places
            if place in plans
        ]
        try:
            return await self._seamark.plan_view(name, looked.view, predicate_of(looked.place), references)
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


def _text(view: View) -> Text:
    return Text(view.text, columns=tuple(view.columns))
