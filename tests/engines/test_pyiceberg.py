"""Tests of unmodified PyIceberg 0.12: Spark reads the rows that PyIceberg writes, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from botocore.hooks import EventAliaser
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceNotEmptyError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.expressions import EqualTo, GreaterThan
from pyiceberg.io.fsspec import S3V4RestSigner
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, DayTransform
from pyiceberg.types import LongType, StringType
from pyspark.sql import SparkSession

from tests.engines.conftest import StorageLake, collect_rows
from tests.engines.spark.test_spark import S3_IO
from tests.services.spark import new_catalog


@pytest.fixture(scope="module", autouse=True)
def separate_filesystems() -> Iterator[None]:
    """Give each table and thread its own filesystem.

    docs/how-to/connect-pyiceberg.md recommends separate filesystems to users of remote signing.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {"skip_instance_cache": True})
        yield


@pytest.fixture(scope="module")
def catalog(lake: StorageLake) -> Iterator[RestCatalog]:
    with RestCatalog("seamark", uri=lake.server.base_url, **lake.client_properties) as catalog:
        catalog.create_namespace("py")
        yield catalog


def _build_people(*names: str, start: int = 0) -> pa.Table:
    return pa.table({"id": pa.array(range(start, start + len(names)), pa.int64()), "name": pa.array(names)})


def test_pyiceberg_creates_appends_scans_deletes_and_overwrites(catalog: RestCatalog) -> None:
    table = catalog.create_table("py.people", schema=_build_people("a").schema)
    table.append(_build_people("ann", "bob", "cy"))
    table.append(_build_people("dee", start=3))
    assert sorted(table.scan(row_filter=GreaterThan("id", 1)).to_arrow().column("name").to_pylist()) == ["cy", "dee"]  # type: ignore[call-arg]
    table.delete(EqualTo("name", "bob"))  # type: ignore[call-arg]
    assert sorted(catalog.load_table("py.people").scan().to_arrow().column("id").to_pylist()) == [0, 2, 3]
    table.overwrite(_build_people("zed"))
    assert table.scan().to_arrow().to_pylist() == [{"id": 0, "name": "zed"}]
    assert len(table.history()) >= 4  # Two appends, a delete and an overwrite, which can commit two snapshots.


def _write_and_read(table: Table, name: str) -> str:
    path = f"{table.location()}/data/{name}"
    with table.io.new_output(path).create() as file:
        file.write(name.encode())
    with table.io.new_input(path).open() as file:
        return file.read().decode()


@pytest.mark.slow
def test_two_tables_are_used_alternately(catalog: RestCatalog) -> None:
    """With fsspec's cache, PyIceberg would sign requests for the first table as requests for the second one."""
    tables = [catalog.create_table(f"py.turn_{number}", schema=_build_people("a").schema) for number in range(2)]
    for name in ("a", "b", "c"):
        assert [_write_and_read(table, name) for table in tables] == [name, name]


