"""Tests of stream tables whose key changes while rows wait and appends run.

Unmodified PyIceberg reads the latest row of each key.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, DecimalType, LongType, NestedField, StringType

from seamark.connector.client.client import SeamarkClient
from seamark.connector.read.scans import scan
from seamark.connector.streams import row_files
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.streams.appends import TableRows
from seamark.metaserver.streams.incoming.prepared_rows import RowPreparation
from seamark.metaserver.streams.keys import KEY
from seamark.metaserver.streams.stream_properties import SHARDS
from tests.seeds import examples, first_seed
from tests.streams.test_rows_over_http import (
    ARROW,
    StreamServer,
    create_stream_table,
    encode_arrow,
    open_stream_server,
    yield_body,
)
from tests.waits import PATIENCE_S, until

CHANGED_NAMES = ("a-b", "a_x2Db", "a b", "1x")
"""Column names that Iceberg changes in files. The first name would be changed to the second."""


async def read_rows(stream: StreamServer) -> list[dict[str, Any]]:
    """Return the rows that unmodified PyIceberg reads."""
    rows: list[dict[str, Any]] = await asyncio.to_thread(
        lambda: stream.catalog.load_table("db.t").scan().to_arrow().to_pylist()
    )
    return rows


async def commit_updates(stream: StreamServer, *updates: dict[str, Any]) -> int:
    url = f"{stream.server.url}/v1/namespaces/db/tables/t"
    async with stream.server.http.post(url, json={"requirements": [], "updates": list(updates)}) as answer:
        return answer.status


async def set_key(stream: StreamServer, key_columns: str, action: str = "set-properties") -> None:
    assert await commit_updates(stream, {"action": action, "updates": {KEY: key_columns}}) == 200


async def promote_column(stream: StreamServer, name: str) -> None:
    def update() -> None:
        with stream.catalog.load_table("db.t").update_schema() as change:
            change.update_column(name, DecimalType(20, 2))

    await asyncio.to_thread(update)


async def test_key_columns_whose_names_are_changed_in_files_are_found(tmp_path: Path) -> None:
    """Iceberg changes column names with special characters in data files.

    The table has several shards, and its key changes from column to column while rows wait.
    """
    fields = [NestedField(number, name, LongType()) for number, name in enumerate(CHANGED_NAMES, 1)]
    schema = Schema(*fields, NestedField(5, "v-1", StringType(), required=True))
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(
            stream, schema, properties={"format-version": "2", SHARDS: "4", KEY: CHANGED_NAMES[0]}
        )
        expected: dict[int, str] = {}
        for number, key in enumerate([*CHANGED_NAMES, "1x , a-b"]):
            # Actions are accepted in any case.
            await set_key(stream, key, "Set-Properties" if number % 2 else "set-properties")
            rows = [dict.fromkeys(CHANGED_NAMES, value) | {"v-1": f"{number}.{value}"} for value in range(8)]
            await stream.post(*rows)
            await stream.post(*(dict.fromkeys(CHANGED_NAMES, number) | {"_op": "delete"} for _ in range(2)))
            expected = {value: f"{number}.{value}" for value in range(8) if value != number}
            status, _ = await stream.send(
                encode_arrow(**{name: [9] for name in CHANGED_NAMES}, **{"v-1": [None], "_op": ["delete"]}), ARROW
            )
            assert status == 200
            if number % 2:
                assert sorted((row["a-b"], row["v-1"]) for row in await read_rows(stream)) == sorted(expected.items())
        for _ in range(2):  # The rows are the same before and after a flush.
            assert sorted((row["a b"], row["v-1"]) for row in await read_rows(stream)) == sorted(expected.items())
            await stream.flush()


@pytest.mark.slow
async def test_rows_with_a_promoted_key_replace_unflushed_rows(tmp_path: Path) -> None:
    schema = Schema(
        NestedField(1, "k", DecimalType(10, 2), required=True),
        NestedField(2, "v", StringType()),
        identifier_field_ids=[1],
    )
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema, properties={"format-version": "2", SHARDS: "8"})
        await stream.post({"k": "0.01", "v": "first"})
        await stream.flush()
        await stream.post(*({"k": f"{number}.50", "v": "old"} for number in range(12)))
        assert len(await read_rows(stream)) == 13
        await promote_column(stream, "k")
        await stream.post(*({"k": f"{number}.50", "v": "new"} for number in range(11)), {"k": "11.50", "_op": "delete"})
        for _ in range(2):
            assert sorted((str(row["k"]), row["v"]) for row in await read_rows(stream)) == sorted(
                [("0.01", "first"), *((f"{number}.50", "new") for number in range(11))]
            )
            await stream.flush()


@pytest.mark.slow
async def test_return_to_an_earlier_schema_flushes_rows_by_their_key(tmp_path: Path) -> None:
    """The first return changes the key of the table. The second return drops the key column."""
    schema = Schema(
        NestedField(1, "a", LongType(), required=True),
        NestedField(2, "v", StringType()),
        identifier_field_ids=[1],
    )
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema, properties={"format-version": "2", SHARDS: "4"})

        def add_column() -> None:
            with stream.catalog.load_table("db.t").update_schema(allow_incompatible_changes=True) as change:
                change.add_column("b", LongType(), required=True)
                change.set_identifier_fields("b")

        await asyncio.to_thread(add_column)
        await stream.post(*({"a": number, "b": 100 + number, "v": "old"} for number in range(8)))
        await stream.post({"a": 1, "b": 107, "v": "second"})
        assert await commit_updates(stream, {"action": "set-current-schema", "schema-id": 0}) == 200
        await stream.post(*({"a": number, "v": "new"} for number in range(6)))
        for _ in range(2):  # The rows are the same before and after a flush.
            rows = sorted((row["a"], row["v"]) for row in await read_rows(stream))
            assert rows == [*((number, "new") for number in range(6)), (6, "old")]
            await stream.flush()
        assert await commit_updates(stream, {"action": "set-current-schema", "schema-id": 1}) == 200
        await set_key(stream, "b")
        await stream.post({"a": 9, "b": 106, "v": "third"})
        assert await commit_updates(stream, {"action": "set-current-schema", "schema-id": 0}) == 200
        rows = sorted((row["a"], row["v"]) for row in await read_rows(stream))
        assert rows == [*((number, "new") for number in range(6)), (9, "third")]


async def test_table_can_be_changed_after_a_failed_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema(NestedField(1, "a", LongType()), NestedField(2, "b", LongType()), NestedField(3, "v", StringType()))
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema, properties={"format-version": "2", SHARDS: "4", KEY: "a"})
        values = ((1, 1, "zero"), (1, 2, "one"), (2, 2, "two"), (1, 3, "three"))
        await stream.post(*({"a": a, "b": b, "v": value} for a, b, value in values))
        with monkeypatch.context() as patch:

            def fail(*args: object) -> None:
                raise KeyError("a bug of the encoder")

            patch.setattr(row_files, "encode_keyed_rows", fail)
            await set_key(stream, "b")
            await stream.post({"a": 4, "b": 2, "v": "four"})
        for _ in range(2):
            # The waiting rows replace rows with the same `a`. The last row replaces one of them, which has the same
            # `b`.
            assert sorted((row["a"], row["b"], row["v"]) for row in await read_rows(stream)) == [
                (1, 3, "three"),
                (4, 2, "four"),
            ]
            await stream.flush()


async def test_dates_beyond_the_range_of_a_promoted_key_replace_stored_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder fails until the key is promoted from a date to nanoseconds, so no flush happens before."""
    schema = Schema(NestedField(1, "day", DateType(), required=True), NestedField(2, "v", StringType()))
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema, properties={"format-version": "3", KEY: "day"})
        await stream.post(*({"day": day, "v": "old"} for day in ("9999-12-31", "2026-01-02", "0001-01-01")))
        await stream.flush()
        with monkeypatch.context() as patch:

            def fail(*args: object) -> None:
                raise KeyError("a bug of the encoder")

            patch.setattr(row_files, "encode_keyed_rows", fail)
            await stream.post({"day": "9999-12-31", "v": "new"}, {"day": "2026-01-02", "v": "new"})
            await stream.post({"day": "0001-01-01", "_op": "delete"}, {"day": "9000-01-01", "v": "new"})
            fields = [
                {"id": 1, "name": "day", "type": "timestamp_ns", "required": True},
                {"id": 2, "name": "v", "type": "string", "required": False},
            ]
            promotion = {"action": "add-schema", "schema": {"type": "struct", "fields": fields}}
            assert await commit_updates(stream, promotion, {"action": "set-current-schema", "schema-id": -1}) == 200
        assert await stream.flush() == 4
        url = f"{stream.server.url}/v1/namespaces/db/tables/t/plan"
        above_filter = {"type": "gt", "term": "day", "value": "2026-01-01T00:00:00"}
        async with stream.server.http.post(url, json={"filter": above_filter}) as answer:
            plan = await answer.json()
            assert (answer.status, len(plan["file-scan-tasks"])) == (200, 1), plan
        # A later key within the range of the type is found, although a stored file has dates beyond the range.
        await stream.post({"day": "2026-01-02T00:00:00", "_op": "delete"})
        assert await stream.flush() == 1
        assert await commit_updates(stream, {"action": "set-current-schema", "schema-id": 0}) == 200
        rows = sorted((row["day"].isoformat(), row["v"]) for row in await read_rows(stream))
        assert rows == [("9000-01-01", "new"), ("9999-12-31", "new")]


