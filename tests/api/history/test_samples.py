"""Tests of samples of ranges: the stored width reveals no literals, and its error is limited."""

from __future__ import annotations

import random

import pytest

from seamark.formats.iceberg.expressions.expression import Bound, Expression, Op, join_by_and, join_by_or
from seamark.metaserver.history.samples import BOTH, HIGH, LOW, RangeWidth, compute_widths
from seamark.metaserver.history.shapes import list_conjuncts
from tests.seeds import first_seed


def build_bound(op: Op, value: float, column_id: int = 1) -> Bound:
    return Bound(op, column_id, "c", "double", "identity", "double", (value,))


def compute_width(*parts: Expression) -> RangeWidth:
    (width,) = compute_widths(join_by_and(*parts), {1: (0.0, 1000.0)})
    return width


def test_side_of_a_range_is_low_high_or_both() -> None:
    low, high = build_bound(Op.LT, 500.0), build_bound(Op.GT_EQ, 250.0)
    assert compute_width(low) == RangeWidth(1, LOW, 0.5)
    assert compute_width(high).side == HIGH
    assert (compute_width(low, high).side, compute_width(build_bound(Op.GT, 9e9)).share) == (BOTH, 0.0)
    assert compute_width(build_bound(Op.LT, 9e9)).share == 1.0
    assert compute_widths(low, {}) == compute_widths(build_bound(Op.EQ, 5.0), {1: (0.0, 9.0)}) == ()


def test_nan_alternative_changes_neither_width_nor_shape_of_a_comparison() -> None:
    low, nan = build_bound(Op.GT, 250.0), Bound(Op.IS_NAN, 1, "c", "double", "identity", "double", ())
    filter_with_nan = join_by_or(low, nan)
    assert compute_width(filter_with_nan) == compute_width(low)
    assert list_conjuncts(filter_with_nan) == list_conjuncts(low) == list_conjuncts(join_by_or(nan, low))
    assert list_conjuncts(join_by_or(low, build_bound(Op.LT, 1.0))) != list_conjuncts(low)


def test_share_is_rounded_equally_well_at_both_ends() -> None:
    """A filter keeps a share of the values from 0 to 1,000. The rounding error of shares near 0 and near 1 is small.

    The server records the rounded share of a filter, called its width, instead of the literals.
    """
    rng = random.Random(first_seed())
    shares = [2 ** -rng.uniform(1, 20) for _ in range(200)]
    for share in [*shares, *(1 - share for share in shares)]:
        rounded_share = compute_width(build_bound(Op.LT, 1000 * share)).share
        assert rounded_share == pytest.approx(share, rel=0.1)
        assert 1 - rounded_share == pytest.approx(1 - share, rel=0.1)
    # Ten thousand literals between 500 and 600 have at most eight widths, so a width does not reveal the literal.
    assert len({compute_width(build_bound(Op.LT, 500 + number / 100)).share for number in range(10_000)}) <= 8
