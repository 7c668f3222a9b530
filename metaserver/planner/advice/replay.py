"""Replays recorded statements over layouts of a table, without writing a file.

A statement is drawn from its shape. The history does not contain the literals, so a condition gets a value of the
sampled rows, and a range gets the recorded width. Conditions become masks over the distinct values of a column. A
layout consists of the smallest and the largest value of each column in each file. A statement reads a file if each
condition has a matching value between the smallest and the largest value.

    statements = draw_statements(shapes, sample, seed=…)
    layout = simulate_layout(sample, order, files)

`read_shares.py` computes the shares of the bytes and files that each statement reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.expressions.expression import And, Bound, Expression, Op, Or, collect_predicates
from seamark.formats.index.packing import Longs
from seamark.formats.services.curves import choose_cell_bounds, compute_curve_keys, to_sortable_keys
from seamark.metaserver.history.samples import BOTH, HIGH, LOW, FilterSample
from seamark.metaserver.history.shapes import Conjunct, QueryShape, ShapeTerm
from seamark.metaserver.planner.advice.row_samples import RowSample, SampledColumn

DRAWN_STATEMENTS_PER_SHAPE_MAX = 24
"""The maximum number of statements that are drawn from one shape."""
_MASK_BYTES_MAX = 8 << 20
"""The maximum memory for the conditions of all statements drawn from one shape. At least one statement is drawn."""
ROWS_PER_FILE_MIN = 24
"""The minimum number of sampled rows in a simulated file, so that its bounds are close to those of a real file."""
_RANGE_SHARE_DEFAULT, _PREFIX_SHARE_DEFAULT = 0.1, 0.02
"""The assumed share of the values in a range without a recorded width, and in a range of a prefix."""
_RANK_BITS = 16
"""The number of bits of a coordinate on a curve."""
_EXPONENT_STEPS = 12
"""The number of steps of the search for an exponent. Each step halves the error."""

Mask = npt.NDArray[np.bool_]
Shares = npt.NDArray[np.float64]
_LOWER_LIMIT, _UPPER_LIMIT = 0, 1
_RANGES = {
    Op.LT.value: _UPPER_LIMIT,
    Op.LT_EQ.value: _UPPER_LIMIT,
    Op.GT.value: _LOWER_LIMIT,
    Op.GT_EQ.value: _LOWER_LIMIT,
}
"""The limit of a range that each operator sets."""


@dataclass(frozen=True)
class RecordedShape:
    """A statement shape from the query history. A shape is a statement without its values.

    Attributes:
        fingerprint: The digest of the shape.
        shape: The shape.
        statements: The number of recorded statements.
        samples: Samples of its filters, without literals.
        filters: Bound filters with their literals, if the history keeps literals.
    """

    fingerprint: str
    shape: QueryShape
    statements: int
    samples: Sequence[FilterSample] = ()
    filters: Sequence[Expression] = ()


@dataclass(frozen=True)
class DrawnCondition:
    """A condition of a statement that was randomly generated from the query history.

    Attributes:
        column_id: The compared column.
        matching: bool[distinct values + 1]: whether each code of the column matches. The code of a value is its
            position among the sorted distinct values of the sample plus 1. The code 0 is null.
        named_values: The number of values that the condition names, or 0 for a range.
    """

    column_id: int
    matching: Mask
    named_values: int


@dataclass(frozen=True)
class DrawnStatement:
    """A statement that was generated from the query history.

    The values of its conditions are those of a recorded filter, or are drawn from the sample.

    Attributes:
        fingerprint: The digest of the recorded statement without its literals.
        weight: The number of recorded statements that the drawn statement represents.
        conditions: The conjuncts of the filter. A row satisfies a conjunct if it matches one of its alternatives.
    """

    fingerprint: str
    weight: float
    conditions: tuple[tuple[DrawnCondition, ...], ...]


@dataclass(frozen=True)
class SimulatedLayout:
    """The files of a simulated layout. A code is the position of a value among the sorted sampled values, from 1.

    Attributes:
        lower: int32[files] by column id: the smallest code of the column in each file, without nulls.
        upper: int32[files] by column id: the largest code of the column in each file.
        has_nulls: bool[files] by column id: whether each file has a null in the column.
        weights: float64[files]: the share of the table's bytes in each file.
    """

    lower: Mapping[int, npt.NDArray[np.int32]]
    upper: Mapping[int, npt.NDArray[np.int32]]
    has_nulls: Mapping[int, Mask]
    weights: Shares

    @property
    def files(self) -> int:
        return len(self.weights)


# Statements


def draw_statements(shapes: Sequence[RecordedShape], sample: RowSample, *, seed: int) -> list[DrawnStatement]:
    """Generate statements from the query history. The same arguments always give the same statements.

    A shape is a statement without its literals. If the history has the filters of a shape with their literals, these
    filters are used. Otherwise, the values are drawn at random from the sampled rows.

    Args:
        shapes: The recorded shapes.
        sample: The sampled rows.
        seed: The seed of the random numbers.
    """
    statements = []
    for number, recorded_shape in enumerate(shapes):
        rng = np.random.default_rng([seed, number])
        draws = _count_draws(recorded_shape.shape, sample)
        codes = _draw_compared_codes(recorded_shape, sample, draws, rng)
        for draw in range(draws):
            if recorded_shape.filters:
                conditions = _build_filter_conditions(
                    recorded_shape.filters[draw % len(recorded_shape.filters)], sample
                )
            else:
                samples = recorded_shape.samples
                widths = samples[draw % len(samples)] if samples else FilterSample()
                conditions = (
                    _draw_conditions(recorded_shape.shape, widths, sample, rng)
                    if codes is None
                    else _build_equality(recorded_shape.shape.conjuncts[0][0].column_id, int(codes[draw]), sample)
                )
            statements.append(DrawnStatement(recorded_shape.fingerprint, recorded_shape.statements / draws, conditions))
    return statements


def _draw_compared_codes(
    recorded_shape: RecordedShape, sample: RowSample, draws: int, rng: np.random.Generator
) -> npt.NDArray[np.int64] | None:
    """Draw the compared values for a shape whose only condition is an equality.

    The drawn values repeat as often as the literals of the recorded statements. For this, the probability of a value is
    a power of its frequency among the rows. The exponent, from 0 to 1, is chosen so that the share of repeated values
    equals the recorded share.

    Returns:
        The codes, or None if the shape has other conditions, if the share of repeats is unknown, or if the column has
        no sampled value.
    """
    conjuncts = recorded_shape.shape.conjuncts
    repeats = [sample.repeats for sample in recorded_shape.samples if sample.repeats >= 0]
    if len(conjuncts) != 1 or len(conjuncts[0]) != 1 or not repeats:
        return None
    (term,) = conjuncts[0]
    column = sample.columns.get(term.column_id)
    if column is None or term.op != Op.EQ.value or term.transform != "identity":
        return None
    counts = np.bincount(column.codes, minlength=len(column.values) + 1)[1:].astype(np.float64)
    occurring_codes = np.flatnonzero(counts)
    if not len(occurring_codes):
        return None
    target = float(np.mean(repeats))
    low, high = 0.0, 1.0
    for _ in range(_EXPONENT_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _compute_repeat_share(counts[occurring_codes], middle) > target else (middle, high)
    weights = counts[occurring_codes] ** low
    return np.asarray(rng.choice(occurring_codes + 1, size=draws, p=weights / weights.sum()), dtype=np.int64)


def _compute_repeat_share(counts: Shares, exponent: float) -> float:
    """Return the probability that two drawn values are equal.

    A value is drawn with a probability proportional to its number of rows to the power of `exponent`.
    """
    weights = counts**exponent
    return float(((weights / weights.sum()) ** 2).sum())


def _build_equality(column_id: int, code: int, sample: RowSample) -> tuple[tuple[DrawnCondition, ...], ...]:
    """Return the conditions of a filter that requires a single value of a column."""
    is_match = np.zeros(len(sample.columns[column_id].values) + 1, dtype=np.bool_)
    is_match[code] = True
    return ((DrawnCondition(column_id, is_match, named_values=1),),)


def _count_draws(shape: QueryShape, sample: RowSample) -> int:
    """Return the number of statements to draw from a shape. The memory for their conditions limits it."""
    columns = [sample.columns.get(term.column_id) for conjunct in shape.conjuncts for term in conjunct]
    mask_bytes = sum(len(column.values) + 1 for column in columns if column is not None)
    return min(DRAWN_STATEMENTS_PER_SHAPE_MAX, max(1, _MASK_BYTES_MAX // max(1, mask_bytes)))


def _build_filter_conditions(bound: Expression, sample: RowSample) -> tuple[tuple[DrawnCondition, ...], ...]:
    """Return the conditions of a recorded filter with literals.

    Only a comparison, or an OR of comparisons, that the sample can evaluate is returned. Another conjunct is left out,
    as if all files match it.

    Returns:
        A tuple for each conjunct, with the comparisons that OR combines. All conjuncts must be true.
    """
    conditions = []
    for part in bound.children if isinstance(bound, And) else (bound,):
        alternatives = [_build_condition(predicate, sample) for predicate in collect_predicates(part)]
        is_flat = isinstance(part, Bound) or (
            isinstance(part, Or) and all(isinstance(child, Bound) for child in part.children)
        )
        sampled_conditions = tuple(condition for condition in alternatives if condition is not None)
        if is_flat and sampled_conditions and len(sampled_conditions) == len(alternatives):
            conditions.append(sampled_conditions)
    return tuple(conditions)


def _build_condition(predicate: Bound, sample: RowSample) -> DrawnCondition | None:
    """Convert a predicate to a condition, or return None if the sample cannot evaluate it.

    The sample has strings as bytes.
    """
    column = sample.columns.get(predicate.column_id)
    if column is None or predicate.transform != "identity":
        return None
    values: list[Any] = [value.encode() if isinstance(value, str) else value for value in predicate.values]
    column_values: Any = column.values
    is_match = np.zeros(len(column.values) + 1, dtype=np.bool_)
    values_count = 0
    match predicate.op:
        case Op.EQ | Op.IN:
            is_match[1:] = np.isin(column.values, np.array(values, dtype=column.values.dtype))
            values_count = len(values)
        case Op.LT:
            is_match[1:] = column_values < values[0]
        case Op.LT_EQ:
            is_match[1:] = column_values <= values[0]
        case Op.GT:
            is_match[1:] = column_values > values[0]
        case Op.GT_EQ:
            is_match[1:] = column_values >= values[0]
        case Op.STARTS_WITH:
            is_match[1:] = [value.startswith(values[0]) for value in column.values]
        case Op.IS_NULL:
            is_match[0] = True
        case Op.IS_NAN if column.values.dtype == np.float64:
            is_match[1:] = np.isnan(column_values)
        case _:
            return None
    return DrawnCondition(predicate.column_id, is_match, values_count)


def _draw_conditions(
    shape: QueryShape, filter_sample: FilterSample, sample: RowSample, rng: np.random.Generator
) -> tuple[tuple[DrawnCondition, ...], ...]:
    """Draw the conditions of one statement. All values are from the same row, so the statement matches a row.

    The comparisons of a column by `<` and `>` are combined to one range. Its width is from the recorded filter, or a
    default if no width is recorded.
    """
    row = int(rng.integers(sample.rows))
    widths = {width.column_id: width for width in filter_sample.widths}
    conditions: list[tuple[DrawnCondition, ...]] = []
    limits_by_column: dict[int, set[int]] = {}
    for conjunct in shape.conjuncts:
        if len(conjunct) == 1 and conjunct[0].op in _RANGES and conjunct[0].transform == "identity":
            limits_by_column.setdefault(conjunct[0].column_id, set()).add(_RANGES[conjunct[0].op])
        elif (alternatives := _draw_alternatives(conjunct, sample, row, rng)) is not None:
            conditions.append(alternatives)
    for column_id, limits in limits_by_column.items():
        column = sample.columns.get(column_id)
        if column is not None and len(column.values):
            width = widths.get(column_id)
            # A range with only a lower limit contains the highest values, so its side is HIGH.
            side = (
                (BOTH if len(limits) == 2 else HIGH if limits == {_LOWER_LIMIT} else LOW)
                if width is None
                else width.side
            )
            share = _RANGE_SHARE_DEFAULT if width is None else width.share
            is_match = _draw_range(column, side, share, row, rng)
            conditions.append((DrawnCondition(column_id, is_match, named_values=0),))
    return tuple(conditions)


def _draw_alternatives(
    conjunct: Conjunct, sample: RowSample, row: int, rng: np.random.Generator
) -> tuple[DrawnCondition, ...] | None:
    """Choose values for the alternatives of a conjunct, so that the sampled row with the number `row` satisfies it.

    Return None if the conjunct may match rows in all files: if one of its terms is on a column that is not sampled, is
    transformed, or excludes no files.
    """
    alternatives = []
    for term in conjunct:
        column = sample.columns.get(term.column_id)
        condition = None
        if column is not None and term.transform == "identity" and len(column.values):
            condition = _draw_condition(term, column, row, rng)
        if condition is None:
            return None
        alternatives.append(condition)
    return tuple(alternatives)


def _draw_condition(
    term: ShapeTerm, column: SampledColumn, row: int, rng: np.random.Generator
) -> DrawnCondition | None:
    """Draw the values of one term, or return None if the operator may match rows in all files."""
    is_match = np.zeros(len(column.values) + 1, dtype=np.bool_)
    values = 0
    match term.op:
        case Op.EQ.value:
            is_match[_draw_code(column, row, rng)] = True
            values = 1
        case Op.IN.value:
            # The recorded number is rounded up to a power of ten. The middle of the powers n / 10 and n is about n / 3.
            values = max(2, round(term.values / 3))
            drawn_codes = column.codes[rng.integers(len(column.codes), size=values)]
            is_match[drawn_codes] = True
            is_match[0] = False
        case Op.IS_NULL.value:
            is_match[0] = True
        case Op.STARTS_WITH.value:
            is_match = _draw_range(column, BOTH, _PREFIX_SHARE_DEFAULT, row, rng)
        case Op.LT.value | Op.LT_EQ.value:
            is_match = _draw_range(column, LOW, _RANGE_SHARE_DEFAULT, row, rng)
        case Op.GT.value | Op.GT_EQ.value:
            is_match = _draw_range(column, HIGH, _RANGE_SHARE_DEFAULT, row, rng)
        case _:
            return None
    return DrawnCondition(term.column_id, is_match, values)


def _draw_code(column: SampledColumn, row: int, rng: np.random.Generator) -> int:
    """Return the code of the row's value, or a random code if the value is null.

    With the same row for all columns, all conditions match at least this row.
    """
    code = int(column.codes[row])
    return code if code else int(rng.integers(1, len(column.values) + 1))


def _draw_range(column: SampledColumn, side: str, share: float, row: int, rng: np.random.Generator) -> Mask:
    """Choose a range, and return whether each value of the column is in it, bool[distinct values + 1].

    The first flag is for null, which is in no range. The other flags have the order of the sorted distinct values.

    Values that are not numbers are replaced by their positions in the sorted values.

    Args:
        column: The sampled column.
        side: LOW or HIGH for a range at this end of the values, or BOTH for a range around the value of the row.
        share: The width of the range, as a share of the distance between the smallest and the largest value.
        row: The number of the sampled row.
        rng: The source of random numbers.
    """
    is_match = np.zeros(len(column.values) + 1, dtype=np.bool_)
    axis = column.values.astype(np.float64) if column.is_numeric else np.arange(len(column.values), dtype=np.float64)
    finite_values = axis[np.isfinite(axis)]
    if not len(finite_values):
        return is_match
    low, high = float(finite_values[0]), float(finite_values[-1])
    width = share * (high - low)
    start = {LOW: low, HIGH: high - width}.get(side)
    if start is None:
        centre = axis[_draw_code(column, row, rng) - 1]
        start = min(max(low, float(centre) - width * float(rng.random())), high - width)
    is_match[1:] = (axis >= start) & (axis <= start + width)
    return is_match


# Layouts


def compute_curve_order(sample: RowSample, column_ids: Sequence[int], curve: str) -> Longs:
    """Return the order of the sampled rows along a curve through the columns, int64[rows]."""
    order: Longs = np.argsort(_compute_sortable_keys(sample, column_ids, curve), kind="stable")
    return order


def simulate_clustering(sample: RowSample, column_ids: Sequence[int], curve: str, files: int) -> SimulatedLayout:
    """Cut the sampled rows along a curve into about `files` files.

    Like the job that clusters a table, the function cuts only between cells of the curve. Rows in the same cell have
    the same key.
    """
    keys = _compute_sortable_keys(sample, column_ids, curve)
    order = np.argsort(keys, kind="stable")
    bounds = choose_cell_bounds(keys, _limit_files(files, sample.rows))
    return _build_layout(sample, order, np.unique(np.append(0, np.searchsorted(keys[order], bounds))))


def _compute_sortable_keys(sample: RowSample, column_ids: Sequence[int], curve: str) -> npt.NDArray[np.bytes_]:
    points = np.stack([sample.columns[column_id].compute_ranks(_RANK_BITS) for column_id in column_ids], axis=1)
    return to_sortable_keys(compute_curve_keys(points, _RANK_BITS, curve))


def _limit_files(files: int, rows: int) -> int:
    return max(1, min(files, rows // ROWS_PER_FILE_MIN))


def simulate_layout(
    sample: RowSample, order: Longs, files: int, groups: npt.NDArray[np.int64] | None = None
) -> SimulatedLayout:
    """Cut ordered rows into files of equal size.

    Args:
        sample: The sampled rows.
        order: The order of the rows.
        files: The number of files.
        groups: int64[rows]: the partition of each ordered row, ascending. A file has rows of one partition.
    """
    rows = len(order)
    count = _limit_files(files, rows)
    starts = np.unique((np.arange(count) * rows) // count)
    if groups is not None:
        starts = np.unique(np.concatenate([starts, [0], np.flatnonzero(np.diff(groups)) + 1]))
    return _build_layout(sample, order, starts)


def _build_layout(sample: RowSample, order: Longs, starts: npt.NDArray[np.int64]) -> SimulatedLayout:
    """Return the layout of files that begin at these positions of the ordered rows.

    The code of a value is its position in the sorted values plus 1, and the code of null is 0.
    """
    rows = len(order)
    starts = starts[starts < rows]
    lengths = np.diff(np.append(starts, rows))
    lower, upper, nulls = {}, {}, {}
    for column_id, column in sample.columns.items():
        codes = column.codes[order]
        code_end = len(column.values) + 1
        low = np.minimum.reduceat(np.where(codes == 0, code_end, codes), starts)
        high = np.maximum.reduceat(codes, starts)
        # A real file has more rows than the sample, so its bounds are wider, by about two gaps between sampled values.
        gap = ((high - low) / np.maximum(1, lengths - 1)).astype(np.int32)
        lower[column_id] = np.maximum(1, low - gap).astype(np.int32)
        upper[column_id] = np.where(high > 0, np.minimum(code_end - 1, high + gap), 0).astype(np.int32)
        nulls[column_id] = np.minimum.reduceat(codes, starts) == 0
    return SimulatedLayout(lower, upper, nulls, lengths / rows)


def find_files_that_may_match(layout: SimulatedLayout, condition: DrawnCondition) -> Mask:
    """Return the files whose bounds include a value that matches the condition, bool[files].

    Values are compared by their codes. The code of a value is its position among the sorted sampled values plus 1. The
    code 0 is null.
    """
    column_id = condition.column_id
    if condition.matching[0]:  # The condition is IS NULL.
        return layout.has_nulls[column_id]
    # The number of matching codes below each code, so that a difference counts the matches between two codes.
    matches_below = np.concatenate([[0], np.cumsum(condition.matching)])
    last = len(matches_below) - 1
    low, high = layout.lower[column_id], layout.upper[column_id]
    counts = matches_below[np.minimum(high + 1, last)] - matches_below[np.minimum(low, last)]
    may_match: Mask = counts > 0
    return may_match


def compute_weighted_mean(values: Shares, statements: Sequence[DrawnStatement]) -> float:
    """Return the mean over the recorded statements. A drawn statement represents `weight` recorded statements."""
    weights = np.array([statement.weight for statement in statements])
    return float(values @ weights / max(1e-9, float(weights.sum())))