async def test_rows_are_flushed_before_their_partition_column_is_promoted(tmp_path: Path) -> None:
    schema = Schema(NestedField(1, "day", DateType()), NestedField(2, "v", StringType()))
    by_day = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "day"))
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema, partition_spec=by_day, properties={"format-version": "3"})
        await stream.post({"day": "2026-01-01", "v": "a"})
        await stream.flush()
        await stream.post({"day": "2026-01-02", "v": "b"})
        fields = [
            {"id": 1, "name": "day", "type": "timestamp", "required": False},
            {"id": 2, "name": "v", "type": "string", "required": False},
        ]
        promotion = {"action": "add-schema", "schema": {"type": "struct", "fields": fields}}
        assert await commit_updates(stream, promotion, {"action": "set-current-schema", "schema-id": -1}) == 200
        (table,) = stream.server.components.streams.tables.values()
        assert table.unflushed_rows == 0
        await stream.post({"day": "2026-01-03T00:00:00", "v": "c"})
        assert await stream.flush() == 1
        rows = await asyncio.to_thread(lambda: scan(SeamarkClient(stream.server.url), "db.t").to_arrow().to_pylist())
        days = sorted((row["day"].isoformat(), row["v"]) for row in rows)
        assert days == [(f"2026-01-0{number}T00:00:00", v) for number, v in enumerate("abc", 1)]


