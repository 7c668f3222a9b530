"""Partition specs with earlier bucket counts.

When buckets are split, the files of these specs are divided among the buckets of the current spec.
"""

from __future__ import annotations

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.transforms import canonicalize_transform, get_transform_name, get_transform_width

BUCKET = "bucket"


def list_bucket_fields(spec: PartitionSpec) -> list[PartitionField]:
    """Return the fields of a partition spec that are buckets of a single column."""
    return [
        field
        for field in spec.fields
        if get_transform_name(canonicalize_transform(field.transform)) == BUCKET and len(field.sources) == 1
    ]


def list_coarser_specs(metadata: TableMetadata) -> frozenset[int]:
    """Return the ids of specs whose bucket count is smaller than the current count and divides it.

    A returned spec has buckets of the same columns as the current spec. Each of its buckets consists of whole buckets
    of the current spec, because a bucket is the remainder of a hash divided by the count.
    """
    current_counts = {
        field.sources: get_transform_width(canonicalize_transform(field.transform))
        for field in list_bucket_fields(metadata.default_spec)
    }
    return frozenset(
        spec.spec_id
        for spec in metadata.partition_specs
        for field in list_bucket_fields(spec)
        if (current_count := current_counts.get(field.sources, 0))
        > (count := get_transform_width(canonicalize_transform(field.transform)))
        and current_count % count == 0
    )
