"""Moves tables and views from one catalog to another, by registering their metadata files under the same names.

No file is copied or changed. Each step can be repeated, so an interrupted move continues if it is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, Protocol

from seamark.connector.moving.source import CatalogRefusal, EntryMissing, Levels, Source

Kind = Literal["namespace", "table", "view"]
Outcome = Literal["moved", "unchanged", "gone", "refused"]
_PENDING_PER_WORKER = 4
"""The maximum number of steps that wait for a thread or run, for each thread."""
_TABLES_PER_BATCH = 64
"""The maximum number of tables of a namespace that are found and registered together."""


class MoveOutcome(NamedTuple):
    """The outcome of moving one namespace, table or view.

    Attributes:
        outcome: `moved`: the destination has created it. `unchanged`: the destination already had it. `gone`: it no
            longer exists in the catalog from which it moves. `refused`: it stays where it is.
        reason: The reason why it is gone or was refused, or what was not moved with it.
    """

    outcome: Outcome
    reason: str = ""


_DROPPED = "Nothing in it is registered, so it is not kept"
"""The reason for a namespace that the move has created and dropped, or that a dry run would create and drop."""
_NO_NAMESPACE = MoveOutcome("refused", "It has no namespace; choose one with --into")


class Result(NamedTuple):
    """The outcome for one namespace, table or view. The name is that at the destination."""

    kind: Kind
    name: Levels
    outcome: Outcome
    reason: str = ""


class MoveDestination(Protocol):
    """A catalog to which tables move. Several threads call the methods at the same time."""

    def create_namespace(self, namespace: Levels, properties: dict[str, str]) -> MoveOutcome:
        """Create a namespace, unless it exists. The properties of an existing namespace do not change."""

    def drop_namespace(self, namespace: Levels) -> bool:
        """Drop an empty namespace that this import or export has created. Return whether it was dropped."""

    def register_tables(self, namespace: Levels, locations: Mapping[str, str]) -> list[MoveOutcome]:
        """Register tables, unless their names already refer to these metadata files.

        Args:
            namespace: The namespace of the tables.
            locations: The metadata files by the names of the tables. The answers have the same order.
        """

    def register_view(self, name: Levels, metadata_location: str) -> MoveOutcome:
        """Register the metadata file of a view, as `register_tables` does."""


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
        """Return whether the namespace, a namespace below it, or an entry in one of them is selected.

        The destination then needs the namespace.
        """
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
        workers: The maximum number of views, and of batches of tables, that move at the same time.
    """

    source: Source
    destination: MoveDestination
    selection: MoveSelection = field(default_factory=MoveSelection)
    into: Levels = ()
    workers: int = 8
    _seen_names: set[Levels] = field(default_factory=set, init=False)
    """The selected names that the source has."""

    def run(self) -> Generator[Result]:
        """Move everything that is selected, and yield each result when it is known.

        A namespace that the move has created is dropped at the end if entries in it were refused and none has moved.

        Raises:
            CatalogRefusal: The namespaces of the source cannot be listed.
            CatalogUnavailable: A catalog does not answer. If the move is repeated, it continues.
        """
        unfilled_results: dict[Levels, Result] = {}
        """The results of the created namespaces without a moved entry in them or below them."""
        refusing_names: set[Levels] = set()
        """The namespaces with a refused entry in them or below them."""
        for result in self._move_all():
            if result.kind == "namespace" and result.outcome == "moved":
                unfilled_results[result.name] = result
                continue
            parents = [result.name[:length] for length in range(1, len(result.name))]
            if result.outcome == "refused":
                refusing_names.update(parents)
            elif result.outcome != "gone":
                yield from (unfilled_results.pop(name) for name in parents if name in unfilled_results)
            yield result
        # A namespace is created after those that contain it, so this drops the innermost namespaces first.
        for name, result in reversed(unfilled_results.items()):
            if name in refusing_names and self.destination.drop_namespace(name):
                yield result._replace(outcome="refused", reason=_DROPPED)
            else:
                refusing_names.difference_update(name[:length] for length in range(1, len(name)))
                yield result

    def _move_all(self) -> Iterator[Result]:
        """Move everything that is selected, and yield each result when it is known.

        The namespaces above the moved namespaces (`into`) are created first. Tables and views are moved by threads. The
        number of waiting functions is limited, so that a large catalog is not listed completely before the first move.
        """
        for length in range(1, len(self.into) + 1):
            name = self.into[:length]
            yield Result("namespace", name, *self.destination.create_namespace(name, {}))
        with ThreadPoolExecutor(self.workers, thread_name_prefix="move") as pool:
            pending: set[Future[list[Result]]] = set()
            try:
                for step in self._move_namespaces_and_list_steps():
                    if isinstance(step, Result):
                        yield step
                        continue
                    pending.add(pool.submit(step))
                    if len(pending) >= self.workers * _PENDING_PER_WORKER:
                        finished_futures, pending = wait(pending, return_when=FIRST_COMPLETED)
                        yield from chain.from_iterable(future.result() for future in finished_futures)
                while pending:
                    finished_futures, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from chain.from_iterable(future.result() for future in finished_futures)
            finally:
                for future in pending:
                    future.cancel()
        for kind, name in self.selection.find_missing(self._seen_names):
            yield Result(kind, name, "gone", "The catalog does not have it")

    def _move_namespaces_and_list_steps(self) -> Iterator[Result | Callable[[], list[Result]]]:
        """Move the namespaces and yield their results. Also yield functions that move tables and views.

        If a namespace is refused or no longer exists, or if its tables cannot be listed, its tables and views are left
        out.
        """
        for namespace in self.source.list_namespaces():
            self._seen_names.add(namespace)
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
                yield Result("namespace", target, *_make_failed_outcome(error))
                continue
            tables, views = self._select(namespace, tables), self._select(namespace, views)
            for start in range(0, len(tables), _TABLES_PER_BATCH):
                yield partial(self._move_tables, namespace, tables[start : start + _TABLES_PER_BATCH])
            for name in views:
                yield partial(self._move_view, namespace, name)

    def _select(self, namespace: Levels, names: list[str]) -> list[str]:
        """Return the names that are selected, and record that the source has them.

        Selected names that the source does not have are reported at the end of the move.
        """
        selected = [name for name in dict.fromkeys(names) if self.selection.includes(namespace, name)]
        self._seen_names.update((*namespace, name) for name in selected)
        return selected

    def _move_namespace(self, namespace: Levels, target: Levels) -> MoveOutcome:
        try:
            properties = self.source.load_properties(namespace)
        except CatalogRefusal as error:
            return _make_failed_outcome(error)
        return self.destination.create_namespace(target, properties)

    def _move_tables(self, namespace: Levels, names: list[str]) -> list[Result]:
        target = (*self.into, *namespace)
        if not target:
            return [Result("table", (name,), *_NO_NAMESPACE) for name in names]
        answers: dict[str, MoveOutcome] = {}
        locations: dict[str, str] = {}
        try:
            found_tables = self.source.find_tables(namespace, names)
        except CatalogRefusal as error:
            found_tables = dict.fromkeys(names, error)
        for name, location in found_tables.items():
            if isinstance(location, CatalogRefusal):
                answers[name] = _make_failed_outcome(location)
            else:
                locations[name] = location
        if locations:
            answers |= zip(locations, self.destination.register_tables(target, locations), strict=True)
        return [Result("table", (*target, name), *answers[name]) for name in names]

    def _move_view(self, namespace: Levels, name: str) -> list[Result]:
        target = (*self.into, *namespace, name)
        if len(target) == 1:
            return [Result("view", target, *_NO_NAMESPACE)]
        try:
            return [
                Result("view", target, *self.destination.register_view(target, self.source.find_view(namespace, name)))
            ]
        except CatalogRefusal as error:
            return [Result("view", target, *_make_failed_outcome(error))]


def _make_failed_outcome(error: CatalogRefusal) -> MoveOutcome:
    return MoveOutcome("gone" if isinstance(error, EntryMissing) else "refused", str(error))
