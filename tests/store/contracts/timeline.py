"""The contract of pointer stores for instants: order, positions, states, archive."""

from __future__ import annotations

import asyncio

import pytest

from seamark.formats.runtime.errors import (
    AlreadyExists,
    CommitConflict,
    NotFound,
)
from seamark.metaserver.store.model import Instant, InstantState
from seamark.metaserver.store.operations import CreateNamespace, MoveInstant, RecordInstant
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import (
    NS,
    list_ids,
    make_instant,
    replace_position,
)
from tests.store.store_pair import StorePair


class TimelineContract(StorePair):
    """The tests of instants and their order that each store passes."""

    async def test_stored_instant_equals_the_written_instant(self, store: GeneratorStore) -> None:
        instant = make_instant(
            "i1",
            principal_name="ann",
            snapshot_id=2**63 - 1,
            metadata_location="file:///m",
            fingerprint="f",
            summary={"added-files": 3, "nested": {"ä": [1, None, True]}},
        )
        await store.transact([RecordInstant(instant)])
        (read_instant,) = await store.list_instants(InstantFilter(), 9)
        assert read_instant.position != ""
        assert read_instant == replace_position(instant, read_instant.position)
        assert await store.load_instant("i1") == read_instant
        assert await store.find_instant_by_fingerprint("uuid-of-t", "f") == read_instant
        assert await store.find_instant_by_fingerprint("uuid-of-t", "g") is None
        with pytest.raises(AlreadyExists, match="i1"):
            await store.transact([RecordInstant(instant)])

    async def test_timeline_is_read_from_any_position_in_both_directions(self, store: GeneratorStore) -> None:
        for number in range(10):
            await store.transact([RecordInstant(make_instant(f"i{9 - number}"))])
        all_instants = await store.list_instants(InstantFilter(), 99)
        assert list_ids(all_instants) == [f"i{9 - number}" for number in range(10)]
        assert [instant.position for instant in all_instants] == sorted(instant.position for instant in all_instants)
        for newest_first in (False, True):
            instants: list[Instant] = []
            while page := await store.list_instants(
                InstantFilter(since=instants[-1].position if instants else None, newest_first=newest_first), 3
            ):
                instants += page
            assert instants == (all_instants[::-1] if newest_first else all_instants)

    async def test_every_condition_of_a_filter_applies(self, store: GeneratorStore) -> None:
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
        for conditions, expected in [
            (InstantFilter(uuid="other"), ["b"]),
            (InstantFilter(namespace=("n", "s")), ["c"]),
            (InstantFilter(name="u", namespace=NS), ["d"]),
            (InstantFilter(action="drop"), ["e"]),
            (InstantFilter(state=InstantState.INFLIGHT), ["f"]),
            (InstantFilter(state=InstantState.COMPLETED, name="t"), ["a", "b", "c", "e"]),
            (InstantFilter(action="drop", uuid="other"), []),
        ]:
            assert list_ids(await store.list_instants(conditions, 9)) == expected, conditions

    async def test_instant_changes_only_from_the_expected_state_and_gets_a_new_position(
        self, store: GeneratorStore
    ) -> None:
        requested, inflight, completed = InstantState.REQUESTED, InstantState.INFLIGHT, InstantState.COMPLETED
        await store.transact([RecordInstant(make_instant("p", state=requested, completed_ms=None))])
        await store.transact([RecordInstant(make_instant("q"))])
        last_position = (await store.list_instants(InstantFilter(), 9))[-1].position
        await store.transact([MoveInstant("p", requested, inflight, 50)])
        (moved_instant,) = await store.list_instants(InstantFilter(since=last_position), 9)
        assert (moved_instant.id, moved_instant.state, moved_instant.completed_ms) == ("p", inflight, None)
        with pytest.raises(CommitConflict, match="inflight"):
            await store.transact([MoveInstant("p", requested, inflight, 51)])
        await store.transact([MoveInstant("p", inflight, completed, 60, snapshot_id=8, summary={"x": 1})])
        (last_instant,) = await store.list_instants(InstantFilter(since=moved_instant.position), 9)
        assert (last_instant.state, last_instant.completed_ms, last_instant.snapshot_id, last_instant.summary) == (
            completed,
            60,
            8,
            {"x": 1},
        )
        assert list_ids(await store.list_instants(InstantFilter(), 9)) == ["q", "p"]
        with pytest.raises(NotFound):
            await store.transact([MoveInstant("nobody", requested, inflight, 1)])

    async def test_newest_completed_instant_is_returned_for_a_fingerprint(self, store: GeneratorStore) -> None:
        rolled_back = InstantState.ROLLED_BACK
        for name, state in [("a", InstantState.COMPLETED), ("b", InstantState.COMPLETED), ("c", rolled_back)]:
            await store.transact([RecordInstant(make_instant(name, fingerprint="f", state=state))])
        instant = await store.find_instant_by_fingerprint("uuid-of-t", "f")
        assert instant is not None
        assert instant.id == "b"

    async def test_archived_instants_are_still_read_in_order(self, store: GeneratorStore) -> None:
        for number in range(12):
            uuid = ("x", "y")[number % 2]
            await store.transact([RecordInstant(make_instant(f"i{number:02}", uuid=uuid, fingerprint=f"f{number}"))])
        unfinished_instant = make_instant("open", uuid="x", state=InstantState.REQUESTED, completed_ms=None)
        await store.transact([RecordInstant(unfinished_instant)])
        instants = await store.list_instants(InstantFilter(), 99)
        assert await store.archive_instants(keep=2, limit=5) == 5
        assert await store.archive_instants(keep=2, limit=5) == 3
        assert await store.archive_instants(keep=2, limit=5) == 0
        assert await store.list_instants(InstantFilter(), 99) == instants
        assert await store.list_instants(InstantFilter(newest_first=True), 99) == instants[::-1]
        assert await store.list_instants(InstantFilter(since=instants[3].position), 4) == instants[4:8]
        assert list_ids(await store.list_instants(InstantFilter(archived=False), 99)) == [
            "i08",
            "i09",
            "i10",
            "i11",
            "open",
        ]
        assert list_ids(await store.list_instants(InstantFilter(uuid="x"), 99))[:3] == ["i00", "i02", "i04"]
        assert await store.load_instant("i00") == instants[0]
        assert await store.find_instant_by_fingerprint("x", "f0") == instants[0]
        await store.archive_instants(keep=0, limit=99)
        await store.transact([RecordInstant(make_instant("later"))])
        assert list_ids(await store.list_instants(InstantFilter(since=instants[-1].position), 9)) == ["later"]

    async def test_two_replicas_archive_each_instant_once(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for number in range(30):
            await store.transact([RecordInstant(make_instant(f"i{number:02}"))])
        instants = await store.list_instants(InstantFilter(), 99)
        await asyncio.gather(*((store, other_store)[n % 2].archive_instants(keep=5, limit=7) for n in range(8)))
        while await store.archive_instants(keep=5, limit=7):
            pass
        assert await other_store.list_instants(InstantFilter(), 99) == instants
        assert len(await other_store.list_instants(InstantFilter(archived=False), 99)) == 5

    async def test_reader_of_the_timeline_misses_no_instant_during_concurrent_writes(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        async def write(worker: int) -> None:
            for step in range(15):
                await (store, other_store)[worker % 2].transact(
                    [CreateNamespace((f"n{worker}-{step}",), {}), RecordInstant(make_instant(f"{worker}-{step}"))]
                )

        listed_ids: list[str] = []
        writers = asyncio.gather(*(write(worker) for worker in range(8)))
        since = None
        while True:
            is_last = writers.done()
            page = await store.list_instants(InstantFilter(since=since), 7)
            listed_ids += list_ids(page)
            since = page[-1].position if page else since
            if is_last and not page:
                break
        await writers
        assert len(listed_ids) == len(set(listed_ids)) == 8 * 15
