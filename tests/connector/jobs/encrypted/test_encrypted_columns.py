"""Tests of attacks on encrypted columns by a user who may write the table and has no keys.

Jobs have the keys, and must publish nothing about the values.
"""

from __future__ import annotations

import base64
import random
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table.sorting import NullOrder
from pyiceberg.transforms import BucketTransform, IdentityTransform, TruncateTransform, VoidTransform

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import At
from seamark.connector.jobs import clustering
from seamark.connector.jobs.bucket_splitting import split_buckets
from seamark.connector.jobs.failures import format_error_line
from seamark.connector.jobs.file_merges import drop_columns, merge_files
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.keys import KEY_FILE, KMS_CLASS, EnvironmentKeys, read_table_keys
from seamark.connector.parquet.encryption.kms import KeyUnavailable
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader, scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write import compaction
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy
from seamark.connector.write.copies import CopyWriter
from seamark.connector.write.upserts import MODES, upsert
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.snapshot import MAIN
from tests.connector.jobs.encrypted.test_encrypted_merges import (
    ENCRYPTED_VALUES,
    METRICS,
    encrypt,
    list_paths,
    read_rows_by_id,
)
from tests.connector.jobs.test_file_merges import ARROW, PROPERTIES, SCHEMA, build_rows, create_table
from tests.connector.lake import open_catalog
from tests.connector.parquet import encrypted
from tests.connector.server_thread import ServerThread
from tests.seeds import first_seed

pytestmark = pytest.mark.usefixtures("kms")

cluster_incrementally = partial(clustering.cluster_incrementally, full=True)
compact = partial(compaction.compact, policy=CompactionPolicy(min_files=2))
SECRET_IDS = {3, 4, 7}
"""The ids of the encrypted columns of ENCRYPTED_VALUES: payload, price and place.city."""


def fill_with_encrypted_files(client: IndexClient, files: int = 3, rows_per_file: int = 60) -> None:
    for number in range(files):
        append(
            client,
            "db.t",
            build_rows(
                random.Random(first_seed() + number),
                range(number * rows_per_file, number * rows_per_file + rows_per_file),
            ),
        )
    for path in list_paths(client):
        encrypt(path, ENCRYPTED_VALUES)


def set_properties_as_attacker(server: ServerThread, **properties: str) -> None:
    with open_catalog(server.url) as catalog, catalog.load_table("db.t").transaction() as transaction:
        transaction.set_properties({name.replace("_", "."): value for name, value in properties.items()})


def list_table_paths(client: IndexClient, table: str) -> list[str]:
    values = client.files(table, content="data")["file_path"].to_pylist()
    return [str(path).removeprefix("file://") for path in values]


