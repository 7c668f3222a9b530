"""Tests of files that Seamark and Iceberg's Java library write: Spark reads the same rows, and metrics agree.

Spark copies Seamark's rows into another table, partition by partition. So each of Spark's files has the rows of
one of Seamark's files, and the test compares the metrics of the two. Then Spark reads Seamark's deletes and
adds to them, and Seamark adds to Spark's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    FixedType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    UUIDType,
)
from pyspark.sql import SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import CommitClient
from seamark.connector.client.values import CURRENT
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append
from seamark.connector.write.delete_files import DeletedRows, WrittenDeletes, write_deletes, write_equality_deletes
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import decode_single_value
from tests.connector.read import typed
from tests.engines.conftest import collect_rows
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

KINDS = [kind for kind in typed.SAMPLES if kind != "time" and not kind.endswith("_ns")]
"""The types that Spark supports."""
PARTS, ROWS = 6, 240


@dataclass(frozen=True)
class WrittenFilesLake:
    """Tables that Seamark and Spark write, and that PyIceberg reads."""

    client: SeamarkClient
    spark: SparkSession
    catalog: str
    pyiceberg_catalog: RestCatalog

    def run_sql(self, text: str) -> list[tuple[Any, ...]]:
        return collect_rows(self.spark.sql(text.format(db=f"{self.catalog}.db")))


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrittenFilesLake]:
    with (
        Seamark(tmp_path_factory.mktemp("written")) as server,
        RestCatalog("w", uri=server.base_url) as pyiceberg_catalog,
    ):
        pyiceberg_catalog.create_namespace("db")
        client = SeamarkClient(server.base_url)
        yield WrittenFilesLake(client, spark, new_catalog(spark, server.base_url), pyiceberg_catalog)
        client.close()


def to_pyiceberg_type(kind: str) -> IcebergType:
    if kind == "uuid":
        return UUIDType()
    return FixedType(3) if kind == "fixed[3]" else IcebergType.handle_primitive_type(kind, lambda name: name)


COLUMNS = {kind: f"c{column_number}" for column_number, kind in enumerate(KINDS)}
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "part", IntegerType(), required=False),
    *(
        NestedField(3 + column_number, COLUMNS[kind], to_pyiceberg_type(kind), required=False)
        for column_number, kind in enumerate(KINDS)
    ),
    NestedField(
        30,
        "st",
        StructType(
            NestedField(31, "a", IntegerType(), required=True),
            NestedField(32, "in", StructType(NestedField(33, "s", StringType(), required=False)), required=False),
        ),
        required=False,
    ),
    NestedField(34, "li", ListType(35, LongType(), element_required=False), required=False),
    NestedField(36, "m", MapType(37, StringType(), 38, LongType(), value_required=False), required=False),
)
BY_PART = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "part"))


def make_rows() -> pa.Table:
    """Return rows of several parts, each with up to three values of each type.

    In the last part, the columns of all types are null.
    """
    rng = random.Random(11)
    part_numbers = [None if number % PARTS == 0 else number % PARTS for number in range(ROWS)]
    columns: dict[str, list[Any]] = {}
    for kind in KINDS:
        samples_by_part = {
            number: rng.sample(list(typed.SAMPLES[kind]), min(3, len(typed.SAMPLES[kind]))) for number in range(PARTS)
        }
        columns[kind] = [
            None if number % PARTS == PARTS - 1 or rng.random() < 0.2 else rng.choice(samples_by_part[number % PARTS])
            for number in range(ROWS)
        ]
    structs = [None, {"a": 1, "in": None}, {"a": 2, "in": {"s": "x" * 30}}, {"a": -3, "in": {"s": None}}]
    return pa.table(
        {
            "id": pa.array(range(ROWS), pa.int64()),
            "part": pa.array(part_numbers, pa.int32()),
            **{COLUMNS[kind]: typed.build_array(kind, columns[kind]) for kind in KINDS},
            "st": pa.array(
                [structs[number % 4] for number in range(ROWS)],
                pa.struct([("a", pa.int32()), ("in", pa.struct([("s", pa.string())]))]),
            ),
            "li": pa.array([[None, [], [1, None]][number % 3] for number in range(ROWS)], pa.list_(pa.int64())),
            "m": pa.array(
                [[None, [], [("k", 1)]][number % 3] for number in range(ROWS)], pa.map_(pa.string(), pa.int64())
            ),
        }
    )


@pytest.fixture(scope="module")
def written_rows(lake: WrittenFilesLake) -> pa.Table:
    """Write rows into `db.ours` with Seamark, copy them into `db.theirs` with Spark, and return them."""
    table = make_rows()
    for name in ("ours", "theirs"):
        lake.pyiceberg_catalog.create_table(f"db.{name}", SCHEMA, partition_spec=BY_PART)
    append(lake.client, "db.ours", table)
    lake.run_sql("INSERT INTO {db}.theirs SELECT * FROM {db}.ours DISTRIBUTE BY part")
    return table


@pytest.mark.slow
def test_pyiceberg_reads_the_written_values_of_every_type(lake: WrittenFilesLake, written_rows: pa.Table) -> None:
    for name in ("ours", "theirs"):
        actual_table = lake.pyiceberg_catalog.load_table(f"db.{name}").scan().to_arrow().sort_by("id")
        assert actual_table["part"].to_pylist() == written_rows["part"].to_pylist()
        for kind, column in COLUMNS.items():
            assert typed.are_all_same(
                typed.to_plain(kind, actual_table[column]), typed.to_plain(kind, written_rows[column])
            ), (
                name,
                kind,
            )
        for column in ("st", "li", "m"):
            assert actual_table[column].to_pylist() == written_rows[column].to_pylist(), (name, column)


def read_metrics(lake: WrittenFilesLake, name: str) -> dict[Any, dict[str, dict[int, Any]]]:
    """Return the metrics of each part from Spark's metadata table. Also check that the files have no sort order."""
    metric_names = ("value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")
    actual = lake.run_sql(f"SELECT partition.part, sort_order_id, {', '.join(metric_names)} FROM {{db}}.{name}.files")
    assert all(row[1] == 0 for row in actual)
    return {
        row[0]: {key: dict(value or {}) for key, value in zip(metric_names, row[2:], strict=True)} for row in actual
    }


