"""Tests of lookups by key over HTTP. The expected rows are those that a reader sees."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.iceberg.files.budget import compute_expanded_bytes
from seamark.formats.index.keys import hashing
from seamark.metaserver.api.formats.arrow import ARROW_STREAM
from seamark.metaserver.api.http.slots import RequestSlot
from seamark.metaserver.planner.rows import record_lookup
from tests.api.client import Api
from tests.api.rest.stored import LiveSnapshot, Row, StoredTable, draw_row
from tests.seeds import examples
from tests.server.rig import run_server

RowLocation = tuple[int, str, int]
"""(number of the key, path, position)"""
LOOKUP = "/api/v1/tables/db/t/lookup"


def encode_stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


async def look_up(api: Api, keys: Sequence[Any], **fields: Any) -> dict[str, Any]:
    answer = await api("POST", LOOKUP, {"keys": list(keys), **fields})
    assert answer.status == 200, answer.raw
    body: dict[str, Any] = answer.json
    return body


async def look_up_arrow(api: Api, keys: pa.Table, query: str = "") -> pa.Table:
    headers = {"Content-Type": ARROW_STREAM, "Accept": ARROW_STREAM}
    answer = await api("POST", f"{LOOKUP}?{query}", encode_stream(keys), headers=headers)
    assert answer.status == 200, answer.raw
    return pa.ipc.open_stream(answer.raw).read_all()


def find_expected_rows(
    table: StoredTable, snapshot: LiveSnapshot, keys: Sequence[Row], columns: Sequence[int]
) -> list[RowLocation]:
    """Return all live rows with these keys.

    The keys are compared as texts, so that NaN equals NaN.
    """
    rows_by_key: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, position, row in table.list_live_rows(snapshot):
        rows_by_key.setdefault(tuple(repr(row[index - 1]) for index in columns), []).append((path, position))
    return sorted(
        (number, *found_row)
        for number, key in enumerate(keys)
        for found_row in rows_by_key.get(tuple(map(repr, key)), [])
    )


def decode_found_rows(answer: dict[str, Any]) -> list[RowLocation]:
    assert not any("undecided" in row for row in answer["rows"])
    return sorted((row["key"], row["file-path"], row["position"]) for row in answer["rows"])


def to_json_key(key: Row) -> list[Any]:
    return ["NaN" if isinstance(value, float) and math.isnan(value) else value for value in key]


async def create_table_with_deletes(api: Api, rng: random.Random, **options: Any) -> StoredTable:
    """Create a table in three rounds.

    Each round commits data files of random rows, and then deletes of each kind that the format version allows.
    """
    table = await StoredTable.create(api, **options)
    for _ in range(3):
        files = []
        for _ in range(rng.choice([1, 2, 3])):
            part = rng.choice([1, 2])
            files.append(
                table.write_data_file([draw_row(rng, part) for _ in range(rng.choice([1, 20, 50]))], group_rows=8)
            )
        live_files = [*(table.snapshots[-1].data if table.snapshots else []), *files]
        await table.commit(files)
        await table.commit(deletes=write_random_deletes(table, live_files, rng))
    return table


def write_random_deletes(table: StoredTable, live_files: Sequence[Any], rng: random.Random) -> list[Any]:
    """Write random position and equality deletes in each partition, and return the delete files.

    Position deletes name rows of about half of the live files. In version 3, they are deletion vectors, and a file gets
    at most one. Equality deletes have keys of random rows. A partition without a chosen file gets no deletes.
    """
    delete_files: list[Any] = []
    positions_by_path = {
        file.path: {rng.randrange(file.record_count) for _ in range(rng.choice([1, 5]))} for file in live_files
    }
    vector_paths = {
        delete.referenced_path for snapshot in table.snapshots[-1:] for delete in snapshot.deletes if delete.is_vector
    }
    for part in (1, 2):
        partition_files = [file for file in live_files if not table.partitioned or file.partition == (part,)]
        chosen_files = [file for file in partition_files if rng.random() < 0.5]
        if not chosen_files:
            continue
        if table.version > 2:
            new_deletes = {
                file.path: positions_by_path[file.path] for file in chosen_files if file.path not in vector_paths
            }
            vector_paths |= set(new_deletes)
            delete_files += table.write_vectors(new_deletes, part)
        else:
            delete_files.append(
                table.write_position_deletes(
                    [(file.path, index) for file in chosen_files for index in positions_by_path[file.path]], part
                )
            )
            chosen_file = rng.choice(chosen_files)
            delete_files.append(
                table.write_position_deletes(
                    [(chosen_file.path, index) for index in positions_by_path[chosen_file.path]],
                    part,
                    names_data_file=True,
                )
            )
        ids = rng.choice([[1], [1, 2], [2, 3], [1, 2, 3]])
        rows = [draw_row(rng, part) for _ in range(3)]
        delete_files.append(
            table.write_equality_deletes(ids, [tuple(row[index - 1] for index in ids) for row in rows], part)
        )
    return delete_files


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("columns", [["id"], ["name", "id"], ["price"]])
async def test_lookups_equal_scans_in_every_snapshot(
    api: Api, version: int, partitioned: bool, columns: list[str]
) -> None:
    for seed in range(examples(2)):
        rng = random.Random(f"{seed} {version} {partitioned} {columns}")
        table = await create_table_with_deletes(api, rng, version=version, partitioned=partitioned)
        ids = [("id", "name", "price", "part").index(column) + 1 for column in columns]
        await table.index("keys", "record", columns, table.snapshots[-1].data, parts=2)
        for snapshot in table.snapshots:
            rows = [draw_row(rng, 1) for _ in range(rng.choice([1, 30]))]
            keys = [tuple(row[index - 1] for index in ids) for row in rows]
            answer = await look_up(api, list(map(to_json_key, keys)), index="keys", **{"snapshot-id": snapshot.id})
            expected = find_expected_rows(table, snapshot, keys, ids)
            assert decode_found_rows(answer) == expected, f"seed {seed}"
            assert answer["complete"]
            assert answer["missing"] == [n for n in range(len(keys)) if n not in {location[0] for location in expected}]
        assert (await api("DELETE", "/v1/namespaces/db/tables/t")).status == 204


async def create_two_files(api: Api, **options: Any) -> tuple[StoredTable, list[Any]]:
    table = await StoredTable.create(api, **options)
    files = [
        table.write_data_file([(100 * n + index, f"n{index}", 0.5 * index, 1) for index in range(10)]) for n in range(2)
    ]
    await table.commit(files)
    return table, files


async def test_arrow_batch_answer_equals_the_answers_of_its_keys(api: Api) -> None:
    rng = random.Random(5)
    stored_table = await create_table_with_deletes(api, rng)
    await stored_table.index("keys", "record", ["name", "id"], stored_table.snapshots[-1].data)
    keys = [draw_row(rng, 1)[:2] for _ in range(1000)]
    table = pa.table({"id": pa.array([id_ for id_, _ in keys], pa.int32()), "name": [name for _, name in keys]})
    for query in ("index=keys", "partitions=true"):
        answer_table = await look_up_arrow(api, table, query)
        expected = find_expected_rows(stored_table, stored_table.snapshots[-1], keys, (1, 2))
        columns = [answer_table.column(name).to_pylist() for name in ("key", "file_path", "position")]
        assert sorted(zip(*columns, strict=True)) == expected
        assert columns[0] == sorted(columns[0])
        assert len(expected) > 100
        schema_metadata = {name.decode(): value.decode() for name, value in answer_table.schema.metadata.items()}
        assert (schema_metadata["index"], schema_metadata["keys"], schema_metadata["complete"]) == (
            "keys",
            "1000",
            "true",
        )
        assert schema_metadata["missing"] == str(len(keys) - len({location[0] for location in expected}))
    assert set(answer_table.column("partition").to_pylist()) == {"{}"}


async def test_lookup_reports_live_files_that_the_index_does_not_cover(api: Api) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["id"], files[:1])
    answer = await look_up(api, [5, 105], index="keys")
    assert decode_found_rows(answer) == [(0, files[0].path, 5)]
    assert (answer["complete"], answer["uncovered-files"], answer["uncovered"]) == (False, 1, [files[1].path])
    assert answer["missing"] == [1]
    await table.commit(removed=[files[1].path])
    assert (await look_up(api, [5], index="keys"))["complete"]
    await table.commit([table.write_data_file([])])
    assert (await look_up(api, [5], index="keys"))["complete"], (
        "a file without rows does not make the answer incomplete"
    )


async def test_damaged_index_file_leaves_its_files_uncovered(api: Api) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["id"], files)
    (path,) = (table.folder / "_seamark" / "index").glob("**/*.puffin")
    data = bytearray(path.read_bytes())
    data[4100:4200] = bytes(100)  # These bytes are in the entries of the index.
    path.write_bytes(data)
    for _ in range(2):
        answer = await look_up(api, [5, 105], index="keys")
        assert (answer["rows"], answer["complete"], answer["uncovered-files"]) == ([], False, 2)


async def test_row_covered_by_two_index_files_is_returned_once(api: Api) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["id"], files)
    await table.index("keys", "record", ["id"], files[:1])
    assert decode_found_rows(await look_up(api, [5, 105], index="keys")) == [
        (0, files[0].path, 5),
        (1, files[1].path, 5),
    ]


async def test_rows_have_their_partition_on_request(api: Api) -> None:
    table, files = await create_two_files(api, partitioned=True)
    await table.index("keys", "record", ["id"], files)
    row = (await look_up(api, [5], index="keys", partitions=True))["rows"][0]
    assert (row["spec-id"], row["partition"]) == (0, {"part": 1})


async def test_keys_of_functions_are_found_by_value_and_by_text_in_any_case(api: Api) -> None:
    table = await StoredTable.create(api)
    file = table.write_data_file([(n, name, None, 1) for n, name in enumerate(["Ab", "aB", None])])
    await table.commit([file])
    await table.index("keys", "record", ["lower(name)", "bucket[4](id)"], [file])
    answer = await look_up(api, [{"lower(name)": "ab", "bucket[4](id)": n} for n in range(4)])
    assert sorted(row["position"] for row in answer["rows"]) == [0, 1]
    answer = await look_up(api, [["AB", n] for n in range(4)], index="keys")
    assert sorted(row["position"] for row in answer["rows"]) == [0, 1]
    assert (await look_up(api, [["abc", n] for n in range(4)], index="keys"))["rows"] == []


async def test_zero_and_negative_zero_are_two_keys_but_an_equality_delete_leaves_both_undecided(api: Api) -> None:
    table = await StoredTable.create(api)
    file = table.write_data_file([(1, "a", 0.0, 1), (2, "b", -0.0, 1), (3, "c", float("nan"), 1), (4, "d", None, 1)])
    await table.commit([file])
    await table.index("keys", "record", ["price"], [file])
    assert decode_found_rows(await look_up(api, [0.0, -0.0, "NaN", None], index="keys")) == [
        (n, file.path, n) for n in range(4)
    ]
    await table.commit(deletes=[table.write_equality_deletes([3], [(-0.0,), (float("nan"),)])])
    answer = await look_up(api, [0.0, -0.0, "NaN", None], index="keys")
    assert [(row["key"], row.get("undecided", False)) for row in answer["rows"]] == [(0, True), (3, False)]
    assert answer["undecided"] == 1
    assert [(problem["file-path"], "-0.0" in problem["problem"]) for problem in answer["problems"]] == [
        (file.path, True)
    ]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("damage", ["gone", "short", "changed bytes", "of another format"])
@pytest.mark.parametrize("kind", ["positions", "vector", "equality"])
async def test_row_with_unreadable_deletes_is_undecided(api: Api, kind: str, damage: str) -> None:
    table, files = await create_two_files(api, version=3 if kind == "vector" else 2)
    await table.index("keys", "record", ["id"], files)
    if kind == "vector":
        delete_files = table.write_vectors({files[0].path: {5}})
    elif kind == "positions":
        delete_files = [table.write_position_deletes([(files[0].path, 5)], names_data_file=True)]
    else:
        delete_files = [table.write_equality_deletes([1], [(5,)])]
    path = Path(delete_files[0].path.removeprefix("file://"))
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "changed bytes":
        # One changed bit makes a vector unreadable. In the Parquet files of the other kinds, all bytes change.
        offset = 20
        flipped_data = data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
        path.write_bytes(flipped_data if kind == "vector" else b"PAR2" * len(data))
    else:
        delete_files = [replace(delete_file, format="ORC", content_offset=None) for delete_file in delete_files]
    await table.commit(deletes=delete_files)
    answer = await look_up(api, [5, 6, 105], index="keys")
    # Position deletes apply only to the first file. Equality deletes also apply to the second file, with the id 105.
    outcomes = {(row["key"], row.get("undecided", False)) for row in answer["rows"]}
    assert outcomes == {(0, True), (1, True), (2, kind == "equality")}
    assert answer["problems"][0]["file-path"] == delete_files[0].path
    assert answer["undecided"] == sum(is_undecided for _, is_undecided in outcomes)


async def test_rows_of_an_unreadable_data_file_are_undecided(api: Api) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["id"], files)
    await table.commit(deletes=[table.write_equality_deletes([2], [("n5",)])])
    assert decode_found_rows(await look_up(api, [5, 6, 105], index="keys")) == [(1, files[0].path, 6)]
    Path(files[0].path.removeprefix("file://")).unlink()
    answer = await look_up(api, [5, 6, 105], index="keys")
    assert [(row["key"], row.get("undecided")) for row in answer["rows"]] == [(0, True), (1, True)]
    assert answer["problems"][0]["file-path"] == files[0].path


async def test_invalid_keys_are_named_in_the_error(api: Api) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["id", "name"], files)
    await table.index("marks", "bitmap", ["id"], files)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"keys": [1], "index": "nope"}, 404, "no index 'nope'"),
        ({"keys": [1], "index": "marks"}, 400, "keys on record(id, name)"),
        ({"keys": [1]}, 400, "keys on record(id, name)"),
        ({"keys": [[1, "a"]], "columns": ["id"]}, 400, "No record index is on id"),
        ({"keys": [[1, "a"]], "columns": ["id", "color"]}, 400, "color"),
        ({"keys": [[1]], "columns": ["id"] * 10_000}, 400, "at most 32"),
        ({"keys": [[1, "a"]], "index": "keys", "columns": ["id"]}, 400, "not on id"),
        ({"keys": 1, "index": "keys"}, 400, "must be a list"),
        ({"index": "keys"}, 400, "`keys`"),
        ({"keys": [1], "index": "keys"}, 400, "Key 0 is 1, not a list of values for id, name"),
        ({"keys": [[1, "a"], [1]], "index": "keys"}, 400, "Key 1 has 1 values"),
        ({"keys": [{"id": 1}], "index": "keys"}, 400, "Key 0 lacks name"),
        ({"keys": [{"id": 1, "name": "a", "x": 2}], "index": "keys"}, 400, "Key 0 has 'x'"),
        ({"keys": [["one", "a"]], "index": "keys"}, 400, "Key 0, column id"),
        ({"keys": [[True, "a"]], "index": "keys"}, 400, "Key 0, column id"),
        ({"keys": [[1, 2]], "index": "keys"}, 400, "Key 0, column name"),
        ({"keys": [], "index": "keys", "snapshot-id": 9}, 400, "Cannot find snapshot 9"),
        ({"keys": [], "index": "keys", "ref": "dev"}, 400, "dev"),
        ({"keys": [[1, "a"]] * 100_001, "index": "keys"}, 413, "keys in JSON"),
        ({"keys": [[1, "a" * (4 << 20)]], "index": "keys"}, 413, "send more as Arrow"),
        ({"keys": [], "index": "keys", "color": "red"}, 400, "color"),
    ]
    for body, status, expected in cases:
        answer = await api("POST", LOOKUP, body)
        assert answer.error[0] == status, (expected, answer.raw)
        assert expected in answer.error[2], expected


async def test_body_that_is_not_an_arrow_stream_of_keys_is_rejected(api: Api) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["id", "name"], files)
    dictionary_of_views = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["a"], pa.string_view()))
    cases: list[tuple[bytes, int, str]] = [
        (b"", 400, "not an Arrow IPC stream"),
        (b"nonsense" * 100, 400, "not an Arrow IPC stream"),
        (encode_stream(pa.table({"id": [1]})), 400, "No record index is on id"),
        (encode_stream(pa.table({"id": ["x"], "name": ["a"]})), 400, "The column id of the keys"),
        (encode_stream(pa.table({"id": [1], "name": ["a"]}), compression="zstd"), 400, "compressed buffers"),
        (encode_stream(pa.table({"id": [1], "name": ["a"]}))[:-200], 400, "not an Arrow IPC stream"),
        # Arrow has no function that expands a dictionary of views.
        (encode_stream(pa.table({"id": [1], "name": dictionary_of_views})), 400, "The column name of the keys"),
        (encode_stream(pa.table({"id": pa.nulls(1_000_001), "name": pa.nulls(1_000_001)})), 413, "1,000,000 rows"),
    ]
    for body, status, expected in cases:
        answer = await api("POST", LOOKUP, body, headers={"Content-Type": ARROW_STREAM})
        assert answer.error[0] == status, (expected, answer.raw)
        assert expected in answer.error[2], expected


def repeat_value(form: str, value: str, rows: int) -> pa.Array:
    """Return an array of `rows` rows that all refer to one stored `value`."""
    if form == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    if form == "dictionary of a dictionary":
        inner = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array([value]))
        return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), inner)
    if form == "runs":
        return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), pa.array([value]))
    if form == "a run that ends far behind the rows":
        end = (1 << 64) // len(value)  # Multiplied by the length of the value, it overflows to 0 in 64 bits.
        return pa.RunEndEncodedArray.from_arrays(pa.array([end], pa.int64()), pa.array([value])).slice(0, rows)
    view = pa.array([value], pa.string_view())
    view_bytes = 16  # The size of a view in Arrow: length, prefix, buffer and offset.
    views = np.tile(np.frombuffer(view.buffers()[1], np.uint8)[:view_bytes], rows)
    return pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(views.tobytes()), *view.buffers()[2:]])


FORMS = ("dictionary", "runs", "a run that ends far behind the rows", "views")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("form", FORMS)
async def test_shared_key_values_count_against_limits_once_for_each_key(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies to all batches together.

    During the lookup, the memory of the expanded values counts as bytes of the body.
    """
    kept_sizes: list[int] = []
    reserve_memory = RequestSlot.reserve_memory

    def record_size(slot: RequestSlot, size: int) -> None:
        kept_sizes.append(size)
        reserve_memory(slot, size)

    monkeypatch.setattr(RequestSlot, "reserve_memory", record_size)
    async with run_server(tmp_path, body_limit_bytes=1 << 20, auth="none") as server:
        api = Api(server)
        table, files = await create_two_files(api)
        await table.index("keys", "record", ["name"], files)
        headers = {"Content-Type": ARROW_STREAM}
        # A batch expands to 100 values of 4,096 bytes, 0.4 MiB. One batch is within the limit of 1 MiB, three are not.
        for batches, is_refused in ((1, False), (3, True)):
            batch = repeat_value(form, "x" * 4096, rows=100)
            keys = pa.table({"name": pa.chunked_array([batch] * batches)})
            body = encode_stream(keys)
            assert len(body) < 100_000  # Without the expansion, the body is far below the limit.
            kept_sizes.clear()
            answer = await api("POST", f"{LOOKUP}?index=keys", body, headers=headers)
            if is_refused:
                assert answer.error[0] == 413, answer.raw
                assert "The keys take 1,2" in answer.error[2]  # Three batches take about 1,230,000 bytes.
            else:
                assert answer.json["missing"] == list(range(100))
                assert sum(kept_sizes) >= 100 * 4096


