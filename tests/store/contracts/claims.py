"""The contract of pointer stores for claims: no two claims overlap, even in races; claims end with the last name."""

from __future__ import annotations

import asyncio
import random

import pytest

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.store.model import ClaimedLocation, DroppedEntry
from seamark.metaserver.store.operations import (
    AllowLocations,
    ClaimLocations,
    CreateEntry,
    DropEntry,
    ForgetDropped,
    RecordRetainedCheck,
    ReleaseLocations,
    RenameEntry,
    RestoreEntry,
)
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import NS, TABLE, get_outcome, make_entry
from tests.store.store_pair import StorePair


def build_claim(uuid: str, *keys: str, shared: bool = False, **fields: bool) -> ClaimLocations:
    locations = tuple(ClaimedLocation(key=key, shared=shared, display_form=key) for key in keys)
    return ClaimLocations(uuid=uuid, locations=locations, **fields)


async def list_locations(store: GeneratorStore, uuid: str) -> list[str]:
    return [claim.location for claim in await store.claims(uuid)]


class ClaimsContract(StorePair):
    """The tests of claimed and allowed locations that each store passes."""

    async def test_no_two_claims_overlap(self, store: GeneratorStore, other_store: GeneratorStore) -> None:
        await store.transact([build_claim("u", "s3://b/w/t")])
        for key in ("s3://b/w/t", "s3://b/w/t/x", "s3://b/w/t/x/y", "s3://b/w", "s3://b"):
            with pytest.raises(BadRequest, match="overlaps"):
                await other_store.transact([build_claim("v", key)])
            assert {
                overlapping_claim.uuid for overlapping_claim in await other_store.find_overlapping_claims([key], "v", 9)
            } == {"u"}
        free_locations = ("s3://b/w/t0", "s3://b/w/t-1", "s3://b/w/t!", "s3://b/w/T", "s3://bb/w/t", "s3://b/w/ü/t")
        for number, key in enumerate(free_locations):
            await other_store.transact([build_claim(f"v{number}", key)])
        assert await store.find_overlapping_claims([*free_locations], "", 0) != []
        assert await store.find_overlapping_claims(["s3://b/w/none", "s3://c"], "", 9) == []

    async def test_concurrent_claims_with_one_name_leave_one_live_name(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        claim = build_claim("u", "s3://b/w/t", only_name=True)
        await store.transact([build_claim("u", "s3://b/w/t")])
        for number in range(5):
            changes = [
                each_store.transact([CreateEntry(make_entry(f"{name}{number}", uuid="u")), claim])
                for name, each_store in (("first", store), ("second", other_store))
            ]
            outcomes = await asyncio.gather(*map(get_outcome, changes))
            assert sorted(outcomes) == ["already_exists", "won"]
            assert await store.count_names("u", dropped=False) == 1
            winner = f"{'first' if outcomes[0] == 'won' else 'second'}{number}"
            await store.transact([DropEntry(kind=TABLE, namespace=NS, name=winner)])

    async def test_allowed_locations_are_stored_apart_from_claims(self, store: GeneratorStore) -> None:
        await store.transact([build_claim("u", "s3://b/u"), build_claim("v", "s3://b/v")])
        allowed_locations = (ClaimedLocation(key="s3://b/u/data"), ClaimedLocation(key="s3://b/w"))
        await store.transact([AllowLocations(uuid="v", locations=allowed_locations)])
        for key in ("s3://b/u", "s3://b/u/data", "s3://b/u/data/x"):
            assert [allowed_overlap.uuid for allowed_overlap in await store.find_allowed_overlaps([key], "u", 9)] == [
                "v"
            ]
            assert "v" not in {
                overlapping_claim.uuid for overlapping_claim in await store.find_overlapping_claims([key], "u", 9)
            }
        assert await store.find_allowed_overlaps(["s3://b/u"], "v", 9) == []
        assert await store.find_allowed_overlaps(["s3://b/v", "s3://b/u/d"], "u", 9) == []

    async def test_claims_only_grow_and_cannot_be_claimed_twice(self, store: GeneratorStore) -> None:
        await store.transact([build_claim("u", "s3://b/t")])
        await store.transact([build_claim("u", "s3://b/t/in", "s3://b/other")])
        assert await list_locations(store, "u") == ["s3://b/other", "s3://b/t"]
        with pytest.raises(BadRequest, match="UUID"):
            await store.transact([build_claim("u", "s3://b/new", fresh=True)])

    async def test_shared_folders_may_overlap_only_each_other(self, store: GeneratorStore) -> None:
        await store.transact([build_claim("u", "s3://b/t"), build_claim("u", "s3://b/common", shared=True)])
        await store.transact([build_claim("v", "s3://b/common", "s3://b/common/in", shared=True)])
        for rejected_claim in (
            build_claim("w", "s3://b/common"),
            build_claim("w", "s3://b/t", shared=True),
            build_claim("w", "s3://b/common/x"),
        ):
            with pytest.raises(BadRequest, match="overlaps"):
                await store.transact([rejected_claim])

    async def test_rejected_claim_undoes_its_transaction(self, store: GeneratorStore) -> None:
        await store.transact([build_claim("u", "s3://b/t")])
        with pytest.raises(BadRequest):
            await store.transact([build_claim("uuid-of-t", "s3://b/t/x"), CreateEntry(make_entry("t"))])
        assert await store.load_entry(TABLE, NS, "t") is None

    async def test_claims_belong_to_the_uuid_until_its_last_name_is_removed(self, store: GeneratorStore) -> None:
        uuid = "uuid-of-t"
        # The claim stays after a rename, a drop, an early release and a restoration.
        await store.transact([build_claim(uuid, "s3://b/t"), CreateEntry(make_entry("t"))])
        await store.transact([RenameEntry(TABLE, NS, "t", NS, "moved")])
        dropped_entry = DroppedEntry(
            id="d", entry=make_entry("moved"), purge=True, dropped_ms=1, expires_ms=2**60, principal_name="w"
        )
        await store.transact([DropEntry(TABLE, NS, "moved", keep=dropped_entry)])
        await store.transact([ReleaseLocations(uuid)])
        await store.transact([RestoreEntry("d", NS, "back")])
        assert await list_locations(store, uuid) == ["s3://b/t"]
        # A purge ends with the release of the claim.
        await store.transact([DropEntry(TABLE, NS, "back", keep=dropped_entry)])
        await store.transact([ForgetDropped("d", unshared=True)])
        assert await list_locations(store, uuid) == ["s3://b/t"], "the purge has not finished"
        await store.transact([ReleaseLocations(uuid)])
        assert await list_locations(store, uuid) == []
        # After a drop that keeps no name, the claim belongs to a retained entry. New entries of its namespace may use
        # its location.
        await store.transact([build_claim(uuid, "s3://b/t"), CreateEntry(make_entry("t"))])
        await store.transact([DropEntry(TABLE, NS, "t")])
        assert await list_locations(store, uuid) == ["s3://b/t"], "the files of the entry are not deleted yet"
        (retained_entry,) = await store.list_retained(NS, None, 9)
        assert (retained_entry.id, retained_entry.is_retained, retained_entry.entry.uuid) == (
            f"retained-{uuid}",
            True,
            uuid,
        )
        assert await store.find_dropped(retained_entry.id) == retained_entry
        assert await store.may_reuse_location(uuid, NS, "another")
        assert not await store.may_reuse_location(uuid, ("other",), "t")
        with pytest.raises(BadRequest, match="overlaps"):
            await store.transact([build_claim("v", "s3://b/t/in")])
        # The entry is listed if its files were not checked since the given time. At most 9 entries are listed.
        assert await store.list_unchecked(5, 9) == [retained_entry]
        await store.transact([RecordRetainedCheck(uuid, 7)])
        assert (await store.list_unchecked(7, 9), await store.list_unchecked(8, 9)) == ([], [retained_entry])
        # If the table returns under its name, the retained entry is removed.
        await store.transact([build_claim(uuid, "s3://b/t", returns=True), CreateEntry(make_entry("t"))])
        assert await store.list_retained(None, None, 9) == []
        await store.transact([DropEntry(TABLE, NS, "t")])
        await store.transact([ReleaseLocations(uuid)])
        assert (await list_locations(store, uuid), await store.list_retained(None, None, 9)) == ([], [])

    async def test_entry_is_retained_if_its_uuid_equals_the_id_of_another_entry(self, store: GeneratorStore) -> None:
        """A client can choose the id of a dropped entry as the UUID of its table, because it sees these ids.

        The stored ids of both entries must still differ. Otherwise the purge of one of them would fail, and a failed
        purge delays all other purges.
        """
        first_entry, second_entry = make_entry("t"), make_entry("u", uuid="dropped-1")
        await store.transact([build_claim(first_entry.uuid, "s3://b/t"), CreateEntry(first_entry)])
        dropped_entry = DroppedEntry(
            "dropped-1", first_entry, purge=False, dropped_ms=1, expires_ms=2, principal_name="ann"
        )
        await store.transact([DropEntry(TABLE, NS, "t", keep=dropped_entry)])
        await store.transact([ForgetDropped("dropped-1")])
        await store.transact([build_claim(second_entry.uuid, "s3://b/u"), CreateEntry(second_entry)])
        await store.transact([DropEntry(TABLE, NS, "u")])
        retained_entries = await store.list_retained(None, None, 9)
        assert {row.entry.uuid for row in retained_entries} == {first_entry.uuid, second_entry.uuid}
        for row in retained_entries:
            assert await store.find_dropped(row.id) == row

    async def test_names_without_claims_are_found_and_can_claim_without_a_check(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry(name)) for name in ("t", "u", "v")])
        dropped_entry = DroppedEntry(
            id="d", entry=make_entry("v"), purge=True, dropped_ms=1, expires_ms=2**60, principal_name="w"
        )
        await store.transact([DropEntry(TABLE, NS, "v", keep=dropped_entry)])
        assert sorted(entry.name for entry in await store.list_unclaimed("", 9)) == ["t", "u", "v"]
        first_page = await store.list_unclaimed("", 2)
        assert len(first_page) == 2
        remaining_entries = await store.list_unclaimed(first_page[-1].uuid, 9)
        assert sorted(entry.name for entry in (*first_page, *remaining_entries)) == ["t", "u", "v"]
        claims = [build_claim(f"uuid-of-{name}", "s3://b/same", checked=False) for name in ("t", "u", "v")]
        await store.transact(claims)
        assert await store.list_unclaimed("", 9) == []

    async def test_concurrent_claims_never_overlap(self, store: GeneratorStore, other_store: GeneratorStore) -> None:
        rng = random.Random(7)
        folders = ["s3://b", "s3://b/x", "s3://b/x/y", "s3://b/x/z", "s3://b/y", "s3://b/y/y"]
        requested_claims = [(f"u{number}", rng.choice(folders)) for number in range(40)]
        stores = (store, other_store)
        outcomes = await asyncio.gather(
            *(
                get_outcome(stores[n % 2].transact([build_claim(uuid, key)]))
                for n, (uuid, key) in enumerate(requested_claims)
            )
        )
        assert set(outcomes) == {"won", "bad_request"}
        claimed_locations = [await list_locations(store, uuid) for uuid, _ in requested_claims]
        won_locations = [key[0] for key in claimed_locations if key]
        assert len(won_locations) == outcomes.count("won")
        for location in won_locations:
            assert not any(other_location.startswith(f"{location}/") for other_location in won_locations)
        assert len(set(won_locations)) == len(won_locations)