@pytest.mark.slow
def test_metrics_equal_the_metrics_that_iceberg_writes(lake: WrittenFilesLake, written_rows: pa.Table) -> None:
    fields = {
        column: lake.pyiceberg_catalog.load_table("db.ours").schema().find_field(column)
        for column in [*COLUMNS.values(), "st.a", "st.in.s"]
    }
    kinds = {field.field_id: str(field.field_type) for field in fields.values()} | {1: "long", 2: "int"}
    seamark_metrics, spark_metrics = read_metrics(lake, "ours"), read_metrics(lake, "theirs")
    assert seamark_metrics.keys() == spark_metrics.keys() == {None, *range(1, PARTS)}
    for part, part_metrics in seamark_metrics.items():
        expected = spark_metrics[part]
        for name in ("value_counts", "null_value_counts", "nan_value_counts"):
            assert part_metrics[name] == expected[name], (part, name)
        for name in ("lower_bounds", "upper_bounds"):
            assert part_metrics[name].keys() == expected[name].keys(), (part, name)
            for column_id, bound in part_metrics[name].items():
                kind = kinds[column_id]
                # The values are equal, but their bits can differ, because zeros can have a different sign.
                bounds = (
                    decode_single_value(kind, bytes(bound)),
                    decode_single_value(kind, bytes(expected[name][column_id])),
                )
                assert bounds[0] == bounds[1], (part, name, get_base_name(kind))