def test_expanded_size_counts_a_shared_value_for_each_row() -> None:
    # The values of 100 rows take 100 * 4,096 bytes. The offsets of the rows take less than 10,400 bytes.
    for form in (*FORMS, "dictionary of a dictionary"):
        assert 409_600 <= compute_expanded_bytes(repeat_value(form, "x" * 4096, rows=100)) < 420_000, form
    offset_bytes = 8  # Each row also has an offset.
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5]), pa.array(["ab", "cde"]))
    assert compute_expanded_bytes(runs.slice(1, 3)) - offset_bytes * 3 == 2 + 3 + 3
    array_with_nulls = pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.int8()), pa.array(["abc", None]))
    assert compute_expanded_bytes(array_with_nulls) - offset_bytes * 3 == 3


@pytest.mark.slow
async def test_few_long_keys_are_hashed_off_the_event_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["name"], files)
    thread_ids: set[int] = set()
    hash_unpatched = hashing.hash_halves

    def hash_halves(columns: Any) -> Any:
        thread_ids.add(threading.get_ident())
        return hash_unpatched(columns)

    monkeypatch.setattr(record_lookup, "hash_halves", hash_halves)
    for count in (1, 100):
        thread_ids.clear()
        await look_up_arrow(api, pa.table({"name": ["x" * 100_000] * count}), "index=keys")
        assert thread_ids
        assert threading.get_ident() not in thread_ids


