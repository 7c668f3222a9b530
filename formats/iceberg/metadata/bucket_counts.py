"""Partition specs of earlier bucket counts.

When buckets are split, the files of such a spec are divided among the buckets of the current spec.
"""

from __future__ import annotations

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.transforms import canonical, name_of, width_of

BUCKET = "bucket"


def bucket_fields(spec: PartitionSpec) -> list[PartitionField]:
    """Return the fields of the spec that are buckets of a single column."""
    return [field for field in spec.fields if name_of(canonical(field.transform)) == BUCKET and len(field.sources) == 1]


def coarser_specs(metadata: TableMetadata) -> frozenset[int]:
    """Return the ids of specs whose bucket count divides the current bucket count, and is smaller.

    Such a spec has buckets of the same columns as the current spec.
    """
    current = {field.sources: width_of(canonical(field.transform)) for field in bucket_fields(metadata.default_spec)}
    return frozenset(
        spec.spec_id
        for spec in metadata.partition_specs
        for field in bucket_fields(spec)
        if (count := current.get(field.sources, 0)) > (width := width_of(canonical(field.transform)))
        and count % width == 0
    )
