"""Buckets of a table: how large they are, how many there should be, and more of them by doubling.

    bucket_sizes(client, "db.t")            of each bucket field of the current partition spec
    resize(client, "db.t", buckets=16)      bucket[8](id) is bucket[16](id) from now on

The rule it keeps: a resize changes the partition spec and nothing else. No file is touched and no writer waits: what
is written next goes by the new spec, and a writer that has read the old one still commits by it. A bucket of 8 is two
of 16 (`hash % 16 % 8 == hash % 8`), so old files lie in known buckets of the new spec, and plans, joins by compatible
buckets and conflicts between writers go on as before. That holds for doubling and for nothing else, so nothing else is
done here.

Buckets are shared by nobody but rows of one partition: where a table is partitioned by other fields, too, each of their
values has N buckets, and it is those that are to be of the right size.
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
import numpy.typing as npt

from seamark.connector.client.client import CURRENT, At, Name, SeamarkClient
from seamark.connector.client.commits import back_off
from seamark.connector.client.errors import BadRequest, Conflict
from seamark.connector.read.tables import open_table
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.metaserver.iceberg.metadata.table_json import decode_table
from seamark.metaserver.iceberg.types.transforms import VOID, canonical, name_of, width_of

Longs = npt.NDArray[np.int64]

TARGET_BYTES = 3_000_000_000
"""Of a bucket: large enough for files of the usual size, small enough to be written anew by one task."""
SIZES_MAX = 1 << 20
"""Buckets whose sizes are told; a spec may have two thousand times as many, which no memory holds."""
BUCKET = "bucket"
_ATTEMPTS = 20
_WAIT_S, _WAIT_MAX_S = 0.02, 1.0
_VOIDS_BELOW = 2
"""Format version since which a spec may leave fields of an older one out."""


@dataclass(frozen=True)
class BucketSizes:
    """Of one bucket field, as its spec numbers buckets now: int64[buckets] each, of data files, deleted rows included.

    A file that was written by fewer buckets, or by none, counts as one file in each that may hold its rows, and with an
    even share of its rows and bytes. Rows whose key is null are in no bucket.
    """

    field: str
    column: str
    buckets: int
    files: Longs
    rows: Longs
    bytes: Longs
    shared_files: int
    """Files with rows of several buckets: of specs with fewer buckets, or without them."""
    shared_bytes: int
    partition_bytes: int
    """Of all buckets of the partition, by the spec's other fields, in which the middle byte of the table lies."""
    target_bytes: int

    @property
    def largest_bytes(self) -> int:
        return int(self.bytes.max())

    @property
    def skew(self) -> float:
        """The largest bucket, in means of all; more buckets do not mend it where a few keys have most rows."""
        return self.largest_bytes / self.bytes.mean() if self.bytes.any() else 1.0

    @property
    def advice(self) -> int:
        """How many buckets, by doubling, bring one of them nearest to the target; never fewer than now."""
        ratio = self.partition_bytes / (self.buckets * self.target_bytes)
        return self.buckets * 2 ** max(0, round(math.log2(ratio))) if ratio > 1 else self.buckets


@dataclass(frozen=True)
class Resized:
    """`before` buckets are `buckets` now, by the spec `spec_id`. Equal where that was so already."""

    column: str
    before: int
    buckets: int
    spec_id: int


# Sizes


def bucket_sizes(
    client: SeamarkClient, table: Name, *, target_bytes: int = TARGET_BYTES, at: At = CURRENT
) -> list[BucketSizes]:
    """Of each bucket field of the table's spec, by the files of a snapshot; none where it has no such field.

    `target_bytes` are of one bucket, in the partition that it is of. BadRequest for more than `SIZES_MAX` buckets.
    """
    if target_bytes < 1:
        raise ValueError(f"target_bytes is {target_bytes}; a bucket has at least one byte")
    opened = open_table(client, table, at)
    metadata = opened.metadata
    fields = bucket_fields(metadata.default_spec)
    for one in fields:
        if (count := width_of(canonical(one.transform))) > SIZES_MAX:
            raise BadRequest(
                f"{one.name} has {count:,} buckets; the sizes of {SIZES_MAX:,} at most are told one by one"
            )
    parts: list[_Part] = []
    if opened.snapshot_id is not None:
        found = client.partitions(table, at=At(snapshot_id=opened.snapshot_id))
        names = ("spec_id", "partition", "file_count", "record_count", "file_size_in_bytes")
        rows = zip(*(found[name].to_pylist() for name in names), strict=True)
        parts = [_Part(spec_id, json.loads(partition), *counts) for spec_id, partition, *counts in rows]
    return [_sizes(one, metadata, parts, target_bytes) for one in fields]


