"""Creates a table for a DataFrame, and adds columns of a DataFrame to a table."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import types as spark

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.catalog import create_table
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name
from seamark.connector.client.updates import update_table
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale

_ICEBERG_TYPES: dict[type[spark.DataType], str] = {
    spark.BooleanType: "boolean",
    spark.ByteType: "int",
    spark.ShortType: "int",
    spark.IntegerType: "int",
    spark.LongType: "long",
    spark.FloatType: "float",
    spark.DoubleType: "double",
    spark.DateType: "date",
    spark.TimestampType: "timestamptz",
    spark.TimestampNTZType: "timestamp",
    spark.StringType: "string",
    spark.VarcharType: "string",
    spark.CharType: "string",
    spark.BinaryType: "binary",
}
_TRANSFORMS = {"year": "year", "years": "year", "month": "month", "months": "month", "day": "day", "days": "day"}
_TRANSFORMS |= {"hour": "hour", "hours": "hour", "identity": "identity", "date": "day", "date_hour": "hour"}
_TRANSFORMS_WITH_WIDTH = ("bucket", "truncate")
_NAME, _WIDTH = r"(`[^`]+`|\w+)", r"([0-9]{1,9})"
_TERM = re.compile(rf"(\w+)\s*\(\s*(?:{_WIDTH}\s*,\s*)?{_NAME}\s*(?:,\s*{_WIDTH}\s*)?\)|{_NAME}")
_TERM_TEXT = re.compile(r"(?:[^,(]|\([^)]*+\)?+)++")
"""Matches a term of a list. Commas in parentheses do not separate terms."""
_FIRST_FIELD_ID = 1000


def convert_to_iceberg_type(kind: spark.DataType, ids: Iterator[int]) -> Any:
    """Return the JSON form of the Iceberg type for the values of a Spark type.

    Raises:
        Unwritable: There is no such Iceberg type.
    """
    match kind:
        case spark.DecimalType():
            return f"decimal({kind.precision}, {kind.scale})"
        case spark.StructType():
            return {"type": "struct", "fields": _assign_field_ids(kind, ids)}
        case spark.ArrayType():
            element = next(ids)
            inner = convert_to_iceberg_type(kind.elementType, ids)
            required = not kind.containsNull
            return {"type": "list", "element-id": element, "element-required": required, "element": inner}
        case spark.MapType():
            key, value = next(ids), next(ids)
            return {
                "type": "map",
                "key-id": key,
                "key": convert_to_iceberg_type(kind.keyType, ids),
                "value-id": value,
                "value-required": not kind.valueContainsNull,
                "value": convert_to_iceberg_type(kind.valueType, ids),
            }
    name = _ICEBERG_TYPES.get(type(kind))
    if name is None:
        raise Unwritable(f"Iceberg has no type for values of Spark's type {kind.simpleString()}; cast the column")
    return name


def _assign_field_ids(struct: spark.StructType, ids: Iterator[int]) -> list[dict[str, Any]]:
    fields_with_ids = [(next(ids), field) for field in struct.fields]
    return [
        {"id": number, "name": field.name, "required": False, "type": convert_to_iceberg_type(field.dataType, ids)}
        for number, field in fields_with_ids
    ]


def create_for_frame(
    client: SeamarkClient,
    table: Name,
    columns: spark.StructType,
    *,
    partitioning: Sequence[str] = (),
    properties: Mapping[str, str],
) -> None:
    """Create a table with the columns of a frame. All columns are optional.

    Args:
        client: The client of the server.
        table: The name of the new table.
        columns: The columns of the frame.
        partitioning: Columns and transforms, such as `bucket(16, id)`.
        properties: The properties of the new table.

    Raises:
        Unwritable: Iceberg does not have a type or a transform.
        ClientError: The server refuses the table or cannot be reached.
    """
    fields = _assign_field_ids(columns, itertools.count(1))
    ids = {str(field["name"]): int(field["id"]) for field in fields}
    spec = {"fields": [_parse_partition_field(text, ids, number) for number, text in enumerate(partitioning)]}
    create_table(client, table, {"type": "struct", "fields": fields}, partition_spec=spec, properties=properties)


def split_terms(text: str) -> list[str]:
    """Split a list of terms at its commas. `bucket(16, id), day` has two terms."""
    return [term.strip() for term in _TERM_TEXT.findall(text) if term.strip()]


def _parse_partition_field(text: str, ids: Mapping[str, int], number: int) -> dict[str, Any]:
    """Return the partition field that a text such as `bucket(16, id)` describes, in the JSON form of Iceberg.

    Args:
        text: A column, or a transform of a column.
        ids: The ids of the table's columns, by name.
        number: The position of the field in the partition spec. Its field id depends on the position.

    Raises:
        Unwritable: The text is not a column or a supported transform, or the column does not exist.
    """
    match = _TERM.fullmatch(text)
    if match is None:
        raise Unwritable(
            f"{text!r} is not a partition field; write a column or a transform, for example bucket(16, id) or days(ts)"
        )
    function, width_before, inner, width_after, column_alone = match.groups()
    column, width = (inner or column_alone).strip("`"), width_before or width_after
    if column not in ids:
        raise Unwritable(f"the rows have no column {column} to partition by; they have {', '.join(ids)[:500]}")
    transform = "identity" if function is None else _TRANSFORMS.get(function.lower())
    if function is not None and function.lower() in _TRANSFORMS_WITH_WIDTH and width is not None:
        transform = f"{function.lower()}[{width}]"
    if transform is None or (width is not None and "[" not in transform):
        supported_transforms = ", ".join(
            ["bucket(N, column)", "truncate(N, column)", "years", "months", "days", "hours"]
        )
        raise Unwritable(f"{text!r} is not a partition transform; the transforms are {supported_transforms}")
    suffix = "" if transform == "identity" else f"_{transform.partition('[')[0]}"
    name, field_id = f"{column}{suffix}", _FIRST_FIELD_ID + number
    return {"source-id": ids[column], "field-id": field_id, "name": name, "transform": transform}


# Merging schemas


def merge_schema(client: SeamarkClient, table: Name, columns: spark.StructType) -> None:
    """Add the columns of a frame that the table does not have, and widen the types of its columns.

    New columns are optional and are added at the end. The type of a column is widened if Iceberg permits it: int to
    long, float to double, and a decimal to more digits. Nested fields do not change.
    """
    engine_table = client.load_table(table)
    metadata = decode_table(engine_table.metadata, engine_table.location)
    schemas = json.loads(engine_table.metadata)["schemas"]
    schema = next(candidate for candidate in schemas if candidate["schema-id"] == metadata.current_schema_id)
    ids = itertools.count(metadata.last_column_id + 1)
    by_name = {field["name"]: field for field in schema["fields"]}
    is_changed = False
    for field in columns.fields:
        stored_field = by_name.get(field.name)
        if stored_field is None:
            number = next(ids)
            kind = convert_to_iceberg_type(field.dataType, ids)
            schema["fields"].append({"id": number, "name": field.name, "required": False, "type": kind})
            is_changed = True
        elif isinstance(stored_field["type"], str) and (
            wider := _find_wider_type(stored_field["type"], convert_to_iceberg_type(field.dataType, ids))
        ):
            stored_field["type"] = wider
            is_changed = True
    if is_changed:
        _commit_schema(client, table, metadata, schema, next(ids) - 1)


def _find_wider_type(stored_type: str, new: Any) -> str | None:
    """Return the new type of a stored column, or None if its type does not change.

    The type also stays unchanged if Iceberg cannot widen it to `new`. The write then checks whether the values fit.
    """
    if (stored_type, new) in (("int", "long"), ("float", "double")):
        return str(new)
    if isinstance(new, str) and get_base_name(stored_type) == get_base_name(new) == "decimal":
        has_more_digits = get_decimal_precision(new) > get_decimal_precision(stored_type)
        return new if has_more_digits and get_decimal_scale(new) == get_decimal_scale(stored_type) else None
    return None


def _commit_schema(
    client: SeamarkClient, table: Name, metadata: TableMetadata, schema: Mapping[str, Any], last_id: int
) -> None:
    number = max(old_schema.id for old_schema in metadata.schemas) + 1
    requirements: list[dict[str, Any]] = [
        {"type": "assert-table-uuid", "uuid": metadata.table_uuid},
        {"type": "assert-current-schema-id", "current-schema-id": metadata.current_schema_id},
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": metadata.last_column_id},
    ]
    updates: list[dict[str, Any]] = [
        {"action": "add-schema", "schema": {**schema, "schema-id": number}, "last-column-id": last_id},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    update_table(client, table, requirements, updates)
