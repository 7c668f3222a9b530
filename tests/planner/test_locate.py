"""Tests of locating rows by keys, below HTTP: the limits, and what happens at a limit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.delete_files import HashSet
from seamark.formats.index.keys.hashing import hash_rows
from seamark.formats.index.keys.terms import resolve_term
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.deletes import delete_files
from seamark.metaserver.planner.rows import record_lookup as locate
from seamark.metaserver.planner.rows import row_deletes as deleted
from seamark.metaserver.planner.rows.data_columns import DataRows
from seamark.metaserver.planner.rows.lookup_keys import build_keys, decode_json_keys, extract_term_arrays
from seamark.metaserver.settings.settings import Settings
from tests.api.client import Api
from tests.api.indexes.test_lookups import LOOKUP, decode_found_rows, look_up
from tests.api.rest.stored import StoredTable
from tests.server.rig import run_server

VALUES_BY_KIND = {
    "boolean": [True, False],
    "int": [0, -1, 2**31 - 1, -(2**31)],
    "long": [0, -1, 2**63 - 1, -(2**63)],
    "float": [0.0, -0.0, 1.5, float("inf"), float("nan")],
    "double": [0.0, -0.0, 1e300, float("-inf"), float("nan")],
    "string": ["", "a", "ä\U0001f600", "a" * 1000],
}
ARROW_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
}


def to_json_value(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), "NaN")
    return value


@pytest.mark.parametrize("kind", VALUES_BY_KIND)
def test_key_from_json_equals_the_key_from_a_column(kind: str) -> None:
    schema = Schema((Field(1, "c", False, kind), Field(2, "d", False, "long")))
    terms = [resolve_term("c", schema), resolve_term("d", schema)]
    rng = random.Random(kind)
    values = [rng.choice([*VALUES_BY_KIND[kind], None]) for _ in range(200)]
    other_values = [rng.choice([1, 2, None]) for _ in values]
    columns = [pa.array(values, ARROW_TYPES.get(kind, pa.string())), pa.array(other_values, pa.int64())]
    expected = [convert_to_keys(columns[0], kind), convert_to_keys(columns[1], "long")]
    rows = [list(row) for row in zip(map(to_json_value, values), other_values, strict=True)]
    given_keys, possible_keys = decode_json_keys(terms, rows)
    assert possible_keys is None
    for seed in (0, 1):
        assert np.array_equal(hash_rows(given_keys, seed), hash_rows(expected, seed))
    table = pa.table({"d": columns[1], "c": columns[0], "more": columns[1]})
    assert np.array_equal(hash_rows(build_keys(terms, extract_term_arrays(terms, table)[0]), 0), hash_rows(expected, 0))


def test_key_columns_are_read_once() -> None:
    schema = Schema((Field(1, "c", False, "long"),))
    repeated_columns = pa.table([[1], [2]], names=["c", "c"])
    with pytest.raises(BadRequest, match="several columns named c"):
        extract_term_arrays([resolve_term("c", schema)], repeated_columns)
    with pytest.raises(BadRequest, match="no column c"):
        extract_term_arrays([resolve_term("c", schema)], pa.table({"d": [1]}))


def test_hash_lookup_compares_both_halves_of_the_hash() -> None:
    rng = np.random.default_rng(3)
    high, low = rng.integers(0, 50, 500).astype(np.uint64), rng.integers(0, 50, 500).astype(np.uint64)
    existing_keys = set(zip(high.tolist(), low.tolist(), strict=True))
    wanted_keys = rng.integers(0, 60, (2, 2000)).astype(np.uint64)
    mask = HashSet(high, low).has(wanted_keys[0], wanted_keys[1]).tolist()
    assert mask == [pair in existing_keys for pair in zip(*wanted_keys.tolist(), strict=True)]
    empty = np.empty(0, dtype=np.uint64)
    assert not HashSet(empty, empty).has(wanted_keys[0], wanted_keys[1]).any()


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    fields = [pa.field(name, pa.int64(), metadata={"PARQUET:field_id": str(n)}) for n, name in ((1, "a"), (2, "b"))]
    rows = np.arange(10_000)
    table = pa.table([rows, rows * 3], schema=pa.schema(fields))
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=1000, compression="none", use_dictionary=False)
    return tmp_path / "d.parquet"


async def read_rows(
    data_path: Path, limit_bytes: int, columns: list[int], rows: list[int], record_count: int = 10_000
) -> list[int]:
    settings = Settings(home=data_path.parent, warehouse=data_path.parent.as_uri())
    async with open_objects(settings, SystemClock()) as objects:
        reader = DataRows(objects, asyncio.get_running_loop(), None, limit_bytes, 64 << 20)

        def read_values() -> list[int]:
            row_numbers = np.array(rows, dtype=np.int64)
            with reader.read(
                data_path.as_uri(), data_path.stat().st_size, record_count, columns, row_numbers
            ) as result:
                return result[columns[0]].to_pylist()

        return await asyncio.to_thread(read_values)


async def test_only_the_chunks_with_the_rows_are_read_from_a_data_file(data_path: Path) -> None:
    size = data_path.stat().st_size
    assert await read_rows(data_path, size // 2, [2], [5, 999, 7003]) == [15, 2997, 21009]
    with pytest.raises(Unreadable, match="one request would fetch more than"):
        await read_rows(data_path, size // 20, [2], list(range(0, 10_000, 500)))


async def test_data_file_that_differs_from_its_manifest_entry_is_not_read(data_path: Path) -> None:
    with pytest.raises(Unreadable, match="10000 rows; its manifest states 9999"):
        await read_rows(data_path, 1 << 20, [2], [5], record_count=9999)
    with pytest.raises(Unreadable, match="no column with field id 3"):
        await read_rows(data_path, 1 << 20, [3], [5])


async def test_columns_with_ambiguous_names_in_a_data_file_are_not_used(data_path: Path) -> None:
    pq.write_table(
        pq.read_table(data_path).append_column(pq.read_table(data_path).field(1), [range(10_000)]), data_path
    )
    with pytest.raises(Unreadable, match="2 columns that may be column 2"):
        await read_rows(data_path, 1 << 20, [2], [5])
    assert await read_rows(data_path, 1 << 20, [1], [5]) == [5]


@pytest.fixture
async def stored_table(tmp_path: Path) -> Any:
    """Yield a table of two files of 1,000 rows. Each id from 0 to 49 is in 20 rows of each file."""
    async with run_server(tmp_path) as server:
        table = await StoredTable.create(Api(server))
        files = [table.write_data_file([(index // 20, "a", None, 1) for index in range(1000)]) for _ in range(2)]
        await table.commit(files)
        await table.index("keys", "record", ["id"], files)
        yield table


async def test_keys_with_too_many_rows_are_rejected(stored_table: StoredTable, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len((await look_up(stored_table.api, [1, 2], index="keys"))["rows"]) == 80
    monkeypatch.setattr(locate, "ROWS_MAX", 79)
    assert "more than 79 rows" in (await stored_table.api("POST", LOOKUP, {"keys": [1, 2], "index": "keys"})).error[2]
    assert len((await look_up(stored_table.api, [1], index="keys"))["rows"]) == 40


async def test_key_with_too_many_rows_is_rejected_before_the_rows_are_collected(
    stored_table: StoredTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [stored_table.write_data_file([(7, "a", None, 1)] * 3000)]
    await stored_table.commit(files)
    await stored_table.index("keys", "record", ["id"], files)
    monkeypatch.setattr(locate, "ROWS_MAX", 1500)
    answer = await stored_table.api("POST", LOOKUP, {"keys": [7], "index": "keys"})
    assert answer.error[0] == 413
    assert "look up fewer keys, or keys with fewer rows" in answer.error[2]
    assert len((await look_up(stored_table.api, [8], index="keys"))["rows"]) == 40


async def test_rows_stay_undecided_when_delete_files_exceed_the_limit(
    stored_table: StoredTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [file.path for file in stored_table.snapshots[-1].data]
    for path in paths:
        await stored_table.commit(deletes=[stored_table.write_position_deletes([(path, 20)], names_data_file=True)])
    assert len(decode_found_rows(await look_up(stored_table.api, [1], index="keys"))) == 38
    monkeypatch.setattr(delete_files, "FILE_LIMIT_BYTES", 10)
    repeated_answer = await look_up(stored_table.api, [1], index="keys")
    assert repeated_answer["undecided"] == 0, "a delete file that was read before must stay cached"
    position_deletes = stored_table.write_position_deletes([(paths[0], 21)], names_data_file=True)
    await stored_table.commit(deletes=[position_deletes])
    undecided_answer = await look_up(stored_table.api, [1], index="keys")
    assert {row["file-path"] for row in undecided_answer["rows"] if row.get("undecided")} == {paths[0]}
    assert undecided_answer["problems"][0]["file-path"] == position_deletes.path
    monkeypatch.setattr(deleted, "DELETES_LIMIT_BYTES", 0)
    assert (await look_up(stored_table.api, [1], index="keys"))["undecided"] == 40
