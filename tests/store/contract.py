"""What every pointer store promises. Inherited by the test class of each database, which brings the `url` fixture.

`store` and `other` are two stores open on the same database, as two replicas would have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

import pytest

from metaserver.clock import SimulatedClock
from metaserver.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    NamespaceNotEmpty,
    NoSuchFunction,
    NoSuchNamespace,
    NoSuchTable,
    NoSuchView,
    NotFound,
    SeamarkError,
)
from metaserver.store.driven import DrivenStore
from metaserver.store.open import open_store
from metaserver.store.port import (
    AuditRecord,
    CreateEntry,
    CreateNamespace,
    DropEntry,
    DropNamespace,
    DroppedEntry,
    Entry,
    EntryKind,
    ForgetDropped,
    Grant,
    IdempotencyRecord,
    IdempotencyTaken,
    Instant,
    InstantFilter,
    InstantState,
    MetricsReport,
    MoveInstant,
    Namespace,
    NamespacePath,
    RecordInstant,
    RemoveGrant,
    RenameEntry,
    ReplaceNamespaceProperties,
    RestoreEntry,
    RevokeToken,
    SaveAudit,
    SaveCursor,
    SaveGrant,
    SaveIdempotency,
    SaveMetricsReport,
    SaveToken,
    SwapPointer,
    TakeLease,
    Token,
)

TABLE, VIEW, FUNCTION = EntryKind.TABLE, EntryKind.VIEW, EntryKind.FUNCTION
NS: NamespacePath = ("ns",)


def make_entry(name: str, kind: EntryKind = TABLE, namespace: NamespacePath = NS, **fields: Any) -> Entry:
    given = {"uuid": f"uuid-of-{name}", "metadata_location": f"file:///w/{name}/0.json", "created_ms": 5} | fields
    return Entry(kind=kind, namespace=namespace, name=name, **given)


def make_swap(name: str, expected: str, new: str, **fields: Any) -> SwapPointer:
    given = {"kind": TABLE, "namespace": NS, "uuid": f"uuid-of-{name}", "now_ms": 7} | fields
    return SwapPointer(name=name, expected_location=expected, new_location=new, **given)


def make_instant(instant_id: str, **fields: Any) -> Instant:
    given = {
        "action": "commit",
        "state": InstantState.COMPLETED,
        "kind": TABLE,
        "namespace": NS,
        "name": "t",
        "uuid": "uuid-of-t",
        "requested_ms": 1,
        "completed_ms": 2,
    } | fields
    return Instant(id=instant_id, **given)


def make_idempotency(key: str, expires_ms: int, **fields: Any) -> IdempotencyRecord:
    given = {"scope": "ann POST /v1/x", "request_hash": "h", "status": 200, "body": b"\x00\xffanswer"} | fields
    return IdempotencyRecord(key=key, expires_ms=expires_ms, **given)


def ids(found: Iterable[Any]) -> list[str]:
    return [one.id for one in found]


async def outcome(attempt: Awaitable[Any]) -> str:
    """ "won", or the kind of the error."""
    try:
        await attempt
    except SeamarkError as error:
        return error.kind
    return "won"


class PointerStoreContract:
    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> SimulatedClock:
        return SimulatedClock(seed=1)

    @pytest.fixture
    async def store(self, url: str, clock: SimulatedClock) -> AsyncIterator[DrivenStore]:
        async with open_store(url, clock=clock) as store:
            assert isinstance(store, DrivenStore)
            await store.transact([CreateNamespace(NS, {})])
            yield store
            await store.check_invariants()

    @pytest.fixture
    async def other(self, url: str, clock: SimulatedClock, store: DrivenStore) -> AsyncIterator[DrivenStore]:
        async with open_store(url, clock=clock) as other:
            assert isinstance(other, DrivenStore)
            yield other

    # Namespaces

    async def test_a_namespace_reads_back_with_its_properties(self, store: DrivenStore) -> None:
        properties = {"owner": "ann", "empty": "", "odd ' \" key": "värde\n\U0001f600"}
        assert await store.transact([CreateNamespace(("a",), properties)]) == [None]
        assert await store.namespace(("a",)) == Namespace(("a",), properties, 1)
        assert await store.namespace(("A",)) is None
        assert await store.namespace(()) is None

    async def test_a_second_namespace_of_one_name_is_refused(self, store: DrivenStore) -> None:
        with pytest.raises(AlreadyExists, match=r"^Namespace already exists: ns$"):
            await store.transact([CreateNamespace(NS, {"other": "1"})])
        assert (await store.namespace(NS)) == Namespace(NS, {}, 1)

    async def test_a_namespace_needs_its_parent(self, store: DrivenStore) -> None:
        with pytest.raises(NoSuchNamespace, match=r"^Namespace does not exist: no\.such$"):
            await store.transact([CreateNamespace(("no", "such", "child"), {})])

    async def test_namespaces_list_direct_children_in_code_point_order_by_pages(self, store: DrivenStore) -> None:
        leaves = ["a", "B", "ä", "ﬀ", "\U0001f600", "a.b", "a b", "a!"]
        for leaf in leaves:
            await store.transact([CreateNamespace((*NS, leaf), {"leaf": leaf})])
        await store.transact([CreateNamespace((*NS, "a", "deep"), {}), CreateNamespace(("ns2",), {})])
        seen: list[str] = []
        while page := await store.namespaces(NS, seen[-1] if seen else None, 3):
            seen += [child.path[-1] for child in page]
        assert seen == sorted(leaves)
        assert [child.path for child in await store.namespaces((), None, 10)] == [NS, ("ns2",)]
        assert [child.path for child in await store.namespaces((), "ns", 10)] == [("ns2",)]
        assert await store.namespaces(("nowhere",), None, 10) == []

    async def test_properties_are_replaced_only_at_the_expected_version(self, store: DrivenStore) -> None:
        await store.transact([ReplaceNamespaceProperties(NS, 1, {"a": "1"})])
        assert await store.namespace(NS) == Namespace(NS, {"a": "1"}, 2)
        with pytest.raises(CommitConflict):
            await store.transact([ReplaceNamespaceProperties(NS, 1, {"a": "2"})])
        with pytest.raises(NoSuchNamespace, match="Namespace does not exist: gone"):
            await store.transact([ReplaceNamespaceProperties(("gone",), 1, {})])
        assert await store.namespace(NS) == Namespace(NS, {"a": "1"}, 2)

    @pytest.mark.parametrize("content", [TABLE, VIEW, FUNCTION, None])
    async def test_a_namespace_with_anything_in_it_stays(self, store: DrivenStore, content: EntryKind | None) -> None:
        put = CreateEntry(make_entry("x", content)) if content else CreateNamespace((*NS, "child"), {})
        await store.transact([put])
        with pytest.raises(NamespaceNotEmpty, match=r"^Namespace ns is not empty"):
            await store.transact([DropNamespace(NS)])
        await store.transact([DropEntry(content, NS, "x") if content else DropNamespace((*NS, "child"))])
        await store.transact([DropNamespace(NS)])
        assert await store.namespace(NS) is None
        with pytest.raises(NoSuchNamespace):
            await store.transact([DropNamespace(NS)])

    # Entries

    async def test_an_entry_reads_back_as_it_was_written(self, store: DrivenStore) -> None:
        entry = make_entry("t", previous_location="file:///w/p", version=3, created_ms=5, updated_ms=2**53)
        await store.transact([CreateEntry(entry)])
        assert await store.entry(TABLE, NS, "t") == entry
        assert await store.entry(VIEW, NS, "t") is None
        assert await store.entry(TABLE, NS, "T") is None

    async def test_tables_and_views_share_names_and_functions_do_not(self, store: DrivenStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("v", VIEW))])
        for kind, name, message in [
            (TABLE, "t", "Table already exists: ns.t"),
            (VIEW, "v", "View already exists: ns.v"),
            (VIEW, "t", "Table with same name already exists: ns.t"),
            (TABLE, "v", "View with same name already exists: ns.v"),
        ]:
            with pytest.raises(AlreadyExists) as refused:
                await store.transact([CreateEntry(make_entry(name, kind, uuid="another"))])
            assert refused.value.message == message
        await store.transact([CreateEntry(make_entry("t", FUNCTION)), CreateEntry(make_entry("v", FUNCTION))])
        with pytest.raises(AlreadyExists, match=r"^Function already exists: ns\.t$"):
            await store.transact([CreateEntry(make_entry("t", FUNCTION))])

    async def test_an_entry_needs_its_namespace(self, store: DrivenStore) -> None:
        with pytest.raises(NoSuchNamespace, match=r"^Namespace does not exist: non-existing$"):
            await store.transact([CreateEntry(make_entry("t", namespace=("non-existing",)))])

    async def test_entries_list_one_kind_in_code_point_order_by_pages(self, store: DrivenStore) -> None:
        names = ["t", "T", "ä", "ﬀ", "\U0001f600", "t1", "t 1", "t.1"]
        for name in names:
            await store.transact([CreateEntry(make_entry(name))])
        await store.transact([CreateEntry(make_entry("view", VIEW)), CreateEntry(make_entry("f", FUNCTION))])
        seen: list[str] = []
        while page := await store.entries(TABLE, NS, seen[-1] if seen else None, 3):
            seen += [entry.name for entry in page]
        assert seen == sorted(names)
        assert [entry.name for entry in await store.entries(VIEW, NS, None, 9)] == ["view"]

    async def test_a_swap_moves_the_pointer_once(self, store: DrivenStore) -> None:
        before = make_entry("t")
        await store.transact([CreateEntry(before)])
        await store.transact([make_swap("t", before.metadata_location, "file:///1", now_ms=99)])
        after = await store.entry(TABLE, NS, "t")
        assert after == make_entry(
            "t",
            metadata_location="file:///1",
            previous_location=before.metadata_location,
            version=2,
            updated_ms=99,
        )
        with pytest.raises(CommitConflict):
            await store.transact([make_swap("t", before.metadata_location, "file:///2")])
        with pytest.raises(CommitConflict, match="created anew"):
            await store.transact([make_swap("t", "file:///1", "file:///2", uuid="of another")])
        assert await store.entry(TABLE, NS, "t") == after

    async def test_what_is_missing_is_named_by_its_kind(self, store: DrivenStore) -> None:
        for kind, error, title in [
            (TABLE, NoSuchTable, "Table"),
            (VIEW, NoSuchView, "View"),
            (FUNCTION, NoSuchFunction, "Function"),
        ]:
            for change in (
                make_swap("x", "a", "b", kind=kind),
                RenameEntry(kind, NS, "x", NS, "y"),
                DropEntry(kind, NS, "x"),
                DropEntry(kind, NS, "x", "file:///expected"),
            ):
                with pytest.raises(error) as refused:
                    await store.transact([change])
                assert refused.value.message == f"{title} does not exist: ns.x"

    async def test_a_rename_keeps_all_but_the_name(self, store: DrivenStore) -> None:
        entry = make_entry("t", version=4, previous_location="file:///p")
        await store.transact(
            [CreateEntry(entry), CreateNamespace(("b",), {}), RenameEntry(TABLE, NS, "t", ("b",), "u")]
        )
        assert await store.entry(TABLE, NS, "t") is None
        moved = make_entry("u", namespace=("b",), uuid=entry.uuid, metadata_location=entry.metadata_location)
        assert await store.entry(TABLE, ("b",), "u") == Entry(
            **{f: getattr(moved, f) for f in moved.__struct_fields__} | {"version": 4, "previous_location": "file:///p"}
        )
        await store.transact([RenameEntry(TABLE, ("b",), "u", ("b",), "u")])
        assert await store.entry(TABLE, ("b",), "u") is not None

    async def test_a_rename_that_cannot_be_changes_nothing(self, store: DrivenStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("v", VIEW))])
        await store.transact([CreateEntry(make_entry("t2"))])
        for change, message in [
            (RenameEntry(TABLE, NS, "t", NS, "t2"), "Cannot rename ns.t to ns.t2. Table already exists"),
            (RenameEntry(TABLE, NS, "t", NS, "v"), "Cannot rename ns.t to ns.v. View already exists"),
            (RenameEntry(VIEW, NS, "v", NS, "t"), "Cannot rename ns.v to ns.t. Table already exists"),
        ]:
            with pytest.raises(AlreadyExists) as taken:
                await store.transact([change])
            assert taken.value.message == message
        with pytest.raises(NoSuchNamespace, match=r"^Namespace does not exist: non_existing$"):
            await store.transact([RenameEntry(TABLE, NS, "t", ("non_existing",), "t")])
        assert [entry.name for entry in await store.entries(TABLE, NS, None, 9)] == ["t", "t2"]

    # Drop and undrop

    async def test_a_drop_without_keep_forgets(self, store: DrivenStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        with pytest.raises(CommitConflict):
            await store.transact([DropEntry(TABLE, NS, "t", "file:///elsewhere")])
        await store.transact([DropEntry(TABLE, NS, "t", make_entry("t").metadata_location)])
        assert await store.entry(TABLE, NS, "t") is None
        assert await store.dropped(None, None, 9) == []

    def _keep(self, dropped_id: str, expires_ms: int, purge: bool = False) -> DroppedEntry:
        return DroppedEntry(dropped_id, make_entry("placeholder"), purge, 11, expires_ms, "ann")

    async def test_a_dropped_entry_is_kept_as_it_was_and_comes_back(
        self, store: DrivenStore, clock: SimulatedClock
    ) -> None:
        entry = make_entry("t", version=7, previous_location="file:///p")
        until = clock.now_ms() + 1000
        await store.transact([CreateEntry(entry), DropEntry(TABLE, NS, "t", keep=self._keep("d1", until, purge=True))])
        kept = DroppedEntry("d1", entry, True, 11, until, "ann")
        assert await store.dropped_entry("d1") == kept
        assert await store.dropped(None, None, 9) == [kept]
        assert await store.dropped(NS, None, 9) == [kept]
        assert await store.dropped(("other",), None, 9) == []
        await store.transact([RestoreEntry("d1", NS, "t")])
        assert await store.entry(TABLE, NS, "t") == entry
        assert await store.dropped_entry("d1") is None
        with pytest.raises(NotFound, match="d1"):
            await store.transact([RestoreEntry("d1", NS, "t2")])

    async def test_a_restore_that_cannot_be_keeps_the_dropped_entry(
        self, store: DrivenStore, clock: SimulatedClock
    ) -> None:
        keep = self._keep("d1", clock.now_ms() + 1000)
        await store.transact([CreateEntry(make_entry("t")), DropEntry(TABLE, NS, "t", keep=keep)])
        await store.transact([CreateEntry(make_entry("t", VIEW))])
        with pytest.raises(AlreadyExists, match=r"^View with same name already exists: ns\.t$"):
            await store.transact([RestoreEntry("d1", NS, "t")])
        with pytest.raises(NoSuchNamespace):
            await store.transact([RestoreEntry("d1", ("gone",), "t")])
        await store.transact([RestoreEntry("d1", NS, "t_again")])
        restored = await store.entry(TABLE, NS, "t_again")
        assert restored is not None
        assert restored.uuid == "uuid-of-t"

    async def test_an_expired_dropped_entry_is_only_there_to_be_purged(
        self, store: DrivenStore, clock: SimulatedClock
    ) -> None:
        for number, after_ms in enumerate((300, 100, 200)):
            name = f"t{number}"
            keep = self._keep(f"d{number}", clock.now_ms() + after_ms)
            await store.transact([CreateEntry(make_entry(name)), DropEntry(TABLE, NS, name, keep=keep)])
        assert await store.dropped_expired(clock.now_ms(), 9) == []
        clock.advance(200)
        assert ids(await store.dropped_expired(clock.now_ms(), 9)) == ["d1", "d2"]
        assert ids(await store.dropped_expired(clock.now_ms(), 1)) == ["d1"]
        assert ids(await store.dropped(None, "d0", 9)) == ["d1", "d2"]
        with pytest.raises(NotFound):
            await store.transact([RestoreEntry("d2", NS, "t2")])
        await store.transact([ForgetDropped("d1")])
        with pytest.raises(NotFound):
            await store.transact([ForgetDropped("d1")])
        assert ids(await store.dropped(None, None, 9)) == ["d0", "d2"]

    # Transactions

    async def test_a_failing_operation_undoes_those_before_it(self, store: DrivenStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        first = make_entry("t").metadata_location
        with pytest.raises(NoSuchTable):
            await store.transact(
                [
                    CreateNamespace(("b",), {}),
                    make_swap("t", first, "file:///1"),
                    RecordInstant(make_instant("i1")),
                    make_swap("missing", "x", "y"),
                ]
            )
        assert await store.namespace(("b",)) is None
        assert await store.entry(TABLE, NS, "t") == make_entry("t")
        assert await store.instant("i1") is None

    async def test_each_operation_has_its_result_in_order(self, store: DrivenStore) -> None:
        results = await store.transact([CreateEntry(make_entry("t")), TakeLease("l", "me", 0, 10), SaveAudit(())])
        assert results == [None, 1, None]
        assert await store.transact([]) == []

    async def test_another_store_sees_a_commit_at_once(self, store: DrivenStore, other: DrivenStore) -> None:
        location = make_entry("t").metadata_location
        await store.transact([CreateEntry(make_entry("t"))])
        for step in range(50):
            writer, reader = (store, other) if step % 2 else (other, store)
            await writer.transact([make_swap("t", location, f"file:///{step}")])
            location = f"file:///{step}"
            seen = await reader.entry(TABLE, NS, "t")
            assert seen is not None
            assert seen.metadata_location == location
            assert [entry.metadata_location for entry in await reader.entries(TABLE, NS, None, 9)] == [location]

    async def test_fifty_creates_of_one_name_have_one_winner(self, store: DrivenStore, other: DrivenStore) -> None:
        outcomes = await asyncio.gather(
            *(
                outcome((store, other)[n % 2].transact([CreateEntry(make_entry("t", (TABLE, VIEW)[n % 3 % 2]))]))
                for n in range(50)
            )
        )
        assert sorted(outcomes) == ["already_exists"] * 49 + ["won"]

    async def test_twenty_swaps_from_one_location_have_one_winner(self, store: DrivenStore, other: DrivenStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        first = make_entry("t").metadata_location
        outcomes = await asyncio.gather(
            *(
                outcome(
                    (store, other)[n % 2].transact(
                        [make_swap("t", first, f"file:///{n}"), RecordInstant(make_instant(f"i{n}"))]
                    )
                )
                for n in range(20)
            )
        )
        assert sorted(outcomes) == ["commit_conflict"] * 19 + ["won"]
        after = await store.entry(TABLE, NS, "t")
        assert after is not None
        assert after.version == 2
        assert [n for n in range(20) if await store.instant(f"i{n}")] == [outcomes.index("won")]

    async def test_a_namespace_is_dropped_or_filled_never_both(self, store: DrivenStore, other: DrivenStore) -> None:
        for step in range(20):
            path = (f"race{step}",)
            await store.transact([CreateNamespace(path, {})])
            fill = CreateEntry(make_entry("t", namespace=path)) if step % 2 else CreateNamespace((*path, "c"), {})
            outcomes = await asyncio.gather(
                outcome(store.transact([DropNamespace(path)])), outcome(other.transact([fill]))
            )
            assert tuple(outcomes) in {("won", "no_such_namespace"), ("namespace_not_empty", "won")}
            await store.check_invariants()

    async def test_swaps_of_two_tables_in_opposite_order_never_deadlock_for_good(
        self, store: DrivenStore, other: DrivenStore
    ) -> None:
        locations = {}
        for name in ("t", "u"):
            await store.transact([CreateEntry(make_entry(name))])
            locations[name] = make_entry(name).metadata_location
        for step in range(3):
            new = f"file:///{step}"
            one = [make_swap(name, at, f"{new}/one") for name, at in locations.items()]
            two = [make_swap(name, at, f"{new}/two") for name, at in locations.items()]
            outcomes = await asyncio.gather(outcome(store.transact(one)), outcome(other.transact(two[::-1])))
            assert sorted(outcomes) == ["commit_conflict", "won"]
            winner = f"{new}/{('one', 'two')[outcomes.index('won')]}"
            for name in locations:
                entry = await store.entry(TABLE, NS, name)
                assert entry is not None
                assert entry.metadata_location == winner
                locations[name] = winner

    # Timeline

    async def test_an_instant_reads_back_as_it_was_written(self, store: DrivenStore) -> None:
        instant = make_instant(
            "i1",
            who="ann",
            snapshot_id=2**63 - 1,
            metadata_location="file:///m",
            fingerprint="f",
            summary={"added-files": 3, "nested": {"ä": [1, None, True]}},
        )
        await store.transact([RecordInstant(instant)])
        (read,) = await store.instants(InstantFilter(), 9)
        assert read.position != ""
        assert read == _at(instant, read.position)
        assert await store.instant("i1") == read
        assert await store.instant_by_fingerprint("uuid-of-t", "f") == read
        assert await store.instant_by_fingerprint("uuid-of-t", "g") is None
        with pytest.raises(AlreadyExists, match="i1"):
            await store.transact([RecordInstant(instant)])

    async def test_the_timeline_reads_on_from_any_position_in_both_directions(self, store: DrivenStore) -> None:
        for number in range(10):
            await store.transact([RecordInstant(make_instant(f"i{9 - number}"))])
        every = await store.instants(InstantFilter(), 99)
        assert ids(every) == [f"i{9 - number}" for number in range(10)]
        assert [i.position for i in every] == sorted(i.position for i in every)
        for newest_first in (False, True):
            seen: list[Instant] = []
            while page := await store.instants(
                InstantFilter(since=seen[-1].position if seen else None, newest_first=newest_first), 3
            ):
                seen += page
            assert seen == (every[::-1] if newest_first else every)

    async def test_every_condition_of_a_filter_holds(self, store: DrivenStore) -> None:
        await store.transact(
            [
                RecordInstant(make_instant("a")),
                RecordInstant(make_instant("b", uuid="other")),
                RecordInstant(make_instant("c", namespace=("n", "s"))),
                RecordInstant(make_instant("d", name="u")),
                RecordInstant(make_instant("e", action="drop")),
                RecordInstant(make_instant("f", state=InstantState.INFLIGHT, completed_ms=None)),
            ]
        )
        for where, expected in [
            (InstantFilter(uuid="other"), ["b"]),
            (InstantFilter(namespace=("n", "s")), ["c"]),
            (InstantFilter(name="u", namespace=NS), ["d"]),
            (InstantFilter(action="drop"), ["e"]),
            (InstantFilter(state=InstantState.INFLIGHT), ["f"]),
            (InstantFilter(state=InstantState.COMPLETED, name="t"), ["a", "b", "c", "e"]),
            (InstantFilter(action="drop", uuid="other"), []),
        ]:
            assert ids(await store.instants(where, 9)) == expected, where

    async def test_an_instant_moves_only_from_the_expected_state_and_is_seen_anew(self, store: DrivenStore) -> None:
        requested, inflight, done = InstantState.REQUESTED, InstantState.INFLIGHT, InstantState.COMPLETED
        await store.transact([RecordInstant(make_instant("p", state=requested, completed_ms=None))])
        await store.transact([RecordInstant(make_instant("q"))])
        last = (await store.instants(InstantFilter(), 9))[-1].position
        await store.transact([MoveInstant("p", requested, inflight, 50)])
        (moved,) = await store.instants(InstantFilter(since=last), 9)
        assert (moved.id, moved.state, moved.completed_ms) == ("p", inflight, None)
        with pytest.raises(CommitConflict, match="inflight"):
            await store.transact([MoveInstant("p", requested, inflight, 51)])
        await store.transact([MoveInstant("p", inflight, done, 60, snapshot_id=8, summary={"x": 1})])
        (final,) = await store.instants(InstantFilter(since=moved.position), 9)
        assert (final.state, final.completed_ms, final.snapshot_id, final.summary) == (done, 60, 8, {"x": 1})
        assert ids(await store.instants(InstantFilter(), 9)) == ["q", "p"]
        with pytest.raises(NotFound):
            await store.transact([MoveInstant("nobody", requested, inflight, 1)])

    async def test_the_newest_completed_instant_answers_for_a_fingerprint(self, store: DrivenStore) -> None:
        undone = InstantState.ROLLED_BACK
        for name, state in [("a", InstantState.COMPLETED), ("b", InstantState.COMPLETED), ("c", undone)]:
            await store.transact([RecordInstant(make_instant(name, fingerprint="f", state=state))])
        found = await store.instant_by_fingerprint("uuid-of-t", "f")
        assert found is not None
        assert found.id == "b"

    async def test_archived_instants_are_still_read_in_order(self, store: DrivenStore) -> None:
        for number in range(12):
            uuid = ("x", "y")[number % 2]
            await store.transact([RecordInstant(make_instant(f"i{number:02}", uuid=uuid, fingerprint=f"f{number}"))])
        unfinished = make_instant("open", uuid="x", state=InstantState.REQUESTED, completed_ms=None)
        await store.transact([RecordInstant(unfinished)])
        every = await store.instants(InstantFilter(), 99)
        assert await store.archive_instants(keep=2, limit=5) == 5
        assert await store.archive_instants(keep=2, limit=5) == 3
        assert await store.archive_instants(keep=2, limit=5) == 0
        assert await store.instants(InstantFilter(), 99) == every
        assert await store.instants(InstantFilter(newest_first=True), 99) == every[::-1]
        assert await store.instants(InstantFilter(since=every[3].position), 4) == every[4:8]
        assert ids(await store.instants(InstantFilter(archived=False), 99)) == ["i08", "i09", "i10", "i11", "open"]
        assert ids(await store.instants(InstantFilter(uuid="x"), 99))[:3] == ["i00", "i02", "i04"]
        assert await store.instant("i00") == every[0]
        assert await store.instant_by_fingerprint("x", "f0") == every[0]
        await store.archive_instants(keep=0, limit=99)
        await store.transact([RecordInstant(make_instant("later"))])
        assert ids(await store.instants(InstantFilter(since=every[-1].position), 9)) == ["later"]

    async def test_two_replicas_archive_each_instant_once(self, store: DrivenStore, other: DrivenStore) -> None:
        for number in range(30):
            await store.transact([RecordInstant(make_instant(f"i{number:02}"))])
        every = await store.instants(InstantFilter(), 99)
        await asyncio.gather(*((store, other)[n % 2].archive_instants(keep=5, limit=7) for n in range(8)))
        while await store.archive_instants(keep=5, limit=7):
            pass
        assert await other.instants(InstantFilter(), 99) == every
        assert len(await other.instants(InstantFilter(archived=False), 99)) == 5

    async def test_a_reader_of_the_timeline_misses_nothing_while_many_write(
        self, store: DrivenStore, other: DrivenStore
    ) -> None:
        async def write(worker: int) -> None:
            for step in range(15):
                await (store, other)[worker % 2].transact(
                    [CreateNamespace((f"n{worker}-{step}",), {}), RecordInstant(make_instant(f"{worker}-{step}"))]
                )

        seen: list[str] = []
        writers = asyncio.gather(*(write(worker) for worker in range(8)))
        since = None
        while len(seen) < 8 * 15 or not writers.done():
            for instant in await store.instants(InstantFilter(since=since), 7):
                seen.append(instant.id)
                since = instant.position
            await asyncio.sleep(0)
        await writers
        assert len(seen) == len(set(seen)) == 8 * 15

    # Idempotency

    async def test_the_first_answer_to_a_key_is_kept_and_the_second_undone(
        self, store: DrivenStore, clock: SimulatedClock
    ) -> None:
        record = make_idempotency("k", clock.now_ms() + 100)
        await store.transact([SaveIdempotency(record)])
        assert await store.idempotency("k", clock.now_ms()) == record
        with pytest.raises(IdempotencyTaken):
            await store.transact(
                [CreateEntry(make_entry("t")), SaveIdempotency(make_idempotency("k", clock.now_ms() + 900))]
            )
        assert await store.entry(TABLE, NS, "t") is None
        assert await store.idempotency("k", clock.now_ms()) == record
        assert await store.idempotency("other", clock.now_ms()) is None

    async def test_an_expired_key_is_free_again(self, store: DrivenStore, clock: SimulatedClock) -> None:
        await store.transact([SaveIdempotency(make_idempotency("k", clock.now_ms() + 100))])
        clock.advance(100)
        assert await store.idempotency("k", clock.now_ms()) is None
        second = make_idempotency("k", clock.now_ms() + 100, status=404, body=None, metadata_location="file:///m")
        await store.transact([SaveIdempotency(second)])
        assert await store.idempotency("k", clock.now_ms()) == second

    async def test_of_requests_with_one_key_at_once_one_is_recorded(
        self, store: DrivenStore, other: DrivenStore, clock: SimulatedClock
    ) -> None:
        async def attempt(number: int) -> bool:
            record = make_idempotency("k", clock.now_ms() + 100, status=200 + number)
            entry = make_entry(f"t{number}")
            try:
                await (store, other)[number % 2].transact([CreateEntry(entry), SaveIdempotency(record)])
            except IdempotencyTaken:
                return False
            return True

        won = await asyncio.gather(*(attempt(number) for number in range(20)))
        assert won.count(True) == 1
        record = await store.idempotency("k", clock.now_ms())
        assert record is not None
        assert record.status == 200 + won.index(True)
        assert [e.name for e in await store.entries(TABLE, NS, None, 99)] == [f"t{won.index(True)}"]

    # Metrics, audit, tokens, grants, cursors, leases, secrets

    async def test_metrics_reports_are_kept_and_listed(self, store: DrivenStore) -> None:
        reports = [
            MetricsReport(f"m{n}", ("x", "y")[n % 2], NS, "t", "scan-report", n or None, n, "ann", {"n": n, "e": {}})
            for n in range(6)
        ]
        await store.transact([SaveMetricsReport(report) for report in reports])
        assert await store.metrics_reports(None, None, 99) == reports
        assert await store.metrics_reports(None, "m2", 2) == reports[3:5]
        assert await store.metrics_reports("x", None, 99) == reports[::2]
        assert await store.metrics_reports("x", "m0", 1) == [reports[2]]

    async def test_audit_records_are_kept_in_batches_of_any_size(self, store: DrivenStore) -> None:
        records = tuple(
            AuditRecord(f"a{n:03}", n, "ann", "commitTable", "ns.t", "allowed", 200, f"r{n}", "127.0.0.1")
            for n in range(150)
        )
        await store.transact([SaveAudit(records[:83]), SaveAudit(())])
        await store.transact([SaveAudit(records)])
        assert await store.audit(None, 999) == list(records)
        assert await store.audit("a100", 2) == list(records[101:103])

    async def test_what_is_too_old_is_pruned_within_the_limit(self, store: DrivenStore, clock: SimulatedClock) -> None:
        now = clock.now_ms()
        await store.transact([SaveIdempotency(make_idempotency(f"k{n}", now - 2 + n)) for n in range(5)])
        await store.transact([SaveAudit((AuditRecord("a1", 5, *("x",) * 4, 200, "r"),))])
        await store.transact([SaveMetricsReport(MetricsReport("m1", "u", NS, "t", "r", None, 5, "w", {}))])
        assert await store.prune(now, audit_before_ms=5, metrics_before_ms=5, limit=2) == 2
        assert await store.prune(now, audit_before_ms=5, metrics_before_ms=5, limit=9) == 1
        assert [await store.idempotency(f"k{n}", 0) is None for n in range(5)] == [True] * 3 + [False] * 2
        assert await store.prune(now, audit_before_ms=6, metrics_before_ms=6, limit=9) == 2
        assert await store.audit(None, 9) == []
        assert await store.metrics_reports(None, None, 9) == []

    async def test_a_token_holds_its_name_until_it_is_revoked_or_expires(
        self, store: DrivenStore, clock: SimulatedClock
    ) -> None:
        now = clock.now_ms()
        first = Token("1", "ann", "digest1", now, None)
        await store.transact([SaveToken(first)])
        assert await store.token_by_digest("digest1") == first
        assert await store.token_by_digest("digest2") is None
        with pytest.raises(AlreadyExists, match="ann"):
            await store.transact([SaveToken(Token("2", "ann", "digest2", now))])
        await store.transact([RevokeToken("ann", now + 1)])
        revoked = await store.token_by_digest("digest1")
        assert revoked is not None
        assert revoked.revoked_ms == now + 1
        with pytest.raises(NotFound):
            await store.transact([RevokeToken("ann", now + 2)])
        await store.transact([SaveToken(Token("3", "ann", "digest3", now, expires_ms=now + 10))])
        with pytest.raises(AlreadyExists):
            await store.transact([SaveToken(Token("4", "ann", "digest4", now))])
        clock.advance(10)
        with pytest.raises(NotFound):
            await store.transact([RevokeToken("ann", clock.now_ms())])
        await store.transact([SaveToken(Token("4", "ann", "digest4", now))])
        assert ids(await store.tokens()) == ["1", "3", "4"]

    async def test_grants_are_saved_once_and_removed(self, store: DrivenStore) -> None:
        whole, part = Grant("ann", "admin"), Grant("ann", "reader", ("a", "b"))
        await store.transact([SaveGrant(whole), SaveGrant(part), SaveGrant(part), SaveGrant(Grant("bob", "reader"))])
        assert await store.grants("ann") == [whole, part]
        assert len(await store.grants(None)) == 3
        await store.transact([RemoveGrant(part)])
        assert await store.grants("ann") == [whole]
        with pytest.raises(NotFound, match=r"reader for ann on a\.b"):
            await store.transact([RemoveGrant(part)])

    async def test_a_cursor_moves_only_from_where_it_was_read(self, store: DrivenStore, other: DrivenStore) -> None:
        assert await store.cursor("hook") is None
        with pytest.raises(CommitConflict):
            await store.transact([SaveCursor("hook", "5", "6")])
        await store.transact([SaveCursor("hook", None, "5")])
        with pytest.raises(CommitConflict):
            await store.transact([SaveCursor("hook", None, "5")])
        outcomes = await asyncio.gather(
            *(outcome(s.transact([SaveCursor("hook", "5", f"6{n}")])) for n, s in enumerate((store, other)))
        )
        assert sorted(outcomes) == ["commit_conflict", "won"]
        assert await store.cursor("hook") == f"6{outcomes.index('won')}"

    async def test_a_lease_has_one_holder_and_a_rising_fence(self, store: DrivenStore, other: DrivenStore) -> None:
        assert await store.transact([TakeLease("l", "a", now_ms=0, until_ms=10)]) == [1]
        assert await store.transact([TakeLease("l", "a", now_ms=5, until_ms=15)]) == [1]
        with pytest.raises(CommitConflict):
            await other.transact([TakeLease("l", "b", now_ms=14, until_ms=30)])
        assert await other.transact([TakeLease("l", "b", now_ms=15, until_ms=30)]) == [2]
        with pytest.raises(CommitConflict):
            await store.transact([TakeLease("l", "a", now_ms=29, until_ms=50)])
        assert await store.transact([TakeLease("l", "a", now_ms=30, until_ms=50)]) == [3]

    async def test_all_replicas_get_the_first_secret(self, store: DrivenStore, other: DrivenStore) -> None:
        got = await asyncio.gather(
            *((store, other)[n % 2].secret("signing", bytes([n, 0, 255])) for n in range(8)),
        )
        assert len(set(got)) == 1
        assert await other.secret("signing", b"late") == got[0]
        assert await store.secret("another", b"x") == b"x"

    # Odds

    async def test_ping_answers(self, store: DrivenStore) -> None:
        await store.ping()

    async def test_a_value_that_does_not_fit_is_the_clients_to_mend(self, store: DrivenStore) -> None:
        for bad in (
            CreateEntry(make_entry("t", version=2**63)),
            RecordInstant(make_instant("i", snapshot_id=-(2**63) - 1)),
            CreateEntry(make_entry("t\ud800")),
        ):
            with pytest.raises(BadRequest):
                await store.transact([bad])
        with pytest.raises(BadRequest):
            await store.entry(TABLE, NS, "t\ud800")
        with pytest.raises(BadRequest):
            await store.entries(TABLE, NS, "t\ud800", 10)
        await store.transact([CreateEntry(make_entry("t"))])

    async def test_names_are_data_and_never_sql(self, store: DrivenStore) -> None:
        names = ["'; DROP TABLE entries; --", '"', "$1", "?1", "{visible}", "%", "\\", "\\x00"]
        for name in names:
            await store.transact([CreateEntry(make_entry(name))])
            assert await store.entry(TABLE, NS, name) == make_entry(name)
        assert len(await store.entries(TABLE, NS, None, 99)) == len(names)


def _at(instant: Instant, position: str) -> Instant:
    return Instant(**{f: getattr(instant, f) for f in instant.__struct_fields__} | {"position": position})
