"""Tests of upserts and deletes by key through a server: the rows afterwards, and the files that a change reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT, At
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.row_changes import Report
from seamark.connector.write.upserts import COPY_ON_WRITE, MERGE_ON_READ, MODES, delete, upsert
from tests.connector.read import typed
from tests.connector.server_thread import ServerThread
from tests.seeds import mark_fast

COLUMNS = ("id", "land", "ts", "note")
FIELDS: list[dict[str, Any]] = [
    {"id": 1, "name": "id", "required": True, "type": "long"},
    {"id": 2, "name": "land", "required": False, "type": "string"},
    {"id": 3, "name": "ts", "required": False, "type": "int"},
    {"id": 4, "name": "note", "required": False, "type": "string"},
]
ARROW = pa.schema([("id", pa.int64()), ("land", pa.string()), ("ts", pa.int32()), ("note", pa.string())])
BY_ID = {"seamark.index.ids": "record(id)"}


def create_upsert_table(
    client: IndexClient,
    name: str = "t",
    *,
    version: int = 3,
    spec: Sequence[tuple[str, int]] = (),
    properties: Mapping[str, str] | None = None,
    fields: Sequence[dict[str, Any]] = FIELDS,
) -> None:
    """Create a table. `spec` has (transform, source id) of each partition field."""
    body: dict[str, Any] = {
        "name": name,
        "schema": {"type": "struct", "fields": list(fields)},
        "properties": {"format-version": str(version), **(properties or {})},
    }
    if spec:
        partition_fields = [
            {"name": f"p{n}", "transform": transform, "source-id": source, "field-id": 1000 + n}
            for n, (transform, source) in enumerate(spec)
        ]
        body["partition-spec"] = {"spec-id": 0, "fields": partition_fields}
    client._request("POST", "/v1/namespaces/db/tables", {}, json.dumps(body).encode())


def build_rows(*rows: tuple[Any, ...]) -> pa.Table:
    """Return rows of (id, land, ts, note). Missing values at the end of a row are null."""
    return pa.Table.from_pylist([dict(zip(COLUMNS, row_values, strict=False)) for row_values in rows], ARROW)


def read_rows(client: IndexClient, name: str = "db.t", at: At = CURRENT) -> list[tuple[Any, ...]]:
    values = scan(client, name, COLUMNS, at=at).to_arrow().sort_by("id").to_pylist()
    return [tuple(value.values()) for value in values]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_upsert_replaces_rows_with_existing_keys_and_inserts_rows_with_new_keys(
    client: IndexClient, mode: str, version: int, is_indexed: bool
) -> None:
    create_upsert_table(client, version=version, properties=BY_ID if is_indexed else {})
    first_report = upsert(client, "db.t", build_rows((1, "de", 1), (2, "fr", 1), (3, None, 1)), keys=["id"], mode=mode)
    assert (first_report.inserted, first_report.updated, first_report.files_read, first_report.files_removed) == (
        3,
        0,
        0,
        0,
    )
    append(client, "db.t", build_rows((7, "it", 1)))
    report = upsert(client, "db.t", build_rows((2, "es", 2), (9, "at", 2)), keys=["id"], mode=mode)
    assert read_rows(client) == [
        (1, "de", 1, None),
        (2, "es", 2, None),
        (3, None, 1, None),
        (7, "it", 1, None),
        (9, "at", 2, None),
    ]
    assert (report.inserted, report.updated, report.deleted, report.stale) == (1, 1, 0, 0)
    second_report = upsert(client, "db.t", build_rows((2, "x", 3), (1, "y", 3)), keys=["id"], mode=mode)
    assert read_rows(client)[:2] == [(1, "y", 3, None), (2, "x", 3, None)]
    assert second_report.updated == 2
    delete_report = delete(client, "db.t", keys=pa.table({"id": [1, 3, 555]}), mode=mode)
    assert (delete_report.deleted, delete_report.attempts) == (2, 1)
    assert [row[0] for row in read_rows(client)] == [2, 7, 9]
    delete_report = delete(client, "db.t", where="ts = 1", mode=mode)
    assert delete_report.deleted == 1
    assert [row[0] for row in read_rows(client)] == [2, 9]


# Files that are read and written


def create_table_of_files(
    client: IndexClient, files: int, rows_per_file: int, *, sorted_keys: bool, **options: Any
) -> None:
    """Create a table with the keys from 0 on, in `files` files.

    With `sorted_keys`, each file has consecutive keys. Otherwise, consecutive keys are in consecutive files, so the
    bounds of the files do not help to find a key.
    """
    create_upsert_table(client, **options)
    for file_number in range(files):
        first_key, step = (file_number * rows_per_file, 1) if sorted_keys else (file_number, files)
        ids = pa.array(range(first_key, first_key + rows_per_file * step, step), pa.int64())
        append(client, "db.t", pa.table({"id": ids, "note": pa.array(["old"] * rows_per_file)}))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_indexed", mark_fast([True, False], 1))
def test_upsert_reads_and_writes_only_files_that_contain_its_keys(
    client: IndexClient, mode: str, is_indexed: bool
) -> None:
    files, rows_per_file = 40, 250
    create_table_of_files(
        client, files, rows_per_file, sorted_keys=not is_indexed, properties=BY_ID if is_indexed else {}
    )
    keys = list(range(3, files * rows_per_file, 997))  # Eleven keys in different files.
    matching_files = {(key % files if is_indexed else key // rows_per_file) for key in keys}
    table = pa.table({"id": keys, "note": [f"new {key}" for key in keys]})
    report = upsert(client, "db.t", table, keys=["id"], mode=mode)
    assert (report.updated, report.inserted) == (len(keys), 0)
    if mode == "merge-on-read":
        assert report.files_read == (0 if is_indexed else len(matching_files))
        assert (report.files_written, report.files_removed) == (2, 0)  # A data file and a Puffin file.
    else:
        assert (report.files_read, report.files_removed) == (len(matching_files), len(matching_files))
        assert report.files_written <= len(matching_files)
    actual_rows = scan(client, "db.t", ["id", "note"]).to_arrow()
    assert actual_rows.num_rows == files * rows_per_file
    notes = dict(zip(actual_rows["id"].to_pylist(), actual_rows["note"].to_pylist(), strict=True))
    assert notes == {key: f"new {key}" if key in keys else "old" for key in range(files * rows_per_file)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "is_indexed"),
    [
        (COPY_ON_WRITE, False),
        (MERGE_ON_READ, True),
        (COPY_ON_WRITE, True),
        (MERGE_ON_READ, False),
    ],
)
def test_upsert_of_100_rows_in_400_files_changes_only_the_files_of_its_keys(
    client: IndexClient, mode: str, is_indexed: bool
) -> None:
    """This test represents the first use case of the project.

    Either each file has 250 consecutive keys, or each file has every 400th key, so that only an index finds the files.
    """
    create_upsert_table(client, spec=[("identity", 2)], properties=BY_ID if is_indexed else {})
    ids = range(100_000)
    lands = [f"{key % 400 if is_indexed else key // 250:03d}" for key in ids]
    append(client, "db.t", pa.table({"id": ids, "land": lands, "note": ["old"] * len(ids)}))
    assert client.files("db.t").num_rows == 400
    keys = list(range(7, 100_000, 1_000))
    assert len(keys) == 100
    lands_of_keys = {lands[key] for key in keys}
    table = pa.table({"id": keys, "land": [lands[key] for key in keys], "note": [f"new {key}" for key in keys]})
    report = upsert(client, "db.t", table, keys=["id"], mode=mode)
    assert (report.updated, report.inserted) == (100, 0)
    assert report.files_read <= len(lands_of_keys)
    assert report.files_written <= len(lands_of_keys) + (mode == "merge-on-read")  # One file contains all vectors.
    assert report.files_removed == (0 if mode == "merge-on-read" else len(lands_of_keys))
    if is_indexed and mode == "merge-on-read":
        assert report.files_read == 0
    actual_rows = scan(client, "db.t", ["id", "note"]).to_arrow()
    notes = dict(zip(actual_rows["id"].to_pylist(), actual_rows["note"].to_pylist(), strict=True))
    assert len(notes) == actual_rows.num_rows
    changed_keys = set(keys)
    assert notes == {key: f"new {key}" if key in changed_keys else "old" for key in ids}


def test_upsert_reads_only_the_buckets_of_its_keys(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[16]", 1)])
    for start in range(0, 4000, 1000):
        append(client, "db.t", pa.table({"id": list(range(start, start + 1000))}))
    report = upsert(client, "db.t", build_rows((77, "de")), keys=["id"], mode="merge-on-read")
    assert (report.updated, report.files_read) == (1, 1)  # Bounds exclude the other three files of the bucket.
    report = upsert(
        client, "db.t", build_rows((77, "fr"), (3999, "fr"), (10_000, "fr")), keys=["id"], mode="merge-on-read"
    )
    assert (report.updated, report.inserted) == (2, 1)
    # The table has 65 files: 16 for each of the four appends, and that of the first upsert. The upsert reads only files
    # of three buckets, and only if their bounds include a key.
    assert report.files_read <= 7


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", ["long", "string"])
def test_too_many_keys_to_name_are_located_by_ranges_and_buckets(
    client: IndexClient, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.connector.write.row_locations.VALUES_MAX", 5)
    monkeypatch.setattr("seamark.connector.write.upserts._SCOPE_VALUES_MAX", 5)
    create_upsert_table(client, "ranged", fields=[{"id": 1, "name": "id", "required": False, "type": kind}, FIELDS[3]])
    create_upsert_table(
        client, "t", fields=[{"id": 1, "name": "id", "required": False, "type": kind}], spec=[("bucket[64]", 1)]
    )

    def build_key_array(ids: list[int]) -> pa.Array:
        return pa.array(ids if kind == "long" else [f"key-{id_:05d}" for id_ in ids])

    for start in range(0, 2000, 200):
        append(client, "db.ranged", pa.table({"id": build_key_array(list(range(start, start + 200)))}))
    append(client, "db.t", pa.table({"id": build_key_array(list(range(2000)))}))
    chosen_ids = [3, 5, *range(1000, 1008), 1995]  # These ids are in three of the ten files of `db.ranged`.
    for name, maximum in (("ranged", 3), ("t", len(chosen_ids))):  # `db.t` has a file for each of its 64 buckets.
        table = pa.table({"id": build_key_array(chosen_ids)})
        report = upsert(client, f"db.{name}", table, keys=["id"], mode="merge-on-read")
        assert (report.updated, report.inserted) == (len(chosen_ids), 0)
        assert 0 < report.files_read <= maximum
        values = scan(client, f"db.{name}", ["id"]).to_arrow()["id"].to_pylist()
        assert sorted(values) == build_key_array(list(range(2000))).to_pylist()


def test_upsert_reads_files_that_the_index_does_not_cover(client: IndexClient, server: ServerThread) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "old"), (2, "old")))
    client.put_index("db.t", "ids", kind="record", columns=["id"])
    append(client, "db.t", build_rows((3, "old"), (4, "old")))
    lookup = client.lookup("db.t", {"id": [1, 3]})
    assert (lookup.complete, lookup.rows.num_rows) == (False, 1)
    report = upsert(client, "db.t", build_rows((1, "new"), (3, "new"), (5, "new")), keys=["id"], mode="merge-on-read")
    assert (report.updated, report.inserted, report.files_read) == (2, 1, 1)
    assert [row[:2] for row in read_rows(client)] == [(1, "new"), (2, "old"), (3, "new"), (4, "old"), (5, "new")]


def test_upsert_with_a_damaged_index_loses_no_row(client: IndexClient, server: ServerThread) -> None:
    create_upsert_table(client, properties=BY_ID)
    append(client, "db.t", build_rows((1, "old"), (2, "old")))
    for file in server.list_written_files():
        if "_seamark" in file.parts:
            data = bytearray(file.read_bytes())
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
            file.write_bytes(data)
    report = upsert(client, "db.t", build_rows((2, "new"), (3, "new")), keys=["id"], mode="merge-on-read")
    assert (report.updated, report.inserted) == (1, 1)
    assert [row[:2] for row in read_rows(client)] == [(1, "old"), (2, "new"), (3, "new")]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_file_without_remaining_rows_is_removed_without_a_read(
    client: IndexClient, server: ServerThread, version: int
) -> None:
    create_upsert_table(client, version=version, properties=BY_ID)
    append(client, "db.t", build_rows((1, "a"), (2, "a")))
    (first_file,) = (written_file for written_file in server.list_written_files() if written_file.suffix == ".parquet")
    append(client, "db.t", build_rows((3, "a"), (4, "a")))
    first_file.unlink()
    report = delete(client, "db.t", keys=pa.table({"id": [1, 2, 3]}), mode="copy-on-write")
    assert (report.deleted, report.files_read, report.files_written, report.files_removed) == (3, 1, 1, 2)
    assert [row[0] for row in read_rows(client)] == [4]


# Precedence of rows


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_row_with_the_latest_precombine_value_wins(client: IndexClient, mode: str) -> None:
    create_upsert_table(client)
    upsert(
        client, "db.t", build_rows((1, "a", 5), (2, "a", None), (3, "a", 5), (4, "a", None), (6, "a", 5)), keys=["id"]
    )
    input_rows = build_rows(
        (1, "b", 4),  # This row is older than the stored row.
        (2, "b", None),  # This row is as late as the stored row.
        (3, "x", 9),
        (3, "b", 9),  # This row is the last of the latest rows.
        (3, "x", 8),
        (3, "x", None),
        (4, "b", 0),  # Any value is later than null.
        (5, "b", None),
        (6, "b", None),  # Null is the earliest value.
    )
    report = upsert(client, "db.t", input_rows, keys=["id"], precombine="ts", mode=mode)
    assert [row[:2] for row in read_rows(client)] == [(1, "a"), (2, "b"), (3, "b"), (4, "b"), (5, "b"), (6, "a")]
    assert (report.inserted, report.updated, report.stale) == (1, 3, 2)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_upsert_without_effect_reports_the_matching_rows(client: IndexClient, mode: str) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a", 5), (3, "a", 5)))
    location_before = client.load_table("db.t").location
    stale_report = upsert(client, "db.t", build_rows((1, "b", 4), (3, "b", 4)), keys=["id"], precombine="ts", mode=mode)
    assert stale_report == Report(stale=2, files_read=1)
    assert delete(client, "db.t", keys=pa.table({"id": [2]}), mode=mode) == Report(files_read=1)
    assert delete(client, "db.t", where="land > 'a' OR id = 2", mode=mode) == Report(files_read=1)
    assert client.load_table("db.t").location == location_before, "nothing is committed"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_partial_upsert_keeps_the_other_columns(client: IndexClient, mode: str) -> None:
    create_upsert_table(client, spec=[("identity", 2)])
    upsert(client, "db.t", build_rows((1, "de", 1, "a"), (2, None, 2, "b"), (3, "fr", 3, "c")), keys=["id"])
    input_rows = build_rows((2, "ignored", 9, "B"), (4, "ignored", 9, "D"))
    report = upsert(client, "db.t", input_rows, keys=["id"], columns=["note"], mode=mode)
    assert read_rows(client) == [(1, "de", 1, "a"), (2, None, 2, "B"), (3, "fr", 3, "c"), (4, None, None, "D")]
    assert (report.inserted, report.updated) == (1, 1)
    assert report.files_read == 1
    report_of_all_columns = upsert(
        client, "db.t", build_rows((1, "it", 7, "z")), keys=["id"], columns=["ts", "note", "land"], mode=mode
    )
    assert read_rows(client)[0] == (1, "it", 7, "z")
    assert report_of_all_columns.updated == 1


def test_upsert_of_a_repeated_key_leaves_one_row(client: IndexClient) -> None:
    create_upsert_table(client, properties=BY_ID)
    append(client, "db.t", build_rows((1, "a", 1, "x"), (1, "b", 3, "y"), (1, "c", 2, "z")))
    append(client, "db.t", build_rows((1, "d", None, "w"), (2, "e", 1)))
    report = upsert(client, "db.t", build_rows((1, "", 3, "new")), keys=["id"], columns=["note"], precombine="ts")
    assert read_rows(client) == [(1, "b", 3, "new"), (2, "e", 1, None)]
    assert (report.updated, report.deleted) == (1, 3)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("change_kind", ["where", "keys", "upsert"])
@pytest.mark.parametrize("mode", MODES)
def test_columns_with_names_of_position_columns_can_be_changed(
    client: IndexClient, mode: str, change_kind: str
) -> None:
    names = ("id", "_pos", "_file")
    fields = [{"id": n + 1, "name": name, "required": False, "type": "long"} for n, name in enumerate(names)]
    create_upsert_table(client, fields=fields)
    append(client, "db.t", pa.table({"id": [10, 11, 12, 13], "_pos": [3, 2, 1, 0], "_file": [7, 7, 7, 7]}))
    expected = [(11, 2, 7), (12, 1, 7), (13, 0, 7)]
    if change_kind == "upsert":
        table = pa.table({"id": [10], "_pos": [77], "_file": [8]})
        assert upsert(client, "db.t", table, keys=["id"], columns=["_file"], precombine="_pos", mode=mode).updated == 1
        expected = [(10, 77, 8), *expected]
    elif change_kind == "keys":
        assert delete(client, "db.t", keys=pa.table({"_pos": [3]}), mode=mode).deleted == 1
    else:
        assert delete(client, "db.t", where="_pos = 3", mode=mode).deleted == 1
    values = scan(client, "db.t", names).to_arrow().sort_by("id").to_pylist()
    assert [tuple(value.values()) for value in values] == expected


# Keys


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["lookup", "scan"])
def test_keys_of_every_type_are_found(client: IndexClient, strategy: str) -> None:
    for number, (kind, samples) in enumerate(typed.SAMPLES.items()):
        name = f"k{number}"
        fields = [
            {"id": 1, "name": "k", "required": False, "type": kind},
            {"id": 2, "name": "v", "required": False, "type": "int"},
        ]
        create_upsert_table(client, name, fields=fields, properties={"seamark.index.k": "record(k)"})
        # -0.0 and 0.0 are one key.
        values = list({repr(sample): sample for sample in samples if repr(sample) != "-0.0"}.values())
        append(
            client,
            f"db.{name}",
            pa.table({"k": typed.build_array(kind, [*values, None]), "v": pa.array([0] * (len(values) + 1))}),
        )
        chosen_values = values[1:]
        table = pa.table({"k": typed.build_array(kind, chosen_values), "v": pa.array([1] * len(chosen_values))})
        report = upsert(client, f"db.{name}", table, keys=["k"], mode="merge-on-read", strategy=strategy)
        assert (report.updated, report.inserted) == (len(chosen_values), 0), kind
        actual_table = scan(client, f"db.{name}").to_arrow()
        pairs = zip(typed.to_plain(kind, actual_table["k"]), actual_table["v"].to_pylist(), strict=True)
        expected = [(values[0], 0), (None, 0), *((value, 1) for value in chosen_values)]
        assert sorted(map(repr, pairs)) == sorted(map(repr, expected)), kind
        delete_report = delete(client, f"db.{name}", keys=table.select(["k"]), mode="copy-on-write", strategy=strategy)
        assert delete_report.deleted == len(chosen_values), kind


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("properties", [{}, {"seamark.index.k": "record(land, id)"}])
def test_keys_of_several_columns_are_compared_as_a_whole(client: IndexClient, properties: dict[str, str]) -> None:
    create_upsert_table(client, properties=properties, spec=[("identity", 2)])
    append(client, "db.t", build_rows((1, "de", 0), (1, "fr", 0), (2, "de", 0), (2, None, 0)))
    report = upsert(client, "db.t", build_rows((1, "fr", 1), (2, "fr", 1)), keys=["id", "land"])
    assert (report.updated, report.inserted) == (1, 1)
    actual = sorted((row[0], str(row[1]), row[2]) for row in read_rows(client))
    assert actual == [(1, "de", 0), (1, "fr", 1), (2, "None", 0), (2, "de", 0), (2, "fr", 1)]


def repeat_column(name: str) -> pa.Table:
    return build_rows((1, "de", 1, "x")).append_column(ARROW.field(name), build_rows((2, "fr", 2, "y"))[name])


def test_invalid_upsert_is_refused_and_leaves_no_file(client: IndexClient, server: ServerThread) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "de")))
    files_before = server.list_written_files()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (build_rows((1, "de"), (None, "fr")), {"keys": ["id"]}, "column id is null in 1 of the rows"),
        (build_rows((1, "de")), {"keys": ["nothing"]}, "no key column nothing"),
        (build_rows((1, "de")), {"keys": []}, "at least one"),
        (build_rows((1, "de")), {"keys": ["id", "id"]}, "name each column once"),
        (build_rows((1, "de")).select(["land"]), {"keys": ["id"]}, "the rows have no column id"),
        (build_rows((1, "de")), {"keys": ["id"], "precombine": "when"}, "no column when"),
        (build_rows((1, "de")), {"keys": ["id"], "columns": ["price"]}, "no column price"),
        (repeat_column("note"), {"keys": ["id"], "columns": ["note"]}, "the rows have 2 columns note"),
        (repeat_column("note"), {"keys": ["id"]}, "the rows have 2 columns note"),
        (repeat_column("id"), {"keys": ["id"]}, "the rows have 2 columns id"),
        (pa.table({"id": [1], "price": [2]}), {"keys": ["id"]}, "the table has no column price"),
        (pa.table({"id": ["one"]}), {"keys": ["id"]}, "column id is long"),
        (
            [pa.table({"id": [1]}), build_rows((1, "de"))],
            {"keys": ["id"]},
            "only some of the rows have the column land",
        ),
        (build_rows((1, "de")), {"keys": ["id"], "strategy": "lookup"}, "there is no record index on the key id"),
    ]
    for value, upsert_options, message in cases:
        with pytest.raises(Unwritable, match=message):
            upsert(client, "db.t", value, **upsert_options)
        assert server.list_written_files() == files_before, message
        assert read_rows(client) == [(1, "de", None, None)], message


def test_unknown_modes_and_strategies_are_refused(client: IndexClient) -> None:
    create_upsert_table(client, properties={"write.merge.mode": "sometimes"})
    with pytest.raises(Unwritable, match=r"write.merge.mode is 'sometimes'"):
        upsert(client, "db.t", build_rows((1, "de")), keys=["id"])
    with pytest.raises(ValueError, match="mode is 'fast'"):
        upsert(client, "db.t", build_rows((1, "de")), keys=["id"], mode="fast")
    with pytest.raises(ValueError, match="strategy is 'guess'"):
        delete(client, "db.t", keys=build_rows((1, "de")).select(["id"]), strategy="guess")
    with pytest.raises(ValueError, match="set either keys or a predicate"):
        delete(client, "db.t")


def test_mode_of_a_change_comes_from_the_tables_properties(client: IndexClient) -> None:
    create_upsert_table(client, properties={"write.update.mode": "merge-on-read", "write.delete.mode": "merge-on-read"})
    upsert(client, "db.t", build_rows((1, "a"), (2, "a"), (3, "a")), keys=["id"])
    report = upsert(client, "db.t", build_rows((1, "b")), keys=["id"])
    assert (report.files_written, report.files_removed) == (2, 0)
    report = delete(client, "db.t", keys=pa.table({"id": [2]}))
    assert (report.files_written, report.files_removed) == (1, 1)  # A new deletion vector replaces the first one.
    assert [row[:2] for row in read_rows(client)] == [(1, "b"), (3, "a")]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", [*MODES, "unlocated"])
def test_change_with_too_many_index_files_commits_only_some_of_them(
    client: IndexClient, server: ServerThread, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module_name in ("seamark.connector.write.table_writer", "seamark.metaserver.commit.change_requests.change"):
        monkeypatch.setattr(f"{module_name}.INDEX_FILES_MAX", 1)
    create_upsert_table(client, properties={**BY_ID, "seamark.index.notes": "bloom(note)"})
    append(client, "db.t", build_rows((1, "a"), (2, "a"), (3, "a")))
    if mode == "unlocated":
        # With the strategy EQUALITY, the writer does not locate the stored rows. It writes equality deletes.
        upsert(client, "db.t", build_rows((1, "b")), keys=["id"], strategy=EQUALITY)
        delete(client, "db.t", keys=pa.table({"id": [2]}), strategy=EQUALITY)
    else:
        upsert(client, "db.t", build_rows((1, "b")), keys=["id"], mode=mode)
        delete(client, "db.t", keys=pa.table({"id": [2]}), mode=mode)
    assert [row[:2] for row in read_rows(client)] == [(1, "b"), (3, "a")]
    written_index_files = [
        written_file for written_file in server.list_written_files() if "_seamark" in written_file.parts
    ]
    assert len(written_index_files) == (3 if mode == "copy-on-write" else 2), (
        "each commit keeps one index file, and the others are deleted"
    )


@pytest.mark.parametrize(
    "new_rows", [[], build_rows(), pa.RecordBatch.from_pylist([], ARROW)], ids=["no batch", "no chunk", "no row"]
)
def test_upsert_of_no_rows_changes_nothing_with_any_options(client: IndexClient, new_rows: Any) -> None:
    """A stream can send an empty batch."""
    create_upsert_table(client)
    for upsert_options in (
        {},
        {"precombine": "ts"},
        {"columns": ["note"]},
        {"precombine": "ts", "columns": ["note", "land"]},
    ):
        assert upsert(client, "db.t", new_rows, keys=["id"], **upsert_options) == Report()
    with pytest.raises(Unwritable, match="the table has no column when"):
        upsert(client, "db.t", new_rows, keys=["id"], precombine="when")
    fields = [{"id": 1, "name": "a b", "required": False, "type": "long"}]
    create_upsert_table(client, "u", fields=fields)  # In files, this column has a different name.
    assert upsert(client, "db.u", [], keys=["a b"], precombine="a b") == Report()


def test_change_without_effect_makes_no_snapshot(client: IndexClient, server: ServerThread) -> None:
    create_upsert_table(client)
    assert upsert(client, "db.t", build_rows(), keys=["id"]) == Report()
    assert delete(client, "db.t", keys=[]) == Report()
    assert delete(client, "db.t", keys=pa.table({"id": [5]})) == Report()
    assert delete(client, "db.t", where="id = 5") == Report()
    assert server.list_written_files() == set()
