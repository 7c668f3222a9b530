"""A state machine that runs a pointer store and its model side by side, and compares them after each step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.store import operations
from seamark.metaserver.store.model import DroppedEntry, Entry, EntryKind, InstantState, Namespace
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.model import Model
from tests.store.samples import make_instant

# There are few values, so that steps collide. Code points, UTF-16 units and dictionaries order them differently.
_levels = st.sampled_from(["a", "B", "ﬀ", "\U0001f600", "a.b"])
_paths = st.lists(_levels, min_size=1, max_size=3).map(tuple)
_names = st.sampled_from(["t", "T", "ä", "t 1", "\U0001f600"])
_ENTRY_KINDS = tuple(kind for kind in EntryKind if kind is not EntryKind.NAMESPACE)
"""The kinds of entries. A namespace is not an entry."""
_kinds = st.sampled_from(_ENTRY_KINDS)
_properties = st.dictionaries(st.sampled_from(["k", "ä"]), st.text(max_size=3), max_size=2)
_states = st.sampled_from(InstantState)


class StoreMachine(RuleBasedStateMachine):
    """A state machine for a pointer store.

    A subclass defines `create_url`, which returns a new, empty database for each run.
    """

    def create_url(self) -> str:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimulatedClock(seed=0)
        self.model = Model(self.clock.now_ms())
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.name_count = 0
        self.store: GeneratorStore

    def run(self, awaitable: Any) -> Any:
        async def main() -> Any:
            return await awaitable

        return self.runner.run(main())

    @initialize()
    def open(self) -> None:
        opened_store = self.run(self.stack.enter_async_context(open_store(self.create_url(), clock=self.clock)))
        assert isinstance(opened_store, GeneratorStore)
        self.store = opened_store

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()

    def create_name(self, prefix: str) -> str:
        self.name_count += 1
        return f"{prefix}{self.name_count:05}"

    def transact(self, *operations: Any) -> None:
        expected = self.model.apply(operations)
        try:
            self.run(self.store.transact(operations))
            actual = None
        except SeamarkError as error:
            actual = error.kind
        assert actual == expected, f"{operations}: the store returns {actual}, but the model {expected}"

    def _draw_entry(self, data: st.DataObject) -> Entry:
        return data.draw(st.sampled_from([*self.model.relations.values(), *self.model.functions.values()]))

    def _build_entry(self, kind: EntryKind, path: tuple[str, ...], name: str) -> Entry:
        table_id = self.create_name("")
        return Entry(kind, path, name, f"uuid{table_id}", f"file:///{table_id}", created_ms=self.clock.now_ms())

    @rule(path=_paths, properties=_properties)
    def create_namespace(self, path: tuple[str, ...], properties: dict[str, str]) -> None:
        self.transact(operations.CreateNamespace(path, properties))

    @rule(path=_paths, version=st.integers(1, 3), properties=_properties)
    def replace_properties(self, path: tuple[str, ...], version: int, properties: dict[str, str]) -> None:
        self.transact(operations.ReplaceNamespaceProperties(path, version, properties))

    @rule(path=_paths)
    def drop_namespace(self, path: tuple[str, ...]) -> None:
        self.transact(operations.DropNamespace(path))

    @rule(kind=_kinds, path=_paths, name=_names)
    def create_anywhere(self, kind: EntryKind, path: tuple[str, ...], name: str) -> None:
        self.transact(operations.CreateEntry(self._build_entry(kind, path, name)))

    @precondition(lambda self: self.model.namespaces)
    @rule(data=st.data(), kind=_kinds, name=_names)
    def create_entry(self, data: st.DataObject, kind: EntryKind, name: str) -> None:
        path = data.draw(st.sampled_from(list(self.model.namespaces)))
        self.transact(operations.CreateEntry(self._build_entry(kind, path, name)))

    @precondition(lambda self: self.model.relations or self.model.functions)
    @rule(data=st.data(), right_location=st.booleans(), right_uuid=st.booleans(), other_kind=st.booleans())
    def swap_pointer(self, data: st.DataObject, right_location: bool, right_uuid: bool, other_kind: bool) -> None:
        entry = self._draw_entry(data)
        swap = operations.SwapPointer(
            data.draw(_kinds) if other_kind else entry.kind,
            entry.namespace,
            entry.name,
            entry.uuid if right_uuid else "wrong",
            entry.metadata_location if right_location else "wrong",
            self.create_name("file:///"),
            self.clock.now_ms(),
        )
        self.transact(swap, operations.RecordInstant(make_instant(self.create_name("i"))))

    @precondition(lambda self: self.model.relations or self.model.functions)
    @rule(data=st.data(), path=_paths, name=_names, same_namespace=st.booleans())
    def rename(self, data: st.DataObject, path: tuple[str, ...], name: str, same_namespace: bool) -> None:
        entry = self._draw_entry(data)
        destination = entry.namespace if same_namespace else path
        self.transact(operations.RenameEntry(entry.kind, entry.namespace, entry.name, destination, name))

    @precondition(lambda self: self.model.relations or self.model.functions)
    @rule(
        data=st.data(),
        kept_ms=st.sampled_from([None, 0, 10, 1000]),
        expectation=st.sampled_from(["none", "right", "wrong"]),
    )
    def drop(self, data: st.DataObject, kept_ms: int | None, expectation: str) -> None:
        """Drop an entry. The request may name the right or a wrong metadata location that it expects.

        With `kept_ms`, the store keeps a record of the dropped entry for this time.
        """
        entry = self._draw_entry(data)
        keep = None
        if kept_ms is not None:
            now = self.clock.now_ms()
            keep = DroppedEntry(self.create_name("d"), entry, data.draw(st.booleans()), now, now + kept_ms, "ann")
        location = {"none": None, "right": entry.metadata_location, "wrong": "elsewhere"}[expectation]
        self.transact(operations.DropEntry(entry.kind, entry.namespace, entry.name, location, keep))

    @precondition(lambda self: self.model.dropped)
    @rule(data=st.data(), path=_paths, name=_names, in_place=st.booleans())
    def restore(self, data: st.DataObject, path: tuple[str, ...], name: str, in_place: bool) -> None:
        dropped_entry = data.draw(st.sampled_from(list(self.model.dropped.values())))
        target = (dropped_entry.entry.namespace, dropped_entry.entry.name) if in_place else (path, name)
        self.transact(operations.RestoreEntry(dropped_entry.id, *target))

    @rule(number=st.integers(1, 30))
    def forget(self, number: int) -> None:
        self.transact(operations.ForgetDropped(f"d{number:05}"))

    @rule(path=_paths, number=st.integers(1, 30))
    def create_and_forget(self, path: tuple[str, ...], number: int) -> None:
        self.transact(operations.CreateNamespace(path, {}), operations.ForgetDropped(f"d{number:05}"))

    @precondition(lambda self: self.model.relations or self.model.functions)
    @rule(data=st.data(), producer=st.sampled_from(["p", "P"]), sequence=st.integers(0, 4), swapped=st.booleans())
    def advance(self, data: st.DataObject, producer: str, sequence: int, swapped: bool) -> None:
        entry = self._draw_entry(data)
        now = self.clock.now_ms()
        changes: list[Any] = [operations.AdvanceProducer(entry.uuid, producer, sequence, self.name_count, now)]
        if swapped:
            pointer_fields = (entry.kind, entry.namespace, entry.name, entry.uuid, entry.metadata_location)
            changes.insert(0, operations.SwapPointer(*pointer_fields, self.create_name("file:///"), now))
        self.transact(*changes)

    @precondition(lambda self: self.model.dropped)
    @rule(data=st.data())
    def advance_dropped(self, data: st.DataObject) -> None:
        dropped_entry = data.draw(st.sampled_from(list(self.model.dropped.values())))
        self.transact(operations.AdvanceProducer(dropped_entry.entry.uuid, "p", 9, None, self.clock.now_ms()))

    @rule(state=_states)
    def record(self, state: InstantState) -> None:
        self.transact(operations.RecordInstant(make_instant(self.create_name("i"), state=state)))

    @precondition(lambda self: self.model.instants)
    @rule(data=st.data(), state=_states, other_state=_states, is_state_right=st.booleans())
    def move(self, data: st.DataObject, state: InstantState, other_state: InstantState, is_state_right: bool) -> None:
        """Move an instant to `state`. The request names its current state or, perhaps wrongly, `other_state`."""
        instant_id = data.draw(st.sampled_from(list(self.model.instants)))
        current_state = self.model.instants[instant_id]
        # The store does not check that an instant is unfinished, so this rule moves only unfinished instants.
        if current_state in (InstantState.REQUESTED, InstantState.INFLIGHT):
            self.transact(
                operations.MoveInstant(
                    instant_id, current_state if is_state_right else other_state, state, self.clock.now_ms()
                )
            )

    @rule(keep=st.integers(0, 5), limit=st.integers(1, 5))
    def archive(self, keep: int, limit: int) -> None:
        self.run(self.store.archive_instants(keep, limit))

    @rule(ms=st.sampled_from([1, 10, 1000]))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms)
        self.model.now_ms = self.clock.now_ms()

    @invariant()
    def check_equal_to_model(self) -> None:
        self.run(self._compare())

    async def _compare(self) -> None:
        """Compare all that the store can list with the model, by pages and by single reads."""
        store, model = self.store, self.model
        await store.check_invariants()
        for parent in [(), *model.namespaces]:
            children = [path for path in model.namespaces if path[:-1] == parent]
            pages = await _read_pages(
                lambda cursor, namespace=parent: store.list_namespaces(namespace, cursor, 2), lambda path: path[-1]
            )
            assert pages == sorted(children)
            for path in pages:
                assert await store.load_namespace(path) == Namespace(path, *model.namespaces[path])
        for path in model.namespaces:
            for kind in _ENTRY_KINDS:
                entries_by_name = model.functions if kind is EntryKind.FUNCTION else model.relations
                entries = [
                    entry
                    for (namespace, _), entry in sorted(entries_by_name.items())
                    if namespace == path and entry.kind is kind
                ]
                pages = await _read_pages(
                    lambda cursor, namespace=path, kind=kind: store.list_entries(kind, namespace, cursor, 2),
                    lambda entry: entry.name,
                )
                assert pages == entries
        all_entries = [*model.relations.values(), *model.functions.values()]
        assert [await store.load_entry(entry.kind, entry.namespace, entry.name) for entry in all_entries] == all_entries
        dropped_entries = sorted(model.dropped.values(), key=lambda value: value.id)
        assert await store.list_dropped(None, None, 99) == dropped_entries
        expired_entries = sorted(
            (entry for entry in dropped_entries if entry.expires_ms <= model.now_ms),
            key=lambda entry: (entry.expires_ms, entry.id),
        )
        assert await store.list_expired(model.now_ms, 99) == expired_entries
        uuids = {entry.uuid for entry in all_entries} | {item.entry.uuid for item in dropped_entries}
        for key in {(uuid, producer) for uuid in uuids for producer in ("p", "P")} | model.producers.keys():
            assert await store.load_producer(*key) == model.producers.get(key)
        timeline = await _read_pages(
            lambda cursor: store.list_instants(InstantFilter(since=cursor), 3), lambda instant: instant.position
        )
        assert [(instant.id, instant.state) for instant in timeline] == list(model.instants.items())


async def _read_pages(read_page: Any, make_cursor: Any) -> Sequence[Any]:
    results: list[Any] = []
    while next_page := await read_page(make_cursor(results[-1]) if results else None):
        assert not results or make_cursor(next_page[0]) > make_cursor(results[-1]), (
            "a page does not continue after the previous page"
        )
        results += next_page
    return results
