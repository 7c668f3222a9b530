"""Pruning of a selection of files by partition values, by column statistics, or by the snapshots that added files.

A file is removed only if its partition values or statistics prove that none of its rows matches for any client. If
clients order zeros or UUIDs differently, the proof must hold in both orders. A value proves nothing if it is missing,
if its type cannot be compared, or if the time budget ends before it is compared.

Every test is a combination of one-sided comparisons in kernels (`formats/index/kernels/_scan.pyx`). For example, the
comparison "minimum <= x" keeps the files whose minimum is at most x. The result keeps at least the files that Iceberg
Java's InclusiveMetricsEvaluator keeps, except for zeros. A conjunction narrows the selection by its children in
sequence. A disjunction narrows a copy for each child, and its result is the union of the copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.expressions.projection import find_source_ranges
from seamark.formats.iceberg.expressions.ranges import find_end_of_prefix
from seamark.formats.iceberg.manifests.writer import ADDED
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.kernels import _scan
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.packing import MISSING, Form, Longs, encode_key, get_form
from seamark.metaserver.index.blocks.block import COUNTS
from seamark.metaserver.planner.view.selection import Expired, FileSelection, narrow_to_any, never_expires
from seamark.metaserver.planner.view.view import (
    ALL_FILES,
    NO_FILES,
    SOME_FILES,
    BoundColumn,
    ColumnStatistics,
    Flags,
    PartitionValues,
    TableView,
)

LE, LT, GE, GT = 0, 1, 2, 3
COMPARISONS = {Op.LT_EQ: LE, Op.LT: LT, Op.GT_EQ: GE, Op.GT: GT}
IN_VALUES_MAX = 200
"""The maximum length of a list of strings whose values are compared one by one.

