"""Metadata of tables without snapshots, for tests of written files, and functions that read the files by PyIceberg."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io.pyarrow import ArrowScan, PyArrowFileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata as PyIcebergMetadata
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.typedef import Record

from seamark.connector.arrow.casting import conform
from seamark.connector.client.storage import Storage
from seamark.connector.write.target import WriteTarget, create_target
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import UNPARTITIONED, PartitionField, PartitionSpec
from seamark.formats.iceberg.metadata.sort_order import UNSORTED, SortField, SortOrder
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.iceberg.types.schema import Field, ListType, MapType, Schema, StructType
from tests.connector.read import typed

EVERY_TYPE = Schema(
    (
        *(Field(1 + position, f"c{position} {kind}", False, kind) for position, kind in enumerate(typed.SAMPLES)),
        Field(30, "st", False, StructType((Field(31, "a", True, "int"), Field(32, "b.c", False, "string")))),
        Field(33, "deep", False, StructType((Field(34, "in", False, StructType((Field(35, "d", False, "double"),))),))),
        Field(36, "list", False, ListType(37, "long", False)),
        Field(38, "map", False, MapType(39, "string", 40, StructType((Field(41, "x", False, "date"),)), False)),
        Field(42, "lists", False, ListType(43, ListType(44, "string", True), False)),
    )
)
"""A schema with a column of each primitive type, in the order of `typed.SAMPLES`, and nested columns."""


def build_spec(*fields: tuple[str, int]) -> PartitionSpec:
    """Return a partition spec with fields of (transform, source id)."""
    partition_fields = [
        PartitionField(f"p{n}", transform, source, (), 1000 + n) for n, (transform, source) in enumerate(fields)
    ]
    return PartitionSpec(0, tuple(partition_fields))


def build_order(*fields: tuple[str, int, str, str]) -> SortOrder:
    """Return a sort order with fields of (transform, source id, direction, null order)."""
    return SortOrder(
        1, tuple(SortField(transform, direction, nulls, source) for transform, source, direction, nulls in fields)
    )


def build_metadata(
    folder: Path | str,
    schema: Schema,
    *,
    spec: PartitionSpec = UNPARTITIONED,
    order: SortOrder = UNSORTED,
    properties: Mapping[str, str] | None = None,
    version: int = 3,
) -> TableMetadata:
    """Return table metadata without a snapshot."""
    return TableMetadata(
        format_version=version,
        table_uuid=str(uuid.UUID(int=7)),
        location=folder if isinstance(folder, str) else folder.as_uri(),
        last_updated_ms=1,
        last_column_id=schema.highest_field_id,
        schemas=(schema,),
        current_schema_id=schema.id,
        partition_specs=(spec,),
        default_spec_id=spec.spec_id,
        last_partition_id=max(999, spec.last_field_id),
        sort_orders=(UNSORTED, order) if order.order_id else (UNSORTED,),
        default_sort_order_id=order.order_id,
        properties=dict(properties or {}),
    )


def build_target(metadata: TableMetadata) -> WriteTarget:
    return create_target(metadata, Storage())


def to_pyiceberg_metadata(metadata: TableMetadata) -> PyIcebergMetadata:
    return TableMetadataUtil.parse_raw(encode_table(metadata).decode())


def to_pyiceberg_file(content_file: Mapping[str, Any]) -> DataFile:
    """Return the file in the form of PyIceberg's manifests."""

    def index_by_id(name: str) -> dict[int, Any] | None:
        field_value = content_file.get(name)
        return None if field_value is None else dict(zip(field_value["keys"], field_value["values"], strict=True))

    def decode_bounds(name: str) -> dict[int, bytes] | None:
        values = index_by_id(name)
        return None if values is None else {column_id: bytes.fromhex(text) for column_id, text in values.items()}

    data_file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=content_file["file-path"],
        file_format=FileFormat(content_file["file-format"].upper()),
        partition=Record(*content_file["partition"]),
        record_count=content_file["record-count"],
        file_size_in_bytes=content_file["file-size-in-bytes"],
        column_sizes=index_by_id("column-sizes"),
        value_counts=index_by_id("value-counts"),
        null_value_counts=index_by_id("null-value-counts"),
        nan_value_counts=index_by_id("nan-value-counts"),
        lower_bounds=decode_bounds("lower-bounds"),
        upper_bounds=decode_bounds("upper-bounds"),
        split_offsets=content_file["split-offsets"],
        sort_order_id=content_file["sort-order-id"],
    )
    data_file.spec_id = content_file["spec-id"]
    return data_file


def read_by_pyiceberg(
    metadata: TableMetadata, files: Iterable[Mapping[str, Any]], where: BooleanExpression | None = None
) -> pa.Table:
    """Return the rows of the files as PyIceberg reads them, or only the rows that match `where`."""
    parsed_metadata = to_pyiceberg_metadata(metadata)
    scan = ArrowScan(parsed_metadata, PyArrowFileIO(), parsed_metadata.schema(), where or AlwaysTrue())
    return scan.to_table([FileScanTask(to_pyiceberg_file(file)) for file in files])  # The scan reads its tasks twice.


def build_every_type(columns: Mapping[str, Sequence[Any]], nested_ids: Sequence[int]) -> pa.Table:
    """Return rows of `EVERY_TYPE` with the given values. Each nested value is derived from a number in `nested_ids`."""
    arrays = {
        f"c{position} {kind}": typed.build_array(kind, columns[kind]) for position, kind in enumerate(typed.SAMPLES)
    }
    arrays["st"] = pa.array(
        [[None, {"a": 1, "b.c": None}, {"a": -1, "b.c": "x" * 20}][number % 3] for number in nested_ids],
        pa.struct([("a", pa.int32()), ("b.c", pa.string())]),
    )
    arrays["deep"] = pa.array(
        [[None, {"in": None}, {"in": {"d": float("nan")}}, {"in": {"d": -0.0}}][number % 4] for number in nested_ids],
        pa.struct([("in", pa.struct([("d", pa.float64())]))]),
    )
    arrays["list"] = pa.array(
        [[None, [], [1, None], [7] * 3][number % 4] for number in nested_ids], pa.list_(pa.int64())
    )
    arrays["map"] = pa.array(
        [[None, [], [("k", None)], [("k", {"x": number}), ("l", {"x": None})]][number % 4] for number in nested_ids],
        pa.map_(pa.string(), pa.struct([("x", pa.date32())])),
    )
    arrays["lists"] = pa.array(
        [[None, [], [None, []], [["a"], ["b", "c"]]][number % 4] for number in nested_ids],
        pa.list_(pa.list_(pa.string())),
    )
    return pa.table(arrays)


def conform_rows(rows: pa.Table, target: WriteTarget) -> pa.Table:
    batches = [conform(batch, target.schema, target.arrow) for batch in rows.to_batches()]
    return pa.Table.from_batches(batches, target.arrow)


def index_by_column(metrics: Mapping[str, Any]) -> dict[int, Any]:
    """Convert a `CountMap` or `ValueMap` to a dict by column id; bounds become bytes."""
    values = (bytes.fromhex(value) if isinstance(value, str) else value for value in metrics["values"])
    return dict(zip(metrics["keys"], values, strict=True))
