"""Partition specs of earlier bucket counts, whose files a split divides among the buckets of the current spec."""

from __future__ import annotations

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.transforms import canonical, name_of, width_of

BUCKET = "bucket"


def bucket_fields(spec: PartitionSpec) -> list[PartitionField]:
    """Return the fields that are buckets of one column."""
    return [field for field in spec.fields if name_of(canonical(field.transform)) == BUCKET and len(field.sources) == 1]


def coarser_specs(metadata: TableMetadata) -> frozenset[int]:
    """Return the ids of specs that have buckets of a column of the current spec's buckets, but fewer, which divide
    the current number.
    """
    current = {field.sources: width_of(canonical(field.transform)) for field in bucket_fields(metadata.default_spec)}
    return frozenset(
        spec.spec_id
        for spec in metadata.partition_specs
        for field in bucket_fields(spec)
        if (count := current.get(field.sources, 0)) > (width := width_of(canonical(field.transform)))
        and count % width == 0
    )
