"""POST …/commit over a real server, read back by PyIceberg."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.api.client import Api, new_key
from tests.commits.lake import BY_PART, Lake, Row
from tests.connector.lake import catalog_at


async def read(api: Api, name: str = "t", **options: Any) -> list[Row]:
    """What PyIceberg sees, in order."""

    def scan() -> list[Row]:
        with catalog_at(api.server.url) as catalog:
            found = catalog.load_table(f"db.{name}").scan(**options).to_arrow()
        return sorted(zip(*(found.column(one).to_pylist() for one in ("id", "part", "value")), strict=True), key=repr)

    return await asyncio.to_thread(scan)


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=repr)


async def test_an_append_to_an_empty_table_is_read_by_pyiceberg(api: Api) -> None:
    lake = await Lake.create(api)
    rows = [(1, 0, "a"), (2, 0, None), (None, 1, "c")]
    answer = await lake.append(rows)
    assert await read(api) == in_order(rows)
    metadata = await lake.metadata()
    assert metadata["current-snapshot-id"] == answer["snapshot-id"]
    assert answer["parent-snapshot-id"] is None
    assert (answer["operation"], answer["sequence-number"], answer["duplicate"]) == ("append", 1, False)
    assert answer["summary"]["added-records"] == answer["summary"]["total-records"] == "3"
    assert metadata["refs"]["main"] == {"type": "branch", "snapshot-id": answer["snapshot-id"]}


async def test_appends_follow_each_other_on_a_partitioned_table(api: Api) -> None:
    lake = await Lake.create(api, spec=BY_PART)
    first = await lake.append([(1, 0, "a")], [(2, 1, "b")])
    second = await lake.append([(3, 0, "c")])
    assert second["parent-snapshot-id"] == first["snapshot-id"]
    assert second["summary"]["total-data-files"] == "3"
    assert second["summary"]["changed-partition-count"] == "1"
    assert await read(api) == [(1, 0, "a"), (2, 1, "b"), (3, 0, "c")]
    assert await read(api, row_filter="part = 0") == [(1, 0, "a"), (3, 0, "c")]


async def test_a_repeat_with_its_idempotency_key_gets_the_first_answer(api: Api) -> None:
    lake = await Lake.create(api)
    body, key = {"add": [lake.data([(1, 0, "a")])]}, new_key()
    first = await lake.commit(body, key=key)
    await lake.append([(2, 0, "b")])
    again = await lake.commit(body, key=key)
    assert {**again, "metadata-location": ""} == {**first, "metadata-location": ""}
    assert await read(api) == [(1, 0, "a"), (2, 0, "b")]
    other = await lake.send({"add": [lake.data([(9, 0, "z")])]}, key=key)
    assert other.status == 422
