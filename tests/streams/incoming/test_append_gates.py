"""Tests that appends and commits that change how rows are written never overlap."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from seamark.connector.streams import packed_rows
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.streams.incoming import append_gates
from seamark.metaserver.streams.incoming.append_gates import AppendGates
from seamark.metaserver.streams.stream_table import append_to_tables
from tests.seeds import examples, first_seed
from tests.streams.test_rows_over_http import SCHEMA, StreamServer, create_stream_table, open_stream_server
from tests.waits import until

TABLES = "abc"


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(20, number_in_ordinary_runs=3)))
async def test_appends_and_changes_of_several_tables_neither_overlap_nor_block_each_other(seed: int) -> None:
    rng = Random(seed)
    gates = AppendGates()
    appends, changes = Counter[str](), Counter[str]()

    async def pass_time() -> None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)

    async def append_or_change(is_change: bool) -> None:
        await pass_time()
        uuids = rng.sample(TABLES, rng.randint(1, len(TABLES)))
        counts = changes if is_change else appends
        # A change makes appends wait, and an append makes changes wait.
        async with gates.hold_appends(uuids) if is_change else gates.hold_commits(uuids):
            counts.update(uuids)
            try:
                await pass_time()
                assert all(changes[uuid] <= 1 and not (changes[uuid] and appends[uuid]) for uuid in TABLES)
            finally:
                counts.subtract(uuids)

    tasks = [asyncio.create_task(append_or_change(rng.random() < 0.3)) for _ in range(100)]
    for task in rng.sample(tasks, 10):  # A cancelled append or change must not keep its gates.
        await pass_time()
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert not gates.changing_uuids
    async with gates.hold_appends(TABLES):
        pass


async def test_append_and_change_that_wait_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_gates, "APPEND_WAIT_S", 0.01)
    monkeypatch.setattr(append_gates, "CHANGE_WAIT_S", 0.01)
    gates = AppendGates()
    async with gates.hold_commits("a"):
        with pytest.raises(RetryLater, match="Appends to the stream table take too long"):
            async with gates.hold_appends("ab"):
                pass
    async with gates.hold_appends("ab"):
        with pytest.raises(RetryLater, match="A commit changes the schema"):
            async with gates.hold_commits("b"):
                pass
        with pytest.raises(RetryLater, match="Appends to the stream table take too long"):
            async with gates.hold_appends("b"):
                pass
        async with gates.hold_commits("c"):
            pass
    async with gates.hold_commits("ab"):
        pass


def make_schema_updates(fields: Sequence[tuple[int, str, str, bool]], former_ids: Sequence[int]) -> list[Any]:
    """Return the updates that give a table a schema, and remove its former schemas."""
    columns = [
        {"id": number, "name": name, "type": kind, "required": required} for number, name, kind, required in fields
    ]
    return [
        {"action": "add-schema", "schema": {"type": "struct", "fields": columns}},
        {"action": "set-current-schema", "schema-id": -1},
        *([{"action": "remove-schemas", "schema-ids": list(former_ids)}] if former_ids else []),
    ]


async def commit_table(
    stream: StreamServer, updates: list[Any], *, is_transaction: bool = False, requirements: Sequence[Any] = ()
) -> int:
    change: dict[str, Any] = {"requirements": list(requirements), "updates": updates}
    path = "namespaces/db/tables/t"
    if is_transaction:
        path = "transactions/commit"
        change = {"table-changes": [{"identifier": {"namespace": ["db"], "name": "t"}, **change}]}
    async with stream.server.http.post(f"{stream.server.url}/v1/{path}", json=change) as answer:
        return answer.status


def delay_log(monkeypatch: pytest.MonkeyPatch, delay: Callable[[], Awaitable[Any]]) -> None:
    """Let each append wait between the check of its rows and their entry in the log."""

    async def append_later(*args: Any) -> Any:
        await delay()
        return await append_to_tables(*args)

    monkeypatch.setattr("seamark.metaserver.streams.streams.append_to_tables", append_later)


@pytest.mark.parametrize("is_transaction", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_commit_waits_for_an_append_that_the_log_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_transaction: bool
) -> None:
    """A gate stops appends to a stream while a commit changes how its rows are written.

    The commit adds a required column, and removes the schema of the rows. After it, these rows could not be flushed.
    """
    async with open_stream_server(tmp_path) as stream:
        schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
        await create_stream_table(stream, schema)
        await stream.post({"id": 1})
        await stream.flush()
        is_writing, may_write = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            is_writing.set()
            await may_write.wait()

        streams = stream.server.components.streams
        with monkeypatch.context() as patch:
            delay_log(patch, wait)
            append = asyncio.create_task(stream.post({"id": 2}))
            await is_writing.wait()
            fields = [(1, "id", "long", False), (3, "age", "long", True)]
            updates = make_schema_updates(fields, [0])
            commit = asyncio.create_task(commit_table(stream, updates, is_transaction=is_transaction))
            gates = getattr(streams, "gates", None)
            await until(lambda: commit.done() or (gates is not None and bool(gates.changing_uuids)))
            late_append = asyncio.create_task(stream.post({"id": 3, "age": 5}))  # It fits only the new schema.
            may_write.set()
            await append
        assert await commit in (200, 204)
        await until(late_append.done)
        if late_append.exception() is None:  # else the server had read the earlier schema
            assert await stream.flush() == 1
        assert streams.size_bytes == 0
        # PyIceberg reads no file without a required column, so the column becomes optional.
        assert await commit_table(stream, make_schema_updates([(1, "id", "long", False)], [])) == 200
        ids = await stream.ids()
        assert ids == ([1, 2, 3] if late_append.exception() is None else [1, 2])


async def test_commit_that_is_refused_neither_flushes_the_stream_nor_closes_its_gate(tmp_path: Path) -> None:
    """A gate stops appends to a stream while a commit changes how its rows are written."""
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        await stream.flush()
        await stream.post({"id": 2})
        properties = {"write.format.default": "orc", "seamark.stream.dead-letter-table": "."}
        for updates in (
            [{"action": "set-properties", "updates": properties}],
            [{"action": "set-current-schema", "schema-id": 99}],
            [{"action": "remove-schemas", "schema-ids": [0]}],  # It is the current schema.
        ):
            for is_transaction in (False, True):
                assert await commit_table(stream, updates, is_transaction=is_transaction) == 400
        updates = make_schema_updates([(1, "id", "long", False), (9, "age", "int", True)], [])
        requirements = [{"type": "assert-current-schema-id", "current-schema-id": 7}]
        assert await commit_table(stream, updates, requirements=requirements) == 409
        assert await stream.count_snapshots() == 1  # A flush would come before the gate is closed.


async def test_commit_is_refused_if_its_name_refers_to_another_table_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not stop appends to the other table, so rows of its old schema could follow the commit."""
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        await stream.flush()
        await asyncio.to_thread(stream.catalog.create_table, "db.other", SCHEMA)
        streams = stream.server.components.streams
        flush = streams.flush

        async def flush_and_rename(uuid: str) -> int:
            rows = await flush(uuid)
            if streams.gates.changing_uuids:
                await asyncio.to_thread(stream.catalog.rename_table, "db.t", "db.former")
                await asyncio.to_thread(stream.catalog.rename_table, "db.other", "db.t")
            return rows

        monkeypatch.setattr(streams, "flush", flush_and_rename)
        assert (
            await commit_table(stream, make_schema_updates([(1, "id", "long", False), (9, "age", "int", True)], []))
            == 409
        )
        table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
        assert len(table.metadata.schemas) == 1


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(6, number_in_ordinary_runs=1)))
async def test_rows_never_meet_a_table_without_their_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Writers append while commits rename, add, drop and promote columns, and remove the former schemas.

    Each acknowledged row is in the table once, with its values in the columns that the table still has.
    """
    rng = Random(seed)
    replaced_schema_ids: list[int] = []
    replace_schema = packed_rows._replace_schema

    def record_replaced_schema(rows: Any, header: Any, metadata: Any) -> Any:
        replaced_schema_ids.append(header.schema_id)
        return replace_schema(rows, header, metadata)

    monkeypatch.setattr(packed_rows, "_replace_schema", record_replaced_schema)

    async def pass_time() -> None:
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(rng.choice((0, 0, 0.001)))

    delay_log(monkeypatch, pass_time)
    columns: dict[int, tuple[str, str]] = {2: ("c2", "int")}
    model: dict[int, dict[int, int]] = {}

    async def write(stream: StreamServer, writer: int) -> None:
        for number in range(12):
            row_id = 100 * writer + number
            seen_columns = dict(columns)
            row = {"id": row_id} | {name: row_id for name, _ in seen_columns.values()}
            while (answer := await stream.send(json.dumps([row]).encode()))[0] != 200:
                assert answer[0] in (400, 503), answer  # 400 if a name in the row is no longer a column.
                seen_columns = dict(columns)
                row = {"id": row_id} | {name: row_id for name, _ in seen_columns.values()}
            model[row_id] = dict.fromkeys(seen_columns, row_id)

    async def change(stream: StreamServer) -> None:
        for number in range(8):
            await pass_time()
            new_columns = dict(columns)
            last_id, chosen_id = max(new_columns), rng.choice(list(new_columns))
            kind = rng.choice(("rename", "add", "drop", "promote", "require"))
            if kind == "rename":
                new_columns[chosen_id] = (f"n{number}", new_columns[chosen_id][1])
            elif kind == "drop" and len(new_columns) > 1 and chosen_id != last_id:
                del new_columns[chosen_id]
            elif kind == "promote" and new_columns[chosen_id][1] == "int":
                new_columns[chosen_id] = (new_columns[chosen_id][0], "long")
            else:
                new_columns[last_id + 1] = (f"a{number}", "int")
            fields = [(1, "id", "long", False), *((key, *value, False) for key, value in new_columns.items())]
            if kind == "require":
                fields[-1] = (*fields[-1][:3], True)
            table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
            updates = make_schema_updates(fields, [schema.schema_id for schema in table.metadata.schemas])
            assert await commit_table(stream, updates) == 200
            columns.clear()
            columns.update(new_columns)

    async with open_stream_server(tmp_path, stream_flush_interval_ms=200) as stream:
        schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "c2", IntegerType()))
        await create_stream_table(stream, schema, properties={"format-version": "2"})
        await asyncio.gather(change(stream), *(write(stream, writer) for writer in range(4)))
        await stream.flush()
        assert not replaced_schema_ids
        optional = [(1, "id", "long", False), *((key, *value, False) for key, value in columns.items())]
        assert await commit_table(stream, make_schema_updates(optional, [])) == 200
        table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
        rows = await asyncio.to_thread(lambda: table.scan().to_arrow().to_pylist())
    names = {field.field_id: field.name for field in table.schema().fields if field.field_id != 1}
    assert len(rows) == len(model)
    for row in rows:
        expected = {names[column_id]: value for column_id, value in model[row["id"]].items() if column_id in names}
        actual = {name: value for name, value in row.items() if name != "id" and value is not None}
        assert actual == expected, row
