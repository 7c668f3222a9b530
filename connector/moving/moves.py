"""Moves tables and views from one catalog to another: registers their metadata files under the same names.

No file is copied or changed. Each step can be repeated, so a killed move continues when it is started again.
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
    """The answer of a catalog to the move of one namespace, table or view.

    Attributes:
        outcome: `moved`: it is new there. `unchanged`: it was there already. `gone`: it no longer exists in the catalog
            from which it moves. `refused`: it stays where it is.
        reason: Why it is gone or refused, or what is missing after the move.
    """

    outcome: Outcome
    reason: str = ""


class Result(NamedTuple):
    """The answer for one name of the catalog to which the names move."""

    kind: Kind
    name: Levels
    outcome: Outcome
    reason: str = ""


class MoveDestination(Protocol):
    """The catalog to which tables move. The methods are called by several threads at the same time."""

    def create_namespace(self, namespace: Levels, properties: dict[str, str]) -> Answer:
        """Create a namespace. The properties of an existing namespace do not change."""

    def register_table(self, name: Levels, metadata_location: str) -> Answer:
        """Register a metadata file under a name, unless the name refers to this file already."""

    def register_view(self, name: Levels, metadata_location: str) -> Answer:
        """Register the metadata file of a view, as `register_table` does."""


@dataclass(frozen=True)
class MoveSelection:
    """The namespaces and tables to move. Without any, everything is moved.

    Attributes:
        namespaces: These namespaces and those below them.
        entries: These tables and views.
    """

    namespaces: Collection[Levels] = ()
    entries: Collection[Levels] = ()

    def includes(self, namespace: Levels, name: str) -> bool:
        return self.includes_all(namespace) or (*namespace, name) in self.entries

    def includes_all(self, namespace: Levels) -> bool:
        """Return whether all tables and views of the namespace are selected."""
        if not self.namespaces and not self.entries:
            return True
        return any(namespace[: len(selected)] == selected for selected in self.namespaces)

    def needs(self, namespace: Levels) -> bool:
        """Return whether the namespace is selected, or contains something that is selected."""
        return self.includes_all(namespace) or any(
            selected[: len(namespace)] == namespace
            for selected in (*self.namespaces, *(entry[:-1] for entry in self.entries))
        )

    def find_missing(self, names: Collection[Levels]) -> list[tuple[Kind, Levels]]:
        """Return the selected names that are not among `names`."""
        selected: list[tuple[Kind, Levels]] = [("namespace", name) for name in sorted(set(self.namespaces))]
        selected += [("table", name) for name in sorted(set(self.entries))]
        return [(kind, name) for kind, name in selected if name not in names]


@dataclass
class Move:
    """One import or export.

    Attributes:
        source: The catalog from which tables move.
        destination: The catalog to which they move.
        selection: What to move.
        into: The namespace of the destination under which the namespaces of the source appear. Empty: they keep their
            names.
        workers: The maximum number of tables that move at the same time.
    """

    source: Source
    destination: MoveDestination
    selection: MoveSelection = field(default_factory=MoveSelection)
    into: Levels = ()
    workers: int = 8
    _seen: set[Levels] = field(default_factory=set, init=False)
    """All names of the source that are selected."""

    def run(self) -> Generator[Result]:
        """Yield the result of each namespace, table and view when it is known.

        Raises:
            CatalogRefusal: The namespaces of the source cannot be listed.
            CatalogUnavailable: The source does not answer. A repeat of the move continues.
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
                        done, pending = wait(pending, return_when=FIRST_COMPLETED)
                        yield from (future.result() for future in done)
                while pending:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            finally:
                for future in pending:
                    future.cancel()
        for kind, name in self.selection.find_missing(self._seen):
            yield Result(kind, name, "gone", "The catalog does not have it")

    def _list_steps(self) -> Iterator[Result | Callable[[], Result]]:
        """Yield the results of namespaces, and a function that moves each table and view."""
        for namespace in self.source.list_namespaces():
            self._seen.add(namespace)
            if not self.selection.needs(namespace):
                continue
            target = (*self.into, *namespace)
            if namespace:
                created = self._move_namespace(namespace, target)
                yield Result("namespace", target, *created)
                if created.outcome in ("refused", "gone"):
                    continue
            try:
                tables, views = self.source.list_tables(namespace), self.source.list_views(namespace)
            except CatalogRefusal as error:
                yield Result("namespace", target, *_fail(error))
                continue
            kinds: Sequence[tuple[Kind, list[str]]] = (("table", tables), ("view", views))
            for kind, name in chain.from_iterable(((kind, name) for name in names) for kind, names in kinds):
                if self.selection.includes(namespace, name):
                    self._seen.add((*namespace, name))
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
