"""Tests of keyed stream tables over HTTP.

Unmodified PyIceberg reads the latest row of each key, before and after flushes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
)

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.compaction import compact
from seamark.metaserver.planner.plan import planner
from seamark.metaserver.streams.keys import KEY
from seamark.metaserver.streams.stream_properties import SHARDS
from tests.seeds import examples, first_seed
from tests.streams.test_fresh_reads import FRESH
from tests.streams.test_rows_over_http import (
    ARROW,
    LINES,
    StreamServer,
    create_stream_table,
    encode_arrow,
    open_stream_server,
)

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType(), required=True),
    NestedField(3, "town", StringType()),
    identifier_field_ids=[1],
)
VERSIONS = ("2", "3")


@pytest.fixture(params=VERSIONS)
async def stream(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, SCHEMA, properties={"format-version": request.param})
        yield stream


async def read_names(stream: StreamServer, where: str | None = None) -> dict[int, str]:
    """Return the names by id, as unmodified PyIceberg reads them."""

    def scan_table() -> pa.Table:
        options = {"row_filter": where} if where else {}
        return stream.catalog.load_table("db.t").scan(**options).to_arrow()

    rows = (await asyncio.to_thread(scan_table)).to_pylist()
    names = {row["id"]: row["name"] for row in rows}
    assert len(names) == len(rows), "a key has several rows"
    return names


@pytest.mark.few_cases(1)
async def test_later_row_replaces_row_with_its_key_before_and_after_flush(stream: StreamServer) -> None:
    await stream.post({"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 1, "name": "c"})
    assert await read_names(stream) == {1: "c", 2: "b"}
    await stream.flush()
    assert await read_names(stream) == {1: "c", 2: "b"}
    await stream.post({"id": 2, "name": "d"}, {"id": 3, "name": "e"})
    assert await read_names(stream) == {1: "c", 2: "d", 3: "e"}
    assert await read_names(stream, "name = 'b'") == {}
    await stream.post({"id": 2, "name": "f"})
    assert await read_names(stream) == {1: "c", 2: "f", 3: "e"}
    await stream.flush()
    assert await read_names(stream) == {1: "c", 2: "f", 3: "e"}
    await stream.post({"id": 2, "name": "g"}, {"id": 1, "_op": "delete"})
    for _ in range(2):
        assert await read_names(stream) == {2: "g", 3: "e"}
        await stream.flush()


@pytest.mark.few_cases(1)
async def test_rows_of_a_file_with_deletes_are_replaced_by_several_fresh_snapshots(stream: StreamServer) -> None:
    """Each read makes a fresh snapshot, which adds the rows that are not flushed and deletes the rows they replace."""
    await stream.post(*({"id": number, "name": "a"} for number in range(100)))
    await stream.flush()
    expected = dict.fromkeys(range(100), "a")
    for round_number in range(3):
        await stream.post({"id": round_number, "_op": "delete"})
        await stream.flush()
        del expected[round_number]
        for key in range(50, 58):
            # The file has deletes already, so the server does not search for the rows of the earlier parts again.
            await stream.post({"id": key, "name": f"{round_number}.{key}"})
            expected[key] = f"{round_number}.{key}"
            assert await read_names(stream) == expected


@pytest.mark.few_cases(1)
async def test_rows_without_effect_are_flushed(stream: StreamServer) -> None:
    await stream.post({"id": 1, "_op": "delete"})
    await stream.flush()
    await stream.post({"id": 2, "name": "a"}, {"id": 2, "_op": "delete"})
    await stream.flush()
    (table,) = stream.server.components.streams.tables.values()
    assert table.unflushed_rows == 0
    assert await read_names(stream) == {}
    client = SeamarkClient(stream.server.url)
    batches = await asyncio.to_thread(
        lambda: list(seamark.read_stream(client, "db.t", from_=0, changes=True, follow=False))
    )
    kinds = [kind for batch in batches for kind in batch.rows.column("_change_type").to_pylist()]
    assert kinds == ["delete", "update", "delete"]


@pytest.mark.few_cases(1)
async def test_named_fresh_snapshot_keeps_the_rows_that_later_rows_replace(stream: StreamServer) -> None:
    def load(**plans: str) -> Table:
        return RestCatalog("fresh", uri=stream.server.url, **FRESH, **plans).load_table("db.t")

    def scan_table(table: Table) -> dict[int, str]:
        rows = table.scan(snapshot_id=table.metadata.current_snapshot_id).to_arrow().to_pylist()
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: row["name"] for row in rows}

    await stream.post({"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "name": "c"})
    await stream.flush()
    await stream.post({"id": 3, "_op": "delete"})
    await stream.flush()
    await stream.post({"id": 1, "name": "d"})
    tables = [await asyncio.to_thread(load), await asyncio.to_thread(load, **{"rest-scan-planning-enabled": "true"})]
    for change in ({"id": 2, "name": "e"}, {"id": 1, "_op": "delete"}):
        await stream.post(change)
        assert [await asyncio.to_thread(scan_table, table) for table in tables] == [{1: "d", 2: "b"}] * 2
        await stream.flush()
        assert [await asyncio.to_thread(scan_table, table) for table in tables] == [{1: "d", 2: "b"}] * 2
    assert await asyncio.to_thread(lambda: scan_table(load())) == {2: "e"}


@pytest.mark.slow
async def test_append_on_a_fresh_snapshot_with_deletes_adds_only_its_rows(tmp_path: Path) -> None:
    rows = pa.table(
        {"id": [9], "name": ["z"]},
        pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string(), nullable=False)]),
    )
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, SCHEMA)
        await stream.post({"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "name": "c"})
        await stream.flush()
        await stream.post({"id": 3, "_op": "delete"})
        await stream.flush()
        await stream.post({"id": 1, "name": "d"}, {"id": 2, "_op": "delete"})
        catalog = await asyncio.to_thread(lambda: RestCatalog("fresh", uri=stream.server.url, **FRESH))
        await asyncio.to_thread(lambda: catalog.load_table("db.t").append(rows))
        for _ in range(2):
            assert await read_names(stream) == {1: "d", 9: "z"}
            await stream.flush()


async def send_changes(stream: StreamServer, *messages: Any, query: str = "?envelope=debezium") -> Any:
    lines = b"\n".join(json.dumps(message).encode() for message in messages)
    status, answer = await stream.send(lines, LINES, query)
    assert status == 200, answer
    return answer


def build_change(op: str, row_before: Any = None, row_after: Any = None) -> dict[str, Any]:
    return {"op": op, "before": row_before, "after": row_after, "source": {"table": "t"}, "ts_ms": 1}


@pytest.mark.few_cases(1)
async def test_debezium_changes_are_applied_with_and_without_schema(stream: StreamServer) -> None:
    await send_changes(
        stream,
        build_change("r", row_after={"id": 1, "name": "a"}),
        {"payload": build_change("c", row_after={"id": 2, "name": "b"})},
        build_change("u", {"id": 1, "name": "a"}, {"id": 1, "name": "c"}),
        build_change("d", {"id": 2, "name": "b"}),
        None,
        {"schema": {"type": "struct", "fields": []}, "payload": build_change("c", row_after={"id": 3, "name": "d"})},
        build_change("u", {"id": 3, "name": "d"}, {"id": 4, "name": "d"}),
        {"op": "m", "message": {}},
    )
    for _ in range(2):
        assert await read_names(stream) == {1: "c", 4: "d"}
        await stream.flush()


@pytest.mark.few_cases(1)
async def test_request_of_only_tombstones_uses_the_number_of_its_producer(stream: StreamServer) -> None:
    for repetition in range(2):
        answer = await send_changes(stream, None, query="?envelope=debezium&producer=p&sequence=0")
        assert answer == {"rows": 0, "duplicate": repetition == 1, "positions": [], "rejected": 0, "token": ""}
    query = "?envelope=debezium&producer=p&sequence=1"
    await send_changes(stream, build_change("c", row_after={"id": 1, "name": "a"}), query=query)
    assert await read_names(stream) == {1: "a"}


async def test_debezium_values_are_converted_by_the_schema_of_the_message(tmp_path: Path) -> None:
    types = {"price": DecimalType(9, 2), "at": TimestampType(), "day": DateType(), "raw": BinaryType()}
    fields = [NestedField(number, name, kind) for number, (name, kind) in enumerate(types.items(), 2)]
    schema = Schema(NestedField(1, "id", LongType(), required=True), *fields, identifier_field_ids=[1])
    columns = [
        {"field": "id", "type": "int64"},
        {
            "field": "price",
            "type": "bytes",
            "name": "org.apache.kafka.connect.data.Decimal",
            "parameters": {"scale": "2"},
        },
        {"field": "at", "type": "int64", "name": "io.debezium.time.MicroTimestamp"},
        {"field": "day", "type": "int32", "name": "io.debezium.time.Date"},
        {"field": "raw", "type": "bytes"},
    ]
    row_after = {"id": 1, "price": "+yc=", "at": 1_769_860_800_000_001, "day": 20_484, "raw": "AP8="}
    message = {
        "schema": {"fields": [{"field": "after", "fields": columns}]},
        "payload": build_change("c", row_after=row_after),
    }
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema)
        await send_changes(stream, message)
        (row,) = await asyncio.to_thread(lambda: stream.catalog.load_table("db.t").scan().to_arrow().to_pylist())
    assert {name: str(value) for name, value in row.items()} == {
        "id": "1",
        "price": "-12.41",
        "at": "2026-01-31 12:00:00.000001",
        "day": "2026-01-31",
        "raw": str(b"\x00\xff"),
    }


async def test_changes_that_cannot_be_applied_are_refused_with_the_reason(stream: StreamServer) -> None:
    async def read_reason(message: Any, query: str = "?envelope=debezium") -> str:
        status, text = await stream.send_and_read_error(json.dumps([message]).encode(), query=query)
        assert status == 400
        return text

    assert 'Row 0 has the op "t"' in await read_reason(build_change("t"))
    assert "not an envelope of Debezium" in await read_reason({"id": 1, "name": "a"})
    assert "has no before" in await read_reason(build_change("d"))
    assert "has the op u and no after" in await read_reason(build_change("u", {"id": 1}))
    assert "replica identity" in await read_reason(
        build_change("u", row_after={"id": 1, "name": "__debezium_unavailable_value"})
    )
    assert "the before [1]" in await read_reason(build_change("d", [1]))
    assert "envelope is 'avro'" in await read_reason(build_change("c"), "?envelope=avro")
    assert 'Row 0 has the _op "upsert"' in await read_reason({"id": 1, "name": "a", "_op": "upsert"}, "")
    assert "Row 0 has no value in the column id" in await read_reason({"_op": "delete"}, "")
    assert "column name is required" in await read_reason({"id": 1, "_op": "update"}, "")
    status, text = await stream.send_and_read_error(encode_arrow(id=[1], name=["a"], _op=["merge"]), ARROW)
    assert (status, 'Row 0 has the _op "merge"' in text) == (400, True)
    assert await read_names(stream) == {}


@pytest.mark.few_cases(1)
async def test_kinds_of_arrow_rows_are_applied(stream: StreamServer) -> None:
    await stream.send(encode_arrow(id=[1, 2, 3], name=["a", "b", "c"]), ARROW)
    names = pa.array([None, "d", "e"], pa.string())
    status, _ = await stream.send(encode_arrow(id=[1, 2, 4], name=names, _op=["delete", None, "insert"]), ARROW)
    assert status == 200
    assert await read_names(stream) == {2: "d", 3: "c", 4: "e"}


async def test_table_without_key_accepts_only_inserts(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, SCHEMA, properties={KEY: ""})
        await stream.post({"id": 1, "name": "a", "_op": "insert"}, {"id": 1, "name": "b"})
        assert await stream.ids() == [1, 1]
        for kind in ("update", "delete"):
            body = json.dumps([{"id": 1, "name": "a"}, {"id": 1, "name": "a", "_op": kind}]).encode()
            status, text = await stream.send_and_read_error(body)
            assert (status, f"Row 1 has the kind {kind}, and the table has no key" in text) == (400, True)


async def test_invalid_key_is_refused_with_the_column(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, SCHEMA, properties={KEY: "id, city"})
        status, text = await stream.send_and_read_error(b'[{"id": 1, "name": "a"}]')
        assert (status, "names the column 'city'" in text) == (400, True)


@pytest.mark.slow
async def test_rows_of_a_key_of_several_columns_stay_in_order_over_shards(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, SCHEMA, properties={KEY: "town,id", SHARDS: "4"})
        towns = ["x", "y", "z"]
        for round_number in range(3):
            await stream.post(
                *({"id": number, "town": town, "name": f"{round_number}"} for number in range(5) for town in towns)
            )
            if round_number == 1:
                await stream.flush()
        await stream.post({"id": 0, "town": "x", "_op": "delete"})
        rows = await asyncio.to_thread(lambda: stream.catalog.load_table("db.t").scan().to_arrow().to_pylist())
        assert sorted((row["id"], row["town"], row["name"]) for row in rows) == sorted(
            (number, town, "2") for number in range(5) for town in towns if (number, town) != (0, "x")
        )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("key", ["id", None])
async def test_unflushed_rows_keep_their_key_after_schema_changes(tmp_path: Path, key: str | None) -> None:
    narrow_schema = Schema(
        NestedField(1, "id", IntegerType(), required=True),
        NestedField(2, "name", StringType()),
        identifier_field_ids=[] if key else [1],
    )
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, narrow_schema, properties={KEY: key} if key else {})
        await stream.post({"id": 1, "name": "a"}, {"id": 2, "name": "b"})
        await stream.flush()
        await stream.post({"id": 1, "name": "c"}, {"id": 3, "name": "d"})
        assert await read_names(stream) == {1: "c", 2: "b", 3: "d"}  # The read has put the rows into fresh files.

        def change_schema() -> None:
            with stream.catalog.load_table("db.t").update_schema() as update:
                update.rename_column("id", "number")
                update.update_column("id", LongType())
                update.add_column("more", StringType())

        await asyncio.to_thread(change_schema)
        row = {"number": 3_000_000_000, "name": "e", "more": "m"}
        if key:
            status, text = await stream.send_and_read_error(json.dumps([row]).encode())
            assert (status, "names the column 'id'" in text) == (400, True)
        else:
            await stream.post(row, {"number": 3, "name": "f"})
        for _ in range(2):
            rows = await asyncio.to_thread(lambda: stream.catalog.load_table("db.t").scan().to_arrow().to_pylist())
            names = sorted((row["number"], row["name"]) for row in rows)
            assert names[:2] == [(1, "c"), (2, "b")]
            assert names[2:] == ([(3, "d")] if key else [(3, "f"), (3_000_000_000, "e")])
            await stream.flush()


async def test_table_that_gets_a_key_replaces_unflushed_rows(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, SCHEMA, properties={KEY: ""})
        await stream.post({"id": 1, "name": "a"}, {"id": 2, "name": "b"})
        assert await read_names(stream) == {1: "a", 2: "b"}

        def set_key(key_columns: str) -> None:
            with stream.catalog.load_table("db.t").transaction() as change:
                change.set_properties({KEY: key_columns})

        await asyncio.to_thread(set_key, "id")
        await stream.post({"id": 1, "name": "c"})
        assert await read_names(stream) == {1: "c", 2: "b"}
        await stream.post({"id": 2, "_op": "delete"})
        await asyncio.to_thread(set_key, "")
        await stream.post({"id": 4, "name": "e"})
        for _ in range(2):
            assert await read_names(stream) == {1: "c", 4: "e"}
            await stream.flush()


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(4, number_in_ordinary_runs=1)))
async def test_random_changes_equal_a_dictionary(tmp_path: Path, seed: int) -> None:
    """The changes come from stream writers and batch writers.

    Flushes, compactions, index builds and restarts run between them.
    """
    rng = Random(seed)
    model: dict[int, str] = {}
    number = 0
    properties = {"format-version": rng.choice(VERSIONS), SHARDS: rng.choice(("1", "3"))}
    properties |= {"write.merge.mode": rng.choice(("merge-on-read", "copy-on-write"))}
    properties |= rng.choice(({}, {"seamark.index.ids": "record(id)"}))
    partition = PartitionSpec(PartitionField(1, 1000, BucketTransform(3), "bucket"))
    spec = {"partition_spec": partition} if rng.random() < 0.5 else {}
    for run_number in range(3):
        async with open_stream_server(tmp_path) as stream:
            client = IndexClient(stream.server.url)
            if run_number == 0:
                await create_stream_table(stream, SCHEMA, properties=properties, **spec)
            for _ in range(12):
                step = rng.choice(("write", "write", "write", "read", "read", "flush", "upsert", "delete", "compact"))
                if step == "write":
                    rows: list[dict[str, Any]] = []
                    for _ in range(rng.randint(1, 8)):
                        number += 1
                        key = rng.randint(0, 30)
                        if rng.random() < 0.25:
                            rows.append({"id": key, "_op": "delete"})
                            model.pop(key, None)
                        else:
                            rows.append({"id": key, "name": f"n{number}"})
                            model[key] = f"n{number}"
                    await stream.post(*rows)
                elif step == "flush":
                    if stream.server.components.streams.tables:
                        await stream.flush()
                elif step == "upsert":
                    number += 1
                    corrected_names = {rng.randint(0, 30): f"n{number}" for _ in range(3)}
                    table = pa.table({"id": list(corrected_names), "name": list(corrected_names.values())})
                    await asyncio.to_thread(seamark.upsert, client, ("db", "t"), table, keys=["id"])
                    model |= corrected_names
                elif step == "delete":
                    key = rng.randint(0, 30)
                    await asyncio.to_thread(seamark.delete, client, ("db", "t"), where=f"id = {key}")
                    model.pop(key, None)
                elif step == "compact":
                    await asyncio.to_thread(compact, client, "db.t")
                else:
                    assert await read_names(stream) == model
            assert await read_names(stream) == model


@pytest.mark.slow
async def test_flush_needs_only_one_thread_of_the_default_executor(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream.post({"id": 1, "name": "a"})
    await stream.flush()
    # With this patch, plans are made in threads, as for large tables.
    monkeypatch.setattr(planner, "_is_quick", lambda *args: False)
    await stream.post({"id": 1, "name": "b"})
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    try:
        async with asyncio.timeout(60):
            assert await stream.flush() == 1
    finally:
        loop.set_default_executor(ThreadPoolExecutor())
    assert await read_names(stream) == {1: "b"}
