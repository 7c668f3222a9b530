"""Reports the sizes of bucket partitions, recommends a number of buckets, and doubles the number.

    compute_bucket_sizes(client, "db.t")            sizes for each bucket field of the current partition spec
    resize(client, "db.t", buckets=16)      replaces bucket[8](id) by bucket[16](id) in the partition spec

A resize changes only the partition spec. It rewrites no file and blocks no writer: later writes use the new spec, and a
writer that has read the old spec can still commit with it. Bucket b of 8 contains the rows of the buckets b and b + 8
of 16 (`hash % 16 % 8 == hash % 8`), so the buckets of the new spec that an old file belongs to are known. Therefore
pruning, joins of compatible bucket counts and conflict detection continue to work. Only doubling has this property, so
no other change is supported.

If the table is also partitioned by other fields, each partition of these fields has its own buckets. The target size is
the size of one bucket in one of these partitions.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from seamark.connector.arrow.arrays import Longs
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import sleep_before_attempt
from seamark.connector.client.errors import Conflict, InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.client.updates import update_table
from seamark.connector.client.values import CURRENT, At
from seamark.connector.read.tables import open_table
from seamark.formats.iceberg.metadata.bucket_counts import BUCKET, list_bucket_fields
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.transforms import VOID, canonicalize_transform, get_transform_width

TARGET_BYTES = 3_000_000_000
"""The target size of a bucket.

