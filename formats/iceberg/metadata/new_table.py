"""Create the metadata of a new table from a create request.

All ids are assigned, as in Java's `TableMetadata.newTableMetadata`: the client's ids are ignored, and the table starts
with column 1, partition field 1000, schema 0, spec 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from seamark.formats.iceberg.metadata import partition, sort_order
from seamark.formats.iceberg.metadata import properties as props
from seamark.formats.iceberg.metadata.metadata import FORMAT_VERSION_DEFAULT, FORMAT_VERSION_MAX, TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec, PartitionSpecInput
from seamark.formats.iceberg.metadata.sort_order import SortOrder
from seamark.formats.iceberg.types import schema as schemas
from seamark.formats.iceberg.types.reading import convert_json_value
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest

_SCHEMA_ID = 0
_SPEC_ID = 0
_SORT_ORDER_ID = 1


def build_table_metadata(
    *,
    uuid: str,
    location: str,
    schema: object,
    partition_spec: object = None,
    sort_order: object = None,
    properties: Mapping[str, str],
    now_ms: int,
    default_format_version: int = FORMAT_VERSION_DEFAULT,
) -> TableMetadata:
    """Return the first metadata of a table.

    `schema`, `partition_spec` and `sort_order` are JSON values of the request. The property `format-version` selects
    the version. Like every reserved property, it is not stored. New tables use Parquet with zstd by default.

    Raises:
        BadRequest: The format does not allow a part of the request.
    """
    version = props.parse_int(properties, props.FORMAT_VERSION, default_format_version)
    if not 1 <= version <= FORMAT_VERSION_MAX:
        raise BadRequest(f"Unsupported format version: v{version} (supported: v{FORMAT_VERSION_MAX})")
    requested_schema = schemas.normalize_schema(convert_json_value(schema, Schema, "schema"))
    schemas.check_format_version(requested_schema, version)
    table_properties = {
        props.PARQUET_COMPRESSION: props.PARQUET_COMPRESSION_NEW_TABLES,
        **props.drop_reserved(properties),
    }
    props.check_new_table(table_properties, requested_schema, version)
    new_schema, new_ids = schemas.assign_fresh_ids(requested_schema, _SCHEMA_ID)
    spec = _renumber_spec(partition_spec, requested_schema, new_schema, new_ids)
    order = _renumber_order(sort_order, requested_schema, new_ids)
    return TableMetadata(
        format_version=version,
        table_uuid=uuid,
        location=location.rstrip("/") if not location.endswith("://") else location,
        last_updated_ms=now_ms,
        last_column_id=new_schema.highest_field_id,
        schemas=(new_schema,),
        current_schema_id=_SCHEMA_ID,
        partition_specs=(spec,),
        default_spec_id=_SPEC_ID,
        last_partition_id=spec.last_field_id,
        sort_orders=(order,),
        default_sort_order_id=order.order_id,
        properties=table_properties,
    )


def _renumber_spec(
    value: object, requested_schema: Schema, new_schema: Schema, new_ids: Mapping[int, int]
) -> PartitionSpec:
    """Parse the partition spec of a new table, and replace its column ids and field ids by new ids.

    Args:
        value: The JSON of the spec, or None for a table without partitions.
        requested_schema: The schema with the client's column ids.
        new_schema: The same schema with the new column ids.
        new_ids: The new column ids by the client's column ids.
    """
    if value is None:
        return partition.UNPARTITIONED
    spec = partition.normalize_spec(convert_json_value(value, PartitionSpecInput, "partition spec"))
    partition.check_names(spec, requested_schema)
    partition.check_compatible(spec, requested_schema)
    fields = tuple(
        msgspec.structs.replace(
            field,
            source_id=None if field.source_id is None else _renumber_column(field.source_id, new_ids),
            source_ids=tuple(_renumber_column(source_id, new_ids) for source_id in field.source_ids),
            field_id=partition.FIELD_ID_START + position,
        )
        for position, field in enumerate(spec.fields)
    )
    result = PartitionSpec(_SPEC_ID, fields)
    partition.check_names(result, new_schema)
    return result


def _renumber_order(value: object, requested_schema: Schema, new_ids: Mapping[int, int]) -> SortOrder:
    """Parse the sort order of a new table, and replace its column ids by new ids.

    Args:
        value: The JSON of the sort order, or None for an unsorted table.
        requested_schema: The schema with the client's column ids.
        new_ids: The new column ids by the client's column ids.
    """
    if value is None:
        return sort_order.UNSORTED
    order = sort_order.normalize_order(convert_json_value(value, SortOrder, "sort order"))
    sort_order.check_compatible(order, requested_schema)
    if not order.fields:
        return sort_order.UNSORTED
    fields = tuple(
        msgspec.structs.replace(
            field,
            source_id=None if field.source_id is None else _renumber_column(field.source_id, new_ids),
            source_ids=tuple(_renumber_column(source_id, new_ids) for source_id in field.source_ids),
        )
        for field in order.fields
    )
    return SortOrder(_SORT_ORDER_ID, fields)


def _renumber_column(source_id: int, new_ids: Mapping[int, int]) -> int:
    # Only a void partition field can refer to a missing column, and a new table has no dropped columns.
    if source_id not in new_ids:
        raise BadRequest(f"Cannot find source column {source_id} in schema")
    return new_ids[source_id]
