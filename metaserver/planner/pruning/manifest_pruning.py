"""Manifest pruning by the partition summaries of the manifest list (Java: ManifestEvaluator).

If a snapshot is not in memory, a plan does not read the manifests whose summaries prove that they list no matching
file. A summary that is missing or cannot be decoded proves nothing.

A list may have 100,000 manifests, and each plan selects the manifests that it needs. The summaries of a number field
are therefore decoded into arrays, once for all plans. The summaries of other fields are decoded for each plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.manifests.manifest import FieldSummary, ManifestFile
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.values import Value, decode_single_value
from seamark.formats.index.packing import LONG_MAX, Form, Longs, encode_key, get_form

Key = int | float | bytes
Flags = npt.NDArray[np.bool_]
FieldPositions = Mapping[int | None, int]

SUMMARY_BYTES = 32
"""The maximum memory of `ManifestSummaries` for each manifest and partition field."""
_NO, _YES, _UNKNOWN = 0, 1, 2
"""The states of a flag: whether a manifest has nulls, or has NaNs."""
_EMPTY_SUMMARY = FieldSummary(None, None, None, None)
_MATCHED_BY_NULL = (Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH)
"""The operators other than IS_NULL that null satisfies."""


class ManifestSummaries:
    """The partition summaries of a list of manifests.

    Several threads may share an instance.
    """

    def __init__(self, manifests: Sequence[ManifestFile]) -> None:
        self._manifests = manifests
        self._numbers: dict[int, Longs] = {}
        self._columns: dict[tuple[int, int, str], _FieldSummaries] = {}
        self._columns_max = 0

    def find_needed_manifests(self, by_spec: Mapping[int, Expression], specs: Sequence[PartitionSpec]) -> list[int]:
        """Return the indexes of the manifests that may list a file whose partition satisfies its spec's expression."""
        if all(isinstance(expression, Always) and expression.value for expression in by_spec.values()):
            return list(range(len(self._manifests)))
        positions = {spec.spec_id: {field.field_id: n for n, field in enumerate(spec.fields)} for spec in specs}
        is_needed, keys = np.ones(len(self._manifests), dtype=np.bool_), _Keys()
        for spec_id, numbers in self._group_by_spec().items():
            if spec_id in by_spec:
                is_needed[numbers] = self._find_possible_manifests(by_spec[spec_id], spec_id, positions[spec_id], keys)
        needed_numbers: list[int] = np.flatnonzero(is_needed).tolist()
        return needed_numbers

    def _group_by_spec(self) -> dict[int, Longs]:
        """Return the positions of the manifests that have summaries, int64[manifests], by spec id.

        The first call computes them. It also sets `_columns_max`, which limits the cached columns to one for each
        field.
        """
        if not self._numbers:
            numbers: dict[int, list[int]] = {}
            fields: dict[int, int] = {}
            for number, manifest in enumerate(self._manifests):
                if manifest.partitions is not None:
                    numbers.setdefault(manifest.partition_spec_id, []).append(number)
                    fields_max = max(fields.get(manifest.partition_spec_id, 0), len(manifest.partitions))
                    fields[manifest.partition_spec_id] = fields_max
            self._columns_max = sum(fields.values())
            self._numbers = {
                spec_id: np.array(numbers_of_spec, dtype=np.int64) for spec_id, numbers_of_spec in numbers.items()
            }
        return self._numbers

    def _find_possible_manifests(
        self, expression: Expression, spec_id: int, positions: FieldPositions, keys: _Keys
    ) -> Flags:
        """Return whether each manifest of the spec may list a matching file, bool[manifests of the spec].

        Args:
            expression: The condition on partition values.
            spec_id: The id of the spec.
            positions: The position of each partition field in the spec. Summaries have the same order.
            keys: The sorted values of predicates.
        """
        if isinstance(expression, (And, Or)):
            flags, *other_flags = (
                self._find_possible_manifests(child, spec_id, positions, keys) for child in expression.children
            )
            for child_flags in other_flags:
                flags = flags & child_flags if isinstance(expression, And) else flags | child_flags
            return flags
        if isinstance(expression, Bound):
            position = positions.get(expression.column_id)
            if position is not None:
                return self._open_column(spec_id, position, expression.kind).may_match(expression, keys)
        assert isinstance(expression, Always | Bound)
        is_possible = not isinstance(expression, Always) or expression.value
        return np.full(len(self._numbers[spec_id]), is_possible, dtype=np.bool_)

    def _open_column(self, spec_id: int, position: int, kind: str) -> _FieldSummaries:
        """Return the summaries of the field at a position of the spec, decoded as values of the type `kind`.

        A summary has the lowest and the highest value of a partition field in a manifest. A manifest may lack the
        summaries of later fields.
        """
        key = (spec_id, position, kind)
        column = self._columns.get(key)
        if column is None:
            summaries = [
                partitions[position] if position < len(partitions := self._manifests[number].partitions or ()) else None
                for number in self._numbers[spec_id].tolist()
            ]
            column = _FieldSummaries(summaries, kind)
            if len(self._columns) >= self._columns_max:  # Tables with the same list may have different types.
                self._columns.clear()
            self._columns[key] = column
        return column


class _Keys:
    """The values of predicates as sorted keys.

    They are computed once for all manifests, because a predicate may list many values.
    """

    def __init__(self) -> None:
        self._keys_by_predicate: dict[int, list[Any]] = {}

    def sort_keys(self, bound: Bound, form: Form) -> list[Any]:
        """Return the sorted keys of a predicate's values."""
        keys = self._keys_by_predicate.get(id(bound))  # The id is unique, because the caller references the predicate.
        if keys is None:
            keys = self._keys_by_predicate[id(bound)] = sorted(
                encode_key(form, bound.kind, value) for value in bound.values
            )
        return keys