def delete_by_position(lake: WrittenFilesLake, name: str, ids: set[int]) -> WrittenDeletes:
    """Delete the rows of these ids by position in one commit, and return the written deletes."""
    loaded_table = lake.client.load_table(f"db.{name}")
    table = open_table(lake.client, f"db.{name}", CURRENT)
    target, old_deletes = WriteTarget.from_engine_table(loaded_table), Deletes(table.storage, table.metadata)
    deleted_rows = []
    for task in plan(lake.client, table):
        with pa.memory_map(task.path.removeprefix("file://")) as source:
            file_ids = pa.parquet.read_table(source, columns=["id"])["id"].to_pylist()
        positions = np.array([position for position, value in enumerate(file_ids) if value in ids], dtype=np.int64)
        deleted_rows.append(
            DeletedRows(task.path, task.file["spec-id"], task.file["partition"], positions, task.deletes)
        )
    written_files = write_deletes(target, deleted_rows, old_deletes)
    body = {
        "read-snapshot-id": table.snapshot_id,
        "add": list(written_files.files),
        "remove": list(written_files.removed),
    }
    CommitClient(lake.client).commit(f"db.{name}", body)
    return written_files


@pytest.mark.slow  # test_spark_statements.py has deletions of Spark, and tests/connector those of Seamark.
@pytest.mark.parametrize("version", [2, 3])
def test_spark_and_seamark_delete_from_one_table_in_turn(lake: WrittenFilesLake, version: int) -> None:
    name = f"turns{version}"
    lake.run_sql(
        f"CREATE TABLE {{db}}.{name} (id bigint, part int) USING iceberg PARTITIONED BY (part) TBLPROPERTIES "
        f"('format-version' = '{version}', 'write.delete.mode' = 'merge-on-read')"
    )
    for start in (0, 100):
        ids = range(start, start + 100)
        append(
            lake.client,
            f"db.{name}",
            pa.table({"id": pa.array(ids, pa.int64()), "part": pa.array([id_ % 3 for id_ in ids], pa.int32())}),
        )
    expected_ids = set(range(200))
    for round_number in range(3):
        # Each round deletes other rows of every file: every 11th id by Seamark, and every 13th id by Spark.
        deleted_ids = set(range(round_number, 200, 11))
        written_files = delete_by_position(lake, name, deleted_ids)
        if version == 3:
            assert {file["file-format"] for file in written_files.files} == {"PUFFIN"}
            # From the second round on, each of the six files already has a vector.
            assert len(written_files.removed) == (6 if round_number else 0)
        expected_ids -= deleted_ids
        assert {id_ for (id_,) in lake.run_sql(f"SELECT id FROM {{db}}.{name}")} == expected_ids
        lake.run_sql(f"DELETE FROM {{db}}.{name} WHERE id % 13 = {round_number}")
        expected_ids -= {id_ for id_ in expected_ids if id_ % 13 == round_number}
        assert {id_ for (id_,) in lake.run_sql(f"SELECT id FROM {{db}}.{name}")} == expected_ids
        assert lake.run_sql(f"SELECT count(*) FROM {{db}}.{name}") == [(len(expected_ids),)]
    actual_table = lake.pyiceberg_catalog.load_table(f"db.{name}").scan().to_arrow()
    assert set(actual_table["id"].to_pylist()) == expected_ids


@pytest.mark.slow
def test_spark_leaves_out_the_rows_of_equality_deletes(lake: WrittenFilesLake) -> None:
    lake.run_sql("CREATE TABLE {db}.keyed (id bigint, land string) USING iceberg PARTITIONED BY (bucket(4, id))")
    ids = list(range(50))
    append(lake.client, "db.keyed", pa.table({"id": ids, "land": [None if id_ % 5 else "de" for id_ in ids]}))
    table = open_table(lake.client, "db.keyed", CURRENT)
    target = WriteTarget.from_engine_table(lake.client.load_table("db.keyed"))
    keys = pa.table({"id": [3, 4, 5, 999], "land": [None, "de", "de", None]})
    written_files = write_equality_deletes(target, keys, ["id", "land"])
    CommitClient(lake.client).commit(
        "db.keyed", {"read-snapshot-id": table.snapshot_id, "add": list(written_files.files)}
    )
    append(lake.client, "db.keyed", pa.table({"id": [3], "land": pa.array([None], pa.string())}))
    # The row 3 was deleted and appended again. The row 4 has no land, so it does not match the key (4, 'de').
    assert sorted(id_ for (id_,) in lake.run_sql("SELECT id FROM {db}.keyed")) == [id_ for id_ in ids if id_ != 5]
