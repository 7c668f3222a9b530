"""Tests that MERGE FILES, DROP COLUMNS and compaction keep the rows of encrypted files, and their protection."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.table.sorting import NullOrder
from pyiceberg.transforms import IdentityTransform

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import At
from seamark.connector.jobs.file_merges import drop_columns, merge_files
from seamark.connector.jobs.statements import MergeFiles, StatementJob
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.keys import KEY_FILE, KMS_CLASS, read_environment_keys
from seamark.connector.read.lineage import NAMES
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader, scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import compact
from seamark.connector.write.upserts import MERGE_ON_READ, delete
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.snapshot import MAIN
from tests.connector.jobs.test_file_merges import ARROW, build_rows, create_table
from tests.connector.lake import open_catalog
from tests.connector.parquet import encrypted
from tests.connector.server_thread import ServerThread
from tests.faults.rigs.mortal_statement import NEVER, run_killed_at
from tests.seeds import first_seed

ENCRYPTED_VALUES: dict[str, Any] = {
    "columns": {"k1": ["payload"], "k2": ["price", "place.city"]},
    "plaintext_footer": True,
}
"""An encryption of three columns with values. The id and the column of the partition spec stay plain."""
ENCRYPTED_IDS: dict[str, Any] = {
    "columns": {"k1": ["id", "payload"]},
    "encryption_algorithm": "AES_GCM_CTR_V1",
    "double_wrapping": False,
}
CONFIGURATIONS: list[Any] = [None, {"columns": None}, ENCRYPTED_VALUES, ENCRYPTED_IDS]
"""No encryption, and encryptions of all columns and of some columns."""
METRICS = (
    *("column-sizes", "value-counts", "null-value-counts", "nan-value-counts"),
    *("lower-bounds", "upper-bounds"),
)


def encrypt(path: str, configuration: Any) -> None:
    """Replace the file by an encrypted copy, because no writer of tables encrypts."""
    with pq.ParquetFile(path) as file:
        row_groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
    options = dict(configuration)
    properties = encrypted.build_encryption(encrypted.build_configuration(options.pop("columns"), **options))
    with pq.ParquetWriter(
        path, row_groups[0].schema, encryption_properties=properties, write_page_index=True
    ) as writer:
        for row_group in row_groups:
            writer.write_table(row_group)


def read_rows_by_id(client: IndexClient, *, lineage: bool = False) -> dict[int, dict[str, Any]]:
    opened_table = open_table(client, "db.t", At(ref=MAIN))
    names = [*ARROW.names, *NAMES] if lineage else ARROW.names
    reader = TaskReader(plan_read(opened_table, names, TRUE), opened_table.storage, keys=encrypted.build_keys())
    actual_rows = [row for batch in reader.read_all(plan(client, opened_table)) for row in batch.to_pylist()]
    assert len({row["id"] for row in actual_rows}) == len(actual_rows)
    return {row["id"]: row for row in actual_rows}


def list_paths(client: IndexClient) -> list[str]:
    return [str(path).removeprefix("file://") for path in client.files("db.t", content="data")["file_path"].to_pylist()]


def read_protections(path: str) -> set[tuple[str, str]]:
    """Return (column, master key) for each encrypted column of a file."""
    with SourceFile(path, Storage(), keys=encrypted.build_keys()) as source:
        encryption = source.encryption
        if encryption is None:
            return set()
        footer_key = json.loads(encryption.footer_metadata or b"")["masterKeyID"]
        master_keys = {name: json.loads(metadata)["masterKeyID"] for name, metadata in encryption.keys.items()}
        encrypted_columns = [
            leaf.path for leaf, cipher in zip(source.leaves, encryption.ciphers[0], strict=True) if cipher
        ]
        return {(name, master_keys.get(name, footer_key)) for name in encrypted_columns}


@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_random_jobs_keep_rows_in_files_with_the_same_protection(
    client: IndexClient, server: ServerThread, kms: None, version: int
) -> None:
    rng = random.Random(first_seed() + version)
    create_table(server, version)
    protections_by_id: dict[int, set[tuple[str, str]]] = {}
    seen_paths: set[str] = set()
    first_id = 0
    for configuration in rng.sample([*CONFIGURATIONS, *CONFIGURATIONS], 8):
        row_count = rng.choice([20, 700])
        append(client, "db.t", build_rows(rng, range(first_id, first_id + row_count)))
        new_paths = [path for path in list_paths(client) if path not in seen_paths]
        seen_paths.update(new_paths)
        for path in new_paths if configuration is not None else []:
            encrypt(path, configuration)
        protections_by_id |= dict.fromkeys(range(first_id, first_id + row_count), read_protections(new_paths[0]))
        first_id += row_count
    model = read_rows_by_id(client, lineage=version == 3)
    merge_report = merge_files(client, "db.t")
    assert merge_report.errors == []
    assert merge_report.files_after < merge_report.files_before
    assert merge_report.row_groups_copied > 0
    assert read_rows_by_id(client, lineage=version == 3) == model
    _check_files(client, protections_by_id, {"payload": True})
    drop_report = drop_columns(client, "db.t", ["payload"], where="part = 1")
    assert drop_report.errors == []
    assert drop_report.commits > 0
    for row in model.values():
        row["payload"] = None if row["part"] == 1 else row["payload"]
    rows_after = read_rows_by_id(client)
    assert rows_after == {id_: {name: row[name] for name in ARROW.names} for id_, row in model.items()}
    _check_files(client, protections_by_id, {"payload": False})


def _check_files(
    client: IndexClient, protections_by_id: dict[int, set[tuple[str, str]]], has_key_by_column: dict[str, bool]
) -> None:
    """Check that each row is in a file whose columns have the same keys as before.

    Dropped columns are null, and manifests have no metrics of encrypted columns.
    """
    tasks = {task.path: task for task in plan(client, open_table(client, "db.t", At(ref=MAIN)), stats=ARROW.names)}
    for path, task in tasks.items():
        local_path = path.removeprefix("file://")
        actual = {(name, key) for name, key in read_protections(local_path) if not name.startswith("_")}
        with pq.ParquetFile(local_path, decryption_properties=encrypted.build_decryption()) as file:
            ids = file.read(["id"])["id"].to_pylist()
            missing_columns = {name for name in has_key_by_column if name not in file.schema_arrow.names}
        for id_ in ids:
            assert actual == {(name, key) for name, key in protections_by_id[id_] if name not in missing_columns}
        if actual:
            field_ids = {"id": 1, "payload": 3, "price": 4, "place.city": 7}
            for metric in METRICS:
                measured_ids = {*(task.file.get(metric) or {"keys": []})["keys"]}
                assert not measured_ids & {field_ids[name] for name, _ in actual if name in field_ids}, metric


@pytest.mark.slow
def test_statement_process_takes_its_keys_from_its_environment(
    client: IndexClient, server: ServerThread, tmp_path: Path
) -> None:
    """Without keys, the statement fails and the table stays unchanged."""
    create_table(server, 2)
    for number in range(3):
        append(client, "db.t", build_rows(random.Random(number), range(number * 700, number * 700 + 700)))
    for path in list_paths(client):
        encrypt(path, ENCRYPTED_VALUES)
    rows_before = read_rows_by_id(client)
    job = StatementJob(server.url, None, MergeFiles(("db", "t")), utc=True)
    refusal = run_killed_at(NEVER, job)
    assert refusal is not None
    assert "set SEAMARK_PARQUET_KEY_FILE or SEAMARK_PARQUET_KMS" in refusal.error
    assert read_rows_by_id(client) == rows_before
    process_result = run_killed_at(
        NEVER,
        job,
        {KMS_CLASS: "tests.connector.parquet.encrypted:PyArrowKms", KEY_FILE: encrypted.write_key_file(tmp_path, "db")},
    )
    assert process_result is not None
    assert process_result.error == ""
    assert process_result.result is not None
    assert (process_result.result.files_before, process_result.result.files_after) == (6, 2)
    assert read_rows_by_id(client) == rows_before
    for path in list_paths(client):
        assert {key for name, key in read_protections(path)} == {"k1", "k2"}


def test_scan_reads_encrypted_files_only_with_explicit_keys(
    client: IndexClient, server: ServerThread, kms: None
) -> None:
    create_table(server, 2)
    input_rows = build_rows(random.Random(1), range(700))
    append(client, "db.t", input_rows)
    for path in list_paths(client):
        encrypt(path, ENCRYPTED_VALUES)
    actual = scan(client, "db.t", ["id", "payload"], "part = 1 AND id < 100", keys=read_environment_keys())
    expected = [
        {"id": row["id"], "payload": row["payload"]} for row in input_rows.slice(0, 100).to_pylist() if row["part"]
    ]
    assert sorted(actual.to_arrow().to_pylist(), key=lambda row: row["id"]) == expected
    # The environment variables of the process are not sufficient, because a server's process has them for its jobs.
    with pytest.raises(Unreadable, match="encrypted"):
        scan(client, "db.t", ["id", "payload"]).to_arrow()
    # The process aborts if pyarrow reads the statistics of an encrypted column without its key.
    with pytest.raises(Unreadable, match="encrypted"):
        scan(client, "db.t", ["id"], "payload = 'a'").to_arrow()  # The literal is within the column's bounds.


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_encrypted_files_of_a_sorted_table_are_sorted_and_stay_encrypted(
    client: IndexClient, server: ServerThread, kms: None, version: int
) -> None:
    """Files without encryption are merged separately."""
    create_table(server, version)
    with open_catalog(server.url) as catalog, catalog.load_table("db.t").update_sort_order() as update:
        update.desc("fixed", IdentityTransform(), NullOrder.NULLS_LAST)
    rng, seen_paths, expected_encrypted_ids = random.Random(first_seed() + version), set[str](), set[int]()
    for number in range(6):
        append(client, "db.t", build_rows(rng, range(number * 400, number * 400 + 400)))
        new_paths = [path for path in list_paths(client) if path not in seen_paths]
        seen_paths.update(new_paths)
        if number % 2:
            expected_encrypted_ids.update(range(number * 400, number * 400 + 400))
            for path in new_paths:
                encrypt(path, ENCRYPTED_VALUES)
    model = read_rows_by_id(client, lineage=version == 3)
    merge_report = merge_files(client, "db.t")
    assert merge_report.errors == []
    assert merge_report.files_after < merge_report.files_before
    assert set(merge_report.row_groups_encoded) == {"the table has a sort order"}
    assert read_rows_by_id(client, lineage=version == 3) == model
    actual_encrypted_ids = set()
    for path in list_paths(client):
        with pq.ParquetFile(path, decryption_properties=encrypted.build_decryption()) as file:
            table = file.read(["id", "fixed"])
        numbers = table["fixed"].to_pylist()
        assert numbers == sorted(numbers, reverse=True)
        if read_protections(path):
            assert read_protections(path) == {("payload", "k1"), ("price", "k2"), ("place.city", "k2")}
            actual_encrypted_ids.update(table["id"].to_pylist())
    assert actual_encrypted_ids == expected_encrypted_ids
    assert {task.file["sort-order-id"] for task in plan(client, open_table(client, "db.t", At(ref=MAIN)))} == {1}


@pytest.mark.slow
def test_small_encrypted_files_are_compacted_and_stay_encrypted(
    client: IndexClient, server: ServerThread, kms: None
) -> None:
    """All files of the partition are small, so the compaction also removes deleted rows."""
    create_table(server, 2)
    for number in range(4):
        append(client, "db.t", build_rows(random.Random(number), range(number * 20, number * 20 + 20)))
    delete(client, "db.t", where="id IN (3, 44)", mode=MERGE_ON_READ)
    for path in list_paths(client):
        encrypt(path, ENCRYPTED_VALUES)
    rows_before = read_rows_by_id(client)
    assert len(rows_before) == 78
    report = compact(client, "db.t")
    assert (report.errors, report.files_after) == ([], 2)
    assert read_rows_by_id(client) == rows_before
    for path in list_paths(client):
        assert read_protections(path) == {("payload", "k1"), ("price", "k2"), ("place.city", "k2")}


def test_missing_key_leaves_the_table_unchanged_without_a_new_file(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    create_table(server, 2)
    for number in range(2):
        append(client, "db.t", build_rows(random.Random(number), range(number * 700, number * 700 + 700)))
    for path in list_paths(client):
        encrypt(path, ENCRYPTED_IDS)
    key_file = tmp_path / "keys.json"
    key_file.write_text('{"keys": {"kf": "AAAAAAAAAAAAAAAAAAAAAA=="}, "namespaces": {"kf": ["*"]}}')
    monkeypatch.setenv("SEAMARK_PARQUET_KEY_FILE", str(key_file))
    files_before = sorted(tmp_path.rglob("*.parquet"))
    report = merge_files(client, "db.t")
    assert report.commits == 0
    assert "the key is unknown: the key was not wrapped by the master key 'kf'" in report.errors[0]
    assert sorted(tmp_path.rglob("*.parquet")) == files_before