async def test_impossible_values_are_missing_and_not_an_error(api: Api) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["id"], files)
    answer = await look_up(api, [5.5, 5.0, 10**30, -(10**30), "5", None], index="keys")
    assert [row["key"] for row in answer["rows"]] == [1, 4]
    assert answer["missing"] == [0, 2, 3, 5]
    await table.index("parts", "record", ["part"], files)
    assert (await look_up(api, [2**31, 1], index="parts"))["missing"] == [0]


async def test_paused_index_is_not_used_for_lookups(api: Api) -> None:
    table, files = await create_two_files(api)
    await table.index("keys", "record", ["id"], files)
    assert (await api("PUT", "/api/v1/tables/db/t/indexes/keys", {"state": "paused"})).status == 200
    assert "paused" in (await api("POST", LOOKUP, {"keys": [1], "index": "keys"})).error[2]
    assert "the record indexes are: none" in (await api("POST", LOOKUP, {"keys": [{"id": 1}]})).error[2]


async def test_lookup_in_a_table_without_a_snapshot_finds_no_rows(api: Api) -> None:
    table = await StoredTable.create(api)
    await table.index("keys", "record", ["id"], [])
    answer = await look_up(api, [1], index="keys")
    assert (answer["snapshot-id"], answer["rows"], answer["missing"], answer["complete"]) == (None, [], [0], True)


@pytest.mark.slow
async def test_one_request_can_look_up_a_million_keys(api: Api) -> None:
    table = await StoredTable.create(api)
    files = [table.write_data_file([(4 * index + n, "a", None, 1) for index in range(150_000)]) for n in range(4)]
    await table.commit(files)
    deleted_positions = [(file.path, start) for file in files for start in range(0, 150_000, 1000)]
    await table.commit(deletes=[table.write_position_deletes(deleted_positions)])
    await table.index("keys", "record", ["id"], files, parts=2)
    ids = np.random.default_rng(1).permutation(1_000_000)
    answer_table = await look_up_arrow(api, pa.table({"id": ids}), "index=keys")
    is_stored = ids < 600_000
    live_rows = np.flatnonzero(is_stored & ((ids // 4) % 1000 != 0))
    assert np.array_equal(answer_table.column("key").to_numpy(), live_rows)
    assert np.array_equal(answer_table.column("position").to_numpy(), ids[live_rows] // 4)
    numbers_by_path = {file.path: n for n, file in enumerate(files)}
    assert [numbers_by_path[path] for path in answer_table.column("file_path").to_pylist()] == (
        ids[live_rows] % 4
    ).tolist()
