"""Tests of `new_table`: fresh ids, versions, properties, and invalid create requests."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadataUtil, new_table_metadata
from pyiceberg.table.sorting import SortOrder

from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.runtime.errors import BadRequest
from tests.iceberg.samples import NOW_MS, UUID, build_field, build_order, build_schema, build_spec, build_table

NESTED_SCHEMA = build_schema(
    build_field(10, "id", "int", True),
    build_field(
        20,
        "place",
        {"type": "struct", "fields": [build_field(21, "x", "double"), build_field(22, "y", "double")]},
        True,
    ),
    build_field(
        30,
        "tags",
        {
            "type": "map",
            "key-id": 31,
            "key": "string",
            "value-id": 32,
            "value": {
                "type": "list",
                "element-id": 33,
                "element": {"type": "struct", "fields": [build_field(34, "v", "decimal(9,2)")]},
                "element-required": False,
            },
            "value-required": True,
        },
    ),
    build_field(40, "ts", "timestamp"),
    identifiers=(10,),
    schema_id=7,
)
SPEC = build_spec((40, "day", "ts_day"), (10, "bucket[8]", "id_bucket"), (21, "identity", "place.x"), ids=(5, 6, 7))
ORDER = build_order((22, "identity"), (10, "identity"), order_id=9)


def test_new_ids_equal_the_ids_of_pyiceberg() -> None:
    actual_table = build_table(schema=NESTED_SCHEMA, partition_spec=SPEC, sort_order=ORDER)
    expected_metadata = new_table_metadata(
        Schema.model_validate(NESTED_SCHEMA),
        PartitionSpec.model_validate(SPEC),
        SortOrder.model_validate(ORDER),
        "s3://lake/events",
        {},
    )
    read_metadata = TableMetadataUtil.parse_raw(encode_table(actual_table).decode())
    for name in ("schemas", "partition_specs", "sort_orders", "last_column_id", "last_partition_id", "format_version"):
        assert getattr(read_metadata, name) == getattr(expected_metadata, name), name
    assert actual_table.last_column_id == 10
    assert actual_table.last_partition_id == 1002
    assert actual_table.current_schema.identifier_field_ids == (1,)


def test_unpartitioned_unsorted_table_has_spec_0_and_order_0() -> None:
    metadata = build_table(partition_spec=build_spec(), sort_order=build_order(order_id=0))
    assert (metadata.default_spec_id, metadata.last_partition_id, metadata.default_sort_order_id) == (0, 999, 0)
    assert metadata.default_spec.fields == ()
    assert metadata.last_updated_ms == NOW_MS
    assert metadata.table_uuid == UUID


def test_format_version_property_sets_the_version_and_is_not_stored() -> None:
    metadata = build_table(3, properties={"owner": "ada", "uuid": "x", "current-schema": "{}"})
    assert metadata.format_version == 3
    assert metadata.properties == {"owner": "ada", "write.parquet.compression-codec": "zstd"}
    assert build_table(1).format_version == 1


def test_requested_parquet_codec_is_kept() -> None:
    assert build_table(properties={"write.parquet.compression-codec": "gzip"}).properties == {
        "write.parquet.compression-codec": "gzip"
    }


def test_trailing_slash_of_the_location_is_removed() -> None:
    assert build_table(location="s3://lake/events/").location == "s3://lake/events"


@pytest.mark.parametrize(
    ("extra_fields", "message"),
    [
        ({"properties": {"format-version": "4"}}, "Unsupported format version: v4"),
        ({"properties": {"format-version": "two"}}, "Property format-version must have an integer value"),
        ({"properties": {"commit.retry.num-retries": "-1"}}, "must have non negative integer value"),
        ({"properties": {"commit.retry.num-retries": "x"}}, "commit.retry.num-retries must have an integer value"),
        ({"properties": {"write.metadata.metrics.column.nope": "full"}}, "could not find column nope"),
        ({"properties": {"encryption.key-id": "k"}}, r"Invalid properties for v2: \['encryption.key-id'\]"),
        ({"schema": None}, "Invalid schema"),
        ({"schema": {"type": "list"}}, r"Invalid schema: .*\$.type"),
        ({"schema": build_schema(build_field(1, "a"), build_field(1, "b"))}, "multiple fields for id 1"),
        ({"schema": build_schema(build_field(1, "a"), build_field(2, "a"))}, "multiple fields for name a"),
        ({"schema": build_schema(build_field(1, "a", "varchar"))}, "Cannot parse type string to primitive: varchar"),
        (
            {"schema": build_schema(build_field(1, "a", "variant"))},
            "Invalid type for a: variant is not supported until v3",
        ),
        ({"schema": build_schema(build_field(1, "a", **{"initial-default": 1}))}, "Invalid initial default for a"),
        ({"schema": build_schema(build_field(1, "a"), identifiers=(1,))}, "not a required field"),
        (
            {"partition_spec": build_spec((99, "identity", "p"))},
            "Cannot find source column for partition field: None: p",
        ),
        ({"partition_spec": build_spec((99, "void", "p"))}, "Cannot find source column 99"),
        ({"partition_spec": build_spec((3, "day", "p"))}, "Invalid source type string for transform: day"),
        ({"partition_spec": build_spec((1, "bucket[0]", "p"))}, "the width must be between 1"),
        ({"partition_spec": build_spec((1, "bucket[4]", "ts"))}, "sourced from different field in schema: ts"),
        ({"partition_spec": build_spec((1, "identity", "p"), (2, "day", "p"))}, "partition name more than once: p"),
        (
            {"partition_spec": {"fields": [{"name": "p", "transform": "identity"}]}},
            "missing required field `source-id`",
        ),
        ({"sort_order": build_order((99, "identity"))}, "Cannot find source column for sort field"),
        ({"sort_order": build_order((1, "identity"), order_id=0)}, "Sort order ID 0 is reserved"),
        ({"sort_order": build_order(order_id=4)}, "Unsorted order ID must be 0"),
        ({"sort_order": {"order-id": 1, "fields": [{"direction": "up"}]}}, "Invalid sort order"),
    ],
)
def test_impossible_create_request_is_rejected_with_its_reason(extra_fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        build_table(**extra_fields)


def test_version_3_accepts_its_types_and_defaults() -> None:
    metadata = build_table(
        3,
        schema=build_schema(
            build_field(1, "v", "variant"),
            build_field(2, "g", "geography(OGC:CRS84, vincenty)"),
            build_field(3, "n", "timestamp_ns"),
            build_field(4, "u", "unknown"),
            build_field(5, "d", "decimal(5,1)", **{"initial-default": "1.5", "write-default": "2.5"}),
        ),
    )
    assert [field.type for field in metadata.current_schema.fields] == [
        "variant",
        "geography(OGC:CRS84, vincenty)",
        "timestamp_ns",
        "unknown",
        "decimal(5, 1)",
    ]