@dataclass(frozen=True)
class _Part:
    """A partition, its values by names of its spec's fields; and what its data files add up to."""

    spec_id: int
    values: dict[str, Any]
    files: int
    rows: int
    bytes: int


def _sizes(field: PartitionField, metadata: TableMetadata, parts: Sequence[_Part], target_bytes: int) -> BucketSizes:
    count = width_of(canonical(field.transform))
    sums: Longs = np.zeros((3, count), dtype=np.int64)
    numbers = np.arange(count)
    shared_files = shared_bytes = 0
    of_partition: dict[str, int] = defaultdict(int)
    specs = {one.spec_id: one for one in metadata.partition_specs}
    others = [one for one in metadata.default_spec.fields if one is not field]
    for part in parts:
        spec = specs.get(part.spec_id, PartitionSpec(part.spec_id, ()))
        within = _buckets_of(field, count, spec, part)
        if within is None or not part.files:
            continue
        members = numbers[within]
        sums[0, members] += part.files
        for number, amount in ((1, part.rows), (2, part.bytes)):
            each, rest = divmod(amount, len(members))
            sums[number, members] += each
            sums[number, members[:rest]] += 1
        if len(members) > 1:
            shared_files += part.files
            shared_bytes += part.bytes
        of_partition[json.dumps([_value(one, spec, part) for one in others])] += part.bytes
    return BucketSizes(
        field=field.name,
        column=_column(field, metadata),
        buckets=count,
        files=sums[0],
        rows=sums[1],
        bytes=sums[2],
        shared_files=shared_files,
        shared_bytes=shared_bytes,
        partition_bytes=_middle(list(of_partition.values())),
        target_bytes=target_bytes,
    )


def _buckets_of(field: PartitionField, count: int, spec: PartitionSpec, part: _Part) -> slice | None:
    """Which of the field's buckets may hold rows of the partition; None for a key that is null."""
    by = [one for one in bucket_fields(spec) if one.sources == field.sources]
    if not by:
        return slice(None)
    finest = max(by, key=lambda one: math.gcd(width_of(canonical(one.transform)), count))
    value = part.values.get(finest.name)
    if value is None:
        return None
    step = math.gcd(width_of(canonical(finest.transform)), count)
    return slice(value % step, count, step)


def _value(field: PartitionField, spec: PartitionSpec, part: _Part) -> object:
    """The partition's value of a field of another spec; None where its own has none such."""
    same = (one.name for one in spec.fields if (one.sources, one.transform) == (field.sources, field.transform))
    return part.values.get(next(same, ""))


def _middle(sizes: Sequence[int]) -> int:
    """The size at which half of all bytes are in those that are no smaller; 0 where there are none."""
    if not sizes:
        return 0
    ordered = np.sort(np.array(sizes, dtype=np.int64))[::-1]
    total = np.cumsum(ordered)
    return int(ordered[np.searchsorted(total, total[-1] / 2)])


def bucket_fields(spec: PartitionSpec) -> list[PartitionField]:
    """Those of one column in buckets."""
    return [one for one in spec.fields if name_of(canonical(one.transform)) == BUCKET and len(one.sources) == 1]


def _column(field: PartitionField, metadata: TableMetadata) -> str:
    column = metadata.current_schema.column(field.sources[0])
    if column is None:
        raise BadRequest(f"Partition field {field.name} is of column {field.sources[0]}, which the table has no more")
    return column.name


# Resize


def resize(client: SeamarkClient, table: Name, *, buckets: int, column: str | None = None) -> Resized:
    """The table has so many buckets from now on: as many as it has, doubled one or more times. Nothing is done where it
    has them already, so that it may be asked for again.

    `column` says which buckets, where the spec has several fields of them. BadRequest for a number that no doubling
    leads to, or a table without buckets; Conflict where others changed the spec in all attempts.
    """
    for number in range(1, _ATTEMPTS + 1):
        loaded = client.load_table(table)
        metadata = decode_table(loaded.metadata, loaded.location)
        field = _chosen(metadata, column)
        before, named = width_of(canonical(field.transform)), _column(field, metadata)
        if buckets == before:
            return Resized(named, before, buckets, metadata.default_spec_id)
        _check_doubled(before, buckets, named)
        try:
            after = _update(client, table, metadata, _resized(metadata, field, buckets))
        except Conflict:
            if number == _ATTEMPTS:
                raise
            back_off(number, first_s=_WAIT_S, most_s=_WAIT_MAX_S)
        else:
            return Resized(named, before, buckets, after.default_spec_id)
    raise AssertionError("the loop returns or raises")


