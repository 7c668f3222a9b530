"""Hiding of values in plan tables that mislead some readers: readers whose pruning rules differ from Iceberg's.

DuckDB 1.5.5 is such a reader of plan tables:

- It truncates months and days before 1970 towards zero, and truncates texts by displayed characters. Its decimals with
  many digits, and its integers at the end of their range, overflow when they are truncated.
- It orders NaN as the greatest value, but compares it with bounds, which exclude NaN.
- It applies the equality deletes of one partition to all partitions of the spec. If an equality delete has a column
  that was dropped and added again, DuckDB ends with a segmentation fault.

The plan of the server has already left out files, so such a reader loses nothing if partitions are hidden. Identity
fields are not hidden: a file may lack a column whose value is in the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import msgspec

from seamark.formats.iceberg.manifests.content_file import EQUALITY_DELETES, ContentFile
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField
from seamark.formats.iceberg.types.schema import Type
from seamark.formats.iceberg.types.transforms import IDENTITY, VOID, canonicalize_transform
from seamark.formats.iceberg.types.values import FLOATS
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.planner.view.view import TableView

_ALL_ROWS = 1
"""The value of a `ColumnEntry` flag that is true for all rows."""
_APPLIED_BY = "`seamark run compact` applies them"


def has_misleading_values(view: TableView, metadata: TableMetadata) -> bool:
    """Return whether a reader whose rules differ from Iceberg's may leave out files that its query needs.

    There are three possible reasons: bounds are unusable, a column with bounds may have NaN, or a partition field is
    not the untransformed value of a current column.
    """
    if any(block.has_unusable_bounds or may_have_nan(block) for block in view.blocks):
        return True
    specs = {block.spec_id for block in view.blocks}
    fields = [field for spec in metadata.partition_specs if spec.spec_id in specs for field in spec.fields]
    return not all(
        _has_source(field, metadata) and (field.is_void or _is_identity(field, metadata)) for field in fields
    )


def may_have_nan(block: Block) -> bool:
    """Return whether a column with bounds may have NaN in a file of the manifest."""
    entries = (block.find_entry(column_id) for column_id in block.columns)
    return any(
        entry.kind in FLOATS and entry.no_nans != _ALL_ROWS and (entry.lower is not None or entry.upper is not None)
        for entry in entries
        if entry is not None
    )


def drop_nan_bounds(file: ContentFile, find_type: Callable[[int], Type | None]) -> ContentFile:
    """Return the content file without bounds of columns that may have NaN.

    Bounds ignore NaN, but some readers order NaN above all numbers, and would leave out files with NaN.

    Args:
        file: The content file.
        find_type: A function that returns the type of a column by its id.
    """
    changes = {}
    for name in ("lower_bounds", "upper_bounds"):
        bounds: dict[int, bytes] = getattr(file, name) or {}
        counts = file.nan_value_counts or {}
        usable_bounds = {
            column: data
            for column, data in bounds.items()
            if counts.get(column) == 0 or find_type(column) not in FLOATS
        }
        if len(usable_bounds) < len(bounds):
            changes[name] = usable_bounds
    return msgspec.structs.replace(file, **changes) if changes else file


def hide_partition_fields(metadata: TableMetadata) -> TableMetadata:
    """Return the metadata with partition specs that mislead no reader.

    Identity fields of present columns stay. Each other field becomes a void field with an id that no manifest has, so
    its value is null. The field is not removed, because DuckDB 1.5.5 ends the process if manifests have partition
    values but the specs have no field.
    """
    first_id = max((spec.last_field_id for spec in metadata.partition_specs), default=0) + 1
    ids = count(max(first_id, metadata.last_partition_id + 1))
    specs = tuple(
        msgspec.structs.replace(
            spec,
            fields=tuple(
                field if _is_identity(field, metadata) else _to_void_field(field, next(ids), metadata)
                for field in spec.fields
            ),
        )
        for spec in metadata.partition_specs
    )
    return msgspec.structs.replace(metadata, partition_specs=specs)


def explain_misread_deletes(view: TableView, metadata: TableMetadata) -> str:
    """Return the reason why a reader whose rules differ from Iceberg's applies equality deletes wrongly.

    The text is empty if such a reader applies the equality deletes of the snapshot correctly.
    """
    sources = {
        spec.spec_id: {source for field in spec.fields for source in field.sources} for spec in metadata.partition_specs
    }
    for block, columns in _list_equality_deletes(view):
        # A delete whose keys include all partition columns deletes no row of another partition.
        if not sources.get(block.spec_id, set()).issubset(columns):
            return (
                "the table has equality deletes of one partition, which DuckDB applies to all partitions; "
                f"{_APPLIED_BY}"
            )
        if any(metadata.current_schema.column(column) is None for column in columns):
            return (
                "the table has equality deletes by a column that was dropped since, at which DuckDB may crash; "
                f"{_APPLIED_BY}"
            )
    return ""


def _list_equality_deletes(view: TableView) -> Iterator[tuple[Block, list[int]]]:
    """Yield the blocks of the snapshot's equality deletes, each with its columns."""
    for block in view.delete_blocks:
        contents, columns = block.read_longs("content").tolist(), block.read_lists("equality_ids")
        for content, ids in zip(contents, columns, strict=True):
            if content == EQUALITY_DELETES:
                yield block, ids or []


def _is_identity(field: PartitionField, metadata: TableMetadata) -> bool:
    return canonicalize_transform(field.transform) == IDENTITY and _has_source(field, metadata)


def _has_source(field: PartitionField, metadata: TableMetadata) -> bool:
    """Return whether the source columns of a partition field are in the current schema."""
    return all(metadata.current_schema.column(source) is not None for source in field.sources)


def _to_void_field(field: PartitionField, field_id: int, metadata: TableMetadata) -> PartitionField:
    """Return a void field, whose value is always null, with this id, in place of a partition field.

    A field needs a source column. If the original source was dropped, it is any primitive column.
    """
    schema = metadata.current_schema
    source = field.sources[0] if len(field.sources) == 1 and _has_source(field, metadata) else None
    if source is None:
        source = next((column.id for column in schema.fields if isinstance(column.type, str)), schema.fields[0].id)
    return PartitionField(name=field.name, transform=VOID, source_id=source, field_id=field_id)