def read_unencrypted_files(folder: Path) -> list[bytes]:
    """Return the content of all files of the table that are not encrypted: manifests, metadata, Puffin files."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".parquet"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("transform", [IdentityTransform(), TruncateTransform(3), BucketTransform(16)])
def test_job_derives_no_partition_values_from_encrypted_columns(
    client: IndexClient, server: ServerThread, tmp_path: Path, transform: Any
) -> None:
    """A bucket would publish a hash of the value. A merge only copies partition values that the files already have."""
    create_table(server, 2)
    fill_with_encrypted_files(client)
    rows_before, paths_before = read_rows_by_id(client), sorted(list_paths(client))
    with open_catalog(server.url) as catalog, catalog.load_table("db.t").update_spec() as update:
        update.add_field("payload", transform, "leak")
    set_properties_as_attacker(server, seamark_clustering_columns="fixed")
    for job in (cluster_incrementally, split_buckets, merge_files, compact):
        report = job(client, "db.t")
        assert report.commits == 0, job
    cluster_report = cluster_incrementally(client, "db.t")
    assert "encrypt the column payload, and the partition spec of the table would publish" in cluster_report.errors[0]
    assert sorted(list_paths(client)) == paths_before
    texts = [row["payload"].encode() for row in rows_before.values() if row["payload"]]
    assert not any(text in data for data in read_unencrypted_files(tmp_path) for text in texts)
    for mode in MODES:
        new_rows = pa.Table.from_pylist([{**rows_before[5], "payload": "mine"}], schema=ARROW)
        with pytest.raises(Unwritable, match="encrypt the column payload, and the partition spec"):
            upsert(client, "db.t", new_rows, keys=["id"], mode=mode, file_keys=encrypted.build_keys())
    with open_catalog(server.url) as catalog, catalog.load_table("db.t").update_spec() as update:
        update.remove_field("leak")
    assert cluster_incrementally(client, "db.t").commits == 1
    assert read_rows_by_id(client) == rows_before


@pytest.mark.slow
def test_void_partition_field_of_an_encrypted_column_is_accepted(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table("db.t", SCHEMA, properties=PROPERTIES)
    fill_with_encrypted_files(client)
    with open_catalog(server.url) as catalog, catalog.load_table("db.t").update_spec() as update:
        update.add_field("payload", VoidTransform(), "nothing")
    set_properties_as_attacker(server, seamark_clustering_columns="fixed")
    rows_before = read_rows_by_id(client)
    assert cluster_incrementally(client, "db.t").errors == []
    assert read_rows_by_id(client) == rows_before


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("columns", ["price", "fixed, payload", "customer.city"])
def test_rows_are_not_clustered_by_encrypted_columns(client: IndexClient, server: ServerThread, columns: str) -> None:
    """Attributes of a table that is joined by an encrypted column are also refused."""
    create_table(server, 2)
    fill_with_encrypted_files(client)
    with open_catalog(server.url) as catalog:
        catalog.create_table("db.customers", pa.schema([("name", pa.string()), ("city", pa.string())]))
    append(client, "db.customers", pa.table({"name": ["a"], "city": ["b"]}))
    set_properties_as_attacker(
        server,
        seamark_clustering_columns=columns,
        seamark_clustering_joins='{"customer": {"table": "db.customers", "on": {"payload": "name"}}}',
    )
    paths_before = sorted(list_paths(client))
    report = cluster_incrementally(client, "db.t")
    assert report.commits == 0
    assert "would publish the order of its values" in report.errors[0]
    assert sorted(list_paths(client)) == paths_before


def test_rows_are_not_sorted_by_encrypted_columns(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    fill_with_encrypted_files(client)
    with open_catalog(server.url) as catalog, catalog.load_table("db.t").update_sort_order() as update:
        update.asc("price", IdentityTransform(), NullOrder.NULLS_FIRST)
    set_properties_as_attacker(server, seamark_clustering_columns="fixed")
    paths_before = sorted(list_paths(client))
    for job in (merge_files, compact, cluster_incrementally):
        report = job(client, "db.t")
        assert report.commits == 0
        if report.errors:
            assert "encrypt the column price, and the sort order" in report.errors[0]
    assert merge_files(client, "db.t").errors
    assert sorted(list_paths(client)) == paths_before


def test_job_applies_no_equality_deletes_on_encrypted_columns(client: IndexClient, server: ServerThread) -> None:
    """The number of remaining rows would show whether a file contains the value.

    A reader with the keys still applies the deletes, so only the guessed row is missing.
    """
    create_table(server, 3)
    fill_with_encrypted_files(client)
    rows_before = read_rows_by_id(client)
    guess = next(row["payload"] for row in rows_before.values() if row["payload"])
    guessed_rows = pa.table({"payload": [guess], "part": [1], "id": [1]})
    for part in (0, 1):
        table = guessed_rows.set_column(1, "part", pa.array([part]))
        upsert(client, "db.t", _fill_fixed(table), keys=["payload", "part"], strategy="equality")
    paths_before = sorted(list_paths(client))
    for job in (merge_files, compact):
        report = job(client, "db.t")
        assert report.commits == 0
        assert any("equality deletes compare its encrypted column payload" in error for error in report.errors)
    assert sorted(list_paths(client)) == paths_before
    actual_rows = scan(client, "db.t", ["id"], keys=encrypted.build_keys()).to_arrow()
    # The table has the two rows of the attacker, and lacks the row that the attacker has guessed.
    assert actual_rows.num_rows == len(rows_before) + 2 - 1


def _fill_fixed(table: pa.Table) -> pa.Table:
    """Return the rows with a value in the column `fixed`, and with the schema of the table."""
    return pa.Table.from_pylist([{**row, "fixed": 1} for row in table.to_pylist()], schema=ARROW)


def test_statistics_and_dropped_columns_publish_no_metrics_of_encrypted_columns(
    client: IndexClient, server: ServerThread
) -> None:
    create_table(server, 2)
    fill_with_encrypted_files(client)
    with pytest.raises(Unreadable, match="encrypted"):
        compute_statistics(client, "db.t")
    assert drop_columns(client, "db.t", ["id"], where="TRUE").commits == 1
    assert merge_files(client, "db.t").errors == []
    for task in plan(client, open_table(client, "db.t", At(ref=MAIN)), stats=ARROW.names):
        for metric in METRICS:
            assert not SECRET_IDS & {*(task.file.get(metric) or {"keys": []})["keys"]}, metric


def test_copied_file_of_another_namespace_is_not_decrypted(
    client: IndexClient, server: ServerThread, tmp_path: Path
) -> None:
    """The attacker copies the bytes of an encrypted file of `db.t` into the table `mine.t` of another namespace."""
    create_table(server, 2)
    fill_with_encrypted_files(client)
    with open_catalog(server.url) as catalog:
        catalog.create_namespace("mine")
        properties = {**PROPERTIES, "seamark.clustering.columns": "fixed"}
        catalog.create_table("mine.t", SCHEMA, properties=properties)
    for number in range(2):
        append(client, "mine.t", build_rows(random.Random(number), range(number * 30, number * 30 + 30)))
    stolen_path = next(path for path in list_paths(client))
    own_paths = [
        str(path).removeprefix("file://") for path in client.files("mine.t", content="data")["file_path"].to_pylist()
    ]
    for path in own_paths:
        shutil.copy(stolen_path, path)
    opened_table = open_table(client, "mine.t", At(ref=MAIN))
    reader = TaskReader(plan_read(opened_table, None, TRUE), opened_table.storage, keys=read_table_keys("mine.t"))
    for task in plan(client, opened_table):
        with pytest.raises(Unreadable, match="the master key 'kf' is not for tables of the namespace mine"):
            list(reader.read(task))
    for job in (merge_files, compact, cluster_incrementally):
        report = job(client, "mine.t")
        assert report.commits == 0
        assert all("is not for tables of the namespace mine" in error for error in report.errors)
    assert sorted(map(str, (tmp_path).rglob("mine/**/*.parquet"))) == sorted(own_paths)


def test_master_key_is_usable_only_in_the_namespaces_that_the_key_file_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The key file also allows namespaces below the named ones. A key without namespaces is not usable in any table."""
    path = tmp_path / "bound.json"
    key = base64.b64encode(bytes(16)).decode()
    path.write_text(
        f'{{"keys": {{"a": "{key}", "b": "{key}", "c": "{key}"}}, "namespaces": {{"a": ["hr", "x.y"], "b": ["*"]}}}}'
    )
    monkeypatch.delenv(KMS_CLASS)
    monkeypatch.setenv(KEY_FILE, str(path))

    def list_usable_keys(*table: str) -> str:
        keys = read_table_keys(table)
        assert keys is not None
        usable_keys = ""
        for key_name in "abc":
            with suppress(KeyUnavailable):
                keys._wrapper.unwrap(keys._wrapper.wrap(bytes(16), key_name), key_name)
                usable_keys += key_name
        return usable_keys

    assert (
        list_usable_keys("hr", "t") == list_usable_keys("hr", "below", "t") == list_usable_keys("x", "y", "t") == "ab"
    )
    assert (
        list_usable_keys("hrx", "t")
        == list_usable_keys("x", "t")
        == list_usable_keys("x.y", "t")
        == list_usable_keys("other", "hr", "t")
        == "b"
    )
    assert EnvironmentKeys()() is None  # Without the name of a table, no key is usable.


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("rows_per_file", [40, 700])
def test_file_that_is_encrypted_during_a_job_is_not_rewritten_without_encryption(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, rows_per_file: int
) -> None:
    """The file is replaced by an encrypted file after the job has chosen the encryption of the new file."""
    create_table(server, 2)
    for number in range(3):
        append(
            client,
            "db.t",
            build_rows(random.Random(number), range(number * rows_per_file, number * rows_per_file + rows_per_file)),
        )
    group_by_scheme, plain_paths = CopyWriter._group_by_scheme, list_paths(client)

    def encrypt_then_choose(writer: CopyWriter, tasks: Any) -> Any:
        groups = list(group_by_scheme(writer, tasks))
        while plain_paths:
            encrypt(plain_paths.pop(), ENCRYPTED_VALUES)
        return groups

    monkeypatch.setattr(CopyWriter, "_group_by_scheme", encrypt_then_choose)
    # `CopyWriter` handles small files only if one of them is encrypted. They are encrypted only after this check.
    monkeypatch.setattr(CopyWriter, "_is_encrypted", lambda *_: True)
    report = merge_files(client, "db.t")
    assert report.commits == 0
    assert any("its encryption has changed" in error for error in report.errors)