class _FieldSummaries:
    """The summaries of one field in all manifests of a spec, with bounds of type `kind`.

    `nulls` and `nans`, uint8[manifests]: whether the manifest has nulls or NaNs. `unbounded`: whether the summary has
    no bounds. `is_known`: whether `low` and `high` contain both bounds. It can be true only for number fields.
    """

    __slots__ = ("form", "high", "is_known", "kind", "low", "nans", "nulls", "summaries", "unbounded")

    def __init__(self, summaries: Sequence[FieldSummary | None], kind: str) -> None:
        self.kind = kind
        self.form = get_form(kind)
        self.nulls = np.array(
            [_encode_flag(summary and summary.contains_null) for summary in summaries], dtype=np.uint8
        )
        self.nans = np.array([_encode_flag(item and item.contains_nan) for item in summaries], dtype=np.uint8)
        is_unbounded = [item is not None and item.lower is None and item.upper is None for item in summaries]
        self.unbounded: Flags = np.array(is_unbounded, dtype=np.bool_)
        self.summaries = summaries if self.form is Form.STRINGS and kind != "uuid" else ()
        if self.form is Form.INTEGERS:
            present_summaries = [_EMPTY_SUMMARY if item is None else item for item in summaries]
            low, high = (
                [_read_key(Form.INTEGERS, kind, data) for data in bounds] for bounds in _list_bounds(present_summaries)
            )
            is_known = [
                low_key is not None and high_key is not None for low_key, high_key in zip(low, high, strict=True)
            ]
            self.is_known: Flags = np.array(is_known, dtype=np.bool_)
            self.low: Longs = np.array([key or 0 for key in low], dtype=np.int64)
            self.high: Longs = np.array([key or 0 for key in high], dtype=np.int64)

    def may_match(self, bound: Bound, keys: _Keys) -> Flags:
        """Return whether each manifest may list a file that matches a predicate, bool[manifests]."""
        flags: Flags
        if bound.op in (Op.IS_NULL, Op.IS_NAN):
            flags = (self.nulls if bound.op is Op.IS_NULL else self.nans) != _NO
            return flags
        if self.form is Form.INTEGERS:
            flags = ~self.is_known | self._compute_overlaps(bound.op, keys.sort_keys(bound, self.form))
        elif self.summaries:
            flags = np.array([_may_match(bound, summary, keys) for summary in self.summaries], dtype=np.bool_)
        else:
            # Bounds of floats prove nothing, because of NaN and zeros. Bounds of UUIDs prove nothing, because clients
            # order UUIDs differently.
            return np.ones(len(self.nulls), dtype=np.bool_)
        if bound.op not in _MATCHED_BY_NULL:  # Writers omit both bounds if all values are null.
            flags &= ~(self.unbounded & (self.nulls == _YES))
        return flags

    def _compute_overlaps(self, op: Op, keys: Sequence[int]) -> Flags:
        """Return whether the bounds of each manifest overlap with the keys, by the rules of `_does_range_overlap`."""
        flags: Flags = np.ones(len(self.low), dtype=np.bool_)
        if op is Op.LT:
            flags = self.low < keys[0]
        elif op is Op.LT_EQ:
            flags = self.low <= keys[0]
        elif op is Op.GT:
            flags = self.high > keys[0]
        elif op is Op.GT_EQ:
            flags = self.high >= keys[0]
        elif op is Op.EQ or op is Op.IN:
            # The last item is only a value for positions after all keys.
            literals = np.array([*keys, LONG_MAX], dtype=np.int64)
            positions = np.searchsorted(literals[:-1], self.low)
            flags = (literals[positions] <= self.high) & (positions < len(keys))
        return flags


def _encode_flag(state: bool | FieldSummary | None) -> int:
    """Return `_YES`, `_NO` or `_UNKNOWN` for a flag of a partition field's summary. None means unknown."""
    return _UNKNOWN if state is None else _YES if state else _NO


def _list_bounds(summaries: Sequence[FieldSummary]) -> tuple[list[bytes | None], list[bytes | None]]:
    return [summary.lower for summary in summaries], [summary.upper for summary in summaries]


def _may_match(bound: Bound, summary: FieldSummary | None, keys: _Keys) -> bool:
    """Return whether a manifest may list a matching file, according to a summary of strings or bytes."""
    if summary is None:
        return True
    low, high = (_read_key(Form.STRINGS, bound.kind, data) for data in (summary.lower, summary.upper))
    return low is None or high is None or _does_range_overlap(bound.op, keys.sort_keys(bound, Form.STRINGS), low, high)


def _does_range_overlap(op: Op, keys: Sequence[Any], low: Key, high: Key) -> bool:
    """Return whether a value from `low` to `high` may satisfy the operator with one of the ascending keys."""
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
            position = bisect_left(keys, low)
            return position < len(keys) and bool(keys[position] <= high)
        case Op.STARTS_WITH:
            prefix = keys[0]
            assert isinstance(prefix, bytes)
            assert isinstance(low, bytes)
            assert isinstance(high, bytes)
            return low[: len(prefix)] <= prefix <= high[: len(prefix)] or high.startswith(prefix)
        case _:
            return True


def _read_key(form: Form, kind: str, data: bytes | None) -> Key | None:
    """Return the key of an encoded bound, or None if it is missing or invalid."""
    if data is None:
        return None
    try:
        value: Value = decode_single_value(kind, data)
    except ValueError:
        return None
    return encode_key(form, kind, value)
