"""The contract of pointer stores for namespaces, entries and dropped entries."""

from __future__ import annotations

import msgspec
import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import (
    AlreadyExists,
    CommitConflict,
    NamespaceNotEmpty,
    NoSuchFunction,
    NoSuchNamespace,
    NoSuchTable,
    NoSuchView,
    NotFound,
)
from seamark.metaserver.store.model import DroppedEntry, Entry, EntryKind, Namespace
from seamark.metaserver.store.operations import (
    REWRITE,
    CreateEntry,
    CreateNamespace,
    DropEntry,
    DropNamespace,
    EndPriority,
    ForgetDropped,
    RenameEntry,
    ReplaceNamespaceProperties,
    RestoreEntry,
    TakeLease,
    TakePriority,
)
from seamark.metaserver.store.port import LostRace
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import (
    FUNCTION,
    NS,
    TABLE,
    VIEW,
    list_ids,
    make_entry,
    make_swap,
)
from tests.store.store_pair import StorePair


class NamesContract(StorePair):
    """The tests of namespaces and of names in them that each store passes."""

    # Tests of namespaces

    async def test_namespace_is_read_with_its_properties(self, store: GeneratorStore) -> None:
        properties = {"owner": "ann", "empty": "", "odd ' \" key": "värde\n\U0001f600"}
        assert await store.transact([CreateNamespace(("a",), properties)]) == [None]
        assert await store.load_namespace(("a",)) == Namespace(("a",), properties, 1)
        assert await store.load_namespace(("A",)) is None
        assert await store.load_namespace(()) is None

    async def test_second_namespace_of_one_name_is_rejected(self, store: GeneratorStore) -> None:
        with pytest.raises(AlreadyExists, match=r"^Namespace already exists: ns$"):
            await store.transact([CreateNamespace(NS, {"other": "1"})])
        assert (await store.load_namespace(NS)) == Namespace(NS, {}, 1)

    async def test_namespace_requires_its_parent(self, store: GeneratorStore) -> None:
        with pytest.raises(NoSuchNamespace, match=r"^Namespace does not exist: no\.such$"):
            await store.transact([CreateNamespace(("no", "such", "child"), {})])

    async def test_namespaces_list_direct_children_in_code_point_order_by_pages(self, store: GeneratorStore) -> None:
        leaves = ["a", "B", "ä", "ﬀ", "\U0001f600", "a.b", "a b", "a!"]
        for leaf in leaves:
            await store.transact([CreateNamespace((*NS, leaf), {"leaf": leaf})])
        await store.transact([CreateNamespace((*NS, "a", "deep"), {}), CreateNamespace(("ns2",), {})])
        listed_names: list[str] = []
        while page := await store.list_namespaces(NS, listed_names[-1] if listed_names else None, 3):
            listed_names += [child[-1] for child in page]
        assert listed_names == sorted(leaves)
        assert await store.list_namespaces((), None, 10) == [NS, ("ns2",)]
        assert await store.list_namespaces((), "ns", 10) == [("ns2",)]
        assert await store.list_namespaces(("nowhere",), None, 10) == []
        namespaces = await store.find_namespaces(NS, ["none", *reversed(leaves), "deep", "a"])
        assert [child[-1] for child in namespaces] == sorted(leaves)
        assert await store.find_namespaces((), ["ns2", "a"]) == [("ns2",)]
        assert await store.find_namespaces(NS, []) == []
        assert len(await store.find_namespaces(NS, [f"x{number}" for number in range(99)] + ["a"])) == 1

    async def test_properties_are_replaced_only_at_the_expected_version(self, store: GeneratorStore) -> None:
        await store.transact([ReplaceNamespaceProperties(NS, 1, {"a": "1"})])
        assert await store.load_namespace(NS) == Namespace(NS, {"a": "1"}, 2)
        with pytest.raises(CommitConflict):
            await store.transact([ReplaceNamespaceProperties(NS, 1, {"a": "2"})])
        with pytest.raises(NoSuchNamespace, match="Namespace does not exist: gone"):
            await store.transact([ReplaceNamespaceProperties(("gone",), 1, {})])
        assert await store.load_namespace(NS) == Namespace(NS, {"a": "1"}, 2)

    @pytest.mark.parametrize("content", [TABLE, VIEW, FUNCTION, None])
    async def test_namespace_with_contents_cannot_be_dropped(
        self, store: GeneratorStore, content: EntryKind | None
    ) -> None:
        create_content = CreateEntry(make_entry("x", content)) if content else CreateNamespace((*NS, "child"), {})
        await store.transact([create_content])
        with pytest.raises(NamespaceNotEmpty, match=r"^Namespace ns is not empty"):
            await store.transact([DropNamespace(NS)])
        await store.transact([DropEntry(content, NS, "x") if content else DropNamespace((*NS, "child"))])
        await store.transact([DropNamespace(NS)])
        assert await store.load_namespace(NS) is None
        with pytest.raises(NoSuchNamespace):
            await store.transact([DropNamespace(NS)])

    # Tests of entries

    async def test_stored_entry_equals_the_written_entry(self, store: GeneratorStore) -> None:
        entry = make_entry("t", previous_location="file:///w/p", version=3, created_ms=5, updated_ms=2**53)
        await store.transact([CreateEntry(entry)])
        assert await store.load_entry(TABLE, NS, "t") == entry
        assert await store.load_entry(VIEW, NS, "t") is None
        assert await store.load_entry(TABLE, NS, "T") is None

    async def test_tables_and_views_share_names_and_functions_do_not(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("v", VIEW))])
        for kind, name, message in [
            (TABLE, "t", "Table already exists: ns.t"),
            (VIEW, "v", "View already exists: ns.v"),
            (VIEW, "t", "Table with same name already exists: ns.t"),
            (TABLE, "v", "View with same name already exists: ns.v"),
        ]:
            with pytest.raises(AlreadyExists) as error:
                await store.transact([CreateEntry(make_entry(name, kind, uuid="another"))])
            assert error.value.message == message
        await store.transact([CreateEntry(make_entry("t", FUNCTION)), CreateEntry(make_entry("v", FUNCTION))])
        with pytest.raises(AlreadyExists, match=r"^Function already exists: ns\.t$"):
            await store.transact([CreateEntry(make_entry("t", FUNCTION))])

    async def test_entry_requires_its_namespace(self, store: GeneratorStore) -> None:
        with pytest.raises(NoSuchNamespace, match=r"^Namespace does not exist: non-existing$"):
            await store.transact([CreateEntry(make_entry("t", namespace=("non-existing",)))])

    async def test_list_entries_returns_pages_of_one_kind_in_code_point_order(self, store: GeneratorStore) -> None:
        names = ["t", "T", "ä", "ﬀ", "\U0001f600", "t1", "t 1", "t.1"]
        for name in names:
            await store.transact([CreateEntry(make_entry(name))])
        await store.transact([CreateEntry(make_entry("view", VIEW)), CreateEntry(make_entry("f", FUNCTION))])
        listed_names: list[str] = []
        while page := await store.list_entries(TABLE, NS, listed_names[-1] if listed_names else None, 3):
            listed_names += [entry.name for entry in page]
        assert listed_names == sorted(names)
        assert [entry.name for entry in await store.list_entries(VIEW, NS, None, 9)] == ["view"]

    async def test_swap_from_an_old_location_is_rejected(self, store: GeneratorStore) -> None:
        entry_before = make_entry("t")
        await store.transact([CreateEntry(entry_before)])
        await store.transact([make_swap("t", entry_before.metadata_location, "file:///1", now_ms=99)])
        entry_after = await store.load_entry(TABLE, NS, "t")
        assert entry_after == make_entry(
            "t",
            metadata_location="file:///1",
            previous_location=entry_before.metadata_location,
            version=2,
            updated_ms=99,
        )
        with pytest.raises(CommitConflict):
            await store.transact([make_swap("t", entry_before.metadata_location, "file:///2")])
        with pytest.raises(CommitConflict, match="created again"):
            await store.transact([make_swap("t", "file:///1", "file:///2", uuid="of another")])
        assert await store.load_entry(TABLE, NS, "t") == entry_after

    async def test_missing_object_is_named_by_its_kind(self, store: GeneratorStore) -> None:
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
                with pytest.raises(error) as rejected_error:
                    await store.transact([change])
                assert rejected_error.value.message == f"{title} does not exist: ns.x"

    async def test_rename_changes_only_the_name(self, store: GeneratorStore) -> None:
        entry = make_entry("t", version=4, previous_location="file:///p")
        await store.transact(
            [CreateEntry(entry), CreateNamespace(("b",), {}), RenameEntry(TABLE, NS, "t", ("b",), "u")]
        )
        assert await store.load_entry(TABLE, NS, "t") is None
        moved_entry = make_entry("u", namespace=("b",), uuid=entry.uuid, metadata_location=entry.metadata_location)
        assert await store.load_entry(TABLE, ("b",), "u") == Entry(
            **{name: getattr(moved_entry, name) for name in moved_entry.__struct_fields__}
            | {"version": 4, "previous_location": "file:///p"}
        )
        await store.transact([RenameEntry(TABLE, ("b",), "u", ("b",), "u")])
        assert await store.load_entry(TABLE, ("b",), "u") is not None

    async def test_impossible_rename_changes_nothing(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("v", VIEW))])
        await store.transact([CreateEntry(make_entry("t2"))])
        for change, message in [
            (RenameEntry(TABLE, NS, "t", NS, "t2"), "Cannot rename ns.t to ns.t2. Table already exists"),
            (RenameEntry(TABLE, NS, "t", NS, "v"), "Cannot rename ns.t to ns.v. View already exists"),
            (RenameEntry(VIEW, NS, "v", NS, "t"), "Cannot rename ns.v to ns.t. Table already exists"),
        ]:
            with pytest.raises(AlreadyExists) as error:
                await store.transact([change])
            assert error.value.message == message
        with pytest.raises(NoSuchNamespace, match=r"^Namespace does not exist: non_existing$"):
            await store.transact([RenameEntry(TABLE, NS, "t", ("non_existing",), "t")])
        assert [entry.name for entry in await store.list_entries(TABLE, NS, None, 9)] == ["t", "t2"]

    async def test_only_the_process_with_priority_moves_the_pointer(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        entry = make_entry("t")
        await store.transact([CreateEntry(entry), TakePriority(entry.uuid, "slow", 60_000)])
        swap = make_swap("t", entry.metadata_location, "file:///2", uuid=entry.uuid)
        for fast_swap in (swap, msgspec.structs.replace(swap, holder="fast")):
            with pytest.raises(LostRace):
                await other_store.transact([fast_swap])
        with pytest.raises(CommitConflict):
            await other_store.transact([TakePriority(entry.uuid, "fast", 60_000)])
        await other_store.transact([EndPriority(entry.uuid, "fast")])
        await store.transact([TakePriority(entry.uuid, "slow", 60_000), msgspec.structs.replace(swap, holder="slow")])
        swap_after = make_swap("t", "file:///2", "file:///3", uuid=entry.uuid, holder="fast")
        with pytest.raises(LostRace):
            await other_store.transact([swap_after])
        await store.transact([EndPriority(entry.uuid, "slow")])
        await other_store.transact([swap_after])
        # A drop of the table ends the priority, so another process can get it for a new entry with the same UUID.
        await other_store.transact([TakePriority(entry.uuid, "fast", 60_000), DropEntry(TABLE, NS, "t")])
        await other_store.transact([CreateEntry(entry), TakePriority(entry.uuid, "slow", 60_000)])

    # Tests of drop and undrop

    async def test_drop_without_retention_deletes_the_entry(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        with pytest.raises(CommitConflict):
            await store.transact([DropEntry(TABLE, NS, "t", "file:///elsewhere")])
        await store.transact([DropEntry(TABLE, NS, "t", make_entry("t").metadata_location)])
        assert await store.load_entry(TABLE, NS, "t") is None
        assert await store.list_dropped(None, None, 9) == []

    async def test_lease_of_rewrites_ends_with_the_last_name(
        self, store: GeneratorStore, clock: SimulatedClock
    ) -> None:
        entry, now_ms = make_entry("t"), clock.now_ms()
        name = f"{REWRITE}{entry.uuid}"
        await store.transact([CreateEntry(entry), TakeLease(name, "job", now_ms, now_ms + 1000)])
        await store.transact([DropEntry(TABLE, NS, "t", keep=self._make_dropped_entry("d1", now_ms + 1000))])
        assert await store.read_fencing_number(name) == 1
        await store.transact([ForgetDropped("d1", unshared=False)])
        assert await store.read_fencing_number(name) == 0

    def _make_dropped_entry(self, dropped_id: str, expires_ms: int, purge: bool = False) -> DroppedEntry:
        return DroppedEntry(dropped_id, make_entry("placeholder"), purge, 11, expires_ms, "ann")

    async def test_dropped_entry_is_kept_unchanged_and_can_be_restored(
        self, store: GeneratorStore, clock: SimulatedClock
    ) -> None:
        entry = make_entry("t", version=7, previous_location="file:///p")
        until_ms = clock.now_ms() + 1000
        await store.transact(
            [CreateEntry(entry), DropEntry(TABLE, NS, "t", keep=self._make_dropped_entry("d1", until_ms, purge=True))]
        )
        dropped_entry = DroppedEntry("d1", entry, True, 11, until_ms, "ann")
        assert await store.find_dropped("d1") == dropped_entry
        assert await store.list_dropped(None, None, 9) == [dropped_entry]
        assert await store.list_dropped(NS, None, 9) == [dropped_entry]
        assert await store.list_dropped(("other",), None, 9) == []
        counts = [await store.count_names(entry.uuid, namespace=path) for path in (None, NS, ("other",))]
        live_counts = [await store.count_names(entry.uuid, dropped=False, namespace=path) for path in (None, NS)]
        assert (counts, live_counts) == ([1, 1, 0], [0, 0])
        await store.transact([RestoreEntry("d1", NS, "t")])
        live_counts = [
            await store.count_names(entry.uuid, dropped=False, namespace=path) for path in (None, NS, ("other",))
        ]
        assert live_counts == [1, 1, 0]
        assert await store.load_entry(TABLE, NS, "t") == entry
        assert await store.find_dropped("d1") is None
        with pytest.raises(NotFound, match="d1"):
            await store.transact([RestoreEntry("d1", NS, "t2")])

    async def test_impossible_restore_keeps_the_dropped_entry(
        self, store: GeneratorStore, clock: SimulatedClock
    ) -> None:
        dropped_entry = self._make_dropped_entry("d1", clock.now_ms() + 1000)
        await store.transact([CreateEntry(make_entry("t")), DropEntry(TABLE, NS, "t", keep=dropped_entry)])
        await store.transact([CreateEntry(make_entry("t", VIEW))])
        with pytest.raises(AlreadyExists, match=r"^View with same name already exists: ns\.t$"):
            await store.transact([RestoreEntry("d1", NS, "t")])
        with pytest.raises(NoSuchNamespace):
            await store.transact([RestoreEntry("d1", ("gone",), "t")])
        await store.transact([RestoreEntry("d1", NS, "t_again")])
        restored_entry = await store.load_entry(TABLE, NS, "t_again")
        assert restored_entry is not None
        assert restored_entry.uuid == "uuid-of-t"

    async def test_expired_dropped_entry_can_only_be_purged(self, store: GeneratorStore, clock: SimulatedClock) -> None:
        for number, after_ms in enumerate((300, 100, 200)):
            name = f"t{number}"
            dropped_entry = self._make_dropped_entry(f"d{number}", clock.now_ms() + after_ms)
            await store.transact([CreateEntry(make_entry(name)), DropEntry(TABLE, NS, name, keep=dropped_entry)])
        assert await store.list_expired(clock.now_ms(), 9) == []
        clock.advance(200)
        assert list_ids(await store.list_expired(clock.now_ms(), 9)) == ["d1", "d2"]
        assert list_ids(await store.list_expired(clock.now_ms(), 1)) == ["d1"]
        assert list_ids(await store.list_dropped(None, "d0", 9)) == ["d1", "d2"]
        with pytest.raises(NotFound):
            await store.transact([RestoreEntry("d2", NS, "t2")])
        await store.transact([ForgetDropped("d1")])
        with pytest.raises(NotFound):
            await store.transact([ForgetDropped("d1")])
        assert list_ids(await store.list_dropped(None, None, 9)) == ["d0", "d2"]