@pytest.mark.slow
def test_new_thread_does_not_remove_the_signer_of_other_threads(
    catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fsspec's cache, a new thread would remove the signer of all threads, whose requests would then get a 403."""
    table = catalog.create_table("py.threads", schema=_build_people("a").schema)
    assert _write_and_read(table, "before") == "before"
    has_started, may_continue = Event(), Event()
    register_last = EventAliaser.register_last

    def register_after_pause(self: EventAliaser, event: str, handler: Any, **options: Any) -> None:
        if isinstance(handler, S3V4RestSigner):
            has_started.set()
            may_continue.wait(60)
        register_last(self, event, handler, **options)

    def write_in_thread() -> str:
        try:
            return _write_and_read(table, "theirs")
        finally:
            has_started.set()  # PyIceberg signs nothing if files are local or if the client has keys.

    monkeypatch.setattr(EventAliaser, "register_last", register_after_pause)
    with ThreadPoolExecutor(1) as pool:
        other_write = pool.submit(write_in_thread)
        try:
            assert has_started.wait(60)
            assert _write_and_read(table, "mine") == "mine"
        finally:
            may_continue.set()
        assert other_write.result() == "theirs"


def test_pyiceberg_replaces_and_inserts_rows_by_upsert(catalog: RestCatalog) -> None:
    table = catalog.create_table("py.upserts", schema=_build_people("a").schema)
    table.append(_build_people("ann", "bob"))
    report = table.upsert(_build_people("bob2", "cy", start=1), join_cols=["id"])
    assert (report.rows_updated, report.rows_inserted) == (1, 1)
    assert {row["id"]: row["name"] for row in table.scan().to_arrow().to_pylist()} == {0: "ann", 1: "bob2", 2: "cy"}


def test_pyiceberg_evolves_schema_and_partitions(catalog: RestCatalog) -> None:
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us"))])
    table = catalog.create_table("py.evolving", schema=schema)
    with table.update_schema() as update:
        update.add_column("note", StringType())
        update.rename_column("id", "key")
    with table.update_spec() as spec:
        spec.add_field("key", BucketTransform(4), "key_bucket")
        spec.add_field("at", DayTransform(), "at_day")
    loaded_table = catalog.load_table("py.evolving")
    assert [field.name for field in loaded_table.schema().fields] == ["key", "at", "note"]
    assert [field.name for field in loaded_table.spec().fields] == ["key_bucket", "at_day"]
    assert loaded_table.schema().find_field("key").field_type == LongType()


def test_pyiceberg_reads_earlier_snapshots_branches_and_tags(catalog: RestCatalog) -> None:
    table = catalog.create_table("py.travel", schema=_build_people("a").schema)
    table.append(_build_people("ann"))
    first_snapshot = table.current_snapshot()
    assert first_snapshot is not None
    table.manage_snapshots().create_tag(first_snapshot.snapshot_id, "v1").create_branch(
        first_snapshot.snapshot_id, "dev"
    ).commit()
    table.append(_build_people("bob", start=1))
    table.append(_build_people("dev", start=9), branch="dev")
    assert table.scan(snapshot_id=first_snapshot.snapshot_id).to_arrow().num_rows == 1
    assert table.scan().use_ref("dev").to_arrow().column("id").to_pylist() in ([0, 9], [9, 0])
    assert table.scan().use_ref("v1").to_arrow().num_rows == 1
    assert table.scan().to_arrow().num_rows == 2


def test_pyiceberg_creates_and_fills_a_table_in_one_transaction(catalog: RestCatalog) -> None:
    with catalog.create_table_transaction("py.staged", schema=_build_people("a").schema) as transaction:
        transaction.set_properties({"owner": "me"})
        transaction.append(_build_people("ann"))
        assert not catalog.table_exists("py.staged")
    table = catalog.load_table("py.staged")
    assert table.properties["owner"] == "me"
    assert table.scan().to_arrow().num_rows == 1


def test_pyiceberg_lists_renames_and_drops_in_nested_namespaces(catalog: RestCatalog) -> None:
    catalog.create_namespace(("py", "in.ner"), {"k": "v"})
    identifier = ("py", "in.ner", "t")
    catalog.create_table(identifier, schema=_build_people("a").schema)
    assert catalog.list_namespaces("py") == [("py", "in.ner")]
    assert catalog.load_namespace_properties(("py", "in.ner"))["k"] == "v"
    catalog.update_namespace_properties(("py", "in.ner"), {"k"}, {"n": "1"})
    assert "k" not in catalog.load_namespace_properties(("py", "in.ner"))
    catalog.rename_table(identifier, ("py", "in.ner", "u"))
    assert catalog.list_tables(("py", "in.ner")) == [("py", "in.ner", "u")]
    with pytest.raises(NamespaceNotEmptyError):
        catalog.drop_namespace(("py", "in.ner"))
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table(("py", "in.ner", "u"), schema=_build_people("a").schema)
    catalog.purge_table(("py", "in.ner", "u"))
    with pytest.raises(NoSuchTableError):
        catalog.load_table(("py", "in.ner", "u"))
    catalog.drop_namespace(("py", "in.ner"))


def test_conflicting_commit_of_pyiceberg_is_retried_or_fails_without_retries(catalog: RestCatalog) -> None:
    catalog.create_table("py.race", schema=_build_people("a").schema)
    first_table, second_table = catalog.load_table("py.race"), catalog.load_table("py.race")
    second_table.append(_build_people("first"))
    first_table.append(_build_people("second"))  # PyIceberg gets a 409, refreshes the table, and tries again by itself.
    assert catalog.load_table("py.race").scan().to_arrow().num_rows == 2

    retry_properties = {"commit.retry.num-retries": "0"}
    catalog.create_table("py.stubborn", schema=_build_people("a").schema, properties=retry_properties)
    first_table, second_table = catalog.load_table("py.stubborn"), catalog.load_table("py.stubborn")
    second_table.append(_build_people("first"))
    with pytest.raises(CommitFailedException, match="branch main"):
        first_table.append(_build_people("second"))
    assert catalog.load_table("py.stubborn").scan().to_arrow().num_rows == 1


@pytest.mark.few_cases(1)
def test_spark_reads_rows_of_pyiceberg_and_pyiceberg_those_of_spark(
    catalog: RestCatalog, lake: StorageLake, spark: SparkSession
) -> None:
    catalog_options = {**lake.client_properties, **(S3_IO if lake.storage.startswith("S3") else {})}
    spark_catalog = new_catalog(spark, lake.server.base_url, extra=catalog_options)
    table = catalog.create_table("py.shared", schema=_build_people("a").schema)
    table.append(_build_people("from python"))
    spark.sql(f"INSERT INTO {spark_catalog}.py.shared VALUES (1, 'from spark')")
    spark.sql(f"DELETE FROM {spark_catalog}.py.shared WHERE id = 0")
    assert collect_rows(spark.sql(f"SELECT * FROM {spark_catalog}.py.shared")) == [(1, "from spark")]
    assert catalog.load_table("py.shared").scan().to_arrow().to_pylist() == [{"id": 1, "name": "from spark"}]