def _chosen(metadata: TableMetadata, column: str | None) -> PartitionField:
    found = {_column(one, metadata): one for one in bucket_fields(metadata.default_spec)}
    if not found:
        raise BadRequest("The table's partition spec has no buckets; add them first: ADD PARTITION FIELD bucket(8, id)")
    if column is None and len(found) > 1:
        raise BadRequest(f"The table has buckets of {', '.join(found)}; say which column's are meant")
    if column is not None and column not in found:
        raise BadRequest(f"The table has no buckets of {column[:200]}; it has those of {', '.join(found)}")
    return found[next(iter(found)) if column is None else column]


def _check_doubled(before: int, buckets: int, column: str) -> None:
    if 0 < buckets < before:
        raise BadRequest(
            f"{column} has {before} buckets, and {buckets} are fewer: buckets are only made more. Each of {before} "
            "would have to be merged with others, in every file; nothing is gained before that has been done"
        )
    times, rest = divmod(buckets, before)
    if rest or times & (times - 1) or times < 1:
        raise BadRequest(
            f"{column} has {before} buckets; {buckets} is not {before} doubled: {2 * before}, {4 * before}, "
            f"{8 * before}, … With another number a bucket of old files would lie in all of the new ones"
        )


def _resized(metadata: TableMetadata, field: PartitionField, buckets: int) -> list[PartitionField]:
    """The spec's fields without ids, which the server gives: an equal field of an earlier spec has its own again."""
    transform = f"{BUCKET}[{buckets}]"
    spec = metadata.default_spec
    kept = [one.name for one in spec.fields if one is not field or metadata.format_version < _VOIDS_BELOW]
    new = PartitionField(_free_name(metadata, field, transform, kept), transform, *_source(field))
    made: list[PartitionField] = []
    for one in spec.fields:
        if one is not field:
            made.append(msgspec.structs.replace(one, field_id=None))
        elif metadata.format_version < _VOIDS_BELOW:  # fields keep their places there for ever
            made.append(PartitionField(one.name, VOID, *_source(one)))
        else:
            made.append(new)
    return made if new in made else [*made, new]


def _source(field: PartitionField) -> tuple[int | None, tuple[int, ...]]:
    return field.source_id, field.source_ids


def _free_name(metadata: TableMetadata, field: PartitionField, transform: str, kept: Sequence[str]) -> str:
    """That of an equal field of an earlier spec; else as Iceberg's engines name it, `id_bucket_16`. Never one that has
    another meaning in any spec: engines show the partitions of all specs in one struct, by name."""
    fields = [one for spec in metadata.partition_specs for one in spec.fields]
    for one in fields:
        if one.sources == field.sources and canonical(one.transform) == transform and one.name not in kept:
            return one.name
    taken = {one.name for one in fields}
    return next(name for name in _names(_column(field, metadata), transform) if name not in taken | _columns(metadata))


def _columns(metadata: TableMetadata) -> set[str]:
    return {column.name for schema in metadata.schemas for column in schema.index.by_id.values()}


def _names(column: str, transform: str) -> Iterator[str]:
    first = f"{column}_{BUCKET}_{width_of(transform)}"
    yield first
    number = 2
    while True:
        yield f"{first}_{number}"
        number += 1


def _update(
    client: SeamarkClient, table: Name, metadata: TableMetadata, fields: Sequence[PartitionField]
) -> TableMetadata:
    """One commit of the standard's update-table. It is of the specs as they were read: snapshots may come between."""
    body = {
        "requirements": [
            {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": metadata.last_partition_id},
            {"type": "assert-default-spec-id", "default-spec-id": metadata.default_spec_id},
        ],
        "updates": [
            {"action": "add-spec", "spec": {"spec-id": 0, "fields": [msgspec.to_builtins(one) for one in fields]}},
            {"action": "set-default-spec", "spec-id": -1},
        ],
    }
    # Sent again where its answer was lost it does no harm: the specs are others by then.
    answer = json.loads(client._request("POST", client._standard_path(table), {}, json.dumps(body).encode()))
    return decode_table(json.dumps(answer["metadata"]).encode(), str(answer["metadata"]["location"]))
