"""Manifest pruning by the partition summaries of the manifest list (Java: ManifestEvaluator).

Plans on snapshots that are not in memory do not read a manifest that its summaries rule out. A summary that is missing
or does not decode rules out nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from seamark.metaserver.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.metaserver.iceberg.manifests.manifest import FieldSummary, ManifestFile
from seamark.metaserver.iceberg.metadata.partition import PartitionSpec
from seamark.metaserver.iceberg.types.values import Value, decode
from seamark.metaserver.index.blocks.packing import Form, form_of, key_of

Key = int | float | bytes


def needed_manifests(
    manifests: Sequence[ManifestFile], by_spec: Mapping[int, Expression], specs: Sequence[PartitionSpec]
) -> list[int]:
    """Indexes of the manifests that may list a file whose partition satisfies the expression of its spec."""
    if all(isinstance(expression, Always) and expression.value for expression in by_spec.values()):
        return list(range(len(manifests)))
    fields = {spec.spec_id: {field.field_id: n for n, field in enumerate(spec.fields)} for spec in specs}
    keys = _Keys()
    return [
        number
        for number, manifest in enumerate(manifests)
        if manifest.partition_spec_id not in by_spec
        or manifest.partitions is None
        or _may_hold(by_spec[manifest.partition_spec_id], manifest.partitions, fields[manifest.partition_spec_id], keys)
    ]


class _Keys:
    """The values of predicates as sorted keys, computed once for all manifests because lists may be long."""

    def __init__(self) -> None:
        self._cached: dict[int, list[Any]] = {}

    def of(self, bound: Bound, form: Form) -> list[Any]:
        keys = self._cached.get(id(bound))  # the caller keeps the predicate alive, so its id is unique
        if keys is None:
            keys = self._cached[id(bound)] = sorted(key_of(form, bound.kind, value) for value in bound.values)
        return keys


def _may_hold(
    expression: Expression, summaries: Sequence[FieldSummary], places: Mapping[int | None, int], keys: _Keys
) -> bool:
    if isinstance(expression, Always):
        return expression.value
    if isinstance(expression, And):
        return all(_may_hold(child, summaries, places, keys) for child in expression.children)
    if isinstance(expression, Or):
        return any(_may_hold(child, summaries, places, keys) for child in expression.children)
    assert isinstance(expression, Bound)
    place = places.get(expression.column_id, len(summaries))
    return place >= len(summaries) or _may_match(expression, summaries[place], keys)


def _may_match(bound: Bound, summary: FieldSummary, keys: _Keys) -> bool:
    form = form_of(bound.kind)
    if bound.op is Op.IS_NULL:
        return summary.contains_null is not False
    if bound.op is Op.IS_NAN:
        return summary.contains_nan is not False
    if form is None or form is Form.FLOATS or bound.kind == "uuid":
        return True  # NaN, the zeros and the order of UUIDs: only the values themselves decide
    if summary.lower is None and summary.upper is None:
        # Writers omit both if every value is null.
        return bound.op in (Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH) or summary.contains_null is not True
    low, high = _key(form, bound.kind, summary.lower), _key(form, bound.kind, summary.upper)
    return low is None or high is None or _overlaps(bound.op, keys.of(bound, form), low, high)


def _overlaps(op: Op, keys: Sequence[Any], low: Key, high: Key) -> bool:
    match op:
        case Op.LT:
            return bool(low < keys[0])
        case Op.LT_EQ:
            return bool(low <= keys[0])
        case Op.GT:
            return bool(high > keys[0])
        case Op.GT_EQ:
            return bool(high >= keys[0])
        case Op.EQ | Op.IN:
            place = bisect_left(keys, low)
            return place < len(keys) and bool(keys[place] <= high)
        case Op.STARTS_WITH:
            prefix = keys[0]
            assert isinstance(prefix, bytes)
            assert isinstance(low, bytes)
            assert isinstance(high, bytes)
            return low[: len(prefix)] <= prefix <= high[: len(prefix)] or high.startswith(prefix)
        case _:
            return True


def _key(form: Form, kind: str, data: bytes | None) -> Key | None:
    if data is None:
        return None
    try:
        value: Value = decode(kind, data)
    except ValueError:
        return None
    return key_of(form, kind, value)
