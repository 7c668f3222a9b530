"""Tests of MERGE FILES and DROP COLUMNS: the rows equal those of a model.

Rows stay, deleted rows stay deleted, and dropped columns are null.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, LongType, NestedField, StringType, StructType

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.jobs import file_merges
from seamark.connector.jobs.file_merges import drop_columns, merge_files
from seamark.connector.parquet.copy.assembly import FileAssembler
from seamark.connector.read.lineage import NAMES
from seamark.connector.read.scans import scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write import compaction
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import compact
from seamark.connector.write.upserts import MERGE_ON_READ, delete
from seamark.formats.iceberg.files.parquet import Unreadable
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.seeds import first_seed, mark_fast

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "part", LongType(), required=False),
    NestedField(3, "payload", StringType(), required=False),
    NestedField(4, "price", DoubleType(), required=False),
    NestedField(
        5,
        "place",
        StructType(
            NestedField(6, "city", StringType(), required=False), NestedField(7, "note", StringType(), required=False)
        ),
        required=False,
    ),
    NestedField(8, "fixed", LongType(), required=True),
)
BY_PART = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "part"))
ARROW = pa.schema(
    [
        ("id", pa.int64()),
        ("part", pa.int64()),
        ("payload", pa.string()),
        ("price", pa.float64()),
        ("place", pa.struct([("city", pa.string()), ("note", pa.string())])),
        pa.field("fixed", pa.int64(), nullable=False),
    ]
)
PROPERTIES = {"write.target-file-size-bytes": "400000", "write.parquet.row-group-size-bytes": "32000"}
"""Sizes at which row groups of 4,000 bytes are copied."""


def build_rows(rng: random.Random, ids: range) -> pa.Table:
    values = [
        {
            "id": number,
            "part": number % 2,
            "payload": rng.choice([None, rng.randbytes(20).hex()]),
            "price": rng.random(),
            "place": rng.choice([None, {"city": f"c{number}", "note": None}]),
            "fixed": number,
        }
        for number in ids
    ]
    return pa.Table.from_pylist(values, schema=ARROW)


def create_table(server: ServerThread, version: int) -> None:
    with open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        properties = {"format-version": str(version), **PROPERTIES}
        catalog.create_table("db.t", SCHEMA, partition_spec=BY_PART, properties=properties)


def read_rows_by_id(client: IndexClient, *, lineage: bool = False) -> dict[int, dict[str, Any]]:
    names = [field.name for field in ARROW]
    values = scan(client, "db.t", [*names, *NAMES] if lineage else names).to_arrow().to_pylist()
    assert len({row["id"] for row in values}) == len(values)
    return {row["id"]: row for row in values}


def store_as_required(path: str, names: list[str]) -> None:
    """Write the file again. Those columns of `names` that have no nulls become required.

    Spark writes required columns if it knows that they have no nulls.
    """
    path = path.removeprefix("file://")
    with pq.ParquetFile(path) as file:
        table = file.read()
    fields = [
        field.with_nullable(not (field.name in names and column.null_count == 0) and field.nullable)
        for field, column in zip(table.schema, table.columns, strict=True)
    ]
    pq.write_table(table.cast(pa.schema(fields)), path, store_schema=False)


def test_merge_copies_row_groups_with_required_columns(client: IndexClient, server: ServerThread) -> None:
    """A merge with files in which the column is optional encodes the required columns again."""
    create_table(server, 2)
    rng = random.Random(3)
    for start in range(0, 2700, 900):
        append(client, "db.t", build_rows(rng, range(start, start + 900)))
    required_paths = sorted(_list_paths(client))
    for path in required_paths:
        store_as_required(path, ["id", "price"])
    assert merge_files(client, "db.t", where="part = 0").row_groups_copied == 3  # Each file has one row group.
    (path,) = _list_paths(client) - set(required_paths)
    assert [field.name for field in pq.read_schema(path.removeprefix("file://")) if not field.nullable] == [
        *("id", "price", "fixed")
    ]
    append(client, "db.t", build_rows(rng, range(2700, 3600)))
    rows_before = read_rows_by_id(client)
    report = merge_files(client, "db.t", where="part = 1")
    # The row group of the new file is copied, and those of the three files with required columns are encoded again.
    assert (report.row_groups_copied, sum(report.row_groups_encoded.values())) == (1, 3)
    assert read_rows_by_id(client) == rows_before


@pytest.mark.parametrize("version", mark_fast([3, 2], 1))
def test_random_merges_and_drops_change_only_the_dropped_columns(
    client: IndexClient, server: ServerThread, version: int
) -> None:
    seed = first_seed()
    rng = random.Random(f"{seed} {version}")
    create_table(server, version)
    lineage = version == 3
    copied_group_count, next_id, paths_before = 0, 0, set[str]()
    for _ in range(6):
        for _ in range(rng.randint(2, 4)):
            row_count = rng.choice([5, 300, 900])
            append(client, "db.t", build_rows(rng, range(next_id, next_id + row_count)))
            next_id += row_count
            if rng.random() < 0.6:
                for path in _list_paths(client) - paths_before:
                    store_as_required(path, rng.sample(["id", "price", "payload"], rng.randint(1, 2)))
            paths_before = _list_paths(client)
        if rng.random() < 0.7:
            deleted_ids = rng.sample(range(next_id), rng.choice([3, 60]))
            delete(client, "db.t", keys=pa.table({"id": deleted_ids}), mode=MERGE_ON_READ)
        rows_before = read_rows_by_id(client, lineage=lineage)
        job = rng.choice(["merge", "compact", "drop", "drop nested"])
        part = rng.choice([0, 1])
        if job == "merge":
            report = merge_files(client, "db.t", where=f"part = {part}")
        elif job == "compact":
            report = compact(client, "db.t")
        else:
            column = "payload" if job == "drop" else "place.note"
            report = drop_columns(client, "db.t", [column], where=f"part = {part}")
            assert drop_columns(client, "db.t", [column], where=f"part = {part}").commits == 0
            for row in rows_before.values():
                if row["part"] == part and job == "drop":
                    row["payload"] = None
                elif row["part"] == part and row["place"] is not None:
                    row["place"]["note"] = None
        assert not report.errors, (seed, report.errors)
        copied_group_count += report.row_groups_copied
        paths_before = _list_paths(client)
        assert read_rows_by_id(client, lineage=lineage) == rows_before, (seed, job)
    assert copied_group_count > 0, seed
    files = client.files("db.t", content="data").to_pylist()
    for file in files:
        path = file["file_path"].removeprefix("file://")
        assert file["record_count"] == pq.read_metadata(path).num_rows
    with open_catalog(server.url) as catalog:
        if version == 2:
            assert sorted(catalog.load_table("db.t").scan().to_arrow()["id"].to_pylist()) == sorted(rows_before)


def test_required_missing_and_partition_columns_are_not_dropped(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    append(client, "db.t", build_rows(random.Random(1), range(10)))
    for column, reason in (
        ("nothing", "no column"),
        ("fixed", "is required"),
        ("part", "source of a partition field"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            drop_columns(client, "db.t", [column])
    with pytest.raises(InvalidRequest, match="part of the partition"):
        drop_columns(client, "db.t", ["payload"], where="id < 5")
    with pytest.raises(InvalidRequest, match="Name at least one"):
        drop_columns(client, "db.t", [])


def test_rows_that_are_deleted_during_a_rewrite_stay_deleted(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(server, 3)
    for number in range(3):
        append(client, "db.t", build_rows(random.Random(number), range(number * 500, number * 500 + 500)))
    rows_before = read_rows_by_id(client)
    rewrite = compaction.rewrite_rows

    def rewrite_and_change(*arguments: Any) -> Any:
        new_table = rewrite(*arguments)
        delete(client, "db.t", keys=pa.table({"id": [1, 501, 777]}), mode=MERGE_ON_READ)
        append(client, "db.t", build_rows(random.Random(9), range(5000, 5010)))
        return new_table

    monkeypatch.setattr(file_merges, "rewrite_rows", rewrite_and_change)
    report = drop_columns(client, "db.t", ["payload"])
    assert (report.commits, report.rows_deleted, report.errors) == (1, 3, [])
    rows_after = read_rows_by_id(client)
    assert rows_after.keys() == (rows_before.keys() - {1, 501, 777}) | set(range(5000, 5010))
    assert all(row["payload"] is None for number, row in rows_after.items() if number < 5000)
    assert any(row["payload"] is not None for number, row in rows_after.items() if number >= 5000)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("failing_call", range(3))
def test_failed_merge_leaves_the_table_unchanged_without_a_new_file(
    client: IndexClient, server: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    create_table(server, 2)
    for part in range(3):
        append(client, "db.t", build_rows(random.Random(part), range(part * 500, part * 500 + 500)))
    rows_before, paths_before = read_rows_by_id(client), _list_paths(client)
    folder = Path(min(paths_before).removeprefix("file://")).parent.parent
    paths_on_disk = Counter(folder.rglob("*.parquet"))
    add, calls = FileAssembler.add, list[int]()

    def add_and_fail(self: FileAssembler, picks: Any) -> None:
        add(self, picks)
        calls.append(1)
        if len(calls) > failing_call:
            raise OSError("the disk is full")

    monkeypatch.setattr(FileAssembler, "add", add_and_fail)
    with pytest.raises(OSError, match="disk is full"):
        merge_files(client, "db.t")
    assert (read_rows_by_id(client), _list_paths(client)) == (rows_before, paths_before)
    assert Counter(folder.rglob("*.parquet")) == paths_on_disk


@pytest.mark.slow
def test_partitions_of_one_copy_share_an_index_file_and_all_fail_if_one_fails(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    create_table(server, 2)
    with open_catalog(server.url) as catalog, catalog.load_table("db.t").transaction() as change:
        change.set_properties({"seamark.index.ids": "bitmap(id)"})
    for part in range(3):
        append(client, "db.t", build_rows(random.Random(part), range(part * 900, part * 900 + 900)))
    rows_before, paths_before = read_rows_by_id(client), _list_paths(client)
    folder = Path(min(paths_before).removeprefix("file://")).parents[2]
    (damaged_path, content), paths_on_disk = (
        _damage_footer(max(paths_before)),
        {path for path in folder.rglob("*") if path.is_file()},
    )
    report = merge_files(client, "db.t")
    assert report.commits == 0
    assert str(damaged_path) in report.errors[0]
    assert {path for path in folder.rglob("*") if path.is_file()} == paths_on_disk
    damaged_path.write_bytes(content)
    count_before = len(client.index("db.t", "ids").json["index-files"])
    report = merge_files(client, "db.t")
    assert (report.commits, report.files_before, report.files_after, report.row_groups_copied) == (1, 6, 2, 6)
    assert read_rows_by_id(client) == rows_before
    index_after = client.index("db.t", "ids")
    assert (index_after.lag_files, len(index_after.json["index-files"]) - count_before) == (0, 1)
    assert client.explain("db.t", "id = 1203").files == 1


def _damage_footer(location: str) -> tuple[Path, bytes]:
    """Damage the footer of a file, and return its path and its previous content."""
    path = Path(location.removeprefix("file://"))
    content = path.read_bytes()
    path.write_bytes(content[:-20] + b"x" * 20)
    return path, content


def _list_paths(client: IndexClient) -> set[str]:
    return set(client.files("db.t", content="data")["file_path"].to_pylist())


def test_nan_counts_of_copied_row_groups_are_correct_or_absent(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    rng = random.Random(7)
    nan_count = 0
    for number in range(4):
        table = build_rows(rng, range(number * 400, number * 400 + 400))
        prices = [float("nan") if number == 2 and position % 9 == 0 else rng.random() for position in range(400)]
        nan_count += sum(price != price for price in prices)
        append(client, "db.t", table.set_column(3, "price", pa.array(prices)))
    assert merge_files(client, "db.t").row_groups_copied == 8
    opened_table = open_table(client, "db.t", At())
    nan_count_of_files = 0
    for task in plan(client, opened_table, stats=["price"]):
        counts = task.file["nan-value-counts"]
        counts_by_key = dict(zip(counts["keys"], counts["values"], strict=True))
        file_prices = pq.read_table(task.path.removeprefix("file://"), columns=["price"])["price"].to_pylist()
        assert counts_by_key[4] == sum(price != price for price in file_prices)
        nan_count_of_files += counts_by_key[4]
    assert nan_count_of_files == nan_count > 0


def test_merge_refuses_encrypted_files_without_keys_and_keeps_them(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    append(client, "db.t", build_rows(random.Random(1), range(600)))
    append(client, "db.t", build_rows(random.Random(1), range(600, 1200)))
    count_before = client.files("db.t").num_rows
    path = client.files("db.t", content="data")["file_path"][0].as_py().removeprefix("file://")
    table = pq.ParquetFile(path).read()
    for plaintext_footer in (False, True):
        keys = encryption.EncryptionConfiguration(
            footer_key="f", column_keys={"c": ["payload"]}, plaintext_footer=plaintext_footer, double_wrapping=False
        )
        properties = encryption.CryptoFactory(_Kms).file_encryption_properties(encryption.KmsConnectionConfig(), keys)
        with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
            writer.write_table(table)
        merge_report = merge_files(client, "db.t", where="part = 0")
        second_merge = merge_files(client, "db.t", where="part = 1")
        errors = [*merge_report.errors, *second_merge.errors]
        assert len(errors) == 1
        assert "encrypted" in errors[0]
        with pytest.raises(Unreadable, match="encrypted"):
            drop_columns(client, "db.t", ["payload"])
    assert client.files("db.t").num_rows == count_before - 1, "only the partition without encrypted files is merged"


class _Kms(encryption.KmsClient):
    def __init__(self, _: encryption.KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, _: str) -> bytes:
        return key_bytes.hex().encode()

    def unwrap_key(self, wrapped_key: bytes, _: str) -> bytes:
        return bytes.fromhex(wrapped_key.decode())


@pytest.mark.slow
def test_bounds_of_merged_files_include_their_rows(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    for number in range(4):
        append(client, "db.t", build_rows(random.Random(number), range(number * 400, number * 400 + 400)))
    report = merge_files(client, "db.t")
    assert report.row_groups_copied > 0
    for low in (0, 399, 400, 801, 1599):
        actual_rows = scan(client, "db.t", ["id"], where=f"id >= {low} AND id <= {low}").to_arrow()
        assert actual_rows["id"].to_pylist() == [low]
