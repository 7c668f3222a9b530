"""What pruning by partition values and by statistics share: the walk over an expression, and comparisons in kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.expressions.ranges import after_prefix
from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.kernels import _scan
from seamark.formats.index.packing import Form, form_of, key_of
from seamark.metaserver.planner.view.selection import Expired, Selection, narrow_to_any
from seamark.metaserver.planner.view.view import Side

LE, LT, GE, GT = 0, 1, 2, 3
COMPARISONS = {Op.LT_EQ: LE, Op.LT: LT, Op.GT_EQ: GE, Op.GT: GT}
IN_LIMIT = 200
"""Longer lists of strings are replaced by their range; lists of numbers have no limit."""
Key = int | float | bytes
Sides = tuple[Side, ...]


def narrow(
    selection: Selection, expression: Expression, leaf: Callable[[Selection, Bound], None], expired: Expired
) -> None:
    """Narrows by each child of a conjunction in turn, and to the union of what the children of a disjunction keep."""
    if expired():
        return
    if isinstance(expression, Always):
        if not expression.value:
            selection.clear()
    elif isinstance(expression, And):
        for number, child in enumerate(sorted(expression.children, key=_cost)):
            if number and selection.is_empty:
                return
            narrow(selection, child, leaf, expired)
    elif isinstance(expression, Or):
        branches = [partial(narrow, expression=child, leaf=leaf, expired=expired) for child in expression.children]
        narrow_to_any(selection, branches, expired)
    else:
        assert isinstance(expression, Bound)
        leaf(selection, expression)


def _cost(expression: Expression) -> int:
    """Evaluation order: fixed-width comparisons, then strings, then nested expressions."""
    if isinstance(expression, Bound):
        return 1 if form_of(expression.kind) is Form.STRINGS else 0
    return 2 if isinstance(expression, And) else 3


def compare_keys(selection: Selection, sides: Sides, op: int, key: bytes) -> None:
    for side in sides:
        if side.form is Form.STRINGS:
            run_comparison(selection, side, op, key, uuid=False)


def run_comparison(selection: Selection, side: Side, op: int, key: Key, *, uuid: bool) -> None:
    if side.form is Form.STRINGS:
        assert isinstance(key, bytes)
        if uuid:
            _scan.narrow_uuids(side.layout, side.low, side.high, selection.state, selection.mask, op, key)
        else:
            selection.compare(side, op, key)
    elif side.form is Form.FLOATS:
        selection.compare(side, op, float(key))
    else:
        assert not isinstance(key, bytes)
        selection.compare(side, op, int(key))


def run_membership(selection: Selection, lower: Side, upper: Side, bound: Bound) -> None:
    """Keeps files whose range, lower to upper, contains one of the integers that `bound` lists."""
    keys = np.array(sorted({int(key_of(Form.INTEGERS, bound.kind, value)) for value in bound.values}), dtype=np.int64)
    _scan.narrow_longs_in(lower.layout, upper.layout, lower.low, upper.high, selection.state, selection.mask, keys)


def narrow_to_prefix(selection: Selection, lower: Sides, upper: Sides, value: Value) -> None:
    """STARTS_WITH: some value between lower and upper has the prefix `value`."""
    prefix = _text(value)
    compare_keys(selection, upper, GE, prefix)
    if following := after_prefix(prefix):
        compare_keys(selection, lower, LT, following)


def conditions_outside_prefix(lower: Sides, upper: Sides, value: Value) -> list[Callable[[Selection], None]]:
    """NOT_STARTS_WITH: conditions under which some value between lower and upper lacks the prefix `value`."""
    prefix = _text(value)
    conditions: list[Callable[[Selection], None]] = [partial(compare_keys, sides=lower, op=LT, key=prefix)]
    if following := after_prefix(prefix):
        conditions.append(partial(compare_keys, sides=upper, op=GE, key=following))
    return conditions


def _text(value: Value) -> bytes:
    assert isinstance(value, str)
    return value.encode("utf-8", "surrogatepass")
