"""Whether partitions can have a row in common, or one holds all of another, also across partition specs.

A partition is known by what its fields say of source columns. Two are apart where a column would need two values at
once: by the same transform, by buckets whose numbers leave different remainders (a bucket of 16 lies within one of 8),
or by a value and what a transform makes of it. In doubt they overlap, and neither is within the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

from metaserver.errors import BadRequest
from metaserver.iceberg.expressions.ranges import is_ordered, is_rounded
from metaserver.iceberg.manifests.content_file import partition_types
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.transforms import IDENTITY, VOID, apply, canonical, is_known, name_of, width_of
from metaserver.iceberg.types.values import Value, partition_key, value_key
from metaserver.planner.lookup.partitions import PartitionFieldValue, PartitionTuple
from metaserver.planner.view.view import comparable


class _Said(NamedTuple):
    """One field of a partition: what `transform` of the source columns is."""

    sources: tuple[int, ...]
    transform: str
    kind: str
    value: Value | None


class PartitionOverlap:
    """Of one table: its specs say what their fields mean."""

    def __init__(self, metadata: TableMetadata) -> None:
        self._metadata = metadata
        self._fields = {
            spec.spec_id: {field.field_id: field for field in spec.fields if field.field_id is not None}
            for spec in metadata.partition_specs
        }

    def partition(self, spec_id: int, values: tuple[Value | None, ...]) -> PartitionTuple:
        """Of a tuple in the order of its spec. BadRequest for a spec that the table does not have."""
        spec = self._metadata.spec(spec_id)
        if spec is None:
            raise BadRequest(f"The table has no partition spec {spec_id}")
        kinds = partition_types(self._metadata, spec)
        fields = (
            PartitionFieldValue(field.field_id or 0, kind, value)
            for field, kind, value in zip(spec.fields, kinds, values, strict=True)
        )
        return PartitionTuple(spec_id, tuple(fields))

    def knows_all(self, spec_id: int) -> bool:
        """Whether each field of the spec has an id, so that what is said of a partition is all that it is."""
        spec = self._metadata.spec(spec_id)
        return spec is not None and len(self._fields[spec_id]) == len(spec.fields)

    def said(self, partition: PartitionTuple) -> list[_Said]:
        fields = self._fields.get(partition.spec_id, {})
        said = []
        for field_id, kind, value in partition.fields:
            field = fields.get(field_id)
            transform = VOID if field is None else canonical(field.transform)
            if field is not None and transform != VOID:
                said.append(_Said(field.sources, transform, kind, value))
        return said


class Targets:
    """Partitions that many others are compared with: those of the same spec by a look at their values, so that a
    thousand against a thousand costs two thousand looks; each with each only where specs differ."""

    def __init__(self, partitions: PartitionOverlap, wanted: Iterable[tuple[int, tuple[Value | None, ...]]]) -> None:
        """`wanted` by (spec id, tuple). BadRequest for a spec that the table does not have."""
        self._partitions = partitions
        self._by_spec: dict[int, dict[object, list[_Said]]] = {}
        for spec_id, values in wanted:
            said = partitions.said(partitions.partition(spec_id, values))
            self._by_spec.setdefault(spec_id, {})[_key(said)] = said

    def overlap(self, one: PartitionTuple) -> bool:
        """False only where no row can lie in it and in one of these."""
        return any(self._compared(one, _overlap))

    def hold(self, one: PartitionTuple) -> bool:
        """True only where each row of it lies in one and the same of these."""
        return any(self._compared(one, _within, self._partitions.knows_all))

    def _compared(
        self,
        one: PartitionTuple,
        compare: Callable[[list[_Said], list[_Said]], bool],
        asked: Callable[[int], bool] = lambda _: True,
    ) -> Iterator[bool]:
        """Whether it is like some of each spec that is `asked` for."""
        mine = self._partitions.said(one)
        for spec_id, targets in self._by_spec.items():
            if not asked(spec_id):
                continue
            if spec_id == one.spec_id and _alike(mine, next(iter(targets.values()))):
                yield _key(mine) in targets
            else:
                yield any(compare(mine, theirs) for theirs in targets.values())


def _key(said: Iterable[_Said]) -> object:
    return partition_key([one.value for one in said])


def _alike(mine: Sequence[_Said], theirs: Sequence[_Said]) -> bool:
    """Whether both have the same fields, of types whose values can be compared."""
    return len(mine) == len(theirs) and all(
        one[:2] == other[:2] and comparable(one.kind, other.kind) for one, other in zip(mine, theirs, strict=True)
    )


def _overlap(mine: Iterable[_Said], theirs: Sequence[_Said]) -> bool:
    return not any(_apart(one, other) for one in mine for other in theirs)


def _within(mine: Sequence[_Said], theirs: Iterable[_Said]) -> bool:
    return all(any(_implies(one, wanted) for one in mine) for wanted in theirs)


def _apart(one: _Said, other: _Said) -> bool:
    if one.sources != other.sources:
        return False
    if one.transform == other.transform:
        return comparable(one.kind, other.kind) and value_key(one.value) != value_key(other.value)
    if not (is_known(one.transform) and is_known(other.transform)):
        return False
    if one.value is None or other.value is None:
        return (one.value is None) != (other.value is None)
    if name_of(one.transform) == name_of(other.transform) == "bucket":
        shared = gcd(width_of(one.transform), width_of(other.transform))
        return bool(int(one.value) % shared != int(other.value) % shared)
    return _differs(one, other) or _differs(other, one)


def _differs(exact: _Said, other: _Said) -> bool:
    """Whether a value known exactly is not what the other says of it."""
    if exact.transform != IDENTITY or exact.value is None:
        return False
    made = _applied(other.transform, exact.kind, exact.value)
    if made is None or made == other.value:
        return False
    rounded = is_rounded(other.transform, exact.kind) and int(made) < 0
    return not (rounded and other.value == int(made) + 1)


def _implies(one: _Said, wanted: _Said) -> bool:
    if one.sources != wanted.sources:
        return False
    if one.transform == wanted.transform:
        return comparable(one.kind, wanted.kind) and value_key(one.value) == value_key(wanted.value)
    if not (is_known(one.transform) and is_known(wanted.transform)):
        return False
    if one.value is None or wanted.value is None:
        return one.value is None and wanted.value is None
    if name_of(one.transform) == name_of(wanted.transform) == "bucket":
        inner, outer = width_of(one.transform), width_of(wanted.transform)
        return inner % outer == 0 and int(one.value) % outer == wanted.value
    return one.transform == IDENTITY and _applied(wanted.transform, one.kind, one.value) == wanted.value


def _applied(transform: str, kind: str, value: Value) -> Value | None:
    if name_of(transform) == "truncate" and not is_ordered(transform, kind):
        return None  # writers do not agree on it (`ranges.py`)
    try:
        return apply(transform, kind, value)
    except (BadRequest, ValueError, TypeError, OverflowError, KeyError):
        return None  # of a type that the column had once
