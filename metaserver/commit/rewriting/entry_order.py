"""Divides the entries of manifests among new manifests, so that few manifests list the files of a partition.

The functions are pure.

An engine that plans its scans reads the manifests whose ranges of partition values match, and reads them completely.
Therefore entries are sorted by their partition, and a manifest ends where a partition ends, if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from seamark.formats.iceberg.manifests.content_file import ContentFile
from seamark.formats.iceberg.manifests.writer import ManifestEntry
from seamark.formats.iceberg.metadata.clustering import ClusteringLayout
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.values import compute_partition_key, decode_single_value
from seamark.formats.runtime.errors import BadRequest

Key = tuple[object, ...]


def make_partition_key(entry: ManifestEntry) -> Key:
    """Return a key that is equal for all entries of one partition. The entries must have the same partition spec."""
    return compute_partition_key(entry.file.partition)


def count_partition_manifests(manifests: Iterable[Sequence[ManifestEntry]]) -> tuple[int, int]:
    """Return the number of pairs of a partition and a manifest that lists its files, and the number of partitions.

    Their ratio is the average number of manifests that a reader of one partition needs.
    """
    all_keys: set[Key] = set()
    pairs = 0
    for entries in manifests:
        partition_keys = {make_partition_key(entry) for entry in entries}
        pairs += len(partition_keys)
        all_keys |= partition_keys
    return pairs, len(all_keys)


def divide_entries(
    entries: Sequence[ManifestEntry], entries_max: int, make_sort_key: Callable[[ContentFile], Key]
) -> list[list[Any]]:
    """Divide the entries among new manifests.

    The entries are sorted by partition, so that each partition is in few manifests, and then by the sort key.

    Args:
        entries: The entries of the old manifests.
        entries_max: The maximum number of entries in a manifest.
        make_sort_key: Returns the sort key of a file within its partition.

    Returns:
        The entries of each new manifest.
    """
    sorted_entries = sorted(
        entries,
        key=lambda entry: (
            _make_partition_order(entry.file.partition),
            make_sort_key(entry.file),
            entry.file.file_path,
        ),
    )
    chunks: list[list[ManifestEntry]] = [[]]
    for _, members in groupby(sorted_entries, key=make_partition_key):
        partition = list(members)
        # Start a new manifest if the partition does not fit, unless the last manifest would stay less than half full.
        if len(chunks[-1]) + len(partition) > entries_max and 2 * len(chunks[-1]) >= entries_max:
            chunks.append([])
        for entry in partition:
            if len(chunks[-1]) == entries_max:
                chunks.append([])
            chunks[-1].append(entry)
    return [chunk for chunk in chunks if chunk]


def _make_partition_order(partition: Sequence[Any]) -> Key:
    """Return the sort key of a partition. Nulls sort first.

    A null is replaced by 0, because None cannot be compared with other values.
    """
    return tuple((value is not None, 0 if value is None else value) for value in partition)


def make_clustering_bound(metadata: TableMetadata) -> Callable[[ContentFile], Key]:
    """Return a function that returns the lower bound of a file in the first clustering column.

    The result is a pair of whether the file has the bound, and the bound. So files without it sort first. Without a
    clustering column, all files have the same key.
    """
    try:
        layout = ClusteringLayout.from_properties(metadata.properties)
    except BadRequest:
        layout = None
    column = None if layout is None else metadata.current_schema.find_column_by_name(layout.columns[0])
    if column is None or not isinstance(column.type, str):
        return lambda _: ()
    kind, column_id = column.type, column.id

    def read_bound(file: ContentFile) -> Key:
        stored_bound = (file.lower_bounds or {}).get(column_id)
        if stored_bound is None:
            return (False, 0)
        try:
            return (True, decode_single_value(kind, stored_bound))
        except ValueError:  # The bound was written with an earlier type of the column.
            return (False, 0)

    return read_bound
