"""Moves tables and views from one catalog to another, by registering their metadata files under the same names.

No file is copied or changed. Each step can be repeated, so an interrupted move continues if it is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, Protocol

from seamark.connector.moving.source import CatalogRefusal, EntryMissing, Levels, Source

Kind = Literal["namespace", "table", "view"]
Outcome = Literal["moved", "unchanged", "gone", "refused"]
_PENDING_PER_WORKER = 4


class Answer(NamedTuple):
    """The outcome of moving one namespace, table or view.

    Attributes:
        outcome: `moved`: the destination has created it. `unchanged`: the destination already had it. `gone`: it no
            longer exists in the catalog from which it moves. `refused`: it stays where it is.
        reason: The reason why it is gone or was refused, or what was not moved with it.
    """

    outcome: Outcome
    reason: str = ""


class Result(NamedTuple):
    """The outcome for one namespace, table or view. The name is that at the destination."""

    kind: Kind
    name: Levels
    outcome: Outcome
    reason: str = ""


class MoveDestination(Protocol):
    """A catalog to which tables move. Several threads call the methods at the same time."""

    def create_namespace(self, namespace: Levels, properties: dict[str, str]) -> Answer:
        """Create a namespace, unless it exists. The properties of an existing namespace do not change."""

    def register_table(self, name: Levels, metadata_location: str) -> Answer:
        """Register the metadata file of a table under a name, unless the name already refers to this file."""

    def register_view(self, name: Levels, metadata_location: str) -> Answer:
        """Register the metadata file of a view, as `register_table` does."""


@dataclass(frozen=True)
class MoveSelection:
    """The namespaces, tables and views to move. If none are selected, everything is moved.

    Attributes:
        namespaces: The selected namespaces. The namespaces below them are also selected.
        entries: The names of the selected tables and views.
    """

    namespaces: Collection[Levels] = ()
    entries: Collection[Levels] = ()

    def includes(self, namespace: Levels, name: str) -> bool:
        return self.includes_all(namespace) or (*namespace, name) in self.entries

    def includes_all(self, namespace: Levels) -> bool:
        """Return whether all tables and views of the namespace are selected."""
        if not self.namespaces and not self.entries:
            return True
        return any(namespace[: len(selected_namespace)] == selected_namespace for selected_namespace in self.namespaces)

    def needs(self, namespace: Levels) -> bool:
        """Return whether the namespace or anything in it is selected."""
        return self.includes_all(namespace) or any(
            selected_name[: len(namespace)] == namespace
            for selected_name in (*self.namespaces, *(entry[:-1] for entry in self.entries))
        )

    def find_missing(self, names: Collection[Levels]) -> list[tuple[Kind, Levels]]:
        """Return the selected names that are not among `names`."""
        selected_names: list[tuple[Kind, Levels]] = [("namespace", name) for name in sorted(set(self.namespaces))]
        selected_names += [("table", name) for name in sorted(set(self.entries))]
        return [(kind, name) for kind, name in selected_names if name not in names]


@dataclass
class Move:
    """An import from another catalog, or an export to one.

    Attributes:
        source: The catalog from which tables move.
        destination: The catalog to which they move.
        selection: The namespaces, tables and views to move.
        into: The namespace of the destination in which the namespaces of the source are created. If it is empty, they
        keep their names.
        workers: The maximum number of tables that move at the same time.
    """

    source: Source
    destination: MoveDestination
    selection: MoveSelection = field(default_factory=MoveSelection)
    into: Levels = ()
    workers: int = 8
    _seen_namespaces: set[Levels] = field(default_factory=set, init=False)
    """The selected names that the source has."""

    def run(self) -> Generator[Result]:
        """Move everything that is selected, and yield each result when it is known.

        Raises:
            CatalogRefusal: The namespaces of the source cannot be listed.
            CatalogUnavailable: A catalog does not answer. If the move is repeated, it continues.
        """
        for length in range(1, len(self.into) + 1):
            name = self.into[:length]
            yield Result("namespace", name, *self.destination.create_namespace(name, {}))
        with ThreadPoolExecutor(self.workers, thread_name_prefix="move") as pool:
            pending: set[Future[Result]] = set()
            try:
                for step in self._list_steps():
                    if isinstance(step, Result):
                        yield step
                        continue
                    pending.add(pool.submit(step))
                    if len(pending) >= self.workers * _PENDING_PER_WORKER:
                        finished_futures, pending = wait(pending, return_when=FIRST_COMPLETED)
                        yield from (future.result() for future in finished_futures)
                while pending:
                    finished_futures, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in finished_futures)
            finally:
                for future in pending:
                    future.cancel()
        for kind, name in self.selection.find_missing(self._seen_namespaces):
            yield Result(kind, name, "gone", "The catalog does not have it")

    def _list_steps(self) -> Iterator[Result | Callable[[], Result]]:
        """Move the namespaces and yield their results. Also yield a function for each table and view that moves it."""
        for namespace in self.source.list_namespaces():
            self._seen_namespaces.add(namespace)
            if not self.selection.needs(namespace):
                continue
            target = (*self.into, *namespace)
            if namespace:
                result = self._move_namespace(namespace, target)
                yield Result("namespace", target, *result)
                if result.outcome in ("refused", "gone"):
                    continue
            try:
                tables, views = self.source.list_tables(namespace), self.source.list_views(namespace)
            except CatalogRefusal as error:
                yield Result("namespace", target, *_fail(error))
                continue
            kinds: Sequence[tuple[Kind, list[str]]] = (("table", tables), ("view", views))
            for kind, name in chain.from_iterable(((kind, name) for name in names) for kind, names in kinds):
                if self.selection.includes(namespace, name):
                    self._seen_namespaces.add((*namespace, name))
                    yield partial(self._move_entry, kind, namespace, name)

    def _move_namespace(self, namespace: Levels, target: Levels) -> Answer:
        try:
            properties = self.source.load_properties(namespace)
        except CatalogRefusal as error:
            return _fail(error)
        return self.destination.create_namespace(target, properties)

    def _move_entry(self, kind: Kind, namespace: Levels, name: str) -> Result:
        target = (*self.into, *namespace, name)
        if len(target) == 1:
            return Result(kind, target, "refused", "It has no namespace; choose one with --into")
        find = self.source.find_table if kind == "table" else self.source.find_view
        register = self.destination.register_table if kind == "table" else self.destination.register_view
        try:
            return Result(kind, target, *register(target, find(namespace, name)))
        except CatalogRefusal as error:
            return Result(kind, target, *_fail(error))


def _fail(error: CatalogRefusal) -> Answer:
    return Answer("gone" if isinstance(error, EntryMissing) else "refused", str(error))
