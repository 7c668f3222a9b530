"""Pruning by partition values: narrows a selection of files, before `file_pruning` does by column statistics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.expressions.expression import Bound, Expression, Op
from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.packing import Form, form_of, key_of
from seamark.metaserver.planner.pruning.comparisons import (
    COMPARISONS,
    GE,
    GT,
    IN_LIMIT,
    LE,
    LT,
    conditions_outside_prefix,
    narrow,
    narrow_to_prefix,
    run_comparison,
    run_membership,
)
from seamark.metaserver.planner.view.selection import Expired, Selection, narrow_to_any
from seamark.metaserver.planner.view.view import PartitionValues


def narrow_by_partition(selection: Selection, by_spec: Mapping[int, Expression], expired: Expired) -> None:
    """`by_spec`: for each partition spec id, the condition on its partition values (`projection.inclusive`). Files of
    other specs are kept.
    """
    if by_spec.keys() == selection.view.specs and len(by_spec) == 1:
        narrow(selection, next(iter(by_spec.values())), _partition_leaf, expired)
        return
    spec_ids = selection.view.spec_ids
    for spec_id, expression in by_spec.items():
        of_spec = spec_ids == spec_id
        part = Selection(selection.view, np.where(of_spec, selection.state, 0).astype(np.uint8), selection.mask)
        narrow(part, expression, _partition_leaf, expired)
        selection.state[of_spec] = part.state[of_spec]


def _partition_leaf(selection: Selection, bound: Bound) -> None:
    column = selection.view.partition(bound.column_id, bound.kind)
    if form_of(bound.kind) is None:
        return
    part = selection
    if not column.is_known:
        part = Selection(selection.view, np.where(column.known, selection.state, 0).astype(np.uint8), selection.mask)
    if form_of(bound.kind) is Form.FLOATS:
        _narrow_floats(part, column, bound)
    else:
        _narrow_values(part, column, bound)
    if part is not selection:
        selection.state[column.known] = part.state[column.known]


def _narrow_values(selection: Selection, column: PartitionValues, bound: Bound) -> None:
    op, values, kind = bound.op, bound.values, bound.kind
    if op is Op.IS_NULL:
        _keep_nulls(selection, column, nulls=True)
    elif op is Op.NOT_NULL:
        _keep_nulls(selection, column, nulls=False)
    elif op in COMPARISONS:
        _compare_values(selection, column, (COMPARISONS[op],), kind, values[0])
    elif op is Op.EQ:
        _compare_values(selection, column, (LE, GE), kind, values[0])
    elif op is Op.IN:
        _narrow_values_in(selection, column, bound)
    elif op is Op.NOT_EQ or op is Op.NOT_IN:
        _narrow_values_out(selection, column, bound)
    elif op is Op.STARTS_WITH:
        _keep_nulls(selection, column, nulls=False)
        narrow_to_prefix(selection, column.sides, column.sides, values[0])
    elif op is Op.NOT_STARTS_WITH:
        nulls = partial(_keep_nulls, column=column, nulls=True)
        narrow_to_any(selection, [nulls, *conditions_outside_prefix(column.sides, column.sides, values[0])])


def _compare_values(
    selection: Selection, column: PartitionValues, ops: tuple[int, ...], kind: str, value: Value
) -> None:
    _keep_nulls(selection, column, nulls=False)
    for op in ops:
        for side in column.sides:
            run_comparison(selection, side, op, key_of(side.form, kind, value), uuid=kind == "uuid" and len(ops) == 1)


def _narrow_values_in(selection: Selection, column: PartitionValues, bound: Bound) -> None:
    _compare_values(selection, column, (LE,), bound.kind, bound.values[-1])
    _compare_values(selection, column, (GE,), bound.kind, bound.values[0])
    if len(column.sides) == 1 and column.sides[0].form is Form.INTEGERS:
        run_membership(selection, column.sides[0], column.sides[0], bound)
    elif len(bound.values) <= IN_LIMIT:
        narrow_to_any(
            selection,
            [
                partial(_compare_values, column=column, ops=(LE, GE), kind=bound.kind, value=value)
                for value in bound.values
            ],
        )


def _narrow_values_out(selection: Selection, column: PartitionValues, bound: Bound) -> None:
    """NOT_EQ, NOT_IN; null matches both."""
    if len(bound.values) > IN_LIMIT:
        return
    for value in bound.values:
        narrow_to_any(
            selection,
            [
                partial(_keep_nulls, column=column, nulls=True),
                partial(_compare_values, column=column, ops=(LT,), kind=bound.kind, value=value),
                partial(_compare_values, column=column, ops=(GT,), kind=bound.kind, value=value),
            ],
        )


def _keep_nulls(selection: Selection, column: PartitionValues, *, nulls: bool) -> None:
    """Keeps files whose value is null, or files whose value is not null."""
    if not column.has_nulls:
        if nulls:
            selection.clear()
        return
    selection.state[column.nulls == (0 if nulls else 1)] = 0
    for number in np.flatnonzero((column.nulls == 2) & (selection.state != 0)).tolist():
        packed = column.packed[number]
        assert packed is not None
        present = selection.view.blocks[number].column_at(packed).present()
        selection.keep(number, ~present if nulls else present)


def _narrow_floats(selection: Selection, column: PartitionValues, bound: Bound) -> None:
    """Partition values of float and double: rare, so numpy evaluates them block by block. NaN is greater than every
    number, as in Java; the two zeros are equal.
    """
    for number in np.flatnonzero(selection.state).tolist():
        packed = column.packed[number]
        block = selection.view.blocks[number]
        if packed is None:
            values, present = np.full(block.rows, np.nan), np.zeros(block.rows, dtype=np.bool_)
        else:
            values, present = block.column_at(packed).doubles(), block.column_at(packed).present()
        selection.keep(number, _float_matches(values, present, bound))


def _float_matches(
    values: npt.NDArray[np.float64], present: npt.NDArray[np.bool_], bound: Bound
) -> npt.NDArray[np.bool_]:
    nan: npt.NDArray[np.bool_] = present & np.isnan(values)
    keys = np.array([float(value) for value in bound.values if not isinstance(value, (str, bytes))])
    op = bound.op
    if op is Op.IS_NULL:
        return ~present
    if op is Op.NOT_NULL:
        return present
    if op is Op.IS_NAN:
        return nan
    if op is Op.NOT_NAN:
        return ~nan
    matches: npt.NDArray[np.bool_]
    if op in (Op.IN, Op.EQ):
        matches = present & np.isin(values, keys)
    elif op in (Op.NOT_IN, Op.NOT_EQ):
        matches = ~present | ~np.isin(values, keys) | (values == 0)
    elif op in (Op.LT, Op.LT_EQ):
        matches = present & ((values <= keys[0]) if op is Op.LT_EQ or keys[0] == 0 else (values < keys[0]))
    else:
        matches = nan | (present & ((values >= keys[0]) if op is Op.GT_EQ or keys[0] == 0 else (values > keys[0])))
    return matches
