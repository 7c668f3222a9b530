"""The contract of every ObjectStore. The tests of each implementation inherit it.

A subclass provides the fixtures `store` and `base`, the location of an empty folder in the store.
"""

from __future__ import annotations

import asyncio

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest, ObjectExists, ObjectMissing, TooLarge
from seamark.metaserver.objects.port import ObjectStore


class ObjectStoreContract:
    """The tests that each object store passes. A subclass has the fixtures `store` and `base`."""

    async def test_created_object_can_be_read(self, store: ObjectStore, base: str) -> None:
        data = SystemClock().draw_bytes(100_000)
        await store.create(f"{base}/a/b/c.bin", data)
        assert await store.read(f"{base}/a/b/c.bin") == data
        assert await store.exists(f"{base}/a/b/c.bin")

    async def test_empty_object_is_an_object(self, store: ObjectStore, base: str) -> None:
        await store.create(f"{base}/empty", b"")
        assert await store.read(f"{base}/empty") == b""
        assert await store.exists(f"{base}/empty")

    async def test_names_with_special_characters_are_not_changed(self, store: ObjectStore, base: str) -> None:
        names = ["a b", "a%20b", "a+b", "ü-ß-漢", "p=x%2Fy", "~tilde", "(brackets)", "a&b=c;d", "'quote'"]
        for name in names:
            await store.create(f"{base}/{name}", name.encode())
        for name in names:
            assert await store.read(f"{base}/{name}") == name.encode()
        locations = {info.location async for info in store.list(base)}
        assert locations == {f"{base}/{name}" for name in names}

    async def test_absent_object_is_missing(self, store: ObjectStore, base: str) -> None:
        with pytest.raises(ObjectMissing, match="nothing-here"):
            await store.read(f"{base}/nothing-here")
        assert not await store.exists(f"{base}/nothing-here")

    async def test_folder_is_not_an_object(self, store: ObjectStore, base: str) -> None:
        await store.create(f"{base}/folder/object", b"x")
        with pytest.raises(ObjectMissing):
            await store.read(f"{base}/folder")
        assert not await store.exists(f"{base}/folder")

    async def test_create_never_overwrites_an_object(self, store: ObjectStore, base: str) -> None:
        await store.create(f"{base}/once", b"first")
        for second_data in (b"second", b"first"):
            with pytest.raises(ObjectExists, match="once"):
                await store.create(f"{base}/once", second_data)
        assert await store.read(f"{base}/once") == b"first"

    async def test_only_one_of_many_creators_succeeds_and_its_bytes_are_stored(
        self, store: ObjectStore, base: str
    ) -> None:
        bodies = [f"{number}".encode() * 5000 for number in range(20)]
        results = await asyncio.gather(
            *(store.create(f"{base}/race/here", body) for body in bodies), return_exceptions=True
        )
        winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
        assert len(winners) == 1, results
        assert all(isinstance(result, ObjectExists) for result in results if result is not None), results
        assert await store.read(f"{base}/race/here") == winners[0]

    async def test_read_of_more_bytes_than_the_limit_is_rejected(self, store: ObjectStore, base: str) -> None:
        await store.create(f"{base}/big", b"x" * 1001)
        assert len(await store.read(f"{base}/big", limit_bytes=1001)) == 1001
        with pytest.raises(TooLarge, match="1001 bytes; at most 1000"):
            await store.read(f"{base}/big", limit_bytes=1000)

    async def test_range_read_ends_at_the_end_of_the_object(self, store: ObjectStore, base: str) -> None:
        location = f"{base}/ranged"
        await store.create(location, bytes(range(200)))
        assert await store.read_range(location, 0, 10) == bytes(range(10))
        assert await store.read_range(location, 190, 10) == bytes(range(190, 200))
        assert await store.read_range(location, 190, 1000) == bytes(range(190, 200))
        assert await store.read_range(location, 200, 5) == b""
        assert await store.read_range(location, 5000, 5) == b""
        assert await store.read_range(location, 20, 0) == b""
        for start, length in ((-1, 5), (0, -5)):
            with pytest.raises(ValueError, match="range"):
                await store.read_range(location, start, length)
        with pytest.raises(ObjectMissing):
            await store.read_range(f"{base}/nothing", 0, 10)

    async def test_delete_removes_an_object_and_may_be_repeated(self, store: ObjectStore, base: str) -> None:
        await store.create(f"{base}/x", b"x")
        await store.delete(f"{base}/x")
        assert not await store.exists(f"{base}/x")
        await store.delete(f"{base}/x")
        await store.delete(f"{base}/never/was")
        await store.create(f"{base}/x", b"y")
        assert await store.read(f"{base}/x") == b"y"

    async def test_list_returns_exactly_the_objects_below_a_folder(self, store: ObjectStore, base: str) -> None:
        locations_inside = {f"{base}/t1/data/{number:02d}/f" for number in range(12)} | {f"{base}/t1/top"}
        for location in locations_inside:
            await store.create(location, b"123")
        await store.create(f"{base}/t10/other", b"")
        before_ms = SystemClock().now_ms()
        infos = [info async for info in store.list(f"{base}/t1")]
        assert {info.location for info in infos} == locations_inside
        assert {info.size_bytes for info in infos} == {3}
        assert all(abs(info.modified_ms - before_ms) < 600_000 for info in infos)

    async def test_missing_folder_lists_as_empty(self, store: ObjectStore, base: str) -> None:
        assert [info async for info in store.list(f"{base}/nowhere")] == []

    async def test_ping_of_a_reachable_store_raises_no_error(self, store: ObjectStore) -> None:
        await store.ping()

    @pytest.mark.parametrize(
        "tail", ["/../up", "/a/../../up", "//empty", "/./dot", "/%2e%2e/up", "/a?b", "/a#b", "/a\\b"]
    )
    async def test_ambiguous_location_is_rejected(self, store: ObjectStore, base: str, tail: str) -> None:
        for call in (store.read(base + tail), store.create(base + tail, b""), store.delete(base + tail)):
            with pytest.raises(BadRequest):
                await call