async def test_append_that_read_an_earlier_key_is_refused_after_the_change(tmp_path: Path) -> None:
    schema = Schema(NestedField(1, "a", LongType()), NestedField(2, "b", LongType()))
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema, properties={"format-version": "2", KEY: "a"})
        await stream.post({"a": 1, "b": 1})
        components = stream.server.components
        streams, tables = components.streams, components.catalog.tables

        async def prepare() -> TableRows:
            loaded_table = await tables.load(("db",), "t")
            prepared_rows = RowPreparation(loaded_table.metadata, streams.row_files, 1).prepare_json([{"a": 2, "b": 2}])
            assert prepared_rows.batches is not None
            return TableRows(loaded_table, prepared_rows.batches)

        earlier_append = await prepare()
        await set_key(stream, "b")
        with pytest.raises(RetryLater, match="The key of the stream table has changed"):
            await streams.append([earlier_append], None)
        await streams.append([await prepare()], None)
        earlier_append = await prepare()
        await set_key(stream, "a")
        await stream.post({"a": 3, "b": 2})
        await stream.flush()
        with pytest.raises(RetryLater, match="The key of the stream table has changed"):
            await streams.append([earlier_append], None)
        await streams.append([await prepare()], None)
        assert sorted((row["a"], row["b"]) for row in await read_rows(stream)) == [(1, 1), (2, 2), (3, 2)]


