"""Tests whether two partitions, possibly of different specs, can share a row, and whether one contains the other.

The field values of a partition restrict its source columns. Two partitions are disjoint if their restrictions on a
column contradict each other. This is so if the same transform has two values, if bucket numbers have different
remainders (each of 16 buckets is part of one of 8 buckets), or if the transform of one value differs from the other
value. If it is uncertain whether two partitions are disjoint, they count as overlapping, and neither contains the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

from seamark.formats.iceberg.expressions.ranges import (
    find_overflowed_truncation,
    keeps_order,
    may_be_stored_one_too_high,
)
from seamark.formats.iceberg.manifests.content_file import list_partition_types
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.transforms import (
    IDENTITY,
    VOID,
    canonicalize_transform,
    compute_transform,
    get_transform_name,
    get_transform_width,
    is_known,
)
from seamark.formats.iceberg.types.values import Value, compute_partition_key, make_value_key
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.planner.lookup.partitions import PartitionFieldValue, PartitionTuple
from seamark.metaserver.planner.view.view import are_comparable

COMPARISONS_MAX = 100_000
"""The maximum number of pairs of partitions that a check compares.

Further pairs count as overlapping, and neither partition contains the other. More comparisons would take seconds, in
which other commits of the table would wait.
"""


class _Constraint(NamedTuple):
    """A restriction of source columns by a partition field.

    Attributes:
        sources: The ids of the source columns.
        transform: The transform of the partition field, such as `bucket[16]`.
        kind: The type of the value.
        value: The value of the field in the partition, or None for null.
    """

    sources: tuple[int, ...]
    transform: str
    kind: str
    value: Value | None


class PartitionOverlap:
    """Compares partitions of one table by the fields of its partition specs. An instance belongs to one check."""

    def __init__(self, metadata: TableMetadata) -> None:
        self._metadata = metadata
        self._compared_pairs = 0
        self._fields = {
            spec.spec_id: {field.field_id: field for field in spec.fields if field.field_id is not None}
            for spec in metadata.partition_specs
        }

    def make_partition(self, spec_id: int, values: tuple[Value | None, ...]) -> PartitionTuple:
        """Return the partition with these values, which are in the order of the spec's fields.

        Raises:
            BadRequest: The table does not have the spec.
        """
        spec = self._metadata.spec(spec_id)
        if spec is None:
            raise BadRequest(f"The table has no partition spec {spec_id}")
        kinds = list_partition_types(self._metadata, spec)
        # No field has the id 0, so `list_constraints` leaves out fields without an id.
        fields = (
            PartitionFieldValue(field.field_id or 0, kind, value)
            for field, kind, value in zip(spec.fields, kinds, values, strict=True)
        )
        return PartitionTuple(spec_id, tuple(fields))

    def has_all_field_ids(self, spec_id: int) -> bool:
        """Return whether all fields of the spec have ids, which `list_constraints` needs to describe a partition."""
        spec = self._metadata.spec(spec_id)
        return spec is not None and len(self._fields[spec_id]) == len(spec.fields)

    def may_compare(self, pairs: int) -> bool:
        """Count further comparisons, and return whether their total is within `COMPARISONS_MAX`.

        The limit bounds the time of one check. Beyond it, callers use the cautious result.
        """
        self._compared_pairs += pairs
        return self._compared_pairs <= COMPARISONS_MAX

    def list_constraints(self, partition: PartitionTuple) -> list[_Constraint]:
        fields = self._fields.get(partition.spec_id, {})
        constraints = []
        for field_id, kind, value in partition.fields:
            field = fields.get(field_id)
            transform = VOID if field is None else canonicalize_transform(field.transform)
            if field is not None and transform != VOID:
                constraints.append(_Constraint(field.sources, transform, kind, value))
        return constraints


class Targets:
    """Partitions that are compared with many other partitions.

    Partitions of the same spec are compared by a dictionary look-up. Only partitions of different specs are compared
    pair by pair.
    """

    def __init__(self, partitions: PartitionOverlap, targets: Iterable[tuple[int, tuple[Value | None, ...]]]) -> None:
        """Prepare the comparison.

        Args:
            partitions: Compares partitions of different specs of the table.
            targets: Pairs of a spec id and the partition values.

        Raises:
            BadRequest: The table does not have one of the specs.
        """
        self._partitions = partitions
        self._by_spec: dict[int, dict[object, list[_Constraint]]] = {}
        for spec_id, values in targets:
            constraints = partitions.list_constraints(partitions.make_partition(spec_id, values))
            self._by_spec.setdefault(spec_id, {})[_make_key(constraints)] = constraints

    def overlap(self, partition: PartitionTuple) -> bool:
        """Return False only if no row can be both in the partition and in one of the targets."""
        return any(self._compare_partitions(partition, _may_overlap, default=True))

    def contain(self, partition: PartitionTuple) -> bool:
        """Return True only if a single partition of this object contains every row of `partition`.

        If the partitions cannot be compared, the result is False.
        """
        has_all_field_ids = self._partitions.has_all_field_ids
        return any(self._compare_partitions(partition, _implies_all, has_all_field_ids, default=False))

    def _compare_partitions(
        self,
        partition: PartitionTuple,
        compare: Callable[[list[_Constraint], list[_Constraint]], bool],
        is_compared: Callable[[int], bool] = lambda _: True,
        *,
        default: bool,
    ) -> Iterator[bool]:
        """Compare a partition with the targets of each partition spec, and yield one result for each spec.

        The targets are the partitions of this object, which many other partitions are compared with.

        If the partition and the targets of a spec have the same fields, they overlap only if they are equal, so a
        lookup is sufficient. Otherwise, each target is compared.

        Args:
            compare: Compares the constraints of the partition with those of a target.
            partition: The partition.
            is_compared: Returns whether to compare the targets of the spec with this id.
            default: The result for a spec if the limit of comparisons is reached.
        """
        constraints = self._partitions.list_constraints(partition)
        for spec_id, targets in self._by_spec.items():
            if not is_compared(spec_id):
                continue
            # All targets of a spec have the same fields, so compare the fields of one target.
            if spec_id == partition.spec_id and _have_same_fields(constraints, next(iter(targets.values()))):
                yield _make_key(constraints) in targets
            elif self._partitions.may_compare(len(targets)):
                yield any(compare(constraints, target) for target in targets.values())
            else:
                yield default


def _make_key(constraints: Iterable[_Constraint]) -> object:
    return compute_partition_key([constraint.value for constraint in constraints])


def _have_same_fields(left: Sequence[_Constraint], right: Sequence[_Constraint]) -> bool:
    """Return whether both partitions have the same source columns and transforms, with comparable types."""
    return len(left) == len(right) and all(
        left_field[:2] == right_field[:2] and are_comparable(left_field.kind, right_field.kind)
        for left_field, right_field in zip(left, right, strict=True)
    )


def _may_overlap(left: Iterable[_Constraint], right: Sequence[_Constraint]) -> bool:
    return not any(_are_disjoint(left_field, right_field) for left_field in left for right_field in right)


def _implies_all(inner: Sequence[_Constraint], outer: Iterable[_Constraint]) -> bool:
    return all(any(_implies(premise, conclusion) for premise in inner) for conclusion in outer)


def _are_disjoint(left: _Constraint, right: _Constraint) -> bool:
    """Return whether no row can satisfy both constraints. The result is False if this is uncertain.

    Two bucket numbers of one column contradict each other if they differ modulo the greatest common divisor of the
    bucket counts. With different transforms, an exact value may contradict the result of the other transform.
    """
    if left.sources != right.sources:
        return False
    if left.transform == right.transform:
        return are_comparable(left.kind, right.kind) and make_value_key(left.value) != make_value_key(right.value)
    if not (is_known(left.transform) and is_known(right.transform)):
        return False
    if left.value is None or right.value is None:
        return (left.value is None) != (right.value is None)
    if get_transform_name(left.transform) == get_transform_name(right.transform) == "bucket":
        common_buckets = gcd(get_transform_width(left.transform), get_transform_width(right.transform))
        return bool(int(left.value) % common_buckets != int(right.value) % common_buckets)
    return _contradicts(left, right) or _contradicts(right, left)


def _contradicts(exact: _Constraint, other: _Constraint) -> bool:
    """Return whether an exact value, which has the transform `identity`, contradicts the other constraint."""
    if exact.transform != IDENTITY or exact.value is None:
        return False
    transform_result = _apply_transform(other.transform, exact.kind, exact.value)
    if transform_result is None or transform_result == other.value:
        return False
    # Some writers store a wrapped 32-bit number, or round negative times towards zero. Such values do not contradict.
    overflowed = find_overflowed_truncation(other.transform, exact.kind)
    if overflowed is not None and (transform_result, other.value) == (overflowed.exact, overflowed.wrapped):
        return False
    may_be_rounded = may_be_stored_one_too_high(other.transform, exact.kind) and int(transform_result) < 0
    return not (may_be_rounded and other.value == int(transform_result) + 1)


def _implies(premise: _Constraint, conclusion: _Constraint) -> bool:
    """Return whether each row that satisfies the premise satisfies the conclusion. It is False if this is uncertain.

    A bucket number implies the number for each divisor of the bucket count. An exact value implies the result of each
    transform.
    """
    if premise.sources != conclusion.sources:
        return False
    if premise.transform == conclusion.transform:
        return are_comparable(premise.kind, conclusion.kind) and make_value_key(premise.value) == make_value_key(
            conclusion.value
        )
    if not (is_known(premise.transform) and is_known(conclusion.transform)):
        return False
    if premise.value is None or conclusion.value is None:
        return premise.value is None and conclusion.value is None
    if get_transform_name(premise.transform) == get_transform_name(conclusion.transform) == "bucket":
        premise_buckets = get_transform_width(premise.transform)
        conclusion_buckets = get_transform_width(conclusion.transform)
        return premise_buckets % conclusion_buckets == 0 and int(premise.value) % conclusion_buckets == conclusion.value
    return (
        premise.transform == IDENTITY
        and _apply_transform(conclusion.transform, premise.kind, premise.value) == conclusion.value
    )


def _apply_transform(transform: str, kind: str, value: Value) -> Value | None:
    if get_transform_name(transform) == "truncate" and not keeps_order(transform, kind):
        return None  # Writers implement this transform differently (`ranges.py`).
    try:
        return compute_transform(transform, kind, value)
    except (BadRequest, ValueError, TypeError, OverflowError, KeyError):
        return None  # The column had a different type when the partition value was written.
