"""Tests of the current rows of given keys before and after their flush, in tables with and without a record index."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import Unavailable
from seamark.metaserver.streams import keyed_gets
from seamark.metaserver.streams.keys import KEY
from seamark.metaserver.streams.row_files import GetLimits
from tests.seeds import first_seed, mark_fast
from tests.streams.test_read_stream import append_batch
from tests.streams.test_rows_over_http import SCHEMA, StreamServer, create_stream_table, open_stream_server
from tests.waits import until


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={KEY: "id", "format-version": "3"})
        yield stream


async def post_keys(stream: StreamServer, body: Any, **headers: str) -> tuple[int, Any]:
    url = f"{stream.server.url}/api/v1/tables/db/t/rows/get"
    async with stream.server.http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def get_rows(stream: StreamServer, *keys: Any, **body: Any) -> Any:
    status, answer = await post_keys(stream, {"keys": list(keys), **body})
    assert status == 200, answer
    return answer


async def read_refusal(stream: StreamServer, body: Any, status: int = 400) -> str:
    actual_status, answer = await post_keys(stream, body)
    assert actual_status == status, answer
    return str(answer["error"]["message"])


async def test_rows_of_keys_are_returned_before_and_after_their_flush(stream: StreamServer) -> None:
    assert await get_rows(stream, 1) == {"rows": [], "missing": [0]}
    await stream.post({"id": 1, "name": "a", "day": "2026-01-31"}, {"id": 2, "name": "b"})
    for _ in range(2):
        answer = await get_rows(stream, 2, 7, 1, 2)
        assert answer == {
            "rows": [{"id": 2, "name": "b", "day": None}, {"id": 1, "name": "a", "day": "2026-01-31"}],
            "missing": [1],
        }
        await stream.flush()
    await stream.post({"id": 1, "name": "c"}, {"id": 2, "_op": "delete"})
    for _ in range(2):
        assert await get_rows(stream, {"id": 1}, {"id": 2}, select=["name"]) == {
            "rows": [{"name": "c"}],
            "missing": [1],
        }
        await stream.flush()
    assert await get_rows(stream) == {"rows": [], "missing": []}
    assert await get_rows(stream, {"name": "c"}, select=["id"]) == {"rows": [{"id": 1}], "missing": []}


async def test_get_with_a_token_has_the_rows_of_the_token_or_is_refused(stream: StreamServer) -> None:
    client = SeamarkClient(stream.server.url, retries=0)
    await append_batch(stream, 0)
    token = (await stream.post({"id": 1, "name": "a"}))["token"]
    rows = await asyncio.to_thread(lambda: seamark.get_rows(client, "db.t", [1, 0], after=token, columns=["id"]))
    assert rows.to_pylist() == [{"id": 1}, {"id": 0}]
    late_token = token.rpartition(":")[0] + ":99"
    with pytest.raises(Unavailable, match="needs the rows up to offset 99"):
        await asyncio.to_thread(lambda: seamark.get_rows(client, "db.t", [1], after=late_token))


async def test_invalid_or_too_large_request_is_refused_with_the_reason(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "keys: Row 1, column id" in await read_refusal(stream, {"keys": [1, "x"]})
    assert "the column 'town'" in await read_refusal(stream, {"keys": [{"town": 1}]})
    assert "keys[1] has other columns than keys[0]" in await read_refusal(stream, {"keys": [{"id": 1}, {"name": "a"}]})
    assert "keys[0] names no column" in await read_refusal(stream, {"keys": [{}]})
    assert "keys[0] has a null" in await read_refusal(stream, {"keys": [None]})
    assert "the column 'town'" in await read_refusal(stream, {"keys": [1], "select": ["town"]})
    assert "select has the column id twice" in await read_refusal(stream, {"keys": [1], "select": ["id", "id"]})
    assert "select has no column" in await read_refusal(stream, {"keys": [1], "select": []})
    assert "the limit is 1,000" in await read_refusal(stream, {"keys": list(range(1001))}, 413)
    await append_batch(stream, 1, 1, 1)
    await append_batch(stream, 1)
    monkeypatch.setattr(keyed_gets, "LIMITS", GetLimits(rows_max=3, bytes_max=1 << 20, files_max=9))
    assert "have more than 3 rows, which is the limit" in await read_refusal(stream, {"keys": [1]}, 413)
    monkeypatch.setattr(keyed_gets, "LIMITS", GetLimits(rows_max=9, bytes_max=9, files_max=9))
    assert "more than 9 bytes" in await read_refusal(stream, {"keys": [1]}, 413)
    monkeypatch.setattr(keyed_gets, "LIMITS", GetLimits(rows_max=9, bytes_max=1 << 20, files_max=1))
    assert "may be in 2 files; the limit is 1" in await read_refusal(stream, {"keys": [1]}, 413)


async def test_key_with_a_nested_column_is_refused_before_its_values_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "tags", ListType(3, StringType(), element_required=False)),
    )
    monkeypatch.delattr("seamark.metaserver.api.streams.gets.to_batch")
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema)
        message = await read_refusal(stream, {"keys": [{"id": 1, "tags": ["a"]}]})
    assert "the column 'tags', but a struct, list or map cannot be in a key" in message


async def test_gets_of_one_principal_cannot_use_all_threads() -> None:
    running_counts, running_max = Counter[str](), Counter[str]()
    may_end = threading.Event()

    def get_rows(keys: str, *_: Any) -> tuple[pa.Table, list[int]]:
        running_counts[keys] += 1
        running_max[keys] = max(running_max[keys], running_counts[keys])
        may_end.wait(60)
        running_counts[keys] -= 1
        return pa.table({}), []

    # These objects have only the attributes that `KeyedGets` uses, so they are cast to any type.
    row_files, search = SimpleNamespace(get=get_rows), SimpleNamespace(open=lambda *_: None)
    gets = keyed_gets.KeyedGets(cast("Any", row_files), cast("Any", search))
    loaded_table = cast("Any", SimpleNamespace(entry=1, metadata=2))
    calls = [gets.get(loaded_table, cast("Any", name), [], name) for name in ("ann",) * 6 + ("bob",)]
    tasks = [asyncio.create_task(call) for call in calls]
    await until(lambda: running_counts == {"ann": 2, "bob": 1})
    tasks[0].cancel()  # Its thread still runs, so no other get of ann may begin.
    await asyncio.sleep(0.05)  # Another get would begin in this time.
    assert running_counts == {"ann": 2, "bob": 1}
    may_end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert running_max == {"ann": 2, "bob": 1}
    gets.close()


async def test_rows_of_an_ordinary_table_are_read_by_key_columns(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await asyncio.to_thread(stream.catalog.create_table, "db.t", SCHEMA)
        await append_batch(stream, 1, 2, 2)
        assert "the table has no key" in await read_refusal(stream, {"keys": [2]})
        answer = await get_rows(stream, {"id": 2}, {"id": 3}, select=["id"])
        assert answer == {"rows": [{"id": 2}, {"id": 2}], "missing": [1]}


TYPES = Schema(
    NestedField(1, "id", UUIDType(), required=True),
    NestedField(2, "price", DecimalType(9, 2)),
    NestedField(3, "day", DateType()),
    NestedField(4, "at", TimestampType()),
    NestedField(5, "atz", TimestamptzType()),
    NestedField(6, "clock", TimeType()),
    NestedField(7, "data", BinaryType()),
    NestedField(8, "x", DoubleType()),
    NestedField(9, "place", StructType(NestedField(10, "town", StringType()), NestedField(11, "day", DateType()))),
    NestedField(12, "days", ListType(13, DateType(), element_required=False)),
    NestedField(14, "sizes", MapType(15, StringType(), 16, ListType(17, LongType()))),
)


async def test_values_of_all_types_have_the_form_of_appended_rows(tmp_path: Path) -> None:
    ids = [str(UUID(int=number)) for number in range(4)]
    full_row = {
        "price": "-12.30",
        "day": "2026-01-31",
        "at": "2026-01-31T10:00:00.000001",
        "atz": "2026-01-31T10:00:00+00:00",
        "clock": "23:59:59.500000",
        "data": "00FF",
        "x": 1.5,
        "place": {"town": "Ulm", "day": "1969-12-31"},
        "days": ["2026-01-31", None],
        "sizes": {"keys": ["a", "b"], "values": [[1, 2], []]},
    }
    extreme_row = {"day": "9999-12-31", "x": "NaN", "place": {"town": None, "day": None}, "days": []}
    posted_rows = [
        {"id": ids[0], **full_row},
        {"id": ids[1]},
        {"id": ids[2], **full_row, "place": None},
        {"id": ids[3], **extreme_row},
    ]
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, TYPES, properties={KEY: "id"})
        status, answer = await stream.send(json.dumps(posted_rows).encode())
        assert status == 200, answer
        expected = [dict.fromkeys([field.name for field in TYPES.fields]) | row for row in posted_rows]
        answer = await get_rows(stream, *ids[::-1])
        assert answer == {"rows": expected[::-1], "missing": []}
        client = SeamarkClient(stream.server.url)
        rows = await asyncio.to_thread(lambda: seamark.get_rows(client, "db.t", [UUID(ids[0])]))
        (row,) = rows.to_pylist()
        assert (row["price"], row["day"]) == (decimal.Decimal("-12.30"), datetime.date(2026, 1, 31))
        for key in ({"day": datetime.date(2026, 1, 31)}, {"data": b"\x00\xff"}, {"price": decimal.Decimal("-12.30")}):
            found_rows = await asyncio.to_thread(lambda key=key: seamark.get_rows(client, "db.t", [key], columns=["x"]))
            assert found_rows.num_rows == 2, key


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 40), 1))
async def test_gets_of_random_keys_equal_a_dictionary_of_the_rows(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    expected: dict[int, str] = {}
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={KEY: "id", "format-version": rng.choice("23")})
        client = SeamarkClient(stream.server.url)
        if rng.random() < 0.6:
            index = {"kind": "record", "columns": ["id"]}
            async with stream.server.http.put(
                f"{stream.server.url}/api/v1/tables/db/t/indexes/r", json=index
            ) as answer:
                assert answer.status in (200, 201), await answer.text()
        for round_number in range(12):
            ids = rng.sample(range(20), rng.randint(1, 6))
            match rng.choice(("post", "post", "delete", "flush", "upsert")):
                case "post":
                    await stream.post(*({"id": key, "name": f"{round_number}.{key}"} for key in ids))
                    expected |= {key: f"{round_number}.{key}" for key in ids}
                case "delete":
                    await stream.post(*({"id": key, "_op": "delete"} for key in ids))
                    expected = {key: name for key, name in expected.items() if key not in ids}
                case "flush" if stream.server.components.streams.tables:
                    await stream.flush()
                case "upsert" if expected:
                    rows = pa.table({"id": pa.array(ids, pa.int64()), "name": [f"{round_number}.{key}" for key in ids]})
                    await asyncio.to_thread(seamark.upsert, client, "db.t", rows, keys=["id"])
                    expected |= {key: f"{round_number}.{key}" for key in ids}
            requested_ids = [rng.randrange(22) for _ in range(rng.randint(0, 12))]
            answer = await get_rows(stream, *requested_ids, select=["id", "name"])
            distinct_ids = list(dict.fromkeys(requested_ids))
            assert answer == {
                "rows": [{"id": key, "name": expected[key]} for key in distinct_ids if key in expected],
                "missing": [requested_ids.index(key) for key in distinct_ids if key not in expected],
            }
