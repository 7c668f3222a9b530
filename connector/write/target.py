"""Defines the write target: the part of a table's metadata that writers need.

The target can be pickled, so the driver loads it once for all tasks. It has the state of the table at that time. If the
schema or the partition spec changes later, the commit detects the change.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from seamark.connector.arrow.casting import Unwritable, build_arrow_schema
from seamark.connector.arrow.partitions import Partition, Partitioner
from seamark.connector.arrow.sort_order import Ordering
from seamark.connector.client.names import Name
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import EngineTable
from seamark.connector.index.files import IndexTask
from seamark.connector.parquet.columns import Projection
from seamark.connector.parquet.encryption.keys import EnvironmentKeys
from seamark.connector.read.lineage import LINEAGE, NAMES
from seamark.connector.write.locations import format_partition_path, make_data_location
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.metadata.sort_order import UNSORTED, SortOrder
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.reserved import ROW_ID
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import get_transform_name
from seamark.formats.index.definitions import list_writable_definitions
from seamark.formats.protocol.wire import INDEX_FOLDER

ENCRYPTION_KEY = "encryption.key-id"


@dataclass(frozen=True)
class WriteTarget:
    """The part of a table's metadata that writers need.

    Attributes:
        properties: The properties of the table.
        indexes: The indexes to build for each data file.
    """

    table_uuid: str
    location: str
    format_version: int
    schema: Schema
    spec: PartitionSpec
    sort_order: SortOrder = UNSORTED
    properties: Mapping[str, str] = field(default_factory=dict)
    storage: Storage = field(default_factory=Storage)
    indexes: tuple[IndexTask, ...] = ()

    @staticmethod
    def from_engine_table(engine_table: EngineTable, name: Name | None = None) -> WriteTarget:
        """Return the target for the table's current schema, spec, sort order and enabled indexes.

        Args:
            name: See `create_target`.

        Raises:
            Corrupt: The table metadata are invalid.
            Unwritable: The table has encrypted files, which the writer does not support.
        """
        metadata = decode_table(engine_table.metadata, engine_table.location)
        return create_target(metadata, Storage.of_table(engine_table.storage, metadata.location), name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def arrow(self) -> pa.Schema:
        """The Arrow schema of data files.

        Raises:
            Unwritable: A column has an unsupported type.
        """
        return build_arrow_schema(self.schema)

    @cached_property
    def partitioner(self) -> Partitioner:
        return Partitioner(self.spec, self.schema)

    @cached_property
    def ordering(self) -> Ordering | None:
        return Ordering(self.sort_order, self.schema) if self.sort_order.fields else None

    def generate_location(self, partition: Partition, *, suffix: str = ".parquet") -> str:
        """Return a unique location for a file.

        File names in a bucket begin with the number of the bucket, so that listings group the files of each bucket.
        With several bucket fields, the first bucket that is not null counts.
        """
        terms = self.partitioner.terms
        buckets = [
            f"{value:08d}-"
            for term, value in zip(terms, partition, strict=True)
            if get_transform_name(term.transform) == "bucket" and value is not None
        ]
        kinds, transforms = [term.result for term in terms], [term.transform for term in terms]
        path = format_partition_path(self.partitioner.names, transforms, kinds, partition)
        return make_data_location(self.location, self.properties, path, f"{''.join(buckets[:1])}{uuid.uuid4()}{suffix}")


def create_target(metadata: TableMetadata, storage: Storage, name: Name | None = None) -> WriteTarget:
    """Return the target for the current state of a table.

    Args:
        name: The name of the table, by which the index builder finds the keys of encrypted files. Without a name, it
            uses no keys.

    Raises:
        Unwritable: The table has encrypted files, which the writer does not support.
    """
    check_unencrypted(metadata)
    location = metadata.location.rstrip("/")
    projection = Projection(metadata.current_schema)
    table_uuid = metadata.table_uuid or ""
    folder, file_keys = f"{location}/{INDEX_FOLDER}/{uuid.uuid4()}", EnvironmentKeys(name)
    return WriteTarget(
        table_uuid=table_uuid,
        location=location,
        format_version=metadata.format_version,
        schema=metadata.current_schema,
        spec=metadata.default_spec,
        sort_order=metadata.sort_order(metadata.default_sort_order_id) or UNSORTED,
        properties=metadata.properties,
        storage=storage,
        indexes=tuple(
            IndexTask(table_uuid, definition, projection, folder, storage, file_keys)
            for definition in list_writable_definitions(metadata)
        ),
    )


def check_unencrypted(metadata: TableMetadata) -> None:
    """Check that the files of a table are not encrypted.

    Raises:
        Unwritable: The table has encrypted files, which the writer does not support.
    """
    if metadata.properties.get(ENCRYPTION_KEY):
        raise Unwritable(f"the table's files are encrypted ({ENCRYPTION_KEY} is set); Seamark cannot write them")


def has_lineage_columns(target: WriteTarget) -> bool:
    """Return whether the data files of a target have the lineage columns."""
    return any(field.id == ROW_ID for field in target.schema.fields)


def with_lineage(target: WriteTarget) -> WriteTarget:
    """Return a target for files with the two lineage columns after the table's columns.

    Rows without lineage have nulls in these columns.

    Raises:
        Unwritable: A column of the table has the name of a lineage column.
    """
    if reserved_names := [field.name for field in target.schema.fields if field.name in NAMES]:
        raise Unwritable(
            f"the table has a column {reserved_names[0]}, a name that the format reserves; rename the column"
        )
    schema = target.schema
    return replace(target, schema=Schema((*schema.fields, *LINEAGE), schema.schema_id, schema.identifier_field_ids))
