"""Writers, commits and rebased appends in an S3 store: the rows are correct, and no file is left over."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.jobs.file_merges import drop_columns
from seamark.connector.jobs.server_jobs import remove_orphan_files
from seamark.connector.jobs.statement_runs import run_statement
from seamark.connector.jobs.statements import DropColumns, MergeFiles, StatementJob
from seamark.connector.parquet.copy.source import BLOCK_BYTES, SourceFile
from seamark.connector.parquet.encryption.keys import KEY_FILE, KMS_CLASS
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader, scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append, overwrite
from seamark.connector.write.upserts import delete, upsert
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.metadata.snapshot import MAIN
from tests.connector.jobs.test_file_merges import ARROW, BY_PART, SCHEMA
from tests.connector.parquet import encrypted
from tests.connector.write.test_upserts import BY_ID, MODES, build_rows, create_upsert_table, read_rows
from tests.faults.rigs.mortal_statement import run_killed_at
from tests.seeds import first_seed, mark_fast
from tests.services.s3 import S3
from tests.services.seamark import Seamark


@dataclass(frozen=True)
class S3Lake:
    s3: S3
    bucket: str
    server: Seamark
    client: IndexClient

    def list_files(self, ending: str) -> set[str]:
        pages = self.s3.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = [object_["Key"] for page in pages for object_ in page.get("Contents", ())]
        return {f"s3://{self.bucket}/{key}" for key in keys if key.endswith(ending)}

    def list_unfinished(self) -> list[str]:
        """Return the keys of uploads that are neither completed nor aborted."""
        multipart_uploads = self.s3.client().list_multipart_uploads(Bucket=self.bucket)
        return [upload["Key"] for upload in multipart_uploads.get("Uploads", ())]

    def open_catalog(self) -> RestCatalog:
        access = {
            "s3.endpoint": self.s3.endpoint,
            "s3.path-style-access": "true",
            "s3.access-key-id": self.s3.access_key,
            "s3.secret-access-key": self.s3.secret_key,
            "s3.region": self.s3.region,
        }
        return RestCatalog("sea", uri=self.server.base_url, **access)


@pytest.fixture(scope="module")
def lake(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Lake]:
    bucket = s3.create_bucket()
    env = {**s3.build_seamark_env(), "SEAMARK_S3_CLIENT_ACCESS": "static"}
    home: Path = tmp_path_factory.mktemp("s3")
    with (
        Seamark(home, warehouse=f"s3://{bucket}/lake", env=env) as server,
        closing(IndexClient(server.base_url)) as client,
    ):
        client._request("POST", "/v1/namespaces", {}, b'{"namespace": ["db"]}')
        yield S3Lake(s3, bucket, server, client)


@pytest.mark.each_value
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_rows_in_s3_are_written_changed_and_read(lake: S3Lake, mode: str, version: int) -> None:
    table = f"t{version}{mode[:1]}"
    client, name = lake.client, f"db.{table}"
    create_upsert_table(client, table, version=version, properties=BY_ID)
    append(client, name, build_rows((1, "de", 1), (2, "fr", 1), (3, None, 1), (4, "it", 1)))
    report = upsert(client, name, build_rows((2, "es", 2), (9, "at", 2)), keys=["id"], mode=mode)
    assert (report.inserted, report.updated) == (1, 1)
    assert delete(client, name, keys=pa.table({"id": [3, 77]}), mode=mode).deleted == 1
    assert delete(client, name, where="land = 'it'", mode=mode).deleted == 1
    assert read_rows(client, name) == [(1, "de", 1, None), (2, "es", 2, None), (9, "at", 2, None)]
    overwrite(client, name, build_rows((5, "ch", 5)), where="ts >= 1")
    expected = [(5, "ch", 5, None)]
    assert read_rows(client, name) == expected
    if version == 2:  # PyIceberg also applies the deletes of version 2.
        with lake.open_catalog() as catalog:
            actual_rows = catalog.load_table(name).scan().to_arrow().sort_by("id").to_pylist()
        assert [tuple(row.values()) for row in actual_rows] == expected


@pytest.mark.slow
def test_concurrent_appends_of_an_engine_all_commit_and_leave_no_extra_file(lake: S3Lake) -> None:
    create_upsert_table(lake.client, "stock", version=2, properties={"seamark.commit.rebase": "append"})
    append(lake.client, "db.stock", build_rows((0, "de", 0)))
    with lake.open_catalog() as catalog:
        loaded_tables = [catalog.load_table("db.stock") for _ in range(3)]  # Each represents one writer.
        for number, loaded_table in enumerate(loaded_tables, start=1):  # All appends are based on the same snapshot.
            loaded_table.append(build_rows((number, "fr", number)).cast(loaded_table.schema().as_arrow()))
        table = catalog.load_table("db.stock")
        actual_rows = table.scan().to_arrow()
        assert sorted(actual_rows["id"].to_pylist()) == [0, 1, 2, 3]
        assert len(table.history()) == 4
        file_paths = {value["file_path"] for value in table.inspect.files().to_pylist()}
        manifest_lists = {snapshot.manifest_list for snapshot in table.snapshots()}
    files = {file for file in lake.list_files(".parquet") if "/stock-" in file}
    assert files == file_paths
    assert manifest_lists <= lake.list_files(".avro")
    assert scan(lake.client, "db.stock", ["id"]).to_arrow().num_rows == 4


@pytest.mark.slow
def test_unfinished_uploads_of_killed_writers_are_aborted(lake: S3Lake) -> None:
    """Only old uploads of the table's files are aborted, and the table stays unchanged."""
    for name in ("uploads", "neighbour"):
        create_upsert_table(lake.client, name, version=2)
        append(lake.client, f"db.{name}", build_rows((1, "de", 1)))
    folder, second_folder = (
        lake.client.load_table(f"db.{name}").location.removeprefix(f"s3://{lake.bucket}/")
        for name in ("uploads", "neighbour")
    )
    s3 = lake.s3.client()
    aborted_keys = [f"{folder}/data/a/b=1/x.parquet", f"{folder}/metadata/y.avro"]
    kept_keys = [
        f"{folder}/data/notes.txt",
        f"{folder}/_temporary/z.parquet",
        f"{folder}-2/x.parquet",
        f"{second_folder}/x.parquet",
    ]
    young_key = f"{folder}/data/young.parquet"

    def begin(key: str) -> None:
        upload = s3.create_multipart_upload(Bucket=lake.bucket, Key=key)
        s3.upload_part(Bucket=lake.bucket, Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=b"x" * 1000)

    def list_unfinished_keys() -> set[str]:
        return {key for key in lake.list_unfinished() if key.startswith((folder, second_folder))}

    with closing(s3):
        for key in (*aborted_keys, *kept_keys):
            begin(key)
        age_uploads(lake)
        begin(young_key)
        files_before = lake.list_files("")
        dry_report = remove_orphan_files(lake.client, "db.uploads", dry_run=True)
        assert (dry_report.uploads, dry_report.files) == (len(aborted_keys), 0)
        assert list_unfinished_keys() == {*aborted_keys, *kept_keys, young_key}
        assert remove_orphan_files(lake.client, "db.uploads").uploads == len(aborted_keys)
        assert list_unfinished_keys() == {*kept_keys, young_key}
        assert remove_orphan_files(lake.client, "db.uploads").uploads == 0
        for upload in s3.list_multipart_uploads(Bucket=lake.bucket)["Uploads"]:  # Other tests share the bucket.
            s3.abort_multipart_upload(Bucket=lake.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    assert lake.list_files("") == files_before
    assert read_rows(lake.client, "db.uploads") == [(1, "de", 1, None)]


def age_uploads(lake: S3Lake) -> None:
    """Make the unfinished multipart uploads a week old. The S3 server takes an upload's time from its folder."""
    week_ago = time.time() - 7 * 86_400
    for path in (lake.s3.root / lake.bucket).glob(".sgwtmp/multipart/*/*"):
        os.utime(path, (week_ago, week_ago))


# Statements that rewrite files


def build_many_rows(seed: int, first_id: int) -> pa.Table:
    """Return about 14 MB of rows in two partitions, which is more than one part of an upload."""
    rng = random.Random(seed)
    values = [
        {
            "id": first_id + number,
            "part": number % 2,
            "payload": rng.randbytes(1000).hex(),
            "price": float(number),
            "place": {"city": f"c{number}", "note": None},
            "fixed": number,
        }
        for number in range(7000)
    ]
    return pa.Table.from_pylist(values, schema=ARROW)


def create_table_of_parts(lake: S3Lake, version: int) -> None:
    with lake.open_catalog() as catalog:
        if catalog.table_exists("db.t"):
            catalog.drop_table("db.t")
        properties = {"format-version": str(version), "write.parquet.row-group-size-bytes": str(8 << 20)}
        catalog.create_table("db.t", SCHEMA, partition_spec=BY_PART, properties=properties)


def read_table(client: IndexClient) -> dict[int, dict[str, Any]]:
    """Return the rows by id, decrypted with the keys of the environment."""
    opened_table = open_table(client, "db.t", At(ref=MAIN))
    reader = TaskReader(plan_read(opened_table, ARROW.names, TRUE), opened_table.storage, keys=encrypted.build_keys())
    return {row["id"]: row for batch in reader.read_all(plan(client, opened_table)) for row in batch.to_pylist()}


def encrypt_all(lake: S3Lake, configuration: Any) -> None:
    """Replace the files by encrypted copies, because no writer of tables encrypts."""
    storage = open_table(lake.client, "db.t", At(ref=MAIN)).storage
    for location in lake.client.files("db.t", content="data")["file_path"].to_pylist():
        filesystem, path = storage.open(location)
        with filesystem.open_input_file(path) as source, pq.ParquetFile(source) as file:
            table = file.read()
        with filesystem.open_output_stream(path) as sink:
            properties = encrypted.build_encryption(configuration)
            pq.write_table(table, sink, encryption_properties=properties, write_page_index=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_encrypted", mark_fast([True, False], 1))
def test_statements_merge_files_and_drop_columns_in_s3(
    lake: S3Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_encrypted: bool
) -> None:
    """Files are read by ranges and written in several parts. The values of a dropped column are not read."""
    monkeypatch.setenv(KEY_FILE, encrypted.write_key_file(tmp_path, "db"))
    monkeypatch.setenv(KMS_CLASS, "tests.connector.parquet.encrypted:PyArrowKms")
    create_table_of_parts(lake, version=3 if is_encrypted else 2)
    for number in range(2):
        append(lake.client, "db.t", build_many_rows(number, number * 10_000))
    if is_encrypted:
        encrypt_all(lake, encrypted.build_configuration({"k1": ["payload"], "k2": ["price"]}, plaintext_footer=True))
    rows_before = read_table(lake.client)
    assert len(rows_before) == 14_000
    sizes: list[int] = []
    read_block = SourceFile.read

    def read_counted_block(source: SourceFile, offset: int, size: int) -> bytes:
        sizes.append(size)
        return read_block(source, offset, size)

    monkeypatch.setattr(SourceFile, "read", read_counted_block)
    report = run_statement(lake.client, MergeFiles(("db", "t")), utc=True)
    assert (report.files_before, report.files_after) == (4, 2)
    assert report.row_groups_copied > 0
    assert max(sizes) <= BLOCK_BYTES
    assert read_table(lake.client) == rows_before
    sizes.clear()
    report = run_statement(lake.client, DropColumns(("db", "t"), "part = 1", ("payload",)), utc=True)
    assert report.files_before == 1
    assert sum(sizes) < report.bytes_before / 10  # Nearly all bytes are values of the dropped column.
    rows_after = {
        number: {**row, "payload": None if row["part"] else row["payload"]} for number, row in rows_before.items()
    }
    assert read_table(lake.client) == rows_after
    assert lake.list_unfinished() == []
    location = lake.client.load_table("db.t").location
    paths = set(lake.client.files("db.t", content="data")["file_path"].to_pylist())
    assert paths <= {path for path in lake.list_files(".parquet") if path.startswith(location)}


@pytest.mark.slow
def test_columns_of_old_partitions_are_dropped_in_s3(lake: S3Lake) -> None:
    """The table service that drops columns of old partitions runs this statement. A second run has nothing to do."""
    create_table_of_parts(lake, version=2)
    append(lake.client, "db.t", build_many_rows(seed=5, first_id=0))
    rows_before = read_table(lake.client)
    first_report = drop_columns(lake.client, "db.t", ["payload", "place.note"], where="part = 0", whole_partitions=True)
    assert (first_report.errors, first_report.commits) == ([], 1)
    for row in rows_before.values():
        if row["part"] == 0:
            row["payload"] = None
    assert read_table(lake.client) == rows_before
    second_report = drop_columns(
        lake.client, "db.t", ["payload", "place.note"], where="part = 0", whole_partitions=True
    )
    assert second_report.commits == 0


@pytest.mark.slow  # Each kill takes 50 s. tests/connector/jobs/test_statements.py always tests files on a local disk.
@pytest.mark.parametrize("steps_between_kills", [23, 2])
def test_killed_statement_leaves_no_partial_file_in_s3(lake: S3Lake, steps_between_kills: int) -> None:
    """An object exists completely or not at all. A killed statement can leave orphan files and unfinished uploads."""
    create_table_of_parts(lake, 3)
    for number in range(2):
        append(lake.client, "db.t", build_many_rows(number, number * 10_000))
    rows_before = read_table(lake.client)
    files_before = lake.list_files(".parquet")
    job = StatementJob(lake.server.base_url, token=None, statement=MergeFiles(("db", "t")), utc=True)
    killed_count, kill_step, answer = 0, random.Random(first_seed()).randint(2, steps_between_kills), None
    while answer is None:
        answer = run_killed_at(kill_step, job)
        killed_count += answer is None
        assert read_table(lake.client) == rows_before, kill_step
        storage = open_table(lake.client, "db.t", At(ref=MAIN)).storage
        for location in lake.list_files(".parquet") - files_before:
            with SourceFile(location, storage) as source:
                assert source.footer.rows > 0
        kill_step += steps_between_kills
    assert killed_count > 1
    assert (answer.error, answer.result is not None) == ("", True)
    for path in lake.s3.root.rglob("*.parquet"):
        os.utime(path, (1, 1))
    age_uploads(lake)
    day_ago_ms = time.time_ns() // 1_000_000 - 86_400_000
    assert remove_orphan_files(lake.client, "db.t", older_than_ms=day_ago_ms).is_complete
    location = lake.client.load_table("db.t").location
    assert [key for key in lake.list_unfinished() if f"s3://{lake.bucket}/{key}".startswith(f"{location}/")] == []
    snapshots = json.loads(lake.client.load_table("db.t", history=True).metadata)["snapshots"]
    known_paths = {
        path
        for snapshot in snapshots
        for path in lake.client.files("db.t", at=At(snapshot_id=snapshot["snapshot-id"]))["file_path"].to_pylist()
    }
    assert {path for path in lake.list_files(".parquet") if path.startswith(location)} == known_paths
    assert read_table(lake.client) == rows_before