It is large enough for files of the usual size, and small enough for one task to rewrite the bucket.
"""
BUCKETS_MAX = 1 << 20
"""The maximum number of buckets whose sizes are computed. Specs with more buckets would need too much memory."""
_ATTEMPTS_MAX = 20
_WAIT_S, _WAIT_MAX_S = 0.02, 1.0
_OMITTED_FIELDS_SINCE = 2
"""The format version from which a new spec may omit fields of an older spec."""


@dataclass(frozen=True)
class BucketSizes:
    """The sizes of the buckets of one field of the current spec, including deleted rows. Arrays are int64[buckets].

    A file of a spec with fewer or no buckets is counted in each bucket that may contain its rows, and its rows and
    bytes are divided evenly among these buckets. Rows whose key is null are in no bucket.
    """

    field: str
    column: str
    buckets: int
    files: Longs
    rows: Longs
    bytes: Longs
    shared_files: int
    """The number of files that may contain rows of several buckets, because their specs have fewer or no buckets."""
    shared_bytes: int
    partition_bytes: int
    """The weighted median size of the partitions of the other fields.

    At least half of the bytes are in partitions of at least this size.
    """
    target_bytes: int

    @property
    def largest_bytes(self) -> int:
        return int(self.bytes.max())

    @property
    def skew(self) -> float:
        """The size of the largest bucket divided by the mean size, or 1 if all buckets are empty.

        More buckets do not reduce the skew if a few keys have most of the rows.
        """
        return self.largest_bytes / self.bytes.mean() if self.bytes.any() else 1.0

    @property
    def advice(self) -> int:
        """The recommended number of buckets: the current number, or the current number doubled once or several times.

        Of these numbers, it is the number with which the mean size of the buckets in a partition of `partition_bytes`
        is closest to the target size, on a logarithmic scale.
        """
        ratio = self.partition_bytes / (self.buckets * self.target_bytes)
        return self.buckets * 2 ** max(0, round(math.log2(ratio))) if ratio > 1 else self.buckets


@dataclass(frozen=True)
class ResizeResult:
    """The number of buckets before and after a resize. Both are equal if nothing changed.

    Attributes:
        spec_id: The id of the current spec.
    """

    column: str
    former_buckets: int
    buckets: int
    spec_id: int


# Bucket sizes


def compute_bucket_sizes(
    client: SeamarkClient, table: Name, *, target_bytes: int = TARGET_BYTES, at: At = CURRENT
) -> list[BucketSizes]:
    """Return the bucket sizes of each bucket field of the current spec, computed from the files of a snapshot.

    Args:
        target_bytes: The target size of one bucket in one partition.

    Raises:
        InvalidRequest: A field has more than `BUCKETS_MAX` buckets.
        ValueError: `target_bytes` is less than 1.
    """
    if target_bytes < 1:
        raise ValueError(f"target_bytes is {target_bytes}; it must be at least 1")
    source_table = open_table(client, table, at)
    metadata = source_table.metadata
    fields = list_bucket_fields(metadata.default_spec)
    for field in fields:
        if (count := get_transform_width(canonicalize_transform(field.transform))) > BUCKETS_MAX:
            raise InvalidRequest(
                f"{field.name} has {count:,} buckets; sizes are reported for at most {BUCKETS_MAX:,} buckets"
            )
    partitions: list[_PartitionTotals] = []
    if source_table.snapshot_id is not None:
        table_partitions = client.partitions(table, at=At(snapshot_id=source_table.snapshot_id))
        names = ("spec_id", "partition", "file_count", "record_count", "file_size_in_bytes")
        partition_rows = zip(*(table_partitions[name].to_pylist() for name in names), strict=True)
        partitions = [
            _PartitionTotals(spec_id, json.loads(partition), *counts) for spec_id, partition, *counts in partition_rows
        ]
    return [_compute_sizes(field, metadata, partitions, target_bytes) for field in fields]


@dataclass(frozen=True)
class _PartitionTotals:
    """A partition, and the totals of its data files. The partition values have the names of the fields of its spec."""

    spec_id: int
    values: dict[str, Any]
    files: int
    rows: int
    bytes: int


def _compute_sizes(
    field: PartitionField, metadata: TableMetadata, partitions: Sequence[_PartitionTotals], target_bytes: int
) -> BucketSizes:
    """Return the bucket sizes of a field, summed over the partitions."""
    count = get_transform_width(canonicalize_transform(field.transform))
    sums: Longs = np.zeros((3, count), dtype=np.int64)  # One row each for files, rows and bytes.
    all_buckets = np.arange(count)
    shared_files = shared_bytes = 0
    partition_bytes: dict[str, int] = defaultdict(int)
    specs = {spec.spec_id: spec for spec in metadata.partition_specs}
    other_fields = [partition_field for partition_field in metadata.default_spec.fields if partition_field is not field]
    for partition in partitions:
        spec = specs.get(partition.spec_id, PartitionSpec(partition.spec_id, ()))
        bucket_slice = _find_buckets(field, count, spec, partition)
        if bucket_slice is None or not partition.files:
            continue
        members = all_buckets[bucket_slice]
        sums[0, members] += partition.files
        for row, amount in ((1, partition.rows), (2, partition.bytes)):
            # The first buckets get the remainder, so that the sum over all buckets is exact.
            share, remainder = divmod(amount, len(members))
            sums[row, members] += share
            sums[row, members[:remainder]] += 1
        if len(members) > 1:
            shared_files += partition.files
            shared_bytes += partition.bytes
        partition_bytes[json.dumps([_find_value(other, spec, partition) for other in other_fields])] += partition.bytes
    return BucketSizes(
        field=field.name,
        column=_find_column(field, metadata),
        buckets=count,
        files=sums[0],
        rows=sums[1],
        bytes=sums[2],
        shared_files=shared_files,
        shared_bytes=shared_bytes,
        partition_bytes=_compute_weighted_median(list(partition_bytes.values())),
        target_bytes=target_bytes,
    )


def _find_buckets(field: PartitionField, count: int, spec: PartitionSpec, partition: _PartitionTotals) -> slice | None:
    """Return the buckets of a field of the current spec that may contain rows of a partition of `spec`.

    Return None if the partition has the rows whose bucketed column is null. They are in no bucket.

    A bucket number is a hash modulo the number of buckets. If the partition has the bucket v of n buckets, the hashes
    of its rows equal v modulo gcd(n, count). Each bucket with this remainder may contain its rows.

    Args:
        field: The bucket field.
        count: The number of buckets of `field`.
        spec: The partition spec of the partition, which may be older.
        partition: The partition.
    """
    candidates = [candidate for candidate in list_bucket_fields(spec) if candidate.sources == field.sources]
    if not candidates:
        return slice(None)
    finest = max(
        candidates,
        key=lambda candidate: math.gcd(get_transform_width(canonicalize_transform(candidate.transform)), count),
    )
    value = partition.values.get(finest.name)
    if value is None:
        return None
    step = math.gcd(get_transform_width(canonicalize_transform(finest.transform)), count)
    return slice(value % step, count, step)


def _find_value(field: PartitionField, spec: PartitionSpec, partition: _PartitionTotals) -> object:
    """Return the partition's value of a field, or None if the partition's spec has no equal field."""
    names = (
        candidate.name
        for candidate in spec.fields
        if (candidate.sources, candidate.transform) == (field.sources, field.transform)
    )
    return partition.values.get(next(names, ""))


def _compute_weighted_median(sizes: Sequence[int]) -> int:
    """Return the largest size such that the sizes of at least this size have at least half of the total.

    The result is 0 if there are no sizes.
    """
    if not sizes:
        return 0
    descending_sizes = np.sort(np.array(sizes, dtype=np.int64))[::-1]
    running_totals = np.cumsum(descending_sizes)
    return int(descending_sizes[np.searchsorted(running_totals, running_totals[-1] / 2)])


def _find_column(field: PartitionField, metadata: TableMetadata) -> str:
    column = metadata.current_schema.column(field.sources[0])
    if column is None:
        raise InvalidRequest(
            f"The source of partition field {field.name} is column {field.sources[0]}, which the table no longer has"
        )
    return column.name


# Resize


def resize(client: SeamarkClient, table: Name, *, buckets: int, column: str | None = None) -> ResizeResult:
    """Set the number of buckets. It must be the current number, doubled once or several times.

    The operation is idempotent: if the table already has this number of buckets, nothing changes.

    Args:
        buckets: The new number of buckets.
        column: The column of the bucket field. It is required if the spec has several bucket fields.

    Raises:
        InvalidRequest: The number is not a repeated doubling, or the table has no buckets.
        Conflict: Other commits changed the spec in every attempt.
    """
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        engine_table = client.load_table(table)
        metadata = decode_table(engine_table.metadata, engine_table.location)
        field = _choose_field(metadata, column)
        old_buckets, column_name = (
            get_transform_width(canonicalize_transform(field.transform)),
            _find_column(field, metadata),
        )
        if buckets == old_buckets:
            return ResizeResult(column_name, old_buckets, buckets, metadata.default_spec_id)
        _check_doubling(old_buckets, buckets, column_name)
        try:
            spec_id = _commit_spec(client, table, metadata, _resize_fields(metadata, field, buckets))
        except Conflict:
            if attempt == _ATTEMPTS_MAX:
                raise
            sleep_before_attempt(attempt, first_s=_WAIT_S, max_s=_WAIT_MAX_S)
        else:
            return ResizeResult(column_name, old_buckets, buckets, spec_id)
    raise AssertionError("the loop returns or raises")


def _choose_field(metadata: TableMetadata, column: str | None) -> PartitionField:
    by_column = {_find_column(field, metadata): field for field in list_bucket_fields(metadata.default_spec)}
    if not by_column:
        raise InvalidRequest(
            "The table's partition spec has no buckets; add them first: ADD PARTITION FIELD bucket(8, id)"
        )
    if column is None and len(by_column) > 1:
        raise InvalidRequest(f"The table has buckets of {', '.join(by_column)}; give the column")
    if column is not None and column not in by_column:
        raise InvalidRequest(f"The table has no buckets of {column[:200]}; it has buckets of {', '.join(by_column)}")
    return by_column[next(iter(by_column)) if column is None else column]


def _check_doubling(old_buckets: int, buckets: int, column: str) -> None:
    if 0 < buckets < old_buckets:
        raise InvalidRequest(
            f"{column} has {old_buckets} buckets, and {buckets} are fewer: the number of buckets can only grow, "
            "because a "
            "merge of buckets rewrites every file"
        )
    times, remainder = divmod(buckets, old_buckets)
    if remainder or times & (times - 1) or times < 1:
        raise InvalidRequest(
            f"{column} has {old_buckets} buckets; {buckets} is not {old_buckets} doubled: {2 * old_buckets}, "
            f"{4 * old_buckets}, "
            f"{8 * old_buckets}, … With another number, rows of an old bucket would belong to all new buckets"
        )


def _resize_fields(metadata: TableMetadata, field: PartitionField, buckets: int) -> list[PartitionField]:
    """Return the fields of the new spec, without ids. The server assigns the ids, or reuses those of equal fields."""
    transform = f"{BUCKET}[{buckets}]"
    spec = metadata.default_spec
    kept_names = [
        other.name for other in spec.fields if other is not field or metadata.format_version < _OMITTED_FIELDS_SINCE
    ]
    name = _choose_name(metadata, field, transform, kept_names)
    new_field = msgspec.structs.replace(field, name=name, transform=transform, field_id=None)
    fields: list[PartitionField] = []
    for other in spec.fields:
        if other is not field:
            fields.append(msgspec.structs.replace(other, field_id=None))
        elif metadata.format_version < _OMITTED_FIELDS_SINCE:
            # In format version 1, a partition field never changes its position.
            fields.append(msgspec.structs.replace(other, transform=VOID, field_id=None))
        else:
            fields.append(new_field)
    return fields if new_field in fields else [*fields, new_field]


def _choose_name(metadata: TableMetadata, field: PartitionField, transform: str, kept_names: Sequence[str]) -> str:
    """Return an unused name for the new partition field.

    If an earlier spec has an equal field, return the name of that field. Otherwise, return the name that Iceberg's
    engines generate, such as `id_bucket_16`. Engines show the partitions of all specs in one struct, so a generated
    name must not occur in any spec. It must also not be the name of a column.

    Args:
        metadata: The metadata of the table.
        field: The current partition field.
        transform: The canonical transform of the new field.
        kept_names: The names of the fields that stay in the new spec, which the new field cannot have.
    """
    fields = [other for spec in metadata.partition_specs for other in spec.fields]
    for other in fields:
        if (
            other.sources == field.sources
            and canonicalize_transform(other.transform) == transform
            and other.name not in kept_names
        ):
            return other.name
    used_names = {other.name for other in fields}
    return next(
        name
        for name in _propose_names(_find_column(field, metadata), transform)
        if name not in used_names | _list_column_names(metadata)
    )


def _list_column_names(metadata: TableMetadata) -> set[str]:
    return {column.name for schema in metadata.schemas for column in schema.index.by_id.values()}


def _propose_names(column: str, transform: str) -> Iterator[str]:
    base_name = f"{column}_{BUCKET}_{get_transform_width(transform)}"
    yield base_name
    number = 2
    while True:
        yield f"{base_name}_{number}"
        number += 1


def _commit_spec(client: SeamarkClient, table: Name, metadata: TableMetadata, fields: Sequence[PartitionField]) -> int:
    """Commit the new spec with the REST operation `updateTable`, and return its id.

    The commit requires that the specs are unchanged. It does not require that the snapshots are unchanged.
    """
    requirements = [
        {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": metadata.last_partition_id},
        {"type": "assert-default-spec-id", "default-spec-id": metadata.default_spec_id},
    ]
    # The server replaces the spec id 0. The id -1 selects the spec that was added last.
    updates: list[dict[str, Any]] = [
        {"action": "add-spec", "spec": {"spec-id": 0, "fields": [msgspec.to_builtins(field) for field in fields]}},
        {"action": "set-default-spec", "spec-id": -1},
    ]
    # A repeat after a lost response changes nothing: its requirements fail, because the first request changed the
    # specs.
    answer = update_table(client, table, requirements, updates)
    return int(answer["metadata"]["default-spec-id"])