def test_error_of_a_job_quotes_no_value_of_an_encrypted_file(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value does not fit into the column's type in the table, which the attacker has chosen."""
    with open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table("db.t", pa.schema([("at", pa.timestamp("us")), ("n", pa.int64())]), properties=PROPERTIES)
    secret = 1_234_567_890_123_456_789
    for number in range(2):
        append(client, "db.t", pa.table({"at": pa.array([0], pa.timestamp("us")), "n": [number]}))
    for path in list_paths(client):
        table = pa.table({"at": pa.array([secret], pa.timestamp("ns")), "n": [1]})
        ids = {"at": "1", "n": "2"}
        fields = [field.with_metadata({"PARQUET:field_id": ids[field.name]}) for field in table.schema]
        properties = encrypted.build_encryption(encrypted.build_configuration({"k1": ["at"]}, plaintext_footer=True))
        pq.write_table(table.cast(pa.schema(fields)), path, version="2.6", encryption_properties=properties)
    report = merge_files(client, "db.t")
    assert report.commits == 0
    assert "does not fit the type timestamp" in report.errors[0]
    assert "1234567890123456789" not in report.errors[0]
    assert "secret" not in format_error_line(pa.ArrowInvalid("Failed to parse string: 'secret'"), 500, with_class=True)
    assert format_error_line(OSError("No space left"), 500, with_class=True) == "OSError: No space left"
    # A process without keys reads no encrypted file, so its messages may quote values.
    monkeypatch.delenv(KMS_CLASS)
    monkeypatch.delenv(KEY_FILE)
    assert format_error_line(pa.ArrowInvalid("bad value 5"), 500, with_class=True) == "ArrowInvalid: bad value 5"


@pytest.mark.slow
def test_copied_file_keeps_its_encryption_in_another_table(client: IndexClient, server: ServerThread) -> None:
    """The other table is in the same namespace, and a job rewrites it."""
    create_table(server, 2)
    fill_with_encrypted_files(client, files=1, rows_per_file=700)
    with open_catalog(server.url) as catalog:
        catalog.create_table("db.other", SCHEMA, properties=PROPERTIES)
    for number in range(2):
        append(client, "db.other", build_rows(random.Random(number), range(350)))
    other_files = [
        str(path).removeprefix("file://") for path in client.files("db.other", content="data")["file_path"].to_pylist()
    ]
    for path in other_files:
        shutil.copy(list_paths(client)[0], path)
    report = merge_files(client, "db.other")
    assert report.commits + len(report.errors) > 0
    for path in list_table_paths(client, "db.other"):
        with SourceFile(path, Storage(), keys=encrypted.build_keys()) as source:
            assert source.encryption is not None