async def test_rows_encoded_before_a_change_of_the_schema_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are checked and encoded for the old schema, and a column is then promoted or dropped.

    Meanwhile, a large body waits for memory.
    """
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", PATIENCE_S)
    schema = Schema(NestedField(1, "day", DateType()), NestedField(2, "v", StringType()))
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema, properties={"format-version": "3"})
        await stream.post({"day": "2026-01-01", "v": "a"})
        await stream.flush()
        components = stream.server.components
        streams = components.streams
        (table,) = streams.tables.values()
        table.appending_bytes = components.settings.stream_memory_bytes // 2  # This is the state during a slow flush.
        body = json.dumps([{"day": "9999-12-31", "v": "x" * 300_000}]).encode()
        waiting_task = asyncio.create_task(stream.send_and_read_error(yield_body(body)))
        await until(lambda: streams.body_room.waiter_count == 1)

        async def prepare(day: str) -> TableRows:
            loaded_table = await components.catalog.tables.load(("db",), "t")
            prepared_rows = RowPreparation(loaded_table.metadata, streams.row_files, 1).prepare_json([{"day": day}])
            assert prepared_rows.batches is not None
            return TableRows(loaded_table, prepared_rows.batches)

        async def set_schema(*fields: tuple[int, str, str], removed_ids: Sequence[int] = ()) -> None:
            columns = [{"id": number, "name": name, "type": kind, "required": False} for number, name, kind in fields]
            updates: list[dict[str, Any]] = [
                {"action": "add-schema", "schema": {"type": "struct", "fields": columns}},
                {"action": "set-current-schema", "schema-id": -1},
            ]
            if removed_ids:
                updates.append({"action": "remove-schemas", "schema-ids": removed_ids})
            assert await commit_updates(stream, *updates) == 200

        earlier_append = await prepare("9999-12-31")
        await set_schema((1, "day", "timestamp_ns"), (2, "v", "string"))
        table.appending_bytes = 0
        status, message = await waiting_task
        assert status == 400, message
        with pytest.raises(RetryLater, match="The type of the column day has changed meanwhile"):
            await streams.append([earlier_append], None)
        earlier_append = await prepare("2026-01-02T00:00:00")
        await set_schema((2, "v", "string"), removed_ids=[0, 1])
        with pytest.raises(RetryLater, match="The table has removed the schema of the rows meanwhile"):
            await streams.append([earlier_append], None)
        assert table.unflushed_rows == 0
        await stream.post({"v": "b"})
        assert await stream.flush() == 1


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(2, number_in_ordinary_runs=1)))
async def test_rows_are_replaced_while_the_key_changes_and_appends_run(tmp_path: Path, seed: int) -> None:
    """The key columns of a row have the same value, so each key selects the same latest row."""
    rng = Random(seed)
    fields = [NestedField(number, name, DecimalType(9, 2)) for number, name in enumerate(CHANGED_NAMES, 1)]
    schema = Schema(*fields, NestedField(5, "v", StringType(), required=True))
    model: dict[int, str] = {}

    async def write(stream: StreamServer, keys: Sequence[int], rounds: int) -> None:
        for number in range(rounds):
            rows = []
            for key in rng.sample(keys, rng.randint(1, len(keys))):
                row = dict.fromkeys(CHANGED_NAMES, f"{key}.50")
                if rng.random() < 0.25:
                    rows.append(row | {"_op": "delete"})
                    model.pop(key, None)
                else:
                    model[key] = f"{keys[0]}.{number}"
                    rows.append(row | {"v": model[key]})
            body = json.dumps(rows).encode()
            while (answer := await stream.send(body))[0] == 503:  # The key has changed since the request began.
                pass
            assert answer[0] == 200, answer

    async def change(stream: StreamServer) -> None:
        for _ in range(4):
            if rng.random() < 0.6:
                await set_key(stream, rng.choice((*CHANGED_NAMES, "1x, a b")))
            else:
                with suppress(CommitFailedException):  # A flush committed first.
                    await promote_column(stream, rng.choice(CHANGED_NAMES))

    async def check(stream: StreamServer) -> None:
        rows = await read_rows(stream)
        assert sorted((int(row["a-b"]), row["v"]) for row in rows) == sorted(model.items())

    async with open_stream_server(tmp_path) as stream:
        shards = rng.choice(("1", "5"))
        await create_stream_table(
            stream, schema, properties={"format-version": "2", SHARDS: shards, KEY: CHANGED_NAMES[0]}
        )
        for round_number in range(3):
            writers = [write(stream, range(10 * writer, 10 * writer + 10), 5) for writer in range(3)]
            await asyncio.gather(*writers, change(stream), read_rows(stream))
            await check(stream)
            if round_number:
                await stream.flush()
                await check(stream)