For a longer list, only the range of its values is compared. Lists of numbers have no limit.
"""
Key = int | float | bytes
BoundColumns = tuple[BoundColumn, ...]


def narrow_by_expression(
    selection: FileSelection,
    expression: Expression,
    narrow_by_predicate: Callable[[FileSelection, Bound], None],
    is_expired: Expired,
) -> None:
    """Keep the files of a selection that may have rows for which an expression is true.

    AND narrows by each child, the cheapest first. OR keeps the files that any child keeps. If the time budget is
    exhausted, the remaining parts are skipped, which keeps more files.

    Args:
        selection: The selection.
        expression: The expression.
        narrow_by_predicate: A function that narrows a selection by one predicate.
        is_expired: A function that returns whether the time budget of the plan is exhausted.
    """
    if is_expired():
        return
    if isinstance(expression, Always):
        if not expression.value:
            selection.clear()
    elif isinstance(expression, And):
        for number, child in enumerate(sorted(expression.children, key=_estimate_cost)):
            if number and selection.is_empty:
                return
            narrow_by_expression(selection, child, narrow_by_predicate, is_expired)
    elif isinstance(expression, Or):
        branches = [
            partial(
                narrow_by_expression, expression=child, narrow_by_predicate=narrow_by_predicate, is_expired=is_expired
            )
            for child in expression.children
        ]
        narrow_to_any(selection, branches, is_expired)
    else:
        assert isinstance(expression, Bound)
        narrow_by_predicate(selection, expression)


def _estimate_cost(expression: Expression) -> int:
    """Return the rank of an expression in the order of evaluation.

    Comparisons of numbers come first, then comparisons of strings, then AND, then the other nested expressions.
    """
    if isinstance(expression, Bound):
        return 1 if get_form(expression.kind) is Form.STRINGS else 0
    return 2 if isinstance(expression, And) else 3


def compare_keys(selection: FileSelection, sides: BoundColumns, op: int, key: bytes) -> None:
    """Keep the files for which a string column satisfies a comparison with a key.

    Args:
        selection: The selection.
        sides: The column in each form in which blocks store it. Forms other than strings are ignored.
        op: The operator: `LE`, `LT`, `GE` or `GT`.
        key: The bytes of the compared string.
    """
    for side in sides:
        if side.form is Form.STRINGS:
            run_comparison(selection, side, op, key, uuid=False)


def run_comparison(selection: FileSelection, side: BoundColumn, op: int, key: Key, *, uuid: bool) -> None:
    """Keep the files for which one column satisfies a comparison with a key. A compiled kernel compares the values.

    Args:
        selection: The selection.
        side: The values to compare, such as the lower bounds of the column in one form.
        op: The operator: `LE`, `LT`, `GE` or `GT`.
        key: The compared value.
        uuid: Whether the values are UUIDs. Clients order them in two ways, so a match in either order counts.
    """
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


def keep_files_with_values(selection: FileSelection, lower: BoundColumn, upper: BoundColumn, bound: Bound) -> None:
    """Keep the files whose range, from `lower` to `upper`, contains one of the integers that `bound` lists."""
    keys = np.array(
        sorted({int(encode_key(Form.INTEGERS, bound.kind, value)) for value in bound.values}), dtype=np.int64
    )
    _scan.narrow_longs_in(lower.layout, upper.layout, lower.low, upper.high, selection.state, selection.mask, keys)


def narrow_to_prefix(selection: FileSelection, lower: BoundColumns, upper: BoundColumns, value: Value) -> None:
    """Keep the files in which a value between `lower` and `upper` may start with the prefix `value`."""
    prefix = _encode_text(value)
    compare_keys(selection, upper, GE, prefix)
    # The end is the first string after all strings with the prefix. There is none for a prefix of 0xFF bytes.
    if prefix_end := find_end_of_prefix(prefix):
        compare_keys(selection, lower, LT, prefix_end)


def list_conditions_outside_prefix(
    lower: BoundColumns, upper: BoundColumns, value: Value
) -> list[Callable[[FileSelection], None]]:
    """Return the alternative conditions of NOT_STARTS_WITH.

    At least one condition is true if a value between `lower` and `upper` may lack the prefix `value`.
    """
    prefix = _encode_text(value)
    conditions: list[Callable[[FileSelection], None]] = [partial(compare_keys, sides=lower, op=LT, key=prefix)]
    if prefix_end := find_end_of_prefix(prefix):
        conditions.append(partial(compare_keys, sides=upper, op=GE, key=prefix_end))
    return conditions


def _encode_text(value: Value) -> bytes:
    assert isinstance(value, str)
    return value.encode("utf-8", "surrogatepass")


def narrow_by_partition(selection: FileSelection, by_spec: Mapping[int, Expression], is_expired: Expired) -> None:
    """Keep the files whose partitions satisfy the condition of their spec.

    Args:
        selection: The selection to narrow.
        by_spec: The condition on partition values (`projection.project_inclusive`) by spec id. Files of specs that
            are not in it are kept.
        is_expired: A function that returns whether the time budget of the plan is exhausted.
    """
    if by_spec.keys() == selection.view.specs and len(by_spec) == 1:  # All files have this spec, so no copy is needed.
        narrow_by_expression(selection, next(iter(by_spec.values())), _narrow_by_partition_predicate, is_expired)
        return
    spec_ids = selection.view.spec_ids
    for spec_id, expression in by_spec.items():
        has_spec = spec_ids == spec_id
        part = FileSelection(selection.view, np.where(has_spec, selection.state, 0).astype(np.uint8), selection.mask)
        narrow_by_expression(part, expression, _narrow_by_partition_predicate, is_expired)
        selection.state[has_spec] = part.state[has_spec]


def _narrow_by_partition_predicate(selection: FileSelection, bound: Bound) -> None:
    """Remove the files from the selection whose partition value does not satisfy a predicate on a partition field.

    Files of manifests whose values of the field are unknown or not comparable are kept.
    """
    column = selection.view.partition(bound.column_id, bound.kind)
    if get_form(bound.kind) is None:
        return
    known_selection = selection
    if not column.is_known_for_all_blocks:
        known_selection = FileSelection(
            selection.view, np.where(column.known, selection.state, 0).astype(np.uint8), selection.mask
        )
    if get_form(bound.kind) is Form.FLOATS:
        _narrow_floats(known_selection, column, bound)
    else:
        _narrow_values(known_selection, column, bound)
    if known_selection is not selection:
        selection.state[column.known] = known_selection.state[column.known]


def _narrow_values(selection: FileSelection, column: PartitionValues, bound: Bound) -> None:
    """Remove the files whose partition value, an integer or a string, does not satisfy a predicate."""
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
        _narrow_values_not_in(selection, column, bound)
    elif op is Op.STARTS_WITH:
        _keep_nulls(selection, column, nulls=False)
        narrow_to_prefix(selection, column.sides, column.sides, values[0])
    elif op is Op.NOT_STARTS_WITH:
        keep_nulls = partial(_keep_nulls, column=column, nulls=True)
        narrow_to_any(selection, [keep_nulls, *list_conditions_outside_prefix(column.sides, column.sides, values[0])])


def _compare_values(
    selection: FileSelection, column: PartitionValues, ops: tuple[int, ...], kind: str, value: Value
) -> None:
    """Keep the files whose partition value satisfies all of the comparisons `ops` with the value.

    Null satisfies no comparison. UUIDs are compared in both of their orders, except for equality (`LE` and `GE`),
    which does not depend on the order.
    """
    _keep_nulls(selection, column, nulls=False)
    for op in ops:
        for side in column.sides:
            run_comparison(
                selection, side, op, encode_key(side.form, kind, value), uuid=kind == "uuid" and len(ops) == 1
            )


def _narrow_values_in(selection: FileSelection, column: PartitionValues, bound: Bound) -> None:
    """Remove the files whose partition value is not in the list of an IN predicate.

    First, the smallest and the largest listed value exclude files. Integers are then compared with the whole list, and
    other types only with a short list.
    """
    _compare_values(selection, column, (LE,), bound.kind, bound.values[-1])
    _compare_values(selection, column, (GE,), bound.kind, bound.values[0])
    if len(column.sides) == 1 and column.sides[0].form is Form.INTEGERS:
        exact_values = column.sides[0]  # A partition value is exact, so it is both the lower and the upper bound.
        keep_files_with_values(selection, exact_values, exact_values, bound)
    elif len(bound.values) <= IN_VALUES_MAX:
        narrow_to_any(
            selection,
            [
                partial(_compare_values, column=column, ops=(LE, GE), kind=bound.kind, value=value)
                for value in bound.values
            ],
        )


def _narrow_values_not_in(selection: FileSelection, column: PartitionValues, bound: Bound) -> None:
    """Remove the files whose partition value a NOT_EQ or NOT_IN predicate excludes. Null satisfies both operators.

    A long list excludes few files and takes long, so it is not evaluated.
    """
    if len(bound.values) > IN_VALUES_MAX:
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


def _keep_nulls(selection: FileSelection, column: PartitionValues, *, nulls: bool) -> None:
    """Keep the files whose value is null if `nulls` is True, and otherwise the files whose value is not null."""
    if not column.has_nulls:
        if nulls:
            selection.clear()
        return
    selection.state[column.nulls == (NO_FILES if nulls else ALL_FILES)] = NO_FILES
    for number in np.flatnonzero((column.nulls == SOME_FILES) & (selection.state != NO_FILES)).tolist():
        packed_values = column.packed[number]
        assert packed_values is not None
        is_present = selection.view.blocks[number].read_column(packed_values).present()
        selection.keep(number, ~is_present if nulls else is_present)


def _narrow_floats(selection: FileSelection, column: PartitionValues, bound: Bound) -> None:
    """Remove the files whose partition value, a float or double, does not satisfy a predicate.

    Such partition values are rare, so numpy evaluates them block by block. NaN is greater than every number, as in
    Java, and the two zeros are equal.
    """
    for number in np.flatnonzero(selection.state).tolist():
        packed_values = column.packed[number]
        block = selection.view.blocks[number]
        if packed_values is None:
            values, is_present = np.full(block.rows, np.nan), np.zeros(block.rows, dtype=np.bool_)
        else:
            values, is_present = block.read_column(packed_values).doubles(), block.read_column(packed_values).present()
        selection.keep(number, _match_floats(values, is_present, bound))


def _match_floats(
    values: npt.NDArray[np.float64], is_present: npt.NDArray[np.bool_], bound: Bound
) -> npt.NDArray[np.bool_]:
    """Return whether each float satisfies the predicate, bool[values].

    NaN is greater than every number, as in Java. A comparison with a zero is true if it is true for either zero.
    """
    nan: npt.NDArray[np.bool_] = is_present & np.isnan(values)
    keys = np.array([float(value) for value in bound.values if not isinstance(value, (str, bytes))])
    op = bound.op
    if op is Op.IS_NULL:
        return ~is_present
    if op is Op.NOT_NULL:
        return is_present
    if op is Op.IS_NAN:
        return nan
    if op is Op.NOT_NAN:
        return ~nan
    matches: npt.NDArray[np.bool_]
    if op in (Op.IN, Op.EQ):
        matches = is_present & np.isin(values, keys)
    elif op in (Op.NOT_IN, Op.NOT_EQ):
        matches = ~is_present | ~np.isin(values, keys) | (values == 0)
    elif op in (Op.LT, Op.LT_EQ):
        matches = is_present & ((values <= keys[0]) if op is Op.LT_EQ or keys[0] == 0 else (values < keys[0]))
    else:
        matches = nan | (is_present & ((values >= keys[0]) if op is Op.GT_EQ or keys[0] == 0 else (values > keys[0])))
    return matches


_POSITIVE = frozenset({*COMPARISONS, Op.EQ, Op.IN, Op.STARTS_WITH})
"""The operators that are true only for values in a range or a list."""
_NEGATIVE = frozenset({Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH})


def narrow_by_stats(selection: FileSelection, expression: Expression, is_expired: Expired) -> None:
    """Remove the files from the selection whose record counts, bounds, null counts or NaN counts exclude all rows.

    The predicates of the expression are bound to columns. Files with an unknown number of rows are kept in any case.
    """
    uncounted_files = _narrow_by_record_count(selection)
    narrow_by_expression(selection, expression, _narrow_by_predicate, is_expired)
    if uncounted_files is not None:
        selection.add(uncounted_files)


def _narrow_by_record_count(selection: FileSelection) -> FileSelection | None:
    """Remove files without rows.

    Returns:
        The files whose record count is unknown (-1 in imported Avro files), which are kept, or None if there are none.
    """
    uncounted_files: FileSelection | None = None
    for number in selection.view.blocks_with_empty_files:
        if not selection.state[number]:
            continue
        counts = selection.view.blocks[number].read_longs("record_count")
        if (counts < 0).any():
            if uncounted_files is None:
                uncounted_files = selection.copy()
                uncounted_files.clear()
            uncounted_files.copy_block(number, selection)
            uncounted_files.keep(number, counts < 0)
        selection.keep(number, counts != 0)
    return uncounted_files


def _narrow_by_predicate(selection: FileSelection, bound: Bound) -> None:
    """Remove the files from the selection whose statistics show that no row satisfies the predicate."""
    if bound.kind in ("list", "map"):
        return  # Statistics of lists and maps count elements, not rows.
    if bound.transform != IDENTITY:
        # The statistics describe the source column. So test the range of its values that the predicate implies, such as
        # a range of timestamps for a day. A predicate that implies no range removes no file.
        ranges = find_source_ranges(bound)
        if not (isinstance(ranges, Bound) and ranges.transform != IDENTITY):
            narrow_by_expression(selection, ranges, _narrow_by_predicate, never_expires)
        return
    column = selection.view.find_statistics(bound.column_id, bound.kind)
    op = bound.op
    if op in _POSITIVE:
        _drop_files(selection, column, column.nulls_only, _test_nulls_only)
        _drop_files(selection, column, column.nans_only, _test_nans_only)
        _narrow_by_bounds(selection, column, bound)
    elif op in _NEGATIVE:
        _narrow_by_exclusion(selection, column, bound)
    elif op is Op.IS_NULL:
        _drop_files(selection, column, column.no_nulls, _test_no_nulls)
    elif op is Op.NOT_NULL:
        _drop_files(selection, column, column.nulls_only, _test_nulls_only)
    elif op is Op.NOT_NAN:
        _drop_files(selection, column, column.nans_only, _test_nans_only)
    else:
        assert op is Op.IS_NAN
        _drop_files(selection, column, column.nulls_only, _test_nulls_only)
        _drop_files(selection, column, column.no_nans, _test_no_nans)


Truths = npt.NDArray[np.bool_]
CountTest = Callable[[Longs, Longs, Longs], Truths]
"""A test of the files of a block by their counts of values, of nulls and of NaNs. A test may ignore some counts."""


def _test_no_nulls(_values: Longs, nulls: Longs, _nans: Longs) -> Truths:
    """Return whether each file has no nulls, by its null count. All count tests have these parameters."""
    return np.asarray(nulls == 0)


def _test_no_nans(_values: Longs, _nulls: Longs, nans: Longs) -> Truths:
    """Return whether each file has no NaNs, by its NaN count. All count tests have these parameters."""
    return np.asarray(nans == 0)


def _test_nulls_only(values: Longs, nulls: Longs, _nans: Longs) -> Truths:
    """Return whether all values of each file are null. `_nans` is unused: all count tests have these parameters."""
    return np.asarray((values != MISSING) & (nulls == values))


def _test_nans_only(values: Longs, _nulls: Longs, nans: Longs) -> Truths:
    """Return whether all values of each file are NaN. `_nulls` is unused: all count tests have these parameters."""
    return np.asarray((values != MISSING) & (nans == values))


def _drop_files(selection: FileSelection, column: ColumnStatistics, flags: Flags | None, test: CountTest) -> None:
    """Remove the files for which `test` is true.

    `flags`, uint8[blocks], is `NO_FILES`, `ALL_FILES` or `SOME_FILES`: whether the test is true for no file of a block,
    for all files, or for some files. None means `NO_FILES` for all blocks.
    """
    if flags is None:
        return
    selection.state[flags == ALL_FILES] = NO_FILES
    for number in np.flatnonzero((flags == SOME_FILES) & (selection.state != NO_FILES)).tolist():
        selection.keep(number, ~_test_block(selection.view, column, number, test))


def _test_block(view: TableView, column: ColumnStatistics, number: int, test: CountTest) -> npt.NDArray[np.bool_]:
    """Return whether the test is true for each file of a block, bool[files]."""
    entry = column.entries[number]
    assert entry is not None
    block = view.blocks[number]
    values, nulls, nans = (block.count(name, entry.column_id) for name in COUNTS[:3])
    return test(values, nulls, nans)


def _narrow_by_bounds(selection: FileSelection, column: ColumnStatistics, bound: Bound) -> None:
    """Remove the files from the selection in which no value between the column's bounds satisfies the predicate.

    The operator is a comparison, EQ, IN or STARTS_WITH.
    """
    op = bound.op
    if op in COMPARISONS:
        compare = partial(_compare_bounds, column=column, op=COMPARISONS[op], kind=bound.kind, value=bound.values[0])
        if bound.kind == "uuid":
            # Writers order UUIDs in two ways, so also keep the files whose bounds exclude a value in only one of them.
            narrow_to_any(selection, [compare, *_make_order_dependent_conditions(column)])
        else:
            compare(selection)
    elif op is Op.EQ:
        _narrow_by_equality(selection, column, bound.kind, bound.values[0])
    elif op is Op.STARTS_WITH:
        narrow_to_prefix(selection, column.lower, column.upper, bound.values[0])
    else:
        _narrow_bounds_in(selection, column, bound)


def _compare_bounds(selection: FileSelection, column: ColumnStatistics, op: int, kind: str, value: Value) -> None:
    """Keep the files whose bounds allow a value that satisfies the comparison.

    A file may have a smaller value if its lower bound is smaller, and a larger value if its upper bound is larger.
    """
    sides = column.lower if op in (LE, LT) else column.upper
    for side in sides:
        key = encode_key(side.form, kind, value)
        if side.form is Form.FLOATS and key == 0:
            _compare_zero(selection, side, op, float(key))
        else:
            run_comparison(selection, side, op, key, uuid=kind == "uuid")


def _make_order_dependent_conditions(column: ColumnStatistics) -> list[Callable[[FileSelection], None]]:
    """Return the alternative conditions under which the result of comparing UUID bounds depends on the order of UUIDs.

    Some writers and readers compare UUIDs as unsigned bytes, others as two signed 64-bit numbers. At least one
    condition is true if exactly one of the two bounds has its first bit set, or if only one bound exists. A value that
    is between such bounds in one order may be outside of them in the other order.
    """

    def compare_bounds(selection: FileSelection, lower: int, upper: int) -> None:
        compare_keys(selection, column.lower, lower, b"\x80")
        compare_keys(selection, column.upper, upper, b"\x80")

    # These comparisons keep only files without a bound, because no UUID is less than the first key, or greater than
    # the second key.
    unbounded_conditions = [
        partial(compare_keys, sides=column.lower, op=LT, key=b""),
        partial(compare_keys, sides=column.upper, op=GE, key=b"\xff" * 17),
    ]
    return [
        *unbounded_conditions,
        partial(compare_bounds, lower=LT, upper=GE),
        partial(compare_bounds, lower=GE, upper=LT),
    ]


def _compare_zero(selection: FileSelection, side: BoundColumn, op: int, zero: float) -> None:
    """Keep the files in which a bound of a float column satisfies a comparison with 0.0 or -0.0.

    A file is kept if it matches in SQL, where -0.0 equals 0.0, or in Iceberg, where -0.0 is less than 0.0. So `x < 0.0`
    may match a row with -0.0, and `x > -0.0` may match a row with 0.0.
    """
    includes_other_zero = (op == LT and not math.copysign(1, zero) < 0) or (op == GT and math.copysign(1, zero) < 0)
    if not includes_other_zero:
        run_comparison(selection, side, op, 0.0, uuid=False)
        return
    # The files whose bound is the other zero: -0.0 for `x < 0.0`, and 0.0 for `x > -0.0`.
    zero_files = selection.copy()
    run_comparison(selection, side, op, 0.0, uuid=False)
    run_comparison(zero_files, side, LE if op == LT else GE, 0.0, uuid=False)
    view = selection.view
    for number in np.flatnonzero((zero_files.state != 0) & (side.low <= 0) & (side.high >= 0)).tolist():
        packed_column = side.packed[number]
        if packed_column is not None:
            values = view.blocks[number].read_column(packed_column).doubles()
            zero_files.keep(number, (values == 0) & (np.signbit(values) == (op == LT)))
    zero_files.state[~((side.low <= 0) & (side.high >= 0))] = 0
    selection.add(zero_files)


def _narrow_by_exclusion(selection: FileSelection, column: ColumnStatistics, bound: Bound) -> None:
    """Remove the files from the selection in which a NOT_EQ, NOT_IN or NOT_STARTS_WITH predicate excludes every row.

    A file is removed only if it has neither null nor NaN, and its bounds prove that each row has an excluded value.
    Long lists take too long, and UUIDs have no certain order, so neither is evaluated.
    """
    if len(bound.values) > IN_VALUES_MAX or bound.kind == "uuid":
        return
    is_float = get_form(bound.kind) is Form.FLOATS
    if column.no_nulls is None or (is_float and column.no_nans is None):
        return
    is_candidate = (selection.state != 0) & (column.no_nulls != 0)
    if is_float:
        is_candidate &= column.no_nans != 0
    if not is_candidate.any():
        return
    # A copy of the candidate blocks, in which only the files that may have other values stay.
    part = FileSelection(
        selection.view, np.where(is_candidate, selection.state, 0).astype(np.uint8), selection.mask.copy()
    )
    for value in bound.values:
        if not (is_float and value == 0):  # Clients differ on whether -0.0 equals 0.0, so zeros exclude no file.
            narrow_to_any(part, _make_exclusion_conditions(column, bound, value))
    view = selection.view
    for number in np.flatnonzero(is_candidate & (part.state != ALL_FILES)).tolist():
        first, end = view.starts[number], view.starts[number + 1]
        is_kept = part.mask[first:end] != 0 if part.state[number] else np.zeros(end - first, dtype=np.bool_)
        is_kept |= ~_test_block(view, column, number, _test_no_nulls)
        if is_float:
            is_kept |= ~_test_block(view, column, number, _test_no_nans)
        selection.keep(number, is_kept)


def _make_exclusion_conditions(
    column: ColumnStatistics, bound: Bound, value: Value
) -> list[Callable[[FileSelection], None]]:
    """Return the alternative conditions under which bounds allow a value other than `value` in a file.

    For NOT_STARTS_WITH, the bounds allow a value without the prefix. A file for which no condition is true has only
    excluded values.
    """
    if bound.op is not Op.NOT_STARTS_WITH:
        return [
            partial(_compare_bounds, column=column, op=LT, kind=bound.kind, value=value),
            partial(_compare_bounds, column=column, op=GT, kind=bound.kind, value=value),
        ]
    return list_conditions_outside_prefix(column.lower, column.upper, value)


def _narrow_bounds_in(selection: FileSelection, column: ColumnStatistics, bound: Bound) -> None:
    """Keep the files in which a value that the IN predicate lists is between the bounds."""
    values = bound.values
    # Clients order UUIDs in two ways. The first and last value are the minimum and maximum only if both ways are equal.
    if bound.kind != "uuid" or _have_one_order(values):
        _compare_bounds(selection, column, LE, bound.kind, values[-1])
        _compare_bounds(selection, column, GE, bound.kind, values[0])
    sides = _read_integer_sides(column)
    if sides is not None:
        keep_files_with_values(selection, *sides, bound)
        return
    if len(values) > IN_VALUES_MAX:
        return
    narrow_to_any(
        selection, [partial(_narrow_by_equality, column=column, kind=bound.kind, value=value) for value in values]
    )


def _read_integer_sides(column: ColumnStatistics) -> tuple[BoundColumn, BoundColumn] | None:
    """Return the lower and the upper bounds, or None if some bounds are not integers.

    `column.lower` and `column.upper` have an item for each form of the bounds. So they have several items, or none, if
    the blocks store the bounds in several forms, or store no bounds.
    """
    if len(column.lower) != 1 or len(column.upper) != 1:
        return None
    lower, upper = column.lower[0], column.upper[0]
    return (lower, upper) if lower.form is Form.INTEGERS and upper.form is Form.INTEGERS else None


def narrow_to_keys(selection: FileSelection, column_id: int, kind: str, keys: KeySet) -> None:
    """Keep the files that may contain one of the keys, by bounds and null counts.

    Args:
        selection: The selection to narrow.
        column_id: The field id of the column.
        kind: The Iceberg type of the keys.
        keys: The keys, in ascending order. There must be at least one key.
    """
    column = selection.view.find_statistics(column_id, kind)
    _drop_files(selection, column, column.nulls_only, _test_nulls_only)
    if kind == "uuid":
        # Some writers order UUIDs as unsigned bytes, others as two signed numbers. The keys have only the first order,
        # so their lowest and highest key cannot be compared with all bounds.
        return
    low, high = (pack_key(keys.get_key(position), kind) for position in (0, len(keys) - 1))
    for op, key, sides in ((LE, high, column.lower), (GE, low, column.upper)):
        for side in sides:
            if (side.form is Form.STRINGS) == isinstance(key, bytes):
                run_comparison(selection, side, op, key, uuid=False)
    integer_sides = _read_integer_sides(column)
    if integer_sides is not None and keys.distinct.codes is not None:
        # The kernel compares signed integers. The codes of keys are unsigned: the values plus 2**63, except booleans.
        lower, upper = integer_sides
        key_longs = (keys.distinct.codes ^ np.uint64(_compute_code_bias(kind))).view(np.int64)
        state, mask = selection.state, selection.mask
        _scan.narrow_longs_in(lower.layout, upper.layout, lower.low, upper.high, state, mask, key_longs)


def pack_key(key: int | bytes, kind: str) -> int | bytes:
    """Return an index key in the encoding of column statistics."""
    return key if isinstance(key, bytes) else key - _compute_code_bias(kind)


def _compute_code_bias(kind: str) -> int:
    """Return the number that is added to a value to make its integer code (`keys.py`)."""
    return 0 if kind == "boolean" else 1 << 63


def _have_one_order(uuids: Sequence[Value]) -> bool:
    """Return whether UUIDs that are sorted as unsigned numbers are also sorted in the order of signed halves.

    Some writers compute bounds in the order of two signed 64-bit numbers, as Java compares UUIDs.
    """
    # The first bit of each half, in the bytes 0 and 8, is the sign. If the signs are equal, both orders are equal.
    return len({(uuid[0] >> 7, uuid[8] >> 7) for uuid in uuids if isinstance(uuid, bytes)}) == 1


def _narrow_by_equality(selection: FileSelection, column: ColumnStatistics, kind: str, value: Value) -> None:
    """Keep the files whose bounds enclose the value."""
    _compare_bounds(selection, column, LE, kind, value)
    _compare_bounds(selection, column, GE, kind, value)


def keep_appended_files(selection: FileSelection, snapshot_ids: set[int]) -> None:
    """Keep the files that one of the snapshots added.

    An entry without a snapshot id inherits the snapshot id of its manifest.
    """
    view = selection.view
    appended_ids = np.array(sorted(snapshot_ids), dtype=np.int64)
    for number in np.flatnonzero(selection.state).tolist():
        block = view.blocks[number]
        ids = block.read_longs("snapshot_id")
        ids = np.where(ids == MISSING, view.manifests[number].added_snapshot_id or MISSING, ids)
        selection.keep(number, (block.read_longs("status") == ADDED) & np.isin(ids, appended_ids))
