"""Tests of rows with columns that the table does not have, and of rows that arrive while the schema changes."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.metaserver.streams.incoming.dead_letters import DEAD_LETTER_TABLE
from seamark.metaserver.streams.incoming.new_columns import NEW_COLUMNS
from tests.seeds import first_seed, mark_fast
from tests.streams.incoming.test_dead_letters import create_dead_letter_table, read_dead_letter_rows
from tests.streams.test_rows_over_http import (
    ARROW,
    LINES,
    StreamServer,
    create_stream_table,
    encode_arrow,
    open_stream_server,
)


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={NEW_COLUMNS: "add"})
        yield stream


async def read_rows(stream: StreamServer) -> list[dict[str, Any]]:
    """Return the rows that unmodified PyIceberg reads, ordered by id."""

    def scan_rows() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = stream.catalog.load_table("db.t").scan().to_arrow().to_pylist()
        return sorted(rows, key=lambda row: row["id"])

    return await asyncio.to_thread(scan_rows)


async def read_columns(stream: StreamServer) -> dict[str, str]:
    table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
    return {field.name: str(field.field_type) for field in table.schema().fields}


async def test_table_gets_the_columns_of_json_rows_with_their_types(stream: StreamServer) -> None:
    await stream.post({"id": 1, "name": "a"})
    await stream.post(
        {"id": 2, "town": "Ulm", "size": 3, "ratio": 1, "is_new": True, "later": None}, {"id": 3, "ratio": 1.5}
    )
    new_types = {"town": "string", "size": "long", "ratio": "double", "is_new": "boolean"}
    column_types = await read_columns(stream)
    assert column_types | new_types == column_types
    assert "later" not in column_types
    for _ in range(2):
        first_row, second_row, third_row = await read_rows(stream)
        assert (first_row["id"], first_row["town"], first_row["ratio"]) == (1, None, None)
        assert (second_row["town"], second_row["size"], second_row["ratio"], second_row["is_new"]) == (
            "Ulm",
            3,
            1.0,
            True,
        )
        assert third_row["ratio"] == 1.5
        await stream.flush()
    status, message = await stream.send_and_read_error(b'{"id": 4, "size": "large"}\n', LINES)
    assert (status, 'the value "large" is not a valid long' in message) == (400, True)


async def test_table_gets_the_columns_of_arrow_rows_with_their_types(stream: StreamServer) -> None:
    day, timestamp = datetime.date(2026, 1, 31), datetime.datetime(2026, 1, 31, 12)
    body = encode_arrow(
        id=[1],
        born=pa.array([day]),
        at=pa.array([timestamp], pa.timestamp("us")),
        price=pa.array([Decimal("1.20")], pa.decimal128(9, 2)),
        small=pa.array([7], pa.int16()),
        nothing=pa.nulls(1),
    )
    assert (await stream.send(body, ARROW))[0] == 200
    new_types = {"born": "date", "at": "timestamp", "price": "decimal(9, 2)", "small": "int"}
    assert {name: kind for name, kind in (await read_columns(stream)).items() if name in new_types} == new_types
    (row,) = await read_rows(stream)
    assert (row["born"], row["at"], row["price"], row["small"]) == (day, timestamp, Decimal("1.20"), 7)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["id", "town"])
async def test_arrow_rows_with_a_column_twice_are_refused(stream: StreamServer, name: str) -> None:
    columns = [pa.array([1]), pa.nulls(1), pa.nulls(1)]
    batch = pa.RecordBatch.from_arrays(columns, names=["id", name, name])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    status, message = await stream.send_and_read_error(sink.getvalue().to_pybytes(), ARROW)
    assert (status, f"the column '{name}' twice" in message) == (400, True), message


async def test_concurrent_requests_that_add_columns_all_succeed(stream: StreamServer) -> None:
    rows = [{"id": number, "shared": number, f"own{number % 3}": "x"} for number in range(12)]
    await asyncio.gather(*(stream.post(row) for row in rows))
    assert {"shared", "own0", "own1", "own2"} <= (await read_columns(stream)).keys()
    for row, posted_row in zip(await read_rows(stream), rows, strict=True):
        assert {name: row[name] for name in posted_row} == posted_row


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": 1, "town": {"name": "Ulm"}}], "the new column 'town' have several types, or are objects or arrays"),
        ([{"id": 1, "town": "Ulm"}, {"id": 2, "town": 3}], "'town' have several types"),
        ([{"id": 1, "size": 1 << 70}], "which no long integer has"),
        ([{"id": 1, "NAME": "a"}], "differs from the column 'name' only in case"),
        ([{"id": 1, "": "a"}], "new column"),
        ([{"id": 1, **{f"c{number}": 1 for number in range(101)}}], "The rows have 101 new columns"),
        ([{"id": "x", "town": "Ulm"}], "column id"),
    ],
)
async def test_rows_whose_columns_cannot_be_added_are_refused(
    stream: StreamServer, rows: list[dict[str, Any]], message: str
) -> None:
    status, answer = await stream.send_and_read_error(json.dumps(rows).encode())
    assert (status, message in answer) == (400, True), answer
    assert await stream.ids() == []
    assert list(await read_columns(stream)) == ["id", "name", "day"]


def build_envelope(row_after: dict[str, Any], *fields: dict[str, Any], op: str = "c") -> dict[str, Any]:
    """Return a Debezium message. If `fields` are given, its schema has the column `id` and these fields."""
    payload = {"op": op, "before": None, "after": row_after}
    if not fields:
        return payload
    stated_fields = [{"field": "id", "type": "int64"}, *fields]
    return {"schema": {"fields": [{"field": "after", "fields": stated_fields}]}, "payload": payload}


async def send_envelopes(stream: StreamServer, *messages: Any) -> tuple[int, Any]:
    lines = b"\n".join(json.dumps(message).encode() for message in messages)
    return await stream.send(lines, LINES, "?envelope=debezium")


async def test_table_gets_the_columns_of_debezium_messages_with_the_types_of_their_schema(stream: StreamServer) -> None:
    fields = [
        {"field": "small", "type": "int32"},
        {"field": "ratio", "type": "float"},
        {"field": "raw", "type": "bytes"},
        {"field": "born", "type": "int32", "name": "io.debezium.time.Date"},
        {"field": "at", "type": "int64", "name": "io.debezium.time.MicroTimestamp"},
        {"field": "seen", "type": "string", "name": "io.debezium.time.ZonedTimestamp"},
        {"field": "kind", "type": "string", "name": "io.debezium.data.Enum"},
        {
            "field": "price",
            "type": "bytes",
            "name": "org.apache.kafka.connect.data.Decimal",
            "parameters": {"scale": "2", "connect.decimal.precision": "9"},
        },
        {"field": "later", "type": "int32"},
    ]
    row_after = {"id": 1, "small": 7, "ratio": 1, "raw": "AP8=", "born": 20_484, "at": 1_769_860_800_000_001}
    row_after |= {"seen": "2026-01-31T12:00:00Z", "kind": "x", "price": "+yc=", "later": None}
    wide_fields = [{"field": "small", "type": "int64"}]
    status, answer = await send_envelopes(
        stream,
        build_envelope(row_after, *fields),
        build_envelope({"id": 2, "small": 1 << 40}, *wide_fields),
        None,
        {"op": "m"},
    )
    assert status == 200, answer
    new_types = {"small": "long", "ratio": "float", "raw": "binary", "born": "date", "at": "timestamp"}
    new_types |= {"seen": "timestamptz", "kind": "string", "price": "decimal(9, 2)"}
    column_types = await read_columns(stream)
    assert column_types == {"id": "long", "name": "string", "day": "date"} | new_types
    for _ in range(2):
        first_row, second_row = await read_rows(stream)
        assert (first_row["small"], first_row["raw"], first_row["born"]) == (7, b"\x00\xff", datetime.date(2026, 1, 31))
        assert (str(first_row["price"]), first_row["kind"], second_row["small"]) == ("-12.41", "x", 1 << 40)
        await stream.flush()


async def test_table_gets_the_columns_of_debezium_messages_without_schema(stream: StreamServer) -> None:
    status, answer = await send_envelopes(
        stream,
        build_envelope({"id": 1, "town": "Ulm", "size": 3}),
        build_envelope({"id": 2, "town": None, "empty": None}, op="u"),
    )
    assert (status, "has the kind update, and the table has no key" in str(answer)) == (400, True)
    assert "town" not in await read_columns(stream)
    status, answer = await send_envelopes(
        stream,
        build_envelope({"id": 1, "town": "Ulm", "size": 3}),
        build_envelope({"id": 2, "town": None, "empty": None}),
    )
    assert status == 200, answer
    assert (await read_rows(stream))[0] | {"town": "Ulm", "size": 3} == (await read_rows(stream))[0]
    assert "empty" not in await read_columns(stream)
    for field, message in (
        ({"field": "place", "type": "struct"}, "several types, or are objects or arrays"),
        ({"field": "place", "type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}, "several types"),
    ):
        status, answer = await send_envelopes(stream, build_envelope({"id": 3, "place": "AA=="}, field))
        assert (status, message in str(answer)) == (400, True), answer


async def test_unavailable_debezium_value_adds_no_column(stream: StreamServer) -> None:
    status, answer = await send_envelopes(stream, build_envelope({"id": 1, "text": "__debezium_unavailable_value"}))
    assert (status, "replica identity" in str(answer)) == (400, True)
    assert "text" not in await read_columns(stream)


async def test_table_can_refuse_debezium_messages_with_new_columns(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_dead_letter_table(stream)
        await create_stream_table(stream, properties={DEAD_LETTER_TABLE: "db.t_errors", NEW_COLUMNS: "refuse"})
        status, answer = await send_envelopes(stream, build_envelope({"id": 1, "town": "Ulm"}))
        assert (status, "seamark.stream.new-columns refuses such rows" in str(answer)) == (400, True)


async def test_property_of_the_table_decides_whether_new_columns_are_added(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_dead_letter_table(stream)
        await create_stream_table(stream, properties={DEAD_LETTER_TABLE: "db.t_errors", NEW_COLUMNS: "refuse"})
        status, message = await stream.send_and_read_error(b'[{"id": 1}, {"id": 2, "town": "Ulm"}]')
        assert (status, "seamark.stream.new-columns refuses such rows" in message) == (400, True)
        for rule, expected in (("dead-letter", 200), ("add", 200), ("ask", 400)):  # The rule "ask" does not exist.
            table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
            change = table.transaction().set_properties({NEW_COLUMNS: rule})
            await asyncio.to_thread(change.commit_transaction)
            status, answer = await stream.send(b'[{"id": 1}, {"id": 2, "town": "Ulm"}]')
            assert status == expected, answer
        assert [json.loads(letter["raw"]) for letter in await read_dead_letter_rows(stream)] == [
            {"id": 2, "town": "Ulm"}
        ]
        assert await stream.ids() == [1, 1, 2]


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 30), 1))
async def test_rows_keep_their_values_while_the_schema_changes(tmp_path: Path, seed: int) -> None:
    """Rows are written with columns of earlier and of later schemas. The model has the values by column id."""
    rng = Random(seed)
    model: list[dict[int, Any]] = []
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "name", StringType()),
        NestedField(3, "size", IntegerType()),
    )
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema, properties={NEW_COLUMNS: "add", "format-version": rng.choice("23")})
        client = SeamarkClient(stream.server.url)
        for round_number in range(14):
            table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
            column_types = {field.name: field for field in table.schema().fields}
            other_columns = [name for name in column_types if name not in ("id", "size")]
            match rng.choice(("post", "post", "post", "new", "add", "rename", "drop", "widen", "flush")):
                case "post" | "new" as action:
                    rows = []
                    for number in range(rng.randint(1, 4)):
                        row: dict[str, Any] = {"id": 10 * round_number + number}
                        row |= {name: f"{name}.{round_number}" for name in other_columns if rng.random() < 0.6}
                        if rng.random() < 0.6:  # A long column gets a value that an int column could not store.
                            row["size"] = round_number + (
                                1 << 40 if str(column_types["size"].field_type) == "long" else 0
                            )
                        if action == "new":
                            row[f"new{round_number}"] = f"new.{round_number}.{number}"
                        rows.append(row)
                    await stream.post(*rows)
                    table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
                    ids = {field.name: field.field_id for field in table.schema().fields}
                    model += [{ids[name]: value for name, value in row.items()} for row in rows]
                case "add":
                    change = table.update_schema().add_column(f"added{round_number}", StringType())
                    await asyncio.to_thread(change.commit)
                case "rename" if other_columns:
                    change = table.update_schema().rename_column(rng.choice(other_columns), f"renamed{round_number}")
                    await asyncio.to_thread(change.commit)
                case "drop" if len(other_columns) > 1:
                    change = table.update_schema().delete_column(rng.choice(other_columns))
                    await asyncio.to_thread(change.commit)
                case "widen":
                    change = table.update_schema().update_column("size", field_type=LongType())
                    await asyncio.to_thread(change.commit)
                case "flush" if stream.server.components.streams.tables:
                    await stream.flush()
            table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
            fields = {field.name: field.field_id for field in table.schema().fields}
            expected = [{name: row.get(field_id) for name, field_id in fields.items()} for row in model]
            assert await read_rows(stream) == expected, round_number
            scanned_rows = await asyncio.to_thread(lambda: seamark.scan(client, "db.t").to_arrow().to_pylist())
            assert sorted(scanned_rows, key=lambda row: row["id"]) == expected, round_number
            if model:
                keys = [{"id": row[1]} for row in model]
                answer = await asyncio.to_thread(lambda keys=keys: seamark.get_rows(client, "db.t", keys).to_pylist())
                assert answer == expected, round_number
        streamed_rows = [
            row
            for batch in await asyncio.to_thread(lambda: list(seamark.read_stream(client, "db.t", follow=False)))
            for row in batch.rows.to_pylist()
        ]
        assert sorted(streamed_rows, key=lambda row: row["id"]) == expected
