"""Upserts and deletes by key without locating rows: one commit adds equality deletes and new rows.

No index and no data file of the table is read, so the cost of a batch does not depend on the size of the table, and the
report has no counts of stored rows. Readers have more work: until a compaction applies the deletes, they compare the
keys with the rows of each file to which the deletes apply. PyIceberg cannot read tables with equality deletes.

The deletes apply to rows with one of the keys in all files of lower sequence numbers. New rows have the same sequence
number as the deletes, so they stay. An equality delete file applies either to the files of one partition of one spec
or, if its spec has no fields, to all files. If the table has a spec without fields, the deletes use that spec.
Otherwise there are deletes for each spec of the table, whose fields must be derived from key columns.

The commit has only one possible conflict: since the table was loaded, another writer has added a partition spec and
has written files with it, for example after a resize of buckets. The change is then prepared again.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.compute as pc

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.read.tables import OpenTable
from seamark.connector.write.delete_files import WrittenDeletes, check_equality_deletes, write_equality_deletes
from seamark.connector.write.latest_rows import KeyedBatch
from seamark.connector.write.row_changes import NOTHING, Report, RowChange
from seamark.connector.write.row_locations import BatchKeys
from seamark.connector.write.table_writer import WrittenFiles, discard_on_error, write_batches
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.expressions.ranges import find_overflowed_truncation
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.transforms import canonicalize_transform

EQUALITY = "equality"
_INT_MIN = -(1 << 31)


def check_equality_arguments(mode: str | None, precombine: str | None, columns: Sequence[str] | None) -> None:
    """Check that no argument requires stored rows, which the strategy does not read.

    Raises:
        ValueError: An argument requires stored rows.
    """
    for name, value in (("precombine", precombine), ("columns", columns)):
        if value is not None:
            raise ValueError(f"{name} needs the stored rows, which strategy={EQUALITY!r} does not read")
    if mode is not None and mode.lower() != "merge-on-read":
        raise ValueError(f"mode is {mode!r}; strategy={EQUALITY!r} requires merge-on-read")


def check_table(source_table: OpenTable, target: WriteTarget, keys: Sequence[str]) -> None:
    """Check that the table supports equality upserts by these keys, for any batch of rows.

    Raises:
        Unwritable: The table or the key does not support equality upserts: a key is a float, the format version is 1,
            or the keys do not determine the partition.
    """
    check_equality_deletes(target, keys)
    _select_specs(source_table.metadata, keys)


def write_equality_upsert(
    batch: KeyedBatch, source_table: OpenTable, target: WriteTarget, *, deletes: bool = False
) -> RowChange:
    """Delete all rows with the keys of the batch and, unless `deletes` is True, add the rows of the batch.

    Raises:
        Unwritable: The table or the key does not support equality upserts (`check_table`), or the partition value of a
            key depends on an earlier type of its column.
    """
    if not batch.keys.count:
        return NOTHING
    columns = [field.name for field in batch.keys.fields]
    keys = batch.rows.select(columns)
    parts: list[WrittenDeletes] = []
    with discard_on_error(parts, target.storage):
        for spec in _select_specs(source_table.metadata, columns):
            _check_partitions_as_int(batch.keys, spec)
            written_deletes = write_equality_deletes(target, keys, columns, spec=spec)
            parts.append(written_deletes)
        data = WrittenFiles() if deletes else write_batches(target, batch.rows.to_batches())
    return RowChange(None, Report(), data, WrittenDeletes.join(parts))


def _select_specs(metadata: TableMetadata, columns: Sequence[str]) -> list[PartitionSpec]:
    """Return the partition specs for which equality deletes must be written to apply to every file of the table.

    Equality deletes of a spec without fields apply to all files, so one such spec is sufficient. A spec with only void
    fields counts as a spec without fields, as for readers. Without such a spec, each spec needs its own delete file.

    Raises:
        Unwritable: Every spec has fields, and a field is not derived from the key columns.
    """
    ids = {field.id for field in metadata.current_schema.fields if field.name in columns}
    spec_fields = [(spec, field) for spec in metadata.partition_specs for field in spec.fields if not field.is_void]
    foreign_fields = [(spec, field) for spec, field in spec_fields if not ids.issuperset(field.sources)]
    partitioned_specs = {spec.spec_id for spec, _ in spec_fields}
    if unpartitioned_specs := [spec for spec in metadata.partition_specs if spec.spec_id not in partitioned_specs]:
        return [min(unpartitioned_specs, key=lambda spec: len(spec.fields))]
    if foreign_fields:
        spec, field = foreign_fields[0]
        raise Unwritable(
            f"partition spec {spec.spec_id} of the table has the field {field.name}, which is not derived "
            f"from the key {', '.join(columns)}: the partitions of the stored rows are unknown, and the table has no "
            "spec without fields. Use another strategy, or add the source columns of the field to the key"
        )
    return list(metadata.partition_specs)


def _check_partitions_as_int(keys: BatchKeys, spec: PartitionSpec) -> None:
    """Check that each key has the same partition value as a long and as an int (`ranges.find_overflowed_truncation`).

    If the column was an int, stored rows may have the partition value of the int. An equality delete in the partition
    of the long does not apply to these rows. The values differ only for keys near the smallest int.

    Raises:
        Unwritable: A key has different partition values as a long and as an int.
    """
    by_id = {field.id: (field, column) for field, column in zip(keys.fields, keys.columns, strict=True)}
    for spec_field in spec.fields:
        field, column = by_id.get(spec_field.source_id or 0, (None, None))
        int_form = (
            None
            if field is None
            else find_overflowed_truncation(canonicalize_transform(spec_field.transform), str(field.type))
        )
        if field is None or column is None or int_form is None:
            continue
        is_wrapped = pc.and_(pc.greater_equal(column, _INT_MIN), pc.less(column, int_form.end))
        if pc.any(is_wrapped).as_py():
            range_text = "next to the smallest int" if int_form.end < 0 else "in the range of ints"
            raise Unwritable(
                f"a key of column {field.name} is {range_text}, and the column may once have been an int. Therefore "
                "the "
                f"partition of its rows under {spec_field.transform} is not certain; use another strategy"
            )
