"""Rows in files with another schema than the snapshot: older files, and files of other writers."""

from __future__ import annotations

import json
import random
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
    UUIDType,
)

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import At
from seamark.connector.read.read_plan import ReadPlan
from seamark.connector.read.scans import TaskReader, scan
from seamark.connector.read.tables import ScanTask
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types import schema as seamark_schema
from tests.connector import lake
from tests.connector.server_thread import ServerThread


def create_evolved_table(url: str) -> None:
    """Create `db.e`, with five snapshots, four schemas and two partition specs."""
    inner = StructType(NestedField(20, "x", IntegerType()), NestedField(21, "y", StringType()))
    list_type = ListType(22, StructType(NestedField(23, "p", IntegerType()), NestedField(24, "q", FloatType())))
    schema = Schema(
        NestedField(1, "id", LongType()),
        NestedField(2, "n", IntegerType()),
        NestedField(3, "f", FloatType()),
        NestedField(4, "d", DecimalType(9, 2)),
        NestedField(5, "s", StringType()),
        NestedField(6, "st", inner),
        NestedField(7, "li", list_type),
        NestedField(8, "m", MapType(25, StringType(), 26, inner)),
        NestedField(9, "u", UUIDType()),
        NestedField(10, "ts", TimestamptzType()),
        NestedField(11, "gone", StringType()),
    )
    with lake.open_catalog(url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        table = catalog.create_table("db.e", schema=schema)

        def append(start: int) -> None:
            arrow_schema = table.schema().as_arrow()
            rng = random.Random(start)
            rows = [draw_row(rng, arrow_schema, number) for number in range(start, start + 40)]
            table.append(pa.Table.from_pylist(rows, schema=arrow_schema))

        append(0)
        with table.update_schema() as update:
            update.rename_column("s", "text")
            update.update_column("n", LongType())
            update.update_column("f", DoubleType())
            update.update_column("d", DecimalType(18, 2))
            update.delete_column("gone")
            update.rename_column("st.x", "ex")
            update.add_column(("st", "z"), DoubleType())
            update.add_column(("li", "r"), StringType())
        append(100)
        with table.update_schema() as update:
            update.add_column("gone", IntegerType())
            update.delete_column("st.y")
            update.move_first("text")
            update.update_column(("li", "q"), DoubleType())
            update.rename_column(("m", "y"), "why")
        append(200)
        with table.update_spec() as spec:
            spec.add_identity("gone")
        append(FIRST_PARTITIONED_ROW)
        with table.update_schema() as update:
            update.rename_column("gone", "here")
        append(400)


FIRST_PARTITIONED_ROW = 300
"""The number of the first row that is written after the table is partitioned by `gone`."""


def draw_row(rng: random.Random, schema: pa.Schema, number: int) -> dict[str, Any]:
    """Return a random row. If the table is already partitioned by `gone`, this column has few values."""
    row = {field.name: draw_value(rng, field.type) for field in schema}
    is_partitioned = number >= FIRST_PARTITIONED_ROW and "gone" in row
    return row | {"id": number} | ({"gone": rng.choice([1, None])} if is_partitioned else {})


def draw_value(rng: random.Random, kind: pa.DataType) -> Any:
    if rng.random() < 0.15:
        return None
    if pa.types.is_struct(kind):
        return {field.name: draw_value(rng, field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(key, draw_value(rng, kind.item_type)) for key in rng.sample("abc", rng.randint(0, 3))]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [draw_value(rng, kind.value_type) for _ in range(rng.randint(0, 3))]
    if pa.types.is_floating(kind):
        return rng.choice([0.5, -1.25, 3.0])
    if pa.types.is_decimal(kind):
        return Decimal(rng.randint(-500, 500)) / 100
    if pa.types.is_timestamp(kind):
        return datetime(2026, 1, rng.randint(1, 28), tzinfo=UTC)
    if isinstance(kind, pa.UuidType) or pa.types.is_fixed_size_binary(kind):
        return uuid.UUID(int=rng.getrandbits(128)).bytes
    return rng.randint(-5, 5) if pa.types.is_integer(kind) else rng.choice(["", "a", "ä\U0001f600"])


def normalize_rows(table: pa.Table) -> list[str]:
    """Return the rows as texts that are equal for equal rows.

    PyIceberg returns uuids as an extension type, and some lists and texts as large types.
    """
    rows = sorted(table.to_pylist(), key=lambda row: row["id"])
    return [
        repr({name: value.bytes if isinstance(value, uuid.UUID) else value for name, value in row.items()})
        for row in rows
    ]


def test_files_of_older_schemas_are_read_with_the_schema_of_the_snapshot(
    server: ServerThread, client: SeamarkClient
) -> None:
    create_evolved_table(server.url)
    with lake.open_catalog(server.url) as catalog:
        table = catalog.load_table("db.e")
        assert len(table.schemas()) == 4
        for snapshot in (None, *(snapshot.snapshot_id for snapshot in table.metadata.snapshots)):
            oracle = table.scan(snapshot_id=snapshot).to_arrow()
            rows = scan(client, "db.e", at=At(snapshot_id=snapshot)).to_arrow()
            assert rows.schema.names == oracle.schema.names
            assert normalize_rows(rows) == normalize_rows(oracle), snapshot
        first_snapshot = At(snapshot_id=table.metadata.snapshots[0].snapshot_id)
        with pytest.raises(InvalidRequest, match="a column cannot hold its literal"):
            scan(client, "db.e", where="f < 0.7", at=first_snapshot)
        names = ["here", "st", "text"]
        for sql, expected_text in (
            ("here = 1", "here = 1"),
            ("here IS NULL AND n > 0", "here IS NULL AND n > 0"),
            ("st.ex >= 2", "st.ex >= 2"),
            ("NOT st.ex >= 2", "st.ex < 2"),
            ("text <> 'a'", "text != 'a' AND text IS NOT NULL"),
            ("n NOT IN (1, 2) OR f = 0.5", "(n NOT IN (1, 2) AND n IS NOT NULL) OR f = 0.5"),
        ):
            oracle = table.scan(row_filter=expected_text, selected_fields=("id", *names)).to_arrow()
            rows = scan(client, "db.e", ["id", *names], sql).to_arrow()
            assert rows.num_rows > 0
            assert normalize_rows(rows) == normalize_rows(oracle.select(["id", *names])), sql


def test_column_that_an_older_file_lacks_has_its_default_or_partition_value(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    fields = [pa.field("b", pa.int32(), metadata={"PARQUET:field_id": "2"})]
    pq.write_table(pa.table([[1, 2]], schema=pa.schema(fields)), path)
    inner = seamark_schema.StructType((seamark_schema.Field(5, "in", False, "date", initial_default="2026-01-31"),))
    schema = seamark_schema.Schema(
        (
            seamark_schema.Field(1, "part", False, "decimal(9, 2)", initial_default="5.00"),
            seamark_schema.Field(2, "b", False, "long", initial_default=7),
            seamark_schema.Field(3, "late", False, "string", initial_default="new"),
            seamark_schema.Field(4, "st", False, inner),
        ),
        0,
    )
    spec = PartitionSpec(0, (PartitionField("part", "identity", 1, (), 1000),))
    metadata = create_new_table(schema, spec, tmp_path)
    file = {"file-path": f"file://{path}", "file-format": "parquet", "record-count": 2, "spec-id": 0}
    expected = ReadPlan(metadata, schema, ("part", "b", "late", "st"))
    for partition, part in ((["1.25"], Decimal("1.25")), ([None], None)):
        (batch,) = TaskReader(expected, Storage()).read(ScanTask({**file, "partition": partition}, ()))
        assert batch.to_pylist() == [{"part": part, "b": b, "late": "new", "st": None} for b in (1, 2)]
    where = bind(parse_sql("late = 'new' AND b > 1", schema).expression, schema, (), case_sensitive=True)
    filtered_plan = ReadPlan(metadata, schema, ("late",), where)
    (batch,) = TaskReader(filtered_plan, Storage()).read(ScanTask({**file, "partition": [None]}, ()))
    assert batch.to_pylist() == [{"late": "new"}]


def test_file_without_ids_is_read_by_the_name_mapping_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    rows = [{"old": 1, "st": {"x": [5, None]}}, {"old": None, "st": None}]
    arrow_schema = pa.schema([("old", pa.int32()), ("st", pa.struct([("x", pa.list_(pa.int32()))]))])
    pq.write_table(pa.Table.from_pylist(rows, arrow_schema), path)
    elements = seamark_schema.ListType(5, "long", False)
    inner = seamark_schema.StructType((seamark_schema.Field(3, "x", False, elements),))
    schema = seamark_schema.Schema(
        (seamark_schema.Field(1, "id", False, "long"), seamark_schema.Field(2, "st", False, inner)), 0
    )
    file = {"file-path": f"file://{path}", "file-format": "parquet", "record-count": 2, "spec-id": 0, "partition": []}
    mapping = [
        {"field-id": 1, "names": ["id", "old"]},
        {"field-id": 2, "names": ["st"], "fields": [
            {"field-id": 3, "names": ["x"], "fields": [{"field-id": 5, "names": ["element"]}]}]},
    ]  # fmt: skip
    metadata = create_new_table(schema, PartitionSpec(0, ()), tmp_path)
    with pytest.raises(Unreadable, match="no field ids, and the table has no name mapping"):
        list(TaskReader(ReadPlan(metadata, schema, ("id",)), Storage()).read(ScanTask(file, ())))
    mapped_metadata = msgspec.structs.replace(metadata, properties={"schema.name-mapping.default": json.dumps(mapping)})
    (batch,) = TaskReader(ReadPlan(mapped_metadata, schema, ("st", "id")), Storage()).read(ScanTask(file, ()))
    assert batch.to_pylist() == [{"st": {"x": [5, None]}, "id": 1}, {"st": None, "id": None}]


def create_new_table(schema: seamark_schema.Schema, spec: PartitionSpec, folder: Path) -> TableMetadata:
    return TableMetadata(
        format_version=3,
        table_uuid="u",
        location=folder.as_uri(),
        last_updated_ms=0,
        last_column_id=9,
        schemas=(schema,),
        current_schema_id=0,
        partition_specs=(spec,),
        default_spec_id=0,
        last_partition_id=1000,
        sort_orders=(),
        default_sort_order_id=0,
    )


@pytest.mark.parametrize(
    ("array", "kind", "expected"),
    [
        (pa.array([2**40], pa.int64()), "int", "cannot be read as int32"),
        (pa.array(["x"]), "int", "cannot be read as int32"),
        (pa.array([1], pa.timestamp("ns")), "timestamp", "does not fit the type timestamp"),
        (pa.array([b"\xff"], pa.binary()), "string", "does not fit the type string"),
        (pa.array([Decimal("1.234")]), "decimal(9, 2)", "cannot be read as decimal"),
        (pa.array([[1]]), "int", "cannot be read as int32"),
    ],
)
def test_column_that_cannot_be_converted_is_refused_by_name(
    tmp_path: Path, array: pa.Array, kind: str, expected: str
) -> None:
    path = tmp_path / "data.parquet"
    fields = [pa.field("b", array.type, metadata={"PARQUET:field_id": "2"})]
    pq.write_table(pa.table([array], schema=pa.schema(fields)), path)
    schema = seamark_schema.Schema((seamark_schema.Field(2, "now", False, kind),), 0)
    metadata = create_new_table(schema, PartitionSpec(0, ()), tmp_path)
    file = {"file-path": f"file://{path}", "file-format": "parquet", "record-count": 1, "spec-id": 0, "partition": []}
    with pytest.raises(Unreadable, match=f"column for now .*{expected}"):
        list(TaskReader(ReadPlan(metadata, schema, ("now",)), Storage()).read(ScanTask(file, ())))
